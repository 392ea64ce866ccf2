//! Ends that say what they must not.

use std::sync::Arc;

use railset::facts::Mtu;
use railset::handshake::HandshakeError;
use railset::handshake::client::{ClientAction, ClientRails, ClientSettings, ClientWaits};
use railset::handshake::peer::{PeerAction, PeerHandshake, PeerRails, PeerWaits};
use railset::message::{
    Connect, ConnectRail, Connected, Damaged, Kind, Offer, Psn, Qpn, QueuePairEnd, Request,
    TableAck, Usage, UsageEntry,
};
use railset::table::{LayerTable, Table, TableError};

use crate::world::{World, gid, peer_specs, shapes, table};

fn ends(count: u32) -> Vec<QueuePairEnd> {
    let psn = Psn::new(0).unwrap();
    (2..2 + count).map(|qpn| QueuePairEnd { qpn: Qpn::new(qpn).unwrap(), psn }).collect()
}

fn rails() -> PeerRails {
    PeerRails::new(&peer_specs(), 8, 2, 3, 8192, None)
}

/// A client up to its `Connect`, and that message.
fn connecting() -> (ClientRails, Connect) {
    let world = World::new();
    let (mut client, _) = ClientRails::start(ClientSettings::default(), shapes());
    client.on_message(Kind::Offer, &rails().offer().encode()).unwrap();
    client.on_routes(&world.devices, &[None, None]).unwrap();
    let actions = client.on_created(&[ends(2), ends(2)]).unwrap();
    let [ClientAction::Send(Kind::Connect, body)] = &actions[..] else { panic!("{actions:?}") };
    (client, Connect::decode(body).unwrap())
}

fn offered(change: impl FnOnce(&mut Offer)) -> HandshakeError {
    let mut offer = rails().offer().clone();
    change(&mut offer);
    let (mut client, _) = ClientRails::start(ClientSettings::default(), shapes());
    let error = client.on_message(Kind::Offer, &offer.encode()).unwrap_err();
    assert_eq!(client.waits_for(), ClientWaits::Failed);
    error
}

#[test]
fn an_offer_that_cannot_serve_this_client_is_refused() {
    let error = offered(|offer| offer.rails[1].index = 0);
    assert_eq!(error, HandshakeError::OfferedTwice { index: 0 });
    let error = offered(|offer| offer.layers = 3);
    let layers = TableError::Layers { found: 3, expected: 2 };
    assert_eq!(error, HandshakeError::Table(layers));
    let error = offered(|offer| offer.slot_bytes = 7999);
    assert_eq!(error, HandshakeError::SlotTooSmall { found: 7999, layer: 0, record_bytes: 8000 });
    let error = offered(|offer| offer.rails.clear());
    assert!(error.to_string().contains("the Offer message: number of rails is 0"), "{error}");
}

#[test]
fn an_offered_address_that_cannot_be_reached_is_refused() {
    let world = World::new();
    for address in ["fe80::2", "::", "ff02::1", "::ffff:127.0.0.1", "::ffff:255.255.255.255"] {
        let mut offer = rails().offer().clone();
        offer.rails.truncate(1);
        offer.rails[0].gid = gid(address);
        let (mut client, _) = ClientRails::start(ClientSettings::default(), shapes());
        client.on_message(Kind::Offer, &offer.encode()).unwrap();
        let error = client.on_routes(&world.devices, &[None]).unwrap_err();
        assert!(error.to_string().contains("no other machine can answer"), "{error}");
    }
}

/// The answer that is due to a `Connect`.
fn answer(connect: &Connect) -> Connected {
    let rail = |rail: &ConnectRail| railset::message::ConnectedRail {
        index: rail.index,
        mtu: Mtu::B1024,
        depth: 16,
        queue_pairs: ends(2),
    };
    Connected { rails: connect.rails.iter().map(rail).collect() }
}

