//! Clients that break the rails' handshake: each is refused by name, and neither the peer nor its
//! other clients notice.

use std::net::Ipv4Addr;

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::verbs::VerbsTier;
use expert_tier::wire::frame::{FrameHeader, FrameType, Status};
use gpu_sys::verbs::{Access, Post, Remote, Signal, WorkStatus};
use railset::facts::Gid;
use railset::message::{Connect, ConnectRail, Psn, Qpn, QueuePairEnd, Request, TableAck};

use crate::cables::{connect, keys, options, wait_queue_pairs};
use crate::peer_support::process::Peer;
use crate::peer_support::raw::Raw;
use crate::peer_support::{BOUND, assert_right, fetch, wait_until};
use crate::rail_client;
use crate::verbs_support::{Block, pages};

/// An honest client beside the others, and what the peer should have left after each of them.
struct Witness {
    store: TestStore,
    peer: Peer,
    tier: VerbsTier,
    resources: (usize, usize),
}

impl Witness {
    fn new(seed: u64, args: &[&str]) -> Self {
        let store = TestStore::mixed(seed);
        let args = [&crate::cables::RAILS[..], args].concat();
        let peer = Peer::start(&store.path(), &args);
        let tier = connect(options(peer.address()));
        let resources = peer.idle_resources();
        Self { store, peer, tier, resources }
    }

    /// A client that has been offered the rails.
    fn offered(&self) -> Raw {
        rail_client::offered(&self.peer.address(), 9, self.tier.manifest()).0
    }

    /// Fails unless all is as it was, and the honest client gets its records.
    fn unharmed(&self) {
        wait_queue_pairs(&self.peer, 4);
        wait_until("the connection's end", || self.peer.resources() == self.resources);
        let (arena, key) = (small_arena(1), keys(&self.tier)[9]);
        let fetched = fetch(&self.tier, &arena, key).expect("the peer goes on");
        assert_right(&self.store, key, &fetched);
        assert_eq!(self.tier.reconnects(), 0);
    }

    /// Sends `frame` to a client's connection that has been offered rails; it must be refused with
    /// all of `expected`.
    fn refused(&self, what: &str, frame: FrameType, body: &[u8], expected: &[&str]) {
        let mut raw = self.offered();
        raw.send_frame(frame, body);
        let (status, text) = raw.refusal();
        println!("{what}: {status:?}: {text}");
        for word in expected {
            assert!(text.contains(word), "{what}: {text:?} does not name {word:?}");
        }
        drop(raw);
        self.unharmed();
    }
}

fn rail(index: u8, address: [u8; 4], queue_pairs: u32) -> ConnectRail {
    let end = |n| QueuePairEnd { qpn: Qpn::new(0x1000 + n).unwrap(), psn: Psn::from_random(n) };
    let gid = Ipv4Addr::from(address).to_ipv6_mapped().octets();
    rail_client::rail(index, gid, (0..queue_pairs).map(end).collect())
}

