//! A slot whose record arrives in parts, from several writers at once, and is checked part by part
//! on any thread.
//!
//! ```text
//! Slot<Free> --begin_parted--> Slot<Parted> --part--> Part --landed--> LandedPart --check--> gone
//!                                   |                                                         |
//!                                   +--gather, once all parts are gone--> Slot<Gathered> <----+
//!                                                                              |
//!                                         ExpertResidency or Rejected <--judge-+
//! ```
//!
//! [`Slot<Parted>::part`] cuts the record from its start to its end, so no two parts share a byte.
//! A [`Part`] belongs to whoever writes it; nobody can look inside. A [`LandedPart`] can be read and
//! no longer written. The slot goes back to its pool when the last of the slot and its parts is
//! gone, whoever holds that one, and can be judged only when the slot is all that is left. A record
//! of which any byte was not cut, or did not land, or was not checked, is rejected as short.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::slot::{Checking, Free, Hold, Judged, Rejected, Slot, TooSmall};
use super::sync::{self, Condvar, Mutex};
#[cfg(metrale_rdma_verbs)]
use super::{ArenaId, ExpertArena};
use super::{ArenaInner, LeaseEnd};
use crate::pieces::{self, Pieces};
use crate::record::{Mismatch, RecordIdentity};
use crate::store::manifest::Manifest;

/// Longest time between two looks at what others still check.
const LOOK: Duration = Duration::from_millis(10);

/// What the arena keeps of each slot's parts, whoever is to write it.
#[derive(Default)]
pub(super) struct PartsState {
    sums: Mutex<Sums>,
    /// Rung when a part is gone.
    gone: Condvar,
}

/// Checksums of the pieces of a record, in their places.
#[derive(Default)]
struct Sums {
    /// Keeps its capacity from one record to the next.
    pieces: Vec<u32>,
    /// Bytes of the record, header included, that have landed and been looked at.
    checked: usize,
    /// Threads that wait for a part to be gone. Where there is none nobody need be woken, which
    /// would be a system call for every part.
    waiting: usize,
}

/// A record is arriving in parts.
#[derive(Debug)]
pub(crate) struct Parted {
    identity: RecordIdentity,
    pieces: Pieces,
    checking: Checking,
    /// Bytes of the record that have been given out as parts.
    cut: usize,
}

/// Every part that was given out is gone.
#[derive(Debug)]
pub(crate) struct Gathered(Parted);

impl Slot<Free> {
    /// As [`begin`](Self::begin), for a record that arrives in parts.
    ///
    /// # Errors
    /// The record is larger than the slot, which comes back.
    pub(crate) fn begin_parted(self, identity: RecordIdentity) -> Result<Slot<Parted>, TooSmall> {
        let needed_bytes = identity.record_bytes();
        let pieces = Pieces::of(&identity).filter(|_| needed_bytes <= self.capacity());
        let Some(pieces) = pieces else { return Err(TooSmall { slot: self, needed_bytes }) };
        let Self { mut hold, state: Free { check: checking } } = self;
        let mut sums = sync::lock(&hold.parts().sums);
        sums.checked = 0;
        sums.pieces.clear();
        sums.pieces.resize(pieces.count(), 0);
        drop(sums);
        hold.share();
        Ok(Slot { hold, state: Parted { identity, pieces, checking, cut: 0 } })
    }
}

impl Slot<Parted> {
    /// Bytes that have not been given out.
    pub(crate) fn uncut(&self) -> usize {
        self.state.pieces.record_bytes() - self.state.cut
    }

    /// The next part, of at most `most` bytes and a header, but one piece at least; `None` when all
    /// of the record has been given out.
    pub(crate) fn part(&mut self, most: usize) -> Option<Part> {
        if self.uncut() == 0 {
            return None;
        }
        let Parted { pieces, checking, cut, .. } = &mut self.state;
        let range = *cut..pieces.part_end(*cut, most);
        *cut = range.end;
        let (pieces, checking) = (*pieces, *checking);
        let hold = self.hold.another();
        Some(Part(Share {
            hold,
            range,
            pieces,
            checking,
            #[cfg(metrale_rdma_verbs)]
            tag: 0,
        }))
    }

