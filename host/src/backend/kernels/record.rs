//! Operators that are recorded once and done again.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::buffer::word;
use super::device::{Device, DeviceError};
use super::error::{KernelError, Result};
use super::ops::{KernelBackend, Span};
use super::split;
use crate::backend::split::Part;

/// Recorded operators.
pub struct Recorded<D: Device> {
    // Dropped before the events that it has in it.
    recording: D::Recording,
    timelines: split::Recorded<D::Event>,
}

impl<D: Device> KernelBackend<D> {
    /// [`crate::backend::Backend::record`].
    pub(super) fn record_pass(
        &self,
        first: usize,
        end: usize,
        pass: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Recorded<D>>> {
        if self.refused().load(Ordering::Relaxed) || end <= first {
            return Ok(None);
        }
        let devices: Vec<&D> = std::iter::once(self.device())
            .chain(self.peers().iter().map(Self::device))
            .collect();
        let refuse = |e: DeviceError| {
            self.refused().store(true, Ordering::Relaxed);
            tracing::warn!("launches cannot be recorded, so each is made by itself: {e}");
        };
        match D::begin_recording(&devices) {
            Ok(true) => (),
            Ok(false) => return Ok(None),
            Err(e) => {
                refuse(e);
                return Ok(None);
            }
        }
        let span = |span| {
            let mut now = self.spans().lock().unwrap_or_else(PoisonError::into_inner);
            *now = span;
        };
        let before = self.begin_timelines();
        span(Some(Span { first, end }));
        // What is behind a recording is the host's.
        let done = pass().and_then(|()| self.mark(Part::Idle));
        span(None);
        let timelines = self.end_timelines(before);
        let recording = D::end_recording(&devices);
        match done {
            Ok(()) => Ok(recording.map_err(refuse).ok().map(|recording| Recorded {
                recording,
                timelines,
            })),
            // Launches by themselves need less.
            Err(KernelError::Device(e)) if e.is_out_of_memory() => {
                refuse(e);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// [`crate::backend::Backend::repeat`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn repeat_pass(&self, recorded: &Recorded<D>, position: usize) -> Result<()> {
        let position = word("position", position)?;
        self.device().set_word(self.position(), 0, position)?;
        // SAFETY: passed on to the caller; what was given back while recording is the recording's.
        unsafe { self.device().replay(&recorded.recording) }?;
        self.again(&recorded.timelines);
        Ok(())
    }
}
