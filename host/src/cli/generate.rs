//! `host generate`.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use super::plan::BudgetArgs;
use super::ui::{self, Progress};
use crate::backend::KvFormat;
use crate::engine::{self, Device, Engine, Options};
use crate::expert::{Form, Tier};
use crate::generate::{FinishReason, Generated, Request, generate};
use crate::interrupt;
use crate::model::{BATCH, Config, ModelError};
use crate::placement::request::read_profile;
use crate::sample::Sampling;
use crate::tokenizer::Tokenizer;
use crate::whole;

/// Which model, on what.
#[derive(Args)]
pub struct EngineArgs {
    /// Model directory [default: $ANSATZ_MODEL, else the repository's models/sotu-row]
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Where to compute
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceArg,
    /// Experts as int4 or entropy-coded [default: ans where there is an archive]
    #[arg(long, value_enum)]
    tier: Option<TierArg>,
    /// Coded experts: decode and multiply at once, or one after the other
    #[arg(long, value_enum, default_value = "fused")]
    kernel: KernelArg,
    #[command(flatten)]
    sequence: SequenceArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    /// GPUs to spread experts over, by number; one given twice is two of them. Experts outside device memory
    /// are the fastest one's
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    devices: Vec<u32>,
    /// Let at most N experts change places between two tokens, so that those that are chosen now are in
    /// device memory, of several devices that of the first [N: 1]; tokens stay what they are
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", default_value = "0",
          hide_default_value = true, value_parser = moves)]
    repin: usize,
}

/// Experts that change places between two tokens.
pub(super) fn moves(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n <= MOST_MOVES => Ok(n),
        _ => Err(format!("a number from 0 to {MOST_MOVES}")),
    }
}

const MOST_MOVES: usize = 64;

#[derive(Args)]
pub struct SequenceArgs {
    /// Numbers of the KV cache: as computed, or rounded to bf16, in half the memory; the indexer's keys
    /// stay f32
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "f32")]
    kv: KvArg,
    /// Tokens of a prompt that go through the model together: more are faster, and take memory
    #[arg(long, value_name = "N", default_value_t = BATCH, value_parser = batch)]
    pub batch: usize,
}

pub(super) fn batch(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MOST_TOGETHER).contains(&n) => Ok(n),
        _ => Err(format!("a number from 1 to {MOST_TOGETHER}")),
    }
}

const MOST_TOGETHER: usize = 1 << 14;

#[derive(Clone, Copy, ValueEnum)]
enum KvArg {
    F32,
    Bf16,
}

impl SequenceArgs {
    pub fn format(&self) -> KvFormat {
        match self.kv {
            KvArg::F32 => KvFormat::F32,
            KvArg::Bf16 => KvFormat::Bf16,
        }
    }
}

#[derive(Args)]
pub struct SpeculateArgs {
    /// Let the model's own layer for that draft N tokens ahead, which one pass then checks [N: 1];
    /// tokens stay what they are
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", default_value = "0",
          hide_default_value = true, value_parser = drafts)]
    pub speculate: usize,
}

/// Tokens to draft.
fn drafts(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n <= MOST_DRAFTS => Ok(n),
        _ => Err(format!("a number from 0 to {MOST_DRAFTS}")),
    }
}

const MOST_DRAFTS: usize = 15;

#[derive(Clone, Copy, ValueEnum)]
enum DeviceArg {
    Auto,
    Cpu,
    Cuda,
    #[value(hide = true)]
    Emulator,
    #[value(hide = true)]
    Reference,
}

#[derive(Clone, Copy, ValueEnum)]
enum TierArg {
    Raw,
    Ans,
}

#[derive(Clone, Copy, ValueEnum)]
enum KernelArg {
    Fused,
    Unfused,
}

impl EngineArgs {
    /// The model's directory.
    pub fn directory(&self) -> anyhow::Result<PathBuf> {
        match &self.model {
            Some(dir) => Ok(dir.clone()),
            None => crate::model::default_directory()
                .context("no model: give one with -m DIR or set ANSATZ_MODEL"),
        }
    }

