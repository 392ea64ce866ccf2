//! `--fallback` with real peers: those that die, come back, come late, or never come.

mod peer_support;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Instant;

use expert_tier::arena::ExpertArena;
use expert_tier::fallback::{FallbackOptions, FallbackTier, WayPlan};
use expert_tier::key::ExpertKey;
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::tcp::TcpTier;
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier, FetchRequest, Source};
use railset::BackoffSettings;
use serde_json::Value;

use peer_support::log::Logged;
use peer_support::process::{Peer, metrale};
use peer_support::{
    BOUND, assert_right, fetch_all_right, keys, options, slot, small_store, wait_for,
};

/// The backend over TCP to `peer` with the store's own files behind it.
fn tcp_then_posix(peer: &Peer, store: &TestStore) -> FallbackTier {
    let tcp = TcpTier::connect(options(peer.address())).expect("a peer that listens");
    let posix = PosixTier::open(&store.path(), PosixOptions::default()).expect("a sound store");
    let ways = vec![WayPlan::opened(Arc::new(tcp)), WayPlan::opened(Arc::new(posix))];
    let backoff = BackoffSettings { first_ms: 20, most_ms: 200 };
    let options = FallbackOptions { backoff, ..FallbackOptions::default() };
    FallbackTier::open(ways, options).expect("two open ways")
}

/// Fetches `keys` as a batch, all of which must come and be right; counts how many came which way.
fn fetch_all(
    tier: &FallbackTier,
    arena: &ExpertArena,
    keys: &[ExpertKey],
    store: &TestStore,
) -> (usize, usize) {
    let sources = fetch_all_right(tier, arena, keys, store, BOUND);
    let first = sources.iter().filter(|source| **source == Source::Tcp).count();
    assert!(sources.iter().all(|s| matches!(s, Source::Tcp | Source::Local)), "{sources:?}");
    (first, sources.len() - first)
}

#[test]
fn a_peer_that_dies_and_returns_costs_no_fetch_and_a_line_each() {
    let logged = Logged::start();
    let store = small_store(201);
    let mut peer = Peer::start(&store.path(), &[]);
    let tier = tcp_then_posix(&peer, &store);
    let (arena, keys) = (small_arena(16), keys(tier.manifest()));
    let lines = |text: &str| logged.lines().iter().filter(|line| line.contains(text)).count();
    for outage in 1..=2 {
        wait_for("everything by TCP", || {
            (fetch_all(&tier, &arena, &keys, &store) == (keys.len(), 0)).then_some(())
        });
        assert_eq!(lines("requests go another way"), outage - 1);
        assert_eq!(lines("a way works again"), outage - 1);
        // With a batch on its way.
        let queue = CompletionQueue::new();
        let mut batch: Vec<_> =
            keys.iter().map(|&key| FetchRequest::new(key, slot(&arena))).collect();
        tier.submit(&mut batch, &queue);
        peer.kill();
        for _ in &keys {
            let completion = tier.poll(&queue, BOUND).expect("a completion in time");
            let fetched = completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
            assert_right(&store, completion.key, &fetched);
        }
        let mut local = 0;
        let start = Instant::now();
        while local < 5 * keys.len() {
            local += fetch_all(&tier, &arena, &keys, &store).1;
            assert!(start.elapsed() < BOUND, "only {local} records by the other way");
        }
        assert_eq!(lines("requests go another way"), outage);
        peer.restart(&store.path());
        wait_for("traffic to return", || {
            (fetch_all(&tier, &arena, &keys, &store).0 == keys.len()).then_some(())
        });
        assert_eq!(lines("a way works again"), outage);
    }
    assert!(tier.healthy());
    assert_eq!(arena.free_slots(), 16);
}

/// `metrale WORDS --expert-backend rdma --peer ADDRESS --fallback LIST --store STORE`.
fn with_fallback(words: &str, address: &str, list: &str, store: &Path) -> Command {
    let mut command = metrale();
    command.args(words.split(' ')).args(["--expert-backend", "rdma", "--peer", address]);
    command.args(["--fallback", list, "--store"]).arg(store);
    command
}

fn report(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("messages are UTF-8")
}

