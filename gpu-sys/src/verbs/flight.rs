//! Requests in flight, and how their numbers are made.
//!
//! A request's number (`wr_id`) is `receive << 63 | serial << 32 | sequence`: whether it is a
//! receive, the serial number of its queue pair in this process, and its place. A completion that a
//! destroyed queue pair has left behind carries another serial, so it never ends a request of a
//! younger one that got the same queue pair number.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

const RECEIVE: u64 = 1 << 63;
const SERIAL_MASK: u32 = u32::MAX >> 1;

/// The serial number of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Serial(u32);

impl Serial {
    /// The next one. They repeat after 2^31 queue pairs.
    pub(super) fn next() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed) & SERIAL_MASK)
    }

    pub(super) fn send(self, sequence: u32) -> u64 {
        u64::from(self.0) << 32 | u64::from(sequence)
    }

    pub(super) fn receive(self, index: u32) -> u64 {
        RECEIVE | self.send(index)
    }

    /// The sequence number of a request of this queue pair, or `None` if it is another's.
    fn sequence(self, work: u64) -> Option<u32> {
        ((work >> 32) as u32 & SERIAL_MASK == self.0).then_some(work as u32)
    }

    /// The index of a receive of this queue pair.
    pub(super) fn receive_index(self, work: u64) -> Option<u32> {
        self.sequence(work).filter(|_| is_receive(work))
    }
}

/// Whether a completion's number is a receive's.
pub(super) fn is_receive(work: u64) -> bool {
    work & RECEIVE != 0
}

/// What is in flight on one send queue, oldest first.
pub(super) struct Flights<T> {
    serial: Serial,
    carried: VecDeque<T>,
    /// Sequence number of the oldest.
    first: u32,
}

impl<T> Flights<T> {
    /// Room for `depth` requests.
    pub(super) fn new(serial: Serial, depth: usize) -> Self {
        Self { serial, carried: VecDeque::with_capacity(depth), first: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.carried.len()
    }

    /// The number of the `ahead`-th request from now.
    pub(super) fn number(&self, ahead: usize) -> u64 {
        // At most a queue's depth, which is far below 2^32.
        let sequence = self.first.wrapping_add(self.carried.len() as u32);
        self.serial.send(sequence.wrapping_add(ahead as u32))
    }

    pub(super) fn push(&mut self, carried: T) {
        self.carried.push_back(carried);
    }

    /// How many requests have ended when `work` has: it and all before it. `None` if it is not in
    /// flight.
    pub(super) fn ended_with(&self, work: u64) -> Option<usize> {
        if is_receive(work) {
            return None;
        }
        let place = self.serial.sequence(work)?.wrapping_sub(self.first) as usize;
        (place < self.carried.len()).then_some(place + 1)
    }

    /// Takes the oldest.
    pub(super) fn pop(&mut self) -> Option<T> {
        let carried = self.carried.pop_front()?;
        self.first = self.first.wrapping_add(1);
        Some(carried)
    }

    /// What is in flight, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.carried.iter()
    }

    /// Gives up everything without dropping it: the device may still write there.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.carried));
    }
}
