//! Ports that differ, have no address, are down, or are not there.

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::verbs::VerbsTier;
use railset::pairing::DualRail;

use crate::cables::{Until, connect, keys, must, one_rail, options, peer, route, unplug};
use crate::peer_support::process::metrale;
use crate::peer_support::{assert_right, fetch};

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn ports_of_unequal_mtu_agree_on_the_smaller() {
    let mtu = std::fs::read_to_string("/sys/class/net/v0p/mtu").expect("the guest's cable");
    for small in ["v0p", "v0"] {
        must(&format!("ip link set {small} mtu 1500"));
        let _back = Until::then(&format!("ip link set {small} mtu {}", mtu.trim()));
        let store = TestStore::mixed(81);
        let peer = peer(&store);
        let tier = connect(one_rail(peer.address()));
        let arena = small_arena(1);
        for key in keys(&tier) {
            assert_right(&store, key, &fetch(&tier, &arena, key).expect("a smaller MTU"));
        }
    }
}

/// What a client says that has rails refused.
fn refusal(change: impl FnOnce(&mut expert_tier::verbs::VerbsOptions)) -> String {
    let store = TestStore::new(1, 1, &[5_000], 82);
    let peer = peer(&store);
    let mut options = options(peer.address());
    change(&mut options);
    let text = VerbsTier::connect(options).err().expect("no such rail").to_string();
    println!("{text}");
    text
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    for rail in [0, 1] {
        let text = refusal(|options| options.wishes.rails[rail].device = Some("mlx5_7".into()));
        assert!(text.contains("mlx5_7") && text.contains("rxe0"), "{text}");
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_device_whose_port_is_down_is_named() {
    let _out = unplug(0);
    // A pulled cable takes the other end down, too.
    let text = std::process::Command::new("ip").args(["-br", "link"]).output().expect("ip");
    println!("{}", String::from_utf8_lossy(&text.stdout));
    let store = TestStore::new(1, 1, &[5_000], 83);
    let peer = crate::peer_support::process::Peer::start(&store.path(), &["--rail", "rxe1p"]);
    let mut options = options(peer.address());
    options.wishes.rails[0].device = Some("rxe0".into());
    options.wishes.dual = DualRail::One;
    let text = VerbsTier::connect(options).err().expect("no such rail").to_string();
    println!("{text}");
    assert!(text.contains("rxe0"), "{text}");
    let down = metrale()
        .args(["peer", "run", "--listen", "127.0.0.1:0", "--rail", "rxe0p", "--require-rails"])
        .arg("--store")
        .arg(store.path())
        .output()
        .expect("metrale starts");
    let text = String::from_utf8_lossy(&down.stderr);
    println!("{text}");
    assert_eq!(down.status.code(), Some(1), "{text}");
    assert!(text.contains("rxe0p") && down.stdout.is_empty(), "{text}");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_port_with_nothing_but_a_link_local_address_is_named() {
    must("ip addr del 10.1.0.1/24 dev v0");
    let _back = Until::then("ip addr add 10.1.0.1/24 dev v0").and_then(route(0));
    let text = refusal(|options| {
        options.wishes.rails[0].device = Some("rxe0".into());
        options.wishes.dual = DualRail::One;
    });
    assert!(text.contains("rxe0"), "{text}");
}

/// Both ends are on this host: without its route a rail seems to lead from the peer's port to itself.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_lost_route_leads_no_rail_from_the_peers_own_port() {
    let store = TestStore::new(1, 1, &[5_000], 84);
    let peer = peer(&store);
    must("ip route del 10.1.0.2 dev v0 table 101");
    let _back = Until::then(&route(0));
    let mut options = options(peer.address());
    options.deadline = std::time::Duration::from_millis(300);
    match VerbsTier::connect(options) {
        Ok(tier) => {
            let rails: Vec<_> = tier.rails().into_iter().map(|rail| rail.device).collect();
            println!("{rails:?}");
            assert!(!rails.iter().any(|device| device.ends_with('p')), "{rails:?}");
        }
        Err(error) => {
            println!("{error}");
            assert!(error.to_string().contains("rxe"), "{error}");
        }
    }
}
