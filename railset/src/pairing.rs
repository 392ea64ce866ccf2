//! Which of the peer's rails a client uses, and which of its own for each.
//!
//! A client uses two rails where both sides have two, else one. Two that share a port of one device
//! or an address, on either side, are one: using both would halve nothing and double the work, so
//! the second is passed over, or refused where the user asked for two.
//!
//! The pairs are found by search over all of them, best first (see [`choose`](crate::choose)):
//! eight offers and a host's few ports are a few hundred pairs.
//!
//! [`pair`] pairs both rails at once. [`pair_one`] pairs the one rail that a client is about to set up
//! while its other rail is up, is being set up, or cannot be had.

mod one;

use std::fmt;
use std::str::FromStr;

use crate::choose::{
    Asker, Candidate, Choice, ChooseError, RailIdentity, RailSpec, Routed, Survey, Target, Wish,
    choose,
};
use crate::facts::DeviceFacts;
use crate::message::{MAX_RAILS, OfferedRail};
use crate::route::KernelRoute;

pub use one::{FailedPairs, OneWanted, pair_one};

/// How many rails a client uses (`METRALE_EXPERT_DUAL_RAIL`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DualRail {
    /// As many as both sides have, at most two.
    #[default]
    Auto,
    /// One, whatever there is.
    One,
    /// Two, or none.
    Two,
}

/// A value that is neither `0` nor `1`.
#[derive(Debug, thiserror::Error, Clone, Copy, PartialEq, Eq)]
#[error("neither 1, for two rails, nor 0, for one")]
pub struct DualRailError;

impl FromStr for DualRail {
    type Err = DualRailError;

    fn from_str(text: &str) -> Result<Self, DualRailError> {
        match text {
            "0" => Ok(Self::One),
            "1" => Ok(Self::Two),
            _ => Err(DualRailError),
        }
    }
}

/// What a client's user asked for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RailWishes {
    /// How many rails.
    pub dual: DualRail,
    /// The first rail's and the second rail's local end. A wish for the second asks for two rails,
    /// unless `dual` says one.
    pub rails: [Wish; 2],
}

impl RailWishes {
    /// Whether the user asks for two rails, by saying so or by naming the second. A second rail that the
    /// kernel has no route for is tried only then.
    #[must_use]
    pub fn ask_for_two(&self) -> bool {
        match self.dual {
            DualRail::Two => true,
            DualRail::One => false,
            DualRail::Auto => !self.rails[1].is_empty(),
        }
    }

    /// The wishes for the rails that a client may have: one or two.
    #[must_use]
    pub fn for_rails(&self) -> &[Wish] {
        let rails = if self.dual == DualRail::One { 1 } else { 2 };
        &self.rails[..rails]
    }
}

/// An offered rail and the local end chosen for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailPair {
    /// The peer's end.
    pub offered: OfferedRail,
    /// The local end, and why.
    pub local: Choice,
}

impl RailPair {
    /// The names of both ends.
    #[must_use]
    pub fn ends(&self) -> RailEnds {
        RailEnds { local: self.local.spec.identity(), peer: self.offered.identity() }
    }
}

/// A rail, as both of its ends name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RailEnds {
    /// The client's end.
    pub local: RailIdentity,
    /// The peer's end.
    pub peer: RailIdentity,
}

impl RailEnds {
    /// Whether the two rails have an end in common, so that there can be only one of them.
    #[must_use]
    pub fn share_an_end(&self, other: &Self) -> bool {
        self.local.is_same(&other.local) || self.peer.is_same(&other.peer)
    }
}

impl fmt::Display for RailPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OfferedRail { device, port, gid, .. } = &self.offered;
        write!(f, "to the peer's {device} port {port} ({gid}) from {}", self.local)
    }
}

