//! The codecs: rANS and plane3 streams of int4 matrices, coded and decoded on the CPU.
//!
//! Geometry is [`gpu::layout`], the step [`gpu::rans`], the bytes are specified in
//! `docs/format.md`. Decoders come in several [`Arm`]s that give the same bytes and the same
//! errors: a plain reference, the same without its branches for any processor, and one algorithm over
//! vectors of 32 lanes (AVX2, AVX-512).
//!
//! Bytes may be hostile: whatever they hold, decoding ends with the output's bytes or a
//! [`CodecError`]. Most damage shows as a final state other than `M`; checksums of records
//! ([`crate::archive`]) catch the rest.

mod encode;
pub mod plane3;
mod reference;
mod scales;
mod stream;
mod table;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod portable;

use std::ops::Range;
use std::sync::OnceLock;

use gpu::layout::{Blocks, Folds, JOB_WORDS, LANES, STATES, Symbol};

pub use encode::{Encoded, encode};
pub use scales::{ScaleFormat, decode_scales, encode_scales};
pub use stream::Stream;
pub use table::{Table, count_symbols, entropy, nibble_counts, quantise};

/// Jobs start at multiples of this in a stream.
pub const STREAM_ALIGN: usize = 16;

/// Bytes that every job has: states, first and second words.
pub const JOB_BYTES: usize = 4 * JOB_WORDS as usize;

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// Packed int4, verbatim.
    Raw,
    /// rANS over pairs or triples.
    Rans(Symbol),
    /// A plane of three bits and a sparse fourth ([`gpu::plane3`]).
    Plane3,
}

impl Codec {
    /// Every codec; their numbers in a file are their places here.
    pub const ALL: [Codec; 4] = [
        Codec::Raw,
        Codec::Rans(Symbol::Pair),
        Codec::Rans(Symbol::Triple),
        Codec::Plane3,
    ];

    /// Its number in a file.
    pub fn number(self) -> u8 {
        match self {
            Codec::Raw => 0,
            Codec::Rans(Symbol::Pair) => 1,
            Codec::Rans(Symbol::Triple) => 2,
            Codec::Plane3 => 3,
        }
    }

    /// The codec of a number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// For people and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Codec::Raw => "raw",
            Codec::Rans(Symbol::Pair) => "rans-pair",
            Codec::Rans(Symbol::Triple) => "rans-triple",
            Codec::Plane3 => "plane3",
        }
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a matrix could not be coded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// A table with too few or too many symbols.
    #[error("table has {found} frequencies where its alphabet has {expected}")]
    TableLength {
        /// Size of the alphabet.
        expected: usize,
        /// Frequencies there are.
        found: usize,
    },
    /// A table whose frequencies do not sum to its slots.
    #[error("table's frequencies sum to {found}, expected {expected}")]
    TableSum {
        /// Slots.
        expected: u32,
        /// The sum.
        found: u32,
    },
    /// A table for other symbols than the stream's.
    #[error("table is over {found:?} symbols where the stream is over {expected:?}")]
    TableSymbol {
        /// The stream's symbols.
        expected: Symbol,
        /// The table's.
        found: Symbol,
    },
    /// A symbol that the table cannot code.
    #[error("symbol {value:#x} has frequency 0 in its table")]
    NoFrequency {
        /// The symbol.
        value: u16,
    },
    /// More than 64 GiB of stream.
    #[error("stream is too long for 32-bit offsets")]
    TooLong,
    /// A buffer or packed matrix of the wrong size.
    #[error("packed rows take {found} bytes, expected {expected}")]
    Output {
        /// Bytes that the geometry asks for.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// Block offsets that are not ascending, or do not fill the stream.
    #[error("block offset {index} is {found}, expected {expected}")]
    Offset {
        /// Which entry.
        index: usize,
        /// What it may be.
        expected: String,
        /// What it is.
        found: u64,
    },
    /// An initial state outside `[M, M << 16)`.
    #[error("block {block}, segment {segment}, lane {lane}: initial state {state:#x} out of range")]
    InitialState {
        /// Block of rows.
        block: usize,
        /// Segment of columns.
        segment: usize,
        /// Lane.
        lane: usize,
        /// The state.
        state: u32,
    },
    /// A list of plane3 that is none: the stream is corrupt.
    #[error("block {block}, segment {segment}: list {list} {fault}")]
    List {
        /// Block of rows.
        block: usize,
        /// Segment of columns.
        segment: usize,
        /// N or P.
        list: char,
        /// What is wrong.
        fault: plane3::ListFault,
    },
    /// A final state other than `M`: the stream is corrupt.
    #[error(
        "block {block}, segment {segment}, lane {lane}: final state {state:#x}, expected {expected:#x}"
    )]
    FinalState {
        /// Block of rows.
        block: usize,
        /// Segment of columns.
        segment: usize,
        /// First lane that is wrong.
        lane: usize,
        /// Its state.
        state: u32,
        /// `M`.
        expected: u32,
    },
}

