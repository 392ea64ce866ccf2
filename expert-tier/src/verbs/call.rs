//! One request on its way through the backend, and the table of all of them.

use std::time::Instant;

use crate::arena::{Part, Parted, Slot};
use crate::error::FetchError;
use crate::key::ExpertKey;
use crate::record::RecordIdentity;
use crate::tier::{CompletionQueue, Ticket};

/// How a record comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// It is read from the peer's memory.
    Read,
    /// The peer reads it from its disk and sends it.
    Push,
}

/// One request.
pub(super) struct Call {
    pub(super) ticket: Ticket,
    pub(super) identity: RecordIdentity,
    /// The layer's place in the manifest and in the peer's table.
    pub(super) layer_index: usize,
    pub(super) queue: CompletionQueue,
    pub(super) submitted: Instant,
    /// When its first part was posted or asked for, or a device refused to: its total runs from then on.
    pub(super) asked: Option<Instant>,
    pub(super) attempts: u32,
    pub(super) slot: Slot<Parted>,
    /// Parts that came back from a rail that broke, to be read again.
    pub(super) back: Vec<Part>,
    /// Parts that fly or are being checked.
    pub(super) out: usize,
    /// Which line it is in when it has parts to post.
    pub(super) way: Way,
    /// Whether it is in that line.
    pub(super) in_line: bool,
    /// Whether some of it was sent by the peer instead of being read.
    pub(super) was_pushed: bool,
    /// Generation of the oldest table that a part of it was read by; `None` if none was read.
    pub(super) generation: Option<u64>,
    pub(super) cancelled: bool,
    /// Its completion has been sent: its time was over while a NIC could still write.
    pub(super) told: bool,
    /// Why it has failed, once nothing of it flies any more.
    pub(super) failed: Option<FetchError>,
}

impl Call {
    pub(super) fn new(
        ticket: Ticket,
        identity: RecordIdentity,
        layer_index: usize,
        queue: CompletionQueue,
        submitted: Instant,
        slot: Slot<Parted>,
    ) -> Self {
        let (attempts, back, out, way, in_line) = (1, Vec::new(), 0, Way::Read, false);
        let (cancelled, told, failed) = (false, false, None);
        let (was_pushed, generation) = (false, None);
        Self {
            ticket,
            identity,
            layer_index,
            queue,
            submitted,
            asked: None,
            attempts,
            slot,
            back,
            out,
            way,
            in_line,
            was_pushed,
            generation,
            cancelled,
            told,
            failed,
        }
    }

    pub(super) fn key(&self) -> ExpertKey {
        self.identity.key
    }

    /// A part of it is read by a table of `generation`.
    pub(super) fn was_read_by(&mut self, generation: u64) {
        let oldest = self.generation.map_or(generation, |known| known.min(generation));
        self.generation = Some(oldest);
    }

    /// Whether more of it is wanted.
    pub(super) fn is_wanted(&self) -> bool {
        !self.cancelled && !self.told && self.failed.is_none()
    }

    /// Whether there is something to post.
    pub(super) fn has_parts(&self) -> bool {
        self.is_wanted() && (!self.back.is_empty() || self.slot.uncut() > 0)
    }

    /// Bytes of the part that is posted next, or a little less, if parts have `most`.
    pub(super) fn next_part_bytes(&self, most: usize) -> usize {
        match self.back.last() {
            Some(part) => part.range().len().min(most),
            None => self.slot.uncut().min(most),
        }
    }

    /// The part that is posted next, of at most `most` bytes and a header: one that came back, or a new
    /// one. One that came back from a rail with larger parts is split, for a peer refuses what is longer
    /// than it has said.
    pub(super) fn next_part(&mut self, most: usize) -> Option<Part> {
        let Some(mut part) = self.back.pop() else { return self.slot.part(most) };
        self.back.extend(part.split(most));
        Some(part)
    }

    /// Whether nothing of it flies and nothing is to.
    pub(super) fn is_over(&self) -> bool {
        self.out == 0 && !self.has_parts()
    }
}

/// Calls by number. A number is used again only when its call is gone, which is after the last of
/// its parts has come back; so a part's tag always names its own call.
#[derive(Default)]
pub(super) struct Calls {
    places: Vec<Option<Call>>,
    free: Vec<u32>,
}

