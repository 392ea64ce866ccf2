//! Pinned pages: one anonymous mapping that stays in memory, where it was put, until it is dropped.
//!
//! The order of construction is what makes the promises hold: map, keep out of forks and core
//! dumps, choose huge pages, bind to a NUMA node, and only then lock, which touches every page. A
//! node chosen after the first touch would not move anything.
//!
//! Whether the memory can be had is decided before it is locked ([`limits`]), because a lock that
//! the machine cannot serve ends with the kernel killing some process, perhaps another one.
//! [`RESERVE_MAX_BYTES`] of what is available stays for everybody else.

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::limits::{self, Available, Bytes, LockLimit};

/// The huge page size asked for: that of x86-64, and of aarch64 with 4 KiB pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Memory that is left to others: a sixteenth of what is available, at most this.
pub const RESERVE_MAX_BYTES: u64 = 256 << 20;

const HUGE_PAGE_BITS: u8 = 21;
const RESERVE_DIVISOR: u64 = 16;
/// Highest NUMA node number that fits the mask given to `mbind`; the kernel's own limit.
const MAX_NODES: usize = 1024;
const MASK_BITS: usize = libc::c_ulong::BITS as usize;

/// What to pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedOptions {
    /// Bytes wanted; rounded up to whole pages.
    pub bytes: usize,
    /// Whether to try for huge pages.
    pub huge_pages: HugePages,
    /// Where the memory should be.
    pub numa: NumaPlacement,
}

/// Whether to try for huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// Reserved huge pages where enough are free, else transparent ones.
    #[default]
    Prefer,
    /// The system's ordinary pages.
    Off,
}

/// Where memory should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum NumaPlacement {
    /// Where the kernel puts it: the node of the thread that touches it first.
    #[default]
    Local,
    /// On this node and no other.
    Node(u32),
}

/// What kind of pages a mapping got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageKind {
    /// From the reserved pool (`vm.nr_hugepages`).
    Huge,
    /// Ordinary pages that the kernel was asked to make huge where it can.
    TransparentHuge,
    /// Ordinary pages.
    Ordinary,
}

impl std::fmt::Display for PageKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Huge => "2 MiB huge pages",
            Self::TransparentHuge => "transparent huge pages",
            Self::Ordinary => "ordinary pages",
        })
    }
}

