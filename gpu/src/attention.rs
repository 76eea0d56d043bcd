//! Multi-head latent attention over cache rows `[c | k_rope]` that all heads share.
//!
//! Per token and head: scores `s_i = scaling * dot(q, row_i)` over the listed positions, in chunks
//! of 64 (`m = max s`, `p_i = exp(s_i - m)`, `l = sum p`, `o[c] = sum p_i row_i[c]` by ascending
//! `i`), chunks merged in ascending order, `out = o / l`.
//!
//! 1. One block takes one chunk of one token for four heads ([`HEADS`]), so that a row that was
//!    loaded serves four dot products and four sums. Heads past the end repeat the last one and are
//!    not stored.
//! 2. Scores: a warp takes a position, by the warp's reduction rule. Softmax: a warp takes a head;
//!    its 64 probabilities are partial sums 0..64, so that the butterfly's distances 16 and 8 add
//!    zeros, 4 adds the two halves of the warp's registers, and 2 and 1 are lanes 16 and 8 apart.
//!    Sum: a thread takes columns.
//! 3. Rows of bf16 ([`attention_chunk_bf16()`]) are widened as they are loaded; a thread takes two
//!    neighbouring columns of the sum then, one word.
//!
//! [`mod@crate::attention_merge`] merges the chunks.
//! [`mod@crate::attention_many`] does the same where blocks of more heads are enough of them.
//!
//! Chunks past a token's count do nothing; the scratch of their partial results is not read.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::{ATTENTION_CHUNK, bf16, exp, fma, max};
use crate::dot::{STEP, fma8, load8, octet, warp_reduce};
use crate::position::position;
use crate::unroll;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Heads of a block of [`attention_chunk()`].
pub const HEADS: u32 = 4;

const H: usize = HEADS as usize;
const CHUNK: u32 = ATTENTION_CHUNK as u32;

/// Arguments of [`attention_chunk()`] and [`attention_chunk_bf16()`] (grid
/// `[chunks, ceil(heads / 4), tokens]`, 256 threads), of [`mod@crate::attention_many`] and
/// [`mod@crate::attention_merge`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AttentionArgs {
    /// f32 rows of `q_stride`, head `h` at `h * (latent + rope)`.
    pub q: Slice,
    /// f32, or bf16 of [`attention_chunk_bf16()`], `[positions, latent + rope]`.
    pub cache: Slice,
    /// u32 rows of `top_k` ascending positions; unused where `top_k` is 0.
    pub lists: Slice,
    /// f32 `[tokens, heads, chunks, 2]`: `m` and `l`.
    pub softmax: Slice,
    /// f32 `[tokens, heads, chunks, latent]`: `o`.
    pub partial: Slice,
    /// f32 rows of `out_stride`, head `h` at `h * latent`.
    pub out: Slice,
    /// u32 `[1]`: added to `first`; or empty.
    pub at: Slice,
    /// Elements from token to token of `q`.
    pub q_stride: u32,
    /// Elements from token to token of `out`.
    pub out_stride: u32,
    /// Positions listed at most; 0: all up to the token's own.
    pub top_k: u32,
    /// Position of token 0.
    pub first: u32,
    /// Heads.
    pub heads: u32,
    /// `kv_lora_rank`.
    pub latent: u32,
    /// `qk_rope_head_dim`.
    pub rope: u32,
    /// Chunks that the scratch holds for a token and head.
    pub chunks: u32,
    /// Factor of the scores.
    pub scaling: f32,
    /// Whether rows of `q` and the cache start at multiples of 16 bytes and `latent + rope` is a
    /// multiple of 8; of bf16 `latent` is even besides.
    pub vector: u32,
}

/// Positions that a token attends to.
#[inline(always)]
pub(crate) fn count(args: &AttentionArgs, token: u32) -> u32 {
    // SAFETY: the kernel's caller's.
    let seen = unsafe { position(args.at, args.first) } + token + 1;
    if args.top_k == 0 {
        seen
    } else {
        seen.min(args.top_k)
    }
}

/// The `n` positions of the block's chunk, for those behind the next barrier.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
pub(crate) unsafe fn listed(args: &AttentionArgs, token: u32, n: u32, position: Shared<u32>) {
    let t = thread::thread_idx_x();
    if t < n {
        let i = thread::block_idx_x() * CHUNK + t;
        let p = if args.top_k == 0 {
            i
        } else {
            // SAFETY: the caller's: there is a list.
            unsafe { Global::<u32>::new(args.lists) }.load(token * args.top_k + i)
        };
        position.store(t, p);
    }
}

