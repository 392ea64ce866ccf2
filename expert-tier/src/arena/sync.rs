//! Lock, condition variable and atomics of the pool and the leases: the standard library's, or
//! loom's.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(loom)]
pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

use std::time::Duration;

/// Takes the lock. A thread that panicked while it held the lock has left bookkeeping that is
/// whole: every change under it is a single step that cannot panic half-way.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits until woken or until `wait` has passed.
#[cfg(not(loom))]
pub(super) fn wait<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    wait: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, wait).unwrap_or_else(std::sync::PoisonError::into_inner).0
}

/// Waits until woken. Loom has no time: a wake-up that never comes shows as a deadlock, which is
/// what the model is to find.
#[cfg(loom)]
pub(super) fn wait<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    _wait: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits for a moment, because something is to be looked at again soon.
#[cfg(not(loom))]
pub(super) fn nap<'a, T>(
    condvar: &Condvar,
    _mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    moment: Duration,
) -> MutexGuard<'a, T> {
    wait(condvar, guard, moment)
}

/// Lets the other threads of the model run, as a moment would.
#[cfg(loom)]
pub(super) fn nap<'a, T>(
    _condvar: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    _moment: Duration,
) -> MutexGuard<'a, T> {
    drop(guard);
    loom::thread::yield_now();
    lock(mutex)
}
