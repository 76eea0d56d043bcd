//! `host plan`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use super::ui;
use crate::archive::Archive;
use crate::backend::kernels::{CudaDevice, Device, EmulatedDevice, KernelBackend};
use crate::interrupt;
use crate::model::directory::ARCHIVE_FILE;
use crate::model::{Config, check_archive};
use crate::placement::calibrate::{self, Calibration};
use crate::placement::memory::{Fixed, fixed};
use crate::placement::{Budget, LayerModel, ModelUse, Plan, Profile, Rates, TIERS, plan, profile};

/// What experts may take, and what is known of their use.
#[derive(Args, Clone, Debug)]
pub struct BudgetArgs {
    /// Device memory for everything: bytes, with K, M, G (or KiB, MiB, GiB), or a percentage of what is
    /// free
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub vram_budget: Option<Size>,
    /// Host memory for experts [default: 80% of what is available]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub ram_budget: Option<Size>,
    /// Usage profile [default: usage.txt of the model directory]
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Rates to use instead of this machine's, as `--save-rates` writes them
    #[arg(long, value_name = "FILE")]
    pub rates: Option<PathBuf>,
    /// Measure this machine's rates again
    #[arg(long)]
    pub calibrate: bool,
}

#[derive(Args)]
pub struct PlanArgs {
    /// Model directory with an archive
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    budget: BudgetArgs,
    /// Positions that the KV cache is for
    #[arg(short, long, value_name = "N", default_value_t = 8192)]
    ctx_size: usize,
    #[arg(long, value_enum, default_value = "cuda", hide = true)]
    device: DeviceArg,
    /// Write the rates used to a file
    #[arg(long, value_name = "FILE")]
    save_rates: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceArg {
    Cuda,
    Emulator,
}

/// Bytes, or a part of what there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// Bytes.
    Bytes(u64),
    /// A share, 0 to 1.
    Share(f64),
}

impl Size {
    /// Bytes, where `all` are there.
    pub fn of(self, all: u64) -> u64 {
        match self {
            Size::Bytes(n) => n,
            Size::Share(s) => (s * all as f64) as u64,
        }
    }
}

/// `24G`, `1.5GiB`, `512M`, `80%`, `1000000`.
pub fn size(text: &str) -> Result<Size, String> {
    let wrong = || "expected a size such as 24G, 1.5GiB, 512M, 80% or bytes".to_string();
    let at = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let n: f64 = text[..at].parse().map_err(|_| wrong())?;
    let unit = match &text[at..] {
        "" | "B" => 1.0,
        "K" | "KB" | "k" => 1e3,
        "M" | "MB" => 1e6,
        "G" | "GB" => 1e9,
        "T" | "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => (1u64 << 20) as f64,
        "GiB" => (1u64 << 30) as f64,
        "TiB" => (1u64 << 40) as f64,
        "%" if n <= 100.0 => return Ok(Size::Share(n / 100.0)),
        _ => return Err(wrong()),
    };
    let bytes = n * unit;
    if bytes < 1e18 {
        Ok(Size::Bytes(bytes as u64))
    } else {
        Err(wrong())
    }
}

/// Bytes of host memory that can be had without swapping; 0 where nobody says.
pub fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Kept free of what is free, for the driver and for rounding.
const RESERVE: u64 = 256 << 20;

/// What is planned with.
pub struct Inputs {
    /// The model's experts.
    pub model: ModelUse,
    /// Rates.
    pub rates: Rates,
    /// What is left for experts.
    pub budget: Budget,
    /// What else is in device memory.
    pub fixed: Vec<Fixed>,
    /// Device memory in all.
    pub vram: u64,
}

/// A profile: the file that is named, else the one beside the model, else none. It is checked against
/// the model.
pub fn read_profile(
    named: Option<&Path>,
    dir: &Path,
    config: &Config,
) -> anyhow::Result<(Profile, String)> {
    let beside = dir.join(profile::FILE);
    let file = match named {
        Some(file) => file.to_owned(),
        None if beside.is_file() => beside,
        None => return Ok((Profile::new(), "no usage profile: all experts alike".into())),
    };
    let profile = Profile::read(&file)?;
    if let Some((layer, expert)) = profile.last() {
        let (layers, experts) = (config.layers.len(), config.router.experts);
        anyhow::ensure!(
            (layer as usize) < layers && (expert as usize) < experts,
            "{}: layer {layer}, expert {expert}: the model has {layers} layers of {experts} experts; \
             give this model's profile",
            file.display()
        );
    }
    Ok((profile, file.display().to_string()))
}

