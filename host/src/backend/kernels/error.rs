//! What goes wrong in the kernel back end.

use gpu::coded_plan::DoesNotFit;

use super::device::DeviceError;
use crate::archive::ArchiveError;
use crate::backend::cpu::CpuError;

/// What goes wrong in the kernel back end.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An operator would leave a buffer.
    #[error("{what}: elements {start}..{end} of a buffer of {have}")]
    Range {
        /// Operator and operand.
        what: &'static str,
        /// First element.
        start: usize,
        /// Past the last.
        end: usize,
        /// Elements that there are.
        have: usize,
    },
    /// A dimension that the kernels do not take.
    #[error("{what} is {found}, expected {expected}")]
    Dimension {
        /// Which.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What it may be.
        expected: &'static str,
    },
    /// Experts that do not have the layer's shape.
    #[error("expert {expert}, {matrix}: {field} is {found}, expected {expected}")]
    Matrix {
        /// Expert.
        expert: usize,
        /// Its matrix.
        matrix: &'static str,
        /// What differs.
        field: &'static str,
        /// Its value.
        found: usize,
        /// Value expected.
        expected: usize,
    },
    /// Coded experts that need more shared memory than the device has.
    #[error("{device}: {source}")]
    DoesNotFit {
        /// The device.
        device: String,
        /// What is needed.
        source: DoesNotFit,
    },
    /// The CPU, where it computes experts.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The archive that experts come from.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// An expert that could not be read when it was needed.
    #[error(
        "layer {layer}, expert {expert}: cannot be read from the archive: {source}; check the disk"
    )]
    Read {
        /// Model layer.
        layer: u32,
        /// Expert.
        expert: usize,
        /// Why.
        source: std::io::Error,
    },
    /// Jobs whose decoder did not end in its start state.
    #[error(
        "{jobs} blocks of coded experts did not decode: the archive is corrupt or was changed in \
         memory; run `host verify`"
    )]
    Corrupt {
        /// How many.
        jobs: u32,
    },
    /// The same, as they were loaded.
    #[error(
        "layer {layer}: {jobs} blocks of its experts did not decode: the archive is corrupt; run \
         `host verify`"
    )]
    CorruptLayer {
        /// The layer.
        layer: u32,
        /// How many.
        jobs: u32,
    },
}

pub(super) type Result<T> = std::result::Result<T, KernelError>;
