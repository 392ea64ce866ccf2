//! The arena: pinned memory, seen by a device where there is one, cut into slots of equal size.
//!
//! Every fetched record lands here and is not copied afterwards. An arena is one allocation with
//! one registration, however many slots it has: registering is slow, and mappings are few.
//!
//! Three parts: `pool` knows which slots are free and nothing of memory; `memory` holds the bytes
//! and nothing of who has them; [`Slot`] ties a number from the one to a range of the other, and
//! its type says what may be done. A lease that a device reads ends with
//! [`ExpertResidency::release_after`](crate::residency::ExpertResidency::release_after): the slot
//! is given out again only when the device's stream has come past it.
//!
//! What goes when: a slot, a lease and the pool's fences keep the arena alive. The last handle
//! waits `drain_wait` for the fences; then the registration goes before the memory. If a device
//! may still read, or the driver will not unregister, the memory is leaked and the log says so.

// Slots hand out parts of one mapping, which the borrow checker cannot follow; nothing outside
// this folder may.
#![allow(unsafe_code, reason = "the slot states stand for what the borrow checker cannot see")]

mod holders;
mod memory;
mod options;
mod parts;
mod pool;
mod slot;
mod sync;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu_sys::cuda::{CudaDevice, CudaError, Event, EventState, HostRegistration};
use gpu_sys::limits::Bytes;
use gpu_sys::pinned::{NumaPlacement, PageKind, PinError, PinnedOptions, PinnedPages};

pub use options::{ArenaOptions, CudaUse, DEFAULT_DRAIN_WAIT, MAX_SLOTS, SlabPlan};
#[cfg(any(test, metrale_rdma_verbs))]
pub(crate) use parts::Part;
pub(crate) use parts::{Gathered, LandedPart, Parted};
pub use pool::SlotCounts;
pub(crate) use slot::Judged;
#[cfg(feature = "unverified")]
pub use slot::Unchecked;
pub use slot::{Filling, Free, Ready, Rejected, Slot, TooSmall};

use crate::direct::ring::Region;
use holders::Holders;
use memory::ArenaMemory;
use parts::PartsState;
use pool::{Fence, FenceState, Pool};

/// Between two looks at a device that is being waited for at the arena's end.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Why there is no arena, or no slot in it.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Not even one record would fit.
    #[error(
        "an arena of {} is too small: one record of the largest layer needs {}, raise --expert-arena-bytes \
         to that times the records to be held at once",
        Bytes(*arena_bytes), Bytes(*needed_bytes)
    )]
    TooSmall {
        /// Bytes given.
        arena_bytes: u64,
        /// Bytes of the largest record's slot.
        needed_bytes: u64,
    },
    /// Slabs that cannot be.
    #[error("an arena with {found} {what} cannot be made: allowed are 1 to {limit}")]
    Plan {
        /// What is out of range.
        what: &'static str,
        /// The number found.
        found: u64,
        /// The largest allowed.
        limit: u64,
    },
    /// The memory could not be pinned.
    #[error("the arena's memory: {0}")]
    Pin(#[from] PinError),
    /// No device that the backend uses takes it.
    #[cfg(metrale_rdma_verbs)]
    #[error("{what}: {source}")]
    Register {
        /// What was to be registered.
        what: &'static str,
        /// Why not.
        source: Arc<gpu_sys::verbs::VerbsError>,
    },
    /// A device was required and cannot be had.
    #[error("an arena on CUDA device {ordinal} was required: {source}")]
    Cuda {
        /// The device.
        ordinal: u32,
        /// Why not.
        source: CudaError,
    },
    /// No slot will ever be large enough.
    #[error(
        "a record of {} fits no slot, the largest has {}: the arena was made for another store",
        Bytes(*bytes), Bytes(*largest_bytes)
    )]
    RecordTooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Bytes of the largest slot.
        largest_bytes: u64,
    },
    /// No slot became free in time.
    #[error(
        "no slot for a record of {} became free in {waited_ms} ms: of {} slots {} are in use, {} \
         wait for a device and {} are lost; release leases earlier or raise --expert-arena-bytes",
        Bytes(*bytes), counts.total, counts.out(), counts.fenced, counts.quarantined
    )]
    Exhausted {
        /// Bytes of the record.
        bytes: u64,
        /// How long was waited.
        waited_ms: u64,
        /// Where the slots are.
        counts: SlotCounts,
    },
}

impl ArenaError {
    /// Whether the same call may succeed later without anything being changed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }

    /// Whether a smaller arena might be had where this one cannot be.
    #[must_use]
    pub fn is_of_size(&self) -> bool {
        match self {
            Self::Pin(error) => error.is_of_size(),
            #[cfg(metrale_rdma_verbs)]
            Self::Register { source, .. } => source.is_of_size(),
            _ => false,
        }
    }
}

/// A handle on an arena; clones share it.
#[derive(Clone)]
pub struct ExpertArena(Arc<ArenaInner>);

/// What an arena turned out to be; prints as one line for a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaSummary {
    /// Bytes pinned.
    pub bytes: u64,
    /// The slabs, ascending.
    pub slabs: Vec<SlabPlan>,
    /// What kind of pages they are on.
    pub pages: PageKind,
    /// Where they are.
    pub numa: NumaPlacement,
    /// The device that sees them, or why there is none.
    pub device: Result<String, String>,
}

impl ExpertArena {
    /// Pins the memory and, where wanted and possible, registers it with a device.
    ///
    /// # Errors
    /// The memory cannot be pinned, or the device that is required cannot be had.
    pub fn new(options: &ArenaOptions) -> Result<Self, ArenaError> {
        let (plans, bytes) = options.checked_slabs()?;
        let device = open_device(options.cuda)?;
        let (huge_pages, numa) = (options.huge_pages, options.numa);
        let pages = Arc::new(PinnedPages::new(&PinnedOptions { bytes, huge_pages, numa })?);
        for shortfall in pages.shortfalls() {
            metrics::counter!("metrale_arena_shortfalls_total", "lacks" => shortfall.name())
                .increment(1);
        }
        let registered = device.and_then(|device| match HostRegistration::new(&device, &pages) {
            Ok(registration) => Ok(registration),
            Err(error) => Err(NoDevice { ordinal: device.ordinal(), error: Some(error) }),
        });
        let (registration, no_device) = match (registered, options.cuda) {
            (Ok(registration), _) => (Some(registration), String::new()),
            (Err(NoDevice { ordinal, error: Some(source) }), CudaUse::Require { .. }) => {
                return Err(ArenaError::Cuda { ordinal, source });
            }
            (Err(no_device), _) => (None, no_device.reason()),
        };
        let counts: Vec<u32> = plans.iter().map(|plan| plan.slots).collect();
        let slots = counts.iter().map(|&n| n as usize).sum();
        let arena = Self(Arc::new(ArenaInner {
            parts: ArenaInner::no_parts(slots),
            pool: Pool::new(&counts),
            leases: counts.iter().flat_map(|&n| 0..n).map(|_| LeaseState::none()).collect(),
            slabs: lay_out(&plans),
            memory: ManuallyDrop::new(ArenaMemory::new(pages, registration)),
            no_device,
            drain_wait: options.drain_wait,
        }));
        tracing::info!("{}", arena.summary());
        Ok(arena)
    }

    /// A free slot for `bytes`: of the smallest size that fits, or of a larger one if those are
    /// all taken. Never waits.
    #[must_use]
    pub fn try_acquire(&self, bytes: u64) -> Option<Slot<Free>> {
        let slot = self.0.pool.try_take(self.0.slab_for(bytes)?)?;
        Some(Slot::new(Arc::clone(&self.0), slot))
    }

    /// As [`try_acquire`](Self::try_acquire), waiting up to `wait` for a slot.
    ///
    /// # Errors
    /// No slot is large enough, or none became free in time.
    pub fn acquire(&self, bytes: u64, wait: Duration) -> Result<Slot<Free>, ArenaError> {
        let Some(slab) = self.0.slab_for(bytes) else {
            let largest_bytes = self.0.slabs.last().map_or(0, |slab| slab.slot_bytes as u64);
            return Err(ArenaError::RecordTooLarge { bytes, largest_bytes });
        };
        let Some(slot) = self.0.pool.take(slab, wait) else {
            let waited_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            return Err(ArenaError::Exhausted { bytes, waited_ms, counts: self.counts() });
        };
        Ok(Slot::new(Arc::clone(&self.0), slot))
    }

