//! What the desk's lock guards: calls, rails, and how parts go from the one to the other.
//!
//! Each part goes to the rail on which it would come soonest, given what is in flight there and how
//! fast that rail has been. So the parts of a large record are striped over all rails in proportion
//! to their speed, and a small record, which is one part, goes whole to the better one.

use std::collections::VecDeque;
use std::time::Instant;

use gpu_sys::verbs::{Remote, WorkError, WorkStatus};

use super::VerbsOptions;
use super::call::{Call, Calls};
use super::rail::Rail;
use super::session::Session;
use crate::arena::{LandedPart, Part};
use crate::error::{Bound, FetchError};
use crate::key::ExpertKey;
use crate::pieces::PIECE_BYTES;
use crate::tier::{CompletionQueue, Ticket, TierKind};

pub(super) struct State {
    pub(super) rails: Vec<Rail>,
    /// How many rails there should be.
    pub(super) rails_wanted: usize,
    /// Control connections of new rails, on their way to the keeper.
    pub(super) sessions: Vec<Session>,
    calls: Calls,
    /// Calls with parts to post, oldest first.
    line: VecDeque<u32>,
    /// Scratch for what a rail gives back.
    back: Vec<Part>,
    /// Since when there has been no rail; `None` while there is one.
    pub(super) down_since: Option<Instant>,
    /// Why the last rail went.
    pub(super) down_why: String,
    pub(super) healthy: bool,
    pub(super) closing: bool,
}

