//! One stream's thread: connects, receives answers into slots, reconnects.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use railset::Backoff;
use rand::Rng;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::TICK;
use super::call::{Call, Pending};
use super::desk::Desk;
use super::dial::DialError;
use super::links::{DrainSaid, LinkEnd};
use crate::arena::{Gathered, Judged, Parted, Rejected, Slot};
use crate::error::FetchError;
use crate::tier::{Fetched, Outcome, Source, TierKind};
use crate::wire::frame::{FrameHeader, FrameType, HEADER_BYTES, MAX_TEXT_BYTES, Status};
use crate::wire::handshake::Goal;

/// Bytes per receive: a part this large amortises the system call and is checked in the cache.
const PART_BYTES: usize = 256 * 1024;

/// Runs until the backend is closed.
pub(super) fn run(desk: &Desk, index: usize, first: Option<TcpStream>) {
    let mut backoff = Backoff::new(desk.options.backoff);
    let mut connected = first;
    let mut again = false;
    loop {
        let socket = match connected.take() {
            Some(socket) => socket,
            None => match dial(desk) {
                Ok(socket) => socket,
                Err(error) => {
                    desk.dial_failed(index, &error);
                    if desk.pause(backoff.failed(rand::rng().next_u32())) {
                        return;
                    }
                    continue;
                }
            },
        };
        let socket = Arc::new(socket);
        desk.link_up(index, &socket, again);
        let started = Instant::now();
        let end = Receiver { desk, index, socket: &socket }.run();
        desk.link_down(index, &end);
        again = true;
        match end {
            LinkEnd::Closing => return,
            LinkEnd::Broken(_) | LinkEnd::Stalled => desk.accounts.link_failed(),
        }
        // A peer that accepts and breaks at once must not be dialled in a tight loop.
        if started.elapsed() > desk.options.deadline {
            backoff.succeeded();
        }
        if desk.pause(backoff.failed(rand::rng().next_u32())) {
            return;
        }
    }
}

fn dial(desk: &Desk) -> Result<TcpStream, DialError> {
    let goal = Goal::Resume(Arc::clone(&desk.manifest));
    desk.dialler.dial_unless(&|| desk.closing(), goal)
}

/// The receiving half of one connection.
struct Receiver<'a> {
    desk: &'a Desk,
    index: usize,
    socket: &'a TcpStream,
}

