//! Expert matrix times 2 to 8 tokens on tensor cores, decoded to shared memory: `matmul_rans_mma_pair`,
//! `matmul_rans_mma_triple`. For row scales and segments of one fold of [`COLS`] columns.
//!
//! Results as of `matmul_rans_*`, for every token of an expert. With activations cut into bytes,
//! `X = 256 * hi + lo` (hi signed, lo unsigned), a dot product with unsigned nibbles n is
//!
//! ```text
//! sum (n - 8) * X = 256 * sum n * hi + sum n * lo - 8 * sum X
//! ```
//!
//! and each sum is one of 8-bit products in int32, exact in whatever order.
//!
//! Departures:
//! 1. What bounds `matmul_rans_tokens_*` are reads of activations from shared memory: a nibble costs as
//!    many wavefronts for 8 tokens as for its decoding. Here a *team* of [`TEAM`] warps decodes a row
//!    group of as many blocks, one each, to a tile in shared memory; each warp multiplies all of them in
//!    an eighth of the segment's columns, whose activations it keeps in registers.
//! 2. A *set* is an expert and a segment: what has the same activations. A team takes a *window* of up
//!    to `stage` neighbouring (matrix, block) jobs of a set. Teams of a block of threads share its table;
//!    their windows are a grid apart. A team without one goes along.
//! 3. A row group goes in quarters of its columns through two tiles in turn: while one is decoded to, the
//!    quarter before is multiplied from the other, instruction by instruction. A warp arrives at the
//!    barrier between when it is done with a quarter, and waits there when it has decoded the first half
//!    of the next, in registers: the slowest is seldom waited for.
//! 4. The order of columns within a dot product is free. A lane of the decoder has 64 neighbouring
//!    columns, in each quarter two quads of pairs. Quad `q` of lane `l` is in 16 bytes number
//!    `32 q + (l ^ 2 q ^ 4 (w mod 2))` of warp w's part of the tile, so that neither side has conflicts.
//!    In step `i` of a quarter, lane `(g, t)` of warp `w` multiplies quad `t mod 2` of lane
//!    `4 w + 2 i + t / 2` of warp g's rows: words 0 and 1 are the first half of the step's columns, words
//!    2 and 3 the second.
//! 5. Rows 0 and 1 of the row groups are rows 0 to 7 and 8 to 15 of a multiplication; rows 2 of triples
//!    are half of another.
//! 6. The warps' sums meet in shared memory by atomic additions of integers, whose order is free.
//! 7. Tables, descriptors and streams are read while the kernel before still runs.
//!
//! Shared memory, in this order: table; a ring of each warp; two tiles of each team; sums of each team;
//! a word a warp; two words a team.

use cuda_std::barrier::Barrier;
use cuda_std::intrinsics::{mma_u8_s8, mma_u8_u8, prmt};
use cuda_std::mem::{Global, GlobalMut, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::MatrixDesc;
use crate::coded::{CHECK, CHUNKS, Code, Decoder, Pair, RING, Triple, start_table, unroll};
use crate::coded_jobs::{
    Job, covered, div_rem, fault, input_of, input_row, lane_gsum, out_index, row_groups,
};
use crate::layout::LANES;
use crate::matmul_rans_tokens::TOKENS;

/// Threads of a block.
pub const THREADS: u32 = 512;
/// Warps of a team, and most jobs of a window.
pub const TEAM: u32 = 8;
/// Teams of a block.
pub const TEAMS: u32 = THREADS / (TEAM * LANES as u32);
/// Columns of a segment.
pub const COLS: usize = 2048;

/// Words of a warp's part of a tile: a quarter of a row group.
const PART: u32 = COLS as u32 / 8;
/// Words of a tile.
const TILE: u32 = TEAM * PART;
/// Words of a team's sums: row of the group, token mod 2, row group, token / 2.
const SUMS: u32 = 3 * 2 * LANES as u32;

/// Bytes of shared memory beside the table.
pub const SHARED: u32 = TEAMS * (TEAM * RING + 4 * (2 * TILE + SUMS + TEAM + 2));

/// See the module.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live, `args.fold` is [`COLS`], `args.rounds` 1 and
/// `args.grouped` 0; [`THREADS`] threads, dynamic shared memory as the module says.
#[kernel(threads = 512, min_blocks = 1, prologue)]
pub unsafe fn matmul_rans_mma_pair(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Pair>(&args) }
}

