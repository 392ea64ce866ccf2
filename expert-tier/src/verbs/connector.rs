//! Sets up the rails that are missing: a thread for each of the client's two.
//!
//! An attempt waits for the peer, at most `connect` for each of connecting and agreeing and `deadline`
//! for trying the rail. So each rail has a thread of its own: an attempt at a rail whose way is dead
//! delays no attempt at the other one, and the thread that looks after the rails that work waits for
//! neither.

use std::sync::Arc;
use std::time::{Duration, Instant};

use railset::facts::{DeviceFacts, PortFacts, PortState};
use railset::handshake::HandshakeError;
use railset::pairing::{DualRail, OneRail, OneWanted, PairError, RailEnds};
use railset::{Backoff, BackoffSettings};
use rand::Rng;

use super::OpenError;
use super::claims::{Blame, MOST_RAILS};
use super::desk::Desk;
use super::rail::Rail;
use super::session::{self, Opened, Pairs};
use crate::tcp::Dialler;

/// How often a connector looks whether its rail is missing.
const LOOK: Duration = Duration::from_millis(20);

/// How the other rail is while one is missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Others {
    /// It carries what there is.
    Up,
    /// Nothing carries anything.
    None,
}

impl Desk {
    /// How the others are, if rail `slot` should be there and is not. One that is not quite gone is still
    /// there.
    fn missing(&self, slot: usize) -> Option<Others> {
        let state = self.lock();
        let is_up = state.rails.iter().any(Rail::takes_more);
        // A peer that offers one rail now may offer two when its other port comes up.
        let wanted = if self.options.wishes.dual == DualRail::One { 1 } else { MOST_RAILS };
        let others = if is_up { Others::Up } else { Others::None };
        (slot < wanted && !state.has_slot(slot)).then_some(others)
    }

    /// Whether this host has an active port that no rail uses. Without one, asking the peer for a rail
    /// beside those that are up is in vain.
    fn has_spare_port(&self) -> bool {
        let Ok(devices) = self.devices.facts() else { return true };
        let state = self.lock();
        let is_used = |device: &DeviceFacts, port: &PortFacts| {
            let mut specs = state.rails.iter().map(Rail::spec);
            specs.any(|spec| spec.device == device.name && spec.port == port.number)
        };
        devices.iter().any(|device| {
            let mut ports = device.ports.iter();
            ports.any(|port| port.state == PortState::Active && !is_used(device, port))
        })
    }

    /// What rail `slot` may be.
    pub(super) fn wanted(&self, slot: usize) -> OneWanted {
        let state = self.lock();
        state.claims.wanted(slot, state.rails.iter().map(Rail::ends))
    }

    /// Claims `ends` for rail `slot` until it is up or cannot be had. False where they are taken.
    /// `one_rail` is why the two ends have no second rail.
    pub(super) fn claim(&self, slot: usize, ends: RailEnds, one_rail: Option<&OneRail>) -> bool {
        let mut state = self.lock();
        let possible = possible(one_rail, self.options.wishes.dual);
        state.rails_wanted = state.rails_wanted.max(possible);
        let up: Vec<_> = state.rails.iter().map(Rail::ends).collect();
        state.claims.claim(slot, ends, up.into_iter())
    }
}

/// Rails that two ends can have: two where the user and the peer have them, even where one of this
/// host's ports is down at the moment.
fn possible(one_rail: Option<&OneRail>, dual: DualRail) -> usize {
    match one_rail {
        _ if dual == DualRail::One => 1,
        Some(OneRail::Wished | OneRail::PeerOffersOne | OneRail::OnePeerRail { .. }) => 1,
        // Of these the named ones may change when a port comes up.
        None
        | Some(
            OneRail::Choose(_)
            | OneRail::NotRouted
            | OneRail::OneLocalRail { .. }
            | OneRail::NamedForSecond { .. },
        ) => 2,
    }
}

/// Sets up rail `slot`: whichever `open` brings. Says why there can be no second one, if there can be
/// none.
fn set_up(
    desk: &Arc<Desk>,
    slot: usize,
    open: impl FnOnce() -> Result<Opened, OpenError>,
) -> Result<Option<OneRail>, OpenError> {
    match open() {
        Ok(opened) => {
            let one_rail = opened.one_rail.clone();
            desk.rail_up(opened);
            Ok(one_rail)
        }
        Err(error) => {
            desk.dial_failed(slot, &error.to_string(), blame(&error));
            Err(error)
        }
    }
}

