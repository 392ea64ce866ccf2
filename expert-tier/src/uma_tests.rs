//! The backend over pipes, whose reads end when the test says so.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use super::*;
use crate::testing::{Meters, TestStore, small_arena};

const BOUND: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_millis(200);
const FIRST: ExpertKey = ExpertKey { layer: 0, expert: 0 };
const SECOND: ExpertKey = ExpertKey { layer: 0, expert: 1 };

/// A backend that reads each of `store`'s layers from a pipe, with one read in flight for each.
struct Piped {
    store: TestStore,
    tier: Option<RingTier>,
    pipes: Vec<File>,
}

impl Piped {
    fn new(deadline: Duration) -> Self {
        Self::with(1, (deadline, BOUND))
    }

    fn with(layers: u32, bounds: (Duration, Duration)) -> Self {
        let store = TestStore::new(layers, 2, &[5_000], 1);
        let ends = (0..layers).map(|_| io::pipe().unwrap());
        let ends = ends.map(|(reads, writes)| {
            (File::from(OwnedFd::from(reads)), File::from(OwnedFd::from(writes)))
        });
        let (reads, pipes): (Vec<_>, Vec<_>) = ends.unzip();
        let (depth, drop_wait) = (layers, bounds.0);
        let options = RingOptions { depth, piece_bytes: 65536, usual_bytes: 65536, drop_wait };
        let (ring, driver) = Ring::open(&reads, options).expect("io_uring");
        let tier = RingTier::start(store.open(), ring, driver, bounds).unwrap();
        Self { store, tier: Some(tier), pipes }
    }

    fn tier(&self) -> &RingTier {
        self.tier.as_ref().expect("not closed yet")
    }

    fn submit(&self, arena: &ExpertArena, keys: &[ExpertKey], queue: &CompletionQueue) {
        let request = |&key| FetchRequest::new(key, arena.try_acquire(1).expect("a free slot"));
        self.tier().submit(&mut keys.iter().map(request).collect(), queue);
    }

    /// Waits until the kernel has a read.
    fn wait_for_read(&self) {
        let until = Instant::now() + BOUND;
        while self.tier().shared.ring.in_flight() == 0 {
            assert!(Instant::now() < until, "no read was started");
            std::thread::yield_now();
        }
    }

    /// Lets the read in flight have the record of `key`.
    fn feed(&self, key: ExpertKey) {
        (&self.pipes[key.layer as usize]).write_all(&self.record(key)).unwrap();
    }

    fn record(&self, key: ExpertKey) -> Vec<u8> {
        let store = self.store.open();
        let stride = store.manifest().layout().locate(key).unwrap().stride();
        let mut record = vec![0; usize::try_from(stride).unwrap()];
        store.read_at(key, 0, &mut record).unwrap();
        record
    }
}

fn next(tier: &RingTier, queue: &CompletionQueue) -> Completion {
    tier.poll(queue, BOUND).expect("a completion in time")
}

#[test]
fn a_late_request_ends_and_its_slot_comes_back_when_its_read_does() {
    let piped = Piped::new(DEADLINE);
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    piped.submit(&arena, &[FIRST, SECOND], &queue);
    let mut ends = [(); 2].map(|()| next(piped.tier(), &queue));
    ends.sort_by_key(|end| end.key);
    let [in_flight, queued] = ends.map(|end| end.outcome.expect_err("late"));
    assert!(matches!(*in_flight.error, FetchError::Deadline { .. }), "{in_flight}");
    assert!(in_flight.slot.is_none(), "the kernel may still write to it");
    assert!(matches!(*queued.error, FetchError::Deadline { .. }), "{queued}");
    assert!(queued.slot.is_some(), "no read of it was started");
    drop(queued);
    assert!(!piped.tier().healthy());
    assert_eq!(arena.free_slots(), 1);

    piped.feed(FIRST);
    drop([(); 2].map(|()| arena.acquire(1, BOUND).expect("a slot")));
    assert!(queue.pop(Duration::ZERO).is_none(), "one completion per request");
}

