//! The ring over real files, and over pipes, whose reads end when the test says so.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use rustix::fs::{Mode, OFlags};

use super::*;

/// Page-aligned memory of a test.
struct Pages {
    memory: Vec<Page>,
    bytes: usize,
    seen: Seen,
}

/// What a test sees of memory that a ring has.
#[derive(Clone, Default)]
struct Seen {
    arrived: Arc<AtomicUsize>,
    dropped: Arc<AtomicBool>,
    panics: Arc<AtomicBool>,
}

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Pages {
    fn new(bytes: usize) -> Self {
        let memory = vec![Page([0xaa; 4096]); bytes.div_ceil(4096)];
        Self { memory, bytes, seen: Seen::default() }
    }

    fn bytes(&self) -> Vec<u8> {
        self.memory.iter().flat_map(|page| page.0).take(self.bytes).collect()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.seen.dropped.store(true, Ordering::Release);
    }
}

// SAFETY: a `Vec`'s buffer stays where it is when the `Vec` moves, and only `bytes` reads it,
// which the tests call on targets that the ring has given back.
unsafe impl Target for Pages {
    fn memory(&self) -> (NonNull<u8>, usize) {
        (NonNull::from(&self.memory[0]).cast(), self.bytes)
    }

    fn arrived(&mut self, bytes: usize) {
        self.seen.arrived.fetch_add(bytes, Ordering::Relaxed);
        assert!(!self.seen.panics.load(Ordering::Acquire), "asked to panic");
    }
}

type TestRing = Ring<Pages, u32>;
type TestDriver = Driver<Pages, u32>;

fn file(bytes: usize) -> (tempfile::TempDir, File, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
    let path = dir.path().join("file");
    File::create(&path).unwrap().write_all(&content).unwrap();
    (dir, File::open(path).unwrap(), content)
}

/// A pipe: reads of it end when something is written to the second file.
fn pipe() -> (File, File) {
    let (reads, writes) = io::pipe().unwrap();
    (OwnedFd::from(reads).into(), OwnedFd::from(writes).into())
}

fn ring(files: &[File], depth: u32) -> (TestRing, TestDriver) {
    let drop_wait = Duration::from_millis(50);
    let options = RingOptions { depth, piece_bytes: 4096, usual_bytes: 4096, drop_wait };
    Ring::open(files, options).expect("io_uring")
}

fn whole(bytes: usize) -> Extent {
    Extent { file: 0, offset: 0, bytes }
}

/// Turns until `count` jobs have ended; bounded by the number of turns.
fn finish(driver: &mut TestDriver, count: usize) -> Vec<Finished<Pages, u32>> {
    let mut finished = Vec::new();
    for _ in 0..10_000 {
        driver.turn(Duration::from_millis(100), &mut finished).expect("a turn");
        if finished.len() >= count {
            return finished;
        }
    }
    panic!("{} of {count} jobs ended", finished.len());
}

/// Turns until `so` holds, and says what ended meanwhile.
fn turn_until(driver: &mut TestDriver, so: impl Fn() -> bool) -> Vec<Finished<Pages, u32>> {
    let mut finished = Vec::new();
    for _ in 0..1000 {
        driver.turn(Duration::from_millis(10), &mut finished).expect("a turn");
        if so() {
            return finished;
        }
    }
    panic!("it did not come to be within 1000 turns");
}

#[test]
fn extents_arrive_whole_whatever_their_size_and_place() {
    let (_dir, file, content) = file(100_000);
    let (ring, mut driver) = ring(&[file], 4);
    let extents = [(0, 100_000), (4096, 4096), (50_000, 10_001), (99_999, 1)];
    let job = |(tag, &(offset, bytes)): (usize, &(u64, usize))| {
        (Extent { file: 0, offset, bytes }, Pages::new(bytes), tag as u32)
    };
    ring.submit(extents.iter().enumerate().map(job));
    for done in finish(&mut driver, 4) {
        done.outcome.unwrap();
        let (offset, bytes) = extents[done.tag as usize];
        assert_eq!(done.memory.seen.arrived.load(Ordering::Relaxed), bytes);
        assert!(done.memory.bytes() == content[offset as usize..][..bytes], "{offset} {bytes}");
    }
    assert_eq!(ring.jobs(), 0);
}

#[test]
fn more_jobs_than_the_depth_all_end_and_use_the_same_entries_again() {
    let (_dir, file, content) = file(1 << 20);
    let (ring, mut driver) = ring(&[file], 2);
    for round in 0..3 {
        ring.submit((0..100).map(|tag| {
            let offset = u64::from(tag) * 8192 + 4096 * round;
            (Extent { file: 0, offset, bytes: 8192 }, Pages::new(8192), tag)
        }));
        let mut tags: Vec<_> = finish(&mut driver, 100)
            .into_iter()
            .map(|done| {
                done.outcome.unwrap();
                let at = done.tag as usize * 8192 + 4096 * round as usize;
                assert!(done.memory.bytes() == content[at..at + 8192]);
                done.tag
            })
            .collect();
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..100));
    }
}

