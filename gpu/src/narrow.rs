//! Rows rounded to bf16, as a cache of 16 bits keeps them.
//!
//! One thread an element; the grid's y is the token.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

use crate::arith::to_bf16;
use crate::position::position;

/// Threads of a block.
pub const THREADS: u32 = 128;

/// Arguments. Grid: `[ceil(cols / 128), tokens, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NarrowArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// bf16 rows of `out_stride`.
    pub out: Slice,
    /// u32 `[1]`: the row of `out` that row 0 goes to; or empty: the first.
    pub at: Slice,
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
/// The views must be live and as long as [`NarrowArgs`] says.
#[kernel(threads = 128)]
pub unsafe fn narrow(args: NarrowArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, out) = unsafe { (Global::<f32>::new(args.x), GlobalMut::<u16>::new(args.out)) };
    // SAFETY: the caller's.
    let row = unsafe { position(args.at, 0) };
    let out = out.at(u64::from(row) * u64::from(args.out_stride));
    let token = thread::block_idx_y();
    let c = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if c < args.cols {
        let bits = to_bf16(x.load(token * args.x_stride + c));
        out.store(token * args.out_stride + c, bits);
    }
}
