//! A few threads that do what blocks.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::bell::Bell;
use super::super::options::PushError;

/// Threads that turn a `W` into an `R` each, and ring the bell. They end when this is dropped and
/// what they are at is done; nobody waits for that, since it may hang with a disk.
pub(super) struct Workers<W, R> {
    work: Sender<W>,
    done: Receiver<R>,
}

impl<W: Send + 'static, R: Send + 'static> Workers<W, R> {
    pub(super) fn start(
        name: &'static str,
        count: usize,
        bell: &Bell,
        act: impl Fn(W) -> R + Send + Sync + 'static,
    ) -> Result<Self, PushError> {
        let ((work, waiting), (finish, done)) = (channel(), channel());
        let (waiting, act) = (Arc::new(Mutex::new(waiting)), Arc::new(act));
        for at in 0..count {
            let (waiting, act) = (Arc::clone(&waiting), Arc::clone(&act));
            let (finish, bell) = (finish.clone(), bell.clone());
            let body = move || {
                while let Some(next) = take(&waiting) {
                    if finish.send(act(next)).is_err() {
                        return;
                    }
                    bell.ring();
                }
            };
            let builder = std::thread::Builder::new().name(format!("{name}-{at}"));
            builder.spawn(body).map_err(|source| PushError::Thread { name, source })?;
        }
        Ok(Self { work, done })
    }

    pub(super) fn give(&self, work: W) {
        // The receiver goes with the last thread, and those end after this.
        let _taken = self.work.send(work);
    }

    pub(super) fn take(&self) -> Option<R> {
        self.done.try_recv().ok()
    }
}

/// The next piece of work; `None` when there will be none. One thread waits for it, the others wait
/// for that one.
fn take<W>(waiting: &Mutex<Receiver<W>>) -> Option<W> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}
