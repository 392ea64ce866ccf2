//! Two ends of a rail in one process.

#![allow(dead_code, reason = "each test program uses a part of this")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions, PinnedPages};
use gpu_sys::verbs::{
    Access, AckTimeout, CompletionQueue, Completions, Context, Destination, Landing, Library,
    LocalEnd, Memory, MemoryRegion, MinRnrTimer, PreparedQueuePair, ProtectionDomain, Psn,
    QueuePair, QueuePairOptions, Received, Remote, RemoteAccess, RemoteEnd, Retries, Source,
    WorkError,
};

/// Index of the routable GID in the guest.
const GID: u8 = 1;

/// Pinned pages that a test looks at when nothing is in flight.
pub(crate) struct Pages(PinnedPages);

// SAFETY: it is the pages and nothing else.
unsafe impl Memory for Pages {
    fn region(&self) -> (NonNull<u8>, usize) {
        self.0.region()
    }
}

pub(crate) fn pages(bytes: usize) -> Arc<Pages> {
    let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
    Arc::new(Pages(PinnedPages::new(&PinnedOptions { bytes, huge_pages, numa }).unwrap()))
}

impl Pages {
    pub(crate) fn fill(&self, value: u8) {
        self.fill_part(0, self.0.len(), value);
    }

    pub(crate) fn fill_part(&self, at: usize, bytes: usize, value: u8) {
        assert!(at + bytes <= self.0.len());
        let start = self.0.address().as_ptr().wrapping_add(at);
        // SAFETY: inside the pages, as asserted; tests fill before anything is in flight.
        unsafe { start.write_bytes(value, bytes) };
    }

    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.0.len());
        let start = self.0.address().as_ptr().wrapping_add(at);
        // SAFETY: inside the pages, as asserted, which no reference is to; what a device reads of
        // them meanwhile is a mixture.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn bytes(&self, at: usize, bytes: usize) -> Vec<u8> {
        assert!(at + bytes <= self.0.len());
        let start = self.0.address().as_ptr().wrapping_add(at);
        // SAFETY: inside the pages, as asserted, which are initialised; tests look when nothing is
        // in flight.
        unsafe { std::slice::from_raw_parts(start, bytes) }.to_vec()
    }
}

/// A part of pages that goes with a request.
pub(crate) struct Block {
    pages: Arc<Pages>,
    pub(crate) at: usize,
    bytes: usize,
}

impl Block {
    pub(crate) fn new(pages: &Arc<Pages>, at: usize, bytes: usize) -> Self {
        assert!(at + bytes <= pages.0.len());
        Self { pages: Arc::clone(pages), at, bytes }
    }

    fn part(&self) -> (NonNull<u8>, usize) {
        // SAFETY: inside the pages, as asserted in `new`.
        (unsafe { self.pages.0.address().add(self.at) }, self.bytes)
    }
}

// SAFETY: the pages live as long as the value; tests make blocks that do not overlap, and look at
// their bytes when nothing is in flight.
unsafe impl Landing for Block {
    fn landing(&self) -> (NonNull<u8>, usize) {
        self.part()
    }
}

// SAFETY: as above; the pages are initialised.
unsafe impl Source for Block {
    fn source(&self) -> (NonNull<u8>, usize) {
        self.part()
    }
}

/// `offset` bytes into a registration.
pub(crate) fn remote_at(region: &MemoryRegion, offset: u64) -> Remote {
    Remote { address: region.address() + offset, rkey: region.rkey() }
}

/// A device that is open.
pub(crate) struct End {
    pub(crate) domain: Arc<ProtectionDomain>,
}

impl End {
    pub(crate) fn open(device: &str) -> Self {
        let context = Library::open().unwrap().open_device(device).unwrap();
        Self { domain: ProtectionDomain::new(&context).unwrap() }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.domain.context()
    }

    pub(crate) fn gid(&self) -> [u8; 16] {
        let gids = self.context().gids(1).unwrap();
        gids.into_iter().find(|entry| entry.index == u32::from(GID)).unwrap().gid
    }

    pub(crate) fn prepare(
        &self,
        queue: &Arc<CompletionQueue>,
        options: QueuePairOptions,
    ) -> PreparedQueuePair<Block> {
        QueuePair::prepare(&self.domain, queue, queue, options).unwrap()
    }
}

/// This end of a connection that starts with `psn`, as patient as the devices' defaults are.
pub(crate) fn local_end(psn: Psn) -> LocalEnd {
    LocalEnd {
        gid_index: GID,
        psn,
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        ack_timeout: AckTimeout::default(),
        retries: Retries::default(),
        rnr_retries: Retries::default(),
        min_rnr_timer: MinRnrTimer::default(),
    }
}

