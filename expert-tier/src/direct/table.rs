//! Which jobs a ring has, and how far each has come: bookkeeping without a kernel.
//!
//! A job lies in an entry of the table from the moment it is given until it is handed out at its
//! end. So a job that has ended and that nobody has fetched yet still counts as the ring's. Its
//! memory alone leaves the entry for a while: when the driver tells it what has arrived, which
//! takes time, and is done without the lock.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use super::ring::{Extent, Finished, Start, Target};
use crate::error::Bound;

/// Jobs by index; entries are used again, and with them what they have allocated.
pub(super) struct Table<M, U> {
    entries: Vec<Entry<M, U>>,
    free: Vec<u32>,
    /// Jobs with pieces that have not been submitted, oldest first.
    waiting: VecDeque<u32>,
    /// Jobs that have ended and have not been handed out.
    ended: Vec<u32>,
    /// Reads given to the kernel, or lying in its queue.
    pub(super) in_flight: u32,
    /// Room that a new entry makes for pieces, so that reusing it allocates nothing.
    usual_pieces: usize,
    /// Jobs asked for so far.
    asked: u64,
    /// The turn of the earliest job for which something has come since the bounds were last looked at.
    earliest_delivery: Option<u64>,
}

struct Entry<M, U> {
    job: Option<Job<M, U>>,
    /// The piece list of the entry's last job, for the next one.
    spare_pieces: Vec<Piece>,
}

/// A part of an extent that is read by itself.
#[derive(Clone, Copy, Default)]
pub(super) struct Piece {
    /// Bytes read so far.
    pub(super) done: u32,
    /// A read of it has failed.
    failed: bool,
}

/// What a read's end means for its piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Then {
    /// Nothing more is to be read of it.
    Over,
    /// There is more of it.
    Rest,
    /// It is to be read once more, by itself.
    Again,
}

/// One extent on its way into its memory.
pub(super) struct Job<M, U> {
    /// `None` while the driver reports to it.
    pub(super) memory: Option<M>,
    pub(super) tag: U,
    pub(super) start: Start,
    pub(super) extent: Extent,
    /// Its turn, and when its first read was given to the kernel.
    asked: Option<(u64, Instant)>,
    /// When the disk last gave something of it, or of a job before it; at first, when it was taken, and
    /// again when its first read was given to the kernel.
    moved: Instant,
    pub(super) piece_bytes: usize,
    /// The pieces submitted so far.
    pub(super) pieces: Vec<Piece>,
    /// Pieces, from the first on, that have been reported.
    reported: usize,
    pub(super) outstanding: u32,
    failure: Option<io::Error>,
    /// It is in `waiting`.
    listed: bool,
    /// It is in `ended`.
    ended: bool,
}

impl<M: Target, U> Table<M, U> {
    pub(super) fn add(&mut self, extent: Extent, memory: M, tag: U, piece_bytes: usize) {
        let (start, room) = memory.memory();
        let failure = (extent.bytes > room || extent.bytes == 0).then(|| {
            let text = format!("{} bytes do not fit into {room}", extent.bytes);
            io::Error::new(io::ErrorKind::InvalidInput, text)
        });
        let index = self.vacant();
        let entry = &mut self.entries[index as usize];
        let mut pieces = std::mem::take(&mut entry.spare_pieces);
        pieces.clear();
        entry.job = Some(Job {
            memory: Some(memory),
            tag,
            start: Start(start),
            extent,
            asked: None,
            moved: Instant::now(),
            piece_bytes,
            pieces,
            reported: 0,
            outstanding: 0,
            failure,
            listed: true,
            ended: false,
        });
        self.waiting.push_back(index);
        self.settle(index);
    }
}

