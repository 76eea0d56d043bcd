//! Multi-head latent attention in blocks of many heads: the chunks of [`mod@crate::attention`], to the same
//! bits.
//!
//! Per token, chunk of 64 listed positions and head: `s_i = scaling * dot(q, row_i)`, `m = max s`,
//! `p_i = exp(s_i - m)`, `l = sum p`, `o[c] = sum p_i row_i[c]` by ascending `i`.
//!
//! 1. One block takes one chunk of one token. Its rows lie in shared memory as f32 for all heads, which it
//!    takes 16 at a time, or eight where that leaves too few blocks: rows come from L2 once for scores and
//!    sums of all heads. Rows of bf16 are widened on the way.
//! 2. Scores: the sum of 256 partial sums is pairwise within an octet of neighbours, then halves octets at
//!    distances 16, 8, 4, 2, 1. A lane computes four heads times four positions and of their columns one of
//!    `G` parts, the octets that are equal modulo `G` (four; eight of eight heads), in the order in which
//!    halving adds them up. Distances below `G` are from part to part, which are warps: the softmax adds
//!    those. There is no shuffle, and a loaded element serves four products. What has no columns is not
//!    multiplied: a product with 0 would turn a partial sum of -0 into +0.
//! 3. Lanes that differ in bit 0 read the same row, those that differ in bit 1 the same query: 16-byte loads
//!    of half a warp are 128 bytes at most of either, in different banks.
//! 4. Softmax: a warp takes two heads (one of eight), lane `i` positions `i` and `i + 32`.
//! 5. Sum: a thread takes four columns of half of the heads, whose probabilities are neighbours.
//! 6. Of every `16 G` columns the first half is copied ahead of the other, since halving takes it first: half
//!    of what the first heads wait for comes while the other is multiplied. (Rows of bf16 pass registers, so
//!    that they are there at once.) The next heads' queries are copied during softmax and sum.
//!
//! Heads past the end repeat the last one and are not stored; positions past the end repeat the last one and
//! are not summed. [`mod@crate::attention_merge`] follows.
//!
//! Limits: what [`AttentionArgs::vector`] says holds, `latent` is a multiple of 4, `latent + rope` at most
//! [`WIDTH`], and the block has [`shared_bytes`] of dynamic shared memory: 206 KiB for 16 heads of 576 columns.

