//! What stands in the fake's table: a function for each of libibverbs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;

use super::super::ffi::{self, Table, Zeroed, ibv_qp_attr_mask as mask};
use super::{Posted, state};

/// What a registration's remote key has beyond its local one.
const REMOTE_KEY: u32 = 0x100_0000;

pub(super) const TABLE: Table = Table {
    device_list,
    free_device_list,
    device_name,
    device_guid,
    open_device,
    close_device,
    async_event,
    ack_async_event,
    query_device,
    query_port,
    query_gid,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    destroy_cq,
    cq_event,
    ack_cq_events,
    create_qp,
    modify_qp,
    query_qp,
    destroy_qp,
};

/// Notes the call; the error number it is to return.
fn called(name: &'static str) -> c_int {
    // Outside of the state, which it may use.
    if let Some(first) = state(|it| it.before.remove(name)) {
        first();
    }
    state(|it| it.called(name))
}

fn set_errno(number: c_int) {
    // SAFETY: the C library's place for this thread's error number is always there.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { place.write(number) };
}

/// A zeroed structure of the library, or null with `errno` if the call is to fail.
fn made<T>(name: &'static str) -> *mut T {
    match called(name) {
        0 => Box::into_raw(Box::new(MaybeUninit::<T>::zeroed())).cast(),
        number => {
            set_errno(number);
            std::ptr::null_mut()
        }
    }
}

/// A descriptor that never has anything to say.
fn opened() -> c_int {
    // SAFETY: no pointers are passed.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
}

/// Frees what `made` gave, unless the call is to fail.
fn freed<T>(name: &'static str, raw: *mut T) -> c_int {
    let number = called(name);
    if number == 0 {
        // SAFETY: made by `made`; the owners free once, which the tests count.
        drop(unsafe { Box::from_raw(raw.cast::<MaybeUninit<T>>()) });
    }
    number
}

