//! Expert matrix times 2 to 8 tokens, decoded to registers: `matmul_rans_tokens_pair`,
//! `matmul_rans_tokens_triple`.
//!
//! Results as of `matmul_rans_*`, for every token of an expert; a nibble is decoded once and
//! multiplied where it is decoded with all tokens.
//!
//! Departures:
//! 1. Activations do not fit registers; they stand in shared memory. A *set* is what an expert's
//!    tokens are in a segment, the same for its matrices and blocks; a block of threads stages up to
//!    `stage` sets at a time, and its warps take (matrix, block) jobs of those.
//! 2. Jobs are numbered by (expert, segment, matrix, block), of the experts that the launch covers
//!    alone; each block of threads takes an equal share of neighbouring ones, in rounds of equal size.
//! 3. Four neighbouring column pairs are decoded, then multiplied token by token from 16-byte loads,
//!    where a fold gives a lane a multiple of 4 pairs; else pairs go singly.
//! 4. 2, 4 or 8 tokens are multiplied; the last token stands in for those that are not there.
//! 5. The results of a row group stay in one register, lane by lane (token, row), and leave in one
//!    store.
//! 6. The ring is asked every `EVERY` groups, which halves it: room for activations.
//!
//! Shared memory, in this order: table; the ring of each warp; `stage` sets of
//! `width(max_tokens) * pairs * 128` bytes.

use cuda_std::mem::Global;
use cuda_std::shared::Shared;
use cuda_std::{kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::MatrixDesc;
use crate::arith::GROUP;
use crate::coded::{Code, Decoder, Pair, Triple, load_table, ring, unroll};
use crate::coded_jobs::{
    Fold, Job, covered, div_rem, fault, group_scales, input_of, input_row, lane_gsum, lane_word,
    row_groups, store_out,
};
use crate::layout::LANES;

/// Most threads of a block.
pub const THREADS: u32 = 512;

/// Most tokens of an expert.
pub const TOKENS: u32 = 8;

/// Groups between two checks of the ring.
const EVERY: u32 = 4;

/// Bytes of shared memory of a warp, beside table and activations.
pub const WARP_BYTES: u32 = ring(EVERY);

/// Tokens that a set has room for, in a launch for up to `max_tokens`.
pub const fn width(max_tokens: u32) -> u32 {
    match max_tokens {
        0..=2 => 2,
        3 | 4 => 4,
        _ => TOKENS,
    }
}

/// Bytes of shared memory of a set.
pub const fn set_bytes(max_tokens: u32, pairs: u32) -> u32 {
    width(max_tokens) * pairs * 4 * LANES as u32
}

/// See the module.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live; dynamic shared memory is as the module
/// says.
#[kernel(threads = 512, min_blocks = 1)]
pub unsafe fn matmul_rans_tokens_pair(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Pair>(&args) }
}

/// See the module.
///
/// # Safety
/// As [`matmul_rans_tokens_pair()`].
#[kernel(threads = 512, min_blocks = 1)]
pub unsafe fn matmul_rans_tokens_triple(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Triple>(&args) }
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn matmul<C: Code>(args: &ExpertArgs) {
    let pairs = args.rounds * args.fold / (2 * LANES as u32);
    let warp = warp::warp_id();
    let warps = thread::block_dim_x() / LANES as u32;
    let head = C::TABLE * 4 + args.stage * set_bytes(args.max_tokens, pairs);
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, (head + warps * WARP_BYTES) / 4) };
    let plan = Plan {
        args,
        shared,
        sets: C::TABLE + warps * WARP_BYTES / 4,
        width: width(args.max_tokens),
        pairs,
        per_round: args.fold / (2 * LANES as u32),
    };
    let ring = C::TABLE * 4 + warp * WARP_BYTES;
    let one = args.count.min(1);
    let per_set = args.count * args.blocks;
    let jobs = covered(args, TOKENS, u32::MAX).1 * args.segs * per_set;
    let (share, rest) = div_rem(jobs, thread::grid_dim_x());
    let b = thread::block_idx_x();
    let mut number = b * share + b.min(rest);
    let end = number + share + u32::from(b < rest);
    if number == end {
        return;
    }
    load_table::<C>(args.table, shared);
    while number < end {
        let (set, within) = div_rem(number, per_set);
        let left = end - number;
        let (rounds, _) = div_rem(left + warps - 1, warps);
        let (even, _) = div_rem(left + rounds - 1, rounds);
        let room = (args.stage * per_set).saturating_sub(within);
        let n = even.min(room);
        if n == 0 {
            // A launch without room for a set does nothing.
            break;
        }
        let (last, _) = div_rem(number + n - 1, per_set);
        thread::sync_threads();
        let mut s = set;
        while s <= last {
            plan.load(s, s - set, warp, warps);
            s += 1;
        }
        thread::sync_threads();
        if warp < n {
            let (own, rest) = div_rem(number + warp, per_set);
            let (matrix, block) = div_rem(rest, args.blocks);
            let mut job = plan.job(own);
            (job.matrix, job.block) = (matrix, block);
            plan.run::<C>(&job, own - set, ring, one);
        }
        number += n;
    }
}

