//! What the system lets this process lock, and how much memory there is to lock.
//!
//! Reading and parsing are apart: each parser takes text and is tested on text, each reader names
//! its file. A file that is absent or unreadable is "no such limit", never an error: containers
//! hide parts of `/proc` and `/sys`, and the kernel still has the last word when the memory is
//! asked for.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Bit of `CAP_IPC_LOCK` in a capability set.
const CAP_IPC_LOCK_BIT: u32 = 14;
/// A v1 cgroup without a limit states the largest number of whole pages; anything above this is
/// more than any machine has.
const NO_LIMIT_ABOVE_BYTES: u64 = 1 << 60;

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

/// How much memory this process may lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockLimit {
    /// `RLIMIT_MEMLOCK` in force; `None` is unlimited.
    pub soft_bytes: Option<u64>,
    /// What the process may raise it to by itself; `None` is unlimited.
    pub hard_bytes: Option<u64>,
    /// Bytes that the process has locked already.
    pub locked_bytes: u64,
    /// Whether `CAP_IPC_LOCK` lifts the limit.
    pub capability: IpcLock,
}

/// Whether the process has `CAP_IPC_LOCK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IpcLock {
    /// It has: `RLIMIT_MEMLOCK` does not apply.
    Granted,
    /// It has not.
    Absent,
}

impl LockLimit {
    /// Reads the limits of this process.
    #[must_use]
    pub fn current() -> Self {
        let status = read(Path::new("/proc/self/status"));
        let limit = getrlimit(Resource::Memlock);
        Self {
            soft_bytes: limit.current,
            hard_bytes: limit.maximum,
            locked_bytes: status.as_deref().and_then(parse_locked_bytes).unwrap_or(0),
            capability: status.as_deref().map_or(IpcLock::Absent, parse_ipc_lock),
        }
    }

    /// Whether `bytes` more may be locked.
    #[must_use]
    pub fn allows(&self, bytes: u64) -> bool {
        self.capability == IpcLock::Granted
            || self.soft_bytes.is_none_or(|soft| self.locked_bytes.saturating_add(bytes) <= soft)
    }
}

impl fmt::Display for LockLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.soft_bytes {
            None => write!(f, "no limit")?,
            Some(soft) => write!(f, "{}", Bytes(soft))?,
        }
        if self.locked_bytes > 0 {
            write!(f, " with {} of it taken", Bytes(self.locked_bytes))?;
        }
        match self.capability {
            IpcLock::Granted => write!(f, ", lifted by CAP_IPC_LOCK"),
            IpcLock::Absent => Ok(()),
        }
    }
}

/// Bytes that this process has pinned for devices (`VmPin` in `/proc/self/status`): RDMA
/// registrations count there, against `RLIMIT_MEMLOCK`, and apart from what `mlock` has locked.
#[must_use]
pub fn pinned_bytes() -> u64 {
    let status = read(Path::new("/proc/self/status"));
    status.as_deref().and_then(|text| parse_meminfo(text, "VmPin")).unwrap_or(0)
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
    machine.into_iter().chain(cgroup_memory()).min_by_key(|available| available.bytes)
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

/// The kernel's setting of transparent huge pages; `None` where it has none.
#[must_use]
pub fn transparent_huge_pages() -> Option<TransparentHuge> {
    let text = read(Path::new("/sys/kernel/mm/transparent_hugepage/enabled"))?;
    parse_transparent_huge(&text)
}

/// What each cgroup from this process's up to the root leaves, where it has a limit.
fn cgroup_memory() -> Vec<Available> {
    let Some(text) = read(Path::new("/proc/self/cgroup")) else { return Vec::new() };
    let mut found = Vec::new();
    for (version, path) in parse_cgroup(&text) {
        for root in version.roots() {
            // In a container the path may be the host's and not exist here; its parents up to the
            // mount's root are tried in turn, and the root is then the container's own cgroup.
            for directory in Path::new(path).ancestors() {
                let relative = directory.strip_prefix("/").unwrap_or(directory);
                found.extend(cgroup_headroom(version, &Path::new(root).join(relative)));
            }
        }
    }
    found
}

fn cgroup_headroom(version: CgroupVersion, directory: &Path) -> Option<Available> {
    let (limit_file, usage_file, cache_field) = version.files();
    let file = |name: &str| read(&directory.join(name));
    let limit = parse_cgroup_limit(&file(limit_file)?)?;
    let usage = file(usage_file).and_then(|text| text.trim().parse().ok()).unwrap_or(0_u64);
    // The kernel drops clean file pages before it kills anybody.
    let cache = file("memory.stat").and_then(|text| parse_stat(&text, cache_field)).unwrap_or(0);
    let bytes = limit.saturating_sub(usage.saturating_sub(cache));
    let name: PathBuf = directory.join(limit_file);
    Some(Available { bytes, bound_by: format!("the cgroup limit {}", name.display()) })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    fn roots(self) -> &'static [&'static str] {
        match self {
            Self::V1 => &["/sys/fs/cgroup/memory"],
            Self::V2 => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
        }
    }

    fn files(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            Self::V2 => ("memory.max", "memory.current", "inactive_file"),
        }
    }
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// `VmLck` of `/proc/self/status`.
fn parse_locked_bytes(status: &str) -> Option<u64> {
    parse_meminfo(status, "VmLck")
}

