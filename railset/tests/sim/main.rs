//! Both machines against each other, over a link that delays, cuts up and breaks.
//!
//! Everything is decided by one seed and bounded by a number of steps, so a failure is a seed.

mod hostile;
mod world;

use std::sync::Arc;

use proptest::prelude::*;
use railset::choose::RailIdentity;
use railset::facts::Mtu;
use railset::handshake::client::{Carry, ClientRail, ClientSettings, ClientWaits};
use railset::handshake::peer::{PeerRails, PeerWaits};
use railset::message::{Kind, MAX_QPS_PER_RAIL, SpillTerms, Transfer};
use railset::pairing::{DualRail, FailedPairs, OneRail, OneWanted, RailEnds, RailWishes};

use world::TableStep::{Acknowledges, Uses};
use world::{Link, World, peer_specs, shapes, table};

#[test]
fn two_ends_come_up_on_two_rails_with_the_smaller_mtu_and_depth() {
    let mut world = World::new();
    world.devices[0].ports[0].active_mtu = Mtu::B4096;
    world.devices[1].ports[0].active_mtu = Mtu::B512;
    world.devices[0].initiator_depth = 4;
    world.devices[1].initiator_depth = 200;
    world.run(Link::default()).unwrap();
    world.assert_ready();
    let agreed: Vec<_> = world.client_ups.iter().map(|up| (up.index, up.mtu, up.depth)).collect();
    assert_eq!(agreed, [(0, Mtu::B1024, 4), (1, Mtu::B512, 16)]);
    let theirs: Vec<_> = world.peer_ups.iter().map(|up| (up.index, up.mtu, up.depth)).collect();
    assert_eq!(theirs, agreed, "both ends agree");
    assert_eq!(world.peer.rails(), [0, 1]);
    let rails = world.client.rails().iter();
    let rails: Vec<_> = rails.map(|rail| (rail.pair.offered.index, rail.queue_pairs)).collect();
    assert_eq!(rails, [(0, 2), (1, 2)]);
    let place = world.client.table().unwrap().place(1, 2, 1).unwrap();
    assert_eq!((place.address, place.rkey), (0x2000_0000 + 3 * 8192, 21));
}

#[test]
fn each_end_connects_to_the_other_ends_numbers() {
    let mut world = World::new();
    world.settings(ClientSettings { queue_pairs: 4, ..ClientSettings::default() });
    world.run(Link::default()).unwrap();
    for rail in 0..2 {
        assert_eq!(world.client_ups[rail].remote, world.peer_ends[rail]);
        assert_eq!(world.peer_ups[rail].remote, world.client_ends[rail]);
        assert_eq!(world.peer_ends[rail].len(), 4);
    }
}

#[test]
fn a_peer_that_spills_gets_one_more_queue_pair_on_each_rail() {
    for transfer in [Transfer::Push, Transfer::Stage] {
        let terms = SpillTerms { transfer, credits: 32, range_bytes: 1 << 20 };
        let rails = PeerRails::new(&peer_specs(), 8, 2, 3, 8192, Some(terms));
        let mut world = World::with_rails(Arc::new(rails));
        world.run(Link::default()).unwrap();
        world.assert_ready();
        assert_eq!(world.client.spill(), Some(terms));
        for rail in 0..2 {
            assert_eq!(world.client_ends[rail].len(), 3, "two for READs, one for spilled experts");
            assert_eq!(world.client_ups[rail].remote, world.peer_ends[rail]);
        }
        assert_eq!(world.peer_pushes, [Some(terms), Some(terms)]);
        assert_eq!(world.client_pushes, world.peer_pushes);
    }
}

