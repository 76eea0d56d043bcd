//! From a Hugging Face checkpoint to a model directory.
//!
//! Routed experts go through the int4 rule: per row, or per 64 columns of a row,
//! `s = max(amax / 7, 1e-8)` and `q = clip(rint(w / s), -8, 7)`, all in f32 with IEEE division,
//! `rint` to even. Those of the layer that drafts become int8 as containers have them, `s = max(amax /
//! 127, 1e-8)` a row and `q = clip(rint(w / s), -128, 127)`, where the others have row scales. Every other
//! tensor keeps its bytes, unless it is fp8 (bf16 then) or int8 rows are asked for. Memory in use is two
//! experts a thread.

mod staged;

pub use staged::partial_path;

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use safetensors::tensor::Dtype;

use crate::archive::{Digest, LOW_NIBBLES, expert_digest, fingerprint};
use crate::expert::{MatrixKind, RawMatrix, ScaleKind, int8_nibbles};
use crate::interrupt;
use crate::model::config::Config;
use crate::model::directory::{
    DENSE_FILE, EXPERTS_FILE, EXPERTS_KEY, FINGERPRINT_KEY, expert_tensor,
};
use crate::model::error::ModelError;
use crate::model::format::{FP8_BLOCK, Format, Weight};
use crate::model::inventory;
use crate::model::shards::{SCALES, Shards};
use crate::model::tensors::{Entry, TensorWriter};
use crate::model::{hex, mtp};
use staged::Staged;

const FETCH: &str = "fetch the checkpoint again";

/// How much work an interruption may cost.
const SYNC: Duration = Duration::from_secs(20);

/// Files that go over verbatim where they are there.
const COPIED: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// What a conversion did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Dense tensors copied.
    pub dense_tensors: usize,
    /// Their bytes.
    pub dense_bytes: u64,
    /// Those that bf16 does not hold exactly, and that became bf16.
    pub rounded: usize,
    /// Experts quantised.
    pub experts: usize,
    /// Of them those of int8.
    pub int8_experts: usize,
    /// Bytes of their nibbles and scales.
    pub expert_bytes: u64,
    /// Tensors left out: those of layers that are not read, and the copies of embedding and head
    /// that a layer that drafts may have.
    pub left_out: usize,
}

/// Whether a tensor belongs to the routed experts, and to which layer any tensor belongs.
fn place(name: &str) -> (Option<usize>, bool) {
    let Some(rest) = name.strip_prefix("model.layers.") else {
        return (None, false);
    };
    let Some((layer, rest)) = rest.split_once('.') else {
        return (None, false);
    };
    (layer.parse().ok(), rest.starts_with("mlp.experts."))
}

/// The three matrices of an expert: tensors of their own, or slices of the fused ones
/// `experts.gate_up_proj` `[experts, 2 * intermediate, hidden]` (gate rows first) and
/// `experts.down_proj` `[experts, hidden, intermediate]`.
fn expert_weights<'a>(
    checkpoint: &'a Shards,
    config: &Config,
    layer: usize,
    e: usize,
) -> Result<[Weight<'a>; 3], ModelError> {
    let (h, i, n) = (
        config.hidden,
        config.moe_intermediate,
        config.router.experts,
    );
    let fused = format!("model.layers.{layer}.mlp.experts.gate_up_proj");
    if checkpoint.get(&fused).is_some() {
        let gate_up = checkpoint.weight(&fused, &[n, 2 * i, h])?;
        let name = format!("model.layers.{layer}.mlp.experts.down_proj");
        let down = checkpoint.weight(&name, &[n, h, i])?;
        if gate_up.format == Format::Fp8Block && i % FP8_BLOCK != 0 {
            let want = format!("a multiple of {FP8_BLOCK} rows of gate, where it is fp8 with up");
            return Err(checkpoint.wrong(&fused, want, i));
        }
        checkpoint.check_scales(&fused, &gate_up, true)?;
        checkpoint.check_scales(&name, &down, true)?;
        let part = |t: &Weight<'a>, parts: usize, at: usize, rows: usize, cols: usize| {
            let (len, scales) = (t.bytes.len() / parts, t.scales.len() / parts);
            Weight {
                format: t.format,
                rows,
                cols,
                bytes: &t.bytes[at * len..(at + 1) * len],
                scales: t.scales[at * scales..(at + 1) * scales].to_vec().into(),
            }
        };
        return Ok([
            part(&gate_up, 2 * n, 2 * e, i, h),
            part(&gate_up, 2 * n, 2 * e + 1, i, h),
            part(&down, n, e, h, i),
        ]);
    }
    let one = |kind: MatrixKind| -> Result<Weight<'a>, ModelError> {
        let (rows, cols) = config.expert_shape(ScaleKind::Row).dims(kind);
        checkpoint.weight(&expert_tensor(layer, e, kind), &[rows, cols])
    };
    Ok([
        one(MatrixKind::Gate)?,
        one(MatrixKind::Up)?,
        one(MatrixKind::Down)?,
    ])
}

