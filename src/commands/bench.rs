//! `metrale bench`: how fast records come.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use expert_peer::StatusReport;
use expert_peer::cli::{LOG_HELP, UsageError, one_line};
use expert_tier::error::FetchFailure;
use expert_tier::key::ExpertKey;
#[cfg(feature = "unverified")]
use expert_tier::tier::Landed;
use expert_tier::tier::{Completion, CompletionQueue, FetchRequest, TierKind};
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::backend::{Backend, BackendArgs};
use crate::commands::peer;
use crate::output::{self, count};

/// Wait after a batch in which every request failed.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Fetch records over and over, in order of layer and expert
    #[command(after_help = LOG_HELP)]
    Fetch(FetchArgs),
}

#[derive(clap::Args, Debug)]
struct FetchArgs {
    #[command(flatten)]
    backend: BackendArgs,
    /// Records asked for at once, 1 to 65536; the next batch starts when all have come
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Only records of this layer [default: all]
    #[arg(long, value_name = "L")]
    layer: Option<u32>,
    /// How long to measure, more than 0 and at most 86400 s, after half a second of warming up
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    seconds: f64,
    /// Whether records are checked; `off` is for measuring what checking costs, and hands out
    /// nothing
    #[cfg(feature = "unverified")]
    #[arg(long, value_enum, default_value_t = Verify::On)]
    verify: Verify,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[cfg(feature = "unverified")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Verify {
    On,
    Off,
}

#[derive(Serialize)]
struct Report {
    records: u64,
    errors: u64,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    client_cpu_s: f64,
    /// Null where the peer did not say, or was restarted; 0 without a peer.
    peer_cpu_s: Option<f64>,
}

/// What one stretch of fetching came to.
struct Tally {
    records: u64,
    errors: u64,
    bytes: u64,
    latency_ns: Histogram<u64>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let What::Fetch(args) = &args.what;
    if !(args.seconds > 0.0 && args.seconds <= 86_400.0) {
        return Err(UsageError("--seconds takes more than 0, at most 86400".into()).into());
    }
    if !(1..=1 << 16).contains(&args.batch) {
        return Err(UsageError("--batch takes 1 to 65536".into()).into());
    }
    let backend = args.backend.open(u64::MAX)?;
    let mut bench = Bench::new(&backend, args)?;
    bench.measure(Duration::from_millis(500))?;

    let peer_before = PeerUsage::ask(&backend);
    let cpu_before = gpu_sys::usage::cpu_time();
    let start = Instant::now();
    let tally = bench.measure(Duration::from_secs_f64(args.seconds))?;
    let seconds = start.elapsed().as_secs_f64();
    let client_cpu_s = (gpu_sys::usage::cpu_time() - cpu_before).as_secs_f64();
    let us = |quantile| tally.latency_ns.value_at_quantile(quantile) as f64 / 1000.0;
    let report = Report {
        records: tally.records,
        errors: tally.errors,
        bytes: tally.bytes,
        seconds,
        gb_per_s: tally.bytes as f64 / seconds / 1e9,
        p50_us: us(0.5),
        p99_us: us(0.99),
        p999_us: us(0.999),
        client_cpu_s,
        peer_cpu_s: peer_cpu_s(&backend, peer_before),
    };
    if args.json {
        output::json(&report)?;
    } else {
        output::text(&report.lines(backend.tier.kind()))?;
    }
    Ok(if report.errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Fetches batch after batch, going through all records in turn.
struct Bench<'a> {
    backend: &'a Backend,
    keys: Vec<ExpertKey>,
    batch: usize,
    turn: usize,
    queue: CompletionQueue,
    requests: Vec<FetchRequest>,
    #[cfg(feature = "unverified")]
    verify: Verify,
}

impl<'a> Bench<'a> {
    fn new(backend: &'a Backend, args: &FetchArgs) -> anyhow::Result<Self> {
        let layout = backend.tier.manifest().layout();
        if let Some(layer) = args.layer {
            layout.locate(ExpertKey::new(layer, 0))?;
        }
        let is_wanted = |key: &ExpertKey| args.layer.is_none_or(|layer| key.layer == layer);
        Ok(Self {
            backend,
            keys: layout.keys().filter(is_wanted).collect(),
            batch: args.batch,
            turn: 0,
            queue: CompletionQueue::new(),
            requests: Vec::with_capacity(args.batch),
            #[cfg(feature = "unverified")]
            verify: args.verify,
        })
    }

    /// Fetches until `span` has passed, with a pause after a batch of failures alone: while a peer
    /// is lost, requests fail at once, and asking on would only burn a core.
    fn measure(&mut self, span: Duration) -> anyhow::Result<Tally> {
        let latency_ns = Histogram::new_with_max(600_000_000_000, 3)?;
        let mut tally = Tally { records: 0, errors: 0, bytes: 0, latency_ns };
        // From one completion to the next: a batch may be longer than what its backend has under way.
        let bound = self.backend.tier.bound().saturating_add(Duration::from_secs(5));
        let start = Instant::now();
        while start.elapsed() < span {
            self.prepare()?;
            let submitted = Instant::now();
            self.backend.tier.submit(&mut self.requests, &self.queue);
            let came_before = tally.records;
            for _ in 0..self.batch {
                let Some(received) = self.next(bound) else {
                    bail!("no request completed within {} s", bound.as_secs());
                };
                tally.count(received, submitted.elapsed());
            }
            if tally.records == came_before {
                // Nothing is due, so this waits its time, and the backend sees to its own meanwhile.
                let nothing = self.backend.tier.poll(&self.queue, PAUSE);
                debug_assert!(nothing.is_none(), "every request of the batch had completed");
            }
        }
        Ok(tally)
    }

    /// Makes the requests of the next batch.
    fn prepare(&mut self) -> anyhow::Result<()> {
        for _ in 0..self.batch {
            let key = self.keys[self.turn % self.keys.len()];
            self.turn += 1;
            let bytes = self.backend.tier.manifest().layout().locate(key)?.record_bytes();
            let slot = self.backend.arena.try_acquire(bytes).with_context(|| {
                let batch = self.batch;
                format!("the arena has no slots for --batch {batch}: raise --expert-arena-bytes")
            })?;
            #[cfg(feature = "unverified")]
            let slot = if self.verify == Verify::Off { slot.without_check() } else { slot };
            self.requests.push(FetchRequest::new(key, slot));
        }
        Ok(())
    }

    /// Waits for the next end of a request: bytes of payload that came.
    fn next(&self, wait: Duration) -> Option<Result<u64, FetchFailure>> {
        #[cfg(not(feature = "unverified"))]
        let Completion { outcome, .. } = self.backend.tier.poll(&self.queue, wait)?;
        #[cfg(feature = "unverified")]
        let outcome = match self.backend.tier.poll_landed(&self.queue, wait)? {
            Landed::Completed(Completion { outcome, .. }) => outcome,
            Landed::Unchecked(record) => return Some(Ok(record.payload_bytes())),
        };
        Some(outcome.map(|fetched| fetched.residency.payload().len() as u64))
    }
}

impl Tally {
    fn count(&mut self, received: Result<u64, FetchFailure>, took: Duration) {
        match received {
            Ok(bytes) => {
                self.records += 1;
                self.bytes += bytes;
                let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                self.latency_ns.saturating_record(took_ns);
            }
            Err(failure) => {
                self.errors += 1;
                if self.errors == 1 {
                    expert_peer::cli::complain(format_args!("metrale: {failure}"));
                }
            }
        }
    }
}

/// What a peer said of its process, and when.
struct PeerUsage {
    cpu_s: f64,
    uptime_s: f64,
    said: Instant,
}

impl PeerUsage {
    /// Asks the peer, if there is one; one that does not answer is reported and costs nothing else.
    fn ask(backend: &Backend) -> Option<Self> {
        let dialler = backend.dialler.as_ref()?;
        match peer::ask(dialler) {
            Ok(StatusReport { cpu_s, uptime_s, .. }) => {
                Some(Self { cpu_s, uptime_s, said: Instant::now() })
            }
            Err(error) => {
                expert_peer::cli::complain(format_args!(
                    "metrale: the peer's processor time is unknown: {}",
                    one_line(&error)
                ));
                None
            }
        }
    }
}

/// Processor time of the peer's process since `before`, by its own account; 0 without a peer.
fn peer_cpu_s(backend: &Backend, before: Option<PeerUsage>) -> Option<f64> {
    if backend.dialler.is_none() {
        return Some(0.0);
    }
    let before = before?;
    // Taken before the peer is asked again: one process has been up longer by at least this.
    let between_s = before.said.elapsed().as_secs_f64();
    let after = PeerUsage::ask(backend)?;
    if !one_process(before.uptime_s, after.uptime_s, between_s) {
        expert_peer::cli::complain(format_args!(
            "metrale: the peer's processor time is unknown: the peer was restarted"
        ));
        return None;
    }
    Some((after.cpu_s - before.cpu_s).max(0.0))
}

/// Whether two uptimes told `between_s` apart or more are those of one process. The two machines'
/// clocks may run apart by a hundredth, far more than real ones do.
fn one_process(before_s: f64, after_s: f64, between_s: f64) -> bool {
    after_s - before_s >= between_s * 0.99 - 0.01
}

impl Report {
    fn lines(&self, kind: TierKind) -> String {
        let Self { bytes, seconds, gb_per_s, p50_us, p99_us, p999_us, errors, .. } = self;
        let mut lines = match self.records {
            0 => format!("no record came in {seconds:.2} s\n"),
            records => format!(
                "{}, {bytes} bytes in {seconds:.2} s: {gb_per_s:.3} GB/s\n\
                 latency p50 {p50_us:.1} us, p99 {p99_us:.1} us, p99.9 {p999_us:.1} us\n",
                count(records, "record")
            ),
        };
        let here = format!("processor time {:.2} s", self.client_cpu_s);
        lines += &match (kind, self.peer_cpu_s) {
            (TierKind::Posix | TierKind::Uma, _) => here,
            (TierKind::Rdma | TierKind::RdmaVerbs, Some(there)) => {
                format!("{here} here, {there:.2} s at the peer")
            }
            (TierKind::Rdma | TierKind::RdmaVerbs, None) => {
                format!("{here} here, unknown at the peer")
            }
        };
        lines + &format!("; {errors} failed\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_peer_is_told_by_its_uptime() {
        assert!(one_process(1.0, 4.0, 3.0));
        assert!(one_process(1.0, 4.2, 3.0));
        assert!(!one_process(10.0, 1.0, 3.0));
        // It was restarted, and has been up for longer than when it was asked first.
        assert!(!one_process(1.0, 50.0, 60.0));
    }
}
