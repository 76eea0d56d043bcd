//! The indexer's choice: the best positions of a token by their scores ([`mod@crate::index`]), in order.
//!
//! The `min(top_k, seen)` best of the `seen = first + t + 1` positions that token `t` sees, of equal scores the
//! lowest positions, are listed ascending.
//!
//! 1. Radix select over `arith::order_key`, 8 bits at a time from the top: a histogram in shared
//!    memory finds the digit that the `k`-th largest key has; four passes give the key. A thread has
//!    the loads of eight scores under way together.
//! 2. Ordered compaction: scores in pieces of 4,096, four neighbouring ones a thread; each takes its place
//!    from the number of larger keys and of equal keys before it (scans within warps, then over the warps'
//!    totals, both numbers in one word). Of the equal keys the first `k - larger` are taken.
//! 3. A token that sees no more than `top_k` positions lists them all; its scores are not read.
//! 4. [`index_select()`] has a block for each token. Where tokens are few and see many positions,
//!    [`index_select_tiles()`] chooses from each tile of [`TILE`] first, a block for each, and
//!    [`index_select_merge()`] from what these chose: what is among the best of all is among the best of its
//!    tile, and what the tiles chose has the order of positions, so that the lowest of equal scores are the
//!    same.
//!
//! Limits: with tiles, `top_k` is at most [`TILE`].

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::order_key;
use crate::position::position;
use crate::unroll;

/// Threads of a block.
pub const THREADS: u32 = 1024;

/// Positions of a tile.
pub const TILE: u32 = 8 * THREADS;

const WARPS: u32 = THREADS / 32;

/// Arguments. Grids: [`index_select()`] and [`index_select_merge()`] `[tokens, 1, 1]`, [`index_select_tiles()`]
/// `[ceil((first + tokens) / TILE), tokens, 1]`; [`THREADS`] threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SelectArgs {
    /// f32 rows of `score_stride`.
    pub scores: Slice,
    /// f32 rows of `best_stride`: scores that tiles chose, `top_k` of each but the last, which may have
    /// fewer; empty without tiles.
    pub best: Slice,
    /// u32, the same: their positions.
    pub places: Slice,
    /// u32 `[tokens, top_k]`.
    pub lists: Slice,
    /// u32 `[1]`: added to `first`; or empty.
    pub at: Slice,
    /// Elements from token to token of `scores`.
    pub score_stride: u32,
    /// Elements from token to token of `best` and `places`.
    pub best_stride: u32,
    /// Positions to list at most.
    pub top_k: u32,
    /// Position of token 0.
    pub first: u32,
}

/// Shared memory of a selection.
struct Tables {
    histogram: Shared<u32>,
    /// Digit, keys with a larger one.
    found: Shared<u32>,
    /// Of each warp: larger << 16 | equal.
    totals: Shared<u32>,
}

/// Calls `list(i, number, score)` for the `k` best of `scores[..n]`, the `i`-th by number. `n > k`.
#[inline(always)]
fn select(scores: Global<f32>, n: u32, k: u32, tables: Tables, list: impl Fn(u32, u32, f32)) {
    let Tables {
        histogram,
        found,
        totals,
    } = tables;
    let t = thread::thread_idx_x();
    let lane = warp::lane_id();
    let warp = warp::warp_id();
    // The key of rank `k`, digit by digit; `rank` counts among the keys that share `prefix`.
    let mut prefix = 0u32;
    let mut mask = 0u32;
    let mut rank = k;
    let mut shift = 32;
    while shift > 0 {
        shift -= 8;
        if t < 256 {
            histogram.store(t, 0);
        }
        thread::sync_threads();
        let mut p = t;
        while p < n {
            let mut keys = [0u32; 8];
            unroll!(i < 8, {
                let at = (p + i as u32 * THREADS).min(n - 1);
                keys[i] = order_key(scores.load(at));
            });
            unroll!(i < 8, {
                if p + (i as u32) * THREADS < n && keys[i] & mask == prefix {
                    histogram.atomic_add_u32(keys[i] >> shift & 255, 1);
                }
            });
            p += 8 * THREADS;
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
    while tile < n {
        let first = tile + 4 * t;
        let (mut kind, mut earlier, mut score) = ([0u32; 4], [0u32; 4], [0.0f32; 4]);
        let mut own = 0;
        unroll!(i < 4, {
            let p = first + i as u32;
            score[i] = scores.load(p.min(n - 1));
            let key = order_key(score[i]);
            let counts = if key > prefix {
                LARGER
            } else {
                (key == prefix) as u32
            };
            kind[i] = if p < n { counts } else { 0 };
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
                list(larger + equal.min(rank), first + i as u32, score[i]);
            }
        });
        let all = warp::shuffle_idx_u32(of_warps, WARPS - 1);
        larger_before += all / LARGER;
        equal_before += all % LARGER;
        thread::sync_threads();
        tile += 4 * THREADS;
    }
}

/// What a token sees.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn seen(args: &SelectArgs, token: u32) -> u32 {
    // SAFETY: the caller's.
    let before = unsafe { position(args.at, args.first) };
    before + token + 1
}

