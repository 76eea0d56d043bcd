//! Expert matrix times one token, decoded to registers: `matmul_rans_pair`, `matmul_rans_triple`.
//!
//! For each active expert with one token, matrix and row `r`, in each segment of columns:
//!
//! ```text
//! row scales: out[r] = sum over columns of (n - 8) * X        n the nibble, X the i16 activation
//! g64:        out[r] = sum over folds of tree(scale[r][g] * sum over group g of (n - 8) * X)
//! ```
//!
//! Departures:
//! 1. Nibbles are decoded where they are multiplied ([`crate::coded`]); a warp takes a (block,
//!    segment) job, jobs dealt out as `warp * grid + block of threads`, so that the last round of
//!    them spreads over all multiprocessors.
//! 2. A lane's activations stay in registers for the job where a lane has 32, 24 or 16 column pairs;
//!    the groups of a row are unrolled for that. Other widths keep them in shared memory, behind the
//!    warp's ring.
//! 3. The table is copied while a warp opens its first job, and both while the kernel before still
//!    runs: descriptors, active experts, tables and streams are there before it starts.
//! 4. Nibbles are unsigned; `8 * sum(X)` is taken off at the end. Integer sums wrap on the way and
//!    are exact at the end (`crate::layout::MAX_COLS`).
//!
//! Shared memory, in this order: table; the ring of each warp; for other widths than those of 2.,
//! `pairs * 128` bytes of activations for each warp. Threads of a block: any number of warps that
//! this leaves room for.

use cuda_std::mem::{Global, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::MatrixDesc;
use crate::coded::{CHECK, Code, Decoder, Pair, RING, Triple, start_table, table_barrier, unroll};
use crate::coded_jobs::{
    Fold, active_count, any_single, fault, group_scales, input_row, job, lane_gsum, lane_word,
    out_index, row_groups, store_group,
};
use crate::layout::{LANES, Symbol};

/// Most threads of a block.
pub const fn threads(symbol: Symbol) -> u32 {
    match symbol {
        // 99 KB of shared memory have room for 640, at which ptxas spills for sm_120.
        Symbol::Pair => 512,
        Symbol::Triple => 768,
    }
}

/// Whether a lane's activations stay in registers for this number of column pairs.
pub const fn in_registers(pairs: u32) -> bool {
    matches!(pairs, 16 | 24 | 32)
}

/// Bytes of shared memory of a warp, beside the table.
pub const fn warp_bytes(pairs: u32) -> u32 {
    RING + if in_registers(pairs) {
        0
    } else {
        pairs * 4 * LANES as u32
    }
}

/// See the module.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live; dynamic shared memory is as the module
/// says.
#[kernel(threads = 512, min_blocks = 1, prologue)]
pub unsafe fn matmul_rans_pair(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Pair>(&args) }
}

/// See the module.
///
/// # Safety
/// As [`matmul_rans_pair()`].
#[kernel(threads = 768, min_blocks = 1, prologue)]
pub unsafe fn matmul_rans_triple(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Triple>(&args) }
}

