//! What `healthy` says, with several streams to one peer.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::wire::frame::Status;
use expert_tier::wire::handshake::encode_refusal;

use crate::peer_support::scripted::{Conn, Scripted};
use crate::peer_support::{BOUND, assert_right, fetch, options, small_store, wait_until};

const KEY: ExpertKey = ExpertKey::new(1, 3);

/// A peer that serves its first connection, breaks its second when told to, and does `third` with
/// every later one.
fn breaking_second(
    store: &Arc<TestStore>,
    third: impl Fn(&mut Conn, &TestStore) -> anyhow::Result<()> + Send + Sync + 'static,
) -> (Sender<()>, Scripted) {
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let theirs = Arc::clone(store);
    let manifest = Arc::clone(store.open().manifest());
    let peer = Scripted::start(move |conn| match conn.nth {
        0 => {
            conn.attach(&manifest)?;
            conn.serve(&theirs)
        }
        1 => {
            conn.attach(&manifest)?;
            Ok(wait.lock().unwrap().recv_timeout(BOUND)?)
        }
        _ => third(conn, &theirs),
    });
    (go, peer)
}

fn two_streams(peer: &Scripted) -> TcpTier {
    let options = TcpOptions { streams: 2, connect: BOUND, ..options(peer.address()) };
    let tier = TcpTier::connect(options).unwrap();
    wait_until("both streams", || peer.accepted() == 2);
    tier
}

#[test]
fn one_broken_stream_of_two_is_unhealthy_until_something_succeeds() {
    let store = Arc::new(small_store(101));
    // Later connections are accepted and never greeted: the broken stream stays broken.
    let (go, peer) = breaking_second(&store, |conn, _| conn.ignore());
    let tier = two_streams(&peer);
    assert!(tier.healthy());
    go.send(()).unwrap();
    wait_until("the loss to be noticed", || !tier.healthy());
    wait_until("the attempt to reconnect", || peer.accepted() == 3);
    assert!(!tier.healthy(), "an attempt is no success");
    let arena = small_arena(1);
    assert_right(&store, KEY, &fetch(&tier, &arena, KEY).unwrap());
    assert!(tier.healthy(), "the other stream has shown that the peer is there");
}

#[test]
fn a_stream_that_is_connected_again_makes_an_idle_backend_healthy() {
    let store = Arc::new(small_store(102));
    let manifest = Arc::clone(store.open().manifest());
    let (go, peer) = breaking_second(&store, move |conn, store| {
        conn.attach(&manifest)?;
        conn.serve(store)
    });
    let tier = two_streams(&peer);
    go.send(()).unwrap();
    wait_until("the reconnection", || tier.reconnects() == 1);
    wait_until("health", || tier.healthy());
}

#[test]
fn a_peer_that_allows_fewer_streams_than_wanted_is_healthy() {
    let store = Arc::new(small_store(103));
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let manifest = Arc::clone(store.open().manifest());
    let peer = Scripted::start(move |conn| {
        if conn.nth == 0 {
            conn.attach(&manifest)?;
            return Ok(wait.lock().unwrap().recv_timeout(BOUND)?);
        }
        conn.read()?;
        conn.send(&encode_refusal(Status::Busy, "one connection is enough for anybody"))
    });
    let tier = TcpTier::connect(TcpOptions { streams: 2, ..options(peer.address()) }).unwrap();
    for refused in 2..6 {
        wait_until("another refusal", || peer.accepted() >= refused);
        assert!(tier.healthy(), "with one stream, which works");
    }
    // With no stream left, being refused is what it says.
    go.send(()).unwrap();
    wait_until("the loss to be noticed", || !tier.healthy());
    let refused = peer.accepted();
    wait_until("more refusals", || peer.accepted() > refused + 2);
    assert!(!tier.healthy());
}

#[test]
fn a_connection_refused_for_another_reason_is_a_failure() {
    let store = Arc::new(small_store(104));
    let manifest = Arc::clone(store.open().manifest());
    let peer = Scripted::start(move |conn| {
        if conn.nth == 0 {
            conn.attach(&manifest)?;
            return conn.ignore();
        }
        conn.read()?;
        conn.send(&encode_refusal(Status::Secret, "who are you?"))
    });
    let tier = TcpTier::connect(TcpOptions { streams: 2, ..options(peer.address()) }).unwrap();
    wait_until("the refusal to be noticed", || !tier.healthy());
    assert!(tier.reconnects() == 0 && Duration::ZERO < tier.bound());
}
