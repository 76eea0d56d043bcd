use super::module::{PTX_SM_80, PTX_SM_90, compiler_log};
use super::*;
use crate::backend::kernels::ALIGNMENT;
use crate::backend::kernels::device::DeviceMemory;

#[test]
fn without_a_driver_the_error_names_the_remedy() {
    if CudaDevice::count() == 0 {
        let error = CudaDevice::new(0).err().unwrap().to_string();
        assert!(error.contains("--device cpu"), "{error}");
    }
}

/// The device, where there is one.
fn device() -> Option<CudaDevice> {
    match CudaDevice::new(0) {
        Ok(device) => Some(device),
        Err(e) => {
            let required = std::env::var_os("ANSATZ_REQUIRE_CUDA").is_some();
            assert!(!required, "{e}");
            eprintln!("skipped: {e}");
            None
        }
    }
}

#[test]
fn memory_stream_and_events_work_from_other_threads() {
    let Some(device) = device() else { return };
    let flags = device.inner.stream.get_flags().unwrap();
    assert!(flags.contains(cust::stream::StreamFlags::NON_BLOCKING));
    let before = device.event().unwrap();
    let memory = device.allocate(10_000).unwrap();
    let address = memory.address();
    assert!(address.is_multiple_of(ALIGNMENT as u64));
    let other = device.clone();
    std::thread::spawn(move || {
        other.fill(&memory, 0, 10_000, 7).unwrap();
        other.upload(&memory, 3, &[1, 2, 3]).unwrap();
        let mut out = [0; 8];
        other.download(&memory, 1, &mut out).unwrap();
        assert_eq!(out, [7, 7, 1, 2, 3, 7, 7, 7]);
        let copy = other.allocate(16).unwrap();
        other.copy((&memory, 2), (&copy, 8), 8).unwrap();
        other.download(&copy, 8, &mut out).unwrap();
        assert_eq!(out, [7, 1, 2, 3, 7, 7, 7, 7]);
        let error = other.copy((&memory, 0), (&copy, 9), 8).unwrap_err();
        assert!(matches!(error, DeviceError::Bounds { .. }), "{error}");
        let error = other.download(&memory, 9_995, &mut out).unwrap_err();
        assert!(matches!(error, DeviceError::Bounds { .. }), "{error}");
    })
    .join()
    .unwrap();
    let after = device.event().unwrap();
    assert!(device.elapsed(&before, &after).unwrap() > 0.0);
    let again = device.allocate(10_000).unwrap();
    assert_eq!(again.address(), address, "from the pool");
    assert!(device.free_bytes().unwrap() > 0);
    std::thread::spawn(move || drop((device, again, before, after)))
        .join()
        .unwrap();
}

/// Recordings of a device share scratch, which is free again behind the last of them.
#[test]
fn recordings_share_scratch() {
    let Some(device) = device() else { return };
    let result = device.allocate(1 << 20).unwrap();
    let record = |value| {
        assert!(Device::begin_recording(&[&device]).unwrap());
        let scratch = device.allocate(1 << 20).unwrap();
        device.fill(&scratch, 0, 1 << 20, value).unwrap();
        device.copy((&scratch, 0), (&result, 0), 1 << 20).unwrap();
        let address = scratch.address();
        drop(scratch);
        (Device::end_recording(&[&device]).unwrap(), address)
    };
    let recordings = [3, 4, 5].map(record);
    let mut out = [0; 16];
    for (i, value) in [(2, 5), (0, 3), (1, 4), (0, 3)] {
        let (recording, address) = &recordings[i];
        assert_eq!(*address, recordings[0].1);
        // SAFETY: `result` is live, and the scratch is the recordings'.
        unsafe { device.replay(recording) }.unwrap();
        device.download(&result, 4096, &mut out).unwrap();
        assert_eq!(out, [value; 16]);
    }
    let address = recordings[0].1;
    let other = device.allocate(1 << 20).unwrap();
    assert_ne!(other.address(), address);
    drop(recordings);
    assert_eq!(device.allocate(1 << 20).unwrap().address(), address);
}

#[test]
fn errors_are_the_drivers() {
    let Some(device) = device() else { return };
    let error = device.allocate(1 << 50).err().unwrap();
    assert!(
        matches!(&error, DeviceError::OutOfMemory { requested, .. } if *requested == 1 << 50),
        "{error}"
    );
    let _turn = device.inner.enter().unwrap();
    let ptx = c".version 7.4\n.target sm_80\n.address_size 64\nno such directive\n";
    let error = described(Module::from_ptx_cstr(ptx, &[]).unwrap_err());
    assert_eq!(error.name, "CUDA_ERROR_INVALID_PTX", "{error}");
    let log = compiler_log(ptx).unwrap();
    assert!(log.contains("line 4"), "{log}");
    // One that cust has no name for.
    let ptx = c".version 99.0\n.target sm_80\n.address_size 64\n";
    let error = described(Module::from_ptx_cstr(ptx, &[]).unwrap_err());
    assert_eq!(
        (error.code, error.name.as_str()),
        (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
    );
}

#[test]
fn the_ptx_has_every_kernel() {
    for id in KernelId::ALL {
        for ptx in [PTX_SM_80, PTX_SM_90] {
            let entry = format!(".entry {}(", id.name());
            assert!(ptx.contains(&entry), "{}", id.name());
        }
    }
}
