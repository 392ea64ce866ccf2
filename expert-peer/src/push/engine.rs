//! The one thread that serves every lane: takes requests, has chunks read, WRITEs them, and sends
//! receipts.
//!
//! It looks all the time while there is something to do, and for [`SPIN`] after, or [`SPIN_QUEUED`];
//! then it waits in poll(2) for a completion, a read, a new lane or the next deadline. Completion queues
//! are armed only then.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::store::manifest::Manifest;
use gpu_sys::slots::PinnedSlot;
use gpu_sys::verbs::{CompletionChannel, Completions, MemoryRegion};
use railset::message::SpillTerms;
use railset::push::{Fetch, PushRequest, PushStatus, Receipt, Window};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::bell::Bell;
use super::desk::{Chunk, ClientId, Desk, LaneId, Limits, Overdue, Verdict};
use super::lane::{Carried, Found, Lane, LaneEnd, filled};
use super::place::Place;
use super::spill::{Ended, Filled, Spill};
use super::stats::PushStats;
use crate::ledger::Ledger;
use crate::seldom::Seldom;

/// How long the thread goes on looking for requests when there has been nothing to do: what a client
/// that fetches one record after the other takes from one to the next.
const SPIN: Duration = Duration::from_millis(1);
/// The same while requests are being read, or wait for a buffer: about what waking up would cost. What
/// they wait for takes several times that.
const SPIN_QUEUED: Duration = Duration::from_micros(20);
/// Longest wait in poll(2); everything that ends one earlier has a descriptor or a deadline.
const MOST_WAIT: Duration = Duration::from_secs(1);
/// Most completions of a lane that one look takes, so that lanes take turns.
const LOOK: usize = 32;

/// What others tell the thread.
pub(super) enum Mail {
    Lane(LaneId, ClientId, Box<Lane>),
    Left(LaneId),
    /// A device has come, with the registration of the buffers, if there are any.
    Device(usize, Option<MemoryRegion>, Arc<CompletionChannel>),
    /// A device is gone.
    DeviceGone(usize),
    Stop,
}

/// What the thread works with. Fields are dropped in this order: lanes send from the source's bytes.
pub(super) struct Engine {
    pub(super) lanes: BTreeMap<LaneId, Lane>,
    pub(super) staged: HashMap<(LaneId, u64), PinnedSlot>,
    pub(super) spill: Spill,
    pub(super) desk: Desk,
    pub(super) terms: SpillTerms,
    pub(super) deadline: Duration,
    pub(super) stall: Duration,
    pub(super) manifest: Arc<Manifest>,
    pub(super) ledger: Arc<Ledger>,
    /// Of each device, by its number; `None` where the device is gone.
    pub(super) channels: Vec<Option<Arc<CompletionChannel>>>,
    pub(super) mail: Receiver<Mail>,
    pub(super) bell: Bell,
    pub(super) stats: Arc<PushStats>,
    pub(super) unreadable: Unreadable,
}

/// What could not be read, chunk by chunk: a disk that fails says so with every one.
#[derive(Default)]
pub(super) struct Unreadable(Seldom);

impl Unreadable {
    fn say(&mut self, stats: &PushStats, key: ExpertKey, error: &str) {
        stats.unreadable();
        if let Some(so_far) = self.0.once_more() {
            tracing::error!(%key, error, so_far, "a spilled record could not be read");
        }
    }
}

/// Room that the thread uses again and again.
struct Room {
    completions: Completions,
    found: Found,
    ended: Vec<Ended>,
    ends: Vec<(LaneId, LaneEnd)>,
}

impl Engine {
    /// The bounds of requests for a source and what is offered.
    pub(super) fn limits(
        terms: SpillTerms,
        spill: &Spill,
        options: &super::options::PushOptions,
    ) -> Limits {
        let stages = terms.transfer == railset::message::Transfer::Stage;
        Limits {
            credits: usize::from(terms.credits),
            chunk_bytes: spill.chunk_bytes(),
            reads: spill.reads(),
            per_client: per_client(spill.room()),
            deadline: options.deadline,
            lease: options.lease,
            stages,
        }
    }

