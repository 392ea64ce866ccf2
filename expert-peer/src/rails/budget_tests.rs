use expert_tier::testing::TestStore;
use gpu_sys::limits::IpcLock;

use super::*;
use crate::push::SpillWish;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn lock(soft_bytes: Option<u64>, capability: IpcLock) -> LockLimit {
    LockLimit { soft_bytes, hard_bytes: soft_bytes, locked_bytes: 0, pinned_bytes: 0, capability }
}

fn unlimited() -> LockLimit {
    lock(None, IpcLock::Absent)
}

fn bounds(lock: LockLimit, memory_bytes: u64) -> Bounds {
    let memory = Some(Available { bytes: memory_bytes, bound_by: "a test".into() });
    let devices = vec![("rxe0".into(), 64 * GIB), ("rxe1".into(), 48 * GIB)];
    Bounds { devices, lock, memory, spill: SpillMemory::default() }
}

/// Eight records, slots of 1 MiB and some.
fn layout() -> ExpertLayout {
    let store = TestStore::new(2, 4, &[MIB, 5_000], 3).open();
    store.manifest().layout().clone()
}

fn slots(budget: Option<u64>, bounds: &Bounds) -> Result<(u64, String), String> {
    let plan = Plan::of(&layout(), budget, bounds).map_err(|error| error.to_string())?;
    assert_eq!(plan.spill(Transfer::Push).is_some(), plan.slots < 8);
    Ok((plan.slots, plan.bound_by))
}

#[test]
fn without_a_budget_all_records_are_held_or_as_many_as_fit() {
    let slot = layout().max_stride();
    assert_eq!(slots(None, &bounds(unlimited(), GIB)), Ok((8, "nothing".into())));
    // Some is left free, and whole huge pages are pinned: 4 slots would take three of them.
    let (count, why) = slots(None, &bounds(unlimited(), 5 * MIB)).unwrap();
    assert_eq!(count, 3);
    assert!(why.contains("that can be pinned by a test"), "{why}");
    // Once for each of two devices.
    let limited = lock(Some(12 * MIB), IpcLock::Absent);
    let (count, why) = slots(None, &bounds(limited, GIB)).unwrap();
    assert_eq!(count, 5);
    assert!(why.contains("locked-memory limit") && why.contains("2 devices"), "{why}");
    let lifted = lock(Some(4 * slot), IpcLock::Granted);
    assert_eq!(slots(None, &bounds(lifted, GIB)).unwrap().0, 8);
    let mut small = bounds(unlimited(), GIB);
    small.devices[1].1 = 5 * slot;
    let (count, why) = slots(None, &small).unwrap();
    assert_eq!((count, why.as_str()), (5, "what rxe1 registers"));
}

#[test]
fn where_not_even_one_record_fits_the_error_says_what_stands_against_it() {
    for (bounds, words) in [
        (bounds(lock(Some(8192), IpcLock::Absent), GIB), ["locked memory", "ulimit -l"]),
        (bounds(unlimited(), 8192), ["can be pinned by a test", "--rail none"]),
    ] {
        let error = slots(None, &bounds).unwrap_err();
        words.iter().for_each(|word| assert!(error.contains(word), "{word:?}: {error}"));
    }
}

