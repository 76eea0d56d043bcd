//! plane3 on the CPU: encoder, plain decoder, fast decoder. The layout is [`gpu::plane3`].
//!
//! A job is decoded to a tile of its rows side by side (position `p` is nibble `p`), lists are
//! applied there, and rows that the matrix has go to their places.

use std::ops::Range;

use gpu::layout::LANES;
use gpu::plane3::{
    Layout, OFFSET, PADDING, PLANE_BYTES, PLANE_UNITS, POSITIONS, SKIP, STEP_ROWS, STEPS, STRIP,
    UNIT, WARP_ROWS, code, fourth, in_order, is_high, is_low, pack_row, plane_word,
};

use super::{Arm, CodecError, Offsets};

/// A job's nibbles, packed.
type Tile = [u8; POSITIONS / 2];

/// What is wrong with a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListFault {
    /// No entry on the position that ends it, or something behind that entry.
    #[error("has no end: position {found} where only {POSITIONS} or 0 bytes may follow")]
    End {
        /// Where it got to.
        found: usize,
    },
    /// An entry past the job.
    #[error("names position {position}, the job ends at {POSITIONS}")]
    Past {
        /// The position.
        position: usize,
    },
    /// A nibble that is no exception of this list's kind, or twice one.
    #[error("names position {position}, whose nibble is {nibble} by its code")]
    Code {
        /// The position.
        position: usize,
        /// Its nibble before the entry.
        nibble: u8,
    },
}

/// A coded matrix: what an archive stores of it, scales apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// How it is cut into jobs.
    pub layout: Layout,
    /// [`Layout::header_words`].
    pub headers: Vec<u32>,
    /// The jobs' bytes.
    pub stream: Vec<u8>,
}

impl Encoded {
    /// The matrix, to decode.
    pub fn view(&self) -> Result<Coded<'_>, CodecError> {
        Coded::check(Coded {
            layout: self.layout,
            headers: Offsets::Words(&self.headers),
            stream: &self.stream,
        })
    }

    /// Bytes of headers and stream.
    pub fn bytes(&self) -> usize {
        4 * self.headers.len() + self.stream.len()
    }
}

/// Codes a packed `[layout.rows, layout.cols]` matrix (even column in the low nibble).
pub fn encode(packed: &[u8], layout: &Layout) -> Result<Encoded, CodecError> {
    let expected = layout.rows * layout.cols / 2;
    if packed.len() != expected {
        return Err(CodecError::Output {
            expected,
            found: packed.len(),
        });
    }
    let mut headers = Vec::with_capacity(layout.header_words());
    let mut stream = Vec::with_capacity(packed.len() * 27 / 32);
    let unit = |bytes: usize| u32::try_from(bytes / UNIT).map_err(|_| CodecError::TooLong);
    let mut nibbles = vec![8; POSITIONS];
    for block in 0..layout.blocks() {
        for seg in 0..layout.segs() {
            nibbles.fill(8);
            let first = block * layout.block_rows();
            let rows = layout.block_rows().min(layout.rows - first);
            let width = layout.seg_cols();
            for (row, nibbles) in nibbles.chunks_exact_mut(width).take(rows).enumerate() {
                let at = ((first + row) * layout.cols + seg * width) / 2;
                for (pair, byte) in nibbles.chunks_exact_mut(2).zip(&packed[at..]) {
                    pair[0] = byte & 15;
                    pair[1] = byte >> 4;
                }
            }
            headers.push(unit(stream.len())?);
            encode_planes(&nibbles, &mut stream);
            let n = encode_list(&nibbles, is_low, true, &mut stream);
            let p = encode_list(&nibbles, is_high, false, &mut stream);
            // At most 2,049 each.
            headers.push((n / UNIT) as u32 | ((p / UNIT) as u32) << 16);
        }
    }
    headers.extend([unit(stream.len())?, 0]);
    Ok(Encoded {
        layout: *layout,
        headers,
        stream,
    })
}

fn encode_planes(nibbles: &[u8], stream: &mut Vec<u8>) {
    let mut words = [0u32; PLANE_BYTES / 4];
    for (i, strip) in nibbles.chunks_exact(STRIP).enumerate() {
        let (warp_row, lane) = (i / LANES, i % LANES);
        let codes: [u8; STRIP] = std::array::from_fn(|k| code(strip[k]));
        for (k, word) in pack_row(&codes).into_iter().enumerate() {
            let w = warp_row % STEP_ROWS * 3 + k;
            words[plane_word(warp_row / STEP_ROWS, w / 4, lane) + w % 4] = word;
        }
    }
    stream.extend(words.iter().flat_map(|w| w.to_le_bytes()));
}

