//! A slot, and what may be done with it in each of its states.
//!
//! ```text
//! Slot<Free> --begin--> Slot<Filling> --finish--> Slot<Ready> --into_residency--> ExpertResidency
//!     ^                   |       |
//!     +-----abandon-------+       +--> Rejected { slot: Slot<Free>, mismatch }
//! ```
//!
//! `Slot<Ready>` comes into being in `finish` alone, from a check that has seen every byte, and
//! no safe code reaches a byte once it has been checked: `spare` gives out only what comes after.
//! There is no way to look into a `Slot<Filling>`. The kernel fills one by address while a ring
//! owns it ([`Target`]): it writes behind what has arrived, and completions advance the check.
//!
//! A slot dropped in any state goes back to its pool.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{ArenaInner, LeaseEnd, LeaseState};
use crate::direct::ring::Target;
use crate::key::ExpertKey;
use crate::record::{Mismatch, RecordCheck, RecordIdentity};
use crate::residency::ExpertResidency;
use crate::store::manifest::Manifest;

/// A place for one record in an arena; `S` is [`Free`], [`Filling`] or [`Ready`].
pub struct Slot<S> {
    pub(super) hold: Hold,
    pub(super) state: S,
}

/// The slot holds nothing.
#[derive(Debug)]
pub struct Free {
    /// Whether what arrives next is checked.
    pub(super) check: Checking,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Checking {
    On,
    #[cfg(feature = "unverified")]
    Off,
}

/// A record is arriving.
#[derive(Debug)]
pub struct Filling {
    check: RecordCheck,
    record_bytes: usize,
    filled: usize,
}

/// A whole record has arrived and is the one that was asked for.
#[derive(Debug)]
pub struct Ready {
    identity: RecordIdentity,
}

/// A record that does not fit its slot.
#[derive(Debug, thiserror::Error)]
#[error("a record of {needed_bytes} bytes does not fit a slot of {}", slot.capacity())]
pub struct TooSmall {
    /// The slot, as it was.
    pub slot: Slot<Free>,
    /// Bytes of the record.
    pub needed_bytes: u64,
}

/// A record that is not the one asked for, or not whole.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {mismatch}")]
pub struct Rejected {
    /// The slot, free again.
    pub slot: Slot<Free>,
    /// The record that was asked for.
    pub key: ExpertKey,
    /// How it differs.
    #[source]
    pub mismatch: Mismatch,
}

/// What has become of a record whose last byte has arrived.
pub(crate) enum Judged {
    /// It is the one that was asked for.
    Record(ExpertResidency),
    /// It is not.
    Rejected(Rejected),
    /// Nobody looked, as the slot was told.
    #[cfg(feature = "unverified")]
    Unchecked(Unchecked),
}

/// A record that was received for a measurement and not checked; nobody gets to see its bytes.
#[cfg(feature = "unverified")]
#[derive(Debug)]
pub struct Unchecked {
    slot: Slot<Free>,
    identity: RecordIdentity,
}

#[cfg(feature = "unverified")]
impl Unchecked {
    /// The record that was asked for.
    #[must_use]
    pub fn key(&self) -> ExpertKey {
        self.identity.key
    }

    /// Bytes of its payload.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.identity.payload_bytes
    }

    /// The slot, free again.
    #[must_use]
    pub fn into_slot(self) -> Slot<Free> {
        self.slot
    }
}

impl<S> Slot<S> {
    /// Bytes that the slot can take.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.hold.arena.slab_of(self.hold.slot).slot_bytes as u64
    }

    pub(super) fn become_free(self) -> Slot<Free> {
        Slot { hold: self.hold, state: Free { check: Checking::On } }
    }
}

impl Slot<Free> {
    pub(super) fn new(arena: Arc<ArenaInner>, slot: u32) -> Self {
        Self { hold: Hold { arena, slot, end: LeaseEnd::Now }, state: Free { check: Checking::On } }
    }

    /// For measurements: what arrives next is not checked, and so never becomes a residency.
    /// Whoever polls with [`poll_landed`](crate::tier::ExpertTier::poll_landed) gets an
    /// [`Unchecked`]; for others it is
    /// [`FetchError::Unchecked`](crate::error::FetchError::Unchecked).
    #[cfg(feature = "unverified")]
    #[must_use]
    pub fn without_check(mut self) -> Self {
        self.state.check = Checking::Off;
        self
    }