/// A decoder. All give the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arm {
    /// Plain and slow, to compare with.
    Reference,
    /// Any processor.
    Portable,
    /// x86-64 with AVX2.
    Avx2,
    /// x86-64 with AVX-512 F and BW.
    Avx512,
}

impl Arm {
    /// Every arm, slowest first.
    pub const ALL: [Arm; 4] = [Arm::Reference, Arm::Portable, Arm::Avx2, Arm::Avx512];

    /// Whether this processor runs it.
    pub fn available(self) -> bool {
        match self {
            Arm::Reference | Arm::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Arm::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Arm::Avx512 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Arm::Avx2 | Arm::Avx512 => false,
        }
    }

    /// The fastest that this processor runs.
    pub fn best() -> Self {
        static BEST: OnceLock<Arm> = OnceLock::new();
        *BEST.get_or_init(|| {
            let mut arms = Arm::ALL.into_iter().rev();
            arms.find(|a| a.available()).unwrap_or(Arm::Portable)
        })
    }

    /// For people and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Arm::Reference => "reference",
            Arm::Portable => "portable",
            Arm::Avx2 => "avx2",
            Arm::Avx512 => "avx512",
        }
    }
}

/// A job as decoders see it. `bytes` holds at least [`JOB_BYTES`], with states in range.
struct Job<'a> {
    symbol: Symbol,
    /// `2^table_bits` of them.
    entries: &'a [u32],
    folds: Folds,
    /// Row groups of the block.
    row_groups: usize,
    /// Rows of the block: the last row group may have fewer than its height.
    rows: usize,
    bytes: &'a [u8],
}

/// A final state that is not `M`.
struct JobError {
    lane: usize,
    state: u32,
}

/// The check after a job's last group: every lane's states are `low`, which is `M`.
fn final_states(states: &[[u32; LANES]; STATES], low: u32) -> Result<(), JobError> {
    for lane in 0..LANES {
        for states in states {
            if states[lane] != low {
                return Err(JobError {
                    lane,
                    state: states[lane],
                });
            }
        }
    }
    Ok(())
}

/// Block offsets, as little-endian bytes in a record or as numbers.
#[derive(Clone, Copy, Debug)]
enum Offsets<'a> {
    Bytes(&'a [u8]),
    Words(&'a [u32]),
}

impl Offsets<'_> {
    fn len(&self) -> usize {
        match self {
            Offsets::Bytes(b) => b.len() / 4,
            Offsets::Words(w) => w.len(),
        }
    }

    fn get(&self, i: usize) -> usize {
        match self {
            Offsets::Bytes(b) => {
                u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]) as usize
            }
            Offsets::Words(w) => w[i] as usize,
        }
    }
}

/// A coded matrix to decode from. Construction checks the offsets.
#[derive(Clone, Copy, Debug)]
pub struct Coded<'a> {
    blocks: Blocks,
    table: &'a Table,
    offsets: Offsets<'a>,
    stream: &'a [u8],
}

