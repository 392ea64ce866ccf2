//! `manifest.json`: what a store holds, and the fingerprint that names it.
//!
//! The fingerprint is the SHA-256 of the manifest's own bytes with the 64 digits of the
//! fingerprint replaced by zeros. Each layer's `checksums_sha256` is the SHA-256 of the CRC-32s
//! (little-endian) of every chunk of every record, by expert and chunk; so the fingerprint
//! depends on the weights and not only on their shapes, and a manifest can be checked without
//! reading a record.
//!
//! Version history: 1 (2026-11) first.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use crate::dtype::Dtype;
use crate::fingerprint::Fingerprint;
use crate::key::ExpertKey;
use crate::layout::{
    ExpertLayout, ExpertRecordSpec, KeyError, LayerLayout, LayoutError, MAX_LAYERS, MAX_TENSORS,
    TensorSpec,
};
use crate::record::RecordIdentity;

/// File name of the manifest in a store directory.
pub const FILE_NAME: &str = "manifest.json";
/// Version of the store format that this crate reads and writes.
pub const VERSION: u32 = 1;
/// Largest manifest accepted, from disk or from a peer: 64 MiB.
pub const MAX_BYTES: u64 = 64 << 20;

const FORMAT: &str = "metrale-expert-store";
const NO_FINGERPRINT: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Why bytes are not a manifest this program can use.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Longer than [`MAX_BYTES`].
    #[error("the manifest has {found} bytes, allowed are {MAX_BYTES}")]
    TooLarge {
        /// Its length.
        found: u64,
    },
    /// Not JSON, or not of the manifest's shape.
    #[error("the manifest is not readable: {0}")]
    Json(#[from] serde_json::Error),
    /// A JSON document of another kind.
    #[error("not an expert store: format is {found:?}, expected {FORMAT:?}")]
    Format {
        /// The `format` found.
        found: String,
    },
    /// Written by another version.
    #[error("store format version {found}, this program reads {VERSION}: pack the store again")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The bytes do not have the fingerprint that they state.
    #[error("the manifest was altered: its fingerprint is {found}, it states {stated}")]
    Fingerprint {
        /// Fingerprint of the bytes.
        found: Fingerprint,
        /// Fingerprint in the manifest.
        stated: Fingerprint,
    },
    /// A description that cannot be right.
    #[error("the manifest is inconsistent: {0}")]
    Layout(#[from] LayoutError),
}

/// A manifest that has been read and found consistent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    fingerprint: Fingerprint,
    model: String,
    layout: ExpertLayout,
    checksums: Vec<[u8; 32]>,
    bytes: Vec<u8>,
}

impl Manifest {
    /// Builds the manifest of `layout`; `checksums` has one digest per layer
    /// ([`ChecksumDigest`]), `model` is the checkpoint's `model_type`, for people.
    ///
    /// # Panics
    /// `checksums` is not one per layer.
    #[must_use]
    pub fn new(model: String, layout: ExpertLayout, checksums: Vec<[u8; 32]>) -> Self {
        assert_eq!(checksums.len(), layout.layers().len(), "one digest per layer");
        let document = Document::describe(&model, &layout, &checksums);
        let mut bytes = serde_json::to_vec_pretty(&document)
            .expect("strings and numbers always have a JSON form");
        bytes.push(b'\n');
        let fingerprint = Fingerprint(Sha256::digest(&bytes).into());
        let at = find(&bytes, NO_FINGERPRINT.as_bytes()).expect("the document has the zeros");
        bytes[at..at + 64].copy_from_slice(fingerprint.to_string().as_bytes());
        Self { fingerprint, model, layout, checksums, bytes }
    }

