//! Two clients: one that asks for as much as it may, all the time, and one that wants a little.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use railset::push::PushStatus;

use crate::client::{Client, DISK, peer, store};
use crate::peer_support::process::Peer;

/// Keeps every credit in use until it is told to stop; counts what came.
fn flood(client: &mut Client, stop: &AtomicBool, came: &AtomicU64) {
    let (key, bytes) = (client.spilled()[0], client.terms.range_bytes);
    let grant = client.grant(0..bytes as usize);
    let mut due = 0;
    while !stop.load(Ordering::Relaxed) || due > 0 {
        while due < client.terms.credits && !stop.load(Ordering::Relaxed) {
            let fetch = client.request(key, 0, bytes, &grant);
            client.fetch(fetch);
            due += 1;
        }
        // What does not come in time is told to be busy: that is the flood's own affair.
        came.fetch_add(u64::from(client.receipt().bytes), Ordering::Relaxed);
        due -= 1;
    }
}

fn median_ms(client: &mut Client, count: usize) -> u128 {
    let key = client.spilled()[0];
    let once = |_| {
        let started = Instant::now();
        assert_eq!(client.ask(key, 0, 65_536).0.status, PushStatus::Done);
        started.elapsed().as_millis()
    };
    let mut times: Vec<_> = (0..count).map(once).collect();
    times.sort_unstable();
    println!("64 KiB in {times:?} ms");
    times[count / 2]
}

fn while_flooded(peer: &Peer, client: &mut Client, flooder: Client) -> (u128, u64) {
    let (stop, came) = (AtomicBool::new(false), Arc::<AtomicU64>::default());
    let mut flooder = flooder;
    let median = std::thread::scope(|scope| {
        scope.spawn(|| flood(&mut flooder, &stop, &came));
        crate::peer_support::wait_until("the flood", || peer.status().pushes.push_queue > 16);
        let median = median_ms(client, 15);
        stop.store(true, Ordering::Relaxed);
        median
    });
    (median, came.load(Ordering::Relaxed))
}

/// In its turn a request of one chunk waits for what is being written, a quarter of the buffers at
/// most, and for one chunk; behind the whole flood it would wait for 32 MiB, which takes seconds here.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_client_that_floods_does_not_keep_the_others_waiting() {
    let store = store(DISK, 111);
    let args = ["--push-buffers", "2MiB", "--push-deadline-ms", "1900"];
    let peer = peer(&store, "12MiB", &args);
    let manifest = Arc::clone(store.open().manifest());
    let mut client = Client::connect(&peer, &manifest, 1);
    let alone = median_ms(&mut client, 15);
    let flooder = Client::connect(&peer, &manifest, 2);
    let (flooded, came) = while_flooded(&peer, &mut client, flooder);
    println!("alone {alone} ms, flooded {flooded} ms; the flood got {came} bytes");
    assert!(came > 1 << 20, "the flood is served, too");
    assert!(Duration::from_millis(flooded as u64) < Duration::from_millis(400));
}
