//! `host bench decode`: what a token takes in a whole model whose routing is a trace's, in one placement
//! or in two that are compared.
//!
//! Every token goes through the model as in generation, one at a time, logits and all; only which experts
//! it chooses comes from the trace ([`crate::trace`]), so that two runs do the same work. Two placements
//! are run A, B, B, A in one process, so that a machine that slows down or speeds up meanwhile favours
//! neither; each is loaded alone, B once for both of its runs. What a token takes is the median over the
//! tokens of both runs of a placement.

use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use crate::backend::split::Split;
use crate::engine::{self, Engine, EngineError, Options, Placement};
use crate::interrupt;
use crate::model::Wanted;
use crate::trace::Trace;

/// A model somewhere.
#[derive(Clone, Debug)]
pub struct Side {
    /// As the user wrote it.
    pub name: String,
    /// Model directory.
    pub dir: PathBuf,
    /// Device, placement, positions.
    pub options: Options,
}

/// How much is run.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Tokens before those that are timed.
    pub warmup: usize,
    /// Tokens that are timed.
    pub tokens: usize,
    /// Tokens behind a placement's last run that are split into parts.
    pub split: usize,
    /// Tokens of a prompt that is split likewise behind that, some times.
    pub prompt: usize,
}

/// Passes over a prompt that are split into parts, behind one that is not counted.
const PROMPTS: usize = 3;

impl Amount {
    fn prompts(&self) -> usize {
        (PROMPTS + 1) * self.prompt
    }

    /// Positions of a run, and of what is behind the last one.
    pub fn positions(&self) -> usize {
        // The first one is recorded.
        let split = if self.split > 0 { self.split + 1 } else { 0 };
        self.warmup + self.tokens + split + self.prompts()
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Stopped by the user.
    #[error("interrupted")]
    Interrupted,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// `a` or `b`.
    pub side: char,
    /// Microseconds of each timed token.
    pub token_us: Vec<f64>,
    /// Tokens a second, all timed tokens together.
    pub tokens_per_s: f64,
}

/// Share of a tier.
#[derive(Clone, Debug, Serialize)]
pub struct Share {
    /// Which.
    pub tier: &'static str,
    /// Its experts.
    pub experts: usize,
    /// Bytes that they take.
    pub bytes: u64,
    /// Share of all selections; none where the tiers are not told apart.
    pub share: Option<f64>,
}

/// A placement's runs together.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// As the user wrote it.
    pub name: String,
    /// Median microseconds of a token.
    pub median_us: f64,
    /// Its inverse.
    pub tokens_per_s: f64,
    /// Mean microseconds, which is what a plan predicts.
    pub mean_us: f64,
    /// Microseconds that the plan predicted.
    pub predicted_us: Option<u64>,
    /// Seconds of each load.
    pub load_s: Vec<f64>,
    /// Where the experts are.
    pub tiers: Vec<Share>,
    /// Experts in device memory.
    pub vram_experts: usize,
    /// What some further tokens took where, events between the parts included; none without kernels.
    pub split: Option<Split>,
    /// The same of passes over a short prompt.
    pub prompt: Option<Split>,
    /// Experts that changed places in the runs since its last load, where they may.
    pub moved: Option<u64>,
}

/// All that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The device, for people.
    pub device: String,
    /// Tokens of a run that were timed.
    pub tokens: usize,
    /// Runs in the order in which they were made.
    pub runs: Vec<Run>,
    /// The first placement.
    pub a: Summary,
    /// The second.
    pub b: Option<Summary>,
    /// How many times as fast B is as A.
    pub speedup: Option<f64>,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// Memory that a placement has had goes back to the system, so that the next one can be planned with it.
fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            safe fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        malloc_trim(0);
    }
}

/// What is known of a side so far.
struct State<'a> {
    side: &'a Side,
    letter: char,
    load_s: Vec<f64>,
    placement: Option<Placement>,
    split: Option<Split>,
    prompt: Option<Split>,
}

