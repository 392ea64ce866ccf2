//! What the desk's lock guards: calls, rails, and how parts go from the one to the other.
//!
//! Each part goes to the rail on which it would come soonest, given what is in flight there and how
//! fast that rail has been. So the parts of a large record are striped over all rails in proportion
//! to their speed, and a small record, which is one part, goes whole to the better one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_sys::verbs::{Remote, WorkError, WorkStatus};

use super::VerbsOptions;
use super::call::{Call, Calls, Way};
use super::claims::Claims;
use super::grant::Granted;
use super::grants::Grants;
use super::push::PushLane;
use super::pushes::{Order, push_ended};
use super::rail::Rail;
use super::session::Session;
use crate::arena::Part;
use crate::error::{Bound, FetchError};
use crate::key::ExpertKey;
use crate::pieces::PIECE_BYTES;
use crate::tier::{CompletionQueue, Ticket, TierKind};

pub(super) struct State {
    pub(super) rails: Vec<Rail>,
    /// How many rails there should be, as far as is known.
    pub(super) rails_wanted: usize,
    /// What is being set up.
    pub(super) claims: Claims,
    /// Control connections of new rails, on their way to the keeper.
    pub(super) sessions: Vec<Session>,
    pub(super) calls: Calls,
    /// The grants of all rails.
    pub(super) grants: Arc<Grants>,
    /// Calls with parts to read, oldest first.
    reads: VecDeque<u32>,
    /// Calls with parts to ask the peer for, oldest first. A line of their own: these wait for a
    /// disk, and those must not wait behind them.
    pushes: VecDeque<u32>,
    /// Scratch for what a rail gives back.
    back: Vec<Part>,
    /// When something last came over any rail.
    delivered: Instant,
    /// Since when there has been no rail; `None` while there is one.
    pub(super) down_since: Option<Instant>,
    /// Why the last rail went.
    pub(super) down_why: String,
    pub(super) healthy: bool,
    pub(super) closing: bool,
}

/// What is left to do once the lock is free.
#[derive(Default)]
pub(super) struct Todo {
    /// Calls of which nothing flies any more.
    pub(super) over: Vec<Call>,
    /// Parts to ask the peer for.
    pub(super) orders: Vec<Order>,
    /// Parts that the peer must not write any more, to be fetched again.
    pub(super) revoke: Vec<Granted>,
}

/// A request whose time is over while parts of it fly.
pub(super) struct Late {
    pub(super) ticket: Ticket,
    pub(super) key: ExpertKey,
    pub(super) queue: CompletionQueue,
    pub(super) submitted: Instant,
    /// How long ago its first byte was asked for, or how long nothing came.
    pub(super) waited: Duration,
    /// Which bound that is over.
    pub(super) bound: Bound,
}

