//! Which experts a token goes to, and what is noted of that.

use super::session::{Guess, Scratch};
use super::step::MOST;
use super::weights::{Mlp, Model, Moe, Replay};
use crate::backend::{Likely, LoadExperts, TraceLayer, rows, rows_mut};

impl<B: LoadExperts> Model<B> {
    /// Notes which experts of layer `l` were chosen, where that is wanted.
    pub(super) fn count(
        &self,
        l: usize,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (mut usage, mut trace) = (self.usage.borrow_mut(), self.trace.borrow_mut());
        if usage.is_none() && trace.is_none() {
            return Ok(());
        }
        if s.keep {
            let top_k = self.config.router.top_k;
            let (b, at) = (&self.backend, self.sparse_index(l) * top_k);
            b.copy(&s.expert_ids, 0, &mut s.kept_ids, at, top_k)?;
            if trace.is_some() {
                b.copy(&s.expert_weights, 0, &mut s.kept_weights, at, top_k)?;
            }
            return Ok(());
        }
        let mut ids = vec![0; tokens * self.config.router.top_k];
        self.backend.read(&s.expert_ids, 0, &mut ids)?;
        if let Some(usage) = usage.as_mut() {
            for id in &ids {
                usage.add(l as u32, *id, 1.0);
            }
        }
        // What drafts has no part in a trace.
        if let Some(trace) = trace.as_mut()
            && l < self.layers.len()
        {
            let mut weights = vec![0.0; ids.len()];
            self.backend.read(&s.expert_weights, 0, &mut weights)?;
            trace.put(self.sparse_index(l), first, &ids, &weights);
        }
        Ok(())
    }

    /// Notes what a recorded token at position `at` has chosen, but in the layers `except`.
    pub(super) fn count_kept(
        &self,
        s: &Scratch<B>,
        at: usize,
        except: &[usize],
    ) -> Result<(), B::Error> {
        let (mut usage, mut trace) = (self.usage.borrow_mut(), self.trace.borrow_mut());
        if usage.is_none() && trace.is_none() {
            return Ok(());
        }
        let (c, top_k) = (&self.config, self.config.router.top_k);
        let mut ids = vec![0; c.sparse_layers().count() * top_k];
        let mut weights = vec![0.0; ids.len()];
        self.backend.read(&s.kept_ids, 0, &mut ids)?;
        if trace.is_some() {
            self.backend.read(&s.kept_weights, 0, &mut weights)?;
        }
        let each = ids.chunks(top_k).zip(weights.chunks(top_k));
        for ((i, l), (ids, weights)) in c.sparse_layers().enumerate().zip(each) {
            // The layer that drafts is no part of such a token.
            if except.contains(&l) || l >= self.layers.len() {
                continue;
            }
            if let Some(usage) = usage.as_mut() {
                ids.iter().for_each(|id| usage.add(l as u32, *id, 1.0));
            }
            if let Some(trace) = trace.as_mut() {
                trace.put(i, at, ids, weights);
            }
        }
        Ok(())
    }

    /// Layers with routed experts before layer `l`.
    fn sparse_index(&self, l: usize) -> usize {
        self.config.sparse_layers().take_while(|s| *s < l).count()
    }

    /// The experts of the normed hidden states, and their weights: the router's, or a trace's.
    pub(super) fn route(
        &self,
        l: usize,
        moe: &Moe<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c) = (&self.backend, &self.config);
        let router = &c.router;
        self.linear(
            rows(&s.normed, c.hidden),
            &moe.router,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut s.router_logits, router.experts),
        )?;
        let (ids, weights) = (&mut s.expert_ids, &mut s.expert_weights);
        match self.replay.as_ref().filter(|_| l < self.layers.len()) {
            None => b.route(
                rows(&s.router_logits, router.experts),
                &moe.bias,
                router,
                tokens,
                ids,
                weights,
            ),
            Some(replay) => {
                let trace = self.traced(replay, &replay.chosen, l);
                b.replay(trace, router.top_k, first, tokens, ids, weights)
            }
        }
    }

    /// What a trace has of layer `l`, with the experts `chosen`.
    fn traced<'a>(
        &self,
        replay: &'a Replay<B>,
        chosen: &'a B::Buf<u32>,
        l: usize,
    ) -> TraceLayer<'a, B> {
        TraceLayer {
            chosen,
            given: &replay.given,
            rows: replay.tokens,
            layers: self.sparse_index(self.layers.len()),
            layer: self.sparse_index(l),
        }
    }

    /// Layer `l`'s router and experts, if it has any.
    pub(super) fn moe(&self, l: usize) -> Option<&Moe<B>> {
        match &self.layers.get(l)?.mlp {
            Mlp::Sparse(moe) => Some(moe),
            Mlp::Dense(_) => None,
        }
    }

    /// The layer whose choice is guessed where layer `l`'s is made: the next one that needs the host, if layer `l`
    /// does and a guess is of use there. Passes of a few tokens alone.
    pub(super) fn guessed(&self, l: usize, tokens: usize) -> Option<usize> {
        let needs_host = |l: &usize| {
            let moe = self.moe(*l);
            moe.is_some_and(|moe| !self.backend.recordable(&moe.experts))
        };
        if tokens > MOST || !needs_host(&l) {
            return None;
        }
        let next = (l + 1..self.layers.len()).find(needs_host)?;
        self.guessable(next).then_some(next)
    }

    /// Whether a guess of what layer `l` chooses is of use.
    fn guessable(&self, l: usize) -> bool {
        let moe = self.moe(l);
        moe.is_some_and(|moe| moe.low.is_none() && self.backend.guessable(&moe.experts))
    }

    /// Experts of the `i`-th layer after layer `next` whose choice it is of use to guess, and which a token at
    /// position `at` is likely to go to, being in the hidden state `x`.
    pub(super) fn guess_further(
        &self,
        next: usize,
        i: usize,
        x: &B::Buf<f32>,
        guess: &mut Guess<B>,
        at: usize,
    ) -> Result<Option<Likely<'_, B>>, B::Error> {
        let later = next + 1..self.layers.len();
        let layer = later.filter(|l| self.guessable(*l)).nth(i);
        let Some((layer, moe)) = layer.and_then(|l| Some((l, self.moe(l)?))) else {
            return Ok(None);
        };
        self.guess(layer, x, guess, at, 1)?;
        let mut ids = vec![0; self.config.router.top_k];
        self.backend.read(&guess.ids, 0, &mut ids)?;
        Ok(Some((&moe.experts, ids)))
    }

    /// What layer `next` would choose if the hidden states `x` stayed as they are.
    pub(super) fn guess(
        &self,
        next: usize,
        x: &B::Buf<f32>,
        guess: &mut Guess<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c) = (&self.backend, &self.config);
        let (Some(moe), Some(layer)) = (self.moe(next), self.layers.get(next)) else {
            return Ok(());
        };
        let router = &c.router;
        let (ids, weights) = (&mut guess.ids, &mut guess.weights);
        if let Some(replay) = &self.replay {
            let trace = self.traced(replay, &replay.guessed, next);
            return b.replay(trace, router.top_k, first, tokens, ids, weights);
        }
        b.rms_norm(
            rows(x, c.hidden),
            &layer.post_norm,
            c.eps,
            c.hidden,
            tokens,
            rows_mut(&mut guess.normed, c.hidden),
        )?;
        self.linear(
            rows(&guess.normed, c.hidden),
            &moe.router,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut guess.logits, router.experts),
        )?;
        let logits = rows(&guess.logits, router.experts);
        b.route(logits, &moe.bias, router, tokens, ids, weights)
    }
}