    /// Loads the model, for sequences of `positions` and so many drafts, and says on stderr where it
    /// went. No more than `longest` tokens will go through it together, where that is known.
    pub fn open(
        &self,
        dir: &Path,
        positions: usize,
        speculate: usize,
        longest: Option<usize>,
    ) -> anyhow::Result<Box<dyn Engine>> {
        let batch = self.sequence.batch;
        anyhow::ensure!(
            (1..=256).contains(&self.devices.len()),
            "--devices: expected 1 to 256 of them"
        );
        let options = Options {
            device: match self.device {
                DeviceArg::Auto => Device::Auto,
                DeviceArg::Cpu => Device::Cpu,
                DeviceArg::Cuda => Device::Cuda,
                DeviceArg::Emulator => Device::Emulator,
                DeviceArg::Reference => Device::Reference,
            },
            tier: self.tier.map(|t| match t {
                TierArg::Raw => Tier::Raw,
                TierArg::Ans => Tier::Ans,
            }),
            form: match self.kernel {
                KernelArg::Fused => Form::Fused,
                KernelArg::Unfused => Form::Unfused,
            },
            speculate,
            repin: self.repin,
            devices: self.devices.clone(),
            request: self.budget.request(positions),
            placed: self.budget.any(),
            positions,
            kv: self.sequence.format(),
            batch: longest.map_or(batch, |tokens| tokens.min(batch)),
        };
        let mut progress = Progress::bytes("loading");
        let engine = engine::open(dir, options, |done, all| progress.set(done, all));
        progress.finish();
        let engine = engine?;
        ui::note!("{}: {}", dir.display(), engine.placement());
        if self.repin > 0 && engine.placement().moved.is_none() {
            ui::note!("--repin: all experts are in one place, and stay there");
        }
        if self.budget.asks_of_plan() && engine.placement().predicted_us.is_none() {
            ui::note!(
                "--profile, --rates and --calibrate are for plans, and this was placed without one; \
                 --vram-budget asks for one"
            );
        }
        Ok(engine)
    }
}

#[derive(Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    speculation: SpeculateArgs,
    /// Tokens to generate at most; -1: until an end token or a full context
    #[arg(short = 'n', long = "predict", visible_alias = "n-predict", value_name = "N",
          default_value_t = 256, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..))]
    predict: i64,
    /// Positions at most [default: what the model has]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    temp: f32,
    /// Choose among the N likeliest tokens; 0: all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 40,
        allow_negative_numbers = true
    )]
    top_k: usize,
    /// Choose among the fewest tokens that are this likely together
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = probability,
          allow_negative_numbers = true)]
    top_p: f32,
    /// Seed of the random numbers; -1: a new one, printed
    #[arg(short, long, value_name = "SEED", default_value = "-1", value_parser = seed,
          allow_negative_numbers = true)]
    seed: Seed,
    /// Go on past end tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Write the logits each token was chosen from: safetensors, `logits` f32 [generated, vocab]
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Add which experts were chosen to a usage profile
    #[arg(long, value_name = "FILE")]
    usage: Option<PathBuf>,
    /// Write how each token of prompt and answer was routed, for `host bench decode --replay`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object at the end instead of the text
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct PromptArgs {
    /// Prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File with the prompt, UTF-8, - for standard input; a newline at its end is not part of it
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Prompt as token ids, taken as they are
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    prompt_ids: Option<Vec<u32>>,
}

pub(super) fn temperature(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(t) if (0.0..=1000.0).contains(&t) => Ok(t),
        _ => Err("a number from 0 to 1000".into()),
    }
}

/// `None`: whatever comes.
#[derive(Clone, Copy)]
pub(super) struct Seed(pub Option<u64>);

pub(super) fn seed(text: &str) -> Result<Seed, String> {
    match text.parse() {
        Ok(n) => Ok(Seed(Some(n))),
        Err(_) if text == "-1" => Ok(Seed(None)),
        Err(_) => Err(format!("a number from 0 to {}, or -1", u64::MAX)),
    }
}

pub(super) fn probability(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("a number above 0, at most 1".into()),
    }
}

