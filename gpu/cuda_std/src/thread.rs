//! Position of the calling thread in its block and grid, and the block barrier.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emulator;
#[cfg(target_arch = "nvptx64")]
use core::arch::nvptx;

macro_rules! index {
    ($(#[$about:meta])* $name:ident, $intrinsic:ident, $field:expr) => {
        $(#[$about])*
        #[inline(always)]
        pub fn $name() -> u32 {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: reads a special register.
            unsafe {
                nvptx::$intrinsic() as u32
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                let field: fn(&emulator::Context) -> u32 = $field;
                field(emulator::context())
            }
        }
    };
}

index!(
    /// Index of the thread in its block.
    thread_idx_x, _thread_idx_x, |c| c.thread
);
index!(
    /// Index of the block in the grid, x.
    block_idx_x, _block_idx_x, |c| c.block[0]
);
index!(
    /// Index of the block in the grid, y.
    block_idx_y, _block_idx_y, |c| c.block[1]
);
index!(
    /// Index of the block in the grid, z.
    block_idx_z, _block_idx_z, |c| c.block[2]
);
index!(
    /// Threads in a block.
    block_dim_x, _block_dim_x, |c| c.threads
);
index!(
    /// Blocks in the grid, x.
    grid_dim_x, _grid_dim_x, |c| c.grid.x
);
index!(
    /// Blocks in the grid, y.
    grid_dim_y, _grid_dim_y, |c| c.grid.y
);
index!(
    /// Blocks in the grid, z.
    grid_dim_z, _grid_dim_z, |c| c.grid.z
);

/// Block barrier: every thread of the block that has not returned waits here for the others, and
/// what they wrote to shared and global memory before it is visible to all after it.
///
/// Emulator: an error where the threads that have not returned wait at different places.
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no operands; kernels reach barriers together.
    unsafe {
        nvptx::_syncthreads();
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emulator::barrier(core::panic::Location::caller());
}
