//! rANS streams to packed int4 rows in scratch: `decode_rans_pair`, `decode_rans_triple`.
//!
//! For each active expert and matrix of the codec, the nibbles of row `r`, columns `2i` and `2i + 1`
//! go to byte `r * cols / 2 + i` of the matrix' place in `scratch`, the even column in the low half.
//!
//! Departures:
//! 1. Jobs, table and streams as in `matmul_rans_*`.
//! 2. Two nibbles of a row become a byte, and two bytes a half word, by the multiplication of
//!    `matmul_rans_*` with the weights 1, 16, 256 and 4096.
//! 3. A lane's neighbouring columns are stored 32, 16 or 8 at a time where a fold gives it as many,
//!    else byte by byte.
//! 4. Where a fold gives it 64, neighbouring lanes exchange halves so that each store fills sectors of
//!    32 bytes.
//! 5. The table is copied, and the first job opened, while the kernel before still runs.
//!
//! Shared memory: table, then the ring of each warp.

use cuda_std::intrinsics::mad_lo;
use cuda_std::mem::{GlobalMut, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::coded::{CHECK, Code, Decoder, Pair, RING, Triple, start_table, table_barrier, unroll};
use crate::coded_jobs::{active_count, fault, job, row_groups};
use crate::layout::LANES;

/// Most threads of a block.
pub const THREADS: u32 = 768;

/// Bytes of shared memory of a warp, beside the table.
pub const fn warp_bytes() -> u32 {
    RING
}

/// See the module.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live; dynamic shared memory is as the module
/// says.
#[kernel(threads = 768, min_blocks = 1, prologue)]
pub unsafe fn decode_rans_pair(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { decode::<Pair>(&args) }
}

/// See the module.
///
/// # Safety
/// As [`decode_rans_pair()`].
#[kernel(threads = 768, min_blocks = 1, prologue)]
pub unsafe fn decode_rans_triple(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { decode::<Triple>(&args) }
}

/// # Safety
/// As the kernels'.
#[inline(always)]
unsafe fn decode<C: Code>(args: &ExpertArgs) {
    let warp = warp::warp_id();
    let warps = thread::block_dim_x() / LANES as u32;
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, C::TABLE + warps * (RING / 4)) };
    start_table::<C>(args.table, shared);
    let ring = C::TABLE * 4 + warp * RING;
    let one = args.count.min(1);
    let jobs = active_count(args) * args.count * args.blocks * args.segs;
    let mut number = warp * thread::grid_dim_x() + thread::block_idx_x();
    let mut waits = true;
    while number < jobs {
        let (job, desc) = job(args, number, args.blocks);
        number += warps * thread::grid_dim_x();
        let ours = desc.codec == C::CODEC
            && job.block < desc.n_blocks
            && job.tokens >= args.min_tokens
            && job.tokens <= args.max_tokens;
        if !ours {
            continue;
        }
        let index = job.block * args.segs + job.seg;
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
        // What is read up to here, no kernel in flight writes; `scratch` may be read by one.
        grid::wait();
        let words = u64::from(args.rows) * u64::from(args.cols / 8);
        let place = u64::from(job.active * args.count + job.matrix) * words;
        // SAFETY: the matrix' place; a job writes its own rows and columns of it.
        let scratch = unsafe { GlobalMut::<u32>::new(args.scratch.part::<u32>(place, words)) };
        let (first, end) = row_groups::<C>(args, &desc, job.block);
        match args.fold {
            2048 => rows::<C, 8>(args, &mut decoder, scratch, job.seg, first, end),
            1024 => rows::<C, 4>(args, &mut decoder, scratch, job.seg, first, end),
            512 => rows::<C, 2>(args, &mut decoder, scratch, job.seg, first, end),
            256 => rows::<C, 1>(args, &mut decoder, scratch, job.seg, first, end),
            _ => rows_by_byte(args, &mut decoder, scratch, job.seg, first, end),
        }
        decoder.close(args.faults);
    }
    if waits {
        cp_async_wait::<0>();
        table_barrier();
    }
    grid::wait();
}

