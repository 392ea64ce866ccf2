//! No fetch allocates, once the first ones have made room: over TCP, from a peer process.
//!
//! One test, so that no other allocates while it counts.

#[path = "../expert-tier/tests/counting/mod.rs"]
mod counting;
mod peer_support;

use counting::assert_none_allocates;
use expert_tier::tcp::{TcpOptions, TcpTier};
use peer_support::process::Peer;
use peer_support::small_store;

#[test]
fn no_fetch_over_tcp_allocates() {
    let store = small_store(94);
    let peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(TcpOptions::new(peer.address())).expect("a peer that listens");
    assert_none_allocates("rdma", &tier);
}
