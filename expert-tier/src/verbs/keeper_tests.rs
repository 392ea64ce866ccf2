//! A device that fails, which software RDMA never does, over the fake libibverbs.

use std::path::Path;
use std::sync::mpsc;

use gpu_sys::verbs::fake;
use railset::choose::{Address, Choice, Explanation, RailSpec, Routed, Wish};
use railset::facts::{Gid, LinkLayer, Mtu};
use railset::handshake::BringUp;
use railset::handshake::client::Create;
use railset::message::{OfferedRail, Psn, Qpn, QueuePairEnd, SpillTerms, Transfer};
use railset::pairing::RailPair;
use railset::table::{CheckedTable, Column, LayerShape, LayerTable, SPILLED, Table};

use super::super::VerbsOptions;
use super::super::devices::Devices;
use super::super::grant::Granted;
use super::super::rail::PreparedRail;
use super::super::state::Todo;
use super::*;
use crate::arena::ExpertArena;
use crate::checker::{Checker, Job};
use crate::key::ExpertKey;
use crate::testing::{TestStore, small_arena};
use crate::tier::{CompletionQueue, FetchRequest};

#[path = "grant_tests.rs"]
mod grant_tests;
#[path = "memory_tests.rs"]
mod memory_tests;

const EXPERTS: u32 = 4;
/// Between records at the peer; more than one of them has.
const STRIDE: usize = 1 << 20;

/// A backend whose rails are of the fake, and what its caller has.
struct Bench {
    store: TestStore,
    desk: Arc<Desk>,
    checker: PartChecker,
    arena: ExpertArena,
    queue: CompletionQueue,
    table: Arc<CheckedTable>,
}

pub(super) fn spec(device: &str, rail: u8) -> RailSpec {
    RailSpec {
        device: device.into(),
        node_guid: rail.into(),
        numa_node: None,
        port: 1,
        link_layer: LinkLayer::Ethernet,
        gid_index: 3,
        gid: Gid([rail; 16]),
        lid: 0,
        mtu: Mtu::B1024,
        netdev: None,
        bits_per_s: None,
        initiator_depth: 16,
        responder_depth: 16,
    }
}

pub(super) fn pair(local: &RailSpec) -> RailPair {
    let offered = OfferedRail {
        index: 0,
        device: "peer".into(),
        node_guid: 9,
        port: 1,
        link_layer: LinkLayer::Ethernet,
        gid: Gid([9; 16]),
        lid: 0,
        mtu: Mtu::B1024,
        depth: 16,
        most_queue_pairs: 2,
    };
    let (routed, passed) = (Routed::Source, Vec::new());
    let explanation = Explanation { routed, wish: Wish::default(), passed };
    RailPair { offered, local: Choice { spec: local.clone(), explanation } }
}

impl Bench {
    /// One rail for each of `devices`.
    fn new(devices: &[&str]) -> Self {
        Self::with_options(devices, |_| ())
    }

    fn with_drain(devices: &[&str], drain: Duration) -> Self {
        Self::with_options(devices, |options| options.drain = drain)
    }

    fn with_options(devices: &[&str], change: impl FnOnce(&mut VerbsOptions)) -> Self {
        Self::with_records(devices, 700_001, change)
    }

    fn with_records(
        devices: &[&str],
        payload_bytes: u64,
        change: impl FnOnce(&mut VerbsOptions),
    ) -> Self {
        let store = TestStore::new(1, EXPERTS, &[payload_bytes], 91);
        let open = store.open();
        let manifest = Arc::clone(open.manifest());
        let drain = Duration::from_secs(1);
        let mut options = VerbsOptions { check_threads: 0, drain, ..VerbsOptions::new("peer") };
        change(&mut options);
        let known = Devices::of(fake::library(Path::new("/absent")));
        let desk = Arc::new(Desk::new(options, manifest, known).expect("a desk"));
        let record_bytes = desk.manifest.layout().layers()[0].record_bytes();
        let mut bytes = vec![0; STRIDE * EXPERTS as usize];
        for expert in 0..EXPERTS {
            let at = STRIDE * expert as usize;
            let out = &mut bytes[at..at + usize::try_from(record_bytes).expect("a small record")];
            open.read_at(ExpertKey::new(0, expert), 0, out).expect("a record");
        }
        let table = table(fake::publish(bytes), (0..EXPERTS).collect(), record_bytes);
        for (slot, device) in devices.iter().enumerate() {
            let mut rail = rail(&desk, device, slot);
            rail.use_table(Arc::clone(&table));
            desk.lock().rails.push(rail);
        }
        desk.lock().down_since = None;
        let checker = PartChecker::start("check", 0).expect("no threads");
        let (arena, queue) = (small_arena(EXPERTS), CompletionQueue::new());
        Self { store, desk, checker, arena, queue, table }
    }

