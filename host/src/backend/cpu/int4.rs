//! Expert matrices: quantised activations, and the product of int4 rows with them.

// A quantisation's parameter only chooses the features that it is compiled for.
#![allow(clippy::extra_unused_type_parameters)]

use crate::expert::ScaleKind;
use crate::simd::{INT4_ROWS, STEP_BYTES, STEP_COLS, Simd, arms};
use gpu::arith::{self, GROUP};
use gpu::layout::{Folds, MAX_COLS};

/// A quantised activation vector.
#[derive(Clone, Debug, Default)]
pub struct Activation {
    /// Both int8 planes in steps of 128 columns, as [`Simd::int4`] wants them.
    pub planes: Vec<i8>,
    /// Its scale.
    pub scale: f32,
    /// Sums of `X` over each 64 columns.
    pub group_sums: Vec<i32>,
    /// Sum of all `X`.
    pub sum: i32,
}

/// Quantises `x`, a multiple of 64 columns.
#[inline(always)]
unsafe fn quantise_body<S: Simd>(x: &[f32], out: &mut Activation) {
    assert!(x.len().is_multiple_of(GROUP));
    let mut lanes = [0.0f32; 64];
    for x in x.chunks_exact(64) {
        for (m, x) in lanes.iter_mut().zip(x) {
            *m = arith::max(*m, arith::abs(*x));
        }
    }
    let amax = lanes.into_iter().fold(0.0, arith::max);
    let scale = arith::activation_scale(amax);
    out.scale = scale;
    out.planes.clear();
    out.planes
        .resize(x.len().div_ceil(STEP_COLS) * STEP_BYTES, 0);
    out.group_sums.clear();
    out.sum = 0;
    for (half, x) in x.chunks_exact(GROUP).enumerate() {
        let mut q = [0i32; GROUP];
        for (q, x) in q.iter_mut().zip(x) {
            *q = arith::quantise(*x, scale);
        }
        let sum = q.iter().sum::<i32>();
        out.group_sums.push(sum);
        out.sum = out.sum.wrapping_add(sum);
        let step = &mut out.planes[half / 2 * STEP_BYTES + half % 2 * 32..];
        for i in 0..GROUP / 2 {
            for odd in 0..2 {
                let q = q[2 * i + odd];
                let high = (q + 128) >> 8;
                step[odd * 128 + i] = high as i8;
                step[odd * 128 + 64 + i] = (q - 256 * high) as i8;
            }
        }
    }
}

/// Adds `n` numbers by halving, `n` a power of two up to 32; [`Folds`] says why.
#[inline(always)]
fn halve<const N: usize>(v: &[f32]) -> f32 {
    let mut a = [0.0; N];
    a.copy_from_slice(&v[..N]);
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            a[i] += a[i + half];
        }
        half /= 2;
    }
    a[0]
}

/// Adds a row's scaled group sums in the order of [`Folds`].
#[inline(always)]
fn fold<const N: usize>(v: &[f32]) -> f32 {
    let mut folds = v.chunks_exact(N);
    let mut sum = folds.next().map_or(0.0, halve::<N>);
    for v in folds {
        sum += halve::<N>(v);
    }
    sum
}

/// A raw int4 matrix, or some of its rows.
#[derive(Clone, Copy)]
pub struct Int4<'a> {
    /// Nibbles `q + 8`, rows of `cols / 2` bytes.
    pub packed: &'a [u8],
    /// Their scales.
    pub scales: &'a [f32],
    /// What a scale covers.
    pub kind: ScaleKind,
    /// Columns.
    pub cols: usize,
}

impl<'a> Int4<'a> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.packed.len() / (self.cols / 2)
    }

    /// Rows `first .. first + count`.
    pub fn slice(&self, first: usize, count: usize) -> Int4<'a> {
        let bytes = self.cols / 2;
        Int4 {
            packed: &self.packed[first * bytes..(first + count) * bytes],
            scales: self.scales_of(first, count),
            ..*self
        }
    }

    /// Scales of rows `first .. first + count`.
    pub fn scales_of(&self, first: usize, count: usize) -> &'a [f32] {
        let per_row = self.kind.count(1, self.cols);
        &self.scales[first * per_row..(first + count) * per_row]
    }
}

