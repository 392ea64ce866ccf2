//! What waits to be sent, and what each link carries: the bookkeeping under the desk's lock.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::{Call, Pending};
use super::{MAX_DEPTH, TcpOptions};
use crate::arena::{Free, Slot};
use crate::error::Bound;
use crate::tier::Ticket;
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
pub(super) struct Arriving {
    pub(super) ticket: Ticket,
    pub(super) cancelled: bool,
}

/// One stream's place at the desk.
pub(super) struct Link {
    /// Where requests are sent; `None` while disconnected.
    pub(super) socket: Option<Arc<TcpStream>>,
    /// Sent and not yet answered, in the order of sending.
    pub(super) flying: VecDeque<Pending>,
    /// Out of `flying` while its answer comes in.
    pub(super) arriving: Option<Arriving>,
    /// The first of `flying` is back from being received: the link broke within its answer.
    pub(super) cut_short: bool,
    /// Bytes of the answers due on this link.
    pub(super) due_bytes: u64,
    /// Since when the first of `flying` has been the next one due.
    pub(super) head_since: Instant,
    /// The peer drains: nothing more is sent here.
    pub(super) draining: bool,
    /// Why it could last not be connected; empty once it was.
    pub(super) refused_for: String,
}

impl Link {
    fn new() -> Self {
        Self {
            socket: None,
            flying: VecDeque::new(),
            arriving: None,
            cut_short: false,
            due_bytes: 0,
            head_since: Instant::now(),
            draining: false,
            refused_for: String::new(),
        }
    }
}

/// All that the lock guards.
pub(super) struct State {
    pub(super) waiting: VecDeque<Pending>,
    pub(super) links: Vec<Link>,
    /// Since when no link has been up.
    pub(super) down_since: Option<Instant>,
    /// What was last tried on any link went well.
    pub(super) healthy: bool,
    /// When a whole answer last came, on any link.
    pub(super) last_answer: Instant,
    /// Why the last link ended.
    pub(super) last_end: String,
    next_wire_id: u64,
    pub(super) closing: bool,
    /// Kept between sends, so that none allocates.
    frames: Vec<u8>,
}

/// Why a request ended without an answer.
pub(super) enum Why {
    /// A bound passed; how long the request had waited.
    Late(Bound, Duration),
    /// There is no link, or its link broke once too often; the reason.
    Lost(String),
}

/// A request that ended without an answer. Without its slot, that is still on a link.
pub(super) struct Ended {
    pub(super) call: Call,
    pub(super) slot: Option<Slot<Free>>,
    pub(super) why: Why,
}

impl Ended {
    fn new(pending: Pending, why: Why) -> Self {
        Self { call: pending.call, slot: Some(pending.slot), why }
    }
}

impl State {
    /// As many links, none of them connected; but whoever makes a backend has just connected, so
    /// it is not down.
    pub(super) fn new(links: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            links: (0..links).map(|_| Link::new()).collect(),
            down_since: None,
            healthy: true,
            last_answer: Instant::now(),
            last_end: String::new(),
            next_wire_id: 1,
            closing: false,
            frames: Vec::new(),
        }
    }

    /// Whether any link is connected.
    pub(super) fn is_up(&self) -> bool {
        self.links.iter().any(|link| link.socket.is_some())
    }

    /// Gives each waiting request to the link with the fewest bytes due, while one has room.
    pub(super) fn send_waiting(&mut self, options: &TcpOptions) {
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
            pending.call.asked.get_or_insert(now);
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
    /// their time, which are returned. The slots of those whose callers were told are free.
    pub(super) fn take_down(
        &mut self,
        index: usize,
        end: &LinkEnd,
        reason: &str,
        options: &TcpOptions,
    ) -> Vec<Ended> {
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
        let silence = link.head_since.elapsed();
        let stalled = matches!(end, LinkEnd::Stalled);
        let closing = matches!(end, LinkEnd::Closing);
        let mut ended = Vec::new();
        let mut again = Vec::new();
        for pending in flying.into_iter().filter(|pending| !pending.call.told) {
            let waited = pending.call.sent.elapsed().min(silence);
            if stalled && waited >= options.deadline {
                ended.push(Ended::new(pending, Why::Late(Bound::Due, waited)));
            } else if closing || pending.call.may_retry(options) {
                again.push(pending);
            } else {
                ended.push(Ended::new(pending, Why::Lost(reason.to_owned())));
            }
        }
        again.into_iter().rev().for_each(|pending| self.waiting.push_front(pending));
        // With no answer on any link for a deadline, the peer has stalled and not this link
        // alone: what has waited behind the pipelines for as long must not wait for it again.
        if stalled {
            let silence = self.silence();
            self.end_waiting(Bound::Due, &mut ended, |call| {
                let silent = call.submitted.elapsed().min(silence);
                Some(silent).filter(|silent| *silent >= options.deadline)
            });
        }
        ended
    }

    /// Takes out what has waited too long for a link.
    pub(super) fn without_link(&mut self, options: &TcpOptions) -> Vec<Ended> {
        let Some(since) = self.down_since else { return Vec::new() };
        if since.elapsed() < options.deadline || self.waiting.is_empty() {
            return Vec::new();
        }
        let down_ms = since.elapsed().as_millis();
        let reason = format!("no connection for {down_ms} ms: {}", self.last_end);
        let lost = |pending| Ended::new(pending, Why::Lost(reason.clone()));
        self.waiting.drain(..).map(lost).collect()
    }

    /// How long no link has had an answer.
    fn silence(&self) -> Duration {
        self.last_answer.elapsed()
    }

    /// Ends what was asked for longer ago than `total`. What is on a link keeps its slot: the
    /// answer is still to come, and goes there.
    ///
    /// What has never been asked for does not age while answers come: the line is first in, first out,
    /// and what is before it ends within `total`. It ends here where none has come for `total`, or for
    /// the deadline where that is longer: where links come up and break, again and again.
    pub(super) fn past_total(&mut self, options: &TcpOptions, ended: &mut Vec<Ended>) {
        let (silence, most) = (self.silence(), options.total.max(options.deadline));
        self.end_waiting(Bound::Total, ended, |call| match call.asked {
            Some(_) => call.past_total(options.total),
            None => {
                let silent = call.submitted.elapsed().min(silence);
                Some(silent).filter(|silent| *silent >= most)
            }
        });
        for pending in self.links.iter_mut().flat_map(|link| link.flying.iter_mut()) {
            if pending.call.told {
                continue;
            }
            if let Some(waited) = pending.call.past_total(options.total) {
                let call = pending.call.clone();
                ended.push(Ended { call, slot: None, why: Why::Late(Bound::Total, waited) });
                pending.call.told = true;
            }
        }
    }

    /// Ends what waits and is `late`, by what that says.
    fn end_waiting(
        &mut self,
        bound: Bound,
        ended: &mut Vec<Ended>,
        late: impl Fn(&Call) -> Option<Duration>,
    ) {
        if self.waiting.iter().all(|pending| late(&pending.call).is_none()) {
            return;
        }
        for pending in std::mem::take(&mut self.waiting) {
            match late(&pending.call) {
                Some(waited) => ended.push(Ended::new(pending, Why::Late(bound, waited))),
                None => self.waiting.push_back(pending),
            }
        }
    }
}

/// Ends both directions. An error means that the socket has ended already.
pub(super) fn shut(socket: &TcpStream) {
    if let Err(error) = socket.shutdown(Shutdown::Both) {
        tracing::trace!(%error, "shutdown of a socket that had ended");
    }
}
