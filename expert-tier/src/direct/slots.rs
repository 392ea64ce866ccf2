//! Reading a store past the page cache into pinned slots, for whoever sends from them.

#![allow(unsafe_code, reason = "the kernel writes to slots that only the ring knows to be whole")]

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use gpu_sys::slots::{PinnedSlot, SlotMemory};

use super::ring::{Driver, Extent, Finished, Region, Ring, RingOptions, Target};
use super::{DirectFiles, NotDirect};
use crate::store::ExpertStore;

/// How a reader is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotReaderOptions {
    /// Reads that the disk has at once.
    pub depth: NonZeroU32,
    /// Bytes of one read, a multiple of 4096; what is longer is read in several.
    pub piece_bytes: usize,
    /// Longest wait of a dropped reader for the reads in flight.
    pub drop_wait: Duration,
}

/// Bytes of a layer's file that are to be read whole, to the start of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotRead {
    /// The layer, by its position in the store's layout.
    pub layer_at: usize,
    /// Where they start in the file: a multiple of 4096.
    pub offset: u64,
    /// How many: a multiple of 4096, at most the slot's.
    pub bytes: usize,
}

/// A read that has ended, with its slot.
#[derive(Debug)]
pub struct SlotReadEnd<U> {
    /// The slot.
    pub slot: PinnedSlot,
    /// What came with it.
    pub tag: U,
    /// Whether all bytes are there; where not, some may be.
    pub outcome: io::Result<()>,
}

/// Reads a store's files into slots, on the one thread that drives it, without blocking it.
///
/// Dropping it waits for the reads in flight, at most `drop_wait`; slots that the kernel may still
/// write to then are leaked.
pub struct SlotReader<U> {
    driver: Driver<Slot, U>,
    ring: Ring<Slot, U>,
    finished: Vec<Finished<Slot, U>>,
}

/// A slot in the ring.
struct Slot(PinnedSlot);

/// All slots' memory.
struct Whole(Arc<SlotMemory>);

// SAFETY: the slot owns these bytes, which lie in pages that it keeps mapped; it is in the ring with
// this value, so nobody here reads or writes them. A device or a peer that reads them meanwhile gets
// a mixture, as the slot's own contract says.
unsafe impl Target for Slot {
    fn memory(&self) -> (NonNull<u8>, usize) {
        (self.0.start(), self.0.bytes().len())
    }

    fn arrived(&mut self, _bytes: usize) {}
}

// SAFETY: one mapping, which the value keeps.
unsafe impl Region for Whole {
    fn region(&self) -> (NonNull<u8>, usize) {
        (self.0.pages().address(), self.0.pages().len())
    }
}

impl<U> SlotReader<U> {
    /// Finds out whether `store` can be read so, and sets up a ring. `memory` holds the slots; where
    /// the kernel does not register it, reads pin its pages each time.
    ///
    /// # Errors
    /// [`NotDirect`] says why not.
    pub fn open(
        store: &ExpertStore,
        memory: &Arc<SlotMemory>,
        options: SlotReaderOptions,
    ) -> Result<Self, NotDirect> {
        let files = DirectFiles::open(store)?;
        let ring = RingOptions {
            depth: options.depth.get(),
            piece_bytes: options.piece_bytes,
            usual_bytes: options.piece_bytes,
            drop_wait: options.drop_wait,
        };
        let (ring, driver) = Ring::open(&files.0, ring).map_err(NotDirect::Ring)?;
        if let Err(error) = ring.register(Box::new(Whole(Arc::clone(memory)))) {
            tracing::info!(%error, "slots are not registered with io_uring: reads pin their pages");
        }
        Ok(Self { driver, ring, finished: Vec::new() })
    }

    /// Takes a read; [`turn`](Self::turn) starts it, and gives the slot back at its end.
    pub fn submit(&mut self, read: SlotRead, slot: PinnedSlot, tag: U) {
        // Layers are bounded far below 2^32.
        let extent = Extent { file: read.layer_at as u32, offset: read.offset, bytes: read.bytes };
        self.driver.submit(extent, Slot(slot), tag);
    }

