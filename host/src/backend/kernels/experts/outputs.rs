//! What is made of the matmuls' partial sums: the input of down, and the weighted sum.

use cuda_std::mem::Slice;
use gpu::launch::Launch;

use super::int8::Low;
use super::{Experts, Groups, Quantised, Sum};
use crate::backend::kernels::buffer::{Buffer, word};
use crate::backend::kernels::device::Device;
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::kernels::table::{ActQuantise, Combine};

impl<D: Device> KernelBackend<D> {
    /// Gate and up to the input of down.
    pub(super) fn activate(
        &self,
        experts: &Experts<D::Memory>,
        groups: &Groups,
        x: &Quantised<D::Memory>,
        inner: &Buffer<u32, D::Memory>,
        low: Option<&Low<D::Memory>>,
    ) -> Result<Quantised<D::Memory>> {
        let rows = experts.shape.intermediate;
        let h = Quantised {
            values: self.scratch(groups.slots * rows / 2)?,
            scales: self.scratch(groups.slots)?,
            sums: self.scratch(groups.slots * rows / 64)?,
        };
        let args = gpu::act::ActArgs {
            descs: experts.descs.slice(),
            partials: inner.slice(),
            low: low.map_or(Slice::EMPTY, |low| low.words.slice()),
            x_sums: x.sums.slice(),
            slot_token: groups.slot_token,
            slot_expert: groups.slot_expert,
            x_scales: x.scales.slice(),
            quantised: h.values.slice(),
            scales: h.scales.slice(),
            sums: h.sums.slice(),
            rows: word("rows", rows)?,
            segs: word("segments", experts.classes[0].parts(experts.form))?,
            slots: word("slots", groups.slots)?,
            flags: experts.flags(gpu::act::GROUPED),
            low_segs: low.map_or(0, |low| low.segs),
            groups: word("groups", experts.shape.hidden / 64)?,
        };
        let launch = Launch::new([args.slots, 1, 1], gpu::act::THREADS).shared(4 * args.rows);
        self.launch::<ActQuantise>(launch, args)?;
        Ok(h)
    }

    /// The weighted sum of what down gave.
    pub(super) fn combine(
        &self,
        experts: &Experts<D::Memory>,
        groups: &Groups,
        h: &Quantised<D::Memory>,
        outer: &Buffer<u32, D::Memory>,
        low: Option<&Low<D::Memory>>,
        sum: Sum,
    ) -> Result<()> {
        let args = gpu::combine::CombineArgs {
            descs: experts.descs.slice(),
            partials: outer.slice(),
            low: low.map_or(Slice::EMPTY, |low| low.words.slice()),
            sums: h.sums.slice(),
            slot_expert: groups.slot_expert,
            slot_of: groups.slot_of,
            scales: h.scales.slice(),
            weights: sum.weights,
            given: sum.given,
            out: sum.out.slice,
            out_stride: sum.out.stride,
            rows: word("rows", experts.shape.hidden)?,
            segs: word("segments", experts.classes[1].parts(experts.form))?,
            slots: word("slots", groups.slots)?,
            k: word("experts a token", sum.top_k)?,
            flags: experts.flags(gpu::act::GROUPED),
            low_segs: low.map_or(0, |low| low.segs),
            groups: word("groups", experts.shape.intermediate / 64)?,
        };
        let grid = [
            args.rows.div_ceil(gpu::combine::ROWS),
            word("tokens", sum.tokens)?,
            1,
        ];
        self.launch::<Combine>(Launch::new(grid, gpu::combine::THREADS), args)
    }
}
