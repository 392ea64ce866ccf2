//! An io_uring ring that reads whole extents of files into memory that nobody else can reach.
//!
//! The only unsafe code of the reader. What makes it sound:
//!
//! * A [`Target`] is moved into the ring with its job and given back after the last completion of
//!   every read that names its memory. In between only the ring has it: callers see the tag that
//!   came with it. The kernel writes to the part that has not arrived, and [`Target::arrived`] is
//!   told of the part that has; one that panics there goes back to the ring like any other.
//! * Only the [`Driver`] touches the queues and enters the kernel. There is one, it cannot be
//!   cloned, and it needs itself mutably. Handles ([`Ring`]) add jobs and ring the bell, an
//!   eventfd that the ring polls. Keep a driver on one thread: the kernel finishes requests in the
//!   context of the thread that submitted them.
//! * A driver that is dropped with reads in flight waits for them; if they do not end within
//!   `drop_wait`, it leaks the ring and the targets, so that the kernel never writes to memory
//!   that is used again.
//!
//! Sizes: an extent is cut into pieces of `piece_bytes`, at most `depth` pieces are in flight, and
//! the queues have `depth` entries and twice that, so neither can overflow; the kernel keeps
//! completions that find no room (`IORING_FEAT_NODROP`) in any case.

#![allow(unsafe_code, reason = "the kernel writes to memory that only the ring knows to be whole")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::table::{Table, Then};
use crate::error::Bound;
use crate::tier::after;

/// Memory that an extent is read into.
///
/// # Safety
/// `memory` returns the same region every time; it stays mapped and writable as long as the value
/// lives, however the value is moved; and nothing but the ring's kernel writes to it, and nothing
/// reads what has not been reported by `arrived`, before the ring has given the value back.
pub(crate) unsafe trait Target: Send {
    /// The region's start and length in bytes.
    fn memory(&self) -> (NonNull<u8>, usize);

    /// The first `bytes` of what had not arrived yet are there; called in order.
    fn arrived(&mut self, bytes: usize);
}

/// Memory that many targets are part of, registered as a whole.
///
/// # Safety
/// `region` returns the same region every time, and it stays mapped as long as the value lives,
/// however the value is moved.
pub(crate) unsafe trait Region: Send + Sync {
    /// The region's start and length in bytes.
    fn region(&self) -> (NonNull<u8>, usize);
}

/// A piece of a file that is to be read whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// Index of the file among those that the ring was made with.
    pub(crate) file: u32,
    /// Where it starts in the file.
    pub(crate) offset: u64,
    /// How long it is; at most the target's memory.
    pub(crate) bytes: usize,
}

/// How the ring is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RingOptions {
    /// Reads in flight at once.
    pub(crate) depth: u32,
    /// Bytes of one read, below 4 GiB; the last one of an extent may be shorter.
    pub(crate) piece_bytes: usize,
    /// The longest extent expected; longer ones cost an allocation.
    pub(crate) usual_bytes: usize,
    /// Longest wait of a dropped driver for the reads in flight.
    pub(crate) drop_wait: Duration,
}

/// The end of a job.
pub(crate) struct Finished<M, U> {
    pub(crate) memory: M,
    /// What came with the memory.
    pub(crate) tag: U,
    pub(crate) outcome: io::Result<()>,
}

/// How many direct reads were started, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReadCounts {
    /// Into registered memory.
    pub fixed: u64,
    /// Into memory whose pages were pinned for the read.
    pub plain: u64,
}

/// Gives jobs to a [`Driver`]. Cheap to clone; all clones are one ring.
pub(crate) struct Ring<M, U>(Arc<Core<M, U>>);

/// Drives a ring: starts its reads and reaps them.
pub(crate) struct Driver<M, U> {
    core: Arc<Core<M, U>>,
    /// Whether the ring polls the bell.
    listening: bool,
    /// Jobs with completions that have not been reported; kept, so that no turn allocates.
    reaped: VecDeque<u32>,
    /// Jobs, and the pieces of them that are to be read once more.
    again: Vec<(u32, usize)>,
}