    /// Reads a manifest, checks its fingerprint and everything that follows from other fields.
    ///
    /// # Errors
    /// [`ManifestError`] says what is wrong with the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ManifestError::TooLarge { found: bytes.len() as u64 });
        }
        let Object(kind): Object<Kind> = serde_json::from_slice(bytes)?;
        if kind.format != FORMAT {
            return Err(ManifestError::Format { found: kind.format.chars().take(64).collect() });
        }
        if kind.version != VERSION {
            return Err(ManifestError::Version { found: kind.version });
        }
        let Object(document): Object<Document> = serde_json::from_slice(bytes)?;
        let stated = lower_hex(&document.fingerprint)?;
        let found = fingerprint_of(bytes, &document.fingerprint);
        if found != stated {
            return Err(ManifestError::Fingerprint { found, stated });
        }
        let checksums = document
            .layers
            .iter()
            .map(|Object(layer)| lower_hex(&layer.checksums_sha256).map(|digest| digest.0))
            .collect::<Result<_, _>>()?;
        let layout = document.layout()?;
        Ok(Self {
            fingerprint: stated,
            model: document.model,
            layout,
            checksums,
            bytes: bytes.to_vec(),
        })
    }

    /// The name of the store.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The checkpoint's `model_type`.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Layers, records and tensors.
    #[must_use]
    pub fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    /// Digest of all payload checksums of layer number `layer`.
    #[must_use]
    pub fn checksums(&self, layer: u32) -> Option<[u8; 32]> {
        self.layout.layer_index(layer).map(|i| self.checksums[i])
    }

    /// The manifest as it lies on disk and goes over the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What the record of `key` must say of itself.
    ///
    /// # Errors
    /// The store has no such record.
    pub fn identity(&self, key: ExpertKey) -> Result<RecordIdentity, KeyError> {
        let layer = self.layout.locate(key)?;
        Ok(RecordIdentity::new(&self.fingerprint, layer, key.expert))
    }
}

/// File name of the records of layer number `layer`.
#[must_use]
pub fn layer_file_name(layer: u32) -> String {
    format!("layer-{layer:05}.records")
}

/// Digest of a layer's payload checksums, fed record by record in order of expert.
#[derive(Default)]
pub struct ChecksumDigest(Sha256);

impl ChecksumDigest {
    /// Adds the next record's checksums.
    pub fn record(&mut self, chunk_crcs: impl IntoIterator<Item = u32>) {
        chunk_crcs.into_iter().for_each(|crc| self.0.update(crc.to_le_bytes()));
    }

