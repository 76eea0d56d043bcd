//! Expert matrix times several tokens, decoded once: `matmul_rans_shared_pair`,
//! `matmul_rans_shared_triple`.
//!
//! Results as of `matmul_rans_*`, for every token of an expert. A block of threads takes (active
//! expert, matrix, segment, as many neighbouring blocks of rows as it has warps). Each warp decodes a
//! row group of its block into its tile of shared memory, then multiplies the tile with all tokens.
//!
//! Departures:
//! 1. The tile holds a word for each group of nibbles ([`Code::pack`]), in the order in which a
//!    lane's column pairs come, so that a lane reads what it wrote and no barrier is needed; where a
//!    fold gives a lane a multiple of 4 pairs, 4 words are stored and loaded at a time.
//! 2. Activations of up to `stage` tokens stand in shared memory in the tile's order, for all warps;
//!    more tokens take turns, row group by row group.
//! 3. A lane multiplies 4 tokens at a time with the nibbles that it has loaded.
//!
//! Shared memory, in this order: table; `stage * pairs * 128` bytes of activations; for each warp
//! its ring and `pairs * 128` bytes of tile.

use cuda_std::shared::Shared;
use cuda_std::{kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::MatrixDesc;
use crate::coded::{CHECK, Code, Decoder, Pair, RING, Triple, load_table, unroll};
use crate::coded_jobs::{
    Fold, Job, active_count, covered, div_rem, fault, group_scales, input_row, job, lane_gsum,
    lane_word, row_groups, store_group,
};
use crate::layout::LANES;

/// Most threads of a block.
pub const THREADS: u32 = 384;

/// Tokens that are multiplied with the same loaded nibbles.
const TOKENS: u32 = 4;

/// Bytes of shared memory of a warp, beside table and activations.
pub const fn warp_bytes(pairs: u32) -> u32 {
    RING + pairs * 4 * LANES as u32
}

/// Bytes of shared memory of a token's activations.
pub const fn token_bytes(pairs: u32) -> u32 {
    pairs * 4 * LANES as u32
}

/// See the module.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live; dynamic shared memory is as the module
/// says.
#[kernel(threads = 384, min_blocks = 1)]
pub unsafe fn matmul_rans_shared_pair(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Pair>(&args) }
}

/// See the module.
///
/// # Safety
/// As [`matmul_rans_shared_pair()`].
#[kernel(threads = 384, min_blocks = 1)]
pub unsafe fn matmul_rans_shared_triple(args: ExpertArgs) {
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
    let head = C::TABLE * 4 + args.stage * token_bytes(pairs);
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, (head + warps * warp_bytes(pairs)) / 4) };
    if covered(args, u32::MAX, 0).1 == 0 {
        return;
    }
    load_table::<C>(args.table, shared);
    let ring = head + warp * warp_bytes(pairs);
    let plan = Plan {
        shared,
        stage: C::TABLE,
        tile: (ring + RING) / 4,
        pairs,
        per_round: args.fold / (2 * LANES as u32),
    };
    let one = args.count.min(1);
    let chunks = div_rem(args.blocks + warps - 1, warps).0;
    let items = active_count(args) * args.count * chunks * args.segs;
    let mut number = thread::block_idx_x();
    while number < items {
        let (item, desc) = job(args, number, chunks);
        number += thread::grid_dim_x();
        // All warps of the block of threads agree on this.
        let ours = desc.codec == C::CODEC
            && item.tokens >= args.min_tokens.max(1)
            && item.tokens <= args.max_tokens
            && item.block * warps < desc.n_blocks;
        if !ours {
            continue;
        }
        let block = item.block * warps + warp;
        let works = block < desc.n_blocks;
        let block = if works { block } else { desc.n_blocks - 1 };
        let index = block * args.segs + item.seg;
        let Some(mut decoder) = Decoder::<C>::open(shared, ring, &desc, index, one) else {
            fault(works, args.faults);
            continue;
        };
        let (first, end) = row_groups::<C>(args, &desc, block);
        let end = if works { end } else { first };
        let groups = div_rem(args.rows + C::HEIGHT - 1, C::HEIGHT).0;
        let most = div_rem(groups + desc.n_blocks - 1, desc.n_blocks).0;
        let mut i = 0;
        while i < most {
            let t = first + i;
            if t < end {
                if plan.per_round.is_multiple_of(4) {
                    plan.decode::<C, 4>(&mut decoder);
                } else {
                    plan.decode::<C, 1>(&mut decoder);
                }
            }
            let mut token = 0;
            while token < item.tokens {
                let left = item.tokens - token;
                let batch = if left < args.stage { left } else { args.stage };
                if i == 0 || item.tokens > args.stage {
                    thread::sync_threads();
                    plan.load(args, &item, token, batch, warp, warps);
                    thread::sync_threads();
                }
                if t < end {
                    let work = Batch {
                        args,
                        desc: &desc,
                        item: &item,
                        fold: Fold::new(args, item.seg, warp::lane_id()),
                        row: t * C::HEIGHT,
                        token,
                        batch,
                    };
                    if plan.per_round.is_multiple_of(4) {
                        plan.multiply::<C, 4>(&work);
                    } else {
                        plan.multiply::<C, 1>(&work);
                    }
                }
                token += batch;
                if batch == 0 {
                    // A launch without room for a token does nothing.
                    token = item.tokens;
                }
            }
            i += 1;
        }
        if works {
            decoder.close(args.faults);
        }
    }
}

/// Where things are in shared memory, in words.
struct Plan {
    shared: Shared<u32>,
    stage: u32,
    tile: u32,
    pairs: u32,
    per_round: u32,
}

