use super::*;
use crate::dtype::Dtype;
use crate::key::ExpertKey;
use crate::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};
use crate::record::{Mismatch, RecordIdentity};
use crate::store::manifest::Manifest;
use crate::testing::sound_record;

const CHUNK: u32 = 4096;

fn manifest() -> Arc<Manifest> {
    let tensor = |name: &str, dtype, shape: &[u64]| TensorSpec {
        name: name.into(),
        dtype,
        shape: shape.into(),
        offset: 0,
        bytes: 0,
    };
    let spec = ExpertRecordSpec::lay_out(vec![
        tensor("mlp.experts.*.up_proj.weight", Dtype::Bf16, &[50, 70]),
        tensor("mlp.experts.*.down_proj.scale", Dtype::F32, &[]),
    ])
    .unwrap();
    let layer = LayerLayout::new(3, 8, "model.layers.3.".into(), spec, CHUNK).unwrap();
    let layout = ExpertLayout::new(vec![layer]).unwrap();
    Arc::new(Manifest::new("test".into(), layout, vec![[1; 32]]))
}

/// A whole record of `identity`, its payload a function of the expert.
fn record(identity: &RecordIdentity) -> Vec<u8> {
    let seed = u64::from(identity.key.expert);
    let payload: Vec<u8> =
        (0..identity.payload_bytes).map(|i| ((i + seed) * 7 % 251) as u8).collect();
    sound_record(identity, &payload)
}

fn arena(slabs: &[(u64, u32)]) -> ExpertArena {
    let plan = |&(slot_bytes, slots)| SlabPlan { slot_bytes, slots };
    let mut options = ArenaOptions::with_slabs(slabs.iter().map(plan).collect());
    options.cuda = CudaUse::Off;
    ExpertArena::new(&options).unwrap()
}

fn fill(mut slot: Slot<Filling>, record: &[u8], step: usize) -> Slot<Filling> {
    for piece in record.chunks(step) {
        slot.spare()[..piece.len()].write_copy_of_slice(piece);
        slot.advance(piece.len());
    }
    slot
}

fn begin(arena: &ExpertArena, identity: RecordIdentity) -> Slot<Filling> {
    arena.try_acquire(identity.record_bytes()).unwrap().begin(identity).unwrap()
}

#[test]
fn a_record_that_arrives_whole_is_leased_with_its_tensors() {
    let (arena, manifest) = (arena(&[(16_384, 2)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 5)).unwrap();
    let record = record(&identity);
    for step in [1000, 4096, record.len()] {
        let slot = fill(begin(&arena, identity), &record, step);
        assert_eq!(slot.remaining(), 0);
        let residency = slot.finish().unwrap().into_residency(&manifest);
        assert_eq!(residency.key(), identity.key);
        assert_eq!(residency.payload(), &record[identity.header_bytes() as usize..]);
        assert_eq!(residency.tensors().len(), 2);
        let up = residency.tensor("mlp.experts.*.up_proj.weight").unwrap();
        assert_eq!(up.bytes, &residency.payload()[256..]);
        assert_eq!(up.host_address, up.bytes.as_ptr() as usize);
        assert_eq!(up.host_address % 256, 0);
        assert_eq!(up.device_address, None);
        assert!(residency.tensor("mlp.experts.*.gate_proj.weight").is_none());
    }
    assert_eq!(arena.free_slots(), 2);
}

#[test]
fn a_flipped_bit_gives_the_slot_back_and_no_residency() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    let good = record(&identity);
    for at in (0..good.len()).step_by(97) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        let rejected = fill(begin(&arena, identity), &bad, 777).finish().unwrap_err();
        assert!(rejected.to_string().starts_with("layer 3 expert 0: "), "{rejected}");
        // The same slot takes the good record afterwards.
        let slot = fill(rejected.slot.begin(identity).unwrap(), &good, 777);
        assert!(slot.finish().is_ok(), "byte {at}");
    }
}

#[test]
fn the_right_bytes_of_another_record_are_refused() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let asked = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    let other = record(&manifest.identity(ExpertKey::new(3, 1)).unwrap());
    let rejected = fill(begin(&arena, asked), &other, 4096).finish().unwrap_err();
    assert!(matches!(rejected.mismatch, Mismatch::Identity { field: "expert", .. }));
}

