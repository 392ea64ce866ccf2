//! Peers that come back, come back as somebody else, or freeze; clients that die again and again.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};
use expert_tier::verbs::VerbsTier;
use rustix::process::Signal;

use crate::cables::{
    connect, few_at_once, keys, one_rail, options, peer, slow, take_all, wait_flying,
    wait_queue_pairs,
};
use crate::peer_support::process::{Peer, metrale};
use crate::peer_support::{assert_right, fetch, fetch_until_right, submit, wait_for, wait_until};

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_comes_back_with_new_keys_is_read_from_again() {
    let store = TestStore::mixed(41);
    let mut peer = peer(&store);
    let tier = connect(options(peer.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    for life in 1..=5 {
        fetch_until_right(&tier, &arena, &store, keys[life]);
        peer.kill();
        peer.restart(&store.path());
        fetch_until_right(&tier, &arena, &store, keys[2 * life]);
        assert!(tier.reconnects() >= life as u64);
    }
    assert_eq!(arena.free_slots(), 1);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_shuts_down_is_let_go_when_what_flies_has_landed() {
    let store = TestStore::mixed(46);
    let mut peer = peer(&store);
    let tier = connect(few_at_once(options(peer.address())));
    let (keys, queue) = (keys(&tier), CompletionQueue::new());
    let arena = small_arena(keys.len() as u32);
    let slow = slow();
    submit(&tier, &arena, &keys, &queue);
    let flying = wait_flying(&tier);
    let told = Instant::now();
    peer.signal(Signal::TERM);
    let right = take_all(&tier, &queue, keys.len(), &store);
    assert!(peer.wait().success());
    println!("{flying} READs flew; {right} right; the peer ended after {:?}", told.elapsed());
    // What flew came; the peer's own bound, which it would have kept the client for, is 10 s.
    assert!(flying > 0 && right > 0);
    assert!(told.elapsed() < Duration::from_secs(8));
    drop(slow);
    wait_until("all slots back", || arena.free_slots() == keys.len());
    peer.restart(&store.path());
    fetch_until_right(&tier, &arena, &store, keys[0]);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn another_store_on_the_same_port_is_refused_and_none_of_it_is_handed_out() {
    let (store, other) = (TestStore::mixed(42), TestStore::mixed(43));
    let mut peer = peer(&store);
    let mut options = one_rail(peer.address());
    options.deadline = Duration::from_millis(500);
    options.total = Duration::from_secs(3);
    let tier = connect(options.clone());
    let (keys, arena) = (keys(&tier), small_arena(1));
    fetch_until_right(&tier, &arena, &store, keys[0]);
    peer.kill();
    peer.restart(&other.path());
    let mut refused = 0;
    for &key in &keys {
        let failure = fetch(&tier, &arena, key).expect_err("another store's record");
        println!("{failure}");
        let FetchError::Unreachable { reason, .. } = &*failure.error else { panic!("{failure}") };
        refused += usize::from(reason.contains("the peer serves store"));
    }
    println!("{refused} of {} fetches named the other store", keys.len());
    assert!(refused + 2 >= keys.len(), "the reason is named once it is known");
    assert_eq!(peer.status().queue_pairs, 0, "no rails for another store's client");
    options.fingerprint = Some(tier.manifest().fingerprint());
    let refusal = VerbsTier::connect(options).err().expect("another store");
    assert!(refusal.to_string().contains("store"), "{refusal}");
    peer.kill();
    peer.restart(&store.path());
    fetch_until_right(&tier, &arena, &store, keys[1]);
}

/// A number of a process in `/proc/PID/status`, in kilobytes.
fn kilobytes(peer: &Peer, name: &str) -> u64 {
    let status = std::fs::read_to_string(PathBuf::from(format!("/proc/{}/status", peer.pid())));
    let status = status.expect("a process of ours");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("such a line");
    line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().expect("a number")
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn clients_that_die_with_reads_in_flight_leave_nothing_behind() {
    const CLIENTS: usize = 20;
    /// Memory that the peer may keep for itself: buffers that its allocator holds on to.
    const KEPT_KB: u64 = 4096;
    let _slow = slow();
    let store = TestStore::new(2, 8, &[700_001, 524_288], 44);
    let peer = peer(&store);
    // One to make what the peer keeps.
    drop(connect(options(peer.address())));
    wait_queue_pairs(&peer, 0);
    let idle = peer.idle_resources();
    let begin = (idle, kilobytes(&peer, "VmPin"), kilobytes(&peer, "VmRSS"));
    let mut overlaps = 0;
    for nth in 0..CLIENTS {
        let mut client = metrale()
            .args(["fetch", "--expert-backend", "rdma-verbs", "--all", "--connect-ms", "5000"])
            .args(["--peer", &peer.address()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("metrale starts");
        let ended = wait_for("a connected client", || {
            let ended = client.try_wait().expect("a child of ours").is_some();
            (ended || peer.status().queue_pairs > 0).then_some(ended)
        });
        // Somewhere in the second that its fetches take.
        let connected = Instant::now();
        let wait = Duration::from_millis(25 * nth as u64);
        wait_for("the moment to kill it", || (connected.elapsed() >= wait).then_some(()));
        let runs = client.try_wait().expect("a child of ours").is_none();
        client.kill().expect("a child of ours");
        client.wait().expect("a child of ours");
        overlaps += usize::from(!ended && runs);
        wait_queue_pairs(&peer, 0);
    }
    println!("{overlaps} of {CLIENTS} clients died while they fetched");
    assert!(overlaps > CLIENTS / 4);
    wait_until("an idle peer", || peer.resources() == idle);
    let end = (peer.idle_resources(), kilobytes(&peer, "VmPin"), kilobytes(&peer, "VmRSS"));
    println!("threads and descriptors, pinned kB, resident kB: {begin:?} before, {end:?} after");
    assert_eq!((begin.0, begin.1), (end.0, end.1));
    assert!(end.2 <= begin.2 + KEPT_KB, "{} kB more", end.2 - begin.2);
    let tier = connect(options(peer.address()));
    fetch_until_right(&tier, &small_arena(1), &store, keys(&tier)[0]);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_frozen_peer_is_read_from_and_not_waited_for() {
    let store = TestStore::mixed(45);
    let peer = peer(&store);
    let tier = connect(options(peer.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    peer.freeze();
    for &key in &keys {
        assert_right(&store, key, &fetch(&tier, &arena, key).expect("nobody is asked"));
    }
    let started = Instant::now();
    let mut late = options(peer.address());
    late.connect = Duration::from_millis(500);
    let error = VerbsTier::connect(late).err().expect("nobody answers");
    println!("a new client gave up after {:?}: {error}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(2));
    assert!(error.to_string().contains("METRALE_EXPERT_CONNECT_MS"), "{error}");
    peer.signal(Signal::CONT);
    drop(connect(options(peer.address())));
    assert_right(&store, keys[3], &fetch(&tier, &arena, keys[3]).expect("the same rails"));
    assert_eq!(tier.reconnects(), 0);
}
