//! What can be looked at without a peer and without RDMA: memory, direct reads, CUDA, the secret.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use expert_peer::cli::{one_line, store_error};
use expert_tier::store::ExpertStore;
use expert_tier::uma::UmaTier;
use expert_tier::wire::Secret;
use gpu_sys::cuda::{self, CudaDevice, CudaError, HostMemory, HostRegistration, Probe};
use gpu_sys::limits::{self, Bytes, LockLimit, Registrations, TransparentHuge};
use gpu_sys::pinned::{
    HUGE_PAGE_BYTES, HugePages, NumaPlacement, PageKind, PinError, PinnedOptions, PinnedPages,
};

use super::Settings;
use super::report::{Report, Status};
use crate::backend::DEFAULT_ARENA_BYTES;

/// Most memory that is pinned to see whether it can be.
const PROBE_BYTES: u64 = DEFAULT_ARENA_BYTES;
/// Most bytes that are granted to a peer on one rail at once.
#[cfg(metrale_rdma_verbs)]
const GRANT_BYTES_PER_RAIL: u64 = expert_peer::GRANT_BYTES_PER_RAIL;
#[cfg(not(metrale_rdma_verbs))]
const GRANT_BYTES_PER_RAIL: u64 = 0;
/// Most CUDA devices that are looked at, one after the other.
const MAX_CUDA_DEVICES: u32 = 16;
/// How to raise the locked-memory limit.
const RAISE_LOCK_LIMIT: &str = "raise `ulimit -l` (LimitMEMLOCK= in a systemd unit, --ulimit \
    memlock= for a container), or grant CAP_IPC_LOCK, or set a smaller --expert-arena-bytes";

/// Whether a handshake can be tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SecretState {
    /// It can be read, or none is given.
    Usable,
    /// It is given and cannot be read.
    Unusable,
}

/// The secret's file: there, readable, long enough, and for nobody else.
pub(super) fn secret(report: &mut Report, file: Option<&Path>) -> SecretState {
    let name = "secret file";
    let Some(file) = file else {
        report.ok(name, "none is given; a peer that listens beyond loopback wants one");
        return SecretState::Usable;
    };
    let path = file.display();
    if let Err(error) = Secret::read(file) {
        let fix = format!(
            "make one with `(umask 077; head -c 32 /dev/urandom | base64 > {path})`, and give both \
             ends the same; whoever runs this must be allowed to read it"
        );
        report.fail(name, error.to_string(), fix);
        return SecretState::Unusable;
    }
    let mode = std::fs::metadata(file).map_or(0, |found| found.permissions().mode() & 0o777);
    if mode & 0o077 != 0 {
        let found = format!("{path} has mode {mode:03o}: others may read it");
        report.warn(name, found, format!("chmod 600 {path}"));
    } else {
        report.ok(name, format!("{path} can be read, by its owner alone"));
    }
    SecretState::Usable
}

/// Locked memory against what an arena needs, and the pages that it gets. With `rails` rails each
/// one's device registers the arena again, and what the peer pushes is registered once more: the sum
/// of [`LockLimit::room`], as for an arena that nobody has set.
pub(super) fn memory(report: &mut Report, settings: &Settings, rails: usize) {
    let wanted_bytes = settings.arena_bytes.unwrap_or(DEFAULT_ARENA_BYTES);
    let rails = rails as u64;
    let unpushed = Registrations { devices: rails, ..Registrations::default() };
    let grant_bytes = rails * GRANT_BYTES_PER_RAIL;
    let all = Registrations { grant_bytes, ..unpushed };
    let limit = LockLimit::current();
    let name = "locked memory";
    let arena = match settings.arena_bytes {
        Some(_) => "the arena of --expert-arena-bytes",
        None => "a default arena",
    };
    let each = if rails > 1 { format!(" for each of {rails} rails") } else { String::new() };
    let granted = match wanted_bytes.min(grant_bytes) {
        0 => String::new(),
        bytes => format!(", and up to {} for what a peer pushes", Bytes(bytes)),
    };
    let need = format!("{arena} needs {}{each}{granted}", Bytes(wanted_bytes));
    let limit_text = match limit.soft_bytes {
        Some(_) => format!("the limit is {limit}"),
        None => limit.to_string(),
    };
    // Without a size set, the arena is made as small as the limit wants it; and fewer parts are pushed
    // at once where there is no room for more.
    let is_too_large = settings.arena_bytes.is_some() && !limit.holds(wanted_bytes, &unpushed);
    let short = if is_too_large { Status::Fail } else { Status::Warn };
    if !limit.holds(wanted_bytes, &all) {
        let found = format!("{limit_text}; {need}");
        report.say(short, name, found, RAISE_LOCK_LIMIT);
        return huge_pages(report, settings, None);
    }
    match pin(settings, wanted_bytes.min(PROBE_BYTES)) {
        Ok(pages) => {
            let pinned = Bytes(pages.len() as u64);
            report.ok(name, format!("{limit_text}; {need}; {pinned} could be pinned"));
            huge_pages(report, settings, Some(pages.page_kind()));
        }
        Err(error) => {
            let fix = match error {
                PinError::NotEnoughMemory { .. } => {
                    "free memory, or set a smaller \
                    --expert-arena-bytes"
                }
                PinError::NoSuchNode { .. } => "set --expert-numa-node to one of them",
                _ => RAISE_LOCK_LIMIT,
            };
            let short = match settings.arena_bytes {
                Some(_) => Status::Fail,
                None => Status::Warn,
            };
            report.say(short, name, format!("{need}; {error}"), fix);
            huge_pages(report, settings, None);
        }
    }
}

