//! A rail's queue pair for experts that are not in the peer's memory.
//!
//! One request asks for one part of a record. With [`Transfer::Push`] the part's bytes are granted to
//! the peer first ([`Granted`]); the peer writes them and sends a receipt behind. Whatever becomes of
//! the request, the grant is revoked before anybody looks at the bytes or uses them again. With
//! [`Transfer::Stage`] nothing is granted; the receipt says where the bytes lie ready, and they are
//! READ from there.
//!
//! Send requests carry `Some` part where they READ it, and nothing where they are messages.
//!
//! The lane has a completion queue of its own, so what the disk of the peer makes late is never in
//! front of a READ of its memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::verbs::{
    CompletionChannel, CompletionQueue, Completions, Post, PreparedQueuePair, QueuePair,
    QueuePairOptions, Released, Remote, RemoteAccess, Signal, VerbsError, WorkCompletion,
    WorkError,
};
use railset::choose::RailSpec;
use railset::driver;
use railset::handshake::BringUp;
use railset::message::{Psn, QueuePairEnd, SpillTerms, Transfer};
use railset::push::{Fetch, PushRequest, PushStatus, RECEIPT_BYTES, Receipt, Window};

use super::devices::Device;
use super::grant::Granted;
use super::rail::Leftover;
use super::rate::Rate;
use crate::arena::Part;
use crate::key::ExpertKey;

/// Completions taken by one look.
const LOOK_COMPLETIONS: usize = 32;
/// Send requests per request of a part: its own, a READ and a release, and those that have ended and
/// not been reported.
const SENDS_PER_REQUEST: u32 = 4;

/// How the request of a part ended.
pub(super) enum PushEnd {
    /// The bytes are there.
    Landed(Granted),
    /// The peer says why they are not.
    Refused(Granted, PushStatus),
}

/// A request under way.
struct Pending {
    id: u64,
    /// `None` while the part is being READ.
    granted: Option<Granted>,
    bytes: u32,
    /// When it was asked for.
    since: Instant,
}

/// The queue pair before it is connected.
pub(super) struct PreparedPush {
    terms: SpillTerms,
    device: Arc<Device>,
    queue: Arc<CompletionQueue>,
    prepared: PreparedQueuePair<Option<Part>>,
    psn: Psn,
}

/// The connected queue pair, and what is under way on it.
pub(super) struct PushLane {
    terms: SpillTerms,
    device: Arc<Device>,
    queue: Arc<CompletionQueue>,
    completions: Completions,
    pair: QueuePair<Option<Part>>,
    batch: Vec<Post<Option<Part>>>,
    /// The requests whose staged bytes are being READ, in the order of their READs.
    staged: VecDeque<u64>,
    /// By the low half of the id; as many as there are credits.
    pending: Vec<Option<Pending>>,
    serial: u32,
    /// Parts that have been promised a place and not been posted.
    reserved: usize,
    /// When something last came, or began to be under way.
    progress: Instant,
    rate: Rate,
}

impl PreparedPush {
    pub(super) fn new(
        spec: &RailSpec,
        device: &Arc<Device>,
        terms: SpillTerms,
        psn: Psn,
    ) -> Result<Self, VerbsError> {
        let credits = u32::from(terms.credits);
        let limits = device.context().limits();
        let send_wr = (SENDS_PER_REQUEST * credits).min(limits.max_qp_wr).max(1);
        let queue = CompletionQueue::with_channel(&device.channel()?, send_wr + credits)?;
        let options = QueuePairOptions {
            port: spec.port,
            send_wr,
            recv_wr: credits,
            recv_bytes: RECEIPT_BYTES,
            inline_bytes: railset::push::MAX_REQUEST_BYTES as u32,
            remote_access: match terms.transfer {
                Transfer::Push => RemoteAccess::Write,
                Transfer::Stage => RemoteAccess::None,
            },
        };
        let prepared = QueuePair::prepare(device.domain(), &queue, &queue, options)?;
        Ok(Self { terms, device: Arc::clone(device), queue, prepared, psn })
    }

    pub(super) fn number(&self) -> u32 {
        self.prepared.number()
    }

    pub(super) fn psn(&self) -> Psn {
        self.psn
    }

