//! Tokens through a layer whose experts are in several tiers.
//!
//! What a layer chose is read back, and the host sorts the assignments: first experts that stay in
//! device memory, then those that are copied there, then those that the CPU computes. While the GPU
//! multiplies with the first, the second are copied beside it to a stage, from pinned memory or from
//! what was just read of the archive. The CPU's results go to the weighted sum as they are. Sums
//! have the order of the experts' numbers wherever these were, so the bits are the same.
//!
//! Where a prompt's tokens need more experts than the stage holds, these take turns: half of the stage is
//! copied to while the other half is multiplied with. What a turn's experts give is kept, a row for each
//! assignment, and goes to the weighted sum as the CPU's results do; so an expert is copied once,
//! however many tokens want it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;

use cuda_std::mem::Slice;
use gpu::abi::MatrixDesc;

use super::ahead::Far;
use super::peers::Chosen;
use super::tiers::{HALVES, Place, Stage, Tiers, moved};
use super::{Experts, Groups, Operands, Quantised, Sum};
use crate::backend::cpu::{self, Cpu};
use crate::backend::kernels::buffer::{Buffer, View, input, output, word};
use crate::backend::kernels::device::{Device, DeviceMemory};
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::split::Part;
use crate::backend::{Backend, Guess, Rows, RowsMut, rows, rows_mut};

/// A layer's assignments as the host sorted them.
struct Sorted {
    /// As [`Groups::over`] takes them.
    words: Vec<u32>,
    /// Active experts that stay.
    resident: usize,
    /// Experts that are copied, behind them, where the stage holds all.
    away: Vec<u32>,
    /// Slots of both.
    slots: usize,
    /// Token and expert of the slots of the CPU, behind these.
    on_cpu: Vec<(usize, u32)>,
    /// Else those that are copied, by turns; their slots are behind the CPU's.
    turns: Vec<Turn>,
}

/// Experts that are in the stage together, by themselves.
struct Turn {
    /// As [`Groups::over`] takes them; slots and assignments are the same.
    words: Vec<u32>,
    away: Vec<u32>,
    /// The stage's slot of the first.
    first: usize,
    slots: usize,
}

/// Active experts, and the token and expert of each of their slots.
#[derive(Default)]
struct Active {
    experts: Vec<u32>,
    slot_token: Vec<u32>,
    slot_expert: Vec<u32>,
}

impl Active {
    fn slots(&self) -> usize {
        self.slot_token.len()
    }

    /// An expert with the number `number` in the layer's descriptors.
    fn push(&mut self, number: usize, assignments: &[usize], top_k: usize) {
        let slots = [self.slots() as u32, assignments.len() as u32];
        self.experts.extend([number as u32, slots[0], slots[1], 0]);
        let tokens = assignments.iter().map(|a| (a / top_k) as u32);
        self.slot_token.extend(tokens);
        self.slot_expert
            .extend(assignments.iter().map(|_| number as u32));
    }

    /// As [`Groups::over`] takes them.
    fn words(self, slot_of: Vec<u32>) -> Vec<u32> {
        let number = (self.experts.len() / 4) as u32;
        [
            self.experts,
            vec![number],
            self.slot_token,
            self.slot_expert,
            slot_of,
        ]
        .concat()
    }
}

