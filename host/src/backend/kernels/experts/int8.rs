//! Int8 weights: their low nibbles are experts of their own, multiplied like the high ones.
//!
//! `gpu::act` and `gpu::combine` add both exact dot products.

use super::{Experts, Groups, Operands, Quantised};
use crate::backend::kernels::buffer::{Buffer, word};
use crate::backend::kernels::device::Device;
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;

/// Partial sums of the low nibbles of int8 weights.
pub(super) struct Low<M> {
    pub words: Buffer<u32, M>,
    /// Segments of a row.
    pub segs: u32,
}

impl<D: Device> KernelBackend<D> {
    /// Partial sums of a class of the low nibbles of int8 weights, where there are any.
    pub(super) fn low_nibbles(
        &self,
        low: Option<&Experts<D::Memory>>,
        class: usize,
        groups: &Groups,
        x: &Quantised<D::Memory>,
    ) -> Result<Option<Low<D::Memory>>> {
        let Some(experts) = low else {
            return Ok(None);
        };
        let of = &experts.classes[class];
        let words = self.scratch::<u32>(groups.slots * of.partials(experts.form))?;
        let operands = match class {
            0 => Operands::gate_up(x, groups, &words),
            _ => Operands::down(x, &words),
        };
        self.matmuls(experts, of, groups, operands)?;
        Ok(Some(Low {
            words,
            segs: word("segments", of.parts(experts.form))?,
        }))
    }
}
