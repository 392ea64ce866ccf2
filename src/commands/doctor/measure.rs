//! How long one record takes, and how many come in a second, by whichever backend.
//!
//! Bounds: [`SPAN`] for each of the two, and for what is under way at its end the backend's own from
//! one record to the next (`--expert-deadline-ms` and `--expert-total-ms`).

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use expert_tier::arena::ExpertArena;
use expert_tier::key::ExpertKey;
use expert_tier::tier::{CompletionQueue, ExpertTier, FetchRequest};

/// How long each measurement goes on.
const SPAN: Duration = Duration::from_secs(1);
/// Fetches of which the median is taken; fewer where they do not end within [`SPAN`].
const ROUND_TRIPS: usize = 101;
/// Longest wait for a slot or a completion before the clock is looked at again.
const WAIT: Duration = Duration::from_millis(100);

/// What came of it.
pub(super) struct Measured {
    /// The median time of a fetch of the smallest record, alone.
    pub(super) round_trip: Duration,
    /// Bytes of that record.
    pub(super) record_bytes: u64,
    /// Records' bytes per second with as many under way as the arena holds.
    pub(super) bytes_per_s: f64,
    /// What was under way at once.
    pub(super) slots: usize,
}

/// Measures `tier`, which must know `arena`.
pub(super) fn measure(tier: &dyn ExpertTier, arena: &ExpertArena) -> anyhow::Result<Measured> {
    let layout = tier.manifest().layout();
    let smallest = layout.layers().iter().min_by_key(|layer| layer.record_bytes());
    let smallest = smallest.context("the store has no record")?;
    let key = ExpertKey::new(smallest.layer(), 0);
    let record_bytes = smallest.record_bytes();
    let started = Instant::now();
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    while times.len() < ROUND_TRIPS && (times.is_empty() || started.elapsed() < SPAN) {
        let slot = arena.acquire(record_bytes, WAIT)?;
        let asked = Instant::now();
        tier.fetch(key, slot)?;
        times.push(asked.elapsed());
    }
    let round_trip = median(&mut times);
    let bytes_per_s = stream(tier, arena)?;
    Ok(Measured { round_trip, record_bytes, bytes_per_s, slots: arena.slots() })
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Fetches all records in turn, as many at once as there are slots; the first failure ends it.
fn stream(tier: &dyn ExpertTier, arena: &ExpertArena) -> anyhow::Result<f64> {
    let layout = tier.manifest().layout();
    let mut keys = layout.keys().collect::<Vec<_>>().into_iter().cycle().peekable();
    let queue = CompletionQueue::new();
    let (mut batch, mut due, mut bytes) = (Vec::new(), 0_usize, 0_u64);
    let mut failure = None;
    let bound = tier.bound().saturating_add(SPAN);
    let started = Instant::now();
    let mut came = started;
    loop {
        let goes_on = failure.is_none() && started.elapsed() < SPAN;
        while goes_on && let Some(&key) = keys.peek() {
            let Some(slot) = arena.try_acquire(layout.locate(key)?.record_bytes()) else { break };
            batch.push(FetchRequest::new(key, slot));
            keys.next();
        }
        due += batch.len();
        tier.submit(&mut batch, &queue);
        if due == 0 {
            break;
        }
        let polled = tier.poll(&queue, WAIT).map(|completion| completion.outcome);
        if polled.is_some() {
            came = Instant::now();
        }
        match polled {
            Some(Ok(fetched)) => bytes += fetched.residency.payload().len() as u64,
            Some(Err(error)) => {
                failure.get_or_insert(error);
            }
            None => {
                let waited = came.elapsed();
                ensure!(waited < bound, "no request completed within {} s", waited.as_secs());
                continue;
            }
        }
        due -= 1;
    }
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(bytes as f64 / started.elapsed().as_secs_f64().max(1e-9)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expert_tier::arena::ArenaOptions;
    use expert_tier::posix::{PosixOptions, PosixTier};
    use expert_tier::testing::TestStore;

    #[test]
    fn the_median_is_the_middle_one() {
        let ms = Duration::from_millis;
        assert_eq!(median(&mut [ms(9), ms(1), ms(3)]), ms(3));
        assert_eq!(median(&mut []), Duration::ZERO);
    }

    #[test]
    fn the_smallest_record_is_timed_and_all_are_counted() {
        let store = TestStore::new(2, 2, &[300_001, 5_000], 301);
        let tier = PosixTier::open(&store.path(), PosixOptions::default()).unwrap();
        let layout = tier.manifest().layout();
        let options = ArenaOptions::for_layout(layout, 4 * layout.max_stride()).unwrap();
        let arena = ExpertArena::new(&options).unwrap();
        let measured = measure(&tier, &arena).unwrap();
        let smallest = layout.layers().iter().map(|layer| layer.record_bytes()).min();
        assert_eq!(Some(measured.record_bytes), smallest);
        assert!(measured.round_trip > Duration::ZERO && measured.bytes_per_s > 300_001.0);
    }

    #[test]
    fn the_first_record_that_does_not_come_is_the_result() {
        let store = TestStore::new(1, 2, &[5_000], 302);
        store.flip_bit(ExpertKey::new(0, 1), 4_000);
        let tier = PosixTier::open(&store.path(), PosixOptions::default()).unwrap();
        let layout = tier.manifest().layout();
        let options = ArenaOptions::for_layout(layout, 4 * layout.max_stride()).unwrap();
        let error = measure(&tier, &ExpertArena::new(&options).unwrap()).err().expect("damaged");
        assert!(error.to_string().contains("expert 1"), "{error}");
    }
}
