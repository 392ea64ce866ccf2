//! The pair for one rail, with the other up, being set up, down or broken.

use super::super::tests::{auto, hosts, offered, offers, routed, wishes};
use super::*;
use crate::facts::PortState;
use crate::testing::{device, roce, via};

/// Offered index and local device of the pair for rail `rail_index`, or why there is none.
fn chosen(
    devices: &[DeviceFacts],
    wishes: &RailWishes,
    rail_index: usize,
    taken: &[RailEnds],
    failed: &[RailEnds],
) -> Result<(u8, String), PairError> {
    let (taken, failed) = (taken.to_vec(), pairs(failed));
    let wanted = OneWanted { rail_index, taken, failed };
    let pairing = pair_one(&offers(), devices, &routed(), wishes, &wanted)?;
    assert_eq!(pairing.pairs.len(), 1, "{pairing}");
    let pair = &pairing.pairs[0];
    Ok((pair.offered.index, pair.local.spec.device.clone()))
}

fn pairs(failed: &[RailEnds]) -> FailedPairs {
    let mut pairs = FailedPairs::default();
    failed.iter().for_each(|pair| pairs.push(*pair));
    pairs
}

fn is(found: Result<(u8, String), PairError>, offered: u8, device: &str) {
    assert_eq!(found, Ok((offered, device.to_owned())));
}

/// The ends of the pairs rxe0 to peer0 and rxe1 to peer1.
fn ends() -> [RailEnds; 2] {
    let pairing = super::super::pair(&offers(), &hosts(), &routed(), &auto("", "")).unwrap();
    [pairing.pairs[0].ends(), pairing.pairs[1].ends()]
}

fn down(which: usize) -> Vec<DeviceFacts> {
    let mut hosts = hosts();
    hosts[which].ports[0].state = PortState::Down;
    hosts
}

#[test]
fn with_nothing_up_each_rail_gets_a_pair_of_its_own_whatever_failed() {
    for wishes in [auto("", ""), auto("rxe0", "rxe1"), wishes(DualRail::Two, "", "rxe1")] {
        for failed in [vec![], vec![ends()[0]], vec![ends()[1]], ends().to_vec()] {
            is(chosen(&hosts(), &wishes, 0, &[], &failed), 0, "rxe0");
            is(chosen(&hosts(), &wishes, 1, &[], &failed), 1, "rxe1");
        }
    }
}

#[test]
fn a_rail_shares_no_end_with_one_that_is_taken() {
    let [first, second] = ends();
    for wishes in [auto("", ""), wishes(DualRail::Two, "", "")] {
        // A rail of either number may have taken either pair.
        for rail_index in [0, 1] {
            is(chosen(&hosts(), &wishes, rail_index, &[first], &[second]), 1, "rxe1");
            is(chosen(&hosts(), &wishes, rail_index, &[second], &[first]), 0, "rxe0");
        }
    }
    let error = chosen(&hosts(), &auto("", ""), 1, &[first, second], &[]).unwrap_err();
    assert_eq!(error, PairError::NoneBeside(OneRail::PeerOffersOne));
    let error = chosen(&down(1), &auto("", ""), 1, &[first], &[]).unwrap_err();
    let port = OneRail::OneLocalRail { device: "rxe0".into(), port: 1 };
    assert_eq!(error, PairError::NoneBeside(port), "the port that is down is no way");
}

#[test]
fn a_named_device_that_is_down_costs_its_own_rail_alone() {
    for dual in [DualRail::Auto, DualRail::Two] {
        for [first, second] in [["rxe0", "rxe1"], ["rxe0", ""]] {
            let named = wishes(dual, first, second);
            let error = chosen(&down(0), &named, 0, &[], &[]).unwrap_err().to_string();
            assert!(error.contains("METRALE_EXPERT_RDMA_DEV names \"rxe0\""), "{error}");
            is(chosen(&down(0), &named, 1, &[], &[]), 1, "rxe1");
        }
        let named = wishes(dual, "rxe0", "rxe1");
        is(chosen(&down(1), &named, 0, &[], &[]), 0, "rxe0");
        let error = chosen(&down(1), &named, 1, &[], &[]).unwrap_err().to_string();
        assert!(error.contains("METRALE_EXPERT_RAIL2_DEV names \"rxe1\""), "{error}");
    }
    // Where one rail is asked for, its name is all there is.
    let one = wishes(DualRail::One, "rxe0", "");
    assert!(chosen(&down(0), &one, 0, &[], &[]).is_err());
}

