//! What a client that keeps to the rules gets.

use expert_tier::testing::TestStore;
use railset::push::{PushStatus, Window};

use crate::client::{Client, DISK, MEMORY, peer, store};
use crate::peer_support::process::Peer;
use crate::peer_support::scripted::record;
use crate::peer_support::wait_until;

/// Fetches every spilled record in ranges of `range` bytes, and compares it with the store's.
fn every_record_is_right(peer: &Peer, store: &TestStore, range: u32) {
    let opened = store.open();
    let mut client = Client::connect(peer, opened.manifest(), 1);
    let keys = client.spilled();
    assert!(keys.len() > 8, "records of both layers");
    for key in keys {
        let expected = record(store, key);
        let mut got = Vec::new();
        while got.len() < expected.len() {
            let bytes = range.min((expected.len() - got.len()) as u32);
            client.mine.fill(0xa5);
            let (receipt, part) = client.ask(key, got.len() as u64, bytes);
            assert_eq!((receipt.status, receipt.bytes), (PushStatus::Done, bytes), "{key}");
            assert_eq!(receipt.staged, Window::default());
            got.extend(part);
        }
        assert!(got == expected, "{key} is wrong");
    }
}

fn counts_and_goes(peer: &Peer, store: &TestStore, source: &str) {
    let before = peer.status();
    assert_eq!((&*before.pushes.spill_source, &*before.pushes.spill_transfer), (source, "push"));
    every_record_is_right(peer, store, 1 << 20);
    every_record_is_right(peer, store, 300_007);
    wait_until("the lanes' end", || peer.status().queue_pairs == 0);
    let after = peer.status().pushes;
    println!("{after:?}");
    assert!(after.pushes >= 18 && after.pushed_bytes > 0);
    assert_eq!((after.push_errors, after.push_queue, after.push_lanes), (0, 0, 0));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_come_by_direct_reads() {
    let store = store(DISK, 81);
    let peer = peer(&store, "12MiB", &["--spill-source", "direct"]);
    counts_and_goes(&peer, &store, "direct");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_come_by_ordinary_reads_where_nothing_else_is() {
    let store = store(MEMORY, 82);
    let peer = peer(&store, "12MiB", &[]);
    let source = peer.status().pushes.spill_source;
    println!("{source}: {}", peer.log());
    counts_and_goes(&peer, &store, &source);
}
