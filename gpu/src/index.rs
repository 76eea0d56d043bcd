//! The indexer of sparse attention: scores of all positions. Which are listed: [`mod@crate::index_select`].
//!
//! Score of position `p` for token `t`, `p <= first + t`:
//! `sum over heads ascending of fma(w[t][h] * weight_factor, max(dot(q[t][h], keys[p]) *
//! dot_factor, 0), acc)`.
//!
//! 1. A warp takes four neighbouring positions and keeps the first 256 columns of their keys in
//!    registers over all heads; queries come through L1. For heads of 128 columns see
//!    [`mod@crate::index_128`].
//! 2. A token that sees no more than `top_k` positions lists them all: it has no scores.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread, warp};

use crate::arith::{fma, max};
use crate::dot::{STEP, fma8, load8, warp_reduce};
use crate::position::position;
use crate::unroll;

/// Threads of a block of [`index_scores()`].
pub const SCORE_THREADS: u32 = 256;

/// Positions of a warp of [`index_scores()`].
pub const POSITIONS: u32 = 4;

/// Positions of a block of [`index_scores()`].
pub const BLOCK_POSITIONS: u32 = SCORE_THREADS / 32 * POSITIONS;

const P: usize = POSITIONS as usize;

/// Arguments. Grid of [`index_scores()`]: `[ceil((first + tokens) / 32), tokens, 1]`, 256 threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct IndexArgs {
    /// f32 rows of `q_stride`, head `h` at `h * dim`.
    pub q: Slice,
    /// f32 `[positions, dim]`.
    pub keys: Slice,
    /// f32 rows of `weight_stride`, `heads` long.
    pub weights: Slice,
    /// f32 rows of `score_stride`.
    pub scores: Slice,
    /// u32 `[1]`: added to `first`; or empty.
    pub at: Slice,
    /// Elements from token to token of `q`.
    pub q_stride: u32,
    /// Elements from token to token of `weights`.
    pub weight_stride: u32,
    /// Elements from token to token of `scores`.
    pub score_stride: u32,
    /// Heads.
    pub heads: u32,
    /// Columns of a head.
    pub dim: u32,
    /// Positions to list at most.
    pub top_k: u32,
    /// Position of token 0.
    pub first: u32,
    /// Factor of the weights.
    pub weight_factor: f32,
    /// Factor of the dot products.
    pub dot_factor: f32,
    /// Whether rows of `q` and `keys` start at multiples of 16 bytes and `dim` is a multiple of 8.
    pub vector: u32,
    /// Tokens.
    pub tokens: u32,
    /// Zero.
    pub reserved: u32,
}

#[inline(always)]
fn scores<const V: bool>(args: IndexArgs) {
    // SAFETY: the kernel's caller's: live views, as long as the arguments say.
    let (q, keys, weights, scores) = unsafe {
        (
            Global::<f32>::new(args.q),
            Global::<f32>::new(args.keys),
            Global::<f32>::new(args.weights),
            GlobalMut::<f32>::new(args.scores),
        )
    };
    let token = thread::block_idx_y();
    // SAFETY: the kernel's caller's.
    let seen = unsafe { position(args.at, args.first) } + token + 1;
    let lane = warp::lane_id();
    let p0 = (thread::block_idx_x() * (SCORE_THREADS / 32) + warp::warp_id()) * POSITIONS;
    if seen <= args.top_k || p0 >= seen {
        return;
    }
    let dim = args.dim;
    let k0 = 8 * lane;
    let mut rows = [keys; P];
    let mut near = [[0.0f32; 8]; P];
    unroll!(i < P, {
        let p = (p0 + i as u32).min(seen - 1);
        rows[i] = keys.at(p as u64 * dim as u64);
        if k0 < dim {
            near[i] = load8::<V>(rows[i], 0, k0, dim);
        }
    });
    let mut score = [0.0f32; P];
    for h in 0..args.heads {
        let from = token * args.q_stride + h * dim;
        let mut sum = [[0.0f32; 8]; P];
        if k0 < dim {
            let x = load8::<V>(q, from, k0, dim);
            unroll!(i < P, {
                fma8::<V>(&mut sum[i], &x, &near[i], k0, dim);
            });
        }
        let mut k = k0 + STEP;
        while k < dim {
            let x = load8::<V>(q, from, k, dim);
            unroll!(i < P, {
                let key = load8::<V>(rows[i], 0, k, dim);
                fma8::<V>(&mut sum[i], &x, &key, k, dim);
            });
            k += STEP;
        }
        let w = weights.load(token * args.weight_stride + h) * args.weight_factor;
        unroll!(i < P, {
            let dot = warp_reduce(sum[i]);
            score[i] = fma(w, max(dot * args.dot_factor, 0.0), score[i]);
        });
    }
    let mut mine = 0.0;
    unroll!(i < P, {
        if lane == i as u32 {
            mine = score[i];
        }
    });
    if lane < POSITIONS && p0 + lane < seen {
        scores
            .at(token as u64 * args.score_stride as u64)
            .store(p0 + lane, mine);
    }
}

/// Scores of the positions that a token sees, where it sees more than it lists.
///
/// # Safety
/// The views must be live and as long as [`IndexArgs`] says.
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn index_scores(args: IndexArgs) {
    if args.vector != 0 {
        scores::<true>(args);
    } else {
        scores::<false>(args);
    }
}
