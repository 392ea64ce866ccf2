//! The backend with a reader that hangs: in counting a damaged record, which a test can hold.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::arena::ExpertArena;
use crate::testing::{Meters, TestStore, small_arena};

const BOUND: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_millis(200);
const DAMAGED: ExpertKey = ExpertKey { layer: 0, expert: 0 };
const SOUND: ExpertKey = ExpertKey { layer: 0, expert: 1 };

/// A backend with one reader, which hangs at the damaged record until something is sent, and says
/// when it does.
struct Hanging {
    _store: TestStore,
    tier: PosixTier,
    hangs: Receiver<()>,
    open: Sender<()>,
}

fn hanging(deadline: Duration, total: Duration) -> Hanging {
    let store = TestStore::new(1, 2, &[5_000], 1);
    store.flip_bit(DAMAGED, 4096);
    let meters = Meters::new();
    let ((open, gate), (say, hangs)) = (channel(), channel());
    let gate = Mutex::new(gate);
    meters.on("metrale_mismatch_total", move || {
        let _said = say.send(());
        let _opened = gate.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(BOUND);
    });
    let options = PosixOptions { threads: 1, deadline, total };
    let tier = metrics::with_local_recorder(&meters, || PosixTier::open(&store.path(), options));
    Hanging { _store: store, tier: tier.unwrap(), hangs, open }
}

fn request(arena: &ExpertArena, key: ExpertKey) -> FetchRequest {
    FetchRequest::new(key, arena.try_acquire(1).expect("a free slot"))
}

#[test]
fn requests_end_at_the_deadline_though_every_reader_hangs() {
    let Hanging { _store, tier, open, .. } = hanging(DEADLINE, BOUND);
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    tier.submit(&mut vec![request(&arena, DAMAGED), request(&arena, SOUND)], &queue);
    let start = Instant::now();
    let mut ends = [(); 2].map(|()| tier.poll(&queue, BOUND).expect("a completion"));
    assert!(start.elapsed() < BOUND / 2);
    ends.sort_by_key(|end| end.key);
    let [being_read, queued] = ends.map(|end| end.outcome.expect_err("late"));
    assert!(matches!(*being_read.error, FetchError::Deadline { .. }), "{being_read}");
    assert!(being_read.slot.is_none(), "its reader still has it");
    assert!(matches!(*queued.error, FetchError::Deadline { .. }), "{queued}");
    assert!(queued.slot.is_some());
    drop(queued);
    assert!(!tier.healthy());
    assert_eq!(arena.free_slots(), 1);

    open.send(()).unwrap();
    // The reader gives its slot back, and goes on.
    let both = [(); 2].map(|()| arena.acquire(1, BOUND).expect("a slot"));
    drop(both);
    tier.submit(&mut vec![request(&arena, SOUND)], &queue);
    assert!(tier.poll(&queue, BOUND).expect("a completion").outcome.is_ok());
    assert!(tier.poll(&queue, Duration::ZERO).is_none(), "one completion per request");
}

#[test]
fn closing_leaves_a_reader_behind_that_hangs_and_ends_its_request() {
    let Hanging { _store, tier, hangs, open } = hanging(DEADLINE, BOUND);
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    tier.submit(&mut vec![request(&arena, DAMAGED), request(&arena, SOUND)], &queue);
    hangs.recv_timeout(BOUND).expect("a reader that hangs");
    let start = Instant::now();
    drop(tier);
    assert!(start.elapsed() < BOUND / 2);
    let mut ends = [(); 2].map(|()| queue.pop(Duration::ZERO).expect("a completion"));
    ends.sort_by_key(|end| end.key);
    let [being_read, queued] = ends.map(|end| end.outcome.expect_err("closed"));
    assert!(matches!(*being_read.error, FetchError::Closed { .. }), "{being_read}");
    assert!(being_read.slot.is_none());
    assert!(matches!(*queued.error, FetchError::Closed { .. }), "{queued}");
    assert!(queued.slot.is_some());

    open.send(()).unwrap();
    drop(arena.acquire(1, BOUND).expect("the reader's slot"));
    assert!(queue.pop(Duration::ZERO).is_none());
}

#[test]
fn a_request_that_a_reader_has_ends_with_its_total() {
    let Hanging { _store, tier, open, .. } = hanging(BOUND, DEADLINE);
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    let start = Instant::now();
    tier.submit(&mut vec![request(&arena, DAMAGED), request(&arena, SOUND)], &queue);
    let end = tier.poll(&queue, BOUND).expect("a completion");
    assert!(start.elapsed() < BOUND / 2);
    assert_eq!(end.key, DAMAGED);
    let failure = end.outcome.expect_err("late");
    assert!(failure.to_string().contains("METRALE_EXPERT_TOTAL_MS"), "{failure}");
    assert!(failure.slot.is_none(), "its reader still has it");
    open.send(()).unwrap();
    assert!(tier.poll(&queue, BOUND).expect("a completion").outcome.is_ok(), "it only waited");
}

#[test]
fn a_queue_that_takes_longer_than_every_bound_is_served_while_the_disk_gives() {
    const BOUNDS: Duration = Duration::from_millis(300);
    const REQUESTS: u32 = 12;
    let store = TestStore::new(1, REQUESTS, &[5_000], 1);
    let meters = Meters::new();
    // The pace of the disk; nothing waits for it.
    meters.on("metrale_fetch_total", || std::thread::sleep(BOUNDS / 6));
    let options = PosixOptions { threads: 1, deadline: BOUNDS, total: BOUNDS };
    let tier = metrics::with_local_recorder(&meters, || PosixTier::open(&store.path(), options));
    let tier = tier.unwrap();
    let arena = small_arena(REQUESTS);
    let queue = CompletionQueue::new();
    let keys = (0..REQUESTS).map(|expert| ExpertKey::new(0, expert));
    let start = Instant::now();
    tier.submit(&mut keys.map(|key| request(&arena, key)).collect(), &queue);
    for _ in 0..REQUESTS {
        let end = tier.poll(&queue, BOUND).expect("a completion");
        let fetched = end.outcome.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(fetched.residency.payload() == store.payload(end.key));
    }
    assert!(
        start.elapsed() > BOUNDS,
        "the queue was longer than the bounds: {:?}",
        start.elapsed()
    );
    assert!(tier.healthy());
}
