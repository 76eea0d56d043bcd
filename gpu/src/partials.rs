//! Reading what the expert matmuls leave: partial sums per segment, and a matrix' scales.

use cuda_std::mem::{Global, Slice};

use crate::abi::{MatrixDesc, SCALES_AMAX};
use crate::arith::{dequantise_grouped, dequantise_row, scale_from_amax};
use crate::coded::unroll;

/// The scales of a matrix that has one a row.
#[derive(Clone, Copy)]
pub struct Scales {
    scales: Slice,
    format: u32,
}

impl Scales {
    /// Those of matrix `index` of an array of descriptors.
    #[inline(always)]
    pub fn of(descs: Global<MatrixDesc>, index: u32) -> Self {
        let word = index * (size_of::<MatrixDesc>() / 4) as u32;
        let at = word + (core::mem::offset_of!(MatrixDesc, scales) / 4) as u32;
        let (addr, len) = (descs.load_v2_nc(at), descs.load_v2_nc(at + 2));
        let format = word + (core::mem::offset_of!(MatrixDesc, scale_format) / 4) as u32;
        Self {
            scales: Slice {
                addr: addr[0] as u64 | (addr[1] as u64) << 32,
                len: len[0] as u64 | (len[1] as u64) << 32,
            },
            format: descs.cast::<u32>().load_nc(format),
        }
    }

    /// Scale of `row`. Without a branch, so that loads of several scales are under way together.
    ///
    /// # Safety
    /// The scales must be live, and one for each row.
    #[inline(always)]
    pub unsafe fn get(&self, row: u32) -> f32 {
        let amax = self.format == SCALES_AMAX;
        let halves = Slice {
            len: self.scales.len * if amax { 1 } else { 2 },
            ..self.scales
        };
        // SAFETY: the caller's; f32 scales are read as two halves, the second twice from amax.
        let halves = unsafe { Global::<u16>::new(halves) };
        let at = if amax { row } else { 2 * row };
        let (low, high) = (halves.load_nc(at), halves.load_nc(at + u32::from(!amax)));
        let whole = f32::from_bits(u32::from(low) | u32::from(high) << 16);
        if amax { scale_from_amax(low) } else { whole }
    }
}

/// The sum of a row of activations from its sums over each 64 columns, `groups` of them from `first`
/// on.
#[inline(always)]
pub fn sum_of(sums: Global<i32>, first: u32, groups: u32) -> i32 {
    let mut sum = 0i32;
    let mut group = 0;
    while group < groups {
        sum = sum.wrapping_add(sums.load(first + group));
        group += 1;
    }
    sum
}

/// Partial sums of a group of matrices: words `[matrices, segs, slots, rows]`, i32 dot products of
/// row scales or f32 sums of g64 scales.
#[derive(Clone, Copy)]
pub struct Partials {
    /// The words.
    pub words: Global<u32>,
    /// Segments of a row.
    pub segs: u32,
    /// Slots.
    pub slots: u32,
    /// Rows of a matrix.
    pub rows: u32,
}

impl Partials {
    /// The words of a slot in segment 0.
    #[inline(always)]
    fn of(&self, matrix: u32, slot: u32) -> Global<u32> {
        let row = matrix as u64 * self.segs as u64 * self.slots as u64 + slot as u64;
        self.words.at(row * self.rows as u64)
    }

    /// Output `row` of a matrix with a scale a row: `scale * (activation * dot)`.
    #[inline(always)]
    pub fn by_row(&self, matrix: u32, slot: u32, row: u32, scale: f32, activation: f32) -> f32 {
        dequantise_row(scale, activation, self.total(matrix, slot, row))
    }

    /// The dot product of a row.
    #[inline(always)]
    pub fn total(&self, matrix: u32, slot: u32, row: u32) -> i32 {
        let words = self.of(matrix, slot);
        let mut dot = 0u32;
        let mut seg = 0;
        while seg < self.segs {
            let four = self.four(words, seg, row);
            dot = four.iter().fold(dot, |dot, word| dot.wrapping_add(*word));
            seg += 4;
        }
        dot as i32
    }

    /// Output `row` of a matrix with g64 scales: `activation * sum`, segments ascending.
    #[inline(always)]
    pub fn grouped(&self, matrix: u32, slot: u32, row: u32, activation: f32) -> f32 {
        let words = self.of(matrix, slot);
        let mut sum = 0.0;
        let mut seg = 0;
        while seg < self.segs {
            let four = self.four(words, seg, row);
            unroll!(I in [0 1 2 3] {
                if seg + I as u32 == 0 {
                    sum = f32::from_bits(four[I]);
                } else if seg + (I as u32) < self.segs {
                    sum += f32::from_bits(four[I]);
                }
            });
            seg += 4;
        }
        dequantise_grouped(activation, sum)
    }

    /// The dot product of a row that has at most four segments.
    #[inline(always)]
    pub fn dot(&self, matrix: u32, slot: u32, row: u32) -> i32 {
        let four = self.four(self.of(matrix, slot), 0, row);
        four.iter().fold(0u32, |dot, word| dot.wrapping_add(*word)) as i32
    }

    /// The words of a row in four segments from `seg` on, without a branch between their loads; 0 past
    /// the last.
    #[inline(always)]
    fn four(&self, words: Global<u32>, seg: u32, row: u32) -> [u32; 4] {
        let mut four = [0; 4];
        unroll!(I in [0 1 2 3] {
            let at = (seg + I as u32).min(self.segs - 1);
            four[I] = words.load(at * self.slots * self.rows + row);
        });
        unroll!(I in [0 1 2 3] {
            four[I] = if seg + (I as u32) < self.segs { four[I] } else { 0 };
        });
        four
    }
}