/// Whether `CapEff` of `/proc/self/status` has `CAP_IPC_LOCK`.
fn parse_ipc_lock(status: &str) -> IpcLock {
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    match set >> CAP_IPC_LOCK_BIT & 1 {
        1 => IpcLock::Granted,
        _ => IpcLock::Absent,
    }
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

/// `name value` lines of a cgroup's `memory.stat`.
fn parse_stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The memory cgroups that `/proc/self/cgroup` names.
fn parse_cgroup(text: &str) -> Vec<(CgroupVersion, &str)> {
    let entry = |line| {
        let mut fields = str::splitn(line, 3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        match controllers {
            "" => Some((CgroupVersion::V2, path)),
            list if list.split(',').any(|c| c == "memory") => Some((CgroupVersion::V1, path)),
            _ => None,
        }
    };
    text.lines().filter_map(entry).collect()
}

fn parse_cgroup_limit(text: &str) -> Option<u64> {
    // "max" is not a number, and so no limit.
    text.trim().parse().ok().filter(|limit| *limit < NO_LIMIT_ABOVE_BYTES)
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
    fn the_capability_is_read_from_the_effective_set() {
        let with = "CapPrm:\t0000000000000000\nCapEff:\t000001fffeffffff\n";
        let without = "CapPrm:\t000001fffeffffff\nCapEff:\t000001fffeffbfff\n";
        assert_eq!(parse_ipc_lock(with), IpcLock::Granted);
        assert_eq!(parse_ipc_lock(without), IpcLock::Absent);
        assert_eq!(parse_ipc_lock("CapEff:\tnonsense"), IpcLock::Absent);
        assert_eq!(parse_ipc_lock(""), IpcLock::Absent);
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
    fn both_generations_of_cgroups_are_found() {
        let text = "8:pids:/\n4:cpuset,memory:/a/b\n9:name=systemd:/memory\n0::/c:d\n";
        let found = parse_cgroup(text);
        assert_eq!(found, [(CgroupVersion::V1, "/a/b"), (CgroupVersion::V2, "/c:d")]);
        assert_eq!(parse_cgroup("garbage\n"), []);
    }

    #[test]
    fn a_cgroup_without_a_limit_has_none() {
        assert_eq!(parse_cgroup_limit("max\n"), None);
        assert_eq!(parse_cgroup_limit("9223372036854771712\n"), None);
        assert_eq!(parse_cgroup_limit("268435456\n"), Some(256 << 20));
        assert_eq!(parse_stat("file 1\ninactive_file 4096\n", "inactive_file"), Some(4096));
        assert_eq!(parse_stat("inactive_file_x 4096\n", "inactive_file"), None);
    }

    #[test]
    fn a_cgroup_leaves_what_it_does_not_use_and_could_drop() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name, text| fs::write(directory.path().join(name), text).unwrap();
        write("memory.max", "1000000\n");
        write("memory.current", "600000\n");
        write("memory.stat", "anon 1\ninactive_file 100000\n");
        let left = cgroup_headroom(CgroupVersion::V2, directory.path()).unwrap();
        assert_eq!(left.bytes, 500_000);
        assert!(left.bound_by.contains("memory.max"), "{}", left.bound_by);
        write("memory.max", "max\n");
        assert_eq!(cgroup_headroom(CgroupVersion::V2, directory.path()), None);
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

    #[test]
    fn locked_memory_counts_towards_the_limit() {
        let limit = LockLimit {
            soft_bytes: Some(100),
            hard_bytes: Some(100),
            locked_bytes: 60,
            capability: IpcLock::Absent,
        };
        assert!(limit.allows(40));
        assert!(!limit.allows(41));
        assert!(!limit.allows(u64::MAX));
        assert!(LockLimit { capability: IpcLock::Granted, ..limit }.allows(u64::MAX));
        assert!(LockLimit { soft_bytes: None, ..limit }.allows(u64::MAX));
    }
}
