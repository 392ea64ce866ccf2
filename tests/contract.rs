//! The contract of every backend, over TCP to a real peer process that wants a secret.

mod peer_support;

use std::path::PathBuf;

use expert_tier::tcp::{TcpOptions, TcpTier};
use expert_tier::testing::contract::Backed;
use expert_tier::testing::{FaultyTier, TestStore};
use expert_tier::wire::Secret;

use peer_support::process::Peer;

fn make<T>(streams: u32, wrap: impl FnOnce(TcpTier) -> T) -> Backed<T, Peer> {
    // Defaults but for the streams: the contract must hold as users run it.
    make_with(|options| options.streams = streams, wrap)
}

fn make_with<T>(
    change: impl FnOnce(&mut TcpOptions),
    wrap: impl FnOnce(TcpTier) -> T,
) -> Backed<T, Peer> {
    make_over(TestStore::mixed(1), &[], change, wrap)
}

fn make_over<T>(
    store: TestStore,
    args: &[&str],
    change: impl FnOnce(&mut TcpOptions),
    wrap: impl FnOnce(TcpTier) -> T,
) -> Backed<T, Peer> {
    let secret: PathBuf = store.scratch().join("secret");
    std::fs::write(&secret, "the secret of the contract's tests\n").expect("a file of ours");
    let peer = Peer::start_with(&store.path(), args, Some(&secret));
    let secret = Some(Secret::read(&secret).expect("long enough"));
    let mut options = TcpOptions { secret, ..TcpOptions::new(peer.address()) };
    change(&mut options);
    let tier = TcpTier::connect(options).expect("a peer that listens");
    Backed::keeping(peer, store, wrap(tier))
}

mod tcp_over_one_stream {
    expert_tier::contract_suite!(|| super::make(1, |tier| tier));
}

mod tcp_over_four_streams {
    expert_tier::contract_suite!(|| super::make(4, |tier| tier));
}

mod tcp_checked_while_more_arrives {
    expert_tier::contract_suite!(|| super::make_with(|o| o.check_threads = 2, |tier| tier));
}

#[cfg(metrale_rdma_verbs)]
mod tcp_past_the_page_cache {
    use std::path::Path;

    use super::*;

    fn make() -> Backed<TcpTier, Peer> {
        // The target directory's file system usually has direct reads; /tmp often has none.
        let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let store = TestStore::new_in(place, 3, 8, &[5_000, 700_001, 524_288], 1);
        let args = ["--rail", "none", "--spill-source", "direct"];
        make_over(store, &args, |_| (), |tier| tier)
    }

    expert_tier::contract_suite!(make);
}

mod tcp_before_a_local_way {
    use std::sync::Arc;

    use expert_tier::fallback::{FallbackOptions, FallbackTier, WayPlan};
    use expert_tier::posix::{PosixOptions, PosixTier};

    use super::*;

    fn make() -> Backed<FallbackTier, Peer> {
        let store = TestStore::mixed(1);
        let peer = Peer::start(&store.path(), &[]);
        let tcp = TcpTier::connect(TcpOptions::new(peer.address())).expect("a peer that listens");
        let posix =
            PosixTier::open(&store.path(), PosixOptions::default()).expect("the same store");
        let ways = vec![WayPlan::opened(Arc::new(tcp)), WayPlan::opened(Arc::new(posix))];
        let tier = FallbackTier::open(ways, FallbackOptions::default()).expect("two open ways");
        Backed::keeping(peer, store, tier)
    }

    expert_tier::contract_suite!(make);
}

mod faulty_without_faults_over_tcp {
    expert_tier::contract_suite!(|| super::make(2, super::FaultyTier::new));
}

#[cfg(feature = "unverified")]
mod unverified {
    use std::time::Duration;

    use expert_tier::error::FetchError;
    use expert_tier::key::ExpertKey;
    use expert_tier::posix::{PosixOptions, PosixTier};
    use expert_tier::testing::contract::Harness;
    use expert_tier::testing::small_arena;
    use expert_tier::tier::{CompletionQueue, FetchRequest, Landed};
    use expert_tier::uma::{UmaOptions, UmaTier};

    use super::*;

    const BOUND: Duration = Duration::from_secs(20);

    #[test]
    fn a_record_that_is_not_checked_is_no_residency() {
        check(&make(1, |tier| tier));
    }

    #[test]
    fn a_local_record_that_is_not_checked_is_no_residency() {
        let store = TestStore::mixed(2);
        let tier = PosixTier::open(&store.path(), PosixOptions::default()).expect("a store");
        check(&Backed::new(store, tier));
        let store = TestStore::mixed(3);
        let tier = UmaTier::open(&store.path(), &UmaOptions::default()).expect("a store");
        check(&Backed::new(store, tier));
    }

    fn check(harness: &impl Harness) {
        let (tier, arena) = (harness.tier(), small_arena(1));
        let queue = CompletionQueue::new();
        let key = ExpertKey::new(1, 3);
        let submit = || {
            let slot = arena.acquire(1, BOUND).expect("a free slot").without_check();
            tier.submit(&mut vec![FetchRequest::new(key, slot)], &queue);
        };
        // Damage that nobody is asked to find.
        harness.store().flip_bit(key, 300_000);
        submit();
        match tier.poll_landed(&queue, BOUND) {
            Some(Landed::Unchecked(record)) => {
                assert_eq!((record.key(), record.payload_bytes()), (key, 700_001));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(arena.free_slots(), 1);
        // Whoever takes records alone gets none.
        submit();
        let failure = tier.poll(&queue, BOUND).expect("a completion").outcome.unwrap_err();
        assert!(matches!(*failure.error, FetchError::Unchecked { .. }), "{failure}");
        drop(failure);
        let slot = arena.acquire(1, BOUND).expect("a free slot").without_check();
        let failure = tier.fetch(key, slot).unwrap_err();
        assert!(matches!(*failure.error, FetchError::Unchecked { .. }), "{failure}");
        assert!(failure.slot.is_some());
    }
}
