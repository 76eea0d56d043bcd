//! Dense rows times many tokens: `linear_tile` (bf16), `linear_int8_tile` (bytes).
//!
//! `out[t][r] = scaled(dot(weight[r], x[t]))`, plus what was there with [`ADD`], as [`mod@crate::dense`] has
//! it. A dot product is the sum of 256 partial sums, of which number `c` adds up the products of columns
//! `c`, `c + 256`, ... in that order: pairwise over each octet of neighbours, then by halving over the octets.
//!
//! 1. Partial sums know nothing of each other. A block, of [`ROWS`] rows and [`TOKENS`] tokens, takes 16
//!    neighbouring ones at a time, a group, through all segments of 256 columns; each of its eight warps
//!    has two of them, a quarter of an octet, of all its rows and tokens; a thread those of eight rows
//!    and eight tokens, so that a word from shared memory serves eight products.
//! 2. A stage is [`SEGMENTS`] segments of a group. [`DEPTH`] stages are under way: while one is multiplied, the
//!    next one's weights are laid out for it by the threads that copied them, and those after it are being
//!    copied to shared memory.
//! 3. Weights are laid out as bf16, which holds a signed byte exactly, two columns a word: shared memory's words
//!    are what this kernel is short of, beside latency, since registers leave a scheduler two warps.
//! 4. A group's sums: warps of an octet exchange them, first in pairs, half of the rows each, then pairs with
//!    pairs. Groups come with the bits of their numbers turned round (0, 8, 4, 12, 2, ...), in which order
//!    halving adds up octets 16, 8, 4 and 2 apart: sums that wait for their other half are two sets in
//!    registers and two in shared memory.
//! 5. At the end octets 1 apart, which other warps have, through shared memory.
//! 6. Rows and tokens past the end repeat the last one and are not stored.
//!
//! Limits: columns are a multiple of [`COLUMNS`], and what [`VECTOR`](crate::dense::VECTOR) says holds.
//!
//! Shared memory: [`shared_bytes`].

