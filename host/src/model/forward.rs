//! The forward pass, once for all back ends.
//!
//! Tokens go through in batches of at most [`Config::batch`](super::Config::batch); every operator computes each token alone, so
//! batching changes no bit. The cache keeps, per layer, latent rows `[c_kv normed | k_rope]` (or for
//! each key head rows `[value | key]`), in f32 or in bf16, and for layers with an indexer its keys.

use super::cache::Cache;
use super::matrix::Matrix;
use super::session::{Scratch, Session, Wanted};
use super::step::Pass;
use super::weights::{Attention, Ffn, Layer, Mlp, Model, Moe};
use crate::backend::{Guess, LoadExperts, Rows, RowsMut, rows, rows_mut};

impl<B: LoadExperts> Model<B> {
    /// Appends `ids` to the session's sequence. Returns the wanted rows of logits,
    /// `[rows, vocab]`.
    ///
    /// # Panics
    /// If the session has no room for them; callers bound their input first.
    pub fn forward(
        &self,
        session: &mut Session<B>,
        ids: &[u32],
        wanted: Wanted,
    ) -> Result<Vec<f32>, B::Error> {
        self.forward_traced(session, ids, wanted, None)
    }

    /// As [`Model::forward`], to memory that was used before: what a process is given anew costs it more than the
    /// copy. After an error it holds anything.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn forward_into(
        &self,
        session: &mut Session<B>,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), B::Error> {
        self.forward_with(session, ids, wanted, None, logits)
    }

    /// As [`Model::forward`]; `trace` receives the last token's hidden state after the embedding,
    /// after each layer but the last, and after the final norm, as Hugging Face's
    /// `output_hidden_states` lists them.
    pub fn forward_traced(
        &self,
        session: &mut Session<B>,
        ids: &[u32],
        wanted: Wanted,
        trace: Option<&mut Vec<Vec<f32>>>,
    ) -> Result<Vec<f32>, B::Error> {
        let mut logits = Vec::new();
        self.forward_with(session, ids, wanted, trace, &mut logits)?;
        Ok(logits)
    }

    fn forward_with(
        &self,
        session: &mut Session<B>,
        ids: &[u32],
        wanted: Wanted,
        mut trace: Option<&mut Vec<Vec<f32>>>,
        logits: &mut Vec<f32>,
    ) -> Result<(), B::Error> {
        assert!(
            ids.len() <= session.capacity - session.position,
            "{} tokens at {} of {}",
            ids.len(),
            session.position,
            session.capacity
        );
        let mut at = 0;
        let batches = ids.len().div_ceil(session.chunk);
        for (i, batch) in ids.chunks(session.chunk).enumerate() {
            let last = i + 1 == batches;
            let trace = if last { trace.take() } else { None };
            self.catch_up(session, batch[0])?;
            let tokens = match wanted {
                Wanted::All => batch.len(),
                Wanted::Last if last => 1,
                Wanted::Tail(n) if last => n,
                _ => 0,
            };
            // One token, or a draft's check.
            let few = batch.len() == 1 || matches!(wanted, Wanted::Tail(_));
            let stepped = few && tokens == batch.len() && trace.is_none() && {
                let (pass, at) = (Pass::Tokens(tokens), session.position);
                self.step(session, pass, batch, at)?
            };
            if !stepped {
                self.batch(session, batch, trace)?;
                self.head(&mut session.scratch, batch.len(), tokens)?;
                self.keep_hidden(session, batch.len())?;
            }
            if let Some(state) = &mut session.mtp {
                state.hold(batch);
            }
            let end = at + tokens * self.config.vocab;
            logits.resize(end, 0.0);
            (self.backend).read(&session.scratch.logits, 0, &mut logits[at..])?;
            at = end;
            session.position += batch.len();
            if let Some(usage) = self.usage.borrow_mut().as_mut() {
                usage.add_tokens(batch.len() as f64);
            }
        }
        logits.truncate(at);
        Ok(())
    }

    /// One batch up to the last layer; its hidden states stay in the scratch's `x`.
    fn batch(
        &self,
        session: &mut Session<B>,
        ids: &[u32],
        mut trace: Option<&mut Vec<Vec<f32>>>,
    ) -> Result<(), B::Error> {
        let (b, c) = (&self.backend, &self.config);
        let (first, tokens) = (session.position, ids.len());
        b.write(&mut session.scratch.ids, 0, ids)?;
        let s = &mut session.scratch;
        self.embed(s, tokens)?;
        for (l, (layer, cache)) in self.layers.iter().zip(&mut session.caches).enumerate() {
            if let Some(trace) = trace.as_deref_mut() {
                let mut x = vec![0.0; c.hidden];
                b.read(&s.x, (tokens - 1) * c.hidden, &mut x)?;
                trace.push(x);
            }
            self.layer(l, layer, cache, s, first, tokens)?;
        }
        if let Some(trace) = trace {
            let mut x = vec![0.0; c.hidden];
            b.rms_norm(
                last_row(&s.x, c.hidden, tokens),
                &self.norm,
                c.eps,
                c.hidden,
                1,
                rows_mut(&mut s.normed, c.hidden),
            )?;
            b.read(&s.normed, 0, &mut x)?;
            trace.push(x);
        }
        Ok(())
    }

    /// The tokens' embeddings to the scratch's `x`.
    pub(super) fn embed(&self, s: &mut Scratch<B>, tokens: usize) -> Result<(), B::Error> {
        let hidden = self.config.hidden;
        self.backend.embed(
            self.embedding.weight(),
            &s.ids,
            hidden,
            tokens,
            rows_mut(&mut s.x, hidden),
        )
    }

    /// Layer `l` of the hidden states `x` of `tokens` tokens from position `first` on.
    pub(super) fn layer(
        &self,
        l: usize,
        layer: &Layer<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        self.before_experts(l, layer, cache, s, first, tokens)?;
        let b = &self.backend;
        b.aside(&mut || self.shared_expert(layer, s, tokens))?;
        self.experts(l, layer, s, first, tokens)?;
        b.together()?;
        self.sum_experts(layer, s, tokens)
    }

    /// A layer up to the choice of experts; all of it where it has none.
    pub(super) fn before_experts(
        &self,
        l: usize,
        layer: &Layer<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c) = (&self.backend, &self.config);
        self.attention(layer, cache, s, first, tokens)?;
        if let Some(next) = self.guessed(l, tokens) {
            b.aside(&mut || self.guess(next, &s.x, &mut s.guess, first, tokens))?;
        }
        b.rms_norm(
            rows(&s.x, c.hidden),
            &layer.post_norm,
            c.eps,
            c.hidden,
            tokens,
            rows_mut(&mut s.normed, c.hidden),
        )?;
        match &layer.mlp {
            Mlp::Dense(ffn) => self.ffn(
                ffn,
                &s.normed,
                (&mut s.gate_up, &mut s.activated),
                true,
                &mut s.x,
                tokens,
            ),
            Mlp::Sparse(moe) => self.route(l, moe, s, first, tokens),
        }?;
        b.together()
    }

    /// A layer's routed experts, if it has any.
    pub(super) fn experts(
        &self,
        l: usize,
        layer: &Layer<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let Mlp::Sparse(moe) = &layer.mlp else {
            return Ok(());
        };
        let (b, hidden) = (&self.backend, self.config.hidden);
        let next = self
            .guessed(l, tokens)
            .and_then(|n| Some((n, self.moe(n)?)));
        let (x, out) = (rows(&s.normed, hidden), rows_mut(&mut s.expert_out, hidden));
        let (ids, weights) = (&s.expert_ids, &s.expert_weights);
        let top_k = self.config.router.top_k;
        let experts = &moe.experts;
        match (&moe.low, next) {
            (Some(low), _) => {
                b.experts_int8([experts, low], x, ids, weights, top_k, tokens, out)?
            }
            (None, None) => b.experts(experts, x, ids, weights, top_k, tokens, out)?,
            (None, Some((n, next))) => {
                let (hidden, scratch) = (&s.x, &mut s.further);
                let guess = Guess {
                    experts: &next.experts,
                    ids: &s.guess.ids,
                    further: &mut |i| self.guess_further(n, i, hidden, scratch, first),
                };
                b.experts_and_next(experts, guess, x, ids, weights, top_k, tokens, out)?
            }
        }
        self.count(l, s, first, tokens)
    }

    /// A layer's shared expert, if it has one.
    fn shared_expert(
        &self,
        layer: &Layer<B>,
        s: &mut Scratch<B>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        match &layer.mlp {
            Mlp::Sparse(Moe {
                shared: Some(shared),
                ..
            }) => self.ffn(
                shared,
                &s.normed,
                (&mut s.gate_up, &mut s.activated),
                false,
                &mut s.shared_out,
                tokens,
            ),
            _ => Ok(()),
        }
    }

    /// Adds what a layer's experts have computed, if it has any.
    fn sum_experts(
        &self,
        layer: &Layer<B>,
        s: &mut Scratch<B>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let Mlp::Sparse(moe) = &layer.mlp else {
            return Ok(());
        };
        let hidden = self.config.hidden;
        let shared = moe.shared.as_ref();
        self.backend.add(
            rows(&s.expert_out, hidden),
            shared.map(|_| rows(&s.shared_out, hidden)),
            hidden,
            tokens,
            rows_mut(&mut s.x, hidden),
        )
    }

    /// What a layer does behind its routed experts where these are not done with the rest.
    pub(super) fn after_experts(
        &self,
        layer: &Layer<B>,
        s: &mut Scratch<B>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        self.shared_expert(layer, s, tokens)?;
        self.sum_experts(layer, s, tokens)
    }

    /// `matrix * x`, plus what was there where `add`; rows of a matrix of several pieces go beside one
    /// another.
    pub(super) fn linear(
        &self,
        x: Rows<'_, B::Buf<f32>>,
        matrix: &Matrix<B>,
        cols: usize,
        tokens: usize,
        add: bool,
        out: RowsMut<'_, B::Buf<f32>>,
    ) -> Result<(), B::Error> {
        let mut offset = out.offset;
        for (n, part) in &matrix.parts {
            let out = RowsMut {
                buf: &mut *out.buf,
                offset,
                stride: out.stride,
                moves: false,
            };
            let weight = part.weight();
            self.backend.linear(x, weight, *n, cols, tokens, add, out)?;
            offset += n;
        }
        Ok(())
    }

    /// `x += o_proj(attention(norm(x)))`; extends the layer's cache.
    fn attention(
        &self,
        layer: &Layer<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let c = &self.config;
        self.backend.rms_norm(
            rows(&s.x, c.hidden),
            &layer.input_norm,
            c.eps,
            c.hidden,
            tokens,
            rows_mut(&mut s.normed, c.hidden),
        )?;
        match (&layer.attention, &c.grouped) {
            (Attention::Latent(layer), _) => self.latent(layer, cache, s, first, tokens),
            (Attention::Grouped(layer), Some(d)) => self.grouped(layer, d, cache, s, first, tokens),
            (Attention::Grouped(_), None) => unreachable!("grouped layers are of grouped models"),
        }
    }

    /// `down(silu(gate(x)) * up(x))`, plus what was there where `add`.
    fn ffn(
        &self,
        ffn: &Ffn<B>,
        x: &B::Buf<f32>,
        (gate_up, activated): (&mut B::Buf<f32>, &mut B::Buf<f32>),
        add: bool,
        out: &mut B::Buf<f32>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, hidden, width) = (&self.backend, self.config.hidden, ffn.width);
        self.linear(
            rows(x, hidden),
            &ffn.gate_up,
            hidden,
            tokens,
            false,
            rows_mut(gate_up, 2 * width),
        )?;
        b.silu_mul(
            rows(gate_up, 2 * width),
            Rows {
                buf: gate_up,
                offset: width,
                stride: 2 * width,
            },
            width,
            tokens,
            rows_mut(activated, width),
        )?;
        self.linear(
            rows(activated, width),
            &ffn.down,
            width,
            tokens,
            add,
            rows_mut(out, hidden),
        )
    }

    /// The logits of the batch's last `wanted` tokens.
    pub(super) fn head(
        &self,
        s: &mut Scratch<B>,
        tokens: usize,
        wanted: usize,
    ) -> Result<(), B::Error> {
        if wanted == 0 {
            return Ok(());
        }
        let (b, c) = (&self.backend, &self.config);
        b.rms_norm(
            Rows {
                buf: &s.x,
                offset: (tokens - wanted) * c.hidden,
                stride: c.hidden,
            },
            &self.norm,
            c.eps,
            c.hidden,
            wanted,
            rows_mut(&mut s.normed, c.hidden),
        )?;
        self.logits(s, wanted)
    }

    /// The logits of the first `tokens` normed hidden states.
    pub(super) fn logits(&self, s: &mut Scratch<B>, tokens: usize) -> Result<(), B::Error> {
        let c = &self.config;
        self.backend.linear(
            rows(&s.normed, c.hidden),
            self.head.as_ref().unwrap_or(&self.embedding).weight(),
            c.vocab,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut s.logits, c.vocab),
        )
    }
}

fn last_row<B>(x: &B, cols: usize, tokens: usize) -> Rows<'_, B> {
    Rows {
        buf: x,
        offset: (tokens - 1) * cols,
        stride: cols,
    }
}
