//! Where a model's routed experts come from.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::config::Config;
use super::directory::{
    ARCHIVE_FILE, Dense, EXPERTS_FILE, EXPERTS_KEY, FINGERPRINT_KEY, RawExperts,
};
use super::error::ModelError;
use super::inventory::inventory;
use crate::archive::{Archive, ExpertSource, LOW_NIBBLES, LayerRecords, Record, expert_digest};
use crate::backend::LayerExperts;
use crate::disk::reader::DirectFile;
use crate::expert::{ExpertShape, ScaleKind, Tier};
use crate::placement;

/// Where routed experts come from.
pub enum Source {
    /// `experts.safetensors` or a container's shards; tier raw.
    Raw(RawExperts),
    /// An archive, decoded while loading, by the device where it can; tier raw.
    Decoded(Tiered),
    /// An archive; tier ans.
    Coded(Archive),
    /// An archive whose experts go to several tiers.
    Tiered(Tiered),
}

/// An archive, and where its experts go.
pub struct Tiered {
    pub(super) archive: Archive,
    pub(super) file: Arc<DirectFile>,
    pub(super) tiers: Vec<Vec<placement::Tier>>,
    pub(super) devices: Vec<Vec<u8>>,
    pub(super) staged: usize,
    pub(super) cached: bool,
    pub(super) moving: bool,
}

impl Tiered {
    /// On the first device, for good.
    fn new(archive: Archive, tiers: Vec<Vec<placement::Tier>>) -> Result<Self, ModelError> {
        let file = DirectFile::open(archive.path())
            .map_err(|e| ModelError::io(archive.path(), e, "check the file's permissions"))?;
        Ok(Self {
            // A small archive is in the page cache already, or is read a second time from there.
            cached: archive.file_len() < crate::ram::available().unwrap_or(0) / 4,
            file: Arc::new(file),
            archive,
            tiers,
            devices: Vec::new(),
            staged: 0,
            moving: false,
        })
    }
}

const FOREIGN: &str = "it is the archive of another model: make this one's with `host pack -m DIR`";

impl Source {
    /// The experts of the model directory `dir` for `tier`; where none is asked for, coded ones if
    /// there is an archive.
    pub fn open(dir: &Path, config: &Config, tier: Option<Tier>) -> Result<Self, ModelError> {
        let archive = dir.join(ARCHIVE_FILE);
        let raw = RawExperts::are_in(dir);
        let tier = tier.unwrap_or(if archive.exists() {
            Tier::Ans
        } else {
            Tier::Raw
        });
        if tier == Tier::Raw && raw {
            return Ok(Self::Raw(RawExperts::open(dir, config)?));
        }
        if !archive.exists() {
            let missing = std::io::Error::new(std::io::ErrorKind::NotFound, "no such file");
            let pack = format!("`host pack -m {}`", dir.display());
            return Err(if raw {
                ModelError::io(&archive, missing, format!("make it with {pack}"))
            } else {
                let remedy = format!(
                    "a model directory has experts.safetensors (`host convert`), or experts.ansx, which \
                     {pack} makes of it"
                );
                ModelError::io(&dir.join(EXPERTS_FILE), missing, remedy)
            });
        }
        let archive = Archive::open(&archive)?;
        check_archive(&archive, dir, config)?;
        Ok(match tier {
            Tier::Raw => {
                let layer = vec![placement::Tier::VramHot; archive.experts()];
                let tiers = vec![layer; archive.layers().len()];
                Self::Decoded(Tiered::new(archive, tiers)?)
            }
            Tier::Ans => Self::Coded(archive),
        })
    }

    /// Where experts go, of sources that say that.
    pub(super) fn tiers(&self) -> Option<&Tiered> {
        match self {
            Source::Decoded(t) | Source::Tiered(t) => Some(t),
            Source::Raw(_) | Source::Coded(_) => None,
        }
    }

    /// The archive, if its experts stay coded.
    pub fn coded(&self) -> Option<&Archive> {
        match self {
            Source::Coded(archive) => Some(archive),
            Source::Tiered(t) => Some(&t.archive),
            _ => None,
        }
    }

