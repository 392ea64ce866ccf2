//! Hosts made up for one rule each.

use super::*;
use crate::facts::{GidKind, LinkLayer, PortState};
use crate::testing::{device, ethernet, gid, infiniband, roce, via};

/// A RoCE port as Linux shows it: link-local and IPv4, each as RoCEv1 and RoCEv2.
fn usual() -> Vec<DeviceFacts> {
    let mut port = ethernet(1, &["fe80::1", "fe80::1", "::ffff:10.1.0.1", "::ffff:10.1.0.1"]);
    port.gids[0].kind = GidKind::RoceV1;
    port.gids[2].kind = GidKind::RoceV1;
    vec![device("mlx5_0", 1, vec![port])]
}

fn two() -> Vec<DeviceFacts> {
    vec![
        device("rxe0", 1, vec![roce("v0", &["fe80::1", "::ffff:10.1.0.1"])]),
        device("rxe1", 2, vec![roce("v1", &["fe80::2", "::ffff:10.2.0.1"])]),
    ]
}

fn roce_peer(address: &str) -> Target {
    Target { link_layer: LinkLayer::Ethernet, gid: gid(address), lid: 0 }
}

fn wish(text: &str) -> Wish {
    text.parse().unwrap()
}

fn chosen(devices: &[DeviceFacts], wish: &Wish, peer: &str, source: Option<&str>) -> Choice {
    let (target, route) = (roce_peer(peer), source.map(via));
    choose(devices, Asker::Rail1, wish, Some(&target), route.as_ref()).unwrap()
}

fn refused(devices: &[DeviceFacts], wish: &Wish, asker: Asker) -> ChooseError {
    choose(devices, asker, wish, Some(&roce_peer("::ffff:10.1.0.2")), None).unwrap_err()
}

#[test]
fn the_routable_rocev2_address_is_taken_and_never_a_fixed_index() {
    let choice = chosen(&usual(), &Wish::default(), "::ffff:10.1.0.2", None);
    assert_eq!((choice.spec.gid_index, choice.spec.gid), (3, gid("::ffff:10.1.0.1")));
    let reasons: Vec<_> = choice.explanation.passed.iter().map(|p| p.reason.clone()).collect();
    let v1 = Reason::NotRoceV2(GidKind::RoceV1);
    assert_eq!(reasons, [v1.clone(), Reason::LinkLocal, v1]);
    let moved = vec![device("a", 1, vec![roce("v0", &["::ffff:10.1.0.1", "fe80::1"])])];
    assert_eq!(chosen(&moved, &Wish::default(), "::ffff:10.1.0.2", None).spec.gid_index, 0);
}

#[test]
fn the_address_of_the_route_is_preferred_then_its_interface() {
    let choice = chosen(&two(), &Wish::default(), "::ffff:10.2.0.2", Some("10.2.0.1"));
    assert_eq!((&*choice.spec.device, choice.explanation.routed), ("rxe1", Routed::Source));
    let choice = chosen(&two(), &Wish::default(), "::ffff:10.2.0.2", None);
    assert_eq!((&*choice.spec.device, choice.explanation.routed), ("rxe0", Routed::Unknown));
    // The source is there as RoCEv1 only; another address of that interface is next best.
    let mut devices = two();
    devices[1].ports[0] = roce("v1", &["::ffff:10.2.0.1", "::ffff:10.9.0.1"]);
    devices[1].ports[0].gids[0].kind = GidKind::RoceV1;
    let choice = chosen(&devices, &Wish::default(), "::ffff:10.2.0.2", Some("10.2.0.1"));
    assert_eq!((&*choice.spec.device, choice.spec.gid_index), ("rxe1", 1));
    assert_eq!(choice.explanation.routed, Routed::Netdev);
}

