//! How long the disk keeps each read, apart from what the read waits for in the disk's own queue.
//!
//! The clock of a read starts when the disk gets the read, and anew whenever the disk gives one that it
//! got before: that one stood in front. What the disk gives of reads that it got later starts no clock,
//! so a read that it keeps while it gives others gains no time by them. A slow disk that gives one read
//! after the other makes none of them late, however many it has.
//!
//! Reads by all paths of a peer count here, since they wait in one queue. The clocks of the reads are in
//! the order in which the disk got them, the earliest first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Names a read; a later one is greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ReadId(u64);

/// The reads that the disk has. Cheap to clone; all clones are one disk.
#[derive(Clone, Default, Debug)]
pub(crate) struct Disk(Arc<Mutex<Reads>>);

#[derive(Default, Debug)]
struct Reads {
    /// In the order in which the disk got them, with their clocks.
    under_way: VecDeque<(ReadId, Instant)>,
    next: u64,
    delivered: Option<Instant>,
}

impl Disk {
    /// The disk gets a read.
    pub(crate) fn begin(&self, now: Instant) -> ReadId {
        let mut reads = self.lock();
        let id = ReadId(reads.next);
        reads.next += 1;
        reads.under_way.push_back((id, now));
        id
    }

    /// A read has ended; `gave` says whether its bytes came, and just now.
    pub(crate) fn end(&self, id: ReadId, gave: bool, now: Instant) {
        let mut reads = self.lock();
        let Reads { under_way, delivered, .. } = &mut *reads;
        let at = under_way.partition_point(|(other, _)| *other < id);
        if under_way.get(at).is_some_and(|(other, _)| *other == id) {
            under_way.remove(at);
        }
        if gave {
            *delivered = (*delivered).max(Some(now));
            under_way.range_mut(at..).for_each(|(_, since)| *since = now.max(*since));
        }
    }

    /// The clock of a read that has not ended.
    pub(crate) fn since(&self, id: ReadId) -> Option<Instant> {
        let reads = self.lock();
        let at = reads.under_way.partition_point(|(other, _)| *other < id);
        reads.under_way.get(at).filter(|(other, _)| *other == id).map(|(_, since)| *since)
    }

    /// When the disk last gave something.
    pub(crate) fn delivered(&self) -> Option<Instant> {
        self.lock().delivered
    }

    /// Every change under this lock is complete before anything can panic.
    fn lock(&self) -> MutexGuard<'_, Reads> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const STEP: Duration = Duration::from_millis(10);

    #[test]
    fn the_disk_keeps_no_read_while_it_gives_those_before() {
        let (disk, start) = (Disk::default(), Instant::now());
        let reads: Vec<_> = (0..50).map(|_| disk.begin(start)).collect();
        for (at, &read) in reads.iter().enumerate() {
            let now = start + STEP * at as u32;
            assert!(disk.since(read).unwrap() + STEP >= now, "read {at}");
            disk.end(read, true, now);
            assert_eq!((disk.since(read), disk.delivered()), (None, Some(now)));
        }
    }

    #[test]
    fn a_read_gains_no_time_by_those_after_it_nor_by_failures() {
        let (disk, start) = (Disk::default(), Instant::now());
        let failed = disk.begin(start);
        let kept = disk.begin(start);
        let behind = disk.begin(start);
        for step in 1..50 {
            let later = disk.begin(start + STEP * step);
            disk.end(later, true, start + STEP * step);
        }
        disk.end(failed, false, start + STEP * 50);
        assert_eq!((disk.since(kept), disk.since(behind)), (Some(start), Some(start)));
        disk.end(kept, true, start + STEP * 51);
        assert_eq!(disk.since(behind), Some(start + STEP * 51));
        disk.end(kept, true, start + STEP * 52);
        assert!(disk.since(behind).is_some(), "what has ended ends once");
    }
}
