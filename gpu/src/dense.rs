//! Rows of dense weights times f32 activations: what [`mod@crate::linear`], [`mod@crate::linear_int8`] and
//! [`mod@crate::linear_f32`] share.
//!
//! `out[t][r] = scaled(dot(weight[r], x[t]))`, plus what was there with [`ADD`].
//!
//! 1. A warp takes `ROWS` neighbouring rows and `TOKENS` neighbouring tokens, 256 columns at a time, 8
//!    a lane: a weight load serves `TOKENS` products, an activation load `ROWS`. Rows and tokens past the
//!    end repeat the last one and are not stored.
//! 2. Weights come `STEPS` times 256 columns at once into two register buffers, each reloaded while
//!    the other is multiplied. They are not written while a model runs, so the first buffer is loaded
//!    ahead of the wait for the kernel before.
//! 3. Weights are read once by a token tile and pass L1 by; token tiles are the fast grid dimension, so
//!    that tiles of the same rows run together and share L2.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{grid, thread, warp};

use crate::dot::{STEP, fma8, load8, warp_reduce};
use crate::unroll;

/// Warps of a block.
pub const WARPS: u32 = 4;

/// Flag: add to `out` instead of overwriting it.
pub const ADD: u32 = 1;

/// Flag: columns are a multiple of 8, rows of `x` start at multiples of 16 bytes, the weight at one of
/// the size of eight columns, of 16 bytes at most.
pub const VECTOR: u32 = 2;

/// Arguments. Grid: `[token tiles, row tiles, batches]`, 128 threads; a block has 4 warps.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LinearArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// bf16, i8 or f32 `[rows, cols]` for each batch.
    pub weight: Slice,
    /// f32, one for each row of a weight of bytes; else empty.
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

/// How weights are stored.
pub trait Weights {
    /// An element.
    type Element: Pod;
    /// Eight of them.
    type Words: Copy;
    /// No weights yet.
    const NONE: Self::Words;
    /// Eight from element `at` on, where `condition` holds; see `Global::reload_v4_stream`.
    fn reload(w: &Global<Self::Element>, condition: bool, at: u32, to: &mut Self::Words);
    /// The same as f32.
    fn widen(words: Self::Words) -> [f32; 8];
    /// Element `at` as f32.
    fn one(w: &Global<Self::Element>, at: u32) -> f32;
    /// A dot product with the scale of `row`.
    ///
    /// # Safety
    /// As the kernels'.
    unsafe fn scaled(args: &LinearArgs, row: u32, dot: f32) -> f32;
}

/// Where a warp is: its rows of weights, its tokens' activations, its first row and token.
struct Place<W: Weights, const ROWS: usize, const TOKENS: usize> {
    x: Global<f32>,
    out: GlobalMut<f32>,
    weights: [Global<W::Element>; ROWS],
    from: [u32; TOKENS],
    row: u32,
    token: u32,
}

/// `None` for a warp past the last row. Reads nothing.
///
/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn place<W: Weights, const ROWS: usize, const TOKENS: usize>(
    args: &LinearArgs,
) -> Option<Place<W, ROWS, TOKENS>> {
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
            Global::<W::Element>::new(args.weight),
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

impl<W: Weights, const ROWS: usize, const TOKENS: usize> Place<W, ROWS, TOKENS> {
    /// Loads a lane's weights of `STEPS` times 256 columns from `base` on, where `condition` holds.
    #[inline(always)]
    fn load<const STEPS: usize>(
        &self,
        condition: bool,
        base: u32,
        buffer: &mut [[W::Words; STEPS]; ROWS],
    ) {
        let k = base + 8 * warp::lane_id();
        unroll!(s < STEPS, {
            unroll!(i < ROWS, {
                let at = k + s as u32 * STEP;
                W::reload(&self.weights[i], condition, at, &mut buffer[i][s]);
            });
        });
    }

    /// Multiplies a lane's weights of 256 columns, the lane's from `k` on.
    #[inline(always)]
    fn step(&self, words: [W::Words; ROWS], k: u32, p: &mut Sums<ROWS, TOKENS>) {
        let mut ws = [[0.0f32; 8]; ROWS];
        unroll!(i < ROWS, {
            ws[i] = W::widen(words[i]);
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
        buffer: &[[W::Words; STEPS]; ROWS],
        base: u32,
        p: &mut Sums<ROWS, TOKENS>,
    ) {
        unroll!(s < STEPS, {
            let mut words = [W::NONE; ROWS];
            unroll!(i < ROWS, {
                words[i] = buffer[i][s];
            });
            self.step(words, base + s as u32 * STEP + 8 * warp::lane_id(), p);
        });
    }

    /// Lane `i * TOKENS + j` scales and stores row i of token j.
    ///
    /// # Safety
    /// As the kernels'.
    #[inline(always)]
    unsafe fn store(&self, args: &LinearArgs, p: &Sums<ROWS, TOKENS>) {
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
            let of_all = thread::block_idx_z() * args.weight_batch + row;
            // SAFETY: the caller's.
            let scaled = unsafe { W::scaled(args, of_all, mine) };
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

/// `ROWS` rows and `TOKENS` tokens a warp; with [`VECTOR`].
///
/// # Safety
/// The views of `args` are live and as long as it says; no kernel in flight writes the weights.
#[inline(always)]
pub unsafe fn body<W: Weights, const ROWS: usize, const TOKENS: usize, const STEPS: usize>(
    args: LinearArgs,
) {
    // SAFETY: the caller's.
    let Some(at) = (unsafe { place::<W, ROWS, TOKENS>(&args) }) else {
        grid::wait();
        return;
    };
    let chunk = STEPS as u32 * STEP;
    let whole = args.cols / chunk * chunk;
    let mut buffers = [[[W::NONE; STEPS]; ROWS]; 2];
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
        let mut words = [W::NONE; ROWS];
        unroll!(i < ROWS, {
            W::reload(&at.weights[i], true, k, &mut words[i]);
        });
        at.step(words, k, &mut p);
        k += STEP;
    }
    // SAFETY: the caller's.
    unsafe { at.store(&args, &p) };
}

/// One row and one token a warp, any columns and views.
///
/// # Safety
/// As [`body`].
#[inline(always)]
pub unsafe fn plain<W: Weights>(args: LinearArgs) {
    grid::wait();
    // SAFETY: the caller's.
    let Some(at) = (unsafe { place::<W, 1, 1>(&args) }) else {
        return;
    };
    let cols = args.cols;
    let mut p = [[[0.0f32; 8]; 1]; 1];
    let mut k = 8 * warp::lane_id();
    while k < cols {
        let mut ws = [0.0f32; 8];
        unroll!(c < 8, {
            if k + (c as u32) < cols {
                ws[c] = W::one(&at.weights[0], k + c as u32);
            }
        });
        let xs = load8::<false>(at.x, at.from[0], k, cols);
        fma8::<false>(&mut p[0][0], &ws, &xs, k, cols);
        k += STEP;
    }
    // SAFETY: the caller's.
    unsafe { at.store(&args, &p) };
}
