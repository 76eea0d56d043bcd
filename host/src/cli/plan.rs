//! `host plan`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::json;

use super::generate::SequenceArgs;
use super::ui;
use crate::archive::Archive;
use crate::backend::kernels::{CudaDevice, EmulatedDevice, KernelBackend};
use crate::interrupt;
use crate::model::directory::ARCHIVE_FILE;
use crate::model::{Config, check_archive};
use crate::placement::Tier;
use crate::placement::calibrate::{self, Calibration};
use crate::placement::request::{self, Request, Size};
use crate::whole;

/// What experts may take, and what is known of their use.
#[derive(Args, Clone, Debug)]
pub struct BudgetArgs {
    /// Device memory for everything: bytes, with K, M, G (or KiB, MiB, GiB), or a percentage of what is
    /// free
    #[arg(long, value_name = "SIZE", value_parser = Size::parse)]
    vram_budget: Option<Size>,
    /// Host memory for experts [default: 80% of what is available]
    #[arg(long, value_name = "SIZE", value_parser = Size::parse)]
    ram_budget: Option<Size>,
    /// Tiers that experts may go to [default: all]
    #[arg(long, value_name = "TIER,...", value_enum, value_delimiter = ',')]
    tiers: Vec<Tier>,
    /// Usage profile [default: usage.txt of the model directory]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Rates to use instead of this machine's, as `host plan --save-rates` writes them
    #[arg(long, value_name = "FILE")]
    rates: Option<PathBuf>,
    /// Measure this machine's rates again
    #[arg(long, conflicts_with = "rates")]
    calibrate: bool,
}

impl BudgetArgs {
    /// Whether a budget is given.
    pub fn any(&self) -> bool {
        self.vram_budget.is_some() || self.ram_budget.is_some() || !self.tiers.is_empty()
    }

    /// Whether anything else is said that only a plan takes.
    pub fn asks_of_plan(&self) -> bool {
        self.profile.is_some() || self.rates.is_some() || self.calibrate
    }

    /// As the planner takes it.
    pub fn request(&self, positions: usize) -> Request {
        Request {
            vram: self.vram_budget,
            ram: self.ram_budget,
            profile: self.profile.clone(),
            rates: self.rates.clone(),
            calibrate: self.calibrate,
            tiers: (!self.tiers.is_empty()).then(|| self.tiers.clone()),
            positions,
            moving: false,
            short: Vec::new(),
        }
    }
}

