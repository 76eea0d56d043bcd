//! Queries into the latent space of multi-head latent attention.
//!
//! Per head, `out[h][c] = sum over j ascending of fma(q[h][j], kv_b[h * (nope + value) + j][c])`; with
//! weights of signed bytes the query is multiplied by the row's scale first (rounded),
//! `fma(q[h][j] * scales[h * (nope + value) + j], kv_b[...][c])`.
//!
//! 1. A thread owns a column of a head; the sum runs over rows, in order, in a register.
//! 2. [`ROWS`] rows at a time lie in shared memory: of the weights the [`SLAB`] bytes of each that the
//!    block's columns are, all under way together, the first from before the wait for the kernel ahead;
//!    of the query the products with the scales. Weights whose rows are no multiple of 16 bytes are read
//!    where they are.
//! 3. Four tokens share each weight that was read; a single token takes a body of its own.
//!
//! Shared memory: the weights' slabs.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice, cp_async_16, cp_async_commit, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, shared_array, thread};

use crate::arith::{bf16, fma};
use crate::unroll;

/// Bytes of a row that a block's columns are.
pub const SLAB: u32 = 256;

/// Rows in shared memory at once.
pub const ROWS: u32 = 256;

/// Threads and columns of a block of [`absorb_query()`].
pub const COLS: u32 = SLAB / 2;

/// Threads and columns of a block of [`absorb_query_int8()`].
pub const COLS_INT8: u32 = SLAB;

/// Threads and columns of a block of [`absorb_query_f32()`].
pub const COLS_F32: u32 = SLAB / 4;

/// Tokens of a block.
pub const TOKENS: u32 = 4;

/// Arguments. Grid: `[ceil(latent / columns), heads, ceil(tokens / 4)]`, a thread a column, dynamic shared
/// memory [`shared_bytes`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AbsorbArgs {
    /// f32; head `h` of token `t` at `t * q_stride + h * q_head`.
    pub q: Slice,
    /// bf16, i8 or f32 `[heads * head_rows, latent]`.
    pub kv_b: Slice,
    /// f32 `[heads * head_rows]` of bytes, else empty.
    pub scales: Slice,
    /// f32; head `h` of token `t` at `t * out_stride + h * out_head`.
    pub out: Slice,
    /// Elements from token to token of `q`.
    pub q_stride: u32,
    /// Elements from head to head of `q`.
    pub q_head: u32,
    /// Elements from token to token of `out`.
    pub out_stride: u32,
    /// Elements from head to head of `out`.
    pub out_head: u32,
    /// Rows of `kv_b` from head to head: `nope + value`.
    pub head_rows: u32,
    /// Rows of keys.
    pub nope: u32,
    /// Columns.
    pub latent: u32,
    /// Tokens.
    pub tokens: u32,
}

/// Dynamic shared memory of a launch over `nope` rows.
pub const fn shared_bytes(nope: u32) -> u32 {
    SLAB * if nope < ROWS { nope } else { ROWS }
}

/// How weights are stored.
trait Weights {
    type Element: Pod;
    /// Columns of a block.
    const COLS: u32;
    fn widen(weight: Self::Element) -> f32;
    /// A query's element for row `j`, as it is multiplied.
    fn scaled(x: f32, scales: &Global<f32>, j: u32) -> f32;
}

struct Bf16;

impl Weights for Bf16 {
    type Element = u16;
    const COLS: u32 = COLS;

    #[inline(always)]
    fn widen(weight: u16) -> f32 {
        bf16(weight)
    }

    #[inline(always)]
    fn scaled(x: f32, _scales: &Global<f32>, _j: u32) -> f32 {
        x
    }
}

struct Int8;

impl Weights for Int8 {
    type Element = u8;
    const COLS: u32 = COLS_INT8;

    #[inline(always)]
    fn widen(weight: u8) -> f32 {
        f32::from(weight as i8)
    }

    #[inline(always)]
    fn scaled(x: f32, scales: &Global<f32>, j: u32) -> f32 {
        x * scales.load_nc(j)
    }
}

struct F32;

impl Weights for F32 {
    type Element = f32;
    const COLS: u32 = COLS_F32;

    #[inline(always)]
    fn widen(weight: f32) -> f32 {
        weight
    }

    #[inline(always)]
    fn scaled(x: f32, _scales: &Global<f32>, _j: u32) -> f32 {
        x
    }
}

