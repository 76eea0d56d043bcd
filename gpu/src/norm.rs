//! RMS and layer normalisation of rows.
//!
//! RMS: `out = (x * r) * w` with `r = 1 / sqrt(dot(x, x) / n + eps)`.
//! Layer: `d = x - sum(x) / n`, `out = fma(d * r, w, b)` with `r` of `d`.
//!
//! 1. One block of 256 threads a row; thread `t` owns partial sum `t` of the reduction.
//! 2. The row is read again for each pass: it stays in L1, and no row is too long.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, shared_array, thread};

use crate::arith::{bf16, fma, rms_factor};
use crate::dot::{BLOCK, block_reduce};
use crate::position::position;

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

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`NormArgs`] says.
#[kernel(threads = 256)]
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
    let (token, t) = (thread::block_idx_x(), thread::thread_idx_x());
    let (from, to) = (token * args.x_stride, token * args.out_stride);

    let mut p = 0.0;
    let mut c = t;
    while c < args.cols {
        let v = x.load(from + c);
        p = fma(v, v, p);
        c += BLOCK;
    }
    let r = rms_factor(block_reduce(p, scratch), args.cols as usize, args.eps);

    let mut c = t;
    while c < args.cols {
        out.store(to + c, (x.load(from + c) * r) * bf16(weight.load_nc(c)));
        c += BLOCK;
    }
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`NormArgs`] says.
#[kernel(threads = 256)]
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
    let (token, t) = (thread::block_idx_x(), thread::thread_idx_x());
    let (from, to) = (token * args.x_stride, token * args.out_stride);

    let mut p = 0.0;
    let mut c = t;
    while c < args.cols {
        p += x.load(from + c);
        c += BLOCK;
    }
    let mean = block_reduce(p, sums) / args.cols as f32;

    let mut p = 0.0;
    let mut c = t;
    while c < args.cols {
        let d = x.load(from + c) - mean;
        p = fma(d, d, p);
        c += BLOCK;
    }
    let r = rms_factor(block_reduce(p, squares), args.cols as usize, args.eps);

    let mut c = t;
    while c < args.cols {
        let d = x.load(from + c) - mean;
        let v = fma(d * r, bf16(weight.load_nc(c)), bf16(bias.load_nc(c)));
        out.store(to + c, v);
        c += BLOCK;
    }
}