/// Sets up the first rail that can be had, over `socket` or by `dialler`, and a second one where there
/// can be one. A rail that is missing then is set up later, unless two are asked for.
pub(super) fn begin(
    desk: &Arc<Desk>,
    socket: std::net::TcpStream,
    dialler: &Dialler,
) -> Result<(), OpenError> {
    let (peer, wishes) = (&desk.options.peer, &desk.options.wishes);
    let one_rail = match set_up(desk, 0, || session::open(desk, socket, 0, Pairs::Any)) {
        Ok(one_rail) => one_rail,
        Err(error) if wishes.dual == DualRail::Two => return Err(error),
        Err(error) => {
            // The rail that is missing then has just been tried, or cannot be had.
            return instead(desk, dialler, error);
        }
    };
    let two_wanted = wishes.dual == DualRail::Two;
    match one_rail {
        _ if wishes.dual == DualRail::One => Ok(()),
        Some(why) if two_wanted => {
            let source = Box::new(PairError::TwoWanted(why).into());
            Err(OpenError::Agree { peer: peer.clone(), source })
        }
        Some(why @ (OneRail::PeerOffersOne | OneRail::OnePeerRail { .. }))
            if !wishes.ask_for_two() =>
        {
            tracing::info!(%peer, reason = %why, "no second rail");
            Ok(())
        }
        Some(why) => {
            tracing::warn!(%peer, reason = %why, "no second rail; trying again");
            Ok(())
        }
        None => match set_up(desk, 1, || session::dial(desk, dialler, 1, Pairs::Any)) {
            Err(error) if two_wanted => Err(error),
            Err(error) => {
                tracing::warn!(%peer, reason = %error, "no second rail; trying again");
                Ok(())
            }
            Ok(_) => Ok(()),
        },
    }
}

/// Sets up what can be had instead of rail 0, which failed with `first`: rail 1, or rail 0 between other
/// ends.
fn instead(desk: &Arc<Desk>, dialler: &Dialler, first: OpenError) -> Result<(), OpenError> {
    let slots: &[usize] = if desk.options.wishes.dual == DualRail::One { &[0] } else { &[1, 0] };
    let mut second = None;
    for &slot in slots {
        match set_up(desk, slot, || session::dial(desk, dialler, slot, Pairs::Untried)) {
            Ok(_) => {
                let peer = &desk.options.peer;
                tracing::warn!(%peer, reason = %first, "no first rail; trying again");
                return Ok(());
            }
            // A peer that cannot be reached any more cannot be reached for another rail.
            Err(OpenError::Dial(_)) => break,
            // The first error says more than that there is nothing else.
            Err(error) if is_nothing_else(&error) => {}
            Err(error) => {
                // Two rails in a row for which the peer fell silent: a third would cost its bound, too.
                let is_silent = matches!(error, OpenError::Io { .. });
                second = Some(error);
                if is_silent {
                    break;
                }
            }
        }
    }
    match second {
        Some(second) if second.to_string() != first.to_string() => {
            Err(OpenError::NeitherRail { first: Box::new(first), second: Box::new(second) })
        }
        _ => Err(first),
    }
}

fn is_nothing_else(error: &OpenError) -> bool {
    match error {
        OpenError::NoOtherPair | OpenError::Taken { .. } | OpenError::Dial(_) => true,
        OpenError::Agree { source, .. } => {
            matches!(**source, HandshakeError::Pair(PairError::NoneBeside(_)))
        }
        _ => false,
    }
}

/// Whether another pair of ends might do better.
fn blame(error: &OpenError) -> Blame {
    match error {
        OpenError::TryOut { .. } | OpenError::Verbs(_) | OpenError::Refused { .. } => Blame::Pair,
        _ => Blame::Other,
    }
}

