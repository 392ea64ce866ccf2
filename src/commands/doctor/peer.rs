//! Whether the peer answers, what it publishes, and how fast it comes over TCP.

use expert_peer::StatusReport;
use expert_peer::cli::one_line;
use expert_tier::arena::ArenaError;
use expert_tier::error::FetchError;
use expert_tier::tcp::{DialError, Dialler, TcpOptions, TcpTier};
use expert_tier::tier::ExpertTier;
#[cfg(metrale_rdma_verbs)]
use expert_tier::verbs::VerbsOptions;
use expert_tier::wire::io::IoError;

use super::measure::{Measured, measure};
#[cfg(metrale_rdma_verbs)]
use super::rails;
use super::report::{Report, bit_rate};
use super::{Local, USE_TCP};
use crate::backend::BackendArgs;
use crate::output::count;

/// Records under way at once while measuring, in bytes, as far as the locked-memory limit allows:
/// several of the largest models' records, and more than any rail holds.
const IN_FLIGHT_BYTES: u64 = 64 << 20;

/// The connection's settings.
pub(super) struct Settings {
    tcp: TcpOptions,
    #[cfg(metrale_rdma_verbs)]
    verbs: VerbsOptions,
}

impl Settings {
    pub(super) fn of(args: &BackendArgs) -> anyhow::Result<Self> {
        Ok(Self {
            tcp: args.tcp()?,
            #[cfg(metrale_rdma_verbs)]
            verbs: args.verbs()?,
        })
    }
}

pub(super) fn check(
    report: &mut Report,
    args: &BackendArgs,
    settings: &Settings,
    wished: &super::Settings,
    local: &Local,
) {
    let Some(status) = reach(report, &settings.tcp) else { return };
    over_tcp(report, args, &settings.tcp);
    let name = "peer's rails";
    if status.rails.is_empty() {
        let fix = format!(
            "start the peer where there is an RDMA device, without --rail none (its log says why it \
             has no rails), or {USE_TCP}"
        );
        return report.say(wished.rails.absent(), name, "it publishes none", fix);
    }
    let own = count(local.usable_rails as u64, "usable port");
    report.ok(name, format!("{}; this machine has {own}", status.rails.join(", ")));
    #[cfg(metrale_rdma_verbs)]
    rails::check(report, args, &settings.verbs, wished, status.rails.len().min(local.usable_rails));
}

/// Connects, shakes hands, and asks for the peer's status.
fn reach(report: &mut Report, tcp: &TcpOptions) -> Option<StatusReport> {
    let (name, peer) = ("peer", &tcp.peer);
    let text = match Dialler::new(peer.clone(), tcp.secret.clone(), tcp.connect).status() {
        Ok(text) => text,
        Err(error) => {
            report.fail(name, error.to_string(), dial_fix(&error));
            return None;
        }
    };
    let own = env!("CARGO_PKG_VERSION");
    let Ok(status) = serde_json::from_str::<StatusReport>(&text) else {
        let found = format!("{peer} answers, and its status is of another version");
        report.fail(name, found, format!("run the same version at both ends; this one is {own}"));
        return None;
    };
    let StatusReport { model, layers, records, fingerprint, version, clients, .. } = &status;
    let most = status.max_clients;
    let found = format!(
        "{peer} serves {model}, {layers} layers, {records} records, to {clients} of {most} clients; \
         version {version}; fingerprint {fingerprint}"
    );
    if status.draining {
        report.warn(name, format!("{found}; it is shutting down"), "start it again");
    } else if version != own {
        report.warn(name, found, format!("run version {own}, which this is, at both ends"));
    } else {
        report.ok(name, found);
    }
    Some(status)
}

fn dial_fix(error: &DialError) -> &'static str {
    match error {
        _ if error.is_busy() => "raise the peer's --max-clients, or end another client",
        DialError::Resolve { .. } => {
            "give HOST:PORT with a name that this machine can look up, or an address"
        }
        DialError::Connect { .. } => {
            "start expert-peer there with --listen ADDRESS:PORT (it listens on loopback unless told), \
             and let the port through firewalls"
        }
        DialError::Io { source: IoError::Frame(_), .. } => {
            "give the address of an expert-peer: another program seems to listen at this one"
        }
        DialError::Io { .. } => {
            "see the peer's log; where it only needs longer, raise --expert-connect-ms"
        }
        DialError::Handshake { .. } => {
            "give both ends the same secret file, version and store; the peer's log has its side"
        }
        DialError::NoManifest { .. } | DialError::BadStatus { .. } => {
            "see the peer's log; run the same version at both ends"
        }
        DialError::Thread { .. } => "raise `ulimit -u`, or the cgroup's pids.max",
    }
}

/// What to do where records do not come, though the peer answers.
pub(super) fn fetch_fix(error: &anyhow::Error) -> &'static str {
    if error.chain().any(|cause| cause.is::<ArenaError>()) {
        return "see the locked memory above";
    }
    match error.chain().find_map(|cause| cause.downcast_ref::<FetchError>()) {
        Some(FetchError::Mismatch { .. }) => {
            "run `metrale verify` on the peer's store, and copy or pack it anew where it is damaged; \
             if it is sound, suspect memory or the link"
        }
        Some(FetchError::Deadline { .. }) => {
            "see the peer's log and what else its disk and the link carry; where it only needs \
             longer, raise --expert-deadline-ms"
        }
        Some(FetchError::Peer { .. }) => {
            "run `metrale verify` on the peer's store, and see the peer's log"
        }
        _ => "see the peer's log",
    }
}

fn over_tcp(report: &mut Report, args: &BackendArgs, tcp: &TcpOptions) {
    let tier = match TcpTier::connect(tcp.clone()) {
        Ok(tier) => tier,
        // Among them: another store than --expert-fingerprint wants.
        Err(error) => return report.fail("TCP", error.to_string(), dial_fix(&error)),
    };
    match measured(args, &tier) {
        Ok(found) => {
            report.ok("TCP round trip", round_trip(&found));
            let streams = format!(" over {} connections", tcp.streams);
            report.ok("TCP bandwidth", bandwidth(&found, &streams));
        }
        Err(error) => report.fail("TCP", one_line(&error), fetch_fix(&error)),
    }
}

/// Measures `tier` with an arena of its own.
pub(super) fn measured(args: &BackendArgs, tier: &dyn ExpertTier) -> anyhow::Result<Measured> {
    let arena = args.small_arena(tier, IN_FLIGHT_BYTES)?;
    measure(tier, &arena)
}

/// The round trip, for people.
pub(super) fn round_trip(found: &Measured) -> String {
    let us = found.round_trip.as_secs_f64() * 1e6;
    format!("{us:.1} us, the median for a record of {} bytes", found.record_bytes)
}

/// The bandwidth, for people; `beside` is what it is to be seen beside.
pub(super) fn bandwidth(found: &Measured, beside: &str) -> String {
    let Measured { bytes_per_s, slots, .. } = *found;
    let (rate, records) = (bit_rate(bytes_per_s * 8.0), count(slots as u64, "record"));
    format!("{rate} ({:.2} GB/s){beside}, with {records} under way", bytes_per_s / 1e9)
}
