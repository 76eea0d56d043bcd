//! A sequence of tokens: what is kept of it, and room for what its batches leave between operators.

use super::cache::{Cache, Entries};
use super::config::LayerKind;
use super::mtp;
use super::step::{self, Pass, Steps};
use super::weights::Model;
use crate::backend::{Backend, KvFormat, LoadExperts};

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
    pub q_latent: B::Buf<f32>,
    pub q: B::Buf<f32>,
    pub q_absorbed: B::Buf<f32>,
    pub attended: B::Buf<f32>,
    /// Cache rows before they are rounded.
    pub wide: B::Buf<f32>,
    pub values: B::Buf<f32>,
    pub index_key: B::Buf<f32>,
    pub index_q: B::Buf<f32>,
    pub index_q_turned: B::Buf<f32>,
    pub lists: B::Buf<u32>,
    pub gate_up: B::Buf<f32>,
    pub activated: B::Buf<f32>,
    pub router_logits: B::Buf<f32>,
    pub expert_ids: B::Buf<u32>,
    pub expert_weights: B::Buf<f32>,
    pub expert_out: B::Buf<f32>,
    /// Of the next layer, for passes of a few tokens.
    pub guess: Guess<B>,
    /// Of those after it, for one token.
    pub further: Guess<B>,
    pub shared_out: B::Buf<f32>,
    /// What a recorded token chose, `[layers with experts, top_k]`, and its weights.
    pub kept_ids: B::Buf<u32>,
    pub kept_weights: B::Buf<f32>,
    /// Whether a token is recorded, whose choices are to be kept there.
    pub keep: bool,
    pub logits: B::Buf<f32>,
}

/// What a later layer is likely to choose.
pub(super) struct Guess<B: Backend> {
    pub normed: B::Buf<f32>,
    pub logits: B::Buf<f32>,
    pub ids: B::Buf<u32>,
    pub weights: B::Buf<f32>,
}

/// One sequence of tokens on a model.
pub struct Session<B: Backend> {
    /// Recorded passes, which use what follows.
    pub(super) steps: Vec<Steps<B>>,
    pub(super) caches: Vec<Cache<B>>,
    pub(super) scratch: Scratch<B>,
    pub(super) mtp: Option<mtp::State<B>>,
    pub(super) capacity: usize,
    pub(super) chunk: usize,
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
        let guess = |tokens: usize| -> Result<_, B::Error> {
            Ok(Guess {
                normed: b.alloc(tokens * c.hidden)?,
                logits: b.alloc(tokens * c.router.experts)?,
                ids: b.alloc(tokens * c.router.top_k)?,
                weights: b.alloc(tokens * c.router.top_k)?,
            })
        };
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
            guess: guess(t.min(step::MOST))?,
            further: guess(1)?,
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
}
