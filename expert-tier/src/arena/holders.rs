//! How many hold one lease.
//!
//! The count lies in the arena and not beside the lease, so that leasing allocates nothing: each
//! slot has one, made with the arena, and a slot has one lease at a time.

use super::sync::{AtomicU32, Ordering, fence};

/// Holders of a slot's lease; zero while there is no lease.
#[derive(Debug)]
pub(super) struct Holders(AtomicU32);

impl Holders {
    pub(super) fn none() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The first holder of a new lease, or one more of a lease that the caller holds.
    pub(super) fn join(&self) {
        // The caller has the slot or the lease already, which is what orders its memory.
        let before = self.0.fetch_add(1, Ordering::Relaxed);
        assert!(before < u32::MAX / 2, "two thousand million clones of one lease");
    }

    /// Whether the caller, who is one, is the only one; it then sees everything that others did.
    pub(super) fn is_one(&self) -> bool {
        self.0.load(Ordering::Acquire) == 1
    }

    /// One holder fewer; true for the last, which sees everything that the others did.
    pub(super) fn leave(&self) -> bool {
        if self.0.fetch_sub(1, Ordering::Release) != 1 {
            return false;
        }
        fence(Ordering::Acquire);
        true
    }
}
