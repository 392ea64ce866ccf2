//! The records that are held in memory for clients to READ.
//!
//! One pinned region of equal slots, as large as the largest record of any layer, so that a slot
//! can hold whatever record. The region is filled before anything is registered or published, and each
//! record is checked in its slot: one that is damaged is withdrawn, and the slot of one that is damaged
//! or that the disk did not give is left to others. Later each slot's one owner, the residency thread,
//! gives it other contents.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::store::{ExpertStore, StoreError};
use gpu_sys::limits::Bytes;
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions};
use gpu_sys::slots::{PinnedSlot, SlotMemory, pin_slots};

use super::RailsError;
use super::budget::Plan;
use crate::ledger::Ledger;
use crate::residency::check;
use crate::seldom::Seldom;

/// Most threads that read the store at start.
const MAX_READERS: usize = 8;
/// So many records that cannot be read, and none that can, and the store is given up: a disk that is
/// gone may take its time to say so of each.
const HOPELESS: usize = 64;
/// How often a long load says how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// A region, its slots, and for each of the records that were to be in them whether it is.
pub(super) struct Loaded {
    pub(super) memory: Arc<SlotMemory>,
    pub(super) slots: Vec<PinnedSlot>,
    pub(super) sound: Vec<bool>,
}

/// Pins a region for `plan` and reads `keys` into its slots, in their order. What is damaged is
/// withdrawn from `ledger`, and where records are spilled it is not to be published.
pub(super) fn load(
    store: &ExpertStore,
    plan: &Plan,
    keys: &[ExpertKey],
    ledger: &Ledger,
) -> Result<Loaded, RailsError> {
    let bytes = plan.bytes();
    let too_large = |_| RailsError::TooLarge { bytes };
    let slot_bytes = usize::try_from(plan.slot_bytes).map_err(too_large)?;
    let slots = usize::try_from(plan.slots).map_err(too_large)?;
    let (huge_pages, numa) = (HugePages::Prefer, NumaPlacement::default());
    let options = PinnedOptions { bytes: 0, huge_pages, numa };
    let (memory, mut slots) =
        pin_slots(slot_bytes, slots, options).map_err(|source| RailsError::Pin { source })?;
    let progress = Progress::new(keys.len() as u64);
    let mut sound = fill(store, keys, &mut slots, ledger, &progress)?;
    let records = sound.iter().filter(|sound| **sound).count();
    if plan.slots == plan.records {
        // Nothing is pushed, so what no table names would be nowhere: a client that READs it is told
        // what differs.
        sound.fill(true);
    }
    let spilled = plan.records - sound.iter().filter(|sound| **sound).count() as u64;
    tracing::info!(records, spilled,
        region = %Bytes(bytes), limited_by = plan.bound_by, pages = %memory.pages().page_kind(),
        ms = progress.started.elapsed().as_millis(), "records are in memory");
    Ok(Loaded { memory, slots, sound })
}

/// Reads each of `keys` into the slot at its place and checks it there, on several threads; says which
/// are sound. An error where the disk gives none of them, or of the first [`HOPELESS`].
fn fill(
    store: &ExpertStore,
    keys: &[ExpertKey],
    slots: &mut [PinnedSlot],
    ledger: &Ledger,
    progress: &Progress,
) -> Result<Vec<bool>, RailsError> {
    let slots: Vec<Mutex<&mut PinnedSlot>> = slots.iter_mut().map(Mutex::new).collect();
    let (next, unread) = (AtomicUsize::new(0), Mutex::new(Unread::default()));
    let readers = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_READERS);
    let read_some = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some(&key), Some(slot)) = (keys.get(at), slots.get(at)) else { return Ok(()) };
            let record = store.manifest().layout().locate(key);
            let record_bytes = record.map_or(0, |layer| layer.record_bytes()) as usize;
            // Each slot is taken by one reader, once.
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            let read = store.read_at(key, 0, &mut slot.bytes_mut()[..record_bytes]);
            if let Err(source) = read {
                let mut unread = unread.lock().unwrap_or_else(PoisonError::into_inner);
                let records = unread.one_more(at, key, &source);
                if records == keys.len().min(HOPELESS) && progress.is_none_done() {
                    next.store(keys.len(), Ordering::Relaxed);
                    return Err(RailsError::Load { records, source });
                }
                continue;
            }
            if let Err(mismatch) = check(store.manifest(), key, slot.bytes()) {
                tracing::error!(%key, %mismatch,
                    "a record is damaged on disk; it is withdrawn until the store is mended");
                ledger.withdraw(key);
            }
            progress.one_more(record_bytes as u64);
        }
    };
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..readers).map(|_| scope.spawn(read_some)).collect();
        started.into_iter().try_for_each(|reader| match reader.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let mut sound: Vec<bool> = keys.iter().map(|&key| !ledger.is_withdrawn(key)).collect();
    let unread = unread.into_inner().unwrap_or_else(PoisonError::into_inner);
    unread.at.into_iter().for_each(|at| sound[at] = false);
    Ok(sound)
}

