//! A fixed routing in the router's place: `ids` and `weights` of token `t` are a layer's part of row
//! `(first + t) mod rows` of a trace.
//!
//! One thread an assignment.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

use crate::position::position;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Arguments. Grid: `[ceil(tokens * top_k / 256), 1, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ReplayArgs {
    /// u32 `[rows, stride]`: experts.
    pub chosen: Slice,
    /// f32 `[rows, stride]`: their weights.
    pub given: Slice,
    /// u32 `[tokens, top_k]`.
    pub ids: Slice,
    /// f32 `[tokens, top_k]`.
    pub weights: Slice,
    /// u32 `[1]`: added to `first`; or empty.
    pub at: Slice,
    /// Rows of the trace, at least 1.
    pub rows: u32,
    /// Elements of a row.
    pub stride: u32,
    /// Where the layer's part of a row begins.
    pub offset: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// Position of token 0.
    pub first: u32,
    /// Tokens.
    pub tokens: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`ReplayArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn replay(args: ReplayArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (chosen, given, ids, weights) = unsafe {
        (
            Global::<u32>::new(args.chosen),
            Global::<f32>::new(args.given),
            GlobalMut::<u32>::new(args.ids),
            GlobalMut::<f32>::new(args.weights),
        )
    };
    let i = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if i < args.tokens * args.top_k {
        // Neither is 0 here; the compiler has to see it.
        let (k, rows) = (args.top_k.max(1), args.rows.max(1));
        // SAFETY: the caller's.
        let first = unsafe { position(args.at, args.first) };
        let row = (first + i / k) % rows;
        let from = row * args.stride + args.offset + i % k;
        ids.store(i, chosen.load(from));
        weights.store(i, given.load(from));
    }
}
