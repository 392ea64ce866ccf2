//! `metrale doctor`: what a person would look at where experts do not come, or come slowly.
//!
//! Each check says what was found and, where it is not as it should be, what to do. A warning is
//! something that works and could be better, or that nobody has asked for; a failure keeps what was
//! asked for from working. Wrong usage is told before anything is looked at.

mod machine;
mod measure;
mod peer;
#[cfg(metrale_rdma_verbs)]
mod rails;
#[cfg(metrale_rdma_verbs)]
mod rdma;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use expert_tier::tier::{TierKind, UnknownBackend};
use gpu_sys::pinned::{HugePages, NumaPlacement};
use railset::pairing::DualRail;

use crate::backend::BackendArgs;
use report::{Report, Status};

/// What to do where there is no RDMA; TCP needs none.
const USE_TCP: &str = "use --expert-backend rdma, which is TCP";

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    backend: BackendArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Whether rails are asked for: by `--expert-backend rdma-verbs`, by a device or GID, or by two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rails {
    /// They are, so that not having them is a failure.
    Wanted,
    /// They would be welcome.
    Welcome,
}

impl Rails {
    /// How it stands where there are none.
    fn absent(self) -> Status {
        match self {
            Self::Wanted => Status::Fail,
            Self::Welcome => Status::Warn,
        }
    }
}

/// What the checks are about.
struct Settings {
    peer: Option<String>,
    store: Option<PathBuf>,
    secret_file: Option<PathBuf>,
    #[cfg(metrale_rdma_verbs)]
    wishes: railset::pairing::RailWishes,
    rails: Rails,
    /// The arena's size where it is set.
    arena_bytes: Option<u64>,
    huge_pages: HugePages,
    numa: NumaPlacement,
}

impl Settings {
    fn of(args: &BackendArgs) -> anyhow::Result<Self> {
        args.check()?;
        let wishes = args.wishes()?;
        let asked = match args.asked() {
            Ok(asked) => asked == Some(TierKind::RdmaVerbs),
            // A build without verbs: what the checks will say.
            Err(error) if matches!(error.downcast_ref(), Some(UnknownBackend::NoVerbs)) => true,
            Err(error) => return Err(error),
        };
        let named = wishes.rails.iter().any(|wish| !wish.is_empty());
        let wanted = asked || named || wishes.dual == DualRail::Two;
        let (arena_bytes, huge_pages, numa) = args.arena_wish()?;
        Ok(Self {
            peer: args.peer()?,
            store: args.store_dir()?,
            secret_file: args.secret_file()?,
            #[cfg(metrale_rdma_verbs)]
            wishes,
            rails: if wanted { Rails::Wanted } else { Rails::Welcome },
            arena_bytes,
            huge_pages,
            numa,
        })
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let settings = Settings::of(&args.backend)?;
    let mut report = Report::default();
    let secret = machine::secret(&mut report, settings.secret_file.as_deref());
    // Before anything is looked at, so that a value that cannot be is told as wrong usage.
    let peer = match (&settings.peer, secret) {
        (Some(_), machine::SecretState::Usable) => Some(peer::Settings::of(&args.backend)?),
        _ => None,
    };
    #[cfg(metrale_rdma_verbs)]
    let local = rdma::check(&mut report, &settings);
    #[cfg(not(metrale_rdma_verbs))]
    let local = no_verbs(&mut report, &settings);
    machine::memory(&mut report, &settings, local.usable_rails.min(2));
    machine::direct_reads(&mut report, settings.store.as_deref());
    machine::cuda(&mut report);
    match (&settings.peer, &peer) {
        (_, Some(peer)) => peer::check(&mut report, &args.backend, peer, &settings, &local),
        (Some(address), None) => report.fail(
            "peer",
            format!("{address} was not asked: the secret cannot be read"),
            "give a secret that can be read, see above",
        ),
        (None, None) => {}
    }
    report.print(args.json)?;
    Ok(if report.has_failure() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What this machine has for rails.
#[derive(Default)]
struct Local {
    /// Ports that could carry one, those that are one and the same counted once.
    usable_rails: usize,
}

#[cfg(not(metrale_rdma_verbs))]
fn no_verbs(report: &mut Report, settings: &Settings) -> Local {
    let found = "rdma-verbs is not available: this program was built without verbs";
    let fix = format!("build it on Linux without METRALE_NO_VERBS=1, or {USE_TCP}");
    report.say(settings.rails.absent(), "libibverbs", found, fix);
    Local::default()
}
