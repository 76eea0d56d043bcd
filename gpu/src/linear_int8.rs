//! Dense linear layers: rows of signed bytes, with a scale each, times f32 activations.
//!
//! `out[t][r] = dot(weight[r], x[t]) * scales[r]`, plus what was there with [`ADD`]: the dot product as
//! in [`crate::linear`], then a rounded product, then a rounded sum.
//!
//! 1. A warp takes `ROWS` neighbouring rows and `TOKENS` neighbouring tokens, 256 columns at a time, 8
//!    a lane, so that a lane owns the partial sums that it owns in [`crate::linear`]. Rows and tokens
//!    past the end repeat the last one and are not stored.
//! 2. A byte, its sign bit flipped, below `0x4b0000` is the f32 `2^23 + 128 + q`: one permutation and
//!    one exact subtraction widen it.
//! 3. Weights come `STEPS` times 256 columns at once into two register buffers, each reloaded while
//!    the other is multiplied. They are not written while a model runs, so the first buffer is loaded
//!    ahead of the wait for the kernel before.
//! 4. Four shapes. One token: `linear_int8_thin` (one row a warp), `linear_int8_two` and
//!    `linear_int8_four` have 2 KiB a buffer under way a warp; more rows read the activations less
//!    often, fewer keep more multiprocessors at work. Several: `linear_int8_many`, four by four.
//!
//! Limits: all but `linear_int8_thin` need [`VECTOR`].

use bytemuck::{Pod, Zeroable};
use cuda_std::intrinsics::prmt;
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{grid, kernel, thread, warp};

use crate::dot::{STEP, fma8, load8, warp_reduce};
use crate::unroll;

/// Warps of a block.
pub const WARPS: u32 = 4;

/// Flag: add to `out` instead of overwriting it.
pub const ADD: u32 = 1;

/// Flag: columns are a multiple of 8, rows of `x` start at multiples of 16 bytes, the weight at one of
/// 8.
pub const VECTOR: u32 = 2;

/// Arguments. Grid: `[token tiles, row tiles, batches]`, 128 threads; a block has 4 warps.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LinearInt8Args {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// i8 `[rows, cols]` for each batch.
    pub weight: Slice,
    /// f32, one for each row of `weight`.
    pub scales: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Rows of a batch's weight.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Tokens.
    pub tokens: u32,
    /// Elements from row to row of `x`.
    pub x_stride: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Elements of `x` from batch to batch.
    pub x_batch: u32,
    /// Rows of `weight` from batch to batch.
    pub weight_batch: u32,
    /// Elements of `out` from batch to batch.
    pub out_batch: u32,
    /// [`ADD`], [`VECTOR`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Four signed bytes as f32, the first the lowest.
#[inline(always)]
pub fn widen4(word: u32) -> [f32; 4] {
    const EXPONENT: u32 = 0x4b00_0000; // 2^23
    let word = word ^ 0x8080_8080;
    let each = |selector| f32::from_bits(prmt(word, EXPONENT, selector)) - 8_388_736.0;
    [each(0x7440), each(0x7441), each(0x7442), each(0x7443)]
}

/// Where a warp is: its rows of weights, its tokens' activations, its first row and token.
struct Place<const ROWS: usize, const TOKENS: usize> {
    x: Global<f32>,
    out: GlobalMut<f32>,
    weights: [Global<u8>; ROWS],
    from: [u32; TOKENS],
    row: u32,
    token: u32,
}

/// `None` for a warp past the last row. Reads nothing.
#[inline(always)]
fn place<const ROWS: usize, const TOKENS: usize>(
    args: &LinearInt8Args,
) -> Option<Place<ROWS, TOKENS>> {
    let row = (thread::block_idx_y() * WARPS + warp::warp_id()) * ROWS as u32;
    let token = thread::block_idx_x() * TOKENS as u32;
    if row >= args.rows {
        return None;
    }
    let batch = thread::block_idx_z();
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, out) = unsafe {
        (
            Global::<f32>::new(args.x).at((batch * args.x_batch) as u64),
            Global::<u8>::new(args.weight),
            GlobalMut::<f32>::new(args.out).at((batch * args.out_batch) as u64),
        )
    };
    let mut weights = [weight; ROWS];
    unroll!(i < ROWS, {
        let row = batch * args.weight_batch + (row + i as u32).min(args.rows - 1);
        weights[i] = weight.at(row as u64 * args.cols as u64);
    });
    let mut from = [0; TOKENS];
    unroll!(j < TOKENS, {
        from[j] = (token + j as u32).min(args.tokens - 1) * args.x_stride;
    });
    Some(Place {
        x,
        out,
        weights,
        from,
        row,
        token,
    })
}

/// Partial sums of a lane, for each row and token.
type Sums<const ROWS: usize, const TOKENS: usize> = [[[f32; 8]; TOKENS]; ROWS];

impl<const ROWS: usize, const TOKENS: usize> Place<ROWS, TOKENS> {
    /// Loads a lane's weights of `STEPS` times 256 columns from `base` on, where `condition` holds.
    #[inline(always)]
    fn load<const STEPS: usize>(
        &self,
        condition: bool,
        base: u32,
        buffer: &mut [[[u32; 2]; STEPS]; ROWS],
    ) {
        let k = base + 8 * warp::lane_id();
        unroll!(s < STEPS, {
            unroll!(i < ROWS, {
                let word = (k + s as u32 * STEP) / 4;
                let words = self.weights[i].cast::<u32>();
                words.reload_v2_stream(condition, word, &mut buffer[i][s]);
            });
        });
    }

