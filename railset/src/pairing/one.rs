//! The pair for one rail of a client, given what the client knows of its other rail.
//!
//! A client has two rails, 0 and 1, each with a wish of its own, and sets them up one by one. What is
//! up, or being set up by another thread, is taken: a new rail shares no end with it. Where nothing is
//! taken, rail 0 and rail 1 get the two pairs that [`pair`](super::pair) finds, so that two threads
//! that choose at the same moment do not choose one port.
//!
//! A pair that failed makes room for others: the next one is the pair with the fewest failures, each
//! failure of a pair counting [`WORSE_ROUTE_COST`] times as much where the kernel's route prefers
//! another. So a rail whose way is broken finds another one, and little time goes to ways that the
//! routes say are none.

use super::{
    DualRail, OneRail, PairError, Pairing, RailEnds, RailPair, RailWishes, Way, distinct, no_way,
    pair_any, surveys, ways,
};
use crate::choose::{Asker, Routed};
use crate::facts::DeviceFacts;
use crate::message::OfferedRail;
use crate::route::KernelRoute;

/// Most failures that are remembered: twice around the pairs of two ports at each end.
const MOST_FAILED: usize = 16;
/// How much less often than the best pairs a pair with a worse route is tried, when all of them fail.
const WORSE_ROUTE_COST: usize = 4;

/// Pairs that could not be set up as a rail, the last failure last. A pair may be there several times.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FailedPairs(Vec<RailEnds>);

impl FailedPairs {
    /// Notes a failure, and forgets the first one where there are too many.
    pub fn push(&mut self, pair: RailEnds) {
        if self.0.len() == MOST_FAILED {
            self.0.remove(0);
        }
        self.0.push(pair);
    }

    /// Whether `pair` has failed.
    #[must_use]
    pub fn contains(&self, pair: &RailEnds) -> bool {
        self.0.contains(pair)
    }

    /// Smaller is tried first: what has cost less, of that what shares no end with the last failure,
    /// then what failed longest ago.
    fn priority(&self, ends: &RailEnds, has_best_route: bool) -> (usize, bool, usize) {
        let failures = self.0.iter().filter(|pair| *pair == ends).count();
        let weight = if has_best_route { 1 } else { WORSE_ROUTE_COST };
        let is_beside = self.0.last().is_some_and(|last| last.share_an_end(ends));
        let last = self.0.iter().rposition(|pair| pair == ends);
        ((failures + 1) * weight, is_beside, last.map_or(0, |at| at + 1))
    }
}

/// The rail that a client is about to set up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OneWanted {
    /// Which of the client's rails: 0 or 1.
    pub rail_index: usize,
    /// Rails that are up or being set up. The new rail shares no end with them.
    pub taken: Vec<RailEnds>,
    /// Pairs that could not be set up as this rail.
    pub failed: FailedPairs,
}

/// What a host and its peer have.
struct Sides<'a> {
    offered: &'a [OfferedRail],
    devices: &'a [DeviceFacts],
    routes: &'a [Option<KernelRoute>],
    wishes: &'a RailWishes,
}

/// The pair for the one rail that is `wanted`. [`Pairing::one_rail`] says why both ends have no second
/// one, as it does after [`pair`](super::pair).
///
/// [`DualRail::Two`] asks for two rails here, and does without: a client that has started goes on with
/// whichever rail it has.
///
/// # Errors
/// [`PairError`]: nothing can carry this rail, or nothing that is not taken.
pub fn pair_one(
    offered: &[OfferedRail],
    devices: &[DeviceFacts],
    routes: &[Option<KernelRoute>],
    wishes: &RailWishes,
    wanted: &OneWanted,
) -> Result<Pairing, PairError> {
    let sides = Sides { offered, devices, routes, wishes };
    let both = pair_any(offered, devices, routes, wishes);
    if let Err(error @ PairError::Routes { .. }) = both {
        return Err(error);
    }
    let planned = sides.planned(&both);
    let one_rail = both.as_ref().ok().and_then(|both| both.one_rail.clone());
    let rail_index = wanted.rail_index.min(1);
    let (own, taken) = match (&planned, &wanted.taken[..]) {
        ([first, second], []) => {
            let [own, other] = if rail_index == 0 { [first, second] } else { [second, first] };
            (own.clone(), other.iter().map(RailPair::ends).collect())
        }
        (_, taken) => (None, taken.to_vec()),
    };
    match sides.best(rail_index, own, &taken, &wanted.failed) {
        Ok(pair) => Ok(Pairing { pairs: vec![pair], one_rail }),
        // What both ends have says more than what is left of it.
        Err(PairError::NoneBeside(why)) => Err(PairError::NoneBeside(one_rail.unwrap_or(why))),
        Err(error) => Err(error),
    }
}

