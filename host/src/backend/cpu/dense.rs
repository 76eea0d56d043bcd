//! Dense arithmetic on vectors: dot products, transposed tiles, norms, attention's two products.
//!
//! Two ways to a dot product of the 256-partial-sum rule:
//! - [`dot`]: vectors hold neighbouring partial sums. Reads each operand once, so it suits one
//!   token, where memory is the bound; the final reduction costs as much as 100 multiplications.
//! - [`tile`]: vectors hold the same partial sum of `W` rows, taken from a transposed copy of the
//!   rows ([`transpose`]); the reduction is vertical. It suits several tokens, or heads.

// Elementwise bodies leave vectors to the compiler: their parameter only chooses the features.
#![allow(clippy::extra_unused_type_parameters)]

use super::Cpu;
use crate::backend::{Index, Weight};
use crate::simd::{Arm, Element, Level, Simd, arms};
use gpu::arith::{self, PARTIALS};

/// Tokens (or heads) that [`tile`] takes at once.
pub const TILE: usize = 8;

/// Dot product of vectors of equal length.
///
/// # Safety
/// The processor has the arm.
#[inline(always)]
unsafe fn dot<S: Simd, E: Element>(x: &[f32], w: &[E]) -> f32 {
    assert_eq!(x.len(), w.len());
    let mut p = [0.0; PARTIALS];
    // SAFETY: both have n elements.
    unsafe { S::partials(x.as_ptr(), w.as_ptr(), x.len(), &mut p) };
    for k in x.len() / S::W * S::W..x.len() {
        p[k % PARTIALS] = arith::fma(x[k], w[k].widen(), p[k % PARTIALS]);
    }
    // SAFETY: as the caller.
    unsafe { S::reduce(&p) }
}

/// `out[r] = dot(w[r], x)`.
#[inline(always)]
unsafe fn dot_rows_body<S: Simd, E: Element>(w: &[E], x: &[f32], out: &mut [f32]) {
    assert_eq!(w.len(), x.len() * out.len());
    for (w, out) in w.chunks_exact(x.len().max(1)).zip(out) {
        // SAFETY: as the caller.
        *out = unsafe { dot::<S, E>(x, w) };
    }
}

/// [`dot_rows_body`] of each kind of numbers.
#[inline(always)]
unsafe fn dot_rows_of<S: Simd>(w: Numbers<'_>, x: &[f32], out: &mut [f32]) {
    // SAFETY: as the caller.
    unsafe {
        match w {
            Numbers::Bf16(w) => dot_rows_body::<S, u16>(w, x, out),
            Numbers::Int8(w) => dot_rows_body::<S, i8>(w, x, out),
            Numbers::F32(w) => dot_rows_body::<S, f32>(w, x, out),
        }
    }
}

/// Transposes `W` rows into `out` `[cols][W]`, rows past `rows.len()` as zeros.
#[inline(always)]
unsafe fn transpose<'a, S: Simd, E: Element>(
    rows: impl ExactSizeIterator<Item = &'a [E]>,
    cols: usize,
    out: &mut [f32],
) {
    let n = rows.len();
    assert!(n <= S::W && out.len() == cols * S::W);
    if n < S::W {
        out.fill(0.0);
    }
    for (r, row) in rows.enumerate() {
        for (x, out) in row[..cols].iter().zip(out[r..].iter_mut().step_by(S::W)) {
            *out = x.widen();
        }
    }
}

