//! A checkpoint directory: `config.json`, the index, and the headers of the shards.
//!
//! The input is text in sections parted by lines `----`: the config, the index (none where it is
//! empty), then one header for each shard. What a header describes is written behind it, and where
//! the checkpoint can be packed, each tensor in the store is compared with it.

#![no_main]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use expert_tier::key::ExpertKey;
use expert_tier::layout::{ExpertLayout, LayerLayout, TensorSpec};
use expert_tier::pack::{self, PackOptions, PackPlan, Source};
use expert_tier::record::RecordCheck;
use expert_tier::store::manifest::{FILE_NAME, Manifest, layer_file_name};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// Larger checkpoints and stores are planned but not written.
const MAX_DATA_BYTES: u64 = 1 << 16;
const MAX_SHARDS: usize = 4;

static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = std::env::temp_dir().join(format!("fuzz-checkpoint-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("the temporary directory can be written");
    dir
});

/// A tensor as its shard's header has it, read apart from the packer.
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

fuzz_target!(|text: &str| {
    let checkpoint = DIR.join("checkpoint");
    let tensors = write_checkpoint(&checkpoint, text);
    let Ok(plan) = pack::plan(&Source::Checkpoint(checkpoint), &PackOptions::default()) else {
        return;
    };
    for layer in plan.layout().layers() {
        let last = layer.experts() - 1;
        for tensor in layer.spec().tensors() {
            for expert in [0, last] {
                let _ = expected(&tensors, layer, tensor, expert);
            }
        }
    }
    if plan.store_bytes() <= 4 * MAX_DATA_BYTES {
        pack_and_compare(&plan, &tensors);
    }
});

fn write_checkpoint(dir: &Path, text: &str) -> HashMap<String, Tensor> {
    let _ = fs::remove_dir_all(dir);
    fs::create_dir_all(dir).expect("a fresh directory");
    let write = |name: &str, bytes: &[u8]| fs::write(dir.join(name), bytes).expect("space");
    let mut sections = text.split("\n----\n");
    write("config.json", sections.next().unwrap_or_default().as_bytes());
    let index = sections.next().unwrap_or_default().trim();
    if !index.is_empty() {
        write("model.safetensors.index.json", index.as_bytes());
    }
    let mut tensors = HashMap::new();
    for (number, header) in sections.take(MAX_SHARDS).enumerate() {
        let data = describe(header, &mut tensors);
        let length = (header.len() as u64).to_le_bytes();
        let shard = [&length[..], header.as_bytes(), &data].concat();
        write(&format!("{number}.safetensors"), &shard);
    }
    tensors
}

/// Makes up the bytes that a header describes, and remembers its tensors.
fn describe(header: &str, tensors: &mut HashMap<String, Tensor>) -> Vec<u8> {
    let Ok(Value::Object(entries)) = serde_json::from_str(header) else { return Vec::new() };
    let numbers = |value: &Value| -> Option<Vec<u64>> {
        value.as_array()?.iter().map(Value::as_u64).collect()
    };
    let read = |entry: &Value| {
        let offsets = numbers(entry.get("data_offsets")?)?;
        let (start, end) = (*offsets.first()?, *offsets.get(1)?);
        let dtype = entry.get("dtype")?.as_str()?.to_owned();
        Some((dtype, numbers(entry.get("shape")?)?, start, end))
    };
    let found: Vec<_> = entries.iter().filter_map(|(name, e)| Some((name, read(e)?))).collect();
    let end = found.iter().map(|(_, (.., end))| *end).max().unwrap_or(0);
    if end > MAX_DATA_BYTES {
        return Vec::new();
    }
    let salt = tensors.len() as u64;
    let data: Vec<u8> = (0..end).map(|i| ((i + salt) * 7 % 251) as u8).collect();
    for (name, (dtype, shape, start, end)) in found {
        let range = usize::try_from(start).expect("small")..usize::try_from(end).expect("small");
        let Some(bytes) = data.get(range) else { continue };
        tensors.insert(name.clone(), Tensor { dtype, shape, bytes: bytes.into() });
    }
    data
}

/// The checkpoint's bytes for one tensor of one expert.
fn expected<'a>(
    tensors: &'a HashMap<String, Tensor>,
    layer: &LayerLayout,
    spec: &TensorSpec,
    expert: u32,
) -> &'a [u8] {
    let name = layer.checkpoint_name(spec, expert);
    let Some(tensor) = tensors.get(&name) else {
        panic!("{name} is in the plan and not in the checkpoint");
    };
    assert_eq!(tensor.dtype, spec.dtype.name());
    let length = usize::try_from(spec.bytes).expect("64 bits");
    if tensor.shape == spec.shape && tensor.bytes.len() == length {
        return &tensor.bytes;
    }
    let (count, rest) = tensor.shape.split_first().expect("a fused tensor has dimensions");
    assert_eq!((*count, rest), (u64::from(layer.experts()), &spec.shape[..]), "{name}");
    &tensor.bytes[expert as usize * length..][..length]
}

fn pack_and_compare(plan: &PackPlan, tensors: &HashMap<String, Tensor>) {
    let out = DIR.join("store");
    let _ = fs::remove_dir_all(&out);
    pack::run(plan, &out, &|_| {}).expect("what was planned is packed");
    let bytes = fs::read(out.join(FILE_NAME)).expect("a manifest");
    let manifest = Manifest::parse(&bytes).expect("our own manifest parses");
    assert_eq!(manifest.layout(), plan.layout());
    let layout: &ExpertLayout = manifest.layout();
    for layer in layout.layers() {
        let records = fs::read(out.join(layer_file_name(layer.layer()))).expect("a layer's file");
        let stride = usize::try_from(layer.stride()).expect("64 bits");
        for (expert, record) in (0..layer.experts()).zip(records.chunks(stride)) {
            let key = ExpertKey::new(layer.layer(), expert);
            let mut check = RecordCheck::new(manifest.identity(key).expect("in the layout"));
            check.advance(record);
            assert_eq!(check.finish(), Ok(()), "{key}");
            let header = usize::try_from(layer.header_bytes()).expect("64 bits");
            for tensor in layer.spec().tensors() {
                let at = header + usize::try_from(tensor.offset).expect("64 bits");
                let want = expected(tensors, layer, tensor, expert);
                assert_eq!(&record[at..at + want.len()], want, "{key}: {}", tensor.name);
            }
        }
    }
}
