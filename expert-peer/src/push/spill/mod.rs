//! Where the bytes of spilled records come from, as sources of WRITEs.
//!
//! | source | buffers | where it is to be had |
//! |---|---|---|
//! | `direct` | slots, filled by `O_DIRECT` reads through io_uring | file systems with direct reads |
//! | `mmap` | none: the file's own pages, registered for one push | from Linux 6.2 on |
//! | `buffered` | slots, filled by ordinary reads on a few threads | everywhere; where nothing else is |
//!
//! Whatever it is, it works beside the engine's thread, and wakes it.

mod mapped;
mod slots;
mod workers;

use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};

use expert_tier::store::ExpertStore;
use gpu_sys::limits::Bytes;
use gpu_sys::slots::PinnedSlot;
use gpu_sys::verbs::{FilePart, MemoryRegion, ProtectionDomain};
use railset::message::Transfer;

use super::bell::Bell;
use super::desk::{Chunk, PAGE_BYTES};
use super::options::{PushError, PushOptions, SpillWish};
use mapped::{Domains, Mapped};
use slots::{Buffers, Slots};

/// Bytes of a chunk that is read into a slot: large enough that the disk gives what it has, small
/// enough that one chunk is on its way while the next is read.
const CHUNK_BYTES: u64 = 256 << 10;

/// Bytes of a chunk, ready to be sent.
pub(super) enum Filled {
    Slot(PinnedSlot),
    File(FilePart, Arc<MemoryRegion>),
}

/// A chunk whose read has ended.
pub(super) struct Ended {
    pub(super) chunk: Chunk,
    /// The bytes, or why there are none.
    pub(super) outcome: Result<Filled, String>,
}

/// A source of spilled records.
pub(super) enum Spill {
    Slots(Slots),
    Mapped(Mapped),
}

/// What sources are made from.
pub(super) struct Makings<'a> {
    pub(super) store: &'a Arc<ExpertStore>,
    pub(super) options: &'a PushOptions,
    pub(super) devices: &'a [Arc<ProtectionDomain>],
    pub(super) range_bytes: u32,
    pub(super) bell: &'a Bell,
}

impl Spill {
    /// The source that is wished for, or the first that is to be had. What is staged is read into
    /// buffers: [`PushOptions::check`] refuses to map it.
    pub(super) fn open(makings: &Makings<'_>) -> Result<Self, PushError> {
        let (direct, mapped) = (|| Slots::direct(makings), || Mapped::open(makings));
        match makings.options.source {
            SpillWish::Direct => return direct().map(Self::Slots),
            SpillWish::Mmap => return mapped().map(Self::Mapped),
            SpillWish::Auto => {}
        }
        if let Some(slots) = if_to_be_had(direct(), "no direct reads of spilled records")? {
            return Ok(Self::Slots(slots));
        }
        if makings.options.transfer == Transfer::Push
            && let Some(mapped) = if_to_be_had(mapped(), "no mapping of spilled records")?
        {
            return Ok(Self::Mapped(mapped));
        }
        Slots::buffered(makings).map(Self::Slots)
    }

    /// The name for logs and the status.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Slots(slots) => slots.name(),
            Self::Mapped(_) => "mmap",
        }
    }

    /// Bytes of a chunk.
    pub(super) fn chunk_bytes(&self) -> u64 {
        match self {
            Self::Slots(slots) => slots.slot_bytes(),
            Self::Mapped(mapped) => mapped.chunk_bytes(),
        }
    }

    /// Chunks that are read at once: what is given to it beyond would wait there, and look as if the
    /// disk kept it.
    pub(super) fn reads(&self) -> usize {
        match self {
            Self::Slots(slots) => slots.reads(),
            Self::Mapped(mapped) => mapped.reads(),
        }
    }

    /// Chunks that there is room for at once.
    pub(super) fn room(&self) -> usize {
        match self {
            Self::Slots(slots) => slots.count(),
            Self::Mapped(mapped) => mapped.count(),
        }
    }

    /// Whether there is room for a chunk now.
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Slots(slots) => slots.has_room(),
            Self::Mapped(mapped) => mapped.has_room(),
        }
    }

    /// Begins to read a chunk, for which there is room, to be sent through device `device`.
    pub(super) fn start(&mut self, chunk: Chunk, device: usize) {
        match self {
            Self::Slots(slots) => slots.start(chunk),
            Self::Mapped(mapped) => mapped.start(chunk, device),
        }
    }

    /// Hands out what has been read; never waits.
    pub(super) fn turn(&mut self, ended: &mut Vec<Ended>) {
        match self {
            Self::Slots(slots) => slots.turn(ended),
            Self::Mapped(mapped) => mapped.turn(ended),
        }
    }

    /// Takes bytes back that are not sent any more.
    pub(super) fn take_back(&mut self, filled: Filled) {
        match (self, filled) {
            (Self::Slots(slots), Filled::Slot(slot)) => slots.take_back(slot),
            (Self::Mapped(mapped), Filled::File(_, region)) => mapped.take_back(region),
            // A source is given what it gave out.
            (Self::Slots(_), Filled::File(..)) | (Self::Mapped(_), Filled::Slot(_)) => {}
        }
    }

    /// The registration of every slot with device `device`.
    pub(super) fn region(&self, device: usize) -> Option<&MemoryRegion> {
        match self {
            Self::Slots(slots) => slots.region(device),
            Self::Mapped(_) => None,
        }
    }

    /// What registers a device that comes later.
    pub(super) fn registrar(&self, store: &Arc<ExpertStore>) -> Registrar {
        match self {
            Self::Slots(slots) => Registrar::Buffers(slots.buffers().clone()),
            Self::Mapped(mapped) => {
                Registrar::Pages { domains: Arc::clone(mapped.domains()), store: Arc::clone(store) }
            }
        }
    }

    /// Takes the registration of every slot with device `device`, or drops it.
    pub(super) fn set_region(&mut self, device: usize, region: Option<MemoryRegion>) {
        match self {
            Self::Slots(slots) => slots.set_region(device, region),
            Self::Mapped(_) => {}
        }
    }

    /// What becomes readable when there is something to hand out, if that is not the bell alone.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Slots(slots) => slots.fd(),
            Self::Mapped(_) => None,
        }
    }
}

