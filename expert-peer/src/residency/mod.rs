//! Which records are in memory for clients to READ, and which are spilled: on disk alone.
//!
//! One thread, the [keeper](keeper::Keeper), owns the slots and moves records. What it shares with
//! the connections is a [`Residency`]: the [table](live::LiveTable) that says where records are and
//! who reads by it, the ledger of fetches, and the reports of damage. The [policy](policy) decides,
//! the [places](places::Places) are what is where.
//!
//! A move overwrites a slot of a region that stays registered. Before that a table goes out in which
//! the slot's old record is spilled, and the slot is left alone until every client has acknowledged
//! that table or `move_ack` has passed. A client that reads by an older table all the same gets
//! another record, or a mixture: its check refuses both, and it asks for a push.
//!
//! Everything is checked in its slot: what is loaded at the start (`rails/resident.rs`), what is
//! moved, and what is repaired. What is damaged, or was not read, is not published, but for a peer that
//! holds every record: it pushes none, so there the clients' own check is left to say what differs.

pub(crate) mod keeper;
pub(crate) mod live;
mod places;
mod policy;
pub(crate) mod profile;
mod repair;
mod reports;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use expert_tier::key::ExpertKey;
use expert_tier::record::{Mismatch, RecordCheck};
use expert_tier::store::manifest::Manifest;
use railset::message::{Damaged, Usage};
use railset::table::SPILLED;

use crate::ledger::Ledger;
use crate::status::{LayerResidency, ResidencyReport};
use live::LiveTable;
pub use profile::ProfileError;
use reports::Reports;

/// Holds bytes against the record that they should start with.
pub(crate) fn check(manifest: &Manifest, key: ExpertKey, bytes: &[u8]) -> Result<(), Mismatch> {
    // Every key is of the store; were one not, nothing would pass for it.
    let Ok(identity) = manifest.identity(key) else {
        return Err(Mismatch::Short { found: 0, expected: 0 });
    };
    let mut check = RecordCheck::new(identity);
    check.advance(bytes);
    check.finish()
}

/// How records move between disk and memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResidencyOptions {
    /// From one look at what was fetched to the next.
    pub interval: Duration,
    /// Most bytes per second that are read to bring records into memory; 0 for none.
    pub promote_bytes_per_s: u64,
    /// Longest wait for clients to follow a new table before slots are overwritten.
    pub move_ack: Duration,
}

impl Default for ResidencyOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            promote_bytes_per_s: 256 << 20,
            move_ack: Duration::from_millis(500),
        }
    }
}

/// What connections need to know of residency, and what they have to say.
pub(crate) struct Residency {
    ledger: Arc<Ledger>,
    live: Arc<LiveTable>,
    reports: Reports,
    promotions: AtomicU64,
    demotions: AtomicU64,
}

impl Residency {
    /// Whether a record is in memory, as far as clients are told; its layer by the position in the
    /// store.
    pub(crate) fn holds(&self, layer_at: usize, expert: u32) -> bool {
        let table = self.live.table();
        let slot = table.layers().get(layer_at).and_then(|it| it.slots.get(expert as usize));
        slot.is_some_and(|slot| *slot != SPILLED)
    }

    /// The table that clients read by.
    pub(crate) fn live(&self) -> &Arc<LiveTable> {
        &self.live
    }

    /// A client says what it has read. What is not in the store is nobody's.
    pub(crate) fn used(&self, usage: &Usage) {
        for entry in &usage.entries {
            self.ledger.fetched(ExpertKey::new(entry.layer, entry.expert), entry.reads);
        }
    }

    /// A client got other bytes than a record's; the keeper looks at the peer's own copies.
    pub(crate) fn damaged(&self, damaged: Damaged) {
        let key = ExpertKey::new(damaged.layer, damaged.expert);
        if self.ledger.number(key).is_some() {
            self.reports.report(key);
        }
    }

    /// What a status says of it.
    pub(crate) fn report(&self) -> ResidencyReport {
        let table = self.live.table();
        let layer = |layer: &railset::table::LayerTable| LayerResidency {
            layer: layer.layer,
            resident: layer.slots.iter().filter(|slot| **slot != SPILLED).count() as u64,
            experts: layer.slots.len() as u64,
        };
        let layers: Vec<LayerResidency> = table.layers().iter().map(layer).collect();
        let resident_records = layers.iter().map(|layer| layer.resident).sum();
        let records: u64 = layers.iter().map(|layer| layer.experts).sum();
        ResidencyReport {
            resident_records,
            spilled_records: records - resident_records,
            table_generation: table.generation(),
            promotions: self.promotions.load(Ordering::Relaxed),
            demotions: self.demotions.load(Ordering::Relaxed),
            withdrawn: self.ledger.withdrawn() as u64,
            residency: layers,
        }
    }
}
