//! What pushes have come to, for the status and for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{counter, gauge};
use railset::push::PushStatus;

/// Counts of every lane together.
#[derive(Default)]
pub(crate) struct PushStats {
    pushes: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    queue: AtomicU64,
    lanes: AtomicU64,
}

/// The counts at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PushCounts {
    /// Requests that were answered with their bytes.
    pub(crate) pushes: u64,
    /// Those bytes.
    pub(crate) bytes: u64,
    /// Requests that were answered with an error, reads that failed, and lanes that broke.
    pub(crate) errors: u64,
    /// Requests waiting or under way.
    pub(crate) queue: u64,
    /// Queue pairs for pushes.
    pub(crate) lanes: u64,
}

impl PushStats {
    pub(crate) fn counts(&self) -> PushCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PushCounts {
            pushes: read(&self.pushes),
            bytes: read(&self.bytes),
            errors: read(&self.errors),
            queue: read(&self.queue),
            lanes: read(&self.lanes),
        }
    }

    /// A receipt has reached its client.
    pub(super) fn ended(&self, status: PushStatus, bytes: u32) {
        counter!("metrale_peer_pushes_total", "status" => status.name()).increment(1);
        if super::engine::is_error(status) {
            self.errors.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.pushes.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes.into(), Ordering::Relaxed);
        counter!("metrale_peer_push_bytes_total").increment(bytes.into());
    }

    pub(super) fn unreadable(&self) {
        counter!("metrale_peer_push_read_errors_total").increment(1);
    }

    pub(super) fn lane_broke(&self) {
        counter!("metrale_peer_push_lanes_broken_total").increment(1);
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lane_came(&self) {
        let lanes = self.lanes.fetch_add(1, Ordering::Relaxed) + 1;
        gauge!("metrale_peer_push_lanes").set(lanes as f64);
    }

    pub(super) fn lane_gone(&self) {
        let lanes = self.lanes.fetch_sub(1, Ordering::Relaxed) - 1;
        gauge!("metrale_peer_push_lanes").set(lanes as f64);
    }

    pub(super) fn queued(&self, requests: usize) {
        let requests = requests as u64;
        if self.queue.swap(requests, Ordering::Relaxed) != requests {
            gauge!("metrale_peer_push_queue").set(requests as f64);
        }
    }
}
