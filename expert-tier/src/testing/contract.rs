//! What every backend must do, as tests: [`contract_suite!`](crate::contract_suite).
//!
//! A backend comes with a [`Harness`] over [`TestStore::mixed`]. Nothing here knows which backend
//! it is; a new one is done when it passes.

use std::collections::HashSet;
use std::time::Duration;

use super::{TestStore, small_arena};
use crate::arena::ExpertArena;
use crate::error::FetchError;
use crate::key::ExpertKey;
use crate::tier::{Completion, CompletionQueue, ExpertTier, FetchRequest, Fetched};

/// Longest wait for anything that must happen.
const BOUND: Duration = Duration::from_secs(30);

/// A backend under test, and the store that it serves.
pub trait Harness: Send + Sync {
    /// The backend.
    fn tier(&self) -> &dyn ExpertTier;

    /// The store behind it, on this machine's disk.
    fn store(&self) -> &TestStore;

    /// An arena that the next requests' slots come from has been made.
    fn arena_made(&self, _arena: &ExpertArena) {}

    /// The store's files have been changed: whoever has read them before is to read them again.
    fn store_changed(&mut self) {}

    /// Closes the backend as a runtime that ends would, and keeps everything else.
    fn close(&mut self);
}

/// A backend over a store, and whatever must outlive it: a peer's process, say.
pub struct Backed<T, K = ()> {
    // In this order: the backend goes before what it stands on, as in a runtime.
    tier: Option<T>,
    keep: K,
    store: TestStore,
    changed: fn(&mut K, &TestStore),
}

impl<T> Backed<T> {
    /// A backend that needs nothing but its store.
    #[must_use]
    pub fn new(store: TestStore, tier: T) -> Self {
        Self::keeping((), store, tier)
    }
}

impl<T, K> Backed<T, K> {
    /// A backend that also needs `keep`.
    #[must_use]
    pub fn keeping(keep: K, store: TestStore, tier: T) -> Self {
        Self { tier: Some(tier), keep, store, changed: |_, _| () }
    }

    /// The same, with something to do for `keep` when the store's files have been changed.
    #[must_use]
    pub fn when_changed(self, changed: fn(&mut K, &TestStore)) -> Self {
        Self { changed, ..self }
    }
}

impl<T: ExpertTier, K: Send + Sync> Harness for Backed<T, K> {
    fn tier(&self) -> &dyn ExpertTier {
        self.tier.as_ref().expect("the backend has not been closed")
    }

    fn store(&self) -> &TestStore {
        &self.store
    }

    fn store_changed(&mut self) {
        (self.changed)(&mut self.keep, &self.store);
    }

    fn close(&mut self) {
        self.tier = None;
    }
}

/// Makes a `#[test]` of every clause of the contract; `$make` builds a fresh [`Harness`]. With
/// `needs "WHAT",` in front, every test is ignored where it is not asked for.
#[macro_export]
macro_rules! contract_suite {
    (needs $what:literal, $make:expr) => {
        $crate::contract_suite!(@all [$what] $make);
    };
    (@all $needs:tt $make:expr) => {
        $crate::contract_suite!(@each $needs $make,
            every_record_arrives_whole_and_right,
            a_batch_completes_once_per_request,
            one_key_twice_in_a_batch_is_two_residencies,
            an_unknown_key_is_named_and_costs_no_slot,
            a_slot_that_is_too_small_comes_back,
            a_damaged_record_is_never_handed_out,
            a_cancelled_fetch_completes_once_and_gives_its_slot_back,
            callers_on_many_threads_get_their_own_records,
            a_lease_outlives_its_backend,
            closing_ends_every_request
        );
    };
    (@each [] $make:expr, $($name:ident),*) => {
        $(
            #[test]
            fn $name() {
                $crate::testing::contract::$name(&mut $make());
            }
        )*
    };
    (@each [$what:literal] $make:expr, $($name:ident),*) => {
        $(
            #[test]
            #[ignore = $what]
            fn $name() {
                $crate::testing::contract::$name(&mut $make());
            }
        )*
    };
    ($make:expr) => {
        $crate::contract_suite!(@all [] $make);
    };
}

fn arena(harness: &impl Harness, slots: u32) -> ExpertArena {
    let arena = small_arena(slots);
    harness.arena_made(&arena);
    arena
}

fn keys(harness: &impl Harness) -> Vec<ExpertKey> {
    harness.tier().manifest().layout().keys().collect()
}

fn request(harness: &impl Harness, arena: &ExpertArena, key: ExpertKey) -> FetchRequest {
    let layout = harness.tier().manifest().layout();
    let bytes = layout.locate(key).map_or(1, |layer| layer.record_bytes());
    FetchRequest::new(key, arena.acquire(bytes, BOUND).expect("a free slot"))
}

