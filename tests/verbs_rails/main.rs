//! Two rails, and what happens to fetches when one of them breaks, crawls, loses packets or flaps:
//! nothing but the time. Each fault is one of rail 0, and then of rail 1: they are not set up alike.
//! `outages.rs` has the same faults with an outage of everything beside them.
//!
//! Runs as root in the guest that `scripts/soft-roce` boots, whose cables are named here.
#![cfg(metrale_rdma_verbs)]

#[path = "../verbs_faults/cables.rs"]
#[allow(dead_code, reason = "each test program uses its own part of this module")]
mod cables;
mod outages;
#[path = "../peer_support/mod.rs"]
mod peer_support;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};
use expert_tier::verbs::{VerbsOptions, VerbsTier};

use cables::{
    Until, address, connect, cut, few_at_once, keys, options, peer, shape, slow, take_all,
};
use peer_support::process::Peer;
use peer_support::{submit, wait_until};

/// Bounds short enough for a test to see a rail go and come.
fn impatient(peer: String) -> VerbsOptions {
    VerbsOptions { deadline: Duration::from_millis(700), ..few_at_once(options(peer)) }
}

/// Fetches batch after batch until `enough` says so; every fetch must be right. Says how many.
fn fetch_until(
    tier: &VerbsTier,
    store: &TestStore,
    mut each: impl FnMut(usize),
    enough: impl Fn(usize) -> bool,
) -> usize {
    let keys = keys(tier);
    let arena = small_arena(keys.len() as u32);
    let (queue, mut fetched) = (CompletionQueue::new(), 0);
    while !enough(fetched) {
        submit(tier, &arena, &keys, &queue);
        each(fetched);
        let right = take_all(tier, &queue, keys.len(), store);
        assert_eq!(right, keys.len(), "a fetch failed, with a rail left to carry it");
        fetched += right;
    }
    wait_until("all slots back", || arena.free_slots() == keys.len());
    fetched
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_rail_cut_again_and_again_costs_no_fetch_and_comes_back() {
    let store = TestStore::mixed(31);
    let peer = peer(&store);
    [0, 1].into_iter().for_each(|rail| cut_again_and_again(rail, &store, &peer));
}

fn cut_again_and_again(rail: u8, store: &TestStore, peer: &Peer) {
    let tier = connect(impatient(peer.address()));
    assert_eq!(tier.rails_up(), 2);
    let _slow = slow();
    let (mut cuts, mut hit, mut most) = (Vec::new(), 0, 0);
    let (mut cut_at, mut longest) = (Instant::now(), Duration::ZERO);
    let each = |fetched: usize| {
        // Somewhere inside of the records that fly, and every second batch.
        if cuts.is_empty() {
            let pause = Duration::from_micros(RandomState::new().hash_one(fetched) % 20_000);
            let until = Instant::now() + pause;
            while Instant::now() < until {
                tier.drive();
            }
            let flying = tier.parts_in_flight();
            println!("rail {rail}: after {fetched} fetches, {flying} READs in flight: cut");
            (hit, most) = (hit + usize::from(flying > 0), most.max(flying));
            cuts.push(cut(&[&address(rail, 1), &address(rail, 2)]));
            cut_at = Instant::now();
        } else {
            longest = longest.max(cut_at.elapsed());
            cuts.clear();
        }
    };
    let fetched = fetch_until(&tier, store, each, |fetched| fetched >= 100);
    println!(
        "rail {rail}: {fetched} fetches right; {hit} cuts hit READs in flight, {most} at most; a batch \
         with a cut in it took {longest:?} at most"
    );
    assert!(hit > 0);
    drop(cuts);
    let mended = Instant::now();
    wait_until("both rails", || tier.rails_up() == 2);
    println!("both rails up {} ms after the last cut was mended", mended.elapsed().as_millis());
    // An attempt under way has its bound, and the next one comes 100 ms later at most.
    assert!(mended.elapsed() < Duration::from_secs(4));
    assert!(tier.healthy());
}

/// What a bad cable does, as tc says it.
const SPOILT: [&str; 3] =
    ["netem loss 0.5%", "netem delay 3ms 2ms", "netem delay 2ms reorder 25% 50%"];

/// What comes from the peer over rail `rail` is spoilt until the guard's end.
fn spoil(rail: u8, how: &str) -> Until {
    shape(&format!("v{rail}p"), how)
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn loss_delay_and_reordering_on_one_rail_cost_no_fetch() {
    let store = TestStore::mixed(32);
    let peer = peer(&store);
    for (rail, how) in [0, 1].into_iter().flat_map(|rail| SPOILT.map(|how| (rail, how))) {
        let tier = connect(options(peer.address()));
        let _spoilt = spoil(rail, how);
        let fetched = fetch_until(&tier, &store, |_| (), |fetched| fetched >= 48);
        println!("rail {rail}, {how}: {fetched} fetches right, {} reconnects", tier.reconnects());
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_rail_that_flaps_for_half_a_minute_costs_no_fetch_and_leaks_nothing() {
    let store = TestStore::mixed(33);
    let peer = peer(&store);
    [0, 1].into_iter().for_each(|rail| flap(rail, &store, &peer));
}

fn flap(rail: u8, store: &TestStore, peer: &Peer) {
    /// Cuts of a rail that must have been; a cut takes its time where the machine is busy.
    const FLAPS: usize = 10;
    let tier = connect(impatient(peer.address()));
    fetch_until(&tier, store, |_| (), |fetched| fetched >= 96);
    let before = peer.status();
    let slow = slow();
    let (done, flaps) = (AtomicBool::new(false), AtomicUsize::new(0));
    let started = Instant::now();
    let ran = |seconds| started.elapsed() >= Duration::from_secs(seconds);
    let fetched = std::thread::scope(|scope| {
        // A second without the rail, a second with it.
        let flapping = scope.spawn(|| {
            // Also where the fetches have failed, and nobody says that it is done.
            while !done.load(Ordering::Relaxed) && !ran(100) {
                let broken = cut(&[&address(rail, 2)]);
                std::thread::sleep(Duration::from_secs(1));
                drop(broken);
                std::thread::sleep(Duration::from_secs(1));
                flaps.fetch_add(1, Ordering::Relaxed);
            }
        });
        let enough = |_| (ran(30) && flaps.load(Ordering::Relaxed) >= FLAPS) || ran(90);
        let fetched = fetch_until(&tier, store, |_| (), enough);
        done.store(true, Ordering::Relaxed);
        flapping.join().expect("no cut failed");
        fetched
    });
    let flaps = flaps.into_inner();
    drop(slow);
    wait_until("both rails", || tier.rails_up() == 2);
    wait_until("the peer's queue pairs as before", || {
        peer.status().queue_pairs == before.queue_pairs
    });
    let after = peer.status();
    println!(
        "rail {rail}: {flaps} cuts, {fetched} fetches right, {} reconnects; the peer had {} queue pairs \
         and {} bytes, and has {} and {}",
        tier.reconnects(),
        before.queue_pairs,
        before.rss_bytes,
        after.queue_pairs,
        after.rss_bytes
    );
    assert!(flaps >= FLAPS, "{flaps}");
    assert!(after.rss_bytes < before.rss_bytes + (8 << 20));
}
