//! Making an archive.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use gpu::layout::{BLOCK_NIBBLES, Blocks, Folds, Symbol};
use rayon::prelude::*;
use serde::Serialize;

use crate::codec::{
    Codec, Encoded, ScaleFormat, Table, count_symbols, encode, encode_scales, entropy,
    nibble_counts,
};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix};

use super::error::{ArchiveError, UNWRITABLE};
use super::format::{
    ALIGN, Digest, HEADER, Header, INDEX, LAYER, MATRIX, MAX_ALIGN_LOG2, NO_TABLE, TABLE_HEADER,
    class, fingerprint, short,
};
use super::source::ExpertSource;

/// Which codecs to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CodecChoice {
    /// rANS where it saves at least 5%, else raw.
    #[default]
    Auto,
    /// rANS wherever the geometry allows.
    Rans,
    /// Raw.
    Raw,
}

/// What a table lookup yields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SymbolChoice {
    /// Whichever makes the smaller archive.
    #[default]
    Auto,
    /// Always this.
    Always(Symbol),
}

/// How to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackOptions {
    /// Codecs.
    pub codec: CodecChoice,
    /// Symbols.
    pub symbols: SymbolChoice,
    /// Nibbles of a block, roughly; by default as the symbols suggest.
    pub block_nibbles: Option<usize>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            codec: CodecChoice::Auto,
            symbols: SymbolChoice::Auto,
            block_nibbles: None,
        }
    }
}

/// Bytes of one class of matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ClassSummary {
    /// Matrices.
    pub matrices: u64,
    /// Of them stored raw.
    pub raw: u64,
    /// Packed int4 bytes.
    pub packed_bytes: u64,
    /// f32 scale bytes.
    pub scale_bytes: u64,
    /// Bytes of streams and block offsets, or of packed int4 where raw.
    pub coded_bytes: u64,
    /// Bytes of stored scales.
    pub coded_scale_bytes: u64,
    /// Order-0 entropy of the nibbles, each matrix by its own counts, in bytes.
    pub entropy_bytes: f64,
}

impl ClassSummary {
    fn add(&mut self, other: &ClassSummary) {
        self.matrices += other.matrices;
        self.raw += other.raw;
        self.packed_bytes += other.packed_bytes;
        self.scale_bytes += other.scale_bytes;
        self.coded_bytes += other.coded_bytes;
        self.coded_scale_bytes += other.coded_scale_bytes;
        self.entropy_bytes += other.entropy_bytes;
    }
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
    /// Symbols of the streams: `pair`, `triple` or, if all is raw, `none`.
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

/// A coded expert on its way to the file.
struct Coded {
    bytes: Vec<u8>,
    checksum: Digest,
    classes: [ClassSummary; 2],
}

/// Symbol counts of a layer's classes, by symbol kind.
#[derive(Clone)]
struct Counts {
    pair: [Vec<u64>; 2],
    triple: [Vec<u64>; 2],
}

impl Counts {
    fn new() -> Self {
        let zeros = |s: Symbol| std::array::from_fn(|_| vec![0; s.alphabet()]);
        Self {
            pair: zeros(Symbol::Pair),
            triple: zeros(Symbol::Triple),
        }
    }

    fn of(&self, symbol: Symbol) -> &[Vec<u64>; 2] {
        match symbol {
            Symbol::Pair => &self.pair,
            Symbol::Triple => &self.triple,
        }
    }

    fn of_mut(&mut self, symbol: Symbol) -> &mut [Vec<u64>; 2] {
        match symbol {
            Symbol::Pair => &mut self.pair,
            Symbol::Triple => &mut self.triple,
        }
    }

    fn merge(mut self, other: Self) -> Self {
        for symbol in [Symbol::Pair, Symbol::Triple] {
            for (a, b) in self.of_mut(symbol).iter_mut().zip(other.of(symbol)) {
                for (a, b) in a.iter_mut().zip(b) {
                    *a += b;
                }
            }
        }
        self
    }
}

/// Tables, and which of them each (layer, class) uses.
struct Tables {
    symbol: Symbol,
    tables: Vec<Table>,
    of: Vec<[Option<u16>; 2]>,
}

impl Tables {
    fn get(&self, layer: usize, kind: MatrixKind) -> Option<&Table> {
        self.of[layer][class(kind)].map(|t| &self.tables[usize::from(t)])
    }

