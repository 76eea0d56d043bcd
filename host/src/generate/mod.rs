//! Generation of tokens from a prompt.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use crate::engine::{Engine, EngineError, check_finite};
use crate::interrupt;
use crate::model::{Config, Wanted};
use crate::sample::{Sampler, Sampling};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt; not empty.
    pub prompt: Vec<u32>,
    /// Tokens at most; `None`: until the end token or a full context.
    pub tokens: Option<usize>,
    /// Positions at most; `None`: what the model has.
    pub context: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Go on past end tokens.
    pub ignore_eos: bool,
    /// Keep what each token was chosen from.
    pub keep_logits: bool,
    /// Tokens to draft at most before each pass, where the engine has a layer that does.
    pub speculate: usize,
    /// Tokens of the prompt's beginning that the engine's sequence begins with already.
    pub held: usize,
    /// Room to make where a sequence begins: positions to come back to with [`Request::held`].
    pub room: usize,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end token.
    Stop,
    /// As many tokens as asked for, or the context is full.
    Length,
    /// The user, or whoever reads the text, stopped it.
    Interrupted,
}

/// What was generated.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The tokens, an end token included.
    pub ids: Vec<u32>,
    /// Why there are no more.
    pub finish_reason: FinishReason,
    /// `[tokens, vocab]`, row `i` being what token `i` was chosen from; empty unless asked for.
    pub logits: Vec<f32>,
    /// Tokens of the prompt that did not have to be read again.
    pub held: usize,
    /// Tokens that were drafted.
    pub drafted: usize,
    /// Of them those that were the next tokens.
    pub accepted: usize,
    /// Forward passes after the prompt's.
    pub passes: usize,
    /// Time from the first prompt token to the first logits.
    pub prompt_time: Duration,
    /// Time of all forward passes and choices after that.
    pub decode_time: Duration,
}

/// Why a request is refused or fails.
#[derive(Debug, Error)]
pub enum GenerateError {
    /// Nothing to continue.
    #[error("the prompt has no tokens; give text with -p or ids with --prompt-ids")]
    Empty,
    /// A token that the model does not have.
    #[error("prompt token {id}: the vocabulary has {vocab} tokens; give ids below that")]
    Token {
        /// The token.
        id: u32,
        /// `vocab_size`.
        vocab: usize,
    },
    /// Longer than the context.
    #[error(
        "the prompt has {tokens} tokens and the context {context}; shorten it{}",
        if context < max { format!(" or raise --ctx-size (at most {max})") } else { String::new() }
    )]
    TooLong {
        /// Its length.
        tokens: usize,
        /// Positions there are.
        context: usize,
        /// `max_position_embeddings`.
        max: usize,
    },
    /// More positions than the model has.
    #[error("--ctx-size {asked}: the model has {max} positions; ask for 1 to {max}")]
    Context {
        /// What was asked for.
        asked: usize,
        /// `max_position_embeddings`.
        max: usize,
    },
    /// The engine's failure.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl Request {
    /// Refuses what the model cannot serve; the positions there are. For use before the model is
    /// loaded, which may take long.
    pub fn check(&self, config: &Config) -> Result<usize, GenerateError> {
        let (vocab, max) = (config.vocab, config.max_positions);
        if self.prompt.is_empty() {
            return Err(GenerateError::Empty);
        }
        if let Some(id) = self.prompt.iter().find(|id| **id as usize >= vocab) {
            return Err(GenerateError::Token { id: *id, vocab });
        }
        let context = match self.context {
            Some(asked) if asked == 0 || asked > max => {
                return Err(GenerateError::Context { asked, max });
            }
            Some(asked) => asked,
            None => max,
        };
        let tokens = self.prompt.len();
        if tokens > context {
            return Err(GenerateError::TooLong {
                tokens,
                context,
                max,
            });
        }
        Ok(context)
    }

    /// Positions that the sequence comes to at most, where there are `context`.
    pub fn positions(&self, context: usize) -> usize {
        // The last token is never fed back.
        let fed = self.tokens.map_or(context, |n| n.saturating_sub(1));
        self.prompt.len().saturating_add(fed).min(context)
    }
}

