//! Queries into the latent space of multi-head latent attention.
//!
//! Per head, `out[h][c] = sum over j ascending of fma(q[h][j], kv_b[h * (nope + value) + j][c])`; with
//! weights of signed bytes the query is multiplied by the row's scale first (rounded),
//! `fma(q[h][j] * scales[h * (nope + value) + j], kv_b[...][c])`.
//!
//! 1. A thread owns the columns of one 32-bit word of one head, so a warp reads 128 neighbouring bytes
//!    of each weight row; the sum runs over rows, in order, in registers.
//! 2. The query's products with the scales lie in shared memory, [`STAGED`] rows at a time: every thread
//!    of the block takes the same ones.
//! 3. [`AHEAD`] rows are under way at once, each reloaded into the register that it leaves; the first
//!    ones are loaded ahead of the wait for the kernel before. No branch lies between their loads, since
//!    a use in another basic block waits for all of them. A latent size that is no multiple of a word
//!    takes single columns.
//! 4. Four tokens share each weight that was read; a single token takes a body of its own.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, shared_array, thread};

use crate::arith::{bf16, fma};
use crate::linear_int8::widen4;
use crate::unroll;

/// Threads of a block of [`absorb_query()`].
pub const THREADS: u32 = 128;

/// Threads of a block of [`absorb_query_int8()`].
pub const THREADS_INT8: u32 = 64;

/// Tokens of a block.
pub const TOKENS: u32 = 4;

/// Columns of a block, of either kernel.
pub const COLS: u32 = 256;

/// Rows that are under way at once: eight times eight.
pub const AHEAD: u32 = 64;

/// Rows whose products with the query are in shared memory at once, a multiple of [`AHEAD`].
pub const STAGED: u32 = 256;

/// Arguments. Grid: `[ceil(latent / 256), heads, ceil(tokens / 4)]`, 128 threads, or 64 of
/// [`absorb_query_int8()`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AbsorbArgs {
    /// f32; head `h` of token `t` at `t * q_stride + h * q_head`.
    pub q: Slice,
    /// bf16 or i8 `[heads * head_rows, latent]`.
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

/// How weights are stored.
trait Weights {
    type Element: Pod;
    /// Columns of a word, at most 4.
    const COLS: u32;
    /// Threads of a block.
    const THREADS: u32;
    /// Rows of a thread of those that are staged together, at most 4.
    const PASSES: usize = (STAGED / Self::THREADS) as usize;
    /// A word's columns, the lowest first.
    fn widen(word: u32) -> [f32; 4];
    fn one(w: &Global<Self::Element>, at: u32) -> f32;
    /// What row `j` of the query is multiplied by, where anything.
    fn scale(scales: &Global<f32>, j: u32) -> f32;
    /// A query's element as it is multiplied.
    fn scaled(x: f32, scale: f32) -> f32;
}

struct Bf16;

impl Weights for Bf16 {
    type Element = u16;
    const COLS: u32 = 2;
    const THREADS: u32 = THREADS;

    #[inline(always)]
    fn widen(w: u32) -> [f32; 4] {
        [
            f32::from_bits(w << 16),
            f32::from_bits(w & 0xffff_0000),
            0.0,
            0.0,
        ]
    }

    #[inline(always)]
    fn one(w: &Global<u16>, at: u32) -> f32 {
        bf16(w.load_nc(at))
    }

    #[inline(always)]
    fn scale(_scales: &Global<f32>, _j: u32) -> f32 {
        1.0
    }

    #[inline(always)]
    fn scaled(x: f32, _scale: f32) -> f32 {
        x
    }
}

struct Int8;

impl Weights for Int8 {
    type Element = u8;
    const COLS: u32 = 4;
    const THREADS: u32 = THREADS_INT8;

    #[inline(always)]
    fn widen(word: u32) -> [f32; 4] {
        widen4(word)
    }

    #[inline(always)]
    fn one(w: &Global<u8>, at: u32) -> f32 {
        f32::from(w.load_nc(at) as i8)
    }

    #[inline(always)]
    fn scale(scales: &Global<f32>, j: u32) -> f32 {
        scales.load_nc(j)
    }

