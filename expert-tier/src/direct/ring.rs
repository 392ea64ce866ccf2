//! An io_uring ring that reads whole extents of files into memory that nobody else can reach.
//!
//! The only unsafe code of the reader. What makes it sound:
//!
//! * A [`Target`] is moved into the ring with its job and given back after the last completion of
//!   every read that names its memory. In between only the ring has it; the kernel writes to the
//!   part that has not arrived, and [`Target::arrived`] is told of the part that has.
//! * Only the thread in [`Ring::turn`] touches the queues and enters the kernel. Others add jobs
//!   and ring the bell, an eventfd that the ring polls. It has to be so: the kernel finishes
//!   requests in the context of the thread that submitted them, and gives them up when it exits.
//! * A ring that is dropped with reads in flight waits for them; if they do not end in time it
//!   leaks itself and the targets, so that the kernel never writes to memory that is used again.
//!
//! Sizes: an extent is cut into pieces of `piece_bytes`, at most `depth` pieces are in flight, and
//! the queues have `depth` entries and twice that, so neither can overflow; the kernel keeps
//! completions that find no room (`IORING_FEAT_NODROP`) in any case.

#![allow(unsafe_code, reason = "the kernel writes to memory that only the ring knows to be whole")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

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

/// A target and what its owner wants to know of it when it comes back.
pub(crate) struct Tagged<M, U> {
    pub(crate) memory: M,
    pub(crate) tag: U,
}

// SAFETY: memory and reports are the inner target's, which keeps the trait's promises.
unsafe impl<M: Target, U: Send> Target for Tagged<M, U> {
    fn memory(&self) -> (NonNull<u8>, usize) {
        self.memory.memory()
    }

    fn arrived(&mut self, bytes: usize) {
        self.memory.arrived(bytes);
    }
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
    /// Bytes of one read; the last one of an extent may be shorter.
    pub(crate) piece_bytes: usize,
}

/// The end of a job.
pub(crate) struct Finished<T> {
    pub(crate) target: T,
    pub(crate) outcome: io::Result<()>,
}

/// A ring over a fixed set of files.
pub(crate) struct Ring<T> {
    uring: ManuallyDrop<IoUring>,
    options: RingOptions,
    registered: OnceLock<Registered>,
    table: Mutex<Table<T>>,
    bell: OwnedFd,
}

/// Memory registered with the ring in regions of 1 GiB, the most that the kernel takes in one.
struct Registered {
    start: usize,
    bytes: usize,
    /// Dropped after the ring, which is dropped by hand.
    memory: ManuallyDrop<Box<dyn Region>>,
}

const REGION_BYTES: usize = 1 << 30;
/// Longest wait of a dropped ring for the reads in flight: disks that answer at all do in less.
const DROP_WAIT: Duration = Duration::from_secs(30);
/// `user_data` of the poll on the bell.
const BELL: u64 = u64::MAX;

struct Table<T> {
    /// Entries of jobs that ended are used again.
    jobs: Vec<Option<Job<T>>>,
    free: Vec<u32>,
    /// Jobs with pieces that have not been submitted, oldest first.
    waiting: VecDeque<u32>,
    in_flight: u32,
    /// Whether the ring polls the bell.
    listening: bool,
    ended: Vec<Finished<T>>,
    /// What one turn reaped; kept so that no turn allocates.
    reaped: Vec<(u32, usize, i32)>,
}

struct Job<T> {
    /// `None` while the thread in `turn` reports to it, without the lock.
    target: Option<T>,
    start: NonNull<u8>,
    extent: Extent,
    begun: Instant,
    piece_bytes: usize,
    /// Bytes read of each piece submitted so far.
    pieces: Vec<u32>,
    /// Pieces, from the first on, that have been reported.
    reported: usize,
    outstanding: u32,
    failure: Option<io::Error>,
}

// SAFETY: `start` points into memory that the job's own target keeps, and targets are `Send`; the
// ring uses it for nothing but to tell the kernel where to write.
unsafe impl<T: Send> Send for Job<T> {}