    /// The record of `identity`, which is here to the last byte and was found right.
    pub(super) fn into_ready(self, identity: RecordIdentity) -> Slot<Ready> {
        Slot { hold: self.hold, state: Ready { identity } }
    }

    /// A record that nobody was to look at.
    #[cfg(feature = "unverified")]
    pub(super) fn into_unchecked(self, identity: RecordIdentity) -> Judged {
        Judged::Unchecked(Unchecked { slot: self, identity })
    }

    /// Makes ready to receive the record of `identity`.
    ///
    /// # Errors
    /// The record is larger than the slot, which comes back.
    pub fn begin(self, identity: RecordIdentity) -> Result<Slot<Filling>, TooSmall> {
        let needed_bytes = identity.record_bytes();
        match usize::try_from(needed_bytes) {
            Ok(record_bytes) if needed_bytes <= self.capacity() => {
                let check = match self.state.check {
                    Checking::On => RecordCheck::new(identity),
                    #[cfg(feature = "unverified")]
                    Checking::Off => RecordCheck::unwanted(identity),
                };
                Ok(Slot { hold: self.hold, state: Filling { check, record_bytes, filled: 0 } })
            }
            _ => Err(TooSmall { slot: self, needed_bytes }),
        }
    }
}

impl Slot<Filling> {
    /// The record that is asked for.
    #[must_use]
    pub fn identity(&self) -> &RecordIdentity {
        self.state.check.identity()
    }

    /// The part of the record that has not arrived.
    #[must_use]
    pub fn spare(&mut self) -> &mut [MaybeUninit<u8>] {
        let range = self.hold.range(self.state.filled, self.state.record_bytes);
        // SAFETY: the pool gave this slot to this holder alone, the slice borrows it mutably, and
        // what the check has seen lies before the range.
        unsafe { self.hold.arena.memory.bytes_mut(range) }
    }

    /// Says that `bytes` more have been written to the start of [`spare`](Self::spare), and
    /// checks them. More than are missing count as all that are.
    ///
    /// Bytes claimed without having been written are whatever lay in the slot; the record's
    /// checksum refuses them.
    pub fn advance(&mut self, bytes: usize) {
        let from = self.state.filled;
        let to = from + bytes.min(self.remaining());
        self.hold.arena.memory.settle(self.hold.range(from, to));
        // SAFETY: `spare` needs `&mut self`, so nobody writes to the slot while the slice lives;
        // every byte up to `to` was settled, in this call or an earlier one.
        let arrived = unsafe { self.hold.arena.memory.bytes(self.hold.range(0, to)) };
        self.state.check.advance(arrived);
        self.state.filled = to;
    }

    /// Bytes of the record that have not arrived.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.state.record_bytes - self.state.filled
    }

    /// The record, if it is the one that was asked for, to the last byte.
    ///
    /// # Errors
    /// It is not: how it differs, and the slot.
    pub fn finish(self) -> Result<Slot<Ready>, Rejected> {
        let identity = *self.identity();
        match self.state.check.finish() {
            Ok(()) => Ok(Slot { hold: self.hold, state: Ready { identity } }),
            Err(mismatch) => {
                Err(Rejected { slot: self.become_free(), key: identity.key, mismatch })
            }
        }
    }

    /// Decides what becomes of what a backend has received: its only way to a residency.
    pub(crate) fn judge(self, manifest: &Arc<Manifest>) -> Judged {
        #[cfg(feature = "unverified")]
        let identity = *self.identity();
        match self.finish() {
            Ok(ready) => Judged::Record(ready.into_residency(manifest)),
            #[cfg(feature = "unverified")]
            Err(Rejected { slot, mismatch: Mismatch::NotChecked, .. }) => {
                Judged::Unchecked(Unchecked { slot, identity })
            }
            Err(rejected) => Judged::Rejected(rejected),
        }
    }

    /// Gives up on the record.
    #[must_use]
    pub fn abandon(self) -> Slot<Free> {
        self.become_free()
    }
}

