//! Connecting to what is no peer, or not the one wanted.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::TestStore;
use expert_tier::wire::frame::{FrameHeader, FrameType, Status};
use expert_tier::wire::handshake::{encode_frame, encode_refusal};
use expert_tier::wire::message::Welcome;
use expert_tier::wire::{HEADER_BYTES, Secret};

use crate::peer_support::process::Peer;
use crate::peer_support::scripted::{Conn, Scripted};
use crate::peer_support::{options, small_store};

/// Connects, which must fail, and returns the message; it names the peer, always.
fn refused(options: TcpOptions) -> String {
    let peer = options.peer.clone();
    let Err(error) = TcpTier::connect(options) else { panic!("connected to {peer}") };
    let text = error.to_string();
    assert!(text.contains(&peer), "{text}");
    text
}

fn refused_by(script: impl Fn(&mut Conn) -> anyhow::Result<()> + Send + Sync + 'static) -> String {
    refused(options(Scripted::start(script).address()))
}

#[test]
fn nobody_listening_is_said_with_what_should() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let error = refused(options(address));
    assert!(error.contains("is expert-peer running there?"), "{error}");
}

#[test]
fn an_address_that_is_none_is_said_with_its_form() {
    for peer in ["nonsense", "127.0.0.1:99999", ""] {
        let error = refused(options(peer));
        assert!(error.contains("HOST:PORT"), "{error}");
    }
}

#[test]
fn a_web_server_is_not_taken_for_a_peer() {
    let error = refused_by(|conn| {
        conn.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    });
    assert!(error.contains("does not speak the expert protocol"), "{error}");
}

#[test]
fn a_peer_that_closes_at_once_is_said_to_have_closed() {
    let error = refused_by(|_| Ok(()));
    assert!(error.contains("closed the connection"), "{error}");
}

#[test]
fn silence_costs_the_bound_of_connecting_and_no_more() {
    let silent = Scripted::start(Conn::ignore);
    let connect = Duration::from_millis(300);
    let start = Instant::now();
    let error = refused(TcpOptions { connect, ..options(silent.address()) });
    // The whole bound, and not what was left of it when the last frame was due.
    assert!(error.contains("no answer within 300 ms; METRALE_EXPERT_CONNECT_MS"), "{error}");
    assert!(start.elapsed() >= connect);
    assert!(start.elapsed() < connect * 5, "{:?}", start.elapsed());
}