impl PromptArgs {
    fn ids(&self, dir: &Path, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Vec<u32>> {
        if let Some(ids) = &self.prompt_ids {
            return Ok(ids.clone());
        }
        let text = match (&self.prompt, &self.file) {
            (Some(text), _) => text.clone(),
            (None, Some(file)) => {
                let read = match file.to_str() {
                    Some("-") => std::io::read_to_string(std::io::stdin()),
                    _ => std::fs::read_to_string(file),
                };
                let mut text = read.with_context(|| {
                    let file = file.display();
                    format!("{file}: the prompt cannot be read; give a file of UTF-8 text")
                })?;
                if text.ends_with('\n') {
                    text.pop();
                }
                text
            }
            (None, None) => unreachable!("clap asks for one of the three"),
        };
        let tokenizer = tokenizer.with_context(|| {
            format!(
                "{}: no tokenizer.json; give the prompt with --prompt-ids",
                dir.display()
            )
        })?;
        Ok(tokenizer.encode(&text)?)
    }
}

pub fn run(args: GenerateArgs) -> anyhow::Result<()> {
    interrupt::install();
    let dir = args.engine.directory()?;
    let config = Config::read(&dir)?;
    let tokenizer = Tokenizer::read(&dir, &config)?;
    let seed = args.seed.0.unwrap_or_else(fresh_seed);
    let request = Request {
        prompt: args.prompt.ids(&dir, tokenizer.as_ref())?,
        tokens: usize::try_from(args.predict).ok(),
        context: args.ctx_size,
        sampling: Sampling {
            temp: args.temp,
            top_k: args.top_k,
            top_p: args.top_p,
            seed,
        },
        ignore_eos: args.ignore_eos,
        keep_logits: args.logits.is_some(),
        speculate: args.speculation.speculate,
        held: 0,
        room: 0,
    };
    // What will not do is refused before the model loads.
    let context = request.check(&config)?;
    // What is written at the end can be, as far as can be told now.
    let files = [
        ("logits", &args.logits),
        ("usage", &args.usage),
        ("trace", &args.trace),
    ];
    for (option, file) in files {
        if let Some(file) = file {
            whole::check(file).with_context(|| {
                let file = file.display();
                format!(
                    "--{option} {file}: it cannot be written; give a file in a folder that can be"
                )
            })?;
        }
    }
    if let Some(file) = args.usage.as_ref().filter(|f| f.exists()) {
        read_profile(Some(file), &dir, &config)?;
    }
    let start = Instant::now();
    let positions = request.positions(context);
    let longest = request.prompt.len().max(request.speculate + 1);
    let mut engine = (args.engine).open(&dir, positions, request.speculate, Some(longest))?;
    let load_time = start.elapsed();
    if args.usage.is_some() {
        engine.record_usage();
    }
    if args.trace.is_some() {
        engine.record_trace();
    }
    if args.temp > 0.0 {
        ui::note!("seed {seed}");
    }
    if tokenizer.is_none() {
        ui::note!("{}: no tokenizer.json, so no text", dir.display());
    }

    let mut stream = tokenizer.as_ref().map(Tokenizer::stream);
    let mut text = String::new();
    let mut failed: Option<anyhow::Error> = None;
    let mut emit = |piece: Result<String, ModelError>| -> anyhow::Result<()> {
        let piece = piece?;
        text.push_str(&piece);
        if !args.json && !piece.is_empty() {
            ui::out(&piece)?;
        }
        Ok(())
    };
    let mut progress = Some(Progress::new("reading the prompt"));
    let on_prompt = |done, all| {
        let Some(mut shown) = progress.take() else {
            return;
        };
        shown.set(done, all);
        if done == all {
            shown.finish(); // before the first token is written
        } else {
            progress = Some(shown);
        }
    };
    let generated = generate(engine.as_mut(), &request, on_prompt, |id| {
        match stream.as_mut().map_or(Ok(()), |s| emit(s.push(id))) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                failed = Some(e);
                ControlFlow::Break(())
            }
        }
    });
    if let Some(shown) = progress {
        shown.finish();
    }
    let generated = generated?;
    if failed.is_none()
        && let Some(stream) = &mut stream
    {
        failed = emit(stream.finish()).err();
    }
    // One that cannot be written after all takes none of the others with it.
    let mut failures: Vec<anyhow::Error> = Vec::new();
    if let (Some(file), Some(usage)) = (&args.usage, engine.usage()) {
        failures.extend(usage.record(file).err().map(Into::into));
    }
    if let (Some(file), Some(trace)) = (&args.trace, engine.trace()) {
        failures.extend(trace.write(file).err().map(Into::into));
    }
    if let Some(file) = &args.logits {
        failures.extend(write_logits(file, &generated, engine.config().vocab).err());
    }
    // A reader that has had enough is no failure that hides others.
    let failed = failed.filter(|e| failures.is_empty() || !super::is_broken_pipe(e));
    let mut failures = failed.into_iter().chain(failures);
    if let Some(first) = failures.next() {
        ui::end_line();
        failures.for_each(|e| tracing::warn!("{}", super::message(&e)));
        return Err(first);
    }
    if args.json {
        let object = json!({
            "text": text,
            "prompt_ids": request.prompt,
            "token_ids": generated.ids,
            "finish_reason": generated.finish_reason,
            "seed": seed,
            "timings": timings(&request, &generated, load_time),
            "speculation": speculation(&request, &generated),
            "placement": engine.placement(),
            "memory_bytes": private_memory(),
        });
        ui::out(&format!("{object}\n"))?;
    } else if std::io::stdout().is_terminal() {
        ui::out("\n")?;
    }
    if generated.finish_reason == FinishReason::Interrupted {
        ui::note!("interrupted");
    }
    if let Some(hits) = engine.placement().hits() {
        ui::note!("selections: {hits}");
    }
    if let Some(moved) = engine.placement().moved {
        ui::note!("{moved} experts moved to device memory");
    }
    if request.speculate > 0 {
        ui::note!(
            "speculation: {} of {} drafts accepted ({:.1}%), {:.2} tokens and {:.2} ms a pass",
            generated.accepted,
            generated.drafted,
            100.0 * share(generated.accepted, generated.drafted),
            share(generated.ids.len().saturating_sub(1), generated.passes),
            1e3 * generated.decode_time.as_secs_f64() / generated.passes.max(1) as f64,
        );
    }
    ui::note!(
        "load {:.2} s; prompt {} tokens, {:.1} tokens/s; generated {} tokens, {:.1} tokens/s",
        load_time.as_secs_f64(),
        request.prompt.len(),
        rate(request.prompt.len(), generated.prompt_time),
        generated.ids.len(),
        rate(generated.ids.len().saturating_sub(1), generated.decode_time),
    );
    Ok(())
}

