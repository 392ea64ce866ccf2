//! What can go wrong with verbs: the operation, the numbers, and what to change.

use std::fmt;
use std::io;

use super::memory::MemoryRegion;
use super::prepared::PreparedQueuePair;
use crate::limits::{Bytes, LockLimit};

/// Why a verbs operation did not work.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// libibverbs is not installed, or cannot be opened.
    #[error(
        "{library} cannot be opened ({reason}): install rdma-core (Debian and Ubuntu: libibverbs1 \
         and ibverbs-providers), or use --expert-backend rdma, which needs no verbs"
    )]
    NoLibrary {
        /// The name that was tried.
        library: &'static str,
        /// What the loader said.
        reason: String,
    },
    /// The library is not the one it should be.
    #[error("{library} has no function {symbol}: install rdma-core 17 or later")]
    MissingSymbol {
        /// The library.
        library: &'static str,
        /// The function.
        symbol: &'static str,
    },
    /// No device has that name.
    #[error(
        "there is no RDMA device {name:?}, there are {found:?}: set METRALE_EXPERT_RDMA_DEV to one of them"
    )]
    NoSuchDevice {
        /// The name asked for.
        name: String,
        /// The names there are.
        found: Vec<String>,
    },
    /// A call was refused.
    #[error("{call} on {on} failed: {source}")]
    Call {
        /// The function.
        call: &'static str,
        /// Device or object, with the numbers that were passed.
        on: String,
        /// The reason given.
        source: io::Error,
    },
    /// A value that the device or the protocol does not take.
    #[error("{what} of {value} on {on}: it takes {allowed}")]
    Setting {
        /// Name of the value.
        what: &'static str,
        /// The value asked for.
        value: u64,
        /// Device or object.
        on: String,
        /// What would do.
        allowed: String,
    },
    /// A range that does not lie in its memory.
    #[error("bytes {start}..{end} are not inside memory of {bytes} bytes")]
    Range {
        /// First byte.
        start: usize,
        /// The byte behind the last.
        end: usize,
        /// Length of the memory.
        bytes: usize,
    },
    /// Memory that nobody is to write to was to be registered for writing.
    #[error("memory that is only read cannot be registered with {device} for {access:?}")]
    ReadOnly {
        /// The device.
        device: String,
        /// What was asked for.
        access: super::Access,
    },
    /// The device does not register that much at once.
    #[error(
        "{device} registers at most {} at once, {} were asked for: lower the arena \
         (--expert-arena-bytes) or the peer's --dram-budget",
        Bytes(*max_bytes), Bytes(*bytes)
    )]
    RegionTooLong {
        /// The device.
        device: String,
        /// Bytes to register.
        bytes: u64,
        /// `max_mr_size` of the device.
        max_bytes: u64,
    },
    /// The process may not lock as much memory as a registration needs.
    #[error(
        "registering with {device} needs {} of locked memory on top of {} registered so far, the \
         limit is {limit} (each device counts by itself): raise `ulimit -l` (LimitMEMLOCK= in a \
         systemd unit, --ulimit memlock= for a container), or grant CAP_IPC_LOCK, or lower the \
         arena (--expert-arena-bytes) or the peer's --dram-budget",
        Bytes(*needed_bytes), Bytes(limit.pinned_bytes)
    )]
    LockLimit {
        /// The device.
        device: String,
        /// Bytes to register.
        needed_bytes: u64,
        /// The limits in force.
        limit: LockLimit,
    },
    /// The queue pair's completions would not fit.
    #[error(
        "a completion queue of {entries} entries on {device} has {reserved} promised, {wanted} more \
         do not fit: make it longer, or queue pairs shorter or fewer"
    )]
    CompletionQueueFull {
        /// The device.
        device: String,
        /// Entries of the completion queue.
        entries: u32,
        /// Entries that its queue pairs may fill.
        reserved: u32,
        /// Entries that this queue pair may fill.
        wanted: u32,
    },
    /// Memory for received messages could not be had.
    #[error("no memory for received messages: {0}")]
    Pin(#[from] crate::pinned::PinError),
}

