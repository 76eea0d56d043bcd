//! Between the expert matrices: gate and up to the quantised input of down.
//!
//! Per slot: `g`, `u` from the partial sums of gate and up (`row_scale * (s * dot)`, or `s * sum` of
//! g64; int8 weights have partial sums of both their nibbles), `h = silu(g) * u`, then `h` quantised as [`crate::quantise`] does.
//!
//! 1. One block a slot. `h` is computed once, kept in shared memory and quantised from there.
//! 2. A thread's loads for four rows do not wait for each other.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread};

use crate::abi::MatrixDesc;
use crate::arith::{abs, dequantise_int8, dequantise_row, silu};
use crate::coded::unroll;
use crate::group::NO_EXPERT;
use crate::partials::{Partials, Scales, sum_of};
use crate::quantise::quantise_row;

/// Threads of a block.
pub const THREADS: u32 = crate::quantise::THREADS;

/// Rows that a thread has under way together.
const AT_ONCE: usize = 4;

/// Flag: scales for each 64 columns; partial sums are f32.
pub const GROUPED: u32 = 1;

/// Arguments. Grid: `[slots, 1, 1]`, 512 threads, dynamic shared memory `4 * rows` bytes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ActArgs {
    /// [`MatrixDesc`] `[experts * 3]`.
    pub descs: Slice,
    /// u32 words `[2, segs, slots, rows]`: partial sums of gate and up.
    pub partials: Slice,
    /// The same of the low nibbles of int8 weights, `[2, low_segs, slots, rows]`, `partials` then being
    /// those of the high ones; empty for int4.
    pub low: Slice,
    /// i32 `[tokens, groups]`: sums of the input over each 64 columns, for int8.
    pub x_sums: Slice,
    /// u32 `[slots]`.
    pub slot_token: Slice,
    /// u32 `[slots]`; nothing is done for a slot of [`NO_EXPERT`].
    pub slot_expert: Slice,
    /// f32 `[tokens]`: scales of the input.
    pub x_scales: Slice,
    /// i16 `[slots, rows]`.
    pub quantised: Slice,
    /// f32 `[slots]`.
    pub scales: Slice,
    /// i32 `[slots, rows / 64]`.
    pub sums: Slice,
    /// Rows of gate and up (`moe_intermediate_size`), a multiple of 64.
    pub rows: u32,
    /// Segments of a row of gate and up.
    pub segs: u32,
    /// Slots.
    pub slots: u32,
    /// [`GROUPED`].
    pub flags: u32,
    /// Segments of a row of `low`.
    pub low_segs: u32,
    /// Columns of gate and up over 64.
    pub groups: u32,
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`ActArgs`] says, and so those of the descriptors.
#[kernel(threads = 512, min_blocks = 1)]
pub unsafe fn act_quantise(args: ActArgs) {
    let scratch = shared_array![u32; 16];
    let slot = thread::block_idx_x();
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (h, descs, words, token, expert) = unsafe {
        (
            Shared::<f32>::dynamic(0, args.rows),
            Global::<MatrixDesc>::new(args.descs),
            Global::<u32>::new(args.partials),
            Global::<u32>::new(args.slot_token).load(slot),
            Global::<u32>::new(args.slot_expert).load(slot),
        )
    };
    if expert == NO_EXPERT {
        return;
    }
    // SAFETY: the caller's.
    let outputs = unsafe {
        (
            GlobalMut::<u32>::new(args.quantised),
            GlobalMut::<f32>::new(args.scales),
            GlobalMut::<i32>::new(args.sums),
        )
    };
    // SAFETY: the caller's.
    let activation = unsafe { Global::<f32>::new(args.x_scales) }.load(token);
    let partials = Partials {
        words,
        segs: args.segs,
        slots: args.slots,
        rows: args.rows,
    };
    let int8 = !args.low.is_empty();
    // SAFETY: the caller's; empty unless the weights are int8.
    let (low, x_sums) = unsafe {
        (
            Global::<u32>::new(args.low),
            Global::<i32>::new(args.x_sums),
        )
    };
    let low = Partials {
        words: low,
        segs: args.low_segs,
        ..partials
    };
    let sum = if int8 {
        sum_of(x_sums, token * args.groups, args.groups)
    } else {
        0
    };
    let (gate, up) = (
        Scales::of(descs, 3 * expert),
        Scales::of(descs, 3 * expert + 1),
    );

    let mut amax = 0.0f32;
    let mut first = thread::thread_idx_x();
    while first < args.rows {
        // Of rows past the end the last one is computed again, and not stored.
        let row = |i: usize| (first + i as u32 * THREADS).min(args.rows - 1);
        let mut values = [[0.0; 2]; AT_ONCE];
        if args.flags & GROUPED == 0 && args.segs <= 4 && !int8 {
            // Without a branch between them: all loads are under way together.
            let mut dots = [[0i32; 2]; AT_ONCE];
            let mut scales = [[0.0; 2]; AT_ONCE];
            unroll!(I in [0 1 2 3] {
                dots[I] = [
                    partials.dot(0, slot, row(I)),
                    partials.dot(1, slot, row(I)),
                ];
                // SAFETY: a scale a row.
                scales[I] = unsafe { [gate.get(row(I)), up.get(row(I))] };
            });
            unroll!(I in [0 1 2 3] {
                unroll!(M in [0 1] {
                    values[I][M] = dequantise_row(scales[I][M], activation, dots[I][M]);
                });
            });
        } else {
            unroll!(I in [0 1 2 3] {
                unroll!(M in [0 1] {
                    values[I][M] = if args.flags & GROUPED != 0 {
                        partials.grouped(M as u32, slot, row(I), activation)
                    } else {
                        let scales = if M == 0 { &gate } else { &up };
                        // SAFETY: a scale a row.
                        let scale = unsafe { scales.get(row(I)) };
                        if int8 {
                            let high = partials.total(M as u32, slot, row(I));
                            let low = low.total(M as u32, slot, row(I));
                            dequantise_int8(scale, activation, high, low, sum)
                        } else {
                            partials.by_row(M as u32, slot, row(I), scale, activation)
                        }
                    };
                });
            });
        }
        unroll!(I in [0 1 2 3] {
            let row = first + I as u32 * THREADS;
            if row < args.rows {
                let v = silu(values[I][0]) * values[I][1];
                h.store(row, v);
                amax = if abs(v) > amax { abs(v) } else { amax };
            }
        });
        first += AT_ONCE as u32 * THREADS;
    }
    // The barrier in `quantise_row` stands between these stores and its loads.
    quantise_row(slot, args.rows, amax, |c| h.load(c), scratch, outputs);
}
