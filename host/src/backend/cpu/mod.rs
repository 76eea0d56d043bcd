//! The CPU back end: the reference's bits at the processor's speed.
//!
//! Work is cut into jobs of rows, tokens or heads for rayon's threads, and the innermost loops run
//! on the fastest arm of [`crate::simd`] that the processor has. Neither changes a result: jobs own
//! whole results, and arms follow one order of operations.

mod buf;
mod dense;
mod experts;
mod int4;

pub use buf::Buf;
pub use experts::{ExpertRoom, Experts, Prepared};

use super::{
    Attend, Backend, Cached, Index, LayerExperts, LoadExperts, Mla, Router, Rows, RowsMut, Scoring,
    TraceLayer, Weight,
};
use crate::expert::{ExpertShape, Form};
use crate::simd::{Arm, ArmError, Level};
use bytemuck::Pod;
use dense::{Attending, Block, Entries, Positions};
use gpu::arith::{self, ATTENTION_CHUNK};
use rayon::prelude::*;
use std::convert::Infallible;

/// What goes wrong on the CPU.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// `ANSATZ_CPU` names an arm that does not exist or that the processor lacks.
    #[error(transparent)]
    Arm(#[from] ArmError),
    /// A record that does not decode.
    #[error(transparent)]
    Archive(#[from] crate::archive::ArchiveError),
    /// More memory than there is.
    #[error(
        "no memory for {len} elements of {size} bytes; free some, or ask for fewer positions \
         (--ctx-size, -n)"
    )]
    Memory {
        /// Elements.
        len: usize,
        /// Bytes of each.
        size: usize,
    },
    /// A column count that no kernel takes.
    #[error("experts of {0} columns: expected a multiple of 64 from 64 to 8192")]
    Columns(usize),
    /// An expert's matrix does not have the layer's shape.
    #[error(
        "expert {expert} {matrix}: {packed} packed bytes and {scales} scales, \
         expected {want_packed} and {want_scales}"
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
    /// A record's matrix does not have the model's shape.
    #[error(
        "expert {expert} {matrix}: rows, columns and scales are {found:?} in the archive, \
         {expected:?} in the model; pack it again with `host pack`"
    )]
    Shape {
        /// Expert id.
        expert: usize,
        /// Its matrix.
        matrix: &'static str,
        /// Rows, columns, scales of the archive.
        found: (usize, usize, usize),
        /// Rows, columns, scales of the model.
        expected: (usize, usize, usize),
    },
}

/// The CPU.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    level: Level,
}

impl Cpu {
    /// With the arm that `ANSATZ_CPU` names, else the fastest.
    pub fn new() -> Result<Self, CpuError> {
        Ok(Self {
            level: Level::from_env()?,
        })
    }

    /// With a given arm.
    pub fn with_arm(arm: Arm) -> Result<Self, CpuError> {
        Ok(Self {
            level: Level::new(arm)?,
        })
    }

    /// The arm in use.
    pub fn arm(&self) -> Arm {
        self.level.arm()
    }

    /// Inputs for [`Cpu::multiply`]: `x` `[tokens, hidden]`, `h` `[tokens * top_k, intermediate]`,
    /// `ids` `[tokens, top_k]`.
    pub fn prepare(
        &self,
        experts: &Experts,
        x: &[f32],
        h: &[f32],
        ids: &[u32],
        top_k: usize,
    ) -> Prepared {
        Prepared::new(self.level, experts, x, h, ids, top_k)
    }

    /// The products of gate and up, or of down, alone: what `host bench kernels` times.
    pub fn multiply(
        &self,
        experts: &Experts,
        prepared: &Prepared,
        down: bool,
    ) -> Result<(), CpuError> {
        prepared.multiply(self.level, experts, down)
    }
}

/// Runs `f` on every item, on rayon's threads where it is worth it.
fn for_each<T: Send>(parallel: bool, items: Vec<T>, f: impl Fn(T) + Send + Sync) {
    if parallel && items.len() > 1 && rayon::current_num_threads() > 1 {
        items.into_par_iter().with_max_len(1).for_each(f);
    } else {
        items.into_iter().for_each(f);
    }
}

