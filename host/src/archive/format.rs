//! The bytes of an archive, version 1 (`docs/format.md`).

use std::path::Path;

use crate::expert::{ExpertShape, MatrixKind, ScaleKind};

use super::error::{ArchiveError, Check, FOREIGN, OLD, Place, hex};

/// First bytes of an archive.
pub const MAGIC: [u8; 8] = *b"ANSX\r\n\x1a\n";
/// Version of the format, frozen. 0 was not.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER: usize = 256;
/// Bytes before a table's frequencies.
pub const TABLE_HEADER: usize = 16;
/// Bytes of a layer's entry.
pub const LAYER: usize = 16;
/// Bytes of an expert's entry in the index.
pub const INDEX: usize = 48;
/// Bytes of a matrix's header in a record.
pub const MATRIX: usize = 32;
/// Everything in a record starts at a multiple of this.
pub const ALIGN: usize = 16;
/// Largest record alignment, as a power of two.
pub const MAX_ALIGN_LOG2: u8 = 12;
/// Largest number of rows or columns.
pub const MAX_DIM: usize = 1 << 16;
/// Table of a class that has none.
pub const NO_TABLE: u16 = u16::MAX;

/// Set in a layer's number: the low nibbles of the int8 experts whose high ones the layer with the
/// number without it holds.
pub const LOW_NIBBLES: u32 = 1 << 31;

/// First 128 bits of a BLAKE3 hash.
pub type Digest = [u8; 16];

/// A little-endian field of a fixed part; the offset is a constant of the format.
pub fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// u16 at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(get(bytes, at))
}

/// u32 at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(bytes, at))
}

/// u64 at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(bytes, at))
}

/// Class of a matrix: gate and up share a table.
pub fn class(kind: MatrixKind) -> usize {
    match kind {
        MatrixKind::Gate | MatrixKind::Up => 0,
        MatrixKind::Down => 1,
    }
}

/// Names of the classes.
pub const CLASSES: [&str; 2] = ["gate_up", "down"];

/// The header's fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the file.
    pub file_len: u64,
    /// Geometry of all experts.
    pub shape: ExpertShape,
    /// Binary logarithm of the records' alignment.
    pub align_log2: u8,
    /// Layers with records.
    pub layers: u32,
    /// Experts of each layer.
    pub experts: u32,
    /// Tables.
    pub tables: u32,
    /// Where tables start.
    pub tables_at: u64,
    /// Where the list of layers starts.
    pub layers_at: u64,
    /// Where the index starts.
    pub index_at: u64,
    /// Where records start.
    pub records_at: u64,
    /// What the raw experts are ([`fingerprint`]).
    pub fingerprint: [u8; 32],
    /// Of everything before the records, itself taken as zero.
    pub digest: [u8; 32],
}

/// Offset of the digest in the header.
pub const DIGEST_AT: usize = 224;

