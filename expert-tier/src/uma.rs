//! The `uma` backend: a local store by `O_DIRECT` through io_uring, straight into the arena.
//!
//! One thread drives the ring: it starts reads, reaps them, and checks each piece of a record
//! while the disk brings the next. Where the kernel, the file system or a container refuses
//! io_uring or `O_DIRECT`, reader threads with ordinary reads take over, and the log says why,
//! once.
//!
//! Bounds, all of them settings:
//! * A request ends when the disk gives nothing for `deadline`: nothing of it, nor of what was asked
//!   for before it. While the disk gives something, waiting behind others costs no request its time.
//!   A read that the disk keeps, while it gives what was asked for later, gains no time by that.
//! * A request ends `total` after its first read was given to the kernel.
//!
//! A read that the kernel has cannot be given up. The request whose bound has passed ends, but its
//! slot stays with the ring until the last read of it has ended.
//!
//! Closing takes at most twice the deadline: one for reads in flight to hand their slots back, and
//! one more for the kernel to let go of the memory. What it has not let go of by then is leaked,
//! and the log says so.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu_sys::limits::Registrations;

use crate::account::{Accounts, count_fallback};
use crate::arena::{ArenaError, ExpertArena, Filling, Slot};
use crate::direct::DirectFiles;
pub use crate::direct::NotDirect;
pub use crate::direct::ring::ReadCounts;
use crate::direct::ring::{self, Driver, Extent, Finished, Ring, RingOptions};
use crate::error::{Bound, FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::layout::STRIDE_ALIGN;
use crate::owed::Owed;
use crate::posix::{PosixOptions, PosixTier};
use crate::store::manifest::{Manifest, layer_file_name};
use crate::store::{ExpertStore, StoreError};
use crate::tier::{
    Completion, CompletionQueue, ExpertTier, FetchRequest, Fetched, Outcome, Source, Ticket,
    TierKind, after,
};
use crate::worker::{End, Worker};

/// How often the ring's thread looks at deadlines.
const TICK: Duration = Duration::from_millis(50);

/// Settings of [`UmaTier`].
#[derive(Clone, Debug)]
pub struct UmaOptions {
    /// Reads in flight at once, 1 to 4096.
    pub depth: u32,
    /// Bytes of one read, a multiple of 4096 up to 16 MiB.
    pub piece_bytes: u32,
    /// Longest time in which nothing comes of the disk.
    pub deadline: Duration,
    /// Longest time from a request's first read to its end.
    pub total: Duration,
    /// Whether to read past the page cache.
    pub direct: DirectReads,
}

/// Whether `uma` reads past the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DirectReads {
    /// Where io_uring and `O_DIRECT` are to be had.
    #[default]
    Auto,
    /// Never: by threads with ordinary reads.
    Never,
}

/// How `uma` turned out to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UmaPath {
    /// Past the page cache, into an arena that is registered with io_uring.
    Registered,
    /// Past the page cache; each read pins the pages that it writes to.
    Plain,
    /// By threads with ordinary reads.
    Threads,
}

impl Default for UmaOptions {
    /// 64 reads of 512 KiB keep any NVMe disk busy; pieces of that size are checked while the
    /// next are read, and are large enough that a disk does not notice them.
    fn default() -> Self {
        Self {
            depth: 64,
            piece_bytes: 512 * 1024,
            deadline: Duration::from_secs(2),
            total: Duration::from_secs(30),
            direct: DirectReads::Auto,
        }
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
    worker: Option<Worker>,
}

struct Shared {
    store: ExpertStore,
    deadline: Duration,
    total: Duration,
    ring: Ring<Slot<Filling>, Call>,
    closing: AtomicBool,
    healthy: AtomicBool,
    accounts: Accounts,
    /// It has been said that some reads pin their pages.
    said_plain: AtomicBool,
}

type Done = Finished<Slot<Filling>, Call>;

/// What the ring keeps beside a slot.
struct Call {
    owed: Owed,
    /// The bound that has passed, and after how long.
    late: Option<(Bound, Duration)>,
}

impl UmaTier {
    /// Opens the store in `dir`.
    ///
    /// # Errors
    /// The store cannot be opened, or no thread can be started.
    pub fn open(dir: &Path, options: &UmaOptions) -> Result<Self, StoreError> {
        let store = ExpertStore::open(dir)?;
        let threads = |store| {
            let UmaOptions { deadline, total, .. } = *options;
            let options = PosixOptions { deadline, total, ..PosixOptions::default() };
            PosixTier::start(store, options, TierKind::Uma).map(Engine::Threads).map(Self)
        };
        if options.direct == DirectReads::Never {
            return threads(store);
        }
        match ring(&store, options) {
            Ok((ring, driver)) => {
                let bounds = (options.deadline, options.total);
                RingTier::start(store, ring, driver, bounds).map(Engine::Ring).map(Self)
            }
            Err(reason) => {
                count_fallback(TierKind::Uma, reason.name());
                tracing::warn!(store = %dir.display(), %reason,
                    "uma reads through the page cache, by threads");
                threads(store)
            }
        }
    }

