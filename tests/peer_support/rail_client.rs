//! The rails' handshake by hand, for clients that then do what [`VerbsTier`] never would. They are on
//! the near ends of the cables, the peer on the far ones.
//!
//! [`VerbsTier`]: expert_tier::verbs::VerbsTier

#![allow(dead_code, reason = "each test program uses its own part of this module")]

use std::net::Ipv4Addr;

use expert_tier::store::manifest::Manifest;
use expert_tier::wire::frame::FrameType;
use gpu_sys::verbs::{
    self, CompletionQueue, Destination, PreparedQueuePair, QueuePair, QueuePairOptions,
    RemoteAccess, RemoteEnd,
};
use railset::facts::{Gid, Mtu};
use railset::message::{
    Connect, ConnectRail, Connected, Offer, Psn, Qpn, QueuePairEnd, Request, TableAck,
};
use railset::table::Table;

use crate::peer_support::raw::Raw;
use crate::verbs_support::{Block, End, Side, local_end};

/// A queue pair that is not connected, and the number of the first packet that it will send.
pub(crate) type Prepared = (PreparedQueuePair<Block>, u32);

/// Attaches as client `id` and has the rails offered.
pub(crate) fn offered(peer: &str, id: u8, manifest: &Manifest) -> (Raw, Offer) {
    let mut raw = Raw::attached(peer, id, manifest);
    raw.send_frame(FrameType::RailsRequest, &Request.encode());
    let offer = Offer::decode(&body(&mut raw, FrameType::RailsOffer)).unwrap();
    (raw, offer)
}

/// What to ask for on rail `index`, from a port with the address `gid`.
pub(crate) fn rail(index: u8, gid: [u8; 16], queue_pairs: Vec<QueuePairEnd>) -> ConnectRail {
    ConnectRail {
        index,
        node_guid: 0x1234 + u64::from(index),
        port: 1,
        gid: Gid(gid),
        lid: 0,
        mtu: Mtu::B4096,
        depth: 4,
        queue_pairs,
        push: false,
    }
}

/// Connects `prepared` with the peer's, on `rail` alone.
pub(crate) fn connect<const N: usize>(
    raw: &mut Raw,
    rail: ConnectRail,
    prepared: [Prepared; N],
) -> ([QueuePair<Block>; N], Table) {
    let ours = |(prepared, psn): &Prepared| QueuePairEnd {
        qpn: Qpn::new(prepared.number()).unwrap(),
        psn: Psn::from_random(*psn),
    };
    let queue_pairs = prepared.iter().map(ours).collect();
    let rails = vec![ConnectRail { queue_pairs, ..rail }];
    raw.send_frame(FrameType::RailsConnect, &Connect { rails }.encode());
    let connected = Connected::decode(&body(raw, FrameType::RailsConnected)).unwrap();
    let table = table(raw);
    let rail = &connected.rails[0];
    let mut theirs = rail.queue_pairs.iter();
    let up = |(prepared, psn): Prepared| {
        let theirs = theirs.next().expect("as many queue pairs as were asked for");
        let gid = Ipv4Addr::new(10, rail.index + 1, 0, 2).to_ipv6_mapped().octets();
        let remote = RemoteEnd {
            queue_pair: theirs.qpn.value(),
            psn: verbs::Psn::new(theirs.psn.value()),
            destination: Destination::Ethernet { gid },
            mtu: verbs::Mtu::from_wire(rail.mtu.wire()).unwrap(),
            max_dest_rd_atomic: rail.depth,
        };
        prepared.connect(&remote, &local_end(verbs::Psn::new(psn))).unwrap()
    };
    (prepared.map(up), table)
}

/// Connects a queue pair for READs on rail 0.
pub(crate) fn reader(raw: &mut Raw) -> (Side, Table) {
    let end = End::open("rxe0");
    let queue = CompletionQueue::new(end.context(), 16).unwrap();
    let options = QueuePairOptions {
        port: 1,
        send_wr: 16,
        recv_wr: 0,
        recv_bytes: 0,
        inline_bytes: 0,
        remote_access: RemoteAccess::None,
    };
    let prepared = end.prepare(&queue, options);
    let ([queue_pair], table) = connect(raw, rail(0, end.gid(), vec![]), [(prepared, 7)]);
    (Side { queue_pair, queue, domain: end.domain, completions: 0 }, table)
}

/// Says that no table older than that of `generation` is used any more.
pub(crate) fn acknowledge(raw: &mut Raw, generation: u64) {
    raw.send_frame(FrameType::RailsTableAck, &TableAck { generation }.encode());
}

/// The table that must come next.
pub(crate) fn table(raw: &mut Raw) -> Table {
    Table::decode(&body(raw, FrameType::RailsTable)).unwrap()
}

fn body(raw: &mut Raw, due: FrameType) -> Vec<u8> {
    let (header, body) = raw.read().unwrap_or_else(|error| panic!("no {due:?} came: {error}"));
    assert_eq!(header.frame, due, "{}", String::from_utf8_lossy(&body));
    body
}
