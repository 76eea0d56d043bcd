//! Raw int4 expert matrices times one token, folds of 1,024 columns or more: `matmul_raw`. Narrower folds:
//! [`mod@crate::matmul_raw_narrow`]; several tokens: [`mod@crate::matmul_raw_mma`].
//!
//! Results as of `matmul_rans_*`, from packed nibbles in memory, row-major, the even column in the
//! low half of a byte. Coded matrices come from `scratch`, where `decode_rans_*` left them.
//! A warp's job is `job_rows` (at most 32) rows of a segment of columns.
//!
//! Departures:
//! 1. A lane loads 16 bytes, 32 neighbouring columns, at a time where a fold has 1,024 columns or
//!    more; neighbouring lanes neighbouring bytes. A group of 64 columns is then two lanes'; the
//!    sums of a group and of a fold come out the same as in `crate::layout::Folds`.
//! 2. No shifts: `word & 0xf0f0f0f0` is multiplied as it is, 16 times too large, in a sum of its own.
//!    Activations are put in the order of the nibbles once for the job.
//! 3. Activations stay in registers; two rows in flight, each reloaded into the registers that it leaves.

use cuda_std::intrinsics::{dp2a_hi_s32_u32, dp2a_lo_s32_u32, prmt};
use cuda_std::mem::Global;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::{CODEC_RAW, MatrixDesc};
use crate::coded::unroll;
use crate::coded_jobs::{Job, active_count, input_row, job, lane_gsum, scale_at, store_out};
use crate::layout::LANES;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Folds of fewer columns than this are those of [`mod@crate::matmul_raw_narrow`].
pub const NARROW: usize = 1024;

/// Columns that a warp loads at a time, 16 bytes a lane.
const CHUNK: u32 = 1024;

/// See the module; passes over experts that have not exactly one token, and does nothing where folds are
/// narrower.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live.
#[kernel(threads = 256, min_blocks = 3, prologue)]
pub unsafe fn matmul_raw(args: ExpertArgs) {
    let args = &args;
    if !args.scratch.is_empty() {
        grid::wait();
    }
    let warps = thread::block_dim_x() / LANES as u32;
    let jobs = active_count(args) * args.count * args.blocks * args.segs;
    let mut number = warp::warp_id() * thread::grid_dim_x() + thread::block_idx_x();
    // Their `block` counts `job_rows` rows.
    while number < jobs {
        let (job, desc) = job(args, number, args.blocks);
        number += warps * thread::grid_dim_x();
        if job.tokens < args.min_tokens.max(1) || job.tokens > args.max_tokens.min(1) {
            continue;
        }
        let Some(weights) = packed(args, &job, &desc) else {
            continue;
        };
        match args.fold {
            2048 => one_token::<2>(args, &job, &desc, weights),
            1024 => one_token::<1>(args, &job, &desc, weights),
            // Those of `matmul_raw_narrow`.
            _ => (),
        }
    }
    grid::wait();
}

/// Packed nibbles of a job's matrix; `None` unless its codec is one of the launch's `sources`.
#[inline(always)]
pub(crate) fn packed(args: &ExpertArgs, job: &Job, desc: &MatrixDesc) -> Option<Global<u32>> {
    let words = u64::from(args.rows) * u64::from(args.cols / 8);
    if args.sources >> (desc.codec & 31) & 1 == 0 {
        return None;
    }
    let packed = if desc.codec == CODEC_RAW {
        desc.stream.part::<u32>(0, words)
    } else {
        let place = u64::from(job.active * args.count + job.matrix) * words;
        args.scratch.part::<u32>(place, words)
    };
    // SAFETY: the matrix, which no kernel in flight writes.
    Some(unsafe { Global::new(packed) })
}

/// First row of a job and its end.
#[inline(always)]
pub(crate) fn rows_of(args: &ExpertArgs, job: &Job) -> (u32, u32) {
    let first = job.block * args.job_rows;
    let end = first + args.job_rows;
    (first, if end < args.rows { end } else { args.rows })
}

/// Adds a word of 8 nibbles times 4 words of activations in the order of the nibbles: `even` holds
/// columns (0, 2), (4, 6), `odd` (1, 3), (5, 7). The second sum is 16 times too large.
#[inline(always)]
pub(crate) fn multiply(word: u32, even: [u32; 2], odd: [u32; 2], sums: &mut [i32; 2]) {
    let low = word & 0x0f0f_0f0f;
    let high = word & 0xf0f0_f0f0;
    sums[0] = dp2a_lo_s32_u32(even[0], low, sums[0]);
    sums[1] = dp2a_lo_s32_u32(odd[0], high, sums[1]);
    sums[0] = dp2a_hi_s32_u32(even[1], low, sums[0]);
    sums[1] = dp2a_hi_s32_u32(odd[1], high, sums[1]);
}

/// Activations of columns 0 to 7 in the order of a word's nibbles.
#[inline(always)]
pub(crate) fn by_nibble(x: [u32; 4]) -> ([u32; 2], [u32; 2]) {
    (
        [prmt(x[0], x[1], 0x5410), prmt(x[2], x[3], 0x5410)],
        [prmt(x[0], x[1], 0x7632), prmt(x[2], x[3], 0x7632)],
    )
}

