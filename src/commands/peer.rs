//! `metrale peer`: run a peer, or ask a running one.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use expert_peer::StatusReport;
use expert_tier::tcp::Dialler;

use crate::backend::SecretArgs;

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
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &status)?;
        writeln!(out)?;
        return Ok(());
    }
    let StatusReport { fingerprint, model, layers, records, clients, max_clients, .. } = &status;
    let state = if status.draining { "draining" } else { "serving" };
    writeln!(out, "{state} {model}, {layers} layers, {records} records")?;
    writeln!(out, "store    {fingerprint}")?;
    writeln!(out, "clients  {clients} of {max_clients}, {} connections", status.connections)?;
    writeln!(
        out,
        "requests {} served, {} errors, {} connections refused, {} bytes sent",
        status.served, status.errors, status.refused, status.bytes
    )?;
    writeln!(
        out,
        "process  version {}, up {:.0} s, {:.2} s of processor time, {} bytes resident",
        status.version, status.uptime_s, status.cpu_s, status.rss_bytes
    )?;
    Ok(())
}
