//! Peers that are slow, silent or endless: every wait ends with its deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::small_arena;
use expert_tier::tier::{Completion, ExpertTier};
use expert_tier::wire::FrameType;
use expert_tier::wire::frame::Status;
use expert_tier::wire::handshake::encode_frame;

use crate::peer_support::scripted::{Conn, Scripted, answer, record, status_header};
use crate::peer_support::{
    DEADLINE, fetch, fetch_batch, fetch_until_right, keys, options, small_store, wait_until,
};

const KEY: ExpertKey = ExpertKey::new(1, 3);

/// What a test allows beyond the deadline on a machine that has other things to do.
const SLACK: Duration = Duration::from_millis(350);

fn assert_deadlines(completions: Vec<Completion>) {
    for completion in completions {
        let failure = completion.outcome.expect_err("a peer that stalls");
        let FetchError::Deadline { key, waited, .. } = *failure.error else { panic!("{failure}") };
        assert_eq!(key, completion.key);
        assert!(waited >= DEADLINE, "{failure}");
        assert!(failure.to_string().contains("METRALE_EXPERT_DEADLINE_MS"), "{failure}");
        assert!(failure.error.is_transient());
    }
}

#[test]
fn a_stalled_peer_costs_one_deadline_for_the_whole_pipeline() {
    let store = Arc::new(small_store(21));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        if conn.nth > 0 {
            return conn.serve(&theirs);
        }
        let (id, key) = conn.request()?;
        let whole = answer(id, &record(&theirs, key));
        conn.send(&whole[..whole.len() / 2])?;
        conn.ignore()
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    let start = Instant::now();
    let completions = fetch_batch(&tier, &arena, &keys(tier.manifest()));
    let took = start.elapsed();
    assert_deadlines(completions);
    assert!(took >= DEADLINE && took < DEADLINE + SLACK, "{took:?}");
    assert_eq!(arena.free_slots(), 16);
    wait_until("the reconnection", || tier.healthy());
    fetch_until_right(&tier, &arena, &store, KEY);
}

#[test]
fn a_stalled_peer_costs_one_deadline_for_what_waits_behind_the_pipeline_too() {
    let store = small_store(22);
    let peer = Scripted::attached(&store, Conn::ignore);
    for streams in [1, 2] {
        let options = TcpOptions { streams, depth: 2, ..options(peer.address()) };
        let tier = TcpTier::connect(options).unwrap();
        let arena = small_arena(16);
        let start = Instant::now();
        let completions = fetch_batch(&tier, &arena, &keys(tier.manifest()));
        let took = start.elapsed();
        assert_deadlines(completions);
        assert!(took >= DEADLINE && took < DEADLINE + SLACK, "{streams} streams: {took:?}");
        assert_eq!(arena.free_slots(), 16);
    }
}

