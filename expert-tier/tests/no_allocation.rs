//! No fetch allocates, once the first ones have made room: local backends.
//!
//! One test, so that no other allocates while it counts.

mod counting;

use counting::assert_none_allocates;
use expert_tier::posix::{PosixOptions, PosixTier};
use expert_tier::testing::TestStore;
use expert_tier::uma::{DirectReads, UmaOptions, UmaTier};

#[test]
fn no_local_fetch_allocates() {
    let store = TestStore::mixed(1);
    let posix = PosixTier::open(&store.path(), PosixOptions::default()).expect("a sound store");
    assert_none_allocates("posix", &posix);
    drop(posix);
    // Small pieces, so that a record is many reads.
    for (name, direct) in [("uma", DirectReads::Auto), ("uma by threads", DirectReads::Never)] {
        let options = UmaOptions { direct, piece_bytes: 65_536, ..UmaOptions::default() };
        let uma = UmaTier::open(&store.path(), &options).expect("a sound store");
        assert_none_allocates(name, &uma);
    }
}
