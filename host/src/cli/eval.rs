//! `host eval`.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::generate::EngineArgs;
use super::ui::{self, Progress};
use crate::eval::{check, eval, read_ids};
use crate::interrupt;
use crate::model::Config;

#[derive(Args)]
pub struct EvalArgs {
    #[command(flatten)]
    engine: EngineArgs,
    /// Token ids, little-endian u16
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// Inputs of a window; windows start at 0, N, 2N, …
    #[arg(long, value_name = "N", default_value_t = 512)]
    context: usize,
    /// Windows [default: as many as the file holds]
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: EvalArgs) -> anyhow::Result<()> {
    interrupt::install();
    let ids = read_ids(&args.ids)?;
    let dir = args.engine.directory()?;
    check(&Config::read(&dir)?, &ids, args.context, args.windows)?;
    let mut engine = args.engine.open(&dir, args.context, 0, None)?;
    let mut progress = Progress::new("windows");
    let start = Instant::now();
    let score = eval(
        engine.as_mut(),
        &ids,
        args.context,
        args.windows,
        |done, all| progress.set(done, all),
    );
    progress.finish();
    let score = score?;
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let object = json!({
            "nll": score.nll,
            "perplexity": score.nll.exp(),
            "tokens": score.tokens,
            "windows": score.windows,
            "context": args.context,
            "timings": { "eval_s": seconds, "tokens_per_s": score.tokens as f64 / seconds },
            "placement": engine.placement(),
        });
        ui::out(&format!("{object}\n"))?;
    } else {
        ui::out(&format!("{:.4}\n", score.nll))?;
    }
    ui::note!(
        "{} windows of {}: {:.4} nats a token, {:.1} tokens/s",
        score.windows,
        args.context,
        score.nll,
        score.tokens as f64 / seconds
    );
    Ok(())
}
