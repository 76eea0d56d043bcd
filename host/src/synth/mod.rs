//! Synthetic models: the geometry of real ones, Gaussian weights.
//!
//! Such a model computes as the real one does, byte for byte of weights and choice for choice of
//! experts; what it says means nothing. Routed experts are Gaussian weights through the int4 rule
//! ([`crate::bench::synth`]); a few of them may stand for all in the archive, whose index names their
//! records again and again, while whoever loads the model holds each expert by itself. Dense weights
//! are pieces of one pool of Gaussian numbers, at places that the seed chooses. The router's
//! correction bias gives the use of experts a chosen skew ([`router`]).

pub mod router;
mod shapes;
mod staged;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use gpu::layout::Symbol;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use crate::archive::target::Target;
use crate::archive::{
    Archive, ArchiveError, ExpertSource, PackOptions, Summary, SymbolChoice, pack,
};
use crate::bench::synth::{self, Rng};
use crate::convert::{DenseFormat, to_int8};
use crate::expert::{ExpertShape, RawMatrix, ScaleKind};
use crate::interrupt;
use crate::model::directory::{ARCHIVE_FILE, DENSE_FILE, EXPERTS_KEY, FINGERPRINT_KEY};
use crate::model::inventory;
use crate::model::shards::SCALES;
use crate::model::tensors::{Entry, TensorWriter};
use crate::model::{Config, ModelError, hex};
use crate::placement::profile::{self, ProfileError};
pub use router::Skew;
pub use shapes::Shape;
use staged::Staged;

/// What to make.
#[derive(Clone, Debug)]
pub struct Options {
    /// Geometry.
    pub shape: Shape,
    /// Layers; by default as many as the real model has.
    pub layers: Option<usize>,
    /// Whether it has the layer that drafts besides.
    pub mtp: bool,
    /// Distinct experts, which stand for all.
    pub distinct: usize,
    /// Scales of the experts.
    pub scales: ScaleKind,
    /// Of all random numbers.
    pub seed: u64,
    /// Use of experts; `None`: all alike.
    pub skew: Option<Skew>,
    /// Share of each layer's experts, the most used, whose records are plane3.
    pub hot: f64,
    /// GPU architecture that the archive is for; without one pairs, which fit all.
    pub target: Option<Target>,
    /// Symbols of rans in place of what suits the target.
    pub symbols: Option<Symbol>,
    /// As [`PackOptions::block_nibbles`].
    pub block_nibbles: Option<usize>,
    /// Format of the dense matrices that a conversion would quantise.
    pub dense: DenseFormat,
    /// A `tokenizer.json` to copy; by default one of single bytes.
    pub tokenizer: Option<PathBuf>,
}

/// What was made.
#[derive(Clone, Debug)]
pub struct Made {
    /// Its geometry.
    pub config: Config,
    /// Bytes of dense tensors.
    pub dense_bytes: u64,
    /// The archive.
    pub archive: Summary,
    /// Share of selections that the most used experts of [`Skew::experts`] get, as simulated.
    pub covered: Option<f64>,
}

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Its archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// Its usage profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Options that cannot be met.
    #[error("{0}")]
    Options(String),
}

/// Experts of which the first few stand for all: of those in plane3 their first few, and of the others
/// theirs.
struct Experts {
    shape: ExpertShape,
    layers: Vec<u32>,
    experts: usize,
    seed: u64,
    /// For each expert, by layer and number, the first one with its bits.
    first: Vec<usize>,
}

/// For each of the experts, some of which are hot, the first one with its bits, where `distinct` stand
/// for all.
fn stand_ins(hot: &[bool], distinct: usize) -> Vec<usize> {
    let all = hot.iter().filter(|h| **h).count();
    let of_hot = match all {
        0 => 0,
        n if n == hot.len() => distinct,
        // At least one of each kind.
        n => (distinct * n / hot.len()).clamp(1, distinct.max(2) - 1),
    };
    let most = [distinct.max(of_hot + 1) - of_hot, of_hot];
    let mut stand_ins: [Vec<usize>; 2] = Default::default();
    let mut seen = [0; 2];
    (hot.iter().enumerate())
        .map(|(i, hot)| {
            let kind = usize::from(*hot);
            let of_kind = &mut stand_ins[kind];
            if of_kind.len() < most[kind] {
                of_kind.push(i);
            }
            seen[kind] += 1;
            of_kind[(seen[kind] - 1) % most[kind]]
        })
        .collect()
}

impl Experts {
    fn number(&self, layer: u32, expert: usize) -> Option<usize> {
        let l = self.layers.binary_search(&layer).ok()?;
        (expert < self.experts).then_some(l * self.experts + expert)
    }
}

