//! Why a fetch failed, and what comes back with the failure.

use std::fmt;
use std::time::Duration;

use gpu_sys::env;
#[cfg(metrale_rdma_verbs)]
use gpu_sys::limits::Bytes;

use crate::arena::{Free, Slot, TooSmall};
use crate::key::ExpertKey;
use crate::layout::KeyError;
use crate::record::Mismatch;
use crate::store::StoreError;
use crate::tier::TierKind;
use crate::wire::frame::Status;

/// What bounds a request's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// The time in which nothing comes: a backend that is silent.
    Due,
    /// The time from asking for the record's first byte to its end.
    Total,
}

impl Bound {
    /// The setting that it comes from.
    #[must_use]
    pub fn setting(self) -> &'static str {
        match self {
            Self::Due => env::EXPERT_DEADLINE_MS.name,
            Self::Total => env::EXPERT_TOTAL_MS.name,
        }
    }
}

/// Why a record did not come.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The store has no such record.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The slot that came with the request cannot hold the record.
    #[error("{key} needs a slot of {needed} bytes, this one has {capacity}")]
    SlotTooSmall {
        /// The record.
        key: ExpertKey,
        /// Bytes of the record.
        needed: u64,
        /// Bytes of the slot.
        capacity: u64,
    },
    /// The bytes that arrived are not the record, on every attempt.
    #[error("{key} by {backend} from {origin}: {mismatch}")]
    Mismatch {
        /// The record.
        key: ExpertKey,
        /// The backend.
        backend: TierKind,
        /// The peer's address or the store's directory.
        origin: String,
        /// How they differ.
        mismatch: Mismatch,
    },
    /// The record came and was not checked, as the request's slot asked for: for measurements.
    #[cfg(feature = "unverified")]
    #[error("{key}: received and not checked")]
    Unchecked {
        /// The record.
        key: ExpertKey,
    },
    /// The local store could not be read.
    #[error(transparent)]
    Store(StoreError),
    /// The peer answered this request with an error.
    #[error("{key} from {peer}: {} ({text})", status.name())]
    Peer {
        /// The record.
        key: ExpertKey,
        /// The peer's address.
        peer: String,
        /// Why, for programs.
        status: Status,
        /// Why, for people.
        text: String,
    },
    /// A bound passed.
    #[error(
        "{key} by {backend}: no record {} {} ms; {} bounds this",
        match bound { Bound::Due => "for", Bound::Total => "within" },
        waited.as_millis(), bound.setting()
    )]
    Deadline {
        /// The record.
        key: ExpertKey,
        /// The backend.
        backend: TierKind,
        /// How long nothing came, or how long ago the record was asked for, as the bound counts.
        waited: Duration,
        /// Which bound it was.
        bound: Bound,
    },
    /// The peer does not hold the record in memory, so it cannot be read.
    #[error(
        "{key} from {peer}: not in the peer's memory, and the peer sends nothing over RDMA from its disk; \
         --expert-backend rdma reaches it over TCP"
    )]
    NotResident {
        /// The record.
        key: ExpertKey,
        /// The peer's address.
        peer: String,
    },
    /// The slot's arena cannot be registered with a device.
    #[cfg(metrale_rdma_verbs)]
    #[error("{key}: the arena cannot be registered: {source}")]
    Register {
        /// The record.
        key: ExpertKey,
        /// Why not.
        source: std::sync::Arc<gpu_sys::verbs::VerbsError>,
    },
    /// A part of the slot cannot be registered for the peer to write, also while nothing else is.
    #[cfg(metrale_rdma_verbs)]
    #[error("{key}: a grant of {} for the peer to write: {source}", Bytes(*bytes))]
    Grant {
        /// The record.
        key: ExpertKey,
        /// Bytes of the part.
        bytes: u64,
        /// Why not.
        source: Box<gpu_sys::verbs::VerbsError>,
    },
    /// There is no connection to the peer, or it broke on every attempt.
    #[error("{key} from {peer}: {reason} (attempts: {attempts})")]
    Unreachable {
        /// The record.
        key: ExpertKey,
        /// The peer's address.
        peer: String,
        /// The last connection's end.
        reason: String,
        /// How often the request was sent.
        attempts: u32,
    },
    /// None of several ways to the record brought it.
    #[error("{key}: no way brought it: {}", one_line(tried))]
    Ways {
        /// The record.
        key: ExpertKey,
        /// Every way, in the order in which they are tried.
        tried: Vec<TriedWay>,
    },
    /// The caller cancelled the request.
    #[error("{key}: cancelled")]
    Cancelled {
        /// The record.
        key: ExpertKey,
    },
    /// The backend was closed with the request in it.
    #[error("{key}: the {backend} backend was closed")]
    Closed {
        /// The record.
        key: ExpertKey,
        /// The backend.
        backend: TierKind,
    },
}

