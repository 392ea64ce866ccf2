//! A disk that cannot read one of its sectors: an error of the record that lies there, and of no other.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use expert_tier::error::{FetchError, FetchFailure};
use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::layer_file_name;
use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::{TestStore, small_arena, sound_record};
use expert_tier::tier::ExpertTier;
use expert_tier::wire::frame::Status;
use railset::push::PushStatus;

use crate::cables::{self, RAILS};
use crate::client::{Client, peer, still_ends};
use crate::peer_support::process::Peer;
use crate::peer_support::{BOUND, assert_right, fetch_batch, keys, options};
use crate::right::maps;

/// A file system of 64 MiB, the disk of which cannot read a sector in its middle.
const FAULTY: &str = "/faulty";
/// Bytes that are asked for at once: two ranges are a record.
const RANGE: usize = 512 << 10;

/// A store that takes most of the disk, and the one record that cannot be read. There is one for all
/// tests: a peer's end may keep its files, and so the disk full, for a moment.
fn store_and_bad() -> &'static (TestStore, ExpertKey) {
    static STORE: OnceLock<(TestStore, ExpertKey)> = OnceLock::new();
    STORE.get_or_init(make_store)
}

fn make_store() -> (TestStore, ExpertKey) {
    let store = TestStore::new_in(FAULTY.as_ref(), 2, 24, &[1_000_000, 1_040_001], 131);
    forget_pages();
    let opened = store.open();
    let unreadable = |key: &ExpertKey| {
        let layer = opened.manifest().layout().locate(*key).unwrap();
        let file = File::open(store.path().join(layer_file_name(key.layer))).unwrap();
        let mut bytes = vec![0; layer.record_bytes() as usize];
        file.read_exact_at(&mut bytes, u64::from(key.expert) * layer.stride()).is_err()
    };
    let bad: Vec<_> = keys(opened.manifest()).into_iter().filter(unreadable).collect();
    let [bad] = bad[..] else { panic!("{bad:?} cannot be read, not one record") };
    println!("{bad} cannot be read");
    (store, bad)
}

/// What was written is read from the disk from now on.
fn forget_pages() {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("the guest's root");
}

