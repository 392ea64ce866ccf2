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
use std::ptr::NonNull;
use std::sync::Arc;

use super::completion::{CompletionQueue, Reservation, WorkCompletion};
use super::error::{ConnectError, PostError, SettleError, VerbsError, check};
use super::ffi::{self, Zeroed, ibv_access_flags, ibv_qp_attr_mask as mask, ibv_qp_state};
use super::flight::{Flights, Serial};
use super::memory::ProtectionDomain;
use super::post::{Lists, MAX_INLINE_BYTES, Post, Signal, Work};
use super::receive::{Received, Receives};
use super::settings::{Destination, LocalEnd, QueuePairOptions, RemoteAccess, RemoteEnd};
use super::work::WorkError;

/// Hops after which a packet is dropped (RoCE v2: its IP time to live).
const HOP_LIMIT: u8 = 64;

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

/// What both states of a queue pair own. Fields are dropped in this order after `drop` has destroyed
/// the queue pair: first what was in flight, then the receive buffers, then the queues it used.
struct Core<T> {
    raw: NonNull<ffi::ibv_qp>,
    destroyed: bool,
    flights: Flights<T>,
    receives: Option<Receives>,
    send: Reservation,
    recv: Reservation,
    domain: Arc<ProtectionDomain>,
    options: QueuePairOptions,
    serial: Serial,
    number: u32,
}

/// A queue pair that is not connected: it has its receives posted, and cannot send.
pub struct PreparedQueuePair<T> {
    core: Core<T>,
    /// Whether an attempt to connect has left it beyond INIT.
    begun: bool,
}

/// A connected queue pair, with requests that carry a `T` each.
pub struct QueuePair<T> {
    core: Core<T>,
    lists: Lists,
    /// Requests posted since the last signalled one.
    unsignalled: usize,
}

// SAFETY: libibverbs is thread-safe, and what is in flight may be sent between threads.
unsafe impl<T: Send> Send for Core<T> {}

impl<T> Core<T> {
    fn device(&self) -> &str {
        self.domain.context().name()
    }

    fn modify(
        &self,
        attributes: &mut ffi::ibv_qp_attr,
        what: u32,
        to: &str,
    ) -> Result<(), VerbsError> {
        let table = &self.domain.context().library().table;
        // SAFETY: the queue pair is alive, and the pointer is to a live structure.
        let status =
            unsafe { (table.modify_qp)(self.raw.as_ptr(), attributes, what.cast_signed()) };
        let on = format_args!("queue pair {} of {}, to {to}", self.number, self.device());
        check("ibv_modify_qp", status, on)
    }

    /// RESET to INIT, with the receives posted.
    fn initialise(&self) -> Result<(), VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attributes.port_num = self.options.port;
        attributes.qp_access_flags = access_flags(self.options.remote_access);
        let what = mask::IBV_QP_STATE.0
            | mask::IBV_QP_PKEY_INDEX.0
            | mask::IBV_QP_PORT.0
            | mask::IBV_QP_ACCESS_FLAGS.0;
        self.modify(&mut attributes, what, "INIT")?;
        match &self.receives {
            Some(receives) => receives.post_all(self.raw.as_ptr(), self.serial),
            None => Ok(()),
        }
    }

    fn reset(&self) -> Result<(), VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RESET;
        self.modify(&mut attributes, mask::IBV_QP_STATE.0, "RESET")
    }

    fn to_rtr(&self, remote: &RemoteEnd, local: &LocalEnd) -> Result<(), VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attributes.path_mtu = remote.mtu.to_wire().into();
        attributes.dest_qp_num = remote.queue_pair;
        attributes.rq_psn = remote.psn.value();
        attributes.max_dest_rd_atomic = local.max_dest_rd_atomic;
        attributes.min_rnr_timer = local.min_rnr_timer.value();
        let path = &mut attributes.ah_attr;
        path.port_num = self.options.port;
        let gid = match remote.destination {
            Destination::Ethernet { gid } => Some(gid),
            Destination::InfiniBand { lid, gid } => {
                path.dlid = lid;
                gid
            }
        };
        if let Some(gid) = gid {
            path.is_global = 1;
            path.grh.dgid.raw = gid;
            path.grh.sgid_index = local.gid_index;
            path.grh.hop_limit = HOP_LIMIT;
        }
        let what = mask::IBV_QP_STATE.0
            | mask::IBV_QP_AV.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_DEST_QPN.0
            | mask::IBV_QP_RQ_PSN.0
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | mask::IBV_QP_MIN_RNR_TIMER.0;
        self.modify(&mut attributes, what, "RTR")
    }

    fn to_rts(&self, remote: &RemoteEnd, local: &LocalEnd) -> Result<(), VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attributes.timeout = local.ack_timeout.value();
        attributes.retry_cnt = local.retries.value();
        attributes.rnr_retry = local.rnr_retries.value();
        attributes.sq_psn = local.psn.value();
        attributes.max_rd_atomic = local.max_rd_atomic.min(remote.max_dest_rd_atomic);
        let what = mask::IBV_QP_STATE.0
            | mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_SQ_PSN.0
            | mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.modify(&mut attributes, what, "RTS")
    }
}

