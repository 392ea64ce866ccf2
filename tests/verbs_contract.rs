//! The contract of every backend, over RDMA to a real peer process: in the guest that
//! `scripts/soft-roce` boots, whose devices are named here.
#![cfg(metrale_rdma_verbs)]

mod peer_support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use expert_tier::testing::TestStore;
use expert_tier::testing::contract::Backed;
use expert_tier::verbs::{VerbsOptions, VerbsTier};
use expert_tier::wire::Secret;

use peer_support::process::Peer;

fn make(change: impl FnOnce(&mut VerbsOptions)) -> Backed<VerbsTier, Peer> {
    make_with(TestStore::mixed(1), &[], change)
}

/// A peer that holds one record in memory, and a store on a disk with direct reads.
fn spilling(more: &[&str], change: impl FnOnce(&mut VerbsOptions)) -> Backed<VerbsTier, Peer> {
    let disk = Path::new("/scratch");
    let store = TestStore::new_in(disk, 3, 8, &[5_000, 700_001, 524_288], 1);
    make_with(store, &[&["--dram-budget", "1MiB"], more].concat(), change)
}

fn make_with(
    store: TestStore,
    more: &[&str],
    change: impl FnOnce(&mut VerbsOptions),
) -> Backed<VerbsTier, Peer> {
    let secret: PathBuf = store.scratch().join("secret");
    std::fs::write(&secret, "the secret of the contract's tests\n").expect("a file of ours");
    let args = [&["--rail", "rxe0p", "--rail", "rxe1p"], more].concat();
    let peer = Peer::start_with(&store.path(), &args, Some(&secret));
    let secret = Some(Secret::read(&secret).expect("long enough"));
    // The guest is slow, also to start a peer again; otherwise the defaults, as users run it.
    let (connect, deadline) = (Duration::from_secs(10), Duration::from_secs(5));
    let mut options =
        VerbsOptions { secret, connect, deadline, ..VerbsOptions::new(peer.address()) };
    change(&mut options);
    let tier = VerbsTier::connect(options).expect("a peer with rails");
    Backed::keeping(peer, store, tier).when_changed(|peer, store| {
        // It has the records in memory; the backend connects to its next life by itself.
        peer.kill();
        peer.restart(&store.path());
    })
}

mod over_two_rails {
    expert_tier::contract_suite!(needs "needs RDMA devices: scripts/test-verbs", || super::make(|_| ()));
}

mod pushed {
    expert_tier::contract_suite!(needs "needs RDMA devices: scripts/test-verbs", || super::spilling(&[], |_| ()));
}

mod staged {
    expert_tier::contract_suite!(needs "needs RDMA devices: scripts/test-verbs", || {
        super::spilling(&["--spill-transfer", "stage"], |_| ())
    });
}

mod over_one_rail {
    use railset::pairing::DualRail;

    expert_tier::contract_suite!(needs "needs RDMA devices: scripts/test-verbs", || super::make(|options| {
        options.wishes.dual = DualRail::One;
        options.check_threads = 2;
        options.queue_pair_depth = 2;
    }));
}
