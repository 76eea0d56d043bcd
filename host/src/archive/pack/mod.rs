//! Making an archive.
//!
//! Two passes over the experts: [`tables`] sees what they are and chooses the frequency tables,
//! [`record`] codes them. The file grows as [`partial`] and gets its header last.

mod partial;
mod record;
mod tables;

use std::path::Path;

use gpu::layout::Symbol;
use rayon::prelude::*;
use serde::Serialize;

use crate::codec::Codec;
use crate::expert::{ExpertShape, ScaleKind};

use super::error::ArchiveError;
use super::format::{
    Digest, HEADER, Header, INDEX, LAYER, MAX_ALIGN_LOG2, NO_TABLE, VERSION, fingerprint,
};
use super::hot::HotSet;
use super::source::ExpertSource;
use partial::Partial;
use record::{Coded, code_expert, tally};
use tables::{Tables, first_with_bits, survey};

pub use partial::partial_path;

/// The codec of experts outside the hot set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CodecChoice {
    /// What suits most: rANS.
    #[default]
    Auto,
    /// rANS.
    Rans,
    /// plane3; row scales only.
    Plane3,
    /// Raw.
    Raw,
}

/// What a table lookup of rANS yields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SymbolChoice {
    /// Pairs: every device has room for their table.
    #[default]
    Auto,
    /// Always this.
    Always(Symbol),
}

/// A matrix must shrink by this share to be coded, unless [`PackOptions::least_saving`] says else.
pub const LEAST_SAVING: f64 = 0.05;

/// How to pack.
#[derive(Clone, Debug, PartialEq)]
pub struct PackOptions {
    /// Codec of experts outside the hot set.
    pub codec: CodecChoice,
    /// Symbols of rANS.
    pub symbols: SymbolChoice,
    /// Nibbles of a block of rANS, roughly; by default as [`gpu::layout::Blocks::new`]
    /// chooses.
    pub block_nibbles: Option<usize>,
    /// Experts that are coded as plane3 instead; row scales only.
    pub hot: HotSet,
    /// Share of a matrix that coding must save; where it does not, the matrix is stored raw.
    pub least_saving: f64,
    /// Go on with what an interrupted pack of the same experts and options left.
    pub resume: bool,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            codec: CodecChoice::Auto,
            symbols: SymbolChoice::Auto,
            block_nibbles: None,
            hot: HotSet::default(),
            least_saving: LEAST_SAVING,
            resume: false,
        }
    }
}

impl PackOptions {
    fn symbol(&self) -> Symbol {
        match self.symbols {
            SymbolChoice::Auto => Symbol::Pair,
            SymbolChoice::Always(symbol) => symbol,
        }
    }

    /// The codec of an expert's matrices, where it saves enough.
    fn codec_of(&self, layer: u32, expert: usize) -> Codec {
        if self.hot.contains(layer, expert) {
            return Codec::Plane3;
        }
        match self.codec {
            CodecChoice::Auto | CodecChoice::Rans => Codec::Rans(self.symbol()),
            CodecChoice::Plane3 => Codec::Plane3,
            CodecChoice::Raw => Codec::Raw,
        }
    }
}

/// Which pass an expert went through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its symbols were counted.
    Count,
    /// It was coded, or found in what an interrupted pack left.
    Code,
}

/// An expert went through a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which.
    pub phase: Phase,
    /// Bytes of the raw expert.
    pub bytes: u64,
}

/// Bytes of one class of matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ClassSummary {
    /// Matrices.
    pub matrices: u64,
    /// Of them stored raw.
    pub raw: u64,
    /// Of them coded as rANS.
    pub rans: u64,
    /// Of them coded as plane3.
    pub plane3: u64,
    /// Packed int4 bytes.
    pub packed_bytes: u64,
    /// f32 scale bytes.
    pub scale_bytes: u64,
    /// Bytes of streams and block offsets, or of packed int4 where raw; with their padding.
    pub coded_bytes: u64,
    /// Bytes of stored scales.
    pub coded_scale_bytes: u64,
    /// Order-0 entropy of the nibbles, each matrix by its own counts, in bytes.
    pub entropy_bytes: f64,
}

/// What an archive came to.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Layers with experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Records: fewer than experts where some share one.
    pub records: usize,
    /// Experts that were found in what an interrupted pack left.
    pub kept: usize,
    /// Symbols of the rANS streams: `pair`, `triple` or, if there are none, `none`.
    pub symbols: &'static str,
    /// Tables.
    pub tables: usize,
    /// Their bytes in the file.
    pub table_bytes: u64,
    /// Bytes of the raw experts, int4 and f32 scales; of those that share a record once.
    pub raw_bytes: u64,
    /// Bytes of the archive.
    pub file_bytes: u64,
    /// `file_bytes / raw_bytes`.
    pub ratio: f64,
    /// Gate and up.
    pub gate_up: ClassSummary,
    /// Down.
    pub down: ClassSummary,
    /// Fingerprint of the raw experts, hexadecimal.
    pub fingerprint: String,
}

