//! The first pass of packing: what the raw experts are, how often they have which symbols, and the
//! frequency tables that follow.

use gpu::layout::{Folds, Symbol};
use rayon::prelude::*;

use crate::archive::error::ArchiveError;
use crate::archive::format::{Digest, TABLE_HEADER, class};
use crate::archive::source::ExpertSource;
use crate::codec::{Codec, Table, count_symbols, entropy, nibble_counts};
use crate::expert::MatrixKind;

use super::{PackOptions, Phase, Step};

/// A shared table may cost this share of the coded bytes more than two: tables take device memory
/// and cache, expanded to 16 or 128 KiB each.
const SHARING: f64 = 2e-4;

/// What the first pass sees of an expert.
#[derive(Clone, Copy)]
pub struct Seen {
    /// Of the raw expert.
    pub digest: Digest,
    /// Order-0 entropy of the nibbles of gate, up and down, bytes.
    pub entropy: [f64; 3],
}

/// Symbol counts of a layer's classes.
#[derive(Clone)]
pub struct Counts([Vec<u64>; 2]);

impl Counts {
    fn new(symbol: Symbol) -> Self {
        Self(std::array::from_fn(|_| vec![0; symbol.alphabet()]))
    }

    fn merge(mut self, other: &Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            for (a, b) in a.iter_mut().zip(b) {
                *a += b;
            }
        }
        self
    }
}

/// Tables, and which of them each (layer, class) uses.
pub struct Tables {
    pub tables: Vec<Table>,
    pub of: Vec<[Option<u16>; 2]>,
}

impl Tables {
    /// Number and table of a matrix.
    pub fn get(&self, layer: usize, kind: MatrixKind) -> Option<(u16, &Table)> {
        let id = self.of[layer][class(kind)]?;
        Some((id, &self.tables[usize::from(id)]))
    }

    /// Their bytes in the file.
    pub fn bytes(&self) -> usize {
        (self.tables.iter())
            .map(|t| TABLE_HEADER + t.frequencies().len())
            .sum()
    }
}

/// For each expert, by layer and number, the first one with its bits ([`ExpertSource::shared`]) and
/// its codec.
pub fn first_with_bits(source: &impl ExpertSource, options: &PackOptions) -> Vec<usize> {
    let (layers, experts) = (source.layers(), source.experts());
    let mut first: Vec<usize> = Vec::with_capacity(layers.len() * experts);
    for (l, layer) in layers.iter().enumerate() {
        for e in 0..experts {
            let i = first.len();
            let codec = options.codec_of(*layer, e);
            let other = source.shared(*layer, e).and_then(|(layer, e)| {
                let l = layers[..=l].binary_search(&layer).ok()?;
                let same = options.codec_of(layer, e) == codec;
                first.get(l * experts + e).copied().filter(|_| same)
            });
            first.push(other.unwrap_or(i));
        }
    }
    first
}

/// Layers that share a record must have the same tables: their counts go to the first of them.
/// For each layer that first one.
fn join_layers(
    first: &[usize],
    experts: usize,
    counts: &mut [Counts],
    symbol: Symbol,
) -> Vec<usize> {
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
            let ours = std::mem::replace(&mut counts[l], Counts::new(symbol));
            let theirs = std::mem::replace(&mut counts[to], Counts::new(symbol));
            counts[to] = theirs.merge(&ours);
        }
    }
    of
}

/// Looks at all raw experts once: what they are, and the tables they ask for. `first` is by
/// [`first_with_bits`], `going` an error once packing is to stop.
pub fn survey(
    source: &impl ExpertSource,
    options: &PackOptions,
    first: &[usize],
    progress: &(impl Fn(Step) + Sync),
    going: &(impl Fn() -> Result<(), ArchiveError> + Sync),
) -> Result<(Vec<Seen>, Tables), ArchiveError> {
    let (experts, symbol) = (source.experts(), options.symbol());
    let mut counts = Vec::with_capacity(source.layers().len());
    let mut seen: Vec<Seen> = Vec::with_capacity(first.len());
    for l in 0..source.layers().len() {
        let of_layer = &first[l * experts..(l + 1) * experts];
        let (these, layer_counts) = survey_layer(source, options, l, of_layer, progress, going)?;
        for (this, first) in these.into_iter().zip(of_layer) {
            seen.push(this.unwrap_or_else(|| seen[*first]));
        }
        counts.push(layer_counts);
    }
    let joined = join_layers(first, experts, &mut counts, symbol);
    let mut tables = choose_tables(symbol, &counts)?;
    tables.of = joined.iter().map(|l| tables.of[*l]).collect();
    Ok((seen, tables))
}

/// The experts of layer number `l` of all, nothing of those that share an earlier one's record, and
/// the counts of what rANS will code.
fn survey_layer(
    source: &impl ExpertSource,
    options: &PackOptions,
    l: usize,
    first: &[usize],
    progress: &(impl Fn(Step) + Sync),
    going: &(impl Fn() -> Result<(), ArchiveError> + Sync),
) -> Result<(Vec<Option<Seen>>, Counts), ArchiveError> {
    let (shape, layer, experts) = (source.shape(), source.layers()[l], first.len());
    let symbol = options.symbol();
    let step = Step {
        phase: Phase::Count,
        bytes: shape.raw_bytes() as u64,
    };
    let one = |e: usize, counts: &mut Counts| {
        going()?;
        if first[e] != l * experts + e {
            progress(step);
            return Ok(None);
        }
        let raw = source.expert(layer, e)?;
        let rans = matches!(options.codec_of(layer, e), Codec::Rans(_));
        let mut bits = [0.0; 3];
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
            let n = entropy(&nibble_counts(&m.packed));
            bits[kind as usize] = n / 8.0;
            // What will stay raw would only spoil the tables.
            let worth = n < (1.0 - options.least_saving) * 8.0 * m.packed.len() as f64;
            if rans && worth && Folds::new(cols).is_some() {
                let counts = &mut counts.0[class(kind)];
                count_symbols(symbol, &m.packed, rows, cols, counts);
            }
        }
        progress(step);
        Ok(Some(Seen {
            digest: crate::archive::expert_digest(&raw),
            entropy: bits,
        }))
    };
    // A few experts a piece: a count of triples takes as long to merge as a small matrix to count.
    let piece = 8;
    let pieces: Vec<_> = (0..experts.div_ceil(piece))
        .into_par_iter()
        .map(|p| {
            let mut counts = Counts::new(symbol);
            let seen = (p * piece..experts.min((p + 1) * piece))
                .map(|e| one(e, &mut counts))
                .collect::<Result<Vec<_>, ArchiveError>>()?;
            Ok((seen, counts))
        })
        .collect::<Result<_, ArchiveError>>()?;
    let mut seen = Vec::with_capacity(experts);
    let mut counts = Counts::new(symbol);
    for (s, c) in pieces {
        seen.extend(s);
        counts = counts.merge(&c);
    }
    Ok((seen, counts))
}

/// Groups (layer, class) histograms that one table suits, and makes the tables.
fn choose_tables(symbol: Symbol, counts: &[Counts]) -> Result<Tables, ArchiveError> {
    struct Cluster {
        counts: Vec<u64>,
        bits: f64,
        members: Vec<usize>,
    }
    let table_bits = 8.0 * (TABLE_HEADER + symbol.alphabet()) as f64;
    let mut clusters: Vec<Cluster> = Vec::new();
    for (l, c) in counts.iter().enumerate() {
        for (k, counts) in c.0.iter().enumerate() {
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
    Ok(Tables { tables, of })
}
