//! Where the tensors of an expert lie inside its record, and the record inside its file.
//!
//! A record is `header | payload | zeros`:
//!
//! * the header is `64 + 4 x chunks + 4` bytes, rounded up to 256 ([`header_bytes`]);
//! * the payload holds the tensors, each at a multiple of [`TENSOR_ALIGN`] from the payload's
//!   start, zeros between them; it ends with the last tensor's last byte;
//! * the stride rounds header + payload up to [`STRIDE_ALIGN`], so that any record can be read
//!   with `O_DIRECT` and any tensor in a slot is aligned for a GPU's widest loads.
//!
//! Every quantity here can come from a manifest somebody else wrote, so each has a limit and all
//! arithmetic is checked.

use sha2::{Digest, Sha256};

use crate::dtype::Dtype;
use crate::key::ExpertKey;

/// Tensors start at multiples of this many bytes from the payload's start.
pub const TENSOR_ALIGN: u64 = 256;
/// Records start at multiples of this many bytes in their file.
pub const STRIDE_ALIGN: u64 = 4096;
/// Bytes of payload that one checksum covers, unless a store says otherwise.
pub const DEFAULT_CHUNK_BYTES: u32 = 256 * 1024;
/// Smallest and largest chunk a store may use; always a power of two.
pub const CHUNK_BYTES_RANGE: std::ops::RangeInclusive<u32> = 4096..=(16 * 1024 * 1024);
/// Largest payload: 8 GiB, some hundred times the largest expert published so far.
pub const MAX_PAYLOAD_BYTES: u64 = 8 << 30;
/// Most chunks in a record; bounds the header at 256 KiB and a little.
pub const MAX_CHUNKS: u64 = 65_536;
/// Most tensors in a record.
pub const MAX_TENSORS: usize = 4096;
/// Longest tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 1024;
/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 16;
/// Most MoE layers in a store.
pub const MAX_LAYERS: usize = 4096;
/// Most experts in a layer.
pub const MAX_EXPERTS: u32 = 65_536;

// A peer's table has room for every store's layers; experts in all have a limit of their own there.
const _: () = assert!(railset::table::MAX_LAYERS == MAX_LAYERS);
const _: () = assert!(railset::table::MAX_EXPERTS == MAX_EXPERTS);

/// Bytes of a record header before its checksums.
pub const HEADER_FIXED_BYTES: u64 = 64;

/// Why a description of records cannot be right.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum LayoutError {
    /// A count, length or offset is outside its limit.
    #[error("{what} is {value}, allowed is {limit}")]
    OutOfRange {
        /// What is out of range, with the layer or tensor it belongs to.
        what: String,
        /// The value found.
        value: String,
        /// What would be accepted.
        limit: String,
    },
    /// A field that follows from others says something else.
    #[error("{what} is {found}, but the tensors make it {expected}")]
    Inconsistent {
        /// The field, with the layer or tensor it belongs to.
        what: String,
        /// The value found.
        found: u64,
        /// The value that follows from the other fields.
        expected: u64,
    },
    /// Two layers or tensors share a name.
    #[error("{0} is listed twice")]
    Duplicate(String),
}

impl LayoutError {
    pub(crate) fn range(
        what: impl Into<String>,
        value: impl ToString,
        limit: impl ToString,
    ) -> Self {
        Self::OutOfRange { what: what.into(), value: value.to_string(), limit: limit.to_string() }
    }
}

/// A key that the store does not have.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum KeyError {
    /// No MoE layer has this number.
    #[error("{key}: the store has no MoE layer {}, its layers are {layers}", key.layer)]
    NoSuchLayer {
        /// The key asked for.
        key: ExpertKey,
        /// The layers there are, abbreviated.
        layers: String,
    },
    /// The layer has fewer experts.
    #[error("{key}: layer {} has experts 0 to {}", key.layer, experts - 1)]
    NoSuchExpert {
        /// The key asked for.
        key: ExpertKey,
        /// How many experts the layer has.
        experts: u32,
    },
}