    /// Serves until it is told to stop.
    pub(super) fn run(mut self) {
        let mut room = Room {
            completions: Completions::with_room(LOOK),
            found: Found::default(),
            ended: Vec::new(),
            ends: Vec::new(),
        };
        let (mut quiet_since, mut worked) = (None, false);
        while let Some(mailed) = self.take_mail(&mut room.ends) {
            if self.turn(&mut room) {
                (quiet_since, worked) = (None, true);
                continue;
            }
            let since = *quiet_since.get_or_insert_with(Instant::now);
            let spin = if self.desk.queued() > 0 { SPIN_QUEUED } else { SPIN };
            // A client that comes or goes is no sign of requests.
            if mailed || worked && since.elapsed() < spin {
                std::hint::spin_loop();
                continue;
            }
            (quiet_since, worked) = (None, false);
            if self.arm(&mut room.ends) {
                worked = self.turn(&mut room);
                if !worked {
                    self.wait();
                }
            }
        }
        let lanes: Vec<_> = self.lanes.keys().copied().collect();
        lanes.into_iter().for_each(|lane| self.end_lane(lane, &LaneEnd::Left));
    }

    /// Says whether there was any; `None` is the end.
    fn take_mail(&mut self, ends: &mut Vec<(LaneId, LaneEnd)>) -> Option<bool> {
        let mut any = false;
        while let Ok(mail) = self.mail.try_recv() {
            any = true;
            match mail {
                Mail::Stop => return None,
                Mail::Left(lane) => ends.push((lane, LaneEnd::Left)),
                Mail::Device(device, region, channel) => {
                    self.spill.set_region(device, region);
                    self.channels.resize(self.channels.len().max(device + 1), None);
                    self.channels[device] = Some(channel);
                }
                Mail::DeviceGone(device) => self.forget_device(device),
                Mail::Lane(id, client, lane) => {
                    self.desk.add_lane(id, client);
                    self.lanes.insert(id, *lane);
                }
            }
        }
        Some(any)
    }

    /// Ends the lanes on a device that is gone, then drops what is registered with it.
    fn forget_device(&mut self, device: usize) {
        let on_device = |(&id, lane): (&LaneId, &Lane)| (lane.device == device).then_some(id);
        let lanes: Vec<_> = self.lanes.iter().filter_map(on_device).collect();
        lanes.into_iter().for_each(|lane| self.end_lane(lane, &LaneEnd::DeviceGone));
        self.spill.set_region(device, None);
        if let Some(channel) = self.channels.get_mut(device) {
            *channel = None;
        }
    }

    /// Does what there is to do, without waiting; says if there was anything.
    fn turn(&mut self, room: &mut Room) -> bool {
        let mut busy = self.look_at_lanes(room);
        let now = Instant::now();
        while self.spill.has_room()
            && let Some(chunk) = self.desk.next_chunk(now)
        {
            busy = true;
            let device = self.lanes.get(&chunk.lane).map_or(0, |lane| lane.device);
            self.spill.start(chunk, device);
        }
        // Behind the requests, so that they go to the disk at once.
        self.spill.turn(&mut room.ended);
        busy |= !room.ended.is_empty();
        for end in room.ended.drain(..) {
            self.on_read(end, now);
        }
        busy |= self.expire(now);
        let Self { lanes, spill, stall, .. } = self;
        let stall = *stall;
        for (&id, lane) in lanes {
            let flushed = lane.flush(spill.region(lane.device), now);
            if let Err(end) = flushed.and_then(|()| lane.check_stall(now, stall)) {
                room.ends.push((id, end));
            }
        }
        for (lane, end) in room.ends.drain(..) {
            self.end_lane(lane, &end);
            busy = true;
        }
        self.stats.queued(self.desk.queued());
        busy
    }

