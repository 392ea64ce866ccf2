use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::*;
use crate::error::{FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::posix::{PosixOptions, PosixTier};
use crate::testing::{Fault, FaultyTier, Meters, TestStore, small_arena};
use crate::tier::Fetched;

const KEY: ExpertKey = ExpertKey { layer: 1, expert: 3 };
const BOUND: Duration = Duration::from_secs(20);
const DEADLINES: Duration = Duration::from_secs(2);

/// Two or three ways over one store, each of which fails when told to.
struct Ways {
    ways: Vec<Arc<FaultyTier<PosixTier>>>,
    tier: FallbackTier,
    store: TestStore,
    arena: ExpertArena,
}

/// Tries a way again at once, where nothing else is said.
fn eager() -> FallbackOptions {
    let backoff = BackoffSettings { first_ms: 1, most_ms: 1 };
    FallbackOptions { backoff, ..FallbackOptions::default() }
}

/// Never tries a way again.
fn patient() -> FallbackOptions {
    let backoff = BackoffSettings { first_ms: 1 << 30, most_ms: 1 << 30 };
    FallbackOptions { backoff, ..FallbackOptions::default() }
}

fn faulty(store: &TestStore) -> Arc<FaultyTier<PosixTier>> {
    let tier = PosixTier::open(&store.path(), PosixOptions::default()).expect("a sound store");
    Arc::new(FaultyTier::new(tier))
}

fn plan(tier: &Arc<FaultyTier<PosixTier>>) -> WayPlan {
    WayPlan::opened(Arc::clone(tier) as _)
}

impl Ways {
    fn new(count: usize, options: FallbackOptions) -> Self {
        let store = TestStore::new(2, 8, &[5_000, 300_001], 7);
        let ways: Vec<_> = (0..count).map(|_| faulty(&store)).collect();
        let tier = FallbackTier::open(ways.iter().map(plan).collect(), options).expect("open ways");
        Self { ways, tier, store, arena: small_arena(16) }
    }

    fn fetch(&self, key: ExpertKey) -> Result<Fetched, FetchFailure> {
        self.tier.fetch(key, self.arena.acquire(1, BOUND).expect("a free slot"))
    }

    fn fetch_right(&self) {
        let fetched = self.fetch(KEY).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(fetched.residency.payload() == self.store.payload(KEY));
    }

    /// Requests that each way has been given.
    fn submitted(&self) -> Vec<u64> {
        self.ways.iter().map(|way| way.submitted()).collect()
    }
}

#[test]
fn a_request_that_fails_goes_the_next_way() {
    let meters = Meters::new();
    let it = metrics::with_local_recorder(&meters, || Ways::new(3, patient()));
    metrics::with_local_recorder(&meters, || {
        for (n, fault) in
            [Fault::Deadline, Fault::Unreachable, Fault::Mismatch].into_iter().enumerate()
        {
            it.ways[0].fail(n as u64, fault);
            it.fetch_right();
        }
        it.ways[0].fail(3, Fault::Unreachable);
        it.ways[1].fail(3, Fault::Deadline);
        it.fetch_right();
    });
    assert_eq!(it.submitted(), [4, 4, 1]);
    for (reason, count) in [("deadline", 2), ("unreachable", 2), ("mismatch", 1)] {
        let name = format!("metrale_fallbacks_total{{backend=posix,reason={reason}}}");
        assert_eq!(meters.count(&name), count, "{reason}");
    }
    assert_eq!(it.arena.free_slots(), 16);
}

#[test]
fn the_last_error_names_every_way_tried() {
    let it = Ways::new(3, patient());
    it.ways[0].fail(0, Fault::Unreachable);
    it.ways[1].fail(0, Fault::Mismatch);
    it.ways[2].fail(0, Fault::Deadline);
    let failure = it.fetch(KEY).expect_err("no way works");
    let FetchError::Ways { key, tried } = &*failure.error else { panic!("{failure}") };
    assert_eq!((*key, tried.len()), (KEY, 3));
    let said = failure.to_string();
    for part in ["a fault asked for", "CRC-32", "METRALE_EXPERT_DEADLINE_MS"] {
        assert!(said.contains(part), "{said}");
    }
    let names: Vec<_> = failure.error.of_each_way().map(FetchError::name).collect();
    assert_eq!(names, ["unreachable", "mismatch", "deadline"]);
    assert!(failure.error.is_transient());
    assert!(failure.slot.is_some());
}

#[test]
fn what_concerns_the_request_alone_goes_no_other_way() {
    let it = Ways::new(2, patient());
    let failure = it.fetch(ExpertKey::new(9, 9)).expect_err("no such key");
    assert!(matches!(*failure.error, FetchError::Key(_)), "{failure}");
    assert_eq!(it.submitted(), [1, 0]);
}

#[test]
fn a_slot_that_somebody_may_still_write_is_never_handed_on() {
    let it = Ways::new(2, patient());
    it.ways[0].fail(0, Fault::Stuck);
    let failure = it.fetch(KEY).expect_err("the slot is not to be had");
    assert!(matches!(*failure.error, FetchError::Deadline { .. }), "{failure}");
    assert!(failure.slot.is_none());
    assert_eq!(it.submitted(), [1, 0]);
}

#[test]
fn after_a_streak_of_failures_requests_pass_the_way_by() {
    let meters = Meters::new();
    let it = metrics::with_local_recorder(&meters, || Ways::new(2, patient()));
    it.ways[0].fail_all(Some(Fault::Unreachable));
    for _ in 0..10 {
        it.fetch_right();
    }
    assert_eq!(it.submitted(), [3, 10]);
    assert_eq!(meters.count("metrale_fallbacks_total{backend=posix,reason=down}"), 7);
    it.ways[1].fail_all(Some(Fault::Mismatch));
    let said = it.fetch(KEY).expect_err("no way works").to_string();
    for part in ["passed by", "(attempts: 1)", "CRC-32"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_success_between_failures_is_no_streak() {
    let it = Ways::new(2, patient());
    for n in 0..10 {
        if n % 3 != 2 {
            it.ways[0].fail(n, Fault::Unreachable);
        }
        it.fetch_right();
    }
    assert_eq!(it.submitted(), [10, 7]);
}

#[test]
fn traffic_returns_when_the_way_works_again() {
    let it = Ways::new(2, eager());
    it.ways[0].fail_all(Some(Fault::Unreachable));
    for _ in 0..5 {
        it.fetch_right();
    }
    it.ways[0].fail_all(None);
    let start = Instant::now();
    let mut before = it.ways[1].submitted();
    loop {
        it.fetch_right();
        let now = it.ways[1].submitted();
        if now == before {
            break;
        }
        before = now;
        assert!(start.elapsed() < BOUND, "the first way is not used again");
    }
    let elsewhere = it.ways[1].submitted();
    for _ in 0..10 {
        it.fetch_right();
    }
    assert_eq!(it.ways[1].submitted(), elsewhere);
}

#[test]
fn one_request_of_a_batch_tries_a_way_that_is_down() {
    let it = Ways::new(2, eager());
    it.ways[0].fail_all(Some(Fault::Unreachable));
    for _ in 0..3 {
        it.fetch_right();
    }
    let queue = CompletionQueue::new();
    let slot = || it.arena.acquire(1, BOUND).expect("a free slot");
    let start = Instant::now();
    let before = it.ways[0].submitted();
    while it.ways[0].submitted() == before {
        let keys = (0..8).map(|expert| ExpertKey::new(1, expert));
        let mut batch: Vec<_> = keys.map(|key| FetchRequest::new(key, slot())).collect();
        it.tier.submit(&mut batch, &queue);
        assert!(batch.is_empty());
        for _ in 0..8 {
            let completion = it.tier.poll(&queue, BOUND).expect("a completion");
            let fetched = completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
            assert!(fetched.residency.payload() == it.store.payload(completion.key));
        }
        assert!(it.tier.poll(&queue, Duration::ZERO).is_none());
        assert!(start.elapsed() < BOUND, "the first way is not tried again");
    }
    assert_eq!(it.ways[0].submitted(), before + 1);
}

/// A way after one failure, which is enough, and tickets for more requests.
fn down_way(wait_ms: u32) -> (Way, Vec<Ticket>, FetchError, Instant) {
    let backoff = BackoffSettings { first_ms: wait_ms, most_ms: wait_ms };
    let options = FallbackOptions { backoff, streak: 1, ..FallbackOptions::default() };
    let way = Way::new(TierKind::Rdma, DEADLINES, DEADLINES, &options);
    let arena = small_arena(4);
    let ticket = |_| FetchRequest::new(KEY, arena.try_acquire(1).expect("a slot")).ticket();
    let tickets: Vec<_> = (0..4).map(ticket).collect();
    let (peer, reason) = ("there".to_owned(), "gone".to_owned());
    let error = FetchError::Unreachable { key: KEY, peer, reason, attempts: 1 };
    assert!(!way.is_down());
    assert!(way.failed(tickets[0], &error), "the first is to be logged");
    assert!(way.is_down());
    (way, tickets, error, Instant::now())
}

#[test]
fn while_one_request_tries_a_way_no_other_does() {
    let (way, tickets, error, now) = down_way(1);
    let later = now + Duration::from_secs(60);
    assert!(way.may_try(tickets[1], true, later));
    assert!(!way.may_try(tickets[2], true, later));
    assert!(!way.failed(tickets[3], &error), "one that was there before");
    assert!(!way.may_try(tickets[2], true, later));
    way.failed(tickets[1], &error);
    assert!(way.may_try(tickets[2], true, later));
    // It says nothing of the way, so another may try.
    way.failed(tickets[2], &FetchError::Cancelled { key: KEY });
    assert!(way.is_down());
    assert!(way.may_try(tickets[3], true, later));
    way.worked();
    assert!(!way.is_down());
}

#[test]
fn a_way_is_tried_again_later_where_it_says_that_it_does_not_work() {
    let (way, tickets, error, now) = down_way(10_000);
    let at = |ms| now + Duration::from_millis(ms);
    assert!(!way.may_try(tickets[1], true, at(4_000)), "half of the back-off is the least");
    assert!(!way.may_try(tickets[1], false, at(9_000)));
    assert!(way.may_try(tickets[1], false, at(10_100)));
    way.failed(tickets[1], &error);
    assert!(!way.may_try(tickets[2], false, at(9_000)));
    // What it showed was known, and puts off nothing.
    assert!(way.may_try(tickets[2], true, at(10_100)));
}

#[test]
fn where_every_way_is_down_each_is_tried_all_the_same() {
    let it = Ways::new(2, patient());
    it.ways.iter().for_each(|way| way.fail_all(Some(Fault::Unreachable)));
    for _ in 0..5 {
        it.fetch(KEY).expect_err("no way works");
    }
    assert_eq!(it.submitted(), [5, 5]);
    it.ways[1].fail_all(None);
    it.fetch_right();
}

#[test]
fn a_request_cancelled_between_two_ways_is_cancelled() {
    let it = Ways::new(2, patient());
    it.ways[0].fail(0, Fault::Unreachable);
    let queue = CompletionQueue::new();
    let request = FetchRequest::new(KEY, it.arena.acquire(1, BOUND).expect("a free slot"));
    // The first way knows nothing of it yet, as if it had failed there a moment ago.
    it.tier.cancel(request.ticket());
    it.tier.submit(&mut vec![request], &queue);
    let failure = it.tier.poll(&queue, BOUND).expect("a completion").outcome.unwrap_err();
    assert!(matches!(*failure.error, FetchError::Cancelled { .. }), "{failure}");
    assert!(failure.slot.is_some());
    assert_eq!(it.submitted(), [1, 0]);
}

#[test]
fn bounds_add_up_and_kind_and_deadline_are_the_first_ways() {
    let it = Ways::new(3, patient());
    assert_eq!(it.tier.bound(), (DEADLINES + PosixOptions::default().total) * 3);
    assert_eq!(it.tier.deadline(), DEADLINES);
    assert_eq!(it.tier.kind(), TierKind::Posix);
    assert!(it.tier.is_complete());
}

#[test]
fn another_store_is_refused_by_name_at_the_start() {
    let (store, other) = (TestStore::new(1, 2, &[5_000], 1), TestStore::new(1, 2, &[5_000], 2));
    let plans = vec![plan(&faulty(&store)), plan(&faulty(&other))];
    let error = FallbackTier::open(plans, patient()).err().expect("two models").to_string();
    for store in [&store, &other] {
        assert!(error.contains(&store.open().manifest().fingerprint().to_string()), "{error}");
    }
    assert!(error.contains("--expert-store") && error.contains("--fallback"), "{error}");
    let fingerprint = Some(other.open().manifest().fingerprint());
    let options = FallbackOptions { fingerprint, ..patient() };
    let error =
        FallbackTier::open(vec![plan(&faulty(&store))], options).err().expect("not that one");
    assert!(error.to_string().contains("--expert-fingerprint"), "{error}");
}

/// A way that is there from the n-th attempt on.
fn late(store: &TestStore, from: u64, not_yet: fn() -> NotOpened) -> (WayPlan, Arc<AtomicU64>) {
    let attempts = Arc::new(AtomicU64::new(0));
    let tier = faulty(store);
    let open: Open = Box::new({
        let attempts = Arc::clone(&attempts);
        move |_| match attempts.fetch_add(1, Ordering::Relaxed) {
            n if n < from => Err(not_yet()),
            _ => Ok(Arc::clone(&tier) as _),
        }
    });
    (WayPlan { kind: TierKind::Rdma, deadline: DEADLINES, bound: DEADLINES, open }, attempts)
}

/// Does nothing but while it is polled, as a backend whose callers drive it.
struct Lazy {
    inner: PosixTier,
    stalled: Mutex<Vec<(FetchRequest, CompletionQueue)>>,
}

impl ExpertTier for Lazy {
    fn kind(&self) -> TierKind {
        TierKind::Uma
    }

    fn manifest(&self) -> &Arc<Manifest> {
        self.inner.manifest()
    }

    fn healthy(&self) -> bool {
        true
    }

    fn deadline(&self) -> Duration {
        DEADLINES
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let stalled = batch.drain(..).map(|request| (request, queue.clone()));
        self.stalled.lock().unwrap().extend(stalled);
    }

    fn cancel(&self, _: Ticket) {}

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        for (request, queue) in self.stalled.lock().unwrap().drain(..) {
            self.inner.submit(&mut vec![request], &queue);
        }
        queue.pop(wait)
    }
}

#[test]
fn a_way_that_works_only_while_it_is_polled_is_polled() {
    let store = TestStore::new(2, 8, &[5_000, 300_001], 7);
    let first = faulty(&store);
    first.fail_all(Some(Fault::Unreachable));
    let inner = PosixTier::open(&store.path(), PosixOptions::default()).expect("a sound store");
    let second = WayPlan::opened(Arc::new(Lazy { inner, stalled: Mutex::default() }));
    let tier = FallbackTier::open(vec![plan(&first), second], patient()).expect("two open ways");
    let arena = small_arena(1);
    // Handed on, and then placed there.
    for _ in 0..5 {
        let slot = arena.acquire(1, BOUND).expect("a free slot");
        let fetched = tier.fetch(KEY, slot).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(fetched.residency.payload() == store.payload(KEY));
    }
    assert_eq!(first.submitted(), 3);
}

#[test]
fn a_way_that_comes_later_is_opened_then_and_used() {
    let store = TestStore::new(2, 8, &[5_000, 300_001], 7);
    let (first, attempts) = late(&store, 3, || NotOpened::Later("nobody is there".into()));
    let second = faulty(&store);
    let tier = FallbackTier::open(vec![first, plan(&second)], eager()).expect("one way");
    let arena = small_arena(1);
    tier.use_arena(&arena).expect("it takes the arena");
    assert_eq!(tier.kind(), TierKind::Rdma);
    let start = Instant::now();
    while !tier.is_complete() {
        tier.fetch(KEY, arena.acquire(1, BOUND).expect("a slot")).expect("the second way");
        assert!(start.elapsed() < BOUND, "the first way is not opened");
    }
    let before = second.submitted();
    tier.fetch(KEY, arena.acquire(1, BOUND).expect("a slot")).expect("the first way");
    assert_eq!(second.submitted(), before);
    assert_eq!(attempts.load(Ordering::Relaxed), 4);
}

/// Counts the arenas that it is named, and does something else while it takes the first.
struct Named {
    inner: PosixTier,
    count: AtomicU64,
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Named {
    fn new(store: &TestStore) -> Arc<Self> {
        let inner = PosixTier::open(&store.path(), PosixOptions::default()).expect("a sound store");
        Arc::new(Self { inner, count: AtomicU64::new(0), meanwhile: Mutex::default() })
    }

    fn meanwhile(&self, does: impl FnOnce() + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some(Box::new(does));
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl ExpertTier for Named {
    fn kind(&self) -> TierKind {
        TierKind::Posix
    }

    fn manifest(&self) -> &Arc<Manifest> {
        self.inner.manifest()
    }

    fn healthy(&self) -> bool {
        true
    }

    fn deadline(&self) -> Duration {
        DEADLINES
    }

    fn use_arena(&self, _: &ExpertArena) -> Result<(), ArenaError> {
        self.count.fetch_add(1, Ordering::Relaxed);
        let does = self.meanwhile.lock().unwrap().take();
        does.into_iter().for_each(|does| does());
        Ok(())
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        self.inner.submit(batch, queue);
    }

    fn cancel(&self, _: Ticket) {}

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        queue.pop(wait)
    }
}

#[test]
fn a_way_that_opens_while_an_arena_is_named_to_the_others_is_named_it_too() {
    let store = TestStore::new(1, 2, &[5_000], 1);
    let way = || Way::new(TierKind::Posix, DEADLINES, DEADLINES, &patient());
    let shared = Arc::new(Shared::new(vec![way(), way()], patient()));
    let (late, second) = (Named::new(&store), Named::new(&store));
    shared.ways[1].open_with(Arc::clone(&second) as _);
    let (first_arena, other_arena) = (small_arena(1), small_arena(1));
    let (theirs, its) = (Arc::clone(&shared), Arc::clone(&late));
    second.meanwhile(move || theirs.opened(0, its));
    let theirs = Arc::clone(&shared);
    late.meanwhile(move || theirs.use_arena(&other_arena).expect("a way takes it"));
    shared.use_arena(&first_arena).expect("a way takes it");
    assert_eq!((late.count(), second.count()), (2, 2));
}

#[test]
fn a_way_that_never_comes_is_not_tried_again() {
    let store = TestStore::new(2, 8, &[5_000, 300_001], 7);
    let (first, attempts) = late(&store, 1, || NotOpened::Never("no such library".into()));
    let meters = Meters::new();
    let open = || FallbackTier::open(vec![first, plan(&faulty(&store))], eager());
    let tier = metrics::with_local_recorder(&meters, open).expect("one way");
    assert!(tier.late.is_none());
    let arena = small_arena(1);
    tier.fetch(KEY, arena.acquire(1, BOUND).expect("a slot")).expect("the second way");
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
    assert_eq!(meters.count("metrale_fallbacks_total{backend=rdma,reason=not_opened}"), 1);
    assert_eq!(meters.count("metrale_fallbacks_total{backend=rdma,reason=down}"), 1);
}

#[test]
fn a_way_that_is_wrong_and_ways_that_are_all_missing_are_errors_at_the_start() {
    let store = TestStore::new(1, 2, &[5_000], 1);
    let (first, _) = late(&store, 1, || NotOpened::Refused("wrong secret".into()));
    let error = FallbackTier::open(vec![first, plan(&faulty(&store))], eager()).err();
    assert_eq!(error.expect("a wrong secret").to_string(), "rdma: wrong secret");
    let (first, _) = late(&store, 1, || NotOpened::Later("nobody is there".into()));
    let error = FallbackTier::open(vec![first], eager()).err().expect("no way").to_string();
    assert!(error.contains("rdma: nobody is there"), "{error}");
    assert!(FallbackTier::open(Vec::new(), eager()).is_err());
}

#[test]
fn closing_does_not_wait_for_the_next_attempt_to_open() {
    let store = TestStore::new(1, 2, &[5_000], 1);
    let (first, _) = late(&store, u64::MAX, || NotOpened::Later("nobody is there".into()));
    let tier = FallbackTier::open(vec![first, plan(&faulty(&store))], patient()).expect("one way");
    let start = Instant::now();
    drop(tier);
    assert!(start.elapsed() < DEADLINES, "{:?}", start.elapsed());
}
