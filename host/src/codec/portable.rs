//! The decoder for any processor, in safe Rust: the plain algorithm without its branches.
//!
//! Departures from the plain decoder:
//! 1. Renormalisation and requests select instead of branching: both are unpredictable.
//! 2. Only `c mod 32` of a counter is kept, 0 or 16.
//! 3. A group's bytes go to their rows at once; columns are counted, not computed.

use gpu::layout::{LANES, STATES, Symbol};
use gpu::rans::advance;

use super::{JOB_BYTES, Job, JobError};

/// Bytes of a row group that one group of a lane yields.
trait Kind {
    const SYMBOL: Symbol;
    const HEIGHT: usize = Self::SYMBOL.height();
    /// Byte of row `r` from both lookups' entries.
    fn byte(e1: u32, e2: u32, r: usize) -> u8;
}

struct Pair;
struct Triple;

impl Kind for Pair {
    const SYMBOL: Symbol = Symbol::Pair;
    #[inline(always)]
    fn byte(e1: u32, e2: u32, r: usize) -> u8 {
        let e = if r == 0 { e1 } else { e2 };
        (e >> 16 | e >> 20) as u8
    }
}

impl Kind for Triple {
    const SYMBOL: Symbol = Symbol::Triple;
    #[inline(always)]
    fn byte(e1: u32, e2: u32, r: usize) -> u8 {
        let shift = 16 + 4 * r;
        (e1 >> shift & 15 | (e2 >> shift & 15) << 4) as u8
    }
}

pub(super) fn decode(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    match job.symbol {
        Symbol::Pair => decode_kind::<Pair>(job, out, stride),
        Symbol::Triple => decode_kind::<Triple>(job, out, stride),
    }
}

#[derive(Clone, Copy)]
struct Lane {
    states: [u32; STATES],
    counter: u32,
    window: u64,
}

fn decode_kind<K: Kind>(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    let bits = K::SYMBOL.table_bits();
    let low = 1u32 << bits;
    let entries = &job.entries[..1 << bits];
    let (fixed, rest) = job.bytes.split_at(JOB_BYTES);
    let fixed = fixed.as_chunks::<4>().0;
    let words = rest.as_chunks::<4>().0;
    let first = |i: usize| u32::from_le_bytes(fixed[i]);
    let mut lanes: [Lane; LANES] = std::array::from_fn(|l| Lane {
        states: [first(l), first(32 + l)],
        counter: 0,
        window: u64::from(first(64 + l)) << 32 | u64::from(first(96 + l)),
    });
    let mut at = 0;
    let per_round = job.folds.lane_cols() / 2;
    // Rows of a row group, side by side, so that the last one may reach past the matrix.
    let mut rows = vec![0u8; K::HEIGHT * job.folds.seg_cols() / 2];
    let width = job.folds.seg_cols() / 2;
    for t in 0..job.row_groups {
        for pair in 0..job.folds.pairs() {
            let column = pair / per_round * (LANES * per_round) + pair % per_round;
            for (l, lane) in lanes.iter_mut().enumerate() {
                let [mut x, mut y] = lane.states;
                let v = ((lane.window << lane.counter) >> 32) as u32;
                let e1 = entries[(x & (low - 1)) as usize];
                let e2 = entries[(y & (low - 1)) as usize];
                x = advance(x, bits, e1);
                y = advance(y, bits, e2);
                let m1 = x < low;
                x = if m1 { x << 16 | v >> 16 } else { x };
                let v = if m1 { v << 16 } else { v };
                let m2 = y < low;
                y = if m2 { y << 16 | v >> 16 } else { y };
                lane.states = [x, y];
                let c = lane.counter + 16 * u32::from(m1) + 16 * u32::from(m2);
                let need = c >= 32;
                lane.counter = c & 16;
                let word = words.get(at).map_or(0, |w| u32::from_le_bytes(*w));
                let next = lane.window << 32 | u64::from(word);
                lane.window = if need { next } else { lane.window };
                at += usize::from(need);
                let to = column + l * per_round;
                for r in 0..K::HEIGHT {
                    rows[r * width + to] = K::byte(e1, e2, r);
                }
            }
        }
        let done = t * K::HEIGHT;
        for (r, row) in rows.chunks_exact(width).enumerate() {
            if done + r < job.rows {
                out[(done + r) * stride..][..width].copy_from_slice(row);
            }
        }
    }
    let states = std::array::from_fn(|k| std::array::from_fn(|l| lanes[l].states[k]));
    super::final_states(&states, low)
}
