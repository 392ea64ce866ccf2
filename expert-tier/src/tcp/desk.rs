//! Every request of the backend, and the links that can carry them.
//!
//! One lock guards all of it. It is held for bookkeeping and for sending requests, which are 32
//! bytes each and at most [`MAX_DEPTH`](super::MAX_DEPTH) per link: they fit the socket's buffer,
//! so a send that would block means a peer that no longer reads, and the link is given up.

use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::{Call, Pending};
use super::dial::{DialError, Dialler};
use super::links::{Arriving, DrainSaid, Ended, LinkEnd, State, Why, shut};
use super::{LOOK, TcpOptions};
use crate::account::Accounts;
use crate::arena::{Free, LandedPart, Slot};
use crate::checker::Checker;
use crate::error::{Bound, FetchError, FetchFailure};
use crate::store::manifest::Manifest;
use crate::tier::{Outcome, Source, Ticket, TierKind};

pub(super) struct Desk {
    pub(super) options: TcpOptions,
    pub(super) dialler: Dialler,
    pub(super) manifest: Arc<Manifest>,
    pub(super) accounts: Accounts,
    pub(super) checker: Checker<LandedPart>,
    state: Mutex<State>,
    /// Rung when the backend closes; streams wait on it between attempts to connect.
    closed: Condvar,
    reconnects: AtomicU64,
    rejections: AtomicU64,
    opened: Instant,
    /// Milliseconds after `opened` at which somebody last looked for requests out of time.
    looked_ms: AtomicU64,
}

impl Desk {
    pub(super) fn new(
        options: TcpOptions,
        dialler: Dialler,
        manifest: Arc<Manifest>,
        checker: Checker<LandedPart>,
        streams: usize,
    ) -> Self {
        Self {
            options,
            dialler,
            manifest,
            accounts: Accounts::new(TierKind::Rdma, &[Source::Tcp]),
            checker,
            state: Mutex::new(State::new(streams)),
            closed: Condvar::new(),
            reconnects: AtomicU64::new(0),
            rejections: AtomicU64::new(0),
            opened: Instant::now(),
            looked_ms: AtomicU64::new(0),
        }
    }

    pub(super) fn healthy(&self) -> bool {
        self.lock().healthy
    }

