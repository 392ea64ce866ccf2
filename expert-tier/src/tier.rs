//! What every backend implements: [`ExpertTier`].
//!
//! A request carries the slot it is to be filled into; the slot comes back with the completion,
//! as a residency or inside the failure. [`ExpertTier::submit`] always ends in exactly one
//! completion per request, on the queue it was submitted with: errors come as completions too, so a
//! caller has one place to look.
//!
//! A request that waits in a backend's own queue does not age. A backend that brings nothing for its
//! [`deadline`](ExpertTier::deadline) ends what waits, and a request whose first byte has been asked
//! for ends within a total of its own. So some request ends within the backend's
//! [`bound`](ExpertTier::bound), and since requests are begun in the order of their submission, no
//! request can be overtaken without end.

mod queue;

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_sys::limits::Registrations;

#[cfg(feature = "unverified")]
use crate::arena::Unchecked;
use crate::arena::{ArenaError, ExpertArena, Free, MAX_SLOTS, Slot};
use crate::error::{Bound, FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::residency::ExpertResidency;
use crate::store::manifest::Manifest;
pub use queue::CompletionQueue;
pub(crate) use queue::Relay;

/// How long past its bound a backend may take, on a machine that has other things to do, before a
/// blocking fetch gives it up.
const GRACE: Duration = Duration::from_secs(1);
/// Most requests that can be in line before one that is submitted: each has a slot, and an arena has
/// at most so many.
const MOST_AHEAD: u64 = MAX_SLOTS as u64;

/// Which backend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TierKind {
    /// A local store by ordinary reads; the reference.
    Posix,
    /// A local store by direct reads through io_uring; the default.
    Uma,
    /// A peer over TCP.
    Rdma,
    /// A peer over RDMA verbs.
    RdmaVerbs,
}

impl TierKind {
    /// Every backend; [`RdmaVerbs`](Self::RdmaVerbs) is not in every build.
    pub const ALL: [Self; 4] = [Self::Posix, Self::Uma, Self::Rdma, Self::RdmaVerbs];

    /// The value of `--expert-backend`, and the label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Posix => "posix",
            Self::Uma => "uma",
            Self::Rdma => "rdma",
            Self::RdmaVerbs => "rdma-verbs",
        }
    }
}

impl fmt::Display for TierKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no backend of this build.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UnknownBackend {
    /// The backend over verbs, which this build does not have.
    #[error("this build has no verbs: use --expert-backend rdma, which reaches a peer over TCP")]
    NoVerbs,
    /// Any other name.
    #[error(
        "{0:?} is no expert backend; there are posix and uma (a local store), rdma (a peer over \
         TCP) and rdma-verbs (a peer over RDMA)"
    )]
    Name(String),
}

impl FromStr for TierKind {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<Self, UnknownBackend> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == name);
        match kind.ok_or_else(|| UnknownBackend::Name(name.chars().take(32).collect()))? {
            Self::RdmaVerbs if cfg!(not(metrale_rdma_verbs)) => Err(UnknownBackend::NoVerbs),
            kind => Ok(kind),
        }
    }
}

/// Where a record's bytes came from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// A store on this machine.
    Local,
    /// A peer, over TCP.
    Tcp,
    /// A peer's memory, by RDMA READ.
    Read,
    /// A peer's disk, over RDMA.
    Push,
}

impl Source {
    /// The label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Tcp => "tcp",
            Self::Read => "read",
            Self::Push => "push",
        }
    }
}

/// Names one submitted request, in this process, for ever.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket(u64);

static NEXT_TICKET: AtomicU64 = AtomicU64::new(1);

/// A record wanted, and the slot that it is to be filled into.
#[derive(Debug)]
pub struct FetchRequest {
    ticket: Ticket,
    key: ExpertKey,
    slot: Slot<Free>,
}

impl FetchRequest {
    /// Asks for `key` in `slot`.
    #[must_use]
    pub fn new(key: ExpertKey, slot: Slot<Free>) -> Self {
        Self { ticket: Ticket(NEXT_TICKET.fetch_add(1, Ordering::Relaxed)), key, slot }
    }

    /// The same request once more, for another backend.
    pub(crate) fn again(ticket: Ticket, key: ExpertKey, slot: Slot<Free>) -> Self {
        Self { ticket, key, slot }
    }

    /// What [`ExpertTier::cancel`] and the completion call this request.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The record wanted.
    #[must_use]
    pub fn key(&self) -> ExpertKey {
        self.key
    }

    /// Takes the request apart.
    #[must_use]
    pub fn into_parts(self) -> (Ticket, ExpertKey, Slot<Free>) {
        (self.ticket, self.key, self.slot)
    }
}

/// The end of one request.
#[derive(Debug)]
pub struct Completion {
    /// Which request.
    pub ticket: Ticket,
    /// The record it wanted.
    pub key: ExpertKey,
    /// The record, or why not.
    pub outcome: Result<Fetched, FetchFailure>,
}

