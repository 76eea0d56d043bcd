//! Expert matrix in plane3 times one token: `matmul_plane3`. The layout is [`crate::plane3`].
//!
//! For each active expert with one token, matrix with row scales, and row `r`, in each segment:
//!
//! ```text
//! out[r] = sum over columns of c X - 3 sum X + 8 (sum over P of X - sum over N of X)
//! ```
//!
//! `c` the three-bit code, X the i16 activation. A warp takes a (block, segment) job: all codes
//! times all activations, and, between, its lists, 32 lanes of 16 entries at a time.
//!
//! Departures:
//! 1. A lane's 32 activations stay in registers for the job, and for the next where that has the
//!    same; a segment's are in shared memory besides, for the lists.
//! 2. No shifts: `word & 0x70707070` is multiplied as it is, 16 times too large, in a sum of its own.
//! 3. Planes come a step of 4 warp rows at a time into two register buffers, each reloaded right
//!    after its last use, on into the next job. Lists are copied to shared memory at the job's
//!    start; lists of more than [`LIST_BYTES`] are finished from global memory. The next job's
//!    header is asked for while this one runs, at an address that differs by lane as far as the
//!    compiler knows: behind a load from a uniform one it waits at once.
//! 4. Positions are kept doubled, as byte distances of i16. A lane's 16 positions are sums over its
//!    words by `dp4a` on top of one scan over lanes.
//! 5. Entries are added by atomic additions in shared memory to sums of each matrix row and list,
//!    unconditionally: skips add 0. With 32 strips there are two sums of each row, for even and odd
//!    lanes, which halves conflicts.
//! 6. Matrices of fewer than 16 strips a segment go the same way with plainer row sums.
//!
//! 7. Where `split` is above 1, the launch also sets to 0 what other kernels leave unwritten of `out`.
//!
//! Limits: matrices below 64 GiB. Corrupt bytes give some result: headers are clamped to the
//! stream, positions masked. Headers that had to be, and N lists whose end is not where P starts,
//! count as faults.
//!
//! Shared memory: [`X_BYTES`] for each warp, then [`LIST_BYTES`] for each, then [`sum_bytes`].

use cuda_std::intrinsics::{
    bitselect, dp2a_hi_s32_u32, dp2a_lo_s32_u32, dp4a_u32_u32, lanemask_lt, lop3, mad_lo,
};
use cuda_std::mem::{Global, GlobalMut, cp_async_16, cp_async_commit, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{grid, kernel, thread, warp};

pub use crate::abi::ExpertArgs;

use crate::abi::{CODEC_PLANE3, MatrixDesc};
use crate::coded::unroll;
use crate::coded_jobs::{active_count, div_rem, fault, input_of};
use crate::layout::LANES;
use crate::plane3::{PLANE_UNITS, POSITIONS, STEP_BYTES, STEPS};

/// Most threads of a block.
pub const THREADS: u32 = 256;
/// Blocks that share a multiprocessor.
pub const BLOCKS: u32 = 3;
/// Bytes of a warp's activations: those of a segment, repeated up to 1,024.
pub const X_BYTES: u32 = 2048;
/// Bytes of a warp's lists.
pub const LIST_BYTES: u32 = 2048;
/// Pairs of steps of a job.
const PAIRS: u32 = STEPS as u32 / 2;

/// Words of the sums of a list: rows of a block and as many behind it, for positions past the job.
const fn list_sums(strips: u32) -> u32 {
    if strips == 32 { 128 } else { 2048 / strips }
}

/// Bytes of a warp's sums: of both lists and, for fewer than 16 strips, of planes.
pub const fn sum_bytes(strips: u32) -> u32 {
    4 * (2 * list_sums(strips) + if strips < 16 { 1024 / strips } else { 0 })
}

/// Bytes of shared memory of a warp.
pub const fn warp_bytes(strips: u32) -> u32 {
    X_BYTES + LIST_BYTES + sum_bytes(strips)
}

/// See the module; segments of 1,024 columns.
///
/// # Safety
/// The arrays of `args` are as [`ExpertArgs`] says and live, `args.split` as the matrices' segments
/// ask for, scales one a row; dynamic shared memory is as the module says.
#[kernel(threads = 256, min_blocks = 3, prologue)]
pub unsafe fn matmul_plane3(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<32>(&args) }
}

