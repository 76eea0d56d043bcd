//! Experts that are copied to the stage before their layer has chosen.
//!
//! Where the host takes part in a layer, the hidden states that this layer's router is asked with are also what the
//! router of the next such layer is asked with: both layers add to the same residual stream, so that most of what it
//! says then is what it will say ([`Backend::experts_and_next`](crate::backend::Backend::experts_and_next)). Guessed
//! experts in pinned memory are copied behind the layer's own, beside its multiplications and all that the device does
//! up to the next choice. What was guessed wrongly lies in the stage unused. No result depends on it.
//!
//! 1. A copy ahead saves at most the time of a copy, and one in vain costs at most as much: where less than half are of
//!    use, the guessing ends.
//! 2. While the archive is read for a layer, which takes as long as many copies and keeps everything else waiting, the
//!    layers after the next are guessed as well, one after the other, and a copy is begun at a time, so that the
//!    record that is read does not wait for many of them. In vain they cost nothing.
//!
//! Limits: what is in pinned memory. Passes of a few tokens, all of whose experts the stage holds at once; of layers
//! after the next, passes of one token.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use super::tiers::{Place, Stage, Tiers};
use crate::backend::Further;
use crate::backend::kernels::device::{Device, DeviceMemory};
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;
use crate::placement::cost;

/// Guesses after which what became of them counts half.
const HALF_LIFE: f32 = 1024.0;

/// Guesses before anything is concluded.
const LEAST: f32 = 256.0;

/// An expert in the stage, or on its way there, of a layer to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// The layer's key and its number.
    key: u64,
    layer: u32,
    id: u32,
    slot: usize,
    /// Whether it was guessed one layer before, not only further ahead.
    near: bool,
}

/// What is in the stage for layers to come.
#[derive(Default)]
pub(super) struct Ahead {
    entries: Vec<Entry>,
    /// Guesses of the next layer so far, and those that were right, decaying.
    guessed: f32,
    right: f32,
    stopped: bool,
}

/// Guesses of the next layer, those of them that were right, and the same of those of layers after it.
pub(super) type Counts = [u64; 4];

impl Ahead {
    /// Whether guesses are of no use here.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Slots that are taken.
    pub fn slots(&self) -> Vec<usize> {
        self.entries.iter().map(|e| e.slot).collect()
    }

    /// Keeps no more than `most`, those of the nearest layers.
    fn keep(&mut self, most: usize) {
        self.entries.sort_by_key(|e| e.layer);
        self.entries.truncate(most);
    }

    /// Of the experts `away` that layer `layer` has chosen those that are in the stage, with their slots, and what
    /// came of guesses. What is there for this layer and those before is forgotten.
    fn take(&mut self, (key, layer): (u64, u32), away: &[u32]) -> (Vec<(u32, usize)>, Counts) {
        let mut counts = Counts::default();
        let mut there = Vec::new();
        for e in self.entries.iter().filter(|e| e.key == key) {
            let at = if e.near { 0 } else { 2 };
            counts[at] += 1;
            if away.contains(&e.id) {
                counts[at + 1] += 1;
                there.push((e.id, e.slot));
            }
        }
        self.entries.retain(|e| e.layer > layer);
        self.note(counts[0], counts[1]);
        (there, counts)
    }

    fn note(&mut self, guessed: u64, right: u64) {
        let kept = (-(guessed as f32) / HALF_LIFE).exp2();
        self.guessed = self.guessed * kept + guessed as f32;
        self.right = self.right * kept + right as f32;
        let (right, enough) = (self.right, cost::Ahead::LEAST as f32 * self.guessed);
        if !self.stopped && self.guessed >= LEAST && right < enough {
            self.stopped = true;
            tracing::info!(
                "experts are copied to the device only once they are chosen: of guesses {:.0}% were right",
                100.0 * self.right / self.guessed
            );
        }
    }
}

fn locked<M: DeviceMemory>(stage: &Stage<M>) -> MutexGuard<'_, Ahead> {
    stage.ahead.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An expert that a layer is likely to choose.
