//! Fetches by a backend, counted.

use std::time::Duration;

use expert_tier::arena::ExpertArena;
use expert_tier::error::{FetchError, FetchFailure};
use expert_tier::key::ExpertKey;
use expert_tier::testing::small_arena;
use expert_tier::tier::{Completion, CompletionQueue, ExpertTier, FetchRequest};

use super::allocations;

const BOUND: Duration = Duration::from_secs(30);
const FETCHES: usize = 1000;
/// Requests submitted at once: more than there are readers or streams.
const BATCH: usize = 8;

/// Fails if one of a thousand fetches allocates, blocking or submitted, once as many have gone
/// before. `backend` names it in the failure.
pub(crate) fn assert_none_allocates(backend: &str, tier: &dyn ExpertTier) {
    let arena = small_arena(BATCH as u32);
    tier.use_arena(&arena).expect("it takes the arena");
    let keys: Vec<_> = tier.manifest().layout().keys().collect();
    let (queue, mut batch) = (CompletionQueue::new(), Vec::with_capacity(BATCH));
    make_room(&queue, &arena);
    let mut both = |counted: Option<&str>| {
        let start = allocations();
        fetch_blocking(tier, &arena, &keys);
        let blocking = allocations() - start;
        fetch_in_batches(tier, &arena, &keys, &queue, &mut batch);
        let submitted = allocations() - start - blocking;
        if let Some(backend) = counted {
            assert_eq!(blocking, 0, "{backend}: {FETCHES} blocking fetches");
            assert_eq!(submitted, 0, "{backend}: {FETCHES} submitted fetches");
        }
    };
    both(None);
    both(Some(backend));
}

/// Fills `queue` once with as many completions as a batch has, and empties it.
fn make_room(queue: &CompletionQueue, arena: &ExpertArena) {
    let key = ExpertKey::new(0, 0);
    for _ in 0..BATCH {
        let (ticket, key, slot) = request(arena, key).into_parts();
        let outcome = Err(FetchFailure::new(FetchError::Cancelled { key }, slot));
        queue.push(Completion { ticket, key, outcome });
    }
    while queue.pop(Duration::ZERO).is_some() {}
}

fn request(arena: &ExpertArena, key: ExpertKey) -> FetchRequest {
    FetchRequest::new(key, arena.acquire(1, BOUND).expect("a free slot"))
}

fn fetch_blocking(tier: &dyn ExpertTier, arena: &ExpertArena, keys: &[ExpertKey]) {
    for n in 0..FETCHES {
        let (_, key, slot) = request(arena, keys[n % keys.len()]).into_parts();
        let fetched = tier.fetch(key, slot).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(fetched.residency.key(), key);
    }
}

fn fetch_in_batches(
    tier: &dyn ExpertTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
    queue: &CompletionQueue,
    batch: &mut Vec<FetchRequest>,
) {
    for first in (0..FETCHES).step_by(BATCH) {
        batch.extend((first..first + BATCH).map(|n| request(arena, keys[n % keys.len()])));
        tier.submit(batch, queue);
        for _ in 0..BATCH {
            let completion = tier.poll(queue, BOUND).expect("a completion");
            completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}
