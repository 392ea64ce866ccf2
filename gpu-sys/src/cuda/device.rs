//! A device and its primary context.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::ffi::{self, Driver};
use super::{CudaError, Unavailable};

/// A CUDA device with its primary context retained.
pub struct CudaDevice {
    driver: &'static Driver,
    ordinal: u32,
    device: ffi::CUdevice,
    context: ffi::CUcontext,
    name: String,
}

/// What a device can do with memory of the host, as its attributes say
/// (`CUdevice_attribute` in the CUDA driver API).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemory {
    /// Pinned memory can be registered with it (`HOST_REGISTER_SUPPORTED`).
    pub registers: bool,
    /// It sees registered memory at the processor's addresses
    /// (`CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`).
    pub same_address: bool,
    /// It shares its memory with the processor (`INTEGRATED`).
    pub integrated: bool,
}

// SAFETY: the driver's functions may be called from any thread, and a context handle is only a
// name that is pushed onto the calling thread's own stack before use.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens device `ordinal`, as the driver counts them.
    ///
    /// # Errors
    /// There is no driver or no such device, or the driver refuses.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::load()?;
        let devices = count(driver)?;
        if devices == 0 {
            return Err(Unavailable::NoDevice.into());
        }
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        if ordinal >= devices {
            return Err(Unavailable::NoSuchDevice { ordinal, devices }.into());
        }
        let mut device: ffi::CUdevice = 0;
        // SAFETY: `cuInit` has succeeded in `count`, and the pointer is to a live local.
        let status = unsafe { (driver.device)(&raw mut device, number) };
        driver.check("cuDeviceGet", status)?;
        if attribute(driver, device, ffi::CAN_MAP_HOST_MEMORY)? == 0 {
            return Err(Unavailable::CannotMapHostMemory { ordinal }.into());
        }
        let name = name(driver, device)?;
        let mut context: ffi::CUcontext = std::ptr::null_mut();
        // SAFETY: `device` came from cuDeviceGet, and the pointer is to a live local.
        let status = unsafe { (driver.retain_context)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", status)?;
        Ok(Arc::new(Self { driver, ordinal, device, context, name }))
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The device's name, as the driver prints it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the device can do with memory of the host.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn host_memory(&self) -> Result<HostMemory, CudaError> {
        let has = |what| Ok::<_, CudaError>(attribute(self.driver, self.device, what)? != 0);
        Ok(HostMemory {
            registers: has(ffi::HOST_REGISTER_SUPPORTED)?,
            same_address: has(ffi::SAME_ADDRESS)?,
            integrated: has(ffi::INTEGRATED)?,
        })
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Makes this device's context the calling thread's own until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context was retained in `open` and is released only in `drop`.
        let status = unsafe { (self.driver.push_context)(self.context) };
        self.driver.check("cuCtxPushCurrent", status)?;
        Ok(Entered { device: self, _this_thread: PhantomData })
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({} {:?})", self.ordinal, self.name)
    }
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {} ({})", self.ordinal, self.name)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`, released once here; registrations and events hold this
        // device, so none of them is left.
        let status = unsafe { (self.driver.release_context)(self.device) };
        if let Err(error) = self.driver.check("cuDevicePrimaryCtxRelease", status) {
            tracing::warn!(device = %self, %error, "the device's context stays retained");
        }
    }
}

/// The context on top of this thread's stack; popped when dropped, on the same thread.
pub(super) struct Entered<'a> {
    device: &'a CudaDevice,
    // The stack is the thread's, so the guard must not leave it: a raw pointer is not Send.
    _this_thread: PhantomData<*mut ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped: ffi::CUcontext = std::ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread, and the pointer is to a live local.
        let status = unsafe { (self.device.driver.pop_context)(&raw mut popped) };
        if let Err(error) = self.device.driver.check("cuCtxPopCurrent", status) {
            tracing::warn!(device = %self.device, %error, "a context stays on this thread's stack");
        }
    }
}

/// Initialises the driver and counts devices; a driver without any says so or counts none.
pub(super) fn count(driver: &Driver) -> Result<u32, CudaError> {
    // SAFETY: 0 is the only flag there is, and initialising twice is allowed.
    let status = unsafe { (driver.init)(0) };
    if status == ffi::NO_DEVICE {
        return Ok(0);
    }
    driver.check("cuInit", status)?;
    let mut count: c_int = 0;
    // SAFETY: `cuInit` has succeeded, and the pointer is to a live local.
    let status = unsafe { (driver.device_count)(&raw mut count) };
    driver.check("cuDeviceGetCount", status)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn attribute(driver: &Driver, device: ffi::CUdevice, attribute: u32) -> Result<c_int, CudaError> {
    let mut value: c_int = 0;
    // SAFETY: `device` came from cuDeviceGet, and the pointer is to a live local.
    let status = unsafe { (driver.device_attribute)(&raw mut value, attribute, device) };
    driver.check("cuDeviceGetAttribute", status)?;
    Ok(value)
}

fn name(driver: &Driver, device: ffi::CUdevice) -> Result<String, CudaError> {
    let mut buffer = [0_u8; 256];
    let at = buffer.as_mut_ptr().cast::<c_char>();
    // SAFETY: the buffer is a live local of the length that is passed.
    let status = unsafe { (driver.device_name)(at, buffer.len() as c_int, device) };
    driver.check("cuDeviceGetName", status)?;
    let name = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}
