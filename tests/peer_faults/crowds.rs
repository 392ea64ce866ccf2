//! Many clients at once.

use std::sync::atomic::{AtomicU64, Ordering};

use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::small_arena;
use expert_tier::tier::ExpertTier;

use crate::peer_support::process::Peer;
use crate::peer_support::{BOUND, assert_right, fetch, keys, options, small_store, wait_until};

const CLIENTS: usize = 100;
const FETCHES: usize = 20;

#[test]
fn a_hundred_clients_at_once_lose_nothing_and_get_nothing_wrong() {
    let store = small_store(61);
    let peer = Peer::start(&store.path(), &["--max-clients", "128"]);
    let arena = small_arena(CLIENTS as u32);
    let right = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (store, peer, arena, right) = (&store, &peer, &arena, &right);
            scope.spawn(move || {
                let bounds = TcpOptions {
                    streams: 2,
                    deadline: BOUND,
                    connect: BOUND,
                    ..options(peer.address())
                };
                let tier = TcpTier::connect(bounds).expect("a place for every client");
                let keys = keys(tier.manifest());
                for turn in 0..FETCHES {
                    let key = keys[(client * 5 + turn * 3) % keys.len()];
                    let fetched = fetch(&tier, arena, key).expect("a record for every request");
                    assert_right(store, key, &fetched);
                    right.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let right = right.into_inner();
    assert_eq!(right, (CLIENTS * FETCHES) as u64);
    assert_eq!(arena.free_slots(), CLIENTS);
    let status = peer.status();
    assert_eq!((status.served, status.errors), (right, 0));
    wait_until("an empty peer", || peer.status().connections == 1);
    assert_eq!(peer.status().clients, 0);
}