    /// Multiplies a lane's weights of 256 columns, the lane's from `k` on.
    #[inline(always)]
    fn step(&self, words: [[u32; 2]; ROWS], k: u32, p: &mut Sums<ROWS, TOKENS>) {
        let mut ws = [[0.0f32; 8]; ROWS];
        unroll!(i < ROWS, {
            let (low, high) = (widen4(words[i][0]), widen4(words[i][1]));
            ws[i] = [
                low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3],
            ];
        });
        unroll!(j < TOKENS, {
            let xs = load8::<true>(self.x, self.from[j], k, 0);
            unroll!(i < ROWS, {
                fma8::<true>(&mut p[i][j], &ws[i], &xs, k, 0);
            });
        });
    }

    /// Multiplies a buffer.
    #[inline(always)]
    fn multiply<const STEPS: usize>(
        &self,
        buffer: &[[[u32; 2]; STEPS]; ROWS],
        base: u32,
        p: &mut Sums<ROWS, TOKENS>,
    ) {
        unroll!(s < STEPS, {
            let mut words = [[0; 2]; ROWS];
            unroll!(i < ROWS, {
                words[i] = buffer[i][s];
            });
            self.step(words, base + s as u32 * STEP + 8 * warp::lane_id(), p);
        });
    }

    /// Lane `i * TOKENS + j` scales and stores row i of token j.
    #[inline(always)]
    fn store(&self, args: &LinearInt8Args, p: &Sums<ROWS, TOKENS>) {
        let lane = warp::lane_id();
        let mut mine = 0.0;
        unroll!(i < ROWS, {
            unroll!(j < TOKENS, {
                let v = warp_reduce(p[i][j]);
                if lane == (i * TOKENS + j) as u32 {
                    mine = v;
                }
            });
        });
        let row = self.row + lane / TOKENS as u32;
        let token = self.token + lane % TOKENS as u32;
        if lane < (ROWS * TOKENS) as u32 && row < args.rows && token < args.tokens {
            // SAFETY: the caller's: a live view, as long as the arguments say.
            let scales = unsafe { Global::<f32>::new(args.scales) };
            let scaled = mine * scales.load_nc(thread::block_idx_z() * args.weight_batch + row);
            let to = token * args.out_stride + row;
            let sum = if args.flags & ADD != 0 {
                self.out.load(to) + scaled
            } else {
                scaled
            };
            self.out.store(to, sum);
        }
    }
}

#[inline(always)]
fn body<const ROWS: usize, const TOKENS: usize, const STEPS: usize>(args: LinearInt8Args) {
    let Some(at) = place::<ROWS, TOKENS>(&args) else {
        grid::wait();
        return;
    };
    let chunk = STEPS as u32 * STEP;
    let whole = args.cols / chunk * chunk;
    let mut buffers = [[[[0u32; 2]; STEPS]; ROWS]; 2];
    at.load(whole > 0, 0, &mut buffers[0]);
    grid::wait();

    let mut p = [[[0.0f32; 8]; TOKENS]; ROWS];
    let mut base = 0;
    while base < whole {
        at.load(base + chunk < whole, base + chunk, &mut buffers[1]);
        at.multiply(&buffers[0], base, &mut p);
        base += chunk;
        if base < whole {
            at.load(base + chunk < whole, base + chunk, &mut buffers[0]);
            at.multiply(&buffers[1], base, &mut p);
            base += chunk;
        }
    }
    let mut k = whole + 8 * warp::lane_id();
    while k < args.cols {
        let mut words = [[0; 2]; ROWS];
        unroll!(i < ROWS, {
            words[i] = at.weights[i].cast::<u32>().load_v2_nc(k / 4);
        });
        at.step(words, k, &mut p);
        k += STEP;
    }
    at.store(&args, &p);
}

/// One row and one token a warp, any columns and views.
#[inline(always)]
fn plain(args: LinearInt8Args) {
    grid::wait();
    let Some(at) = place::<1, 1>(&args) else {
        return;
    };
    let cols = args.cols;
    let mut p = [[[0.0f32; 8]; 1]; 1];
    let mut k = 8 * warp::lane_id();
    while k < cols {
        let mut ws = [0.0f32; 8];
        unroll!(c < 8, {
            if k + (c as u32) < cols {
                ws[c] = f32::from(at.weights[0].load_nc(k + c as u32) as i8);
            }
        });
        let xs = load8::<false>(at.x, at.from[0], k, cols);
        fma8::<false>(&mut p[0][0], &ws, &xs, k, cols);
        k += STEP;
    }
    at.store(&args, &p);
}

/// One row and one token a warp.
///
/// # Safety
/// The views must be live and as long as [`LinearInt8Args`] says; no kernel in flight writes the
/// weights.
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_int8_thin(args: LinearInt8Args) {
    if args.flags & VECTOR != 0 {
        body::<1, 1, 8>(args);
    } else {
        plain(args);
    }
}

/// Two rows and one token a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_int8_two(args: LinearInt8Args) {
    body::<2, 1, 4>(args);
}

/// Four rows and one token a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 4, prologue)]
pub unsafe fn linear_int8_four(args: LinearInt8Args) {
    body::<4, 1, 2>(args);
}

/// Four rows and four tokens a warp.
///
/// # Safety
/// As [`linear_int8_thin()`].
#[kernel(threads = 128, min_blocks = 2, prologue)]
pub unsafe fn linear_int8_many(args: LinearInt8Args) {
    body::<4, 4, 1>(args);
}
