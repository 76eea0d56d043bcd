//! The routed experts' weighted sum.
//!
//! `out[t][r] = sum over i ascending of fma(weights[t][i], y(slot_of[t][i])[r], acc)` from +0, with
//! `y` from the partial sums of down (`row_scale * (s * dot)`, or `s * sum` of g64; int8 weights have
//! partial sums of both their nibbles), or, for slots
//! past those of the partial sums, as somebody else has computed it.
//!
//! A block computes 32 rows of a token: warp `w` the outputs of assignments `w`, `w + 8`, ..., eight at a
//! time, so that their loads are under way together; the first warp then adds them, in their order.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::{kernel, shared_array, thread, warp};

use crate::abi::MatrixDesc;
use crate::act::GROUPED;
use crate::arith::{dequantise_int8, fma};
use crate::partials::{Partials, Scales, sum_of};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Rows of a block.
pub const ROWS: u32 = 32;

const WARPS: u32 = THREADS / 32;

/// Arguments. Grid: `[ceil(rows / 32), tokens, 1]`, 256 threads.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct CombineArgs {
    /// [`MatrixDesc`] `[experts * 3]`.
    pub descs: Slice,
    /// u32 words `[1, segs, slots, rows]`: partial sums of down.
    pub partials: Slice,
    /// The same of the low nibbles of int8 weights, `[1, low_segs, slots, rows]`, `partials` then being
    /// those of the high ones; empty for int4.
    pub low: Slice,
    /// i32 `[slots, groups]`: sums of down's input over each 64 columns, for int8.
    pub sums: Slice,
    /// u32 `[slots]`.
    pub slot_expert: Slice,
    /// u32 `[tokens, k]`.
    pub slot_of: Slice,
    /// f32 `[slots]`: scales of down's input.
    pub scales: Slice,
    /// f32 `[tokens, k]`; empty: 1.
    pub weights: Slice,
    /// f32 `[_, rows]`: `y` of slots `slots`, `slots + 1`, … Slots past these add nothing.
    pub given: Slice,
    /// f32 rows of `out_stride`.
    pub out: Slice,
    /// Elements from row to row of `out`.
    pub out_stride: u32,
    /// Rows of down (`hidden_size`).
    pub rows: u32,
    /// Segments of a row of down.
    pub segs: u32,
    /// Slots.
    pub slots: u32,
    /// Experts of a token.
    pub k: u32,
    /// [`GROUPED`].
    pub flags: u32,
    /// Segments of a row of `low`.
    pub low_segs: u32,
    /// Columns of down over 64.
    pub groups: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`CombineArgs`] says, and so those of the descriptors.
#[kernel(threads = 256)]
pub unsafe fn combine(args: CombineArgs) {
    let outputs = shared_array![f32; 256];
    let factors = shared_array![f32; 8];
    let present = shared_array![u32; 8];
    let (lane, warp) = (warp::lane_id(), warp::warp_id());
    let token = thread::block_idx_y();
    let row = thread::block_idx_x() * ROWS + lane;
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (descs, words, slot_expert, slot_of) = unsafe {
        (
            Global::<MatrixDesc>::new(args.descs),
            Global::<u32>::new(args.partials),
            Global::<u32>::new(args.slot_expert),
            Global::<u32>::new(args.slot_of),
        )
    };
    // SAFETY: the caller's.
    let (scales, weights, given, out) = unsafe {
        (
            Global::<f32>::new(args.scales),
            Global::<f32>::new(args.weights),
            Global::<f32>::new(args.given),
            GlobalMut::<f32>::new(args.out),
        )
    };
    let partials = Partials {
        words,
        segs: args.segs,
        slots: args.slots,
        rows: args.rows,
    };
    // SAFETY: the caller's; empty unless the weights are int8.
    let (low, sums) = unsafe { (Global::<u32>::new(args.low), Global::<i32>::new(args.sums)) };
    let low = Partials {
        words: low,
        segs: args.low_segs,
        ..partials
    };
    let mut acc = 0.0;
    let mut first = 0;
    while first < args.k {
        let i = first + warp;
        let mut slot = u32::MAX;
        if i < args.k {
            slot = slot_of.load(token * args.k + i);
        }
        let ours = slot < args.slots;
        let at = u64::from(slot.wrapping_sub(args.slots)) * u64::from(args.rows);
        // An id that is no expert has no slot ([`crate::group`]) and adds nothing.
        let adds = ours || at + u64::from(args.rows) <= args.given.len;
        if adds && row < args.rows {
            let y = if !ours {
                given.load(at as u32 + row)
            } else if args.flags & GROUPED != 0 {
                partials.grouped(0, slot, row, scales.load(slot))
            } else {
                let activation = scales.load(slot);
                let down = Scales::of(descs, 3 * slot_expert.load(slot) + 2);
                // SAFETY: a scale a row.
                let scale = unsafe { down.get(row) };
                if args.low.is_empty() {
                    partials.by_row(0, slot, row, scale, activation)
                } else {
                    let sum = sum_of(sums, slot * args.groups, args.groups);
                    let high = partials.total(0, slot, row);
                    dequantise_int8(scale, activation, high, low.total(0, slot, row), sum)
                }
            };
            outputs.store(warp * ROWS + lane, y);
        }
        if lane == 0 {
            present.store(warp, u32::from(adds));
            if adds {
                let one = args.weights.len == 0;
                let weight = if one {
                    1.0
                } else {
                    weights.load(token * args.k + i)
                };
                factors.store(warp, weight);
            }
        }
        thread::sync_threads();
        if warp == 0 && row < args.rows {
            let mut j = 0;
            while j < WARPS {
                if present.load(j) != 0 {
                    acc = fma(factors.load(j), outputs.load(j * ROWS + lane), acc);
                }
                j += 1;
            }
        }
        thread::sync_threads();
        first += WARPS;
    }
    if warp == 0 && row < args.rows {
        out.store(token * args.out_stride + row, acc);
    }
}
