//! The plain decoder: `docs/format.md` line by line, for other decoders to be compared with.

use gpu::layout::{JOB_WORDS, LANES, STATES};
use gpu::rans::{advance, entry_value};

use super::{Job, JobError};

/// Decodes a job into rows of `stride` bytes.
pub(super) fn decode(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    let bits = job.symbol.table_bits();
    let low = 1u32 << bits;
    let word = |i: usize| match job.bytes.get(4 * i..4 * i + 4) {
        Some(b) => u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        None => 0,
    };
    let mut states: [[u32; LANES]; STATES] =
        std::array::from_fn(|k| std::array::from_fn(|l| word(k * LANES + l)));
    let mut window: [u64; LANES] =
        std::array::from_fn(|l| u64::from(word(64 + l)) << 32 | u64::from(word(96 + l)));
    let mut counter = [0u32; LANES];
    let mut next = JOB_WORDS as usize;
    for t in 0..job.row_groups {
        for pair in 0..job.folds.pairs() {
            for lane in 0..LANES {
                let column = job.folds.column(0, lane, pair);
                let mut v = ((window[lane] << (counter[lane] & 31)) >> 32) as u32;
                let before = counter[lane];
                for (k, states) in states.iter_mut().enumerate() {
                    let x = &mut states[lane];
                    let e = job.entries[(*x & (low - 1)) as usize];
                    *x = advance(*x, bits, e);
                    if *x < low {
                        *x = *x << 16 | v >> 16;
                        v <<= 16;
                        counter[lane] += 16;
                    }
                    let value = entry_value(job.symbol, e);
                    for n in 0..job.symbol.alphabet().ilog2() as usize / 4 {
                        let (row, col) = job.symbol.nibble(k, n);
                        let row = t * job.symbol.height() + row;
                        if row < job.rows {
                            let at = row * stride + column / 2;
                            let shift = 4 * col;
                            let nibble = (value >> (4 * n) & 15) as u8;
                            out[at] = out[at] & !(15 << shift) | nibble << shift;
                        }
                    }
                }
                if (counter[lane] ^ before) & 32 != 0 {
                    window[lane] = window[lane] << 32 | u64::from(word(next));
                    next += 1;
                }
            }
        }
    }
    super::final_states(&states, low)
}
