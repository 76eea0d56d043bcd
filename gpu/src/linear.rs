//! Dense linear layers: bf16 rows times f32 activations.
//!
//! `out[t][r] = dot(weight[r], x[t])`, plus what was there with [`ADD`](crate::dense::ADD); how is in
//! [`mod@crate::dense`].
//!
//! Six shapes. One token: `linear_thin` (one row a warp), `linear_two` and `linear_four` have 2 KiB a
//! buffer under way a warp; more rows read the activations less often, fewer keep more multiprocessors
//! at work. Two tokens: `linear_pair`, three to eight: `linear_quad`, two rows a warp, so that registers are
//! left for as many loads. More: `linear_many`, four by four, which computes most for each load.
//!
//! Limits: all but `linear_thin` need [`VECTOR`].

use cuda_std::kernel;
use cuda_std::mem::Global;

pub use crate::dense::LinearArgs;

use crate::arith::bf16;
use crate::dense::{VECTOR, Weights, body, plain};

/// Two neighbours as f32, the first in the low half.
#[inline(always)]
pub fn widen2(word: u32) -> [f32; 2] {
    [
        f32::from_bits(word << 16),
        f32::from_bits(word & 0xffff_0000),
    ]
}

/// Weights of bf16.
pub struct Bf16;

impl Weights for Bf16 {
    type Element = u16;
    type Words = [u32; 4];
    const NONE: [u32; 4] = [0; 4];

    #[inline(always)]
    fn reload(w: &Global<u16>, condition: bool, at: u32, to: &mut [u32; 4]) {
        w.cast::<u32>().reload_v4_stream(condition, at / 2, to);
    }

    #[inline(always)]
    fn widen(w: [u32; 4]) -> [f32; 8] {
        let [a, b, c, d] = w.map(widen2);
        [a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]]
    }

    #[inline(always)]
    fn one(w: &Global<u16>, at: u32) -> f32 {
        bf16(w.load_nc(at))
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
pub unsafe fn linear_thin(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe {
        if args.flags & VECTOR != 0 {
            body::<Bf16, 1, 1, 4>(args);
        } else {
            plain::<Bf16>(args);
        }
    }
}

/// Two rows and one token a warp.
///
/// # Safety
/// As [`linear_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_two(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Bf16, 2, 1, 2>(args) }
}

/// Four rows and one token a warp.
///
/// # Safety
/// As [`linear_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_four(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Bf16, 4, 1, 1>(args) }
}

/// Two rows and two tokens a warp.
///
/// # Safety
/// As [`linear_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_pair(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Bf16, 2, 2, 2>(args) }
}

/// Two rows and four tokens a warp.
///
/// # Safety
/// As [`linear_thin()`].
#[kernel(threads = 128, min_blocks = 3, prologue)]
pub unsafe fn linear_quad(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Bf16, 2, 4, 2>(args) }
}

/// Four rows and four tokens a warp.
///
/// # Safety
/// As [`linear_thin()`].
#[kernel(threads = 128, min_blocks = 2, prologue)]
pub unsafe fn linear_many(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Bf16, 4, 4, 1>(args) }
}
