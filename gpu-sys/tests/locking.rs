//! What this process may lock, and what a fork gets of it.

mod support;

use std::io;

use gpu_sys::limits::{IpcLock, LockLimit};
use gpu_sys::pinned::{HugePages, NumaPlacement, PinError, PinnedOptions, PinnedPages};
use support::with_lock_limit;

const LIMIT_BYTES: u64 = 1 << 20;

fn pin(bytes: usize) -> Result<PinnedPages, PinError> {
    PinnedPages::new(&PinnedOptions {
        bytes,
        huge_pages: HugePages::Off,
        numa: NumaPlacement::Local,
    })
}

#[test]
fn a_lock_limit_that_is_too_low_names_the_numbers_and_the_knob() {
    let name = "a_lock_limit_that_is_too_low_names_the_numbers_and_the_knob";
    with_lock_limit(name, LIMIT_BYTES, || {
        let limit = LockLimit::current();
        assert_eq!((limit.soft_bytes, limit.capability), (Some(LIMIT_BYTES), IpcLock::Absent));
        let error = pin(8 << 20).unwrap_err();
        assert!(matches!(error, PinError::LockLimit { .. }), "{error}");
        let text = error.to_string();
        for part in
            ["needs 8 MiB of locked memory, the limit is 1 MiB", "ulimit -l", "CAP_IPC_LOCK"]
        {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    });
}

#[test]
fn memory_locked_before_counts_towards_the_limit_until_it_is_dropped() {
    let name = "memory_locked_before_counts_towards_the_limit_until_it_is_dropped";
    with_lock_limit(name, LIMIT_BYTES, || {
        let first = pin(768 << 10).unwrap();
        let text = pin(768 << 10).unwrap_err().to_string();
        assert!(text.contains("768 KiB of it taken"), "{text}");
        drop(first);
        assert!(pin(768 << 10).is_ok());
    });
}

#[test]
fn a_forked_child_does_not_have_the_pages() {
    let pages = pin(64 << 10).unwrap();
    let address = pages.address().as_ptr();
    assert_eq!(mincore(address), Ok(()), "mapped here");
    // SAFETY: the child calls only async-signal-safe functions (alarm, mincore, _exit).
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: async-signal-safe; bounds the child's life whatever happens.
        unsafe { libc::alarm(10) };
        let code = if mincore(address) == Err(libc::ENOMEM) { 0 } else { 1 };
        // SAFETY: async-signal-safe; leaves without running the parent's destructors.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "{}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: `child` is a child of this process, and the pointer is to a live local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0), "the child saw the pages, or was killed");
    assert_eq!(mincore(address), Ok(()), "still mapped here");
}

/// Whether the page at `address` is mapped: `ENOMEM` if it is not.
fn mincore(address: *mut u8) -> Result<(), i32> {
    let mut residency = [0_u8; 1];
    // SAFETY: mincore takes any address and writes one byte for one page.
    let result = unsafe { libc::mincore(address.cast(), 1, residency.as_mut_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}
