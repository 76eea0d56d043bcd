//! `host chat`.

use std::io::IsTerminal;
use std::ops::ControlFlow;

use anyhow::{Context, bail};
use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::generate::{
    EngineArgs, Seed, SpeculateArgs, fresh_seed, probability, seed, temperature,
};
use super::ui;
use crate::chat::{Message, Role, Template, spoken};
use crate::generate::{FinishReason, GenerateError, Request, generate};
use crate::interrupt;
use crate::model::Config;
use crate::sample::Sampling;
use crate::tokenizer::Tokenizer;

/// Tokens that end an answer whatever the configuration says: another speaker's turn.
const TURNS: [&str; 3] = ["<|user|>", "<|system|>", "<|observation|>"];

#[derive(Args)]
pub struct ChatArgs {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    speculation: SpeculateArgs,
    /// Instructions before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Let the model think first, where its template knows how
    #[arg(long)]
    think: bool,
    /// Tokens of an answer at most
    #[arg(
        short = 'n',
        long = "predict",
        visible_alias = "n-predict",
        value_name = "N",
        default_value_t = 2048
    )]
    predict: usize,
    /// Positions at most [default: what the model has]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    temp: f32,
    /// Choose among the N likeliest tokens; 0: all
    #[arg(long, value_name = "N", default_value_t = 40)]
    top_k: usize,
    /// Choose among the fewest tokens that are this likely together
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = probability)]
    top_p: f32,
    /// Seed of the random numbers; -1: a new one, printed
    #[arg(short, long, value_name = "SEED", default_value = "-1", value_parser = seed,
          allow_negative_numbers = true)]
    seed: Seed,
}

const HELP: &str = "/clear begins anew, /exit or Ctrl-D ends; Ctrl-C stops an answer";

pub fn run(args: ChatArgs) -> anyhow::Result<()> {
    interrupt::install();
    let dir = args.engine.directory()?;
    let config = Config::read(&dir)?;
    let tokenizer = Tokenizer::read(&dir, &config)?.with_context(|| {
        let dir = dir.display();
        format!("{dir}: no tokenizer.json; copy it from the checkpoint")
    })?;
    let template = Template::read(&dir)?;
    let turns: Vec<u32> = TURNS.iter().filter_map(|t| tokenizer.id(t)).collect();
    let (positions, max) = (
        args.ctx_size.unwrap_or(config.max_positions),
        config.max_positions,
    );
    if !(1..=max).contains(&positions) {
        let asked = positions;
        return Err(GenerateError::Context { asked, max }.into());
    }
    let mut engine = args
        .engine
        .open(&dir, positions, args.speculation.speculate, None)?;
    if !template.is_own() {
        ui::note!("{}: no chat template, so GLM's form is used", dir.display());
    }
    let mut sampling = Sampling {
        temp: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed.0.unwrap_or_else(fresh_seed),
    };
    if args.temp > 0.0 {
        ui::note!("seed {}", sampling.seed);
    }
    let people = std::io::stdin().is_terminal();
    if people {
        ui::note!("{HELP}");
    }
    let mut editor = DefaultEditor::new().context("the terminal cannot be read")?;
    let begin = || -> Vec<Message> {
        let system = args.system.iter();
        system.map(|s| Message::new(Role::System, s)).collect()
    };
    let mut talk = begin();
    // Tokens of the engine's sequence.
    let mut held: Vec<u32> = Vec::new();
    loop {
        let line = match editor.readline(if people { "> " } else { "" }) {
            Ok(line) => line,
            Err(ReadlineError::Eof) => break,
            Err(ReadlineError::Interrupted) => {
                ui::note!("{HELP}");
                continue;
            }
            Err(e) => bail!("standard input: {e}"),
        };
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => break,
            "/clear" => {
                talk = begin();
                continue;
            }
            "/help" => {
                ui::note!("{HELP}");
                continue;
            }
            _ => (),
        }
        let _ = editor.add_history_entry(&line); // a line too many is only not recalled
        talk.push(Message::new(Role::User, line));
        let request = Request {
            prompt: tokenizer.encode_as_is(&template.render(&talk, args.think)?)?,
            tokens: Some(args.predict),
            context: args.ctx_size,
            sampling,
            ignore_eos: false,
            keep_logits: false,
            speculate: args.speculation.speculate,
            held: 0,
            room: 0,
        };
        // What the conversation had in common with this turn's text is there already. Room grows by
        // doubling, each time at the cost of reading all of it again.
        let same = held.iter().zip(&request.prompt).take_while(|(a, b)| a == b);
        let most = request.prompt.len() + args.predict;
        let request = Request {
            held: same.count(),
            room: most.next_power_of_two().min(positions),
            ..request
        };
        if let Err(e) = request.check(&config) {
            // What does not fit is taken back; the conversation may go on, or begin anew.
            talk.pop();
            if people {
                ui::note!("{e}; or /clear");
                continue;
            }
            return Err(e.into());
        }
        let mut answer = String::new();
        let mut stream = tokenizer.stream();
        let mut failed: Option<anyhow::Error> = None;
        let mut ended = false;
        let mut put = |piece: String| -> anyhow::Result<()> {
            answer.push_str(&piece);
            Ok(ui::out(&piece)?)
        };
        let done = generate(
            engine.as_mut(),
            &request,
            |_, _| (),
            |id| {
                if turns.contains(&id) {
                    ended = true;
                    return ControlFlow::Break(());
                }
                match stream.push(id).map_err(Into::into).and_then(&mut put) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(e) => {
                        failed = Some(e);
                        ControlFlow::Break(())
                    }
                }
            },
        );
        let stopped = interrupt::take();
        if let Some(e) = failed {
            return Err(e);
        }
        let done = done?;
        held = request.prompt;
        match done.ids.split_last() {
            Some((_, before)) => held.extend(before),
            None => held.clear(), // interrupted while the prompt was read
        }
        put(stream.finish()?)?;
        ui::out("\n")?;
        match done.finish_reason {
            FinishReason::Interrupted if stopped && !ended => ui::note!("stopped"),
            FinishReason::Length => ui::note!("no more room for this answer (-n, --ctx-size)"),
            _ => (),
        }
        talk.push(Message::new(Role::Assistant, spoken(&answer)));
        // Another answer, other random numbers.
        sampling.seed = sampling.seed.wrapping_add(1);
    }
    if let Some(moved) = engine.placement().moved {
        ui::note!("{moved} experts moved to device memory");
    }
    Ok(())
}