/// [`for_each`] of what may fail; the first error found ends it.
fn try_for_each<T: Send, E: Send>(
    parallel: bool,
    items: Vec<T>,
    f: impl Fn(T) -> Result<(), E> + Send + Sync,
) -> Result<(), E> {
    if parallel && items.len() > 1 && rayon::current_num_threads() > 1 {
        items.into_par_iter().with_max_len(1).try_for_each(f)
    } else {
        items.into_iter().try_for_each(f)
    }
}

/// Multiplications below which threads cost more than they bring.
const PARALLEL_FROM: usize = 1 << 18;

/// Row `t` of a view, `cols` elements.
fn row<'a, T: Pod>(x: Rows<'a, Buf<T>>, t: usize, cols: usize) -> &'a [T] {
    &x.buf[x.offset + t * x.stride..][..cols]
}

fn all_rows<'a, T: Pod>(x: Rows<'a, Buf<T>>, tokens: usize, cols: usize) -> Vec<&'a [T]> {
    (0..tokens).map(|t| row(x, t, cols)).collect()
}

/// All rows of a view to write, `cols <= stride` elements each.
fn all_rows_mut<'a, T: Pod>(
    out: RowsMut<'a, Buf<T>>,
    tokens: usize,
    cols: usize,
) -> Vec<&'a mut [T]> {
    let mut rest = &mut out.buf[..];
    let mut skip = out.offset;
    (0..tokens)
        .map(|_| {
            let (row, tail) = std::mem::take(&mut rest)[skip..].split_at_mut(cols);
            (rest, skip) = (tail, out.stride.saturating_sub(cols));
            row
        })
        .collect()
}

/// Applies `f` to each pair of rows of `x` and `out`.
fn map_rows(
    x: Rows<'_, Buf<f32>>,
    out: RowsMut<'_, Buf<f32>>,
    cols: usize,
    tokens: usize,
    f: impl Fn(&[f32], &mut [f32]) + Send + Sync,
) {
    let jobs = all_rows(x, tokens, cols)
        .into_iter()
        .zip(all_rows_mut(out, tokens, cols))
        .collect();
    for_each(tokens * cols >= 1 << 16, jobs, |(x, out)| f(x, out));
}

impl Backend for Cpu {
    type Buf<T: Pod> = Buf<T>;
    type Experts = Experts;
    type Recording = Infallible;
    type Error = CpuError;

    unsafe fn repeat(&self, recording: &Infallible, _position: usize) -> Result<(), CpuError> {
        match *recording {}
    }

    fn describe(&self) -> String {
        format!(
            "cpu ({}, {} threads)",
            self.arm(),
            rayon::current_num_threads()
        )
    }

    fn alloc<T: Pod>(&self, len: usize) -> Result<Buf<T>, CpuError> {
        Buf::zeroed(len)
    }

    fn upload<T: Pod>(&self, data: &[T]) -> Result<Buf<T>, CpuError> {
        let mut buf = Buf::zeroed(data.len())?;
        buf.copy_from_slice(data);
        Ok(buf)
    }

