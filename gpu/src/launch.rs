//! How a launch is described, and the properties of a device that decide it.

/// Properties of a device that launch parameters follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Shared memory a block can have (opt-in maximum), bytes.
    pub shared_per_block: u32,
    /// Shared memory of a multiprocessor, bytes.
    pub shared_per_sm: u32,
    /// Threads resident on a multiprocessor.
    pub threads_per_sm: u32,
}

/// Grid, block and shared memory of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z; a launch with a zero does nothing.
    pub grid: [u32; 3],
    /// Threads of a block (one dimension).
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
}

impl Launch {
    /// A launch without dynamic shared memory.
    pub const fn new(grid: [u32; 3], threads: u32) -> Self {
        Self {
            grid,
            threads,
            shared: 0,
        }
    }

    /// The same with `bytes` of dynamic shared memory a block.
    pub const fn shared(self, bytes: u32) -> Self {
        Self {
            shared: bytes,
            ..self
        }
    }
}