impl Encoded {
    /// The matrix, to decode with the table it was coded with.
    pub fn view<'a>(&'a self, table: &'a Table) -> Result<Coded<'a>, CodecError> {
        Coded::check(Coded {
            blocks: self.blocks,
            table,
            offsets: Offsets::Words(&self.offsets),
            stream: &self.stream,
        })
    }
}

impl<'a> Coded<'a> {
    /// From the bytes of a record: `offsets` is `jobs + 1` little-endian u32 in units of 16 bytes.
    pub fn new(
        blocks: Blocks,
        table: &'a Table,
        offsets: &'a [u8],
        stream: &'a [u8],
    ) -> Result<Self, CodecError> {
        Self::check(Coded {
            blocks,
            table,
            offsets: Offsets::Bytes(offsets),
            stream,
        })
    }

    fn check(self) -> Result<Self, CodecError> {
        if self.table.symbol() != self.blocks.symbol {
            return Err(CodecError::TableSymbol {
                expected: self.blocks.symbol,
                found: self.table.symbol(),
            });
        }
        let jobs = self.blocks.jobs();
        if self.offsets.len() != jobs + 1 {
            return Err(CodecError::Offset {
                index: jobs,
                expected: format!("one of {} entries", jobs + 1),
                found: self.offsets.len() as u64,
            });
        }
        let wrong = |index: usize, expected: String| CodecError::Offset {
            index,
            expected,
            found: self.offsets.get(index) as u64,
        };
        if self.offsets.get(0) != 0 {
            return Err(wrong(0, "0".into()));
        }
        for i in 0..jobs {
            let least = self.offsets.get(i) + JOB_BYTES / STREAM_ALIGN;
            if self.offsets.get(i + 1) < least {
                return Err(wrong(i + 1, format!("at least {least}")));
            }
        }
        let end = self.stream.len() / STREAM_ALIGN;
        if self.offsets.get(jobs) != end || !self.stream.len().is_multiple_of(STREAM_ALIGN) {
            return Err(wrong(jobs, end.to_string()));
        }
        Ok(self)
    }

