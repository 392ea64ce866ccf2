//! The CUDA owners against a driver library that writes down what it is asked.

mod support;

use std::sync::Arc;
use std::time::Duration;

use gpu_sys::cuda::{
    CudaDevice, CudaError, Event, EventState, HostMemory, HostRegistration, Probe, Stream,
    Unavailable, probe,
};
use gpu_sys::pinned::{HugePages, NumaPlacement, PinnedOptions, PinnedPages};
use support::{Driver, is_mapped, with_driver};

fn pages() -> Arc<PinnedPages> {
    let (huge_pages, numa) = (HugePages::Off, NumaPlacement::Local);
    Arc::new(PinnedPages::new(&PinnedOptions { bytes: 64 << 10, huge_pages, numa }).unwrap())
}

fn address(pages: &PinnedPages) -> u64 {
    pages.address().as_ptr() as u64
}

#[test]
fn a_registration_goes_before_its_memory_and_its_device() {
    let name = "a_registration_goes_before_its_memory_and_its_device";
    with_driver(name, Driver::Whole, &[], |fake| {
        let (device, pages) = (CudaDevice::open(0).unwrap(), pages());
        assert_eq!(device.to_string(), "CUDA device 0 (Fake GPU)");
        let all = HostMemory { registers: true, same_address: true, integrated: true };
        assert_eq!(device.host_memory(), Ok(all));
        let at = address(&pages);
        let registration = HostRegistration::new(&device, &pages).unwrap();
        assert_eq!(registration.device_address(), at + 0x1000_0000_0000);
        // The registration is the last owner of both.
        drop((device, pages));
        assert!(is_mapped(at));
        drop(registration);
        assert!(!is_mapped(at));
        let order = ["cuMemHostRegister", "cuMemHostUnregister", "cuDevicePrimaryCtxRelease"];
        let places = order.map(|name| fake.first(name).expect(name));
        assert!(places.is_sorted(), "{:?}", fake.calls());
        assert_eq!(order.map(|name| fake.count(name)), [1, 1, 1]);
    });
}

#[test]
fn memory_that_the_device_will_not_forget_is_leaked() {
    let name = "memory_that_the_device_will_not_forget_is_leaked";
    let fail = [("FAKE_CUDA_FAIL", "cuMemHostUnregister=700")];
    with_driver(name, Driver::Whole, &fail, |fake| {
        let (device, pages) = (CudaDevice::open(0).unwrap(), pages());
        let at = address(&pages);
        drop(HostRegistration::new(&device, &pages).unwrap());
        drop(pages);
        assert_eq!(fake.count("cuMemHostUnregister"), 1);
        assert!(is_mapped(at));
    });
}

#[test]
fn a_registration_without_a_device_address_is_undone() {
    let name = "a_registration_without_a_device_address_is_undone";
    let fail = [("FAKE_CUDA_FAIL", "cuMemHostGetDevicePointer=1")];
    with_driver(name, Driver::Whole, &fail, |fake| {
        let device = CudaDevice::open(0).unwrap();
        let error = HostRegistration::new(&device, &pages()).unwrap_err().to_string();
        assert_eq!(error, "cuMemHostGetDevicePointer failed with CUDA_ERROR_FAKE (1)");
        assert_eq!(fake.count("cuMemHostUnregister"), 1);
    });
}

#[test]
fn a_registration_that_is_refused_is_not_undone() {
    let name = "a_registration_that_is_refused_is_not_undone";
    let fail = [("FAKE_CUDA_FAIL", "cuMemHostRegister=2")];
    with_driver(name, Driver::Whole, &fail, |fake| {
        let device = CudaDevice::open(0).unwrap();
        assert!(HostRegistration::new(&device, &pages()).is_err());
        assert_eq!(fake.count("cuMemHostUnregister"), 0);
    });
}

#[test]
fn a_driver_that_lacks_a_function_is_an_error_and_no_panic() {
    let name = "a_driver_that_lacks_a_function_is_an_error_and_no_panic";
    with_driver(name, Driver::WithoutEvents, &[], |fake| {
        let reason = Unavailable::MissingSymbol { symbol: "cuEventCreate" };
        assert_eq!(probe(), Ok(Probe::Absent(reason.clone())));
        assert_eq!(CudaDevice::open(0).unwrap_err(), CudaError::Unavailable(reason));
        assert_eq!(fake.calls(), []);
    });
}

