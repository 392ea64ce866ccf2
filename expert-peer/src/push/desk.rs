//! Who is served next: the requests of every lane, cut into chunks, without I/O and without a clock.
//!
//! A request goes through these states:
//!
//! ```text
//! waits        no chunk of it has been given out
//! reads        some have; each is counted until its read has ended, whatever becomes of the request
//! (sent)       its last chunk has been read: its receipt follows that chunk's WRITE, and it is gone
//! staged       stage only: the client has its receipt, and the place until Release or the lease's end
//! ```
//!
//! The bounds, and what holds them:
//!
//! * requests of a lane: `credits`, with the receipts that could not be sent yet. A client that goes
//!   beyond breaks the protocol ([`Breach`]), so a lane's memory is bounded by what it was offered.
//! * chunks of all lanes that the disk has: `reads`.
//! * chunks of one client that hold a buffer, whatever lanes it has: `per_client`, so that a client
//!   which takes nothing does not hold every buffer. Reads that a lane has left behind count too, until
//!   they end: coming back brings no new share.
//! * time in which the disk gives nothing: `deadline`. For a request that the disk has a chunk of, that
//!   is the time in which neither that chunk comes nor one that the disk got before ([`Disk`]). For one
//!   that waits for its turn or a buffer, it is the time in which nothing comes at all. While the disk
//!   gives something, waiting costs no request its time.
//!
//! Clients take turns chunk by chunk, and a client's lanes among themselves; within a lane the oldest
//! request comes first. So a request that waits has a bounded number of chunks before it.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use railset::push::{Fetch, PushStatus, Receipt, Window};

use super::place::Place;
use crate::disk::{Disk, ReadId};

/// Direct reads start and end at multiples of it, in records and in files alike.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Names a client, as it names itself when it connects: all its lanes have one share.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ClientId(pub(crate) [u8; 16]);

/// Names a lane: the queue pair of one client on one rail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct LaneId(pub(super) u64);

/// The bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Limits {
    pub(super) credits: usize,
    /// Bytes that a chunk is read with, a multiple of [`PAGE_BYTES`] and at least two of them.
    pub(super) chunk_bytes: u64,
    pub(super) reads: usize,
    pub(super) per_client: usize,
    pub(super) deadline: Duration,
    pub(super) lease: Duration,
    /// Whether receipts say where the bytes are staged.
    pub(super) stages: bool,
}

/// A chunk to be read: `bytes` bytes of the record from `from` on, whole pages of it, of which
/// `wanted` bytes after the first `skip` are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chunk {
    pub(super) client: ClientId,
    pub(super) lane: LaneId,
    /// The request's number in this desk.
    pub(super) request: u64,
    /// Its read.
    pub(super) read: ReadId,
    pub(super) place: Place,
    pub(super) from: u64,
    pub(super) bytes: usize,
    pub(super) skip: usize,
    pub(super) wanted: usize,
}

/// What becomes of a chunk whose read has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// It is to be written there; with its request's receipt behind it, if it was the last one.
    Write(Window, Option<Receipt>),
    /// It stays where it is, for the client to READ; the receipt lacks only where that is.
    Stage(Receipt),
    /// Its request ends with this receipt, without it.
    Fail(Receipt),
    /// Its request has ended already.
    Forget,
}

/// A client that does what none may.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Breach {
    #[error("more than the {credits} requests under way that it was given credits for")]
    Credits { credits: usize },
    #[error("a request for a staged record that names memory of the client's")]
    Window,
}

/// What has taken too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Overdue {
    /// A request for a record, which ends with this receipt.
    Request(LaneId, ExpertKey, Receipt),
    /// The lease of what was staged for a request.
    Lease(LaneId, u64),
}

/// The requests of every lane.
pub(super) struct Desk {
    limits: Limits,
    disk: Disk,
    lanes: BTreeMap<LaneId, Lane>,
    clients: BTreeMap<ClientId, Client>,
    /// The next client to be served comes first.
    turns: VecDeque<ClientId>,
    /// Chunks that the disk has.
    reading: usize,
    next_request: u64,
}

/// One with lanes, or with reads that the lanes it had have left to the disk.
#[derive(Default)]
struct Client {
    /// The next one to be served comes first.
    lanes: VecDeque<LaneId>,
    /// Chunks that hold a buffer.
    held: usize,
}

struct Lane {
    client: ClientId,
    /// Oldest first.
    requests: VecDeque<Request>,
    /// Ids whose bytes the client may READ, and until when.
    staged: VecDeque<(u64, Instant)>,
    /// Chunks that hold a buffer.
    held: usize,
    /// Those of them that the disk has.
    reading: usize,
}

struct Request {
    number: u64,
    fetch: Fetch,
    place: Place,
    begun: Instant,
    /// Where in the record the next chunk starts.
    next: u64,
    /// Its chunks that the disk has.
    reading: Vec<ReadId>,
}

impl Request {
    fn end(&self) -> u64 {
        self.fetch.offset + u64::from(self.fetch.bytes)
    }