/// Scaled sum of a fold of N chunks from the lane's sums of unsigned nibbles in each; groups are two
/// lanes'. The same in all lanes.
#[inline(always)]
fn fold_chunks<const N: usize>(sums: [i32; 2], gsums: [i32; 2], scales: [f32; 2]) -> f32 {
    let part = |c: usize| {
        let sum = sums[c].wrapping_add(warp::shuffle_xor_i32(sums[c], 1));
        scales[c] * sum.wrapping_sub(gsums[c].wrapping_mul(8)) as f32
    };
    let mut v = part(0);
    if N == 2 {
        v += part(1);
    }
    unroll!(D in [16 8 4 2] {
        v += warp::shuffle_xor_f32(v, D as u32);
    });
    v
}

/// Group of the lane in chunk `c`, within the row.
#[inline(always)]
fn chunk_group<const N: usize>(job: &Job, lane: u32, c: usize) -> u32 {
    job.seg * (16 * N as u32) + c as u32 * 16 + lane / 2
}

/// A job of one token, folds of N chunks.
#[inline(always)]
fn one_token<const N: usize>(
    args: &ExpertArgs,
    job: &Job,
    desc: &MatrixDesc,
    weights: Global<u32>,
) {
    let lane = warp::lane_id();
    let (first, end) = rows_of(args, job);
    let width = args.cols / 8;
    let start = job.seg * N as u32 * (CHUNK / 8) + lane * 4;
    let at = |row: u32, c: usize| row * width + start + c as u32 * (CHUNK / 8);
    let load = |row: u32, c: usize| {
        if row < end && c < N {
            weights.load_v4_stream(at(row, c))
        } else {
            [0; 4]
        }
    };
    let mut even_row = [load(first, 0), load(first, 1)];
    let mut odd_row = [load(first + 1, 0), load(first + 1, 1)];
    // What is read up to here, no kernel in flight writes.
    grid::wait();
    let (input, gsum) = input_row(args, job.slot);
    let mut even = [[0u32; 2]; 8];
    let mut odd = [[0u32; 2]; 8];
    unroll!(I in [0 1 2 3 4 5 6 7] {
        if I < 4 * N {
            let chunk = job.seg * N as u32 + I as u32 / 4;
            let word = chunk * (CHUNK / 2) + lane * 16 + I as u32 % 4 * 4;
            (even[I], odd[I]) = by_nibble(input.load_v4_nc(word));
        }
    });
    let mut gsums = [0; 2];
    let offset = warp::reduce_add_i32(lane_gsum(args, gsum, job.seg)).wrapping_mul(8);
    if args.grouped != 0 {
        unroll!(K in [0 1] {
            if K < N {
                gsums[K] = gsum.load_nc(chunk_group::<N>(job, lane, K));
            }
        });
    }
    let mut keep = 0u32;
    let mut row = first;
    while row < end {
        let result = row_result::<N>(args, job, desc, &even_row, &even, &odd, row, gsums, offset);
        unroll!(K in [0 1] {
            if K < N {
                weights.reload_v4_stream(row + 2 < end, at(row + 2, K), &mut even_row[K]);
            }
        });
        if lane == row - first {
            keep = result;
        }
        // Past the end this is the row before, again; nobody keeps it.
        let next = if row + 1 < end { row + 1 } else { row };
        let result = row_result::<N>(args, job, desc, &odd_row, &even, &odd, next, gsums, offset);
        unroll!(K in [0 1] {
            if K < N {
                weights.reload_v4_stream(row + 3 < end, at(row + 3, K), &mut odd_row[K]);
            }
        });
        if lane == row + 1 - first {
            keep = result;
        }
        row += 2;
    }
    if first + lane < end {
        store_out(args, job, job.slot, first + lane, keep);
    }
}

/// Result of a row whose nibbles are loaded.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn row_result<const N: usize>(
    args: &ExpertArgs,
    job: &Job,
    desc: &MatrixDesc,
    words: &[[u32; 4]; 2],
    even: &[[u32; 2]; 8],
    odd: &[[u32; 2]; 8],
    row: u32,
    gsums: [i32; 2],
    offset: i32,
) -> u32 {
    let mut sums = [[0i32; 2]; 2];
    unroll!(K in [0 1] {
        if K < N {
            unroll!(I in [0 1 2 3] {
                multiply(words[K][I], even[4 * K + I], odd[4 * K + I], &mut sums[K]);
            });
        }
    });
    let chunk = |k: usize| sums[k][0].wrapping_add(sums[k][1] >> 4);
    if args.grouped == 0 {
        let sum = chunk(0).wrapping_add(chunk(1));
        warp::reduce_add_i32(sum).wrapping_sub(offset) as u32
    } else {
        let mut scales = [0.0; 2];
        unroll!(K in [0 1] {
            if K < N {
                let group = chunk_group::<N>(job, warp::lane_id(), K);
                scales[K] = scale_at(desc, row * (args.cols / 64) + group);
            }
        });
        fold_chunks::<N>([chunk(0), chunk(1)], gsums, scales).to_bits()
    }
}