/// See the module.
///
/// # Safety
/// As [`matmul_rans_mma_pair()`].
#[kernel(threads = 512, min_blocks = 1, prologue)]
pub unsafe fn matmul_rans_mma_triple(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<Triple>(&args) }
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn matmul<C: Code>(args: &ExpertArgs) {
    let warp = warp::warp_id();
    let (number, member) = (warp / TEAM, warp % TEAM);
    let per_set = args.count * args.blocks;
    let windows = div_rem(per_set + args.stage - 1, args.stage).0;
    let items = covered(args, TOKENS, u32::MAX).1 * args.segs * windows;
    let mut first = thread::block_idx_x();
    if first >= items {
        grid::wait();
        return;
    }
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, C::TABLE + SHARED / 4) };
    start_table::<C>(args.table, shared);
    let tiles = C::TABLE + TEAMS * TEAM * RING / 4;
    let sums = tiles + TEAMS * 2 * TILE;
    let marks = sums + TEAMS * SUMS;
    let mut team = Team {
        args,
        shared,
        tiles: tiles + number * 2 * TILE,
        sums: sums + number * SUMS,
        marks,
        barrier: Barrier::new(&shared, marks + TEAMS * TEAM + 2 * number, TEAM),
        member,
    };
    // Sums start from 0. Of tiles, rows are multiplied that nobody has decoded, for results that nobody
    // stores.
    let mut i = tiles / 4 + thread::thread_idx_x();
    while i < (sums + TEAMS * SUMS) / 4 {
        shared.store_v4(4 * i, [0; 4]);
        i += THREADS;
    }
    let ring = C::TABLE * 4 + warp * RING;
    while first < items {
        let item = first + number * thread::grid_dim_x();
        let there = item < items;
        let (set, window) = div_rem(if there { item } else { first }, windows);
        let start = window * args.stage;
        let end = if there {
            per_set.min(start + args.stage)
        } else {
            start
        };
        team.window::<C>(set, start, end, ring);
        first += TEAMS * thread::grid_dim_x();
        // What a window begins with in shared memory is every team's.
        thread::sync_threads();
    }
}

/// A warp's place in a block.
struct Team<'a> {
    args: &'a ExpertArgs,
    shared: Shared<u32>,
    /// Words of shared memory where the team's tiles and sums start, and the words of the warps.
    tiles: u32,
    sums: u32,
    marks: u32,
    barrier: Barrier,
    /// Warp within the team.
    member: u32,
}

/// Activations of a step, cut into bytes.
#[derive(Clone, Copy, Default)]
struct Cut {
    high: [u32; 2],
    low: [u32; 2],
}

/// Sums of the high and of the low bytes: of rows 0 and 1, and of rows 2.
type Sums = [[[i32; 4]; 2]; 2];

/// Results that a lane stores, one a row group.
struct Results {
    /// Index in `out` of the matrix' row 0.
    out: u32,
    /// The next row.
    row: u32,
    end: u32,
    /// 8 times the sum of the activations.
    offset: u32,
}