impl<T> Core<T> {
    fn destroy(&mut self) -> Result<(), VerbsError> {
        if self.destroyed {
            return Ok(());
        }
        let table = &self.domain.context().library().table;
        // SAFETY: made once and not destroyed yet; its queues, its domain and its buffers are alive.
        let status = unsafe { (table.destroy_qp)(self.raw.as_ptr()) };
        let on = format_args!("queue pair {} of {}", self.number, self.device());
        check("ibv_destroy_qp", status, on)?;
        self.destroyed = true;
        Ok(())
    }
}

impl<T> Drop for Core<T> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            tracing::error!(%error, in_flight = self.flights.len(),
                "the device may still write: what is in flight is leaked");
            self.flights.leak();
            if let Some(receives) = self.receives.take() {
                receives.leak();
            }
            // The queue pair lives on, and needs what it was made from.
            std::mem::forget(Arc::clone(&self.send.queue));
            std::mem::forget(Arc::clone(&self.recv.queue));
            std::mem::forget(Arc::clone(&self.domain));
        }
    }
}

impl<T> PreparedQueuePair<T> {
    fn new(
        domain: &Arc<ProtectionDomain>,
        send_queue: &Arc<CompletionQueue>,
        recv_queue: &Arc<CompletionQueue>,
        options: QueuePairOptions,
    ) -> Result<Self, VerbsError> {
        check_options(domain, &options)?;
        let send = send_queue.reserve(options.send_wr)?;
        let recv = recv_queue.reserve(options.recv_wr)?;
        let receives =
            (options.recv_wr > 0).then(|| Receives::new(domain, &options)).transpose()?;
        let mut attributes = ffi::ibv_qp_init_attr::zeroed();
        attributes.send_cq = send_queue.raw();
        attributes.recv_cq = recv_queue.raw();
        attributes.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        attributes.cap.max_send_wr = options.send_wr;
        attributes.cap.max_recv_wr = options.recv_wr;
        attributes.cap.max_send_sge = 1;
        attributes.cap.max_recv_sge = 1;
        attributes.cap.max_inline_data = options.inline_bytes;
        let context = domain.context();
        // SAFETY: domain and queues are alive, and the pointer is to a live local.
        let raw = unsafe { (context.library().table.create_qp)(domain.raw(), &raw mut attributes) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let QueuePairOptions { send_wr, recv_wr, inline_bytes, .. } = options;
            let on = format!(
                "{} with {send_wr} sends, {recv_wr} receives and {inline_bytes} inline bytes",
                context.name()
            );
            VerbsError::last("ibv_create_qp", on)
        })?;
        // SAFETY: a live queue pair; its number does not change.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let serial = Serial::next();
        let flights = Flights::new(serial, options.send_wr as usize);
        let domain = Arc::clone(domain);
        // From here on an early return destroys the queue pair.
        let destroyed = false;
        let core =
            Core { raw, destroyed, flights, receives, send, recv, domain, options, serial, number };
        core.initialise()?;
        Ok(Self { core, begun: false })
    }

    /// The number that the peer is to connect to.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.core.number
    }

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        self.core.device()
    }

    /// Connects to `remote`: through RTR to RTS.
    ///
    /// # Errors
    /// The device refuses an end's numbers: the queue pair comes back and can be connected again.
    pub fn connect(
        mut self,
        remote: &RemoteEnd,
        local: &LocalEnd,
    ) -> Result<QueuePair<T>, Box<ConnectError<T>>> {
        match self.bring_up(remote, local) {
            Ok(()) => {
                let lists = Lists::new(self.core.options.send_wr as usize);
                Ok(QueuePair { core: self.core, lists, unsignalled: 0 })
            }
            Err(source) => Err(Box::new(ConnectError { prepared: self, source })),
        }
    }

    fn bring_up(&mut self, remote: &RemoteEnd, local: &LocalEnd) -> Result<(), VerbsError> {
        if self.begun {
            self.core.reset()?;
            self.core.initialise()?;
        }
        self.begun = true;
        self.core.to_rtr(remote, local)?;
        self.core.to_rts(remote, local)
    }
}

