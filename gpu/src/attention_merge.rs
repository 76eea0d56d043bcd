//! Merge of the chunks that [`mod@crate::attention`] and [`mod@crate::attention_many`] leave.
//!
//! Per token and head, from the first chunk's `m`, `l` and `o[c]` on, for each chunk in ascending order with
//! [`merge`](crate::arith::merge())'s factors: `l = l * old + l_chunk * new`, `o[c] = o[c] * old + o_chunk[c] *
//! new`; then `out[c] = o[c] / l`.
//!
//! 1. A thread takes four neighbouring columns, or one where `latent` is no multiple of 4, and loads those of
//!    [`AHEAD`] chunks at once.
//! 2. A warp computes the factors of 32 chunks at once, a lane a chunk: the maximum up to a chunk does not
//!    depend on how it is taken. They go through shared memory, 16 bytes a chunk. What else there is of the
//!    sums keeps its order.
//!
//! Shared memory: f32 `[4 warps, 32, 4]`: `old`, `new`, `l_chunk * new`.

use cuda_std::mem::{Global, GlobalMut};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::{ATTENTION_CHUNK, exp, fma, max};
use crate::attention::{AttentionArgs, count};
use crate::unroll;

/// Threads of a block.
pub const THREADS: u32 = 128;

/// Chunks whose sums a thread loads at once.
pub const AHEAD: usize = 8;

/// Chunks whose factors a warp computes at once.
const BATCH: u32 = 32;

/// Elements `c..c + N` of a row of sums; with `N` 4 rows start at multiples of 16 bytes.
#[inline(always)]
fn columns<const N: usize>(row: Global<f32>, c: u32) -> [f32; N] {
    let mut v = [0.0; N];
    if N == 4 {
        let words = row.load_v4(c);
        unroll!(i < 4, {
            if i < N {
                v[i] = f32::from_bits(words[i]);
            }
        });
    } else {
        unroll!(i < N, {
            v[i] = row.load(c + i as u32);
        });
    }
    v
}

/// Factors of the warp's next chunks, lane `i`'s to place `i` of `near`; the maximum behind the last of them.
/// `state` is the chunk's `m` and `l`; what lanes have that repeat the last chunk is not used.
#[inline(always)]
fn factors(before: f32, state: [f32; 2], near: Shared<f32>) -> f32 {
    let lane = warp::lane_id();
    let mut top = max(before, state[0]);
    let mut distance = 1;
    while distance < BATCH {
        top = max(top, warp::shuffle_up_f32(top, distance));
        distance *= 2;
    }
    let below = warp::shuffle_up_f32(top, 1);
    let old = exp(if lane == 0 { before } else { below } - top);
    let new = exp(state[0] - top);
    warp::sync_warp();
    let of = [old, new, state[1] * new, 0.0];
    near.store_v4(4 * lane, of.map(f32::to_bits));
    warp::sync_warp();
    warp::shuffle_idx_f32(top, BATCH - 1)
}

/// # Safety
/// As the kernel's. `N` is 1, or 4 where `latent` is a multiple of that.
#[inline(always)]
unsafe fn merge_of<const N: usize>(args: AttentionArgs, near: Shared<f32>) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (softmax, partial, out) = unsafe {
        (
            Global::<f32>::new(args.softmax),
            Global::<f32>::new(args.partial),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let near = near.part(warp::warp_id() * 4 * BATCH, 4 * BATCH);
    let (head, token) = (thread::block_idx_x(), thread::block_idx_y());
    let chunks = count(&args, token).div_ceil(ATTENTION_CHUNK as u32);
    let row0 = (token * args.heads + head) * args.chunks;
    let last = row0 + chunks - 1;
    let state = |row: u32| softmax.load_v2(2 * row).map(f32::from_bits);
    let sums = |row: u32, c: u32| columns::<N>(partial.at(row as u64 * args.latent as u64), c);
    // All lanes of a warp go on together: those past the last column repeat the first ones.
    let mut start = N as u32 * 32 * warp::warp_id();
    while start < args.latent {
        let mine = start + N as u32 * warp::lane_id();
        let c = if mine < args.latent { mine } else { start };
        let [mut m, mut l] = state(row0);
        let mut o = sums(row0, c);
        let mut batch = row0 + 1;
        while batch <= last {
            m = factors(m, state((batch + warp::lane_id()).min(last)), near);
            let end = (batch + BATCH).min(last + 1);
            let mut row = batch;
            while row < end {
                let mut news = [[0.0f32; N]; AHEAD];
                unroll!(j < AHEAD, {
                    news[j] = sums((row + j as u32).min(last), c);
                });
                unroll!(j < AHEAD, {
                    let there = row + (j as u32) < end;
                    let factors = near.load_v4(4 * (row - batch + j as u32));
                    let [old, new, add, _] = factors.map(f32::from_bits);
                    let sum = fma(l, old, add);
                    l = if there { sum } else { l };
                    unroll!(i < N, {
                        let sum = fma(o[i], old, news[j][i] * new);
                        o[i] = if there { sum } else { o[i] };
                    });
                });
                row += AHEAD as u32;
            }
            batch += BATCH;
        }
        if mine < args.latent {
            let to = token * args.out_stride + head * args.latent + c;
            unroll!(i < N, {
                out.store(to + i as u32, o[i] / l);
            });
        }
        start += N as u32 * THREADS;
    }
}

/// Merges the chunks of a token and head. Grid: `[heads, tokens, 1]`, [`THREADS`] threads.
///
/// # Safety
/// The views must be live and as long as [`AttentionArgs`] says.
#[kernel(threads = 128, min_blocks = 5)]
pub unsafe fn attention_merge(args: AttentionArgs) {
    let near = shared_array![f32; (THREADS * 4) as usize];
    // SAFETY: the caller's.
    unsafe {
        if args.latent.is_multiple_of(4) {
            merge_of::<4>(args, near);
        } else {
            merge_of::<1>(args, near);
        }
    }
}
