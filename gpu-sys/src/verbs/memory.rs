//! Protection domains, and memory registered with a device.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::Context;
use super::error::{DeregError, VerbsError, check};
use super::ffi::{self, ibv_access_flags as flags};
use crate::limits::{self, LockLimit};
use crate::pinned::PinnedPages;

/// Memory that can be registered with a device.
///
/// # Safety
/// `region` returns the same region every time, and it stays mapped, and where it is, as long as the
/// value lives, however the value is moved. With [`Access::LocalWrite`] or [`Access::RemoteWrite`]
/// a device writes there while somebody has asked it to, so nobody may hold references to such bytes
/// then.
pub unsafe trait Memory: Send + Sync {
    /// The region's start and length in bytes.
    fn region(&self) -> (NonNull<u8>, usize);

    /// Whether devices and peers may be let write there. Where not, only [`Access::LocalRead`] and
    /// [`Access::RemoteRead`] are to be had.
    fn takes_writes(&self) -> bool {
        true
    }
}

// SAFETY: one mapping, made once and unmapped when dropped; only its address is given out.
unsafe impl Memory for PinnedPages {
    fn region(&self) -> (NonNull<u8>, usize) {
        (self.address(), self.len())
    }
}

/// What a registration lets the device and the peers do; the device may always read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Nothing more: the source of WRITEs and SENDs.
    LocalRead,
    /// The device writes what its own requests bring: the target of READs and receives.
    LocalWrite,
    /// Peers read. The device cannot write.
    RemoteRead,
    /// Peers write: a grant. The specification wants local write with it (`ibv_reg_mr(3)`).
    RemoteWrite,
}

impl Access {
    /// Whether it lets anybody write.
    fn writes(self) -> bool {
        matches!(self, Self::LocalWrite | Self::RemoteWrite)
    }

    fn flags(self) -> u32 {
        let set = |flag: flags| flag.0;
        match self {
            Self::LocalRead => 0,
            Self::LocalWrite => set(flags::IBV_ACCESS_LOCAL_WRITE),
            Self::RemoteRead => set(flags::IBV_ACCESS_REMOTE_READ),
            Self::RemoteWrite => {
                set(flags::IBV_ACCESS_LOCAL_WRITE) | set(flags::IBV_ACCESS_REMOTE_WRITE)
            }
        }
    }
}

/// What registrations and queue pairs that belong together are made in.
///
/// Dropping it frees it: registrations and queue pairs hold it, so none is left by then.
#[derive(Debug)]
pub struct ProtectionDomain {
    raw: NonNull<ffi::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Makes one on `context`.
    ///
    /// # Errors
    /// The device has no more of them.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the device is open.
        let raw = unsafe { (context.library().table.alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw);
        let raw = raw.ok_or_else(|| VerbsError::last("ibv_alloc_pd", context.name()))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    /// The device.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: made once, freed once, while the device is still open.
        let status = unsafe { (self.context.library().table.dealloc_pd)(self.raw.as_ptr()) };
        if let Err(error) = check("ibv_dealloc_pd", status, self.context.name()) {
            tracing::warn!(%error, "a protection domain is leaked");
        }
    }
}

/// A range of memory registered with a device.
///
/// Dropping it deregisters; if that fails, the device may still write, and the memory is leaked.
/// [`MemoryRegion::deregister`] tells. When deregistering has succeeded, nothing that a peer or this
/// device still has under way with the region's keys changes the memory any more: this is the fence
/// behind a grant.
pub struct MemoryRegion {
    // Dropped by hand: leaked when the device does not let go of it.
    memory: ManuallyDrop<Arc<dyn Memory>>,
    // `None` once it has been deregistered.
    raw: Option<NonNull<ffi::ibv_mr>>,
    domain: Arc<ProtectionDomain>,
    start: NonNull<u8>,
    bytes: usize,
    lkey: u32,
    rkey: u32,
}

// SAFETY: libibverbs is thread-safe, the memory is `Send` and `Sync`, and the start is only its
// address.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for MemoryRegion {}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, lkey, rkey) = (self.device(), self.lkey, self.rkey);
        write!(
            f,
            "MemoryRegion({} bytes at {:?} on {device}, lkey {lkey:#x}, rkey {rkey:#x})",
            self.bytes, self.start
        )
    }
}

