//! The layout of `plane3`: a three-bit plane of every nibble, and a sparse fourth bit.
//!
//! The code of a nibble `n` is `c = (n + 3) mod 8`. Nibbles 5 to 12 are `c + 5`; for the others
//! [`OFFSET`] is wrong by 8 and their positions stand in one of two lists: N (`n <= 4`, which is
//! `c + 5 - 8`) and P (`n >= 13`, which is `c + 5 + 8`). A dot product is then
//! `sum c x + 5 sum x + 8 (sum over P of x - sum over N of x)`, without a lookup; as nibbles, both
//! kinds of exception are `(c + 5) xor 8`.
//!
//! **Jobs.** Columns are cut into *strips* of 32. With [`Layout::strips`] S, the largest power of
//! two up to 32 that divides the number of strips, a *segment* is S strips and a *warp row* is
//! `32 / S` matrix rows of a segment: lane `l` has strip `l mod S` of row `l / S`. A job, 32 warp
//! rows, is a *block* of `1024 / S` matrix rows; job `(block, segment)` has number
//! `block * segs + segment`. Rows past the matrix hold the code of nibble 8. The *position* of a
//! nibble in its job is `1024 * warp row + 32 * lane + column of the strip`, below [`POSITIONS`].
//!
//! **Stream of a job**, little-endian, at a multiple of 16 bytes: planes, list N, list P.
//!
//! **Planes**, [`PLANE_BYTES`]: a lane's 32 codes of a warp row are three words x, y, z
//! ([`pack_row`]). Of four neighbouring warp rows (a *step*) a lane has twelve words, those of its
//! first row first; word `4 q + j` of lane `l` in step `s` is at byte `1536 s + 512 q + 16 l + 4 j`.
//!
//! **Lists**, each a multiple of 16 bytes: the distances of the positions from the one before,
//! ascending, the first from 0, a byte each; a byte [`SKIP`] advances by 255 and names no position.
//! List N ends with an entry that lands on [`POSITIONS`] and is filled up with 0 (further entries
//! there); list P is filled up with [`SKIP`]. An empty P list has no bytes.
//!
//! **Headers**, two words for each job and two more behind the last: where the job starts, in
//! 16-byte units, and the lengths of its lists in the same units, N in the low half. The closing
//! entry holds the end of the last job, and 0.

use crate::layout::{LANES, MAX_COLS};

/// Columns of a strip, which is what a lane owns of a warp row.
pub const STRIP: usize = 32;
/// Warp rows of a job.
pub const WARP_ROWS: usize = 32;
/// Nibbles of a job.
pub const POSITIONS: usize = WARP_ROWS * LANES * STRIP;
/// Bytes of a job's planes.
pub const PLANE_BYTES: usize = POSITIONS * 3 / 8;
/// Warp rows of a step.
pub const STEP_ROWS: usize = 4;
/// Bytes of a step.
pub const STEP_BYTES: usize = STEP_ROWS * LANES * 12;
/// Steps of a job.
pub const STEPS: usize = WARP_ROWS / STEP_ROWS;
/// Byte of a list that advances by itself and names no position.
pub const SKIP: u8 = 255;
/// Unit of starts and lengths, bytes.
pub const UNIT: usize = 16;
/// Units of a job's planes.
pub const PLANE_UNITS: usize = PLANE_BYTES / UNIT;
/// A code plus this is its nibble, exceptions apart.
pub const OFFSET: u8 = 5;
/// Code that stands in rows past the matrix: nibble 8, no exception.
pub const PADDING: u8 = 3;

/// Code of a nibble.
#[inline(always)]
pub const fn code(nibble: u8) -> u8 {
    (nibble + 3) & 7
}

/// Whether a nibble's position is in list N.
#[inline(always)]
pub const fn is_low(nibble: u8) -> bool {
    nibble <= 4
}

/// Whether a nibble's position is in list P.
#[inline(always)]
pub const fn is_high(nibble: u8) -> bool {
    nibble >= 13
}

/// The three words of 32 codes.
///
/// With f\[i] the codes of columns `4 i .. 4 i + 4` as the bytes of a word: `x = f0 | f1 << 4`,
/// `y = f2 | f3 << 4`, `z = f4 | f5 << 4`, and of `m = f6 | f7 << 4` bit 0 of each nibble is bit 3
/// of x's, bit 1 of y's, bit 2 of z's.
#[inline(always)]
pub fn pack_row(codes: &[u8; STRIP]) -> [u32; 3] {
    let f = |i: usize| {
        let byte = |j: usize| (codes[4 * i + j] as u32) << (8 * j);
        byte(0) | byte(1) | byte(2) | byte(3)
    };
    let two = |i: usize| f(i) | f(i + 1) << 4;
    let m = two(6);
    [
        two(0) | (m & 0x1111_1111) << 3,
        two(2) | (m & 0x2222_2222) << 2,
        two(4) | (m & 0x4444_4444) << 1,
    ]
}

/// The fourth word of a row, whose bits the other three carry.
#[inline(always)]
pub const fn fourth(x: u32, y: u32, z: u32) -> u32 {
    (x >> 3 & 0x1111_1111) | (y >> 2 & 0x2222_2222) | (z >> 1 & 0x4444_4444)
}

