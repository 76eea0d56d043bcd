//! Every operator of the kernel back end against the reference, bit for bit: on the emulator, and
//! on CUDA where there is a driver.

mod suite;

use host::backend::kernels::{EmulatedDevice, KernelBackend, KernelError};

fn emulator() -> Result<KernelBackend<EmulatedDevice>, KernelError> {
    KernelBackend::new(EmulatedDevice::default())
}

suite! {
    emulator = super::emulator();
}