/// What became of a request by one of several ways.
#[derive(Debug)]
pub struct TriedWay {
    /// The backend.
    pub backend: TierKind,
    /// How the request ended there.
    pub end: WayEnd,
}

/// How a request ended by one of several ways.
#[derive(Debug)]
pub enum WayEnd {
    /// It failed.
    Failed(Box<FetchError>),
    /// It was not tried, for what had become of others, or because the way could not be opened.
    PassedBy(String),
}

impl fmt::Display for TriedWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            WayEnd::Failed(error) => write!(f, "{} failed ({error})", self.backend),
            WayEnd::PassedBy(why) => write!(f, "{} was passed by ({why})", self.backend),
        }
    }
}

fn one_line(tried: &[TriedWay]) -> String {
    let ways: Vec<_> = tried.iter().map(TriedWay::to_string).collect();
    ways.join("; ")
}

impl FetchError {
    /// Where several ways were tried, the error of each; else this one.
    pub fn of_each_way(&self) -> impl Iterator<Item = &Self> {
        let (tried, alone) = match self {
            Self::Ways { tried, .. } => (tried.as_slice(), None),
            alone => (&[][..], Some(alone)),
        };
        let failed = tried.iter().filter_map(|way| match &way.end {
            WayEnd::Failed(error) => Some(&**error),
            WayEnd::PassedBy(_) => None,
        });
        alone.into_iter().chain(failed)
    }

    /// Whether the same request may succeed later without anybody changing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Deadline { .. } | Self::Unreachable { .. } => true,
            Self::Ways { tried, .. } => tried.iter().any(|way| match &way.end {
                WayEnd::Failed(error) => error.is_transient(),
                WayEnd::PassedBy(_) => true,
            }),
            Self::Peer { status, .. } => matches!(status, Status::Busy | Status::Draining),
            #[cfg(feature = "unverified")]
            Self::Unchecked { .. } => false,
            #[cfg(metrale_rdma_verbs)]
            Self::Register { source, .. } => source.is_transient(),
            #[cfg(metrale_rdma_verbs)]
            Self::Grant { source, .. } => source.is_transient(),
            Self::Key(_)
            | Self::NotResident { .. }
            | Self::SlotTooSmall { .. }
            | Self::Mismatch { .. }
            | Self::Store(_)
            | Self::Cancelled { .. }
            | Self::Closed { .. } => false,
        }
    }

    /// The value of the label `outcome` in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Key(_) => "no_such_key",
            Self::SlotTooSmall { .. } => "slot_too_small",
            Self::Mismatch { .. } => "mismatch",
            #[cfg(feature = "unverified")]
            Self::Unchecked { .. } => "unchecked",
            Self::Store(_) => "store",
            Self::Peer { status, .. } => status.name(),
            Self::Deadline { .. } => "deadline",
            Self::Unreachable { .. } => "unreachable",
            Self::NotResident { .. } => "not_resident",
            #[cfg(metrale_rdma_verbs)]
            Self::Register { .. } => "register",
            #[cfg(metrale_rdma_verbs)]
            Self::Grant { .. } => "grant",
            Self::Ways { .. } => "every_way",
            Self::Cancelled { .. } => "cancelled",
            Self::Closed { .. } => "closed",
        }
    }
}

/// A failed fetch: why, and the slot, free again.
pub struct FetchFailure {
    /// Why the record did not come; boxed, so that a success is not moved around in its size.
    pub error: Box<FetchError>,
    /// The request's slot; `None` where somebody may still write into it.
    pub slot: Option<Slot<Free>>,
}

impl FetchFailure {
    /// A failure that gives its slot back.
    #[must_use]
    pub fn new(error: impl Into<FetchError>, slot: Slot<Free>) -> Self {
        Self { error: Box::new(error.into()), slot: Some(slot) }
    }

    /// The failure of a record that does not fit.
    #[must_use]
    pub fn too_small(key: ExpertKey, refused: TooSmall) -> Self {
        let TooSmall { slot, needed_bytes: needed } = refused;
        let capacity = slot.capacity();
        Self::new(FetchError::SlotTooSmall { key, needed, capacity }, slot)
    }
}

/// For whoever asked for a record and takes nothing else.
#[cfg(feature = "unverified")]
impl From<crate::arena::Unchecked> for FetchFailure {
    fn from(unchecked: crate::arena::Unchecked) -> Self {
        Self::new(FetchError::Unchecked { key: unchecked.key() }, unchecked.into_slot())
    }
}

impl fmt::Debug for FetchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FetchFailure")
            .field("error", &self.error)
            .field("slot", &self.slot.is_some())
            .finish()
    }
}

impl fmt::Display for FetchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl std::error::Error for FetchFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}