fn fetch(harness: &impl Harness, arena: &ExpertArena, key: ExpertKey) -> Fetched {
    let (_, key, slot) = request(harness, arena, key).into_parts();
    harness.tier().fetch(key, slot).unwrap_or_else(|failure| panic!("{failure}"))
}

fn next(harness: &impl Harness, queue: &CompletionQueue) -> Completion {
    harness.tier().poll(queue, BOUND).expect("a completion in time")
}

fn assert_right(harness: &impl Harness, fetched: &Fetched) {
    let key = fetched.residency.key();
    assert!(fetched.residency.payload() == harness.store().payload(key), "{key} is wrong");
}

/// Clause: a residency holds the record asked for, aligned for a GPU, at stable addresses.
pub fn every_record_arrives_whole_and_right(harness: &mut impl Harness) {
    let arena = arena(harness, 4);
    for key in keys(harness) {
        let fetched = fetch(harness, &arena, key);
        assert_eq!(fetched.residency.key(), key);
        assert_right(harness, &fetched);
        for tensor in fetched.residency.tensors() {
            assert_eq!(tensor.host_address % 256, 0, "{key}");
            assert_eq!(tensor.bytes.as_ptr().addr(), tensor.host_address);
        }
    }
    assert_eq!(arena.free_slots(), 4, "every lease was given back");
    assert!(harness.tier().healthy());
}

/// Clause: one completion per request, and nothing after them.
pub fn a_batch_completes_once_per_request(harness: &mut impl Harness) {
    let arena = arena(harness, 24);
    let queue = CompletionQueue::new();
    for _ in 0..3 {
        let mut batch: Vec<_> =
            keys(harness).into_iter().map(|key| request(harness, &arena, key)).collect();
        let mut due: HashSet<_> = batch.iter().map(FetchRequest::ticket).collect();
        harness.tier().submit(&mut batch, &queue);
        assert!(batch.is_empty());
        while !due.is_empty() {
            let completion = next(harness, &queue);
            assert!(due.remove(&completion.ticket), "a completion nobody waits for");
            assert_right(harness, &completion.outcome.expect("a record of a sound store"));
        }
        assert!(harness.tier().poll(&queue, Duration::ZERO).is_none());
    }
    assert_eq!(arena.free_slots(), 24);
}

/// Clause: requests are independent, even for one key.
pub fn one_key_twice_in_a_batch_is_two_residencies(harness: &mut impl Harness) {
    let arena = arena(harness, 2);
    let queue = CompletionQueue::new();
    let key = ExpertKey::new(1, 3);
    let mut batch = vec![request(harness, &arena, key), request(harness, &arena, key)];
    harness.tier().submit(&mut batch, &queue);
    let both = [next(harness, &queue), next(harness, &queue)];
    let both = both.map(|completion| completion.outcome.expect("a record of a sound store"));
    assert_ne!(both[0].residency.payload().as_ptr(), both[1].residency.payload().as_ptr());
    both.iter().for_each(|fetched| assert_right(harness, fetched));
}

/// Clause: a wrong key is an error of that request alone.
pub fn an_unknown_key_is_named_and_costs_no_slot(harness: &mut impl Harness) {
    let arena = arena(harness, 1);
    for key in [ExpertKey::new(0, 8), ExpertKey::new(3, 0), ExpertKey::new(u32::MAX, u32::MAX)] {
        let (_, key, slot) = request(harness, &arena, key).into_parts();
        let failure = harness.tier().fetch(key, slot).expect_err("a key that is not there");
        assert!(matches!(*failure.error, FetchError::Key(_)), "{failure}");
        assert!(failure.to_string().contains(&key.to_string()), "{failure}");
        assert!(failure.slot.is_some());
        assert!(!failure.error.is_transient());
    }
    assert!(harness.tier().healthy());
    assert_right(harness, &fetch(harness, &arena, ExpertKey::new(2, 7)));
}

/// Clause: a record never spills over its slot.
pub fn a_slot_that_is_too_small_comes_back(harness: &mut impl Harness) {
    use crate::arena::{ArenaOptions, SlabPlan};
    let slabs = vec![SlabPlan { slot_bytes: 8192, slots: 1 }];
    let arena = ExpertArena::new(&ArenaOptions::with_slabs(slabs)).expect("two pages");
    harness.arena_made(&arena);
    let slot = arena.try_acquire(1).expect("a free slot");
    let failure = harness.tier().fetch(ExpertKey::new(1, 0), slot).expect_err("too small");
    assert!(matches!(*failure.error, FetchError::SlotTooSmall { .. }), "{failure}");
    drop(failure);
    assert_right(harness, &fetch(harness, &arena, ExpertKey::new(0, 0)));
}

