//! A record: its header, its parts, and what they decode to.

use std::borrow::Cow;
use std::ops::Range;

use gpu::layout::{Blocks, Folds};
use gpu::plane3::{Layout, PLANE_BYTES};

use super::Archive;
use super::error::{ArchiveError, Check, DAMAGED, Place, hex};
use super::format::{self, ALIGN, Digest, MATRIX, NO_TABLE, class, get, u16_at, u32_at};
use crate::codec::{
    Arm, Codec, CodecError, Coded, JOB_BYTES, STREAM_ALIGN, ScaleFormat, Stream, Table,
    decode_scales, plane3,
};
use crate::expert::{MatrixKind, RawMatrix, ScaleKind};

/// A record whose checksum and structure have been checked.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    pub(super) archive: &'a Archive,
    /// Model layer.
    pub layer: u32,
    /// Expert.
    pub expert: usize,
    /// The whole record.
    pub bytes: &'a [u8],
    /// Gate, up, down.
    pub matrices: [CodedMatrix; 3],
}

/// A matrix of a record: what it is, and where in the record's bytes its parts are. All parts
/// start at multiples of 16.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodedMatrix {
    /// How it is stored.
    pub codec: Codec,
    /// How its scales are stored.
    pub scale_format: ScaleFormat,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Blocks, if rANS.
    pub blocks: Option<Blocks>,
    /// Number of its table, if rANS.
    pub table: Option<u16>,
    /// Where jobs start, u32: `jobs + 1` of rANS, two for each of plane3; empty if raw.
    pub offsets: Range<usize>,
    /// Coded stream, or packed int4 if raw.
    pub stream: Range<usize>,
    /// Scales.
    pub scales: Range<usize>,
}

