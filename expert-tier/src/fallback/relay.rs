//! How a request goes from one way to the next.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use gpu_sys::limits::Registrations;

use super::FallbackOptions;
use super::way::{Way, goes_on};
use crate::account::count_fallback;
use crate::arena::{ArenaError, ExpertArena, Free, Slot};
use crate::error::{FetchError, FetchFailure, TriedWay, WayEnd};
use crate::key::ExpertKey;
use crate::tier::{CompletionQueue, ExpertTier, FetchRequest, Outcome, Relay, Ticket};

/// How many cancelled requests are remembered. A request is between two ways, known to neither,
/// for as long as it takes to hand it over; one that is cancelled just then is found here.
const CANCELS: usize = 1024;

pub(super) struct Shared {
    pub(super) ways: Vec<Way>,
    pub(super) options: FallbackOptions,
    /// The last to be cancelled, oldest first.
    cancels: Mutex<VecDeque<Ticket>>,
    /// For ways that are opened later.
    arenas: Mutex<Vec<ExpertArena>>,
}

impl Shared {
    pub(super) fn new(ways: Vec<Way>, options: FallbackOptions) -> Self {
        let cancels = Mutex::new(VecDeque::with_capacity(CANCELS));
        Self { ways, options, cancels, arenas: Mutex::default() }
    }

    /// Logs and counts what could not be opened, and where requests go instead.
    pub(super) fn say_what_is_not_there(&self) {
        for (at, way) in self.ways.iter().enumerate().filter(|(_, way)| way.tier().is_none()) {
            let mut later = self.ways[at + 1..].iter();
            let to = later.find(|way| way.tier().is_some()).map_or("none", |way| way.kind.name());
            count_fallback(way.kind, "not_opened");
            tracing::warn!(
                backend = way.kind.name(),
                to,
                reason = way.last(),
                "a way to the experts is not there"
            );
        }
    }

    /// Requests begin at way `at`, which is not the first.
    pub(super) fn passed_by(&self, at: usize, requests: u64) {
        self.ways[..at].iter().for_each(|way| way.pass_by(requests));
    }

    /// What all ways together register: each may be needed while the others have what they had.
    pub(super) fn registrations(&self) -> Registrations {
        let mut all = Registrations::default();
        for it in self.ways.iter().filter_map(Way::tier).map(|tier| tier.registrations()) {
            all.devices += it.devices;
            all.grant_bytes = all.grant_bytes.saturating_add(it.grant_bytes);
            all.locked_bytes = all.locked_bytes.saturating_add(it.locked_bytes);
            all.registered_bytes = all.registered_bytes.saturating_add(it.registered_bytes);
        }
        all
    }

    /// Names the arena to every way. One that does not take it is passed by when a request fails there.
    pub(super) fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaError> {
        // Before any way has it: one that opens meanwhile finds it in the list, or is asked here.
        let is_listed = self.list(arena);
        let (mut taken, mut refused) = (false, None);
        for way in &self.ways {
            let Some(tier) = way.tier() else { continue };
            match tier.use_arena(arena) {
                Ok(()) => taken = true,
                Err(error) => {
                    tracing::warn!(backend = way.kind.name(), %error, "a way does not take the arena");
                    refused.get_or_insert(error);
                }
            }
        }
        if let (Some(error), false) = (refused, taken) {
            if is_listed {
                let mut arenas = lock(&self.arenas);
                let unlisted: Vec<_> = arenas.extract_if(.., |it| it.is(arena)).collect();
                drop(arenas);
                drop(unlisted);
            }
            return Err(error);
        }
        Ok(())
    }

    /// Lists `arena` for ways that are not open yet; says whether it did and it was not listed.
    fn list(&self, arena: &ExpertArena) -> bool {
        let mut arenas = lock(&self.arenas);
        let is_new = self.ways.iter().any(|way| way.tier().is_none())
            && !arenas.iter().any(|it| it.is(arena));
        if is_new {
            arenas.push(arena.clone());
        }
        is_new
    }

    /// Way `at` is there now.
    pub(super) fn opened(&self, at: usize, tier: Arc<dyn ExpertTier>) {
        let mut named: Vec<ExpertArena> = Vec::new();
        loop {
            let arenas = lock(&self.arenas);
            let is_named = |arena: &&ExpertArena| named.iter().any(|it| it.is(arena));
            let Some(arena) = arenas.iter().find(|arena| !is_named(arena)).cloned() else {
                // Under the lock, so that no arena is listed between this look and the opening. The
                // tier itself does not end under it, where the way is closed.
                self.ways[at].open_with(Arc::clone(&tier));
                break;
            };
            drop(arenas);
            if let Err(error) = tier.use_arena(&arena) {
                tracing::warn!(backend = self.ways[at].kind.name(), %error,
                    "a way does not take the arena");
            }
            named.push(arena);
        }
        self.ways[at].mend();
    }

    pub(super) fn cancel(&self, ticket: Ticket) {
        let mut cancels = lock(&self.cancels);
        if cancels.len() == CANCELS {
            cancels.pop_front();
        }
        cancels.push_back(ticket);
        drop(cancels);
        // In the order in which a request goes from one to the next.
        self.ways.iter().filter_map(Way::tier).for_each(|tier| tier.cancel(ticket));
    }

