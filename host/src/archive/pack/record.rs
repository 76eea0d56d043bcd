//! The second pass of packing: an expert's record.

use gpu::layout::{Blocks, Folds};
use gpu::plane3::Layout;

use crate::archive::format::{ALIGN, Digest, MATRIX, NO_TABLE, class, short, u32_at};
use crate::codec::{Codec, Table, encode, encode_scales, plane3};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix};

use super::{ClassSummary, PackOptions};

/// A coded expert on its way to the file.
pub struct Coded {
    pub bytes: Vec<u8>,
    pub checksum: Digest,
}

/// A coded matrix's parts, scales apart.
struct Parts {
    codec: Codec,
    blocks: usize,
    /// [`NO_TABLE`] unless rANS.
    table: u16,
    offsets: Vec<u32>,
    stream: Vec<u8>,
}

/// Codes a matrix; `None` where that is not possible.
fn code_matrix(
    raw: &RawMatrix<'_>,
    (rows, cols): (usize, usize),
    codec: Codec,
    options: &PackOptions,
    table: Option<(u16, &Table)>,
) -> Option<Parts> {
    match codec {
        Codec::Raw => None,
        Codec::Plane3 => {
            let layout = Layout::new(rows, cols)?;
            let coded = plane3::encode(&raw.packed, &layout).ok()?;
            Some(Parts {
                codec,
                blocks: layout.blocks(),
                table: NO_TABLE,
                offsets: coded.headers,
                stream: coded.stream,
            })
        }
        Codec::Rans(symbol) => {
            let (id, table) = table?;
            let blocks = match options.block_nibbles {
                None => Blocks::new(rows, cols, symbol)?,
                Some(unit) => {
                    let folds = Folds::new(cols)?;
                    let unit = unit.max(1);
                    let n = (rows * folds.seg_cols() + unit / 2) / unit;
                    let n = n.clamp(1, rows.div_ceil(symbol.height()));
                    Blocks::with_blocks(rows, folds, symbol, n)?
                }
            };
            let coded = encode(&raw.packed, &blocks, table).ok()?;
            Some(Parts {
                codec,
                blocks: blocks.blocks,
                table: id,
                offsets: coded.offsets,
                stream: coded.stream,
            })
        }
    }
}

/// An expert's record. `codec` is the expert's; `table` gives those of its layer.
pub fn code_expert<'a>(
    shape: &ExpertShape,
    raw: &[RawMatrix<'_>; 3],
    codec: Codec,
    options: &PackOptions,
    table: impl Fn(MatrixKind) -> Option<(u16, &'a Table)>,
) -> Coded {
    let mut bytes = vec![0; 3 * MATRIX];
    for (kind, m) in MatrixKind::ALL.into_iter().zip(raw) {
        let (rows, cols) = shape.dims(kind);
        let coded = code_matrix(m, (rows, cols), codec, options, table(kind));
        let worth = |p: &Parts| {
            let size = p.stream.len() + 4 * p.offsets.len();
            size as f64 <= (1.0 - options.least_saving) * m.packed.len() as f64
        };
        let coded = coded.filter(worth);
        let mut part = |data: &[u8]| {
            let at = bytes.len();
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
            at as u32
        };
        let (codec, blocks, table, offsets_at, stream_at, stream_len) = match &coded {
            None => (Codec::Raw, 0, NO_TABLE, 0, part(&m.packed), m.packed.len()),
            Some(p) => {
                let offsets: Vec<u8> = p.offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
                let offsets_at = part(&offsets);
                let at = part(&p.stream);
                (p.codec, p.blocks, p.table, offsets_at, at, p.stream.len())
            }
        };
        let (scale_format, scales) = encode_scales(&m.scales);
        let scales_at = part(&scales);
        let head = &mut bytes[MATRIX * kind as usize..][..MATRIX];
        head[0] = codec.number();
        head[1] = scale_format as u8;
        head[2..4].copy_from_slice(&table.to_le_bytes());
        let words = [
            (4, blocks as u32),
            (8, rows as u32),
            (12, cols as u32),
            (16, stream_at),
            (20, stream_len as u32),
            (24, offsets_at),
            (28, scales_at),
        ];
        for (at, word) in words {
            head[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
    let mut h = blake3::Hasher::new();
    h.update(&bytes);
    Coded {
        checksum: short(&h),
        bytes,
    }
}

/// Adds a record that packing made to the sums of the classes. `entropy` is that of its matrices.
pub fn tally(
    shape: &ExpertShape,
    record: &[u8],
    entropy: &[f64; 3],
    classes: &mut [ClassSummary; 2],
) {
    for kind in MatrixKind::ALL {
        let head = &record[MATRIX * kind as usize..][..MATRIX];
        let (rows, cols) = shape.dims(kind);
        let scales = shape.scales.count(rows, cols) as u64;
        let codec = Codec::from_number(head[0]).unwrap_or(Codec::Raw);
        let (stream_at, offsets_at, scales_at) =
            (u32_at(head, 16), u32_at(head, 24), u32_at(head, 28));
        let from = match codec {
            Codec::Raw => stream_at,
            _ => offsets_at,
        };
        let c = &mut classes[class(kind)];
        c.matrices += 1;
        match codec {
            Codec::Raw => c.raw += 1,
            Codec::Rans(_) => c.rans += 1,
            Codec::Plane3 => c.plane3 += 1,
        }
        c.packed_bytes += (rows * cols / 2) as u64;
        c.scale_bytes += 4 * scales;
        c.coded_bytes += u64::from(scales_at.saturating_sub(from));
        c.coded_scale_bytes += scales * if head[1] == 0 { 4 } else { 2 };
        c.entropy_bytes += entropy[kind as usize];
    }
}