impl Calls {
    pub(super) fn insert(&mut self, call: Call) -> u32 {
        if let Some(id) = self.free.pop() {
            self.places[id as usize] = Some(call);
            return id;
        }
        // Each has a slot, and an arena has at most 2^20 of them.
        let id = u32::try_from(self.places.len()).expect("fewer calls than 2^32");
        self.places.push(Some(call));
        id
    }

    pub(super) fn find(&mut self, id: u32) -> Option<&mut Call> {
        self.places.get_mut(id as usize)?.as_mut()
    }

    pub(super) fn take(&mut self, id: u32) -> Option<Call> {
        let call = self.places.get_mut(id as usize)?.take()?;
        self.free.push(id);
        Some(call)
    }

    /// One more than the largest number in use.
    pub(super) fn len(&self) -> u32 {
        self.places.len() as u32
    }

    pub(super) fn with_ticket(&self, ticket: Ticket) -> Option<u32> {
        let is_it = |call: &Call| call.ticket == ticket;
        self.places.iter().position(|place| place.as_ref().is_some_and(is_it)).map(|id| id as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{SpecDigest, header_bytes};
    use crate::pieces::PIECE_BYTES;
    use crate::testing::small_arena;

    #[test]
    fn a_part_that_comes_back_is_split_for_a_rail_with_smaller_parts() {
        const PAYLOAD_BYTES: u64 = 900_001;
        let identity = RecordIdentity {
            fingerprint_prefix: [0; 16],
            key: ExpertKey::new(0, 0),
            spec: SpecDigest([0; 8]),
            payload_bytes: PAYLOAD_BYTES,
            chunk_bytes: PIECE_BYTES,
        };
        let arena = small_arena(1);
        let slot = arena.try_acquire(identity.record_bytes()).expect("it is free");
        let slot = slot.begin_parted(identity).expect("it fits");
        let (queue, now) = (CompletionQueue::new(), Instant::now());
        let ticket = crate::tier::FetchRequest::new(
            identity.key,
            small_arena(1).try_acquire(1).expect("one"),
        )
        .into_parts()
        .0;
        let mut call = Call::new(ticket, identity, 0, queue, now, slot);
        let whole = call.next_part(1 << 20).expect("all of it").tagged(7);
        let all = whole.range();
        assert_eq!(
            (all.start, all.end as u64, call.has_parts()),
            (0, identity.record_bytes(), false)
        );
        call.back.push(whole);

        let most = PIECE_BYTES as usize;
        let header = header_bytes(4) as usize;
        let (mut at, mut parts) = (0, Vec::new());
        while let Some(part) = call.next_part(most) {
            assert_eq!((part.range().start, part.tag()), (at, 7));
            assert!(part.range().len() <= most + header, "{:?}", part.range());
            at = part.range().end;
            parts.push(part);
        }
        assert_eq!((at, parts.len()), (all.end, 4));
        drop((parts, call));
        assert_eq!(arena.counts().free, 1, "every share of the slot is gone");
    }

    #[test]
    fn a_record_is_judged_by_the_oldest_table_that_a_part_was_read_by() {
        let read_by = |generations: &[u64]| {
            let arena = small_arena(1);
            let identity = RecordIdentity {
                fingerprint_prefix: [0; 16],
                key: ExpertKey::new(0, 0),
                spec: SpecDigest([0; 8]),
                payload_bytes: 1,
                chunk_bytes: PIECE_BYTES,
            };
            let request =
                crate::tier::FetchRequest::new(identity.key, arena.try_acquire(1).expect("one"));
            let (ticket, _, slot) = request.into_parts();
            let slot = slot.begin_parted(identity).expect("it fits");
            let mut call =
                Call::new(ticket, identity, 0, CompletionQueue::new(), Instant::now(), slot);
            generations.iter().for_each(|&generation| call.was_read_by(generation));
            // A part that is pushed beside them changes nothing of that.
            call.was_pushed = true;
            call.generation
        };
        assert_eq!([read_by(&[]), read_by(&[4, 3, 5])], [None, Some(3)]);
    }
}