use cuda_std::intrinsics::prmt;
use cuda_std::mem::{Global, GlobalMut, cp_async_8, cp_async_16, cp_async_commit, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::dense::LinearArgs;

use crate::arith::fma;
use crate::dense::{ADD, Weights};
use crate::dot::STEP;
use crate::linear::{Bf16, widen2};
use crate::linear_int8::Int8;
use crate::unroll;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Rows of a block.
pub const ROWS: u32 = 64;

/// Tokens of a block.
pub const TOKENS: u32 = 32;

/// Segments of 256 columns that a stage has.
pub const SEGMENTS: u32 = 2;

/// Columns are a multiple of this.
pub const COLUMNS: u32 = SEGMENTS * STEP;

/// Stages under way.
pub const DEPTH: u32 = 3;

/// Columns of a group.
const GROUP: u32 = 16;
/// Groups of a segment.
const GROUPS: u32 = STEP / GROUP;
/// Parts of four columns of a group, each of two warps.
const PARTS: u32 = GROUP / 4;

/// Words from one pair of columns to the next of weights as they are multiplied, and from part to part of
/// activations: more than there are rows and tokens, so that threads that store to several use different banks.
const COLUMN_PAIR: u32 = ROWS + 4;
const TOKEN_PART: u32 = 4 * (TOKENS + 2);
/// Words of a segment's weights.
const SEGMENT_PAIRS: u32 = GROUP / 2 * COLUMN_PAIR;
/// Words of a stage's weights as they are multiplied, and of its activations.
const PAIRS: u32 = SEGMENTS * SEGMENT_PAIRS;
const X: u32 = SEGMENTS * PARTS * TOKEN_PART;
/// Words of sums of one row and eight tokens a thread.
const A_ROW: u32 = 8 * THREADS;

/// Words of a stage as it is copied, weights of which take `words` a thread.
const fn copied(words: u32) -> u32 {
    X + words * THREADS
}

/// Bytes of shared memory, for weights of bytes or of bf16: stages as copied, weights of two laid out, sums of
/// four rows a thread to exchange, of two rows that wait, twice.
pub const fn shared_bytes(int8: bool) -> u32 {
    let words = if int8 { Int8::WORDS } else { Bf16::WORDS };
    4 * (DEPTH * copied(words) + 2 * PAIRS + (4 + 2 * 2) * A_ROW)
}

/// Weights that bf16 holds exactly.
trait TileWeights: Weights {
    /// Eight of them as bf16: two neighbours a word, the first in the low half.
    fn pairs(words: Self::Words) -> [u32; 4];
    /// Words that eight of them take in shared memory.
    const WORDS: u32;
    /// Starts copying eight from element `at` on to word `word` of `to`.
    fn copy(w: &Global<Self::Element>, at: u32, to: Shared<u32>, word: u32);
    /// Those eight.
    fn take(from: Shared<u32>, word: u32) -> Self::Words;
}

impl TileWeights for Bf16 {
    #[inline(always)]
    fn pairs(w: [u32; 4]) -> [u32; 4] {
        w
    }

    const WORDS: u32 = 4;

    #[inline(always)]
    fn copy(w: &Global<u16>, at: u32, to: Shared<u32>, word: u32) {
        cp_async_16(to, word, *w, at / 2);
    }

    #[inline(always)]
    fn take(from: Shared<u32>, word: u32) -> [u32; 4] {
        from.load_v4(word)
    }
}

impl TileWeights for Int8 {
    #[inline(always)]
    fn pairs(w: [u32; 2]) -> [u32; 4] {
        // The upper halves: integers up to 256 have no bits below.
        let w = Self::widen(w).map(f32::to_bits);
        let pair = |i: usize| prmt(w[i], w[i + 1], 0x7632);
        [pair(0), pair(2), pair(4), pair(6)]
    }

    const WORDS: u32 = 2;

    #[inline(always)]
    fn copy(w: &Global<u8>, at: u32, to: Shared<u32>, word: u32) {
        cp_async_8(to, word, *w, at / 4);
    }

    #[inline(always)]
    fn take(from: Shared<u32>, word: u32) -> [u32; 2] {
        from.load_v2(word)
    }
}

/// Rows and tokens of a thread.
const R: usize = 8;
const T: usize = 8;

/// Partial sums of a thread.
type Sums = [[[f32; 2]; T]; R];

/// Sums of N rows.
type Of<const N: usize> = [[f32; T]; N];

#[inline(always)]
fn plus<const N: usize>(a: Of<N>, b: Of<N>) -> Of<N> {
    let mut sums = a;
    unroll!(i < N, {
        unroll!(j < T, {
            sums[i][j] = a[i][j] + b[i][j];
        });
    });
    sums
}

/// Stores a thread's sums in shared memory, at word `at` on, as `warp` does.
#[inline(always)]
fn put<const N: usize>(shared: Shared<u32>, at: u32, warp: u32, sums: &Of<N>) {
    let at = at + warp * (N as u32 * 8 * 32) + 4 * warp::lane_id();
    unroll!(i < N, {
        let row = sums[i].map(f32::to_bits);
        let at = at + 256 * i as u32;
        shared.store_v4(at, [row[0], row[1], row[2], row[3]]);
        shared.store_v4(at + 128, [row[4], row[5], row[6], row[7]]);
    });
}

#[inline(always)]
fn get<const N: usize>(shared: Shared<u32>, at: u32, warp: u32) -> Of<N> {
    let at = at + warp * (N as u32 * 8 * 32) + 4 * warp::lane_id();
    let mut sums = [[0.0; T]; N];
    unroll!(i < N, {
        let at = at + 256 * i as u32;
        let (a, b) = (shared.load_v4(at), shared.load_v4(at + 128));
        sums[i] = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(f32::from_bits);
    });
    sums
}

/// The first N rows, and the others; the other way round where `swap`.
#[inline(always)]
fn halves<const M: usize, const N: usize>(sums: Of<M>, swap: bool) -> (Of<N>, Of<N>) {
    let (mut own, mut other) = ([[0.0; T]; N], [[0.0; T]; N]);
    unroll!(i < N, {
        unroll!(j < T, {
            let (low, high) = (sums[i][j], sums[N + i][j]);
            own[i][j] = if swap { high } else { low };
            other[i][j] = if swap { low } else { high };
        });
    });
    (own, other)
}

/// What a thread copies and lays out: an octet of a row's columns, and four columns of a token.
struct Place<W: TileWeights> {
    weight: Global<W::Element>,
    x: Global<u32>,
    /// Where its activations go in a stage as it is copied; weights are behind all of these.
    x_to: u32,
    /// Where its first two weights go in those of a stage that are laid out.
    pairs_to: u32,
    shared: Shared<u32>,
}

impl<W: TileWeights> Place<W> {
    #[inline(always)]
    fn weights_at(stage: u32) -> u32 {
        stage + X + W::WORDS * thread::thread_idx_x()
    }

    /// Starts copying the weights of the stage whose first column is `column` to word `stage`.
    #[inline(always)]
    fn copy_weights(&self, column: u32, stage: u32) {
        W::copy(&self.weight, column, self.shared, Self::weights_at(stage));
    }

    /// The same of activations.
    #[inline(always)]
    fn copy_x(&self, column: u32, stage: u32) {
        cp_async_16(self.shared, stage + self.x_to, self.x, column);
    }

    /// What it copied of the weights of the stage at word `stage`.
    #[inline(always)]
    fn take(&self, stage: u32) -> W::Words {
        W::take(self.shared, Self::weights_at(stage))
    }

    /// Lays them out among those at word `pairs` on.
    #[inline(always)]
    fn lay_out(&self, words: W::Words, pairs: u32) {
        let words = W::pairs(words);
        unroll!(i < 4, {
            let to = pairs + self.pairs_to + i as u32 * COLUMN_PAIR;
            self.shared.store(to, words[i]);
        });
    }
}

/// A stage. Those of a group come one behind the other, groups in their order.
#[derive(Clone, Copy)]
struct Stage {
    cols: u32,
    /// How many groups came before, and the first column.
    n: u32,
    column: u32,
    /// Where it is, or will be, in shared memory: one of [`DEPTH`] places of `size` words.
    at: u32,
    size: u32,
}

impl Stage {
    /// The first column of group `n`: four bits, turned round.
    #[inline(always)]
    fn first(n: u32) -> u32 {
        ((n & 1) << 3 | (n & 2) << 1 | n >> 1 & 2 | n >> 3) * GROUP
    }

    /// Goes on to the next one; whether that is of another group.
    #[inline(always)]
    fn step(&mut self) -> bool {
        self.at += self.size;
        if self.at == DEPTH * self.size {
            self.at = 0;
        }
        self.column += COLUMNS;
        let over = self.column >= self.cols;
        if over {
            self.n += 1;
            self.column = Self::first(self.n);
        }
        over
    }

    #[inline(always)]
    fn there(&self) -> bool {
        self.n < GROUPS
    }
}

/// Multiplies a stage, segments in order: the warp's two columns of a thread's tokens, whose first is at word
/// `tokens`, and of its rows, at word `rows`.
#[inline(always)]
fn multiply(shared: Shared<u32>, tokens: u32, rows: u32, sums: &mut Sums) {
    unroll!(s < SEGMENTS as usize, {
        let tokens = tokens + s as u32 * PARTS * TOKEN_PART;
        let rows = rows + s as u32 * SEGMENT_PAIRS;
        let mut x = [[0.0f32; 2]; T];
        unroll!(j < T, {
            x[j] = shared.load_v2(tokens + 16 * j as u32).map(f32::from_bits);
        });
        let w = [shared.load_v4(rows), shared.load_v4(rows + 32)];
        unroll!(i < R, {
            let w = widen2(w[i / 4][i % 4]);
            unroll!(j < T, {
                unroll!(c < 2, {
                    sums[i][j][c] = fma(w[c], x[j][c], sums[i][j][c]);
                });
            });
        });
    });
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn body<W: TileWeights>(args: LinearArgs) {
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, shared_bytes(W::WORDS == Int8::WORDS) / 4) };
    let size = copied(W::WORDS);
    let pairs = DEPTH * size;
    let exchange = pairs + 2 * PAIRS;
    let waiting = [exchange + 4 * A_ROW, exchange + 6 * A_ROW];
    let t = thread::thread_idx_x();
    let (lane, warp) = (warp::lane_id(), warp::warp_id());
    let first_row = thread::block_idx_y() * ROWS;
    let first_token = thread::block_idx_x() * TOKENS;
    let batch = thread::block_idx_z();
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, out) = unsafe {
        (
            Global::<u32>::new(args.x).at((batch * args.x_batch) as u64),
            Global::<W::Element>::new(args.weight),
            GlobalMut::<f32>::new(args.out).at((batch * args.out_batch) as u64),
        )
    };
    let row = batch * args.weight_batch + (first_row + t % 128 / 2).min(args.rows - 1);
    let token = (first_token + t % 128 / 4).min(args.tokens - 1);
    let at = Place::<W> {
        weight: weight.at(row as u64 * args.cols as u64 + u64::from(t / 128 * STEP + t % 2 * 8)),
        x: x.at(u64::from(
            token * args.x_stride + t / 128 * STEP + t % 4 * 4,
        )),
        x_to: (t / 128 * PARTS + t % 4) * TOKEN_PART + t % 128 / 4 * 4,
        pairs_to: t / 128 * SEGMENT_PAIRS + t % 2 * 4 * COLUMN_PAIR + t % 128 / 2,
        shared,
    };
    let first = Stage {
        cols: args.cols,
        n: 0,
        column: 0,
        at: 0,
        size,
    };
    let (mut now, mut ahead) = (first, first);
    unroll!(_stage < (DEPTH - 1) as usize, {
        at.copy_weights(ahead.column, ahead.at);
        ahead.step();
    });
    grid::wait();
    ahead = first;
    unroll!(_stage < (DEPTH - 1) as usize, {
        at.copy_x(ahead.column, ahead.at);
        cp_async_commit();
        ahead.step();
    });
    cp_async_wait::<{ DEPTH - 2 }>();
    at.lay_out(at.take(now.at), pairs);
    thread::sync_threads();

    // The thread's rows and tokens, and the warp's two columns.
    let tokens = warp / 2 * TOKEN_PART + lane / 8 * 4 + warp % 2 * 2;
    let rows = pairs + warp * COLUMN_PAIR + lane % 8 * 4;
    let mut buffer = 0;
    let mut pending: [Of<2>; 2] = [[[0.0; T]; 2]; 2];
    while now.there() {
        let n = now.n;
        let mut sums: Sums = [[[0.0; 2]; T]; R];
        let mut over = false;
        while !over {
            // Its place is that of the stage before this one, which all have left.
            if ahead.there() {
                at.copy_weights(ahead.column, ahead.at);
                at.copy_x(ahead.column, ahead.at);
            }
            cp_async_commit();
            ahead.step();
            let at_now = now.at;
            over = now.step();
            // What this thread copied of the next stage is there; taken now, it need not be waited for.
            cp_async_wait::<{ DEPTH - 2 }>();
            let mut words = W::NONE;
            if now.there() {
                words = at.take(now.at);
            }
            multiply(shared, at_now + tokens, buffer + rows, &mut sums);
            buffer = PAIRS - buffer;
            if now.there() {
                at.lay_out(words, pairs + buffer);
            }
            thread::sync_threads();
        }

        let mut quarters: Of<R> = [[0.0; T]; R];
        unroll!(i < R, {
            unroll!(j < T, {
                quarters[i][j] = sums[i][j][0] + sums[i][j][1];
            });
        });
        let (own, other) = halves::<R, 4>(quarters, warp & 1 != 0);
        put(shared, exchange, warp, &other);
        thread::sync_threads();
        let half = plus(own, get(shared, exchange, warp ^ 1));
        let (own, other) = halves::<4, 2>(half, warp & 2 != 0);
        thread::sync_threads();
        put(shared, exchange, warp, &other);
        thread::sync_threads();
        // What is stored there next is behind another stage's barrier.
        let octet = plus(own, get(shared, exchange, warp ^ 2));

        // Octets 16 apart, then 8, 4 and 2: sums that have their other half, and those that wait.
        if n % 2 == 0 {
            pending[0] = octet;
        } else if n % 4 == 1 {
            pending[1] = plus(pending[0], octet);
        } else {
            pending[1] = plus(pending[1], plus(pending[0], octet));
            if n % 8 == 3 {
                put(shared, waiting[0], warp, &pending[1]);
            } else {
                pending[1] = plus(get(shared, waiting[0], warp), pending[1]);
                if n == 7 {
                    put(shared, waiting[1], warp, &pending[1]);
                }
            }
        }
    }
    let sums = plus(get(shared, waiting[1], warp), pending[1]);
    thread::sync_threads();
    put(shared, exchange, warp, &sums);
    thread::sync_threads();

    unroll!(u < (ROWS * TOKENS / THREADS) as usize, {
        let number = u as u32 * THREADS + t;
        let (of_block, token) = (number % ROWS, number / ROWS);
        let (i, j) = (of_block / 32 * 4 + of_block % 4, token / 4);
        let lane = token % 4 * 8 + of_block / 4 % 8;
        let octet = |o: u32| {
            // Pairs of warps have halves of the rows by their last bit, then halves of these.
            let warp = 4 * o + i / 4 + i % 4 / 2 * 2;
            let at = exchange + warp * (2 * 8 * 32) + i % 2 * 256 + j / 4 * 128;
            f32::from_bits(shared.load(at + lane * 4 + j % 4))
        };
        let dot = octet(0) + octet(1);
        let (row, token) = (first_row + of_block, first_token + token);
        if row < args.rows && token < args.tokens {
            // SAFETY: the caller's.
            let scaled = unsafe { W::scaled(&args, batch * args.weight_batch + row, dot) };
            let to = token * args.out_stride + row;
            let sum = if args.flags & ADD != 0 {
                out.load(to) + scaled
            } else {
                scaled
            };
            out.store(to, sum);
        }
    });
}

/// Weights of bf16. Grid: `[ceil(tokens / TOKENS), ceil(rows / ROWS), batches]`, [`THREADS`] threads.
///
/// # Safety
/// The views must be live and as long as [`LinearArgs`] says; no kernel in flight writes the weights.
#[kernel(threads = 256, min_blocks = 1, prologue)]
pub unsafe fn linear_tile(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Bf16>(args) }
}

/// Weights of signed bytes, the same.
///
/// # Safety
/// As [`linear_tile()`].
#[kernel(threads = 256, min_blocks = 1, prologue)]
pub unsafe fn linear_int8_tile(args: LinearArgs) {
    // SAFETY: the caller's.
    unsafe { body::<Int8>(args) }
}
