//! The indexer of sparse attention: scores of all positions, and the best of them in order.
//!
//! Score of position `p` for token `t`, `p <= first + t`:
//! `sum over heads ascending of fma(w[t][h] * weight_factor, max(dot(q[t][h], keys[p]) *
//! dot_factor, 0), acc)`. The `min(top_k, first + t + 1)` best, of equal scores the lowest
//! positions, are listed ascending.
//!
//! [`index_scores()`]:
//! 1. A warp takes four neighbouring positions and keeps the first 256 columns of their keys in
//!    registers over all heads; queries come through L1. For heads of 128 columns see
//!    [`mod@crate::index_128`].
//!
//! [`index_select()`], one block of 1,024 threads a token:
//! 1. Radix select over `arith::order_key`, 8 bits at a time from the top: a histogram in shared
//!    memory finds the digit that the `k`-th largest key has; four passes give the key. A thread has
//!    the loads of eight scores under way together.
//! 2. Ordered compaction: positions in tiles of 4,096, four neighbouring ones a thread; each takes its place
//!    from the number of larger keys and of equal keys before it (scans within warps, then over the warps'
//!    totals, both numbers in one word). Of the equal keys the first `k - larger` are taken.
//! 3. A token that sees no more than `top_k` positions lists them all; its scores are not read.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::{fma, max, order_key};
use crate::dot::{STEP, fma8, load8, warp_reduce};
use crate::position::position;
use crate::unroll;

/// Threads of a block of [`index_scores()`].
pub const SCORE_THREADS: u32 = 256;

/// Positions of a warp of [`index_scores()`].
pub const POSITIONS: u32 = 4;

/// Positions of a block of [`index_scores()`].
pub const BLOCK_POSITIONS: u32 = SCORE_THREADS / 32 * POSITIONS;

/// Threads of a block of [`index_select()`].
pub const SELECT_THREADS: u32 = 1024;

const P: usize = POSITIONS as usize;
const WARPS: u32 = SELECT_THREADS / 32;