impl<T> QueuePair<T> {
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
        let run_max = (self.core.options.send_wr as usize / 2).max(1);
        let signals: Runs = Runs { before: self.unsignalled, run_max };
        let (flights, lists) = (&self.core.flights, &mut self.lists);
        let head = lists.fill(posts, |ahead| flights.number(ahead), |at| signals.at(posts, at));
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is alive; the list was made a moment ago and points to live lists
        // and messages. The memory that the requests name is what the posts carry, which their
        // contracts keep mapped and otherwise unused until they come back from `settle`.
        let status = unsafe { ffi::ibv_post_send(self.core.raw.as_ptr(), head, &raw mut bad) };
        let taken = match status {
            0 => posts.len(),
            // A device that does not say which one it refused may have any of them.
            _ => lists.place(bad, posts.len()).unwrap_or(posts.len()),
        };
        self.unsignalled = signals.after(posts, taken);
        (taken, status)
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
        let (Some(receives), Some(index)) = (&self.core.receives, index) else {
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
    /// `each` gets what was in flight, oldest first. What the peer has under way with a rkey goes on.
    ///
    /// # Errors
    /// The device refuses: what is in flight is leaked, since the device may still write there.
    pub fn destroy(mut self, mut each: impl FnMut(T)) -> Result<(), VerbsError> {
        self.core.destroy()?;
        while let Some(carried) = self.core.flights.pop() {
            each(carried);
        }
        Ok(())
    }

    /// Asks the device for the queue pair's state.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn state(&self) -> Result<QueuePairState, VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        let mut initial = ffi::ibv_qp_init_attr::zeroed();
        let table = &self.core.domain.context().library().table;
        let what = mask::IBV_QP_STATE.0.cast_signed();
        // SAFETY: the queue pair is alive, and the pointers are to live locals.
        let status = unsafe {
            (table.query_qp)(self.core.raw.as_ptr(), &raw mut attributes, what, &raw mut initial)
        };
        let on = format_args!("queue pair {} of {}", self.core.number, self.core.device());
        check("ibv_query_qp", status, on)?;
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

impl<T> fmt::Debug for PreparedQueuePair<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PreparedQueuePair({} of {})", self.core.number, self.core.device())
    }
}

impl<T> fmt::Debug for QueuePair<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, device) = (self.core.number, self.core.device());
        write!(f, "QueuePair({number} of {device}, {} in flight)", self.in_flight())
    }
}

/// Which requests of a batch are signalled: those that ask for it, and each that would make a run
/// of `run_max` unsignalled ones.
#[derive(Clone, Copy)]
struct Runs {
    before: usize,
    run_max: usize,
}

impl Runs {
    /// Length of the unsignalled run that ends before `posts[count]`.
    fn after<T>(self, posts: &[Post<T>], count: usize) -> usize {
        let step = |run: usize, post: &Post<T>| match post.signal {
            Signal::No if run + 1 < self.run_max => run + 1,
            _ => 0,
        };
        posts[..count].iter().fold(self.before, step)
    }

    fn at<T>(self, posts: &[Post<T>], index: usize) -> bool {
        posts[index].signal == Signal::Yes || self.after(posts, index) + 1 >= self.run_max
    }
}

fn access_flags(access: RemoteAccess) -> u32 {
    let (read, write) =
        (ibv_access_flags::IBV_ACCESS_REMOTE_READ.0, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
    match access {
        RemoteAccess::None => 0,
        RemoteAccess::Read => read,
        RemoteAccess::Write => write,
        RemoteAccess::ReadWrite => read | write,
    }
}

fn check_options(
    domain: &Arc<ProtectionDomain>,
    options: &QueuePairOptions,
) -> Result<(), VerbsError> {
    let context = domain.context();
    context.check_port(options.port)?;
    let max = u64::from(context.limits().max_qp_wr);
    let in_range = |what, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        let (on, allowed) = (context.name().to_owned(), format!("{low} to {high}"));
        Err(VerbsError::Setting { what, value, on, allowed })
    };
    in_range("a send queue depth", options.send_wr.into(), 1, max)?;
    in_range("a receive queue depth", options.recv_wr.into(), 0, max)?;
    in_range("an inline message length", options.inline_bytes.into(), 0, MAX_INLINE_BYTES as u64)
}