/// A quantised matrix: packed nibbles, or bytes, and scales; or the index of a weight that is not finite.
type Quantised = Result<(Vec<u8>, Vec<f32>), usize>;

/// How a layer's experts become integers.
#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Int4(ScaleKind),
    Int8,
}

impl Rule {
    /// Of layer `l`.
    fn of(l: usize, config: &Config, options: &Options) -> Self {
        match options.mtp {
            MtpFormat::Int8 if l == config.layers.len() => Self::Int8,
            _ => Self::Int4(options.experts),
        }
    }

    fn scales(self) -> ScaleKind {
        match self {
            Self::Int4(scales) => scales,
            Self::Int8 => ScaleKind::Row,
        }
    }

    /// Bytes of so many weights.
    fn bytes(self, weights: usize) -> usize {
        match self {
            Self::Int4(_) => weights / 2,
            Self::Int8 => weights,
        }
    }

    /// Digests of an expert: of int8 one for each half of its nibbles.
    fn digests(self, bytes: [(Vec<u8>, Vec<f32>); 3]) -> Vec<Digest> {
        let halves: &[Option<bool>] = match self {
            Self::Int4(_) => &[None],
            Self::Int8 => &[Some(false), Some(true)],
        };
        (halves.iter())
            .map(|half| {
                expert_digest(&bytes.each_ref().map(|(bytes, scales)| RawMatrix {
                    packed: match half {
                        None => bytes.into(),
                        Some(low) => int8_nibbles(bytes, *low).into(),
                    },
                    scales: scales.into(),
                }))
            })
            .collect()
    }
}

fn quantise(w: &Weight<'_>, rule: Rule) -> Quantised {
    let span = match rule.scales() {
        ScaleKind::Row => w.cols,
        ScaleKind::G64 => gpu::arith::GROUP,
    };
    let n = w.len();
    let mut packed = Vec::with_capacity(rule.bytes(n));
    let mut out = Vec::with_capacity(n / span);
    let mut values = vec![0.0; span];
    for at in (0..n).step_by(span) {
        w.widen(at, &mut values);
        if let Some(bad) = values.iter().position(|w| !w.is_finite()) {
            return Err(at + bad);
        }
        if rule == Rule::Int8 {
            let s = int8_scale(&values);
            out.push(s);
            packed.extend(values.iter().map(|w| int8(*w, s) as u8));
            continue;
        }
        let s = int4_scale(&values);
        out.push(s);
        for pair in values.as_chunks::<2>().0 {
            packed.push(int4(pair[0], s) | int4(pair[1], s) << 4);
        }
    }
    Ok((packed, out))
}

/// The scale of weights that share one: `max(amax / 7, 1e-8)`.
pub fn int4_scale(weights: &[f32]) -> f32 {
    let amax = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    (amax / 7.0).max(1e-8)
}

/// The scale of a row of int8 weights: `max(amax / 127, 1e-8)`.
pub fn int8_scale(weights: &[f32]) -> f32 {
    let amax = weights.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    (amax / 127.0).max(1e-8)
}

/// A weight's byte.
pub fn int8(weight: f32, scale: f32) -> i8 {
    (weight / scale).round_ties_even().clamp(-128.0, 127.0) as i8
}

/// A weight's nibble, `q + 8`.
pub fn int4(weight: f32, scale: f32) -> u8 {
    ((weight / scale).round_ties_even().clamp(-8.0, 7.0) as i8 + 8) as u8
}

/// Number format of the dense matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DenseFormat {
    /// As they are; fp8 becomes bf16.
    #[default]
    Verbatim,
    /// bf16, but for norms, routers and indexer weights.
    Bf16,
    /// Signed bytes with a scale a row, but for norms, routers and indexer weights.
    Int8Row,
}