/// One tensor of every record of a layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// The checkpoint's name after `layers.<n>.`, with the expert's number replaced by `*`.
    ///
    /// A slice of a fused tensor has the fused tensor's name and no `*`.
    pub name: String,
    /// Element type, as in the checkpoint.
    pub dtype: Dtype,
    /// Shape of this expert's tensor: for a slice, the fused shape without its first dimension.
    pub shape: Vec<u64>,
    /// Bytes from the payload's start; a multiple of [`TENSOR_ALIGN`].
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The tensors of one layer's records: names, types, shapes and places.
///
/// Built by [`ExpertRecordSpec::lay_out`], which decides the places, so two specs with the same
/// tensors are equal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertRecordSpec {
    tensors: Vec<TensorSpec>,
    payload_bytes: u64,
    digest: SpecDigest,
}

/// The first eight bytes of the SHA-256 of a spec's canonical form; part of a record's identity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpecDigest(pub [u8; 8]);

impl ExpertRecordSpec {
    /// Sorts `tensors` by name (byte order), gives each its place and checks every limit.
    ///
    /// The `offset` and `bytes` that come in are ignored.
    ///
    /// # Errors
    /// A limit is exceeded, a length does not fit its type, or a name is there twice.
    pub fn lay_out(mut tensors: Vec<TensorSpec>) -> Result<Self, LayoutError> {
        if tensors.is_empty() || tensors.len() > MAX_TENSORS {
            let limit = format!("1 to {MAX_TENSORS}");
            return Err(LayoutError::range("tensors in a record", tensors.len(), limit));
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let mut end = 0_u64;
        for tensor in &mut tensors {
            check_tensor(tensor)?;
            tensor.offset = end.next_multiple_of(TENSOR_ALIGN);
            tensor.bytes = tensor.dtype.tensor_bytes(&tensor.shape).ok_or_else(|| {
                let what = format!("length of {}", tensor.name);
                LayoutError::range(what, format!("{:?}", tensor.shape), "a whole number of bytes")
            })?;
            if tensor.bytes == 0 || tensor.bytes > MAX_PAYLOAD_BYTES {
                let what = format!("length of {}", tensor.name);
                let limit = format!("1 to {MAX_PAYLOAD_BYTES}");
                return Err(LayoutError::range(what, tensor.bytes, limit));
            }
            // Neither sum can wrap: both terms are at most MAX_TENSORS x (8 GiB + 256).
            end = tensor.offset + tensor.bytes;
        }
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(LayoutError::Duplicate(pair[0].name.clone()));
        }
        if end > MAX_PAYLOAD_BYTES {
            return Err(LayoutError::range("payload bytes", end, MAX_PAYLOAD_BYTES));
        }
        let digest = spec_digest(&tensors);
        Ok(Self { tensors, payload_bytes: end, digest })
    }

    /// The tensors, in the order in which they lie in the record.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Bytes from the first tensor's first byte to the last one's last.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// What a record header carries of this spec.
    #[must_use]
    pub fn digest(&self) -> SpecDigest {
        self.digest
    }
}

fn check_tensor(tensor: &TensorSpec) -> Result<(), LayoutError> {
    let name = &tensor.name;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
        let shown: String = name.chars().take(64).collect();
        let limit = format!("1 to {MAX_NAME_BYTES} bytes, none of them zero");
        return Err(LayoutError::range("tensor name", format!("{shown:?}"), limit));
    }
    if tensor.shape.len() > MAX_DIMS {
        return Err(LayoutError::range(
            format!("dimensions of {name}"),
            tensor.shape.len(),
            MAX_DIMS,
        ));
    }
    Ok(())
}

