//! A client that asks for spilled records by hand, on one rail.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::TestStore;
use gpu_sys::verbs::{
    self, Access, CompletionQueue, Completions, MemoryRegion, Post, QueuePair, QueuePairOptions,
    Remote, RemoteAccess, Signal, WorkError,
};
use railset::message::{ConnectRail, SpillTerms};
use railset::push::{Fetch, PushRequest, PushStatus, RECEIPT_BYTES, Receipt, Window};
use railset::table::{SPILLED, Table};

use crate::peer_support::process::Peer;
use crate::peer_support::raw::Raw;
use crate::peer_support::scripted::record;
use crate::peer_support::{BOUND, wait_until};
use crate::rail_client;
use crate::verbs_support::{Block, End, Pages, pages};

/// Bytes of the client's memory; room for any range that is asked for.
pub(crate) const LANDING: usize = 4 << 20;
/// Where a store has direct reads.
pub(crate) const DISK: &str = "/scratch";
/// Where it has none.
pub(crate) const MEMORY: &str = "/tmp";

/// A peer that serves rail 0, with `budget` bytes of a store in memory.
pub(crate) fn peer(store: &TestStore, budget: &str, args: &[&str]) -> Peer {
    let rails = ["--rail", "rxe0p", "--dram-budget", budget];
    Peer::start(&store.path(), &[&rails[..], args].concat())
}

/// Two layers of eight records, of several chunks and ranges, and of less than one.
pub(crate) fn store(place: &str, seed: u64) -> TestStore {
    TestStore::new_in(Path::new(place), 2, 8, &[2_300_001, 60_000], seed)
}

/// A client with a queue pair for READs and one for spilled records.
pub(crate) struct Client {
    pub(crate) raw: Raw,
    queue_pair: QueuePair<Block>,
    sends: Arc<CompletionQueue>,
    receives: Arc<CompletionQueue>,
    pub(crate) mine: Arc<Pages>,
    pub(crate) terms: SpillTerms,
    pub(crate) table: Table,
    next_id: u64,
    _reads: QueuePair<Block>,
    pub(crate) end: End,
}

fn options(credits: u32, remote_access: RemoteAccess) -> QueuePairOptions {
    QueuePairOptions {
        port: 1,
        send_wr: 4 * credits.max(1),
        recv_wr: credits,
        recv_bytes: RECEIPT_BYTES,
        inline_bytes: 64,
        remote_access,
    }
}

impl Client {
    /// Connects as client `number`, on rail 0.
    pub(crate) fn connect(peer: &Peer, manifest: &Manifest, number: u8) -> Self {
        Self::on_rail(peer, manifest, number, 0)
    }

    /// Connects as client `number`, on the peer's rail `rail`.
    pub(crate) fn on_rail(peer: &Peer, manifest: &Manifest, number: u8, rail: u8) -> Self {
        let (mut raw, offer) = rail_client::offered(&peer.address(), number, manifest);
        let terms = offer.spill.expect("a peer that spills");
        let end = End::open(&format!("rxe{rail}"));
        let credits = u32::from(terms.credits);
        let sends = CompletionQueue::new(end.context(), 4 * credits + 1).unwrap();
        let receives = CompletionQueue::new(end.context(), credits).unwrap();
        let prepare =
            |options| QueuePair::<Block>::prepare(&end.domain, &sends, &receives, options).unwrap();
        let reads = prepare(QueuePairOptions { send_wr: 1, ..options(0, RemoteAccess::None) });
        let push = prepare(options(credits, RemoteAccess::Write));
        let rail = ConnectRail { push: true, ..rail_client::rail(rail, end.gid(), vec![]) };
        let prepared = [(reads, 7), (push, 0xff_fff0)];
        let ([_reads, queue_pair], table) = rail_client::connect(&mut raw, rail, prepared);
        rail_client::acknowledge(&mut raw, table.generation());
        let mine = pages(LANDING);
        Self { raw, queue_pair, sends, receives, mine, terms, table, next_id: 1, _reads, end }
    }

    /// Every record that is not in the peer's memory.
    pub(crate) fn spilled(&self) -> Vec<ExpertKey> {
        let of_layer = |layer: &railset::table::LayerTable| {
            let number = layer.layer;
            let spilled = (0..).zip(&layer.slots).filter(|(_, slot)| **slot == SPILLED);
            spilled.map(|(expert, _)| ExpertKey::new(number, expert)).collect::<Vec<_>>()
        };
        self.table.layers().iter().flat_map(of_layer).collect()
    }

    /// Lets the peer write to `range` of the client's memory.
    pub(crate) fn grant(&self, range: Range<usize>) -> MemoryRegion {
        let pages: Arc<Pages> = Arc::clone(&self.mine);
        MemoryRegion::register(&self.end.domain, pages, range, Access::RemoteWrite).unwrap()
    }

