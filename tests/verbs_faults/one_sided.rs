//! What a READ costs: nothing at the peer, and many at once from one thread at the client.

use std::time::{Duration, Instant};

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::CompletionQueue;

use crate::cables::{connect, keys, one_rail, options, peer, shape, take_all};
use crate::peer_support::process::Peer;
use crate::peer_support::{assert_right, fetch, submit};

/// Context switches that a peer may have more in one interval than in another as long, for
/// reasons of its own: ticks that fall into one and not the other.
const ALLOWANCE: u64 = 20;

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn one_thread_has_sixteen_reads_in_flight_and_more() {
    // So much slower than the client that what it asks for piles up.
    let _slow = ["v0p", "v1p"].map(|end| shape(end, "tbf rate 100mbit burst 64kb limit 16mb"));
    let store = TestStore::new(1, 8, &[700_001], 31);
    let peer = peer(&store);
    let tier = connect(options(peer.address()));
    let (keys, queue) = (keys(&tier), CompletionQueue::new());
    let arena = small_arena(keys.len() as u32);
    submit(&tier, &arena, &keys, &queue);
    assert_eq!(take_all(&tier, &queue, keys.len(), &store), keys.len());
    println!("{} READs in flight at once", tier.most_parts_in_flight());
    assert!(tier.most_parts_in_flight() >= 16);
}

/// Context switches of every thread of the peer so far.
fn switches(peer: &Peer) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", peer.pid())).expect("a process of ours");
    let of_task = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        let counts = lines.filter_map(|line| line.rsplit('\t').next()?.parse::<u64>().ok());
        counts.sum::<u64>()
    };
    tasks.flatten().map(of_task).sum()
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn the_peer_does_nothing_for_a_read() {
    let store = TestStore::new(2, 8, &[5_000, 65_536], 32);
    let peer = peer(&store);
    let tier = connect(one_rail(peer.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    assert_right(&store, keys[0], &fetch(&tier, &arena, keys[0]).expect("a record"));
    let before = peer.status();
    let (started, switched) = (Instant::now(), switches(&peer));
    for n in 0..1000 {
        let key = keys[n % keys.len()];
        let fetched = fetch(&tier, &arena, key).expect("a record");
        assert_eq!(fetched.residency.key(), key);
    }
    let (busy, took) = (switches(&peer) - switched, started.elapsed());
    let after = peer.status();
    // As long again with nobody asking for anything.
    let switched = switches(&peer);
    std::thread::sleep(took);
    let idle = switches(&peer) - switched;
    println!("1000 READs in {took:?}: {busy} context switches at the peer, {idle} while idle");
    assert_eq!(before.verbs_calls, after.verbs_calls);
    assert_eq!(before.served, after.served);
    assert!(busy <= idle + ALLOWANCE, "{busy} switches against {idle} while idle");
    assert!(took < Duration::from_secs(60));
}
