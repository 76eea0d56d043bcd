//! `host doctor`: what there is to run on, what is missing, and its remedy.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::ui::{self, Progress};
use crate::backend::cpu::Cpu;
use crate::backend::kernels::{CudaDevice, DeviceError};
use crate::interrupt;
use crate::model::check::{Facts, check_all, check_dense, check_scales};
use crate::model::{Config, Source, default_directory, mtp};
use crate::ram;
use crate::simd::Arm;
use crate::tokenizer::Tokenizer;

#[derive(Args)]
pub struct DoctorArgs {
    /// Model directory to look at [default: the one that `generate` takes]
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Read all of the model: every weight finite, every record decoded and compared
    #[arg(long)]
    deep: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found.
#[derive(Serialize)]
struct Findings {
    version: &'static str,
    cpu: CpuFindings,
    driver: Option<DriverFindings>,
    devices: Vec<DeviceFindings>,
    /// Hash of the sources that the PTX in this program was made from.
    ptx_sources: &'static str,
    /// rustc that can make PTX; only a developer needs one.
    nvptx_compiler: Option<String>,
    model: Option<ModelFindings>,
    problems: Vec<Problem>,
    /// Whether `host generate` runs, at least on the CPU; of `--deep` whether all of the model is whole.
    ok: bool,
}

#[derive(Serialize)]
struct CpuFindings {
    name: Option<String>,
    threads: usize,
    /// Those that arms use, of what the processor has.
    features: Vec<&'static str>,
    arms: Vec<&'static str>,
    /// Arm that is used; none where `ANSATZ_CPU` names what there is not.
    arm: Option<&'static str>,
    memory_free_bytes: Option<u64>,
}

#[derive(Serialize)]
struct DriverFindings {
    library: PathBuf,
    cuda: String,
    /// Functions that it lacks.
    missing: &'static [&'static str],
}

#[derive(Serialize)]
struct DeviceFindings {
    ordinal: u32,
    name: String,
    compute_capability: String,
    /// Target of the PTX that it would run.
    ptx: &'static str,
    memory_bytes: u64,
    /// After the kernels were loaded; none if they could not be.
    memory_free_bytes: Option<u64>,
}

#[derive(Serialize)]
struct ModelFindings {
    directory: PathBuf,
    /// What it is made of, and what it will take.
    #[serde(flatten)]
    facts: Facts,
    /// The layer that drafts; none where the files have none that can be read.
    drafts: Option<DraftFindings>,
    /// Whether text can go in and out; token ids always can.
    tokenizer: bool,
}

/// What `--speculate` adds.
#[derive(Serialize)]
struct DraftFindings {
    layer: usize,
    expert_bytes: u64,
    dense_bytes: u64,
}

#[derive(Serialize)]
struct Problem {
    what: String,
    remedy: String,
    /// Whether `host generate` does not run because of it.
    fatal: bool,
}

/// Features that the arms look for.
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! look {
            ($($name:tt)*) => {
                $(if std::is_x86_feature_detected!($name) { found.push($name); })*
            };
        }
        look!("sse2" "avx" "avx2" "fma" "f16c" "bmi1" "bmi2" "lzcnt" "popcnt" "avx512f" "avx512bw"
              "avx512dq" "avx512vl" "avx512vnni" "avx512vbmi");
    }
    found
}

/// The value of a key in a file of `key: value` lines.
fn field(file: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let (k, value) = line.split_once(':')?;
        (k.trim() == key).then(|| value.trim().to_owned())
    })
}

impl Findings {
    fn look(model: Option<PathBuf>, deep: bool) -> Self {
        let mut problems = Vec::new();
        let cpu = look_at_cpu(&mut problems);
        let driver = look_at_driver(&mut problems);
        let devices = match &driver {
            Some(_) => look_at_devices(&mut problems),
            None => Vec::new(),
        };
        let nvptx_compiler = cuda_builder::Compiler::find()
            .ok()
            .map(|c| format!("{} ({})", c.rustc().display(), c.version()));
        let model = look_at_model(model, deep, &mut problems);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            cpu,
            driver,
            devices,
            ptx_sources: env!("ANSATZ_PTX_SOURCES"),
            nvptx_compiler,
            model,
            ok: !problems.iter().any(|p| p.fatal),
            problems,
        }
    }
}

