//! What `uma` falls back to where the machine refuses its best way, and that it is counted.
//!
//! Limits are a process's own, so each test starts itself again and lowers them there.

#[path = "../../gpu-sys/tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::AsRawFd;

use expert_tier::key::ExpertKey;
use expert_tier::testing::{Meters, TestStore, small_arena};
use expert_tier::tier::ExpertTier;
use expert_tier::uma::{DirectReads, ReadCounts, UmaOptions, UmaPath, UmaTier};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::with_lock_limit;

const KEY: ExpertKey = ExpertKey { layer: 0, expert: 1 };
/// Enough for a small arena, and no more than what any system lets a process lock.
const LOCKED_BYTES: u64 = 4 << 20;

fn lower(resource: Resource, limit: u64) {
    let limit = Rlimit { current: Some(limit), ..getrlimit(resource) };
    setrlimit(resource, limit).expect("a limit may be lowered");
}

fn assert_fetches(tier: &UmaTier, store: &TestStore, arena: &expert_tier::arena::ExpertArena) {
    let fetched = tier.fetch(KEY, arena.try_acquire(1).expect("a slot")).expect("a sound store");
    assert!(fetched.residency.payload() == store.payload(KEY));
}

#[test]
fn an_arena_that_cannot_be_registered_gets_plain_reads() {
    with_lock_limit("an_arena_that_cannot_be_registered_gets_plain_reads", LOCKED_BYTES, || {
        let store = TestStore::new(1, 2, &[300_000], 1);
        let meters = Meters::new();
        let (tier, arena) = metrics::with_local_recorder(&meters, || {
            let tier = UmaTier::open(&store.path(), &UmaOptions::default()).expect("a store");
            let arena = small_arena(2);
            lower(Resource::Memlock, 4096);
            tier.use_arena(&arena).expect("it takes the arena");
            (tier, arena)
        });
        assert_eq!(tier.path(), UmaPath::Plain);
        assert_fetches(&tier, &store, &arena);
        assert!(tier.reads().fixed == 0 && tier.reads().plain > 0);
        let counted = "metrale_fallbacks_total{backend=uma,reason=unregistered_arena}";
        assert_eq!(meters.count(counted), 1);
    });
}

#[test]
fn threads_read_where_io_uring_is_refused() {
    with_lock_limit("threads_read_where_io_uring_is_refused", LOCKED_BYTES, || {
        let store = TestStore::new(1, 2, &[300_000], 1);
        let arena = small_arena(1);
        // Room for the store's one file, open twice, and not for a ring's descriptor.
        let room = [(); 2].map(|()| File::open("/dev/null").expect("a device file"));
        let most = room.iter().map(AsRawFd::as_raw_fd).max().expect("two of them");
        drop(room);
        lower(Resource::Nofile, u64::try_from(most).expect("a descriptor") + 1);
        let meters = Meters::new();
        let open = || UmaTier::open(&store.path(), &UmaOptions::default()).expect("a store");
        let tier = metrics::with_local_recorder(&meters, open);
        assert_eq!(tier.path(), UmaPath::Threads);
        assert_eq!(tier.kind().name(), "uma");
        assert_fetches(&tier, &store, &arena);
        assert_eq!(tier.reads(), ReadCounts::default());
        let counted = "metrale_fallbacks_total{backend=uma,reason=no_io_uring}";
        assert_eq!(meters.count(counted), 1);
    });
}

#[test]
fn threads_that_were_asked_for_are_no_fallback() {
    let store = TestStore::new(1, 2, &[300_000], 1);
    let meters = Meters::new();
    let options = UmaOptions { direct: DirectReads::Never, ..UmaOptions::default() };
    let open = || UmaTier::open(&store.path(), &options).expect("a sound store");
    let tier = metrics::with_local_recorder(&meters, open);
    assert_eq!(tier.path(), UmaPath::Threads);
    assert_fetches(&tier, &store, &small_arena(1));
    for reason in ["no_io_uring", "o_direct_refused", "direct_read_failed"] {
        assert_eq!(
            meters.count(&format!("metrale_fallbacks_total{{backend=uma,reason={reason}}}")),
            0
        );
    }
}