    /// The digest over all records added.
    #[must_use]
    pub fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// A value that JSON writes as an object. The structures that serde derives also take an array of their
/// fields' values in order, which the format does not have.
#[derive(Serialize)]
#[serde(transparent)]
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

/// The fields read first, so that another version's manifest is named as such.
#[derive(Deserialize)]
struct Kind {
    format: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: String,
    version: u32,
    fingerprint: String,
    model: String,
    chunk_bytes: u32,
    layers: Vec<Object<LayerDocument>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerDocument {
    layer: u32,
    experts: u32,
    prefix: String,
    file: String,
    stride: u64,
    header_bytes: u64,
    payload_bytes: u64,
    checksums_sha256: String,
    tensors: Vec<Object<TensorDocument>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorDocument {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

impl Document {
    fn describe(model: &str, layout: &ExpertLayout, checksums: &[[u8; 32]]) -> Self {
        let layers = layout.layers().iter().zip(checksums);
        Self {
            format: FORMAT.into(),
            version: VERSION,
            fingerprint: NO_FINGERPRINT.into(),
            model: model.into(),
            chunk_bytes: layout.layers()[0].chunk_bytes(),
            layers: layers
                .map(|(layer, digest)| Object(LayerDocument::describe(layer, digest)))
                .collect(),
        }
    }

    fn layout(&self) -> Result<ExpertLayout, LayoutError> {
        if self.layers.len() > MAX_LAYERS {
            return Err(LayoutError::range("layers", self.layers.len(), MAX_LAYERS));
        }
        let layers = self.layers.iter().map(|Object(layer)| layer.layout(self.chunk_bytes));
        ExpertLayout::new(layers.collect::<Result<_, _>>()?)
    }
}

impl LayerDocument {
    fn describe(layer: &LayerLayout, checksums: &[u8; 32]) -> Self {
        let tensors = layer.spec().tensors().iter().map(TensorDocument::describe);
        Self {
            layer: layer.layer(),
            experts: layer.experts(),
            prefix: layer.prefix().into(),
            file: layer_file_name(layer.layer()),
            stride: layer.stride(),
            header_bytes: layer.header_bytes(),
            payload_bytes: layer.spec().payload_bytes(),
            checksums_sha256: Fingerprint(*checksums).to_string(),
            tensors: tensors.collect(),
        }
    }

    /// Rebuilds the layer from its tensors and compares what the document derives from them.
    fn layout(&self, chunk_bytes: u32) -> Result<LayerLayout, LayoutError> {
        let what = |field: &str| format!("{field} of layer {}", self.layer);
        if self.tensors.len() > MAX_TENSORS {
            return Err(LayoutError::range(what("tensors"), self.tensors.len(), MAX_TENSORS));
        }
        if self.file != layer_file_name(self.layer) {
            let expected = layer_file_name(self.layer);
            let found: String = self.file.chars().take(64).collect();
            return Err(LayoutError::range(what("file"), format!("{found:?}"), expected));
        }
        let tensors = self.tensors.iter().map(|Object(t)| TensorSpec {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            offset: t.offset,
            bytes: t.bytes,
        });
        let spec = ExpertRecordSpec::lay_out(tensors.collect())?;
        for (placed, Object(stated)) in spec.tensors().iter().zip(&self.tensors) {
            let field = |f: &str| what(&format!("{f} of {}", placed.name));
            if placed.name != stated.name {
                return Err(LayoutError::range(what("tensor order"), &stated.name, "by name"));
            }
            same(field("offset"), stated.offset, placed.offset)?;
            same(field("bytes"), stated.bytes, placed.bytes)?;
        }
        let layer =
            LayerLayout::new(self.layer, self.experts, self.prefix.clone(), spec, chunk_bytes)?;
        same(what("payload bytes"), self.payload_bytes, layer.spec().payload_bytes())?;
        same(what("header bytes"), self.header_bytes, layer.header_bytes())?;
        same(what("stride"), self.stride, layer.stride())?;
        Ok(layer)
    }
}

impl TensorDocument {
    fn describe(tensor: &TensorSpec) -> Object<Self> {
        let TensorSpec { name, dtype, shape, offset, bytes } = tensor;
        Object(Self {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            offset: *offset,
            bytes: *bytes,
        })
    }
}

fn same(what: String, found: u64, expected: u64) -> Result<(), LayoutError> {
    if found == expected {
        return Ok(());
    }
    Err(LayoutError::Inconsistent { what, found, expected })
}

/// SHA-256 of `bytes` with the first occurrence of `stated` read as zeros.
fn fingerprint_of(bytes: &[u8], stated: &str) -> Fingerprint {
    let mut hash = Sha256::new();
    match find(bytes, stated.as_bytes()) {
        Some(at) => {
            hash.update(&bytes[..at]);
            hash.update(NO_FINGERPRINT);
            hash.update(&bytes[at + stated.len()..]);
        }
        None => hash.update(bytes),
    }
    Fingerprint(hash.finalize().into())
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

/// Reads a digest as the format has it, in lower case: one store, one text.
fn lower_hex(text: &str) -> Result<Fingerprint, ManifestError> {
    let digest: Fingerprint = text.parse().map_err(json_error)?;
    if digest.to_string() != text {
        return Err(json_error(format!("{text:?} is not in lower case")));
    }
    Ok(digest)
}

fn json_error(error: impl fmt::Display) -> ManifestError {
    ManifestError::Json(serde::de::Error::custom(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let tensor = TensorSpec {
            name: "mlp.experts.*.up_proj.weight".into(),
            dtype: Dtype::Bf16,
            shape: vec![32, 64],
            offset: 0,
            bytes: 0,
        };
        let spec = ExpertRecordSpec::lay_out(vec![tensor]).unwrap();
        let layer = |n| LayerLayout::new(n, 8, format!("model.layers.{n}."), spec.clone(), 4096);
        let layout = ExpertLayout::new(vec![layer(1).unwrap(), layer(2).unwrap()]).unwrap();
        Manifest::new("test".into(), layout, vec![[1; 32], [2; 32]])
    }

    fn edited(from: &str, to: &str) -> ManifestError {
        let text = String::from_utf8(manifest().as_bytes().to_vec()).unwrap();
        assert!(text.contains(from), "{from} is not in {text}");
        let mut text = text.replacen(from, to, 1);
        // A forger can compute the fingerprint too; the checks behind it must hold by themselves.
        let stated = manifest().fingerprint().to_string();
        if from != stated {
            let zeroed = text.replacen(&stated, NO_FINGERPRINT, 1);
            let forged = Fingerprint(Sha256::digest(&zeroed).into()).to_string();
            text = zeroed.replacen(NO_FINGERPRINT, &forged, 1);
        }
        Manifest::parse(text.as_bytes()).expect_err(to)
    }

    #[test]
    fn a_manifest_reads_back_equal() {
        let manifest = manifest();
        assert_eq!(Manifest::parse(manifest.as_bytes()).unwrap(), manifest);
    }

    #[test]
    fn the_fingerprint_depends_on_the_checksums() {
        let a = manifest();
        let b = Manifest::new("test".into(), a.layout().clone(), vec![[1; 32], [3; 32]]);
        assert_ne!(a.fingerprint(), b.fingerprint());
    }

    #[test]
    fn an_altered_manifest_is_refused() {
        let good = manifest();
        for at in 0..good.as_bytes().len() {
            let mut bad = good.as_bytes().to_vec();
            bad[at] ^= 1;
            assert!(Manifest::parse(&bad).is_err(), "byte {at} of {}", bad.len());
        }
    }

    #[test]
    fn each_derived_field_is_compared() {
        for (from, to, named) in [
            ("\"version\": 1", "\"version\": 2", "version 2"),
            ("metrale-expert-store", "another-thing", "another-thing"),
            ("\"stride\": 8192", "\"stride\": 4096", "stride of layer 1"),
            ("\"payload_bytes\": 4096", "\"payload_bytes\": 1", "payload bytes of layer 1"),
            ("\"offset\": 0", "\"offset\": 256", "offset of mlp.experts.*.up_proj.weight"),
            ("layer-00001.records", "../../etc/passwd", "file of layer 1"),
            ("\"experts\": 8", "\"experts\": 0", "experts of layer 1"),
            ("\"layer\": 2", "\"layer\": 1", "file of layer 1"),
            ("\"chunk_bytes\": 4096", "\"chunk_bytes\": 1000", "chunk bytes"),
            ("\"BF16\"", "\"BF17\"", "BF17"),
            (&"01".repeat(32), &"0A".repeat(32), "lower case"),
        ] {
            let error = edited(from, to).to_string();
            assert!(error.contains(named), "{from} -> {to}: {error}");
        }
    }

    #[test]
    fn objects_written_as_arrays_of_their_values_are_refused() {
        use serde_json::Value;
        const LAYER: [&str; 9] = [
            "layer",
            "experts",
            "prefix",
            "file",
            "stride",
            "header_bytes",
            "payload_bytes",
            "checksums_sha256",
            "tensors",
        ];
        let values = |object: &Value, fields: &[&str]| -> Value {
            fields.iter().map(|field| object[field].clone()).collect()
        };
        let good: Value = serde_json::from_slice(manifest().as_bytes()).unwrap();
        let mut tensor = good.clone();
        let fields = ["name", "dtype", "shape", "offset", "bytes"];
        tensor["layers"][0]["tensors"][0] = values(&good["layers"][0]["tensors"][0], &fields);
        let mut layer = good.clone();
        layer["layers"][1] = values(&good["layers"][1], &LAYER);
        for bad in [tensor, layer, values(&good, &["format", "version"])] {
            let error = Manifest::parse(bad.to_string().as_bytes()).unwrap_err().to_string();
            assert!(error.contains("expected an object"), "{error}");
        }
    }
}
