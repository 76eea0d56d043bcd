//! Dense linear layers: f32 rows times f32 activations.
//!
//! `out[t][r] = dot(weight[r], x[t])`, plus what was there with [`ADD`](crate::dense::ADD); how is in
//! [`mod@crate::dense`].
//!
//! 1. Eight weights are two loads of 16 bytes, and need no widening.
//! 2. Shapes as in [`mod@crate::linear`]. Weights are twice as wide, so a warp has half as many steps of them
//!    under way, and as many bytes; `linear_f32_four` and `_many` twice as many.
//!
//! Limits: all but `linear_f32_thin` need [`VECTOR`]. There is no form for blocks that share tiles
//! ([`mod@crate::linear_tile`] lays weights out as bf16): many tokens take `linear_f32_many`.

use cuda_std::kernel;
use cuda_std::mem::Global;

pub use crate::dense::LinearArgs;

use crate::dense::{VECTOR, Weights, body, plain};

/// Weights of f32.
pub struct F32;

impl Weights for F32 {
    type Element = f32;
    type Words = [[u32; 4]; 2];
    const NONE: [[u32; 4]; 2] = [[0; 4]; 2];

    #[inline(always)]
    fn reload(w: &Global<f32>, condition: bool, at: u32, to: &mut [[u32; 4]; 2]) {
        w.reload_v4_stream(condition, at, &mut to[0]);
        w.reload_v4_stream(condition, at + 4, &mut to[1]);
    }

    #[inline(always)]
    fn widen(w: [[u32; 4]; 2]) -> [f32; 8] {
        let [a, b] = w.map(|four| four.map(f32::from_bits));
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
    }

    #[inline(always)]
    fn one(w: &Global<f32>, at: u32) -> f32 {
        w.load_nc(at)
    }

    #[inline(always)]
    unsafe fn scaled(_args: &LinearArgs, _row: u32, dot: f32) -> f32 {
        dot
    }
}

/// One row and one token a warp.
///
/// # Safety
/// The views must be live and as long as [`LinearArgs`] says; no kernel in flight writes the weights.
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_f32_thin(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe {
        if args.flags & VECTOR != 0 {
            body::<F32, 1, 1, 2>(args);
        } else {
            plain::<F32>(args);
        }
    }
}

/// Two rows and one token a warp.
///
/// # Safety
/// As [`linear_f32_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_f32_two(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<F32, 2, 1, 1>(args) }
}

/// Four rows and one token a warp.
///
/// # Safety
/// As [`linear_f32_thin()`].
#[kernel(threads = 128, min_blocks = 3, prologue)]
pub unsafe fn linear_f32_four(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<F32, 4, 1, 1>(args) }
}

/// Two rows and two tokens a warp.
///
/// # Safety
/// As [`linear_f32_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_f32_pair(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<F32, 2, 2, 1>(args) }
}

/// Two rows and four tokens a warp.
///
/// # Safety
/// As [`linear_f32_thin()`].
#[kernel(threads = 128, min_blocks = 3, prologue)]
pub unsafe fn linear_f32_quad(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<F32, 2, 4, 1>(args) }
}

/// Four rows and four tokens a warp.
///
/// # Safety
/// As [`linear_f32_thin()`].
#[kernel(threads = 128, min_blocks = 2, prologue)]
pub unsafe fn linear_f32_many(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<F32, 4, 4, 1>(args) }
}
