//! What the host hands to the expert kernels: descriptors in device memory, argument structs.
//!
//! All are `#[repr(C)]` plain data; addresses are device addresses. Word arrays (`u32`) that kernels
//! read 16 bytes at a time are 16-byte aligned.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::Slice;

use crate::layout::{Folds, Symbol};

/// [`MatrixDesc::codec`]: packed nibbles, row-major, even column in the low nibble.
pub const CODEC_RAW: u32 = 0;
/// [`MatrixDesc::codec`]: rANS over pairs.
pub const CODEC_RANS_PAIR: u32 = 1;
/// [`MatrixDesc::codec`]: rANS over triples.
pub const CODEC_RANS_TRIPLE: u32 = 2;
/// [`MatrixDesc::codec`]: three-bit plane and sparse fourth bit ([`crate::plane3`]), row scales only.
pub const CODEC_PLANE3: u32 = 3;

/// [`MatrixDesc::scale_format`]: f32.
pub const SCALES_F32: u32 = 0;
/// [`MatrixDesc::scale_format`]: bf16 bits of amax, [`crate::arith::scale_from_amax`].
pub const SCALES_AMAX: u32 = 1;

/// Codec number of a symbol kind.
pub const fn rans_codec(symbol: Symbol) -> u32 {
    match symbol {
        Symbol::Pair => CODEC_RANS_PAIR,
        Symbol::Triple => CODEC_RANS_TRIPLE,
    }
}

/// One matrix `[rows, cols]` of an expert, where it lies in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct MatrixDesc {
    /// `u32`, 16-byte aligned: coded streams, or `rows * cols / 8` words of packed nibbles.
    pub stream: Slice,
    /// `u32` `[n_blocks * segs + 1]`: where a job's stream starts, 16-byte units. Empty when raw;
    /// of plane3 its headers, [`crate::plane3`].
    pub blocks: Slice,
    /// Scales: f32, or u16 where the format is [`SCALES_AMAX`]; row-major, one a row or one for
    /// each 64 columns.
    pub scales: Slice,
    /// `CODEC_*`.
    pub codec: u32,
    /// `SCALES_*`.
    pub scale_format: u32,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Blocks of rows of a coded matrix, see [`crate::layout::Blocks`] and
    /// [`crate::plane3::Layout`]; 0 when raw.
    pub n_blocks: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<MatrixDesc>() == 72);

/// Arguments of the expert kernels: `matmul_raw`, `matmul_raw_mma`,
/// `matmul_raw_narrow`, `matmul_rans_*`,
/// `matmul_rans_tokens_*`, `matmul_rans_mma_*`, `decode_rans_*`, `matmul_plane3`, `decode_plane3`.
///
/// A launch covers matrices `first .. first + count` (gate and up, or down) of the active experts
/// `active_begin .. min(active_end, n_active)`; all of them are `[rows, cols]`. A kernel passes over
/// matrices of a codec that is not its own, and over experts whose number of tokens is not in
/// `min_tokens ..= max_tokens`, so that several launches cover a mixed layer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertArgs {
    /// [`MatrixDesc`] `[experts * 3]`: gate, up, down of each expert.
    pub descs: Slice,
    /// `[u32; 4]` `[n_active]`: expert, first slot, slots (tokens), 0; 16-byte aligned.
    pub active: Slice,
    /// `u32` `[1]`: how many of `active` there are.
    pub n_active: Slice,
    /// `u32` `[2^bits]`: table of `gpu::rans::entry`s, 16-byte aligned. Empty for `matmul_raw*`.
    pub table: Slice,
    /// Quantised activations as words of two i16 (the even column low), `[inputs, cols / 2]`.
    pub x: Slice,
    /// `i32` `[inputs, cols / 64]`: sums of `x` over each 64 columns.
    pub gsum: Slice,
    /// `u32` `[slots]`: input of a slot; empty: slot `i` reads input `i`.
    pub row_map: Slice,
    /// `u32` `[active_end - active_begin, count, rows * cols / 8]`: packed nibbles that
    /// `decode_*` writes. `matmul_raw*` takes coded matrices from here.
    pub scratch: Slice,
    /// `u32` `[count, segs * split, slots, rows]`: partial results, i32 dot products or, where
    /// `grouped`, f32 bits of the segment's scaled sum (without the activation scale). At most
    /// 2^32 - 1 words.
    pub out: Slice,
    /// `u32` `[1]`: incremented for each job whose final states show a corrupt stream; may be empty.
    pub faults: Slice,
    /// First matrix of an expert.
    pub first: u32,
    /// Matrices of an expert.
    pub count: u32,
    /// Rows of each.
    pub rows: u32,
    /// Columns of each.
    pub cols: u32,
    /// [`Folds::fold`].
    pub fold: u32,
    /// [`Folds::rounds`].
    pub rounds: u32,
    /// [`Folds::segs`].
    pub segs: u32,
    /// Slots of `out`.
    pub slots: u32,
    /// Coded kernels: largest `n_blocks` of the matrices. Raw: ceil(rows / `job_rows`).
    pub blocks: u32,
    /// Raw kernels: rows of a warp's job, at most 32.
    pub job_rows: u32,
    /// First active expert of the launch.
    pub active_begin: u32,
    /// End of the active experts of the launch.
    pub active_end: u32,
    /// Fewest tokens of an expert that the launch covers.
    pub min_tokens: u32,
    /// Most tokens of an expert that the launch covers.
    pub max_tokens: u32,
    /// 1: a scale for each 64 columns of a row; 0: one a row.
    pub grouped: u32,
    /// `matmul_rans_tokens_*`: of how many experts the activations of all tokens in a segment fit the
    /// block's shared memory beside all else. `matmul_rans_mma_*`: jobs of a window, 1 to 8.
    /// `matmul_rans_*`: not 0 where it may be that no expert has one token.
    pub stage: u32,
    /// Parts of a segment in `out`. 1, but where a launch of `matmul_plane3`, whose segments are
    /// those parts, fills the same `out`: others leave their results in the first part, and that
    /// launch leaves 0 in the other parts of what it does not cover.
    pub split: u32,
    /// Raw kernels: which codecs' matrices they cover, bit `c` for codec `c`.
    pub sources: u32,
}

const _: () = assert!(size_of::<ExpertArgs>() == 232);

/// [`ExpertArgs::sources`]: raw matrices alone.
pub const FROM_STREAM: u32 = 1 << CODEC_RAW;
/// [`ExpertArgs::sources`]: raw matrices, and all others from `scratch`.
pub const FROM_ALL: u32 = !0;

impl ExpertArgs {
    /// Sets `rows`, `cols` and what follows from the columns; `split` to 1.
    #[must_use]
    pub const fn with_shape(mut self, rows: usize, folds: &Folds) -> Self {
        self.rows = rows as u32;
        self.cols = folds.cols as u32;
        self.fold = folds.fold as u32;
        self.rounds = folds.rounds as u32;
        self.segs = folds.segs() as u32;
        self.split = 1;
        self
    }
}
