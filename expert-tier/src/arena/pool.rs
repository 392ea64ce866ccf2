//! Which slots are free: numbers only, no memory.
//!
//! A slot is in exactly one of four places: on its slab's free list, out with one holder, behind
//! fences (its lease has ended and a device may still read it), or quarantined for ever. Every
//! move is made under one lock, so no slot can be in two places or in none.
//!
//! Sizing: a free list and the queue of fenced slots are as long as there are slots when they are
//! made, so giving a slot back never allocates.
//!
//! Nobody is told when a device has come to a fence, so fences are looked at when slots are asked
//! for: [`FENCES_PER_TAKE`] of the oldest each time, all of them when no slot is free, and again
//! every [`FENCE_POLL_INTERVAL`] while a caller waits.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::sync::{self, Condvar, Mutex};

/// Fenced slots looked at by a `take` that does not depend on them.
const FENCES_PER_TAKE: usize = 4;
/// Between two looks at fences while waiting.
const FENCE_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Longest single wait, so that a deadline far in the future stays a finite number.
const LONGEST_WAIT: Duration = Duration::from_secs(1 << 20);

/// Something that a slot waits for before it can be used again.
pub(crate) trait Fence {
    /// Whether the wait is over.
    fn poll(&mut self) -> FenceState;
}

/// What a fence says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FenceState {
    /// Nobody uses the slot any more.
    Passed,
    /// Somebody may.
    Pending,
    /// It will never be known.
    Lost,
}

/// Where the slots of a pool are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlotCounts {
    /// In all.
    pub total: usize,
    /// Ready to be taken.
    pub free: usize,
    /// Given back, and possibly still read by a device.
    pub fenced: usize,
    /// Never to be used again.
    pub quarantined: usize,
}

impl SlotCounts {
    /// Out with a holder.
    #[must_use]
    pub fn out(&self) -> usize {
        self.total - self.free - self.fenced - self.quarantined
    }
}

/// Slots `0..total`, in slabs of ascending slot size.
pub(crate) struct Pool<F> {
    state: Mutex<State<F>>,
    changed: Condvar,
    total: usize,
}

struct State<F> {
    /// Per slab, the free slots; the last given back is taken first, its pages being warm.
    free: Vec<Vec<u32>>,
    /// Slots behind fences, the oldest first.
    fenced: VecDeque<Fenced<F>>,
    quarantined: usize,
    waiting: usize,
}

struct Fenced<F> {
    slot: u32,
    slab: usize,
    fences: Vec<F>,
}

/// What a pool keeps for each slot, wherever the slot is.
pub(super) const BYTES_PER_SLOT: usize = size_of::<u32>() + size_of::<Fenced<()>>();

impl<F: Fence> Pool<F> {
    /// A pool whose slab `i` has `slots[i]` slots, numbered through from 0.
    pub(crate) fn new(slots: &[u32]) -> Self {
        let mut next = 0;
        let mut slab = |count: &u32| {
            let first = next;
            next += count;
            // Reversed, so that the first slot is taken first.
            (first..next).rev().collect::<Vec<_>>()
        };
        let free: Vec<_> = slots.iter().map(&mut slab).collect();
        let total = next as usize;
        let fenced = VecDeque::with_capacity(total);
        Self {
            state: Mutex::new(State { free, fenced, quarantined: 0, waiting: 0 }),
            changed: Condvar::new(),
            total,
        }
    }

    /// A free slot of slab `slab` or, if it has none, of the next larger one that has.
    pub(crate) fn try_take(&self, slab: usize) -> Option<u32> {
        sync::lock(&self.state).take(slab)
    }

    /// As [`try_take`](Self::try_take), waiting up to `wait` for a slot.
    pub(crate) fn take(&self, slab: usize, wait: Duration) -> Option<u32> {
        let mut state = sync::lock(&self.state);
        if let Some(slot) = state.take(slab) {
            return Some(slot);
        }
        let deadline = Instant::now() + wait.min(LONGEST_WAIT);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state.waiting += 1;
            state = if state.fenced.is_empty() {
                sync::wait(&self.changed, state, left)
            } else {
                sync::nap(&self.changed, &self.state, state, left.min(FENCE_POLL_INTERVAL))
            };
            state.waiting -= 1;
            if let Some(slot) = state.take(slab) {
                return Some(slot);
            }
        }
    }

    /// Gives `slot` of `slab` back.
    pub(crate) fn put(&self, slot: u32, slab: usize) {
        let mut state = sync::lock(&self.state);
        state.free[slab].push(slot);
        self.wake(&state);
    }

    /// Gives `slot` back once every fence has been passed.
    pub(crate) fn put_after(&self, slot: u32, slab: usize, fences: Vec<F>) {
        let mut state = sync::lock(&self.state);
        state.fenced.push_back(Fenced { slot, slab, fences });
        // A waiter may have gone to sleep for its whole time, with no fence to look at.
        self.wake(&state);
    }

    /// Never gives `slot` out again.
    pub(crate) fn quarantine(&self, slot: u32) {
        sync::lock(&self.state).quarantine(slot);
    }

    /// Where the slots are now; looks at every fence first.
    pub(crate) fn counts(&self) -> SlotCounts {
        let mut state = sync::lock(&self.state);
        state.look_at_fences(usize::MAX);
        SlotCounts {
            total: self.total,
            free: state.free.iter().map(Vec::len).sum(),
            fenced: state.fenced.len(),
            quarantined: state.quarantined,
        }
    }

    fn wake(&self, state: &State<F>) {
        // All of them: the slot may be too small for the one that would be woken.
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }
}

impl<F: Fence> State<F> {
    fn take(&mut self, slab: usize) -> Option<u32> {
        self.look_at_fences(FENCES_PER_TAKE);
        let slot = self.pop(slab);
        if slot.is_some() || self.fenced.is_empty() {
            return slot;
        }
        self.look_at_fences(usize::MAX);
        self.pop(slab)
    }

    fn pop(&mut self, slab: usize) -> Option<u32> {
        self.free.get_mut(slab..)?.iter_mut().find_map(Vec::pop)
    }

    /// Looks at up to `most` of the oldest fenced slots and moves those that are done.
    fn look_at_fences(&mut self, most: usize) {
        for _ in 0..most.min(self.fenced.len()) {
            let Some(mut fenced) = self.fenced.pop_front() else { return };
            match fenced.poll() {
                FenceState::Passed => self.free[fenced.slab].push(fenced.slot),
                FenceState::Pending => self.fenced.push_back(fenced),
                FenceState::Lost => self.quarantine(fenced.slot),
            }
        }
    }

    fn quarantine(&mut self, slot: u32) {
        self.quarantined += 1;
        metrics::counter!("metrale_arena_quarantined_slots_total").increment(1);
        tracing::error!(
            slot,
            quarantined = self.quarantined,
            "it cannot be known when the device has finished with this slot: it is not used again"
        );
    }
}

impl<F: Fence> Fenced<F> {
    fn poll(&mut self) -> FenceState {
        let mut lost = false;
        self.fences.retain_mut(|fence| match fence.poll() {
            FenceState::Passed => false,
            FenceState::Pending => true,
            FenceState::Lost => {
                lost = true;
                false
            }
        });
        match (lost, self.fences.is_empty()) {
            (true, _) => FenceState::Lost,
            (false, true) => FenceState::Passed,
            (false, false) => FenceState::Pending,
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;
