//! Whether a model directory holds what its `config.json` asks for.

use std::path::Path;

use rayon::prelude::*;

use super::config::Config;
use super::directory::{ARCHIVE_FILE, Dense, RawExperts};
use super::error::ModelError;
use super::weights::{check_archive, inventory};
use crate::archive::{Archive, ExpertSource, verify};
use crate::interrupt;

/// Refuses a dense part that lacks a tensor, or has one of another shape or in a format that is
/// not read, or scales that are not finite.
pub fn check_dense(dir: &Path, config: &Config) -> Result<Dense, ModelError> {
    let dense = Dense::open(dir)?;
    for (name, shape) in inventory(config) {
        dense.check(&name, &shape)?;
    }
    Ok(dense)
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
        for (i, layer) in layers.iter().enumerate() {
            going()?;
            let experts = 0..raw.experts();
            experts
                .into_par_iter()
                .try_for_each(|e| raw.expert(*layer, e).map(drop))?;
            progress(tensors.len() + i + 1, steps);
        }
    }
    if let Some(archive) = &archive {
        check_archive(archive, dir, config)?;
        verify(archive, raw.as_ref(), |_| ())?;
    }
    progress(steps, steps);
    Ok(())
}

fn going() -> Result<(), ModelError> {
    if interrupt::requested() {
        return Err(ModelError::Interrupted);
    }
    Ok(())
}
