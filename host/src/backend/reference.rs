//! The plain reference: every operator as its definition reads, single-threaded loops.
//!
//! Slow and obviously right. All other back ends are compared with it, bit for bit.

mod experts;
#[cfg(test)]
mod tests;

use std::convert::Infallible;

use bytemuck::Pod;
use gpu::arith::{self, plain};
use gpu::layout::Folds;
use thiserror::Error;

use super::{
    Attend, Backend, Cached, Index, LayerExperts, LoadExperts, Mla, Router, Rows, RowsMut, Scoring,
    TraceLayer, Weight,
};
use crate::expert::{ExpertShape, Form, MatrixKind, RawMatrix};
use experts::run_experts;

/// What the reference refuses.
#[derive(Debug, Error)]
pub enum ReferenceError {
    /// An operator would leave a buffer.
    #[error("elements {start}..{start}+{len} of a buffer of {have}")]
    Range {
        /// First element.
        start: usize,
        /// Elements.
        len: usize,
        /// Elements that there are.
        have: usize,
    },
    /// A token id past the embedding table, or an expert id past the layer.
    #[error("{what} {id} of {have}")]
    Id {
        /// Token or expert.
        what: &'static str,
        /// The id.
        id: usize,
        /// How many there are.
        have: usize,
    },
    /// An expert's matrix does not have the layer's shape.
    #[error(
        "expert {expert} {matrix}: {packed} packed bytes and {scales} scales, expected {want_packed} and {want_scales}"
    )]
    Matrix {
        /// Expert id.
        expert: usize,
        /// Its matrix.
        matrix: &'static str,
        /// Bytes found.
        packed: usize,
        /// Scales found.
        scales: usize,
        /// Bytes expected.
        want_packed: usize,
        /// Scales expected.
        want_scales: usize,
    },
    /// A record that does not decode.
    #[error(transparent)]
    Archive(#[from] crate::archive::ArchiveError),
    /// A column count that no kernel takes.
    #[error("experts of {0} columns: expected a multiple of 64 from 64 to 8192")]
    Columns(usize),
}

type Result<T> = std::result::Result<T, ReferenceError>;

/// The plain reference back end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// One layer's experts as raw int4.
pub struct Experts {
    shape: ExpertShape,
    matrices: Vec<[RawMatrix<'static>; 3]>,
}

/// Scores of one token's router logits.
pub(super) fn scores(scoring: Scoring, logits: &[f32]) -> Vec<f32> {
    match scoring {
        Scoring::Sigmoid => logits.iter().map(|x| arith::sigmoid(*x)).collect(),
        Scoring::Softmax => {
            let top = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
            let e: Vec<f32> = logits.iter().map(|x| arith::exp(x - top)).collect();
            let mut sum = 0.0;
            for e in &e {
                sum += e;
            }
            e.iter().map(|e| e / sum).collect()
        }
    }
}

fn slice<T>(buf: &[T], start: usize, len: usize) -> Result<&[T]> {
    buf.get(start..start.saturating_add(len))
        .ok_or(ReferenceError::Range {
            start,
            len,
            have: buf.len(),
        })
}

fn slice_mut<T>(buf: &mut [T], start: usize, len: usize) -> Result<&mut [T]> {
    let have = buf.len();
    buf.get_mut(start..start.saturating_add(len))
        .ok_or(ReferenceError::Range { start, len, have })
}

impl<'a, T> Rows<'a, Vec<T>> {
    fn row(&self, t: usize, len: usize) -> Result<&'a [T]> {
        slice(self.buf, self.offset + t * self.stride, len)
    }
}

impl<T> RowsMut<'_, Vec<T>> {
    fn row(&mut self, t: usize, len: usize) -> Result<&mut [T]> {
        slice_mut(self.buf, self.offset + t * self.stride, len)
    }
}

/// bf16 bits widened.
fn widen(bits: &[u16]) -> Vec<f32> {
    bits.iter().map(|b| arith::bf16(*b)).collect()
}

/// A row of a cache of rows of `width` elements.
fn cached_row(cache: Cached<'_, Reference>, position: usize, width: usize) -> Result<Vec<f32>> {
    Ok(match cache {
        Cached::F32(rows) => slice(rows, position * width, width)?.to_vec(),
        Cached::Bf16(rows) => widen(slice(rows, position * width, width)?),
    })
}

