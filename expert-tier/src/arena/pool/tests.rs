use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::*;

const PENDING: u8 = 0;
const PASSED: u8 = 1;
const LOST: u8 = 2;

#[derive(Clone, Default)]
struct Flag(Arc<AtomicU8>);

impl Flag {
    fn set(&self, state: u8) {
        self.0.store(state, Ordering::SeqCst);
    }
}

impl Fence for Flag {
    fn poll(&mut self) -> FenceState {
        match self.0.load(Ordering::SeqCst) {
            PENDING => FenceState::Pending,
            PASSED => FenceState::Passed,
            _ => FenceState::Lost,
        }
    }
}

#[test]
fn a_fenced_slot_is_not_handed_out_before_every_fence_has_passed() {
    let pool = Pool::new(&[1]);
    let (first, second) = (Flag::default(), Flag::default());
    let slot = pool.try_take(0).unwrap();
    pool.put_after(slot, 0, vec![first.clone(), second.clone()]);
    assert_eq!(pool.try_take(0), None);
    second.set(PASSED);
    assert_eq!(pool.try_take(0), None);
    first.set(PASSED);
    assert_eq!(pool.try_take(0), Some(slot));
}

#[test]
fn a_fence_that_is_lost_costs_its_slot_for_ever() {
    let pool = Pool::new(&[2]);
    let (lost, passed) = (Flag::default(), Flag::default());
    let slot = pool.try_take(0).unwrap();
    pool.put_after(slot, 0, vec![lost.clone(), passed.clone()]);
    passed.set(PASSED);
    lost.set(LOST);
    let counts = pool.counts();
    assert_eq!(counts, SlotCounts { total: 2, free: 1, fenced: 0, quarantined: 1 });
    lost.set(PASSED);
    assert!(pool.try_take(0).is_some());
    assert_eq!(pool.try_take(0), None);
}

#[test]
fn a_waiter_sees_a_fence_pass_though_nobody_tells_it() {
    let pool = Pool::new(&[1]);
    let flag = Flag::default();
    let slot = pool.try_take(0).unwrap();
    pool.put_after(slot, 0, vec![flag.clone()]);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.take(0, Duration::from_secs(30)));
        flag.set(PASSED);
        assert_eq!(waiter.join().unwrap(), Some(slot));
    });
}

#[test]
fn every_fenced_slot_is_looked_at_when_none_is_free() {
    let pool = Pool::new(&[20]);
    let flags: Vec<_> = (0..20).map(|_| Flag::default()).collect();
    for flag in &flags {
        let slot = pool.try_take(0).unwrap();
        pool.put_after(slot, 0, vec![flag.clone()]);
    }
    flags[19].set(PASSED);
    assert!(pool.try_take(0).is_some());
    assert_eq!(pool.try_take(0), None);
}

#[test]
fn a_wait_of_any_length_ends() {
    let pool: Pool<Flag> = Pool::new(&[0, 1]);
    assert_eq!(pool.take(1, Duration::MAX), Some(0));
    assert_eq!(pool.take(0, Duration::from_millis(1)), None);
    assert_eq!(pool.take(7, Duration::ZERO), None);
}

#[test]
fn giving_back_does_not_allocate() {
    let pool: Pool<Flag> = Pool::new(&[64]);
    let capacities = || {
        let state = sync::lock(&pool.state);
        (state.free[0].capacity(), state.fenced.capacity())
    };
    let before = capacities();
    let slots: Vec<_> = (0..64).map(|_| pool.try_take(0).unwrap()).collect();
    slots.iter().for_each(|slot| pool.put_after(*slot, 0, Vec::new()));
    assert_eq!(pool.counts().free, 64);
    assert_eq!(capacities(), before);
}
