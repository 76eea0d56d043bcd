//! Records that are read of the archive when they are needed.
//!
//! They come to pinned memory, and from there to the stage. Which of the pinned slots is read to does not matter, so it is
//! the one whose record was needed longest ago; an expert whose record is still in one is not read. What one token needs
//! of the disk the next ones are likelier to need than others are: of a trained model (`models/sotu-row`) 26% of
//! selections of the experts that are chosen least, 1% of all selections, are of ones that the eight tokens before have
//! chosen as well, where 14% would be by chance.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use super::mixed::{Coming, Copied};
use super::tiers::{Place, Stage, Tiers};
use crate::backend::kernels::device::Device;
use crate::backend::kernels::error::{KernelError, Result};
use crate::backend::kernels::ops::KernelBackend;
use crate::disk::reader::read_slot;
use crate::disk::reads::{Read, Reads, Way};

/// After so long without news of the disk other copies are thought of: much less than one takes.
const LULL: Duration = Duration::from_micros(40);

/// Who reads, and pinned slots, as many as the stage has, of a record and what direct reads add at both ends.
pub(super) struct Disk<H> {
    reads: Reads<H>,
    slots: Vec<Slot<H>>,
    /// Times that records were asked for.
    clock: u64,
}

/// A pinned slot.
struct Slot<H> {
    /// None while it is being read to.
    room: Option<H>,
    /// The layer's key and the expert of the record that it has, and where.
    has: Option<((u64, u32), Range<usize>)>,
    /// When it was used last.
    used: u64,
}

impl<H> Disk<H>
where
    H: std::ops::DerefMut<Target = [u8]> + Send + 'static,
{
    pub fn new(rooms: Vec<H>) -> Self {
        let slot = |room| Slot {
            room: Some(room),
            has: None,
            used: 0,
        };
        Self {
            reads: Reads::new(Way::Ring),
            slots: rooms.into_iter().map(slot).collect(),
            clock: 0,
        }
    }
}

impl<H> Disk<H> {
    /// The slot that has an expert's record, which is used now.
    fn find(&mut self, layer: u64, id: u32) -> Option<&Slot<H>> {
        let has = |s: &&mut Slot<H>| (s.has.as_ref()).is_some_and(|(key, _)| *key == (layer, id));
        let found = self.slots.iter_mut().find(has)?;
        found.used = self.clock;
        Some(found)
    }

    /// The slot that was used longest ago, for something else; it is used now.
    fn oldest(&mut self) -> (usize, &mut Slot<H>) {
        let oldest = (self.slots.iter_mut().enumerate()).min_by_key(|(_, s)| s.used);
        let (n, slot) = oldest.expect("a stage has slots");
        slot.used = self.clock;
        slot.has = None;
        (n, slot)
    }
}

impl<D: Device> KernelBackend<D> {
    /// Copies those of `copied` that are in the archive to the stage, each as soon as it is there; those that must be
    /// read are. Meanwhile `meanwhile` is called once, and `further`, while there is anything to read, at first and
    /// then for as long as it starts copies and the one before is done.
    pub(super) fn read_away(
        &self,
        tiers: &Tiers<D::Memory>,
        stage: &Stage<D::Memory>,
        copied: &Copied,
        meanwhile: &mut dyn FnMut() -> Result<()>,
        further: &mut dyn FnMut() -> Result<bool>,
    ) -> Result<()> {
        let mut disk = stage.disk.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(disk) = disk.as_mut() else {
            unreachable!("a layer with experts on disk has asked for it");
        };
        let memory = stage.memory.memory();
        let copy = |room: &_, bytes: Range<usize>, slot: usize| {
            self.copies(bytes.len());
            // SAFETY: as in `fetch`; what was used last is the last to be read to. So the pinned memory is written
            // again two turns on, for the next tokens or by a layer that reads later, which have then waited for
            // all that follows the join.
            unsafe { (self.device()).copy_beside(memory, slot * stage.slot, room, bytes) }
        };
        disk.clock += 1;
        let mut wanted = Vec::new();
        for Coming { id, slot, .. } in copied.missing() {
            let Some(Place::Disk(record)) = tiers.place(id) else {
                continue;
            };
            match disk.find(tiers.key, id) {
                Some(Slot {
                    room: Some(room),
                    has: Some((_, bytes)),
                    ..
                }) => {
                    copy(room, bytes.clone(), slot)?;
                    tiers.kept.fetch_add(1, Ordering::Relaxed);
                }
                _ => wanted.push((id, slot, record)),
            }
        }
        if wanted.is_empty() {
            return meanwhile();
        }
        let mut asked = Vec::with_capacity(wanted.len());
        // By the stage's slot that a record is for.
        let mut coming: Vec<(usize, usize, u32)> = Vec::with_capacity(wanted.len());
        for (id, slot, record) in wanted {
            let (n, pinned) = disk.oldest();
            asked.push(Read {
                number: slot,
                offset: record.file,
                len: record.bytes,
                room: match pinned.room.take() {
                    Some(room) => room,
                    // Lost with a thread that has panicked.
                    None => self.device().allocate_host(read_slot(stage.slot))?,
                },
            });
            coming.push((slot, n, id));
        }
        let mut missing: BTreeSet<usize> = asked.iter().map(|read| read.number).collect();
        let done = disk.reads.start(&tiers.file, asked);
        let begun = further();
        let mut far = *begun.as_ref().unwrap_or(&false);
        let mut result = begun.and_then(|_| meanwhile());
        far &= result.is_ok();
        loop {
            let read = match far {
                true => done.recv_timeout(LULL),
                false => done.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let read = match read {
                Ok(read) => read,
                Err(RecvTimeoutError::Disconnected) => break,
                // One copy at a time, so that what is read waits for one at most.
                Err(RecvTimeoutError::Timeout) => {
                    let next = self.device().copying().map_err(KernelError::from);
                    let next = next.and_then(|copying| Ok(copying || further()?));
                    far = *next.as_ref().unwrap_or(&false);
                    result = result.and(next.map(drop));
                    continue;
                }
            };
            let slot = read.number;
            missing.remove(&slot);
            let to = coming.iter().find(|(of, ..)| *of == slot);
            let (_, n, id) = *to.expect("what was asked for");
            let pinned = &mut disk.slots[n];
            let copied = match read.bytes {
                Err(source) => Err(KernelError::Read {
                    layer: tiers.number,
                    expert: id as usize,
                    source,
                }),
                Ok(bytes) => {
                    pinned.has = Some(((tiers.key, id), bytes.clone()));
                    copy(&read.room, bytes, slot).map_err(KernelError::from)
                }
            };
            pinned.room = Some(read.room);
            result = result.and(copied);
        }
        // Nothing else says that their reader is gone.
        let lost = missing.first().map(|slot| KernelError::Read {
            layer: tiers.number,
            expert: copied.expert(*slot),
            source: std::io::Error::other("the thread that reads has panicked"),
        });
        result.and(lost.map_or(Ok(()), Err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_needed_last_stays() {
        let mut disk = Disk::new(vec![vec![0u8]; 3]);
        let mut need = |id: u32| {
            disk.clock += 1;
            let there = disk.find(7, id).is_some();
            if !there {
                disk.oldest().1.has = Some(((7, id), 0..1));
            }
            there
        };
        let found: Vec<bool> = [1, 2, 3, 1, 4, 2, 1, 3].map(&mut need).into();
        //                      -  -  -  1  for 2, for 3, 1, for 4
        assert_eq!(
            found,
            [false, false, false, true, false, false, true, false]
        );
        assert!(disk.find(8, 1).is_none(), "another layer's");
    }
}