/// See the module; segments of 512 columns.
///
/// # Safety
/// As [`matmul_plane3()`].
#[kernel(threads = 256, min_blocks = 3, prologue)]
pub unsafe fn matmul_plane3_half(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe { matmul::<16>(&args) }
}

/// See the module; segments of 256, 128 and 64 columns.
///
/// # Safety
/// As [`matmul_plane3()`].
#[kernel(threads = 256, min_blocks = 2, prologue)]
pub unsafe fn matmul_plane3_narrow(args: ExpertArgs) {
    // SAFETY: the caller's promise.
    unsafe {
        match div_rem(args.cols, args.segs * args.split).0 {
            256 => matmul::<8>(&args),
            128 => matmul::<4>(&args),
            _ => matmul::<2>(&args),
        }
    }
}

/// A job of the launch, as far as it is known before its header.
#[derive(Clone, Copy)]
struct Next {
    /// Number; at least the launch's jobs where there is none.
    number: u32,
    /// The matrix' stream, and its units, at least a job's planes.
    stream: Global<u32>,
    units: u32,
    /// Its header.
    header: Global<u32>,
    /// Row of activations and segment.
    input: u32,
    seg: u32,
    /// Where its results go, and how many of them the matrix has.
    out: u32,
    rows: u32,
}

/// A warp's shared memory: bytes from the start.
#[derive(Clone, Copy)]
struct Memory {
    shared: Shared<u32>,
    x: u32,
    list: u32,
    sums: u32,
}

/// The first job from `number` on that the launch covers. Of those that it passes over, results in
/// further parts of a segment are set to 0. A warp operation.
#[inline(always)]
fn find<const S: u32>(args: &ExpertArgs, mut number: u32, jobs: u32, stride: u32) -> Next {
    // Zero, which the compiler does not know, nor that lanes agree.
    let none = lanemask_lt() >> 31;
    loop {
        let segs = args.segs * args.split;
        let (rest, seg) = div_rem(number, segs);
        let (rest, block) = div_rem(rest, args.blocks);
        let (active, matrix) = div_rem(rest, args.count);
        // SAFETY: arrays that no kernel in flight writes. Past the last job everything is read at
        // an index of the first, which is there: a launch has at least one.
        let mut next = unsafe {
            let active = if number < jobs { active } else { 0 };
            let active =
                Global::<[u32; 4]>::new(args.active).load_v4((args.active_begin + active) * 4);
            let desc =
                Global::<MatrixDesc>::new(args.descs).load_nc(active[0] * 3 + args.first + matrix);
            let units = (desc.stream.len / 4) as u32;
            let ours = desc.codec == CODEC_PLANE3
                && block < desc.n_blocks
                && active[2] == 1
                && args.min_tokens <= 1
                && args.max_tokens >= 1;
            if number < jobs && !warp::all(ours && units >= PLANE_UNITS as u32) {
                grid::wait();
                fault(ours, args.faults);
                if !ours && div_rem(seg, args.split).1 != 0 {
                    clear(
                        args,
                        matrix * segs + seg,
                        block * (1024 / S),
                        1024 / S,
                        active,
                    );
                }
                number += stride;
                continue;
            }
            let segment = matrix * segs + seg;
            Next {
                number,
                stream: Global::new(desc.stream),
                units,
                header: Global::new(desc.blocks),
                input: active[1],
                seg,
                out: (segment * args.slots + active[1]) * args.rows + block * (1024 / S),
                rows: args.rows - block * (1024 / S),
            }
        };
        if number < jobs {
            next.header = next.header.at(u64::from(2 * (block * segs + seg) + none));
            next.input = input_of(args, next.input);
        }
        return next;
    }
}

