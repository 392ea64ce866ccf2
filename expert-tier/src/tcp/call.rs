//! One request on its way through the backend.

use std::time::{Duration, Instant};

use super::TcpOptions;
use crate::arena::{Free, Slot};
use crate::key::ExpertKey;
use crate::record::RecordIdentity;
use crate::tier::{CompletionQueue, Ticket};

/// One request, apart from its slot.
#[derive(Clone)]
pub(super) struct Call {
    pub(super) ticket: Ticket,
    pub(super) identity: RecordIdentity,
    pub(super) queue: CompletionQueue,
    pub(super) submitted: Instant,
    /// When it was first sent: its total runs from then on, however often it is sent again.
    pub(super) asked: Option<Instant>,
    /// When it was last sent.
    pub(super) sent: Instant,
    pub(super) attempts: u32,
    pub(super) cancelled: bool,
    /// Its completion has been sent: its time was over while the peer could still write.
    pub(super) told: bool,
    /// Names the request on the wire; another for each time it is sent.
    pub(super) wire_id: u64,
}

impl Call {
    pub(super) fn new(
        ticket: Ticket,
        identity: RecordIdentity,
        queue: CompletionQueue,
        submitted: Instant,
    ) -> Self {
        Self {
            ticket,
            identity,
            queue,
            submitted,
            asked: None,
            sent: submitted,
            attempts: 0,
            cancelled: false,
            told: false,
            wire_id: 0,
        }
    }

    /// How long ago it was asked for, where that is `total` or longer.
    pub(super) fn past_total(&self, total: Duration) -> Option<Duration> {
        self.asked.map(|asked| asked.elapsed()).filter(|age| *age >= total)
    }

    pub(super) fn key(&self) -> ExpertKey {
        self.identity.key
    }

    /// Whether it may be sent once more.
    pub(super) fn may_retry(&self, options: &TcpOptions) -> bool {
        self.attempts < options.attempts && !self.cancelled && !self.told
    }
}

/// A request with its slot, waiting or in flight.
pub(super) struct Pending {
    pub(super) call: Call,
    pub(super) slot: Slot<Free>,
}
