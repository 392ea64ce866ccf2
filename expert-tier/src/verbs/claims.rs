//! Which pairs of ends are being set up as rails, and which could not be.
//!
//! Two threads set up rails, one for each of the client's two. A thread claims the pair that it has
//! chosen until its rail is up or cannot be had, so that the other thread chooses another pair.

use railset::pairing::{FailedPairs, OneWanted, RailEnds};

/// Rails that a client has at most.
pub(super) const MOST_RAILS: usize = 2;

/// What is being set up, by the index of the rail.
#[derive(Default)]
pub(super) struct Claims {
    claimed: [Option<RailEnds>; MOST_RAILS],
    failed: [FailedPairs; MOST_RAILS],
}

impl Claims {
    /// What rail `slot` may be while `up` are up.
    pub(super) fn wanted(&self, slot: usize, up: impl Iterator<Item = RailEnds>) -> OneWanted {
        let others = (0..).zip(&self.claimed).filter(|(index, _)| *index != slot);
        let claimed = others.filter_map(|(_, claimed)| *claimed);
        OneWanted {
            rail_index: slot,
            taken: up.chain(claimed).collect(),
            failed: self.failed.get(slot).cloned().unwrap_or_default(),
        }
    }

    /// Claims `ends` for rail `slot`. False where they share an end with what is up or claimed.
    pub(super) fn claim(
        &mut self,
        slot: usize,
        ends: RailEnds,
        up: impl Iterator<Item = RailEnds>,
    ) -> bool {
        if self.wanted(slot, up).taken.iter().any(|taken| taken.share_an_end(&ends)) {
            return false;
        }
        if let Some(claimed) = self.claimed.get_mut(slot) {
            *claimed = Some(ends);
        }
        true
    }

    /// Rail `slot` is up: its failures are of the past.
    pub(super) fn succeeded(&mut self, slot: usize) {
        self.take(slot);
        if let Some(failed) = self.failed.get_mut(slot) {
            *failed = FailedPairs::default();
        }
    }

    /// Rail `slot` cannot be had. The pair itself is blamed for it, or something else.
    pub(super) fn gave_up(&mut self, slot: usize, blame: Blame) {
        let claimed = self.take(slot);
        if let (Blame::Pair, Some(failed), Some(pair)) = (blame, self.failed.get_mut(slot), claimed)
        {
            failed.push(pair);
        }
    }

    fn take(&mut self, slot: usize) -> Option<RailEnds> {
        self.claimed.get_mut(slot)?.take()
    }
}

/// What an attempt failed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Blame {
    /// The way between these two ends.
    Pair,
    /// The peer, the control connection, or that there is no pair.
    Other,
}

#[cfg(test)]
mod tests {
    use railset::choose::RailIdentity;
    use railset::facts::Gid;

    use super::*;

    fn ends(local: u8, peer: u8) -> RailEnds {
        let end = |number| RailIdentity { node_guid: 0, port: 1, gid: Gid([number; 16]) };
        RailEnds { local: end(local), peer: end(peer) }
    }

    #[test]
    fn what_one_thread_sets_up_is_not_chosen_by_the_other() {
        let (mut claims, up) = (Claims::default(), std::iter::empty::<RailEnds>);
        assert!(claims.claim(0, ends(1, 11), up()));
        assert_eq!(claims.wanted(1, up()).taken, [ends(1, 11)]);
        assert_eq!(claims.wanted(0, up()).taken, [], "its own claim is no obstacle");
        for shared in [ends(1, 11), ends(1, 12), ends(2, 11)] {
            assert!(!claims.claim(1, shared, up()));
            assert!(!claims.claim(1, ends(3, 13), [ends(3, 14)].into_iter()), "one that is up");
        }
        assert!(claims.claim(1, ends(2, 12), up()));
        claims.gave_up(0, Blame::Pair);
        assert_eq!(claims.wanted(1, up()).taken, []);
        assert_eq!(claims.wanted(0, [ends(3, 13)].into_iter()).taken, [ends(3, 13), ends(2, 12)]);
    }

    #[test]
    fn a_pair_is_remembered_as_failed_where_it_is_to_blame_and_until_its_rail_is_up() {
        let (mut claims, up) = (Claims::default(), std::iter::empty::<RailEnds>);
        assert!(claims.claim(0, ends(1, 11), up()));
        claims.gave_up(0, Blame::Other);
        assert_eq!(claims.wanted(0, up()).failed, FailedPairs::default());
        assert!(claims.claim(0, ends(1, 11), up()));
        claims.gave_up(0, Blame::Pair);
        assert!(claims.wanted(0, up()).failed.contains(&ends(1, 11)));
        assert_eq!(claims.wanted(1, up()).failed, FailedPairs::default());
        assert!(claims.claim(0, ends(2, 12), up()));
        claims.succeeded(0);
        assert_eq!(claims.wanted(0, up()), OneWanted::default());
        claims.gave_up(0, Blame::Pair);
        assert_eq!(claims.wanted(0, up()), OneWanted::default(), "nothing was claimed");
    }
}
