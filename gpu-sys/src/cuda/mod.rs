//! CUDA, where there is any: pinned memory that a device sees, and events that say when a stream
//! has finished with it.
//!
//! The driver library is looked for at run time, so one binary runs with and without it. Three
//! layers: `ffi` names the symbols; [`CudaDevice`], [`HostRegistration`] and [`Event`] own what
//! they made and give it back once; everything above speaks of slots and leases.
//!
//! An owner holds its parents: a registration its pages and its device, an event its device. The
//! device is the process's primary context, the one that CUDA runtimes use too, so that addresses
//! and streams mean the same here and there.

mod device;
mod ffi;
mod registration;
mod stream;

pub use device::{CudaDevice, HostMemory};
pub use registration::HostRegistration;
pub use stream::{Event, EventState, Stream};

/// Why there is no CUDA here; not a fault by itself.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// The driver library was not found.
    #[error(
        "no CUDA driver: libcuda.so.1 was not found (install the NVIDIA driver, or its path in LD_LIBRARY_PATH)"
    )]
    NoDriver,
    /// A driver too old, or something else of that name.
    #[error("the CUDA driver lacks {symbol}: install a driver of CUDA 12 or newer")]
    MissingSymbol {
        /// The function it lacks.
        symbol: &'static str,
    },
    /// The driver sees no device.
    #[error(
        "a CUDA driver, but no device (see nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, whether devices are passed through)"
    )]
    NoDevice,
    /// There are devices, but not this one.
    #[error("no CUDA device {ordinal}: there are {devices}, numbered from 0")]
    NoSuchDevice {
        /// The device asked for.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// The device cannot read host memory.
    #[error("CUDA device {ordinal} cannot map host memory")]
    CannotMapHostMemory {
        /// The device.
        ordinal: u32,
    },
}

/// A CUDA operation that failed.
#[derive(Debug, thiserror::Error, Clone, PartialEq, Eq)]
pub enum CudaError {
    /// There is no CUDA to speak of.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The driver refused a call.
    #[error("{call} failed with {name} ({status})")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// Its status.
        status: u32,
        /// The driver's name for the status.
        name: String,
    },
    /// A stream had not finished within the time given to it.
    #[error("a stream of CUDA device {ordinal} had not finished after {waited_ms} ms")]
    StreamBusy {
        /// The stream's device.
        ordinal: u32,
        /// How long was waited.
        waited_ms: u64,
    },
}

/// What there is of CUDA on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// Nothing to work with, and why.
    Absent(Unavailable),
    /// A driver with devices `0..devices`.
    Present {
        /// How many devices.
        devices: u32,
    },
}

impl std::fmt::Display for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Absent(reason) => reason.fmt(f),
            Self::Present { devices } => write!(f, "a CUDA driver with {devices} devices"),
        }
    }
}

/// Looks for a driver and counts its devices.
///
/// # Errors
/// There is a driver and it does not work: what it said.
pub fn probe() -> Result<Probe, CudaError> {
    let count = ffi::Driver::load().and_then(device::count);
    match count {
        Ok(0) => Ok(Probe::Absent(Unavailable::NoDevice)),
        Ok(devices) => Ok(Probe::Present { devices }),
        Err(CudaError::Unavailable(reason)) => Ok(Probe::Absent(reason)),
        Err(error) => Err(error),
    }
}