    #[inline(always)]
    fn scaled(x: f32, scale: f32) -> f32 {
        x * scale
    }
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
unsafe fn body<W: Weights, const N: usize>(args: AbsorbArgs, token0: u32) {
    const { assert!(N == 1 || N == TOKENS as usize) };
    let products = shared_array![f32; (STAGED * TOKENS) as usize];
    let head = thread::block_idx_y();
    let t = thread::thread_idx_x();
    let (c, latent) = (
        W::COLS * (thread::block_idx_x() * (COLS / W::COLS) + t),
        args.latent,
    );
    let (ours, last) = (c < latent, args.nope.saturating_sub(1));
    let first_row = u64::from(head * args.head_rows);
    // SAFETY: the caller's: live views, as long as the arguments say; scales where there are any.
    let (q, out, kv_b, scales) = unsafe {
        (
            Global::<f32>::new(args.q),
            GlobalMut::<f32>::new(args.out),
            Global::<W::Element>::new(args.kv_b).at(first_row * u64::from(latent)),
            Global::<f32>::new(args.scales).at(if args.scales.len == 0 { 0 } else { first_row }),
        )
    };
    let mut from = [0; N];
    unroll!(i < N, {
        from[i] = (token0 + i as u32).min(args.tokens - 1) * args.q_stride + head * args.q_head;
    });
    let by_word = latent.is_multiple_of(W::COLS) && kv_b.addr().is_multiple_of(4);
    // SAFETY: no elements.
    let none = unsafe { Global::<W::Element>::new(Slice::EMPTY) };
    let words = if by_word { kv_b } else { none }.cast::<u32>();
    let at = |j: u32| (j * latent + c) / W::COLS;
    let mut w = [[0u32; 8]; 8];
    unroll!(h < 8, {
        unroll!(i < 8, {
            let j = (8 * h + i) as u32;
            words.reload_u32(by_word && ours && j < args.nope, at(j), &mut w[h][i]);
        });
    });
    grid::wait();

    let mut acc = [[0.0f32; 4]; N];
    let mut multiply = |x: [f32; N], w: [f32; 4]| {
        unroll!(i < N, {
            unroll!(k < 4, {
                if (k as u32) < W::COLS {
                    acc[i][k] = fma(x[i], w[k], acc[i][k]);
                }
            });
        });
    };
    let mut ahead = at(AHEAD);
    let mut first = 0;
    while first < args.nope {
        // Rows past the end stand in for the last, and are not multiplied.
        let mut values = [[0.0; N]; 4];
        unroll!(i < 4, {
            if i < W::PASSES {
                let row = (first + t + i as u32 * W::THREADS).min(last);
                let scale = W::scale(&scales, row);
                unroll!(n < N, {
                    values[i][n] = W::scaled(q.load(from[n] + row), scale);
                });
            }
        });
        unroll!(i < 4, {
            if i < W::PASSES {
                let row = t + i as u32 * W::THREADS;
                unroll!(n < N, {
                    products.store(row * N as u32 + n as u32, values[i][n]);
                });
            }
        });
        thread::sync_threads();
        let rows = (args.nope - first).min(STAGED);
        if by_word {
            let whole = rows / AHEAD * AHEAD;
            let mut base = 0;
            while base < whole {
                unroll!(h < 8, {
                    let row = base + 8 * h as u32;
                    let x = eight::<N>(products, row);
                    unroll!(i < 8, {
                        multiply(x[i], W::widen(w[h][i]));
                        let next = first + row + i as u32 + AHEAD;
                        words.reload_u32(ours && next < args.nope, ahead, &mut w[h][i]);
                        ahead += latent / W::COLS;
                    });
                });
                base += AHEAD;
            }
            unroll!(h < 8, {
                let row = whole + 8 * h as u32;
                if row < rows {
                    let x = eight::<N>(products, row);
                    unroll!(i < 8, {
                        if row + (i as u32) < rows {
                            multiply(x[i], W::widen(w[h][i]));
                        }
                    });
                }
            });
        } else if ours {
            let mut row = 0;
            while row < rows {
                let mut w = [0.0; 4];
                unroll!(k < 4, {
                    if (k as u32) < W::COLS && c + (k as u32) < latent {
                        w[k] = W::one(&kv_b, (first + row) * latent + c + k as u32);
                    }
                });
                let mut x = [0.0; N];
                unroll!(n < N, {
                    x[n] = products.load(row * N as u32 + n as u32);
                });
                multiply(x, w);
                row += 1;
            }
        }
        thread::sync_threads();
        first += STAGED;
    }
    unroll!(i < N, {
        let token = token0 + i as u32;
        if ours && token < args.tokens {
            let to = token * args.out_stride + head * args.out_head + c;
            unroll!(k < 4, {
                if (k as u32) < W::COLS && c + (k as u32) < latent {
                    out.store(to + k as u32, acc[i][k]);
                }
            });
        }
    });
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
#[kernel(threads = 64, prologue)]
pub unsafe fn absorb_query_int8(args: AbsorbArgs) {
    // SAFETY: the caller's.
    unsafe { absorb::<Int8>(args) }
}
