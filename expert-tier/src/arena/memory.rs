//! The arena's bytes: the only unsafe code of this module's neighbours.
//!
//! The pool gives a slot's number to one holder at a time, and a holder's type decides what may
//! be done: `Slot<Filling>` writes, through `&mut`, behind what has arrived; the check and a
//! residency read, through `&`, what has. The two ranges never overlap, and a range only ever
//! moves from the first to the second.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use gpu_sys::cuda::{CudaDevice, HostRegistration};
use gpu_sys::pinned::PinnedPages;

/// Pinned pages and, where there is a device, their registration.
pub(super) struct ArenaMemory {
    // Fields are dropped in this order: a registration goes before the memory it covers. It also
    // holds the pages itself, and leaks them if it cannot be undone.
    registration: Option<HostRegistration>,
    pages: Arc<PinnedPages>,
}

impl ArenaMemory {
    pub(super) fn new(pages: Arc<PinnedPages>, registration: Option<HostRegistration>) -> Self {
        Self { registration, pages }
    }

    pub(super) fn pages(&self) -> &PinnedPages {
        &self.pages
    }

    pub(super) fn device(&self) -> Option<&Arc<CudaDevice>> {
        self.registration.as_ref().map(HostRegistration::device)
    }

    /// Where the CPU sees byte `at`.
    pub(super) fn host_address(&self, at: usize) -> usize {
        self.pages.address().as_ptr() as usize + at
    }

    /// Where the device sees byte `at`.
    pub(super) fn device_address(&self, at: usize) -> Option<u64> {
        self.registration.as_ref().map(|r| r.device_address() + at as u64)
    }

    /// Bytes that nobody writes.
    ///
    /// # Safety
    /// As long as the slice lives, nothing may write to `range`, and none of it may have been
    /// written through [`bytes_mut`](Self::bytes_mut) without [`settle`](Self::settle) after.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        let at = self.start_of(&range);
        // SAFETY: `start_of` has checked that the range lies in the mapping, whose pages start
        // out as zeros; the caller vouches that nothing writes to them.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), range.len()) }
    }

    /// Bytes that one caller writes and nobody reads.
    ///
    /// # Safety
    /// As long as the slice lives, nothing else may refer to `range`.
    #[expect(clippy::mut_from_ref, reason = "the caller vouches for being the only one")]
    pub(super) unsafe fn bytes_mut(&self, range: Range<usize>) -> &mut [MaybeUninit<u8>] {
        let at = self.start_of(&range).cast::<MaybeUninit<u8>>();
        // SAFETY: `start_of` has checked that the range lies in the mapping; the caller vouches
        // that nothing else refers to it.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), range.len()) }
    }

    /// Where `range` starts, and how long it is, for a writer that works by address.
    pub(super) fn start_and_room(&self, range: Range<usize>) -> (NonNull<u8>, usize) {
        (self.start_of(&range), range.len())
    }

    /// Makes what lies in `range` defined, whatever was put there through `MaybeUninit`.
    ///
    /// Safe code may store `MaybeUninit::uninit()`, or claim bytes that never arrived. For the
    /// hardware they are some bytes of a mapped page, which the checksum will refuse; for the
    /// compiler, reading them would be undefined. The assembly below is opaque to it and counts as
    /// having stored, in every byte, the value that lies there.
    pub(super) fn settle(&self, range: Range<usize>) {
        let at = self.start_of(&range).as_ptr();
        // SAFETY: no instruction is executed; the bytes it counts as storing lie in the mapping.
        unsafe { std::arch::asm!("/* {0} */", in(reg) at, options(nostack, preserves_flags)) };
    }

    /// # Panics
    /// `range` is not inside the mapping. Slots are laid out inside it, so this is a fault here.
    fn start_of(&self, range: &Range<usize>) -> NonNull<u8> {
        assert!(range.start <= range.end && range.end <= self.pages.len(), "slot in the mapping");
        // SAFETY: the offset is at most the mapping's length, asserted above.
        unsafe { self.pages.address().add(range.start) }
    }
}