    /// A connected rail on `device` that knows where the records are.
    fn rail(&self, device: &str, slot: usize) -> Rail {
        let mut rail = rail(&self.desk, device, slot);
        rail.use_table(Arc::clone(&self.table));
        rail
    }

    fn submit(&self, experts: std::ops::Range<u32>) {
        for expert in experts {
            let slot = self.arena.try_acquire(STRIDE as u64).expect("a free slot");
            let request = FetchRequest::new(ExpertKey::new(0, expert), slot);
            self.desk.take(request, &self.queue, Instant::now());
        }
        self.desk.ring();
    }

    /// What the keeper does where no caller looks after the rails, and no more.
    fn drive(&self) {
        self.desk.drive(&self.checker);
        while self.checker.help() {}
    }

    /// Device and end of each rail.
    fn ends(&self) -> Vec<(String, Option<String>)> {
        let state = self.desk.lock();
        let end = |rail: &Rail| (rail.device().name().into(), rail.ending().map(String::from));
        state.rails.iter().map(end).collect()
    }

    /// Takes as many completions, which must bring the records of their keys.
    fn take_right(&self, count: usize) {
        for _ in 0..count {
            let came = self.queue.pop(Duration::ZERO).expect("a completion");
            let fetched = came.outcome.expect("a record");
            let payload: Vec<u8> = fetched.residency.payload().to_vec();
            assert!(payload == self.store.payload(came.key), "{} differs", came.key);
        }
    }
}

/// The table of a peer whose memory begins at `base`; `slots` says where in it each expert is.
fn table(base: u64, slots: Vec<u32>, record_bytes: u64) -> Arc<CheckedTable> {
    let columns = vec![Column { base, rkey: 1 }];
    let layer = LayerTable { layer: 0, slot_stride: STRIDE as u64, columns, slots };
    let shape = LayerShape { layer: 0, experts: EXPERTS, record_bytes };
    let table = Table::new(1, vec![layer]).expect("a table");
    Arc::new(table.check(&[shape], 1).expect("of this store"))
}

fn rail(desk: &Desk, device: &str, slot: usize) -> Rail {
    rail_with(desk, device, slot, None)
}

/// With two queue pairs for READs, and one more where there is something to `push`.
fn rail_with(desk: &Desk, device: &str, slot: usize, push: Option<SpillTerms>) -> Rail {
    let spec = spec(device, slot as u8 + 1);
    let (known, number) = (desk.devices.device(device).expect("a fake one"), desk.next_rail());
    let depth = desk.options.queue_pair_depth;
    let queue_pairs = 2 + u8::from(push.is_some());
    let create = Create { rail: 0, local: spec.clone(), queue_pairs, push };
    let prepared = PreparedRail::new(&create, known, depth).expect("queue pairs");
    let end = |qpn| QueuePairEnd { qpn: Qpn::new(qpn).expect("one"), psn: Psn::from_random(1) };
    let up = BringUp {
        index: 0,
        address: Address::Ethernet { gid: Gid([9; 16]) },
        mtu: Mtu::B1024,
        depth: 16,
        remote: (20..).take(queue_pairs.into()).map(end).collect(),
    };
    prepared.connect((number, slot), &pair(&spec), &up).expect("it connects")
}

