//! A backend that fails when told to, and otherwise is the one behind it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpu_sys::limits::Registrations;

use crate::arena::{ArenaError, ExpertArena, Free, Slot};
use crate::error::{Bound, FetchError, FetchFailure};
use crate::record::Mismatch;
use crate::store::manifest::Manifest;
use crate::tier::{Completion, CompletionQueue, ExpertTier, FetchRequest, Ticket, TierKind};

/// How a request fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The deadline passes; the backend is unhealthy afterwards.
    Deadline,
    /// The peer is gone; the backend is unhealthy afterwards.
    Unreachable,
    /// The bytes are another record's.
    Mismatch,
    /// The deadline passes while somebody may still write into the slot; the backend is unhealthy
    /// afterwards, and keeps the slot for ever.
    Stuck,
}

/// Wraps a backend and fails chosen requests, counted from 0 in order of submission.
pub struct FaultyTier<T> {
    inner: T,
    plan: Mutex<Plan>,
    healthy: AtomicBool,
}

#[derive(Default)]
struct Plan {
    submitted: u64,
    faults: BTreeMap<u64, Fault>,
    every: Option<Fault>,
    stuck: Vec<Slot<Free>>,
}

impl<T: ExpertTier> FaultyTier<T> {
    /// A backend without faults yet.
    #[must_use]
    pub fn new(inner: T) -> Self {
        Self { inner, plan: Mutex::default(), healthy: AtomicBool::new(true) }
    }

    /// Makes request number `n` fail with `fault`.
    pub fn fail(&self, n: u64, fault: Fault) {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).faults.insert(n, fault);
    }

    /// From now on makes every request fail with `fault`, or none but those that were chosen.
    pub fn fail_all(&self, fault: Option<Fault>) {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).every = fault;
    }

    /// How many requests have been submitted.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner).submitted
    }

    fn next_fault(&self) -> Option<Fault> {
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let n = plan.submitted;
        plan.submitted += 1;
        plan.faults.remove(&n).or(plan.every)
    }

    fn fail_now(&self, request: FetchRequest, fault: Fault, queue: &CompletionQueue) {
        let (ticket, key, slot) = request.into_parts();
        let backend = self.kind();
        let origin = "a fault asked for".to_owned();
        let error = match fault {
            Fault::Deadline | Fault::Stuck => {
                FetchError::Deadline { key, backend, waited: self.deadline(), bound: Bound::Due }
            }
            Fault::Unreachable => {
                FetchError::Unreachable { key, peer: origin.clone(), reason: origin, attempts: 1 }
            }
            Fault::Mismatch => {
                let mismatch = Mismatch::Checksum { chunk: 0, found: 1, expected: 2 };
                FetchError::Mismatch { key, backend, origin, mismatch }
            }
        };
        if fault != Fault::Mismatch {
            self.healthy.store(false, Ordering::Relaxed);
        }
        let mut failure = FetchFailure::new(error, slot);
        if fault == Fault::Stuck {
            let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
            plan.stuck.extend(failure.slot.take());
        }
        queue.push(Completion { ticket, key, outcome: Err(failure) });
    }
}

impl<T: ExpertTier> ExpertTier for FaultyTier<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn manifest(&self) -> &Arc<Manifest> {
        self.inner.manifest()
    }

    fn healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed) && self.inner.healthy()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn bound(&self) -> Duration {
        self.inner.bound()
    }

    fn ended(&self) -> u64 {
        self.inner.ended()
    }

    fn registrations(&self) -> Registrations {
        self.inner.registrations()
    }

    fn use_arena(&self, arena: &ExpertArena) -> Result<(), ArenaError> {
        self.inner.use_arena(arena)
    }

    fn submit(&self, batch: &mut Vec<FetchRequest>, queue: &CompletionQueue) {
        let mut through = Vec::with_capacity(batch.len());
        for request in batch.drain(..) {
            match self.next_fault() {
                Some(fault) => self.fail_now(request, fault, queue),
                None => through.push(request),
            }
        }
        if !through.is_empty() {
            self.healthy.store(true, Ordering::Relaxed);
        }
        self.inner.submit(&mut through, queue);
    }

    fn cancel(&self, ticket: Ticket) {
        self.inner.cancel(ticket);
    }

    fn poll(&self, queue: &CompletionQueue, wait: Duration) -> Option<Completion> {
        self.inner.poll(queue, wait)
    }

    #[cfg(feature = "unverified")]
    fn poll_landed(&self, queue: &CompletionQueue, wait: Duration) -> Option<crate::tier::Landed> {
        self.inner.poll_landed(queue, wait)
    }
}
