//! A layer whose experts are in several tiers ([`crate::placement::Tier`]): where they are, and how they
//! get there. What runs is in `mixed`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use gpu::abi::MatrixDesc;
use rayon::prelude::*;

use super::hot::{Copies, HotPlaces};
use super::load::{Places, drop_unused, record_descs};
use super::moves::{self, Moves};
use super::reads::Disk;
use crate::archive::{Digest, Record};
use crate::backend::cpu::{self, Cpu, ExpertRoom};
use crate::backend::kernels::buffer::Buffer;
use crate::backend::kernels::device::{ALIGNMENT, Device, DeviceError, DeviceMemory};
use crate::backend::kernels::error::{KernelError, Result};
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::{Backend, TieredLayer};
use crate::disk::reader::{DirectFile, read_slot};
use crate::expert::{ExpertShape, Form, MatrixKind, RawMatrix};
use crate::placement::{self, TIERS, Tier, Used};
use crate::ram;

use super::Experts;
use super::ahead::Ahead;

/// Parts of the stage, of which one is copied to while another is multiplied with.
pub(super) const HALVES: usize = 2;

/// Bytes that are copied from the page cache at a time.
pub(super) const PIECE: usize = 1 << 20;

/// Key of the next layer.
static NEXT: AtomicU64 = AtomicU64::new(0);

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
    /// Different for every layer that was ever placed, whatever its number.
    pub(super) key: u64,
    pub(super) at: RwLock<At>,
    /// Written between tokens alone, while no copy from it is under way.
    pub(super) host: RwLock<M::Host>,
    pub(super) cpu: Option<(Cpu, cpu::Experts)>,
    pub(super) file: Arc<DirectFile>,
    pub(super) stage: Option<Arc<Stage<M>>>,
    /// Whether any are in pinned memory, of which exchanges leave as many, and a guess is wanted.
    pub(super) pinned: bool,
    /// As [`Used::kept`].
    pub(super) kept: AtomicU64,
    /// What came of guesses of what this layer would choose, as [`super::ahead::Counts`].
    pub(super) ahead: [AtomicU64; 4],
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
            kept: self.kept.load(Ordering::Relaxed),
            ahead: self.ahead.each_ref().map(|n| n.load(Ordering::Relaxed)),
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

    pub(super) fn place(&self, id: u32) -> Option<Place> {
        self.at().places.get(id as usize).copied()
    }

    /// Counts what `chosen` says; whether the CPU has any of it.
    pub(super) fn note(&self, chosen: &[u32], tokens: usize) -> bool {
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
}

/// Room in device memory for experts that are needed at the moment, and pinned memory for what is
/// read of the archive.
pub struct Stage<M: DeviceMemory> {
    pub(super) memory: Buffer<u8, M>,
    pub(super) slots: usize,
    /// Bytes of a slot.
    pub(super) slot: usize,
    /// What is there for layers that have not chosen yet.
    pub(super) ahead: Mutex<Ahead>,
    /// While any layer has something to read.
    pub(super) disk: Mutex<Option<Disk<M::Host>>>,
}

/// An expert that was read and checked.
struct Loaded<'a> {
    record: Record<'a>,
    /// Where its record begins in its part of the buffer.
    skip: usize,
    /// Decoded, where its tier is int4 in device memory and the host decodes.
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