/// Registers what is sent with devices that come after the start, beside the engine's thread.
pub(super) enum Registrar {
    Buffers(Buffers),
    Pages { domains: Domains, store: Arc<ExpertStore> },
}

impl Registrar {
    /// Makes a device known under `device`, and gives the registration of the slots, if there are any.
    pub(super) fn add(
        &self,
        device: usize,
        domain: &Arc<ProtectionDomain>,
    ) -> Result<Option<MemoryRegion>, PushError> {
        match self {
            Self::Buffers(buffers) => Ok(Some(buffers.register(domain)?)),
            Self::Pages { domains, store } => {
                mapped::probe(domain, store.dir())?;
                let mut domains = domains.write().unwrap_or_else(PoisonError::into_inner);
                let count = domains.len().max(device + 1);
                domains.resize(count, None);
                domains[device] = Some(Arc::clone(domain));
                Ok(None)
            }
        }
    }

    /// Forgets a device.
    pub(super) fn remove(&self, device: usize) {
        let Self::Pages { domains, .. } = self else { return };
        let mut domains = domains.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(domain) = domains.get_mut(device) {
            *domain = None;
        }
    }
}

/// A source, unless it is not to be had on this machine, which `without` says in the log.
fn if_to_be_had<T>(made: Result<T, PushError>, without: &str) -> Result<Option<T>, PushError> {
    match made {
        Ok(source) => Ok(Some(source)),
        Err(error) if error.is_of_the_machine() => {
            tracing::info!(reason = %error, "{without}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Bytes of a slot: of a chunk, or of a whole request where clients READ it from there.
fn slot_bytes(options: &PushOptions, range_bytes: u32) -> u64 {
    match options.transfer {
        Transfer::Push => CHUNK_BYTES,
        Transfer::Stage => whole_request(range_bytes),
    }
}

/// How many slots there are to be.
pub(super) fn buffer_count(options: &PushOptions, range_bytes: u32) -> Result<usize, PushError> {
    count_of("--push-buffers", options.buffers, slot_bytes(options, range_bytes))
}

/// How many ranges of file pages may be pinned at once.
pub(super) fn mapping_count(options: &PushOptions, range_bytes: u32) -> Result<usize, PushError> {
    count_of("--push-pinned", options.pinned, whole_request(range_bytes))
}

/// How many buffers of `each` bytes `bytes` are; `flag` sets them.
fn count_of(flag: &'static str, bytes: u64, each: u64) -> Result<usize, PushError> {
    match usize::try_from(bytes / each) {
        Ok(count) if count >= 2 => Ok(count),
        _ => Err(PushError::Buffers { flag, bytes: Bytes(bytes), each: Bytes(each) }),
    }
}

/// Bytes of a chunk that is a whole request, wherever in a page it starts.
fn whole_request(range_bytes: u32) -> u64 {
    u64::from(range_bytes).next_multiple_of(PAGE_BYTES) + PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use expert_tier::testing::TestStore;

    use super::*;

    #[test]
    fn a_source_is_given_no_more_than_it_reads_at_once() {
        let store = Arc::new(TestStore::new(1, 2, &[5_000], 1).open());
        let bell = Bell::new().unwrap();
        for (reads, by_threads, by_mapping) in [(32, 4, 8), (2, 2, 2)] {
            let options = PushOptions { reads, ..PushOptions::default() };
            let (store, range_bytes) = (&store, 1 << 20);
            let makings =
                Makings { store, options: &options, devices: &[], range_bytes, bell: &bell };
            let buffered = Slots::buffered(&makings).map(Spill::Slots).unwrap();
            let mapped = Mapped::open(&makings).map(Spill::Mapped).unwrap();
            assert_eq!((buffered.reads(), mapped.reads()), (by_threads, by_mapping));
        }
    }
}