/// A VLAN above the port's interface has the same address, and its row comes first.
#[test]
fn an_address_that_is_there_twice_is_taken_on_the_routes_own_interface() {
    let mut port = roce("v0", &["fe80::1", "::ffff:10.1.0.1", "::ffff:10.1.0.1"]);
    port.gids[1].netdev = Some("v0.100".into());
    let devices = vec![device("rxe0", 1, vec![port])];
    let taken = |interface: Option<&str>| {
        let route = KernelRoute { interface: interface.map(Into::into), ..via("10.1.0.1") };
        let peer = roce_peer("::ffff:10.1.0.2");
        let choice = choose(&devices, Asker::Rail1, &wish("rxe0"), Some(&peer), Some(&route));
        let Choice { spec, explanation } = choice.unwrap();
        (spec.gid_index, explanation.routed)
    };
    assert_eq!(taken(Some("v0")), (2, Routed::Source));
    assert_eq!(taken(Some("v0.100")), (1, Routed::Source));
    assert_eq!(taken(None), (1, Routed::Source), "a kernel that says no more");
    assert_eq!(taken(Some("eth7")), (1, Routed::SourceElsewhere));
}

#[test]
fn a_wish_may_name_an_interface_and_a_devices_name_goes_first() {
    let mut port = roce("v0", &["::ffff:10.1.0.1", "::ffff:10.9.0.1"]);
    port.gids[0].netdev = Some("v0.100".into());
    let mut devices = two();
    devices[0].ports[0] = port;
    let taken = |devices: &[DeviceFacts], name| {
        let choice = chosen(devices, &wish(name), "::ffff:10.7.0.2", None);
        (choice.spec.device, choice.spec.gid_index)
    };
    assert_eq!(taken(&devices, "v1"), ("rxe1".into(), 1));
    assert_eq!(taken(&devices, "v0"), ("rxe0".into(), 1), "the row of that interface");
    assert_eq!(taken(&devices, "v0.100"), ("rxe0".into(), 0));
    assert_eq!(taken(&devices, "v1:1"), ("rxe1".into(), 1));
    devices[1].name = "v0".into();
    assert_eq!(taken(&devices, "v0"), ("v0".into(), 1), "a device of that name");
    // An interface without an address is known by its device.
    devices[1].ports[0].state = PortState::Down;
    devices[1].ports[0].gids.clear();
    devices[1].interfaces.push("ib0".into());
    let error = refused(&devices, &wish("ib0"), Asker::Peer).to_string();
    assert!(error.contains("\"ib0\", whose port is not active: v0 port 1"), "{error}");
    let error = refused(&devices, &wish("ib1"), Asker::Peer).to_string();
    assert!(error.contains("there are: rxe0 (v0, v0.100); v0 (ib0)"), "{error}");
}

#[test]
fn a_route_that_leaves_elsewhere_is_said_aloud() {
    let choice = chosen(&two(), &Wish::default(), "::ffff:10.7.0.2", Some("192.168.1.4"));
    assert_eq!(choice.explanation.routed, Routed::Elsewhere);
    assert!(choice.to_string().contains("may be out of reach"), "{choice}");
    let choice = chosen(&two(), &wish("rxe1"), "::ffff:10.1.0.2", Some("10.1.0.1"));
    assert_eq!(choice.explanation.routed, Routed::OtherPort);
}

/// Both ends of a cable on one host: a lost route leads from the peer's address to itself.
#[test]
fn a_port_with_the_peers_own_address_is_the_last_resort_and_said_to_be() {
    let mut devices = two();
    let own = ["fe80::3", "::ffff:10.1.0.2", "::ffff:10.1.0.9"];
    devices.insert(0, device("rxe0p", 3, vec![roce("v0p", &own)]));
    for source in [Some("10.1.0.2"), Some("10.1.0.9"), Some("192.168.1.4"), None] {
        let choice = chosen(&devices, &Wish::default(), "::ffff:10.1.0.2", source);
        assert_eq!(choice.spec.device, "rxe0", "{source:?}: {choice}");
        assert!(choice.to_string().contains("rxe0p port 1 GID 1"), "{choice}");
        let choice = chosen(&devices, &wish("rxe0p"), "::ffff:10.1.0.2", source);
        assert_eq!(choice.explanation.routed, Routed::PeersOwn);
        assert!(choice.to_string().contains("the address is used twice"), "{choice}");
    }
    let source = Some("10.1.0.2");
    let choice = chosen(&devices[..1], &Wish::default(), "::ffff:10.1.0.2", source);
    assert_eq!(choice.spec.device, "rxe0p", "a peer on this host, which has one port");
}