    pub(super) fn connect(
        self,
        spec: &RailSpec,
        up: &BringUp,
        remote: QueuePairEnd,
    ) -> Result<PushLane, VerbsError> {
        let Self { terms, device, queue, prepared, psn } = self;
        let (remote, local) = driver::ends(up, spec, remote, psn);
        let pair = prepared.connect(&remote, &local).map_err(|error| error.source)?;
        let pending = std::iter::repeat_with(|| None).take(usize::from(terms.credits)).collect();
        Ok(PushLane {
            terms,
            device,
            queue,
            completions: Completions::with_room(LOOK_COMPLETIONS),
            pair,
            batch: Vec::with_capacity(1),
            staged: VecDeque::new(),
            pending,
            serial: 0,
            reserved: 0,
            progress: Instant::now(),
            rate: Rate::new(spec.bits_per_s),
        })
    }
}

impl PushLane {
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn terms(&self) -> SpillTerms {
        self.terms
    }

    /// Most bytes of a part.
    pub(super) fn part_bytes(&self) -> usize {
        self.terms.range_bytes as usize
    }

    /// Most bytes that are granted to the peer at once.
    pub(super) fn most_granted_bytes(&self) -> u64 {
        match self.terms.transfer {
            Transfer::Push => u64::from(self.terms.credits) * u64::from(self.terms.range_bytes),
            Transfer::Stage => 0,
        }
    }

    /// Requests under way, or about to be.
    pub(super) fn under_way(&self) -> usize {
        self.pending.iter().flatten().count() + self.reserved
    }

    pub(super) fn has_room(&self) -> bool {
        self.under_way() < self.pending.len()
    }

    /// Seconds until `bytes` that are asked for now would have come.
    pub(super) fn ready_in(&self, bytes: usize) -> f64 {
        self.rate.seconds_for(bytes as u64)
    }

    /// Keeps a place for a part of `bytes` that is about to be posted.
    pub(super) fn reserve(&mut self, bytes: usize) {
        let now = Instant::now();
        if self.under_way() == 0 {
            self.progress = now;
        }
        self.reserved += 1;
        self.rate.posted(bytes as u64, now);
    }

    /// Gives up a place that was kept.
    pub(super) fn unreserve(&mut self, bytes: usize) {
        self.reserved = self.reserved.saturating_sub(1);
        self.rate.given_up(bytes as u64);
    }

    /// Asks for a part that has a place.
    ///
    /// # Errors
    /// The device refuses: the part comes back, and the lane is of no further use.
    pub(super) fn post(
        &mut self,
        key: ExpertKey,
        granted: Granted,
    ) -> Result<(), Box<(Granted, String)>> {
        let range = granted.range();
        // It has its place from here on, or is not to have one.
        self.reserved = self.reserved.saturating_sub(1);
        let Some(index) = self.pending.iter().position(Option::is_none) else {
            return Err(Box::new((granted, "more requests than credits".into())));
        };
        self.serial = self.serial.wrapping_add(1);
        // Credits are at most 1024.
        let id = u64::from(self.serial) << 32 | index as u64;
        let bytes = range.len() as u32;
        let ExpertKey { layer, expert } = key;
        let (offset, into) = (range.start as u64, granted.window());
        let fetch = PushRequest::Fetch(Fetch { id, layer, expert, offset, bytes, into });
        let (message, length) = fetch.encode();
        match self.send(&message[..length]) {
            Ok(()) => {
                let (granted, since) = (Some(granted), Instant::now());
                self.pending[index] = Some(Pending { id, granted, bytes, since });
                Ok(())
            }
            Err(why) => Err(Box::new((granted, why))),
        }
    }

    fn send(&mut self, message: &[u8]) -> Result<(), String> {
        let post = Post::send(None, message, Signal::No);
        self.batch.push(post.map_err(|refused| refused.reason.to_string())?);
        self.post_batch().map_err(|(_, why)| why)
    }

    /// Posts the one request in the batch.
    ///
    /// # Errors
    /// It was not taken: what it carried comes back.
    fn post_batch(&mut self) -> Result<(), (Option<Part>, String)> {
        let posted = self.pair.post(&mut self.batch);
        let left = self.batch.pop().map(Post::into_carried);
        match (posted, left) {
            (Ok(_), None) => Ok(()),
            (Ok(_), Some(left)) => Err((left, "the queue pair for spilled experts is full".into())),
            // One that the device may have taken stays with the queue pair.
            (Err(error), left) => Err((left.flatten(), error.to_string())),
        }
    }

