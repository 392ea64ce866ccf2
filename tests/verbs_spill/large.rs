//! Records as large as real ones, layers of unlike sizes, and a store that no memory here holds.

use std::path::Path;

use crate::cables::RAILS;
use crate::peer_support::process::{Peer, run};

/// Where the guest's emulated NVMe disk is.
const DISK: &str = "/scratch/larger";
/// Memory below which the whole of it is tried, in KiB: a guest with `MEM=1G`.
const SMALL_KIB: u64 = 1 << 20;

fn memory_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("a Linux machine");
    let line = text.lines().find(|line| line.starts_with("MemTotal:")).expect("its memory");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

/// With `MEM=1G scripts/test-verbs larger_than` the store is larger than the guest's memory; in a larger
/// guest a small one shows that the sizes are no trouble.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_store_larger_than_memory_comes_whole_and_right() {
    let experts = if memory_kib() < SMALL_KIB { 60 } else { 2 };
    let store = format!("{DISK}/store");
    std::fs::create_dir_all(DISK).expect("the guest's scratch disk");
    let spec = format!("layers=6,experts={experts},bytes=9400000/1000000/65536,seed=3");
    let packed = run(&["pack", "--synthetic", &spec, "--out", &store]);
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let budget = ["--dram-budget", "40MiB"];
    let store_bytes = experts * 2 * (9_400_000 + 1_000_000 + 65_536);
    assert!(experts == 2 || store_bytes > memory_kib() * 1024, "the store fits the memory");
    let peer = Peer::start(Path::new(&store), &[&RAILS[..], &budget].concat());
    let address = peer.address();
    let verbs = ["--expert-backend", "rdma-verbs", "--peer", &address, "--connect-ms", "10000"];
    // Three of the largest records.
    let arena = ["--expert-arena-bytes", "30000000"];
    let all = run(&[&["fetch", "--all", "--json"], &verbs[..], &arena].concat());
    let (found, log) = (String::from_utf8_lossy(&all.stdout), String::from_utf8_lossy(&all.stderr));
    let status = peer.status();
    println!("{} KiB of memory; {found}{:?}\n{:?}", memory_kib(), status.residency, status.pushes);
    assert!(all.status.success(), "{log}");
    let records = format!("\"records\":{}", 6 * experts);
    assert!(found.contains(&records) && found.contains("\"errors\":0"), "{found}");
    assert!(status.pushes.pushes > 0 && !found.contains("\"read\":0"), "{found}");
    for (layer, expert) in [("0", "0"), ("3", "1"), ("4", "1"), ("5", "0")] {
        let fetch = |way: &[&str], name: &str| {
            let out = format!("{DISK}/{name}");
            let one = ["fetch", "--layer", layer, "--expert", expert, "--out", &out];
            let done = run(&[&one[..], way, &arena].concat());
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            std::fs::read(out).expect("what was fetched")
        };
        let pushed = fetch(&verbs, "pushed");
        let local = fetch(&["--expert-backend", "posix", "--store", &store], "local");
        assert!(pushed == local && !pushed.is_empty(), "layer {layer} expert {expert} differs");
    }
    std::fs::remove_dir_all(DISK).expect("ours");
}
