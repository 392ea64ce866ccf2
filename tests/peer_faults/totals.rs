//! Peers that answer each record in time, and so slowly that whoever is behind waits for ever: the
//! bound of a whole request.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use expert_tier::error::{Bound, FetchError};
use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{Completion, CompletionQueue, ExpertTier};

use crate::peer_support::scripted::{Scripted, answer, record};
use crate::peer_support::{
    BOUND, DEADLINE, assert_right, fetch, fetch_batch, fetch_until_right, keys, next, options,
    small_store, submit, wait_until,
};

const KEY: ExpertKey = ExpertKey::new(1, 3);
const TOTAL: Duration = Duration::from_millis(600);
/// What a test allows on a machine that has other things to do.
const SLACK: Duration = Duration::from_millis(350);

/// A peer that takes 150 ms for each record on its first connection.
fn slow(store: &Arc<TestStore>) -> Scripted {
    let theirs = Arc::clone(store);
    Scripted::attached(store, move |conn| {
        loop {
            let (id, key) = conn.request()?;
            // The pace of the peer; nothing waits for it.
            std::thread::sleep(Duration::from_millis(150));
            conn.send(&answer(id, &record(&theirs, key)))?;
        }
    })
}

fn assert_total(completion: &Completion) {
    let failure = completion.outcome.as_ref().expect_err("a request that is too old");
    let FetchError::Deadline { key, waited, bound: Bound::Total, .. } = *failure.error else {
        panic!("{failure}")
    };
    assert_eq!(key, completion.key);
    assert!(waited >= TOTAL && waited < TOTAL + SLACK, "{failure}");
    assert!(failure.to_string().contains("METRALE_EXPERT_TOTAL_MS"), "{failure}");
    assert!(failure.error.is_transient());
}

#[test]
fn a_peer_that_keeps_every_deadline_does_not_stretch_a_requests_total() {
    let store = Arc::new(small_store(91));
    let peer = slow(&store);
    let options = TcpOptions { total: TOTAL, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(16);
    let queue = CompletionQueue::new();
    let keys = keys(tier.manifest());
    let start = Instant::now();
    submit(&tier, &arena, &keys, &queue);
    let mut late = 0;
    for _ in &keys {
        let completion = next(&tier, &queue);
        match &completion.outcome {
            Ok(fetched) => assert_right(&store, completion.key, fetched),
            Err(failure) => {
                assert_total(&completion);
                // It is on the wire, and the peer will still write there.
                assert!(failure.slot.is_none());
                late += 1;
            }
        }
    }
    assert!(start.elapsed() < TOTAL + SLACK, "{:?}", start.elapsed());
    assert!((8..16).contains(&late), "{late} of 16");
    assert!(arena.free_slots() < 16, "slots that the peer still writes into are not free");
    // The answers are drained one by one, on a connection that is sound.
    wait_until("every slot to come back", || arena.free_slots() == 16);
    assert!(queue.pop(Duration::ZERO).is_none(), "one completion for one request");
    assert!(tier.healthy());
    assert_eq!(tier.reconnects(), 0);
    fetch_until_right(&tier, &arena, &store, KEY);
}

#[test]
fn what_waits_behind_the_pipeline_does_not_age_while_answers_come() {
    let store = Arc::new(small_store(92));
    let peer = slow(&store);
    let options = TcpOptions { total: TOTAL, depth: 1, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(16);
    let start = Instant::now();
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        let fetched = completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
        assert_right(&store, completion.key, &fetched);
    }
    assert!(start.elapsed() > TOTAL * 2, "the queue was longer than the total");
    assert_eq!(tier.reconnects(), 0);
}

#[test]
fn a_blocking_fetch_keeps_its_place_behind_others_for_as_long_as_answers_come() {
    let store = Arc::new(small_store(96));
    let peer = slow(&store);
    let (deadline, total) = (DEADLINE, Duration::from_millis(1));
    let depth = 1;
    // Each answer is late by its total, and yet the line moves on.
    let options = TcpOptions { deadline, total, depth, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(16);
    let (queue, keys) = (CompletionQueue::new(), keys(tier.manifest()));
    submit(&tier, &arena, &keys[..15], &queue);
    let start = Instant::now();
    let failure = fetch(&tier, &arena, keys[15]).expect_err("its own total is short");
    let took = start.elapsed();
    let FetchError::Deadline { bound: Bound::Total, .. } = *failure.error else {
        panic!("{failure}")
    };
    assert!(took > tier.bound() + Duration::from_secs(1), "it waited for its turn: {took:?}");
}

#[test]
fn what_waits_for_links_that_come_up_and_break_ends_with_its_slot() {
    let store = Arc::new(small_store(97));
    let peer = Scripted::attached(&store, |conn| conn.request().map(drop));
    let attempts = u32::MAX;
    let options = TcpOptions { total: TOTAL, depth: 1, attempts, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(16);
    let completions = fetch_batch(&tier, &arena, &keys(tier.manifest()));
    for completion in &completions {
        assert_total(completion);
    }
    drop(completions);
    wait_until("every slot to come back", || arena.free_slots() == 16);
}

#[test]
fn a_record_that_is_arriving_when_its_time_is_over_keeps_its_slot_until_it_is_there() {
    let store = Arc::new(small_store(93));
    let theirs = Arc::clone(&store);
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let peer = Scripted::attached(&store, move |conn| {
        loop {
            let (id, key) = conn.request()?;
            let whole = answer(id, &record(&theirs, key));
            let (first, second) = whole.split_at(whole.len() / 2);
            conn.send(first)?;
            wait.lock().unwrap().recv_timeout(BOUND)?;
            conn.send(second)?;
        }
    });
    let options = TcpOptions { total: TOTAL, deadline: BOUND, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(1);
    let queue = CompletionQueue::new();
    submit(&tier, &arena, &[KEY], &queue);
    let completion = next(&tier, &queue);
    assert_total(&completion);
    drop(completion);
    assert_eq!(arena.free_slots(), 0, "the peer still writes there");
    go.send(()).unwrap();
    wait_until("the slot to come back", || arena.free_slots() == 1);
    assert!(queue.pop(Duration::ZERO).is_none(), "one completion for one request");
    go.send(()).unwrap();
    fetch_until_right(&tier, &arena, &store, KEY);
    assert_eq!(tier.reconnects(), 0);
}

#[test]
fn a_link_that_ends_frees_the_slots_of_requests_that_were_given_up() {
    let store = Arc::new(small_store(94));
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let peer = Scripted::attached(&store, move |conn| {
        conn.request()?;
        Ok(wait.lock().unwrap().recv_timeout(BOUND)?)
    });
    let options = TcpOptions { total: TOTAL, deadline: BOUND, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(2);
    let queue = CompletionQueue::new();
    submit(&tier, &arena, &[KEY, ExpertKey::new(1, 4)], &queue);
    for _ in 0..2 {
        assert_total(&next(&tier, &queue));
    }
    assert_eq!(arena.free_slots(), 0);
    go.send(()).unwrap();
    wait_until("the slots to come back", || arena.free_slots() == 2);
    assert!(queue.pop(Duration::ZERO).is_none(), "one completion for one request");
}

#[test]
fn polling_without_end_is_no_overflow() {
    let store = Arc::new(small_store(95));
    let peer = slow(&store);
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    let queue = CompletionQueue::new();
    submit(&tier, &arena, &[KEY], &queue);
    let completion = tier.poll(&queue, Duration::MAX).expect("a completion");
    assert_right(&store, KEY, &completion.outcome.unwrap());
}
