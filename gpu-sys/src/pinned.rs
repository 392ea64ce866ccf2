//! Pinned pages: one anonymous mapping that stays in memory, where it was put, until it is dropped.
//!
//! The order of construction is what makes the promises hold: map, keep out of forks and core
//! dumps, choose huge pages, bind to a NUMA node, and only then lock, which touches every page. A
//! node chosen after the first touch would not move anything.
//!
//! Whether there is that much memory is decided before it is locked ([`limits`]), because a lock that
//! the machine cannot serve ends with the kernel killing some process, perhaps another one.
//! [`RESERVE_MAX_BYTES`] of what is available stays for everybody else. Whether the process may lock
//! it the kernel decides: `mlock` refuses at once.
//!
//! A container may forbid any of these steps. What nobody has asked for by name is then done without
//! ([`Shortfall`]), with one line in the log:
//!
//! | step | without it |
//! |---|---|
//! | reserved huge pages, or their hugetlb cgroup | transparent ones |
//! | rounding up to whole huge pages | ordinary pages, where only those fit |
//! | `MADV_HUGEPAGE` | ordinary pages |
//! | `MADV_DONTFORK`, `MADV_DONTDUMP` | the pages are in forks and in core dumps |
//! | `mlock`, where it is forbidden and not only limited | the pages may be swapped out until a device has them |
//! | `MADV_POPULATE_WRITE` | `mlock` has brought the pages in, or they are written to |
//! | `mbind` | an error: a memory node is asked for by name |

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::limits::{self, Available, Bytes, IpcLock, LockLimit};

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
    /// The memory could not be put on the node that was asked for.
    #[error(
        "pinned memory cannot be bound to NUMA node {node}: mbind failed: {source}: allow it (a \
         container's seccomp profile; with Docker's, --cap-add SYS_NICE), or leave the node to the \
         kernel (a client's --expert-numa-node)"
    )]
    Bind {
        /// The node asked for.
        node: u32,
        /// The kernel's reason.
        source: io::Error,
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

impl PinError {
    /// Whether fewer bytes might be pinned where these cannot be.
    #[must_use]
    pub fn is_of_size(&self) -> bool {
        match self {
            Self::NotEnoughMemory { .. } | Self::LockLimit { .. } => true,
            Self::System { source, .. } => {
                matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN))
            }
            Self::Size { .. } | Self::NoSuchNode { .. } | Self::Bind { .. } => false,
        }
    }
}

/// What pinned memory lacks because the system forbids a step that nobody has asked for by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortfall {
    /// The reserved huge pages that are free cannot be used.
    ReservedHugePages,
    /// The kernel was not asked for transparent huge pages.
    TransparentHugePages,
    /// The memory is in forks.
    KeptOutOfForks,
    /// The memory is in core dumps.
    KeptOutOfDumps,
    /// The memory is not locked.
    Locked,
}

impl Shortfall {
    /// The value of a label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReservedHugePages => "reserved_huge_pages",
            Self::TransparentHugePages => "transparent_huge_pages",
            Self::KeptOutOfForks => "dontfork",
            Self::KeptOutOfDumps => "dontdump",
            Self::Locked => "mlock",
        }
    }
}

