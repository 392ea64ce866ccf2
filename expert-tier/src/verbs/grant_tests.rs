//! Parts that cannot be granted and requests that come back, over the fake libibverbs.

use railset::push::{PushRequest, PushStatus, Receipt, Window};

use super::super::super::call::Way;
use super::*;
use crate::arena::{ArenaOptions, SlabPlan};

const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const TERMS: SpillTerms =
    SpillTerms { transfer: Transfer::Push, credits: 4, range_bytes: STRIDE as u32 };

impl Bench {
    /// A rail over which the peer pushes what it does not have in memory, which is everything.
    fn add_pushing_rail(&self, device: &str, slot: usize) {
        let mut rail = rail_with(&self.desk, device, slot, Some(TERMS));
        let record_bytes = self.desk.manifest.layout().layers()[0].record_bytes();
        rail.use_table(table(1 << 20, vec![SPILLED; EXPERTS as usize], record_bytes));
        self.desk.lock().rails.push(rail);
    }

    fn pushing(devices: &[&str], change: impl FnOnce(&mut VerbsOptions)) -> Self {
        let bench = Self::with_options(&[], change);
        devices.iter().enumerate().for_each(|(slot, it)| bench.add_pushing_rail(it, slot));
        let refused = bench.desk.use_arena(&bench.arena);
        assert!(refused.is_ok(), "the arena is registered before anything fails");
        bench
    }

    /// Pushes what was asked for, as the peer does, and takes it.
    fn push_all(&self) {
        let open = self.store.open();
        for (queue_pair, message) in fake::sent() {
            let Ok(PushRequest::Fetch(fetch)) = PushRequest::decode(&message) else { continue };
            let mut bytes = vec![0; fetch.bytes as usize];
            let key = ExpertKey::new(fetch.layer, fetch.expert);
            open.read_at(key, fetch.offset, &mut bytes).expect("a record");
            assert!(fake::write(fetch.into.address, fetch.into.rkey, &bytes), "it is granted");
            let (id, status, staged) = (fetch.id, PushStatus::Done, Window::default());
            let receipt = Receipt { id, status, bytes: fetch.bytes, staged };
            assert!(fake::receive(queue_pair, &receipt.encode()), "a receive is posted");
        }
        self.drive();
    }

    /// The calls in line, first to last.
    fn in_line(&self, way: Way) -> Vec<u32> {
        self.desk.lock().line(way).iter().copied().collect()
    }
}

#[test]
fn a_device_that_refuses_a_grant_for_its_own_sake_costs_its_rail_and_no_fetch() {
    let bench = Bench::pushing(&["fake0", "fake1"], |_| ());
    fake::fail_times("ibv_reg_mr", EIO, 1);
    bench.submit(0..3);
    let ends = bench.ends();
    let ended: Vec<_> = ends.iter().filter_map(|(_, end)| end.as_deref()).collect();
    assert_eq!(ended.len(), 1, "{ends:?}");
    assert!(ended[0].contains("ibv_reg_mr"), "{ends:?}");
    bench.push_all();
    bench.take_right(3);
}

#[test]
fn a_grant_that_no_rail_gives_fails_its_request_after_its_attempts() {
    let bench = Bench::pushing(&["fake0"], |options| options.attempts = 2);
    fake::fail("ibv_reg_mr", EIO);
    bench.submit(0..1);
    assert!(bench.queue.pop(Duration::ZERO).is_none(), "it has an attempt left");
    fake::fail("ibv_reg_mr", 0);
    bench.add_pushing_rail("fake0", 0);
    fake::fail("ibv_reg_mr", EIO);
    bench.desk.ring();
    let came = bench.queue.pop(Duration::ZERO).expect("a completion");
    let failure = came.outcome.expect_err("no device grants it");
    let text = failure.to_string();
    assert!(text.contains("for the peer to write") && text.contains("ibv_reg_mr"), "{text}");
    assert!(failure.slot.is_some(), "nobody may write there");
}

