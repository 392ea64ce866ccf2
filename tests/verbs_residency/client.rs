//! A client that speaks the rails' protocol by hand and READs by whichever table it likes.

use std::io::ErrorKind;
use std::sync::Arc;

use expert_tier::key::ExpertKey;
use expert_tier::record::{Mismatch, RecordCheck};
use expert_tier::store::manifest::Manifest;
use expert_tier::wire::frame::FrameType;
use gpu_sys::verbs::{Access, MemoryRegion, Post, Remote, Signal, WorkError};
use railset::message::{Damaged, Usage, UsageEntry};
use railset::table::{SPILLED, Table};

use crate::peer_support::BOUND;
use crate::peer_support::raw::Raw;
use crate::rail_client;
use crate::verbs_support::{Block, Pages, Side, pages};

/// Room for any record of a test's store.
const RECORD_BYTES: usize = 1 << 20;

/// A client on rail 0.
pub(crate) struct Client {
    pub(crate) raw: Raw,
    pub(crate) table: Table,
    manifest: Arc<Manifest>,
    side: Side,
    mine: Arc<Pages>,
    region: MemoryRegion,
}

impl Client {
    /// Connects as client `id`; it has a table, and has not acknowledged it.
    pub(crate) fn connect(peer: &str, id: u8, manifest: &Arc<Manifest>) -> Self {
        let (mut raw, _) = rail_client::offered(peer, id, manifest);
        let (side, table) = rail_client::reader(&mut raw);
        let mine = pages(RECORD_BYTES);
        let region = side.register(&mine, Access::LocalWrite);
        Self { raw, table, manifest: Arc::clone(manifest), side, mine, region }
    }

    /// Says that it uses its table, and no older one.
    pub(crate) fn acknowledge(&mut self) {
        rail_client::acknowledge(&mut self.raw, self.table.generation());
    }

    /// Takes the next table.
    pub(crate) fn next_table(&mut self) {
        let table = rail_client::table(&mut self.raw);
        assert!(table.generation() > self.table.generation());
        self.table = table;
    }

    /// Takes and acknowledges the tables that have come.
    pub(crate) fn follow(&mut self) {
        while self.has_mail() {
            self.next_table();
            self.acknowledge();
        }
    }

    fn has_mail(&self) -> bool {
        self.raw.0.set_nonblocking(true).expect("a socket");
        let found = self.raw.0.peek(&mut [0]);
        self.raw.0.set_nonblocking(false).expect("a socket");
        match found {
            Ok(count) => count > 0,
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("the connection failed: {error}"),
        }
    }

    /// The records that are in memory by its table.
    pub(crate) fn resident(&self) -> Vec<ExpertKey> {
        let of_layer = |layer: &railset::table::LayerTable| {
            let slots = (0..).zip(layer.slots.clone());
            let number = layer.layer;
            slots.filter(|(_, slot)| *slot != SPILLED).map(move |(e, _)| ExpertKey::new(number, e))
        };
        self.table.layers().iter().flat_map(of_layer).collect()
    }

    /// Where a record lies in the peer's memory, by the table.
    pub(crate) fn address(&self, key: ExpertKey) -> Option<u64> {
        let layer = self.table.layers().iter().find(|it| it.layer == key.layer)?;
        let slot = *layer.slots.get(key.expert as usize).filter(|slot| **slot != SPILLED)?;
        Some(layer.columns[0].base + u64::from(slot) * layer.slot_stride)
    }

    /// READs from where the record is by `table`, and checks what came.
    pub(crate) fn read(
        &mut self,
        table: &Table,
        key: ExpertKey,
    ) -> Result<Result<(), Mismatch>, WorkError> {
        let layer = table.layers().iter().find(|it| it.layer == key.layer).expect("a layer");
        let slot = layer.slots[key.expert as usize];
        assert_ne!(slot, SPILLED);
        let address = layer.columns[0].base + u64::from(slot) * layer.slot_stride;
        let remote = Remote { address, rkey: layer.columns[0].rkey };
        let identity = self.manifest.identity(key).expect("a key of the store");
        let bytes = identity.record_bytes() as usize;
        self.mine.fill(0);
        let block = Block::new(&self.mine, 0, bytes);
        let read = Post::read(block, &self.region, remote, Signal::Yes).unwrap();
        self.side.queue_pair.post(&mut vec![read]).unwrap();
        self.side.drain(BOUND).remove(0).1?;
        let mut check = RecordCheck::new(identity);
        check.advance(&self.mine.bytes(0, bytes));
        Ok(check.finish())
    }

    /// Says that it has read `keys`, `reads` times each.
    pub(crate) fn used(&mut self, keys: &[ExpertKey], reads: u32) {
        let entry = |key: &ExpertKey| UsageEntry { layer: key.layer, expert: key.expert, reads };
        let usage = Usage { entries: keys.iter().map(entry).collect() };
        self.raw.send_frame(FrameType::RailsUsage, &usage.encode());
    }

    /// Says that it got other bytes than `key`'s.
    pub(crate) fn damaged(&mut self, key: ExpertKey) {
        let ExpertKey { layer, expert } = key;
        self.raw.send_frame(FrameType::RailsDamaged, &Damaged { layer, expert }.encode());
    }
}