/// Generates. Tokens do not depend on [`Request::speculate`]: each is chosen from the logits and with
/// the random numbers that it is chosen with otherwise, and drafts that it is not are forgotten.
/// `on_prompt` gets `(prompt tokens done, prompt tokens)`, `on_token` each token as it is
/// chosen, and may stop.
pub fn generate(
    engine: &mut dyn Engine,
    request: &Request,
    mut on_prompt: impl FnMut(usize, usize),
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, GenerateError> {
    let config = engine.config();
    let context = request.check(config)?;
    let eos = if request.ignore_eos {
        Vec::new()
    } else {
        config.eos.clone()
    };
    let prompt = &request.prompt;
    // The last token is never fed back, hence one more than there are positions left.
    let room = context - prompt.len() + 1;
    let n = request.tokens.map_or(room, |n| n.min(room));
    let mut out = Generated {
        ids: Vec::new(),
        finish_reason: FinishReason::Length,
        logits: Vec::new(),
        held: 0,
        drafted: 0,
        accepted: 0,
        passes: 0,
        prompt_time: Duration::ZERO,
        decode_time: Duration::ZERO,
    };
    if n == 0 {
        return Ok(out);
    }
    let wanted = match request.speculate {
        0 => Wanted::Last,
        k => Wanted::Tail(k + 1),
    };
    let capacity = request.positions(context);
    // The last token's logits are wanted, so it is read whatever is held.
    let mut held = request.held.min(prompt.len() - 1);
    if held == 0 || !engine.resume(held, capacity, wanted) {
        engine.begin(capacity.max(request.room), wanted)?;
        held = 0;
    }
    out.held = held;
    let start = Instant::now();
    let mut logits = Vec::new();
    let rest = &prompt[held..];
    let at_once = engine.config().batch;
    let batches = rest.len().div_ceil(at_once);
    for (i, batch) in rest.chunks(at_once).enumerate() {
        if interrupt::requested() {
            out.finish_reason = FinishReason::Interrupted;
            out.prompt_time = start.elapsed();
            return Ok(out);
        }
        let wanted = if i + 1 == batches {
            Wanted::Last
        } else {
            Wanted::None
        };
        engine.forward_into(batch, wanted, &mut logits)?;
        on_prompt(held + i * at_once + batch.len(), prompt.len());
    }
    out.prompt_time = start.elapsed();
    let start = Instant::now();
    let mut sampler = Sampler::new(request.sampling);
    let vocab = engine.config().vocab;
    // Logits are of the token before the drafts and of each draft; `row` is where the sequence is.
    let (mut drafts, mut row) = (Vec::new(), 0);
    let mut in_passes = Duration::ZERO;
    loop {
        let of = &logits[row * vocab..][..vocab];
        // Of one row alone the engine has looked at it.
        if !drafts.is_empty() {
            check_finite(of, prompt.len() + out.ids.len() - 1)?;
        }
        let id = sampler.choose(of);
        if request.keep_logits {
            out.logits.extend_from_slice(of);
        }
        out.ids.push(id);
        let go_on = on_token(id);
        if eos.contains(&id) {
            out.finish_reason = FinishReason::Stop;
            break;
        }
        if out.ids.len() == n {
            break;
        }
        if go_on.is_break() || interrupt::requested() {
            out.finish_reason = FinishReason::Interrupted;
            break;
        }
        if drafts.get(row) == Some(&id) {
            out.accepted += 1;
            row += 1;
            continue;
        }
        engine.roll_back(drafts.len() - row);
        let most = request.speculate.min(n - out.ids.len() - 1);
        drafts = if most > 0 {
            engine.draft(id, most)?
        } else {
            Vec::new()
        };
        out.drafted += drafts.len();
        out.passes += 1;
        let batch: Vec<u32> = [id].into_iter().chain(drafts.iter().copied()).collect();
        let wanted = match drafts.len() {
            0 => Wanted::Last,
            k => Wanted::Tail(k + 1),
        };
        let pass = Instant::now();
        engine.forward_into(&batch, wanted, &mut logits)?;
        in_passes += pass.elapsed();
        row = 0;
    }
    // What the sequence holds are the prompt and all that was generated but for the last token.
    engine.roll_back(drafts.len() - row);
    out.decode_time = start.elapsed();
    tracing::debug!(
        "{} passes in {in_passes:?} of {:?}",
        out.passes,
        out.decode_time
    );
    Ok(out)
}