/// Dot products of `W` transposed rows with `T` vectors of `cols` elements.
///
/// # Safety
/// The processor has the arm; `wt` holds `cols * W` numbers, each of `xs` `cols`.
#[inline(always)]
unsafe fn tile<S: Simd, const T: usize>(
    wt: *const f32,
    xs: [*const f32; T],
    cols: usize,
) -> [S::V; T] {
    // SAFETY: k < cols wherever it is read.
    unsafe {
        let mut v = [[S::zero(); T]; 32];
        for (octet, v) in v.iter_mut().enumerate().take(cols.div_ceil(8)) {
            let mut p = [[S::zero(); T]; 8];
            for (j, p) in p.iter_mut().enumerate() {
                let mut k = 8 * octet + j;
                while k < cols {
                    let w = S::load(wt.add(k * S::W));
                    for (p, x) in p.iter_mut().zip(xs) {
                        *p = S::fma(S::splat(*x.add(k)), w, *p);
                    }
                    k += PARTIALS;
                }
            }
            for (t, v) in v.iter_mut().enumerate() {
                let a = S::add(S::add(p[0][t], p[1][t]), S::add(p[2][t], p[3][t]));
                let b = S::add(S::add(p[4][t], p[5][t]), S::add(p[6][t], p[7][t]));
                *v = S::add(a, b);
            }
        }
        let mut half = 16;
        while half > 0 {
            let (low, high) = v.split_at_mut(half);
            for (low, high) in low.iter_mut().zip(high) {
                for (low, high) in low.iter_mut().zip(high) {
                    *low = S::add(*low, *high);
                }
            }
            half /= 2;
        }
        v[0]
    }
}

/// [`tile`] for any number of vectors: `out[i][..W]`, at `i * stride` of `out`, from the vector at
/// `x[i]`.
///
/// # Safety
/// The processor has the arm.
#[inline(always)]
unsafe fn tiles<S: Simd>(
    wt: &[f32],
    cols: usize,
    xs: &[&[f32]],
    mut put: impl FnMut(usize, &[f32; 16]),
) {
    assert!(wt.len() >= cols * S::W && xs.iter().all(|x| x.len() >= cols));
    let mut first = 0;
    let mut out = [0.0; 16];
    macro_rules! take {
        ($t:literal) => {
            while xs.len() - first >= $t {
                let ptrs: [*const f32; $t] = std::array::from_fn(|i| xs[first + i].as_ptr());
                // SAFETY: lengths were checked; out holds W numbers.
                unsafe {
                    let v = tile::<S, $t>(wt.as_ptr(), ptrs, cols);
                    for (i, v) in v.into_iter().enumerate() {
                        S::store(out.as_mut_ptr(), v);
                        put(first + i, &out);
                    }
                }
                first += $t;
            }
        };
    }
    take!(8);
    take!(4);
    take!(1);
}

/// `out[t][r] = dot(w[r], xs[t])`, `out` `[tokens][rows]`; rows of `w` have `cols` elements.
#[inline(always)]
unsafe fn linear_body<S: Simd, E: Element>(w: &[E], cols: usize, xs: &[&[f32]], out: &mut [f32]) {
    let rows = w.len() / cols;
    assert!(w.len() == rows * cols && out.len() == rows * xs.len());
    let mut wt = vec![0.0; cols * S::W];
    for first in (0..rows).step_by(S::W) {
        let n = (rows - first).min(S::W);
        // SAFETY: as the caller.
        unsafe {
            let block = &w[first * cols..(first + n) * cols];
            transpose::<S, E>(block.chunks_exact(cols), cols, &mut wt);
            tiles::<S>(&wt, cols, xs, |t, v| {
                out[t * rows + first..][..n].copy_from_slice(&v[..n]);
            });
        }
    }
}

/// [`linear_body`] of each kind of numbers.
#[inline(always)]
unsafe fn linear_of<S: Simd>(w: Numbers<'_>, cols: usize, xs: &[&[f32]], out: &mut [f32]) {
    // SAFETY: as the caller.
    unsafe {
        match w {
            Numbers::Bf16(w) => linear_body::<S, u16>(w, cols, xs, out),
            Numbers::Int8(w) => linear_body::<S, i8>(w, cols, xs, out),
            Numbers::F32(w) => linear_body::<S, f32>(w, cols, xs, out),
        }
    }
}

/// `out = (x * rms_factor) * weight`.
#[inline(always)]
unsafe fn rms_norm_body<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: as the caller.
    let r = arith::rms_factor(unsafe { dot::<S, f32>(x, x) }, x.len(), eps);
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = (x * r) * w;
    }
}