/// Appends a list; its bytes.
fn encode_list(nibbles: &[u8], listed: fn(u8) -> bool, ends: bool, stream: &mut Vec<u8>) -> usize {
    let start = stream.len();
    let mut last = 0;
    let mut put = |position: usize| {
        let mut gap = position - last;
        while gap >= usize::from(SKIP) {
            stream.push(SKIP);
            gap -= usize::from(SKIP);
        }
        stream.push(gap as u8);
        last = position;
    };
    for (position, nibble) in nibbles.iter().enumerate() {
        if listed(*nibble) {
            put(position);
        }
    }
    if ends {
        put(POSITIONS);
    }
    let bytes = (stream.len() - start).next_multiple_of(UNIT);
    stream.resize(start + bytes, if ends { 0 } else { SKIP });
    bytes
}

/// A coded matrix to decode from. Construction checks the headers.
#[derive(Clone, Copy, Debug)]
pub struct Coded<'a> {
    layout: Layout,
    headers: Offsets<'a>,
    stream: &'a [u8],
}

impl<'a> Coded<'a> {
    /// From the bytes of a record: `headers` is [`Layout::header_words`] little-endian u32.
    pub fn new(layout: Layout, headers: &'a [u8], stream: &'a [u8]) -> Result<Self, CodecError> {
        Self::check(Coded {
            layout,
            headers: Offsets::Bytes(headers),
            stream,
        })
    }

    /// Start of a job and the lengths of its lists, units.
    fn header(&self, job: usize) -> (usize, usize, usize) {
        let lists = self.headers.get(2 * job + 1);
        (self.headers.get(2 * job), lists & 0xffff, lists >> 16)
    }

    fn check(self) -> Result<Self, CodecError> {
        let jobs = self.layout.jobs();
        let wrong = |index: usize, expected: String, found: usize| CodecError::Offset {
            index,
            expected,
            found: found as u64,
        };
        if self.headers.len() != self.layout.header_words() {
            return Err(wrong(
                2 * jobs,
                format!("one of {} entries", self.layout.header_words()),
                self.headers.len(),
            ));
        }
        let mut end = 0;
        for job in 0..jobs {
            let (start, n, p) = self.header(job);
            if start != end {
                return Err(wrong(2 * job, end.to_string(), start));
            }
            if n == 0 {
                let found = self.headers.get(2 * job + 1);
                return Err(wrong(2 * job + 1, "a list N of at least 1".into(), found));
            }
            end = start + PLANE_UNITS + n + p;
        }
        if self.headers.get(2 * jobs) != end {
            return Err(wrong(2 * jobs, end.to_string(), self.headers.get(2 * jobs)));
        }
        if self.headers.get(2 * jobs + 1) != 0 {
            let found = self.headers.get(2 * jobs + 1);
            return Err(wrong(2 * jobs + 1, "0".into(), found));
        }
        if self.stream.len() != UNIT * end {
            let expected = format!("{} for a stream of {} bytes", end, UNIT * end);
            return Err(wrong(2 * jobs, expected, self.stream.len() / UNIT));
        }
        Ok(self)
    }

    /// How the matrix is cut into jobs.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of a packed row.
    pub fn row_bytes(&self) -> usize {
        self.layout.cols / 2
    }

    /// Rows of a block.
    pub fn block_rows(&self, block: usize) -> Range<usize> {
        let row = |b: usize| (b * self.layout.block_rows()).min(self.layout.rows);
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
        for seg in 0..self.layout.segs() {
            let skip = seg * self.layout.seg_cols() / 2;
            self.job(arm, block, seg, skip, out, stride)?;
        }
        Ok(())
    }

