//! One stream's thread: connects, receives answers into slots, reconnects.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use railset::Backoff;
use rand::Rng;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::TICK;
use super::desk::{Call, Desk, LinkEnd, Pending};
use crate::arena::{Filling, Free, Slot};
use crate::error::FetchError;
use crate::record::Mismatch;
use crate::tier::{Fetched, Source, TierKind};
use crate::wire::frame::{FrameHeader, FrameType, HEADER_BYTES, MAX_TEXT_BYTES, Status};
use crate::wire::handshake::Goal;

/// Bytes per receive: a piece this large amortises the system call and is checked in the cache.
const PIECE_BYTES: usize = 256 * 1024;

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
                Err(reason) => {
                    if backoff.failures() == 0 {
                        tracing::warn!(stream = index, reason, "cannot connect; trying again");
                    }
                    desk.dial_failed(&reason);
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

fn dial(desk: &Desk) -> Result<TcpStream, String> {
    let goal = Goal::Resume(Arc::clone(&desk.manifest));
    desk.dialler.dial(goal).map(|(socket, _)| socket).map_err(|error| error.to_string())
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
        self.fill(&mut bytes)?;
        let header = FrameHeader::decode(&bytes).map_err(broken)?;
        match header.frame {
            FrameType::Record => {
                let Some(pending) = self.desk.answered(self.index, header.request_id) else {
                    let id = header.request_id;
                    return Err(LinkEnd::Broken(format!("an answer to {id}, which is not due")));
                };
                self.record(&header, pending)?;
                self.desk.next_due(self.index);
                Ok(())
            }
            FrameType::Drain => {
                self.desk.drain(self.index);
                Ok(())
            }
            FrameType::Refusal => {
                let text = self.text(header.body_bytes)?;
                let status = header.status.name();
                Err(LinkEnd::Broken(format!("the peer closed ({status}): {text}")))
            }
            other => Err(LinkEnd::Broken(format!("a {other:?} frame where a record was due"))),
        }
    }

    /// Receives the answer to `pending`: a record, or a status with a text.
    fn record(&self, header: &FrameHeader, pending: Pending) -> Result<(), LinkEnd> {
        if header.status != Status::Ok {
            return self.refused(header, pending);
        }
        let Pending { call, slot } = pending;
        let expected = call.identity.record_bytes();
        if header.body_bytes != expected {
            let reason = format!(
                "{} announced with {} bytes, it has {expected}",
                call.key(),
                header.body_bytes
            );
            self.desk.retry(Pending { call, slot }, false, &reason);
            return Err(LinkEnd::Broken(reason));
        }
        let mut slot = match slot.begin(call.identity) {
            Ok(slot) => slot,
            Err(refused) => {
                // `submit` compared the sizes, so this cannot happen to a request on the desk.
                let (key, needed) = (call.key(), refused.needed_bytes);
                let capacity = refused.slot.capacity();
                let error = FetchError::SlotTooSmall { key, needed, capacity };
                self.desk.fail(call, error, Some(refused.slot));
                return Err(LinkEnd::Broken(format!("no slot for {key}")));
            }
        };
        if let Err(end) = self.fill_slot(&mut slot) {
            let reason = match &end {
                LinkEnd::Broken(reason) => format!("in the middle of {}: {reason}", call.key()),
                LinkEnd::Stalled | LinkEnd::Closing => String::new(),
            };
            let slot = slot.abandon();
            self.desk.retry(Pending { call, slot }, matches!(end, LinkEnd::Stalled), &reason);
            return Err(end);
        }
        self.judge(call, slot);
        Ok(())
    }

    /// The whole record is in the slot: a residency if it is the right one.
    fn judge(&self, call: Call, slot: Slot<Filling>) {
        match slot.finish() {
            Ok(ready) => {
                let residency = ready.into_residency(&self.desk.manifest);
                self.desk.succeed(call, Fetched { residency, source: Source::Tcp });
            }
            Err(rejected) => self.reject(call, rejected.slot, rejected.mismatch),
        }
    }

    fn reject(&self, call: Call, slot: Slot<Free>, mismatch: Mismatch) {
        let (key, backend) = (call.key(), TierKind::Rdma);
        self.desk.accounts.mismatched();
        tracing::warn!(%key, %mismatch, peer = %self.desk.options.peer, "a record was rejected");
        if self.desk.may_retry(&call) {
            self.desk.retry(Pending { call, slot }, false, "");
            return;
        }
        let origin = self.desk.options.peer.clone();
        let error = FetchError::Mismatch { key, backend, origin, mismatch };
        self.desk.fail(call, error, Some(slot));
    }

    fn refused(&self, header: &FrameHeader, pending: Pending) -> Result<(), LinkEnd> {
        let text = match self.text(header.body_bytes) {
            Ok(text) => text,
            Err(end) => {
                self.desk.retry(pending, matches!(end, LinkEnd::Stalled), "cut short");
                return Err(end);
            }
        };
        let status = header.status;
        if matches!(status, Status::Draining | Status::Busy) && self.desk.may_retry(&pending.call) {
            self.desk.retry(pending, false, &text);
            return Err(LinkEnd::Broken(text));
        }
        let Pending { call, slot } = pending;
        let (key, peer) = (call.key(), self.desk.options.peer.clone());
        self.desk.fail(call, FetchError::Peer { key, peer, status, text }, Some(slot));
        Ok(())
    }

    fn text(&self, body_bytes: u64) -> Result<String, LinkEnd> {
        let mut bytes = vec![0; usize::try_from(body_bytes.min(MAX_TEXT_BYTES)).unwrap_or(0)];
        self.fill(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.chars().filter(|c| !c.is_control()).collect())
    }

    fn fill_slot(&self, slot: &mut Slot<Filling>) -> Result<(), LinkEnd> {
        let deadline = self.desk.options.deadline;
        let since = self.desk.head_since(self.index);
        while slot.remaining() > 0 {
            let spare = slot.spare();
            let piece = spare.len().min(PIECE_BYTES);
            let received = rustix::net::recv(self.socket, &mut spare[..piece], RecvFlags::WAITALL);
            match received.map(|(filled, _)| filled.0.len()) {
                Ok(0) => return Err(closed()),
                Ok(count) => slot.advance(count),
                Err(error) => self.judge_errno(error, true)?,
            }
            if slot.remaining() > 0 && since.elapsed() >= deadline {
                return Err(LinkEnd::Stalled);
            }
        }
        Ok(())
    }

    fn fill(&self, out: &mut [u8]) -> Result<(), LinkEnd> {
        let mut done = 0;
        while done < out.len() {
            match rustix::net::recv(self.socket, &mut out[done..], RecvFlags::empty()) {
                Ok((0, _)) => return Err(closed()),
                Ok((count, _)) => done += count,
                Err(error) => self.judge_errno(error, false)?,
            }
        }
        Ok(())
    }

    /// `Ok` where receiving goes on: the receive timeout is only an occasion to look around.
    fn judge_errno(&self, error: Errno, receiving: bool) -> Result<(), LinkEnd> {
        if !matches!(error, Errno::AGAIN | Errno::INTR) {
            return Err(LinkEnd::Broken(format!("the connection failed: {error}")));
        }
        if self.desk.closing() {
            return Err(LinkEnd::Closing);
        }
        self.desk.expire();
        if self.desk.overdue(self.index, receiving) {
            return Err(LinkEnd::Stalled);
        }
        Ok(())
    }
}

fn closed() -> LinkEnd {
    LinkEnd::Broken("the peer closed the connection".into())
}

fn broken(error: impl std::fmt::Display) -> LinkEnd {
    LinkEnd::Broken(error.to_string())
}