#[test]
fn a_client_that_may_have_one_queue_pair_has_it_for_reads() {
    let terms = SpillTerms { transfer: Transfer::Push, credits: 32, range_bytes: 1 << 20 };
    let rails = PeerRails::new(&peer_specs(), 1, 2, 3, 8192, Some(terms));
    let mut world = World::with_rails(Arc::new(rails));
    world.run(Link::default()).unwrap();
    world.assert_ready();
    assert_eq!((world.client_ends[0].len(), &world.peer_pushes[..]), (1, &[None, None][..]));
    assert_eq!(world.client_pushes, [None, None]);
}

#[test]
fn a_client_takes_as_many_queue_pairs_as_the_peer_allows() {
    let mut world = World::new();
    let queue_pairs = MAX_QPS_PER_RAIL as u8;
    world.settings(ClientSettings { queue_pairs, ..ClientSettings::default() });
    world.run(Link::default()).unwrap();
    world.assert_ready();
    assert_eq!(world.client_ends[0].len(), 8);
}

#[test]
fn a_depth_that_the_user_set_bounds_both_ends() {
    let mut world = World::new();
    world.settings(ClientSettings { depth: 3, ..ClientSettings::default() });
    world.run(Link::default()).unwrap();
    assert_eq!([world.client_ups[0].depth, world.peer_ups[0].depth], [3, 3]);
}

#[test]
fn one_rail_is_enough_and_gets_its_own_columns() {
    let mut world = World::new();
    let wishes = RailWishes {
        dual: DualRail::One,
        rails: ["rxe1".parse().unwrap(), railset::choose::Wish::default()],
    };
    world.settings(ClientSettings { wishes, ..ClientSettings::default() });
    world.run(Link::default()).unwrap();
    world.assert_ready();
    assert_eq!(world.peer.rails(), [1]);
    assert_eq!(world.client.one_rail(), Some(&OneRail::Wished));
    let table = world.client.table().unwrap();
    assert_eq!(table.place(0, 0, 0).unwrap().rkey, 20, "the second offered rail's key");
    assert_eq!(table.place(0, 0, 1), None);
}

#[test]
fn slots_that_hold_the_largest_record_and_not_a_byte_more_are_taken() {
    let record_bytes = shapes()[0].record_bytes;
    let rails = PeerRails::new(&peer_specs(), 8, 2, 3, record_bytes, None);
    let mut world = World::with_rails(Arc::new(rails));
    world.run(Link::default()).unwrap();
    world.assert_ready();
}

/// The rails of a first connection, up and carrying.
fn up() -> Vec<RailEnds> {
    let mut world = World::new();
    world.run(Link::default()).unwrap();
    let ends = |rail: &ClientRail| RailEnds {
        local: rail.pair.local.spec.identity(),
        peer: rail.pair.offered.identity(),
    };
    world.client.rails().iter().map(ends).collect()
}

/// The client's and the peer's end of the one rail that a connection beside `up` carries.
fn beside(up: &[RailEnds], change: impl FnOnce(&mut World)) -> Result<(String, u8), String> {
    let mut world = World::new();
    change(&mut world);
    let wanted = OneWanted { rail_index: 1, taken: up.to_vec(), failed: FailedPairs::default() };
    let carry = Carry::One(wanted);
    world.settings(ClientSettings { carry, ..ClientSettings::default() });
    world.run(Link::default()).map_err(|error| error.to_string())?;
    world.assert_ready();
    let [rail] = world.client.rails() else { panic!("one rail") };
    Ok((rail.pair.local.spec.device.clone(), rail.pair.offered.index))
}

#[test]
fn a_second_connection_carries_the_rail_that_the_first_one_does_not() {
    let up = up();
    assert_eq!(beside(&up[..1], |_| ()), Ok(("rxe1".into(), 1)));
    assert_eq!(beside(&up[1..], |_| ()), Ok(("rxe0".into(), 0)));
    let error = beside(&up, |_| ()).unwrap_err();
    assert!(error.contains("the peer offers one"), "{error}");
}

