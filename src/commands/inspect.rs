//! `metrale inspect`: what a store holds, from its manifest alone.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use expert_peer::cli::{printable, store_error};
use expert_tier::layout::{LayerLayout, TensorSpec};
use expert_tier::store::ExpertStore;
use expert_tier::store::manifest::{self, Manifest};
use serde::Serialize;

use crate::output::{self, count};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The store's directory
    #[arg(value_name = "STORE")]
    store: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    version: u32,
    fingerprint: String,
    model: &'a str,
    layers: Vec<LayerReport<'a>>,
}

#[derive(Serialize)]
struct LayerReport<'a> {
    layer: u32,
    experts: u32,
    stride: u64,
    header_bytes: u64,
    payload_bytes: u64,
    chunk_bytes: u32,
    tensors: Vec<TensorReport<'a>>,
}

#[derive(Serialize)]
struct TensorReport<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    offset: u64,
    bytes: u64,
}

impl<'a> From<&'a TensorSpec> for TensorReport<'a> {
    fn from(tensor: &'a TensorSpec) -> Self {
        Self {
            name: &tensor.name,
            dtype: tensor.dtype.name(),
            shape: &tensor.shape,
            offset: tensor.offset,
            bytes: tensor.bytes,
        }
    }
}

impl<'a> From<&'a LayerLayout> for LayerReport<'a> {
    fn from(layer: &'a LayerLayout) -> Self {
        Self {
            layer: layer.layer(),
            experts: layer.experts(),
            stride: layer.stride(),
            header_bytes: layer.header_bytes(),
            payload_bytes: layer.spec().payload_bytes(),
            chunk_bytes: layer.chunk_bytes(),
            tensors: layer.spec().tensors().iter().map(TensorReport::from).collect(),
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let store = ExpertStore::open(&args.store).map_err(|error| store_error(&args.store, error))?;
    let manifest = store.manifest();
    if args.json {
        output::json(&Report {
            version: manifest::VERSION,
            fingerprint: manifest.fingerprint().to_string(),
            model: manifest.model(),
            layers: manifest.layout().layers().iter().map(LayerReport::from).collect(),
        })?;
    } else {
        output::text(&table(manifest))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Layers with equal records share a block, so that 94 layers are one table.
fn table(manifest: &Manifest) -> String {
    let layers = manifest.layout().layers();
    let mut text = format!(
        "fingerprint  {}\nmodel        {}\nformat       version {}\nrecords      {} in {}, {}\n",
        manifest.fingerprint(),
        printable(manifest.model()),
        manifest::VERSION,
        manifest.layout().records(),
        count(layers.len() as u64, "layer"),
        output::human_bytes(layers.iter().map(|l| l.stride() * u64::from(l.experts())).sum()),
    );
    let same = |a: &LayerLayout, b: &LayerLayout| {
        a.spec() == b.spec()
            && a.experts() == b.experts()
            && a.layer().checked_add(1) == Some(b.layer())
    };
    for group in layers.chunk_by(|a, b| same(a, b)) {
        let (first, last) = (&group[0], &group[group.len() - 1]);
        let numbers = match group.len() {
            1 => format!("layer {}", first.layer()),
            _ => format!("layers {} to {}", first.layer(), last.layer()),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "\n{numbers}: {}, {} bytes of payload each, one every {}",
            count(u64::from(first.experts()), "expert"),
            first.spec().payload_bytes(),
            first.stride(),
        );
        text.push_str(&tensor_table(first.spec().tensors()));
    }
    text
}

fn tensor_table(tensors: &[TensorSpec]) -> String {
    let names: Vec<_> = tensors.iter().map(|t| printable(&t.name)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).clamp(6, 72);
    let shapes: Vec<String> = tensors.iter().map(|t| output::shape(&t.shape)).collect();
    let shape_width = shapes.iter().map(String::len).max().unwrap_or(0).max(5);
    let mut text = format!(
        "  {:width$}  {:11}  {:shape_width$}  {:>12}  {:>12}\n",
        "tensor", "dtype", "shape", "offset", "bytes"
    );
    for ((tensor, shape), name) in tensors.iter().zip(&shapes).zip(&names) {
        let TensorSpec { dtype, offset, bytes, .. } = tensor;
        let dtype = dtype.name();
        let _ = writeln!(
            text,
            "  {name:width$}  {dtype:11}  {shape:shape_width$}  {offset:>12}  {bytes:>12}"
        );
    }
    text
}