impl Receiver<'_> {
    fn run(&self) -> LinkEnd {
        if let Err(error) = self.socket.set_read_timeout(Some(TICK)) {
            return LinkEnd::Broken(format!("cannot set a receive timeout: {error}"));
        }
        loop {
            if let Err(end) = self.answer() {
                return end;
            }
            if self.desk.drained(self.index) {
                return LinkEnd::Broken("the peer shut down".into());
            }
        }
    }

    /// Receives one frame from the peer.
    fn answer(&self) -> Result<(), LinkEnd> {
        let mut bytes = [0; HEADER_BYTES];
        self.fill(&mut bytes, || self.desk.overdue(self.index))?;
        let header = FrameHeader::decode(&bytes).map_err(broken)?;
        match header.frame {
            FrameType::Record => {
                let Some(pending) = self.desk.answered(self.index, header.request_id) else {
                    let id = header.request_id;
                    return Err(LinkEnd::Broken(format!("an answer to {id}, which is not due")));
                };
                self.record(&header, pending)?;
                // There is room for another request.
                self.desk.dispatch();
                Ok(())
            }
            FrameType::Drain => match self.desk.drain(self.index) {
                DrainSaid::Now => Ok(()),
                // Frames without end must not pass for a peer that is about to answer.
                DrainSaid::Before => Err(LinkEnd::Broken("a second Drain frame".into())),
            },
            FrameType::Refusal => {
                let since = Instant::now();
                let late = || since.elapsed() >= self.desk.options.deadline;
                let text = self.text(header.body_bytes, late)?;
                let status = header.status.name();
                Err(LinkEnd::Broken(format!("the peer closed ({status}): {text}")))
            }
            other => Err(LinkEnd::Broken(format!("a {other:?} frame where a record was due"))),
        }
    }

    /// Receives the answer to `pending`: a record, or a status with a text. Where the link ends
    /// before the answer does, the request is back at the desk.
    fn record(&self, header: &FrameHeader, pending: Pending) -> Result<(), LinkEnd> {
        if header.status != Status::Ok {
            return self.refused(header, pending);
        }
        let Pending { mut call, slot } = pending;
        let expected = call.identity.record_bytes();
        if header.body_bytes != expected {
            let (key, found) = (call.key(), header.body_bytes);
            let reason = format!("{key} announced with {found} bytes, it has {expected}");
            self.desk.put_back(self.index, Pending { call, slot });
            return Err(LinkEnd::Broken(reason));
        }
        let mut slot = match slot.begin_parted(call.identity) {
            Ok(slot) => slot,
            Err(refused) => {
                // `submit` compared the sizes, so this cannot happen to a request on the desk.
                let (key, needed) = (call.key(), refused.needed_bytes);
                let capacity = refused.slot.capacity();
                let error = FetchError::SlotTooSmall { key, needed, capacity };
                self.desk.fail(&call, error, Some(refused.slot));
                return Err(LinkEnd::Broken(format!("no slot for {key}")));
            }
        };
        let filled = self.fill_slot(&mut slot, &mut call);
        let slot = slot.wait_gathered(|| self.desk.checker.help());
        match filled {
            Ok(()) => {
                self.desk.whole(self.index, &mut call);
                self.judge(call, slot);
            }
            Err(end) => {
                let key = call.key();
                self.desk.put_back(self.index, Pending { call, slot: slot.abandon() });
                return Err(match end {
                    LinkEnd::Broken(reason) => {
                        LinkEnd::Broken(format!("in the middle of {key}: {reason}"))
                    }
                    LinkEnd::Stalled | LinkEnd::Closing => end,
                });
            }
        }
        Ok(())
    }

    /// The whole record is in the slot: a residency if it is the right one.
    fn judge(&self, call: Call, slot: Slot<Gathered>) {
        let desk = self.desk;
        let outcome = match slot.judge(&desk.manifest) {
            Judged::Record(residency) => {
                Outcome::Fetched(Fetched { residency, source: Source::Tcp })
            }
            Judged::Rejected(rejected) => return self.reject(call, rejected),
            #[cfg(feature = "unverified")]
            Judged::Unchecked(unchecked) => Outcome::Unchecked(unchecked),
        };
        desk.complete(&call, outcome);
    }

    /// Sends the request once more, while it has attempts left.
    fn reject(&self, call: Call, rejected: Rejected) {
        let (desk, key) = (self.desk, call.key());
        // A record that is damaged at the peer fails at every attempt of every fetch.
        let so_far = desk.count_rejection();
        if so_far <= 8 || so_far.is_power_of_two() {
            tracing::warn!(%key, mismatch = %rejected.mismatch, peer = %desk.options.peer, so_far,
                "a record was rejected");
        }
        desk.accounts.count_mismatch();
        let Rejected { slot, mismatch, .. } = rejected;
        if desk.may_retry(&call) {
            desk.retry(Pending { call, slot });
            return;
        }
        let error = if call.cancelled {
            FetchError::Cancelled { key }
        } else {
            let (backend, origin) = (TierKind::Rdma, desk.options.peer.clone());
            FetchError::Mismatch { key, backend, origin, mismatch }
        };
        desk.fail(&call, error, Some(slot));
    }

    fn refused(&self, header: &FrameHeader, pending: Pending) -> Result<(), LinkEnd> {
        let Pending { mut call, slot } = pending;
        let since = self.desk.head_since(self.index);
        let text = match self.text(header.body_bytes, || self.is_late(&mut call, since)) {
            Ok(text) => text,
            Err(end) => {
                self.desk.put_back(self.index, Pending { call, slot });
                return Err(end);
            }
        };
        let status = header.status;
        if matches!(status, Status::Draining | Status::Busy) && self.desk.may_retry(&call) {
            self.desk.put_back(self.index, Pending { call, slot });
            return Err(LinkEnd::Broken(text));
        }
        self.desk.whole(self.index, &mut call);
        let (key, peer) = (call.key(), self.desk.options.peer.clone());
        self.desk.fail(&call, FetchError::Peer { key, peer, status, text }, Some(slot));
        Ok(())
    }

    fn text(&self, body_bytes: u64, late: impl FnMut() -> bool) -> Result<String, LinkEnd> {
        let mut bytes = vec![0; usize::try_from(body_bytes.min(MAX_TEXT_BYTES)).unwrap_or(0)];
        self.fill(&mut bytes, late)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.chars().filter(|c| !c.is_control()).collect())
    }

    /// Receives a record; all of it must have come a deadline after it became due. One whose own
    /// time is over is received all the same: the stream is sound, and the next answer is behind.
    fn fill_slot(&self, slot: &mut Slot<Parted>, call: &mut Call) -> Result<(), LinkEnd> {
        let since = self.desk.head_since(self.index);
        while let Some(mut part) = slot.part(PART_BYTES) {
            let (mut done, len) = (0, part.range().len());
            while done < len {
                let received = rustix::net::recv(self.socket, part.spare(done), RecvFlags::WAITALL);
                match received.map(|(filled, _)| filled.0.len()) {
                    Ok(0) => return Err(self.closed()),
                    Ok(count) => done += count,
                    Err(error) => self.judge_errno(error)?,
                }
                if (done < len || slot.uncut() > 0) && self.is_late(call, since) {
                    return Err(LinkEnd::Stalled);
                }
            }
            self.desk.checker.give(part.landed());
        }
        Ok(())
    }

    /// Whether the answer to `call`, due since `since`, is overdue; tells its caller when the time
    /// of the request itself is over, and looks after the requests of others.
    fn is_late(&self, call: &mut Call, since: Instant) -> bool {
        self.desk.tell_if_late(call);
        self.desk.expire();
        since.elapsed() >= self.desk.options.deadline
    }

    /// Fills `out` while it is not `late`. Bytes that trickle in are held to the same bound as
    /// none.
    fn fill(&self, out: &mut [u8], mut late: impl FnMut() -> bool) -> Result<(), LinkEnd> {
        let mut done = 0;
        while done < out.len() {
            match rustix::net::recv(self.socket, &mut out[done..], RecvFlags::empty()) {
                Ok((0, _)) => return Err(self.closed()),
                Ok((count, _)) => done += count,
                Err(error) => self.judge_errno(error)?,
            }
            if done < out.len() && late() {
                return Err(LinkEnd::Stalled);
            }
        }
        Ok(())
    }

    /// `Ok` where receiving goes on: the receive timeout is only an occasion to look around.
    fn judge_errno(&self, error: Errno) -> Result<(), LinkEnd> {
        if self.desk.closing() {
            return Err(LinkEnd::Closing);
        }
        if !matches!(error, Errno::AGAIN | Errno::INTR) {
            return Err(LinkEnd::Broken(format!("the connection failed: {error}")));
        }
        self.desk.expire();
        Ok(())
    }

    /// The connection has ended: by our own doing where the backend is being closed.
    fn closed(&self) -> LinkEnd {
        if self.desk.closing() {
            return LinkEnd::Closing;
        }
        LinkEnd::Broken("the peer closed the connection".into())
    }
}

fn broken(error: impl std::fmt::Display) -> LinkEnd {
    LinkEnd::Broken(error.to_string())
}
