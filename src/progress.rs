//! How far a long command is: a bar on a terminal, else a line in the log every ten seconds.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::output::{human_bytes, progress_bar};

/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Runs `work`, which counts bytes up to `total` with what it is given, and says how far it is.
pub(crate) fn with_progress<T>(total: u64, work: impl FnOnce(&(dyn Fn(u64) + Sync)) -> T) -> T {
    if io::stderr().is_terminal() {
        let bar = progress_bar(total);
        let outcome = work(&|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        return outcome;
    }
    with_lines(total, INTERVAL, &|line| tracing::info!("{line}"), work)
}

/// The same, with a line for `say` every `interval`, whether or not bytes come.
fn with_lines<T>(
    total: u64,
    interval: Duration,
    say: &(dyn Fn(String) + Sync),
    work: impl FnOnce(&(dyn Fn(u64) + Sync)) -> T,
) -> T {
    let done = AtomicU64::new(0);
    let (ended, end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let done = &done;
        let lines = move || {
            let (started, mut before) = (Instant::now(), 0);
            while end.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                // Relaxed: a figure for people.
                let now = done.load(Ordering::Relaxed);
                say(line(now, now - before, interval, started.elapsed(), total));
                before = now;
            }
        };
        // Without the thread nothing is said; the work is what counts.
        let _thread = thread::Builder::new().name("progress".into()).spawn_scoped(scope, lines);
        let outcome = work(&|bytes| {
            done.fetch_add(bytes, Ordering::Relaxed);
        });
        drop(ended);
        outcome
    })
}

/// What has been done of `total`, at which rate of late, and how long the rest takes at the rate
/// since the start.
fn line(done: u64, of_late: u64, interval: Duration, elapsed: Duration, total: u64) -> String {
    let rate = human_bytes((of_late as f64 / interval.as_secs_f64()) as u64);
    let (so_far, all) = (human_bytes(done), human_bytes(total));
    let percent = done as f64 / total.max(1) as f64 * 100.0;
    let left = match total.saturating_sub(done) {
        0 => "writing headers and waiting for the disk".to_owned(),
        _ if done == 0 => "time left unknown".to_owned(),
        left => format!("{} left", time(elapsed.mul_f64(left as f64 / done as f64))),
    };
    format!("{so_far} of {all} ({percent:.0} %), {rate}/s, {left}")
}

/// `1 h 05 min`, `3 min 20 s`, `7 s`.
fn time(left: Duration) -> String {
    let seconds = left.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_bytes_rate_and_time_left() {
        let tens = |n: u64| Duration::from_secs(10 * n);
        let says = |done, of_late, elapsed| line(done, of_late, tens(1), elapsed, 4_000_000_000);
        assert_eq!(
            says(1_000_000_000, 500_000_000, tens(3)),
            "1.0 GB of 4.0 GB (25 %), 50.0 MB/s, 1 min 30 s left"
        );
        assert_eq!(says(0, 0, tens(1)), "0 B of 4.0 GB (0 %), 0 B/s, time left unknown");
        assert!(says(1_000_000, 0, tens(9)).ends_with("0 B/s, 99 h 58 min left"));
        assert!(
            says(4_000_000_000, 1, tens(9)).ends_with("writing headers and waiting for the disk")
        );
    }

    #[test]
    fn lines_come_while_the_work_stands_still_and_end_with_it() {
        let (lines, said) = mpsc::channel();
        let say = |line| drop(lines.send(line));
        let sum = with_lines(1000, Duration::from_millis(1), &say, |count| {
            let next = || said.recv_timeout(Duration::from_secs(60)).expect("a line");
            assert!(next().starts_with("0 B of 1.0 kB (0 %)"));
            count(250);
            while !next().starts_with("250 B of 1.0 kB (25 %)") {}
            7
        });
        assert_eq!(sum, 7);
    }
}
