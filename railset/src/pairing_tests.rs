//! One or two rails out of what both sides have.

use super::*;
use crate::facts::{LinkLayer, Mtu, PortState};
use crate::testing::{device, gid, roce, via};

pub(super) fn offered(index: u8, node_guid: u64, address: &str) -> OfferedRail {
    OfferedRail {
        index,
        device: format!("peer{index}"),
        node_guid,
        port: 1,
        link_layer: LinkLayer::Ethernet,
        gid: gid(address),
        lid: 0,
        mtu: Mtu::B1024,
        depth: 16,
        most_queue_pairs: 4,
    }
}

pub(super) fn offers() -> Vec<OfferedRail> {
    vec![offered(0, 11, "::ffff:10.1.0.2"), offered(1, 12, "::ffff:10.2.0.2")]
}

pub(super) fn hosts() -> Vec<DeviceFacts> {
    vec![
        device("rxe0", 1, vec![roce("v0", &["fe80::1", "::ffff:10.1.0.1"])]),
        device("rxe1", 2, vec![roce("v1", &["fe80::2", "::ffff:10.2.0.1"])]),
    ]
}

pub(super) fn routed() -> Vec<Option<KernelRoute>> {
    vec![Some(via("10.1.0.1")), Some(via("10.2.0.1"))]
}

pub(super) fn wishes(dual: DualRail, first: &str, second: &str) -> RailWishes {
    let wish = |text: &str| if text.is_empty() { Wish::default() } else { text.parse().unwrap() };
    RailWishes { dual, rails: [wish(first), wish(second)] }
}

/// Offered index and local device of each pair.
fn names(pairing: &Pairing) -> Vec<(u8, String)> {
    pairing.pairs.iter().map(|pair| (pair.offered.index, pair.local.spec.device.clone())).collect()
}

fn is(pairing: &Pairing, expected: &[(u8, &str)]) {
    let expected: Vec<_> = expected.iter().map(|(at, name)| (*at, String::from(*name))).collect();
    assert_eq!(names(pairing), expected, "{pairing}");
}

pub(super) fn auto(first: &str, second: &str) -> RailWishes {
    wishes(DualRail::Auto, first, second)
}

#[test]
fn each_offered_rail_gets_the_local_one_that_is_routed_to_it() {
    is(&pair(&offers(), &hosts(), &routed(), &auto("", "")).unwrap(), &[(0, "rxe0"), (1, "rxe1")]);
    let mut turned = offers();
    turned.reverse();
    let sources: Vec<_> = routed().into_iter().rev().collect();
    let pairing = pair(&turned, &hosts(), &sources, &auto("", "")).unwrap();
    is(&pairing, &[(1, "rxe1"), (0, "rxe0")]);
    assert_eq!(pairing.one_rail, None);
}

#[test]
fn a_wish_moves_the_rails_and_not_only_their_order() {
    let pairing = pair(&offers(), &hosts(), &routed(), &auto("rxe1", "")).unwrap();
    is(&pairing, &[(1, "rxe1"), (0, "rxe0")]);
    let pairing = pair(&offers(), &hosts(), &routed(), &auto("", "rxe0")).unwrap();
    is(&pairing, &[(1, "rxe1"), (0, "rxe0")]);
    let one = wishes(DualRail::One, "rxe1", "");
    let pairing = pair(&offers(), &hosts(), &routed(), &one).unwrap();
    is(&pairing, &[(1, "rxe1")]);
    assert_eq!(pairing.one_rail, Some(OneRail::Wished));
}

#[test]
fn two_rails_of_the_peer_that_are_one_are_reduced_to_one_or_refused() {
    let mut twice = offers();
    twice[1].node_guid = twice[0].node_guid;
    let pairing = pair(&twice, &hosts(), &routed(), &auto("", "")).unwrap();
    is(&pairing, &[(0, "rxe0")]);
    let why = OneRail::OnePeerRail { first: "peer0".into(), second: "peer1".into() };
    assert_eq!(pairing.one_rail, Some(why.clone()));
    let asked = wishes(DualRail::Two, "", "");
    let error = pair(&twice, &hosts(), &routed(), &asked).unwrap_err();
    assert_eq!(error, PairError::TwoWanted(why.clone()));
    assert!(error.to_string().contains("METRALE_EXPERT_DUAL_RAIL=0"), "{error}");
    // A second rail that is only named is missed, and the first one used.
    let named = pair(&twice, &hosts(), &routed(), &auto("", "rxe1")).unwrap();
    assert_eq!((named.pairs.len(), named.one_rail), (1, Some(why)));
    let mut port2 = twice.clone();
    port2[1].port = 2;
    assert_eq!(pair(&port2, &hosts(), &routed(), &auto("", "")).unwrap().pairs.len(), 2);
}