/// Reads an expert's record to `room`, checks it and decodes it: to `on_cpu`, where it has room there, or if its tier
/// asks for that and the device does not.
fn load<'a>(
    layer: &TieredLayer<'a>,
    expert: usize,
    room: &'a mut [u8],
    on_cpu: Option<ExpertRoom<'_>>,
    device_decodes: bool,
) -> Result<Loaded<'a>> {
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
    if let Some(room) = on_cpu {
        for (kind, (packed, scales)) in MatrixKind::ALL.into_iter().zip(room) {
            record.decode_into(kind, packed, scales)?;
        }
    }
    let raw = match layer.tiers[expert] {
        Tier::VramHot if !device_decodes => Some(record.decode_all()?.map(|m| RawMatrix {
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

impl<D: Device> KernelBackend<D> {
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
                    HotPlaces::take(&mut device, &shape);
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
            true => Some(self.stage_for(layer.staged.max(HALVES), largest(layer)?, reads)?),
        };
        let memory = self.scratch::<u8>(device.bytes)?;
        let mut pinned = self.device().allocate_host(host.bytes)?;
        let mut descs = vec![MatrixDesc::default(); 3 * layer.tiers.len()];
        let mut places: Vec<Place> = (0..layer.tiers.len())
            .map(|e| Place::Elsewhere(device_of(e).into()))
            .collect();
        let of_cpu = |e: &usize| layer.tiers[*e] == Tier::RamRaw;
        let mut on_cpu = match here.iter().filter(|e| of_cpu(e)).count() {
            0 => None,
            n if ram::lacks(n * shape.raw_bytes()) => {
                return Err(KernelError::Device(DeviceError::HostMemory {
                    device: self.device().describe(),
                    requested: (n * shape.raw_bytes()) as u64,
                }));
            }
            n => Some(cpu::Experts::room(shape, n)?),
        };
        let rooms = on_cpu.as_mut().map(cpu::Experts::room_of_each);
        let mut rooms = rooms.unwrap_or_default().into_iter();
        let mut on_cpu_so_far = 0;
        let room = (here.iter())
            .map(|&e| Ok(layer.archive.place_of(layer.number, e)?.1))
            .collect::<Result<Vec<usize>>>()?;
        let room = read_slot(room.iter().copied().max().unwrap_or(0));
        let wave = (D::WAVE / room).clamp(1, here.len().max(1));
        let mut waves = self.waves(wave * room)?;
        let mut hot = match here.iter().any(|e| layer.tiers[*e] == Tier::VramHot) {
            true if self.decodes(&classes) => {
                let waves = here.len().div_ceil(wave);
                Some(self.hot(&records, shape, &memory, (waves, wave), room)?)
            }
            _ => None,
        };
        let device_decodes = hot.is_some();
        let mut copying = false;
        for (n, these) in here.chunks(wave).enumerate() {
            // What was copied from this buffer two waves ago has been waited for one wave ago.
            let buffer = &mut waves[n % 2];
            let rooms: Vec<_> = (these.iter())
                .map(|e| if of_cpu(e) { rooms.next() } else { None })
                .collect();
            let read: Vec<Loaded<'_>> = (these, buffer.par_chunks_mut(room), rooms)
                .into_par_iter()
                .map(|(e, room, on_cpu)| load(layer, *e, room, on_cpu, device_decodes))
                .collect::<Result<_>>()?;
            // The copies of the wave before end here, so that its buffer can be read into.
            if std::mem::take(&mut copying) {
                self.device().join()?;
                self.device().synchronize()?;
            }
            self.device().fork()?;
            // Beside the copies of this wave.
            if let Some(hot) = &mut hot {
                self.decode_wave(hot, &memory)?;
            }
            let (mut uploads, mut kept) = (Copies::new(), Vec::new());
            for (i, loaded) in read.into_iter().enumerate() {
                let (e, record) = (these[i], loaded.record);
                let from = i * room + loaded.skip;
                let bytes = from..from + record.bytes.len();
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
                    (Tier::VramHot, raw) => {
                        let to = HotPlaces::take(&mut Places { bytes: at[e] }, &shape);
                        let own = match (raw, &mut hot) {
                            (None, Some(hot)) => {
                                hot.take(&record, (e, i), bytes, to, &mut uploads)?
                            }
                            (raw, _) => {
                                let raw = raw.expect("the device or the host decodes");
                                self.upload_hot(&memory, &to, &shape, &raw)?
                            }
                        };
                        descs[3 * e..3 * e + 3].copy_from_slice(&own);
                        classes.iter_mut().for_each(|c| c.raw = true);
                        Place::Resident
                    }
                    (Tier::RamRaw, _) => {
                        on_cpu_so_far += 1;
                        Place::Cpu(on_cpu_so_far - 1)
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
                        uploads.push((at[e], bytes));
                        match slot {
                            Some(_) => Place::Slot(at[e], away(&mut classes)?),
                            None => Place::Resident,
                        }
                    }
                };
            }
            keep(&mut pinned, &kept);
            copying = !uploads.is_empty();
            let landing = (hot.as_mut()).map(|hot| (std::mem::take(&mut hot.copies), &*hot));
            let landing = landing.iter().flat_map(|(copies, hot)| {
                (copies.iter()).map(|(to, bytes)| (hot.landing(), *to, bytes.clone()))
            });
            let uploads = (uploads.into_iter()).map(|(to, bytes)| (memory.memory(), to, bytes));
            for (to, at, bytes) in landing.chain(uploads) {
                // SAFETY: nothing uses this memory before the next join below: of the layer's these are
                // places of their own, and the half that records land in was decoded from two waves ago. The
                // buffer is written again after the wave in between has waited for its copies.
                unsafe {
                    (self.device()).copy_beside(to, at, &waves[n % 2], bytes)?;
                }
            }
        }
        self.device().join()?;
        if let Some(hot) = &mut hot {
            self.decode_wave(hot, &memory)?;
        }
        self.device().synchronize()?;
        if let Some(hot) = hot {
            self.decoded(layer.number)?;
            let cache = self.landing_cache().lock();
            *cache.unwrap_or_else(PoisonError::into_inner) = Some(hot.landing);
        }
        let mut cached = self
            .waves_cache()
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *cached = Some(waves);
        drop(cached);
        drop_unused(&mut classes);
        let cpu = match on_cpu {
            None => None,
            Some(placed) => Some((Cpu::new()?, placed)),
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
            key: NEXT.fetch_add(1, Ordering::Relaxed),
            at: RwLock::new(At {
                tiers: layer.tiers.to_vec(),
                places,
            }),
            host: RwLock::new(pinned),
            cpu,
            file: layer.file.clone(),
            stage,
            pinned: layer.tiers.contains(&Tier::RamAns) && placement::copies_ahead(),
            kept: AtomicU64::new(0),
            ahead: Default::default(),
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

    /// Gives the buffers that layers are loaded through back, those in device memory to the driver.
    pub(super) fn drop_waves(&self) {
        for backend in std::iter::once(self).chain(self.peers()) {
            let cache = backend.waves_cache().lock();
            cache.unwrap_or_else(PoisonError::into_inner).take();
            let cache = backend.landing_cache().lock();
            let landing = cache.unwrap_or_else(PoisonError::into_inner).take();
            if landing.is_some() {
                drop(landing);
                // What is not given back now is when memory runs out.
                let _ = backend.device().trim();
            }
        }
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
                    ahead: Mutex::default(),
                    disk: Mutex::new(None),
                })
            }
        };
        if reads {
            let mut disk = made.disk.lock().unwrap_or_else(PoisonError::into_inner);
            if disk.is_none() {
                let slot =
                    || -> Result<_> { Ok(self.device().allocate_host(read_slot(made.slot))?) };
                let rooms = (0..made.slots).map(|_| slot()).collect::<Result<_>>()?;
                *disk = Some(Disk::new(rooms));
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
