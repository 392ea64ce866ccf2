//! A peer that holds nothing in memory, on rxe0p; the test says what it does with each request.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use expert_tier::wire::frame::Status;
use expert_tier::wire::handshake::encode_frame;
use gpu_sys::verbs::{
    Access, CompletionQueue, Completions, Library, Memory, MemoryRegion, Post, QueuePair,
    QueuePairOptions, Remote, RemoteAccess, Signal, WorkError,
};
use railset::choose::{RailSpec, Wish};
use railset::driver;
use railset::handshake::peer::{CreateConnected, PeerAction, PeerHandshake, PeerRails};
use railset::message::{Damaged, Psn, Qpn, QueuePairEnd, SpillTerms, Transfer};
use railset::pairing::serve_rails;
use railset::push::{Fetch, PushRequest, PushStatus, Receipt, Window};
use railset::table::{Column, LayerTable, SPILLED, Table};

use crate::peer_support::BOUND;
use crate::peer_support::scripted::{Conn, Scripted, record};
use crate::verbs_support::{Block, End, Pages, pages};

pub(crate) const TERMS: SpillTerms =
    SpillTerms { transfer: Transfer::Push, credits: 8, range_bytes: 1 << 20 };
/// Where in the pusher's pages the bytes lie that it writes where it should not; behind it, as many.
pub(crate) const SPOIL_AT: usize = 1 << 20;
const PAGES_BYTES: usize = 2 << 20;

/// What the pusher has seen, over all connections.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) requests: AtomicUsize,
    pub(crate) releases: AtomicUsize,
    /// WRITEs that the client's device has refused.
    pub(crate) refused: AtomicUsize,
    /// WRITEs that went where they should not any more, or before, and succeeded.
    pub(crate) spoilt: AtomicUsize,
    pub(crate) damaged: Mutex<Vec<Damaged>>,
}

/// The pusher's end of one rail.
pub(crate) struct Pusher {
    pair: QueuePair<Block>,
    queue: Arc<CompletionQueue>,
    pages: Arc<Pages>,
    region: MemoryRegion,
    asked: VecDeque<PushRequest>,
    ended: VecDeque<Result<(), WorkError>>,
    over: Arc<AtomicBool>,
    pub(crate) seen: Arc<Seen>,
    /// Requests before this one, over all connections.
    pub(crate) nth: usize,
}