#[test]
fn a_device_that_fails_takes_its_own_rails_and_no_fetch() {
    let bench = Bench::new(&["fake0", "fake1", "fake0"]);
    let mut devices = Vec::new();
    bench.submit(0..2);
    look_at_events(&bench.desk, &mut devices);
    assert!(bench.ends().iter().all(|(_, end)| end.is_none()), "{:?}", bench.ends());
    let dead = fake::flying("fake0");
    assert!(dead.len() > 1 && !fake::flying("fake1").is_empty(), "{dead:?}");
    let posted = fake::posted("fake0");

    fake::break_device("fake0");
    look_at_events(&bench.desk, &mut devices);
    let failed = || Some("the device failed".to_owned());
    let expected = [("fake0", failed()), ("fake1", None), ("fake0", failed())];
    assert_eq!(bench.ends(), expected.map(|(device, end)| (device.into(), end)));

    // What flies on it is not posted again before it has come back, and what is new goes elsewhere.
    bench.submit(2..3);
    bench.drive();
    let other = fake::flying("fake1");
    assert!(!dead.iter().any(|part| other.contains(part)), "{dead:?} {other:?}");
    fake::flush("fake0");
    bench.drive();
    let other = fake::flying("fake1");
    assert!(dead.iter().all(|part| other.contains(part)), "{dead:?} {other:?}");

    assert_eq!(bench.desk.reap(), 1, "the failed device's rails are destroyed");
    assert_eq!(fake::count("ibv_destroy_qp"), 4);
    fake::bring("fake1");
    bench.drive();
    bench.take_right(3);
    bench.submit(3..4);
    assert_eq!(fake::posted("fake0"), posted, "nothing more on the failed device");
    fake::bring("fake1");
    bench.drive();
    bench.take_right(1);
}

#[test]
fn parts_that_one_device_refuses_are_posted_on_the_other_at_once() {
    let bench = Bench::new(&["fake0", "fake1"]);
    fake::fail_times("ibv_post_send", 12, 1);
    bench.submit(0..2);
    let ended = bench.ends().iter().filter(|(_, end)| end.is_some()).count();
    assert_eq!(ended, 1, "{:?}", bench.ends());
    let all: usize = ["fake0", "fake1"].map(|it| fake::flying(it).len()).iter().sum();
    assert_eq!(all, 6, "every part of two records flies");
    fake::bring("fake0");
    fake::bring("fake1");
    bench.drive();
    bench.take_right(2);
}

#[test]
fn parts_that_every_device_refuses_wait_in_line_for_the_next_rail() {
    let bench = Bench::new(&["fake0", "fake1"]);
    fake::fail("ibv_post_send", 12);
    bench.submit(0..1);
    fake::fail("ibv_post_send", 0);
    assert!(bench.ends().iter().all(|(_, end)| end.is_some()), "{:?}", bench.ends());
    assert_eq!(bench.desk.reap(), 0);
    bench.desk.lock().rails.push(bench.rail("fake0", 0));
    bench.desk.ring();
    fake::bring("fake0");
    bench.drive();
    bench.take_right(1);
}

#[test]
fn requests_whose_queue_pair_cannot_be_destroyed_end_at_once_and_their_slots_are_counted() {
    let bench = Bench::with_drain(&["fake0"], Duration::ZERO);
    bench.submit(0..2);
    assert_eq!(bench.arena.counts().out(), 2);
    fake::fail("ibv_destroy_qp", 16);
    bench.desk.end_rails_where(|_| true, "a test ends it");
    assert_eq!(bench.desk.reap(), 0);
    for _ in 0..2 {
        let came = bench.queue.pop(Duration::ZERO).expect("a completion");
        let failure = came.outcome.expect_err("its slot is lost");
        let text = failure.error.to_string();
        assert!(text.contains("ibv_destroy_qp on queue pair"), "{text}");
        assert!(failure.slot.is_none(), "a device may still write there");
    }
    let counts = bench.arena.counts();
    assert_eq!((counts.quarantined, counts.out()), (2, 0), "each slot once, of three parts");
}

/// A part that a checking thread has, and does not get done with before it is told to.
struct Held {
    part: Granted,
    desk: Arc<Desk>,
    begins: mpsc::Sender<()>,
    may_end: mpsc::Receiver<()>,
}

impl Job for Held {
    fn run(self) {
        let call = self.part.tag();
        self.begins.send(()).expect("the test waits");
        self.may_end.recv_timeout(HELD_BOUND).expect("the test says so");
        self.part.revoke().expect("nobody may write it").landed().check();
        self.desk.part_done(call);
    }
}

/// Longest wait for the test's other thread; only a failing test waits as long.
const HELD_BOUND: Duration = Duration::from_secs(10);

