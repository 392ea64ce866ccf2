//! Completion queues, and channels that tell when one has something.
//!
//! A queue's entries are promised to queue pairs when they are prepared: each takes as many as it
//! can have requests outstanding (`send_wr` of its send queue, `recv_wr` of its receive queue), and
//! no more are promised than there are. So it cannot overflow. It would if a queue pair posted more
//! than it was made for, which the device refuses, or if completions of a destroyed queue pair were
//! left lying while another one took its place; poll before and after.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::context::Context;
use super::error::{VerbsError, check};
use super::ffi::{self, Zeroed, ibv_wc_flags, ibv_wc_opcode};
use super::work::{WorkError, WorkStatus};

/// Most events that one `drain` takes, so that it ends: each is one arming.
const MAX_EVENTS: usize = 1024;

/// Where the completions of queue pairs arrive. Dropping it destroys it: queue pairs hold it, so
/// none is left by then.
#[derive(Debug)]
pub struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    entries: u32,
    reserved: AtomicU32,
    // After `raw` has been destroyed in `drop`, the channel goes and then the device.
    channel: Option<Arc<CompletionChannel>>,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above; two threads that poll get different completions.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Makes a queue for polling with at least `entries` places.
    ///
    /// # Errors
    /// The device has no queue that long, or none left.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        Self::create(context, entries, None)
    }

    /// Makes a queue whose first completion after [`CompletionQueue::arm`] wakes the channel.
    ///
    /// # Errors
    /// As for [`CompletionQueue::new`].
    pub fn with_channel(
        channel: &Arc<CompletionChannel>,
        entries: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        Self::create(&channel.context, entries, Some(Arc::clone(channel)))
    }

    fn create(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<Arc<CompletionChannel>>,
    ) -> Result<Arc<Self>, VerbsError> {
        let max = context.limits().max_cqe;
        let wanted = i32::try_from(entries).ok().filter(|_| (1..=max).contains(&entries));
        let Some(wanted) = wanted else {
            return Err(VerbsError::Setting {
                what: "a completion queue length",
                value: entries.into(),
                on: context.name().to_owned(),
                allowed: format!("1 to {max} entries"),
            });
        };
        let channel_raw = channel.as_ref().map_or(std::ptr::null_mut(), |it| it.raw.as_ptr());
        // SAFETY: the device is open, and the channel, if any, is one of this device.
        let raw = unsafe {
            (context.library().table.create_cq)(
                context.raw(),
                wanted,
                std::ptr::null_mut(),
                channel_raw,
                0,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let on = format!("{} with {entries} entries", context.name());
            VerbsError::last("ibv_create_cq", on)
        })?;
        let (reserved, context) = (AtomicU32::new(0), Arc::clone(context));
        Ok(Arc::new(Self { raw, entries, reserved, channel, context }))
    }

    /// Takes the completions that there are, as many as `into` has room for; never waits.
    ///
    /// # Errors
    /// The queue is broken: nothing on it can be trusted to complete.
    pub fn poll(&self, into: &mut Completions) -> Result<usize, VerbsError> {
        into.filled = 0;
        super::calls::count();
        let room = i32::try_from(into.raw.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue is alive, and `raw` has room for `room` completions.
        let count = unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), room, into.raw.as_mut_ptr()) };
        match usize::try_from(count) {
            Ok(count) if count <= into.raw.len() => {
                into.filled = count;
                Ok(count)
            }
            _ => Err(VerbsError::Call {
                call: "ibv_poll_cq",
                on: format!("{} with {} entries", self.context.name(), self.entries),
                source: io::Error::other(format!("it returned {count}")),
            }),
        }
    }

    /// Lets the next completion wake the channel, once. What arrived before does not: poll once more
    /// after arming, and before waiting.
    ///
    /// # Errors
    /// The queue has no channel, or is broken.
    pub fn arm(&self) -> Result<(), VerbsError> {
        if self.channel.is_none() {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            let on = format!("a queue without a channel on {}", self.context.name());
            return Err(VerbsError::Call { call: "ibv_req_notify_cq", on, source });
        }
        // SAFETY: the queue is alive and has a channel.
        let status = unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr()) };
        check("ibv_req_notify_cq", status, self.context.name())
    }

    /// Places of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// Promises `wanted` places to a queue pair.
    pub(super) fn reserve(self: &Arc<Self>, wanted: u32) -> Result<Reservation, VerbsError> {
        let grow = |reserved: u32| reserved.checked_add(wanted).filter(|sum| *sum <= self.entries);
        match self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow) {
            Ok(_) => Ok(Reservation { queue: Arc::clone(self), entries: wanted }),
            Err(reserved) => Err(VerbsError::CompletionQueueFull {
                device: self.context.name().to_owned(),
                entries: self.entries,
                reserved,
                wanted,
            }),
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; queue pairs hold it, so none uses it, and every event
        // of it was acknowledged where it was taken.
        let status = unsafe { (self.context.library().table.destroy_cq)(self.raw.as_ptr()) };
        if let Err(error) = check("ibv_destroy_cq", status, self.context.name()) {
            tracing::warn!(%error, "a completion queue is leaked");
        }
    }
}

/// Places of a completion queue promised to a queue pair; given back when dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    queue: Arc<CompletionQueue>,
    entries: u32,
}

impl Reservation {
    /// Keeps the places, and the queue, for good: the queue pair could not be destroyed.
    pub(super) fn keep(&mut self) {
        self.entries = 0;
        std::mem::forget(Arc::clone(&self.queue));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.queue.reserved.fetch_sub(self.entries, Ordering::Relaxed);
    }
}

/// Room for the completions of one poll, made once and used again.
pub struct Completions {
    raw: Box<[ffi::ibv_wc]>,
    filled: usize,
}

