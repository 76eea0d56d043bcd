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
mod record;
mod source;
pub mod target;
mod verify;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use gpu::layout::Symbol;
use memmap2::Mmap;

use crate::codec::{Codec, CodecError, Table};
use crate::expert::{ExpertShape, MatrixKind};

pub use error::{ArchiveError, Invalid, Kept, Place};
pub use format::{CLASSES, Digest, Header, LOW_NIBBLES, class, fingerprint};
pub use hot::HotSet;
pub use inspect::{Inspection, LayerInfo, MatrixInfo, TableInfo, inspect};
pub use pack::{
    ClassSummary, CodecChoice, LEAST_SAVING, PackOptions, Phase, Step, Summary, SymbolChoice, pack,
    partial_path,
};
pub use record::{CodedMatrix, Record, checksum, expert_digest};
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
        // Not with room for all: a file of holes may have more than memory.
        let mut first = Vec::new();
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
