//! The `uma` backend: a local store by `O_DIRECT` through io_uring, straight into the arena.
//!
//! One thread drives the ring: it starts reads, reaps them, and checks each piece of a record
//! while the disk brings the next. Where the kernel, the file system or a container refuses
//! io_uring or `O_DIRECT`, reader threads with ordinary reads take over, and the log says why,
//! once.
//!
//! A read that the kernel has cannot be given up. A request whose record has not come by its
//! deadline ends, but its slot stays with the ring until the last read of it has.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::account::Accounts;
use crate::arena::{ExpertArena, Filling, Slot};
use crate::direct::ring::{Extent, Finished, Ring, RingOptions, Tagged};
use crate::direct::{DirectFiles, NotDirect};
use crate::error::{Bound, FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::layout::STRIDE_ALIGN;
use crate::posix::{PosixOptions, PosixTier};
use crate::store::manifest::{Manifest, layer_file_name};
use crate::store::{ExpertStore, StoreError};
use crate::tier::{
    Completion, CompletionQueue, ExpertTier, FetchRequest, Fetched, Source, Ticket, TierKind,
};

/// How often the ring's thread looks at deadlines.
const TICK: Duration = Duration::from_millis(50);

/// Settings of [`UmaTier`].
#[derive(Clone, Debug)]
pub struct UmaOptions {
    /// Reads in flight at once, 1 to 4096.
    pub depth: u32,
    /// Bytes of one read, a multiple of 4096 up to 16 MiB.
    pub piece_bytes: u32,
    /// Longest time from submitting a request to its record.
    pub deadline: Duration,
}

impl Default for UmaOptions {
    /// 64 reads of 512 KiB keep any NVMe disk busy; pieces of that size are checked while the
    /// next are read, and are large enough that a disk does not notice them.
    fn default() -> Self {
        Self { depth: 64, piece_bytes: 512 * 1024, deadline: Duration::from_secs(2) }
    }
}

/// A local store, read past the page cache where that can be had.
pub struct UmaTier(Engine);

enum Engine {
    Ring(RingTier),
    Threads(PosixTier),
}

struct RingTier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    store: ExpertStore,
    deadline: Duration,
    ring: Ring<Reading>,
    closing: AtomicBool,
    healthy: AtomicBool,
    accounts: Accounts,
    /// Why the arena is not registered, said once.
    plain_reads: OnceLock<()>,
}

type Reading = Tagged<Slot<Filling>, Call>;

/// One request, apart from its slot.
struct Call {
    ticket: Ticket,
    key: ExpertKey,
    queue: CompletionQueue,
    submitted: Instant,
    /// The caller has been told already: the deadline passed.
    told: bool,
}

impl UmaTier {
    /// Opens the store in `dir`.
    ///
    /// # Errors
    /// The store cannot be opened, or no thread can be started.
    pub fn open(dir: &Path, options: &UmaOptions) -> Result<Self, StoreError> {
        let store = ExpertStore::open(dir)?;
        match ring(&store, options) {
            Ok(ring) => RingTier::start(store, ring, options).map(Engine::Ring).map(Self),
            Err(reason) => {
                tracing::warn!(store = %dir.display(), %reason,
                    "uma reads through the page cache, by threads");
                let options =
                    PosixOptions { deadline: options.deadline, ..PosixOptions::default() };
                PosixTier::start(store, options, TierKind::Uma).map(Engine::Threads).map(Self)
            }
        }
    }

    /// Whether reads go past the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        matches!(self.0, Engine::Ring(_))
    }

    fn inner(&self) -> &dyn ExpertTier {
        match &self.0 {
            Engine::Ring(tier) => tier,
            Engine::Threads(tier) => tier,
        }
    }
}

fn ring(store: &ExpertStore, options: &UmaOptions) -> Result<Ring<Reading>, NotDirect> {
    let files = DirectFiles::open(store)?;
    let align = STRIDE_ALIGN as u32;
    let piece = options.piece_bytes.clamp(align, 16 << 20) / align * align;
    let options = RingOptions { depth: options.depth.clamp(1, 4096), piece_bytes: piece as usize };
    Ring::new(&files.0, options).map_err(NotDirect::Ring)
}

impl ExpertTier for UmaTier {
    fn kind(&self) -> TierKind {
        TierKind::Uma
    }

    fn manifest(&self) -> &Arc<Manifest> {
        self.inner().manifest()
    }

    fn healthy(&self) -> bool {
        self.inner().healthy()
    }

    fn deadline(&self) -> Duration {
        self.inner().deadline()
    }

    fn use_arena(&self, arena: &ExpertArena) {
        self.inner().use_arena(arena);
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        self.inner().submit(batch, queue);
    }

    fn cancel(&self, ticket: Ticket) {
        self.inner().cancel(ticket);
    }

    fn fetch(
        &self,
        key: ExpertKey,
        slot: Slot<crate::arena::Free>,
    ) -> Result<Fetched, FetchFailure> {
        self.inner().fetch(key, slot)
    }
}

impl RingTier {
    fn start(
        store: ExpertStore,
        ring: Ring<Reading>,
        options: &UmaOptions,
    ) -> Result<Self, StoreError> {
        let path = store.dir().to_owned();
        let shared = Arc::new(Shared {
            store,
            deadline: options.deadline,
            ring,
            closing: AtomicBool::new(false),
            healthy: AtomicBool::new(true),
            accounts: Accounts::new(TierKind::Uma, Source::Local),
            plain_reads: OnceLock::new(),
        });
        let driver = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new()
                .name("uma".into())
                .spawn(move || driver.drive())
                .map_err(|source| StoreError::Io { action: "start a reader for", path, source })?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for RingTier {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.ring.cancel(|_| true);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the uma reader's thread had panicked");
        }
    }
}

