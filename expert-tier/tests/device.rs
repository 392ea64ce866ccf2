//! The arena on a real device; scripts/device-check runs these.

use std::sync::Arc;
use std::time::Duration;

use expert_tier::arena::{ArenaOptions, CudaUse, ExpertArena, SlabPlan};
use expert_tier::dtype::Dtype;
use expert_tier::key::ExpertKey;
use expert_tier::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};
use expert_tier::residency::ExpertResidency;
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::sound_record;
use gpu_sys::cuda::Stream;

fn manifest() -> Arc<Manifest> {
    let tensor =
        TensorSpec { name: "w".into(), dtype: Dtype::U8, shape: vec![5000], offset: 0, bytes: 0 };
    let spec = ExpertRecordSpec::lay_out(vec![tensor]).unwrap();
    let layer = LayerLayout::new(0, 4, "layers.0.".into(), spec, 4096).unwrap();
    let layout = ExpertLayout::new(vec![layer]).unwrap();
    Arc::new(Manifest::new("test".into(), layout, vec![[0; 32]]))
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

#[test]
#[ignore = "needs a CUDA device"]
fn a_lease_on_a_device_comes_back_after_its_stream() {
    let slabs = vec![SlabPlan { slot_bytes: 8192, slots: 1 }];
    let cuda = CudaUse::Require { ordinal: 0 };
    let arena =
        ExpertArena::new(&ArenaOptions { cuda, ..ArenaOptions::with_slabs(slabs) }).unwrap();
    println!("{}", arena.summary());
    let stream = Stream::default_of(arena.device().unwrap());
    for _ in 0..1000 {
        let lease = lease(&arena);
        assert!(lease.tensor("w").unwrap().device_address.is_some());
        lease.release_after(&stream).unwrap();
        // The only slot: the next lease needs this one to have come back.
        drop(arena.acquire(1, Duration::from_secs(10)).unwrap());
    }
    assert_eq!(arena.counts().quarantined, 0);
}