    fn look_at_lanes(&mut self, room: &mut Room) -> bool {
        let mut busy = false;
        let mut after = Bound::Unbounded;
        while let Some((&id, lane)) = self.lanes.range_mut((after, Bound::Unbounded)).next() {
            after = Bound::Excluded(id);
            let looked = lane.look(&mut room.completions, &mut room.found);
            // What had ended before a failure has ended.
            for carried in room.found.ended.drain(..) {
                self.on_sent(id, carried);
            }
            let now = Instant::now();
            let requests = std::mem::take(&mut room.found.requests);
            let taken = looked.and_then(|count| {
                busy |= count > 0;
                requests.iter().try_for_each(|request| self.on_request(id, request, now))
            });
            room.found.requests = requests;
            room.found.requests.clear();
            if let Err(end) = taken {
                room.ends.push((id, end));
            }
        }
        busy
    }

    fn on_request(
        &mut self,
        id: LaneId,
        request: &PushRequest,
        now: Instant,
    ) -> Result<(), LaneEnd> {
        match *request {
            PushRequest::Fetch(fetch) => self.on_fetch(id, fetch, now),
            PushRequest::Release { id: request } => {
                self.desk.release(id, request);
                self.unstage(id, request);
                Ok(())
            }
        }
    }

    fn on_fetch(&mut self, id: LaneId, fetch: Fetch, now: Instant) -> Result<(), LaneEnd> {
        let place = Place::of(&self.manifest, &self.ledger, &fetch, self.terms.range_bytes);
        let Some(lane) = self.lanes.get_mut(&id) else { return Ok(()) };
        match self.desk.fetch(id, fetch, place, lane.unsent(), now)? {
            Some(refused) => lane.receipt(refused),
            None => {
                if let (Ok(place), 0) = (place, fetch.offset) {
                    self.ledger.fetched(place.key, 1);
                }
            }
        }
        Ok(())
    }

    /// A WRITE or a SEND has ended.
    fn on_sent(&mut self, id: LaneId, carried: Carried) {
        if let Some((status, bytes)) = carried.1.receipt {
            self.stats.ended(status, bytes);
        }
        if let Some(filled) = filled(carried) {
            self.spill.take_back(filled);
            self.desk.released(id);
        }
    }

    fn on_read(&mut self, end: Ended, now: Instant) {
        let Ended { chunk, outcome } = end;
        let verdict = self.desk.read(&chunk, outcome.is_ok(), now);
        let filled = match outcome {
            Ok(filled) => Some(filled),
            Err(error) => {
                self.unreadable.say(&self.stats, chunk.place.key, &error);
                None
            }
        };
        let Some(lane) = self.lanes.get_mut(&chunk.lane) else {
            return filled.into_iter().for_each(|filled| self.spill.take_back(filled));
        };
        match (verdict, filled) {
            (Verdict::Write(into, receipt), Some(filled)) => {
                lane.write(filled, into, chunk.skip..chunk.skip + chunk.wanted);
                receipt.into_iter().for_each(|receipt| lane.receipt(receipt));
            }
            (Verdict::Stage(receipt), Some(Filled::Slot(slot))) => {
                self.stage(&chunk, receipt, slot)
            }
            (Verdict::Fail(receipt), filled) => {
                lane.receipt(receipt);
                filled.into_iter().for_each(|filled| self.spill.take_back(filled));
            }
            (_, filled) => filled.into_iter().for_each(|filled| self.spill.take_back(filled)),
        }
    }

    /// Tells the client where in the peer's memory the bytes are.
    fn stage(&mut self, chunk: &Chunk, receipt: Receipt, slot: PinnedSlot) {
        let Some(lane) = self.lanes.get_mut(&chunk.lane) else {
            return self.spill.take_back(Filled::Slot(slot));
        };
        let rkey = self.spill.region(lane.device).map_or(0, MemoryRegion::rkey);
        let address = slot.start().addr().get() as u64 + chunk.skip as u64;
        lane.receipt(Receipt { staged: Window { address, rkey }, ..receipt });
        self.staged.insert((chunk.lane, receipt.id), slot);
    }

    /// Takes the place back where the bytes of a request were staged.
    fn unstage(&mut self, lane: LaneId, id: u64) {
        if let Some(slot) = self.staged.remove(&(lane, id)) {
            self.spill.take_back(Filled::Slot(slot));
            self.desk.released(lane);
        }
    }