    /// The matrix's blocks.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Its table.
    pub fn table(&self) -> &'a Table {
        self.table
    }

    /// Bytes of a packed row.
    pub fn row_bytes(&self) -> usize {
        self.blocks.folds.cols / 2
    }

    /// Rows of a block.
    pub fn block_rows(&self, block: usize) -> Range<usize> {
        let row = |b| {
            (self.blocks.first_row_group(b) * self.blocks.symbol.height()).min(self.blocks.rows)
        };
        row(block)..row(block + 1)
    }

    /// Decodes one (block, segment) job. `out` holds the block's rows, `stride` bytes apart, and
    /// gets the segment's columns from the start of each row on.
    ///
    /// # Panics
    /// If there is no such job or `out` is too short for it.
    pub fn decode_job(
        &self,
        arm: Arm,
        block: usize,
        segment: usize,
        out: &mut [u8],
        stride: usize,
    ) -> Result<(), CodecError> {
        self.job(arm, block, segment, 0, out, stride)
    }

    /// Decodes one block, all its columns, into `block_rows(block).len()` packed rows.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn decode_block(&self, arm: Arm, block: usize, out: &mut [u8]) -> Result<(), CodecError> {
        let stride = self.row_bytes();
        let expected = self.block_rows(block).len() * stride;
        if out.len() != expected {
            return Err(CodecError::Output {
                expected,
                found: out.len(),
            });
        }
        let seg_bytes = self.blocks.folds.seg_cols() / 2;
        for seg in 0..self.blocks.folds.segs() {
            self.job(arm, block, seg, seg * seg_bytes, out, stride)?;
        }
        Ok(())
    }

    /// Decodes the matrix into `rows * cols / 2` packed bytes.
    pub fn decode(&self, arm: Arm, out: &mut [u8]) -> Result<(), CodecError> {
        let stride = self.row_bytes();
        let expected = self.blocks.rows * stride;
        if out.len() != expected {
            return Err(CodecError::Output {
                expected,
                found: out.len(),
            });
        }
        for block in 0..self.blocks.blocks {
            let rows = self.block_rows(block);
            self.decode_block(arm, block, &mut out[rows.start * stride..rows.end * stride])?;
        }
        Ok(())
    }

    fn job(
        &self,
        arm: Arm,
        block: usize,
        segment: usize,
        skip: usize,
        out: &mut [u8],
        stride: usize,
    ) -> Result<(), CodecError> {
        assert!(block < self.blocks.blocks && segment < self.blocks.folds.segs());
        let rows = self.block_rows(block).len();
        let seg_bytes = self.blocks.folds.seg_cols() / 2;
        assert!(rows == 0 || out.len() >= (rows - 1) * stride + skip + seg_bytes);
        assert!(stride >= skip + seg_bytes);
        let at = block * self.blocks.folds.segs() + segment;
        let bytes = &self.stream
            [STREAM_ALIGN * self.offsets.get(at)..STREAM_ALIGN * self.offsets.get(at + 1)];
        let job = Job {
            symbol: self.blocks.symbol,
            entries: self.table.entries(),
            folds: self.blocks.folds,
            row_groups: self.blocks.first_row_group(block + 1) - self.blocks.first_row_group(block),
            rows,
            bytes,
        };
        let low = 1u32 << self.blocks.symbol.table_bits();
        let high = low << 16;
        let states = &bytes[..4 * STATES * LANES];
        for (i, state) in states.as_chunks::<4>().0.iter().enumerate() {
            let state = u32::from_le_bytes(*state);
            if !(low..high).contains(&state) {
                return Err(CodecError::InitialState {
                    block,
                    segment,
                    lane: i % LANES,
                    state,
                });
            }
        }
        // Decoders place columns from the segment's start.
        let out = &mut out[skip..];
        match arm {
            Arm::Reference => reference::decode(&job, out, stride),
            #[cfg(target_arch = "x86_64")]
            Arm::Avx2 if arm.available() => avx2::decode(&job, out, stride),
            #[cfg(target_arch = "x86_64")]
            Arm::Avx512 if arm.available() => avx512::decode(&job, out, stride),
            _ => portable::decode(&job, out, stride),
        }
        .map_err(|e| CodecError::FinalState {
            block,
            segment,
            lane: e.lane,
            state: e.state,
            expected: low,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: u64) -> impl FnMut() -> u64 {
        let mut x = seed;
        move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }
    }

    #[test]
    fn arms_give_back_what_was_coded() {
        let mut next = random(7);
        for (rows, cols) in [
            (1, 64),
            (5, 128),
            (33, 192),
            (47, 2048),
            (96, 1536),
            (10, 6144),
        ] {
            // Sum of two dice of eight faces: skewed, yet every nibble occurs.
            let mut nibble = || ((next() >> 61) + (next() >> 61)) as u8;
            let packed: Vec<u8> = (0..rows * cols / 2)
                .map(|_| nibble() | nibble() << 4)
                .collect();
            for symbol in [Symbol::Pair, Symbol::Triple] {
                let mut counts = vec![0; symbol.alphabet()];
                count_symbols(symbol, &packed, rows, cols, &mut counts);
                let table = Table::from_counts(symbol, &counts).unwrap();
                let blocks = Blocks::new(rows, cols, symbol).unwrap();
                let coded = encode(&packed, &blocks, &table).unwrap();
                let view = coded.view(&table).unwrap();
                for arm in Arm::ALL.into_iter().filter(|a| a.available()) {
                    let mut out = vec![0xaa; packed.len()];
                    view.decode(arm, &mut out).unwrap();
                    assert!(out == packed, "{arm:?} {rows}x{cols} {symbol:?}");
                }
            }
        }
    }
}
