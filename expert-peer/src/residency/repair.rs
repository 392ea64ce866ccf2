//! Looking at both copies of a record that a client got damaged, and mending the one in memory.
//!
//! Where records are spilled, a damaged one goes as any other does: out with one table, and back with
//! the next once it has been read anew; meanwhile clients ask for it to be pushed. A peer that holds
//! every record offers no pushes and has no slot to spare: a table without the record would be an end
//! to it. There the slot is overwritten under the table that names it, with a copy from disk that was
//! checked before. A READ of it at that moment gets a mixture, which its check refuses as it refused
//! what was there.

use expert_tier::key::ExpertKey;
use expert_tier::store::verify::{RecordError, RecordReader};
use expert_tier::store::{ExpertStore, StoreError};

use super::check;
use super::keeper::{Keeper, LOOK_AGAIN};
use super::policy::Move;

impl Keeper {
    /// Looks at the records that clients have got damaged, a few at a time; says what to move.
    pub(super) fn look_at_reports(&mut self, store: &ExpertStore) -> Vec<Move> {
        let now = self.clock;
        self.looked_at.retain(|_, then| now.saturating_sub(*then) < LOOK_AGAIN);
        let reported = self.shared.reports.take(self.checks as usize);
        self.checks -= reported.len() as f64;
        let mut repairs = Vec::new();
        for key in reported {
            let Some(record) = self.shared.ledger.number(key) else { continue };
            if self.looked_at.insert(record, now).is_none() {
                repairs.extend(self.look_at(store, record));
            }
        }
        repairs
    }

    /// Looks at both copies of a record.
    fn look_at(&mut self, store: &ExpertStore, record: usize) -> Option<Move> {
        let key = self.keys[record];
        let slot = self.places.slot(record);
        let memory = slot.map_or(Ok(()), |slot| self.check(key, slot));
        let Some((slot, mismatch)) = slot.zip(memory.err()) else {
            let disk = read_through(store, key);
            if disk.is_ok() {
                tracing::info!(%key, in_memory = slot.is_some(),
                    "a client got a damaged record; the copies here are sound");
            }
            self.judge_disk(key, disk, slot.is_some());
            return None;
        };
        tracing::error!(%key, slot, %mismatch, "a record in memory is damaged; it is read anew");
        if self.spills() {
            let disk = read_through(store, key);
            let into = disk.is_ok().then_some(record);
            if matches!(disk, Err(RecordError::Store(_))) {
                self.unread.insert(record, self.clock);
            }
            self.judge_disk(key, disk, false);
            return Some(Move { slot, out: Some(record), into });
        }
        let whole = self.read_whole(store, key);
        let disk = whole.map(|bytes| {
            self.slots[slot as usize].bytes_mut()[..bytes.len()].copy_from_slice(&bytes)
        });
        // Without a better copy each READ of it is refused, by a client that can say what differs.
        self.judge_disk(key, disk, false);
        None
    }

    /// Whether records are on disk alone, which clients then ask to be pushed.
    fn spills(&self) -> bool {
        self.slots.len() < self.keys.len()
    }

    /// Withdraws what is damaged on disk.
    fn judge_disk(&self, key: ExpertKey, disk: Result<(), RecordError>, in_memory: bool) {
        match disk {
            Ok(()) => {}
            Err(RecordError::Store(error)) => {
                tracing::error!(%key, %error, "a record that a client got damaged cannot be read");
            }
            Err(error) => {
                tracing::error!(%key, %error, in_memory,
                    "a record is damaged on disk; it is withdrawn until the store is mended");
                self.shared.ledger.withdraw(key);
            }
        }
    }

    /// The whole record from disk, if it is sound.
    fn read_whole(&self, store: &ExpertStore, key: ExpertKey) -> Result<Vec<u8>, RecordError> {
        let layer = self.manifest.layout().locate(key).map_err(StoreError::from)?;
        let mut bytes = vec![0; layer.record_bytes() as usize];
        store.read_at(key, 0, &mut bytes)?;
        let differs = |mismatch| RecordError::Mismatch { key, mismatch };
        check(&self.manifest, key, &bytes).map_err(differs)?;
        Ok(bytes)
    }
}

/// Reads all of a record from disk and checks it, a chunk at a time.
fn read_through(store: &ExpertStore, key: ExpertKey) -> Result<(), RecordError> {
    let identity = store.manifest().identity(key).map_err(StoreError::from)?;
    RecordReader::open(store, key)?.read(0, identity.payload_bytes, |_| Ok(()))
}
