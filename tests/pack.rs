//! Packed bytes against the `safetensors` crate's own reader.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use expert_tier::pack::{self, PackOptions, Source, Unfinished};
use expert_tier::store::ExpertStore;
use expert_tier::store::verify::RecordReader;
use rustix::process::Signal;
use safetensors::Dtype;
use support::{Checkpoint, Tensor, checkpoints, pack, succeed};

/// A tensor of an expert: layer, expert, name in the checkpoint.
type Name = (u32, u32, String);

/// Dtype, shape and bytes.
type Content = (String, Vec<u64>, Vec<u8>);

/// Every tensor in a store.
fn packed(store: &Path) -> BTreeMap<Name, Content> {
    let store = ExpertStore::open(store).unwrap();
    let mut found = BTreeMap::new();
    for key in store.manifest().layout().keys() {
        let layer = store.manifest().layout().locate(key).unwrap();
        let record = RecordReader::open(&store, key).unwrap();
        for tensor in layer.spec().tensors() {
            let mut bytes = Vec::new();
            let sink = |part: &[u8]| {
                bytes.extend_from_slice(part);
                Ok(())
            };
            record.read(tensor.offset, tensor.bytes, sink).unwrap();
            let name = (key.layer, key.expert, layer.checkpoint_name(tensor, key.expert));
            let content = (tensor.dtype.to_string(), tensor.shape.clone(), bytes);
            assert_eq!(found.insert(name, content), None);
        }
    }
    found
}

/// Every routed expert's tensors under `prefix`, cut here and not by the packer.
fn routed(checkpoint: &Checkpoint, prefix: &str) -> BTreeMap<Name, Content> {
    let mut found = BTreeMap::new();
    for (name, tensor) in &checkpoint.0 {
        let Some(rest) = name.strip_prefix(prefix) else { continue };
        let fused_linear =
            rest.contains(".block_sparse_moe.input_linear.") || rest.contains(".output_linear.");
        if !rest.contains(".experts.") && !fused_linear {
            continue;
        }
        let layer: u32 = rest.split('.').next().unwrap().parse().unwrap();
        let expert = rest.split(".experts.").nth(1).and_then(|tail| tail.split('.').next());
        if let Some(expert) = expert.and_then(|text| text.parse().ok()) {
            found
                .insert((layer, expert, name.clone()), content(tensor, tensor.shape.clone(), None));
            continue;
        }
        for expert in 0..tensor.shape[0] {
            let key = (layer, expert as u32, name.clone());
            found.insert(key, content(tensor, tensor.shape[1..].to_vec(), Some(expert)));
        }
    }
    found
}

fn content(tensor: &Tensor, shape: Vec<usize>, slice: Option<usize>) -> Content {
    let bytes = match slice {
        None => tensor.bytes.clone(),
        Some(slice) => {
            let length = tensor.bytes.len() / tensor.shape[0];
            tensor.bytes[slice * length..][..length].to_vec()
        }
    };
    (tensor.dtype.to_string(), shape.into_iter().map(|dim| dim as u64).collect(), bytes)
}

/// Compares maps without printing megabytes.
fn assert_same(found: &BTreeMap<Name, Content>, expected: &BTreeMap<Name, Content>, what: &str) {
    assert!(found.keys().eq(expected.keys()), "{what}: other tensors than expected");
    for (name, content) in found {
        let wanted = &expected[name];
        assert_eq!((&content.0, &content.1), (&wanted.0, &wanted.1), "{what}: {name:?}");
        assert!(content.2 == wanted.2, "{what}: the bytes of {name:?} differ");
    }
}

#[test]
fn every_routed_expert_tensor_of_every_checkpoint_is_packed_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = BTreeMap::new();
    for path in checkpoints() {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let store = dir.path().join(&name);
        let summary = pack(&path, &store);
        let expected = routed(&Checkpoint::read(&path), "model.layers.");
        assert_same(&packed(&store), &expected, &name);
        assert_eq!(summary["left_dense"], serde_json::json!([]), "{name}");
        succeed(&["verify", store.to_str().unwrap()]);
        tensors.insert(name, expected.len());
    }
    let counts: Vec<_> = tensors.iter().map(|(name, &count)| (name.as_str(), count)).collect();
    // Layers x experts x tensors of each, counted from the checkpoints by hand.
    assert_eq!(
        counts,
        [
            ("deepseek_v3", 2 * 8 * 3),
            ("deepseek_v3_fp8", 2 * 8 * 6),
            ("gpt_oss", 3 * 8 * 4),
            ("gpt_oss_mxfp4", 3 * 8 * 6),
            ("granitemoe", 3 * 8 * 2),
            ("kjv-moe", 6 * 32 * 3),
            ("llama4", 3 * 4 * 2),
            ("mixtral", 3 * 8 * 3),
            ("olmoe", 3 * 8 * 3),
            ("qwen2_moe", 3 * 8 * 3),
            ("qwen3_moe", 3 * 8 * 3),
        ]
    );
}