extern "C" fn device_list(count: *mut c_int) -> *mut *mut ffi::ibv_device {
    let number = called("ibv_get_device_list");
    if number != 0 {
        set_errno(number);
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's pointer is to a live number.
    unsafe { count.write(2) };
    // Devices are only names here: small numbers that nobody follows.
    let devices = [1_usize, 2].map(std::ptr::without_provenance_mut::<ffi::ibv_device>);
    Box::into_raw(Box::new(devices)).cast()
}

extern "C" fn free_device_list(list: *mut *mut ffi::ibv_device) {
    called("ibv_free_device_list");
    // SAFETY: made by `device_list`, freed once.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ffi::ibv_device; 2]>()) });
}

extern "C" fn device_name(device: *mut ffi::ibv_device) -> *const c_char {
    match device.addr() {
        1 => c"fake0".as_ptr(),
        _ => c"fake1".as_ptr(),
    }
}

extern "C" fn device_guid(device: *mut ffi::ibv_device) -> u64 {
    (device.addr() as u64).to_be()
}

extern "C" fn open_device(device: *mut ffi::ibv_device) -> *mut ffi::ibv_context {
    let context = made::<ffi::ibv_context>("ibv_open_device");
    if context.is_null() {
        return context;
    }
    // SAFETY: made above, and zeros are a value of it.
    let context_ref = unsafe { &mut *context };
    context_ref.async_fd = opened();
    // Nobody else uses this number, and what is made of the context can tell its device by it.
    context_ref.cmd_fd = device.addr() as c_int;
    context_ref.ops.post_send = Some(post_send);
    context_ref.ops.post_recv = Some(post_recv);
    context_ref.ops.poll_cq = Some(poll_cq);
    context_ref.ops.req_notify_cq = Some(req_notify_cq);
    context
}

extern "C" fn close_device(context: *mut ffi::ibv_context) -> c_int {
    // SAFETY: made by `open_device`, and not freed yet.
    let fd = unsafe { (*context).async_fd };
    // SAFETY: opened by `open_device`.
    unsafe { libc::close(fd) };
    freed("ibv_close_device", context)
}

/// The number of a context's device.
fn device_of(context: *mut ffi::ibv_context) -> c_int {
    // SAFETY: the caller's context was made by `open_device` and is not closed.
    unsafe { (*context).cmd_fd }
}

extern "C" fn async_event(context: *mut ffi::ibv_context, event: *mut ffi::AsyncEvent) -> c_int {
    let number = called("ibv_get_async_event");
    if number != 0 {
        set_errno(number);
        return -1;
    }
    let device = device_of(context);
    let next = state(|it| {
        let at = it.events.iter().position(|(whose, ..)| *whose == device)?;
        it.events.remove(at)
    });
    let Some((_, kind, port)) = next else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    let mut raw = ffi::AsyncEvent::zeroed();
    raw.event_type = kind;
    raw.element.port_num = port;
    // SAFETY: the caller's pointer is to a live event.
    unsafe { event.write(raw) };
    0
}

extern "C" fn ack_async_event(_event: *mut ffi::AsyncEvent) {
    called("ibv_ack_async_event");
}

extern "C" fn query_device(_: *mut ffi::ibv_context, into: *mut ffi::ibv_device_attr) -> c_int {
    let mut limits = ffi::ibv_device_attr::zeroed();
    limits.max_mr_size = state(|it| if it.max_mr_size == 0 { 1 << 30 } else { it.max_mr_size });
    limits.max_qp_wr = 1024;
    limits.max_cqe = 4096;
    limits.phys_port_cnt = 1;
    // SAFETY: the caller's pointer is to a live structure.
    unsafe { into.write(limits) };
    called("ibv_query_device")
}

extern "C" fn query_port(_: *mut ffi::ibv_context, _: u8, into: *mut ffi::ibv_port_attr) -> c_int {
    let mut port = ffi::ibv_port_attr::zeroed();
    port.state = ffi::ibv_port_state::IBV_PORT_ACTIVE;
    port.active_mtu = ffi::ibv_mtu::IBV_MTU_1024;
    port.link_layer = 2;
    port.gid_tbl_len = 8;
    // SAFETY: the caller's pointer is to a live structure.
    unsafe { into.write(port) };
    called("ibv_query_port")
}

/// Places 0 and 3 are used, 5 cannot be read, the others are empty.
extern "C" fn query_gid(
    _: *mut ffi::ibv_context,
    _: u8,
    index: c_int,
    into: *mut ffi::ibv_gid,
) -> c_int {
    let mut gid = ffi::ibv_gid::zeroed();
    match index {
        0 => gid.raw = [0xfe; 16],
        3 => gid.raw = [0x33; 16],
        5 => return -1,
        _ => {}
    }
    // SAFETY: the caller's pointer is to a live union.
    unsafe { into.write(gid) };
    if called("ibv_query_gid") == 0 { 0 } else { -1 }
}

extern "C" fn alloc_pd(context: *mut ffi::ibv_context) -> *mut ffi::ibv_pd {
    let raw = made::<ffi::ibv_pd>("ibv_alloc_pd");
    // SAFETY: made above; zeros are a value of it.
    if let Some(pd) = unsafe { raw.as_mut() } {
        pd.context = context;
    }
    raw
}

extern "C" fn dealloc_pd(pd: *mut ffi::ibv_pd) -> c_int {
    freed("ibv_dealloc_pd", pd)
}

extern "C" fn reg_mr(
    _: *mut ffi::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ffi::ibv_mr {
    state(|it| it.access.push(access));
    let raw = made::<ffi::ibv_mr>("ibv_reg_mr");
    // SAFETY: made above; zeros are a value of it.
    if let Some(mr) = unsafe { raw.as_mut() } {
        let key = state(|it| {
            it.keys += 1;
            it.keys
        });
        (mr.addr, mr.length, mr.lkey, mr.rkey) = (addr, length, key, key | REMOTE_KEY);
        let address = addr.expose_provenance() as u64;
        state(|it| it.regions.push((address, length, key | REMOTE_KEY, access)));
    }
    raw
}

extern "C" fn dereg_mr(mr: *mut ffi::ibv_mr) -> c_int {
    // SAFETY: the caller's registration is live.
    let rkey = unsafe { (*mr).rkey };
    let status = freed("ibv_dereg_mr", mr);
    if status == 0 {
        state(|it| it.regions.retain(|(_, _, key, _)| *key != rkey));
    }
    status
}

extern "C" fn create_comp_channel(_: *mut ffi::ibv_context) -> *mut ffi::ibv_comp_channel {
    let raw = made::<ffi::ibv_comp_channel>("ibv_create_comp_channel");
    // SAFETY: made above; zeros are a value of it.
    if let Some(channel) = unsafe { raw.as_mut() } {
        channel.fd = opened();
    }
    raw
}

extern "C" fn destroy_comp_channel(channel: *mut ffi::ibv_comp_channel) -> c_int {
    // SAFETY: the caller's channel is live.
    let fd = unsafe { (*channel).fd };
    let status = freed("ibv_destroy_comp_channel", channel);
    if status == 0 {
        // SAFETY: opened by `create_comp_channel`, and closed once.
        unsafe { libc::close(fd) };
    }
    status
}

extern "C" fn create_cq(
    context: *mut ffi::ibv_context,
    _: c_int,
    _: *mut c_void,
    _: *mut ffi::ibv_comp_channel,
    _: c_int,
) -> *mut ffi::ibv_cq {
    let raw = made::<ffi::ibv_cq>("ibv_create_cq");
    // SAFETY: made above; zeros are a value of it.
    if let Some(cq) = unsafe { raw.as_mut() } {
        cq.context = context;
    }
    raw
}

extern "C" fn destroy_cq(cq: *mut ffi::ibv_cq) -> c_int {
    freed("ibv_destroy_cq", cq)
}

extern "C" fn cq_event(
    _: *mut ffi::ibv_comp_channel,
    _: *mut *mut ffi::ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    let number = called("ibv_get_cq_event");
    set_errno(if number == 0 { libc::EAGAIN } else { number });
    -1
}

unsafe extern "C" fn req_notify_cq(_: *mut ffi::ibv_cq, _: c_int) -> c_int {
    called("ibv_req_notify_cq")
}

extern "C" fn ack_cq_events(_: *mut ffi::ibv_cq, _: c_uint) {
    called("ibv_ack_cq_events");
}

extern "C" fn create_qp(
    pd: *mut ffi::ibv_pd,
    options: *mut ffi::ibv_qp_init_attr,
) -> *mut ffi::ibv_qp {
    let raw = made::<ffi::ibv_qp>("ibv_create_qp");
    // SAFETY: made above; zeros are a value of it.
    if let Some(qp) = unsafe { raw.as_mut() } {
        // SAFETY: the caller's domain is live.
        qp.context = unsafe { (*pd).context };
        // SAFETY: the caller's pointer is to a live structure.
        let queue = unsafe { (*options).send_cq };
        let device = device_of(qp.context);
        qp.qp_num = state(|it| it.add_queue_pair(device, queue.addr()));
    }
    raw
}

extern "C" fn modify_qp(
    pair: *mut ffi::ibv_qp,
    attributes: *mut ffi::ibv_qp_attr,
    what: c_int,
) -> c_int {
    // SAFETY: the caller's queue pair is live.
    let queue_pair = unsafe { (*pair).qp_num };
    // SAFETY: the caller's pointer is to a live structure.
    let to = unsafe { (*attributes).qp_state };
    // SAFETY: as above.
    let allowed = unsafe { (*attributes).qp_access_flags };
    // A test may let one step fail.
    let number = called(match to {
        ffi::ibv_qp_state::IBV_QPS_RTR => "ibv_modify_qp to RTR",
        ffi::ibv_qp_state::IBV_QPS_RTS => "ibv_modify_qp to RTS",
        _ => "ibv_modify_qp",
    });
    if number == 0 {
        state(|it| {
            it.states.push(to);
            if to == ffi::ibv_qp_state::IBV_QPS_ERR {
                it.failed.push(queue_pair);
            }
            if what & mask::IBV_QP_ACCESS_FLAGS.0.cast_signed() != 0 {
                it.allowed.insert(queue_pair, allowed);
            }
        });
    }
    number
}

extern "C" fn query_qp(
    pair: *mut ffi::ibv_qp,
    attributes: *mut ffi::ibv_qp_attr,
    _: c_int,
    _: *mut ffi::ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's queue pair is live.
    let number = unsafe { (*pair).qp_num };
    let last = state(|it| it.states.last().copied().unwrap_or(0));
    let allowed = state(|it| it.allowed.get(&number).copied().unwrap_or(0));
    // SAFETY: the caller's pointer is to a live structure.
    unsafe { (*attributes).qp_state = last };
    // SAFETY: as above.
    unsafe { (*attributes).qp_access_flags = allowed };
    called("ibv_query_qp")
}

extern "C" fn destroy_qp(qp: *mut ffi::ibv_qp) -> c_int {
    // SAFETY: the caller's queue pair is live.
    let number = unsafe { (*qp).qp_num };
    let status = freed("ibv_destroy_qp", qp);
    if status == 0 {
        state(|it| it.forget(number));
    }
    status
}

unsafe extern "C" fn post_send(
    pair: *mut ffi::ibv_qp,
    list: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    let number = called("ibv_post_send");
    let refuse_at = state(|it| it.refuse_at);
    let (mut at, mut place) = (list, 0);
    // SAFETY: the caller's list is of live requests, and ends with null.
    while let Some(request) = unsafe { at.as_ref() } {
        if number != 0 || refuse_at == Some(place) {
            // SAFETY: the caller's pointer is to a live pointer.
            unsafe { bad.write(at) };
            return if number == 0 { libc::ENOMEM } else { number };
        }
        // SAFETY: the caller's queue pair is live.
        let queue_pair = unsafe { (*pair).qp_num };
        let posted = noted(queue_pair, request);
        let message = (request.opcode == ffi::ibv_wr_opcode::IBV_WR_SEND).then(|| {
            let from = std::ptr::with_exposed_provenance::<u8>(posted.local as usize);
            // SAFETY: the message is where the caller's list says until this function returns.
            unsafe { std::slice::from_raw_parts(from, posted.bytes) }.to_vec()
        });
        state(|it| {
            it.posted.push(posted);
            it.sent.extend(message.map(|message| (queue_pair, message)));
        });
        (at, place) = (request.next, place + 1);
    }
    0
}

fn noted(queue_pair: u32, request: &ffi::ibv_send_wr) -> Posted {
    // SAFETY: the member is numbers, and any bytes are such.
    let remote = unsafe { request.wr.rdma.remote_addr };
    // SAFETY: the caller's request has a list of that many pieces, and it is of one or none.
    let piece = (request.num_sge > 0).then(|| unsafe { request.sg_list.read() });
    Posted {
        queue_pair,
        work: request.wr_id,
        flags: request.send_flags,
        opcode: request.opcode,
        remote,
        local: piece.as_ref().map_or(0, |piece| piece.addr),
        bytes: piece.as_ref().map_or(0, |piece| piece.length as usize),
        in_flight: true,
    }
}

unsafe extern "C" fn post_recv(
    pair: *mut ffi::ibv_qp,
    list: *mut ffi::ibv_recv_wr,
    _: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    let number = called("ibv_post_recv");
    // SAFETY: the caller's list is of one live request.
    let work = unsafe { (*list).wr_id };
    // SAFETY: as above.
    let pieces = unsafe { (*list).sg_list };
    // SAFETY: as above; there is a piece even where it is empty.
    let address = unsafe { (*pieces).addr };
    // SAFETY: the caller's queue pair is live.
    let queue_pair = unsafe { (*pair).qp_num };
    if number == 0 {
        state(|it| {
            it.receives.push((work, address));
            it.waiting.push_back((queue_pair, work, address));
        });
    }
    number
}

unsafe extern "C" fn poll_cq(
    queue: *mut ffi::ibv_cq,
    room: c_int,
    into: *mut ffi::ibv_wc,
) -> c_int {
    let number = called("ibv_poll_cq");
    if number != 0 {
        return number;
    }
    let queue = queue.addr();
    let mut taken = 0;
    while taken < room {
        let Some(next) = state(|it| it.completion_for(queue)) else { break };
        // SAFETY: the caller has room for `room` completions.
        let place = unsafe { into.add(taken as usize) };
        // SAFETY: as above.
        unsafe { place.write(next) };
        taken += 1;
    }
    taken
}