#[test]
fn a_request_whose_part_is_being_checked_when_the_backend_closes_gets_its_slot_back() {
    let bench = Bench::new(&["fake0"]);
    let Bench { desk, queue, arena, .. } = &bench;
    let checker = Checker::start("check", 1).expect("a thread");
    let (begins, has_begun) = mpsc::channel();
    let (says, may_end) = mpsc::channel();
    bench.submit(0..1);
    fake::bring("fake0");
    let (mut landed, mut todo) = (Vec::new(), Todo::default());
    desk.lock().look(&desk.options, &mut todo, |part| landed.push(part));
    let part = landed.remove(0);
    checker.push(Held { part, desk: Arc::clone(desk), begins, may_end });
    for part in landed {
        let call = part.tag();
        drop(part);
        desk.part_done(call);
    }
    has_begun.recv_timeout(HELD_BOUND).expect("a thread has the part");
    desk.close();
    std::thread::scope(|scope| {
        scope.spawn(|| super::super::finish(desk, Arc::new(checker)));
        let early = queue.pop(Duration::from_millis(100));
        says.send(()).expect("the thread waits");
        assert!(early.is_none(), "it ended while its part was being checked: {early:?}");
    });
    let came = queue.pop(Duration::ZERO).expect("a completion");
    let failure = came.outcome.expect_err("two of its parts were dropped");
    assert!(failure.slot.is_some(), "nothing writes there any more: {failure:?}");
    drop(failure);
    assert_eq!(arena.counts().free, arena.counts().total);
}

#[test]
fn a_caller_that_panics_leaves_the_rails_to_the_next() {
    let bench = Bench::new(&["fake0"]);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _wheel = bench.desk.take_wheel().expect("nobody else has it");
        assert!(bench.desk.is_driven());
        panic!("as a caller's queue might");
    }));
    assert!(panicked.is_err() && !bench.desk.is_driven());
    assert!(bench.desk.take_wheel().is_some());
}

#[test]
fn one_caller_at_a_time_sleeps_for_pushes() {
    let bench = Bench::new(&["fake0"]);
    let sleeper = bench.desk.take_sleep().expect("nobody else sleeps");
    assert!(bench.desk.take_sleep().is_none(), "it would take the other's wake-up");
    drop(sleeper);
    assert!(bench.desk.take_sleep().is_some());
}

#[test]
fn a_failed_device_that_gives_nothing_back_is_destroyed_and_opened_anew() {
    let bench = Bench::with_drain(&["fake0", "fake1"], Duration::ZERO);
    bench.submit(0..2);
    let (dead, mut devices) = (fake::flying("fake0"), Vec::new());
    assert!(!dead.is_empty());
    let failed = bench.desk.devices.device("fake0").expect("as it was opened");
    fake::fail("ibv_modify_qp", 5);
    fake::break_device("fake0");
    look_at_events(&bench.desk, &mut devices);
    devices.clear();
    assert_eq!(bench.desk.reap(), 1, "there is no time to drain");
    let other = fake::flying("fake1");
    assert!(dead.iter().all(|part| other.contains(part)), "{dead:?} {other:?}");
    fake::bring("fake1");
    bench.drive();
    bench.take_right(2);

    fake::fail("ibv_modify_qp", 0);
    let anew = bench.desk.devices.device("fake0").expect("after its reset");
    assert!(!Arc::ptr_eq(&anew, &failed), "the failed one is of no use");
    assert!(anew.region(bench.arena.id()).is_some(), "the arena is registered with it");
    drop(failed);
    bench.desk.lock().rails.push(rail(&bench.desk, "fake0", 0));
    look_at_events(&bench.desk, &mut devices);
    assert!(bench.ends().iter().all(|(_, end)| end.is_none()), "{:?}", bench.ends());
}

#[test]
fn a_device_that_fails_while_it_has_no_rail_is_opened_anew() {
    let bench = Bench::new(&["fake1"]);
    let failed = bench.desk.devices.device("fake0").expect("a fake one");
    fake::break_device("fake0");
    look_at_events(&bench.desk, &mut Vec::new());
    let anew = bench.desk.devices.device("fake0").expect("after its reset");
    assert!(!Arc::ptr_eq(&anew, &failed), "the failed one is of no use");
    assert_eq!(bench.ends(), [("fake1".to_owned(), None)]);
}