impl<T: Target> Ring<T> {
    /// Sets up a ring that reads `files`.
    ///
    /// # Errors
    /// The kernel has no io_uring, refuses it to this process, or lacks waits with a timeout.
    pub(crate) fn new(files: &[File], options: RingOptions) -> io::Result<Self> {
        // One more entry for the poll on the bell.
        let uring = IoUring::builder().dontfork().setup_clamp().build(options.depth + 1)?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            let text = "this kernel's io_uring has no waits with a timeout (Linux 5.11 has)";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let fds: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        uring.submitter().register_files(&fds)?;
        let depth = options.depth.min(uring.params().sq_entries() - 1);
        let table = Table {
            jobs: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            in_flight: 0,
            listening: false,
            ended: Vec::new(),
            reaped: Vec::new(),
        };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            uring: ManuallyDrop::new(uring),
            options: RingOptions { depth, ..options },
            registered: OnceLock::new(),
            table: Mutex::new(table),
            bell,
        })
    }

    /// Registers memory, so that reads into it need not pin its pages each time.
    ///
    /// # Errors
    /// The kernel refuses, for want of locked memory most often; reads then go on without.
    pub(crate) fn register(&self, memory: Box<dyn Region>) -> io::Result<()> {
        let (start, bytes) = memory.region();
        let mut regions = Vec::with_capacity(bytes.div_ceil(REGION_BYTES));
        for at in (0..bytes).step_by(REGION_BYTES) {
            let iov_base = start.as_ptr().wrapping_add(at).cast();
            regions.push(libc::iovec { iov_base, iov_len: REGION_BYTES.min(bytes - at) });
        }
        // SAFETY: the regions lie in `memory`, which the ring keeps for longer than the kernel's
        // registration, which ends with the ring's descriptor.
        unsafe { self.uring.submitter().register_buffers(&regions)? };
        let (start, memory) = (start.as_ptr().addr(), ManuallyDrop::new(memory));
        // The kernel takes one registration, so nobody has set it before.
        drop(self.registered.set(Registered { start, bytes, memory }));
        Ok(())
    }

    /// Whether memory has been registered.
    pub(crate) fn has_registered(&self) -> bool {
        self.registered.get().is_some()
    }

    /// Takes jobs; the thread in [`turn`](Self::turn) starts them.
    ///
    /// An extent longer than its target's memory ends its job with an error.
    pub(crate) fn submit(&self, jobs: impl IntoIterator<Item = (Extent, T)>) {
        let mut table = self.lock();
        let piece_bytes = self.options.piece_bytes;
        jobs.into_iter().for_each(|(extent, target)| table.add(extent, target, piece_bytes));
        drop(table);
        self.ring_bell();
    }

    /// Gives up on the jobs that `which` says: nothing more of them is read, and they end with
    /// `ECANCELED` when the reads in flight have ended.
    pub(crate) fn cancel(&self, which: impl Fn(&T) -> bool) {
        let mut table = self.lock();
        for index in 0..table.jobs.len() as u32 {
            let Some(job) = table.at(index) else { continue };
            // One that is being reported to at this moment is as good as done.
            if job.target.as_ref().is_some_and(&which) {
                job.fail(io::Error::from_raw_os_error(libc::ECANCELED));
                table.settle(index);
            }
        }
        drop(table);
        self.ring_bell();
    }

    /// Looks at every job that began more than `age` ago.
    pub(crate) fn overdue(&self, age: Duration, mut look: impl FnMut(&mut T)) {
        let mut table = self.lock();
        for job in table.jobs.iter_mut().flatten() {
            if job.begun.elapsed() >= age
                && let Some(target) = &mut job.target
            {
                look(target);
            }
        }
    }

    /// Makes the thread in [`turn`](Self::turn) return soon.
    pub(crate) fn ring_bell(&self) {
        #[expect(
            clippy::host_endian_bytes,
            reason = "eventfd(2) counts in the machine's own order"
        )]
        let once = 1_u64.to_ne_bytes();
        // A full counter has been rung enough; no other error can befall an eventfd of ours.
        let _rung = rustix::io::write(&self.bell, &once);
    }

    /// Starts reads, waits up to `wait` for completions or the bell, reports what arrived, and
    /// adds the jobs that ended to `finished`. For one thread, always the same.
    ///
    /// # Errors
    /// The kernel refused to wait or to take reads; the jobs stay.
    pub(crate) fn turn(&self, wait: Duration, finished: &mut Vec<Finished<T>>) -> io::Result<()> {
        let mut table = self.lock();
        self.pump(&mut table);
        self.listen(&mut table);
        // What has ended already is not to wait for what has not.
        let wait = if table.ended.is_empty() { wait } else { Duration::ZERO };
        drop(table);
        self.enter(wait)?;
        let mut table = self.lock();
        let mut reaped = std::mem::take(&mut table.reaped);
        self.reap(&mut table, &mut reaped);
        // The disk goes on with what comes next while this thread checks what has arrived.
        let more = self.pump(&mut table);
        drop(table);
        if more {
            self.enter(Duration::ZERO)?;
        }
        for (index, _, _) in reaped.drain(..) {
            self.report(index);
        }
        let mut table = self.lock();
        table.reaped = reaped;
        finished.append(&mut table.ended);
        Ok(())
    }

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
    fn listen(&self, table: &mut Table<T>) {
        if table.listening {
            return;
        }
        let bell = types::Fd(self.bell.as_raw_fd());
        let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(BELL);
        // SAFETY: the entry names no memory, and the bell is closed after the ring.
        table.listening = unsafe { self.push(&entry) }.is_ok();
    }

    /// Takes every completion there is into the table.
    fn reap(&self, table: &mut Table<T>, reaped: &mut Vec<(u32, usize, i32)>) {
        // SAFETY: only the thread in `turn` reads the completion queue, and this is it.
        for entry in unsafe { self.uring.completion_shared() } {
            let data = entry.user_data();
            if data == BELL {
                table.listening = false;
                let _count = rustix::io::read(&self.bell, &mut [0; 8]);
            } else {
                reaped.push(((data >> 32) as u32, data as u32 as usize, entry.result()));
            }
        }
        for &(index, piece, result) in &*reaped {
            self.completed(table, index, piece, result);
        }
    }

    /// Jobs that the ring has.
    pub(crate) fn jobs(&self) -> usize {
        let table = self.lock();
        table.jobs.len() - table.free.len()
    }

    /// One read has ended: `result` is its length, or an errno below zero.
    fn completed(&self, table: &mut Table<T>, index: u32, piece: usize, result: i32) {
        table.in_flight -= 1;
        let Some(job) = table.at(index) else { return };
        job.outstanding -= 1;
        match usize::try_from(result) {
            Ok(0) => job.fail(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => job.pieces[piece] += count as u32,
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => {}
            Err(_) => job.fail(io::Error::from_raw_os_error(-result)),
        }
        let short = (job.pieces[piece] as usize) < job.piece_len(piece);
        if job.failure.is_none() && short {
            // Continued where it ended; where that is not aligned, the kernel says so.
            if let Err(error) = self.read(table, index, piece) {
                table.at(index).into_iter().for_each(|job| job.fail(clone(&error)));
            }
        }
    }

    /// Tells the target of job `index` what has arrived in order, without the lock: checking takes
    /// time. The job cannot end meanwhile, since it ends with its target in it.
    fn report(&self, index: u32) {
        let mut table = self.lock();
        let Some(job) = table.at(index) else { return };
        let bytes = job.take_arrived();
        let target = if bytes > 0 { job.target.take() } else { None };
        if let Some(mut target) = target {
            drop(table);
            target.arrived(bytes);
            table = self.lock();
            if let Some(job) = table.at(index) {
                job.target = Some(target);
            }
        }
        table.settle(index);
    }

    /// Queues pieces of the oldest waiting jobs until the depth is reached; says if there were any.
    fn pump(&self, table: &mut Table<T>) -> bool {
        let mut pushed = false;
        while table.in_flight < self.options.depth {
            let Some(&index) = table.waiting.front() else { break };
            let Some(job) = table.at(index).filter(|job| job.more()) else {
                table.waiting.pop_front();
                continue;
            };
            job.pieces.push(0);
            let piece = job.pieces.len() - 1;
            if self.read(table, index, piece).is_err() {
                // No room in the queue: the next turn goes on here.
                table.at(index).and_then(|job| job.pieces.pop());
                break;
            }
            pushed = true;
        }
        pushed
    }

    /// Puts the read of what is missing of a piece into the submission queue.
    fn read(&self, table: &mut Table<T>, index: u32, piece: usize) -> io::Result<()> {
        let Some(job) = table.at(index) else { return Ok(()) };
        let done = job.pieces[piece] as usize;
        let at = piece * job.piece_bytes + done;
        let len = job.piece_len(piece) - done;
        let address = job.start.as_ptr().wrapping_add(at);
        let file = Fixed(job.extent.file);
        let offset = job.extent.offset + at as u64;
        // A piece is at most `piece_bytes`, which the constructor's caller keeps below 4 GiB.
        let len32 = len as u32;
        let entry = match self.region_of(address.addr(), len) {
            Some(region) => {
                opcode::ReadFixed::new(file, address, len32, region).offset(offset).build()
            }
            None => opcode::Read::new(file, address, len32).offset(offset).build(),
        };
        let user_data = u64::from(index) << 32 | piece as u64;
        // SAFETY: the bytes lie within the target's memory (`add` compared the extent with it),
        // which the job keeps until `outstanding` is zero again.
        unsafe { self.push(&entry.user_data(user_data))? };
        job.outstanding += 1;
        table.in_flight += 1;
        Ok(())
    }

    /// # Safety
    /// The caller is the thread in `turn`, and what the entry names outlives its completion.
    unsafe fn push(&self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: the caller is the one thread that uses this queue.
        let mut queue = unsafe { self.uring.submission_shared() };
        // SAFETY: the caller vouches for what the entry names.
        let pushed = unsafe { queue.push(entry) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// The registered region that holds all of these bytes.
    fn region_of(&self, address: usize, bytes: usize) -> Option<u16> {
        let registered = self.registered.get()?;
        let from = address.checked_sub(registered.start)?;
        let to = from + bytes;
        let region = from / REGION_BYTES;
        let whole = to <= registered.bytes && (to - 1) / REGION_BYTES == region;
        u16::try_from(region).ok().filter(|_| whole)
    }

    /// Every change under this lock is complete before anything can panic.
    fn lock(&self) -> MutexGuard<'_, Table<T>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error that can be stored beside the one that is returned.
fn clone(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

impl<T: Target> Table<T> {
    fn add(&mut self, extent: Extent, target: T, piece_bytes: usize) {
        let (start, room) = target.memory();
        let failure = (extent.bytes > room || extent.bytes == 0).then(|| {
            let text = format!("{} bytes do not fit into {room}", extent.bytes);
            io::Error::new(io::ErrorKind::InvalidInput, text)
        });
        let job = Job {
            target: Some(target),
            start,
            extent,
            begun: Instant::now(),
            piece_bytes,
            pieces: Vec::with_capacity(extent.bytes.div_ceil(piece_bytes)),
            reported: 0,
            outstanding: 0,
            failure,
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            // Jobs are bounded by the slots of an arena, far below 2^32.
            self.jobs.len() as u32 - 1
        });
        self.jobs[index as usize] = Some(job);
        self.waiting.push_back(index);
        self.settle(index);
    }
}

impl<T> Table<T> {
    fn at(&mut self, index: u32) -> Option<&mut Job<T>> {
        self.jobs.get_mut(index as usize)?.as_mut()
    }

    /// Ends the job if nothing of it is in flight and nothing is left to read.
    fn settle(&mut self, index: u32) {
        let entry = &mut self.jobs[index as usize];
        let Some(job) = entry.take_if(|job| job.over()) else { return };
        self.free.push(index);
        self.waiting.retain(|&waiting| waiting != index);
        let outcome = job.failure.map_or(Ok(()), Err);
        if let Some(target) = job.target {
            self.ended.push(Finished { target, outcome });
        }
    }
}

impl<T> Job<T> {
    fn piece_len(&self, piece: usize) -> usize {
        self.piece_bytes.min(self.extent.bytes - piece * self.piece_bytes)
    }

    fn total(&self) -> usize {
        self.extent.bytes.div_ceil(self.piece_bytes)
    }

    /// Whether there is a piece that has not been submitted.
    fn more(&self) -> bool {
        self.failure.is_none() && self.pieces.len() < self.total()
    }

    fn over(&self) -> bool {
        let done = self.failure.is_some() || self.reported == self.total();
        done && self.outstanding == 0 && self.target.is_some()
    }

    /// Marks as reported what has arrived in order, and says how much that is.
    fn take_arrived(&mut self) -> usize {
        let mut bytes = 0;
        while self.failure.is_none() && self.reported < self.pieces.len() {
            let len = self.piece_len(self.reported);
            if (self.pieces[self.reported] as usize) < len {
                break;
            }
            self.reported += 1;
            bytes += len;
        }
        bytes
    }

    fn fail(&mut self, error: io::Error) {
        self.failure.get_or_insert(error);
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        let until = Instant::now() + DROP_WAIT;
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        while table.in_flight > 0 && Instant::now() < until {
            let timeout = Timespec::from(Duration::from_millis(100));
            let args = SubmitArgs::new().timespec(&timeout);
            // An error, a timeout among them, shows in the count that the loop looks at.
            drop(self.uring.submitter().submit_with_args(1, &args));
            let ended = self.uring.completion().filter(|entry| entry.user_data() != BELL).count();
            table.in_flight = table.in_flight.saturating_sub(ended as u32);
        }
        if table.in_flight > 0 {
            let reads = table.in_flight;
            tracing::error!(reads, "reads did not end; their memory and the ring are leaked");
            std::mem::forget(std::mem::take(&mut table.jobs));
            return;
        }
        drop(table);
        // SAFETY: this is the only place that drops it, and it runs once.
        unsafe { ManuallyDrop::drop(&mut self.uring) };
        if let Some(registered) = self.registered.get_mut() {
            // SAFETY: as above; the registration went with the ring.
            unsafe { ManuallyDrop::drop(&mut registered.memory) };
        }
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
