//! Slots of one pinned region, filled by direct or by ordinary reads.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use expert_tier::direct::{SlotRead, SlotReadEnd, SlotReader, SlotReaderOptions};
use expert_tier::store::ExpertStore;
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions};
use gpu_sys::slots::{PinnedSlot, SlotMemory, pin_slots};
use gpu_sys::verbs::{Access, Memory, MemoryRegion, ProtectionDomain, VerbsError};
use railset::message::Transfer;

use super::super::desk::Chunk;
use super::super::options::PushError;
use super::workers::Workers;
use super::{CHUNK_BYTES, Ended, Filled, Makings, buffer_count, slot_bytes};

/// Threads of ordinary reads: they are for file systems without a disk behind them, most often.
const BUFFERED_THREADS: usize = 4;
/// Longest wait at the end for reads that the disk has.
const DROP_WAIT: Duration = Duration::from_secs(5);

/// Fields are dropped in this order: the reader waits for what it reads before its slots go.
pub(in crate::push) struct Slots {
    reader: Reader,
    /// With each device, by its number; `None` where the device is gone.
    regions: Vec<Option<MemoryRegion>>,
    buffers: Buffers,
    free: Vec<PinnedSlot>,
    count: usize,
    /// Slots that are read into at once.
    reads: usize,
    slot_bytes: u64,
    failures: u64,
}

/// The slots' memory, as it is registered with a device.
#[derive(Clone)]
pub(in crate::push) struct Buffers {
    memory: Arc<SlotMemory>,
    access: Access,
}

impl Buffers {
    /// Registers all of it.
    pub(in crate::push) fn register(
        &self,
        domain: &Arc<ProtectionDomain>,
    ) -> Result<MemoryRegion, VerbsError> {
        let memory: Arc<dyn Memory> = Arc::<SlotMemory>::clone(&self.memory);
        MemoryRegion::register(domain, memory, 0..self.memory.pages().len(), self.access)
    }
}

enum Reader {
    Direct(Box<SlotReader<Chunk>>),
    Buffered(Workers<(Chunk, PinnedSlot), SlotReadEnd<Chunk>>),
}

impl Slots {
    pub(super) fn direct(makings: &Makings<'_>) -> Result<Self, PushError> {
        Self::open(makings, |memory| {
            let depth = NonZeroU32::new(makings.options.reads).unwrap_or(NonZeroU32::MIN);
            let piece_bytes = CHUNK_BYTES as usize;
            let options = SlotReaderOptions { depth, piece_bytes, drop_wait: DROP_WAIT };
            let reader = SlotReader::open(makings.store, memory, options)?;
            Ok(Reader::Direct(Box::new(reader)))
        })
    }

    pub(super) fn buffered(makings: &Makings<'_>) -> Result<Self, PushError> {
        Self::open(makings, |_| {
            let threads = BUFFERED_THREADS.min(makings.options.reads as usize);
            let store = Arc::clone(makings.store);
            let read = move |(chunk, slot)| read(&store, chunk, slot);
            Workers::start("push-read", threads, makings.bell, read).map(Reader::Buffered)
        })
    }

    /// Pins the slots, has the reader made that fills them, and registers them with every device.
    fn open(
        makings: &Makings<'_>,
        reader: impl FnOnce(&Arc<SlotMemory>) -> Result<Reader, PushError>,
    ) -> Result<Self, PushError> {
        let access = match makings.options.transfer {
            Transfer::Push => Access::LocalRead,
            Transfer::Stage => Access::RemoteRead,
        };
        let slot_bytes = slot_bytes(makings.options, makings.range_bytes);
        let count = buffer_count(makings.options, makings.range_bytes)?;
        let (huge_pages, numa) = (HugePages::Prefer, NumaPlacement::default());
        let options = PinnedOptions { bytes: 0, huge_pages, numa };
        let (memory, free) = pin_slots(slot_bytes as usize, count, options)?;
        let reader = reader(&memory)?;
        let reads = reads(&reader, makings.options.reads, slot_bytes);
        let buffers = Buffers { memory, access };
        let register = |domain| buffers.register(domain).map(Some);
        let regions = makings.devices.iter().map(register).collect::<Result<_, _>>()?;
        Ok(Self { reader, regions, buffers, free, count, reads, slot_bytes, failures: 0 })
    }

    pub(super) fn name(&self) -> &'static str {
        match self.reader {
            Reader::Direct(_) => "direct",
            Reader::Buffered(_) => "buffered",
        }
    }

    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn start(&mut self, chunk: Chunk) {
        let Some(slot) = self.free.pop() else { return };
        match &mut self.reader {
            Reader::Direct(reader) => {
                let Chunk { place, from, bytes, .. } = chunk;
                let offset = place.start + from;
                reader.submit(SlotRead { layer_at: place.layer_at, offset, bytes }, slot, chunk);
            }
            Reader::Buffered(workers) => workers.give((chunk, slot)),
        }
    }

    pub(super) fn turn(&mut self, ended: &mut Vec<Ended>) {
        let Self { reader, free, failures, .. } = self;
        let hand_out = |end: SlotReadEnd<Chunk>| {
            let SlotReadEnd { slot, tag: chunk, outcome } = end;
            let outcome = match outcome {
                Ok(()) => Ok(Filled::Slot(slot)),
                Err(error) => {
                    free.push(slot);
                    Err(error.to_string())
                }
            };
            ended.push(Ended { chunk, outcome });
        };
        match reader {
            Reader::Direct(reader) => {
                if let Err(error) = reader.turn(hand_out) {
                    *failures += 1;
                    if failures.is_power_of_two() {
                        tracing::error!(%error, so_far = failures,
                            "the kernel takes no reads of spilled records");
                    }
                }
            }
            Reader::Buffered(workers) => std::iter::from_fn(|| workers.take()).for_each(hand_out),
        }
    }

    pub(super) fn take_back(&mut self, slot: PinnedSlot) {
        self.free.push(slot);
    }

    pub(super) fn region(&self, device: usize) -> Option<&MemoryRegion> {
        self.regions.get(device)?.as_ref()
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Takes the registration with device `device`, or drops it.
    pub(super) fn set_region(&mut self, device: usize, region: Option<MemoryRegion>) {
        if self.regions.len() <= device {
            self.regions.resize_with(device + 1, || None);
        }
        self.regions[device] = region;
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.reader {
            Reader::Direct(reader) => Some(reader.as_fd()),
            Reader::Buffered(_) => None,
        }
    }
}

/// How many slots are read into at once, where the disk has at most `depth` reads: a thread has one,
/// and the ring has each in pieces.
fn reads(reader: &Reader, depth: u32, slot_bytes: u64) -> usize {
    let depth = depth as usize;
    match reader {
        Reader::Direct(_) => depth.div_ceil(slot_bytes.div_ceil(CHUNK_BYTES).max(1) as usize),
        Reader::Buffered(_) => BUFFERED_THREADS.min(depth),
    }
}

/// Fills the start of a slot with a chunk.
fn read(store: &ExpertStore, chunk: Chunk, mut slot: PinnedSlot) -> SlotReadEnd<Chunk> {
    let outcome = match slot.bytes_mut().get_mut(..chunk.bytes) {
        Some(bytes) => store.read_at(chunk.place.key, chunk.from, bytes),
        None => Ok(()),
    };
    SlotReadEnd { slot, tag: chunk, outcome: outcome.map_err(std::io::Error::other) }
}