/// A connected queue pair.
pub(crate) struct Side {
    pub(crate) queue_pair: QueuePair<Block>,
    pub(crate) queue: Arc<CompletionQueue>,
    pub(crate) domain: Arc<ProtectionDomain>,
    pub(crate) completions: usize,
}

impl Side {
    pub(crate) fn register(&self, pages: &Arc<Pages>, access: Access) -> MemoryRegion {
        let (_, bytes) = pages.region();
        let memory: Arc<Pages> = Arc::clone(pages);
        MemoryRegion::register(&self.domain, memory, 0..bytes, access).unwrap()
    }

    /// Polls until nothing is in flight, and returns what came back, in order.
    pub(crate) fn drain(&mut self, wait: Duration) -> Vec<(Block, Result<(), WorkError>)> {
        self.drain_to(0, wait)
    }

    /// Polls until at most `left` requests are in flight.
    pub(crate) fn drain_to(
        &mut self,
        left: usize,
        wait: Duration,
    ) -> Vec<(Block, Result<(), WorkError>)> {
        let mut ended = Vec::new();
        let mut found = Completions::with_room(1);
        let started = Instant::now();
        while self.queue_pair.in_flight() > left {
            assert!(started.elapsed() < wait, "{:?} after {wait:?}", self.queue_pair);
            self.completions += self.queue.poll(&mut found).unwrap();
            for completion in found.iter() {
                let keep = |block, outcome| ended.push((block, outcome));
                self.queue_pair.settle(&completion, keep).unwrap();
            }
            std::thread::yield_now();
        }
        ended
    }
}

impl Side {
    /// Polls until `count` messages have come.
    pub(crate) fn receive(&mut self, count: usize, wait: Duration) -> Vec<Message> {
        let mut received = Vec::new();
        let mut found = Completions::with_room(16);
        let started = Instant::now();
        while received.len() < count {
            assert!(started.elapsed() < wait, "{} of {count} after {wait:?}", received.len());
            self.queue.poll(&mut found).unwrap();
            for completion in found.iter() {
                let keep = |it: Result<Received<'_>, WorkError>| {
                    let it = it.unwrap();
                    received.push((it.message.to_vec(), it.immediate));
                };
                self.queue_pair.receive(&completion, keep).unwrap();
            }
            std::thread::yield_now();
        }
        received
    }
}

/// What a receive brought.
pub(crate) type Message = (Vec<u8>, Option<u32>);

/// Both ends of rail 0, connected: `near` may ask, `far` allows what `access` says.
pub(crate) struct Pair {
    pub(crate) near: Side,
    pub(crate) far: Side,
}

impl Pair {
    pub(crate) fn connect(send_wr: u32, recv_wr: u32, access: RemoteAccess) -> Self {
        let near = End::open("rxe0");
        let queue = CompletionQueue::new(near.context(), 256).unwrap();
        Self::over(&near, &queue, send_wr, recv_wr, access)
    }

    /// With `near` on an open end and a queue of it, and a far end that may be written to.
    pub(crate) fn with_queues(near: &End, queue: &Arc<CompletionQueue>, send_wr: u32) -> Self {
        Self::over(near, queue, send_wr, 0, RemoteAccess::Write)
    }

    fn over(
        near: &End,
        near_queue: &Arc<CompletionQueue>,
        send_wr: u32,
        recv_wr: u32,
        access: RemoteAccess,
    ) -> Self {
        let far = End::open("rxe0p");
        let far_queue = CompletionQueue::new(far.context(), 256).unwrap();
        let options = QueuePairOptions {
            port: 1,
            send_wr,
            recv_wr,
            recv_bytes: 64,
            inline_bytes: 64,
            remote_access: RemoteAccess::None,
        };
        let near_prepared = near.prepare(near_queue, options);
        let far_prepared =
            far.prepare(&far_queue, QueuePairOptions { remote_access: access, ..options });
        let (near_psn, far_psn) = (Psn::new(0x1234), Psn::new(0xff_fff0));
        let end = |end: &End, number: u32, psn: Psn| RemoteEnd {
            queue_pair: number,
            psn,
            destination: Destination::Ethernet { gid: end.gid() },
            mtu: end.context().port(1).unwrap().active_mtu,
            max_dest_rd_atomic: 16,
        };
        let near_end = end(near, near_prepared.number(), near_psn);
        let far_end = end(&far, far_prepared.number(), far_psn);
        let near_pair = near_prepared.connect(&far_end, &local_end(near_psn)).unwrap();
        let far_pair = far_prepared.connect(&near_end, &local_end(far_psn)).unwrap();
        let side = |queue_pair, queue: &Arc<CompletionQueue>, end: &End| Side {
            queue_pair,
            queue: Arc::clone(queue),
            domain: Arc::clone(&end.domain),
            completions: 0,
        };
        Self { near: side(near_pair, near_queue, near), far: side(far_pair, &far_queue, &far) }
    }
}
