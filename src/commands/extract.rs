//! `metrale extract`: one expert's tensors, as they were in the checkpoint.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use expert_peer::cli::{printable, store_error};
use expert_tier::key::ExpertKey;
use expert_tier::layout::TensorSpec;
use expert_tier::store::ExpertStore;
use expert_tier::store::verify::RecordReader;

use crate::output;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The store's directory
    #[arg(value_name = "STORE")]
    store: PathBuf,
    /// The model's own layer number
    #[arg(long, value_name = "L")]
    layer: u32,
    /// The expert's number within the layer, counted from 0
    #[arg(long, value_name = "E")]
    expert: u32,
    /// Write this tensor's bytes; its name as in the checkpoint, or as `inspect` shows it, with *
    /// for the expert's number. Without it: a line `NAME DTYPE SHAPE BYTES` for each tensor
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let store = ExpertStore::open(&args.store).map_err(|error| store_error(&args.store, error))?;
    let key = ExpertKey::new(args.layer, args.expert);
    let layer = store.manifest().layout().locate(key)?;
    let tensors = layer.spec().tensors();
    let full_name = |tensor: &TensorSpec| layer.checkpoint_name(tensor, key.expert);
    let Some(wanted) = &args.tensor else {
        let lines = tensors.iter().map(|tensor| {
            let (name, shape) = (full_name(tensor), output::shape(&tensor.shape));
            format!("{} {} {shape} {}\n", printable(&name), tensor.dtype, tensor.bytes)
        });
        output::text(&lines.collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    };
    let named = |tensor: &TensorSpec| {
        let pattern = format!("{}{}", layer.prefix(), tensor.name);
        // As it is, or as it is shown.
        let names = [full_name(tensor), tensor.name.clone(), pattern];
        names.iter().any(|name| name == wanted || printable(name) == *wanted)
    };
    let Some(tensor) = tensors.iter().find(|tensor| named(tensor)) else {
        let names: Vec<String> = tensors.iter().take(8).map(full_name).collect();
        let more = if tensors.len() > names.len() { ", ..." } else { "" };
        anyhow::bail!("{key} has no tensor {wanted}, it has {}{more}", names.join(", "));
    };
    let mut stdout = output::stdout();
    let record = RecordReader::open(&store, key)?;
    record.read(tensor.offset, tensor.bytes, |bytes| stdout.write_all(bytes))?;
    stdout.flush().context("cannot write to stdout")?;
    Ok(ExitCode::SUCCESS)
}