    /// Slots in all.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.counts().total
    }

    /// Slots that could be taken now.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.counts().free
    }

    /// Where the slots are now.
    #[must_use]
    pub fn counts(&self) -> SlotCounts {
        self.0.pool.counts()
    }

    /// The device that sees the arena; streams for
    /// [`release_after`](crate::residency::ExpertResidency::release_after) are made from it.
    #[must_use]
    pub fn device(&self) -> Option<&Arc<CudaDevice>> {
        self.0.memory.device()
    }

    /// What the arena turned out to be.
    #[must_use]
    pub fn summary(&self) -> ArenaSummary {
        let pages = self.0.memory.pages();
        let plan = |slab: &Slab| SlabPlan { slot_bytes: slab.slot_bytes as u64, slots: slab.slots };
        ArenaSummary {
            bytes: pages.len() as u64,
            slabs: self.0.slabs.iter().map(plan).collect(),
            pages: pages.page_kind(),
            numa: pages.numa(),
            device: self.device().map(|d| d.to_string()).ok_or_else(|| self.0.no_device.clone()),
        }
    }
}

/// Names an arena while it lives.
#[cfg(metrale_rdma_verbs)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ArenaId(usize);

impl ExpertArena {
    /// Whether `other` is a handle on the same arena.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(metrale_rdma_verbs)]
impl ExpertArena {
    pub(crate) fn id(&self) -> ArenaId {
        ArenaId(Arc::as_ptr(&self.0).addr())
    }

    pub(crate) fn downgrade(&self) -> WeakArena {
        WeakArena(Arc::downgrade(&self.0))
    }
}

/// Remembers an arena and does not keep it. No other arena has its place meanwhile.
#[cfg(metrale_rdma_verbs)]
pub(crate) struct WeakArena(std::sync::Weak<ArenaInner>);

#[cfg(metrale_rdma_verbs)]
impl WeakArena {
    pub(crate) fn is(&self, arena: &ExpertArena) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&arena.0))
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

// SAFETY: as below; a NIC writes to parts that a queue pair has, which nobody can look at.
#[cfg(metrale_rdma_verbs)]
unsafe impl gpu_sys::verbs::Memory for ExpertArena {
    fn region(&self) -> (NonNull<u8>, usize) {
        Region::region(self)
    }
}

// SAFETY: every handle keeps the mapping, which never moves; a leaked arena keeps it for ever.
unsafe impl Region for ExpertArena {
    fn region(&self) -> (NonNull<u8>, usize) {
        let bytes = self.0.memory.pages().len();
        self.0.memory.start_and_room(0..bytes)
    }
}

impl fmt::Debug for ExpertArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExpertArena({})", self.summary())
    }
}

impl fmt::Display for ArenaSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "arena of {} locked in {}", Bytes(self.bytes), self.pages)?;
        if let NumaPlacement::Node(node) = self.numa {
            write!(f, " on NUMA node {node}")?;
        }
        for (i, slab) in self.slabs.iter().enumerate() {
            write!(f, "{}{slab}", if i == 0 { ", slots " } else { " + " })?;
        }
        match &self.device {
            Ok(device) => write!(f, ", seen by {device}"),
            Err(reason) => write!(f, ", host addresses only: {reason}"),
        }
    }
}

/// Why an arena has no device: none wanted, or what went wrong.
struct NoDevice {
    ordinal: u32,
    error: Option<CudaError>,
}

impl NoDevice {
    fn reason(&self) -> String {
        match &self.error {
            None => "not wanted".into(),
            Some(error @ CudaError::Unavailable(_)) => error.to_string(),
            Some(error) => {
                // There is a device, and it is not used: more than the summary's line.
                tracing::warn!(ordinal = self.ordinal, %error, "the arena has no device");
                error.to_string()
            }
        }
    }
}

fn open_device(cuda: CudaUse) -> Result<Result<Arc<CudaDevice>, NoDevice>, ArenaError> {
    let ordinal = match cuda {
        CudaUse::Off => return Ok(Err(NoDevice { ordinal: 0, error: None })),
        CudaUse::Auto { ordinal } | CudaUse::Require { ordinal } => ordinal,
    };
    match (CudaDevice::open(ordinal), cuda) {
        (Ok(device), _) => Ok(Ok(device)),
        // Before anything is pinned: there is no point in locking memory for a device in vain.
        (Err(source), CudaUse::Require { .. }) => Err(ArenaError::Cuda { ordinal, source }),
        (Err(error), _) => Ok(Err(NoDevice { ordinal, error: Some(error) })),
    }
}

/// Slots of one size, one after another in the arena's memory.
struct Slab {
    slot_bytes: usize,
    slots: u32,
    first_slot: u32,
    offset: usize,
}