use bytemuck::Pod;
use cuda_std::mem::{Global, GlobalMut, cp_async_16, cp_async_commit, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

use crate::arith::{ATTENTION_CHUNK, fma};
use crate::attention::{AttentionArgs, count, listed, softmax_of};
use crate::dot::STEP;
use crate::unroll;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Heads that a block takes at a time.
pub const HEADS: u32 = 16;

/// The same of [`attention_chunk_eight()`].
pub const FEWER: u32 = 8;

/// Columns of a row at most.
pub const WIDTH: u32 = SEGMENTS * STEP;

/// Times that a lane takes eight columns at most.
const SEGMENTS: u32 = 3;

const CHUNK: u32 = ATTENTION_CHUNK as u32;
/// Warps of a block.
const WARPS: u32 = THREADS / 32;
/// Heads, and positions, of a lane.
const T: usize = 4;
/// Threads that sum the same heads.
const SUM_THREADS: u32 = THREADS / 2;

/// Columns that these sum at a time.
pub const SUM_COLUMNS: u32 = 4 * SUM_THREADS;

/// Shared memory that a block has besides: u32 `[64]` positions.
pub const FIXED_BYTES: u32 = 4 * CHUNK;

/// Words of a row in shared memory: those of eight neighbouring rows are in different banks.
#[inline(always)]
const fn stride(width: u32) -> u32 {
    width.next_multiple_of(32) + 4
}

/// Words from position to position of what there is of `heads` heads: those of eight neighbouring positions
/// are in different banks.
#[inline(always)]
const fn pad(heads: u32) -> u32 {
    heads + 4
}

/// Dynamic shared memory of a block of `heads` heads, [`HEADS`] or [`FEWER`], for rows of `width` columns: f32
/// `[64, stride]` rows, `[heads, stride]` queries, `[64 / heads, 64, pad]` parts of dot products, `[64, pad]`
/// probabilities.
pub const fn shared_bytes(width: u32, heads: u32) -> u32 {
    4 * ((CHUNK + heads) * stride(width) + (64 / heads + 1) * CHUNK * pad(heads))
}

/// Of four heads and four positions.
type Tile = [[f32; T]; T];

/// How cache rows come to shared memory.
trait Stored: Pod {
    /// Starts the copies of `rows` to words `at`, by a warp: of every two `span`s of columns the first, or the
    /// other with `odd`.
    fn fetch<const N: usize>(
        to: Shared<f32>,
        at: [u32; N],
        rows: [Global<Self>; N],
        width: u32,
        span: u32,
        odd: u32,
    );
}

impl Stored for f32 {
    #[inline(always)]
    fn fetch<const N: usize>(
        to: Shared<f32>,
        at: [u32; N],
        rows: [Global<f32>; N],
        width: u32,
        span: u32,
        odd: u32,
    ) {
        let lane = warp::lane_id();
        let lanes = span / 4;
        let mut k = 2 * span * (lane / lanes) + span * odd + 4 * (lane % lanes);
        while k < width {
            unroll!(j < N, {
                cp_async_16(to, at[j] + k, rows[j], k);
            });
            k += 256;
        }
    }
}

/// bf16.
impl Stored for u16 {
    #[inline(always)]
    fn fetch<const N: usize>(
        to: Shared<f32>,
        at: [u32; N],
        rows: [Global<u16>; N],
        width: u32,
        span: u32,
        odd: u32,
    ) {
        let lane = warp::lane_id();
        let lanes = span / 8;
        let mut k = 2 * span * (lane / lanes) + span * odd + 8 * (lane % lanes);
        while k < width {
            let mut words = [[0u32; 4]; N];
            unroll!(j < N, {
                words[j] = rows[j].load_v4(k / 2);
            });
            unroll!(j < N, {
                let [a, b, c, d] = words[j];
                let (low, high) = (|x: u32| x << 16, |x: u32| x & 0xffff_0000);
                to.store_v4(at[j] + k, [low(a), high(a), low(b), high(b)]);
                to.store_v4(at[j] + k + 4, [low(c), high(c), low(d), high(d)]);
            });
            k += 512;
        }
    }
}

/// Words `word..word + 4` as f32.
#[inline(always)]
fn load4(from: Shared<f32>, word: u32) -> [f32; 4] {
    from.load_v4(word).map(f32::from_bits)
}

/// `p[i] = fma(x[i], y[i], p[i])`.
#[inline(always)]
fn fma4(p: &mut [f32; 4], x: &[f32; 4], y: &[f32; 4]) {
    unroll!(i < 4, {
        p[i] = fma(x[i], y[i], p[i]);
    });
}

#[inline(always)]
fn plus(a: &Tile, b: &Tile) -> Tile {
    let mut sums = *a;
    unroll!(i < T, {
        unroll!(j < T, {
            sums[i][j] = a[i][j] + b[i][j];
        });
    });
    sums
}

/// What a lane multiplies with each other: queries of its heads, rows of its positions.
#[derive(Clone, Copy)]
struct Mine {
    queries: [Shared<f32>; T],
    rows: [Shared<f32>; T],
}

/// Partial sums of four columns from `k` on, over `S` segments, added pairwise.
#[inline(always)]
fn four_columns<const S: usize>(mine: &Mine, k: u32) -> Tile {
    let mut p = [[[0.0f32; 4]; T]; T];
    unroll!(s < S, {
        let k = k + s as u32 * STEP;
        let (mut xs, mut ys) = ([[0.0f32; 4]; T], [[0.0f32; 4]; T]);
        unroll!(i < T, {
            xs[i] = load4(mine.queries[i], k);
            ys[i] = load4(mine.rows[i], k);
        });
        unroll!(i < T, {
            unroll!(j < T, {
                fma4(&mut p[i][j], &xs[i], &ys[j]);
            });
        });
    });
    let mut sums = [[0.0; T]; T];
    unroll!(i < T, {
        unroll!(j < T, {
            let [a, b, c, d] = p[i][j];
            sums[i][j] = (a + b) + (c + d);
        });
    });
    sums
}

/// Sums of one octet of columns from `k` on, over `S` segments.
#[inline(always)]
fn octet<const S: usize>(mine: &Mine, k: u32) -> Tile {
    let mut from = *mine;
    unroll!(i < T, {
        from.queries[i] = mine.queries[i].at(k);
        from.rows[i] = mine.rows[i].at(k);
    });
    plus(&four_columns::<S>(&from, 0), &four_columns::<S>(&from, 4))
}

/// Of a lane's part of dot products what halving at distances from 16 to `2 G` leaves of octets
/// `part + G c`, of even `c` or of odd ones.
#[inline(always)]
fn dots<const G: usize>(mine: &Mine, width: u32, part: u32, odd: u32) -> Tile {
    const NONE: Tile = [[0.0; T]; T];
    let (mut one, mut two) = (NONE, NONE);
    let mut i = 0;
    loop {
        // 0, 4, 2, 6; of eight parts 0, 2.
        let c = if G == 4 {
            (i & 1) << 2 | i & 2 | odd
        } else {
            i << 1 | odd
        };
        let k = 8 * (part + G as u32 * c);
        let sums = if k + 2 * STEP < width {
            octet::<3>(mine, k)
        } else if k + STEP < width {
            octet::<2>(mine, k)
        } else if k < width {
            octet::<1>(mine, k)
        } else {
            NONE
        };
        if i & 1 == 0 {
            one = sums;
        } else {
            let sums = plus(&one, &sums);
            if G == 8 {
                return sums;
            }
            if i == 3 {
                return plus(&two, &sums);
            }
            two = sums;
        }
        i += 1;
    }
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct Near {
    /// Rows, then queries.
    rows: Shared<f32>,
    parts: Shared<f32>,
    score: Shared<f32>,
}

/// Starts the copies of half of the columns of the queries of heads `head0..head0 + 8 N`, head `4 a + b` to row
/// `a + 2 N b`: what lanes read together is neighbouring.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn fetch_queries<const G: usize, const N: usize>(
    args: &AttentionArgs,
    near: Near,
    token: u32,
    head0: u32,
    odd: u32,
) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let q = unsafe { Global::<f32>::new(args.q) };
    let width = args.latent + args.rope;
    let (mut at, mut rows) = ([0; N], [q; N]);
    unroll!(j < N, {
        let h = warp::warp_id() + WARPS * j as u32;
        let head = (head0 + h).min(args.heads - 1);
        at[j] = (CHUNK + h / 4 + h % 4 * 2 * N as u32) * stride(width);
        rows[j] = q.at((token * args.q_stride + head * width) as u64);
    });
    f32::fetch(near.rows, at, rows, width, 8 * G as u32, odd);
}