    /// The arena that the slot is of.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn arena(&self) -> ExpertArena {
        ExpertArena(Arc::clone(&self.hold.arena))
    }

    /// The slot with nobody else at it.
    ///
    /// # Errors
    /// Parts are still out; the slot as it was.
    #[allow(clippy::result_large_err, reason = "a box would be an allocation for every fetch")]
    pub(crate) fn gather(mut self) -> Result<Slot<Gathered>, Self> {
        if !self.hold.is_alone() {
            return Err(self);
        }
        // The only holder is a sole owner again, and it sees what all others did.
        self.hold.leave();
        Ok(Slot { hold: self.hold, state: Gathered(self.state) })
    }

    /// As [`gather`](Self::gather), waiting until every part is gone and doing `help` meanwhile,
    /// which says whether it found something to do. For parts that have landed: what is waited for
    /// is the checking of a few hundred kilobytes on another thread.
    pub(crate) fn wait_gathered(mut self, mut help: impl FnMut() -> bool) -> Slot<Gathered> {
        loop {
            self = match self.gather() {
                Ok(gathered) => return gathered,
                Err(waiting) => waiting,
            };
            if help() {
                continue;
            }
            let parts = self.hold.parts();
            let mut sums = sync::lock(&parts.sums);
            // Parts go under the lock, so none can go between the look and the wait.
            if !self.hold.is_alone() {
                sums.waiting += 1;
                sums = sync::wait(&parts.gone, sums, LOOK);
                sums.waiting -= 1;
            }
        }
    }
}

impl Slot<Gathered> {
    /// Decides what becomes of the record: a residency if every byte of it has landed and is right.
    pub(crate) fn judge(self, manifest: &Arc<Manifest>) -> Judged {
        let identity = self.state.0.identity;
        #[cfg(feature = "unverified")]
        if self.state.0.checking == Checking::Off {
            return self.become_free().into_unchecked(identity);
        }
        let verdict = self.verdict();
        let slot = self.become_free();
        match verdict {
            Ok(()) => Judged::Record(slot.into_ready(identity).into_residency(manifest)),
            Err(mismatch) => Judged::Rejected(Rejected { slot, key: identity.key, mismatch }),
        }
    }

    /// The slot alone, whatever has arrived in it.
    pub(crate) fn abandon(self) -> Slot<Free> {
        self.become_free()
    }

    fn verdict(&self) -> Result<(), Mismatch> {
        let Parted { identity, pieces, .. } = &self.state.0;
        let sums = sync::lock(&self.hold.parts().sums);
        let (found, expected) = (sums.checked as u64, identity.record_bytes());
        if found != expected {
            return Err(Mismatch::Short { found, expected });
        }
        // It fits: `begin_parted` has compared the whole record with the slot.
        let header = self.hold.range(0, identity.header_bytes() as usize);
        // SAFETY: no part is left, so nobody writes, and parts that were settled make up the record.
        let header = unsafe { self.hold.arena.memory.bytes(header) };
        pieces.verdict(identity, header, &sums.pieces)
    }
}

/// One holder of a slot in parts, and the bytes that are this holder's alone.
#[derive(Debug)]
struct Share {
    hold: Hold,
    /// In the record.
    range: Range<usize>,
    pieces: Pieces,
    checking: Checking,
    #[cfg(metrale_rdma_verbs)]
    tag: u32,
}

impl Drop for Share {
    fn drop(&mut self) {
        let arena = Arc::clone(&self.hold.arena);
        let parts = &arena.parts[self.hold.slot as usize];
        let sums = sync::lock(&parts.sums);
        self.hold.leave();
        let wake = sums.waiting > 0;
        drop(sums);
        if wake {
            parts.gone.notify_all();
        }
    }
}

/// Bytes of a slot that somebody is to write; there is no way to look at them.
#[derive(Debug)]
pub(crate) struct Part(Share);

impl Part {
    /// Where in the record it is, header included.
    pub(crate) fn range(&self) -> Range<usize> {
        self.0.range.clone()
    }

