//! Rows of the embedding table.
//!
//! `out[t] = table[ids[t]]`, bf16 widened to f32. One block a token, its threads stride over the
//! columns. An id past the table gives a row of zeros: the host checks ids, this only keeps the
//! read inside the table.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

use crate::arith::bf16;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Arguments of [`embed()`]. Grid: `[tokens, 1, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct EmbedArgs {
    /// bf16 `[vocab, cols]`.
    pub table: Slice,
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

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`EmbedArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn embed(args: EmbedArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (table, ids, out) = unsafe {
        (
            Global::<u16>::new(args.table),
            Global::<u32>::new(args.ids),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let token = thread::block_idx_x();
    let id = ids.load(token);
    let mut c = thread::thread_idx_x();
    while c < args.cols {
        let v = if id < args.vocab {
            // Vocabulary times columns can pass 2^32.
            bf16(table.at(id as u64 * args.cols as u64).load_nc(c))
        } else {
            0.0
        };
        out.store(token * args.out_stride + c, v);
        c += THREADS;
    }
}
