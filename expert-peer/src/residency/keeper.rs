//! The thread that owns the slots: it counts, decides, and gives slots other contents.
//!
//! Work is done in rounds. A round looks at the records that clients got damaged, repairs what it
//! finds, and then moves what the policy says, all moves of a round with two tables: one without the
//! records that go, one with those that came.
//!
//! A record that cannot be read into memory is left alone for [`LOOK_AGAIN`]; meanwhile the slot that
//! it was to have is another's.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use expert_tier::key::ExpertKey;
use expert_tier::record::Mismatch;
use expert_tier::store::manifest::Manifest;
use expert_tier::store::{ExpertStore, StoreError};
use gpu_sys::slots::PinnedSlot;
use metrics::{counter, gauge};
use railset::table::{Column, TableError};

use super::live::LiveTable;
use super::places::Places;
use super::policy::{Move, Policy};
use super::reports::Reports;
use super::{Residency, ResidencyOptions, check};
use crate::ledger::Ledger;
use crate::seldom::Seldom;

/// Records that are looked at for damage, per second and at once: each costs a read of its own.
const CHECKS_PER_S: f64 = 8.0;
/// A record that was looked at is not looked at again for so long, whatever clients say; and one that
/// could not be read is not read again.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// The generation of the first table.
const FIRST_GENERATION: u64 = 1;

/// What a keeper begins with: slots that are filled as far as there are records, and registered.
pub(crate) struct Start {
    pub(crate) slots: Vec<PinnedSlot>,
    pub(crate) slot_bytes: u64,
    /// The record in each slot, by its number; `None` where there is none that may be published.
    pub(crate) records: Vec<Option<usize>>,
    /// Where clients find the slots, by rail.
    pub(crate) columns: Vec<Column>,
}

/// Moves records between disk and memory.
pub(crate) struct Keeper {
    pub(super) shared: Arc<Residency>,
    pub(super) manifest: Arc<Manifest>,
    options: ResidencyOptions,
    /// The records' names, by their numbers.
    pub(super) keys: Vec<ExpertKey>,
    pub(super) slots: Vec<PinnedSlot>,
    slot_bytes: u64,
    columns: Vec<Column>,
    pub(super) places: Places,
    policy: Policy,
    /// Time of all rounds so far.
    pub(super) clock: Duration,
    /// Records that may be looked at for damage now.
    pub(super) checks: f64,
    /// When records were looked at for damage.
    pub(super) looked_at: HashMap<usize, Duration>,
    /// When records could not be read into memory.
    pub(super) unread: HashMap<usize, Duration>,
    unreads: Seldom,
    /// Moves that did not wait for every client.
    late: Seldom,
}

/// Ends a keeper's thread when dropped; it may have a round under way, and ends after it.
pub(crate) struct KeeperThread {
    stop: Arc<AtomicBool>,
    thread: Thread,
}

impl Drop for KeeperThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

impl Keeper {
    /// The keeper, and what connections need of it.
    pub(crate) fn new(
        manifest: &Arc<Manifest>,
        ledger: Arc<Ledger>,
        start: Start,
        options: ResidencyOptions,
    ) -> Result<(Arc<Residency>, Self), TableError> {
        let layout = manifest.layout();
        let Start { slots, slot_bytes, records, columns } = start;
        let keys: Vec<ExpertKey> = layout.keys().collect();
        let mut places = Places::new(keys.len(), slots.len());
        let filled = (0..).zip(records).filter_map(|(slot, record)| Some((record?, slot)));
        filled.for_each(|(record, slot)| places.put(record, slot));
        let table = places.describe(layout, &columns, slot_bytes, FIRST_GENERATION)?;
        let record_bytes = |key: &ExpertKey| layout.locate(*key).map_or(0, |it| it.record_bytes());
        let sizes = keys.iter().map(record_bytes).collect();
        let shared = Arc::new(Residency {
            ledger,
            live: Arc::new(LiveTable::new(table)),
            reports: Reports::default(),
            promotions: AtomicU64::new(0),
            demotions: AtomicU64::new(0),
        });
        let keeper = Self {
            shared: Arc::clone(&shared),
            manifest: Arc::clone(manifest),
            options,
            keys,
            slots,
            slot_bytes,
            columns,
            places,
            policy: Policy::new(sizes, options.promote_bytes_per_s),
            clock: Duration::ZERO,
            checks: CHECKS_PER_S,
            looked_at: HashMap::new(),
            unread: HashMap::new(),
            unreads: Seldom::default(),
            late: Seldom::default(),
        };
        Ok((shared, keeper))
    }