#[test]
fn a_record_in_time_heals_the_backend() {
    let piped = Piped::new(DEADLINE);
    let arena = small_arena(1);
    let queue = CompletionQueue::new();
    piped.submit(&arena, &[FIRST], &queue);
    assert!(next(piped.tier(), &queue).outcome.is_err());
    piped.feed(FIRST);
    drop(arena.acquire(1, BOUND).expect("the slot"));
    piped.submit(&arena, &[SECOND], &queue);
    piped.feed(SECOND);
    let fetched = next(piped.tier(), &queue).outcome.expect("in time");
    assert!(fetched.residency.payload() == piped.store.payload(SECOND));
    assert!(piped.tier().healthy());
}

#[test]
fn closing_is_bounded_though_a_read_hangs_and_its_slot_is_not_used_again() {
    let mut piped = Piped::new(DEADLINE);
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    piped.submit(&arena, &[FIRST, SECOND], &queue);
    piped.wait_for_read();
    let start = Instant::now();
    piped.tier = None;
    assert!(start.elapsed() < BOUND / 2);
    let mut ends = [(); 2].map(|()| queue.pop(Duration::ZERO).expect("a completion"));
    ends.sort_by_key(|end| end.key);
    let [in_flight, queued] = ends.map(|end| end.outcome.expect_err("not read"));
    assert!(in_flight.slot.is_none());
    assert!(matches!(*queued.error, FetchError::Closed { .. }), "{queued}");
    assert!(queued.slot.is_some());
    drop(queued);
    piped.feed(FIRST);
    assert_eq!(arena.free_slots(), 1, "the kernel wrote to it, nobody knows when");
}

#[test]
fn the_reader_of_a_backend_that_closes_ends_though_its_read_does_not() {
    let mut piped = Piped::new(DEADLINE);
    let arena = small_arena(1);
    let queue = CompletionQueue::new();
    piped.submit(&arena, &[FIRST], &queue);
    piped.wait_for_read();
    let mut tier = piped.tier.take().expect("not closed yet");
    let worker = tier.worker.take().expect("the reader's thread");
    drop(tier);
    assert_eq!(worker.join_until(Instant::now() + BOUND), Some(End::Stuck));
}

#[test]
fn a_read_that_ends_while_the_backend_closes_gives_its_slot_back() {
    let mut piped = Piped::new(BOUND);
    let arena = small_arena(1);
    let queue = CompletionQueue::new();
    piped.submit(&arena, &[FIRST], &queue);
    piped.wait_for_read();
    let tier = piped.tier.take();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| drop(tier));
        piped.feed(FIRST);
        closing.join().unwrap();
    });
    match queue.pop(Duration::ZERO).expect("a completion").outcome {
        // Which of the two was first is not for the test to say.
        Ok(fetched) => assert!(fetched.residency.payload() == piped.store.payload(FIRST)),
        Err(failure) => assert!(failure.slot.is_some(), "{failure}"),
    }
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn requests_end_though_the_reader_panics() {
    let store = TestStore::new(1, 8, &[5_000], 1);
    store.flip_bit(FIRST, 4096);
    let meters = Meters::new();
    meters.on("metrale_mismatch_total", || panic!("asked to panic"));
    // One read at a time, so that the others wait when the first panics.
    let options = UmaOptions { depth: 1, ..UmaOptions::default() };
    let open = || UmaTier::open(&store.path(), &options);
    let tier = metrics::with_local_recorder(&meters, open).unwrap();
    assert_eq!(tier.path(), UmaPath::Plain);
    let arena = small_arena(9);
    let queue = CompletionQueue::new();
    let request = |expert| {
        FetchRequest::new(ExpertKey::new(0, expert), arena.try_acquire(1).expect("a free slot"))
    };
    tier.submit(&mut (0..8).map(request).collect(), &queue);
    for _ in 0..8 {
        // What was read before the damaged record is there; nothing after.
        let end = tier.poll(&queue, BOUND).expect("a completion");
        let closed = |failure: &FetchFailure| matches!(*failure.error, FetchError::Closed { .. });
        assert!(end.outcome.as_ref().err().is_none_or(closed), "{:?}", end.outcome);
    }
    // The record in hand completes while the reader unwinds, a moment before the backend is closed.
    let until = Instant::now() + BOUND;
    while tier.healthy() {
        assert!(Instant::now() < until, "the backend is closed in the end");
        std::thread::yield_now();
    }
    tier.submit(&mut vec![request(1)], &queue);
    let end = tier.poll(&queue, BOUND).expect("a completion");
    assert!(matches!(*end.outcome.unwrap_err().error, FetchError::Closed { .. }));
}

