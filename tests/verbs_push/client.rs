//! A client that asks for spilled records by hand, on rail 0.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::TestStore;
use expert_tier::wire::frame::FrameType;
use gpu_sys::verbs::{
    self, Access, CompletionQueue, Completions, Destination, MemoryRegion, Post, PreparedQueuePair,
    QueuePair, QueuePairOptions, RemoteAccess, RemoteEnd, Signal,
};
use railset::facts::{Gid, Mtu};
use railset::message::{
    Connect, ConnectRail, Connected, Offer, Psn, Qpn, QueuePairEnd, Request, SpillTerms, TableAck,
};
use railset::push::{Fetch, PushRequest, RECEIPT_BYTES, Receipt, Window};
use railset::table::{SPILLED, Table};

use crate::peer_support::BOUND;
use crate::peer_support::process::Peer;
use crate::peer_support::raw::Raw;
use crate::verbs_support::{Block, End, Pages, local_end, pages};

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

fn ours(prepared: &PreparedQueuePair<Block>, psn: u32) -> QueuePairEnd {
    QueuePairEnd { qpn: Qpn::new(prepared.number()).unwrap(), psn: Psn::from_random(psn) }
}

impl Client {
    /// Connects as client `number`.
    pub(crate) fn connect(peer: &Peer, manifest: &Manifest, number: u8) -> Self {
        let mut raw = Raw::attached(&peer.address(), number, manifest);
        raw.send_frame(FrameType::RailsRequest, &Request.encode());
        let offer = Offer::decode(&raw.read().expect("an offer").1).unwrap();
        let terms = offer.spill.expect("a peer that spills");
        let end = End::open("rxe0");
        let credits = u32::from(terms.credits);
        let sends = CompletionQueue::new(end.context(), 4 * credits + 1).unwrap();
        let receives = CompletionQueue::new(end.context(), credits).unwrap();
        let prepare =
            |options| QueuePair::<Block>::prepare(&end.domain, &sends, &receives, options).unwrap();
        let reads = prepare(QueuePairOptions { send_wr: 1, ..options(0, RemoteAccess::None) });
        let push = prepare(options(credits, RemoteAccess::Write));
        let queue_pairs = vec![ours(&reads, 7), ours(&push, 0xff_fff0)];
        let rail = ConnectRail {
            index: 0,
            node_guid: u64::from(number) + 0x1234,
            port: 1,
            gid: Gid(end.gid()),
            lid: 0,
            mtu: Mtu::B4096,
            depth: 4,
            queue_pairs: queue_pairs.clone(),
            push: true,
        };
        raw.send_frame(FrameType::RailsConnect, &Connect { rails: vec![rail] }.encode());
        let (header, body) = raw.read().expect("an answer");
        assert_eq!(header.frame, FrameType::RailsConnected, "{:?}", String::from_utf8_lossy(&body));
        let connected = Connected::decode(&body).unwrap();
        let table = Table::decode(&raw.read().expect("a table").1).unwrap();
        let theirs = &connected.rails[0].queue_pairs;
        let up = |prepared: PreparedQueuePair<Block>, at: usize| {
            let remote = RemoteEnd {
                queue_pair: theirs[at].qpn.value(),
                psn: verbs::Psn::new(theirs[at].psn.value()),
                destination: Destination::Ethernet {
                    gid: Ipv4Addr::new(10, 1, 0, 2).to_ipv6_mapped().octets(),
                },
                mtu: verbs::Mtu::from_wire(connected.rails[0].mtu.wire()).unwrap(),
                max_dest_rd_atomic: connected.rails[0].depth,
            };
            let local = local_end(verbs::Psn::new(queue_pairs[at].psn.value()));
            prepared.connect(&remote, &local).unwrap()
        };
        let (reads, queue_pair) = (up(reads, 0), up(push, 1));
        let generation = table.generation();
        raw.send_frame(FrameType::RailsTableAck, &TableAck { generation }.encode());
        let mine = pages(LANDING);
        let _reads = reads;
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
            let read = |it: Result<verbs::Received<'_>, verbs::WorkError>| {
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

    /// Waits until the peer has ended the connection.
    pub(crate) fn expect_end(&mut self) {
        self.raw.rest();
    }
}
