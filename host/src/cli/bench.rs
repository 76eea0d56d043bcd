//! `host bench`.

use clap::{Args, Subcommand, ValueEnum};
use gpu::layout::Folds;

use super::ui;
use crate::backend::cpu::Cpu;
use crate::backend::kernels::{CudaDevice, KernelBackend};
use crate::bench::{Case, Coding, HEADING, Measurement, Settings, Timed, Way, Weights, measure};
use crate::expert::{ExpertShape, ScaleKind};
use crate::interrupt;
use crate::simd::Arm;

#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Experts' matrices: raw, unfused, fused; checked, then timed
    Kernels(KernelsArgs),
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
    let What::Kernels(args) = args.what;
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