impl ExpertTier for RingTier {
    fn kind(&self) -> TierKind {
        TierKind::Uma
    }

    fn manifest(&self) -> &Arc<Manifest> {
        self.shared.store.manifest()
    }

    fn healthy(&self) -> bool {
        self.shared.healthy.load(Ordering::Relaxed)
    }

    fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    fn use_arena(&self, arena: &ExpertArena) {
        if self.shared.ring.has_registered() {
            return;
        }
        if let Err(error) = self.shared.ring.register(Box::new(arena.clone())) {
            self.shared.plain_reads.get_or_init(|| {
                tracing::info!(%error, "the arena could not be registered with io_uring, which \
                    counts against the locked-memory limit once more: reads pin their pages");
            });
        }
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let submitted = Instant::now();
        let jobs = batch.drain(..).filter_map(|request| self.shared.job(request, queue, submitted));
        self.shared.ring.submit(jobs);
    }

    fn cancel(&self, ticket: Ticket) {
        self.shared.ring.cancel(|reading| reading.tag.ticket == ticket);
    }
}

impl Shared {
    /// What the ring is to read for a request; one that cannot be is completed here.
    fn job(
        &self,
        request: FetchRequest,
        queue: &CompletionQueue,
        submitted: Instant,
    ) -> Option<(Extent, Reading)> {
        let (ticket, key, slot) = request.into_parts();
        let manifest = self.store.manifest();
        let call = Call { ticket, key, queue: queue.clone(), submitted, told: false };
        let identity = match manifest.identity(key) {
            Ok(identity) => identity,
            Err(error) => return self.refuse(&call, FetchFailure::new(error, slot)),
        };
        let layout = manifest.layout();
        let (Some(file), Some(layer)) = (layout.layer_index(key.layer), layout.layer(key.layer))
        else {
            return None;
        };
        let extent = Extent {
            // Layers are at most `MAX_LAYERS`.
            file: file as u32,
            offset: u64::from(key.expert) * layer.stride(),
            // Reads end on a page; what follows the record is its own padding.
            bytes: usize::try_from(layer.stride()).unwrap_or(usize::MAX),
        };
        match slot.begin(identity) {
            Ok(slot) => Some((extent, Tagged { memory: slot, tag: call })),
            Err(refused) => self.refuse(&call, FetchFailure::too_small(key, refused)),
        }
    }

    fn refuse<T>(&self, call: &Call, failure: FetchFailure) -> Option<T> {
        self.complete(call, Err(failure));
        None
    }

    /// The thread of the ring.
    fn drive(&self) {
        let mut finished = Vec::new();
        let mut looked = Instant::now();
        let mut failing = false;
        loop {
            let turned = self.ring.turn(TICK, &mut finished);
            if let Err(error) = &turned
                && !failing
            {
                tracing::error!(%error, "io_uring does not go on; trying again");
                self.healthy.store(false, Ordering::Relaxed);
            }
            failing = turned.is_err();
            finished.drain(..).for_each(|done| self.end(done));
            if looked.elapsed() >= TICK {
                looked = Instant::now();
                self.ring.overdue(self.deadline, |reading| self.tell_late(&mut reading.tag));
            }
            if self.closing.load(Ordering::Acquire) && self.ring.jobs() == 0 {
                return;
            }
            if failing {
                std::thread::park_timeout(TICK);
            }
        }
    }

    fn end(&self, done: Finished<Reading>) {
        let Finished { target: Tagged { memory: slot, tag: call }, outcome } = done;
        if call.told {
            return;
        }
        let key = call.key;
        let outcome = match outcome {
            Ok(()) => {
                self.healthy.store(true, Ordering::Relaxed);
                let origin = || self.store.dir().display().to_string();
                self.accounts.judge(slot, self.store.manifest(), origin)
            }
            Err(error) => {
                let error = self.explain(key, error);
                Err(FetchFailure::new(error, slot.abandon()))
            }
        };
        self.complete(&call, outcome);
    }

    fn explain(&self, key: ExpertKey, error: io::Error) -> FetchError {
        let cancelled = error.raw_os_error() == Some(libc::ECANCELED);
        if cancelled && self.closing.load(Ordering::Acquire) {
            return FetchError::Closed { key, backend: TierKind::Uma };
        }
        if cancelled {
            return FetchError::Cancelled { key };
        }
        self.healthy.store(false, Ordering::Relaxed);
        let path = self.store.dir().join(layer_file_name(key.layer));
        if error.kind() == io::ErrorKind::UnexpectedEof {
            let at = path.metadata().map_or(0, |found| found.len());
            return FetchError::Store(StoreError::Truncated { path, key, at });
        }
        FetchError::Store(StoreError::Io { action: "read", path, source: error })
    }

    fn tell_late(&self, call: &mut Call) {
        if call.told {
            return;
        }
        call.told = true;
        self.healthy.store(false, Ordering::Relaxed);
        let (key, backend, waited) = (call.key, TierKind::Uma, call.submitted.elapsed());
        let error = Box::new(FetchError::Deadline { key, backend, waited, bound: Bound::Due });
        self.complete(call, Err(FetchFailure { error, slot: None }));
    }

    fn complete(&self, call: &Call, outcome: Result<Fetched, FetchFailure>) {
        match &outcome {
            Ok(fetched) => {
                let bytes = fetched.residency.payload().len() as u64;
                self.accounts.fetched(bytes, call.submitted.elapsed());
            }
            Err(failure) => self.accounts.failed(&failure.error),
        }
        call.queue.push(Completion { ticket: call.ticket, key: call.key, outcome });
    }
}