/// Row `r` of a dense matrix of `cols` columns, as numbers without their scale, and that.
fn weight_row(
    weight: Weight<'_, Reference>,
    r: usize,
    cols: usize,
) -> Result<(Vec<f32>, Option<f32>)> {
    Ok(match weight {
        Weight::Bf16(bits) => (widen(slice(bits, r * cols, cols)?), None),
        Weight::Int8 { bytes, scales } => {
            let row = slice(bytes, r * cols, cols)?;
            let scale = slice(scales, r, 1)?[0];
            (row.iter().map(|q| f32::from(*q)).collect(), Some(scale))
        }
        Weight::F32(numbers) => (slice(numbers, r * cols, cols)?.to_vec(), None),
    })
}

/// `x * scale`, where there is one.
fn scaled(x: f32, scale: Option<f32>) -> f32 {
    scale.map_or(x, |s| x * s)
}

/// Quantises one token's activations: `(scale, X)`.
pub fn quantise_row(x: &[f32]) -> (f32, Vec<i32>) {
    let amax = x.iter().fold(0.0, |m, x| arith::max(arith::abs(*x), m));
    let scale = arith::activation_scale(amax);
    (
        scale,
        x.iter().map(|x| arith::quantise(*x, scale)).collect(),
    )
}

/// `q` of a column in a packed row.
fn nibble(packed_row: &[u8], col: usize) -> i32 {
    (packed_row[col / 2] >> (4 * (col % 2)) & 15) as i32 - 8
}

/// Indices of the `n` largest keys, of equal keys the lowest; ascending.
fn top(keys: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(arith::order_key(keys[*i]))); // stable
    order.truncate(n);
    order.sort_unstable();
    order
}

impl Backend for Reference {
    type Buf<T: Pod> = Vec<T>;
    type Experts = Experts;
    type Recording = Infallible;
    type Error = ReferenceError;

    unsafe fn repeat(&self, recording: &Infallible, _position: usize) -> Result<()> {
        match *recording {}
    }

    fn describe(&self) -> String {
        "cpu (reference)".into()
    }

    fn alloc<T: Pod>(&self, len: usize) -> Result<Vec<T>> {
        Ok(vec![T::zeroed(); len])
    }

    fn upload<T: Pod>(&self, data: &[T]) -> Result<Vec<T>> {
        Ok(data.to_vec())
    }

    fn write<T: Pod>(&self, buf: &mut Vec<T>, offset: usize, data: &[T]) -> Result<()> {
        slice_mut(buf, offset, data.len())?.copy_from_slice(data);
        Ok(())
    }

    fn read<T: Pod>(&self, buf: &Vec<T>, offset: usize, out: &mut [T]) -> Result<()> {
        out.copy_from_slice(slice(buf, offset, out.len())?);
        Ok(())
    }

