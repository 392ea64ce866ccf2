//! How requests end: with their record, once more from the start, or with an error.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::call::{Call, Way};
use super::desk::Desk;
use super::state::Late;
use crate::arena::{Gathered, Judged, Rejected, Slot};
use crate::error::{FetchError, FetchFailure};
use crate::record::RecordIdentity;
use crate::tier::{CompletionQueue, Fetched, Outcome, Source, Ticket, TierKind};

/// Shortest time between two looks at every request's age.
const LOOK: Duration = Duration::from_millis(20);

impl Desk {
    /// A part has been checked.
    pub(super) fn part_done(&self, id: u32) {
        let mut state = self.lock();
        let over = state.part_done(id);
        drop(state);
        self.finish_all(over);
    }

    /// A part is lost: a device or a peer may still write it.
    pub(super) fn part_lost(&self, id: u32, why: &str) {
        let mut state = self.lock();
        let over = state.part_lost(id, &self.options.peer, why);
        drop(state);
        self.finish_all(over);
    }

    pub(super) fn finish_all(&self, calls: impl IntoIterator<Item = Call>) {
        calls.into_iter().for_each(|call| self.finish(call));
    }

    /// Nothing of `call` flies: what it came to.
    fn finish(&self, call: Call) {
        let key = call.key();
        let Call { ticket, identity, layer_index, queue, submitted, asked, attempts, .. } = call;
        let (slot, back) = (call.slot, call.back);
        let (was_pushed, generation) = (call.was_pushed, call.generation);
        drop(back);
        let gathered = slot.gather();
        let fail = |error: FetchError, slot| {
            Outcome::Failed(FetchFailure { error: Box::new(error), slot })
        };
        let outcome = match gathered {
            // A part was lost: the slot is quarantined.
            Err(_quarantined) => {
                let peer = self.options.peer.clone();
                let reason = "a device may still write to its slot".into();
                let unknown = FetchError::Unreachable { key, peer, reason, attempts };
                fail(call.failed.unwrap_or(unknown), None)
            }
            Ok(slot) if call.told => return drop(slot),
            Ok(slot) if call.cancelled => fail(FetchError::Cancelled { key }, Some(slot.abandon())),
            Ok(slot) => match call.failed {
                Some(error) => fail(error, Some(slot.abandon())),
                None => match slot.judge(&self.manifest) {
                    Judged::Record(residency) => {
                        let source = if was_pushed { Source::Push } else { Source::Read };
                        if !was_pushed {
                            let layout = self.manifest.layout();
                            let number = layout.record_number(layer_index, key.expert);
                            number.into_iter().for_each(|number| self.reports.was_read(number));
                        }
                        Outcome::Fetched(Fetched { residency, source })
                    }
                    #[cfg(feature = "unverified")]
                    Judged::Unchecked(unchecked) => Outcome::Unchecked(unchecked),
                    Judged::Rejected(rejected) => {
                        let call = Again { ticket, identity, queue, submitted, asked, attempts };
                        return self.reject(layer_index, call, rejected, generation);
                    }
                },
            },
        };
        if !call.told {
            self.accounts.count(&outcome, submitted.elapsed());
            queue.push_outcome(ticket, key, outcome);
        }
    }

    /// Fetches the record once more, while it has attempts left. `by_generation` is of the oldest table
    /// that a part of it was read by, if any was.
    ///
    /// Bytes that were read and were not the record's may be those of another that has moved there
    /// meanwhile, of which the table that comes next tells; so the peer is asked to send them. Where
    /// no newer table has come, or the peer has sent them, its own copy may be damaged, and it is told.
    fn reject(
        &self,
        layer_index: usize,
        again: Again,
        rejected: Rejected,
        by_generation: Option<u64>,
    ) {
        let key = again.identity.key;
        let so_far = self.rejections.fetch_add(1, Ordering::Relaxed) + 1;
        let Rejected { slot, mismatch, .. } = rejected;
        // A record that is damaged at the peer fails at every attempt of every fetch.
        if so_far <= 8 || so_far.is_power_of_two() {
            tracing::warn!(%key, %mismatch, peer = %self.options.peer, so_far,
                "a record was rejected");
        }
        self.accounts.count_mismatch();
        let Again { ticket, identity, queue, submitted, asked, attempts } = again;
        let slot = match slot.begin_parted(identity) {
            Ok(slot) if attempts < self.options.attempts => slot,
            Ok(slot) => {
                let (backend, origin) = (TierKind::RdmaVerbs, self.options.peer.clone());
                let error = Box::new(FetchError::Mismatch { key, backend, origin, mismatch });
                let slot = slot.gather().ok().map(Slot::<Gathered>::abandon);
                return self.refuse(ticket, key, &queue, submitted, FetchFailure { error, slot });
            }
            Err(refused) => {
                let failure = FetchFailure::too_small(key, refused);
                return self.refuse(ticket, key, &queue, submitted, failure);
            }
        };
        let call = Call::new(ticket, identity, layer_index, queue, submitted, slot);
        let mut state = self.lock();
        if by_generation.is_none_or(|generation| generation == state.generation()) {
            self.reports.is_damaged(key);
        }
        let way = if state.can_push() { Way::Push } else { Way::Read };
        state.add(Call { asked, attempts: attempts + 1, way, ..call });
        drop(state);
        // Whoever drives the rails posts it: this may be a checking thread.
        self.wants_ring.store(true, Ordering::Release);
    }

    /// Fails the requests whose time is over. Cheap where somebody has just done so: it is called by
    /// everybody who waits.
    pub(super) fn expire(&self) {
        let now_ms = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last_ms = self.looked_ms.load(Ordering::Relaxed);
        let order = Ordering::Relaxed;
        if now_ms.saturating_sub(last_ms) < LOOK.as_millis() as u64
            || self.looked_ms.compare_exchange(last_ms, now_ms, order, order).is_err()
        {
            return;
        }
        let mut over = Vec::new();
        let mut late = Vec::new();
        self.lock().expire(&self.options, &mut over, &mut late);
        self.finish_all(over);
        for Late { ticket, key, queue, submitted, waited, bound } in late {
            let backend = TierKind::RdmaVerbs;
            let error = Box::new(FetchError::Deadline { key, backend, waited, bound });
            self.refuse(ticket, key, &queue, submitted, FetchFailure { error, slot: None });
        }
    }
}

/// A request that is to be fetched once more, apart from its slot.
struct Again {
    ticket: Ticket,
    identity: RecordIdentity,
    queue: CompletionQueue,
    submitted: Instant,
    asked: Option<Instant>,
    attempts: u32,
}
