//! Checkpoints that must not be packed: the error names what is wrong, and nothing is left.

mod support;

use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use expert_tier::pack::{self, PackOptions, Source};
use safetensors::Dtype;
use serde_json::json;
use support::{
    Checkpoint, read_index, refuse, shard_name, write_index, write_raw_shard, write_shard,
};

const CONFIG: &str = r#"{"model_type": "small", "num_experts": 4, "num_experts_per_tok": 2}"#;
const UP_3: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
/// The tensor that is read last.
const LAST: &str = "model.layers.2.mlp.experts.3.up_proj.weight";

struct Case {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Case {
    /// A sound checkpoint in three shards.
    fn sharded() -> Self {
        Self::new(|path| Checkpoint::small(4).write_sharded(path, CONFIG, 3))
    }

    /// One file, with a change.
    fn single(config: &str, change: impl FnOnce(&mut Checkpoint)) -> Self {
        let mut checkpoint = Checkpoint::small(4);
        change(&mut checkpoint);
        Self::new(|path| checkpoint.write_single(path, config))
    }

    /// One shard from a header's text.
    fn raw(header: &serde_json::Value, data: usize) -> Self {
        Self::raw_text(&header.to_string(), data)
    }

    fn raw_text(header: &str, data: usize) -> Self {
        Self::new(|path| {
            fs::create_dir(path).unwrap();
            fs::write(path.join("config.json"), "{}").unwrap();
            write_raw_shard(&path.join("model.safetensors"), header, &vec![7; data]);
        })
    }

    fn new(write: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint");
        write(&path);
        Self { _dir: dir, path }
    }

    /// Packing fails, and every one of `named` is in the message.
    #[track_caller]
    fn is_refused(&self, named: &[&str]) {
        let error = refuse(&self.path);
        for name in named {
            assert!(error.contains(name), "{name:?} is not in: {error}");
        }
    }
}

#[test]
fn a_sound_checkpoint_is_not_refused() {
    let case = Case::sharded();
    let out = case.path.with_file_name("store");
    assert_eq!(support::pack(&case.path, &out)["records"], 8);
}

#[test]
fn an_absent_shard_is_named_with_a_tensor_of_it_even_if_it_holds_dense_weights_only() {
    for tensor in [UP_3, "model.embed_tokens.weight"] {
        let case = Case::sharded();
        let mut index = read_index(&case.path);
        index.insert(tensor.into(), "model-00009-of-00009.safetensors".into());
        write_index(&case.path, &index);
        case.is_refused(&["model-00009-of-00009.safetensors is absent", tensor]);
    }
    let case = Case::sharded();
    fs::remove_file(case.path.join(shard_name(1, 3))).unwrap();
    case.is_refused(&["model-00002-of-00003.safetensors is absent", "model."]);
}

#[test]
fn a_truncated_shard_is_named_with_both_lengths() {
    let case = Case::sharded();
    let shard = case.path.join(shard_name(2, 3));
    let whole = fs::read(&shard).unwrap();
    for length in [whole.len() - 1, 100, 9, 3] {
        fs::write(&shard, &whole[..length]).unwrap();
        let found = format!("model-00003-of-00003.safetensors has {length} bytes");
        case.is_refused(&[&found, "truncated"]);
    }
    fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    case.is_refused(&[&format!("its header describes {}", whole.len())]);
    fs::write(&shard, [&whole[..], b"x"].concat()).unwrap();
    case.is_refused(&["bytes that no tensor owns", &format!("describes {}", whole.len())]);
}

/// A sound checkpoint that was written long ago, and what becomes of a pack of it during which
/// `change` is made to the shard with the last layer.
fn changed_while_packed(change: fn(&Path)) -> (String, usize) {
    let case = Case::sharded();
    let shard = case.path.join(read_index(&case.path)[LAST].as_str().unwrap());
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    let file = fs::File::options().write(true).open(&shard).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(old)).unwrap();
    let options = PackOptions { workers: NonZeroUsize::new(1), ..PackOptions::default() };
    let plan = pack::plan(&Source::Checkpoint(case.path.clone()), &options).unwrap();
    let out = case.path.with_file_name("out").join("store");
    let once = std::sync::Once::new();
    let outcome = pack::run(&plan, &out, &|_| once.call_once(|| change(&shard)));
    let error = outcome.expect_err("a mixture of two checkpoints").to_string();
    let name = shard.file_name().unwrap().to_str().unwrap();
    assert!(error.contains(&format!("shard {name} changed while it was packed")), "{error}");
    (error, fs::read_dir(out.parent().unwrap()).unwrap().count())
}

