//! Runs the real program, and writes checkpoints for it with the `safetensors` crate.

#![allow(dead_code, reason = "each test binary uses its own part of this module")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// The program under test.
pub(crate) fn metrale() -> Command {
    Command::new(env!("CARGO_BIN_EXE_metrale"))
}

/// The program under test without the right to pass over permissions, which root has.
pub(crate) fn unprivileged() -> Command {
    if !rustix::process::geteuid().is_root() {
        return metrale();
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", env!("CARGO_BIN_EXE_metrale")]);
    command
}

/// Runs `metrale` and returns what it said.
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Output {
    metrale().args(args).output().expect("metrale starts")
}

/// Runs `metrale`, which must succeed, and returns its stdout.
pub(crate) fn succeed<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Vec<u8> {
    let output = run(args);
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// Runs `metrale`, which must exit with 1, print nothing on stdout and one line on stderr.
pub(crate) fn fail<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert!(text.starts_with("metrale: ") && text.lines().count() == 1, "{text}");
    text
}

/// Packs `checkpoint` into `out`, which must succeed, and returns the JSON that it prints.
pub(crate) fn pack(checkpoint: &Path, out: &Path) -> serde_json::Value {
    let (checkpoint, out) = (checkpoint.to_str().unwrap(), out.to_str().unwrap());
    let stdout = succeed(&["pack", "--checkpoint", checkpoint, "--out", out, "--json"]);
    serde_json::from_slice(&stdout).expect("one JSON object")
}

/// Packs `checkpoint`, which must fail and leave nothing behind; returns the message.
pub(crate) fn refuse(checkpoint: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    let checkpoint = checkpoint.to_str().unwrap();
    let error = fail(&["pack", "--checkpoint", checkpoint, "--out", out.to_str().unwrap()]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "something is left behind: {error}");
    error
}

/// A file of the repository's `testdata`.
pub(crate) fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

/// Every checkpoint of the repository.
pub(crate) fn checkpoints() -> Vec<PathBuf> {
    let entries = fs::read_dir(testdata("checkpoints")).expect("testdata/checkpoints is there");
    let mut dirs: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    dirs.push(testdata("kjv-moe"));
    dirs.sort();
    assert_eq!(dirs.len(), 11);
    dirs
}

pub(crate) fn mkfifo(path: &Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, path, mode).unwrap();
}

/// One tensor, owned.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// The tensors of a checkpoint by name.
#[derive(Clone, Default)]
pub(crate) struct Checkpoint(pub(crate) BTreeMap<String, Tensor>);

impl Checkpoint {
    /// Reads every shard in `dir` with the `safetensors` crate.
    pub(crate) fn read(dir: &Path) -> Self {
        let mut tensors = BTreeMap::new();
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let file = fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&file).unwrap().iter() {
                let (dtype, shape) = (view.dtype(), view.shape().to_vec());
                tensors.insert(name.into(), Tensor { dtype, shape, bytes: view.data().to_vec() });
            }
        }
        Self(tensors)
    }

    /// Adds a tensor whose bytes depend on its name and differ from each other.
    pub(crate) fn add(
        &mut self,
        name: impl Into<String>,
        dtype: Dtype,
        shape: &[usize],
    ) -> &mut Self {
        let name = name.into();
        let count = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let start = crc(name.as_bytes());
        let byte = |i: usize| (start.wrapping_add(i as u32).wrapping_mul(0x9e37_79b1) >> 24) as u8;
        let bytes = (0..count).map(byte).collect();
        self.0.insert(name, Tensor { dtype, shape: shape.into(), bytes });
        self
    }

    /// A model of one dense and two MoE layers with `experts` experts each.
    pub(crate) fn small(experts: usize) -> Self {
        let mut it = Self::default();
        it.add("model.embed_tokens.weight", Dtype::BF16, &[32, 8]);
        it.add("model.layers.0.mlp.up_proj.weight", Dtype::BF16, &[16, 8]);
        for layer in 1..3 {
            it.add(format!("model.layers.{layer}.mlp.gate.weight"), Dtype::BF16, &[experts, 8]);
            for expert in 0..experts {
                let prefix = format!("model.layers.{layer}.mlp.experts.{expert}");
                it.add(format!("{prefix}.up_proj.weight"), Dtype::BF16, &[4, 8]);
                it.add(format!("{prefix}.down_proj.weight"), Dtype::BF16, &[8, 4]);
            }
        }
        it
    }

    /// Writes one `model.safetensors`, and `config.json`.
    pub(crate) fn write_single(&self, dir: &Path, config: &str) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("config.json"), config).unwrap();
        write_shard(&dir.join("model.safetensors"), self.0.iter());
    }

    /// Writes `shards` files, dealing the tensors out in turn, an index, and `config.json`.
    pub(crate) fn write_sharded(&self, dir: &Path, config: &str, shards: usize) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("config.json"), config).unwrap();
        let mut map = serde_json::Map::new();
        for shard in 0..shards {
            let name = shard_name(shard, shards);
            let mine = || self.0.iter().skip(shard).step_by(shards);
            map.extend(mine().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
            write_shard(&dir.join(name), mine());
        }
        write_index(dir, &map);
    }
}

pub(crate) fn shard_name(shard: usize, shards: usize) -> String {
    format!("model-{:05}-of-{shards:05}.safetensors", shard + 1)
}

pub(crate) fn read_index(dir: &Path) -> serde_json::Map<String, serde_json::Value> {
    let text = fs::read(dir.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&text).unwrap();
    index["weight_map"].as_object().unwrap().clone()
}

pub(crate) fn write_index(dir: &Path, map: &serde_json::Map<String, serde_json::Value>) {
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

pub(crate) fn write_shard<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a String, &'a Tensor)>,
) {
    let views = tensors.map(|(name, t)| {
        (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("a sound tensor"))
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Writes a shard from a header's text, true or not.
pub(crate) fn write_raw_shard(path: &Path, header: &str, data: &[u8]) {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    fs::write(path, file).unwrap();
}

fn crc(bytes: &[u8]) -> u32 {
    bytes.iter().fold(17, |hash: u32, &b| hash.wrapping_mul(31).wrapping_add(u32::from(b)))
}