/// What a warp knows of its job beside the decoder.
struct Work<'a> {
    args: &'a ExpertArgs,
    desc: &'a MatrixDesc,
    /// Where the results of the token start.
    out: u32,
    /// Segment and block.
    seg: u32,
    block: u32,
    /// Row scales: 8 times the sum of the segment's activations.
    offset: i32,
    /// Sums of activations of a group, of the token.
    gsum: Global<i32>,
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn matmul<C: Code>(args: &ExpertArgs) {
    let pairs = args.rounds * args.fold / (2 * LANES as u32);
    let warp = warp::warp_id();
    let warps = thread::block_dim_x() / LANES as u32;
    let bytes = C::TABLE * 4 + warps * warp_bytes(pairs);
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, bytes / 4) };
    if args.stage != 0 && !any_single(args) {
        grid::wait();
        return;
    }
    start_table::<C>(args.table, shared);

    let one = args.count.min(1);
    // Computed anew for each job: kept, it would be a register too many.
    let jobs = || active_count(args) * args.count * args.blocks * args.segs;
    let mut number = warp * thread::grid_dim_x() + thread::block_idx_x();
    let mut waits = true;
    while number < jobs() {
        let (job, desc) = job(args, number, args.blocks);
        number += warps * thread::grid_dim_x();
        let ours = desc.codec == C::CODEC
            && job.block < desc.n_blocks
            && job.tokens == 1
            && args.min_tokens <= 1
            && args.max_tokens >= 1;
        if !ours {
            continue;
        }
        let index = job.block * args.segs + job.seg;
        // 0, but of the job: addresses made with it are not kept in registers from job to job.
        let none = index >> 31;
        let ring = C::TABLE * 4 + (warp + none) * RING;
        let Some(mut decoder) = Decoder::<C>::open(shared, ring, &desc, index, one) else {
            fault(true, args.faults);
            continue;
        };
        if waits {
            // What `open` has waited for includes the table, which was copied before.
            table_barrier();
            waits = false;
        }
        decoder.begin();
        // What is read up to here, no kernel in flight writes.
        grid::wait();
        let (x, gsum) = input_row(args, job.slot);
        let work = Work {
            args,
            desc: &desc,
            out: out_index(args, &job, job.slot),
            seg: job.seg,
            block: job.block,
            offset: warp::reduce_add_i32(lane_gsum(args, gsum, job.seg)).wrapping_mul(8),
            gsum,
        };
        match pairs {
            32 => rows_in_registers::<C, 32>(&work, &mut decoder, x),
            24 => rows_in_registers::<C, 24>(&work, &mut decoder, x),
            16 => rows_in_registers::<C, 16>(&work, &mut decoder, x),
            _ => {
                let at = C::TABLE * 4 + warps * RING + warp * (warp_bytes(pairs) - RING);
                rows_in_shared(
                    &work,
                    &mut decoder,
                    x,
                    shared,
                    at + 4 * (warp::lane_id() + none),
                );
            }
        }
        decoder.close(args.faults);
    }
    if waits {
        cp_async_wait::<0>();
        table_barrier();
    }
    grid::wait();
}

impl Work<'_> {
    /// Adds a round's scaled sums of the rows of a group from `row` on to `totals`.
    #[inline(always)]
    fn fold_round<C: Code>(
        &self,
        fold: &Fold,
        row: u32,
        sums: [i32; 3],
        round: u32,
        totals: &mut [f32; 3],
    ) {
        let scales = group_scales::<C>(self.args, self.desc, fold, row, round);
        let gsum = self.gsum.load_nc(fold.group(round));
        let sums = C::rows(sums);
        unroll!(I in [0 1 2] {
            if I < C::HEIGHT as usize {
                let v = fold.reduce(sums[I], gsum, scales[I]);
                totals[I] = if round == 0 { v } else { totals[I] + v };
            }
        });
    }

    /// Stores the results of the rows of a group from `row` on.
    #[inline(always)]
    fn store<C: Code>(&self, row: u32, values: [u32; 3]) {
        store_group::<C>(self.args, self.out, row, values);
    }

    /// Stores the dot products of the rows of a group.
    #[inline(always)]
    fn store_dots<C: Code>(&self, row: u32, sums: [i32; 3]) {
        let sums = C::rows(sums);
        let mut values = [0; 3];
        unroll!(I in [0 1 2] {
            if I < C::HEIGHT as usize {
                values[I] = warp::reduce_add_i32(sums[I]).wrapping_sub(self.offset) as u32;
            }
        });
        self.store::<C>(row, values);
    }
}

