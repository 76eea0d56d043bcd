//! Passes of a token, or of a few, as recorded operators: one launch where nothing of their experts needs
//! the host.
//!
//! What a pass of so many tokens does is the same at every position but for the position itself, so a back
//! end that can records it once ([`Backend::record`]) and does it again for the tokens that follow. Where the
//! host has a part in a layer's experts, the recordings end before these and go on behind them.

use std::ops::Range;

use super::mtp::Mtp;
use super::session::Session;
use super::weights::{Layer, Mlp, Model};
use crate::backend::{Backend, LoadExperts};

/// Positions that the shortest recordings are for.
const LEAST: usize = 256;

/// Tokens of the longest pass that is recorded: longer ones are seldom, and take longer than their launches.
pub(super) const MOST: usize = 4;

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// So many tokens of the sequence, and the logits behind each.
    Tokens(usize),
    /// The layer that drafts, of so many hidden states in its input and the tokens after them, and the logits
    /// of the last one.
    Draft(usize),
}

impl Pass {
    fn tokens(self) -> usize {
        match self {
            Self::Tokens(n) | Self::Draft(n) => n,
        }
    }
}

/// The recordings of one pass in a session.
pub(super) struct Steps<B: Backend> {
    pub pass: Pass,
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
    /// How many there are.
    pub fn len(&self) -> usize {
        self.recordings.len()
    }
}

impl<B: LoadExperts> Model<B> {
    /// Does `pass` of the tokens `ids` at position `at` on; false, and nothing done, where that cannot be
    /// recorded.
    pub(super) fn step(
        &self,
        session: &mut Session<B>,
        pass: Pass,
        ids: &[u32],
        at: usize,
    ) -> Result<bool, B::Error> {
        // What one token of the sequence chooses is kept; of other passes it is read layer by layer.
        let (keeps, single) = (self.keeps(), pass == Pass::Tokens(1));
        if ids.len() > MOST || !single && keeps.contains(&true) {
            return Ok(false);
        }
        let found = session.steps.iter().position(|s| s.pass == pass);
        let found = found.map(|i| session.steps.swap_remove(i));
        let usable = |s: &Steps<B>| s.model == self.id && s.span.contains(&at) && s.keeps == keeps;
        let steps = match found.filter(usable) {
            Some(steps) => steps,
            None => {
                session.scratch.keep = single;
                let steps = self.record(session, pass, at);
                session.scratch.keep = false;
                match steps? {
                    Some(steps) => steps,
                    None => return Ok(false),
                }
            }
        };
        let done = self.run(&steps, session, ids, at);
        session.steps.push(steps);
        done.map(|()| true)
    }

    /// What is noted of choices: usage, a trace.
    fn keeps(&self) -> [bool; 2] {
        [self.usage.borrow().is_some(), self.trace.borrow().is_some()]
    }

    fn run(
        &self,
        steps: &Steps<B>,
        session: &mut Session<B>,
        ids: &[u32],
        at: usize,
    ) -> Result<(), B::Error> {
        self.backend.write(&mut session.scratch.ids, 0, ids)?;
        for (i, recording) in steps.recordings.iter().enumerate() {
            // SAFETY: the position is in the span. The recorded operators use the session's scratch and
            // caches, which live as long as its steps, and the weights of the model that `usable` has found
            // to be this one.
            unsafe { self.backend.repeat(recording, at)? };
            if let Some((l, layer)) = steps
                .between
                .get(i)
                .and_then(|l| Some((*l, self.layer_at(*l)?)))
            {
                self.experts(l, layer, &mut session.scratch, at, ids.len())?;
            }
        }
        for l in self.layers_of(steps.pass) {
            if let Some(Mlp::Sparse(moe)) = self.layer_at(l).map(|layer| &layer.mlp)
                && !steps.between.contains(&l)
            {
                let top_k = self.config.router.top_k;
                self.backend.chosen_again(&moe.experts, ids.len() * top_k);
            }
        }
        match steps.pass {
            Pass::Tokens(1) => self.count_kept(&session.scratch, at, &steps.between),
            _ => Ok(()),
        }
    }

    /// Layer `l`; the one that drafts comes after the others.
    fn layer_at(&self, l: usize) -> Option<&Layer<B>> {
        let mtp = || self.mtp.as_ref().map(Mtp::layer);
        self.layers.get(l).or_else(mtp)
    }

    /// Layers of a pass.
    fn layers_of(&self, pass: Pass) -> Range<usize> {
        let all = self.layers.len();
        match pass {
            Pass::Tokens(_) => 0..all,
            Pass::Draft(_) => all..all + 1,
        }
    }