    /// Starts reads and hands out those that have ended; never waits.
    ///
    /// # Errors
    /// The kernel takes no reads; those that it has go on.
    pub fn turn(&mut self, mut each: impl FnMut(SlotReadEnd<U>)) -> io::Result<()> {
        if self.under_way() == 0 {
            // Whoever looks all the time would call the kernel all the time.
            return Ok(());
        }
        let turned = self.driver.turn(Duration::ZERO, &mut self.finished);
        for Finished { memory, tag, outcome } in self.finished.drain(..) {
            each(SlotReadEnd { slot: memory.0, tag, outcome });
        }
        turned
    }

    /// Reads that have not been handed out.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.ring.jobs()
    }
}

impl<U> AsFd for SlotReader<U> {
    /// Readable when a read has ended, for poll(2).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions};
    use gpu_sys::slots::pin_slots;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::testing::TestStore;

    /// A store on a file system with direct reads, which the target directory's usually is.
    fn reader(store: &ExpertStore, slots: usize) -> Option<(SlotReader<usize>, Vec<PinnedSlot>)> {
        let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
        let options = PinnedOptions { bytes: 0, huge_pages, numa };
        let (memory, slots) = pin_slots(64 << 10, slots, options).unwrap();
        let depth = NonZeroU32::new(2).unwrap();
        let piece_bytes = 16 << 10;
        let options = SlotReaderOptions { depth, piece_bytes, drop_wait: Duration::from_secs(5) };
        match SlotReader::open(store, &memory, options) {
            Ok(reader) => Some((reader, slots)),
            Err(reason) => {
                println!("not tried here: {reason}");
                None
            }
        }
    }

    fn until_ended(reader: &mut SlotReader<usize>, count: usize) -> Vec<SlotReadEnd<usize>> {
        let mut ended = Vec::new();
        while ended.len() < count {
            reader.turn(|end| ended.push(end)).unwrap();
            let bound = Timespec { tv_sec: 20, tv_nsec: 0 };
            let mut fds = [PollFd::new(reader, PollFlags::IN)];
            assert!(ended.len() == count || poll(&mut fds, Some(&bound)).unwrap() > 0);
        }
        ended
    }

    #[test]
    fn a_file_that_ends_within_a_read_ends_it_and_does_not_leave_it_waiting() {
        for end in [40_000, 36_864] {
            let store = TestStore::new(1, 2, &[100_000], 4);
            let opened = store.open();
            let Some((mut reader, mut slots)) = reader(&opened, 1) else { return };
            let path = store.path().join(crate::store::manifest::layer_file_name(0));
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(end).unwrap();
            let read = SlotRead { layer_at: 0, offset: 32_768, bytes: 16_384 };
            reader.submit(read, slots.pop().unwrap(), 0);
            let ended = until_ended(&mut reader, 1);
            let error = ended[0].outcome.as_ref().unwrap_err();
            println!("cut at {end}: {error}");
        }
    }

    #[test]
    fn slots_come_back_with_the_files_bytes() {
        let store = TestStore::new(2, 2, &[100_000, 50_000], 3);
        let opened = store.open();
        let Some((mut reader, slots)) = reader(&opened, 3) else { return };
        for (at, slot) in slots.into_iter().enumerate() {
            let read = SlotRead { layer_at: at % 2, offset: 4096 * at as u64, bytes: 40_960 };
            reader.submit(read, slot, at);
        }
        for end in until_ended(&mut reader, 3) {
            end.outcome.unwrap();
            let layer = &opened.manifest().layout().layers()[end.tag % 2];
            let key = crate::key::ExpertKey::new(layer.layer(), 0);
            let mut expected = vec![0; 40_960];
            opened.read_at(key, 4096 * end.tag as u64, &mut expected).unwrap();
            assert!(end.slot.bytes()[..40_960] == expected, "read {}", end.tag);
        }
        assert_eq!(reader.under_way(), 0);
    }

    #[test]
    fn a_read_beyond_the_file_fails_and_gives_its_slot_back() {
        let store = TestStore::new(1, 1, &[5_000], 3);
        let Some((mut reader, slots)) = reader(&store.open(), 2) else { return };
        for (slot, offset) in slots.into_iter().zip([0, 1 << 20]) {
            reader.submit(SlotRead { layer_at: 0, offset, bytes: 40_960 }, slot, 0);
        }
        for end in until_ended(&mut reader, 2) {
            assert_eq!(end.outcome.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
