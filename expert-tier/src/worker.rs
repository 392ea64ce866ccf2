//! A thread of a backend, waited for at its end, but not for ever.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// How a worker's last line was reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// With nothing left to do.
    Clean,
    /// With work in the kernel that does not end; neither, then, may the thread.
    Stuck,
}

/// A running thread.
pub(crate) struct Worker {
    thread: JoinHandle<()>,
    /// Behind a lock, so that a backend can be shared; nobody ever waits for it.
    ended: Mutex<Receiver<End>>,
}

impl Worker {
    pub(crate) fn start(
        name: String,
        work: impl FnOnce() -> End + Send + 'static,
    ) -> io::Result<Self> {
        let (end, ended): (SyncSender<End>, _) = sync_channel(1);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // There is room for one, and if nobody listens any more, nobody waits.
            let _told = end.send(work());
        })?;
        Ok(Self { thread, ended: Mutex::new(ended) })
    }

    /// Waits for the thread to end, at most until `until`; then leaves it to itself. Says in the
    /// log what was not as it should be.
    pub(crate) fn join_until(self, until: Instant) {
        let thread = self.thread.thread().name().unwrap_or_default().to_owned();
        let ended = self.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        match ended.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(End::Clean) | Err(RecvTimeoutError::Disconnected) => {
                if self.thread.join().is_err() {
                    tracing::error!(thread, "the backend's thread had panicked");
                }
            }
            Ok(End::Stuck) | Err(RecvTimeoutError::Timeout) => {
                tracing::error!(thread, "the backend's thread hangs in a read: it is left behind");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_thread_that_hangs_is_left_behind_at_the_bound() {
        let (open, gate) = channel::<()>();
        let start = Instant::now();
        let worker = Worker::start("hangs".into(), move || {
            let _opened = gate.recv();
            End::Clean
        });
        worker.unwrap().join_until(start + Duration::from_millis(50));
        assert!(start.elapsed() >= Duration::from_millis(50));
        drop(open);
    }

    #[test]
    fn a_thread_that_ends_or_panics_is_not_waited_for_longer() {
        let start = Instant::now();
        let until = start + Duration::from_secs(60);
        Worker::start("ends".into(), || End::Clean).unwrap().join_until(until);
        Worker::start("panics".into(), || panic!("on purpose")).unwrap().join_until(until);
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