impl ExpertSource for Experts {
    fn shape(&self) -> &ExpertShape {
        &self.shape
    }

    fn layers(&self) -> &[u32] {
        &self.layers
    }

    fn experts(&self) -> usize {
        self.experts
    }

    fn expert(&self, layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        let Some(i) = self.number(layer, expert) else {
            return Err(ArchiveError::Missing {
                path: "synthetic experts".into(),
                layer,
                expert,
            });
        };
        let i = self.first[i] as u64;
        Ok(synth::expert(mix(self.seed, i), &self.shape))
    }

    fn shared(&self, layer: u32, expert: usize) -> Option<(u32, usize)> {
        let i = self.number(layer, expert)?;
        let first = self.first[i];
        let place = (self.layers[first / self.experts], first % self.experts);
        (first != i).then_some(place)
    }
}

/// A seed of its own for part `i`.
fn mix(seed: u64, i: u64) -> u64 {
    Rng::new(seed ^ i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).bits()
}

/// Makes the model directory `to`, which must be new or empty. `progress` gets a phase, and how many of
/// its bytes are done.
pub fn synthesise(
    options: &Options,
    to: &Path,
    progress: impl Fn(Phase, u64, u64) + Sync,
) -> Result<Made, SynthError> {
    let staged = Staged::new(to)?;
    let dir = staged.path();
    write(
        &dir.join("config.json"),
        options
            .shape
            .config(options.layers, options.mtp)?
            .as_bytes(),
    )?;
    let tokenizer = match &options.tokenizer {
        Some(file) => crate::files::read(file)
            .map_err(|e| ModelError::io(file, e, "give a tokenizer.json (--tokenizer)"))?,
        None => shapes::byte_tokenizer().into_bytes(),
    };
    write(&dir.join("tokenizer.json"), &tokenizer)?;
    let mut config = Config::read(dir)?;
    config.mtp = options.mtp;
    let config = config;
    // Refused here rather than after all is written.
    let read = crate::tokenizer::Tokenizer::read(dir, &config);
    read.map_err(|e| of_given(e, options.tokenizer.as_deref()))?;

    let layers: Vec<u32> = config.sparse_layers().map(|l| l as u32).collect();
    let all = layers.len() * config.router.experts;
    if options.distinct == 0 || options.distinct > all {
        return Err(SynthError::Options(format!(
            "--distinct-experts {}: expected 1 to {all}, the experts of the model",
            options.distinct
        )));
    }
    let n = config.router.experts;
    let most = (options.hot * n as f64).round() as usize;
    let mut hot = vec![false; all];
    for (l, layer) in layers.iter().enumerate() {
        for e in router::hottest(n, *layer, options.seed, most) {
            hot[l * n + e] = true;
        }
    }
    let place = |(i, _): (usize, &bool)| (layers[i / n], i % n);
    let shape = config.expert_shape(options.scales);
    let pack_options = PackOptions {
        hot: hot
            .iter()
            .enumerate()
            .filter(|(_, h)| **h)
            .map(place)
            .collect(),
        symbols: match (options.symbols, &options.target) {
            (Some(symbol), _) => SymbolChoice::Always(symbol),
            (None, Some(target)) => SymbolChoice::Always(target.symbol(&shape)),
            (None, None) => SymbolChoice::Auto,
        },
        block_nibbles: options.block_nibbles,
        ..PackOptions::default()
    };
    let experts = Experts {
        shape,
        first: stand_ins(&hot, options.distinct),
        layers,
        experts: n,
        seed: mix(options.seed, u64::MAX),
    };
    let file = dir.join(ARCHIVE_FILE);
    let done = AtomicU64::new(0);
    let summary = pack(
        &experts,
        &pack_options,
        &file,
        |step| {
            let done = done.fetch_add(step.bytes, Ordering::Relaxed) + step.bytes;
            progress(Phase::Experts, done, 2 * all as u64 * step.bytes);
        },
        interrupt::requested,
    );
    let summary = summary.map_err(of_directory)?;
    let archive = Archive::open(&file)?;

    let routing = router::routing(&config.router, options.skew, mix(options.seed, 1))
        .map_err(SynthError::Options)?;
    let usage = router::usage(&routing, &experts.layers, options.seed);
    usage.write(&dir.join(profile::FILE))?;

    let fingerprint = hex(archive.fingerprint());
    let metadata = [
        ("format", "pt"),
        (EXPERTS_KEY, options.scales.name()),
        (FINGERPRINT_KEY, &fingerprint),
    ];
    let dense_bytes = write_dense(dir, &config, &metadata, options, &routing, |done, all| {
        progress(Phase::Dense, done, all);
    })?;
    staged.commit()?;
    Ok(Made {
        config,
        dense_bytes,
        archive: summary,
        covered: routing.covered,
    })
}

