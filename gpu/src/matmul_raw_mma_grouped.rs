//! Raw int4 expert matrices with a scale for each 64 columns times several tokens, on tensor cores:
//! `matmul_raw_mma_grouped`.
//!
//! Results as of [`mod@crate::matmul_raw`]: for each fold of columns the sum over its groups of 64, by halving (groups
//! 16 apart in a fold of 32, then 8, 4, 2, 1), of
//!
//! ```text
//! scale * (sum (n - 8) * X as f32)
//! ```
//!
//! and the folds of a segment in order. Dot products of a group are exact, as [`mod@crate::matmul_raw_mma`] has
//! them, whose departures hold here.
//!
//! Departures:
//! 1. A step of the multiplication has 32 columns of one group: a lane loads two words of a row, its 16
//!    columns of the group.
//! 2. Groups come with the bits of their numbers turned round, in which order halving adds them up: what waits
//!    for its other half is one sum for each bit.
//! 3. 8 tokens are multiplied with loaded nibbles; more read the rows again: sums that wait leave no registers
//!    for 16.

use cuda_std::intrinsics::{mma_u8_s8, mma_u8_u8};
use cuda_std::mem::Global;
use cuda_std::{kernel, thread, warp};

pub use crate::abi::ExpertArgs;
pub use crate::matmul_raw_mma::{BLOCKS, ROWS, THREADS};

use crate::abi::MatrixDesc;
use crate::arith::GROUP;
use crate::coded::unroll;
use crate::coded_jobs::{Job, active_count, input_of, job, scale_at, store_out};
use crate::layout::LANES;
use crate::matmul_raw::packed;
use crate::matmul_raw_mma::{TOKENS, bytes};

/// Bits of the number of a fold's group, at most: a fold has 2,048 columns or fewer.
const BITS: usize = 5;

/// See the module; for experts with any number of tokens. `args.grouped` must not be 0.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live.
#[kernel(threads = 256, min_blocks = 2)]
pub unsafe fn matmul_raw_mma_grouped(args: ExpertArgs) {
    let args = &args;
    let warps = thread::block_dim_x() / LANES as u32;
    let jobs = active_count(args) * args.count * args.blocks * args.segs;
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
            tile(args, &job, &desc, weights, token);
            token += TOKENS;
        }
    }
}

/// Two words of each of a lane's two rows.
type Words = [[u32; 2]; 2];

/// A lane's results: of two rows and two tokens.
type Results = [f32; 4];

/// The job's rows times 8 tokens from `token` on.
#[inline(always)]
fn tile(args: &ExpertArgs, job: &Job, desc: &MatrixDesc, weights: Global<u32>, token: u32) {
    let lane = warp::lane_id();
    let (g, t) = (lane / 4, lane % 4);
    let first = job.block * ROWS;
    let last = args.rows - 1;
    let rows = [g, g + 8].map(|r| (first + r).min(last));
    let of_row = args.cols / GROUP as u32;
    let a_fold = args.fold / GROUP as u32;
    let bits = a_fold.trailing_zeros();
    let begin = job.seg * args.rounds * a_fold;
    let groups = args.rounds * a_fold;
    // Group number `n` in the order of the sum, within the row.
    let group = |n: u32| {
        let of_fold = n & (a_fold - 1);
        begin + (n - of_fold) + (of_fold.reverse_bits() >> (31 - bits) >> 1)
    };
    let input = |token: u32| input_of(args, job.slot + token.min(job.tokens - 1));
    // The token whose activations a lane loads, and the two that its results are of.
    let loaded = input(token + g) * (args.cols / 2);
    let results_of = [0, 1].map(|j| input(token + 2 * t + j) * of_row);
    // SAFETY: rows of these are read, which no kernel in flight writes.
    let (xs, gsums) = unsafe { (Global::<u32>::new(args.x), Global::<i32>::new(args.gsum)) };
    let load = |n: u32, words: &mut Words| {
        unroll!(R in [0 1] {
            let at = rows[R] * (args.cols / 8) + group(n) * 8 + 2 * t;
            weights.reload_v2_stream(n < groups, at, &mut words[R]);
        });
    };
    let multiply = |n: u32, words: &Words| {
        let group = group(n);
        let scales = rows.map(|row| scale_at(desc, row * of_row + group));
        let at = loaded + (group * 8 + 2 * t) * 4;
        let x = [xs.load_v4_nc(at), xs.load_v4_nc(at + 4)];
        let offsets = results_of.map(|of| gsums.load_nc(of + group));
        let mut sums = [[0i32; 4]; 2];
        unroll!(J in [0 1] {
            let a = [
                words[0][J] & 0x0f0f_0f0f,
                words[1][J] & 0x0f0f_0f0f,
                words[0][J] >> 4 & 0x0f0f_0f0f,
                words[1][J] >> 4 & 0x0f0f_0f0f,
            ];
            let x = bytes(x[J]);
            sums[0] = mma_u8_s8(a, x.high, sums[0]);
            sums[1] = mma_u8_u8(a, x.low, sums[1]);
        });
        let mut results: Results = [0.0; 4];
        unroll!(I in [0 1 2 3] {
            let dot = sums[0][I].wrapping_mul(256).wrapping_add(sums[1][I]);
            let dot = dot.wrapping_sub(offsets[I % 2].wrapping_mul(8));
            results[I] = scales[I / 2] * dot as f32;
        });
        results
    };
    let mut waiting: [Results; BITS] = [[0.0; 4]; BITS];
    let mut totals: Results = [0.0; 4];
    let mut add = |n: u32, mut sums: Results| {
        let mut carry = true;
        unroll!(L in [0 1 2 3 4] {
            if carry && (L as u32) < bits {
                if n >> L & 1 != 0 {
                    sums = plus(waiting[L], sums);
                } else {
                    waiting[L] = sums;
                    carry = false;
                }
            }
        });
        // A whole fold.
        if carry {
            totals = if n < a_fold { sums } else { plus(totals, sums) };
        }
    };
    let mut even = [[0u32; 2]; 2];
    let mut odd = [[0u32; 2]; 2];
    load(0, &mut even);
    load(1, &mut odd);
    let mut n = 0;
    while n < groups {
        let results = multiply(n, &even);
        load(n + 2, &mut even);
        add(n, results);
        if n + 1 < groups {
            let results = multiply(n + 1, &odd);
            load(n + 3, &mut odd);
            add(n + 1, results);
        }
        n += 2;
    }
    unroll!(I in [0 1 2 3] {
        let token = token + 2 * t + I as u32 % 2;
        let row = first + g + 8 * (I as u32 / 2);
        if token < job.tokens && row <= last {
            store_out(args, job, job.slot + token, row, totals[I].to_bits());
        }
    });
}

#[inline(always)]
fn plus(a: Results, b: Results) -> Results {
    [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
}
