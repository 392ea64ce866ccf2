//! One rail: its queue pairs, and the parts that fly on them.
//!
//! All queue pairs of a rail report to one completion queue, which has a place for every request
//! that they can have in flight, so it cannot overflow. Parts go to the queue pair with the fewest
//! in flight; what one call of [`Rail::ring`] posts on a queue pair is one linked list and one
//! doorbell. A READ reports by itself when [`SIGNAL_BYTES`] have been posted since the last that
//! did, so that large parts are checked as they land and small ones do not cost a completion each;
//! the last of a list always does.
//!
//! A rail knows how fast it is: [`Rate`] follows the bytes that came while something was in flight,
//! and [`Rail::ready_in`] says how long it would take for a part that is posted now to come. Parts
//! go where that is soonest, so that rails of unequal speed end a batch together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::verbs::{
    CompletionQueue, Completions, MemoryRegion, Post, PreparedQueuePair, QueuePair,
    QueuePairOptions, Released, Remote, RemoteAccess, Signal, VerbsError, WorkError,
};
use railset::choose::RailSpec;
use railset::driver;
use railset::handshake::BringUp;
use railset::handshake::client::Create;
use railset::message::{Psn, Qpn, QueuePairEnd};
use railset::pairing::{RailEnds, RailPair};
use railset::table::{CheckedTable, Place};
use rand::Rng;

use super::devices::Device;
use super::grant::Granted;
use super::push::{PreparedPush, PushEnd, PushLane};
use super::rate::Rate;
use crate::arena::{ArenaId, Part};

/// Bytes posted between two READs that report by themselves.
const SIGNAL_BYTES: usize = 64 * 1024;
/// Between two looks at a rail that is being tried.
const TRY_NAP: Duration = Duration::from_micros(100);
/// Completions taken by one look.
const LOOK_COMPLETIONS: usize = 64;

/// A rail's queue pairs before they are connected.
pub(super) struct PreparedRail {
    spec: RailSpec,
    device: Arc<Device>,
    queue: Arc<CompletionQueue>,
    prepared: Vec<(PreparedQueuePair<Part>, Psn)>,
    push: Option<PreparedPush>,
}

/// A connected rail.
pub(super) struct Rail {
    /// Names it among all rails of this process's life.
    pub(super) number: u64,
    /// Which of the client's rails it is, 0 or 1.
    pub(super) slot: usize,
    ends: RailEnds,
    table: Option<Arc<CheckedTable>>,
    spec: RailSpec,
    device: Arc<Device>,
    queue: Arc<CompletionQueue>,
    completions: Completions,
    lanes: Vec<Lane>,
    /// The registration that was used last: one arena is the rule.
    region: Option<(ArenaId, Arc<MemoryRegion>)>,
    /// Since when, and why, it is being ended.
    ending: Option<(Instant, String)>,
    /// Whether it only brings what flies.
    retiring: bool,
    rate: Rate,
    /// For what the peer does not have in memory.
    pub(super) push: Option<PushLane>,
}

/// The parts that were in flight on queue pairs that were given up.
#[derive(Default)]
pub(super) struct Leftover {
    /// Parts that the device does not write any more.
    pub(super) back: Vec<Part>,
    /// Tags of the parts that the device may still write: their queue pair could not be destroyed. The
    /// parts are leaked, and their slots are quarantined.
    pub(super) lost: Vec<u32>,
    /// Why the first queue pair could not be destroyed.
    pub(super) why: Option<String>,
}

impl Leftover {
    pub(super) fn take(&mut self, part: Released<'_, Part>) {
        match part {
            Released::Free(part) => self.back.push(part),
            Released::Leaked(part) => {
                part.quarantine();
                self.lost.push(part.tag());
            }
        }
    }

    pub(super) fn failed(&mut self, error: &VerbsError) {
        tracing::error!(%error, "a queue pair cannot be destroyed: what it reads is lost");
        self.why.get_or_insert_with(|| error.to_string());
    }
}

struct Lane {
    pair: QueuePair<Part>,
    /// What the next ring posts.
    picked: Vec<(Part, Remote)>,
    batch: Vec<Post<Part>>,
    /// When it last completed something, or began to have something in flight.
    progress: Instant,
}