impl Team<'_> {
    /// Jobs `start .. end` of a set, a warp each. All threads of the block call it.
    #[inline(always)]
    fn window<C: Code>(&mut self, set: u32, start: u32, end: u32, ring: u32) {
        let (args, shared) = (self.args, self.shared);
        let (k, seg) = div_rem(set, args.segs);
        let (active, _) = covered(args, TOKENS, k);
        // SAFETY: an array that no kernel in flight writes, the index in bounds.
        let [expert, slot, tokens, _] = unsafe { Global::<[u32; 4]>::new(args.active) }
            .load_v4((args.active_begin + active) * 4);
        // Job `start + i`, its matrix, and whether it is one of ours.
        let job = |i: u32| {
            let (matrix, block) = div_rem(start + i, args.blocks);
            // SAFETY: an array that no kernel in flight writes, the index in bounds.
            let descs = unsafe { Global::<MatrixDesc>::new(args.descs) };
            let there = start + i < end;
            let desc = descs.load_nc(expert * 3 + args.first + if there { matrix } else { 0 });
            let ours = there && desc.codec == C::CODEC && block < desc.n_blocks;
            let job = Job {
                active,
                matrix,
                block,
                seg,
                slot,
                tokens,
            };
            (job, desc, ours)
        };
        let (own, desc, ours) = job(self.member);
        let mut decoder = None;
        let mut left = 0;
        if warp::uniform(u32::from(ours)) != 0 {
            let (index, one) = (own.block * args.segs + seg, args.count.min(1));
            decoder = Decoder::<C>::open(shared, ring, &desc, index, one);
            if decoder.is_some() {
                let (first, end) = row_groups::<C>(args, &desc, own.block);
                left = warp::uniform(end - first);
            } else {
                fault(true, args.faults);
            }
        }
        // The table, if `open` has not waited for it.
        cp_async_wait::<{ CHUNKS - 2 }>();
        if decoder.is_none() {
            cp_async_wait::<0>();
        }
        let warp = warp::warp_id();
        let lane = warp::lane_id();
        if lane == 0 {
            shared.store(self.marks + warp, left);
        }
        thread::sync_threads();
        // Row groups of the longest job of the block of threads.
        let most = warp::reduce_max_u32(shared.load(self.marks + lane % (TEAMS * TEAM)));
        let most = warp::uniform(most);
        if let Some(decoder) = &mut decoder {
            decoder.begin();
        }
        // What is read up to here, no kernel in flight writes.
        grid::wait();
        let there = start < end;
        let x = self.activations(&own);
        let mut results = self.results::<C>(job(lane / 4));
        let mut sums = Sums::default();
        self.barrier.arrive();
        let mut t = 0;
        loop {
            let decodes = t < left;
            self.quarter::<C, 0>(&mut decoder, decodes, &x, &mut sums);
            if t > 0 && there {
                self.add::<C>(&sums);
            }
            sums = Sums::default();
            self.done(&mut decoder, decodes);
            if t >= most {
                break;
            }
            self.quarter::<C, 1>(&mut decoder, decodes, &x, &mut sums);
            self.done(&mut decoder, decodes);
            if t > 0 {
                self.store::<C>(&mut results);
            }
            self.quarter::<C, 2>(&mut decoder, decodes, &x, &mut sums);
            self.done(&mut decoder, decodes);
            self.quarter::<C, 3>(&mut decoder, decodes, &x, &mut sums);
            self.done(&mut decoder, decodes);
            t += 1;
        }
        self.barrier.wait();
        if t > 0 {
            self.store::<C>(&mut results);
        }
        if let Some(decoder) = decoder {
            decoder.close(args.faults);
        }
    }

    /// The warp's activations: those of 4 lanes of the decoder, of token `lane / 4`.
    #[inline(always)]
    fn activations(&self, job: &Job) -> [Cut; 8] {
        let args = self.args;
        let lane = warp::lane_id();
        let (token, t) = (lane / 4, lane % 4);
        let input = input_of(args, job.slot + token.min(job.tokens - 1));
        // SAFETY: rows of these are read, which no kernel in flight writes.
        let x = unsafe { Global::<u32>::new(args.x) };
        let of = job.seg * 32 + self.member * 4 + t / 2;
        let word = input * (args.cols / 2) + of * 32 + t % 2 * 4;
        let mut cut = [Cut::default(); 8];
        unroll!(I in [0 1 2 3 4 5 6 7] {
            // Quarter I / 2, step I mod 2.
            let words = x.load_v4_nc(word + I as u32 / 2 * 8 + I as u32 % 2 * 64);
            cut[I] = Cut {
                high: [prmt(words[0], words[1], 0x7531), prmt(words[2], words[3], 0x7531)],
                low: [prmt(words[0], words[1], 0x6420), prmt(words[2], words[3], 0x6420)],
            };
        });
        cut
    }

    /// What the lane stores: of row group `lane / 4`, row `member / 2`, token
    /// `2 (lane mod 4) + member mod 2`.
    #[inline(always)]
    fn results<C: Code>(&self, (job, desc, ours): (Job, MatrixDesc, bool)) -> Results {
        let args = self.args;
        let (row, token) = (self.member / 2, warp::lane_id() % 4 * 2 + self.member % 2);
        let mut offset = 0;
        unroll!(K in [0 1 2 3 4 5 6 7] {
            let (_, gsum) = input_row(args, job.slot + (K as u32).min(job.tokens - 1));
            let sum = warp::reduce_add_i32(lane_gsum(args, gsum, job.seg));
            if token == K as u32 {
                offset = sum.wrapping_mul(8) as u32;
            }
        });
        let (first, end) = row_groups::<C>(args, &desc, job.block);
        let stored = ours && desc.stream.len >= 4 && token < job.tokens && row < C::HEIGHT;
        Results {
            out: out_index(args, &job, job.slot + token),
            row: first * C::HEIGHT + row,
            end: if stored {
                args.rows.min(end * C::HEIGHT)
            } else {
                0
            },
            offset,
        }
    }

    /// Decodes quarter `Q` of a row group, if `decodes`, and multiplies the quarter before.
    #[inline(always)]
    fn quarter<C: Code, const Q: usize>(
        &mut self,
        decoder: &mut Option<Decoder<C>>,
        decodes: bool,
        x: &[Cut; 8],
        sums: &mut Sums,
    ) {
        const { assert!(CHECK == 8) };
        let lane = warp::lane_id();
        let (g, t) = (lane / 4, lane % 4);
        let to = self.tiles + Q as u32 % 2 * TILE + self.member * PART;
        let from = self.tiles + (Q as u32 + 1) % 2 * TILE + g * PART + t % 2 * 128;
        let shared = self.shared;
        let load = |i: u32| {
            let of = (self.member * 4 + 2 * i + t / 2) ^ (t % 2 * 2) ^ (g % 2 * 4);
            shared.load_v4(from + 4 * of)
        };
        let store = |quad: u32, packed: [u32; 4]| {
            let place = lane ^ (quad * 2) ^ (self.member % 2 * 4);
            shared.store_v4(to + quad * 128 + 4 * place, packed);
        };
        let quad = |decoder: &mut Decoder<C>| {
            let mut packed = [0; 4];
            unroll!(J in [0 1 2 3] {
                let (first, second) = decoder.group();
                packed[J] = C::pack(first, second);
            });
            packed
        };
        let mut packed = [0; 4];
        if decodes && let Some(decoder) = decoder {
            packed = quad(decoder);
        }
        self.barrier.wait();
        let v = [load(0), load(1)];
        let (first, second) = (&x[(2 * Q + 6) % 8], &x[(2 * Q + 7) % 8]);
        if decodes && let Some(decoder) = decoder {
            store(0, packed);
            multiply::<C>(v[0], first, sums);
            store(1, quad(decoder));
            multiply::<C>(v[1], second, sums);
        } else {
            multiply::<C>(v[0], first, sums);
            multiply::<C>(v[1], second, sums);
        }
    }

    /// After a quarter.
    #[inline(always)]
    fn done<C: Code>(&self, decoder: &mut Option<Decoder<C>>, decodes: bool) {
        self.barrier.arrive();
        if decodes && let Some(decoder) = decoder {
            decoder.refill();
        }
    }

    /// Adds the sums of a row group to the team's.
    #[inline(always)]
    fn add<C: Code>(&self, sums: &Sums) {
        let to = self.sums + warp::lane_id();
        unroll!(R in [0 1 2] {
            if R < C::HEIGHT as usize {
                unroll!(J in [0 1] {
                    let [high, low] = sums[R / 2].map(|s| s[R % 2 * 2 + J]);
                    let place = to + (2 * R + J) as u32 * LANES as u32;
                    self.shared.atomic_add_i32(place, high.wrapping_mul(256).wrapping_add(low));
                });
            }
        });
    }

    /// Stores the lane's result of a row group, and leaves 0 for the next.
    #[inline(always)]
    fn store<C: Code>(&self, results: &mut Results) {
        if self.member >= 2 * C::HEIGHT {
            return;
        }
        let at = self.sums + self.member * LANES as u32 + warp::lane_id();
        let sum = self.shared.load(at);
        self.shared.store(at, 0);
        if results.row < results.end {
            // SAFETY: `out` holds a word for each result; each is written by one thread.
            unsafe { GlobalMut::<u32>::new(self.args.out) }
                .store(results.out + results.row, sum.wrapping_sub(results.offset));
        }
        results.row += C::HEIGHT;
    }
}