/// `d = x - mean`, `out = fma(d * factor, weight, bias)`.
#[inline(always)]
unsafe fn layer_norm_body<S: Simd>(
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let mean = arith::plain::sum(x) / x.len() as f32;
    for (out, x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    // SAFETY: as the caller.
    let r = arith::rms_factor(unsafe { dot::<S, f32>(out, out) }, x.len(), eps);
    for ((out, w), b) in out.iter_mut().zip(weight).zip(bias) {
        *out = arith::fma(*out * r, *w, *b);
    }
}

/// `out = silu(gate) * up`.
#[inline(always)]
unsafe fn silu_mul_body<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = arith::silu(*gate) * up;
    }
}

/// `acc[v] = fma(weights[i], rows[i][c + v], acc[v])` for ascending `i` from +0; `N` vectors.
///
/// # Safety
/// The processor has the arm; `row(i)` points at `N * W` elements.
#[inline(always)]
unsafe fn weighted<S: Simd, E: Element, const N: usize, const T: usize>(
    count: usize,
    row: impl Fn(usize) -> *const E,
    weights: [*const f32; T],
) -> [[S::V; N]; T] {
    // SAFETY: as the caller.
    unsafe {
        let mut acc = [[S::zero(); N]; T];
        for i in 0..count {
            let row = row(i);
            let mut values = [S::zero(); N];
            for (n, v) in values.iter_mut().enumerate() {
                *v = E::load::<S>(row.add(n * S::W));
            }
            for t in 0..T {
                let w = S::splat(*weights[t].add(i));
                for n in 0..N {
                    acc[t][n] = S::fma(w, values[n], acc[t][n]);
                }
            }
        }
        acc
    }
}

/// Weighted sums of rows for several sets of weights:
/// `out[t][c] = sum over i ascending of fma(weights[t][i], rows[i][c], acc)` from +0, written by
/// `put(t, c, values)`.
#[inline(always)]
unsafe fn weighted_sums<'a, S: Simd, E: Element>(
    rows: &(impl Fn(usize) -> &'a [E] + 'a),
    count: usize,
    cols: usize,
    weights: &[&[f32]],
    mut put: impl FnMut(usize, usize, &[f32]),
) {
    for i in 0..count {
        assert!(rows(i).len() >= cols);
    }
    assert!(weights.iter().all(|w| w.len() >= count));
    let mut buf = [0.0; 64];
    let mut c = 0;
    macro_rules! columns {
        ($n:literal) => {
            while cols - c >= $n * S::W {
                let mut t = 0;
                // SAFETY: columns c .. c + n * W and weights 0 .. count exist; buf holds 4 vectors.
                let row = |i: usize| unsafe { rows(i).as_ptr().add(c) };
                macro_rules! tokens {
                    ($t:literal) => {
                        while weights.len() - t >= $t {
                            let ptrs: [*const f32; $t] =
                                std::array::from_fn(|i| weights[t + i].as_ptr());
                            // SAFETY: as above.
                            unsafe {
                                let v = weighted::<S, E, $n, $t>(count, row, ptrs);
                                for (i, v) in v.into_iter().enumerate() {
                                    for (n, v) in v.into_iter().enumerate() {
                                        S::store(buf.as_mut_ptr().add(n * S::W), v);
                                    }
                                    put(t + i, c, &buf[..$n * S::W]);
                                }
                            }
                            t += $t;
                        }
                    };
                }
                tokens!(4);
                tokens!(1);
                c += $n * S::W;
            }
        };
    }
    columns!(4);
    columns!(2);
    columns!(1);
    while c < cols {
        for (t, weights) in weights.iter().enumerate() {
            let mut acc = 0.0;
            for i in 0..count {
                acc = arith::fma(weights[i], rows(i)[c].widen(), acc);
            }
            put(t, c, &[acc]);
        }
        c += 1;
    }
}

