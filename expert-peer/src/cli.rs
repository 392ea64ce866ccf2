//! The command line of a peer: `expert-peer`, and `metrale peer run`.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use expert_tier::wire::Secret;
use gpu_sys::env;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::metrics_http;
use crate::server::{Exposure, PeerOptions, Server, Shutdown};

/// Flags of a peer.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// The store to publish [env: METRALE_EXPERT_STORE]
    #[arg(long = "expert-store", alias = "store", value_name = "DIR")]
    store: Option<PathBuf>,
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:9909", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// File with the secret that clients must know [env: METRALE_EXPERT_SECRET_FILE]
    #[arg(long = "expert-secret-file", alias = "secret-file", value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Listen beyond loopback without a secret: anybody who can connect may fetch
    #[arg(long)]
    insecure: bool,
    /// Most clients at once
    #[arg(long, default_value_t = 64, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_clients: u32,
    /// Serve Prometheus metrics at http://ADDR:PORT/metrics
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// Longest time for a client's handshake, and for a request once it has begun
    #[arg(long, default_value_t = 5000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    handshake_ms: u64,
    /// Longest time in which a client must take some bytes of an answer
    #[arg(long, default_value_t = 10_000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    stall_ms: u64,
    /// Longest time to finish answers after SIGTERM
    #[arg(long, default_value_t = 10_000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(0..=600_000))]
    drain_ms: u64,
}

/// Runs a peer until SIGTERM or SIGINT; a second signal ends it at once.
///
/// # Errors
/// The peer cannot start, or its listening socket failed.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    if let Some(address) = args.metrics_listen {
        let address = metrics_http::serve(address)
            .with_context(|| format!("cannot serve metrics on {address}"))?;
        tracing::info!(%address, "metrics at /metrics");
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag unset and sets it, the second exits.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .context("cannot handle signals")?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot handle signals")?;
    }
    let server = Server::bind(options(args)?, Shutdown::from_flag(stop))?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "listening on {}", server.address())
        .and_then(|()| stdout.flush())
        .context("cannot write to stdout")?;
    server.run()?;
    Ok(())
}

fn options(args: &RunArgs) -> anyhow::Result<PeerOptions> {
    let store = match &args.store {
        Some(store) => Some(store.clone()),
        None => env::EXPERT_STORE.read::<PathBuf>().map_err(UsageError::new)?,
    };
    let no_store = "no store: give --store DIR or set METRALE_EXPERT_STORE";
    let store = store.ok_or_else(|| UsageError(no_store.into()))?;
    let secret_file = match &args.secret_file {
        Some(file) => Some(file.clone()),
        None => env::EXPERT_SECRET_FILE.read::<PathBuf>().map_err(UsageError::new)?,
    };
    let exposure = if args.insecure { Exposure::Insecure } else { Exposure::SecretOrLoopback };
    Ok(PeerOptions {
        listen: args.listen,
        secret: secret_file.as_deref().map(Secret::read).transpose()?,
        exposure,
        max_clients: args.max_clients,
        handshake: Duration::from_millis(args.handshake_ms),
        stall: Duration::from_millis(args.stall_ms),
        drain: Duration::from_millis(args.drain_ms),
        ..PeerOptions::new(store)
    })
}

/// Wrong usage that clap cannot see: flags or variables that are missing or cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

impl UsageError {
    /// Wrong usage that `error` describes.
    #[must_use]
    pub fn new(error: impl Display) -> Self {
        Self(error.to_string())
    }
}

/// The exit status of a program that `error` ended: 2 for wrong usage, 1 for everything else.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(if error.is::<UsageError>() { 2 } else { 1 })
}

/// Sends log lines to stderr; `METRALE_LOG` chooses which (`debug`, `warn`,
/// `expert_tier=trace`), `info` and above by default.
pub fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("METRALE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let _already_set = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}

/// The error and its causes in one line, leaving out a cause that the text before it has already.
#[must_use]
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', " ")
}