/// Leaves 0 as the results of `rows` rows from `first` on, for all tokens of an expert.
#[inline(always)]
fn clear(args: &ExpertArgs, segment: u32, first: u32, rows: u32, active: [u32; 4]) {
    // SAFETY: `out` holds `count * segs * split * slots * rows` words; each is written by one lane.
    let out = unsafe { GlobalMut::<u32>::new(args.out) };
    let mut token = 0;
    while token < active[2] {
        let at = (segment * args.slots + active[1] + token) * args.rows;
        let mut row = first + warp::lane_id();
        while row < first + rows && row < args.rows {
            out.store(at + row, 0);
            row += LANES as u32;
        }
        token += 1;
    }
}

impl Next {
    /// The job's stream from its start on. `header` is clamped to the matrix' stream.
    #[inline(always)]
    fn start(&self, header: &mut [u32; 2], bad: &mut bool) -> Global<u32> {
        let last = self.units - PLANE_UNITS as u32;
        let start = if header[0] < last { header[0] } else { last };
        let groups = (header[1] & 0xffff) + (header[1] >> 16);
        if header[0] > last || groups > last - start {
            header[1] = 0;
            *bad = true;
        }
        self.stream.at(u64::from(start * 4))
    }
}

/// # Safety
/// As the kernel's.
#[inline(always)]
unsafe fn matmul<const S: u32>(args: &ExpertArgs) {
    let lane = warp::lane_id();
    let warp = warp::warp_id();
    let warps = thread::block_dim_x() / LANES as u32;
    // SAFETY: the launch has that much.
    let shared = unsafe { Shared::<u32>::dynamic(0, warps * (warp_bytes(S) / 4)) };
    let memory = Memory {
        shared,
        x: warp * X_BYTES,
        list: warps * X_BYTES + warp * LIST_BYTES,
        sums: warps * (X_BYTES + LIST_BYTES) + warp * sum_bytes(S),
    };
    let one = args.count.min(1);
    let jobs =
        warp::uniform(active_count(args) * args.count * args.blocks * args.segs * args.split);
    let stride = warps * thread::grid_dim_x();
    let number = warp * thread::grid_dim_x() + thread::block_idx_x();
    if number >= jobs {
        grid::wait();
        return;
    }
    let mut i = lane;
    while i < sum_bytes(S) / 4 {
        shared.store(memory.sums / 4 + i, 0);
        i += LANES as u32;
    }
    warp::sync_warp();
    let mut next = find::<S>(args, number, jobs, stride);
    if next.number >= jobs {
        grid::wait();
        return;
    }
    let mut bad = false;
    let mut header = [next.header.load_nc(0), next.header.load_nc(1)];
    let mut ahead = next.start(&mut header, &mut bad);
    let step = (STEP_BYTES / 4) as u32;
    let mut even = [[0u32; 4]; 3];
    let mut odd = [[0u32; 4]; 3];
    unroll!(Q in [0 1 2] {
        even[Q] = ahead.load_v4_stream(Q as u32 * 128 + lane * 4);
        odd[Q] = ahead.load_v4_stream(step + Q as u32 * 128 + lane * 4);
    });
    // What is read up to here, no kernel in flight writes.
    grid::wait();
    let mut x = [0u32; 16];
    let mut offset = 0;
    let (mut input, mut seg) = (u32::MAX, 0);
    while next.number < jobs {
        let (out, rows) = (next.out, next.rows);
        let mut list = List {
            chunk: 0,
            base: 0,
            groups: (header[1] & 0xffff) + (header[1] >> 16),
            low: header[1] & 0xffff,
            stream: ahead,
        };
        if next.input != input || next.seg != seg {
            (input, seg) = (next.input, next.seg);
            (x, offset) = activations::<S>(args, input, seg, memory);
        }
        let mut group = lane;
        let copied = list.groups.min(LIST_BYTES / 16);
        // The vote keeps the compiler from unrolling, and from keeping four addresses for it.
        while warp::any(group < copied) {
            if group < copied {
                let word = memory.list / 4 + group * 4;
                cp_async_16(shared, word, list.stream, (PLANE_UNITS as u32 + group) * 4);
            }
            group += LANES as u32;
        }
        cp_async_commit();
        next = find::<S>(args, next.number + stride, jobs, stride);
        let more = next.number < jobs;
        if more {
            header = [next.header.load_nc(0), next.header.load_nc(1)];
        }
        ahead = ahead.at(u64::from(2 * step));
        let mut keep = [0; 2];
        let mut i = 0;
        // As a word of the arguments: the compiler would unroll the loop.
        while i < PAIRS * one {
            let load = i + 1 < PAIRS || more;
            multiply::<S>(&mut even, ahead, 0, load, &x, 8 * i, memory, &mut keep);
            // Here it keeps the compiler from moving the loads behind both steps.
            if i == 1 {
                cp_async_wait::<0>();
                warp::sync_warp();
            }
            if i > 0 && list.more() {
                list.entries::<S>(memory, &mut bad);
            }
            multiply::<S>(
                &mut odd,
                ahead,
                step,
                load,
                &x,
                8 * i + 4,
                memory,
                &mut keep,
            );
            if i + 2 < PAIRS {
                ahead = ahead.at(u64::from(2 * step));
            } else if i + 2 == PAIRS && more {
                // Not before: as far as the compiler knows it depends on the step.
                let none = lanemask_lt() >> 31;
                header = header.map(|word| mad_lo(i, none, word));
                ahead = next.start(&mut header, &mut bad);
            }
            i += 1;
        }
        while list.more() {
            list.entries::<S>(memory, &mut bad);
        }
        warp::sync_warp();
        finish::<S>(args, keep, offset, out, rows, memory);
        warp::sync_warp();
        fault(warp::any(bad), args.faults);
        bad = false;
    }
}

