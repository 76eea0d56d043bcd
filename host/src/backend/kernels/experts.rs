//! A layer's routed experts in device memory, and their part of the forward pass.
//!
//! Nothing comes back to the host within a layer: assignments are grouped on the device, and the
//! matmuls read there how many experts are active.

mod ahead;
mod hot;
mod int8;
mod load;
mod matmuls;
mod mixed;
mod moves;
mod outputs;
mod peers;
mod rans;
mod reads;
mod tiers;
mod timed;

pub(super) use hot::Landing;
use int8::Low;
pub(super) use tiers::Stage;
pub use timed::Prepared;

use cuda_std::mem::Slice;
use gpu::abi::MatrixDesc;
use gpu::coded_plan::DoesNotFit;
use gpu::launch::Launch;
use gpu::layout::{Folds, Symbol};
use gpu::plane3::Layout;

use super::buffer::{Buffer, View, input, output, word};
use super::device::{Device, DeviceMemory};
use super::error::{KernelError, Result};
use super::ops::KernelBackend;
use super::plan;
use super::table::*;
use crate::backend::{Guess, Rows, RowsMut};
use crate::expert::{ExpertShape, Form, ScaleKind};
use peers::Chosen;

/// The matrices that one table and one launch cover: gate and up, or down.
struct Class<M> {
    /// First matrix of an expert.
    first: usize,
    /// Matrices of an expert.
    count: usize,
    rows: usize,
    folds: Folds,
    /// Whether any is stored raw.
    raw: bool,
    /// Whether any is coded in rANS, and how.
    coded: Option<Coded<M>>,
    /// How those in plane3 are cut, if there are any.
    plane3: Option<Layout>,
}

impl<M> Class<M> {
    /// Parts of a segment that partial sums come in: `matmul_plane3` has segments of its own.
    fn split(&self, form: Form) -> usize {
        match (&self.plane3, form) {
            (Some(layout), Form::Fused) => layout.segs() / self.folds.segs(),
            _ => 1,
        }
    }

    /// Partial sums of a row.
    fn parts(&self, form: Form) -> usize {
        self.folds.segs() * self.split(form)
    }

    /// Words of a slot's partial sums.
    fn partials(&self, form: Form) -> usize {
        self.count * self.parts(form) * self.rows
    }
}

struct Coded<M> {
    symbol: Symbol,
    table: Buffer<u32, M>,
    /// Blocks of a matrix at most.
    blocks: usize,
}

/// One layer's routed experts on a device.
pub struct Experts<M: DeviceMemory> {
    shape: ExpertShape,
    experts: usize,
    form: Form,
    /// What `descs` points into.
    memory: Buffer<u8, M>,
    descs: Buffer<MatrixDesc, M>,
    classes: [Class<M>; 2],
    bytes: usize,
    /// Where the experts are that are not in this device's memory.
    tiers: Option<tiers::Tiers<M>>,
    /// u32 `[experts]`, as `group_experts` takes it, where some are on other devices.
    places: Option<Buffer<u32, M>>,
    /// Those of each of the other devices that has any.
    peers: Vec<Option<Experts<M>>>,
}

impl<M: DeviceMemory> Experts<M> {
    /// Experts.
    pub fn len(&self) -> usize {
        self.experts
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.experts == 0
    }

    /// Bytes that they take in device memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing of them needs the host.
    pub(super) fn recordable(&self) -> bool {
        self.tiers.as_ref().is_none_or(|t| t.resident())
    }

    /// Whether some are in pinned memory, from where they are better copied too early than too late.
    pub(super) fn guessable(&self) -> bool {
        self.tiers.as_ref().is_some_and(|t| t.guessable())
    }

    /// Counts selections of experts that are all in device memory.
    pub(super) fn count(&self, selections: usize) {
        if let Some(tiers) = &self.tiers {
            tiers.count(selections);
        }
    }

    /// `grouped` where scales are grouped.
    fn flags(&self, grouped: u32) -> u32 {
        match self.shape.scales {
            ScaleKind::Row => 0,
            ScaleKind::G64 => grouped,
        }
    }

    /// Tokens whose scratch is not too large.
    fn at_once(&self, tokens: usize, top_k: usize) -> usize {
        let [gate_up, down] = &self.classes;
        let partials = gate_up.partials(self.form) + down.partials(self.form);
        let sizes = (self.shape.hidden, self.shape.intermediate);
        plan::experts_at_once(tokens, top_k, sizes, partials)
    }
}

impl<D: Device> KernelBackend<D> {
    fn does_not_fit(&self, source: DoesNotFit) -> KernelError {
        KernelError::DoesNotFit {
            device: self.device().describe(),
            source,
        }
    }

