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
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use crate::arena::{Filling, Rejected, Slot};
use crate::error::{FetchError, FetchFailure};
#[cfg(feature = "unverified")]
use crate::record::Mismatch;
use crate::store::manifest::Manifest;
use crate::tier::{Fetched, Source, TierKind};

/// One backend's counters. Handles are made once, so counting allocates nothing on success.
pub(crate) struct Accounts {
    kind: TierKind,
    source: Source,
    fetched: Counter,
    bytes: Counter,
    seconds: Histogram,
    mismatches: Counter,
    reconnects: Counter,
    link_failures: Counter,
}

impl Accounts {
    pub(crate) fn new(kind: TierKind, source: Source) -> Self {
        let (backend, from) = (kind.name(), source.name());
        Self {
            kind,
            source,
            fetched: counter!("metrale_fetch_total", "backend" => backend, "source" => from,
                "outcome" => "ok"),
            bytes: counter!("metrale_fetch_bytes_total", "backend" => backend, "source" => from),
            seconds: histogram!("metrale_fetch_seconds", "backend" => backend),
            mismatches: counter!("metrale_mismatch_total", "backend" => backend),
            reconnects: counter!("metrale_reconnects_total", "backend" => backend),
            link_failures: counter!("metrale_link_failures_total", "backend" => backend),
        }
    }

    /// Turns a slot whose last byte has arrived into a residency, or says why it is none.
    pub(crate) fn judge(
        &self,
        slot: Slot<Filling>,
        manifest: &Arc<Manifest>,
        origin: impl FnOnce() -> String,
    ) -> Result<Fetched, FetchFailure> {
        let rejected = match slot.finish() {
            Ok(ready) => {
                let residency = ready.into_residency(manifest);
                return Ok(Fetched { residency, source: self.source });
            }
            Err(rejected) => rejected,
        };
        let Rejected { slot, key, mismatch } = rejected;
        #[cfg(feature = "unverified")]
        if mismatch == Mismatch::NotChecked {
            return Err(FetchFailure::new(FetchError::Unchecked { key }, slot));
        }
        self.mismatches.increment(1);
        let (backend, origin) = (self.kind, origin());
        let error = FetchError::Mismatch { key, backend, origin, mismatch };
        Err(FetchFailure::new(error, slot))
    }

    pub(crate) fn fetched(&self, bytes: u64, took: Duration) {
        self.fetched.increment(1);
        self.bytes.increment(bytes);
        self.seconds.record(took);
    }

    pub(crate) fn failed(&self, error: &FetchError) {
        counter!("metrale_fetch_total", "backend" => self.kind.name(), "outcome" => error.name())
            .increment(1);
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
