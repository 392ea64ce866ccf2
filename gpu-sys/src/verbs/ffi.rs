//! The symbols of libibverbs: the one place that decides where they come from.
//!
//! * By default they are our own bindings (`own.rs`), and `libibverbs.so.1` is opened when the
//!   program asks for it: one binary runs with and without rdma-core.
//! * With the feature `rdma-sys` they are that crate's (`linked.rs`), and libibverbs is linked.
//!
//! Both have the same names. [`Table`] holds the functions that the library exports, so that tests
//! can put others in their place; what `verbs.h` defines as inline functions goes through the
//! context's own table (`ibv_context.ops`).

use std::ffi::{c_char, c_int, c_uint, c_void};

#[cfg(all(test, feature = "rdma-sys"))]
mod abi_tests;
#[cfg(feature = "rdma-sys")]
mod linked;
#[cfg(any(test, not(feature = "rdma-sys")))]
mod own;

#[cfg(feature = "rdma-sys")]
pub(super) use linked::*;
#[cfg(not(feature = "rdma-sys"))]
pub(super) use own::*;

use super::error::VerbsError;

/// What is opened; the name that rdma-core has had since 2005.
#[cfg(not(feature = "rdma-sys"))]
const LIBRARY: &str = "libibverbs.so.1";

/// `ibv_async_event` with its type as a number.
#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: AsyncElement,
    pub(super) event_type: c_uint,
}

/// What an event is about; which member is set depends on its type.
#[repr(C)]
pub(super) union AsyncElement {
    pub(super) cq: *mut ibv_cq,
    pub(super) qp: *mut ibv_qp,
    pub(super) port_num: c_int,
}

/// `enum ibv_event_type`.
pub(super) mod event {
    use std::ffi::c_uint;

    pub(crate) const CQ_ERR: c_uint = 0;
    pub(crate) const QP_FATAL: c_uint = 1;
    pub(crate) const QP_REQ_ERR: c_uint = 2;
    pub(crate) const QP_ACCESS_ERR: c_uint = 3;
    pub(crate) const COMM_EST: c_uint = 4;
    pub(crate) const SQ_DRAINED: c_uint = 5;
    pub(crate) const PATH_MIG: c_uint = 6;
    pub(crate) const PATH_MIG_ERR: c_uint = 7;
    pub(crate) const DEVICE_FATAL: c_uint = 8;
    pub(crate) const PORT_ACTIVE: c_uint = 9;
    pub(crate) const PORT_ERR: c_uint = 10;
    pub(crate) const LID_CHANGE: c_uint = 11;
    pub(crate) const PKEY_CHANGE: c_uint = 12;
    pub(crate) const SM_CHANGE: c_uint = 13;
    pub(crate) const QP_LAST_WQE_REACHED: c_uint = 16;
    pub(crate) const CLIENT_REREGISTER: c_uint = 17;
    pub(crate) const GID_CHANGE: c_uint = 18;
}

macro_rules! functions {
    ($($field:ident = $symbol:ident ( $($arg:ty),* ) $(-> $result:ty)?;)*) => {
        /// The functions that libibverbs exports, with the signatures of `verbs.h`.
        #[derive(Clone, Copy)]
        pub(super) struct Table {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
        }

        #[cfg(not(feature = "rdma-sys"))]
        impl Table {
            /// Opens the library and looks its functions up.
            pub(super) fn load() -> Result<Self, VerbsError> {
                // SAFETY: libibverbs has no initialisers that expect preparation.
                let library = unsafe { libloading::Library::new(LIBRARY) }.map_err(|error| {
                    VerbsError::NoLibrary { library: LIBRARY, reason: reason(&error) }
                })?;
                let table = Self {
                    $($field: {
                        let name = concat!(stringify!($symbol), "\0").as_bytes();
                        // SAFETY: verbs.h declares this symbol as a function of this type.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) $(-> $result)?>(name)
                        };
                        *symbol.map_err(|_| VerbsError::MissingSymbol {
                            library: LIBRARY,
                            symbol: stringify!($symbol),
                        })?
                    },)*
                };
                // Never unloaded, so the addresses stay good: providers that it has opened register
                // themselves with it and could not be opened a second time.
                std::mem::forget(library);
                Ok(table)
            }
        }

        #[cfg(feature = "rdma-sys")]
        impl Table {
            /// The functions that were linked.
            #[allow(clippy::unnecessary_wraps, reason = "the other side's signature")]
            pub(super) fn load() -> Result<Self, VerbsError> {
                Ok(Self { $($field: linked::$symbol,)* })
            }
        }
    };
}

