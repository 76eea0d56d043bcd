//! A layer's routed experts in device memory, and their part of the forward pass.
//!
//! Nothing comes back to the host within a layer: assignments are grouped on the device, and the
//! matmuls read there how many experts are active.

mod int8;
mod mixed;
mod moves;
mod outputs;
mod peers;
mod rans;
mod tiers;
mod timed;

use int8::Low;
pub(super) use tiers::Stage;
pub use timed::Prepared;

use cuda_std::mem::Slice;
use gpu::abi::{self, ExpertArgs, MatrixDesc};
use gpu::coded_plan::{self, DoesNotFit};
use gpu::launch::Launch;
use gpu::layout::{Folds, Symbol};
use gpu::plane3::Layout;

use super::device::{ALIGNMENT, Device, DeviceMemory};
use super::ops::{Buffer, KernelBackend, KernelError, Result, View, input, output, word};
use super::plan;
use super::table::*;
use crate::backend::{Backend, LayerExperts, LoadExperts, Repin, Rows, RowsMut, TieredLayer};
use crate::codec::{Codec, ScaleFormat, Table};
use crate::expert::{ExpertShape, Form, MatrixKind, ScaleKind};
use crate::placement::Used;
use peers::Chosen;

/// Bytes of scratch that unfused decoding fills before it multiplies, at most (but one expert).
const DECODED: usize = 512 << 20;

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
        let (hidden, intermediate) = (self.shape.hidden, self.shape.intermediate);
        let a_slot =
            4 * (gate_up.partials(self.form) + down.partials(self.form)) + 3 * intermediate + 64;
        let a_token = top_k * a_slot + 3 * hidden;
        plan::tokens_within(plan::EXPERT_SCRATCH, tokens, a_token)
    }
}

/// Where parts of a layer go in its one allocation.
#[derive(Default)]
struct Places {
    bytes: usize,
}

impl Places {
    fn take(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes = (at + bytes).next_multiple_of(ALIGNMENT);
        at
    }
}

fn class_of(kind: MatrixKind) -> usize {
    (kind == MatrixKind::Down) as usize
}

impl<D: Device> KernelBackend<D> {
    /// What is the same for raw and coded layers: classes without codecs.
    fn classes(&self, shape: &ExpertShape) -> Result<[Class<D::Memory>; 2]> {
        let class = |first: usize, count: usize, kind: MatrixKind| -> Result<_> {
            let (rows, cols) = shape.dims(kind);
            let folds = Folds::new(cols).ok_or(KernelError::Dimension {
                what: "columns of experts",
                found: cols,
                expected: "a multiple of 64 from 64 to 8192",
            })?;
            Ok(Class {
                first,
                count,
                rows,
                folds,
                raw: false,
                coded: None,
                plane3: None,
            })
        };
        Ok([
            class(0, 2, MatrixKind::Gate)?,
            class(2, 1, MatrixKind::Down)?,
        ])
    }

    /// Refuses what a launch of the class would not fit.
    fn check_fit(&self, class: &Class<D::Memory>, form: Form) -> Result<()> {
        let Some(coded) = &class.coded else {
            return Ok(());
        };
        let (limits, folds, symbol) = (self.device().limits(), &class.folds, coded.symbol);
        let fit = match form {
            Form::Fused => coded_plan::matmul_rans(limits, symbol, folds, 1)
                .and_then(|_| coded_plan::matmul_rans_tokens(limits, symbol, folds, 8, 1))
                .and_then(|_| coded_plan::decode_rans(limits, symbol, 1))
                .map(|_| ()),
            Form::Unfused => coded_plan::decode_rans(limits, symbol, 1).map(|_| ()),
        };
        fit.map_err(|e| self.does_not_fit(e))
    }

    fn does_not_fit(&self, source: DoesNotFit) -> KernelError {
        KernelError::DoesNotFit {
            device: self.device().describe(),
            source,
        }
    }

