//! The one arithmetic: scalar functions and reduction orders that every back end follows.
//!
//! Nothing here may be reassociated, contracted or replaced by a library call: a result is defined
//! by the order of roundings written down, and `docs/determinism.md` promises it. Products are
//! fused with sums only where `fma` is written; `/` and `sqrt` are IEEE; denormals are kept.
//!
//! # Reduction of a vector (`dot`, `sum`)
//! 256 partial sums, `p[k mod 256] = fma(x[k], y[k], p[k mod 256])` for ascending `k`, starting
//! from +0. Then each group of 8 neighbours is added pairwise, [`pairwise8`], and the 32 results by
//! a butterfly over distances 16, 8, 4, 2, 1, [`butterfly32`]. A warp gives lane `l` the partial
//! sums `8l..8l+8` (one 16-byte load of bf16) and the butterfly is five shuffles; a CPU keeps the
//! partial sums in vector registers.

/// Partial sums of a reduction.
pub const PARTIALS: usize = 256;

/// Positions that attention reduces before it merges with the positions before them.
pub const ATTENTION_CHUNK: usize = 64;

/// Largest magnitude of a quantised activation: `127 * 256`, so that both int8 planes of
/// `X = 256 * hi + lo` stay within range.
pub const ACTIVATION_MAX: f32 = 32512.0;

/// Columns that share one scale in g64 experts, and one entry of the activations' group sums.
pub const GROUP: usize = 64;

/// `a * b + c` with one rounding.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::intrinsics::fma_f32(a, b, c)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        a.mul_add(b, c)
    }
}

/// `a * b + c` in f64 with one rounding.
#[inline(always)]
pub fn fma64(a: f64, b: f64, c: f64) -> f64 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::intrinsics::fma_f64(a, b, c)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        a.mul_add(b, c)
    }
}

/// IEEE square root.
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::intrinsics::sqrt_rn(x)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        x.sqrt()
    }
}

/// Nearest integer, ties to even, for `|x| < 2^22`; the addition does the rounding.
#[inline(always)]
pub fn rint(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + MAGIC) - MAGIC
}

/// `|x|` by clearing the sign.
#[inline(always)]
pub fn abs(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0x7fff_ffff)
}

/// The larger of two numbers that are not NaN; of two zeros the second.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// bf16 bits widened to f32; exact.
#[inline(always)]
pub fn bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The nearest bf16 number, of two as near the one whose last bit is 0; what is not a number stays so.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// `e^x`. Exactly 1 at 0; 0 below -87.3, finite above 88.7 (the argument is clamped); at most
/// 1.03 ulp from the true value in between (measured over every f32, `tests/arith.rs`).
///
/// `n = rint(x / ln 2)`, `r = x - n ln 2` in two parts, a polynomial of degree 6 (Cephes
/// `expf` coefficients), then `2^n` through the exponent field.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    if x < -87.3 {
        return 0.0;
    }
    let x = if x > 88.7 { 88.7 } else { x };
    let n = rint(x * core::f32::consts::LOG2_E);
    let r = fma(n, -0.693_359_4, x);
    let r = fma(n, 2.121_944_4e-4, r);
    let p = fma(1.987_569_2e-4, r, 1.398_199_9e-3);
    let p = fma(p, r, 8.333_452e-3);
    let p = fma(p, r, 4.166_579_6e-2);
    let p = fma(p, r, 1.666_666_6e-1);
    let p = fma(p, r, 0.5);
    let p = fma(p * r, r, r) + 1.0;
    // n is in -126..=128: two factors keep 2^n in range of the exponent field.
    let n = n as i32;
    let half = n >> 1;
    p * f32::from_bits(((half + 127) as u32) << 23)
        * f32::from_bits(((n - half + 127) as u32) << 23)
}