/// Starts the copies of half of the columns of the rows of `n` positions, and of others up to whole `8 G`,
/// which are multiplied though not summed.
#[inline(always)]
fn fetch_rows<E: Stored, const G: usize>(
    near: Near,
    cache: Global<E>,
    width: u32,
    n: u32,
    position: Shared<u32>,
    odd: u32,
) {
    let mut first = 0;
    while first < n {
        let (mut at, mut rows) = ([0; G], [cache; G]);
        unroll!(j < G, {
            let i = first + warp::warp_id() + WARPS * j as u32;
            at[j] = i * stride(width);
            rows[j] = cache.at(position.load(i.min(n - 1)) as u64 * width as u64);
        });
        E::fetch(near.rows, at, rows, width, 8 * G as u32, odd);
        first += 8 * G as u32;
    }
}

/// Parts of dot products, by warps; `n` positions. What both halves of the columns need has been copied or
/// is on its way in two groups.
#[inline(always)]
fn scores<const G: usize, const N: usize>(near: Near, width: u32, n: u32) {
    let (lane, warp) = (warp::lane_id(), warp::warp_id());
    let parts = G as u32;
    let (part, first) = (warp % parts, warp / parts * 8 * parts);
    let i = lane / 2 % (2 * parts);
    let h = if N == 2 {
        lane & 1 | lane >> 4 << 1
    } else {
        lane & 1
    };
    let stride = stride(width);
    let mut mine = Mine {
        queries: [near.rows; T],
        rows: [near.rows; T],
    };
    unroll!(j < T, {
        mine.queries[j] = near.rows.at((CHUNK + h + (2 * N * j) as u32) * stride);
        mine.rows[j] = near.rows.at((first + i + (2 * G * j) as u32) * stride);
    });
    let mut sums = [[0.0; T]; T];
    let mut odd = 0;
    while odd < 2 {
        if odd == 0 {
            cp_async_wait::<1>();
        } else {
            cp_async_wait::<0>();
        }
        thread::sync_threads();
        if first < n {
            let half = dots::<G>(&mine, width, part, odd);
            sums = if odd == 0 { half } else { plus(&sums, &half) };
        }
        odd += 1;
    }
    if first < n {
        unroll!(j < T, {
            let row = part * CHUNK + first + i + (2 * G * j) as u32;
            let at = row * pad(8 * N as u32) + 4 * h;
            let of = [sums[0][j], sums[1][j], sums[2][j], sums[3][j]];
            near.parts.store_v4(at, of.map(f32::to_bits));
        });
    }
}

