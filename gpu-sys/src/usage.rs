//! What this process has used: processor time and memory.

use std::time::Duration;

/// User and system time of the whole process, from `getrusage(2)`.
#[must_use]
pub fn cpu_time() -> Duration {
    // SAFETY: `rusage` is plain integers, for which all zeros is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a live, writable `rusage`, which is all that getrusage(2) asks.
    let failed = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    if failed != 0 {
        return Duration::ZERO;
    }
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Resident memory of this process in bytes, from `/proc/self/statm`; 0 where that is not there.
#[must_use]
pub fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok());
    // SAFETY: sysconf(3) takes any name and touches no memory of ours.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages.unwrap_or(0) * u64::try_from(page_bytes).unwrap_or(4096)
}

fn time(value: libc::timeval) -> Duration {
    let seconds = u64::try_from(value.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(value.tv_usec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_has_used_something() {
        assert!(resident_bytes() > 1 << 16);
        let before = cpu_time();
        let mut sum = 0_u64;
        while cpu_time() == before {
            sum = sum.wrapping_add(std::hint::black_box(1));
            assert!(sum < 1 << 40, "no processor time passes");
        }
    }
}
