//! Records that move between a peer's disk and its memory, as clients see it that READ meanwhile.
//!
//! Runs as root in the guest that `scripts/soft-roce` boots, whose devices are named here.
#![cfg(metrale_rdma_verbs)]

#[path = "../verbs_faults/cables.rs"]
#[allow(dead_code, reason = "each test program uses its own part of this module")]
mod cables;
#[path = "../peer_support/mod.rs"]
mod peer_support;
#[path = "../peer_support/rail_client.rs"]
mod rail_client;
#[path = "../../gpu-sys/tests/verbs_support/mod.rs"]
mod verbs_support;

mod client;
mod real_client;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::TestStore;
use expert_tier::wire::frame::FrameType;

use cables::RAILS;
use client::Client;
use peer_support::process::Peer;
use peer_support::wait_until;

/// Sixteen records in slots of 66 KiB and a bit; half of them fit.
struct Half {
    store: TestStore,
    manifest: Arc<Manifest>,
    keys: Vec<ExpertKey>,
    peer: Peer,
}

impl Half {
    fn new(seed: u64, args: &[&str]) -> Self {
        let store = TestStore::new(2, 8, &[5_000, 65_536], seed);
        Self::of(store, args)
    }

    fn of(store: TestStore, args: &[&str]) -> Self {
        let manifest = Arc::clone(store.open().manifest());
        let keys = manifest.layout().keys().collect();
        let budget = (8 * manifest.layout().max_stride()).to_string();
        let own = ["--dram-budget", &budget, "--residency-ms", "20"];
        let peer = Peer::start(&store.path(), &[&RAILS[..], &own, args].concat());
        Self { store, manifest, keys, peer }
    }

    fn client(&self, id: u8) -> Client {
        Client::connect(&self.peer.address(), id, &self.manifest)
    }

