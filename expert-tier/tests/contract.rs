//! The contract over the backends that need no other process.

use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::testing::contract::Backed;
use expert_tier::testing::{FaultyTier, TestStore};
use expert_tier::tier::ExpertTier;
use expert_tier::uma::{UmaOptions, UmaTier};

fn open(store: &TestStore) -> PosixTier {
    PosixTier::open(&store.path(), PosixOptions::default()).expect("a store that was just packed")
}

mod posix {
    use super::*;

    fn make() -> Backed<PosixTier> {
        let store = TestStore::mixed(1);
        let tier = open(&store);
        Backed::new(store, tier)
    }

    expert_tier::contract_suite!(make);
}

mod uma {
    use super::*;

    fn make() -> Backed<UmaTier> {
        let store = TestStore::mixed(5);
        let tier = UmaTier::open(&store.path(), &UmaOptions::default()).expect("a sound store");
        Backed::new(store, tier)
    }

    expert_tier::contract_suite!(make);
}

mod faulty_without_faults {
    use super::*;

    fn make() -> Backed<FaultyTier<PosixTier>> {
        let store = TestStore::mixed(2);
        let tier = FaultyTier::new(open(&store));
        Backed::new(store, tier)
    }

    expert_tier::contract_suite!(make);
}

mod faulty {
    use std::time::Duration;

    use expert_tier::error::FetchError;
    use expert_tier::key::ExpertKey;
    use expert_tier::testing::{Fault, small_arena};
    use expert_tier::tier::{CompletionQueue, FetchRequest};

    use super::*;

    #[test]
    fn the_nth_request_fails_as_asked_and_the_others_do_not() {
        let store = TestStore::mixed(3);
        let tier = FaultyTier::new(open(&store));
        tier.fail(1, Fault::Unreachable);
        tier.fail(3, Fault::Mismatch);
        let arena = small_arena(4);
        let queue = CompletionQueue::new();
        let mut batch: Vec<_> = (0..4)
            .map(|expert| {
                let slot = arena.try_acquire(1 << 20).expect("a free slot");
                FetchRequest::new(ExpertKey::new(1, expert), slot)
            })
            .collect();
        tier.submit(&mut batch, &queue);
        for _ in 0..4 {
            let completion = tier.poll(&queue, Duration::from_secs(10)).expect("a completion");
            let expert = completion.key.expert;
            match completion.outcome.map_err(|failure| *failure.error) {
                Ok(_) => assert_eq!(expert % 2, 0),
                Err(FetchError::Unreachable { .. }) => assert_eq!(expert, 1),
                Err(FetchError::Mismatch { .. }) => assert_eq!(expert, 3),
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_fault_of_the_link_is_healed_by_the_next_success() {
        let store = TestStore::mixed(4);
        let tier = FaultyTier::new(open(&store));
        tier.fail(0, Fault::Deadline);
        let arena = small_arena(1);
        let fetch = || tier.fetch(ExpertKey::new(0, 0), arena.try_acquire(1).expect("a slot"));
        let failure = fetch().expect_err("the fault asked for");
        assert!(failure.error.is_transient());
        drop(failure);
        assert!(!tier.healthy());
        fetch().expect("a sound store");
        assert!(tier.healthy());
    }
}