/// Adds a quad of pairs, packed, of each of 8 row groups times the step's activations.
#[inline(always)]
fn multiply<C: Code>(v: [u32; 4], x: &Cut, sums: &mut Sums) {
    let even = [prmt(v[0], v[1], 0x5410), prmt(v[2], v[3], 0x5410)];
    let odd = [prmt(v[0], v[1], 0x7632), prmt(v[2], v[3], 0x7632)];
    if C::HEIGHT == 3 {
        let low = even.map(|w| w & 0x0f0f_0f0f);
        let high = even.map(|w| w >> 4 & 0x0f0f_0f0f);
        let a = [low[0], high[0], low[1], high[1]];
        sums[0][0] = mma_u8_s8(a, x.high, sums[0][0]);
        sums[0][1] = mma_u8_u8(a, x.low, sums[0][1]);
        let a = [odd[0], 0, odd[1], 0];
        sums[1][0] = mma_u8_s8(a, x.high, sums[1][0]);
        sums[1][1] = mma_u8_u8(a, x.low, sums[1][1]);
    } else {
        let a = [even[0], odd[0], even[1], odd[1]];
        sums[0][0] = mma_u8_s8(a, x.high, sums[0][0]);
        sums[0][1] = mma_u8_u8(a, x.low, sums[0][1]);
    }
}