impl PreparedRail {
    /// Makes the queue pairs that `create` asks for, of `depth` READs each.
    pub(super) fn new(
        create: &Create,
        device: Arc<Device>,
        depth: u32,
    ) -> Result<Self, VerbsError> {
        let spec = &create.local;
        let random_psn = || Psn::from_random(rand::rng().next_u32());
        let new_push = |terms| PreparedPush::new(spec, &device, terms, random_psn());
        let push = create.push.map(new_push).transpose()?;
        let count = create.queue_pairs - u8::from(push.is_some());
        let depth = depth.min(device.context().limits().max_qp_wr).max(1);
        let queue = CompletionQueue::new(device.context(), depth * u32::from(count))?;
        let options = QueuePairOptions {
            port: spec.port,
            send_wr: depth,
            recv_wr: 0,
            recv_bytes: 0,
            inline_bytes: 0,
            // The peer has no business in this memory.
            remote_access: RemoteAccess::None,
        };
        let prepare = |_| {
            let pair = QueuePair::prepare(device.domain(), &queue, &queue, options)?;
            Ok((pair, random_psn()))
        };
        let prepared = (0..count).map(prepare).collect::<Result<_, VerbsError>>()?;
        Ok(Self { spec: spec.clone(), device, queue, prepared, push })
    }

    /// What the peer is told of them.
    pub(super) fn ends(&self) -> Result<Vec<QueuePairEnd>, railset::wire::DecodeError> {
        let reads = self.prepared.iter().map(|(pair, psn)| (pair.number(), *psn));
        let push = self.push.iter().map(|push| (push.number(), push.psn()));
        let end = |(number, psn)| Ok(QueuePairEnd { qpn: Qpn::new(number)?, psn });
        reads.chain(push).map(end).collect()
    }

    /// Connects them to the peer's.
    pub(super) fn connect(
        self,
        (number, slot): (u64, usize),
        pair: &RailPair,
        up: &BringUp,
    ) -> Result<Rail, VerbsError> {
        let Self { spec, device, queue, prepared, push } = self;
        let push = match (push, up.remote.last()) {
            (Some(push), Some(&remote)) => Some(push.connect(&spec, up, remote)?),
            _ => None,
        };
        let mut lanes = Vec::with_capacity(prepared.len());
        for ((pair, psn), remote) in prepared.into_iter().zip(&up.remote) {
            let (remote, local) = driver::ends(up, &spec, *remote, psn);
            let pair = pair.connect(&remote, &local).map_err(|error| error.source)?;
            // As many as there is ever room for, so that no fetch has to wait for the allocator.
            let (picked, batch) =
                (Vec::with_capacity(pair.room()), Vec::with_capacity(pair.room()));
            lanes.push(Lane { pair, picked, batch, progress: Instant::now() });
        }
        let completions = Completions::with_room(LOOK_COMPLETIONS);
        let (region, ending, table) = (None, None, None);
        let rate = Rate::new(spec.bits_per_s);
        let ends = pair.ends();
        Ok(Rail {
            number,
            slot,
            ends,
            table,
            spec,
            device,
            queue,
            completions,
            lanes,
            region,
            ending,
            retiring: false,
            rate,
            push,
        })
    }
}

impl Rail {
    /// For logs and errors.
    pub(super) fn name(&self) -> String {
        format!("{} port {} gid {}", self.spec.device, self.spec.port, self.spec.gid_index)
    }

    pub(super) fn spec(&self) -> &RailSpec {
        &self.spec
    }

    /// What its two ends are called.
    pub(super) fn ends(&self) -> RailEnds {
        self.ends
    }

    /// Uses `table` from now on.
    pub(super) fn use_table(&mut self, table: Arc<CheckedTable>) {
        self.table = Some(table);
    }

    /// Where the peer has an expert's record, if it has it in memory.
    pub(super) fn place(&self, layer_index: usize, expert: u32) -> Option<Place> {
        // The only rail of its connection, and so the table's only column.
        self.table.as_ref()?.place(layer_index, expert, 0)
    }

    /// Generation of its table; 0 before there is one.
    pub(super) fn generation(&self) -> u64 {
        self.table.as_ref().map_or(0, |table| table.generation())
    }

    /// Bytes per second that it is taken to bring.
    pub(super) fn bytes_per_s(&self) -> f64 {
        self.rate.bytes_per_s()
    }

    /// Takes it to bring no more than that, until it has shown what it brings.
    pub(super) fn assume_at_most(&mut self, bytes_per_s: f64) {
        self.rate.assume_at_most(bytes_per_s);
    }

    /// Whether parts may be posted on it.
    pub(super) fn takes_more(&self) -> bool {
        self.ending.is_none() && !self.retiring
    }