    /// Takes what has come; says whether anything had.
    ///
    /// # Errors
    /// The queue pair is broken, or the peer breaks the protocol.
    pub(super) fn look(&mut self, each: &mut impl FnMut(PushEnd)) -> Result<bool, String> {
        let found = self.queue.poll(&mut self.completions).map_err(|error| error.to_string())?;
        if found == 0 {
            return Ok(false);
        }
        let mut why = None;
        let mut taken: [Option<WorkCompletion>; LOOK_COMPLETIONS] = [None; LOOK_COMPLETIONS];
        taken.iter_mut().zip(self.completions.iter()).for_each(|(place, it)| *place = Some(it));
        for completion in taken.into_iter().flatten() {
            let done = match completion.is_receive() {
                true => self.received(&completion, each),
                false => self.settled(&completion, each),
            };
            if let Err(error) = done {
                why.get_or_insert(error);
            }
        }
        self.progress = Instant::now();
        why.map_or(Ok(true), Err)
    }

    fn received(
        &mut self,
        completion: &WorkCompletion,
        each: &mut impl FnMut(PushEnd),
    ) -> Result<(), String> {
        let mut receipt = Err("nothing was received".to_owned());
        let reposted = self.pair.receive(completion, |received| {
            receipt = match received {
                Ok(received) => Receipt::decode(received.message)
                    .map_err(|error| format!("the peer sent no receipt: {error}")),
                Err(error) => Err(format!("a receipt failed: {error}")),
            };
        });
        let ended = self.take_receipt(receipt?, each);
        reposted.map_err(|error| error.to_string())?;
        ended
    }

    fn take_receipt(
        &mut self,
        receipt: Receipt,
        each: &mut impl FnMut(PushEnd),
    ) -> Result<(), String> {
        let Receipt { id, status, bytes, staged } = receipt;
        let place = self.pending.get_mut(id as u32 as usize);
        let pending = place.and_then(|place| place.take_if(|it| it.id == id));
        let Some(Pending { granted: Some(granted), bytes: asked, .. }) = pending else {
            return Err(format!(
                "the peer sent a receipt for request {id:#x}, which is not under way"
            ));
        };
        if status != PushStatus::Done {
            self.rate.given_up(asked.into());
            each(PushEnd::Refused(granted, status));
            return Ok(());
        }
        if bytes != asked {
            self.rate.given_up(asked.into());
            each(PushEnd::Refused(granted, PushStatus::Busy));
            return Err(format!("the peer sent a receipt for {bytes} of {asked} bytes"));
        }
        match self.terms.transfer {
            Transfer::Push => {
                self.rate.came(asked.into(), Instant::now(), true);
                each(PushEnd::Landed(granted));
                Ok(())
            }
            Transfer::Stage => match self.read_staged(id, granted, staged, asked) {
                Ok(()) => Ok(()),
                Err(refused) => {
                    let (part, why) = *refused;
                    self.rate.given_up(asked.into());
                    each(PushEnd::Refused(Granted::to_nobody(part), PushStatus::Busy));
                    Err(why)
                }
            },
        }
    }

    /// READs what the peer holds ready.
    ///
    /// # Errors
    /// It cannot be posted: the part comes back.
    fn read_staged(
        &mut self,
        id: u64,
        granted: Granted,
        staged: Window,
        bytes: u32,
    ) -> Result<(), Box<(Part, String)>> {
        // Nothing was granted, so nothing can stand against taking it back.
        let Some(part) = granted.revoke() else { return Ok(()) };
        let Some(region) = self.device.region(part.arena_id()) else {
            let why = format!("an arena is not registered with {}", self.device.name());
            return Err(Box::new((part, why)));
        };
        let remote = Remote { address: staged.address, rkey: staged.rkey };
        let refused = match Post::read(Some(part), &region, remote, Signal::Yes) {
            Ok(post) => {
                self.batch.push(post);
                self.post_batch().err()
            }
            Err(refused) => Some((refused.carried, refused.reason.to_string())),
        };
        if let Some((Some(part), why)) = refused {
            return Err(Box::new((part, why)));
        }
        self.staged.push_back(id);
        self.pending[id as u32 as usize] =
            Some(Pending { id, granted: None, bytes, since: Instant::now() });
        Ok(())
    }

