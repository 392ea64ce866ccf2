//! What a peer says of itself.

#[cfg(metrale_rdma_verbs)]
use std::sync::Arc;

use super::Shared;
#[cfg(metrale_rdma_verbs)]
use crate::push::SpillWish;
#[cfg(metrale_rdma_verbs)]
use crate::rails::Published;
use crate::status::{PushReport, ResidencyReport, StatusReport, Tally};

impl Shared {
    pub(crate) fn status(&self) -> StatusReport {
        let (clients, connections) = self.registry.counts();
        let manifest = self.store.manifest();
        let pushes = self.pushes();
        StatusReport {
            version: env!("CARGO_PKG_VERSION").into(),
            fingerprint: manifest.fingerprint().to_string(),
            model: manifest.model().into(),
            layers: manifest.layout().layers().len() as u64,
            records: manifest.layout().records(),
            draining: self.shutdown.begun(),
            clients: clients as u64,
            max_clients: u64::from(self.options.max_clients),
            connections: connections as u64,
            served: Tally::read(&self.tally.served),
            errors: Tally::read(&self.tally.errors),
            refused: Tally::read(&self.tally.refused),
            bytes: Tally::read(&self.tally.bytes),
            uptime_s: self.tally.started.elapsed().as_secs_f64(),
            cpu_s: gpu_sys::usage::cpu_time().as_secs_f64(),
            rss_bytes: gpu_sys::usage::resident_bytes(),
            rails: self.rails(),
            resident_bytes: self.region_bytes(),
            residency: self.residency(),
            queue_pairs: Tally::read(&self.tally.queue_pairs) + pushes.push_lanes,
            verbs_calls: verbs_calls(),
            pushes,
        }
    }

    #[cfg(metrale_rdma_verbs)]
    fn pushes(&self) -> PushReport {
        let published = self.published.as_ref();
        let Some(((source, transfer), counts)) = published.and_then(|it| it.pushes()) else {
            // TCP reads by it, where it was named.
            let spill_source = match self.options.push.source {
                SpillWish::Direct => "direct".into(),
                SpillWish::Auto | SpillWish::Mmap => PushReport::default().spill_source,
            };
            return PushReport { spill_source, ..PushReport::default() };
        };
        PushReport {
            pushes: counts.pushes,
            pushed_bytes: counts.bytes,
            push_errors: counts.errors,
            push_queue: counts.queue,
            push_lanes: counts.lanes,
            spill_source: source.into(),
            spill_transfer: transfer.into(),
        }
    }

    #[cfg(not(metrale_rdma_verbs))]
    fn pushes(&self) -> PushReport {
        PushReport::default()
    }

    #[cfg(metrale_rdma_verbs)]
    fn rails(&self) -> Vec<String> {
        self.published.as_ref().map_or_else(Vec::new, |published| published.rail_names())
    }

    #[cfg(not(metrale_rdma_verbs))]
    fn rails(&self) -> Vec<String> {
        Vec::new()
    }

    /// Bytes of memory that hold records.
    #[cfg(metrale_rdma_verbs)]
    fn region_bytes(&self) -> u64 {
        self.published.as_ref().map_or(0, |published| published.region_bytes())
    }

    #[cfg(not(metrale_rdma_verbs))]
    fn region_bytes(&self) -> u64 {
        0
    }

    #[cfg(metrale_rdma_verbs)]
    fn residency(&self) -> ResidencyReport {
        let report = |published: &Arc<Published>| published.residency().report();
        self.published.as_ref().map_or_else(ResidencyReport::default, report)
    }

    #[cfg(not(metrale_rdma_verbs))]
    fn residency(&self) -> ResidencyReport {
        ResidencyReport::default()
    }
}

#[cfg(metrale_rdma_verbs)]
fn verbs_calls() -> u64 {
    gpu_sys::verbs::calls()
}

#[cfg(not(metrale_rdma_verbs))]
fn verbs_calls() -> u64 {
    0
}