    /// Takes no more from now on.
    pub(super) fn retire(&mut self) {
        self.retiring = true;
    }

    /// Seconds until `bytes` that are posted now would have come.
    pub(super) fn ready_in(&self, bytes: usize) -> f64 {
        let picked = self.lanes.iter().flat_map(|lane| &lane.picked);
        let picked: usize = picked.map(|(part, _)| part.range().len()).sum();
        self.rate.seconds_for((picked + bytes) as u64)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn port(&self) -> u8 {
        self.spec.port
    }

    /// Parts that are read or asked for.
    pub(super) fn in_flight(&self) -> usize {
        self.reads_in_flight() + self.push.as_ref().map_or(0, PushLane::under_way)
    }

    fn reads_in_flight(&self) -> usize {
        self.lanes.iter().map(|lane| lane.pair.in_flight()).sum()
    }

    /// Why it is being ended, if it is.
    pub(super) fn ending(&self) -> Option<&str> {
        self.ending.as_ref().map(|(_, why)| why.as_str())
    }

    /// The queue pair that has the most room, if any has some.
    pub(super) fn best_lane(&self) -> Option<usize> {
        if !self.takes_more() {
            return None;
        }
        let room = |lane: &Lane| lane.pair.room().saturating_sub(lane.picked.len());
        let lanes = self.lanes.iter().enumerate().map(|(index, lane)| (room(lane), index));
        let best = lanes.max_by_key(|&(room, index)| (room, usize::MAX - index));
        best.filter(|&(room, _)| room > 0).map(|(_, index)| index)
    }

    /// Puts `part` in line to be read from `remote` on queue pair `lane`.
    pub(super) fn pick(&mut self, lane: usize, part: Part, remote: Remote) {
        self.lanes[lane].picked.push((part, remote));
    }

    /// Posts what was picked. Parts that could not be posted go to `back`, and the rail ends.
    pub(super) fn ring(&mut self, back: &mut Vec<Part>) {
        for index in 0..self.lanes.len() {
            if !self.lanes[index].picked.is_empty()
                && let Err(why) = self.ring_lane(index, back)
            {
                self.end(why);
            }
        }
    }

    fn ring_lane(&mut self, index: usize, back: &mut Vec<Part>) -> Result<(), String> {
        let Self { lanes, region, device, rate, .. } = self;
        let Lane { pair, picked, batch, progress } = &mut lanes[index];
        let (mut unreported, mut refused, now) = (0, None, Instant::now());
        let last = picked.len() - 1;
        for (at, (part, remote)) in picked.drain(..).enumerate() {
            let id = part.arena_id();
            if region.as_ref().is_none_or(|(known, _)| *known != id) {
                *region = device.region(id).map(|found| (id, found));
            }
            let Some((_, region)) = region else {
                refused = Some(format!("an arena is not registered with {}", device.name()));
                back.push(part);
                continue;
            };
            let bytes = part.range().len();
            unreported += bytes;
            let reports = at == last || unreported >= SIGNAL_BYTES;
            let signal = if reports { Signal::Yes } else { Signal::No };
            unreported = if reports { 0 } else { unreported };
            match Post::read(part, region, remote, signal) {
                Ok(post) => {
                    rate.posted(bytes as u64, now);
                    batch.push(post);
                }
                Err(error) => {
                    refused = Some(error.reason.to_string());
                    back.push(error.carried);
                }
            }
        }
        if pair.in_flight() == 0 {
            *progress = now;
        }
        let posted = pair.post(batch);
        // All of them fit, for `best_lane` has counted; what is left was refused.
        back.extend(batch.drain(..).map(Post::into_carried));
        match (posted, refused) {
            (Ok(_), None) => Ok(()),
            (Ok(_), Some(why)) => Err(why),
            (Err(error), _) => Err(error.to_string()),
        }
    }

    /// Takes what has completed, and says whether anything had. The first failure ends the rail.
    pub(super) fn look(&mut self, mut each: impl FnMut(Part, Result<(), WorkError>)) -> bool {
        let found = match self.queue.poll(&mut self.completions) {
            Ok(found) => found,
            Err(error) => {
                self.end(error.to_string());
                return false;
            }
        };
        if found == 0 {
            return false;
        }
        let (now, mut why) = (Instant::now(), None);
        for completion in self.completions.iter() {
            let number = completion.queue_pair();
            let Some(lane) = self.lanes.iter_mut().find(|lane| lane.pair.number() == number) else {
                continue;
            };
            lane.progress = now;
            let rate = &mut self.rate;
            let settled = lane.pair.settle(&completion, |part, result| {
                rate.came(part.range().len() as u64, now, result.is_ok());
                if let Err(error) = result {
                    why.get_or_insert_with(|| error.to_string());
                }
                each(part, result);
            });
            if let Err(error) = settled {
                why.get_or_insert_with(|| error.to_string());
            }
        }
        if let Some(why) = why {
            self.end(why);
        }
        true
    }

    /// Whether something has been in flight for `deadline` without anything completing.
    pub(super) fn is_stalled(&self, deadline: Duration, total: Duration) -> bool {
        let late = |lane: &Lane| lane.pair.in_flight() > 0 && lane.progress.elapsed() >= deadline;
        let late_push = self.push.as_ref().is_some_and(|lane| lane.is_stalled(deadline, total));
        self.ending.is_none() && (late_push || self.lanes.iter().any(late))
    }

    /// Reads a part of a record to see that bytes come, within `bound`. For a rail that nobody uses
    /// yet.
    pub(super) fn try_out(
        &mut self,
        part: Part,
        remote: Remote,
        bound: Duration,
    ) -> Result<(), String> {
        let until = Instant::now() + bound;
        self.pick(0, part, remote);
        let mut back = Vec::new();
        self.ring(&mut back);
        let mut came = None;
        while came.is_none() && self.ending.is_none() {
            if Instant::now() >= until {
                let ms = bound.as_millis();
                let why = format!("a READ to try it brought nothing within {ms} ms");
                // In error the device gives its attempts up, and destroying need not wait for them.
                self.end(why);
                break;
            }
            if !self.look(|_, result| came = Some(result)) {
                std::thread::sleep(TRY_NAP);
            }
        }
        match (came, self.ending()) {
            (Some(Ok(())), _) => Ok(()),
            (Some(Err(error)), _) => Err(format!("a READ to try it failed: {error}")),
            (None, why) => Err(why.unwrap_or("it ended").to_owned()),
        }
    }

    /// Takes no more, and puts its queue pairs in error, so that all that flies comes back.
    pub(super) fn end(&mut self, why: String) {
        if self.ending.is_some() {
            return;
        }
        tracing::debug!(rail = self.name(), why, "a rail ends");
        self.ending = Some((Instant::now(), why));
        for lane in &mut self.lanes {
            if let Err(error) = lane.pair.fail() {
                // What is left of it ends with the queue pair.
                tracing::debug!(%error, "a queue pair cannot be put in error");
            }
        }
        if let Some(lane) = &mut self.push {
            lane.fail();
        }
    }

    /// As [`look`](Self::look), for what the peer does not have in memory. Once the rail ends, what
    /// the peer has not sent goes to `revoke`.
    pub(super) fn look_at_pushes(&mut self, mut each: impl FnMut(PushEnd)) -> bool {
        let Some(lane) = &mut self.push else { return false };
        let looked = lane.look(&mut each);
        if let Err(why) = &looked {
            self.end(why.clone());
        }
        looked.unwrap_or(true)
    }

    /// Takes back what the peer was asked for, if the rail ends.
    pub(super) fn give_up_pushes(&mut self, revoke: &mut Vec<Granted>) {
        if let (Some(lane), true) = (&mut self.push, self.ending.is_some()) {
            lane.give_up(revoke);
        }
    }

    /// Whether the rail has ended or retired and nothing flies any more, or has been ending for
    /// `drain`.
    pub(super) fn is_over(&self, drain: Duration) -> bool {
        match &self.ending {
            Some((since, _)) => self.is_empty() || since.elapsed() >= drain,
            None => self.retiring && self.is_empty(),
        }
    }

    fn is_empty(&self) -> bool {
        self.reads_in_flight() == 0 && self.push.as_ref().is_none_or(PushLane::is_empty)
    }

    /// Destroys the queue pairs, after which the device writes nothing of theirs any more, and
    /// returns the parts that were still in flight.
    pub(super) fn destroy(self) -> Leftover {
        let mut left = Leftover::default();
        for lane in self.lanes {
            left.back.extend(lane.picked.into_iter().map(|(part, _)| part));
            if let Err(error) = lane.pair.destroy(|part| left.take(part)) {
                left.failed(&error);
            }
        }
        if let Some(lane) = self.push {
            lane.destroy(&mut left);
        }
        left
    }
}