/// What the peer says of each range of a record; those that it has must be right.
fn ranges(client: &mut Client, store: &TestStore, key: ExpertKey) -> Vec<PushStatus> {
    let opened = store.open();
    let identity = opened.manifest().identity(key).expect("a key of the store");
    let expected = sound_record(&identity, &store.payload(key));
    let mut statuses = Vec::new();
    for (at, range) in expected.chunks(RANGE).enumerate() {
        let (receipt, got) = client.ask(key, (at * RANGE) as u64, range.len() as u32);
        assert!(receipt.status != PushStatus::Done || got == range, "{key} is wrong");
        statuses.push(receipt.status);
    }
    statuses
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_range_with_a_bad_sector_is_unreadable_and_the_others_come() {
    let (store, bad) = store_and_bad();
    let sources: &[&str] = if maps() { &["direct", "mmap"] } else { &["direct"] };
    for source in sources {
        let mut peer = peer(store, "7MiB", &["--spill-source", source]);
        let opened = store.open();
        let mut client = Client::connect(&peer, opened.manifest(), 1);
        assert!(client.spilled().contains(bad), "it is in the peer's memory");
        for _ in 0..2 {
            forget_pages();
            for key in client.spilled() {
                let statuses = ranges(&mut client, store, key);
                let failed = statuses.iter().filter(|it| **it == PushStatus::Unreadable).count();
                let done = statuses.iter().filter(|it| **it == PushStatus::Done).count();
                let expected = usize::from(key == *bad);
                assert_eq!(
                    (failed, done),
                    (expected, 2 - expected),
                    "{source}: {key}: {statuses:?}"
                );
            }
        }
        peer.wait_log("a spilled record could not be read");
        assert!(peer.log().contains(&bad.to_string()), "{}", peer.log());
        let pushes = peer.status().pushes;
        assert_eq!((pushes.push_errors, pushes.push_queue), (2, 0));
        drop(client);
        still_ends(&peer);
        assert!(peer.runs());
    }
}

/// Whether the peer has said that its disk is to blame. Over TCP it cannot once a part of the record is
/// on its way: then it ends the connection within it.
fn is_told(failure: &FetchFailure) -> bool {
    match &*failure.error {
        FetchError::Peer { status, .. } => *status == Status::Unreadable,
        FetchError::Unreachable { .. } => failure.to_string().contains("in the middle of"),
        _ => false,
    }
}

/// Fetches every record: the peer cannot read one of them, and the rest is right.
fn all_but_one(tier: &impl ExpertTier, store: &TestStore, bad: ExpertKey) {
    let all = keys(tier.manifest());
    fetches_all_but_one(tier, store, bad, all.chunks(8));
    // Side by side on the disk, and so perhaps one request to it.
    let beside =
        all.iter().filter(|key| key.layer == bad.layer && key.expert.abs_diff(bad.expert) < 4);
    let beside: Vec<_> = beside.copied().collect();
    fetches_all_but_one(tier, store, bad, (0..20).map(|at| &beside[at % 3..]));
}

fn fetches_all_but_one<'a>(
    tier: &impl ExpertTier,
    store: &TestStore,
    bad: ExpertKey,
    batches: impl Iterator<Item = &'a [ExpertKey]>,
) {
    let arena = small_arena(8);
    for completion in batches.flat_map(|batch| fetch_batch(tier, &arena, batch)) {
        match completion.outcome {
            Ok(fetched) => {
                assert_ne!(completion.key, bad);
                assert_right(store, completion.key, &fetched);
            }
            Err(failure) => {
                println!("{failure}");
                assert_eq!(completion.key, bad, "{failure}");
                assert!(is_told(&failure), "{failure}");
            }
        }
    }
    assert_eq!(arena.free_slots(), 8);
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn clients_of_both_transports_lose_that_record_alone() {
    let (store, bad) = store_and_bad();
    let args = [&RAILS[..], &["--dram-budget", "7MiB", "--spill-source", "direct"]].concat();
    let mut peer = Peer::start(&store.path(), &args);
    let verbs = cables::connect(cables::options(peer.address()));
    let patient = TcpOptions { deadline: BOUND, ..options(peer.address()) };
    let tcp = TcpTier::connect(patient).unwrap();
    for _ in 0..2 {
        forget_pages();
        all_but_one(&verbs, store, *bad);
        all_but_one(&tcp, store, *bad);
    }
    assert_eq!(verbs.reconnects(), 0);
    assert!(peer.runs());
}

/// A peer that holds every record pushes none: who READs the one that it could not read is told that it
/// differs.
#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_peer_that_cannot_read_one_record_starts_with_the_others() {
    let (store, bad) = store_and_bad();
    forget_pages();
    let mut peer = Peer::start(&store.path(), &RAILS);
    peer.wait_log("a record cannot be read");
    assert!(peer.log().contains(&bad.to_string()), "{}", peer.log());
    let residency = peer.status().residency;
    assert_eq!((residency.resident_records, residency.withdrawn), (48, 0));
    let tier = cables::connect(cables::options(peer.address()));
    let arena = small_arena(8);
    for completion in keys(tier.manifest()).chunks(8).flat_map(|it| fetch_batch(&tier, &arena, it))
    {
        match completion.outcome {
            Ok(fetched) => assert_right(store, completion.key, &fetched),
            Err(failure) => {
                println!("{failure}");
                assert!(completion.key == *bad, "{failure}");
                assert!(matches!(*failure.error, FetchError::Mismatch { .. }), "{failure}");
            }
        }
    }
    assert!(tier.fetch(*bad, arena.try_acquire(1).unwrap()).is_err());
    assert!(peer.runs());
}
