//! Scales of weight rows, applied to what the rows gave: `out = x * scale`, elementwise.
//!
//! The scale is the column's, or with [`BY_ID`] that of the token's id; with [`ADD`] the product is
//! added to what was there. Threads stride over the columns of a token; the grid's y is the token.
//! An id past the scales gives zeros: the host checks ids, this only keeps the read inside.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, thread};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Flag: add to `out`.
pub const ADD: u32 = 1;
/// Flag: one scale a token, by `ids`.
pub const BY_ID: u32 = 2;

/// Arguments. Grid: `[ceil(cols / 256), tokens, 1]`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ScaleArgs {
    /// f32 rows of `x_stride`.
    pub x: Slice,
    /// f32 `[cols]`, or `[n_scales]` with [`BY_ID`].
    pub scales: Slice,
    /// u32 `[tokens]` with [`BY_ID`], else empty.
    pub ids: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Elements from row to row of `x`.
    pub x_stride: u32,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Columns.
    pub cols: u32,
    /// How many scales there are.
    pub n_scales: u32,
    /// [`ADD`], [`BY_ID`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`ScaleArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn scale(args: ScaleArgs) {
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (x, scales, ids, out) = unsafe {
        (
            Global::<f32>::new(args.x),
            Global::<f32>::new(args.scales),
            Global::<u32>::new(args.ids),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let token = thread::block_idx_y();
    let c = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    if c < args.cols {
        let s = if args.flags & BY_ID != 0 {
            ids.load(token)
        } else {
            c
        };
        let s = if s < args.n_scales {
            scales.load_nc(s)
        } else {
            0.0
        };
        let product = x.load(token * args.x_stride + c) * s;
        let to = token * args.out_stride + c;
        let sum = if args.flags & ADD != 0 {
            out.load(to) + product
        } else {
            product
        };
        out.store(to, sum);
    }
}
