//! The records that are held in memory for clients to READ.
//!
//! One pinned region of equal slots, as large as the largest record of any layer, so that a slot
//! can hold whatever record; record `n` of the store, counted by layer and expert, lies in slot `n`.
//! The region is filled before anything is registered or published, and not written afterwards.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::store::ExpertStore;
use gpu_sys::limits::Bytes;
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions, PinnedPages};

use railset::message::{SpillTerms, Transfer};

use super::RailsError;

/// Requests for spilled records that a client may have under way on a rail: enough to keep the disk
/// and the rail busy at once, few enough that a client's share of the buffers is small.
pub(super) const CREDITS: u16 = 32;
/// Most bytes of one such request: large enough that its messages cost little beside it, small enough
/// that clients take turns.
pub(super) const RANGE_BYTES: u32 = 1 << 20;

/// Most threads that read the store at start.
const MAX_READERS: usize = 8;
/// How often a long load says how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Where every record of a store has a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) slot_bytes: u64,
    pub(super) slots: u64,
    /// Records of the store.
    pub(super) records: u64,
}

impl Plan {
    /// Slots for as much of `store` as `budget` allows.
    pub(super) fn of(store: &ExpertStore, budget: Option<u64>) -> Result<Self, RailsError> {
        let layout = store.manifest().layout();
        let (slot_bytes, records) = (layout.max_stride(), layout.records());
        let slots = match budget {
            None => records,
            Some(budget) if budget < slot_bytes => {
                return Err(RailsError::Budget { budget, slot_bytes });
            }
            Some(budget) => records.min(budget / slot_bytes),
        };
        Ok(Self { slot_bytes, slots, records })
    }

    /// How the records come that have no slot, if there are any.
    pub(super) fn spill(&self, transfer: Transfer) -> Option<SpillTerms> {
        let terms = SpillTerms { transfer, credits: CREDITS, range_bytes: RANGE_BYTES };
        (self.slots < self.records).then_some(terms)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slot_bytes.saturating_mul(self.slots)
    }
}

/// Pins a region for `plan` and reads every record of `store` into its slot.
pub(super) fn load(store: &ExpertStore, plan: Plan) -> Result<PinnedPages, RailsError> {
    let bytes = plan.bytes();
    let too_large = || RailsError::TooLarge { bytes };
    let length = usize::try_from(bytes).map_err(|_| too_large())?;
    let slot_bytes = usize::try_from(plan.slot_bytes).map_err(|_| too_large())?;
    let (huge_pages, numa) = (HugePages::Prefer, NumaPlacement::default());
    let options = PinnedOptions { bytes: length, huge_pages, numa };
    let mut pages = PinnedPages::new(&options).map_err(|source| RailsError::Pin { source })?;
    let resident = plan.slots as usize;
    let keys: Vec<ExpertKey> = store.manifest().layout().keys().take(resident).collect();
    let slots: Vec<Mutex<&mut [u8]>> =
        pages.bytes_mut().chunks_exact_mut(slot_bytes).take(keys.len()).map(Mutex::new).collect();
    let progress = Progress::new(keys.len() as u64);
    let next = AtomicUsize::new(0);
    let readers = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_READERS);
    std::thread::scope(|scope| {
        let read_some = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let (Some(&key), Some(slot)) = (keys.get(at), slots.get(at)) else { return Ok(()) };
                let record = store.manifest().layout().locate(key);
                let record_bytes = record.map_or(0, |layer| layer.record_bytes()) as usize;
                // Each slot is taken by one reader, once.
                let mut slot = slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                let read = store.read_at(key, 0, &mut slot[..record_bytes]);
                if let Err(source) = read {
                    next.store(keys.len(), Ordering::Relaxed);
                    return Err(RailsError::Load { source });
                }
                progress.one_more(record_bytes as u64);
            }
        };
        let started: Vec<_> = (0..readers).map(|_| scope.spawn(read_some)).collect();
        started.into_iter().try_for_each(|reader| match reader.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    drop(slots);
    tracing::info!(records = keys.len(), region = %Bytes(bytes), pages = %pages.page_kind(),
        ms = progress.started.elapsed().as_millis(), "records are in memory");
    Ok(pages)
}

/// Says how far a load is, now and then.
struct Progress {
    started: Instant,
    records: u64,
    done: AtomicU64,
    bytes: AtomicU64,
    /// Intervals that have been spoken of.
    said: AtomicU64,
}

impl Progress {
    fn new(records: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { started: Instant::now(), records, done: zero(), bytes: zero(), said: zero() }
    }

    fn one_more(&self, bytes: u64) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let interval = self.started.elapsed().as_secs() / PROGRESS_INTERVAL.as_secs();
        if self.said.fetch_max(interval, Ordering::Relaxed) < interval {
            tracing::info!(done, of = self.records, read = %Bytes(bytes), "reading the store");
        }
    }
}