/// Logistic function `1 / (1 + e^-x)`, at most 2.5 ulp from the true value for `x > -87.3`
/// (measured over every f32); below that `1 / (1 + e^88.7)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`, computed as `x / (1 + e^-x)`: at most 2.5 ulp from the true value for
/// `x > -87` (measured over every f32).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Sine and cosine of a non-negative angle up to 2^24 radians, each within 0.51 ulp of f32.
///
/// Computed in f64: Cody-Waite reduction by pi/2 in two parts, Taylor polynomials on
/// `[-pi/4, pi/4]` (degrees 13 and 14, truncation below 1e-11), then one rounding to f32.
#[inline(always)]
pub fn sin_cos(angle: f32) -> (f32, f32) {
    const MAGIC: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    let x = angle as f64;
    let k = (x * core::f64::consts::FRAC_2_PI + MAGIC) - MAGIC;
    let r = fma64(k, -core::f64::consts::FRAC_PI_2, x);
    let r = fma64(k, -6.123_233_995_736_766e-17, r);
    let z = r * r;
    let s = fma64(z, 1.605_904_383_682_161_5e-10, -2.505_210_838_544_172e-8);
    let s = fma64(s, z, 2.755_731_922_398_589e-6);
    let s = fma64(s, z, -1.984_126_984_126_984e-4);
    let s = fma64(s, z, 8.333_333_333_333_333e-3);
    let s = fma64(s, z, -1.666_666_666_666_666_6e-1);
    let s = fma64(s * z, r, r);
    let c = fma64(z, -1.147_074_559_772_972_5e-11, 2.087_675_698_786_81e-9);
    let c = fma64(c, z, -2.755_731_922_398_589e-7);
    let c = fma64(c, z, 2.480_158_730_158_73e-5);
    let c = fma64(c, z, -1.388_888_888_888_889e-3);
    let c = fma64(c, z, 4.166_666_666_666_666_4e-2);
    let c = fma64(c, z, -0.5);
    let c = fma64(c, z, 1.0);
    let (s, c) = match k as i64 & 3 {
        0 => (s, c),
        1 => (c, -s),
        2 => (-s, -c),
        _ => (-c, s),
    };
    (s as f32, c as f32)
}

/// Rotates the pair `(a, b)`: `(a cos - b sin, b cos + a sin)`.
#[inline(always)]
pub fn rotate(a: f32, b: f32, sin: f32, cos: f32) -> (f32, f32) {
    (fma(a, cos, -(b * sin)), fma(b, cos, a * sin))
}

/// Adds 8 neighbouring partial sums pairwise.
#[inline(always)]
pub fn pairwise8(p: [f32; 8]) -> f32 {
    ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
}

/// Adds 32 numbers by halving: distances 16, 8, 4, 2, 1. A warp's xor shuffles at those distances
/// give every lane this sum.
#[inline(always)]
pub fn butterfly32(mut v: [f32; 32]) -> f32 {
    let mut half = 16;
    while half > 0 {
        let mut i = 0;
        while i < half {
            v[i] += v[i + half];
            i += 1;
        }
        half /= 2;
    }
    v[0]
}

/// The sum that 256 partial sums stand for.
#[inline(always)]
pub fn reduce(p: &[f32; PARTIALS]) -> f32 {
    let mut v = [0.0; 32];
    for (lane, v) in v.iter_mut().enumerate() {
        let mut eight = [0.0; 8];
        eight.copy_from_slice(&p[8 * lane..8 * lane + 8]);
        *v = pairwise8(eight);
    }
    butterfly32(v)
}

/// Factor of RMS normalisation: `1 / sqrt(sum_of_squares / n + eps)`; `y = (x * r) * w`.
#[inline(always)]
pub fn rms_factor(sum_of_squares: f32, n: usize, eps: f32) -> f32 {
    1.0 / sqrt(sum_of_squares / n as f32 + eps)
}

/// Scale of a quantised activation vector from its largest magnitude.
#[inline(always)]
pub fn activation_scale(amax: f32) -> f32 {
    amax / ACTIVATION_MAX
}

/// One quantised activation, `rint(x / scale)`; 0 where the scale is 0.
#[inline(always)]
pub fn quantise(x: f32, scale: f32) -> i32 {
    if scale == 0.0 {
        0
    } else {
        rint(x / scale) as i32
    }
}

