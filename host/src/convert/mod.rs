//! From a Hugging Face checkpoint to a model directory.
//!
//! Routed experts go through the int4 rule: per row, or per 64 columns of a row,
//! `s = max(amax / 7, 1e-8)` and `q = clip(rint(w / s), -8, 7)`, all in f32 with IEEE division,
//! `rint` to even. Every other tensor keeps its bytes. Memory in use is a layer's experts at most.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::tensor::Dtype;

use crate::archive::{Digest, expert_digest, fingerprint};
use crate::expert::{MatrixKind, RawMatrix, ScaleKind};
use crate::interrupt;
use crate::model::config::Config;
use crate::model::directory::{
    DENSE_FILE, EXPERTS_FILE, EXPERTS_KEY, FINGERPRINT_KEY, expert_tensor,
};
use crate::model::error::ModelError;
use crate::model::format::Weight;
use crate::model::hex;
use crate::model::shards::Shards;
use crate::model::tensors::{Entry, Tensor, TensorWriter};
use crate::model::weights::inventory;

const FETCH: &str = "fetch the checkpoint again";

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
    /// Experts quantised.
    pub experts: usize,
    /// Bytes of their nibbles and scales.
    pub expert_bytes: u64,
    /// Tensors of layers past `num_hidden_layers` (multi-token prediction), left out.
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
        let part = |t: &Weight<'a>, parts: usize, at: usize, rows: usize, cols: usize| {
            let len = t.bytes.len() / parts;
            Weight {
                format: t.format,
                rows,
                cols,
                bytes: &t.bytes[at * len..(at + 1) * len],
                scales: [][..].into(), // three dimensions are floats
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

/// A quantised matrix: packed nibbles and scales; or the index of a weight that is not finite.
type Quantised = Result<(Vec<u8>, Vec<f32>), usize>;

fn quantise(w: &Weight<'_>, scales: ScaleKind) -> Quantised {
    let span = match scales {
        ScaleKind::Row => w.cols,
        ScaleKind::G64 => gpu::arith::GROUP,
    };
    let n = w.len();
    let mut packed = Vec::with_capacity(n / 2);
    let mut out = Vec::with_capacity(n / span);
    let mut values = vec![0.0; span];
    for at in (0..n).step_by(span) {
        w.widen(at, &mut values);
        if let Some(bad) = values.iter().position(|w| !w.is_finite()) {
            return Err(at + bad);
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

/// A weight's nibble, `q + 8`.
pub fn int4(weight: f32, scale: f32) -> u8 {
    ((weight / scale).round_ties_even().clamp(-8.0, 7.0) as i8 + 8) as u8
}

/// A directory that takes its final name when it is whole, and vanishes otherwise.
struct Staged {
    dir: tempfile::TempDir,
    to: PathBuf,
    force: bool,
}

impl Staged {
    fn new(from: &Path, to: &Path, force: bool) -> Result<Self, ModelError> {
        let taken = match fs::read_dir(to) {
            Ok(mut entries) => entries.next().is_some(),
            Err(e) if e.kind() == ErrorKind::NotFound => false,
            Err(e) => return Err(ModelError::io(to, e, "choose another --to directory")),
        };
        if taken && !force {
            return Err(ModelError::field(
                to,
                "directory",
                "a new or empty one",
                "files",
                "choose another --to directory or give --force to replace it",
            ));
        }
        if taken {
            // What gets replaced is deleted, so it must be a model directory and nothing more.
            let real = |dir: &Path| dir.canonicalize().unwrap_or_else(|_| dir.into());
            let refuse = |expected: &str, found: &str| {
                let remedy = "choose another --to directory";
                Err(ModelError::field(to, "directory", expected, found, remedy))
            };
            if real(from).starts_with(real(to)) {
                return refuse("one without the checkpoint", "the --from directory");
            }
            if !to.join(DENSE_FILE).is_file() {
                return refuse("a model directory to replace", "other files");
            }
        }
        let parent = match to.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let make = || {
            fs::create_dir_all(parent)?;
            tempfile::Builder::new()
                .prefix(".convert-")
                .tempdir_in(parent)
        };
        let dir = make().map_err(|e| {
            ModelError::io(parent, e, "choose a --to directory that can be written")
        })?;
        Ok(Self {
            dir,
            to: to.into(),
            force,
        })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn commit(self) -> Result<(), ModelError> {
        let Self { dir, to, force } = self;
        let fail = |e| ModelError::io(&to, e, "check permissions of the directory above");
        // Temporary directories are private; a model need not be.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).map_err(fail)?;
        }
        let old = if force && to.exists() {
            // Beside the new one, so that both renames stay within a file system.
            let old = dir.path().with_extension("old");
            fs::rename(&to, &old).map_err(fail)?;
            Some(old)
        } else {
            None
        };
        if let Err(e) = fs::rename(dir.path(), &to) {
            if let Some(old) = old {
                fs::rename(&old, &to).map_err(fail)?;
            }
            return Err(fail(e));
        }
        let _ = dir.keep(); // renamed away: nothing left to remove under that name
        if let Some(old) = old {
            fs::remove_dir_all(&old).map_err(fail)?;
        }
        Ok(())
    }
}

/// Converts the checkpoint in `from` to the model directory `to`. `progress` gets
/// `(layers done, layers)` of the experts.
pub fn convert(
    from: &Path,
    to: &Path,
    scales: ScaleKind,
    force: bool,
    mut progress: impl FnMut(usize, usize),
) -> Result<Summary, ModelError> {
    if !from.is_dir() {
        return Err(ModelError::io(
            from,
            std::io::Error::new(ErrorKind::NotFound, "no such directory"),
            "give the checkpoint's directory (--from HF_DIR)",
        ));
    }
    let config = Config::read(from)?;
    let checkpoint = Shards::checkpoint(from)?;
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
    let staged = Staged::new(from, to, force)?;
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
    let digests = write_experts(
        &checkpoint,
        &config,
        scales,
        staged.path(),
        &mut summary,
        |n| progress(n, sparse.len()),
    )?;
    let layers: Vec<u32> = sparse.iter().map(|l| *l as u32).collect();
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
    write_dense(&checkpoint, &config, &metadata, staged.path(), &mut summary)?;
    staged.commit()?;
    Ok(summary)
}

fn write_dense(
    checkpoint: &Shards,
    config: &Config,
    metadata: &[(&str, &str)],
    dir: &Path,
    summary: &mut Summary,
) -> Result<(), ModelError> {
    let mut kept: Vec<(&str, Tensor<'_>)> = Vec::new();
    for name in checkpoint.names() {
        match place(name) {
            (Some(layer), _) if layer >= config.layers.len() => summary.left_out += 1,
            (_, true) => (),
            _ => {
                let tensor = checkpoint.get(name).expect("a name of its own");
                checkpoint.weight(name, tensor.shape)?;
                kept.push((name, tensor));
            }
        }
    }
    // Wide elements first: every tensor then starts at a multiple of its element size.
    kept.sort_by_key(|(_, t)| std::cmp::Reverse(t.dtype.bitsize()));
    let entries = kept
        .iter()
        .map(|(name, t)| Entry {
            name: (*name).into(),
            dtype: t.dtype,
            shape: t.shape.to_vec(),
            bytes: t.bytes.len(),
        })
        .collect();
    let mut out = TensorWriter::create(&dir.join(DENSE_FILE), entries, metadata)?;
    for (_, tensor) in &kept {
        if interrupt::requested() {
            return Err(ModelError::Interrupted);
        }
        out.write(tensor.bytes)?;
        summary.dense_tensors += 1;
        summary.dense_bytes += tensor.bytes.len() as u64;
    }
    out.finish()
}

fn write_experts(
    checkpoint: &Shards,
    config: &Config,
    scales: ScaleKind,
    dir: &Path,
    summary: &mut Summary,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Digest>, ModelError> {
    let shape = config.expert_shape(scales);
    let mut entries = Vec::new();
    for layer in config.sparse_layers() {
        for e in 0..config.router.experts {
            for kind in MatrixKind::ALL {
                let (rows, cols) = shape.dims(kind);
                let name = expert_tensor(layer, e, kind);
                let n = scales.count(rows, cols);
                // Columns are a multiple of 64, so both lengths are multiples of 4.
                entries.push(Entry {
                    name: name.clone(),
                    dtype: Dtype::U8,
                    shape: vec![rows * cols / 2],
                    bytes: rows * cols / 2,
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
    let metadata = [(EXPERTS_KEY, scales.name())];
    let mut out = TensorWriter::create(&dir.join(EXPERTS_FILE), entries, &metadata)?;
    let mut digests = Vec::new();
    for (done, layer) in config.sparse_layers().enumerate() {
        // A few experts per thread at a time bound what is held.
        let batch = 2 * rayon::current_num_threads();
        let ids: Vec<usize> = (0..config.router.experts).collect();
        for ids in ids.chunks(batch) {
            if interrupt::requested() {
                return Err(ModelError::Interrupted);
            }
            let quantised: Vec<[Quantised; 3]> = ids
                .par_iter()
                .map(|e| {
                    let weights = expert_weights(checkpoint, config, layer, *e)?;
                    Ok(weights.map(|w| quantise(&w, scales)))
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
                    raw.push(RawMatrix {
                        packed: packed.into(),
                        scales: scales.into(),
                    });
                }
                let raw: [RawMatrix<'_>; 3] = raw.try_into().expect("three matrices");
                digests.push(expert_digest(&raw));
                summary.experts += 1;
            }
        }
        progress(done + 1);
    }
    out.finish()?;
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
