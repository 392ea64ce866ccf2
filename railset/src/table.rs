//! The published table: where each expert lies in the peer's memory, or that it does not.
//!
//! ```text
//! generation u64, layers u32, rails u8, zero 3, layers x:
//!   layer u32, experts u32, slot stride u64,
//!   rails x (base u64, rkey u32, zero 4),
//!   experts x slot u32 (0xFFFFFFFF: spilled)
//! ```
//!
//! An expert's record starts at `base + slot x stride` of its layer; a rail has keys of its own,
//! since each device registers the region for itself. The columns are the connection's rails, in
//! the order of its `Connect`.
//!
//! A [`Table`] is what somebody says. Only a [`CheckedTable`], held against the layers that the
//! manifest names, gives addresses out, and those cannot wrap: `check` has computed the end of
//! the last slot of each layer and rail.
//!
//! Most bytes of a table: `16 + 4096 x (16 + 8 x 16) + 4 x 1,048,576`, under 5 MiB.

use crate::message::MAX_RAILS;
use crate::wire::{DecodeError, Reader, within};

/// Most layers of a table: as many as a store may have.
pub const MAX_LAYERS: usize = 4096;
/// Most experts of a layer: as many as a store may have.
pub const MAX_EXPERTS: u32 = 65_536;
/// Most experts of a table, all layers together; the largest models published so far have 23,424.
pub const MAX_ENTRIES: u64 = 1 << 20;
/// The slot of an expert that is not in the peer's memory.
pub const SPILLED: u32 = u32::MAX;
/// Bytes of a table of one layer, one rail and one expert.
pub const MIN_TABLE_BYTES: usize = TABLE_BYTES + LAYER_BYTES + COLUMN_BYTES + 4;
/// Bytes of the largest table.
pub const MAX_TABLE_BYTES: usize = TABLE_BYTES
    + MAX_LAYERS * (LAYER_BYTES + MAX_RAILS * COLUMN_BYTES)
    + 4 * (MAX_ENTRIES as usize);

const TABLE_BYTES: usize = 16;
const LAYER_BYTES: usize = 16;
const COLUMN_BYTES: usize = 16;

/// A table that cannot be used.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum TableError {
    /// Bytes that are no table.
    #[error("the table: {0}")]
    Decode(#[from] DecodeError),
    /// A count is outside its limits.
    #[error("the table has {found} {what}, allowed are 1 to {most}")]
    Count {
        /// What there is too much or nothing of.
        what: &'static str,
        /// How many.
        found: u64,
        /// How many are allowed.
        most: u64,
    },
    /// Another number of layers than the store has.
    #[error("the table has {found} layers, the store {expected}: the peer serves another store")]
    Layers {
        /// Layers of the table.
        found: usize,
        /// Layers of the store.
        expected: usize,
    },
    /// Another layer at some position.
    #[error("layer {found} stands where the store has layer {expected}")]
    Layer {
        /// The table's layer number.
        found: u32,
        /// The store's layer number.
        expected: u32,
    },
    /// Another number of experts in a layer.
    #[error("layer {layer} has {found} experts in the table and {expected} in the store")]
    Experts {
        /// The layer.
        layer: u32,
        /// Experts of the table.
        found: usize,
        /// Experts of the store.
        expected: u32,
    },
    /// Slots that do not hold a record.
    #[error("layer {layer}: a slot has {found} bytes, a record {record_bytes}")]
    Stride {
        /// The layer.
        layer: u32,
        /// Bytes from slot to slot.
        found: u64,
        /// Bytes of the layer's records.
        record_bytes: u64,
    },
    /// Another number of rails than the connection or the layer before has.
    #[error("layer {layer} has keys for {found} rails, the connection has {expected}")]
    Rails {
        /// The layer.
        layer: u32,
        /// Columns found.
        found: usize,
        /// Columns that there should be.
        expected: usize,
    },
    /// An expert is in memory at address zero.
    #[error("layer {layer} has experts in memory, but its base on rail {rail} is 0")]
    NoBase {
        /// The layer.
        layer: u32,
        /// The column.
        rail: usize,
    },
    /// A slot ends beyond the last address.
    #[error(
        "layer {layer}, rail {rail}: slot {slot} of {stride} bytes at base {base:#x} ends beyond \
         the address space"
    )]
    Wraps {
        /// The layer.
        layer: u32,
        /// The column.
        rail: usize,
        /// The highest slot.
        slot: u32,
        /// The column's base.
        base: u64,
        /// Bytes from slot to slot.
        stride: u64,
    },
}

/// Where a layer's slots start for one rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Column {
    /// Address of slot 0 on the peer; 0 only where none of the layer's experts is in memory.
    pub base: u64,
    /// The key that the rail's device knows the memory by.
    pub rkey: u32,
}

