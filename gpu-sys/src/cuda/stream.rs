//! Streams of the caller's runtime, and events that mark a place in them.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::CudaDevice;
use super::{CudaError, ffi};

/// Between two looks at a stream that is being waited for.
const STREAM_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A stream that the caller's runtime owns.
#[derive(Debug)]
pub struct Stream {
    device: Arc<CudaDevice>,
    raw: ffi::CUstream,
}

// SAFETY: the driver's functions may be called with a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Stream {}

impl Stream {
    /// The device's default stream, which lives as long as the device.
    #[must_use]
    pub fn default_of(device: &Arc<CudaDevice>) -> Self {
        Self { device: Arc::clone(device), raw: std::ptr::null_mut() }
    }

    /// Refers to the stream `raw` (a `CUstream` or `cudaStream_t`) without owning it.
    ///
    /// # Safety
    /// `raw` must be a stream of `device`'s primary context and stay alive as long as this value.
    #[must_use]
    pub unsafe fn from_raw(device: &Arc<CudaDevice>, raw: *mut c_void) -> Self {
        Self { device: Arc::clone(device), raw: raw.cast() }
    }

    /// The stream's device.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Waits until everything that was enqueued so far has finished.
    ///
    /// # Errors
    /// It had not after `wait`, or the driver reports a failure.
    pub fn synchronize(&self, wait: Duration) -> Result<(), CudaError> {
        let driver = self.device.driver();
        let _entered = self.device.enter()?;
        let started = Instant::now();
        loop {
            // SAFETY: whoever made this value keeps the stream alive.
            let status = unsafe { (driver.query_stream)(self.raw) };
            if status != ffi::NOT_READY {
                return driver.check("cuStreamQuery", status);
            }
            if started.elapsed() >= wait {
                let waited_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
                return Err(CudaError::StreamBusy { ordinal: self.device.ordinal(), waited_ms });
            }
            std::thread::sleep(STREAM_POLL_INTERVAL);
        }
    }
}

/// A place in a stream, reached once everything before it has finished.
#[derive(Debug)]
pub struct Event {
    device: Arc<CudaDevice>,
    raw: ffi::CUevent,
}

/// Whether a stream has come to an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventState {
    /// Everything enqueued before the event has finished.
    Done,
    /// Something has not.
    Pending,
}

// SAFETY: the driver's functions may be called with an event from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Event {}

impl Event {
    /// Marks the place that `stream` has been filled up to.
    ///
    /// # Errors
    /// The driver cannot make or record an event; nothing is left behind.
    pub fn record_on(stream: &Stream) -> Result<Self, CudaError> {
        let driver = stream.device.driver();
        let entered = stream.device.enter()?;
        let mut raw: ffi::CUevent = std::ptr::null_mut();
        // SAFETY: the stream's context is current, and the pointer is to a live local.
        let status = unsafe { (driver.create_event)(&raw mut raw, ffi::EVENT_DISABLE_TIMING) };
        driver.check("cuEventCreate", status)?;
        // From here on an early return destroys the event.
        let event = Self { device: Arc::clone(&stream.device), raw };
        // SAFETY: the event was made above in the context that the stream belongs to, and whoever
        // made `stream` keeps it alive.
        let status = unsafe { (driver.record_event)(raw, stream.raw) };
        driver.check("cuEventRecord", status)?;
        drop(entered);
        Ok(event)
    }

    /// Whether the stream has come to this place. Never waits.
    ///
    /// # Errors
    /// The driver reports a failure, of this call or of earlier work on the device: then nothing
    /// is known about the stream.
    pub fn query(&self) -> Result<EventState, CudaError> {
        let driver = self.device.driver();
        let _entered = self.device.enter()?;
        // SAFETY: the event was made in `record_on` and is destroyed only in `drop`.
        match unsafe { (driver.query_event)(self.raw) } {
            ffi::NOT_READY => Ok(EventState::Pending),
            status => driver.check("cuEventQuery", status).map(|()| EventState::Done),
        }
    }

    fn destroy(&self) -> Result<(), CudaError> {
        let driver = self.device.driver();
        let _entered = self.device.enter()?;
        // SAFETY: made once in `record_on`, destroyed once by `drop`.
        driver.check("cuEventDestroy", unsafe { (driver.destroy_event)(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            tracing::warn!(device = %self.device, %error, "a CUDA event is leaked");
        }
    }
}
