//! What goes wrong with an archive, and where.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::codec::CodecError;
use crate::expert::MatrixKind;

use super::format::LOW_NIBBLES;

/// A place in an archive or in a file of raw experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The fixed header.
    Header,
    /// A frequency table.
    Table(usize),
    /// An entry of the list of layers.
    Layer(usize),
    /// An expert's entry in the index.
    Index {
        /// Model layer.
        layer: u32,
        /// Expert.
        expert: usize,
    },
    /// An expert's record.
    Record {
        /// Model layer.
        layer: u32,
        /// Expert.
        expert: usize,
    },
    /// A matrix of a record.
    Matrix {
        /// Model layer.
        layer: u32,
        /// Expert.
        expert: usize,
        /// Which of the three.
        kind: MatrixKind,
    },
}

/// A layer's number for people: the high bit says which nibbles.
pub fn layer_name(layer: u32) -> String {
    match layer & LOW_NIBBLES {
        0 => layer.to_string(),
        _ => format!("{} (low nibbles)", layer & !LOW_NIBBLES),
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Header => write!(f, "header"),
            Place::Table(i) => write!(f, "table {i}"),
            Place::Layer(i) => write!(f, "layer entry {i}"),
            Place::Index { layer, expert } => {
                write!(f, "index of layer {}, expert {expert}", layer_name(*layer))
            }
            Place::Record { layer, expert } => {
                write!(f, "record of layer {}, expert {expert}", layer_name(*layer))
            }
            Place::Matrix {
                layer,
                expert,
                kind,
            } => write!(
                f,
                "record of layer {}, expert {expert}, {}",
                layer_name(*layer),
                kind.name()
            ),
        }
    }
}

/// A field that is not what it must be.
#[derive(Debug)]
pub struct Invalid {
    /// The file.
    pub path: PathBuf,
    /// Where in it.
    pub place: Place,
    /// Which field.
    pub field: &'static str,
    /// What it must be.
    pub expected: String,
    /// What it is.
    pub found: String,
    /// What to do about it.
    pub remedy: &'static str,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Invalid {
            path,
            place,
            field,
            expected,
            found,
            remedy,
        } = self;
        let path = path.display();
        write!(
            f,
            "{path}: {place}: {field}: expected {expected}, found {found}; {remedy}"
        )
    }
}

/// What an interrupted pack left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The unfinished archive.
    pub path: PathBuf,
    /// Experts that are in it; 0 where it was not looked into before the end.
    pub experts: usize,
    /// Of so many.
    pub of: usize,
}

fn left(kept: &Option<Kept>) -> String {
    match kept {
        None => "nothing was written".into(),
        Some(k) if k.experts == 0 => format!(
            "{} stays as it was; the same command with --resume goes on from there",
            k.path.display()
        ),
        Some(k) => format!(
            "{} of {} experts are in {}; the same command with --resume goes on from there",
            k.experts,
            k.of,
            k.path.display()
        ),
    }
}

/// Why an archive could not be read, written or believed.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}; {remedy}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: std::io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// No archive, nor any other file.
    #[error("{}: not a file; give the archive, such as experts.ansx of a model directory", path.display())]
    NotAFile {
        /// What was given.
        path: PathBuf,
    },
    /// A field has a wrong value.
    #[error("{0}")]
    Invalid(Box<Invalid>),
    /// A matrix does not decode.
    #[error("{}: {place}: {source}; {}", path.display(), DAMAGED)]
    Codec {
        /// The file.
        path: PathBuf,
        /// The matrix.
        place: Place,
        /// Why not.
        source: CodecError,
    },
    /// There is no such expert.
    #[error(
        "{}: no record of layer {}, expert {expert}; `host inspect` lists what there is",
        path.display(), layer_name(*layer)
    )]
    Missing {
        /// The file.
        path: PathBuf,
        /// Model layer.
        layer: u32,
        /// Expert.
        expert: usize,
    },
    /// Packing was told to stop.
    #[error("{}: interrupted; {}", path.display(), left(kept))]
    Interrupted {
        /// The file that was to be.
        path: PathBuf,
        /// What there is of it.
        kept: Option<Kept>,
    },
    /// Reading was told to stop.
    #[error("interrupted")]
    Stopped,
    /// An unfinished archive that cannot be gone on with.
    #[error("{}: {what}", path.display())]
    Partial {
        /// The unfinished archive.
        path: PathBuf,
        /// Why not, and the remedy.
        what: &'static str,
    },
    /// What cannot be packed so.
    #[error("{what}")]
    Options {
        /// Why not, and the remedy.
        what: String,
    },
    /// A model's raw experts.
    #[error(transparent)]
    Model(Box<crate::model::ModelError>),
    /// Raw experts that cannot be packed.
    #[error("{}: {what}", path.display())]
    Source {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the remedy.
        what: String,
    },
}

