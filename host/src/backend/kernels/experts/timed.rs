//! The matrices of the experts' FFN alone, for `host bench kernels`.

use cuda_std::mem::Slice;

use super::{Grouped, Operands, Quantised};
use crate::backend::kernels::device::Device;
use crate::backend::kernels::ops::{Buffer, KernelBackend, KernelError, Result, input};
use crate::backend::kernels::{CudaDevice, EmulatedDevice, Experts};
use crate::backend::{Backend, rows};
use crate::bench::Timed;

/// Quantised inputs of both halves of the FFN, assignments, and room for the partial sums.
pub struct Prepared<M> {
    inputs: Quantised<M>,
    hidden: Quantised<M>,
    groups: Grouped<M>,
    /// Partial sums of gate and up, and of down.
    out: [Buffer<u32, M>; 2],
}

/// A device that knows its cache.
pub trait Cached: Device {
    /// Bytes of the last level before the memory that weights are in.
    fn cache_bytes(&self) -> usize;
}

impl Cached for CudaDevice {
    fn cache_bytes(&self) -> usize {
        self.describe_device().l2_bytes as usize
    }
}

/// None: what it times is the emulator.
impl Cached for EmulatedDevice {
    fn cache_bytes(&self) -> usize {
        0
    }
}

impl<D: Cached> Timed for KernelBackend<D> {
    type Prepared = Prepared<D::Memory>;

    fn cache_bytes(&self) -> usize {
        self.device().cache_bytes()
    }

    fn prepare(
        &self,
        experts: &Experts<D::Memory>,
        x: &[f32],
        h: &[f32],
        ids: &[u32],
        top_k: usize,
    ) -> Result<Prepared<D::Memory>> {
        let (hidden, intermediate) = (experts.shape.hidden, experts.shape.intermediate);
        let tokens = ids.len() / top_k;
        let quantise = |x: &[f32], n: usize, cols: usize| {
            let x = self.upload(x)?;
            self.quantise(
                input("bench: activations", rows(&x, cols), n, cols)?,
                n,
                cols,
            )
        };
        let ids = self.upload(ids)?;
        let [gate_up, down] = &experts.classes;
        let room = |class: &super::Class<D::Memory>| {
            self.scratch(tokens * top_k * class.partials(experts.form))
        };
        Ok(Prepared {
            inputs: quantise(x, tokens, hidden)?,
            hidden: quantise(h, tokens * top_k, intermediate)?,
            groups: self.group(experts, ids.slice(), tokens, top_k)?,
            out: [room(gate_up)?, room(down)?],
        })
    }

    fn multiply(
        &self,
        experts: &Experts<D::Memory>,
        prepared: &Prepared<D::Memory>,
        down: bool,
    ) -> Result<()> {
        let Prepared {
            inputs,
            hidden,
            groups,
            out,
        } = prepared;
        let groups = &groups.groups;
        let (x, row_map) = if down {
            (hidden, Slice::EMPTY)
        } else {
            (inputs, groups.slot_token)
        };
        let operands = Operands {
            x: x.values.slice(),
            gsum: x.sums.slice(),
            row_map,
            out: out[down as usize].slice(),
        };
        self.matmuls(experts, &experts.classes[down as usize], groups, operands)
    }

    fn seconds(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let device = self.device();
        let from = device.event().map_err(KernelError::from)?;
        work()?;
        let to = device.event().map_err(KernelError::from)?;
        Ok(device.elapsed(&from, &to)?)
    }
}
