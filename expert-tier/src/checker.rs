//! Threads that check what has landed while more is on its way.
//!
//! A backend hands each `Job` over as its bytes arrive and goes on receiving. A thread of the
//! backend's own that would wait for the last check does some itself (`Checker::help`), so
//! nothing depends on a thread being scheduled, and a checker without threads works, too.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::arena::LandedPart;

/// Most checking threads of one backend.
pub const MAX_CHECK_THREADS: u32 = 64;

/// Checking threads of a backend that was not told otherwise: a quarter of the cores, at most four,
/// since one core checks more than 10 GB/s. None where there are fewer than four cores: on two, with
/// a peer on the same machine, handing the work over was seen to cost more than it spares.
#[must_use]
pub fn default_check_threads() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(cores / 4).unwrap_or(4).min(4)
}

/// Room for jobs before the queue has to grow: more than one record's parts.
const ROOM: usize = 256;

/// Something that takes processor time and waits for nothing.
pub(crate) trait Job: Send + 'static {
    /// Does it.
    fn run(self);
}

impl Job for LandedPart {
    fn run(self) {
        self.check();
    }
}

/// A queue of jobs and the threads that do them.
pub(crate) struct Checker<J: Job> {
    shared: Arc<Shared<J>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<J> {
    queue: Mutex<Queue<J>>,
    /// Rung when there is a job for a thread that sleeps, and at the end.
    bell: Condvar,
}

struct Queue<J> {
    jobs: VecDeque<J>,
    sleeping: usize,
    closing: bool,
}

impl<J: Job> Checker<J> {
    /// One whose jobs are done by those who ask.
    pub(crate) fn without_threads() -> Self {
        let queue = Queue { jobs: VecDeque::with_capacity(ROOM), sleeping: 0, closing: false };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), bell: Condvar::new() });
        Self { shared, threads: Vec::new() }
    }

    /// Starts `threads` threads called `name`.
    ///
    /// # Errors
    /// The system gave no thread.
    pub(crate) fn start(name: &str, threads: u32) -> io::Result<Self> {
        let mut checker = Self::without_threads();
        for index in 0..threads {
            let shared = Arc::clone(&checker.shared);
            let thread = std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || shared.work())?;
            checker.threads.push(thread);
        }
        Ok(checker)
    }

    /// Puts a job in line, or does it at once where there are no threads.
    pub(crate) fn give(&self, job: J) {
        if self.threads.is_empty() {
            return job.run();
        }
        self.push(job);
    }

    /// Puts a job in line; with no threads, it waits there for [`help`](Self::help).
    pub(crate) fn push(&self, job: J) {
        let mut queue = self.shared.lock();
        queue.jobs.push_back(job);
        let wake = queue.sleeping > 0;
        drop(queue);
        if wake {
            self.shared.bell.notify_one();
        }
    }

    /// Does the oldest job in line, if there is one, and says whether there was.
    pub(crate) fn help(&self) -> bool {
        let job = self.shared.lock().jobs.pop_front();
        job.map(Job::run).is_some()
    }
}

impl<J: Job> Shared<J> {
    fn work(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job.run();
                queue = self.lock();
            } else if queue.closing {
                return;
            } else {
                queue.sleeping += 1;
                queue = self.bell.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.sleeping -= 1;
            }
        }
    }

    /// A push or pop cannot leave the queue half-changed, so a poisoned lock is sound to take.
    fn lock(&self) -> MutexGuard<'_, Queue<J>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<J: Job> Drop for Checker<J> {
    /// Every job in line is done first.
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.bell.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a checking thread had panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    struct Told(Sender<u32>, u32);

    impl Job for Told {
        fn run(self) {
            self.0.send(self.1).expect("the test listens");
        }
    }

    #[test]
    fn every_job_is_done_once_with_threads_and_without() {
        for threads in [0, 1, 3] {
            let (tell, told) = channel();
            let checker = Checker::start("test", threads).unwrap();
            for n in 0..100 {
                checker.give(Told(tell.clone(), n));
                if n % 7 == 0 {
                    checker.help();
                }
            }
            drop(checker);
            drop(tell);
            let mut done: Vec<u32> = told.iter().collect();
            done.sort_unstable();
            assert_eq!(done, (0..100).collect::<Vec<_>>(), "{threads} threads");
        }
    }
}
