//! The back end that launches the kernels of `gpu` on a [`Device`]: the emulator or CUDA.

mod device;
mod emulator;
pub mod plan;
mod table;

pub use self::device::{ALIGNMENT, Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
pub use self::emulator::{EmulatedDevice, EmulatedMemory};
pub use self::table::*;
