//! Whether a model directory holds what its `config.json` asks for.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::config::Config;
use super::directory::{ARCHIVE_FILE, Dense, RawExperts};
use super::error::ModelError;
use super::inventory::inventory;
use super::source::{Source, check_archive};
use crate::archive::{Archive, ExpertSource, verify};
use crate::backend::KvFormat;
use crate::expert::Tier;
use crate::interrupt;
use crate::placement::memory::cache;

/// Refuses a dense part that lacks a tensor, or has one of another shape or in a format that is
/// not read, or scales that are not finite.
pub fn check_dense(dir: &Path, config: &Config) -> Result<Dense, ModelError> {
    let dense = Dense::open(dir, config)?;
    for (name, shape) in inventory(config) {
        dense.check(&name, &shape)?;
    }
    Ok(dense)
}

/// What a model is made of, as its files have it, and what it will take.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    /// Layers.
    pub layers: usize,
    /// Of them with routed experts.
    pub sparse_layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Number format of the raw experts: `int4-row` or `int4-g64`.
    pub expert_format: &'static str,
    /// `raw` or `ans`.
    pub tier: &'static str,
    /// Bytes of the experts in that tier.
    pub expert_bytes: u64,
    /// Bytes of them as raw int4 with f32 scales.
    pub expert_raw_bytes: u64,
    /// Dense tensors by format, as they are on disk.
    pub dense_formats: BTreeMap<String, usize>,
    /// Bytes of the dense part in memory.
    pub dense_bytes: u64,
    /// Positions that the model has.
    pub positions: usize,
    /// Bytes of the caches of so many positions.
    pub cache_bytes: u64,
    /// The same in bf16.
    pub cache_bf16_bytes: u64,
}

impl Facts {
    /// Of a model whose parts were opened.
    pub fn of(config: &Config, source: &Source, dense: &Dense) -> Result<Self, ModelError> {
        let mut dense_formats = BTreeMap::new();
        let mut dense_bytes = 0;
        for (name, shape) in inventory(config) {
            let format = dense.check(&name, &shape)?;
            let cols = shape.last().copied().unwrap_or(1);
            *dense_formats.entry(format.name(cols)).or_insert(0) += 1;
            dense_bytes += dense.bytes(&name, &shape)?.0;
        }
        let sparse_layers = config.sparse_layers().count();
        let experts = config.router.experts;
        let narrow = Config {
            kv: KvFormat::Bf16,
            ..config.clone()
        };
        Ok(Self {
            layers: config.layers.len(),
            sparse_layers,
            experts,
            expert_format: source.shape().scales.name(),
            tier: match source.tier() {
                Tier::Raw => "raw",
                Tier::Ans => "ans",
            },
            expert_bytes: source.bytes(config)?,
            expert_raw_bytes: (config.sparse_layers())
                .map(|l| {
                    let halves = 1 + source.is_int8(l) as usize;
                    (halves * experts * source.shape().raw_bytes()) as u64
                })
                .sum(),
            dense_formats,
            dense_bytes,
            positions: config.max_positions,
            cache_bytes: cache(config, config.max_positions),
            cache_bf16_bytes: cache(&narrow, config.max_positions),
        })
    }
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        writeln!(
            f,
            "  experts  {} layers of {}, {}; {} {:.1} MB of {:.1} MB raw",
            self.sparse_layers,
            self.experts,
            self.expert_format,
            self.tier,
            mb(self.expert_bytes),
            mb(self.expert_raw_bytes)
        )?;
        let formats: Vec<String> = (self.dense_formats.iter())
            .map(|(format, n)| format!("{n} {format}"))
            .collect();
        writeln!(
            f,
            "  dense    {:.1} MB in memory; tensors: {}",
            mb(self.dense_bytes),
            formats.join(", ")
        )?;
        writeln!(
            f,
            "  cache    {:.1} MB for all {} positions, {:.1} MB with --kv bf16",
            mb(self.cache_bytes),
            self.positions,
            mb(self.cache_bf16_bytes)
        )
    }
}

/// Reads all of a model: every dense weight and every scale is finite, every record of the archive
/// decodes to its digest, and to the raw experts where those are there too. `progress` gets
/// `(steps done, steps)`.
pub fn check_all(
    dir: &Path,
    config: &Config,
    mut progress: impl FnMut(usize, usize),
) -> Result<(), ModelError> {
    let dense = check_dense(dir, config)?;
    let tensors = inventory(config);
    let layers: Vec<u32> = config.sparse_layers().map(|l| l as u32).collect();
    let path = dir.join(ARCHIVE_FILE);
    let archive = path.exists().then(|| Archive::open(&path)).transpose()?;
    let steps = tensors.len() + layers.len() + 1;
    for (i, (name, shape)) in tensors.iter().enumerate() {
        going()?;
        dense.check_finite(name, shape)?;
        progress(i + 1, steps);
    }
    let raw = RawExperts::are_in(dir)
        .then(|| RawExperts::open(dir, config))
        .transpose()?;
    if let Some(raw) = &raw {
        check_scales(raw, &layers, |i| progress(tensors.len() + i + 1, steps))?;
    }
    if let Some(archive) = &archive {
        check_archive(archive, dir, config)?;
        verify(archive, raw.as_ref(), |_| ())?;
    }
    progress(steps, steps);
    Ok(())
}

/// Refuses raw experts of these layers with a scale that is not finite or negative, as loading them
/// does. `progress` gets the number of each layer that is done.
pub fn check_scales(
    raw: &RawExperts,
    layers: &[u32],
    mut progress: impl FnMut(usize),
) -> Result<(), ModelError> {
    for (i, layer) in layers.iter().enumerate() {
        going()?;
        (0..raw.experts())
            .into_par_iter()
            .try_for_each(|e| raw.check_scales(*layer as usize, e))?;
        progress(i);
    }
    Ok(())
}

fn going() -> Result<(), ModelError> {
    if interrupt::requested() {
        return Err(ModelError::Interrupted);
    }
    Ok(())
}