#[test]
fn jobs_of_many_threads_each_end_once() {
    const THREADS: u32 = 8;
    const EACH: u32 = 50;
    let (_dir, file, content) = file(1 << 20);
    let (ring, mut driver) = ring(&[file], 8);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let ring = ring.clone();
            scope.spawn(move || {
                for n in 0..EACH {
                    let tag = thread * EACH + n;
                    let extent = Extent { file: 0, offset: u64::from(tag) * 2048, bytes: 10_000 };
                    ring.submit([(extent, Pages::new(10_000), tag)]);
                }
            });
        }
        let mut tags: Vec<_> = finish(&mut driver, (THREADS * EACH) as usize)
            .into_iter()
            .map(|done| {
                done.outcome.unwrap();
                assert!(done.memory.bytes() == content[done.tag as usize * 2048..][..10_000]);
                done.tag
            })
            .collect();
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..THREADS * EACH));
    });
}

#[test]
fn a_file_that_ends_early_is_an_error_and_never_a_full_read() {
    let (_dir, file, _) = file(10_000);
    let (ring, mut driver) = ring(&[file], 4);
    ring.submit([(whole(12_288), Pages::new(12_288), 0)]);
    let done = finish(&mut driver, 1).remove(0);
    assert_eq!(done.outcome.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(done.memory.seen.arrived.load(Ordering::Relaxed) <= 10_000);
}

/// On a disk, a read may fail for what it was made one request with.
#[test]
fn a_read_that_fails_is_tried_once_more_and_no_oftener() {
    let (dir, _file, _) = file(8192);
    let unreadable = File::options().write(true).open(dir.path().join("file")).unwrap();
    let (ring, mut driver) = ring(&[unreadable], 4);
    ring.submit([(whole(8192), Pages::new(8192), 1)]);
    let done = finish(&mut driver, 1).remove(0);
    assert_eq!(done.outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
    assert_eq!(ring.reads(), ReadCounts { fixed: 0, plain: 4 }, "two pieces, twice each");
    assert_eq!((ring.jobs(), ring.in_flight()), (0, 0));
}

#[test]
fn a_piece_that_failed_once_goes_on_where_it_was_and_fails_with_the_next_failure() {
    let ended = |results: &[i32], cancelled: bool| {
        let mut table = Table::new(1);
        table.add(whole(4096), Pages::new(4096), 1_u32, 4096);
        let (index, piece) = table.next_piece().unwrap();
        if cancelled {
            table.cancel(|_| true);
        }
        let job = table.at(index).unwrap();
        results
            .iter()
            .map(|result| {
                job.outstanding += 1;
                job.completed(piece, *result)
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(ended(&[-5, 1024, 3072], false), [Then::Again, Then::Rest, Then::Over]);
    assert_eq!(ended(&[1024, -5, 3072], false), [Then::Rest, Then::Again, Then::Over]);
    assert_eq!(ended(&[-5, -libc::EINTR, -61], false), [Then::Again, Then::Rest, Then::Over]);
    // Nothing more is read for whom nobody waits.
    assert_eq!(ended(&[-5], true), [Then::Over]);
}

#[test]
fn an_extent_larger_than_its_target_is_refused() {
    let (_dir, file, _) = file(10_000);
    let (ring, mut driver) = ring(&[file], 4);
    ring.submit([(whole(8193), Pages::new(8192), 0)]);
    let done = finish(&mut driver, 1).remove(0);
    assert_eq!(done.outcome.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert!(done.memory.bytes().iter().all(|&byte| byte == 0xaa), "nothing was written");
}

#[test]
fn a_cancelled_job_ends_once_and_others_do_not() {
    let (_dir, file, _) = file(1 << 20);
    let (ring, mut driver) = ring(&[file], 2);
    ring.submit([0, 1].map(|tag| (whole(1 << 20), Pages::new(1 << 20), tag)));
    ring.cancel(|&tag| tag == 1);
    ring.cancel(|&tag| tag == 1);
    for done in finish(&mut driver, 2) {
        assert_eq!(done.outcome.is_err(), done.tag == 1);
    }
    assert_eq!(ring.jobs(), 0);
}

#[test]
fn a_job_that_has_ended_is_the_rings_until_it_is_handed_out() {
    let (_dir, file, _) = file(4096);
    let (ring, mut driver) = ring(&[file], 2);
    ring.submit([(whole(4096), Pages::new(4096), 7)]);
    ring.cancel(|_| true);
    assert_eq!(ring.jobs(), 1, "whoever waits for the last job must see it");
    assert_eq!(finish(&mut driver, 1)[0].tag, 7);
    assert_eq!(ring.jobs(), 0);
}

#[test]
fn memory_stays_with_the_ring_until_its_read_has_ended_whatever_was_cancelled() {
    let (reads, mut writes) = pipe();
    let (ring, mut driver) = ring(&[reads], 2);
    let memory = Pages::new(4096);
    let seen = memory.seen.clone();
    ring.submit([(whole(4096), memory, 0)]);
    assert!(turn_until(&mut driver, || ring.in_flight() == 1).is_empty());
    ring.cancel(|_| true);
    let mut finished = Vec::new();
    driver.turn(Duration::from_millis(20), &mut finished).unwrap();
    driver.turn(Duration::from_millis(20), &mut finished).unwrap();
    assert!(finished.is_empty() && !seen.dropped.load(Ordering::Acquire));
    assert_eq!(ring.jobs(), 1);

    writes.write_all(&[7; 4096]).unwrap();
    let done = finish(&mut driver, 1).remove(0);
    assert_eq!(done.outcome.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
}

#[test]
fn an_overdue_job_is_seen_by_its_tag_alone_and_ends_when_its_read_does() {
    let (reads, mut writes) = pipe();
    let (ring, mut driver) = ring(&[reads], 2);
    ring.submit([(whole(4096), Pages::new(4096), 5)]);
    assert!(turn_until(&mut driver, || ring.in_flight() == 1).is_empty());
    const LONG: Duration = Duration::from_secs(3600);
    let mut overdue = Vec::new();
    ring.overdue((LONG, LONG), |tag, _| overdue.push(*tag));
    assert!(overdue.is_empty());
    for (bounds, passed) in
        [((Duration::ZERO, LONG), Bound::Due), ((LONG, Duration::ZERO), Bound::Total)]
    {
        ring.overdue(bounds, |tag, (bound, _)| {
            assert_eq!(bound, passed);
            overdue.push(std::mem::replace(tag, 6));
        });
    }
    assert_eq!(overdue, [5, 6]);

    // In two parts, of which the first is a short read.
    writes.write_all(&[1; 1000]).unwrap();
    let mut finished = Vec::new();
    driver.turn(Duration::from_millis(20), &mut finished).unwrap();
    writes.write_all(&[2; 3096]).unwrap();
    finished.extend(finish(&mut driver, 1));
    assert_eq!(finished[0].tag, 6);
    assert!(finished[0].outcome.is_ok());
    let bytes = finished[0].memory.bytes();
    assert!(bytes[..1000] == [1; 1000] && bytes[1000..] == [2; 3096]);
}

#[test]
fn a_target_that_panics_stays_with_the_ring_while_the_kernel_writes_to_it() {
    let (reads, mut writes) = pipe();
    let (ring, mut driver) = ring(&[reads], 1);
    let memory = Pages::new(8192);
    let seen = memory.seen.clone();
    seen.panics.store(true, Ordering::Release);
    ring.submit([(whole(8192), memory, 0)]);
    assert!(turn_until(&mut driver, || ring.in_flight() == 1).is_empty());
    writes.write_all(&[1; 4096]).unwrap();
    // The second piece is on its way before the target is told of the first.
    let arrived = || seen.arrived.load(Ordering::Relaxed) == 4096;
    assert!(turn_until(&mut driver, arrived).is_empty());
    assert_eq!(ring.in_flight(), 1);
    assert!(!seen.dropped.load(Ordering::Acquire), "a read of it is in flight");

    writes.write_all(&[2; 4096]).unwrap();
    let done = finish(&mut driver, 1).remove(0);
    let error = done.outcome.unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
}

#[test]
fn what_has_arrived_is_reported_even_if_the_kernel_refuses_to_go_on() {
    let (reads, mut writes) = pipe();
    let (ring, mut driver) = ring(&[reads], 2);
    ring.submit([0, 1].map(|tag| (whole(4096), Pages::new(4096), tag)));
    assert!(turn_until(&mut driver, || ring.in_flight() == 2).is_empty());

    // The ring's descriptor becomes one of a file that has nothing to do with io_uring.
    let fd = driver.core.uring.as_raw_fd();
    // SAFETY: the descriptor is open as long as the driver is.
    let kept = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap();
    let null = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
    redirect(&null, fd);
    writes.write_all(&[1; 4096]).unwrap();
    let mut finished = Vec::new();
    for _ in 0..1000 {
        driver.turn(Duration::ZERO, &mut finished).unwrap_err();
        if !finished.is_empty() {
            break;
        }
    }
    assert_eq!(finished.len(), 1, "one of the two has been read");
    assert_eq!(finished[0].memory.seen.arrived.load(Ordering::Relaxed), 4096);

    redirect(&kept, fd);
    writes.write_all(&[2; 4096]).unwrap();
    assert!(finish(&mut driver, 1)[0].outcome.is_ok());
}

/// Makes descriptor `to` another one of what `from` is open on.
fn redirect(from: &OwnedFd, to: i32) {
    // SAFETY: both are open descriptors of this test.
    let made = unsafe { libc::dup2(from.as_raw_fd(), to) };
    assert_eq!(made, to);
}

#[test]
fn a_driver_dropped_with_reads_in_flight_waits_for_them() {
    let (_dir, file, _) = file(1 << 20);
    let (ring, driver) = ring(&[file], 64);
    let memory = Pages::new(1 << 20);
    let seen = memory.seen.clone();
    ring.submit([(whole(1 << 20), memory, 0)]);
    drop(driver);
    assert_eq!(ring.in_flight(), 0);
    drop(ring);
    assert!(seen.dropped.load(Ordering::Acquire));
}

#[test]
fn a_driver_dropped_with_a_read_that_does_not_end_leaks_its_memory() {
    let (reads, mut writes) = pipe();
    let (ring, mut driver) = ring(&[reads], 2);
    let memory = Pages::new(4096);
    let seen = memory.seen.clone();
    let start = memory.memory().0;
    ring.submit([(whole(4096), memory, 0)]);
    assert!(turn_until(&mut driver, || ring.in_flight() == 1).is_empty());
    let begun = Instant::now();
    drop(driver);
    assert!(begun.elapsed() >= Duration::from_millis(50), "it waits for as long as it says");
    assert_eq!(ring.in_flight(), 1);
    drop(ring);
    assert!(!seen.dropped.load(Ordering::Acquire), "the kernel may still write to it");

    // And it does.
    writes.write_all(&[9; 4096]).unwrap();
    let mut last = 0xaa;
    for _ in 0..10_000 {
        // SAFETY: the memory was leaked, so it is there; the kernel's write is a byte or none.
        last = unsafe { start.as_ptr().wrapping_add(4095).read_volatile() };
        if last == 9 {
            break;
        }
        std::thread::yield_now();
    }
    assert_eq!(last, 9);
}

#[test]
fn a_read_is_fixed_only_if_one_region_holds_all_of_it() {
    const START: usize = 0x7f00_0000_0000;
    struct Nowhere;
    // SAFETY: a length of zero names no memory.
    unsafe impl Region for Nowhere {
        fn region(&self) -> (NonNull<u8>, usize) {
            (NonNull::dangling(), 0)
        }
    }
    let bytes = 2 * REGION_BYTES + 8192;
    let all = Registered { start: START, bytes, _memory: Box::new(Nowhere) };
    let region = |from: usize, bytes| all.region_of(START.wrapping_add(from), bytes);
    assert_eq!(region(0, 1), Some(0));
    assert_eq!(region(0, REGION_BYTES), Some(0));
    assert_eq!(region(0, REGION_BYTES + 1), None, "over a boundary");
    assert_eq!(region(REGION_BYTES - 4096, 4096), Some(0));
    assert_eq!(region(REGION_BYTES - 4096, 8192), None, "over a boundary");
    assert_eq!(region(REGION_BYTES, 4096), Some(1));
    assert_eq!(region(2 * REGION_BYTES, 8192), Some(2));
    assert_eq!(region(2 * REGION_BYTES, 8193), None, "past the end");
    assert_eq!(region(usize::MAX, 4096), None, "before the start");
    assert_eq!(all.region_of(usize::MAX, usize::MAX), None);
    assert_eq!(region(0, 0), None);
}

#[test]
fn jobs_into_registered_memory_are_fixed_reads_and_others_are_not() {
    /// Memory that a test never frees.
    struct Leaked(&'static [Page]);
    // SAFETY: it is static.
    unsafe impl Region for Leaked {
        fn region(&self) -> (NonNull<u8>, usize) {
            (NonNull::from(&self.0[0]).cast(), size_of_val(self.0))
        }
    }
    let (_dir, file, content) = file(8192);
    let (ring, mut driver) = ring(&[file], 2);
    let memory = Pages::new(8192);
    // SAFETY: the target keeps its pages where they are, and outlives the ring's use of them, as
    // the test keeps it until its end.
    let pages = unsafe { std::slice::from_raw_parts(memory.memory.as_ptr(), 2) };
    ring.register(Box::new(Leaked(pages))).unwrap();
    assert!(ring.register(Box::new(Leaked(pages))).is_err(), "a ring takes one");
    ring.submit([(whole(8192), memory, 0), (whole(8192), Pages::new(8192), 1)]);
    let finished = finish(&mut driver, 2);
    assert_eq!(ring.reads(), ReadCounts { fixed: 2, plain: 2 });
    for done in &finished {
        done.outcome.as_ref().unwrap();
        assert!(done.memory.bytes() == content);
    }
    drop((ring, driver));
    drop(finished);
}
