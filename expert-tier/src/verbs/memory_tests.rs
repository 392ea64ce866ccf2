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
