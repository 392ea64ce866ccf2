//! Which record is in which slot. Records are numbered by layer and expert, as the ledger has them.

use expert_tier::layout::ExpertLayout;
use railset::table::{Column, LayerTable, SPILLED, Table, TableError};

/// Both directions; they say the same.
pub(crate) struct Places {
    /// Each record's slot, or [`SPILLED`].
    slots: Vec<u32>,
    /// Each slot's record.
    records: Vec<Option<usize>>,
}

impl Places {
    /// `records` records on disk, and `slots` free slots.
    pub(crate) fn new(records: usize, slots: usize) -> Self {
        Self { slots: vec![SPILLED; records], records: vec![None; slots] }
    }

    /// The slot of a record, if it is in memory.
    pub(crate) fn slot(&self, record: usize) -> Option<u32> {
        self.slots.get(record).copied().filter(|slot| *slot != SPILLED)
    }

    /// Puts a record into a free slot.
    pub(crate) fn put(&mut self, record: usize, slot: u32) {
        debug_assert!(self.slot(record).is_none() && self.records[slot as usize].is_none());
        self.slots[record] = slot;
        self.records[slot as usize] = Some(record);
    }

    /// Frees a record's slot.
    pub(crate) fn spill(&mut self, record: usize) {
        if let Some(slot) = self.slot(record) {
            self.slots[record] = SPILLED;
            self.records[slot as usize] = None;
        }
    }

    /// The free slots, ascending.
    pub(crate) fn free(&self) -> impl Iterator<Item = u32> {
        let slots = (0_u32..).zip(&self.records);
        slots.filter(|(_, record)| record.is_none()).map(|(slot, _)| slot)
    }

    /// The records in memory, in the order of their slots.
    pub(crate) fn resident(&self) -> impl Iterator<Item = usize> {
        self.records.iter().copied().flatten()
    }

    /// The table that says so.
    pub(crate) fn describe(
        &self,
        layout: &ExpertLayout,
        columns: &[Column],
        slot_stride: u64,
        generation: u64,
    ) -> Result<Table, TableError> {
        let mut rest = self.slots.iter().copied();
        let layer = |layer: &expert_tier::layout::LayerLayout| LayerTable {
            layer: layer.layer(),
            slot_stride,
            columns: columns.to_vec(),
            slots: rest.by_ref().take(layer.experts() as usize).collect(),
        };
        Table::new(generation, layout.layers().iter().map(layer).collect())
    }
}

#[cfg(test)]
mod tests {
    use expert_tier::testing::TestStore;

    use super::*;

    #[test]
    fn a_slot_has_one_record_and_the_table_says_which() {
        let store = TestStore::mixed(4).open();
        let layout = store.manifest().layout();
        let mut places = Places::new(24, 3);
        places.put(9, 1);
        places.put(0, 0);
        places.spill(0);
        places.spill(5);
        places.put(23, 2);
        assert_eq!(places.free().collect::<Vec<_>>(), [0]);
        assert_eq!(places.resident().collect::<Vec<_>>(), [9, 23]);
        let columns = [Column { base: 4096, rkey: 7 }];
        let table = places.describe(layout, &columns, 1 << 20, 5).unwrap();
        assert_eq!(table.generation(), 5);
        let slots: Vec<u32> = table.layers().iter().flat_map(|layer| layer.slots.clone()).collect();
        let resident: Vec<_> =
            slots.iter().enumerate().filter(|&(_, &slot)| slot != SPILLED).collect();
        assert_eq!(resident, [(9, &1), (23, &2)]);
    }
}