/// Records that the disk did not give, by their place among those that were to be loaded.
#[derive(Default)]
struct Unread {
    at: Vec<usize>,
    said: Seldom,
}

impl Unread {
    /// Says how many there are by now.
    fn one_more(&mut self, at: usize, key: ExpertKey, error: &StoreError) -> usize {
        self.at.push(at);
        if let Some(so_far) = self.said.once_more() {
            tracing::error!(%key, %error, so_far, "a record cannot be read; the others are served");
        }
        self.at.len()
    }
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

    fn is_none_done(&self) -> bool {
        self.done.load(Ordering::Relaxed) == 0
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use expert_tier::store::manifest::layer_file_name;
    use expert_tier::testing::TestStore;

    use super::*;

    fn slots(store: &ExpertStore, count: usize) -> Vec<PinnedSlot> {
        let slot_bytes = store.manifest().layout().max_stride() as usize;
        let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
        let options = PinnedOptions { bytes: 0, huge_pages, numa };
        pin_slots(slot_bytes, count, options).unwrap().1
    }

    #[test]
    fn a_record_that_cannot_be_read_has_no_slot_unless_there_is_no_other() {
        let test = TestStore::new(2, 4, &[5_000, 3_000], 79);
        let store = test.open();
        let keys: Vec<_> = store.manifest().layout().keys().collect();
        let second = test.path().join(layer_file_name(keys[4].layer));
        File::options().write(true).open(second).unwrap().set_len(0).unwrap();
        let ledger = Ledger::new(store.manifest());
        let mut slots = slots(&store, 8);
        let load = |keys: &[ExpertKey], slots: &mut Vec<PinnedSlot>| {
            fill(&store, keys, slots, &ledger, &Progress::new(keys.len() as u64))
        };
        let sound = load(&keys[2..6], &mut slots).unwrap();
        assert_eq!(sound, [true, true, false, false]);
        assert_eq!(ledger.withdrawn(), 0, "the disk may give it yet");
        let failure = load(&keys[4..], &mut slots).unwrap_err();
        assert!(matches!(failure, RailsError::Load { records: 4, .. }), "{failure}");
    }

    #[test]
    fn a_store_of_which_nothing_can_be_read_is_given_up_before_all_of_it_was_tried() {
        let test = TestStore::new(1, 200, &[100], 80);
        let store = test.open();
        let keys: Vec<_> = store.manifest().layout().keys().collect();
        let cut = |records: u64| {
            let file = File::options().write(true).open(test.path().join(layer_file_name(0)));
            file.unwrap().set_len(records * store.manifest().layout().max_stride()).unwrap();
        };
        let (ledger, mut slots) = (Ledger::new(store.manifest()), slots(&store, 200));
        let mut load = || fill(&store, &keys, &mut slots, &ledger, &Progress::new(200));
        cut(1);
        assert_eq!(load().unwrap().iter().filter(|sound| **sound).count(), 1, "one is enough");
        cut(0);
        let failure = load().unwrap_err();
        assert!(matches!(failure, RailsError::Load { records: HOPELESS, .. }), "{failure}");
    }

    #[test]
    fn a_record_that_is_damaged_on_disk_is_withdrawn_before_anything_is_published() {
        let test = TestStore::new(2, 4, &[5_000, 3_000], 78);
        let store = test.open();
        let keys: Vec<_> = store.manifest().layout().keys().collect();
        for record in [1, 6] {
            test.flip_bit(keys[record], 1_000);
        }
        let ledger = Ledger::new(store.manifest());
        let mut slots = slots(&store, 5);
        let progress = Progress::new(5);
        // The other one is not read, and nobody knows of it yet.
        let sound = fill(&store, &keys[..5], &mut slots, &ledger, &progress).unwrap();
        assert_eq!(sound, [true, false, true, true, true]);
        let withdrawn: Vec<_> = (0..8).filter(|record| ledger.has_withdrawn(*record)).collect();
        assert_eq!(withdrawn, [1]);
    }
}
