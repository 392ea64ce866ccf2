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
    /// Number of the first record of each layer.
    first: Vec<usize>,
    /// READs of each record since the last report.
    reads: Vec<AtomicU32>,
    /// The record that the next report begins with.
    turn: AtomicUsize,
    damaged: Mutex<Vec<Damaged>>,
}

impl Reports {
    pub(super) fn new(layout: &ExpertLayout) -> Self {
        let mut first = Vec::new();
        let mut next = 0;
        for layer in layout.layers() {
            first.push(next);
            next += layer.experts() as usize;
        }
        let reads = std::iter::repeat_with(|| AtomicU32::new(0)).take(next).collect();
        Self { first, reads, turn: AtomicUsize::new(0), damaged: Mutex::default() }
    }

    /// A record has been read from the peer's memory.
    pub(super) fn was_read(&self, layer_index: usize, expert: u32) {
        let record =
            self.first.get(layer_index).and_then(|it| self.reads.get(it + expert as usize));
        if let Some(reads) = record {
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
    use crate::store::ExpertStore;
    use crate::testing::TestStore;

    #[test]
    fn reads_are_told_once_and_damage_once_each() {
        let store = TestStore::mixed(5);
        let store = ExpertStore::open(&store.path()).unwrap();
        let manifest = store.manifest();
        let reports = Reports::new(manifest.layout());
        let (layer, last) = (manifest.layout().layers().len() - 1, manifest.layout().keys().last());
        let last = last.unwrap();
        for _ in 0..3 {
            reports.was_read(layer, last.expert);
            reports.is_damaged(last);
        }
        reports.was_read(layer + 1, 0);
        let entry = UsageEntry { layer: last.layer, expert: last.expert, reads: 3 };
        assert_eq!(reports.take_usage(manifest), Some(Usage { entries: vec![entry] }));
        assert_eq!(reports.take_usage(manifest), None);
        assert_eq!(reports.take_damaged(), [Damaged { layer: last.layer, expert: last.expert }]);
        assert_eq!(reports.take_damaged(), []);
        // More than one report takes: every record has its turn.
        reports.turn.store(2, Ordering::Relaxed);
        manifest.layout().keys().for_each(|key| {
            let at = manifest.layout().locate_at(key).unwrap().0;
            reports.was_read(at, key.expert);
        });
        let told = reports.take_usage(manifest).unwrap();
        assert_eq!(told.entries.len() as u64, manifest.layout().records());
        assert_eq!(told.entries[0].expert, 2);
        for expert in 0..1000 {
            reports.is_damaged(ExpertKey::new(0, expert));
        }
        assert_eq!(reports.take_damaged().len(), MAX_DAMAGED);
    }
}