    fn settled(
        &mut self,
        completion: &WorkCompletion,
        each: &mut impl FnMut(PushEnd),
    ) -> Result<(), String> {
        let mut ended: Result<(), WorkError> = Ok(());
        // Every READ reports by itself, so one completion settles at most one.
        let mut read = None;
        let settled = self.pair.settle(completion, |part, result| {
            ended = ended.and(result);
            read = part.map(|part| (part, result)).or(read.take());
        });
        settled.map_err(|error| error.to_string())?;
        if let Some((part, result)) = read {
            self.staged_came(part, result, each)?;
        }
        ended.map_err(|error| format!("a request for a spilled expert failed: {error}"))
    }

    /// The oldest READ of staged bytes has ended: the peer may have its place back.
    fn staged_came(
        &mut self,
        part: Part,
        result: Result<(), WorkError>,
        each: &mut impl FnMut(PushEnd),
    ) -> Result<(), String> {
        let granted = Granted::to_nobody(part);
        let Some(id) = self.staged.pop_front() else {
            return Err("a READ ended that was not under way".into());
        };
        let place = self.pending.get_mut(id as u32 as usize);
        let bytes = place.and_then(Option::take).map_or(0, |pending| pending.bytes);
        self.rate.came(bytes.into(), Instant::now(), result.is_ok());
        if result.is_err() {
            each(PushEnd::Refused(granted, PushStatus::Busy));
            return Ok(());
        }
        each(PushEnd::Landed(granted));
        let (message, length) = PushRequest::Release { id }.encode();
        self.send(&message[..length])
    }

    /// Whether something has been under way for `deadline` without anything coming, or one request for
    /// `total`, whatever came of others: a peer must not keep a slot by saying nothing of it.
    pub(super) fn is_stalled(&self, deadline: Duration, total: Duration) -> bool {
        let is_late = |pending: &Pending| pending.since.elapsed() >= total;
        let late = self.pending.iter().flatten().any(is_late);
        late || (self.under_way() > 0 && self.progress.elapsed() >= deadline)
    }

    /// Requests of which the peer has said nothing yet.
    pub(super) fn awaited(&self) -> usize {
        let waits = |pending: &&Pending| pending.granted.is_some();
        self.pending.iter().flatten().filter(waits).count() + self.reserved
    }

    /// Lets the next receipt wake the channel; what has come before does not.
    pub(super) fn arm(&self) -> Option<Arc<CompletionChannel>> {
        if self.awaited() == 0 || self.queue.arm().is_err() {
            return None;
        }
        self.device.channel().ok()
    }

    /// Bytes per second that it is taken to bring.
    pub(super) fn bytes_per_s(&self) -> f64 {
        self.rate.bytes_per_s()
    }

    /// Takes it to bring no more than that, until it has shown what it brings.
    pub(super) fn assume_at_most(&mut self, bytes_per_s: f64) {
        self.rate.assume_at_most(bytes_per_s);
    }

    /// Puts the queue pair in error.
    pub(super) fn fail(&mut self) {
        if let Err(error) = self.pair.fail() {
            tracing::debug!(%error, "a queue pair cannot be put in error");
        }
    }

    /// Takes back every part that the peer was to write, once the lane is of no further use.
    pub(super) fn give_up(&mut self, granted: &mut Vec<Granted>) {
        for place in &mut self.pending {
            if place.as_ref().is_some_and(|pending| pending.granted.is_some()) {
                granted.extend(place.take().and_then(|pending| pending.granted));
            }
        }
    }

    /// Whether nothing is under way that names memory; messages do not.
    pub(super) fn is_empty(&self) -> bool {
        self.staged.is_empty() && self.under_way() == 0
    }

    /// Destroys the queue pair; parts that were being READ go to `left`.
    pub(super) fn destroy(self, left: &mut Leftover) {
        let destroyed = self.pair.destroy(|carried| match carried {
            Released::Free(Some(part)) => left.take(Released::Free(part)),
            Released::Leaked(Some(part)) => left.take(Released::Leaked(part)),
            Released::Free(None) | Released::Leaked(None) => {}
        });
        if let Err(error) = destroyed {
            left.failed(&error);
        }
    }
}
