//! Scores of the indexer ([`mod@crate::index`]) for heads of 128 columns, which is what GLM-5.2 has.
//!
//! The dot product of a query and a key is, as everywhere, the sum of 256 partial sums, of which those past
//! the 128th are 0: pairwise over each octet of neighbouring columns, then by halving over the octets.
//!
//! 1. A thread computes whole dot products, of four heads and two positions, octet by octet in the order in
//!    which halving adds them up (0, 8, 4, 12, 2, 10, ...): sums that wait for their other half are a few
//!    registers, and there is no shuffle. The first product of an octet is added to 0, as the partial sums
//!    begin; so an octet is never -0, and the zeros of the other 128 columns change nothing.
//! 2. A block has [`POSITIONS`] positions, whose keys lie in shared memory for all heads and for up to
//!    [`TOKENS`] tokens; queries come through L1, where a warp reads one address.
//! 3. Its warps have four heads each, [`HEADS`] in a round. The dot products go through shared memory to a
//!    thread a position, which adds the heads in order.
//!
//! Limits: `dim` is [`DIM`], and what [`IndexArgs::vector`] says holds.
//!
//! Shared memory: f32 `[POSITIONS, DIM + 4]` keys, f32 `[HEADS, POSITIONS]` dot products: 41 KiB.

use cuda_std::mem::{Global, GlobalMut};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::{fma, max};
use crate::dot::load8;
use crate::index::IndexArgs;
use crate::position::position;
use crate::unroll;

/// Columns of a head.
pub const DIM: u32 = 128;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Positions of a block.
pub const POSITIONS: u32 = 64;

/// Tokens of a block.
pub const TOKENS: u32 = 4;

/// Heads that a warp computes at once.
const H: usize = 4;
/// Positions of a lane, 32 apart.
const P: usize = (POSITIONS / 32) as usize;
/// Heads that a block computes at once.
pub const HEADS: u32 = THREADS / 32 * H as u32;
/// Words of a key in shared memory: eight neighbouring lanes' pieces of 16 bytes are in different banks.
const STRIDE: u32 = DIM + 4;

/// Sums of one octet of columns from `k` on.
#[inline(always)]
fn octet(q: &Global<f32>, from: &[u32; H], near: &Shared<f32>, row: u32, k: u32) -> [[f32; P]; H] {
    let mut keys = [[0.0f32; 8]; P];
    unroll!(p < P, {
        let at = (row + 32 * p as u32) * STRIDE + k;
        let (a, b) = (near.load_v4(at), near.load_v4(at + 4));
        unroll!(c < 4, {
            keys[p][c] = f32::from_bits(a[c]);
            keys[p][4 + c] = f32::from_bits(b[c]);
        });
    });
    let mut sums = [[0.0; P]; H];
    unroll!(h < H, {
        let x = load8::<true>(*q, from[h], k, DIM);
        unroll!(p < P, {
            let y = &keys[p];
            let low = (fma(x[0], y[0], 0.0) + x[1] * y[1]) + (x[2] * y[2] + x[3] * y[3]);
            let high = (x[4] * y[4] + x[5] * y[5]) + (x[6] * y[6] + x[7] * y[7]);
            sums[h][p] = low + high;
        });
    });
    sums
}

#[inline(always)]
fn plus(a: [[f32; P]; H], b: [[f32; P]; H]) -> [[f32; P]; H] {
    let mut sums = a;
    unroll!(h < H, {
        unroll!(p < P, {
            sums[h][p] = a[h][p] + b[h][p];
        });
    });
    sums
}

/// Scores of the positions that a token sees, where it sees more than it lists. Grid:
/// `[ceil((first + tokens) / POSITIONS), ceil(tokens / TOKENS), 1]`, [`THREADS`] threads.
///
/// # Safety
/// The views must be live and as long as [`IndexArgs`] says.
#[kernel(threads = 256, min_blocks = 2)]
pub unsafe fn index_scores_128(args: IndexArgs) {
    let near = shared_array![f32; (POSITIONS * STRIDE) as usize];
    let dots = shared_array![f32; (HEADS * POSITIONS) as usize];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (q, keys, weights, scores) = unsafe {
        (
            Global::<f32>::new(args.q),
            Global::<f32>::new(args.keys),
            Global::<f32>::new(args.weights),
            GlobalMut::<f32>::new(args.scores),
        )
    };
    let t = thread::thread_idx_x();
    let lane = warp::lane_id();
    let p0 = thread::block_idx_x() * POSITIONS;
    let first = thread::block_idx_y() * TOKENS;
    let end = (first + TOKENS).min(args.tokens);
    // SAFETY: the caller's.
    let before = unsafe { position(args.at, args.first) };
    let most = before + end;
    if most <= args.top_k || p0 >= most {
        return;
    }

    const PIECES: u32 = DIM / 4;
    let mut piece = [[0u32; 4]; (POSITIONS * PIECES / THREADS) as usize];
    unroll!(i < (POSITIONS * PIECES / THREADS) as usize, {
        let at = t + i as u32 * THREADS;
        let p = (p0 + at / PIECES).min(most - 1);
        piece[i] = keys
            .at(u64::from(p) * u64::from(DIM))
            .load_v4(4 * (at % PIECES));
    });
    unroll!(i < (POSITIONS * PIECES / THREADS) as usize, {
        let at = t + i as u32 * THREADS;
        near.store_v4(at / PIECES * STRIDE + 4 * (at % PIECES), piece[i]);
    });
    thread::sync_threads();

    let mut token = first;
    while token < end {
        let seen = before + token + 1;
        if seen > args.top_k && p0 < seen {
            let mut score = 0.0f32;
            let mut round = 0;
            while round < args.heads {
                let head = round + warp::warp_id() * H as u32;
                if head < args.heads {
                    let mut from = [0; H];
                    unroll!(h < H, {
                        let head = (head + h as u32).min(args.heads - 1);
                        from[h] = token * args.q_stride + head * DIM;
                    });
                    let of = |o: u32| octet(&q, &from, &near, lane, 8 * o);
                    let quarter =
                        |o: u32| plus(plus(of(o), of(o + 8)), plus(of(o + 4), of(o + 12)));
                    // Even octets, then odd ones.
                    let mut sum = [[0.0; P]; H];
                    let mut odd = 0;
                    while odd < 2 {
                        let half = plus(quarter(odd), quarter(odd + 2));
                        sum = if odd == 0 { half } else { plus(sum, half) };
                        odd += 1;
                    }
                    unroll!(h < H, {
                        let row = (warp::warp_id() * H as u32 + h as u32) * POSITIONS;
                        unroll!(p < P, {
                            dots.store(row + lane + 32 * p as u32, sum[h][p]);
                        });
                    });
                }
                thread::sync_threads();
                if t < POSITIONS {
                    let of_round = (args.heads - round).min(HEADS);
                    let mut h = 0;
                    while h < of_round {
                        let w = weights.load(token * args.weight_stride + round + h);
                        let dot = max(dots.load(h * POSITIONS + t) * args.dot_factor, 0.0);
                        score = fma(w * args.weight_factor, dot, score);
                        h += 1;
                    }
                }
                thread::sync_threads();
                round += HEADS;
            }
            if t < POSITIONS && p0 + t < seen {
                scores
                    .at(u64::from(token) * u64::from(args.score_stride))
                    .store(p0 + t, score);
            }
        }
        token += 1;
    }
}
