//! Clients that break the rules, against a real peer, which goes on serving the others.

use std::net::Shutdown;
use std::process::Stdio;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::wire::frame::{FrameHeader, FrameType, Status};
use expert_tier::wire::handshake::{ClientHandshake, Goal};

use crate::peer_support::process::{Peer, metrale};
use crate::peer_support::raw::{Raw, request, soon_after};
use crate::peer_support::scripted::record;
use crate::peer_support::{BOUND, assert_right, fetch, options, small_store, wait_for, wait_until};

const KEY: ExpertKey = ExpertKey::new(1, 3);

/// Fails unless an honest client gets a record.
fn assert_serves(peer: &Peer, store: &TestStore) {
    let tier = TcpTier::connect(options(peer.address())).expect("the peer goes on");
    let arena = small_arena(1);
    assert_right(store, KEY, &fetch(&tier, &arena, KEY).expect("the peer goes on"));
}

fn hello() -> Vec<u8> {
    ClientHandshake::start(Goal::Status, None, [1; 16], [2; 32]).1
}

#[test]
fn bytes_that_are_no_frame_are_refused_with_a_reason() {
    let store = small_store(41);
    let peer = Peer::start(&store.path(), &[]);
    for garbage in [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        vec![0; 24],
        FrameHeader::control(FrameType::ClientHello, u64::MAX).encode().to_vec(),
        FrameHeader::control(FrameType::Record, 1 << 30).encode().to_vec(),
        FrameHeader::control(FrameType::ManifestRequest, 0).encode().to_vec(),
        [&FrameHeader::control(FrameType::ClientHello, 64).encode()[..], &[9; 64]].concat(),
    ] {
        let mut raw = Raw::connect(&peer.address());
        raw.try_send(&garbage);
        let (status, text) = raw.refusal();
        assert_eq!(status, Status::Protocol, "{text}");
        assert!(!text.is_empty());
    }
    assert_serves(&peer, &store);
    let status = peer.status();
    assert_eq!((status.refused, status.served), (7, 1));
}

#[test]
fn a_length_without_end_costs_a_connection_and_no_memory() {
    let store = small_store(41);
    let peer = Peer::start(&store.path(), &[]);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    let before = peer.status().rss_bytes;
    for client in 0..20 {
        let mut raw = Raw::attached(&peer.address(), client, &manifest);
        raw.send(&FrameHeader::control(FrameType::Fetch, u64::MAX - u64::from(client)).encode());
        let (status, text) = raw.refusal();
        assert_eq!(status, Status::Protocol, "{text}");
        assert!(text.contains("allowed are 8 to 8"), "{text}");
    }
    assert_serves(&peer, &store);
    assert!(peer.status().rss_bytes < before + (8 << 20));
}

#[test]
fn a_status_outside_an_answer_is_refused() {
    let store = small_store(41);
    let peer = Peer::start(&store.path(), &[]);
    let mut raw = Raw::welcomed(&peer.address(), 1);
    let attach = FrameHeader { status: Status::Busy, ..FrameHeader::control(FrameType::Attach, 0) };
    raw.send(&attach.encode());
    let (status, text) = raw.refusal();
    assert_eq!(status, Status::Protocol);
    assert!(text.contains("Attach") && text.contains("busy"), "{text}");
}

#[test]
fn half_a_hello_and_silence_is_dropped_after_its_bound() {
    let store = small_store(42);
    let peer = Peer::start(&store.path(), &["--handshake-ms", "300"]);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    // Nothing at all, half a hello, all of a handshake but no request, half a request.
    let silent = Raw::connect(&peer.address());
    let mut half = Raw::connect(&peer.address());
    half.send(&hello()[..40]);
    let welcomed = Raw::welcomed(&peer.address(), 1);
    let mut begun = Raw::attached(&peer.address(), 2, &manifest);
    begun.send(&request(1, KEY)[..20]);
    // Attached and idle: not dropped.
    let mut idle = Raw::attached(&peer.address(), 3, &manifest);
    let start = Instant::now();
    for mut raw in [silent, half, welcomed, begun] {
        raw.expect_end();
    }
    assert!(start.elapsed() < soon_after(300), "{:?}", start.elapsed());
    peer.wait_log("no answer within 300 ms; --handshake-ms bounds this");
    idle.request(7, KEY);
    assert_eq!(idle.read().unwrap().0.request_id, 7);
}

#[test]
fn a_hello_that_trickles_does_not_stretch_its_bound() {
    let store = small_store(42);
    let peer = Peer::start(&store.path(), &["--handshake-ms", "300"]);
    let mut raw = Raw::connect(&peer.address());
    let start = Instant::now();
    for byte in hello() {
        if !raw.try_send(&[byte]) {
            break;
        }
        // The pace of the trickle; nothing waits for it.
        std::thread::sleep(Duration::from_millis(20));
    }
    raw.rest();
    assert!(start.elapsed() < soon_after(300), "{:?}", start.elapsed());
}

