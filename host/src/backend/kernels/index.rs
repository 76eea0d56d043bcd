//! The positions that sparse attention lists.

use cuda_std::mem::Slice;
use gpu::index_select::{self, SelectArgs};

use super::buffer::{Buffer, blocks, input, word};
use super::device::{Device, Launch};
use super::error::Result;
use super::ops::KernelBackend;
use super::plan;
use super::table::{IndexScores, IndexScores128, IndexSelect, IndexSelectMerge, IndexSelectTiles};
use crate::backend::{Index, Rows};

impl<D: Device> KernelBackend<D> {
    /// [`Backend::index`](crate::backend::Backend::index).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn best_positions(
        &self,
        q: Rows<'_, Buffer<f32, D::Memory>>,
        keys: &Buffer<f32, D::Memory>,
        weights: Rows<'_, Buffer<f32, D::Memory>>,
        index: &Index,
        first: usize,
        tokens: usize,
        lists: &mut Buffer<u32, D::Memory>,
    ) -> Result<()> {
        if index.top_k == 0 {
            return Ok(());
        }
        let at = self.at(first, tokens)?;
        let seen = at.seen;
        let q = input("index: q", q, tokens, index.heads * index.dim)?;
        let weights = input("index: weights", weights, tokens, index.heads)?;
        let keys = keys.from("index: keys", 0, seen * index.dim)?;
        let len = tokens.saturating_sub(1) * index.top_k + index.top_k.min(seen);
        lists.from("index: lists", 0, len)?;
        // Scores are needed only by tokens that see more than they list.
        let scored = seen > index.top_k;
        let at_once = plan::tokens_at_once(tokens, if scored { 4 * seen } else { 0 });
        let scores = self.scratch::<f32>(if scored { at_once * seen } else { 0 })?;
        let vector = q.aligned() && index.dim.is_multiple_of(8) && keys.addr.is_multiple_of(16);
        for start in (0..tokens).step_by(at_once) {
            let n = at_once.min(tokens - start);
            let args = gpu::index::IndexArgs {
                q: q.skip(start).slice,
                keys,
                weights: weights.skip(start).slice,
                scores: scores.slice(),
                q_stride: q.stride,
                weight_stride: weights.stride,
                score_stride: word("positions", seen)?,
                heads: word("heads", index.heads)?,
                dim: word("index dimension", index.dim)?,
                top_k: word("listed positions", index.top_k)?,
                at: at.word,
                first: at.first.wrapping_add(start as u32),
                weight_factor: index.weight_factor(),
                dot_factor: index.dot_factor(),
                vector: vector as u32,
                tokens: n as u32,
                reserved: 0,
            };
            // Of a recorded pass the last position that it will run at.
            let last = seen - tokens + start + n;
            if last > index.top_k && vector && args.dim == gpu::index_128::DIM {
                use gpu::index_128::{POSITIONS, THREADS, TOKENS};
                let grid = [blocks(last, POSITIONS), blocks(n, TOKENS), 1];
                self.launch::<IndexScores128>(Launch::new(grid, THREADS), args)?;
            } else if last > index.top_k {
                let grid = [blocks(last, gpu::index::BLOCK_POSITIONS), n as u32, 1];
                let launch = Launch::new(grid, gpu::index::SCORE_THREADS);
                self.launch::<IndexScores>(launch, args)?;
            }
            let mut select = SelectArgs {
                scores: scores.slice(),
                best: Slice::EMPTY,
                places: Slice::EMPTY,
                lists: lists.from("index: lists", start * index.top_k, 0)?,
                at: at.word,
                score_stride: args.score_stride,
                best_stride: 0,
                top_k: args.top_k,
                first: args.first,
            };
            let launch = Launch::new([n as u32, 1, 1], index_select::THREADS);
            let tiles = plan::tiles_to_select(n, last, args.top_k);
            if tiles == 0 {
                self.launch::<IndexSelect>(launch, select)?;
                continue;
            }
            let best = self.scratch::<f32>(n * tiles * index.top_k)?;
            let places = self.scratch::<u32>(n * tiles * index.top_k)?;
            (select.best, select.places) = (best.slice(), places.slice());
            select.best_stride = word("chosen positions", tiles * index.top_k)?;
            let of_tiles = Launch::new([tiles as u32, n as u32, 1], index_select::THREADS);
            self.launch::<IndexSelectTiles>(of_tiles, select)?;
            self.launch::<IndexSelectMerge>(launch, select)?;
        }
        Ok(())
    }
}