/// The lane's activations of a segment and 3 times the sum of all of them; copies the segment's to
/// shared memory, as part of the next group of copies. A warp operation.
#[inline(always)]
fn activations<const S: u32>(
    args: &ExpertArgs,
    input: u32,
    seg: u32,
    memory: Memory,
) -> ([u32; 16], i32) {
    let lane = warp::lane_id();
    let (words, groups) = (u64::from(args.cols / 2), u64::from(args.cols / 64));
    // SAFETY: a row of each, which no kernel in flight writes.
    let (row, gsum) = unsafe {
        (
            Global::<u32>::new(args.x.part::<u32>(u64::from(input) * words, words)),
            Global::<i32>::new(args.gsum.part::<i32>(u64::from(input) * groups, groups)),
        )
    };
    let mut piece = lane;
    while warp::any(piece < X_BYTES / 16) {
        let from = seg * (16 * S) + piece % (4 * S) * 4;
        cp_async_16(memory.shared, memory.x / 4 + piece * 4, row, from);
        piece += LANES as u32;
    }
    let mut x = [0; 16];
    unroll!(I in [0 1 2 3] {
        let words = row.load_v4_nc((seg * S + lane % S) * 16 + 4 * I as u32);
        x[4 * I] = words[0];
        x[4 * I + 1] = words[1];
        x[4 * I + 2] = words[2];
        x[4 * I + 3] = words[3];
    });
    let sum = if lane < S / 2 {
        gsum.load_nc(seg * (S / 2) + lane)
    } else {
        0
    };
    (x, warp::reduce_add_i32(sum).wrapping_mul(3))
}

