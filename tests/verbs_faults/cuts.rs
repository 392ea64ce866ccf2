//! Rails that are cut, unplugged or left by their peer with READs in flight.

use std::time::Duration;

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};
use expert_tier::verbs::VerbsTier;

use crate::cables::{
    Until, address, connect, cut, few_at_once, keys, one_rail, options, peer, slow, take_all,
    unplug, wait_flying, wait_queue_pairs,
};
use crate::peer_support::{assert_right, fetch, fetch_until_right, submit, wait_until};

const ROUNDS: usize = 4;

/// Makes `fault` while a store's worth of fetches is in flight, again and again, and undoes it.
/// Says how many fetches failed.
fn break_rails(
    tier: &VerbsTier,
    store: &TestStore,
    rounds: usize,
    fault: impl Fn() -> Vec<Until>,
) -> usize {
    let keys = keys(tier);
    let arena = small_arena(keys.len() as u32);
    let (mut overlaps, mut failed) = (0, 0);
    for round in 0..rounds {
        let slow = slow();
        let queue = CompletionQueue::new();
        submit(tier, &arena, &keys, &queue);
        let first = take_all(tier, &queue, 1 + round, store);
        wait_flying(tier);
        let flying = tier.parts_in_flight();
        let broken = fault();
        let after = tier.parts_in_flight();
        let right = first + take_all(tier, &queue, keys.len() - 1 - round, store);
        println!(
            "round {round}: {flying} READs flew before the cut, {after} after it; {right} of {} right",
            keys.len()
        );
        overlaps += usize::from(flying > 0);
        failed += keys.len() - right;
        drop((broken, slow));
        fetch_until_right(tier, &arena, store, keys[0]);
        wait_until("all slots back", || arena.free_slots() == keys.len());
        wait_until("a healthy backend", || tier.healthy());
        assert_eq!(tier.parts_in_flight(), 0);
    }
    println!("{overlaps} of {rounds} cuts hit READs in flight; {} reconnects", tier.reconnects());
    assert!(overlaps > 0);
    failed
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn packets_lost_for_good_end_every_fetch_and_bring_every_slot_back() {
    let store = TestStore::mixed(21);
    let peer = peer(&store);
    let mut options = few_at_once(options(peer.address()));
    options.total = Duration::from_secs(4);
    let tier = connect(options);
    break_rails(&tier, &store, ROUNDS, || vec![cut(&["10.1.0.2", "10.2.0.2"])]);
    assert!(tier.reconnects() > 0);
    drop(tier);
    wait_queue_pairs(&peer, 0);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn cables_pulled_end_every_fetch_and_bring_every_slot_back() {
    let store = TestStore::mixed(22);
    let peer = peer(&store);
    let mut options = few_at_once(options(peer.address()));
    options.total = Duration::from_secs(4);
    let tier = connect(options);
    break_rails(&tier, &store, ROUNDS, || vec![unplug(0), unplug(1)]);
    assert!(tier.reconnects() > 0);
    drop(tier);
    wait_queue_pairs(&peer, 0);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn one_rail_of_two_that_is_cut_costs_no_fetch() {
    let store = TestStore::mixed(23);
    let peer = peer(&store);
    for rail in [0, 1, 0, 1] {
        // Each time with both rails up.
        let tier = connect(few_at_once(options(peer.address())));
        assert_eq!(break_rails(&tier, &store, 1, || vec![cut(&[&address(rail, 2)])]), 0);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn one_rail_of_two_that_is_unplugged_costs_no_fetch() {
    let store = TestStore::mixed(24);
    let peer = peer(&store);
    for rail in [0, 1, 0, 1] {
        // Each time with both rails up.
        let tier = connect(few_at_once(options(peer.address())));
        assert_eq!(break_rails(&tier, &store, 1, || vec![unplug(rail)]), 0);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_rail_over_which_nothing_comes_is_not_used() {
    let store = TestStore::mixed(26);
    let peer = peer(&store);
    let mut options = options(peer.address());
    options.deadline = Duration::from_millis(700);
    let both = cut(&["10.1.0.2", "10.2.0.2"]);
    let refused = VerbsTier::connect(options.clone()).err().expect("a rail that brings nothing");
    println!("{refused}");
    assert!(refused.to_string().contains("UDP port 4791"), "{refused}");
    drop(both);
    for rail in [0, 1] {
        let broken = cut(&[&address(rail, 2)]);
        let tier = connect(options.clone());
        assert_eq!(tier.rails_up(), 1);
        let (keys, arena) = (keys(&tier), small_arena(1));
        for &key in &keys {
            let fetched = fetch(&tier, &arena, key).expect("by the rail that works");
            assert_right(&store, key, &fetched);
        }
        assert_eq!((tier.rails_up(), tier.reconnects()), (1, 0));
        drop(broken);
        wait_until("both rails", || tier.rails_up() == 2);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_killed_with_reads_in_flight_costs_nothing_that_is_not_said() {
    let store = TestStore::mixed(25);
    let mut peer = peer(&store);
    let mut options = few_at_once(one_rail(peer.address()));
    options.deadline = Duration::from_millis(700);
    let tier = connect(options);
    let keys = keys(&tier);
    let arena = small_arena(keys.len() as u32);
    let mut overlaps = 0;
    for round in 0..ROUNDS {
        let slow = slow();
        let queue = CompletionQueue::new();
        submit(&tier, &arena, &keys, &queue);
        let first = take_all(&tier, &queue, 1 + round, &store);
        wait_flying(&tier);
        let flying = tier.parts_in_flight();
        peer.kill();
        let right = first + take_all(&tier, &queue, keys.len() - 1 - round, &store);
        println!("round {round}: {flying} READs flew at the kill; {right} of {} right", keys.len());
        overlaps += usize::from(flying > 0);
        wait_until("all slots back", || arena.free_slots() == keys.len());
        assert!(!tier.healthy());
        drop(slow);
        peer.restart(&store.path());
        fetch_until_right(&tier, &arena, &store, keys[0]);
        wait_until("a healthy backend", || tier.healthy());
    }
    println!("{overlaps} of {ROUNDS} kills hit READs in flight");
    assert!(overlaps > 0);
    assert!(tier.reconnects() >= ROUNDS as u64);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_cable_that_is_out_for_a_moment_costs_no_fetch() {
    let store = TestStore::mixed(26);
    let peer = peer(&store);
    let mut options = few_at_once(options(peer.address()));
    // Pulling two cables takes the guest a second.
    options.deadline = Duration::from_secs(6);
    let tier = connect(options);
    let failed = break_rails(&tier, &store, ROUNDS, || {
        drop(unplug(0));
        drop(unplug(1));
        Vec::new()
    });
    assert_eq!(failed, 0);
}
