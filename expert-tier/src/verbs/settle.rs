//! What is done once the desk's lock is free: ends are told, parts are granted and asked for, and what
//! a peer must not write any more is taken back. Granting and revoking are system calls that walk
//! pages, for which no READ is to wait.

use std::sync::Arc;
use std::time::Duration;

use gpu_sys::verbs::{CompletionChannel, VerbsError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::desk::{Desk, PartChecker};
use super::devices::Device;
use super::grant::{Granted, NOT_REVOKED};
use super::grants::GrantPlace;
use super::pushes::Order;
use super::state::Todo;
use crate::arena::Part;
use crate::error::FetchError;

/// Most devices whose channels one caller waits for: rails are two.
const MAX_CHANNELS: usize = 2;

impl Desk {
    /// Does what was left to do when the lock was free; that may leave more of it.
    pub(super) fn settle(self: &Arc<Self>, mut todo: Todo) {
        // A loop: as many requests may fail one after the other as there are.
        loop {
            let Todo { over, orders, revoke } = todo;
            self.finish_all(over);
            let mut back = Vec::new();
            for granted in revoke {
                let call = granted.tag();
                match granted.revoke() {
                    Some(part) => back.push(part),
                    None => self.part_lost(call, NOT_REVOKED),
                }
            }
            for order in orders {
                back.extend(self.send(order));
            }
            if back.is_empty() {
                return;
            }
            todo = self.ring_again(back);
        }
    }

    /// Grants the part of `order` and asks for it; it comes back if that cannot be done.
    fn send(&self, order: Order) -> Option<Part> {
        let Order { part, key, rail, device, place } = order;
        let granted = match place {
            Some(place) => self.grant(&device, part, place),
            None => Ok(Granted::to_nobody(part)),
        };
        match granted {
            Ok(granted) => {
                let refused = self.lock().post_push(rail, key, granted).err()?;
                let call = refused.tag();
                refused.revoke().or_else(|| {
                    self.part_lost(call, NOT_REVOKED);
                    None
                })
            }
            Err(refused) => {
                let (part, source) = *refused;
                let bytes = part.range().len() as u64;
                let error = |source| FetchError::Grant { key, bytes, source: Box::new(source) };
                let error = source.map(error);
                self.lock().not_granted(rail, &part, error, self.options.attempts);
                Some(part)
            }
        }
    }

    /// Grants a part. It comes back with an error, or without one where there is room for it once
    /// another grant has come back.
    fn grant(
        &self,
        device: &Device,
        part: Part,
        place: GrantPlace,
    ) -> Result<Granted, Box<(Part, Option<VerbsError>)>> {
        let refused = match Granted::to_peer(device, part, place) {
            Ok(granted) => return Ok(granted),
            Err(refused) => refused,
        };
        let (part, place, error) = *refused;
        if !error.is_of_size() {
            return Err(Box::new((part, Some(error))));
        }
        let Some(place) = place.wait_for_others() else {
            tracing::debug!(%error, "a grant waits for another one to come back");
            return Err(Box::new((part, None)));
        };
        // Others may have come back since it was refused; it is alone now.
        Granted::to_peer(device, part, place).map_err(|refused| {
            let (part, _, error) = *refused;
            Box::new((part, Some(error)))
        })
    }

    /// Parts that never got to fly, or whose queue pair is gone, are to be read again.
    pub(super) fn put_back(self: &Arc<Self>, parts: Vec<Part>) {
        if !parts.is_empty() {
            self.settle(self.ring_again(parts));
        }
    }

    /// Puts `parts` in line again, and posts what there is room for.
    fn ring_again(&self, parts: Vec<Part>) -> Todo {
        let mut todo = Todo::default();
        let mut state = self.lock();
        for part in parts {
            todo.over.extend(state.came_back(part));
        }
        self.ring_locked(&mut state, &mut todo);
        todo
    }

    /// Waits until something comes of what the peer was asked for, at most `wait`. For a caller that
    /// does not look after the rails: there is a disk in the way, which takes longer than waking up.
    pub(super) fn sleep_until_pushed(self: &Arc<Self>, checker: &PartChecker, wait: Duration) {
        let mut channels: [Option<Arc<CompletionChannel>>; MAX_CHANNELS] = [None, None];
        let state = self.lock();
        let lanes = state.rails.iter().filter_map(|rail| rail.push.as_ref());
        let armed = lanes.filter_map(super::push::PushLane::arm);
        channels.iter_mut().zip(armed).for_each(|(place, channel)| *place = Some(channel));
        drop(state);
        // What came before it was armed wakes nobody.
        if self.drive(checker) {
            return;
        }
        let Some(first) = &channels[0] else { return };
        let second = channels[1].as_ref().unwrap_or(first);
        let mut fds = [first, second].map(|channel| PollFd::new(&**channel, PollFlags::IN));
        let timeout = Timespec::try_from(wait).ok();
        if let Err(error) = poll(&mut fds, timeout.as_ref()) {
            tracing::debug!(%error, "cannot wait for the peer");
        }
        for channel in channels.iter().flatten() {
            if let Err(error) = channel.drain() {
                tracing::debug!(%error, "cannot take a completion event");
            }
        }
    }
}