/// Quantised and mixed layers of different sizes, a second tree, dense layers between.
fn varied() -> Checkpoint {
    let mut it = Checkpoint::default();
    let layers = "language_model.model.layers";
    it.add("language_model.model.embed_tokens.weight", Dtype::BF16, &[16, 4]);
    for layer in [0, 50, 102] {
        it.add(format!("{layers}.{layer}.mlp.up_proj.weight"), Dtype::BF16, &[8, 4]);
    }
    for expert in 0..4 {
        let up = format!("{layers}.1.mlp.experts.{expert}.up_proj");
        it.add(format!("{up}.qweight"), Dtype::I32, &[2, 6]);
        it.add(format!("{up}.scales"), Dtype::F16, &[1, 6]);
        it.add(format!("{up}.qzeros"), Dtype::I32, &[1, 1]);
        it.add(format!("{up}.g_idx"), Dtype::I32, &[8]);
        it.add(format!("{up}.input_scale"), Dtype::F32, &[]);
        it.add(format!("{up}.bias"), Dtype::F16, &[6]);
        it.add(format!("{layers}.1.mlp.experts.{expert}.down_proj.weight"), Dtype::F4, &[5, 6]);
        it.add(
            format!("{layers}.1.mlp.experts.{expert}.down_proj.weight_scale"),
            Dtype::F8_E8M0,
            &[5],
        );
    }
    it.add(format!("{layers}.1.mlp.shared_experts.up_proj.weight"), Dtype::BF16, &[4, 4]);
    it.add(format!("{layers}.1.mlp.gate.weight"), Dtype::BF16, &[4, 4]);
    it.add(format!("{layers}.2.ffn.experts.gate_up_proj"), Dtype::F8_E4M3, &[2, 8, 6]);
    it.add(format!("{layers}.2.ffn.experts.gate_up_proj_scale"), Dtype::F32, &[2]);
    it.add(format!("{layers}.2.ffn.experts.down_proj_bias"), Dtype::F64, &[2, 3]);
    for expert in 0..12 {
        it.add(format!("{layers}.101.mlp.experts.{expert}.w1.weight"), Dtype::F32, &[3, 300]);
    }
    it.add(format!("{layers}.101.mlp.experts.w2"), Dtype::I8, &[12, 5, 7]);
    for expert in 0..2 {
        it.add(format!("mtp.layers.0.mlp.experts.{expert}.w1.weight"), Dtype::F32, &[3]);
    }
    it.add("mtp.layers.3.mlp.experts.w1", Dtype::F32, &[3]);
    it
}

const NO_COUNT: &str = r#"{"model_type": "varied", "num_experts_per_tok": 2}"#;

#[test]
fn quantised_mixed_and_uneven_layers_are_packed_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = varied();
    checkpoint.write_single(&dir.path().join("checkpoint"), NO_COUNT);
    let store = dir.path().join("store");
    let summary = pack(&dir.path().join("checkpoint"), &store);
    let expected = routed(&checkpoint, "language_model.model.layers.");
    assert_same(&packed(&store), &expected, "varied");
    assert_eq!(summary["left_dense"], serde_json::json!(["mtp.layers.0", "mtp.layers.3"]));
    assert_eq!(summary["records"], 4 + 2 + 12);
    succeed(&["verify", store.to_str().unwrap()]);
}