#[test]
fn slots_of_the_named_arena_are_read_into_as_registered_memory() {
    let store = TestStore::new(1, 2, &[300_000], 1);
    let tier = UmaTier::open(&store.path(), &UmaOptions::default()).unwrap();
    let meters = Meters::new();
    let (arena, other) = (small_arena(1), small_arena(1));
    metrics::with_local_recorder(&meters, || {
        tier.use_arena(&arena).expect("it takes the arena");
        tier.use_arena(&arena).expect("it takes the arena");
        assert_eq!(tier.path(), UmaPath::Registered);
        tier.use_arena(&other).expect("it takes the arena");
    });
    let fetch = |arena: &ExpertArena| {
        let fetched = tier.fetch(FIRST, arena.try_acquire(1).unwrap()).expect("a sound store");
        assert!(fetched.residency.payload() == store.payload(FIRST));
    };
    fetch(&arena);
    let ReadCounts { fixed, plain } = tier.reads();
    assert!(fixed > 0 && plain == 0);
    fetch(&other);
    assert!(tier.reads().fixed == fixed && tier.reads().plain > 0);
    let second = "metrale_fallbacks_total{backend=uma,reason=second_arena}";
    assert_eq!(meters.count(second), 1, "the second arena, and no other");
}

#[test]
fn a_queue_that_takes_longer_than_every_bound_is_served_while_the_disk_gives() {
    const BOUNDS: Duration = Duration::from_millis(300);
    const REQUESTS: usize = 12;
    let piped = Piped::with(1, (BOUNDS, BOUNDS));
    let arena = small_arena(REQUESTS as u32);
    let queue = CompletionQueue::new();
    let keys: Vec<_> = [FIRST, SECOND].into_iter().cycle().take(REQUESTS).collect();
    let start = Instant::now();
    piped.submit(&arena, &keys, &queue);
    for key in keys {
        // The pace of the disk; nothing waits for it.
        std::thread::sleep(BOUNDS / 6);
        piped.feed(key);
        let end = next(piped.tier(), &queue);
        let fetched = end.outcome.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(end.key == key && fetched.residency.payload() == piped.store.payload(key));
    }
    assert!(
        start.elapsed() > BOUNDS,
        "the queue was longer than the bounds: {:?}",
        start.elapsed()
    );
    assert!(piped.tier().healthy());
}

#[test]
fn a_disk_that_gives_a_byte_now_and_then_costs_a_request_its_total_and_no_more() {
    const TOTAL: Duration = Duration::from_millis(600);
    let piped = Piped::with(1, (DEADLINE, TOTAL));
    let arena = small_arena(1);
    let queue = CompletionQueue::new();
    let start = Instant::now();
    piped.submit(&arena, &[FIRST], &queue);
    let mut record = piped.record(FIRST).into_iter();
    let end = loop {
        assert!(start.elapsed() < BOUND, "the request ends");
        if let Some(end) = piped.tier().poll(&queue, DEADLINE / 10) {
            break end;
        }
        (&piped.pipes[0]).write_all(&[record.next().expect("a long record")]).unwrap();
    };
    let failure = end.outcome.expect_err("late");
    assert!(failure.to_string().contains("METRALE_EXPERT_TOTAL_MS"), "{failure}");
    assert!(start.elapsed() >= TOTAL, "{:?}", start.elapsed());
}

#[test]
fn a_read_that_the_disk_keeps_gains_no_time_by_those_that_it_got_later() {
    let piped = Piped::with(2, (DEADLINE, BOUND));
    let arena = small_arena(2);
    let (queue, others) = (CompletionQueue::new(), CompletionQueue::new());
    let start = Instant::now();
    piped.submit(&arena, &[FIRST], &queue);
    piped.wait_for_read();
    let later = ExpertKey::new(1, 0);
    let end = loop {
        assert!(start.elapsed() < BOUND, "the request ends");
        piped.submit(&arena, &[later], &others);
        piped.feed(later);
        assert!(next(piped.tier(), &others).outcome.is_ok(), "the disk gives what came later");
        if let Some(end) = queue.pop(DEADLINE / 10) {
            break end;
        }
    };
    let failure = end.outcome.expect_err("late");
    assert!(failure.to_string().contains("METRALE_EXPERT_DEADLINE_MS"), "{failure}");
    assert_eq!(end.key, FIRST);
}
