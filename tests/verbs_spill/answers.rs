//! What a client makes of a peer's answers: right bytes, or an error that says what it was.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expert_tier::arena::{ArenaOptions, ExpertArena, SlabPlan};
use expert_tier::error::FetchError;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{ExpertTier, Source};
use expert_tier::verbs::{VerbsOptions, VerbsTier};
use expert_tier::wire::Status;
use railset::message::{SpillTerms, Transfer};
use railset::push::{Fetch, PushStatus, Receipt};

use crate::cables::{RAILS, connect, keys, one_rail};
use crate::peer_support::process::Peer;
use crate::peer_support::{assert_right, fetch, fetch_all_right, wait_until};
use crate::pusher::{self, Pusher, TERMS, done, refused};
use crate::relay::{self, unchanged};

/// A client of the pusher, which fails a fetch soon.
fn client(peer: String) -> VerbsTier {
    connect(VerbsOptions { total: Duration::from_secs(6), ..one_rail(peer) })
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_that_are_pushed_are_right_whatever_their_size() {
    // Of one piece, of exactly one request, and of several.
    let store = std::sync::Arc::new(TestStore::new(3, 4, &[5_000, (1 << 20) - 256, 3_000_001], 71));
    let theirs = std::sync::Arc::clone(&store);
    let (peer, seen) = pusher::start(&store, TERMS, move |it, fetch| {
        assert!(fetch.bytes <= TERMS.range_bytes, "{fetch:?}");
        it.push(&theirs, &fetch)
    });
    let tier = client(peer.address());
    let keys = keys(&tier);
    let slabs = vec![SlabPlan { slot_bytes: 4 << 20, slots: keys.len() as u32 }];
    let arena = ExpertArena::new(&ArenaOptions::with_slabs(slabs)).expect("48 MiB");
    let sources = fetch_all_right(&tier, &arena, &keys, &store, Duration::from_secs(20));
    assert!(sources.iter().all(|source| *source == Source::Push), "{sources:?}");
    // Four of each, and the largest in four: whole pieces, three beside the header and then four.
    assert_eq!(seen.requests.load(Ordering::Relaxed), 4 + 4 + 4 * 4);
    assert_eq!((arena.free_slots(), tier.reconnects()), (keys.len(), 0));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_that_are_staged_are_read_and_released() {
    let store = std::sync::Arc::new(TestStore::mixed(72));
    let theirs = std::sync::Arc::clone(&store);
    let terms = SpillTerms { transfer: Transfer::Stage, ..TERMS };
    let (peer, seen) = pusher::start(&store, terms, move |it, fetch| it.stage(&theirs, &fetch));
    let tier = client(peer.address());
    let keys = keys(&tier);
    let arena = small_arena(keys.len() as u32);
    let sources = fetch_all_right(&tier, &arena, &keys, &store, Duration::from_secs(20));
    assert!(sources.iter().all(|source| *source == Source::Push), "{sources:?}");
    let requests = seen.requests.load(Ordering::Relaxed);
    wait_until("every release", || seen.releases.load(Ordering::Relaxed) == requests);
    assert_eq!(tier.reconnects(), 0);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_refusal_is_an_error_of_its_kind_and_costs_no_rail() {
    let store = TestStore::mixed(73);
    for (status, expected) in [
        (PushStatus::NoSuchKey, Status::NoSuchKey),
        (PushStatus::Unreadable, Status::Unreadable),
        (PushStatus::Damaged, Status::Unreadable),
        (PushStatus::OutOfRange, Status::Protocol),
    ] {
        let (peer, _) =
            pusher::start(&store, TERMS, move |it, fetch| it.receipt(refused(&fetch, status)));
        let (tier, arena) = (client(peer.address()), small_arena(1));
        for &key in &keys(&tier)[7..9] {
            let failure = fetch(&tier, &arena, key).expect_err("refused");
            let FetchError::Peer { status, .. } = &*failure.error else { panic!("{failure}") };
            assert_eq!(*status, expected, "{failure}");
            assert!(failure.slot.is_some());
        }
        assert!(tier.healthy(), "an error for one key");
        assert_eq!((arena.free_slots(), tier.reconnects()), (1, 0));
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_is_busy_is_asked_again() {
    let store = std::sync::Arc::new(TestStore::mixed(74));
    let theirs = std::sync::Arc::clone(&store);
    let (peer, seen) = pusher::start(&store, TERMS, move |it, fetch| match it.nth % 3 {
        2 => it.push(&theirs, &fetch),
        _ => it.receipt(refused(&fetch, PushStatus::Busy)),
    });
    let (tier, arena) = (client(peer.address()), small_arena(1));
    let key = keys(&tier)[9];
    assert_right(&store, key, &fetch(&tier, &arena, key).expect("at the third attempt"));
    assert_eq!(seen.requests.load(Ordering::Relaxed), 3);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn bytes_that_are_not_the_records_are_never_handed_out_and_the_peer_is_told() {
    let store = TestStore::mixed(75);
    // A receipt, and nothing written.
    let (peer, seen) = pusher::start(&store, TERMS, |it, fetch| it.receipt(done(&fetch)));
    let (tier, arena) = (client(peer.address()), small_arena(1));
    let key = keys(&tier)[10];
    let failure = fetch(&tier, &arena, key).expect_err("nothing was written");
    assert!(matches!(&*failure.error, FetchError::Mismatch { .. }), "{failure}");
    assert!(failure.slot.is_some());
    let told = || seen.damaged.lock().expect("nobody panics").first().copied();
    let damaged = crate::peer_support::wait_for("the peer to be told", told);
    assert_eq!((damaged.layer, damaged.expert), (key.layer, key.expert));
    assert_eq!(tier.reconnects(), 0);
}

/// A peer that answers one request as `lie` says and is honest from then on: the record comes, over
/// a rail that was set up anew, and the lie has cost the rail that it was told on.
fn one_lie(
    seed: u64,
    lie: impl Fn(&mut Pusher, Fetch) -> anyhow::Result<()> + Send + Sync + 'static,
) {
    let store = std::sync::Arc::new(TestStore::mixed(seed));
    let theirs = std::sync::Arc::clone(&store);
    let (peer, _) = pusher::start(&store, TERMS, move |it, fetch| match it.nth {
        0 => lie(it, fetch),
        _ => it.push(&theirs, &fetch),
    });
    let (tier, arena) = (client(peer.address()), small_arena(1));
    let key = keys(&tier)[11];
    assert_right(&store, key, &fetch(&tier, &arena, key).expect("from a peer that was honest"));
    assert_eq!((arena.free_slots(), tier.reconnects()), (1, 1));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_receipt_that_cannot_be_ends_the_rail_and_costs_no_fetch() {
    one_lie(76, |it, fetch| it.receipt(Receipt { id: fetch.id ^ 1, ..done(&fetch) }));
    one_lie(77, |it, fetch| it.receipt(Receipt { id: fetch.id ^ (1 << 40), ..done(&fetch) }));
    one_lie(78, |it, fetch| it.receipt(Receipt { bytes: fetch.bytes - 1, ..done(&fetch) }));
    one_lie(79, |it, _| it.say(&[0; 32]));
    one_lie(80, |it, _| it.say(&[3; 5]));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_second_receipt_for_one_request_ends_the_rail() {
    let store = std::sync::Arc::new(TestStore::mixed(81));
    let theirs = std::sync::Arc::clone(&store);
    let (peer, _) = pusher::start(&store, TERMS, move |it, fetch| {
        it.push(&theirs, &fetch)?;
        match it.nth {
            0 => it.receipt(done(&fetch)),
            _ => Ok(()),
        }
    });
    let (tier, arena) = (client(peer.address()), small_arena(1));
    for &key in &keys(&tier)[3..6] {
        assert_right(&store, key, &fetch(&tier, &arena, key).expect("it was pushed"));
    }
    wait_until("the rail to have been set up anew", || {
        tier.drive();
        tier.reconnects() == 1
    });
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_dies_between_the_write_and_the_receipt_costs_no_fetch() {
    let store = std::sync::Arc::new(TestStore::mixed(82));
    let theirs = std::sync::Arc::clone(&store);
    let (peer, _) = pusher::start(&store, TERMS, move |it, fetch| match it.nth {
        0 => {
            it.load(&theirs, &fetch);
            it.write(0, &fetch, fetch.bytes as usize)?;
            anyhow::bail!("it dies");
        }
        _ => it.push(&theirs, &fetch),
    });
    let (tier, arena) = (client(peer.address()), small_arena(1));
    let (key, started) = (keys(&tier)[12], Instant::now());
    assert_right(&store, key, &fetch(&tier, &arena, key).expect("from its next life"));
    println!("after {:?}", started.elapsed());
    assert_eq!((arena.free_slots(), tier.reconnects()), (1, 1));
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_fetch_that_waits_for_a_push_is_read_where_the_peers_next_life_has_everything_in_memory() {
    let store = TestStore::mixed(87);
    let (pusher, _) = pusher::start(&store, TERMS, |_, _| anyhow::bail!("it dies"));
    let peer = Peer::start(&store.path(), &RAILS[..2]);
    let (first, then) = (pusher.address(), peer.address());
    let which = move |nth| if nth == 0 { first.clone() } else { then.clone() };
    let relay = relay::towards(which, |_, frame| unchanged(frame), |_, frame| unchanged(frame));
    let (tier, arena) = (client(relay.address()), small_arena(1));
    let (key, started) = (keys(&tier)[13], Instant::now());
    let fetched = fetch(&tier, &arena, key).expect("from its next life");
    println!("after {:?}", started.elapsed());
    assert_right(&store, key, &fetched);
    assert_eq!(fetched.source, Source::Push, "some of it was asked for");
}
