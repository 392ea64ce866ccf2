//! Signals that a command turns into errors, so that it can clean up.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU, SIGXFSZ};
use signal_hook::flag::{register, register_conditional_shutdown};

/// A flag that SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGXCPU set; a second SIGTERM or SIGINT ends the
/// process at once. From here on a file that outgrows `ulimit -f` is an error, too.
///
/// A terminal that closes sends SIGHUP more than once, and other signals with it, so these end
/// nothing at once. A signal that is ignored already stays ignored: SIGHUP under `nohup`, SIGINT and
/// SIGQUIT of what a shell without job control starts in the background.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT].into_iter().filter(|&signal| !is_ignored(signal)) {
        // In this order: the first signal finds the flag unset and sets it, the second exits.
        register_conditional_shutdown(signal, 1, Arc::clone(&asked))
            .and_then(|_| register(signal, Arc::clone(&asked)))
            .and_then(|_| register(signal, Arc::clone(&stop)))
            .context("cannot handle signals")?;
    }
    for signal in [SIGHUP, SIGQUIT, SIGXCPU].into_iter().filter(|&signal| !is_ignored(signal)) {
        register(signal, Arc::clone(&stop)).context("cannot handle signals")?;
    }
    survive_file_limit()?;
    Ok(stop)
}

/// Whether whoever started this process had the signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status, signal)
}

/// The same, of a process with this `/proc/PID/status`.
fn ignored_in(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// Lets a write beyond `ulimit -f` fail with an error, where SIGXFSZ would end the process.
pub(crate) fn survive_file_limit() -> anyhow::Result<()> {
    let ignored = Arc::new(AtomicBool::new(false));
    register(SIGXFSZ, ignored).map(drop).context("cannot handle signals")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_the_parent_ignores_is_found_in_the_processs_status() {
        let status = "Name:\tx\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n";
        assert!(ignored_in(status, SIGHUP));
        assert!(!ignored_in(status, SIGINT) && !ignored_in("", SIGHUP));
    }
}