/// A checkpoint with one MoE layer of experts, and of each kind of tensor that stays dense.
fn with_others() -> Checkpoint {
    let mut it = Checkpoint::small(4);
    for expert in 0..2 {
        it.add(format!("mtp.0.ffn.experts.{expert}.w1.weight"), Dtype::F32, &[3]);
        for layer in [1, 10] {
            let chunk = format!("model.layers.{layer}.mlp.chunk_experts.{expert}.w1");
            it.add(chunk, Dtype::BF16, &[2, 2]);
        }
    }
    it.add("mtp.0.ffn.experts.router.weight", Dtype::F32, &[2, 3]);
    it.add("model.layers.1.mlp.experts.router.weight", Dtype::BF16, &[4, 8]);
    it.add("model.layers.1.mlp.shared_experts.0.up_proj.weight", Dtype::F4, &[4, 8]);
    it
}

#[test]
fn routed_experts_that_stay_dense_are_named_and_every_dense_tensor_is_listed() {
    let dir = tempfile::tempdir().unwrap();
    let (input, store) = (dir.path().join("input"), dir.path().join("store"));
    let checkpoint = with_others();
    checkpoint.write_sharded(&input, r#"{"num_experts": 4}"#, 3);
    let list = dir.path().join("dense.jsonl");
    let args = ["pack", "--checkpoint", input.to_str().unwrap(), "--list-dense"];
    let args = [&args[..], &[list.to_str().unwrap()]].concat();
    let dry = succeed(&[&args[..], &["--dry-run", "--json"]].concat());
    let dry: serde_json::Value = serde_json::from_slice(&dry).unwrap();
    let planned = std::fs::read_to_string(&list).unwrap();
    let text = succeed(&[&args[..], &["--out", store.to_str().unwrap()]].concat());
    let text = String::from_utf8(text).unwrap();
    let chunks = [1, 10].map(|layer| format!("model.layers.{layer}.mlp.chunk_experts"));
    assert_eq!(dry["left_dense"], serde_json::json!([chunks[0], chunks[1], "mtp.0"]));
    let named = format!(
        "routed experts left among the dense weights: {}, {}, mtp.0\n",
        chunks[0], chunks[1]
    );
    assert!(text.contains(&named), "{text}");

    let stored = packed(&store);
    let mut expected: BTreeMap<String, serde_json::Value> = BTreeMap::new();
    let index = support::read_index(&input);
    for (name, tensor) in &checkpoint.0 {
        if stored.keys().any(|(_, _, packed)| packed == name) {
            continue;
        }
        let line = serde_json::json!({"name": name, "dtype": tensor.dtype.to_string(),
            "shape": tensor.shape, "bytes": tensor.bytes.len(), "shard": index[name]});
        expected.insert(name.clone(), line);
    }
    let lines = std::fs::read_to_string(&list).unwrap();
    assert_eq!(lines, planned);
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap());
    let found: BTreeMap<String, serde_json::Value> = lines
        .map(|line: serde_json::Value| (line["name"].as_str().unwrap().to_owned(), line))
        .collect();
    assert_eq!(found, expected);
    assert!(found.contains_key("model.layers.1.mlp.experts.router.weight"));
    let absent = ["pack", "--synthetic", "layers=1,experts=1,bytes=1", "--list-dense", "x"];
    assert_eq!(support::run(&absent).status.code(), Some(2));
}

#[test]
fn one_scale_for_all_experts_is_in_every_record() {
    let dir = tempfile::tempdir().unwrap();
    let (input, store) = (dir.path().join("input"), dir.path().join("store"));
    let experts = "model.layers.0.feed_forward.experts";
    let mut checkpoint = Checkpoint::default();
    checkpoint.add(format!("{experts}.down_proj"), Dtype::F8_E4M3, &[4, 3, 2]);
    // More scales than matrices: the number of experts is not theirs.
    for (name, shape) in [("a", vec![]), ("b", vec![1]), ("c", vec![1, 1])] {
        checkpoint.add(format!("{experts}.down_proj_scale_{name}"), Dtype::F32, &shape);
    }
    for expert in 0..2 {
        checkpoint.add(format!("model.layers.1.mlp.experts.{expert}.w1"), Dtype::BF16, &[3]);
    }
    checkpoint.add("model.layers.1.mlp.experts.input_scale", Dtype::F32, &[]);
    checkpoint.write_single(&input, "{}");
    pack(&input, &store);
    succeed(&["verify", store.to_str().unwrap()]);
    let stored = packed(&store);
    assert_eq!(stored.len(), 4 * 4 + 2 * 2);
    for ((_, _, name), (_, shape, bytes)) in
        stored.iter().filter(|((.., n), _)| n.contains("scale"))
    {
        let tensor = &checkpoint.0[name];
        assert_eq!((shape.len(), bytes), (tensor.shape.len(), &tensor.bytes), "{name}");
    }
}