    fn embed(
        &self,
        table: Weight<'_, Self>,
        ids: &Vec<u32>,
        cols: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        for (t, id) in slice(ids, 0, tokens)?.iter().enumerate() {
            let id = *id as usize;
            let have = match table {
                Weight::Bf16(bits) => bits.len() / cols,
                Weight::Int8 { bytes, .. } => bytes.len() / cols,
                Weight::F32(numbers) => numbers.len() / cols,
            };
            if id >= have {
                let what = "token";
                return Err(ReferenceError::Id { what, id, have });
            }
            let (row, scale) = weight_row(table, id, cols)?;
            for (y, w) in out.row(t, cols)?.iter_mut().zip(row) {
                *y = scaled(w, scale);
            }
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: Rows<'_, Vec<f32>>,
        weight: &Vec<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        let w = slice(weight, 0, cols)?;
        for t in 0..tokens {
            let x = x.row(t, cols)?;
            let r = arith::rms_factor(plain::dot(x, x), cols, eps);
            for (k, y) in out.row(t, cols)?.iter_mut().enumerate() {
                *y = (x[k] * r) * w[k];
            }
        }
        Ok(())
    }

    fn layer_norm(
        &self,
        x: Rows<'_, Vec<f32>>,
        weight: &Vec<f32>,
        bias: &Vec<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        let w = slice(weight, 0, cols)?;
        let b = slice(bias, 0, cols)?;
        for t in 0..tokens {
            let x = x.row(t, cols)?;
            let mean = plain::sum(x) / cols as f32;
            let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
            let r = arith::rms_factor(plain::dot(&d, &d), cols, eps);
            for (k, y) in out.row(t, cols)?.iter_mut().enumerate() {
                *y = arith::fma(d[k] * r, w[k], b[k]);
            }
        }
        Ok(())
    }

    fn linear(
        &self,
        x: Rows<'_, Vec<f32>>,
        weight: Weight<'_, Self>,
        rows: usize,
        cols: usize,
        tokens: usize,
        add: bool,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        for r in 0..rows {
            let (w, scale) = weight_row(weight, r, cols)?;
            for t in 0..tokens {
                let y = scaled(plain::dot(&w, x.row(t, cols)?), scale);
                let out = &mut out.row(t, rows)?[r];
                *out = if add { *out + y } else { y };
            }
        }
        Ok(())
    }

    fn silu_mul(
        &self,
        gate: Rows<'_, Vec<f32>>,
        up: Rows<'_, Vec<f32>>,
        cols: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        for t in 0..tokens {
            let (g, u) = (gate.row(t, cols)?, up.row(t, cols)?);
            for (k, y) in out.row(t, cols)?.iter_mut().enumerate() {
                *y = arith::silu(g[k]) * u[k];
            }
        }
        Ok(())
    }

    fn rope(
        &self,
        x: Rows<'_, Vec<f32>>,
        x_head: usize,
        heads: usize,
        rope: usize,
        pass: usize,
        inv_freq: &Vec<f32>,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Vec<f32>>,
        out_head: usize,
    ) -> Result<()> {
        let inv_freq = slice(inv_freq, 0, rope / 2)?;
        for t in 0..tokens {
            for h in 0..heads {
                let x = slice(x.buf, x.offset + t * x.stride + h * x_head, rope + pass)?;
                let at = out.offset + t * out.stride + h * out_head;
                let y = slice_mut(out.buf, at, rope + pass)?;
                for (i, f) in inv_freq.iter().enumerate() {
                    let (sin, cos) = arith::sin_cos((first + t) as f32 * f);
                    (y[i], y[rope / 2 + i]) = arith::rotate(x[2 * i], x[2 * i + 1], sin, cos);
                }
                y[rope..].copy_from_slice(&x[rope..]);
            }
        }
        Ok(())
    }

    fn narrow(
        &self,
        x: Rows<'_, Vec<f32>>,
        cols: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<u16>>,
    ) -> Result<()> {
        for t in 0..tokens {
            let x = x.row(t, cols)?;
            for (y, x) in out.row(t, cols)?.iter_mut().zip(x) {
                *y = arith::to_bf16(*x);
            }
        }
        Ok(())
    }

    fn absorb_query(
        &self,
        q: Rows<'_, Vec<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        let (q_head, out_head) = (mla.nope + mla.rope, mla.latent + mla.rope);
        for h in 0..mla.heads {
            let first_row = h * (mla.nope + mla.value);
            let keys = (0..mla.nope)
                .map(|j| weight_row(kv_b, first_row + j, mla.latent))
                .collect::<Result<Vec<_>>>()?;
            for t in 0..tokens {
                let q = &q.row(t, mla.heads * q_head)?[h * q_head..];
                let y = &mut out.row(t, mla.heads * out_head)?[h * out_head..];
                for c in 0..mla.latent {
                    let mut acc = 0.0;
                    for (q, (key, scale)) in q.iter().zip(&keys) {
                        acc = arith::fma(scaled(*q, *scale), key[c], acc);
                    }
                    y[c] = acc;
                }
            }
        }
        Ok(())
    }

    fn attention(
        &self,
        q: Rows<'_, Vec<f32>>,
        cache: Cached<'_, Self>,
        attend: Attend<'_, Vec<u32>>,
        mla: &Mla,
        first: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        let width = mla.latent + mla.rope;
        for t in 0..tokens {
            let seen = first + t + 1;
            let positions: Vec<usize> = match &attend {
                Attend::Causal => (0..seen).collect(),
                Attend::Listed { lists, top_k } => slice(lists, t * top_k, seen.min(*top_k))?
                    .iter()
                    .map(|p| *p as usize)
                    .collect(),
            };
            let queries = q.row(t, mla.heads * width)?;
            for h in 0..mla.heads {
                let q = &queries[h * width..(h + 1) * width];
                // Maximum, sum of exponentials and weighted sum of rows, over the chunks so far.
                let mut state: Option<(f32, f32, Vec<f32>)> = None;
                for chunk in positions.chunks(arith::ATTENTION_CHUNK) {
                    let rows = chunk
                        .iter()
                        .map(|p| cached_row(cache, *p, width))
                        .collect::<Result<Vec<_>>>()?;
                    let scores: Vec<f32> = rows
                        .iter()
                        .map(|row| mla.scaling * plain::dot(q, row))
                        .collect();
                    let m = scores[1..].iter().fold(scores[0], |m, s| arith::max(m, *s));
                    let p: Vec<f32> = scores.iter().map(|s| arith::exp(s - m)).collect();
                    let l = plain::sum(&p);
                    let mut o = vec![0.0; mla.latent];
                    for (p, row) in p.iter().zip(&rows) {
                        for c in 0..mla.latent {
                            o[c] = arith::fma(*p, row[c], o[c]);
                        }
                    }
                    state = Some(match state {
                        None => (m, l, o),
                        Some((m_old, l_old, o_old)) => {
                            let f = arith::merge(m_old, m);
                            let o = o_old
                                .iter()
                                .zip(&o)
                                .map(|(old, new)| arith::fma(*old, f.old, new * f.new))
                                .collect();
                            (f.m, arith::fma(l_old, f.old, l * f.new), o)
                        }
                    });
                }
                let (_, l, o) = state.expect("a token attends to itself at least");
                let y = &mut out.row(t, mla.heads * mla.latent)?[h * mla.latent..];
                for c in 0..mla.latent {
                    y[c] = o[c] / l;
                }
            }
        }
        Ok(())
    }

    fn expand_value(
        &self,
        x: Rows<'_, Vec<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        for h in 0..mla.heads {
            for j in 0..mla.value {
                let row = h * (mla.nope + mla.value) + mla.nope + j;
                let (w, scale) = weight_row(kv_b, row, mla.latent)?;
                for t in 0..tokens {
                    let x = x.row(t, mla.heads * mla.latent)?;
                    let y = plain::dot(&w, &x[h * mla.latent..(h + 1) * mla.latent]);
                    out.row(t, mla.heads * mla.value)?[h * mla.value + j] = scaled(y, scale);
                }
            }
        }
        Ok(())
    }

