//! What the expert kernels share beside the decoder: jobs of a launch, the fold of a row's partial
//! results, where results go.

use core::num::NonZeroU32;

use cuda_std::intrinsics::{lanemask_lt, popc};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::warp;

use crate::abi::{ExpertArgs, MatrixDesc, SCALES_F32};
use crate::arith::{GROUP, scale_from_amax};
use crate::coded::{Code, unroll};
use crate::layout::LANES;

/// `a / b`, `a mod b` without a panic on the device: for `b` = 0 both are 0.
#[inline(always)]
pub(crate) fn div_rem(a: u32, b: u32) -> (u32, u32) {
    match NonZeroU32::new(b) {
        Some(b) => (a / b, a % b),
        None => (0, 0),
    }
}

/// An active expert's share of a launch.
#[derive(Clone, Copy)]
pub struct Job {
    /// Index within the launch's active experts.
    pub active: u32,
    /// Matrix of the expert, less `first`.
    pub matrix: u32,
    /// Block of rows.
    pub block: u32,
    /// Segment of columns.
    pub seg: u32,
    /// First slot of the expert.
    pub slot: u32,
    /// Its tokens.
    pub tokens: u32,
}

/// Number of active experts that a launch covers.
#[inline(always)]
pub(crate) fn active_count(args: &ExpertArgs) -> u32 {
    // SAFETY: `n_active` is one word that no kernel in flight writes.
    let n = unsafe { Global::<u32>::new(args.n_active) }.load(0);
    n.min(args.active_end).saturating_sub(args.active_begin)
}

/// Active expert number `k` of those with at most `most` tokens that the launch covers, and how many it covers up to there (all,
/// if there is no such). A warp operation; the same in all lanes.
#[inline(always)]
pub(crate) fn covered(args: &ExpertArgs, most: u32, k: u32) -> (u32, u32) {
    let lane = warp::lane_id();
    let n = active_count(args);
    let most = args.max_tokens.min(most);
    // SAFETY: an array that no kernel in flight writes.
    let active = unsafe { Global::<[u32; 4]>::new(args.active) };
    let active = active.cast::<u32>();
    let (mut found, mut seen, mut base) = (0, 0, 0);
    while base < n && seen <= k {
        let i = base + lane;
        let ours = i < n && {
            let tokens = active.load((args.active_begin + i) * 4 + 2);
            tokens >= args.min_tokens.max(1) && tokens <= most
        };
        let votes = warp::ballot(ours);
        let here = ours && seen + popc(votes & lanemask_lt()) == k;
        found = base + warp::ballot(here).trailing_zeros();
        seen += popc(votes);
        base += LANES as u32;
    }
    (found, seen)
}

/// Whether any active expert that the launch covers has one token. A warp operation.
#[inline(always)]
pub(crate) fn any_single(args: &ExpertArgs) -> bool {
    // SAFETY: an array that no kernel in flight writes.
    let active = unsafe { Global::<[u32; 4]>::new(args.active) };
    let active = active.cast::<u32>();
    let mut found = false;
    let mut i = warp::lane_id();
    while i < active_count(args) {
        found |= active.load((args.active_begin + i) * 4 + 2) == 1;
        i += LANES as u32;
    }
    warp::any(found)
}

/// Job `number` of (active expert, matrix, block, segment), the last fastest, and its matrix.
#[inline(always)]
pub(crate) fn job(args: &ExpertArgs, number: u32, blocks: u32) -> (Job, MatrixDesc) {
    let (rest, seg) = div_rem(number, args.segs);
    let (rest, block) = div_rem(rest, blocks);
    let (active, matrix) = div_rem(rest, args.count);
    // SAFETY: arrays that no kernel in flight writes, indices in bounds by the argument's contract.
    let ([_, slot, tokens, _], desc) = unsafe {
        let active = Global::<[u32; 4]>::new(args.active).load_v4((args.active_begin + active) * 4);
        let index = active[0] * 3 + args.first + matrix;
        (active, Global::<MatrixDesc>::new(args.descs).load_nc(index))
    };
    let job = Job {
        active,
        matrix,
        block,
        seg,
        slot,
        tokens,
    };
    (job, desc)
}

