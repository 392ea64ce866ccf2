//! Every request of the backend, and the links that can carry them.
//!
//! One lock guards all of it. It is held for bookkeeping and for sending requests, which are 32
//! bytes each and at most [`MAX_DEPTH`](super::MAX_DEPTH) per link: they fit the socket's buffer,
//! so a send that would block means a peer that no longer reads, and the link is given up.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::{Call, Pending};
use super::dial::Dialler;
use super::{MAX_DEPTH, TcpOptions};
use crate::account::Accounts;
use crate::arena::{Free, Slot};
use crate::error::{FetchError, FetchFailure};
use crate::store::manifest::Manifest;
use crate::tier::{Completion, Fetched, Source, Ticket, TierKind};
use crate::wire::frame::{FrameHeader, FrameType, HEADER_BYTES, Status};
use crate::wire::message::{FETCH_BYTES, encode_fetch};

/// How a link ended.
pub(super) enum LinkEnd {
    /// The backend is being closed.
    Closing,
    /// The record that was due did not come in time.
    Stalled,
    /// Anything else; the text is for logs and errors.
    Broken(String),
}

/// Whether a peer that says it drains has said so before.
pub(super) enum DrainSaid {
    Now,
    Before,
}

/// The request whose answer a stream's thread is receiving.
struct Arriving {
    ticket: Ticket,
    cancelled: bool,
}

/// One stream's place at the desk.
struct Link {
    /// Where requests are sent; `None` while disconnected.
    socket: Option<Arc<TcpStream>>,
    /// Sent and not yet answered, in the order of sending.
    flying: VecDeque<Pending>,
    /// Out of `flying` while its answer comes in.
    arriving: Option<Arriving>,
    /// The first of `flying` is back from being received: the link broke within its answer.
    cut_short: bool,
    /// Bytes of the answers due on this link.
    due_bytes: u64,
    /// Since when the first of `flying` has been the next one due.
    head_since: Instant,
    /// The peer drains: nothing more is sent here.
    draining: bool,
}

struct State {
    waiting: VecDeque<Pending>,
    links: Vec<Link>,
    /// Since when no link has been up.
    down_since: Option<Instant>,
    /// When a whole answer last came, on any link.
    last_answer: Instant,
    /// Why the last link ended.
    last_end: String,
    next_wire_id: u64,
    closing: bool,
    /// Kept between sends, so that none allocates.
    frames: Vec<u8>,
}

pub(super) struct Desk {
    pub(super) options: TcpOptions,
    pub(super) dialler: Dialler,
    pub(super) manifest: Arc<Manifest>,
    pub(super) accounts: Accounts,
    state: Mutex<State>,
    /// Rung when the backend closes; streams wait on it between attempts to connect.
    closed: Condvar,
    reconnects: AtomicU64,
    rejections: AtomicU64,
}

impl Desk {
    pub(super) fn new(
        options: TcpOptions,
        dialler: Dialler,
        manifest: Arc<Manifest>,
        streams: usize,
    ) -> Self {
        let link = || Link {
            socket: None,
            flying: VecDeque::new(),
            arriving: None,
            cut_short: false,
            due_bytes: 0,
            head_since: Instant::now(),
            draining: false,
        };
        let state = State {
            waiting: VecDeque::new(),
            links: (0..streams).map(|_| link()).collect(),
            // The first connection has been made by whoever makes a desk.
            down_since: None,
            last_answer: Instant::now(),
            last_end: String::new(),
            next_wire_id: 1,
            closing: false,
            frames: Vec::new(),
        };
        Self {
            options,
            dialler,
            manifest,
            accounts: Accounts::new(TierKind::Rdma, Source::Tcp),
            state: Mutex::new(state),
            closed: Condvar::new(),
            reconnects: AtomicU64::new(0),
            rejections: AtomicU64::new(0),
        }
    }

    pub(super) fn healthy(&self) -> bool {
        self.lock().down_since.is_none()
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
        let mut state = self.lock();
        state.send_waiting(&self.options);
        let ended = state.expired(&self.options);
        drop(state);
        self.end_all(ended);
    }

