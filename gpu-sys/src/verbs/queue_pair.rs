//! Reliable queue pairs: bring-up, posting, and who gets a buffer back when.
//!
//! * [`QueuePair::prepare`] makes one that receives and cannot post; `connect` takes it to RTS and
//!   gives back another type.
//! * The queue pair signals by itself when half of its depth has been posted unsignalled since the
//!   last signal. So among any `send_wr` requests in a row one reports, and a full queue always has
//!   a completion on its way.
//! * After a completion with an error the queue pair is in error: everything posted behind it comes
//!   back as flushed, one completion each, signalled or not. What it may have changed at the other
//!   end before is not known. When `in_flight` is 0, the device is done with every buffer.
//! * Dropping a queue pair destroys it first: when that has returned 0, none of its requests touches
//!   memory any more. If it fails, what is in flight is leaked.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use super::completion::{CompletionQueue, WorkCompletion};
use super::error::{PostError, SettleError, VerbsError, check};
use super::ffi::{self, Zeroed, ibv_qp_attr_mask as mask, ibv_qp_state};
use super::memory::ProtectionDomain;
use super::post::{Lists, Post, Signal, Work};
use super::prepared::{Core, PreparedQueuePair};
use super::receive::Received;
use super::settings::{QueuePairOptions, RemoteAccess};
use super::work::WorkError;

/// Where a queue pair is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueuePairState {
    /// Just made.
    Reset,
    /// Receives can be posted.
    Init,
    /// Ready to receive.
    ReadyToReceive,
    /// Ready to send: connected.
    ReadyToSend,
    /// Its send queue is being drained.
    Draining,
    /// Its send queue is in error.
    SendError,
    /// In error: everything posted comes back as flushed.
    Error,
    /// Something else.
    Other(u32),
}

/// What a request carried, once its queue pair has been given up ([`QueuePair::destroy`]).
#[derive(Debug)]
pub enum Released<'a, T> {
    /// The queue pair is gone: the device does not touch this any more.
    Free(T),
    /// The queue pair could not be destroyed. The device may still write there, so this is leaked: it
    /// is never dropped, and can be looked at this once.
    Leaked(&'a T),
}

/// A connected queue pair, with requests that carry a `T` each.
pub struct QueuePair<T> {
    core: Core<T>,
    lists: Lists,
    /// Requests posted since the last signalled one.
    unsignalled: usize,
}

impl<T> QueuePair<T> {
    /// Over a queue pair that is in RTS.
    pub(super) fn connected(core: Core<T>) -> Self {
        let lists = Lists::new(core.options.send_wr as usize);
        Self { core, lists, unsignalled: 0 }
    }

    /// Makes a queue pair whose requests carry a `T`, posts its receives, and takes it to INIT.
    ///
    /// # Errors
    /// The device or a completion queue is too small for `options`, or has no more queue pairs.
    pub fn prepare(
        domain: &Arc<ProtectionDomain>,
        send_queue: &Arc<CompletionQueue>,
        recv_queue: &Arc<CompletionQueue>,
        options: QueuePairOptions,
    ) -> Result<PreparedQueuePair<T>, VerbsError> {
        PreparedQueuePair::new(domain, send_queue, recv_queue, options)
    }

