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
//!    start; lists of more than [`LIST_BYTES`] are finished from global memory. Jobs are resolved
//!    4 at a time, headers and all.
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
    bitselect, dp2a_hi_s32_u32, dp2a_lo_s32_u32, dp4a_u32_u32, lanemask_lt, lop3, popc,
};
use cuda_std::mem::{Global, GlobalMut, Slice, cp_async_16, cp_async_commit, cp_async_wait};
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
/// Groups of 16 entries that are copied to shared memory.
const AT_HAND: u32 = LIST_BYTES / 16;
/// Jobs that a warp resolves at a time.
const QUEUE: u32 = 4;
/// Bytes of a job's entry, words: address of its planes (two), lengths of its lists, 256 times its row
/// of activations plus its segment; where its results go, and how many of them the matrix has.
const ENTRY: u32 = 32;
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
    X_BYTES + LIST_BYTES + sum_bytes(strips) + 2 * QUEUE * ENTRY
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

/// A warp's shared memory: bytes from the start.
#[derive(Clone, Copy)]
struct Memory {
    shared: Shared<u32>,
    x: u32,
    list: u32,
    sums: u32,
    queue: u32,
}

/// Leaves 0 as the results of `rows` rows from `first` on, for all tokens of an expert.
#[inline(always)]
fn clear(args: &ExpertArgs, segment: u32, first: u32, rows: u32, slot: u32, tokens: u32) {
    // SAFETY: `out` holds `count * segs * split * slots * rows` words; each is written by one lane.
    let out = unsafe { GlobalMut::<u32>::new(args.out) };
    let mut token = 0;
    while token < tokens {
        let at = (segment * args.slots + slot + token) * args.rows;
        let mut row = first + warp::lane_id();
        while row < first + rows && row < args.rows {
            out.store(at + row, 0);
            row += LANES as u32;
        }
        token += 1;
    }
}

/// The warp's jobs, resolved [`QUEUE`] at a time, a lane each: what leads to a job's planes is one
/// chain of loads for all of them. Two halves of shared memory in turn, so that the entry of the job
/// that runs stays.
struct Queue<'a> {
    args: &'a ExpertArgs,
    memory: Memory,
    /// Jobs of the launch, and how far a warp's are apart.
    jobs: u32,
    stride: u32,
    /// First job not yet resolved.
    number: u32,
    /// Entry of the next job, and how many there are.
    next: u32,
    left: u32,
}