    /// [`crate::backend::Backend::experts`], or with `low` [`crate::backend::Backend::experts_int8`], or with
    /// experts of the next layer that needs the host and a guess
    /// [`crate::backend::Backend::experts_and_next`].
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_experts(
        &self,
        experts: &Experts<D::Memory>,
        low: Option<&Experts<D::Memory>>,
        next: Option<Guess<'_, Self>>,
        x: Rows<'_, Buffer<f32, D::Memory>>,
        ids: &Buffer<u32, D::Memory>,
        weights: &Buffer<f32, D::Memory>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        if let Some(tiers) = &experts.tiers {
            if !tiers.resident() {
                let done =
                    self.run_tiers(experts, tiers, next, x, ids, weights, top_k, tokens, out);
                return self.settle(done);
            }
            if !self.records() {
                tiers.count(tokens * top_k);
            }
        }
        let done = self.run_resident(experts, low, x, ids, weights, top_k, tokens, out);
        self.settle(done)
    }

    /// The same where all experts are in memory of devices.
    #[allow(clippy::too_many_arguments)]
    fn run_resident(
        &self,
        experts: &Experts<D::Memory>,
        low: Option<&Experts<D::Memory>>,
        x: Rows<'_, Buffer<f32, D::Memory>>,
        ids: &Buffer<u32, D::Memory>,
        weights: &Buffer<f32, D::Memory>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        let hidden = experts.shape.hidden;
        let view = input("experts: x", x, tokens, hidden)?;
        let to = output("experts: out", &out, tokens, hidden)?;
        ids.from("experts: ids", 0, tokens * top_k)?;
        weights.from("experts: weights", 0, tokens * top_k)?;
        let planes = 1 + low.is_some() as usize;
        let at_once = experts.at_once(tokens, planes * top_k);
        for start in (0..tokens).step_by(at_once) {
            let n = at_once.min(tokens - start);
            let slots = n * top_k;
            let chosen = Chosen {
                x,
                view: view.skip(start),
                ids,
                id_slice: ids.from("experts: ids", start * top_k, slots)?,
                start,
                tokens: n,
                top_k,
            };
            let abroad = match experts.peers.is_empty() {
                true => None,
                false => Some(self.start_peers(experts, &chosen, 0)?),
            };
            let own = self.own(experts, low, chosen.view, chosen.id_slice, n, top_k)?;
            if let Some(abroad) = &abroad {
                self.join_peers(experts, abroad)?;
            }
            let sum = Sum {
                weights: weights.from("experts: weights", start * top_k, slots)?,
                given: abroad.as_ref().map_or(Slice::EMPTY, |a| a.given()),
                out: to.skip(start),
                tokens: n,
                top_k,
            };
            self.combine(
                experts,
                &own.grouped.groups,
                &own.h,
                &own.outer,
                own.low.as_ref(),
                sum,
            )?;
        }
        Ok(())
    }

    /// All but the sum, for `n` tokens, of those experts that are here.
    fn own(
        &self,
        experts: &Experts<D::Memory>,
        low: Option<&Experts<D::Memory>>,
        x: View,
        ids: Slice,
        n: usize,
        top_k: usize,
    ) -> Result<Own<D::Memory>> {
        let [gate_up, down] = &experts.classes;
        let slots = n * top_k;
        // In this order: the matmuls read what `group` writes before they wait for `quantise`.
        let grouped = self.group(experts, ids, n, top_k)?;
        let groups = &grouped.groups;
        let quantised = self.quantise(x, n, experts.shape.hidden)?;
        let inner = self.scratch::<u32>(slots * gate_up.partials(experts.form))?;
        let operands = Operands::gate_up(&quantised, groups, &inner);
        self.matmuls(experts, gate_up, groups, operands)?;
        let lows = self.low_nibbles(low, 0, groups, &quantised)?;
        let h = self.activate(experts, groups, &quantised, &inner, lows.as_ref())?;
        let outer = self.scratch::<u32>(slots * down.partials(experts.form))?;
        self.matmuls(experts, down, groups, Operands::down(&h, &outer))?;
        let low = self.low_nibbles(low, 1, groups, &h)?;
        Ok(Own {
            grouped,
            h,
            outer,
            low,
        })
    }

    /// Rows of `cols` activations to fixed point.
    fn quantise(&self, x: View, rows: usize, cols: usize) -> Result<Quantised<D::Memory>> {
        let quantised = Quantised {
            values: self.scratch(rows * cols / 2)?,
            scales: self.scratch(rows)?,
            sums: self.scratch(rows * cols / 64)?,
        };
        let args = gpu::quantise::QuantiseArgs {
            x: x.slice,
            quantised: quantised.values.slice(),
            scales: quantised.scales.slice(),
            sums: quantised.sums.slice(),
            x_stride: x.stride,
            cols: word("columns", cols)?,
        };
        let launch = Launch::new([word("rows", rows)?, 1, 1], gpu::quantise::THREADS);
        self.launch::<QuantiseRows>(launch, args)?;
        Ok(quantised)
    }