/// A tile's rows and the tokens that they are multiplied with.
struct Batch<'a> {
    args: &'a ExpertArgs,
    desc: &'a MatrixDesc,
    item: &'a Job,
    fold: Fold,
    /// First row.
    row: u32,
    /// First token, of the expert's.
    token: u32,
    /// Tokens.
    batch: u32,
}

impl Plan {
    /// Copies `batch` tokens' activations into shared memory, in the order of tiles: word
    /// `(pair / 4 * 32 + lane) * 4 + pair % 4`, or `pair * 32 + lane` where pairs go singly.
    #[inline(always)]
    fn load(&self, args: &ExpertArgs, item: &Job, token: u32, batch: u32, warp: u32, warps: u32) {
        let lane = warp::lane_id();
        let mut i = 0;
        while i < batch {
            let (x, _) = input_row(args, item.slot + token + i);
            let to = self.stage + i * self.pairs * LANES as u32;
            // Warps share the pairs among them.
            if self.per_round.is_multiple_of(4) {
                let mut quad = warp;
                while quad * 4 < self.pairs {
                    let (round, within) = div_rem(quad * 4, self.per_round);
                    let from = lane_word(args, item.seg, round, lane) + within;
                    let words = x.load_v4_nc(from);
                    self.shared
                        .store_v4(to + (quad * LANES as u32 + lane) * 4, words);
                    quad += warps;
                }
            } else {
                let mut pair = warp;
                while pair < self.pairs {
                    let (round, within) = div_rem(pair, self.per_round);
                    let word = x.load_nc(lane_word(args, item.seg, round, lane) + within);
                    self.shared.store(to + pair * LANES as u32 + lane, word);
                    pair += warps;
                }
            }
            i += 1;
        }
    }

    /// Decodes a row group into the warp's tile, V pairs at a time.
    #[inline(always)]
    fn decode<C: Code, const V: usize>(&self, decoder: &mut Decoder<C>) {
        const { assert!(V as u32 <= CHECK) };
        let mut word = self.tile + warp::lane_id() * V as u32;
        let mut pair = 0;
        while pair < self.pairs {
            let mut packed = [0; 4];
            unroll!(K in [0 1 2 3] {
                if K < V {
                    let (first, second) = decoder.group();
                    packed[K] = C::pack(first, second);
                }
            });
            if V == 4 {
                self.shared.store_v4(word, packed);
            } else {
                self.shared.store(word, packed[0]);
            }
            decoder.refill();
            word += (V * LANES) as u32;
            pair += V as u32;
        }
    }

    /// Multiplies the tile with a batch of tokens, V pairs at a time.
    #[inline(always)]
    fn multiply<C: Code, const V: usize>(&self, work: &Batch<'_>) {
        let args = work.args;
        let lane = warp::lane_id();
        let mut i = 0;
        while i < work.batch {
            let mut sums = [[0i32; 3]; TOKENS as usize];
            let mut totals = [[0f32; 3]; TOKENS as usize];
            // Where there are fewer tokens left, the last one's stands in.
            let of = |k: usize| {
                let token = i + k as u32;
                if token < work.batch {
                    token
                } else {
                    work.batch - 1
                }
            };
            let place = |k: usize| self.stage + of(k) * self.pairs * LANES as u32 + lane * V as u32;
            let places = [place(0), place(1), place(2), place(3)];
            let mut word = 0;
            let mut round = 0;
            while round < args.rounds {
                let mut pair = 0;
                while pair < self.per_round {
                    if V == 4 {
                        let tile = self.shared.load_v4(self.tile + lane * 4 + word);
                        unroll!(K in [0 1 2 3] {
                            let x = self.shared.load_v4(places[K] + word);
                            unroll!(J in [0 1 2 3] {
                                C::multiply(x[J], tile[J], &mut sums[K]);
                            });
                        });
                    } else {
                        let tile = self.shared.load(self.tile + lane + word);
                        unroll!(K in [0 1 2 3] {
                            C::multiply(self.shared.load(places[K] + word), tile, &mut sums[K]);
                        });
                    }
                    word += (V * LANES) as u32;
                    pair += V as u32;
                }
                if args.grouped != 0 {
                    let scales = group_scales::<C>(args, work.desc, &work.fold, work.row, round);
                    unroll!(K in [0 1 2 3] {
                        let (_, gsum) = input_row(args, work.item.slot + work.token + of(K));
                        let gsum = gsum.load_nc(work.fold.group(round));
                        let rows = C::rows(sums[K]);
                        unroll!(R in [0 1 2] {
                            if R < C::HEIGHT as usize {
                                let v = work.fold.reduce(rows[R], gsum, scales[R]);
                                totals[K][R] = if round == 0 { v } else { totals[K][R] + v };
                            }
                        });
                        sums[K] = [0; 3];
                    });
                }
                round += 1;
            }
            unroll!(K in [0 1 2 3] {
                let slot = work.item.slot + work.token + of(K);
                let mut values = totals[K].map(f32::to_bits);
                if args.grouped == 0 {
                    let (_, gsum) = input_row(args, slot);
                    let offset = lane_gsum(args, gsum, work.item.seg).wrapping_mul(8);
                    let rows = C::rows(sums[K]);
                    unroll!(R in [0 1 2] {
                        if R < C::HEIGHT as usize {
                            let own = rows[R].wrapping_sub(offset);
                            values[R] = warp::reduce_add_i32(own) as u32;
                        }
                    });
                }
                if i + (K as u32) < work.batch {
                    store_group::<C>(args, work.item, slot, work.row, values);
                }
            });
            i += TOKENS;
        }
    }
}