/// Number format of the experts of the layer that drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MtpFormat {
    /// That of all others.
    Int4,
    /// Signed bytes with a scale a row; beside others with row scales alone.
    Int8,
}

/// How to convert.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Scales of the experts.
    pub experts: ScaleKind,
    /// The layer that drafts, where there is one.
    pub mtp: MtpFormat,
    /// The dense part.
    pub dense: DenseFormat,
    /// Replace what is there.
    pub force: bool,
    /// Go on with what an interrupted conversion left.
    pub resume: bool,
}

impl Options {
    /// The experts with these scales, those of the layer that drafts in int8 where these are row scales, all
    /// else verbatim, nothing replaced or resumed.
    pub fn new(experts: ScaleKind) -> Self {
        Self {
            experts,
            mtp: match experts {
                ScaleKind::Row => MtpFormat::Int8,
                ScaleKind::G64 => MtpFormat::Int4,
            },
            dense: DenseFormat::Verbatim,
            force: false,
            resume: false,
        }
    }
}

/// What a conversion is of: options, configuration, and names, lengths and times of the shards.
fn identity(from: &Path, checkpoint: &Shards, options: &Options) -> Result<String, ModelError> {
    let mut h = blake3::Hasher::new();
    let Options {
        experts,
        mtp,
        dense,
        ..
    } = options;
    h.update(format!("ansatz convert 3 {experts:?} {mtp:?} {dense:?}").as_bytes());
    let config = from.join("config.json");
    h.update(&fs::read(&config).map_err(|e| ModelError::io(&config, e, FETCH))?);
    for file in checkpoint.files() {
        let of = || -> std::io::Result<String> {
            let meta = fs::metadata(file.path())?;
            let time = meta.modified()?.duration_since(std::time::UNIX_EPOCH);
            let name = file
                .path()
                .file_name()
                .unwrap_or_default()
                .to_string_lossy();
            Ok(format!(
                "{name} {} {};",
                meta.len(),
                time.unwrap_or_default().as_nanos()
            ))
        };
        h.update(
            of().map_err(|e| ModelError::io(file.path(), e, FETCH))?
                .as_bytes(),
        );
    }
    Ok(h.finalize().to_hex().to_string())
}

/// Converts the checkpoint in `from` to the model directory `to`. `progress` gets
/// `(layers done, layers)` of the experts.
///
/// Each weight is read once. Interrupted, or stopped by a full disk, it leaves [`partial_path`] for
/// [`Options::resume`]; after any other failure nothing.
pub fn convert(
    from: &Path,
    to: &Path,
    options: &Options,
    mut progress: impl FnMut(usize, usize),
) -> Result<Summary, ModelError> {
    if !from.is_dir() {
        return Err(ModelError::io(
            from,
            std::io::Error::new(ErrorKind::NotFound, "no such directory"),
            "give the checkpoint's directory (--from HF_DIR)",
        ));
    }
    let file = from.join("config.json");
    if !file.exists() {
        let missing = std::io::Error::new(std::io::ErrorKind::NotFound, "no such file");
        let remedy = "give the checkpoint's directory (--from HF_DIR)";
        return Err(ModelError::io(&file, missing, remedy));
    }
    let mut config = Config::read(from)?;
    let checkpoint = Shards::checkpoint(from)?;
    config.mtp = mtp::mark(&config).is_some_and(|name| checkpoint.get(&name).is_some());
    if options.mtp == MtpFormat::Int8 && options.experts != ScaleKind::Row {
        return Err(ModelError::field(
            from,
            "--mtp",
            "int4 beside experts with a scale for each 64 columns",
            "int8",
            "leave it out, or convert with --experts int4-row",
        ));
    }
    let sparse: Vec<usize> = config.sparse_layers().collect();
    // All shapes before the first byte is written.
    for (name, shape) in inventory(&config) {
        checkpoint.weight(&name, &shape)?;
    }
    for layer in &sparse {
        for e in 0..config.router.experts {
            expert_weights(&checkpoint, &config, *layer, e)?;
        }
    }
    let identity = identity(from, &checkpoint, options)?;
    let mut staged = Staged::new(from, to, options.force, &identity, options.resume)?;
    let made = fill(from, &checkpoint, &config, options, &staged, |n| {
        progress(n, sparse.len())
    });
    match made {
        Ok(summary) => {
            staged.commit()?;
            Ok(summary)
        }
        Err(e) => Err(staged.failed(e)),
    }
}