/// Memory that is locked, kept out of forks and core dumps, and at a fixed address; what of that the
/// system forbids is among its [`shortfalls`](PinnedPages::shortfalls).
///
/// It starts out as zeros. Only its address is handed out: whoever turns that into references
/// answers for who else reads and writes there.
#[derive(Debug)]
pub struct PinnedPages {
    // Dropped by hand: a mapping that cannot be unlocked is leaked.
    map: ManuallyDrop<MmapRaw>,
    kind: PageKind,
    numa: NumaPlacement,
    lacks: Vec<Shortfall>,
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
        let huge_bytes = options.bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let page_bytes = options.bytes.next_multiple_of(rustix::param::page_size());
        let wants_huge = options.huge_pages == HugePages::Prefer;
        let mut lacks = Vec::new();
        if wants_huge && huge_pages_suffice(huge_bytes, options.numa) {
            match Self::of_kind(huge_bytes, options.numa, PageKind::Huge) {
                Ok(pages) => return Ok(pages),
                // Somebody else took them in between, or the hugetlb cgroup says no.
                Err(error) => {
                    tracing::warn!(%error, "reserved huge pages cannot be used");
                    lacks.push(Shortfall::ReservedHugePages);
                }
            }
        }
        // A mapping shorter than a huge page cannot hold one.
        let mut pages = if wants_huge && options.bytes >= HUGE_PAGE_BYTES {
            match Self::of_kind(huge_bytes, options.numa, PageKind::TransparentHuge) {
                Err(error) if error.is_of_size() && page_bytes < huge_bytes => {
                    Self::of_kind(page_bytes, options.numa, PageKind::TransparentHuge)
                }
                tried => tried,
            }?
        } else {
            Self::of_kind(page_bytes, options.numa, PageKind::Ordinary)?
        };
        pages.lacks.extend(lacks);
        Ok(pages)
    }

    /// Pins `bytes`, which are whole pages of `kind`.
    fn of_kind(bytes: usize, numa: NumaPlacement, kind: PageKind) -> Result<Self, PinError> {
        let mut lacks = Vec::new();
        let (map, kind) = map(bytes, numa, kind, &mut lacks)?;
        let apart = [
            (Advice::DontFork, Shortfall::KeptOutOfForks, "forks get the pinned memory"),
            (Advice::DontDump, Shortfall::KeptOutOfDumps, "core dumps have the pinned memory"),
        ];
        for (advice, shortfall, what) in apart {
            if let Err(error) = map.advise(advice) {
                tracing::warn!(?advice, %error, "madvise is refused: {what}");
                lacks.push(shortfall);
            }
        }
        if let NumaPlacement::Node(node) = numa {
            bind(&map, node).map_err(|source| PinError::Bind { node, source })?;
        }
        let locked = lock(&map)?;
        populate(&map, kind, locked)?;
        if locked == Locked::No {
            lacks.push(Shortfall::Locked);
        }
        tracing::debug!(bytes, pages = %kind, ?numa, "pinned memory");
        Ok(Self { map: ManuallyDrop::new(map), kind, numa, lacks })
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

    /// What they lack because the system forbids it.
    #[must_use]
    pub fn shortfalls(&self) -> &[Shortfall] {
        &self.lacks
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        let (address, bytes) = (self.map.as_ptr(), self.map.len());
        let is_locked = !self.lacks.contains(&Shortfall::Locked);
        if is_locked && let Err(error) = self.map.unlock() {
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

/// A mapping of `bytes`, and the kind of its pages.
fn map(
    bytes: usize,
    numa: NumaPlacement,
    kind: PageKind,
    lacks: &mut Vec<Shortfall>,
) -> Result<(MmapRaw, PageKind), PinError> {
    let mut options = MmapOptions::new();
    options.len(bytes);
    match kind {
        PageKind::Huge => options.huge(Some(HUGE_PAGE_BITS)),
        // Reserved huge pages need no such check: they were set aside when the pool was made.
        PageKind::TransparentHuge | PageKind::Ordinary => {
            check_memory(bytes as u64, numa)?;
            &mut options
        }
    };
    let refused = |source| PinError::System { step: "mmap", bytes: bytes as u64, source };
    let map = options.map_anon().map_err(refused)?;
    if kind == PageKind::TransparentHuge
        && let Err(error) = map.advise(Advice::HugePage)
    {
        // A kernel built without transparent huge pages says EINVAL.
        tracing::info!(%error, "transparent huge pages are not to be had");
        lacks.push(Shortfall::TransparentHugePages);
        return Ok((map.into(), PageKind::Ordinary));
    }
    Ok((map.into(), kind))
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

/// Whether `mlock` has locked the memory, and so brought its pages in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Locked {
    Yes,
    No,
}

/// Locks the memory, unless the system forbids that altogether.
///
/// `mlock` refuses over the limit or over the address space (ENOMEM), or because pages could not be
/// brought in (EAGAIN; ENOMEM for huge pages that a cgroup withholds). For want of permission
/// (EPERM) it refuses only where the limit is 0; otherwise a filter of system calls did.
fn lock(map: &MmapRaw) -> Result<Locked, PinError> {
    let Err(source) = map.lock() else { return Ok(Locked::Yes) };
    let (limit, bytes) = (LockLimit::current(), map.len() as u64);
    let over = limit.soft_bytes.is_some_and(|soft| limit.locked_bytes.saturating_add(bytes) > soft);
    // What the kernel has refused the capability has not lifted.
    let capability = match limit.capability {
        IpcLock::Granted => IpcLock::Absent,
        known => known,
    };
    let limit_error =
        PinError::LockLimit { needed_bytes: bytes, limit: LockLimit { capability, ..limit } };
    match source.raw_os_error() {
        Some(libc::EPERM) if limit.soft_bytes == Some(0) => Err(limit_error),
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => {
            tracing::warn!(error = %source, "mlock is refused: pinned memory may be swapped out");
            Ok(Locked::No)
        }
        Some(libc::ENOMEM) if over => Err(limit_error),
        _ => Err(PinError::System { step: "mlock", bytes, source }),
    }
}

/// Makes every page present and writable, so that the first fetch does not pay for it.
fn populate(map: &MmapRaw, kind: PageKind, locked: Locked) -> Result<(), PinError> {
    let Err(source) = map.advise(Advice::PopulateWrite) else { return Ok(()) };
    match (source.raw_os_error(), locked, kind) {
        // Linux before 5.14 does not know the request, and a filter of system calls may forbid it.
        (Some(libc::EINVAL | libc::EPERM | libc::EACCES | libc::ENOSYS), Locked::Yes, _) => Ok(()),
        (
            Some(libc::EINVAL | libc::EPERM | libc::EACCES | libc::ENOSYS),
            Locked::No,
            PageKind::TransparentHuge | PageKind::Ordinary,
        ) => {
            touch(map);
            Ok(())
        }
        // Writing to a huge page that a cgroup withholds would end in SIGBUS.
        _ => {
            let (step, bytes) = ("madvise(MADV_POPULATE_WRITE)", map.len() as u64);
            Err(PinError::System { step, bytes, source })
        }
    }
}

/// Writes to every page.
fn touch(map: &MmapRaw) {
    for offset in (0..map.len()).step_by(rustix::param::page_size()) {
        // SAFETY: the offset is inside the mapping.
        let page = unsafe { map.as_mut_ptr().add(offset) };
        // SAFETY: the mapping is writable, and nobody else knows of it yet.
        unsafe { page.write_volatile(0) };
    }
}

#[cfg(test)]
mod tests;
