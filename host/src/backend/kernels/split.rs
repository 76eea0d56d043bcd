//! What devices are at, by events in their streams wherever that changes.
//!
//! Events are between launches, so what is between them includes the gaps of launches, and a launch behind
//! an event does not overlap with the one before. Recorded launches have theirs as part of the recording.
//! The first device waits for others' rows under [`Part::Exchange`]. Behind that wait no event is recorded
//! on another device: a capture does not end with what its first stream never waits for. What goes on aside
//! while launches are recorded counts as what the stream does meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::Device;
use super::error::Result;
use super::ops::KernelBackend;
use super::table::KernelId;
use crate::backend::split::{PARTS, Part, Parts};

/// What a device was at, in order.
pub(super) struct Timeline<E> {
    /// What begins with each event.
    marks: Vec<(Part, Arc<E>)>,
    launches: u64,
    crossed: u64,
    copied: u64,
}

impl<E> Default for Timeline<E> {
    fn default() -> Self {
        Self {
            marks: Vec::new(),
            launches: 0,
            crossed: 0,
            copied: 0,
        }
    }
}

impl<E> Timeline<E> {
    fn extend(&mut self, other: &Self) {
        self.marks.extend(other.marks.iter().cloned());
        self.launches += other.launches;
        self.crossed += other.crossed;
        self.copied += other.copied;
    }
}

/// A backend's timeline, while one is kept.
pub(super) type Kept<E> = Mutex<Option<Timeline<E>>>;

/// Timelines of all devices of what was recorded.
pub(super) type Recorded<E> = Vec<Option<Timeline<E>>>;

/// What a kernel is part of; `None` where that is what goes on already.
fn part(kernel: KernelId) -> Option<Part> {
    let of = |prefixes: &[&str]| prefixes.iter().any(|p| kernel.name().starts_with(p));
    if of(&["group", "quantise", "act_", "matmul", "decode", "combine"]) {
        Some(Part::Experts)
    } else if of(&["absorb", "rope", "narrow", "attention", "index"]) {
        Some(Part::Attention)
    } else if of(&["embed", "linear", "silu", "add"]) {
        Some(Part::Dense)
    } else {
        // Norms are of both, and the router follows dense rows.
        None
    }
}

impl<D: Device> KernelBackend<D> {
    fn timeline(&self) -> MutexGuard<'_, Option<Timeline<D::Event>>> {
        self.kept().lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.peers())
    }

    /// Before a launch.
    pub(super) fn note(&self, kernel: KernelId) -> Result<()> {
        let begun = match &mut *self.timeline() {
            None => return Ok(()),
            Some(timeline) => {
                timeline.launches += 1;
                match timeline.marks.last() {
                    None => Some(part(kernel).unwrap_or(Part::Dense)),
                    Some((now, _)) => part(kernel).filter(|p| p != now),
                }
            }
        };
        begun.map_or(Ok(()), |part| self.mark(part))
    }

    /// What follows in the stream is `part`.
    pub(super) fn mark(&self, part: Part) -> Result<()> {
        if let Some(timeline) = &mut *self.timeline() {
            let event = Arc::new(self.device().event()?);
            timeline.marks.push((part, event));
        }
        Ok(())
    }

    /// Bytes go between this device and the first.
    pub(super) fn crosses(&self, bytes: usize) {
        if let Some(timeline) = &mut *self.timeline() {
            timeline.crossed += bytes as u64;
        }
    }

    /// Bytes of records are copied from the host.
    pub(super) fn copies(&self, bytes: usize) {
        if let Some(timeline) = &mut *self.timeline() {
            timeline.copied += bytes as u64;
        }
    }

    /// From here on timelines are kept, or are not.
    pub(super) fn keep_timelines(&self, keep: bool) {
        for backend in self.all() {
            *backend.timeline() = keep.then(Timeline::default);
        }
    }

    /// Recording begins: what was noted so far, to be given to [`KernelBackend::end_timelines`].
    pub(super) fn begin_timelines(&self) -> Recorded<D::Event> {
        let begin = |b: &Self| b.timeline().as_mut().map(std::mem::take);
        self.all().map(begin).collect()
    }

    /// Recording ends: what was noted meanwhile, for [`KernelBackend::again`].
    pub(super) fn end_timelines(&self, before: Recorded<D::Event>) -> Recorded<D::Event> {
        let end = |(b, before): (&Self, _)| std::mem::replace(&mut *b.timeline(), before);
        self.all().zip(before).map(end).collect()
    }

    /// What was recorded is done.
    pub(super) fn again(&self, recorded: &Recorded<D::Event>) {
        for (backend, recorded) in self.all().zip(recorded) {
            if let (Some(timeline), Some(recorded)) = (&mut *backend.timeline(), recorded) {
                timeline.extend(recorded);
            }
        }
    }

    /// What each device was at since this was last asked; waits for all of them.
    pub(super) fn parts(&self) -> Result<Vec<Parts>> {
        self.mark(Part::Idle)?;
        let each = |b: &Self| {
            let timeline = b.timeline().as_mut().map(std::mem::take);
            let timeline = timeline.unwrap_or_default();
            let mut seconds = [0.0; PARTS];
            for pair in timeline.marks.windows(2) {
                let [(part, from), (_, to)] = pair else {
                    continue;
                };
                seconds[*part as usize] += b.device().elapsed(from, to)?;
            }
            Ok(Parts {
                device: b.device().describe(),
                seconds,
                launches: timeline.launches,
                crossed: timeline.crossed,
                copied: timeline.copied,
            })
        };
        self.all().map(each).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_parts() {
        for (kernel, expected) in [
            (KernelId::GroupExperts, Some(Part::Experts)),
            (KernelId::MatmulRansTriple, Some(Part::Experts)),
            (KernelId::Combine, Some(Part::Experts)),
            (KernelId::ActQuantise, Some(Part::Experts)),
            (KernelId::QuantiseRows, Some(Part::Experts)),
            (KernelId::AbsorbQueryInt8, Some(Part::Attention)),
            (KernelId::AbsorbQueryF32, Some(Part::Attention)),
            (KernelId::Rope, Some(Part::Attention)),
            (KernelId::Narrow, Some(Part::Attention)),
            (KernelId::IndexSelect, Some(Part::Attention)),
            (KernelId::IndexSelectTiles, Some(Part::Attention)),
            (KernelId::LinearInt8Many, Some(Part::Dense)),
            (KernelId::LinearF32Quad, Some(Part::Dense)),
            (KernelId::EmbedF32, Some(Part::Dense)),
            (KernelId::LinearInt8Tile, Some(Part::Dense)),
            (KernelId::Embed, Some(Part::Dense)),
            (KernelId::Add, Some(Part::Dense)),
            (KernelId::RmsNorm, None),
            (KernelId::Route, None),
        ] {
            assert_eq!(part(kernel), expected, "{}", kernel.name());
        }
    }
}
