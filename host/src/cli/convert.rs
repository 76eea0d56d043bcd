//! `host convert`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::ui::{self, Progress};
use crate::convert::convert;
use crate::expert::ScaleKind;
use crate::interrupt;

#[derive(Args)]
pub struct ConvertArgs {
    /// Checkpoint: config.json and safetensors, bf16 or f32
    #[arg(long, value_name = "HF_DIR")]
    from: PathBuf,
    /// Model directory to make
    #[arg(long, value_name = "MODEL_DIR")]
    to: PathBuf,
    /// Number format of the routed experts
    #[arg(long, value_enum, default_value = "int4-row")]
    experts: Format,
    /// Replace what is in MODEL_DIR
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// One scale a row
    Int4Row,
    /// One scale for each 64 columns
    Int4G64,
}

pub fn run(args: ConvertArgs) -> anyhow::Result<()> {
    interrupt::install();
    let scales = match args.experts {
        Format::Int4Row => ScaleKind::Row,
        Format::Int4G64 => ScaleKind::G64,
    };
    let mut progress = Progress::new("converting layers");
    let summary = convert(&args.from, &args.to, scales, args.force, |done, all| {
        progress.set(done, all);
    });
    progress.finish();
    let s = summary?;
    ui::note!(
        "{}: {} dense tensors, {:.1} MB; {} experts as {}, {:.1} MB",
        args.to.display(),
        s.dense_tensors,
        s.dense_bytes as f64 / 1e6,
        s.experts,
        scales.name(),
        s.expert_bytes as f64 / 1e6
    );
    if s.left_out > 0 {
        ui::note!(
            "left out {} tensors of layers past num_hidden_layers (multi-token prediction)",
            s.left_out
        );
    }
    Ok(())
}
