//! A model directory: `config.json`, `dense.safetensors`, `experts.safetensors`, `experts.ansx`;
//! or a container, whose shards stand for the first two and the raw experts.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::config::Config;
use super::error::ModelError;
use super::format::{Format, Weight};
use super::inventory::inventory;
use super::matrix::HostMatrix;
use super::shards::{Shards, looks_like_container};
use super::tensors::{f32s, u16s};
use crate::archive::{ArchiveError, ExpertSource, LOW_NIBBLES};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind, int8_nibble, int8_nibbles};

/// Key of the experts' number format in `experts.safetensors` and `dense.safetensors`.
pub const EXPERTS_KEY: &str = "ansatz.experts";

/// Key of the experts' fingerprint ([`crate::archive::fingerprint`], hex) in `dense.safetensors`:
/// tells an archive of another model.
pub const FINGERPRINT_KEY: &str = "ansatz.fingerprint";

/// The dense part of a model.
pub const DENSE_FILE: &str = "dense.safetensors";
/// Raw int4 experts.
pub const EXPERTS_FILE: &str = "experts.safetensors";
/// Coded experts.
pub const ARCHIVE_FILE: &str = "experts.ansx";

const CONVERT: &str = "make the model directory with `host convert`";

/// Name of an expert's matrix; its scales have `.qs` appended.
pub fn expert_tensor(layer: usize, expert: usize, kind: MatrixKind) -> String {
    format!(
        "model.layers.{layer}.mlp.experts.{expert}.{}.weight",
        kind.name()
    )
}

impl ScaleKind {
    /// As `--experts` and file metadata name it.
    pub fn name(self) -> &'static str {
        match self {
            ScaleKind::Row => "int4-row",
            ScaleKind::G64 => "int4-g64",
        }
    }

    /// The inverse of [`ScaleKind::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        [ScaleKind::Row, ScaleKind::G64]
            .into_iter()
            .find(|k| k.name() == name)
    }
}

/// Whatever is to be read, groups are settled by all that may be there.
fn with_drafts(config: &Config) -> Config {
    Config {
        mtp: true,
        ..config.clone()
    }
}

/// The dense tensors.
pub struct Dense {
    shards: Shards,
}

impl Dense {
    /// Opens `dense.safetensors` in `dir`, or the shards of a container.
    pub fn open(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        let shards = if looks_like_container(dir) {
            let mut shards = Shards::container(dir)?;
            let all = inventory(&with_drafts(config)).into_iter();
            shards.settle(all.filter_map(|(name, shape)| Some((name, shape.try_into().ok()?))));
            shards
        } else {
            Shards::one(&dir.join(DENSE_FILE), CONVERT)?
        };
        Ok(Self { shards })
    }

    /// Checks that a tensor of this shape is there, in a format that is read, its scales finite.
    pub fn check(&self, name: &str, shape: &[usize]) -> Result<Format, ModelError> {
        self.weight(name, shape).map(|w| w.format)
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.shards.get(name).is_some()
    }

    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight<'_>, ModelError> {
        let weight = self.shards.weight(name, shape)?;
        self.shards.check_scales(name, &weight, true)?;
        Ok(weight)
    }

    /// Refuses a tensor with a weight that is not finite.
    pub fn check_finite(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        let weight = self.weight(name, shape)?;
        let mut row = vec![0.0; weight.cols];
        for r in 0..weight.rows {
            weight.widen(r * weight.cols, &mut row);
            if let Some(c) = row.iter().position(|w| !w.is_finite()) {
                return Err(self.shards.wrong(
                    &format!("{name}[{}]", r * weight.cols + c),
                    "a finite weight",
                    row[c],
                ));
            }
        }
        Ok(())
    }

    /// Bytes that a tensor takes in memory, its scales included, and whether it is integers of a byte.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<(u64, bool), ModelError> {
        let format = self.check(name, shape)?;
        let n = shape.iter().product::<usize>() as u64;
        Ok(match (shape, format) {
            ([rows, cols], _) if format.has_row_scales(*cols) => (n + 4 * *rows as u64, true),
            ([_, _], Format::Bf16) => (2 * n, false),
            // Vectors are f32, whatever they were.
            _ => (4 * n, false),
        })
    }

    /// A matrix as it is used: floats stay what they are, integers with row scales integers of a byte each; another
    /// format is widened to f32, each number times its scale.
    pub fn matrix(&self, name: &str, shape: &[usize]) -> Result<HostMatrix<'_>, ModelError> {
        let weight = self.weight(name, shape)?;
        match weight.format {
            Format::Bf16 => Ok(HostMatrix::Bf16(u16s(weight.bytes))),
            Format::F32 => Ok(HostMatrix::F32(f32s(weight.bytes))),
            format if format.has_row_scales(weight.cols) => Ok(HostMatrix::Int8 {
                bytes: weight.integers(),
                scales: weight.scales,
            }),
            Format::Int8Row | Format::Int4 { .. } | Format::Fp8Block => {
                let mut all = vec![0.0; weight.len()];
                let rows = all.par_chunks_mut(weight.cols.max(1)).enumerate();
                rows.for_each(|(r, row)| weight.widen(r * weight.cols, row));
                Ok(HostMatrix::F32(all.into()))
            }
        }
    }

    /// A tensor as f32; vectors, which are bf16 or f32, exactly.
    pub fn f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let weight = self.weight(name, shape)?;
        let mut out = vec![0.0; weight.len()];
        weight.widen(0, &mut out);
        Ok(out)
    }

    /// Metadata that `host convert` wrote.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let mut files = self.shards.files().iter();
        files.find_map(|f| f.metadata().get(key).map(String::as_str))
    }

    /// The file, or the container's directory.
    pub fn path(&self) -> &Path {
        self.shards.source()
    }
}

