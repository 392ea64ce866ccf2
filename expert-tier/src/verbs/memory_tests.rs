//! Devices that do not take an arena, over the fake libibverbs.

use super::*;

const ENOMEM: i32 = 12;

/// Lets one registration through and refuses those behind it.
fn refuse_after_one() {
    fake::before_next("ibv_reg_mr", || {
        fake::before_next("ibv_reg_mr", || fake::fail("ibv_reg_mr", ENOMEM));
    });
}

#[test]
fn a_device_that_refuses_the_arena_costs_its_rails_and_no_fetch() {
    let bench = Bench::new(&["fake0", "fake1"]);
    refuse_after_one();
    let refused = bench.desk.use_arena(&bench.arena).err().map(|refused| refused.error);
    assert!(refused.is_none(), "{refused:?}");
    let ends = bench.ends();
    let why = ends[1].1.as_deref().expect("the second rail ends");
    assert!(why.contains("the arena cannot be registered") && why.contains("fake1"), "{why}");
    assert_eq!(ends[0].1, None);
    // A rail that is set up while the device still refuses would end with the first request.
    assert!(bench.desk.devices.device("fake1").is_err());

    bench.submit(0..3);
    assert_eq!(bench.desk.reap(), 1);
    fake::bring("fake0");
    bench.drive();
    bench.take_right(3);
    assert_eq!(fake::posted("fake1"), 0);

    fake::fail("ibv_reg_mr", 0);
    let device = bench.desk.devices.device("fake1").expect("there is room again");
    assert!(device.region(bench.arena.id()).is_some());
}

#[test]
fn an_arena_that_no_rail_takes_is_refused_and_a_smaller_one_may_be_taken() {
    let bench = Bench::new(&["fake0", "fake1"]);
    fake::fail("ibv_reg_mr", ENOMEM);
    let refused = bench.desk.use_arena(&bench.arena).expect_err("no device takes it");
    assert!(refused.error.is_of_size(), "{}", refused.error);
    assert!(bench.ends().iter().all(|(_, end)| end.is_none()), "{:?}", bench.ends());
    let device = || bench.desk.devices.device("fake0");
    assert!(device().is_ok(), "the arena that was refused is not kept");
    fake::fail("ibv_reg_mr", 0);
    let smaller = small_arena(1);
    assert!(bench.desk.use_arena(&smaller).is_ok());
    assert!(device().expect("it is open").region(smaller.id()).is_some());
}

#[test]
fn each_device_of_the_rails_counts_once_and_rails_that_may_come_count_too() {
    let devices = |names: &[&str]| Bench::new(names).desk.registrations().devices;
    assert_eq!(devices(&["fake0"]), 1);
    assert_eq!(devices(&["fake0", "fake1"]), 2);
    assert_eq!(devices(&["fake0", "fake0"]), 1);
    let bench = Bench::new(&["fake0"]);
    bench.desk.lock().rails_wanted = 2;
    assert_eq!(bench.desk.registrations().devices, 2);
    assert_eq!(bench.desk.registrations().grant_bytes, 0, "the peer pushes nothing");
}

const EIO: i32 = 5;

fn push_terms() -> SpillTerms {
    SpillTerms { transfer: Transfer::Push, credits: 4, range_bytes: STRIDE as u32 }
}

#[test]
fn a_trial_grant_is_counted_among_the_grants_and_says_nothing_while_others_are_out() {
    let Bench { desk, .. } = &Bench::new(&["fake0"]);
    let device = desk.devices.device("fake0").expect("a fake one");
    let try_grant = || desk.try_grant(&device, push_terms());

    // Another grant that has no room beside the trial waits for it.
    let (says, waits) = mpsc::channel();
    let grants = Arc::clone(&desk.grants);
    fake::before_next("ibv_reg_mr", move || {
        says.send(grants.place().wait_for_others().is_none()).expect("the test waits");
    });
    try_grant().expect("there is room");
    assert!(waits.try_recv().expect("the trial was registered"));
    assert!(desk.grants.is_idle() && !desk.grants.is_full());
    // `enum ibv_access_flags`: local and remote write, as a grant has.
    assert_eq!(fake::registrations().last(), Some(&3));

    // One that comes back while the trial is refused.
    let place = desk.grants.place();
    fake::fail_times("ibv_reg_mr", ENOMEM, 1);
    fake::before_next("ibv_reg_mr", move || drop(place));
    try_grant().expect("there is room now");
    assert_eq!(fake::failures("ibv_reg_mr"), 1);

    fake::fail("ibv_reg_mr", ENOMEM);
    let place = desk.grants.place();
    try_grant().expect("the other has what there is");
    drop(place);
    assert!(try_grant().expect_err("it is alone").is_of_size());
    let place = desk.grants.place();
    fake::fail("ibv_reg_mr", EIO);
    assert!(!try_grant().expect_err("that is not for want of room").is_of_size());
    drop(place);
    assert!(desk.grants.is_idle() && !desk.grants.is_full());
}

