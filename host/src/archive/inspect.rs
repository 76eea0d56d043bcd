//! What is in an archive, in numbers.

use rayon::prelude::*;
use serde::Serialize;

use crate::codec::{Codec, entropy, nibble_counts};
use crate::expert::MatrixKind;

use super::error::hex;
use super::format::{TABLE_HEADER, VERSION, class};
use super::verify::going;
use super::{Archive, ArchiveError};

/// A table.
#[derive(Clone, Debug, Serialize)]
pub struct TableInfo {
    /// `pair` or `triple`.
    pub symbols: &'static str,
    /// Bytes in the file.
    pub bytes: usize,
    /// Entropy of its own frequencies, bits a nibble.
    pub bits: f64,
    /// Layers and classes that use it.
    pub users: Vec<String>,
}

/// One of the three matrices, over the experts of a layer that were looked at.
#[derive(Clone, Debug, Serialize)]
pub struct MatrixInfo {
    /// `gate_proj`, `up_proj`, `down_proj`.
    pub name: &'static str,
    /// Matrices in each codec.
    pub codecs: Vec<(&'static str, usize)>,
    /// Streams and block offsets over packed int4.
    pub ratio: f64,
    /// Order-0 entropy of the nibbles over packed int4, each matrix by its own counts.
    pub bound: f64,
    /// Stored scales over f32 scales.
    pub scale_ratio: f64,
}

/// A layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerInfo {
    /// Model layer.
    pub layer: u32,
    /// Records over raw experts, scales included.
    pub ratio: f64,
    /// Experts looked at.
    pub sampled: usize,
    /// Gate, up, down.
    pub matrices: Vec<MatrixInfo>,
}

/// An archive.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// The file.
    pub path: String,
    /// Version of the format.
    pub version: u32,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the raw experts, int4 and f32 scales; of those that share a record once.
    pub raw_bytes: u64,
    /// `file_bytes / raw_bytes`.
    pub ratio: f64,
    /// `file_bytes` over packed int4 alone.
    pub packed_ratio: f64,
    /// Hidden size.
    pub hidden: usize,
    /// Intermediate size.
    pub intermediate: usize,
    /// `int4-row` or `int4-g64`.
    pub experts_format: &'static str,
    /// Alignment of records.
    pub alignment: u64,
    /// Experts of each layer.
    pub experts: usize,
    /// Records: fewer than experts where some share one.
    pub records: usize,
    /// What the raw experts are, hexadecimal.
    pub fingerprint: String,
    /// Tables.
    pub tables: Vec<TableInfo>,
    /// Layers.
    pub layers: Vec<LayerInfo>,
}

/// Sums of one matrix kind.
#[derive(Clone, Default)]
struct Sums {
    codecs: [usize; 4],
    packed: u64,
    coded: u64,
    entropy: f64,
    scales: u64,
    coded_scales: u64,
}

