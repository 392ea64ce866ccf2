//! The command line of a peer: `expert-peer`, and `metrale peer run`.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use expert_tier::tcp::look_up;
use gpu_sys::env;
#[cfg(metrale_rdma_verbs)]
use railset::message::Transfer;
use signal_hook::consts::{SIGINT, SIGTERM};

pub use crate::program::{
    HostPort, LOG_HELP, UsageError, complain, exit_code, one_line, printable, read_secret,
    start_logging, store_error,
};
#[cfg(metrale_rdma_verbs)]
use crate::push::{PushOptions, SpillWish};
#[cfg(metrale_rdma_verbs)]
use crate::rails::RailsWish;
#[cfg(metrale_rdma_verbs)]
use crate::residency::ResidencyOptions;
use crate::server::{Exposure, PeerError, PeerOptions, Server, Shutdown};
#[cfg(metrale_rdma_verbs)]
use crate::values::ByteSize;
use crate::{meters, metrics_http};

/// Flags of a peer.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// The store to publish [env: METRALE_EXPERT_STORE]
    #[arg(long = "expert-store", visible_alias = "store", value_name = "DIR")]
    store: Option<PathBuf>,
    /// Address and port to listen on: of a name the first address, and port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:9909", value_name = "HOST:PORT")]
    listen: HostPort,
    /// File with the secret that clients must know, 16 to 4096 bytes before its line end
    /// [env: METRALE_EXPERT_SECRET_FILE]
    #[arg(long = "expert-secret-file", visible_alias = "secret-file", value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Listen beyond loopback without a secret: anybody who can connect may fetch
    #[arg(long)]
    insecure: bool,
    /// Most clients at once, 1 to 4096
    #[arg(long, default_value_t = 64, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_clients: u32,
    /// RDMA device or network interface, and GID index, to publish on; repeat it for more rails, or give `none` to serve
    /// over TCP alone [default: every device with an active port]
    #[cfg(metrale_rdma_verbs)]
    #[arg(long = "rail", value_name = "DEV[:GID]")]
    rails: Vec<String>,
    /// Do not start unless a rail can be served. Otherwise a peer whose ports are down serves over TCP
    /// and offers rails when ports come up [env: METRALE_REQUIRE_RAILS, 1 or 0]
    #[cfg(metrale_rdma_verbs)]
    #[arg(long)]
    require_rails: bool,
    /// From one look for RDMA devices that came or went to the next, 10 to 600000 ms; events of the
    /// devices are followed at once
    #[cfg(metrale_rdma_verbs)]
    #[arg(long, default_value_t = 1000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(10..=600_000))]
    survey_ms: u64,
    /// Most memory for the records that clients READ, as in 64GiB, room for one at least; the other
    /// records lie on disk alone and are sent when they are asked for. Of no use without rails: TCP
    /// serves every record from disk [default: all records, or as many as memory and limits allow]
    #[cfg(metrale_rdma_verbs)]
    #[arg(long, value_name = "BYTES")]
    dram_budget: Option<ByteSize>,
    #[cfg(metrale_rdma_verbs)]
    #[command(flatten)]
    push: PushArgs,
    /// File, up to 64 MiB, with how often each record was fetched, a line
    /// {"layer":3,"expert":17,"count":240} each: the most fetched are in memory first, where not all
    /// fit. The rest of the memory is for the first layers
    #[cfg(metrale_rdma_verbs)]
    #[arg(long, value_name = "FILE")]
    resident_profile: Option<PathBuf>,
    /// From one look at what clients fetch to the next, 10 to 600000 ms; then what is fetched often
    /// moves into memory
    #[cfg(metrale_rdma_verbs)]
    #[arg(long, default_value_t = 1000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(10..=600_000))]
    residency_ms: u64,
    /// Most that is read per second to move records into memory, as in 1GiB; 0 leaves them where they are
    #[cfg(metrale_rdma_verbs)]
    #[arg(long, default_value = "256MiB", value_name = "BYTES")]
    promote_bytes_per_s: ByteSize,
    /// Longest wait for clients to follow when records move, before memory is overwritten, 1 to 600000 ms
    #[cfg(metrale_rdma_verbs)]
    #[arg(long, default_value_t = 500, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    move_ack_ms: u64,
    /// Serve Prometheus metrics at http://HOST:PORT/metrics
    #[arg(long, value_name = "HOST:PORT")]
    metrics_listen: Option<HostPort>,
    /// Longest time for a client's handshake, and for a request once it has begun, 1 to 600000 ms
    #[arg(long, default_value_t = 5000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    handshake_ms: u64,
    /// Longest time in which a client takes no byte of an answer that waits for it, 1 to 600000 ms; one
    /// that reads slowly and all the time is served to the end
    #[arg(long, default_value_t = 10_000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    stall_ms: u64,
    /// Longest time to finish answers after SIGTERM, 0 to 600000 ms
    #[arg(long, default_value_t = 10_000, value_name = "MS",
        value_parser = clap::value_parser!(u64).range(0..=600_000))]
    drain_ms: u64,
}