/// Fields are dropped in this order: the ring goes before what it has registered and polls.
struct Core<M, U> {
    uring: IoUring,
    registered: OnceLock<Registered>,
    bell: OwnedFd,
    options: RingOptions,
    table: Mutex<Table<M, U>>,
    fixed_reads: AtomicU64,
    plain_reads: AtomicU64,
}

/// Memory registered with the ring in regions of 1 GiB, the most that the kernel takes in one.
struct Registered {
    start: usize,
    bytes: usize,
    _memory: Box<dyn Region>,
}

const REGION_BYTES: usize = 1 << 30;
/// `user_data` of the poll on the bell.
const BELL: u64 = u64::MAX;

/// Where a target's memory starts.
#[derive(Clone, Copy)]
pub(super) struct Start(pub(super) NonNull<u8>);

// SAFETY: it is the start of memory that lies beside it in the same job and whose type is `Send`;
// the ring uses it for nothing but to tell the kernel where to write.
unsafe impl Send for Start {}

impl<M, U> Clone for Ring<M, U> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Whether the kernel gives this process a ring, without keeping it.
pub(crate) fn probe() -> io::Result<()> {
    set_up(1).map(drop)
}

fn set_up(entries: u32) -> io::Result<IoUring> {
    let uring = IoUring::builder().dontfork().setup_clamp().build(entries)?;
    if uring.params().is_feature_ext_arg() && uring.params().is_feature_nodrop() {
        return Ok(uring);
    }
    let text = "this kernel's io_uring has no waits with a timeout (Linux 5.11 has)";
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

impl<M: Target, U> Ring<M, U> {
    /// Sets up a ring that reads `files`.
    ///
    /// # Errors
    /// The kernel has no io_uring, refuses it to this process, or lacks waits with a timeout.
    pub(crate) fn open(files: &[File], options: RingOptions) -> io::Result<(Self, Driver<M, U>)> {
        // One more entry for the poll on the bell.
        let uring = set_up(options.depth + 1)?;
        let fds: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        uring.submitter().register_files(&fds)?;
        let depth = options.depth.min(uring.params().sq_entries() - 1);
        let core = Arc::new(Core {
            uring,
            registered: OnceLock::new(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            options: RingOptions { depth, ..options },
            table: Mutex::new(Table::new(options.usual_bytes.div_ceil(options.piece_bytes))),
            fixed_reads: AtomicU64::new(0),
            plain_reads: AtomicU64::new(0),
        });
        let reaped = VecDeque::with_capacity(depth as usize);
        let again = Vec::new();
        let driver = Driver { core: Arc::clone(&core), listening: false, reaped, again };
        Ok((Self(core), driver))
    }

    /// Takes jobs, which the driver starts; callers see no more of the memory than its tag until
    /// both come back.
    ///
    /// An extent longer than its target's memory ends its job with an error.
    pub(crate) fn submit(&self, jobs: impl IntoIterator<Item = (Extent, M, U)>) {
        let mut table = self.0.lock();
        let piece_bytes = self.0.options.piece_bytes;
        jobs.into_iter()
            .for_each(|(extent, memory, tag)| table.add(extent, memory, tag, piece_bytes));
        drop(table);
        self.ring_bell();
    }
}

impl<M, U> Ring<M, U> {
    /// Registers memory, so that reads into it need not pin its pages each time.
    ///
    /// # Errors
    /// The kernel refuses: for want of locked memory most often, or because it has memory of this
    /// ring already. Reads then go on without.
    pub(crate) fn register(&self, memory: Box<dyn Region>) -> io::Result<()> {
        let (start, bytes) = memory.region();
        let mut regions = Vec::with_capacity(bytes.div_ceil(REGION_BYTES));
        for at in (0..bytes).step_by(REGION_BYTES) {
            let iov_base = start.as_ptr().wrapping_add(at).cast();
            regions.push(libc::iovec { iov_base, iov_len: REGION_BYTES.min(bytes - at) });
        }
        // SAFETY: the regions lie in `memory`, which the core keeps for longer than the kernel's
        // registration, which ends with the ring's descriptor.
        unsafe { self.0.uring.submitter().register_buffers(&regions)? };
        let start = start.as_ptr().addr();
        // The kernel takes one registration, so nobody has set it before.
        drop(self.0.registered.set(Registered { start, bytes, _memory: memory }));
        Ok(())
    }

    /// Whether memory has been registered.
    pub(crate) fn has_registered(&self) -> bool {
        self.0.registered.get().is_some()
    }

    /// Whether it is this memory that has been registered.
    pub(crate) fn has_registered_this(&self, memory: &dyn Region) -> bool {
        let start = memory.region().0.as_ptr().addr();
        self.0.registered.get().is_some_and(|registered| registered.start == start)
    }

    /// Gives up on the jobs that `which` says: nothing more of them is read, and they end with
    /// `ECANCELED` when the reads in flight have ended.
    pub(crate) fn cancel(&self, which: impl Fn(&U) -> bool) {
        let any = self.0.lock().cancel(which);
        if any {
            self.ring_bell();
        }
    }

    /// Looks at every job that has not ended although the disk has given nothing for the first of
    /// `bounds`, or the second has passed since the job's first read.
    pub(crate) fn overdue(
        &self,
        bounds: (Duration, Duration),
        look: impl FnMut(&mut U, (Bound, Duration)),
    ) {
        self.0.lock().overdue(bounds, look);
    }

    /// Looks at every job that has not ended.
    pub(crate) fn running(&self, mut look: impl FnMut(&mut U)) {
        self.0.lock().running().for_each(|job| look(&mut job.tag));
    }

    /// Takes the jobs that have ended, as the driver's turns do: for when there is none any more.
    pub(crate) fn take_ended(&self, finished: &mut Vec<Finished<M, U>>) {
        self.0.lock().hand_out(finished);
    }

    /// Jobs that the ring has: waiting, in flight, or ended and not yet taken.
    pub(crate) fn jobs(&self) -> usize {
        self.0.lock().jobs()
    }

    /// Reads that the kernel has; of a ring without a driver, those that never ended.
    pub(crate) fn in_flight(&self) -> u32 {
        self.0.lock().in_flight
    }

    /// Reads started so far.
    pub(crate) fn reads(&self) -> ReadCounts {
        ReadCounts {
            fixed: self.0.fixed_reads.load(Ordering::Relaxed),
            plain: self.0.plain_reads.load(Ordering::Relaxed),
        }
    }

    /// Makes the driver return from its turn soon.
    fn ring_bell(&self) {
        #[expect(
            clippy::host_endian_bytes,
            reason = "eventfd(2) counts in the machine's own order"
        )]
        let once = 1_u64.to_ne_bytes();
        // A full counter has been rung enough; no other error can befall an eventfd of ours.
        let _rung = rustix::io::write(&self.0.bell, &once);
    }
}