/// Clause: bytes that are not the record's, in header or payload, end as an error that says so.
pub fn a_damaged_record_is_never_handed_out(harness: &mut impl Harness) {
    let arena = arena(harness, 1);
    let layout = harness.tier().manifest().layout().clone();
    let places = [(0, "header"), (1, "first"), (2, "middle"), (3, "last")];
    for (expert, at) in places {
        let key = ExpertKey::new(1, expert);
        let layer = layout.locate(key).expect("a key of the store");
        let offset = match at {
            "header" => 33,
            "first" => layer.header_bytes(),
            "middle" => layer.record_bytes() / 2,
            _ => layer.record_bytes() - 1,
        };
        harness.store().flip_bit(key, offset);
    }
    harness.store_changed();
    for (expert, at) in places {
        let key = ExpertKey::new(1, expert);
        let (_, key, slot) = request(harness, &arena, key).into_parts();
        let failure = harness.tier().fetch(key, slot).expect_err("a damaged record");
        let named = failure.to_string();
        let mut errors = failure.error.of_each_way();
        let differs = errors.any(|error| matches!(error, FetchError::Mismatch { .. }));
        assert!(differs, "{at}: {failure}");
        assert!(named.contains(&key.to_string()), "{named}");
        assert!(named.contains(harness.tier().kind().name()), "{named}");
        assert!(failure.slot.is_some());
        assert!(harness.tier().healthy(), "one bad record is not a broken backend");
    }
    assert_right(harness, &fetch(harness, &arena, ExpertKey::new(1, 4)));
}

/// Clause: cancelling neither loses a completion nor a slot.
pub fn a_cancelled_fetch_completes_once_and_gives_its_slot_back(harness: &mut impl Harness) {
    let arena = arena(harness, 24);
    let queue = CompletionQueue::new();
    let mut batch: Vec<_> =
        keys(harness).into_iter().map(|key| request(harness, &arena, key)).collect();
    let tickets: Vec<_> = batch.iter().map(FetchRequest::ticket).collect();
    harness.tier().submit(&mut batch, &queue);
    let cancelled: HashSet<_> = tickets.iter().copied().step_by(2).collect();
    cancelled.iter().for_each(|&ticket| harness.tier().cancel(ticket));
    let mut due: HashSet<_> = tickets.iter().copied().collect();
    while !due.is_empty() {
        let completion = next(harness, &queue);
        assert!(due.remove(&completion.ticket));
        match completion.outcome {
            Ok(fetched) => assert_right(harness, &fetched),
            Err(failure) => {
                assert!(matches!(*failure.error, FetchError::Cancelled { .. }), "{failure}");
                assert!(cancelled.contains(&completion.ticket));
                assert!(failure.slot.is_some());
            }
        }
    }
    // After the fact, and of somebody else's: no effect.
    harness.tier().cancel(tickets[0]);
    assert_eq!(arena.free_slots(), 24);
    assert_right(harness, &fetch(harness, &arena, ExpertKey::new(0, 1)));
}

/// Clause: one backend serves many threads, each on a queue of its own.
pub fn callers_on_many_threads_get_their_own_records(harness: &mut impl Harness) {
    let arena = arena(harness, 16);
    let keys = keys(harness);
    let harness = &*harness;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (arena, keys) = (&arena, &keys);
            scope.spawn(move || {
                for turn in 0..20 {
                    let key = keys[(thread * 7 + turn * 5) % keys.len()];
                    let fetched = fetch(harness, arena, key);
                    assert_eq!(fetched.residency.key(), key);
                    assert_right(harness, &fetched);
                }
            });
        }
    });
    assert_eq!(arena.free_slots(), 16);
}

/// Clause: what was handed out stays, whatever becomes of the backend.
pub fn a_lease_outlives_its_backend(harness: &mut impl Harness) {
    let arena = arena(harness, 1);
    let fetched = fetch(harness, &arena, ExpertKey::new(1, 5));
    harness.close();
    assert_right(harness, &fetched);
    drop(arena);
    assert_right(harness, &fetched);
}

/// Clause: no request is forgotten when the backend goes.
pub fn closing_ends_every_request(harness: &mut impl Harness) {
    let arena = arena(harness, 24);
    let queue = CompletionQueue::new();
    let mut batch: Vec<_> =
        keys(harness).into_iter().map(|key| request(harness, &arena, key)).collect();
    let mut due: HashSet<_> = batch.iter().map(FetchRequest::ticket).collect();
    harness.tier().submit(&mut batch, &queue);
    harness.close();
    while let Some(completion) = queue.pop(Duration::ZERO) {
        assert!(due.remove(&completion.ticket));
        match completion.outcome {
            Ok(fetched) => assert_right(harness, &fetched),
            Err(failure) => {
                assert!(matches!(*failure.error, FetchError::Closed { .. }), "{failure}");
            }
        }
    }
    assert!(due.is_empty(), "{} requests were forgotten", due.len());
    assert_eq!(arena.free_slots(), 24);
}
