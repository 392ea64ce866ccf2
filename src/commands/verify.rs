//! `metrale verify`: every byte of a store against its checksums.

use std::path::PathBuf;
use std::process::ExitCode;

use expert_peer::cli::store_error;
use expert_tier::store::ExpertStore;
use expert_tier::store::verify::{self, Damage};
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

/// The result as JSON; docs and scripts rely on these names.
#[derive(Serialize)]
struct Report<'a> {
    sound: bool,
    records: u64,
    damaged: Vec<DamageReport<'a>>,
}

#[derive(Serialize)]
struct DamageReport<'a> {
    layer: u32,
    /// Null where all of a layer is meant.
    expert: Option<u32>,
    why: &'a str,
}

impl<'a> From<&'a Damage> for DamageReport<'a> {
    fn from(damage: &'a Damage) -> Self {
        Self { layer: damage.layer, expert: damage.expert, why: &damage.why }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let store = ExpertStore::open(&args.store).map_err(|error| store_error(&args.store, error))?;
    let layout = store.manifest().layout();
    let bytes = layout.layers().iter().map(|l| l.stride() * u64::from(l.experts())).sum();
    let bar = output::progress_bar(bytes);
    let damaged = verify::verify(&store, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let (sound, records) = (damaged.is_empty(), layout.records());
    if args.json {
        let damaged = damaged.iter().map(DamageReport::from).collect();
        output::json(&Report { sound, records, damaged })?;
    } else if sound {
        let (are, fingerprint) =
            (if records == 1 { "is" } else { "are" }, store.manifest().fingerprint());
        let records = count(records, "record");
        output::text(&format!("{records} {are} sound, fingerprint {fingerprint}\n"))?;
    } else {
        let lines = damaged.iter().map(|damage| format!("damaged {damage}\n"));
        output::text(&lines.collect::<String>())?;
    }
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
