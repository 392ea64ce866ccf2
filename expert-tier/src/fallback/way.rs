//! One way of several: its backend, once there, and whether requests pass it by.
//!
//! Its lock is held for bookkeeping alone, never while a backend is called: completions arrive on
//! threads that may hold their backend's lock.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use metrics::{Counter, counter};
use railset::Backoff;
use rand::Rng;

use super::FallbackOptions;
use crate::error::FetchError;
use crate::tier::{ExpertTier, Ticket, TierKind};
use crate::wire::Status;

/// Nothing is wrong.
const UP: u8 = 0;
/// It has failed since it last worked; requests still go there.
const TROUBLED: u8 = 1;
/// Requests pass it by.
const DOWN: u8 = 2;

pub(super) struct Way {
    pub(super) kind: TierKind,
    pub(super) deadline: Duration,
    pub(super) bound: Duration,
    place: RwLock<Place>,
    /// `UP`, `TROUBLED` or `DOWN`, for those who only glance; changed under the lock of `trouble`.
    standing: AtomicU8,
    trouble: Mutex<Trouble>,
    streak: u32,
    /// A way that does not say that it is healthy is tried this often.
    seldom: Duration,
    /// Requests that went elsewhere in this outage, for the log.
    elsewhere: AtomicU64,
    passed_by: Counter,
}

#[derive(Default)]
struct Place {
    tier: Option<Arc<dyn ExpertTier>>,
    closed: bool,
}

/// What is wrong with a way, since when, and when it is tried again.
struct Trouble {
    /// Failures since it last worked.
    streak: u32,
    /// The beginning of the outage.
    since: Option<Instant>,
    last: String,
    backoff: Backoff,
    /// The next try where it says that it is healthy, and where it does not.
    not_before: Instant,
    in_any_case: Instant,
    attempt: Option<Attempt>,
    /// Reasons that concern single records, each logged once.
    said: Vec<&'static str>,
}

/// The request that tries a way which all others pass by.
struct Attempt {
    ticket: Ticket,
    was_healthy: bool,
}

/// What a failure says of its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sign {
    /// It does not work.
    Broken,
    /// It works, and this record does not come by it.
    Works,
    /// Nothing.
    Nothing,
}

/// Whether a request that ended so may go on to the next way.
pub(super) fn goes_on(error: &FetchError) -> bool {
    match error {
        FetchError::Deadline { .. }
        | FetchError::Unreachable { .. }
        | FetchError::Ways { .. }
        | FetchError::NotResident { .. }
        | FetchError::Mismatch { .. }
        | FetchError::Peer { .. }
        | FetchError::Store(_) => true,
        #[cfg(metrale_rdma_verbs)]
        FetchError::Register { .. } | FetchError::Grant { .. } => true,
        #[cfg(feature = "unverified")]
        FetchError::Unchecked { .. } => false,
        FetchError::Key(_)
        | FetchError::SlotTooSmall { .. }
        | FetchError::Cancelled { .. }
        | FetchError::Closed { .. } => false,
    }
}

fn sign(error: &FetchError) -> Sign {
    match error {
        FetchError::Deadline { .. } | FetchError::Unreachable { .. } => Sign::Broken,
        FetchError::Peer { status: Status::Busy | Status::Draining, .. } => Sign::Broken,
        // Every fetch of this arena fails so, until somebody raises a limit.
        #[cfg(metrale_rdma_verbs)]
        FetchError::Register { .. } | FetchError::Grant { .. } => Sign::Broken,
        FetchError::Peer { .. } | FetchError::NotResident { .. } | FetchError::Mismatch { .. } => {
            Sign::Works
        }
        _ => Sign::Nothing,
    }
}

impl Way {
    pub(super) fn new(
        kind: TierKind,
        deadline: Duration,
        bound: Duration,
        options: &FallbackOptions,
    ) -> Self {
        let now = Instant::now();
        let trouble = Trouble {
            streak: 0,
            since: None,
            last: String::new(),
            backoff: Backoff::new(options.backoff),
            not_before: now,
            in_any_case: now,
            attempt: None,
            said: Vec::new(),
        };
        Self {
            kind,
            deadline,
            bound,
            place: RwLock::default(),
            standing: AtomicU8::new(UP),
            trouble: Mutex::new(trouble),
            streak: options.streak.max(1),
            seldom: Duration::from_millis(options.backoff.most_ms.into()),
            elsewhere: AtomicU64::new(0),
            passed_by: counter!("metrale_fallbacks_total", "backend" => kind.name(),
                "reason" => "down"),
        }
    }

    // ---- its backend ----

    pub(super) fn tier(&self) -> Option<Arc<dyn ExpertTier>> {
        self.place.read().unwrap_or_else(PoisonError::into_inner).tier.clone()
    }

