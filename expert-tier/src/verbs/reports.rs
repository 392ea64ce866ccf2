//! What the peer is told, since it cannot know: which records are READ, and what came damaged.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use railset::message::{Damaged, Usage, UsageEntry};

use crate::key::ExpertKey;
use crate::layout::ExpertLayout;
use crate::store::manifest::Manifest;

/// Most damaged records that wait to be told of; the peer checks more than the one it is told of
/// only when it hears of them, and a client that finds that many has said enough.
const MAX_DAMAGED: usize = 64;

/// Most records of one report: 12 KiB, which a connection's buffer has room for, since nobody waits
/// until there is some.
const MAX_TOLD: usize = 1024;

pub(super) struct Reports {
    /// READs of each record since the last report, by the numbers that the layout gives them.
    reads: Vec<AtomicU32>,
    /// The record that the next report begins with.
    turn: AtomicUsize,
    damaged: Mutex<Vec<Damaged>>,
}

impl Reports {
    pub(super) fn new(layout: &ExpertLayout) -> Self {
        let count = layout.records() as usize;
        let reads = std::iter::repeat_with(|| AtomicU32::new(0)).take(count).collect();
        Self { reads, turn: AtomicUsize::new(0), damaged: Mutex::default() }
    }

    /// Record `number` has been read from the peer's memory.
    pub(super) fn was_read(&self, number: usize) {
        if let Some(reads) = self.reads.get(number) {
            // One that wraps has been read four billion times within a second.
            reads.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What came for `key` was not its record.
    pub(super) fn is_damaged(&self, key: ExpertKey) {
        let damaged = Damaged { layer: key.layer, expert: key.expert };
        let mut all = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < MAX_DAMAGED && !all.contains(&damaged) {
            all.push(damaged);
        }
    }

    pub(super) fn take_damaged(&self) -> Vec<Damaged> {
        std::mem::take(&mut *self.damaged.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What has been read since it was last told, of [`MAX_TOLD`] records at most; the others' turn
    /// comes with the next reports. `None` where nothing has been read.
    pub(super) fn take_usage(&self, manifest: &Manifest) -> Option<Usage> {
        let mut usage = Usage::default();
        let start = self.turn.load(Ordering::Relaxed);
        let all = || manifest.layout().keys().zip(&self.reads).enumerate();
        for (at, (key, count)) in all().skip(start).chain(all().take(start)) {
            let reads = count.swap(0, Ordering::Relaxed);
            if reads > 0 {
                usage.entries.push(UsageEntry { layer: key.layer, expert: key.expert, reads });
            }
            if usage.entries.len() == MAX_TOLD {
                self.turn.store(at + 1, Ordering::Relaxed);
                break;
            }
        }
        (!usage.entries.is_empty()).then_some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestStore;

    #[test]
    fn reads_are_told_once_and_damage_once_each() {
        let store = TestStore::mixed(5).open();
        let (manifest, reports) = (store.manifest(), Reports::new(store.manifest().layout()));
        let (records, last) =
            (manifest.layout().records() as usize, manifest.layout().keys().last());
        let last = last.unwrap();
        for _ in 0..3 {
            reports.was_read(records - 1);
            reports.is_damaged(last);
        }
        reports.was_read(records);
        let entry = UsageEntry { layer: last.layer, expert: last.expert, reads: 3 };
        assert_eq!(reports.take_usage(manifest), Some(Usage { entries: vec![entry] }));
        assert_eq!(reports.take_usage(manifest), None);
        assert_eq!(reports.take_damaged(), [Damaged { layer: last.layer, expert: last.expert }]);
        assert_eq!(reports.take_damaged(), []);
        for expert in 0..1000 {
            reports.is_damaged(ExpertKey::new(0, expert));
        }
        assert_eq!(reports.take_damaged().len(), MAX_DAMAGED);
    }

    #[test]
    fn what_one_report_has_no_room_for_has_its_turn_in_the_next() {
        let store = TestStore::new(1, 1500, &[256], 6).open();
        let (manifest, reports) = (store.manifest(), Reports::new(store.manifest().layout()));
        let told = || {
            let usage = reports.take_usage(manifest).unwrap();
            usage.entries.iter().map(|entry| entry.expert).collect::<Vec<_>>()
        };
        (0..1500).for_each(|record| reports.was_read(record));
        assert_eq!(told(), (0..1024).collect::<Vec<_>>());
        // The first ones again, which come behind those that have waited.
        (0..600).for_each(|record| reports.was_read(record));
        assert_eq!(told(), (1024..1500).chain(0..548).collect::<Vec<_>>());
        assert_eq!(told(), (548..600).collect::<Vec<_>>());
        assert_eq!(reports.take_usage(manifest), None);
    }
}
