//! Records as large as real ones, from a store far larger than the arena, through the program.

use std::path::Path;

use crate::cables::RAILS;
use crate::peer_support::process::{Peer, run};

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_store_far_larger_than_the_arena_is_fetched_whole_and_right() {
    let dir = Path::new("/scratch/large");
    let store = dir.join("store");
    std::fs::create_dir_all(dir).expect("the guest's scratch disk");
    let store = store.to_str().expect("a path");
    let spec = "layers=3,experts=4,bytes=9400000/1000000/65536,seed=3";
    assert!(run(&["pack", "--synthetic", spec, "--out", store]).status.success());
    let peer = Peer::start(Path::new(store), &RAILS);
    let address = peer.address();
    let verbs = ["--expert-backend", "rdma-verbs", "--peer", &address, "--connect-ms", "5000"];
    // Two of the largest records.
    let arena = ["--expert-arena-bytes", "20000000"];
    let all = run(&[&["fetch", "--all", "--json"], &verbs[..], &arena].concat());
    let (found, log) = (String::from_utf8_lossy(&all.stdout), String::from_utf8_lossy(&all.stderr));
    println!("{found}");
    assert!(all.status.success(), "{log}");
    assert!(found.contains("\"records\":12") && found.contains("\"errors\":0"), "{found}");
    assert!(found.contains("\"read\":12"), "{found}");
    for (layer, expert) in [("0", "0"), ("0", "3"), ("1", "1"), ("2", "2")] {
        let fetch = |way: &[&str], name: &str| {
            let out = dir.join(name);
            let out = out.to_str().expect("a path");
            let one = ["fetch", "--layer", layer, "--expert", expert, "--out", out];
            let done = run(&[&one[..], way, &arena].concat());
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            std::fs::read(out).expect("what was fetched")
        };
        let read = fetch(&verbs, "read");
        let local = fetch(&["--expert-backend", "posix", "--store", store], "local");
        assert!(read == local && !read.is_empty(), "layer {layer} expert {expert} differs");
    }
    std::fs::remove_dir_all(dir).expect("ours");
}