impl Queue<'_> {
    /// Byte of shared memory of the next job's entry, if there is one. A warp operation.
    #[inline(always)]
    fn pop<const S: u32>(&mut self) -> Option<u32> {
        let half = (self.next / QUEUE + 1) % 2;
        while self.left == 0 && self.number < self.jobs {
            self.next = half * QUEUE;
            self.left = self.fill::<S>();
            self.number += QUEUE * self.stride;
        }
        if self.left == 0 {
            return None;
        }
        let entry = self.memory.queue + self.next * ENTRY;
        self.next += 1;
        self.left -= 1;
        // The next job's is in the other half where this one was the last.
        if self.left == 0 {
            self.next -= 1;
        }
        Some(entry)
    }

    /// Resolves jobs to entries from `next` on; their number. Of jobs that are none of the kernel's,
    /// results in further parts of a segment are set to 0. A warp operation.
    #[inline(always)]
    fn fill<const S: u32>(&self) -> u32 {
        let (args, shared) = (self.args, self.memory.shared);
        let lane = warp::lane_id();
        let number = self.number + lane * self.stride;
        let there = lane < QUEUE && number < self.jobs;
        let number = if there { number } else { 0 };
        let segs = args.segs * args.split;
        let (rest, seg) = div_rem(number, segs);
        let (rest, block) = div_rem(rest, args.blocks);
        let (active, matrix) = div_rem(rest, args.count);
        // SAFETY: arrays that no kernel in flight writes, indices in bounds by the argument's contract.
        let (active, desc) = unsafe {
            let active =
                Global::<[u32; 4]>::new(args.active).load_v4((args.active_begin + active) * 4);
            let index = active[0] * 3 + args.first + matrix;
            (active, Global::<MatrixDesc>::new(args.descs).load_nc(index))
        };
        let ours = there
            && desc.codec == CODEC_PLANE3
            && block < desc.n_blocks
            && active[2] == 1
            && args.min_tokens <= 1
            && args.max_tokens >= 1;
        let units = (desc.stream.len / 4) as u32;
        let mut good = ours && units >= PLANE_UNITS as u32;
        let mut start = 0;
        let mut lists = 0;
        if good {
            // SAFETY: two words of each job.
            let headers = unsafe { Global::<u32>::new(desc.blocks) };
            let word = 2 * (block * segs + seg);
            (start, lists) = (headers.load_nc(word), headers.load_nc(word + 1));
            let last = units - PLANE_UNITS as u32;
            let groups = (lists & 0xffff) + (lists >> 16);
            good = start <= last && groups <= last - start;
        }
        let segment = matrix * segs + seg;
        let stale = there && !ours && div_rem(seg, args.split).1 != 0;
        if warp::any(stale || ours && !good) {
            grid::wait();
            fault(warp::any(ours && !good), args.faults);
            let mut others = warp::ballot(stale);
            while others != 0 {
                let of = |value: u32| warp::shuffle_idx_u32(value, others.trailing_zeros());
                let (slot, tokens) = (of(active[1]), of(active[2]));
                clear(
                    args,
                    of(segment),
                    of(block) * (1024 / S),
                    1024 / S,
                    slot,
                    tokens,
                );
                others &= others - 1;
            }
        }
        let votes = warp::ballot(good);
        if good {
            let at = self.memory.queue + (self.next + popc(votes & lanemask_lt())) * ENTRY;
            let planes = desc.stream.addr + u64::from(start) * 16;
            let address = [planes as u32, (planes >> 32) as u32];
            let input = input_of(args, active[1]);
            let rows = block * (1024 / S);
            let out = (segment * args.slots + active[1]) * args.rows + rows;
            shared.store_v4(at / 4, [address[0], address[1], lists, input << 8 | seg]);
            shared.store_v2(at / 4 + 4, [out, args.rows - rows]);
        }
        warp::sync_warp();
        popc(votes)
    }

    /// A job's stream from its start on, planes and lists.
    #[inline(always)]
    fn stream(&self, entry: u32) -> Global<u32> {
        let [low, high] = self.memory.shared.load_v2(entry / 4);
        #[cfg(target_arch = "nvptx64")]
        let groups = 0;
        #[cfg(not(target_arch = "nvptx64"))]
        let (groups, _) = self.groups(entry);
        let len = u64::from((PLANE_UNITS as u32 + groups) * 4);
        // SAFETY: within the matrix' stream, as `fill` has checked.
        unsafe { Global::new(Slice::new(u64::from(low) | u64::from(high) << 32, len)) }
    }

    /// Groups of 16 entries of its lists together, and of list N.
    #[inline(always)]
    fn groups(&self, entry: u32) -> (u32, u32) {
        let lists = self.memory.shared.load(entry / 4 + 2);
        ((lists & 0xffff) + (lists >> 16), lists & 0xffff)
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
        queue: warps * (X_BYTES + LIST_BYTES + sum_bytes(S)) + warp * (2 * QUEUE * ENTRY),
    };
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
    let mut queue = Queue {
        args,
        memory,
        jobs,
        stride,
        number,
        next: 0,
        left: 0,
    };
    if lane == 0 {
        shared.store_v2(memory.queue / 4 + 6, [u32::MAX, 0]);
    }
    let mut next = queue.pop::<S>();
    let Some(first) = next else {
        grid::wait();
        return;
    };
    // The lane's part of it.
    let mut ahead = queue.stream(first).at(u64::from(lane * 4));
    let step = (STEP_BYTES / 4) as u32;
    let mut even = [[0u32; 4]; 3];
    let mut odd = [[0u32; 4]; 3];
    unroll!(Q in [0 1 2] {
        even[Q] = ahead.load_v4_stream(Q as u32 * 128);
        odd[Q] = ahead.load_v4_stream(step + Q as u32 * 128);
    });
    // What is read up to here, no kernel in flight writes.
    grid::wait();
    let always = args.count > 0;
    let mut x = [0u32; 16];
    let mut bad = false;
    while let Some(entry) = next {
        let mut list = List {
            chunk: 0,
            base: 0,
            entry,
        };
        let (groups, _) = queue.groups(entry);
        let its_part = shared.load(entry / 4 + 3);
        // What is the same for all lanes and seldom needed stands behind an entry.
        let kept = memory.queue / 4 + 6;
        if warp::any(its_part != shared.load(kept)) {
            let offset;
            (x, offset) = activations::<S>(args, its_part >> 8, its_part & 255, memory);
            warp::sync_warp();
            if lane == 0 {
                shared.store_v2(kept, [its_part, offset as u32]);
            }
        }
        let mut first = 0;
        let copied = groups.min(AT_HAND);
        // The vote keeps the compiler from unrolling, and from keeping four addresses for it.
        while warp::any(first < copied) {
            if first + lane < copied {
                let word = memory.list / 4 + (first + lane) * 4;
                cp_async_16(shared, word, ahead, (PLANE_UNITS as u32 + first) * 4);
            }
            first += LANES as u32;
        }
        cp_async_commit();
        next = queue.pop::<S>();
        let more = next.is_some();
        ahead = ahead.at(u64::from(2 * step));
        let mut keep = [0; 2];
        unroll!(I in [0 1 2 3] {
            // Known to be true, the loads would go to other registers, and so as late as may be.
            let load = if I + 1 < PAIRS as usize { always } else { more };
            let row = 8 * I as u32;
            multiply::<S>(&mut even, ahead, 0, load, &x, row, memory, &mut keep);
            if I == 1 {
                cp_async_wait::<0>();
                warp::sync_warp();
            }
            // Unconditional where registers allow: behind a branch, one scoreboard is left for all
            // loads under way, and the first use of any waits for the last.
            if I != 0 && (S == 32 || list.more(&queue)) {
                list.entries_at_hand::<S>(&queue, &mut bad);
            }
            multiply::<S>(&mut odd, ahead, step, load, &x, row + 4, memory, &mut keep);
            if I + 2 < PAIRS as usize {
                ahead = ahead.at(u64::from(2 * step));
            } else if let Some(next) = next
                && I + 2 == PAIRS as usize
            {
                ahead = queue.stream(next).at(u64::from(lane * 4));
            }
        });
        if list.more(&queue) {
            list.entries_at_hand::<S>(&queue, &mut bad);
        }
        while list.more(&queue) {
            list.entries::<S>(&queue, &mut bad);
        }
        warp::sync_warp();
        let (out, rows) = (shared.load(entry / 4 + 4), shared.load(entry / 4 + 5));
        let offset = shared.load(memory.queue / 4 + 7) as i32;
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
            ahead.reload_v4_stream(load, at + Q as u32 * 128, &mut buffer[Q]);
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

/// What is left of a job's lists. Their lengths are read anew each time, from the job's entry: kept,
/// they would be registers too many.
struct List {
    /// The next chunk: 32 groups, one a lane.
    chunk: u32,
    /// Doubled position before it.
    base: u32,
    entry: u32,
}

impl List {
    /// Whether there is a chunk left. A warp operation.
    #[inline(always)]
    fn more(&self, queue: &Queue<'_>) -> bool {
        warp::any(self.chunk * (LANES as u32) < queue.groups(self.entry).0)
    }

    /// The next chunk, of those that are in shared memory: adds the activations at its positions to
    /// the sums of their rows; past the last chunk adds nothing. Without a branch. A warp operation.
    #[inline(always)]
    fn entries_at_hand<const S: u32>(&mut self, queue: &Queue<'_>, bad: &mut bool) {
        let (groups, low) = queue.groups(self.entry);
        let group = self.chunk * LANES as u32 + warp::lane_id();
        let memory = queue.memory;
        let words = memory
            .shared
            .load_v4_or_ones(group < groups, memory.list / 4 + group * 4);
        entries::<S>(words, group, low, &mut self.base, bad, memory);
        self.chunk += 1;
    }

    /// The next chunk, from global memory. A warp operation.
    #[inline(always)]
    fn entries<const S: u32>(&mut self, queue: &Queue<'_>, bad: &mut bool) {
        let (groups, low) = queue.groups(self.entry);
        let group = self.chunk * LANES as u32 + warp::lane_id();
        let words = if group < groups {
            queue
                .stream(self.entry)
                .load_v4_nc((PLANE_UNITS as u32 + group) * 4)
        } else {
            [u32::MAX; 4]
        };
        entries::<S>(words, group, low, &mut self.base, bad, queue.memory);
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
