//! A layer whose experts are on several devices.
//!
//! Each device has the assignments of all tokens, takes those of its own experts and computes what these
//! make of them; others' experts have no slots there. The first device adds up: its own slots, and the
//! rows that the others bring, one for each assignment. The order of the sum is that of the experts'
//! numbers wherever they are, so the bits are the same.
//!
//! A device that may use the first one's memory reads the input and writes its rows there; else both are
//! copied.

use cuda_std::mem::Slice;

use super::{Experts, Sum};
use crate::backend::Rows;
use crate::backend::kernels::buffer::{Buffer, View, word};
use crate::backend::kernels::device::{Device, DeviceMemory};
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::split::Part;

/// Tokens and what was chosen for them, on the first device.
pub(super) struct Chosen<'a, M> {
    /// Rows of the input.
    pub x: Rows<'a, Buffer<f32, M>>,
    /// The same, as kernels take it.
    pub view: View,
    /// `[_, top_k]`.
    pub ids: &'a Buffer<u32, M>,
    /// The same from the first token on.
    pub id_slice: Slice,
    /// First token.
    pub start: usize,
    pub tokens: usize,
    pub top_k: usize,
}

impl<M> Chosen<'_, M> {
    fn slots(&self) -> usize {
        self.tokens * self.top_k
    }
}

/// What other devices are doing.
pub(super) struct Abroad<M: DeviceMemory> {
    /// f32 `[rows before, hidden]`, then for each of the others `[tokens * top_k, hidden]`.
    given: Buffer<f32, M>,
    /// Rows that are still to be copied: the device's number, and where to.
    rows: Vec<(usize, Buffer<f32, M>, usize)>,
    /// What they read.
    _inputs: Vec<(Buffer<f32, M>, Buffer<u32, M>)>,
}

impl<M: DeviceMemory> Abroad<M> {
    /// Rows that slots past the first device's own are.
    pub fn given(&self) -> Slice {
        self.given.slice()
    }

    /// The memory of these.
    pub fn memory(&self) -> &M {
        self.given.memory()
    }
}

impl<D: Device> KernelBackend<D> {
    /// Starts what other devices have to do, their rows behind `before` others. To be ended by
    /// [`KernelBackend::join_peers`], or, after a failure, by [`KernelBackend::settle`].
    pub(super) fn start_peers(
        &self,
        experts: &Experts<D::Memory>,
        chosen: &Chosen<'_, D::Memory>,
        before: usize,
    ) -> Result<Abroad<D::Memory>> {
        let (hidden, slots) = (experts.shape.hidden, chosen.slots());
        let mut abroad = Abroad {
            given: self.scratch((before + experts.peers.len() * slots) * hidden)?,
            rows: Vec::new(),
            _inputs: Vec::new(),
        };
        for (p, (peer, part)) in self.peers().iter().zip(&experts.peers).enumerate() {
            let Some(part) = part else { continue };
            let device = peer.device();
            device.wait_for(self.device())?;
            let at = (before + p * slots) * hidden;
            let stride = word("hidden size", hidden)?;
            if device.reaches(self.device()) {
                let given = &abroad.given;
                let out = View {
                    slice: given.memory().slice::<f32>(at, given.len() - at),
                    stride,
                };
                // The input and what was chosen there, rows back.
                peer.crosses(4 * (chosen.tokens * hidden + slots + slots * hidden));
                peer.bring(part, chosen.view, chosen.id_slice, chosen, out)?;
                continue;
            }
            let x_words = (chosen.tokens - 1) * chosen.x.stride + hidden;
            let (x, ids) = (peer.scratch::<f32>(x_words)?, peer.scratch::<u32>(slots)?);
            let from_x = chosen.x.offset + chosen.start * chosen.x.stride;
            let from_ids = chosen.start * chosen.top_k;
            peer.mark(Part::Exchange)?;
            peer.crosses(4 * (x_words + slots + slots * hidden));
            // SAFETY: memory of the first device, which writes to neither before `join_peers`.
            unsafe {
                let from = (chosen.x.buf.memory(), 4 * from_x);
                device.copy_from(self.device(), from, (x.memory(), 0), 4 * x_words)?;
                let from = (chosen.ids.memory(), 4 * from_ids);
                device.copy_from(self.device(), from, (ids.memory(), 0), 4 * slots)?;
            }
            let rows = peer.scratch::<f32>(slots * hidden)?;
            let view = View {
                slice: x.slice(),
                stride: chosen.view.stride,
            };
            let out = View {
                slice: rows.slice(),
                stride,
            };
            peer.bring(part, view, ids.slice(), chosen, out)?;
            abroad.rows.push((p, rows, at));
            abroad._inputs.push((x, ids));
        }
        Ok(abroad)
    }

    /// What this device's experts make of their tokens: a row for each assignment, zeros for others'.
    fn bring(
        &self,
        experts: &Experts<D::Memory>,
        x: View,
        ids: Slice,
        chosen: &Chosen<'_, D::Memory>,
        out: View,
    ) -> Result<()> {
        let own = self.own(experts, None, x, ids, chosen.tokens, chosen.top_k)?;
        // An assignment is a token of one expert, of weight 1.
        let sum = Sum {
            weights: Slice::EMPTY,
            given: Slice::EMPTY,
            out,
            tokens: chosen.slots(),
            top_k: 1,
        };
        self.combine(experts, &own.grouped.groups, &own.h, &own.outer, None, sum)
    }

    /// What follows on the first device has the others' rows.
    pub(super) fn join_peers(
        &self,
        experts: &Experts<D::Memory>,
        abroad: &Abroad<D::Memory>,
    ) -> Result<()> {
        self.mark(Part::Exchange)?;
        for (peer, part) in self.peers().iter().zip(&experts.peers) {
            if part.is_some() {
                peer.mark(Part::Idle)?;
                self.device().wait_for(peer.device())?;
            }
        }
        for (p, rows, at) in &abroad.rows {
            let (from, to) = ((rows.memory(), 0), (abroad.given.memory(), 4 * at));
            // SAFETY: the peer's memory, which it writes again behind a wait for this device.
            unsafe {
                (self.device()).copy_from(self.peers()[*p].device(), from, to, 4 * rows.len())?;
            }
        }
        Ok(())
    }

    /// After a failure: what all devices were given ends, copies beside their streams too, before memory of
    /// it is given back.
    pub fn settle_all(&self) {
        for backend in std::iter::once(self).chain(self.peers()) {
            // The failure that is known is the one to tell of.
            let _ = backend.device().join();
            let _ = backend.device().synchronize();
        }
    }

    /// After a failure: what the others were given ends before any memory of it is given back.
    pub(super) fn settle<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            for peer in self.peers() {
                // The failure that is known is the one to tell of.
                let _ = peer.device().synchronize();
            }
        }
        result
    }
}
