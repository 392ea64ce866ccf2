//! How the parts of records that the peer does not have in memory are asked for.
//!
//! Three steps, since granting is a system call that pins pages: a part gets a place on a rail's
//! lane under the lock ([`State::pick_push`]), is granted without it, and is posted under it
//! ([`State::post_push`]).

use std::sync::Arc;
use std::time::Instant;

use railset::message::Transfer;
use railset::push::PushStatus;

use super::VerbsOptions;
use super::call::{Calls, Way};
use super::devices::Device;
use super::grant::Granted;
use super::grants::GrantPlace;
use super::push::{PushEnd, PushLane};
use super::state::{Picked, State, Todo};
use crate::arena::Part;
use crate::error::FetchError;
use crate::key::ExpertKey;
use crate::wire::frame::Status;

/// A part that has a place on a lane.
pub(super) struct Order {
    pub(super) part: Part,
    pub(super) key: ExpertKey,
    /// The rail's number.
    pub(super) rail: u64,
    pub(super) device: Arc<Device>,
    /// Where the part is to be granted to the peer.
    pub(super) place: Option<GrantPlace>,
}

impl State {
    /// Keeps a place for the next part of call `id` on the lane on which it would come soonest.
    pub(super) fn pick_push(&mut self, id: u32, options: &VerbsOptions, todo: &mut Todo) -> Picked {
        let Self { rails, calls, grants, .. } = self;
        let Some(call) = calls.find(id).filter(|call| call.has_parts()) else {
            return Picked::Nothing;
        };
        let key = call.key();
        let live = || rails.iter().filter(|rail| rail.takes_more());
        if live().next().is_none() {
            return Picked::NoRoom;
        }
        if !live().any(|rail| rail.push.is_some()) {
            // Another life of the peer, which has everything in memory, or a peer without pushes.
            if live().any(|rail| rail.place(call.layer_index, key.expert).is_some()) {
                call.way = Way::Read;
                return Picked::OtherWay(Way::Read);
            }
            call.failed = Some(FetchError::NotResident { key, peer: options.peer.clone() });
            return Picked::Nothing;
        }
        let lanes = rails.iter_mut().filter(|rail| rail.takes_more());
        let lanes = lanes.filter_map(|rail| Some((rail.number, rail.push.as_mut()?)));
        let ready_in = |lane: &PushLane| lane.ready_in(call.next_part_bytes(lane.part_bytes()));
        let soonest =
            lanes.min_by(|(_, one), (_, other)| ready_in(one).total_cmp(&ready_in(other)));
        // Where the soonest has no room, another would be later still.
        let Some((rail, lane)) = soonest.filter(|(_, lane)| lane.has_room()) else {
            return Picked::NoRoom;
        };
        let is_granted = lane.terms().transfer == Transfer::Push;
        if is_granted && grants.is_full() {
            return Picked::NoRoom;
        }
        let Some(part) = call.next_part(lane.part_bytes()) else {
            return Picked::Nothing;
        };
        lane.reserve(part.range().len());
        call.out += 1;
        call.was_pushed = true;
        let device = Arc::clone(lane.device());
        let (part, place) = (part.tagged(id), is_granted.then(|| grants.place()));
        todo.orders.push(Order { part, key, rail, device, place });
        Picked::Part
    }

    /// Asks for a part that has a place on rail `number`.
    ///
    /// # Errors
    /// The rail is gone, or goes with this: the part is to be fetched again.
    pub(super) fn post_push(
        &mut self,
        number: u64,
        key: ExpertKey,
        granted: Granted,
    ) -> Result<(), Box<Granted>> {
        let Self { rails, calls, .. } = self;
        let rail = rails.iter_mut().find(|rail| rail.number == number);
        let Some(rail) = rail else { return Err(Box::new(granted)) };
        let ending = rail.ending().is_some();
        let Some(lane) = &mut rail.push else { return Err(Box::new(granted)) };
        if ending {
            lane.unreserve(granted.bytes());
            return Err(Box::new(granted));
        }
        if let Some(call) = calls.find(granted.tag()) {
            call.asked.get_or_insert_with(Instant::now);
        }
        lane.post(key, granted).map_err(|refused| {
            let (granted, why) = *refused;
            rail.end(why);
            Box::new(granted)
        })
    }

    /// A part that has a place on rail `number` could not be granted. Without an error it waits until
    /// there is room for the grant. Where there is no room at all its request fails; any other error is
    /// the device's, so the rail ends and the part goes to another. Where there is no other, that was
    /// one of the request's `attempts`.
    pub(super) fn not_granted(
        &mut self,
        number: u64,
        part: &Part,
        error: Option<FetchError>,
        attempts: u32,
    ) {
        let Self { rails, calls, .. } = self;
        let Some(rail) = rails.iter_mut().find(|rail| rail.number == number) else { return };
        if let Some(lane) = &mut rail.push {
            lane.unreserve(part.range().len());
        }
        let Some(error) = error else { return };
        let call = calls.find(part.tag());
        if matches!(&error, FetchError::Grant { source, .. } if source.is_of_size()) {
            if let Some(call) = call {
                call.failed.get_or_insert(error);
            }
            return;
        }
        if rail.ending().is_some() {
            // What another part has met is not counted against this one.
            return;
        }
        rail.end(error.to_string());
        let Some(call) = call else { return };
        call.asked.get_or_insert_with(Instant::now);
        if rails.iter().any(|rail| rail.takes_more() && rail.push.is_some()) {
            return;
        }
        if call.attempts < attempts {
            call.attempts += 1;
        } else {
            call.failed.get_or_insert(error);
        }
    }

    /// Whether some rail brings what the peer does not have in memory.
    pub(super) fn can_push(&self) -> bool {
        self.rails.iter().any(|rail| rail.takes_more() && rail.push.is_some())
    }

    /// Generation of the newest table.
    pub(super) fn generation(&self) -> u64 {
        self.rails.iter().map(super::rail::Rail::generation).max().unwrap_or(0)
    }
}

/// What becomes of a part whose request has ended.
pub(super) fn push_ended(
    end: PushEnd,
    calls: &mut Calls,
    options: &VerbsOptions,
    revoke: &mut Vec<Granted>,
    landed: &mut impl FnMut(Granted),
) {
    match end {
        PushEnd::Landed(granted) => {
            if calls.find(granted.tag()).is_some_and(|call| call.is_wanted()) {
                landed(granted);
            } else {
                revoke.push(granted);
            }
        }
        PushEnd::Refused(granted, status) => {
            if let Some(call) = calls.find(granted.tag())
                && let Some(error) = refusal(call.key(), status, options)
            {
                call.failed.get_or_insert(error);
            }
            revoke.push(granted);
        }
    }
}

/// Why a request fails that the peer refused; `None` where it is to be asked again.
fn refusal(key: ExpertKey, status: PushStatus, options: &VerbsOptions) -> Option<FetchError> {
    let (status, text) = match status {
        PushStatus::Done | PushStatus::Busy => return None,
        PushStatus::NoSuchKey => (Status::NoSuchKey, "the store has no such record"),
        PushStatus::OutOfRange => (Status::Protocol, "it says the record has no such bytes"),
        PushStatus::InUse => (Status::Protocol, "it says the request is under way already"),
        PushStatus::Unreadable => (Status::Unreadable, "its disk did not give the record"),
        PushStatus::Damaged => (Status::Unreadable, "its copy of the record is damaged"),
    };
    Some(FetchError::Peer { key, peer: options.peer.clone(), status, text: text.into() })
}
