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

use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use crate::error::FetchError;
use crate::tier::{Source, TierKind};

/// One backend's counters. Handles are made once, so counting allocates nothing on success.
pub(crate) struct Accounts {
    backend: &'static str,
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
            backend,
            fetched: counter!("metrale_fetch_total", "backend" => backend, "source" => from,
                "outcome" => "ok"),
            bytes: counter!("metrale_fetch_bytes_total", "backend" => backend, "source" => from),
            seconds: histogram!("metrale_fetch_seconds", "backend" => backend),
            mismatches: counter!("metrale_mismatch_total", "backend" => backend),
            reconnects: counter!("metrale_reconnects_total", "backend" => backend),
            link_failures: counter!("metrale_link_failures_total", "backend" => backend),
        }
    }

    pub(crate) fn fetched(&self, bytes: u64, took: Duration) {
        self.fetched.increment(1);
        self.bytes.increment(bytes);
        self.seconds.record(took);
    }

    pub(crate) fn failed(&self, error: &FetchError) {
        counter!("metrale_fetch_total", "backend" => self.backend, "outcome" => error.name())
            .increment(1);
    }

    pub(crate) fn mismatched(&self) {
        self.mismatches.increment(1);
    }

    pub(crate) fn reconnected(&self) {
        self.reconnects.increment(1);
    }

    pub(crate) fn link_failed(&self) {
        self.link_failures.increment(1);
    }
}