/// What is wrong with the copy of a file is wrong with the file.
fn of_given(e: ModelError, given: Option<&Path>) -> ModelError {
    match (e, given) {
        (
            ModelError::Field {
                field,
                expected,
                found,
                ..
            },
            Some(file),
        ) => ModelError::field(
            file,
            field,
            expected,
            found,
            "give a tokenizer.json that suits the shape (--tokenizer)",
        ),
        (e, _) => e,
    }
}

/// What is wrong with an archive that goes with its directory.
fn of_directory(e: ArchiveError) -> SynthError {
    match e {
        ArchiveError::Interrupted { .. } => ModelError::Interrupted.into(),
        ArchiveError::Io { path, source, .. } => {
            ModelError::io(&path, source, "check the space left on the disk").into()
        }
        e => e.into(),
    }
}

/// Part of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Bytes of raw experts, counted and coded.
    Experts,
    /// Bytes of dense tensors.
    Dense,
}

fn write(file: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    fs::write(file, bytes).map_err(|e| ModelError::io(file, e, "check the space left on the disk"))
}

/// Numbers of the pool: 8 MiB as bf16, which second-level caches hold in part.
const POOL: usize = 1 << 22;
/// Numbers taken from one place of the pool.
const PIECE: usize = 1 << 12;

/// What a dense tensor is filled with.
enum Fill<'a> {
    /// Gaussian numbers.
    Normal(f64),
    /// One number.
    Constant(f32),
    /// f32, as they are.
    Given(&'a [f32]),
}

/// How a tensor is filled. Matrices have the standard deviation 0.02 of the published initialiser;
/// what writes to the residual stream has less, so that it does not grow with depth; embeddings have
/// 1, so that tokens differ.
fn fill<'a>(name: &str, layers: usize, bias: &'a [f32], router: f64) -> Fill<'a> {
    let ends = |s: &str| name.ends_with(s);
    if ends("e_score_correction_bias") {
        Fill::Given(bias)
    } else if ends("mlp.gate.weight") {
        Fill::Normal(router)
    } else if ends("norm.weight") {
        Fill::Constant(1.0)
    } else if ends(".bias") {
        Fill::Constant(0.0)
    } else if ends("embed_tokens.weight") {
        Fill::Normal(1.0)
    } else if ends("o_proj.weight") || ends("down_proj.weight") {
        Fill::Normal(0.02 / (2.0 * layers as f64).sqrt())
    } else {
        Fill::Normal(0.02)
    }
}

