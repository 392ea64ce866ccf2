//! One rail that is broken, and then an outage of everything: fetches go on over the other rail as soon
//! as that can carry them, whichever rail it is. Each test prints for how long no record came.

use std::time::{Duration, Instant};

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::verbs::{VerbsOptions, VerbsTier};
use railset::pairing::DualRail;

use crate::cables::{Until, address, connect, cut, keys, options, peer, unplug};
use crate::peer_support::process::Peer;
use crate::peer_support::{fetch, fetch_until_right, wait_until};
use crate::{SPOILT, fetch_until, impatient, spoil};

/// Longest time without a record after an outage has ended: an attempt that began before its end has its
/// bounds, and the next one comes 100 ms later at most.
const MOST: Duration = Duration::from_secs(4);
/// How long a cable is out, or packets are lost, beyond the deadline of a fetch.
const OUT: Duration = Duration::from_secs(2);

fn both_rails() -> [(u8, u8); 2] {
    [(0, 1), (1, 0)]
}

/// Devices named rxe0 and rxe1.
fn named(mut options: VerbsOptions) -> VerbsOptions {
    for (wish, device) in options.wishes.rails.iter_mut().zip(["rxe0", "rxe1"]) {
        wish.device = Some(device.into());
    }
    options
}

/// Packets to the peer's end of a rail are lost until the guard's end.
fn drop_packets(rail: u8) -> Until {
    cut(&[&address(rail, 2)])
}

/// Has fetches find out that a rail is broken.
fn wait_one_rail(tier: &VerbsTier, store: &TestStore) {
    let began = Instant::now();
    fetch_until(tier, store, |_| (), |_| tier.rails_up() == 1 || began.elapsed() > 4 * MOST);
    assert_eq!(tier.rails_up(), 1, "the rail is broken");
}

/// Fetches until a record comes, and says how long that took since `since`, the end of `what`.
fn until_a_record(what: &str, since: Instant, tier: &VerbsTier, store: &TestStore) {
    let (keys, arena) = (keys(tier), small_arena(1));
    fetch_until_right(tier, &arena, store, keys[0]);
    let without = since.elapsed();
    println!("{what}: {} ms without a record", without.as_millis());
    assert!(without < MOST, "{what}: {without:?} without a record");
}

fn restart(peer: &mut Peer, tier: &VerbsTier, store: &TestStore) -> Instant {
    let (keys, arena) = (keys(tier), small_arena(1));
    peer.kill();
    wait_until("a fetch that fails", || fetch(tier, &arena, keys[0]).is_err());
    peer.restart(&store.path());
    Instant::now()
}

fn wait_both(tier: &VerbsTier) {
    wait_until("both rails", || tier.rails_up() == 2);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_restarts_while_one_rail_loses_everything_is_used_over_the_other() {
    let store = TestStore::mixed(41);
    let mut peer = peer(&store);
    for (rail, _) in both_rails() {
        let tier = connect(impatient(peer.address()));
        let broken = drop_packets(rail);
        wait_one_rail(&tier, &store);
        let since = restart(&mut peer, &tier, &store);
        until_a_record(&format!("rail {rail} dropped, peer restarted"), since, &tier, &store);
        drop(broken);
        wait_both(&tier);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_restarts_while_one_rail_is_spoilt_costs_nothing_but_time() {
    let store = TestStore::mixed(42);
    let mut peer = peer(&store);
    for (rail, how) in [0, 1].into_iter().flat_map(|rail| SPOILT.map(|how| (rail, how))) {
        let tier = connect(impatient(peer.address()));
        let spoilt = spoil(rail, how);
        let since = restart(&mut peer, &tier, &store);
        until_a_record(&format!("rail {rail}, {how}, peer restarted"), since, &tier, &store);
        fetch_until(&tier, &store, |_| (), |fetched| fetched > 0);
        drop(spoilt);
        wait_both(&tier);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_cable_that_comes_back_carries_while_the_other_rail_loses_everything() {
    let store = TestStore::mixed(43);
    let peer = peer(&store);
    for (rail, other) in both_rails() {
        let tier = connect(impatient(peer.address()));
        let broken = drop_packets(rail);
        wait_one_rail(&tier, &store);
        let out = unplug(other);
        std::thread::sleep(OUT);
        drop(out);
        let what = format!("rail {rail} dropped, cable {other} out for 2 s");
        until_a_record(&what, Instant::now(), &tier, &store);
        drop(broken);
        wait_both(&tier);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_cable_that_flaps_carries_while_the_other_one_is_out() {
    let store = TestStore::mixed(44);
    let peer = peer(&store);
    for (rail, other) in both_rails() {
        for (names, options) in
            [("chosen", impatient(peer.address())), ("named", named(impatient(peer.address())))]
        {
            let tier = connect(options);
            let broken = unplug(rail);
            wait_until("one rail", || tier.rails_up() == 1);
            drop(unplug(other));
            let what = format!("cable {rail} out, cable {other} flapped, devices {names}");
            until_a_record(&what, Instant::now(), &tier, &store);
            drop(broken);
            wait_both(&tier);
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_rail_whose_attempts_all_take_their_bound_does_not_delay_the_other() {
    let store = TestStore::mixed(45);
    let mut peer = peer(&store);
    for (rail, _) in both_rails() {
        let mut options = options(peer.address());
        options.deadline = Duration::from_secs(5);
        let tier = connect(options);
        let broken = drop_packets(rail);
        wait_one_rail(&tier, &store);
        // Now an attempt at the broken rail is under way nearly all of the time, for 5 s each.
        peer.kill();
        peer.restart(&store.path());
        let since = Instant::now();
        let what = format!("rail {rail} dropped with attempts of 5 s, peer restarted");
        until_a_record(&what, since, &tier, &store);
        assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
        drop(broken);
        wait_both(&tier);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_starts_with_whichever_rail_it_can_have_unless_it_is_to_have_two() {
    let store = TestStore::mixed(46);
    let peer = peer(&store);
    for (rail, _) in both_rails() {
        for fault in [drop_packets, unplug] {
            let broken = fault(rail);
            let mut two = named(impatient(peer.address()));
            two.wishes.dual = DualRail::Two;
            let refused = VerbsTier::connect(two).err().expect("one rail where two are needed");
            println!("{refused}");
            for options in [impatient(peer.address()), named(impatient(peer.address()))] {
                let since = Instant::now();
                let tier = connect(options);
                assert_eq!(tier.rails_up(), 1);
                until_a_record(&format!("start with rail {rail} broken"), since, &tier, &store);
            }
            let tier = connect(named(impatient(peer.address())));
            drop(broken);
            wait_both(&tier);
            let devices: Vec<_> = tier.rails().into_iter().map(|rail| rail.device).collect();
            assert_eq!(devices, ["rxe0", "rxe1"]);
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_of_one_rail_finds_the_way_that_works() {
    let store = TestStore::mixed(47);
    let mut peer = peer(&store);
    for (rail, _) in both_rails() {
        let mut options = impatient(peer.address());
        options.wishes.dual = DualRail::One;
        let broken = drop_packets(rail);
        let tier = connect(options.clone());
        until_a_record("one rail", Instant::now(), &tier, &store);
        let since = restart(&mut peer, &tier, &store);
        let what = format!("one rail, rail {rail} dropped, peer restarted");
        until_a_record(&what, since, &tier, &store);
        assert_eq!(tier.rails_up(), 1);
        drop((broken, tier));
    }
}