#[test]
fn bytes_that_a_slot_still_holds_do_not_count_as_arrived() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let first = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    drop(fill(begin(&arena, first), &record(&first), 4096).finish().unwrap());
    // The slot holds a sound record of `first`; nothing of it may be taken for `second`.
    let second = manifest.identity(ExpertKey::new(3, 1)).unwrap();
    let mut slot = begin(&arena, second);
    slot.advance(usize::MAX);
    assert!(slot.finish().is_err());
    let slot = begin(&arena, first);
    assert!(matches!(slot.finish().unwrap_err().mismatch, Mismatch::Short { .. }));
}

#[test]
fn bytes_declared_uninitialised_are_refused_like_any_wrong_ones() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    let mut slot = begin(&arena, identity);
    slot.spare().fill(std::mem::MaybeUninit::uninit());
    slot.advance(slot.remaining());
    assert!(slot.finish().is_err());
}

#[test]
fn advance_never_passes_the_end_of_the_record() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    let mut slot = fill(begin(&arena, identity), &record(&identity), 4096);
    assert!(slot.spare().is_empty());
    slot.advance(1);
    assert_eq!(slot.remaining(), 0);
    assert!(slot.finish().is_ok());
}

#[test]
fn a_record_larger_than_the_slot_comes_back_as_too_small() {
    let (arena, manifest) = (arena(&[(4096, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    let slot = arena.try_acquire(1).unwrap();
    let TooSmall { slot, needed_bytes } = slot.begin(identity).unwrap_err();
    assert_eq!((slot.capacity(), needed_bytes), (4096, identity.record_bytes()));
    drop(slot);
    assert_eq!(arena.free_slots(), 1);
    let error = arena.acquire(needed_bytes, Duration::ZERO).unwrap_err();
    assert!(matches!(error, ArenaError::RecordTooLarge { largest_bytes: 4096, .. }), "{error}");
}

#[test]
fn small_records_overflow_into_larger_slots_and_never_the_other_way() {
    let arena = arena(&[(4096, 1), (8192, 1)]);
    let small = arena.try_acquire(4096).unwrap();
    let overflow = arena.try_acquire(4096).unwrap();
    assert_eq!((small.capacity(), overflow.capacity()), (4096, 8192));
    assert!(arena.try_acquire(1).is_none());
    drop(small);
    assert!(arena.try_acquire(4097).is_none());
    drop(overflow);
    assert_eq!(arena.try_acquire(4097).unwrap().capacity(), 8192);
}

#[test]
fn slots_do_not_overlap() {
    let arena = arena(&[(4096, 3), (8192, 2)]);
    let slots: Vec<_> = (0..5).map(|_| arena.try_acquire(1).unwrap()).collect();
    let mut ranges: Vec<_> =
        (0..5).map(|slot| (arena.0.offset_of(slot), arena.0.slab_of(slot).slot_bytes)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0), "{ranges:?}");
    drop(slots);
    assert_eq!(arena.counts(), SlotCounts { total: 5, free: 5, fenced: 0, quarantined: 0 });
}

#[test]
fn a_full_arena_says_how_full_it_is_and_what_to_change() {
    let arena = arena(&[(4096, 2)]);
    let _held = (arena.try_acquire(1).unwrap(), arena.try_acquire(1).unwrap());
    let text = arena.acquire(1, Duration::from_millis(5)).unwrap_err().to_string();
    for part in ["in 5 ms", "of 2 slots 2 are in use", "--expert-arena-bytes"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn a_waiter_gets_the_slot_that_is_given_back() {
    let arena = arena(&[(4096, 1)]);
    let held = arena.try_acquire(1).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| arena.acquire(1, Duration::from_secs(30)).is_ok());
        drop(held);
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn the_slot_is_free_after_the_last_clone_of_its_lease() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 2)).unwrap();
    let slot = fill(begin(&arena, identity), &record(&identity), 4096);
    let lease = slot.finish().unwrap().into_residency(&manifest);
    let clone = lease.clone();
    drop(lease);
    assert_eq!(arena.free_slots(), 0);
    assert_eq!(clone.payload(), &record(&identity)[identity.header_bytes() as usize..]);
    drop(clone);
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn a_lease_outlives_its_arena_handle() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 2)).unwrap();
    let slot = fill(begin(&arena, identity), &record(&identity), 4096);
    let lease = slot.finish().unwrap().into_residency(&manifest);
    drop(arena);
    assert_eq!(lease.payload(), &record(&identity)[identity.header_bytes() as usize..]);
}