#[test]
fn no_driver_is_a_reason_and_no_panic() {
    with_driver("no_driver_is_a_reason_and_no_panic", Driver::Garbage, &[], |_| {
        assert_eq!(probe(), Ok(Probe::Absent(Unavailable::NoDriver)));
        let text = CudaDevice::open(0).unwrap_err().to_string();
        assert!(text.contains("libcuda.so.1"), "{text}");
    });
}

#[test]
fn a_driver_without_devices_is_named_as_such() {
    let name = "a_driver_without_devices_is_named_as_such";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_DEVICES", "0")], |_| {
        assert_eq!(probe(), Ok(Probe::Absent(Unavailable::NoDevice)));
        let error = CudaDevice::open(0).unwrap_err();
        assert_eq!(error, CudaError::Unavailable(Unavailable::NoDevice));
    });
}

#[test]
fn a_driver_that_finds_no_device_at_its_start_is_no_fault() {
    let name = "a_driver_that_finds_no_device_at_its_start_is_no_fault";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_FAIL", "cuInit=100")], |_| {
        assert_eq!(probe(), Ok(Probe::Absent(Unavailable::NoDevice)));
    });
}

#[test]
fn a_status_newer_than_this_program_is_reported_by_number() {
    let name = "a_status_newer_than_this_program_is_reported_by_number";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_FAIL", "cuInit=123456")], |_| {
        let text = probe().unwrap_err().to_string();
        assert!(text.contains("cuInit") && text.contains("123456"), "{text}");
    });
}

#[test]
fn a_device_beyond_the_last_is_named_with_how_many_there_are() {
    let name = "a_device_beyond_the_last_is_named_with_how_many_there_are";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_DEVICES", "2")], |_| {
        assert_eq!(probe(), Ok(Probe::Present { devices: 2 }));
        assert!(CudaDevice::open(1).is_ok());
        for ordinal in [2, u32::MAX] {
            let text = CudaDevice::open(ordinal).unwrap_err().to_string();
            assert!(text.contains(&format!("no CUDA device {ordinal}")), "{text}");
        }
    });
}

#[test]
fn an_event_is_pending_until_its_stream_has_come_to_it() {
    let name = "an_event_is_pending_until_its_stream_has_come_to_it";
    with_driver(name, Driver::Whole, &[], |fake| {
        let device = CudaDevice::open(0).unwrap();
        fake.be_busy();
        let event = Event::record_on(&Stream::default_of(&device)).unwrap();
        assert_eq!(event.query(), Ok(EventState::Pending));
        fake.be_done();
        assert_eq!(event.query(), Ok(EventState::Done));
        drop(device);
        assert_eq!(fake.count("cuDevicePrimaryCtxRelease"), 0, "the event holds its device");
        drop(event);
        let made_and_gone = ["cuEventCreate", "cuEventDestroy", "cuDevicePrimaryCtxRelease"];
        assert_eq!(made_and_gone.map(|name| fake.count(name)), [1, 1, 1]);
    });
}

#[test]
fn an_event_that_cannot_be_recorded_is_destroyed() {
    let name = "an_event_that_cannot_be_recorded_is_destroyed";
    with_driver(name, Driver::Whole, &[("FAKE_CUDA_FAIL", "cuEventRecord=400")], |fake| {
        let device = CudaDevice::open(0).unwrap();
        assert!(Event::record_on(&Stream::default_of(&device)).is_err());
        assert_eq!(fake.count("cuEventDestroy"), 1);
    });
}

#[test]
fn waiting_for_a_stream_has_an_end() {
    with_driver("waiting_for_a_stream_has_an_end", Driver::Whole, &[], |fake| {
        let stream = Stream::default_of(&CudaDevice::open(0).unwrap());
        fake.be_busy();
        let error = stream.synchronize(Duration::from_millis(20)).unwrap_err();
        assert_eq!(error, CudaError::StreamBusy { ordinal: 0, waited_ms: 20 });
        fake.be_done();
        assert_eq!(stream.synchronize(Duration::ZERO), Ok(()));
    });
}
