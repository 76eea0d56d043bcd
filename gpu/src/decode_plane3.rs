//! plane3 matrices to packed int4 rows in scratch: `decode_plane3`. The layout is [`crate::plane3`].
//!
//! For each active expert whose number of tokens the launch covers and each of its plane3 matrices,
//! the nibbles of row `r`, columns `2 i` and `2 i + 1`, go to byte `r * cols / 2 + i` of the matrix'
//! place in `scratch`, the even column in the low half.
//!
//! Departures:
//! 1. A warp takes a job, `warp * grid + block of threads`. Its nibbles lie in shared memory, position
//!    `p` in nibble `p`, as `code + 5`; lists turn bit 3 there by atomic additions of 8 (P) and -8 (N),
//!    which valid lists never carry out of a nibble; then lanes store what they own, 16 bytes a row.
//!
//! Limits: matrices below 64 GiB. Corrupt bytes decode to something, faults are counted as by
//! `matmul_plane3`.
//!
//! Shared memory: [`WARP_BYTES`] for each warp.

use cuda_std::intrinsics::{dp4a_u32_u32, prmt};
use cuda_std::mem::{Global, GlobalMut};
use cuda_std::shared::Shared;
use cuda_std::{kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::{CODEC_PLANE3, MatrixDesc};
use crate::coded::unroll;
use crate::coded_jobs::{active_count, div_rem, fault};
use crate::layout::LANES;
use crate::plane3::{PLANE_UNITS, POSITIONS, STEP_BYTES, STEPS, fourth};

/// Most threads of a block.
pub const THREADS: u32 = 128;
/// Bytes of shared memory of a warp: a job's nibbles.
pub const WARP_BYTES: u32 = POSITIONS as u32 / 2;

/// See the module.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live; dynamic shared memory is as the module
/// says.
#[kernel(threads = 128, min_blocks = 3)]
pub unsafe fn decode_plane3(args: ExpertArgs) {
    let warp = warp::warp_id();
    let warps = thread::block_dim_x() / LANES as u32;
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(warp * WARP_BYTES, WARP_BYTES / 4) };
    let segs = args.segs * args.split;
    let jobs = warp::uniform(active_count(&args) * args.count * args.blocks * segs);
    let mut number = warp * thread::grid_dim_x() + thread::block_idx_x();
    while number < jobs {
        let (rest, seg) = div_rem(number, segs);
        let (rest, block) = div_rem(rest, args.blocks);
        let (active, matrix) = div_rem(rest, args.count);
        number += warps * thread::grid_dim_x();
        // SAFETY: arrays that no kernel in flight writes, indices in bounds by their contract.
        let (tokens, desc) = unsafe {
            let entry =
                Global::<[u32; 4]>::new(args.active).load_v4((args.active_begin + active) * 4);
            let index = entry[0] * 3 + args.first + matrix;
            (
                entry[2],
                Global::<MatrixDesc>::new(args.descs).load_nc(index),
            )
        };
        let ours = desc.codec == CODEC_PLANE3
            && block < desc.n_blocks
            && tokens >= args.min_tokens
            && tokens <= args.max_tokens;
        if !warp::all(ours) {
            continue;
        }
        // SAFETY: the job's two words, and the matrix' stream.
        let (header, stream) = unsafe {
            let header = Global::<u32>::new(desc.blocks);
            let word = 2 * (block * segs + seg);
            (
                [header.load_nc(word), header.load_nc(word + 1)],
                Global::<u32>::new(desc.stream),
            )
        };
        let units = (desc.stream.len / 4) as u32;
        let low = header[1] & 0xffff;
        let groups = low + (header[1] >> 16);
        let planes = PLANE_UNITS as u32;
        let fits =
            units >= planes && header[0] <= units - planes && groups <= units - planes - header[0];
        if !warp::all(fits) {
            fault(true, args.faults);
            continue;
        }
        let stream = stream.at(u64::from(header[0]) * 4);
        warp::sync_warp();
        nibbles(stream, shared);
        warp::sync_warp();
        let bad = exceptions(stream, low, groups, shared);
        fault(bad, args.faults);
        warp::sync_warp();
        let words = u64::from(args.rows) * u64::from(args.cols / 8);
        let place = u64::from(active * args.count + matrix) * words;
        // SAFETY: the matrix' place; a job writes its own rows and columns of it.
        let scratch = unsafe { GlobalMut::<u32>::new(args.scratch.part::<u32>(place, words)) };
        store(&args, scratch, block, seg, shared);
    }
}

