//! The `posix` backend: a local store by ordinary positional reads. The reference for the others.
//!
//! A blocking [`fetch`](ExpertTier::fetch) reads on the caller's thread. Submitted requests go to
//! a few reader threads over one queue.
//!
//! Bounds, all of them settings:
//! * A request that a reader has ends when that reader has had nothing of the disk for `deadline`,
//!   and in any case `total` after the reader took it.
//! * A request that waits in the queue ends when no reader has had anything of the disk for
//!   `deadline`. While one has, waiting costs no request its time. The queue is first in, first out,
//!   and each request before another ends within `total`, so none waits for ever.
//!
//! A read of a local file cannot be given up once the kernel has it. A submitted request ends all the
//! same: with its slot while it waits in the queue, and without once a reader has it, which then
//! keeps the slot until its read ends. The readers look at the bounds between two reads; where all of
//! them hang, the caller's own wait in `poll` does. Closing waits for the readers as long as for a
//! silent disk, and leaves behind those that hang.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::account::Accounts;
use crate::arena::{Filling, Free, Slot};
use crate::error::{Bound, FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::owed::Owed;
use crate::progress::Progress;
use crate::store::manifest::Manifest;
use crate::store::{ExpertStore, StoreError};
use crate::tier::{
    Completion, CompletionQueue, ExpertTier, FetchRequest, Fetched, Outcome, Source, Ticket,
    TierKind, after, pop_and_look,
};
use crate::worker::{End, Worker};

/// Bytes per read: small enough that a piece is still in the cache when it is checked.
const PIECE_BYTES: usize = 256 * 1024;
/// How often a waiting caller looks at the deadlines.
const TICK: Duration = Duration::from_millis(50);

/// Settings of [`PosixTier`].
#[derive(Clone, Debug)]
pub struct PosixOptions {
    /// Threads that serve submitted requests, 1 to 64.
    pub threads: u32,
    /// Longest time in which nothing comes of the disk.
    pub deadline: Duration,
    /// Longest time from a reader's first look at a record to the request's end.
    pub total: Duration,
}

impl Default for PosixOptions {
    /// Two threads keep a disk and a core busy at once.
    fn default() -> Self {
        Self { threads: 2, deadline: Duration::from_secs(2), total: Duration::from_secs(30) }
    }
}

/// A local store by ordinary reads.
pub struct PosixTier {
    shared: Arc<Shared>,
    readers: Vec<Worker>,
}

struct Shared {
    store: ExpertStore,
    options: PosixOptions,
    kind: TierKind,
    jobs: Mutex<Jobs>,
    /// What came to any reader.
    delivered: Progress,
    /// What came to each reader.
    delivered_to: Box<[Progress]>,
    bell: Condvar,
    healthy: AtomicBool,
    accounts: Accounts,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// What each reader is at; `None` also once the caller has been told that it is late.
    reading: Box<[Option<Reading>]>,
    closing: bool,
}

struct Job {
    owed: Owed,
    slot: Slot<Free>,
}

/// A request that a reader has.
struct Reading {
    owed: Owed,
    since: Instant,
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
        let reading = (0..threads).map(|_| None).collect();
        let shared = Arc::new(Shared {
            store,
            options,
            kind,
            jobs: Mutex::new(Jobs { reading, ..Jobs::default() }),
            delivered: Progress::new(),
            delivered_to: (0..threads).map(|_| Progress::new()).collect(),
            bell: Condvar::new(),
            healthy: AtomicBool::new(true),
            accounts: Accounts::new(kind, &[Source::Local]),
        });
        let mut tier = Self { shared, readers: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&tier.shared);
            let work = move || shared.serve(n as usize);
            let reader = Worker::start(format!("{kind}-{n}"), work).map_err(|source| {
                StoreError::Io { action: "start a reader thread for", path: dir.clone(), source }
            })?;
            tier.readers.push(reader);
        }
        Ok(tier)
    }
}

impl Drop for PosixTier {
    fn drop(&mut self) {
        let mut jobs = self.shared.lock();
        jobs.closing = true;
        let waiting = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        self.shared.bell.notify_all();
        waiting.into_iter().for_each(|Job { owed, slot }| {
            let error = owed.closed();
            self.shared.end(owed, Outcome::Failed(FetchFailure::new(error, slot)));
        });
        let until = after(self.shared.options.deadline.saturating_add(TICK));
        for reader in self.readers.drain(..) {
            reader.join_until(until);
        }
        // What a reader that was left behind has.
        self.shared.end_reading(|_, reading| Some(reading.owed.closed()));
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

    fn bound(&self) -> Duration {
        self.shared.options.deadline.saturating_add(self.shared.options.total)
    }

    fn ended(&self) -> u64 {
        self.shared.accounts.ended()
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let submitted = Instant::now();
        let jobs = batch.drain(..).map(|request| {
            let (ticket, key, slot) = request.into_parts();
            Job { owed: Owed::new(self.shared.kind, (ticket, key), queue, submitted), slot }
        });
        self.shared.lock().waiting.extend(jobs);
        self.shared.bell.notify_all();
    }

    fn cancel(&self, ticket: Ticket) {
        let mut jobs = self.shared.lock();
        let at = jobs.waiting.iter().position(|job| job.owed.ticket == ticket);
        let cancelled = at.and_then(|at| jobs.waiting.remove(at));
        drop(jobs);
        if let Some(Job { owed, slot }) = cancelled {
            let error = FetchError::Cancelled { key: owed.key };
            self.shared.end(owed, Outcome::Failed(FetchFailure::new(error, slot)));
        }
    }

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        pop_and_look(wait, TICK, |wait| queue.pop(wait), || self.shared.expire())
    }

    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<crate::tier::Landed> {
        pop_and_look(wait, TICK, |wait| queue.pop_landed(wait), || self.shared.expire())
    }

