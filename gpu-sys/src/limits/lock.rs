//! How much memory this process may lock, and the one sum of what is needed of that.
//!
//! `RLIMIT_MEMLOCK` bounds two counts of a process, each by itself:
//!
//! | count | field of `/proc/self/status` | what adds to it |
//! |---|---|---|
//! | locked | `VmLck` | `mlock` |
//! | pinned | `VmPin` | registrations with RDMA devices and with io_uring, each anew |
//!
//! So for a region of `R` bytes that is locked once and registered with `devices` devices, parts of
//! which are registered again as grants:
//!
//! ```text
//! R + locked_bytes                                    <= limit - VmLck
//! R x devices + min(R, grant_bytes) + registered_bytes <= limit - VmPin
//! ```
//!
//! Grants are parts of the region and no part is granted twice at once, so they are never more than
//! the region itself. The kernel checks `CAP_IPC_LOCK` in the first user namespace (`capable()` in
//! mm/mlock.c, drivers/infiniband/core/umem.c and io_uring/rsrc.c): in any other one the process
//! shows the capability, and the limit stands.

use std::fmt;
use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::{Bytes, parse_meminfo, read};
use crate::pinned::HUGE_PAGE_BYTES;

/// Bit of `CAP_IPC_LOCK` in a capability set.
const CAP_IPC_LOCK_BIT: u32 = 14;
/// What `/proc/self/ns/user` links to in the first user namespace (`PROC_USER_INIT_INO`).
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";

/// How much memory this process may lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockLimit {
    /// `RLIMIT_MEMLOCK` in force; `None` is unlimited.
    pub soft_bytes: Option<u64>,
    /// What the process may raise it to by itself; `None` is unlimited.
    pub hard_bytes: Option<u64>,
    /// Bytes that the process has locked already.
    pub locked_bytes: u64,
    /// Bytes that the process has registered with devices and with io_uring already.
    pub pinned_bytes: u64,
    /// Whether `CAP_IPC_LOCK` lifts the limit.
    pub capability: IpcLock,
}

/// Whether the process has `CAP_IPC_LOCK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IpcLock {
    /// It has: `RLIMIT_MEMLOCK` does not apply.
    Granted,
    /// It has, in a user namespace that is not the first one: the limit applies.
    InNamespace,
    /// It has not.
    Absent,
}

/// What is locked and registered of a region, and beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Registrations {
    /// How often the region is registered as a whole: once per RDMA device, once with io_uring.
    pub devices: u64,
    /// Most bytes of the region that are registered again at a time, each for one request.
    pub grant_bytes: u64,
    /// Bytes that are locked beside the region.
    pub locked_bytes: u64,
    /// Bytes that are registered beside the region, with all devices.
    pub registered_bytes: u64,
}

impl Registrations {
    /// Bytes that a region of `region_bytes` needs of the locked-memory limit.
    #[must_use]
    pub fn needed_bytes(&self, region_bytes: u64) -> u64 {
        let whole = region_bytes.saturating_mul(self.devices);
        let granted = region_bytes.min(self.grant_bytes);
        let registered = whole.saturating_add(granted).saturating_add(self.registered_bytes);
        registered.max(region_bytes.saturating_add(self.locked_bytes))
    }
}

impl LockLimit {
    /// Reads the limits of this process.
    #[must_use]
    pub fn current() -> Self {
        let status = read(Path::new("/proc/self/status"));
        let limit = getrlimit(Resource::Memlock);
        let field = |name| status.as_deref().and_then(|text| parse_meminfo(text, name));
        let capability = status.as_deref().map_or(IpcLock::Absent, parse_ipc_lock);
        Self {
            soft_bytes: limit.current,
            hard_bytes: limit.maximum,
            locked_bytes: field("VmLck").unwrap_or(0),
            pinned_bytes: field("VmPin").unwrap_or(0),
            capability: match capability {
                IpcLock::Granted if !in_first_user_namespace() => IpcLock::InNamespace,
                capability => capability,
            },
        }
    }

    /// The limit, where one applies.
    #[must_use]
    pub fn applied_bytes(&self) -> Option<u64> {
        match self.capability {
            IpcLock::Granted => None,
            IpcLock::InNamespace | IpcLock::Absent => self.soft_bytes,
        }
    }

    /// Whether `bytes` more may be locked.
    #[must_use]
    pub fn allows(&self, bytes: u64) -> bool {
        self.applied_bytes().is_none_or(|soft| self.locked_bytes.saturating_add(bytes) <= soft)
    }

    /// Whether `bytes` more may be registered.
    #[must_use]
    pub fn allows_registered(&self, bytes: u64) -> bool {
        self.applied_bytes().is_none_or(|soft| self.pinned_bytes.saturating_add(bytes) <= soft)
    }

    /// Whether a region of `region_bytes` with its `registrations` keeps to the limit.
    #[must_use]
    pub fn holds(&self, region_bytes: u64, registrations: &Registrations) -> bool {
        self.room(registrations).is_none_or(|room| region_bytes <= room)
    }

    /// The most bytes of a region with these `registrations`; `None` where there is no limit.
    #[must_use]
    pub fn room(&self, registrations: &Registrations) -> Option<u64> {
        let soft = self.applied_bytes()?;
        let Registrations { devices, grant_bytes, locked_bytes, registered_bytes } = *registrations;
        let unlocked = soft.saturating_sub(self.locked_bytes).saturating_sub(locked_bytes);
        let free = soft.saturating_sub(self.pinned_bytes).saturating_sub(registered_bytes);
        // Grants are at most `grant_bytes` and at most the region: the larger of the two rooms.
        let as_grants = free / devices.saturating_add(1);
        let registered = match devices {
            0 => u64::MAX,
            devices => as_grants.max(free.saturating_sub(grant_bytes) / devices),
        };
        Some(unlocked.min(registered))
    }
}

