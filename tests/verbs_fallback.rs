//! From RDMA to TCP and back, in the guest that `scripts/soft-roce` boots, whose devices are named
//! here.
#![cfg(metrale_rdma_verbs)]

#[path = "verbs_faults/cables.rs"]
#[allow(dead_code, reason = "each test program uses its own part of this module")]
mod cables;
mod peer_support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::arena::ExpertArena;
use expert_tier::fallback::{FallbackOptions, FallbackTier, WayPlan};
use expert_tier::key::ExpertKey;
use expert_tier::tcp::TcpTier;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{ExpertTier, Source};
use expert_tier::verbs::{VerbsOptions, VerbsTier};

use cables::{cut, unplug};
use peer_support::log::Logged;
use peer_support::process::{Peer, metrale};
use peer_support::{fetch_all_right, keys, options};

/// Longest wait for anything that must happen: the guest is slow.
const BOUND: Duration = Duration::from_secs(120);

/// Fetches `keys` as a batch, all of which must come and be right; counts how many came which way.
fn fetch_all(
    tier: &FallbackTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
    store: &TestStore,
) -> (usize, usize) {
    let sources = fetch_all_right(tier, arena, keys, store, BOUND);
    let first = sources.iter().filter(|source| **source == Source::Read).count();
    assert!(sources.iter().all(|s| matches!(s, Source::Read | Source::Tcp)), "{sources:?}");
    (first, sources.len() - first)
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn rails_that_are_cut_cost_no_fetch_and_are_used_again_when_they_are_whole() {
    let logged = Logged::start();
    let store = TestStore::mixed(211);
    let peer = Peer::start(&store.path(), &["--rail", "rxe0p", "--rail", "rxe1p"]);
    let connect = Duration::from_secs(10);
    let verbs = VerbsOptions { connect, ..VerbsOptions::new(peer.address()) };
    let verbs = VerbsTier::connect(verbs).expect("a peer with rails");
    let tcp =
        expert_tier::tcp::TcpOptions { connect, deadline: connect, ..options(peer.address()) };
    let tcp = TcpTier::connect(tcp).expect("a peer that listens");
    let ways = vec![WayPlan::opened(Arc::new(verbs)), WayPlan::opened(Arc::new(tcp))];
    let tier = FallbackTier::open(ways, FallbackOptions::default()).expect("two open ways");
    let (arena, keys) = (small_arena(24), keys(tier.manifest()));
    tier.use_arena(&arena).expect("it takes the arena");
    let lines = |text: &str| logged.lines().iter().filter(|line| line.contains(text)).count();
    assert_eq!(fetch_all(&tier, &arena, &keys, &store), (keys.len(), 0));
    let cut = cut(&["10.1.0.2", "10.2.0.2"]);
    let start = Instant::now();
    let mut over_tcp = 0;
    // For long enough that the rails are tried again while they are cut.
    while over_tcp < 5 * keys.len() || start.elapsed() < Duration::from_secs(25) {
        over_tcp += fetch_all(&tier, &arena, &keys, &store).1;
        assert!(start.elapsed() < BOUND, "{over_tcp} records by TCP: {:?}", logged.lines());
    }
    println!("{over_tcp} records by TCP after {:?}", start.elapsed());
    assert_eq!(lines("requests go another way"), 1, "{:?}", logged.lines());
    drop(cut);
    let start = Instant::now();
    while fetch_all(&tier, &arena, &keys, &store) != (keys.len(), 0) {
        assert!(start.elapsed() < BOUND, "the rails are not used again: {:?}", logged.lines());
    }
    println!("by the rails again after {:?}", start.elapsed());
    assert_eq!(lines("requests go another way"), 1, "{:?}", logged.lines());
    assert_eq!(lines("a way works again"), 1, "{:?}", logged.lines());
    assert_eq!(arena.free_slots(), 24);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn rails_whose_ports_are_down_at_the_start_are_used_when_they_are_up() {
    let store = TestStore::mixed(212);
    let peer = Peer::start(&store.path(), &["--rail", "rxe0p", "--rail", "rxe1p"]);
    let out = [unplug(0), unplug(1)];
    let mut command = metrale();
    command.args(["bench", "fetch", "--json", "--seconds", "40", "--batch", "4"]);
    command.args(["--expert-backend", "rdma-verbs", "--peer", &peer.address()]);
    command.args(["--fallback", "tcp", "--connect-ms", "10000", "--deadline-ms", "10000"]);
    command.env("METRALE_LOG", "info").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("metrale");
    let said = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut said = said.lines().map(|line| line.expect("messages are UTF-8"));
    let mut find = |text: &str| said.find(|line| line.contains(text));
    let line = find("a way to the experts is not there").expect("the ports are down");
    assert!(line.contains("to=\"rdma\"") && line.contains("port is down"), "{line}");
    drop(out);
    // Ends with the process at the latest.
    let line = find("a way works again").expect("the rails are used");
    assert!(line.contains("backend=\"rdma-verbs\""), "{line}");
    said.for_each(drop);
    let output = child.wait_with_output().expect("a child of ours");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["errors"], 0, "{report}");
}