    /// Its number, which completions name.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.core.number
    }

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        self.core.device()
    }

    /// Requests in flight: posted and not settled.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.core.flights.len()
    }

    /// Requests that can be posted now.
    #[must_use]
    pub fn room(&self) -> usize {
        (self.core.options.send_wr as usize).saturating_sub(self.in_flight())
    }

    /// Posts requests from the head of `batch`, as many as there is room for, with one doorbell, and
    /// takes them out of it; says how many. The rest stays, in order, to be posted later.
    ///
    /// # Errors
    /// The device or the queue pair refuses a request. Those before it are in flight, as
    /// [`PostError::taken`] says; it and those behind it are in `batch`.
    pub fn post(&mut self, batch: &mut Vec<Post<T>>) -> Result<usize, PostError> {
        super::calls::count();
        let offered = batch.len().min(self.room());
        let inline_bytes = self.core.options.inline_bytes;
        let too_long =
            |post: &Post<T>| matches!(post.work, Work::Send { bytes, .. } if bytes > inline_bytes);
        let wanted = batch[..offered].iter().position(too_long).unwrap_or(offered);
        let (taken, status) = match wanted {
            0 => (0, 0),
            _ => self.post_list(&batch[..wanted]),
        };
        for post in batch.drain(..taken) {
            self.core.flights.push(post.carried);
        }
        let on = format_args!("queue pair {} of {}", self.core.number, self.core.device());
        let reason = match check("ibv_post_send", status, on) {
            Err(error) => error,
            Ok(()) if wanted == offered => return Ok(taken),
            Ok(()) => VerbsError::Setting {
                what: "a message longer than the queue pair was made for, with a length",
                value: batch.first().map_or(0, Post::message_bytes),
                on: on.to_string(),
                allowed: format!("at most {inline_bytes} bytes"),
            },
        };
        let (device, queue_pair) = (self.core.device().to_owned(), self.core.number);
        let reason = Box::new(reason);
        Err(PostError { device, queue_pair, taken, offered, reason })
    }

    /// Posts `posts`, at least one; says how many were taken, and what the device returned.
    fn post_list(&mut self, posts: &[Post<T>]) -> (usize, c_int) {
        let (flights, before) = (&self.core.flights, self.unsignalled);
        let run_max = self.run_max();
        let mut run = before;
        let signalled = |post: &Post<T>| {
            run = run_after(run, post, run_max);
            run == 0
        };
        let head = self.lists.fill(posts, |ahead| flights.number(ahead), signalled);
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is alive; the list was made a moment ago and points to live lists
        // and messages. The memory that the requests name is what the posts carry, which their
        // contracts keep mapped and otherwise unused until they come back from `settle`.
        let status = unsafe { ffi::ibv_post_send(self.core.raw.as_ptr(), head, &raw mut bad) };
        let taken = match status {
            0 => posts.len(),
            // A device that does not say which one it refused may have any of them.
            _ => self.lists.place(bad, posts.len()).unwrap_or(posts.len()),
        };
        let after = |run, post| run_after(run, post, run_max);
        self.unsignalled = posts[..taken].iter().fold(before, after);
        (taken, status)
    }

    /// The run of requests, the last of which is signalled whatever it says.
    fn run_max(&self) -> usize {
        (self.core.options.send_wr as usize / 2).max(1)
    }

    /// Ends what `completion` ends: its request, and the unsignalled ones before it, which have
    /// succeeded, since a send queue completes in order and a failure always reports. `each` gets
    /// what they carried, oldest first; says how many.
    ///
    /// A request that was flushed or failed may have changed any part of its target.
    ///
    /// # Errors
    /// The completion is not of a request in flight here; nothing is ended.
    pub fn settle(
        &mut self,
        completion: &WorkCompletion,
        mut each: impl FnMut(T, Result<(), WorkError>),
    ) -> Result<usize, SettleError> {
        let flights = &mut self.core.flights;
        let Some(ended) = flights.ended_with(completion.work) else {
            return Err(SettleError::Unknown {
                work: completion.work,
                completed: completion.queue_pair,
                queue_pair: self.core.number,
                in_flight: flights.len(),
            });
        };
        for left in (0..ended).rev() {
            let Some(carried) = flights.pop() else { break };
            each(carried, if left == 0 { completion.outcome() } else { Ok(()) });
        }
        Ok(ended)
    }

    /// Shows what a receive brought, then posts it again; after an error it is not posted again.
    ///
    /// # Errors
    /// The completion is not of a receive of this queue pair, says what cannot be, or the receive
    /// could not be posted again, as in a queue pair in error.
    pub fn receive(
        &mut self,
        completion: &WorkCompletion,
        show: impl FnOnce(Result<Received<'_>, WorkError>),
    ) -> Result<(), SettleError> {
        let index = self.core.serial.receive_index(completion.work);
        let known = self.core.receives.as_ref().zip(index).filter(|(all, index)| all.has(*index));
        let Some((receives, index)) = known else {
            return Err(SettleError::Unknown {
                work: completion.work,
                completed: completion.queue_pair,
                queue_pair: self.core.number,
                in_flight: self.core.flights.len(),
            });
        };
        if let Err(error) = completion.outcome() {
            show(Err(error));
            return Ok(());
        }
        show(Ok(receives.received(index, completion)?));
        let posted = receives.post(self.core.raw.as_ptr(), self.core.serial, index);
        posted.map_err(SettleError::Repost)
    }

    /// Puts the queue pair in error: what is in flight comes back through completions, as flushed
    /// unless it had ended before.
    ///
    /// This stops our own requests, once their completions are in. It does not stop what the peer
    /// has under way: deregister, or drop the queue pair.
    ///
    /// # Errors
    /// The device refuses; drop the queue pair then.
    pub fn fail(&mut self) -> Result<(), VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.core.modify(&mut attributes, mask::IBV_QP_STATE.0, "ERR")
    }

    /// Destroys the queue pair: from success on, none of its requests touches memory any more, and
    /// nothing that the peer has under way through it does; what peers have under way through other
    /// queue pairs goes on. `each` gets what was in flight, oldest first, in either case.
    ///
    /// # Errors
    /// The device refuses, twice: what is in flight is leaked ([`Released::Leaked`]).
    pub fn destroy(mut self, mut each: impl FnMut(Released<'_, T>)) -> Result<(), VerbsError> {
        if let Err(error) = self.core.destroy().or_else(|_| self.core.destroy()) {
            self.core.flights.iter().for_each(|carried| each(Released::Leaked(carried)));
            self.core.abandon();
            return Err(error);
        }
        while let Some(carried) = self.core.flights.pop() {
            each(Released::Free(carried));
        }
        Ok(())
    }

    /// Asks the device what the peer may do through the queue pair.
    ///
    /// # Errors
    /// The device does not answer, or it allows more than any [`RemoteAccess`] does.
    pub fn remote_access(&self) -> Result<RemoteAccess, VerbsError> {
        self.core.remote_access()
    }

    /// Asks the device for the queue pair's state.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn state(&self) -> Result<QueuePairState, VerbsError> {
        let attributes = self.core.query(mask::IBV_QP_STATE.0)?;
        Ok(match attributes.qp_state {
            ibv_qp_state::IBV_QPS_RESET => QueuePairState::Reset,
            ibv_qp_state::IBV_QPS_INIT => QueuePairState::Init,
            ibv_qp_state::IBV_QPS_RTR => QueuePairState::ReadyToReceive,
            ibv_qp_state::IBV_QPS_RTS => QueuePairState::ReadyToSend,
            ibv_qp_state::IBV_QPS_SQD => QueuePairState::Draining,
            ibv_qp_state::IBV_QPS_SQE => QueuePairState::SendError,
            ibv_qp_state::IBV_QPS_ERR => QueuePairState::Error,
            other => QueuePairState::Other(other),
        })
    }
}

impl<T> fmt::Debug for QueuePair<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, device) = (self.core.number, self.core.device());
        write!(f, "QueuePair({number} of {device}, {} in flight)", self.in_flight())
    }
}

/// Length of the unsignalled run after `post`, where it was `run` before; 0 if `post` is signalled,
/// because it says so or because it would be the `run_max`th that is not.
fn run_after<T>(run: usize, post: &Post<T>, run_max: usize) -> usize {
    match post.signal {
        Signal::No if run + 1 < run_max => run + 1,
        _ => 0,
    }
}