#[test]
fn no_weight_moves_before_attach() {
    let store = small_store(43);
    let other = small_store(44);
    let peer = Peer::start(&store.path(), &[]);

    let mut raw = Raw::connect(&peer.address());
    raw.request(1, KEY);
    assert_eq!(raw.refusal().0, Status::Protocol);

    let mut raw = Raw::welcomed(&peer.address(), 1);
    raw.request(1, KEY);
    let (status, text) = raw.refusal();
    assert_eq!(status, Status::Protocol);
    assert!(text.contains("once attached"), "{text}");

    let mut raw = Raw::welcomed(&peer.address(), 1);
    let wanted = other.open().manifest().fingerprint();
    raw.send_frame(FrameType::Attach, &wanted.0);
    let (status, text) = raw.refusal();
    assert_eq!(status, Status::OtherStore);
    assert!(text.contains(&wanted.to_string()), "{text}");
    assert!(text.contains(&store.open().manifest().fingerprint().to_string()), "{text}");

    let status = peer.status();
    assert_eq!((status.served, status.bytes, status.refused), (0, 0, 3));
    assert_serves(&peer, &store);
}

/// Frames by hand: a client of ours would refuse such a peer itself, and hide what the peer does.
#[test]
fn a_client_that_does_not_know_the_secret_is_refused_and_sees_nothing_of_the_store() {
    let store = small_store(53);
    let secret = store.scratch().join("secret");
    std::fs::write(&secret, "a secret of the test").unwrap();
    let peer = Peer::start_with(&store.path(), &[], Some(&secret));
    let fingerprint = store.open().manifest().fingerprint();
    let greeted = || {
        let mut raw = Raw::connect(&peer.address());
        raw.send(&hello());
        let (header, _) = raw.read().expect("an answer to ClientHello");
        assert_eq!(header.frame, FrameType::ServerHello);
        raw
    };
    for proof in [[0; 32], [0xff; 32]] {
        let mut raw = greeted();
        raw.send_frame(FrameType::ClientProof, &proof);
        // `refusal` takes the next frame and then wants the end: no Welcome came before or behind.
        let (status, text) = raw.refusal();
        assert_eq!(status, Status::Secret, "{text}");
        assert!(text.contains("--secret-file"), "{text}");
        assert!(!text.contains(&fingerprint.to_string()), "{text}");
    }
    // Without any proof: what comes after Welcome is refused as well.
    let behind = [
        (FrameType::ManifestRequest, vec![]),
        (FrameType::Attach, fingerprint.0.to_vec()),
        (FrameType::StatusRequest, vec![]),
    ];
    for (frame, body) in behind {
        let mut raw = greeted();
        raw.send_frame(frame, &body);
        let (status, text) = raw.refusal();
        assert_eq!(status, Status::Protocol, "{frame:?}: {text}");
    }
    let status = peer.status();
    assert_eq!((status.served, status.bytes, status.refused), (0, 0, 5));
}

#[test]
fn a_key_out_of_range_is_an_answer_and_the_connection_goes_on() {
    let store = small_store(45);
    let peer = Peer::start(&store.path(), &[]);
    let mut raw = Raw::attached(&peer.address(), 1, store.open().manifest());
    let wrong = [
        ExpertKey::new(0, 8),
        ExpertKey::new(2, 0),
        ExpertKey::new(u32::MAX, u32::MAX),
        ExpertKey::new(0, u32::MAX),
    ];
    for (id, key) in wrong.into_iter().enumerate() {
        raw.request(id as u64, key);
        let (header, text) = raw.read().expect("an answer");
        assert_eq!(header.frame, FrameType::Record);
        assert_eq!((header.status, header.request_id), (Status::NoSuchKey, id as u64));
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains(&key.to_string()), "{text}");
    }
    raw.request(9, KEY);
    let (header, bytes) = raw.read().expect("an answer");
    assert_eq!((header.status, header.request_id), (Status::Ok, 9));
    assert!(bytes == record(&store, KEY));
    assert_eq!((peer.status().errors, peer.status().served), (4, 1));
}

#[test]
fn a_client_that_never_reads_is_dropped_and_costs_no_memory() {
    let store = TestStore::mixed(46);
    let peer = Peer::start(&store.path(), &["--stall-ms", "400"]);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    let before = peer.status();
    let deaf: Vec<_> = (0..10)
        .map(|client| {
            let mut raw = Raw::attached(&peer.address(), client, &manifest);
            // Far more than the sockets of both ends hold.
            let all: Vec<u8> = (0..100).flat_map(|id| request(id, ExpertKey::new(1, 0))).collect();
            raw.send(&all);
            raw
        })
        .collect();
    // Others are served while it lasts.
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    let mut most = 0;
    let start = Instant::now();
    wait_until("the end of the clients that never read", || {
        assert_right(&store, KEY, &fetch(&tier, &arena, KEY).expect("an honest client"));
        let status = peer.status();
        most = most.max(status.rss_bytes);
        status.clients == 1
    });
    assert!(start.elapsed() < soon_after(400), "{:?}", start.elapsed());
    assert!(most < before.rss_bytes + (24 << 20), "{} to {most} bytes", before.rss_bytes);
    peer.wait_log("took no bytes for 400 ms; --stall-ms bounds this");
    assert_eq!(tier.reconnects(), 0);
    drop(deaf);
}