/// Calls `each` for every number below `n`, in turn.
#[inline(always)]
fn all(n: u32, each: impl Fn(u32)) {
    let mut i = thread::thread_idx_x();
    while i < n {
        each(i);
        i += THREADS;
    }
}

/// The best positions of a token, ascending.
///
/// # Safety
/// The views must be live and as long as [`SelectArgs`] says.
#[kernel(threads = 1024)]
pub unsafe fn index_select(args: SelectArgs) {
    let tables = Tables {
        histogram: shared_array![u32; 256],
        found: shared_array![u32; 2],
        totals: shared_array![u32; 32],
    };
    let token = thread::block_idx_x();
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (seen, scores, lists) = unsafe {
        (
            seen(&args, token),
            Global::<f32>::new(args.scores),
            GlobalMut::<u32>::new(args.lists).at(u64::from(token) * u64::from(args.top_k)),
        )
    };
    if seen <= args.top_k {
        all(seen, |p| lists.store(p, p));
        return;
    }
    let scores = scores.at(u64::from(token) * u64::from(args.score_stride));
    select(scores, seen, args.top_k, tables, |i, p, _| {
        lists.store(i, p)
    });
}

/// The best positions of a tile, ascending, and their scores; nothing where the token lists all that it sees.
///
/// # Safety
/// The views must be live and as long as [`SelectArgs`] says.
#[kernel(threads = 1024)]
pub unsafe fn index_select_tiles(args: SelectArgs) {
    let tables = Tables {
        histogram: shared_array![u32; 256],
        found: shared_array![u32; 2],
        totals: shared_array![u32; 32],
    };
    let (tile, token) = (thread::block_idx_x(), thread::block_idx_y());
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (seen, scores, best, places) = unsafe {
        (
            seen(&args, token),
            Global::<f32>::new(args.scores),
            GlobalMut::<f32>::new(args.best),
            GlobalMut::<u32>::new(args.places),
        )
    };
    let first = tile * TILE;
    if seen <= args.top_k || first >= seen {
        return;
    }
    // Unknown to the compiler, which would unroll what has no registers for it.
    let n = warp::uniform((seen - first).min(TILE));
    let scores = scores.at(u64::from(token) * u64::from(args.score_stride) + u64::from(first));
    let at = u64::from(token) * u64::from(args.best_stride) + u64::from(tile * args.top_k);
    let (best, places) = (best.at(at), places.at(at));
    let choose = |i, number, score| {
        best.store(i, score);
        places.store(i, first + number);
    };
    if n <= args.top_k {
        all(n, |i| choose(i, i, scores.load(i)));
    } else {
        select(scores, n, args.top_k, tables, choose);
    }
}

/// The best positions of a token, ascending, of those that its tiles chose.
///
/// # Safety
/// The views must be live and as long as [`SelectArgs`] says.
#[kernel(threads = 1024)]
pub unsafe fn index_select_merge(args: SelectArgs) {
    let tables = Tables {
        histogram: shared_array![u32; 256],
        found: shared_array![u32; 2],
        totals: shared_array![u32; 32],
    };
    let token = thread::block_idx_x();
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (seen, best, places, lists) = unsafe {
        (
            seen(&args, token),
            Global::<f32>::new(args.best),
            Global::<u32>::new(args.places),
            GlobalMut::<u32>::new(args.lists).at(u64::from(token) * u64::from(args.top_k)),
        )
    };
    if seen <= args.top_k {
        all(seen, |p| lists.store(p, p));
        return;
    }
    let at = u64::from(token) * u64::from(args.best_stride);
    let (best, places) = (best.at(at), places.at(at));
    // Tiles but the last have chosen `top_k`.
    let before = (seen - 1) / TILE;
    let chosen = before * args.top_k + (seen - before * TILE).min(args.top_k);
    if chosen == args.top_k {
        all(chosen, |i| lists.store(i, places.load(i)));
    } else {
        select(best, chosen, args.top_k, tables, |i, number, _| {
            lists.store(i, places.load(number))
        });
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