/// Any tokens will do, the same in every run.
fn token(position: usize, vocab: usize) -> u32 {
    ((position * 7919 + 11) % vocab) as u32
}

impl<'a> State<'a> {
    fn new(side: &'a Side, letter: char) -> Self {
        Self {
            side,
            letter,
            load_s: Vec::new(),
            placement: None,
            split: None,
            prompt: None,
        }
    }

    fn load(
        &mut self,
        trace: &Trace,
        progress: &mut dyn FnMut(char, usize, usize),
    ) -> Result<Box<dyn Engine>, DecodeError> {
        let start = Instant::now();
        let (dir, options) = (&self.side.dir, self.side.options.clone());
        let letter = self.letter;
        let mut engine = engine::open(dir, options, |done, all| progress(letter, done, all))?;
        engine.replay(trace)?;
        self.load_s.push(start.elapsed().as_secs_f64());
        Ok(engine)
    }

    fn run(&mut self, engine: &mut dyn Engine, amount: Amount) -> Result<Run, DecodeError> {
        let vocab = engine.config().vocab;
        engine.begin(amount.positions(), Wanted::Last)?;
        let (mut token_us, mut logits) = (Vec::with_capacity(amount.tokens), Vec::new());
        for t in 0..amount.warmup + amount.tokens {
            if interrupt::requested() {
                return Err(DecodeError::Interrupted);
            }
            let start = Instant::now();
            engine.forward_into(&[token(t, vocab)], Wanted::Last, &mut logits)?;
            if t >= amount.warmup {
                token_us.push(1e6 * start.elapsed().as_secs_f64());
            }
        }
        self.placement = Some(engine.placement());
        Ok(Run {
            side: self.letter,
            tokens_per_s: 1e6 * token_us.len() as f64 / token_us.iter().sum::<f64>(),
            token_us,
        })
    }

    /// Behind a run: further tokens, in parts. The engine is not used again: that this fails is said, and
    /// loses nothing that was timed.
    fn split(&mut self, engine: Box<dyn Engine>, amount: Amount) {
        if let Err(e) = self.split_or_fail(engine, amount) {
            tracing::warn!("no time in parts: {e}");
        }
    }

    fn split_or_fail(
        &mut self,
        mut engine: Box<dyn Engine>,
        amount: Amount,
    ) -> Result<(), EngineError> {
        let vocab = engine.config().vocab;
        let ids: Vec<u32> = (0..amount.positions()).map(|t| token(t, vocab)).collect();
        let (tokens, prompts) = ids.split_at(ids.len() - amount.prompts());
        let tokens = &tokens[amount.warmup + amount.tokens..];
        if !tokens.is_empty() {
            self.split = engine.split(tokens, 1)?;
        }
        if amount.prompt > 0 {
            self.prompt = engine.split(prompts, amount.prompt)?;
        }
        Ok(())
    }

    fn summary(self, runs: &[Run]) -> Summary {
        let mut all: Vec<f64> = (runs.iter())
            .filter(|r| r.side == self.letter)
            .flat_map(|r| r.token_us.iter().copied())
            .collect();
        let median_us = median(&mut all);
        let mean_us = all.iter().sum::<f64>() / all.len() as f64;
        let (tiers, predicted_us, moved) = match self.placement {
            Some(p) => (p.tiers, p.predicted_us, p.moved),
            None => (Vec::new(), None, None),
        };
        let known: Option<u64> = tiers.iter().map(|t| t.selections).sum();
        let vram = |name: &str| name.starts_with("vram");
        Summary {
            name: self.side.name.clone(),
            median_us,
            tokens_per_s: 1e6 / median_us,
            mean_us,
            predicted_us,
            moved,
            split: self.split,
            prompt: self.prompt,
            load_s: self.load_s,
            vram_experts: (tiers.iter())
                .filter(|t| vram(t.tier))
                .map(|t| t.experts)
                .sum(),
            tiers: (tiers.into_iter())
                .map(|t| Share {
                    tier: t.tier,
                    experts: t.experts,
                    bytes: t.bytes,
                    share: match (t.selections, known) {
                        (Some(n), Some(all)) if all > 0 => Some(n as f64 / all as f64),
                        _ => None,
                    },
                })
                .collect(),
        }
    }
}

