//! A disk that hangs: throttled by the kernel to less than a peer's deadline needs, for the peer alone. And
//! one that is slow, behind which requests queue for longer than every bound.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use expert_tier::error::FetchError;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena};
use expert_tier::tier::{CompletionQueue, ExpertTier, FetchRequest};
use expert_tier::verbs::VerbsOptions;
use expert_tier::wire::frame::Status;
use railset::push::PushStatus;
use rustix::fs::{major, minor, stat};
use rustix::process::Signal;

use crate::cables::{Until, connect, must, one_rail};
use crate::client::{Client, DISK, peer};
use crate::peer_support::process::Peer;
use crate::peer_support::{BOUND, assert_right, fetch_until_right, options};

/// Where the kernel's control groups are mounted.
const GROUPS: &str = "/tmp/groups";
/// A peer that gives the disk a second, where a client waits for long.
const DIRECT: [&str; 4] = ["--spill-source", "direct", "--push-deadline-ms", "1000"];
/// Well above the peer's deadline, and below twice that.
const TOLD_WITHIN: Duration = Duration::from_millis(1900);

/// What a slow disk gives, per second.
const SLOW: &str = "6291456";
/// Longer than what a client asks for at once takes from a slow disk, and shorter than all of [`MANY`] do.
const TOTAL: Duration = Duration::from_millis(6000);
/// Records of a store of 58 MB.
const MANY: u32 = 96;

/// Throttles `peer`'s reads of the disk to 64 KiB per second: 256 KiB take four seconds. The guard ends
/// the control groups.
fn hang(peer: &Peer) -> Until {
    slow_down(peer, "65536")
}

/// Throttles `peer`'s reads of the disk to `rate` bytes per second.
fn slow_down(peer: &Peer, rate: &str) -> Until {
    fs::create_dir_all(GROUPS).unwrap();
    must(&format!("mount -t cgroup2 none {GROUPS}"));
    let unmount = Until::then(&format!("umount {GROUPS}"));
    fs::write(format!("{GROUPS}/cgroup.subtree_control"), "+io").unwrap();
    let slow = format!("{GROUPS}/slow");
    fs::create_dir_all(&slow).unwrap();
    throttle(rate);
    fs::write(format!("{slow}/cgroup.procs"), peer.pid().to_string()).unwrap();
    unmount
}

/// Gives the slow group `rate` bytes of the disk per second.
fn throttle(rate: &str) {
    let disk = stat(DISK).unwrap().st_dev;
    let (major, minor) = (major(disk), minor(disk));
    let limit = format!("{major}:{minor} rbps={rate}");
    fs::write(format!("{GROUPS}/slow/io.max"), limit).unwrap();
}

/// Lets the disk go on, with what it kept first.
fn go_on(peer: &Peer) {
    throttle("max");
    fs::write(format!("{GROUPS}/cgroup.procs"), peer.pid().to_string()).unwrap();
}

