//! What the memory cgroups of this process leave.
//!
//! ```text
//! available = limit - (usage - page cache - half of the reclaimable slab)
//! ```
//!
//! The kernel drops file pages before it refuses memory, active ones as well as inactive ones, as
//! `MemAvailable` of the machine counts them. So what is available does not depend on what the
//! cache holds. Half of the slab counts, as in `MemAvailable`: not all of it can be freed.

use std::path::{Path, PathBuf};

use super::{Available, read};

/// A v1 cgroup without a limit states the largest number of whole pages; anything above this is
/// more than any machine has.
const NO_LIMIT_ABOVE_BYTES: u64 = 1 << 60;

/// What each cgroup from this process's up to the root leaves, where it has a limit.
pub(super) fn memory() -> Vec<Available> {
    let Some(text) = read(Path::new("/proc/self/cgroup")) else { return Vec::new() };
    let mut found = Vec::new();
    for (version, path) in parse_cgroup(&text) {
        for root in version.roots() {
            // In a container the path may be the host's and not exist here; its parents up to the
            // mount's root are tried in turn, and the root is then the container's own cgroup.
            for directory in Path::new(path).ancestors() {
                let relative = directory.strip_prefix("/").unwrap_or(directory);
                found.extend(headroom(version, &Path::new(root).join(relative)));
            }
        }
    }
    found
}

fn headroom(version: Version, directory: &Path) -> Option<Available> {
    let Files { limit, usage, stat_prefix } = version.files();
    let file = |name: &str| read(&directory.join(name));
    let limit_bytes = parse_limit(&file(limit)?)?;
    let usage_bytes = file(usage).and_then(|text| text.trim().parse().ok()).unwrap_or(0_u64);
    let stat = file("memory.stat").unwrap_or_default();
    let field = |name: &str| parse_stat(&stat, &format!("{stat_prefix}{name}")).unwrap_or(0);
    let cache_bytes = field("active_file").saturating_add(field("inactive_file"));
    let reclaimable_bytes = cache_bytes.saturating_add(field("slab_reclaimable") / 2);
    let bytes = limit_bytes.saturating_sub(usage_bytes.saturating_sub(reclaimable_bytes));
    let name: PathBuf = directory.join(limit);
    Some(Available { bytes, bound_by: format!("the cgroup limit {}", name.display()) })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    V1,
    V2,
}

/// Names of a cgroup's files.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// In front of the fields of `memory.stat` that count the children, too.
    stat_prefix: &'static str,
}

impl Version {
    fn roots(self) -> &'static [&'static str] {
        match self {
            Self::V1 => &["/sys/fs/cgroup/memory"],
            Self::V2 => &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"],
        }
    }

    fn files(self) -> Files {
        match self {
            Self::V1 => Files {
                limit: "memory.limit_in_bytes",
                usage: "memory.usage_in_bytes",
                stat_prefix: "total_",
            },
            Self::V2 => Files { limit: "memory.max", usage: "memory.current", stat_prefix: "" },
        }
    }
}

/// `name value` lines of a cgroup's `memory.stat`.
fn parse_stat(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The memory cgroups that `/proc/self/cgroup` names.
fn parse_cgroup(text: &str) -> Vec<(Version, &str)> {
    let entry = |line| {
        let mut fields = str::splitn(line, 3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        match controllers {
            "" => Some((Version::V2, path)),
            list if list.split(',').any(|c| c == "memory") => Some((Version::V1, path)),
            _ => None,
        }
    };
    text.lines().filter_map(entry).collect()
}

fn parse_limit(text: &str) -> Option<u64> {
    // "max" is not a number, and so no limit.
    text.trim().parse().ok().filter(|limit| *limit < NO_LIMIT_ABOVE_BYTES)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn both_generations_of_cgroups_are_found() {
        let text = "8:pids:/\n4:cpuset,memory:/a/b\n9:name=systemd:/memory\n0::/c:d\n";
        let found = parse_cgroup(text);
        assert_eq!(found, [(Version::V1, "/a/b"), (Version::V2, "/c:d")]);
        assert_eq!(parse_cgroup("garbage\n"), []);
    }

    #[test]
    fn a_cgroup_without_a_limit_has_none() {
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("9223372036854771712\n"), None);
        assert_eq!(parse_limit("268435456\n"), Some(256 << 20));
        assert_eq!(parse_stat("file 1\ninactive_file 4096\n", "inactive_file"), Some(4096));
        assert_eq!(parse_stat("inactive_file_x 4096\n", "inactive_file"), None);
    }

    /// What a cgroup with these files leaves.
    fn left(version: Version, files: &[(&str, &str)]) -> Option<Available> {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        headroom(version, directory.path())
    }

    #[test]
    fn what_a_cgroup_leaves_does_not_depend_on_what_its_cache_holds() {
        for stat in [
            "anon 1\ninactive_file 0\nactive_file 0\n",
            "anon 1\ninactive_file 100000\nactive_file 0\n",
            "anon 1\ninactive_file 0\nactive_file 100000\n",
            "anon 1\ninactive_file 60000\nactive_file 30000\nslab_reclaimable 20000\n",
        ] {
            let cache: u64 = if stat.contains("file 0\nactive_file 0") { 0 } else { 100_000 };
            let usage = format!("{}\n", 500_000 + cache);
            let files =
                [("memory.max", "1000000\n"), ("memory.current", &usage), ("memory.stat", stat)];
            let left = left(Version::V2, &files).unwrap();
            assert_eq!(left.bytes, 500_000, "{stat}");
            assert!(left.bound_by.contains("memory.max"), "{}", left.bound_by);
        }
        let unlimited = [("memory.max", "max\n"), ("memory.current", "1\n")];
        assert_eq!(left(Version::V2, &unlimited), None);
    }

    #[test]
    fn the_first_generations_cache_counts_with_that_of_the_children() {
        let stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 1000\n\
                    total_active_file 199000\n";
        let files = [
            ("memory.limit_in_bytes", "1000000\n"),
            ("memory.usage_in_bytes", "300000\n"),
            ("memory.stat", stat),
        ];
        assert_eq!(left(Version::V1, &files).unwrap().bytes, 900_000);
    }
}
