//! `host bench`.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};
use gpu::layout::Folds;

use super::generate::{SequenceArgs, batch, moves};
use super::ui::{self, Progress};
use crate::backend::KvFormat;
use crate::backend::cpu::Cpu;
use crate::backend::kernels::{CudaDevice, KernelBackend};
use crate::bench::decode::{Amount, Side};
use crate::bench::{Case, Coding, HEADING, Measurement, Settings, Timed, Way, Weights, measure};
use crate::engine::{Device, Options};
use crate::expert::{self, ExpertShape, Form, ScaleKind};
use crate::interrupt;
use crate::model::Config;
use crate::placement::Tier;
use crate::placement::request::{Request, Size};
use crate::simd::Arm;
use crate::trace::Trace;

#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Experts' matrices: raw, unfused, fused; checked, then timed
    Kernels(KernelsArgs),
    /// Tokens of a whole model routed as a trace says, in one placement or in two, A B B A
    Decode(DecodeArgs),
}

#[derive(Args)]
struct DecodeArgs {
    /// Model directory
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    /// Routing, as `host generate --trace FILE` recorded it; it begins anew where it ends
    #[arg(long, value_name = "FILE")]
    replay: PathBuf,
    /// Tokens to time in each run
    #[arg(long, default_value_t = 64, value_parser = count)]
    tokens: usize,
    /// Tokens before those
    #[arg(long, default_value_t = 8)]
    warmup: usize,
    /// Tokens behind a placement's last run, whose time is split into parts by events between launches; what
    /// recorded tokens do aside counts as what goes on meanwhile (the shared expert as experts, keys and
    /// values as the query's rows); 0 for none
    #[arg(long, value_name = "N", default_value_t = 8)]
    split: usize,
    /// Tokens of a prompt whose time is split likewise behind that; 0 for none
    #[arg(long, value_name = "N", default_value_t = 5)]
    prompt: usize,
    /// GPUs to spread experts over, by number; one given twice is two of them; devices=0+1 in a placement is
    /// that one's
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    devices: Vec<u32>,
    /// A placement: vram=SIZE, ram=SIZE, tiers=TIER+TIER, tier=raw or ans, kernel=fused or unfused,
    /// kv=f32 or bf16, devices=N+N, profile=FILE, rates=FILE, model=DIR, batch=N, repin=N, with commas between;
    /// tier=raw within budgets is tiers=vram-hot+ram-raw
    #[arg(long, value_name = "PLACEMENT", default_value = "")]
    a: String,
    /// A placement to compare it with
    #[arg(long, value_name = "PLACEMENT")]
    b: Option<String>,
    /// Let at most N experts change places between two tokens [N: 1]; repin=N in a placement is that one's
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1", default_value = "0",
          hide_default_value = true, value_parser = moves)]
    repin: usize,
    #[command(flatten)]
    sequence: SequenceArgs,
    #[arg(long, value_enum, default_value = "cuda")]
    device: DecodeDevice,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