/// Runs `registering` on a thread whose next registration lasts until `meanwhile` is done, and fails if
/// `meanwhile` waits for it.
fn while_registering(registering: impl FnOnce() + Send, meanwhile: impl FnOnce()) {
    /// Longest wait of either thread; only a failing test waits as long.
    const BOUND: Duration = Duration::from_secs(10);
    let (begins, has_begun) = mpsc::channel();
    let (may_end, ends) = mpsc::channel();
    let (says, in_time) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            fake::before_next("ibv_reg_mr", move || {
                begins.send(()).expect("the test waits");
                says.send(ends.recv_timeout(BOUND).is_ok()).expect("the test waits");
            });
            registering();
        });
        has_begun.recv_timeout(BOUND).expect("a registration");
        meanwhile();
        // Where it has taken too long already, the other thread no longer listens.
        let _ = may_end.send(());
        assert!(in_time.recv_timeout(BOUND).expect("its end"), "that waited for a registration");
    });
}

#[test]
fn a_request_does_not_wait_while_a_device_is_opened_and_the_arenas_registered_with_it() {
    let bench = Bench::new(&["fake0"]);
    bench.submit(0..1);
    fake::bring("fake0");
    bench.drive();
    bench.take_right(1);
    let devices = &bench.desk.devices;
    let open = || assert_eq!(devices.device("fake1").expect("a fake one").name(), "fake1");
    while_registering(open, || {
        bench.submit(1..2);
        fake::bring("fake0");
        bench.drive();
        bench.take_right(1);
    });
    let second = devices.device("fake1").expect("it is open");
    assert!(second.region(bench.arena.id()).is_some());
}

#[test]
fn a_request_does_not_wait_while_an_arena_that_is_not_its_own_is_registered() {
    let bench = Bench::new(&["fake0", "fake1"]);
    bench.submit(0..1);
    let other = small_arena(1);
    let register = || assert!(bench.desk.devices.register(&other).is_empty());
    while_registering(register, || {
        bench.submit(1..3);
        fake::bring("fake0");
        fake::bring("fake1");
        bench.drive();
        bench.take_right(3);
    });
    assert!(bench.desk.devices.knows(&other));
}

#[test]
fn opening_one_device_does_not_wait_for_another() {
    let devices = Devices::of(fake::library(Path::new("/absent")));
    assert!(devices.register(&small_arena(1)).is_empty(), "no device is open");
    let open = || assert_eq!(devices.device("fake0").expect("a fake one").name(), "fake0");
    while_registering(open, || {
        assert_eq!(devices.device("fake1").expect("a fake one").name(), "fake1");
    });
}

#[test]
fn an_arena_that_comes_while_a_device_is_opened_is_registered_with_it() {
    let devices = Devices::of(fake::library(Path::new("/absent")));
    let (first, second) = (small_arena(1), small_arena(1));
    assert!(devices.register(&first).is_empty(), "no device is open");
    let open = || assert_eq!(devices.device("fake0").expect("a fake one").name(), "fake0");
    while_registering(open, || assert!(devices.register(&second).is_empty(), "no device is open"));
    let device = devices.device("fake0").expect("it is open");
    assert!(device.region(first.id()).is_some() && device.region(second.id()).is_some());
    assert!(devices.knows(&first) && devices.knows(&second));
}

/// Lets the keeper look, and the device `brings` bring what it was asked for, until `is_so`; says how
/// long that took.
fn look_until(bench: &Bench, brings: &str, is_so: impl Fn() -> bool) -> Duration {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", bench.ends());
        fake::bring(brings);
        bench.drive();
        bench.desk.reap();
        std::thread::yield_now();
    }
    started.elapsed()
}

const DEADLINE: Duration = Duration::from_millis(60);
/// What a busy machine may add to a bound.
const LATE: Duration = Duration::from_secs(5);

#[test]
fn reads_that_never_end_cost_their_rail_after_the_deadline_and_no_fetch() {
    let bench = Bench::with_options(&["fake0", "fake1"], |options| {
        (options.deadline, options.drain) = (DEADLINE, Duration::ZERO);
    });
    bench.submit(0..EXPERTS);
    let dead = fake::flying("fake0");
    assert!(!dead.is_empty());
    // The device says nothing: no completion, no flush, no event. Only the rail's own clock is left.
    let took = look_until(&bench, "fake1", || bench.desk.lock().rails.len() == 1);
    assert!(took >= DEADLINE && took < DEADLINE + LATE, "{took:?}");
    let why = bench.desk.lock().down_why.clone();
    assert!(why.contains("nothing completed for 60 ms"), "{why}");
    assert_eq!(bench.ends(), [("fake1".to_owned(), None)]);
    let posted = fake::posted("fake0");
    look_until(&bench, "fake1", || bench.desk.is_idle());
    bench.take_right(EXPERTS as usize);
    assert_eq!(fake::posted("fake0"), posted, "nothing more where nothing came");
}