/// A step: products of its 4 warp rows, from `row` on. Reloads the buffer from word `at` of `ahead`
/// where `load` holds.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn multiply<const S: u32>(
    buffer: &mut [[u32; 4]; 3],
    ahead: Global<u32>,
    at: u32,
    load: bool,
    x: &[u32; 16],
    row: u32,
    memory: Memory,
    keep: &mut [i32; 2],
) {
    let lane = warp::lane_id();
    unroll!(R in [0 1 2 3] {
        let a = buffer[3 * R / 4][3 * R % 4];
        let b = buffer[(3 * R + 1) / 4][(3 * R + 1) % 4];
        let c = buffer[(3 * R + 2) / 4][(3 * R + 2) % 4];
        let d = bitselect(0x4444_4444, c >> 1, bitselect(0x1111_1111, a >> 3, b >> 2));
        let words = [a, b, c, d];
        let (mut sum, mut sum16) = (0, 0);
        unroll!(K in [0 1 2 3] {
            let low = words[K] & 0x0707_0707;
            let high = words[K] & 0x7070_7070;
            sum = dp2a_lo_s32_u32(x[4 * K], low, sum);
            sum16 = dp2a_lo_s32_u32(x[4 * K + 2], high, sum16);
            sum = dp2a_hi_s32_u32(x[4 * K + 1], low, sum);
            sum16 = dp2a_hi_s32_u32(x[4 * K + 3], high, sum16);
        });
        // The words of the last row are the buffer's last.
        if R != 0 {
            const Q: usize = if R == 0 { 0 } else { R - 1 };
            ahead.reload_v4_stream(load, at + Q as u32 * 128 + lane * 4, &mut buffer[Q]);
        }
        keep_row::<S>(sum.wrapping_add(sum16 >> 4), row + R as u32, memory, keep);
    });
}

/// Adds up a warp row and leaves its sums with the lanes that will store them.
#[inline(always)]
fn keep_row<const S: u32>(sum: i32, row: u32, memory: Memory, keep: &mut [i32; 2]) {
    let lane = warp::lane_id();
    match S {
        32 => {
            let sum = warp::reduce_add_i32(sum);
            if lane == row {
                keep[0] = sum;
            }
        }
        16 => {
            let both = warp::reduce_add_i32(sum);
            let first = warp::reduce_add_i32(if lane < 16 { sum } else { 0 });
            if lane == row {
                *keep = [first, both.wrapping_sub(first)];
            }
        }
        _ => {
            let mut sum = sum;
            unroll!(D in [1 2 4] {
                if (D as u32) < S {
                    sum = sum.wrapping_add(warp::shuffle_xor_i32(sum, D as u32));
                }
            });
            if lane.is_multiple_of(S) {
                let at = memory.sums / 4 + 2 * list_sums(S) + row * (32 / S) + lane / S;
                memory.shared.store(at, sum as u32);
            }
        }
    }
}

/// What is left of a job's lists.
struct List {
    /// The next chunk: 32 groups, one a lane.
    chunk: u32,
    /// Doubled position before it.
    base: u32,
    groups: u32,
    /// Groups of list N.
    low: u32,
    stream: Global<u32>,
}

impl List {
    /// Whether there is a chunk left. A warp operation.
    #[inline(always)]
    fn more(&self) -> bool {
        warp::any(self.chunk * (LANES as u32) < self.groups)
    }

    /// The next chunk: adds the activations at its positions to the sums of their rows. A warp
    /// operation.
    #[inline(always)]
    fn entries<const S: u32>(&mut self, memory: Memory, bad: &mut bool) {
        let group = self.chunk * LANES as u32 + warp::lane_id();
        let words = if group >= self.groups {
            [u32::MAX; 4]
        } else if group < LIST_BYTES / 16 {
            memory.shared.load_v4(memory.list / 4 + group * 4)
        } else {
            self.stream.load_v4_nc((PLANE_UNITS as u32 + group) * 4)
        };
        entries::<S>(words, group, self.low, &mut self.base, bad, memory);
        self.chunk += 1;
    }
}