impl<M, U> Table<M, U> {
    pub(super) fn new(usual_pieces: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            ended: Vec::new(),
            in_flight: 0,
            usual_pieces,
            asked: 0,
            earliest_delivery: None,
        }
    }

    /// A read of job `index` has been given to the kernel.
    pub(super) fn given(&mut self, index: u32) {
        self.in_flight += 1;
        let turn = self.asked;
        let Some(job) = self.at(index) else { return };
        job.outstanding += 1;
        if job.asked.is_none() {
            let now = Instant::now();
            (job.asked, job.moved) = (Some((turn, now)), now);
            self.asked += 1;
        }
    }

    /// The disk has given something of job `index`.
    pub(super) fn delivered(&mut self, index: u32, now: Instant) {
        let Some(job) = self.at(index) else { return };
        job.moved = now;
        let Some((turn, _)) = job.asked else { return };
        let earliest = self.earliest_delivery.get_or_insert(turn);
        *earliest = turn.min(*earliest);
    }

    /// Looks at every running job for which a bound has passed: the disk has given nothing for
    /// `deadline`, or the job was asked for `total` ago.
    ///
    /// What the disk gives of one job shows that it works for those that were asked for later, or wait
    /// to be: these lie behind in the kernel's queue or in this one. It says nothing of jobs before, which
    /// the disk may keep while it gives others. Waiting has no other bound. The queue is first in, first
    /// out, and each job before another ends within `total`, so none waits for ever.
    pub(super) fn overdue(
        &mut self,
        (deadline, total): (Duration, Duration),
        mut look: impl FnMut(&mut U, (Bound, Duration)),
    ) {
        let (now, earliest) = (Instant::now(), self.earliest_delivery.take());
        for job in self.running() {
            let turn = job.asked.map_or(u64::MAX, |(turn, _)| turn);
            if earliest.is_some_and(|earliest| earliest < turn) {
                job.moved = now;
            }
            let silence = now.saturating_duration_since(job.moved);
            let age = job.asked.map(|(_, at)| now.saturating_duration_since(at));
            if silence >= deadline {
                look(&mut job.tag, (Bound::Due, silence));
            } else if let Some(age) = age.filter(|age| *age >= total) {
                look(&mut job.tag, (Bound::Total, age));
            }
        }
    }

    fn vacant(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            let spare_pieces = Vec::with_capacity(self.usual_pieces);
            self.entries.push(Entry { job: None, spare_pieces });
            // All the room that it can ever need elsewhere comes with an entry.
            let entries = self.entries.len();
            self.free.reserve(entries - self.free.len());
            self.waiting.reserve(entries - self.waiting.len());
            self.ended.reserve(entries - self.ended.len());
            // Jobs are bounded by the slots of an arena, far below 2^32.
            self.entries.len() as u32 - 1
        })
    }

    pub(super) fn at(&mut self, index: u32) -> Option<&mut Job<M, U>> {
        self.entries.get_mut(index as usize)?.job.as_mut()
    }

    /// Jobs that were given and have not been handed out.
    pub(super) fn jobs(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Jobs that have not ended.
    pub(super) fn running(&mut self) -> impl Iterator<Item = &mut Job<M, U>> {
        self.entries.iter_mut().filter_map(|entry| entry.job.as_mut()).filter(|job| !job.ended)
    }

    /// Fails the running jobs that `which` says; true if there are any.
    pub(super) fn cancel(&mut self, which: impl Fn(&U) -> bool) -> bool {
        let mut any = false;
        for job in self.running().filter(|job| which(&job.tag)) {
            job.fail(io::Error::from_raw_os_error(libc::ECANCELED));
            job.listed = false;
            any = true;
        }
        if !any {
            return false;
        }
        let entries = &self.entries;
        let listed = |index: &u32| entries[*index as usize].job.as_ref().is_some_and(|j| j.listed);
        self.waiting.retain(listed);
        (0..self.entries.len() as u32).for_each(|index| self.settle(index));
        true
    }

    /// Ends the job if nothing of it is in flight and nothing is left to read.
    pub(super) fn settle(&mut self, index: u32) {
        let Some(job) = self.at(index) else { return };
        if job.ended || !job.over() {
            return;
        }
        job.ended = true;
        let listed = std::mem::replace(&mut job.listed, false);
        if listed {
            self.waiting.retain(|&waiting| waiting != index);
        }
        self.ended.push(index);
    }

    /// Moves the jobs that have ended to `finished`, and their entries to the free ones.
    pub(super) fn hand_out(&mut self, finished: &mut Vec<Finished<M, U>>) {
        finished.reserve(self.entries.len());
        for index in self.ended.drain(..) {
            let entry = &mut self.entries[index as usize];
            // An index is in `ended` once, with its job and the job's memory in place.
            let Some(job) = entry.job.take() else { continue };
            entry.spare_pieces = job.pieces;
            self.free.push(index);
            let Some(memory) = job.memory else { continue };
            finished.push(Finished {
                memory,
                tag: job.tag,
                outcome: job.failure.map_or(Ok(()), Err),
            });
        }
    }

    /// The oldest job with a piece to submit, and that piece, which now counts as submitted.
    pub(super) fn next_piece(&mut self) -> Option<(u32, usize)> {
        while let Some(&index) = self.waiting.front() {
            if let Some(job) = self.at(index).filter(|job| job.more()) {
                job.pieces.push(Piece::default());
                return Some((index, job.pieces.len() - 1));
            }
            self.waiting.pop_front();
            self.at(index).into_iter().for_each(|job| job.listed = false);
        }
        None
    }

    /// The last piece that [`next_piece`](Self::next_piece) gave out could not be submitted.
    pub(super) fn put_piece_back(&mut self, index: u32) {
        self.at(index).and_then(|job| job.pieces.pop());
    }
}

impl<M, U> Job<M, U> {
    pub(super) fn piece_len(&self, piece: usize) -> usize {
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
        done && self.outstanding == 0 && self.memory.is_some()
    }

    /// One of its reads has ended: `result` is its length, or an errno below zero.
    pub(super) fn completed(&mut self, piece: usize, result: i32) -> Then {
        self.outstanding -= 1;
        let mut then = Then::Rest;
        match usize::try_from(result) {
            Ok(0) => self.fail(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.pieces[piece].done += count as u32,
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => {}
            Err(_) if self.pieces[piece].failed => {
                self.fail(io::Error::from_raw_os_error(-result));
            }
            Err(_) => {
                self.pieces[piece].failed = true;
                then = Then::Again;
            }
        }
        let whole = self.pieces[piece].done as usize == self.piece_len(piece);
        if self.failure.is_some() || whole { Then::Over } else { then }
    }

    /// Marks as reported what has arrived in order, and says how much that is.
    pub(super) fn take_arrived(&mut self) -> usize {
        let mut bytes = 0;
        while self.failure.is_none() && self.reported < self.pieces.len() {
            let len = self.piece_len(self.reported);
            if (self.pieces[self.reported].done as usize) < len {
                break;
            }
            self.reported += 1;
            bytes += len;
        }
        bytes
    }

    /// The first failure is the one that counts.
    pub(super) fn fail(&mut self, error: io::Error) {
        self.failure.get_or_insert(error);
    }
}
