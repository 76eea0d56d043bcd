//! Archives of coded experts, `experts.ansx`: reading, packing, verifying.
//!
//! The format is `docs/format.md`. An archive holds frequency tables, an index by (layer, expert)
//! and one record an expert: its three matrices and their scales, decodable alone given the
//! tables. Nothing in it depends on where experts will live.
//!
//! [`Archive::open`] checks header, tables and index, [`Archive::record`] a record: checksum,
//! structure, padding. After that a record's bytes can be handed to a device as they are: every
//! part starts at a multiple of 16 bytes of a record that does so itself.

mod error;
mod format;
mod hot;
mod inspect;
mod pack;
mod source;
pub mod target;
mod verify;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use gpu::layout::{Blocks, Folds, Symbol};
use gpu::plane3::{Layout, PLANE_BYTES};
use memmap2::Mmap;

use crate::codec::{
    Arm, Codec, CodecError, Coded, JOB_BYTES, STREAM_ALIGN, ScaleFormat, Stream, Table,
    decode_scales, plane3,
};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

pub use error::{ArchiveError, Invalid, Kept, Place};
pub use format::{CLASSES, Digest, Header, LOW_NIBBLES, class, fingerprint};
pub use hot::HotSet;
pub use inspect::{Inspection, LayerInfo, MatrixInfo, TableInfo, inspect};
pub use pack::{
    ClassSummary, CodecChoice, LEAST_SAVING, PackOptions, Phase, Step, Summary, SymbolChoice, pack,
    partial_path,
};
pub use source::{ExpertSource, SafetensorsExperts};
pub use verify::{Verified, verify, verify_checksums};

use error::{Check, DAMAGED, UNREADABLE, hex};
use format::{ALIGN, INDEX, LAYER, MATRIX, NO_TABLE, TABLE_HEADER, get, u16_at, u32_at, u64_at};

/// An open archive whose header, tables and index have been checked.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    map: Mmap,
    header: Header,
    tables: Vec<Table>,
    layers: Vec<u32>,
    /// Tables of each layer, by class.
    layer_tables: Vec<[Option<u16>; 2]>,
    /// For each entry of the index the first one with its record: mostly itself.
    first: Vec<u32>,
}

/// One layer of an archive.
#[derive(Clone, Copy, Debug)]
pub struct LayerRecords<'a> {
    archive: &'a Archive,
    index: usize,
}

