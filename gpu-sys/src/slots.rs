//! Pinned pages cut into equal slots, each with one owner.
//!
//! For memory that is filled a slot at a time while devices and peers read all of it: whoever has a
//! [`PinnedSlot`] is the only one on this side that reads or writes its bytes. A device or a peer
//! that reads them meanwhile gets a mixture; nothing of what it does changes them, since the memory
//! can be registered for reading alone ([`SlotMemory`]).

#[cfg(metrale_rdma_verbs)]
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::pinned::{PinError, PinnedOptions, PinnedPages};

/// The pages of the slots, to be registered with devices.
#[derive(Debug)]
pub struct SlotMemory(PinnedPages);

/// One slot, with the pages that it is of.
#[derive(Debug)]
pub struct PinnedSlot {
    memory: Arc<SlotMemory>,
    start: NonNull<u8>,
    bytes: usize,
    index: usize,
}

// SAFETY: the bytes belong to this value alone, and the pages stay where they are.
unsafe impl Send for PinnedSlot {}
// SAFETY: through a shared reference the bytes can only be read.
unsafe impl Sync for PinnedSlot {}

/// Pins `slots` slots of `slot_bytes` each, one behind the other, filled with zeros.
///
/// # Errors
/// The memory cannot be had; [`PinError`] says why not. `options.bytes` is ignored.
pub fn pin_slots(
    slot_bytes: usize,
    slots: usize,
    options: PinnedOptions,
) -> Result<(Arc<SlotMemory>, Vec<PinnedSlot>), PinError> {
    // What does not fit an address space is refused as such.
    let bytes = slot_bytes.saturating_mul(slots);
    let pages = PinnedPages::new(&PinnedOptions { bytes, ..options })?;
    let first = pages.address();
    let memory = Arc::new(SlotMemory(pages));
    let slot = |index| {
        let memory = Arc::clone(&memory);
        // SAFETY: slot `index` starts inside the mapping, which is at least all slots long.
        let start = unsafe { first.add(index * slot_bytes) };
        PinnedSlot { memory, start, bytes: slot_bytes, index }
    };
    let all = (0..slots).map(slot).collect();
    Ok((memory, all))
}

impl SlotMemory {
    /// The pages, for what can be said of them.
    #[must_use]
    pub fn pages(&self) -> &PinnedPages {
        &self.0
    }
}

impl PinnedSlot {
    /// Which one it is, from 0.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// What it is part of.
    #[must_use]
    pub fn memory(&self) -> &Arc<SlotMemory> {
        &self.memory
    }

    /// Its first byte.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: they lie in the mapping, which was filled with zeros and lives as long as this
        // value, to which alone they belong.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// Its bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and the value is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

/// Bytes of a slot that are written to a peer from; the slot is nobody else's meanwhile.
#[cfg(metrale_rdma_verbs)]
#[derive(Debug)]
pub struct SlotPart {
    slot: PinnedSlot,
    range: Range<usize>,
}

#[cfg(metrale_rdma_verbs)]
impl PinnedSlot {
    /// Lets `range` of it be sent; a range that does not lie in the slot is cut to what does.
    #[must_use]
    pub fn into_part(self, range: Range<usize>) -> SlotPart {
        let end = range.end.min(self.bytes);
        SlotPart { range: range.start.min(end)..end, slot: self }
    }
}

#[cfg(metrale_rdma_verbs)]
impl SlotPart {
    /// The slot, when nothing is sent from it any more.
    #[must_use]
    pub fn into_slot(self) -> PinnedSlot {
        self.slot
    }
}

#[cfg(metrale_rdma_verbs)]
// SAFETY: the range lies in the slot, as `into_part` made sure; the slot is filled with zeros at
// first, stays mapped and where it is, and is in here, so nobody writes to it.
unsafe impl crate::verbs::Source for SlotPart {
    fn source(&self) -> (NonNull<u8>, usize) {
        // SAFETY: as above, the start of the range is inside the slot or its end.
        (unsafe { self.slot.start.add(self.range.start) }, self.range.len())
    }
}

#[cfg(metrale_rdma_verbs)]
// SAFETY: one mapping, made once and unmapped when dropped; nobody is let write to it.
unsafe impl crate::verbs::Memory for SlotMemory {
    fn region(&self) -> (NonNull<u8>, usize) {
        (self.0.address(), self.0.len())
    }

    fn takes_writes(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pinned::{HugePages, NumaPlacement};

    fn options() -> PinnedOptions {
        PinnedOptions { bytes: 0, huge_pages: HugePages::Off, numa: NumaPlacement::Local }
    }

    #[test]
    fn slots_lie_one_behind_the_other_and_share_no_byte() {
        let (memory, mut slots) = pin_slots(4096, 3, options()).unwrap();
        for (value, slot) in (1..).zip(&mut slots) {
            assert!(slot.bytes().iter().all(|byte| *byte == 0));
            slot.bytes_mut().fill(value);
        }
        for (index, slot) in slots.iter().enumerate() {
            assert_eq!((slot.index(), slot.bytes().len()), (index, 4096));
            let offset = slot.start().as_ptr().addr() - memory.pages().address().as_ptr().addr();
            assert_eq!(offset, index * 4096);
            assert!(slot.bytes().iter().all(|byte| usize::from(*byte) == index + 1));
        }
    }

    #[cfg(metrale_rdma_verbs)]
    #[test]
    fn a_part_is_inside_its_slot_whatever_was_asked_for() {
        use crate::verbs::Source;
        let (_memory, mut slots) = pin_slots(4096, 2, options()).unwrap();
        let mut slot = slots.remove(0);
        let start = slot.start();
        for (range, offset, bytes) in [(1..9, 1, 8), (4000..9000, 4000, 96), (5000..6000, 4096, 0)]
        {
            let part = slot.into_part(range);
            let (at, length) = part.source();
            assert_eq!((at.addr().get() - start.addr().get(), length), (offset, bytes));
            slot = part.into_slot();
        }
    }

    #[test]
    fn slots_that_no_address_space_holds_are_refused() {
        let error = pin_slots(usize::MAX / 2, 3, options()).unwrap_err();
        assert!(matches!(error, PinError::Size { .. }), "{error}");
    }

    #[cfg(metrale_rdma_verbs)]
    #[test]
    fn nobody_is_let_write_to_them() {
        use crate::verbs::{
            Access, Memory, MemoryRegion, ProtectionDomain, VerbsError, fake_device,
        };
        let (memory, _slots) = pin_slots(4096, 1, options()).unwrap();
        let domain = ProtectionDomain::new(&fake_device()).unwrap();
        for access in [Access::LocalWrite, Access::RemoteWrite] {
            let shared: Arc<dyn Memory> = memory.clone();
            let error = MemoryRegion::register(&domain, shared, 0..4096, access).unwrap_err();
            assert!(matches!(error, VerbsError::ReadOnly { .. }), "{error}");
        }
        for access in [Access::LocalRead, Access::RemoteRead] {
            let shared: Arc<dyn Memory> = memory.clone();
            MemoryRegion::register(&domain, shared, 0..4096, access).unwrap();
        }
    }
}
