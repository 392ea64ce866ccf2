//! An allocator that counts, and fetches that must not need it.

mod fetches;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use fetches::assert_none_allocates;

/// The system's allocator, with a count of what it was asked for on any thread of the process.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every request goes to the system's allocator, which keeps the trait's promises, as it
// came; counting touches no memory that was handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the promises of this function, which are those of the other.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`, and the memory came from the system's allocator.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `dealloc`.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// How often anybody in this process has allocated.
fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}
