//! Dense linear layers: rows of signed bytes, with a scale each, times f32 activations.
//!
//! `out[t][r] = dot(weight[r], x[t]) * scales[r]`, plus what was there with [`ADD`](crate::dense::ADD): the
//! dot product as in [`mod@crate::linear`], then a rounded product, then a rounded sum; how is in
//! [`mod@crate::dense`].
//!
//! 1. A byte, its sign bit flipped, below `0x4b0000` is the f32 `2^23 + 128 + q`: one permutation and
//!    one exact subtraction widen it.
//! 2. Shapes as in [`mod@crate::linear`].
//!
//! Limits: all but `linear_int8_thin` need [`VECTOR`].

use cuda_std::intrinsics::prmt;
use cuda_std::kernel;
use cuda_std::mem::Global;

pub use crate::dense::LinearArgs;

use crate::dense::{VECTOR, Weights, body, plain};

/// Four signed bytes as f32, the first the lowest.
#[inline(always)]
pub fn widen4(word: u32) -> [f32; 4] {
    const EXPONENT: u32 = 0x4b00_0000; // 2^23
    let word = word ^ 0x8080_8080;
    let each = |selector| f32::from_bits(prmt(word, EXPONENT, selector)) - 8_388_736.0;
    [each(0x7440), each(0x7441), each(0x7442), each(0x7443)]
}

/// Weights of signed bytes.
pub struct Int8;

impl Weights for Int8 {
    type Element = u8;
    type Words = [u32; 2];
    const NONE: [u32; 2] = [0; 2];

    #[inline(always)]
    fn reload(w: &Global<u8>, condition: bool, at: u32, to: &mut [u32; 2]) {
        w.cast::<u32>().reload_v2_stream(condition, at / 4, to);
    }

    #[inline(always)]
    fn widen(w: [u32; 2]) -> [f32; 8] {
        let (low, high) = (widen4(w[0]), widen4(w[1]));
        [
            low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3],
        ]
    }

    #[inline(always)]
    fn one(w: &Global<u8>, at: u32) -> f32 {
        f32::from(w.load_nc(at) as i8)
    }

    #[inline(always)]
    unsafe fn scaled(args: &LinearArgs, row: u32, dot: f32) -> f32 {
        // SAFETY: the caller's: a live view, as long as the arguments say.
        dot * unsafe { Global::<f32>::new(args.scales) }.load_nc(row)
    }
}

/// One row and one token a warp.
///
/// # Safety
/// The views must be live and as long as [`LinearArgs`] says; no kernel in flight writes the weights.
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_int8_thin(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe {
        if args.flags & VECTOR != 0 {
            body::<Int8, 1, 1, 8>(args);
        } else {
            plain::<Int8>(args);
        }
    }
}

/// Two rows and one token a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_int8_two(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Int8, 2, 1, 4>(args) }
}

/// Four rows and one token a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_int8_four(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Int8, 4, 1, 2>(args) }
}

/// Two rows and two tokens a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 3, prologue)]
pub unsafe fn linear_int8_pair(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Int8, 2, 2, 4>(args) }
}

/// Two rows and four tokens a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 3, prologue)]
pub unsafe fn linear_int8_quad(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Int8, 2, 4, 2>(args) }
}

/// Four rows and four tokens a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 2, prologue)]
pub unsafe fn linear_int8_many(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Int8, 4, 4, 1>(args) }
}
