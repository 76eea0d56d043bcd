//! A program that calls cust links, starts and fails in good order where there is no driver.
#![allow(missing_docs)]

use cuda_loader::{DriverError, LoadError, check, load, sys};

#[test]
fn cust_and_the_loader_agree_on_what_is_there() {
    // Before anything is loaded every function answers.
    let mut count = -1;
    // SAFETY: the pointer is valid.
    let code = unsafe { sys::cuDeviceGetCount(&raw mut count) };
    let error = check(code).unwrap_err();
    assert_eq!((error.code, count), (DriverError::NO_DEVICE, -1));
    assert_eq!(
        error.to_string(),
        "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device, or no driver loaded"
    );
    // More arguments than fit registers.
    // SAFETY: no driver is loaded, nothing is looked at.
    let code = unsafe {
        let null = std::ptr::null_mut();
        sys::cuLaunchKernel(null, 1, 1, 1, 32, 1, 1, 0, null, null.cast(), null.cast())
    };
    assert_eq!(code, DriverError::NO_DEVICE);
    assert!(matches!(
        cust::init(cust::CudaFlags::empty()),
        Err(cust::error::CudaError::NoDevice)
    ));

    match load() {
        Ok(driver) => {
            assert!(driver.version() >= (11, 4), "{driver:?}");
            assert_eq!(load().unwrap(), driver);
            match driver.init() {
                Ok(()) => {
                    assert!(driver.device_count().unwrap() > 0);
                    assert!(cust::init(cust::CudaFlags::empty()).is_ok());
                    let error = check(2).unwrap_err();
                    assert_eq!(error.name, "CUDA_ERROR_OUT_OF_MEMORY");
                }
                Err(error) => assert!(cust::init(cust::CudaFlags::empty()).is_err(), "{error}"),
            }
        }
        Err(LoadError::NoLibrary { reason }) => {
            assert!(reason.contains("libcuda.so.1"), "{reason}");
            assert!(cust::init(cust::CudaFlags::empty()).is_err());
            assert!(cust::device::Device::num_devices().is_err());
        }
        Err(other) => panic!("{other}"),
    }
    assert_eq!(check(0), Ok(()));
    assert_eq!(check(12_345).unwrap_err().code, 12_345);
}