    /// The same experts in several tiers: `tiers` of each expert of each layer with experts, in
    /// order, and the numbers of their devices, or nothing for the first. With `moving` experts can
    /// change places later. Whether what is read later goes past the page cache. `None` where there is no archive
    /// or the numbers are not its own.
    pub fn tiered(
        self,
        tiers: Vec<Vec<placement::Tier>>,
        devices: Vec<Vec<u8>>,
        staged: usize,
        moving: bool,
    ) -> Result<Option<(Self, bool)>, ModelError> {
        let Source::Coded(archive) = self else {
            return Ok(None);
        };
        let experts = archive.experts();
        let layers = archive.layers().len();
        let mut lengths = (tiers.iter().map(Vec::len)).chain(devices.iter().map(Vec::len));
        if tiers.len() != layers
            || !devices.is_empty() && devices.len() != layers
            || lengths.any(|n| n != experts)
        {
            return Ok(None);
        }
        let tiered = Tiered {
            devices,
            staged,
            moving,
            ..Tiered::new(archive, tiers)?
        };
        let direct = tiered.file.direct();
        Ok(Some((Self::Tiered(tiered), direct)))
    }

    /// Geometry of the experts.
    pub fn shape(&self) -> ExpertShape {
        match self {
            Source::Tiered(t) | Source::Decoded(t) => *t.archive.shape(),
            Source::Raw(raw) => raw.shape(),
            Source::Coded(archive) => *archive.shape(),
        }
    }

    /// Which tier they go to.
    pub fn tier(&self) -> Tier {
        match self {
            Source::Raw(_) | Source::Decoded(_) => Tier::Raw,
            Source::Coded(_) | Source::Tiered(_) => Tier::Ans,
        }
    }

    /// Whether a layer's experts are int8, and come as two layers of their nibbles.
    pub fn is_int8(&self, l: usize) -> bool {
        match self {
            Source::Raw(raw) => raw.is_int8(l),
            Source::Coded(archive)
            | Source::Decoded(Tiered { archive, .. })
            | Source::Tiered(Tiered { archive, .. }) => archive.is_int8(l as u32),
        }
    }

    /// Of the model's layers those with routed experts, of int8 ones both halves.
    fn layers<'a>(&'a self, config: &'a Config) -> impl Iterator<Item = usize> + 'a {
        config.sparse_layers().flat_map(|l| {
            let low = self.is_int8(l).then_some(l | LOW_NIBBLES as usize);
            [l].into_iter().chain(low)
        })
    }

    /// Bytes that all experts will take, without reading them.
    pub fn bytes(&self, config: &Config) -> Result<u64, ModelError> {
        let experts = config.router.experts;
        let layers = self.layers(config);
        match self {
            Source::Raw(_) | Source::Decoded(_) => {
                Ok((layers.count() * experts * self.shape().raw_bytes()) as u64)
            }
            Source::Coded(archive) | Source::Tiered(Tiered { archive, .. }) => {
                let mut bytes = 0;
                for layer in layers {
                    for e in 0..experts {
                        bytes += archive.bytes(layer as u32, e)?.len() as u64;
                    }
                }
                Ok(bytes)
            }
        }
    }

    /// Bytes that a layer's experts take of an archive, or decoded.
    pub(super) fn layer_bytes(&self, archive: &Archive, l: usize) -> Result<u64, ModelError> {
        let mut bytes = 0;
        for e in 0..archive.experts() {
            bytes += match self.tier() {
                Tier::Raw => archive.shape().raw_bytes() as u64,
                Tier::Ans => archive.place_of(l as u32, e)?.1 as u64,
            };
        }
        Ok(bytes)
    }

    /// A layer's experts and the bytes they take.
    pub(super) fn layer(&self, l: usize) -> Result<(LayerExperts<'_>, u64), ModelError> {
        let raw_bytes = |n: usize| (n * self.shape().raw_bytes()) as u64;
        Ok(match self {
            Source::Raw(raw) => {
                let layer = raw.layer(l)?;
                let bytes = raw_bytes(layer.len());
                (LayerExperts::Raw(layer), bytes)
            }
            Source::Decoded(Tiered { archive, .. }) => {
                let raw = records(archive, l)?
                    .1
                    .par_iter()
                    .map(Record::decode_all)
                    .collect::<Result<Vec<_>, _>>()?;
                let bytes = raw_bytes(raw.len());
                (LayerExperts::Raw(raw), bytes)
            }
            Source::Coded(archive) | Source::Tiered(Tiered { archive, .. }) => {
                let (layer, records) = records(archive, l)?;
                let bytes = records.iter().map(|r| r.bytes.len() as u64).sum();
                (LayerExperts::Coded { layer, records }, bytes)
            }
        })
    }
}

