//! Addresses that move, that are there twice, and interfaces that rails are named by.

use std::time::Duration;

use expert_tier::testing::TestStore;
use railset::pairing::DualRail;

use crate::cables::{Until, connect, must, one_rail, options, route};
use crate::peer_support::wait_until;
use crate::{peer, read_all, read_all_by, rows, wait_rails};

/// 10.1.0.1 and 10.1.0.2 as GIDs in sysfs.
const NEAR: &str = "0000:0000:0000:0000:0000:ffff:0a01:0001";
const FAR: &str = "0000:0000:0000:0000:0000:ffff:0a01:0002";
/// The route of packets from the far end of rail 0.
const FAR_ROUTE: &str = "ip route replace 10.1.0.1 dev v0p src 10.1.0.2 table 102";

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_gid_that_moves_to_another_row_is_offered_from_there() {
    let store = TestStore::mixed(601);
    let peer = peer(&store, &["--rail", "rxe0p"]);
    assert_eq!(read_all(&store, &peer), "rxe0");
    let before = rows("rxe0p", FAR);
    let _back = Until::then("ip addr flush dev v0p scope global")
        .and_then("ip addr add 10.1.0.2/24 dev v0p".into())
        .and_then(FAR_ROUTE.into());
    must("ip addr flush dev v0p scope global");
    must("ip addr add 10.1.0.99/24 dev v0p");
    must("ip addr add 10.1.0.2/24 dev v0p");
    must(FAR_ROUTE);
    wait_until("the GID in another row", || {
        let now = rows("rxe0p", FAR);
        !now.is_empty() && now != before
    });
    // By name, and by the choice among two addresses: a rail on either carries.
    assert_eq!(read_all(&store, &peer), "rxe0");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn an_address_on_two_interfaces_leaves_through_that_of_the_route() {
    let store = TestStore::mixed(602);
    let peer = peer(&store, &["--rail", "rxe0p"]);
    let _back = Until::then("ip link del v0.100")
        .and_then("ip addr flush dev v0 scope global".into())
        .and_then("ip addr add 10.1.0.1/24 dev v0".into())
        .and_then(route(0));
    must("ip addr flush dev v0 scope global");
    must("ip link add link v0 name v0.100 type vlan id 100");
    must("ip link set v0.100 up");
    must("ip addr add 10.1.0.1/32 dev v0.100");
    wait_until("the VLAN's row", || !rows("rxe0", NEAR).is_empty());
    must("ip addr add 10.1.0.1/24 dev v0");
    must(&route(0));
    wait_until("both rows", || {
        let rows = rows("rxe0", NEAR);
        ["v0", "v0.100"].iter().all(|name| rows.iter().any(|(_, netdev)| netdev == name))
    });
    println!("{:?}", rows("rxe0", NEAR));
    assert_eq!(read_all(&store, &peer), "rxe0");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn an_interface_names_a_rail_at_both_ends() {
    let store = TestStore::mixed(603);
    let peer = peer(&store, &["--rail", "v0p", "--rail", "rxe1p"]);
    wait_rails(&peer, &["rxe0p", "rxe1p"]);
    let mut wished = options(peer.address());
    wished.wishes.dual = DualRail::Two;
    wished.wishes.rails[0].device = Some("v1".into());
    wished.wishes.rails[1].device = Some("v0".into());
    assert_eq!(read_all_by(&store, &connect(wished)), "rxe1 rxe0");
    let mut wished = one_rail(peer.address());
    wished.wishes.rails[0].device = Some("v7".into());
    wished.connect = Duration::from_secs(2);
    let error = expert_tier::verbs::VerbsTier::connect(wished).err().expect("no such interface");
    let error = error.to_string();
    assert!(error.contains("rxe0 (v0") && error.contains("network interface"), "{error}");
}