/// Runs `a` twice, or `a` and `b` as A, B, B, A. `progress` gets which side is loaded, bytes done, and
/// bytes.
pub fn measure(
    a: &Side,
    b: Option<&Side>,
    trace: &Trace,
    amount: Amount,
    progress: &mut dyn FnMut(char, usize, usize),
) -> Result<Report, DecodeError> {
    let mut runs = Vec::new();
    let mut first = State::new(a, 'a');
    let mut second = b.map(|b| State::new(b, 'b'));
    let mut engine = first.load(trace, progress)?;
    runs.push(first.run(engine.as_mut(), amount)?);
    if let Some(second) = &mut second {
        drop(engine);
        give_back();
        engine = second.load(trace, progress)?;
        for _ in 0..2 {
            runs.push(second.run(engine.as_mut(), amount)?);
        }
        second.split(engine, amount);
        give_back();
        engine = first.load(trace, progress)?;
    }
    runs.push(first.run(engine.as_mut(), amount)?);
    let device = engine.placement().device;
    first.split(engine, amount);
    let (a, b) = (first.summary(&runs), second.map(|s| s.summary(&runs)));
    Ok(Report {
        device,
        tokens: amount.tokens,
        speedup: b.as_ref().map(|b| a.median_us / b.median_us),
        runs,
        a,
        b,
    })
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} us a token, {:.2} tokens/s",
            self.median_us, self.tokens_per_s
        )?;
        if let Some(us) = self.predicted_us {
            write!(f, "; mean {:.1} us, predicted {us}", self.mean_us)?;
        }
        let loads: Vec<String> = self.load_s.iter().map(|s| format!("{s:.1}")).collect();
        write!(f, "; loaded in {} s", loads.join(", "))?;
        if let Some(moved) = self.moved {
            write!(f, "; {moved} experts moved to device memory")?;
        }
        for t in &self.tiers {
            let mb = t.bytes as f64 / 1e6;
            write!(
                f,
                "\n     {:9} {:6} experts {mb:>12.1} MB",
                t.tier, t.experts
            )?;
            if let Some(share) = t.share {
                write!(f, " {:6.2}% of selections", 100.0 * share)?;
            }
        }
        if let Some(split) = &self.split {
            write!(f, "\n     a token in parts: {split}")?;
        }
        if let Some(prompt) = &self.prompt {
            write!(f, "\n     a prompt in parts: {prompt}")?;
        }
        Ok(())
    }
}

/// For people.
impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{}; medians of 2 runs of {} tokens",
            self.device, self.tokens
        )?;
        let order: Vec<String> = (self.runs.iter())
            .map(|r| format!("{} {:.2}", r.side.to_ascii_uppercase(), r.tokens_per_s))
            .collect();
        writeln!(f, "runs, tokens/s: {}", order.join(", "))?;
        writeln!(f, "A  {}\n   {}", self.a.name, self.a)?;
        if let (Some(b), Some(speedup)) = (&self.b, self.speedup) {
            writeln!(f, "B  {}\n   {b}", b.name)?;
            let (from, to) = (self.a.vram_experts, b.vram_experts);
            write!(f, "B against A: {:+.1}% tokens/s", 100.0 * (speedup - 1.0))?;
            if from > 0 {
                let more = to as f64 / from as f64 - 1.0;
                write!(
                    f,
                    "; experts in device memory {from} -> {to} ({:+.1}%)",
                    100.0 * more
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&mut []).is_nan());
    }
}
