//! The `posix` backend: a local store by ordinary positional reads. The reference for the others.
//!
//! A blocking [`fetch`](ExpertTier::fetch) reads on the caller's thread. Submitted requests go to
//! a few reader threads over one queue. A read of a local file cannot be given up once the kernel
//! has it, so the deadline bounds the wait in the queue, not a read that has begun.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::account::Accounts;
use crate::arena::{Free, Slot};
use crate::error::{Bound, FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::store::manifest::Manifest;
use crate::store::{ExpertStore, StoreError};
use crate::tier::{
    Completion, CompletionQueue, ExpertTier, FetchRequest, Fetched, Source, Ticket, TierKind,
};

/// Bytes per read: small enough that a piece is still in the cache when it is checked.
const PIECE_BYTES: usize = 256 * 1024;

/// Settings of [`PosixTier`].
#[derive(Clone, Debug)]
pub struct PosixOptions {
    /// Threads that serve submitted requests, 1 to 64.
    pub threads: u32,
    /// Longest wait of a request in the queue.
    pub deadline: Duration,
}

impl Default for PosixOptions {
    /// Two threads keep a disk and a core busy at once.
    fn default() -> Self {
        Self { threads: 2, deadline: Duration::from_secs(2) }
    }
}

/// A local store by ordinary reads.
pub struct PosixTier {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

struct Shared {
    store: ExpertStore,
    options: PosixOptions,
    kind: TierKind,
    jobs: Mutex<Jobs>,
    bell: Condvar,
    healthy: AtomicBool,
    accounts: Accounts,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    closing: bool,
}

struct Job {
    request: FetchRequest,
    queue: CompletionQueue,
    submitted: Instant,
}

impl PosixTier {
    /// Opens the store in `dir` and starts the reader threads.
    ///
    /// # Errors
    /// The store cannot be opened, or a thread cannot be started.
    pub fn open(dir: &Path, options: PosixOptions) -> Result<Self, StoreError> {
        Self::start(ExpertStore::open(dir)?, options, TierKind::Posix)
    }

    /// Serves an open store as a backend of kind `kind`.
    pub(crate) fn start(
        store: ExpertStore,
        options: PosixOptions,
        kind: TierKind,
    ) -> Result<Self, StoreError> {
        let dir = store.dir().to_owned();
        let threads = options.threads.clamp(1, 64);
        let shared = Arc::new(Shared {
            store,
            options,
            kind,
            jobs: Mutex::default(),
            bell: Condvar::new(),
            healthy: AtomicBool::new(true),
            accounts: Accounts::new(kind, Source::Local),
        });
        let mut tier = Self { shared, readers: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&tier.shared);
            let reader = std::thread::Builder::new()
                .name(format!("{kind}-{n}"))
                .spawn(move || shared.serve())
                .map_err(|source| StoreError::Io {
                    action: "start a reader thread for",
                    path: dir.clone(),
                    source,
                })?;
            tier.readers.push(reader);
        }
        Ok(tier)
    }
}

impl Drop for PosixTier {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.bell.notify_all();
        for reader in self.readers.drain(..) {
            if reader.join().is_err() {
                tracing::error!("a posix reader thread had panicked");
            }
        }
    }
}

impl ExpertTier for PosixTier {
    fn kind(&self) -> TierKind {
        self.shared.kind
    }

    fn manifest(&self) -> &Arc<Manifest> {
        self.shared.store.manifest()
    }

    fn healthy(&self) -> bool {
        self.shared.healthy.load(Ordering::Relaxed)
    }

    fn deadline(&self) -> Duration {
        self.shared.options.deadline
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let submitted = Instant::now();
        let jobs = batch.drain(..).map(|request| Job { request, queue: queue.clone(), submitted });
        self.shared.lock().waiting.extend(jobs);
        self.shared.bell.notify_all();
    }

    fn cancel(&self, ticket: Ticket) {
        let mut jobs = self.shared.lock();
        let at = jobs.waiting.iter().position(|job| job.request.ticket() == ticket);
        let cancelled = at.and_then(|at| jobs.waiting.remove(at));
        drop(jobs);
        if let Some(job) = cancelled {
            let key = job.request.key();
            self.shared
                .end(job, |_, slot| Err(FetchFailure::new(FetchError::Cancelled { key }, slot)));
        }
    }

    fn fetch(&self, key: ExpertKey, slot: Slot<Free>) -> Result<Fetched, FetchFailure> {
        let start = Instant::now();
        let outcome = self.shared.read(key, slot);
        self.shared.account(&outcome, start.elapsed());
        outcome
    }
}

impl Shared {
    /// A reader thread's life.
    fn serve(&self) {
        while let Some((job, closing)) = self.next_job() {
            let waited = job.submitted.elapsed();
            let late = waited > self.options.deadline;
            self.end(job, |key, slot| {
                let backend = self.kind;
                if closing {
                    Err(FetchFailure::new(FetchError::Closed { key, backend }, slot))
                } else if late {
                    let error = FetchError::Deadline { key, backend, waited, bound: Bound::Due };
                    Err(FetchFailure::new(error, slot))
                } else {
                    self.read(key, slot)
                }
            });
        }
    }

    /// Waits for work without a bound of its own: dropping the backend wakes every reader.
    fn next_job(&self) -> Option<(Job, bool)> {
        let mut jobs = self.lock();
        loop {
            let closing = jobs.closing;
            match jobs.waiting.pop_front() {
                Some(job) => return Some((job, closing)),
                None if closing => return None,
                None => jobs = self.bell.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn end(
        &self,
        job: Job,
        how: impl FnOnce(ExpertKey, Slot<Free>) -> Result<Fetched, FetchFailure>,
    ) {
        let (ticket, key, slot) = job.request.into_parts();
        let outcome = how(key, slot);
        self.account(&outcome, job.submitted.elapsed());
        job.queue.push(Completion { ticket, key, outcome });
    }

    fn read(&self, key: ExpertKey, slot: Slot<Free>) -> Result<Fetched, FetchFailure> {
        let manifest = self.store.manifest();
        let identity = match manifest.identity(key) {
            Ok(identity) => identity,
            Err(error) => return Err(FetchFailure::new(error, slot)),
        };
        let mut slot = slot.begin(identity).map_err(|r| FetchFailure::too_small(key, r))?;
        let mut offset = 0;
        while slot.remaining() > 0 {
            let spare = slot.spare();
            let piece = spare.len().min(PIECE_BYTES);
            match self.store.read_uninit_at(key, offset, &mut spare[..piece]) {
                Ok(count) => {
                    slot.advance(count);
                    offset += count as u64;
                }
                Err(error) => {
                    self.healthy.store(false, Ordering::Relaxed);
                    return Err(FetchFailure::new(FetchError::Store(error), slot.abandon()));
                }
            }
        }
        self.healthy.store(true, Ordering::Relaxed);
        self.accounts.judge(slot, manifest, || self.store.dir().display().to_string())
    }

    fn account(&self, outcome: &Result<Fetched, FetchFailure>, took: Duration) {
        match outcome {
            Ok(fetched) => {
                self.accounts.fetched(fetched.residency.payload().len() as u64, took);
            }
            Err(failure) => self.accounts.failed(&failure.error),
        }
    }

    /// Jobs are moved whole, so a lock that a panic poisoned still guards sound data.
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