/// The launch, and where things are in shared memory, in words.
struct Plan<'a> {
    args: &'a ExpertArgs,
    shared: Shared<u32>,
    /// Activations.
    sets: u32,
    /// Tokens that a set has room for.
    width: u32,
    pairs: u32,
    per_round: u32,
}

/// A warp's job beside the decoder.
struct Work<'a> {
    job: &'a Job,
    desc: &'a MatrixDesc,
    /// Word of shared memory where the set's activations start.
    x: u32,
    /// Row groups.
    first: u32,
    end: u32,
}

impl Plan<'_> {
    /// Expert and segment of a set; matrix and block are 0.
    #[inline(always)]
    fn job(&self, set: u32) -> Job {
        let (k, seg) = div_rem(set, self.args.segs);
        let (active, _) = covered(self.args, TOKENS, k);
        // SAFETY: an array that no kernel in flight writes, the index in bounds.
        let [_, slot, tokens, _] = unsafe { Global::<[u32; 4]>::new(self.args.active) }
            .load_v4((self.args.active_begin + active) * 4);
        Job {
            active,
            matrix: 0,
            block: 0,
            seg,
            slot,
            tokens,
        }
    }

    /// Word of shared memory where a set's activations start.
    #[inline(always)]
    fn place(&self, index: u32) -> u32 {
        self.sets + index * self.width * self.pairs * LANES as u32
    }

    /// Copies a set's activations to place `index`: word
    /// `((pair / 4 * width + token) * 32 + lane) * 4 + pair % 4`, or
    /// `(pair * width + token) * 32 + lane` where pairs go singly.
    #[inline(always)]
    fn load(&self, set: u32, index: u32, warp: u32, warps: u32) {
        let args = self.args;
        let job = self.job(set);
        let lane = warp::lane_id();
        let tokens = width(job.tokens);
        let to = self.place(index);
        let quads = self.per_round.is_multiple_of(4);
        let steps = if quads { self.pairs / 4 } else { self.pairs };
        let mut i = warp;
        while i < steps * tokens {
            let (step, token) = div_rem(i, tokens);
            let (x, _) = input_row(args, job.slot + token.min(job.tokens - 1));
            let to = to + (step * self.width + token) * if quads { 128 } else { 32 };
            if quads {
                let (round, within) = div_rem(step * 4, self.per_round);
                let words = x.load_v4_nc(lane_word(args, job.seg, round, lane) + within);
                self.shared.store_v4(to + lane * 4, words);
            } else {
                let (round, within) = div_rem(step, self.per_round);
                let word = x.load_nc(lane_word(args, job.seg, round, lane) + within);
                self.shared.store(to + lane, word);
            }
            i += warps;
        }
    }

    /// A warp's job, with the activations at place `index`.
    #[inline(always)]
    fn run<C: Code>(&self, job: &Job, index: u32, ring: u32, one: u32) {
        let args = self.args;
        // SAFETY: arrays that no kernel in flight writes, indices in bounds by the argument's
        // contract.
        let desc = unsafe {
            let active = Global::<[u32; 4]>::new(args.active);
            let [expert, ..] = active.load_v4((args.active_begin + job.active) * 4);
            let index = expert * 3 + args.first + job.matrix;
            Global::<MatrixDesc>::new(args.descs).load_nc(index)
        };
        if desc.codec != C::CODEC || job.block >= desc.n_blocks {
            return;
        }
        let number = job.block * args.segs + job.seg;
        let Some(mut decoder) = Decoder::<C, EVERY>::open(self.shared, ring, &desc, number, one)
        else {
            return fault(true, args.faults);
        };
        decoder.begin();
        let (first, end) = row_groups::<C>(args, &desc, job.block);
        let work = Work {
            job,
            desc: &desc,
            x: self.place(index),
            first,
            end,
        };
        match (self.per_round.is_multiple_of(4), width(job.tokens)) {
            (true, 2) => self.rows::<C, 4, 2>(&work, &mut decoder),
            (true, 4) => self.rows::<C, 4, 4>(&work, &mut decoder),
            (true, _) => self.rows::<C, 4, 8>(&work, &mut decoder),
            (false, 2) => self.rows::<C, 1, 2>(&work, &mut decoder),
            (false, 4) => self.rows::<C, 1, 4>(&work, &mut decoder),
            (false, _) => self.rows::<C, 1, 8>(&work, &mut decoder),
        }
        decoder.close(args.faults);
    }

    /// Rows of a job times T tokens, V pairs at a time.
    #[inline(always)]
    fn rows<C: Code, const V: usize, const T: usize>(
        &self,
        work: &Work<'_>,
        decoder: &mut Decoder<C, EVERY>,
    ) {
        const { assert!(V as u32 <= EVERY && V <= 4 && T <= TOKENS as usize) };
        let (args, job) = (self.args, work.job);
        let lane = warp::lane_id();
        let fold = Fold::new(args, job.seg, lane);
        let slot = |k: u32| job.slot + k.min(job.tokens - 1);
        // Row of activations of token number `lane`.
        let input = input_of(args, slot(lane));
        // SAFETY: an array that no kernel in flight writes.
        let gsums = unsafe { Global::<i32>::new(args.gsum) };
        let groups = args.cols / GROUP as u32;
        // Of the token of the lane's result.
        let mut offset = 0;
        if args.grouped == 0 {
            unroll!(K in [0 1 2 3 4 5 6 7] {
                if K < T {
                    let (_, gsum) = input_row(args, slot(K as u32));
                    let sum = warp::reduce_add_i32(lane_gsum(args, gsum, job.seg));
                    if lane / C::HEIGHT == K as u32 {
                        offset = sum.wrapping_mul(8);
                    }
                }
            });
        }
        let stride = self.width * (V * LANES) as u32;
        let mut t = work.first;
        while t < work.end {
            let row = t * C::HEIGHT;
            let mut sums = [[0i32; 3]; TOKENS as usize];
            let mut keep = 0u32;
            let mut word = work.x + lane * V as u32;
            let mut round = 0;
            while round < args.rounds {
                let mut pair = 0;
                while pair < self.per_round {
                    let mut packed = [0; 4];
                    unroll!(J in [0 1 2 3] {
                        if J < V {
                            let (first, second) = decoder.group();
                            packed[J] = C::pack(first, second);
                        }
                    });
                    decoder.refill();
                    unroll!(K in [0 1 2 3 4 5 6 7] {
                        if K < T {
                            let at = word + (K * V * LANES) as u32;
                            if V == 4 {
                                let x = self.shared.load_v4(at);
                                unroll!(J in [0 1 2 3] {
                                    C::multiply(x[J], packed[J], &mut sums[K]);
                                });
                            } else {
                                C::multiply(self.shared.load(at), packed[0], &mut sums[K]);
                            }
                        }
                    });
                    word += stride;
                    pair += V as u32;
                }
                if args.grouped != 0 {
                    let scales = group_scales::<C>(args, work.desc, &fold, row, round);
                    unroll!(K in [0 1 2 3 4 5 6 7] {
                        if K < T {
                            let input = warp::shuffle_idx_u32(input, K as u32);
                            let gsum = gsums.load_nc(input * groups + fold.group(round));
                            let rows = C::rows(sums[K]);
                            sums[K] = [0; 3];
                            unroll!(R in [0 1 2] {
                                if R < C::HEIGHT as usize {
                                    let v = fold.reduce(rows[R], gsum, scales[R]);
                                    let total = if round == 0 { v } else { f32::from_bits(keep) + v };
                                    if lane == K as u32 * C::HEIGHT + R as u32 {
                                        keep = total.to_bits();
                                    }
                                }
                            });
                        }
                    });
                }
                round += 1;
            }
            if args.grouped == 0 {
                unroll!(K in [0 1 2 3 4 5 6 7] {
                    if K < T {
                        let rows = C::rows(sums[K]);
                        unroll!(R in [0 1 2] {
                            if R < C::HEIGHT as usize {
                                let sum = warp::reduce_add_i32(rows[R]);
                                if lane == K as u32 * C::HEIGHT + R as u32 {
                                    keep = sum.wrapping_sub(offset) as u32;
                                }
                            }
                        });
                    }
                });
            }
            let (token, r) = (lane / C::HEIGHT, lane % C::HEIGHT);
            if token < job.tokens && row + r < args.rows {
                store_out(args, job, job.slot + token, row + r, keep);
            }
            t += 1;
        }
    }
}