/// Bytes that are loaded when a model has each of its layers, embedding and head being loaded with
/// the first.
pub fn bytes_to_load(dir: &Path, config: &Config, source: &Source) -> Result<Vec<u64>, ModelError> {
    let dense = Dense::open(dir, config)?;
    let mut bytes = vec![0; config.all_layers().count()];
    for (name, shape) in inventory(config) {
        let layer = name.strip_prefix("model.layers.");
        let layer = layer.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        bytes[layer.unwrap_or(0)] += dense.bytes(&name, &shape)?.0;
    }
    for l in source.layers(config) {
        for e in 0..config.router.experts {
            bytes[l & !LOW_NIBBLES as usize] += match source.coded() {
                Some(archive) => archive.place_of(l as u32, e)?.1 as u64,
                None => source.shape().raw_bytes() as u64,
            };
        }
    }
    let mut sum = 0;
    for b in &mut bytes {
        sum += *b;
        *b = sum;
    }
    Ok(bytes)
}

/// A layer's records, all checked.
fn records(archive: &Archive, l: usize) -> Result<(LayerRecords<'_>, Vec<Record<'_>>), ModelError> {
    let layer = archive.layer(l as u32)?;
    let records = (0..layer.experts())
        .into_par_iter()
        .map(|e| layer.record(e))
        .collect::<Result<_, _>>()?;
    Ok((layer, records))
}

/// Refuses an archive whose experts are not this model's. Whether that is known to the bit: by the
/// model's fingerprint, or where it has none by the raw experts of its first and its last layer.
pub fn check_archive(archive: &Archive, dir: &Path, config: &Config) -> Result<bool, ModelError> {
    let wrong = |field: &str, expected: String, found: String| {
        Err(ModelError::field(
            archive.path(),
            field,
            expected,
            found,
            FOREIGN,
        ))
    };
    let dense = Dense::open(dir, config)?;
    let shape = archive.shape();
    // As the model says its own are; where it does not, any will do here.
    let scales = dense.metadata(EXPERTS_KEY).and_then(ScaleKind::from_name);
    let want = config.expert_shape(scales.unwrap_or(shape.scales));
    if *shape != want {
        let want = match scales {
            Some(_) => want.to_string(),
            None => format!("{} x {}", want.intermediate, want.hidden),
        };
        return wrong("expert shape", want, shape.to_string());
    }
    let layers: Vec<u32> = config.sparse_layers().map(|l| l as u32).collect();
    // One that drafts may be there and not be wanted. Low nibbles come after all others.
    let lows = archive.layers().iter().position(|l| l & LOW_NIBBLES != 0);
    let (mut had, lows) = archive
        .layers()
        .split_at(lows.unwrap_or(archive.layers().len()));
    if let Some(l) = lows
        .iter()
        .find(|l| had.binary_search(&(**l & !LOW_NIBBLES)).is_err())
    {
        let high = (l & !LOW_NIBBLES).to_string();
        return wrong(
            "layers",
            format!("layer {high} with its low nibbles"),
            "the low nibbles alone".into(),
        );
    }
    if !config.mtp && config.nextn.is_some() && had.last() == Some(&(config.layers.len() as u32)) {
        had = &had[..had.len() - 1];
    }
    if had != layers {
        let mut found = format!("{had:?}");
        if !lows.is_empty() {
            let high: Vec<u32> = lows.iter().map(|l| l & !LOW_NIBBLES).collect();
            found += &format!(", of int8 {high:?}");
        }
        return wrong("layers", format!("{layers:?}"), found);
    }
    if archive.experts() != config.router.experts {
        let found = archive.experts().to_string();
        return wrong("experts a layer", config.router.experts.to_string(), found);
    }
    let found = hex(archive.fingerprint());
    match dense.metadata(FINGERPRINT_KEY) {
        Some(want) if want != found => return wrong("fingerprint", want.into(), found),
        Some(_) => return Ok(true),
        None if !RawExperts::are_in(dir) => return Ok(false),
        None => (),
    }
    let raw = RawExperts::open(dir, config)?;
    if raw.shape() != *shape {
        return wrong("expert shape", raw.shape().to_string(), shape.to_string());
    }
    for layer in [layers.first(), layers.last()].into_iter().flatten() {
        let (want, found) = (
            expert_digest(&raw.expert(*layer, 0)?),
            archive.raw_digest(*layer, 0)?,
        );
        if want != found {
            let field = format!("digest of layer {layer}, expert 0");
            return wrong(&field, hex(&want), hex(&found));
        }
    }
    Ok(true)
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
