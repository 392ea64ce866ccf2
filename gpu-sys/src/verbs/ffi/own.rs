//! `infiniband/verbs.h` of rdma-core in our own words: what this crate uses of it, under the names
//! that the crate rdma-sys gives, and nothing else.
//!
//! The ABI is rdma-core's promise (`libibverbs.so.1`, symbol versions `IBVERBS_1.0` and `1.1`):
//! fields are appended, never moved. Enums are plain numbers, since a library newer than this file
//! may give others. The tests beside this file compare it with rdma-sys.

#![allow(non_camel_case_types, reason = "the names of verbs.h")]
#![allow(dead_code, reason = "enums are whole, as verbs.h has them")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{pthread_cond_t, pthread_mutex_t};

macro_rules! enums {
    ($($name:ident { $($value:ident = $number:literal),* $(,)? })*) => {$(
        pub(crate) mod $name {
            pub(crate) type Type = std::ffi::c_uint;
            $(pub(crate) const $value: Type = $number;)*
        }
    )*};
}

macro_rules! flags {
    ($($name:ident { $($value:ident = $number:expr),* $(,)? })*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) struct $name(pub(crate) c_uint);
        impl $name { $(pub(crate) const $value: Self = Self($number);)* }
    )*};
}

enums! {
    ibv_node_type { IBV_NODE_CA = 1 }
    ibv_transport_type { IBV_TRANSPORT_IB = 0 }
    ibv_atomic_cap { IBV_ATOMIC_NONE = 0 }
    ibv_mtu {
        IBV_MTU_256 = 1, IBV_MTU_512 = 2, IBV_MTU_1024 = 3, IBV_MTU_2048 = 4, IBV_MTU_4096 = 5,
    }
    ibv_port_state {
        IBV_PORT_NOP = 0, IBV_PORT_DOWN = 1, IBV_PORT_INIT = 2, IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4, IBV_PORT_ACTIVE_DEFER = 5,
    }
    ibv_wc_status {
        IBV_WC_SUCCESS = 0, IBV_WC_LOC_LEN_ERR = 1, IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3, IBV_WC_LOC_PROT_ERR = 4, IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6, IBV_WC_BAD_RESP_ERR = 7, IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9, IBV_WC_REM_ACCESS_ERR = 10, IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12, IBV_WC_RNR_RETRY_EXC_ERR = 13, IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15, IBV_WC_REM_ABORT_ERR = 16, IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18, IBV_WC_FATAL_ERR = 19, IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
    }
    ibv_wc_opcode {
        IBV_WC_SEND = 0, IBV_WC_RDMA_WRITE = 1, IBV_WC_RDMA_READ = 2, IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    ibv_wr_opcode {
        IBV_WR_RDMA_WRITE = 0, IBV_WR_RDMA_WRITE_WITH_IMM = 1, IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3, IBV_WR_RDMA_READ = 4,
    }
    ibv_qp_type { IBV_QPT_RC = 2 }
    ibv_qp_state {
        IBV_QPS_RESET = 0, IBV_QPS_INIT = 1, IBV_QPS_RTR = 2, IBV_QPS_RTS = 3, IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5, IBV_QPS_ERR = 6, IBV_QPS_UNKNOWN = 7,
    }
    ibv_mig_state { IBV_MIG_MIGRATED = 0 }
}

flags! {
    ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2,
    }
    ibv_send_flags { IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3 }
    ibv_wc_flags { IBV_WC_WITH_IMM = 1 << 1 }
    ibv_qp_attr_mask {
        IBV_QP_STATE = 1, IBV_QP_ACCESS_FLAGS = 1 << 3, IBV_QP_PKEY_INDEX = 1 << 4,
        IBV_QP_PORT = 1 << 5, IBV_QP_AV = 1 << 7, IBV_QP_PATH_MTU = 1 << 8,
        IBV_QP_TIMEOUT = 1 << 9, IBV_QP_RETRY_CNT = 1 << 10, IBV_QP_RNR_RETRY = 1 << 11,
        IBV_QP_RQ_PSN = 1 << 12, IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
        IBV_QP_MIN_RNR_TIMER = 1 << 15, IBV_QP_SQ_PSN = 1 << 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17, IBV_QP_DEST_QPN = 1 << 20,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_gid_global_t {
    pub(crate) subnet_prefix: u64,
    pub(crate) interface_id: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ibv_gid {
    pub(crate) raw: [u8; 16],
    pub(crate) global: ibv_gid_global_t,
}

#[repr(C)]
pub(crate) struct _ibv_device_ops {
    _dummy1: Option<unsafe extern "C" fn()>,
    _dummy2: Option<unsafe extern "C" fn()>,
}

#[repr(C)]
pub(crate) struct ibv_device {
    pub(crate) _ops: _ibv_device_ops,
    pub(crate) node_type: ibv_node_type::Type,
    pub(crate) transport_type: ibv_transport_type::Type,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

#[repr(C)]
pub(crate) struct ibv_device_attr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: ibv_atomic_cap::Type,
    pub(crate) max_ee: c_int,
    pub(crate) max_rdd: c_int,
    pub(crate) max_mw: c_int,
    pub(crate) max_raw_ipv6_qp: c_int,
    pub(crate) max_raw_ethy_qp: c_int,
    pub(crate) max_mcast_grp: c_int,
    pub(crate) max_mcast_qp_attach: c_int,
    pub(crate) max_total_mcast_qp_attach: c_int,
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

#[repr(C)]
pub(crate) struct ibv_port_attr {
    pub(crate) state: ibv_port_state::Type,
    pub(crate) max_mtu: ibv_mtu::Type,
    pub(crate) active_mtu: ibv_mtu::Type,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

#[repr(C)]
pub(crate) union imm_data_invalidated_rkey_union_t {
    pub(crate) imm_data: u32,
    pub(crate) invalidated_rkey: u32,
}

#[repr(C)]
pub(crate) struct ibv_wc {
    pub(crate) wr_id: u64,
    pub(crate) status: ibv_wc_status::Type,
    pub(crate) opcode: ibv_wc_opcode::Type,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

#[repr(C)]
pub(crate) struct ibv_pd {
    pub(crate) context: *mut ibv_context,
    pub(crate) handle: u32,
}

#[repr(C)]
pub(crate) struct ibv_mr {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_global_route {
    pub(crate) dgid: ibv_gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_ah_attr {
    pub(crate) grh: ibv_global_route,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_qp_cap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// Shared receive queues are not used.
pub(crate) enum ibv_srq {}

#[repr(C)]
pub(crate) struct ibv_qp_init_attr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) qp_type: ibv_qp_type::Type,
    pub(crate) sq_sig_all: c_int,
}

#[repr(C)]
pub(crate) struct ibv_qp_attr {
    pub(crate) qp_state: ibv_qp_state::Type,
    pub(crate) cur_qp_state: ibv_qp_state::Type,
    pub(crate) path_mtu: ibv_mtu::Type,
    pub(crate) path_mig_state: ibv_mig_state::Type,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) alt_ah_attr: ibv_ah_attr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_t {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

/// The widest member of `wr_t`; not used.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct atomic_t {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
pub(crate) union wr_t {
    pub(crate) rdma: rdma_t,
    pub(crate) atomic: atomic_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct xrc_t {
    pub(crate) remote_srqn: u32,
}

#[repr(C)]
pub(crate) union qp_type_t {
    pub(crate) xrc: xrc_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_mw_bind_info {
    pub(crate) mr: *mut ibv_mr,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) mw_access_flags: c_uint,
}

/// The widest member of the last union; not used.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct bind_mw_t {
    pub(crate) mw: *mut c_void,
    pub(crate) rkey: u32,
    pub(crate) bind_info: ibv_mw_bind_info,
}

#[repr(C)]
pub(crate) union bind_mw_tso_union_t {
    pub(crate) bind_mw: bind_mw_t,
}

#[repr(C)]
pub(crate) struct ibv_send_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: ibv_wr_opcode::Type,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
    pub(crate) wr: wr_t,
    pub(crate) qp_type: qp_type_t,
    pub(crate) bind_mw_tso_union: bind_mw_tso_union_t,
}

#[repr(C)]
pub(crate) struct ibv_recv_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
}

#[repr(C)]
pub(crate) struct ibv_qp {
    pub(crate) context: *mut ibv_context,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
    pub(crate) state: ibv_qp_state::Type,
    pub(crate) qp_type: ibv_qp_type::Type,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) cond: pthread_cond_t,
    pub(crate) events_completed: u32,
}

#[repr(C)]
pub(crate) struct ibv_comp_channel {
    pub(crate) context: *mut ibv_context,
    pub(crate) fd: c_int,
    pub(crate) refcnt: c_int,
}

#[repr(C)]
pub(crate) struct ibv_cq {
    pub(crate) context: *mut ibv_context,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) cond: pthread_cond_t,
    pub(crate) comp_events_completed: u32,
    pub(crate) async_events_completed: u32,
}

/// A place in `ibv_context_ops` that is not called from here.
type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
pub(crate) struct ibv_context_ops {
    _compat_query_device: Unused,
    _compat_query_port: Unused,
    _compat_alloc_pd: Unused,
    _compat_dealloc_pd: Unused,
    _compat_reg_mr: Unused,
    _compat_rereg_mr: Unused,
    _compat_dereg_mr: Unused,
    alloc_mw: Unused,
    bind_mw: Unused,
    dealloc_mw: Unused,
    _compat_create_cq: Unused,
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    _compat_cq_event: Unused,
    _compat_resize_cq: Unused,
    _compat_destroy_cq: Unused,
    _compat_create_srq: Unused,
    _compat_modify_srq: Unused,
    _compat_query_srq: Unused,
    _compat_destroy_srq: Unused,
    post_srq_recv: Unused,
    _compat_create_qp: Unused,
    _compat_query_qp: Unused,
    _compat_modify_qp: Unused,
    _compat_destroy_qp: Unused,
    pub(crate) post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    pub(crate) post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    _compat_create_ah: Unused,
    _compat_destroy_ah: Unused,
    _compat_attach_mcast: Unused,
    _compat_detach_mcast: Unused,
    _compat_async_event: Unused,
}

#[repr(C)]
pub(crate) struct ibv_context {
    pub(crate) device: *mut ibv_device,
    pub(crate) ops: ibv_context_ops,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    pub(crate) mutex: pthread_mutex_t,
    pub(crate) abi_compat: *mut c_void,
}