/// Raw int4 experts of a model directory. Int8 experts come as two layers of their nibbles.
pub struct RawExperts {
    shards: Shards,
    shape: ExpertShape,
    /// The low nibbles of int8 layers after all others ([`LOW_NIBBLES`]).
    layers: Vec<u32>,
    experts: usize,
}

impl RawExperts {
    /// Opens the raw experts in `dir`, `experts.safetensors` or a container's shards, and checks
    /// that every matrix is there in a format that is read.
    pub fn open(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        let path: PathBuf = dir.join(EXPERTS_FILE);
        let container = !path.exists() && looks_like_container(dir);
        let shards = if container {
            let mut shards = Shards::container(dir)?;
            let shape = config.expert_shape(ScaleKind::Row);
            let all = with_drafts(config);
            let matrix = |l, e, kind| {
                let (rows, cols) = shape.dims(kind);
                (expert_tensor(l, e, kind), [rows, cols])
            };
            shards.settle(all.sparse_layers().flat_map(|l| {
                let experts = 0..config.router.experts;
                experts.flat_map(move |e| MatrixKind::ALL.map(|kind| matrix(l, e, kind)))
            }));
            shards
        } else {
            Shards::one(&path, CONVERT)?
        };
        let mut this = Self {
            shards,
            shape: config.expert_shape(ScaleKind::Row),
            layers: config.sparse_layers().map(|l| l as u32).collect(),
            experts: config.router.experts,
        };
        let mut formats = Vec::new();
        let mut int8 = Vec::new();
        for layer in config.sparse_layers() {
            for e in 0..this.experts {
                for kind in MatrixKind::ALL {
                    let format = this.weight(layer, e, kind)?.format;
                    formats.push((format, this.shape.dims(kind).1));
                    if format == Format::Int8Row && int8.last() != Some(&(layer as u32)) {
                        int8.push(layer as u32);
                    }
                }
            }
        }
        this.layers.extend(int8.iter().map(|l| l | LOW_NIBBLES));
        let fits = |kind: ScaleKind| {
            formats.iter().all(|(format, cols)| match format {
                Format::Int4 { group } => match kind {
                    ScaleKind::Row => group >= cols,
                    // A row of one group looks as if it had a row scale.
                    ScaleKind::G64 => (*group).min(*cols) == gpu::arith::GROUP,
                },
                Format::Int8Row => kind == ScaleKind::Row,
                _ => false,
            })
        };
        if let Some(layer) = int8.first()
            && !fits(ScaleKind::Row)
        {
            let name = format!("experts of layer {layer}");
            return Err(ModelError::field(
                this.shards.source(),
                &name,
                "int4-grouped, as other layers have it, or int4-row in all others",
                "int8-row",
                "int8 experts beside grouped int4 ones are not supported",
            ));
        }
        if container {
            // Row scales are group scales that are all the same; not so the other way round.
            if !fits(ScaleKind::Row) {
                this.shape.scales = ScaleKind::G64;
            }
            return Ok(this);
        }
        let stamp = this.shards.files()[0].metadata().get(EXPERTS_KEY);
        let kinds = [ScaleKind::Row, ScaleKind::G64];
        match stamp.and_then(|s| ScaleKind::from_name(s)) {
            Some(kind) if fits(kind) => this.shape.scales = kind,
            _ => {
                let names: Vec<_> = kinds.into_iter().filter(|k| fits(*k)).collect();
                let names: Vec<&str> = names.iter().map(|k| k.name()).collect();
                return Err(ModelError::field(
                    &path,
                    EXPERTS_KEY,
                    format!("{}, as the tensors are", names.join(" or ")),
                    stamp.map_or("nothing", String::as_str),
                    CONVERT,
                ));
            }
        }
        Ok(this)
    }