#[test]
fn files_that_macos_writes_beside_others_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let double = [&b"\0\x05\x16\x07\0\x02\0\0Mac OS X        "[..], &[0; 4072]].concat();
    let checkpoint = Checkpoint::small(4);
    for (name, shards) in [("single", 0), ("sharded", 3)] {
        let input = dir.path().join(name);
        match shards {
            0 => checkpoint.write_single(&input, r#"{"num_experts": 4}"#),
            shards => checkpoint.write_sharded(&input, r#"{"num_experts": 4}"#, shards),
        }
        let names: Vec<_> =
            std::fs::read_dir(&input).unwrap().map(|e| e.unwrap().file_name()).collect();
        for of in names {
            std::fs::write(input.join(format!("._{}", of.to_str().unwrap())), &double).unwrap();
        }
        std::fs::write(input.join("._gone.safetensors"), &double).unwrap();
        std::fs::write(input.join(".DS_Store"), b"\0\0\0\x01Bud1").unwrap();
        if shards == 0 {
            // One shard of another name, which is found by looking at all there are.
            std::fs::rename(input.join("model.safetensors"), input.join("weights.safetensors"))
                .unwrap();
        }
        let out = dir.path().join(format!("store-{name}"));
        let args =
            ["pack", "--checkpoint", input.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let output = support::run(&args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.contains("AppleDouble"), "{said}");
    }
}

#[test]
fn one_fingerprint_however_the_tensors_are_sharded_and_how_many_threads_pack() {
    let dir = tempfile::tempdir().unwrap();
    let (input, checkpoint) = (dir.path().join("input"), varied());
    let mut fingerprints = Vec::new();
    for shards in [0, 1, 3, 200] {
        let _ = std::fs::remove_dir_all(&input);
        match shards {
            0 => checkpoint.write_single(&input, NO_COUNT),
            shards => checkpoint.write_sharded(&input, NO_COUNT, shards),
        }
        for workers in ["1", "7"] {
            let out = dir.path().join(format!("store-{shards}-{workers}"));
            let (input, out) = (input.to_str().unwrap(), out.to_str().unwrap());
            let args =
                ["pack", "--checkpoint", input, "--out", out, "--workers", workers, "--json"];
            let summary: serde_json::Value = serde_json::from_slice(&succeed(&args)).unwrap();
            fingerprints.push(summary["fingerprint"].as_str().unwrap().to_string());
        }
    }
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), 1, "{fingerprints:?}");
    // Same shapes, one other byte: another store.
    let mut other = checkpoint;
    other.0.get_mut("language_model.model.layers.2.ffn.experts.gate_up_proj").unwrap().bytes[5] ^=
        1;
    let input = dir.path().join("other");
    other.write_single(&input, NO_COUNT);
    let summary = pack(&input, &dir.path().join("other-store"));
    assert_ne!(summary["fingerprint"], fingerprints[0].as_str());
}

#[test]
fn control_characters_of_names_are_shown_escaped_and_packed_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let (input, store) = (dir.path().join("input"), dir.path().join("store"));
    let name = "model.\u{9b}\u{1b}[2J.layers.0.\n\r.experts.0.w\u{7f}";
    let mut checkpoint = Checkpoint::default();
    checkpoint.add(name, Dtype::U8, &[7]);
    checkpoint.write_single(&input, r#"{"model_type": "\u001b]0;evil\u0007"}"#);
    let (input, store) = (input.to_str().unwrap(), store.to_str().unwrap());
    let extract = ["extract", store, "--layer", "0", "--expert", "0"];
    for args in [
        &["pack", "--checkpoint", input, "--dry-run"][..],
        &["pack", "--checkpoint", input, "--out", store],
        &["inspect", store],
        &["inspect", store, "--json"],
        &extract,
    ] {
        let text = String::from_utf8(succeed(args)).unwrap();
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{args:?}: {text:?}");
    }
    let report: serde_json::Value =
        serde_json::from_slice(&succeed(&["inspect", store, "--json"])).unwrap();
    assert_eq!(report["layers"][0]["tensors"][0]["name"], "\n\r.experts.*.w\u{7f}");
    let listed = String::from_utf8(succeed(&extract)).unwrap();
    assert_eq!(listed.lines().count(), 1, "{listed}");
    let shown = listed.split(' ').next().unwrap();
    for wanted in [name, shown] {
        let bytes = succeed(&[&extract[..], &["--tensor", wanted]].concat());
        assert_eq!(bytes, checkpoint.0[name].bytes);
    }
    let error = support::fail(&[&extract[..], &["--tensor", "other"]].concat());
    assert!(error.contains("\\u{1b}[2J") && !error.contains('\u{1b}'), "{error}");
}

