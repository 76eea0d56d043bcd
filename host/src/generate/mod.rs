//! Generation of tokens from a prompt.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use crate::engine::{Engine, EngineError};
use crate::interrupt;
use crate::model::{CHUNK, Config, Wanted};
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
}

/// Generates; `on_prompt` gets `(prompt tokens done, prompt tokens)`, `on_token` each token as it is
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
        prompt_time: Duration::ZERO,
        decode_time: Duration::ZERO,
    };
    if n == 0 {
        return Ok(out);
    }
    engine.begin(prompt.len() + n - 1, Wanted::Last)?;
    let start = Instant::now();
    let mut logits = Vec::new();
    let batches = prompt.len().div_ceil(CHUNK);
    for (i, batch) in prompt.chunks(CHUNK).enumerate() {
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
        logits = engine.forward(batch, wanted)?;
        on_prompt(i * CHUNK + batch.len(), prompt.len());
    }
    out.prompt_time = start.elapsed();
    let start = Instant::now();
    let mut sampler = Sampler::new(request.sampling);
    loop {
        let id = sampler.choose(&logits);
        if request.keep_logits {
            out.logits.extend_from_slice(&logits);
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
        logits = engine.forward(&[id], Wanted::Last)?;
    }
    out.decode_time = start.elapsed();
    Ok(out)
}
