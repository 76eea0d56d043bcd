//! RMS and layer normalisation of rows.
//!
//! RMS: `out = (x * r) * w` with `r = 1 / sqrt(dot(x, x) / n + eps)`.
//! Layer: `d = x - sum(x) / n`, `out = fma(d * r, w, b)` with `r` of `d`.
//!
//! 1. One block of 256 threads a row; thread `t` owns partial sum `t` of the reduction.
//! 2. A thread holds its columns in registers, those past 8,192 aside, which are read again each time;
//!    and their weights, from before the wait for the kernel ahead on.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{grid, kernel, shared_array, thread};

use crate::arith::{fma, rms_factor};
use crate::dot::{BLOCK, block_reduce};
use crate::position::position;
use crate::unroll;

/// Arguments of [`rms_norm()`] and [`layer_norm()`]. Grid: `[tokens, 1, 1]`, 256 threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NormArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// f32 `[cols]`.
    pub weight: Slice,
    /// f32 `[cols]`; of [`layer_norm()`] alone.
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

/// What a thread has of a row, 0 past the end; all loads are under way together.
struct Held {
    all: Global<f32>,
    from: u32,
    cols: u32,
    values: [[f32; 8]; HELD / 8],
}

impl Held {
    /// The `cols` elements of `all` from `from` on.
    #[inline(always)]
    fn new(all: Global<f32>, from: u32, cols: u32) -> Self {
        let t = thread::thread_idx_x();
        let mut values = [[0.0; 8]; HELD / 8];
        unroll!(i < HELD / 8, {
            unroll!(j < 8, {
                let c = t + (8 * i + j) as u32 * BLOCK;
                if c < cols {
                    values[i][j] = all.load(from + c);
                }
            });
        });
        Self {
            all,
            from,
            cols,
            values,
        }
    }

    /// Calls `each` with the thread's columns, their place in `values`, or none past it, in order.
    #[inline(always)]
    fn each(&self, mut each: impl FnMut(u32, Option<(usize, usize)>)) {
        let t = thread::thread_idx_x();
        unroll!(i < HELD / 8, {
            unroll!(j < 8, {
                let c = t + (8 * i + j) as u32 * BLOCK;
                if c < self.cols {
                    each(c, Some((i, j)));
                }
            });
        });
        let mut c = t + HELD as u32 * BLOCK;
        while c < self.cols {
            each(c, None);
            c += BLOCK;
        }
    }

    /// The element of column `c`, whose place is `at`.
    #[inline(always)]
    fn get(&self, c: u32, at: Option<(usize, usize)>) -> f32 {
        match at {
            Some((i, j)) => self.values[i][j],
            None => self.all.load(self.from + c),
        }
    }
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`NormArgs`] says; no kernel in flight writes the weights.
#[kernel(threads = 256, min_blocks = 1, prologue)]
pub unsafe fn rms_norm(args: NormArgs) {
    let scratch = shared_array![f32; 32];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<f32>::new(args.weight),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let weight = Held::new(weight, 0, args.cols);
    grid::wait();
    // SAFETY: the caller's.
    let row = unsafe { position(args.at, 0) };
    let out = out.at(u64::from(row) * u64::from(args.out_stride));
    let token = thread::block_idx_x();
    let to = token * args.out_stride;
    let x = Held::new(x, token * args.x_stride, args.cols);

    let mut p = 0.0;
    x.each(|c, at| p = fma(x.get(c, at), x.get(c, at), p));
    let r = rms_factor(block_reduce(p, scratch), args.cols as usize, args.eps);
    x.each(|c, at| out.store(to + c, (x.get(c, at) * r) * weight.get(c, at)));
}

/// See the module.
///
/// # Safety
/// As [`rms_norm()`].
#[kernel(threads = 256, min_blocks = 1, prologue)]
pub unsafe fn layer_norm(args: NormArgs) {
    let sums = shared_array![f32; 32];
    let squares = shared_array![f32; 32];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, bias, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<f32>::new(args.weight),
            Global::<f32>::new(args.bias),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let weight = Held::new(weight, 0, args.cols);
    let bias = Held::new(bias, 0, args.cols);
    grid::wait();
    let token = thread::block_idx_x();
    let to = token * args.out_stride;
    let x = Held::new(x, token * args.x_stride, args.cols);

    let mut p = 0.0;
    x.each(|c, at| p += x.get(c, at));
    let mean = block_reduce(p, sums) / args.cols as f32;

    let mut p = 0.0;
    x.each(|c, at| {
        let d = x.get(c, at) - mean;
        p = fma(d, d, p);
    });
    let r = rms_factor(block_reduce(p, squares), args.cols as usize, args.eps);
    x.each(|c, at| {
        let d = x.get(c, at) - mean;
        let v = fma(d * r, weight.get(c, at), bias.get(c, at));
        out.store(to + c, v);
    });
}
