//! Records that the peer holds ready and the client READs.

use std::time::Duration;

use railset::message::Transfer;
use railset::push::{Fetch, PushStatus, Receipt, Window};

use crate::client::{Client, DISK, peer, still_ends, store};
use crate::peer_support::scripted::record;

const STAGE: [&str; 2] = ["--spill-transfer", "stage"];

/// Asks for a range to be staged; says under which id.
fn ask(client: &mut Client, expert: usize, offset: u64, bytes: u32) -> u64 {
    let key = client.spilled()[expert];
    let grant = client.grant(0..64);
    let fetch = client.request(key, offset, bytes, &grant);
    client.fetch(Fetch { into: Window::default(), ..fetch });
    fetch.id
}

fn staged(client: &mut Client) -> Receipt {
    let receipt = client.receipt();
    assert_eq!(receipt.status, PushStatus::Done);
    assert_ne!(receipt.staged, Window::default());
    receipt
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn what_is_staged_is_read_and_released() {
    let store = store(DISK, 121);
    // Room for two ranges: what is released must be used again.
    let peer = peer(&store, "12MiB", &[&STAGE[..], &["--push-buffers", "2200KiB"]].concat());
    let opened = store.open();
    let mut client = Client::connect(&peer, opened.manifest(), 1);
    assert_eq!(client.terms.transfer, Transfer::Stage);
    for at in 0..client.spilled().len() {
        let expected = record(&store, client.spilled()[at]);
        let mut got = Vec::new();
        while got.len() < expected.len() {
            let bytes = (expected.len() - got.len()).min(700_003);
            let id = ask(&mut client, at, got.len() as u64, bytes as u32);
            let receipt = staged(&mut client);
            assert_eq!((receipt.id, receipt.bytes), (id, bytes as u32));
            got.extend(client.read(receipt.staged, bytes).unwrap());
            client.release(id);
        }
        assert!(got == expected, "record {at} is wrong");
    }
    let status = peer.status().pushes;
    assert_eq!((&*status.spill_source, &*status.spill_transfer), ("direct", "stage"));
    drop(client);
    still_ends(&peer);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_place_that_is_not_released_is_taken_back_after_its_lease() {
    let store = store(DISK, 122);
    let room = ["--push-buffers", "2200KiB", "--push-deadline-ms", "5000"];
    let peer = peer(&store, "12MiB", &[&STAGE[..], &room, &["--stage-lease-ms", "400"]].concat());
    let opened = store.open();
    let mut client = Client::connect(&peer, opened.manifest(), 1);
    for _ in 0..3 {
        ask(&mut client, 0, 0, 5_000);
    }
    let first = [staged(&mut client), staged(&mut client)];
    assert_eq!(client.receipt_within(Duration::from_millis(100)), None, "both places are taken");
    let third = staged(&mut client);
    assert!(first.iter().any(|it| it.staged == third.staged), "one of them, after its lease");
    // Releases of what is gone, and of what never was, are no fault.
    [first[0].id, first[1].id, 4711].into_iter().for_each(|id| client.release(id));
    let expected = record(&store, client.spilled()[0]);
    assert!(client.read(third.staged, 5_000).unwrap() == expected[..5_000]);
    client.release(third.id);
    drop(client);
    still_ends(&peer);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn places_of_a_client_that_vanishes_are_free_again() {
    let store = store(DISK, 123);
    let room = ["--push-buffers", "2200KiB", "--stage-lease-ms", "600000"];
    let peer = peer(&store, "12MiB", &[&STAGE[..], &room].concat());
    let opened = store.open();
    for _ in 0..3 {
        let mut client = Client::connect(&peer, opened.manifest(), 1);
        for _ in 0..4 {
            ask(&mut client, 0, 0, 5_000);
        }
        let _two = [staged(&mut client), staged(&mut client)];
        drop(client);
        still_ends(&peer);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_request_that_names_memory_where_records_are_staged_ends_its_client() {
    let store = store(DISK, 124);
    let peer = peer(&store, "12MiB", &STAGE);
    let mut client = Client::connect(&peer, store.open().manifest(), 1);
    let (key, grant) = (client.spilled()[0], client.grant(0..64));
    let fetch = client.request(key, 0, 64, &grant);
    client.fetch(fetch);
    client.expect_end();
    peer.wait_log("names memory of the client's");
    drop((client, grant));
    still_ends(&peer);
}
