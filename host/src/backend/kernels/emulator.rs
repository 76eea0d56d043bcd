//! The emulator as a device: every thread of a kernel a coroutine on the CPU, every access checked.

use std::time::Instant;

use cuda_std::emulator::{Grid, Memory, launch};

use super::device::{Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
use super::device::{check_launch, check_range};
use super::table::KernelFn;

/// A device that is emulated.
#[derive(Clone, Debug)]
pub struct EmulatedDevice {
    limits: DeviceLimits,
}

impl EmulatedDevice {
    /// Shared memory of compute capability 9.0, but few multiprocessors: grids that follow from
    /// their number stay small.
    pub const LIMITS: DeviceLimits = DeviceLimits {
        sms: 2,
        shared_per_block: 227 << 10,
        shared_per_sm: 228 << 10,
        threads_per_sm: 2048,
    };

    /// Memory that plans count on, bytes.
    pub const MEMORY: u64 = 1 << 30;

    /// A device of the given properties.
    pub fn new(limits: DeviceLimits) -> Self {
        Self { limits }
    }
}

impl Default for EmulatedDevice {
    fn default() -> Self {
        Self::new(Self::LIMITS)
    }
}

/// Emulated memory, uninitialised until written.
#[derive(Debug)]
pub struct EmulatedMemory {
    bytes: Memory<u8>,
    size: usize,
}

impl DeviceMemory for EmulatedMemory {
    type Host = Vec<u8>;

    fn address(&self) -> u64 {
        self.bytes.slice().addr
    }

    fn size(&self) -> usize {
        self.size
    }
}

impl Device for EmulatedDevice {
    type Memory = EmulatedMemory;
    type Event = Instant;

    fn describe(&self) -> String {
        "emulator".into()
    }

    fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, DeviceError> {
        Ok(EmulatedMemory {
            bytes: Memory::uninit(bytes.max(1)),
            size: bytes,
        })
    }

    fn fill(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), DeviceError> {
        check_range("fill", offset, bytes, memory.size)?;
        memory.bytes.write(offset, &vec![value; bytes]);
        Ok(())
    }

    fn copy(
        &self,
        (from, start): (&EmulatedMemory, usize),
        (to, offset): (&EmulatedMemory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        check_range("copy", start, bytes, from.size)?;
        check_range("copy", offset, bytes, to.size)?;
        let mut data = vec![0; bytes];
        self.download(from, start, &mut data)?;
        to.bytes.write(offset, &data);
        Ok(())
    }

    fn upload(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        check_range("upload", offset, data.len(), memory.size)?;
        memory.bytes.write(offset, data);
        Ok(())
    }

    fn download(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        check_range("download", offset, out.len(), memory.size)?;
        memory.bytes.read(offset, out);
        Ok(())
    }

    fn allocate_host(&self, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        Ok(vec![0; bytes])
    }

    fn fork(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn copy_beside(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        host: &Vec<u8>,
        bytes: std::ops::Range<usize>,
    ) -> Result<(), DeviceError> {
        self.upload(memory, offset, &host[bytes])
    }

    fn join(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn launch<K: KernelFn>(&self, config: Launch, args: K::Args) -> Result<(), DeviceError> {
        if !check_launch("emulator", &self.limits, K::ID, &config)? {
            return Ok(());
        }
        let [x, y, z] = config.grid;
        let kernel = || {
            // SAFETY: an emulator launch; the views are checked access by access.
            unsafe { K::call(args) }
        };
        launch(
            K::ID.name(),
            Grid { x, y, z },
            config.threads,
            config.shared,
            kernel,
        )?;
        Ok(())
    }

    fn event(&self) -> Result<Instant, DeviceError> {
        Ok(Instant::now())
    }

    fn elapsed(&self, from: &Instant, to: &Instant) -> Result<f64, DeviceError> {
        Ok(to.duration_since(*from).as_secs_f64())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