    /// Whether there are raw experts in `dir`.
    pub fn are_in(dir: &Path) -> bool {
        dir.join(EXPERTS_FILE).exists() || looks_like_container(dir)
    }

    /// Geometry of the experts.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// The file, or the container's directory.
    pub fn path(&self) -> &Path {
        self.shards.source()
    }

    fn weight(&self, layer: usize, e: usize, kind: MatrixKind) -> Result<Weight<'_>, ModelError> {
        let (rows, cols) = self.shape.dims(kind);
        let name = expert_tensor(layer, e, kind);
        let weight = self.shards.weight(&name, &[rows, cols])?;
        match weight.format {
            Format::Int8Row => Ok(weight),
            Format::Int4 { group } if group >= cols || group % gpu::arith::GROUP == 0 => Ok(weight),
            other => Err(ModelError::field(
                self.shards.path_of(&name),
                &name,
                "int4-row, int8-row or int4-grouped by a multiple of 64 columns",
                other.name(cols),
                "experts of this format are not supported: convert a bf16, f32 or fp8 checkpoint",
            )),
        }
    }

    /// Whether a layer's experts are int8, and come as two layers of their nibbles.
    pub fn is_int8(&self, layer: usize) -> bool {
        self.layers.contains(&(layer as u32 | LOW_NIBBLES))
    }

    /// Refuses scales of an expert that are not finite, or negative.
    pub fn check_scales(&self, layer: usize, e: usize) -> Result<(), ModelError> {
        MatrixKind::ALL.into_iter().try_for_each(|kind| {
            let weight = self.weight(layer, e, kind)?;
            let name = expert_tensor(layer, e, kind);
            self.shards.check_scales(&name, &weight, false)
        })
    }

    /// One matrix, of an int8 layer its high or low nibbles; its scales are checked to be finite and
    /// not negative.
    pub fn matrix(
        &self,
        layer: usize,
        e: usize,
        kind: MatrixKind,
    ) -> Result<RawMatrix<'_>, ModelError> {
        let low = layer as u32 & LOW_NIBBLES != 0;
        let layer = (layer as u32 & !LOW_NIBBLES) as usize;
        let weight = self.weight(layer, e, kind)?;
        let name = expert_tensor(layer, e, kind);
        self.shards.check_scales(&name, &weight, false)?;
        if self.is_int8(layer) {
            return Ok(RawMatrix {
                packed: nibbles(&weight, low).into(),
                scales: weight.scales,
            });
        }
        let want = self.shape.scales.count(weight.rows, weight.cols);
        let scales = if weight.scales.len() == want {
            weight.scales
        } else {
            // A scale of more columns than 64 stands for each 64 of them.
            let per_row = want / weight.rows;
            let group = match weight.format {
                Format::Int4 { group } => group.min(weight.cols),
                _ => weight.cols,
            };
            let had = weight.cols.div_ceil(group);
            let spread = (0..weight.rows).flat_map(|r| {
                let row = &weight.scales[r * had..(r + 1) * had];
                (0..per_row).map(move |i| row[i * gpu::arith::GROUP / group])
            });
            Cow::Owned(spread.collect())
        };
        Ok(RawMatrix {
            packed: weight.bytes.into(),
            scales,
        })
    }

    fn all(&self, layer: usize, e: usize) -> Result<[RawMatrix<'_>; 3], ModelError> {
        Ok([
            self.matrix(layer, e, MatrixKind::Gate)?,
            self.matrix(layer, e, MatrixKind::Up)?,
            self.matrix(layer, e, MatrixKind::Down)?,
        ])
    }

    /// All experts of a layer.
    pub fn layer(&self, layer: usize) -> Result<Vec<[RawMatrix<'_>; 3]>, ModelError> {
        (0..self.experts).map(|e| self.all(layer, e)).collect()
    }
}

/// The high or the low nibbles of an int8 layer's integers, of which some may be int4.
fn nibbles(weight: &Weight<'_>, low: bool) -> Vec<u8> {
    if weight.format == Format::Int8Row {
        return int8_nibbles(weight.bytes, low);
    }
    let of = |nibble: u8| int8_nibble(nibble as i8 - 8, low);
    let pairs = weight.bytes.iter();
    pairs.map(|b| of(b & 15) | of(b >> 4) << 4).collect()
}

impl ExpertSource for RawExperts {
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
        self.all(layer as usize, expert)
            .map_err(|e| ArchiveError::Model(Box::new(e)))
    }
}
