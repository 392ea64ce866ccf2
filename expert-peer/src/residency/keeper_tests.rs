use std::fs::OpenOptions;

use expert_tier::store::manifest::layer_file_name;
use expert_tier::testing::TestStore;
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions};
use gpu_sys::slots::pin_slots;
use railset::message::{Damaged, Usage, UsageEntry};
use railset::table::SPILLED;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(30);
/// Bytes into a record, and into its payload.
const IN_PAYLOAD: u64 = 1000;

/// A keeper of two layers of four experts, whose first three records, or all, are in memory.
struct Kept {
    test: TestStore,
    store: ExpertStore,
    shared: Arc<Residency>,
    keeper: Keeper,
}

impl Kept {
    fn new(move_ack: Duration) -> Self {
        Self::with_slots(3, move_ack)
    }

    fn with_slots(count: usize, move_ack: Duration) -> Self {
        let test = TestStore::new(2, 4, &[5_000, 3_000], 77);
        let store = test.open();
        let slot_bytes = store.manifest().layout().max_stride();
        let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
        let pinned = PinnedOptions { bytes: 0, huge_pages, numa };
        let (_, mut slots) = pin_slots(slot_bytes as usize, count, pinned).unwrap();
        let keys: Vec<_> = store.manifest().layout().keys().collect();
        for (slot, &key) in slots.iter_mut().zip(&keys) {
            let layer = store.manifest().layout().locate(key).unwrap();
            let bytes = &mut slot.bytes_mut()[..layer.record_bytes() as usize];
            store.read_at(key, 0, bytes).unwrap();
        }
        let columns = vec![Column { base: 1 << 32, rkey: 5 }];
        let start = Start { slots, slot_bytes, records: (0..count).map(Some).collect(), columns };
        let options = ResidencyOptions { move_ack, ..ResidencyOptions::default() };
        let ledger = Arc::new(Ledger::new(store.manifest()));
        let (shared, keeper) = Keeper::new(store.manifest(), ledger, start, options).unwrap();
        Self { test, store, shared, keeper }
    }

    fn round(&mut self) {
        self.keeper.round(&self.store, SECOND, &|| false).unwrap();
    }

    fn key(&self, record: usize) -> ExpertKey {
        self.keeper.keys[record]
    }

    fn fetched(&self, record: usize, times: u32) {
        self.shared.ledger.fetched(self.key(record), times);
    }

    fn damaged(&self, record: usize) {
        let ExpertKey { layer, expert } = self.key(record);
        self.shared.damaged(Damaged { layer, expert });
    }

    /// The records in memory by the published table; each must be right in its slot.
    fn resident(&self) -> Vec<usize> {
        let table = self.shared.live.table();
        let slots = table.layers().iter().flat_map(|layer| layer.slots.clone());
        let resident: Vec<_> = (0..).zip(slots).filter(|(_, slot)| *slot != SPILLED).collect();
        for &(record, slot) in &resident {
            self.keeper.check(self.key(record), slot).unwrap();
            let identity = self.store.manifest().identity(self.key(record)).unwrap();
            let payload = &self.keeper.slots[slot as usize].bytes()
                [identity.header_bytes() as usize..identity.record_bytes() as usize];
            assert!(payload == self.test.payload(self.key(record)), "record {record} is wrong");
        }
        resident.into_iter().map(|(record, _)| record).collect()
    }

    /// Generation, promotions, demotions, withdrawn.
    fn counts(&self) -> [u64; 4] {
        let report = self.shared.report();
        [report.table_generation, report.promotions, report.demotions, report.withdrawn]
    }
}

#[test]
fn what_is_fetched_most_comes_into_memory_and_the_coldest_goes() {
    let mut kept = Kept::new(LONG);
    assert_eq!(kept.resident(), [0, 1, 2]);
    kept.round();
    assert_eq!(kept.counts(), [1, 0, 0, 0], "nothing was fetched, so nothing moves");
    let ExpertKey { layer, expert } = kept.key(0);
    let read = UsageEntry { layer, expert, reads: 40 };
    let stray = UsageEntry { layer: 99, expert: 0, reads: u32::MAX };
    kept.shared.used(&Usage { entries: vec![read, stray] });
    kept.fetched(5, 50);
    kept.fetched(7, 30);
    kept.round();
    assert_eq!(kept.resident(), [0, 5, 7]);
    // All of a round's moves with two tables.
    assert_eq!(kept.counts(), [3, 2, 2, 0]);
    let report = kept.shared.report();
    assert_eq!((report.resident_records, report.spilled_records), (3, 5));
    let layers = report.residency.iter().map(|it| (it.layer, it.resident, it.experts));
    assert_eq!(layers.collect::<Vec<_>>(), [(0, 1, 4), (1, 2, 4)]);
    (0..100).for_each(|_| kept.round());
    assert_eq!(kept.counts(), [3, 2, 2, 0], "and then nothing moves any more");
}

