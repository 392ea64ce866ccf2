//! The owners over a fake library.

mod queue_pairs;

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::fake::{self, completion, count, fail, state};
use super::ffi::{ibv_qp_state, ibv_send_flags, ibv_wc_status as status};
use super::{
    Access, AckTimeout, AsyncEvent, CompletionQueue, Completions, Context, Destination, GidKind,
    Landing, LocalEnd, Memory, MemoryRegion, MinRnrTimer, Mtu, Post, PreparedQueuePair,
    ProtectionDomain, Psn, QueuePair, QueuePairOptions, QueuePairState, Received, Released, Remote,
    RemoteAccess, RemoteEnd, Retries, SettleError, Signal, VerbsError, WorkError, WorkStatus,
};

const BYTES: usize = 4096;
const REMOTE: Remote = Remote { address: 0x1000, rkey: 9 };

/// Memory that counts its drops.
struct Counted {
    bytes: Box<[u8; BYTES]>,
    drops: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: the box stays where it is, and the fake writes nowhere.
unsafe impl Memory for Counted {
    fn region(&self) -> (NonNull<u8>, usize) {
        (NonNull::from(&*self.bytes).cast(), BYTES)
    }
}

/// A part of such memory in flight.
struct Flying {
    memory: Arc<Counted>,
    at: usize,
    bytes: usize,
}

// SAFETY: as above; the memory is held.
unsafe impl Landing for Flying {
    fn landing(&self) -> (NonNull<u8>, usize) {
        // SAFETY: tests stay inside the memory.
        (unsafe { self.memory.region().0.add(self.at) }, self.bytes)
    }
}

fn counted() -> (Arc<Counted>, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    (Arc::new(Counted { bytes: Box::new([0; BYTES]), drops: Arc::clone(&drops) }), drops)
}

fn context() -> Arc<Context> {
    fake::library(Path::new("/nonexistent")).open_device("fake0").unwrap()
}

fn domain() -> Arc<ProtectionDomain> {
    ProtectionDomain::new(&context()).unwrap()
}

fn options(send_wr: u32, recv_wr: u32) -> QueuePairOptions {
    QueuePairOptions {
        port: 1,
        send_wr,
        recv_wr,
        recv_bytes: 64,
        inline_bytes: 32,
        remote_access: RemoteAccess::None,
    }
}

fn ends() -> (RemoteEnd, LocalEnd) {
    let remote = RemoteEnd {
        queue_pair: 8,
        psn: Psn::new(1),
        destination: Destination::Ethernet { gid: [1; 16] },
        mtu: Mtu::Bytes1024,
        max_dest_rd_atomic: 16,
    };
    let local = LocalEnd {
        gid_index: 3,
        psn: Psn::new(2),
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        ack_timeout: AckTimeout::default(),
        retries: Retries::default(),
        rnr_retries: Retries::default(),
        min_rnr_timer: MinRnrTimer::default(),
    };
    (remote, local)
}

/// Which of the reads ended, and how.
type Ended = (usize, Result<(), WorkStatus>);

/// A connected queue pair over the fake, its queue, and memory to read into.
struct Bench {
    pair: QueuePair<Flying>,
    queue: Arc<CompletionQueue>,
    region: MemoryRegion,
    memory: Arc<Counted>,
    drops: Arc<AtomicUsize>,
}

impl Bench {
    fn new(send_wr: u32, recv_wr: u32) -> Self {
        let domain = domain();
        let queue = CompletionQueue::new(domain.context(), 1024).unwrap();
        let options = options(send_wr, recv_wr);
        let prepared = QueuePair::prepare(&domain, &queue, &queue, options).unwrap();
        let (remote, local) = ends();
        let pair = prepared.connect(&remote, &local).unwrap();
        let (memory, drops) = counted();
        let held: Arc<Counted> = Arc::clone(&memory);
        let region = MemoryRegion::register(&domain, held, 0..BYTES, Access::LocalWrite).unwrap();
        Self { pair, queue, region, memory, drops }
    }

    fn read(&self, at: usize, signal: Signal) -> Post<Flying> {
        let flying = Flying { memory: Arc::clone(&self.memory), at, bytes: 8 };
        Post::read(flying, &self.region, REMOTE, signal).unwrap()
    }

    fn reads(&self, count: usize, signal: Signal) -> Vec<Post<Flying>> {
        (0..count).map(|at| self.read(at * 8, signal)).collect()
    }

    /// Lets the device report the `place`-th posted request, and settles what it ends.
    fn complete(&mut self, place: usize, how: u32) -> Vec<Ended> {
        let work = state(|it| it.posted[place].work);
        state(|it| it.completions.push_back(completion(work, how)));
        self.settle().unwrap()
    }