    /// Sorts the assignments `ids` `[tokens, top_k]` by expert.
    fn group(
        &self,
        experts: &Experts<D::Memory>,
        ids: Slice,
        tokens: usize,
        top_k: usize,
    ) -> Result<Grouped<D::Memory>> {
        let slots = tokens * top_k;
        let most = slots.min(experts.experts);
        let memory = self.scratch(Groups::words(most, slots, slots))?;
        let groups = Groups::over(&memory, most, tokens, slots, slots);
        let args = gpu::group::GroupArgs {
            ids,
            active: groups.active,
            n_active: groups.n_active,
            slot_token: groups.slot_token,
            slot_expert: groups.slot_expert,
            slot_of: groups.slot_of,
            places: experts.places.as_ref().map_or(Slice::EMPTY, Buffer::slice),
            tokens: word("tokens", tokens)?,
            k: word("experts a token", top_k)?,
            experts: word("experts", experts.experts)?,
            reserved: 0,
        };
        let launch = Launch::new([1, 1, 1], gpu::group::THREADS)
            .shared(gpu::group::shared_bytes(args.experts));
        self.launch::<GroupExperts>(launch, args)?;
        Ok(Grouped {
            groups,
            _memory: memory,
        })
    }
}

/// Activations in fixed point.
struct Quantised<M> {
    values: Buffer<u32, M>,
    scales: Buffer<f32, M>,
    sums: Buffer<i32, M>,
}

impl<M: DeviceMemory> Quantised<M> {
    fn none<D: Device<Memory = M>>(backend: &KernelBackend<D>) -> Result<Self> {
        Ok(Self {
            values: backend.scratch(0)?,
            scales: backend.scratch(0)?,
            sums: backend.scratch(0)?,
        })
    }
}

/// What experts make of their tokens, before it is added up.
struct Own<M> {
    grouped: Grouped<M>,
    h: Quantised<M>,
    outer: Buffer<u32, M>,
    /// Of int8 weights what down gave with the low nibbles.
    low: Option<Low<M>>,
}

/// Assignments on the device, as `group_experts` leaves them.
#[derive(Clone, Copy)]
struct Groups {
    active: Slice,
    n_active: Slice,
    slot_token: Slice,
    slot_expert: Slice,
    slot_of: Slice,
    /// First of the active experts to look at.
    begin: usize,
    /// End of the active experts to look at.
    most: usize,
    tokens: usize,
    slots: usize,
}

/// Assignments and the memory that they are in.
struct Grouped<M> {
    groups: Groups,
    _memory: Buffer<u32, M>,
}

impl Groups {
    /// Words of the memory that [`Groups::over`] takes.
    fn words(most: usize, slots: usize, assignments: usize) -> usize {
        4 * most + 1 + 2 * slots + assignments
    }

    /// Parts of `memory`: active experts, their number, token and expert of each slot, slots of the
    /// assignments.
    fn over<M: DeviceMemory>(
        memory: &Buffer<u32, M>,
        most: usize,
        tokens: usize,
        slots: usize,
        assignments: usize,
    ) -> Self {
        let part = |at, len| memory.memory().slice::<u32>(at, len);
        Self {
            active: memory.memory().slice::<[u32; 4]>(0, most),
            n_active: part(4 * most, 1),
            slot_token: part(4 * most + 1, slots),
            slot_expert: part(4 * most + 1 + slots, slots),
            slot_of: part(4 * most + 1 + 2 * slots, assignments),
            begin: 0,
            most,
            tokens,
            slots,
        }
    }
}

/// What [`KernelBackend::combine`] adds up, and where.
struct Sum {
    weights: Slice,
    given: Slice,
    out: View,
    tokens: usize,
    top_k: usize,
}

/// Inputs and outputs of a class' matmuls.
struct Operands {
    x: Slice,
    gsum: Slice,
    row_map: Slice,
    out: Slice,
}

impl Operands {
    fn gate_up<M: DeviceMemory>(x: &Quantised<M>, groups: &Groups, out: &Buffer<u32, M>) -> Self {
        Self {
            x: x.values.slice(),
            gsum: x.sums.slice(),
            row_map: groups.slot_token,
            out: out.slice(),
        }
    }

    fn down<M: DeviceMemory>(h: &Quantised<M>, out: &Buffer<u32, M>) -> Self {
        Self {
            x: h.values.slice(),
            gsum: h.sums.slice(),
            row_map: Slice::EMPTY,
            out: out.slice(),
        }
    }
}

impl<D: Device> KernelBackend<D> {}
