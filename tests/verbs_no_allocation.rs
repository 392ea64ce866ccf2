//! No fetch over RDMA allocates, once the first ones have made room; the peer is a process of its
//! own, so that only the client is counted.
//!
//! One test, so that no other allocates while it counts.
#![cfg(metrale_rdma_verbs)]

#[path = "../expert-tier/tests/counting/mod.rs"]
mod counting;
mod peer_support;

use std::time::Duration;

use counting::assert_none_allocates;
use expert_tier::testing::TestStore;
use expert_tier::verbs::{VerbsOptions, VerbsTier};

use peer_support::process::Peer;

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn no_fetch_over_rdma_allocates() {
    // Records of one part and of two: four thousand of them in a guest that moves 30 MB/s.
    let store = TestStore::new(4, 4, &[5_000, 5_000, 5_000, 300_001], 95);
    let peer = Peer::start(&store.path(), &["--rail", "rxe0p", "--rail", "rxe1p"]);
    for check_threads in [0, 1] {
        // The guest may have to wait for its processors.
        let connect = Duration::from_secs(10);
        let deadline = Duration::from_secs(20);
        let options =
            VerbsOptions { connect, deadline, check_threads, ..VerbsOptions::new(peer.address()) };
        let tier = VerbsTier::connect(options).expect("a peer with rails");
        assert_none_allocates("rdma-verbs", &tier);
    }
}
