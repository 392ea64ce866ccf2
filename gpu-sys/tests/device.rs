//! The CUDA owners on a real device; scripts/device-check runs these.
//!
//! A machine without a device fails them: they are not run unless asked for.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, DevicePtrMut, result, sys};
use gpu_sys::cuda::{CudaDevice, Event, EventState, HostRegistration, Probe, Stream, probe};
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions, PinnedPages};

const BYTES: usize = 64 << 20;

fn device() -> Arc<CudaDevice> {
    let device = CudaDevice::open(0).expect("these tests need a CUDA device");
    println!("{device}");
    device
}

fn pages() -> Arc<PinnedPages> {
    let (huge_pages, numa) = (HugePages::Prefer, NumaPlacement::Local);
    let pages = PinnedPages::new(&PinnedOptions { bytes: BYTES, huge_pages, numa }).unwrap();
    println!("{} bytes in {}", pages.len(), pages.page_kind());
    Arc::new(pages)
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_device_is_found() {
    let found = probe().expect("a driver that works");
    println!("{found}");
    assert!(matches!(found, Probe::Present { devices: 1.. }), "{found}");
    assert!(!device().name().is_empty());
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_device_reads_pinned_pages_at_their_device_address() {
    let (device, pages) = (device(), pages());
    let registration = HostRegistration::new(&device, &pages).unwrap();
    // SAFETY: the mapping is alive and BYTES long, and nothing else refers to it.
    let host = unsafe { std::slice::from_raw_parts_mut(pages.address().as_ptr(), BYTES) };
    for (i, byte) in host.iter_mut().enumerate() {
        *byte = (i % 251) as u8;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mut copy = stream.alloc_zeros::<u8>(BYTES).unwrap();
    {
        let (to, _guard) = copy.device_ptr_mut(&stream);
        let (from, stream) = (registration.device_address(), stream.cu_stream());
        // SAFETY: both ranges have BYTES bytes and live until the stream is synchronised below.
        unsafe { result::memcpy_dtod_async(to, from, BYTES, stream) }.unwrap();
    }
    assert!(stream.clone_dtoh(&copy).unwrap() == *host, "the device read other bytes");
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_registration_can_be_made_again_after_it_was_dropped() {
    let (device, pages) = (device(), pages());
    let first = HostRegistration::new(&device, &pages).unwrap();
    assert!(HostRegistration::new(&device, &pages).is_err(), "registered twice");
    drop(first);
    assert!(HostRegistration::new(&device, &pages).is_ok());
}

/// Holds up its stream until the flag is set, for ten seconds at most.
unsafe extern "C" fn hold_up(flag: *mut c_void) {
    // SAFETY: the test passes a flag that lives until the stream has been synchronised.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    let deadline = Instant::now() + Duration::from_secs(10);
    while !flag.load(Ordering::Acquire) && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_event_is_pending_while_its_stream_is_held_up() {
    let device = device();
    let context = CudaContext::new(0).unwrap();
    let raw = context.new_stream().unwrap();
    let flag = AtomicBool::new(false);
    let argument = (&raw const flag).cast_mut().cast::<c_void>();
    // SAFETY: the stream is alive, and `flag` outlives the synchronisation at the end.
    let status = unsafe { sys::cuLaunchHostFunc(raw.cu_stream(), Some(hold_up), argument) };
    assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: `raw` is of device 0's primary context and is dropped after `stream`.
    let stream = unsafe { Stream::from_raw(&device, raw.cu_stream().cast()) };
    let event = Event::record_on(&stream).unwrap();
    assert_eq!(event.query(), Ok(EventState::Pending));
    assert!(stream.synchronize(Duration::from_millis(10)).is_err());
    flag.store(true, Ordering::Release);
    stream.synchronize(Duration::from_secs(20)).unwrap();
    assert_eq!(event.query(), Ok(EventState::Done));
    raw.synchronize().unwrap();
}
