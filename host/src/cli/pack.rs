//! `host pack`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{bail, ensure};
use clap::{Args, ValueEnum};
use gpu::layout::Symbol;

use super::ui::{self, Progress};
use crate::archive::target::Target;
use crate::archive::{
    ClassSummary, CodecChoice, ExpertSource, HotSet, PackOptions, Phase, SafetensorsExperts,
    Summary, SymbolChoice, pack, partial_path,
};
use crate::backend::kernels::CudaDevice;
use crate::expert::ExpertShape;
use crate::interrupt;
use crate::model::directory::{ARCHIVE_FILE, EXPERTS_FILE, RawExperts};
use crate::model::shards::looks_like_container;
use crate::model::{Config, mtp};
use crate::placement::profile::{self, Profile};

/// Usage profiles that `--hot N` looks for in the model directory.
const PROFILES: [&str; 2] = [profile::FILE, ".coli_usage"];

#[derive(Args)]
pub struct PackArgs {
    /// Model directory with experts.safetensors, or a container
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    /// Archive to make [default: DIR/experts.ansx]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Codec of experts outside the hot set; auto is rans. A matrix that it saves less than 5% of is
    /// stored raw. plane3 is for experts with a scale a row
    #[arg(long, value_enum, default_value = "auto")]
    codec: CodecArg,
    /// GPU architecture that the archive is for; its shared memory decides between pairs and
    /// triples: sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120 [default: the GPU in this machine, else
    /// pairs, which fit all]
    #[arg(long, value_name = "ARCH", value_parser = Target::named)]
    target: Option<Target>,
    /// Nibbles that a table lookup of rans yields; auto is what suits the target
    #[arg(long, value_enum, default_value = "auto")]
    symbols: SymbolsArg,
    /// Experts to code as plane3: those used at all in FILE, a usage profile with lines of layer,
    /// expert and count; its N most used; or the N most used of usage.txt in the model directory
    #[arg(long, value_name = "FILE[:N]|N", value_parser = hot)]
    hot: Option<String>,
    /// Nibbles of a block of rans, roughly: larger blocks make a smaller archive and keep fewer warps
    /// busy [default: 98304, half of that where a row has no more than 2,048 columns]
    #[arg(long, value_name = "N")]
    block_nibbles: Option<NonZeroUsize>,
    /// Go on with what an interrupted pack of the same experts and options left
    #[arg(long)]
    resume: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum CodecArg {
    Auto,
    Rans,
    Plane3,
    Raw,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum SymbolsArg {
    Auto,
    Pair,
    Triple,
}

impl SymbolsArg {
    /// `None`: what suits the target.
    pub(super) fn chosen(self) -> Option<Symbol> {
        match self {
            Self::Auto => None,
            Self::Pair => Some(Symbol::Pair),
            Self::Triple => Some(Symbol::Triple),
        }
    }
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

/// Progress of bytes, a bar for each pass.
struct Passes {
    bars: [Mutex<Progress>; 2],
    done: [AtomicUsize; 2],
    all: usize,
}

impl Passes {
    fn new(all: u64) -> Self {
        Self {
            bars: ["counting symbols", "coding experts"]
                .map(|what| Mutex::new(Progress::bytes(what))),
            done: Default::default(),
            all: all as usize,
        }
    }

    fn add(&self, phase: Phase, bytes: u64) {
        let i = phase as usize;
        let done = self.done[i].fetch_add(bytes as usize, Ordering::Relaxed) + bytes as usize;
        if let Ok(mut bar) = self.bars[i].try_lock() {
            bar.set(done, self.all);
            if done == self.all {
                bar.clear();
            }
        }
    }
}

/// What the GPU in this machine with the least shared memory is, and its name.
pub(super) fn here() -> Option<(Target, String)> {
    let devices = (0..CudaDevice::count()).filter_map(|i| CudaDevice::info(i).ok());
    let info = devices.min_by_key(|info| info.shared_per_block)?;
    let (major, minor) = info.capability;
    let target = Target {
        name: format!("sm_{major}{minor}"),
        shared_per_block: info.shared_per_block,
    };
    Some((target, info.to_string()))
}

/// The symbols that suit the target, and why.
fn choose_symbols(target: Option<&Target>, shape: &ExpertShape) -> (Symbol, String) {
    let (target, of) = match target {
        Some(target) => (target.clone(), String::new()),
        None => {
            let Some((target, name)) = here() else {
                let why = "pairs: there is no GPU here, and their table fits all; --target ARCH \
                           chooses for another machine";
                return (Symbol::Pair, why.into());
            };
            (target, format!(", {name} in this machine"))
        }
    };
    let symbol = target.symbol(shape);
    let (name, fits) = match symbol {
        Symbol::Triple => ("triples", "has"),
        Symbol::Pair => ("pairs", "lacks"),
    };
    let why = format!(
        "{name}: with {} KiB of shared memory a block, {}{of} {fits} room for the table of triples",
        target.shared_per_block >> 10,
        target.name,
    );
    (symbol, why)
}

/// Refuses a name that is none.
fn hot(text: &str) -> Result<String, String> {
    match text.split_once(':').map_or(text, |(file, _)| file) {
        "" => Err("expected FILE, FILE:N or N".into()),
        _ => Ok(text.into()),
    }
}

/// The experts that `--hot` names.
fn hot_set(hot: &str, model: &Path) -> anyhow::Result<HotSet> {
    if let Ok(n) = hot.parse::<usize>() {
        let Some(profile) = (PROFILES.iter().map(|name| model.join(name))).find(|p| p.exists())
        else {
            bail!(
                "--hot {n} needs to know which experts are used most: there is no {} in {}; record \
                 one, or give a profile with --hot FILE:{n}",
                PROFILES[0],
                model.display()
            );
        };
        return Ok(HotSet::of_profile(&Profile::read(&profile)?, Some(n)));
    }
    let (file, most) = match hot.rsplit_once(':') {
        Some((file, n)) if !Path::new(hot).exists() => match n.parse() {
            Ok(n) => (file, Some(n)),
            Err(_) => (hot, None),
        },
        _ => (hot, None),
    };
    Ok(HotSet::of_profile(&Profile::read(Path::new(file))?, most))
}

pub fn run(args: PackArgs) -> anyhow::Result<()> {
    interrupt::install();
    if !args.model.join(EXPERTS_FILE).exists() && looks_like_container(&args.model) {
        let mut config = Config::read(&args.model)?;
        config.mtp = mtp::is_in(&args.model, &config)?;
        let mut source = RawExperts::open(&args.model, &config);
        if config.mtp
            && let Err(e) = &source
        {
            ui::note!("without the layer that drafts: {e}");
            config.mtp = false;
            source = RawExperts::open(&args.model, &config);
        }
        return run_from(args, &source?);
    }
    let source = SafetensorsExperts::open(&args.model)?;
    run_from(args, &source)
}

fn run_from(args: PackArgs, source: &impl ExpertSource) -> anyhow::Result<()> {
    let out = args.output.unwrap_or_else(|| args.model.join(ARCHIVE_FILE));
    let hot = match &args.hot {
        Some(hot) => hot_set(hot, &args.model)?,
        None => HotSet::default(),
    };
    ensure!(
        args.codec != CodecArg::Plane3 || args.hot.is_none(),
        "--codec plane3 codes all experts so; drop --hot, or choose another codec for the rest"
    );
    let symbol = match args.symbols.chosen() {
        Some(symbol) => symbol,
        None => {
            let (symbol, why) = choose_symbols(args.target.as_ref(), source.shape());
            if matches!(args.codec, CodecArg::Auto | CodecArg::Rans) {
                ui::note!("{why}");
            }
            symbol
        }
    };
    let options = PackOptions {
        codec: match args.codec {
            CodecArg::Auto => CodecChoice::Auto,
            CodecArg::Rans => CodecChoice::Rans,
            CodecArg::Plane3 => CodecChoice::Plane3,
            CodecArg::Raw => CodecChoice::Raw,
        },
        symbols: SymbolChoice::Always(symbol),
        block_nibbles: args.block_nibbles.map(NonZeroUsize::get),
        hot,
        resume: args.resume,
        ..PackOptions::default()
    };
    let partial = partial_path(&out);
    match (args.resume, partial.is_file()) {
        (true, false) => ui::note!("{}: not there; beginning anew", partial.display()),
        (false, true) => ui::note!(
            "{}: what an interrupted pack left is dropped; --resume would go on with it",
            partial.display()
        ),
        _ => {}
    }
    let experts = source.layers().len() * source.experts();
    let passes = Passes::new(experts as u64 * source.shape().raw_bytes() as u64);
    let s = pack(
        source,
        &options,
        &out,
        |step| passes.add(step.phase, step.bytes),
        interrupt::requested,
    );
    drop(passes);
    let s = s?;
    if args.json {
        return Ok(ui::out(&format!("{}\n", serde_json::to_string(&s)?))?);
    }
    let kept = match s.kept {
        0 => String::new(),
        n => format!(", {n} of them kept"),
    };
    ui::note!(
        "{}: {experts} experts{kept}, {:.2} MB of {:.2} MB raw",
        out.display(),
        s.file_bytes as f64 / 1e6,
        s.raw_bytes as f64 / 1e6,
    );
    for (name, class) in [("gate_up", &s.gate_up), ("down", &s.down)] {
        ui::note!("{}", line(name, class, 0));
    }
    ui::note!("{}", line("total", &s.total(), s.table_bytes));
    ui::note!("{}", file(&s));
    Ok(())
}

/// A class, `tables` bytes of frequency tables counted.
fn line(name: &str, c: &ClassSummary, tables: u64) -> String {
    let codecs: Vec<String> = [(c.rans, "rans"), (c.plane3, "plane3"), (c.raw, "raw")]
        .iter()
        .filter(|(n, _)| *n > 0)
        .map(|(n, codec)| format!("{n} {codec}"))
        .collect();
    let packed = c.packed_bytes as f64;
    let coded = (c.coded_bytes + tables) as f64;
    format!(
        "  {name:8} {}; nibbles {:.4} (entropy {:.4}), scales {:.2} of f32, both {:.4}",
        codecs.join(", "),
        coded / packed,
        c.entropy_bytes / packed,
        c.coded_scale_bytes as f64 / c.scale_bytes as f64,
        (coded + c.coded_scale_bytes as f64) / (packed + c.scale_bytes as f64),
    )
}

fn file(s: &Summary) -> String {
    let tables = match s.tables {
        0 => "no tables".into(),
        n => format!(
            "{n} table{} {}, {} bytes",
            if n == 1 { "" } else { "s" },
            match s.symbols {
                "none" => "that no matrix came to use".into(),
                symbols => format!("over {symbols} symbols"),
            },
            s.table_bytes
        ),
    };
    format!(
        "  file     ratio {:.4} of raw, index and alignment counted; {tables}",
        s.ratio
    )
}
