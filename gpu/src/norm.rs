//! RMS and layer normalisation of rows.
//!
//! RMS: `out = (x * r) * w` with `r = 1 / sqrt(dot(x, x) / n + eps)`.
//! Layer: `d = x - sum(x) / n`, `out = fma(d * r, w, b)` with `r` of `d`.
//!
//! 1. One block of 256 threads a row; thread `t` owns partial sum `t` of the reduction.
//! 2. A thread holds its columns in registers, those past 8,192 aside, which are read again each time.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, shared_array, thread};

use crate::arith::{bf16, fma, rms_factor};
use crate::dot::{BLOCK, block_reduce};
use crate::position::position;
use crate::unroll;

/// Arguments of [`rms_norm()`] and [`layer_norm()`]. Grid: `[tokens, 1, 1]`, 256 threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NormArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// bf16 `[cols]`.
    pub weight: Slice,
    /// bf16 `[cols]`; of [`layer_norm()`] alone.
    pub bias: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// u32 `[1]`: the row of `out` that row 0 goes to, of [`rms_norm()`] alone; or empty: the first.
    pub at: Slice,
    /// Elements from row to row of `x`.
    pub x_stride: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Columns.
    pub cols: u32,
    /// Added to the mean square.
    pub eps: f32,
}

/// Columns of a thread that it holds in registers: rows up to 8,192 columns.
const HELD: usize = 32;

/// A thread's columns of a row, 0 past the end; all loads are under way together.
struct Row {
    x: Global<f32>,
    from: u32,
    cols: u32,
    held: [[f32; 8]; HELD / 8],
}

impl Row {
    #[inline(always)]
    fn load(x: Global<f32>, from: u32, cols: u32) -> Self {
        let t = thread::thread_idx_x();
        let mut held = [[0.0; 8]; HELD / 8];
        unroll!(i < HELD / 8, {
            unroll!(j < 8, {
                let c = t + (8 * i + j) as u32 * BLOCK;
                if c < cols {
                    held[i][j] = x.load(from + c);
                }
            });
        });
        Self {
            x,
            from,
            cols,
            held,
        }
    }

    /// Calls `each` with the thread's columns and their values, in order.
    #[inline(always)]
    fn each(&self, mut each: impl FnMut(u32, f32)) {
        let t = thread::thread_idx_x();
        unroll!(i < HELD / 8, {
            unroll!(j < 8, {
                let c = t + (8 * i + j) as u32 * BLOCK;
                if c < self.cols {
                    each(c, self.held[i][j]);
                }
            });
        });
        let mut c = t + HELD as u32 * BLOCK;
        while c < self.cols {
            each(c, self.x.load(self.from + c));
            c += BLOCK;
        }
    }
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`NormArgs`] says.
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn rms_norm(args: NormArgs) {
    let scratch = shared_array![f32; 32];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<u16>::new(args.weight),
            GlobalMut::<f32>::new(args.out),
        )
    };
    // SAFETY: the caller's.
    let row = unsafe { position(args.at, 0) };
    let out = out.at(u64::from(row) * u64::from(args.out_stride));
    let token = thread::block_idx_x();
    let to = token * args.out_stride;
    let row = Row::load(x, token * args.x_stride, args.cols);

    let mut p = 0.0;
    row.each(|_, v| p = fma(v, v, p));
    let r = rms_factor(block_reduce(p, scratch), args.cols as usize, args.eps);
    row.each(|c, v| out.store(to + c, (v * r) * bf16(weight.load_nc(c))));
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`NormArgs`] says.
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn layer_norm(args: NormArgs) {
    let sums = shared_array![f32; 32];
    let squares = shared_array![f32; 32];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, bias, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<u16>::new(args.weight),
            Global::<u16>::new(args.bias),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let token = thread::block_idx_x();
    let to = token * args.out_stride;
    let row = Row::load(x, token * args.x_stride, args.cols);

    let mut p = 0.0;
    row.each(|_, v| p += v);
    let mean = block_reduce(p, sums) / args.cols as f32;

    let mut p = 0.0;
    row.each(|_, v| p = fma(v - mean, v - mean, p));
    let r = rms_factor(block_reduce(p, squares), args.cols as usize, args.eps);
    row.each(|c, v| {
        let (w, b) = (bf16(weight.load_nc(c)), bf16(bias.load_nc(c)));
        out.store(to + c, fma((v - mean) * r, w, b));
    });
}