#[test]
fn a_second_connection_leaves_from_no_port_that_the_first_one_uses() {
    // The first one goes from rxe0 to the peer's second rail, so its first is free. The way there
    // would be from rxe0.
    let up = up();
    let crossed = |local| [RailEnds { local, peer: up[1].peer }];
    let local = up[0].local;
    assert_eq!(beside(&crossed(local), |_| ()), Ok(("rxe1".into(), 0)));
    // The same port by another of its addresses, and the same address by another device's port.
    let other_gid = RailIdentity { gid: world::gid("::ffff:10.9.0.1"), ..local };
    let other_port = RailIdentity { node_guid: 77, ..local };
    for local in [other_gid, other_port] {
        assert_eq!(beside(&crossed(local), |_| ()), Ok(("rxe1".into(), 0)), "{local:?}");
    }
    // One that uses nothing of this host's any more bars no port.
    let gone = RailIdentity { node_guid: 77, gid: world::gid("::ffff:10.9.0.1"), ..local };
    assert_eq!(beside(&crossed(gone), |_| ()), Ok(("rxe0".into(), 0)));
}

#[test]
fn ports_of_devices_without_a_guid_are_not_taken_for_one() {
    let up = up();
    let nameless = RailIdentity { node_guid: 0, ..up[0].local };
    let taken = [RailEnds { local: nameless, peer: up[0].peer }];
    let without_guids = |world: &mut World| {
        world.devices.iter_mut().for_each(|device| device.node_guid = 0);
    };
    assert_eq!(beside(&taken, without_guids), Ok(("rxe1".into(), 1)));
}

#[test]
fn newer_tables_are_taken_up_in_order_and_acknowledged() {
    let mut world = World::new();
    assert_eq!(world.peer.update(&table(4)), Ok(Vec::new()), "nobody has a table yet");
    world.run(Link::default()).unwrap();
    for generation in [5, 9, 10] {
        let actions = world.peer.update(&table(generation)).unwrap();
        world.peer_does(actions).unwrap();
    }
    assert_eq!(world.peer.waits_for(), PeerWaits::TableAck);
    world.run(Link::default()).unwrap();
    world.assert_ready();
    assert_eq!(world.client.table().unwrap().generation(), 10);
    assert_eq!(world.peer.acknowledged(), Some(10));
    assert_eq!(world.acknowledged, [3, 5, 9, 10]);
    let each = |generation| [Uses(generation), Acknowledges(generation)];
    assert_eq!(world.client_tables, [3, 5, 9, 10].map(each).concat(), "each in use before its ack");
    let error = world.peer.update(&table(10)).unwrap_err().to_string();
    assert!(error.contains("generation 10 follows one of generation 10"), "{error}");
}

/// Both ways to the first table: the peer sends it right behind `Connected`, so it is there before or
/// after the client's queue pairs are up.
#[test]
fn no_table_is_acknowledged_before_it_is_in_use() {
    // Here the client is up before it hears of the table.
    let mut world = World::new();
    world.run(Link::default()).unwrap();
    assert_eq!(world.client_tables, [Uses(3), Acknowledges(3)]);

    // Here the table comes while the driver still connects the queue pairs.
    let mut world = World::new();
    world.hold_up();
    world.run(Link::default()).unwrap();
    assert_eq!(world.client.waits_for(), ClientWaits::Up);
    assert_eq!(world.client_tables, [], "nothing is said of a table that nobody can use yet");
    let actions = world.client.on_up().unwrap();
    world.client_does(actions).unwrap();
    assert_eq!(world.client_tables, [Uses(3), Acknowledges(3)]);
    world.run(Link::default()).unwrap();
    world.assert_ready();
    assert_eq!(world.acknowledged, [3]);
}

#[test]
fn a_client_that_never_acknowledges_is_given_up() {
    let mut world = World::new();
    world.run(Link::default()).unwrap();
    let mut generation = 3;
    let error = loop {
        generation += 1;
        assert!(generation < 1000, "bounded");
        if let Err(error) = world.peer.update(&table(generation)) {
            break error.to_string();
        }
    };
    assert!(error.contains("has not acknowledged the last 64 tables"), "{error}");
    assert_eq!(world.peer.waits_for(), PeerWaits::Failed);
}