    fn record(
        &self,
        session: &mut Session<B>,
        pass: Pass,
        first: usize,
    ) -> Result<Option<Steps<B>>, B::Error> {
        let top_k = self.config.index.top_k;
        let end = reach(first, pass.tokens(), session.capacity, top_k);
        let needs_host = |l: &usize| match self.layer_at(*l).map(|layer| &layer.mlp) {
            Some(Mlp::Sparse(moe)) => !self.backend.recordable(&moe.experts),
            _ => false,
        };
        let between: Vec<usize> = self.layers_of(pass).filter(needs_host).collect();
        let mut recordings = Vec::with_capacity(between.len() + 1);
        let mut from = None;
        for to in between.iter().copied().map(Some).chain([None]) {
            let mut part = || self.part(session, pass, from, to, first);
            match self.backend.record(first, end, &mut part)? {
                Some(recording) => recordings.push(recording),
                None => return Ok(None),
            }
            from = to;
        }
        Ok(Some(Steps {
            pass,
            model: self.id,
            keeps: self.keeps(),
            span: first..end,
            between,
            recordings,
        }))
    }

    /// What comes behind the experts of layer `from`, or from the start, up to the experts of layer `to`,
    /// or to the end.
    fn part(
        &self,
        session: &mut Session<B>,
        pass: Pass,
        from: Option<usize>,
        to: Option<usize>,
        first: usize,
    ) -> Result<(), B::Error> {
        let (n, layers) = (pass.tokens(), self.layers_of(pass));
        match (from.and_then(|l| self.layer_at(l)), pass) {
            (Some(layer), _) => self.after_experts(layer, &mut session.scratch, n)?,
            (None, Pass::Tokens(_)) => self.embed(&mut session.scratch, n)?,
            (None, Pass::Draft(_)) => self.begin_draft(session, n)?,
        }
        for l in from.map_or(layers.start, |l| l + 1)..to.map_or(layers.end, |l| l + 1) {
            let cache = match (&mut session.mtp, pass) {
                (Some(state), Pass::Draft(_)) => state.cache(),
                _ => &mut session.caches[l],
            };
            let (Some(layer), s) = (self.layer_at(l), &mut session.scratch) else {
                continue;
            };
            if to == Some(l) {
                self.before_experts(l, layer, cache, s, first, n)?;
            } else {
                self.layer(l, layer, cache, s, first, n)?;
            }
        }
        match (to, pass) {
            (Some(_), _) => Ok(()),
            (None, Pass::Tokens(_)) => {
                self.head(&mut session.scratch, n, n)?;
                self.keep_hidden(session, n)
            }
            (None, Pass::Draft(_)) => self.end_draft(session, n),
        }
    }
}

/// Past the last position that recordings of `tokens` tokens from `first` on are for: launches of a pass
/// have room for all of these, so not too many; and either all or none of the passes list positions, as
/// those do whose last token sees more than `top_k`.
fn reach(first: usize, tokens: usize, capacity: usize, top_k: usize) -> usize {
    let end = (first + 1).next_power_of_two().max(LEAST);
    let end = match top_k.checked_sub(first + tokens) {
        Some(left) => end.min(first + left.saturating_add(1)),
        None => end,
    };
    let room = capacity.saturating_sub(tokens - 1);
    end.min(room).max(first + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_reach_as_far_as_their_launches() {
        assert_eq!(reach(0, 1, 4096, 2048), 256);
        assert_eq!(reach(255, 1, 4096, 2048), 256);
        assert_eq!(reach(256, 1, 4096, 2048), 512);
        assert_eq!(reach(1500, 1, 1700, 2048), 1700);
        // Position 2,047 sees 2,048 positions: all that are listed; the next one must choose.
        assert_eq!(reach(2047, 1, 8192, 2048), 2048);
        assert_eq!(reach(2048, 1, 8192, 2048), 4096);
        assert_eq!(reach(10, 1, 64, 7), 64);
        assert_eq!(reach(6, 1, 64, 7), 7);
        assert_eq!(reach(5, 1, 6, 2048), 6);
        assert_eq!(reach(5, 1, 4096, usize::MAX), 256);
    }

    #[test]
    fn recordings_of_several_tokens_end_earlier() {
        // Three tokens from 2,045 on see 2,048 positions at most; from 2,046 on the last one chooses.
        assert_eq!(reach(1500, 3, 8192, 2048), 2046);
        assert_eq!(reach(2045, 3, 8192, 2048), 2046);
        assert_eq!(reach(2046, 3, 8192, 2048), 2048);
        assert_eq!(reach(2048, 3, 8192, 2048), 4096);
        // The last that there is room for.
        assert_eq!(reach(0, 3, 10, 2048), 8);
        assert_eq!(reach(7, 3, 10, 2048), 8);
    }
}