#[test]
fn no_slot_is_overwritten_before_every_client_has_followed() {
    let mut kept = Kept::new(LONG);
    let shared = Arc::clone(&kept.shared);
    let (one, other) = (shared.live.enter(), shared.live.enter());
    kept.fetched(5, 50);
    std::thread::scope(|scope| {
        let round = scope.spawn(|| kept.round());
        while shared.live.generation() < 2 {
            std::thread::yield_now();
        }
        let table = shared.live.table();
        let slots: Vec<_> = table.layers().iter().flat_map(|it| it.slots.clone()).collect();
        assert_eq!(slots.iter().filter(|slot| **slot != SPILLED).count(), 2);
        one.acknowledged(2);
        other.acknowledged(1);
        // A round that did not wait would be over in a fraction of this.
        let watched = Instant::now();
        while watched.elapsed() < Duration::from_millis(100) {
            assert!(!round.is_finished() && shared.report().promotions == 0);
            std::thread::yield_now();
        }
        drop(other);
        round.join().unwrap();
    });
    assert_eq!(kept.counts(), [3, 1, 1, 0]);
    drop(one);
}

#[test]
fn a_client_that_does_not_follow_costs_its_time_and_no_more() {
    let mut kept = Kept::new(Duration::from_millis(1));
    let _mute = kept.shared.live.enter();
    kept.fetched(5, 50);
    kept.round();
    assert!(kept.resident().contains(&5));
    assert_eq!(kept.counts(), [3, 1, 1, 0]);
}

#[test]
fn a_record_that_is_damaged_in_memory_is_read_anew() {
    let mut kept = Kept::new(LONG);
    let at = IN_PAYLOAD as usize;
    kept.keeper.slots[1].bytes_mut()[at] ^= 1;
    kept.damaged(1);
    kept.damaged(0);
    kept.round();
    assert_eq!(kept.resident(), [0, 1, 2]);
    assert_eq!(kept.counts(), [3, 1, 1, 0], "out with one table, back with the next");
    // Not again at once, however often it is said.
    kept.keeper.slots[1].bytes_mut()[at] ^= 1;
    kept.damaged(1);
    kept.round();
    assert_eq!(kept.counts(), [3, 1, 1, 0]);
    (0..10).for_each(|_| kept.round());
    kept.damaged(1);
    kept.round();
    assert_eq!(kept.resident(), [0, 1, 2]);
    assert_eq!(kept.counts(), [5, 2, 2, 0]);
}

#[test]
fn a_peer_that_spills_nothing_mends_a_record_under_the_table_that_names_it() {
    let all: Vec<_> = (0..8).collect();
    let mut kept = Kept::with_slots(8, LONG);
    let at = IN_PAYLOAD as usize;
    kept.keeper.slots[1].bytes_mut()[at] ^= 1;
    kept.damaged(1);
    kept.round();
    assert_eq!((kept.counts(), kept.resident()), ([1, 0, 0, 0], all.clone()));
    // What the disk does not give now stays, for it may give it later.
    kept.keeper.slots[2].bytes_mut()[at] ^= 1;
    let path = kept.test.path().join(layer_file_name(0));
    let whole = std::fs::read(&path).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    kept.damaged(2);
    kept.round();
    assert_eq!(kept.counts(), [1, 0, 0, 0]);
    std::fs::write(&path, whole).unwrap();
    (0..10).for_each(|_| kept.round());
    kept.damaged(2);
    kept.round();
    assert_eq!((kept.counts(), kept.resident()), ([1, 0, 0, 0], all));
    // Of one that is damaged on disk, too, there is no better: clients go on refusing it.
    kept.keeper.slots[5].bytes_mut()[at] ^= 1;
    kept.test.flip_bit(kept.key(5), IN_PAYLOAD);
    kept.damaged(5);
    kept.round();
    assert_eq!(kept.counts(), [1, 0, 0, 1]);
}

