//! From RDMA to TCP and back, in the guest that `scripts/soft-roce` boots, whose devices are named
//! here.
#![cfg(metrale_rdma_verbs)]

mod peer_support;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::arena::ExpertArena;
use expert_tier::fallback::{FallbackOptions, FallbackTier, WayPlan};
use expert_tier::key::ExpertKey;
use expert_tier::tcp::TcpTier;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier, FetchRequest, Source};
use expert_tier::verbs::{VerbsOptions, VerbsTier};

use peer_support::log::Logged;
use peer_support::process::Peer;
use peer_support::{assert_right, keys, options, slot};

/// Longest wait for anything that must happen: the guest is slow.
const BOUND: Duration = Duration::from_secs(120);

fn nft(what: &str) {
    let status = Command::new("nft").arg(what).status().expect("the guest has nft");
    assert!(status.success(), "nft {what:?} failed");
}

/// Drops every packet of RoCEv2 on both rails until its end; the control connection goes over
/// loopback's TCP.
struct Cut;

impl Cut {
    fn both_rails() -> Self {
        let rules = "table ip cut {\nchain c {\ntype filter hook input priority 0;\n\
                     udp dport 4791 drop\n}\n}\n";
        nft(rules);
        Self
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        nft("delete table ip cut");
    }
}

/// Fetches `keys` as a batch, all of which must come and be right; counts those READ and by TCP.
fn fetch_all(
    tier: &FallbackTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
    store: &TestStore,
) -> (usize, usize) {
    let queue = CompletionQueue::new();
    let mut batch: Vec<_> = keys.iter().map(|&key| FetchRequest::new(key, slot(arena))).collect();
    tier.submit(&mut batch, &queue);
    let (mut read, mut tcp) = (0, 0);
    for _ in keys {
        let completion = tier.poll(&queue, BOUND).expect("a completion in time");
        let fetched = completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
        assert_right(store, completion.key, &fetched);
        match fetched.source {
            Source::Read => read += 1,
            Source::Tcp => tcp += 1,
            other => panic!("{other:?}"),
        }
    }
    (read, tcp)
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
    tier.use_arena(&arena);
    let lines = |text: &str| logged.lines().iter().filter(|line| line.contains(text)).count();
    assert_eq!(fetch_all(&tier, &arena, &keys, &store), (keys.len(), 0));
    let cut = Cut::both_rails();
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