/// 16 entries a lane. `base` is the doubled position before them.
#[inline(always)]
fn entries<const S: u32>(
    words: [u32; 4],
    group: u32,
    low: u32,
    base: &mut u32,
    bad: &mut bool,
    memory: Memory,
) {
    const TWO: u32 = 0x0202_0202;
    /// `a & b | c`.
    const AND_OR: u32 = 0xea;
    let lane = warp::lane_id();
    let behind = [
        0,
        dp4a_u32_u32(words[0], TWO, 0),
        dp4a_u32_u32(words[1], TWO, dp4a_u32_u32(words[0], TWO, 0)),
        dp4a_u32_u32(
            words[2],
            TWO,
            dp4a_u32_u32(words[1], TWO, dp4a_u32_u32(words[0], TWO, 0)),
        ),
    ];
    let total = dp4a_u32_u32(words[3], TWO, behind[3]);
    let scan = warp::scan_add_u32(total).wrapping_add(*base);
    *base = warp::shuffle_idx_u32(scan, 31);
    let mut from = scan.wrapping_sub(total);
    let mut sums = memory.sums;
    if S == 32 {
        sums += lane % 2 * 4;
    }
    if group >= low {
        from = from.wrapping_sub(2 * POSITIONS as u32);
        sums += 4 * list_sums(S);
    }
    *bad |= group == low && from != 0;
    let mask = 4 * (list_sums(S) - if S == 32 { 2 } else { 1 });
    let shift = match S {
        32 | 16 => 8,
        8 => 7,
        4 => 6,
        _ => 5,
    };
    unroll!(K in [0 1 2 3] {
        let from = from.wrapping_add(behind[K]);
        let at = [
            dp4a_u32_u32(words[K], 0x0000_0002, from),
            dp4a_u32_u32(words[K], 0x0000_0202, from),
            dp4a_u32_u32(words[K], 0x0002_0202, from),
            dp4a_u32_u32(words[K], TWO, from),
        ];
        let mut values = [0; 4];
        unroll!(J in [0 1 2 3] {
            let named = !words[K] & 0xff << (8 * J);
            values[J] = memory.shared.load_i16_if(named, (at[J] & 0x7fe) | memory.x);
        });
        unroll!(J in [0 1 2 3] {
            let at = if S >= 16 {
                // Powers of two: one instruction, which LLVM takes apart if it may.
                lop3::<AND_OR>(at[J] >> shift, mask, sums)
            } else {
                (at[J] >> shift & mask) + sums
            };
            memory.shared.atomic_add_at_byte(at, values[J]);
        });
    });
}

/// Stores a job's results and clears the sums.
#[inline(always)]
fn finish<const S: u32>(
    args: &ExpertArgs,
    keep: [i32; 2],
    offset: i32,
    out: u32,
    rows: u32,
    memory: Memory,
) {
    let lane = warp::lane_id();
    // SAFETY: `out` holds `count * segs * split * slots * rows` words; each is written by one lane.
    let to = unsafe { GlobalMut::<u32>::new(args.out) };
    let shared = memory.shared;
    let low = memory.sums / 4;
    let high = low + list_sums(S);
    let result = |codes: i32, high: u32, low: u32| {
        let exceptions = high.wrapping_sub(low) as i32;
        codes
            .wrapping_add(exceptions.wrapping_mul(8))
            .wrapping_sub(offset) as u32
    };
    if S >= 16 {
        let (l, h) = (
            shared.load_v2(low + 2 * lane),
            shared.load_v2(high + 2 * lane),
        );
        shared.store_v2(low + 2 * lane, [0, 0]);
        shared.store_v2(high + 2 * lane, [0, 0]);
        if S == 32 {
            let value = result(keep[0], h[0].wrapping_add(h[1]), l[0].wrapping_add(l[1]));
            if lane < rows {
                to.store(out + lane, value);
            }
        } else {
            unroll!(I in [0 1] {
                let row = 2 * lane + I as u32;
                if row < rows {
                    to.store(out + row, result(keep[I], h[I], l[I]));
                }
            });
        }
    } else {
        let codes = high + list_sums(S);
        let mut row = lane;
        while row < 1024 / S {
            if row < rows {
                let (l, h) = (shared.load(low + row), shared.load(high + row));
                let value = result(shared.load(codes + row) as i32, h, l);
                to.store(out + row, value);
            }
            shared.store(low + row, 0);
            shared.store(high + row, 0);
            row += LANES as u32;
        }
    }
}