/// Nobody listens there.
fn nobody() -> String {
    TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").to_string()
}

#[test]
fn a_peer_that_is_not_there_is_passed_by_from_the_start() {
    let store = small_store(202);
    let mut command = with_fallback("fetch --all --json", &nobody(), "posix", &store.path());
    let output = command.output().expect("metrale starts");
    let report = report(&output);
    assert_eq!((&report["records"], &report["errors"]), (&16.into(), &0.into()), "{report}");
    assert_eq!((&report["by_source"]["local"], &report["backend"]), (&16.into(), &"rdma".into()));
    let said = said(&output);
    assert_eq!(said.matches("a way to the experts is not there").count(), 1, "{said}");
    assert!(
        said.contains("to=\"posix\"") && said.contains("is expert-peer running there?"),
        "{said}"
    );
}

#[test]
fn a_measurement_loses_no_record_when_its_peer_dies_and_uses_it_again_when_it_is_back() {
    let store = small_store(203);
    let mut peer = Peer::start(&store.path(), &[]);
    let words = "bench fetch --seconds 6 --batch 4 --deadline-ms 300 --json";
    let mut command = with_fallback(words, &peer.address(), "uma", &store.path());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("metrale");
    wait_for("the first records", || (peer.status().served > 0).then_some(()));
    peer.kill();
    peer.restart(&store.path());
    wait_for("traffic to return", || (peer.status().served > 100).then_some(()));
    let output = child.wait_with_output().expect("a child of ours");
    assert_eq!(report(&output)["errors"], 0);
}

#[test]
fn a_local_way_with_another_store_is_refused_by_name() {
    let (store, other) = (small_store(204), small_store(205));
    let peer = Peer::start(&store.path(), &[]);
    let words = "fetch --layer 0 --expert 0";
    for list in ["posix", "uma", "uma,posix"] {
        let output = with_fallback(words, &peer.address(), list, &other.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = said(&output);
        for store in [&store, &other] {
            let fingerprint = store.open().manifest().fingerprint().to_string();
            assert!(said.contains(&fingerprint), "{said}");
        }
        assert!(said.contains("--expert-store"), "{said}");
    }
    assert_eq!(peer.status().served, 0);
    // Nor is it taken for the store that was asked for while the peer is away.
    let wanted = store.open().manifest().fingerprint().to_string();
    let mut command = with_fallback(words, &nobody(), "posix", &other.path());
    let output = command.args(["--fingerprint", &wanted]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said(&output).contains(&wanted), "{output:?}");
}

#[test]
fn a_list_that_makes_no_sense_is_wrong_usage() {
    let store = small_store(206);
    for (list, why) in
        [("tcp", "names the backend itself"), ("floppy", "posix"), ("posix,posix", "twice")]
    {
        let output = with_fallback("fetch --all", &nobody(), list, &store.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(said(&output).contains(why), "{output:?}");
    }
    let mut command = metrale();
    command.args(["fetch", "--all", "--expert-backend", "rdma", "--peer", &nobody()]);
    let output = command.env("METRALE_EXPERT_FALLBACK", "uma").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = said(&output);
    for part in ["METRALE_EXPERT_FALLBACK", "uma", "--expert-store", "METRALE_EXPERT_STORE"] {
        assert!(said.contains(part), "{said}");
    }
}

#[cfg(metrale_rdma_verbs)]
#[test]
fn without_a_device_the_peer_is_reached_over_tcp() {
    let store = small_store(207);
    let peer = Peer::start(&store.path(), &[]);
    let mut command = metrale();
    command.args(["fetch", "--all", "--json", "--expert-backend", "rdma-verbs"]);
    command.args(["--rdma-dev", "no-such-device", "--peer", &peer.address(), "--fallback", "tcp"]);
    let output = command.output().expect("metrale starts");
    let report = report(&output);
    assert_eq!((&report["by_source"]["tcp"], &report["errors"]), (&16.into(), &0.into()));
    assert_eq!(report["backend"], "rdma-verbs");
    let said = said(&output);
    assert_eq!(said.matches("a way to the experts is not there").count(), 1, "{said}");
    assert!(said.contains("to=\"rdma\""), "{said}");
}
