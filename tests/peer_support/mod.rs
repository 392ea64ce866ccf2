//! What the tests of peers and their clients share: real peer processes, scripted peers, clients
//! that speak the protocol by hand, and waiting with a bound.

#![allow(dead_code, reason = "each test program uses its own part of this module")]

pub(crate) mod log;
pub(crate) mod process;
pub(crate) mod raw;
pub(crate) mod scripted;

use std::time::{Duration, Instant};

use expert_tier::arena::{ExpertArena, Free, Slot};
use expert_tier::error::FetchFailure;
use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use expert_tier::tcp::TcpOptions;
use expert_tier::testing::TestStore;
use expert_tier::tier::{
    Completion, CompletionQueue, ExpertTier, FetchRequest, Fetched, Source, Ticket,
};
use railset::BackoffSettings;

/// Longest wait for anything that must happen; only a failing test waits this long.
pub(crate) const BOUND: Duration = Duration::from_secs(20);
/// The deadline that [`options`] sets.
pub(crate) const DEADLINE: Duration = Duration::from_millis(400);

/// Asks again and again until there is an answer.
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < BOUND, "{what} did not happen within {BOUND:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asks again and again until it is so.
pub(crate) fn wait_until(what: &str, mut ask: impl FnMut() -> bool) {
    wait_for(what, || ask().then_some(()));
}

/// One stream to `peer` with bounds short enough to be met in a test.
pub(crate) fn options(peer: impl Into<String>) -> TcpOptions {
    TcpOptions {
        streams: 1,
        deadline: DEADLINE,
        connect: Duration::from_secs(2),
        backoff: BackoffSettings { first_ms: 5, most_ms: 40 },
        ..TcpOptions::new(peer)
    }
}

/// A small store: two layers of eight experts, one piece and two pieces of 256 KiB a record.
pub(crate) fn small_store(seed: u64) -> TestStore {
    TestStore::new(2, 8, &[5_000, 300_001], seed)
}

/// Every key of a store.
pub(crate) fn keys(manifest: &Manifest) -> Vec<ExpertKey> {
    manifest.layout().keys().collect()
}

/// A free slot of `arena`, which must have one soon.
pub(crate) fn slot(arena: &ExpertArena) -> Slot<Free> {
    arena.acquire(1, BOUND).expect("a free slot")
}

/// Fetches one record.
pub(crate) fn fetch(
    tier: &impl ExpertTier,
    arena: &ExpertArena,
    key: ExpertKey,
) -> Result<Fetched, FetchFailure> {
    tier.fetch(key, slot(arena))
}

/// Submits `keys` as one batch.
pub(crate) fn submit(
    tier: &impl ExpertTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
    queue: &CompletionQueue,
) -> Vec<Ticket> {
    let mut batch: Vec<_> = keys.iter().map(|&key| FetchRequest::new(key, slot(arena))).collect();
    let tickets = batch.iter().map(FetchRequest::ticket).collect();
    tier.submit(&mut batch, queue);
    tickets
}

/// Takes the next completion, which must come.
pub(crate) fn next(tier: &impl ExpertTier, queue: &CompletionQueue) -> Completion {
    tier.poll(queue, BOUND).expect("a completion in time")
}

/// Fetches `keys` as one batch and waits for all of it, in order of completion.
pub(crate) fn fetch_batch(
    tier: &impl ExpertTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
) -> Vec<Completion> {
    let queue = CompletionQueue::new();
    submit(tier, arena, keys, &queue);
    keys.iter().map(|_| next(tier, &queue)).collect()
}

/// Fetches `keys` as one batch, all of which must come within `bound` each and be right; says where
/// from.
pub(crate) fn fetch_all_right(
    tier: &impl ExpertTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
    store: &TestStore,
    bound: Duration,
) -> Vec<Source> {
    let queue = CompletionQueue::new();
    submit(tier, arena, keys, &queue);
    let take = |_| {
        let completion = tier.poll(&queue, bound).expect("a completion in time");
        let fetched = completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
        assert_right(store, completion.key, &fetched);
        fetched.source
    };
    keys.iter().map(take).collect()
}

/// Fails unless `fetched` is what `key` of `store` must be.
pub(crate) fn assert_right(store: &TestStore, key: ExpertKey, fetched: &Fetched) {
    assert_eq!(fetched.residency.key(), key);
    assert!(fetched.residency.payload() == store.payload(key), "{key} is wrong");
}

/// Fetches `key` until it comes, as a caller would that tries again after a passing failure.
pub(crate) fn fetch_until_right(
    tier: &impl ExpertTier,
    arena: &ExpertArena,
    store: &TestStore,
    key: ExpertKey,
) {
    let fetched = wait_for("a fetch that succeeds", || fetch(tier, arena, key).ok());
    assert_right(store, key, &fetched);
}