#[test]
fn a_refused_arena_is_registered_once_for_a_batch_and_again_when_a_rail_is_up_or_it_is_named() {
    let bench = Bench::new(&["fake0"]);
    let refused = |count: usize| {
        for _ in 0..count {
            let came = bench.queue.pop(Duration::ZERO).expect("a completion");
            let failure = came.outcome.expect_err("no device takes its arena");
            assert_eq!(failure.error.name(), "register");
            assert!(failure.slot.is_some());
        }
    };
    fake::fail("ibv_reg_mr", ENOMEM);
    bench.submit(0..3);
    refused(3);
    assert_eq!(fake::failures("ibv_reg_mr"), 1);
    fake::fail("ibv_reg_mr", 0);
    bench.submit(0..1);
    refused(1);
    assert!(bench.desk.use_arena(&bench.arena).is_ok());
    bench.submit(0..1);
    fake::bring("fake0");
    bench.drive();
    bench.take_right(1);

    bench.desk.devices.drop_arena(bench.arena.id());
    fake::fail("ibv_reg_mr", ENOMEM);
    bench.submit(0..2);
    refused(2);
    fake::fail("ibv_reg_mr", 0);
    let age = bench.desk.refused_arenas.age();
    let why = bench.desk.refused_arenas.why(&bench.arena).expect("it is refused");
    bench.desk.refused_arenas.forget_all();
    bench.desk.refused_arenas.note(age, &bench.arena, &why);
    bench.submit(0..1);
    fake::bring("fake0");
    bench.drive();
    bench.take_right(1);
}

#[test]
fn a_request_does_not_wait_while_an_arena_is_deregistered() {
    let bench = Bench::new(&["fake0"]);
    let device = bench.desk.devices.device("fake0").expect("a fake one");
    let while_deregistering = |deregister: &dyn Fn()| {
        assert!(bench.desk.use_arena(&bench.arena).is_ok());
        let (says, in_time) = mpsc::channel();
        let (desk, arena) = (Arc::clone(&bench.desk), bench.arena.clone());
        let device = Arc::clone(&device);
        fake::before_next("ibv_dereg_mr", move || {
            let (ends, has_ended) = mpsc::channel();
            std::thread::spawn(move || {
                let knows = desk.devices.knows(&arena) && device.region(arena.id()).is_some();
                // Where it took too long, nobody listens.
                let _ = ends.send(knows);
            });
            says.send(has_ended.recv_timeout(HELD_BOUND)).expect("the test waits");
        });
        deregister();
        let knows = in_time.try_recv().expect("it was deregistered");
        assert_eq!(knows, Ok(false), "that waited for the device");
    };
    let id = bench.arena.id();
    while_deregistering(&|| bench.desk.devices.drop_arena(id));
    while_deregistering(&|| device.refuse(id));
}

#[test]
fn a_device_that_fails_while_an_arena_is_registered_with_it_is_opened_anew() {
    let bench = Bench::new(&["fake0"]);
    let Bench { desk, arena, .. } = &bench;
    assert!(desk.use_arena(arena).is_ok());
    let failed = desk.devices.device("fake0").expect("as it was opened");
    failed.refuse(arena.id());
    let (keeper, its) = (Arc::clone(desk), Arc::clone(&failed));
    fake::before_next("ibv_reg_mr", move || keeper.devices.forget(&its));
    let anew = desk.devices.device("fake0").expect("after its reset");
    assert!(!Arc::ptr_eq(&anew, &failed), "the failed one is of no use");
    assert!(anew.region(arena.id()).is_some());
    assert_eq!(desk.devices.opened(), 1);
}

#[test]
fn an_arena_that_is_dropped_while_a_device_is_opened_is_not_left_registered() {
    let devices = Arc::new(Devices::of(fake::library(Path::new("/absent"))));
    let (first, second) = (small_arena(1), small_arena(1));
    assert!(devices.register(&first).is_empty() && devices.register(&second).is_empty());
    let (dropper, id) = (Arc::clone(&devices), first.id());
    fake::before_next("ibv_reg_mr", move || dropper.drop_arena(id));
    let device = devices.device("fake0").expect("a fake one");
    assert!(device.region(first.id()).is_none() && device.region(second.id()).is_some());
}

#[test]
fn what_is_registered_beside_an_arena_grows_with_the_credits() {
    let bench = Bench::new(&["fake0"]);
    let beside = || bench.desk.registrations().registered_bytes;
    assert_eq!(beside(), 64 << 10);
    let credits = 1024;
    let terms = SpillTerms { credits, ..push_terms() };
    bench.desk.lock().rails.push(rail_with(&bench.desk, "fake0", 0, Some(terms)));
    assert_eq!(beside(), (64 << 10) + 2 * 32 * u64::from(credits));
}