/// Sets up rail `slot` whenever it is missing, until the backend is closed.
pub(super) fn connect(desk: &Arc<Desk>, dialler: &Dialler, slot: usize) {
    let is_up = desk.has_slot(slot);
    let mut attempts = Attempts::new(desk.options.backoff, is_up, Instant::now());
    while !desk.closing() {
        let Some(others) = desk.missing(slot) else {
            desk.pause(LOOK);
            continue;
        };
        attempts.is_missing(Instant::now(), desk.options.deadline);
        let wait = attempts.due_in(Instant::now(), others, desk.options.absent);
        if !wait.is_zero() {
            desk.pause(wait.min(LOOK));
            continue;
        }
        if others == Others::Up && !attempts.ever_up && !desk.has_spare_port() {
            attempts.failed(Instant::now());
            continue;
        }
        let dial = || session::dial(desk, dialler, slot, Pairs::Any);
        // Counted before the rail carries anything.
        match set_up(desk, slot, || dial().inspect(|_| attempts.count(desk))) {
            Ok(_) => {
                attempts.succeeded(Instant::now());
                desk.complaints.clear(slot);
            }
            Err(error) => {
                attempts.failed(Instant::now());
                complain(desk, slot, &error);
            }
        }
    }
}

/// Says why rail `slot` cannot be had, once for each reason.
fn complain(desk: &Desk, slot: usize, error: &OpenError) {
    let (peer, reason) = (&desk.options.peer, error.to_string());
    if !desk.complaints.is_news(slot, &reason) {
        return;
    }
    if is_nothing_else(error) && !matches!(error, OpenError::Dial(_)) {
        return tracing::debug!(%peer, rail = slot, reason, "no rail; trying again");
    }
    tracing::warn!(%peer, rail = slot, reason, "no rail; trying again");
}

/// Why each rail cannot be had, as it was last said. What has been said of one rail is not said of the
/// other as well: a peer that is gone takes both.
#[derive(Default)]
pub(super) struct Complaints(std::sync::Mutex<[String; MOST_RAILS]>);

impl Complaints {
    fn is_news(&self, slot: usize, reason: &str) -> bool {
        let mut said = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let was_said = said.iter().any(|known| known == reason);
        if let Some(own) = said.get_mut(slot) {
            reason.clone_into(own);
        }
        !was_said
    }

    fn clear(&self, slot: usize) {
        let mut said = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        said.get_mut(slot).into_iter().for_each(String::clear);
    }
}

/// The attempts at one rail, and when the next one is due.
struct Attempts {
    backoff: Backoff,
    /// When the last one failed, or the rail was first missed.
    since: Instant,
    /// What the back-off says to wait from then on.
    wait: Duration,
    /// When the last one succeeded; `None` once the rail is missing.
    up_since: Option<Instant>,
    /// Whether the rail has ever been there.
    ever_up: bool,
}

impl Attempts {
    fn new(backoff: BackoffSettings, is_up: bool, now: Instant) -> Self {
        let mut new = Self {
            backoff: Backoff::new(backoff),
            since: now,
            wait: Duration::ZERO,
            up_since: is_up.then_some(now),
            ever_up: is_up,
        };
        if !is_up {
            new.failed(now);
        }
        new
    }

    /// The rail is missing. One that broke within `deadline` must not be set up in a tight loop.
    fn is_missing(&mut self, now: Instant, deadline: Duration) {
        let Some(since) = self.up_since.take() else { return };
        if now.saturating_duration_since(since) > deadline {
            self.backoff.succeeded();
        }
        self.failed(now);
    }

    fn failed(&mut self, now: Instant) {
        self.since = now;
        self.wait = self.backoff.failed(rand::rng().next_u32());
    }

    fn succeeded(&mut self, now: Instant) {
        (self.up_since, self.ever_up) = (Some(now), true);
    }

    /// An attempt has brought the rail: anew, if it was there before.
    fn count(&self, desk: &Desk) {
        if self.ever_up {
            desk.count_reconnect();
        }
    }

    /// How long the next attempt is to wait. A rail that has never been there beside another is looked
    /// for every `absent`, as long as this host has a port for it; a client that has no rail is in more of a hurry.
    fn due_in(&self, now: Instant, others: Others, absent: Duration) -> Duration {
        let wait = match others {
            Others::Up if !self.ever_up => absent.max(self.wait),
            _ => self.wait,
        };
        wait.saturating_sub(now.saturating_duration_since(self.since))
    }
}

#[cfg(test)]
#[path = "connector_tests.rs"]
mod tests;
