//! The forward pass, once for all back ends.
//!
//! Tokens go through in batches of at most [`Config::batch`](super::Config::batch); every operator computes each token alone, so
//! batching changes no bit. The cache keeps, per layer, latent rows `[c_kv normed | k_rope]` (or for
//! each key head rows `[value | key]`), in f32 or in bf16, and for layers with an indexer its keys.

use super::cache::{Cache, Entries};
use super::config::{INNER_EPS, LayerKind};
use super::matrix::Matrix;
use super::mtp;
use super::step::{Pass, Steps};
use super::weights::{Attention, Ffn, Indexer, Latent, Layer, Mlp, Model, Moe};
use crate::backend::{
    Attend, Backend, KvFormat, LoadExperts, Rows, RowsMut, TraceLayer, rows, rows_mut,
};

/// Tokens of a batch whose logits are all wanted, at most.
pub const CHUNK: usize = 256;

/// Whose logits a forward pass is to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Nobody's: fill the cache only.
    None,
    /// The last token's.
    Last,
    /// Those of so many of the last tokens, which one batch holds.
    Tail(usize),
    /// Every token's.
    All,
}

/// Intermediate values of a batch.
pub(super) struct Scratch<B: Backend> {
    pub ids: B::Buf<u32>,
    pub x: B::Buf<f32>,
    pub normed: B::Buf<f32>,
    pub projected: B::Buf<f32>,
    q_latent: B::Buf<f32>,
    pub q: B::Buf<f32>,
    pub q_absorbed: B::Buf<f32>,
    pub attended: B::Buf<f32>,
    /// Cache rows before they are rounded.
    pub wide: B::Buf<f32>,
    values: B::Buf<f32>,
    index_key: B::Buf<f32>,
    index_q: B::Buf<f32>,
    index_q_turned: B::Buf<f32>,
    lists: B::Buf<u32>,
    gate_up: B::Buf<f32>,
    activated: B::Buf<f32>,
    router_logits: B::Buf<f32>,
    expert_ids: B::Buf<u32>,
    expert_weights: B::Buf<f32>,
    expert_out: B::Buf<f32>,
    shared_out: B::Buf<f32>,
    /// What a recorded token chose, `[layers with experts, top_k]`, and its weights.
    pub kept_ids: B::Buf<u32>,
    pub kept_weights: B::Buf<f32>,
    /// Whether a token is recorded, whose choices are to be kept there.
    pub keep: bool,
    pub logits: B::Buf<f32>,
}

/// One sequence of tokens on a model.
pub struct Session<B: Backend> {
    /// Recorded passes, which use what follows.
    pub(super) steps: Vec<Steps<B>>,
    pub(super) caches: Vec<Cache<B>>,
    pub(super) scratch: Scratch<B>,
    pub(super) mtp: Option<mtp::State<B>>,
    pub(super) capacity: usize,
    chunk: usize,
    pub(super) position: usize,
}

impl<B: Backend> Session<B> {
    /// Tokens so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens that it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Launches that a single token takes where it was recorded, else none.
    pub fn recordings(&self) -> usize {
        let single = self.steps.iter().find(|s| s.pass == Pass::Tokens(1));
        single.map_or(0, Steps::len)
    }

    /// Kinds of passes that were recorded: those of one token, of several, of drafts.
    pub fn recorded_passes(&self) -> usize {
        self.steps.len()
    }

    /// Records anew what it records.
    pub fn forget_recordings(&mut self) {
        self.steps.clear();
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.roll_back(self.position);
    }

    /// Forgets the last `n` tokens.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn roll_back(&mut self, n: usize) {
        assert!(n <= self.position, "{n} of {} tokens", self.position);
        self.position -= n;
        if let Some(mtp) = &mut self.mtp {
            mtp.roll_back(n, self.position);
        }
    }
}