/// One layer of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerTable {
    /// The model's number of the layer.
    pub layer: u32,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// A column per rail.
    pub columns: Vec<Column>,
    /// Each expert's slot, or [`SPILLED`].
    pub slots: Vec<u32>,
}

/// What a client knows of a layer from the store's manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerShape {
    /// The model's number of the layer.
    pub layer: u32,
    /// Experts in it.
    pub experts: u32,
    /// Bytes that are fetched for a record.
    pub record_bytes: u64,
}

/// A table as somebody states it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    generation: u64,
    layers: Vec<LayerTable>,
}

impl Table {
    /// A table to publish.
    ///
    /// # Errors
    /// A count is outside the limits, or the layers have different numbers of columns.
    pub fn new(generation: u64, layers: Vec<LayerTable>) -> Result<Self, TableError> {
        let count = |what, found: usize, most: u64| match found as u64 {
            found if (1..=most).contains(&found) => Ok(()),
            found => Err(TableError::Count { what, found, most }),
        };
        count("layers", layers.len(), MAX_LAYERS as u64)?;
        let expected = layers.first().map_or(0, |first| first.columns.len());
        count("rails", expected, MAX_RAILS as u64)?;
        let mut entries = 0;
        for LayerTable { layer, columns, slots, .. } in &layers {
            let (layer, found) = (*layer, columns.len());
            count("experts in a layer", slots.len(), u64::from(MAX_EXPERTS))?;
            if found != expected {
                return Err(TableError::Rails { layer, found, expected });
            }
            entries += slots.len();
        }
        count("experts", entries, MAX_ENTRIES)?;
        Ok(Self { generation, layers })
    }

    /// Counts the tables of a connection; a newer one has a higher number.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The layers, in the store's order.
    #[must_use]
    pub fn layers(&self) -> &[LayerTable] {
        &self.layers
    }

    /// Columns of each layer, 1 to [`MAX_RAILS`].
    #[must_use]
    pub fn rails(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.columns.len())
    }

    /// The same table with these columns in every layer, one for each rail.
    #[must_use]
    pub fn with_columns(&self, columns: &[Column]) -> Self {
        let mut table = self.clone();
        table.layers.iter_mut().for_each(|layer| layer.columns = columns.to_vec());
        table
    }

    /// The same table with only the columns at `positions`, in that order; `None` if one of them
    /// does not exist, or if there are none or too many.
    #[must_use]
    pub fn for_rails(&self, positions: &[usize]) -> Option<Self> {
        let mut layers = self.layers.clone();
        for layer in &mut layers {
            let column = |at: &usize| layer.columns.get(*at).copied();
            layer.columns = positions.iter().map(column).collect::<Option<_>>()?;
        }
        Self::new(self.generation, layers).ok()
    }

    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let rails = self.rails();
        let layer_bytes = LAYER_BYTES + rails * COLUMN_BYTES;
        let bytes = |layer: &LayerTable| layer_bytes + 4 * layer.slots.len();
        let mut out =
            Vec::with_capacity(TABLE_BYTES + self.layers.iter().map(bytes).sum::<usize>());
        out.extend(self.generation.to_le_bytes());
        // `new` bounds both counts far below what the fields hold.
        out.extend((self.layers.len() as u32).to_le_bytes());
        out.extend((rails as u32).to_le_bytes());
        for layer in &self.layers {
            out.extend(layer.layer.to_le_bytes());
            out.extend((layer.slots.len() as u32).to_le_bytes());
            out.extend(layer.slot_stride.to_le_bytes());
            for column in &layer.columns {
                out.extend(column.base.to_le_bytes());
                out.extend(column.rkey.to_le_bytes());
                out.extend([0; 4]);
            }
            for slot in &layer.slots {
                out.extend(slot.to_le_bytes());
            }
        }
        out
    }

    /// Reads a body.
    ///
    /// # Errors
    /// [`TableError`] names the field or count that no table has.
    pub fn decode(body: &[u8]) -> Result<Self, TableError> {
        let mut reader = Reader::new(body);
        let generation = reader.u64("generation")?;
        let layers = within("layers", reader.u32("layers")?, 1..=MAX_LAYERS as u64)?;
        let rails = within("rails", reader.u8("rails")?, 1..=MAX_RAILS as u64)?;
        reader.reserved("table", 3)?;
        let mut entries = 0;
        let mut found = Vec::new();
        for _ in 0..layers {
            let layer = decode_layer(&mut reader, rails, MAX_ENTRIES - entries)?;
            entries += layer.slots.len() as u64;
            found.push(layer);
        }
        reader.finish("table")?;
        Self::new(generation, found)
    }

    /// Holds the table against the store's layers and the connection's number of rails.
    ///
    /// # Errors
    /// [`TableError`] names the first thing that is not as the store has it, or an address that
    /// cannot be.
    pub fn check(self, shapes: &[LayerShape], rails: usize) -> Result<CheckedTable, TableError> {
        let (found, expected) = (self.layers.len(), shapes.len());
        if found != expected {
            return Err(TableError::Layers { found, expected });
        }
        for (layer, shape) in self.layers.iter().zip(shapes) {
            layer.check(shape, rails)?;
        }
        Ok(CheckedTable { generation: self.generation, layers: self.layers })
    }
}