    fn is_cancelled(&self, ticket: Ticket) -> bool {
        lock(&self.cancels).contains(&ticket)
    }

    /// Where a request goes that way `at` failed.
    fn next(&self, at: usize, ticket: Ticket) -> Option<(usize, Arc<dyn ExpertTier>)> {
        let now = Instant::now();
        let mut resort = None;
        for (next, way) in self.ways.iter().enumerate().skip(at + 1) {
            let Some(tier) = way.tier() else { continue };
            if !way.is_down() || way.may_try(ticket, tier.healthy(), now) {
                return Some((next, tier));
            }
            resort = resort.or(Some((next, tier)));
        }
        // All of them are down: better one of these than none.
        resort
    }
}

/// A request's stay at one way, or all such stays that are its first.
pub(super) struct Leg {
    shared: Arc<Shared>,
    at: usize,
    /// What became of it at the ways before.
    tried: Mutex<Vec<(usize, Box<FetchError>)>>,
}

impl Leg {
    /// For every request that begins at way `at`.
    pub(super) fn first(shared: &Arc<Shared>, at: usize) -> Self {
        Self { shared: Arc::clone(shared), at, tried: Mutex::default() }
    }

    /// Hands a request that has failed here to the next way.
    fn hand_on(&self, home: &CompletionQueue, mut hop: Hop, (next, tier): Next) {
        let (shared, way) = (&self.shared, &self.shared.ways[self.at]);
        count_fallback(way.kind, hop.error.name());
        if hop.is_news {
            tracing::warn!(backend = way.kind.name(), to = shared.ways[next].kind.name(),
                reason = %hop.error, "requests go another way");
        }
        let (ticket, key) = (hop.ticket, hop.key);
        if shared.is_cancelled(ticket) {
            let failure = FetchFailure::new(FetchError::Cancelled { key }, hop.slot);
            return home.push_outcome(ticket, key, Outcome::Failed(failure));
        }
        hop.tried.push((self.at, hop.error));
        let leg = Self { shared: Arc::clone(shared), at: next, tried: Mutex::new(hop.tried) };
        let mut batch = vec![FetchRequest::again(ticket, key, hop.slot)];
        tier.submit(&mut batch, &home.through(Arc::new(leg)));
        // Whoever has cancelled it in between did not find it at either way.
        if shared.is_cancelled(ticket) {
            tier.cancel(ticket);
        }
    }

    /// What a request has come to that failed here last; `is_end` where the slot is with it, so
    /// that another way would have been tried.
    fn sum_up(
        &self,
        key: ExpertKey,
        tried: Vec<(usize, Box<FetchError>)>,
        error: Box<FetchError>,
        is_end: bool,
    ) -> Box<FetchError> {
        let ways = &self.shared.ways;
        let named = if is_end { ways.len() } else { self.at + 1 };
        if named == 1 {
            return error;
        }
        let mut failed = tried;
        failed.push((self.at, error));
        let tried = ways[..named].iter().enumerate().map(|(at, way)| {
            let mine = failed.iter().position(|(failed_at, _)| *failed_at == at);
            let end = match mine {
                Some(position) => WayEnd::Failed(failed.swap_remove(position).1),
                None => WayEnd::PassedBy(way.last()),
            };
            TriedWay { backend: way.kind, end }
        });
        Box::new(FetchError::Ways { key, tried: tried.collect() })
    }
}

type Next = (usize, Arc<dyn ExpertTier>);

/// A request between two ways.
struct Hop {
    ticket: Ticket,
    key: ExpertKey,
    slot: Slot<Free>,
    error: Box<FetchError>,
    tried: Vec<(usize, Box<FetchError>)>,
    is_news: bool,
}

impl Relay for Leg {
    fn relay(&self, ticket: Ticket, key: ExpertKey, outcome: Outcome, home: &CompletionQueue) {
        let way = &self.shared.ways[self.at];
        let FetchFailure { error, slot } = match outcome {
            Outcome::Failed(failure) => failure,
            came => {
                way.worked();
                return home.push_outcome(ticket, key, came);
            }
        };
        let is_news = way.failed(ticket, &error);
        if !goes_on(&error) {
            return home.push_outcome(ticket, key, Outcome::Failed(FetchFailure { error, slot }));
        }
        let tried = std::mem::take(&mut *lock(&self.tried));
        // Without its slot, somebody may still write there: it ends here.
        let next = slot.is_some().then(|| self.shared.next(self.at, ticket)).flatten();
        match (slot, next) {
            (Some(slot), Some(next)) => {
                self.hand_on(home, Hop { ticket, key, slot, error, tried, is_news }, next);
            }
            (slot, _) => {
                let error = self.sum_up(key, tried, error, slot.is_some());
                home.push_outcome(ticket, key, Outcome::Failed(FetchFailure { error, slot }));
            }
        }
    }
}

/// No state is left half-changed by the code under these locks short of a failed allocation.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