/// The canonical form hashed into a [`SpecDigest`]; docs/store-format.md has it as a byte table.
fn spec_digest(tensors: &[TensorSpec]) -> SpecDigest {
    let mut hash = Sha256::new();
    for tensor in tensors {
        hash.update(tensor.name.as_bytes());
        hash.update([0]);
        hash.update(tensor.dtype.name().as_bytes());
        hash.update([0]);
        hash.update((tensor.shape.len() as u64).to_le_bytes());
        for dim in &tensor.shape {
            hash.update(dim.to_le_bytes());
        }
        hash.update(tensor.offset.to_le_bytes());
        hash.update(tensor.bytes.to_le_bytes());
    }
    let full = hash.finalize();
    let mut digest = [0; 8];
    digest.copy_from_slice(&full[..8]);
    SpecDigest(digest)
}

/// Bytes of the header of a record with this many chunks: a multiple of 256.
#[must_use]
pub fn header_bytes(chunks: u64) -> u64 {
    (HEADER_FIXED_BYTES + 4 * chunks + 4).next_multiple_of(TENSOR_ALIGN)
}

/// One MoE layer of a store: how many records, and their shape.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerLayout {
    layer: u32,
    experts: u32,
    prefix: String,
    spec: ExpertRecordSpec,
    chunk_bytes: u32,
}

impl LayerLayout {
    /// Describes `experts` records of `spec` in the model's layer `layer`.
    ///
    /// `prefix` is what stands before a tensor's name in the checkpoint, `model.layers.3.` say.
    ///
    /// # Errors
    /// A count is outside its limit, or the payload has too many chunks of `chunk_bytes`.
    pub fn new(
        layer: u32,
        experts: u32,
        prefix: String,
        spec: ExpertRecordSpec,
        chunk_bytes: u32,
    ) -> Result<Self, LayoutError> {
        if experts == 0 || experts > MAX_EXPERTS {
            let limit = format!("1 to {MAX_EXPERTS}");
            return Err(LayoutError::range(format!("experts of layer {layer}"), experts, limit));
        }
        if !CHUNK_BYTES_RANGE.contains(&chunk_bytes) || !chunk_bytes.is_power_of_two() {
            let limit = format!("a power of two in {CHUNK_BYTES_RANGE:?}");
            return Err(LayoutError::range("chunk bytes", chunk_bytes, limit));
        }
        if prefix.len() > MAX_NAME_BYTES {
            let what = format!("prefix of layer {layer}");
            return Err(LayoutError::range(what, prefix.len(), MAX_NAME_BYTES));
        }
        let layout = Self { layer, experts, prefix, spec, chunk_bytes };
        if layout.chunks() > MAX_CHUNKS {
            let what = format!("chunks of layer {layer}");
            return Err(LayoutError::range(what, layout.chunks(), MAX_CHUNKS));
        }
        Ok(layout)
    }

    /// The model's own layer number.
    #[must_use]
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// How many experts, and so records, the layer has.
    #[must_use]
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// What stands before a tensor's name in the checkpoint.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The tensors of each record.
    #[must_use]
    pub fn spec(&self) -> &ExpertRecordSpec {
        &self.spec
    }

    /// Payload bytes that one checksum covers; the last chunk may be shorter.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Chunks in a record's payload.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.spec.payload_bytes.div_ceil(u64::from(self.chunk_bytes))
    }

    /// Bytes of a record's header, and so the payload's offset in the record.
    #[must_use]
    pub fn header_bytes(&self) -> u64 {
        header_bytes(self.chunks())
    }

    /// Bytes of header and payload: what a fetch moves.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        self.header_bytes() + self.spec.payload_bytes
    }

    /// Bytes from one record's start to the next one's: [`record_bytes`](Self::record_bytes)
    /// rounded up to [`STRIDE_ALIGN`].
    #[must_use]
    pub fn stride(&self) -> u64 {
        self.record_bytes().next_multiple_of(STRIDE_ALIGN)
    }

    /// The name in the checkpoint of `tensor` of expert `expert`.
    #[must_use]
    pub fn checkpoint_name(&self, tensor: &TensorSpec, expert: u32) -> String {
        format!("{}{}", self.prefix, tensor.name.replacen('*', &expert.to_string(), 1))
    }
}

