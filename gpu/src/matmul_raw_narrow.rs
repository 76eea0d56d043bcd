//! Raw int4 expert matrices times one token where a fold has fewer than 1,024 columns: `matmul_raw_narrow`.
//!
//! Results as of [`mod@crate::matmul_raw`], and its departures 2 and 3. A warp's job is `job_rows` (at most
//! 32) rows of a segment.
//!
//! Departures:
//! 1. Of a fold of 512 columns a lane loads two words at a time, of 256 one: a round is one load a lane,
//!    groups and folds come out as in `crate::layout::Folds`.
//! 2. With scales of rows columns may be dealt at will: 256 columns make a load whatever the fold.
//! 3. What is left, grouped scales in folds of 128 and 64 columns, goes through a plain loop.

use cuda_std::intrinsics::{dp2a_hi_s32_u32, dp2a_lo_s32_u32, prmt};
use cuda_std::mem::Global;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::MatrixDesc;
use crate::coded::unroll;
use crate::coded_jobs::{Fold, Job, active_count, input_row, job, lane_gsum, store_out};
use crate::layout::LANES;
use crate::matmul_raw::{by_nibble, multiply, packed, rows_of};

/// Threads of a block.
pub const THREADS: u32 = 384;
/// Blocks of a multiprocessor.
pub const BLOCKS: u32 = 1;

/// See the module; passes over experts that have not exactly one token.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live.
#[kernel(threads = 384, min_blocks = 1, prologue)]
pub unsafe fn matmul_raw_narrow(args: ExpertArgs) {
    let args = &args;
    if !args.scratch.is_empty() {
        grid::wait();
    }
    let warps = thread::block_dim_x() / LANES as u32;
    let jobs = active_count(args) * args.count * args.blocks * args.segs;
    let mut number = warp::warp_id() * thread::grid_dim_x() + thread::block_idx_x();
    while number < jobs {
        let (job, desc) = job(args, number, args.blocks);
        number += warps * thread::grid_dim_x();
        if job.tokens != 1 || args.min_tokens > 1 || args.max_tokens == 0 {
            continue;
        }
        let Some(weights) = packed(args, &job, &desc) else {
            continue;
        };
        match (args.fold, args.grouped) {
            (512, _) => one_token::<2, 3>(args, &job, &desc, weights),
            (256, _) | (_, 0) => one_token::<1, 8>(args, &job, &desc, weights),
            _ => {
                grid::wait();
                plain(args, &job, &desc, weights);
            }
        }
    }
    grid::wait();
}

/// A job: a lane has W neighbouring words in each of up to N loads of a row.
#[inline(always)]
fn one_token<const W: usize, const N: usize>(
    args: &ExpertArgs,
    job: &Job,
    desc: &MatrixDesc,
    weights: Global<u32>,
) {
    const { assert!(W <= 2 && W * N <= 8) };
    let lane = warp::lane_id();
    let (first, end) = rows_of(args, job);
    let width = args.cols / 8;
    // Words of a segment, and the lane's in a chunk.
    let words = args.rounds * args.fold / 8;
    let start = job.seg * words;
    let place = |c: usize| (c * LANES * W) as u32 + lane * W as u32;
    let there = |c: usize| place(c) < words;
    let own = start + if there(0) { place(0) } else { 0 };
    let load = |row: u32, to: &mut [[u32; 2]; 8]| {
        // The same register for all loads of a row, and the last row's past the end.
        let from = weights.at(u64::from(row.min(end - 1) * width + own));
        unroll!(C in [0 1 2 3 4 5 6 7] {
            if C < N {
                let word = (C * LANES * W) as u32;
                if W == 2 {
                    from.reload_v2_stream(row < end && there(C), word, &mut to[C]);
                } else {
                    from.reload_u32(row < end && there(C), word, &mut to[C][0]);
                }
            }
        });
    };
    let mut even_row = [[0; 2]; 8];
    let mut odd_row = [[0; 2]; 8];
    load(first, &mut even_row);
    load(first + 1, &mut odd_row);
    // What is read up to here, no kernel in flight writes.
    grid::wait();
    let (input, gsum) = input_row(args, job.slot);
    let mut x = Activations {
        even: [[0; 2]; 8],
        odd: [[0; 2]; 8],
        gsum,
        offset: warp::reduce_add_i32(lane_gsum(args, gsum, job.seg)).wrapping_mul(8),
    };
    unroll!(C in [0 1 2 3 4 5 6 7] {
        if C < N {
            unroll!(I in [0 1] {
                if I < W && there(C) {
                    let word = (start + place(C) + I as u32) * 4;
                    (x.even[W * C + I], x.odd[W * C + I]) = by_nibble(input.load_v4_nc(word));
                }
            });
        }
    });
    // More registers would be needed for more.
    let step = if W == 2 { 4 } else { 2 };
    let mut keep = 0u32;
    let mut row = first;
    while row < end {
        // Straight on: of loads that are used behind a branch, the first to be used waits for all.
        unroll!(I in [0 1 2 3] {
            if I < step {
                let buffer = if I.is_multiple_of(2) { &mut even_row } else { &mut odd_row };
                // Past the end this is the last row, again; nobody keeps it.
                let row = row + I as u32;
                let at = if row < end { row } else { end - 1 };
                let result = row_result::<W, N>(args, job, desc, buffer, &x, at);
                load(row + 2, buffer);
                if lane == row - first {
                    keep = result;
                }
            }
        });
        row += step as u32;
    }
    if first + lane < end {
        store_out(args, job, job.slot, first + lane, keep);
    }
}

