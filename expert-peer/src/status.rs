//! What a peer says of itself, over its own protocol, to whoever may connect.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// A peer's description of itself; `metrale peer status --json` prints it.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct StatusReport {
    /// The peer's version.
    pub version: String,
    /// The store's fingerprint.
    pub fingerprint: String,
    /// The checkpoint's `model_type`.
    pub model: String,
    /// MoE layers in the store.
    pub layers: u64,
    /// Records in the store.
    pub records: u64,
    /// Whether the peer is shutting down.
    pub draining: bool,
    /// Clients that have attached.
    pub clients: u64,
    /// Most clients allowed.
    pub max_clients: u64,
    /// Connections, attached or not.
    pub connections: u64,
    /// Requests answered with a record.
    pub served: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Connections that were refused or broke the protocol.
    pub refused: u64,
    /// Bytes of records sent.
    pub bytes: u64,
    /// Seconds since the peer began to listen.
    pub uptime_s: f64,
    /// Processor time of the peer's process, user and system, in seconds.
    pub cpu_s: f64,
    /// Resident memory of the peer's process, in bytes.
    pub rss_bytes: u64,
    /// Rails that are offered to clients.
    pub rails: Vec<String>,
    /// Bytes of memory that hold the records that clients can READ.
    pub resident_bytes: u64,
    /// Which those are; in JSON its fields are among the others.
    #[serde(flatten)]
    pub residency: ResidencyReport,
    /// Queue pairs of clients.
    pub queue_pairs: u64,
    /// Work requests posted and completion queues looked at by this process: none for a READ.
    pub verbs_calls: u64,
    /// How spilled records are sent.
    #[serde(flatten)]
    pub pushes: PushReport,
}

/// How a peer sends the records that are not in its memory, and what has come of it.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct PushReport {
    /// Requests for spilled records that got their bytes.
    pub pushes: u64,
    /// Those bytes.
    pub pushed_bytes: u64,
    /// Requests for spilled records that got an error, and clients whose pushes broke down.
    pub push_errors: u64,
    /// Requests for spilled records that wait or are under way.
    pub push_queue: u64,
    /// Queue pairs of clients for spilled records; they are among `queue_pairs`.
    pub push_lanes: u64,
    /// Where spilled records are read from: `direct`, `mmap`, `buffered`, or `none` where none are.
    pub spill_source: String,
    /// How they come to clients: `push`, `stage`, or `none`.
    pub spill_transfer: String,
}

impl Default for PushReport {
    fn default() -> Self {
        Self {
            pushes: 0,
            pushed_bytes: 0,
            push_errors: 0,
            push_queue: 0,
            push_lanes: 0,
            spill_source: "none".into(),
            spill_transfer: "none".into(),
        }
    }
}

/// What is in a peer's memory, and what has moved. All zeros without rails.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ResidencyReport {
    /// Records that clients can READ.
    pub resident_records: u64,
    /// Records that are on disk alone and pushed when they are asked for.
    pub spilled_records: u64,
    /// Generation of the table that says which.
    pub table_generation: u64,
    /// Records that were brought into memory since the start.
    pub promotions: u64,
    /// Records that were taken out of memory since the start.
    pub demotions: u64,
    /// Records whose copy on disk is damaged.
    pub withdrawn: u64,
    /// The layers, in the store's order.
    pub residency: Vec<LayerResidency>,
}

/// How much of a layer is in a peer's memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct LayerResidency {
    /// The model's number of the layer.
    pub layer: u32,
    /// Experts that clients can READ.
    pub resident: u64,
    /// Experts of the layer.
    pub experts: u64,
}

/// The peer's own counters, beside those of the `metrics` crate: a status must not depend on an
/// exporter being installed.
pub(crate) struct Tally {
    pub(crate) started: Instant,
    pub(crate) served: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) queue_pairs: AtomicU64,
}

impl Tally {
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            started: Instant::now(),
            served: zero(),
            errors: zero(),
            refused: zero(),
            bytes: zero(),
            queue_pairs: zero(),
        }
    }

    pub(crate) fn read(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }
}
