//! The matrices of the experts' FFN alone, for `host bench kernels`.

use cuda_std::mem::Slice;

use super::{Grouped, Operands, Quantised};
use crate::backend::kernels::buffer::{Buffer, input};
use crate::backend::kernels::device::Device;
use crate::backend::kernels::error::{KernelError, Result};
use crate::backend::kernels::ops::KernelBackend;
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
    /// Bytes of a copy that tells the memory's rate; 0 for none.
    fn copy_bytes(&self) -> usize;
}

impl Cached for CudaDevice {
    fn cache_bytes(&self) -> usize {
        self.describe_device().l2_bytes as usize
    }

    fn copy_bytes(&self) -> usize {
        1 << 30
    }
}

/// None: what it times is the emulator.
impl Cached for EmulatedDevice {
    fn cache_bytes(&self) -> usize {
        0
    }

    fn copy_bytes(&self) -> usize {
        0
    }
}

impl<D: Cached> KernelBackend<D> {
    fn operands(&self, prepared: &Prepared<D::Memory>, down: bool) -> Operands {
        let (x, row_map) = if down {
            (&prepared.hidden, Slice::EMPTY)
        } else {
            (&prepared.inputs, prepared.groups.groups.slot_token)
        };
        Operands {
            x: x.values.slice(),
            gsum: x.sums.slice(),
            row_map,
            out: prepared.out[down as usize].slice(),
        }
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
        let operands = self.operands(prepared, down);
        let groups = &prepared.groups.groups;
        self.matmuls(experts, &experts.classes[down as usize], groups, operands)
    }

    fn decode(&self, experts: &Experts<D::Memory>, prepared: &Prepared<D::Memory>) -> Result<bool> {
        for (down, class) in experts.classes.iter().enumerate() {
            let operands = self.operands(prepared, down == 1);
            self.decode_alone(experts, class, &prepared.groups.groups, operands)?;
        }
        Ok(true)
    }

    /// From the second of three copies of a gigabyte.
    fn copy_rate(&self) -> Result<Option<f64>> {
        let bytes = self.device().copy_bytes();
        if bytes == 0 {
            return Ok(None);
        }
        let (from, to) = (self.scratch::<u8>(bytes)?, self.scratch::<u8>(bytes)?);
        self.device().fill(from.memory(), 0, bytes, 1)?;
        let times = self.seconds(3, &mut |_| {
            let copied = self
                .device()
                .copy((from.memory(), 0), (to.memory(), 0), bytes);
            Ok(copied?)
        })?;
        Ok(Some(2.0 * bytes as f64 / times[1]))
    }

    fn seconds(&self, runs: usize, work: &mut dyn FnMut(usize) -> Result<()>) -> Result<Vec<f64>> {
        let device = self.device();
        let mut events = Vec::with_capacity(runs);
        for run in 0..runs {
            let from = device.event().map_err(KernelError::from)?;
            work(run)?;
            events.push((from, device.event().map_err(KernelError::from)?));
        }
        events
            .iter()
            .map(|(from, to)| Ok(device.elapsed(from, to)?))
            .collect()
    }
}