/// `out[t][c] = sum over j of fma(qs[t][j], w[j][c], acc)`; `w` `[_, cols]`, `out` `[tokens][cols]`.
#[inline(always)]
unsafe fn absorb_body<S: Simd, E: Element>(w: &[E], cols: usize, qs: &[&[f32]], out: &mut [f32]) {
    // SAFETY: as the caller.
    unsafe {
        weighted_sums::<S, E>(
            &|j| &w[j * cols..][..cols],
            w.len() / cols,
            cols,
            qs,
            |t, c, v| out[t * cols + c..][..v.len()].copy_from_slice(v),
        );
    }
}

/// [`absorb_body`] of each kind of numbers.
#[inline(always)]
unsafe fn absorb_of<S: Simd>(w: Numbers<'_>, cols: usize, qs: &[&[f32]], out: &mut [f32]) {
    // SAFETY: as the caller.
    unsafe {
        match w {
            Numbers::Bf16(w) => absorb_body::<S, u16>(w, cols, qs, out),
            Numbers::Int8(w) => absorb_body::<S, i8>(w, cols, qs, out),
            Numbers::F32(w) => absorb_body::<S, f32>(w, cols, qs, out),
        }
    }
}

/// Transposes cached rows `positions` (at most [`arith::ATTENTION_CHUNK`]), of `cols` elements each, into
/// groups of `W`: `out` `[groups][cols][W]`. A group is transposed whole.
#[inline(always)]
unsafe fn gather_body<S: Simd, E: Element>(
    cache: &[E],
    cols: usize,
    positions: Positions<'_>,
    out: &mut [f32],
) {
    let n = positions.len();
    for (group, out) in out
        .chunks_exact_mut(cols * S::W)
        .enumerate()
        .take(n.div_ceil(S::W))
    {
        let first = group * S::W;
        let rows = (first..n.min(first + S::W)).map(|i| &cache[positions.get(i) * cols..][..cols]);
        // SAFETY: as the caller.
        unsafe { transpose::<S, E>(rows, cols, out) };
    }
}

/// [`gather_body`] of either format.
#[inline(always)]
unsafe fn gather_of<S: Simd>(
    cache: Entries<'_>,
    cols: usize,
    positions: Positions<'_>,
    out: &mut [f32],
) {
    // SAFETY: as the caller.
    unsafe {
        match cache {
            Entries::F32(cache) => gather_body::<S, f32>(cache, cols, positions, out),
            Entries::Bf16(cache) => gather_body::<S, u16>(cache, cols, positions, out),
        }
    }
}

/// Rows of a cache.
#[derive(Clone, Copy)]
pub enum Entries<'a> {
    /// f32.
    F32(&'a [f32]),
    /// bf16 bits.
    Bf16(&'a [u16]),
}

/// Positions that a chunk of attention covers.
#[derive(Clone, Copy)]
pub enum Positions<'a> {
    /// A number of them from a first one on.
    Range(usize, usize),
    /// These.
    List(&'a [u32]),
}

impl Positions<'_> {
    /// How many.
    #[inline(always)]
    pub fn len(&self) -> usize {
        match self {
            Positions::Range(_, n) => *n,
            Positions::List(list) => list.len(),
        }
    }

    /// The `i`-th.
    #[inline(always)]
    pub fn get(&self, i: usize) -> usize {
        match self {
            Positions::Range(first, _) => first + i,
            Positions::List(list) => list[i] as usize,
        }
    }
}

/// Softmax attention that is under way, for some heads of one token.
pub struct Attending {
    /// Largest score, one a head.
    m: Vec<f32>,
    /// Sum of exponentials, one a head.
    l: Vec<f32>,
    /// Weighted sum of latent rows, `[heads][latent]`.
    o: Vec<f32>,
    /// Scores, then exponentials of a chunk, `[heads][ATTENTION_CHUNK]`.
    p: Vec<f32>,
    latent: usize,
    empty: bool,
}