    fn load_raw(
        &self,
        layer: Vec<[crate::expert::RawMatrix<'_>; 3]>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        let mut classes = self.classes(&shape)?;
        let mut places = Places::default();
        let mut at = Vec::with_capacity(layer.len());
        for (expert, matrices) in layer.iter().enumerate() {
            for kind in MatrixKind::ALL {
                let (rows, cols) = shape.dims(kind);
                let m = &matrices[kind as usize];
                for (field, found, expected) in [
                    ("packed bytes", m.packed.len(), rows * cols / 2),
                    ("scales", m.scales.len(), shape.scales.count(rows, cols)),
                ] {
                    if found != expected {
                        return Err(KernelError::Matrix {
                            expert,
                            matrix: kind.name(),
                            field,
                            found,
                            expected,
                        });
                    }
                }
                at.push((places.take(m.packed.len()), places.take(4 * m.scales.len())));
                classes[class_of(kind)].raw = true;
            }
        }
        let memory = self.scratch::<u8>(places.bytes)?;
        let base = memory.memory().address();
        let mut descs = Vec::with_capacity(3 * layer.len());
        for (m, (packed, scales)) in layer.iter().flatten().zip(at) {
            let kind = MatrixKind::ALL[descs.len() % 3];
            let (rows, cols) = shape.dims(kind);
            self.device().upload(memory.memory(), packed, &m.packed)?;
            let bytes = bytemuck::cast_slice(&m.scales);
            self.device().upload(memory.memory(), scales, bytes)?;
            descs.push(MatrixDesc {
                stream: Slice::new(base + packed as u64, (m.packed.len() / 4) as u64),
                blocks: Slice::EMPTY,
                scales: Slice::new(base + scales as u64, m.scales.len() as u64),
                codec: abi::CODEC_RAW,
                scale_format: abi::SCALES_F32,
                rows: word("rows", rows)?,
                cols: word("columns", cols)?,
                n_blocks: 0,
                reserved: 0,
            });
        }
        self.place(shape, form, memory, descs, classes)
    }

    fn place(
        &self,
        shape: ExpertShape,
        form: Form,
        memory: Buffer<u8, D::Memory>,
        descs: Vec<MatrixDesc>,
        classes: [Class<D::Memory>; 2],
    ) -> Result<Experts<D::Memory>> {
        for class in &classes {
            self.check_fit(class, form)?;
        }
        let tables = classes.iter().filter_map(|c| c.coded.as_ref());
        let tables: usize = tables.map(|c| 4 * c.table.len()).sum();
        Ok(Experts {
            shape,
            experts: descs.len() / 3,
            form,
            bytes: memory.len() + size_of_val(&*descs) + tables,
            memory,
            descs: self.upload(&descs)?,
            classes,
            tiers: None,
            places: None,
            peers: Vec::new(),
        })
    }

    fn table(&self, table: &Table) -> Result<Coded<D::Memory>> {
        Ok(Coded {
            symbol: table.symbol(),
            table: self.upload(table.entries())?,
            blocks: 0,
        })
    }

    /// [`Backend::experts`], or with `low` [`Backend::experts_int8`].
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_experts(
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
        if let Some(tiers) = &experts.tiers {
            if !tiers.resident() {
                let done = self.run_tiers(experts, tiers, x, ids, weights, top_k, tokens, out);
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

    /// Partial sums of a class of the active experts' matrices.
    fn matmuls(
        &self,
        experts: &Experts<D::Memory>,
        class: &Class<D::Memory>,
        groups: &Groups,
        operands: Operands,
    ) -> Result<()> {
        if groups.begin >= groups.most {
            return Ok(());
        }
        let args = class_args(experts, class, groups, &operands, self.faults().slice());
        let decoded = match (&class.coded, &class.plane3) {
            (None, None) => return self.matmul_raw(class, groups, args, 1),
            (coded, plane3) => Decoded {
                coded: coded.as_ref(),
                plane3: plane3.as_ref(),
            },
        };
        if experts.form == Form::Unfused {
            let args = ExpertArgs {
                sources: abi::FROM_ALL,
                ..args
            };
            return self.decode_and_multiply(class, decoded, groups, args, 1);
        }
        if class.raw {
            self.matmul_raw(class, groups, args, 1)?;
        }
        if let Some(layout) = &class.plane3 {
            self.matmul_plane3(class, layout, groups, args)?;
        }
        if let Some(coded) = &class.coded {
            self.matmul_rans(class, coded, groups, args)?;
        }
        Ok(())
    }

    /// Decodes all coded matrices of the active experts to memory and leaves them there.
    fn decode_alone(
        &self,
        experts: &Experts<D::Memory>,
        class: &Class<D::Memory>,
        groups: &Groups,
        operands: Operands,
    ) -> Result<()> {
        let words = class.count * class.rows * class.folds.cols / 8;
        let scratch = self.scratch::<u32>((groups.most - groups.begin) * words)?;
        let args = ExpertArgs {
            scratch: scratch.slice(),
            ..class_args(experts, class, groups, &operands, self.faults().slice())
        };
        let decoded = Decoded {
            coded: class.coded.as_ref(),
            plane3: class.plane3.as_ref(),
        };
        self.decode(class, &decoded, args)
    }

    /// Matrices in plane3: fused for one token, by way of scratch for several.
    fn matmul_plane3(
        &self,
        class: &Class<D::Memory>,
        layout: &Layout,
        groups: &Groups,
        args: ExpertArgs,
    ) -> Result<()> {
        let matrices = ((groups.most - groups.begin) * class.count) as u64;
        let launch = coded_plan::matmul_plane3(self.device().limits(), layout, matrices);
        let one = ExpertArgs {
            blocks: word("blocks", layout.blocks())?,
            min_tokens: 1,
            max_tokens: 1,
            ..args
        };
        match layout.strips {
            32 => self.launch::<MatmulPlane3>(launch, one)?,
            16 => self.launch::<MatmulPlane3Half>(launch, one)?,
            _ => self.launch::<MatmulPlane3Narrow>(launch, one)?,
        }
        if groups.tokens == 1 {
            return Ok(());
        }
        let decoded = Decoded {
            coded: None,
            plane3: Some(layout),
        };
        let args = ExpertArgs {
            sources: 1 << abi::CODEC_PLANE3,
            ..args
        };
        self.decode_and_multiply(class, decoded, groups, args, 2)
    }

    /// The matrices of `args.sources`, of experts with `least` tokens or more.
    fn matmul_raw(
        &self,
        class: &Class<D::Memory>,
        groups: &Groups,
        mut args: ExpertArgs,
        least: u32,
    ) -> Result<()> {
        let limits = self.device().limits();
        let active = (args.active_end - args.active_begin) as usize;
        let matrices = (active * class.count) as u64;
        for several in [false, true] {
            if several && groups.tokens == 1 || !several && least > 1 {
                continue;
            }
            (args.min_tokens, args.max_tokens) = if several {
                (least.max(2), u32::MAX)
            } else {
                (1, 1)
            };
            let (launch, job_rows) = if several {
                coded_plan::matmul_raw_mma(limits, class.rows, &class.folds, matrices)
            } else {
                coded_plan::matmul_raw(limits, class.rows, &class.folds, matrices)
            };
            args.job_rows = job_rows;
            args.blocks = (class.rows as u32).div_ceil(job_rows);
            if several && args.grouped == 0 {
                self.launch::<MatmulRawMma>(launch, args)?;
            } else if several {
                self.launch::<MatmulRawMmaGrouped>(launch, args)?;
            } else if class.folds.fold < gpu::matmul_raw::NARROW {
                self.launch::<MatmulRawNarrow>(launch, args)?;
            } else {
                self.launch::<MatmulRaw>(launch, args)?;
            }
        }
        Ok(())
    }

    /// Decodes a few experts to scratch, multiplies from there, and so on. Experts with fewer than
    /// `least` tokens are passed over.
    fn decode_and_multiply(
        &self,
        class: &Class<D::Memory>,
        decoded: Decoded<'_, D::Memory>,
        groups: &Groups,
        args: ExpertArgs,
        least: u32,
    ) -> Result<()> {
        let words = class.count * class.rows * class.folds.cols / 8;
        let at_once = (DECODED / (4 * words)).clamp(1, groups.most - groups.begin);
        let scratch = self.scratch::<u32>(at_once * words)?;
        for begin in (groups.begin..groups.most).step_by(at_once) {
            let end = (begin + at_once).min(groups.most);
            let args = ExpertArgs {
                scratch: scratch.slice(),
                active_begin: begin as u32,
                active_end: end as u32,
                min_tokens: least,
                max_tokens: u32::MAX,
                ..args
            };
            self.decode(class, &decoded, args)?;
            self.matmul_raw(class, groups, args, least)?;
        }
        Ok(())
    }

    /// Decodes the coded matrices of `args`' active experts to `args.scratch`.
    fn decode(
        &self,
        class: &Class<D::Memory>,
        decoded: &Decoded<'_, D::Memory>,
        args: ExpertArgs,
    ) -> Result<()> {
        let limits = self.device().limits();
        let matrices = (args.active_end - args.active_begin) as usize * class.count;
        if let Some(coded) = decoded.coded {
            let jobs = matrices * coded.blocks * class.folds.segs();
            let launch = coded_plan::decode_rans(limits, coded.symbol, jobs as u64)
                .map_err(|e| self.does_not_fit(e))?;
            let args = ExpertArgs {
                table: coded.table.slice(),
                blocks: coded.blocks as u32,
                ..args
            };
            match coded.symbol {
                Symbol::Pair => self.launch::<DecodeRansPair>(launch, args)?,
                Symbol::Triple => self.launch::<DecodeRansTriple>(launch, args)?,
            }
        }
        if let Some(layout) = decoded.plane3 {
            let launch = coded_plan::decode_plane3(limits, layout, matrices as u64);
            let args = ExpertArgs {
                blocks: word("blocks", layout.blocks())?,
                split: (layout.segs() / class.folds.segs()) as u32,
                ..args
            };
            self.launch::<DecodePlane3>(launch, args)?;
        }
        Ok(())
    }
}

/// A launch over all active experts' matrices of a class, of any number of tokens.
fn class_args<M: DeviceMemory>(
    experts: &Experts<M>,
    class: &Class<M>,
    groups: &Groups,
    operands: &Operands,
    faults: Slice,
) -> ExpertArgs {
    let args = ExpertArgs {
        descs: experts.descs.slice(),
        active: groups.active,
        n_active: groups.n_active,
        x: operands.x,
        gsum: operands.gsum,
        row_map: operands.row_map,
        out: operands.out,
        faults,
        first: class.first as u32,
        count: class.count as u32,
        slots: groups.slots as u32,
        active_begin: groups.begin as u32,
        active_end: groups.most as u32,
        min_tokens: 1,
        max_tokens: u32::MAX,
        grouped: (experts.shape.scales == ScaleKind::G64) as u32,
        ..Default::default()
    }
    .with_shape(class.rows, &class.folds);
    ExpertArgs {
        split: class.split(experts.form) as u32,
        sources: abi::FROM_STREAM,
        ..args
    }
}

/// What of a class is decoded to scratch.
struct Decoded<'a, M> {
    coded: Option<&'a Coded<M>>,
    plane3: Option<&'a Layout>,
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

impl<D: Device> LoadExperts for KernelBackend<D> {
    fn load_experts(
        &self,
        layer: LayerExperts<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        match layer {
            LayerExperts::Raw(layer) => self.load_raw(layer, shape, form),
            LayerExperts::Coded { layer, records } => {
                self.load_coded(&layer, &records, shape, form)
            }
        }
    }

    fn load_tiers(
        &self,
        layer: &TieredLayer<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Option<Experts<D::Memory>>> {
        self.place_layer(layer, shape, form).map(Some)
    }

    fn loaded(&self) {
        self.drop_waves();
    }

    fn used(&self, experts: &Experts<D::Memory>) -> Used {
        experts.tiers.as_ref().map_or(Used::default(), |t| t.used())
    }

    fn repin(&self, experts: &Experts<D::Memory>) -> Result<Repin> {
        self.move_one(experts)
    }
}

impl<D: Device> KernelBackend<D> {
    /// Records as they are, each at a multiple of [`ALIGNMENT`]; descriptors point into them.
    fn load_coded(
        &self,
        layer: &crate::archive::LayerRecords<'_>,
        records: &[crate::archive::Record<'_>],
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        let mut classes = self.coded_classes(layer, &shape)?;
        let mut places = Places::default();
        let at: Vec<usize> = records.iter().map(|r| places.take(r.bytes.len())).collect();
        let memory = self.scratch::<u8>(places.bytes)?;
        let mut descs = Vec::with_capacity(3 * records.len());
        for (expert, (record, at)) in records.iter().zip(at).enumerate() {
            self.device().upload(memory.memory(), at, record.bytes)?;
            let base = memory.memory().address() + at as u64;
            descs.extend(record_descs(record, base, &shape, expert, &mut classes)?);
        }
        drop_unused(&mut classes);
        self.place(shape, form, memory, descs, classes)
    }

    /// Classes with the layer's tables, used or not.
    fn coded_classes(
        &self,
        layer: &crate::archive::LayerRecords<'_>,
        shape: &ExpertShape,
    ) -> Result<[Class<D::Memory>; 2]> {
        let mut classes = self.classes(shape)?;
        for kind in [MatrixKind::Gate, MatrixKind::Down] {
            if let Some((_, table)) = layer.table(kind) {
                classes[class_of(kind)].coded = Some(self.table(table)?);
            }
        }
        Ok(classes)
    }
}

/// Drops tables that no record of the layer uses.
fn drop_unused<M>(classes: &mut [Class<M>; 2]) {
    for class in classes {
        if class.coded.as_ref().is_some_and(|c| c.blocks == 0) {
            class.coded = None;
        }
    }
}

/// Descriptors of the matrices of a record at address `base`; the classes learn what there is.
fn record_descs<M>(
    record: &crate::archive::Record<'_>,
    base: u64,
    shape: &ExpertShape,
    expert: usize,
    classes: &mut [Class<M>; 2],
) -> Result<[MatrixDesc; 3]> {
    let part = |range: &std::ops::Range<usize>, size: usize| {
        Slice::new(base + range.start as u64, (range.len() / size) as u64)
    };
    let mut descs = [MatrixDesc::default(); 3];
    for kind in MatrixKind::ALL {
        let m = record.matrix(kind);
        let (rows, cols) = shape.dims(kind);
        for (field, found, expected) in [("rows", m.rows, rows), ("columns", m.cols, cols)] {
            if found != expected {
                return Err(KernelError::Matrix {
                    expert,
                    matrix: kind.name(),
                    field,
                    found,
                    expected,
                });
            }
        }
        let class = &mut classes[class_of(kind)];
        let n_blocks = m.n_blocks();
        match (&m.codec, &mut class.coded) {
            (Codec::Rans(_), Some(coded)) => coded.blocks = coded.blocks.max(n_blocks),
            (Codec::Rans(_), None) => unreachable!("a checked record's table exists"),
            (Codec::Raw, _) => class.raw = true,
            (Codec::Plane3, _) => class.plane3 = Layout::new(rows, cols),
        }
        descs[kind as usize] = MatrixDesc {
            stream: part(&m.stream, 4),
            blocks: part(&m.offsets, 4),
            scales: part(&m.scales, m.scale_format.bytes()),
            codec: match m.codec {
                Codec::Raw => abi::CODEC_RAW,
                Codec::Rans(symbol) => abi::rans_codec(symbol),
                Codec::Plane3 => abi::CODEC_PLANE3,
            },
            scale_format: match m.scale_format {
                ScaleFormat::F32 => abi::SCALES_F32,
                ScaleFormat::Amax16 => abi::SCALES_AMAX,
            },
            rows: word("rows", rows)?,
            cols: word("columns", cols)?,
            n_blocks: word("blocks", n_blocks)?,
            reserved: 0,
        };
    }
    Ok(descs)
}