    /// Counts a record that failed its check, and says how many have.
    pub(super) fn count_rejection(&self) -> u64 {
        self.rejections.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// Puts a new request in line; [`dispatch`](Self::dispatch) sends it.
    pub(super) fn take(&self, pending: Pending) {
        self.lock().waiting.push_back(pending);
    }

    /// Sends what waits, as far as the links have room, and fails what nothing can carry.
    pub(super) fn dispatch(&self) {
        let look = self.is_time_to_look();
        let mut state = self.lock();
        state.send_waiting(&self.options);
        let mut ended = state.without_link(&self.options);
        if look {
            state.past_total(&self.options, &mut ended);
        }
        drop(state);
        self.end_all(ended);
    }

    /// Fails the requests whose time is over. Cheap where somebody has just done so: it is called
    /// by everybody who waits.
    pub(super) fn expire(&self) {
        if !self.is_time_to_look() {
            return;
        }
        let mut state = self.lock();
        let mut ended = state.without_link(&self.options);
        state.past_total(&self.options, &mut ended);
        drop(state);
        self.end_all(ended);
    }

    fn is_time_to_look(&self) -> bool {
        let now_ms = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last_ms = self.looked_ms.load(Ordering::Relaxed);
        let every_ms = LOOK.as_millis() as u64;
        let order = Ordering::Relaxed;
        now_ms.saturating_sub(last_ms) >= every_ms
            && self.looked_ms.compare_exchange(last_ms, now_ms, order, order).is_ok()
    }

    /// Tells the caller of the request that is arriving, if its time is over. Its slot stays with
    /// it until the answer has been drained.
    pub(super) fn tell_if_late(&self, call: &mut Call) {
        let Some(waited) = call.past_total(self.options.total).filter(|_| !call.told) else {
            return;
        };
        let told = Ended { call: call.clone(), slot: None, why: Why::Late(Bound::Total, waited) };
        call.told = true;
        self.end(told);
    }

    pub(super) fn cancel(&self, ticket: Ticket) {
        let mut state = self.lock();
        let at = state.waiting.iter().position(|p| p.call.ticket == ticket);
        let waiting = at.and_then(|at| state.waiting.remove(at));
        if waiting.is_none() {
            for link in &mut state.links {
                for pending in link.flying.iter_mut().filter(|p| p.call.ticket == ticket) {
                    pending.call.cancelled = true;
                }
                for arriving in link.arriving.iter_mut().filter(|a| a.ticket == ticket) {
                    arriving.cancelled = true;
                }
            }
        }
        drop(state);
        if let Some(Pending { call, slot }) = waiting {
            let key = call.key();
            self.fail(&call, FetchError::Cancelled { key }, Some(slot));
        }
    }

    /// Link `index` is connected.
    pub(super) fn link_up(&self, index: usize, socket: &Arc<TcpStream>, again: bool) {
        let mut state = self.lock();
        if state.closing {
            shut(socket);
            return;
        }
        state.healthy = true;
        let link = &mut state.links[index];
        link.socket = Some(Arc::clone(socket));
        link.draining = false;
        link.refused_for.clear();
        let lost = state.down_since.take().filter(|_| again);
        if let Some(since) = lost {
            let peer = &self.options.peer;
            tracing::info!(%peer, down_ms = since.elapsed().as_millis(), "the peer is back");
        }
        drop(state);
        if again {
            self.reconnects.fetch_add(1, Ordering::Relaxed);
            self.accounts.reconnected();
        }
        self.dispatch();
    }

    /// Link `index` is gone: its requests wait again, or fail where they have had their turns.
    pub(super) fn link_down(&self, index: usize, end: &LinkEnd) {
        let reason = match end {
            LinkEnd::Closing => "closed".to_owned(),
            LinkEnd::Stalled => {
                format!("no record within {} ms", self.options.deadline.as_millis())
            }
            LinkEnd::Broken(reason) => reason.clone(),
        };
        let mut state = self.lock();
        let ended = state.take_down(index, end, &reason, &self.options);
        state.healthy &= matches!(end, LinkEnd::Closing);
        state.last_end.clone_from(&reason);
        self.note_down(&mut state, &reason);
        drop(state);
        self.end_all(ended);
        self.dispatch();
    }

    /// Link `index` could not be connected. Logged when no link is failing for this reason yet, so
    /// that every reason is seen, and seen once.
    pub(super) fn dial_failed(&self, index: usize, error: &DialError) {
        let reason = error.to_string();
        let mut state = self.lock();
        if state.closing {
            return;
        }
        let known = state.links.iter().any(|link| link.refused_for == reason);
        if !known {
            tracing::warn!(stream = index, reason, "cannot connect; trying again");
        }
        // A peer that allows fewer connections than are wanted is all right.
        state.healthy &= error.is_busy() && state.is_up();
        state.links[index].refused_for.clone_from(&reason);
        state.last_end = reason;
        drop(state);
        self.expire();
    }

    /// Waits for at most `wait`; true when the backend is closing.
    pub(super) fn pause(&self, wait: Duration) -> bool {
        let state = self.lock();
        if state.closing {
            return true;
        }
        let woken = self.closed.wait_timeout_while(state, wait, |state| !state.closing);
        woken.unwrap_or_else(PoisonError::into_inner).0.closing
    }

    pub(super) fn closing(&self) -> bool {
        self.lock().closing
    }

    /// Ends every stream; their threads put what was in flight back in line.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        state.links.iter().filter_map(|link| link.socket.as_deref()).for_each(shut);
        drop(state);
        self.closed.notify_all();
    }

