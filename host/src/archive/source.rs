//! Where raw experts come from.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::codec::{ScaleFormat, decode_scales};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind, int8_nibbles};
use crate::files;

use super::error::NO_EXPERTS;
use super::{Archive, ArchiveError, LOW_NIBBLES};

/// The raw experts of a model.
pub trait ExpertSource: Sync {
    /// Geometry of all experts.
    fn shape(&self) -> &ExpertShape;
    /// Numbers of the model layers that have experts, ascending.
    fn layers(&self) -> &[u32];
    /// Experts of each layer.
    fn experts(&self) -> usize;
    /// An expert's gate, up and down.
    fn expert(&self, layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError>;
    /// The first expert, by layer and number, with the same bits as this one, if the source knows
    /// of an earlier one. Packing gives both one record.
    fn shared(&self, _layer: u32, _expert: usize) -> Option<(u32, usize)> {
        None
    }
}

impl ExpertSource for Archive {
    fn shape(&self) -> &ExpertShape {
        Archive::shape(self)
    }

    fn layers(&self) -> &[u32] {
        Archive::layers(self)
    }

    fn experts(&self) -> usize {
        Archive::experts(self)
    }

    fn expert(&self, layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        self.record(layer, expert)?.decode_all()
    }

    fn shared(&self, layer: u32, expert: usize) -> Option<(u32, usize)> {
        let first = self.first(layer, expert).ok()?;
        (first != (layer, expert)).then_some(first)
    }
}

/// A model directory's `experts.safetensors`.
pub struct SafetensorsExperts {
    path: PathBuf,
    map: Mmap,
    shape: ExpertShape,
    /// The low nibbles of int8 layers after all others ([`LOW_NIBBLES`]).
    layers: Vec<u32>,
    experts: usize,
    /// Byte ranges in the map, by tensor name.
    tensors: BTreeMap<String, std::ops::Range<usize>>,
}

#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    moe_intermediate_size: usize,
}

/// Reads the layer and expert numbers of an expert tensor's name.
fn parse(name: &str) -> Option<(u32, usize)> {
    let rest = name.strip_prefix("model.layers.")?;
    let (layer, rest) = rest.split_once('.')?;
    let rest = rest.strip_prefix("mlp.experts.")?;
    let (expert, _) = rest.split_once('.')?;
    Some((layer.parse().ok()?, expert.parse::<u32>().ok()? as usize))
}