/// Why memory could not be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// Nothing, or more than an address space holds.
    #[error("cannot pin {bytes} bytes: ask for 1 to {}", isize::MAX as usize - HUGE_PAGE_BYTES)]
    Size {
        /// Bytes asked for.
        bytes: usize,
    },
    /// There is not that much memory.
    #[error(
        "needs {} of memory, {} can be pinned by {}: ask for less (a client's --expert-arena-bytes; a \
         peer's --dram-budget, --push-buffers), or free memory",
        Bytes(*needed_bytes), Bytes(*usable_bytes), bound_by
    )]
    NotEnoughMemory {
        /// Bytes to be pinned.
        needed_bytes: u64,
        /// Bytes available less the reserve for others.
        usable_bytes: u64,
        /// What sets the bound.
        bound_by: String,
    },
    /// The process may not lock that much.
    #[error(
        "needs {} of locked memory, the limit is {limit}: raise `ulimit -l` (LimitMEMLOCK= in a \
         systemd unit, --ulimit memlock= for a container), or grant CAP_IPC_LOCK, or ask for less \
         (a client's --expert-arena-bytes; a peer's --dram-budget, --push-buffers)",
        Bytes(*needed_bytes)
    )]
    LockLimit {
        /// Bytes to be locked.
        needed_bytes: u64,
        /// The limits in force.
        limit: LockLimit,
    },
    /// The NUMA node has no memory or does not exist.
    #[error("NUMA node {node} has no memory, nodes with memory are {nodes:?}: choose one of them")]
    NoSuchNode {
        /// The node asked for.
        node: u32,
        /// The nodes there are.
        nodes: Vec<u32>,
    },
    /// The kernel refused a step.
    #[error("{step} for {} of pinned memory failed: {source}", Bytes(*bytes))]
    System {
        /// What was tried.
        step: &'static str,
        /// Bytes to be pinned.
        bytes: u64,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Memory that is locked, kept out of forks and core dumps, and at a fixed address.
///
/// It starts out as zeros. Only its address is handed out: whoever turns that into references
/// answers for who else reads and writes there.
#[derive(Debug)]
pub struct PinnedPages {
    // Dropped by hand: a mapping that cannot be unlocked is leaked.
    map: ManuallyDrop<MmapRaw>,
    kind: PageKind,
    numa: NumaPlacement,
}

impl PinnedPages {
    /// Maps, locks and fills with zeros.
    ///
    /// # Errors
    /// [`PinError`] says which limit stands against it and what to change.
    pub fn new(options: &PinnedOptions) -> Result<Self, PinError> {
        if options.bytes == 0 || options.bytes > isize::MAX as usize - HUGE_PAGE_BYTES {
            return Err(PinError::Size { bytes: options.bytes });
        }
        check_node(options.numa)?;
        let (map, kind) = map(options)?;
        let bytes = map.len() as u64;
        let limit = LockLimit::current();
        if !limit.allows(bytes) {
            return Err(PinError::LockLimit { needed_bytes: bytes, limit });
        }
        let step = |step| move |source| PinError::System { step, bytes, source };
        map.advise(Advice::DontFork).map_err(step("madvise(MADV_DONTFORK)"))?;
        map.advise(Advice::DontDump).map_err(step("madvise(MADV_DONTDUMP)"))?;
        if let NumaPlacement::Node(node) = options.numa {
            bind(&map, node).map_err(step("mbind"))?;
        }
        map.lock().map_err(|source| lock_error(bytes, source))?;
        populate(&map).map_err(step("madvise(MADV_POPULATE_WRITE)"))?;
        tracing::debug!(bytes, pages = %kind, numa = ?options.numa, "pinned memory");
        Ok(Self { map: ManuallyDrop::new(map), kind, numa: options.numa })
    }

    /// The first byte: page-aligned, non-null.
    #[must_use]
    #[allow(clippy::missing_panics_doc, reason = "mmap of a length above zero is never null")]
    pub fn address(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_mut_ptr()).expect("mmap of a length above zero is never null")
    }

    /// All bytes, for the only holder, who has not handed the address to anybody yet.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, bytes) = (self.address(), self.len());
        // SAFETY: one mapping of that length, zeroed when it was made; it is borrowed mutably, and
        // whoever made references of the address before has promised that they are gone.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) }
    }

    /// Bytes pinned: those asked for, rounded up to whole pages.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a mapping of no bytes cannot be made")]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// What kind of pages they are.
    #[must_use]
    pub fn page_kind(&self) -> PageKind {
        self.kind
    }

    /// Where they were placed.
    #[must_use]
    pub fn numa(&self) -> NumaPlacement {
        self.numa
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        let (address, bytes) = (self.map.as_ptr(), self.map.len());
        if let Err(error) = self.map.unlock() {
            tracing::error!(?address, bytes, %error, "munlock failed: this memory is leaked");
            return;
        }
        // SAFETY: `map` was made in `new`, is taken nowhere else, and drop runs once.
        unsafe { ManuallyDrop::drop(&mut self.map) };
    }
}

fn check_node(numa: NumaPlacement) -> Result<(), PinError> {
    let NumaPlacement::Node(node) = numa else { return Ok(()) };
    let nodes = limits::memory_nodes();
    if nodes.contains(&node) && (node as usize) < MAX_NODES {
        return Ok(());
    }
    Err(PinError::NoSuchNode { node, nodes })
}

