//! Devices, ports, GIDs and addresses that change while a peer runs, or are not there when it starts.
//! The peer is never restarted: the next client gets the rails that there are.
//!
//! Runs as root in the guest that `scripts/soft-roce` boots, whose devices and cables are named here.
#![cfg(metrale_rdma_verbs)]

#[path = "../verbs_faults/cables.rs"]
#[allow(dead_code, reason = "each test program uses its own part of this module")]
mod cables;
#[path = "../peer_support/mod.rs"]
mod peer_support;

mod addresses;
mod devices;
mod ports;

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::verbs::VerbsTier;

use cables::{connect, keys, one_rail};
use peer_support::process::Peer;
use peer_support::{assert_right, fetch, wait_for};

/// How soon a peer of these tests sees that a device came or went.
const SURVEY: [&str; 2] = ["--survey-ms", "100"];

/// A peer that serves `rails`.
fn peer(store: &TestStore, rails: &[&str]) -> Peer {
    Peer::start(&store.path(), &[rails, &SURVEY].concat())
}

/// Waits until the peer offers as many rails as `devices`, on these.
fn wait_rails(peer: &Peer, devices: &[&str]) {
    wait_for(&format!("rails on {devices:?}"), || {
        let rails = peer.status().rails;
        let all =
            devices.iter().all(|name| rails.iter().any(|it| it.starts_with(&format!("{name} "))));
        Some(()).filter(|()| all && rails.len() == devices.len())
    });
}

/// Every record over a rail of its own client's; says what the client's rail is.
fn read_all(store: &TestStore, peer: &Peer) -> String {
    let tier = connect(one_rail(peer.address()));
    read_all_by(store, &tier)
}

fn read_all_by(store: &TestStore, tier: &VerbsTier) -> String {
    let arena = small_arena(1);
    for key in keys(tier) {
        assert_right(store, key, &fetch(tier, &arena, key).expect("a rail that carries"));
    }
    tier.rails().into_iter().map(|rail| rail.device).collect::<Vec<_>>().join(" ")
}

/// The rows of a device's GID table that hold `address`, as sysfs writes it, with their interfaces.
fn rows(device: &str, address: &str) -> Vec<(u32, String)> {
    let port = format!("/sys/class/infiniband/{device}/ports/1");
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let row = |index: u32| {
        let is_it = read(format!("{port}/gids/{index}")) == address;
        is_it.then(|| (index, read(format!("{port}/gid_attrs/ndevs/{index}"))))
    };
    (0..16).filter_map(row).collect()
}