impl SafetensorsExperts {
    /// Opens the raw experts of a model directory and checks that all of them are there, with the
    /// sizes that `config.json` asks for.
    ///
    /// The file is mapped: it must not be changed or cut meanwhile.
    pub fn open(dir: &Path) -> Result<Self, ArchiveError> {
        let path = dir.join("experts.safetensors");
        let wrong = |what: String| ArchiveError::Source {
            path: path.clone(),
            what,
        };
        let config_path = dir.join("config.json");
        let config = files::read(&config_path)
            .map_err(|e| ArchiveError::io(&config_path, "read", e, NO_EXPERTS))?;
        let config: Config = serde_json::from_slice(&config).map_err(|e| ArchiveError::Source {
            path: config_path.clone(),
            what: format!("{e}; a model directory is made by `host convert`"),
        })?;

        let file =
            files::open(&path).map_err(|e| ArchiveError::io(&path, "open", e, NO_EXPERTS))?;
        // SAFETY: read-only, and every use checks bounds; that nobody cuts the file meanwhile is
        // the documented condition.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|e| ArchiveError::io(&path, "map", e, NO_EXPERTS))?;
        let bad = |e: safetensors::SafeTensorError| {
            wrong(format!("{e}; copy it again or make it with `host convert`"))
        };
        let (_, meta) = SafeTensors::read_metadata(&map).map_err(bad)?;
        let kind = meta
            .metadata()
            .as_ref()
            .and_then(|m| m.get("ansatz.experts"));
        let scales = match kind.map(String::as_str) {
            Some("int4-row") => ScaleKind::Row,
            Some("int4-g64") => ScaleKind::G64,
            other => {
                return Err(wrong(format!(
                    "metadata `ansatz.experts`: expected int4-row or int4-g64, found {}; \
                     make it with `host convert`",
                    other.unwrap_or("nothing")
                )));
            }
        };
        let shape = ExpertShape {
            hidden: config.hidden_size,
            intermediate: config.moe_intermediate_size,
            scales,
        };
        let unit = match scales {
            ScaleKind::Row => 2,
            ScaleKind::G64 => gpu::arith::GROUP,
        };
        for (n, name) in [
            (shape.hidden, "hidden_size"),
            (shape.intermediate, "moe_intermediate_size"),
        ] {
            if n == 0 || n > super::format::MAX_DIM || !n.is_multiple_of(unit) {
                return Err(ArchiveError::Source {
                    path: config_path,
                    what: format!(
                        "{name}: expected a multiple of {unit} up to {}, found {n}; \
                         such a model cannot be packed",
                        super::format::MAX_DIM
                    ),
                });
            }
        }

        let st = SafeTensors::deserialize(&map).map_err(bad)?;
        let mut layers = BTreeSet::new();
        let mut experts = 0;
        let mut tensors = BTreeMap::new();
        for (name, view) in st.tensors() {
            let Some((layer, expert)) = parse(&name) else {
                return Err(wrong(format!(
                    "{name}: expected only model.layers.L.mlp.experts.E tensors; \
                     make it with `host convert`"
                )));
            };
            layers.insert(layer);
            experts = experts.max(expert + 1);
            let dtype = if name.ends_with(".qs") {
                Dtype::F32
            } else {
                Dtype::U8
            };
            if view.dtype() != dtype {
                return Err(wrong(format!(
                    "{name}: expected type {dtype:?}, found {:?}; make it with `host convert`",
                    view.dtype()
                )));
            }
            let at = view.data().as_ptr().addr() - map.as_ptr().addr();
            tensors.insert(name, at..at + view.data().len());
        }
        let mut me = Self {
            shape,
            layers: layers.into_iter().collect(),
            experts,
            tensors,
            map,
            path: path.clone(),
        };
        if me.layers.is_empty() {
            return Err(me.wrong("no experts in it; make it with `host convert`".into()));
        }
        let whole = 6 * me.layers.len() as u128 * me.experts as u128;
        let mut lows = Vec::new();
        for &layer in &me.layers {
            // Of row scales a layer may be of bytes.
            let (rows, cols) = me.shape.dims(MatrixKind::Gate);
            let first = me.tensors.get(&name(layer, 0, MatrixKind::Gate));
            let int8 = scales == ScaleKind::Row && first.is_some_and(|r| r.len() == rows * cols);
            if int8 {
                lows.push(layer | LOW_NIBBLES);
            }
            for expert in 0..me.experts {
                for kind in MatrixKind::ALL {
                    let (rows, cols) = me.shape.dims(kind);
                    let name = name(layer, expert, kind);
                    me.bytes(&name, if int8 { rows * cols } else { rows * cols / 2 })?;
                    me.bytes(&format!("{name}.qs"), 4 * me.shape.scales.count(rows, cols))?;
                }
            }
        }
        if me.tensors.len() as u128 != whole {
            return Err(me.wrong(format!(
                "expected {whole} tensors, found {}; make it with `host convert`",
                me.tensors.len()
            )));
        }
        me.layers.extend(lows);
        Ok(me)
    }

    fn wrong(&self, what: String) -> ArchiveError {
        ArchiveError::Source {
            path: self.path.clone(),
            what,
        }
    }

    fn bytes(&self, name: &str, len: usize) -> Result<&[u8], ArchiveError> {
        let Some(range) = self.tensors.get(name) else {
            return Err(self.wrong(format!(
                "{name}: expected a tensor of {len} bytes, found none; make it with `host convert`"
            )));
        };
        if range.len() != len {
            return Err(self.wrong(format!(
                "{name}: expected {len} bytes, found {}; it does not belong to this config.json",
                range.len()
            )));
        }
        Ok(&self.map[range.clone()])
    }
}

fn name(layer: u32, expert: usize, kind: MatrixKind) -> String {
    format!(
        "model.layers.{layer}.mlp.experts.{expert}.{}.weight",
        kind.name()
    )
}

impl ExpertSource for SafetensorsExperts {
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
        let number = layer & !LOW_NIBBLES;
        let int8 = self.layers.contains(&(number | LOW_NIBBLES));
        let one = |kind| {
            let (rows, cols) = self.shape.dims(kind);
            let name = name(number, expert, kind);
            let packed = match int8 {
                true => {
                    let bytes = self.bytes(&name, rows * cols)?;
                    Cow::Owned(int8_nibbles(bytes, layer != number))
                }
                false => Cow::Borrowed(self.bytes(&name, rows * cols / 2)?),
            };
            let scales = format!("{name}.qs");
            let scales = self.bytes(&scales, 4 * self.shape.scales.count(rows, cols))?;
            Ok(RawMatrix {
                packed,
                scales: match bytemuck::try_cast_slice(scales) {
                    Ok(s) => Cow::Borrowed(s),
                    Err(_) => Cow::Owned(decode_scales(ScaleFormat::F32, scales)),
                },
            })
        };
        Ok([
            one(MatrixKind::Gate)?,
            one(MatrixKind::Up)?,
            one(MatrixKind::Down)?,
        ])
    }
}