/// A peer of `store` that does `answer` with every request.
pub(crate) fn start(
    store: &TestStore,
    terms: SpillTerms,
    answer: impl Fn(&mut Pusher, Fetch) -> anyhow::Result<()> + Send + Sync + 'static,
) -> (Scripted, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let (theirs, table) = (Arc::clone(&seen), all_spilled(store));
    let slot_bytes = store.open().manifest().layout().max_stride();
    let scripted = Scripted::attached(store, move |conn| {
        let (_reads, mut pusher) = connect(conn, terms, &table, slot_bytes, &theirs)?;
        let listener = listen(conn, &pusher);
        while let Some(request) = pusher.next_request() {
            match request {
                PushRequest::Fetch(fetch) => {
                    pusher.nth = theirs.requests.fetch_add(1, Ordering::Relaxed);
                    if answer(&mut pusher, fetch).is_err() {
                        break;
                    }
                }
                PushRequest::Release { .. } => {
                    theirs.releases.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let _ = conn.socket.shutdown(Shutdown::Both);
        listener.join().expect("a listener that ends");
        Ok(())
    });
    (scripted, seen)
}

/// A table in which nothing is in memory.
fn all_spilled(store: &TestStore) -> Table {
    let store = store.open();
    let layers = store.manifest().layout().layers().iter().map(|layer| LayerTable {
        layer: layer.layer(),
        slot_stride: layer.stride(),
        columns: vec![Column { base: 0, rkey: 0 }],
        slots: vec![SPILLED; layer.experts() as usize],
    });
    Table::new(1, layers.collect()).expect("a small store")
}

fn rail() -> RailSpec {
    let library = Library::open().expect("libibverbs");
    let wish: Wish = "rxe0p:1".parse().expect("a device and a GID");
    let devices = driver::devices(&library).expect("devices");
    serve_rails(&devices, &[wish]).expect("rxe0p").remove(0).spec
}

/// The handshake, up to the table; gives the queue pairs for READs, too.
fn connect(
    conn: &mut Conn,
    terms: SpillTerms,
    table: &Table,
    slot_bytes: u64,
    seen: &Arc<Seen>,
) -> anyhow::Result<(Vec<QueuePair<Block>>, Pusher)> {
    let layers = table.layers().len() as u32;
    let rails = PeerRails::new(&[rail()], 4, layers, 1, slot_bytes, Some(terms));
    let mut machine = PeerHandshake::new(Arc::new(rails));
    let end = End::open("rxe0p");
    let mut made = None;
    loop {
        let (header, body) = conn.read()?;
        let kind = header.frame.rails_kind().context("not of the rails")?;
        let mut actions = VecDeque::from(machine.on_message(kind, &body)?);
        while let Some(action) = actions.pop_front() {
            match action {
                PeerAction::Send(kind, body) => {
                    conn.send(&encode_frame(kind.into(), Status::Ok, &body))?;
                }
                PeerAction::CreateQueuePairs(creates) => {
                    let (ends, pairs, queue) = create(&end, &creates[0]);
                    made = Some((pairs, queue));
                    actions.extend(machine.on_created(&[ends], table)?);
                }
                PeerAction::Acknowledged(_) => {
                    let (mut pairs, queue) = made.context("acknowledged first")?;
                    let pair = pairs.pop().context("no queue pair for pushes")?;
                    return Ok((pairs, Pusher::new(&end, pair, queue, seen)));
                }
                PeerAction::Usage(_) | PeerAction::Damaged(_) => {}
            }
        }
    }
}

type Made = (Vec<QueuePairEnd>, Vec<QueuePair<Block>>, Arc<CompletionQueue>);

fn create(end: &End, create: &CreateConnected) -> Made {
    let queue = CompletionQueue::new(end.context(), 512).expect("a small queue");
    let credits = u32::from(create.push.expect("the last is for pushes").credits);
    let (mut ends, mut pairs) = (Vec::new(), Vec::new());
    for (at, &remote) in create.bring_up.remote.iter().enumerate() {
        let is_push = at + 1 == create.bring_up.remote.len();
        let options = QueuePairOptions {
            port: 1,
            send_wr: 64,
            recv_wr: if is_push { credits } else { 0 },
            recv_bytes: 48,
            inline_bytes: 64,
            remote_access: RemoteAccess::Read,
        };
        let prepared = end.prepare(&queue, options);
        let psn = Psn::from_random(7 + at as u32);
        let qpn = Qpn::new(prepared.number()).expect("a queue pair's number");
        ends.push(QueuePairEnd { qpn, psn });
        let (remote, local) = driver::ends(&create.bring_up, &create.local, remote, psn);
        pairs.push(prepared.connect(&remote, &local).expect("the client's end"));
    }
    (ends, pairs, queue)
}

/// Reads what the client says on the control connection, until it leaves.
fn listen(conn: &Conn, pusher: &Pusher) -> std::thread::JoinHandle<()> {
    let mut conn = Conn { socket: conn.socket.try_clone().expect("a descriptor"), nth: conn.nth };
    let (over, seen) = (Arc::clone(&pusher.over), Arc::clone(&pusher.seen));
    std::thread::spawn(move || {
        while let Ok((header, body)) = conn.read() {
            if header.frame.rails_kind() == Some(railset::message::Kind::Damaged) {
                let damaged = Damaged::decode(&body).expect("a real client's");
                seen.damaged.lock().expect("nobody panics with it").push(damaged);
            }
        }
        over.store(true, Ordering::Relaxed);
    })
}

impl Pusher {
    fn new(
        end: &End,
        pair: QueuePair<Block>,
        queue: Arc<CompletionQueue>,
        seen: &Arc<Seen>,
    ) -> Self {
        let pages = pages(PAGES_BYTES);
        pages.fill_part(SPOIL_AT, PAGES_BYTES - SPOIL_AT, 0xa5);
        let memory: Arc<dyn Memory> = Arc::clone(&pages) as Arc<dyn Memory>;
        let whole = 0..PAGES_BYTES;
        let region = MemoryRegion::register(&end.domain, memory, whole, Access::RemoteRead)
            .expect("pages of ours");
        Self {
            pair,
            queue,
            pages,
            region,
            asked: VecDeque::new(),
            ended: VecDeque::new(),
            over: Arc::default(),
            seen: Arc::clone(seen),
            nth: 0,
        }
    }

    /// The next request; `None` when the client has left.
    fn next_request(&mut self) -> Option<PushRequest> {
        loop {
            if let Some(request) = self.asked.pop_front() {
                return Some(request);
            }
            if self.over.load(Ordering::Relaxed) {
                return None;
            }
            self.look();
        }
    }

    /// Whether the client has left.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn look(&mut self) {
        let mut found = Completions::with_room(16);
        if self.queue.poll(&mut found).expect("a queue of ours") == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        for completion in found.iter() {
            if completion.is_receive() {
                let mut request = None;
                // A queue pair in error takes no receive again.
                let _ = self.pair.receive(&completion, |received| {
                    request = received.ok().map(|it| PushRequest::decode(it.message));
                });
                self.asked.extend(request.map(|it| it.expect("a real client's request")));
            } else if self.pair.settle(&completion, |_, end| self.ended.push_back(end)).is_err() {
                // Of a queue pair for READs, on which nothing is posted.
                panic!("{completion:?}");
            }
        }
    }

    /// Copies the bytes that are asked for to the start of the pages.
    pub(crate) fn load(&self, store: &TestStore, fetch: &Fetch) {
        let record = record(store, ExpertKey::new(fetch.layer, fetch.expert));
        let from = usize::try_from(fetch.offset).expect("a small record");
        self.pages.put(0, &record[from..from + fetch.bytes as usize]);
    }

    /// WRITEs `bytes` of the pages from `at` on to where `fetch` wants them, and waits for the end.
    pub(crate) fn write(
        &mut self,
        at: usize,
        fetch: &Fetch,
        bytes: usize,
    ) -> Result<(), WorkError> {
        let remote = Remote { address: fetch.into.address, rkey: fetch.into.rkey };
        let block = Block::new(&self.pages, at, bytes);
        let post = Post::write(block, &self.region, remote, Signal::Yes).expect("inside");
        let ended = self.post(post);
        if ended.is_err() {
            self.seen.refused.fetch_add(1, Ordering::Relaxed);
        }
        ended
    }

    /// Sends a receipt, and waits until it has been sent.
    pub(crate) fn receipt(&mut self, receipt: Receipt) -> anyhow::Result<()> {
        self.say(&receipt.encode())
    }

    pub(crate) fn say(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let nothing = Block::new(&self.pages, 0, 0);
        let post = Post::send(nothing, message, Signal::Yes).map_err(|e| e.reason)?;
        Ok(self.post(post)?)
    }

    fn post(&mut self, post: Post<Block>) -> Result<(), WorkError> {
        let mut batch = vec![post];
        self.pair.post(&mut batch).expect("room");
        let started = Instant::now();
        loop {
            if let Some(ended) = self.ended.pop_front() {
                return ended;
            }
            assert!(started.elapsed() < BOUND, "nothing ended");
            self.look();
        }
    }

    /// What an honest peer does.
    pub(crate) fn push(&mut self, store: &TestStore, fetch: &Fetch) -> anyhow::Result<()> {
        self.load(store, fetch);
        self.write(0, fetch, fetch.bytes as usize)?;
        self.receipt(done(fetch))
    }

    /// Does what an honest peer does, and has `times` more WRITEs of other bytes follow without a pause;
    /// fails when one of those is refused, which ends the queue pair.
    pub(crate) fn push_and_go_on(
        &mut self,
        store: &TestStore,
        fetch: &Fetch,
        times: usize,
    ) -> anyhow::Result<()> {
        self.load(store, fetch);
        let bytes = fetch.bytes as usize;
        let remote = Remote { address: fetch.into.address, rkey: fetch.into.rkey };
        let write = |at| {
            let block = Block::new(&self.pages, at, bytes);
            Post::write(block, &self.region, remote, Signal::Yes).expect("inside")
        };
        let nothing = Block::new(&self.pages, 0, 0);
        let receipt = Post::send(nothing, &done(fetch).encode(), Signal::Yes).expect("short");
        let mut batch = vec![write(0), receipt];
        batch.extend(std::iter::repeat_with(|| write(SPOIL_AT)).take(times));
        self.pair.post(&mut batch).expect("room");
        let started = Instant::now();
        while self.ended.len() < 2 + times {
            assert!(started.elapsed() < BOUND, "nothing ended");
            self.look();
        }
        let mut ended = self.ended.drain(..);
        // What was right, and its receipt; they may be refused if the client has left.
        ended.next().zip(ended.next()).map_or(Ok(()), |(write, receipt)| write.and(receipt))?;
        for outcome in ended {
            match outcome {
                Ok(()) => self.seen.spoilt.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    self.seen.refused.fetch_add(1, Ordering::Relaxed);
                    return Err(error.into());
                }
            };
        }
        Ok(())
    }

    /// What an honest peer does that stages.
    pub(crate) fn stage(&mut self, store: &TestStore, fetch: &Fetch) -> anyhow::Result<()> {
        assert_eq!(fetch.into, Window::default(), "nothing is granted");
        self.load(store, fetch);
        let staged = Window { address: self.region.address(), rkey: self.region.rkey() };
        self.receipt(Receipt { staged, ..done(fetch) })?;
        let released = self.seen.releases.load(Ordering::Relaxed);
        // One place: what was staged must have been read before the next.
        let is_release = |it: &PushRequest| matches!(it, PushRequest::Release { .. });
        while !self.is_over() {
            self.look();
            if let Some(at) = self.asked.iter().position(is_release) {
                let release = self.asked.remove(at);
                assert_eq!(release, Some(PushRequest::Release { id: fetch.id }));
                self.seen.releases.store(released + 1, Ordering::Relaxed);
                return Ok(());
            }
        }
        anyhow::bail!("the client has left")
    }
}

/// All bytes are there.
pub(crate) fn done(fetch: &Fetch) -> Receipt {
    let (status, staged) = (PushStatus::Done, Window::default());
    Receipt { id: fetch.id, status, bytes: fetch.bytes, staged }
}

/// Nothing is there, because of `status`.
pub(crate) fn refused(fetch: &Fetch, status: PushStatus) -> Receipt {
    Receipt { status, bytes: 0, ..done(fetch) }
}
