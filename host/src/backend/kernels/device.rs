//! What runs kernels: memory, launches, events. One stream: whatever is given to a device happens
//! in the order given.

use cuda_std::emulator::EmulatorError;
use cuda_std::mem::Slice;
pub use gpu::launch::{DeviceLimits, Launch};

use super::table::{KernelFn, KernelId};

/// Alignment of every allocation, bytes.
pub const ALIGNMENT: usize = 256;

/// What goes wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// No driver, no device, or a driver that is too old.
    #[error("no CUDA device: {reason}; {remedy}")]
    Unavailable {
        /// What is missing.
        reason: String,
        /// What helps.
        remedy: &'static str,
    },
    /// The device cannot run what was asked.
    #[error("{device} cannot run this: {reason}; {remedy}")]
    Unsupported {
        /// The device.
        device: String,
        /// What it lacks.
        reason: String,
        /// What helps.
        remedy: &'static str,
    },
    /// An allocation that does not fit.
    #[error(
        "{device} is out of memory: {requested} bytes asked for, {free} free; free some, choose \
         `--tier ans` or a shorter context (-c)"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        requested: u64,
        /// Bytes free at that moment.
        free: u64,
    },
    /// Host memory that cannot be pinned.
    #[error(
        "{device}: {requested} bytes of host memory cannot be pinned; free some or give a smaller \
         --ram-budget"
    )]
    HostMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        requested: u64,
    },
    /// A driver call failed.
    #[error("{device}: {call} failed: {name} ({code}): {what}; `host doctor` checks the driver")]
    Driver {
        /// The device.
        device: String,
        /// Driver function, and the kernel where one was launched.
        call: String,
        /// `CUresult`.
        code: u32,
        /// Its name.
        name: String,
        /// Its description.
        what: String,
    },
    /// A launch whose parameters the device cannot take.
    #[error("kernel {}: {field} is {found}, at most {limit} on {device}", kernel.name())]
    Launch {
        /// The device.
        device: String,
        /// The kernel.
        kernel: KernelId,
        /// Which parameter.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The device's limit.
        limit: u64,
    },
    /// A copy past the end of a buffer.
    #[error("{operation} of {len} bytes at {offset} of a device buffer of {size}")]
    Bounds {
        /// Upload, download, copy or fill.
        operation: &'static str,
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes of the buffer.
        size: usize,
    },
    /// Something that cannot be recorded.
    #[error("{device}: {operation} while launches are recorded")]
    Recording {
        /// The device.
        device: String,
        /// What was asked for.
        operation: &'static str,
    },
    /// The emulator found a fault in a kernel.
    #[error("emulator: {0}")]
    Emulator(#[from] EmulatorError),
}

impl DeviceError {
    /// Whether device memory ran out, also where the driver needed it for itself.
    pub fn is_out_of_memory(&self) -> bool {
        const OUT_OF_MEMORY: u32 = 2;
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Driver { code, .. } => *code == OUT_OF_MEMORY,
            _ => false,
        }
    }
}

/// Bytes of a device's memory, from an offset on, and where they go.
pub type Piece<'a, M> = (&'a M, usize, &'a mut [u8]);

/// Memory on a device; given back when dropped, in the device's order.
pub trait DeviceMemory: Send + Sync {
    /// Host memory that the device copies from by itself, 4 KiB aligned where that is pinned.
    type Host: std::ops::DerefMut<Target = [u8]> + Send + Sync + 'static;

    /// Device address, a multiple of [`ALIGNMENT`].
    fn address(&self) -> u64;
    /// Bytes asked for.
    fn size(&self) -> usize;

    /// The view of `len` elements of `size_of` bytes from element `offset` on that kernels take.
    fn slice<T>(&self, offset: usize, len: usize) -> Slice {
        let bytes = size_of::<T>();
        assert!(
            offset
                .checked_add(len)
                .and_then(|end| end.checked_mul(bytes))
                .is_some_and(|end| end <= self.size()),
            "view of {len} elements at {offset} of a device buffer of {} bytes",
            self.size()
        );
        Slice {
            addr: self.address() + (offset * bytes) as u64,
            len: len as u64,
        }
    }
}

/// Checks a copy's range.
pub(super) fn check_range(
    operation: &'static str,
    offset: usize,
    len: usize,
    size: usize,
) -> Result<(), DeviceError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(DeviceError::Bounds {
            operation,
            offset,
            len,
            size,
        }),
    }
}

/// Checks a launch against what every device asks for and against `limits`; false where there is
/// nothing to do.
pub(super) fn check_launch(
    device: &str,
    limits: &DeviceLimits,
    kernel: KernelId,
    launch: &Launch,
) -> Result<bool, DeviceError> {
    if launch.grid.contains(&0) {
        return Ok(false);
    }
    let info = kernel.info();
    let threads = if info.threads == 0 {
        1024
    } else {
        info.threads
    };
    for (field, found, limit) in [
        ("grid x", launch.grid[0], i32::MAX as u32),
        ("grid y", launch.grid[1], 65_535),
        ("grid z", launch.grid[2], 65_535),
        ("block", launch.threads, threads),
        ("shared memory", launch.shared, limits.shared_per_block),
    ] {
        if found > limit {
            return Err(DeviceError::Launch {
                device: device.into(),
                kernel,
                field,
                found: found.into(),
                limit: limit.into(),
            });
        }
    }
    Ok(true)
}

/// A device that runs the kernels of `gpu`.
pub trait Device: Send + Sync {
    /// Memory of it.
    type Memory: DeviceMemory;
    /// A point in its stream.
    type Event: Send + Sync;
    /// Launches that run again as one.
    type Recording;

