//! When to try the rails of a client again that are missing.

use std::time::Duration;

use crate::backoff::{Backoff, BackoffSettings};

/// The rails of a client by position, with a back-off for each: one that fails again and again does
/// not keep the other waiting.
#[derive(Clone, Debug)]
pub struct RailSet(Vec<Backoff>);

impl RailSet {
    /// `rails` rails, none of which has failed.
    #[must_use]
    pub fn new(rails: usize, settings: BackoffSettings) -> Self {
        Self(vec![Backoff::new(settings); rails])
    }

    /// A rail failed, or a probe of it did: how long to wait before the next probe. `random` is any
    /// number drawn uniformly. `None` where there is no such rail.
    pub fn failed(&mut self, rail: usize, random: u32) -> Option<Duration> {
        Some(self.0.get_mut(rail)?.failed(random))
    }

    /// A rail works: its waits start over. Nothing happens where there is no such rail.
    pub fn recovered(&mut self, rail: usize) {
        self.0.get_mut(rail).into_iter().for_each(Backoff::succeeded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rail_has_waits_of_its_own_which_start_over_when_it_recovers() {
        let mut rails = RailSet::new(2, BackoffSettings { first_ms: 10, most_ms: 100 });
        let wait = |rails: &mut RailSet, rail| rails.failed(rail, u32::MAX).unwrap().as_millis();
        assert_eq!((wait(&mut rails, 0), wait(&mut rails, 0)), (10, 20));
        assert_eq!(wait(&mut rails, 1), 10);
        rails.recovered(0);
        assert_eq!((wait(&mut rails, 0), wait(&mut rails, 1)), (10, 20));
        rails.recovered(2);
        assert_eq!(rails.failed(2, 0), None);
    }
}