/// The order of columns in the words of a row undone: nibbles `8 i .. 8 i + 8` of word i, from two
/// groups of four as bytes' low and high halves to neighbouring columns in neighbouring nibbles.
#[inline(always)]
pub const fn in_order(word: u32) -> u32 {
    let low = word & 0x0f0f_0f0f;
    let high = word >> 4 & 0x0f0f_0f0f;
    let low = (low | low >> 4) & 0x00ff_00ff;
    let high = (high | high >> 4) & 0x00ff_00ff;
    let low = (low | low >> 8) & 0xffff;
    let high = (high | high >> 8) & 0xffff;
    low | high << 16
}

/// Word of a job's planes where words `4 q ..` of a lane in a step are.
#[inline(always)]
pub const fn plane_word(step: usize, q: usize, lane: usize) -> usize {
    (step * STEP_BYTES + q * 16 * LANES + lane * 16) / 4
}

/// How a matrix is cut into jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Rows of the matrix.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// Strips of a segment: 2, 4, 8, 16 or 32.
    pub strips: usize,
}

impl Layout {
    /// `None` for no rows, or unless `cols` is a positive multiple of 64 up to 8,192.
    #[inline(always)]
    pub const fn new(rows: usize, cols: usize) -> Option<Self> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(2 * STRIP) || cols > MAX_COLS {
            return None;
        }
        let lowest = 1 << (cols / STRIP).trailing_zeros();
        let strips = if lowest < LANES { lowest } else { LANES };
        Some(Self { rows, cols, strips })
    }

    /// Columns of a segment.
    #[inline(always)]
    pub const fn seg_cols(&self) -> usize {
        self.strips * STRIP
    }

    /// Segments of a row.
    #[inline(always)]
    pub const fn segs(&self) -> usize {
        self.cols / self.seg_cols()
    }

    /// Matrix rows of a warp row.
    #[inline(always)]
    pub const fn row_lanes(&self) -> usize {
        LANES / self.strips
    }

    /// Matrix rows of a block; the last one may reach past the matrix.
    #[inline(always)]
    pub const fn block_rows(&self) -> usize {
        WARP_ROWS * self.row_lanes()
    }

    /// Blocks of rows.
    #[inline(always)]
    pub const fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block_rows())
    }

    /// Jobs of the matrix.
    #[inline(always)]
    pub const fn jobs(&self) -> usize {
        self.blocks() * self.segs()
    }

    /// Words of the headers.
    #[inline(always)]
    pub const fn header_words(&self) -> usize {
        2 * (self.jobs() + 1)
    }

    /// Row and column of a position within the rows of its block and the columns of its segment.
    #[inline(always)]
    pub const fn place(&self, position: usize) -> (usize, usize) {
        (position / self.seg_cols(), position % self.seg_cols())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_codes_with_bit_3_turned() {
        for nibble in 0..16u8 {
            let plain = code(nibble) + OFFSET;
            let turned = is_low(nibble) || is_high(nibble);
            assert_eq!(if turned { plain ^ 8 } else { plain }, nibble);
            // What decoders check: a turned nibble was in the half that its list comes from.
            assert!(!is_low(nibble) || plain >= 8);
            assert!(!is_high(nibble) || plain < 8);
        }
        assert_eq!(code(8), PADDING);
        assert!(!is_low(8) && !is_high(8));
    }

    #[test]
    fn rows_unpack_in_order() {
        let codes: [u8; 32] = core::array::from_fn(|i| ((i * i + 3 * i) % 8) as u8);
        let [x, y, z] = pack_row(&codes);
        let words = [x, y, z, fourth(x, y, z)];
        for (i, word) in words.iter().enumerate() {
            let ordered = in_order(word & 0x7777_7777);
            for j in 0..8 {
                assert_eq!((ordered >> (4 * j) & 15) as u8, codes[8 * i + j], "{i} {j}");
            }
        }
    }

    #[test]
    fn every_nibble_has_one_place() {
        for (rows, cols) in [(1, 64), (40, 64), (70, 1536), (33, 2048), (5, 96 * 64)] {
            let l = Layout::new(rows, cols).unwrap();
            assert_eq!(l.seg_cols() * l.segs(), cols);
            assert_eq!(l.block_rows() * l.seg_cols(), POSITIONS);
            for position in [0, 31, 32, 1023, 1024, POSITIONS - 1] {
                let (warp_row, lane, k) =
                    (position / 1024, position / STRIP % LANES, position % STRIP);
                let row = warp_row * l.row_lanes() + lane / l.strips;
                let column = lane % l.strips * STRIP + k;
                assert_eq!(l.place(position), (row, column));
            }
        }
        let strips = |cols| Layout::new(1, cols).unwrap().strips;
        assert_eq!(
            [64, 192, 128, 1536, 2048, 6144, 8192].map(strips),
            [2, 2, 4, 16, 32, 32, 32]
        );
        assert!(
            [0, 32, 100, 8256]
                .iter()
                .all(|c| Layout::new(1, *c).is_none())
        );
        assert!(Layout::new(0, 64).is_none());
    }
}