fn write_dense(
    dir: &Path,
    config: &Config,
    metadata: &[(&str, &str)],
    options: &Options,
    routing: &router::Routing,
    mut progress: impl FnMut(u64, u64),
) -> Result<u64, SynthError> {
    let mut tensors = inventory(config);
    let is_bias = |name: &str| name.ends_with("e_score_correction_bias");
    let narrow =
        |name: &str, shape: &[usize]| options.dense == DenseFormat::Int8Row && to_int8(name, shape);
    // Wide elements first: every tensor then starts at a multiple of its element size.
    tensors.sort_by_key(|(name, shape)| (!is_bias(name), narrow(name, shape)));
    let router_sigma = router::LOGIT_SIGMA / (config.hidden as f64).sqrt();
    let entry = |name: String, dtype, shape: Vec<usize>, size: usize| Entry {
        name,
        dtype,
        bytes: shape.iter().product::<usize>() * size,
        shape,
    };
    // Scales of all int8 matrices, then everything else.
    let mut entries = Vec::new();
    let mut scales = Vec::new();
    for (name, shape) in tensors.iter().filter(|(name, shape)| narrow(name, shape)) {
        if let Fill::Normal(sigma) = fill(name, config.layers.len(), &[], router_sigma) {
            entries.push(entry(
                format!("{name}{SCALES}"),
                Dtype::F32,
                vec![shape[0]],
                4,
            ));
            scales.push((sigma * INT8_AMAX / 127.0) as f32);
        }
    }
    entries.extend(tensors.iter().map(|(name, shape)| {
        let (name, shape) = (name.clone(), shape.clone());
        match () {
            () if is_bias(&name) => entry(name, Dtype::F32, shape, 4),
            () if narrow(&name, &shape) => entry(name, Dtype::U8, vec![shape.iter().product()], 1),
            () => entry(name, Dtype::BF16, shape, 2),
        }
    }));
    let all: u64 = entries.iter().map(|e| e.bytes as u64).sum();
    let pool = pool(mix(options.seed, 2));
    let mut scaled: (f64, Vec<u16>) = (f64::NAN, Vec::new());
    let bytes: Vec<u8> = match options.dense {
        DenseFormat::Int8Row => pool.par_iter().map(|x| int8_of(*x) as u8).collect(),
        DenseFormat::Verbatim | DenseFormat::Bf16 => Vec::new(),
    };
    let mut out = TensorWriter::create(&dir.join(DENSE_FILE), entries.clone(), metadata)?;
    let mut done = 0;
    for (entry, scale) in entries.iter().zip(&scales) {
        let row: Vec<u8> = scale.to_le_bytes().repeat(entry.bytes / 4);
        out.write(&row)?;
        done += entry.bytes as u64;
    }
    let entries = &entries[scales.len()..];
    for (i, (entry, (name, shape))) in entries.iter().zip(&tensors).enumerate() {
        let layer = name
            .strip_prefix("model.layers.")
            .and_then(|s| s.split('.').next());
        let layer = layer.and_then(|l| l.parse::<u32>().ok()).unwrap_or(0);
        let bias = if is_bias(name) {
            routing.bias_of(layer, options.seed)
        } else {
            Vec::new()
        };
        match fill(name, config.layers.len(), &bias, router_sigma) {
            Fill::Given(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                out.write(&bytes)?;
            }
            Fill::Constant(value) => {
                let one = half::bf16::from_f32(value).to_le_bytes();
                out.write(&one.repeat(entry.bytes / 2))?;
            }
            Fill::Normal(_) if narrow(name, shape) => {
                let mut places = Rng::new(mix(options.seed, 1000 + i as u64));
                out.write_parts(|part| {
                    for piece in part.chunks_mut(PIECE) {
                        let at = (places.bits() % (POOL - PIECE) as u64) as usize;
                        piece.copy_from_slice(&bytes[at..at + piece.len()]);
                    }
                })?;
            }
            Fill::Normal(sigma) => {
                if scaled.0 != sigma {
                    let narrow = |x: &f32| half::bf16::from_f64(f64::from(*x) * sigma).to_bits();
                    scaled = (sigma, pool.par_iter().map(narrow).collect());
                }
                let mut places = Rng::new(mix(options.seed, 1000 + i as u64));
                out.write_parts(|part| {
                    for piece in part.chunks_mut(2 * PIECE) {
                        let at = (places.bits() % (POOL - PIECE) as u64) as usize;
                        let from = &scaled.1[at..at + piece.len() / 2];
                        for (to, x) in piece.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                            *to = x.to_le_bytes();
                        }
                    }
                })?;
            }
        }
        done += entry.bytes as u64;
        progress(done, all);
        if interrupt::requested() {
            return Err(ModelError::Interrupted.into());
        }
    }
    out.finish()?;
    Ok(all)
}

/// Standard deviations that the largest byte stands for: a row of a few thousand Gaussian weights has
/// about one beyond 3.7.
const INT8_AMAX: f64 = 4.0;

/// A standard normal number as a byte.
fn int8_of(x: f32) -> i8 {
    (f64::from(x) * 127.0 / INT8_AMAX)
        .round()
        .clamp(-127.0, 127.0) as i8
}

/// Standard normal numbers.
fn pool(seed: u64) -> Vec<f32> {
    const RUN: usize = 1 << 16;
    (0..POOL / RUN)
        .into_par_iter()
        .flat_map_iter(|i| Rng::new(mix(seed, i as u64)).normals(RUN))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stand_ins_are_of_their_kind_and_as_many_as_asked_for() {
        for (all, every, distinct) in [(96, 4, 32), (96, 4, 2), (96, 4, 96), (7, 3, 5), (8, 1, 3)] {
            let hot: Vec<bool> = (0..all).map(|i| i % every == 0).collect();
            let first = stand_ins(&hot, distinct);
            let mut own: Vec<usize> = first.clone();
            own.sort_unstable();
            own.dedup();
            assert_eq!(own.len(), distinct, "{all} {every} {distinct}");
            for (i, f) in first.iter().enumerate() {
                assert!(*f <= i && hot[*f] == hot[i] && first[*f] == *f);
            }
        }
        assert_eq!(stand_ins(&[false; 4], 2), [0, 1, 0, 1]);
        // One cannot stand for two kinds.
        assert_eq!(stand_ins(&[true, false, true], 1), [0, 1, 0]);
    }
}
