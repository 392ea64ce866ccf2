//! Bring-up of a queue pair: made, its receives posted, and taken to INIT, RTR and RTS
//! (`ibv_modify_qp(3)` says which attributes each step takes).

use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::ptr::NonNull;
use std::sync::Arc;

use super::completion::{CompletionQueue, Reservation};
use super::error::{ConnectError, VerbsError, check};
use super::ffi::{self, Zeroed, ibv_access_flags, ibv_qp_attr_mask as mask, ibv_qp_state};
use super::flight::{Flights, Serial};
use super::memory::ProtectionDomain;
use super::post::MAX_INLINE_BYTES;
use super::queue_pair::QueuePair;
use super::receive::Receives;
use super::settings::{Destination, LocalEnd, QueuePairOptions, RemoteAccess, RemoteEnd};

/// Hops after which a packet is dropped (RoCE v2: its IP time to live).
const HOP_LIMIT: u8 = 64;

/// What both states of a queue pair own. Fields are dropped in this order after `drop` has destroyed
/// the queue pair: first what was in flight, then the receive buffers, then the queues it used.
pub(super) struct Core<T> {
    pub(super) raw: NonNull<ffi::ibv_qp>,
    /// Whether `drop` has nothing left to do: the queue pair was destroyed or abandoned.
    given_up: bool,
    pub(super) flights: Flights<T>,
    pub(super) receives: Option<Receives>,
    send: Reservation,
    recv: Reservation,
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) options: QueuePairOptions,
    pub(super) serial: Serial,
    pub(super) number: u32,
}

/// A queue pair that is not connected: it has its receives posted, and cannot send.
pub struct PreparedQueuePair<T> {
    core: Core<T>,
    /// Whether an attempt to connect has left it beyond INIT.
    begun: bool,
}

// SAFETY: libibverbs is thread-safe, and what is in flight may be sent between threads.
unsafe impl<T: Send> Send for Core<T> {}

impl<T> Core<T> {
    pub(super) fn device(&self) -> &str {
        self.domain.context().name()
    }

    pub(super) fn modify(
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
        // The kernel resolves the address here, and says no more than that it could not.
        let to = match gid {
            Some(gid) => format!("RTR towards {}", Ipv6Addr::from(gid)),
            None => format!("RTR towards LID {}", attributes.ah_attr.dlid),
        };
        self.modify(&mut attributes, what, &to)
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
    /// Asks the device for the attributes that the mask `what` names.
    pub(super) fn query(&self, what: u32) -> Result<ffi::ibv_qp_attr, VerbsError> {
        let mut attributes = ffi::ibv_qp_attr::zeroed();
        let mut initial = ffi::ibv_qp_init_attr::zeroed();
        let table = &self.domain.context().library().table;
        let what = what.cast_signed();
        // SAFETY: the queue pair is alive, and the pointers are to live locals.
        let status = unsafe {
            (table.query_qp)(self.raw.as_ptr(), &raw mut attributes, what, &raw mut initial)
        };
        let on = format_args!("queue pair {} of {}", self.number, self.device());
        check("ibv_query_qp", status, on)?;
        Ok(attributes)
    }

    /// What the device lets the peer do.
    pub(super) fn remote_access(&self) -> Result<RemoteAccess, VerbsError> {
        let attributes = self.query(mask::IBV_QP_ACCESS_FLAGS.0)?;
        // Some devices report that they write what their own requests bring; peers gain nothing by it.
        let flags = attributes.qp_access_flags & !ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        let known = RemoteAccess::ALL.into_iter().find(|&access| access_flags(access) == flags);
        known.ok_or_else(|| VerbsError::Call {
            call: "ibv_query_qp",
            on: format!("queue pair {} of {}", self.number, self.device()),
            source: io::Error::other(format!("it allows {flags:#x}, which was never asked for")),
        })
    }

    /// Destroys the queue pair, if it has not been; after a failure it is as it was.
    pub(super) fn destroy(&mut self) -> Result<(), VerbsError> {
        if self.given_up {
            return Ok(());
        }
        let table = &self.domain.context().library().table;
        // SAFETY: made once and not destroyed yet; its queues, its domain and its buffers are alive.
        let status = unsafe { (table.destroy_qp)(self.raw.as_ptr()) };
        let on = format_args!("queue pair {} of {}", self.number, self.device());
        check("ibv_destroy_qp", status, on)?;
        self.given_up = true;
        Ok(())
    }

    /// Leaks the queue pair, which the device does not destroy, and everything that it may still use.
    pub(super) fn abandon(&mut self) {
        self.given_up = true;
        self.flights.leak();
        if let Some(receives) = self.receives.take() {
            receives.leak();
        }
        // The queue pair lives on, and needs what it was made from.
        self.send.keep();
        self.recv.keep();
        std::mem::forget(Arc::clone(&self.domain));
    }
}

impl<T> Drop for Core<T> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            tracing::error!(%error, in_flight = self.flights.len(),
                "the device may still write: what is in flight is leaked");
            self.abandon();
        }
    }
}

impl<T> PreparedQueuePair<T> {
    pub(super) fn new(
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
        let given_up = false;
        let core =
            Core { raw, given_up, flights, receives, send, recv, domain, options, serial, number };
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

    /// Asks the device what the peer may do through the queue pair.
    ///
    /// # Errors
    /// The device does not answer, or it allows more than any [`RemoteAccess`] does.
    pub fn remote_access(&self) -> Result<RemoteAccess, VerbsError> {
        self.core.remote_access()
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
            Ok(()) => Ok(QueuePair::connected(self.core)),
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

impl<T> fmt::Debug for PreparedQueuePair<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PreparedQueuePair({} of {})", self.core.number, self.core.device())
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