/// Reads an archive's numbers. Entropies come from decoding `sample` experts of each layer, evenly
/// spread; records that are read are checked. `progress` is called with 1 for each of them.
pub fn inspect(
    archive: &Archive,
    sample: usize,
    progress: impl Fn(u64) + Sync,
) -> Result<Inspection, ArchiveError> {
    let shape = archive.shape();
    let experts = archive.experts();
    let sample = sample.clamp(1, experts);
    let layers = archive
        .layers()
        .iter()
        .map(|&layer| {
            let sums = (0..sample)
                .into_par_iter()
                .map(|i| {
                    let sums = one(archive, layer, i * experts / sample)?;
                    progress(1);
                    Ok(sums)
                })
                .collect::<Result<Vec<_>, ArchiveError>>()?;
            let mut bytes = 0;
            for e in 0..experts {
                bytes += archive.bytes(layer, e)?.len();
            }
            Ok(LayerInfo {
                layer,
                ratio: bytes as f64 / (experts * shape.raw_bytes()) as f64,
                sampled: sample,
                matrices: MatrixKind::ALL
                    .iter()
                    .map(|k| total(*k, sums.iter().map(|s| &s[*k as usize])))
                    .collect(),
            })
        })
        .collect::<Result<Vec<_>, ArchiveError>>()?;

    let mut tables: Vec<TableInfo> = archive
        .tables()
        .iter()
        .map(|t| {
            let counts: Vec<u64> = t.frequencies().iter().map(|f| u64::from(*f)).collect();
            let slots: u64 = counts.iter().sum();
            let nibbles = t.symbol().alphabet().ilog2() as f64 / 4.0;
            TableInfo {
                symbols: match t.symbol() {
                    gpu::layout::Symbol::Pair => "pair",
                    gpu::layout::Symbol::Triple => "triple",
                },
                bytes: TABLE_HEADER + counts.len(),
                bits: entropy(&counts) / slots as f64 / nibbles,
                users: vec![],
            }
        })
        .collect();
    for &layer in archive.layers() {
        let records = archive.layer(layer)?;
        for kind in [MatrixKind::Gate, MatrixKind::Down] {
            if let Some((id, _)) = records.table(kind) {
                let user = format!("{layer} {}", super::CLASSES[class(kind)]);
                tables[usize::from(id)].users.push(user);
            }
        }
    }

    let n = archive.records() as u64;
    let packed: u64 = MatrixKind::ALL
        .iter()
        .map(|k| {
            let (rows, cols) = shape.dims(*k);
            n * (rows * cols / 2) as u64
        })
        .sum();
    let raw_bytes = n * shape.raw_bytes() as u64;
    Ok(Inspection {
        path: archive.path().display().to_string(),
        version: VERSION,
        file_bytes: archive.file_len(),
        raw_bytes,
        ratio: archive.file_len() as f64 / raw_bytes as f64,
        packed_ratio: archive.file_len() as f64 / packed as f64,
        hidden: shape.hidden,
        intermediate: shape.intermediate,
        experts_format: shape.scales.name(),
        alignment: 1 << archive.header().align_log2,
        experts,
        records: archive.records(),
        fingerprint: hex(archive.fingerprint()),
        tables,
        layers,
    })
}

fn one(archive: &Archive, layer: u32, expert: usize) -> Result<[Sums; 3], ArchiveError> {
    going()?;
    let record = archive.record(layer, expert)?;
    let mut sums: [Sums; 3] = Default::default();
    for (kind, sums) in MatrixKind::ALL.into_iter().zip(&mut sums) {
        let m = record.matrix(kind);
        let raw = record.decode(kind)?;
        *sums = Sums {
            codecs: Codec::ALL.map(|c| usize::from(c == m.codec)),
            packed: raw.packed.len() as u64,
            coded: (m.offsets.len() + m.stream.len()) as u64,
            entropy: entropy(&nibble_counts(&raw.packed)) / 8.0,
            scales: 4 * raw.scales.len() as u64,
            coded_scales: m.scales.len() as u64,
        };
    }
    Ok(sums)
}

fn total<'a>(kind: MatrixKind, all: impl Iterator<Item = &'a Sums>) -> MatrixInfo {
    let mut sum = Sums::default();
    for s in all {
        for (a, b) in sum.codecs.iter_mut().zip(s.codecs) {
            *a += b;
        }
        sum.packed += s.packed;
        sum.coded += s.coded;
        sum.entropy += s.entropy;
        sum.scales += s.scales;
        sum.coded_scales += s.coded_scales;
    }
    MatrixInfo {
        name: kind.name(),
        codecs: (Codec::ALL.iter().zip(sum.codecs))
            .filter(|(_, n)| *n > 0)
            .map(|(c, n)| (c.name(), n))
            .collect(),
        ratio: sum.coded as f64 / sum.packed as f64,
        bound: sum.entropy / sum.packed as f64,
        scale_ratio: sum.coded_scales as f64 / sum.scales as f64,
    }
}
