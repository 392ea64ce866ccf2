//! What is done once the desk's lock is free: ends are told, parts are granted and asked for, and what
//! a peer must not write any more is taken back. Granting and revoking are system calls that walk
//! pages, for which no READ is to wait.

use std::sync::Arc;
use std::time::Duration;

use gpu_sys::verbs::CompletionChannel;
use railset::message::Transfer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::desk::{Desk, PartChecker};
use super::grant::{Granted, NOT_REVOKED};
use super::pushes::Order;
use super::state::Todo;
use crate::arena::Part;
use crate::error::FetchError;

/// Most devices whose channels one caller waits for: rails are two.
const MAX_CHANNELS: usize = 2;

impl Desk {
    /// Does what was left to do when the lock was free; that may leave more of it.
    pub(super) fn settle(self: &Arc<Self>, todo: Todo) {
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
        self.put_back(back);
    }

    /// Grants the part of `order` and asks for it; it comes back if that cannot be done.
    fn send(&self, order: Order) -> Option<Part> {
        let Order { part, key, rail, device, transfer } = order;
        let granted = match transfer {
            Transfer::Push => Granted::to_peer(&device, part),
            Transfer::Stage => Ok(Granted::to_nobody(part)),
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
                let error = FetchError::Register { key, source: Box::new(source) };
                self.lock().not_granted(rail, &part, error);
                Some(part)
            }
        }
    }

    /// Parts that never got to fly, or whose queue pair is gone, are to be read again.
    pub(super) fn put_back(self: &Arc<Self>, parts: Vec<Part>) {
        if parts.is_empty() {
            return;
        }
        let mut todo = Todo::default();
        let mut state = self.lock();
        for part in parts {
            todo.over.extend(state.came_back(part));
        }
        self.ring_locked(&mut state, &mut todo);
        drop(state);
        self.settle(todo);
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
