//! What every backend implements: [`ExpertTier`].
//!
//! A request carries the slot it is to be filled into; the slot comes back with the completion,
//! as a residency or inside the failure. [`ExpertTier::submit`] always ends in exactly one
//! completion per request, on the queue it was submitted with, within the backend's deadline
//! and a little more: errors come as completions too, so a caller has one place to look.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::arena::{ExpertArena, Free, Slot};
use crate::error::{FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::residency::ExpertResidency;
use crate::store::manifest::Manifest;

/// Which backend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TierKind {
    /// A local store by ordinary reads; the reference.
    Posix,
    /// A local store by direct reads through io_uring; the default.
    Uma,
    /// A peer over TCP.
    Rdma,
}

impl TierKind {
    /// Every backend of this build.
    pub const ALL: [Self; 3] = [Self::Posix, Self::Uma, Self::Rdma];

    /// The value of `--expert-backend`, and the label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Posix => "posix",
            Self::Uma => "uma",
            Self::Rdma => "rdma",
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
        "{0:?} is no expert backend: this build has posix and uma (a local store), rdma (a peer)"
    )]
    Name(String),
}

impl FromStr for TierKind {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<Self, UnknownBackend> {
        match name {
            "rdma-verbs" => Err(UnknownBackend::NoVerbs),
            _ => Self::ALL
                .into_iter()
                .find(|kind| kind.name() == name)
                .ok_or_else(|| UnknownBackend::Name(name.chars().take(32).collect())),
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
}

impl Source {
    /// The label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Tcp => "tcp",
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

/// Where completions arrive. Cheap to clone; all clones are one queue.
///
/// A queue belongs to whoever waits on it: two callers that share a backend use two queues and
/// never see each other's completions.
#[derive(Clone, Default, Debug)]
pub struct CompletionQueue(Arc<QueueInner>);

#[derive(Default, Debug)]
struct QueueInner {
    arrived: Mutex<VecDeque<Completion>>,
    bell: Condvar,
}

impl CompletionQueue {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a completion; for backends.
    pub fn push(&self, completion: Completion) {
        self.lock().push_back(completion);
        self.0.bell.notify_one();
    }

    /// Takes the oldest completion, waiting for one at most `wait`.
    #[must_use]
    pub fn pop(&self, wait: Duration) -> Option<Completion> {
        let until = Instant::now() + wait;
        let mut arrived = self.lock();
        loop {
            if let Some(completion) = arrived.pop_front() {
                return Some(completion);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let woken = self.0.bell.wait_timeout(arrived, left);
            arrived = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A push or pop cannot leave the deque half-changed, so a poisoned lock is sound to take.
    fn lock(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.0.arrived.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// How long a request may take before it ends with [`FetchError::Deadline`].
    fn deadline(&self) -> Duration;

    /// Names the arena that requests' slots come from, before the first: what can be registered
    /// ahead is. The backend keeps the arena's memory as long as it lives itself.
    fn use_arena(&self, _arena: &ExpertArena) {}

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

    /// Fetches one record and waits for it.
    ///
    /// # Errors
    /// [`FetchFailure`] has the reason and gives the slot back.
    fn fetch(&self, key: ExpertKey, slot: Slot<Free>) -> Result<Fetched, FetchFailure> {
        let (queue, mut batch) = BLOCKING.take().unwrap_or_default();
        let request = FetchRequest::new(key, slot);
        let ticket = request.ticket();
        batch.push(request);
        self.submit(&mut batch, &queue);
        let outcome = self.await_ticket(&queue, ticket, key);
        BLOCKING.set(Some((queue, batch)));
        outcome
    }

    /// Waits for one completion; the bound is past every bound of the backend's own, so meeting
    /// it means that the backend broke its contract.
    #[doc(hidden)]
    fn await_ticket(
        &self,
        queue: &CompletionQueue,
        ticket: Ticket,
        key: ExpertKey,
    ) -> Result<Fetched, FetchFailure> {
        let start = Instant::now();
        let most = self.deadline() * 3 + Duration::from_secs(5);
        while let Some(completion) = self.poll(queue, most.saturating_sub(start.elapsed())) {
            // A completion of an earlier call that gave up here: dropping it frees its slot.
            if completion.ticket == ticket {
                return completion.outcome;
            }
        }
        self.cancel(ticket);
        let waited = start.elapsed();
        let error = FetchError::Deadline { key, backend: self.kind(), waited };
        Err(FetchFailure { error: Box::new(error), slot: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_found_by_name_and_others_are_explained() {
        for kind in TierKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "rdma-verbs".parse::<TierKind>().unwrap_err().to_string();
        assert!(error.contains("--expert-backend rdma"), "{error}");
        assert!("floppy".parse::<TierKind>().unwrap_err().to_string().contains("posix"));
    }

    #[test]
    fn an_empty_queue_gives_up_after_its_wait() {
        let start = Instant::now();
        assert!(CompletionQueue::new().pop(Duration::from_millis(20)).is_none());
        assert!(start.elapsed() >= Duration::from_millis(20));
    }
}
