//! A client as runtimes have it, while the peer's records move between disk and memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expert_tier::testing::small_arena;
use expert_tier::tier::{CompletionQueue, ExpertTier, Source};
use expert_tier::verbs::VerbsTier;

use crate::Half;
use crate::cables::{connect, cut, few_at_once, options, slow};
use crate::peer_support::{BOUND, assert_right, submit, wait_until};

/// Time after which a rail that brings nothing is given up, in the test that cuts one.
const DEADLINE: Duration = Duration::from_millis(700);
/// From one record that is made to move to the next. Each takes more fetches than the one before to be
/// worth moving, so there is an end to it.
const PACE: Duration = Duration::from_millis(450);
/// Moves after which a report would need more fetches than it can name.
const MOST_MOVES: usize = 140;

/// Has another client report such fetches that one record after the other moves, until `done`.
fn keep_moving(half: &Half, done: &AtomicBool) {
    let mut driver = half.client(77);
    driver.acknowledge();
    for nth in 0..MOST_MOVES {
        half.want(&mut driver, nth);
        let until = Instant::now() + PACE;
        while Instant::now() < until {
            if done.load(Ordering::Relaxed) {
                return;
            }
            driver.follow();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Fetches all keys, batch after batch, while records move; every fetch must be right. Says how many
/// came from where.
fn fetch_while_moving(
    half: &Half,
    tier: &VerbsTier,
    mut each: impl FnMut(usize),
    enough: impl Fn(usize) -> bool,
) -> HashMap<Source, usize> {
    let arena = small_arena(half.keys.len() as u32);
    let (queue, mut sources) = (CompletionQueue::new(), HashMap::new());
    let (done, mut fetched) = (AtomicBool::new(false), 0);
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| keep_moving(half, &done));
        while !enough(fetched) {
            submit(tier, &arena, &half.keys, &queue);
            each(fetched);
            for _ in &half.keys {
                let completion = tier.poll(&queue, BOUND).expect("an end in time");
                let came = completion.outcome.unwrap_or_else(|failure| {
                    // Or the other thread would go on, and the test with it.
                    done.store(true, Ordering::Relaxed);
                    panic!("{failure}")
                });
                assert_right(&half.store, completion.key, &came);
                *sources.entry(came.source).or_insert(0) += 1;
            }
            fetched += half.keys.len();
        }
        done.store(true, Ordering::Relaxed);
        mover.join().expect("the mover ends");
    });
    wait_until("all slots back", || arena.free_slots() == half.keys.len());
    sources
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn every_fetch_is_right_while_records_move_for_a_minute() {
    // No time to follow: what is read may be overwritten meanwhile.
    let half = Half::new(111, &["--move-ack-ms", "1"]);
    let tier = connect(options(half.peer.address()));
    let started = Instant::now();
    let minute = |_| started.elapsed() >= Duration::from_secs(61);
    let sources = fetch_while_moving(&half, &tier, |_| (), minute);
    let status = half.peer.status();
    println!(
        "{sources:?} in {:?}; {} READs met with another record; {:?}",
        started.elapsed(),
        tier.mismatches(),
        status.residency
    );
    assert!(status.residency.promotions > 50, "{status:?}");
    assert!(sources[&Source::Read] > 0 && sources[&Source::Push] > 0, "{sources:?}");
    assert_eq!(tier.reconnects(), 0, "a move costs no rail");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_rail_cut_while_the_peer_overwrites_slots_costs_no_fetch() {
    let half = Half::new(112, &["--move-ack-ms", "1"]);
    let mut options = few_at_once(options(half.peer.address()));
    options.deadline = DEADLINE;
    let tier = connect(options);
    assert_eq!(tier.rails_up(), 2);
    let slow = slow();
    let (mut cuts, mut hit, mut most) = (Vec::new(), 0, 0);
    let (mut cut_at, mut longest) = (Instant::now(), Duration::ZERO);
    let each = |fetched: usize| {
        if !cuts.is_empty() {
            longest = longest.max(cut_at.elapsed());
            cuts.clear();
            return;
        }
        // Somewhere inside of the records that fly.
        let until = Instant::now() + Duration::from_millis((fetched as u64 * 7) % 20);
        while Instant::now() < until {
            tier.drive();
        }
        let flying = tier.parts_in_flight();
        println!("after {fetched} fetches, {flying} parts in flight: cut");
        (hit, most) = (hit + usize::from(flying > 0), most.max(flying));
        cuts.push(cut(&["10.2.0.1", "10.2.0.2"]));
        cut_at = Instant::now();
    };
    let sources = fetch_while_moving(&half, &tier, each, |fetched| fetched >= 320);
    let promotions = half.peer.status().residency.promotions;
    println!(
        "{sources:?} right; {hit} cuts hit parts in flight, {most} at most; {promotions} records \
         moved, {} READs met with another; a batch with a cut in it took {longest:?} at most",
        tier.mismatches()
    );
    assert!(hit > 0 && promotions > 5);
    // The other rail has its usual speed within a second of the deadline; at that the batch takes half
    // a second.
    assert!(longest < DEADLINE + Duration::from_millis(1_500), "{longest:?}");
    drop((cuts, slow));
    wait_until("both rails", || tier.rails_up() == 2);
}
