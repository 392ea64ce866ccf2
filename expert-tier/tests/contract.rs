//! The contract over the backends that need no other process.

use std::sync::Arc;

use expert_tier::arena::ExpertArena;
use expert_tier::fallback::{FallbackOptions, FallbackTier, WayPlan};
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::testing::contract::{Backed, Harness};
use expert_tier::testing::{Fault, FaultyTier, TestStore};
use expert_tier::tier::ExpertTier;
use expert_tier::uma::{DirectReads, ReadCounts, UmaOptions, UmaPath, UmaTier};

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

/// A backend that must read as it is told, to its end.
struct Uma {
    tier: Option<UmaTier>,
    store: TestStore,
    path: UmaPath,
}

impl Uma {
    fn make(direct: DirectReads, path: UmaPath) -> Self {
        let store = TestStore::mixed(5);
        let options = UmaOptions { direct, ..UmaOptions::default() };
        let tier = UmaTier::open(&store.path(), &options).expect("a sound store");
        Self { tier: Some(tier), store, path }
    }

    fn check_path(&self) {
        let Some(tier) = &self.tier else { return };
        let ReadCounts { fixed, plain } = tier.reads();
        assert_eq!(tier.path(), self.path);
        assert!(fixed == 0 || self.path == UmaPath::Registered);
        assert!(plain == 0 || self.path == UmaPath::Plain);
    }
}

impl Harness for Uma {
    fn tier(&self) -> &dyn ExpertTier {
        self.tier.as_ref().expect("the backend has not been closed")
    }

    fn store(&self) -> &TestStore {
        &self.store
    }

    fn arena_made(&self, arena: &ExpertArena) {
        if self.path == UmaPath::Registered {
            self.tier().use_arena(arena).expect("it takes the arena");
        }
    }

    fn close(&mut self) {
        self.check_path();
        self.tier = None;
    }
}

impl Drop for Uma {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.check_path();
        }
    }
}

mod uma_into_a_registered_arena {
    use super::*;

    expert_tier::contract_suite!(|| Uma::make(DirectReads::Auto, UmaPath::Registered));
}

mod uma_by_plain_reads {
    use super::*;

    expert_tier::contract_suite!(|| Uma::make(DirectReads::Auto, UmaPath::Plain));
}

mod uma_by_threads {
    use super::*;

    expert_tier::contract_suite!(|| Uma::make(DirectReads::Never, UmaPath::Threads));
}

mod a_store_truncated_while_open {
    use std::fs::OpenOptions;

    use expert_tier::error::FetchError;
    use expert_tier::key::ExpertKey;
    use expert_tier::store::StoreError;
    use expert_tier::store::manifest::layer_file_name;
    use expert_tier::testing::small_arena;

    use super::*;

    /// Cuts a layer's file inside its second record, and asks for that one.
    fn fails_that_record_alone(store: &TestStore, tier: &impl ExpertTier) {
        let arena = small_arena(1);
        let fetch = |expert| {
            let slot = arena.try_acquire(1).expect("a free slot");
            tier.fetch(ExpertKey::new(1, expert), slot)
        };
        let stride = tier.manifest().layout().layers()[1].stride();
        let path = store.path().join(layer_file_name(1));
        let file = OpenOptions::new().write(true).open(path).expect("a file of ours");
        // On a page, within a block of the disk, and at the record's very start.
        for bytes in [stride + 8192, stride + 5001, stride] {
            file.set_len(bytes).expect("truncating a file of ours");
            let failure = fetch(1).expect_err("a record that is not all there");
            let FetchError::Store(StoreError::Truncated { key, .. }) = *failure.error else {
                panic!("{failure}");
            };
            assert_eq!(key, ExpertKey::new(1, 1));
            assert!(failure.slot.is_some());
            drop(failure);
            assert!(!tier.healthy());
            let fetched = fetch(0).expect("a record before the cut");
            assert!(fetched.residency.payload() == store.payload(ExpertKey::new(1, 0)));
            assert!(tier.healthy());
        }
    }

    #[test]
    fn fails_the_record_that_is_cut_by_posix() {
        let store = TestStore::mixed(6);
        fails_that_record_alone(&store, &open(&store));
    }

    #[test]
    fn fails_the_record_that_is_cut_by_uma() {
        let store = TestStore::mixed(7);
        let tier = UmaTier::open(&store.path(), &UmaOptions::default()).expect("a sound store");
        assert_eq!(tier.path(), UmaPath::Plain);
        fails_that_record_alone(&store, &tier);
    }
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

mod another_way_than_one_that_never_works {
    use super::*;

    fn make() -> Backed<FallbackTier> {
        let store = TestStore::mixed(8);
        let first = FaultyTier::new(open(&store));
        first.fail_all(Some(Fault::Unreachable));
        let uma = UmaTier::open(&store.path(), &UmaOptions::default()).expect("a sound store");
        let ways = vec![WayPlan::opened(Arc::new(first)), WayPlan::opened(Arc::new(uma))];
        let tier = FallbackTier::open(ways, FallbackOptions::default()).expect("two open ways");
        Backed::new(store, tier)
    }

    expert_tier::contract_suite!(make);
}

mod faulty {
    use std::time::Duration;

    use expert_tier::error::FetchError;
    use expert_tier::key::ExpertKey;
    use expert_tier::testing::small_arena;
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