#[test]
fn a_record_that_is_damaged_on_disk_is_withdrawn_and_a_sound_copy_in_memory_kept() {
    let mut kept = Kept::new(LONG);
    for record in [0, 4] {
        kept.test.flip_bit(kept.key(record), IN_PAYLOAD);
        kept.damaged(record);
    }
    kept.round();
    assert_eq!(kept.counts(), [1, 0, 0, 2]);
    // The one on disk does not come, and the one in memory is the coldest and does not go.
    kept.fetched(1, 60);
    kept.fetched(2, 60);
    kept.fetched(4, 900);
    kept.fetched(5, 900);
    kept.round();
    assert_eq!(kept.resident(), [0, 2, 5]);
    // When that is gone too, there is nothing left to serve.
    (0..10).for_each(|_| kept.round());
    kept.keeper.slots[0].bytes_mut()[IN_PAYLOAD as usize] ^= 1;
    kept.damaged(0);
    kept.round();
    assert!(!kept.resident().contains(&0));
    assert_eq!(kept.shared.report().withdrawn, 2);
}

#[test]
fn however_much_clients_report_a_few_records_a_second_are_looked_at() {
    let mut kept = Kept::new(LONG);
    (0..8).for_each(|record| kept.test.flip_bit(kept.key(record), IN_PAYLOAD));
    // A third of a second; the first has a whole second's checks.
    let round = |kept: &mut Kept| {
        (0..8).for_each(|record| kept.damaged(record));
        kept.keeper.checks = kept.keeper.checks.min(3.0);
        kept.keeper.round(&kept.store, SECOND / 3, &|| false).unwrap();
        kept.shared.report().withdrawn
    };
    assert_eq!([round(&mut kept), round(&mut kept)], [5, 8]);
}

#[test]
fn a_damaged_record_is_found_before_it_is_published() {
    let mut kept = Kept::new(LONG);
    kept.test.flip_bit(kept.key(6), IN_PAYLOAD);
    kept.fetched(6, 90);
    kept.fetched(5, 3);
    kept.round();
    assert!(kept.shared.ledger.is_withdrawn(kept.key(6)));
    assert_eq!(kept.counts(), [2, 0, 1, 1]);
    // Its slot is for whoever was fetched at all.
    kept.round();
    assert!(kept.resident().contains(&5));
    assert_eq!(kept.counts(), [3, 1, 1, 1]);
}

#[test]
fn a_record_that_cannot_be_read_now_may_come_later() {
    let mut kept = Kept::new(LONG);
    let path = kept.test.path().join(layer_file_name(1));
    let whole = std::fs::read(&path).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(100).unwrap();
    kept.fetched(5, 90);
    kept.fetched(3, 9);
    kept.damaged(5);
    kept.keeper.policy = Policy::new(vec![5_000; 8], 5_000);
    kept.round();
    assert_eq!(kept.counts(), [2, 0, 1, 0], "a slot is free");
    kept.round();
    assert!(kept.resident().contains(&3), "and is another's");
    assert_eq!(kept.counts(), [3, 1, 1, 0]);
    (0..5).for_each(|_| kept.round());
    assert_eq!(kept.counts(), [3, 1, 1, 0], "it is not tried all the time");
    std::fs::write(&path, whole).unwrap();
    (0..10).for_each(|_| kept.round());
    assert!(kept.resident().contains(&5));
    assert_eq!(kept.counts(), [5, 2, 2, 0]);
}

#[test]
fn the_thread_looks_every_interval_and_ends_with_its_guard() {
    let mut kept = Kept::new(LONG);
    kept.keeper.options.interval = Duration::from_millis(1);
    kept.fetched(5, 90);
    let Kept { keeper, store, shared, test } = kept;
    let thread = keeper.spawn(Arc::new(store)).unwrap();
    let started = Instant::now();
    while shared.report().promotions == 0 {
        assert!(started.elapsed() < LONG, "nothing moves");
        std::thread::yield_now();
    }
    drop(thread);
    // The keeper holds the other one.
    while Arc::strong_count(&shared) > 1 {
        assert!(started.elapsed() < LONG, "the thread does not end");
        std::thread::yield_now();
    }
    drop(test);
}