impl MemoryRegion {
    /// Registers `range` (bytes from the start) of `memory`. The pages are pinned, and count against
    /// the locked-memory limit once for each device.
    ///
    /// # Errors
    /// The range is empty or not inside the memory, longer than the device registers at once, or
    /// more than the process may lock: the error has the numbers and what to change.
    pub fn register(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let (first, whole) = memory.region();
        if range.start >= range.end || range.end > whole {
            return Err(VerbsError::Range { start: range.start, end: range.end, bytes: whole });
        }
        let context = &domain.context;
        if access.writes() && !memory.takes_writes() {
            return Err(VerbsError::ReadOnly { device: context.name().to_owned(), access });
        }
        let (bytes, max_bytes) = (range.len(), context.limits().max_mr_size);
        if bytes as u64 > max_bytes {
            let device = context.name().to_owned();
            return Err(VerbsError::RegionTooLong { device, bytes: bytes as u64, max_bytes });
        }
        // SAFETY: `range.start` is inside the region, which is one mapping.
        let start = unsafe { first.add(range.start) };
        // libibverbs takes the flags as a signed number.
        let access = access.flags().cast_signed();
        // SAFETY: the range is mapped and stays so while `memory` is held, which is until the
        // region has been deregistered.
        let raw = unsafe {
            (context.library().table.reg_mr)(domain.raw(), start.as_ptr().cast(), bytes, access)
        };
        let Some(raw) = NonNull::new(raw) else {
            let source = io::Error::last_os_error();
            return Err(refused(context.name(), bytes as u64, source));
        };
        // SAFETY: a live registration; its keys do not change.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        let (memory, domain) = (ManuallyDrop::new(memory), Arc::clone(domain));
        Ok(Self { memory, raw: Some(raw), domain, start, bytes, lkey, rkey })
    }

    /// The key that this device's own requests name the memory with.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key that peers name the memory with.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The address that requests, a peer's too, name the first byte with.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    /// Bytes registered.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "no bytes cannot be registered")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        self.domain.context.name()
    }

    /// Undoes the registration. From its success on nothing that names the region's keys, here or
    /// at a peer, changes the memory.
    ///
    /// # Errors
    /// The device refuses: the region comes back, and still holds.
    pub fn deregister(mut self) -> Result<(), DeregError> {
        match self.deregister_once() {
            Ok(()) => Ok(()),
            Err(source) => Err(DeregError { region: self, source }),
        }
    }

    /// Whether `bytes` from `start` lie in the region.
    pub(super) fn covers(&self, start: NonNull<u8>, bytes: usize) -> bool {
        let (first, at) = (self.start.as_ptr().addr(), start.as_ptr().addr());
        at >= first && at - first <= self.bytes && bytes <= self.bytes - (at - first)
    }

    /// Asks the device, unless it has been asked with success; after a failure the registration
    /// still holds (`ibv_dereg_mr(3)`).
    fn deregister_once(&mut self) -> io::Result<()> {
        let Some(raw) = self.raw else { return Ok(()) };
        // SAFETY: registered in `register`, and not deregistered yet, or `raw` would be `None`.
        let status = unsafe { (self.domain.context().library().table.dereg_mr)(raw.as_ptr()) };
        match status {
            0 => self.raw = None,
            number if number > 0 => return Err(io::Error::from_raw_os_error(number)),
            _ => return Err(io::Error::last_os_error()),
        }
        Ok(())
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        match self.deregister_once() {
            // SAFETY: drop runs once, and the memory is not used afterwards.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.memory) },
            Err(error) => {
                let device = self.domain.context.name();
                tracing::error!(device, bytes = self.bytes, %error,
                    "ibv_dereg_mr failed: this memory is leaked");
                // The registration lives on, and needs its protection domain and device.
                std::mem::forget(Arc::clone(&self.domain));
            }
        }
    }
}

/// Why a registration was refused: the kernel says ENOMEM both for a limit and for want of memory.
fn refused(device: &str, needed_bytes: u64, source: io::Error) -> VerbsError {
    let limit = LockLimit::current();
    let is_limit = matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM))
        && !limit.allows_registered(needed_bytes);
    if is_limit {
        let device = device.to_owned();
        return VerbsError::LockLimit { device, needed_bytes, limit };
    }
    let on = format!("{} with {device}", limits::Bytes(needed_bytes));
    VerbsError::Call { call: "ibv_reg_mr", on, source }
}