    fn settle(&mut self) -> Result<Vec<Ended>, SettleError> {
        let mut found = Completions::with_room(4);
        self.queue.poll(&mut found).unwrap();
        let mut ended = Vec::new();
        for completion in found.iter() {
            let keep = |flying: Flying, outcome: Result<(), WorkError>| {
                ended.push((flying.at / 8, outcome.map_err(|error| error.status)));
            };
            self.pair.settle(&completion, keep)?;
        }
        Ok(ended)
    }
}

fn signalled() -> Vec<bool> {
    let flag = ibv_send_flags::IBV_SEND_SIGNALED.0;
    state(|it| it.posted.iter().map(|posted| posted.flags & flag != 0).collect())
}

#[test]
fn an_unknown_device_is_refused_with_the_names_there_are() {
    let library = fake::library(Path::new("/nonexistent"));
    let names: Vec<_> = library.devices().unwrap().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["fake0", "fake1"]);
    let text = library.open_device("mlx5_0").unwrap_err().to_string();
    assert!(text.contains("mlx5_0") && text.contains("fake1"), "{text}");
    assert_eq!(count("ibv_get_device_list"), count("ibv_free_device_list"));
}

#[test]
fn a_kernel_without_verbs_has_no_devices() {
    fail("ibv_get_device_list", libc::ENOSYS);
    let library = fake::library(Path::new("/nonexistent"));
    assert_eq!(library.devices().unwrap(), []);
    fail("ibv_get_device_list", libc::EPERM);
    assert!(matches!(library.devices(), Err(VerbsError::Call { .. })));
}

#[test]
fn gids_carry_what_the_kernel_says_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let attributes = directory.path().join("fake0/ports/1/gid_attrs");
    for (kind, text) in [("types", "RoCE v2\n"), ("ndevs", "eth7\n")] {
        std::fs::create_dir_all(attributes.join(kind)).unwrap();
        std::fs::write(attributes.join(kind).join("3"), text).unwrap();
    }
    let context = fake::library(directory.path()).open_device("fake0").unwrap();
    let gids = context.gids(1).unwrap();
    assert_eq!(gids.iter().map(|it| it.index).collect::<Vec<_>>(), [0, 3]);
    assert_eq!((gids[0].kind, gids[0].netdev.as_deref()), (None, None));
    assert_eq!((gids[1].kind, gids[1].netdev.as_deref()), (Some(GidKind::RoceV2), Some("eth7")));
    assert!(context.gids(2).unwrap_err().to_string().contains("1 to 1"));
}

#[test]
fn a_device_has_the_interfaces_of_its_function_or_the_one_it_was_made_on() {
    let sysfs = tempfile::tempdir().unwrap();
    let interfaces = || fake::library(sysfs.path()).open_device("fake0").unwrap().interfaces();
    assert_eq!(interfaces(), [""; 0]);
    std::fs::create_dir_all(sysfs.path().join("fake0")).unwrap();
    std::fs::write(sysfs.path().join("fake0/parent"), "eth9\n").unwrap();
    assert_eq!(interfaces(), ["eth9"]);
    for name in ["eth2", "eth1"] {
        std::fs::create_dir_all(sysfs.path().join("fake0/device/net").join(name)).unwrap();
    }
    assert_eq!(interfaces(), ["eth1", "eth2"]);
}

#[test]
fn owners_go_before_what_they_were_made_from_and_once_each() {
    let Bench { pair, queue, region, memory, drops } = Bench::new(8, 2);
    // The children are the last owners of everything.
    drop((queue, memory));
    drop(region);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    drop(pair);
    let calls = state(|it| it.calls.clone());
    let place = |name| calls.iter().rposition(|call| *call == name).expect(name);
    let order = ["ibv_destroy_qp", "ibv_dereg_mr", "ibv_destroy_cq"].map(place);
    assert!(order.is_sorted(), "{calls:?}");
    assert!(place("ibv_dealloc_pd") > place("ibv_dereg_mr"), "{calls:?}");
    assert_eq!(place("ibv_close_device"), calls.len() - 1);
    let once = ["ibv_destroy_qp", "ibv_destroy_cq", "ibv_dealloc_pd", "ibv_close_device"];
    assert_eq!(once.map(count), [1; 4]);
    // Ours, and the receives' own.
    assert_eq!(count("ibv_dereg_mr"), 2);
}

