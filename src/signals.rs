//! Signals that a command turns into errors, so that it can clean up.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag::{register, register_conditional_shutdown};

/// A flag that SIGTERM and SIGINT set; the second of them ends the process at once. From here on
/// a file that outgrows `ulimit -f` is an error, too.
pub(crate) fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag unset and sets it, the second exits.
        register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| register(signal, Arc::clone(&stop)))
            .context("cannot handle signals")?;
    }
    survive_file_limit()?;
    Ok(stop)
}

/// Lets a write beyond `ulimit -f` fail with an error, where SIGXFSZ would end the process.
pub(crate) fn survive_file_limit() -> anyhow::Result<()> {
    let ignored = Arc::new(AtomicBool::new(false));
    register(SIGXFSZ, ignored).map(drop).context("cannot handle signals")
}