#[test]
fn a_link_that_breaks_leaves_both_ends_waiting_for_something_named() {
    let total = {
        let mut world = World::new();
        world.run(Link::default()).unwrap();
        world.carried
    };
    let mut seen = Vec::new();
    for cut in 0..total {
        let mut world = World::new();
        world.run(Link { cut: Some(cut), ..Link::default() }).unwrap();
        let waits = (world.client.waits_for(), world.peer.waits_for());
        assert!(!world.is_ready(), "cut after {cut} of {total} bytes");
        assert_ne!(waits.0, ClientWaits::Failed);
        assert_ne!(waits.1, PeerWaits::Failed);
        if !seen.contains(&waits) {
            seen.push(waits);
        }
    }
    let stages = [
        (ClientWaits::Offer, PeerWaits::Request),
        (ClientWaits::Offer, PeerWaits::Connect),
        (ClientWaits::Connected, PeerWaits::Connect),
        (ClientWaits::Connected, PeerWaits::TableAck),
        (ClientWaits::Table, PeerWaits::TableAck),
        (ClientWaits::Nothing, PeerWaits::TableAck),
    ];
    assert_eq!(seen, stages);
    assert_eq!(ClientWaits::Connected.name(), "the peer's Connected");
}

proptest! {
    #[test]
    fn any_delay_and_any_cutting_up_gives_the_same_end(seed: u64) {
        let mut world = World::new();
        world.run(Link { seed: Some(seed), ..Link::default() }).unwrap();
        world.assert_ready();
        prop_assert_eq!(&world.client_ups[1].remote, &world.peer_ends[1]);
    }

    #[test]
    fn no_byte_changed_on_the_way_makes_either_end_panic(at in 0_usize..2000, value: u8) {
        let mut world = World::new();
        let _ = world.run(Link { change: Some((at, value)), ..Link::default() });
        if let Some(table) = world.client.table() {
            for (layer, shape) in shapes().iter().enumerate() {
                for expert in 0..shape.experts {
                    let _ = table.place(layer, expert, 1);
                }
            }
        }
    }

    #[test]
    fn random_messages_at_any_stage_are_refused_or_harmless(
        stop in 0_usize..900,
        kind in 0_usize..6,
        body in proptest::collection::vec(any::<u8>(), 0..300),
        is_client: bool,
    ) {
        let mut world = World::new();
        world.run(Link { cut: Some(stop), ..Link::default() }).unwrap();
        let kind = Kind::ALL[kind];
        if is_client {
            let _ = world.client.on_message(kind, &body);
        } else {
            let _ = world.peer.on_message(kind, &body);
        }
    }
}

#[test]
fn a_failed_machine_takes_nothing_more() {
    let mut world = World::new();
    world.client.on_message(Kind::Table, &[]).unwrap_err();
    world.peer.on_message(Kind::Table, &[]).unwrap_err();
    assert_eq!(world.client.waits_for(), ClientWaits::Failed);
    let error = world.client.on_message(Kind::Offer, &[]).unwrap_err().to_string();
    assert!(error.contains("the handshake has failed"), "{error}");
    let error = world.client.on_up().unwrap_err().to_string();
    assert!(error.contains("on_up was called"), "{error}");
    let error = world.peer.on_created(&[], &table(3)).unwrap_err().to_string();
    assert!(error.contains("on_created was called"), "{error}");
    assert!(world.peer.update(&table(3)).is_err());
}

#[test]
fn one_offer_serves_many_clients() {
    let mut first = World::new();
    let mut second = World::with_rails(Arc::clone(&first.rails));
    first.run(Link::default()).unwrap();
    second.run(Link::default()).unwrap();
    first.assert_ready();
    second.assert_ready();
}
