//! A device that fails, which software RDMA never does, over the fake libibverbs.

use std::path::Path;
use std::sync::mpsc;

use gpu_sys::verbs::fake;
use railset::choose::{Address, Choice, Explanation, RailSpec, Routed, Wish};
use railset::facts::{Gid, LinkLayer, Mtu};
use railset::handshake::BringUp;
use railset::handshake::client::Create;
use railset::message::{OfferedRail, Psn, Qpn, QueuePairEnd};
use railset::pairing::RailPair;
use railset::table::{Column, LayerShape, LayerTable, Table};

use super::super::VerbsOptions;
use super::super::devices::Devices;
use super::super::rail::PreparedRail;
use super::*;
use crate::arena::ExpertArena;
use crate::key::ExpertKey;
use crate::testing::{TestStore, small_arena};
use crate::tier::{CompletionQueue, FetchRequest};

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
}

fn spec(device: &str, rail: u8) -> RailSpec {
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

fn pair(local: &RailSpec) -> RailPair {
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
        Self::with_drain(devices, Duration::from_secs(1))
    }

    fn with_drain(devices: &[&str], drain: Duration) -> Self {
        let store = TestStore::new(1, EXPERTS, &[700_001], 91);
        let open = store.open();
        let manifest = Arc::clone(open.manifest());
        let options = VerbsOptions { check_threads: 0, drain, ..VerbsOptions::new("peer") };
        let known = Devices::of(fake::library(Path::new("/absent")));
        let desk = Arc::new(Desk::new(options, manifest, known).expect("a desk"));
        let record_bytes = desk.manifest.layout().layers()[0].record_bytes();
        let mut bytes = vec![0; STRIDE * EXPERTS as usize];
        for expert in 0..EXPERTS {
            let at = STRIDE * expert as usize;
            let out = &mut bytes[at..at + usize::try_from(record_bytes).expect("a small record")];
            open.read_at(ExpertKey::new(0, expert), 0, out).expect("a record");
        }
        let layer = LayerTable {
            layer: 0,
            slot_stride: STRIDE as u64,
            columns: vec![Column { base: fake::publish(bytes), rkey: 1 }],
            slots: (0..EXPERTS).collect(),
        };
        let shape = LayerShape { layer: 0, experts: EXPERTS, record_bytes };
        let table = Table::new(1, vec![layer]).expect("a table");
        let table = Arc::new(table.check(&[shape], 1).expect("of this store"));
        for (slot, device) in devices.iter().enumerate() {
            let mut rail = rail(&desk, device, slot);
            rail.use_table(Arc::clone(&table));
            desk.lock().rails.push(rail);
        }
        let checker = PartChecker::start("check", 0).expect("no threads");
        let (arena, queue) = (small_arena(EXPERTS), CompletionQueue::new());
        Self { store, desk, checker, arena, queue }
    }

    fn submit(&self, experts: std::ops::Range<u32>) {
        for expert in experts {
            let slot = self.arena.try_acquire(STRIDE as u64).expect("a free slot");
            let request = FetchRequest::new(ExpertKey::new(0, expert), slot);
            self.desk.take(request, &self.queue, Instant::now());
        }
        self.desk.ring();
    }

    fn drive(&self) {
        self.desk.drive(&self.checker);
        while self.checker.help() {}
        self.desk.ring();
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

fn rail(desk: &Desk, device: &str, slot: usize) -> Rail {
    let spec = spec(device, slot as u8 + 1);
    let (known, number) = (desk.devices.device(device).expect("a fake one"), desk.next_rail());
    let create = Create { rail: 0, local: spec.clone(), queue_pairs: 2, push: None };
    let prepared = PreparedRail::new(&create, known, 64).expect("queue pairs");
    let end = |qpn| QueuePairEnd { qpn: Qpn::new(qpn).expect("one"), psn: Psn::from_random(1) };
    let up = BringUp {
        index: 0,
        address: Address::Ethernet { gid: Gid([9; 16]) },
        mtu: Mtu::B1024,
        depth: 16,
        remote: vec![end(20), end(21)],
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
    let register = || bench.desk.devices.register(&other).expect("it can be registered");
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
    devices.register(&small_arena(1)).expect("it is known from now on");
    let open = || assert_eq!(devices.device("fake0").expect("a fake one").name(), "fake0");
    while_registering(open, || {
        assert_eq!(devices.device("fake1").expect("a fake one").name(), "fake1");
    });
}

#[test]
fn an_arena_that_comes_while_a_device_is_opened_is_registered_with_it() {
    let devices = Devices::of(fake::library(Path::new("/absent")));
    let (first, second) = (small_arena(1), small_arena(1));
    devices.register(&first).expect("it is known from now on");
    let open = || assert_eq!(devices.device("fake0").expect("a fake one").name(), "fake0");
    while_registering(open, || devices.register(&second).expect("no device is open"));
    let device = devices.device("fake0").expect("it is open");
    assert!(device.region(first.id()).is_some() && device.region(second.id()).is_some());
    assert!(devices.knows(&first) && devices.knows(&second));
}