/// The remedy for damage.
pub(super) const DAMAGED: &str =
    "the archive is damaged: copy it again or make it with `host pack`";
/// The remedy for an archive that cannot be read.
pub(super) const UNREADABLE: &str = "give an archive that `host pack` made";
/// The remedy for an archive that cannot be written.
pub(super) const UNWRITABLE: &str =
    "choose a place that can be written and has the space (-o FILE)";
/// The same where some of its experts are written.
pub(super) const UNFINISHED: &str =
    "make room, and the same command with --resume goes on; or choose another place (-o FILE)";
/// The same where what is written cannot be gone on with.
pub(super) const ANEW: &str =
    "pack the experts again, to a place that can be written and has the space (-o FILE)";
/// The remedy for an archive in its place that may not outlive a power failure.
pub(super) const NAMED: &str =
    "the archive is whole and in its place, which a power failure now may undo: run `sync`";
/// The remedy for raw experts that cannot be read.
pub(super) const NO_EXPERTS: &str =
    "it needs a model directory with raw experts, as `host convert` makes it";
/// The remedy for an archive of an earlier version.
pub(super) const OLD: &str = "it is of an earlier version: pack the experts again with `host pack`";
/// The remedy for a file that is something else.
pub(super) const FOREIGN: &str = "make an archive with `host pack` of this version";

impl ArchiveError {
    pub(super) fn io(
        path: &Path,
        action: &'static str,
        source: std::io::Error,
        remedy: &'static str,
    ) -> Self {
        ArchiveError::Io {
            path: path.to_owned(),
            action,
            source,
            remedy,
        }
    }
}

/// Checks of fields at one place of one file.
#[derive(Clone, Copy)]
pub(super) struct Check<'a> {
    pub path: &'a Path,
    pub place: Place,
}

impl Check<'_> {
    pub fn invalid(
        &self,
        field: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
        remedy: &'static str,
    ) -> ArchiveError {
        ArchiveError::Invalid(Box::new(Invalid {
            path: self.path.to_owned(),
            place: self.place,
            field,
            expected: expected.to_string(),
            found: found.to_string(),
            remedy,
        }))
    }

    /// Refuses a value that is not the one expected, as damage.
    pub fn equal<T: PartialEq + fmt::Display>(
        &self,
        field: &'static str,
        expected: T,
        found: T,
    ) -> Result<(), ArchiveError> {
        self.that(expected == found, field, expected, found)
    }

    /// Refuses unless `ok`, as damage.
    pub fn that(
        &self,
        ok: bool,
        field: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Result<(), ArchiveError> {
        if ok {
            Ok(())
        } else {
            Err(self.invalid(field, expected, found, DAMAGED))
        }
    }

    /// Refuses bytes that are not all zero.
    pub fn zero(&self, field: &'static str, bytes: &[u8]) -> Result<(), ArchiveError> {
        match bytes.iter().position(|b| *b != 0) {
            None => Ok(()),
            Some(at) => Err(self.invalid(
                field,
                "zeros",
                format_args!("{:#04x} at its byte {at}", bytes[at]),
                DAMAGED,
            )),
        }
    }
}

/// Bytes in hexadecimal, for messages.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
