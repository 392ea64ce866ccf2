//! Several ways to one store: where the first has none of its own left, the next is tried, and the
//! first again once it works.
//!
//! A request that fails on one way goes on to the next with its slot, if the failure gave the slot
//! back: one that somebody may still write is never handed on, and the request ends there. What
//! concerns the request alone (a key that is not there, a slot too small, a request that was
//! cancelled) ends it at once.
//!
//! Failures that concern the way (a deadline, no connection) begin an outage. After
//! [`streak`](FallbackOptions::streak) of them without a success, new requests pass the way by, but
//! for one at a time that tries it again: with back-off while the way says that it is healthy, and
//! rarely while it says that it is not. The first success ends the outage. Each outage is logged at
//! its beginning and its end, and every request that goes another way is counted in
//! `metrale_fallbacks_total`.
//!
//! All ways are opened at the start and kept open, so that a wrong store is refused then and not in
//! the middle of an outage, and so that an outage costs no opening. One that is not there yet, as a
//! peer that is down, is opened by a thread that ends when none is left to open.
//!
//! Completions of whichever way land on the caller's own queue, seen by a relay on the way there: a
//! request costs no hand-over to another thread, and, while the first way works, no allocation and
//! no lock but for a glance.
//!
//! Each way bounds what it has by its own clocks: a request that waits in a way's queue does not age
//! while that way brings records. A request that has none before it ends within the sum of the ways'
//! bounds, since each may take all of its own.

mod late;
mod relay;
mod way;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu_sys::limits::Registrations;
use railset::BackoffSettings;

use crate::arena::{ArenaError, ExpertArena};
use crate::fingerprint::Fingerprint;
use crate::store::manifest::Manifest;
use crate::tier::{self, Completion, CompletionQueue, ExpertTier, FetchRequest, Ticket, TierKind};
use late::Late;
use relay::{Leg, Shared};
use way::Way;

/// How long a caller leaves the other ways to themselves while it waits on the first.
const SLICE: Duration = Duration::from_millis(50);
/// Most ways of one backend.
pub const MAX_WAYS: usize = 4;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Opens a backend for the store with this fingerprint, or for any. Called again where the backend
/// was not there; each call must be bounded.
pub type Open =
    Box<dyn Fn(Option<Fingerprint>) -> Result<Arc<dyn ExpertTier>, NotOpened> + Send + Sync>;

/// A way to open: a backend, and what is to be known of it before.
pub struct WayPlan {
    /// Which backend.
    pub kind: TierKind,
    /// Its [`ExpertTier::deadline`].
    pub deadline: Duration,
    /// Its [`ExpertTier::bound`].
    pub bound: Duration,
    /// Opens it.
    pub open: Open,
}

impl WayPlan {
    /// A backend that is open.
    #[must_use]
    pub fn opened(tier: Arc<dyn ExpertTier>) -> Self {
        let (kind, deadline, bound) = (tier.kind(), tier.deadline(), tier.bound());
        let tier = Mutex::new(Some(tier));
        let open: Open = Box::new(move |_| {
            let tier = tier.lock().unwrap_or_else(PoisonError::into_inner).take();
            tier.ok_or_else(|| NotOpened::Never("it was opened before".into()))
        });
        Self { kind, deadline, bound, open }
    }
}

/// Why a way could not be opened, and what to make of it.
#[derive(Debug, thiserror::Error)]
pub enum NotOpened {
    /// It may be there later: a peer that is down.
    #[error("{0}")]
    Later(BoxError),
    /// It will not be there while this process runs: a library that is not installed.
    #[error("{0}")]
    Never(BoxError),
    /// It is there and wrong, and somebody has to change a setting: another store, a secret.
    #[error("{0}")]
    Refused(BoxError),
}

/// Settings of [`FallbackTier`].
#[derive(Clone, Debug)]
pub struct FallbackOptions {
    /// Failures of a way without a success between them after which requests pass it by, 1 or more.
    pub streak: u32,
    /// Waits before a way that is passed by is tried again, with one request. One that says itself
    /// that it is not healthy is tried each `most_ms`.
    pub backoff: BackoffSettings,
    /// The store that every way must serve; `None` takes that of the first way that opens.
    pub fingerprint: Option<Fingerprint>,
}