#[test]
fn extract_writes_what_the_checkpoint_has_under_the_checkpoints_names() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = varied();
    checkpoint.write_single(&dir.path().join("checkpoint"), NO_COUNT);
    let store = dir.path().join("store");
    pack(&dir.path().join("checkpoint"), &store);
    let store = store.to_str().unwrap();
    let extract = |layer: &str, expert: &str, tensor: &str| {
        succeed(&["extract", store, "--layer", layer, "--expert", expert, "--tensor", tensor])
    };
    let list = succeed(&["extract", store, "--layer", "1", "--expert", "3"]);
    let list = String::from_utf8(list).unwrap();
    let prefix = "language_model.model.layers.1.mlp.experts.3";
    assert!(list.contains(&format!("{prefix}.down_proj.weight F4 [5,6] 15\n")), "{list}");
    assert!(list.contains(&format!("{prefix}.up_proj.input_scale F32 [] 4\n")), "{list}");
    assert_eq!(list.lines().count(), 8);
    for line in list.lines() {
        let name = line.split(' ').next().unwrap();
        assert!(extract("1", "3", name) == checkpoint.0[name].bytes, "{name}");
    }
    let fused = "language_model.model.layers.2.ffn.experts.gate_up_proj";
    assert!(extract("2", "1", fused) == checkpoint.0[fused].bytes[48..]);
    let error =
        support::fail(&["extract", store, "--layer", "2", "--expert", "1", "--tensor", "x"]);
    assert!(error.contains("has no tensor x, it has") && error.contains(fused), "{error}");
    let error = support::fail(&["extract", store, "--layer", "50", "--expert", "1"]);
    assert!(error.contains("no MoE layer 50, its layers are 1-2, 101"), "{error}");
}

#[test]
fn a_dry_run_says_what_would_be_packed_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    let (input, out) = (support::testdata("kjv-moe"), out.to_str().unwrap());
    let input = input.to_str().unwrap();
    let args = ["pack", "--checkpoint", input, "--out", out, "--dry-run", "--json"];
    let summary: serde_json::Value = serde_json::from_slice(&succeed(&args)).unwrap();
    assert_eq!((&summary["records"], &summary["layers"]), (&192.into(), &6.into()));
    assert!(summary["fingerprint"].is_null());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let packed = pack(Path::new(input), Path::new(out));
    assert_eq!((&packed["records"], &packed["bytes"]), (&summary["records"], &summary["bytes"]));
}

#[test]
fn inspect_lists_every_tensor_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    pack(&support::testdata("checkpoints/qwen3_moe"), &store);
    let store = store.to_str().unwrap();
    let report: serde_json::Value =
        serde_json::from_slice(&succeed(&["inspect", store, "--json"])).unwrap();
    let layer = &report["layers"][2];
    assert_eq!((&report["version"], &layer["layer"]), (&1.into(), &2.into()));
    assert_eq!((&layer["experts"], &layer["stride"]), (&8.into(), &16384.into()));
    assert_eq!(layer["payload_bytes"], 12288);
    let expected = serde_json::json!({"name": "mlp.experts.*.gate_proj.weight", "dtype": "BF16",
        "shape": [32, 64], "offset": 4096, "bytes": 4096});
    assert_eq!(layer["tensors"][1], expected);
    let table = String::from_utf8(succeed(&["inspect", store])).unwrap();
    assert!(table.contains("layers 0 to 2: 8 experts, 12288 bytes"), "{table}");
}