#[test]
fn a_shard_that_changes_during_the_pack_is_named_and_nothing_is_published() {
    let (error, left) = changed_while_packed(|path| {
        fs::write(path.with_extension("new"), fs::read(path).unwrap()).unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    });
    assert!(error.contains("it was replaced or removed") && left == 0, "{error}");
    // The same length: only its times tell.
    let (error, left) = changed_while_packed(|path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&[9; 8], fs::metadata(path).unwrap().len() - 8).unwrap();
    });
    assert!(error.contains("it was written to") && left == 0, "{error}");
    let (error, left) = changed_while_packed(|path| {
        let file = fs::File::options().append(true).open(path).unwrap();
        (&file).write_all(b"more").unwrap();
    });
    assert!(error.contains("its length changed") && left == 0, "{error}");
}

/// Packs a checkpoint during which `change` is made to a shard once, with its times as they were.
fn packed_while_inodes_move(change: fn(&mut Vec<u8>)) -> Result<(), String> {
    let case = Case::sharded();
    let shard = case.path.join(read_index(&case.path)[LAST].as_str().unwrap());
    let times = fs::metadata(&shard).unwrap();
    let times = fs::FileTimes::new().set_modified(times.modified().unwrap());
    let options = PackOptions { workers: NonZeroUsize::new(1), ..PackOptions::default() };
    let plan = pack::plan(&Source::Checkpoint(case.path.clone()), &options).unwrap();
    let out = case.path.with_file_name("store");
    let once = std::sync::Once::new();
    let replace = || {
        let mut bytes = fs::read(&shard).unwrap();
        change(&mut bytes);
        let copy = shard.with_extension("copy");
        fs::write(&copy, bytes).unwrap();
        fs::File::options().write(true).open(&copy).unwrap().set_times(times).unwrap();
        // The old file keeps a name, as on a file system that numbers files as it likes.
        fs::rename(&shard, shard.with_extension("old")).unwrap();
        fs::rename(&copy, &shard).unwrap();
    };
    let packed = pack::run(&plan, &out, &|_| once.call_once(replace)).map_err(|e| e.to_string());
    packed?;
    support::succeed(&["verify", out.to_str().unwrap()]);
    Ok(())
}

#[test]
fn a_shard_whose_inode_alone_changes_is_read_again_and_refused_only_for_other_bytes() {
    assert_eq!(packed_while_inodes_move(|_| {}), Ok(()));
    let last = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
    let error = packed_while_inodes_move(last).unwrap_err();
    assert!(error.contains("changed while it was packed"), "{error}");
    let header = |bytes: &mut Vec<u8>| {
        // The last key of the header, in which nothing else is.
        let at = bytes.windows(6).position(|text| text == b"layers").unwrap();
        bytes[at + 7] ^= 1;
    };
    let error = packed_while_inodes_move(header).unwrap_err();
    assert!(error.contains("changed while it was packed"), "{error}");
}

#[test]
fn a_duplicate_tensor_is_named_in_one_shard_and_across_shards() {
    let case = Case::sharded();
    let index = read_index(&case.path);
    let other = (0..3).map(|i| shard_name(i, 3)).find(|shard| index[UP_3] != shard.as_str());
    let other = other.unwrap();
    let mut checkpoint = Checkpoint::small(4);
    checkpoint.0.retain(|name, _| name == UP_3 || index[name] == other.as_str());
    write_shard(&case.path.join(&other), checkpoint.0.iter());
    case.is_refused(&["duplicate tensor", UP_3, &other, index[UP_3].as_str().unwrap()]);

    let entry = r#""a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}"#;
    Case::raw_text(&format!("{{{entry}, {entry}}}"), 4).is_refused(&["duplicate tensor a"]);
}