impl Sorted {
    /// `chosen` `[_, top_k]`; copied experts have numbers from `experts` on.
    fn new<M: DeviceMemory>(
        tiers: &Tiers<M>,
        chosen: &[u32],
        top_k: usize,
        experts: usize,
    ) -> Self {
        let mut by_expert: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (i, id) in chosen.iter().enumerate() {
            by_expert.entry(*id).or_default().push(i);
        }
        let (mut resident, mut away, mut cpu) = (vec![], vec![], vec![]);
        let mut elsewhere = vec![];
        for (id, assignments) in &by_expert {
            match tiers.place(*id) {
                // No expert has this number: it adds nothing.
                None => (),
                Some(Place::Resident | Place::Slot(..)) => resident.push((*id, assignments)),
                Some(Place::Cpu(_)) => cpu.push((*id, assignments)),
                Some(Place::Elsewhere(place)) => elsewhere.push((place, assignments)),
                Some(Place::Host(..) | Place::Disk(_)) => away.push((*id, assignments)),
            }
        }
        let mut slot_of = vec![u32::MAX; chosen.len()];
        let mut active = Active::default();
        let staged = tiers.stage.as_ref().map_or(0, |s| s.slots);
        let in_turn = match away.len() > staged {
            true => std::mem::take(&mut away),
            false => Vec::new(),
        };
        let numbers = (resident.iter().map(|(id, _)| *id as usize)).chain(experts..);
        for (number, (_, assignments)) in numbers.zip(resident.iter().chain(&away)) {
            for (slot, a) in (active.slots()..).zip(*assignments) {
                slot_of[*a] = slot as u32;
            }
            active.push(number, assignments, top_k);
        }
        let slots = active.slots();
        let mut on_cpu = Vec::new();
        for (id, assignments) in &cpu {
            for a in *assignments {
                slot_of[*a] = (slots + on_cpu.len()) as u32;
                on_cpu.push((a / top_k, *id));
            }
        }
        let mut given = slots + on_cpu.len();
        let half = (staged / HALVES).max(1);
        let mut turns = Vec::new();
        for (n, these) in in_turn.chunks(half).enumerate() {
            let first = n % HALVES * half;
            let mut active = Active::default();
            for (number, (_, assignments)) in (experts + first..).zip(these) {
                for (slot, a) in (given + active.slots()..).zip(*assignments) {
                    slot_of[*a] = slot as u32;
                }
                active.push(number, assignments, top_k);
            }
            let slots = active.slots();
            given += slots;
            turns.push(Turn {
                words: active.words((0..slots as u32).collect()),
                away: these.iter().map(|(id, _)| *id).collect(),
                first,
                slots,
            });
        }
        for (place, assignments) in elsewhere {
            for a in assignments {
                slot_of[*a] = (given + (place as usize - 1) * chosen.len() + a) as u32;
            }
        }
        Self {
            words: active.words(slot_of),
            resident: resident.len(),
            away: away.iter().map(|(id, _)| *id).collect(),
            slots,
            on_cpu,
            turns,
        }
    }

    /// Rows that the CPU and the turns give.
    fn given(&self) -> usize {
        self.on_cpu.len() + self.turns.iter().map(|turn| turn.slots).sum::<usize>()
    }
}