/// How records are sent that are not in memory.
#[cfg(metrale_rdma_verbs)]
#[derive(Args, Debug)]
struct PushArgs {
    /// Where records that are not in memory are read from: `direct` past the page cache, `mmap` the
    /// files' own pages (Linux 6.2 or later), `auto` the first of these that works, or else ordinary
    /// reads. With `direct`, TCP reads so, too, with 2 MiB of locked memory for each connection
    #[arg(long, value_name = "SOURCE", default_value = "auto")]
    spill_source: SpillWish,
    /// How they come to clients, `push` or `stage`: into the client's memory, or into the peer's, from
    /// where the client READs them
    #[arg(long, value_name = "TRANSFER", default_value = "push",
        value_parser = transfer)]
    spill_transfer: Transfer,
    /// Memory for the buffers that they are read into, at least 512KiB; 2112KiB with `stage`
    #[arg(long, value_name = "BYTES", default_value = "32MiB")]
    push_buffers: ByteSize,
    /// Reads that the disk has at once, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    push_reads: u32,
    /// Most memory of file pages that are being sent, with `--spill-source mmap`; at least 2056KiB
    #[arg(long, value_name = "BYTES", default_value = "64MiB")]
    push_pinned: ByteSize,
    /// Longest time in which the disk gives nothing of what a request needs, nor of what it got before,
    /// 1 to 600000 ms; over TCP with `--spill-source direct`, too. Waiting behind others costs no request
    /// its time, while the disk gives. Clients should wait longer (METRALE_EXPERT_DEADLINE_MS)
    #[arg(long, value_name = "MS", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    push_deadline_ms: u64,
    /// Longest time in which something of what is sent must arrive, 1 to 600000 ms; the device waits
    /// half a second for each acknowledgement
    #[arg(long, value_name = "MS", default_value_t = 2000,
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    push_stall_ms: u64,
    /// With `stage`, longest time in which a client must READ what was staged for it, 1 to 600000 ms
    #[arg(long, value_name = "MS", default_value_t = 5000,
        value_parser = clap::value_parser!(u64).range(1..=600_000))]
    stage_lease_ms: u64,
}

#[cfg(metrale_rdma_verbs)]
impl PushArgs {
    fn options(&self) -> PushOptions {
        PushOptions {
            source: self.spill_source,
            transfer: self.spill_transfer,
            buffers: self.push_buffers.0,
            reads: self.push_reads,
            pinned: self.push_pinned.0,
            deadline: Duration::from_millis(self.push_deadline_ms),
            stall: Duration::from_millis(self.push_stall_ms),
            lease: Duration::from_millis(self.stage_lease_ms),
        }
    }
}

#[cfg(metrale_rdma_verbs)]
fn transfer(text: &str) -> Result<Transfer, &'static str> {
    match text {
        "push" => Ok(Transfer::Push),
        "stage" => Ok(Transfer::Stage),
        _ => Err("neither push nor stage"),
    }
}

/// Runs a peer until SIGTERM or SIGINT; a second signal ends it at once.
///
/// # Errors
/// The peer cannot start, or its listening socket failed.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    if let Some(wish) = &args.metrics_listen {
        let address = resolve(wish).with_context(|| format!("cannot serve metrics on {wish}"))?;
        let address = metrics_http::serve(address)
            .with_context(|| format!("cannot serve metrics on {address}"))?;
        meters::describe();
        tracing::info!(%address, "metrics at /metrics");
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag unset and sets it, the second exits.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .context("cannot handle signals")?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot handle signals")?;
    }
    let options = options(args)?;
    let dir = options.store.clone();
    let server = Server::bind(options, Shutdown::from_flag(stop)).map_err(|error| match error {
        PeerError::Store(error) => store_error(&dir, error),
        error => error.into(),
    })?;
    let mut stdout = std::io::stdout();
    let said = writeln!(stdout, "listening on {}", server.address()).and_then(|()| stdout.flush());
    if let Err(error) = said {
        // Clients do not need whoever started the peer; the log has the address too.
        tracing::warn!(address = %server.address(), %error, "stdout is closed; serving all the same");
    }
    server.run()?;
    Ok(())
}