impl State {
    pub(super) fn new(grants: Arc<Grants>) -> Self {
        Self {
            rails: Vec::new(),
            rails_wanted: 1,
            claims: Claims::default(),
            sessions: Vec::new(),
            calls: Calls::default(),
            grants,
            reads: VecDeque::new(),
            pushes: VecDeque::new(),
            back: Vec::new(),
            delivered: Instant::now(),
            down_since: Some(Instant::now()),
            down_why: "not connected yet".into(),
            healthy: true,
            closing: false,
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.rails.iter().map(Rail::in_flight).sum()
    }

    /// Of those the parts of which the peer has said nothing yet.
    pub(super) fn awaited(&self) -> usize {
        self.rails.iter().filter_map(|rail| rail.push.as_ref()).map(PushLane::awaited).sum()
    }

    pub(super) fn has_slot(&self, slot: usize) -> bool {
        self.rails.iter().any(|rail| rail.slot == slot)
    }

    /// Takes a new call, which goes to the end of its line.
    pub(super) fn add(&mut self, mut call: Call) {
        let way = call.way;
        call.in_line = true;
        let id = self.calls.insert(call);
        self.line(way).push_back(id);
    }

    pub(super) fn line(&mut self, way: Way) -> &mut VecDeque<u32> {
        match way {
            Way::Read => &mut self.reads,
            Way::Push => &mut self.pushes,
        }
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

    /// A part of call `id` is lost: a device or a peer may still write it, so nothing more of its record
    /// is fetched. The call comes back if this was the last of it.
    pub(super) fn part_lost(&mut self, id: u32, peer: &str, why: &str) -> Option<Call> {
        if let Some(call) = self.calls.find(id) {
            let (key, attempts) = (call.key(), call.attempts);
            let reason = format!("a device may still write to its slot: {why}");
            let peer = peer.to_owned();
            call.failed.get_or_insert(FetchError::Unreachable { key, peer, reason, attempts });
        }
        self.part_done(id)
    }

    /// A part has not landed: it is to be read again, if its record is still wanted. The call comes
    /// back if it is not, and this was the last of it. Rails give parts back in any order; the line stays
    /// in the order of submission.
    pub(super) fn came_back(&mut self, part: Part) -> Option<Call> {
        let id = part.tag();
        let call = self.calls.find(id)?;
        call.out = call.out.saturating_sub(1);
        if call.is_wanted() {
            call.back.push(part);
            let (way, submitted) = (call.way, call.submitted);
            if !std::mem::replace(&mut call.in_line, true) {
                let Self { calls, reads, pushes, .. } = self;
                let line = match way {
                    Way::Read => reads,
                    Way::Push => pushes,
                };
                let is_later =
                    |other: &u32| calls.find(*other).is_some_and(|call| call.submitted > submitted);
                let place = line.iter().position(is_later).unwrap_or(line.len());
                line.insert(place, id);
            }
            return None;
        }
        drop(part);
        self.take_if_over(id)
    }

    pub(super) fn take_if_over(&mut self, id: u32) -> Option<Call> {
        let call = self.calls.find(id)?;
        if !call.is_over() {
            return None;
        }
        let (way, in_line) = (call.way, call.in_line);
        if in_line {
            self.line(way).retain(|waiting| *waiting != id);
        }
        self.calls.take(id)
    }

    /// Posts parts of the calls in line, as far as the rails have room, each rail's in one go. What a
    /// device refuses goes to the other rails at once: nobody else would post it.
    pub(super) fn ring(&mut self, options: &VerbsOptions, todo: &mut Todo) {
        // A rail that refuses something ends, so each round has one rail fewer to post on.
        for _ in 0..=self.rails.len() {
            self.pick(options, todo);
            if !self.post_picked(todo) {
                return;
            }
        }
    }

    fn pick(&mut self, options: &VerbsOptions, todo: &mut Todo) {
        self.pick_all(Way::Read, todo, |state, id, _| state.pick_read(id));
        let moved =
            self.pick_all(Way::Push, todo, |state, id, todo| state.pick_push(id, options, todo));
        if moved {
            // Nobody else would look at them.
            self.pick_all(Way::Read, todo, |state, id, _| state.pick_read(id));
        }
    }

    /// Posts what was picked. Returns whether a device refused some of it, which is in line again.
    fn post_picked(&mut self, todo: &mut Todo) -> bool {
        let mut back = std::mem::take(&mut self.back);
        for rail in &mut self.rails {
            rail.ring(&mut back);
        }
        let was_refused = !back.is_empty();
        for part in back.drain(..) {
            todo.over.extend(self.came_back(part));
        }
        self.back = back;
        was_refused
    }

    /// Has `pick` take parts of the calls in a line, as long as there is room for them; says whether
    /// any went to the other line.
    fn pick_all(
        &mut self,
        way: Way,
        todo: &mut Todo,
        mut pick: impl FnMut(&mut Self, u32, &mut Todo) -> Picked,
    ) -> bool {
        let mut moved = false;
        while let Some(&id) = self.line(way).front() {
            match pick(self, id, todo) {
                Picked::Part => {}
                Picked::Nothing => {
                    self.line(way).pop_front();
                    if let Some(call) = self.calls.find(id) {
                        call.in_line = false;
                    }
                    todo.over.extend(self.take_if_over(id));
                }
                Picked::OtherWay(other) => {
                    self.line(way).pop_front();
                    self.line(other).push_back(id);
                    moved = true;
                }
                Picked::NoRoom => break,
            }
        }
        moved
    }

    /// Puts the next part of call `id` in line on the queue pair with the most room.
    fn pick_read(&mut self, id: u32) -> Picked {
        let Self { rails, calls, .. } = self;
        let Some(call) = calls.find(id).filter(|call| call.has_parts()) else {
            return Picked::Nothing;
        };
        let bytes = call.next_part_bytes(PIECE_BYTES as usize);
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
            call.way = Way::Push;
            return Picked::OtherWay(Way::Push);
        };
        call.was_read_by(rail.generation());
        let Some(part) = call.next_part(PIECE_BYTES as usize) else { return Picked::Nothing };
        // No overflow: a checked table's places hold whole records below the end of the address
        // space.
        let address = place.address.wrapping_add(part.range().start as u64);
        call.out += 1;
        call.asked.get_or_insert_with(Instant::now);
        rail.pick(lane, part.tagged(id), Remote { address, rkey: place.rkey });
        Picked::Part
    }

    /// Takes what has completed on every rail: `landed` gets the parts that are to be checked. Says
    /// whether there was anything.
    pub(super) fn look(
        &mut self,
        options: &VerbsOptions,
        todo: &mut Todo,
        mut landed: impl FnMut(Granted),
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
                        landed(Granted::to_nobody(part));
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
            found |= rail.look_at_pushes(|end| {
                push_ended(end, calls, options, &mut todo.revoke, &mut landed);
            });
            rail.give_up_pushes(&mut todo.revoke);
        }
        for part in back.drain(..) {
            todo.over.extend(self.came_back(part));
        }
        self.back = back;
        if found {
            self.delivered = Instant::now();
            self.healthy |= self.rails.iter().any(Rail::takes_more);
        }
        found
    }

