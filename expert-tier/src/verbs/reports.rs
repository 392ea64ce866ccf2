//! What the peer is told, since it cannot know: which records are READ, and what came damaged.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use railset::message::{Damaged, MAX_USAGE, Usage, UsageEntry};

use crate::key::ExpertKey;
use crate::layout::ExpertLayout;
use crate::store::manifest::Manifest;

/// Most damaged records that wait to be told of; the peer checks more than the one it is told of
/// only when it hears of them, and a client that finds that many has said enough.
const MAX_DAMAGED: usize = 64;

pub(super) struct Reports {
    /// Number of the first record of each layer.
    first: Vec<usize>,
    /// READs of each record since the last report.
    reads: Vec<AtomicU32>,
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
        Self { first, reads, damaged: Mutex::default() }
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

    /// Shows what has been read since the last time, in as many reports as it takes.
    pub(super) fn take_usage(&self, manifest: &Manifest, mut show: impl FnMut(&Usage)) {
        let mut usage = Usage::default();
        for (key, count) in manifest.layout().keys().zip(&self.reads) {
            let reads = count.swap(0, Ordering::Relaxed);
            if reads > 0 {
                usage.entries.push(UsageEntry { layer: key.layer, expert: key.expert, reads });
            }
            if usage.entries.len() == MAX_USAGE {
                show(&usage);
                usage.entries.clear();
            }
        }
        if !usage.entries.is_empty() {
            show(&usage);
        }
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
        let mut told = Vec::new();
        reports.take_usage(manifest, |usage| told.push(usage.clone()));
        let entry = UsageEntry { layer: last.layer, expert: last.expert, reads: 3 };
        assert_eq!(told, [Usage { entries: vec![entry] }]);
        reports.take_usage(manifest, |usage| panic!("{usage:?} again"));
        assert_eq!(reports.take_damaged(), [Damaged { layer: last.layer, expert: last.expert }]);
        assert_eq!(reports.take_damaged(), []);
        for expert in 0..1000 {
            reports.is_damaged(ExpertKey::new(0, expert));
        }
        assert_eq!(reports.take_damaged().len(), MAX_DAMAGED);
    }
}