#[test]
fn clients_killed_in_the_middle_leave_nothing_behind() {
    let store = TestStore::mixed(47);
    let peer = Peer::start(&store.path(), &[]);
    let address = peer.address();
    let kill_one = || {
        let served = peer.status().served;
        let mut client = metrale()
            .args(["bench", "fetch", "--expert-backend", "rdma", "--peer", &address])
            .args(["--batch", "16", "--seconds", "60"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("a client at work", || peer.status().served > served + 20);
        client.kill().unwrap();
        client.wait().unwrap();
        // The status request is a connection too.
        wait_until("the end of its connections", || {
            let status = peer.status();
            (status.clients, status.connections) == (0, 1)
        });
    };
    kill_one();
    let resources = peer.resources();
    let rss = peer.status().rss_bytes;
    for _ in 0..8 {
        kill_one();
    }
    wait_until("as many threads and descriptors as before", || {
        let now = peer.resources();
        now.0 <= resources.0 && now.1 <= resources.1
    });
    let now = peer.status().rss_bytes;
    assert!(now < rss + (8 << 20), "{rss} to {now} bytes");
    assert_serves(&peer, &store);
}

#[test]
fn more_clients_than_allowed_are_told_the_limit_and_a_place_is_used_again() {
    let store = small_store(48);
    let peer = Peer::start(&store.path(), &["--max-clients", "2"]);
    let connect = || TcpTier::connect(TcpOptions { streams: 2, ..options(peer.address()) });
    let (first, second) = (connect().unwrap(), connect().unwrap());
    wait_until("two clients with two connections each", || peer.status().connections == 5);
    let Err(error) = connect() else { panic!("a third client") };
    let error = error.to_string();
    assert!(error.contains("the peer refused (busy)"), "{error}");
    assert!(error.contains("2 clients") && error.contains("--max-clients"), "{error}");
    // Whoever is in is not disturbed.
    let arena = small_arena(1);
    assert_right(&store, KEY, &fetch(&first, &arena, KEY).unwrap());
    drop(second);
    let third = wait_for("the place that came free", || connect().ok());
    assert_right(&store, KEY, &fetch(&third, &arena, KEY).unwrap());
}

#[test]
fn more_connections_than_one_client_may_have_are_refused() {
    let store = small_store(49);
    let peer = Peer::start(&store.path(), &[]);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    let all: Vec<_> = (0..16).map(|_| Raw::attached(&peer.address(), 5, &manifest)).collect();
    let mut raw = Raw::welcomed(&peer.address(), 5);
    raw.send_frame(FrameType::Attach, &manifest.fingerprint().0);
    let (status, text) = raw.refusal();
    assert_eq!(status, Status::Busy);
    assert!(text.contains("16 connections"), "{text}");
    assert_serves(&peer, &store);
    drop(all);
}

#[test]
fn strangers_cannot_crowd_out_a_client() {
    let store = small_store(50);
    let peer = Peer::start(&store.path(), &["--max-clients", "1", "--handshake-ms", "600000"]);
    let tier = TcpTier::connect(options(peer.address())).unwrap();
    let arena = small_arena(1);
    // Three times as many as may shake hands at once. They say nothing, and stay.
    let strangers: Vec<_> = (0..200).map(|_| Raw::connect(&peer.address())).collect();
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
    assert_eq!(tier.reconnects(), 0);
    drop(tier);
    wait_for("a new client", || TcpTier::connect(options(peer.address())).ok());
    assert!(peer.status().connections < 80, "{}", peer.status().connections);
    drop(strangers);
}

#[test]
fn a_client_that_only_asks_for_the_status_does_not_keep_its_place_for_ever() {
    let store = small_store(52);
    let peer = Peer::start(&store.path(), &["--handshake-ms", "300"]);
    let mut raw = Raw::welcomed(&peer.address(), 1);
    let start = Instant::now();
    while raw.try_status() {
        assert!(start.elapsed() < soon_after(300), "{:?}", start.elapsed());
    }
    assert_serves(&peer, &store);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_an_answer_is_no_error_of_the_peers() {
    let store = TestStore::mixed(51);
    let peer = Peer::start(&store.path(), &[]);
    let manifest = std::sync::Arc::clone(store.open().manifest());
    for client in 0..5 {
        let mut raw = Raw::attached(&peer.address(), client, &manifest);
        (0..20).for_each(|id| raw.request(id, KEY));
        raw.0.set_read_timeout(Some(BOUND)).unwrap();
        raw.0.peek(&mut [0]).expect("an answer has begun");
        raw.0.shutdown(Shutdown::Both).unwrap();
    }
    wait_until("the end of their connections", || peer.status().connections == 1);
    assert_serves(&peer, &store);
    assert!(!peer.log().contains("panic"), "{}", peer.log());
    assert!(TcpTier::connect(options(peer.address())).unwrap().healthy());
}
