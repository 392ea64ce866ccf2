//! `metrale fetch`: records into the arena, checked.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use expert_tier::key::ExpertKey;
use expert_tier::tier::{CompletionQueue, FetchRequest, Fetched, Source, TierKind};
use expert_tier::trace::TraceReader;
use serde::Serialize;

use crate::backend::{Backend, BackendArgs};
use crate::output::{self, count};
use crate::signals;
use crate::whole_file::write_whole;

/// Longest wait for a completion or a slot before the program looks at the clock again.
const WAIT: Duration = Duration::from_millis(500);

const TRACE_HELP: &str = "Fetch what a routing trace asks for, line by line: \
    {\"step\":0,\"layer\":3,\"experts\":[5,1]}, JSON of the forward pass, the layer, and the experts \
    it was routed to";

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    backend: BackendArgs,
    #[command(flatten)]
    what: What,
    /// Write the record's payload to FILE; its tensors lie at the offsets that `inspect` shows
    #[arg(long, value_name = "FILE", requires = "expert", conflicts_with_all = ["all", "trace"])]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args, Debug)]
#[group(required = true, multiple = true)]
struct What {
    /// Fetch one expert of this layer, by the model's own layer number; --expert says which
    #[arg(long, value_name = "L", requires = "expert", conflicts_with_all = ["all", "trace"])]
    layer: Option<u32>,
    /// Fetch this expert of the layer that --layer names, counted from 0
    #[arg(long, value_name = "E", requires = "layer", conflicts_with_all = ["all", "trace"])]
    expert: Option<u32>,
    /// Fetch every expert of every layer
    #[arg(long, conflicts_with = "trace")]
    all: bool,
    // Not a comment of the kind above: it would be taken for a link.
    #[arg(long, value_name = "FILE", help = TRACE_HELP)]
    trace: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    backend: &'static str,
    records: u64,
    errors: u64,
    bytes: u64,
    seconds: f64,
    by_source: BySource,
}

#[derive(Serialize, Default)]
struct BySource {
    read: u64,
    push: u64,
    tcp: u64,
    local: u64,
}

impl BySource {
    /// How many came from where, if not all from one place.
    fn when_several(&self) -> Option<String> {
        let Self { read, push, tcp, local } = *self;
        let counts = [("read", read), ("pushed", push), ("by tcp", tcp), ("local", local)];
        let some: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 0).collect();
        let told: Vec<_> = some.iter().map(|(name, count)| format!("{count} {name}")).collect();
        (some.len() > 1).then(|| format!(" ({})", told.join(", ")))
    }
}

impl Report {
    fn new(kind: TierKind) -> Self {
        let by_source = BySource::default();
        Self { backend: kind.name(), records: 0, errors: 0, bytes: 0, seconds: 0.0, by_source }
    }

    fn count(&mut self, fetched: &Fetched) {
        self.records += 1;
        self.bytes += fetched.residency.payload().len() as u64;
        match fetched.source {
            Source::Local => self.by_source.local += 1,
            Source::Tcp => self.by_source.tcp += 1,
            Source::Read => self.by_source.read += 1,
            Source::Push => self.by_source.push += 1,
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let one = args.what.expert.is_some();
    let backend = args.backend.open(if one { 1 } else { u64::MAX })?;
    let start = Instant::now();
    let mut report = Report::new(backend.tier.kind());
    if let (Some(layer), Some(expert)) = (args.what.layer, args.what.expert) {
        let fetched = fetch_one(&backend, ExpertKey::new(layer, expert))?;
        report.count(&fetched);
        if let Some(path) = &args.out {
            signals::survive_file_limit()?;
            write_whole(path, fetched.residency.payload())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    } else if let Some(path) = &args.what.trace {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        for acquire in TraceReader::new(BufReader::new(file)) {
            let acquire = acquire.with_context(|| path.display().to_string())?;
            fetch_many(&backend, acquire.keys(), &mut report)?;
        }
    } else {
        fetch_many(&backend, backend.tier.manifest().layout().keys(), &mut report)?;
    }
    report.seconds = start.elapsed().as_secs_f64();
    print(&report, args.json)?;
    Ok(if report.errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn fetch_one(backend: &Backend, key: ExpertKey) -> anyhow::Result<Fetched> {
    let layer = backend.tier.manifest().layout().locate(key)?;
    let slot = backend.arena.acquire(layer.record_bytes(), WAIT)?;
    Ok(backend.tier.fetch(key, slot)?)
}

/// Fetches `keys`, as many at a time as the arena has slots; a failed one is reported and counted.
fn fetch_many(
    backend: &Backend,
    mut keys: impl Iterator<Item = ExpertKey>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let queue = CompletionQueue::new();
    let mut batch = Vec::new();
    let mut due = 0;
    let mut next = keys.next();
    while next.is_some() || due > 0 {
        while let Some(key) = next {
            let bytes = match backend.tier.manifest().layout().locate(key) {
                Ok(layer) => layer.record_bytes(),
                Err(error) => {
                    note_error(report, &error);
                    next = keys.next();
                    continue;
                }
            };
            let Some(slot) = backend.arena.try_acquire(bytes) else { break };
            batch.push(FetchRequest::new(key, slot));
            next = keys.next();
        }
        due += batch.len();
        if due == 0 && next.is_none() {
            // The last keys were none of the store's.
            break;
        }
        backend.tier.submit(&mut batch, &queue);
        let Some(completion) = backend.tier.poll(&queue, WAIT) else {
            // Every request has its own deadline; with none in flight no slot will come free.
            anyhow::ensure!(due > 0, "the arena has no slot for the next record");
            continue;
        };
        due -= 1;
        match completion.outcome {
            Ok(fetched) => report.count(&fetched),
            Err(failure) => note_error(report, &failure),
        }
    }
    Ok(())
}

fn note_error(report: &mut Report, error: &dyn std::error::Error) {
    report.errors += 1;
    // A dead peer fails every record in the same way; a person needs to read it a few times.
    match report.errors {
        1..=10 => expert_peer::cli::complain(format_args!("metrale: {error}")),
        11 => expert_peer::cli::complain(format_args!(
            "metrale: more records failed; the count follows"
        )),
        _ => {}
    }
}

fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(report);
    }
    let Report { backend, records, errors, bytes, seconds, by_source } = report;
    let rate = *bytes as f64 / seconds.max(1e-9) / 1e9;
    let came = match records {
        0 => format!("no record came by {backend} in {seconds:.3} s"),
        _ => {
            let records = count(*records, "record");
            format!(
                "{records}, {bytes} bytes by {backend} in {seconds:.3} s ({rate:.2} GB/s), all checked"
            )
        }
    };
    let sources = by_source.when_several().unwrap_or_default();
    output::text(&format!("{came}{sources}; {errors} failed\n"))
}