impl Default for FallbackOptions {
    /// Three failures are no accident. A try may cost its request the way's whole bound, so it is
    /// made each five seconds at most, and soon only while nothing is known yet.
    fn default() -> Self {
        let backoff = BackoffSettings { first_ms: 100, most_ms: 5000 };
        Self { streak: 3, backoff, fingerprint: None }
    }
}

/// Why there is no backend of several ways.
#[derive(Debug, thiserror::Error)]
pub enum FallbackError {
    /// More ways than there are kinds, or none.
    #[error("{ways} ways were given; a backend has 1 to {MAX_WAYS}")]
    Count {
        /// How many.
        ways: usize,
    },
    /// One way cannot be used as it is set.
    #[error("{backend}: {source}")]
    Refused {
        /// The backend.
        backend: TierKind,
        /// What is wrong.
        source: BoxError,
    },
    /// Two ways serve different stores.
    #[error(
        "{backend} has store {found}, wanted is {expected}, as {wanted_by}: another model or other \
         weights; give a copy of that store (--expert-store), or leave {backend} out of --fallback"
    )]
    OtherStore {
        /// The backend whose store it is not.
        backend: TierKind,
        /// Its store.
        found: Fingerprint,
        /// The store wanted.
        expected: Fingerprint,
        /// Who has or wants that.
        wanted_by: String,
    },
    /// None of the ways is there.
    #[error("no way to the experts could be opened: {reasons}")]
    NoWay {
        /// Every way, and why not.
        reasons: String,
    },
    /// The system gave no thread.
    #[error(
        "cannot start a thread to open ways later: {0}; the limit is `ulimit -u` or a cgroup's"
    )]
    Thread(std::io::Error),
}

/// A backend, and others for when it has no way left.
pub struct FallbackTier {
    shared: Arc<Shared>,
    /// For requests that begin at each way.
    legs: Vec<Arc<Leg>>,
    manifest: Arc<Manifest>,
    late: Option<Late>,
}

impl FallbackTier {
    /// Opens every way of `plans`, the first of which is preferred to the second, and so on.
    ///
    /// # Errors
    /// One of them is there and cannot be used, their stores differ, or none is there at all.
    pub fn open(plans: Vec<WayPlan>, options: FallbackOptions) -> Result<Self, FallbackError> {
        if plans.is_empty() || plans.len() > MAX_WAYS {
            return Err(FallbackError::Count { ways: plans.len() });
        }
        let mut wanted = options.fingerprint.map(|it| (it, "--expert-fingerprint".to_owned()));
        let (mut manifest, mut ways, mut later) = (None, Vec::new(), Vec::new());
        for (at, plan) in plans.into_iter().enumerate() {
            let way = Way::new(plan.kind, plan.deadline, plan.bound, &options);
            match (plan.open)(wanted.as_ref().map(|(it, _)| *it)) {
                Ok(tier) => {
                    let found = tier.manifest().fingerprint();
                    let (expected, by) = wanted.get_or_insert((found, plan.kind.to_string()));
                    if found != *expected {
                        let (expected, wanted_by) = (*expected, by.clone());
                        let backend = plan.kind;
                        return Err(FallbackError::OtherStore {
                            backend,
                            found,
                            expected,
                            wanted_by,
                        });
                    }
                    manifest.get_or_insert_with(|| Arc::clone(tier.manifest()));
                    way.open_with(tier);
                }
                Err(NotOpened::Refused(source)) => {
                    return Err(FallbackError::Refused { backend: plan.kind, source });
                }
                Err(NotOpened::Never(source)) => {
                    way.not_there(source.to_string());
                }
                Err(NotOpened::Later(source)) => {
                    way.not_there(source.to_string());
                    later.push((at, plan.open));
                }
            }
            ways.push(way);
        }
        let Some(manifest) = manifest else {
            let reasons: Vec<_> =
                ways.iter().map(|way| format!("{}: {}", way.kind, way.last())).collect();
            return Err(FallbackError::NoWay { reasons: reasons.join("; ") });
        };
        let shared = Arc::new(Shared::new(ways, options));
        shared.say_what_is_not_there();
        let late = match later.is_empty() {
            true => None,
            false => {
                let fingerprint = manifest.fingerprint();
                let late = Late::start(&shared, later, fingerprint);
                Some(late.map_err(FallbackError::Thread)?)
            }
        };
        let legs = (0..shared.ways.len()).map(|at| Arc::new(Leg::first(&shared, at))).collect();
        Ok(Self { shared, legs, manifest, late })
    }