    /// The same, each layer with the tables of the one that `joined` gives.
    fn shared_by(mut self, joined: &[usize]) -> Self {
        self.of = joined.iter().map(|l| self.of[*l]).collect();
        self
    }
}

/// A shared table may cost this share of the coded bytes more than two: tables take device memory
/// and cache, expanded to 16 or 128 KiB each.
const SHARING: f64 = 2e-4;

/// A matrix must shrink by this share to be coded ([`CodecChoice::Auto`]).
const LEAST_GAIN: f64 = 0.05;

/// Nibbles of a block over pairs: 56 rows of 2,048, so that a GLM-5.2 expert stays below 0.745.
const PAIR_BLOCK_NIBBLES: usize = 114_688;

/// Records coded at once, which bounds the memory that packing takes.
const BATCH: usize = 32;

/// Packs all experts of `source` into the file `out`.
///
/// The file's bytes depend on the experts and the options alone. They are written to a temporary
/// file beside `out`, which takes its place when it is whole and on disk. `progress` is called
/// with 1 for each expert, first while counting symbols, then again while coding. Once `stop`
/// returns true, packing ends with [`ArchiveError::Interrupted`] and leaves nothing behind.
pub fn pack(
    source: &impl ExpertSource,
    options: &PackOptions,
    out: &Path,
    progress: impl Fn(u64) + Sync,
    stop: impl Fn() -> bool,
) -> Result<Summary, ArchiveError> {
    let going = || {
        if stop() {
            return Err(ArchiveError::Interrupted {
                path: out.to_owned(),
            });
        }
        Ok(())
    };
    let shape = *source.shape();
    let layers = source.layers();
    let experts = source.experts();
    let first = first_with_bits(source);

    let io = |action| move |e| ArchiveError::io(out, action, e, UNWRITABLE);
    let dir = match out.parent() {
        Some(p) if p != Path::new("") => p,
        _ => Path::new("."),
    };
    // First of all, so that hours of counting do not end at a folder that cannot be written.
    // The archive takes the place of what is there, which must not be a device or a folder.
    if out.exists() && !out.is_file() {
        return Err(io("write")(std::io::Error::other(
            "it is there and is not a file",
        )));
    }
    let mut file = tempfile::Builder::new()
        .prefix(".experts-")
        .suffix(".partial")
        .tempfile_in(dir)
        .map_err(io("make a temporary file beside"))?;

    let mut counts = Vec::with_capacity(layers.len());
    let mut digests = Vec::with_capacity(layers.len() * experts);
    for (l, &layer) in layers.iter().enumerate() {
        going()?;
        let of_layer = &first[l * experts..(l + 1) * experts];
        let (layer_digests, layer_counts) = count_layer(
            source,
            options.codec,
            layer,
            l * experts,
            of_layer,
            &progress,
        )?;
        for (digest, first) in layer_digests.into_iter().zip(of_layer) {
            digests.push(digest.unwrap_or_else(|| digests[*first]));
        }
        counts.push(layer_counts);
    }
    let joined = join_layers(&first, experts, &mut counts);
    let tables = match options.codec {
        CodecChoice::Raw => None,
        _ => choose_symbols(source, options, &counts)?.map(|t| t.shared_by(&joined)),
    };

    let table_bytes: usize = tables
        .iter()
        .flat_map(|t| &t.tables)
        .fold(0, |n, t| n + TABLE_HEADER + t.frequencies().len());
    let layers_at = HEADER + table_bytes;
    let index_at = layers_at + layers.len() * LAYER;
    let align_log2 = alignment(&shape);
    let align = 1usize << align_log2;
    let records_at = (index_at + layers.len() * experts * INDEX).next_multiple_of(align);

    let mut at = records_at as u64;
    file.seek(SeekFrom::Start(at)).map_err(io("write"))?;
    let mut index = Vec::with_capacity(layers.len() * experts * INDEX);
    let mut classes = [ClassSummary::default(); 2];
    let all: Vec<(usize, usize)> = (0..layers.len())
        .flat_map(|l| (0..experts).map(move |e| (l, e)))
        .collect();
    for batch in all.chunks(BATCH) {
        going()?;
        let coded: Vec<Option<Coded>> = batch
            .par_iter()
            .map(|&(l, e)| {
                if first[l * experts + e] != l * experts + e {
                    progress(1);
                    return Ok(None);
                }
                let raw = source.expert(layers[l], e)?;
                let coded = code_expert(&shape, &raw, options, tables.as_ref(), l);
                progress(1);
                Ok(Some(coded))
            })
            .collect::<Result<_, ArchiveError>>()?;
        for (coded, &(l, e)) in coded.iter().zip(batch) {
            let Some(coded) = coded else {
                let entry = INDEX * first[l * experts + e];
                index.extend_from_within(entry..entry + INDEX);
                continue;
            };
            index.extend(at.to_le_bytes());
            index.extend((coded.bytes.len() as u64).to_le_bytes());
            index.extend(coded.checksum);
            index.extend(digests[l * experts + e]);
            let padded = coded.bytes.len().next_multiple_of(align);
            file.write_all(&coded.bytes).map_err(io("write"))?;
            file.write_all(&[0; 1 << MAX_ALIGN_LOG2][..padded - coded.bytes.len()])
                .map_err(io("write"))?;
            at += padded as u64;
            for (total, part) in classes.iter_mut().zip(&coded.classes) {
                total.add(part);
            }
        }
    }

    let mut header = Header {
        file_len: at,
        shape,
        align_log2,
        layers: layers.len() as u32,
        experts: experts as u32,
        tables: tables.as_ref().map_or(0, |t| t.tables.len() as u32),
        tables_at: HEADER as u64,
        layers_at: layers_at as u64,
        index_at: index_at as u64,
        records_at: records_at as u64,
        fingerprint: fingerprint(&shape, layers, experts, &digests),
        digest: [0; 32],
    };
    let mut front = header.to_bytes().to_vec();
    for t in tables.iter().flat_map(|t| &t.tables) {
        front.extend([t.symbol() as u8, 0, 0, 0]);
        front.extend((t.frequencies().len() as u32).to_le_bytes());
        front.extend([0; 8]);
        front.extend(t.frequencies());
    }
    for (l, number) in layers.iter().enumerate() {
        front.extend(number.to_le_bytes());
        let ids = tables.as_ref().map_or([None; 2], |t| t.of[l]);
        for id in ids {
            front.extend(id.unwrap_or(NO_TABLE).to_le_bytes());
        }
        front.extend([0; 8]);
    }
    front.extend(index);
    front.resize(records_at, 0);
    header.digest = *blake3::hash(&front).as_bytes();
    front[..HEADER].copy_from_slice(&header.to_bytes());
    file.seek(SeekFrom::Start(0)).map_err(io("write"))?;
    file.write_all(&front).map_err(io("write"))?;
    file.as_file().sync_all().map_err(io("flush"))?;
    set_mode(file.as_file()).map_err(io("set the mode of"))?;
    file.persist(out)
        .map_err(|e| ArchiveError::io(out, "rename to", e.error, UNWRITABLE))?;
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(io("flush the directory of"))?;

    let records = (first.iter().enumerate())
        .filter(|(i, first)| i == *first)
        .count();
    let raw_bytes = records as u64 * shape.raw_bytes() as u64;
    let coded_any = classes.iter().any(|c| c.raw < c.matrices);
    Ok(Summary {
        layers: layers.len(),
        experts,
        records,
        symbols: match &tables {
            Some(t) if coded_any && t.symbol == Symbol::Pair => "pair",
            Some(_) if coded_any => "triple",
            _ => "none",
        },
        tables: tables.as_ref().map_or(0, |t| t.tables.len()),
        table_bytes: table_bytes as u64,
        raw_bytes,
        file_bytes: at,
        ratio: at as f64 / raw_bytes as f64,
        gate_up: classes[0],
        down: classes[1],
        fingerprint: super::error::hex(&header.fingerprint),
    })
}

/// Temporary files are private; an archive is as readable as other new files.
#[cfg(unix)]
fn set_mode(file: &File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn set_mode(_: &File) -> std::io::Result<()> {
    Ok(())
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

/// For each expert, by layer and number, the first one with its bits ([`ExpertSource::shared`]).
fn first_with_bits(source: &impl ExpertSource) -> Vec<usize> {
    let (layers, experts) = (source.layers(), source.experts());
    let mut first: Vec<usize> = Vec::with_capacity(layers.len() * experts);
    for (l, layer) in layers.iter().enumerate() {
        for e in 0..experts {
            let i = first.len();
            let other = source.shared(*layer, e).and_then(|(layer, e)| {
                let l = layers[..=l].binary_search(&layer).ok()?;
                first.get(l * experts + e).copied()
            });
            first.push(other.unwrap_or(i));
        }
    }
    first
}

/// Layers that share a record must have the same tables: their counts go to the first of them.
/// For each layer that first one.
fn join_layers(first: &[usize], experts: usize, counts: &mut [Counts]) -> Vec<usize> {
    fn root(of: &[usize], mut l: usize) -> usize {
        while of[l] != l {
            l = of[l];
        }
        l
    }
    let mut of: Vec<usize> = (0..counts.len()).collect();
    for (i, first) in first.iter().enumerate() {
        let (a, b) = (root(&of, i / experts), root(&of, first / experts));
        of[a.max(b)] = a.min(b);
    }
    for l in 0..of.len() {
        let to = root(&of, l);
        of[l] = to;
        if to != l {
            let ours = std::mem::replace(&mut counts[l], Counts::new());
            let theirs = std::mem::replace(&mut counts[to], Counts::new());
            counts[to] = theirs.merge(ours);
        }
    }
    of
}

/// Digests of a layer's raw experts, `first` by the first expert with their bits, and the counts of
/// their symbols; nothing of those that share an earlier one's record. The layer's first expert is
/// number `begin` of all.
fn count_layer(
    source: &impl ExpertSource,
    choice: CodecChoice,
    layer: u32,
    begin: usize,
    first: &[usize],
    progress: &(impl Fn(u64) + Sync),
) -> Result<(Vec<Option<Digest>>, Counts), ArchiveError> {
    let shape = source.shape();
    let experts = first.len();
    let one = |e| {
        if first[e] != begin + e {
            progress(1);
            return Ok((None, None));
        }
        let raw = source.expert(layer, e)?;
        let mut counts = Counts::new();
        for (kind, m) in MatrixKind::ALL.into_iter().zip(&raw) {
            if let Some(s) = m
                .scales
                .iter()
                .find(|s| !(s.is_finite() && s.is_sign_positive()))
            {
                return Err(ArchiveError::Source {
                    path: format!("layer {layer}, expert {e}, {}", kind.name()).into(),
                    what: format!(
                        "expected finite scales that are not negative, found {s}; \
                         make the model directory with `host convert`"
                    ),
                });
            }
            let (rows, cols) = shape.dims(kind);
            // What will stay raw would only spoil the tables.
            let n = nibble_counts(&m.packed);
            let worth = entropy(&n) < (1.0 - LEAST_GAIN) * 8.0 * m.packed.len() as f64;
            let code = worth || choice == CodecChoice::Rans;
            if choice != CodecChoice::Raw && code && Folds::new(cols).is_some() {
                for symbol in [Symbol::Pair, Symbol::Triple] {
                    let counts = &mut counts.of_mut(symbol)[class(kind)];
                    count_symbols(symbol, &m.packed, rows, cols, counts);
                }
            }
        }
        progress(1);
        Ok((Some(super::expert_digest(&raw)), Some(counts)))
    };
    // A few experts a piece: a count of triples takes as long to merge as a small matrix to count.
    let piece = 8;
    let pieces: Vec<_> = (0..experts.div_ceil(piece))
        .into_par_iter()
        .map(|p| {
            let mut digests = Vec::with_capacity(piece);
            let mut counts = Counts::new();
            for e in p * piece..experts.min((p + 1) * piece) {
                let (digest, c) = one(e)?;
                digests.push(digest);
                if let Some(c) = c {
                    counts = counts.merge(c);
                }
            }
            Ok((digests, counts))
        })
        .collect::<Result<_, ArchiveError>>()?;
    let mut digests = Vec::with_capacity(experts);
    let mut counts = Counts::new();
    for (d, c) in pieces {
        digests.extend(d);
        counts = counts.merge(c);
    }
    Ok((digests, counts))
}

/// Groups (layer, class) histograms that one table suits, and makes the tables.
fn choose_tables(symbol: Symbol, counts: &[Counts]) -> Result<Option<Tables>, ArchiveError> {
    struct Cluster {
        counts: Vec<u64>,
        bits: f64,
        members: Vec<usize>,
    }
    let table_bits = 8.0 * (TABLE_HEADER + symbol.alphabet()) as f64;
    let mut clusters: Vec<Cluster> = Vec::new();
    for (l, c) in counts.iter().enumerate() {
        for (k, counts) in c.of(symbol).iter().enumerate() {
            if counts.iter().any(|n| *n > 0) {
                clusters.push(Cluster {
                    bits: entropy(counts),
                    counts: counts.clone(),
                    members: vec![2 * l + k],
                });
            }
        }
    }
    // What merging two costs, in bits; below zero it pays.
    let cost = |a: &Cluster, b: &Cluster| {
        let sum: Vec<u64> = a.counts.iter().zip(&b.counts).map(|(a, b)| a + b).collect();
        let apart = a.bits + b.bits;
        entropy(&sum) - apart - table_bits - SHARING * apart
    };
    let mut costs: Vec<Vec<f64>> = (0..clusters.len())
        .into_par_iter()
        .map(|i| (0..i).map(|j| cost(&clusters[i], &clusters[j])).collect())
        .collect();
    loop {
        let best = (0..clusters.len())
            .flat_map(|i| (0..i).map(move |j| (i, j)))
            .min_by(|a, b| costs[a.0][a.1].total_cmp(&costs[b.0][b.1]));
        let Some((i, j)) = best.filter(|(i, j)| costs[*i][*j] < 0.0) else {
            break;
        };
        let from = clusters.remove(i);
        costs.remove(i);
        for row in costs.iter_mut().skip(i) {
            row.remove(i);
        }
        let into = &mut clusters[j];
        for (a, b) in into.counts.iter_mut().zip(&from.counts) {
            *a += b;
        }
        into.bits = entropy(&into.counts);
        into.members.extend(from.members);
        let new: Vec<f64> = (0..clusters.len())
            .into_par_iter()
            .map(|k| cost(&clusters[j], &clusters[k]))
            .collect();
        for (k, c) in new.into_iter().enumerate() {
            let (hi, lo) = (j.max(k), j.min(k));
            if hi != lo {
                costs[hi][lo] = c;
            }
        }
    }
    if clusters.is_empty() {
        return Ok(None);
    }
    let mut of = vec![[None; 2]; counts.len()];
    let mut tables = Vec::with_capacity(clusters.len());
    for (id, cluster) in clusters.iter().enumerate() {
        for m in &cluster.members {
            of[m / 2][m % 2] = Some(id as u16);
        }
        let table = Table::from_counts(symbol, &cluster.counts);
        tables.push(table.map_err(|e| ArchiveError::Source {
            path: "frequency table".into(),
            what: e.to_string(),
        })?);
    }
    Ok(Some(Tables { symbol, tables, of }))
}

/// Tables over the symbols asked for, or over those that make a sample of the experts smaller.
fn choose_symbols(
    source: &impl ExpertSource,
    options: &PackOptions,
    counts: &[Counts],
) -> Result<Option<Tables>, ArchiveError> {
    if let SymbolChoice::Always(symbol) = options.symbols {
        return choose_tables(symbol, counts);
    }
    let (layers, experts) = (source.layers(), source.experts());
    let all = layers.len() * experts;
    let sample: Vec<usize> = (0..all.min(SAMPLE))
        .map(|i| i * all / all.min(SAMPLE))
        .collect();
    let mut best: Option<(f64, Option<Tables>)> = None;
    for symbol in [Symbol::Triple, Symbol::Pair] {
        let tables = choose_tables(symbol, counts)?;
        let sizes = sample
            .par_iter()
            .map(|i| {
                let l = i / experts;
                let raw = source.expert(layers[l], i % experts)?;
                let coded = code_expert(source.shape(), &raw, options, tables.as_ref(), l);
                Ok(coded.bytes.len() as u64)
            })
            .collect::<Result<Vec<u64>, ArchiveError>>()?;
        let table_bytes: usize = (tables.iter().flat_map(|t| &t.tables))
            .map(|t| TABLE_HEADER + t.frequencies().len())
            .sum();
        let size = sizes.iter().sum::<u64>() as f64 / sample.len() as f64 * all as f64
            + table_bytes as f64;
        if best.as_ref().is_none_or(|(least, _)| size < *least) {
            best = Some((size, tables));
        }
    }
    Ok(best.and_then(|(_, tables)| tables))
}

/// Experts that are coded both ways to choose the symbols.
const SAMPLE: usize = 16;

/// Codes a matrix if that is possible, and worth it where the choice is automatic.
fn code_matrix(
    raw: &RawMatrix<'_>,
    rows: usize,
    cols: usize,
    options: &PackOptions,
    table: Option<&Table>,
) -> Option<Encoded> {
    let table = table?;
    let folds = Folds::new(cols)?;
    let symbol = table.symbol();
    let nibbles = rows * folds.seg_cols();
    let most = rows.div_ceil(symbol.height());
    let default = match symbol {
        Symbol::Pair => PAIR_BLOCK_NIBBLES,
        Symbol::Triple => BLOCK_NIBBLES,
    };
    let unit = options.block_nibbles.unwrap_or(default).max(1);
    let n = ((nibbles + unit / 2) / unit).clamp(1, most);
    let blocks = Blocks::with_blocks(rows, folds, symbol, n)?;
    let coded = encode(&raw.packed, &blocks, table).ok()?;
    let size = coded.stream.len() + 4 * coded.offsets.len();
    let worth = size as f64 <= (1.0 - LEAST_GAIN) * raw.packed.len() as f64;
    (worth || options.codec == CodecChoice::Rans).then_some(coded)
}

/// A record's bytes.
fn code_expert(
    shape: &ExpertShape,
    raw: &[RawMatrix<'_>; 3],
    options: &PackOptions,
    tables: Option<&Tables>,
    layer: usize,
) -> Coded {
    let mut bytes = vec![0; 3 * MATRIX];
    let mut classes = [ClassSummary::default(); 2];
    for (kind, m) in MatrixKind::ALL.into_iter().zip(raw) {
        let (rows, cols) = shape.dims(kind);
        let table = tables.and_then(|t| t.get(layer, kind));
        let coded = code_matrix(m, rows, cols, options, table);
        let mut part = |data: &[u8]| {
            let at = bytes.len();
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
            at as u32
        };
        let (codec, blocks, offsets_at, stream_at, stream_len) = match &coded {
            None => {
                let at = part(&m.packed);
                (Codec::Raw, 0, 0, at, m.packed.len())
            }
            Some(e) => {
                let offsets: Vec<u8> = e.offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
                let offsets_at = part(&offsets);
                let at = part(&e.stream);
                let codec = Codec::Rans(e.blocks.symbol);
                (codec, e.blocks.blocks, offsets_at, at, e.stream.len())
            }
        };
        let (scale_format, scales) = encode_scales(&m.scales);
        let scales_at = part(&scales);
        let head = &mut bytes[MATRIX * kind as usize..][..MATRIX];
        head[0] = match codec {
            Codec::Raw => 0,
            Codec::Rans(Symbol::Pair) => 1,
            Codec::Rans(Symbol::Triple) => 2,
        };
        head[1] = match scale_format {
            ScaleFormat::F32 => 0,
            ScaleFormat::Amax16 => 1,
        };
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
        classes[class(kind)].add(&ClassSummary {
            matrices: 1,
            raw: u64::from(coded.is_none()),
            packed_bytes: m.packed.len() as u64,
            scale_bytes: 4 * m.scales.len() as u64,
            coded_bytes: (stream_len + coded.as_ref().map_or(0, |e| 4 * e.offsets.len())) as u64,
            coded_scale_bytes: scales.len() as u64,
            entropy_bytes: entropy(&nibble_counts(&m.packed)) / 8.0,
        });
    }
    let mut h = blake3::Hasher::new();
    h.update(&bytes);
    Coded {
        checksum: short(&h),
        bytes,
        classes,
    }
}