    fn index(
        &self,
        q: Rows<'_, Vec<f32>>,
        keys: &Vec<f32>,
        weights: Rows<'_, Vec<f32>>,
        index: &Index,
        first: usize,
        tokens: usize,
        lists: &mut Vec<u32>,
    ) -> Result<()> {
        for t in 0..tokens {
            let q = q.row(t, index.heads * index.dim)?;
            let w = weights.row(t, index.heads)?;
            let mut scores = Vec::new();
            for p in 0..first + t + 1 {
                let key = slice(keys, p * index.dim, index.dim)?;
                let mut acc = 0.0;
                for h in 0..index.heads {
                    let dot = plain::dot(&q[h * index.dim..(h + 1) * index.dim], key);
                    acc = arith::fma(
                        w[h] * index.weight_factor(),
                        arith::max(dot * index.dot_factor(), 0.0),
                        acc,
                    );
                }
                scores.push(acc);
            }
            let best = top(&scores, index.top_k);
            let list = slice_mut(lists, t * index.top_k, best.len())?;
            for (to, p) in list.iter_mut().zip(best) {
                *to = p as u32;
            }
        }
        Ok(())
    }

    fn route(
        &self,
        logits: Rows<'_, Vec<f32>>,
        bias: &Vec<f32>,
        router: &Router,
        tokens: usize,
        ids: &mut Vec<u32>,
        weights: &mut Vec<f32>,
    ) -> Result<()> {
        let n = router.experts;
        let bias = slice(bias, 0, n)?;
        for t in 0..tokens {
            let s = scores(router.scoring, logits.row(t, n)?);
            let mut choice: Vec<f32> = s.iter().zip(bias).map(|(s, b)| s + b).collect();
            if router.groups > 1 {
                let size = n / router.groups;
                let sums: Vec<f32> = choice
                    .chunks(size)
                    .map(|group| {
                        let mut sorted = group.to_vec();
                        sorted.sort_by_key(|c| std::cmp::Reverse(arith::order_key(*c)));
                        sorted[0] + sorted[1]
                    })
                    .collect();
                let kept = top(&sums, router.top_groups);
                for (e, c) in choice.iter_mut().enumerate() {
                    if !kept.contains(&(e / size)) {
                        *c = f32::NEG_INFINITY;
                    }
                }
            }
            let chosen = top(&choice, router.top_k);
            let mut sum = 0.0;
            for e in &chosen {
                sum += s[*e];
            }
            let k = router.top_k;
            let ids = slice_mut(ids, t * k, k)?;
            let weights = slice_mut(weights, t * k, k)?;
            for (i, e) in chosen.into_iter().enumerate() {
                let w = if router.normalise {
                    s[e] / (sum + 1e-20)
                } else {
                    s[e]
                };
                ids[i] = e as u32;
                weights[i] = w * router.scaling;
            }
        }
        Ok(())
    }