impl Attending {
    /// Before the first chunk.
    pub fn new(heads: usize, latent: usize) -> Self {
        Self {
            m: vec![0.0; heads],
            l: vec![0.0; heads],
            o: vec![0.0; heads * latent],
            p: vec![0.0; heads * arith::ATTENTION_CHUNK],
            latent,
            empty: true,
        }
    }

    /// `o / l`.
    pub fn finish(&self, out: &mut [f32]) {
        for ((out, o), l) in out
            .chunks_exact_mut(self.latent)
            .zip(self.o.chunks_exact(self.latent))
            .zip(&self.l)
        {
            for (out, o) in out.iter_mut().zip(o) {
                *out = o / l;
            }
        }
    }
}

/// Takes a chunk in. `qs`: queries of `cols` elements, one a head; `keys`: the chunk's rows as
/// [`gather`] lays them out; only the first `count` of `positions` are attended to.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn attend_body<S: Simd, E: Element>(
    state: &mut Attending,
    qs: &[&[f32]],
    cache: &[E],
    cols: usize,
    scaling: f32,
    positions: Positions<'_>,
    count: usize,
    keys: &[f32],
) {
    const CHUNK: usize = arith::ATTENTION_CHUNK;
    let latent = state.latent;
    for (group, keys) in keys
        .chunks_exact(cols * S::W)
        .enumerate()
        .take(count.div_ceil(S::W))
    {
        // SAFETY: as the caller.
        unsafe {
            tiles::<S>(keys, cols, qs, |h, v| {
                state.p[h * CHUNK + group * S::W..][..S::W].copy_from_slice(&v[..S::W]);
            });
        }
    }
    // What each head's accumulation and the chunk's are multiplied by.
    let mut factors = vec![(0.0, 0.0); qs.len()];
    for (h, p) in state.p.chunks_exact_mut(CHUNK).enumerate() {
        let p = &mut p[..count];
        let mut m = f32::NEG_INFINITY;
        for p in p.iter_mut() {
            *p *= scaling;
            m = arith::max(m, *p);
        }
        let mut partial = [0.0; PARTIALS];
        for (p, partial) in p.iter_mut().zip(&mut partial) {
            *p = arith::exp(*p - m);
            *partial += *p;
        }
        // SAFETY: as the caller.
        let l = unsafe { S::reduce(&partial) };
        if state.empty {
            state.m[h] = m;
            state.l[h] = l;
        } else {
            let merge = arith::merge(state.m[h], m);
            state.m[h] = merge.m;
            state.l[h] = arith::fma(state.l[h], merge.old, l * merge.new);
            factors[h] = (merge.old, merge.new);
        }
    }
    let (o, empty) = (&mut state.o, state.empty);
    let weights: Vec<&[f32]> = state.p.chunks_exact(CHUNK).collect();
    // SAFETY: as the caller.
    unsafe {
        weighted_sums::<S, E>(
            &|i| &cache[positions.get(i) * cols..][..cols],
            count,
            latent,
            &weights,
            |h, c, v| {
                let o = &mut o[h * latent + c..][..v.len()];
                let (old, new) = factors[h];
                for (o, v) in o.iter_mut().zip(v) {
                    *o = if empty {
                        *v
                    } else {
                        arith::fma(*o, old, v * new)
                    };
                }
            },
        );
    }
    state.empty = false;
}

/// [`attend_body`] of either format.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn attend_of<S: Simd>(
    state: &mut Attending,
    qs: &[&[f32]],
    cache: Entries<'_>,
    cols: usize,
    scaling: f32,
    positions: Positions<'_>,
    count: usize,
    keys: &[f32],
) {
    // SAFETY: as the caller.
    unsafe {
        match cache {
            Entries::F32(cache) => {
                attend_body::<S, f32>(state, qs, cache, cols, scaling, positions, count, keys);
            }
            Entries::Bf16(cache) => {
                attend_body::<S, u16>(state, qs, cache, cols, scaling, positions, count, keys);
            }
        }
    }
}

