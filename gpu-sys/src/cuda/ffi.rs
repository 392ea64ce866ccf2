//! The driver's symbols, resolved once: the only file that names them.
//!
//! Types, constants and the library's name are cudarc's. Its functions are not called, for two
//! reasons: they panic where a symbol is missing, and they return a Rust enum, for which a status
//! that a newer driver invents would be undefined behaviour. Here a status is a plain number.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
pub(super) use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUdevice, CUdeviceptr,
    CUevent, CUstream,
};

use super::{CudaError, Unavailable};

/// Status of a call that succeeded.
pub(super) const SUCCESS: c_uint = sys::CUresult::CUDA_SUCCESS as c_uint;
/// Status of a query about work that has not finished.
pub(super) const NOT_READY: c_uint = sys::CUresult::CUDA_ERROR_NOT_READY as c_uint;
/// Status of `cuInit` on a machine with a driver and without a device.
pub(super) const NO_DEVICE: c_uint = sys::CUresult::CUDA_ERROR_NO_DEVICE as c_uint;
/// An event without time stamps, which is cheaper to record.
pub(super) const EVENT_DISABLE_TIMING: c_uint =
    sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
/// Whether the device can map host memory at all.
pub(super) const CAN_MAP_HOST_MEMORY: c_uint =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY as c_uint;
/// Whether `cuMemHostRegister` is to be had on the device.
pub(super) const HOST_REGISTER_SUPPORTED: c_uint =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED as c_uint;
/// Whether the device sees registered host memory at the processor's own addresses.
pub(super) const SAME_ADDRESS: c_uint =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM as c_uint;
/// Whether device and processor share one memory.
pub(super) const INTEGRATED: c_uint =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED as c_uint;

macro_rules! driver_functions {
    ($($field:ident = $symbol:literal ( $($arg:ty),* );)*) => {
        /// The driver's functions, with the signatures of `cuda.h`.
        pub(super) struct Driver {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> c_uint,)*
        }

        impl Driver {
            fn resolve() -> Result<Self, Unavailable> {
                // SAFETY: loading libcuda runs its initialisers, which expect no preparation.
                if !unsafe { sys::is_culib_present() } {
                    return Err(Unavailable::NoDriver);
                }
                // SAFETY: as above; the library was found a moment ago, so this does not panic.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($field: {
                        let name = concat!($symbol, "\0").as_bytes();
                        // SAFETY: cuda.h declares this symbol as a function of this type.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) -> c_uint>(name)
                        };
                        // The library is never unloaded, so the address stays good.
                        *symbol.map_err(|_| Unavailable::MissingSymbol { symbol: $symbol })?
                    },)*
                })
            }
        }
    };
}

driver_functions! {
    init = "cuInit"(c_uint);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device = "cuDeviceGet"(*mut CUdevice, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, CUdevice);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_uint, CUdevice);
    retain_context = "cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice);
    release_context = "cuDevicePrimaryCtxRelease_v2"(CUdevice);
    push_context = "cuCtxPushCurrent_v2"(CUcontext);
    pop_context = "cuCtxPopCurrent_v2"(*mut CUcontext);
    register_host = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    unregister_host = "cuMemHostUnregister"(*mut c_void);
    host_device_pointer = "cuMemHostGetDevicePointer_v2"(*mut CUdeviceptr, *mut c_void, c_uint);
    create_event = "cuEventCreate"(*mut CUevent, c_uint);
    record_event = "cuEventRecord"(CUevent, CUstream);
    query_event = "cuEventQuery"(CUevent);
    destroy_event = "cuEventDestroy_v2"(CUevent);
    query_stream = "cuStreamQuery"(CUstream);
    error_name = "cuGetErrorName"(c_uint, *mut *const c_char);
}

impl Driver {
    /// The driver of this process, looked for once.
    pub(super) fn load() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
        DRIVER.get_or_init(Self::resolve).as_ref().map_err(|reason| reason.clone().into())
    }

    /// Turns the status of `call` into a result.
    pub(super) fn check(&self, call: &'static str, status: c_uint) -> Result<(), CudaError> {
        if status == SUCCESS {
            return Ok(());
        }
        Err(CudaError::Call { call, status, name: self.name_of(status) })
    }

    fn name_of(&self, status: c_uint) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the pointer to write to is a live local; any number may be asked about.
        let known = unsafe { (self.error_name)(status, &raw mut name) };
        if known != SUCCESS || name.is_null() {
            return "a status this driver has no name for".into();
        }
        // SAFETY: on success the driver gives a NUL-terminated string that it never frees.
        unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