type Likely<'a, D> = (&'a Tiers<<D as Device>::Memory>, u32);

/// Guesses of layers after the next, and what is still to be copied of them.
pub(super) struct Far<'a, D: Device> {
    further: Option<&'a mut Further<'a, KernelBackend<D>>>,
    layers: usize,
    queue: VecDeque<Likely<'a, D>>,
}

impl<'a, D: Device> Far<'a, D> {
    pub fn new(further: Option<&'a mut Further<'a, KernelBackend<D>>>) -> Self {
        Self {
            further,
            layers: 0,
            queue: VecDeque::new(),
        }
    }

    /// The next expert that would be worth a copy.
    fn next(&mut self) -> Result<Option<Likely<'a, D>>> {
        loop {
            if let Some(next) = self.queue.pop_front() {
                return Ok(Some(next));
            }
            let Some(further) = &mut self.further else {
                return Ok(None);
            };
            let Some((experts, ids)) = further(self.layers)? else {
                self.further = None;
                return Ok(None);
            };
            self.layers += 1;
            if let Some(tiers) = &experts.tiers {
                self.queue.extend(ids.into_iter().map(|id| (tiers, id)));
            }
        }
    }
}

impl<D: Device> KernelBackend<D> {
    /// Starts copies of those of `guessed`, experts of the next layer, that are in pinned memory, to slots of the stage
    /// other than `busy`.
    pub(super) fn copy_ahead(
        &self,
        next: &Tiers<D::Memory>,
        mut guessed: Vec<u32>,
        busy: &[usize],
    ) -> Result<()> {
        let Some(stage) = next.stage.as_ref().filter(|_| next.guessable()) else {
            return Ok(());
        };
        guessed.sort_unstable();
        guessed.dedup();
        let mut ahead = locked(stage);
        for id in guessed {
            if !self.copy_one(next, stage, &mut ahead, (id, true), busy)? {
                break;
            }
        }
        Ok(())
    }

    /// Starts the copy of an expert that a layer after the next is likely to choose; false where there is none or no
    /// room for it. Beside `busy` slots, room is left for the next layer's guesses and for its other choices;
    /// the planner's model of time counts on as much ([`cost`]).
    pub(super) fn copy_far(
        &self,
        far: &mut Far<'_, D>,
        top_k: usize,
        busy: &[usize],
    ) -> Result<bool> {
        loop {
            let Some((tiers, id)) = far.next()? else {
                return Ok(false);
            };
            let Some(stage) = tiers.stage.as_ref().filter(|_| tiers.guessable()) else {
                continue;
            };
            let mut ahead = locked(stage);
            let taken = busy.len() + ahead.entries.len();
            if taken + 2 * top_k >= stage.slots {
                return Ok(false);
            }
            let before = ahead.entries.len();
            self.copy_one(tiers, stage, &mut ahead, (id, false), busy)?;
            if ahead.entries.len() > before {
                return Ok(true);
            }
        }
    }

    /// Starts the copy of an expert, if it is in pinned memory and not in the stage; false without room.
    fn copy_one(
        &self,
        tiers: &Tiers<D::Memory>,
        stage: &Stage<D::Memory>,
        ahead: &mut Ahead,
        (id, near): (u32, bool),
        busy: &[usize],
    ) -> Result<bool> {
        let mut there = ahead.entries.iter_mut();
        if let Some(there) = there.find(|e| (e.key, e.id) == (tiers.key, id)) {
            there.near |= near;
            return Ok(true);
        }
        let Some(Place::Host(at, record)) = tiers.place(id) else {
            return Ok(true);
        };
        let taken = ahead.slots();
        let free = |slot: &usize| !busy.contains(slot) && !taken.contains(slot);
        let Some(slot) = (0..stage.slots).find(free) else {
            return Ok(false);
        };
        let host = tiers.host.read().unwrap_or_else(PoisonError::into_inner);
        let bytes = at..at + record.bytes;
        self.copies(record.bytes);
        // SAFETY: what used this slot before was enqueued before the choice of the layer that is under way was
        // read back, so it is done; what uses it next is behind the join of the copies of the layer that it is for, or
        // copies to it in the same stream. The pinned memory waits for copies before it goes, and is written behind a
        // join and a `synchronize` alone.
        unsafe {
            (self.device()).copy_beside(stage.memory.memory(), slot * stage.slot, &host, bytes)?;
        }
        ahead.entries.push(Entry {
            key: tiers.key,
            layer: tiers.number,
            id,
            slot,
            near,
        });
        Ok(true)
    }
}