/// Arguments of [`index_scores()`] (grid `[ceil((first + tokens) / 32), tokens, 1]`, 256 threads)
/// and of [`index_select()`] (grid `[tokens, 1, 1]`, 1,024 threads).
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct IndexArgs {
    /// f32 rows of `q_stride`, head `h` at `h * dim`.
    pub q: Slice,
    /// f32 `[positions, dim]`.
    pub keys: Slice,
    /// f32 rows of `weight_stride`, `heads` long.
    pub weights: Slice,
    /// f32 rows of `score_stride`: scratch.
    pub scores: Slice,
    /// u32 `[tokens, top_k]`.
    pub lists: Slice,
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

/// The best positions of a token, ascending.
///
/// # Safety
/// The views must be live and as long as [`IndexArgs`] says.
#[kernel(threads = 1024)]
pub unsafe fn index_select(args: IndexArgs) {
    let histogram = shared_array![u32; 256];
    let found = shared_array![u32; 2]; // digit, keys with a larger one
    let totals = shared_array![u32; 32]; // per warp: larger << 16 | equal
    let token = thread::block_idx_x();
    let t = thread::thread_idx_x();
    let lane = warp::lane_id();
    let warp = warp::warp_id();
    // SAFETY: the caller's.
    let seen = unsafe { position(args.at, args.first) } + token + 1;
    // SAFETY: the caller's: live views, as long as the arguments say.
    let lists = unsafe { GlobalMut::<u32>::new(args.lists).at(token as u64 * args.top_k as u64) };

    if seen <= args.top_k {
        let mut p = t;
        while p < seen {
            lists.store(p, p);
            p += SELECT_THREADS;
        }
        return;
    }
    // SAFETY: the caller's: live views, as long as the arguments say.
    let scores =
        unsafe { Global::<f32>::new(args.scores).at(token as u64 * args.score_stride as u64) };

    // The key of rank `top_k`, digit by digit; `rank` counts among the keys that share `prefix`.
    let mut prefix = 0u32;
    let mut mask = 0u32;
    let mut rank = args.top_k;
    let mut shift = 32;
    while shift > 0 {
        shift -= 8;
        if t < 256 {
            histogram.store(t, 0);
        }
        thread::sync_threads();
        let mut p = t;
        while p < seen {
            let mut keys = [0u32; 8];
            unroll!(i < 8, {
                let at = (p + i as u32 * SELECT_THREADS).min(seen - 1);
                keys[i] = order_key(scores.load(at));
            });
            unroll!(i < 8, {
                if p + (i as u32) * SELECT_THREADS < seen && keys[i] & mask == prefix {
                    histogram.atomic_add_u32(keys[i] >> shift & 255, 1);
                }
            });
            p += 8 * SELECT_THREADS;
        }
        thread::sync_threads();
        // Lane l takes digits 8l..8l+8, from the top: lane 31 has the largest.
        if warp == 0 {
            let mut counts = [0u32; 8];
            let mut sum = 0;
            unroll!(i < 8, {
                counts[i] = histogram.load(8 * lane + i as u32);
                sum += counts[i];
            });
            let mut above = sum; // of this lane and those over it
            let mut distance = 1;
            while distance < 32 {
                let other = warp::shuffle_down_u32(above, distance);
                if lane + distance < 32 {
                    above += other;
                }
                distance *= 2;
            }
            // Descending digits: those of the lanes above, then this lane's.
            let mut larger = [above - sum; 8];
            unroll!(i < 7, {
                larger[6 - i] = larger[7 - i] + counts[7 - i];
            });
            unroll!(i < 8, {
                if larger[i] < rank && rank <= larger[i] + counts[i] {
                    found.store(0, 8 * lane + i as u32);
                    found.store(1, larger[i]);
                }
            });
        }
        thread::sync_threads();
        prefix |= found.load(0) << shift;
        mask |= 255 << shift;
        rank -= found.load(1);
        // The next pass stores to the histogram, which only warp 0 read, before its barrier, and to
        // `found` two barriers on.
    }

    // Keys above `prefix` are all taken, of those equal to it the first `rank`.
    let (mut larger_before, mut equal_before) = (0u32, 0u32); // in the tiles before
    let mut tile = 0;
    while tile < seen {
        let first = tile + 4 * t;
        let (mut kind, mut earlier) = ([0u32; 4], [0u32; 4]);
        let mut own = 0;
        unroll!(i < 4, {
            let p = first + i as u32;
            let key = order_key(scores.load(p.min(seen - 1)));
            let counts = if key > prefix {
                LARGER
            } else {
                (key == prefix) as u32
            };
            kind[i] = if p < seen { counts } else { 0 };
            earlier[i] = own;
            own += kind[i];
        });
        let through = scan(own);
        if lane == 31 {
            totals.store(warp, through);
        }
        thread::sync_threads();
        // Lane l: warps 0..=l.
        let of_warps = scan(totals.load(lane));
        let ahead = warp::shuffle_idx_u32(of_warps, warp.max(1) - 1);
        let ahead = if warp == 0 { 0 } else { ahead } + through - own;
        unroll!(i < 4, {
            let ahead = ahead + earlier[i];
            let larger = larger_before + ahead / LARGER;
            let equal = equal_before + ahead % LARGER;
            if kind[i] == LARGER || kind[i] != 0 && equal < rank {
                lists.store(larger + equal.min(rank), first + i as u32);
            }
        });
        let all = warp::shuffle_idx_u32(of_warps, WARPS - 1);
        larger_before += all / LARGER;
        equal_before += all % LARGER;
        thread::sync_threads();
        tile += 4 * SELECT_THREADS;
    }
}

/// One larger key in a word that counts equal ones too, of which a tile has fewer.
const LARGER: u32 = 1 << 16;

/// The sum over lanes up to this one.
#[inline(always)]
fn scan(mut count: u32) -> u32 {
    let mut distance = 1;
    while distance < 32 {
        let other = warp::shuffle_up_u32(count, distance);
        if warp::lane_id() >= distance {
            count += other;
        }
        distance *= 2;
    }
    count
}
