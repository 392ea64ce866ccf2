//! What the system lets this process lock, and how much memory there is to lock.
//!
//! Reading and parsing are apart: each parser takes text and is tested on text, each reader names
//! its file. A file that is absent or unreadable is "no such limit", never an error: containers
//! hide parts of `/proc` and `/sys`, and the kernel still has the last word when the memory is
//! asked for.

mod cgroup;
mod lock;

use std::fmt;
use std::fs;
use std::path::Path;

pub use lock::{IpcLock, LockLimit, Registrations, whole_huge_pages};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A byte count as a person reads it: `4.2 GiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit) {
            None => write!(f, "{} bytes", self.0),
            Some((unit, name)) if self.0.is_multiple_of(unit) => {
                write!(f, "{} {name}", self.0 / unit)
            }
            Some((unit, name)) => {
                // Tenths, rounded up: a need shown as smaller than it is would mislead.
                let tenths = (u128::from(self.0) * 10).div_ceil(u128::from(unit));
                write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
            }
        }
    }
}

/// Raises the soft limit of open files to the hard one: a store has a file per layer, and a peer a
/// socket per connection. Says what holds now; `None` is unlimited.
pub fn raise_open_files() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // Only a hard limit above the system's own can make this fail; then the old one holds.
        Err(_) => limit.current,
    }
}

/// How much memory can still be taken, and what sets that bound.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Available {
    /// Bytes that can be taken.
    pub bytes: u64,
    /// What says so, for an error: the machine, a cgroup or a NUMA node.
    pub bound_by: String,
}

/// The smallest of what the machine has free and what the cgroups leave; `None` where neither can
/// be read.
#[must_use]
pub fn available_memory() -> Option<Available> {
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| {
        let bytes = parse_meminfo(&text, "MemAvailable")?;
        Some(Available { bytes, bound_by: "the machine (MemAvailable in /proc/meminfo)".into() })
    });
    machine.into_iter().chain(cgroup::memory()).min_by_key(|available| available.bytes)
}

/// What a NUMA node has free, counting the file cache it could drop.
#[must_use]
pub fn node_memory(node: u32) -> Option<Available> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let text = read(Path::new(&path))?;
    let field = |name| parse_meminfo(&text, name).unwrap_or(0);
    let bytes = field("MemFree") + field("Active(file)") + field("Inactive(file)");
    Some(Available { bytes, bound_by: format!("NUMA node {node} ({path})") })
}

/// The NUMA nodes that have memory, ascending.
#[must_use]
pub fn memory_nodes() -> Vec<u32> {
    read(Path::new("/sys/devices/system/node/has_memory"))
        .map_or_else(Vec::new, |text| parse_number_list(&text))
}

/// Free huge pages of `page_bytes`, on one NUMA node or on all.
#[must_use]
pub fn free_huge_pages(page_bytes: u64, node: Option<u32>) -> u64 {
    let kib = page_bytes >> 10;
    let path = match node {
        Some(node) => format!(
            "/sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/free_hugepages"
        ),
        None => format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages"),
    };
    read(Path::new(&path)).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// When the kernel makes huge pages of ordinary ones
/// (`/sys/kernel/mm/transparent_hugepage/enabled`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransparentHuge {
    /// Wherever it can.
    Always,
    /// Where a program asks, as pinned memory does.
    Asked,
    /// Never: asking succeeds and changes nothing.
    Never,
}

/// Whether this process gets transparent huge pages; `None` where the kernel has none. A process
/// for which `prctl(PR_SET_THP_DISABLE)` has switched them off gets none, whatever the kernel's
/// setting is.
#[must_use]
pub fn transparent_huge_pages() -> Option<TransparentHuge> {
    let text = read(Path::new("/sys/kernel/mm/transparent_hugepage/enabled"))?;
    let setting = parse_transparent_huge(&text)?;
    let status = read(Path::new("/proc/self/status"));
    match status.as_deref().and_then(parse_thp_enabled) {
        Some(false) => Some(TransparentHuge::Never),
        _ => Some(setting),
    }
}

/// `THP_enabled` of `/proc/self/status`; kernels before 5.0 do not have the field.
fn parse_thp_enabled(status: &str) -> Option<bool> {
    let value = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"))?;
    Some(value.trim() != "0")
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The bytes of `name: 123 kB`, also where `Node 0` stands before the name.
fn parse_meminfo(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        if key.split_whitespace().last()? != name {
            return None;
        }
        let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    })
}

/// The chosen one of `always [madvise] never`.
fn parse_transparent_huge(text: &str) -> Option<TransparentHuge> {
    let (_, rest) = text.split_once('[')?;
    match rest.split_once(']')?.0 {
        "always" => Some(TransparentHuge::Always),
        "madvise" => Some(TransparentHuge::Asked),
        "never" => Some(TransparentHuge::Never),
        _ => None,
    }
}

/// Numbers of a list such as `0-2,7`.
fn parse_number_list(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse::<u32>().ok()?)
    };
    // The kernel's largest build has 1024 nodes; a longer list is not one of nodes.
    text.trim().split(',').filter_map(range).flatten().take(1024).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_may_be_open_as_the_hard_limit_says() {
        let hard = getrlimit(Resource::Nofile).maximum;
        assert_eq!(raise_open_files(), hard);
        assert_eq!(getrlimit(Resource::Nofile).current, hard);
    }

    #[test]
    fn bytes_are_shown_rounded_up() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(17), "17 bytes");
        assert_eq!(shown(8 << 20), "8 MiB");
        assert_eq!(shown((4 << 30) + (200 << 20)), "4.2 GiB");
        assert_eq!(shown((1 << 30) + 1), "1.1 GiB");
        assert_eq!(shown(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn meminfo_of_the_machine_and_of_a_node_read_alike() {
        let machine = "MemTotal:       24000 kB\nMemAvailable:   23000 kB\nHugePages_Free: 3\n";
        assert_eq!(parse_meminfo(machine, "MemAvailable"), Some(23_000 << 10));
        assert_eq!(parse_meminfo(machine, "HugePages_Free"), None);
        assert_eq!(parse_meminfo(machine, "Mem"), None);
        let node = "Node 0 MemFree:  4664668 kB\nNode 0 Inactive(file):   186812 kB\n";
        assert_eq!(parse_meminfo(node, "Inactive(file)"), Some(186_812 << 10));
        assert_eq!(parse_meminfo("VmLck:\t      12 kB\n", "VmLck"), Some(12 << 10));
        assert_eq!(parse_meminfo("MemFree: 18446744073709551615 kB", "MemFree"), None);
    }

    #[test]
    fn the_setting_of_huge_pages_is_the_one_in_brackets() {
        let parsed = parse_transparent_huge;
        assert_eq!(parsed("[always] madvise never\n"), Some(TransparentHuge::Always));
        assert_eq!(parsed("always [madvise] never\n"), Some(TransparentHuge::Asked));
        assert_eq!(parsed("always madvise [never]\n"), Some(TransparentHuge::Never));
        for text in ["", "[", "always madvise never", "[sometimes]"] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn lists_of_nodes_are_expanded() {
        assert_eq!(parse_number_list("0-2,7\n"), [0, 1, 2, 7]);
        assert_eq!(parse_number_list("\n"), [0_u32; 0]);
        assert_eq!(parse_number_list("0-4294967295").len(), 1024);
    }
}
