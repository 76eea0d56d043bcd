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
//!
//! Shared memory: table, then the ring of each warp.

use cuda_std::intrinsics::mad_lo;
use cuda_std::mem::GlobalMut;
use cuda_std::shared::Shared;
use cuda_std::{kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::coded::{CHECK, Code, Decoder, Pair, RING, Triple, load_table, unroll};
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
#[kernel(threads = 768, min_blocks = 1)]
pub unsafe fn decode_rans_pair(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { decode::<Pair>(&args) }
}

/// See the module.
///
/// # Safety
/// As [`decode_rans_pair()`].
#[kernel(threads = 768, min_blocks = 1)]
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
    load_table::<C>(args.table, shared);
    let ring = C::TABLE * 4 + warp * RING;
    let one = args.count.min(1);
    let jobs = active_count(args) * args.count * args.blocks * args.segs;
    let mut number = warp * thread::grid_dim_x() + thread::block_idx_x();
    while number < jobs {
        let (job, desc) = job(args, number, args.blocks);
        number += warps * thread::grid_dim_x();
        if desc.codec != C::CODEC || job.block >= desc.n_blocks {
            continue;
        }
        let index = job.block * args.segs + job.seg;
        let Some(mut decoder) = Decoder::<C>::open(shared, ring, &desc, index, one) else {
            fault(true, args.faults);
            continue;
        };
        let words = u64::from(args.rows) * u64::from(args.cols / 8);
        let place = u64::from(job.active * args.count + job.matrix) * words;
        // SAFETY: the matrix' place; a job writes its own rows and columns of it.
        let scratch = unsafe { GlobalMut::<u32>::new(args.scratch.part::<u32>(place, words)) };
        let (first, end) = row_groups::<C>(args, &desc, job.block);
        match args.fold {
            2048 | 1024 => rows::<C, 4>(args, &mut decoder, scratch, job.seg, first, end),
            512 => rows::<C, 2>(args, &mut decoder, scratch, job.seg, first, end),
            256 => rows::<C, 1>(args, &mut decoder, scratch, job.seg, first, end),
            _ => rows_by_byte(args, &mut decoder, scratch, job.seg, first, end),
        }
        decoder.close(args.faults);
    }
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

/// Row groups `t..end`, W words of 8 columns at a time.
#[inline(always)]
fn rows<C: Code, const W: usize>(
    args: &ExpertArgs,
    decoder: &mut Decoder<C>,
    scratch: GlobalMut<u32>,
    seg: u32,
    mut t: u32,
    end: u32,
) {
    let lane_words = args.fold / (8 * LANES as u32);
    while t < end {
        let mut round = 0;
        while round < args.rounds {
            let first =
                (seg * args.rounds + round) * (args.fold / 8) + warp::lane_id() * lane_words;
            let mut word = 0;
            while word < lane_words {
                let mut packed = [[0u32; 4]; 3];
                unroll!(I in [0 1 2 3] {
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
                        let at = row * (args.cols / 8) + first + word;
                        match W {
                            4 => scratch.store_v4(at, packed[R]),
                            2 => scratch.store_v2(at, [packed[R][0], packed[R][1]]),
                            _ => scratch.store(at, packed[R][0]),
                        }
                    }
                });
                word += W as u32;
            }
            round += 1;
        }
        t += 1;
    }
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