impl Sides<'_> {
    /// The pairs of rail 0 and rail 1 while nothing is taken.
    fn planned(&self, both: &Result<Pairing, PairError>) -> [Option<RailPair>; 2] {
        let second = || self.best(1, None, &[], &FailedPairs::default()).ok();
        let second = || if self.wishes.dual == DualRail::One { None } else { second() };
        let pairs = both.as_ref().map_or(&[][..], |both| &both.pairs);
        match pairs {
            [first, second, ..] => [Some(first.clone()), Some(second.clone())],
            [first] if self.is_named_for_second(&first.local.spec.device) => [None, second()],
            [first] => [Some(first.clone()), None],
            [] => [None, second()],
        }
    }

    /// Whether rail 0 leaves `device` to rail 1, whose wish names it.
    fn is_named_for_second(&self, device: &str) -> bool {
        let [wish1, wish2] = &self.wishes.rails;
        let device = self.devices.iter().find(|it| it.name == device);
        let is_named = wish2.device.is_some()
            && device.is_some_and(|device| wish2.is_for(device, self.devices));
        self.wishes.ask_for_two() && wish1.device.is_none() && is_named
    }

    /// The best pair for a rail that shares no end with those that are `taken`; `own` comes first.
    fn best(
        &self,
        rail_index: usize,
        own: Option<RailPair>,
        taken: &[RailEnds],
        failed: &FailedPairs,
    ) -> Result<RailPair, PairError> {
        let (asker, wish) = match rail_index {
            0 => (Asker::Rail1, &self.wishes.rails[0]),
            _ => (Asker::Rail2, &self.wishes.rails[1]),
        };
        let (distinct, _) = distinct(self.offered);
        let surveys = surveys(&distinct, self.offered, self.devices, self.routes, wish);
        let mut left = ways(&surveys);
        if left.is_empty() {
            return Err(no_way(&surveys, self.devices, asker, wish).into());
        }
        if rail_index == 0 {
            self.leave_to_second(&mut left)?;
        }
        self.leave_taken(&mut left, taken)?;
        self.leave_unrouted(&mut left, rail_index)?;
        let own_route = own.as_ref().map(|pair| pair.local.explanation.routed);
        let best_route = own_route.or(left.first().map(Way::routed));
        let pairs = own.into_iter().chain(left.iter().map(|way| way.pair(self.offered, wish)));
        let best = pairs.min_by_key(|pair| {
            let has_best_route = Some(pair.local.explanation.routed) <= best_route;
            failed.priority(&pair.ends(), has_best_route)
        });
        best.ok_or(PairError::NoneBeside(OneRail::PeerOffersOne))
    }

    fn leave_to_second(&self, left: &mut Vec<Way<'_>>) -> Result<(), PairError> {
        let last = left.first().map(|way| way.spec().device.clone());
        left.retain(|way| !self.is_named_for_second(&way.spec().device));
        match last {
            Some(device) if left.is_empty() => {
                Err(PairError::NoneBeside(OneRail::NamedForSecond { device }))
            }
            _ => Ok(()),
        }
    }

    fn leave_taken(&self, left: &mut Vec<Way<'_>>, taken: &[RailEnds]) -> Result<(), PairError> {
        let is_free = |way: &Way<'_>| {
            let peer = self.offered[way.offered].identity();
            !taken.iter().any(|rail| rail.peer.is_same(&peer))
        };
        left.retain(is_free);
        let Some(last) = left.first().map(|way| way.spec().clone()) else {
            return Err(PairError::NoneBeside(OneRail::PeerOffersOne));
        };
        left.retain(|way| !taken.iter().any(|rail| self.leaves_from(way, rail)));
        if left.is_empty() {
            let (device, port) = (last.device, last.port);
            return Err(PairError::NoneBeside(OneRail::OneLocalRail { device, port }));
        }
        Ok(())
    }

    /// Whether `way` leaves from the port of `rail`, which may have its GID beside others.
    fn leaves_from(&self, way: &Way<'_>, rail: &RailEnds) -> bool {
        let spec = way.spec();
        let device = self.devices.iter().find(|device| device.name == spec.device);
        let port = device.and_then(|device| device.ports.iter().find(|p| p.number == spec.port));
        let has_gid = |gid| port.is_some_and(|port| port.gids.iter().any(|row| row.gid == gid));
        spec.identity().is_same(&rail.local) || has_gid(rail.local.gid)
    }

    /// A way that the kernel would not take is the last resort of rail 0. Of rail 1 it is no way, unless
    /// two rails are asked for: it would cost every attempt a time-out.
    fn leave_unrouted(&self, left: &mut Vec<Way<'_>>, rail_index: usize) -> Result<(), PairError> {
        if left.iter().any(|way| way.routed() < Routed::Elsewhere) {
            left.retain(|way| way.routed() < Routed::Elsewhere);
            return Ok(());
        }
        match rail_index {
            0 => Ok(()),
            _ if self.wishes.ask_for_two() => Ok(()),
            _ => Err(PairError::NoneBeside(OneRail::NotRouted)),
        }
    }
}

#[cfg(test)]
#[path = "one_tests.rs"]
mod tests;
