//! Our own bindings against those that bindgen made from the installed header for rdma-sys: sizes,
//! alignments, offsets of every field that is named here, and constants.

use std::mem::{align_of, offset_of, size_of};

use super::{AsyncEvent, event, own};

macro_rules! same_layout {
    ($($name:ident { $($field:ident),* $(,)? })*) => {$(
        let ours = (size_of::<own::$name>(), align_of::<own::$name>());
        let theirs = (size_of::<rdma_sys::$name>(), align_of::<rdma_sys::$name>());
        assert_eq!(ours, theirs, "size and alignment of {}", stringify!($name));
        $(
            let ours = offset_of!(own::$name, $field);
            let theirs = offset_of!(rdma_sys::$name, $field);
            assert_eq!(ours, theirs, "{}.{}", stringify!($name), stringify!($field));
        )*
    )*};
}

macro_rules! same_enums {
    ($($name:ident { $($value:ident),* $(,)? })*) => {$($(
        assert_eq!(own::$name::$value, rdma_sys::$name::$value, stringify!($value));
    )*)*};
}

macro_rules! same_flags {
    ($($name:ident { $($value:ident),* $(,)? })*) => {$($(
        assert_eq!(own::$name::$value.0, rdma_sys::$name::$value.0, stringify!($value));
    )*)*};
}

#[test]
fn devices_ports_and_domains_have_the_layout_of_the_header() {
    same_layout! {
        ibv_gid { raw, global }
        ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_device_attr {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id,
            vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd,
            max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
            max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw,
            max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
            max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr,
            max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt,
        }
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
            qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
            init_type_reply, active_width, active_speed, phys_state, link_layer, flags,
            port_cap_flags2,
        }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    }
}

#[test]
fn queues_and_requests_have_the_layout_of_the_header() {
    same_layout! {
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq {
            context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
            async_events_completed,
        }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data_invalidated_rkey_union, qp_num,
            src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits,
        }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
            en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit,
        }
        ibv_qp {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex,
            cond, events_completed,
        }
        ibv_sge { addr, length, lkey }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data_invalidated_rkey_union, wr,
            qp_type, bind_mw_tso_union,
        }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        rdma_t { remote_addr, rkey }
        wr_t { rdma }
    }
    let ours = (size_of::<AsyncEvent>(), offset_of!(AsyncEvent, event_type));
    let theirs =
        (size_of::<rdma_sys::ibv_async_event>(), offset_of!(rdma_sys::ibv_async_event, event_type));
    assert_eq!(ours, theirs, "ibv_async_event");
}

#[test]
fn constants_are_those_of_the_header() {
    same_enums! {
        ibv_mtu { IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 }
        ibv_port_state {
            IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE,
            IBV_PORT_ACTIVE_DEFER,
        }
        ibv_wc_status {
            IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_EEC_OP_ERR,
            IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR,
            IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
            IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
            IBV_WC_LOC_RDD_VIOL_ERR, IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR,
            IBV_WC_INV_EECN_ERR, IBV_WC_INV_EEC_STATE_ERR, IBV_WC_FATAL_ERR,
            IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR,
        }
        ibv_wc_opcode {
            IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_RECV,
            IBV_WC_RECV_RDMA_WITH_IMM,
        }
        ibv_wr_opcode {
            IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM,
            IBV_WR_RDMA_READ,
        }
        ibv_qp_type { IBV_QPT_RC }
        ibv_qp_state {
            IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE,
            IBV_QPS_ERR, IBV_QPS_UNKNOWN,
        }
    }
    same_flags! {
        ibv_access_flags {
            IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ,
        }
        ibv_send_flags { IBV_SEND_SIGNALED, IBV_SEND_INLINE }
        ibv_wc_flags { IBV_WC_WITH_IMM }
        ibv_qp_attr_mask {
            IBV_QP_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV,
            IBV_QP_PATH_MTU, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN,
            IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN,
            IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_DEST_QPN,
        }
    }
}

#[test]
fn events_have_the_numbers_of_the_header() {
    use rdma_sys::ibv_event_type as theirs;
    let pairs = [
        (event::CQ_ERR, theirs::IBV_EVENT_CQ_ERR),
        (event::QP_FATAL, theirs::IBV_EVENT_QP_FATAL),
        (event::QP_REQ_ERR, theirs::IBV_EVENT_QP_REQ_ERR),
        (event::QP_ACCESS_ERR, theirs::IBV_EVENT_QP_ACCESS_ERR),
        (event::COMM_EST, theirs::IBV_EVENT_COMM_EST),
        (event::SQ_DRAINED, theirs::IBV_EVENT_SQ_DRAINED),
        (event::PATH_MIG, theirs::IBV_EVENT_PATH_MIG),
        (event::PATH_MIG_ERR, theirs::IBV_EVENT_PATH_MIG_ERR),
        (event::DEVICE_FATAL, theirs::IBV_EVENT_DEVICE_FATAL),
        (event::PORT_ACTIVE, theirs::IBV_EVENT_PORT_ACTIVE),
        (event::PORT_ERR, theirs::IBV_EVENT_PORT_ERR),
        (event::LID_CHANGE, theirs::IBV_EVENT_LID_CHANGE),
        (event::PKEY_CHANGE, theirs::IBV_EVENT_PKEY_CHANGE),
        (event::SM_CHANGE, theirs::IBV_EVENT_SM_CHANGE),
        (event::QP_LAST_WQE_REACHED, theirs::IBV_EVENT_QP_LAST_WQE_REACHED),
        (event::CLIENT_REREGISTER, theirs::IBV_EVENT_CLIENT_REREGISTER),
        (event::GID_CHANGE, theirs::IBV_EVENT_GID_CHANGE),
    ];
    for (ours, theirs) in pairs {
        assert_eq!(ours, theirs as u32);
    }
}
