//! The gated activation of dense layers: `out = silu(gate) * up`, elementwise.
//!
//! Threads stride over the columns of a token; the grid's y is the token.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

use crate::arith::silu;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Arguments. Grid: `[ceil(cols / 256), tokens, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SiluMulArgs {
    /// f32 rows of `gate_stride`.
    pub gate: Slice,
    /// f32 rows of `up_stride`.
    pub up: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Elements from row to row of `gate`.
    pub gate_stride: u32,
    /// Elements from row to row of `up`.
    pub up_stride: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Columns.
    pub cols: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`SiluMulArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn silu_mul(args: SiluMulArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (gate, up, out) = unsafe {
        (
            Global::<f32>::new(args.gate),
            Global::<f32>::new(args.up),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let token = thread::block_idx_y();
    let c = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if c < args.cols {
        let g = gate.load(token * args.gate_stride + c);
        let u = up.load(token * args.up_stride + c);
        out.store(token * args.out_stride + c, silu(g) * u);
    }
}