impl<D: Device> KernelBackend<D> {
    /// [`Backend::experts`] of a layer in several tiers.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_tiers(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        next: Option<Guess<'_, Self>>,
        x: Rows<'_, Buffer<f32, D::Memory>>,
        ids: &Buffer<u32, D::Memory>,
        weights: &Buffer<f32, D::Memory>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        if tokens * top_k == 0 {
            return Ok(());
        }
        let hidden = experts.shape.hidden;
        let view = input("experts: x", x, tokens, hidden)?;
        let to = output("experts: out", &out, tokens, hidden)?;
        weights.from("experts: weights", 0, tokens * top_k)?;
        ids.from("experts: ids", 0, tokens * top_k)?;
        let mut chosen = vec![0u32; tokens * top_k];
        let mut guessed = vec![0u32; if next.is_some() { tokens * top_k } else { 0 }];
        let to_host = bytemuck::cast_slice_mut(&mut chosen);
        match &next {
            None => self.device().download(ids.memory(), 0, to_host)?,
            Some(Guess { ids: guess, .. }) => {
                guess.from("experts: guess", 0, tokens * top_k)?;
                let guess = (guess.memory(), 0, bytemuck::cast_slice_mut(&mut guessed));
                (self.device()).download_all(&mut [(ids.memory(), 0, to_host), guess])?;
            }
        }
        let on_cpu = tiers.note(&chosen, tokens);
        let mut host_x = vec![
            0.0;
            if on_cpu {
                (tokens - 1) * x.stride + hidden
            } else {
                0
            }
        ];
        self.read(x.buf, x.offset, &mut host_x)?;
        let at_once = experts.at_once(tokens, top_k);
        let (next, further) = match next.filter(|_| tokens <= at_once) {
            Some(Guess {
                experts, further, ..
            }) => (experts.tiers.as_ref(), Some(further)),
            None => (None, None),
        };
        let mut far = Far::new(further.filter(|_| tokens == 1));
        let mut start = 0;
        while start < tokens {
            // What is read for these goes where copies for those before may still come from.
            if start > 0 && tiers.stage.is_some() {
                self.device().synchronize()?;
            }
            let n = at_once.min(tokens - start);
            let batch = Batch {
                chosen: &chosen[start * top_k..(start + n) * top_k],
                on_device: Chosen {
                    x,
                    view: view.skip(start),
                    ids,
                    id_slice: ids.from("experts: ids", start * top_k, n * top_k)?,
                    start,
                    tokens: n,
                    top_k,
                },
                host_x: host_x.get(start * x.stride..).unwrap_or(&[]),
                host_stride: x.stride,
                sum: Sum {
                    weights: weights.from("experts: weights", start * top_k, n * top_k)?,
                    given: Slice::EMPTY,
                    out: to.skip(start),
                    tokens: n,
                    top_k,
                },
            };
            let busy = self.run_batch(experts, tiers, batch, &mut far)?;
            if let (Some(next), Some(busy)) = (next, busy) {
                self.copy_ahead(next, std::mem::take(&mut guessed), &busy)?;
            }
            start += n;
        }
        Ok(())
    }

    /// Slots of the stage that it uses; `None` where that is all of them, by turns.
    fn run_batch(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        mut batch: Batch<'_, D::Memory>,
        far: &mut Far<'_, D>,
    ) -> Result<Option<Vec<usize>>> {
        let (tokens, top_k) = (batch.sum.tokens, batch.sum.top_k);
        let hidden = experts.shape.hidden;
        let [gate_up, down] = &experts.classes;
        let sorted = Sorted::new(tiers, batch.chosen, top_k, experts.experts);
        let (resident, active) = (sorted.resident, sorted.resident + sorted.away.len());
        let words = self.upload(&sorted.words)?;
        // Room for what the CPU and the turns give, and other devices, if there are any.
        let abroad = self.start_peers(experts, &batch.on_device, sorted.given())?;
        let groups = Groups::over(&words, active, tokens, sorted.slots, batch.chosen.len());
        let part = |range: Range<usize>| Groups {
            begin: range.start,
            most: range.end,
            ..groups
        };
        // What the CPU's experts give, once; meanwhile the GPU works, or the disk.
        let mut rows: Option<Vec<f32>> = None;
        let on_cpu = &sorted.on_cpu;
        let mut by_cpu = || -> Result<()> {
            if let Some((cpu, placed)) = tiers.cpu.as_ref().filter(|_| !on_cpu.is_empty())
                && rows.is_none()
            {
                rows = Some(compute(cpu, placed, tiers, on_cpu, &batch, hidden)?);
            }
            Ok(())
        };
        let x = match active > 0 || !sorted.turns.is_empty() {
            true => self.quantise(batch.on_device.view, tokens, hidden)?,
            false => Quantised::none(self)?,
        };
        let first = match sorted.turns.first() {
            Some(turn) => {
                tiers.there(None);
                Copied::turn(turn)
            }
            None => {
                let (there, taken) = tiers.there(Some(&sorted.away));
                Copied::all(&sorted.away, &there, &taken)
            }
        };
        let busy: Vec<usize> = first.experts.iter().map(|c| c.slot).collect();
        let mut far = || match sorted.turns.is_empty() {
            true => self.copy_far(far, top_k, &busy),
            false => Ok(false),
        };
        let mut waiting = self.fetch(experts, tiers, &first)?;
        let (h, outer) = if active > 0 {
            let inner = self.scratch::<u32>(sorted.slots * gate_up.partials(experts.form))?;
            let of = part(0..resident);
            self.matmuls(experts, gate_up, &of, Operands::gate_up(&x, &of, &inner))?;
            if sorted.turns.is_empty() {
                self.fetch_rest(tiers, &first, waiting, &mut by_cpu, &mut far)?;
            }
            let of = part(resident..active);
            self.matmuls(experts, gate_up, &of, Operands::gate_up(&x, &of, &inner))?;
            let h = self.activate(experts, &groups, &x, &inner, None)?;
            let outer = self.scratch::<u32>(sorted.slots * down.partials(experts.form))?;
            self.matmuls(experts, down, &groups, Operands::down(&h, &outer))?;
            (h, outer)
        } else {
            (Quantised::none(self)?, self.scratch(0)?)
        };
        let given = abroad.memory();
        let mut at = on_cpu.len() * hidden;
        let mut coming = first;
        for (n, turn) in sorted.turns.iter().enumerate() {
            // What was read for the turn before the last is copied from where this one's is read to.
            if waiting && n >= HALVES {
                self.device().synchronize()?;
            }
            self.fetch_rest(tiers, &coming, waiting, &mut by_cpu, &mut far)?;
            if let Some(next) = sorted.turns.get(n + 1) {
                coming = Copied::turn(next);
                waiting = self.fetch(experts, tiers, &coming)?;
            }
            let rows = View {
                slice: given.slice::<f32>(at, turn.slots * hidden),
                stride: word("hidden size", hidden)?,
            };
            self.run_turn(experts, turn, &x, tokens, rows)?;
            at += turn.slots * hidden;
        }
        if !on_cpu.is_empty() {
            self.mark(Part::Idle)?;
        }
        by_cpu()?;
        let rows = rows.unwrap_or_default();
        self.device()
            .upload(given, 0, bytemuck::cast_slice(&rows))?;
        if !experts.peers.is_empty() {
            self.join_peers(experts, &abroad)?;
        }
        batch.sum.given = abroad.given();
        self.combine(experts, &groups, &h, &outer, None, batch.sum)?;
        Ok((sorted.turns.is_empty()).then_some(busy))
    }

    /// What a turn's experts, which are in the stage, make of their tokens: a row for each slot.
    fn run_turn(
        &self,
        experts: &Experts<D::Memory>,
        turn: &Turn,
        x: &Quantised<D::Memory>,
        tokens: usize,
        out: View,
    ) -> Result<()> {
        let [gate_up, down] = &experts.classes;
        let words = self.upload(&turn.words)?;
        let groups = Groups::over(&words, turn.away.len(), tokens, turn.slots, turn.slots);
        let inner = self.scratch::<u32>(turn.slots * gate_up.partials(experts.form))?;
        let operands = Operands::gate_up(x, &groups, &inner);
        self.matmuls(experts, gate_up, &groups, operands)?;
        let h = self.activate(experts, &groups, x, &inner, None)?;
        let outer = self.scratch::<u32>(turn.slots * down.partials(experts.form))?;
        self.matmuls(experts, down, &groups, Operands::down(&h, &outer))?;
        // A slot is a token of one expert, of weight 1.
        let sum = Sum {
            weights: Slice::EMPTY,
            given: Slice::EMPTY,
            out,
            tokens: turn.slots,
            top_k: 1,
        };
        self.combine(experts, &groups, &h, &outer, None, sum)
    }

    /// Starts the copies of experts in pinned memory, and says whether others must be read.
    fn fetch(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        copied: &Copied,
    ) -> Result<bool> {
        let Some(stage) = tiers.stage.as_ref().filter(|_| !copied.experts.is_empty()) else {
            return Ok(false);
        };
        self.describe_away(experts, tiers, stage, copied)?;
        self.device().fork()?;
        let mut waiting = false;
        let host = tiers.host.read().unwrap_or_else(PoisonError::into_inner);
        for Coming { id, slot, .. } in copied.missing() {
            match tiers.place(id) {
                Some(Place::Host(at, record)) => {
                    let bytes = at..at + record.bytes;
                    let memory = stage.memory.memory();
                    self.copies(record.bytes);
                    // SAFETY: these slots are used behind the join in `fetch_rest` alone, and what
                    // used them before is ahead of the fork, or is a copy by a wrong guess, which copies
                    // follow; the pinned memory lives as long as the layer and is written between
                    // tokens alone, behind a `synchronize` that has waited for this.
                    unsafe {
                        self.device()
                            .copy_beside(memory, slot * stage.slot, &host, bytes)?;
                    }
                }
                _ => waiting = true,
            }
        }
        Ok(waiting)
    }

    /// Descriptors of the experts that are copied: behind those of the layer.
    fn describe_away(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        stage: &Stage<D::Memory>,
        copied: &Copied,
    ) -> Result<()> {
        let mut descs: Vec<MatrixDesc> = Vec::with_capacity(3 * copied.experts.len());
        for Coming { id, slot, .. } in &copied.experts {
            let base = stage.memory.memory().address() + (slot * stage.slot) as u64;
            if let Some(Place::Host(_, record) | Place::Disk(record)) = tiers.place(*id) {
                descs.extend(record.descs.map(|d| moved(d, base)));
            }
        }
        let at = size_of::<MatrixDesc>() * 3 * (experts.experts + copied.first);
        let memory = experts.descs.memory();
        self.device()
            .upload(memory, at, bytemuck::cast_slice(&descs))?;
        Ok(())
    }

    /// Reads and copies what [`KernelBackend::fetch`] left, and lets the stream wait for all copies.
    /// While the disk is at work, if it is, `meanwhile` is called once, and `further`, which starts a copy, at first and
    /// then for as long as there is one to be made and the one before is done.
    fn fetch_rest(
        &self,
        tiers: &Tiers<D::Memory>,
        copied: &Copied,
        waiting: bool,
        meanwhile: &mut dyn FnMut() -> Result<()>,
        further: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<()> {
        let Some(stage) = tiers.stage.as_ref().filter(|_| !copied.experts.is_empty()) else {
            return Ok(());
        };
        self.mark(Part::Copies)?;
        let read = match waiting {
            true => self.read_away(tiers, stage, copied, meanwhile, further),
            false => Ok(()),
        };
        // Also after a failure: others are on their way.
        self.device().join()?;
        read
    }
}

