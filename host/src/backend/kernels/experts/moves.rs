//! Experts of a layer that change places while the model runs.
//!
//! An expert outside device memory that is chosen clearly more than one inside takes its slot. Records of
//! such a layer lie in slots that hold the largest of them, in device memory and in pinned memory, so
//! that any fits any. The record of the two that is not at hand, the leaving one's or one that is on disk,
//! is read from the archive by a thread, and checked; the exchange is made between tokens once that is
//! done. The coming record goes to the stage, and from there to the slot when it has arrived, so that what
//! fails before has changed nothing. Nothing is copied off the device.
//!
//! Limits: slots of the first device; places `vram-ans`, and `ram-ans` or `disk-ans`. An exchange at a time
//! for each layer.

use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use gpu::abi::MatrixDesc;
use rayon::prelude::*;

use super::Experts;
use super::tiers::{At, Away, PIECE, Place, Tiers, moved};
use crate::archive::checksum;
use crate::backend::kernels::device::{ALIGNMENT, Device, DeviceMemory};
use crate::backend::kernels::error::{KernelError, Result};
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::{Repin, TieredLayer};
use crate::disk::reader::{Aligned, DirectFile, read_slot};
use crate::placement::Tier;

/// Tokens after which a selection counts half.
const HALF_LIFE: f32 = 512.0;

/// Standard deviations by which counts must differ. Both being Poisson, the variance of their difference
/// is about their sum; with two only noise would move many of a layer's pairs to and fro.
const DEVIATIONS: f32 = 3.0;

/// What is known of a layer's use, and the exchange that has begun.
pub struct Moves {
    /// Selections of each expert, decaying.
    counts: Vec<f32>,
    pending: Option<Pending>,
}

/// An exchange whose read goes on.
struct Pending {
    leaving: u32,
    coming: u32,
    /// Whose record is read.
    reads: u32,
    read: JoinHandle<io::Result<Read>>,
}

/// A record that was read and checked.
struct Read {
    buffer: Aligned,
    record: Range<usize>,
}

impl Read {
    fn new(file: &DirectFile, away: &Away) -> io::Result<Self> {
        let mut buffer = Aligned::new(read_slot(away.bytes));
        let start = buffer.as_ptr().addr();
        let read = file.read_into(away.file, away.bytes, &mut buffer)?;
        if checksum(read) != away.checksum {
            let what = "its checksum is not that of the archive's index";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let skip = read.as_ptr().addr() - start;
        Ok(Self {
            record: skip..skip + away.bytes,
            buffer,
        })
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[self.record.clone()]
    }
}

impl Moves {
    /// Nothing known of so many experts.
    pub fn new(experts: usize) -> Self {
        Self {
            counts: vec![0.0; experts],
            pending: None,
        }
    }

    /// Counts what `tokens` tokens chose.
    pub fn note(&mut self, chosen: &[u32], tokens: usize) {
        let kept = (-(tokens as f32) / HALF_LIFE).exp2();
        self.counts.iter_mut().for_each(|c| *c *= kept);
        for id in chosen {
            if let Some(count) = self.counts.get_mut(*id as usize) {
                *count += 1.0;
            }
        }
    }