    /// Bytes of records that are read and checked while as many are copied, as layers are loaded: two buffers
    /// of so much are pinned. Few enough for a server's L3 cache, so that what was copied there need not be read
    /// from memory again.
    const WAVE: usize = 64 << 20;

    /// For people: `cuda:0 NVIDIA H200`, `emulator`.
    fn describe(&self) -> String;

    /// Properties that launch parameters follow from.
    fn limits(&self) -> &DeviceLimits;

    /// `bytes` bytes with any content, aligned to [`ALIGNMENT`]; from a pool.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory, DeviceError>;

    /// Gives the memory that the pool holds, and nobody else, back to the driver.
    fn trim(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Sets `bytes` bytes from `offset` on to `value`.
    fn fill(
        &self,
        memory: &Self::Memory,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), DeviceError>;

    /// Copies `data` to `offset`; `data` may be reused at once.
    fn upload(&self, memory: &Self::Memory, offset: usize, data: &[u8]) -> Result<(), DeviceError>;

    /// Copies `bytes` bytes from `from` at its offset to `to` at its own; the two do not overlap.
    fn copy(
        &self,
        from: (&Self::Memory, usize),
        to: (&Self::Memory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError>;

    /// Waits for what was given before, then copies from `offset`.
    fn download(
        &self,
        memory: &Self::Memory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// [`Device::download`] of several pieces, after one wait.
    fn download_all(&self, pieces: &mut [Piece<'_, Self::Memory>]) -> Result<(), DeviceError> {
        for (memory, offset, out) in pieces {
            self.download(memory, *offset, out)?;
        }
        Ok(())
    }

    /// `bytes` bytes of host memory for [`Device::copy_beside`], with any content.
    fn allocate_host(
        &self,
        bytes: usize,
    ) -> Result<<Self::Memory as DeviceMemory>::Host, DeviceError>;

    /// Copies that follow wait for what the stream was given so far.
    fn fork(&self) -> Result<(), DeviceError>;

    /// Copies bytes of `host` to `offset` of `memory`, beside what the stream does, behind earlier such copies.
    ///
    /// # Safety
    /// From [`Device::fork`], or what was waited for before, to [`Device::join`] and until what follows in the
    /// stream has been waited for, nothing but what follows the join uses the range of `memory`, and the bytes
    /// of `host` are neither written nor given back.
    unsafe fn copy_beside(
        &self,
        memory: &Self::Memory,
        offset: usize,
        host: &<Self::Memory as DeviceMemory>::Host,
        bytes: std::ops::Range<usize>,
    ) -> Result<(), DeviceError>;

    /// Whether copies beside the stream are under way, or about to begin.
    fn copying(&self) -> Result<bool, DeviceError>;

    /// What follows in the stream waits for the copies so far.
    fn join(&self) -> Result<(), DeviceError>;

    /// What follows up to [`Device::back`] is done beside what follows that up to [`Device::together`],
    /// where this kind of device can and launches are recorded; memory that is given back up to there is
    /// not taken again before.
    fn aside(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Ends that; what was given stays beside the stream.
    fn back(&self) {}

    /// What follows in the stream waits for what was done aside.
    fn together(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Launches a kernel; a grid with a zero does nothing.
    ///
    /// # Safety
    /// Every view in `args` is of live memory of this device, long enough for what the kernel
    /// documents, and stays live until the launch is done or its memory is dropped in order.
    unsafe fn launch<K: KernelFn>(&self, launch: Launch, args: K::Args) -> Result<(), DeviceError>;

    /// Marks this point of the stream; while launches are recorded, the point of each replay.
    fn event(&self) -> Result<Self::Event, DeviceError>;

    /// Seconds between two events; waits for the second.
    fn elapsed(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, DeviceError>;

    /// Waits for everything given so far.
    fn synchronize(&self) -> Result<(), DeviceError>;

    /// Sets the u32 at byte `offset` to `value`, in the stream; the caller does not wait.
    fn set_word(&self, memory: &Self::Memory, offset: usize, value: u32)
    -> Result<(), DeviceError>;

    /// Whether kernels of this device may use memory of `other`.
    fn reaches(&self, other: &Self) -> bool;

    /// What follows in the stream waits for what `other` was given so far.
    fn wait_for(&self, other: &Self) -> Result<(), DeviceError>;

    /// Copies `bytes` bytes from memory of `owner` to memory of this device, in this device's stream.
    ///
    /// # Safety
    /// `from` is memory of `owner`, and nothing writes those bytes from what this stream waits for until
    /// what follows in it has been waited for.
    unsafe fn copy_from(
        &self,
        owner: &Self,
        from: (&Self::Memory, usize),
        to: (&Self::Memory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError>;

    /// Begins to record what `devices` are given in place of doing it, the first of them and those that
    /// wait for it; false where this kind of device cannot. Meanwhile nothing is uploaded, downloaded or
    /// waited for by the host.
    fn begin_recording(devices: &[&Self]) -> Result<bool, DeviceError>
    where
        Self: Sized;

    /// Ends that. Memory that was given back since the beginning is the recording's, for as long as it
    /// lives, and that of others of the same first device, which has but one stream. To be called also
    /// where recording has failed.
    fn end_recording(devices: &[&Self]) -> Result<Self::Recording, DeviceError>
    where
        Self: Sized;

    /// Does what was recorded with this device as the first.
    ///
    /// # Safety
    /// What was promised of the launches recorded still holds: all memory that they use, but that which
    /// was given back while recording, is live.
    unsafe fn replay(&self, recording: &Self::Recording) -> Result<(), DeviceError>;
}