#[test]
fn synthetic_stores_have_the_bytes_that_their_description_gives_them() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let text = "layers=3,experts=5,bytes=1000000/70001,seed=9";
    succeed(&["pack", "--synthetic", text, "--out", store.to_str().unwrap()]);
    let spec: pack::SyntheticSpec = text.parse().unwrap();
    for ((layer, expert, name), (dtype, shape, bytes)) in packed(&store) {
        let key = expert_tier::key::ExpertKey::new(layer, expert);
        assert!(bytes == spec.payload(key), "{key}");
        assert_eq!((dtype.as_str(), shape), ("U8", vec![[1_000_000, 70_001][layer as usize % 2]]));
        assert_eq!(name, format!("model.layers.{layer}.mlp.experts.{expert}.weight"));
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let store = store.to_str().unwrap();
    succeed(&["pack", "--synthetic", "layers=1,experts=1,bytes=4000000", "--out", store]);
    let tensor = "model.layers.0.mlp.experts.0.weight";
    let args = ["extract", store, "--layer", "0", "--expert", "0", "--tensor", tensor];
    let mut child = support::metrale()
        .args(args)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// What lies beside a store that is not there.
fn staged_beside(out: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(out.parent().unwrap()).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_str().unwrap().contains(".store.partial-")).collect()
}

/// A checkpoint of `layers` layers whose records a pack does not write in one go, and its plan.
fn resumable(dir: &Path, layers: u32) -> (Checkpoint, pack::PackPlan) {
    let mut checkpoint = Checkpoint::default();
    for layer in 0..layers {
        for expert in 0..3 {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.w1");
            checkpoint.add(name, Dtype::U8, &[100, 1000]);
        }
    }
    checkpoint.write_sharded(dir, "{}", 2);
    let plan = plan_of(dir, Unfinished::Keep);
    (checkpoint, plan)
}

fn plan_of(dir: &Path, unfinished: Unfinished) -> pack::PackPlan {
    let workers = NonZeroUsize::new(1);
    let options = PackOptions { workers, unfinished, ..PackOptions::default() };
    pack::plan(&Source::Checkpoint(dir.into()), &options).unwrap()
}

/// Packs `plan` until `records` of its records have been written, and is then interrupted.
fn interrupt_after(plan: &pack::PackPlan, out: &Path, records: u64) -> String {
    let (stop, left) = (AtomicBool::new(false), AtomicU64::new(records));
    let progress = |_| {
        if left.fetch_sub(1, Ordering::Relaxed) == 1 {
            stop.store(true, Ordering::Relaxed);
        }
    };
    pack::run_until(plan, out, &progress, &stop).unwrap_err().to_string()
}

fn fingerprint_of_whole(input: &Path, dir: &Path) -> String {
    let summary = pack::run(&plan_of(input, Unfinished::Remove), dir, &|_| {}).unwrap();
    summary.fingerprint.unwrap().to_string()
}

#[test]
fn an_interrupted_pack_is_resumed_without_the_records_that_it_had_packed() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("input"), dir.path().join("store"));
    let (_, plan) = resumable(&input, 4);
    let stride = plan.store_bytes() / 12;
    let error = interrupt_after(&plan, &out, 7);
    let [staging] = &staged_beside(&out)[..] else { panic!("{error}") };
    let named = format!("kept in {}", staging.display());
    assert!(error.contains("interrupted") && error.contains(&named), "{error}");
    assert!(error.contains("--resume"), "{error}");
    // Two layers are whole; of the third a record was written and not noted.
    let summary = pack::run(&plan, &out, &|_| {}).unwrap();
    assert_eq!(summary.resumed_bytes, 6 * stride);
    let whole = fingerprint_of_whole(&input, &dir.path().join("whole"));
    assert_eq!(summary.fingerprint.unwrap().to_string(), whole);
    succeed(&["verify", out.to_str().unwrap()]);
    assert_eq!(staged_beside(&out), Vec::<PathBuf>::new());
    let layers = (0..4).map(|n| format!("layer-{n:05}.records"));
    let expected: BTreeSet<_> = layers.chain(["manifest.json".to_owned()]).collect();
    let found = std::fs::read_dir(&out).unwrap();
    let found: BTreeSet<_> = found.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_staged_record_that_is_damaged_is_packed_again() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("input"), dir.path().join("store"));
    let (_, plan) = resumable(&input, 4);
    let stride = plan.store_bytes() / 12;
    interrupt_after(&plan, &out, 7);
    let staging = staged_beside(&out).remove(0);
    // A byte of a payload, one of the padding behind another, a file cut, and a torn journal.
    let layer = |n: u32| staging.join(format!("layer-{n:05}.records"));
    let flip = |at: u64| {
        let file = std::fs::File::options().read(true).write(true).open(layer(0)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    };
    flip(300);
    flip(2 * stride - 1);
    let file = std::fs::File::options().write(true).open(layer(1)).unwrap();
    file.set_len(2 * stride + 5000).unwrap();
    let journal = staging.join("pack-journal");
    let text = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, [&text[..], b"{\"layer\": 3, \"expe"].concat()).unwrap();
    std::fs::write(staging.join("manifest.json"), "{}").unwrap();
    let summary = pack::run(&plan, &out, &|_| {}).unwrap();
    assert_eq!(summary.resumed_bytes, 3 * stride);
    let whole = fingerprint_of_whole(&input, &dir.path().join("whole"));
    assert_eq!(summary.fingerprint.unwrap().to_string(), whole);
    succeed(&["verify", out.to_str().unwrap()]);
}

