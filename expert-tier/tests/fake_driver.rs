//! Leases that a device reads, against a driver library that writes down what it is asked.

#[path = "../../gpu-sys/tests/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use expert_tier::arena::{ArenaError, ArenaOptions, CudaUse, ExpertArena, SlabPlan, SlotCounts};
use expert_tier::dtype::Dtype;
use expert_tier::key::ExpertKey;
use expert_tier::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};
use expert_tier::residency::ExpertResidency;
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::sound_record;
use gpu_sys::cuda::Stream;
use support::{Driver, Fake, is_mapped, with_driver};

const DEVICE_OFFSET: u64 = 0x1000_0000_0000;

fn manifest() -> Arc<Manifest> {
    let tensor =
        TensorSpec { name: "w".into(), dtype: Dtype::U8, shape: vec![5000], offset: 0, bytes: 0 };
    let spec = ExpertRecordSpec::lay_out(vec![tensor]).unwrap();
    let layer = LayerLayout::new(0, 4, "layers.0.".into(), spec, 4096).unwrap();
    let layout = ExpertLayout::new(vec![layer]).unwrap();
    Arc::new(Manifest::new("test".into(), layout, vec![[0; 32]]))
}

fn options(slots: u32, cuda: CudaUse) -> ArenaOptions {
    let slabs = vec![SlabPlan { slot_bytes: 8192, slots }];
    let drain_wait = Duration::from_millis(50);
    ArenaOptions { cuda, drain_wait, ..ArenaOptions::with_slabs(slabs) }
}

fn arena(slots: u32) -> ExpertArena {
    ExpertArena::new(&options(slots, CudaUse::Require { ordinal: 0 })).unwrap()
}

fn stream(arena: &ExpertArena) -> Stream {
    Stream::default_of(arena.device().unwrap())
}

/// Leases expert 1 of the only layer.
fn lease(arena: &ExpertArena) -> ExpertResidency {
    let manifest = manifest();
    let identity = manifest.identity(ExpertKey::new(0, 1)).unwrap();
    let payload = vec![7; identity.payload_bytes as usize];
    let record = sound_record(&identity, &payload);
    let slot = arena.acquire(identity.record_bytes(), Duration::ZERO).unwrap();
    let mut slot = slot.begin(identity).unwrap();
    slot.spare().write_copy_of_slice(&record);
    slot.advance(record.len());
    slot.finish().unwrap().into_residency(&manifest)
}

fn counts(arena: &ExpertArena) -> (usize, usize, usize) {
    let SlotCounts { free, fenced, quarantined, .. } = arena.counts();
    (free, fenced, quarantined)
}

/// Drops the arena and says whether its memory is still there.
fn leaks(arena: ExpertArena, host_address: usize, fake: &Fake) -> bool {
    drop(arena);
    let mapped = is_mapped(host_address as u64);
    assert_eq!(mapped, fake.count("cuMemHostUnregister") == 0, "{:?}", fake.calls());
    mapped
}

#[test]
fn tensors_have_addresses_on_the_device() {
    with_driver("tensors_have_addresses_on_the_device", Driver::Whole, &[], |fake| {
        let arena = arena(1);
        assert!(arena.summary().to_string().ends_with("seen by CUDA device 0 (Fake GPU)"));
        let lease = lease(&arena);
        let view = lease.tensor("w").unwrap();
        assert_eq!(view.device_address, Some(view.host_address as u64 + DEVICE_OFFSET));
        let at = view.host_address;
        drop(arena);
        assert_eq!(fake.count("cuMemHostUnregister"), 0, "the lease keeps the arena");
        drop(lease);
        assert!(!is_mapped(at as u64));
        assert_eq!(fake.count("cuMemHostUnregister"), 1);
    });
}

#[test]
fn a_slot_is_kept_until_the_stream_has_come_past_its_lease() {
    let name = "a_slot_is_kept_until_the_stream_has_come_past_its_lease";
    with_driver(name, Driver::Whole, &[], |fake| {
        let arena = arena(1);
        let lease = lease(&arena);
        let host = lease.tensor("w").unwrap().host_address;
        let clone = lease.clone();
        fake.be_busy();
        lease.release_after(&stream(&arena)).unwrap();
        assert_eq!(counts(&arena), (0, 0, 0), "a clone is left");
        drop(clone);
        assert_eq!(counts(&arena), (0, 1, 0));
        assert!(arena.try_acquire(1).is_none());
        let error = arena.acquire(1, Duration::from_millis(5)).unwrap_err().to_string();
        assert!(error.contains("1 wait for a device"), "{error}");
        fake.be_done();
        assert!(arena.try_acquire(1).is_some());
        assert_eq!(counts(&arena), (1, 0, 0));
        assert_eq!(fake.count("cuEventDestroy"), 1);
        assert!(!leaks(arena, host, fake));
    });
}