fn lay_out(plans: &[SlabPlan]) -> Vec<Slab> {
    let (mut first_slot, mut offset) = (0, 0);
    let mut place = |plan: &SlabPlan| {
        // `checked_slabs` has bounded the sum of all of them by an address space.
        let slot_bytes = plan.slot_bytes as usize;
        let slab = Slab { slot_bytes, slots: plan.slots, first_slot, offset };
        first_slot += plan.slots;
        offset += slot_bytes * plan.slots as usize;
        slab
    };
    plans.iter().map(&mut place).collect()
}

/// What happens to a slot whose lease is over.
#[derive(Debug, Default)]
pub(crate) enum LeaseEnd {
    /// It is free.
    #[default]
    Now,
    /// It is free when a device has come to all of these.
    After(Vec<Event>),
    /// It is not used again: a device may read it, and there is no telling until when.
    Never,
    /// Nothing: somebody else holds the slot or the lease as well.
    Shared,
    /// It is free if nobody else holds it: a record is arriving in parts.
    LastOut,
}

/// What the arena keeps of each slot's lease.
struct LeaseState {
    holders: Holders,
    /// What the holders that have left want of the lease's end.
    end: Mutex<LeaseEnd>,
}

/// What [`MAX_SLOTS`] promises of each slot: a lease, the sums of its parts (without the sums
/// themselves: four bytes for each 256 KiB), a place among the fenced and one among the free.
const _: () =
    assert!(size_of::<LeaseState>() + size_of::<PartsState>() + pool::BYTES_PER_SLOT <= 192);

impl LeaseState {
    fn none() -> Self {
        Self { holders: Holders::none(), end: Mutex::default() }
    }
}

struct ArenaInner {
    pool: Pool<Event>,
    /// One per slot.
    leases: Box<[LeaseState]>,
    /// One per slot.
    parts: Box<[PartsState]>,
    /// Ascending by slot size and by first slot.
    slabs: Vec<Slab>,
    // Dropped by hand: leaked while a device may read it.
    memory: ManuallyDrop<ArenaMemory>,
    /// Why no device sees it; empty where one does.
    no_device: String,
    drain_wait: Duration,
}

impl ArenaInner {
    /// The first slab whose slots take `bytes`.
    fn slab_for(&self, bytes: u64) -> Option<usize> {
        let slab = self.slabs.partition_point(|slab| (slab.slot_bytes as u64) < bytes);
        (slab < self.slabs.len()).then_some(slab)
    }

    fn slab_index(&self, slot: u32) -> usize {
        self.slabs.partition_point(|slab| slab.first_slot <= slot) - 1
    }

    fn slab_of(&self, slot: u32) -> &Slab {
        &self.slabs[self.slab_index(slot)]
    }

    fn offset_of(&self, slot: u32) -> usize {
        let slab = self.slab_of(slot);
        slab.offset + (slot - slab.first_slot) as usize * slab.slot_bytes
    }

    fn give_back(&self, slot: u32, end: LeaseEnd) {
        let slab = self.slab_index(slot);
        match end {
            LeaseEnd::Now => self.pool.put(slot, slab),
            LeaseEnd::After(events) => self.pool.put_after(slot, slab, events),
            LeaseEnd::Never => self.pool.quarantine(slot),
            LeaseEnd::LastOut if self.leases[slot as usize].holders.leave() => {
                self.pool.put(slot, slab);
            }
            LeaseEnd::Shared | LeaseEnd::LastOut => {}
        }
    }

    /// Whether every device has finished with every slot; waits up to `drain_wait` for that.
    fn drain(&self) -> bool {
        let started = Instant::now();
        loop {
            let counts = self.pool.counts();
            if counts.fenced == 0 || started.elapsed() >= self.drain_wait {
                return counts.fenced == 0 && counts.quarantined == 0;
            }
            std::thread::sleep(DRAIN_POLL_INTERVAL);
        }
    }
}

impl Drop for ArenaInner {
    fn drop(&mut self) {
        if !self.drain() {
            let bytes = self.memory.pages().len();
            tracing::error!(bytes, "a device may still read the arena's memory: it is leaked");
            return;
        }
        // SAFETY: taken nowhere else, and drop runs once; every slot and lease held this value,
        // so none is left that refers to the memory.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

impl Fence for Event {
    fn poll(&mut self) -> FenceState {
        match self.query() {
            Ok(EventState::Done) => FenceState::Passed,
            Ok(EventState::Pending) => FenceState::Pending,
            Err(error) => {
                tracing::error!(%error, "the device cannot say whether it has finished");
                FenceState::Lost
            }
        }
    }
}

#[cfg(test)]
mod tests;
