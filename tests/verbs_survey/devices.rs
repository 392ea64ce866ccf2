//! Devices that are taken out and made anew while a peer runs.

use expert_tier::testing::TestStore;

use crate::cables::{Until, must};
use crate::{peer, read_all, wait_rails};

/// Takes `made` out at the end of a test, and makes the guest's own device again.
fn restore(made: &str) -> Until {
    Until::then(&format!("rdma link delete {made}"))
        .and_then("rdma link add rxe0p type rxe netdev v0p".into())
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_device_that_is_made_anew_is_served_anew() {
    let store = TestStore::mixed(621);
    let peer = peer(&store, &["--rail", "rxe0p", "--rail", "rxe1p"]);
    assert_eq!(read_all(&store, &peer), "rxe0");
    // The command returns when every process has closed the device.
    must("rdma link delete rxe0p");
    wait_rails(&peer, &["rxe1p"]);
    must("rdma link add rxe0p type rxe netdev v0p");
    wait_rails(&peer, &["rxe0p", "rxe1p"]);
    assert_eq!(read_all(&store, &peer), "rxe0");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_device_under_another_name_is_served_where_its_interface_is_named() {
    let store = TestStore::mixed(622);
    let peer = peer(&store, &["--rail", "v0p"]);
    wait_rails(&peer, &["rxe0p"]);
    must("rdma link delete rxe0p");
    wait_rails(&peer, &[]);
    let _back = restore("rxenew");
    must("rdma link add rxenew type rxe netdev v0p");
    wait_rails(&peer, &["rxenew"]);
    assert_eq!(read_all(&store, &peer), "rxe0");
}