    fn write<T: Pod>(&self, buf: &mut Buf<T>, offset: usize, data: &[T]) -> Result<(), CpuError> {
        buf[offset..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn read<T: Pod>(&self, buf: &Buf<T>, offset: usize, out: &mut [T]) -> Result<(), CpuError> {
        out.copy_from_slice(&buf[offset..][..out.len()]);
        Ok(())
    }

    fn embed(
        &self,
        table: Weight<'_, Self>,
        ids: &Buf<u32>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        for (id, out) in ids.iter().zip(all_rows_mut(out, tokens, cols)) {
            Block::new(table, cols, *id as usize, 1).widen_first(out);
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: Rows<'_, Buf<f32>>,
        weight: &Buf<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        map_rows(x, out, cols, tokens, |x, out| {
            dense::rms_norm(self.level, x, weight, eps, out);
        });
        Ok(())
    }

    fn layer_norm(
        &self,
        x: Rows<'_, Buf<f32>>,
        weight: &Buf<f32>,
        bias: &Buf<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        map_rows(x, out, cols, tokens, |x, out| {
            dense::layer_norm(self.level, x, weight, bias, eps, out);
        });
        Ok(())
    }

    fn linear(
        &self,
        x: Rows<'_, Buf<f32>>,
        weight: Weight<'_, Self>,
        rows: usize,
        cols: usize,
        tokens: usize,
        add: bool,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        if rows == 0 || tokens == 0 || cols == 0 {
            return Ok(());
        }
        let xs = all_rows(x, tokens, cols);
        let mut outs = all_rows_mut(out, tokens, rows);
        let parallel = tokens * rows * cols >= PARALLEL_FROM;
        let step = if parallel {
            (rows.div_ceil(8 * rayon::current_num_threads()))
                .next_multiple_of(16)
                .min(256)
        } else {
            rows
        };
        let weights = (0..rows)
            .step_by(step)
            .map(|r| Block::new(weight, cols, r, step.min(rows - r)));
        if tokens == 1 && !add {
            let jobs = weights.zip(outs[0].chunks_mut(step)).collect();
            for_each(parallel, jobs, |(w, out)| {
                dense::product(self.level, w, &xs, out)
            });
            return Ok(());
        }
        let mut products = vec![0.0; tokens * rows];
        let jobs = weights.zip(products.chunks_mut(step * tokens)).collect();
        for_each(parallel, jobs, |(w, out)| {
            dense::product(self.level, w, &xs, out)
        });
        for_each(
            tokens * rows >= 1 << 18,
            outs.iter_mut().enumerate().collect(),
            |(t, out)| {
                for (job, out) in products.chunks(step * tokens).zip(out.chunks_mut(step)) {
                    let y = &job[t * out.len()..][..out.len()];
                    if add {
                        for (out, y) in out.iter_mut().zip(y) {
                            *out += y;
                        }
                    } else {
                        out.copy_from_slice(y);
                    }
                }
            },
        );
        Ok(())
    }

    fn silu_mul(
        &self,
        gate: Rows<'_, Buf<f32>>,
        up: Rows<'_, Buf<f32>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let jobs = all_rows(gate, tokens, cols)
            .into_iter()
            .zip(all_rows(up, tokens, cols))
            .zip(all_rows_mut(out, tokens, cols))
            .collect();
        for_each(tokens * cols >= 1 << 15, jobs, |((gate, up), out)| {
            dense::silu_mul(self.level, gate, up, out);
        });
        Ok(())
    }

    fn rope(
        &self,
        x: Rows<'_, Buf<f32>>,
        x_head: usize,
        heads: usize,
        rope: usize,
        pass: usize,
        inv_freq: &Buf<f32>,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
        out_head: usize,
    ) -> Result<(), CpuError> {
        if heads == 0 {
            return Ok(());
        }
        let width = rope + pass;
        let xs = all_rows(x, tokens, (heads - 1) * x_head + width);
        let outs = all_rows_mut(out, tokens, (heads - 1) * out_head + width);
        let jobs = xs.into_iter().zip(outs).enumerate().collect();
        for_each(tokens * heads * width >= 1 << 15, jobs, |(t, (x, out))| {
            let mut angles = vec![(0.0, 0.0); rope / 2];
            dense::angles(self.level, first + t, inv_freq, &mut angles);
            for h in 0..heads {
                let x = &x[h * x_head..][..width];
                let out = &mut out[h * out_head..][..width];
                dense::rotate(self.level, &x[..rope], &angles, &mut out[..rope]);
                out[rope..].copy_from_slice(&x[rope..]);
            }
        });
        Ok(())
    }

    fn narrow(
        &self,
        x: Rows<'_, Buf<f32>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<u16>>,
    ) -> Result<(), CpuError> {
        let xs = all_rows(x, tokens, cols);
        for (x, out) in xs.into_iter().zip(all_rows_mut(out, tokens, cols)) {
            for (out, x) in out.iter_mut().zip(x) {
                *out = arith::to_bf16(*x);
            }
        }
        Ok(())
    }

    fn absorb_query(
        &self,
        q: Rows<'_, Buf<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let Mla {
            heads,
            nope,
            rope,
            value,
            latent,
            ..
        } = *mla;
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        let xs = all_rows(q, tokens, (heads - 1) * (nope + rope) + nope);
        let mut latents = vec![0.0; heads * tokens * latent];
        let jobs = latents.chunks_mut(tokens * latent).enumerate().collect();
        for_each(
            tokens * heads * nope * latent >= PARALLEL_FROM,
            jobs,
            |(h, out)| {
                let qs: Vec<&[f32]> = xs.iter().map(|x| &x[h * (nope + rope)..][..nope]).collect();
                let w = Block::new(kv_b, latent, h * (nope + value), nope);
                dense::absorb(self.level, w, &qs, out);
            },
        );
        let outs = all_rows_mut(out, tokens, (heads - 1) * (latent + rope) + latent);
        for (t, out) in outs.into_iter().enumerate() {
            for (h, latents) in latents.chunks(tokens * latent).enumerate() {
                out[h * (latent + rope)..][..latent]
                    .copy_from_slice(&latents[t * latent..][..latent]);
            }
        }
        Ok(())
    }

    fn attention(
        &self,
        q: Rows<'_, Buf<f32>>,
        cache: Cached<'_, Self>,
        attend: Attend<'_, Buf<u32>>,
        mla: &Mla,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let Mla {
            heads,
            rope,
            latent,
            scaling,
            ..
        } = *mla;
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        let cols = latent + rope;
        let cache = match cache {
            Cached::F32(rows) => Entries::F32(rows),
            Cached::Bf16(rows) => Entries::Bf16(rows),
        };
        let keys_len = ATTENTION_CHUNK * cols;
        // Positions of a token's chunk: those that are laid out, and how many it attends to.
        let chunk = |t: usize, c: usize| {
            let at = c * ATTENTION_CHUNK;
            match &attend {
                Attend::Causal => (
                    Positions::Range(at, ATTENTION_CHUNK.min(first + tokens - at)),
                    ATTENTION_CHUNK.min(first + t + 1 - at),
                ),
                Attend::Listed { lists, top_k } => {
                    let n = (*top_k).min(first + t + 1);
                    let list = &lists[t * top_k..][..n][at..n.min(at + ATTENTION_CHUNK)];
                    (Positions::List(list), list.len())
                }
            }
        };
        let chunks = |t: usize| {
            match &attend {
                Attend::Causal => first + t + 1,
                Attend::Listed { top_k, .. } => (*top_k).min(first + t + 1),
            }
            .div_ceil(ATTENTION_CHUNK)
        };
        // Chunks that tokens share are laid out once for all of them.
        let shared = tokens == 1 || matches!(attend, Attend::Causal);
        let mut keys = vec![
            0.0;
            if shared {
                chunks(tokens - 1) * keys_len
            } else {
                0
            }
        ];
        let jobs = keys.chunks_mut(keys_len).enumerate().collect();
        for_each(
            chunks(tokens - 1) * keys_len >= 1 << 17,
            jobs,
            |(c, keys)| {
                dense::gather(self.level, cache, cols, chunk(tokens - 1, c).0, keys);
            },
        );

        let group = if tokens == 1 { dense::TILE } else { heads };
        let mut jobs = Vec::new();
        let outs = all_rows_mut(out, tokens, heads * latent);
        for (t, out) in outs.into_iter().enumerate() {
            for (g, out) in out.chunks_mut(group * latent).enumerate() {
                jobs.push((t, g * group, out));
            }
        }
        // Later tokens attend to more: start with them.
        jobs.reverse();
        let work = tokens * heads * chunks(tokens - 1) * keys_len;
        for_each(work >= PARALLEL_FROM, jobs, |(t, head, out)| {
            let heads = out.len() / latent;
            let q = row(q, t, (head + heads) * cols);
            let qs: Vec<&[f32]> = q[head * cols..].chunks_exact(cols).collect();
            let mut state = Attending::new(heads, latent);
            let mut own = vec![0.0; if shared { 0 } else { keys_len }];
            for c in 0..chunks(t) {
                let (positions, count) = chunk(t, c);
                let keys = if shared {
                    &keys[c * keys_len..][..keys_len]
                } else {
                    dense::gather(self.level, cache, cols, positions, &mut own);
                    &own[..]
                };
                dense::attend(
                    self.level, &mut state, &qs, cache, cols, scaling, positions, count, keys,
                );
            }
            state.finish(out);
        });
        Ok(())
    }

    fn expand_value(
        &self,
        x: Rows<'_, Buf<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let Mla {
            heads,
            nope,
            value,
            latent,
            ..
        } = *mla;
        if tokens == 0 || heads == 0 {
            return Ok(());
        }
        let xs = all_rows(x, tokens, heads * latent);
        let mut values = vec![0.0; heads * tokens * value];
        let jobs = values.chunks_mut(tokens * value).enumerate().collect();
        for_each(
            tokens * heads * value * latent >= PARALLEL_FROM,
            jobs,
            |(h, out)| {
                let xs: Vec<&[f32]> = xs.iter().map(|x| &x[h * latent..][..latent]).collect();
                let w = Block::new(kv_b, latent, h * (nope + value) + nope, value);
                dense::product(self.level, w, &xs, out);
            },
        );
        for (t, out) in all_rows_mut(out, tokens, heads * value)
            .into_iter()
            .enumerate()
        {
            for (values, out) in values.chunks(tokens * value).zip(out.chunks_mut(value)) {
                out.copy_from_slice(&values[t * value..][..value]);
            }
        }
        Ok(())
    }

    fn index(
        &self,
        q: Rows<'_, Buf<f32>>,
        keys: &Buf<f32>,
        weights: Rows<'_, Buf<f32>>,
        index: &Index,
        first: usize,
        tokens: usize,
        lists: &mut Buf<u32>,
    ) -> Result<(), CpuError> {
        /// Tokens whose scores are held at once.
        const TOKENS: usize = 64;
        let Index { heads, dim, top_k } = *index;
        let all = top_k.saturating_sub(first).min(tokens);
        let mut rows: Vec<&mut [u32]> = lists.chunks_mut(top_k.max(1)).take(tokens).collect();
        for (t, list) in rows.iter_mut().enumerate().take(all) {
            for (i, list) in list[..first + t + 1].iter_mut().enumerate() {
                *list = i as u32;
            }
        }
        if top_k == 0 {
            return Ok(());
        }
        let width = dense::width(self.level);
        for (i, rows) in rows[all..].chunks_mut(TOKENS).enumerate() {
            let begin = all + i * TOKENS;
            let n = rows.len();
            let positions = first + begin + n;
            let qs = all_rows(q, begin + n, heads * dim).split_off(begin);
            let qs: Vec<&[f32]> = qs.iter().flat_map(|q| q.chunks_exact(dim)).collect();
            let ws = all_rows(weights, begin + n, heads).split_off(begin);
            let mut scores = vec![0.0; positions.div_ceil(width) * width * n];
            let jobs = scores.chunks_mut(width * n).enumerate().collect();
            for_each(
                n * positions * heads * dim >= PARALLEL_FROM,
                jobs,
                |(p, out)| {
                    let at = Positions::Range(p * width, width.min(positions - p * width));
                    let mut wt = vec![0.0; width * dim];
                    dense::gather(self.level, Entries::F32(keys), dim, at, &mut wt);
                    dense::index(self.level, &wt, index, &qs, &ws, out);
                },
            );
            let jobs = rows.iter_mut().enumerate().collect();
            for_each(n * positions >= 1 << 14, jobs, |(t, list)| {
                let mut keyed: Vec<u64> = (0..first + begin + t + 1)
                    .map(|p| {
                        let score = scores[(p / width * n + t) * width + p % width];
                        u64::from(!arith::order_key(score)) << 32 | p as u64
                    })
                    .collect();
                keyed.select_nth_unstable(top_k - 1);
                keyed.truncate(top_k);
                for (list, key) in list.iter_mut().zip(keyed) {
                    *list = key as u32;
                }
                list.sort_unstable();
            });
        }
        Ok(())
    }

    fn route(
        &self,
        logits: Rows<'_, Buf<f32>>,
        bias: &Buf<f32>,
        router: &Router,
        tokens: usize,
        ids: &mut Buf<u32>,
        weights: &mut Buf<f32>,
    ) -> Result<(), CpuError> {
        let Router { experts, top_k, .. } = *router;
        let jobs = (0..tokens)
            .zip(ids.chunks_mut(top_k.max(1)))
            .zip(weights.chunks_mut(top_k.max(1)))
            .collect();
        for_each(tokens * experts >= 1 << 14, jobs, |((t, ids), weights)| {
            let logits = row(logits, t, experts);
            let s = match router.scoring {
                Scoring::Sigmoid => {
                    let mut s = vec![0.0; experts];
                    dense::sigmoid(self.level, logits, &mut s);
                    s
                }
                Scoring::Softmax => super::reference::scores(router.scoring, logits),
            };
            let choice: Vec<f32> = s.iter().zip(&bias[..]).map(|(s, b)| s + b).collect();
            choose(&choice, router, ids);
            let mut sum = 0.0;
            for (id, weight) in ids.iter().zip(weights.iter_mut()) {
                *weight = s[*id as usize];
                sum += *weight;
            }
            for weight in weights {
                if router.normalise {
                    *weight /= sum + 1e-20;
                }
                *weight *= router.scaling;
            }
        });
        Ok(())
    }

    fn replay(
        &self,
        trace: TraceLayer<'_, Self>,
        top_k: usize,
        first: usize,
        tokens: usize,
        ids: &mut Buf<u32>,
        weights: &mut Buf<f32>,
    ) -> Result<(), CpuError> {
        for t in 0..tokens {
            let row = (first + t) % trace.rows;
            let from = (row * trace.layers + trace.layer) * top_k;
            ids[t * top_k..][..top_k].copy_from_slice(&trace.chosen[from..][..top_k]);
            weights[t * top_k..][..top_k].copy_from_slice(&trace.given[from..][..top_k]);
        }
        Ok(())
    }

    fn experts(
        &self,
        experts: &Experts,
        x: Rows<'_, Buf<f32>>,
        ids: &Buf<u32>,
        weights: &Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let hidden = experts.shape().hidden;
        experts::forward(
            self.level,
            experts,
            None,
            &all_rows(x, tokens, hidden),
            &ids[..tokens * top_k],
            &weights[..tokens * top_k],
            top_k,
            all_rows_mut(out, tokens, hidden),
        )
    }

    fn experts_int8(
        &self,
        [experts, low]: [&Experts; 2],
        x: Rows<'_, Buf<f32>>,
        ids: &Buf<u32>,
        weights: &Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let hidden = experts.shape().hidden;
        experts::forward(
            self.level,
            experts,
            Some(low),
            &all_rows(x, tokens, hidden),
            &ids[..tokens * top_k],
            &weights[..tokens * top_k],
            top_k,
            all_rows_mut(out, tokens, hidden),
        )
    }

    fn add(
        &self,
        x: Rows<'_, Buf<f32>>,
        also: Option<Rows<'_, Buf<f32>>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buf<f32>>,
    ) -> Result<(), CpuError> {
        let Some(also) = also else {
            map_rows(x, out, cols, tokens, |x, out| {
                for (out, x) in out.iter_mut().zip(x) {
                    *out += x;
                }
            });
            return Ok(());
        };
        let jobs = all_rows(x, tokens, cols)
            .into_iter()
            .zip(all_rows(also, tokens, cols))
            .zip(all_rows_mut(out, tokens, cols))
            .collect();
        for_each(tokens * cols >= 1 << 16, jobs, |((x, also), out)| {
            for (out, (x, also)) in out.iter_mut().zip(x.iter().zip(also)) {
                *out += x + also;
            }
        });
        Ok(())
    }
}

impl LoadExperts for Cpu {
    fn load_experts(
        &self,
        layer: LayerExperts<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts, CpuError> {
        match layer {
            LayerExperts::Raw(experts) => Experts::raw(shape, &experts),
            LayerExperts::Coded { layer, records } => Experts::coded(shape, layer, &records, form),
        }
    }
}

/// The `n` largest of `values` that `allowed` admits, of equal ones the first, in ascending order
/// of index.
fn largest(values: &[f32], n: usize, allowed: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).filter(|i| allowed(*i)).collect();
    order.sort_by_key(|i| std::cmp::Reverse(arith::order_key(values[*i])));
    order.truncate(n);
    order.sort_unstable();
    order
}

/// The router's choice for one token.
fn choose(choice: &[f32], router: &Router, ids: &mut [u32]) {
    let size = choice.len() / router.groups.max(1);
    let groups: Vec<f32> = choice
        .chunks_exact(size.max(1))
        .map(|group| {
            largest(group, 2, |_| true)
                .into_iter()
                .map(|i| group[i])
                .fold(0.0, |a, b| a + b)
        })
        .collect();
    let mut kept = vec![router.top_groups >= router.groups; groups.len()];
    for g in largest(&groups, router.top_groups, |_| true) {
        kept[g] = true;
    }
    let chosen = largest(choice, router.top_k, |i| kept[i / size.max(1)]);
    assert_eq!(chosen.len(), ids.len(), "experts to choose from");
    for (id, chosen) in ids.iter_mut().zip(chosen) {
        *id = chosen as u32;
    }
}
