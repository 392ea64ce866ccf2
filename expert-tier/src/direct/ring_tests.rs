//! The ring over real files.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Page-aligned memory of a test, and what has been reported of it.
struct Pages {
    memory: Vec<Page>,
    bytes: usize,
    arrived: Arc<AtomicUsize>,
}

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Pages {
    fn new(bytes: usize) -> Self {
        let memory = vec![Page([0xaa; 4096]); bytes.div_ceil(4096)];
        Self { memory, bytes, arrived: Arc::default() }
    }

    fn bytes(&self) -> Vec<u8> {
        self.memory.iter().flat_map(|page| page.0).take(self.bytes).collect()
    }
}

// SAFETY: a `Vec`'s buffer stays where it is when the `Vec` moves, and only `bytes` reads it,
// which the tests call on targets that the ring has given back.
unsafe impl Target for Pages {
    fn memory(&self) -> (NonNull<u8>, usize) {
        (NonNull::from(&self.memory[0]).cast(), self.bytes)
    }

    fn arrived(&mut self, bytes: usize) {
        self.arrived.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn file(bytes: usize) -> (tempfile::TempDir, File, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
    let path = dir.path().join("file");
    File::create(&path).unwrap().write_all(&content).unwrap();
    (dir, File::open(path).unwrap(), content)
}

fn ring(files: &[File], depth: u32) -> Ring<Pages> {
    Ring::new(files, RingOptions { depth, piece_bytes: 4096 }).expect("io_uring")
}

/// Turns until `count` jobs have ended; bounded by the number of turns.
fn finish(ring: &Ring<Pages>, count: usize) -> Vec<Finished<Pages>> {
    let mut finished = Vec::new();
    for _ in 0..10_000 {
        ring.turn(Duration::from_millis(100), &mut finished).expect("a turn");
        if finished.len() >= count {
            return finished;
        }
    }
    panic!("{} of {count} jobs ended", finished.len());
}

#[test]
fn extents_arrive_whole_and_are_reported_in_order() {
    let (_dir, file, content) = file(100_000);
    let ring = ring(&[file], 4);
    let extents = [(0, 100_000), (4096, 4096), (50_000, 10_001), (99_999, 1)];
    let jobs =
        extents.map(|(offset, bytes)| (Extent { file: 0, offset, bytes }, Pages::new(bytes)));
    ring.submit(jobs);
    let mut wanted: Vec<_> =
        extents.iter().map(|&(at, len)| content[at as usize..][..len].to_vec()).collect();
    for done in finish(&ring, 4) {
        done.outcome.unwrap();
        assert_eq!(done.target.arrived.load(Ordering::Relaxed), done.target.bytes);
        let at = wanted.iter().position(|bytes| *bytes == done.target.bytes()).expect("an extent");
        wanted.remove(at);
    }
    assert_eq!(ring.jobs(), 0);
}

#[test]
fn a_file_that_ends_early_is_an_error_and_never_a_full_read() {
    let (_dir, file, _) = file(10_000);
    let ring = ring(&[file], 4);
    ring.submit([(Extent { file: 0, offset: 0, bytes: 12_288 }, Pages::new(12_288))]);
    let done = finish(&ring, 1).remove(0);
    assert_eq!(done.outcome.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(done.target.arrived.load(Ordering::Relaxed) <= 10_000);
}

#[test]
fn an_extent_larger_than_its_target_is_refused() {
    let (_dir, file, _) = file(10_000);
    let ring = ring(&[file], 4);
    ring.submit([(Extent { file: 0, offset: 0, bytes: 8193 }, Pages::new(8192))]);
    let done = finish(&ring, 1).remove(0);
    assert_eq!(done.outcome.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert!(done.target.bytes().iter().all(|&byte| byte == 0xaa), "nothing was written");
}

#[test]
fn a_cancelled_job_ends_once_and_others_do_not() {
    let (_dir, file, _) = file(1 << 20);
    let ring = ring(&[file], 2);
    let extent = Extent { file: 0, offset: 0, bytes: 1 << 20 };
    let (kept, given_up) = (Pages::new(1 << 20), Pages::new(1 << 20));
    let marked = Arc::clone(&given_up.arrived);
    ring.submit([(extent, kept), (extent, given_up)]);
    ring.cancel(|pages| Arc::ptr_eq(&pages.arrived, &marked));
    ring.cancel(|pages| Arc::ptr_eq(&pages.arrived, &marked));
    for done in finish(&ring, 2) {
        let cancelled = Arc::ptr_eq(&done.target.arrived, &marked);
        assert_eq!(done.outcome.is_err(), cancelled);
    }
    assert_eq!(ring.jobs(), 0);
}

#[test]
fn a_ring_dropped_with_reads_in_flight_waits_for_them() {
    let (_dir, file, _) = file(1 << 20);
    let ring = ring(&[file], 64);
    let target = Pages::new(1 << 20);
    ring.submit([(Extent { file: 0, offset: 0, bytes: 1 << 20 }, target)]);
    drop(ring);
}