#[test]
fn the_summary_says_what_was_got() {
    let text = arena(&[(8192, 2), (4096, 3)]).summary().to_string();
    for part in ["locked in", "3 x 4 KiB + 2 x 8 KiB", "host addresses only: not wanted"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

/// Writes `record` to a part, all of it.
fn land(mut part: Part, record: &[u8]) -> LandedPart {
    let range = part.range();
    part.spare(0).write_copy_of_slice(&record[range]);
    part.landed()
}

fn begin_parted(arena: &ExpertArena, identity: RecordIdentity) -> Slot<Parted> {
    arena.try_acquire(identity.record_bytes()).unwrap().begin_parted(identity).unwrap()
}

fn parts(slot: &mut Slot<Parted>, most: usize) -> Vec<Part> {
    std::iter::from_fn(|| slot.part(most)).collect()
}

#[test]
fn parts_make_a_record_in_any_order_and_on_any_thread() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 5)).unwrap();
    let record = record(&identity);
    for most in [1, 4096, 9000, usize::MAX] {
        let mut slot = begin_parted(&arena, identity);
        let parts = parts(&mut slot, most);
        let gathered = std::thread::scope(|scope| {
            for part in parts.into_iter().rev() {
                let record = &record;
                scope.spawn(move || land(part, record).check());
            }
            slot.wait_gathered(|| false)
        });
        let Judged::Record(residency) = gathered.judge(&manifest) else { panic!("in {most}s") };
        assert_eq!(residency.payload(), &record[identity.header_bytes() as usize..]);
    }
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn a_record_with_a_part_that_never_landed_is_short() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 5)).unwrap();
    let record = record(&identity);
    // So that the right bytes are there from before.
    let mut slot = begin_parted(&arena, identity);
    parts(&mut slot, 4096).into_iter().for_each(|part| land(part, &record).check());
    drop(slot);
    for missing in 0..2 {
        let mut slot = begin_parted(&arena, identity);
        for (index, part) in parts(&mut slot, 4096).into_iter().enumerate() {
            let landed = (index != missing).then(|| land(part, &record));
            landed.into_iter().for_each(LandedPart::check);
        }
        let judged = slot.gather().expect("every part is gone").judge(&manifest);
        let Judged::Rejected(rejected) = judged else { panic!("part {missing}") };
        assert!(matches!(rejected.mismatch, Mismatch::Short { .. }), "{}", rejected.mismatch);
    }
    assert_eq!(arena.free_slots(), 1);
}

#[test]
fn a_flipped_bit_in_a_part_is_no_residency() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 0)).unwrap();
    let good = record(&identity);
    for at in (0..good.len()).step_by(97) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        let mut slot = begin_parted(&arena, identity);
        parts(&mut slot, 4096).into_iter().for_each(|part| land(part, &bad).check());
        let judged = slot.gather().unwrap().judge(&manifest);
        assert!(matches!(judged, Judged::Rejected(_)), "byte {at}");
        drop(judged);
        assert_eq!(arena.free_slots(), 1);
    }
}

#[test]
fn a_slot_with_a_part_out_is_neither_judged_nor_given_out() {
    let (arena, manifest) = (arena(&[(16_384, 1)]), manifest());
    let identity = manifest.identity(ExpertKey::new(3, 5)).unwrap();
    let mut slot = begin_parted(&arena, identity);
    let mut parts = parts(&mut slot, 4096);
    let last = parts.pop().unwrap();
    drop(parts);
    let slot = slot.gather().unwrap_err();
    drop(slot);
    assert_eq!(arena.free_slots(), 0, "somebody may still write to it");
    drop(last);
    assert_eq!(arena.free_slots(), 1);
    assert!(arena.try_acquire(1).is_some());
}