#[test]
fn what_an_expert_lacks_is_named_in_full() {
    let without =
        |name: &'static str| Case::single(CONFIG, move |c| assert!(c.0.remove(name).is_some()));
    without(UP_3).is_refused(&[&format!("{UP_3} is missing")]);
    let first = "model.layers.2.mlp.experts.0.down_proj.weight";
    without(first).is_refused(&[&format!("{first} is missing"), "experts.1.down_proj.weight"]);
    // A whole expert: a hole in the numbers.
    let hole = Case::single(CONFIG, |c| {
        c.0.retain(|name, _| !name.starts_with("model.layers.1.mlp.experts.2."));
    });
    hole.is_refused(&["model.layers.1.mlp.experts.2.down_proj.weight is missing"]);
    // What one expert has and its siblings have not.
    let extra = "model.layers.1.mlp.experts.3.up_proj.scale";
    let case = Case::single(CONFIG, |c| {
        let _ = c.add(extra, Dtype::F32, &[]);
    });
    case.is_refused(&["model.layers.1.mlp.experts.0.up_proj.scale is missing", extra]);
}

#[test]
fn siblings_of_another_type_or_shape_are_both_named() {
    let sibling = "model.layers.1.mlp.experts.0.up_proj.weight";
    for (dtype, shape) in [(Dtype::F16, vec![4, 8]), (Dtype::BF16, vec![8, 4])] {
        let case = Case::single(CONFIG, |c| {
            let _ = c.add(UP_3, dtype, &shape);
        });
        let found = format!("{UP_3} is {dtype} {shape:?}");
        case.is_refused(&[&found, sibling, "BF16 [4, 8]", "1 of the 4 experts of layer 1"]);
    }
}

#[test]
fn two_kinds_of_experts_in_a_layer_are_refused_with_what_they_would_need() {
    let case = Case::single(CONFIG, |c| {
        for expert in [2, 3] {
            let name = format!("model.layers.1.mlp.experts.{expert}.up_proj.weight");
            c.add(name, Dtype::BF16, &[2, 8]);
        }
    });
    let says = ["BF16 [2, 8]", "BF16 [4, 8]", "2 of the 4 experts of layer 1", "a layout each"];
    case.is_refused(&says);
}

#[test]
fn bitsandbytes_is_refused_by_name_with_what_to_pack_instead() {
    let case = Case::single(CONFIG, |c| {
        for expert in 0..4 {
            let weight = format!("model.layers.1.mlp.experts.{expert}.up_proj.weight");
            c.add(weight.clone(), Dtype::U8, &[16, 1]);
            c.add(format!("{weight}.absmax"), Dtype::U8, &[1]);
            c.add(format!("{weight}.quant_map"), Dtype::F32, &[16]);
            let state = format!("{weight}.quant_state.bitsandbytes__nf4");
            c.add(state, Dtype::U8, &[80 + expert]);
        }
    });
    case.is_refused(&["experts.0.up_proj.weight.quant", "bitsandbytes", "in another format"]);
}

#[test]
fn experts_outside_of_layers_are_refused_where_nothing_or_less_is_understood() {
    let outside = |c: &mut Checkpoint, stem: &str, blocks: std::ops::Range<u32>| {
        for name in blocks.map(|n| format!("{stem}{n}.ffn.experts.0.w1.weight")) {
            c.add(name, Dtype::BF16, &[4, 8]);
        }
    };
    let alone = Case::single("{}", |c| {
        c.0.retain(|name, _| !name.contains("experts"));
        outside(c, "mtp.", 0..1);
    });
    alone.is_refused(&["mtp.0.ffn.experts.0.w1.weight", "no `layers.<number>`"]);
    let most = Case::single(CONFIG, |c| outside(c, "transformer.blocks.", 0..3));
    most.is_refused(&["transformer.blocks.2.ffn.experts.0.w1", "more such layers than the 2"]);
    let other_name = Case::single(CONFIG, |c| {
        let names: Vec<_> = c.0.keys().filter(|name| name.contains("experts")).cloned().collect();
        for name in names {
            let tensor = c.0.remove(&name).unwrap();
            c.0.insert(name.replace("experts", "routed_experts"), tensor);
        }
    });
    other_name.is_refused(&["no expert tensors", "mlp.routed_experts.0.down_proj.weight"]);
}