/// Indexer scores of `count <= W` transposed keys for each token: `out[t][i]`, stride `W`.
/// `qs[t * heads + h]` are queries of `dim` elements, `weights[t][h]` as the indexer gives them.
#[inline(always)]
unsafe fn index_body<S: Simd>(
    keys: &[f32],
    index: &Index,
    qs: &[&[f32]],
    weights: &[&[f32]],
    out: &mut [f32],
) {
    let (by_dim, by_heads) = (index.dot_factor(), index.weight_factor());
    let Index { dim, heads, .. } = *index;
    out.fill(0.0);
    // SAFETY: as the caller. Heads arrive in ascending order.
    unsafe {
        tiles::<S>(keys, dim, qs, |i, v| {
            let (t, h) = (i / heads, i % heads);
            let w = weights[t][h] * by_heads;
            for (out, v) in out[t * S::W..][..S::W].iter_mut().zip(v) {
                *out = arith::fma(w, arith::max(*v * by_dim, 0.0), *out);
            }
        });
    }
}

/// `out = fma(w, y, out)`.
#[inline(always)]
unsafe fn axpy_body<S: Simd>(w: f32, y: &[f32], out: &mut [f32]) {
    for (out, y) in out.iter_mut().zip(y) {
        *out = arith::fma(w, *y, *out);
    }
}

/// `out = sigmoid(x)`.
#[inline(always)]
unsafe fn sigmoid_body<S: Simd>(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = arith::sigmoid(*x);
    }
}

/// Sine and cosine of `position * inv_freq[i]`.
#[inline(always)]
unsafe fn angles_body<S: Simd>(position: usize, inv_freq: &[f32], out: &mut [(f32, f32)]) {
    for (out, inv_freq) in out.iter_mut().zip(inv_freq) {
        *out = arith::sin_cos(position as f32 * inv_freq);
    }
}

/// Turns the pairs of `x`, `out` `[first members | second members]`.
#[inline(always)]
unsafe fn rotate_body<S: Simd>(x: &[f32], angles: &[(f32, f32)], out: &mut [f32]) {
    let (a, b) = out.split_at_mut(angles.len());
    for (((x, (sin, cos)), a), b) in x.chunks_exact(2).zip(angles).zip(a).zip(b) {
        (*a, *b) = arith::rotate(x[0], x[1], *sin, *cos);
    }
}