/// Why there is no second rail.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum OneRail {
    /// The user said so.
    #[error("METRALE_EXPERT_DUAL_RAIL is 0")]
    Wished,
    /// The peer has one.
    #[error("the peer offers one rail: start it with --rail twice, or connect its second port")]
    PeerOffersOne,
    /// The peer's rails are one.
    #[error("the peer's {first} and {second} are one port or one address, so one rail")]
    OnePeerRail {
        /// A device of the peer.
        first: String,
        /// Another, or the same.
        second: String,
    },
    /// Only one local rail is usable.
    #[error("both rails would leave from {device} port {port}, so they are one")]
    OneLocalRail {
        /// The local device.
        device: String,
        /// Its port.
        port: u8,
    },
    /// The second rail's device is the only one that is left.
    #[error("the only port that is left, of {device}, is named for the second rail")]
    NamedForSecond {
        /// The device.
        device: String,
    },
    /// No second rail has a route.
    #[error("the route to the peer's second rail leaves from no RDMA port of this host")]
    NotRouted,
    /// The second rail's own wish, or its search, found nothing.
    #[error("the second rail: {0}")]
    Choose(#[from] ChooseError),
}

/// No rail, or not two, could be paired.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum PairError {
    /// The peer's offer and the routes do not belong together; the driver's fault.
    #[error("{offered} rails are offered and {routes} routes were looked up")]
    Routes {
        /// Rails of the offer.
        offered: usize,
        /// Routes given.
        routes: usize,
    },
    /// No local rail reaches any of the peer's.
    #[error(transparent)]
    Choose(#[from] ChooseError),
    /// Two were asked for.
    #[error(
        "two rails are asked for, and there is one: {0}; METRALE_EXPERT_DUAL_RAIL=0 makes do with \
         it"
    )]
    TwoWanted(OneRail),
    /// A rail is up or about to be, and there is none beside it.
    #[error("there is no rail beside the other: {0}")]
    NoneBeside(OneRail),
}

/// The rails of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pairing {
    /// One or two pairs.
    pub pairs: Vec<RailPair>,
    /// Why there is no second one, if there is none.
    pub one_rail: Option<OneRail>,
}

impl fmt::Display for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, pair) in self.pairs.iter().enumerate() {
            let comma = if number == 0 { "" } else { " | " };
            write!(f, "{comma}rail {number} {pair}")?;
        }
        match &self.one_rail {
            Some(why) => write!(f, " | one rail: {why}"),
            None => Ok(()),
        }
    }
}

impl OfferedRail {
    /// The peer's end, as a local rail is chosen for it.
    #[must_use]
    pub fn target(&self) -> Target {
        Target { link_layer: self.link_layer, gid: self.gid, lid: self.lid }
    }

    /// The names under which two rails are one.
    #[must_use]
    pub fn identity(&self) -> RailIdentity {
        RailIdentity { node_guid: self.node_guid, port: self.port, gid: self.gid }
    }
}

/// A local end for an offered rail.
struct Way<'a> {
    offered: usize,
    survey: &'a Survey,
    candidate: &'a Candidate,
}

impl Way<'_> {
    fn pair(&self, offered: &[OfferedRail], wish: &Wish) -> RailPair {
        let local = self.survey.choice(self.candidate, wish);
        RailPair { offered: offered[self.offered].clone(), local }
    }

    fn spec(&self) -> &RailSpec {
        &self.candidate.spec
    }

    fn routed(&self) -> Routed {
        self.candidate.rank.routed
    }
}

/// Pairs the peer's rails with local ones.
///
/// `routes` has, for each offered rail, the way that the kernel would send to it, where that is
/// known.
///
/// # Errors
/// [`PairError`]: no rail at all, or one where [`DualRail::Two`] was asked for.
pub fn pair(
    offered: &[OfferedRail],
    devices: &[DeviceFacts],
    routes: &[Option<KernelRoute>],
    wishes: &RailWishes,
) -> Result<Pairing, PairError> {
    let pairing = pair_any(offered, devices, routes, wishes)?;
    match pairing.one_rail {
        Some(why) if wishes.dual == DualRail::Two => Err(PairError::TwoWanted(why)),
        one_rail => Ok(Pairing { one_rail, ..pairing }),
    }
}

