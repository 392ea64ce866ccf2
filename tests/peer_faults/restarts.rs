//! Peers that die, freeze, drain, come back, or come back as somebody else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};
use expert_tier::wire::FrameType;
use rustix::process::Signal;

use crate::peer_support::process::Peer;
use crate::peer_support::raw::{Raw, request, soon_after};
use crate::peer_support::{
    DEADLINE, assert_right, fetch, fetch_batch, fetch_until_right, keys, next, options,
    small_store, submit, wait_until,
};

const KEY: ExpertKey = ExpertKey::new(1, 3);

#[test]
fn a_peer_killed_in_the_middle_and_restarted_costs_nothing_that_is_not_said() {
    let store = TestStore::mixed(71);
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(TcpOptions { streams: 2, ..options(peer.address()) }).unwrap();
    let arena = small_arena(24);
    let keys = keys(tier.manifest());
    for round in 0..4 {
        let queue = CompletionQueue::new();
        submit(&tier, &arena, &keys, &queue);
        let first = next(&tier, &queue);
        peer.kill();
        if round % 2 == 0 {
            peer.restart(&store.path());
        }
        let rest = (1..keys.len()).map(|_| next(&tier, &queue));
        for completion in [first].into_iter().chain(rest) {
            match completion.outcome {
                Ok(fetched) => assert_right(&store, completion.key, &fetched),
                Err(failure) => assert!(failure.error.is_transient(), "{failure}"),
            }
        }
        assert_eq!(arena.free_slots(), 24);
        if round % 2 == 1 {
            assert!(!tier.healthy());
            peer.restart(&store.path());
        }
        fetch_until_right(&tier, &arena, &store, KEY);
        wait_until("a healthy backend", || tier.healthy());
    }
    assert!(tier.reconnects() >= 4);
    for completion in fetch_batch(&tier, &arena, &keys) {
        assert_right(&store, completion.key, &completion.outcome.expect("a peer that is back"));
    }
}

#[test]
fn a_peer_that_is_gone_ends_requests_within_the_deadline() {
    let store = small_store(72);
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    peer.kill();
    wait_until("the loss to be noticed", || !tier.healthy());
    let start = Instant::now();
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        let failure = completion.outcome.expect_err("no peer");
        let FetchError::Unreachable { .. } = *failure.error else { panic!("{failure}") };
        let said = failure.to_string();
        assert!(said.contains(&peer.address()) && said.contains("no connection for"), "{said}");
        assert!(said.contains("is expert-peer running there?"), "{said}");
    }
    assert!(start.elapsed() < DEADLINE * 2, "{:?}", start.elapsed());
    assert_eq!(arena.free_slots(), 16);
}

#[test]
fn a_frozen_peer_costs_its_deadline_and_is_used_again_when_it_thaws() {
    let store = small_store(73);
    let peer = Peer::start(&store.path(), &[]);
    let connect = Duration::from_millis(300);
    let tier = TcpTier::connect(TcpOptions { connect, ..options(peer.address()) }).unwrap();
    let arena = small_arena(16);
    fetch_until_right(&tier, &arena, &store, KEY);
    peer.freeze();
    let start = Instant::now();
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        let failure = completion.outcome.expect_err("a peer that does not run");
        assert!(failure.error.is_transient(), "{failure}");
    }
    assert!(start.elapsed() < DEADLINE * 3, "{:?}", start.elapsed());
    assert!(fetch(&tier, &arena, KEY).is_err());
    assert!(!tier.healthy());
    peer.signal(Signal::CONT);
    fetch_until_right(&tier, &arena, &store, KEY);
    wait_until("a healthy backend", || tier.healthy());
    assert_eq!(arena.free_slots(), 16);
}

