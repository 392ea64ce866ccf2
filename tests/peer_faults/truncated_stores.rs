//! A store that is cut short under a running peer: errors, never a SIGBUS.

use std::fs::OpenOptions;
use std::path::Path;
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::layer_file_name;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::wire::frame::Status;
use rustix::process::Signal;

use crate::peer_support::process::Peer;
use crate::peer_support::{
    assert_right, fetch, fetch_batch, fetch_until_right, keys, options, small_store,
};

/// Cuts the file of `key`'s layer `offset` bytes after the start of its record.
fn truncate(store: &TestStore, key: ExpertKey, offset: u64) {
    let stride = store.open().manifest().layout().locate(key).unwrap().stride();
    let path = store.path().join(layer_file_name(key.layer));
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(u64::from(key.expert) * stride + offset).unwrap();
}

#[test]
fn records_that_are_gone_are_errors_of_those_records_alone() {
    let store = small_store(81);
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    let first_gone = ExpertKey::new(1, 5);
    truncate(&store, first_gone, 0);
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        let gone = completion.key.layer == 1 && completion.key.expert >= first_gone.expert;
        match completion.outcome {
            Ok(fetched) => {
                assert!(!gone, "{}", completion.key);
                assert_right(&store, completion.key, &fetched);
            }
            Err(failure) => {
                assert!(gone, "{failure}");
                let FetchError::Peer { status: Status::Unreadable, .. } = *failure.error else {
                    panic!("{failure}")
                };
                let said = failure.to_string();
                assert!(said.contains(&completion.key.to_string()), "{said}");
                assert!(said.contains("truncated"), "{said}");
                assert!(said.contains(&layer_file_name(1)), "{said}");
            }
        }
    }
    assert!(tier.healthy());
    assert_eq!(tier.reconnects(), 0);
    assert_eq!(arena.free_slots(), 16);
    assert_eq!(peer.status().errors, 3);
    assert!(peer.runs());
}

#[test]
fn a_record_that_ends_in_the_middle_names_its_key_and_spares_the_others() {
    let store = small_store(82);
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(TcpOptions { streams: 1, ..options(peer.address()) }).unwrap();
    let arena = small_arena(16);
    // Past the first 256 KiB, which are sent before the rest is read.
    let cut = ExpertKey::new(1, 3);
    truncate(&store, cut, 280_000);
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        let key = completion.key;
        match completion.outcome {
            Ok(fetched) => assert_right(&store, key, &fetched),
            Err(failure) if key == cut => {
                let FetchError::Unreachable { .. } = *failure.error else { panic!("{failure}") };
                let said = failure.to_string();
                assert!(said.contains(&format!("in the middle of {cut}")), "{said}");
            }
            Err(failure) => {
                assert!(key.layer == 1 && key.expert > cut.expert, "{failure}");
                assert!(matches!(*failure.error, FetchError::Peer { .. }), "{failure}");
            }
        }
    }
    assert_eq!(arena.free_slots(), 16);
    peer.wait_log("truncated");
    assert!(peer.log().contains(&cut.to_string()), "{}", peer.log());
    assert!(peer.runs());
    let whole = ExpertKey::new(0, 0);
    fetch_until_right(&tier, &arena, &store, whole);
}

/// Past the page cache a read that comes up short is asked for again; there is nothing to come, and
/// neither the client nor a peer that is to end may wait for it.
#[cfg(metrale_rdma_verbs)]
#[test]
fn a_record_that_ends_in_the_middle_is_told_at_once_past_the_page_cache() {
    // The target directory's file system usually has direct reads; /tmp often has none.
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let store = TestStore::new_in(place, 2, 8, &[5_000, 300_001], 83);
    let mut peer = Peer::start(&store.path(), &["--rail", "none", "--spill-source", "direct"]);
    assert_eq!(peer.status().pushes.spill_source, "direct");
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    let cut = ExpertKey::new(1, 3);
    truncate(&store, cut, 100_000);
    let started = Instant::now();
    let failure = fetch(&tier, &arena, cut).unwrap_err();
    let FetchError::Peer { status: Status::Unreadable, .. } = *failure.error else {
        panic!("{failure}")
    };
    let said = failure.to_string();
    for word in [&*layer_file_name(1), &*cut.to_string(), "truncated"] {
        assert!(said.contains(word), "{said:?} does not name {word:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    fetch_until_right(&tier, &arena, &store, ExpertKey::new(1, 2));
    assert_eq!(tier.reconnects(), 0);
    drop(tier);
    peer.signal(Signal::TERM);
    assert!(peer.wait().success());
}