fn connect_to(rails: Vec<ConnectRail>) -> Vec<u8> {
    Connect { rails }.encode()
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn connects_that_cannot_be_are_refused_by_name() {
    let peer = Witness::new(71, &[]);
    let good = || rail(0, [10, 1, 0, 1], 2);
    let refused = |what, rails, expected: &[&str]| {
        peer.refused(what, FrameType::RailsConnect, &connect_to(rails), expected);
    };
    refused("no such rail", vec![rail(9, [10, 1, 0, 1], 2)], &["rail 9", "2 rails"]);
    refused("a rail twice", vec![good(), good()], &["are one"]);
    refused("17 queue pairs", vec![rail(0, [10, 1, 0, 1], 17)], &["queue pairs", "17"]);
    refused("200 queue pairs", vec![rail(0, [10, 1, 0, 1], 200)], &["RailsConnect", "1640 bytes"]);
    refused("no rails", vec![], &["RailsConnect", "8 bytes"]);
    let zeros = ConnectRail { gid: Gid([0; 16]), ..good() };
    refused("no address", vec![zeros], &["cannot be reached"]);
    let multicast = ConnectRail { gid: Gid([0xff; 16]), ..good() };
    refused("a multicast address", vec![multicast], &["cannot be reached"]);
    // The first rail's queue pairs are there by the time the second's cannot be.
    refused("an address nobody routes to", vec![good(), rail(1, [10, 99, 0, 1], 2)], &["ibv_"]);
    for number in [0_u32, 1, 0xff_ffff, 0x100_0000] {
        let mut body = connect_to(vec![good()]);
        body[40..44].copy_from_slice(&number.to_le_bytes());
        peer.refused("no such queue pair", FrameType::RailsConnect, &body, &["queue pair number"]);
    }
    let most = FrameHeader::control(FrameType::RailsConnect, u64::MAX).encode();
    let mut raw = peer.offered();
    raw.send(&most);
    assert_eq!(raw.refusal().0, Status::Protocol);
    peer.unharmed();
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn messages_out_of_turn_are_refused_by_name() {
    let peer = Witness::new(72, &[]);
    let ack = |generation| TableAck { generation }.encode();
    let (table_ack, request) = (FrameType::RailsTableAck, FrameType::RailsRequest);
    peer.refused("a second request", request, &Request.encode(), &["Request", "Connect"]);
    peer.refused("an early acknowledgement", table_ack, &ack(1), &["TableAck", "Connect"]);
    let offer = vec![0; 136];
    peer.refused("a peer's message", FrameType::RailsOffer, &offer, &["RailsOffer"]);
    let body = connect_to(vec![rail(0, [10, 1, 0, 1], 2)]);
    let early = |frame, body: &[u8]| {
        let mut raw = Raw::attached(&peer.peer.address(), 9, peer.tier.manifest());
        raw.send_frame(frame, body);
        raw.refusal()
    };
    let (_, text) = early(FrameType::RailsConnect, &body);
    assert!(text.contains("Connect") && text.contains("Request"), "{text}");
    peer.unharmed();
    for generation in [0, 2, u64::MAX] {
        let mut raw = connected(&peer, &body);
        rail_client::acknowledge(&mut raw, generation);
        let (_, text) = raw.refusal();
        assert!(text.contains(&generation.to_string()), "{text}");
        peer.unharmed();
    }
    let mut raw = connected(&peer, &body);
    raw.send_frame(FrameType::RailsConnect, &body);
    let (_, text) = raw.refusal();
    println!("a second connect: {text}");
    assert!(text.contains("Connect"), "{text}");
    peer.unharmed();
}

/// A client whose queue pairs the peer has connected, to ends that do not exist.
fn connected(peer: &Witness, body: &[u8]) -> Raw {
    let mut raw = peer.offered();
    raw.send_frame(FrameType::RailsConnect, body);
    for due in [FrameType::RailsConnected, FrameType::RailsTable] {
        assert_eq!(raw.read().expect("the peer's answers").0.frame, due);
    }
    wait_queue_pairs(&peer.peer, 6);
    raw
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn half_a_message_costs_the_handshakes_bound() {
    let peer = Witness::new(73, &["--handshake-ms", "500"]);
    let body = connect_to(vec![rail(0, [10, 1, 0, 1], 2)]);
    let mut raw = peer.offered();
    let header = FrameHeader::control(FrameType::RailsConnect, body.len() as u64).encode();
    raw.send(&[&header[..], &body[..20]].concat());
    assert_eq!(raw.rest(), 0);
    drop(raw);
    peer.unharmed();
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn queue_pairs_go_with_a_client_that_leaves_at_any_point() {
    let peer = Witness::new(74, &[]);
    let body = connect_to(vec![rail(0, [10, 1, 0, 1], 2)]);
    for _ in 0..20 {
        drop(peer.offered());
        drop(connected(&peer, &body));
        let mut raw = connected(&peer, &body);
        rail_client::acknowledge(&mut raw, 1);
        drop(raw);
        wait_queue_pairs(&peer.peer, 4);
    }
    peer.unharmed();
}

/// What a client that keeps to the handshake and then does as it likes gets to see.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn published_memory_can_be_read_and_not_written() {
    let peer = Witness::new(75, &[]);
    let mut raw = peer.offered();
    let (mut side, table) = rail_client::reader(&mut raw);
    let layer = &table.layers()[0];
    let mine = pages(4096);
    let region = side.register(&mine, Access::LocalWrite);
    let address = layer.columns[0].base + u64::from(layer.slots[0]) * layer.slot_stride;
    let remote = Remote { address, rkey: layer.columns[0].rkey };
    let block = || Block::new(&mine, 0, 64);
    // The first record, header first: the queue pair works, and the place is what it is taken for.
    let read = Post::read(block(), &region, remote, Signal::Yes).unwrap();
    side.queue_pair.post(&mut vec![read]).unwrap();
    assert_eq!(side.drain(BOUND)[0].1, Ok(()));
    assert_eq!(mine.bytes(0, 8), *b"MTRLEXPR");
    mine.fill(0x5a);
    let write = Post::write(block(), &region, remote, Signal::Yes).unwrap();
    side.queue_pair.post(&mut vec![write]).unwrap();
    let refused = side.drain(BOUND)[0].1.expect_err("a WRITE to published memory");
    println!("the WRITE ended as {refused}");
    // Queue pair and registration each refuse it, and one would hide that the other does not. The
    // device asks the queue pair first; a refusal of the registration's would be `RemoteAccess`
    // (gpu-sys's guest tests show both).
    assert_eq!(refused.status, WorkStatus::RemoteInvalidRequest, "{refused}");
    drop((side, raw));
    peer.unharmed();
    let (arena, key) = (small_arena(1), keys(&peer.tier)[0]);
    assert_right(&peer.store, key, &fetch(&peer.tier, &arena, key).expect("as it was"));
}