/// An expert that comes to the stage.
#[derive(Clone, Copy)]
pub(super) struct Coming {
    pub id: u32,
    pub slot: usize,
    /// Whether it was copied there ahead.
    there: bool,
}

/// Experts that are in the stage together.
pub(super) struct Copied {
    experts: Vec<Coming>,
    /// Behind the layer's, the number of the first one's descriptors.
    first: usize,
}

impl Copied {
    /// Those that are `there`, in the slots where they are, and the others in the first that are not `taken` either.
    fn all(away: &[u32], there: &[(u32, usize)], taken: &[usize]) -> Self {
        let mut free = (0..)
            .filter(|slot| !there.iter().any(|(_, there)| there == slot) && !taken.contains(slot));
        let coming = |&id: &u32| {
            let found = there.iter().find(|(there, _)| *there == id);
            let slot = found.map(|(_, slot)| *slot).or_else(|| free.next());
            Coming {
                id,
                slot: slot.expect("numbers do not end"),
                there: found.is_some(),
            }
        };
        Self {
            experts: away.iter().map(coming).collect(),
            first: 0,
        }
    }

    fn turn(turn: &Turn) -> Self {
        let coming = |(slot, id): (usize, &u32)| Coming {
            id: *id,
            slot,
            there: false,
        };
        Self {
            experts: (turn.first..).zip(&turn.away).map(coming).collect(),
            first: turn.first,
        }
    }