    fn replay(
        &self,
        trace: TraceLayer<'_, Self>,
        top_k: usize,
        first: usize,
        tokens: usize,
        ids: &mut Vec<u32>,
        weights: &mut Vec<f32>,
    ) -> Result<()> {
        for t in 0..tokens {
            let row = (first + t) % trace.rows;
            let from = (row * trace.layers + trace.layer) * top_k;
            slice_mut(ids, t * top_k, top_k)?.copy_from_slice(slice(trace.chosen, from, top_k)?);
            let given = slice(trace.given, from, top_k)?;
            slice_mut(weights, t * top_k, top_k)?.copy_from_slice(given);
        }
        Ok(())
    }

    fn experts(
        &self,
        experts: &Experts,
        x: Rows<'_, Vec<f32>>,
        ids: &Vec<u32>,
        weights: &Vec<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        run_experts(
            [experts, experts],
            false,
            x,
            ids,
            weights,
            top_k,
            tokens,
            out,
        )
    }

    fn experts_int8(
        &self,
        nibbles: [&Experts; 2],
        x: Rows<'_, Vec<f32>>,
        ids: &Vec<u32>,
        weights: &Vec<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        run_experts(nibbles, true, x, ids, weights, top_k, tokens, out)
    }

    fn add(
        &self,
        x: Rows<'_, Vec<f32>>,
        also: Option<Rows<'_, Vec<f32>>>,
        cols: usize,
        tokens: usize,
        mut out: RowsMut<'_, Vec<f32>>,
    ) -> Result<()> {
        for t in 0..tokens {
            let x = x.row(t, cols)?;
            let also = also.map(|a| a.row(t, cols)).transpose()?;
            for (c, o) in out.row(t, cols)?.iter_mut().enumerate() {
                *o += also.map_or(x[c], |also| x[c] + also[c]);
            }
        }
        Ok(())
    }
}

impl LoadExperts for Reference {
    fn load_experts(
        &self,
        layer: LayerExperts<'_>,
        shape: ExpertShape,
        _form: Form,
    ) -> Result<Experts> {
        let raw = match layer {
            LayerExperts::Raw(raw) => raw,
            LayerExperts::Coded { records, .. } => records
                .iter()
                .map(|r| r.decode_all())
                .collect::<std::result::Result<_, _>>()?,
        };
        for cols in [shape.hidden, shape.intermediate] {
            Folds::new(cols).ok_or(ReferenceError::Columns(cols))?;
        }
        let mut matrices = Vec::with_capacity(raw.len());
        for (e, expert) in raw.into_iter().enumerate() {
            for kind in MatrixKind::ALL {
                let (rows, cols) = shape.dims(kind);
                let m = &expert[kind as usize];
                let (want_packed, want_scales) = (rows * cols / 2, shape.scales.count(rows, cols));
                if m.packed.len() != want_packed || m.scales.len() != want_scales {
                    return Err(ReferenceError::Matrix {
                        expert: e,
                        matrix: kind.name(),
                        packed: m.packed.len(),
                        scales: m.scales.len(),
                        want_packed,
                        want_scales,
                    });
                }
            }
            matrices.push(expert.map(|m| RawMatrix {
                packed: m.packed.into_owned().into(),
                scales: m.scales.into_owned().into(),
            }));
        }
        Ok(Experts { shape, matrices })
    }
}
