//! Residual addition: `out = out + x`, elementwise.
//!
//! Threads stride over the columns of a token; the grid's y is the token.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Arguments. Grid: `[ceil(cols / 256), tokens, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AddArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Elements from row to row of `x`.
    pub x_stride: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Columns.
    pub cols: u32,
    /// Zero.
    pub reserved: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`AddArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn add(args: AddArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, out) = unsafe { (Global::<f32>::new(args.x), GlobalMut::<f32>::new(args.out)) };
    let token = thread::block_idx_y();
    let c = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if c < args.cols {
        let to = token * args.out_stride + c;
        out.store(to, out.load(to) + x.load(token * args.x_stride + c));
    }
}