/// Reads a layer; `left` is how many experts the table may still have.
fn decode_layer(reader: &mut Reader<'_>, rails: u8, left: u64) -> Result<LayerTable, TableError> {
    let layer = reader.u32("layer")?;
    let experts = within("experts", reader.u32("experts")?, 1..=u64::from(MAX_EXPERTS))?;
    if u64::from(experts) > left {
        let found = MAX_ENTRIES - left + u64::from(experts);
        return Err(TableError::Count { what: "experts", found, most: MAX_ENTRIES });
    }
    let slot_stride = within("slot stride", reader.u64("slot stride")?, 1..=u64::MAX)?;
    let mut columns = Vec::with_capacity(usize::from(rails));
    for _ in 0..rails {
        let (base, rkey) = (reader.u64("base")?, reader.u32("rkey")?);
        reader.reserved("table", 4)?;
        columns.push(Column { base, rkey });
    }
    // Taken as bytes first: so many are there before anything is allocated for them.
    let (slots, _) = reader.bytes("slots", 4 * experts as usize)?.as_chunks::<4>();
    let slots = slots.iter().map(|slot| u32::from_le_bytes(*slot)).collect();
    Ok(LayerTable { layer, slot_stride, columns, slots })
}

impl LayerTable {
    fn check(&self, shape: &LayerShape, rails: usize) -> Result<(), TableError> {
        let (layer, stride) = (self.layer, self.slot_stride);
        if layer != shape.layer {
            return Err(TableError::Layer { found: layer, expected: shape.layer });
        }
        if self.slots.len() as u64 != u64::from(shape.experts) {
            let (found, expected) = (self.slots.len(), shape.experts);
            return Err(TableError::Experts { layer, found, expected });
        }
        if stride < shape.record_bytes || stride == 0 {
            let record_bytes = shape.record_bytes;
            return Err(TableError::Stride { layer, found: stride, record_bytes });
        }
        if self.columns.len() != rails {
            return Err(TableError::Rails { layer, found: self.columns.len(), expected: rails });
        }
        let resident = self.slots.iter().copied().filter(|slot| *slot != SPILLED);
        let Some(slot) = resident.max() else { return Ok(()) };
        for (rail, Column { base, .. }) in self.columns.iter().enumerate() {
            if *base == 0 {
                return Err(TableError::NoBase { layer, rail });
            }
            let bytes = stride.checked_mul(u64::from(slot) + 1);
            if bytes.and_then(|bytes| base.checked_add(bytes)).is_none() {
                return Err(TableError::Wraps { layer, rail, slot, base: *base, stride });
            }
        }
        Ok(())
    }
}

/// Where a record can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The address on the peer.
    pub address: u64,
    /// The key on the rail that was asked for.
    pub rkey: u32,
}

/// A table that fits the store and whose addresses can be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckedTable {
    generation: u64,
    layers: Vec<LayerTable>,
}

impl CheckedTable {
    /// The table's generation.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Where to read an expert; `None` if it is spilled, or if there is no such layer, expert or
    /// rail. `layer_index` is the layer's position in the store, `rail` the rail's in the
    /// connection.
    #[must_use]
    pub fn place(&self, layer_index: usize, expert: u32, rail: usize) -> Option<Place> {
        let layer = self.layers.get(layer_index)?;
        let slot = *layer.slots.get(usize::try_from(expert).ok()?)?;
        let column = layer.columns.get(rail)?;
        if slot == SPILLED {
            return None;
        }
        let offset = u64::from(slot).checked_mul(layer.slot_stride)?;
        Some(Place { address: column.base.checked_add(offset)?, rkey: column.rkey })
    }

    /// Whether an expert is in the peer's memory.
    #[must_use]
    pub fn is_resident(&self, layer_index: usize, expert: u32) -> bool {
        self.place(layer_index, expert, 0).is_some()
    }

    /// Experts in the peer's memory, all layers together.
    #[must_use]
    pub fn resident(&self) -> usize {
        let slots = self.layers.iter().flat_map(|layer| &layer.slots);
        slots.filter(|slot| **slot != SPILLED).count()
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