#[test]
fn a_source_that_changed_starts_a_resumed_pack_over_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("input"), dir.path().join("store"));
    let (mut checkpoint, plan) = resumable(&input, 4);
    interrupt_after(&plan, &out, 7);
    let changed = "model.layers.0.mlp.experts.0.w1";
    checkpoint.0.get_mut(changed).unwrap().bytes[9] ^= 1;
    let shard = support::read_index(&input)[changed].as_str().unwrap().to_owned();
    checkpoint.write_sharded(&input, "{}", 2);
    let (input_text, out_text) = (input.to_str().unwrap(), out.to_str().unwrap());
    let args = ["pack", "--checkpoint", input_text, "--out", out_text, "--json", "--resume"];
    let output = support::run(&args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("starting over") && said.contains(&shard), "{said}");
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["resumed_bytes"], 0);
    let whole = fingerprint_of_whole(&input, &dir.path().join("whole"));
    assert_eq!(summary["fingerprint"], whole.as_str());
    assert_eq!(staged_beside(&out), Vec::<PathBuf>::new());
}

#[test]
fn a_pack_without_resume_leaves_nothing_and_takes_over_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("input"), dir.path().join("store"));
    let (_, plan) = resumable(&input, 4);
    interrupt_after(&plan_of(&input, Unfinished::Remove), &out, 7);
    assert_eq!(staged_beside(&out), Vec::<PathBuf>::new());
    interrupt_after(&plan, &out, 7);
    interrupt_after(&plan, &out, 2);
    assert_eq!(staged_beside(&out).len(), 1, "what was kept is taken over and kept again");
    let summary = pack::run(&plan_of(&input, Unfinished::Remove), &out, &|_| {}).unwrap();
    assert_eq!(summary.resumed_bytes, 0);
    assert_eq!(staged_beside(&out), Vec::<PathBuf>::new());
}