#[test]
fn pushes_that_come_back_from_a_rail_are_in_line_as_they_were_submitted() {
    let bench = Bench::pushing(&["fake0"], |_| ());
    bench.submit(0..EXPERTS);
    assert_eq!(fake::sent().len(), EXPERTS as usize, "each has been asked for");
    bench.desk.end_rails_where(|_| true, "a test ends it");
    fake::flush("fake0");
    bench.drive();
    bench.desk.reap();
    assert_eq!(bench.in_line(Way::Push), [0, 1, 2, 3]);
}

#[test]
fn reads_that_come_back_from_a_rail_are_in_line_as_they_were_submitted() {
    let bench = Bench::new(&["fake0"]);
    bench.submit(0..EXPERTS);
    bench.desk.end_rails_where(|_| true, "a test ends it");
    fake::flush("fake0");
    bench.drive();
    bench.desk.reap();
    assert_eq!(bench.in_line(Way::Read), [0, 1, 2, 3]);
}

#[test]
fn reads_that_a_device_refuses_are_in_line_as_they_were_submitted() {
    let bench = Bench::new(&["fake0"]);
    fake::fail("ibv_post_send", ENOMEM);
    bench.submit(0..EXPERTS);
    bench.desk.reap();
    assert_eq!(bench.in_line(Way::Read), [0, 1, 2, 3]);
}

#[test]
fn a_request_that_waits_for_room_for_its_grant_has_not_been_asked_for() {
    let bench = Bench::pushing(&["fake0"], |_| ());
    bench.submit(0..1);
    fake::fail("ibv_reg_mr", ENOMEM);
    bench.submit(1..2);
    assert_eq!(bench.in_line(Way::Push), [1]);
    let is_asked = |id| bench.desk.lock().calls.find(id).is_some_and(|call| call.asked.is_some());
    assert_eq!([is_asked(0), is_asked(1)], [true, false]);
    fake::fail("ibv_reg_mr", 0);
    bench.push_all();
    bench.push_all();
    bench.take_right(2);
}

#[test]
fn however_many_requests_fail_one_after_the_other_the_stack_does_not_grow() {
    const REQUESTS: u32 = 4000;
    const STACK_BYTES: usize = 256 << 10;
    let fail_all = || {
        let bench = Bench::with_records(&[], 4000, |_| ());
        bench.add_pushing_rail("fake0", 0);
        let slabs = vec![SlabPlan { slot_bytes: 8192, slots: REQUESTS }];
        let arena = ExpertArena::new(&ArenaOptions::with_slabs(slabs)).expect("32 MiB");
        assert!(bench.desk.use_arena(&arena).is_ok());
        fake::fail("ibv_reg_mr", ENOMEM);
        for _ in 0..REQUESTS {
            let slot = arena.try_acquire(8192).expect("a free slot");
            let request = FetchRequest::new(ExpertKey::new(0, 0), slot);
            bench.desk.take(request, &bench.queue, Instant::now());
        }
        bench.desk.ring();
        for _ in 0..REQUESTS {
            let came = bench.queue.pop(Duration::ZERO).expect("a completion");
            came.outcome.expect_err("there is no room for its grant");
        }
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    thread.spawn(fail_all).expect("a thread").join().expect("every request ended");
}

#[test]
fn a_request_that_ends_in_silence_names_the_longer_bound() {
    let bench = Bench::with_options(&["fake0"], |options| {
        (options.deadline, options.total) = (Duration::from_millis(60), Duration::from_millis(30));
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
    for end in ends {
        let (expert, text) = (end.key.expert, end.outcome.expect_err("late").to_string());
        let asked = expert == 0;
        let bound = if asked { "METRALE_EXPERT_TOTAL_MS" } else { "METRALE_EXPERT_DEADLINE_MS" };
        assert!(text.contains(bound), "{expert}: {text}");
    }
}