#[test]
fn the_family_is_the_peers() {
    let devices = vec![device("a", 1, vec![roce("v0", &["::ffff:10.1.0.1", "fd00::1"])])];
    let index = |peer| chosen(&devices, &Wish::default(), peer, None).spec.gid_index;
    assert_eq!((index("::ffff:10.1.0.2"), index("fd00::2")), (0, 1));
    let turned = vec![device("a", 1, vec![roce("v0", &["fd00::1", "::ffff:10.1.0.1"])])];
    let unknown = choose(&turned, Asker::Peer, &Wish::default(), None, None).unwrap();
    assert_eq!(unknown.spec.gid_index, 1, "IPv4 where the peer is not known");
    let only_v6 = vec![device("a", 1, vec![roce("v0", &["fd00::1"])])];
    let error = refused(&only_v6, &Wish::default(), Asker::Rail2).to_string();
    for part in
        ["the peer's address is IPv4", "METRALE_EXPERT_RAIL2_DEV", "METRALE_EXPERT_RAIL2_GID"]
    {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn an_ipv4_link_local_address_is_taken_after_the_others() {
    let port = roce("v0", &["::ffff:169.254.1.1", "::ffff:10.1.0.1"]);
    let mut devices = vec![device("a", 1, vec![port])];
    let index = |devices: &[DeviceFacts], source| {
        chosen(devices, &Wish::default(), "::ffff:10.1.0.2", source).spec.gid_index
    };
    assert_eq!(index(&devices, None), 1);
    assert_eq!(index(&devices, Some("169.254.1.1")), 0, "the route says so");
    devices[0].ports[0].gids.pop();
    assert_eq!(index(&devices, None), 0);
}

#[test]
fn each_way_of_having_no_rail_is_named_with_what_to_do() {
    let nothing = Wish::default();
    let error = refused(&[], &nothing, Asker::Rail1);
    assert_eq!(error, ChooseError::NoDevice);
    assert!(error.to_string().contains("ibv_devices"), "{error}");
    let mut down = two();
    for device in &mut down {
        device.ports[0].state = PortState::Down;
    }
    let error = refused(&down, &nothing, Asker::Rail1);
    assert!(matches!(error, ChooseError::NoActivePort { .. }), "{error}");
    assert!(error.to_string().contains("rxe1 port 1: the port is down"), "{error}");
    let error = refused(&down, &wish("rxe1"), Asker::Peer).to_string();
    assert!(error.contains("--rail DEV[:GID] names \"rxe1\", whose port is not active"), "{error}");
    let link_local = vec![device("a", 1, vec![roce("v0", &["fe80::1"])])];
    let error = refused(&link_local, &nothing, Asker::Rail1);
    assert!(matches!(error, ChooseError::OnlyLinkLocal { .. }), "{error}");
    let empty = vec![device("a", 1, vec![roce("v0", &[])])];
    for wish in [nothing, wish("a"), wish("a:1")] {
        let error = refused(&empty, &wish, Asker::Rail1).to_string();
        assert!(error.contains("GID"), "{error}");
    }
}

#[test]
fn a_wish_is_kept_or_refused_with_what_there_is() {
    let choice = chosen(&two(), &wish("rxe1:1"), "::ffff:10.2.0.2", Some("10.1.0.1"));
    assert_eq!((&*choice.spec.device, choice.spec.gid_index), ("rxe1", 1));
    assert!(choice.to_string().contains("device and GID as wished"), "{choice}");
    let error = refused(&two(), &wish("mlx5_0"), Asker::Rail1).to_string();
    assert!(error.contains("METRALE_EXPERT_RDMA_DEV names \"mlx5_0\""), "{error}");
    assert!(error.contains("there are: rxe0 (v0); rxe1 (v1)"), "{error}");
    let error = refused(&two(), &wish("rxe0:3"), Asker::Rail1).to_string();
    assert!(error.contains("METRALE_EXPERT_RDMA_GID names GID 3"), "{error}");
    assert!(error.contains("rxe0 port 1 GID 1 ::ffff:10.1.0.1 RoCEv2"), "{error}");
    assert!(!error.contains("rxe1"), "only the wished device's: {error}");
    let error = refused(&two(), &wish("rxe0:0"), Asker::Rail1).to_string();
    assert!(error.contains("which cannot be used") && error.contains("link-local"), "{error}");
    let index = Wish { device: None, gid_index: Some(1) };
    assert_eq!(chosen(&two(), &index, "::ffff:10.1.0.2", Some("10.2.0.1")).spec.device, "rxe1");
}

#[test]
fn an_infiniband_port_needs_a_lid_or_global_gids() {
    let peer =
        |gid_text: &str, lid| Target { link_layer: LinkLayer::InfiniBand, gid: gid(gid_text), lid };
    let choose_ib = |port, target: &Target| {
        choose(&[device("ib0", 1, vec![port])], Asker::Rail1, &Wish::default(), Some(target), None)
    };
    let same = peer("fe80::2", 9);
    let choice = choose_ib(infiniband(7, &["fe80::1"]), &same).unwrap();
    assert_eq!((choice.spec.lid, choice.spec.gid_index), (7, 0));
    assert_eq!(same.address(&choice.spec.gid), Address::InfiniBand { lid: 9, gid: None });
    let no_lid = choose_ib(infiniband(0, &["fe80::1"]), &same).unwrap_err().to_string();
    assert!(no_lid.contains("subnet manager"), "{no_lid}");
    assert!(choose_ib(infiniband(7, &["fe80::1"]), &peer("fe80::2", 0)).is_err());
    let other = peer("2001:db8:0:1::2", 9);
    assert!(choose_ib(infiniband(7, &["fe80::1"]), &other).is_err(), "another subnet");
    let choice = choose_ib(infiniband(7, &["fe80::1", "2001:db8::1"]), &other).unwrap();
    assert_eq!(choice.spec.gid_index, 1);
    assert_eq!(
        other.address(&choice.spec.gid),
        Address::InfiniBand { lid: 9, gid: Some(other.gid) }
    );
    let error = choose_ib(ethernet(1, &["::ffff:10.1.0.1"]), &same).unwrap_err().to_string();
    assert!(error.contains("the peer's port is InfiniBand"), "{error}");
}

#[test]
fn a_rail_flag_is_a_device_and_perhaps_an_index() {
    assert_eq!(wish("mlx5_0"), Wish { device: Some("mlx5_0".into()), gid_index: None });
    assert_eq!(wish("rxe0p:255"), Wish { device: Some("rxe0p".into()), gid_index: Some(255) });
    for text in ["", ":3", "a:", "a:b", "a:256", "a:1:2", "../a", "a\n", &"x".repeat(65)] {
        let error = text.parse::<Wish>().unwrap_err().to_string();
        assert!(error.contains("DEV:GID"), "{text:?}: {error}");
    }
}

#[test]
fn a_line_of_the_log_stays_short_on_a_host_with_many_gids() {
    let addresses: Vec<_> = (0..200).map(|last| format!("::ffff:10.1.0.{last}")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let devices = vec![device("a", 1, vec![roce("v0", &addresses)])];
    let choice = chosen(&devices, &Wish::default(), "::ffff:10.1.0.2", None);
    let line = choice.to_string();
    assert!(line.len() < 1000 && line.contains("and 193 more"), "{line}");
}