/// Starts a pack of `input`, ends it with `signal` as soon as it has staged something, and returns
/// what it said.
fn pack_and_signal(input: &Path, out: &Path, signal: Signal, more: &[&str]) -> String {
    let args = ["pack", "--checkpoint", input.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let mut child = support::metrale()
        .args([&args[..], more].concat())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let written = |path: &PathBuf| path.join("layer-00000.records").exists();
    while !staged_beside(out).iter().any(written) {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        std::thread::yield_now();
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn every_signal_that_ends_a_pack_leaves_nothing_or_with_resume_what_was_packed() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("input"), dir.path().join("store"));
    let mut checkpoint = Checkpoint::default();
    for layer in 0..40 {
        let name = format!("model.layers.{layer}.mlp.experts.w1");
        checkpoint.add(name, Dtype::U8, &[4, 1_000_000]);
    }
    checkpoint.write_single(&input, "{}");
    for signal in [Signal::HUP, Signal::TERM, Signal::INT, Signal::QUIT, Signal::XCPU] {
        let said = pack_and_signal(&input, &out, signal, &[]);
        assert!(said.contains("interrupted"), "{signal:?}: {said}");
        assert_eq!(staged_beside(&out), Vec::<PathBuf>::new(), "{signal:?}");
        let said = pack_and_signal(&input, &out, signal, &["--resume"]);
        let [staging] = &staged_beside(&out)[..] else { panic!("{signal:?}: {said}") };
        assert!(said.contains(&format!("kept in {}", staging.display())), "{signal:?}: {said}");
        // So that the next one is seen to have begun by its own.
        std::fs::remove_dir_all(staging).unwrap();
    }
    // A pack that is killed cannot remove anything; the next one to the same place does.
    pack_and_signal(&input, &out, Signal::KILL, &[]);
    assert_eq!(staged_beside(&out).len(), 1);
    pack(&input, &out);
    assert_eq!(staged_beside(&out), Vec::<PathBuf>::new());
}

#[test]
fn a_disk_that_gets_full_keeps_what_was_packed_with_resume() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("store");
    let run = |limit: &str, more: &str| {
        let program = env!("CARGO_BIN_EXE_metrale");
        let pack = format!(
            "{limit} exec {program} pack --synthetic layers=2,experts=4,bytes=1000000/3000000 \
             --out {} --json {more}",
            out.display()
        );
        std::process::Command::new("sh").args(["-c", &pack]).output().unwrap()
    };
    // In blocks of 512 bytes: the second layer does not fit.
    let full = run("ulimit -f 12000;", "--resume");
    let said = String::from_utf8(full.stderr).unwrap();
    let [staging] = &staged_beside(&out)[..] else { panic!("{said}") };
    assert_eq!(full.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("kept in {}", staging.display())), "{said}");
    let done = run("", "--resume");
    assert!(done.status.success(), "{done:?}");
    succeed(&["verify", out.to_str().unwrap()]);
    std::fs::remove_dir_all(&out).unwrap();
    assert_eq!(run("ulimit -f 12000;", "").status.code(), Some(1));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Kills a pack at a random moment of its life until it comes through; each time the next one goes
/// on with what the last has left. The moments are random, and the seeds are not.
#[test]
fn a_pack_that_is_killed_at_random_moments_has_the_fingerprint_of_one_that_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("input");
    let mut checkpoint = Checkpoint::default();
    for layer in 0..12 {
        for expert in 0..2 {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.w1");
            checkpoint.add(name, Dtype::U8, &[1_000_000]);
        }
        checkpoint.add(format!("model.layers.{layer}.mlp.experts.w2"), Dtype::U8, &[2, 300_000]);
    }
    checkpoint.write_sharded(&input, "{}", 3);
    let start = |out: &Path| {
        let args = ["pack", "--resume", "--json", "--workers", "2", "--checkpoint"];
        let paths = [input.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let mut command = support::metrale();
        command.args([&args[..], &paths].concat()).stderr(std::process::Stdio::null());
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let began = std::time::Instant::now();
    let whole = start(&dir.path().join("whole")).wait_with_output().unwrap();
    let life = began.elapsed();
    let whole: serde_json::Value = serde_json::from_slice(&whole.stdout).unwrap();
    let (mut kills, mut resumed) = (0, 0);
    for seed in 1..=20_u64 {
        let out = dir.path().join(format!("{seed}/store"));
        let mut random = seed;
        while !out.exists() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
            let part = (random >> 33) as f64 / f64::from(u32::MAX >> 1);
            let mut child = start(&out);
            // Not to wait for anything: the pack has to be right wherever this falls.
            std::thread::sleep(life.mul_f64(part * 1.2));
            if child.try_wait().unwrap().is_none() {
                child.kill().unwrap();
                kills += 1;
            }
            let output = child.wait_with_output().unwrap();
            assert_ne!(output.status.code(), Some(1), "only a kill ends it: {output:?}");
            if let Ok(summary) = serde_json::from_slice::<serde_json::Value>(&output.stdout) {
                assert_eq!(summary["fingerprint"], whole["fingerprint"], "seed {seed}");
                resumed += u32::from(summary["resumed_bytes"].as_u64() > Some(0));
            }
        }
        let store = ExpertStore::open(&out).unwrap();
        let found = store.manifest().fingerprint().to_string();
        assert_eq!(whole["fingerprint"], found.as_str(), "seed {seed}");
        succeed(&["verify", out.to_str().unwrap()]);
        assert_eq!(std::fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "seed {seed}");
    }
    assert!(kills > 0 && resumed > 0, "{kills} kills, {resumed} of 20 packs went on");
}
