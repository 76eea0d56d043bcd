//! Raw int4 expert matrices with a scale a row times several tokens, on tensor cores:
//! `matmul_raw_mma`.
//!
//! Results as of [`mod@crate::matmul_raw`]. With activations cut into bytes, `X = 256 * hi + lo` (hi
//! signed, lo unsigned), a dot product with unsigned nibbles n is
//!
//! ```text
//! sum (n - 8) * X = 256 * sum n * hi + sum n * lo - 8 * sum X
//! ```
//!
//! and each sum is one of 8-bit products in int32, exact: tensor cores give the same bits as any
//! other way of adding. A warp's job is [`ROWS`] rows of a segment.
//!
//! Departures:
//! 1. The order of columns within a dot product is free. Lane `l` holds, of rows `l / 4` and
//!    `l / 4 + 8`, the columns that 4 (or 2) neighbouring words have: word `j` is step `j` of the
//!    multiplication, its low nibbles (even columns) the first half of the step, its high nibbles the
//!    second. Activations are put in that order where they are cut into bytes.
//! 2. Two chunks of columns are in flight, each reloaded into the registers that it leaves.
//! 3. 8 or 16 tokens are multiplied with loaded nibbles; more read the rows again. The last token and
//!    row stand in for those that are not there.

use cuda_std::intrinsics::{mma_u8_s8, mma_u8_u8, prmt};
use cuda_std::mem::Global;
use cuda_std::{kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::arith::GROUP;
use crate::coded::unroll;
use crate::coded_jobs::{Job, active_count, input_of, job, store_out};
use crate::layout::LANES;
use crate::matmul_raw::packed;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Blocks of a multiprocessor.
pub const BLOCKS: u32 = 2;

/// Rows of a job: [`ExpertArgs::job_rows`] must be this.
pub const ROWS: u32 = 16;

/// Tokens of a multiplication.
pub(crate) const TOKENS: u32 = 8;

/// See the module; for experts with any number of tokens. `args.grouped` must be 0.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live.
#[kernel(threads = 256, min_blocks = 2)]
pub unsafe fn matmul_raw_mma(args: ExpertArgs) {
    let args = &args;
    let warps = thread::block_dim_x() / LANES as u32;
    let jobs = active_count(args) * args.count * args.blocks * args.segs;
    let wide = (args.rounds * args.fold).is_multiple_of(128);
    let mut number = warp::warp_id() * thread::grid_dim_x() + thread::block_idx_x();
    while number < jobs {
        let (job, desc) = job(args, number, args.blocks);
        number += warps * thread::grid_dim_x();
        if job.tokens < args.min_tokens.max(1) || job.tokens > args.max_tokens {
            continue;
        }
        let Some(weights) = packed(args, &job, &desc) else {
            continue;
        };
        let mut token = 0;
        while token < job.tokens {
            match (wide, job.tokens - token > TOKENS) {
                (true, false) => tile::<4, 1>(args, &job, weights, token),
                (true, true) => tile::<4, 2>(args, &job, weights, token),
                (false, _) => tile::<2, 1>(args, &job, weights, token),
            }
            token += if wide { 2 * TOKENS } else { TOKENS };
        }
    }
}

/// Bytes of the activations of 8 columns (even low): of the even and of the odd columns.
pub(crate) struct Bytes {
    pub(crate) high: [u32; 2],
    pub(crate) low: [u32; 2],
}

/// Cuts 8 columns' activations into bytes.
#[inline(always)]
pub(crate) fn bytes(x: [u32; 4]) -> Bytes {
    let even = [prmt(x[0], x[1], 0x5140), prmt(x[2], x[3], 0x5140)];
    let odd = [prmt(x[0], x[1], 0x7362), prmt(x[2], x[3], 0x7362)];
    let low = |of: [u32; 2]| prmt(of[0], of[1], 0x5410);
    let high = |of: [u32; 2]| prmt(of[0], of[1], 0x7632);
    Bytes {
        high: [high(even), high(odd)],
        low: [low(even), low(odd)],
    }
}

/// W words of the two rows of a lane.
type Words = [[u32; 4]; 2];

/// Sums of the high and of the low bytes of 8 tokens.
type Sums = [[i32; 4]; 2];

/// The job's rows times N batches of 8 tokens from `token` on; a lane loads W words at a time.
#[inline(always)]
fn tile<const W: usize, const N: usize>(
    args: &ExpertArgs,
    job: &Job,
    weights: Global<u32>,
    token: u32,
) {
    let lane = warp::lane_id();
    let (g, t) = (lane / 4, lane % 4);
    let cols = args.rounds * args.fold;
    let chunks = cols / (32 * W as u32);
    let first = job.block * ROWS;
    let last = args.rows - 1;
    let start = job.seg * (cols / 8) + t * W as u32;
    let at = [g, g + 8].map(|r| (first + r).min(last) * (args.cols / 8) + start);
    let inputs = [0, 1].map(|n| {
        let token = token + n * TOKENS + g;
        input_of(args, job.slot + token.min(job.tokens - 1))
    });
    // SAFETY: rows of these are read, which no kernel in flight writes.
    let (xs, gsums) = unsafe { (Global::<u32>::new(args.x), Global::<i32>::new(args.gsum)) };
    let load = |chunk: u32, words: &mut Words| {
        unroll!(R in [0 1] {
            let at = at[R] + chunk * 4 * W as u32;
            if W == 4 {
                weights.reload_v4_stream(chunk < chunks, at, &mut words[R]);
            } else if chunk < chunks {
                let pair = weights.load_v2_nc(at);
                words[R] = [pair[0], pair[1], 0, 0];
            }
        });
    };
    let multiply = |chunk: u32, words: &Words, sums: &mut [Sums; 2]| {
        unroll!(B in [0 1] {
            if B < N {
                let at = inputs[B] * (args.cols / 2) + (start + chunk * 4 * W as u32) * 4;
                let mut x = [[0u32; 4]; 4];
                unroll!(J in [0 1 2 3] {
                    if J < W {
                        x[J] = xs.load_v4_nc(at + 4 * J as u32);
                    }
                });
                unroll!(J in [0 1 2 3] {
                    if J < W {
                        let a = [
                            words[0][J] & 0x0f0f_0f0f,
                            words[1][J] & 0x0f0f_0f0f,
                            words[0][J] >> 4 & 0x0f0f_0f0f,
                            words[1][J] >> 4 & 0x0f0f_0f0f,
                        ];
                        let x = bytes(x[J]);
                        sums[B][0] = mma_u8_s8(a, x.high, sums[B][0]);
                        sums[B][1] = mma_u8_u8(a, x.low, sums[B][1]);
                    }
                });
            }
        });
    };
    let mut even = [[0u32; 4]; 2];
    let mut odd = [[0u32; 4]; 2];
    load(0, &mut even);
    load(1, &mut odd);
    let mut sums = [[[0i32; 4]; 2]; 2];
    let mut chunk = 0;
    while chunk < chunks {
        multiply(chunk, &even, &mut sums);
        load(chunk + 2, &mut even);
        if chunk + 1 < chunks {
            multiply(chunk + 1, &odd, &mut sums);
            load(chunk + 3, &mut odd);
        }
        chunk += 2;
    }
    unroll!(B in [0 1] {
        if B < N {
            // Sum of the activations of the lane's token; results are of two other tokens.
            let groups = cols / GROUP as u32;
            let from = inputs[B] * (args.cols / GROUP as u32) + job.seg * groups;
            let mut sum = 0i32;
            let mut group = t;
            while group < groups {
                sum = sum.wrapping_add(gsums.load_nc(from + group));
                group += 4;
            }
            sum = sum.wrapping_add(warp::shuffle_xor_i32(sum, 1));
            sum = sum.wrapping_add(warp::shuffle_xor_i32(sum, 2));
            unroll!(J in [0 1] {
                let of = 2 * t + J as u32;
                let offset = warp::shuffle_idx_i32(sum, of * 4).wrapping_mul(8);
                let token = token + B as u32 * TOKENS + of;
                unroll!(R in [0 1] {
                    let row = first + g + 8 * R as u32;
                    let high = sums[B][0][2 * R + J].wrapping_mul(256);
                    let value = high.wrapping_add(sums[B][1][2 * R + J]).wrapping_sub(offset);
                    if token < job.tokens && row <= last {
                        store_out(args, job, job.slot + token, row, value as u32);
                    }
                });
            });
        }
    });
}
