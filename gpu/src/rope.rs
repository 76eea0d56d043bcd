//! Interleaved rotary position embedding.
//!
//! Of each head's `rope + pass` elements the pairs `(x[2i], x[2i+1])`, `i < rope / 2`, turn by
//! `position * inv_freq[i]` and go to `i` and `rope/2 + i`; the other `pass` are copied.
//!
//! One thread a pair or copied element; the grid's y is the token.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

use crate::arith::{rotate, sin_cos};
use crate::position::position;

/// Threads of a block.
pub const THREADS: u32 = 128;

/// Arguments. Grid: `[ceil(heads * (rope / 2 + pass) / 128), tokens, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RopeArgs {
    /// f32; head `h` of token `t` at `t * x_stride + h * x_head`.
    pub x: Slice,
    /// f32 `[rope / 2]`.
    pub inv_freq: Slice,
    /// f32; head `h` of token `t` at `t * out_stride + h * out_head`.
    pub out: Slice,
    /// u32 `[1]`: added to `first`; or empty.
    pub at: Slice,
    /// Elements from token to token of `x`.
    pub x_stride: u32,
    /// Elements from head to head of `x`.
    pub x_head: u32,
    /// Elements from token to token of `out`.
    pub out_stride: u32,
    /// Elements from head to head of `out`.
    pub out_head: u32,
    /// Heads.
    pub heads: u32,
    /// Elements that turn; even.
    pub rope: u32,
    /// Elements that are copied.
    pub pass: u32,
    /// Position of token 0.
    pub first: u32,
    /// Not 0: `out` starts at position 0 of its sequence, and token 0 is written at its own.
    pub moves: u32,
    /// Zero.
    pub reserved: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`RopeArgs`] says.
#[kernel(threads = 128)]
pub unsafe fn rope(args: RopeArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, inv_freq, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<f32>::new(args.inv_freq),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let half = args.rope / 2;
    let items = (half + args.pass).max(1);
    let token = thread::block_idx_y();
    // SAFETY: the caller's.
    let first = unsafe { position(args.at, args.first) };
    let row = if args.moves == 0 { 0 } else { first };
    let out = out.at(u64::from(row) * u64::from(args.out_stride));
    let n = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if n >= args.heads * items {
        return;
    }
    let (head, i) = (n / items, n % items);
    let from = token * args.x_stride + head * args.x_head;
    let to = token * args.out_stride + head * args.out_head;
    if i < half {
        let angle = (first + token) as f32 * inv_freq.load_nc(i);
        let (sin, cos) = sin_cos(angle);
        let (a, b) = rotate(x.load(from + 2 * i), x.load(from + 2 * i + 1), sin, cos);
        out.store(to + i, a);
        out.store(to + half + i, b);
    } else {
        let c = half + i;
        out.store(to + c, x.load(from + c));
    }
}
