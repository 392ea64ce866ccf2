//! `metrale verify`: every byte of a store against its checksums.

use std::path::PathBuf;
use std::process::ExitCode;

use expert_tier::store::{ExpertStore, verify};

use crate::output;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The store's directory
    #[arg(value_name = "STORE")]
    store: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let store = ExpertStore::open(&args.store)?;
    let layout = store.manifest().layout();
    let bytes = layout.layers().iter().map(|l| l.stride() * u64::from(l.experts())).sum();
    let bar = output::progress_bar(bytes);
    let damaged = verify::verify(&store, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let lines: String = damaged.iter().map(|damage| format!("damaged {damage}\n")).collect();
    output::text(&lines)?;
    if damaged.is_empty() {
        let (records, fingerprint) = (layout.records(), store.manifest().fingerprint());
        output::text(&format!("{records} records are sound, fingerprint {fingerprint}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::FAILURE)
}
