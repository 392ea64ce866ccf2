//! The grant: what a peer may write, and that it ends before anybody looks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{ExpertTier, Fetched};
use expert_tier::verbs::VerbsOptions;

use crate::cables::{connect, keys, one_rail};
use crate::peer_support::{BOUND, assert_right, fetch, fetch_until_right, wait_until};
use crate::pusher::{self, SPOIL_AT, TERMS, done};

/// Rounds of a peer that goes on writing.
const ROUNDS: usize = 100;
/// WRITEs that it has posted behind the receipt, in one go with it.
const WRITES: usize = 3;
/// How long a record that was handed out is looked at: longer than those take.
const WATCH: Duration = Duration::from_millis(40);

/// Looks at a record all the time.
fn watch(store: &TestStore, key: ExpertKey, fetched: &Fetched) {
    let started = Instant::now();
    while started.elapsed() < WATCH {
        assert_right(store, key, fetched);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_writes_without_pause_changes_nothing_that_was_handed_out() {
    let store = Arc::new(TestStore::new(1, 2, &[250_001], 83));
    let theirs = Arc::clone(&store);
    let (peer, seen) = pusher::start(&store, TERMS, move |it, fetch| {
        // With and without WRITEs right behind the receipt: those may spoil what they meet, which is
        // then not handed out.
        match it.nth % 2 {
            0 => it.push(&theirs, &fetch)?,
            _ => it.push_and_go_on(&theirs, &fetch, WRITES)?,
        }
        // Until the client's device refuses, which ends this queue pair.
        while !it.is_over() && it.write(SPOIL_AT, &fetch, fetch.bytes as usize).is_ok() {
            it.seen.spoilt.fetch_add(1, Ordering::Relaxed);
        }
        anyhow::bail!("refused")
    });
    let tier = connect(one_rail(peer.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    let (mut handed_out, mut rejected) = (0, 0);
    // As many receipts as that have been followed by WRITEs.
    for round in 0.. {
        let seen = seen.requests.load(Ordering::Relaxed);
        if seen >= ROUNDS {
            break;
        }
        match fetch(&tier, &arena, keys[round % 2]) {
            Ok(fetched) => {
                watch(&store, keys[round % 2], &fetched);
                handed_out += 1;
            }
            Err(failure) => {
                // What was written after the receipt and before the revocation is found out.
                let passes = failure.error.is_transient();
                let differs = matches!(&*failure.error, FetchError::Mismatch { .. });
                assert!(passes || differs, "{failure}");
                rejected += 1;
            }
        }
    }
    let count = |of: &std::sync::atomic::AtomicUsize| of.load(Ordering::Relaxed);
    let (spoilt, refused) = (count(&seen.spoilt), count(&seen.refused));
    println!(
        "{handed_out} records handed out, {rejected} fetches failed; {spoilt} WRITEs after a \
              receipt went through, {refused} were refused"
    );
    assert!(
        handed_out > 0 && refused >= ROUNDS / 2,
        "the peer was to be writing when it was stopped"
    );
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_may_write_what_was_asked_for_and_not_a_byte_more() {
    let store = Arc::new(TestStore::mixed(84));
    let theirs = Arc::clone(&store);
    // One byte before, one behind, and all of it, for one record after the other.
    let (peer, seen) = pusher::start(&store, TERMS, move |it, fetch| {
        let bytes = fetch.bytes as usize;
        let mut wrong = fetch;
        let ended = match it.nth % 3 {
            0 => {
                wrong.into.address -= 1;
                it.write(SPOIL_AT, &wrong, bytes)
            }
            1 => it.write(SPOIL_AT, &wrong, bytes + 1),
            _ => return it.push(&theirs, &fetch),
        };
        assert!(ended.is_err(), "a WRITE outside the grant went through");
        anyhow::bail!("refused")
    });
    let (tier, arena) = (connect(one_rail(peer.address())), small_arena(1));
    for &key in &keys(&tier)[6..9] {
        fetch_until_right(&tier, &arena, &store, key);
    }
    assert!(seen.refused.load(Ordering::Relaxed) >= 6);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_slot_whose_push_never_came_is_taken_back_and_cannot_be_written_any_more() {
    let store = Arc::new(TestStore::new(1, 2, &[250_001], 85));
    let theirs = Arc::clone(&store);
    let (peer, seen) = pusher::start(&store, TERMS, move |it, fetch| {
        if fetch.expert == 1 {
            return it.push(&theirs, &fetch);
        }
        // Says nothing, and writes once the client has given up on it.
        let asked = Instant::now();
        while !it.is_over() && asked.elapsed() < BOUND {
            std::thread::yield_now();
        }
        assert!(it.write(SPOIL_AT, &fetch, fetch.bytes as usize).is_err(), "it was written");
        anyhow::bail!("refused")
    });
    let deadline = Duration::from_millis(300);
    let total = Duration::from_millis(1500);
    let tier = connect(VerbsOptions { deadline, total, ..one_rail(peer.address()) });
    let (keys, arena) = (keys(&tier), small_arena(1));
    let tried = || seen.refused.load(Ordering::Relaxed) >= 10;
    // A fetch may also end before it has a rail again to ask on.
    for _ in (0..40).take_while(|_| !tried()) {
        let started = Instant::now();
        let failure = fetch(&tier, &arena, keys[0]).expect_err("nothing comes");
        println!("after {:?}: {failure}", started.elapsed());
        assert!(failure.error.is_transient(), "{failure}");
        assert!(started.elapsed() < total + Duration::from_secs(2));
        drop(failure);
        wait_until("the slot back", || arena.free_slots() == 1);
        fetch_until_right(&tier, &arena, &store, keys[1]);
    }
    assert!(tried(), "the peer was to try");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_cancelled_push_keeps_its_slot_until_the_peer_is_done_with_it() {
    let store = Arc::new(TestStore::new(1, 2, &[250_001], 86));
    let theirs = Arc::clone(&store);
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let may_go = std::sync::Mutex::new(may_go);
    let (peer, _) = pusher::start(&store, TERMS, move |it, fetch| {
        may_go.lock().expect("one thread").recv_timeout(BOUND)?;
        it.load(&theirs, &fetch);
        it.write(0, &fetch, fetch.bytes as usize)?;
        it.receipt(done(&fetch))
    });
    let (tier, arena) = (connect(one_rail(peer.address())), small_arena(1));
    let keys = keys(&tier);
    for _ in 0..5 {
        let queue = expert_tier::tier::CompletionQueue::new();
        let ticket = crate::peer_support::submit(&tier, &arena, &keys[..1], &queue)[0];
        tier.cancel(ticket);
        assert_eq!(arena.free_slots(), 0, "free while the peer may write");
        go.send(()).expect("a peer that waits");
        let outcome = tier.poll(&queue, BOUND).expect("an end in time").outcome;
        assert!(matches!(&*outcome.unwrap_err().error, FetchError::Cancelled { .. }));
        wait_until("the slot back", || arena.free_slots() == 1);
    }
    assert_eq!(tier.reconnects(), 0);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_receipt_that_is_withheld_costs_a_slot_no_longer_than_a_request_may_take() {
    let store = Arc::new(TestStore::new(1, 2, &[250_001], 88));
    let theirs = Arc::clone(&store);
    // Nothing is said of one record, and everything is well with the other.
    let (peer, _) = pusher::start(&store, TERMS, move |it, fetch| match fetch.expert {
        0 => Ok(()),
        _ => it.push(&theirs, &fetch),
    });
    let total = Duration::from_millis(1500);
    let tier = connect(VerbsOptions { total, ..one_rail(peer.address()) });
    let (keys, arena) = (keys(&tier), small_arena(2));
    let queue = expert_tier::tier::CompletionQueue::new();
    crate::peer_support::submit(&tier, &arena, &keys[..1], &queue);
    let (started, mut told) = (Instant::now(), false);
    while arena.free_slots() < 2 || !told {
        // It may have the slot with it.
        if let Some(ended) = tier.poll(&queue, Duration::ZERO) {
            let failure = ended.outcome.expect_err("nothing was said of it");
            assert!(failure.error.is_transient(), "{failure}");
            told = true;
        }
        assert!(started.elapsed() < BOUND / 2, "the slot is kept; told: {told}");
        fetch_until_right(&tier, &arena, &store, keys[1]);
    }
    println!("the slot was back after {:?}", started.elapsed());
    wait_until("the rail to be set up anew", || tier.reconnects() > 0);
}