fn pin(settings: &Settings, bytes: u64) -> Result<PinnedPages, PinError> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let (huge_pages, numa) = (settings.huge_pages, settings.numa);
    PinnedPages::new(&PinnedOptions { bytes, huge_pages, numa })
}

/// Huge pages; `got` is what the arena that was tried had.
fn huge_pages(report: &mut Report, settings: &Settings, got: Option<PageKind>) {
    let name = "huge pages";
    if settings.huge_pages == HugePages::Off {
        return report.ok(name, "switched off by --expert-huge-pages off");
    }
    let node = match settings.numa {
        NumaPlacement::Node(node) => Some(node),
        NumaPlacement::Local => None,
    };
    let page = Bytes(HUGE_PAGE_BYTES as u64);
    let free = limits::free_huge_pages(HUGE_PAGE_BYTES as u64, node);
    let reserved = match free {
        0 => format!("none of {page} is reserved"),
        free => format!("{free} reserved ones of {page} are free"),
    };
    let pages =
        settings.arena_bytes.unwrap_or(DEFAULT_ARENA_BYTES).div_ceil(HUGE_PAGE_BYTES as u64);
    let reserve = format!("reserve some (sysctl vm.nr_hugepages={pages} holds the arena)");
    match (got, limits::transparent_huge_pages()) {
        (Some(PageKind::Huge), _) => report.ok(name, format!("the arena has them: {reserved}")),
        (_, Some(TransparentHuge::Always | TransparentHuge::Asked)) => {
            report.ok(name, format!("{reserved}; the arena gets transparent ones where it can"));
        }
        (_, Some(TransparentHuge::Never)) => {
            let fix = format!(
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or {reserve}: fewer \
                 TLB misses, and shorter registration"
            );
            report.warn(name, format!("{reserved}, and transparent ones are switched off"), fix);
        }
        (_, None) => {
            let found = format!("{reserved}, and this kernel has no transparent ones");
            report.warn(name, found, format!("{reserve}: fewer TLB misses"));
        }
    }
}

/// io_uring, and `O_DIRECT` on the store's file system where a store is given.
pub(super) fn direct_reads(report: &mut Report, store: Option<&Path>) {
    let through_cache = "or use --expert-backend posix; uma then reads through the page cache";
    match UmaTier::probe_io_uring() {
        Ok(()) => report.ok("io_uring", "works"),
        Err(error) => report.warn(
            "io_uring",
            error.to_string(),
            format!(
                "allow it (sysctl kernel.io_uring_disabled=0; a container's seccomp profile), \
                 {through_cache}"
            ),
        ),
    }
    let Some(dir) = store else { return };
    let store = match ExpertStore::open(dir) {
        Ok(store) => store,
        Err(error) => {
            let error = one_line(&store_error(dir, error));
            let fix = "pack the store anew (`metrale pack`), or name another with --expert-store";
            return report.fail("store", error, fix);
        }
    };
    let records = store.manifest().layout().records();
    let (dir, fingerprint) = (dir.display(), store.manifest().fingerprint());
    report.ok("store", format!("{dir} has {records} records; fingerprint {fingerprint}"));
    match UmaTier::probe_direct_reads(&store) {
        Ok(()) => report.ok("O_DIRECT", format!("works on every file of {dir}")),
        Err(error) => report.warn(
            "O_DIRECT",
            error.to_string(),
            format!("put the store on ext4 or XFS on a local disk, {through_cache}"),
        ),
    }
}

/// The CUDA driver, and whether each device takes pinned memory of the host.
pub(super) fn cuda(report: &mut Report) {
    let name = "CUDA";
    let no_gpu = "needed only where a GPU reads the arena; without it the arena has host addresses";
    match cuda::probe() {
        Ok(Probe::Present { devices }) => {
            (0..devices.min(MAX_CUDA_DEVICES)).for_each(|ordinal| cuda_device(report, ordinal));
        }
        Ok(Probe::Absent(reason)) => report.warn(name, reason.to_string(), no_gpu),
        Err(error) => {
            let fix = format!("see `nvidia-smi` and the kernel's log; {no_gpu}");
            report.warn(name, error.to_string(), fix);
        }
    }
}

fn cuda_device(report: &mut Report, ordinal: u32) {
    let name = format!("CUDA device {ordinal}");
    let (found, memory) = match try_cuda(ordinal) {
        Ok(found) => found,
        Err(error) => {
            let fix = "see `nvidia-smi`; without the device the arena has host addresses only";
            return report.warn(name, error.to_string(), fix);
        }
    };
    let HostMemory { registers, same_address, integrated } = memory;
    let says = |yes: bool| if yes { "yes" } else { "no" };
    let found = format!(
        "{found}; registers host memory: {}, at the processor's addresses: {}, shares memory with \
         the processor: {}",
        says(registers),
        says(same_address),
        says(integrated)
    );
    report.ok(name, found);
}

/// Registers a little pinned memory, as an arena does, and lets go of it.
fn try_cuda(ordinal: u32) -> Result<(String, HostMemory), CudaError> {
    const BYTES: usize = 64 << 10;
    let device = CudaDevice::open(ordinal)?;
    let memory = device.host_memory()?;
    let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
    let tried = match PinnedPages::new(&PinnedOptions { bytes: BYTES, huge_pages, numa }) {
        Ok(pages) => {
            HostRegistration::new(&device, &Arc::new(pages))?;
            "pinned memory was registered"
        }
        // The check of locked memory says why.
        Err(_) => "no memory could be pinned to try",
    };
    Ok((format!("{}: {tried}", device.name()), memory))
}