#[test]
fn a_push_of_which_nothing_is_heard_costs_its_rail_after_the_deadline() {
    let bench = Bench::with_options(&[], |options| {
        (options.deadline, options.drain) = (DEADLINE, Duration::ZERO);
    });
    let terms = SpillTerms { transfer: Transfer::Push, credits: 4, range_bytes: STRIDE as u32 };
    let mut rail = rail_with(&bench.desk, "fake0", 0, Some(terms));
    let record_bytes = bench.desk.manifest.layout().layers()[0].record_bytes();
    rail.use_table(table(1 << 20, vec![SPILLED; EXPERTS as usize], record_bytes));
    bench.desk.lock().rails.push(rail);
    bench.submit(0..1);
    assert_eq!(fake::posted("fake0"), 1, "it has been asked for");
    let took = look_until(&bench, "fake1", || bench.desk.lock().rails.is_empty());
    assert!(took >= DEADLINE && took < DEADLINE + LATE, "{took:?}");
    let why = bench.desk.lock().down_why.clone();
    assert!(why.contains("nothing completed for 60 ms"), "{why}");
}

/// Nothing else stands between a peer and what the client has in memory: a registration is for the
/// device, and the device is asked for both.
#[test]
fn queue_pairs_of_each_kind_allow_the_peer_what_they_are_for() {
    let bench = Bench::new(&[]);
    let terms = |transfer| SpillTerms { transfer, credits: 4, range_bytes: STRIDE as u32 };
    // `enum ibv_access_flags`: 2 is remote write. The queue pair for spilled experts is made first.
    let cases = [
        (None, &[0, 0][..]),
        (Some(terms(Transfer::Push)), &[2, 0, 0]),
        (Some(terms(Transfer::Stage)), &[0, 0, 0]),
    ];
    let mut made = 0;
    for (push, expected) in cases {
        let rail = rail_with(&bench.desk, "fake0", 0, push);
        assert_eq!(fake::allowed("fake0")[made..], *expected, "{push:?}");
        made += expected.len();
        drop(rail);
    }
}

#[test]
fn a_queue_that_takes_longer_than_the_total_is_served_while_reads_land() {
    const TOTAL: Duration = Duration::from_millis(600);
    // Two READs at a time.
    let bench = Bench::with_options(&["fake0"], |options| {
        (options.deadline, options.total, options.queue_pair_depth) = (TOTAL, TOTAL, 1);
    });
    let start = Instant::now();
    bench.submit(0..EXPERTS);
    let mut came = 0;
    while came < EXPERTS {
        assert!(start.elapsed() < Duration::from_secs(30), "{came} records came");
        // The pace of the link, at which a record of three parts keeps its total; nothing waits for it.
        std::thread::sleep(TOTAL / 4);
        fake::bring("fake0");
        bench.drive();
        bench.desk.expire();
        if let Some(completion) = bench.queue.pop(Duration::ZERO) {
            completion.outcome.unwrap_or_else(|failure| panic!("{failure}"));
            came += 1;
        }
    }
    assert!(start.elapsed() > TOTAL, "the queue was longer than the total: {:?}", start.elapsed());
}

#[test]
fn requests_of_which_nothing_was_asked_for_end_when_nothing_comes_for_the_total() {
    let bench = Bench::with_options(&["fake0"], |options| {
        (options.deadline, options.total) = (Duration::from_millis(20), Duration::from_millis(50));
        options.queue_pair_depth = 1;
    });
    bench.submit(0..EXPERTS);
    let start = Instant::now();
    let mut ends = Vec::new();
    while ends.len() < EXPERTS as usize {
        assert!(start.elapsed() < Duration::from_secs(30), "{} ended", ends.len());
        bench.desk.expire();
        ends.extend(bench.queue.pop(Duration::from_millis(10)));
    }
    for (at, end) in ends.into_iter().enumerate() {
        let failure = end.outcome.expect_err("late");
        assert!(failure.to_string().contains("METRALE_EXPERT_TOTAL_MS"), "{at}: {failure}");
        assert_eq!(failure.slot.is_none(), end.key.expert == 0, "the device has the first");
    }
}