#[test]
fn what_is_no_shard_or_config_is_named_for_what_it_is_with_what_to_do() {
    let pointer = &b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"[..];
    let page = &b"<!DOCTYPE html>\n<html><body>Sign in</body></html>"[..];
    let files = [
        (pointer, "Git LFS pointer", "git lfs pull"),
        (page, "web page", "download again"),
        (&b"PK\x03\x04\x14\0\0\0archive/data.pkl"[..], "zip archive", "convert"),
        (&b"\x80\x02}q\0."[..], "Python pickle", "runs code"),
        (&b"GGUF\x03\0\0\0\0\0\0\0"[..], "a GGUF file", "that it was made from"),
        (&b""[..], "empty", "again"),
        (&b"{\"error\": \"Invalid token\"}"[..], "begins", "without a token"),
        (&b"\0\x05\x16\x07\0\x02\0\0Mac OS X"[..], "AppleDouble", "delete it"),
    ];
    let case = Case::sharded();
    let shard = shard_name(1, 3);
    let index = "model.safetensors.index.json";
    for name in [shard.as_str(), "config.json", index] {
        let sound = fs::read(case.path.join(name)).unwrap();
        for (bytes, kind, advice) in files {
            fs::write(case.path.join(name), bytes).unwrap();
            match name == index && bytes.starts_with(b"{") {
                true => case.is_refused(&[name, "weight_map"]),
                false => case.is_refused(&[name, kind, advice, "expected"]),
            }
        }
        fs::write(case.path.join(name), sound).unwrap();
    }
    fs::write(case.path.join(&shard), fs::read(case.path.join(index)).unwrap()).unwrap();
    case.is_refused(&[&shard, "JSON text", "a safetensors shard"]);
    let dir = Case::new(|path| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("config.json"), CONFIG).unwrap();
    });
    for (name, advice) in [("pytorch_model-00001-of-00002.bin", "convert"), ("m.gguf", "made from")]
    {
        fs::write(dir.path.join(name), "x").unwrap();
        dir.is_refused(&["neither", name, advice]);
        fs::remove_file(dir.path.join(name)).unwrap();
    }
    fs::write(dir.path.join("model.gguf"), b"GGUF\x03\0\0\0").unwrap();
    let error = refuse(&dir.path.join("model.gguf"));
    assert!(error.contains("not a directory but a GGUF file"), "{error}");
}