/// Row of activations that a slot reads.
#[inline(always)]
pub(crate) fn input_of(args: &ExpertArgs, slot: u32) -> u32 {
    if args.row_map.is_empty() {
        slot
    } else {
        // SAFETY: one entry a slot.
        unsafe { Global::<u32>::new(args.row_map) }.load(slot)
    }
}

/// First row group of a block and of the next.
#[inline(always)]
pub(crate) fn row_groups<C: Code>(args: &ExpertArgs, desc: &MatrixDesc, block: u32) -> (u32, u32) {
    let groups = div_rem(args.rows + C::HEIGHT - 1, C::HEIGHT).0;
    (
        div_rem(block * groups, desc.n_blocks).0,
        div_rem((block + 1) * groups, desc.n_blocks).0,
    )
}

/// A lane's place in folds: how its sums become the scaled sum of a row.
#[derive(Clone, Copy)]
pub struct Fold {
    /// Lanes that share a group of 64 columns.
    cluster: u32,
    /// Group of the lane in a fold.
    group: u32,
    /// Groups of a fold.
    groups: u32,
    /// Groups of a row.
    row_groups: u32,
    /// First group of the segment.
    seg_group: u32,
}

impl Fold {
    /// Of the lanes of a segment.
    #[inline(always)]
    pub(crate) fn new(args: &ExpertArgs, seg: u32, lane: u32) -> Self {
        Self::with_groups(args, seg, lane, args.fold / GROUP as u32)
    }

    /// The same where the number of groups of a fold is known to the compiler.
    #[inline(always)]
    pub(crate) fn with_groups(args: &ExpertArgs, seg: u32, lane: u32, groups: u32) -> Self {
        let cluster = div_rem(LANES as u32, groups).0;
        Self {
            cluster,
            group: div_rem(lane, cluster).0,
            groups,
            row_groups: args.cols / GROUP as u32,
            seg_group: seg * args.rounds * groups,
        }
    }

    /// The lane's group in round `round`, within the row.
    #[inline(always)]
    pub(crate) fn group(&self, round: u32) -> u32 {
        self.seg_group + round * self.groups + self.group
    }

    /// Scale of the lane's group in a row.
    #[inline(always)]
    pub(crate) fn scale(&self, desc: &MatrixDesc, row: u32, round: u32) -> f32 {
        scale_at(desc, row * self.row_groups + self.group(round))
    }

    /// Scaled sum of a fold: `sum` is the lane's dot product of unsigned nibbles, `gsum` the sum of
    /// its group's activations. The same in all lanes.
    #[inline(always)]
    pub(crate) fn reduce(&self, sum: i32, gsum: i32, scale: f32) -> f32 {
        let mut sum = sum;
        let mut lanes = 1;
        while lanes < self.cluster {
            sum = sum.wrapping_add(warp::shuffle_xor_i32(sum, lanes));
            lanes *= 2;
        }
        let dot = sum.wrapping_sub(gsum.wrapping_mul(8));
        let mut v = scale * dot as f32;
        let mut lanes = LANES as u32 / 2;
        while lanes >= self.cluster {
            v += warp::shuffle_xor_f32(v, lanes);
            lanes /= 2;
        }
        v
    }
}

/// Scale number `index` of a matrix, in f32.
#[inline(always)]
pub(crate) fn scale_at(desc: &MatrixDesc, index: u32) -> f32 {
    // SAFETY: the matrix has that many scales of its format.
    unsafe {
        if desc.scale_format == SCALES_F32 {
            Global::<f32>::new(desc.scales).load_nc(index)
        } else {
            scale_from_amax(Global::<u16>::new(desc.scales).load_nc(index))
        }
    }
}

