//! `host synth`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Mutex;

use clap::{Args, ValueEnum};

use super::convert::DenseArg;
use super::pack::{SymbolsArg, here};
use super::ui::{self, Progress};
use crate::archive::target::Target;
use crate::expert::ScaleKind;
use crate::interrupt;
use crate::synth::{Options, Phase, Shape, Skew, synthesise};

#[derive(Args)]
pub struct SynthArgs {
    /// Geometry
    #[arg(long, value_enum)]
    shape: Shape,
    /// Layers [default: what the real model has]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Make the layer that drafts, one more than --layers, for --speculate. Its weights are as random as all
    /// others: hardly any draft is accepted
    #[arg(long)]
    mtp: bool,
    /// Distinct experts, which stand for all in the archive
    #[arg(long, value_name = "M", default_value_t = 32)]
    distinct_experts: usize,
    /// Seed of all weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use of experts, E:S: the share E of them that is used most gets the share S of selections; or
    /// `none`: all alike
    #[arg(long, value_name = "E:S", default_value = "0.48:0.85", value_parser = skew)]
    skew: SkewArg,
    /// Share of each layer's experts, the most used, whose records are plane3
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    hot: f64,
    /// GPU architecture that the archive is for, as `host pack` takes it [default: the GPU in this
    /// machine, else pairs, which fit all]
    #[arg(long, value_name = "ARCH", value_parser = Target::named)]
    target: Option<Target>,
    /// Nibbles that a table lookup of rans yields; auto is what suits the target
    #[arg(long, value_enum, default_value = "auto")]
    symbols: SymbolsArg,
    /// Nibbles of a block of rans, as `host pack` takes them
    #[arg(long, value_name = "N")]
    block_nibbles: Option<NonZeroUsize>,
    /// Number format of the routed experts
    #[arg(long, value_enum, default_value = "int4-row")]
    experts: Format,
    /// Number format of the dense part: bf16, or as `host convert` would write it
    #[arg(long, value_enum, default_value = "verbatim")]
    dense: DenseArg,
    /// A tokenizer.json to copy [default: one of single bytes]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Model directory to make
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Int4Row,
    Int4G64,
}

#[derive(Clone, Copy)]
struct SkewArg(Option<Skew>);

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("expected a number from 0 to 1".into()),
    }
}

fn skew(text: &str) -> Result<SkewArg, String> {
    if text == "none" {
        return Ok(SkewArg(None));
    }
    let parts = text.split_once(':');
    match parts.map(|(e, s)| (share(e), share(s))) {
        Some((Ok(experts), Ok(selections))) => Ok(SkewArg(Some(Skew {
            experts,
            selections,
        }))),
        _ => Err("expected two numbers from 0 to 1, such as 0.48:0.85, or none".into()),
    }
}

pub fn run(args: SynthArgs) -> anyhow::Result<()> {
    interrupt::install();
    let options = Options {
        shape: args.shape,
        layers: args.layers,
        mtp: args.mtp,
        distinct: args.distinct_experts,
        scales: match args.experts {
            Format::Int4Row => ScaleKind::Row,
            Format::Int4G64 => ScaleKind::G64,
        },
        seed: args.seed,
        skew: args.skew.0,
        hot: args.hot,
        target: args.target.or_else(|| here().map(|(target, _)| target)),
        symbols: args.symbols.chosen(),
        block_nibbles: args.block_nibbles.map(NonZeroUsize::get),
        dense: args.dense.into(),
        tokenizer: args.tokenizer,
    };
    let shown: Mutex<Option<(Phase, Progress)>> = Mutex::new(None);
    let made = synthesise(&options, &args.to, |phase, done, all| {
        let Ok(mut shown) = shown.try_lock() else {
            return;
        };
        if shown.as_ref().is_none_or(|(before, _)| *before != phase) {
            if let Some((_, bar)) = shown.take() {
                bar.finish();
            }
            *shown = Some((
                phase,
                Progress::bytes(match phase {
                    Phase::Experts => "making experts",
                    Phase::Dense => "writing the dense part",
                }),
            ));
        }
        if let Some((_, bar)) = shown.as_mut() {
            bar.set(done as usize, all as usize);
        }
    });
    if let Ok(Some((_, bar))) = shown.into_inner() {
        bar.finish();
    }
    let m = made?;
    ui::note!(
        "{}: {} layers, {} with {} experts each; dense {:.1} MB; archive of {} distinct experts {:.1} MB, \
         ratio {:.4}",
        args.to.display(),
        m.config.layers.len(),
        m.archive.layers,
        m.archive.experts,
        m.dense_bytes as f64 / 1e6,
        m.archive.records,
        m.archive.file_bytes as f64 / 1e6,
        m.archive.ratio
    );
    if let (Some(covered), Some(skew)) = (m.covered, args.skew.0) {
        ui::note!(
            "the {:.0}% most used experts cover {:.1}% of selections on Gaussian hidden states \
             (usage.txt)",
            100.0 * skew.experts,
            100.0 * covered
        );
    }
    Ok(())
}
