//! Which experts a token goes to, and what is noted of that.

use super::session::Scratch;
use super::weights::{Model, Moe};
use crate::backend::{LoadExperts, TraceLayer, rows, rows_mut};

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
                let trace = TraceLayer {
                    chosen: &replay.chosen,
                    given: &replay.given,
                    rows: replay.tokens,
                    layers: self.sparse_index(self.layers.len()),
                    layer: self.sparse_index(l),
                };
                b.replay(trace, router.top_k, first, tokens, ids, weights)
            }
        }
    }
}
