//! When something last came, for threads that look at it without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The instant of the last sign of life; the newest one counts, in whatever order they are noted.
pub(crate) struct Progress {
    opened: Instant,
    /// Microseconds after `opened`.
    last_us: AtomicU64,
}

impl Progress {
    /// The first sign of life is now.
    pub(crate) fn new() -> Self {
        Self { opened: Instant::now(), last_us: AtomicU64::new(0) }
    }

    /// Something has come.
    pub(crate) fn note(&self) {
        self.last_us.fetch_max(self.elapsed_us(), Ordering::Relaxed);
    }

    /// How long nothing has come.
    pub(crate) fn silence(&self) -> Duration {
        // Another thread may have noted a later instant since this one looked at the clock.
        let silent_us = self.elapsed_us().saturating_sub(self.last_us.load(Ordering::Relaxed));
        Duration::from_micros(silent_us)
    }

    fn elapsed_us(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}