impl<M, U> AsFd for Driver<M, U> {
    /// Readable when a read has ended, for poll(2); [`turn`](Self::turn) then has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is open as long as the driver has it.
        unsafe { BorrowedFd::borrow_raw(self.core.uring.as_raw_fd()) }
    }
}

impl<M: Target, U> Driver<M, U> {
    /// Takes a job, as [`Ring::submit`] does, from the driver's own thread, which needs no bell.
    pub(crate) fn submit(&mut self, extent: Extent, memory: M, tag: U) {
        let piece_bytes = self.core.options.piece_bytes;
        self.core.lock().add(extent, memory, tag, piece_bytes);
    }

    /// Starts reads, waits up to `wait` for completions or the bell, reports what arrived, and
    /// adds the jobs that ended to `finished`.
    ///
    /// # Errors
    /// The kernel refused to wait or to take reads; the jobs stay, and what had arrived has been
    /// reported nevertheless.
    pub(crate) fn turn(
        &mut self,
        wait: Duration,
        finished: &mut Vec<Finished<M, U>>,
    ) -> io::Result<()> {
        let core = &*self.core;
        let mut table = core.lock();
        core.pump(&mut table);
        core.listen(&mut self.listening);
        // What has ended already is not to wait for what has not.
        let wait = if table.has_ended() { Duration::ZERO } else { wait };
        drop(table);
        let mut entered = core.enter(wait);
        let mut table = core.lock();
        let (reaped, again) = (&mut self.reaped, &mut self.again);
        let continued = core.reap(&mut table, &mut self.listening, reaped, again);
        if !again.is_empty() {
            entered = entered.and(core.read_again(&mut table, again));
        }
        // The disk goes on with what comes next while this thread checks what has arrived.
        let more = core.pump(&mut table);
        drop(table);
        // Also what is left of a read that came short: a caller that sleeps on the ring's descriptor
        // would wait for a read that the kernel does not have.
        if more || continued {
            entered = entered.and(core.enter(Duration::ZERO));
        }
        while let Some(index) = self.reaped.pop_front() {
            core.report(index);
        }
        core.lock().hand_out(finished);
        entered
    }
}