    /// How records are read: what [`use_arena`](ExpertTier::use_arena) changes.
    #[must_use]
    pub fn path(&self) -> UmaPath {
        match &self.0 {
            Engine::Ring(tier) if tier.shared.ring.has_registered() => UmaPath::Registered,
            Engine::Ring(_) => UmaPath::Plain,
            Engine::Threads(_) => UmaPath::Threads,
        }
    }

    /// Direct reads started so far, a record being several; none where threads read.
    #[must_use]
    pub fn reads(&self) -> ReadCounts {
        match &self.0 {
            Engine::Ring(tier) => tier.shared.ring.reads(),
            Engine::Threads(_) => ReadCounts::default(),
        }
    }

    /// Whether this process may use io_uring as the backend does.
    ///
    /// # Errors
    /// The kernel is too old or refuses, as container runtimes and `kernel.io_uring_disabled` make it.
    pub fn probe_io_uring() -> Result<(), NotDirect> {
        ring::probe().map_err(NotDirect::Ring)
    }

    /// Whether every file of `store` can be read past the page cache; a page of each is read.
    ///
    /// # Errors
    /// Which file cannot, and why.
    pub fn probe_direct_reads(store: &ExpertStore) -> Result<(), NotDirect> {
        DirectFiles::open(store).map(drop)
    }

    fn inner(&self) -> &dyn ExpertTier {
        match &self.0 {
            Engine::Ring(tier) => tier,
            Engine::Threads(tier) => tier,
        }
    }
}

type RingOfSlots = (Ring<Slot<Filling>, Call>, Driver<Slot<Filling>, Call>);

fn ring(store: &ExpertStore, options: &UmaOptions) -> Result<RingOfSlots, NotDirect> {
    let files = DirectFiles::open(store)?;
    let align = STRIDE_ALIGN as u32;
    let piece = options.piece_bytes.clamp(align, 16 << 20) / align * align;
    let options = RingOptions {
        depth: options.depth.clamp(1, 4096),
        piece_bytes: piece as usize,
        usual_bytes: usize::try_from(store.manifest().layout().max_stride()).unwrap_or(usize::MAX),
        drop_wait: options.deadline,
    };
    Ring::open(&files.0, options).map_err(NotDirect::Ring)
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

    fn bound(&self) -> Duration {
        self.inner().bound()
    }

    fn ended(&self) -> u64 {
        self.inner().ended()
    }

    fn registrations(&self) -> Registrations {
        self.inner().registrations()
    }

    fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaError> {
        self.inner().use_arena(arena)
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        self.inner().submit(batch, queue);
    }

    fn cancel(&self, ticket: Ticket) {
        self.inner().cancel(ticket);
    }

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        self.inner().poll(queue, wait)
    }

    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<crate::tier::Landed> {
        self.inner().poll_landed(queue, wait)
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
        ring: Ring<Slot<Filling>, Call>,
        driver: Driver<Slot<Filling>, Call>,
        (deadline, total): (Duration, Duration),
    ) -> Result<Self, StoreError> {
        let path = store.dir().to_owned();
        let shared = Arc::new(Shared {
            store,
            deadline,
            total,
            ring,
            closing: AtomicBool::new(false),
            healthy: AtomicBool::new(true),
            accounts: Accounts::new(TierKind::Uma, &[Source::Local]),
            said_plain: AtomicBool::new(false),
        });
        let reader = Arc::clone(&shared);
        let worker = Worker::start("uma".into(), move || reader.run(driver))
            .map_err(|source| StoreError::Io { action: "start a reader for", path, source })?;
        Ok(Self { shared, worker: Some(worker) })
    }
}