fn answered(change: impl FnOnce(&mut Connected)) -> HandshakeError {
    let (mut client, connect) = connecting();
    let mut connected = answer(&connect);
    change(&mut connected);
    client.on_message(Kind::Connected, &connected.encode()).unwrap_err()
}

#[test]
fn an_answer_that_does_not_fit_the_connect_is_refused() {
    let error = answered(|connected| connected.rails[1].queue_pairs.truncate(1));
    assert_eq!(error, HandshakeError::QueuePairs { index: 1, found: 1, expected: 2 });
    let error = answered(|connected| connected.rails.truncate(1));
    assert_eq!(error, HandshakeError::OtherRails { found: vec![0], expected: vec![0, 1] });
    let error = answered(|connected| connected.rails.swap(0, 1));
    assert_eq!(error, HandshakeError::OtherRails { found: vec![1, 0], expected: vec![0, 1] });
    let error = answered(|connected| connected.rails[0].mtu = Mtu::B2048);
    let (found, most) = (Mtu::B2048, Mtu::B1024);
    assert_eq!(error, HandshakeError::MtuTooLarge { index: 0, found, most });
    let error = answered(|connected| connected.rails[1].depth = 17);
    assert_eq!(error, HandshakeError::DepthTooLarge { index: 1, found: 17, most: 16 });
}

#[test]
fn a_table_that_comes_before_the_queue_pairs_are_up_waits_for_them() {
    let (mut client, connect) = connecting();
    client.on_message(Kind::Connected, &answer(&connect).encode()).unwrap();
    assert_eq!(client.on_message(Kind::Table, &table(3).encode()), Ok(Vec::new()));
    assert_eq!((client.waits_for(), client.table()), (ClientWaits::Up, None));
    let actions = client.on_up().unwrap();
    let is_ready = matches!(&actions[..], [ClientAction::Ready(_), ClientAction::Send(..)]);
    assert!(is_ready && client.table().is_some(), "{actions:?}");
    let (mut client, connect) = connecting();
    client.on_message(Kind::Connected, &answer(&connect).encode()).unwrap();
    client.on_message(Kind::Table, &table(3).encode()).unwrap();
    client.on_message(Kind::Table, &table(4).encode()).unwrap();
    let ack = ClientAction::Send(Kind::TableAck, TableAck { generation: 4 }.encode());
    assert_eq!(client.on_up().unwrap()[1], ack, "the newest stands for both");
    let (mut client, connect) = connecting();
    client.on_message(Kind::Connected, &answer(&connect).encode()).unwrap();
    client.on_message(Kind::Table, &table(3).encode()).unwrap();
    let error = client.on_message(Kind::Table, &table(3).encode()).unwrap_err();
    assert_eq!(error, HandshakeError::OldTable { found: 3, current: 3 });
}

#[test]
fn an_mtu_of_zero_is_no_mtu() {
    let (mut client, _) = connecting();
    let connected = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
    let error = client.on_message(Kind::Connected, &connected).unwrap_err().to_string();
    assert!(error.contains("path MTU number 0 does not exist"), "{error}");
}

/// What a peer in the state before `Connect` says of one.
fn connected(change: impl FnOnce(&mut Connect)) -> HandshakeError {
    let (_, mut connect) = connecting();
    change(&mut connect);
    let mut peer = PeerHandshake::new(Arc::new(rails()));
    peer.on_message(Kind::Request, &Request.encode()).unwrap();
    let error = peer.on_message(Kind::Connect, &connect.encode()).unwrap_err();
    assert_eq!(peer.waits_for(), PeerWaits::Failed);
    error
}

