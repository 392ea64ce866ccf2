//! The guest's cables, which tests shape, cut and unplug; and clients and peers on them.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use expert_tier::tier::{Completion, CompletionQueue, ExpertTier};
use expert_tier::verbs::{VerbsOptions, VerbsTier};
use railset::BackoffSettings;
use railset::pairing::DualRail;

use crate::peer_support::process::Peer;
use crate::peer_support::{BOUND, assert_right, wait_for, wait_until};

/// The options of a peer that serves both rails.
pub(crate) const RAILS: [&str; 4] = ["--rail", "rxe0p", "--rail", "rxe1p"];

/// Runs a program that must succeed, `words` apart by spaces.
pub(crate) fn must(words: &str) {
    assert!(succeeds(words), "{words:?} failed");
}

fn succeeds(words: &str) -> bool {
    let mut words = words.split(' ');
    let program = words.next().expect("a program");
    Command::new(program).args(words).status().expect("the guest has it").success()
}

/// Undoes something at its end, also when a test fails.
pub(crate) struct Until(Vec<String>);

impl Until {
    /// Runs `undo` at its end.
    pub(crate) fn then(undo: &str) -> Self {
        Self(vec![undo.to_owned()])
    }

    /// Runs `undo` after what it runs already.
    pub(crate) fn and_then(mut self, undo: String) -> Self {
        self.0.push(undo);
        self
    }
}

impl Drop for Until {
    fn drop(&mut self) {
        for undo in &self.0 {
            if !succeeds(undo) && !std::thread::panicking() {
                panic!("{undo:?} failed");
            }
        }
    }
}

/// What leaves `netdev` goes through `discipline` until the guard's end.
pub(crate) fn shape(netdev: &str, discipline: &str) -> Until {
    must(&format!("tc qdisc add dev {netdev} root {discipline}"));
    Until(vec![format!("tc qdisc del dev {netdev} root")])
}

/// Both rails bring at most 20 Mbit/s each until the guards' end. Nothing is dropped, so a client
/// must not ask for more at once than comes within the device's patience: see [`few_at_once`].
pub(crate) fn slow() -> [Until; 2] {
    ["v0p", "v1p"].map(|end| shape(end, "tbf rate 20mbit burst 64kb limit 16mb"))
}

/// Half a second of READs per rail at the rate of [`slow`].
pub(crate) fn few_at_once(mut options: VerbsOptions) -> VerbsOptions {
    (options.queue_pairs, options.queue_pair_depth) = (1, 4);
    options
}

/// Every packet to one of `addresses` over RDMA is lost until the guard's end.
pub(crate) fn cut(addresses: &[&str]) -> Until {
    let mut rules =
        String::from("table ip cut {\n chain c {\n type filter hook input priority 0;\n");
    for address in addresses {
        rules.push_str(&format!("ip daddr {address} udp dport 4791 drop\n"));
    }
    // In one go, and so at one moment.
    let added = Command::new("nft").arg(rules + "}\n}\n").status().expect("the guest has nft");
    assert!(added.success());
    Until::then("nft delete table ip cut")
}

/// The address of rail `rail` at the client's end, 1, or at the peer's, 2.
pub(crate) fn address(rail: u8, end: u8) -> String {
    format!("10.{}.0.{end}", rail + 1)
}

/// The cable of rail `rail`, 0 or 1, is out at the client's end until the guard's end.
pub(crate) fn unplug(rail: u8) -> Until {
    must(&format!("ip link set v{rail} down"));
    Until(vec![format!("ip link set v{rail} up"), route(rail)])
}

/// Adds the route that makes packets of a rail cross its cable, which goes with the link or the
/// address; without it both ends of the rail would be the peer's device.
pub(crate) fn route(rail: u8) -> String {
    let (ours, theirs) = (address(rail, 1), address(rail, 2));
    format!("ip route replace {theirs} dev v{rail} table 1{rail}1 src {ours}")
}

/// A peer that serves both rails.
pub(crate) fn peer(store: &TestStore) -> Peer {
    Peer::start(&store.path(), &RAILS)
}

/// A client of `peer` with bounds that the guest meets, and back-off as short as a test wants it.
pub(crate) fn options(peer: impl Into<String>) -> VerbsOptions {
    VerbsOptions {
        connect: Duration::from_secs(3),
        backoff: BackoffSettings { first_ms: 10, most_ms: 100 },
        absent: Duration::from_millis(100),
        ..VerbsOptions::new(peer)
    }
}

/// The same on one rail, rxe0 to rxe0p.
pub(crate) fn one_rail(peer: impl Into<String>) -> VerbsOptions {
    let mut options = options(peer);
    options.wishes.dual = DualRail::One;
    options.wishes.rails[0].device = Some("rxe0".into());
    options
}

pub(crate) fn connect(options: VerbsOptions) -> VerbsTier {
    VerbsTier::connect(options).expect("a peer with rails")
}

/// Looks after the rails until something flies, and says how much.
pub(crate) fn wait_flying(tier: &VerbsTier) -> usize {
    wait_for("READs in flight", || Some(tier.parts_in_flight()).filter(|&flying| flying > 0))
}

/// Takes `count` completions: each right, or an error that passes. Says how many were right.
pub(crate) fn take_all(
    tier: &VerbsTier,
    queue: &CompletionQueue,
    count: usize,
    store: &TestStore,
) -> usize {
    let mut right = 0;
    for _ in 0..count {
        let Completion { key, outcome, .. } = tier.poll(queue, BOUND).expect("an end in time");
        match outcome {
            Ok(fetched) => {
                assert_right(store, key, &fetched);
                right += 1;
            }
            Err(failure) => {
                println!("{failure}");
                assert!(failure.error.is_transient(), "{failure}");
            }
        }
    }
    right
}

/// Fails unless the peer forgets its clients' queue pairs soon, but for `left` of them.
pub(crate) fn wait_queue_pairs(peer: &Peer, left: u64) {
    wait_until(&format!("{left} queue pairs at the peer"), || peer.status().queue_pairs == left);
}

/// Every key of `tier`'s store.
pub(crate) fn keys(tier: &VerbsTier) -> Vec<ExpertKey> {
    let manifest = Arc::clone(tier.manifest());
    manifest.layout().keys().collect()
}
