//! `host convert`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::ui::{self, Progress};
use crate::convert::{DenseFormat, MtpFormat, Options, convert, partial_path};
use crate::expert::ScaleKind;
use crate::interrupt;

#[derive(Args)]
pub struct ConvertArgs {
    /// Checkpoint: config.json and safetensors, bf16, f32 or fp8 in blocks of 128 x 128
    #[arg(long, value_name = "HF_DIR")]
    from: PathBuf,
    /// Model directory to make
    #[arg(long, value_name = "MODEL_DIR")]
    to: PathBuf,
    /// Number format of the routed experts
    #[arg(long, value_enum, default_value = "int4-row")]
    experts: Format,
    /// Number format of the experts of the layer that drafts [default: int8 beside int4-row, else int4]
    #[arg(long, value_enum)]
    mtp: Option<MtpArg>,
    /// Number format of the dense matrices
    #[arg(long, value_enum, default_value = "verbatim")]
    dense: DenseArg,
    /// Go on with what an interrupted conversion of the same checkpoint left
    #[arg(long)]
    resume: bool,
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

#[derive(Clone, Copy, ValueEnum)]
enum MtpArg {
    /// Bytes with one scale a row
    Int8,
    /// As all others
    Int4,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum DenseArg {
    /// As the checkpoint has them; fp8 becomes bf16
    Verbatim,
    /// bf16, but for norms, routers and indexer weights
    Bf16,
    /// Bytes with one scale a row
    Int8Row,
}

impl From<DenseArg> for DenseFormat {
    fn from(arg: DenseArg) -> Self {
        match arg {
            DenseArg::Verbatim => DenseFormat::Verbatim,
            DenseArg::Bf16 => DenseFormat::Bf16,
            DenseArg::Int8Row => DenseFormat::Int8Row,
        }
    }
}

pub fn run(args: ConvertArgs) -> anyhow::Result<()> {
    interrupt::install();
    let scales = match args.experts {
        Format::Int4Row => ScaleKind::Row,
        Format::Int4G64 => ScaleKind::G64,
    };
    let mut options = Options {
        dense: args.dense.into(),
        force: args.force,
        resume: args.resume,
        ..Options::new(scales)
    };
    match args.mtp {
        Some(MtpArg::Int8) => options.mtp = MtpFormat::Int8,
        Some(MtpArg::Int4) => options.mtp = MtpFormat::Int4,
        None => (),
    }
    let partial = partial_path(&args.to);
    match (args.resume, partial.is_dir()) {
        (true, false) => ui::note!("{}: not there; beginning anew", partial.display()),
        (false, true) => ui::note!(
            "{}: what an interrupted conversion left is dropped; --resume would go on with it",
            partial.display()
        ),
        _ => (),
    }
    let mut progress = Progress::new("converting layers");
    let summary = convert(&args.from, &args.to, &options, |done, all| {
        progress.set(done, all);
    });
    progress.finish();
    let s = match summary {
        Ok(summary) => summary,
        Err(e) if partial.is_dir() => {
            ui::note!("{}: --resume goes on with it", partial.display());
            return Err(e.into());
        }
        Err(e) => return Err(e.into()),
    };
    ui::note!(
        "{}: {} dense tensors, {:.1} MB; {} experts as {}{}, {:.1} MB",
        args.to.display(),
        s.dense_tensors,
        s.dense_bytes as f64 / 1e6,
        s.experts,
        scales.name(),
        match s.int8_experts {
            0 => String::new(),
            n => format!(" ({n} of them, of the layer that drafts, as int8-row)"),
        },
        s.expert_bytes as f64 / 1e6
    );
    if s.rounded > 0 {
        ui::note!("{} dense tensors were rounded to bf16", s.rounded);
    }
    if s.left_out > 0 {
        ui::note!(
            "left out {} tensors of layers that are not read, or copies of the embedding and the head",
            s.left_out
        );
    }
    Ok(())
}