#[test]
fn a_failed_wait_is_seen_in_the_backends_health() {
    let store = small_store(22);
    // The first connection attaches and stalls; later ones are not even greeted.
    let manifest = Arc::clone(store.open().manifest());
    let peer = Scripted::start(move |conn| {
        if conn.nth == 0 {
            conn.attach(&manifest)?;
        }
        conn.ignore()
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    assert!(tier.healthy(), "a connected backend is healthy");
    let arena = small_arena(1);
    assert!(fetch(&tier, &arena, KEY).is_err());
    assert!(!tier.healthy(), "after a deadline, before a reconnection");
    // Gone for longer than the deadline: a request is not made to wait for it once more.
    let start = Instant::now();
    wait_until("a failure at once", || {
        let start = Instant::now();
        let failure = fetch(&tier, &arena, KEY).expect_err("no peer");
        let FetchError::Unreachable { .. } = *failure.error else { panic!("{failure}") };
        let said = failure.to_string();
        assert!(said.contains("no connection for"), "{said}");
        start.elapsed() < DEADLINE / 2
    });
    assert!(start.elapsed() < DEADLINE * 3);
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn a_trickle_of_record_bytes_does_not_stretch_the_deadline() {
    trickle(|_, whole| whole);
}

#[test]
fn a_trickle_of_an_errors_text_does_not_stretch_the_deadline() {
    trickle(|id, _| {
        let mut bytes = status_header(id, Status::Unreadable, 1024).to_vec();
        bytes.extend([b'x'; 1024]);
        bytes
    });
}

#[test]
fn a_trickle_of_empty_frames_does_not_stretch_the_deadline() {
    trickle(|_, _| encode_frame(FrameType::Drain, Status::Ok, &[]).repeat(1000));
}

/// Fetches from a peer that sends `what` of its answer, a byte every few milliseconds.
fn trickle(what: impl Fn(u64, Vec<u8>) -> Vec<u8> + Send + Sync + 'static) {
    let store = Arc::new(small_store(23));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        let (id, key) = conn.request()?;
        for byte in what(id, answer(id, &record(&theirs, key))) {
            conn.send(&[byte])?;
            // The pace of the trickle; nothing waits for it.
            std::thread::sleep(Duration::from_millis(4));
        }
        conn.ignore()
    });
    let tier = TcpTier::connect(TcpOptions { attempts: 1, ..options(peer.address()) }).unwrap();
    let arena = small_arena(1);
    let start = Instant::now();
    let failure = fetch(&tier, &arena, KEY).expect_err("a peer that trickles");
    let took = start.elapsed();
    assert!(took < DEADLINE + SLACK, "{took:?}: {failure}");
    assert!(failure.slot.is_some());
    assert!(failure.error.is_transient(), "{failure}");
}

#[test]
fn an_error_without_its_text_ends_with_the_deadline() {
    let store = Arc::new(small_store(24));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        if conn.nth > 0 {
            return conn.serve(&theirs);
        }
        let (id, _) = conn.request()?;
        conn.send(&status_header(id, Status::Unreadable, 100))?;
        conn.send(b"half of it")?;
        conn.ignore()
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    let start = Instant::now();
    let completions = fetch_batch(&tier, &arena, &[KEY]);
    let took = start.elapsed();
    assert_deadlines(completions);
    assert!(took < DEADLINE + SLACK, "{took:?}");
    assert_eq!(arena.free_slots(), 1);
    fetch_until_right(&tier, &arena, &store, KEY);
}

#[test]
fn a_peer_that_says_it_drains_for_ever_is_left() {
    let store = Arc::new(small_store(24));
    let peer = Scripted::attached(&store, |conn| {
        conn.request()?;
        let drains = encode_frame(FrameType::Drain, Status::Ok, &[]).repeat(1000);
        loop {
            conn.send(&drains)?;
        }
    });
    let tier = TcpTier::connect(TcpOptions { attempts: 1, ..options(peer.address()) }).unwrap();
    let arena = small_arena(1);
    let start = Instant::now();
    let failure = fetch(&tier, &arena, KEY).expect_err("a peer that only drains");
    assert!(failure.error.is_transient(), "{failure}");
    assert!(start.elapsed() < DEADLINE + SLACK, "{:?}", start.elapsed());
}

#[test]
fn asking_for_the_status_of_an_endless_peer_is_bounded() {
    let store = Arc::new(small_store(24));
    let manifest = Arc::clone(store.open().manifest());
    let peer = Scripted::start(move |conn| {
        conn.welcome(expert_tier::wire::message::Welcome {
            fingerprint: manifest.fingerprint(),
            manifest_bytes: 1,
        })?;
        loop {
            conn.send(&encode_frame(FrameType::Drain, Status::Ok, &[]))?;
        }
    });
    let connect = Duration::from_millis(300);
    let dialler = expert_tier::tcp::Dialler::new(peer.address(), None, connect);
    let start = Instant::now();
    let error = dialler.status().expect_err("no status comes").to_string();
    assert!(error.contains(&peer.address()), "{error}");
    assert!(start.elapsed() < connect * 5, "{:?}", start.elapsed());
}