    /// Ends every request, once no stream is left.
    pub(super) fn fail_waiting(&self) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        for Pending { call, slot } in waiting {
            let (key, backend) = (call.key(), TierKind::Rdma);
            self.fail(&call, FetchError::Closed { key, backend }, Some(slot));
        }
    }

    /// The request that the answer `wire_id` on link `index` belongs to: always the oldest.
    pub(super) fn answered(&self, index: usize, wire_id: u64) -> Option<Pending> {
        let mut state = self.lock();
        let link = &mut state.links[index];
        if link.flying.front()?.call.wire_id != wire_id {
            return None;
        }
        let pending = link.flying.pop_front()?;
        let bytes = pending.call.identity.record_bytes();
        link.due_bytes = link.due_bytes.saturating_sub(bytes);
        link.arriving = Some(Arriving { ticket: pending.call.ticket, cancelled: false });
        Some(pending)
    }

    /// The answer to `pending` broke off, and link `index` is about to end: it decides what
    /// becomes of the request, as of all the others.
    pub(super) fn put_back(&self, index: usize, mut pending: Pending) {
        let mut state = self.lock();
        let link = &mut state.links[index];
        let cancelled = link.arriving.take().is_some_and(|arriving| arriving.cancelled);
        pending.call.cancelled |= cancelled;
        link.flying.push_front(pending);
        link.cut_short = true;
    }

    /// The answer to `call` on link `index` is whole, so the next one is due. Before its caller
    /// hears of it: whoever has a record may expect the backend to be healthy.
    pub(super) fn whole(&self, index: usize, call: &mut Call) {
        let now = Instant::now();
        let mut state = self.lock();
        state.last_answer = now;
        state.healthy = true;
        state.links[index].head_since = now;
        let arriving = state.links[index].arriving.take();
        call.cancelled |= arriving.is_some_and(|arriving| arriving.cancelled);
    }

    /// Whether the next answer on link `index` is overdue.
    pub(super) fn overdue(&self, index: usize) -> bool {
        let state = self.lock();
        let link = &state.links[index];
        !link.flying.is_empty() && link.head_since.elapsed() >= self.options.deadline
    }

    /// When the record due on link `index` became due.
    pub(super) fn head_since(&self, index: usize) -> Instant {
        self.lock().links[index].head_since
    }

    /// The peer shuts down: link `index` takes no more requests.
    pub(super) fn drain(&self, index: usize) -> DrainSaid {
        if std::mem::replace(&mut self.lock().links[index].draining, true) {
            return DrainSaid::Before;
        }
        tracing::info!(peer = %self.options.peer, stream = index, "the peer is shutting down");
        DrainSaid::Now
    }

    /// Whether the peer shuts down and has answered everything on link `index`.
    pub(super) fn drained(&self, index: usize) -> bool {
        let state = self.lock();
        let link = &state.links[index];
        link.draining && link.flying.is_empty()
    }

    /// Puts a request whose answer was wrong back in line.
    pub(super) fn retry(&self, pending: Pending) {
        self.lock().waiting.push_front(pending);
    }

    /// Whether `call` may be sent once more.
    pub(super) fn may_retry(&self, call: &Call) -> bool {
        call.may_retry(&self.options)
    }

    /// Hands its end to a request's caller, unless that was told before.
    pub(super) fn complete(&self, call: &Call, outcome: Outcome) {
        if !call.told {
            self.accounts.count(&outcome, call.submitted.elapsed());
            call.queue.push_outcome(call.ticket, call.key(), outcome);
        }
    }

    /// Hands a failure to a request's caller, unless that was told before.
    pub(super) fn fail(&self, call: &Call, error: FetchError, slot: Option<Slot<Free>>) {
        self.complete(call, Outcome::Failed(FetchFailure { error: Box::new(error), slot }));
    }

    fn end(&self, Ended { call, slot, why }: Ended) {
        let (key, backend) = (call.key(), TierKind::Rdma);
        let error = match why {
            _ if call.cancelled => FetchError::Cancelled { key },
            Why::Late(bound, waited) => FetchError::Deadline { key, backend, waited, bound },
            Why::Lost(reason) => {
                let (peer, attempts) = (self.options.peer.clone(), call.attempts);
                FetchError::Unreachable { key, peer, reason, attempts }
            }
        };
        self.fail(&call, error, slot);
    }

    fn end_all(&self, ended: Vec<Ended>) {
        ended.into_iter().for_each(|ended| self.end(ended));
    }

    /// Logs the loss of the last link once per outage.
    fn note_down(&self, state: &mut State, reason: &str) {
        if state.closing || state.is_up() {
            return;
        }
        if state.down_since.is_none() {
            state.down_since = Some(Instant::now());
            tracing::warn!(peer = %self.options.peer, reason, "the peer is lost; reconnecting");
        }
    }

    /// No state is left half-changed by the code under this lock short of a failed allocation.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