#[test]
fn two_local_rails_that_are_one_are_one() {
    let mut twins = hosts();
    twins[1].node_guid = twins[0].node_guid;
    let pairing = pair(&offers(), &twins, &routed(), &auto("", "")).unwrap();
    is(&pairing, &[(0, "rxe0")]);
    let why = OneRail::OneLocalRail { device: "rxe0".into(), port: 1 };
    assert_eq!(pairing.one_rail, Some(why.clone()));
    let asked = wishes(DualRail::Two, "rxe0", "rxe0");
    let error = pair(&offers(), &hosts(), &routed(), &asked).unwrap_err();
    assert_eq!(error, PairError::TwoWanted(why));
}

#[test]
fn one_rail_on_either_side_is_one_rail() {
    let pairing = pair(&offers()[..1], &hosts(), &routed()[..1], &auto("", "")).unwrap();
    is(&pairing, &[(0, "rxe0")]);
    assert_eq!(pairing.one_rail, Some(OneRail::PeerOffersOne));
    let pairing = pair(&offers(), &hosts()[1..], &routed(), &auto("", "")).unwrap();
    is(&pairing, &[(1, "rxe1")]);
    let mut down = hosts();
    down[0].ports[0].state = PortState::Down;
    is(&pair(&offers(), &down, &routed(), &auto("", "")).unwrap(), &[(1, "rxe1")]);
    let two = wishes(DualRail::Two, "", "");
    let error = pair(&offers(), &down, &routed(), &two).unwrap_err().to_string();
    assert!(error.contains("both rails would leave from rxe1 port 1"), "{error}");
}

#[test]
fn a_second_rail_without_a_route_is_used_only_when_asked_for() {
    let sources = [Some(via("10.1.0.1")), Some(via("192.168.1.7"))];
    let pairing = pair(&offers(), &hosts(), &sources, &auto("", "")).unwrap();
    is(&pairing, &[(0, "rxe0")]);
    assert_eq!(pairing.one_rail, Some(OneRail::NotRouted));
    let two = wishes(DualRail::Two, "", "");
    is(&pair(&offers(), &hosts(), &sources, &two).unwrap(), &[(0, "rxe0"), (1, "rxe1")]);
}

#[test]
fn a_lost_route_leads_no_rail_from_the_peers_own_port() {
    let mut hosts = hosts();
    hosts.insert(0, device("peer0", 11, vec![roce("v0p", &["::ffff:10.1.0.2"])]));
    hosts.insert(1, device("peer1", 12, vec![roce("v1p", &["::ffff:10.2.0.2"])]));
    let sources = [Some(via("10.1.0.2")), Some(via("10.2.0.1"))];
    let pairing = pair(&offers(), &hosts, &sources, &auto("", "")).unwrap();
    let own = |pair: &RailPair| pair.local.spec.gid == pair.offered.gid;
    assert!(!pairing.pairs.iter().any(own), "{pairing}");
    // One host with one port has nothing else, and a second rail of that kind is not tried unasked.
    let pairing = pair(&offers(), &hosts[..1], &sources, &auto("", "")).unwrap();
    assert_eq!((pairing.pairs.len(), pairing.pairs[0].offered.index), (1, 1), "{pairing}");
}

#[test]
fn two_rails_in_one_subnet_are_told_apart() {
    let offers = [offered(0, 11, "::ffff:10.1.0.3"), offered(1, 12, "::ffff:10.1.0.4")];
    let hosts = [
        device("a", 1, vec![roce("v0", &["::ffff:10.1.0.1"])]),
        device("b", 2, vec![roce("v1", &["::ffff:10.1.0.2"])]),
    ];
    let sources = [Some(via("10.1.0.1")), Some(via("10.1.0.1"))];
    is(&pair(&offers, &hosts, &sources, &auto("", "")).unwrap(), &[(0, "a"), (1, "b")]);
}

#[test]
fn a_port_that_both_could_use_goes_to_the_one_that_needs_it() {
    let offers = [offered(0, 11, "::ffff:10.1.0.2"), offered(1, 12, "fd00::2")];
    let hosts = [
        device("both", 1, vec![roce("v0", &["::ffff:10.1.0.1", "fd00::1"])]),
        device("v4", 2, vec![roce("v1", &["::ffff:10.1.0.9"])]),
    ];
    let pairing = pair(&offers, &hosts, &[None, None], &auto("", "")).unwrap();
    is(&pairing, &[(0, "v4"), (1, "both")]);
}

#[test]
fn errors_name_the_rail_they_are_about() {
    let error = pair(&offers(), &hosts(), &routed(), &auto("gone", "")).unwrap_err().to_string();
    assert!(error.contains("METRALE_EXPERT_RDMA_DEV names \"gone\""), "{error}");
    let two = wishes(DualRail::Two, "", "gone");
    let error = pair(&offers(), &hosts(), &routed(), &two).unwrap_err().to_string();
    assert!(error.contains("METRALE_EXPERT_RAIL2_DEV names \"gone\""), "{error}");
    let error = pair(&offers(), &hosts(), &routed()[..1], &auto("", "")).unwrap_err();
    assert_eq!(error, PairError::Routes { offered: 2, routes: 1 });
    let error = pair(&offers(), &[], &routed(), &auto("", "")).unwrap_err();
    assert_eq!(error, PairError::Choose(ChooseError::NoDevice));
}