impl Archive {
    /// A record, its checksum, structure, scales and padding checked. Its matrices' streams are
    /// checked by decoding them.
    pub fn record(&self, layer: u32, expert: usize) -> Result<Record<'_>, ArchiveError> {
        let (range, i) = self.span(layer, expert)?;
        let end = self.end_of(i) as usize;
        self.padded(layer, expert, &self.map[range.start..end], by_all)
    }

    /// A record of bytes that go on to where the next one begins.
    pub(super) fn padded<'a>(
        &'a self,
        layer: u32,
        expert: usize,
        bytes: &'a [u8],
        hash: fn(&[u8]) -> Digest,
    ) -> Result<Record<'a>, ArchiveError> {
        let (range, _) = self.span(layer, expert)?;
        let (bytes, padding) = bytes.split_at(range.len().min(bytes.len()));
        let record = self.hashed(layer, expert, bytes, hash)?;
        let c = self.check(Place::Record { layer, expert });
        c.zero("padding after the record", padding)?;
        Ok(record)
    }

    /// [`Archive::record`] of bytes that were read from the file in another way, without the padding
    /// behind them.
    pub fn record_in<'a>(
        &'a self,
        layer: u32,
        expert: usize,
        bytes: &'a [u8],
    ) -> Result<Record<'a>, ArchiveError> {
        self.hashed(layer, expert, bytes, by_all)
    }

    fn hashed<'a>(
        &'a self,
        layer: u32,
        expert: usize,
        bytes: &'a [u8],
        hash: fn(&[u8]) -> Digest,
    ) -> Result<Record<'a>, ArchiveError> {
        let (range, i) = self.span(layer, expert)?;
        let c = self.check(Place::Record { layer, expert });
        c.equal("length", range.len(), bytes.len())?;
        c.equal(
            "checksum",
            hex(&get::<16>(self.entry(i), 16)),
            hex(&hash(bytes)),
        )?;
        let tables = self.layer_tables[i / self.experts()];
        let mut at = 3 * MATRIX;
        let mut matrices = Vec::with_capacity(3);
        for (kind, head) in MatrixKind::ALL.into_iter().zip(bytes.chunks_exact(MATRIX)) {
            let c = self.check(Place::Matrix {
                layer,
                expert,
                kind,
            });
            let m = self.read_matrix(c, bytes, head, kind, tables[class(kind)], &mut at)?;
            matrices.push(m);
        }
        c.equal("length", bytes.len(), at)?;
        let Ok(matrices) = matrices.try_into() else {
            unreachable!("a record has three matrices")
        };
        Ok(Record {
            archive: self,
            layer,
            expert,
            bytes,
            matrices,
        })
    }

    /// Reads a matrix's header; its parts follow those of the matrix before it, which end at `at`.
    fn read_matrix(
        &self,
        c: Check<'_>,
        record: &[u8],
        head: &[u8],
        kind: MatrixKind,
        table: Option<u16>,
        at: &mut usize,
    ) -> Result<CodedMatrix, ArchiveError> {
        let Some(codec) = Codec::from_number(head[0]) else {
            return Err(c.invalid("codec", "0, 1, 2 or 3", head[0], DAMAGED));
        };
        let scale_format = match head[1] {
            0 => ScaleFormat::F32,
            1 => ScaleFormat::Amax16,
            other => return Err(c.invalid("scale format", "0 or 1", other, DAMAGED)),
        };
        let (rows, cols) = self.shape().dims(kind);
        c.equal("rows", rows as u32, u32_at(head, 8))?;
        c.equal("columns", cols as u32, u32_at(head, 12))?;
        // A matrix names its table: the one that its layer has for the class.
        let name = |id| match id {
            NO_TABLE => "none".into(),
            id => format!("table {id}"),
        };
        let wanted = match codec {
            Codec::Rans(_) => table.unwrap_or(NO_TABLE),
            Codec::Raw | Codec::Plane3 => NO_TABLE,
        };
        c.equal("table", name(wanted), name(u16_at(head, 2)))?;
        let n = u32_at(head, 4) as usize;
        let (blocks, table) = match codec {
            Codec::Raw => {
                c.equal("blocks", 0, n)?;
                (None, None)
            }
            Codec::Rans(symbol) => {
                let blocks = Folds::new(cols).and_then(|f| Blocks::with_blocks(rows, f, symbol, n));
                let Some(blocks) = blocks else {
                    return Err(c.invalid("blocks", "a number that suits the rows", n, DAMAGED));
                };
                let found = table.map(|t| self.table(t).symbol());
                c.that(
                    found == Some(symbol),
                    "codec",
                    match found {
                        Some(s) => format!("{}, as the table is", Codec::Rans(s)),
                        None => "one that needs no table, as the layer has none".into(),
                    },
                    codec,
                )?;
                (Some(blocks), table)
            }
            Codec::Plane3 => {
                c.that(
                    self.shape().scales == ScaleKind::Row,
                    "codec",
                    "one for scales of 64 columns",
                    codec,
                )?;
                let Some(layout) = Layout::new(rows, cols) else {
                    let expected = "one for these columns";
                    return Err(c.invalid("codec", expected, codec, DAMAGED));
                };
                c.equal("blocks", layout.blocks(), n)?;
                (None, None)
            }
        };

        // Each part must start where the one before it ends, rounded up to 16, and be whole.
        let part = |field, start: usize, len: usize| {
            let end = (start.checked_add(len)).filter(|end| *end <= record.len());
            let Some(end) = end else {
                return Err(c.invalid(
                    field,
                    format_args!("at most {} bytes", record.len().saturating_sub(start)),
                    len,
                    DAMAGED,
                ));
            };
            // The record's length is a multiple of 16.
            let padding = &record[end..end.next_multiple_of(ALIGN)];
            c.zero("padding within the record", padding)?;
            Ok(start..end)
        };
        let field = |at| u32_at(head, at) as usize;
        // Words of the block offsets, and the least length of the stream.
        let coded = match (blocks, Layout::new(rows, cols)) {
            (Some(b), _) => Some((b.jobs() + 1, b.jobs() * JOB_BYTES)),
            (None, Some(l)) if codec == Codec::Plane3 => {
                Some((l.header_words(), l.jobs() * PLANE_BYTES))
            }
            _ => None,
        };
        let (offsets, next) = match coded {
            None => {
                c.equal("offset of block offsets", 0, field(24))?;
                (0..0, *at)
            }
            Some((words, _)) => {
                c.equal("offset of block offsets", *at, field(24))?;
                let offsets = part("block offsets", *at, 4 * words)?;
                let next = offsets.end.next_multiple_of(ALIGN);
                (offsets, next)
            }
        };
        c.equal("offset of stream", next, field(16))?;
        match coded {
            None => c.equal("stream length", rows * cols / 2, field(20))?,
            Some((_, least)) => c.that(
                field(20).is_multiple_of(STREAM_ALIGN) && field(20) >= least,
                "stream length",
                format_args!("a multiple of {STREAM_ALIGN}, at least {least}"),
                field(20),
            )?,
        }
        // A frequency of at most 255 keeps any code above half the packed size; so nobody has more
        // than twice the file's size to allocate.
        c.that(
            field(20) >= rows * cols / 4,
            "stream length",
            format_args!("at least {} for {rows} rows of {cols}", rows * cols / 4),
            field(20),
        )?;
        let stream = part("stream length", next, field(20))?;
        let next = stream.end.next_multiple_of(ALIGN);
        c.equal("offset of scales", next, field(28))?;
        let count = self.shape().scales.count(rows, cols);
        let scales = part("scales", next, count * scale_format.bytes())?;
        *at = scales.end.next_multiple_of(ALIGN);
        let matrix = CodedMatrix {
            codec,
            scale_format,
            rows,
            cols,
            blocks,
            table,
            offsets,
            stream,
            scales,
        };
        check_scales(c, &matrix.decode_scales(record))?;
        let table = table.map(|t| self.table(t));
        matrix.coded(record, table).map_err(|e| match e {
            CodecError::Offset {
                index,
                expected,
                found,
            } => c.invalid(
                "block offsets",
                format_args!("entry {index} to be {expected}"),
                found,
                DAMAGED,
            ),
            source => ArchiveError::Codec {
                path: self.path.clone(),
                place: c.place,
                source,
            },
        })?;
        Ok(matrix)
    }
}