/// The most bytes of a region for which no more than `bytes` are pinned: whole huge pages, where
/// there is room for one.
#[must_use]
pub fn whole_huge_pages(bytes: u64) -> u64 {
    let page = HUGE_PAGE_BYTES as u64;
    if bytes < page { bytes } else { bytes / page * page }
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
            // Without a limit nothing needs to be lifted.
            IpcLock::InNamespace if self.soft_bytes.is_some() => {
                write!(f, ", which CAP_IPC_LOCK does not lift in this user namespace")
            }
            IpcLock::InNamespace | IpcLock::Absent => Ok(()),
        }
    }
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

/// Whether this process is in the first user namespace. Where `/proc` does not say which one it is,
/// a map of all users to themselves is taken for that of the first.
fn in_first_user_namespace() -> bool {
    match fs::read_link("/proc/self/ns/user") {
        Ok(link) => link.as_os_str() == FIRST_USER_NAMESPACE,
        Err(_) => read(Path::new("/proc/self/uid_map")).is_none_or(|map| maps_all_users(&map)),
    }
}

/// Whether a `uid_map` gives every user its own number.
fn maps_all_users(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn limit(soft_bytes: u64) -> LockLimit {
        LockLimit {
            soft_bytes: Some(soft_bytes),
            hard_bytes: Some(soft_bytes),
            locked_bytes: 0,
            pinned_bytes: 0,
            capability: IpcLock::Absent,
        }
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
    fn only_the_map_of_all_users_is_that_of_the_first_namespace() {
        assert!(maps_all_users("         0          0 4294967295\n"));
        for map in ["0 0 1\n", "0 100000 65536\n", "", "0 0 65536\n1 1 1\n"] {
            assert!(!maps_all_users(map), "{map}");
        }
    }

    #[test]
    fn locked_memory_counts_towards_the_limit() {
        let limit = LockLimit { locked_bytes: 60, ..limit(100) };
        assert!(limit.allows(40));
        assert!(!limit.allows(41));
        assert!(!limit.allows(u64::MAX));
        assert!(limit.allows_registered(100) && !limit.allows_registered(101));
        assert!(LockLimit { capability: IpcLock::Granted, ..limit }.allows(u64::MAX));
        assert!(LockLimit { soft_bytes: None, ..limit }.allows(u64::MAX));
    }

    #[test]
    fn a_capability_of_another_user_namespace_lifts_nothing() {
        let limit = LockLimit { capability: IpcLock::InNamespace, ..limit(100) };
        assert!(limit.allows(100) && !limit.allows(101));
        assert_eq!(limit.room(&Registrations::default()), Some(100));
        let text = limit.to_string();
        assert!(text.contains("does not lift") && !text.contains("lifted by"), "{text}");
        let unlimited = LockLimit { soft_bytes: None, ..limit };
        assert_eq!(unlimited.to_string(), "no limit");
    }

    #[test]
    fn a_region_has_room_beside_its_registrations_and_grants() {
        let room = |soft, registrations: Registrations| limit(soft).room(&registrations).unwrap();
        let none = Registrations::default();
        assert_eq!(room(64 * MIB, none), 64 * MIB);
        assert_eq!(room(64 * MIB, Registrations { devices: 1, ..none }), 64 * MIB);
        assert_eq!(room(64 * MIB, Registrations { devices: 2, ..none }), 32 * MIB);
        let grants = Registrations { devices: 1, grant_bytes: 16 * MIB, ..none };
        assert_eq!(room(64 * MIB, grants), 48 * MIB);
        // No more is granted than there is.
        assert_eq!(room(8 * MIB, grants), 4 * MIB);
        let two = Registrations { devices: 2, grant_bytes: 32 * MIB, ..none };
        assert_eq!(room(96 * MIB, two), 32 * MIB);
        assert_eq!(room(12 * MIB, two), 4 * MIB);
        let beside = Registrations { registered_bytes: 4 * MIB, locked_bytes: MIB, ..two };
        assert_eq!(room(16 * MIB, beside), 4 * MIB);
        assert_eq!(room(MIB, beside), 0);
        let taken = LockLimit { locked_bytes: 6 * MIB, pinned_bytes: 2 * MIB, ..limit(8 * MIB) };
        assert_eq!(taken.room(&Registrations { devices: 1, ..none }), Some(2 * MIB));
        assert_eq!(taken.room(&Registrations { devices: 6, ..none }), Some(MIB));
        assert_eq!(LockLimit { capability: IpcLock::Granted, ..taken }.room(&two), None);
    }

    #[test]
    fn the_most_that_has_room_is_held_and_a_page_more_is_not() {
        for soft in (MIB..40 * MIB).step_by(777_216) {
            for devices in 0..4 {
                for grant_bytes in [0, MIB, 7 * MIB, 64 * MIB] {
                    let all = Registrations {
                        devices,
                        grant_bytes,
                        locked_bytes: 4096,
                        registered_bytes: 8192 * devices,
                    };
                    let (limit, most) = (limit(soft), limit(soft).room(&all).unwrap());
                    assert!(all.needed_bytes(most) <= soft, "{soft} {all:?}");
                    assert!(all.needed_bytes(most + 4096) > soft, "{soft} {all:?}");
                    assert!(limit.holds(most, &all) && !limit.holds(most + 1, &all));
                }
            }
        }
    }

    #[test]
    fn sizes_go_down_to_whole_huge_pages() {
        assert_eq!(whole_huge_pages(MIB), MIB);
        assert_eq!(whole_huge_pages(2 * MIB), 2 * MIB);
        assert_eq!(whole_huge_pages(8 * MIB - 8192), 6 * MIB);
    }
}
