//! `metrale peer`: run a peer, or ask a running one.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use expert_peer::cli::{HostPort, LOG_HELP, UsageError};
use expert_peer::{PushReport, ResidencyReport, StatusReport};
use expert_tier::tcp::Dialler;
use gpu_sys::env;

use crate::backend::{SecretArgs, setting};
use crate::output::{self, count};

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Publish a store to clients
    #[command(after_help = LOG_HELP)]
    Run(Box<expert_peer::cli::RunArgs>),
    /// Ask a running peer to describe itself
    Status(StatusArgs),
}

#[derive(clap::Args, Debug)]
struct StatusArgs {
    /// The peer [env: METRALE_EXPERT_PEER]
    #[arg(value_name = "HOST:PORT")]
    peer: Option<HostPort>,
    #[command(flatten)]
    secret: SecretArgs,
    /// Longest time to wait for the peer, 1 to 600000 ms
    #[arg(long, value_name = "MS", default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    connect_ms: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.what {
        What::Run(args) => expert_peer::cli::run(args)?,
        What::Status(args) => status(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What the peer says of itself.
pub(super) fn ask(dialler: &Dialler) -> anyhow::Result<StatusReport> {
    serde_json::from_str(&dialler.status()?)
        .with_context(|| format!("{} sent a status of another version", dialler.peer))
}

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let no_peer = "no peer: give HOST:PORT or set METRALE_EXPERT_PEER";
    let peer = setting(args.peer.clone(), &env::EXPERT_PEER)?;
    let HostPort(peer) = peer.ok_or_else(|| UsageError(no_peer.into()))?;
    let connect = Duration::from_millis(args.connect_ms);
    let status = ask(&Dialler::new(peer, args.secret.read()?, connect))?;
    if args.json {
        return output::json(&status);
    }
    let StatusReport { fingerprint, model, clients, max_clients, served, .. } = &status;
    let StatusReport { bytes, version, .. } = &status;
    let StatusReport { uptime_s, cpu_s, rss_bytes, .. } = &status;
    let rails = match status.rails.as_slice() {
        [] => "none".to_owned(),
        rails => rails.join(", "),
    };
    let PushReport { pushes, pushed_bytes, push_errors, push_queue, .. } = &status.pushes;
    let PushReport { push_lanes, spill_source, spill_transfer, .. } = &status.pushes;
    let state = if status.draining { "draining" } else { "serving" };
    output::text(&format!(
        "{state} {model}, {}, {}\n\
         store    {fingerprint}\n\
         clients  {clients} of {max_clients}, {}\n\
         requests {served} served, {}, {} refused, {bytes} bytes\n\
         rails    {rails}, {}\n\
         memory   {}\n\
         spilled  read by {spill_source}, sent by {spill_transfer}: {pushes} sent, \
         {pushed_bytes} bytes, {push_queue} waiting, {}, {}\n\
         process  version {version}, up {uptime_s:.0} s, {cpu_s:.2} s of processor time, \
         {rss_bytes} bytes resident\n",
        count(status.layers, "layer"),
        count(status.records, "record"),
        count(status.connections, "connection"),
        count(status.errors, "error"),
        count(status.refused, "connection"),
        count(status.queue_pairs, "queue pair"),
        memory(&status),
        count(*push_errors, "error"),
        count(*push_lanes, "queue pair"),
    ))
}

/// What is in the peer's memory, for a person: layers that are alike in one.
fn memory(status: &StatusReport) -> String {
    let ResidencyReport { resident_records, spilled_records, table_generation, .. } =
        &status.residency;
    let ResidencyReport { promotions, demotions, withdrawn, residency, .. } = &status.residency;
    let mut text = format!(
        "{} in {} bytes, {spilled_records} spilled, {withdrawn} withdrawn; table {table_generation}, \
         {}, {}",
        count(*resident_records, "record"),
        status.resident_bytes,
        count(*promotions, "promotion"),
        count(*demotions, "demotion"),
    );
    if *spilled_records == 0 {
        return text;
    }
    for alike in residency.chunk_by(|a, b| (a.resident, a.experts) == (b.resident, b.experts)) {
        let [first, .., last] = alike else {
            let [only] = alike else { continue };
            text +=
                &format!("\n         layer {}: {} of {}", only.layer, only.resident, only.experts);
            continue;
        };
        text += &format!(
            "\n         layers {} to {}: {} of {} each",
            first.layer, last.layer, first.resident, first.experts
        );
    }
    text
}