    /// The same part, with a number that its holder knows it by.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn tagged(mut self, tag: u32) -> Self {
        self.0.tag = tag;
        self
    }

    /// The number that its holder knows it by; 0 if it was given none.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn tag(&self) -> u32 {
        self.0.tag
    }

    /// Keeps at most `most` bytes and a header, but one piece at least, and returns the rest, if there is
    /// one, with the same tag.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn split(&mut self, most: usize) -> Option<Self> {
        let Share { hold, range, pieces, checking, tag } = &mut self.0;
        let end = pieces.part_end(range.start, most);
        if end >= range.end {
            return None;
        }
        let rest = end..range.end;
        range.end = end;
        let (pieces, checking, tag) = (*pieces, *checking, *tag);
        Some(Self(Share { hold: hold.another(), range: rest, pieces, checking, tag }))
    }

    /// Gives up the slot for good, since a device may write this part whenever it likes: the slot is
    /// not given out again even when every part is gone. It is counted once, however many of its parts
    /// are lost. The caller leaks the part, which keeps the arena's memory.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn quarantine(&self) {
        let hold = &self.0.hold;
        let mut end = super::slot::lock(&hold.arena.leases[hold.slot as usize].end);
        if !matches!(*end, LeaseEnd::Never) {
            *end = LeaseEnd::Never;
            // A holder that never leaves, so that no other is the last one.
            hold.holders().join();
            hold.arena.pool.quarantine(hold.slot);
        }
    }

    /// Which arena it is of.
    #[cfg(metrale_rdma_verbs)]
    pub(crate) fn arena_id(&self) -> ArenaId {
        ArenaId(Arc::as_ptr(&self.0.hold.arena).addr())
    }

    /// The bytes, from the `done`th on.
    pub(crate) fn spare(&mut self, done: usize) -> &mut [std::mem::MaybeUninit<u8>] {
        let Share { hold, range, .. } = &self.0;
        let range = hold.range((range.start + done).min(range.end), range.end);
        // SAFETY: parts do not overlap and this one is borrowed mutably; the owner of the slot looks
        // at none of it before this part is gone.
        unsafe { hold.arena.memory.bytes_mut(range) }
    }

    /// All of it has been written, and whoever wrote it has stopped. Bytes claimed without having
    /// been written are whatever lay in the slot; the record's checksum refuses them.
    pub(crate) fn landed(self) -> LandedPart {
        let Share { hold, range, .. } = &self.0;
        hold.arena.memory.settle(hold.range(range.start, range.end));
        LandedPart(self.0)
    }
}

// SAFETY: the slot's memory is mapped as long as any hold keeps the arena, and stays where it is.
// Parts do not overlap, nobody but a part's holder reaches its bytes before it is gone, and a part
// that is in flight has no holder but the queue pair.
#[cfg(metrale_rdma_verbs)]
unsafe impl gpu_sys::verbs::Landing for Part {
    fn landing(&self) -> (std::ptr::NonNull<u8>, usize) {
        let Share { hold, range, .. } = &self.0;
        hold.arena.memory.start_and_room(hold.range(range.start, range.end))
    }
}

/// Bytes of a slot that have arrived and are not written any more.
#[derive(Debug)]
pub(crate) struct LandedPart(Share);

impl LandedPart {
    /// Takes the checksums of its pieces and leaves them with the slot.
    pub(crate) fn check(self) {
        let Share { hold, range, pieces, checking, .. } = &self.0;
        let looked_at = match checking {
            Checking::On => true,
            #[cfg(feature = "unverified")]
            Checking::Off => false,
        };
        // SAFETY: this part is its range's only holder, `landed` has settled it, and a landed part
        // has no way to write.
        let bytes = unsafe { hold.arena.memory.bytes(hold.range(range.start, range.end)) };
        for (piece, place) in pieces.within(range).filter(|_| looked_at) {
            let sum = pieces::sum(&bytes[place]);
            sync::lock(&hold.parts().sums).pieces[piece] = sum;
        }
        sync::lock(&hold.parts().sums).checked += range.len();
    }
}

impl Hold {
    fn parts(&self) -> &PartsState {
        &self.arena.parts[self.slot as usize]
    }

    /// Makes this the first of several holders.
    fn share(&mut self) {
        self.holders().join();
        self.end = LeaseEnd::LastOut;
    }

    /// One more holder.
    fn another(&self) -> Self {
        self.holders().join();
        Self { arena: Arc::clone(&self.arena), slot: self.slot, end: LeaseEnd::LastOut }
    }

    fn is_alone(&self) -> bool {
        self.holders().is_one()
    }

    /// This holder goes; the last one gives the slot back when it is dropped.
    fn leave(&mut self) {
        self.end = if self.holders().leave() { LeaseEnd::Now } else { LeaseEnd::Shared };
    }

    fn holders(&self) -> &super::Holders {
        &self.arena.leases[self.slot as usize].holders
    }
}

impl ArenaInner {
    pub(super) fn no_parts(slots: usize) -> Box<[PartsState]> {
        (0..slots).map(|_| PartsState::default()).collect()
    }
}