    /// Finds the requests whose time is over: `over` gets those of which nothing flies, `late` those
    /// that stay until what flies has come back.
    ///
    /// A request ends `total` after its first byte was asked for. One of which nothing has been asked for
    /// does not age while something comes over a rail: its line is first in, first out, and each request
    /// before it ends within `total`, so none waits for ever. It ends where nothing has come for `total`,
    /// or for the deadline where that is longer.
    pub(super) fn expire(
        &mut self,
        options: &VerbsOptions,
        over: &mut Vec<Call>,
        late: &mut Vec<Late>,
    ) {
        let silence = self.delivered.elapsed();
        let down = self.down_since.is_some_and(|since| since.elapsed() >= options.deadline);
        for id in 0..self.calls.len() {
            let Some(call) = self.calls.find(id).filter(|call| call.is_wanted()) else { continue };
            let key = call.key();
            let (waited, most, bound) = match call.asked {
                Some(asked) => (asked.elapsed(), options.total, Bound::Total),
                None => {
                    let silent = call.submitted.elapsed().min(silence);
                    let longer = match options.deadline > options.total {
                        true => (options.deadline, Bound::Due),
                        false => (options.total, Bound::Total),
                    };
                    (silent, longer.0, longer.1)
                }
            };
            if waited >= most {
                if call.out > 0 {
                    call.told = true;
                    let (ticket, queue) = (call.ticket, call.queue.clone());
                    late.push(Late {
                        ticket,
                        key,
                        queue,
                        submitted: call.submitted,
                        waited,
                        bound,
                    });
                } else {
                    let backend = TierKind::RdmaVerbs;
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
        self.reads.clear();
        self.pushes.clear();
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

pub(super) enum Picked {
    Part,
    /// The call has changed its line.
    OtherWay(Way),
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