fn store(seed: u64) -> TestStore {
    TestStore::new_in(Path::new(DISK), 2, 8, &[600_001, 60_000], seed)
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_push_that_the_disk_keeps_is_unreadable_in_time_and_the_next_one_comes() {
    let store = store(141);
    let mut peer = peer(&store, "1MiB", &DIRECT);
    let opened = store.open();
    let mut client = Client::connect(&peer, opened.manifest(), 1);
    let keys = client.spilled();
    let _unmount = hang(&peer);
    let started = Instant::now();
    let (receipt, _) = client.ask(keys[0], 0, 600_000);
    println!("{:?} after {:?}", receipt.status, started.elapsed());
    assert_eq!(receipt.status, PushStatus::Unreadable);
    assert!(started.elapsed() < TOLD_WITHIN, "{:?}", started.elapsed());
    peer.wait_log("--push-deadline-ms");
    go_on(&peer);
    let served = |client: &mut Client| client.ask(keys[1], 0, 600_000).0.status == PushStatus::Done;
    crate::peer_support::wait_until("the disk's return", || served(&mut client));
    assert!(peer.runs());
}

/// A store of many records, and a peer that has one of them in memory, at most.
fn many(seed: u64, args: &[&str]) -> (TestStore, Peer) {
    let store = TestStore::new_in(Path::new(DISK), 1, MANY, &[600_001], seed);
    let args = [&DIRECT[..], args].concat();
    let peer = Peer::start(&store.path(), &args);
    (store, peer)
}

/// Every record comes by each of `tiers` at once, although that takes longer than `TOTAL`.
fn every_record_comes(store: &TestStore, tiers: &[&dyn ExpertTier]) {
    let started = Instant::now();
    std::thread::scope(|scope| {
        for tier in tiers {
            scope.spawn(move || {
                let (arena, queue) = (small_arena(MANY), CompletionQueue::new());
                let keys = crate::peer_support::keys(tier.manifest());
                let request = |&key| FetchRequest::new(key, arena.try_acquire(1).unwrap());
                tier.submit(&mut keys.iter().map(request).collect(), &queue);
                for _ in keys {
                    let completion = tier.poll(&queue, BOUND).expect("a completion in time");
                    let fetched = completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
                    assert_right(store, completion.key, &fetched);
                }
            });
        }
    });
    println!("{} records in {:?}", MANY as usize * tiers.len(), started.elapsed());
    assert!(started.elapsed() > TOTAL, "the queue was longer than the total");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_queue_of_pushes_that_takes_longer_than_every_bound_comes_while_the_disk_gives() {
    let flags = ["--rail", "rxe0p", "--dram-budget", "1MiB", "--promote-bytes-per-s", "0"];
    let (store, peer) = many(143, &flags);
    let tier = connect(VerbsOptions { total: TOTAL, ..one_rail(peer.address()) });
    let _unmount = slow_down(&peer, SLOW);
    every_record_comes(&store, &[&tier]);
    let pushes = peer.status().pushes;
    println!("{pushes:?}");
    assert_eq!((tier.reconnects(), tier.mismatches()), (0, 0));
    assert!(!peer.log().contains("--push-deadline-ms"), "{}", peer.log());
    go_on(&peer);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_queue_over_tcp_that_takes_longer_than_every_bound_comes_while_the_disk_gives() {
    let (store, peer) = many(144, &["--rail", "none"]);
    // Few enough for what is asked for at once to keep the total.
    let options = || TcpOptions { total: TOTAL, depth: 8, ..TcpOptions::new(peer.address()) };
    let tiers: Vec<_> = (0..2).map(|_| TcpTier::connect(options()).unwrap()).collect();
    let _unmount = slow_down(&peer, SLOW);
    every_record_comes(&store, &[&tiers[0], &tiers[1]]);
    assert!(tiers.iter().all(|tier| tier.reconnects() == 0));
    assert!(!peer.log().contains("--push-deadline-ms"), "{}", peer.log());
    go_on(&peer);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn over_tcp_a_record_that_the_disk_keeps_is_unreadable_in_time_and_the_next_one_comes() {
    let store = store(142);
    let args = [&DIRECT[..], &["--rail", "none"]].concat();
    let mut peer = Peer::start(&store.path(), &args);
    let patient = TcpOptions { deadline: Duration::from_secs(10), ..options(peer.address()) };
    let tier = TcpTier::connect(patient).unwrap();
    let (arena, keys) = (small_arena(1), crate::peer_support::keys(tier.manifest()));
    let fetch = |at: usize| tier.fetch(keys[at], arena.try_acquire(1).unwrap());
    assert_right(&store, keys[0], &fetch(0).unwrap());
    let _unmount = hang(&peer);
    for at in [1, 2] {
        let started = Instant::now();
        let failure = fetch(at).unwrap_err();
        println!("{failure} after {:?}", started.elapsed());
        let FetchError::Peer { status: Status::Unreadable, .. } = *failure.error else {
            panic!("{failure}")
        };
        assert!(failure.to_string().contains("--push-deadline-ms"), "{failure}");
        assert!(started.elapsed() < TOLD_WITHIN, "{:?}", started.elapsed());
    }
    go_on(&peer);
    fetch_until_right(&tier, &arena, &store, keys[3]);
    assert_eq!(tier.reconnects(), 0, "the connection stays");
    drop(tier);
    peer.signal(Signal::TERM);
    assert!(peer.wait().success());
}
