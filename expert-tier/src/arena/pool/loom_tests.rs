//! Every interleaving of a few threads, by loom:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target-loom cargo test -p expert-tier --lib --release loom_tests
//! ```
//!
//! Loom reports a thread that is never woken as a deadlock.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use super::*;
use crate::arena::holders::Holders;

/// Longer than any model runs: waits here end by being woken.
const LONG: Duration = Duration::from_secs(3600);

#[derive(Clone)]
struct Flag(Arc<AtomicBool>);

impl Fence for Flag {
    fn poll(&mut self) -> FenceState {
        match self.0.load(Ordering::Acquire) {
            true => FenceState::Passed,
            false => FenceState::Pending,
        }
    }
}

type TestPool = Arc<Pool<Flag>>;

fn pool(slots: &[u32]) -> TestPool {
    Arc::new(Pool::new(slots))
}

#[test]
fn no_slot_is_handed_out_twice_and_none_is_lost() {
    loom::model(|| {
        let pool = pool(&[2]);
        let holders = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let work = |pool: TestPool, holders: Arc<[AtomicUsize; 2]>| {
            move || {
                let Some(slot) = pool.try_take(0) else { return };
                assert_eq!(holders[slot as usize].fetch_add(1, Ordering::AcqRel), 0);
                holders[slot as usize].fetch_sub(1, Ordering::AcqRel);
                pool.put(slot, 0);
            }
        };
        let others = [(); 2].map(|()| thread::spawn(work(pool.clone(), holders.clone())));
        work(pool.clone(), holders)();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(pool.counts().free, 2);
    });
}

#[test]
fn a_waiter_is_woken_by_the_slot_given_back() {
    loom::model(|| {
        let pool = pool(&[1]);
        let slot = pool.try_take(0).unwrap();
        let waiter = {
            let pool = pool.clone();
            thread::spawn(move || pool.take(0, LONG).map(|slot| pool.put(slot, 0)))
        };
        pool.put(slot, 0);
        assert!(waiter.join().unwrap().is_some());
        assert_eq!(pool.counts().free, 1);
    });
}

#[test]
fn a_small_slot_wakes_the_waiter_that_it_fits() {
    loom::model(|| {
        let pool = pool(&[1, 1]);
        let (small, large) = (pool.try_take(0).unwrap(), pool.try_take(1).unwrap());
        let wait = |slab: usize| {
            let pool = pool.clone();
            thread::spawn(move || pool.take(slab, LONG).map(|slot| pool.put(slot, slot as usize)))
        };
        let (small_waiter, large_waiter) = (wait(0), wait(1));
        pool.put(small, 0);
        assert!(small_waiter.join().unwrap().is_some());
        pool.put(large, 1);
        assert!(large_waiter.join().unwrap().is_some());
    });
}

#[test]
fn two_waiters_are_both_served() {
    loom::model(|| {
        let pool = pool(&[1]);
        let slot = pool.try_take(0).unwrap();
        let waiters = [(); 2].map(|()| {
            let pool = pool.clone();
            thread::spawn(move || pool.take(0, LONG).map(|slot| pool.put(slot, 0)))
        });
        pool.put(slot, 0);
        for waiter in waiters {
            assert!(waiter.join().unwrap().is_some());
        }
        assert_eq!(pool.counts().free, 1);
    });
}

#[test]
fn a_fenced_slot_is_taken_only_after_its_fence() {
    loom::model(|| {
        let pool = pool(&[1]);
        let flag = Flag(Arc::new(AtomicBool::new(false)));
        let slot = pool.try_take(0).unwrap();
        let device = {
            let (pool, flag) = (pool.clone(), flag.clone());
            thread::spawn(move || {
                pool.put_after(slot, 0, vec![flag.clone()]);
                flag.0.store(true, Ordering::Release);
            })
        };
        assert_eq!(pool.take(0, LONG), Some(slot));
        assert!(flag.0.load(Ordering::Acquire));
        device.join().unwrap();
        pool.put(slot, 0);
        assert_eq!(pool.counts().free, 1);
    });
}

#[test]
fn the_last_holder_of_a_lease_gives_its_slot_back_once() {
    loom::model(|| {
        let pool = pool(&[2]);
        let slot = pool.try_take(0).unwrap();
        let holders = Arc::new(Holders::none());
        holders.join();
        holders.join();
        let (others, theirs) = (Arc::clone(&holders), pool.clone());
        let other = thread::spawn(move || {
            if others.leave() {
                theirs.put(slot, 0);
            }
        });
        if holders.leave() {
            pool.put(slot, 0);
        }
        other.join().unwrap();
        assert_eq!(pool.counts().free, 2);
    });
}