/// A record in the arena.
#[derive(Debug)]
pub struct Fetched {
    /// The record, checked.
    pub residency: ExpertResidency,
    /// Where its bytes came from.
    pub source: Source,
}

/// How a request ended, on its way to whoever waits for it.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The record is in the arena, checked.
    Fetched(Fetched),
    /// It did not come.
    Failed(FetchFailure),
    /// It came and was not checked, as its slot was told.
    #[cfg(feature = "unverified")]
    Unchecked(Unchecked),
}

impl From<Outcome> for Result<Fetched, FetchFailure> {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Fetched(fetched) => Ok(fetched),
            Outcome::Failed(failure) => Err(failure),
            #[cfg(feature = "unverified")]
            Outcome::Unchecked(unchecked) => Err(unchecked.into()),
        }
    }
}

impl From<Result<Fetched, FetchFailure>> for Outcome {
    fn from(result: Result<Fetched, FetchFailure>) -> Self {
        match result {
            Ok(fetched) => Self::Fetched(fetched),
            Err(failure) => Self::Failed(failure),
        }
    }
}

/// The end of one request of which the record may not have been checked: for measurements.
#[cfg(feature = "unverified")]
#[derive(Debug)]
pub enum Landed {
    /// As it is without this feature.
    Completed(Completion),
    /// The record came, into a slot that was told not to check it.
    Unchecked(Unchecked),
}

/// The instant `wait` from now, or one that nobody lives to see where that is past the clock.
pub(crate) fn after(wait: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    Instant::now() + wait.min(FAR)
}

/// Pops for at most `wait`, and calls `look` each `tick` of it: for backends whose bounds the
/// caller's own wait must watch, where every thread of theirs may hang.
pub(crate) fn pop_and_look<T>(
    wait: Duration,
    tick: Duration,
    pop: impl Fn(Duration) -> Option<T>,
    look: impl Fn(),
) -> Option<T> {
    let until = after(wait);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if let Some(popped) = pop(left.min(tick)) {
            return Some(popped);
        }
        look();
        if left.is_zero() {
            return pop(Duration::ZERO);
        }
    }
}

thread_local! {
    /// Queue and batch of this thread's blocking fetches, so that none allocates them.
    static BLOCKING: RefCell<Option<(CompletionQueue, Vec<FetchRequest>)>> =
        const { RefCell::new(None) };
}

/// A way to get expert records: a local store or a peer.
pub trait ExpertTier: Send + Sync {
    /// Which backend this is.
    fn kind(&self) -> TierKind;

    /// What the store behind it holds.
    fn manifest(&self) -> &Arc<Manifest>;

    /// False after a failed send, receive, read or connect; true again once one succeeded.
    ///
    /// A status that concerns one key, such as a record that the peer cannot read, is an error of
    /// that fetch and leaves the backend healthy.
    fn healthy(&self) -> bool;

    /// How long nothing may come of a peer or disk before the requests that wait for it end with
    /// [`FetchError::Deadline`].
    fn deadline(&self) -> Duration;

    /// Longest time from one end of a request to the next, or from a submission to the first end,
    /// while the backend has requests. A request that has no others before it ends within this.
    fn bound(&self) -> Duration {
        self.deadline()
    }

    /// How many requests have ended since the backend was opened, whatever they came to. A backend
    /// whose requests wait for one another counts them here: a blocking [`fetch`](Self::fetch)
    /// keeps its place in line while this grows.
    fn ended(&self) -> u64 {
        0
    }

    /// What the backend registers of an arena and beside it, for the size of an arena that keeps to
    /// the locked-memory limit ([`LockLimit::room`](gpu_sys::limits::LockLimit::room)).
    fn registrations(&self) -> Registrations {
        Registrations::default()
    }

    /// Names the arena that requests' slots come from, before the first: what can be registered
    /// ahead is. The backend keeps the arena's memory as long as it lives itself.
    ///
    /// # Errors
    /// Nothing that the backend reads through takes the arena: no fetch into it could succeed, and the
    /// backend does not keep it. What only some of it needs ends there, and is in the log.
    fn use_arena(&self, _arena: &ExpertArena) -> Result<(), ArenaError> {
        Ok(())
    }