#[test]
fn a_handshake_that_trickles_costs_the_bound_of_connecting_and_no_more() {
    let trickle = Scripted::start(|conn| {
        let hello = FrameHeader::control(FrameType::ServerHello, 56).encode();
        for byte in hello.into_iter().chain(std::iter::repeat(0)) {
            conn.socket.write_all(&[byte])?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    });
    let connect = Duration::from_millis(300);
    let start = Instant::now();
    let error = refused(TcpOptions { connect, ..options(trickle.address()) });
    assert!(error.contains("no answer within"), "{error}");
    assert!(start.elapsed() < connect * 5, "{:?}", start.elapsed());
}

#[test]
fn a_length_without_end_is_refused_before_its_bytes() {
    for frame in [FrameType::ServerHello, FrameType::Manifest, FrameType::Refusal] {
        let error = refused_by(move |conn| {
            conn.send(&FrameHeader::control(frame, u64::MAX).encode())?;
            conn.ignore()
        });
        assert!(error.contains(&format!("{}", u64::MAX)), "{error}");
        assert!(error.contains("allowed are"), "{error}");
    }
}

#[test]
fn a_frame_out_of_turn_is_named() {
    let error = refused_by(|conn| {
        conn.send(&encode_frame(FrameType::Attached, Status::Ok, &[]))?;
        conn.ignore()
    });
    assert!(error.contains("Attached frame where ServerHello was due"), "{error}");
}

#[test]
fn a_refusal_reaches_the_caller_with_its_reason() {
    let error = refused_by(|conn| {
        conn.read()?;
        conn.send(&encode_refusal(Status::Busy, "64 clients are here;\n\x1b[31m --max-clients"))
    });
    assert!(error.contains("the peer refused (busy): 64 clients are here;"), "{error}");
    assert!(!error.contains('\x1b'), "a peer's text must not reach the terminal raw");
}

/// A peer that welcomes with `welcome` and sends `manifest`.
fn refused_manifest(welcome: Welcome, manifest: Vec<u8>) -> String {
    refused_by(move |conn| {
        conn.welcome(welcome)?;
        conn.read()?;
        conn.send(&encode_frame(FrameType::Manifest, Status::Ok, &manifest))?;
        conn.ignore()
    })
}

#[test]
fn a_manifest_that_is_not_the_one_announced_is_refused() {
    let (store, other) = (small_store(1), small_store(2));
    let (store, other) = (store.open(), other.open());
    let (fingerprint, bytes) = (store.manifest().fingerprint(), store.manifest().as_bytes());
    let manifest_bytes = bytes.len() as u64;
    let welcome = Welcome { fingerprint, manifest_bytes };

    let garbage = vec![b'{'; bytes.len()];
    let error = refused_manifest(welcome, garbage);
    assert!(error.contains("the manifest is not readable"), "{error}");

    let error = refused_manifest(welcome, bytes[..bytes.len() - 1].to_vec());
    assert!(error.contains(&format!("announced a manifest of {manifest_bytes} bytes")), "{error}");

    let mut altered = bytes.to_vec();
    let digit = altered.iter_mut().rev().find(|byte| byte.is_ascii_digit()).unwrap();
    *digit = if *digit == b'1' { b'2' } else { b'1' };
    let error = refused_manifest(welcome, altered);
    assert!(error.contains("the peer's manifest: "), "{error}");

    // A sound manifest of equal shape, and another fingerprint than was announced.
    let others = other.manifest().as_bytes().to_vec();
    let welcome = Welcome { fingerprint, manifest_bytes: others.len() as u64 };
    let error = refused_manifest(welcome, others);
    assert!(error.contains("another model or other weights"), "{error}");
}

#[test]
fn a_manifest_that_is_too_large_is_refused_before_its_bytes() {
    let store = small_store(1);
    let fingerprint = store.open().manifest().fingerprint();
    let error = refused_by(move |conn| {
        conn.welcome(Welcome { fingerprint, manifest_bytes: 1 << 40 })?;
        conn.read()?;
        conn.send(&FrameHeader::control(FrameType::Manifest, 1 << 40).encode()[..HEADER_BYTES])?;
        conn.ignore()
    });
    assert!(error.contains(&(1_u64 << 40).to_string()), "{error}");
}

fn secret_file(store: &TestStore, name: &str, text: &str) -> PathBuf {
    let path = store.scratch().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn secrets_that_differ_or_stand_on_one_side_are_told_apart() {
    let store = small_store(3);
    let right = secret_file(&store, "right", "the right secret of this test");
    let wrong = secret_file(&store, "wrong", "the wrong secret of this test");
    let (right_secret, wrong) = (Secret::read(&right).unwrap(), Secret::read(&wrong).unwrap());

    let peer = Peer::start_with(&store.path(), &[], Some(&right));
    let with = |secret| TcpOptions { secret, ..options(peer.address()) };
    let error = refused(with(Some(wrong)));
    assert!(error.contains("wrong secret"), "{error}");
    assert!(error.contains("--secret-file"), "{error}");
    let error = refused(with(None));
    assert!(error.contains("the peer wants a secret"), "{error}");
    assert!(error.contains("METRALE_EXPERT_SECRET_FILE"), "{error}");
    TcpTier::connect(with(Some(right_secret.clone()))).expect("the right secret");
    peer.wait_log("wrong secret");
    assert!(!peer.log().contains("the right secret of this test"), "a secret was logged");

    let open = Peer::start(&store.path(), &[]);
    let secret = Some(right_secret);
    let error = refused(TcpOptions { secret, ..options(open.address()) });
    assert!(error.contains("asks for none"), "{error}");
}

#[test]
fn another_models_store_is_refused_before_a_weight_moves() {
    let (store, other) = (small_store(4), small_store(5));
    let peer = Peer::start(&store.path(), &[]);
    let (served, wanted) =
        (store.open().manifest().fingerprint(), other.open().manifest().fingerprint());
    let error = refused(TcpOptions { fingerprint: Some(wanted), ..options(peer.address()) });
    assert!(error.contains("another model or other weights"), "{error}");
    assert!(error.contains(&served.to_string()) && error.contains(&wanted.to_string()), "{error}");
    let status = peer.status();
    assert_eq!((status.served, status.bytes), (0, 0));
}
