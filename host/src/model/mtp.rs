//! The layer that drafts (`num_nextn_predict_layers`, multi-token prediction): from the hidden state
//! of a token and the token after it, what comes after that.
//!
//! With `h` the model's hidden state of position `i` behind its last norm, and `t` the token of
//! position `i + 1`:
//!
//! ```text
//! x = eh_proj [enorm(embed(t)); hnorm(h)]
//! g = shared_head.norm(layer(x))        attention at position i, over this layer's own cache
//! logits of position i + 2 = lm_head g
//! ```
//!
//! Embedding and head are the model's. A further draft takes `g` for `h` and the draft for `t`.
//! Sources: DeepSeek-V3 Technical Report (arXiv 2412.19437), section 2.2; that GLM's layer takes `g`
//! and not what comes before the norm is as vLLM and SGLang have it. Each draft's positions are chosen
//! anew by the layer's indexer.
//!
//! What is drafted never decides what is generated, only what is computed ahead: a draft that is not
//! the token the model then gives is rolled back.

use std::path::Path;

use super::cache::Cache;
use super::config::{Config, LayerKind};
use super::directory::Dense;
use super::error::ModelError;
use super::inventory::at;
use super::matrix::Matrix;
use super::session::Session;
use super::source::Source;
use super::step::Pass;
use super::weights::{Layer, Loader, Model};
use crate::backend::{Backend, LoadExperts, Rows, RowsMut, rows, rows_mut};
use crate::expert::Form;
use crate::sample::greedy;

/// The tensor by which files are known to have the layer.
const PROJECTION: &str = "eh_proj.weight";

/// Names and shapes of its tensors that no other layer has.
pub(super) fn inventory(c: &Config) -> Vec<(String, Vec<usize>)> {
    let l = c.layers.len();
    let norm = |name: &str| (at(l, name), vec![c.hidden]);
    vec![
        norm("enorm.weight"),
        norm("hnorm.weight"),
        (at(l, PROJECTION), vec![c.hidden, 2 * c.hidden]),
        norm("shared_head.norm.weight"),
    ]
}

/// Name of a tensor that only such a layer has; none where the configuration announces no layer.
pub fn mark(config: &Config) -> Option<String> {
    let l = config.layers.len();
    config.nextn.map(|_| at(l, PROJECTION))
}

/// Whether the dense part in `dir` has the layer.
pub fn is_in(dir: &Path, config: &Config) -> Result<bool, ModelError> {
    Ok(match mark(config) {
        Some(name) => Dense::open(dir, config)?.has(&name),
        None => false,
    })
}

/// From here on the layer is read too; an error where there is none.
pub fn want(dir: &Path, config: &mut Config) -> Result<(), ModelError> {
    let missing = |what: &str| {
        let file = dir.join("config.json");
        let remedy = "run the model without --speculate";
        ModelError::field(
            &file,
            "num_nextn_predict_layers",
            "a layer that drafts",
            what,
            remedy,
        )
    };
    let Some(name) = mark(config) else {
        return Err(missing("none"));
    };
    if !Dense::open(dir, config)?.has(&name) {
        return Err(missing(&format!(
            "a layer that is not in the files ({name})"
        )));
    }
    config.mtp = true;
    Ok(())
}

/// The layer on a back end.
pub struct Mtp<B: LoadExperts> {
    embedding_norm: B::Buf<f32>,
    hidden_norm: B::Buf<f32>,
    projection: Matrix<B>,
    layer: Layer<B>,
    norm: B::Buf<f32>,
}

impl<B: LoadExperts> Mtp<B> {
    pub(super) fn load(
        loader: &mut Loader<'_, B>,
        kind: LayerKind,
        source: &Source,
        form: Form,
    ) -> Result<Self, ModelError> {
        let (l, hidden) = (loader.config.layers.len(), loader.config.hidden);
        Ok(Self {
            embedding_norm: loader.vector(&at(l, "enorm.weight"), hidden)?,
            hidden_norm: loader.vector(&at(l, "hnorm.weight"), hidden)?,
            projection: loader.one(&at(l, PROJECTION), &[hidden, 2 * hidden])?,
            layer: loader.layer(l, kind, source, form)?,
            norm: loader.vector(&at(l, "shared_head.norm.weight"), hidden)?,
        })
    }