/// How much can be pinned without reserved huge pages, and what sets that bound: what the machine,
/// the cgroups and the node have, less the reserve for others. `None` where nobody says.
#[must_use]
pub fn usable_memory(numa: NumaPlacement) -> Option<Available> {
    let node = match numa {
        NumaPlacement::Local => None,
        NumaPlacement::Node(node) => limits::node_memory(node),
    };
    let bounds = limits::available_memory().into_iter().chain(node);
    let Available { bytes, bound_by } = bounds.min_by_key(|bound| bound.bytes)?;
    let reserve = (bytes / RESERVE_DIVISOR).min(RESERVE_MAX_BYTES);
    Some(Available { bytes: bytes - reserve, bound_by })
}

fn check_memory(needed_bytes: u64, numa: NumaPlacement) -> Result<(), PinError> {
    match usable_memory(numa) {
        Some(Available { bytes: usable_bytes, bound_by }) if needed_bytes > usable_bytes => {
            Err(PinError::NotEnoughMemory { needed_bytes, usable_bytes, bound_by })
        }
        _ => Ok(()),
    }
}

fn map(options: &PinnedOptions) -> Result<(MmapRaw, PageKind), PinError> {
    let huge_bytes = options.bytes.next_multiple_of(HUGE_PAGE_BYTES);
    let wants_huge = options.huge_pages == HugePages::Prefer;
    if wants_huge && huge_pages_suffice(huge_bytes, options.numa) {
        match MmapOptions::new().len(huge_bytes).huge(Some(HUGE_PAGE_BITS)).map_anon() {
            Ok(map) => return Ok((map.into(), PageKind::Huge)),
            // Somebody else took them in between, or the hugetlb cgroup says no.
            Err(error) => tracing::info!(%error, "reserved huge pages could not be mapped"),
        }
    }
    // A mapping shorter than a huge page cannot hold one.
    let transparent = wants_huge && options.bytes >= HUGE_PAGE_BYTES;
    let page_bytes = if transparent { HUGE_PAGE_BYTES } else { rustix::param::page_size() };
    let bytes = options.bytes.next_multiple_of(page_bytes);
    // Reserved huge pages above need no such check: they were set aside when the pool was made.
    check_memory(bytes as u64, options.numa)?;
    let map = MmapOptions::new().len(bytes).map_anon().map_err(|source| PinError::System {
        step: "mmap",
        bytes: bytes as u64,
        source,
    })?;
    if !transparent {
        return Ok((map.into(), PageKind::Ordinary));
    }
    match map.advise(Advice::HugePage) {
        Ok(()) => Ok((map.into(), PageKind::TransparentHuge)),
        Err(error) => {
            // A kernel built without transparent huge pages says EINVAL.
            tracing::info!(%error, "transparent huge pages are not to be had");
            Ok((map.into(), PageKind::Ordinary))
        }
    }
}

fn huge_pages_suffice(bytes: usize, numa: NumaPlacement) -> bool {
    let node = match numa {
        NumaPlacement::Local => None,
        NumaPlacement::Node(node) => Some(node),
    };
    let free = limits::free_huge_pages(HUGE_PAGE_BYTES as u64, node);
    free >= (bytes / HUGE_PAGE_BYTES) as u64
}