/// Expert output of per-row scales: `row_scale * (activation_scale * dot)`, `dot` exact.
#[inline(always)]
pub fn dequantise_row(row_scale: f32, activation_scale: f32, dot: i32) -> f32 {
    row_scale * (activation_scale * dot as f32)
}

/// Expert output of int8 weights `16 high + low + 8`, with nibbles `high` and `low` from -8 to 7 and a
/// scale a row: `row_scale * (activation_scale * dot)`, where the dot product is exact (64 bits) and
/// rounded once. `sum` is that of the activations.
#[inline(always)]
pub fn dequantise_int8(
    row_scale: f32,
    activation_scale: f32,
    high: i32,
    low: i32,
    sum: i32,
) -> f32 {
    let dot = 16 * high as i64 + low as i64 + 8 * sum as i64;
    row_scale * (activation_scale * dot as f32)
}

/// Expert output of g64 scales: `activation_scale * sum`, the sum as [`crate::layout::Folds`] says.
#[inline(always)]
pub fn dequantise_grouped(activation_scale: f32, sum: f32) -> f32 {
    activation_scale * sum
}

/// Weight scale stored as bf16 `amax`: `max(amax / 7, 1e-8)`, the int4 rule of `host convert`.
///
/// The quotient is corrected once by its exact remainder, which makes it IEEE division's for every
/// bf16 number that is not below 1e-8 (a test divides them all): kernels are spared the general
/// division.
#[inline(always)]
pub fn scale_from_amax(amax: u16) -> f32 {
    const SEVENTH: f32 = 1.0 / 7.0;
    let a = bf16(amax);
    let q = a * SEVENTH;
    max(fma(fma(-7.0, q, a), SEVENTH, q), 1e-8)
}

/// Running state of softmax attention over chunks of [`ATTENTION_CHUNK`] positions.
///
/// A chunk has `m = max(score)`, `p_i = exp(score_i - m)`, `l = sum(p)` (the reduction of this
/// module) and, per column, `o = fma(p_i, c_i, o)` for ascending `i` from +0. Chunks merge in
/// ascending order, from the first chunk's own values; the output is `o / l`.
#[derive(Clone, Copy, Debug)]
pub struct Merge {
    /// Largest score so far.
    pub m: f32,
    /// Factor for what was accumulated before.
    pub old: f32,
    /// Factor for the chunk that comes in.
    pub new: f32,
}

/// Factors that merge a chunk of maximum `chunk` into an accumulation of maximum `m`; then
/// `l = fma(l, old, l_chunk * new)` and `o = fma(o, old, o_chunk * new)`.
#[inline(always)]
pub fn merge(m: f32, chunk: f32) -> Merge {
    let top = max(m, chunk);
    Merge {
        m: top,
        old: exp(m - top),
        new: exp(chunk - top),
    }
}

/// Key that orders f32 scores ascending as unsigned integers; -0 counts as +0. No NaN.
#[inline(always)]
pub fn order_key(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 0x8000_0000
    }
}

/// Reductions for the host in their plainest form; back ends have their own fast ones.
#[cfg(not(target_arch = "nvptx64"))]
pub mod plain {
    use super::{PARTIALS, fma, reduce};

    /// Dot product by the module's rule. Vectors of equal length.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 {
        assert_eq!(x.len(), y.len());
        let mut p = [0.0; PARTIALS];
        for (k, (x, y)) in x.iter().zip(y).enumerate() {
            p[k % PARTIALS] = fma(*x, *y, p[k % PARTIALS]);
        }
        reduce(&p)
    }

    /// Sum by the module's rule.
    pub fn sum(x: &[f32]) -> f32 {
        let mut p = [0.0; PARTIALS];
        for (k, x) in x.iter().enumerate() {
            p[k % PARTIALS] += x;
        }
        reduce(&p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_quotients() {
        for amax in 0..0x7f80u16 {
            let expected = max(bf16(amax) / 7.0, 1e-8);
            assert_eq!(
                scale_from_amax(amax).to_bits(),
                expected.to_bits(),
                "{amax:#x}"
            );
        }
    }
}
