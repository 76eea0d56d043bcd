//! The command line: arguments, what goes to which stream, exit codes.
//!
//! Results go to stdout and nothing else does; 0 is success, 1 a failure that one line on stderr
//! explains, 2 wrong usage (clap's).

mod bench;
mod chat;
mod convert;
mod doctor;
mod eval;
mod generate;
mod inspect;
mod pack;
mod plan;
mod synth;
pub mod ui;
mod verify;

use std::io::{self, ErrorKind, IsTerminal};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "host", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text from a prompt
    Generate(generate::GenerateArgs),
    /// Talk with a model
    Chat(chat::ChatArgs),
    /// Mean negative log-likelihood of given tokens, in nats
    Eval(eval::EvalArgs),
    /// Make a model directory from a Hugging Face checkpoint
    Convert(convert::ConvertArgs),
    /// Make an archive of a model's experts, entropy-coded
    Pack(pack::PackArgs),
    /// Decode every record of an archive and check it
    Verify(verify::VerifyArgs),
    /// What is in an archive: header, tables, ratios beside their entropy
    Inspect(inspect::InspectArgs),
    /// What this machine has to run on, and what is missing
    Doctor(doctor::DoctorArgs),
    /// Where a model's experts would go on this machine, and how fast it would be
    Plan(plan::PlanArgs),
    /// Make a model of a real one's geometry, with random weights
    Synth(synth::SynthArgs),
    /// Time kernels
    Bench(bench::BenchArgs),
}

/// Parses the command line and runs it.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("ANSATZ_LOG")
                .unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .init();
    let done = match cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Pack(args) => pack::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Synth(args) => synth::run(args),
        Command::Bench(args) => bench::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read our output has had enough.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            ui::end_line();
            ui::note!("error: {}", message(&e));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes on one line; errors that quote their cause do not have it said twice.
fn message(e: &anyhow::Error) -> String {
    let mut text = e.to_string();
    for cause in e.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_broken_pipe(e: &anyhow::Error) -> bool {
    e.chain()
        .filter_map(|c| c.downcast_ref::<io::Error>())
        .any(|e| e.kind() == ErrorKind::BrokenPipe)
}