/// What the model of `dir` is to be planned with on a device with `free` bytes.
pub fn inputs(
    dir: &Path,
    config: &Config,
    archive: &Archive,
    args: &BudgetArgs,
    positions: usize,
    free: u64,
    rates: Rates,
) -> anyhow::Result<(Inputs, String)> {
    let (profile, named) = read_profile(args.profile.as_deref(), dir, config)?;
    let (experts, top_k) = (config.router.experts, config.router.top_k);
    let mut layers = Vec::new();
    let mut largest = 0;
    for &number in archive.layers() {
        let records: Vec<u64> = (0..experts)
            .map(|e| Ok(archive.bytes(number, e)?.len() as u64))
            .collect::<anyhow::Result<_>>()?;
        largest = largest.max(records.iter().copied().max().unwrap_or(0));
        layers.push(LayerModel {
            number,
            chances: profile.chances(number, experts, top_k),
            records,
        });
    }
    let mut fixed = fixed(config, positions);
    fixed.push(Fixed {
        what: "staging",
        vram: crate::placement::staged(top_k) as u64 * largest.next_multiple_of(256),
    });
    let vram = args
        .vram_budget
        .map_or(free.saturating_sub(RESERVE), |s| s.of(free));
    let taken: u64 = fixed.iter().map(|f| f.vram).sum();
    anyhow::ensure!(
        taken <= vram,
        "{:.2} GB of device memory hold no model whose dense part, caches and activations take {:.2} GB; give more \
         (--vram-budget) or a shorter context (-c)",
        vram as f64 / 1e9,
        taken as f64 / 1e9
    );
    let memory = available();
    let ram = args.ram_budget.map_or(memory / 5 * 4, |s| s.of(memory));
    let inputs = Inputs {
        model: ModelUse {
            top_k,
            raw_bytes: archive.shape().raw_bytes() as u64,
            layers,
        },
        rates,
        budget: Budget {
            vram: vram - taken,
            ram,
            vram_granule: 2 << 20,
            ram_granule: 4096,
            allowed: [true; TIERS],
        },
        fixed,
        vram,
    };
    Ok((inputs, named))
}

/// The rates that the arguments name, else this machine's.
pub fn rates<D: Device>(
    backend: &KernelBackend<D>,
    archive: &Archive,
    config: &Config,
    args: &BudgetArgs,
) -> anyhow::Result<Calibration> {
    if let Some(file) = &args.rates {
        return Ok(Calibration::read(file)?);
    }
    let (found, now) = calibrate::rates(backend, archive, config, args.calibrate)?;
    if now {
        ui::note!("measured: {}", found.machine);
    }
    Ok(found)
}

pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    interrupt::install();
    let dir = &args.model;
    let config = Config::read(dir)?;
    let file = dir.join(ARCHIVE_FILE);
    anyhow::ensure!(
        file.exists(),
        "{}: no such file; make it with `host pack -m {}`",
        file.display(),
        dir.display()
    );
    let archive = Archive::open(&file)?;
    check_archive(&archive, dir, &config)?;
    anyhow::ensure!(
        (1..=config.max_positions).contains(&args.ctx_size),
        "-c {}: expected 1 to {}",
        args.ctx_size,
        config.max_positions
    );
    let (found, free) = match args.device {
        // Another machine's rates need no device here, if the budget is given as well.
        DeviceArg::Cuda if args.budget.rates.is_some() && CudaDevice::count() == 0 => {
            let file = args.budget.rates.as_deref().context("--rates")?;
            let Some(Size::Bytes(free)) = args.budget.vram_budget else {
                anyhow::bail!(
                    "no CUDA device whose memory would tell the budget: give --vram-budget in bytes"
                );
            };
            (Calibration::read(file)?, free)
        }
        DeviceArg::Cuda => {
            let device = CudaDevice::new(0)?;
            let backend = KernelBackend::new(device.clone())?;
            let found = rates(&backend, &archive, &config, &args.budget)?;
            (found, device.free_bytes()?)
        }
        DeviceArg::Emulator => {
            let backend = KernelBackend::new(EmulatedDevice::default())?;
            (rates(&backend, &archive, &config, &args.budget)?, 1 << 30)
        }
    };
    if let Some(file) = &args.save_rates {
        let text = serde_json::to_string_pretty(&found)?;
        std::fs::write(file, text)
            .with_context(|| format!("--save-rates {}: it cannot be written", file.display()))?;
    }
    let (inputs, profile) = inputs(
        dir,
        &config,
        &archive,
        &args.budget,
        args.ctx_size,
        free,
        found.rates.clone(),
    )?;
    let plan = plan(&inputs.model, &inputs.rates, &inputs.budget)?;
    if args.json {
        let object = json!({
            "machine": found.machine,
            "profile": profile,
            "rates": inputs.rates,
            "fixed": inputs.fixed,
            "vram_budget": inputs.vram,
            "ram_budget": inputs.budget.ram,
            "plan": plan,
            "tokens_per_s": 1.0 / plan.token,
        });
        return Ok(ui::out(&format!("{object}\n"))?);
    }
    ui::out(&table(&inputs, &plan, &found.machine, &profile))?;
    Ok(())
}

fn gb(bytes: u64) -> String {
    match bytes {
        0..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// The plan for people.
pub fn table(inputs: &Inputs, plan: &Plan, machine: &str, profile: &str) -> String {
    let mut text = format!("machine  {machine}\nprofile  {profile}\n");
    let fixed: Vec<String> = (inputs.fixed.iter())
        .map(|f| format!("{} {}", f.what, gb(f.vram)))
        .collect();
    text += &format!(
        "vram     {} of {}: {}, experts {}\nram      {} of {}: experts\n\n",
        gb(plan.vram + inputs.fixed.iter().map(|f| f.vram).sum::<u64>()),
        gb(inputs.vram),
        fixed.join(", "),
        gb(plan.vram),
        gb(plan.ram),
        gb(inputs.budget.ram),
    );
    text += "tier      experts       bytes  share of selections  own lane, ms a token\n";
    for row in &plan.table {
        text += &format!(
            "{:8} {:8} {:>11} {:>20.2}% {:>21.3}\n",
            row.tier,
            row.experts,
            gb(row.bytes),
            100.0 * row.share,
            row.lane_ms
        );
    }
    let t = &plan.time;
    text += &format!(
        "\nlanes, ms a token: dense part {:.3}, experts on the GPU {:.3}, copies {:.3}, CPU {:.3}, disk {:.3}, \
         round trips {:.3}\n",
        1e3 * inputs.rates.dense,
        1e3 * t.gpu,
        1e3 * t.upload,
        1e3 * t.cpu,
        1e3 * t.disk,
        1e3 * t.round_trip
    );
    text += &format!(
        "predicted  {:.3} ms a token, {:.2} tokens/s; bottleneck: {}",
        1e3 * plan.token,
        1.0 / plan.token,
        plan.bottleneck
    );
    if plan.greedy.is_finite() {
        text += &format!("; greedy filling {:.3} ms", 1e3 * plan.greedy);
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Tier;

    #[test]
    fn sizes() {
        let bytes = |s| match size(s) {
            Ok(Size::Bytes(n)) => n,
            other => panic!("{s}: {other:?}"),
        };
        assert_eq!(bytes("24G"), 24_000_000_000);
        assert_eq!(bytes("1.5GiB"), 3 << 29);
        assert_eq!(bytes("512M"), 512_000_000);
        assert_eq!(bytes("0"), 0);
        assert_eq!(bytes("77B"), 77);
        assert_eq!(size("80%"), Ok(Size::Share(0.8)));
        assert_eq!(Size::Share(0.25).of(1000), 250);
        for bad in [
            "",
            "G",
            "-1G",
            "1.2.3G",
            "101%",
            "5 apples",
            "1e30",
            "99999999T",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tiers_are_named_in_order() {
        let names = Tier::ALL.map(Tier::name);
        assert_eq!(
            names,
            ["vram-hot", "vram-ans", "ram-raw", "ram-ans", "disk-ans"]
        );
    }
}
