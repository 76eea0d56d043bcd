//! Residual addition: `out = out + x`, or `out = out + (x + also)`, elementwise.
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
    /// f32 rows of `also_stride`, or empty.
    pub also: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Elements from row to row of `x`.
    pub x_stride: u32,
    /// Elements from row to row of `also`.
    pub also_stride: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Columns.
    pub cols: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`AddArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn add(args: AddArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, also, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<f32>::new(args.also),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let token = thread::block_idx_y();
    let c = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if c < args.cols {
        let to = token * args.out_stride + c;
        let x = x.load(token * args.x_stride + c);
        let sum = if also.is_empty() {
            x
        } else {
            x + also.load(token * args.also_stride + c)
        };
        out.store(to, out.load(to) + sum);
    }
}