/// All but `report` and `lock` are for the driver alone.
impl<M, U> Core<M, U> {
    /// Hands the submission queue to the kernel and waits for a completion, if `wait` is not zero.
    fn enter(&self, wait: Duration) -> io::Result<()> {
        let timeout = Timespec::from(wait);
        let args = SubmitArgs::new().timespec(&timeout);
        let want = usize::from(!wait.is_zero());
        match self.uring.submitter().submit_with_args(want, &args) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Polls the bell, if the ring does not.
    fn listen(&self, listening: &mut bool) {
        if *listening {
            return;
        }
        let bell = types::Fd(self.bell.as_raw_fd());
        let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(BELL);
        // SAFETY: the entry names no memory, and the bell is closed after the ring.
        *listening = unsafe { self.push(&entry) }.is_ok();
    }

    /// Takes every completion there is into the table, lists whose they are in `reaped`, and in `again`
    /// what failed and is to be read once more; says if it queued the rest of a read that came short.
    fn reap(
        &self,
        table: &mut Table<M, U>,
        listening: &mut bool,
        reaped: &mut VecDeque<u32>,
        again: &mut Vec<(u32, usize)>,
    ) -> bool {
        let mut continued = false;
        let now = Instant::now();
        // SAFETY: the driver alone gets here, from `turn`, which has it mutably.
        for entry in unsafe { self.uring.completion_shared() } {
            let data = entry.user_data();
            if data == BELL {
                *listening = false;
                let _count = rustix::io::read(&self.bell, &mut [0; 8]);
                continue;
            }
            let (index, piece) = ((data >> 32) as u32, data as u32 as usize);
            table.in_flight -= 1;
            if entry.result() > 0 {
                table.delivered(index, now);
            }
            let Some(job) = table.at(index) else { continue };
            match job.completed(piece, entry.result()) {
                Then::Over => {}
                Then::Rest => {
                    self.read_on(table, index, piece);
                    continued = true;
                }
                Then::Again => again.push((index, piece)),
            }
            reaped.push_back(index);
        }
        continued
    }

    /// Reads pieces that failed once more, each handed over by itself. Reads that are handed over together
    /// and lie side by side on the disk are one request to it, and where it cannot read a sector, all of
    /// them fail: those of other records, too. The table stays locked, so that no job ends meanwhile.
    fn read_again(&self, table: &mut Table<M, U>, again: &mut Vec<(u32, usize)>) -> io::Result<()> {
        let mut entered = self.enter(Duration::ZERO);
        for (index, piece) in again.drain(..) {
            self.read_on(table, index, piece);
            entered = entered.and(self.enter(Duration::ZERO));
        }
        entered
    }

    /// Queues the read of what is missing of a piece that has been read before. Where that begins
    /// within a block, the kernel says so.
    fn read_on(&self, table: &mut Table<M, U>, index: u32, piece: usize) {
        if let Err(error) = self.read(table, index, piece) {
            table.at(index).into_iter().for_each(|job| job.fail(clone(&error)));
        }
    }

    /// Queues pieces of the oldest waiting jobs until the depth is reached; says if there were any.
    fn pump(&self, table: &mut Table<M, U>) -> bool {
        let mut pushed = false;
        while table.in_flight < self.options.depth {
            let Some((index, piece)) = table.next_piece() else { break };
            if self.read(table, index, piece).is_err() {
                // No room in the queue: the next turn goes on here.
                table.put_piece_back(index);
                break;
            }
            pushed = true;
        }
        pushed
    }

    /// Puts the read of what is missing of a piece into the submission queue.
    fn read(&self, table: &mut Table<M, U>, index: u32, piece: usize) -> io::Result<()> {
        let Some(job) = table.at(index) else { return Ok(()) };
        let done = job.pieces[piece].done as usize;
        let at = piece * job.piece_bytes + done;
        let len = job.piece_len(piece) - done;
        let address = job.start.0.as_ptr().wrapping_add(at);
        let file = Fixed(job.extent.file);
        let offset = job.extent.offset + at as u64;
        // A piece is at most `piece_bytes`, which is below 4 GiB.
        let len32 = len as u32;
        let region = self.registered.get().and_then(|all| all.region_of(address.addr(), len));
        let (entry, count) = match region {
            Some(region) => {
                let read = opcode::ReadFixed::new(file, address, len32, region);
                (read.offset(offset).build(), &self.fixed_reads)
            }
            None => {
                let read = opcode::Read::new(file, address, len32);
                (read.offset(offset).build(), &self.plain_reads)
            }
        };
        let user_data = u64::from(index) << 32 | piece as u64;
        // SAFETY: the bytes lie within the target's memory (`add` compared the extent with it),
        // which the job keeps until `outstanding` is zero again.
        unsafe { self.push(&entry.user_data(user_data))? };
        table.given(index);
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// # Safety
    /// The caller is the driver, and what the entry names outlives its completion.
    unsafe fn push(&self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: the caller vouches for being the driver, the only user of this queue.
        let mut queue = unsafe { self.uring.submission_shared() };
        // SAFETY: the caller vouches for what the entry names.
        let pushed = unsafe { queue.push(entry) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Every change under this lock is complete before anything can panic.
    fn lock(&self) -> MutexGuard<'_, Table<M, U>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Target, U> Core<M, U> {
    /// Tells the target of job `index` what has arrived in order, without the lock: checking takes
    /// time. The job cannot end meanwhile, since it ends with its target in it.
    fn report(&self, index: u32) {
        let mut table = self.lock();
        let Some(job) = table.at(index) else { return };
        let bytes = job.take_arrived();
        let memory = if bytes > 0 { job.memory.take() } else { None };
        if let Some(mut memory) = memory {
            drop(table);
            // Other pieces may be in flight, so the memory goes back whatever happens here.
            let told = catch_unwind(AssertUnwindSafe(|| memory.arrived(bytes)));
            table = self.lock();
            if let Some(job) = table.at(index) {
                job.memory = Some(memory);
                if told.is_err() {
                    job.fail(io::Error::other("whoever was told what arrived panicked"));
                }
            }
        }
        table.settle(index);
    }
}

impl Registered {
    /// The registered region that holds all of these bytes.
    fn region_of(&self, address: usize, bytes: usize) -> Option<u16> {
        let from = address.checked_sub(self.start)?;
        let to = from.checked_add(bytes).filter(|&to| to <= self.bytes)?;
        let region = from / REGION_BYTES;
        let whole = to.checked_sub(1)? / REGION_BYTES == region;
        u16::try_from(region).ok().filter(|_| whole)
    }
}

/// An error that can be stored beside the one that is returned.
fn clone(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

impl<M, U> Drop for Driver<M, U> {
    fn drop(&mut self) {
        let core = &self.core;
        let until = after(core.options.drop_wait);
        let mut reads = core.lock().in_flight;
        while reads > 0 && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            if core.enter(left).is_err() {
                break;
            }
            // SAFETY: the driver alone gets here, which is being dropped.
            let completions = unsafe { core.uring.completion_shared() };
            let ended = completions.filter(|entry| entry.user_data() != BELL).count();
            reads = reads.saturating_sub(ended as u32);
        }
        core.lock().in_flight = reads;
        if reads > 0 {
            tracing::error!(reads, "reads did not end; their memory and the ring are leaked");
            std::mem::forget(Arc::clone(core));
        }
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