impl Drop for RingTier {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.ring.cancel(|_| true);
        // The loop and the driver's drop each take a deadline at most, and look a tick late.
        let most = self.shared.deadline.saturating_mul(2).saturating_add(TICK * 20);
        let until = after(most);
        self.worker.take().and_then(|worker| worker.join_until(until));
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

    fn bound(&self) -> Duration {
        self.shared.deadline.saturating_add(self.shared.total)
    }

    fn ended(&self) -> u64 {
        self.shared.accounts.ended()
    }

    fn registrations(&self) -> Registrations {
        // With io_uring.
        Registrations { devices: 1, ..Registrations::default() }
    }

    fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaError> {
        let ring = &self.shared.ring;
        if ring.has_registered_this(arena) {
            return Ok(());
        }
        if ring.has_registered() {
            let text = "another arena is registered, and a ring takes one";
            self.shared.note_plain("second_arena", &io::Error::other(text));
        } else if let Err(error) = ring.register(Box::new(arena.clone())) {
            self.shared.note_plain("unregistered_arena", &error);
        }
        Ok(())
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let submitted = Instant::now();
        let jobs = batch.drain(..).filter_map(|request| self.shared.job(request, queue, submitted));
        self.shared.ring.submit(jobs);
        // The reader may have ended meanwhile, by a panic; whoever comes last cleans up.
        if self.shared.closing.load(Ordering::Acquire) {
            self.shared.end_all();
        }
    }

    fn cancel(&self, ticket: Ticket) {
        self.shared.ring.cancel(|call| call.owed.ticket == ticket);
    }
}

impl Shared {
    fn note_plain(&self, reason: &'static str, error: &io::Error) {
        self.accounts.fell_back(reason);
        if !self.said_plain.swap(true, Ordering::Relaxed) {
            tracing::info!(%error, "the arena could not be registered with io_uring, which \
                counts against the locked-memory limit once more: reads pin their pages");
        }
    }

    /// What the ring is to read for a request; one that cannot be is completed here.
    fn job(
        &self,
        request: FetchRequest,
        queue: &CompletionQueue,
        submitted: Instant,
    ) -> Option<(Extent, Slot<Filling>, Call)> {
        let (ticket, key, slot) = request.into_parts();
        let manifest = self.store.manifest();
        let owed = Owed::new(TierKind::Uma, (ticket, key), queue, submitted);
        let placed = manifest.layout().locate_at(key);
        let ((file, layer), identity) =
            match placed.and_then(|at| Ok((at, manifest.identity(key)?))) {
                Ok(found) => found,
                Err(error) => return self.refuse(owed, FetchFailure::new(error, slot)),
            };
        let extent = Extent {
            // Layers are at most `MAX_LAYERS`.
            file: file as u32,
            offset: u64::from(key.expert) * layer.stride(),
            // Reads end on a page; what follows the record is its own padding.
            bytes: usize::try_from(layer.stride()).unwrap_or(usize::MAX),
        };
        match slot.begin(identity) {
            Ok(slot) => Some((extent, slot, Call { owed, late: None })),
            Err(refused) => self.refuse(owed, FetchFailure::too_small(key, refused)),
        }
    }

    fn refuse<T>(&self, mut owed: Owed, failure: FetchFailure) -> Option<T> {
        self.complete(&mut owed, Outcome::Failed(failure));
        None
    }

    /// The thread of the ring. However it ends, no request is left without a completion.
    fn run(&self, mut driver: Driver<Slot<Filling>, Call>) -> End {
        let driven = catch_unwind(AssertUnwindSafe(|| self.drive(&mut driver)));
        self.closing.store(true, Ordering::Release);
        self.healthy.store(false, Ordering::Relaxed);
        self.end_all();
        drop(driver);
        if driven.is_err() {
            tracing::error!("the uma reader panicked: the backend is closed");
        }
        if self.ring.in_flight() > 0 { End::Stuck } else { End::Clean }
    }