/// Words `word..word + N`, one or two, as f32.
#[inline(always)]
fn load_n<const N: usize>(from: Shared<f32>, word: u32) -> [f32; N] {
    let mut v = [0.0; N];
    if N == 2 {
        let [a, b] = from.load_v2(word);
        v[0] = f32::from_bits(a);
        v[N - 1] = f32::from_bits(b);
    } else {
        v[0] = from.load(word);
    }
    v
}

/// Probabilities of a warp's `N` heads; stores their softmax states.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn probabilities<const G: usize, const N: usize>(
    args: &AttentionArgs,
    near: Near,
    token: u32,
    head0: u32,
    n: u32,
) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let softmax = unsafe { GlobalMut::<f32>::new(args.softmax) };
    let lane = warp::lane_id();
    let first = N as u32 * warp::warp_id();
    let there = [lane < n, lane + 32 < n];
    // [position][head]
    let mut score = [[0.0f32; N]; 2];
    unroll!(i < 2, {
        let p = if there[i] { lane + 32 * i as u32 } else { 0 };
        let mut parts = [[0.0f32; N]; G];
        unroll!(r < G, {
            let at = (r as u32 * CHUNK + p) * pad(8 * N as u32) + first;
            parts[r] = load_n::<N>(near.parts, at);
        });
        unroll!(h < N, {
            let quarter = |r: usize| {
                if G == 8 {
                    parts[r][h] + parts[r + 4][h]
                } else {
                    parts[r][h]
                }
            };
            let dot = (quarter(0) + quarter(2)) + (quarter(1) + quarter(3));
            score[i][h] = args.scaling * dot;
        });
    });
    unroll!(h < N, {
        let (p, m, l) = softmax_of([score[0][h], score[1][h]], there);
        score[0][h] = p[0];
        score[1][h] = p[1];
        let head = head0 + first + h as u32;
        if lane == 0 && head < args.heads {
            let to = ((token * args.heads + head) * args.chunks + thread::block_idx_x()) * 2;
            softmax.store(to, m);
            softmax.store(to + 1, l);
        }
    });
    unroll!(i < 2, {
        if there[i] {
            let at = (lane + 32 * i as u32) * pad(8 * N as u32) + first;
            unroll!(h < N, {
                near.score.store(at + h as u32, score[i][h]);
            });
        }
    });
}

/// Sums of four columns, of `N` times four heads.
type Sums<const N: usize> = [[[f32; 4]; 4]; N];

/// Weighted sums, a thread four neighbouring columns of `4 N` heads.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn sums<const N: usize>(args: &AttentionArgs, near: Near, token: u32, head0: u32, n: u32) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let partial = unsafe { GlobalMut::<f32>::new(args.partial) };
    let stride = stride(args.latent + args.rope);
    let first = warp::warp_id() * 32 / SUM_THREADS * 4 * N as u32;
    let mut c = 4 * (thread::thread_idx_x() % SUM_THREADS);
    while c < args.latent {
        let mut o = [[[0.0f32; 4]; 4]; N];
        let mut i = 0;
        while i + 8 <= n {
            unroll!(j < 8, {
                add_row(near, i + j as u32, stride, c, first, &mut o);
            });
            i += 8;
        }
        while i < n {
            add_row(near, i, stride, c, first, &mut o);
            i += 1;
        }
        unroll!(g < N, {
            unroll!(h < 4, {
                let head = head0 + first + (4 * g + h) as u32;
                if head < args.heads {
                    let to = (token * args.heads + head) * args.chunks + thread::block_idx_x();
                    let to = partial.at(to as u64 * args.latent as u64);
                    to.store_v4(c, o[g][h].map(f32::to_bits));
                }
            });
        });
        c += SUM_COLUMNS;
    }
}

