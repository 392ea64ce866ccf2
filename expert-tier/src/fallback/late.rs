//! The thread that opens what was not there at the start; it ends when nothing is left to open.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use railset::Backoff;
use rand::Rng;

use super::relay::Shared;
use super::{NotOpened, Open};
use crate::fingerprint::Fingerprint;
use crate::tier::after;
use crate::worker::{End, Worker};

pub(super) struct Late {
    thread: Worker,
    stop: Arc<Stop>,
}

#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    bell: Condvar,
}

impl Late {
    /// Opens each of `ways`, given by their places, for the store with this fingerprint.
    pub(super) fn start(
        shared: &Arc<Shared>,
        mut ways: Vec<(usize, Open)>,
        fingerprint: Fingerprint,
    ) -> io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let thread = Worker::start("fallback-open".into(), {
            let (shared, stop) = (Arc::clone(shared), Arc::clone(&stop));
            move || {
                let mut backoff = Backoff::new(shared.options.backoff);
                while !ways.is_empty() && !stop.wait(backoff.failed(rand::rng().next_u32())) {
                    ways.retain(|(at, open)| !try_to_open(&shared, *at, open, fingerprint));
                }
                End::Clean
            }
        })?;
        Ok(Self { thread, stop })
    }

    /// Ends the thread, at the latest when the attempt that it is at has had its time.
    pub(super) fn stop(self, shared: &Shared) {
        *self.stop.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.bell.notify_all();
        let longest = shared.ways.iter().map(|way| way.bound).max().unwrap_or_default();
        self.thread.join_until(after(longest));
    }
}

impl Stop {
    /// Waits at most `wait`; says whether to stop.
    fn wait(&self, wait: Duration) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let woken = self.bell.wait_timeout_while(stopped, wait, |stopped| !*stopped);
        *woken.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Says whether nothing is left to do for way `at`.
fn try_to_open(shared: &Shared, at: usize, open: &Open, wanted: Fingerprint) -> bool {
    let way = &shared.ways[at];
    let (why, is_over) = match open(Some(wanted)) {
        Ok(tier) if tier.manifest().fingerprint() == wanted => {
            shared.opened(at, tier);
            return true;
        }
        Ok(other) => {
            let found = other.manifest().fingerprint();
            (format!("it has store {found}, wanted is {wanted}"), false)
        }
        Err(NotOpened::Never(source)) => (source.to_string(), true),
        // Somebody may set right what is wrong with a peer.
        Err(NotOpened::Later(source) | NotOpened::Refused(source)) => (source.to_string(), false),
    };
    if way.not_there(why) || is_over {
        let (backend, reason, again) = (way.kind.name(), way.last(), !is_over);
        tracing::warn!(backend, reason, again, "a way to the experts is still not there");
    }
    is_over
}