#[derive(Args)]
pub struct PlanArgs {
    /// Model directory with an archive
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    budget: BudgetArgs,
    /// Positions that the KV cache is for [default: 8192, or what the model has]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    #[command(flatten)]
    sequence: SequenceArgs,
    /// Devices to spread experts over, by number; one given twice is two of them
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    devices: Vec<u32>,
    /// What to plan for
    #[arg(long, value_enum, default_value = "cuda")]
    device: DeviceArg,
    /// Write the rates used to a file
    #[arg(long, value_name = "FILE")]
    save_rates: Option<PathBuf>,
    /// Print one JSON object instead of the table: times in seconds (keys that end in _s, and all of such
    /// an object), sizes in bytes (_bytes), shares from 0 to 1
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceArg {
    /// NVIDIA GPUs
    Cuda,
    /// The GPU's kernels on the CPU, with 1 GiB of memory; for tests, with small models
    Emulator,
}

pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    interrupt::install();
    let dir = &args.model;
    let mut config = Config::read(dir)?;
    config.kv = args.sequence.format();
    config.batch = args.sequence.batch;
    let file = dir.join(ARCHIVE_FILE);
    anyhow::ensure!(
        file.exists(),
        "{}: no such file; make it with `host pack -m {}`",
        file.display(),
        dir.display()
    );
    let archive = Archive::open(&file)?;
    check_archive(&archive, dir, &config)?;
    let positions = args.ctx_size.unwrap_or(config.max_positions.min(8192));
    anyhow::ensure!(
        (1..=config.max_positions).contains(&positions),
        "-c {positions}: expected 1 to {}",
        config.max_positions
    );
    if let Some(file) = &args.save_rates {
        whole::check(file).with_context(|| unwritten(file))?;
    }
    let request = args.budget.request(positions);
    anyhow::ensure!(
        (1..=256).contains(&args.devices.len()),
        "--devices: expected 1 to 256 of them"
    );
    // Rates and free bytes of each device.
    let mut on: Vec<(Calibration, u64)> = Vec::new();
    for &number in &args.devices {
        let alike = args.devices.iter().filter(|d| **d == number).count() as u64;
        let ((found, measured), free) = match (args.device, &request.rates) {
            // Another machine's rates need no device here, if the budget is given as well.
            (DeviceArg::Cuda, Some(file)) if CudaDevice::count() == 0 => {
                let found = request::given(file, &archive)?;
                let Some(Size::Bytes(free)) = request.vram else {
                    anyhow::bail!(
                        "no CUDA device whose memory would be the budget: give --vram-budget in bytes"
                    );
                };
                ((found, false), free)
            }
            (DeviceArg::Cuda, None) if CudaDevice::count() == 0 => anyhow::bail!(
                "no CUDA device to measure (`host doctor` says why): give --rates FILE, saved where there \
                 is one, and --vram-budget"
            ),
            (DeviceArg::Cuda, _) => {
                let device = CudaDevice::new(number)?;
                let backend = KernelBackend::new(device.clone())?;
                let found = request.rates(&backend, &archive, dir, &config)?;
                (found, device.free_bytes()? / alike)
            }
            (DeviceArg::Emulator, _) => {
                let backend = KernelBackend::new(EmulatedDevice::default())?;
                let found = request.rates(&backend, &archive, dir, &config)?;
                (found, EmulatedDevice::MEMORY)
            }
        };
        if measured {
            ui::note!("measured: {}", found.machine);
        }
        on.push((found, free));
    }
    // The dense part goes to the fastest; a difference of less than 5% is none.
    let dense = |i: usize| on[i].0.rates.dense;
    let fastest = (0..on.len()).min_by(|a, b| dense(*a).total_cmp(&dense(*b)));
    let mut order = args.devices.clone();
    if let Some(fastest) = fastest.filter(|i| dense(*i) < 0.95 * dense(0)) {
        on.swap(0, fastest);
        order.swap(0, fastest);
    }
    if matches!(args.device, DeviceArg::Cuda) && request.rates.is_none() && on.len() > 1 {
        let first = CudaDevice::new(order[0])?;
        for (i, (found, _)) in on.iter_mut().enumerate().skip(1) {
            let other = CudaDevice::new(order[i])?;
            found.rates.exchange = calibrate::exchange_between(&first, &other, &config)?;
        }
    }
    if matches!(args.device, DeviceArg::Emulator) || CudaDevice::count() > 0 {
        let free = on.iter().map(|(_, free)| *free).min();
        request.say_excess(free.unwrap_or(0));
    }
    let (found, free) = on.remove(0);
    if let Some(file) = &args.save_rates {
        let text = serde_json::to_string_pretty(&found)?;
        whole::write(file, ".rates-", |out| out.write_all(text.as_bytes()))
            .with_context(|| unwritten(file))?;
    }
    let mut planned = request.plan_devices(dir, &config, &archive, found, free, &on)?;
    for row in &mut planned.plan.device_table {
        row.number = order[row.device];
    }
    if args.json {
        let object = json!({
            "machine": planned.calibration.machine,
            "profile": planned.profile,
            "rates_s": planned.calibration.rates,
            "fixed": planned.fixed,
            "vram_budget_bytes": planned.vram,
            "ram_budget_bytes": planned.ram,
            "ram_reads_bytes": planned.reads,
            "plan": planned.plan,
            "speculation": planned.speculation,
            "tokens_per_s": 1.0 / planned.plan.token,
        });
        return Ok(ui::out(&format!("{object}\n"))?);
    }
    Ok(ui::out(&planned.to_string())?)
}

fn unwritten(file: &Path) -> String {
    let file = file.display();
    format!("--save-rates {file}: it cannot be written; give a file in a folder that can be")
}