    fn fetch(&self, key: ExpertKey, slot: Slot<Free>) -> Result<Fetched, FetchFailure> {
        let start = Instant::now();
        let outcome = self.shared.read(key, slot, || ());
        self.shared.accounts.count(&outcome, start.elapsed());
        outcome.into()
    }
}

impl Shared {
    /// The life of reader thread `reader`.
    fn serve(&self, reader: usize) -> End {
        while let Some((key, slot)) = self.next_job(reader) {
            let outcome = self.read(key, slot, || self.note_delivery(reader));
            // If nothing is owed any more, the slot goes back to its arena here.
            let reading = self.lock().reading[reader].take();
            if let Some(Reading { owed, .. }) = reading {
                self.end(owed, outcome);
            }
        }
        End::Clean
    }

    /// Waits for work without a bound of its own: dropping the backend wakes every reader.
    fn next_job(&self, reader: usize) -> Option<(ExpertKey, Slot<Free>)> {
        loop {
            self.expire();
            let mut jobs = self.lock();
            if jobs.closing {
                return None;
            }
            if let Some(Job { owed, slot }) = jobs.waiting.pop_front() {
                let key = owed.key;
                // Its own silence begins now; for those that wait this is no sign of the disk.
                self.delivered_to[reader].note();
                jobs.reading[reader] = Some(Reading { owed, since: Instant::now() });
                return Some((key, slot));
            }
            drop(self.bell.wait(jobs));
        }
    }

    /// The disk has given something to `reader`.
    fn note_delivery(&self, reader: usize) {
        self.delivered_to[reader].note();
        self.delivered.note();
    }

    /// Ends the requests whose time is over.
    fn expire(&self) {
        let deadline = self.options.deadline;
        let silence = |owed: &Owed| owed.age().min(self.delivered.silence());
        loop {
            // In order of submission, so the first is the oldest.
            let late = self.lock().waiting.pop_front_if(|job| silence(&job.owed) > deadline);
            let Some(Job { owed, slot }) = late else { break };
            let error = owed.late((Bound::Due, silence(&owed).max(deadline)));
            self.end(owed, Outcome::Failed(FetchFailure::new(error, slot)));
        }
        self.end_reading(|reader, Reading { owed, since }| {
            let (silence, age) = (self.delivered_to[reader].silence(), since.elapsed());
            if silence > deadline {
                Some(owed.late((Bound::Due, silence)))
            } else if age > self.options.total {
                Some(owed.late((Bound::Total, age)))
            } else {
                None
            }
        });
    }

    /// Ends the requests that readers are at and for which `why` says why, without their slots.
    fn end_reading(&self, why: impl Fn(usize, &Reading) -> Option<FetchError>) {
        let readers = self.lock().reading.len();
        for reader in 0..readers {
            let mut error = None;
            let late = self.lock().reading[reader].take_if(|reading| {
                error = why(reader, reading).map(Box::new);
                error.is_some()
            });
            if let (Some(Reading { owed, .. }), Some(error)) = (late, error) {
                self.healthy.store(false, Ordering::Relaxed);
                self.end(owed, Outcome::Failed(FetchFailure { error, slot: None }));
            }
        }
    }

    fn end(&self, mut owed: Owed, outcome: Outcome) {
        self.accounts.count(&outcome, owed.age());
        owed.pay(outcome);
    }

    /// Reads a record; `came` hears of each piece.
    fn read(&self, key: ExpertKey, slot: Slot<Free>, came: impl Fn()) -> Outcome {
        let origin = || self.store.dir().display().to_string();
        match self.receive(key, slot, came) {
            Ok(slot) => self.accounts.judge(slot, self.store.manifest(), origin),
            Err(failure) => Outcome::Failed(failure),
        }
    }

    /// Fills `slot` with the record, to its last byte.
    fn receive(
        &self,
        key: ExpertKey,
        slot: Slot<Free>,
        came: impl Fn(),
    ) -> Result<Slot<Filling>, FetchFailure> {
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
                    came();
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
        Ok(slot)
    }

    /// Jobs are moved whole, so a lock that a panic poisoned still guards sound data.
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "posix_tests.rs"]
mod tests;
