//! Which rails of a connection are up, and when to try the others again.

use std::time::Duration;

use crate::backoff::{Backoff, BackoffSettings};

/// Whether a rail carries traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// Work may be posted on it.
    Up,
    /// It failed; nothing is posted on it until a probe succeeds.
    Down,
}

/// The rails of a connection by position.
#[derive(Clone, Debug)]
pub struct RailSet {
    rails: Vec<(Health, Backoff)>,
}

impl RailSet {
    /// `rails` rails, all up.
    #[must_use]
    pub fn new(rails: usize, settings: BackoffSettings) -> Self {
        Self { rails: vec![(Health::Up, Backoff::new(settings)); rails] }
    }

    /// How a rail is; `None` where there is no such rail.
    #[must_use]
    pub fn health(&self, rail: usize) -> Option<Health> {
        self.rails.get(rail).map(|(health, _)| *health)
    }

    /// The rails that are up, in order.
    pub fn live(&self) -> impl Iterator<Item = usize> {
        let live = |(at, (health, _)): (usize, &(Health, _))| (*health == Health::Up).then_some(at);
        self.rails.iter().enumerate().filter_map(live)
    }

    /// A rail failed, or a probe of it did: how long to wait before the next probe. `random` is any
    /// number drawn uniformly. `None` where there is no such rail.
    pub fn failed(&mut self, rail: usize, random: u32) -> Option<Duration> {
        let (health, backoff) = self.rails.get_mut(rail)?;
        *health = Health::Down;
        Some(backoff.failed(random))
    }

    /// A rail works: a probe of it succeeded. Nothing happens where there is no such rail.
    pub fn recovered(&mut self, rail: usize) {
        if let Some((health, backoff)) = self.rails.get_mut(rail) {
            *health = Health::Up;
            backoff.succeeded();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_rail_is_left_out_until_it_recovers() {
        let mut rails = RailSet::new(2, BackoffSettings { first_ms: 10, most_ms: 100 });
        assert_eq!(rails.live().collect::<Vec<_>>(), [0, 1]);
        let wait = |rails: &mut RailSet| rails.failed(0, u32::MAX).unwrap().as_millis();
        assert_eq!((wait(&mut rails), wait(&mut rails)), (10, 20));
        assert_eq!(rails.health(0), Some(Health::Down));
        assert_eq!(rails.live().collect::<Vec<_>>(), [1]);
        rails.recovered(0);
        assert_eq!(rails.live().count(), 2);
        assert_eq!(wait(&mut rails), 10, "waits start over");
        assert_eq!((rails.failed(2, 0), rails.health(2)), (None, None));
    }
}