    /// Those that are still to be copied.
    pub fn missing(&self) -> impl Iterator<Item = Coming> {
        self.experts.iter().copied().filter(|c| !c.there)
    }

    pub fn expert(&self, slot: usize) -> usize {
        let found = self.experts.iter().find(|c| c.slot == slot);
        found.map_or(0, |c| c.id as usize)
    }
}

/// Tokens that go through a layer together.
struct Batch<'a, M> {
    /// `[tokens, top_k]`.
    chosen: &'a [u32],
    /// The same on the device, and the input.
    on_device: Chosen<'a, M>,
    /// The same on the host, where the CPU has experts.
    host_x: &'a [f32],
    host_stride: usize,
    sum: Sum,
}

/// What the CPU's experts make of their tokens: a row for each of `slots`.
fn compute<M: DeviceMemory>(
    cpu: &Cpu,
    experts: &cpu::Experts,
    tiers: &Tiers<M>,
    slots: &[(usize, u32)],
    batch: &Batch<'_, M>,
    hidden: usize,
) -> Result<Vec<f32>> {
    let mut x = Vec::with_capacity(slots.len() * hidden);
    let mut ids = Vec::with_capacity(slots.len());
    for (token, id) in slots {
        let at = token * batch.host_stride;
        x.extend_from_slice(&batch.host_x[at..at + hidden]);
        if let Some(Place::Cpu(number)) = tiers.place(*id) {
            ids.push(number);
        }
    }
    // One expert a token, of weight 1: the sum is what the expert gives.
    let n = ids.len();
    let (x, ids) = (cpu.upload(&x)?, cpu.upload(&ids)?);
    let ones = cpu.upload(&vec![1.0f32; n])?;
    let mut out = cpu.alloc::<f32>(n * hidden)?;
    let to = rows_mut(&mut out, hidden);
    cpu.experts(experts, rows(&x, hidden), &ids, &ones, 1, n, to)?;
    let mut y = vec![0.0; n * hidden];
    cpu.read(&out, 0, &mut y)?;
    Ok(y)
}