/// As [`pair`], and content with one rail where two are asked for.
fn pair_any(
    offered: &[OfferedRail],
    devices: &[DeviceFacts],
    routes: &[Option<KernelRoute>],
    wishes: &RailWishes,
) -> Result<Pairing, PairError> {
    if offered.is_empty() || routes.len() != offered.len() {
        return Err(PairError::Routes { offered: offered.len(), routes: routes.len() });
    }
    let (distinct, same) = distinct(offered);
    let surveys = |wish: &Wish| surveys(&distinct, offered, devices, routes, wish);
    let [wish1, wish2] = &wishes.rails;
    let surveys1 = surveys(wish1);
    let firsts = ways(&surveys1);
    let Some(first) = firsts.first() else {
        return Err(no_way(&surveys1, devices, Asker::Rail1, wish1).into());
    };
    let surveys2 = surveys(wish2);
    let seconds = ways(&surveys2);
    let second = match (wishes.dual, distinct.len(), same) {
        (DualRail::One, ..) => Err(OneRail::Wished),
        (_, 1, Some((one, other))) => Err(OneRail::OnePeerRail {
            first: offered[one].device.clone(),
            second: offered[other].device.clone(),
        }),
        (_, 1, None) => Err(OneRail::PeerOffersOne),
        _ if seconds.is_empty() => Err(no_way(&surveys2, devices, Asker::Rail2, wish2).into()),
        _ => two(&firsts, &seconds, wishes.ask_for_two()),
    };
    Ok(match second {
        Ok((first, second)) => {
            let pairs = vec![first.pair(offered, wish1), second.pair(offered, wish2)];
            Pairing { pairs, one_rail: None }
        }
        Err(why) => Pairing { pairs: vec![first.pair(offered, wish1)], one_rail: Some(why) },
    })
}

/// This host's GIDs judged for each of the offered rails at `distinct`, which are not empty.
fn surveys(
    distinct: &[usize],
    offered: &[OfferedRail],
    devices: &[DeviceFacts],
    routes: &[Option<KernelRoute>],
    wish: &Wish,
) -> Vec<(usize, Survey)> {
    let survey = |at: usize| {
        (at, Survey::of(devices, wish, Some(&offered[at].target()), routes[at].as_ref()))
    };
    distinct.iter().map(|at| survey(*at)).collect()
}

/// Why none of `surveys` has anything usable.
fn no_way(
    surveys: &[(usize, Survey)],
    devices: &[DeviceFacts],
    asker: Asker,
    wish: &Wish,
) -> ChooseError {
    let error = |(_, survey): &(usize, Survey)| survey.error(devices, asker, wish);
    surveys.first().map_or(ChooseError::NoDevice, error)
}

/// The offered rails without those that are one with an earlier one, and the first such two.
fn distinct(offered: &[OfferedRail]) -> (Vec<usize>, Option<(usize, usize)>) {
    let (mut distinct, mut same) = (Vec::<usize>::new(), None);
    for (at, rail) in offered.iter().enumerate() {
        let identity = rail.identity();
        match distinct.iter().find(|one| offered[**one].identity().is_same(&identity)) {
            Some(one) => same = same.or(Some((*one, at))),
            None => distinct.push(at),
        }
    }
    (distinct, same)
}

/// Every offered rail with the best GID of every local port for it, best first.
fn ways(surveys: &[(usize, Survey)]) -> Vec<Way<'_>> {
    let mut all: Vec<Way<'_>> = Vec::new();
    for (offered, survey) in surveys {
        let from = all.len();
        for candidate in &survey.usable {
            let port = |spec: &RailSpec| (spec.device.clone(), spec.port);
            let is_known = |way: &Way<'_>| port(way.spec()) == port(&candidate.spec);
            if !all[from..].iter().any(is_known) {
                all.push(Way { offered: *offered, survey, candidate });
            }
        }
    }
    all.sort_by_key(|way| {
        let rank = way.candidate.rank;
        (rank.routed, rank.is_ipv4_link_local, rank.is_ipv6, way.offered, rank)
    });
    all
}