/// Writes everything into the staged directory.
fn fill(
    from: &Path,
    checkpoint: &Shards,
    config: &Config,
    options: &Options,
    staged: &Staged,
    progress: impl FnMut(usize),
) -> Result<Summary, ModelError> {
    let scales = options.experts;
    let mut summary = Summary::default();
    for name in COPIED {
        let source = from.join(name);
        if source.is_file() {
            // Not `fs::copy`, which would keep a read-only file read-only.
            fs::read(&source)
                .and_then(|bytes| fs::write(staged.path().join(name), bytes))
                .map_err(|e| ModelError::io(&source, e, "check the space left on the disk"))?;
        }
    }
    let digests = write_experts(checkpoint, config, options, staged, &mut summary, progress)?;
    let mut layers: Vec<u32> = config.sparse_layers().map(|l| l as u32).collect();
    let is_int8 = |l: &u32| Rule::of(*l as usize, config, options) == Rule::Int8;
    let low: Vec<u32> = layers.iter().copied().filter(is_int8).collect();
    layers.extend(low.iter().map(|l| l | LOW_NIBBLES));
    let shape = config.expert_shape(scales);
    let fingerprint = hex(&fingerprint(
        &shape,
        &layers,
        config.router.experts,
        &digests,
    ));
    let metadata = [
        ("format", "pt"),
        (EXPERTS_KEY, scales.name()),
        (FINGERPRINT_KEY, &fingerprint),
    ];
    write_dense(
        checkpoint,
        config,
        options.dense,
        &metadata,
        staged,
        &mut summary,
    )?;
    Ok(summary)
}

/// How a dense tensor is written.
#[derive(Clone, Copy, PartialEq)]
enum Put {
    Verbatim,
    /// Widened, rounded to nearest, ties to even.
    Bf16,
    Int8,
    /// The scales of the int8 matrix before it.
    Scales,
}

/// Whether another format takes this matrix: as fp8 checkpoints do, they leave norms, routers and the indexer's
/// weights alone.
fn to_fewer_bits(name: &str, shape: &[usize]) -> bool {
    let kept = ["norm", "mlp.gate.", "weights_proj", "bias"];
    shape.len() == 2 && name.ends_with(".weight") && !kept.iter().any(|k| name.contains(k))
}

/// Whether int8 takes this matrix.
pub(crate) fn to_int8(name: &str, shape: &[usize]) -> bool {
    // Lengths stay multiples of 4, so that every tensor is aligned.
    to_fewer_bits(name, shape) && shape[1].is_multiple_of(8)
}