/// A record whose checksum and structure have been checked.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    archive: &'a Archive,
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
    /// Opens an archive and checks its header, tables and index.
    ///
    /// The file is mapped: it must not be changed or cut while the archive is open.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ArchiveError> {
        let path = path.as_ref();
        let unopened = |e| ArchiveError::io(path, "open", e, UNREADABLE);
        // Opening a pipe would wait for it.
        if !std::fs::metadata(path).map_err(unopened)?.is_file() {
            return Err(ArchiveError::NotAFile { path: path.into() });
        }
        let file = File::open(path).map_err(unopened)?;
        let len = (file.metadata())
            .map_err(|e| ArchiveError::io(path, "read the length of", e, UNREADABLE))?
            .len();
        if len == 0 {
            Header::read(path, &[], 0)?;
        }
        // SAFETY: the mapping is read-only and its bytes are not trusted: each use checks bounds
        // and values. That nobody cuts the file meanwhile is the documented condition; the
        // operating system would end the process.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|e| ArchiveError::io(path, "map", e, UNREADABLE))?;
        let header = Header::read(path, &map, map.len() as u64)?;
        let mut archive = Archive {
            path: path.to_owned(),
            map,
            header,
            tables: vec![],
            layers: vec![],
            layer_tables: vec![],
            first: vec![],
        };
        archive.read_tables()?;
        archive.read_layers()?;
        archive.check_index()?;
        archive.check_digest()?;
        Ok(archive)
    }

    fn check(&self, place: Place) -> Check<'_> {
        Check {
            path: &self.path,
            place,
        }
    }

    fn read_tables(&mut self) -> Result<(), ArchiveError> {
        // `Header::read` has made sure that everything up to the records is in the file.
        let end = self.header.layers_at as usize;
        let mut at = self.header.tables_at as usize;
        for i in 0..self.header.tables as usize {
            let c = self.check(Place::Table(i));
            c.that(
                end - at >= TABLE_HEADER,
                "length",
                format_args!("at least {TABLE_HEADER} bytes"),
                end - at,
            )?;
            let head = &self.map[at..at + TABLE_HEADER];
            let symbol = match head[0] {
                0 => Symbol::Pair,
                1 => Symbol::Triple,
                other => return Err(c.invalid("symbol", "0 or 1", other, DAMAGED)),
            };
            c.zero("reserved bytes 1..4", &head[1..4])?;
            c.equal("frequencies", symbol.alphabet() as u32, u32_at(head, 4))?;
            c.zero("reserved bytes 8..16", &head[8..16])?;
            at += TABLE_HEADER;
            c.that(
                end - at >= symbol.alphabet(),
                "frequencies",
                format_args!("{} bytes", symbol.alphabet()),
                end - at,
            )?;
            let table = Table::new(symbol, self.map[at..at + symbol.alphabet()].to_vec());
            let table = table.map_err(|e| match e {
                CodecError::TableSum { expected, found } => {
                    c.invalid("sum of frequencies", expected, found, DAMAGED)
                }
                source => ArchiveError::Codec {
                    path: self.path.clone(),
                    place: Place::Table(i),
                    source,
                },
            })?;
            at += symbol.alphabet();
            self.tables.push(table);
        }
        let c = self.check(Place::Header);
        c.equal("offset of layers", at as u64, self.header.layers_at)
    }

    fn read_layers(&mut self) -> Result<(), ArchiveError> {
        let at = self.header.layers_at as usize;
        for i in 0..self.header.layers as usize {
            let c = self.check(Place::Layer(i));
            let b = &self.map[at + i * LAYER..at + (i + 1) * LAYER];
            let number = u32_at(b, 0);
            if let Some(last) = self.layers.last() {
                c.that(
                    number > *last,
                    "layer",
                    format_args!("above {last}"),
                    number,
                )?;
            }
            let mut ids = [None; 2];
            for (id, (at, field)) in ids
                .iter_mut()
                .zip([(4, "table of gate_up"), (6, "table of down")])
            {
                let n = u16_at(b, at);
                c.that(
                    n == NO_TABLE || usize::from(n) < self.tables.len(),
                    field,
                    format_args!("below {} or none", self.tables.len()),
                    n,
                )?;
                *id = (n != NO_TABLE).then_some(n);
            }
            c.zero("reserved bytes 8..16", &b[8..16])?;
            self.layers.push(number);
            self.layer_tables.push(ids);
        }
        Ok(())
    }

    /// Records lie one after the other, each from the first aligned place on. An entry may name an
    /// earlier one's record instead.
    fn check_index(&mut self) -> Result<(), ArchiveError> {
        let align = 1u64 << self.header.align_log2;
        let mut at = self.header.records_at;
        // What is cut off is named by the first record that is not whole.
        let len = self.map.len() as u64;
        let n = self.layers.len() * self.experts();
        let mut first = Vec::with_capacity(n);
        let mut known = HashMap::new();
        for i in 0..n {
            let (layer, expert) = self.place(i);
            let c = self.check(Place::Index { layer, expert });
            let entry = self.entry(i);
            let offset = u64_at(entry, 0);
            if let Some(&earlier) = known.get(&offset) {
                self.check_shared(c, i, earlier)?;
                first.push(earlier as u32);
                continue;
            }
            c.equal("offset", at, offset)?;
            let size = u64_at(entry, 8);
            c.that(
                size >= 3 * MATRIX as u64 && size.is_multiple_of(ALIGN as u64),
                "length",
                format_args!("a multiple of {ALIGN}, at least {}", 3 * MATRIX),
                size,
            )?;
            let end = at
                .checked_add(size)
                .and_then(|end| end.checked_next_multiple_of(align));
            let Some(end) = end.filter(|end| *end <= self.header.file_len) else {
                return Err(c.invalid(
                    "length",
                    format_args!("at most {}", self.header.file_len.saturating_sub(at)),
                    size,
                    DAMAGED,
                ));
            };
            self.check(Place::Record { layer, expert }).that(
                end <= len,
                "bytes",
                format_args!("bytes {at} to {end} of the file"),
                format_args!("a file of {len} bytes"),
            )?;
            known.insert(at, i);
            first.push(i as u32);
            at = end;
        }
        let c = self.check(Place::Header);
        c.equal("file length", at, self.header.file_len)?;
        c.equal("file length", self.header.file_len, len)?;
        self.first = first;
        Ok(())
    }

    /// Entry `i` has the offset of entry `earlier`, so it must be the same in all else.
    fn check_shared(&self, c: Check<'_>, i: usize, earlier: usize) -> Result<(), ArchiveError> {
        let (ours, theirs) = (self.entry(i), self.entry(earlier));
        c.equal("length", u64_at(theirs, 8), u64_at(ours, 8))?;
        for (field, at) in [("checksum", 16), ("digest of the raw expert", 32)] {
            let digest = |entry| hex(&get::<16>(entry, at));
            c.equal(field, digest(theirs), digest(ours))?;
        }
        let tables = |i: usize| self.layer_tables[i / self.experts()];
        let (l, _) = self.place(earlier);
        c.that(
            tables(i) == tables(earlier),
            "offset",
            format_args!("a record of a layer with the same tables"),
            format_args!("one of layer {l}"),
        )
    }

    fn check_digest(&self) -> Result<(), ArchiveError> {
        let c = self.check(Place::Header);
        let at = format::DIGEST_AT;
        let mut h = blake3::Hasher::new();
        h.update(&self.map[..at]);
        h.update(&[0; 32]);
        h.update(&self.map[at + 32..self.header.records_at as usize]);
        let found = *h.finalize().as_bytes();
        c.equal(
            "digest of header, tables and index",
            hex(&self.header.digest),
            hex(&found),
        )?;
        let raw = (0..self.layers.len() * self.experts()).map(|i| get::<16>(self.entry(i), 32));
        let raw: Vec<Digest> = raw.collect();
        let found = fingerprint(self.shape(), &self.layers, self.experts(), &raw);
        c.equal("fingerprint", hex(&self.header.fingerprint), hex(&found))?;
        let end = self.header.index_at as usize + raw.len() * INDEX;
        c.zero(
            "padding before records",
            &self.map[end..self.header.records_at as usize],
        )
    }

    /// Entry of the index.
    fn entry(&self, i: usize) -> &[u8] {
        let at = self.header.index_at as usize + i * INDEX;
        &self.map[at..at + INDEX]
    }

    /// (layer, expert) of an entry.
    fn place(&self, i: usize) -> (u32, usize) {
        (self.layers[i / self.experts()], i % self.experts())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Geometry of all experts.
    pub fn shape(&self) -> &ExpertShape {
        &self.header.shape
    }

    /// Numbers of the model layers that have records, ascending.
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// Whether the experts of a layer are int8, and their low nibbles another layer.
    pub fn is_int8(&self, layer: u32) -> bool {
        self.layers.binary_search(&(layer | LOW_NIBBLES)).is_ok()
    }

    /// Experts of each layer.
    pub fn experts(&self) -> usize {
        self.header.experts as usize
    }

    /// Bytes of the file.
    pub fn file_len(&self) -> u64 {
        self.header.file_len
    }

    /// What the raw experts are ([`fingerprint`]).
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.header.fingerprint
    }

    /// All tables.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// A table by its number.
    ///
    /// # Panics
    /// If there is none; the numbers that records give exist.
    pub fn table(&self, id: u16) -> &Table {
        &self.tables[usize::from(id)]
    }

    /// A layer's records.
    pub fn layer(&self, layer: u32) -> Result<LayerRecords<'_>, ArchiveError> {
        match self.layers.binary_search(&layer) {
            Ok(index) => Ok(LayerRecords {
                archive: self,
                index,
            }),
            Err(_) => Err(self.missing(layer, 0)),
        }
    }

    fn missing(&self, layer: u32, expert: usize) -> ArchiveError {
        ArchiveError::Missing {
            path: self.path.clone(),
            layer,
            expert,
        }
    }

    /// A record's bytes as they are, unchecked: for use after [`Archive::record`] has been called.
    pub fn bytes(&self, layer: u32, expert: usize) -> Result<&[u8], ArchiveError> {
        let (range, _) = self.span(layer, expert)?;
        Ok(&self.map[range])
    }

    /// Where a record is in the file: its first byte and its length.
    pub fn place_of(&self, layer: u32, expert: usize) -> Result<(u64, usize), ArchiveError> {
        let (range, _) = self.span(layer, expert)?;
        Ok((range.start as u64, range.len()))
    }

    /// A record's checksum, as [`checksum`] computes it.
    pub fn checksum(&self, layer: u32, expert: usize) -> Result<Digest, ArchiveError> {
        let (_, i) = self.span(layer, expert)?;
        Ok(get(self.entry(i), 16))
    }

    /// Whether an expert's gate is plane3, as its record says, which is not checked here.
    pub fn is_plane3(&self, layer: u32, expert: usize) -> Result<bool, ArchiveError> {
        Ok(self.bytes(layer, expert)?.first() == Some(&Codec::Plane3.number()))
    }

    /// The first expert with the record of this one: mostly itself.
    pub fn first(&self, layer: u32, expert: usize) -> Result<(u32, usize), ArchiveError> {
        let (_, i) = self.span(layer, expert)?;
        Ok(self.place(self.first[i] as usize))
    }

    /// Records in the file: fewer than experts where some share one.
    pub fn records(&self) -> usize {
        (self.first.iter().enumerate())
            .filter(|(i, first)| *i == **first as usize)
            .count()
    }

    /// Digest of the raw expert that a record holds ([`expert_digest`]).
    pub fn raw_digest(&self, layer: u32, expert: usize) -> Result<Digest, ArchiveError> {
        let (_, i) = self.span(layer, expert)?;
        Ok(get(self.entry(i), 32))
    }

    /// Where a record is in the file, and its place in the index.
    fn span(&self, layer: u32, expert: usize) -> Result<(Range<usize>, usize), ArchiveError> {
        let found = self.layers.binary_search(&layer);
        match found {
            Ok(l) if expert < self.experts() => {
                let i = l * self.experts() + expert;
                let entry = self.entry(i);
                // Within the map by `check_index`.
                let at = u64_at(entry, 0) as usize;
                Ok((at..at + u64_at(entry, 8) as usize, i))
            }
            _ => Err(self.missing(layer, expert)),
        }
    }

    /// A record, its checksum, structure, scales and padding checked. Its matrices' streams are
    /// checked by decoding them.
    pub fn record(&self, layer: u32, expert: usize) -> Result<Record<'_>, ArchiveError> {
        let (range, i) = self.span(layer, expert)?;
        let end = self.end_of(i) as usize;
        self.padded(layer, expert, &self.map[range.start..end], by_all)
    }

    /// A record of bytes that go on to where the next one begins.
    fn padded<'a>(
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

    /// Where the padding after an entry's record ends.
    fn end_of(&self, i: usize) -> u64 {
        let entry = self.entry(i);
        // Within the map by `check_index`.
        (u64_at(entry, 0) + u64_at(entry, 8)).next_multiple_of(1 << self.header.align_log2)
    }

    /// Takes pages out of the map, not out of the page cache.
    fn let_go(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is shared and read-only: what is taken out comes back from the file.
            let done =
                unsafe { (self.map).unchecked_advise_range(advice, bytes.start, bytes.len()) };
            let _ = done; // else they go with the map
        }
        #[cfg(not(unix))]
        let _ = bytes;
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

    fn undecodable(&self, kind: MatrixKind, source: CodecError) -> ArchiveError {
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

impl<'a> LayerRecords<'a> {
    /// The archive.
    pub fn archive(&self) -> &'a Archive {
        self.archive
    }

    /// Number of the model layer.
    pub fn number(&self) -> u32 {
        self.archive.layers[self.index]
    }

    /// Experts of the layer.
    pub fn experts(&self) -> usize {
        self.archive.experts()
    }

    /// Number and table of a class of matrices ([`class`]), if any of them is coded.
    pub fn table(&self, kind: MatrixKind) -> Option<(u16, &'a Table)> {
        let id = self.archive.layer_tables[self.index][class(kind)]?;
        Some((id, self.archive.table(id)))
    }

    /// A record, checked.
    pub fn record(&self, expert: usize) -> Result<Record<'a>, ArchiveError> {
        self.archive.record(self.number(), expert)
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
