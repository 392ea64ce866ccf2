//! Tables that fit the store and are wrong all the same: keys that are no keys any more, places
//! where other records lie.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier};
use expert_tier::wire::frame::FrameType;
use railset::table::LayerTable;

use crate::cables::{connect, keys, one_rail, options, peer, take_all};
use crate::peer_support::scripted::Scripted;
use crate::peer_support::{assert_right, fetch, fetch_until_right, submit, wait_until};
use crate::relay::{self, changed_table, unchanged};

/// A relay that makes `change` of the tables of the connections that `spoilt` names.
fn spoiling(
    peer: String,
    spoilt: impl Fn(usize) -> bool + Send + Sync + 'static,
    change: impl Fn(&mut LayerTable) + Send + Sync + 'static,
) -> Scripted {
    let to_client = move |nth, (frame, body): relay::Frame| match frame {
        FrameType::RailsTable if spoilt(nth) => changed_table(&body, 0, &change),
        _ => unchanged((frame, body)),
    };
    relay::start(peer, to_client, |_, frame| unchanged(frame))
}

/// A condition that a test may change.
fn while_set() -> (Arc<AtomicBool>, impl Fn(usize) -> bool) {
    let set = Arc::new(AtomicBool::new(true));
    let is_set = Arc::clone(&set);
    (set, move |_| is_set.load(Ordering::Relaxed))
}

/// Keys that are none, but for the first layer's: a rail is tried with one of its records.
fn other_keys(layer: &mut LayerTable) {
    if layer.layer > 0 {
        layer.columns.iter_mut().for_each(|column| column.rkey ^= 0x00ff_ff00);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_key_that_is_no_longer_valid_fails_by_name_and_a_right_one_is_used_again() {
    let store = TestStore::mixed(61);
    let peer = peer(&store);
    let (spoilt, is_spoilt) = while_set();
    let relay = spoiling(peer.address(), is_spoilt, other_keys);
    let tier = connect(one_rail(relay.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    for &key in &keys[8..11] {
        let started = Instant::now();
        let failure = fetch(&tier, &arena, key).expect_err("no such key");
        println!("after {:?}: {failure}", started.elapsed());
        let FetchError::Unreachable { reason, attempts, .. } = &*failure.error else {
            panic!("{failure}")
        };
        assert!(reason.contains("remote access"), "{reason}");
        assert!(*attempts <= 3, "{attempts} attempts");
        assert!(failure.slot.is_some());
        assert!(started.elapsed() < Duration::from_secs(5));
    }
    spoilt.store(false, Ordering::Relaxed);
    fetch_until_right(&tier, &arena, &store, keys[8]);
    wait_until("a healthy backend", || tier.healthy());
    assert_eq!(arena.free_slots(), 1);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_batch_with_keys_that_are_no_longer_valid_ends_by_name() {
    let store = TestStore::mixed(62);
    let peer = peer(&store);
    let (spoilt, is_spoilt) = while_set();
    let relay = spoiling(peer.address(), is_spoilt, other_keys);
    let mut options = options(relay.address());
    options.total = Duration::from_secs(8);
    let tier = connect(options);
    let (mut keys, queue) = (keys(&tier), CompletionQueue::new());
    keys.retain(|key| key.layer > 0);
    let arena = small_arena(keys.len() as u32);
    submit(&tier, &arena, &keys, &queue);
    let started = Instant::now();
    assert_eq!(take_all(&tier, &queue, keys.len(), &store), 0);
    println!("{} fetches failed within {:?}", keys.len(), started.elapsed());
    wait_until("all slots back", || arena.free_slots() == keys.len());
    spoilt.store(false, Ordering::Relaxed);
    fetch_until_right(&tier, &arena, &store, keys[8]);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_wrong_key_on_one_rail_of_two_costs_no_fetch() {
    let store = TestStore::mixed(63);
    let peer = peer(&store);
    // The second rail, until it is set up again.
    let relay = spoiling(peer.address(), |nth| nth == 1, other_keys);
    let tier = connect(options(relay.address()));
    let (keys, queue) = (keys(&tier), CompletionQueue::new());
    let arena = small_arena(keys.len() as u32);
    submit(&tier, &arena, &keys, &queue);
    assert_eq!(take_all(&tier, &queue, keys.len(), &store), keys.len());
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn records_in_each_others_places_are_never_handed_out() {
    let store = TestStore::mixed(64);
    let peer = peer(&store);
    let (spoilt, is_spoilt) = while_set();
    let relay = spoiling(peer.address(), is_spoilt, |layer| layer.slots.rotate_left(1));
    let tier = connect(options(relay.address()));
    let (keys, arena) = (keys(&tier), small_arena(1));
    for &key in &keys {
        let failure = fetch(&tier, &arena, key).expect_err("another expert's record");
        assert!(matches!(&*failure.error, FetchError::Mismatch { .. }), "{failure}");
        assert!(failure.slot.is_some());
    }
    assert!(tier.healthy(), "the rails are well");
    assert_eq!((arena.free_slots(), tier.reconnects()), (1, 0));
    drop(tier);
    spoilt.store(false, Ordering::Relaxed);
    let tier = connect(options(relay.address()));
    assert_right(&store, keys[2], &fetch(&tier, &arena, keys[2]).expect("its own place"));
}