#[test]
fn nothing_that_was_not_made_is_given_back() {
    for (call, made_before) in [("ibv_alloc_pd", 0), ("ibv_create_cq", 1), ("ibv_create_qp", 2)] {
        state(|it| *it = fake::State::default());
        fail(call, libc::ENOMEM);
        let attempt = || -> Result<PreparedQueuePair<()>, VerbsError> {
            let domain = ProtectionDomain::new(&context())?;
            let queue = CompletionQueue::new(domain.context(), 64)?;
            QueuePair::prepare(&domain, &queue, &queue, options(8, 0))
        };
        let error = attempt().unwrap_err();
        assert!(error.is_transient() && error.to_string().contains(call), "{error}");
        let back = ["ibv_dealloc_pd", "ibv_destroy_cq", "ibv_destroy_qp"].map(count);
        assert_eq!(back.iter().sum::<usize>(), made_before, "{call}");
        assert_eq!(count("ibv_close_device"), 1);
    }
}

#[test]
fn memory_that_the_device_does_not_let_go_of_is_leaked() {
    let bench = Bench::new(8, 0);
    fail("ibv_dereg_mr", libc::EBUSY);
    let Bench { pair, region, memory, drops, .. } = bench;
    drop(memory);
    drop(region);
    drop(pair);
    assert_eq!(count("ibv_dereg_mr"), 1);
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    // The registration needs its domain and its device.
    assert_eq!((count("ibv_dealloc_pd"), count("ibv_close_device")), (0, 0));
}

#[test]
fn a_region_that_cannot_be_deregistered_comes_back_and_may_be_tried_again() {
    let bench = Bench::new(8, 0);
    fail("ibv_dereg_mr", libc::EBUSY);
    let Bench { pair, region, memory, drops, .. } = bench;
    drop((memory, pair));
    let error = region.deregister().unwrap_err();
    assert!(error.to_string().contains("ibv_dereg_mr of 4096 bytes on fake0"), "{error}");
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    fail("ibv_dereg_mr", 0);
    error.region.deregister().unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    assert_eq!(count("ibv_dereg_mr"), 2);
}

#[test]
fn a_registration_allows_what_it_says_and_no_more() {
    let (domain, (memory, _)) = (domain(), counted());
    let all = [Access::LocalRead, Access::LocalWrite, Access::RemoteRead, Access::RemoteWrite];
    for access in all {
        MemoryRegion::register(&domain, memory.clone(), 0..BYTES, access).unwrap();
    }
    // `enum ibv_access_flags`: 1 is local write, 2 remote write, 4 remote read.
    assert_eq!(state(|it| it.access.clone()), [0, 1, 4, 1 | 2]);
}

#[test]
fn a_registration_is_refused_where_it_cannot_be() {
    state(|it| it.max_mr_size = 1024);
    let domain = domain();
    let (memory, _) = counted();
    let register =
        |range| MemoryRegion::register(&domain, memory.clone(), range, Access::RemoteRead);
    let text = register(0..BYTES).unwrap_err().to_string();
    for part in ["fake0", "at most 1 KiB", "4 KiB", "--expert-arena-bytes", "--dram-budget"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let backwards = std::ops::Range { start: 8, end: 4 };
    for range in [0..0, backwards, 4000..BYTES + 1, BYTES..BYTES + 8] {
        assert!(matches!(register(range), Err(VerbsError::Range { .. })));
    }
    fail("ibv_reg_mr", libc::EINVAL);
    let error = register(0..512).unwrap_err();
    assert!(matches!(error, VerbsError::Call { call: "ibv_reg_mr", .. }), "{error}");
    assert_eq!(count("ibv_dereg_mr"), 0);
}

#[test]
fn events_are_named_and_acknowledged() {
    let context = context();
    assert_eq!(context.next_event().unwrap(), None);
    // The numbers are those of verbs.h.
    state(|it| it.events.extend([(1, 10, 1), (1, 9, 1), (1, 18, 1), (1, 8, 0), (1, 99, 0)]));
    let wanted = [
        AsyncEvent::PortError { port: 1 },
        AsyncEvent::PortActive { port: 1 },
        AsyncEvent::GidChange { port: 1 },
        AsyncEvent::DeviceFatal,
        AsyncEvent::Other { event: 99 },
    ];
    for event in wanted {
        assert_eq!(context.next_event().unwrap(), Some(event));
    }
    assert_eq!(context.next_event().unwrap(), None);
    assert_eq!(count("ibv_ack_async_event"), wanted.len());
}

#[test]
fn a_broken_completion_queue_is_an_error() {
    let bench = Bench::new(8, 0);
    let mut found = Completions::with_room(4);
    // Less than nothing, and more than there is room for.
    for wrong in [-1, 5] {
        fail("ibv_poll_cq", wrong);
        let error = bench.queue.poll(&mut found).unwrap_err();
        assert!(error.to_string().contains("ibv_poll_cq"), "{error}");
        assert_eq!(found.iter().count(), 0);
    }
}