/// Binds the mapping's future pages to `node`, which is below [`MAX_NODES`].
fn bind(map: &MmapRaw, node: u32) -> io::Result<()> {
    let mut mask: [libc::c_ulong; MAX_NODES / MASK_BITS] = [0; MAX_NODES / MASK_BITS];
    let node = node as usize;
    mask[node / MASK_BITS] = 1 << (node % MASK_BITS);
    // The kernel reads one bit less than it is told (get_nodes in mm/mempolicy.c).
    let max_node: libc::c_ulong = MAX_NODES as libc::c_ulong + 1;
    // SAFETY: the range is exactly `map`, which is alive; the mask is alive and has MAX_NODES
    // bits; mbind changes where pages will be, never their contents.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            map.as_mut_ptr(),
            map.len(),
            libc::MPOL_BIND,
            mask.as_ptr(),
            max_node,
            0,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes every page present and writable, so that the first fetch does not pay for it.
fn populate(map: &MmapRaw) -> io::Result<()> {
    match map.advise(Advice::PopulateWrite) {
        // Linux before 5.14 does not know the request; there, mlock alone has populated.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

/// `mlock` refuses for want of permission (EPERM), over the limit or over the address space
/// (ENOMEM), or because pages could not be brought in (EAGAIN).
fn lock_error(bytes: u64, source: io::Error) -> PinError {
    let limit = LockLimit::current();
    match source.raw_os_error() {
        // A capability inside a user namespace does not lift the limit, though it looks granted.
        Some(libc::EPERM) => PinError::LockLimit { needed_bytes: bytes, limit },
        Some(libc::ENOMEM) if !within_soft_limit(&limit, bytes) => {
            PinError::LockLimit { needed_bytes: bytes, limit }
        }
        _ => PinError::System { step: "mlock", bytes, source },
    }
}

fn within_soft_limit(limit: &LockLimit, bytes: u64) -> bool {
    limit.soft_bytes.is_none_or(|soft| limit.locked_bytes.saturating_add(bytes) <= soft)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(bytes: usize) -> PinnedOptions {
        PinnedOptions { bytes, huge_pages: HugePages::Prefer, numa: NumaPlacement::Local }
    }

    #[test]
    fn pinned_pages_are_zeroed_aligned_and_rounded_up() {
        let pages = PinnedPages::new(&options(10_000)).unwrap();
        let page = rustix::param::page_size();
        assert_eq!(pages.len() % page, 0);
        assert!(pages.len() >= 10_000);
        assert_eq!(pages.address().as_ptr() as usize % page, 0);
        // SAFETY: the mapping is alive, has at least 10,000 initialised bytes, and nothing else
        // refers to it.
        let bytes = unsafe { std::slice::from_raw_parts(pages.address().as_ptr(), 10_000) };
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn no_bytes_and_too_many_bytes_are_refused() {
        for bytes in [0, usize::MAX, isize::MAX as usize] {
            assert!(matches!(PinnedPages::new(&options(bytes)), Err(PinError::Size { .. })));
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused_before_it_is_touched() {
        let available = limits::available_memory().expect("/proc/meminfo is there");
        let wanted = usize::try_from(available.bytes).unwrap() + (1 << 30);
        let error = PinnedPages::new(&options(wanted)).unwrap_err();
        assert!(matches!(error, PinError::NotEnoughMemory { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("--expert-arena-bytes"), "{text}");
        assert!(text.contains("GiB"), "{text}");
    }

    #[test]
    fn a_node_that_is_not_there_is_named_with_those_that_are() {
        let numa = NumaPlacement::Node(4711);
        let error = PinnedPages::new(&PinnedOptions { numa, ..options(4096) }).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("4711") && text.contains("choose one of"), "{text}");
    }

    #[test]
    fn memory_can_be_bound_to_a_node() {
        let nodes = limits::memory_nodes();
        let node = *nodes.first().expect("/sys/devices/system/node lists one node at least");
        let numa = NumaPlacement::Node(node);
        let pages = PinnedPages::new(&PinnedOptions { numa, ..options(4096) }).unwrap();
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let start = format!("{:x}", pages.address().as_ptr() as usize);
        let line = maps.lines().find(|line| line.starts_with(&start)).expect("its own mapping");
        assert!(line.contains(&format!("bind:{node}")), "{line}");
        assert!(line.contains(&format!("N{node}=1")), "present on its node: {line}");
    }

    #[test]
    fn pinned_pages_are_locked_and_out_of_forks_and_dumps() {
        let pages = PinnedPages::new(&options(64 << 10)).unwrap();
        let flags = vm_flags(pages.address().as_ptr() as usize).expect("its own mapping");
        for flag in ["lo", "dc", "dd"] {
            assert!(flags.iter().any(|f| f == flag), "{flag} is not in {flags:?}");
        }
    }

    /// `VmFlags` of the mapping at `address` in `/proc/self/smaps`: lo locked, dc don't copy on
    /// fork, dd don't dump.
    fn vm_flags(address: usize) -> Option<Vec<String>> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{address:x}-");
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"))?;
        Some(flags.split_whitespace().map(str::to_owned).collect())
    }
}
