//! A token as recorded operators: one launch where nothing of its experts needs the host.
//!
//! What a pass of one token does is the same at every position but for the position itself, so a back end
//! that can records it once ([`Backend::record`]) and does it again for the tokens that follow. Where the
//! host has a part in a layer's experts, the recordings end before these and go on behind them.

use std::ops::Range;

use super::forward::Session;
use super::weights::{Mlp, Model};
use crate::backend::{Backend, LoadExperts};

/// Positions that the shortest recordings are for.
const LEAST: usize = 256;

/// The recordings of a session's tokens.
pub(super) struct Steps<B: Backend> {
    /// [`Model::id`] of the model whose weights they use.
    model: u64,
    /// Positions that they are for.
    span: Range<usize>,
    /// Whether they keep what is chosen, for usage and for a trace.
    keeps: [bool; 2],
    /// Layers whose experts are not recorded.
    between: Vec<usize>,
    /// One up to the first of these layers' experts, one from there to the next, … and the last to the
    /// logits.
    recordings: Vec<B::Recording>,
}

impl<B: Backend> Steps<B> {
    /// Recordings of a token.
    pub fn len(&self) -> usize {
        self.recordings.len()
    }
}

impl<B: LoadExperts> Model<B> {
    /// Appends token `id` and computes its logits; false, and nothing done, where that cannot be recorded.
    pub(super) fn step(&self, session: &mut Session<B>, id: u32) -> Result<bool, B::Error> {
        let at = session.position;
        let keeps = self.keeps();
        let usable = |s: &Steps<B>| s.model == self.id && s.span.contains(&at) && s.keeps == keeps;
        if !session.steps.as_ref().is_some_and(usable) {
            session.steps = None;
            session.scratch.keep = true;
            let steps = self.record(session);
            session.scratch.keep = false;
            session.steps = steps?;
        }
        let Some(steps) = session.steps.take() else {
            return Ok(false);
        };
        let done = self.run(&steps, session, id);
        session.steps = Some(steps);
        done.map(|()| true)
    }

    /// What is noted of choices: usage, a trace.
    fn keeps(&self) -> [bool; 2] {
        [self.usage.borrow().is_some(), self.trace.borrow().is_some()]
    }

    fn run(&self, steps: &Steps<B>, session: &mut Session<B>, id: u32) -> Result<(), B::Error> {
        let at = session.position;
        self.backend.write(&mut session.scratch.ids, 0, &[id])?;
        for (i, recording) in steps.recordings.iter().enumerate() {
            // SAFETY: the position is in the span. The recorded operators use the session's scratch and
            // caches, which live as long as its steps, and the weights of the model that `usable` has found
            // to be this one.
            unsafe { self.backend.repeat(recording, at)? };
            if let Some(l) = steps.between.get(i) {
                self.experts(*l, &self.layers[*l], &mut session.scratch, at, 1)?;
            }
        }
        for (l, layer) in self.layers.iter().enumerate() {
            if let Mlp::Sparse(moe) = &layer.mlp
                && !steps.between.contains(&l)
            {
                let top_k = self.config.router.top_k;
                self.backend.chosen_again(&moe.experts, top_k);
            }
        }
        self.count_kept(&session.scratch, at, &steps.between)
    }

    fn record(&self, session: &mut Session<B>) -> Result<Option<Steps<B>>, B::Error> {
        let first = session.position;
        let end = reach(first, session.capacity, self.config.index.top_k);
        let needs_host = |l: &usize| match &self.layers[*l].mlp {
            Mlp::Dense(_) => false,
            Mlp::Sparse(moe) => !self.backend.recordable(&moe.experts),
        };
        let between: Vec<usize> = (0..self.layers.len()).filter(needs_host).collect();
        let mut recordings = Vec::with_capacity(between.len() + 1);
        let mut from = None;
        for to in between.iter().copied().map(Some).chain([None]) {
            let mut part = || self.part(session, from, to, first);
            match self.backend.record(first, end, &mut part)? {
                Some(recording) => recordings.push(recording),
                None => return Ok(None),
            }
            from = to;
        }
        Ok(Some(Steps {
            model: self.id,
            keeps: self.keeps(),
            span: first..end,
            between,
            recordings,
        }))
    }

    /// What comes behind the experts of layer `from`, or from the start, up to the experts of layer `to`,
    /// or to the logits.
    fn part(
        &self,
        session: &mut Session<B>,
        from: Option<usize>,
        to: Option<usize>,
        first: usize,
    ) -> Result<(), B::Error> {
        let s = &mut session.scratch;
        match from {
            None => self.embed(s, 1)?,
            Some(l) => self.after_experts(&self.layers[l], s, 1)?,
        }
        for l in from.map_or(0, |l| l + 1)..to.unwrap_or(self.layers.len()) {
            let cache = &mut session.caches[l];
            self.layer(l, &self.layers[l], cache, s, first, 1)?;
        }
        match to {
            Some(l) => {
                let cache = &mut session.caches[l];
                self.before_experts(l, &self.layers[l], cache, s, first, 1)
            }
            None => self.head(s, 1, 1),
        }
    }
}

/// Past the last position that recordings from `first` on are for: launches of a pass have room for all
/// of these, so not too many; and either all or none of them see more than `top_k` positions.
fn reach(first: usize, capacity: usize, top_k: usize) -> usize {
    let end = (first + 1).next_power_of_two().max(LEAST);
    let end = if first < top_k { end.min(top_k) } else { end };
    end.min(capacity).max(first + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_reach_as_far_as_their_launches() {
        assert_eq!(reach(0, 4096, 2048), 256);
        assert_eq!(reach(255, 4096, 2048), 256);
        assert_eq!(reach(256, 4096, 2048), 512);
        assert_eq!(reach(1500, 1700, 2048), 1700);
        // Position 2,047 sees 2,048 positions: all that are listed; the next one must choose.
        assert_eq!(reach(2047, 8192, 2048), 2048);
        assert_eq!(reach(2048, 8192, 2048), 4096);
        assert_eq!(reach(10, 64, 7), 64);
        assert_eq!(reach(6, 64, 7), 7);
        assert_eq!(reach(5, 6, 2048), 6);
    }
}
