//! How many grants are out, and whether the locked-memory limit takes one more.
//!
//! A grant is a second registration of the same bytes and counts against the limit again. Where the
//! limit is reached while other grants are out, the part waits in line until one of them comes back;
//! nothing but the limit says how many there is room for. A grant that is refused while no other one
//! is out would be refused for ever, so its request fails.
//!
//! No wake-up is lost: whoever is refused marks the room as full before it counts the others, and a
//! grant that comes back is counted before it looks at the mark. So one of the two sees the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The grants of all rails.
#[derive(Default)]
pub(super) struct Grants {
    /// Grants that are registered or about to be.
    out: AtomicUsize,
    /// Whether one more would be refused.
    full: AtomicBool,
    /// Whether there is room again since [`take_freed`](Self::take_freed) last looked.
    freed: AtomicBool,
}

/// The place of one grant; dropping it makes room for another.
pub(super) struct GrantPlace {
    grants: Arc<Grants>,
    /// Whether it counts no more.
    is_left: bool,
}

impl Grants {
    /// A place for a grant that is about to be registered.
    pub(super) fn place(self: &Arc<Self>) -> GrantPlace {
        self.out.fetch_add(1, Ordering::SeqCst);
        GrantPlace { grants: Arc::clone(self), is_left: false }
    }

    pub(super) fn is_full(&self) -> bool {
        self.full.load(Ordering::SeqCst)
    }

    /// Whether no grant is out.
    pub(super) fn is_idle(&self) -> bool {
        self.out.load(Ordering::SeqCst) == 0
    }

    /// Whether there is room again for parts that wait; says so once.
    pub(super) fn take_freed(&self) -> bool {
        self.freed.load(Ordering::SeqCst) && self.freed.swap(false, Ordering::SeqCst)
    }

    fn make_room(&self) {
        if self.full.swap(false, Ordering::SeqCst) {
            self.freed.store(true, Ordering::SeqCst);
        }
    }
}

impl GrantPlace {
    /// Gives up the place, whose grant was refused for want of room, if others are out: there is room
    /// again when one of them has come back. If no other is out, the place comes back.
    pub(super) fn wait_for_others(self) -> Option<Self> {
        let grants = Arc::clone(&self.grants);
        grants.full.store(true, Ordering::SeqCst);
        // The last one to come back finds the mark, or is not counted here any more.
        if grants.out.load(Ordering::SeqCst) <= 1 {
            grants.make_room();
            return Some(self);
        }
        self.leave();
        if grants.is_idle() {
            // The others were refused at the same time, and waited for this one.
            grants.make_room();
        }
        None
    }

    /// Gives up the place without saying that there is room.
    fn leave(mut self) {
        self.is_left = true;
        self.grants.out.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for GrantPlace {
    fn drop(&mut self) {
        if !self.is_left {
            self.grants.out.fetch_sub(1, Ordering::SeqCst);
            self.grants.make_room();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_is_full_until_another_grant_comes_back_and_says_so_once() {
        let grants = Arc::new(Grants::default());
        let (first, second) = (grants.place(), grants.place());
        assert!(second.wait_for_others().is_none() && grants.is_full());
        assert!(!grants.take_freed());
        drop(first);
        assert!(!grants.is_full() && grants.is_idle());
        assert!(grants.take_freed() && !grants.take_freed());
    }

    #[test]
    fn a_grant_that_is_refused_alone_waits_for_nothing() {
        let grants = Arc::new(Grants::default());
        let place = grants.place().wait_for_others();
        assert!(place.is_some() && !grants.is_full());
        drop(place);
        assert!(!grants.is_full() && grants.is_idle());
    }

    #[test]
    fn however_refusals_and_ends_meet_the_room_does_not_stay_full_with_no_grant_out() {
        let grants = Arc::new(Grants::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..20_000 {
                        let place = grants.place();
                        match round % 3 {
                            0 => drop(place.wait_for_others()),
                            _ => drop(place),
                        }
                    }
                });
            }
        });
        assert!(grants.is_idle() && !grants.is_full());
    }
}
