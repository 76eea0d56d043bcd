//! Dense linear layers: bf16 rows times f32 activations.
//!
//! `out[t][r] = dot(weight[r], x[t])`, plus what was there with [`ADD`].
//!
//! 1. A warp takes `ROWS` neighbouring rows and `TOKENS` neighbouring tokens at once, 256 columns
//!    at a time, 8 a lane: each 16-byte weight load serves `TOKENS` products, each activation load
//!    `ROWS`. Rows and tokens past the end repeat the last one and are not stored.
//! 2. Three shapes: `linear_thin` (one row, one token: few rows, many warps), `linear_one` (four
//!    rows, one token: four weight loads in flight) and `linear_many` (four by four).
//! 3. Weights are read once by a token tile and pass L1 by; token tiles are the fast grid
//!    dimension, so that tiles of the same rows run together and share L2.
//!
//! Limits: `linear_one` and `linear_many` need [`VECTOR`]; `linear_thin` takes any columns and views.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread, warp};

use crate::dot::{STEP, fma8, load8, load8_bf16, warp_reduce};
use crate::unroll;

/// Warps of a block.
pub const WARPS: u32 = 8;

/// Flag: add to `out` instead of overwriting it.
pub const ADD: u32 = 1;

/// Flag: columns are a multiple of 8, rows of `x` start at multiples of 16 bytes.
pub const VECTOR: u32 = 2;

/// Arguments. Grid: `[token tiles, row tiles, batches]`, 256 threads; a block has 8 warps.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LinearArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// bf16 `[rows, cols]` for each batch.
    pub weight: Slice,
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

#[inline(always)]
fn body<const ROWS: usize, const TOKENS: usize, const V: bool>(args: LinearArgs) {
    let warp = warp::warp_id();
    let lane = warp::lane_id();
    let row0 = (thread::block_idx_y() * WARPS + warp) * ROWS as u32;
    let token0 = thread::block_idx_x() * TOKENS as u32;
    if row0 >= args.rows {
        return;
    }
    let batch = thread::block_idx_z();
    let cols = args.cols;
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, weight, out) = unsafe {
        (
            Global::<f32>::new(args.x).at((batch * args.x_batch) as u64),
            Global::<u16>::new(args.weight),
            GlobalMut::<f32>::new(args.out).at((batch * args.out_batch) as u64),
        )
    };

    let mut w = [weight; ROWS];
    unroll!(i < ROWS, {
        let row = batch * args.weight_batch + (row0 + i as u32).min(args.rows - 1);
        w[i] = weight.at(row as u64 * cols as u64);
    });
    let mut from = [0; TOKENS];
    unroll!(j < TOKENS, {
        from[j] = (token0 + j as u32).min(args.tokens - 1) * args.x_stride;
    });

    let mut p = [[[0.0f32; 8]; TOKENS]; ROWS];
    let mut k = 8 * lane;
    while k < cols {
        let mut ws = [[0.0f32; 8]; ROWS];
        unroll!(i < ROWS, {
            ws[i] = load8_bf16::<V>(w[i], 0, k, cols);
        });
        unroll!(j < TOKENS, {
            let xs = load8::<V>(x, from[j], k, cols);
            unroll!(i < ROWS, {
                fma8::<V>(&mut p[i][j], &ws[i], &xs, k, cols);
            });
        });
        k += STEP;
    }

    // Lane `i * TOKENS + j` stores row i of token j.
    let mut mine = 0.0;
    unroll!(i < ROWS, {
        unroll!(j < TOKENS, {
            let v = warp_reduce(p[i][j]);
            if lane == (i * TOKENS + j) as u32 {
                mine = v;
            }
        });
    });
    let (row, token) = (row0 + lane / TOKENS as u32, token0 + lane % TOKENS as u32);
    if lane < (ROWS * TOKENS) as u32 && row < args.rows && token < args.tokens {
        let to = token * args.out_stride + row;
        if args.flags & ADD != 0 {
            mine += out.load(to);
        }
        out.store(to, mine);
    }
}

/// One row and one token a warp.
///
/// # Safety
/// The views must be live and as long as [`LinearArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn linear_thin(args: LinearArgs) {
    if args.flags & VECTOR != 0 {
        body::<1, 1, true>(args);
    } else {
        body::<1, 1, false>(args);
    }
}

/// Four rows and one token a warp.
///
/// # Safety
/// The views must be live and as long as [`LinearArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn linear_one(args: LinearArgs) {
    body::<4, 1, true>(args);
}

/// Four rows and four tokens a warp.
///
/// # Safety
/// The views must be live and as long as [`LinearArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn linear_many(args: LinearArgs) {
    body::<4, 4, true>(args);
}