/// Refuses scales that are not finite or are negative.
fn check_scales(c: Check<'_>, scales: &[f32]) -> Result<(), ArchiveError> {
    match scales
        .iter()
        .find(|s| !(s.is_finite() && s.is_sign_positive()))
    {
        None => Ok(()),
        Some(s) => Err(c.invalid("scales", "finite and not negative", s, DAMAGED)),
    }
}

impl CodedMatrix {
    /// The coded matrix, from its record's bytes and, if rANS, its table; `None` if it is raw.
    pub fn coded<'a>(
        &self,
        record: &'a [u8],
        table: Option<&'a Table>,
    ) -> Result<Option<Stream<'a>>, CodecError> {
        let offsets = &record[self.offsets.clone()];
        let stream = &record[self.stream.clone()];
        match (self.codec, self.blocks, table) {
            (Codec::Rans(_), Some(blocks), Some(table)) => {
                Coded::new(blocks, table, offsets, stream).map(|c| Some(c.into()))
            }
            (Codec::Plane3, _, _) => match Layout::new(self.rows, self.cols) {
                Some(layout) => plane3::Coded::new(layout, offsets, stream).map(|c| Some(c.into())),
                None => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Blocks of rows; 0 if raw.
    pub fn n_blocks(&self) -> usize {
        match self.codec {
            Codec::Raw => 0,
            Codec::Rans(_) => self.blocks.map_or(0, |b| b.blocks),
            Codec::Plane3 => Layout::new(self.rows, self.cols).map_or(0, |l| l.blocks()),
        }
    }

    /// Its scales as f32, row-major.
    pub fn decode_scales(&self, record: &[u8]) -> Vec<f32> {
        decode_scales(self.scale_format, &record[self.scales.clone()])
    }

    /// Bytes of all its parts.
    pub fn stored_bytes(&self) -> usize {
        self.offsets.len() + self.stream.len() + self.scales.len()
    }

    /// Bytes of its nibbles as int4.
    pub fn packed_bytes(&self) -> usize {
        self.rows * self.cols / 2
    }
}

impl<'a> Record<'a> {
    /// A matrix's place.
    pub fn matrix(&self, kind: MatrixKind) -> &CodedMatrix {
        &self.matrices[kind as usize]
    }

    /// A matrix to decode, unless it is raw.
    pub fn coded(&self, kind: MatrixKind) -> Option<Stream<'a>> {
        let m = self.matrix(kind);
        let table = m.table.map(|t| self.archive.table(t));
        // The record was checked, offsets included.
        m.coded(self.bytes, table).ok()?
    }

    /// A raw matrix's packed int4; `None` if it is coded.
    pub fn packed(&self, kind: MatrixKind) -> Option<&'a [u8]> {
        let m = self.matrix(kind);
        (m.codec == Codec::Raw).then(|| &self.bytes[m.stream.clone()])
    }

    /// A matrix's scales.
    pub fn scales(&self, kind: MatrixKind) -> Vec<f32> {
        self.matrix(kind).decode_scales(self.bytes)
    }

    /// Decodes a matrix with the fastest decoder there is.
    pub fn decode(&self, kind: MatrixKind) -> Result<RawMatrix<'a>, ArchiveError> {
        let packed = match self.coded(kind) {
            None => Cow::Borrowed(&self.bytes[self.matrix(kind).stream.clone()]),
            Some(coded) => {
                let mut out = vec![0; self.matrix(kind).packed_bytes()];
                let done = coded.decode(Arm::best(), &mut out);
                done.map_err(|e| self.undecodable(kind, e))?;
                Cow::Owned(out)
            }
        };
        Ok(RawMatrix {
            packed,
            scales: Cow::Owned(self.scales(kind)),
        })
    }

    /// Decodes a matrix to memory for its packed int4 and for its scales, by all processors.
    ///
    /// # Panics
    /// If that has another size.
    pub fn decode_into(
        &self,
        kind: MatrixKind,
        packed: &mut [u8],
        scales: &mut [f32],
    ) -> Result<(), ArchiveError> {
        match self.coded(kind) {
            None => packed.copy_from_slice(&self.bytes[self.matrix(kind).stream.clone()]),
            Some(coded) => {
                let done = coded.decode_by_all(Arm::best(), packed);
                done.map_err(|e| self.undecodable(kind, e))?;
            }
        }
        scales.copy_from_slice(&self.scales(kind));
        Ok(())
    }

    pub(super) fn undecodable(&self, kind: MatrixKind, source: CodecError) -> ArchiveError {
        ArchiveError::Codec {
            path: self.archive.path.clone(),
            place: Place::Matrix {
                layer: self.layer,
                expert: self.expert,
                kind,
            },
            source,
        }
    }

    /// Decodes all three.
    pub fn decode_all(&self) -> Result<[RawMatrix<'a>; 3], ArchiveError> {
        Ok([
            self.decode(MatrixKind::Gate)?,
            self.decode(MatrixKind::Up)?,
            self.decode(MatrixKind::Down)?,
        ])
    }
}

/// Checksum of a record's bytes: the first 128 bits of BLAKE3.
pub fn checksum(bytes: &[u8]) -> Digest {
    let mut h = blake3::Hasher::new();
    h.update(bytes);
    format::short(&h)
}

/// The same, by all processors.
fn by_all(bytes: &[u8]) -> Digest {
    let mut h = blake3::Hasher::new();
    h.update_rayon(bytes);
    format::short(&h)
}

/// Digest of a raw expert: BLAKE3 over packed bytes and f32 scales of gate, up and down, in that
/// order, cut to 128 bits.
pub fn expert_digest(matrices: &[RawMatrix<'_>; 3]) -> Digest {
    let mut h = blake3::Hasher::new();
    for m in matrices {
        h.update(&m.packed);
        #[cfg(target_endian = "little")]
        h.update(bytemuck::cast_slice(&m.scales));
        #[cfg(target_endian = "big")]
        compile_error!("archives are little-endian");
    }
    format::short(&h)
}
