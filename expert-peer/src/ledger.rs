//! What is known of each record of the store: how often it is asked for, and whether it is withdrawn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;

/// Counts and marks, one of each per record; shared by whoever serves records and whoever decides
/// which of them are held in memory.
pub(crate) struct Ledger {
    manifest: Arc<Manifest>,
    /// By the numbers that the layout gives them.
    records: Vec<Record>,
    withdrawn: AtomicUsize,
}

#[derive(Default)]
struct Record {
    /// Fetches since they were last taken.
    fetches: AtomicU32,
    withdrawn: AtomicBool,
}

impl Ledger {
    pub(crate) fn new(manifest: &Arc<Manifest>) -> Self {
        let count = manifest.layout().records() as usize;
        let records = std::iter::repeat_with(Record::default).take(count).collect();
        Self { manifest: Arc::clone(manifest), records, withdrawn: AtomicUsize::new(0) }
    }

    /// Records of the store.
    pub(crate) fn records(&self) -> usize {
        self.records.len()
    }

    /// The record's number, counted by layer and expert.
    pub(crate) fn number(&self, key: ExpertKey) -> Option<usize> {
        let layout = self.manifest.layout();
        layout.record_number(layout.layer_index(key.layer)?, key.expert)
    }

    /// Counts fetches of a record; of one that is not in the store, nothing.
    pub(crate) fn fetched(&self, key: ExpertKey, times: u32) {
        if let Some(number) = self.number(key) {
            let count = &self.records[number].fetches;
            let add = |before: u32| Some(before.saturating_add(times));
            let _before = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
    }

    /// The fetches of record `number` since this was last asked.
    pub(crate) fn take_fetches(&self, number: usize) -> u32 {
        self.records.get(number).map_or(0, |it| it.fetches.swap(0, Ordering::Relaxed))
    }

    /// The peer's own copy of a record is damaged: it is served no more.
    pub(crate) fn withdraw(&self, key: ExpertKey) {
        if let Some(number) = self.number(key)
            && !self.records[number].withdrawn.swap(true, Ordering::Relaxed)
        {
            self.withdrawn.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that are served no more.
    pub(crate) fn withdrawn(&self) -> usize {
        self.withdrawn.load(Ordering::Relaxed)
    }

    /// Whether record `number` is served no more.
    pub(crate) fn has_withdrawn(&self, number: usize) -> bool {
        self.records.get(number).is_some_and(|it| it.withdrawn.load(Ordering::Relaxed))
    }

    /// Whether a record is served no more.
    pub(crate) fn is_withdrawn(&self, key: ExpertKey) -> bool {
        self.number(key).is_some_and(|number| self.has_withdrawn(number))
    }
}

#[cfg(test)]
mod tests {
    use expert_tier::store::ExpertStore;
    use expert_tier::testing::TestStore;

    use super::*;

    #[test]
    fn records_are_counted_and_withdrawn_one_by_one() {
        let store = TestStore::mixed(3);
        let store = ExpertStore::open(&store.path()).unwrap();
        let ledger = Ledger::new(store.manifest());
        let keys: Vec<_> = store.manifest().layout().keys().collect();
        for (at, &key) in keys.iter().enumerate() {
            assert_eq!(ledger.number(key), Some(at));
            ledger.fetched(key, at as u32);
        }
        ledger.fetched(keys[1], u32::MAX);
        ledger.fetched(ExpertKey::new(9999, 0), 1);
        assert_eq!(ledger.take_fetches(1), u32::MAX, "as many as can be counted");
        assert_eq!(ledger.take_fetches(1), 0);
        assert_eq!(ledger.take_fetches(2), 2);
        ledger.withdraw(keys[3]);
        let withdrawn: Vec<_> = keys.iter().filter(|&&key| ledger.is_withdrawn(key)).collect();
        assert_eq!(withdrawn, [&keys[3]]);
        ledger.withdraw(keys[3]);
        assert_eq!((ledger.withdrawn(), ledger.records()), (1, keys.len()));
    }
}
