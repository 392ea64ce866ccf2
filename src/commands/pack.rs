//! `metrale pack`: a checkpoint, or made-up weights, becomes a store.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::ArgGroup;
use expert_peer::cli::printable;
use expert_tier::layout::{CHUNK_BYTES_RANGE, DEFAULT_CHUNK_BYTES};
use expert_tier::pack::{
    self, MAX_WORKERS, PackOptions, PackPlan, PackSummary, Source, SyntheticSpec, Unfinished,
};
use serde::Serialize;

use crate::output::{self, count};
use crate::progress::with_progress;
use crate::signals;
use crate::whole_file::write_whole;

/// Most names of experts that stay dense in the text of a summary.
const SHOWN_DENSE: usize = 12;

#[derive(clap::Args)]
#[command(group = ArgGroup::new("source").required(true).args(["checkpoint", "synthetic"]))]
pub(crate) struct Args {
    /// Directory with config.json and safetensors
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Made-up weights instead: layers=4,experts=16,bytes=1048576/65536,seed=1; 1 to 4096 layers, 1 to
    /// 65536 experts; bytes, 1 to 8589934592, is the payload of a record, cycled over layers; seed is 0
    /// if not given
    #[arg(long, value_name = "SPEC")]
    synthetic: Option<SyntheticSpec>,
    /// Where the store goes: nothing or an empty directory
    #[arg(long, value_name = "STORE", required_unless_present = "dry_run")]
    out: Option<PathBuf>,
    /// Read headers and say what would be packed; write nothing
    #[arg(long)]
    dry_run: bool,
    /// Payload bytes per checksum, a power of two from 4096 to 16777216; a part of the store's identity
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_CHUNK_BYTES,
          value_parser = chunk_bytes)]
    chunk_bytes: u32,
    /// Threads, 1 to 256; as many as there are cores if not given
    #[arg(long, value_name = "N", value_parser = workers)]
    workers: Option<NonZeroUsize>,
    /// Also list the tensors that no record holds, which a runtime must load itself: a line of JSON
    /// for each, with name, dtype, shape, bytes and shard
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    list_dense: Option<PathBuf>,
    /// Keep what was packed when the pack does not finish (it fails, a signal ends it, the disk is full), and go on
    /// with what such a pack of the same checkpoint has left beside STORE
    #[arg(long, conflicts_with = "dry_run")]
    resume: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The result as JSON; docs and scripts rely on these names.
#[derive(Serialize)]
struct Report<'a> {
    /// Null for a dry run: it depends on weights that were not read.
    fingerprint: Option<String>,
    layers: usize,
    records: u64,
    bytes: u64,
    /// Those of the bytes that an earlier pack had written; 0 without `--resume`.
    resumed_bytes: u64,
    seconds: f64,
    left_dense: &'a [String],
}

fn chunk_bytes(text: &str) -> Result<u32, String> {
    let accepted = |bytes: &u32| bytes.is_power_of_two() && CHUNK_BYTES_RANGE.contains(bytes);
    let (low, high) = (CHUNK_BYTES_RANGE.start(), CHUNK_BYTES_RANGE.end());
    let number = text.parse().ok().filter(accepted);
    number.ok_or_else(|| format!("a chunk is a power of two from {low} to {high}"))
}

fn workers(text: &str) -> Result<NonZeroUsize, String> {
    let number = text.parse().ok().filter(|number: &NonZeroUsize| number.get() <= MAX_WORKERS);
    number.ok_or_else(|| format!("the number of threads is 1 to {MAX_WORKERS}"))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = match (&args.checkpoint, &args.synthetic) {
        (Some(dir), _) => Source::Checkpoint(dir.clone()),
        (None, Some(spec)) => Source::Synthetic(spec.clone()),
        (None, None) => anyhow::bail!("give --checkpoint or --synthetic"),
    };
    let unfinished = if args.resume { Unfinished::Keep } else { Unfinished::Remove };
    let (chunk_bytes, workers) = (args.chunk_bytes, args.workers);
    let options = PackOptions { chunk_bytes, workers, unfinished };
    let plan = pack::plan(&source, &options)?;
    let dense = args.list_dense.as_deref().map(|file| dense_list(&plan, file)).transpose()?;
    let summary = match &args.out {
        Some(out) if args.dry_run => {
            plan.check_output(out)?;
            plan.summary()
        }
        Some(out) => {
            let stop = signals::stop_flag()?;
            with_progress(plan.store_bytes(), |progress| {
                pack::run_until(&plan, out, progress, &stop)
            })?
        }
        None => plan.summary(),
    };
    if let (Some(file), Some(lines)) = (&args.list_dense, &dense) {
        write_whole(file, lines).with_context(|| {
            let store = args.out.as_deref().filter(|_| !args.dry_run);
            let done = store
                .map_or(String::new(), |out| format!("the store is at {}, but ", out.display()));
            format!("{done}the list of dense tensors cannot be written to {}", file.display())
        })?;
    }
    report(args, &plan, &summary)?;
    Ok(ExitCode::SUCCESS)
}

/// The lines for `file`, made before the pack: what cannot be listed or written stops it.
fn dense_list(plan: &PackPlan, file: &Path) -> anyhow::Result<Vec<u8>> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !dir.is_dir() {
        anyhow::bail!("--list-dense: {} is not a directory", dir.display());
    }
    let mut lines = Vec::new();
    let mut failed = None;
    plan.dense_tensors(|tensor| {
        let line = serde_json::to_writer(&mut lines, &tensor);
        failed = failed.take().or(line.err());
        lines.push(b'\n');
    })?;
    failed.map_or(Ok(lines), |error| Err(error).context("cannot list the dense tensors"))
}

fn report(args: &Args, plan: &PackPlan, summary: &PackSummary) -> anyhow::Result<()> {
    let seconds = summary.elapsed.as_secs_f64();
    if args.json {
        return output::json(&Report {
            fingerprint: summary.fingerprint.map(|fingerprint| fingerprint.to_string()),
            layers: summary.layers,
            records: summary.records,
            bytes: summary.bytes,
            resumed_bytes: summary.resumed_bytes,
            seconds,
            left_dense: &summary.left_dense,
        });
    }
    let (layers, records) =
        (count(summary.layers as u64, "layer"), count(summary.records, "record"));
    let bytes = output::human_bytes(summary.bytes);
    let mut text = match summary.fingerprint {
        Some(fingerprint) => format!(
            "packed {records} of {layers}, {bytes}, in {seconds:.1} s\n\
             fingerprint {fingerprint}\n"
        ),
        None => format!(
            "would pack {records} of {layers}, {bytes}, of a {} model\n",
            printable(plan.model())
        ),
    };
    if summary.resumed_bytes > 0 {
        let resumed = output::human_bytes(summary.resumed_bytes);
        text.push_str(&format!("{resumed} of it had been packed before\n"));
    }
    if !summary.left_dense.is_empty() {
        let names = summary.left_dense.iter().take(SHOWN_DENSE);
        let names = names.map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = match summary.left_dense.len().saturating_sub(SHOWN_DENSE) {
            0 => String::new(),
            more => format!(" and {more} more (--json names all)"),
        };
        let names = printable(&names);
        text.push_str(&format!("routed experts left among the dense weights: {names}{more}\n"));
    }
    output::text(&text)
}
