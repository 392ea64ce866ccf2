//! Every verbs call fails once, twice and for ever: while rails are set up, while requests fly, and while
//! the backend closes. Each request must end once and within its bound, each slot must be free or counted
//! as quarantined.
//!
//! A case is one thread, since the fake's state is its thread's. That thread is device, peer, keeper and
//! connector in turn, so nothing waits for anything but for a deadline of the backend.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu_sys::verbs::fake;
use railset::choose::Address;
use railset::facts::{Gid, Mtu};
use railset::handshake::BringUp;
use railset::handshake::client::Create;
use railset::message::{Psn, Qpn, QueuePairEnd, SpillTerms, Transfer};
use railset::push::{Fetch, PushRequest, PushStatus, Receipt, Window};
use railset::table::{CheckedTable, Column, LayerShape, LayerTable, SPILLED, Table};

use super::super::VerbsOptions;
use super::super::claims::Blame;
use super::super::devices::Devices;
use super::super::rail::PreparedRail;
use super::tests::{pair, spec};
use super::*;
use crate::arena::ExpertArena;
use crate::key::ExpertKey;
use crate::store::manifest::Manifest;
use crate::testing::{TestStore, small_arena};
use crate::tier::{CompletionQueue, FetchRequest};

const EXPERTS: u32 = 3;
/// A record of two parts of a READ.
const TWO_PARTS: u64 = 400_001;
/// A record of one part: where one rail refuses it, nothing is in flight on the other.
const ONE_PART: u64 = 200_001;
/// Between records at the peer; more than one of them has.
const STRIDE: usize = 1 << 19;
/// When a case has failed: every bound of the backend but `total` is far shorter, and `total`, which ends
/// every request in any case, is far longer. So a request that only `total` ends fails its case.
const BOUND: Duration = Duration::from_secs(10);
const TOTAL: Duration = Duration::from_secs(120);
/// Longest silence of a rail.
const DEADLINE: Duration = Duration::from_millis(10);
const DRAIN: Duration = Duration::from_millis(3);
/// When no more cases are run: each that is wrong may take all of [`BOUND`].
const ENOUGH_WRONG: usize = 8;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;

/// Every call of the backend, and the errors that it fails with.
const CALLS: [(&str, i32); 26] = [
    ("ibv_get_device_list", EIO),
    ("ibv_open_device", EIO),
    ("ibv_close_device", EIO),
    ("ibv_query_device", EIO),
    ("ibv_query_port", EIO),
    ("ibv_query_gid", EIO),
    ("ibv_alloc_pd", ENOMEM),
    ("ibv_dealloc_pd", EBUSY),
    ("ibv_reg_mr", ENOMEM),
    ("ibv_reg_mr", EIO),
    ("ibv_dereg_mr", EIO),
    ("ibv_create_comp_channel", EIO),
    ("ibv_destroy_comp_channel", EBUSY),
    ("ibv_create_cq", ENOMEM),
    ("ibv_destroy_cq", EBUSY),
    ("ibv_req_notify_cq", EIO),
    ("ibv_get_cq_event", EIO),
    ("ibv_create_qp", ENOMEM),
    ("ibv_modify_qp", EIO),
    ("ibv_modify_qp to RTR", EIO),
    ("ibv_modify_qp to RTS", EIO),
    ("ibv_destroy_qp", EBUSY),
    ("ibv_post_send", ENOMEM),
    ("ibv_post_recv", ENOMEM),
    ("ibv_poll_cq", EIO),
    ("ibv_get_async_event", EIO),
];

/// When the call begins to fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Moment {
    Setup,
    Flight,
    Teardown,
}

/// How records come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Comes {
    Read,
    Spilled(Transfer),
}