/// The first address of what may be a name.
fn resolve(wish: &HostPort) -> anyhow::Result<SocketAddr> {
    let found = look_up(&wish.0).with_context(|| format!("cannot resolve {wish}"))?;
    found.first().copied().with_context(|| format!("cannot resolve {wish}: it has no address"))
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
    #[cfg(metrale_rdma_verbs)]
    hold_against_no_rails(args)?;
    let exposure = if args.insecure { Exposure::Insecure } else { Exposure::SecretOrLoopback };
    Ok(PeerOptions {
        listen: resolve(&args.listen)?,
        secret: secret_file.as_deref().map(read_secret).transpose()?,
        exposure,
        max_clients: args.max_clients,
        handshake: Duration::from_millis(args.handshake_ms),
        stall: Duration::from_millis(args.stall_ms),
        drain: Duration::from_millis(args.drain_ms),
        #[cfg(metrale_rdma_verbs)]
        rails: rails(&args.rails)?,
        #[cfg(metrale_rdma_verbs)]
        require_rails: require_rails(args)?,
        #[cfg(metrale_rdma_verbs)]
        survey: Duration::from_millis(args.survey_ms),
        #[cfg(metrale_rdma_verbs)]
        dram_budget: args.dram_budget.map(|budget| budget.0),
        #[cfg(metrale_rdma_verbs)]
        push: args.push.options(),
        #[cfg(metrale_rdma_verbs)]
        resident_profile: args.resident_profile.clone(),
        #[cfg(metrale_rdma_verbs)]
        residency: ResidencyOptions {
            interval: Duration::from_millis(args.residency_ms),
            promote_bytes_per_s: args.promote_bytes_per_s.0,
            move_ack: Duration::from_millis(args.move_ack_ms),
        },
        ..PeerOptions::new(store)
    })
}

/// An error where something is asked for that takes rails, and there are to be none.
#[cfg(metrale_rdma_verbs)]
fn hold_against_no_rails(args: &RunArgs) -> Result<(), UsageError> {
    let held = "no record is held in memory for TCP";
    let given = [
        ("--dram-budget", args.dram_budget.is_some(), held),
        ("--resident-profile", args.resident_profile.is_some(), held),
        ("--spill-source mmap", args.push.spill_source == SpillWish::Mmap, "TCP maps nothing"),
        ("--spill-transfer stage", args.push.spill_transfer == Transfer::Stage, "TCP has one way"),
    ];
    let given = given.into_iter().find(|(_, is_given, _)| *is_given);
    match given.filter(|_| args.rails == ["none"]) {
        Some((flag, _, why)) => {
            Err(UsageError(format!("{flag} is of no use with --rail none: {why}")))
        }
        None => Ok(()),
    }
}

/// Whether a rail is required, by the flag or the variable.
#[cfg(metrale_rdma_verbs)]
fn require_rails(args: &RunArgs) -> Result<bool, UsageError> {
    let variable = env::REQUIRE_RAILS.read::<u8>().map_err(UsageError::new)?;
    let required = match variable {
        None | Some(0) => args.require_rails,
        Some(1) => true,
        Some(other) => {
            let name = env::REQUIRE_RAILS.name;
            return Err(UsageError(format!("{name}={other}: it takes 1 or 0")));
        }
    };
    if required && args.rails == ["none"] {
        let error = "--require-rails (METRALE_REQUIRE_RAILS) does not go with --rail none";
        return Err(UsageError(error.into()));
    }
    Ok(required)
}

#[cfg(metrale_rdma_verbs)]
fn rails(flags: &[String]) -> anyhow::Result<RailsWish> {
    match flags {
        [] => Ok(RailsWish::Discover),
        [none] if none == "none" => Ok(RailsWish::Off),
        flags if flags.iter().any(|flag| flag == "none") => {
            Err(UsageError("--rail none stands alone: it means that there are no rails".into())
                .into())
        }
        flags => {
            let wish =
                |flag: &String| flag.parse().map_err(|e| UsageError(format!("--rail {flag}: {e}")));
            Ok(RailsWish::These(flags.iter().map(wish).collect::<Result<_, _>>()?))
        }
    }
}
