//! What can be wrong with a model directory or a checkpoint.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A file that cannot be used, and what to do about it.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The operating system's answer.
    #[error("{}: {source}; {remedy}", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// Its answer.
        source: std::io::Error,
        /// What to do.
        remedy: String,
    },
    /// A field, tensor or length that is not as it must be.
    #[error("{}: {field}: expected {expected}, found {found}; {remedy}", file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// Field or tensor within it.
        field: String,
        /// What had to be there.
        expected: String,
        /// What is there.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// A back end's failure while weights are placed.
    #[error("placing {what}: {source}")]
    Place {
        /// Tensor or layer.
        what: String,
        /// The back end's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The archive's failure.
    #[error(transparent)]
    Archive(#[from] crate::archive::ArchiveError),
    /// Stopped by the user.
    #[error("interrupted")]
    Interrupted,
}

impl ModelError {
    /// An I/O error.
    pub fn io(file: &Path, source: std::io::Error, remedy: impl Display) -> Self {
        Self::Io {
            file: file.into(),
            source,
            remedy: remedy.to_string(),
        }
    }

    /// The same of a field that is within another.
    pub(super) fn within(mut self, outer: &str) -> Self {
        if let Self::Field { field, .. } = &mut self {
            *field = format!("{outer}.{field}");
        }
        self
    }

    /// A field that is not as expected.
    pub fn field(
        file: &Path,
        field: impl Display,
        expected: impl Display,
        found: impl Display,
        remedy: impl Display,
    ) -> Self {
        Self::Field {
            file: file.into(),
            field: field.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
            remedy: remedy.to_string(),
        }
    }
}
