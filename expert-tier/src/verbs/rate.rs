//! How fast a rail brings bytes.
//!
//! Measured while something is in flight, in spans of [`SPAN`] or longer, and followed by an
//! exponential mean. Rails are compared by it, so what matters is that all are measured alike.

use std::time::{Duration, Instant};

/// Shortest time that a rate is taken over: several parts' worth on a fast rail.
const SPAN: Duration = Duration::from_millis(2);
/// Share of a new measurement in the rate: a change shows within a few of them.
const SHARE: f64 = 0.3;
/// Taken for the speed of a port whose device does not say.
const UNKNOWN_BITS_PER_S: u64 = 100_000_000_000;

/// What is in flight on a rail, and how fast it has come so far.
pub(super) struct Rate {
    bytes_per_s: f64,
    /// Posted and not come.
    flying_bytes: u64,
    /// Since when bytes are counted, while something is in flight.
    since: Option<Instant>,
    counted_bytes: u64,
}

impl Rate {
    /// Before anything has come, the port's speed.
    pub(super) fn new(bits_per_s: Option<u64>) -> Self {
        let bits = bits_per_s.filter(|bits| *bits > 0).unwrap_or(UNKNOWN_BITS_PER_S);
        Self { bytes_per_s: bits as f64 / 8.0, flying_bytes: 0, since: None, counted_bytes: 0 }
    }

    pub(super) fn bytes_per_s(&self) -> f64 {
        self.bytes_per_s
    }

    /// Takes it for no faster than that, until it has shown how fast it is.
    pub(super) fn assume_at_most(&mut self, bytes_per_s: f64) {
        self.bytes_per_s = self.bytes_per_s.min(bytes_per_s);
    }

    /// Seconds until `more` bytes have come behind what is in flight.
    pub(super) fn seconds_for(&self, more: u64) -> f64 {
        (self.flying_bytes + more) as f64 / self.bytes_per_s.max(1.0)
    }

    pub(super) fn posted(&mut self, bytes: u64, now: Instant) {
        self.flying_bytes += bytes;
        self.since.get_or_insert(now);
    }

    /// `bytes` are no longer in flight, which says nothing of how fast others come.
    pub(super) fn given_up(&mut self, bytes: u64) {
        self.flying_bytes = self.flying_bytes.saturating_sub(bytes);
        if self.flying_bytes == 0 {
            (self.since, self.counted_bytes) = (None, 0);
        }
    }

    /// `bytes` are no longer in flight; `landed` says whether they came or were given up.
    pub(super) fn came(&mut self, bytes: u64, now: Instant, landed: bool) {
        self.flying_bytes = self.flying_bytes.saturating_sub(bytes);
        if landed {
            self.counted_bytes += bytes;
        }
        let Some(since) = self.since else { return };
        let span = now.saturating_duration_since(since);
        let is_idle = self.flying_bytes == 0;
        if span >= SPAN || (is_idle && !span.is_zero()) {
            // The shorter it was measured, the less it says.
            let weight = (span.as_secs_f64() / SPAN.as_secs_f64()).min(1.0) * SHARE;
            let found = self.counted_bytes as f64 / span.as_secs_f64();
            self.bytes_per_s += weight * (found - self.bytes_per_s);
            (self.since, self.counted_bytes) = (Some(now), 0);
        }
        if is_idle {
            (self.since, self.counted_bytes) = (None, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: u64 = 256 * 1024;

    /// Sends parts one after the other, each taking `part_time`, from `now` on.
    fn send(rate: &mut Rate, parts: u32, part_time: Duration, mut now: Instant) -> Instant {
        rate.posted(PART * u64::from(parts), now);
        for _ in 0..parts {
            now += part_time;
            rate.came(PART, now, true);
        }
        now
    }

    #[test]
    fn a_rail_is_taken_for_as_fast_as_its_port_until_it_shows_otherwise() {
        let mut slow = Rate::new(Some(10_000_000_000));
        assert!((slow.seconds_for(1_250_000_000) - 1.0).abs() < 1e-9);
        // 256 KiB in 40 ms is 6.5 MB/s.
        send(&mut slow, 40, Duration::from_millis(40), Instant::now());
        let seconds = slow.seconds_for(6_553_600);
        assert!((0.9..1.1).contains(&seconds), "{seconds}");
    }

    #[test]
    fn time_in_which_nothing_flies_is_no_slowness() {
        let mut rate = Rate::new(None);
        let part_time = Duration::from_millis(4);
        let mut now = Instant::now();
        for _ in 0..60 {
            now = send(&mut rate, 1, part_time, now) + Duration::from_secs(1);
        }
        let seconds = rate.seconds_for(PART);
        assert!((0.003..0.005).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_batch_is_shared_out_by_speed() {
        let now = Instant::now();
        let (mut fast, mut slow) = (Rate::new(None), Rate::new(None));
        send(&mut fast, 40, Duration::from_millis(10), now);
        let now = send(&mut slow, 40, Duration::from_millis(20), now);
        let (mut to_fast, mut to_slow) = (0, 0);
        for _ in 0..30 {
            if fast.seconds_for(PART) <= slow.seconds_for(PART) {
                fast.posted(PART, now);
                to_fast += 1;
            } else {
                slow.posted(PART, now);
                to_slow += 1;
            }
        }
        assert_eq!((to_fast, to_slow), (20, 10));
    }

    #[test]
    fn a_rail_that_comes_back_and_brings_nothing_gets_no_more_than_its_share() {
        let now = Instant::now();
        let (mut works, mut dead) = (Rate::new(None), Rate::new(None));
        let now = send(&mut works, 40, Duration::from_millis(10), now);
        dead.assume_at_most(works.bytes_per_s());
        let mut to_dead = 0;
        for _ in 0..32 {
            if dead.seconds_for(PART) < works.seconds_for(PART) {
                dead.posted(PART, now);
                to_dead += 1;
            } else {
                works.posted(PART, now);
            }
        }
        assert!(to_dead <= 16, "{to_dead} of 32");
    }

    #[test]
    fn what_was_given_up_counts_as_not_come() {
        let mut rate = Rate::new(None);
        let mut now = send(&mut Rate::new(None), 1, Duration::from_millis(1), Instant::now());
        for _ in 0..50 {
            rate.posted(PART, now);
            now += Duration::from_millis(10);
            rate.came(PART, now, false);
        }
        assert!(rate.seconds_for(PART) > 1.0);
    }
}