/// Every MoE layer of a store, in ascending order of layer number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertLayout {
    layers: Vec<LayerLayout>,
    /// Number of the first record of each layer.
    first: Vec<usize>,
}

impl ExpertLayout {
    /// Takes layers in ascending order.
    ///
    /// # Errors
    /// There is no layer, there are too many, or they are not in strictly ascending order.
    pub fn new(layers: Vec<LayerLayout>) -> Result<Self, LayoutError> {
        if layers.is_empty() || layers.len() > MAX_LAYERS {
            let limit = format!("1 to {MAX_LAYERS}");
            return Err(LayoutError::range("layers", layers.len(), limit));
        }
        if let Some(pair) = layers.windows(2).find(|pair| pair[0].layer >= pair[1].layer) {
            let what = format!("layer after layer {}", pair[0].layer);
            return Err(LayoutError::range(what, pair[1].layer, "a larger number"));
        }
        let next = |number: &mut usize, layer: &LayerLayout| {
            let first = *number;
            *number += layer.experts as usize;
            Some(first)
        };
        let first = layers.iter().scan(0, next).collect();
        Ok(Self { layers, first })
    }

    /// The number of an expert's record among those of the store, counted from 0 by layer and expert;
    /// the layer by its position in [`layers`](Self::layers). `None` where there is no such record.
    #[must_use]
    pub fn record_number(&self, layer_index: usize, expert: u32) -> Option<usize> {
        self.layers.get(layer_index).filter(|layer| expert < layer.experts)?;
        self.first.get(layer_index).map(|first| first + expert as usize)
    }

    /// The layers, ascending.
    #[must_use]
    pub fn layers(&self) -> &[LayerLayout] {
        &self.layers
    }

    /// The layer numbered `layer`, if it has experts.
    #[must_use]
    pub fn layer(&self, layer: u32) -> Option<&LayerLayout> {
        self.layer_index(layer).map(|i| &self.layers[i])
    }

    /// Position of the layer numbered `layer` in [`layers`](Self::layers).
    #[must_use]
    pub fn layer_index(&self, layer: u32) -> Option<usize> {
        self.layers.binary_search_by_key(&layer, LayerLayout::layer).ok()
    }

    /// The layer that holds `key`.
    ///
    /// # Errors
    /// The store has no such layer, or the layer no such expert.
    pub fn locate(&self, key: ExpertKey) -> Result<&LayerLayout, KeyError> {
        self.locate_at(key).map(|(_, layer)| layer)
    }

    /// The layer that holds `key`, and its position in [`layers`](Self::layers).
    ///
    /// # Errors
    /// As for [`locate`](Self::locate).
    pub fn locate_at(&self, key: ExpertKey) -> Result<(usize, &LayerLayout), KeyError> {
        let Some(index) = self.layer_index(key.layer) else {
            return Err(KeyError::NoSuchLayer { key, layers: self.layer_numbers() });
        };
        let layer = &self.layers[index];
        if key.expert >= layer.experts {
            return Err(KeyError::NoSuchExpert { key, experts: layer.experts });
        }
        Ok((index, layer))
    }

    /// Every key, by layer and expert.
    pub fn keys(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        self.layers
            .iter()
            .flat_map(|l| (0..l.experts).map(move |expert| ExpertKey::new(l.layer, expert)))
    }

