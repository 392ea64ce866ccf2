//! When to say what may happen with every request: at the first time, the second, the fourth, the
//! eighth, so that a log has it and is not filled by it.

/// Counts something, and says when it is to be spoken of.
#[derive(Default)]
pub(crate) struct Seldom(u64);

impl Seldom {
    /// It has happened once more; how often by now, if that is to be said.
    pub(crate) fn once_more(&mut self) -> Option<u64> {
        self.0 += 1;
        self.0.is_power_of_two().then_some(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_all_the_time_is_said_ever_more_seldom() {
        let mut seldom = Seldom::default();
        let said: Vec<_> = (0..1000).filter_map(|_| seldom.once_more()).collect();
        assert_eq!(said, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
    }
}