impl Completions {
    /// Room for `room` completions; at least one.
    #[must_use]
    pub fn with_room(room: usize) -> Self {
        let raw = std::iter::repeat_with(ffi::ibv_wc::zeroed).take(room.max(1)).collect();
        Self { raw, filled: 0 }
    }

    /// What the last poll brought.
    pub fn iter(&self) -> impl Iterator<Item = WorkCompletion> {
        self.raw[..self.filled].iter().map(WorkCompletion::from_raw)
    }
}

impl std::fmt::Debug for Completions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The end of a work request, as the device reports it. [`QueuePair::settle`] and
/// [`QueuePair::receive`] say what it ends.
///
/// [`QueuePair::settle`]: super::QueuePair::settle
/// [`QueuePair::receive`]: super::QueuePair::receive
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkCompletion {
    pub(super) work: u64,
    pub(super) queue_pair: u32,
    pub(super) status: WorkStatus,
    pub(super) vendor_err: u32,
    /// Bytes that arrived; of a receive that succeeded.
    pub(super) bytes: u32,
    pub(super) immediate: Option<u32>,
    /// Whether the bytes went where a WRITE said, and not into the receive's buffer.
    pub(super) written: bool,
}

impl WorkCompletion {
    fn from_raw(raw: &ffi::ibv_wc) -> Self {
        // SAFETY: both members are a number of the same size.
        let immediate = unsafe { raw.imm_data_invalidated_rkey_union.imm_data };
        let has_immediate = raw.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        Self {
            work: raw.wr_id,
            queue_pair: raw.qp_num,
            status: WorkStatus::from_raw(raw.status),
            vendor_err: raw.vendor_err,
            bytes: raw.byte_len,
            immediate: has_immediate.then(|| u32::from_be(immediate)),
            written: raw.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
        }
    }

    /// Number of the queue pair it belongs to: where to take it.
    #[must_use]
    pub fn queue_pair(&self) -> u32 {
        self.queue_pair
    }

    /// Whether it ends a receive ([`QueuePair::receive`](super::QueuePair::receive)) and not a
    /// request of ours ([`QueuePair::settle`](super::QueuePair::settle)).
    #[must_use]
    pub fn is_receive(&self) -> bool {
        super::flight::is_receive(self.work)
    }

    /// How it ended.
    #[must_use]
    pub fn status(&self) -> WorkStatus {
        self.status
    }

    /// The same as a result.
    pub(super) fn outcome(&self) -> Result<(), WorkError> {
        match self.status {
            WorkStatus::Success => Ok(()),
            status => Err(WorkError { status, vendor_err: self.vendor_err }),
        }
    }
}

/// Tells when an armed completion queue has something. Dropping it destroys it: its queues hold it,
/// so none is left by then.
#[derive(Debug)]
pub struct CompletionChannel {
    raw: NonNull<ffi::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// Makes one on `context`.
    ///
    /// # Errors
    /// The kernel gives no more descriptors.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the device is open.
        let raw = unsafe { (context.library().table.create_comp_channel)(context.raw()) };
        let raw = NonNull::new(raw);
        let raw = raw.ok_or_else(|| VerbsError::last("ibv_create_comp_channel", context.name()))?;
        // From here on an early return destroys the channel.
        let channel = Self { raw, context: Arc::clone(context) };
        let fd = channel.as_fd();
        let non_blocking =
            fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        non_blocking.map_err(|error| VerbsError::Call {
            call: "fcntl(O_NONBLOCK)",
            on: format!("a completion channel of {}", context.name()),
            source: error.into(),
        })?;
        Ok(Arc::new(channel))
    }

    /// Waits until an armed queue has something, at most `wait`; says if one had. Takes the
    /// wake-ups, so the queues must be armed again.
    ///
    /// # Errors
    /// The channel cannot be read.
    pub fn wait(&self, wait: Duration) -> Result<bool, VerbsError> {
        let deadline = Instant::now() + wait;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(self, PollFlags::IN)];
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return self.drain(),
                Err(rustix::io::Errno::INTR) if !left.is_zero() => {}
                Err(rustix::io::Errno::INTR) => return Ok(false),
                Err(error) => {
                    let on = format!("a completion channel of {}", self.context.name());
                    return Err(VerbsError::Call { call: "poll", on, source: error.into() });
                }
            }
        }
    }

    /// Takes and acknowledges the wake-ups that there are; never waits.
    ///
    /// # Errors
    /// The channel cannot be read.
    pub fn drain(&self) -> Result<bool, VerbsError> {
        let table = &self.context.library().table;
        for taken in 0..MAX_EVENTS {
            let mut queue = std::ptr::null_mut();
            let mut ignored = std::ptr::null_mut();
            // SAFETY: the channel is alive and does not block; the pointers are to live locals.
            let status =
                unsafe { (table.cq_event)(self.raw.as_ptr(), &raw mut queue, &raw mut ignored) };
            if status != 0 {
                let error = io::Error::last_os_error();
                return match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(taken > 0),
                    _ => Err(VerbsError::Call {
                        call: "ibv_get_cq_event",
                        on: self.context.name().to_owned(),
                        source: error,
                    }),
                };
            }
            // SAFETY: the event was taken above; destroying its queue waits for this.
            unsafe { (table.ack_cq_events)(queue, 1) };
        }
        Ok(true)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live; the field does not change while it is.
        let fd = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: the descriptor is the channel's own and is closed with it, in `drop`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; its queues hold it, so none is left.
        let status =
            unsafe { (self.context.library().table.destroy_comp_channel)(self.raw.as_ptr()) };
        if let Err(error) = check("ibv_destroy_comp_channel", status, self.context.name()) {
            tracing::warn!(%error, "a completion channel is leaked");
        }
    }
}
