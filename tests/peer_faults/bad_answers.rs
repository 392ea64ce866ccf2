//! Answers that are wrong in length, identity or form.

use std::sync::Arc;

use expert_tier::error::FetchError;
use expert_tier::key::ExpertKey;
use expert_tier::record::Mismatch;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::wire::frame::Status;
use expert_tier::wire::handshake::{encode_frame, encode_refusal};
use expert_tier::wire::{FrameType, HEADER_BYTES};

use crate::peer_support::scripted::{Conn, Scripted, answer, answer_header, record, status_header};
use crate::peer_support::{
    assert_right, fetch, fetch_batch, fetch_until_right, keys, options, small_store, wait_until,
};

const KEY: ExpertKey = ExpertKey::new(1, 3);

/// Fetches [`KEY`] from a peer that answers every time as `bad` does, until the third connection
/// is used up; then the peer is honest, and the same backend must come back. Returns the error.
fn fails_with(
    bad: impl Fn(&mut Conn, &TestStore, u64) -> anyhow::Result<()> + Send + Sync + 'static,
) -> FetchError {
    let store = Arc::new(small_store(11));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        if conn.nth >= 3 {
            return conn.serve(&theirs);
        }
        let (id, _) = conn.request()?;
        bad(conn, &theirs, id)
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    let failure = fetch(&tier, &arena, KEY).expect_err("a peer that answers wrongly");
    assert!(failure.to_string().contains(&KEY.to_string()), "{failure}");
    assert!(failure.slot.is_some(), "{failure}");
    let error = *failure.error;
    drop(failure.slot);
    assert_eq!(arena.free_slots(), 1);
    wait_until("the reconnection", || tier.healthy());
    fetch_until_right(&tier, &arena, &store, KEY);
    error
}

fn assert_unreachable(error: &FetchError, texts: &[&str]) {
    let FetchError::Unreachable { attempts, .. } = error else { panic!("{error}") };
    assert_eq!(*attempts, 3, "{error}");
    assert!(error.is_transient());
    let said = error.to_string();
    texts.iter().for_each(|text| assert!(said.contains(text), "{said}: no {text:?}"));
}

#[test]
fn garbage_after_the_handshake_is_a_broken_connection() {
    let error = fails_with(|conn, _, _| {
        conn.send(&[0xa5; 4096])?;
        conn.ignore()
    });
    assert_unreachable(&error, &["does not speak the expert protocol", "attempts: 3"]);
}

#[test]
fn a_length_that_is_not_the_records_is_refused_before_a_byte_is_stored() {
    let bytes = record(&small_store(11), KEY).len() as u64;
    for wrong in [0, 1, bytes - 1, bytes + 1, bytes * 2] {
        let error = fails_with(move |conn, store, id| {
            conn.send(&answer_header(id, wrong))?;
            conn.send(&record(store, KEY))?;
            conn.ignore()
        });
        let (wrong, bytes) = (format!("with {wrong} bytes"), format!("it has {bytes}"));
        assert_unreachable(&error, &[&wrong, &bytes]);
    }
    let error = fails_with(move |conn, _, id| {
        conn.send(&answer_header(id, u64::MAX))?;
        conn.ignore()
    });
    assert_unreachable(&error, &[&u64::MAX.to_string(), "allowed are"]);
}

#[test]
fn an_answer_to_another_request_is_a_broken_connection() {
    let error = fails_with(|conn, store, id| {
        conn.send(&answer(id + 77, &record(store, KEY)))?;
        conn.ignore()
    });
    assert_unreachable(&error, &["which is not due"]);
}

#[test]
fn an_answer_that_nobody_asked_for_is_a_broken_connection() {
    let store = Arc::new(small_store(11));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        if conn.nth == 0 {
            conn.send(&answer(0, &record(&theirs, KEY)))?;
        }
        conn.serve(&theirs)
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    wait_until("the reconnection", || tier.reconnects() == 1 && tier.healthy());
    let arena = small_arena(1);
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
}

#[test]
fn frames_that_have_no_place_here_are_named() {
    for frame in [FrameType::Welcome, FrameType::Manifest, FrameType::Fetch] {
        let error = fails_with(move |conn, _, _| {
            let body = vec![0; usize::try_from(frame.body_range().0).unwrap()];
            conn.send(&encode_frame(frame, Status::Ok, &body))?;
            conn.ignore()
        });
        assert_unreachable(&error, &[&format!("{frame:?} frame where a record was due")]);
    }
}

#[test]
fn a_refusal_in_the_middle_ends_the_connection_with_its_reason() {
    let error = fails_with(|conn, _, _| {
        conn.send(&encode_refusal(Status::Protocol, "you are\x1b[2J too fast"))?;
        conn.ignore()
    });
    assert_unreachable(&error, &["the peer closed (protocol): you are[2J too fast"]);
}