    /// Whether every way has been opened.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.shared.ways.iter().all(|way| way.tier().is_some())
    }

    /// Submits to the first way that is not to be passed by; one of the batch may try one that is.
    fn place(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let now = Instant::now();
        let mut target = None;
        for (at, way) in self.shared.ways.iter().enumerate() {
            let (Some(tier), Some(last)) = (way.tier(), batch.last()) else { continue };
            if !way.is_down() {
                target = Some((at, tier));
                break;
            }
            if way.may_try(last.ticket(), tier.healthy(), now) {
                self.start(at, &*tier, &mut batch.drain(batch.len() - 1..).collect(), queue);
            }
            // Where every way is down, the first of them is as good as another.
            target = target.or(Some((at, tier)));
        }
        match target {
            Some((at, tier)) if !batch.is_empty() => self.start(at, &*tier, batch, queue),
            _ => debug_assert!(batch.is_empty(), "one way is open as long as the backend is"),
        }
    }

    fn start(
        &self,
        at: usize,
        tier: &dyn ExpertTier,
        batch: &mut Vec<FetchRequest>,
        queue: &CompletionQueue,
    ) {
        self.shared.passed_by(at, batch.len() as u64);
        tier.submit(batch, &queue.through(Arc::clone(&self.legs[at]) as _));
    }

    /// Waits for something on `queue` by the first way, and lets the others look after what they
    /// have each [`SLICE`].
    fn wait_on<T>(
        &self,
        queue: &CompletionQueue,
        wait: Duration,
        poll: impl Fn(&dyn ExpertTier, &CompletionQueue, Duration) -> Option<T>,
    ) -> Option<T> {
        let until = tier::after(wait);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut slice = left.min(SLICE);
            for tier in self.shared.ways.iter().filter_map(Way::tier) {
                if let Some(popped) = poll(&*tier, queue, std::mem::take(&mut slice)) {
                    return Some(popped);
                }
            }
            if left.is_zero() {
                return None;
            }
        }
    }
}

impl Drop for FallbackTier {
    fn drop(&mut self) {
        if let Some(late) = self.late.take() {
            late.stop(&self.shared);
        }
        // In this order: what ends at one way while it closes finds the next one open or gone.
        self.shared.ways.iter().for_each(Way::close);
    }
}

impl ExpertTier for FallbackTier {
    fn kind(&self) -> TierKind {
        self.shared.ways[0].kind
    }

    fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Whether a way is: a request may succeed then.
    fn healthy(&self) -> bool {
        self.shared.ways.iter().filter_map(Way::tier).any(|tier| tier.healthy())
    }

    /// The first way's.
    fn deadline(&self) -> Duration {
        self.shared.ways[0].deadline
    }

    /// The sum of all ways'. A request that goes to another way takes its place behind what waits there.
    fn bound(&self) -> Duration {
        self.shared.ways.iter().fold(Duration::ZERO, |sum, way| sum.saturating_add(way.bound))
    }

    fn ended(&self) -> u64 {
        self.shared.ways.iter().filter_map(Way::tier).map(|tier| tier.ended()).sum()
    }

    fn registrations(&self) -> Registrations {
        self.shared.registrations()
    }

    fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaError> {
        self.shared.use_arena(arena)
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let first = &self.shared.ways[0];
        match first.tier() {
            Some(tier) if !first.is_down() => self.start(0, &*tier, batch, queue),
            _ => self.place(batch, queue),
        }
    }

    fn cancel(&self, ticket: Ticket) {
        self.shared.cancel(ticket);
    }

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        self.wait_on(queue, wait, |tier, queue, wait| tier.poll(queue, wait))
    }

    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<tier::Landed> {
        self.wait_on(queue, wait, |tier, queue, wait| tier.poll_landed(queue, wait))
    }
}

#[cfg(test)]
mod tests;
