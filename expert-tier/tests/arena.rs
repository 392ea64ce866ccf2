//! The arena against the machine: its limits, forks, and what does not compile.

#[path = "../../gpu-sys/tests/support/mod.rs"]
mod support;

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use expert_tier::arena::{ArenaError, ArenaOptions, CudaUse, ExpertArena, SlabPlan};
use expert_tier::dtype::Dtype;
use expert_tier::key::ExpertKey;
use expert_tier::layout::{ExpertLayout, ExpertRecordSpec, LayerLayout, TensorSpec};
use expert_tier::store::manifest::Manifest;
use expert_tier::testing::{TestStore, sound_record};
use expert_tier::tier::ExpertTier;
use expert_tier::uma::{UmaOptions, UmaPath, UmaTier};
use gpu_sys::pinned::PinError;
use support::with_lock_limit;

fn options(slot_bytes: u64, slots: u32) -> ArenaOptions {
    let slabs = vec![SlabPlan { slot_bytes, slots }];
    ArenaOptions { cuda: CudaUse::Off, ..ArenaOptions::with_slabs(slabs) }
}

#[test]
fn an_arena_beyond_the_lock_limit_names_the_knobs() {
    with_lock_limit("an_arena_beyond_the_lock_limit_names_the_knobs", 1 << 20, || {
        let error = ExpertArena::new(&options(1 << 20, 4)).unwrap_err();
        assert!(matches!(error, ArenaError::Pin(PinError::LockLimit { .. })), "{error}");
        let text = error.to_string();
        for knob in ["ulimit -l", "CAP_IPC_LOCK", "--expert-arena-bytes", "4 MiB", "1 MiB"] {
            assert!(text.contains(knob), "{knob:?} is not in {text}");
        }
    });
}

#[test]
fn an_arena_larger_than_memory_is_an_error_with_numbers() {
    let error = ExpertArena::new(&options(1 << 40, 16)).unwrap_err();
    assert!(matches!(error, ArenaError::Pin(PinError::NotEnoughMemory { .. })), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("needs 16 TiB of memory") && text.contains("--expert-arena-bytes"),
        "{text}"
    );
}

#[test]
fn records_stay_whole_while_the_process_forks() {
    const FORKS: usize = 20;
    let manifest = manifest();
    let identity = manifest.identity(ExpertKey::new(0, 2)).unwrap();
    let payload: Vec<u8> = (0..identity.payload_bytes).map(|i| (i % 253) as u8).collect();
    let record = sound_record(&identity, &payload);

    let arena = ExpertArena::new(&options(identity.record_bytes(), 2)).unwrap();
    let (done, fetched) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let slot = arena.acquire(identity.record_bytes(), Duration::from_secs(10)).unwrap();
                let mut slot = slot.begin(identity).unwrap();
                for piece in record.chunks(1000) {
                    slot.spare()[..piece.len()].write_copy_of_slice(piece);
                    slot.advance(piece.len());
                }
                let lease = slot.finish().expect("whole").into_residency(&manifest);
                assert_eq!(lease.payload(), payload);
                fetched.fetch_add(1, Ordering::AcqRel);
            }
        });
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut forks = 0;
        // Until both have happened, in turns: forks, and fetches that span them.
        while (forks < FORKS || fetched.load(Ordering::Acquire) < 2) && Instant::now() < deadline {
            assert!(fork_and_exec("true"), "the child could not be run");
            forks += 1;
        }
        done.store(true, Ordering::Release);
        assert!(forks >= FORKS);
    });
    assert!(fetched.into_inner() >= 2, "no fetch finished in 30 s");
    assert_eq!(arena.free_slots(), 2);
}

/// What keeps this right is twofold. The arena is not in the child at all, which is looked at in
/// each child between fork and exec: without `MADV_DONTFORK` no child would start. And should it be
/// there, kernels since 5.9 copy pages that are pinned for I/O instead of sharing them, so on those
/// the records alone would not tell.
#[test]
fn direct_reads_into_a_registered_arena_stay_right_while_the_process_forks() {
    const FORKS: usize = 40;
    let store = TestStore::new(1, 8, &[700_001], 3);
    let tier = UmaTier::open(&store.path(), &UmaOptions::default()).unwrap();
    let record_bytes = tier.manifest().layout().layers()[0].record_bytes();
    let arena = ExpertArena::new(&options(record_bytes, 4)).unwrap();
    tier.use_arena(&arena).expect("it takes the arena");
    assert_eq!(tier.path(), UmaPath::Registered, "this test wants io_uring and O_DIRECT");
    let fetch = |expert| {
        let slot = arena.acquire(record_bytes, Duration::from_secs(10)).unwrap();
        let key = ExpertKey::new(0, expert % 8);
        let fetched = tier.fetch(key, slot).expect("a sound store");
        assert!(fetched.residency.payload() == store.payload(key), "{key} is wrong");
        fetched.residency.payload().as_ptr().addr()
    };
    let slot_address = fetch(0);
    let (done, fetched) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                fetch(fetched.fetch_add(1, Ordering::AcqRel) as u32);
            }
        });
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut forks = 0;
        let enough = |forks| forks >= FORKS && fetched.load(Ordering::Acquire) >= FORKS;
        let outcome = loop {
            let forked = fork_without(slot_address);
            forks += 1;
            if forked.is_err() || enough(forks) || reader.is_finished() {
                break forked;
            }
            if Instant::now() > deadline {
                break Err(std::io::ErrorKind::TimedOut.into());
            }
        };
        done.store(true, Ordering::Release);
        outcome.expect("every child starts, and has no arena");
    });
    assert_eq!(tier.reads().plain, 0);
}

/// Forks a child that becomes `true` if no memory of its is at `address`.
fn fork_without(address: usize) -> std::io::Result<()> {
    let page = address - address % rustix::param::page_size();
    let absent = move || {
        // SAFETY: msync of a page looks at the mapping and starts no more than its write-back; an
        // address without one is an answer (ENOMEM) and not a fault.
        let there = unsafe { libc::msync(page as *mut libc::c_void, 1, libc::MS_ASYNC) } == 0;
        if there { Err(std::io::Error::from_raw_os_error(libc::EEXIST)) } else { Ok(()) }
    };
    let mut command = Command::new("true");
    // SAFETY: between fork and exec it makes one system call and neither locks nor allocates.
    unsafe { command.pre_exec(absent) };
    let status = command.stdin(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(std::io::Error::other(status.to_string())) }
}

/// Runs `program` by fork and exec; naming the user keeps the standard library from taking the
/// short cut of `posix_spawn`, whose child shares the parent's memory instead of copying it.
fn fork_and_exec(program: &str) -> bool {
    let uid = rustix::process::getuid().as_raw();
    let status = Command::new(program).uid(uid).stdin(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn manifest() -> Arc<Manifest> {
    let tensor = TensorSpec {
        name: "w".into(),
        dtype: Dtype::U8,
        shape: vec![200_000],
        offset: 0,
        bytes: 0,
    };
    let spec = ExpertRecordSpec::lay_out(vec![tensor]).unwrap();
    let layer = LayerLayout::new(0, 4, "layers.0.".into(), spec, 4096).unwrap();
    let layout = ExpertLayout::new(vec![layer]).unwrap();
    Arc::new(Manifest::new("test".into(), layout, vec![[0; 32]]))
}

#[test]
fn misuse_of_a_slot_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/slot_states/*.rs");
}
