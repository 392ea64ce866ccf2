//! The crate rdma-sys, which links libibverbs, under the same names as our own bindings.

use std::ffi::c_int;

use super::AsyncEvent;
pub(crate) use rdma_sys::{
    ibv_access_flags, ibv_ack_cq_events, ibv_alloc_pd, ibv_close_device, ibv_comp_channel,
    ibv_context, ibv_cq, ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_dealloc_pd,
    ibv_dereg_mr, ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp, ibv_device,
    ibv_device_attr, ibv_free_device_list, ibv_get_cq_event, ibv_get_device_guid,
    ibv_get_device_list, ibv_get_device_name, ibv_gid, ibv_modify_qp, ibv_mr, ibv_mtu,
    ibv_open_device, ibv_pd, ibv_port_attr, ibv_port_state, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask,
    ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_query_device, ibv_query_gid, ibv_query_qp,
    ibv_recv_wr, ibv_reg_mr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_flags,
    ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode, rdma_t,
};

// The functions below differ from the crate's in the type of one pointer each.

/// The symbol takes the attributes of an older header, which are the first of today's.
///
/// # Safety
/// As for `ibv_query_port`; `attr` is zeroed.
pub(crate) unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's promise; the older attributes are shorter.
    unsafe { rdma_sys::ibv_query_port(context, port, attr.cast()) }
}

/// The crate's event has a Rust enum in it, for which a newer kernel's event would be undefined
/// behaviour; ours has a number in the same place.
///
/// # Safety
/// As for `ibv_get_async_event`.
pub(crate) unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut AsyncEvent,
) -> c_int {
    // SAFETY: the caller's promise; the two events have one layout, which a test compares.
    unsafe { rdma_sys::ibv_get_async_event(context, event.cast()) }
}

/// See [`ibv_get_async_event`].
///
/// # Safety
/// As for `ibv_ack_async_event`.
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut AsyncEvent) {
    // SAFETY: as above.
    unsafe { rdma_sys::ibv_ack_async_event(event.cast()) }
}
