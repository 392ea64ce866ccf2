//! What a client that keeps to the rules gets.

use std::collections::HashSet;

use expert_tier::testing::TestStore;
use gpu_sys::verbs::{FilePages, probe_file_pages};
use railset::push::{PushStatus, Window};

use crate::client::{Client, DISK, MEMORY, peer, store};
use crate::peer_support::process::{Peer, run};
use crate::peer_support::scripted::record;
use crate::peer_support::wait_until;
use crate::verbs_support::End;

/// Fetches every spilled record in ranges of `range` bytes, and compares it with the store's.
fn every_record_is_right(peer: &Peer, store: &TestStore, range: u32) {
    let opened = store.open();
    let mut client = Client::connect(peer, opened.manifest(), 1);
    let keys = client.spilled();
    let layers: HashSet<_> = keys.iter().map(|key| key.layer).collect();
    assert_eq!(layers.len(), 2, "records of both layers");
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
    assert!(after.pushes > 12 && after.pushed_bytes > 0);
    assert_eq!((after.push_errors, after.push_queue, after.push_lanes), (0, 0, 0));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_come_by_direct_reads() {
    let store = TestStore::new_in(DISK.as_ref(), 2, 4, &[9_400_000, 64_000], 81);
    let peer = peer(&store, "20MiB", &["--spill-source", "direct"]);
    counts_and_goes(&peer, &store, "direct");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn the_ranges_of_a_record_come_in_any_order_at_once_over_either_rail() {
    let store = store(DISK, 84);
    let flags = ["--rail", "rxe0p", "--rail", "rxe1p", "--dram-budget", "12MiB"];
    let peer = Peer::start(&store.path(), &flags);
    let opened = store.open();
    let clients = [0, 1].map(|rail| Client::on_rail(&peer, opened.manifest(), rail + 1, rail));
    for (rail, mut client) in clients.into_iter().enumerate() {
        let key = client.spilled()[0];
        let expected = record(&store, key);
        let grant = client.grant(0..expected.len());
        let (part, mut due) = (99_991, HashSet::new());
        for at in (0..expected.len()).step_by(part) {
            let bytes = part.min(expected.len() - at) as u32;
            let mut fetch = client.request(key, at as u64, bytes, &grant);
            fetch.into.address += at as u64;
            client.fetch(fetch);
            due.insert(fetch.id);
        }
        assert!(due.len() > 16);
        while !due.is_empty() {
            let receipt = client.receipt();
            assert_eq!(receipt.status, PushStatus::Done);
            assert!(due.remove(&receipt.id), "one receipt each");
        }
        grant.deregister().unwrap();
        assert!(client.mine.bytes(0, expected.len()) == expected, "over rail {rail}");
    }
}

/// Whether this kernel registers file pages.
pub(crate) fn maps() -> bool {
    let found = probe_file_pages(&End::open("rxe0p").domain, DISK.as_ref()).unwrap();
    matches!(found, FilePages::Registered)
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_come_from_file_pages_where_the_kernel_registers_them() {
    let store = store(DISK, 83);
    if maps() {
        let peer = peer(&store, "12MiB", &["--spill-source", "mmap"]);
        return counts_and_goes(&peer, &store, "mmap");
    }
    let path = store.path();
    let flags = ["peer", "run", "--listen", "127.0.0.1:0", "--rail", "rxe0p"];
    let spill = ["--dram-budget", "12MiB", "--spill-source", "mmap", "--store"];
    let flags = [&flags[..], &spill, &[path.to_str().unwrap()]].concat();
    let refused = run(&flags);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("does not register file pages") && text.contains("6.2"), "{text}");
}

/// In memory there are no direct reads before Linux 6.6.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_come_by_another_way_where_there_are_no_direct_reads() {
    let store = store(MEMORY, 82);
    let peer = peer(&store, "12MiB", &[]);
    let direct = !peer.log().contains("no direct reads of spilled records");
    let expected = match (direct, maps()) {
        (true, _) => "direct",
        (false, true) => "mmap",
        (false, false) => "buffered",
    };
    counts_and_goes(&peer, &store, expected);
}
