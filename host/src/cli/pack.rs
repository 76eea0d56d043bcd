//! `host pack`.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Args, ValueEnum};
use gpu::layout::Symbol;

use super::ui::{self, Progress};
use crate::archive::{
    ClassSummary, CodecChoice, ExpertSource, PackOptions, SafetensorsExperts, Summary,
    SymbolChoice, pack,
};
use crate::interrupt;
use crate::model::directory::ARCHIVE_FILE;

#[derive(Args)]
pub struct PackArgs {
    /// Model directory with experts.safetensors
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    /// Archive to make [default: DIR/experts.ansx]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Codec of matrices; auto is rANS where it saves 5%
    #[arg(long, value_enum, default_value = "auto")]
    codec: CodecArg,
    /// Nibbles that a table lookup yields; auto is what makes the smaller archive
    #[arg(long, value_enum, default_value = "auto")]
    symbols: SymbolsArg,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum CodecArg {
    Auto,
    Rans,
    Raw,
}

#[derive(Clone, Copy, ValueEnum)]
enum SymbolsArg {
    Auto,
    Pair,
    Triple,
}

/// Progress of work that several threads do.
pub(super) struct Count {
    bar: Mutex<Progress>,
    done: AtomicUsize,
    all: usize,
}

impl Count {
    pub fn new(what: &'static str, all: usize) -> Self {
        Self {
            bar: Mutex::new(Progress::new(what)),
            done: AtomicUsize::new(0),
            all,
        }
    }

    pub fn add(&self, n: u64) {
        let done = self.done.fetch_add(n as usize, Ordering::Relaxed) + n as usize;
        if let Ok(mut bar) = self.bar.try_lock() {
            bar.set(done, self.all);
        }
    }

    pub fn finish(self) {
        if let Ok(bar) = self.bar.into_inner() {
            bar.finish();
        }
    }
}

pub fn run(args: PackArgs) -> anyhow::Result<()> {
    interrupt::install();
    let source = SafetensorsExperts::open(&args.model)?;
    let out = args.output.unwrap_or_else(|| args.model.join(ARCHIVE_FILE));
    let options = PackOptions {
        codec: match args.codec {
            CodecArg::Auto => CodecChoice::Auto,
            CodecArg::Rans => CodecChoice::Rans,
            CodecArg::Raw => CodecChoice::Raw,
        },
        symbols: match args.symbols {
            SymbolsArg::Auto => SymbolChoice::Auto,
            SymbolsArg::Pair => SymbolChoice::Always(Symbol::Pair),
            SymbolsArg::Triple => SymbolChoice::Always(Symbol::Triple),
        },
        block_nibbles: None,
    };
    let experts = source.layers().len() * source.experts();
    let count = Count::new("packing experts", 2 * experts);
    let summary = pack(
        &source,
        &options,
        &out,
        |n| count.add(n),
        interrupt::requested,
    );
    count.finish();
    let s = summary?;
    if args.json {
        return Ok(ui::out(&format!("{}\n", serde_json::to_string(&s)?))?);
    }
    ui::note!(
        "{}: {} experts, {:.2} MB of {:.2} MB raw, ratio {:.4} ({:.4} of packed int4)",
        out.display(),
        experts,
        s.file_bytes as f64 / 1e6,
        s.raw_bytes as f64 / 1e6,
        s.ratio,
        s.file_bytes as f64 / (s.gate_up.packed_bytes + s.down.packed_bytes) as f64
    );
    for (name, class) in [("gate_up", &s.gate_up), ("down", &s.down)] {
        ui::note!("{}", line(name, class));
    }
    ui::note!("{}", tables(&s));
    Ok(())
}

fn line(name: &str, c: &ClassSummary) -> String {
    format!(
        "  {name:8} {} matrices, {} raw; nibbles {:.4} (entropy {:.4}); scales {:.2} of f32",
        c.matrices,
        c.raw,
        c.coded_bytes as f64 / c.packed_bytes as f64,
        c.entropy_bytes / c.packed_bytes as f64,
        c.coded_scale_bytes as f64 / c.scale_bytes as f64
    )
}

fn tables(s: &Summary) -> String {
    format!(
        "  {} tables over {} symbols, {} bytes ({:.4}% of the archive)",
        s.tables,
        s.symbols,
        s.table_bytes,
        100.0 * s.table_bytes as f64 / s.file_bytes as f64
    )
}
