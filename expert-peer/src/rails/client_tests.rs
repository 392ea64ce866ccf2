//! What clients may do through the queue pairs that the peer makes for them, over the fake libibverbs.

use std::net::TcpListener;
use std::path::Path;

use expert_tier::testing::TestStore;
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions};
use gpu_sys::slots::pin_slots;
use gpu_sys::verbs::{Memory, fake};
use railset::choose::RailSpec;
use railset::facts::{Gid, LinkLayer, Mtu};
use railset::handshake::peer::PeerRails;
use railset::message::{Connect, ConnectRail, Request, SpillTerms, Transfer};
use railset::table::Column;

use super::super::devices::{Devices, register};
use super::*;
use crate::ledger::Ledger;
use crate::push::{PushEngine, PushOptions};
use crate::residency::ResidencyOptions;
use crate::residency::keeper::{Keeper, Start};

/// `enum ibv_access_flags`.
const REMOTE_READ: u32 = 4;

fn spec() -> RailSpec {
    RailSpec {
        device: "fake0".into(),
        node_guid: 1,
        numa_node: None,
        port: 1,
        link_layer: LinkLayer::Ethernet,
        gid_index: 3,
        gid: Gid([1; 16]),
        lid: 0,
        mtu: Mtu::B1024,
        netdev: None,
        bits_per_s: None,
        initiator_depth: 16,
        responder_depth: 16,
    }
}

/// What a peer on `fake0` offers that holds one record of `store` in memory, and sends the others by
/// `spill`, if it does.
fn published(store: &TestStore, spill: Option<SpillTerms>) -> (Arc<Published>, Offered) {
    let store = Arc::new(store.open());
    let ledger = Arc::new(Ledger::new(store.manifest()));
    let layout = store.manifest().layout();
    let slot_bytes = layout.max_stride();
    let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
    let pinned = PinnedOptions { bytes: 0, huge_pages, numa };
    let (memory, slots) = pin_slots(slot_bytes as usize, 1, pinned).expect("a page or two");
    let library = fake::library(Path::new("/absent"));
    let context = library.open_device("fake0").expect("a fake one");
    let region_bytes = memory.region().1;
    let registration = register(&context, &memory, region_bytes).expect("registered");
    let domain = Arc::clone(&registration.0);
    let columns = vec![Column { base: 4096, rkey: 0 }];
    let start = Start { slots, slot_bytes, records: vec![Some(0)], columns };
    let options = ResidencyOptions::default();
    let kept = Keeper::new(store.manifest(), Arc::clone(&ledger), start, options);
    let (residency, _keeper) = kept.expect("a small table");
    let layers = layout.layers().len() as u32;
    let rails = PeerRails::new(&[spec()], 8, layers, 1, slot_bytes, spill);
    let push = spill.map(|terms| {
        let options = PushOptions { transfer: terms.transfer, ..PushOptions::default() };
        let devices = vec![Arc::clone(&domain)];
        let disk = crate::disk::Disk::default();
        PushEngine::start(&store, &ledger, devices, terms, &options, &disk).expect("a thread")
    });
    let served = Arc::new(Served::new(registration, spill.map(|_| 0)));
    let published = Published {
        devices: Arc::new(Devices::of(library, Vec::new(), std::time::Duration::from_secs(1))),
        residency,
        layers,
        slot_bytes,
        region_bytes: region_bytes as u64,
        terms: spill,
        push: push.map(Arc::new),
    };
    (Arc::new(published), Offered { rails, served: vec![served] })
}

/// A client that has `count` queue pairs, and whether the last is for spilled records.
fn connect(count: u32, push: bool) -> Vec<u8> {
    let end = |qpn| QueuePairEnd { qpn: Qpn::new(qpn).expect("one"), psn: Psn::from_random(1) };
    let rail = ConnectRail {
        index: 0,
        node_guid: 9,
        port: 1,
        gid: Gid([9; 16]),
        lid: 0,
        mtu: Mtu::B1024,
        depth: 4,
        queue_pairs: (20..20 + count).map(end).collect(),
        push,
    };
    Connect { rails: vec![rail] }.encode()
}

#[test]
fn queue_pairs_of_each_kind_allow_the_client_what_they_are_for() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let socket = TcpStream::connect(listener.local_addr().expect("its own")).expect("listening");
    let terms = |transfer| SpillTerms { transfer, credits: 4, range_bytes: 1 << 20 };
    let staged = terms(Transfer::Stage);
    let cases = [
        (None, &[REMOTE_READ, REMOTE_READ][..]),
        // The client is written to, and does nothing here.
        (Some(terms(Transfer::Push)), &[REMOTE_READ, REMOTE_READ, 0]),
        // It READs what the peer holds ready.
        (Some(staged), &[REMOTE_READ, REMOTE_READ, REMOTE_READ]),
    ];
    let mut made = 0;
    for (spill, expected) in cases {
        let store = TestStore::new(1, 2, &[5_000], 78);
        let (published, offered) = published(&store, spill);
        let client = RailClient::new(&published, offered, ClientId([1; 16]), &socket);
        let mut client = client.expect("a client");
        client.on_message(Kind::Request, &Request.encode()).expect("an offer");
        let connect = connect(expected.len() as u32, spill.is_some());
        client.on_message(Kind::Connect, &connect).expect("connected");
        assert_eq!(fake::allowed("fake0")[made..], *expected, "{spill:?}");
        made += expected.len();
    }
}

#[test]
fn published_memory_is_registered_for_reading_alone() {
    let store = TestStore::new(1, 2, &[5_000], 79);
    let published = published(&store, None);
    assert_eq!(fake::registrations(), [REMOTE_READ as i32]);
    drop(published);
}