    /// Has `client` say that it fetches a record so often that it is the `nth` to move, from 0; says
    /// which one. Its slot is that of the record that came eight moves before.
    fn want(&self, client: &mut Client, nth: usize) -> ExpertKey {
        let key = self.keys[(8 + nth) % 16];
        client.used(&[key], (8.0 * 3_f64.powf(nth as f64 / 8.0)) as u32);
        key
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_that_follows_reads_right_records_while_they_move() {
    let half = Half::new(101, &["--move-ack-ms", "10000"]);
    let mut client = half.client(1);
    client.acknowledge();
    assert_eq!(client.resident(), half.keys[..8]);
    let mut reads = 0;
    let started = Instant::now();
    for nth in 0..40 {
        let wanted = half.want(&mut client, nth);
        while !client.resident().contains(&wanted) {
            assert!(started.elapsed() < Duration::from_secs(90), "{:?}", half.peer.status());
            client.follow();
            let resident = client.resident();
            let (table, key) = (client.table.clone(), resident[reads % resident.len()]);
            let checked = client.read(&table, key).expect("a READ that ends");
            checked.unwrap_or_else(|mismatch| panic!("{key}, READ {reads}: {mismatch}"));
            reads += 1;
        }
    }
    let status = half.peer.status().residency;
    println!("{reads} READs right in {:?}: {status:?}", started.elapsed());
    assert_eq!((status.promotions, status.demotions, status.resident_records), (40, 40, 8));
    assert_eq!(status.residency.iter().map(|layer| layer.experts).sum::<u64>(), 16);
    assert_eq!(status.withdrawn, 0);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_that_does_not_follow_gets_right_records_or_refusable_ones_and_is_dropped() {
    let half = Half::new(102, &["--move-ack-ms", "5"]);
    let mut stubborn = half.client(1);
    let (table, resident) = (stubborn.table.clone(), stubborn.resident());
    let mut driver = half.client(2);
    driver.acknowledge();
    let (mut right, mut refused) = (0, 0);
    let started = Instant::now();
    for nth in 0.. {
        assert!(started.elapsed() < Duration::from_secs(120), "{:?}", half.peer.status());
        let wanted = half.want(&mut driver, nth);
        while !driver.resident().contains(&wanted) {
            driver.next_table();
            driver.acknowledge();
        }
        // By the first table, whatever has come since.
        match stubborn.read(&table, resident[nth % resident.len()]) {
            Ok(Ok(())) => right += 1,
            Ok(Err(mismatch)) => {
                if refused == 0 {
                    println!("first refused after {right} right ones: {mismatch}");
                }
                refused += 1;
            }
            Err(error) => {
                println!("{right} READs right, {refused} refused, then {error}");
                break;
            }
        }
    }
    assert!(right > 0 && refused > 0);
    assert_dropped(&half, stubborn, driver);
}

/// The client had all the tables that it may leave unacknowledged, and then the reason.
fn assert_dropped(half: &Half, mut stubborn: Client, mut driver: Client) {
    let mut tables = 0;
    let text = loop {
        let (header, body) = stubborn.raw.read().expect("a table or a refusal");
        match header.frame {
            FrameType::RailsTable => tables += 1,
            frame => {
                assert_eq!(frame, FrameType::Refusal);
                break String::from_utf8(body).expect("a text");
            }
        }
    };
    println!("{tables} tables, then: {text}");
    assert!(text.contains("64"), "{text}");
    // Nobody else notices.
    driver.follow();
    let (table, key) = (driver.table.clone(), driver.resident()[0]);
    driver.read(&table, key).expect("a READ that ends").expect("the right record");
    wait_until("the dropped client's end", || half.peer.status().queue_pairs == 1);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_slot_is_left_alone_until_its_client_has_acknowledged_or_is_gone() {
    let half = Half::new(103, &["--move-ack-ms", "60000"]);
    let (mut slow, mut leaver) = (half.client(1), half.client(2));
    slow.acknowledge();
    let first = slow.table.clone();
    slow.used(&half.keys[8..16], 1000);
    slow.next_table();
    assert_eq!((slow.table.generation(), slow.resident().len()), (2, 0));
    // It has the table and still reads by the one before.
    for &key in &half.keys[..8] {
        slow.read(&first, key).expect("a READ that ends").expect("the slot is as it was");
    }
    assert_eq!(half.peer.status().residency.promotions, 0);
    slow.acknowledge();
    for &key in &half.keys[..8] {
        leaver.read(&first, key).expect("a READ that ends").expect("there is another client");
    }
    assert_eq!(half.peer.status().residency.promotions, 0);
    let left = Instant::now();
    drop(leaver);
    slow.next_table();
    println!("{:?} after the other client left", left.elapsed());
    assert_eq!((slow.table.generation(), slow.resident()), (3, half.keys[8..].to_vec()));
    let table = slow.table.clone();
    for &key in &half.keys[8..] {
        slow.read(&table, key).expect("a READ that ends").expect("the right record");
    }
}

/// Flips a bit of a record in the peer's memory, where `client` READs it.
fn flip_in_memory(peer: &Peer, client: &Client, key: ExpertKey) {
    let at = client.address(key).expect("a resident record") + 2_000;
    let memory = format!("/proc/{}/mem", peer.pid());
    let memory = OpenOptions::new().read(true).write(true).open(memory).expect("we are root");
    let mut byte = [0];
    memory.read_exact_at(&mut byte, at).expect("a page of the peer's");
    memory.write_all_at(&[byte[0] ^ 1], at).expect("a page of the peer's");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_that_clients_get_damaged_are_looked_at_and_withdrawn_if_the_disk_has_no_better() {
    let store = TestStore::new(2, 8, &[5_000, 65_536], 104);
    let key = |layer, expert| ExpertKey::new(layer, expert);
    // Damaged on disk before it is read into memory, and after; and in memory alone.
    store.flip_bit(key(0, 3), 2_000);
    let half = Half::of(store, &[]);
    half.store.flip_bit(key(0, 5), 2_000);
    let mut client = half.client(1);
    client.acknowledge();
    assert_eq!(half.peer.status().residency.withdrawn, 1);
    assert!(!client.resident().contains(&key(0, 3)) && client.resident().len() == 7);
    flip_in_memory(&half.peer, &client, key(0, 2));
    let table = client.table.clone();
    client.read(&table, key(0, 2)).expect("a READ that ends").expect_err("damaged");
    for damaged in [key(0, 2), key(0, 5), key(0, 6), key(77, 6)] {
        client.damaged(damaged);
    }
    // Out with one table, and back with another.
    while client.table.generation() < 3 {
        client.next_table();
        client.acknowledge();
    }
    assert!([key(0, 2), key(0, 5)].iter().all(|key| client.resident().contains(key)));
    wait_until("two withdrawn records", || half.peer.status().residency.withdrawn == 2);
    half.peer.wait_log("a record in memory is damaged");
    half.peer.wait_log("a client got a damaged record; the copies here are sound");
    let table = client.table.clone();
    for sound in [key(0, 2), key(0, 5)] {
        client.read(&table, sound).expect("a READ that ends").expect("memory is sound");
    }
    // However often it is asked for, what is damaged on disk does not come.
    client.used(&[key(0, 3), key(1, 1)], 1000);
    while !client.resident().contains(&key(1, 1)) {
        client.next_table();
        client.acknowledge();
    }
    assert!(!client.resident().contains(&key(0, 3)));
}

/// Such a peer pushes nothing: a record that is not in its table is nowhere.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_holds_every_record_mends_one_without_a_table_that_lacks_it() {
    let store = TestStore::new(2, 8, &[5_000, 65_536], 106);
    let manifest = Arc::clone(store.open().manifest());
    let peer = Peer::start(&store.path(), &[&RAILS[..], &["--residency-ms", "20"]].concat());
    let mut client = Client::connect(&peer.address(), 1, &manifest);
    client.acknowledge();
    let key = ExpertKey::new(0, 2);
    flip_in_memory(&peer, &client, key);
    let table = client.table.clone();
    client.read(&table, key).expect("a READ that ends").expect_err("damaged");
    client.damaged(key);
    wait_until("the record's repair", || {
        client.read(&table, key).expect("a READ that ends").is_ok()
    });
    assert_eq!(peer.status().residency.table_generation, table.generation());
    client.follow();
    assert_eq!(client.table.generation(), table.generation());
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_profile_says_what_is_in_memory_at_the_start() {
    let store = TestStore::new(2, 8, &[5_000, 65_536], 105);
    let profile = store.scratch().join("profile.jsonl");
    let lines: String = (0..3)
        .map(|n| format!("{{\"layer\":1,\"expert\":{},\"count\":{}}}\n", 2 * n + 1, 5 + n))
        .collect();
    std::fs::write(&profile, lines).unwrap();
    let profile = profile.to_str().unwrap().to_owned();
    let half = Half::of(store, &["--resident-profile", &profile, "--promote-bytes-per-s", "0"]);
    let mut client = half.client(1);
    client.acknowledge();
    let mut expected: Vec<_> = half.keys[..5].to_vec();
    expected.extend([1, 3, 5].map(|expert| ExpertKey::new(1, expert)));
    assert_eq!(client.resident(), expected);
    let table = client.table.clone();
    for key in expected {
        client.read(&table, key).expect("a READ that ends").expect("the right record");
    }
    let status = ["peer", "status", &half.peer.address()];
    let text = String::from_utf8(peer_support::process::run(&status).stdout).unwrap();
    for part in ["8 records in", "8 spilled", "layer 0: 5 of 8", "layer 1: 3 of 8", "table 1"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    half.peer.wait_log("limited_by=\"--dram-budget\"");
}
