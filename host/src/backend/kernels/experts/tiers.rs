//! A layer whose experts are in several tiers ([`crate::placement::Tier`]).
//!
//! What a layer chose is read back, and the host sorts the assignments: first experts that stay in
//! device memory, then those that are copied there, then those that the CPU computes. While the GPU
//! multiplies with the first, the second are copied beside it to a stage, from pinned memory or from
//! what was just read of the archive. The CPU's results go to the weighted sum as they are. Sums
//! have the order of the experts' numbers wherever these were, so the bits are the same.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use cuda_std::mem::Slice;
use gpu::abi::{self, MatrixDesc};
use rayon::prelude::*;

use super::moves::{self, Moves};
use super::peers::Chosen;
use super::{Groups, Operands, Places, Quantised, Sum, drop_unused, record_descs, word};
use crate::archive::{Digest, Record};
use crate::backend::cpu::{self, Cpu};
use crate::backend::kernels::device::{ALIGNMENT, Device, DeviceMemory};
use crate::backend::kernels::ops::{Buffer, KernelBackend, KernelError, Result, input, output};
use crate::backend::split::Part;
use crate::backend::{Backend, LayerExperts, LoadExperts, Rows, RowsMut, TieredLayer};
use crate::backend::{rows, rows_mut};
use crate::disk::reader::{BLOCK, DirectFile};
use crate::disk::reads::{Read, Reads, Way};
use crate::expert::{ExpertShape, Form, MatrixKind, RawMatrix};
use crate::placement::{TIERS, Tier, Used};

use super::Experts;

/// Bytes of records that are read and checked while as many are copied; two such buffers are pinned. Few
/// enough for a server's L3 cache, so that what was copied there need not be read from memory again.
const WAVE: usize = 64 << 20;

/// Bytes that are copied from the page cache at a time.
pub(super) const PIECE: usize = 1 << 20;

/// A record outside device memory, or one that may leave it.
#[derive(Clone, Copy)]
pub(super) struct Away {
    pub bytes: usize,
    /// Where it is in the archive.
    pub file: u64,
    /// Its checksum there.
    pub checksum: Digest,
    /// Descriptors of its matrices, addresses from the record's start.
    pub descs: [MatrixDesc; 3],
}

#[derive(Clone, Copy)]
pub(super) enum Place {
    /// Its descriptors are in the layer's list.
    Resident,
    /// The same, its record being in the layer's memory from this byte on, which another may take.
    Slot(usize, Away),
    /// Number among the CPU's experts.
    Cpu(u32),
    /// In pinned memory, from this byte on.
    Host(usize, Away),
    /// In the archive.
    Disk(Away),
    /// On another device, as `group_experts` numbers them.
    Elsewhere(u32),
}

/// Where a layer's experts are.
pub(super) struct Tiers<M: DeviceMemory> {
    pub(super) number: u32,
    pub(super) at: RwLock<At>,
    /// Written between tokens alone, while no copy from it is under way.
    pub(super) host: RwLock<M::Host>,
    cpu: Option<(Cpu, cpu::Experts)>,
    pub(super) file: Arc<DirectFile>,
    pub(super) stage: Option<Arc<Stage<M>>>,
    used: [AtomicU64; TIERS],
    /// Selections of layers whose experts are all in device memory, in both forms.
    vram: AtomicU64,
    /// Where experts may change places.
    pub(super) moves: Option<Mutex<Moves>>,
}

/// Tier and place of each expert.
pub(super) struct At {
    pub(super) tiers: Vec<Tier>,
    pub(super) places: Vec<Place>,
}

impl<M: DeviceMemory> Tiers<M> {
    pub fn used(&self) -> Used {
        Used {
            tiers: std::array::from_fn(|t| self.used[t].load(Ordering::Relaxed)),
            vram: self.vram.load(Ordering::Relaxed),
        }
    }

    /// Whether all experts are in memory of devices, so that the host need not know what was chosen.
    pub fn resident(&self) -> bool {
        self.stage.is_none() && self.cpu.is_none()
    }

    /// Counts selections of such a layer.
    pub fn count(&self, selections: usize) {
        let tiers = &self.at().tiers;
        let counter = match tiers.first() {
            Some(t) if tiers.iter().all(|other| other == t) => &self.used[*t as usize],
            _ => &self.vram,
        };
        counter.fetch_add(selections as u64, Ordering::Relaxed);
    }

