//! The reduction rule of [`crate::arith`] for a warp and for a block of 256 threads.
//!
//! A warp: lane `l` owns the partial sums `8l..8l+8`, so it takes columns `k = 8l..8l+8` of every
//! 256, and [`warp_reduce`] ends it. A block: thread `t` owns partial sum `t`, and
//! [`block_reduce`] ends it. Both add in the order that `arith::reduce` writes down (a floating
//! sum of two does not depend on their order).

use cuda_std::mem::Global;
use cuda_std::shared::Shared;
use cuda_std::{thread, warp};

use crate::arith::{fma, pairwise8};

/// Columns that a warp takes at a time.
pub const STEP: u32 = 256;

/// Threads of a block that reduces with [`block_reduce`].
pub const BLOCK: u32 = 256;

/// Repeats a block for `i` in `0..n`, `n` a constant up to 8, with `i` a constant in each: arrays
/// indexed by it stay in registers, which a loop that LLVM finds too long to unroll would not grant.
#[macro_export]
macro_rules! unroll {
    ($i:ident < $n:expr, $body:block) => {
        $crate::unroll!(@ $i, $n, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $i:ident, $n:expr, $body:block, $($k:literal)*) => {
        $(
            if $k < $n {
                let $i: usize = $k;
                $body
            }
        )*
    };
}

/// Elements `start + k .. start + k + 8` of `x`, those with column `k + i >= cols` as 0. With
/// `VECTOR`, `start + k` is a multiple of 4, `k` and `cols` are multiples of 8 and `k < cols`.
#[inline(always)]
pub fn load8<const VECTOR: bool>(x: Global<f32>, start: u32, k: u32, cols: u32) -> [f32; 8] {
    if VECTOR {
        let a = x.load_v4(start + k);
        let b = x.load_v4(start + k + 4);
        [
            f32::from_bits(a[0]),
            f32::from_bits(a[1]),
            f32::from_bits(a[2]),
            f32::from_bits(a[3]),
            f32::from_bits(b[0]),
            f32::from_bits(b[1]),
            f32::from_bits(b[2]),
            f32::from_bits(b[3]),
        ]
    } else {
        let mut v = [0.0; 8];
        unroll!(i < 8, {
            if k + (i as u32) < cols {
                v[i] = x.load(start + k + i as u32);
            }
        });
        v
    }
}

/// `p[i] = fma(x[i], y[i], p[i])` for the columns `k + i < cols`.
#[inline(always)]
pub fn fma8<const VECTOR: bool>(p: &mut [f32; 8], x: &[f32; 8], y: &[f32; 8], k: u32, cols: u32) {
    unroll!(i < 8, {
        // A product with 0 would turn a partial sum of -0 into +0.
        if VECTOR || k + (i as u32) < cols {
            p[i] = fma(x[i], y[i], p[i]);
        }
    });
}

/// The sum of the warp's 256 partial sums, in every lane.
#[inline(always)]
pub fn warp_reduce(p: [f32; 8]) -> f32 {
    butterfly(pairwise8(p))
}

/// `arith::butterfly32` over lanes.
#[inline(always)]
pub fn butterfly(v: f32) -> f32 {
    let v = v + warp::shuffle_xor_f32(v, 16);
    let v = v + warp::shuffle_xor_f32(v, 8);
    let v = v + warp::shuffle_xor_f32(v, 4);
    let v = v + warp::shuffle_xor_f32(v, 2);
    v + warp::shuffle_xor_f32(v, 1)
}

/// `arith::pairwise8` over each 8 neighbouring lanes.
#[inline(always)]
pub fn octet(p: f32) -> f32 {
    let v = p + warp::shuffle_xor_f32(p, 1);
    let v = v + warp::shuffle_xor_f32(v, 2);
    v + warp::shuffle_xor_f32(v, 4)
}

/// The sum of the partial sums of a block of [`BLOCK`] threads, in every thread. `scratch` has 32
/// words that nothing else touches between the barriers before and after.
#[inline(always)]
pub fn block_reduce(p: f32, scratch: Shared<f32>) -> f32 {
    let lane = warp::lane_id();
    let v = octet(p);
    if lane & 7 == 0 {
        scratch.store(thread::thread_idx_x() / 8, v);
    }
    thread::sync_threads();
    butterfly(scratch.load(lane))
}
