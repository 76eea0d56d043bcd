//! A model directory: `config.json`, `dense.safetensors`, `experts.safetensors`, `experts.ansx`.

use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use super::config::Config;
use super::error::ModelError;
use super::tensors::{TensorFile, f32s, u16s};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

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

/// The dense tensors, read as bf16.
pub struct Dense {
    file: TensorFile,
    /// Tensors that were f32 with more precision than bf16 has.
    rounded: std::cell::Cell<usize>,
}

impl Dense {
    /// Opens `dense.safetensors` in `dir`.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        Ok(Self {
            file: TensorFile::open(&dir.join(DENSE_FILE), CONVERT)?,
            rounded: 0.into(),
        })
    }

    /// How many tensors lost bits on the way from f32 to bf16.
    pub fn rounded(&self) -> usize {
        self.rounded.get()
    }

    /// Checks that a bf16 or f32 tensor of this shape is there.
    pub fn check(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        self.weight(name, shape).map(drop)
    }

    fn weight(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<super::tensors::Tensor<'_>, ModelError> {
        let tensor = self.file.shaped(name, shape)?;
        match tensor.dtype {
            Dtype::BF16 | Dtype::F32 => Ok(tensor),
            other => Err(ModelError::field(
                self.file.path(),
                name,
                "BF16 or F32",
                format!("{other:?}"),
                "convert a bf16 or f32 checkpoint",
            )),
        }
    }

    /// Appends a tensor's bf16 bits to `to`; f32 is rounded to nearest, ties to even.
    pub fn bf16(&self, name: &str, shape: &[usize], to: &mut Vec<u16>) -> Result<(), ModelError> {
        let tensor = self.weight(name, shape)?;
        if tensor.dtype == Dtype::BF16 {
            to.extend_from_slice(&u16s(tensor.bytes));
            return Ok(());
        }
        let mut exact = true;
        to.extend(f32s(tensor.bytes).iter().map(|x| {
            let b = half::bf16::from_f32(*x);
            exact &= b.to_f32().to_bits() == x.to_bits();
            b.to_bits()
        }));
        if !exact {
            self.rounded.set(self.rounded.get() + 1);
        }
        Ok(())
    }

    /// A tensor as f32.
    pub fn f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.weight(name, shape)?;
        Ok(match tensor.dtype {
            Dtype::BF16 => u16s(tensor.bytes)
                .iter()
                .map(|b| gpu::arith::bf16(*b))
                .collect(),
            _ => f32s(tensor.bytes).into_owned(),
        })
    }

    /// Metadata that `host convert` wrote.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.file.metadata()?.get(key).map(String::as_str)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

/// Raw int4 experts of a model directory.
pub struct RawExperts {
    file: TensorFile,
    shape: ExpertShape,
    experts: usize,
}

impl RawExperts {
    /// Opens `experts.safetensors` in `dir` and checks every tensor's type and length.
    pub fn open(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        let path: PathBuf = dir.join(EXPERTS_FILE);
        let file = TensorFile::open(&path, CONVERT)?;
        let stamp = file.metadata().and_then(|m| m.get(EXPERTS_KEY));
        let scales = stamp.and_then(|s| ScaleKind::from_name(s)).ok_or_else(|| {
            ModelError::field(
                &path,
                EXPERTS_KEY,
                "int4-row or int4-g64",
                stamp.map_or("nothing", String::as_str),
                CONVERT,
            )
        })?;
        let this = Self {
            file,
            shape: config.expert_shape(scales),
            experts: config.router.experts,
        };
        for layer in config.sparse_layers() {
            for e in 0..this.experts {
                for kind in MatrixKind::ALL {
                    this.tensors(layer, e, kind)?;
                }
            }
        }
        Ok(this)
    }

    /// Geometry of the experts.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    fn tensors(
        &self,
        layer: usize,
        e: usize,
        kind: MatrixKind,
    ) -> Result<(&[u8], &[u8]), ModelError> {
        let (rows, cols) = self.shape.dims(kind);
        let name = expert_tensor(layer, e, kind);
        let typed = |name: &str, len: usize, dtype: Dtype| {
            let t = self.file.shaped(name, &[len])?;
            if t.dtype == dtype {
                Ok(t.bytes)
            } else {
                Err(ModelError::field(
                    self.file.path(),
                    name,
                    format!("{dtype:?}"),
                    format!("{:?}", t.dtype),
                    CONVERT,
                ))
            }
        };
        Ok((
            typed(&name, rows * cols / 2, Dtype::U8)?,
            typed(
                &format!("{name}.qs"),
                self.shape.scales.count(rows, cols),
                Dtype::F32,
            )?,
        ))
    }

    /// One matrix; its scales are checked to be finite and not negative.
    pub fn matrix(
        &self,
        layer: usize,
        e: usize,
        kind: MatrixKind,
    ) -> Result<RawMatrix<'_>, ModelError> {
        let (packed, scales) = self.tensors(layer, e, kind)?;
        let scales = f32s(scales);
        if let Some((i, s)) = scales
            .iter()
            .enumerate()
            .find(|(_, s)| !s.is_finite() || s.is_sign_negative())
        {
            return Err(ModelError::field(
                self.file.path(),
                format!("{}.qs[{i}]", expert_tensor(layer, e, kind)),
                "a finite scale, not negative",
                s,
                CONVERT,
            ));
        }
        Ok(RawMatrix {
            packed: packed.into(),
            scales,
        })
    }

    /// All experts of a layer.
    pub fn layer(&self, layer: usize) -> Result<Vec<[RawMatrix<'_>; 3]>, ModelError> {
        (0..self.experts)
            .map(|e| {
                Ok([
                    self.matrix(layer, e, MatrixKind::Gate)?,
                    self.matrix(layer, e, MatrixKind::Up)?,
                    self.matrix(layer, e, MatrixKind::Down)?,
                ])
            })
            .collect()
    }
}
