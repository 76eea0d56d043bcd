//! Reading what the expert matmuls leave: partial sums per segment, and a matrix' scales.

use cuda_std::mem::{Global, Slice};

use crate::abi::{MatrixDesc, SCALES_AMAX};
use crate::arith::{dequantise_grouped, dequantise_row, scale_from_amax};

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

    /// Scale of `row`.
    ///
    /// # Safety
    /// The scales must be live, and one for each row.
    #[inline(always)]
    pub unsafe fn get(&self, row: u32) -> f32 {
        if self.format == SCALES_AMAX {
            // SAFETY: the caller's.
            scale_from_amax(unsafe { Global::<u16>::new(self.scales) }.load_nc(row))
        } else {
            // SAFETY: the caller's.
            unsafe { Global::<f32>::new(self.scales) }.load_nc(row)
        }
    }
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
        let words = self.of(matrix, slot);
        let mut dot = 0u32;
        for seg in 0..self.segs {
            dot = dot.wrapping_add(words.load(seg * self.slots * self.rows + row));
        }
        dequantise_row(scale, activation, dot as i32)
    }

    /// Output `row` of a matrix with g64 scales: `activation * sum`, segments ascending.
    #[inline(always)]
    pub fn grouped(&self, matrix: u32, slot: u32, row: u32, activation: f32) -> f32 {
        let words = self.of(matrix, slot);
        let mut sum = f32::from_bits(words.load(row));
        for seg in 1..self.segs {
            sum += f32::from_bits(words.load(seg * self.slots * self.rows + row));
        }
        dequantise_grouped(activation, sum)
    }
}