impl Header {
    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; HEADER] {
        let mut b = [0; HEADER];
        let mut put = |at: usize, bytes: &[u8]| b[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &(HEADER as u32).to_le_bytes());
        put(16, &self.file_len.to_le_bytes());
        put(24, &(self.shape.hidden as u32).to_le_bytes());
        put(28, &(self.shape.intermediate as u32).to_le_bytes());
        put(
            32,
            &[match self.shape.scales {
                ScaleKind::Row => 0,
                ScaleKind::G64 => 1,
            }],
        );
        put(33, &[self.align_log2]);
        put(36, &self.layers.to_le_bytes());
        put(40, &self.experts.to_le_bytes());
        put(44, &self.tables.to_le_bytes());
        put(48, &self.tables_at.to_le_bytes());
        put(56, &self.layers_at.to_le_bytes());
        put(64, &self.index_at.to_le_bytes());
        put(72, &self.records_at.to_le_bytes());
        put(192, &self.fingerprint);
        put(DIGEST_AT, &self.digest);
        b
    }

    /// Reads and checks the header of a file of `len` bytes; nothing is allocated.
    pub fn read(path: &Path, bytes: &[u8], len: u64) -> Result<Self, ArchiveError> {
        let c = Check {
            path,
            place: Place::Header,
        };
        let known = bytes.len().min(MAGIC.len());
        if known == 0 || bytes[..known] != MAGIC[..known] {
            let found = match known {
                0 => "an empty file".into(),
                _ => hex(&bytes[..known]),
            };
            return Err(c.invalid("magic", hex(&MAGIC), found, FOREIGN));
        }
        c.that(
            bytes.len() >= HEADER,
            "length",
            format_args!("{HEADER} bytes"),
            format_args!("{} bytes", bytes.len()),
        )?;
        let b = &bytes[..HEADER];
        match u32_at(b, 8) {
            VERSION => {}
            old @ ..VERSION => return Err(c.invalid("version", VERSION, old, OLD)),
            new => return Err(c.invalid("version", VERSION, new, FOREIGN)),
        }
        c.equal("header length", HEADER as u32, u32_at(b, 12))?;
        let scales = match b[32] {
            0 => ScaleKind::Row,
            1 => ScaleKind::G64,
            other => return Err(c.invalid("scale kind", "0 or 1", other, super::error::DAMAGED)),
        };
        let dim = |field, at| {
            let n = u32_at(b, at) as usize;
            let unit = match scales {
                ScaleKind::Row => 2,
                ScaleKind::G64 => gpu::arith::GROUP,
            };
            c.that(
                n > 0 && n <= MAX_DIM && n.is_multiple_of(unit),
                field,
                format_args!("a multiple of {unit} up to {MAX_DIM}"),
                n,
            )?;
            Ok(n)
        };
        let h = Header {
            file_len: u64_at(b, 16),
            shape: ExpertShape {
                hidden: dim("hidden size", 24)?,
                intermediate: dim("intermediate size", 28)?,
                scales,
            },
            align_log2: b[33],
            layers: u32_at(b, 36),
            experts: u32_at(b, 40),
            tables: u32_at(b, 44),
            tables_at: u64_at(b, 48),
            layers_at: u64_at(b, 56),
            index_at: u64_at(b, 64),
            records_at: u64_at(b, 72),
            fingerprint: get(b, 192),
            digest: get(b, DIGEST_AT),
        };
        c.that(
            (4..=MAX_ALIGN_LOG2).contains(&h.align_log2),
            "alignment",
            format_args!("a power of two, 4 to {MAX_ALIGN_LOG2}"),
            h.align_log2,
        )?;
        c.zero("reserved bytes 34..36", &b[34..36])?;
        c.zero("reserved bytes 80..192", &b[80..192])?;
        c.that(h.layers > 0, "layers", "at least 1", h.layers)?;
        c.that(h.experts > 0, "experts", "at least 1", h.experts)?;
        c.that(
            h.tables < u32::from(NO_TABLE),
            "tables",
            format_args!("below {NO_TABLE}"),
            h.tables,
        )?;
        c.equal("offset of tables", HEADER as u64, h.tables_at)?;
        // Tables are 272 or 4,112 bytes each; which, they say themselves.
        let n = u64::from(h.tables);
        let least = h.tables_at + n * (TABLE_HEADER as u64 + 256);
        let most = h.tables_at + n * (TABLE_HEADER as u64 + 4096);
        c.that(
            (least..=most).contains(&h.layers_at),
            "offset of layers",
            format_args!("{least} to {most}"),
            h.layers_at,
        )?;
        let index_at = h.layers_at + u64::from(h.layers) * LAYER as u64;
        c.equal("offset of index", index_at, h.index_at)?;
        let entries = u64::from(h.layers) * u64::from(h.experts);
        let end = entries
            .checked_mul(INDEX as u64)
            .and_then(|n| n.checked_add(h.index_at))
            .and_then(|n| n.checked_next_multiple_of(1 << h.align_log2));
        let Some(end) = end else {
            return Err(c.invalid(
                "experts",
                "an index that fits 64 bits",
                h.experts,
                super::error::DAMAGED,
            ));
        };
        c.equal("offset of records", end, h.records_at)?;
        c.that(
            end <= len,
            "offset of records",
            format_args!("at most {len}, the length of the file"),
            end,
        )?;
        Ok(h)
    }
}

/// The first 128 bits of a finished hash.
pub fn short(hasher: &blake3::Hasher) -> Digest {
    get(hasher.finalize().as_bytes(), 0)
}

/// What the raw experts of a model are: BLAKE3 over `"ansatz experts 0"`, hidden and intermediate
/// size, scale kind, number of layers, of experts (u32 each), the layers' numbers (u32 each), and
/// the digests of all raw experts in (layer, expert) order ([`super::expert_digest`]).
pub fn fingerprint<'a>(
    shape: &ExpertShape,
    layers: &[u32],
    experts: usize,
    digests: impl IntoIterator<Item = &'a Digest>,
) -> [u8; 32] {
    let mut h = blake3::Hasher::new();
    h.update(b"ansatz experts 0");
    let kind = match shape.scales {
        ScaleKind::Row => 0u32,
        ScaleKind::G64 => 1,
    };
    for n in [
        shape.hidden as u32,
        shape.intermediate as u32,
        kind,
        layers.len() as u32,
        experts as u32,
    ] {
        h.update(&n.to_le_bytes());
    }
    for l in layers {
        h.update(&l.to_le_bytes());
    }
    for d in digests {
        h.update(d);
    }
    *h.finalize().as_bytes()
}
