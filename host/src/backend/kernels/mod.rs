//! The back end that launches the kernels of `gpu` on a [`Device`]: the emulator or CUDA.

mod attention;
mod cuda;
mod dense;
mod device;
mod emulator;
mod experts;
#[cfg(test)]
mod measured;
mod mock;
mod ops;
pub mod plan;
mod record;
mod split;
mod table;

pub use self::cuda::{CudaDevice, CudaEvent, CudaInfo, CudaMemory};
pub use self::device::{ALIGNMENT, Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
pub use self::emulator::{EmulatedDevice, EmulatedMemory};
pub use self::experts::{Experts, Prepared};
pub use self::mock::{Done, Faults, MockDevice, MockHost, MockMemory};
pub use self::ops::{Buffer, KernelBackend, KernelError};
pub use self::record::Recorded;
pub use self::table::*;