arms! {
    /// `out = fma(w, y, out)`.
    pub fn axpy(w: f32, y: &[f32], out: &mut [f32]) = axpy_body;
    /// `out = sigmoid(x)`.
    pub fn sigmoid(x: &[f32], out: &mut [f32]) = sigmoid_body;
    /// Sines and cosines of a position's angles.
    pub fn angles(position: usize, inv_freq: &[f32], out: &mut [(f32, f32)]) = angles_body;
    /// Interleaved rotation of one head.
    pub fn rotate(x: &[f32], angles: &[(f32, f32)], out: &mut [f32]) = rotate_body;
    /// `out[r] = dot(w[r], x)`, `w` `[out.len(), x.len()]`.
    fn dot_rows(w: Numbers<'_>, x: &[f32], out: &mut [f32]) = dot_rows_of;
    /// `out[t][r] = dot(w[r], xs[t])`, `w` `[rows, cols]`, `out` `[tokens][rows]`.
    fn linear(w: Numbers<'_>, cols: usize, xs: &[&[f32]], out: &mut [f32]) = linear_of;
    /// RMS normalisation of a row.
    pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm_body;
    /// Layer normalisation of a row.
    pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = layer_norm_body;
    /// `out = silu(gate) * up`.
    pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) = silu_mul_body;
    /// Queries into the latent space, for one head: `w` `[nope, cols]`, `out` `[tokens][cols]`.
    fn absorb_numbers(w: Numbers<'_>, cols: usize, qs: &[&[f32]], out: &mut [f32]) = absorb_of;
    /// Transposes rows of the cache for [`attend`] and [`index`].
    pub fn gather(cache: Entries<'_>, cols: usize, positions: Positions<'_>, out: &mut [f32]) = gather_of;
    /// Takes a chunk of positions into attention under way.
    pub fn attend(
        state: &mut Attending,
        qs: &[&[f32]],
        cache: Entries<'_>,
        cols: usize,
        scaling: f32,
        positions: Positions<'_>,
        count: usize,
        keys: &[f32],
    ) = attend_of;
    /// Indexer scores of one group of keys as [`gather`] lays them out.
    pub fn index(
        keys: &[f32],
        index: &Index,
        qs: &[&[f32]],
        weights: &[&[f32]],
        out: &mut [f32],
    ) = index_body;
}

/// Rows of a group that [`gather`] makes: the arm's vector length.
pub fn width(level: Level) -> usize {
    match level.arm() {
        Arm::Avx512 => 16,
        _ => 8,
    }
}

/// Weights without their scales.
#[derive(Clone, Copy)]
enum Numbers<'a> {
    Bf16(&'a [u16]),
    Int8(&'a [i8]),
    F32(&'a [f32]),
}

/// Rows of a dense matrix.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    numbers: Numbers<'a>,
    /// One a row, of bytes.
    scales: Option<&'a [f32]>,
    rows: usize,
    cols: usize,
}

impl<'a> Block<'a> {
    /// Rows `first .. first + rows` of a matrix of `cols` columns.
    pub fn new(weight: Weight<'a, Cpu>, cols: usize, first: usize, rows: usize) -> Self {
        let (at, len) = (first * cols, rows * cols);
        let (numbers, scales) = match weight {
            Weight::Bf16(bits) => (Numbers::Bf16(&bits[at..][..len]), None),
            Weight::Int8 { bytes, scales } => (
                Numbers::Int8(&bytes[at..][..len]),
                Some(&scales[first..][..rows]),
            ),
            Weight::F32(w) => (Numbers::F32(&w[at..][..len]), None),
        };
        Self {
            numbers,
            scales,
            rows,
            cols,
        }
    }

    /// Its first row's weights, scaled.
    pub fn widen_first(&self, out: &mut [f32]) {
        match (self.numbers, self.scales) {
            (Numbers::Bf16(w), _) => {
                for (out, w) in out.iter_mut().zip(w) {
                    *out = w.widen();
                }
            }
            (Numbers::Int8(w), scales) => {
                let s = scales.map_or(1.0, |s| s[0]);
                for (out, w) in out.iter_mut().zip(w) {
                    *out = w.widen() * s;
                }
            }
            (Numbers::F32(w), _) => out.copy_from_slice(w),
        }
    }
}

/// `out[t][r] = dot(w[r], xs[t])`, times the row's scale, by whichever of the two ways suits the number
/// of tokens.
pub fn product(level: Level, w: Block<'_>, xs: &[&[f32]], out: &mut [f32]) {
    /// Tokens from which a transposed copy of the weights pays.
    const TRANSPOSE_FROM: usize = 4;
    if xs.len() >= TRANSPOSE_FROM {
        linear(level, w.numbers, w.cols, xs, out);
    } else {
        for (x, out) in xs.iter().zip(out.chunks_exact_mut(w.rows)) {
            dot_rows(level, w.numbers, x, out);
        }
    }
    if let Some(scales) = w.scales {
        for out in out.chunks_exact_mut(w.rows) {
            for (out, s) in out.iter_mut().zip(scales) {
                *out *= s;
            }
        }
    }
}

/// Queries into the latent space, for one head, of its rows `w` of keys: `out` `[tokens][cols]`.
pub fn absorb(level: Level, w: Block<'_>, qs: &[&[f32]], out: &mut [f32]) {
    let Some(scales) = w.scales else {
        return absorb_numbers(level, w.numbers, w.cols, qs, out);
    };
    let scaled: Vec<Vec<f32>> = (qs.iter())
        .map(|q| q.iter().zip(scales).map(|(q, s)| q * s).collect())
        .collect();
    let qs: Vec<&[f32]> = scaled.iter().map(Vec::as_slice).collect();
    absorb_numbers(level, w.numbers, w.cols, &qs, out);
}
