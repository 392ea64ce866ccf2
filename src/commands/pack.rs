//! `metrale pack`: a checkpoint, or made-up weights, becomes a store.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ArgGroup;
use expert_peer::cli::printable;
use expert_tier::layout::{CHUNK_BYTES_RANGE, DEFAULT_CHUNK_BYTES};
use expert_tier::pack::{
    self, MAX_WORKERS, PackOptions, PackPlan, PackSummary, Source, SyntheticSpec,
};
use serde::Serialize;

use crate::output::{self, count};
use crate::signals;

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
    let options = PackOptions { chunk_bytes: args.chunk_bytes, workers: args.workers };
    let plan = pack::plan(&source, &options)?;
    let summary = match &args.out {
        Some(out) if args.dry_run => {
            plan.check_output(out)?;
            plan.summary()
        }
        Some(out) => {
            let bar = output::progress_bar(plan.store_bytes());
            let stop = signals::stop_flag()?;
            let summary = pack::run_until(&plan, out, &|bytes| bar.inc(bytes), &stop);
            bar.finish_and_clear();
            summary?
        }
        None => plan.summary(),
    };
    report(args, &plan, &summary)?;
    Ok(ExitCode::SUCCESS)
}

fn report(args: &Args, plan: &PackPlan, summary: &PackSummary) -> anyhow::Result<()> {
    let seconds = summary.elapsed.as_secs_f64();
    if args.json {
        return output::json(&Report {
            fingerprint: summary.fingerprint.map(|fingerprint| fingerprint.to_string()),
            layers: summary.layers,
            records: summary.records,
            bytes: summary.bytes,
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
    if !summary.left_dense.is_empty() {
        let names = summary.left_dense.join(", ");
        text.push_str(&format!("left among the dense weights: {}\n", printable(&names)));
    }
    output::text(&text)
}
