//! How a work request ended.

use std::ffi::c_uint;
use std::fmt;

use super::ffi::ibv_wc_status as status;

macro_rules! statuses {
    ($($(#[$doc:meta])* $variant:ident = $constant:ident, $text:literal;)*) => {
        /// `enum ibv_wc_status`: how a work request ended.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum WorkStatus {
            $($(#[$doc])* $variant,)*
            /// A status that this version does not know.
            Unknown(u32),
        }

        impl WorkStatus {
            pub(super) fn from_raw(raw: c_uint) -> Self {
                match raw {
                    $(status::$constant => Self::$variant,)*
                    other => Self::Unknown(other),
                }
            }
        }

        impl fmt::Display for WorkStatus {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str(concat!($text, " (", stringify!($constant), ")")),)*
                    Self::Unknown(raw) => write!(f, "completion status {raw}"),
                }
            }
        }
    };
}

statuses! {
    /// It was done.
    Success = IBV_WC_SUCCESS, "success";
    /// A receive buffer was too short, or a request too long.
    LocalLength = IBV_WC_LOC_LEN_ERR, "local length error";
    /// The request does not fit the queue pair.
    LocalQueuePair = IBV_WC_LOC_QP_OP_ERR, "local queue pair operation error";
    /// Of end-to-end contexts, which are not used.
    LocalEec = IBV_WC_LOC_EEC_OP_ERR, "local end-to-end context operation error";
    /// The request names memory that its key does not cover.
    LocalProtection = IBV_WC_LOC_PROT_ERR, "local protection error";
    /// The queue pair was in error; whether the request was carried out is not known.
    Flushed = IBV_WC_WR_FLUSH_ERR, "flushed from a queue pair in error";
    /// Of memory windows, which are not used.
    WindowBind = IBV_WC_MW_BIND_ERR, "memory window bind error";
    /// The responder sent what it should not.
    BadResponse = IBV_WC_BAD_RESP_ERR, "bad response";
    /// A remote write was not allowed here.
    LocalAccess = IBV_WC_LOC_ACCESS_ERR, "local access error";
    /// The responder does not know such a request.
    RemoteInvalidRequest = IBV_WC_REM_INV_REQ_ERR, "remote invalid request";
    /// The remote key is stale, or does not allow this at that address.
    RemoteAccess = IBV_WC_REM_ACCESS_ERR, "remote access error";
    /// The responder failed.
    RemoteOperation = IBV_WC_REM_OP_ERR, "remote operation error";
    /// No answer in all attempts: the peer, its queue pair or the path is gone.
    RetriesExceeded = IBV_WC_RETRY_EXC_ERR, "no answer after all retries";
    /// The responder had no receive posted in all attempts.
    RnrRetriesExceeded = IBV_WC_RNR_RETRY_EXC_ERR, "the receiver was not ready after all retries";
    /// Of reliable datagrams, which are not used.
    LocalRddViolation = IBV_WC_LOC_RDD_VIOL_ERR, "local reliable datagram domain violation";
    /// Of reliable datagrams, which are not used.
    RemoteInvalidRdRequest = IBV_WC_REM_INV_RD_REQ_ERR, "remote invalid reliable datagram request";
    /// The responder gave up.
    RemoteAborted = IBV_WC_REM_ABORT_ERR, "remote aborted";
    /// Of end-to-end contexts, which are not used.
    InvalidEecNumber = IBV_WC_INV_EECN_ERR, "invalid end-to-end context number";
    /// Of end-to-end contexts, which are not used.
    InvalidEecState = IBV_WC_INV_EEC_STATE_ERR, "invalid end-to-end context state";
    /// The device broke down.
    Fatal = IBV_WC_FATAL_ERR, "fatal device error";
    /// The answer came too late.
    ResponseTimeout = IBV_WC_RESP_TIMEOUT_ERR, "response timeout";
    /// None of the others.
    General = IBV_WC_GENERAL_ERR, "general error";
}

/// A work request that failed.
///
/// The queue pair is in error from then on: what was posted behind it comes back as
/// [`WorkStatus::Flushed`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{status}, vendor error {vendor_err:#x}")]
pub struct WorkError {
    /// How it ended; not [`WorkStatus::Success`].
    pub status: WorkStatus,
    /// The vendor's own number.
    pub vendor_err: u32,
}

impl WorkError {
    /// Whether the same request may work over another queue pair, or over this path later. A
    /// request that was wrong, or whose remote key is stale, fails again wherever it is posted.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self.status,
            WorkStatus::Flushed
                | WorkStatus::RetriesExceeded
                | WorkStatus::RnrRetriesExceeded
                | WorkStatus::ResponseTimeout
                | WorkStatus::RemoteAborted
        )
    }
}