    fn drive(&self, driver: &mut Driver<Slot<Filling>, Call>) {
        let mut finished = Vec::new();
        let mut looked = Instant::now();
        let mut failing = false;
        let mut closing_since = None;
        loop {
            let turned = driver.turn(TICK, &mut finished);
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
                self.expire();
            }
            if self.closing.load(Ordering::Acquire) {
                let since = *closing_since.get_or_insert_with(Instant::now);
                if self.ring.jobs() == 0 || since.elapsed() >= self.deadline {
                    return;
                }
            }
            if failing {
                std::thread::park_timeout(TICK);
            }
        }
    }

    /// Ends the requests for which a bound has passed: with their slots where the kernel has no read
    /// of them, else without.
    fn expire(&self) {
        let mut any = false;
        self.ring.overdue((self.deadline, self.total), |call, late| {
            call.late.get_or_insert(late);
            any = true;
        });
        if any {
            self.healthy.store(false, Ordering::Relaxed);
            self.ring.cancel(|call| call.late.is_some());
            self.ring.running(|call| {
                if let Some(late) = call.late {
                    self.end_without_slot(&mut call.owed, |owed| owed.late(late));
                }
            });
        }
    }

    /// Ends every request that is left, for want of a driver.
    fn end_all(&self) {
        self.ring.cancel(|_| true);
        let mut finished = Vec::new();
        self.ring.take_ended(&mut finished);
        finished.drain(..).for_each(|done| self.end(done));
        let end = |call: &mut Call| self.end_without_slot(&mut call.owed, Owed::closed);
        self.ring.running(end);
    }

    fn end(&self, done: Done) {
        let Finished { memory: slot, tag: Call { mut owed, late }, outcome } = done;
        // Without anything owed, the slot goes back to its arena here.
        if owed.is_paid() {
            return;
        }
        let outcome = match outcome {
            Ok(()) => {
                self.healthy.store(true, Ordering::Relaxed);
                let origin = || self.store.dir().display().to_string();
                self.accounts.judge(slot, self.store.manifest(), origin)
            }
            Err(error) => {
                let error = match late {
                    Some(late) => owed.late(late),
                    None => self.explain(&owed, error),
                };
                Outcome::Failed(FetchFailure::new(error, slot.abandon()))
            }
        };
        self.complete(&mut owed, outcome);
    }

    /// Ends a request whose slot the kernel still writes to.
    fn end_without_slot(&self, owed: &mut Owed, why: impl Fn(&Owed) -> FetchError) {
        if !owed.is_paid() {
            let error = Box::new(why(owed));
            self.complete(owed, Outcome::Failed(FetchFailure { error, slot: None }));
        }
    }

    fn explain(&self, owed: &Owed, error: io::Error) -> FetchError {
        let key = owed.key;
        let cancelled = error.raw_os_error() == Some(libc::ECANCELED);
        if cancelled && self.closing.load(Ordering::Acquire) {
            return owed.closed();
        }
        if cancelled {
            return FetchError::Cancelled { key };
        }
        self.healthy.store(false, Ordering::Relaxed);
        let path = self.store.dir().join(layer_file_name(key.layer));
        // A direct read that ends between two blocks is continued there, which some file systems
        // call the end and others an argument at fault. So the file's length has the last word.
        let layer = self.store.manifest().layout().locate(key);
        let end = layer.map_or(0, |layer| (u64::from(key.expert) + 1) * layer.stride());
        let at = path.metadata().map_or(0, |found| found.len());
        if error.kind() == io::ErrorKind::UnexpectedEof || at < end {
            return FetchError::Store(StoreError::Truncated { path, key, at });
        }
        FetchError::Store(StoreError::Io { action: "read", path, source: error })
    }

    fn complete(&self, owed: &mut Owed, outcome: Outcome) {
        self.accounts.count(&outcome, owed.age());
        owed.pay(outcome);
    }
}

#[cfg(test)]
#[path = "uma_tests.rs"]
mod tests;
