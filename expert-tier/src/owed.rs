//! A completion that a backend owes: every request ends in exactly one.
//!
//! A backend keeps what it owes beside the request's slot, or without it where the slot is not to
//! be had. Whatever becomes of the backend, dropping it unpaid pays it as closed.

use std::time::{Duration, Instant};

use crate::error::{Bound, FetchError, FetchFailure};
use crate::key::ExpertKey;
use crate::tier::{CompletionQueue, Outcome, Ticket, TierKind};

/// One request, apart from its slot.
pub(crate) struct Owed {
    pub(crate) ticket: Ticket,
    pub(crate) key: ExpertKey,
    backend: TierKind,
    queue: CompletionQueue,
    submitted: Instant,
    paid: bool,
}

impl Owed {
    pub(crate) fn new(
        backend: TierKind,
        (ticket, key): (Ticket, ExpertKey),
        queue: &CompletionQueue,
        submitted: Instant,
    ) -> Self {
        Self { ticket, key, backend, queue: queue.clone(), submitted, paid: false }
    }

    /// How long ago the request was submitted.
    pub(crate) fn age(&self) -> Duration {
        self.submitted.elapsed()
    }

    /// Whether the request has had its completion.
    pub(crate) fn is_paid(&self) -> bool {
        self.paid
    }

    /// Completes the request; the first outcome is the one that counts.
    pub(crate) fn pay(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.paid, true) {
            self.queue.push_outcome(self.ticket, self.key, outcome);
        }
    }

    /// The error of a request for which `bound` has passed, after `waited`.
    pub(crate) fn late(&self, (bound, waited): (Bound, Duration)) -> FetchError {
        FetchError::Deadline { key: self.key, backend: self.backend, waited, bound }
    }

    /// The error of a request that the backend had when it was closed.
    pub(crate) fn closed(&self) -> FetchError {
        FetchError::Closed { key: self.key, backend: self.backend }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if !self.paid {
            let error = Box::new(self.closed());
            self.pay(Outcome::Failed(FetchFailure { error, slot: None }));
        }
    }
}