    /// Records in the store.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.layers.iter().map(|l| u64::from(l.experts)).sum()
    }

    /// Stride of the layer with the largest records: what a slot for any record needs.
    #[must_use]
    pub fn max_stride(&self) -> u64 {
        self.layers.iter().map(LayerLayout::stride).max().unwrap_or(STRIDE_ALIGN)
    }

    /// The layer numbers as a person would write them: `1-3, 7`.
    fn layer_numbers(&self) -> String {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for layer in self.layers.iter().map(LayerLayout::layer) {
            match runs.last_mut() {
                Some(run) if run.1.checked_add(1) == Some(layer) => run.1 = layer,
                _ => runs.push((layer, layer)),
            }
        }
        let shown = runs.iter().take(8).map(|&(a, b)| match a == b {
            true => a.to_string(),
            false => format!("{a}-{b}"),
        });
        let text = shown.collect::<Vec<_>>().join(", ");
        if runs.len() > 8 { format!("{text}, ...") } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
        TensorSpec { name: name.into(), dtype, shape: shape.into(), offset: 0, bytes: 0 }
    }

    fn spec() -> ExpertRecordSpec {
        ExpertRecordSpec::lay_out(vec![
            tensor("mlp.experts.*.up_proj.weight", Dtype::Bf16, &[32, 64]),
            tensor("mlp.experts.*.down_proj.scale", Dtype::F32, &[]),
        ])
        .unwrap()
    }

    #[test]
    fn tensors_are_sorted_and_aligned() {
        let spec = spec();
        let places: Vec<_> = spec.tensors().iter().map(|t| (t.offset, t.bytes)).collect();
        assert_eq!(places, [(0, 4), (256, 4096)]);
        assert_eq!(spec.payload_bytes(), 4352);
    }

    #[test]
    fn the_spec_digest_is_frozen() {
        assert_eq!(spec().digest(), SpecDigest([230, 126, 117, 132, 104, 105, 36, 249]));
    }

    #[test]
    fn a_record_is_header_and_payload_in_a_stride_of_whole_pages() {
        let layer = LayerLayout::new(3, 8, "model.layers.3.".into(), spec(), 4096).unwrap();
        assert_eq!((layer.chunks(), layer.header_bytes()), (2, 256));
        assert_eq!((layer.record_bytes(), layer.stride()), (4608, 8192));
        let name = layer.checkpoint_name(&layer.spec().tensors()[1], 5);
        assert_eq!(name, "model.layers.3.mlp.experts.5.up_proj.weight");
    }

    #[test]
    fn a_key_that_is_not_there_names_what_is() {
        let layer = |n| LayerLayout::new(n, 8, String::new(), spec(), 4096).unwrap();
        let layout = ExpertLayout::new(vec![layer(1), layer(2), layer(7)]).unwrap();
        let error = layout.locate(ExpertKey::new(4, 0)).unwrap_err().to_string();
        assert_eq!(error, "layer 4 expert 0: the store has no MoE layer 4, its layers are 1-2, 7");
        let error = layout.locate(ExpertKey::new(2, 8)).unwrap_err().to_string();
        assert_eq!(error, "layer 2 expert 8: layer 2 has experts 0 to 7");
        assert_eq!(layout.keys().count() as u64, layout.records());
    }

    #[test]
    fn limits_hold_at_both_ends() {
        let lay_out = |t| ExpertRecordSpec::lay_out(vec![t]);
        assert!(ExpertRecordSpec::lay_out(vec![]).is_err());
        assert!(lay_out(tensor("", Dtype::U8, &[1])).is_err());
        assert!(lay_out(tensor("empty", Dtype::U8, &[0])).is_err());
        assert!(lay_out(tensor("huge", Dtype::U8, &[MAX_PAYLOAD_BYTES])).is_ok());
        assert!(lay_out(tensor("huge", Dtype::U8, &[MAX_PAYLOAD_BYTES + 1])).is_err());
        assert!(lay_out(tensor("dims", Dtype::U8, &[1; MAX_DIMS + 1])).is_err());
        let twice = vec![tensor("a", Dtype::U8, &[1]), tensor("a", Dtype::U8, &[1])];
        assert_eq!(ExpertRecordSpec::lay_out(twice), Err(LayoutError::Duplicate("a".into())));
        for chunk_bytes in [0, 4095, 12_288, 32 << 20] {
            assert!(LayerLayout::new(0, 1, String::new(), spec(), chunk_bytes).is_err());
        }
        let huge = lay_out(tensor("huge", Dtype::U8, &[MAX_PAYLOAD_BYTES])).unwrap();
        assert!(LayerLayout::new(0, 1, String::new(), huge, 4096).is_err(), "too many chunks");
    }
}