    /// Starts the thread.
    pub(crate) fn spawn(mut self, store: Arc<ExpertStore>) -> std::io::Result<KeeperThread> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let run = move || self.run(&store, &|| stopped.load(Ordering::Relaxed));
        let handle = std::thread::Builder::new().name("residency".into()).spawn(run)?;
        Ok(KeeperThread { stop, thread: handle.thread().clone() })
    }

    /// A round per interval, until `stopped`.
    fn run(&mut self, store: &ExpertStore, stopped: &impl Fn() -> bool) {
        let mut last = Instant::now();
        while !stopped() {
            std::thread::park_timeout(self.options.interval.saturating_sub(last.elapsed()));
            let elapsed = last.elapsed();
            if elapsed < self.options.interval {
                continue;
            }
            last = Instant::now();
            if let Err(error) = self.round(store, elapsed, stopped) {
                tracing::error!(%error, "no table of what is in memory; nothing moves any more");
                return;
            }
        }
    }

    /// One round, `elapsed` after the last.
    fn round(
        &mut self,
        store: &ExpertStore,
        elapsed: Duration,
        stopped: &impl Fn() -> bool,
    ) -> Result<(), TableError> {
        self.clock += elapsed;
        self.checks = (self.checks + elapsed.as_secs_f64() * CHECKS_PER_S).min(CHECKS_PER_S);
        let repairs = self.look_at_reports(store);
        self.carry_out(store, &repairs, stopped)?;
        let ledger = Arc::clone(&self.shared.ledger);
        self.policy.observe(elapsed, |record| ledger.take_fetches(record));
        // A withdrawn one has no sound copy on disk: it cannot come, and must not go.
        let (now, unread) = (self.clock, &mut self.unread);
        unread.retain(|_, then| now.saturating_sub(*then) < LOOK_AGAIN);
        let may_move = |record| !ledger.has_withdrawn(record) && !unread.contains_key(&record);
        let moves = self.policy.choose(&self.places, &may_move);
        self.carry_out(store, &moves, stopped)?;
        gauge!("metrale_peer_resident_records").set(self.places.resident().count() as f64);
        gauge!("metrale_peer_withdrawn_records").set(ledger.withdrawn() as f64);
        Ok(())
    }

    /// Empties slots and fills them.
    fn carry_out(
        &mut self,
        store: &ExpertStore,
        moves: &[Move],
        stopped: &impl Fn() -> bool,
    ) -> Result<(), TableError> {
        let gone: Vec<usize> = moves.iter().filter_map(|it| it.out).collect();
        if !gone.is_empty() {
            gone.iter().for_each(|&record| self.places.spill(record));
            let generation = self.publish()?;
            self.shared.demotions.fetch_add(gone.len() as u64, Ordering::Relaxed);
            counter!("metrale_peer_demotions_total").increment(gone.len() as u64);
            let behind = self.shared.live.wait_acknowledged(generation, self.options.move_ack);
            // One that never follows would say so with every move.
            if behind > 0
                && let Some(so_far) = self.late.once_more()
            {
                tracing::info!(
                    clients = behind,
                    generation,
                    so_far,
                    move_ack_ms = self.options.move_ack.as_millis(),
                    "clients have not acknowledged a table in time; they may fetch records anew"
                );
            }
        }
        let mut came = 0;
        for Move { slot, into, .. } in moves {
            let Some(record) = *into else { continue };
            if !stopped() && self.bring(store, record, *slot) {
                self.places.put(record, *slot);
                came += 1;
            }
        }
        if came > 0 {
            let generation = self.publish()?;
            self.shared.promotions.fetch_add(came, Ordering::Relaxed);
            counter!("metrale_peer_promotions_total").increment(came);
            tracing::debug!(gone = gone.len(), came, generation, "records moved");
        }
        Ok(())
    }

    /// Makes what is where the current table, and says its generation.
    fn publish(&self) -> Result<u64, TableError> {
        let generation = self.shared.live.generation() + 1;
        let layout = self.manifest.layout();
        let table = self.places.describe(layout, &self.columns, self.slot_bytes, generation)?;
        self.shared.live.publish(table);
        Ok(generation)
    }

    /// Reads a record into a slot that no current table names, and checks it there. Where that fails
    /// the slot stays free.
    fn bring(&mut self, store: &ExpertStore, record: usize, slot: u32) -> bool {
        let key = self.keys[record];
        if let Err(error) = self.read(store, key, slot) {
            self.unread.insert(record, self.clock);
            if let Some(so_far) = self.unreads.once_more() {
                tracing::error!(%key, %error, so_far, "a record could not be brought into memory");
            }
            return false;
        }
        if let Err(mismatch) = self.check(key, slot) {
            tracing::error!(%key, %mismatch,
                "a record is damaged on disk; it is withdrawn until the store is mended");
            self.shared.ledger.withdraw(key);
            return false;
        }
        true
    }

    fn read(&mut self, store: &ExpertStore, key: ExpertKey, slot: u32) -> Result<(), StoreError> {
        let record_bytes = self.manifest.layout().locate(key)?.record_bytes() as usize;
        let slot = &mut self.slots[slot as usize];
        store.read_at(key, 0, &mut slot.bytes_mut()[..record_bytes])
    }

    /// Holds a slot's bytes against the record that should be in it.
    pub(super) fn check(&self, key: ExpertKey, slot: u32) -> Result<(), Mismatch> {
        check(&self.manifest, key, self.slots[slot as usize].bytes())
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