/// A request whose time is over while parts of it fly.
pub(super) struct Late {
    pub(super) ticket: Ticket,
    pub(super) key: ExpertKey,
    pub(super) queue: CompletionQueue,
    pub(super) submitted: Instant,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            rails: Vec::new(),
            rails_wanted: 1,
            sessions: Vec::new(),
            calls: Calls::default(),
            line: VecDeque::new(),
            back: Vec::new(),
            down_since: Some(Instant::now()),
            down_why: "not connected yet".into(),
            healthy: true,
            closing: false,
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.rails.iter().map(Rail::in_flight).sum()
    }

    pub(super) fn has_slot(&self, slot: usize) -> bool {
        self.rails.iter().any(|rail| rail.slot == slot)
    }

    /// Takes a new call, which goes to the end of the line.
    pub(super) fn add(&mut self, mut call: Call) {
        call.in_line = true;
        let id = self.calls.insert(call);
        self.line.push_back(id);
    }

    /// Gives up on a call; it comes back if nothing of it flies.
    pub(super) fn cancel(&mut self, ticket: Ticket) -> Option<Call> {
        let id = self.calls.with_ticket(ticket)?;
        self.calls.find(id)?.cancelled = true;
        self.take_if_over(id)
    }

    /// A part of call `id` has been checked; the call comes back if that was the last.
    pub(super) fn part_done(&mut self, id: u32) -> Option<Call> {
        let call = self.calls.find(id)?;
        call.out = call.out.saturating_sub(1);
        self.take_if_over(id)
    }

    /// A part has not landed: it is to be read again, if its record is still wanted. The call comes
    /// back if it is not, and this was the last of it.
    pub(super) fn came_back(&mut self, part: Part) -> Option<Call> {
        let id = part.tag();
        let call = self.calls.find(id)?;
        call.out = call.out.saturating_sub(1);
        if call.is_wanted() {
            call.back.push(part);
            if !call.in_line {
                call.in_line = true;
                self.line.push_front(id);
            }
            return None;
        }
        drop(part);
        self.take_if_over(id)
    }

    fn take_if_over(&mut self, id: u32) -> Option<Call> {
        let call = self.calls.find(id)?;
        if !call.is_over() {
            return None;
        }
        if call.in_line {
            self.line.retain(|waiting| *waiting != id);
        }
        self.calls.take(id)
    }

    /// Posts parts of the calls in line, as far as the rails have room, each rail's in one go.
    pub(super) fn ring(&mut self, options: &VerbsOptions, over: &mut Vec<Call>) {
        while let Some(&id) = self.line.front() {
            match self.pick(id, options) {
                Picked::Part => {}
                Picked::Nothing => {
                    self.line.pop_front();
                    if let Some(call) = self.calls.find(id) {
                        call.in_line = false;
                    }
                    over.extend(self.take_if_over(id));
                }
                Picked::NoRoom => break,
            }
        }
        let mut back = std::mem::take(&mut self.back);
        for rail in &mut self.rails {
            rail.ring(&mut back);
        }
        for part in back.drain(..) {
            over.extend(self.came_back(part));
        }
        self.back = back;
    }

    /// Puts the next part of call `id` in line on the queue pair with the most room.
    fn pick(&mut self, id: u32, options: &VerbsOptions) -> Picked {
        let Self { rails, calls, .. } = self;
        let Some(call) = calls.find(id).filter(|call| call.has_parts()) else {
            return Picked::Nothing;
        };
        let bytes = call.next_part_bytes();
        let soonest =
            rails.iter().enumerate().filter(|(_, rail)| rail.takes_more()).min_by(
                |(_, one), (_, other)| one.ready_in(bytes).total_cmp(&other.ready_in(bytes)),
            );
        // Where the soonest has no room, another would be later still.
        let Some((index, rail)) = soonest else { return Picked::NoRoom };
        let Some(lane) = rail.best_lane() else { return Picked::NoRoom };
        let rail = &mut rails[index];
        let place = rail.place(call.layer_index, call.identity.key.expert);
        let Some(place) = place else {
            let (key, peer) = (call.key(), options.peer.clone());
            call.failed = Some(FetchError::NotResident { key, peer });
            return Picked::Nothing;
        };
        let Some(part) = call.back.pop().or_else(|| call.slot.part(PIECE_BYTES as usize)) else {
            return Picked::Nothing;
        };
        // No overflow: a checked table's places hold whole records below the end of the address
        // space.
        let address = place.address.wrapping_add(part.range().start as u64);
        call.out += 1;
        rail.pick(lane, part.tagged(id), Remote { address, rkey: place.rkey });
        Picked::Part
    }

    /// Takes what has completed on every rail: `landed` gets the parts that are to be checked. Says
    /// whether there was anything.
    pub(super) fn look(
        &mut self,
        options: &VerbsOptions,
        over: &mut Vec<Call>,
        mut landed: impl FnMut(LandedPart),
    ) -> bool {
        let mut found = false;
        let mut back = std::mem::take(&mut self.back);
        let Self { rails, calls, .. } = self;
        let only_rail = rails.len() == 1;
        for rail in rails.iter_mut() {
            let name = |error: &WorkError| format!("a READ failed: {error}");
            found |= rail.look(|part, result| {
                let call = calls.find(part.tag());
                match result {
                    Ok(()) if call.as_ref().is_some_and(|call| call.is_wanted()) => {
                        landed(part.landed());
                    }
                    Ok(()) | Err(WorkError { status: WorkStatus::Flushed, .. }) => back.push(part),
                    Err(error) => {
                        // A rail that breaks costs no fetch: its parts fly on another.
                        if let Some(call) = call
                            && (only_rail || !error.is_transient())
                        {
                            blame(call, name(&error), options);
                        }
                        back.push(part);
                    }
                }
            });
        }
        for part in back.drain(..) {
            over.extend(self.came_back(part));
        }
        self.back = back;
        if found {
            self.healthy |= self.rails.iter().any(Rail::takes_more);
        }
        found
    }

    /// Finds the requests whose time is over: `over` gets those of which nothing flies, `late` those
    /// that stay until what flies has come back.
    pub(super) fn expire(
        &mut self,
        options: &VerbsOptions,
        over: &mut Vec<Call>,
        late: &mut Vec<Late>,
    ) {
        let down = self.down_since.is_some_and(|since| since.elapsed() >= options.deadline);
        for id in 0..self.calls.len() {
            let Some(call) = self.calls.find(id).filter(|call| call.is_wanted()) else { continue };
            let (key, waited) = (call.key(), call.submitted.elapsed());
            if waited >= options.total {
                if call.out > 0 {
                    call.told = true;
                    let (ticket, queue) = (call.ticket, call.queue.clone());
                    late.push(Late { ticket, key, queue, submitted: call.submitted });
                } else {
                    let (backend, bound) = (TierKind::RdmaVerbs, Bound::Total);
                    call.failed = Some(FetchError::Deadline { key, backend, waited, bound });
                }
            } else if down && call.out == 0 {
                let (peer, reason) = (options.peer.clone(), self.down_why.clone());
                let attempts = call.attempts;
                call.failed = Some(FetchError::Unreachable { key, peer, reason, attempts });
            }
            over.extend(self.take_if_over(id));
        }
    }

    /// The backend is closed and no rail is left: every call comes back.
    pub(super) fn close(&mut self) -> Vec<Call> {
        self.line.clear();
        let mut all = Vec::new();
        for id in 0..self.calls.len() {
            let Some(mut call) = self.calls.take(id) else { continue };
            if call.is_wanted() {
                let (key, backend) = (call.key(), TierKind::RdmaVerbs);
                call.failed = Some(FetchError::Closed { key, backend });
            }
            all.push(call);
        }
        all
    }
}

enum Picked {
    Part,
    /// The call has no more parts.
    Nothing,
    /// No rail takes one.
    NoRoom,
}

/// A READ of `call` has failed by itself, not for another's sake.
fn blame(call: &mut Call, reason: String, options: &VerbsOptions) {
    if call.attempts < options.attempts {
        call.attempts += 1;
        return;
    }
    let (key, peer, attempts) = (call.key(), options.peer.clone(), call.attempts);
    call.failed.get_or_insert(FetchError::Unreachable { key, peer, reason, attempts });
}