    pub(super) fn layer(&self) -> &Layer<B> {
        &self.layer
    }
}

/// What is kept of the layer between batches.
pub(super) struct State<B: Backend> {
    cache: Cache<B>,
    /// Positions in its cache: those whose next token is known.
    len: usize,
    /// Tokens of the positions after them, whose hidden states are in `input`.
    held: Vec<u32>,
    /// `[chunk, 2 * hidden]`: embedding and hidden state, normed.
    input: B::Buf<f32>,
}

impl<B: LoadExperts> State<B> {
    pub fn new(model: &Model<B>, cache: Cache<B>, chunk: usize) -> Result<Self, B::Error> {
        Ok(Self {
            cache,
            len: 0,
            held: Vec::new(),
            input: model.backend.alloc(chunk * 2 * model.config.hidden)?,
        })
    }
}

impl<B: Backend> State<B> {
    /// The layer's.
    pub fn cache(&mut self) -> &mut Cache<B> {
        &mut self.cache
    }

    /// The tokens of positions whose hidden states are in the input.
    pub fn hold(&mut self, ids: &[u32]) {
        self.held.extend_from_slice(ids);
    }

    /// The tokens after those that are held, `next` after the last one, and the position of the first: from
    /// here on they are in the cache. None where nothing is held.
    fn take_held(&mut self, next: u32) -> Option<(Vec<u32>, usize)> {
        if self.held.is_empty() {
            return None;
        }
        let first = self.len;
        let mut following = std::mem::take(&mut self.held);
        following.remove(0);
        following.push(next);
        self.len += following.len();
        Some((following, first))
    }

    /// The last `n` tokens are gone; `position` are left. A hidden state that is not held any more
    /// is missed by the next draft; the cache's last entry may be of a token that is gone.
    pub fn roll_back(&mut self, n: usize, position: usize) {
        self.held.truncate(self.held.len().saturating_sub(n));
        self.len = self.len.min(position);
    }
}

impl<B: LoadExperts> Model<B> {
    /// Whether there is a layer that drafts.
    pub fn drafts(&self) -> bool {
        self.mtp.is_some()
    }

    /// Takes in the hidden states that are held, now that `next` follows them.
    pub(super) fn catch_up(&self, session: &mut Session<B>, next: u32) -> Result<(), B::Error> {
        let Some((following, first)) = session.mtp.as_mut().and_then(|s| s.take_held(next)) else {
            return Ok(());
        };
        self.predict(session, &following, first)
    }

    /// Keeps the hidden states of a batch, which are in the scratch's `x`, as the layer's input.
    pub(super) fn keep_hidden(
        &self,
        session: &mut Session<B>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (Some(mtp), Some(state)) = (&self.mtp, &mut session.mtp) else {
            return Ok(());
        };
        let (b, c, s) = (&self.backend, &self.config, &mut session.scratch);
        b.rms_norm(
            rows(&s.x, c.hidden),
            &self.norm,
            c.eps,
            c.hidden,
            tokens,
            rows_mut(&mut s.normed, c.hidden),
        )?;
        self.take_hidden(mtp, &s.normed, &mut state.input, tokens)
    }

    /// Hidden states to the right half of the layer's input.
    fn take_hidden(
        &self,
        mtp: &Mtp<B>,
        from: &B::Buf<f32>,
        input: &mut B::Buf<f32>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let c = &self.config;
        let right = RowsMut {
            buf: input,
            offset: c.hidden,
            stride: 2 * c.hidden,
            moves: false,
        };
        let from = rows(from, c.hidden);
        let weight = &mtp.hidden_norm;
        (self.backend).rms_norm(from, weight, c.eps, c.hidden, tokens, right)
    }

