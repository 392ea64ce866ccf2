//! `metrale doctor` where there are RDMA devices: in the guest that `scripts/soft-roce` boots, whose
//! devices are named here.
#![cfg(metrale_rdma_verbs)]

mod peer_support;

use std::process::Command;

use serde_json::Value;

use peer_support::process::{Peer, metrale};
use peer_support::small_store;

/// The checks of `metrale doctor --json ARGS`, which must end with `code`.
fn doctor(args: &[&str], code: i32) -> Vec<Value> {
    let mut command = metrale();
    command.args(["doctor", "--json"]).args(args);
    // The guest is slow.
    command.env("METRALE_LOG", "warn").env("METRALE_EXPERT_CONNECT_MS", "20000");
    let output = command.env("METRALE_EXPERT_DEADLINE_MS", "20000").output().expect("it starts");
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    println!("{report:#}");
    report["checks"].as_array().expect("a list").clone()
}

/// The check called `name`: its status, what was found, and the fix.
fn check<'a>(checks: &'a [Value], name: &str) -> (&'a str, &'a str, &'a str) {
    let found = checks.iter().find(|check| check["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no check {name} in {checks:?}"));
    let text = |field: &str| found[field].as_str().expect("a text");
    (text("status"), text("found"), text("fix"))
}

/// Runs a command of the guest's, which must succeed.
fn system(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().expect("sh starts");
    assert!(status.success(), "{command}");
}

/// A software device on an interface that is down, until it is dropped.
struct DownDevice;

impl DownDevice {
    fn make() -> Self {
        system(
            "ip link add vdoc type veth peer name vdocp && rdma link add rxedoc type rxe netdev vdoc",
        );
        Self
    }
}

impl Drop for DownDevice {
    fn drop(&mut self) {
        system("rdma link delete rxedoc; ip link del vdoc");
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn devices_ports_and_rails_are_told_and_both_rails_measured() {
    let store = small_store(411);
    let peer = Peer::start(&store.path(), &["--rail", "rxe0p", "--rail", "rxe1p"]);
    let args = ["--peer", &peer.address(), "--expert-backend", "rdma-verbs"];
    let checks = doctor(&args, 0);
    assert_eq!(check(&checks, "libibverbs").0, "ok");
    let (status, found, _) = check(&checks, "RDMA devices");
    assert!(status == "ok" && found.starts_with("4: "), "{found}");
    for (device, netdev, address) in [
        ("rxe0", "v0", "10.1.0.1"),
        ("rxe0p", "v0p", "10.1.0.2"),
        ("rxe1", "v1", "10.2.0.1"),
        ("rxe1p", "v1p", "10.2.0.2"),
    ] {
        assert!(found.contains(device), "{found}");
        let (status, found, fix) = check(&checks, &format!("{device} port 1"));
        assert_eq!(status, "ok", "{found}: {fix}");
        let gid = format!("GID 1 ::ffff:{address} RoCEv2 on {netdev}");
        assert!(found.starts_with("active, Ethernet, ") && found.contains(&gid), "{found}");
    }
    for name in ["first rail", "second rail"] {
        let (status, found, _) = check(&checks, name);
        assert!(status == "ok" && found.contains("passed over"), "{found}");
    }
    let (status, found, _) = check(&checks, "rails to the peer");
    assert!(
        status == "ok" && found.contains("rxe0 port 1") && found.contains("rxe1 port 1"),
        "{found}"
    );
    for rail in ["rxe0", "rxe1"] {
        let (status, found, _) = check(&checks, &format!("rail {rail} round trip"));
        assert!(status == "ok" && found.contains(" us, the median"), "{found}");
        // Emulated, it is far below what the port says of itself, where it says anything.
        let (status, found, fix) = check(&checks, &format!("rail {rail} bandwidth"));
        match found.contains(" of the port's ") {
            true => assert!(status == "warn" && fix.contains("ib_read_bw"), "{found}"),
            false => assert!(found.contains("does not tell its speed"), "{found}"),
        }
    }
    // What was measured came over the rails, and left nothing behind.
    let status = peer.status();
    assert_eq!(status.queue_pairs, 0, "{status:?}");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_port_that_is_down_is_named_with_its_fix_and_fails_who_asked_for_it() {
    let _down = DownDevice::make();
    let checks = doctor(&[], 0);
    let (status, found, fix) = check(&checks, "rxedoc port 1");
    assert!(status == "warn" && found.starts_with("down"), "{found}");
    assert!(fix.contains("ip link set vdoc up"), "{fix}");
    assert_eq!(check(&checks, "first rail").0, "ok", "the others are up");
    let checks = doctor(&["--expert-rdma-dev", "rxedoc"], 1);
    assert_eq!(check(&checks, "rxedoc port 1").0, "fail");
    let (status, found, _) = check(&checks, "first rail");
    assert!(status == "fail" && found.contains("METRALE_EXPERT_RDMA_DEV"), "{found}");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn the_wished_device_is_the_only_rail_and_file_pages_are_tried() {
    let store = small_store(412);
    let peer = Peer::start(&store.path(), &["--rail", "rxe0p"]);
    let checks = doctor(&["--peer", &peer.address(), "--expert-rdma-dev", "rxe0"], 0);
    let (_, found, _) = check(&checks, "rails to the peer");
    assert!(found.starts_with("rxe0 port 1 GID 1") && !found.contains("rxe1"), "{found}");
    // Whether file pages register is the kernel's business; that it is told is ours.
    let (_, found, _) = check(&checks, "file pages");
    assert!(found.contains("rxe0 re"), "{found}");
}