    /// Decodes the matrix into `rows * cols / 2` packed bytes.
    pub fn decode(&self, arm: Arm, out: &mut [u8]) -> Result<(), CodecError> {
        let stride = self.row_bytes();
        let expected = self.layout.rows * stride;
        if out.len() != expected {
            return Err(CodecError::Output {
                expected,
                found: out.len(),
            });
        }
        for block in 0..self.layout.blocks() {
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
        assert!(block < self.layout.blocks() && segment < self.layout.segs());
        let (start, n, p) = self.header(block * self.layout.segs() + segment);
        let bytes = &self.stream[UNIT * start..UNIT * (start + PLANE_UNITS + n + p)];
        let (planes, lists) = bytes.split_at(PLANE_BYTES);
        let (low, high) = lists.split_at(UNIT * n);
        let mut tile = [0; POSITIONS / 2];
        let lists = match arm {
            Arm::Reference => {
                plain_planes(planes, &mut tile);
                apply_list(low, true, &mut tile)
                    .map_err(|e| ('N', e))
                    .and_then(|()| apply_list(high, false, &mut tile).map_err(|e| ('P', e)))
            }
            #[cfg(target_arch = "x86_64")]
            Arm::Avx2 | Arm::Avx512 if Arm::Avx2.available() => {
                // SAFETY: just asked.
                unsafe { avx2(planes, low, high, &mut tile) }
            }
            _ => fast(planes, low, high, &mut tile),
        };
        lists.map_err(|(list, fault)| CodecError::List {
            block,
            segment,
            list,
            fault,
        })?;
        let width = self.layout.seg_cols() / 2;
        let rows = self.block_rows(block).len();
        for (row, bytes) in tile.chunks_exact(width).take(rows).enumerate() {
            out[row * stride + skip..][..width].copy_from_slice(bytes);
        }
        Ok(())
    }
}

/// Nibbles of the planes, one by one.
fn plain_planes(planes: &[u8], tile: &mut Tile) {
    let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|k| planes[4 * i + k]));
    for position in 0..POSITIONS {
        let (warp_row, lane, column) = (
            position / (LANES * STRIP),
            position / STRIP % LANES,
            position % STRIP,
        );
        let of_row = |k: usize| {
            let w = warp_row % STEP_ROWS * 3 + k;
            word(plane_word(warp_row / STEP_ROWS, w / 4, lane) + w % 4)
        };
        let shift = 8 * (column % 4) + 4 * (column / 4 % 2);
        let code = match column / 8 {
            3 => (0..3).fold(0, |c, k| c | (of_row(k) >> (shift + 3) & 1) << k),
            k => of_row(k) >> shift & 7,
        };
        tile[position / 2] |= (code as u8 + OFFSET) << (4 * (position % 2));
    }
}

/// Turns the nibbles of a list.
fn apply_list(list: &[u8], low: bool, tile: &mut Tile) -> Result<(), ListFault> {
    let mut position = 0;
    for (i, gap) in list.iter().enumerate() {
        position += usize::from(*gap);
        if *gap == SKIP {
            continue;
        }
        if position >= POSITIONS {
            if !low {
                return Err(ListFault::Past { position });
            }
            let rest = &list[i + 1..];
            if position > POSITIONS || rest.iter().any(|b| *b != 0) {
                return Err(ListFault::End { found: position });
            }
            return Ok(());
        }
        let shift = 4 * (position % 2);
        let nibble = tile[position / 2] >> shift & 15;
        let expected = if low { 8..=12 } else { 5..=7 };
        if !expected.contains(&nibble) {
            return Err(ListFault::Code { position, nibble });
        }
        tile[position / 2] ^= 8 << shift;
    }
    if low {
        return Err(ListFault::End { found: position });
    }
    Ok(())
}

/// Both, eight nibbles at a time.
#[inline(always)]
fn fast(planes: &[u8], low: &[u8], high: &[u8], tile: &mut Tile) -> Result<(), (char, ListFault)> {
    fast_planes(planes, tile);
    apply_list(low, true, tile).map_err(|e| ('N', e))?;
    apply_list(high, false, tile).map_err(|e| ('P', e))
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(
    planes: &[u8],
    low: &[u8],
    high: &[u8],
    tile: &mut Tile,
) -> Result<(), (char, ListFault)> {
    fast(planes, low, high, tile)
}

/// Nibbles of the planes, a lane's words of a step at a time.
#[inline(always)]
fn fast_planes(planes: &[u8], tile: &mut Tile) {
    let quads = planes.as_chunks::<16>().0;
    for step in 0..STEPS {
        for lane in 0..LANES {
            let mut words = [0u32; 12];
            for (q, words) in words.chunks_exact_mut(4).enumerate() {
                let bytes = &quads[plane_word(step, q, lane) / 4];
                for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(*bytes);
                }
            }
            let mut rows = [0u32; 16];
            for (row, w) in rows.chunks_exact_mut(4).zip(words.chunks_exact(3)) {
                row.copy_from_slice(&[w[0], w[1], w[2], fourth(w[0], w[1], w[2])]);
            }
            for word in &mut rows {
                *word = in_order((*word & 0x7777_7777) + 0x5555_5555);
            }
            for (r, row) in rows.chunks_exact(4).enumerate() {
                let at = ((step * STEP_ROWS + r) * LANES + lane) * STRIP / 2;
                for (to, word) in tile[at..at + 16].chunks_exact_mut(4).zip(row) {
                    to.copy_from_slice(&word.to_le_bytes());
                }
            }
        }
    }
}

const _: () = assert!(PADDING == code(8) && STEPS * STEP_ROWS == WARP_ROWS);