    /// The layer, of hidden states in its input and the tokens after them, from position `first` on;
    /// `x` is what it gives.
    fn predict(
        &self,
        session: &mut Session<B>,
        following: &[u32],
        first: usize,
    ) -> Result<(), B::Error> {
        self.backend.write(&mut session.scratch.ids, 0, following)?;
        self.begin_draft(session, following.len())?;
        let (Some(mtp), Some(state)) = (&self.mtp, &mut session.mtp) else {
            return Ok(());
        };
        let (l, n) = (self.config.layers.len(), following.len());
        let s = &mut session.scratch;
        self.layer(l, &mtp.layer, &mut state.cache, s, first, n)
    }

    /// What the layer's attention takes, of hidden states in its input and the tokens in the scratch's `ids`.
    pub(super) fn begin_draft(
        &self,
        session: &mut Session<B>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (Some(mtp), Some(state)) = (&self.mtp, &mut session.mtp) else {
            return Ok(());
        };
        let (b, c, s) = (&self.backend, &self.config, &mut session.scratch);
        self.embed(s, tokens)?;
        b.rms_norm(
            rows(&s.x, c.hidden),
            &mtp.embedding_norm,
            c.eps,
            c.hidden,
            tokens,
            rows_mut(&mut state.input, 2 * c.hidden),
        )?;
        self.linear(
            rows(&state.input, 2 * c.hidden),
            &mtp.projection,
            2 * c.hidden,
            tokens,
            false,
            rows_mut(&mut s.x, c.hidden),
        )
    }

    /// Logits of the last of `tokens` rows that the layer gave, which becomes its next input.
    pub(super) fn end_draft(
        &self,
        session: &mut Session<B>,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (Some(mtp), Some(state)) = (&self.mtp, &mut session.mtp) else {
            return Ok(());
        };
        let (c, s) = (&self.config, &mut session.scratch);
        let last = Rows {
            buf: &s.x,
            offset: (tokens - 1) * c.hidden,
            stride: c.hidden,
        };
        let out = rows_mut(&mut s.normed, c.hidden);
        (self.backend).rms_norm(last, &mtp.norm, c.eps, c.hidden, 1, out)?;
        self.take_hidden(mtp, &s.normed, &mut state.input, 1)?;
        self.logits(s, 1)
    }

    /// The layer and its logits, as one launch where that can be.
    fn draft_pass(
        &self,
        session: &mut Session<B>,
        following: &[u32],
        first: usize,
    ) -> Result<(), B::Error> {
        let pass = Pass::Draft(following.len());
        if self.step(session, pass, following, first)? {
            return Ok(());
        }
        self.predict(session, following, first)?;
        self.end_draft(session, following.len())
    }

    /// Drafts the up to `n` tokens that may come after `next`, which follows the session's sequence
    /// and is not part of it yet; none without a layer that drafts, or right after tokens were
    /// forgotten that it had seen the next one of. `logits` receives each draft's, where given.
    pub fn draft(
        &self,
        session: &mut Session<B>,
        next: u32,
        n: usize,
        mut logits: Option<&mut Vec<f32>>,
    ) -> Result<Vec<u32>, B::Error> {
        let vocab = self.config.vocab;
        let n = n.min(session.capacity().saturating_sub(session.position() + 1));
        if self.mtp.is_none() || n == 0 {
            return Ok(Vec::new());
        }
        let Some((following, first)) = session.mtp.as_mut().and_then(|s| s.take_held(next)) else {
            return Ok(Vec::new());
        };
        self.draft_pass(session, &following, first)?;
        // Past the layer's own positions: the next tokens that are known overwrite it.
        let mut past = first + following.len();
        let mut drafts = Vec::with_capacity(n);
        let mut of = vec![0.0; vocab];
        loop {
            self.backend.read(&session.scratch.logits, 0, &mut of)?;
            let draft = greedy(&of);
            if let Some(logits) = logits.as_deref_mut() {
                logits.extend_from_slice(&of);
            }
            drafts.push(draft);
            if drafts.len() == n {
                return Ok(drafts);
            }
            self.draft_pass(session, &[draft], past)?;
            past += 1;
        }
    }
}