impl DecodeArgs {
    fn amount(&self) -> Amount {
        Amount {
            warmup: self.warmup,
            tokens: self.tokens,
            split: self.split,
            prompt: self.prompt,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DecodeDevice {
    Cpu,
    Cuda,
    #[value(hide = true)]
    Emulator,
}

/// What a placement says, over the rest of the command line.
fn side(text: &str, args: &DecodeArgs) -> anyhow::Result<Side> {
    let positions = args.amount().positions();
    let mut request = Request {
        positions,
        ..Request::default()
    };
    let mut side = Side {
        name: if text.is_empty() {
            "as generate places it"
        } else {
            text
        }
        .into(),
        dir: args.model.clone(),
        options: Options {
            device: match args.device {
                DecodeDevice::Cpu => Device::Cpu,
                DecodeDevice::Cuda => Device::Cuda,
                DecodeDevice::Emulator => Device::Emulator,
            },
            tier: None,
            form: Form::Fused,
            devices: args.devices.clone(),
            request: Request::default(),
            placed: false,
            positions,
            speculate: 0,
            repin: args.repin,
            kv: args.sequence.format(),
            batch: args.sequence.batch,
        },
    };
    let mut given = Vec::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let wrong = |expected: &str| anyhow::anyhow!("`{part}`: expected {expected}");
        let (key, value) = part.split_once('=').ok_or_else(|| wrong("key=value"))?;
        if given.contains(&key) {
            return Err(wrong(&format!("{key} once in a placement")));
        }
        given.push(key);
        let size = || {
            Size::parse(value)
                .map(Some)
                .map_err(|e| anyhow::anyhow!("`{part}`: {e}"))
        };
        match (key, value) {
            ("vram", _) => request.vram = size()?,
            ("ram", _) => request.ram = size()?,
            ("tiers", _) => {
                let tiers = value.split('+').map(|t| Tier::from_str(t, true));
                let tiers = tiers.collect::<Result<Vec<_>, _>>();
                request.tiers = Some(tiers.map_err(|_| {
                    let names = Tier::ALL.map(Tier::name).join(", ");
                    wrong(&format!("some of {names}, with + between"))
                })?);
            }
            ("tier", "raw") => side.options.tier = Some(expert::Tier::Raw),
            ("tier", "ans") => side.options.tier = Some(expert::Tier::Ans),
            ("kernel", "fused") => side.options.form = Form::Fused,
            ("kernel", "unfused") => side.options.form = Form::Unfused,
            ("kv", "f32") => side.options.kv = KvFormat::F32,
            ("batch", _) => side.options.batch = batch(value).map_err(|e| wrong(&e))?,
            ("kv", "bf16") => side.options.kv = KvFormat::Bf16,
            ("devices", _) => {
                let numbers = value.split('+').map(str::parse).collect::<Result<_, _>>();
                side.options.devices = numbers.map_err(|_| wrong("devices=0+1"))?;
            }
            ("profile", _) => request.profile = Some(value.into()),
            ("rates", _) => request.rates = Some(value.into()),
            ("repin", _) => side.options.repin = moves(value).map_err(|e| wrong(&e))?,
            ("model", _) => side.dir = value.into(),
            ("tier", _) => return Err(wrong("tier=raw or tier=ans")),
            ("kernel", _) => return Err(wrong("kernel=fused or kernel=unfused")),
            ("kv", _) => return Err(wrong("kv=f32 or kv=bf16")),
            _ => {
                return Err(wrong(
                    "vram, ram, tiers, tier, kernel, kv, devices, profile, rates, model, batch or repin",
                ));
            }
        }
    }
    let several = side.options.devices.len() > 1;
    let budgets = request.vram.is_some() || request.ram.is_some() || request.tiers.is_some();
    if (several || budgets) && side.options.tier.take() == Some(expert::Tier::Raw) {
        request
            .tiers
            .get_or_insert(vec![Tier::VramHot, Tier::RamRaw]);
    }
    side.options.placed = budgets;
    side.options.request = request;
    Ok(side)
}

fn decode(args: &DecodeArgs) -> anyhow::Result<()> {
    let trace = Trace::read(&args.replay)?;
    let a = side(&args.a, args).context("--a")?;
    let b = args.b.as_ref().map(|b| side(b, args).context("--b"));
    let b = b.transpose()?;
    for side in [Some(&a), b.as_ref()].into_iter().flatten() {
        let config = Config::read(&side.dir)?;
        trace.check(&args.replay, &config)?;
        let most = config.max_positions;
        anyhow::ensure!(
            args.amount().positions() <= most,
            "--warmup {}, --tokens {}, --split {} and four times --prompt {}: the model has {most} positions",
            args.warmup,
            args.tokens,
            args.split,
            args.prompt
        );
        let devices = side.options.devices.len();
        anyhow::ensure!(
            (1..=256).contains(&devices),
            "--devices: expected 1 to 256 of them"
        );
    }
    let amount = args.amount();
    let mut shown: Option<(char, Progress)> = None;
    let report =
        crate::bench::decode::measure(&a, b.as_ref(), &trace, amount, &mut |side, done, all| {
            let (_, bar) = match shown.take() {
                Some(s) if s.0 == side => shown.insert(s),
                other => {
                    if let Some((_, bar)) = other {
                        bar.finish();
                    }
                    let label = if side == 'a' {
                        "loading A"
                    } else {
                        "loading B"
                    };
                    shown.insert((side, Progress::bytes(label)))
                }
            };
            bar.set(done, all);
        });
    if let Some((_, bar)) = shown {
        bar.finish();
    }
    let report = report?;
    if args.json {
        return Ok(ui::out(&format!("{}\n", serde_json::to_string(&report)?))?);
    }
    Ok(ui::out(&report.to_string())?)
}

#[derive(Args)]
struct KernelsArgs {
    /// Where
    #[arg(long, value_enum, default_value = "cuda")]
    device: DeviceArg,
    /// What to time, in this order
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "raw,unfused,fused"
    )]
    compare: Vec<Way>,
    /// Arms of the CPU to time [default: the fastest]
    #[arg(long, value_delimiter = ',', value_name = "ARM")]
    arm: Vec<Arm>,
    /// Experts' geometry: glm (6144,2048), glm-flash (2048,1536), or H,I; may be repeated
    #[arg(long, default_value = "glm", value_parser = shape)]
    shape: Vec<(usize, usize)>,
    /// Active experts, each of which gets every token
    #[arg(long, value_delimiter = ',', default_value = "8", value_parser = count)]
    experts: Vec<usize>,
    /// Tokens
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = count)]
    tokens: Vec<usize>,
    /// Weight scales
    #[arg(long, value_enum, value_delimiter = ',', default_value = "row")]
    scales: Vec<ScalesArg>,
    /// Codecs of the coded forms
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "rans-triple,plane3"
    )]
    codec: Vec<Coding>,
    /// Nibbles of a block of rANS, roughly [default: as host pack]
    #[arg(long, value_name = "N", value_parser = block)]
    block_nibbles: Option<usize>,
    /// Timed runs of each stage; the median counts
    #[arg(long, default_value_t = 21, value_parser = count)]
    runs: usize,
    /// MiB of cache that weights must outgrow; 0 times them from the cache [default: the device's]
    #[arg(long, value_name = "MIB")]
    cache: Option<usize>,
    /// Seed of weights and activations
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON array instead of the table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceArg {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum ScalesArg {
    Row,
    G64,
}

fn count(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n) if (1..=1 << 16).contains(&n) => Ok(n),
        _ => Err("expected a number from 1 to 65536".into()),
    }
}