fn look_at_cpu(problems: &mut Vec<Problem>) -> CpuFindings {
    let arm = match Cpu::new() {
        Ok(cpu) => Some(cpu.arm()),
        Err(e) => {
            problems.push(Problem {
                what: e.to_string(),
                remedy: "unset ANSATZ_CPU, or set it to an arm that is listed".into(),
                fatal: true,
            });
            None
        }
    };
    if arm == Some(Arm::Baseline) && cfg!(target_arch = "x86_64") {
        problems.push(Problem {
            what: "the CPU's plain arm is in use: right, and slow".into(),
            remedy: "a processor with AVX2 and FMA, or unset ANSATZ_CPU".into(),
            fatal: false,
        });
    }
    CpuFindings {
        name: field("/proc/cpuinfo", "model name"),
        threads: rayon::current_num_threads(),
        features: features(),
        arms: Arm::ALL
            .into_iter()
            .filter(|arm| arm.supported())
            .map(Arm::name)
            .collect(),
        arm: arm.map(Arm::name),
        memory_free_bytes: ram::available(),
    }
}

fn look_at_driver(problems: &mut Vec<Problem>) -> Option<DriverFindings> {
    let driver = match cuda_loader::load() {
        Ok(driver) => driver,
        Err(e) => {
            problems.push(Problem {
                what: e.to_string(),
                remedy:
                    "only --device cuda needs it: with an NVIDIA GPU install its driver, 470 or \
                         later"
                        .into(),
                fatal: false,
            });
            return None;
        }
    };
    if let Err(e) = driver.init() {
        problems.push(Problem {
            what: format!("the NVIDIA driver does not start: {e}"),
            remedy: "see whether `nvidia-smi` works; after an update of the driver restart the \
                     machine"
                .into(),
            fatal: false,
        });
    }
    let (major, minor) = driver.version();
    Some(DriverFindings {
        library: driver.library().to_owned(),
        cuda: format!("{major}.{minor}"),
        missing: driver.missing(),
    })
}

fn look_at_model(
    given: Option<PathBuf>,
    deep: bool,
    problems: &mut Vec<Problem>,
) -> Option<ModelFindings> {
    let Some(directory) = given.or_else(default_directory) else {
        problems.push(Problem {
            what: "no model".into(),
            remedy: "give one with -m DIR or set ANSATZ_MODEL; `host convert` makes one".into(),
            fatal: true,
        });
        return None;
    };
    let mut found = look_at_files(&directory, deep);
    if let Ok((_, unread)) = &mut found {
        problems.extend(unread.take());
    }
    let found = found.map(|(model, _)| model);
    if let Ok(ModelFindings {
        tokenizer: false, ..
    }) = found
    {
        problems.push(Problem {
            what: "the model has no tokenizer.json".into(),
            remedy: "give token ids (--prompt-ids), or add the file".into(),
            fatal: false,
        });
    }
    found
        .inspect_err(|e| {
            problems.push(Problem {
                what: format!("the model in {} does not load: {e}", directory.display()),
                remedy: "-m DIR names another".into(),
                fatal: true,
            });
        })
        .ok()
}