/// Copies the block's slabs of rows `first ..`, at most [`ROWS`]; 16 bytes past a row's end, where a
/// block has more columns than there are, are not asked for.
#[inline(always)]
fn copy<W: Weights>(
    slabs: Shared<W::Element>,
    kv_b: Global<W::Element>,
    (first, rows): (u32, u32),
    latent: u32,
) {
    const PIECES: u32 = SLAB / 16;
    let columns = 16 / size_of::<W::Element>() as u32;
    let start = thread::block_idx_x() * W::COLS;
    let mut i = thread::thread_idx_x();
    while i < rows * PIECES {
        let (row, piece) = (i / PIECES, i % PIECES);
        let column = start + piece * columns;
        if column < latent {
            let from = ((first + row) * latent + column) / columns * 4;
            cp_async_16(slabs, i * 4, kv_b, from);
        }
        i += W::COLS;
    }
    cp_async_commit();
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn body<W: Weights, const N: usize>(args: AbsorbArgs, token0: u32) {
    const { assert!(N == 1 || N == TOKENS as usize) };
    let products = shared_array![f32; (ROWS * TOKENS) as usize];
    let head = thread::block_idx_y();
    let t = thread::thread_idx_x();
    let latent = args.latent;
    let c = thread::block_idx_x() * W::COLS + t;
    let first_row = u64::from(head * args.head_rows);
    // SAFETY: the caller's: live views, as long as the arguments say; scales where there are any; the
    // launch has that much shared memory.
    let (q, out, kv_b, scales, slabs) = unsafe {
        (
            Global::<f32>::new(args.q),
            GlobalMut::<f32>::new(args.out),
            Global::<W::Element>::new(args.kv_b).at(first_row * u64::from(latent)),
            Global::<f32>::new(args.scales).at(if args.scales.len == 0 { 0 } else { first_row }),
            Shared::<W::Element>::dynamic(
                0,
                shared_bytes(args.nope) / size_of::<W::Element>() as u32,
            ),
        )
    };
    let row_bytes = latent * size_of::<W::Element>() as u32;
    let copied = row_bytes.is_multiple_of(16) && kv_b.addr().is_multiple_of(16);
    if copied {
        copy::<W>(slabs, kv_b, (0, args.nope.min(ROWS)), latent);
    }
    grid::wait();

    let mut from = [0; N];
    unroll!(n < N, {
        from[n] = (token0 + n as u32).min(args.tokens - 1) * args.q_stride + head * args.q_head;
    });
    let mut acc = [0.0f32; N];
    let mut first = 0;
    while first < args.nope {
        let rows = (args.nope - first).min(ROWS);
        let mut row = t;
        while row < rows {
            unroll!(n < N, {
                let x = W::scaled(q.load(from[n] + first + row), &scales, first + row);
                products.store(row * N as u32 + n as u32, x);
            });
            row += W::COLS;
        }
        cp_async_wait::<0>();
        thread::sync_threads();
        if c < latent {
            let weight = |row: u32| {
                if copied {
                    W::widen(slabs.load(row * W::COLS + t))
                } else {
                    W::widen(kv_b.load_nc((first + row) * latent + c))
                }
            };
            let mut row = 0;
            while row + 8 <= rows {
                let mut w = [0.0; 8];
                unroll!(i < 8, {
                    w[i] = weight(row + i as u32);
                });
                let x = eight::<N>(products, row);
                unroll!(i < 8, {
                    unroll!(n < N, {
                        acc[n] = fma(x[i][n], w[i], acc[n]);
                    });
                });
                row += 8;
            }
            while row < rows {
                let w = weight(row);
                unroll!(n < N, {
                    acc[n] = fma(products.load(row * N as u32 + n as u32), w, acc[n]);
                });
                row += 1;
            }
        }
        first += ROWS;
        if first < args.nope {
            thread::sync_threads();
            if copied {
                copy::<W>(slabs, kv_b, (first, (args.nope - first).min(ROWS)), latent);
            }
        }
    }
    unroll!(n < N, {
        let token = token0 + n as u32;
        if c < latent && token < args.tokens {
            out.store(token * args.out_stride + head * args.out_head + c, acc[n]);
        }
    });
}

/// The products of eight rows from `row` on, a multiple of 8, with each token's query.
#[inline(always)]
fn eight<const N: usize>(products: Shared<f32>, row: u32) -> [[f32; N]; 8] {
    let mut eight = [[0.0; N]; 8];
    if N == 1 {
        unroll!(h < 2, {
            let four = products.load_v4(row + 4 * h as u32);
            unroll!(i < 4, {
                eight[4 * h + i][0] = f32::from_bits(four[i]);
            });
        });
    } else {
        unroll!(i < 8, {
            let four = products.load_v4((row + i as u32) * N as u32);
            unroll!(n < 4, {
                eight[i][n] = f32::from_bits(four[n]);
            });
        });
    }
    eight
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn absorb<W: Weights>(args: AbsorbArgs) {
    let token0 = thread::block_idx_z() * TOKENS;
    // SAFETY: the caller's.
    unsafe {
        if token0 + 1 == args.tokens {
            body::<W, 1>(args, token0);
        } else {
            body::<W, { TOKENS as usize }>(args, token0);
        }
    }
}

/// With weights of bf16.
///
/// # Safety
/// The views must be live and as long as [`AbsorbArgs`] says; no kernel in flight writes the weights.
#[kernel(threads = 128, prologue)]
pub unsafe fn absorb_query(args: AbsorbArgs) {
    // SAFETY: the caller's.
    unsafe { absorb::<Bf16>(args) }
}

/// With weights of signed bytes.
///
/// # Safety
/// As [`absorb_query()`].
#[kernel(threads = 256, prologue)]
pub unsafe fn absorb_query_int8(args: AbsorbArgs) {
    // SAFETY: the caller's.
    unsafe { absorb::<Int8>(args) }
}

/// With weights of f32. (The bound, which three small blocks keep anyway, keeps ptxas from spilling for sm_80.)
///
/// # Safety
/// As [`absorb_query()`].
#[kernel(threads = 64, min_blocks = 3, prologue)]
pub unsafe fn absorb_query_f32(args: AbsorbArgs) {
    // SAFETY: the caller's.
    unsafe { absorb::<F32>(args) }
}
