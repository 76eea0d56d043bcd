//! How the nibbles of a matrix are dealt to blocks, lanes and table lookups.
//!
//! A matrix `[rows, cols]` is cut into *segments* of columns and *blocks* of rows; one warp decodes
//! one (block, segment) job, its 32 lanes each a slice of the segment's columns for all of the
//! block's rows (the activations of a lane are then the same for every row).
//!
//! - [`Folds`] follows from `cols` alone, for every codec and for raw matrices: it also fixes the
//!   order in which g64 partial results are added.
//! - A *lookup* yields a symbol of 2 or 3 nibbles; two lookups make a *group*, after which lanes
//!   vote on who needs a new stream word. A group covers [`Symbol::height`] rows by 2 columns, so
//!   any column count that is a multiple of 64 deals out evenly.

use crate::arith::GROUP;

/// Lanes of a warp.
pub const LANES: usize = 32;

/// rANS states of a lane: one for the first lookup of its groups, one for the second. They share the
/// lane's words, and neither waits for the other's lookup.
pub const STATES: usize = 2;

/// Words that every rANS job has: states, first and second words of each lane.
pub const JOB_WORDS: u32 = ((STATES + 2) * LANES) as u32;

/// Largest number of columns: `8 * 32512 * 8192 < 2^31` keeps an int32 dot product exact.
pub const MAX_COLS: usize = 8192;

/// Columns are a multiple of this.
pub const COL_UNIT: usize = 64;

/// How columns are folded: lanes own `lane_cols` neighbouring columns in each of `rounds` rounds
/// of `fold` columns; a segment is `rounds * fold` columns.
///
/// g64 sums follow it: within a fold, `v[g] = scale[g] * dot[g]` for its `fold / 64` groups, added
/// by halving (distances `n/2 … 1`); folds are then added in ascending order, starting from the
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Folds {
    /// Columns of the matrix.
    pub cols: usize,
    /// Columns of a fold: the largest of 2048, 1024, … 64 that divides `cols`.
    pub fold: usize,
    /// Folds of a segment: all of them up to 2,048 columns, else one.
    pub rounds: usize,
}

impl Folds {
    /// Folding of a matrix of `cols` columns; `None` unless a positive multiple of 64 up to 8,192.
    #[inline(always)]
    pub const fn new(cols: usize) -> Option<Self> {
        if cols == 0 || !cols.is_multiple_of(COL_UNIT) || cols > MAX_COLS {
            return None;
        }
        let mut fold = 2048;
        while !cols.is_multiple_of(fold) {
            fold /= 2;
        }
        let rounds = if cols <= 2048 { cols / fold } else { 1 };
        Some(Self { cols, fold, rounds })
    }

    /// Columns of a segment.
    #[inline(always)]
    pub const fn seg_cols(&self) -> usize {
        self.rounds * self.fold
    }

    /// Segments of a row.
    #[inline(always)]
    pub const fn segs(&self) -> usize {
        self.cols / self.seg_cols()
    }

    /// Columns that a lane owns in a round: 2 to 64.
    #[inline(always)]
    pub const fn lane_cols(&self) -> usize {
        self.fold / LANES
    }

    /// Column pairs of a lane in a segment, over all rounds: `seg_cols / 64`.
    #[inline(always)]
    pub const fn pairs(&self) -> usize {
        self.seg_cols() / (2 * LANES)
    }

    /// Groups of 64 columns in a fold.
    #[inline(always)]
    pub const fn fold_groups(&self) -> usize {
        self.fold / GROUP
    }

    /// Column of the even member of a lane's `pair`-th column pair in segment `seg`.
    #[inline(always)]
    pub const fn column(&self, seg: usize, lane: usize, pair: usize) -> usize {
        let per_round = self.lane_cols() / 2;
        seg * self.seg_cols()
            + (pair / per_round) * self.fold
            + lane * self.lane_cols()
            + 2 * (pair % per_round)
    }
}

/// What one table lookup yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Symbol {
    /// Two nibbles of one row: columns `2p` and `2p + 1`. The group's lookups are two rows.
    Pair = 0,
    /// Three nibbles of one column: rows `3t … 3t + 2`. The group's lookups are two columns.
    Triple = 1,
}

impl Symbol {
    /// Rows of a group.
    #[inline(always)]
    pub const fn height(self) -> usize {
        match self {
            Symbol::Pair => 2,
            Symbol::Triple => 3,
        }
    }

    /// Binary logarithm of the table's slots.
    #[inline(always)]
    pub const fn table_bits(self) -> u32 {
        match self {
            Symbol::Pair => 12,
            Symbol::Triple => 15,
        }
    }

    /// Symbols of the alphabet: `16^2` or `16^3`; the first nibble is the low one.
    #[inline(always)]
    pub const fn alphabet(self) -> usize {
        match self {
            Symbol::Pair => 256,
            Symbol::Triple => 4096,
        }
    }

