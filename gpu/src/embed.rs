//! Rows of the embedding table.
//!
//! `out[t] = table[ids[t]]`: bf16 widened to f32, signed bytes times the row's scale, or f32. A thread a
//! column, so that no load of a row waits for another. An id past the table gives a row of zeros: the
//! host checks ids, this only keeps the read inside the table.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

use crate::arith::bf16;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Arguments. Grid: `[ceil(cols / 256), tokens, 1]`, 256 threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct EmbedArgs {
    /// bf16, i8 or f32 `[vocab, cols]`.
    pub table: Slice,
    /// f32 `[vocab]` of bytes, else empty.
    pub scales: Slice,
    /// u32 `[tokens]`.
    pub ids: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Rows of the table.
    pub vocab: u32,
    /// Columns.
    pub cols: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Zero.
    pub reserved: u32,
}

/// Stores `value(id, first element of its row, column)` for each column of a token.
#[inline(always)]
fn body(args: &EmbedArgs, value: impl Fn(u32, u64, u32) -> f32) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (ids, out) = unsafe {
        (
            Global::<u32>::new(args.ids),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let token = thread::block_idx_y();
    let id = ids.load(token);
    // Vocabulary times columns can pass 2^32.
    let start = id as u64 * args.cols as u64;
    let c = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if c < args.cols {
        let v = if id < args.vocab {
            value(id, start, c)
        } else {
            0.0
        };
        out.store(token * args.out_stride + c, v);
    }
}

/// Rows of bf16.
///
/// # Safety
/// The views must be live and as long as [`EmbedArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn embed(args: EmbedArgs) {
    // SAFETY: the caller's: a live view, as long as the arguments say.
    let table = unsafe { Global::<u16>::new(args.table) };
    body(&args, |_, start, c| bf16(table.at(start).load_nc(c)));
}

/// Rows of f32.
///
/// # Safety
/// The views must be live and as long as [`EmbedArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn embed_f32(args: EmbedArgs) {
    // SAFETY: the caller's: a live view, as long as the arguments say.
    let table = unsafe { Global::<f32>::new(args.table) };
    body(&args, |_, start, c| table.at(start).load_nc(c));
}

/// Rows of signed bytes.
///
/// # Safety
/// The views must be live and as long as [`EmbedArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn embed_int8(args: EmbedArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (table, scales) = unsafe {
        (
            Global::<u8>::new(args.table),
            Global::<f32>::new(args.scales),
        )
    };
    body(&args, |id, start, c| {
        f32::from(table.at(start).load_nc(c) as i8) * scales.load_nc(id)
    });
}