/// The best two that go together: those whose worse one has the better route, then the first ones.
fn two<'a, 'b>(
    firsts: &'a [Way<'b>],
    seconds: &'a [Way<'b>],
    is_two_wanted: bool,
) -> Result<(&'a Way<'b>, &'a Way<'b>), OneRail> {
    let is_two = |first: &Way<'_>, second: &Way<'_>| {
        let identity = second.spec().identity();
        first.offered != second.offered && !first.spec().identity().is_same(&identity)
    };
    let both = firsts.iter().flat_map(|first| seconds.iter().map(move |second| (first, second)));
    let best = both
        .filter(|(first, second)| is_two(first, second))
        .min_by_key(|(first, second)| first.routed().max(second.routed()));
    match (best, firsts.first()) {
        // Unasked, a rail that the kernel would not use is not tried: it would cost every
        // connection a time-out.
        (Some((first, second)), _)
            if !is_two_wanted && first.routed().max(second.routed()) >= Routed::Elsewhere =>
        {
            Err(OneRail::NotRouted)
        }
        (Some(two), _) => Ok(two),
        (None, Some(first)) => {
            let RailSpec { device, port, .. } = first.spec().clone();
            Err(OneRail::OneLocalRail { device, port })
        }
        (None, None) => Err(OneRail::PeerOffersOne),
    }
}

/// The rails that a peer can serve at the moment, and what stands against the others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RailsNow {
    /// The rails, in the order of the wishes, or of devices and ports.
    pub rails: Vec<Choice>,
    /// Why wished rails, or all, are missing, for each.
    pub missing: Vec<ServeError>,
}

/// The rails that a peer can serve at the moment: those of the wished ones that there are, or one for
/// each active port.
///
/// # Errors
/// More than [`MAX_RAILS`] are wished for, or one twice.
pub fn rails_now(devices: &[DeviceFacts], wishes: &[Wish]) -> Result<RailsNow, ServeError> {
    if wishes.len() > MAX_RAILS {
        return Err(ServeError::TooMany { found: wishes.len() });
    }
    let mut now = RailsNow::default();
    for (at, wish) in wishes.iter().enumerate() {
        if wishes[..at].contains(wish) {
            let name = wish.device.clone().unwrap_or_default();
            return Err(ServeError::OneRail { first: name.clone(), second: name });
        }
        let choice = match choose(devices, Asker::Peer, wish, None, None) {
            Ok(choice) => choice,
            Err(error) => {
                now.missing.push(error.into());
                continue;
            }
        };
        let identity = choice.spec.identity();
        match now.rails.iter().find(|rail| rail.spec.identity().is_same(&identity)) {
            Some(one) => {
                let (first, second) = (one.spec.to_string(), choice.spec.to_string());
                now.missing.push(ServeError::OneRail { first, second });
            }
            None => now.rails.push(choice),
        }
    }
    if !wishes.is_empty() {
        return Ok(now);
    }
    let nothing = Wish::default();
    let survey = Survey::of(devices, &nothing, None, None);
    for candidate in &survey.usable {
        let identity = candidate.spec.identity();
        let is_known = now.rails.iter().any(|rail| rail.spec.identity().is_same(&identity));
        if !is_known && now.rails.len() < MAX_RAILS {
            now.rails.push(survey.choice(candidate, &nothing));
        }
    }
    if now.rails.is_empty() {
        now.missing.push(survey.error(devices, Asker::Peer, &nothing).into());
    }
    Ok(now)
}

/// The rails that a peer serves: all of the wished ones, or one for each active port.
///
/// # Errors
/// One of the wishes cannot be kept, two are one rail, there are more than [`MAX_RAILS`], or nothing
/// is usable.
pub fn serve_rails(devices: &[DeviceFacts], wishes: &[Wish]) -> Result<Vec<Choice>, ServeError> {
    let RailsNow { rails, missing } = rails_now(devices, wishes)?;
    missing.into_iter().next().map_or(Ok(rails), Err)
}

/// A peer cannot have the rails it should.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum ServeError {
    /// No rail, or not the wished one.
    #[error(transparent)]
    Choose(#[from] ChooseError),
    /// Two flags name one rail.
    #[error("--rail names one rail twice: {first} and {second} share a port or an address")]
    OneRail {
        /// The first.
        first: String,
        /// The second.
        second: String,
    },
    /// More flags than rails are allowed.
    #[error("--rail is given {found} times, allowed are {MAX_RAILS}")]
    TooMany {
        /// How many.
        found: usize,
    },
}

#[cfg(test)]
#[path = "pairing_tests.rs"]
mod tests;