    fn ended(&self, status: PushStatus) -> Receipt {
        let bytes = if status == PushStatus::Done { self.fetch.bytes } else { 0 };
        Receipt { id: self.fetch.id, status, bytes, staged: Window::default() }
    }

    /// Since when the disk has given nothing for it, and what it is if that is too long.
    fn clock(&self, disk: &Disk) -> (Instant, PushStatus) {
        match self.reading.iter().min().and_then(|first| disk.since(*first)) {
            Some(since) => (since, PushStatus::Unreadable),
            None => (disk.delivered().unwrap_or(self.begun).max(self.begun), PushStatus::Busy),
        }
    }

    /// The next chunk, at most `chunk_bytes` of whole pages.
    fn take_chunk(
        &mut self,
        (client, lane): (ClientId, LaneId),
        chunk_bytes: u64,
        read: ReadId,
    ) -> Chunk {
        let from = self.next - self.next % PAGE_BYTES;
        let end = self.end().min(from + chunk_bytes);
        let (skip, wanted) = (self.next - from, end - self.next);
        let bytes = (end - from).next_multiple_of(PAGE_BYTES);
        self.next = end;
        self.reading.push(read);
        // A chunk is a few hundred kilobytes.
        let (bytes, skip, wanted) = (bytes as usize, skip as usize, wanted as usize);
        let (request, place) = (self.number, self.place);
        Chunk { client, lane, request, read, place, from, bytes, skip, wanted }
    }
}

impl Desk {
    /// For chunks that are read from `disk`.
    pub(super) fn new(limits: Limits, disk: Disk) -> Self {
        let (lanes, clients, turns) = (BTreeMap::new(), BTreeMap::new(), VecDeque::new());
        Self { limits, disk, lanes, clients, turns, reading: 0, next_request: 0 }
    }

    pub(super) fn add_lane(&mut self, id: LaneId, client: ClientId) {
        let (requests, staged) = (VecDeque::new(), VecDeque::new());
        self.lanes.insert(id, Lane { client, requests, staged, held: 0, reading: 0 });
        let of_client = self.clients.entry(client).or_default();
        if of_client.lanes.is_empty() {
            self.turns.push_back(client);
        }
        of_client.lanes.push_back(id);
    }

    /// Forgets a lane and its requests; its reads under way still count as the disk's, and hold
    /// buffers of its client's share. What else it held has gone back with its queue pair.
    pub(super) fn remove_lane(&mut self, id: LaneId) {
        let Some(lane) = self.lanes.remove(&id) else { return };
        let Some(client) = self.clients.get_mut(&lane.client) else { return };
        client.lanes.retain(|other| *other != id);
        if client.lanes.is_empty() {
            self.turns.retain(|turn| *turn != lane.client);
        }
        self.give_back(lane.client, lane.held - lane.reading);
    }

    /// Requests waiting or under way.
    pub(super) fn queued(&self) -> usize {
        self.lanes.values().map(|lane| lane.requests.len()).sum()
    }