// SAFETY: the pool gave this slot to this holder alone, and the mapping it is part of stays where
// it is while the hold keeps the arena. `spare` and `advance` need the slot, which the ring has;
// the check that `arrived` feeds reads what the kernel has finished writing, and nothing else.
unsafe impl Target for Slot<Filling> {
    fn memory(&self) -> (NonNull<u8>, usize) {
        let room = self.hold.arena.slab_of(self.hold.slot).slot_bytes;
        self.hold.arena.memory.start_and_room(self.hold.range(0, room))
    }

    /// Reads are rounded up to whole pages, so the last bytes may be the record's padding.
    fn arrived(&mut self, bytes: usize) {
        self.advance(bytes);
    }
}

impl Slot<Ready> {
    /// The record that is here.
    #[must_use]
    pub fn identity(&self) -> &RecordIdentity {
        &self.state.identity
    }

    /// Leases the record out.
    ///
    /// # Panics
    /// `manifest` is not of the store that the identity given to [`begin`](Slot::begin) came
    /// from, so its tensors would be somewhere else: a fault of the caller's.
    #[must_use]
    pub fn into_residency(self, manifest: &Arc<Manifest>) -> ExpertResidency {
        ExpertResidency::new(self, manifest)
    }

    pub(crate) fn payload(&self) -> &[u8] {
        let range = self.payload_range();
        // SAFETY: a slot is Ready only after `advance` has settled all of its record, and no
        // method of a Ready slot writes.
        unsafe { self.hold.arena.memory.bytes(range) }
    }

    /// Where the CPU sees the payload.
    pub(crate) fn host_address(&self) -> usize {
        self.hold.arena.memory.host_address(self.payload_range().start)
    }

    /// Where the device sees the payload, if there is one.
    pub(crate) fn device_address(&self) -> Option<u64> {
        self.hold.arena.memory.device_address(self.payload_range().start)
    }

    /// How long a stream that cannot be marked is waited for.
    pub(crate) fn drain_wait(&self) -> std::time::Duration {
        self.hold.arena.drain_wait
    }

    /// Begins a lease with one holder.
    pub(crate) fn lease(&self) {
        self.lease_state().holders.join();
    }

    /// One more holder of the lease.
    pub(crate) fn share(&self) -> Self {
        let Hold { arena, slot, .. } = &self.hold;
        self.lease_state().holders.join();
        let hold = Hold { arena: Arc::clone(arena), slot: *slot, end: LeaseEnd::Shared };
        Self { hold, state: Ready { identity: self.state.identity } }
    }

    /// Says what happens to the slot when this holder is dropped: nothing, unless it is the last.
    pub(crate) fn leave(&mut self) {
        let lease = self.lease_state();
        self.hold.end = if lease.holders.leave() {
            std::mem::take(&mut *lock(&lease.end))
        } else {
            LeaseEnd::Shared
        };
    }

    /// Changes what the lease's end is to be.
    pub(crate) fn with_end(&self, change: impl FnOnce(&mut LeaseEnd)) {
        change(&mut lock(&self.lease_state().end));
    }

    fn lease_state(&self) -> &LeaseState {
        &self.hold.arena.leases[self.hold.slot as usize]
    }

    fn payload_range(&self) -> Range<usize> {
        // Both fit: `begin` compared their sum with the slot's capacity.
        let header = self.state.identity.header_bytes() as usize;
        self.hold.range(header, header + self.state.identity.payload_bytes as usize)
    }
}

impl<S: fmt::Debug> fmt::Debug for Slot<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({}, {:?})", self.hold.slot, self.state)
    }
}

/// One slot number, taken from the pool and given back once.
pub(super) struct Hold {
    pub(super) arena: Arc<ArenaInner>,
    pub(super) slot: u32,
    pub(super) end: LeaseEnd,
}

impl Hold {
    /// The slot's bytes `from..to` as a range of the arena's memory.
    pub(super) fn range(&self, from: usize, to: usize) -> Range<usize> {
        let start = self.arena.offset_of(self.slot);
        start + from..start + to
    }
}

/// A change of a lease's end is one assignment or one push, so a poisoned lock guards sound data.
pub(super) fn lock(end: &Mutex<LeaseEnd>) -> MutexGuard<'_, LeaseEnd> {
    end.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hold({})", self.slot)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // The number came from the pool and goes back once: a hold is not `Clone`, and of those
        // that share a lease all but the last end as `Shared`.
        self.arena.give_back(self.slot, std::mem::take(&mut self.end));
    }
}