#[test]
fn a_client_gets_no_more_than_it_was_offered() {
    let error = connected(|connect| connect.rails[0].queue_pairs = ends(9));
    assert_eq!(error, HandshakeError::TooManyQueuePairs { index: 0, found: 9, most: 8 });
    let error = connected(|connect| connect.rails[1].index = 2);
    assert_eq!(error, HandshakeError::NotOffered { index: 2, offered: 2 });
    let error = connected(|connect| connect.rails[1].index = 0);
    assert_eq!(error, HandshakeError::OneRail { first: 0, second: 0 });
    let error = connected(|connect| connect.rails[1].node_guid = connect.rails[0].node_guid);
    assert_eq!(error, HandshakeError::OneRail { first: 0, second: 1 });
    let error = connected(|connect| connect.rails[1].queue_pairs.clear());
    assert!(error.to_string().contains("number of queue pairs is 0"), "{error}");
    for address in ["fd00::1", "fe80::1", "::", "::ffff:127.0.0.1"] {
        let error = connected(|connect| connect.rails[0].gid = gid(address));
        assert!(matches!(error, HandshakeError::Unreachable { index: 0, .. }), "{error}");
    }
}

#[test]
fn a_peer_that_spills_nothing_has_no_queue_pair_for_it() {
    let error = connected(|connect| connect.rails[1].push = true);
    assert_eq!(error, HandshakeError::NothingSpilled { index: 1 });
}