impl<B: LoadExperts> Model<B> {
    /// Room for a sequence of `capacity` tokens; `wanted` is the most that any of its forward
    /// passes will ask for.
    pub fn session(&self, capacity: usize, wanted: Wanted) -> Result<Session<B>, B::Error> {
        let (b, c) = (&self.backend, &self.config);
        let mla = &c.mla;
        let most = if wanted == Wanted::All {
            CHUNK
        } else {
            c.batch
        };
        let t = most.min(c.batch).min(capacity).max(1);
        let width = mla.latent + mla.rope;
        let heads = c.grouped.map_or(mla.heads, |grouped| grouped.heads);
        let queries = heads * (mla.nope + mla.rope);
        let caches = (c.layers.iter())
            .map(|kind| self.cache(*kind, capacity))
            .collect::<Result<_, B::Error>>()?;
        let mtp = match (&self.mtp, c.nextn) {
            (Some(_), Some(kind)) => Some(mtp::State::new(self, self.cache(kind, capacity)?, t)?),
            _ => None,
        };
        // Lists are only computed once a sequence is longer than they are.
        let sparse = capacity > c.index.top_k;
        let index_q = if sparse {
            t * c.index.heads * c.index.dim
        } else {
            0
        };
        let ffn = c.intermediate.max(c.shared_intermediate);
        let projected = if c.grouped.is_some() {
            queries
        } else {
            self.columns.stride
        };
        let values = heads * mla.value;
        let logits = match wanted {
            Wanted::All => t,
            Wanted::Tail(n) => n.clamp(1, t),
            Wanted::Last | Wanted::None => 1,
        };
        let kept = c.sparse_layers().count() * c.router.top_k;
        let scratch = Scratch {
            ids: b.alloc(t)?,
            x: b.alloc(t * c.hidden)?,
            normed: b.alloc(t * c.hidden)?,
            projected: b.alloc(t * projected)?,
            q_latent: b.alloc(t * c.q_lora)?,
            q: b.alloc(t * queries)?,
            q_absorbed: b.alloc(t * heads * width)?,
            attended: b.alloc(t * heads * mla.latent)?,
            wide: b.alloc(if c.kv == KvFormat::F32 { 0 } else { t * width })?,
            values: b.alloc(if c.grouped.is_some() { 0 } else { t * values })?,
            index_key: b.alloc(t * c.index.dim)?,
            index_q: b.alloc(index_q)?,
            index_q_turned: b.alloc(index_q)?,
            lists: b.alloc(if sparse { t * c.index.top_k } else { 0 })?,
            gate_up: b.alloc(t * 2 * ffn)?,
            activated: b.alloc(t * ffn)?,
            router_logits: b.alloc(t * c.router.experts)?,
            expert_ids: b.alloc(t * c.router.top_k)?,
            expert_weights: b.alloc(t * c.router.top_k)?,
            expert_out: b.alloc(t * c.hidden)?,
            shared_out: b.alloc(if c.shared_intermediate > 0 {
                t * c.hidden
            } else {
                0
            })?,
            kept_ids: b.alloc(kept)?,
            kept_weights: b.alloc(kept)?,
            keep: false,
            logits: b.alloc(logits * c.vocab)?,
        };
        Ok(Session {
            steps: Vec::new(),
            caches,
            scratch,
            mtp,
            capacity,
            chunk: t,
            position: 0,
        })
    }

    /// Room for what is kept of a layer.
    fn cache(&self, kind: LayerKind, capacity: usize) -> Result<Cache<B>, B::Error> {
        let (b, c) = (&self.backend, &self.config);
        let width = c.mla.latent + c.mla.rope;
        Ok(Cache {
            rows: (0..c.grouped.map_or(1, |grouped| grouped.kv_heads))
                .map(|_| Entries::new(b, c.kv, capacity * width))
                .collect::<Result<_, _>>()?,
            index_keys: if kind.indexer {
                Some(b.alloc(capacity * c.index.dim)?)
            } else {
                None
            },
        })
    }

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