impl VerbsError {
    /// Whether the same call may work later, without anybody changing a setting.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Call { source, .. } => matches!(
                source.raw_os_error(),
                Some(libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::ENOMEM | libc::ETIMEDOUT)
            ),
            _ => false,
        }
    }

    /// Whether fewer bytes might be registered where these cannot be, or these where others no longer
    /// are.
    #[must_use]
    pub fn is_of_size(&self) -> bool {
        match self {
            Self::LockLimit { .. } | Self::RegionTooLong { .. } => true,
            Self::Call { call: "ibv_reg_mr", source, .. } => {
                matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN))
            }
            _ => false,
        }
    }

    /// The error of a call that says so in `errno`.
    pub(super) fn last(call: &'static str, on: impl fmt::Display) -> Self {
        Self::Call { call, on: on.to_string(), source: io::Error::last_os_error() }
    }
}

/// The outcome of a call that returns an error number, or -1 with one in `errno`.
pub(super) fn check(
    call: &'static str,
    status: i32,
    on: impl fmt::Display,
) -> Result<(), VerbsError> {
    match status {
        0 => Ok(()),
        number if number > 0 => Err(VerbsError::Call {
            call,
            on: on.to_string(),
            source: io::Error::from_raw_os_error(number),
        }),
        _ => Err(VerbsError::last(call, on)),
    }
}

/// A registration that could not be undone; it still holds, and so does its memory.
#[derive(Debug, thiserror::Error)]
#[error("ibv_dereg_mr of {} bytes on {} failed: {source}", region.len(), region.device())]
pub struct DeregError {
    /// The region. Dropping it tries once more, and leaks the memory if that fails too.
    pub region: MemoryRegion,
    /// The reason given.
    pub source: io::Error,
}

/// A queue pair that could not be connected, and why.
#[derive(thiserror::Error)]
#[error("queue pair {} on {} cannot be connected: {source}", prepared.number(), prepared.device())]
pub struct ConnectError<T> {
    /// The queue pair; `connect` may be tried again.
    pub prepared: PreparedQueuePair<T>,
    /// What went wrong.
    pub source: VerbsError,
}

impl<T> fmt::Debug for ConnectError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectError").field("source", &self.source).finish_non_exhaustive()
    }
}

/// A request that cannot be made, with what would have gone with it.
#[derive(thiserror::Error)]
#[error("{reason}")]
pub struct PostRefused<T> {
    /// What was to be carried.
    pub carried: T,
    /// What is wrong.
    pub reason: VerbsError,
}

impl<T> fmt::Debug for PostRefused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostRefused").field("reason", &self.reason).finish_non_exhaustive()
    }
}

/// A batch of which not everything was posted.
#[derive(Debug, thiserror::Error)]
#[error("queue pair {queue_pair} on {device} took {taken} of {offered} requests: {reason}")]
pub struct PostError {
    /// The device.
    pub device: String,
    /// The queue pair's number.
    pub queue_pair: u32,
    /// Requests from the head of the batch that are in flight now.
    pub taken: usize,
    /// Requests that were offered.
    pub offered: usize,
    /// Why the next one was not taken.
    #[source]
    pub reason: Box<VerbsError>,
}

/// A completion that does not fit what was posted.
#[derive(Debug, thiserror::Error)]
pub enum SettleError {
    /// No request in flight has that number.
    #[error(
        "a completion for request {work:#x} of queue pair {completed} came to queue pair \
         {queue_pair}, which has {in_flight} in flight and not that one"
    )]
    Unknown {
        /// The number in the completion.
        work: u64,
        /// The queue pair that the completion names.
        completed: u32,
        /// The queue pair that was asked.
        queue_pair: u32,
        /// Its requests in flight.
        in_flight: usize,
    },
    /// The device says that more arrived than there was room for.
    #[error("queue pair {queue_pair} received {bytes} bytes into a buffer of {room}")]
    TooLong {
        /// The queue pair.
        queue_pair: u32,
        /// Bytes according to the completion.
        bytes: u32,
        /// Bytes of the buffer.
        room: usize,
    },
    /// A receive could not be posted again.
    #[error("a receive could not be posted again: {0}")]
    Repost(#[source] VerbsError),
}