#[test]
fn a_port_that_is_down_leaves_the_other_to_rail_0_unless_it_is_named_for_rail_1() {
    is(chosen(&down(0), &auto("", ""), 0, &[], &[]), 1, "rxe1");
    let why = OneRail::OneLocalRail { device: "rxe1".into(), port: 1 };
    let error = chosen(&down(0), &auto("", ""), 1, &[], &[]).unwrap_err();
    assert_eq!(error, PairError::NoneBeside(why));
    // Rail 0 may have any device, and rail 1 no other than rxe1: it keeps that for when rxe0 is back.
    let named = auto("", "rxe1");
    let error = chosen(&down(0), &named, 0, &[], &[]).unwrap_err();
    assert!(matches!(error, PairError::NoneBeside(_)), "{error}");
    is(chosen(&down(0), &named, 1, &[], &[]), 1, "rxe1");
    is(chosen(&hosts(), &named, 0, &[ends()[1]], &[]), 0, "rxe0");
}

#[test]
fn one_rail_alone_goes_from_a_pair_that_failed_to_the_next_and_back() {
    let [first, second] = ends();
    let one = wishes(DualRail::One, "", "");
    is(chosen(&hosts(), &one, 0, &[], &[]), 0, "rxe0");
    is(chosen(&hosts(), &one, 0, &[], &[first]), 1, "rxe1");
    is(chosen(&hosts(), &one, 0, &[], &[first, second]), 0, "rxe0");
    is(chosen(&hosts(), &one, 0, &[], &[second, first]), 1, "rxe1");
    is(chosen(&down(1), &one, 0, &[], &[first]), 0, "rxe0");
    let named = wishes(DualRail::One, "rxe0", "");
    is(chosen(&hosts(), &named, 0, &[], &[first]), 0, "rxe0");
}

/// Which pairs are tried, in order, if every one fails.
fn order(
    offers: &[OfferedRail],
    hosts: &[DeviceFacts],
    sources: &[Option<KernelRoute>],
    attempts: usize,
) -> Vec<(u8, String)> {
    let one = wishes(DualRail::One, "", "");
    let mut wanted = OneWanted::default();
    let mut next = || {
        let pair = pair_one(offers, hosts, sources, &one, &wanted).unwrap().pairs.remove(0);
        wanted.failed.push(pair.ends());
        (pair.offered.index, pair.local.spec.device)
    };
    (0..attempts).map(|_| next()).collect()
}

#[test]
fn pairs_that_the_routes_speak_against_are_tried_now_and_then() {
    let order = order(&offers(), &hosts(), &routed(), 40);
    let crossing = order.iter().filter(|pair| {
        let straight = [(0, "rxe0".to_owned()), (1, "rxe1".to_owned())];
        !straight.contains(pair)
    });
    let crossing = crossing.count();
    assert!((4..=12).contains(&crossing), "{crossing} of {order:?}");
}

#[test]
fn in_one_subnet_every_pair_has_its_turn() {
    let offers = [offered(0, 11, "::ffff:10.1.0.3"), offered(1, 12, "::ffff:10.1.0.4")];
    let hosts = [
        device("a", 1, vec![roce("v0", &["::ffff:10.1.0.1"])]),
        device("b", 2, vec![roce("v1", &["::ffff:10.1.0.2"])]),
    ];
    // The kernel prefers one address for both.
    let mut tried = order(&offers, &hosts, &[Some(via("10.1.0.1")), Some(via("10.1.0.1"))], 10);
    tried.sort();
    tried.dedup();
    assert_eq!(tried.len(), 4, "{tried:?}");
}

#[test]
fn a_rail_without_a_route_is_the_last_resort_of_rail_0_and_none_of_rail_1() {
    let sources = [Some(via("10.1.0.1")), Some(via("192.168.1.7"))];
    let chosen = |wishes: &RailWishes, rail_index, taken: &[RailEnds]| {
        let wanted =
            OneWanted { rail_index, taken: taken.to_vec(), failed: FailedPairs::default() };
        let pairing = pair_one(&offers(), &hosts(), &sources, wishes, &wanted)?;
        Ok::<_, PairError>(pairing.pairs[0].offered.index)
    };
    let [first, second] = ends();
    assert_eq!(chosen(&auto("", ""), 0, &[]), Ok(0));
    for taken in [&[][..], &[first]] {
        let error = chosen(&auto("", ""), 1, taken).unwrap_err();
        assert_eq!(error, PairError::NoneBeside(OneRail::NotRouted));
        assert_eq!(chosen(&auto("", "rxe1"), 1, taken), Ok(1), "it is asked for");
    }
    assert_eq!(chosen(&auto("", ""), 0, &[second]), Ok(0));
}