#[test]
fn a_budget_is_kept_to_and_one_that_does_not_fit_is_an_error() {
    let slot = layout().max_stride();
    let roomy = bounds(unlimited(), GIB);
    assert_eq!(slots(Some(3 * slot), &roomy), Ok((3, "--dram-budget".into())));
    assert_eq!(slots(Some(4 * slot - 1), &roomy).unwrap().0, 3);
    assert_eq!(slots(Some(u64::MAX), &roomy), Ok((8, "nothing".into())));
    hold_against_a_record(Some(slot), &layout()).expect("room for one");
    let error = hold_against_a_record(Some(slot - 1), &layout()).unwrap_err().to_string();
    assert!(error.contains("--dram-budget") && error.contains("give"), "{error}");
    let error = slots(Some(6 * slot), &bounds(unlimited(), 4 * slot)).unwrap_err();
    for part in ["--dram-budget", "8 MiB", "can be pinned by a test"] {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
}

#[test]
fn locked_memory_is_needed_once_for_each_device() {
    let hold = |bytes, lock| bounds(lock, 100 * GIB).hold(bytes, SpillMemory::default());
    let allowed = lock(Some(20 * GIB), IpcLock::Absent);
    hold(10 * GIB, allowed).expect("twice 10 GiB");
    let error = hold(10 * GIB + 1, allowed).unwrap_err();
    assert!(matches!(error, RailsError::LockLimit { devices: 2, .. }), "{error}");
    let text = error.to_string();
    for part in ["2 devices", "20 GiB", "ulimit -l", "--dram-budget", "--rail none"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    hold(40 * GIB, lock(Some(20 * GIB), IpcLock::Granted)).expect("the capability lifts it");
    hold(40 * GIB, unlimited()).expect("no limit");
    hold(u64::MAX / 2, allowed).expect_err("no overflow");
    // What is locked already is not there for the pages.
    let taken = LockLimit { locked_bytes: 15 * GIB, ..allowed };
    hold(5 * GIB, taken).expect("what is left");
    hold(5 * GIB + 1, taken).expect_err("more than is left");
}

#[test]
fn a_device_that_registers_less_at_once_is_named() {
    let roomy = bounds(unlimited(), 100 * GIB);
    roomy.hold(48 * GIB, SpillMemory::default()).expect("exactly what it takes");
    let text = roomy.hold(48 * GIB + 1, SpillMemory::default()).unwrap_err().to_string();
    for part in ["rxe1", "48 GiB", "--dram-budget", "--rail none"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn buffers_for_spilled_records_come_off_where_there_are_any() {
    // Registered with two devices and with io_uring.
    let spill = SpillMemory { pinned: 2 * MIB, locked: 6 * MIB };
    let with_buffers = |bounds| Bounds { spill, ..bounds };
    // All fit, so nothing is spilled and nothing else needed.
    let enough = with_buffers(bounds(unlimited(), 11 * MIB));
    assert_eq!(slots(None, &enough), Ok((8, "nothing".into())));
    let memory = with_buffers(bounds(unlimited(), 9 * MIB));
    assert_eq!(slots(None, &memory).unwrap().0, 5);
    let locked = with_buffers(bounds(lock(Some(14 * MIB), IpcLock::Absent), GIB));
    assert_eq!(slots(None, &locked).unwrap().0, 3);
    let slot = layout().max_stride();
    assert_eq!(slots(Some(3 * slot), &locked).unwrap().0, 3);
    let error = slots(Some(4 * slot), &locked).unwrap_err();
    assert!(error.contains("--dram-budget") && error.contains("14.1 MiB"), "{error}");
    // Not the registrations, but the pages and the buffers are too much.
    let one = Bounds { devices: vec![("rxe0".into(), GIB)], ..locked };
    let text =
        one.hold(12 * MIB + 1, SpillMemory { locked: MIB, ..spill }).unwrap_err().to_string();
    assert!(text.contains("needs 14.1 MiB") && text.contains("1 MiB for spilled"), "{text}");
}

#[test]
fn buffers_count_once_for_each_device_and_once_for_io_uring() {
    let options = |source| PushOptions {
        source,
        buffers: 8 * MIB,
        pinned: 9 * MIB,
        ..PushOptions::default()
    };
    let memory = |source| {
        let SpillMemory { pinned, locked } = options(source).memory(2);
        (pinned / MIB, locked / MIB)
    };
    // And 1 MiB for the receives of clients' queue pairs.
    assert_eq!(memory(SpillWish::Direct), (8, 25));
    assert_eq!(memory(SpillWish::Mmap), (9, 19));
    assert_eq!(memory(SpillWish::Auto), (9, 25));
    let staged = PushOptions { transfer: Transfer::Stage, ..options(SpillWish::Auto) };
    assert_eq!(staged.memory(2).pinned, 8 * MIB, "no file pages are staged");
}

#[test]
fn the_most_counted_records_are_held_first_and_the_rest_in_order() {
    let plan = Plan { slot_bytes: 4096, slots: 4, records: 8, bound_by: String::new() };
    assert_eq!(plan.first_records(None), [0, 1, 2, 3]);
    assert_eq!(plan.first_records(Some(&[0, 0, 0, 7, 0, 9, 1, 0])), [0, 3, 5, 6]);
    assert_eq!(plan.first_records(Some(&[1; 8])), [0, 1, 2, 3]);
}