/// Adds a position's row to the sums.
#[inline(always)]
fn add_row<const N: usize>(near: Near, i: u32, stride: u32, c: u32, first: u32, o: &mut Sums<N>) {
    let v = load4(near.rows, i * stride + c);
    unroll!(g < N, {
        let p = load4(near.score, i * pad(8 * N as u32) + first + 4 * g as u32);
        unroll!(h < 4, {
            fma4(&mut o[g][h], &[p[h]; 4], &v);
        });
    });
}

/// `G` parts, eight times `N` heads at a time: `G` times `N` is 8.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn chunk_of<E: Stored, const G: usize, const N: usize>(args: AttentionArgs) {
    const { assert!(G * N == WARPS as usize && (N == 1 || N == 2)) };
    let position = shared_array![u32; 64];
    let heads = 8 * N as u32;
    let (chunk, token) = (thread::block_idx_x(), thread::block_idx_z());
    let seen = count(&args, token);
    if chunk * CHUNK >= seen {
        return;
    }
    let n = (seen - chunk * CHUNK).min(CHUNK);
    let width = args.latent + args.rope;
    // SAFETY: the caller's: a live view, as long as the arguments say; the launch has that much shared
    // memory.
    let (cache, all) = unsafe {
        (
            Global::<E>::new(args.cache),
            Shared::<f32>::dynamic(0, shared_bytes(width, heads) / 4),
        )
    };
    let (rows, of_part) = ((CHUNK + heads) * stride(width), CHUNK * pad(heads));
    let near = Near {
        rows: all.part(0, rows),
        parts: all.part(rows, G as u32 * of_part),
        score: all.part(rows + G as u32 * of_part, of_part),
    };
    let mut head0 = thread::block_idx_y() * heads;
    // SAFETY: the caller's.
    unsafe { listed(&args, token, n, position) };
    thread::sync_threads();
    unroll!(odd < 2, {
        // SAFETY: the caller's.
        unsafe { fetch_queries::<G, N>(&args, near, token, head0, odd as u32) };
        fetch_rows::<E, G>(near, cache, width, n, position, odd as u32);
        cp_async_commit();
    });
    while head0 < args.heads {
        scores::<G, N>(near, width, n);
        thread::sync_threads();
        let next = head0 + thread::grid_dim_y() * heads;
        // SAFETY: the caller's; nobody reads queries up to the next barrier in `scores`.
        unsafe {
            if next < args.heads {
                unroll!(odd < 2, {
                    fetch_queries::<G, N>(&args, near, token, next, odd as u32);
                    cp_async_commit();
                });
            }
            probabilities::<G, N>(&args, near, token, head0, n);
            thread::sync_threads();
            sums::<N>(&args, near, token, head0, n);
        }
        head0 = next;
    }
}

/// Softmax state and weighted sum of one chunk of all heads, [`HEADS`] at a time. Grid: `[chunks, times that so
/// many heads are taken side by side, tokens]`, [`THREADS`] threads.
///
/// # Safety
/// The views must be live and as long as [`AttentionArgs`] says, and the module's limits hold.
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn attention_chunk_many(args: AttentionArgs) {
    // SAFETY: the caller's.
    unsafe { chunk_of::<f32, 4, 2>(args) }
}

/// The same of cache rows of bf16.
///
/// # Safety
/// As [`attention_chunk_many()`].
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn attention_chunk_many_bf16(args: AttentionArgs) {
    // SAFETY: the caller's.
    unsafe { chunk_of::<u16, 4, 2>(args) }
}

/// As [`attention_chunk_many()`], [`FEWER`] heads at a time.
///
/// # Safety
/// As [`attention_chunk_many()`].
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn attention_chunk_eight(args: AttentionArgs) {
    // SAFETY: the caller's.
    unsafe { chunk_of::<f32, 8, 1>(args) }
}

/// The same of cache rows of bf16.
///
/// # Safety
/// As [`attention_chunk_many()`].
#[kernel(threads = 256, min_blocks = 1)]
pub unsafe fn attention_chunk_eight_bf16(args: AttentionArgs) {
    // SAFETY: the caller's.
    unsafe { chunk_of::<u16, 8, 1>(args) }
}