    /// Takes a request. `place` says where the record is, or why it cannot be had; `unsent` is how
    /// many receipts of the lane have not left. A receipt that comes back is the request's end.
    pub(super) fn fetch(
        &mut self,
        id: LaneId,
        fetch: Fetch,
        place: Result<Place, PushStatus>,
        unsent: usize,
        now: Instant,
    ) -> Result<Option<Receipt>, Breach> {
        let credits = self.limits.credits;
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(None) };
        if lane.requests.len() + lane.staged.len() + unsent >= credits {
            return Err(Breach::Credits { credits });
        }
        if self.limits.stages && fetch.into != Window::default() {
            return Err(Breach::Window);
        }
        let refused = |status| {
            Ok(Some(Receipt { id: fetch.id, status, bytes: 0, staged: Window::default() }))
        };
        let live = lane.requests.iter().map(|request| request.fetch.id);
        if live.chain(lane.staged.iter().map(|staged| staged.0)).any(|live| live == fetch.id) {
            return refused(PushStatus::InUse);
        }
        let place = match place {
            Ok(place) => place,
            Err(status) => return refused(status),
        };
        let (number, next) = (self.next_request, fetch.offset);
        self.next_request += 1;
        let (begun, reading) = (now, Vec::new());
        lane.requests.push_back(Request { number, fetch, place, begun, next, reading });
        Ok(None)
    }

    /// The client has READ what was staged for request `id`; says if anything was.
    pub(super) fn release(&mut self, lane: LaneId, id: u64) -> bool {
        let Some(lane) = self.lanes.get_mut(&lane) else { return false };
        let before = lane.staged.len();
        lane.staged.retain(|staged| staged.0 != id);
        lane.staged.len() < before
    }

    /// The next chunk to be read, if there is one that may be; for a caller that has a buffer.
    pub(super) fn next_chunk(&mut self, now: Instant) -> Option<Chunk> {
        if self.reading >= self.limits.reads {
            return None;
        }
        for _ in 0..self.turns.len() {
            let id = self.turns.pop_front()?;
            self.turns.push_back(id);
            if let Some(chunk) = self.next_of_client(id, now) {
                self.reading += 1;
                return Some(chunk);
            }
        }
        None
    }

    fn next_of_client(&mut self, id: ClientId, now: Instant) -> Option<Chunk> {
        let client = self.clients.get_mut(&id)?;
        if client.held >= self.limits.per_client {
            return None;
        }
        for _ in 0..client.lanes.len() {
            let at = client.lanes.pop_front()?;
            client.lanes.push_back(at);
            let Some(lane) = self.lanes.get_mut(&at) else { continue };
            let Some(request) = lane.requests.iter_mut().find(|it| it.next < it.end()) else {
                continue;
            };
            lane.held += 1;
            lane.reading += 1;
            client.held += 1;
            let read = self.disk.begin(now);
            return Some(request.take_chunk((id, at), self.limits.chunk_bytes, read));
        }
        None
    }

    /// A chunk's read has ended. Unless it is to be written or staged, its buffer is free.
    pub(super) fn read(&mut self, chunk: &Chunk, all_there: bool, now: Instant) -> Verdict {
        self.reading = self.reading.saturating_sub(1);
        self.disk.end(chunk.read, all_there, now);
        let verdict = self.judge(chunk, all_there, now);
        match self.lanes.get_mut(&chunk.lane) {
            Some(lane) => lane.reading -= 1,
            None => self.give_back(chunk.client, 1),
        }
        if matches!(verdict, Verdict::Fail(_) | Verdict::Forget) {
            self.released(chunk.lane);
        }
        verdict
    }

    fn judge(&mut self, chunk: &Chunk, all_there: bool, now: Instant) -> Verdict {
        let Some(lane) = self.lanes.get_mut(&chunk.lane) else { return Verdict::Forget };
        let at = lane.requests.iter().position(|request| request.number == chunk.request);
        let Some(request) = at.and_then(|at| lane.requests.get_mut(at)) else {
            return Verdict::Forget;
        };
        request.reading.retain(|read| *read != chunk.read);
        let last = request.reading.is_empty() && request.next >= request.end();
        let mut window = request.fetch.into;
        let first = chunk.from + chunk.skip as u64 - request.fetch.offset;
        // A client whose window ends beyond all addresses gets what its device says of that.
        window.address = window.address.wrapping_add(first);
        if !last && all_there {
            return Verdict::Write(window, None);
        }
        let status = if all_there { PushStatus::Done } else { PushStatus::Unreadable };
        let receipt = request.ended(status);
        at.and_then(|at| lane.requests.remove(at));
        if !all_there {
            return Verdict::Fail(receipt);
        }
        if self.limits.stages {
            lane.staged.push_back((receipt.id, now + self.limits.lease));
            return Verdict::Stage(receipt);
        }
        Verdict::Write(window, Some(receipt))
    }

    /// A buffer of the lane's is free again; of a lane that has gone, it is already.
    pub(super) fn released(&mut self, lane: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.held = lane.held.saturating_sub(1);
            let client = lane.client;
            self.give_back(client, 1);
        }
    }

    /// A client holds so many buffers less; one with neither lanes nor buffers is forgotten.
    fn give_back(&mut self, id: ClientId, buffers: usize) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.held = client.held.saturating_sub(buffers);
            if client.held == 0 && client.lanes.is_empty() {
                self.clients.remove(&id);
            }
        }
    }

    /// Ends what has taken too long. A request that waits finds the peer busy, for its turn or a buffer
    /// at first or for some of its chunks later; one of which the disk keeps a chunk is unreadable. Its
    /// buffers stay the disk's until the reads end.
    pub(super) fn expire(&mut self, now: Instant, mut each: impl FnMut(Overdue)) {
        let Self { limits, lanes, disk, .. } = self;
        for (&id, lane) in lanes {
            lane.requests.retain(|request| {
                let (since, status) = request.clock(disk);
                let late = now >= since + limits.deadline;
                if late {
                    each(Overdue::Request(id, request.place.key, request.ended(status)));
                }
                !late
            });
            while let Some((staged, _)) = lane.staged.pop_front_if(|(_, until)| now >= *until) {
                each(Overdue::Lease(id, staged));
            }
        }
    }

    /// When [`expire`](Self::expire) is due next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        // Chunks are given out in the order of the requests, so those that the disk has some of come
        // first in a lane, and of the others the first has waited for longest.
        let waits = |request: &&Request| request.reading.is_empty();
        let lanes = || self.lanes.values();
        let read = lanes().flat_map(|lane| lane.requests.iter().take_while(|it| !waits(it)));
        let waiting = lanes().filter_map(|lane| lane.requests.iter().find(waits));
        // The disk's clocks are in the order of the reads.
        let first_read = read.flat_map(|request| &request.reading).min();
        let first_waiting = waiting.min_by_key(|request| request.begun);
        let kept = first_read.and_then(|read| self.disk.since(*read));
        let busy = first_waiting.map(|request| request.clock(&self.disk).0);
        let requests = kept.into_iter().chain(busy).map(|since| since + self.limits.deadline);
        let leases = lanes().filter_map(|lane| lane.staged.front().map(|staged| staged.1));
        requests.chain(leases).min()
    }
}

#[cfg(test)]
#[path = "desk_tests.rs"]
mod tests;