    /// Fails the requests that have waited too long for a link.
    pub(super) fn expire(&self) {
        let ended = self.lock().expired(&self.options);
        self.end_all(ended);
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
            self.fail(call, FetchError::Cancelled { key }, Some(slot));
        }
    }

    /// Link `index` is connected.
    pub(super) fn link_up(&self, index: usize, socket: &Arc<TcpStream>, again: bool) {
        let mut state = self.lock();
        if state.closing {
            shut(socket);
            return;
        }
        let link = &mut state.links[index];
        link.socket = Some(Arc::clone(socket));
        link.draining = false;
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
        let ended = state.take_down(index, end, &self.options);
        state.last_end.clone_from(&reason);
        self.note_down(&mut state, &reason);
        drop(state);
        for (pending, stalled) in ended {
            self.give_up(pending, stalled, &reason);
        }
        self.dispatch();
    }

    /// A connection could not be made.
    pub(super) fn dial_failed(&self, reason: &str) {
        self.lock().last_end = reason.to_owned();
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
            self.fail(call, FetchError::Closed { key, backend }, Some(slot));
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

    /// The answer that was arriving on link `index` has come or broken off: `call` learns whether
    /// it was cancelled meanwhile.
    pub(super) fn landed(&self, index: usize, call: &mut Call) {
        let arriving = self.lock().links[index].arriving.take();
        call.cancelled |= arriving.is_some_and(|arriving| arriving.cancelled);
    }

    /// The answer to `pending` broke off, and link `index` is about to end: it decides what
    /// becomes of the request, as of all the others.
    pub(super) fn put_back(&self, index: usize, mut pending: Pending) {
        self.landed(index, &mut pending.call);
        let mut state = self.lock();
        let link = &mut state.links[index];
        link.flying.push_front(pending);
        link.cut_short = true;
    }

    /// The answer is whole: the next request on link `index` is due, and there is room for one.
    pub(super) fn next_due(&self, index: usize) {
        let now = Instant::now();
        let mut state = self.lock();
        state.last_answer = now;
        state.links[index].head_since = now;
        state.links[index].arriving = None;
        drop(state);
        self.dispatch();
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

    /// Hands a record to its caller.
    pub(super) fn succeed(&self, call: Call, fetched: Fetched) {
        self.accounts.fetched(call.identity.payload_bytes, call.submitted.elapsed());
        let (ticket, key) = (call.ticket, call.key());
        call.queue.push(Completion { ticket, key, outcome: Ok(fetched) });
    }

    /// Hands a failure to its caller.
    pub(super) fn fail(&self, call: Call, error: FetchError, slot: Option<Slot<Free>>) {
        self.accounts.failed(&error);
        let (ticket, key) = (call.ticket, call.key());
        let outcome = Err(FetchFailure { error: Box::new(error), slot });
        call.queue.push(Completion { ticket, key, outcome });
    }

    fn give_up(&self, pending: Pending, stalled: Option<Duration>, reason: &str) {
        let Pending { call, slot } = pending;
        let (key, backend) = (call.key(), TierKind::Rdma);
        let error = match stalled {
            _ if call.cancelled => FetchError::Cancelled { key },
            Some(waited) => FetchError::Deadline { key, backend, waited },
            None => self.unreachable(&call, reason.to_owned()),
        };
        self.fail(call, error, Some(slot));
    }

    fn unreachable(&self, call: &Call, reason: String) -> FetchError {
        let peer = self.options.peer.clone();
        FetchError::Unreachable { key: call.key(), peer, reason, attempts: call.attempts }
    }

    fn end_all(&self, ended: Vec<(Pending, String)>) {
        for (pending, reason) in ended {
            self.give_up(pending, None, &reason);
        }
    }

    /// Logs the loss of the last link once per outage.
    fn note_down(&self, state: &mut State, reason: &str) {
        if state.closing || state.links.iter().any(|link| link.socket.is_some()) {
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

impl State {
    /// Gives each waiting request to the link with the fewest bytes due, while one has room.
    fn send_waiting(&mut self, options: &TcpOptions) {
        let depth = options.depth.clamp(1, MAX_DEPTH) as usize;
        let now = Instant::now();
        while !self.waiting.is_empty() {
            let open = self.links.iter().enumerate().filter(|(_, link)| {
                link.socket.is_some() && !link.draining && link.flying.len() < depth
            });
            let Some((index, _)) = open.min_by_key(|(_, link)| link.due_bytes) else { break };
            self.send_run(index, depth, now);
        }
    }

    /// Sends to link `index` until it has its share of what waits, with one system call.
    fn send_run(&mut self, index: usize, depth: usize, now: Instant) {
        let up = self.links.iter().filter(|link| link.socket.is_some() && !link.draining).count();
        let share = self.waiting.len().div_ceil(up.max(1));
        let link = &mut self.links[index];
        self.frames.clear();
        for _ in 0..share.min(depth - link.flying.len()) {
            let Some(mut pending) = self.waiting.pop_front() else { break };
            pending.call.wire_id = self.next_wire_id;
            pending.call.sent = now;
            pending.call.attempts += 1;
            self.next_wire_id += 1;
            if link.flying.is_empty() && link.due_bytes == 0 {
                link.head_since = now;
            }
            link.due_bytes += pending.call.identity.record_bytes();
            let header = FrameHeader {
                frame: FrameType::Fetch,
                status: Status::Ok,
                request_id: pending.call.wire_id,
                body_bytes: FETCH_BYTES as u64,
            };
            let mut frame = [0; HEADER_BYTES + FETCH_BYTES];
            frame[..HEADER_BYTES].copy_from_slice(&header.encode());
            frame[HEADER_BYTES..].copy_from_slice(&encode_fetch(pending.call.key()));
            self.frames.extend(frame);
            link.flying.push_back(pending);
        }
        let Some(socket) = link.socket.as_deref() else { return };
        let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
        let sent = rustix::net::send(socket, &self.frames, flags);
        if sent != Ok(self.frames.len()) {
            // The stream's thread sees the shutdown, and puts the requests back in line.
            shut(socket);
            link.draining = true;
        }
    }

    /// Empties link `index`: its requests wait again, but for those that have had their turns or
    /// their time, which are returned, the latter with how long they waited.
    fn take_down(
        &mut self,
        index: usize,
        end: &LinkEnd,
        options: &TcpOptions,
    ) -> Vec<(Pending, Option<Duration>)> {
        let link = &mut self.links[index];
        if let Some(socket) = link.socket.take() {
            shut(&socket);
        }
        link.due_bytes = 0;
        link.arriving = None;
        let mut flying = std::mem::take(&mut link.flying);
        if std::mem::take(&mut link.cut_short) {
            // A record that the peer cannot finish breaks every link that asks for it: behind its
            // neighbours it costs them no more of their attempts.
            flying.rotate_left(1);
        }
        let stalled = matches!(end, LinkEnd::Stalled);
        let closing = matches!(end, LinkEnd::Closing);
        let mut ended = Vec::new();
        let mut again = Vec::new();
        for pending in flying {
            let waited = pending.call.sent.elapsed();
            let late = stalled && waited >= options.deadline;
            if late || !(closing || pending.call.may_retry(options)) {
                ended.push((pending, late.then_some(waited)));
            } else {
                again.push(pending);
            }
        }
        again.into_iter().rev().for_each(|pending| self.waiting.push_front(pending));
        // With no answer on any link for a deadline, the peer has stalled and not this link
        // alone: what has waited behind the pipelines for as long must not wait for it again.
        if stalled && self.last_answer.elapsed() >= options.deadline {
            let waiting = std::mem::take(&mut self.waiting);
            for pending in waiting {
                let waited = pending.call.submitted.elapsed();
                if waited >= options.deadline {
                    ended.push((pending, Some(waited)));
                } else {
                    self.waiting.push_back(pending);
                }
            }
        }
        ended
    }

    /// Takes out what has waited too long for a link, with the reason.
    fn expired(&mut self, options: &TcpOptions) -> Vec<(Pending, String)> {
        let Some(since) = self.down_since else { return Vec::new() };
        if since.elapsed() < options.deadline || self.waiting.is_empty() {
            return Vec::new();
        }
        let down_ms = since.elapsed().as_millis();
        let reason = format!("no connection for {down_ms} ms: {}", self.last_end);
        self.waiting.drain(..).map(|pending| (pending, reason.clone())).collect()
    }
}

/// Ends both directions. An error means that the socket has ended already.
fn shut(socket: &TcpStream) {
    if let Err(error) = socket.shutdown(Shutdown::Both) {
        tracing::trace!(%error, "shutdown of a socket that had ended");
    }
}