    /// The expert inside that is used least and the one outside that is used most, if that one was used
    /// clearly more.
    fn pair(&self, at: &At) -> Option<(u32, u32)> {
        let of = |wanted: fn(&Place) -> bool| {
            (0u32..)
                .zip(at.places.iter().zip(&self.counts))
                .filter(move |(_, (place, _))| wanted(place))
                .map(|(id, (_, count))| (id, *count))
        };
        let inside = of(|p| matches!(p, Place::Slot(..)));
        let outside = of(|p| matches!(p, Place::Host(..) | Place::Disk(_)));
        let (leaving, less) = inside.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let (coming, more) = outside.max_by(|a, b| a.1.total_cmp(&b.1))?;
        (more - less > DEVIATIONS * (more + less).sqrt()).then_some((leaving, coming))
    }
}

/// Bytes of a slot for any record of the experts `here` that may move; `None` where none can.
pub fn slot(layer: &TieredLayer<'_>, here: &[usize]) -> Result<Option<usize>> {
    let (mut largest, mut inside, mut outside) = (0, false, false);
    for &e in here {
        match layer.tiers[e] {
            Tier::VramAns => inside = true,
            Tier::RamAns | Tier::DiskAns => outside = true,
            Tier::VramHot | Tier::RamRaw => continue,
        }
        largest = largest.max(layer.archive.place_of(layer.number, e)?.1);
    }
    Ok((inside && outside).then(|| largest.next_multiple_of(ALIGNMENT)))
}

impl<D: Device> KernelBackend<D> {
    /// [`crate::backend::LoadExperts::repin`].
    pub(super) fn move_one(&self, experts: &Experts<D::Memory>) -> Result<Repin> {
        let Some(tiers) = &experts.tiers else {
            return Ok(Repin::Idle);
        };
        let Some(moves) = &tiers.moves else {
            return Ok(Repin::Idle);
        };
        let mut moves = moves.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |expert: u32, source| KernelError::Read {
            layer: tiers.number,
            expert: expert as usize,
            source,
        };
        let Some(pending) = moves.pending.take() else {
            let at = tiers.at();
            let Some((leaving, coming)) = moves.pair(&at) else {
                return Ok(Repin::Idle);
            };
            // What is in pinned memory is at hand; what takes its place there is not.
            let (reads, record) = match (at.places[leaving as usize], at.places[coming as usize]) {
                (_, Place::Disk(record)) => (coming, record),
                (Place::Slot(_, record), _) => (leaving, record),
                _ => unreachable!("a pair has one in a slot"),
            };
            let file = tiers.file.clone();
            let read = std::thread::Builder::new()
                .name("repin".into())
                .spawn(move || Read::new(&file, &record))
                .map_err(|e| failed(reads, e))?;
            moves.pending = Some(Pending {
                leaving,
                coming,
                reads,
                read,
            });
            return Ok(Repin::Begun);
        };
        if !pending.read.is_finished() {
            moves.pending = Some(pending);
            return Ok(Repin::Waiting);
        }
        let read = match pending.read.join() {
            Ok(read) => read.map_err(|e| failed(pending.reads, e))?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        self.exchange(experts, tiers, (pending.leaving, pending.coming), &read)?;
        Ok(Repin::Moved)
    }

    /// Gives the slot of the first expert to the second.
    fn exchange(
        &self,
        experts: &Experts<D::Memory>,
        tiers: &Tiers<D::Memory>,
        (leaving, coming): (u32, u32),
        read: &Read,
    ) -> Result<()> {
        let (leaving, coming) = (leaving as usize, coming as usize);
        let (from, to) = {
            let at = tiers.at();
            (at.places[coming], at.places[leaving])
        };
        let (Place::Host(_, record) | Place::Disk(record), Place::Slot(slot, left)) = (from, to)
        else {
            unreachable!("places change here alone");
        };
        let stage = tiers.stage.as_ref().map(Arc::clone);
        let stage = stage.expect("a layer with experts outside has a stage");
        let (device, memory) = (self.device(), experts.memory.memory());
        // Whatever has used the stage, the slot and the pinned memory has done so behind this; also copies ahead of a
        // layer that a failed pass did not reach.
        device.join()?;
        device.synchronize()?;
        stage.forget_ahead();
        // No launch reads the descriptors of an expert that is outside.
        let descs = record
            .descs
            .map(|d| moved(d, memory.address() + slot as u64));
        let at = size_of::<MatrixDesc>() * 3 * coming;
        device.upload(experts.descs.memory(), at, bytemuck::cast_slice(&descs))?;
        match from {
            Place::Host(at, _) => {
                let host = tiers.host.read().unwrap_or_else(PoisonError::into_inner);
                device.fork()?;
                let bytes = at..at + record.bytes;
                // SAFETY: nothing else uses the stage between tokens, nor was it in use at the
                // `synchronize` above; the pinned memory is written behind a `synchronize`, the one below
                // or that of the next exchange, and lives as long as the layer.
                let copied = unsafe { device.copy_beside(stage.memory.memory(), 0, &host, bytes) };
                device.join()?;
                copied?;
            }
            _ => device.upload(stage.memory.memory(), 0, read.bytes())?,
        }
        // The copy to the slot is the last that can fail but by the device's own failure.
        device.synchronize()?;
        let arrived = (stage.memory.memory(), 0);
        device.copy(arrived, (memory, slot), record.bytes)?;
        // Kernels read weights ahead of their wait for the one before.
        device.synchronize()?;
        let (tier, place) = match from {
            Place::Host(at, _) => {
                let mut host = tiers.host.write().unwrap_or_else(PoisonError::into_inner);
                (host[at..at + left.bytes].par_chunks_mut(PIECE))
                    .zip(read.bytes().par_chunks(PIECE))
                    .for_each(|(to, from)| to.copy_from_slice(from));
                (Tier::RamAns, Place::Host(at, left))
            }
            _ => (Tier::DiskAns, Place::Disk(left)),
        };
        let mut at = tiers.at.write().unwrap_or_else(PoisonError::into_inner);
        (at.tiers[leaving], at.places[leaving]) = (tier, place);
        (at.tiers[coming], at.places[coming]) = (Tier::VramAns, Place::Slot(slot, record));
        Ok(())
    }
}
