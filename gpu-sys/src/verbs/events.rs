//! Events of a device that belong to no completion queue.

use std::ffi::{c_int, c_uint};
use std::io;
use std::ptr::NonNull;

use super::error::VerbsError;
use super::ffi::{self, Table, Zeroed, event};

/// What happened to a device, one of its ports or queues (`ibv_get_async_event(3)`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncEvent {
    /// A port became active.
    PortActive {
        /// Its number.
        port: u8,
    },
    /// A port lost its link.
    PortError {
        /// Its number.
        port: u8,
    },
    /// A port's GID table changed.
    GidChange {
        /// The port's number.
        port: u8,
    },
    /// A port's LID changed, or its subnet manager asks for everything anew: paths made before may
    /// not hold.
    LidChange {
        /// The port's number.
        port: u8,
    },
    /// The device broke down: everything on it is lost until it has been reset.
    DeviceFatal,
    /// A queue pair went into error.
    QueuePairFatal {
        /// Its number.
        queue_pair: u32,
    },
    /// A completion queue overflowed, and what it had is lost.
    CompletionQueueError,
    /// Another event of a queue pair.
    QueuePairOther {
        /// Its number.
        queue_pair: u32,
        /// The event's number in `enum ibv_event_type`.
        event: u32,
    },
    /// Something that needs no answer from here.
    Other {
        /// The event's number in `enum ibv_event_type`.
        event: u32,
    },
}

pub(super) fn next(
    table: &Table,
    context: NonNull<ffi::ibv_context>,
    device: &str,
) -> Result<Option<AsyncEvent>, VerbsError> {
    let mut raw = ffi::AsyncEvent::zeroed();
    // SAFETY: the device is open, its descriptor does not block, and the pointer is to a live local.
    let status = unsafe { (table.async_event)(context.as_ptr(), &raw mut raw) };
    if status != 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(VerbsError::Call {
                call: "ibv_get_async_event",
                on: device.to_owned(),
                source: error,
            }),
        };
    }
    let event = decode(&raw);
    // SAFETY: the event was taken above and is acknowledged once; nothing refers to it any more.
    unsafe { (table.ack_async_event)(&raw mut raw) };
    Ok(Some(event))
}

fn decode(raw: &ffi::AsyncEvent) -> AsyncEvent {
    match raw.event_type {
        event::PORT_ACTIVE => AsyncEvent::PortActive { port: port(raw) },
        event::PORT_ERR => AsyncEvent::PortError { port: port(raw) },
        event::GID_CHANGE => AsyncEvent::GidChange { port: port(raw) },
        event::LID_CHANGE | event::CLIENT_REREGISTER | event::SM_CHANGE | event::PKEY_CHANGE => {
            AsyncEvent::LidChange { port: port(raw) }
        }
        event::DEVICE_FATAL => AsyncEvent::DeviceFatal,
        event::CQ_ERR => AsyncEvent::CompletionQueueError,
        event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR => {
            AsyncEvent::QueuePairFatal { queue_pair: queue_pair(raw) }
        }
        kind @ (event::COMM_EST
        | event::SQ_DRAINED
        | event::PATH_MIG
        | event::PATH_MIG_ERR
        | event::QP_LAST_WQE_REACHED) => {
            AsyncEvent::QueuePairOther { queue_pair: queue_pair(raw), event: kind }
        }
        kind => AsyncEvent::Other { event: kind },
    }
}

fn port(raw: &ffi::AsyncEvent) -> u8 {
    // SAFETY: the member is a number, and any bytes are one.
    let number: c_int = unsafe { raw.element.port_num };
    u8::try_from(number).unwrap_or(0)
}

fn queue_pair(raw: &ffi::AsyncEvent) -> c_uint {
    // SAFETY: for an event of a queue pair this member is set.
    let pointer = unsafe { raw.element.qp };
    if pointer.is_null() {
        return 0;
    }
    // SAFETY: the queue pair is alive: destroying it waits until this event was acknowledged
    // (ibv_get_async_event(3)), which comes after.
    unsafe { (*pointer).qp_num }
}