#[test]
fn number_literals_of_python_stop_no_pack_except_where_a_count_belongs() {
    let literals = r#""time_step_limit": [0.0, Infinity], "a": {"b": [[NaN]], "c": -Infinity}"#;
    let case = Case::single(&format!("{{{literals}, {}", &CONFIG[1..]), |_| {});
    let finite = Case::single(CONFIG, |_| {});
    let fingerprint = |case: &Case| {
        support::pack(&case.path, &case.path.with_file_name("store"))["fingerprint"].clone()
    };
    assert_eq!(fingerprint(&case), fingerprint(&finite));
    Case::single(r#"{"num_experts": NaN}"#, |_| {}).is_refused(&["num_experts is \"NaN\""]);
    Case::single(r#"{"a": -NaN}"#, |_| {}).is_refused(&["config.json", "invalid number"]);
}

#[test]
fn a_config_that_disagrees_with_the_tensors_is_named_with_both_numbers() {
    for (config, key) in [
        (r#"{"num_experts": 8}"#, "num_experts = 8"),
        (r#"{"text_config": {"num_local_experts": 8}}"#, "text_config.num_local_experts = 8"),
        (r#"{"n_routed_experts": 8, "n_shared_experts": 4}"#, "n_routed_experts = 8"),
        (r#"{"moe_num_experts": [4, 8]}"#, "layer 2 has 4 experts"),
        (r#"{"num_experts": 2}"#, "num_experts = 2"),
    ] {
        Case::single(config, |_| {}).is_refused(&[key, "has 4 experts", "model.layers."]);
    }
    for (config, why) in [
        (r#"{"num_experts": "4"}"#, r#"config.json: num_experts is "4", expected"#),
        (r#"{"text_config": {"n_routed_experts": -1}}"#, "text_config.n_routed_experts is -1"),
        (r#"{"num_local_experts": [4, 4, null, 4]}"#, "neither per layer"),
    ] {
        let case = Case::single(config, |checkpoint| {
            for layer in [5, 7] {
                let name = format!("model.layers.{layer}.mlp.experts.w");
                checkpoint.add(name, Dtype::BF16, &[4, 2]);
            }
            checkpoint.0.retain(|name, _| !name.starts_with("model.layers.1."));
        });
        case.is_refused(&[why]);
    }
    Case::single(&format!("{{\"a\": \"{}\"}}", "x".repeat(4 << 20)), |_| {})
        .is_refused(&["config.json: longer than 4194304 bytes"]);
    let fused = |config: &str, dim| {
        Case::single(config, move |c| {
            c.0.retain(|name, _| !name.contains("experts"));
            c.add("model.layers.1.mlp.experts.w1", Dtype::BF16, &[4, 2]);
            c.add("model.layers.1.mlp.experts.w2", Dtype::BF16, &[dim, 2]);
        })
    };
    fused(r#"{"num_experts": 8}"#, 4).is_refused(&["num_experts = 8", "layer 1 has 4 experts"]);
    fused(CONFIG, 5).is_refused(&["experts.w2", "first dimension of 5", "4 experts"]);
    fused(r#"{"num_experts": 8}"#, 5).is_refused(&["not understood", "first dimension"]);
}

#[test]
fn a_dense_model_is_named_as_one() {
    let dense =
        |config: &str| Case::single(config, |c| c.0.retain(|name, _| !name.contains("experts")));
    dense("{}").is_refused(&["no expert tensors", "dense model"]);
    dense(CONFIG).is_refused(&["no expert tensors", "num_experts = 4", "no tensor is named"]);
}

#[test]
fn what_looks_like_an_expert_and_is_not_understood_is_named() {
    for (name, shape, why) in [
        ("model.layers.1.mlp.experts.expert_0.w1.weight", vec![4], "`expert_0` is not a number"),
        ("model.layers.1.mlp.experts.w1", vec![3, 4], "first dimension of 3"),
        ("model.layers.1.mlp.experts.01.up_proj.weight", vec![4, 8], "leading zero"),
        ("model.layers.1.mlp.experts.0.*.weight", vec![4, 8], "`*`"),
        ("model.layers.1.block_sparse_moe.input_linear.weight", vec![5, 8], "dimension of 5"),
    ] {
        let case = Case::single(CONFIG, |c| {
            let _ = c.add(name, Dtype::BF16, &shape);
        });
        case.is_refused(&[name, "not understood", why]);
    }
    let case = Case::single(CONFIG, |c| {
        let _ = c.add("model.layers.1.mlp.experts.packed", Dtype::F4, &[4, 3, 2, 1]);
        let _ = c.add("model.layers.1.mlp.experts.halves", Dtype::F4, &[4, 3]);
    });
    case.is_refused(&["model.layers.1.mlp.experts.halves", "no whole number of bytes"]);
}

#[test]
fn an_index_that_says_other_than_the_shards_is_refused() {
    let case = Case::sharded();
    let good = read_index(&case.path);
    let with = |tensor: &str, shard: &str| {
        let mut index = good.clone();
        index.insert(tensor.into(), shard.into());
        write_index(&case.path, &index);
        case.is_refused(&[tensor, shard]);
    };
    let other = |tensor: &str| match good[tensor] == shard_name(0, 3).as_str() {
        true => shard_name(1, 3),
        false => shard_name(0, 3),
    };
    with(UP_3, &other(UP_3));
    with("model.norm.weight", &shard_name(0, 3));
    with(UP_3, "../model-00001-of-00003.safetensors");
    with(UP_3, "");
    let index = case.path.join("model.safetensors.index.json");
    for (text, named) in [("{", "EOF"), ("{}", "no weight_map"), ("[]", "invalid type")] {
        fs::write(&index, text).unwrap();
        case.is_refused(&["model.safetensors.index.json", named]);
    }
}

#[test]
fn an_index_that_is_there_and_cannot_be_read_is_not_taken_for_absent() {
    let case = Case::single(CONFIG, |_| {});
    let index = case.path.join("model.safetensors.index.json");
    symlink("nowhere", &index).unwrap();
    case.is_refused(&["model.safetensors.index.json", "symbolic link to nothing"]);
    fs::remove_file(&index).unwrap();
    support::mkfifo(&index);
    case.is_refused(&["model.safetensors.index.json", "FIFO"]);
    fs::remove_file(&index).unwrap();
    fs::create_dir(&index).unwrap();
    case.is_refused(&["model.safetensors.index.json", "a directory"]);
    fs::remove_dir(&index).unwrap();
    for name in ["model.safetensors", "config.json"] {
        fs::remove_file(case.path.join(name)).unwrap();
        support::mkfifo(&case.path.join(name));
        case.is_refused(&[name, "not a regular file but a FIFO"]);
    }
}

#[test]
fn one_shard_of_several_without_an_index_is_no_checkpoint() {
    let case = Case::single(CONFIG, |_| {});
    let rename = |from: &str, to: &str| {
        fs::rename(case.path.join(from), case.path.join(to)).unwrap();
    };
    rename("model.safetensors", "model-00001-of-00003.safetensors");
    case.is_refused(&["model-00001-of-00003.safetensors is a part", "no model.safetensors.index"]);
    rename("model-00001-of-00003.safetensors", "model-00001-of-00001.safetensors");
    support::pack(&case.path, &case.path.with_file_name("store"));
}

#[test]
fn a_file_beside_the_shards_is_refused_only_if_it_has_experts_of_the_packed_tree() {
    let stray = |case: &Case, name: &str, tensor: &str| {
        let mut checkpoint = Checkpoint::default();
        checkpoint.add(tensor, Dtype::BF16, &[4, 8]);
        write_shard(&case.path.join(name), checkpoint.0.iter());
    };
    let sharded = Case::sharded();
    let single = Case::single(CONFIG, |_| {});
    for (case, why) in [(&sharded, "does not name"), (&single, "model.safetensors alone")] {
        stray(case, "more.safetensors", "model.layers.3.mlp.experts.0.w1");
        case.is_refused(&["more.safetensors holds model.layers.3.mlp.experts.0.w1", why]);
        fs::remove_file(case.path.join("more.safetensors")).unwrap();
        stray(case, "consolidated.safetensors", "layers.0.feed_forward.experts.0.w1.weight");
        stray(case, "adapter.safetensors", "base.model.blocks.0.experts.x.lora_A");
        stray(case, "vision.safetensors", "model.layers.0.mlp.up_proj.weight");
        fs::create_dir(case.path.join("old.safetensors")).unwrap();
        support::pack(&case.path, &case.path.with_file_name("store"));
    }
    // What cannot be read cannot be told to be harmless.
    fs::write(single.path.join("torn.safetensors"), "torn").unwrap();
    single.is_refused(&["torn.safetensors"]);
    // The index of a model all of whose experts it leaves out.
    let case = Case::sharded();
    let mut index = read_index(&case.path);
    let first = index.values().next().unwrap().as_str().unwrap().to_string();
    let dense = ["model.embed_tokens.weight"].iter();
    let checkpoint = Checkpoint::small(4);
    write_shard(
        &case.path.join("dense.safetensors"),
        dense.map(|name| checkpoint.0.get_key_value(*name).unwrap()),
    );
    index.retain(|name, _| name == "model.embed_tokens.weight");
    index.values_mut().for_each(|shard| *shard = "dense.safetensors".into());
    write_index(&case.path, &index);
    case.is_refused(&["experts", &first, "does not name"]);
}

/// A directory that its owner may not enter or not list.
#[test]
fn a_lack_of_permission_is_said_as_such() {
    let case = Case::sharded();
    for (mode, named) in [(0o000, "ermission denied"), (0o444, "ermission denied")] {
        fs::set_permissions(&case.path, fs::Permissions::from_mode(mode)).unwrap();
        let output = support::unprivileged()
            .args(["pack", "--dry-run", "--checkpoint", case.path.to_str().unwrap()])
            .output()
            .unwrap();
        fs::set_permissions(&case.path, fs::Permissions::from_mode(0o755)).unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(named) && error.contains("config.json"), "{error}");
        assert!(!error.contains("has no"), "{error}");
    }
}

#[test]
fn a_header_that_breaks_the_format_is_refused_with_the_shard() {
    let entry = |dtype: &str, shape: &[u64], span: [u64; 2]| json!({"dtype": dtype, "shape": shape, "data_offsets": span});
    let name = "model.layers.0.mlp.experts.0.w";
    for (header, data, named) in [
        (json!({ name: entry("U8", &[4], [1, 5]) }), 5, "leaves a hole"),
        (json!({ name: entry("U8", &[4], [0, 4]), "b": entry("U8", &[4], [2, 6]) }), 6, "overlaps"),
        (json!({ name: entry("F32", &[4], [0, 4]) }), 4, "makes it 16 bytes"),
        (json!({ name: entry("U8", &[4], [4, 0]) }), 4, "data_offsets [4, 0]"),
        (json!({ name: entry("U8", &[u64::MAX, 3], [0, 4]) }), 4, "no whole number"),
        (json!({ name: entry("X9", &[4], [0, 4]) }), 4, "X9"),
        (json!({ name: entry("U8", &[1; 65], [0, 1]) }), 1, "dimensions"),
        (json!({ name: {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]} }), 1, name),
        (json!({ name: 5 }), 0, name),
        (json!([]), 0, "bad header"),
    ] {
        Case::raw(&header, data).is_refused(&[named]);
    }
    Case::raw_text("{} x", 0).is_refused(&["model.safetensors", "bad header"]);
    Case::raw_text("{", 0).is_refused(&["model.safetensors", "bad header"]);
    let case = Case::raw_text("{}", 0);
    fs::write(case.path.join("model.safetensors"), [0xff; 64]).unwrap();
    case.is_refused(&["model.safetensors", "the header has 18446744073709551615 bytes"]);
}

#[test]
fn a_directory_that_is_no_checkpoint_says_what_is_missing() {
    let case = Case::sharded();
    fs::remove_file(case.path.join("model.safetensors.index.json")).unwrap();
    case.is_refused(&["3 shards", "no model.safetensors.index.json"]);
    fs::write(case.path.join("config.json"), "{").unwrap();
    case.is_refused(&["config.json", "EOF"]);
    fs::remove_file(case.path.join("config.json")).unwrap();
    case.is_refused(&["no config.json"]);
    fs::remove_dir_all(&case.path).unwrap();
    case.is_refused(&["no such directory"]);
    let case = Case::new(|path| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("config.json"), CONFIG).unwrap();
    });
    case.is_refused(&["neither model.safetensors.index.json nor model.safetensors"]);
}

#[test]
fn a_header_of_more_than_100_mb_is_read() {
    let case = Case::single(CONFIG, |_| {});
    let shard = case.path.join("model.safetensors");
    let file = fs::read(&shard).unwrap();
    let header_bytes = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (header, data) = file[8..].split_at(header_bytes);
    let note = "x".repeat(101_000_000);
    let header = String::from_utf8(header.to_vec()).unwrap();
    let header = header.replacen('{', &format!(r#"{{"__metadata__":{{"note":"{note}"}},"#), 1);
    write_raw_shard(&shard, &header, data);
    let out = case.path.with_file_name("store");
    assert_eq!(support::pack(&case.path, &out)["records"], 8);
}
