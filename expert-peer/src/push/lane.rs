//! One client's queue pair for spilled records on one rail.
//!
//! Sizes. `recv_wr`: one receive per credit with push; with stage two, since a client may send a
//! `Release` and the next `Fetch` before the first is looked at. `send_wr`: every chunk that its client
//! may hold, and two receipts per credit, since the completion of a receipt may be seen after the
//! client's next request. What finds no room waits in the outbox, which the credits bound. The
//! completion queue has a place for each of those.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::verbs::{
    CompletionQueue, Completions, MemoryRegion, Post, PostError, PostRefused, QueuePair,
    QueuePairOptions, Released, Remote, RemoteAccess, SettleError, Signal, VerbsError, WorkError,
    WriteFrom,
};
use railset::message::Transfer;
use railset::push::{MAX_REQUEST_BYTES, PushRequest, PushStatus, RECEIPT_BYTES, Receipt, Window};
use railset::wire::DecodeError;

use super::desk::Breach;
use super::spill::Filled;

/// What goes with a request to the device and comes back at its end.
pub(super) type Carried = (Option<WriteFrom>, Tag);

/// What is to be known of a request that has ended.
#[derive(Default)]
pub(super) struct Tag {
    /// The registration of file pages.
    region: Option<Arc<MemoryRegion>>,
    /// Of a receipt: how the client's request ended, and how many bytes came of it.
    pub(super) receipt: Option<(PushStatus, u32)>,
}

