//! Clients that ask for what is not there, or break the rules: each hears of it or is ended, and
//! neither the peer nor the other clients notice.

use std::collections::HashSet;

use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use railset::push::{Fetch, PushStatus};

use crate::client::{Client, DISK, peer, still_serves, store};
use crate::peer_support::process::Peer;
use crate::peer_support::scripted::record;
use crate::peer_support::wait_until;

/// An honest client beside the others.
struct Witness {
    store: TestStore,
    peer: Peer,
    client: Client,
}

impl Witness {
    fn new(seed: u64) -> Self {
        let store = store(DISK, seed);
        let peer = peer(&store, "12MiB", &["--push-buffers", "1MiB"]);
        let client = Client::connect(&peer, store.open().manifest(), 1);
        Self { store, peer, client }
    }

    fn other(&self) -> Client {
        Client::connect(&self.peer, self.store.open().manifest(), 2)
    }

    /// Fails unless the other client's queue pairs are gone, and this one's records come.
    fn unharmed(&mut self) {
        let peer = &self.peer;
        wait_until("the other's end", || peer.status().queue_pairs == 2);
        let key = self.client.spilled()[0];
        let (receipt, got) = self.client.ask(key, 3, 900_001);
        assert_eq!(receipt.status, PushStatus::Done);
        assert!(got == record(&self.store, key)[3..900_004]);
    }

    /// Fails unless the peer ends `other` for a reason that has `word` in it.
    fn ended(&mut self, mut other: Client, word: &str) {
        other.expect_end();
        self.peer.wait_log(word);
        let log = self.peer.log();
        let line = log.lines().rfind(|line| line.contains("pushes to a client end")).unwrap();
        println!("{line}");
        assert!(line.contains(word), "{line}");
        drop(other);
        self.unharmed();
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn what_is_not_there_is_refused_and_the_lane_goes_on() {
    let mut witness = Witness::new(91);
    let mut client = witness.other();
    let key = client.spilled()[0];
    let bytes = record(&witness.store, key).len() as u64;
    let most = client.terms.range_bytes;
    let absent = PushStatus::NoSuchKey;
    let out = PushStatus::OutOfRange;
    for (key, offset, bytes, status) in [
        (ExpertKey::new(key.layer, 8), 0, 10, absent),
        (ExpertKey::new(key.layer, u32::MAX), 0, 10, absent),
        (ExpertKey::new(u32::MAX, 0), 0, 10, absent),
        (key, bytes - 9, 10, out),
        (key, bytes, 1, out),
        (key, u64::MAX, 1, out),
        (key, u64::MAX - 8, 100, out),
        (key, 0, most + 1, out),
        (key, 0, u32::MAX, out),
        (key, bytes - 9, 9, PushStatus::Done),
        (key, 0, most, PushStatus::Done),
    ] {
        let (receipt, _) = client.ask(key, offset, bytes);
        assert_eq!(receipt.status, status, "{bytes} bytes of {key} from {offset}");
        let expected = if status == PushStatus::Done { bytes } else { 0 };
        assert_eq!(receipt.bytes, expected);
    }
    drop(client);
    witness.unharmed();
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_live_id_is_in_use() {
    let mut witness = Witness::new(92);
    let mut client = witness.other();
    let key = client.spilled()[0];
    let bytes = client.terms.range_bytes;
    let grant = client.grant(0..bytes as usize);
    let fetch = client.request(key, 0, bytes, &grant);
    client.fetch(fetch);
    client.fetch(fetch);
    let receipts = [client.receipt(), client.receipt()];
    assert!(receipts.iter().all(|receipt| receipt.id == fetch.id));
    let statuses: HashSet<_> = receipts.iter().map(|receipt| receipt.status).collect();
    assert_eq!(statuses, HashSet::from([PushStatus::InUse, PushStatus::Done]));
    grant.deregister().unwrap();
    assert!(client.mine.bytes(0, bytes as usize) == record(&witness.store, key)[..bytes as usize]);
    // The id is free again.
    let grant = client.grant(0..64);
    let into = client.request(key, 0, 64, &grant).into;
    client.fetch(Fetch { into, bytes: 64, ..fetch });
    assert_eq!(client.receipt().status, PushStatus::Done);
    drop((grant, client));
    witness.unharmed();
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn more_than_its_credits_ends_a_client() {
    let mut witness = Witness::new(93);
    let mut client = witness.other();
    let key = client.spilled()[0];
    let bytes = client.terms.range_bytes;
    let grant = client.grant(0..bytes as usize);
    for _ in 0..3 * client.terms.credits {
        let fetch = client.request(key, 0, bytes, &grant);
        client.fetch(fetch);
    }
    witness.ended(client, "credits");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn what_is_no_request_ends_a_client() {
    let mut witness = Witness::new(94);
    for (message, word) in [
        (vec![9; 48], "no request"),
        (vec![1; 48], "no request"),
        (vec![1], "no request"),
        (vec![], "no request"),
        (vec![0; 64], "ended as local"),
    ] {
        let mut client = witness.other();
        client.send(&message);
        witness.ended(client, word);
    }
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_grant_smaller_than_what_was_asked_for_ends_its_client() {
    let mut witness = Witness::new(95);
    for smaller in [1, 4096, 300_000] {
        let mut client = witness.other();
        let key = client.spilled()[0];
        let bytes = client.terms.range_bytes;
        let grant = client.grant(0..bytes as usize - smaller);
        let fetch = client.request(key, 0, bytes, &grant);
        client.fetch(fetch);
        witness.ended(client, "remote access error");
    }
    let Witness { store, peer, client } = witness;
    drop(client);
    still_serves(&peer, &store);
    let errors = peer.status().pushes.push_errors;
    assert!(errors >= 3, "{errors} errors counted");
}

#[test]
#[ignore = "needs RDMA devices: scripts/test-verbs"]
fn a_grant_that_is_given_back_early_ends_its_client() {
    let mut witness = Witness::new(96);
    let mut client = witness.other();
    let key = client.spilled()[0];
    let bytes = client.terms.range_bytes;
    let grant = client.grant(0..bytes as usize);
    let fetch = client.request(key, 0, bytes, &grant);
    grant.deregister().unwrap();
    client.mine.fill(0x5a);
    client.fetch(fetch);
    client.expect_end();
    assert!(client.mine.bytes(0, bytes as usize).iter().all(|byte| *byte == 0x5a));
    witness.ended(client, "remote access error");
}