    /// Ends what is overdue; says if anything was. What it frees may let something start.
    fn expire(&mut self, now: Instant) -> bool {
        if self.desk.next_deadline().is_none_or(|due| due > now) {
            return false;
        }
        let mut leases = Vec::new();
        let Self { deadline, stats, lanes, unreadable, .. } = self;
        self.desk.expire(now, |overdue| match overdue {
            Overdue::Request(id, key, receipt) => {
                if receipt.status == PushStatus::Unreadable {
                    let error = format!(
                        "the disk has given nothing of it for {deadline:?}, which \
                        --push-deadline-ms bounds"
                    );
                    unreadable.say(stats, key, &error);
                }
                let lane = lanes.get_mut(&id);
                lane.into_iter().for_each(|lane| lane.receipt(receipt));
            }
            Overdue::Lease(id, request) => leases.push((id, request)),
        });
        leases.into_iter().for_each(|(id, request)| self.unstage(id, request));
        true
    }

    /// Destroys a lane's queue pair, and unless its client has left ends the client's connection.
    fn end_lane(&mut self, id: LaneId, why: &LaneEnd) {
        let Some(lane) = self.lanes.remove(&id) else { return };
        let (device, socket) = (lane.device, lane.socket.try_clone());
        if !matches!(why, LaneEnd::Left) {
            let client = lane.socket.peer_addr().map(|address| address.to_string());
            tracing::warn!(client = client.unwrap_or_default(), reason = %why,
                "pushes to a client end, and its connection with them");
            self.stats.lane_broke();
        }
        let spill = &mut self.spill;
        if let Err(error) = lane.destroy(|filled| spill.take_back(filled)) {
            tracing::error!(%error, device, "a queue pair for pushes is leaked with its buffers");
        }
        self.stats.lane_gone();
        self.desk.remove_lane(id);
        let left: Vec<_> = self.staged.keys().filter(|staged| staged.0 == id).copied().collect();
        left.into_iter().for_each(|(lane, request)| self.unstage(lane, request));
        if !matches!(why, LaneEnd::Left) {
            // An error means that it has ended already.
            let _shut = socket.map(|socket| socket.shutdown(std::net::Shutdown::Both));
        }
    }

    /// Arms every lane; false if one ends by that.
    fn arm(&mut self, ends: &mut Vec<(LaneId, LaneEnd)>) -> bool {
        for (&id, lane) in &mut self.lanes {
            if let Err(end) = lane.arm() {
                ends.push((id, end));
            }
        }
        ends.is_empty()
    }

    /// Waits until there may be something to do.
    fn wait(&mut self) {
        let stalls = self.lanes.values().filter_map(|lane| lane.stalls_at(self.stall));
        let due = stalls.chain(self.desk.next_deadline()).min();
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = Timespec::try_from(left.unwrap_or(MOST_WAIT).min(MOST_WAIT)).ok();
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        let channels = self.channels.iter().enumerate();
        let channels: Vec<_> =
            channels.filter_map(|(device, it)| Some((device, it.as_ref()?))).collect();
        fds.extend(channels.iter().map(|(_, channel)| PollFd::new(channel, PollFlags::IN)));
        let disk = self.spill.fd();
        fds.extend(disk.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        // Interrupted or not, everything is looked at.
        let _woken = poll(&mut fds, timeout.as_ref());
        let woken: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if woken[0] {
            self.bell.hush();
        }
        for (at, &(device, channel)) in channels.iter().enumerate() {
            if !woken[at + 1] {
                continue;
            }
            if let Err(error) = channel.drain() {
                tracing::error!(%error, device, "the completions of a device cannot be waited for");
            }
            let of_device = |lane: &&mut Lane| lane.device == device;
            self.lanes.values_mut().filter(of_device).for_each(Lane::disarm);
        }
    }
}

/// Chunks that one client may hold on all its lanes: one that takes nothing of what is written to it keeps a
/// quarter of all buffers at most, until its queue pair gives up.
pub(super) fn per_client(room: usize) -> usize {
    (room / 4).max(2).min(room)
}

/// Whether a request that has ended so counts as an error.
pub(super) fn is_error(status: PushStatus) -> bool {
    status != PushStatus::Done
}
