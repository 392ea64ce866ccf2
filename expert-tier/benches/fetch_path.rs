//! The fetch path without I/O: what is spent per record beside moving its bytes.
//!
//! `post`: a slot is taken, a request made, its completion queued and reaped. `verify`: a record
//! that lies in its slot already is checked, leased and released; the slot that was given back
//! last is taken first, so it still holds the record of the turn before.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use expert_tier::arena::{ArenaOptions, ExpertArena, SlabPlan};
use expert_tier::error::{FetchError, FetchFailure};
use expert_tier::key::ExpertKey;
use expert_tier::testing::TestStore;
use expert_tier::tier::{Completion, CompletionQueue, FetchRequest};

fn arena(slot_bytes: u64) -> ExpertArena {
    let slabs = vec![SlabPlan { slot_bytes, slots: 2 }];
    ExpertArena::new(&ArenaOptions::with_slabs(slabs)).expect("two slots of locked memory")
}

fn post(criterion: &mut Criterion) {
    let arena = arena(4096);
    let queue = CompletionQueue::new();
    criterion.bench_function("post", |bench| {
        bench.iter(|| {
            let slot = arena.try_acquire(1).expect("a free slot");
            let request = FetchRequest::new(ExpertKey::new(0, 0), slot);
            let (ticket, key, slot) = request.into_parts();
            let outcome = Err(FetchFailure::new(FetchError::Cancelled { key }, slot));
            queue.push(Completion { ticket, key, outcome });
            black_box(queue.pop(Duration::ZERO))
        });
    });
}

fn verify(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("verify");
    for payload_bytes in [64 << 10, 1 << 20, 8 << 20] {
        let store = TestStore::new(1, 1, &[payload_bytes], 1);
        let manifest = Arc::clone(store.open().manifest());
        let key = ExpertKey::new(0, 0);
        let identity = manifest.identity(key).expect("a record of the store");
        let mut record = vec![0; identity.record_bytes() as usize];
        store.open().read_at(key, 0, &mut record).expect("a record of the store");
        let arena = arena(identity.record_bytes());
        let fill = |bytes: &[u8]| {
            let slot = arena.try_acquire(identity.record_bytes()).expect("a free slot");
            let mut slot = slot.begin(identity).expect("a slot that is large enough");
            slot.spare()[..bytes.len()].write_copy_of_slice(bytes);
            slot.advance(record.len());
            slot.finish().expect("a sound record").into_residency(&manifest)
        };
        drop(fill(&record));
        group.throughput(Throughput::Bytes(payload_bytes));
        group.bench_function(BenchmarkId::from_parameter(payload_bytes), |bench| {
            bench.iter(|| black_box(fill(&[])));
        });
    }
    group.finish();
}

criterion_group!(benches, post, verify);
criterion_main!(benches);