impl ClassSummary {
    /// Both together.
    fn plus(mut self, other: &Self) -> Self {
        self.matrices += other.matrices;
        self.raw += other.raw;
        self.rans += other.rans;
        self.plane3 += other.plane3;
        self.packed_bytes += other.packed_bytes;
        self.scale_bytes += other.scale_bytes;
        self.coded_bytes += other.coded_bytes;
        self.coded_scale_bytes += other.coded_scale_bytes;
        self.entropy_bytes += other.entropy_bytes;
        self
    }
}

impl Summary {
    /// All matrices.
    pub fn total(&self) -> ClassSummary {
        self.gate_up.plus(&self.down)
    }
}

/// Records coded at once, which bounds the memory that packing takes: this, or two a thread.
const BATCH: usize = 32;

/// Packs all experts of `source` into the file `out`.
///
/// The file's bytes depend on the experts and the options alone, whether packing was interrupted
/// and resumed or not. They are written to `out` with `.partial` at its end ([`partial_path`]),
/// which takes the place of `out` when it is whole and on disk. `progress` is called for each
/// expert, first while counting symbols, then again while coding. Once `stop` returns true, packing
/// ends with [`ArchiveError::Interrupted`]; what was coded until then stays, for
/// [`PackOptions::resume`].
pub fn pack(
    source: &impl ExpertSource,
    options: &PackOptions,
    out: &Path,
    progress: impl Fn(Step) + Sync,
    stop: impl Fn() -> bool + Sync,
) -> Result<Summary, ArchiveError> {
    check_options(source, options)?;
    let of = source.layers().len() * source.experts();
    // First of all, so that hours of counting do not end at a folder that cannot be written.
    let mut partial = Partial::open(out, options.resume)?;
    let going = || {
        if stop() {
            return Err(ArchiveError::Interrupted {
                path: out.to_owned(),
                kept: None,
            });
        }
        Ok(())
    };
    match pack_to(&mut partial, source, options, &progress, going) {
        Ok(summary) => Ok(summary),
        Err(e) => Err(partial.give_up(e, of)),
    }
}

/// Refuses what the model cannot have.
fn check_options(source: &impl ExpertSource, options: &PackOptions) -> Result<(), ArchiveError> {
    let plane3 = options.codec == CodecChoice::Plane3 || !options.hot.is_empty();
    if plane3 && source.shape().scales != ScaleKind::Row {
        return Err(ArchiveError::Options {
            what: "plane3 is for experts with a scale a row, and these have one for each 64 \
                   columns; pack with `--codec rans` and no hot set"
                .into(),
        });
    }
    for (layer, expert) in options.hot.iter() {
        if source.layers().binary_search(&layer).is_err() || expert >= source.experts() {
            return Err(ArchiveError::Options {
                what: format!(
                    "the hot set has layer {layer}, expert {expert}, which the model has not; \
                     give a profile of this model"
                ),
            });
        }
    }
    Ok(())
}

/// What becomes of an expert in the second pass.
enum Packed {
    /// It has the record of an earlier one.
    Shared,
    New(Coded),
}

