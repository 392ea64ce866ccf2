//! Settings of pushes, and why they cannot be had.

use std::io;
use std::time::Duration;

use expert_tier::direct::NotDirect;
use gpu_sys::limits::Bytes;
use gpu_sys::pinned::PinError;
use gpu_sys::verbs::VerbsError;
use railset::message::Transfer;

use super::spill;

/// For the receives of clients' queue pairs: a page for each client and rail, of 256 such.
const LANES_BYTES: u64 = 1 << 20;

/// What pushes take of the memory that may be pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SpillMemory {
    /// Bytes of the pages themselves.
    pub(crate) pinned: u64,
    /// Bytes that count against the locked-memory limit: once for each device that registers the pages,
    /// and once for io_uring, which has what it reads into registered, too.
    pub(crate) locked: u64,
}

/// Where spilled records are to be read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum SpillWish {
    /// Direct reads; else file pages; else ordinary reads.
    #[default]
    Auto,
    /// Direct reads, past the page cache.
    Direct,
    /// The files' own pages.
    Mmap,
}

/// How spilled records are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PushOptions {
    /// Where they are read from.
    pub source: SpillWish,
    /// How they come to the client.
    pub transfer: Transfer,
    /// Bytes of the buffers that they are read into.
    pub buffers: u64,
    /// Reads that the disk has at once.
    pub reads: u32,
    /// Most bytes of file pages that are pinned at once.
    pub pinned: u64,
    /// Longest time in which the disk gives nothing.
    pub deadline: Duration,
    /// Longest time in which something of what is sent to a client must arrive.
    pub stall: Duration,
    /// Longest time in which a client must READ what was staged for it.
    pub lease: Duration,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            source: SpillWish::Auto,
            transfer: Transfer::Push,
            buffers: 32 << 20,
            reads: 32,
            pinned: 64 << 20,
            deadline: Duration::from_secs(1),
            stall: Duration::from_secs(2),
            lease: Duration::from_secs(5),
        }
    }
}

impl PushOptions {
    /// An error where what is allowed has no room for two buffers, or a source goes with no transfer.
    pub(crate) fn check(&self, range_bytes: u32) -> Result<(), PushError> {
        if (self.source, self.transfer) == (SpillWish::Mmap, Transfer::Stage) {
            return Err(PushError::StagedMapping);
        }
        if self.source != SpillWish::Mmap {
            spill::buffer_count(self, range_bytes)?;
        }
        if self.source != SpillWish::Direct && self.transfer == Transfer::Push {
            spill::mapping_count(self, range_bytes)?;
        }
        Ok(())
    }

    /// What pushes take of the memory that may be pinned, at most.
    pub(crate) fn memory(&self, devices: u64) -> SpillMemory {
        let times = |bytes: u64, registrations: u64| bytes.saturating_mul(registrations);
        let buffers = (self.buffers, times(self.buffers, devices.saturating_add(1)));
        let pages = (self.pinned, times(self.pinned, devices));
        let (pinned, registered) = match (self.source, self.transfer) {
            (SpillWish::Direct, _) | (SpillWish::Auto, Transfer::Stage) => buffers,
            (SpillWish::Auto, Transfer::Push) => (buffers.0.max(pages.0), buffers.1.max(pages.1)),
            (SpillWish::Mmap, _) => pages,
        };
        SpillMemory { pinned, locked: registered.saturating_add(LANES_BYTES) }
    }
}

/// Why spilled records cannot be sent as they should.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// The store cannot be read past the page cache.
    #[error("--spill-source direct: {0}")]
    Direct(#[from] NotDirect),
    /// A device does not register file pages.
    #[error(
        "--spill-source mmap: {device} does not register file pages ({source}); Linux 6.2 does"
    )]
    Mapping {
        /// The device.
        device: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A layer's file cannot be mapped.
    #[error("--spill-source mmap: the file of layer {layer} cannot be mapped: {source}")]
    Map {
        /// The layer.
        layer: u32,
        /// The kernel's answer.
        source: io::Error,
    },
    /// What is staged is in memory of the peer's own.
    #[error("--spill-transfer stage reads records into buffers: --spill-source mmap has none")]
    StagedMapping,
    /// The buffers are too few to be of use.
    #[error(
        "{flag} {bytes} is not room for two buffers of {each}: give {} or more",
        Bytes(each.0.saturating_mul(2))
    )]
    Buffers {
        /// The flag.
        flag: &'static str,
        /// Its value.
        bytes: Bytes,
        /// What a buffer takes.
        each: Bytes,
    },
    /// The buffers cannot be pinned.
    #[error("the buffers for spilled records (--push-buffers): {0}")]
    Pin(#[from] PinError),
    /// A device refuses.
    #[error("sending spilled records: {0}")]
    Verbs(#[from] VerbsError),
    /// The system gives no eventfd.
    #[error("sending spilled records: no eventfd: {0}")]
    Bell(#[source] io::Error),
    /// The system gives no thread.
    #[error("sending spilled records: no thread {name}: {source}")]
    Thread {
        /// What it was to do.
        name: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

impl PushError {
    /// Whether this machine, or this file system, does not have what was tried: another source may
    /// do.
    pub(super) fn is_of_the_machine(&self) -> bool {
        match self {
            Self::Direct(_) | Self::Mapping { .. } | Self::Map { .. } => true,
            Self::Verbs(error) => !matches!(error, VerbsError::LockLimit { .. }),
            _ => false,
        }
    }
}
