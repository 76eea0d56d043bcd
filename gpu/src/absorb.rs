//! Queries into the latent space of multi-head latent attention.
//!
//! Per head, `out[h][c] = sum over j ascending of fma(q[h][j], kv_b[h * (nope + value) + j][c])`.
//!
//! 1. A thread owns two neighbouring columns `c` of one head, so a warp reads 128 neighbouring
//!    bytes of each weight row; the sum runs over rows, in order, in registers.
//! 2. Four tokens share each weight that was read; a single token takes a body of its own.
//!
//! With weights of signed bytes, [`absorb_query_int8()`], the query is multiplied by the row's scale
//! first (rounded), `fma(q[h][j] * scales[h * (nope + value) + j], kv_b[...][c])`:
//!
//! 3. A thread owns four neighbouring columns, so a warp reads 128 neighbouring bytes too. 16 rows are
//!    under way at once, each reloaded into the register that it leaves; the first ones are loaded
//!    ahead of the wait for the kernel before. A latent size that is no multiple of 4 takes bytes.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{grid, kernel, thread};

use crate::arith::{bf16, fma};
use crate::linear_int8::widen4;
use crate::unroll;

/// Threads of a block.
pub const THREADS: u32 = 128;

/// Threads of a block of [`absorb_query_int8()`].
pub const THREADS_INT8: u32 = 64;

/// Tokens of a block.
pub const TOKENS: u32 = 4;

/// Columns of a block, of either kernel.
pub const COLS: u32 = 256;

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

#[inline(always)]
fn body<const N: usize>(args: AbsorbArgs, token0: u32) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (q, out) = unsafe { (Global::<f32>::new(args.q), GlobalMut::<f32>::new(args.out)) };
    let head = thread::block_idx_y();
    let c = 2 * (thread::block_idx_x() * THREADS + thread::thread_idx_x());
    let latent = args.latent;
    if c >= latent {
        return;
    }
    // SAFETY: the caller's: live views, as long as the arguments say.
    let kv_b =
        unsafe { Global::<u16>::new(args.kv_b).at((head * args.head_rows) as u64 * latent as u64) };
    let mut from = [0; N];
    unroll!(i < N, {
        from[i] = (token0 + i as u32).min(args.tokens - 1) * args.q_stride + head * args.q_head;
    });
    let paired = latent & 1 == 0;
    let mut acc = [[0.0f32; 2]; N];
    for j in 0..args.nope {
        let (w0, w1) = if paired {
            let w = kv_b.cast::<u32>().load_nc((j * latent + c) / 2);
            (f32::from_bits(w << 16), f32::from_bits(w & 0xffff_0000))
        } else {
            let at = j * latent + c;
            let w1 = if c + 1 < latent {
                kv_b.load_nc(at + 1)
            } else {
                0
            };
            (bf16(kv_b.load_nc(at)), bf16(w1))
        };
        unroll!(i < N, {
            let x = q.load(from[i] + j);
            acc[i][0] = fma(x, w0, acc[i][0]);
            acc[i][1] = fma(x, w1, acc[i][1]);
        });
    }
    unroll!(i < N, {
        let token = token0 + i as u32;
        if token < args.tokens {
            let to = token * args.out_stride + head * args.out_head + c;
            out.store(to, acc[i][0]);
            if c + 1 < latent {
                out.store(to + 1, acc[i][1]);
            }
        }
    });
}

/// With weights of bf16.
///
/// # Safety
/// The views must be live and as long as [`AbsorbArgs`] says.
#[kernel(threads = 128)]
pub unsafe fn absorb_query(args: AbsorbArgs) {
    let token0 = thread::block_idx_z() * TOKENS;
    if token0 + 1 == args.tokens {
        body::<1>(args, token0);
    } else {
        body::<{ TOKENS as usize }>(args, token0);
    }
}

/// Rows that are under way at once: two times eight.
const AT_ONCE: u32 = 16;

#[inline(always)]
fn body_int8<const N: usize>(args: AbsorbArgs, token0: u32) {
    let head = thread::block_idx_y();
    let c = 4 * (thread::block_idx_x() * THREADS_INT8 + thread::thread_idx_x());
    let latent = args.latent;
    if c >= latent {
        grid::wait();
        return;
    }
    let first_row = head * args.head_rows;
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (q, out, scales, kv_b) = unsafe {
        (
            Global::<f32>::new(args.q),
            GlobalMut::<f32>::new(args.out),
            Global::<f32>::new(args.scales).at(first_row as u64),
            Global::<u8>::new(args.kv_b).at(first_row as u64 * latent as u64),
        )
    };
    let mut from = [0; N];
    unroll!(i < N, {
        from[i] = (token0 + i as u32).min(args.tokens - 1) * args.q_stride + head * args.q_head;
    });
    let mut acc = [[0.0f32; 4]; N];
    let mut multiply = |j: u32, w: [f32; 4]| {
        let scale = scales.load_nc(j);
        unroll!(i < N, {
            let x = q.load(from[i] + j) * scale;
            unroll!(k < 4, {
                acc[i][k] = fma(x, w[k], acc[i][k]);
            });
        });
    };
    if latent.is_multiple_of(4) && kv_b.addr().is_multiple_of(4) {
        let words = kv_b.cast::<u32>();
        let at = |j: u32| (j * latent + c) / 4;
        let mut w = [[0u32; 8]; 2];
        unroll!(h < 2, {
            unroll!(i < 8, {
                let j = (8 * h + i) as u32;
                words.reload_u32(j < args.nope, at(j), &mut w[h][i]);
            });
        });
        grid::wait();
        let whole = args.nope / AT_ONCE * AT_ONCE;
        let mut base = 0;
        while base < whole {
            unroll!(h < 2, {
                unroll!(i < 8, {
                    let j = base + (8 * h + i) as u32;
                    multiply(j, widen4(w[h][i]));
                    let next = j + AT_ONCE;
                    words.reload_u32(next < args.nope, at(next), &mut w[h][i]);
                });
            });
            base += AT_ONCE;
        }
        unroll!(h < 2, {
            unroll!(i < 8, {
                let j = whole + (8 * h + i) as u32;
                if j < args.nope {
                    multiply(j, widen4(w[h][i]));
                }
            });
        });
    } else {
        grid::wait();
        for j in 0..args.nope {
            let mut w = [0.0; 4];
            unroll!(k < 4, {
                if c + (k as u32) < latent {
                    w[k] = f32::from(kv_b.load_nc(j * latent + c + k as u32) as i8);
                }
            });
            multiply(j, w);
        }
    }
    unroll!(i < N, {
        let token = token0 + i as u32;
        if token < args.tokens {
            let to = token * args.out_stride + head * args.out_head + c;
            unroll!(k < 4, {
                if c + (k as u32) < latent {
                    out.store(to + k as u32, acc[i][k]);
                }
            });
        }
    });
}

/// With weights of signed bytes.
///
/// # Safety
/// The views must be live and as long as [`AbsorbArgs`] says; no kernel in flight writes the weights.
#[kernel(threads = 64, prologue)]
pub unsafe fn absorb_query_int8(args: AbsorbArgs) {
    let token0 = thread::block_idx_z() * TOKENS;
    if token0 + 1 == args.tokens {
        body_int8::<1>(args, token0);
    } else {
        body_int8::<{ TOKENS as usize }>(args, token0);
    }
}