    /// The request for `bytes` bytes of a record, to where a grant starts.
    pub(crate) fn request(
        &mut self,
        key: ExpertKey,
        offset: u64,
        bytes: u32,
        grant: &MemoryRegion,
    ) -> Fetch {
        let into = Window { address: grant.address(), rkey: grant.rkey() };
        self.next_id += 1;
        Fetch { id: self.next_id, layer: key.layer, expert: key.expert, offset, bytes, into }
    }

    /// Sends a request.
    pub(crate) fn fetch(&mut self, fetch: Fetch) {
        let (message, length) = PushRequest::Fetch(fetch).encode();
        self.send(&message[..length]);
    }

    /// Sends what may be no request.
    pub(crate) fn send(&mut self, message: &[u8]) {
        let mut found = Completions::with_room(16);
        self.sends.poll(&mut found).unwrap();
        for completion in found.iter() {
            let _unknown = self.queue_pair.settle(&completion, |_, _| {});
        }
        let post = Post::send(Block::new(&self.mine, 0, 1), message, Signal::Yes).unwrap();
        // A queue pair that the peer has ended takes nothing any more.
        let _ended = self.queue_pair.post(&mut vec![post]);
    }

    /// The next receipt, if one comes within `wait`.
    pub(crate) fn receipt_within(&mut self, wait: Duration) -> Option<Receipt> {
        let mut found = Completions::with_room(1);
        let started = Instant::now();
        while self.receives.poll(&mut found).unwrap() == 0 {
            if started.elapsed() > wait {
                return None;
            }
            std::thread::yield_now();
        }
        let mut receipt = None;
        for completion in found.iter() {
            let read = |it: Result<verbs::Received<'_>, WorkError>| {
                receipt = it.ok().map(|it| Receipt::decode(it.message).expect("a receipt"));
            };
            self.queue_pair.receive(&completion, read).unwrap();
        }
        receipt
    }

    /// The next receipt, which must come.
    pub(crate) fn receipt(&mut self) -> Receipt {
        self.receipt_within(BOUND).expect("a receipt in time")
    }

    /// Asks for a range, and gives the grant back before it looks.
    pub(crate) fn ask(&mut self, key: ExpertKey, offset: u64, bytes: u32) -> (Receipt, Vec<u8>) {
        let grant = self.grant(0..bytes.clamp(1, LANDING as u32) as usize);
        let fetch = self.request(key, offset, bytes, &grant);
        self.fetch(fetch);
        let receipt = self.receipt();
        assert_eq!(receipt.id, fetch.id);
        grant.deregister().unwrap();
        (receipt, self.mine.bytes(0, receipt.bytes as usize))
    }

    /// READs what is staged.
    pub(crate) fn read(&mut self, staged: Window, bytes: usize) -> Result<Vec<u8>, WorkError> {
        let pages: Arc<Pages> = Arc::clone(&self.mine);
        let region =
            MemoryRegion::register(&self.end.domain, pages, 0..bytes, Access::LocalWrite).unwrap();
        let Window { address, rkey } = staged;
        let block = Block::new(&self.mine, 0, bytes);
        let read = Post::read(block, &region, Remote { address, rkey }, Signal::Yes).unwrap();
        self.queue_pair.post(&mut vec![read]).unwrap();
        let mut found = Completions::with_room(16);
        let started = Instant::now();
        let mut ended = Ok(());
        while self.queue_pair.in_flight() > 0 {
            assert!(started.elapsed() < BOUND, "a READ that does not end");
            self.sends.poll(&mut found).unwrap();
            for completion in found.iter() {
                let keep = |_, outcome| ended = ended.and(outcome);
                self.queue_pair.settle(&completion, keep).unwrap();
            }
        }
        ended.map(|()| self.mine.bytes(0, bytes))
    }

    /// Gives back what is staged for request `id`.
    pub(crate) fn release(&mut self, id: u64) {
        let (message, length) = PushRequest::Release { id }.encode();
        self.send(&message[..length]);
    }

    /// Waits until the peer has ended the connection.
    pub(crate) fn expect_end(&mut self) {
        self.raw.rest();
    }
}

/// Fails unless a new client gets every spilled record's first bytes through, so that every buffer
/// must have come back; then its queue pairs go.
pub(crate) fn still_serves(peer: &Peer, store: &TestStore) {
    let mut client = Client::connect(peer, store.open().manifest(), 99);
    for key in client.spilled() {
        let bytes = 50_000;
        let (receipt, got) = client.ask(key, 0, bytes);
        assert_eq!(receipt.status, PushStatus::Done, "{key}");
        assert!(got == record(store, key)[..bytes as usize], "{key} is wrong");
    }
    drop(client);
    still_ends(peer);
}

/// Fails unless the peer soon has no queue pair any more.
pub(crate) fn still_ends(peer: &Peer) {
    wait_until("the end of every queue pair", || peer.status().queue_pairs == 0);
}
