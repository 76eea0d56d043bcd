//! Checking a whole archive.

use rayon::prelude::*;
use serde::Serialize;

use crate::expert::MatrixKind;
use crate::interrupt;

use super::error::{Check, Place, hex};
use super::source::ExpertSource;
use super::{Archive, ArchiveError, expert_digest};

/// What was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Records.
    pub records: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the raw experts that they stand for.
    pub raw_bytes: u64,
    /// Whether the raw experts of a model were compared.
    pub compared: bool,
}

/// The remedy for an archive that is whole, but of other experts.
const OTHER: &str = "the archive is of another model: make one with `host pack`";

/// An error once the user has asked to stop.
pub(super) fn going() -> Result<(), ArchiveError> {
    match interrupt::requested() {
        true => Err(ArchiveError::Stopped),
        false => Ok(()),
    }
}

/// Decodes every record and checks it against its checksum and its raw digest, and, where a model's
/// raw experts are given, against them. `progress` is called with 1 for each expert.
pub fn verify<S: ExpertSource>(
    archive: &Archive,
    model: Option<&S>,
    progress: impl Fn(u64) + Sync,
) -> Result<Verified, ArchiveError> {
    let header = Check {
        path: archive.path(),
        place: Place::Header,
    };
    if let Some(model) = model {
        let (a, b) = (archive.shape(), model.shape());
        if a != b {
            return Err(header.invalid("shape", b, a, OTHER));
        }
        let (a, b) = (archive.layers(), model.layers());
        if a != b {
            return Err(header.invalid(
                "layers",
                format_args!("{b:?}"),
                format_args!("{a:?}"),
                OTHER,
            ));
        }
        let (a, b) = (archive.experts(), model.experts());
        if a != b {
            return Err(header.invalid("experts", b, a, OTHER));
        }
    }
    let experts = archive.experts();
    (0..archive.layers().len() * experts)
        .into_par_iter()
        .try_for_each(|i| {
            going()?;
            let (layer, expert) = (archive.layers()[i / experts], i % experts);
            // A shared record is checked once, but compared with every expert that has it.
            if model.is_none() && archive.first(layer, expert)? != (layer, expert) {
                progress(1);
                return Ok(());
            }
            let record = archive.record(layer, expert)?;
            let raw = record.decode_all()?;
            let c = Check {
                path: archive.path(),
                place: Place::Record { layer, expert },
            };
            let digest = archive.raw_digest(layer, expert)?;
            c.equal(
                "digest of the raw expert",
                hex(&digest),
                hex(&expert_digest(&raw)),
            )?;
            if let Some(model) = model {
                let theirs = model.expert(layer, expert)?;
                for (kind, (ours, theirs)) in
                    MatrixKind::ALL.into_iter().zip(raw.iter().zip(&theirs))
                {
                    let c = Check {
                        path: archive.path(),
                        place: Place::Matrix {
                            layer,
                            expert,
                            kind,
                        },
                    };
                    let mut packed = ours.packed.iter().zip(theirs.packed.iter());
                    if let Some(at) = packed.position(|(a, b)| a != b) {
                        return Err(c.invalid(
                            "weights",
                            format_args!(
                                "{:#04x} at byte {at}, as the model has it",
                                theirs.packed[at]
                            ),
                            format_args!("{:#04x}", ours.packed[at]),
                            OTHER,
                        ));
                    }
                    let mut scales = ours.scales.iter().zip(theirs.scales.iter());
                    if let Some(at) = scales.position(|(a, b)| a.to_bits() != b.to_bits()) {
                        return Err(c.invalid(
                            "scales",
                            format_args!("{:e} at {at}, as the model has it", theirs.scales[at]),
                            format_args!("{:e}", ours.scales[at]),
                            OTHER,
                        ));
                    }
                }
            }
            progress(1);
            Ok(())
        })?;
    let records = archive.records() as u64;
    Ok(Verified {
        records,
        file_bytes: archive.file_len(),
        raw_bytes: records * archive.shape().raw_bytes() as u64,
        compared: model.is_some(),
    })
}

/// Checks every record's checksum, structure and padding without decoding it: at the rate of the
/// disk. `progress` is called with 1 for each record.
pub fn verify_checksums(
    archive: &Archive,
    progress: impl Fn(u64) + Sync,
) -> Result<Verified, ArchiveError> {
    let experts = archive.experts();
    (0..archive.layers().len() * experts)
        .into_par_iter()
        .try_for_each(|i| {
            going()?;
            let (layer, expert) = (archive.layers()[i / experts], i % experts);
            if archive.first(layer, expert)? == (layer, expert) {
                archive.record(layer, expert)?;
                progress(1);
            }
            Ok(())
        })?;
    let records = archive.records() as u64;
    Ok(Verified {
        records,
        file_bytes: archive.file_len(),
        raw_bytes: records * archive.shape().raw_bytes() as u64,
        compared: false,
    })
}