#[test]
fn a_peer_back_with_another_store_gives_no_weights_until_the_right_one_is_back() {
    let (store, other) = (small_store(74), small_store(75));
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
    peer.kill();
    peer.restart(&other.path());
    wait_until("an error that names the other store", || {
        let failure = fetch(&tier, &arena, KEY).expect_err("another store");
        assert!(failure.error.is_transient(), "{failure}");
        failure.to_string().contains("another model or other weights")
    });
    assert!(!tier.healthy());
    let status = peer.status();
    assert_eq!((status.served, status.bytes), (0, 0), "weights moved");
    peer.kill();
    peer.restart(&store.path());
    fetch_until_right(&tier, &arena, &store, KEY);
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn a_draining_peer_answers_everything_that_it_was_asked() {
    const REQUESTS: u64 = 100;
    let store = TestStore::mixed(76);
    let mut peer = Peer::start(&store.path(), &[]);
    let mut raw = Raw::attached(&peer.address(), 1, store.open().manifest());
    // Many times what the sockets hold, so that most of it is unanswered at the signal.
    let all: Vec<u8> = (0..REQUESTS).flat_map(|id| request(id, KEY)).collect();
    raw.send(&all);
    peer.signal(Signal::TERM);
    peer.wait_log("draining");
    let mut drains = 0;
    let mut answered = 0;
    while answered < REQUESTS || drains == 0 {
        let (header, body) = raw.read().expect("an answer to every request");
        match header.frame {
            FrameType::Drain => drains += 1,
            FrameType::Record => {
                assert_eq!(header.request_id, answered);
                assert!(body.ends_with(&store.payload(KEY)));
                answered += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(drains, 1);
    raw.finish();
    raw.expect_end();
    let status = peer.wait();
    assert_eq!(status.code(), Some(0), "{}", peer.log());
    assert!(peer.log().contains(&format!("served={REQUESTS}")), "{}", peer.log());
}

#[test]
fn a_client_of_a_draining_peer_loses_nothing_and_lets_it_go() {
    let store = TestStore::mixed(77);
    let mut peer = Peer::start(&store.path(), &[]);
    let patient = Duration::from_secs(10);
    let options = TcpOptions { depth: 64, deadline: patient, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(24);
    let queue = CompletionQueue::new();
    let keys = keys(tier.manifest());
    submit(&tier, &arena, &keys, &queue);
    peer.signal(Signal::TERM);
    for _ in &keys {
        let completion = next(&tier, &queue);
        assert_right(&store, completion.key, &completion.outcome.expect("asked before the drain"));
    }
    assert_eq!(peer.wait().code(), Some(0));
    wait_until("the loss to be noticed", || !tier.healthy());
    peer.restart(&store.path());
    fetch_until_right(&tier, &arena, &store, KEY);
}

#[test]
fn a_drain_is_bounded_and_a_second_signal_ends_it_at_once() {
    let store = small_store(78);
    let manifest = Arc::clone(store.open().manifest());
    let mut peer = Peer::start(&store.path(), &["--drain-ms", "300"]);
    // Attached, idle, and deaf to Drain.
    let stubborn = Raw::attached(&peer.address(), 1, &manifest);
    let start = Instant::now();
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait().code(), Some(0));
    assert!(start.elapsed() < soon_after(300), "{:?}", start.elapsed());
    assert!(peer.log().contains("cutting them"), "{}", peer.log());
    drop(stubborn);

    let mut peer = Peer::start(&store.path(), &["--drain-ms", "600000"]);
    let stubborn = Raw::attached(&peer.address(), 1, &manifest);
    peer.signal(Signal::TERM);
    peer.wait_log("draining");
    assert!(peer.runs());
    let start = Instant::now();
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait().code(), Some(1));
    assert!(start.elapsed() < soon_after(0), "{:?}", start.elapsed());
    drop(stubborn);
}

#[test]
fn an_idle_peer_ends_at_once_when_told() {
    let store = small_store(78);
    for signal in [Signal::TERM, Signal::INT] {
        let mut peer = Peer::start(&store.path(), &[]);
        let tier = TcpTier::connect(options(peer.address())).unwrap();
        let start = Instant::now();
        peer.signal(signal);
        assert_eq!(peer.wait().code(), Some(0));
        assert!(start.elapsed() < soon_after(500), "{:?}", start.elapsed());
        drop(tier);
    }
}