#[test]
fn dual_rail_is_zero_or_one() {
    assert_eq!("0".parse(), Ok(DualRail::One));
    assert_eq!("1".parse(), Ok(DualRail::Two));
    for text in ["2", "yes", " 1"] {
        assert_eq!(text.parse::<DualRail>(), Err(DualRailError));
    }
}

#[test]
fn a_peer_serves_each_active_port_once() {
    let mut hosts = hosts();
    hosts.push(device("rxe2", 3, vec![roce("v2", &["::ffff:10.3.0.1"])]));
    hosts[2].ports[0].state = PortState::Down;
    hosts[0].ports[0] = roce("v0", &["fe80::1", "::ffff:10.1.0.1", "::ffff:10.9.0.1"]);
    let names = |rails: Vec<Choice>| -> Vec<_> {
        rails.into_iter().map(|rail| (rail.spec.device, rail.spec.gid_index)).collect()
    };
    let rails = serve_rails(&hosts, &[]).unwrap();
    assert_eq!(names(rails), [("rxe0".into(), 1), ("rxe1".into(), 1)]);
    let wished = ["rxe1".parse().unwrap(), "rxe0:2".parse().unwrap()];
    let rails = serve_rails(&hosts, &wished).unwrap();
    assert_eq!(names(rails), [("rxe1".into(), 1), ("rxe0".into(), 2)]);
}

#[test]
fn a_peers_bad_wishes_are_refused() {
    let refusal = |wishes: &[&str]| {
        let wishes: Vec<Wish> = wishes.iter().map(|wish| wish.parse().unwrap()).collect();
        serve_rails(&hosts(), &wishes).unwrap_err().to_string()
    };
    assert!(refusal(&["rxe0", "rxe0:1"]).contains("--rail names one rail twice"));
    assert!(refusal(&["rxe7"]).contains("--rail DEV[:GID] names \"rxe7\""));
    assert!(refusal(&["rxe0"; 9]).contains("given 9 times, allowed are 8"));
    assert_eq!(serve_rails(&[], &[]), Err(ServeError::Choose(ChooseError::NoDevice)));
}

#[test]
fn the_worse_of_two_routes_decides() {
    let offers = [
        offered(0, 11, "::ffff:10.1.0.2"),
        offered(1, 12, "fd00::2"),
        offered(2, 13, "::ffff:10.3.0.2"),
    ];
    let hosts = [
        device("both", 1, vec![roce("v0", &["::ffff:10.1.0.1", "fd00::1"])]),
        device("v4", 2, vec![roce("v1", &["::ffff:10.1.0.9"])]),
    ];
    let sources = [Some(via("10.1.0.1")), Some(via("fd00::1")), Some(via("192.168.1.7"))];
    let pairing = pair(&offers, &hosts, &sources, &auto("", "")).unwrap();
    let mut found = names(&pairing);
    found.sort();
    assert_eq!(found, [(0, "v4".into()), (1, "both".into())], "not the third, which has no route");
}

#[test]
fn one_address_is_one_rail_and_no_number_is_no_number() {
    let identity = |node_guid, port, address| RailIdentity { node_guid, port, gid: gid(address) };
    let one = identity(7, 1, "fd00::1");
    assert!(one.is_same(&identity(7, 1, "fd00::2")) && one.is_same(&identity(8, 2, "fd00::1")));
    assert!(!one.is_same(&identity(7, 2, "fd00::2")) && !one.is_same(&identity(8, 1, "fd00::2")));
    assert!(!identity(0, 1, "fd00::1").is_same(&identity(0, 1, "fd00::2")));
}

#[test]
fn a_peer_serves_the_rails_that_there_are_and_says_what_the_others_lack() {
    let mut devices = hosts();
    devices[0].ports[0].state = PortState::Down;
    let wishes: Vec<Wish> = ["rxe0", "rxe1", "rxe7"].map(|name| name.parse().unwrap()).into();
    let now = rails_now(&devices, &wishes).unwrap();
    let names: Vec<_> = now.rails.iter().map(|rail| &*rail.spec.device).collect();
    assert_eq!(names, ["rxe1"]);
    let why: Vec<_> = now.missing.iter().map(ToString::to_string).collect();
    assert!(why[0].contains("\"rxe0\", whose port is not active"), "{why:?}");
    assert!(why[1].contains("\"rxe7\", which is neither"), "{why:?}");
    devices[0].ports[0].state = PortState::Active;
    assert_eq!(rails_now(&devices, &wishes).unwrap().rails.len(), 2);
    let nothing = rails_now(&[], &[]).unwrap();
    assert_eq!((nothing.rails.len(), nothing.missing.len()), (0, 1));
}

#[test]
fn a_rail_that_is_named_twice_is_refused_whether_it_is_up_or_not() {
    let wishes: Vec<Wish> = ["rxe0", "rxe0"].map(|name| name.parse().unwrap()).into();
    for devices in [&hosts()[..], &[]] {
        let error = rails_now(devices, &wishes).unwrap_err().to_string();
        assert!(error.contains("names one rail twice"), "{error}");
    }
}