impl<M: DeviceMemory> Stage<M> {
    /// For others than layers in their turn, who use any slot.
    pub(super) fn forget_ahead(&self) {
        locked(self).keep(0);
    }
}

impl<M: DeviceMemory> Tiers<M> {
    /// Whether a guess of what will be chosen here is of use.
    pub fn guessable(&self) -> bool {
        self.pinned && self.stage.as_ref().is_some_and(|s| !locked(s).stopped())
    }

    /// Of the experts `away` that are to come to the stage those that are there already, with their slots, and slots
    /// that are taken for later layers; none where experts take turns in the stage.
    pub(super) fn there(&self, away: Option<&[u32]>) -> (Vec<(u32, usize)>, Vec<usize>) {
        let Some(stage) = &self.stage else {
            return Default::default();
        };
        let mut ahead = locked(stage);
        let (there, counts) = ahead.take((self.key, self.number), away.unwrap_or(&[]));
        ahead.keep(away.map_or(0, |away| stage.slots.saturating_sub(away.len())));
        for (sum, n) in self.ahead.iter().zip(counts) {
            sum.fetch_add(n, Ordering::Relaxed);
        }
        (there, ahead.slots())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(entries: &[(u32, u32, usize, bool)]) -> Ahead {
        let entry = |&(layer, id, slot, near): &_| Entry {
            key: u64::from(layer) + 100,
            layer,
            id,
            slot,
            near,
        };
        Ahead {
            entries: entries.iter().map(entry).collect(),
            ..Ahead::default()
        }
    }

    #[test]
    fn what_is_there_is_the_layer_s_own() {
        let mut a = ahead(&[
            (9, 7, 0, false),
            (5, 3, 8, true),
            (5, 7, 9, true),
            (5, 200, 10, false),
            (4, 7, 11, true),
        ]);
        let (there, counts) = a.take((105, 5), &[1, 7, 200]);
        assert_eq!(there, [(7, 9), (200, 10)]);
        assert_eq!(counts, [2, 1, 1, 1]);
        assert_eq!(a.slots(), [0], "a later layer's stays");
        assert_eq!(a.take((105, 5), &[1, 7, 200]).0, [], "once");
        assert_eq!(a.take((109, 9), &[7]).0, [(7, 0)]);
        let mut a = ahead(&[(5, 3, 8, true)]);
        assert_eq!(a.take((106, 6), &[3]), (vec![], [0; 4]), "another layer's");
        assert_eq!(a.take((105, 5), &[3]).0, [], "forgotten by then");
    }

    #[test]
    fn the_nearest_stay() {
        let mut a = ahead(&[(9, 1, 0, false), (6, 1, 1, true), (7, 1, 2, false)]);
        a.keep(2);
        assert_eq!(a.slots(), [1, 2]);
        a.keep(0);
        assert!(a.slots().is_empty());
    }

    #[test]
    fn guesses_that_cost_more_than_they_save_end() {
        let run = |of_ten: u64| {
            let mut a = Ahead::default();
            for _ in 0..1000 {
                a.note(10, of_ten);
            }
            a.stopped()
        };
        assert!(run(0) && run(4));
        assert!(!run(5) && !run(10));
        // A few wrong ones say nothing.
        let mut a = Ahead::default();
        a.note(100, 0);
        assert!(!a.stopped());
        (0..200).for_each(|_| a.note(10, 9));
        assert!(!a.stopped());
    }
}