fn write_dense(
    checkpoint: &Shards,
    config: &Config,
    format: DenseFormat,
    metadata: &[(&str, &str)],
    staged: &Staged,
    summary: &mut Summary,
) -> Result<(), ModelError> {
    let mut kept: Vec<(Put, Entry)> = Vec::new();
    for name in checkpoint.names() {
        let (layer, expert) = place(name);
        let layers = config.all_layers().count();
        let copy = config.mtp
            && layer == Some(layers - 1)
            && (name.contains(".embed_tokens.") || name.contains(".shared_head.head."));
        if copy || layer.is_some_and(|l| l >= layers) {
            summary.left_out += 1;
            continue;
        }
        let tensor = checkpoint.get(name).expect("a name of its own");
        let scales_of = name
            .strip_suffix("_scale_inv")
            .and_then(|n| checkpoint.get(n));
        if expert || scales_of.is_some_and(|t| t.dtype == Dtype::F8_E4M3) {
            continue;
        }
        let weight = checkpoint.weight(name, tensor.shape)?;
        let entry = |name: String, dtype: Dtype, shape: Vec<usize>| Entry {
            bytes: shape.iter().product::<usize>() * dtype.bitsize() / 8,
            name,
            dtype,
            shape,
        };
        let shape = tensor.shape.to_vec();
        if format == DenseFormat::Int8Row && to_int8(name, &shape) {
            let scales = vec![weight.rows];
            kept.push((Put::Int8, entry(name.into(), Dtype::U8, vec![weight.len()])));
            let name = format!("{name}{SCALES}");
            kept.push((Put::Scales, entry(name, Dtype::F32, scales)));
        } else if tensor.dtype == Dtype::F8_E4M3
            || format == DenseFormat::Bf16
                && tensor.dtype != Dtype::BF16
                && to_fewer_bits(name, &shape)
        {
            kept.push((Put::Bf16, entry(name.into(), Dtype::BF16, shape)));
        } else {
            kept.push((Put::Verbatim, entry(name.into(), tensor.dtype, shape)));
        }
    }
    // Wide elements first: every tensor then starts at a multiple of its element size. Matrices of
    // bytes, whose lengths are multiples of 4, stay with their scales.
    kept.sort_by_key(|(put, e)| match put {
        Put::Int8 | Put::Scales => 0,
        _ => 64 - e.dtype.bitsize(),
    });
    let entries = kept.iter().map(|(_, e)| e.clone()).collect();
    let mut out = TensorWriter::create(&staged.path().join(DENSE_FILE), entries, metadata)?;
    let mut scales = Vec::new();
    for (put, entry) in &kept {
        if interrupt::requested() {
            return Err(ModelError::Interrupted);
        }
        summary.dense_bytes += entry.bytes as u64;
        if *put == Put::Scales {
            out.write(&std::mem::take(&mut scales))?;
            continue;
        }
        summary.dense_tensors += 1;
        let tensor = checkpoint.get(&entry.name).expect("a name of its own");
        let weight = checkpoint.weight(&entry.name, tensor.shape)?;
        if *put == Put::Verbatim {
            check_finite(checkpoint, &entry.name, &weight)?;
            out.write(tensor.bytes)?;
            continue;
        }
        checkpoint.check_scales(&entry.name, &weight, true)?;
        let mut row = vec![0.0; weight.cols];
        let mut exact = true;
        let rows = (0..weight.rows).map(|r| {
            weight.widen(r * weight.cols, &mut row);
            if let Some(c) = row.iter().position(|w| !w.is_finite()) {
                let name = format!("{}[{}]", entry.name, r * weight.cols + c);
                return Err(checkpoint.wrong(&name, "a finite weight", row[c]));
            }
            if *put == Put::Bf16 {
                let bits = |w: &f32| {
                    let rounded = half::bf16::from_f32(*w);
                    exact &= rounded.to_f32() == *w;
                    rounded.to_le_bytes()
                };
                return Ok(row.iter().flat_map(bits).collect());
            }
            let s = int8_scale(&row);
            scales.extend(s.to_le_bytes());
            Ok(row.iter().map(|w| int8(*w, s) as u8).collect())
        });
        out.write_pieces(rows)?;
        summary.rounded += usize::from(!exact);
    }
    out.finish()
}

/// Refuses a weight that is not finite.
fn check_finite(checkpoint: &Shards, name: &str, weight: &Weight<'_>) -> Result<(), ModelError> {
    let mut part = vec![0.0; weight.len().min(1 << 16)];
    for from in (0..weight.len()).step_by(1 << 16) {
        let part = &mut part[..(weight.len() - from).min(1 << 16)];
        weight.widen(from, part);
        if let Some(at) = part.iter().position(|w| !w.is_finite()) {
            let name = format!("{name}[{}]", from + at);
            return Err(checkpoint.wrong(&name, "a finite weight", part[at]));
        }
    }
    Ok(())
}

