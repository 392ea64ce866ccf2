//! No fetch allocates, at neither end, once the first ones have made room: over TCP, from a peer
//! in this process.
//!
//! One test, so that no other allocates while it counts.

#[path = "../expert-tier/tests/counting/mod.rs"]
mod counting;

use std::net::SocketAddr;
use std::sync::Arc;

use counting::assert_none_allocates;
use expert_peer::{PeerOptions, Server, Shutdown};
use expert_tier::fallback::{FallbackOptions, FallbackTier, WayPlan};
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::TestStore;

#[test]
fn no_fetch_over_tcp_allocates_at_either_end() {
    let store = TestStore::mixed(94);
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let options = PeerOptions { listen, ..PeerOptions::new(store.path()) };
    let stop = Shutdown::new();
    let server = Server::bind(options, stop.clone()).expect("a free port");
    let address = server.address();
    let serving = std::thread::spawn(move || server.run());
    for check_threads in [0, 1] {
        let options = TcpOptions { check_threads, ..TcpOptions::new(address.to_string()) };
        let tier = TcpTier::connect(options).expect("a peer that listens");
        assert_none_allocates("rdma", &tier);
    }
    let tcp = TcpTier::connect(TcpOptions::new(address.to_string())).expect("a peer that listens");
    let posix = PosixTier::open(&store.path(), PosixOptions::default()).expect("the same store");
    let ways = vec![WayPlan::opened(Arc::new(tcp)), WayPlan::opened(Arc::new(posix))];
    let tier = FallbackTier::open(ways, FallbackOptions::default()).expect("two open ways");
    assert_none_allocates("rdma with another way", &tier);
    drop(tier);
    stop.begin();
    serving.join().expect("no panic").expect("a clean end");
}
