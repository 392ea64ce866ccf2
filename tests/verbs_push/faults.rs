//! Clients and peers that end, and files that cannot be read, with requests under way.

use std::fs::OpenOptions;
use std::time::{Duration, Instant};

use expert_tier::store::manifest::layer_file_name;
use railset::push::PushStatus;
use rustix::process::Signal;

use crate::cables::cut;
use crate::client::{Client, DISK, MEMORY, peer, still_serves, store};
use crate::peer_support::wait_until;
use crate::right::maps;

/// Asks for as much as the credits allow.
fn ask_for_much(client: &mut Client) -> u16 {
    let (key, bytes) = (client.spilled()[0], client.terms.range_bytes);
    let grant = client.grant(0..bytes as usize);
    for _ in 0..client.terms.credits {
        let fetch = client.request(key, 0, bytes, &grant);
        client.fetch(fetch);
    }
    // The grant stays until the test's process ends: the peer may write as long as it is connected.
    std::mem::forget(grant);
    client.terms.credits
}

/// Five times, since it may be between any two steps; two buffers, so that none may be lost.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_that_vanishes_with_requests_under_way_leaves_every_buffer() {
    let sources: &[&str] = if maps() { &["direct", "mmap"] } else { &["direct"] };
    for source in sources {
        let store = store(DISK, 101);
        let args = ["--push-buffers", "512KiB", "--push-pinned", "3MiB", "--spill-source", source];
        let peer = peer(&store, "12MiB", &args);
        for round in 0..5_u64 {
            let mut client = Client::connect(&peer, store.open().manifest(), 1);
            ask_for_much(&mut client);
            for _ in 0..round {
                client.receipt();
            }
            drop(client);
            wait_until("the client's end", || peer.status().queue_pairs == 0);
        }
        still_serves(&peer, &store);
        assert_eq!(peer.status().pushes.push_queue, 0);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_drains_answers_what_is_under_way() {
    let store = store(DISK, 102);
    let mut peer = peer(&store, "12MiB", &["--push-deadline-ms", "20000"]);
    let mut client = Client::connect(&peer, store.open().manifest(), 1);
    let asked = ask_for_much(&mut client);
    peer.signal(Signal::TERM);
    for _ in 0..asked {
        assert_eq!(client.receipt().status, PushStatus::Done);
    }
    drop(client);
    assert!(peer.wait().success());
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_is_asked_to_stop_stops_although_a_client_stays() {
    let store = store(DISK, 103);
    let mut peer = peer(&store, "12MiB", &["--drain-ms", "200", "--stall-ms", "500"]);
    let mut client = Client::connect(&peer, store.open().manifest(), 1);
    ask_for_much(&mut client);
    peer.signal(Signal::TERM);
    assert!(peer.wait().success());
    client.expect_end();
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_is_killed_ends_its_clients_connection() {
    let store = store(DISK, 104);
    let mut peer = peer(&store, "12MiB", &[]);
    let mut client = Client::connect(&peer, store.open().manifest(), 1);
    ask_for_much(&mut client);
    peer.kill();
    client.expect_end();
    peer.restart(&store.path());
    still_serves(&peer, &store);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_file_that_was_truncated_is_unreadable_and_the_peer_lives() {
    let mut ways = vec![(DISK, "direct"), (MEMORY, "auto")];
    if maps() {
        ways.push((DISK, "mmap"));
    }
    for (place, source) in ways {
        let store = store(place, 105);
        let mut peer = peer(&store, "12MiB", &["--spill-source", source]);
        let opened = store.open();
        let mut client = Client::connect(&peer, opened.manifest(), 1);
        let spilled = client.spilled();
        let (whole, cut) = (spilled[0], spilled[spilled.len() - 1]);
        assert_ne!(whole.layer, cut.layer);
        let file = store.path().join(layer_file_name(cut.layer));
        OpenOptions::new().write(true).open(file).unwrap().set_len(4096).unwrap();
        for _ in 0..3 {
            assert_eq!(client.ask(cut, 0, 50_000).0.status, PushStatus::Unreadable, "{source}");
            assert_eq!(client.ask(whole, 0, 50_000).0.status, PushStatus::Done, "{source}");
        }
        assert!(peer.runs());
        peer.wait_log("a spilled record could not be read");
        drop(client);
        wait_until("the client's end", || peer.status().queue_pairs == 0);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn requests_that_wait_for_room_are_done_while_the_disk_gives() {
    let store = store(DISK, 106);
    let args = ["--push-buffers", "512KiB", "--push-reads", "1", "--push-deadline-ms", "500"];
    let peer = peer(&store, "12MiB", &args);
    let mut client = Client::connect(&peer, store.open().manifest(), 1);
    let started = Instant::now();
    let asked = ask_for_much(&mut client);
    let statuses: Vec<_> = (0..asked).map(|_| client.receipt().status).collect();
    println!("{statuses:?} after {:?}", started.elapsed());
    assert!(statuses.iter().all(|status| *status == PushStatus::Done), "{statuses:?}");
    assert_eq!(client.receipt_within(Duration::from_millis(200)), None, "each has one");
    drop(client);
    still_serves(&peer, &store);
}

/// What is under way ends with its lane, within the peer's own bound, and the connection on which the
/// client would wait ends, too.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_rail_that_is_cut_costs_its_clients_and_no_buffer() {
    let store = store(DISK, 107);
    let peer = peer(&store, "12MiB", &["--push-buffers", "512KiB"]);
    let mut client = Client::connect(&peer, store.open().manifest(), 1);
    ask_for_much(&mut client);
    client.receipt();
    let cut = cut(&["10.1.0.1", "10.1.0.2"]);
    client.expect_end();
    peer.wait_log("--push-stall-ms");
    drop(client);
    wait_until("the client's end", || peer.status().queue_pairs == 0);
    drop(cut);
    still_serves(&peer, &store);
}
