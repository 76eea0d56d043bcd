//! The back end that launches the kernels of `gpu` on a [`Device`]: the emulator or CUDA.

mod attention;
mod buffer;
mod cuda;
mod dense;
mod device;
mod emulator;
mod error;
mod experts;
mod index;
#[cfg(test)]
mod measured;
mod mock;
mod ops;
pub mod plan;
mod record;
mod split;
mod table;

pub use self::buffer::Buffer;
pub use self::cuda::{CudaDevice, CudaEvent, CudaInfo, CudaMemory};
pub use self::device::{ALIGNMENT, Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
pub use self::emulator::{EmulatedDevice, EmulatedMemory};
pub use self::error::KernelError;
pub use self::experts::{Experts, Prepared};
pub use self::mock::{Done, Faults, MockDevice, MockHost, MockMemory};
pub use self::ops::KernelBackend;
pub use self::record::Recorded;
pub use self::table::*;