fn write_experts(
    checkpoint: &Shards,
    config: &Config,
    options: &Options,
    staged: &Staged,
    summary: &mut Summary,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Digest>, ModelError> {
    let mut entries = Vec::new();
    for layer in config.sparse_layers() {
        let rule = Rule::of(layer, config, options);
        let shape = config.expert_shape(rule.scales());
        for e in 0..config.router.experts {
            for kind in MatrixKind::ALL {
                let (rows, cols) = shape.dims(kind);
                let name = expert_tensor(layer, e, kind);
                let n = shape.scales.count(rows, cols);
                let bytes = rule.bytes(rows * cols);
                // Columns are a multiple of 64, so both lengths are multiples of 4.
                entries.push(Entry {
                    name: name.clone(),
                    dtype: Dtype::U8,
                    shape: vec![bytes],
                    bytes,
                });
                entries.push(Entry {
                    name: format!("{name}.qs"),
                    dtype: Dtype::F32,
                    shape: vec![n],
                    bytes: 4 * n,
                });
            }
        }
    }
    let metadata = [(EXPERTS_KEY, options.experts.name())];
    let path = staged.path().join(EXPERTS_FILE);
    let all = config.router.experts;
    // The layer that drafts is the last one; its experts have two digests each where they are int8.
    let rules = config.sparse_layers().map(|l| Rule::of(l, config, options));
    let single = all * rules.filter(|rule| *rule != Rule::Int8).count();
    let mut digests = staged.digests();
    let had = match digests.len() {
        n if n <= single => n,
        n => single + (n - single) / 2,
    };
    digests.truncate(had + had.saturating_sub(single));
    staged.keep_records(digests.len())?;
    summary.expert_bytes = entries[..6 * had].iter().map(|e| e.bytes as u64).sum();
    summary.experts = had;
    summary.int8_experts = had.saturating_sub(single);
    let mut out = if digests.is_empty() {
        TensorWriter::create(&path, entries, &metadata)?
    } else {
        TensorWriter::resume(&path, entries, &metadata, 6 * had)?
    };
    let mut recorded = digests.len();
    let mut synced = Instant::now();
    for (done, layer) in config.sparse_layers().enumerate() {
        let rule = Rule::of(layer, config, options);
        // A few experts per thread at a time bound what is held.
        let batch = 2 * rayon::current_num_threads();
        let ids: Vec<usize> = (0..all).filter(|e| done * all + e >= had).collect();
        for ids in ids.chunks(batch) {
            if interrupt::requested() || synced.elapsed() > SYNC {
                out.sync()?;
                staged.record(&digests[recorded..])?;
                recorded = digests.len();
                synced = Instant::now();
            }
            if interrupt::requested() {
                return Err(ModelError::Interrupted);
            }
            let quantised: Vec<[Quantised; 3]> = ids
                .par_iter()
                .map(|e| {
                    let weights = expert_weights(checkpoint, config, layer, *e)?;
                    Ok(weights.map(|w| quantise(&w, rule)))
                })
                .collect::<Result<_, ModelError>>()?;
            for (e, matrices) in ids.iter().zip(quantised) {
                let mut raw = Vec::with_capacity(3);
                for (kind, matrix) in MatrixKind::ALL.into_iter().zip(matrices) {
                    let (packed, scales) = matrix.map_err(|at| {
                        ModelError::field(
                            checkpoint.source(),
                            format!("{}[{at}]", expert_tensor(layer, *e, kind)),
                            "a finite weight",
                            "infinity or NaN",
                            FETCH,
                        )
                    })?;
                    out.write(&packed)?;
                    let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                    out.write(&bytes)?;
                    summary.expert_bytes += (packed.len() + bytes.len()) as u64;
                    raw.push((packed, scales));
                }
                digests.extend(rule.digests(raw.try_into().expect("three matrices")));
                summary.experts += 1;
                summary.int8_experts += usize::from(rule == Rule::Int8);
            }
        }
        progress(done + 1);
    }
    out.finish()?;
    staged.record(&digests[recorded..])?;
    // Low nibbles come after all others.
    let pairs = digests.split_off(single.min(digests.len()));
    digests.extend(pairs.iter().step_by(2));
    digests.extend(pairs.iter().skip(1).step_by(2));
    Ok(digests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int4_rule() {
        let row = [0.7f32, -0.35, 0.05, -0.7];
        let s = int4_scale(&row);
        assert_eq!(s, 0.7f32 / 7.0);
        // 0.35 / 0.1 and 0.05 / 0.1 are near ties: the IEEE quotient decides.
        let want: Vec<u8> = row
            .iter()
            .map(|w| ((w / s).round_ties_even() as i32 + 8) as u8)
            .collect();
        assert_eq!(row.map(|w| int4(w, s)).to_vec(), want);
        assert_eq!(int4(7.0, 1.0), 15);
        assert_eq!(int4(-7.5, 1.0), 0);
        assert_eq!(int4(2.5, 1.0), 10);
        assert_eq!(int4(3.5, 1.0), 12);
        assert_eq!(int4_scale(&[0.0; 4]), 1e-8);
        assert_eq!(int4(0.0, 1e-8), 8);
    }

    #[test]
    fn places() {
        assert_eq!(
            place("model.layers.3.mlp.experts.7.up_proj.weight"),
            (Some(3), true)
        );
        assert_eq!(
            place("model.layers.3.mlp.experts.gate_up_proj"),
            (Some(3), true)
        );
        assert_eq!(
            place("model.layers.12.mlp.shared_experts.up_proj.weight"),
            (Some(12), false)
        );
        assert_eq!(place("lm_head.weight"), (None, false));
    }
}
