//! What every backend counts, through the `metrics` crate.
//!
//! | metric | kind | labels |
//! |---|---|---|
//! | `metrale_fetch_total` | counter | `backend`, `source` or `outcome` |
//! | `metrale_fetch_bytes_total` | counter | `backend`, `source` |
//! | `metrale_fetch_seconds` | histogram | `backend`, from submit to completion |
//! | `metrale_mismatch_total` | counter | `backend`; records that failed their check, each attempt |
//! | `metrale_reconnects_total` | counter | `backend` |
//! | `metrale_link_failures_total` | counter | `backend` |
//! | `metrale_fallbacks_total` | counter | `backend`, `reason`; ways given up for slower ones |

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use crate::arena::{Filling, Judged, Rejected, Slot};
use crate::error::{FetchError, FetchFailure};
use crate::store::manifest::Manifest;
use crate::tier::{Fetched, Outcome, Source, TierKind};

/// One backend's counters. Handles are made once, so counting allocates nothing on success.
pub(crate) struct Accounts {
    kind: TierKind,
    /// Requests that have ended.
    ended: AtomicU64,
    /// One of each place that records come from; the first is the usual one.
    sources: Vec<From>,
    seconds: Histogram,
    mismatches: Counter,
    reconnects: Counter,
    link_failures: Counter,
    #[cfg(feature = "unverified")]
    unchecked: Counter,
}

/// What is counted of the records from one place.
struct From {
    source: Source,
    fetched: Counter,
    bytes: Counter,
}

impl From {
    fn new(kind: TierKind, source: Source) -> Self {
        let (backend, from) = (kind.name(), source.name());
        Self {
            source,
            fetched: counter!("metrale_fetch_total", "backend" => backend, "source" => from,
                "outcome" => "ok"),
            bytes: counter!("metrale_fetch_bytes_total", "backend" => backend, "source" => from),
        }
    }
}

impl Accounts {
    /// For a backend whose records come from `sources`.
    pub(crate) fn new(kind: TierKind, sources: &[Source]) -> Self {
        let backend = kind.name();
        Self {
            kind,
            ended: AtomicU64::new(0),
            sources: sources.iter().map(|&source| From::new(kind, source)).collect(),
            seconds: histogram!("metrale_fetch_seconds", "backend" => backend),
            mismatches: counter!("metrale_mismatch_total", "backend" => backend),
            reconnects: counter!("metrale_reconnects_total", "backend" => backend),
            link_failures: counter!("metrale_link_failures_total", "backend" => backend),
            #[cfg(feature = "unverified")]
            unchecked: counter!("metrale_fetch_total", "backend" => backend,
                "outcome" => "unchecked"),
        }
    }

    /// How a local backend's request ends whose record's last byte is in `slot`.
    pub(crate) fn judge(
        &self,
        slot: Slot<Filling>,
        manifest: &Arc<Manifest>,
        origin: impl FnOnce() -> String,
    ) -> Outcome {
        match slot.judge(manifest) {
            Judged::Record(residency) => {
                let source = self.sources.first().map_or(Source::Local, |from| from.source);
                Outcome::Fetched(Fetched { residency, source })
            }
            Judged::Rejected(Rejected { slot, key, mismatch }) => {
                self.count_mismatch();
                let (backend, origin) = (self.kind, origin());
                let error = FetchError::Mismatch { key, backend, origin, mismatch };
                Outcome::Failed(FetchFailure::new(error, slot))
            }
            #[cfg(feature = "unverified")]
            Judged::Unchecked(unchecked) => Outcome::Unchecked(unchecked),
        }
    }

    /// Counts a record that was not the one asked for.
    pub(crate) fn count_mismatch(&self) {
        self.mismatches.increment(1);
    }

    /// How many requests have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Counts a request's end.
    pub(crate) fn count(&self, outcome: &Outcome, took: Duration) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        match outcome {
            Outcome::Fetched(fetched) => {
                let from = self.sources.iter().find(|from| from.source == fetched.source);
                if let Some(from) = from {
                    from.fetched.increment(1);
                    from.bytes.increment(fetched.residency.payload().len() as u64);
                }
                self.seconds.record(took);
            }
            Outcome::Failed(FetchFailure { error, .. }) => {
                let (backend, outcome) = (self.kind.name(), error.name());
                counter!("metrale_fetch_total", "backend" => backend, "outcome" => outcome)
                    .increment(1);
            }
            #[cfg(feature = "unverified")]
            Outcome::Unchecked(_) => self.unchecked.increment(1),
        }
    }

    /// A way to fetch is given up for a slower one; beside the log line that says more.
    pub(crate) fn fell_back(&self, reason: &'static str) {
        count_fallback(self.kind, reason);
    }

    pub(crate) fn reconnected(&self) {
        self.reconnects.increment(1);
    }

    pub(crate) fn link_failed(&self) {
        self.link_failures.increment(1);
    }
}

/// As [`Accounts::fell_back`], for a backend that has no accounts yet.
pub(crate) fn count_fallback(kind: TierKind, reason: &'static str) {
    counter!("metrale_fallbacks_total", "backend" => kind.name(), "reason" => reason).increment(1);
}
