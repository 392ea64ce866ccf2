//! A hundred clients at one peer, all at once.

mod peer_support;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::ExpertTier;

use peer_support::process::Peer;

const CLIENTS: usize = 100;
const FETCHES: usize = 200;
/// What a peer may take besides its program: a stack and a send buffer per connection, and the
/// handshakes.
const MEMORY_BYTES: u64 = CLIENTS as u64 * 1024 * 1024;

#[test]
fn a_hundred_clients_get_twenty_thousand_records_and_none_is_starved() {
    let store = TestStore::new(2, 16, &[65_000, 20_000], 91);
    let peer = Peer::start(&store.path(), &["--max-clients", "128"]);
    let payloads: Vec<Vec<u8>> =
        (0..32).map(|n| store.payload(ExpertKey::new(n / 16, n % 16))).collect();
    // Two slots each, in one arena: what is pinned is not what is tested.
    let arena = small_arena(CLIENTS as u32 / 2);
    let before = peer.status().rss_bytes;
    let start = Barrier::new(CLIENTS);
    let client = |n: usize| {
        let options = TcpOptions {
            streams: 1,
            deadline: Duration::from_secs(30),
            connect: Duration::from_secs(20),
            ..TcpOptions::new(peer.address())
        };
        let tier = TcpTier::connect(options).expect("a place for every client");
        start.wait();
        let began = Instant::now();
        for turn in 0..FETCHES {
            let expert = (n * 7 + turn * 5) % 32;
            let key = ExpertKey::new(expert as u32 / 16, expert as u32 % 16);
            let slot = arena.acquire(1 << 17, Duration::from_secs(30)).expect("a slot");
            let fetched = tier.fetch(key, slot).unwrap_or_else(|failure| panic!("{failure}"));
            assert!(fetched.residency.payload() == payloads[expert], "{key} is wrong");
        }
        FETCHES as f64 / began.elapsed().as_secs_f64()
    };
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let client = &client;
        let clients: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(move || client(n))).collect();
        clients.into_iter().map(|client| client.join().expect("a client")).collect()
    });
    let status = peer.status();
    let mean = rates.iter().sum::<f64>() / CLIENTS as f64;
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let grown = status.rss_bytes.saturating_sub(before);
    println!(
        "{CLIENTS} clients, {} records, {least:.0} to {mean:.0} per second each (least, mean), \
         the peer's memory {} bytes, {grown} more than before",
        status.served, status.rss_bytes
    );
    assert_eq!(status.served, (CLIENTS * FETCHES) as u64);
    assert!(least >= mean / 3.0, "one client got {least:.1} per second, the mean is {mean:.1}");
    assert!(grown < MEMORY_BYTES, "{grown} bytes");
}