/// Four columns of each row of a group, packed.
#[inline(always)]
fn half<C: Code>(decoder: &mut Decoder<C>) -> [u32; 3] {
    let mut sums = [0i32; 3];
    let (first, second) = decoder.group();
    C::multiply_entries(0x0010_0001, first, second, &mut sums);
    let (first, second) = decoder.group();
    C::multiply_entries(0x1000_0100, first, second, &mut sums);
    C::rows(sums).map(|s| s as u32)
}

/// Row groups `t..end` where a fold gives a lane W words of 8 columns.
#[inline(always)]
fn rows<C: Code, const W: usize>(
    args: &ExpertArgs,
    decoder: &mut Decoder<C>,
    scratch: GlobalMut<u32>,
    seg: u32,
    mut t: u32,
    end: u32,
) {
    let lane = warp::lane_id();
    while t < end {
        let mut round = 0;
        while round < args.rounds {
            let first = (seg * args.rounds + round) * (args.fold / 8) + lane * W as u32;
            let mut packed = [[0u32; 8]; 3];
            unroll!(I in [0 1 2 3 4 5 6 7] {
                if I < W {
                    let low = half::<C>(decoder);
                    let high = half::<C>(decoder);
                    unroll!(R in [0 1 2] {
                        packed[R][I] = mad_lo(high[R], 1 << 16, low[R]);
                    });
                    if I % 2 == 1 || W == 1 {
                        decoder.refill();
                    }
                }
            });
            unroll!(R in [0 1 2] {
                let row = t * C::HEIGHT + R as u32;
                if R < C::HEIGHT as usize && row < args.rows {
                    let at = row * (args.cols / 8) + first;
                    let [a, b, c, d, e, f, g, h] = packed[R];
                    match W {
                        8 => store_sectors(scratch, at, [a, b, c, d], [e, f, g, h]),
                        4 => scratch.store_v4(at, [a, b, c, d]),
                        2 => scratch.store_v2(at, [a, b]),
                        _ => scratch.store(at, a),
                    }
                }
            });
            round += 1;
        }
        t += 1;
    }
}

/// Stores a lane's 8 words at `at`: with each store, a pair of lanes fills the 32 bytes of one of them,
/// since memory takes a half filled sector at the cost of a full one. A warp operation.
#[inline(always)]
fn store_sectors(scratch: GlobalMut<u32>, at: u32, low: [u32; 4], high: [u32; 4]) {
    let odd = warp::lane_id() & 1 == 1;
    let mut given = [0; 4];
    unroll!(I in [0 1 2 3] {
        given[I] = warp::shuffle_xor_u32(if odd { low[I] } else { high[I] }, 1);
    });
    let half = if odd { 4 } else { 0 };
    let even_lane = if odd { at - 8 } else { at };
    scratch.store_v4(even_lane + half, if odd { given } else { low });
    scratch.store_v4(even_lane + 8 + half, if odd { high } else { given });
}

/// Row groups `t..end` where a fold gives a lane less than 8 columns.
#[inline(always)]
fn rows_by_byte<C: Code>(
    args: &ExpertArgs,
    decoder: &mut Decoder<C>,
    scratch: GlobalMut<u32>,
    seg: u32,
    mut t: u32,
    end: u32,
) {
    let scratch = scratch.cast::<u8>();
    let per_round = args.fold / (2 * LANES as u32);
    while t < end {
        let mut groups = 0;
        let mut round = 0;
        while round < args.rounds {
            let first = (seg * args.rounds + round) * (args.fold / 2) + warp::lane_id() * per_round;
            let mut pair = 0;
            while pair < per_round {
                let (first_entry, second_entry) = decoder.group();
                let mut sums = [0i32; 3];
                C::multiply_entries(0x0010_0001, first_entry, second_entry, &mut sums);
                let bytes = C::rows(sums);
                unroll!(R in [0 1 2] {
                    let row = t * C::HEIGHT + R as u32;
                    if R < C::HEIGHT as usize && row < args.rows {
                        scratch.store(row * (args.cols / 2) + first + pair, bytes[R] as u8);
                    }
                });
                groups += 1;
                if groups == CHECK {
                    decoder.refill();
                    groups = 0;
                }
                pair += 1;
            }
            round += 1;
        }
        decoder.refill();
        t += 1;
    }
}