/// What the devices and the connector do beside the call that fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fabric {
    /// The devices work, and rails that are missing are set up again.
    Reconnects,
    /// The devices work, and a rail that is lost stays lost.
    LosesRails,
    /// The first device brings nothing and gives nothing back, and a rail that is lost stays lost.
    Silent,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    call: &'static str,
    error: i32,
    /// How often it fails; `None` is for ever.
    times: Option<usize>,
    moment: Moment,
    rails: usize,
    comes: Comes,
    fabric: Fabric,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (call, error) in CALLS {
            for times in [Some(1), Some(2), None] {
                for moment in [Moment::Setup, Moment::Flight, Moment::Teardown] {
                    let case = |rails, comes, fabric| Self {
                        call,
                        error,
                        times,
                        moment,
                        rails,
                        comes,
                        fabric,
                    };
                    let spilled = [Transfer::Push, Transfer::Stage].map(Comes::Spilled);
                    for comes in [Comes::Read, spilled[0], spilled[1]] {
                        for fabric in [Fabric::Reconnects, Fabric::LosesRails, Fabric::Silent] {
                            all.extend([1, 2].map(|rails| case(rails, comes, fabric)));
                        }
                    }
                }
            }
        }
        all
    }

    fn arm(&self) {
        match self.times {
            Some(times) => fake::fail_times(self.call, self.error, times),
            None => fake::fail(self.call, self.error),
        }
    }
}

/// What every case fetches.
struct Records {
    manifest: Arc<Manifest>,
    /// All records, [`STRIDE`] apart.
    bytes: Vec<u8>,
    payloads: Vec<Vec<u8>>,
}

impl Records {
    fn new(payload_bytes: u64) -> Self {
        let store = TestStore::new(1, EXPERTS, &[payload_bytes], 17);
        let open = store.open();
        let manifest = Arc::clone(open.manifest());
        let record_bytes = manifest.layout().layers()[0].record_bytes() as usize;
        let mut bytes = vec![0; STRIDE * EXPERTS as usize];
        for expert in 0..EXPERTS {
            let at = STRIDE * expert as usize;
            let out = &mut bytes[at..at + record_bytes];
            open.read_at(ExpertKey::new(0, expert), 0, out).expect("a record");
        }
        let payloads = (0..EXPERTS).map(|expert| store.payload(ExpertKey::new(0, expert)));
        let payloads = payloads.collect();
        Self { manifest, bytes, payloads }
    }
}

/// A backend, its devices and its peer.
struct World<'a> {
    case: Case,
    records: &'a Records,
    /// Where the records begin at the peer.
    base: u64,
    table: Arc<CheckedTable>,
    desk: Arc<Desk>,
    checker: PartChecker,
    arena: ExpertArena,
    queue: CompletionQueue,
    devices: Vec<Arc<Device>>,
    attempts: [u32; 2],
}

impl<'a> World<'a> {
    fn new(case: Case, records: &'a Records) -> Self {
        let base = fake::publish(records.bytes.clone());
        let options = VerbsOptions {
            check_threads: 0,
            deadline: DEADLINE,
            drain: DRAIN,
            total: TOTAL,
            ..VerbsOptions::new("peer")
        };
        let known = Devices::of(fake::library(Path::new("/absent")));
        let desk = Desk::new(options, Arc::clone(&records.manifest), known).expect("a desk");
        let slots = (0..EXPERTS).map(|expert| match case.comes {
            Comes::Read => expert,
            Comes::Spilled(_) => SPILLED,
        });
        let layer = LayerTable {
            layer: 0,
            slot_stride: STRIDE as u64,
            columns: vec![Column { base, rkey: 1 }],
            slots: slots.collect(),
        };
        let record_bytes = records.manifest.layout().layers()[0].record_bytes();
        let shape = LayerShape { layer: 0, experts: EXPERTS, record_bytes };
        let table = Table::new(1, vec![layer]).expect("a table");
        let table = Arc::new(table.check(&[shape], 1).expect("of this store"));
        Self {
            case,
            records,
            base,
            table,
            desk: Arc::new(desk),
            checker: PartChecker::start("check", 0).expect("no threads"),
            arena: small_arena(EXPERTS),
            queue: CompletionQueue::new(),
            devices: Vec::new(),
            attempts: [0; 2],
        }
    }

    /// Tries once to set up each rail that is missing, as the connector does.
    fn connect(&mut self) {
        for slot in 0..self.case.rails {
            if self.desk.has_slot(slot) || self.attempts[slot] >= self.attempts_most() {
                continue;
            }
            self.attempts[slot] += 1;
            match self.set_up(slot) {
                Ok(rail) => {
                    let mut state = self.desk.lock();
                    state.down_since = None;
                    state.rails.push(rail);
                    drop(state);
                    self.desk.ring();
                }
                Err(why) => self.desk.dial_failed(slot, &why, Blame::Other),
            }
        }
    }

