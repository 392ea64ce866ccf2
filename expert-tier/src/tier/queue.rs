//! Where completions arrive, and who may see them before.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[cfg(feature = "unverified")]
use super::Landed;
use super::{Completion, Outcome, Ticket, after};
use crate::key::ExpertKey;

#[derive(Debug)]
struct Arrival {
    ticket: Ticket,
    key: ExpertKey,
    outcome: Outcome,
}

impl Arrival {
    fn into_completion(self) -> Completion {
        let Self { ticket, key, outcome } = self;
        Completion { ticket, key, outcome: outcome.into() }
    }

    #[cfg(feature = "unverified")]
    fn into_landed(self) -> Landed {
        match self.outcome {
            Outcome::Unchecked(unchecked) => Landed::Unchecked(unchecked),
            _ => Landed::Completed(self.into_completion()),
        }
    }
}

/// Where completions arrive. Cheap to clone; all clones are one queue.
///
/// A queue belongs to whoever waits on it: two callers that share a backend use two queues and
/// never see each other's completions.
#[derive(Clone, Default)]
pub struct CompletionQueue {
    inner: Arc<QueueInner>,
    /// Who gets what is pushed, in place of the queue.
    relay: Option<Arc<dyn Relay>>,
}

/// Gets the ends of requests before the queue does, on the thread that pushes them, which may hold
/// its backend's lock unless the request's slot comes with its end.
pub(crate) trait Relay: Send + Sync {
    /// A request has ended; `home` is the queue without this relay.
    fn relay(&self, ticket: Ticket, key: ExpertKey, outcome: Outcome, home: &CompletionQueue);
}

/// One relay before another.
struct Chain {
    first: Arc<dyn Relay>,
    then: Arc<dyn Relay>,
}

impl Relay for Chain {
    fn relay(&self, ticket: Ticket, key: ExpertKey, outcome: Outcome, home: &CompletionQueue) {
        let (inner, then) = (Arc::clone(&home.inner), Arc::clone(&self.then));
        self.first.relay(ticket, key, outcome, &CompletionQueue { inner, relay: Some(then) });
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("inner", &self.inner)
            .field("relayed", &self.relay.is_some())
            .finish()
    }
}

#[derive(Default, Debug)]
struct QueueInner {
    inbox: Mutex<Inbox>,
    bell: Condvar,
}

#[derive(Default, Debug)]
struct Inbox {
    arrived: VecDeque<Arrival>,
    /// Threads that wait. Where there is none nobody need be woken, which would be a system call.
    waiting: usize,
}

impl CompletionQueue {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a completion; for backends.
    pub fn push(&self, completion: Completion) {
        let Completion { ticket, key, outcome } = completion;
        self.push_outcome(ticket, key, outcome.into());
    }

    /// The same queue, of which `relay` gets what is pushed. Allocates nothing, unless there is a
    /// relay already.
    pub(crate) fn through(&self, relay: Arc<dyn Relay>) -> Self {
        let relay = match &self.relay {
            None => relay,
            Some(then) => Arc::new(Chain { first: relay, then: Arc::clone(then) }),
        };
        Self { inner: Arc::clone(&self.inner), relay: Some(relay) }
    }

    pub(crate) fn push_outcome(&self, ticket: Ticket, key: ExpertKey, outcome: Outcome) {
        if let Some(relay) = &self.relay {
            let home = Self { inner: Arc::clone(&self.inner), relay: None };
            return relay.relay(ticket, key, outcome, &home);
        }
        let mut inbox = self.lock();
        inbox.arrived.push_back(Arrival { ticket, key, outcome });
        let wake = inbox.waiting > 0;
        drop(inbox);
        if wake {
            self.inner.bell.notify_one();
        }
    }

    /// Takes the oldest completion, waiting for one at most `wait`.
    #[must_use]
    pub fn pop(&self, wait: Duration) -> Option<Completion> {
        self.next(wait).map(Arrival::into_completion)
    }

    /// The same, and unchecked records as such.
    #[cfg(feature = "unverified")]
    #[must_use]
    pub fn pop_landed(&self, wait: Duration) -> Option<Landed> {
        self.next(wait).map(Arrival::into_landed)
    }

    fn next(&self, wait: Duration) -> Option<Arrival> {
        let mut inbox = self.lock();
        // What is there costs no look at the clock.
        if let Some(arrival) = inbox.arrived.pop_front() {
            return Some(arrival);
        }
        if wait.is_zero() {
            return None;
        }
        let until = after(wait);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            inbox.waiting += 1;
            let woken = self.inner.bell.wait_timeout(inbox, left);
            inbox = woken.unwrap_or_else(PoisonError::into_inner).0;
            inbox.waiting -= 1;
            if let Some(arrival) = inbox.arrived.pop_front() {
                return Some(arrival);
            }
        }
    }

    /// A push or pop cannot leave the deque half-changed, so a poisoned lock is sound to take.
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inner.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{FetchError, FetchFailure};

    const KEY: ExpertKey = ExpertKey { layer: 1, expert: 2 };

    fn cancelled() -> Outcome {
        let error = Box::new(FetchError::Cancelled { key: KEY });
        Outcome::Failed(FetchFailure { error, slot: None })
    }

    #[test]
    fn who_waits_on_a_queue_is_woken_by_what_arrives() {
        const LONG: Duration = Duration::from_secs(60);
        let queue = CompletionQueue::new();
        let started = Instant::now();
        let waiter = std::thread::spawn({
            let queue = queue.clone();
            move || queue.pop(LONG)
        });
        while queue.lock().waiting == 0 {
            assert!(started.elapsed() < LONG, "nobody waits");
            std::thread::yield_now();
        }
        queue.push_outcome(Ticket(7), KEY, cancelled());
        let popped = waiter.join().expect("it waits and returns");
        assert_eq!(popped.map(|completion| completion.key), Some(KEY));
        assert!(started.elapsed() < LONG / 2, "woken by its own time alone");
        assert_eq!(queue.lock().waiting, 0);
    }

    /// Lets pass what it sees, and says that it has.
    struct Seen(&'static str, Arc<Mutex<Vec<&'static str>>>);

    impl Relay for Seen {
        fn relay(&self, ticket: Ticket, key: ExpertKey, outcome: Outcome, home: &CompletionQueue) {
            self.1.lock().unwrap().push(self.0);
            home.push_outcome(ticket, key, outcome);
        }
    }

    #[test]
    fn a_relay_sees_what_is_pushed_before_the_one_that_was_there_does() {
        let (queue, seen) = (CompletionQueue::new(), Arc::default());
        let relay = |name| Arc::new(Seen(name, Arc::clone(&seen)));
        let inner = queue.through(relay("outer")).through(relay("inner"));
        inner.push_outcome(Ticket(7), KEY, cancelled());
        assert_eq!(*seen.lock().unwrap(), ["inner", "outer"]);
        assert_eq!(queue.pop(Duration::ZERO).map(|completion| completion.ticket), Some(Ticket(7)));
        queue.push_outcome(Ticket(8), KEY, cancelled());
        assert_eq!(seen.lock().unwrap().len(), 2, "of the queue itself nobody sees anything");
    }
}