/// Why a lane ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum LaneEnd {
    #[error("the client left")]
    Left,
    #[error("its device is gone")]
    DeviceGone,
    #[error("the client sent {0}")]
    Breach(#[from] Breach),
    #[error("the client sent what is no request: {0}")]
    Decode(#[from] DecodeError),
    #[error("nothing that was sent has arrived for {} ms, which --push-stall-ms bounds", .0.as_millis())]
    Stalled(Duration),
    #[error("a request to the device ended as {0}")]
    Work(#[from] WorkError),
    #[error("{0}")]
    Settle(#[from] SettleError),
    #[error("{0}")]
    Post(#[from] PostError),
    #[error("{0}")]
    Verbs(#[from] VerbsError),
    #[error("what was read could not be made a request to the device: {0}")]
    Refused(#[source] VerbsError),
    #[error("the buffers are not registered with the lane's device")]
    Unregistered,
}

/// What could not be made a request to the device.
struct Unposted {
    /// Its bytes, if it had some.
    filled: Option<Filled>,
    why: LaneEnd,
}

impl Unposted {
    fn new(filled: Option<Filled>, why: LaneEnd) -> Box<Self> {
        Box::new(Self { filled, why })
    }

    fn refused(PostRefused { carried, reason }: PostRefused<Carried>) -> Box<Self> {
        Self::new(filled(carried), LaneEnd::Refused(reason))
    }
}

/// What a lane has to send.
enum Out {
    Write(Filled, Window, std::ops::Range<usize>),
    Receipt(Receipt),
}

/// The queue pair, as its thread has it.
pub(super) struct Lane {
    queue_pair: QueuePair<Carried>,
    queue: Arc<CompletionQueue>,
    /// Which device it is on.
    pub(super) device: usize,
    /// The client's control connection, to be ended with the lane.
    pub(super) socket: TcpStream,
    outbox: VecDeque<Out>,
    /// Receipts in the outbox.
    unsent: usize,
    /// Bytes that could not be sent, for their source.
    unposted: Option<Filled>,
    batch: Vec<Post<Carried>>,
    /// When what is in flight was last seen to move.
    moved: Instant,
    /// Whether its completion queue wakes the channel.
    armed: bool,
}

/// What one look at a lane brought.
#[derive(Default)]
pub(super) struct Found {
    pub(super) requests: Vec<PushRequest>,
    pub(super) ended: Vec<Carried>,
}

/// How many receives and sends a lane's queue pair has.
pub(super) fn sizes(
    transfer: Transfer,
    credits: u32,
    per_client: usize,
    max_wr: u32,
) -> QueuePairOptions {
    let (recv_wr, remote_access) = match transfer {
        Transfer::Push => (credits, RemoteAccess::None),
        Transfer::Stage => (2 * credits, RemoteAccess::Read),
    };
    let send_wr = u32::try_from(per_client).unwrap_or(u32::MAX).saturating_add(2 * credits);
    QueuePairOptions {
        port: 1,
        send_wr: send_wr.min(max_wr),
        recv_wr,
        recv_bytes: MAX_REQUEST_BYTES,
        inline_bytes: RECEIPT_BYTES as u32,
        remote_access,
    }
}

impl Lane {
    pub(super) fn new(
        queue_pair: QueuePair<Carried>,
        queue: Arc<CompletionQueue>,
        device: usize,
        socket: TcpStream,
    ) -> Self {
        Self {
            queue_pair,
            queue,
            device,
            socket,
            outbox: VecDeque::new(),
            unsent: 0,
            unposted: None,
            batch: Vec::new(),
            moved: Instant::now(),
            armed: false,
        }
    }

    /// Receipts that have not left.
    pub(super) fn unsent(&self) -> usize {
        self.unsent
    }

    /// Takes the completions that there are, as many as `room` has; says how many.
    pub(super) fn look(
        &mut self,
        room: &mut Completions,
        found: &mut Found,
    ) -> Result<usize, LaneEnd> {
        let count = self.queue.poll(room)?;
        if count > 0 {
            self.moved = Instant::now();
        }
        let mut end = Ok(());
        for completion in room.iter() {
            if completion.is_receive() {
                let mut request = Ok(None);
                self.queue_pair.receive(&completion, |received| {
                    request = match received {
                        Ok(received) => {
                            PushRequest::decode(received.message).map(Some).map_err(LaneEnd::from)
                        }
                        Err(error) => Err(error.into()),
                    };
                })?;
                found.requests.extend(request?);
                continue;
            }
            self.queue_pair.settle(&completion, |carried, outcome| {
                found.ended.push(carried);
                if let (Err(error), true) = (outcome, end.is_ok()) {
                    end = Err(LaneEnd::Work(error));
                }
            })?;
            // The first failure says why; those behind it are flushed.
            if end.is_err() {
                break;
            }
        }
        end.map(|()| count)
    }

    /// Puts the WRITE of `bytes` of what was read into the outbox.
    pub(super) fn write(&mut self, filled: Filled, into: Window, bytes: std::ops::Range<usize>) {
        self.outbox.push_back(Out::Write(filled, into, bytes));
    }

    pub(super) fn receipt(&mut self, receipt: Receipt) {
        self.unsent += 1;
        self.outbox.push_back(Out::Receipt(receipt));
    }

    /// Posts what there is room for, with one doorbell. `region` covers every slot.
    pub(super) fn flush(
        &mut self,
        region: Option<&MemoryRegion>,
        now: Instant,
    ) -> Result<(), LaneEnd> {
        while self.batch.len() < self.queue_pair.room() {
            let Some(out) = self.outbox.pop_front() else { break };
            // A receipt right behind reports for both.
            let signal = match self.outbox.front() {
                Some(Out::Receipt(_)) => Signal::No,
                _ => Signal::Yes,
            };
            self.unsent -= usize::from(matches!(out, Out::Receipt(_)));
            match post(out, region, signal) {
                Ok(post) => self.batch.push(post),
                Err(unposted) => {
                    let Unposted { filled, why } = *unposted;
                    // The lane ends by this, and gives its bytes back then.
                    self.unposted = filled;
                    return Err(why);
                }
            }
        }
        if !self.batch.is_empty() {
            if self.queue_pair.in_flight() == 0 {
                self.moved = now;
            }
            self.queue_pair.post(&mut self.batch)?;
        }
        Ok(())
    }

    /// When the lane has stalled, unless something moves before.
    pub(super) fn stalls_at(&self, stall: Duration) -> Option<Instant> {
        (self.queue_pair.in_flight() > 0).then(|| self.moved + stall)
    }

    /// Fails where nothing has moved for `stall`: the device would try for longer, and the buffers
    /// are needed.
    pub(super) fn check_stall(&self, now: Instant, stall: Duration) -> Result<(), LaneEnd> {
        match self.stalls_at(stall) {
            Some(due) if now >= due => Err(LaneEnd::Stalled(stall)),
            _ => Ok(()),
        }
    }

    /// Lets the next completion wake the channel, unless it would anyway.
    pub(super) fn arm(&mut self) -> Result<(), LaneEnd> {
        if !self.armed {
            self.queue.arm()?;
            self.armed = true;
        }
        Ok(())
    }

    /// The channel has been woken, by this lane or by another one.
    pub(super) fn disarm(&mut self) {
        self.armed = false;
    }

    /// Destroys the queue pair: nothing is sent any more. `each` gets the bytes that were being sent
    /// or were to be; if the device refuses, those being sent are leaked.
    pub(super) fn destroy(self, mut each: impl FnMut(Filled)) -> Result<(), VerbsError> {
        let Self { queue_pair, outbox, batch, unposted: refused, .. } = self;
        let waiting = batch.into_iter().filter_map(|post| filled(post.into_carried()));
        let unposted = outbox.into_iter().filter_map(|out| match out {
            Out::Write(filled, ..) => Some(filled),
            Out::Receipt(_) => None,
        });
        refused.into_iter().chain(waiting).chain(unposted).for_each(&mut each);
        queue_pair.destroy(|released| match released {
            Released::Free(carried) => filled(carried).into_iter().for_each(&mut each),
            Released::Leaked(_) => {}
        })
    }
}

fn post(
    out: Out,
    region: Option<&MemoryRegion>,
    signal: Signal,
) -> Result<Post<Carried>, Box<Unposted>> {
    match out {
        Out::Receipt(receipt) => {
            let tag = Tag { region: None, receipt: Some((receipt.status, receipt.bytes)) };
            Post::send((None, tag), &receipt.encode(), signal).map_err(Unposted::refused)
        }
        Out::Write(filled, Window { address, rkey }, bytes) => {
            let remote = Remote { address, rkey };
            match (filled, region) {
                (Filled::File(part, region), _) => {
                    let tag = Tag { region: Some(Arc::clone(&region)), receipt: None };
                    let carried = (Some(WriteFrom::File(part)), tag);
                    Post::write(carried, &region, remote, signal).map_err(Unposted::refused)
                }
                (Filled::Slot(slot), Some(region)) => {
                    let carried = (Some(WriteFrom::Slot(slot.into_part(bytes))), Tag::default());
                    Post::write(carried, region, remote, signal).map_err(Unposted::refused)
                }
                // Slots come from a source that has registered them.
                (slot, None) => Err(Unposted::new(Some(slot), LaneEnd::Unregistered)),
            }
        }
    }
}

/// The bytes that went with a request, for their source to take back.
pub(super) fn filled((from, tag): Carried) -> Option<Filled> {
    match from? {
        WriteFrom::Slot(part) => Some(Filled::Slot(part.into_slot())),
        WriteFrom::File(part) => tag.region.map(|region| Filled::File(part, region)),
    }
}

#[cfg(test)]
mod tests {
    use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions};
    use gpu_sys::slots::{PinnedSlot, pin_slots};

    use super::*;

    fn slot() -> PinnedSlot {
        let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
        let (_, mut slots) =
            pin_slots(4096, 1, PinnedOptions { bytes: 0, huge_pages, numa }).unwrap();
        slots.pop().unwrap()
    }

    #[test]
    fn bytes_that_cannot_be_sent_come_back_with_the_reason() {
        let out = Out::Write(Filled::Slot(slot()), Window::default(), 0..8);
        let Err(unposted) = post(out, None, Signal::Yes) else {
            panic!("no device knows the slot")
        };
        let Unposted { filled: Some(Filled::Slot(back)), why } = *unposted else {
            panic!("the slot is lost");
        };
        assert!(matches!(why, LaneEnd::Unregistered), "{why}");

        let reason = VerbsError::Setting {
            what: "a length",
            value: 0,
            on: "a request".into(),
            allowed: "1 or more".into(),
        };
        let carried = (Some(WriteFrom::Slot(back.into_part(0..0))), Tag::default());
        let unposted = Unposted::refused(PostRefused { carried, reason });
        assert!(matches!(unposted.filled, Some(Filled::Slot(_))));
        assert!(unposted.why.to_string().contains("1 or more"), "{}", unposted.why);
    }
}