/// Probabilities of a head from its scores, their maximum before `exp` and their sum: lane `i` has
/// positions `i` and `i + 32`, `there` or the score of one that is.
#[inline(always)]
pub(crate) fn softmax_of(score: [f32; 2], there: [bool; 2]) -> ([f32; 2], f32, f32) {
    let [a, b] = score;
    let mut m = max(a, b);
    let mut distance = 16;
    while distance > 0 {
        m = max(m, warp::shuffle_xor_f32(m, distance));
        distance /= 2;
    }
    let a = if there[0] { exp(a - m) } else { 0.0 };
    let b = if there[1] { exp(b - m) } else { 0.0 };
    let l = octet(a) + octet(b);
    let l = l + warp::shuffle_xor_f32(l, 16);
    let l = l + warp::shuffle_xor_f32(l, 8);
    ([a, b], m, l)
}

/// How cache rows are stored.
trait Entry: Pod {
    /// Elements `k..k + 8` of a row, as [`load8`].
    fn load8<const V: bool>(row: Global<Self>, k: u32, cols: u32) -> [f32; 8];
    /// Elements `c..c + N`; `N` is 1, or 2 where `c` is even and rows start at whole words.
    fn columns<const N: usize>(row: Global<Self>, c: u32) -> [f32; N];
}

impl Entry for f32 {
    #[inline(always)]
    fn load8<const V: bool>(row: Global<f32>, k: u32, cols: u32) -> [f32; 8] {
        load8::<V>(row, 0, k, cols)
    }

    #[inline(always)]
    fn columns<const N: usize>(row: Global<f32>, c: u32) -> [f32; N] {
        let mut v = [0.0; N];
        unroll!(i < N, {
            v[i] = row.load(c + i as u32);
        });
        v
    }
}

/// bf16.
impl Entry for u16 {
    #[inline(always)]
    fn load8<const V: bool>(row: Global<u16>, k: u32, cols: u32) -> [f32; 8] {
        let mut v = [0.0; 8];
        if V {
            let words = row.load_v4(k / 2);
            unroll!(i < 4, {
                v[2 * i] = f32::from_bits(words[i] << 16);
                v[2 * i + 1] = f32::from_bits(words[i] & 0xffff_0000);
            });
        } else {
            unroll!(i < 8, {
                if k + (i as u32) < cols {
                    v[i] = bf16(row.load(k + i as u32));
                }
            });
        }
        v
    }

    #[inline(always)]
    fn columns<const N: usize>(row: Global<u16>, c: u32) -> [f32; N] {
        let mut v = [0.0; N];
        if N == 2 {
            let word = row.cast::<u32>().load(c / 2);
            v[0] = f32::from_bits(word << 16);
            v[N - 1] = f32::from_bits(word & 0xffff_0000);
        } else {
            v[0] = bf16(row.load(c));
        }
        v
    }
}

/// Scores of the block's heads, `score[h * 64 + i]`, by warps.
#[inline(always)]
fn scores<E: Entry, const V: bool>(
    args: AttentionArgs,
    head0: u32,
    token: u32,
    n: u32,
    position: Shared<u32>,
    score: Shared<f32>,
) {
    // SAFETY: the kernel's caller's: live views, as long as the arguments say.
    let (q, cache) = unsafe { (Global::<f32>::new(args.q), Global::<E>::new(args.cache)) };
    let lane = warp::lane_id();
    let width = args.latent + args.rope;
    let mut from = [0; H];
    unroll!(h < H, {
        let head = (head0 + h as u32).min(args.heads - 1);
        from[h] = token * args.q_stride + head * width;
    });
    let mut i = warp::warp_id();
    while i < n {
        let row = cache.at(position.load(i) as u64 * width as u64);
        let mut p = [[0.0f32; 8]; H];
        let mut k = 8 * lane;
        while k < width {
            let c = E::load8::<V>(row, k, width);
            unroll!(h < H, {
                let x = load8::<V>(q, from[h], k, width);
                fma8::<V>(&mut p[h], &x, &c, k, width);
            });
            k += STEP;
        }
        unroll!(h < H, {
            let dot = warp_reduce(p[h]);
            if lane == 0 {
                score.store(h as u32 * CHUNK + i, args.scaling * dot);
            }
        });
        i += THREADS / 32;
    }
}

