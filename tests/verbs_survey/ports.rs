//! Ports that are down when a peer starts, come up later, or change.

use expert_tier::testing::TestStore;

use crate::cables::{Until, must, route};
use crate::peer_support::process::metrale;
use crate::peer_support::wait_until;
use crate::{peer, read_all, wait_rails};

/// Brings both ends of rail `rail` up again: what goes with a link that is down comes back, too.
fn plug(rail: u8) -> Until {
    let (net, near) = (rail + 1, format!("v{rail}"));
    let far = format!("{near}p");
    let mac = |end: u8| format!("02:00:00:00:0{rail}:0{end}");
    Until::then(&format!("ip link set {near} up"))
        .and_then(format!("ip link set {far} up"))
        .and_then(format!(
            "ip neigh replace 10.{net}.0.2 lladdr {} dev {near} nud permanent",
            mac(2)
        ))
        .and_then(format!(
            "ip neigh replace 10.{net}.0.1 lladdr {} dev {far} nud permanent",
            mac(1)
        ))
        .and_then(route(rail))
        .and_then(format!(
            "ip route replace 10.{net}.0.1 dev {far} table 1{rail}2 src 10.{net}.0.2"
        ))
}

/// Both ends of rail `rail` are down until the guard's end.
fn down(rail: u8) -> Until {
    let up = plug(rail);
    must(&format!("ip link set v{rail} down"));
    must(&format!("ip link set v{rail}p down"));
    for device in [format!("rxe{rail}"), format!("rxe{rail}p")] {
        let state = format!("/sys/class/infiniband/{device}/ports/1/state");
        wait_until("a port that is down", || {
            std::fs::read_to_string(&state).expect("a device").contains("DOWN")
        });
    }
    up
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn ports_that_come_up_after_the_peers_start_are_served() {
    let out = [down(0), down(1)];
    let store = TestStore::mixed(611);
    let peer = peer(&store, &[]);
    peer.wait_log("served over TCP alone until there are some");
    assert_eq!(peer.status().rails.len(), 0);
    drop(out);
    wait_rails(&peer, &["rxe0", "rxe0p", "rxe1", "rxe1p"]);
    read_all(&store, &peer);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_named_rail_that_is_down_at_the_start_is_served_when_it_is_up() {
    let out = down(1);
    let store = TestStore::mixed(612);
    let peer = peer(&store, &["--rail", "rxe0p", "--rail", "rxe1p"]);
    wait_rails(&peer, &["rxe0p"]);
    peer.wait_log("a rail is missing");
    assert_eq!(read_all(&store, &peer), "rxe0");
    drop(out);
    wait_rails(&peer, &["rxe0p", "rxe1p"]);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_requires_rails_does_not_start_without_one() {
    let _out = [down(0), down(1)];
    let store = TestStore::mixed(613);
    let run = ["peer", "run", "--listen", "127.0.0.1:0", "--store"];
    for (flags, variable) in [(&["--require-rails"][..], "0"), (&["--rail", "rxe0p"], "1")] {
        let mut peer = metrale();
        peer.args(run).arg(store.path()).args(flags).env("METRALE_REQUIRE_RAILS", variable);
        let output = peer.output().expect("metrale starts");
        let text = String::from_utf8_lossy(&output.stderr);
        println!("{text}");
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(output.stdout.is_empty() && text.contains("METRALE_REQUIRE_RAILS"), "{text}");
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn an_mtu_that_changes_is_in_the_next_offer() {
    let store = TestStore::mixed(614);
    let peer = peer(&store, &["--rail", "rxe0p"]);
    peer.wait_log("MTU 4096");
    let _back = Until::then("ip link set v0p mtu 4200");
    must("ip link set v0p mtu 1500");
    wait_until("an offer of the new MTU", || {
        peer.status();
        peer.log().contains("MTU 1024")
    });
    assert_eq!(read_all(&store, &peer), "rxe0");
}
