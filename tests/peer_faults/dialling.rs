//! Closing a backend whose streams are on their way to a peer that does not answer, and what is
//! logged of attempts that fail.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::small_arena;
use expert_tier::tier::ExpertTier;
use rustix::net::{AddressFamily, SocketType};

use crate::peer_support::log::Logged;
use crate::peer_support::process::Peer;
use crate::peer_support::scripted::{Conn, Scripted};
use crate::peer_support::{BOUND, assert_right, fetch, options, small_store, wait_until};

const KEY: ExpertKey = ExpertKey::new(1, 3);
/// Closing takes a tick of 50 ms; more only where the machine has other things to do.
const SOON: Duration = Duration::from_millis(500);

fn assert_closes(tier: TcpTier) {
    let start = Instant::now();
    drop(tier);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

#[test]
fn closing_does_not_wait_for_a_handshake_that_hangs() {
    let store = small_store(111);
    let manifest = Arc::clone(store.open().manifest());
    let peer = Scripted::start(move |conn| match conn.nth {
        0 => conn.attach(&manifest),
        _ => conn.ignore(),
    });
    let options = TcpOptions { streams: 3, connect: BOUND, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    wait_until("three handshakes", || peer.accepted() == 4);
    assert_closes(tier);
}

/// A listener with room for one connection that nobody accepts.
fn narrow_listener() -> TcpListener {
    let socket: OwnedFd =
        rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().expect("an address");
    rustix::net::bind(&socket, &any).expect("a free port");
    rustix::net::listen(&socket, 1).expect("a bound socket");
    socket.into()
}

/// Whether a connection of this process to `port` waits for the other end's first answer.
fn is_connecting(port: u16) -> bool {
    const SYN_SENT: &str = "02";
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("a kernel with IPv4");
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(2);
        let remote = fields.next().is_some_and(|to| to.ends_with(&format!(":{port:04X}")));
        remote && fields.next() == Some(SYN_SENT)
    })
}

#[test]
fn closing_does_not_wait_for_a_host_that_takes_no_connection() {
    let store = small_store(112);
    let manifest = Arc::clone(store.open().manifest());
    let listener = narrow_listener();
    let address = listener.local_addr().unwrap();
    let (tier, first) = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut conn = Conn { socket: listener.accept().unwrap().0, nth: 0 };
            conn.attach(&manifest).unwrap();
            conn.socket
        });
        let options = TcpOptions { connect: BOUND, ..options(address.to_string()) };
        (TcpTier::connect(options).unwrap(), first.join().unwrap())
    });
    // From here on the kernel drops what asks for a connection.
    let short = Duration::from_millis(100);
    let full: Vec<_> =
        (0..16).map_while(|_| TcpStream::connect_timeout(&address, short).ok()).collect();
    assert!(full.len() < 16, "the listener has no end of room");
    assert!(!is_connecting(address.port()));
    drop(first);
    wait_until("a connection that nobody answers", || is_connecting(address.port()));
    assert_closes(tier);
}

#[test]
fn each_reason_why_a_peer_cannot_be_reached_is_logged_once() {
    let logged = Logged::start();
    let (store, other) = (small_store(113), small_store(114));
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = TcpTier::connect(TcpOptions { streams: 2, ..options(peer.address()) }).unwrap();
    let address = peer.address();
    let lines = |reason: &str| {
        let about = |line: &&String| line.contains(&address) && line.contains(reason);
        logged.lines().iter().filter(about).count()
    };
    let (gone, another) = ("is expert-peer running there?", "another model or other weights");
    wait_until("both streams", || peer.status().connections == 3);
    peer.kill();
    wait_until("the reason to be logged", || lines(gone) == 1);
    peer.restart(&other.path());
    // What is wrong now must not be lost behind what was wrong before.
    wait_until("the new reason to be logged", || lines(another) == 1);
    // Twice as long as the longest wait between attempts.
    let start = Instant::now();
    wait_until("more attempts", || start.elapsed() > Duration::from_millis(100));
    assert_eq!((lines(gone), lines(another)), (1, 1));
    // Once it was reached, the next outage is another.
    peer.kill();
    wait_until("the first reason again", || lines(gone) == 2);
    peer.restart(&store.path());
    let arena = small_arena(1);
    wait_until("health", || tier.healthy());
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
    wait_until("both streams", || peer.status().connections == 3);
    peer.kill();
    wait_until("the reason to be logged", || lines(gone) == 3);
}