fn pack_to(
    partial: &mut Partial,
    source: &impl ExpertSource,
    options: &PackOptions,
    progress: &(impl Fn(Step) + Sync),
    going: impl Fn() -> Result<(), ArchiveError> + Sync,
) -> Result<Summary, ArchiveError> {
    let shape = *source.shape();
    let (layers, experts) = (source.layers(), source.experts());
    let first = first_with_bits(source, options);
    let (seen, tables) = survey(source, options, &first, progress, &going)?;

    let layers_at = HEADER + tables.bytes();
    let index_at = layers_at + layers.len() * LAYER;
    let align_log2 = alignment(&shape);
    let align = 1usize << align_log2;
    let records_at = (index_at + first.len() * INDEX).next_multiple_of(align);
    let digests: Vec<Digest> = seen.iter().map(|s| s.digest).collect();
    let mut header = Header {
        file_len: 0,
        shape,
        align_log2,
        layers: layers.len() as u32,
        experts: experts as u32,
        tables: tables.tables.len() as u32,
        tables_at: HEADER as u64,
        layers_at: layers_at as u64,
        index_at: index_at as u64,
        records_at: records_at as u64,
        fingerprint: fingerprint(&shape, layers, experts, &digests),
        digest: [0; 32],
    };
    let mut front = front(&header, layers, &tables);
    partial.key(key(&front, options, &first, source))?;

    let step = Step {
        phase: Phase::Code,
        bytes: shape.raw_bytes() as u64,
    };
    let mut classes = [ClassSummary::default(); 2];
    let mut at = records_at as u64;
    let mut index = Vec::with_capacity(first.len() * INDEX);
    if partial.found() {
        let there = partial.index(index_at as u64, first.len());
        for (i, entry) in there.as_chunks::<INDEX>().0.iter().enumerate() {
            going()?;
            if first[i] != i {
                let earlier = INDEX * first[i];
                index.extend_from_within(earlier..earlier + INDEX);
            } else {
                let digest = entry[32..] == seen[i].digest;
                let Some(record) = partial.record(entry, at, align).filter(|_| digest) else {
                    break;
                };
                tally(&shape, &record, &seen[i].entropy, &mut classes);
                at += record.len().next_multiple_of(align) as u64;
                index.extend(entry);
            }
            progress(step);
        }
    }
    let kept = index.len() / INDEX;
    partial.cut(at, kept)?;

    let all: Vec<usize> = (kept..first.len()).collect();
    for batch in all.chunks(BATCH.max(2 * rayon::current_num_threads())) {
        going()?;
        let coded: Vec<Packed> = batch
            .par_iter()
            .map(|&i| {
                let (l, e) = (i / experts, i % experts);
                let packed = if first[i] == i {
                    let raw = source.expert(layers[l], e)?;
                    let codec = options.codec_of(layers[l], e);
                    let table = |kind| tables.get(l, kind);
                    Packed::New(code_expert(&shape, &raw, codec, options, table))
                } else {
                    Packed::Shared
                };
                progress(step);
                Ok(packed)
            })
            .collect::<Result<_, ArchiveError>>()?;
        let (begin, entries) = (at, index.len());
        let mut records = Vec::with_capacity(batch.len());
        for (coded, &i) in coded.into_iter().zip(batch) {
            let Packed::New(coded) = coded else {
                let earlier = INDEX * first[i];
                index.extend_from_within(earlier..earlier + INDEX);
                continue;
            };
            index.extend(at.to_le_bytes());
            index.extend((coded.bytes.len() as u64).to_le_bytes());
            index.extend(coded.checksum);
            index.extend(seen[i].digest);
            tally(&shape, &coded.bytes, &seen[i].entropy, &mut classes);
            at += coded.bytes.len().next_multiple_of(align) as u64;
            records.push(coded.bytes);
        }
        let place = (index_at + entries) as u64;
        let done = index.len() / INDEX;
        partial.append(begin, &records, align, (place, &index[entries..]), done)?;
    }

    header.file_len = at;
    front[..HEADER].copy_from_slice(&header.to_bytes());
    front.extend(index);
    front.resize(records_at, 0);
    header.digest = *blake3::hash(&front).as_bytes();
    front[..HEADER].copy_from_slice(&header.to_bytes());
    partial.finish(&front)?;

    let records = (first.iter().enumerate())
        .filter(|(i, first)| i == *first)
        .count();
    let raw_bytes = records as u64 * shape.raw_bytes() as u64;
    Ok(Summary {
        layers: layers.len(),
        experts,
        records,
        kept,
        symbols: match options.symbol() {
            _ if classes.iter().all(|c| c.rans == 0) => "none",
            Symbol::Pair => "pair",
            Symbol::Triple => "triple",
        },
        tables: tables.tables.len(),
        table_bytes: tables.bytes() as u64,
        raw_bytes,
        file_bytes: at,
        ratio: at as f64 / raw_bytes as f64,
        gate_up: classes[0],
        down: classes[1],
        fingerprint: super::error::hex(&header.fingerprint),
    })
}

/// Header, tables and layers.
fn front(header: &Header, layers: &[u32], tables: &Tables) -> Vec<u8> {
    let mut front = header.to_bytes().to_vec();
    for t in &tables.tables {
        front.extend([t.symbol() as u8, 0, 0, 0]);
        front.extend((t.frequencies().len() as u32).to_le_bytes());
        front.extend([0; 8]);
        front.extend(t.frequencies());
    }
    for (number, ids) in layers.iter().zip(&tables.of) {
        front.extend(number.to_le_bytes());
        for id in ids {
            front.extend(id.unwrap_or(NO_TABLE).to_le_bytes());
        }
        front.extend([0; 8]);
    }
    front
}

/// All that the records depend on: an unfinished archive of the same key can be gone on with.
fn key(
    front: &[u8],
    options: &PackOptions,
    first: &[usize],
    source: &impl ExpertSource,
) -> [u8; 32] {
    let mut h = blake3::Hasher::new();
    h.update(concat!("ansatz partial ", env!("CARGO_PKG_VERSION")).as_bytes());
    h.update(&VERSION.to_le_bytes());
    // The fingerprint of all raw experts is in the header.
    h.update(front);
    h.update(&options.least_saving.to_le_bytes());
    h.update(&(options.block_nibbles.unwrap_or(0) as u64).to_le_bytes());
    for (i, first) in first.iter().enumerate() {
        let (layer, expert) = (source.layers()[i / source.experts()], i % source.experts());
        h.update(&[options.codec_of(layer, expert).number()]);
        h.update(&(*first as u64).to_le_bytes());
    }
    *h.finalize().as_bytes()
}

/// The largest record alignment up to 4 KiB that wastes no more than 0.2% on average.
fn alignment(shape: &ExpertShape) -> u8 {
    // Half the alignment is lost on average; records are about three quarters of the raw bytes.
    let record = shape.raw_bytes() * 3 / 4;
    (4..=MAX_ALIGN_LOG2)
        .rev()
        .find(|log2| (1 << log2) / 2 * 500 <= record)
        .unwrap_or(4)
}