    /// Starts every request of `batch` and leaves it empty; completions go to `queue`.
    ///
    /// A backend that has been without its peer for longer than its deadline completes requests
    /// at once, as failures: a caller that tries again should pause first, or wait for
    /// [`healthy`](Self::healthy).
    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue);

    /// Gives up on a request. It still completes: as [`FetchError::Cancelled`], or with its
    /// record where that was already on its way. Its slot is not free before that.
    fn cancel(&self, ticket: Ticket);

    /// Takes the next completion from `queue`, waiting at most `wait`.
    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        queue.pop(wait)
    }

    /// Takes the next completion or unchecked record from `queue`, waiting at most `wait`.
    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<Landed> {
        queue.pop_landed(wait)
    }

    /// Fetches one record and waits for it: for the requests before it, and then its own time. Gives
    /// up where no request of the backend has ended for its [`bound`](Self::bound), which none does.
    ///
    /// # Errors
    /// [`FetchFailure`] has the reason and gives the slot back.
    fn fetch(&self, key: ExpertKey, slot: Slot<Free>) -> Result<Fetched, FetchFailure> {
        let (queue, mut batch) = BLOCKING.take().unwrap_or_default();
        let request = FetchRequest::new(key, slot);
        let ticket = request.ticket();
        batch.push(request);
        let submitted = Instant::now();
        self.submit(&mut batch, &queue);
        let mut ended = self.ended();
        let all_ahead = ended.saturating_add(MOST_AHEAD);
        loop {
            if let Some(completion) = self.poll(&queue, self.bound().saturating_add(GRACE)) {
                BLOCKING.set(Some((queue, batch)));
                return completion.outcome;
            }
            let before = std::mem::replace(&mut ended, self.ended());
            if ended == before || ended >= all_ahead {
                break;
            }
        }
        // The queue has nobody else's completions: whoever gives up here leaves it behind.
        self.cancel(ticket);
        let (backend, waited, bound) = (self.kind(), submitted.elapsed(), Bound::Total);
        let error = Box::new(FetchError::Deadline { key, backend, waited, bound });
        // A completion that comes yet goes with the queue, and frees its slot.
        Err(FetchFailure { error, slot: None })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::testing::{small_arena, tiny_manifest};

    #[test]
    fn backends_are_found_by_name_and_others_are_explained() {
        for kind in TierKind::ALL {
            if kind == TierKind::RdmaVerbs && cfg!(not(metrale_rdma_verbs)) {
                let error = kind.name().parse::<TierKind>().unwrap_err().to_string();
                assert!(error.contains("--expert-backend rdma"), "{error}");
                continue;
            }
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("floppy".parse::<TierKind>().unwrap_err().to_string().contains("posix"));
    }

    #[test]
    fn an_empty_queue_gives_up_after_its_wait() {
        let start = Instant::now();
        assert!(CompletionQueue::new().pop(Duration::from_millis(20)).is_none());
        assert!(start.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn a_wait_without_end_is_no_overflow() {
        let queue = CompletionQueue::new();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.pop(Duration::MAX).expect("a completion").key);
            let (key, ticket) = (ExpertKey::new(1, 2), Ticket(0));
            let error = Box::new(FetchError::Cancelled { key });
            let outcome = Err(FetchFailure { error, slot: None });
            queue.push(Completion { ticket, key, outcome });
            assert_eq!(waiting.join().expect("no panic"), key);
        });
    }

    /// Takes requests and keeps them.
    struct Silent {
        manifest: Arc<Manifest>,
        taken: Mutex<Vec<(FetchRequest, CompletionQueue)>>,
    }

    impl ExpertTier for Silent {
        fn kind(&self) -> TierKind {
            TierKind::Rdma
        }

        fn manifest(&self) -> &Arc<Manifest> {
            &self.manifest
        }

        fn healthy(&self) -> bool {
            true
        }

        fn deadline(&self) -> Duration {
            Duration::from_millis(1)
        }

        fn bound(&self) -> Duration {
            Duration::from_millis(300)
        }

        fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
            let requests = batch.drain(..).map(|request| (request, queue.clone()));
            self.taken.lock().unwrap().extend(requests);
        }

        fn cancel(&self, _: Ticket) {}
    }

    #[test]
    fn a_fetch_waits_its_backends_bound_and_a_completion_after_that_frees_its_slot() {
        let tier = Silent { manifest: Arc::new(tiny_manifest(1)), taken: Mutex::default() };
        let arena = small_arena(1);
        let key = ExpertKey::new(1, 0);
        let start = Instant::now();
        let failure = tier.fetch(key, arena.try_acquire(1).unwrap()).unwrap_err();
        let waited = start.elapsed();
        assert!(waited >= tier.bound() + GRACE && waited < tier.bound() + GRACE * 3, "{waited:?}");
        assert!(matches!(*failure.error, FetchError::Deadline { .. }), "{failure}");
        assert!(failure.slot.is_none());
        assert_eq!(arena.free_slots(), 0, "the backend has it");
        let (request, queue) = tier.taken.lock().unwrap().pop().unwrap();
        let (ticket, key, slot) = request.into_parts();
        let outcome = Err(FetchFailure::new(FetchError::Cancelled { key }, slot));
        queue.push(Completion { ticket, key, outcome });
        drop(queue);
        // This thread has not fetched again, and need not.
        assert_eq!(arena.free_slots(), 1);
    }
}
