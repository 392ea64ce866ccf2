//! I2: a slot that a READ may still write is not free, and one that is free is not written.

use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};
use expert_tier::verbs::VerbsOptions;

use crate::cables::{connect, one_rail, peer, shape, wait_flying};
use crate::peer_support::{BOUND, assert_right, fetch, submit};

const LATE: ExpertKey = ExpertKey::new(0, 0);
const OTHER: ExpertKey = ExpertKey::new(0, 1);
const ROUNDS: usize = 6;
/// How long what the peer sends is on its way: shorter than the device's retries go on, longer
/// than the deadlines below.
const DELAY: &str = "netem delay 200ms";
/// Until every packet of a round has arrived, and more.
const WATCH: Duration = Duration::from_millis(500);

/// Ends requests of which READs fly, in one slot, and gives the slot to another record at once. Says
/// how often READs still flew, and how often the rail was set up anew.
fn reuse_the_slot_of_late_reads(change: impl Fn(&mut VerbsOptions)) -> (usize, u64) {
    let store = TestStore::new(1, 2, &[700_001], 11);
    let peer = peer(&store);
    let mut options = one_rail(peer.address());
    change(&mut options);
    let tier = connect(options);
    let local = PosixTier::open(&store.path(), PosixOptions::default()).expect("the store");
    let arena = small_arena(1);
    let mut overlaps = 0;
    for round in 0..ROUNDS {
        let delay = shape("v0p", DELAY);
        let queue = CompletionQueue::new();
        submit(&tier, &arena, &[LATE], &queue);
        let flying = wait_flying(&tier);
        let failure = tier.poll(&queue, BOUND).expect("an end in time").outcome.unwrap_err();
        assert!(matches!(&*failure.error, FetchError::Deadline { .. }), "{failure}");
        let (free, still) = (arena.free_slots(), tier.parts_in_flight());
        let handed_back = failure.slot.is_some();
        println!("round {round}: {flying} READs flew, {still} still did at the end; free {free}");
        if still > 0 && !handed_back {
            overlaps += 1;
            // It is free when they have come back, not before; what flew may have come meanwhile.
            assert!(free == 0 || tier.parts_in_flight() == 0, "free while READs fly");
        }
        drop(failure);
        // Waits for the slot, without a caller that looks after the rails.
        let slot = arena.acquire(1, BOUND).expect("the slot comes back");
        let fetched = local.fetch(OTHER, slot).expect("a local record");
        let watch = Instant::now();
        while watch.elapsed() < WATCH {
            assert_right(&store, OTHER, &fetched);
        }
        drop((fetched, delay));
        assert_eq!(arena.free_slots(), 1);
        crate::peer_support::fetch_until_right(&tier, &arena, &store, LATE);
    }
    drop(fetch(&tier, &arena, LATE));
    assert_eq!(arena.free_slots(), 1);
    (overlaps, tier.reconnects())
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_slot_is_not_free_before_reads_that_outlast_their_request_have_landed() {
    let (overlaps, reconnects) = reuse_the_slot_of_late_reads(|options| {
        options.total = Duration::from_millis(60);
    });
    println!("{overlaps} of {ROUNDS} requests ended with READs in flight");
    assert!(overlaps > 0);
    assert_eq!(reconnects, 0, "the READs were to land");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn reads_flushed_from_a_rail_that_missed_its_deadline_write_nothing_afterwards() {
    let (overlaps, reconnects) = reuse_the_slot_of_late_reads(|options| {
        options.total = Duration::from_millis(60);
        options.deadline = Duration::from_millis(120);
    });
    println!("{overlaps} of {ROUNDS} requests ended with READs in flight; {reconnects} reconnects");
    assert!(overlaps > 0);
    assert!(reconnects > 0, "the READs were to be flushed");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_cancelled_fetch_keeps_its_slot_until_its_reads_have_landed() {
    let store = TestStore::new(1, 2, &[700_001], 12);
    let peer = peer(&store);
    let tier = connect(one_rail(peer.address()));
    let arena = small_arena(1);
    let mut overlaps = 0;
    for _ in 0..ROUNDS {
        let _delay = shape("v0p", DELAY);
        let queue = CompletionQueue::new();
        let ticket = submit(&tier, &arena, &[LATE], &queue)[0];
        wait_flying(&tier);
        tier.cancel(ticket);
        if tier.parts_in_flight() > 0 {
            overlaps += 1;
            assert_eq!(arena.free_slots(), 0, "free while READs fly");
        }
        let outcome = tier.poll(&queue, BOUND).expect("an end in time").outcome;
        assert!(matches!(&*outcome.unwrap_err().error, FetchError::Cancelled { .. }));
        assert_eq!((arena.free_slots(), tier.parts_in_flight()), (1, 0));
    }
    println!("{overlaps} of {ROUNDS} requests were cancelled with READs in flight");
    assert!(overlaps > 0);
}