/// The job's rows, a lane's P column pairs in registers: 24 are three rounds of 8, 16 and 32 one.
#[inline(always)]
fn rows_in_registers<C: Code, const P: usize>(
    work: &Work<'_>,
    decoder: &mut Decoder<C>,
    input: Global<u32>,
) {
    let args = work.args;
    let lane = warp::lane_id();
    let mut x = [0u32; 32];
    unroll!(I in [0 1 2 3 4 5 6 7] {
        if 4 * I < P {
            let round = if P == 24 { I / 2 } else { 0 };
            let within = if P == 24 { I % 2 } else { I };
            let word = lane_word(args, work.seg, round as u32, lane) + 4 * within as u32;
            let words = input.load_v4_nc(word);
            x[4 * I] = words[0];
            x[4 * I + 1] = words[1];
            x[4 * I + 2] = words[2];
            x[4 * I + 3] = words[3];
        }
    });
    let (mut t, end) = row_groups::<C>(args, work.desc, work.block);
    while t < end {
        let row = t * C::HEIGHT;
        let mut sums = [0i32; 3];
        let mut totals = [0f32; 3];
        unroll!(Q in [0 1 2 3] {
            if 8 * Q < P {
                unroll!(G in [0 1 2 3 4 5 6 7] {
                    let (first, second) = decoder.group();
                    C::multiply_entries(x[8 * Q + G], first, second, &mut sums);
                });
                decoder.refill();
                // Rounds of 24 pairs are folded one by one, other rows at their end.
                if args.grouped != 0 && (8 * Q + 8 == P || P == 24) {
                    let round = if P == 24 { Q as u32 } else { 0 };
                    // The fold's groups are constants here, which leaves nothing to keep for it.
                    let groups = if P == 16 { 16 } else if P == 24 { 8 } else { 32 };
                    let fold = Fold::with_groups(args, work.seg, lane, groups);
                    work.fold_round::<C>(&fold, row, sums, round, &mut totals);
                    sums = [0; 3];
                }
            }
        });
        if args.grouped != 0 {
            work.store::<C>(row, totals.map(f32::to_bits));
        } else {
            work.store_dots::<C>(row, sums);
        }
        t += 1;
    }
}

/// The job's rows for any number of column pairs, activations in shared memory, pair by pair a word for
/// each lane; the lane's first at byte `at`.
#[inline(always)]
fn rows_in_shared<C: Code>(
    work: &Work<'_>,
    decoder: &mut Decoder<C>,
    input: Global<u32>,
    shared: Shared<u32>,
    at: u32,
) {
    let args = work.args;
    let lane = warp::lane_id();
    let per_round = args.fold / (2 * LANES as u32);
    let mut round = 0;
    while round < args.rounds {
        let word = lane_word(args, work.seg, round, lane);
        let mut pair = 0;
        while pair < per_round {
            let to = at / 4 + (round * per_round + pair) * LANES as u32;
            shared.store(to, input.load_nc(word + pair));
            pair += 1;
        }
        round += 1;
    }
    let fold = Fold::new(args, work.seg, lane);
    // Each lane reads back what it stored itself.
    let (mut t, end) = row_groups::<C>(args, work.desc, work.block);
    while t < end {
        let row = t * C::HEIGHT;
        let mut sums = [0i32; 3];
        let mut totals = [0f32; 3];
        let mut word = at / 4;
        let mut round = 0;
        while round < args.rounds {
            let mut pair = 0;
            while pair < per_round {
                let check = if per_round - pair < CHECK {
                    per_round - pair
                } else {
                    CHECK
                };
                let mut i = 0;
                while i < check {
                    let x = shared.load(word);
                    let (first, second) = decoder.group();
                    C::multiply_entries(x, first, second, &mut sums);
                    word += LANES as u32;
                    i += 1;
                }
                decoder.refill();
                pair += check;
            }
            if args.grouped != 0 {
                work.fold_round::<C>(&fold, row, sums, round, &mut totals);
                sums = [0; 3];
            }
            round += 1;
        }
        if args.grouped != 0 {
            work.store::<C>(row, totals.map(f32::to_bits));
        } else {
            work.store_dots::<C>(row, sums);
        }
        t += 1;
    }
}
