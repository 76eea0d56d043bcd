//! Activations to 16-bit fixed point, as expert matrices take them.
//!
//! Per token `s = max |x| / 32512`, `X = rint(x / s)` (0 where `s` is 0), and the sum of `X` over
//! each 64 columns, which turns sums over `q + 8` into sums over `q`.
//!
//! 1. One block a token: a maximum over magnitudes (whose bits order as integers), then a warp a
//!    group of 64 columns, two a lane: one word of `X` a lane, one integer reduction.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::{GROUP, abs, activation_scale, quantise};
use crate::coded::unroll;

/// Threads of a block.
pub const THREADS: u32 = 512;

const WARPS: u32 = THREADS / 32;
const COLS: u32 = GROUP as u32;

/// Arguments of [`quantise_rows()`]. Grid: `[tokens, 1, 1]`, 512 threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct QuantiseArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// i16 `[tokens, cols]`.
    pub quantised: Slice,
    /// f32 `[tokens]`.
    pub scales: Slice,
    /// i32 `[tokens, cols / 64]`.
    pub sums: Slice,
    /// Elements from row to row of `x`.
    pub x_stride: u32,
    /// Columns, a multiple of 64.
    pub cols: u32,
}

/// Quantises row `row` of the outputs: `amax` is the largest magnitude this thread knows of, `load`
/// gives a column. All threads of a block of [`THREADS`] call it.
#[inline(always)]
pub fn quantise_row(
    row: u32,
    cols: u32,
    amax: f32,
    load: impl Fn(u32) -> f32,
    scratch: Shared<u32>,
    outputs: (GlobalMut<u32>, GlobalMut<f32>, GlobalMut<i32>),
) {
    let (quantised, scales, sums) = outputs;
    let t = thread::thread_idx_x();
    let lane = warp::lane_id();
    let warp = warp::warp_id();
    let top = warp::reduce_max_u32(amax.to_bits());
    if lane == 0 {
        scratch.store(warp, top);
    }
    thread::sync_threads();
    let top = warp::reduce_max_u32(scratch.load(lane % WARPS));
    let scale = activation_scale(f32::from_bits(top));
    if t == 0 {
        scales.store(row, scale);
    }
    let groups = cols / COLS;
    let mut g = warp;
    while g < groups {
        let c = g * COLS + 2 * lane;
        let (a, b) = (quantise(load(c), scale), quantise(load(c + 1), scale));
        quantised.store((row * cols + c) / 2, a as u32 & 0xffff | (b as u32) << 16);
        let sum = warp::reduce_add_i32(a + b);
        if lane == 0 {
            sums.store(row * groups + g, sum);
        }
        g += WARPS;
    }
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`QuantiseArgs`] says.
#[kernel(threads = 512)]
pub unsafe fn quantise_rows(args: QuantiseArgs) {
    let scratch = shared_array![u32; 16];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let x = unsafe {
        Global::<f32>::new(args.x).at(thread::block_idx_x() as u64 * args.x_stride as u64)
    };
    // SAFETY: the caller's: live views, as long as the arguments say.
    let outputs = unsafe {
        (
            GlobalMut::<u32>::new(args.quantised),
            GlobalMut::<f32>::new(args.scales),
            GlobalMut::<i32>::new(args.sums),
        )
    };
    let mut amax = 0.0f32;
    let mut c = thread::thread_idx_x();
    while c < args.cols {
        // Under way together; the last column stands in for those past it.
        let mut eight = [0.0; 8];
        unroll!(I in [0 1 2 3 4 5 6 7] {
            eight[I] = abs(x.load((c + I as u32 * THREADS).min(args.cols - 1)));
        });
        unroll!(I in [0 1 2 3 4 5 6 7] {
            amax = if eight[I] > amax { eight[I] } else { amax };
        });
        c += 8 * THREADS;
    }
    quantise_row(
        thread::block_idx_x(),
        args.cols,
        amax,
        |c| x.load(c),
        scratch,
        outputs,
    );
}