/// A model's files; beside it what is wrong with its layer that drafts.
fn look_at_files(directory: &Path, deep: bool) -> anyhow::Result<(ModelFindings, Option<Problem>)> {
    let mut config = Config::read(directory)?;
    // Of the layers from `first` on the scales are looked at; with `deep` later, with all else.
    let facts = |config: &Config, first: usize| -> anyhow::Result<Facts> {
        let source = Source::open(directory, config, None)?;
        let dense = check_dense(directory, config)?;
        if let Source::Raw(raw) = &source {
            let layers = config.sparse_layers().filter(|l| !deep && *l >= first);
            let layers: Vec<u32> = layers.map(|l| l as u32).collect();
            let mut progress = Progress::new("reading scales");
            let read = check_scales(raw, &layers, |i| progress.set(i + 1, layers.len()));
            progress.finish();
            read?;
        }
        Ok(Facts::of(config, &source, &dense)?)
    };
    let all = facts(&config, 0)?;
    let (mut drafts, mut unread) = (None, None);
    if mtp::is_in(directory, &config)? {
        config.mtp = true;
        match facts(&config, config.layers.len()) {
            Ok(more) => {
                drafts = Some(DraftFindings {
                    layer: config.layers.len(),
                    expert_bytes: more.expert_bytes - all.expert_bytes,
                    dense_bytes: more.dense_bytes - all.dense_bytes,
                });
            }
            Err(e) => {
                config.mtp = false;
                unread = Some(Problem {
                    what: format!("its layer that drafts is not read: {e}"),
                    remedy: "--speculate does not work until then".into(),
                    // All else runs; but all was to be looked at.
                    fatal: deep,
                });
            }
        }
    }
    if deep {
        let mut progress = Progress::new("reading the model");
        let read = check_all(directory, &config, |done, all| progress.set(done, all));
        progress.finish();
        read?;
    }
    let found = ModelFindings {
        facts: all,
        drafts,
        tokenizer: Tokenizer::read(directory, &config)?.is_some(),
        directory: directory.to_owned(),
    };
    Ok((found, unread))
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

impl std::fmt::Display for Findings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let missing = || "not found".to_owned();
        writeln!(f, "host      {}", self.version)?;
        let c = &self.cpu;
        writeln!(
            f,
            "CPU       {}, {} threads, {} free",
            c.name.as_deref().unwrap_or("unknown"),
            c.threads,
            c.memory_free_bytes.map_or_else(|| "unknown".into(), gib)
        )?;
        writeln!(f, "  features {}", c.features.join(" "))?;
        writeln!(
            f,
            "  arm      {} (of {})",
            c.arm.unwrap_or("none"),
            c.arms.join(", ")
        )?;
        match &self.driver {
            None => writeln!(f, "driver    {}", missing())?,
            Some(d) => {
                let lacks = match d.missing {
                    [] => String::new(),
                    names => format!(", without {}", names.join(", ")),
                };
                writeln!(
                    f,
                    "driver    CUDA {} ({}){lacks}",
                    d.cuda,
                    d.library.display()
                )?;
            }
        }
        if self.devices.is_empty() {
            writeln!(f, "devices   none")?;
        }
        for d in &self.devices {
            writeln!(
                f,
                "cuda:{}    {}, compute capability {}, PTX {}, {} of {} free",
                d.ordinal,
                d.name,
                d.compute_capability,
                d.ptx,
                d.memory_free_bytes.map_or_else(|| "unknown".into(), gib),
                gib(d.memory_bytes)
            )?;
        }
        writeln!(f, "PTX       sm_80, sm_90, of sources {}", self.ptx_sources)?;
        writeln!(
            f,
            "nvptx64   {}",
            self.nvptx_compiler.clone().unwrap_or_else(|| {
                "no compiler found (only developers of kernels need one)".into()
            })
        )?;
        match &self.model {
            None => writeln!(f, "model     {}", missing())?,
            Some(m) => write!(
                f,
                "model     {}, {} layers\n{}",
                m.directory.display(),
                m.facts.layers,
                m.facts
            )?,
        }
        if let Some(d) = self.model.as_ref().and_then(|m| m.drafts.as_ref()) {
            writeln!(
                f,
                "  drafts   layer {}, with --speculate: {:.1} MB of experts and {:.1} MB dense more",
                d.layer,
                d.expert_bytes as f64 / 1e6,
                d.dense_bytes as f64 / 1e6
            )?;
        }
        for p in &self.problems {
            let kind = if p.fatal { "problem" } else { "note" };
            writeln!(f, "{kind}: {}; {}", p.what, p.remedy)?;
        }
        let gpu = self.devices.iter().any(|d| d.memory_free_bytes.is_some());
        let verdict = match (self.ok, gpu) {
            (false, _) if self.model.is_some() && self.cpu.arm.is_some() => {
                "not all of the model can be used"
            }
            (false, _) => "`host generate` cannot run",
            (true, false) => "`host generate` runs on the CPU",
            (true, true) => "`host generate` runs on the GPU and on the CPU",
        };
        writeln!(f, "{verdict}")
    }
}

pub fn run(args: DoctorArgs) -> anyhow::Result<()> {
    interrupt::install();
    let findings = Findings::look(args.model, args.deep);
    // What was not read is no finding.
    anyhow::ensure!(!interrupt::requested(), "interrupted");
    if args.json {
        ui::out(&format!("{}\n", serde_json::to_string(&findings)?))?;
    } else {
        ui::out(&findings.to_string())?;
    }
    match findings.problems.iter().find(|p| p.fatal) {
        None => Ok(()),
        Some(p) => Err(anyhow::anyhow!("{}; {}", p.what, p.remedy)),
    }
}

fn look_at_devices(problems: &mut Vec<Problem>) -> Vec<DeviceFindings> {
    let count = CudaDevice::count();
    if count == 0 {
        problems.push(Problem {
            what: "the NVIDIA driver knows no device".into(),
            remedy: "see `nvidia-smi`; in a container pass the devices through".into(),
            fatal: false,
        });
    }
    let mut found = Vec::new();
    for ordinal in 0..count {
        let mut note = |error: DeviceError| {
            problems.push(Problem {
                what: error.to_string(),
                remedy: format!("cuda:{ordinal} is not used; --device cpu works"),
                fatal: false,
            });
        };
        let info = match CudaDevice::info(ordinal) {
            Ok(info) => info,
            Err(error) => {
                note(error);
                continue;
            }
        };
        let free = CudaDevice::new(ordinal).and_then(|device| device.free_bytes());
        found.push(DeviceFindings {
            ordinal,
            name: info.name,
            compute_capability: format!("{}.{}", info.capability.0, info.capability.1),
            ptx: info.ptx,
            memory_bytes: info.memory_bytes,
            memory_free_bytes: free.map_err(note).ok(),
        });
    }
    found
}