    /// `(row, column offset)` within a group of nibble `n` of lookup `k` (0 or 1).
    #[inline(always)]
    pub const fn nibble(self, k: usize, n: usize) -> (usize, usize) {
        match self {
            Symbol::Pair => (k, n),
            Symbol::Triple => (n, k),
        }
    }
}

/// Blocks of a coded matrix.
///
/// A lane's groups come in the order: row group, then column pair (over all rounds). The last row
/// group may reach past the matrix; what its padding nibbles decode to has no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of the matrix.
    pub rows: usize,
    /// Its columns.
    pub folds: Folds,
    /// What a lookup yields.
    pub symbol: Symbol,
    /// Blocks of rows.
    pub blocks: usize,
}

/// Nibbles of a block, roughly, when [`Blocks::new`] chooses: 48 rows of 2,048. Of matrices with a single
/// segment half as many: such are the down matrices, of which a launch has half as many as of gate and
/// up, and a job is a latency that it takes many to hide.
pub const BLOCK_NIBBLES: usize = 98_304;

impl Blocks {
    /// Blocks of about [`BLOCK_NIBBLES`] nibbles each; `None` for no rows or unsuitable columns.
    pub const fn new(rows: usize, cols: usize, symbol: Symbol) -> Option<Self> {
        let Some(folds) = Folds::new(cols) else {
            return None;
        };
        let nibbles = rows * folds.seg_cols();
        let block = Self::default_nibbles(&folds);
        let blocks = (nibbles + block / 2) / block;
        Self::with_blocks(rows, folds, symbol, if blocks == 0 { 1 } else { blocks })
    }

    /// Nibbles of a block where nothing else is asked for, see [`BLOCK_NIBBLES`].
    pub const fn default_nibbles(folds: &Folds) -> usize {
        if folds.segs() == 1 {
            BLOCK_NIBBLES / 2
        } else {
            BLOCK_NIBBLES
        }
    }

    /// The given number of blocks, 1 to the number of row groups.
    pub const fn with_blocks(
        rows: usize,
        folds: Folds,
        symbol: Symbol,
        blocks: usize,
    ) -> Option<Self> {
        if rows == 0 || blocks == 0 || blocks > rows.div_ceil(symbol.height()) {
            return None;
        }
        Some(Self {
            rows,
            folds,
            symbol,
            blocks,
        })
    }

    /// Row groups of the matrix.
    #[inline(always)]
    pub const fn row_groups(&self) -> usize {
        self.rows.div_ceil(self.symbol.height())
    }

    /// First row group of `block`; that of `blocks` is the number of row groups.
    #[inline(always)]
    pub const fn first_row_group(&self, block: usize) -> usize {
        block * self.row_groups() / self.blocks
    }

    /// Jobs of the matrix: (block, segment), number `block * segs + seg`.
    #[inline(always)]
    pub const fn jobs(&self) -> usize {
        self.blocks * self.folds.segs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nibble_is_dealt_once() {
        for (rows, cols) in [
            (1, 64),
            (2, 128),
            (7, 192),
            (128, 256),
            (5, 1536),
            (4, 6144),
        ] {
            for symbol in [Symbol::Pair, Symbol::Triple] {
                let b = Blocks::new(rows, cols, symbol).unwrap();
                let padded = b.row_groups() * symbol.height();
                let mut seen = vec![0u8; padded * cols];
                for block in 0..b.blocks {
                    for t in b.first_row_group(block)..b.first_row_group(block + 1) {
                        for seg in 0..b.folds.segs() {
                            for lane in 0..LANES {
                                for pair in 0..b.folds.pairs() {
                                    let col = b.folds.column(seg, lane, pair);
                                    for k in 0..2 {
                                        for n in 0..symbol.alphabet().ilog2() as usize / 4 {
                                            let (r, c) = symbol.nibble(k, n);
                                            seen[(t * symbol.height() + r) * cols + col + c] += 1;
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
                assert!(seen.iter().all(|n| *n == 1), "{rows}x{cols} {symbol:?}");
            }
        }
    }

    #[test]
    fn folds_of_known_widths() {
        let f = |c| {
            let f = Folds::new(c).unwrap();
            (f.fold, f.rounds, f.segs(), f.lane_cols())
        };
        assert_eq!(f(6144), (2048, 1, 3, 64));
        assert_eq!(f(2048), (2048, 1, 1, 64));
        assert_eq!(f(1536), (512, 3, 1, 16));
        assert_eq!(f(256), (256, 1, 1, 8));
        assert_eq!(f(64), (64, 1, 1, 2));
        assert_eq!(f(192), (64, 3, 1, 2));
        assert_eq!(Folds::new(100), None);
        assert_eq!(Folds::new(0), None);
        assert_eq!(Folds::new(8256), None);
    }
}
