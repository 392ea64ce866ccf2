//! When to try a broken path again.
//!
//! The wait doubles from `first_ms` to `most_ms`, and each wait is drawn between half of that and
//! all of it, so that the clients of a peer that restarts do not come back in one instant. A
//! success starts over.

use std::time::Duration;

/// Bounds of the wait between attempts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackoffSettings {
    /// Longest wait before the second attempt, in milliseconds.
    pub first_ms: u32,
    /// Longest wait before any attempt, in milliseconds.
    pub most_ms: u32,
}

impl Default for BackoffSettings {
    /// 20 ms is about what a peer's restart takes at best; 1 s is what a caller may wait for a
    /// peer that is back.
    fn default() -> Self {
        Self { first_ms: 20, most_ms: 1000 }
    }
}

/// The attempts at one path since it last worked.
#[derive(Clone, Debug)]
pub struct Backoff {
    settings: BackoffSettings,
    failures: u32,
}

impl Backoff {
    /// A path that has not failed yet.
    #[must_use]
    pub fn new(settings: BackoffSettings) -> Self {
        Self { settings, failures: 0 }
    }

    /// Failures in a row.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Counts a failure and says how long to wait before the next attempt.
    ///
    /// `random` is any number drawn uniformly; it decides where in the interval the wait falls.
    pub fn failed(&mut self, random: u32) -> Duration {
        let doublings = self.failures.min(20);
        self.failures = self.failures.saturating_add(1);
        let most = u64::from(self.settings.most_ms.max(1));
        let whole = (u64::from(self.settings.first_ms.max(1)) << doublings).min(most);
        let half_us = whole * 500;
        let share = f64::from(random) / f64::from(u32::MAX);
        Duration::from_micros(half_us) + Duration::from_micros(half_us).mul_f64(share)
    }

    /// The path works: the next failure starts from the shortest wait.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: BackoffSettings = BackoffSettings { first_ms: 10, most_ms: 100 };

    #[test]
    fn waits_double_up_to_the_bound_and_start_over() {
        let mut backoff = Backoff::new(SETTINGS);
        let waits: Vec<_> = (0..6).map(|_| backoff.failed(u32::MAX).as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 100, 100]);
        assert_eq!(backoff.failures(), 6);
        backoff.succeeded();
        assert_eq!(backoff.failed(u32::MAX).as_millis(), 10);
    }

    #[test]
    fn a_wait_is_drawn_between_half_and_all() {
        let wait = |random| Backoff::new(SETTINGS).failed(random).as_micros();
        assert_eq!((wait(0), wait(u32::MAX)), (5000, 10_000));
        assert!((5000..10_000).contains(&wait(u32::MAX / 3)));
    }

    #[test]
    fn years_of_failures_do_not_overflow() {
        let mut backoff = Backoff::new(BackoffSettings { first_ms: u32::MAX, most_ms: u32::MAX });
        for _ in 0..100 {
            let wait = backoff.failed(u32::MAX);
            assert_eq!(wait.as_millis(), u128::from(u32::MAX));
        }
    }
}