    pub(super) fn at(&self) -> RwLockReadGuard<'_, At> {
        self.at.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, id: u32) -> Option<Place> {
        self.at().places.get(id as usize).copied()
    }

    /// Counts what `chosen` says; whether the CPU has any of it.
    fn note(&self, chosen: &[u32], tokens: usize) -> bool {
        let at = self.at();
        let mut on_cpu = false;
        for id in chosen {
            if let Some(place) = at.places.get(*id as usize) {
                on_cpu |= matches!(place, Place::Cpu(_));
                let tier = at.tiers[*id as usize];
                self.used[tier as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
        drop(at);
        if let Some(moves) = &self.moves {
            let mut moves = moves.lock().unwrap_or_else(PoisonError::into_inner);
            moves.note(chosen, tokens);
        }
        on_cpu
    }

    /// How many of the tokens `chosen` `[_, top_k]` go together: the stage holds what they need.
    fn together(&self, chosen: &[u32], top_k: usize, at_once: usize) -> usize {
        let slots = self.stage.as_ref().map_or(0, |s| s.slots);
        let mut staged: BTreeSet<u32> = BTreeSet::new();
        for (n, ids) in chosen.chunks_exact(top_k).take(at_once).enumerate() {
            let away =
                |id: &&u32| matches!(self.place(**id), Some(Place::Host(..) | Place::Disk(_)));
            staged.extend(ids.iter().filter(away));
            if staged.len() > slots && n > 0 {
                return n;
            }
        }
        at_once.min(chosen.len() / top_k)
    }
}

/// Room in device memory for experts that are needed at the moment, and pinned memory for what is
/// read of the archive.
pub struct Stage<M: DeviceMemory> {
    pub(super) memory: Buffer<u8, M>,
    slots: usize,
    /// Bytes of a slot.
    slot: usize,
    /// While any layer has something to read.
    disk: Mutex<Option<Disk<M::Host>>>,
}

/// Who reads, and as many pinned slots as the stage has, of a record and what direct reads add at both
/// ends; those that are missing are being read to.
struct Disk<H> {
    reads: Reads<H>,
    slots: Vec<Option<H>>,
}

/// Bytes of a record of `bytes` and what direct reads add at both ends.
pub(super) fn read_slot(bytes: usize) -> usize {
    (bytes + 2 * BLOCK).next_multiple_of(BLOCK)
}

/// An expert that was read and checked.
struct Loaded<'a> {
    record: Record<'a>,
    /// Where its record begins in its part of the buffer.
    skip: usize,
    /// Decoded, where its tier is int4.
    raw: Option<[RawMatrix<'static>; 3]>,
}

/// Copies bytes to places of `to`, which ascend.
fn keep(to: &mut [u8], from: &[(usize, &[u8])]) {
    let mut rest = to;
    let mut at = 0;
    let mut jobs: Vec<(&mut [u8], &[u8])> = Vec::with_capacity(from.len());
    for (place, bytes) in from {
        let (_, here) = rest.split_at_mut(place - at);
        let (here, behind) = here.split_at_mut(bytes.len());
        jobs.push((here, bytes));
        (rest, at) = (behind, place + bytes.len());
    }
    (jobs.into_par_iter()).for_each(|(to, from)| to.copy_from_slice(from));
}

/// Reads an expert's record to `room`, checks it and decodes it if its tier asks for that.
fn load<'a>(layer: &TieredLayer<'a>, expert: usize, room: &'a mut [u8]) -> Result<Loaded<'a>> {
    let (at, bytes) = layer.archive.place_of(layer.number, expert)?;
    let start = room.as_ptr().addr();
    let read = if layer.cached {
        // In pieces, so that few records keep many processors at work; so is the checksum.
        let from = layer.archive.bytes(layer.number, expert)?;
        (room[..bytes].par_chunks_mut(PIECE))
            .zip(from.par_chunks(PIECE))
            .for_each(|(to, from)| to.copy_from_slice(from));
        &room[..bytes]
    } else {
        let read = layer.file.read_into(at, bytes, room);
        read.map_err(|source| KernelError::Read {
            layer: layer.number,
            expert,
            source,
        })?
    };
    let record = layer.archive.record_in(layer.number, expert, read)?;
    let raw = match layer.tiers[expert] {
        Tier::VramHot | Tier::RamRaw => Some(record.decode_all()?.map(|m| RawMatrix {
            packed: m.packed.into_owned().into(),
            scales: m.scales.into_owned().into(),
        })),
        _ => None,
    };
    Ok(Loaded {
        skip: read.as_ptr().addr() - start,
        record,
        raw,
    })
}

/// A layer's assignments as the host sorted them.
struct Sorted {
    /// As [`Groups::over`] takes them.
    words: Vec<u32>,
    /// Active experts that stay.
    resident: usize,
    /// Experts that are copied, behind them.
    away: Vec<u32>,
    /// Slots of both.
    slots: usize,
    /// Token and expert of the slots of the CPU, behind these.
    on_cpu: Vec<(usize, u32)>,
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
        let mut active = Vec::new();
        let (mut slot_token, mut slot_expert) = (Vec::new(), Vec::new());
        let mut slot_of = vec![u32::MAX; chosen.len()];
        for (i, (id, assignments)) in resident.iter().chain(&away).enumerate() {
            let number = match i.checked_sub(resident.len()) {
                None => *id,
                Some(copied) => (experts + copied) as u32,
            };
            active.extend([number, slot_token.len() as u32, assignments.len() as u32, 0]);
            for a in *assignments {
                slot_of[*a] = slot_token.len() as u32;
                slot_token.push((a / top_k) as u32);
                slot_expert.push(number);
            }
        }
        let slots = slot_token.len();
        let mut on_cpu = Vec::new();
        for (id, assignments) in &cpu {
            for a in *assignments {
                slot_of[*a] = (slots + on_cpu.len()) as u32;
                on_cpu.push((a / top_k, *id));
            }
        }
        let given = slots + on_cpu.len();
        for (place, assignments) in elsewhere {
            for a in assignments {
                slot_of[*a] = (given + (place as usize - 1) * chosen.len() + a) as u32;
            }
        }
        let n_active = (active.len() / 4) as u32;
        Self {
            words: [active, vec![n_active], slot_token, slot_expert, slot_of].concat(),
            resident: resident.len(),
            away: away.iter().map(|(id, _)| *id).collect(),
            slots,
            on_cpu,
        }
    }
}

impl<D: Device> KernelBackend<D> {
    /// [`Backend::experts`] of a layer in several tiers.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_tiers(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
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
        (self.device()).download(ids.memory(), 0, bytemuck::cast_slice_mut(&mut chosen))?;
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
        let mut start = 0;
        while start < tokens {
            // What is read for these goes where copies for those before may still come from.
            if start > 0 && tiers.stage.is_some() {
                self.device().synchronize()?;
            }
            let rest = &chosen[start * top_k..];
            let n = tiers.together(rest, top_k, at_once.min(tokens - start));
            let batch = Batch {
                chosen: &rest[..n * top_k],
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
            self.run_batch(experts, tiers, batch)?;
            start += n;
        }
        Ok(())
    }

    fn run_batch(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        mut batch: Batch<'_, D::Memory>,
    ) -> Result<()> {
        let (tokens, top_k) = (batch.sum.tokens, batch.sum.top_k);
        let [gate_up, down] = &experts.classes;
        let sorted = Sorted::new(tiers, batch.chosen, top_k, experts.experts);
        let (resident, active) = (sorted.resident, sorted.resident + sorted.away.len());
        let words = self.upload(&sorted.words)?;
        let cpu_rows = sorted.on_cpu.len();
        let abroad = match experts.peers.is_empty() {
            true => None,
            false => Some(self.start_peers(experts, &batch.on_device, cpu_rows)?),
        };
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
                let hidden = experts.shape.hidden;
                rows = Some(compute(cpu, placed, tiers, on_cpu, &batch, hidden)?);
            }
            Ok(())
        };
        let (h, outer) = if active > 0 {
            let waiting = self.fetch(experts, tiers, &sorted.away)?;
            let x = self.quantise(batch.on_device.view, tokens, experts.shape.hidden)?;
            let inner = self.scratch::<u32>(sorted.slots * gate_up.partials(experts.form))?;
            let of = part(0..resident);
            self.matmuls(experts, gate_up, &of, Operands::gate_up(&x, &of, &inner))?;
            self.fetch_rest(tiers, &sorted.away, waiting, &mut by_cpu)?;
            let of = part(resident..active);
            self.matmuls(experts, gate_up, &of, Operands::gate_up(&x, &of, &inner))?;
            let h = self.activate(experts, &groups, &x, &inner, None)?;
            let outer = self.scratch::<u32>(sorted.slots * down.partials(experts.form))?;
            self.matmuls(experts, down, &groups, Operands::down(&h, &outer))?;
            (h, outer)
        } else {
            let nothing = Quantised {
                values: self.scratch(0)?,
                scales: self.scratch(0)?,
                sums: self.scratch(0)?,
            };
            (nothing, self.scratch(0)?)
        };
        if cpu_rows > 0 {
            self.mark(Part::Idle)?;
        }
        by_cpu()?;
        let rows = rows.unwrap_or_default();
        let given = match &abroad {
            None => Some(self.upload(&rows)?),
            Some(abroad) => {
                let bytes = bytemuck::cast_slice(&rows);
                self.device().upload(abroad.memory(), 0, bytes)?;
                self.join_peers(experts, abroad)?;
                None
            }
        };
        batch.sum.given = match (&given, &abroad) {
            (Some(given), _) => given.slice(),
            (None, Some(abroad)) => abroad.given(),
            (None, None) => Slice::EMPTY,
        };
        self.combine(experts, &groups, &h, &outer, None, batch.sum)
    }

    /// Starts the copies of experts in pinned memory, and says whether others must be read.
    fn fetch(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        away: &[u32],
    ) -> Result<bool> {
        let Some(stage) = tiers.stage.as_ref().filter(|_| !away.is_empty()) else {
            return Ok(false);
        };
        self.describe_away(experts, tiers, stage, away)?;
        self.device().fork()?;
        let mut waiting = false;
        let host = tiers.host.read().unwrap_or_else(PoisonError::into_inner);
        for (slot, id) in away.iter().enumerate() {
            match tiers.place(*id) {
                Some(Place::Host(at, record)) => {
                    let bytes = at..at + record.bytes;
                    let memory = stage.memory.memory();
                    self.copies(record.bytes);
                    // SAFETY: the stage is used behind the join in `fetch_rest` alone, and what was
                    // used of it before has been waited for when `ids` were read; the pinned memory
                    // lives as long as the layer and is written between tokens alone, behind a
                    // `synchronize` that has waited for this.
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
        away: &[u32],
    ) -> Result<()> {
        let mut descs: Vec<MatrixDesc> = Vec::with_capacity(3 * away.len());
        for (slot, id) in away.iter().enumerate() {
            let base = stage.memory.memory().address() + (slot * stage.slot) as u64;
            if let Some(Place::Host(_, record) | Place::Disk(record)) = tiers.place(*id) {
                descs.extend(record.descs.map(|d| moved(d, base)));
            }
        }
        let at = size_of::<MatrixDesc>() * 3 * experts.experts;
        let memory = experts.descs.memory();
        self.device()
            .upload(memory, at, bytemuck::cast_slice(&descs))?;
        Ok(())
    }

    /// Reads and copies what [`KernelBackend::fetch`] left, and lets the stream wait for all copies.
    /// `meanwhile` is called while the disk is at work, if it is.
    fn fetch_rest(
        &self,
        tiers: &Tiers<D::Memory>,
        away: &[u32],
        waiting: bool,
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let Some(stage) = tiers.stage.as_ref().filter(|_| !away.is_empty()) else {
            return Ok(());
        };
        self.mark(Part::Copies)?;
        let read = match waiting {
            true => self.read_away(tiers, stage, away, meanwhile),
            false => Ok(()),
        };
        // Also after a failure: others are on their way.
        self.device().join()?;
        read
    }

    /// Reads experts of the archive, and copies each to the stage as soon as it is there.
    fn read_away(
        &self,
        tiers: &Tiers<D::Memory>,
        stage: &Stage<D::Memory>,
        away: &[u32],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut disk = stage.disk.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Disk { reads, slots }) = disk.as_mut() else {
            unreachable!("a layer with experts on disk has asked for it");
        };
        let mut asked = Vec::with_capacity(away.len());
        for (slot, id) in away.iter().enumerate() {
            if let Some(Place::Disk(record)) = tiers.place(*id) {
                asked.push(Read {
                    number: slot,
                    offset: record.file,
                    len: record.bytes,
                    room: match slots[slot].take() {
                        Some(room) => room,
                        // Lost with a thread that has panicked.
                        None => self.device().allocate_host(read_slot(stage.slot))?,
                    },
                });
            }
        }
        let mut missing: BTreeSet<usize> = asked.iter().map(|read| read.number).collect();
        let done = reads.start(&tiers.file, asked);
        let mut result = meanwhile();
        for read in done {
            let slot = read.number;
            missing.remove(&slot);
            let memory = stage.memory.memory();
            let copied = match read.bytes {
                Err(source) => Err(KernelError::Read {
                    layer: tiers.number,
                    expert: away[slot] as usize,
                    source,
                }),
                Ok(bytes) => {
                    self.copies(bytes.len());
                    // SAFETY: as in `fetch`; the pinned memory is written again for the next tokens or by
                    // the next layer that reads, which have then waited for all that follows the join.
                    let copied = unsafe {
                        (self.device()).copy_beside(memory, slot * stage.slot, &read.room, bytes)
                    };
                    copied.map_err(KernelError::from)
                }
            };
            slots[slot] = Some(read.room);
            result = result.and(copied);
        }
        // Nothing else says that their reader is gone.
        let lost = missing.first().map(|slot| KernelError::Read {
            layer: tiers.number,
            expert: away[*slot] as usize,
            source: std::io::Error::other("the thread that reads has panicked"),
        });
        result.and(lost.map_or(Ok(()), Err))
    }

    /// Places a layer's experts in their tiers, on all devices at once.
    pub(super) fn place_layer(
        &self,
        layer: &TieredLayer<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        let (mut experts, peers) = std::thread::scope(|scope| -> Result<_> {
            let others: Vec<_> = (self.peers().iter().enumerate())
                .map(|(p, peer)| {
                    let number = p as u8 + 1;
                    let load = move || peer.place_tiers(layer, number, shape, form);
                    let any = layer.devices.contains(&number);
                    any.then(|| scope.spawn(load))
                })
                .collect();
            let own = self.place_tiers(layer, 0, shape, form);
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            let others: Vec<Option<Result<_>>> = (others.into_iter())
                .map(|thread| thread.map(join))
                .collect();
            let others: Vec<Option<_>> = (others.into_iter())
                .map(Option::transpose)
                .collect::<Result<_>>()?;
            Ok((own?, others))
        })?;
        if peers.iter().any(Option::is_some) {
            experts.peers = peers;
        }
        Ok(experts)
    }

    /// Places those of a layer's experts in their tiers that go to device `number`.
    fn place_tiers(
        &self,
        layer: &TieredLayer<'_>,
        number: u8,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        let device_of = |e: usize| layer.devices.get(e).copied().unwrap_or(0);
        let here: Vec<usize> = (0..layer.tiers.len())
            .filter(|e| device_of(*e) == number)
            .collect();
        let records = layer.archive.layer(layer.number)?;
        let mut classes = self.coded_classes(&records, &shape)?;
        let raw_parts = || {
            MatrixKind::ALL.map(|kind| {
                let (r, c) = shape.dims(kind);
                (r * c / 2, 4 * shape.scales.count(r, c))
            })
        };
        // Where everything goes, before anything is read.
        let (mut device, mut host) = (Places::default(), Places::default());
        let mut at = vec![0; layer.tiers.len()];
        let (mut reads, mut away) = (false, false);
        let slot = match number {
            0 if layer.moving => moves::slot(layer, &here)?,
            _ => None,
        };
        for &e in &here {
            let tier = &layer.tiers[e];
            let (_, bytes) = layer.archive.place_of(layer.number, e)?;
            at[e] = match tier {
                Tier::VramHot => {
                    let at = device.bytes;
                    for (packed, scales) in raw_parts() {
                        device.take(packed);
                        device.take(scales);
                    }
                    at
                }
                Tier::VramAns => device.take(slot.unwrap_or(bytes)),
                Tier::RamAns => host.take(slot.unwrap_or(bytes)),
                Tier::RamRaw | Tier::DiskAns => 0,
            };
            away |= matches!(tier, Tier::RamAns | Tier::DiskAns);
            reads |= *tier == Tier::DiskAns;
        }
        let stage = match away {
            false => None,
            true => Some(self.stage_for(layer.staged, largest(layer)?, reads)?),
        };
        let memory = self.scratch::<u8>(device.bytes)?;
        let mut pinned = self.device().allocate_host(host.bytes)?;
        let mut descs = vec![MatrixDesc::default(); 3 * layer.tiers.len()];
        let mut places: Vec<Place> = (0..layer.tiers.len())
            .map(|e| Place::Elsewhere(device_of(e).into()))
            .collect();
        let mut on_cpu: Vec<[RawMatrix<'static>; 3]> = Vec::new();
        let room = (here.iter())
            .map(|&e| Ok(layer.archive.place_of(layer.number, e)?.1))
            .collect::<Result<Vec<usize>>>()?;
        let room = read_slot(room.iter().copied().max().unwrap_or(0));
        let wave = (WAVE / room).clamp(1, here.len().max(1));
        let mut waves = self.waves(wave * room)?;
        let mut copying = false;
        for (n, these) in here.chunks(wave).enumerate() {
            // What was copied from this buffer two waves ago has been waited for one wave ago.
            let buffer = &mut waves[n % 2];
            let read: Vec<Loaded<'_>> = (these, buffer.par_chunks_mut(room))
                .into_par_iter()
                .map(|(e, room)| load(layer, *e, room))
                .collect::<Result<_>>()?;
            // The copies of the wave before end here, so that its buffer can be read into.
            if std::mem::take(&mut copying) {
                self.device().join()?;
                self.device().synchronize()?;
            }
            self.device().fork()?;
            let (mut uploads, mut kept) = (Vec::new(), Vec::new());
            for (i, loaded) in read.into_iter().enumerate() {
                let (e, record) = (these[i], loaded.record);
                let away = |classes: &mut _| -> Result<Away> {
                    let (file, bytes) = layer.archive.place_of(layer.number, e)?;
                    Ok(Away {
                        bytes,
                        file,
                        checksum: layer.archive.checksum(layer.number, e)?,
                        descs: record_descs(&record, 0, &shape, e, classes)?,
                    })
                };
                places[e] = match (layer.tiers[e], loaded.raw) {
                    (Tier::VramHot, Some(raw)) => {
                        let own = &mut descs[3 * e..3 * e + 3];
                        self.upload_raw(&memory, at[e], &shape, &raw, own)?;
                        classes.iter_mut().for_each(|c| c.raw = true);
                        Place::Resident
                    }
                    (Tier::RamRaw, Some(raw)) => {
                        on_cpu.push(raw);
                        Place::Cpu(on_cpu.len() as u32 - 1)
                    }
                    (Tier::RamAns, _) => {
                        kept.push((at[e], record.bytes));
                        Place::Host(at[e], away(&mut classes)?)
                    }
                    (Tier::DiskAns, _) => Place::Disk(away(&mut classes)?),
                    _ => {
                        let base = memory.memory().address() + at[e] as u64;
                        let own = record_descs(&record, base, &shape, e, &mut classes)?;
                        descs[3 * e..3 * e + 3].copy_from_slice(&own);
                        let from = i * room + loaded.skip;
                        uploads.push((at[e], from..from + record.bytes.len()));
                        match slot {
                            Some(_) => Place::Slot(at[e], away(&mut classes)?),
                            None => Place::Resident,
                        }
                    }
                };
            }
            keep(&mut pinned, &kept);
            copying = !uploads.is_empty();
            for (to, bytes) in uploads {
                // SAFETY: nothing uses this memory before the last join below, and the buffer is
                // written again after the wave in between has waited for its copies.
                unsafe {
                    self.device()
                        .copy_beside(memory.memory(), to, &waves[n % 2], bytes)?;
                }
            }
        }
        self.device().join()?;
        self.device().synchronize()?;
        let mut cached = self
            .waves_cache()
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *cached = Some(waves);
        drop(cached);
        drop_unused(&mut classes);
        let cpu = if on_cpu.is_empty() {
            None
        } else {
            let cpu = Cpu::new()?;
            let placed = cpu.load_experts(LayerExperts::Raw(on_cpu), shape, form)?;
            Some((cpu, placed))
        };
        let slots = stage.as_ref().map_or(0, |s| s.slots);
        descs.resize(3 * (layer.tiers.len() + slots), MatrixDesc::default());
        let mut experts = self.place(shape, form, memory, descs, classes)?;
        experts.experts = layer.tiers.len();
        if here.len() < layer.tiers.len() {
            let place = |e| match (number, device_of(e)) {
                (_, device) if device == number => 0,
                (0, device) => u32::from(device),
                // Their rows go to the first device.
                _ => gpu::group::NOWHERE,
            };
            let all: Vec<u32> = (0..layer.tiers.len()).map(place).collect();
            experts.places = Some(self.upload(&all)?);
        }
        experts.tiers = Some(Tiers {
            number: layer.number,
            at: RwLock::new(At {
                tiers: layer.tiers.to_vec(),
                places,
            }),
            host: RwLock::new(pinned),
            cpu,
            file: layer.file.clone(),
            stage,
            used: Default::default(),
            vram: AtomicU64::new(0),
            moves: slot.map(|_| Mutex::new(Moves::new(layer.tiers.len()))),
        });
        Ok(experts)
    }

    /// The two pinned buffers of `bytes` bytes that layers are loaded through.
    fn waves(&self, bytes: usize) -> Result<[<D::Memory as DeviceMemory>::Host; 2]> {
        let cache = self.waves_cache().lock();
        let before = cache.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waves) = before.filter(|w| w[0].len() == bytes) {
            return Ok(waves);
        }
        let one = || self.device().allocate_host(bytes);
        Ok([one()?, one()?])
    }

    /// Gives the pinned buffers that layers are loaded through back.
    pub(super) fn drop_waves(&self) {
        for backend in std::iter::once(self).chain(self.peers()) {
            let cache = backend.waves_cache().lock();
            cache.unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// An expert as int4 from byte `at` of `memory` on.
    fn upload_raw(
        &self,
        memory: &Buffer<u8, D::Memory>,
        at: usize,
        shape: &ExpertShape,
        raw: &[RawMatrix<'_>; 3],
        descs: &mut [MatrixDesc],
    ) -> Result<()> {
        let mut places = Places { bytes: at };
        let base = memory.memory().address();
        for (kind, (m, desc)) in MatrixKind::ALL.into_iter().zip(raw.iter().zip(descs)) {
            let (rows, cols) = shape.dims(kind);
            let packed = places.take(m.packed.len());
            let scales = places.take(4 * m.scales.len());
            self.device().upload(memory.memory(), packed, &m.packed)?;
            let bytes = bytemuck::cast_slice(&m.scales);
            self.device().upload(memory.memory(), scales, bytes)?;
            *desc = MatrixDesc {
                stream: Slice::new(base + packed as u64, (m.packed.len() / 4) as u64),
                scales: Slice::new(base + scales as u64, m.scales.len() as u64),
                codec: abi::CODEC_RAW,
                scale_format: abi::SCALES_F32,
                rows: word("rows", rows)?,
                cols: word("columns", cols)?,
                ..Default::default()
            };
        }
        Ok(())
    }

    /// The stage, with room for `slots` records of `bytes` bytes. Layers share it, so `bytes` is that
    /// of the largest of all.
    fn stage_for(&self, slots: usize, bytes: usize, reads: bool) -> Result<Arc<Stage<D::Memory>>> {
        let mut stage = self.stage().lock().unwrap_or_else(PoisonError::into_inner);
        let there = stage
            .as_ref()
            .filter(|s| s.slots >= slots && s.slot >= bytes);
        let made = match there {
            Some(there) => there.clone(),
            None => {
                let slot = bytes.next_multiple_of(ALIGNMENT);
                Arc::new(Stage {
                    memory: self.scratch(slots * slot)?,
                    slots,
                    slot,
                    disk: Mutex::new(None),
                })
            }
        };
        if reads {
            let mut disk = made.disk.lock().unwrap_or_else(PoisonError::into_inner);
            if disk.is_none() {
                let slot = || -> Result<_> {
                    Ok(Some(self.device().allocate_host(read_slot(made.slot))?))
                };
                *disk = Some(Disk {
                    slots: (0..made.slots).map(|_| slot()).collect::<Result<_>>()?,
                    reads: Reads::new(Way::Ring),
                });
            }
        }
        *stage = Some(made.clone());
        Ok(made)
    }
}

/// Bytes of the largest record of a layer's archive.
fn largest(layer: &TieredLayer<'_>) -> Result<usize> {
    let mut largest = 0;
    for number in layer.archive.layers() {
        for e in 0..layer.archive.experts() {
            largest = largest.max(layer.archive.place_of(*number, e)?.1);
        }
    }
    Ok(largest)
}

/// A descriptor whose addresses are from `base` on.
pub(super) fn moved(mut desc: MatrixDesc, base: u64) -> MatrixDesc {
    for slice in [&mut desc.stream, &mut desc.blocks, &mut desc.scales] {
        if slice.len > 0 {
            slice.addr += base;
        }
    }
    desc
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