    fn attempts_most(&self) -> u32 {
        if self.case.fabric == Fabric::Reconnects { 10 } else { 1 }
    }

    fn set_up(&self, slot: usize) -> Result<Rail, String> {
        let name = ["fake0", "fake1"][slot];
        let devices = &self.desk.devices;
        let facts = devices.facts().map_err(|error| error.to_string())?;
        if !facts.iter().any(|facts| facts.name == name) {
            return Err(format!("{name} was left out"));
        }
        let local = spec(name, slot as u8 + 1);
        let push = match self.case.comes {
            Comes::Read => None,
            Comes::Spilled(transfer) => {
                Some(SpillTerms { transfer, credits: 4, range_bytes: 1 << 20 })
            }
        };
        let create = Create { rail: 0, local: local.clone(), queue_pairs: 2, push };
        let device = devices.device(name).map_err(|error| error.to_string())?;
        let prepared = PreparedRail::new(&create, device, 16).map_err(|error| error.to_string())?;
        let end = |qpn| QueuePairEnd { qpn: Qpn::new(qpn).expect("one"), psn: Psn::from_random(1) };
        let up = BringUp {
            index: 0,
            address: Address::Ethernet { gid: Gid([9; 16]) },
            mtu: Mtu::B1024,
            depth: 16,
            remote: vec![end(20), end(21)],
        };
        let place = (self.desk.next_rail(), slot);
        let mut rail =
            prepared.connect(place, &pair(&local), &up).map_err(|error| error.to_string())?;
        rail.use_table(Arc::clone(&self.table));
        Ok(rail)
    }

    fn submit(&self, experts: std::ops::Range<u32>) {
        for expert in experts {
            let slot = self.arena.try_acquire(STRIDE as u64).expect("a free slot");
            let request = FetchRequest::new(ExpertKey::new(0, expert), slot);
            self.desk.take(request, &self.queue, Instant::now());
            self.desk.ring();
        }
    }