    /// As [`Model::forward`]; `trace` receives the last token's hidden state after the embedding,
    /// after each layer but the last, and after the final norm, as Hugging Face's
    /// `output_hidden_states` lists them.
    pub fn forward_traced(
        &self,
        session: &mut Session<B>,
        ids: &[u32],
        wanted: Wanted,
        mut trace: Option<&mut Vec<Vec<f32>>>,
    ) -> Result<Vec<f32>, B::Error> {
        assert!(
            ids.len() <= session.capacity - session.position,
            "{} tokens at {} of {}",
            ids.len(),
            session.position,
            session.capacity
        );
        let mut logits = Vec::new();
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
            let at = logits.len();
            logits.resize(at + tokens * self.config.vocab, 0.0);
            (self.backend).read(&session.scratch.logits, 0, &mut logits[at..])?;
            session.position += batch.len();
            if let Some(usage) = self.usage.borrow_mut().as_mut() {
                usage.add_tokens(batch.len() as f64);
            }
        }
        Ok(logits)
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
        }
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
        let (x, out) = (rows(&s.normed, hidden), rows_mut(&mut s.expert_out, hidden));
        let (ids, weights) = (&s.expert_ids, &s.expert_weights);
        let top_k = self.config.router.top_k;
        match &moe.low {
            None => b.experts(&moe.experts, x, ids, weights, top_k, tokens, out)?,
            Some(low) => {
                b.experts_int8([&moe.experts, low], x, ids, weights, top_k, tokens, out)?
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

    /// Latent attention of the normed input.
    fn latent(
        &self,
        layer: &Latent<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c, mla, col) = (&self.backend, &self.config, &self.config.mla, &self.columns);
        let width = mla.latent + mla.rope;
        let q_head = mla.nope + mla.rope;
        self.linear(
            rows(&s.normed, c.hidden),
            &layer.input,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut s.projected, col.stride),
        )?;
        b.aside(&mut || self.latent_rows(layer, cache, s, first, tokens))?;
        b.rms_norm(
            rows(&s.projected, col.stride),
            &layer.q_norm,
            INNER_EPS,
            c.q_lora,
            tokens,
            rows_mut(&mut s.q_latent, c.q_lora),
        )?;
        self.linear(
            rows(&s.q_latent, c.q_lora),
            &layer.q_b,
            c.q_lora,
            tokens,
            false,
            rows_mut(&mut s.q, mla.heads * q_head),
        )?;
        b.absorb_query(
            rows(&s.q, mla.heads * q_head),
            layer.kv_b.weight(),
            mla,
            tokens,
            rows_mut(&mut s.q_absorbed, mla.heads * width),
        )?;
        b.rope(
            Rows {
                buf: &s.q,
                offset: mla.nope,
                stride: mla.heads * q_head,
            },
            q_head,
            mla.heads,
            mla.rope,
            0,
            &self.inv_freq,
            first,
            tokens,
            RowsMut {
                buf: &mut s.q_absorbed,
                offset: mla.latent,
                stride: mla.heads * width,
                moves: false,
            },
            width,
        )?;
        b.together()?;
        // Lists that hold every position say no more than causality does.
        let listed = first + tokens > c.index.top_k;
        if let (Some(indexer), Some(keys), true) = (&layer.indexer, &cache.index_keys, listed) {
            self.index(indexer, keys, s, first, tokens)?;
        }
        let attend = if listed {
            Attend::Listed {
                lists: &s.lists,
                top_k: c.index.top_k,
            }
        } else {
            Attend::Causal
        };
        b.attention(
            rows(&s.q_absorbed, mla.heads * width),
            cache.rows[0].cached(),
            attend,
            mla,
            first,
            tokens,
            rows_mut(&mut s.attended, mla.heads * mla.latent),
        )?;
        let n = mla.heads * mla.value;
        let attended = rows(&s.attended, mla.heads * mla.latent);
        b.expand_value(
            attended,
            layer.kv_b.weight(),
            mla,
            tokens,
            rows_mut(&mut s.values, n),
        )?;
        self.linear(
            rows(&s.values, n),
            &layer.o,
            n,
            tokens,
            true,
            rows_mut(&mut s.x, c.hidden),
        )
    }

    /// Appends a layer's latent rows, and the keys of its indexer if it has one.
    fn latent_rows(
        &self,
        layer: &Latent<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c, col) = (&self.backend, &self.config, &self.columns);
        let (mla, index) = (&c.mla, &c.index);
        let width = mla.latent + mla.rope;
        let latent = &mut cache.rows[0];
        let projected = |offset| Rows {
            buf: &s.projected,
            offset,
            stride: col.stride,
        };
        b.rms_norm(
            projected(col.latent),
            &layer.kv_norm,
            INNER_EPS,
            mla.latent,
            tokens,
            latent.rows(&mut s.wide, first, width, 0),
        )?;
        b.rope(
            projected(col.rope),
            mla.rope,
            1,
            mla.rope,
            0,
            &self.inv_freq,
            first,
            tokens,
            latent.rows(&mut s.wide, first, width, mla.latent),
            mla.rope,
        )?;
        latent.keep(b, &s.wide, first, width, tokens)?;
        let (Some(indexer), Some(keys)) = (&layer.indexer, &mut cache.index_keys) else {
            return Ok(());
        };
        b.layer_norm(
            projected(col.index_key),
            &indexer.key_norm,
            &indexer.key_bias,
            INNER_EPS,
            index.dim,
            tokens,
            rows_mut(&mut s.index_key, index.dim),
        )?;
        b.rope(
            rows(&s.index_key, index.dim),
            index.dim,
            1,
            mla.rope,
            index.dim - mla.rope,
            &self.inv_freq,
            first,
            tokens,
            RowsMut {
                buf: keys,
                offset: first * index.dim,
                stride: index.dim,
                moves: true,
            },
            index.dim,
        )
    }

    /// Chooses each token's positions.
    fn index(
        &self,
        indexer: &Indexer<B>,
        keys: &B::Buf<f32>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c, col) = (&self.backend, &self.config, &self.columns);
        let (rope, index) = (c.mla.rope, &c.index);
        let projected = |offset| Rows {
            buf: &s.projected,
            offset,
            stride: col.stride,
        };
        let q_width = index.heads * index.dim;
        self.linear(
            rows(&s.q_latent, c.q_lora),
            &indexer.query,
            c.q_lora,
            tokens,
            false,
            rows_mut(&mut s.index_q, q_width),
        )?;
        b.rope(
            rows(&s.index_q, q_width),
            index.dim,
            index.heads,
            rope,
            index.dim - rope,
            &self.inv_freq,
            first,
            tokens,
            rows_mut(&mut s.index_q_turned, q_width),
            index.dim,
        )?;
        b.index(
            rows(&s.index_q_turned, q_width),
            keys,
            projected(col.index_weights),
            index,
            first,
            tokens,
            &mut s.lists,
        )
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

    /// Notes which experts of layer `l` were chosen, where that is wanted.
    fn count(
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
    fn route(
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