#[test]
fn a_record_cut_short_is_asked_for_again_on_a_new_connection() {
    let store = Arc::new(small_store(12));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        if conn.nth == 2 {
            return conn.serve(&theirs);
        }
        let (id, key) = conn.request()?;
        let whole = answer(id, &record(&theirs, key));
        // Once within the header of the record, once within its payload.
        conn.send(&whole[..if conn.nth == 0 { HEADER_BYTES + 100 } else { whole.len() - 1 }])
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
    assert_eq!(tier.reconnects(), 2);
    assert!(tier.healthy());
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn a_record_cut_short_every_time_ends_in_an_error_that_says_so() {
    let error = fails_with(|conn, store, id| {
        let whole = answer(id, &record(store, KEY));
        conn.send(&whole[..whole.len() / 2])
    });
    assert_unreachable(&error, &["in the middle of", &KEY.to_string(), "closed the connection"]);
}

#[test]
fn a_record_that_always_breaks_the_connection_does_not_take_its_neighbours_along() {
    let store = Arc::new(small_store(13));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        loop {
            let (id, key) = conn.request()?;
            let whole = answer(id, &record(&theirs, key));
            if key == KEY {
                return conn.send(&whole[..whole.len() / 2]);
            }
            conn.send(&whole)?;
        }
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    let keys = keys(tier.manifest());
    for completion in fetch_batch(&tier, &arena, &keys) {
        match completion.outcome {
            Ok(fetched) => assert_right(&store, completion.key, &fetched),
            Err(failure) => {
                assert_eq!(completion.key, KEY, "{failure}");
                assert_unreachable(&failure.error, &["in the middle of", &KEY.to_string()]);
            }
        }
    }
    assert_eq!(arena.free_slots(), 16);
}

/// Fetches [`KEY`] from a peer that answers with the sound record `wrong` three times.
fn handed_another(wrong: Vec<u8>, field: &str) {
    let store = Arc::new(small_store(14));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        for _ in 0..3 {
            let (id, _) = conn.request()?;
            conn.send(&answer(id, &wrong))?;
        }
        conn.serve(&theirs)
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    let failure = fetch(&tier, &arena, KEY).expect_err("another record");
    let FetchError::Mismatch { key, ref mismatch, ref origin, .. } = *failure.error else {
        panic!("{failure}")
    };
    assert_eq!((key, origin), (KEY, &peer.address()));
    let Mismatch::Identity { field: found, .. } = mismatch else { panic!("{mismatch}") };
    assert_eq!(*found, field);
    assert!(!failure.error.is_transient());
    drop(failure);
    assert_eq!(arena.free_slots(), 1);
    // Whole answers arrived: the connection is sound, and the next answer is right.
    assert!(tier.healthy());
    assert_eq!(tier.reconnects(), 0);
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
}

#[test]
fn the_record_of_another_expert_is_never_handed_out() {
    let store = small_store(14);
    handed_another(record(&store, ExpertKey::new(1, 4)), "expert");
}

#[test]
fn the_record_of_another_store_of_equal_shape_is_never_handed_out() {
    handed_another(record(&small_store(15), KEY), "store fingerprint");
}

#[test]
fn a_record_of_the_right_name_and_other_bytes_is_never_handed_out() {
    let store = Arc::new(small_store(16));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        loop {
            let (id, key) = conn.request()?;
            let mut bytes = record(&theirs, key);
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            conn.send(&answer(id, &bytes))?;
        }
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        let failure = completion.outcome.expect_err("a damaged record");
        let FetchError::Mismatch { mismatch: Mismatch::Checksum { .. }, .. } = *failure.error
        else {
            panic!("{failure}")
        };
    }
    assert_eq!(arena.free_slots(), 16);
    assert!(tier.healthy());
}

#[test]
fn a_damaged_answer_is_made_good_by_the_next_attempt() {
    let store = Arc::new(small_store(16));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        let (id, key) = conn.request()?;
        let mut bytes = record(&theirs, key);
        *bytes.last_mut().unwrap() ^= 1;
        conn.send(&answer(id, &bytes))?;
        conn.serve(&theirs)
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
    assert_eq!(tier.reconnects(), 0);
}

#[test]
fn a_peers_error_for_one_record_concerns_that_record_alone() {
    let store = Arc::new(small_store(17));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| {
        loop {
            let (id, key) = conn.request()?;
            if key == KEY {
                conn.send(&status_header(id, Status::Unreadable, 11))?;
                conn.send(b"disk\x07failed")?;
            } else {
                conn.send(&answer(id, &record(&theirs, key)))?;
            }
        }
    });
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(16);
    for completion in fetch_batch(&tier, &arena, &keys(tier.manifest())) {
        match completion.outcome {
            Ok(fetched) => assert_right(&store, completion.key, &fetched),
            Err(failure) => {
                assert_eq!(completion.key, KEY);
                let FetchError::Peer { status: Status::Unreadable, .. } = *failure.error else {
                    panic!("{failure}")
                };
                assert!(failure.to_string().contains("unreadable (diskfailed)"), "{failure}");
                assert!(!failure.error.is_transient());
            }
        }
    }
    assert_eq!(arena.free_slots(), 16);
    assert!(tier.healthy());
    assert_eq!(tier.reconnects(), 0);
}

#[test]
fn one_attempt_means_one() {
    let store = Arc::new(small_store(18));
    let theirs = Arc::clone(&store);
    let peer = Scripted::attached(&store, move |conn| match conn.nth {
        0 => conn.request().map(drop),
        _ => conn.serve(&theirs),
    });
    let options = TcpOptions { attempts: 1, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    let arena = small_arena(1);
    let failure = fetch(&tier, &arena, KEY).expect_err("closed at the first request");
    let FetchError::Unreachable { attempts: 1, .. } = *failure.error else { panic!("{failure}") };
    drop(failure);
    fetch_until_right(&tier, &arena, &store, KEY);
}