#[test]
fn events_that_have_passed_do_not_pile_up_on_a_long_lease() {
    let name = "events_that_have_passed_do_not_pile_up_on_a_long_lease";
    with_driver(name, Driver::Whole, &[], |fake| {
        let arena = arena(1);
        let lease = lease(&arena);
        for _ in 0..10 {
            lease.clone().release_after(&stream(&arena)).unwrap();
        }
        assert_eq!(fake.count("cuEventCreate") - fake.count("cuEventDestroy"), 1);
    });
}

#[test]
fn without_an_event_the_stream_is_waited_for() {
    let name = "without_an_event_the_stream_is_waited_for";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_FAIL", "cuEventCreate=2")], |fake| {
        let arena = arena(1);
        lease(&arena).release_after(&stream(&arena)).unwrap();
        assert_eq!(fake.count("cuStreamQuery"), 1);
        assert_eq!(counts(&arena), (1, 0, 0));
    });
}

#[test]
fn a_slot_whose_stream_can_be_neither_marked_nor_waited_for_is_never_used_again() {
    let name = "a_slot_whose_stream_can_be_neither_marked_nor_waited_for_is_never_used_again";
    let fail = [("FAKE_CUDA_FAIL", "cuEventRecord=2,cuStreamQuery=700")];
    with_driver(name, Driver::Whole, &fail, |fake| {
        let arena = arena(2);
        let lease = lease(&arena);
        let host = lease.tensor("w").unwrap().host_address;
        let error = lease.release_after(&stream(&arena)).unwrap_err().to_string();
        for part in ["layer 0 expert 1", "cuEventRecord", "cuStreamQuery"] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        assert_eq!(counts(&arena), (1, 0, 1));
        assert!(leaks(arena, host, fake));
    });
}

#[test]
fn a_device_that_fails_costs_the_slots_it_may_read() {
    let name = "a_device_that_fails_costs_the_slots_it_may_read";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_FAIL", "cuEventQuery=719")], |fake| {
        let arena = arena(1);
        let lease = lease(&arena);
        let host = lease.tensor("w").unwrap().host_address;
        lease.release_after(&stream(&arena)).unwrap();
        assert!(arena.try_acquire(1).is_none());
        assert_eq!(counts(&arena), (0, 0, 1));
        assert!(leaks(arena, host, fake));
    });
}

#[test]
fn an_arena_that_a_device_still_reads_is_leaked_after_its_wait() {
    let name = "an_arena_that_a_device_still_reads_is_leaked_after_its_wait";
    with_driver(name, Driver::Whole, &[], |fake| {
        let arena = arena(1);
        let lease = lease(&arena);
        let host = lease.tensor("w").unwrap().host_address;
        fake.be_busy();
        lease.release_after(&stream(&arena)).unwrap();
        assert!(leaks(arena, host, fake));
    });
}

#[test]
fn without_a_driver_there_are_host_addresses_and_the_reason() {
    let name = "without_a_driver_there_are_host_addresses_and_the_reason";
    with_driver(name, Driver::Garbage, &[], |_| {
        let arena = ExpertArena::new(&options(1, CudaUse::Auto { ordinal: 0 })).unwrap();
        assert!(arena.device().is_none());
        let text = arena.summary().to_string();
        assert!(text.contains("host addresses only: no CUDA driver"), "{text}");
        assert_eq!(lease(&arena).tensor("w").unwrap().device_address, None);
        let required = ExpertArena::new(&options(1, CudaUse::Require { ordinal: 0 }));
        assert!(matches!(required, Err(ArenaError::Cuda { ordinal: 0, .. })));
    });
}

#[test]
fn a_device_that_refuses_the_memory_is_an_error_where_it_is_required() {
    let name = "a_device_that_refuses_the_memory_is_an_error_where_it_is_required";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_FAIL", "cuMemHostRegister=801")], |_| {
        let arena = ExpertArena::new(&options(1, CudaUse::Auto { ordinal: 0 })).unwrap();
        assert_eq!(lease(&arena).tensor("w").unwrap().device_address, None);
        let text = arena.summary().to_string();
        assert!(text.contains("host addresses only: cuMemHostRegister failed"), "{text}");
        let error = ExpertArena::new(&options(1, CudaUse::Require { ordinal: 0 })).unwrap_err();
        assert!(error.to_string().contains("CUDA device 0 was required"), "{error}");
    });
}