    /// It is there; dropped where the whole has been closed meanwhile.
    pub(super) fn open_with(&self, tier: Arc<dyn ExpertTier>) {
        let mut place = self.place.write().unwrap_or_else(PoisonError::into_inner);
        if place.closed {
            drop(place);
            drop(tier);
        } else {
            place.tier = Some(tier);
        }
    }

    /// Closes the backend, which ends what it still has.
    pub(super) fn close(&self) {
        let mut place = self.place.write().unwrap_or_else(PoisonError::into_inner);
        place.closed = true;
        let tier = place.tier.take();
        // Without the lock: its threads may be about to look here.
        drop(place);
        drop(tier);
    }

    /// It could not be opened; says whether the reason is news.
    pub(super) fn not_there(&self, why: String) -> bool {
        let mut trouble = self.lock();
        trouble.since.get_or_insert_with(Instant::now);
        let news = trouble.last != why;
        trouble.last = why;
        news
    }

    /// The last reason of a failure.
    pub(super) fn last(&self) -> String {
        self.lock().last.clone()
    }

    // ---- its state ----

    pub(super) fn is_down(&self) -> bool {
        self.standing.load(Ordering::Relaxed) == DOWN
    }

    /// Requests go elsewhere for this way's sake.
    pub(super) fn pass_by(&self, requests: u64) {
        self.passed_by.increment(requests);
        self.elsewhere.fetch_add(requests, Ordering::Relaxed);
    }

    /// Whether the request `ticket` is the one to try this way again.
    pub(super) fn may_try(&self, ticket: Ticket, was_healthy: bool, now: Instant) -> bool {
        let mut trouble = self.lock();
        let due = if was_healthy { trouble.not_before } else { trouble.in_any_case };
        let may = trouble.attempt.is_none() && now >= due;
        if may {
            trouble.attempt = Some(Attempt { ticket, was_healthy });
        }
        may
    }

    /// A record came by it.
    pub(super) fn worked(&self) {
        if self.standing.load(Ordering::Relaxed) != UP {
            self.mend();
        }
    }

    /// A request failed there; says whether that is to be logged.
    pub(super) fn failed(&self, ticket: Ticket, error: &FetchError) -> bool {
        match sign(error) {
            Sign::Broken => self.broke(ticket, error),
            Sign::Works => {
                self.worked();
                self.is_first(error)
            }
            Sign::Nothing => {
                // Another request may try it at once.
                self.lock().attempt.take_if(|attempt| attempt.ticket == ticket);
                goes_on(error) && self.is_first(error)
            }
        }
    }

    /// Whether no record has failed for this reason before.
    fn is_first(&self, error: &FetchError) -> bool {
        let mut trouble = self.lock();
        let is_first = !trouble.said.contains(&error.name());
        if is_first {
            trouble.said.push(error.name());
        }
        is_first
    }

    fn broke(&self, ticket: Ticket, error: &FetchError) -> bool {
        let now = Instant::now();
        let mut trouble = self.lock();
        trouble.streak = trouble.streak.saturating_add(1);
        trouble.last = error.to_string();
        let is_news = trouble.since.is_none();
        trouble.since.get_or_insert(now);
        if is_news {
            self.elsewhere.store(0, Ordering::Relaxed);
        }
        self.elsewhere.fetch_add(1, Ordering::Relaxed);
        let tried = trouble.attempt.take_if(|attempt| attempt.ticket == ticket);
        let was_down = self.is_down();
        let goes_down = !was_down && trouble.streak >= self.streak;
        self.standing.store(if was_down || goes_down { DOWN } else { TROUBLED }, Ordering::Relaxed);
        // A try while the way itself says that it does not work shows nothing new, and does not put
        // off the one when it says that it does.
        if goes_down || tried.as_ref().is_some_and(|attempt| attempt.was_healthy) {
            trouble.not_before = now + trouble.backoff.failed(rand::rng().next_u32());
        }
        if goes_down || tried.is_some() {
            trouble.in_any_case = trouble.not_before.max(now + self.seldom);
        }
        is_news
    }

    /// The outage is over.
    pub(super) fn mend(&self) {
        let mut trouble = self.lock();
        self.standing.store(UP, Ordering::Relaxed);
        trouble.streak = 0;
        trouble.attempt = None;
        trouble.backoff.succeeded();
        let Some(since) = trouble.since.take() else { return };
        drop(trouble);
        tracing::info!(
            backend = self.kind.name(),
            outage_ms = since.elapsed().as_millis(),
            elsewhere = self.elsewhere.swap(0, Ordering::Relaxed),
            "a way works again: requests go there"
        );
    }

    /// No state is left half-changed by the code under this lock short of a failed allocation.
    fn lock(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