/// Where in `out` the partial results of a slot's rows start, for a job's matrix and segment: the first
/// part of the segment.
///
/// A 32-bit index, which takes fewer registers than the address.
#[inline(always)]
pub(crate) fn out_index(args: &ExpertArgs, job: &Job, slot: u32) -> u32 {
    let segment = (job.matrix * args.segs + job.seg) * args.split;
    (segment * args.slots + slot) * args.rows
}

/// Stores the partial result of a row of a slot, for a matrix and segment.
#[inline(always)]
pub(crate) fn store_out(args: &ExpertArgs, job: &Job, slot: u32, row: u32, value: u32) {
    let index = out_index(args, job, slot) + row;
    // SAFETY: `out` holds `count * segs * split * slots * rows` words; each is written by one lane.
    unsafe { GlobalMut::<u32>::new(args.out) }.store(index, value);
}

/// Scales of the lane's group in the rows of a row group that starts at `row`.
#[inline(always)]
pub(crate) fn group_scales<C: Code>(
    args: &ExpertArgs,
    desc: &MatrixDesc,
    fold: &Fold,
    row: u32,
    round: u32,
) -> [f32; 3] {
    let mut scales = [0.0; 3];
    unroll!(I in [0 1 2] {
        if I < C::HEIGHT as usize {
            let row = row + I as u32;
            let row = if row < args.rows { row } else { args.rows - 1 };
            scales[I] = fold.scale(desc, row, round);
        }
    });
    scales
}

/// Stores the results of the rows of a row group that starts at `row`, from [`out_index`] on; `values` is
/// the same in all lanes.
#[inline(always)]
pub(crate) fn store_group<C: Code>(args: &ExpertArgs, out: u32, row: u32, values: [u32; 3]) {
    let lane = warp::lane_id();
    let value = match lane {
        0 => values[0],
        1 => values[1],
        _ => values[2],
    };
    if lane < C::HEIGHT && row + lane < args.rows {
        // SAFETY: as in `store_out`.
        unsafe { GlobalMut::<u32>::new(args.out) }.store(out + row + lane, value);
    }
}

/// Activations of an input row as words of two, and the sums of its groups.
#[inline(always)]
pub(crate) fn input_row(args: &ExpertArgs, slot: u32) -> (Global<u32>, Global<i32>) {
    let input = u64::from(input_of(args, slot));
    let (words, groups) = (
        u64::from(args.cols / 2),
        u64::from(args.cols / GROUP as u32),
    );
    // SAFETY: a row of each, which no kernel in flight writes.
    unsafe {
        (
            Global::new(args.x.part::<u32>(input * words, words)),
            Global::new(args.gsum.part::<i32>(input * groups, groups)),
        )
    }
}

/// The lane's share of the sum of a segment's activations.
#[inline(always)]
pub(crate) fn lane_gsum(args: &ExpertArgs, gsum: Global<i32>, seg: u32) -> i32 {
    let groups = args.rounds * args.fold / GROUP as u32;
    let lane = warp::lane_id();
    if lane < groups {
        gsum.load_nc(seg * groups + lane)
    } else {
        0
    }
}

/// Word of a row of activations where a lane's columns of a round start.
#[inline(always)]
pub(crate) fn lane_word(args: &ExpertArgs, seg: u32, round: u32, lane: u32) -> u32 {
    (seg * args.rounds + round) * (args.fold / 2) + lane * (args.fold / (2 * LANES as u32))
}

/// Counts a fault of the warp's job.
#[inline(always)]
pub(crate) fn fault(found: bool, faults: Slice) {
    if found && !faults.is_empty() && warp::lane_id() == 0 {
        // SAFETY: one word, which kernels only add to.
        unsafe { GlobalMut::<u32>::new(faults) }.atomic_add_u32(0, 1);
    }
}