/// `out[t][r] = y`, `[acts][rows]`.
#[inline(always)]
unsafe fn matmul_body<S: Simd>(w: Int4<'_>, acts: &[&Activation], out: &mut [f32]) {
    let (rows, cols) = (w.rows(), w.cols);
    let folds = Folds::new(cols).expect("columns of an expert matrix");
    assert!(
        w.packed.len() == rows * cols / 2
            && w.scales.len() == w.kind.count(rows, cols)
            && out.len() == rows * acts.len()
            && acts.iter().all(|a| a.group_sums.len() * GROUP == cols
                && a.planes.len() == cols.div_ceil(STEP_COLS) * STEP_BYTES)
    );
    let row = |r: usize| w.packed[r.min(rows - 1) * (cols / 2)..][..cols / 2].as_ptr();
    match w.kind {
        ScaleKind::Row => {
            for first in (0..rows).step_by(INT4_ROWS) {
                let ptrs = std::array::from_fn(|i| row(first + i));
                let n = (rows - first).min(INT4_ROWS);
                let mut t = 0;
                macro_rules! take {
                    ($t:literal) => {
                        while acts.len() - t >= $t {
                            let planes: [*const i8; $t] =
                                std::array::from_fn(|i| acts[t + i].planes.as_ptr());
                            // SAFETY: as the caller; rows and planes have the lengths asserted.
                            let dots = unsafe { S::int4::<$t>(ptrs, planes, cols) };
                            for (r, dots) in dots.iter().enumerate().take(n) {
                                for (i, dot) in dots.iter().enumerate() {
                                    let act = acts[t + i];
                                    let dot = dot.wrapping_sub(act.sum.wrapping_mul(8));
                                    out[(t + i) * rows + first + r] =
                                        arith::dequantise_row(w.scales[first + r], act.scale, dot);
                                }
                            }
                            t += $t;
                        }
                    };
                }
                take!(2);
                take!(1);
            }
        }
        ScaleKind::G64 => {
            let groups = cols / GROUP;
            let mut dots = [[0i32; MAX_COLS / GROUP + 16]; 2];
            let mut scaled = [0.0f32; MAX_COLS / GROUP];
            for r in 0..rows {
                let scales = &w.scales[r * groups..][..groups];
                let mut t = 0;
                macro_rules! take {
                    ($t:literal) => {
                        while acts.len() - t >= $t {
                            let planes: [*const i8; $t] =
                                std::array::from_fn(|i| acts[t + i].planes.as_ptr());
                            let [a, b] = &mut dots;
                            let to = [a.as_mut_ptr(), b.as_mut_ptr()];
                            // SAFETY: as the caller; each of dots holds the groups of MAX_COLS
                            // columns and 16 more.
                            unsafe {
                                S::int4_groups::<$t>(
                                    row(r),
                                    planes,
                                    cols,
                                    std::array::from_fn(|i| to[i]),
                                )
                            };
                            for i in 0..$t {
                                let act = acts[t + i];
                                for (((v, s), dot), sum) in scaled
                                    .iter_mut()
                                    .zip(scales)
                                    .zip(&dots[i])
                                    .zip(&act.group_sums)
                                {
                                    *v = s * dot.wrapping_sub(8 * sum) as f32;
                                }
                                let v = &scaled[..groups];
                                let sum = match folds.fold_groups() {
                                    1 => fold::<1>(v),
                                    2 => fold::<2>(v),
                                    4 => fold::<4>(v),
                                    8 => fold::<8>(v),
                                    16 => fold::<16>(v),
                                    _ => fold::<32>(v),
                                };
                                out[(t + i) * rows + r] = arith::dequantise_grouped(act.scale, sum);
                            }
                            t += $t;
                        }
                    };
                }
                take!(2);
                take!(1);
            }
        }
    }
}

/// `out[t][r]` the bits of `dot`, `[acts][rows]`.
#[inline(always)]
unsafe fn dots_body<S: Simd>(w: Int4<'_>, acts: &[&Activation], out: &mut [f32]) {
    let (rows, cols) = (w.rows(), w.cols);
    assert!(
        w.packed.len() == rows * cols / 2
            && out.len() == rows * acts.len()
            && acts
                .iter()
                .all(|a| a.planes.len() == cols.div_ceil(STEP_COLS) * STEP_BYTES)
    );
    let row = |r: usize| w.packed[r.min(rows - 1) * (cols / 2)..][..cols / 2].as_ptr();
    for first in (0..rows).step_by(INT4_ROWS) {
        let ptrs = std::array::from_fn(|i| row(first + i));
        let n = (rows - first).min(INT4_ROWS);
        for (t, act) in acts.iter().enumerate() {
            // SAFETY: as the caller; rows and planes have the lengths asserted.
            let dots = unsafe { S::int4::<1>(ptrs, [act.planes.as_ptr()], cols) };
            for (r, [dot]) in dots.iter().enumerate().take(n) {
                let dot = dot.wrapping_sub(act.sum.wrapping_mul(8));
                out[t * rows + first + r] = f32::from_bits(dot as u32);
            }
        }
    }
}

arms! {
    /// Rows of an expert matrix times activations, the integers' bits: `out` `[acts][rows]`.
    pub fn dots(w: Int4<'_>, acts: &[&Activation], out: &mut [f32]) = dots_body;
    /// Quantises a vector of a multiple of 64 columns.
    pub fn quantise(x: &[f32], out: &mut Activation) = quantise_body;
    /// Rows of an expert matrix times activations: `out` `[acts][rows]`.
    pub fn matmul(w: Int4<'_>, acts: &[&Activation], out: &mut [f32]) = matmul_body;
}