/// `code + 5` of all positions, packed.
#[inline(always)]
fn nibbles(stream: Global<u32>, shared: Shared<u32>) {
    let lane = warp::lane_id();
    let mut step = 0;
    while step < STEPS as u32 {
        let mut buffer = [[0u32; 4]; 3];
        unroll!(Q in [0 1 2] {
            let word = step * (STEP_BYTES as u32 / 4) + Q as u32 * 128 + lane * 4;
            buffer[Q] = stream.load_v4_stream(word);
        });
        unroll!(R in [0 1 2 3] {
            let a = buffer[3 * R / 4][3 * R % 4];
            let b = buffer[(3 * R + 1) / 4][(3 * R + 1) % 4];
            let c = buffer[(3 * R + 2) / 4][(3 * R + 2) % 4];
            let words = [a, b, c, fourth(a, b, c)].map(|word| {
                let word = (word & 0x7777_7777) + 0x5555_5555;
                // Columns 0 to 3 are the bytes' low halves, 4 to 7 their high ones.
                let (low, high) = (word & 0x0f0f_0f0f, word >> 4 & 0x0f0f_0f0f);
                prmt(low | low >> 4, high | high >> 4, 0x6420)
            });
            shared.store_v4(((step * 4 + R as u32) * LANES as u32 + lane) * 4, words);
        });
        step += 1;
    }
}

/// Turns bit 3 at the positions of the lists. Whether list N does not end where it must; the same in
/// all lanes.
#[inline(always)]
fn exceptions(stream: Global<u32>, low: u32, groups: u32, shared: Shared<u32>) -> bool {
    let lane = warp::lane_id();
    let mut base = 0;
    let mut bad = false;
    let mut first = 0;
    while warp::any(first < groups) {
        let group = first + lane;
        let words = if group < groups {
            stream.load_v4_nc((PLANE_UNITS as u32 + group) * 4)
        } else {
            [u32::MAX; 4]
        };
        let mut total = 0;
        unroll!(K in [0 1 2 3] {
            total = dp4a_u32_u32(words[K], 0x0101_0101, total);
        });
        let scan = warp::scan_add_u32(total).wrapping_add(base);
        base = warp::shuffle_idx_u32(scan, 31);
        let mut position = scan.wrapping_sub(total);
        if group >= low {
            position = position.wrapping_sub(POSITIONS as u32);
        }
        bad |= group == low && position != 0;
        unroll!(K in [0 1 2 3] {
            unroll!(J in [0 1 2 3] {
                let gap = words[K] >> (8 * J) & 255;
                position = position.wrapping_add(gap);
                if gap != 255 && position < POSITIONS as u32 {
                    let bit = 8u32 << (position % 8 * 4);
                    let value = if group < low { bit.wrapping_neg() } else { bit };
                    shared.atomic_add_u32(position / 8, value);
                }
            });
        });
        first += LANES as u32;
    }
    warp::any(bad)
}

/// Stores a job's nibbles, those of a lane's strips 16 bytes at a time.
#[inline(always)]
fn store(args: &ExpertArgs, scratch: GlobalMut<u32>, block: u32, seg: u32, shared: Shared<u32>) {
    let lane = warp::lane_id();
    // A position's row and column in the job follow from the number of strips of a segment.
    let strips = div_rem(args.cols, 32 * args.segs * args.split).0;
    let (sub, strip) = div_rem(lane, strips);
    let rows = div_rem(LANES as u32, strips).0;
    let mut warp_row = 0;
    while warp_row < LANES as u32 {
        let row = (block * LANES as u32 + warp_row) * rows + sub;
        if row < args.rows {
            let words = shared.load_v4((warp_row * LANES as u32 + lane) * 4);
            let at = row * (args.cols / 8) + (seg * strips + strip) * 4;
            scratch.store_v4(at, words);
        }
        warp_row += 1;
    }
}
