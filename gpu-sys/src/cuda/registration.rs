//! Pinned pages that a device may read and write.

use std::ffi::c_void;
use std::sync::Arc;

use super::device::CudaDevice;
use super::{CudaError, ffi};
use crate::pinned::PinnedPages;

const FLAGS: u32 = ffi::CU_MEMHOSTREGISTER_PORTABLE | ffi::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Pinned pages registered with CUDA: every context of the process may use them, and this device
/// has an address for them.
///
/// Dropping it unregisters first and lets go of the pages after; if unregistering fails, the
/// driver may still hold their addresses, and the pages are leaked.
#[derive(Debug)]
pub struct HostRegistration {
    // Both outlive the registration because they are dropped after `drop` has run.
    pages: Arc<PinnedPages>,
    device: Arc<CudaDevice>,
    device_address: u64,
}

impl HostRegistration {
    /// Registers all of `pages` with `device`.
    ///
    /// # Errors
    /// The driver refuses; nothing stays registered.
    pub fn new(device: &Arc<CudaDevice>, pages: &Arc<PinnedPages>) -> Result<Self, CudaError> {
        let driver = device.driver();
        let address = pages.address().as_ptr().cast::<c_void>();
        let entered = device.enter()?;
        // SAFETY: the range is exactly one live mapping, and `pages` is held until it has been
        // unregistered.
        let status = unsafe { (driver.register_host)(address, pages.len(), FLAGS) };
        driver.check("cuMemHostRegister", status)?;
        // From here on an early return unregisters.
        let mut registration =
            Self { pages: Arc::clone(pages), device: Arc::clone(device), device_address: 0 };
        let mut at: ffi::CUdeviceptr = 0;
        // SAFETY: `address` was registered with DEVICEMAP above; the pointer is to a live local.
        let status = unsafe { (driver.host_device_pointer)(&raw mut at, address, 0) };
        driver.check("cuMemHostGetDevicePointer", status)?;
        drop(entered);
        registration.device_address = at;
        Ok(registration)
    }

    /// Where the device sees the first byte.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    fn unregister(&self) -> Result<(), CudaError> {
        let driver = self.device.driver();
        let _entered = self.device.enter()?;
        // SAFETY: registered once in `new`, unregistered once by `drop`; `pages` is still alive.
        let status = unsafe { (driver.unregister_host)(self.pages.address().as_ptr().cast()) };
        driver.check("cuMemHostUnregister", status)
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Err(error) = self.unregister() {
            let bytes = self.pages.len();
            tracing::error!(device = %self.device, bytes, %error,
                "the device could not be made to forget pinned memory: it is leaked");
            // One count that never goes down: the mapping outlives the process's last use of it.
            std::mem::forget(Arc::clone(&self.pages));
        }
    }
}