/// Weighted sums of the block's heads, a thread `N` neighbouring columns at a time.
#[inline(always)]
fn sums<E: Entry, const N: usize>(
    args: AttentionArgs,
    n: u32,
    position: Shared<u32>,
    score: Shared<f32>,
) {
    // SAFETY: the kernel's caller's: live views, as long as the arguments say.
    let (cache, partial) = unsafe {
        (
            Global::<E>::new(args.cache),
            GlobalMut::<f32>::new(args.partial),
        )
    };
    let (chunk, token) = (thread::block_idx_x(), thread::block_idx_z());
    let head0 = thread::block_idx_y() * HEADS;
    let width = args.latent + args.rope;
    let mut c = N as u32 * thread::thread_idx_x();
    while c < args.latent {
        let mut o = [[0.0f32; N]; H];
        for i in 0..n {
            let row = cache.at(position.load(i) as u64 * width as u64);
            let v = E::columns::<N>(row, c);
            unroll!(h < H, {
                let p = score.load(h as u32 * CHUNK + i);
                unroll!(j < N, {
                    o[h][j] = fma(p, v[j], o[h][j]);
                });
            });
        }
        unroll!(h < H, {
            let head = head0 + h as u32;
            if head < args.heads {
                let to = (token * args.heads + head) * args.chunks + chunk;
                let to = partial.at(to as u64 * args.latent as u64);
                unroll!(j < N, {
                    to.store(c + j as u32, o[h][j]);
                });
            }
        });
        c += N as u32 * THREADS;
    }
}

/// # Safety
/// As the kernels'. `position` has 64 elements, `score` `[heads of the block, 64]`.
#[inline(always)]
unsafe fn chunk_of<E: Entry>(args: AttentionArgs, position: Shared<u32>, score: Shared<f32>) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let softmax = unsafe { GlobalMut::<f32>::new(args.softmax) };
    let (chunk, token) = (thread::block_idx_x(), thread::block_idx_z());
    let head0 = thread::block_idx_y() * HEADS;
    let lane = warp::lane_id();
    let warp = warp::warp_id();
    let seen = count(&args, token);
    if chunk * CHUNK >= seen {
        return;
    }
    let n = (seen - chunk * CHUNK).min(CHUNK);
    // SAFETY: the caller's.
    unsafe { listed(&args, token, n, position) };
    thread::sync_threads();

    if args.vector != 0 {
        scores::<E, true>(args, head0, token, n, position, score);
    } else {
        scores::<E, false>(args, head0, token, n, position, score);
    }
    thread::sync_threads();

    if warp < HEADS {
        let at = warp * CHUNK + lane;
        let there = [lane < n, lane + 32 < n];
        let a = score.load(if there[0] { at } else { warp * CHUNK });
        let b = score.load(if there[1] { at + 32 } else { warp * CHUNK });
        let (p, m, l) = softmax_of([a, b], there);
        warp::sync_warp();
        if there[0] {
            score.store(at, p[0]);
        }
        if there[1] {
            score.store(at + 32, p[1]);
        }
        let head = head0 + warp;
        if lane == 0 && head < args.heads {
            let to = ((token * args.heads + head) * args.chunks + chunk) * 2;
            softmax.store(to, m);
            softmax.store(to + 1, l);
        }
    }
    thread::sync_threads();

    if size_of::<E>() == 2 && args.vector != 0 {
        sums::<E, 2>(args, n, position, score);
    } else {
        sums::<E, 1>(args, n, position, score);
    }
}

/// Softmax state and weighted sum of one chunk.
///
/// # Safety
/// The views must be live and as long as [`AttentionArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn attention_chunk(args: AttentionArgs) {
    let position = shared_array![u32; 64];
    let score = shared_array![f32; 256];
    // SAFETY: the caller's.
    unsafe { chunk_of::<f32>(args, position, score) }
}

/// The same of cache rows of bf16.
///
/// # Safety
/// As [`attention_chunk()`].
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn attention_chunk_bf16(args: AttentionArgs) {
    let position = shared_array![u32; 64];
    let score = shared_array![f32; 256];
    // SAFETY: the caller's.
    unsafe { chunk_of::<u16>(args, position, score) }
}
