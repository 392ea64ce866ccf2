//! `metrale peer`: run a peer, or ask a running one.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use expert_peer::StatusReport;
use expert_tier::tcp::Dialler;

use crate::backend::SecretArgs;
use crate::output;

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Publish a store to clients
    Run(expert_peer::cli::RunArgs),
    /// Ask a running peer to describe itself
    Status(StatusArgs),
}

#[derive(clap::Args, Debug)]
struct StatusArgs {
    /// The peer
    #[arg(value_name = "HOST:PORT")]
    peer: String,
    #[command(flatten)]
    secret: SecretArgs,
    /// Longest time to wait for the peer
    #[arg(long, value_name = "MS", default_value_t = 5000)]
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

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let connect = Duration::from_millis(args.connect_ms.clamp(1, 600_000));
    let dialler = Dialler::new(args.peer.clone(), args.secret.read()?, connect);
    let status: StatusReport = serde_json::from_str(&dialler.status()?)
        .with_context(|| format!("{} sent a status of another version", args.peer))?;
    if args.json {
        return output::json(&status);
    }
    let StatusReport { fingerprint, model, layers, records, clients, max_clients, .. } = &status;
    let StatusReport { connections, served, errors, refused, bytes, version, .. } = &status;
    let StatusReport { uptime_s, cpu_s, rss_bytes, .. } = &status;
    let state = if status.draining { "draining" } else { "serving" };
    output::text(&format!(
        "{state} {model}, {layers} layers, {records} records\n\
         store    {fingerprint}\n\
         clients  {clients} of {max_clients}, {connections} connections\n\
         requests {served} served, {errors} errors, {refused} connections refused, {bytes} bytes\n\
         process  version {version}, up {uptime_s:.0} s, {cpu_s:.2} s of processor time, \
         {rss_bytes} bytes resident\n"
    ))
}