functions! {
    device_list = ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    free_device_list = ibv_free_device_list(*mut *mut ibv_device);
    device_name = ibv_get_device_name(*mut ibv_device) -> *const c_char;
    device_guid = ibv_get_device_guid(*mut ibv_device) -> u64;
    open_device = ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    close_device = ibv_close_device(*mut ibv_context) -> c_int;
    async_event = ibv_get_async_event(*mut ibv_context, *mut AsyncEvent) -> c_int;
    ack_async_event = ibv_ack_async_event(*mut AsyncEvent);
    query_device = ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    query_port = ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_gid = ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    alloc_pd = ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    reg_mr = ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr = ibv_dereg_mr(*mut ibv_mr) -> c_int;
    create_comp_channel = ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel = ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    create_cq = ibv_create_cq(
        *mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int
    ) -> *mut ibv_cq;
    destroy_cq = ibv_destroy_cq(*mut ibv_cq) -> c_int;
    cq_event = ibv_get_cq_event(
        *mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void
    ) -> c_int;
    ack_cq_events = ibv_ack_cq_events(*mut ibv_cq, c_uint);
    create_qp = ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp = ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    query_qp = ibv_query_qp(
        *mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr
    ) -> c_int;
    destroy_qp = ibv_destroy_qp(*mut ibv_qp) -> c_int;
}

/// `dlopen`'s own words, which name the file.
#[cfg(not(feature = "rdma-sys"))]
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// `ibv_post_send(3)`, inline in `verbs.h`.
///
/// # Safety
/// `qp` is a live queue pair; `list` is a linked list of requests that stays as it is until this
/// returns, and the memory that it names stays usable until each request has completed.
pub(super) unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let context = unsafe { (*qp).context };
    // SAFETY: it has a live context, whose table does not change after the device was opened.
    let Some(post) = (unsafe { (*context).ops.post_send }) else { return libc::ENOSYS };
    // SAFETY: the caller's promise.
    unsafe { post(qp, list, bad) }
}

/// `ibv_post_recv(3)`, inline in `verbs.h`.
///
/// # Safety
/// As for [`ibv_post_send`].
pub(super) unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let context = unsafe { (*qp).context };
    // SAFETY: it has a live context, whose table does not change after the device was opened.
    let Some(post) = (unsafe { (*context).ops.post_recv }) else { return libc::ENOSYS };
    // SAFETY: the caller's promise.
    unsafe { post(qp, list, bad) }
}

/// `ibv_poll_cq(3)`, inline in `verbs.h`.
///
/// # Safety
/// `cq` is a live completion queue, and `into` has room for `entries`.
pub(super) unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, into: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's promise.
    let context = unsafe { (*cq).context };
    // SAFETY: it has a live context, whose table does not change after the device was opened.
    let Some(poll) = (unsafe { (*context).ops.poll_cq }) else { return -libc::ENOSYS };
    // SAFETY: the caller's promise.
    unsafe { poll(cq, entries, into) }
}

/// `ibv_req_notify_cq(3)`, inline in `verbs.h`, for any completion.
///
/// # Safety
/// `cq` is a live completion queue with a channel.
pub(super) unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the caller's promise.
    let context = unsafe { (*cq).context };
    // SAFETY: it has a live context, whose table does not change after the device was opened.
    let Some(arm) = (unsafe { (*context).ops.req_notify_cq }) else { return libc::ENOSYS };
    // SAFETY: the caller's promise.
    unsafe { arm(cq, 0) }
}

/// A structure of `verbs.h` with every byte zero.
pub(super) trait Zeroed: Sized {
    /// All zeros: what C code writes as `= {}`.
    fn zeroed() -> Self;
}

macro_rules! zeroed {
    ($($name:ty),* $(,)?) => {$(
        impl Zeroed for $name {
            fn zeroed() -> Self {
                // SAFETY: its fields are numbers, raw pointers, optional functions and unions of
                // such, and zeros are a value of each.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}

zeroed!(
    AsyncEvent,
    ibv_device_attr,
    ibv_gid,
    ibv_port_attr,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_recv_wr,
    ibv_send_wr,
    ibv_wc,
);