fn block(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n) if (1024..=1 << 24).contains(&n) => Ok(n),
        _ => Err("expected a number from 1024 to 16777216".into()),
    }
}

fn shape(s: &str) -> Result<(usize, usize), String> {
    let dims = match s {
        "glm" => (6144, 2048),
        "glm-flash" => (2048, 1536),
        _ => s
            .split_once(',')
            .and_then(|(h, i)| Some((h.parse().ok()?, i.parse().ok()?)))
            .ok_or("expected glm, glm-flash or H,I")?,
    };
    match (Folds::new(dims.0), Folds::new(dims.1)) {
        (Some(_), Some(_)) => Ok(dims),
        _ => Err("expected multiples of 64 from 64 to 8192".into()),
    }
}

/// Runs every case on one back end.
fn cases<B: Timed>(
    backends: &[B],
    args: &KernelsArgs,
    print: &mut impl FnMut(Measurement) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let settings = Settings {
        runs: args.runs,
        codecs: args.codec.clone(),
        block_nibbles: args.block_nibbles,
        seed: args.seed,
        cache_bytes: args.cache.map(|mib| mib << 20),
        ways: args.compare.clone(),
    };
    for (hidden, intermediate) in &args.shape {
        for scales in &args.scales {
            let shape = ExpertShape {
                hidden: *hidden,
                intermediate: *intermediate,
                scales: match scales {
                    ScalesArg::Row => ScaleKind::Row,
                    ScalesArg::G64 => ScaleKind::G64,
                },
            };
            let weights = Weights::new(shape, &settings)?;
            for b in backends {
                for experts in &args.experts {
                    for tokens in &args.tokens {
                        let case = Case {
                            shape,
                            experts: *experts,
                            tokens: *tokens,
                        };
                        let mut printed = Ok(());
                        measure(b, &case, &weights, &settings, |m| {
                            if printed.is_ok() {
                                printed = print(m);
                            }
                        })?;
                        printed?;
                    }
                }
            }
        }
    }
    Ok(())
}

pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    interrupt::install();
    let args = match args.what {
        What::Kernels(args) => args,
        What::Decode(args) => return decode(&args),
    };
    for (tokens, experts) in
        (args.tokens.iter()).flat_map(|t| args.experts.iter().map(move |e| (t, e)))
    {
        anyhow::ensure!(
            tokens * experts <= 1 << 16,
            "--tokens {tokens} for each of --experts {experts}: at most 65536 in all"
        );
    }
    if args.device != DeviceArg::Cpu && !args.arm.is_empty() {
        anyhow::bail!("--arm is for --device cpu");
    }
    let mut all = Vec::new();
    let mut device = String::new();
    let json = args.json;
    let mut any = false;
    let mut print = |m: Measurement| -> anyhow::Result<()> {
        any = true;
        if json {
            all.push(m);
            return Ok(());
        }
        if device != m.device {
            device.clone_from(&m.device);
            ui::out(&format!("{device}\n{HEADING}\n"))?;
        }
        ui::out(&format!("{m}\n"))?;
        Ok(())
    };
    if args.device == DeviceArg::Cpu {
        let arms = if args.arm.is_empty() {
            vec![Cpu::new()?]
        } else {
            args.arm
                .iter()
                .map(|arm| Cpu::with_arm(*arm))
                .collect::<Result<_, _>>()?
        };
        cases(&arms, &args, &mut print)?;
    } else {
        cuda(&args, &mut print)?;
    }
    anyhow::ensure!(
        any,
        "nothing to time: plane3 is for row scales alone (--scales row), other codecs are for both"
    );
    if json {
        ui::out(&format!("{}\n", serde_json::to_string(&all)?))?;
    }
    Ok(())
}

fn cuda(
    args: &KernelsArgs,
    print: &mut impl FnMut(Measurement) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // Without a device the error names --device cpu.
    cases(&[KernelBackend::new(CudaDevice::new(0)?)?], args, print)
}