    /// The devices that work.
    fn live(&self) -> &'static [&'static str] {
        if self.case.fabric == Fabric::Silent { &["fake1"] } else { &["fake0", "fake1"] }
    }

    fn flush(&self) {
        self.live().iter().for_each(|device| fake::flush_failed(device));
    }

    /// Does what the devices and the peer do.
    fn fabric(&self) {
        self.flush();
        for device in self.live() {
            fake::bring(device);
        }
        for (queue_pair, message) in fake::sent() {
            let request = PushRequest::decode(&message).expect("a request");
            if let PushRequest::Fetch(fetch) = request {
                self.answer(queue_pair, &fetch);
            }
        }
    }

    /// Pushes or stages what `fetch` asks for, as the peer does.
    fn answer(&self, queue_pair: u32, fetch: &Fetch) {
        let at = STRIDE * fetch.expert as usize + fetch.offset as usize;
        let mut staged = Window::default();
        match self.case.comes {
            Comes::Spilled(Transfer::Push) => {
                let bytes = &self.records.bytes[at..at + fetch.bytes as usize];
                if !fake::write(fetch.into.address, fetch.into.rkey, bytes) {
                    return;
                }
            }
            _ => staged = Window { address: self.base + at as u64, rkey: 1 },
        }
        let (id, status, bytes) = (fetch.id, PushStatus::Done, fetch.bytes);
        // With no receive posted, or a queue pair in error, it is lost.
        fake::receive(queue_pair, &Receipt { id, status, bytes, staged }.encode());
    }

    /// Does what the keeper does, and what a caller does that waits for a push.
    fn keep(&mut self) {
        look_at_events(&self.desk, &mut self.devices);
        self.desk.drive(&self.checker);
        while self.checker.help() {}
        if self.desk.awaits_peer() {
            self.desk.sleep_until_pushed(&self.checker, Duration::ZERO);
        }
        self.desk.expire();
        self.desk.reap();
    }

    /// Keeps everything going until `is_enough` says so of the queue.
    fn await_ended(
        &mut self,
        mut is_enough: impl FnMut(&CompletionQueue) -> Result<bool, String>,
    ) -> Result<(), String> {
        let until = Instant::now() + BOUND;
        while !is_enough(&self.queue)? {
            if Instant::now() >= until {
                return Err("a request did not end within its bound".into());
            }
            self.fabric();
            self.keep();
            self.connect();
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Closes the backend as the keeper and `VerbsTier` do; says whether that came to an end.
    fn close(self) -> (ExpertArena, CompletionQueue, bool) {
        let until = Instant::now() + BOUND;
        self.desk.close();
        self.desk.end_rails_where(|_| true, "the backend is closed");
        while self.desk.reap() > 0 && Instant::now() < until {
            self.flush();
            self.desk.drive(&self.checker);
            while self.checker.help() {}
        }
        let Self { desk, checker, arena, queue, devices, .. } = self;
        super::super::finish(&desk, Arc::new(checker));
        drop((desk, devices));
        (arena, queue, Instant::now() < until)
    }
}

/// Runs a case; returns whether its call failed at all, or what is wrong.
fn run(case: Case, records: &Records) -> Result<bool, String> {
    if case.moment == Moment::Setup {
        case.arm();
    }
    let mut world = World::new(case, records);
    world.connect();
    let mut ended = BTreeMap::new();
    let mut take = |queue: &CompletionQueue| {
        while let Some(came) = queue.pop(Duration::ZERO) {
            let right = came.outcome.map(|fetched| {
                fetched.residency.payload() == records.payloads[came.key.expert as usize]
            });
            if right.is_ok_and(|right| !right) {
                return Err(format!("{} differs", came.key));
            }
            *ended.entry(came.key.expert).or_insert(0) += 1;
        }
        Ok(ended.len())
    };
    if case.moment == Moment::Flight {
        world.submit(0..1);
        if case.fabric == Fabric::LosesRails {
            world.await_ended(|queue| Ok(take(queue)? == 1))?;
        }
        case.arm();
        world.submit(1..2);
        if case.fabric == Fabric::LosesRails {
            world.await_ended(|queue| Ok(take(queue)? == 2))?;
        }
        world.submit(2..EXPERTS);
    } else {
        world.submit(0..EXPERTS);
    }
    if case.moment == Moment::Teardown {
        case.arm();
    } else {
        world.await_ended(|queue| Ok(take(queue)? == EXPERTS as usize))?;
    }
    let (arena, queue, in_time) = world.close();
    if !in_time {
        return Err("the backend did not close within its bound".into());
    }
    take(&queue)?;
    if ended.len() != EXPERTS as usize || ended.values().any(|times| *times != 1) {
        return Err(format!("each request is to end once: {ended:?}"));
    }
    let counts = arena.counts();
    if counts.free + counts.quarantined != counts.total {
        return Err(format!("a slot is neither free nor counted: {counts:?}"));
    }
    let may_lose = ["ibv_destroy_qp", "ibv_dereg_mr"].contains(&case.call);
    if counts.quarantined > 0 && !may_lose {
        return Err(format!("a slot is lost, though no device may write there: {counts:?}"));
    }
    Ok(fake::failures(case.call) > 0)
}

#[test]
fn every_request_ends_and_every_slot_is_accounted_for_whatever_call_fails() {
    let (cases, next) = (Case::all(), AtomicUsize::new(0));
    let (two_parts, one_part) = (Records::new(TWO_PARTS), Records::new(ONE_PART));
    let (made, wrong) = (AtomicUsize::new(0), std::sync::Mutex::new(Vec::new()));
    let worker = || {
        while let Some(&case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            if wrong.lock().expect("no panic").len() >= ENOUGH_WRONG {
                return;
            }
            let records = if case.fabric == Fabric::LosesRails { &one_part } else { &two_parts };
            let ran = std::thread::scope(|scope| scope.spawn(|| run(case, records)).join());
            match ran {
                Ok(Ok(failed)) => {
                    made.fetch_add(usize::from(failed), Ordering::Relaxed);
                }
                Ok(Err(why)) => wrong.lock().expect("no panic").push((case, why)),
                Err(_) => wrong.lock().expect("no panic").push((case, "it panicked".into())),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(4) {
            scope.spawn(worker);
        }
    });
    let (made, wrong) = (made.into_inner(), wrong.into_inner().expect("no panic"));
    println!("chaos: {made} distinct failures");
    assert!(wrong.is_empty(), "{} cases are wrong: {wrong:#?}", wrong.len());
    // A call that no case reaches any more would go unnoticed.
    assert!(made >= 1000, "only {made} of {} cases made their call fail", cases.len());
}