/// Activations of a token in the order of the nibbles, sums of its groups, and 8 times the sum of all.
struct Activations {
    even: [[u32; 2]; 8],
    odd: [[u32; 2]; 8],
    gsum: Global<i32>,
    offset: i32,
}

/// Result of a row whose nibbles are loaded.
#[inline(always)]
fn row_result<const W: usize, const N: usize>(
    args: &ExpertArgs,
    job: &Job,
    desc: &MatrixDesc,
    words: &[[u32; 2]; 8],
    x: &Activations,
    row: u32,
) -> u32 {
    let mut chunks = [0i32; 8];
    unroll!(C in [0 1 2 3 4 5 6 7] {
        if C < N {
            let mut sums = [0i32; 2];
            unroll!(I in [0 1] {
                if I < W {
                    multiply(words[C][I], x.even[W * C + I], x.odd[W * C + I], &mut sums);
                }
            });
            chunks[C] = sums[0].wrapping_add(sums[1] >> 4);
        }
    });
    if args.grouped == 0 {
        let sum = chunks
            .iter()
            .fold(0i32, |sum, chunk| sum.wrapping_add(*chunk));
        return warp::reduce_add_i32(sum).wrapping_sub(x.offset) as u32;
    }
    let lane = warp::lane_id();
    let fold = Fold::with_groups(args, job.seg, lane, 4 * W as u32);
    let mut total = 0.0;
    unroll!(C in [0 1 2 3 4 5 6 7] {
        if C < N && (C as u32) < args.rounds {
            let gsum = x.gsum.load_nc(fold.group(C as u32));
            let v = fold.reduce(chunks[C], gsum, fold.scale(desc, row, C as u32));
            total = if C == 0 { v } else { total + v };
        }
    });
    total.to_bits()
}

/// A job whatever the fold: a lane owns `fold / 32` neighbouring columns of each round.
#[inline(always)]
fn plain(args: &ExpertArgs, job: &Job, desc: &MatrixDesc, weights: Global<u32>) {
    let lane = warp::lane_id();
    let (first, end) = rows_of(args, job);
    let fold = Fold::new(args, job.seg, lane);
    let (x, gsums) = input_row(args, job.slot);
    let lane_cols = args.fold / LANES as u32;
    let mut keep = 0u32;
    let mut row = first;
    while row < end {
        let mut sum = 0i32;
        let mut total = 0f32;
        let mut round = 0;
        while round < args.rounds {
            let column = (job.seg * args.rounds + round) * args.fold + lane * lane_cols;
            let byte = row * (args.cols / 2) + column / 2;
            let mut done = 0;
            while done < lane_cols {
                // 8 columns, or all of the lane's.
                let word = match lane_cols {
                    2 => u32::from(weights.cast::<u8>().load_nc(byte)),
                    4 => u32::from(weights.cast::<u16>().load_nc(byte / 2)),
                    _ => weights.load_nc((byte + done / 2) / 4),
                };
                let low = word & 0x0f0f_0f0f;
                let high = word >> 4 & 0x0f0f_0f0f;
                let nibbles = [prmt(low, high, 0x5140), prmt(low, high, 0x7362)];
                unroll!(J in [0 1 2 3] {
                    if 2 * (J as u32) < lane_cols {
                        let x = x.load_nc((column + done) / 2 + J as u32);
                        sum = if J.is_multiple_of(2) {
                            dp2a_lo_s32_u32(x, nibbles[J / 2], sum)
                        } else {
                            dp2a_hi_s32_u32(x, nibbles[J / 2], sum)
                        };
                    }
                });
                done += 8;
            }
            if args.grouped != 0 {
                let gsum = gsums.load_nc(fold.group(round));
                let v = fold.reduce(sum, gsum, fold.scale(desc, row, round));
                total = if round == 0 { v } else { total + v };
                sum = 0;
            }
            round += 1;
        }
        let value = if args.grouped != 0 {
            total.to_bits()
        } else {
            let offset = lane_gsum(args, gsums, job.seg).wrapping_mul(8);
            warp::reduce_add_i32(sum.wrapping_sub(offset)) as u32
        };
        if lane == row - first {
            keep = value;
        }
        row += 1;
    }
    if first + lane < end {
        store_out(args, job, job.slot, first + lane, keep);
    }
}