#[test]
fn what_a_client_reports_reaches_the_peer_once_it_has_a_table_and_not_before() {
    let entries = vec![UsageEntry { layer: 7, expert: 2, reads: 3 }];
    let (usage, damaged) = (Usage { entries }, Damaged { layer: 7, expert: 1 });
    for (kind, body) in [(Kind::Usage, usage.encode()), (Kind::Damaged, damaged.encode())] {
        let mut early = PeerHandshake::new(Arc::new(rails()));
        early.on_message(Kind::Request, &Request.encode()).unwrap();
        let error = early.on_message(kind, &body).unwrap_err();
        assert!(matches!(error, HandshakeError::OutOfTurn { .. }), "{error}");
    }
    let mut peer = publishing();
    let told = peer.on_message(Kind::Usage, &usage.encode()).unwrap();
    assert_eq!(told, [PeerAction::Usage(usage)]);
    let told = peer.on_message(Kind::Damaged, &damaged.encode()).unwrap();
    assert_eq!(told, [PeerAction::Damaged(damaged)]);
    let error = peer.on_message(Kind::Usage, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap_err();
    assert!(matches!(error, HandshakeError::Decode { kind: Kind::Usage, .. }), "{error}");
}

/// A peer that has sent its first table.
fn publishing() -> PeerHandshake {
    let (_, connect) = connecting();
    let mut peer = PeerHandshake::new(Arc::new(rails()));
    peer.on_message(Kind::Request, &Request.encode()).unwrap();
    let actions = peer.on_message(Kind::Connect, &connect.encode()).unwrap();
    assert!(matches!(&actions[..], [PeerAction::CreateQueuePairs(rails)] if rails.len() == 2));
    peer.on_created(&[ends(2), ends(2)], &table(3)).unwrap();
    peer
}

#[test]
fn a_message_that_comes_twice_or_too_early_is_refused() {
    let (_, connect) = connecting();
    let mut peer = publishing();
    let error = peer.on_message(Kind::Connect, &connect.encode()).unwrap_err();
    let expected = "the client's TableAck";
    assert_eq!(error, HandshakeError::OutOfTurn { found: Kind::Connect, expected });
    let mut peer = PeerHandshake::new(Arc::new(rails()));
    let error = peer.on_message(Kind::Connect, &connect.encode()).unwrap_err();
    assert!(error.to_string().contains("waiting for the client's Request"), "{error}");
    let mut peer = PeerHandshake::new(Arc::new(rails()));
    peer.on_message(Kind::Request, &Request.encode()).unwrap();
    assert!(peer.on_message(Kind::Request, &Request.encode()).is_err());
    let (mut client, _) = connecting();
    assert!(client.on_message(Kind::Offer, &rails().offer().encode()).is_err());
    let (mut client, _) = connecting();
    let error = client.on_message(Kind::Table, &table(3).encode()).unwrap_err();
    let expected = "the peer's Connected";
    assert_eq!(error, HandshakeError::OutOfTurn { found: Kind::Table, expected });
}

#[test]
fn only_the_table_that_is_due_can_be_acknowledged() {
    let ack = |generation| TableAck { generation }.encode();
    let error = publishing().on_message(Kind::TableAck, &ack(4)).unwrap_err();
    assert_eq!(error, HandshakeError::Acknowledged { found: 4, due: vec![3] });
    let mut peer = publishing();
    let actions = peer.on_message(Kind::TableAck, &ack(3)).unwrap();
    assert_eq!(actions, [PeerAction::Acknowledged(3)]);
    let error = peer.on_message(Kind::TableAck, &ack(3)).unwrap_err();
    assert_eq!(error, HandshakeError::Acknowledged { found: 3, due: Vec::new() });
    let mut peer = publishing();
    peer.update(&table(4)).unwrap();
    peer.update(&table(6)).unwrap();
    peer.on_message(Kind::TableAck, &ack(4)).unwrap();
    assert_eq!((peer.acknowledged(), peer.waits_for()), (Some(4), PeerWaits::TableAck));
    let error = peer.on_message(Kind::TableAck, &ack(3)).unwrap_err();
    assert_eq!(error, HandshakeError::Acknowledged { found: 3, due: vec![6] });
}

/// What a client that is ready or about to be says of a table.
fn tabled(is_ready: bool, second: &Table) -> HandshakeError {
    let mut world = World::new();
    let mut link = crate::world::Link::default();
    if !is_ready {
        // Everything before the table: it is the last thing that the peer sends.
        link.cut = Some(world_bytes_before_table());
    }
    world.run(link).unwrap();
    let expected = if is_ready { ClientWaits::Nothing } else { ClientWaits::Table };
    assert_eq!(world.client.waits_for(), expected);
    world.client.on_message(Kind::Table, &second.encode()).unwrap_err()
}

fn world_bytes_before_table() -> usize {
    let (_, connect) = connecting();
    let lengths = [
        Request.encode().len(),
        rails().offer().encode().len(),
        connect.encode().len(),
        8 + 2 * (8 + 2 * 8),
    ];
    lengths.iter().map(|length| length + 5).sum()
}

#[test]
fn a_table_of_another_store_is_refused_first_and_later() {
    let mut layers: Vec<LayerTable> = table(9).layers().to_vec();
    layers.pop();
    let short = Table::new(9, layers).unwrap();
    let one_rail = table(9).for_rails(&[0]).unwrap();
    for is_ready in [false, true] {
        let error = tabled(is_ready, &short);
        assert_eq!(error, TableError::Layers { found: 1, expected: 2 }.into());
        let error = tabled(is_ready, &one_rail);
        assert_eq!(error, TableError::Rails { layer: 0, found: 1, expected: 2 }.into());
    }
    let error = tabled(true, &table(3));
    assert_eq!(error, HandshakeError::OldTable { found: 3, current: 3 });
}

#[test]
fn a_driver_that_makes_too_few_queue_pairs_is_told_so() {
    let world = World::new();
    let (mut client, _) = ClientRails::start(ClientSettings::default(), shapes());
    client.on_message(Kind::Offer, &rails().offer().encode()).unwrap();
    client.on_routes(&world.devices, &[None, None]).unwrap();
    let error = client.on_created(&[ends(2), ends(1)]).unwrap_err();
    assert_eq!(error, HandshakeError::Made { what: "queue pairs", found: 1, expected: 2 });
    let (_, connect) = connecting();
    let mut peer = PeerHandshake::new(Arc::new(rails()));
    peer.on_message(Kind::Request, &Request.encode()).unwrap();
    peer.on_message(Kind::Connect, &connect.encode()).unwrap();
    let one_rail = table(3).for_rails(&[0]).unwrap();
    let error = peer.on_created(&[ends(2), ends(2)], &one_rail).unwrap_err();
    assert_eq!(error, HandshakeError::Columns { found: 1, expected: 2 });
}
