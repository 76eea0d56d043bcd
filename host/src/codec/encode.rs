//! The encoder.

use gpu::layout::{Blocks, LANES, STATES, Symbol};

use super::{CodecError, STREAM_ALIGN, Table};

/// A coded matrix: what an archive stores of it, scales apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Its blocks.
    pub blocks: Blocks,
    /// Start of each job's bytes in `stream`, and the end of the last, in 16-byte units.
    pub offsets: Vec<u32>,
    /// The jobs' bytes.
    pub stream: Vec<u8>,
}

/// Codes a packed `[blocks.rows, blocks.folds.cols]` matrix (even column in the low nibble).
///
/// Fails with [`CodecError::NoFrequency`] where the table cannot code a symbol that occurs.
pub fn encode(packed: &[u8], blocks: &Blocks, table: &Table) -> Result<Encoded, CodecError> {
    let width = blocks.folds.cols / 2;
    if packed.len() != blocks.rows * width {
        return Err(CodecError::Output {
            expected: blocks.rows * width,
            found: packed.len(),
        });
    }
    if table.symbol() != blocks.symbol {
        return Err(CodecError::TableSymbol {
            expected: blocks.symbol,
            found: table.symbol(),
        });
    }
    let mut offsets = Vec::with_capacity(blocks.jobs() + 1);
    let mut stream = Vec::with_capacity(packed.len());
    offsets.push(0);
    for block in 0..blocks.blocks {
        for seg in 0..blocks.folds.segs() {
            encode_job(packed, blocks, table, block, seg, &mut stream)?;
            let end = u32::try_from(stream.len() / STREAM_ALIGN);
            offsets.push(end.map_err(|_| CodecError::TooLong)?);
        }
    }
    Ok(Encoded {
        blocks: *blocks,
        offsets,
        stream,
    })
}

/// One lane's words, in the decoder's order, and where it takes them.
struct Lane {
    states: [u32; STATES],
    words: Vec<u32>,
    /// 16-bit words taken in each group: 0, 1 or 2.
    taken: Vec<u8>,
}

fn encode_job(
    packed: &[u8],
    blocks: &Blocks,
    table: &Table,
    block: usize,
    seg: usize,
    stream: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let mut symbols = Vec::new();
    let mut lanes = Vec::with_capacity(LANES);
    for lane in 0..LANES {
        symbols.clear();
        lane_symbols(packed, blocks, table, block, seg, lane, &mut symbols);
        lanes.push(encode_lane(&symbols, table)?);
    }
    let groups = lanes[0].taken.len();
    for k in 0..STATES {
        for lane in &lanes {
            stream.extend(lane.states[k].to_le_bytes());
        }
    }
    for i in 0..2 {
        for lane in &lanes {
            stream.extend(lane.words.get(i).copied().unwrap_or(0).to_le_bytes());
        }
    }
    // What comes after the last word that a lane really has is cut.
    let mut end = stream.len();
    let mut counters = [0usize; LANES];
    for group in 0..groups {
        for (lane, c) in lanes.iter().zip(&mut counters) {
            let before = *c / 2;
            *c += usize::from(lane.taken[group]);
            if *c / 2 != before {
                let word = lane.words.get(*c / 2 + 1);
                stream.extend(word.copied().unwrap_or(0).to_le_bytes());
                if word.is_some() {
                    end = stream.len();
                }
            }
        }
    }
    stream.truncate(end);
    stream.resize(stream.len().next_multiple_of(STREAM_ALIGN), 0);
    Ok(())
}

/// Symbols of a lane in the decoder's order, two a group.
fn lane_symbols(
    packed: &[u8],
    blocks: &Blocks,
    table: &Table,
    block: usize,
    seg: usize,
    lane: usize,
    symbols: &mut Vec<u16>,
) {
    let width = blocks.folds.cols / 2;
    let pairs = blocks.folds.pairs();
    for t in blocks.first_row_group(block)..blocks.first_row_group(block + 1) {
        let first = t * blocks.symbol.height();
        let known = blocks.symbol.height().min(blocks.rows - first);
        for pair in 0..pairs {
            let at = first * width + blocks.folds.column(seg, lane, pair) / 2;
            match blocks.symbol {
                Symbol::Pair => {
                    symbols.push(u16::from(packed[at]));
                    symbols.push(if known == 2 {
                        u16::from(packed[at + width])
                    } else {
                        table.fill(0, 0)
                    });
                }
                Symbol::Triple => {
                    let (mut even, mut odd) = (0, 0);
                    for row in 0..known {
                        let byte = u16::from(packed[at + row * width]);
                        even |= (byte & 15) << (4 * row);
                        odd |= (byte >> 4) << (4 * row);
                    }
                    for value in [even, odd] {
                        symbols.push(if known == 3 {
                            value
                        } else {
                            table.fill(known, value)
                        });
                    }
                }
            }
        }
    }
}

/// Backward from the final states `M`; the mirror image of the decoder's step.
fn encode_lane(symbols: &[u16], table: &Table) -> Result<Lane, CodecError> {
    let bits = table.symbol().table_bits();
    let mut states = [1u32 << bits; STATES];
    let mut halves: Vec<u16> = Vec::with_capacity(symbols.len());
    let mut taken = vec![0u8; symbols.len() / 2];
    for (i, value) in symbols.iter().enumerate().rev() {
        let (frequency, first) = table.range(*value);
        if frequency == 0 {
            return Err(CodecError::NoFrequency { value: *value });
        }
        let state = &mut states[i % STATES];
        if *state >= frequency << 16 {
            halves.push(*state as u16);
            taken[i / 2] += 1;
            *state >>= 16;
        }
        *state = ((*state / frequency) << bits) + *state % frequency + first;
    }
    halves.reverse();
    let words = halves
        .chunks(2)
        .map(|w| u32::from(w[0]) << 16 | w.get(1).map_or(0, |w| u32::from(*w)))
        .collect();
    Ok(Lane {
        states,
        words,
        taken,
    })
}