/// Bytes of this process's memory that no file stands behind; none where the system does not say.
fn private_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    Some(1024 * line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?)
}

pub(super) fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        tokens as f64 / time.as_secs_f64()
    }
}

fn share(of: usize, all: usize) -> f64 {
    of as f64 / all.max(1) as f64
}

/// What became of drafts; none without them.
fn speculation(request: &Request, generated: &Generated) -> Option<serde_json::Value> {
    (request.speculate > 0).then(|| {
        json!({
            "drafted": generated.drafted,
            "accepted": generated.accepted,
            "acceptance_rate": share(generated.accepted, generated.drafted),
            "passes": generated.passes,
            "pass_s": generated.decode_time.as_secs_f64() / generated.passes.max(1) as f64,
        })
    })
}

/// Times in seconds, rates in tokens a second; the first generated token counts as the prompt's.
fn timings(request: &Request, generated: &Generated, load_time: Duration) -> serde_json::Value {
    json!({
        "load_s": load_time.as_secs_f64(),
        "prompt_tokens": request.prompt.len(),
        "prompt_s": generated.prompt_time.as_secs_f64(),
        "prompt_tokens_per_s": rate(request.prompt.len(), generated.prompt_time),
        "generated_tokens": generated.ids.len(),
        "decode_s": generated.decode_time.as_secs_f64(),
        "decode_tokens_per_s":
            rate(generated.ids.len().saturating_sub(1), generated.decode_time),
    })
}

/// Writes `logits`, whole or not at all.
fn write_logits(file: &Path, generated: &Generated, vocab: usize) -> anyhow::Result<()> {
    let write = || -> anyhow::Result<()> {
        let bytes: Vec<u8> = generated
            .logits
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let shape = vec![generated.ids.len(), vocab];
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, &bytes)?;
        let all = safetensors::serialize([("logits", view)], None)?;
        whole::write(file, ".logits-", |out| out.write_all(&all))?;
        Ok(())
    };
    write().with_context(|| format!("{}: the logits cannot be written", file.display()))
}
