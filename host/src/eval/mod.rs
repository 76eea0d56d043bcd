//! Negative log-likelihood of given tokens.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::engine::{Engine, EngineError};
use crate::files;
use crate::interrupt;
use crate::model::{CHUNK, Config, Wanted};

/// Why tokens cannot be scored.
#[derive(Debug, Error)]
pub enum EvalError {
    /// The file of tokens.
    #[error("{}: {source}; give a file of little-endian u16 token ids", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// Half a token.
    #[error("{}: length: expected an even number of bytes, found {bytes}; give a file of little-endian u16 token ids", file.display())]
    Odd {
        /// The file.
        file: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// A token that the model does not have.
    #[error(
        "token {at} of the file: expected an id below {vocab}, found {id}; give tokens of this model's tokenizer"
    )]
    Token {
        /// Its place.
        at: usize,
        /// The token.
        id: u32,
        /// `vocab_size`.
        vocab: usize,
    },
    /// Too few tokens.
    #[error("{windows} windows of {context} need {} tokens, the file has {tokens}; lower --windows or --context", *windows as u128 * *context as u128 + 1)]
    Short {
        /// Windows asked for.
        windows: usize,
        /// Inputs of each.
        context: usize,
        /// Tokens there are.
        tokens: usize,
    },
    /// Nothing to score.
    #[error("--windows 0: ask for 1 or more, or leave it out for all that the file holds")]
    NoWindows,
    /// A window longer than the model's positions.
    #[error("--context {asked}: the model has {max} positions; ask for 1 to {max}")]
    Context {
        /// What was asked for.
        asked: usize,
        /// `max_position_embeddings`.
        max: usize,
    },
    /// Stopped by the user.
    #[error("interrupted")]
    Interrupted,
    /// The engine's failure.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Reads little-endian u16 token ids.
pub fn read_ids(file: &Path) -> Result<Vec<u32>, EvalError> {
    let bytes = files::read(file).map_err(|source| EvalError::Io {
        file: file.into(),
        source,
    })?;
    let (pairs, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(EvalError::Odd {
            file: file.into(),
            bytes: bytes.len(),
        });
    }
    Ok(pairs
        .iter()
        .map(|b| u16::from_le_bytes(*b) as u32)
        .collect())
}

/// A mean over predicted tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Mean negative log-likelihood, nats a token.
    pub nll: f64,
    /// Tokens predicted.
    pub tokens: usize,
    /// Windows.
    pub windows: usize,
}

/// `-ln softmax(logits)[target]`, the sum of exponentials in f64.
pub fn nll(logits: &[f32], target: u32) -> f64 {
    let top = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)) as f64;
    let sum: f64 = logits.iter().map(|x| libm::exp(*x as f64 - top)).sum();
    top + libm::log(sum) - logits[target as usize] as f64
}

/// Refuses what cannot be scored; the number of windows. For use before the model is loaded, which
/// may take long.
pub fn check(
    config: &Config,
    ids: &[u32],
    context: usize,
    windows: Option<usize>,
) -> Result<usize, EvalError> {
    let (vocab, max) = (config.vocab, config.max_positions);
    if context == 0 || context > max {
        return Err(EvalError::Context {
            asked: context,
            max,
        });
    }
    let fit = ids.len().saturating_sub(1) / context;
    let windows = windows.unwrap_or(fit.max(1));
    if windows == 0 {
        return Err(EvalError::NoWindows);
    }
    if windows > fit {
        return Err(EvalError::Short {
            windows,
            context,
            tokens: ids.len(),
        });
    }
    let used = &ids[..windows * context + 1];
    match used.iter().position(|id| *id as usize >= vocab) {
        Some(at) => Err(EvalError::Token {
            at,
            id: used[at],
            vocab,
        }),
        None => Ok(windows),
    }
}

/// Windows of `context` inputs start at 0, `context`, `2 * context`, …; each is a sequence of its
/// own and predicts the tokens that follow its inputs. `windows` of them, by default as many as
/// fit. `progress` gets `(windows done, windows)`.
pub fn eval(
    engine: &mut dyn Engine,
    ids: &[u32],
    context: usize,
    windows: Option<usize>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Score, EvalError> {
    let windows = check(engine.config(), ids, context, windows)?;
    let vocab = engine.config().vocab;
    let used = &ids[..windows * context + 1];
    let mut total = 0.0;
    for w in 0..windows {
        engine.begin(context, Wanted::All)?;
        let inputs = &used[w * context..(w + 1) * context];
        let targets = &used[w * context + 1..(w + 1) * context + 1];
        // In batches, so that the logits held are bounded.
        for (inputs, targets) in inputs.chunks(CHUNK).zip(targets.chunks(CHUNK)) {
            if interrupt::requested() {
                return Err(EvalError::Interrupted);
            }
            let logits = engine.forward(inputs, Wanted::All)?;
            for (row, target) in logits.chunks(vocab).zip(targets) {
                total += nll(row, *target);
            }
        }
        progress(w + 1, windows);
    }
    let tokens = windows * context;
    Ok(Score {
        nll: total / tokens as f64,
        tokens,
        windows,
    })
}

#[cfg(test)]
mod tests {
    use super::nll;

    #[test]
    fn nll_of_known_distributions() {
        assert!((nll(&[3.0; 4], 2) - 4.0f64.ln()).abs() < 1e-12);
        // 1000 + ln(1 + e^-1000) without overflow.
        assert!((nll(&[-1000.0, 0.0], 0) - 1000.0).abs() < 1e-9);
    }
}
