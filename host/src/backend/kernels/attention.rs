//! Attention and what writes its cache, as launches.

use cuda_std::mem::Slice;

use super::buffer::{Buffer, blocks, input, output, word};
use super::device::{Device, Launch};
use super::error::{KernelError, Result};
use super::ops::KernelBackend;
use super::plan;
use super::table::*;
use crate::backend::{Attend, Cached, Mla, Rows, RowsMut};

impl<D: Device> KernelBackend<D> {
    pub(super) fn narrow_rows(
        &self,
        x: Rows<'_, Buffer<f32, D::Memory>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buffer<u16, D::Memory>>,
    ) -> Result<()> {
        let from = input("narrow: x", x, tokens, cols)?;
        let (to, at) = self.moving("narrow: out", &out, tokens, cols)?;
        let args = gpu::narrow::NarrowArgs {
            x: from.slice,
            out: to.slice,
            at,
            x_stride: from.stride,
            out_stride: to.stride,
            cols: word("columns", cols)?,
            reserved: 0,
        };
        let threads = gpu::narrow::THREADS;
        let grid = [blocks(cols, threads), word("tokens", tokens)?, 1];
        self.launch::<Narrow>(Launch::new(grid, threads), args)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend(
        &self,
        q: Rows<'_, Buffer<f32, D::Memory>>,
        cache: Cached<'_, Self>,
        attend: Attend<'_, Buffer<u32, D::Memory>>,
        mla: &Mla,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        let width = mla.latent + mla.rope;
        let q = input("attention: q", q, tokens, mla.heads * width)?;
        let to = output("attention: out", &out, tokens, mla.heads * mla.latent)?;
        let at = self.at(first, tokens)?;
        let seen = at.seen;
        let what = "attention: cache";
        let (cache, bf16) = match cache {
            Cached::F32(rows) => (rows.from(what, 0, seen * width)?, false),
            Cached::Bf16(rows) => (rows.from(what, 0, seen * width)?, true),
        };
        let (lists, top_k) = match attend {
            Attend::Causal => (None, 0),
            Attend::Listed { top_k: 0, .. } => {
                return Err(KernelError::Dimension {
                    what: "attention: listed positions",
                    found: 0,
                    expected: "at least 1",
                });
            }
            Attend::Listed { lists, top_k } => {
                // A last token that sees fewer positions than it could list needs only those.
                let len = tokens.saturating_sub(1) * top_k + top_k.min(seen);
                lists.from("attention: lists", 0, len)?;
                (Some(lists), top_k)
            }
        };
        let listed = if top_k == 0 { seen } else { seen.min(top_k) };
        let chunks = listed.div_ceil(gpu::arith::ATTENTION_CHUNK);
        let states = mla.heads * chunks;
        let at_once = plan::tokens_at_once(tokens, 4 * states * (mla.latent + 2));
        let softmax = self.scratch::<f32>(2 * at_once * states)?;
        let partial = self.scratch::<f32>(at_once * states * mla.latent)?;
        let vector = q.aligned() && width.is_multiple_of(8) && cache.addr.is_multiple_of(16);
        let vector = vector && (!bf16 || mla.latent.is_multiple_of(2));
        for start in (0..tokens).step_by(at_once) {
            let n = at_once.min(tokens - start);
            let args = gpu::attention::AttentionArgs {
                q: q.skip(start).slice,
                cache,
                lists: match lists {
                    None => Slice::EMPTY,
                    Some(lists) => lists.from("attention: lists", start * top_k, 0)?,
                },
                softmax: softmax.slice(),
                partial: partial.slice(),
                out: to.skip(start).slice,
                q_stride: q.stride,
                out_stride: to.stride,
                top_k: word("listed positions", top_k)?,
                at: at.word,
                first: at.first.wrapping_add(start as u32),
                heads: word("heads", mla.heads)?,
                latent: word("latent", mla.latent)?,
                rope: word("rope", mla.rope)?,
                chunks: word("chunks", chunks)?,
                scaling: mla.scaling,
                vector: vector as u32,
            };
            let (n, heads) = (n as u32, args.heads);
            let limits = self.device().limits();
            let (at_once, launch) = plan::attention(limits, mla, args.chunks, n, vector);
            match (at_once, bf16) {
                (gpu::attention_many::HEADS, false) => {
                    self.launch::<AttentionChunkMany>(launch, args)
                }
                (gpu::attention_many::HEADS, true) => {
                    self.launch::<AttentionChunkManyBf16>(launch, args)
                }
                (gpu::attention_many::FEWER, false) => {
                    self.launch::<AttentionChunkEight>(launch, args)
                }
                (gpu::attention_many::FEWER, true) => {
                    self.launch::<AttentionChunkEightBf16>(launch, args)
                }
                (_, false) => self.launch::<AttentionChunk>(launch, args),
                (_, true) => self.launch::<AttentionChunkBf16>(launch, args),
            }?;
            let merge = Launch::new([heads, n, 1], gpu::attention_merge::THREADS);
            self.launch::<AttentionMerge>(merge, args)?;
        }
        Ok(())
    }
}
