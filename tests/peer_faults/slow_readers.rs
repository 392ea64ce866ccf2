//! Clients that stop reading, which end with `--stall-ms`, and clients that read slowly, which do not.

use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use rustix::net::sockopt::set_socket_recv_buffer_size;

use crate::peer_support::BOUND;
use crate::peer_support::process::Peer;
use crate::peer_support::raw::{Raw, request};
use crate::peer_support::scripted::{answer_header, record};
use crate::peer_support::wait_until;

/// A record that goes out in one piece.
const SMALL: ExpertKey = ExpertKey::new(0, 1);
/// One of which the most goes out by `sendfile`, or piece by piece past the page cache.
const LARGE: ExpertKey = ExpertKey::new(1, 1);
/// Far more of either than the sockets of both ends hold.
const REQUESTS: u64 = 100;

/// On a file system with direct reads, which the target directory's usually is.
fn store(seed: u64) -> TestStore {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    TestStore::new_in(place, 2, 2, &[200_000, 3_000_000], seed)
}

/// How a peer sends: from the page cache, and past it where it can.
fn ways() -> Vec<&'static [&'static str]> {
    match cfg!(metrale_rdma_verbs) {
        true => vec![&[], &["--spill-source", "direct"]],
        false => vec![&[]],
    }
}

#[test]
fn a_client_that_stops_reading_is_ended_soon_after_the_stall() {
    let store = store(61);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    for way in ways() {
        for (stall_ms, key) in [(500, LARGE), (500, SMALL), (2000, LARGE)] {
            let stall = Duration::from_millis(stall_ms);
            let flag = stall_ms.to_string();
            let peer = Peer::start(&store.path(), &[way, &["--stall-ms", &flag]].concat());
            let mut raw = Raw::attached(&peer.address(), 1, &manifest);
            assert_eq!(peer.status().clients, 1);
            let all: Vec<u8> = (0..REQUESTS).flat_map(|id| request(id, key)).collect();
            let start = Instant::now();
            raw.send(&all);
            wait_until("the end of the client", || peer.status().clients == 0);
            let took = start.elapsed();
            println!("{way:?} {key} {stall_ms} ms: {took:?}");
            assert!(took >= stall && took < stall * 3 / 2, "{way:?} {key} {stall_ms}: {took:?}");
            peer.wait_log(&format!("took no bytes for {stall_ms} ms; --stall-ms bounds this"));
            drop(raw);
        }
    }
}

#[test]
fn a_client_that_reads_slowly_all_the_time_is_served_to_the_end() {
    const STALL: Duration = Duration::from_millis(400);
    let store = store(62);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    let expected =
        [&answer_header(7, record(&store, LARGE).len() as u64)[..], &record(&store, LARGE)]
            .concat();
    std::thread::scope(|scope| {
        for way in ways() {
            let (store, manifest, expected) = (&store, &manifest, &expected);
            scope.spawn(move || {
                let peer = Peer::start(&store.path(), &[way, &["--stall-ms", "400"]].concat());
                let mut raw = Raw::attached(&peer.address(), 1, manifest);
                // What this end has room for is no hurry.
                set_socket_recv_buffer_size(&raw.0, 32 << 10).expect("a small buffer");
                raw.0.set_read_timeout(Some(BOUND)).expect("a socket takes a timeout");
                raw.request(7, LARGE);
                let (mut came, start) = (Vec::new(), Instant::now());
                let mut bytes = [0; 16 << 10];
                while came.len() < expected.len() {
                    // The pace of the client; nothing waits for it.
                    std::thread::sleep(STALL / 16);
                    let count = raw.0.read(&mut bytes).expect("the connection lasts");
                    assert!(count > 0, "{way:?}: ended after {} bytes", came.len());
                    came.extend_from_slice(&bytes[..count]);
                }
                assert!(came == *expected, "{way:?}: other bytes came");
                assert!(start.elapsed() > STALL * 4, "{:?} is not slow", start.elapsed());
            });
        }
    });
}
