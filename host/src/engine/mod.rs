//! A loaded model on a device that was chosen at run time.

mod placed;

use std::path::Path;
use std::time::Instant;

use thiserror::Error;

use crate::archive::Archive;
use crate::backend::cpu::Cpu;
use crate::backend::kernels::{
    CudaDevice, DeviceError, EmulatedDevice, KernelBackend, KernelError,
};
use crate::backend::reference::Reference;
use crate::backend::split::Split;
use crate::backend::{KvFormat, LoadExperts};
use crate::expert::{Form, Tier};
use crate::model::{Config, Model, ModelError, Session, Source, Wanted, bytes_to_load, mtp};
use crate::placement::calibrate::{self, Calibration};
use crate::placement::memory::{DensePart, cache_bytes};
use crate::placement::request::{Request, RequestError};
use crate::placement::{self, Plan, Profile};
use crate::sample;
use crate::trace::Trace;
pub use placed::{open_placed, open_whole};

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A GPU if there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// The GPU's kernels on the CPU, every access checked; for tests.
    Emulator,
    /// The plain reference, for tests.
    Reference,
}

/// What a user may choose.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to compute.
    pub device: Device,
    /// Numbers of the GPUs, of which several share the experts; one given twice is two of them.
    pub devices: Vec<u32>,
    /// Where experts live; by default coded if there is an archive.
    pub tier: Option<Tier>,
    /// How coded experts are multiplied.
    pub form: Form,
    /// What a plan is made of, where one is made.
    pub request: Request,
    /// Whether experts are spread over tiers by plan in any case; else that is done only over several
    /// devices, and where they do not fit into one's memory.
    pub placed: bool,
    /// Positions that the KV cache will be for.
    pub positions: usize,
    /// How it keeps them.
    pub kv: KvFormat,
    /// Tokens of a prompt that go through the model together.
    pub batch: usize,
    /// Tokens to draft at most; with any the model's layer for that is loaded.
    pub speculate: usize,
    /// Experts that may come to device memory between two tokens, at most; none moves without a plan.
    pub repin: usize,
}

impl Options {
    /// The model's configuration, its layer that drafts included where that is wanted.
    fn config(&self, dir: &Path) -> Result<Config, ModelError> {
        let mut config = Config::read(dir)?;
        config.kv = self.kv;
        // A token and its drafts go together.
        config.batch = self.batch.max(self.speculate + 1);
        if self.speculate > 0 {
            mtp::want(dir, &mut config)?;
        }
        Ok(config)
    }

    /// The most that a forward pass of generation asks for.
    fn wanted(&self) -> Wanted {
        match self.speculate {
            0 => Wanted::Last,
            n => Wanted::Tail(n + 1),
        }
    }
}

/// Refuses logits, those behind the token of `position`, that are not finite.
pub fn check_finite(logits: &[f32], position: usize) -> Result<(), EngineError> {
    if sample::all_finite(logits) {
        return Ok(());
    }
    match logits.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(token) => Err(EngineError::NotFinite {
            token,
            position,
            found: logits[token],
        }),
    }
}

/// Why an engine does not start or run.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device that was asked for.
    #[error("--device {device}: {why}")]
    Device {
        /// Its name on the command line.
        device: &'static str,
        /// What is missing, and the remedy.
        why: String,
    },
    /// Experts in tiers, where there is one place only.
    #[error(
        "--device {device} has one place for experts; budgets are for a GPU and an archive: \
         `host doctor` says what is here"
    )]
    NoTiers {
        /// Its name on the command line.
        device: &'static str,
    },
    /// Budgets, and `--tier raw`.
    #[error(
        "budgets spread what an archive has: in place of --tier raw give --tiers vram-hot,ram-raw, whose experts are \
         int4"
    )]
    RawTier,
    /// GPUs by number, where none computes.
    #[error("--devices names GPUs; --device {device} has none")]
    NoGpus {
        /// Its name on the command line.
        device: &'static str,
    },
    /// Budgets that hold no model, or what a plan needs.
    #[error(transparent)]
    Plan(#[from] RequestError),
    /// Weights that overflow, or are not numbers.
    #[error(
        "the logit of token {token} at position {position} is {found}; see what is wrong with the \
         model's weights with `host doctor --deep -m DIR`"
    )]
    NotFinite {
        /// Token.
        token: usize,
        /// Position, from 0.
        position: usize,
        /// What it is.
        found: f32,
    },
    /// The back end, while it computed.
    #[error("{device}: {source}")]
    Backend {
        /// Where.
        device: String,
        /// What happened.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Experts in one tier.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct TierUse {
    /// `ram-raw`, `ram-ans`, `vram-raw` or `vram-ans`; of a plan [`placement::Tier::name`].
    pub tier: &'static str,
    /// Experts, over all layers.
    pub experts: usize,
    /// Bytes that they take there.
    pub bytes: u64,
    /// How often they were chosen so far, where experts are in tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selections: Option<u64>,
}

/// The KV cache.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct KvUse {
    /// Of its rows.
    pub format: KvFormat,
    /// Positions that there is room for, or will be.
    pub positions: usize,
    /// Bytes of them.
    pub bytes: u64,
}

impl KvUse {
    fn of(config: &Config, positions: usize) -> Self {
        Self {
            format: config.kv,
            positions,
            bytes: cache_bytes(config, positions),
        }
    }
}

/// What a run used, as `--json` says it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Placement {
    /// The device, for people.
    pub device: String,
    /// `fused` or `unfused`; none where nothing is coded.
    pub kernel: Option<&'static str>,
    /// What is kept of a sequence.
    pub kv: KvUse,
    /// Experts and bytes.
    pub tiers: Vec<TierUse>,
    /// How often experts in device memory were chosen, where its tiers are not told apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram_selections: Option<u64>,
    /// Microseconds of a token that the plan predicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_us: Option<u64>,
    /// Experts that came to device memory in others' places so far, where they may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<u64>,
    /// Experts on disk that a pass needed and did not read, their record being in memory still.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<u64>,
    /// Experts that were copied to the device before their layer had chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead: Option<Ahead>,
}

/// Experts copied to the device by a guess of what a layer would choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Ahead {
    /// Guessed one layer before.
    pub guessed: u64,
    /// Those of them that were chosen then.
    pub chosen: u64,
    /// Guessed only further ahead, while the disk was at work.
    pub further: u64,
    /// Those of them that were chosen then.
    pub further_chosen: u64,
}

impl Placement {
    /// Share of all selections that each tier had, for people; nothing without a plan.
    pub fn hits(&self) -> Option<String> {
        let vram = self.vram_selections.map(|n| ("device memory", n));
        let others = self
            .tiers
            .iter()
            .filter_map(|t| Some((t.tier, t.selections?)));
        let counts: Vec<(&str, u64)> = vram.into_iter().chain(others).collect();
        let all: u64 = counts.iter().map(|(_, n)| n).sum();
        let shares: Vec<String> = (counts.iter())
            .map(|(name, n)| format!("{name} {:.1}% ({n})", 100.0 * *n as f64 / all as f64))
            .collect();
        let ahead = self.ahead.map_or(String::new(), |a| {
            let (copied, chosen) = (a.guessed + a.further, a.chosen + a.further_chosen);
            let share = 100.0 * chosen as f64 / copied as f64;
            format!("; {copied} copied by a guess, {share:.1}% of which were chosen")
        });
        let kept = self.kept.map_or(String::new(), |n| {
            format!("; {n} reads saved by records still in memory")
        });
        (all > 0).then(|| shares.join(", ") + &kept + &ahead)
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.device)?;
        for t in &self.tiers {
            let mb = t.bytes as f64 / 1e6;
            write!(f, "; {}: {} experts, {mb:.1} MB", t.tier, t.experts)?;
        }
        if let Some(kernel) = self.kernel {
            write!(f, "; {kernel} kernels")?;
        }
        let (kv, mb) = (&self.kv, self.kv.bytes as f64 / 1e6);
        let (format, positions) = (kv.format.name(), kv.positions);
        write!(
            f,
            "; KV cache {format}, {mb:.1} MB for {positions} positions"
        )?;
        match self.predicted_us {
            Some(us) => write!(f, "; predicted {:.1} tokens/s", 1e6 / us as f64),
            None => Ok(()),
        }
    }
}

/// A model that runs, whatever it runs on. It holds one sequence of tokens.
pub trait Engine {
    /// The model's geometry.
    fn config(&self) -> &Config;
    /// Where it runs and its experts are.
    fn placement(&self) -> Placement;
    /// Starts an empty sequence with room for `capacity` tokens; `wanted` is the most that
    /// [`Engine::forward`] will be asked for.
    fn begin(&mut self, capacity: usize, wanted: Wanted) -> Result<(), EngineError>;
    /// Goes back to the first `tokens` tokens of the sequence, if it holds them and has room for
    /// `capacity` and what is `wanted`; else nothing happens. Whether it did.
    fn resume(&mut self, tokens: usize, capacity: usize, wanted: Wanted) -> bool;
    /// Appends tokens to the sequence and returns the wanted rows of logits, `[rows, vocab]`. Those
    /// of [`Wanted::Tail`] may not be finite: the caller looks at what it uses ([`check_finite`]).
    ///
    /// # Panics
    /// Without [`Engine::begin`], or if there is no room.
    fn forward(&mut self, ids: &[u32], wanted: Wanted) -> Result<Vec<f32>, EngineError> {
        let mut logits = Vec::new();
        self.forward_into(ids, wanted, &mut logits)?;
        Ok(logits)
    }
    /// The same, to `logits`, whose memory is used again.
    ///
    /// # Panics
    /// As [`Engine::forward`].
    fn forward_into(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), EngineError>;
    /// Drafts up to `n` tokens after `next`, which is to be the next token of the sequence and is not
    /// part of it yet. None where no layer that drafts was loaded.
    ///
    /// # Panics
    /// Without [`Engine::begin`].
    fn draft(&mut self, next: u32, n: usize) -> Result<Vec<u32>, EngineError>;
    /// Forgets the last `n` tokens of the sequence.
    ///
    /// # Panics
    /// If there are not as many.
    fn roll_back(&mut self, n: usize);
    /// Appends tokens to the sequence, so many in a pass, and says what passes but the first one, which
    /// may be recorded, took where. None, and nothing done, where the device does not tell.
    ///
    /// # Panics
    /// As [`Engine::forward`], or if passes have no tokens.
    fn split(&mut self, ids: &[u32], at_once: usize) -> Result<Option<Split>, EngineError>;
    /// From here on counts which experts are chosen.
    fn record_usage(&mut self);
    /// What was chosen since [`Engine::record_usage`].
    fn usage(&self) -> Option<Profile>;
    /// From here on notes how tokens are routed.
    fn record_trace(&mut self);
    /// How the tokens of the sequence were routed since [`Engine::record_trace`].
    fn trace(&self) -> Option<Trace>;
    /// From here on the token at position `p` goes to the experts of token `p mod tokens` of a trace.
    fn replay(&mut self, trace: &Trace) -> Result<(), EngineError>;
}

struct Loaded<B: LoadExperts> {
    model: Model<B>,
    session: Option<(Session<B>, Wanted)>,
    form: Form,
    /// `ram` or `vram`.
    gpu: bool,
    /// Positions that a sequence is to have room for.
    positions: usize,
    plan: Option<Plan>,
    repin: Option<Repin>,
}

/// Experts that may change places.
struct Repin {
    /// At most, between two tokens.
    most: usize,
    /// Whether that has failed, and been said.
    failed: bool,
}

impl<B: LoadExperts> Loaded<B> {
    /// Between tokens. What fails is said, and ends nothing but this.
    fn repin(&mut self) {
        if let Some(repin) = self.repin.as_mut().filter(|r| !r.failed)
            && let Err(e) = self.model.repin(repin.most)
        {
            repin.failed = true;
            tracing::warn!("{e}; from here on experts stay where they are");
        }
    }

    /// [`Engine::split`], while parts are kept.
    fn split_each(&mut self, ids: &[u32], at_once: usize) -> Result<Split, B::Error> {
        let (session, _) = self.session.as_mut().expect("begin comes first");
        session.forget_recordings();
        let mut split = Split::default();
        for (i, ids) in ids.chunks(at_once).enumerate() {
            self.model.backend().parts()?;
            let start = Instant::now();
            self.model.forward(session, ids, Wanted::Last)?;
            let seconds = start.elapsed().as_secs_f64();
            let parts = self.model.backend().parts()?;
            match i {
                0 => split.first_us = 1e6 * seconds,
                _ => split.add(seconds, &parts),
            }
        }
        split.recordings = session.recordings();
        Ok(split)
    }

    fn tiers(&self, plan: &Plan) -> Vec<TierUse> {
        let used = self.model.used();
        // Where some layers do not tell the two tiers of device memory apart, none is.
        let known = |t: placement::Tier| used.vram == 0 || t > placement::Tier::VramAns;
        (plan.table.iter().zip(used.tiers))
            .filter(|(t, _)| t.experts > 0)
            .map(|(t, used)| TierUse {
                tier: t.tier.name(),
                experts: t.experts,
                bytes: t.bytes,
                selections: known(t.tier).then_some(used),
            })
            .collect()
    }

    fn failed(&self, e: B::Error) -> EngineError {
        EngineError::Backend {
            device: self.model.backend().describe(),
            source: Box::new(e),
        }
    }
}

impl<B: LoadExperts> Engine for Loaded<B> {
    fn config(&self) -> &Config {
        self.model.config()
    }

    fn placement(&self) -> Placement {
        let p = self.model.placement();
        Placement {
            device: self.model.backend().describe(),
            kv: {
                let held = self.session.as_ref().map(|(s, _)| s.capacity());
                KvUse::of(self.model.config(), held.unwrap_or(self.positions))
            },
            kernel: (p.tier == Tier::Ans).then_some(match self.form {
                Form::Fused => "fused",
                Form::Unfused => "unfused",
            }),
            tiers: match &self.plan {
                Some(plan) => self.tiers(plan),
                None => vec![TierUse {
                    tier: match (self.gpu, p.tier) {
                        (false, Tier::Raw) => "ram-raw",
                        (false, Tier::Ans) => "ram-ans",
                        (true, Tier::Raw) => "vram-raw",
                        (true, Tier::Ans) => "vram-ans",
                    },
                    experts: p.experts,
                    bytes: p.bytes,
                    selections: None,
                }],
            },
            vram_selections: self.plan.as_ref().and_then(|_| {
                let used = self.model.used();
                (used.vram > 0).then(|| {
                    used.vram
                        + used.tiers[..=placement::Tier::VramAns as usize]
                            .iter()
                            .sum::<u64>()
                })
            }),
            predicted_us: self.plan.as_ref().map(|p| (1e6 * p.token) as u64),
            moved: self.repin.as_ref().map(|_| self.model.moved()),
            kept: Some(self.model.used().kept).filter(|n| *n > 0),
            ahead: {
                let [guessed, chosen, further, further_chosen] = self.model.used().ahead;
                (guessed + further > 0).then_some(Ahead {
                    guessed,
                    chosen,
                    further,
                    further_chosen,
                })
            },
        }
    }

    fn begin(&mut self, capacity: usize, wanted: Wanted) -> Result<(), EngineError> {
        if self.resume(0, capacity, wanted) {
            return Ok(());
        }
        self.session = None; // its memory goes first
        let session = self
            .model
            .session(capacity, wanted)
            .map_err(|e| self.failed(e))?;
        self.session = Some((session, wanted));
        Ok(())
    }

    fn resume(&mut self, tokens: usize, capacity: usize, wanted: Wanted) -> bool {
        let Some((session, has)) = &mut self.session else {
            return false;
        };
        let fits = session.capacity() >= capacity && (*has == wanted || *has == Wanted::All);
        if !fits || session.position() < tokens {
            return false;
        }
        session.roll_back(session.position() - tokens);
        true
    }

    fn forward_into(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        self.repin();
        let (session, _) = self.session.as_mut().expect("begin comes first");
        let first = session.position();
        let done = self.model.forward_into(session, ids, wanted, logits);
        done.map_err(|e| self.failed(e))?;
        let vocab = self.model.config().vocab;
        let skipped = ids.len() - logits.len() / vocab;
        if !matches!(wanted, Wanted::Tail(_)) {
            for (i, row) in logits.chunks(vocab).enumerate() {
                check_finite(row, first + skipped + i)?;
            }
        }
        Ok(())
    }

    fn draft(&mut self, next: u32, n: usize) -> Result<Vec<u32>, EngineError> {
        let (session, _) = self.session.as_mut().expect("begin comes first");
        let drafts = self.model.draft(session, next, n, None);
        drafts.map_err(|e| self.failed(e))
    }

    fn roll_back(&mut self, n: usize) {
        let (session, _) = self.session.as_mut().expect("begin comes first");
        session.roll_back(n);
    }

    fn split(&mut self, ids: &[u32], at_once: usize) -> Result<Option<Split>, EngineError> {
        if !self.model.backend().keep_parts(true) {
            return Ok(None);
        }
        let done = self.split_each(ids, at_once);
        self.model.backend().keep_parts(false);
        if let Some((session, _)) = &mut self.session {
            session.forget_recordings();
        }
        done.map(Some).map_err(|e| self.failed(e))
    }

    fn record_usage(&mut self) {
        self.model.record_usage();
    }

    fn usage(&self) -> Option<Profile> {
        self.model.usage()
    }

    fn record_trace(&mut self) {
        self.model.record_trace();
    }

    fn trace(&self) -> Option<Trace> {
        self.model.trace()
    }

    fn replay(&mut self, trace: &Trace) -> Result<(), EngineError> {
        let foreseen = self.plan.as_ref().map_or(0.0, |p| p.foreseen);
        let done = self.model.replay(trace, foreseen);
        done.map_err(|e| self.failed(e))
    }
}

/// Loads the model of directory `dir`. `progress` gets `(bytes done, bytes)`.
pub fn open(
    dir: &Path,
    options: Options,
    mut progress: impl FnMut(usize, usize),
) -> Result<Box<dyn Engine>, EngineError> {
    let config = options.config(dir)?;
    let (several, named) = (options.devices.len() > 1, options.devices != [0]);
    match options.device {
        Device::Cpu if named => return Err(EngineError::NoGpus { device: "cpu" }),
        Device::Reference if named => {
            return Err(EngineError::NoGpus {
                device: "reference",
            });
        }
        // Why there is none.
        Device::Auto if named && CudaDevice::count() == 0 => {
            cuda(&options.devices)?;
        }
        _ => (),
    }
    let request = Request {
        positions: options.positions.max(options.request.positions),
        ..options.request.clone()
    };
    let placed = options.placed || several;
    match (options.device, placed) {
        (Device::Emulator, true) => {
            let devices = (options.devices.iter())
                .map(|_| (EmulatedDevice::default(), EmulatedDevice::MEMORY))
                .collect();
            return open_placed(devices, dir, &options, &request, &mut progress);
        }
        (Device::Cuda | Device::Auto, _) if CudaDevice::count() > 0 => {
            // Whatever is wrong with a single one is said below.
            let opened = match cuda_devices(&options.devices) {
                Err(e) if several => return Err(unusable("cuda", e)),
                opened => opened.ok(),
            };
            if let Some(devices) = opened {
                let coded = options.tier != Some(Tier::Raw);
                if placed || coded && overflows(dir, &config, &options, devices[0].1)? {
                    return open_placed(devices, dir, &options, &request, &mut progress);
                }
            }
        }
        (device, true) => {
            let device = match device {
                Device::Cpu => "cpu",
                Device::Reference => "reference",
                Device::Cuda => cuda(&options.devices).map(|_| "cuda")?,
                Device::Auto | Device::Emulator => "auto",
            };
            return Err(EngineError::NoTiers { device });
        }
        _ => (),
    }
    let source = Source::open(dir, &config, options.tier)?;
    let bytes = bytes_to_load(dir, &config, &source)?;
    let load = Load {
        dir,
        config,
        source,
        form: options.form,
        bytes: &bytes,
        positions: options.positions,
    };
    match options.device {
        Device::Cuda => {
            let backend = cuda(&options.devices)?;
            on_cuda(load, backend, &options, &request, &mut progress)
        }
        Device::Auto if CudaDevice::count() > 0 => match cuda(&options.devices) {
            Ok(backend) => on_cuda(load, backend, &options, &request, &mut progress),
            Err(error) if named => Err(error),
            Err(error) => {
                tracing::warn!("using the CPU: {error}");
                load.on(cpu()?, false, &mut progress)
            }
        },
        Device::Auto | Device::Cpu => load.on(cpu()?, false, &mut progress),
        Device::Emulator => load.on(emulator()?, false, &mut progress),
        Device::Reference => load.on(Reference, false, &mut progress),
    }
}

/// Whether a model and its coded experts are larger than the device's memory.
fn overflows(
    dir: &Path,
    config: &Config,
    options: &Options,
    free: u64,
) -> Result<bool, EngineError> {
    let file = dir.join(crate::model::directory::ARCHIVE_FILE);
    if !file.exists() {
        return Ok(false);
    }
    let archive = Archive::open(&file).map_err(ModelError::from)?;
    let dense = DensePart::open(dir, config)?;
    // As if whatever several tokens share were decoded first: what overflows by that alone is planned.
    let fixed: u64 = (placement::memory::fixed(config, &dense, options.positions, 1).iter())
        .map(|f| f.vram)
        .sum();
    let mut experts = 0;
    for layer in archive.layers() {
        for e in 0..archive.experts() {
            experts += archive.place_of(*layer, e).map_err(ModelError::from)?.1 as u64;
        }
    }
    Ok(fixed + experts > free)
}

/// Devices of these numbers, and what is free of each one's memory.
fn cuda_devices(numbers: &[u32]) -> Result<Vec<(CudaDevice, u64)>, DeviceError> {
    (numbers.iter())
        .map(|number| {
            let device = CudaDevice::new(*number)?;
            let alike = numbers.iter().filter(|n| *n == number).count() as u64;
            Ok((device.clone(), device.free_bytes()? / alike))
        })
        .collect()
}

fn unusable(device: &'static str, e: impl std::fmt::Display) -> EngineError {
    EngineError::Device {
        device,
        why: e.to_string(),
    }
}

/// What the first device and each of the others take to exchange a layer's activations.
pub fn exchanges<D: crate::backend::kernels::Device>(
    devices: &[(D, u64)],
    rates: &mut [Calibration],
    config: &Config,
) -> Result<(), EngineError> {
    for ((device, _), found) in devices.iter().zip(rates).skip(1) {
        let line = calibrate::exchange_between(&devices[0].0, device, config);
        found.rates.exchange = line.map_err(|e| unusable("cuda", e))?;
    }
    Ok(())
}

fn cuda(devices: &[u32]) -> Result<KernelBackend<CudaDevice>, EngineError> {
    let number = devices.first().copied().unwrap_or(0);
    let backend = CudaDevice::new(number)
        .map_err(KernelError::from)
        .and_then(KernelBackend::new);
    backend.map_err(|e| unusable("cuda", e))
}

fn emulator() -> Result<KernelBackend<EmulatedDevice>, EngineError> {
    KernelBackend::new(EmulatedDevice::default()).map_err(|e| EngineError::Device {
        device: "emulator",
        why: e.to_string(),
    })
}

fn cpu() -> Result<Cpu, EngineError> {
    Cpu::new().map_err(|e| EngineError::Device {
        device: "cpu",
        why: e.to_string(),
    })
}

/// Loads a model whose experts all fit into the device's memory, so it seems.
fn on_cuda(
    load: Load<'_>,
    backend: KernelBackend<CudaDevice>,
    options: &Options,
    request: &Request,
    progress: &mut impl FnMut(usize, usize),
) -> Result<Box<dyn Engine>, EngineError> {
    if load.source.coded().is_none() {
        return load.on(backend, true, progress);
    }
    let device = backend.device().clone();
    let free = device.free_bytes().map_err(|e| unusable("cuda", e))?;
    drop(backend);
    open_whole((device, free), load.dir, options, request, progress)
}

struct Load<'a> {
    dir: &'a Path,
    config: Config,
    source: Source,
    form: Form,
    /// Loaded with each layer.
    bytes: &'a [u64],
    positions: usize,
}

impl Load<'_> {
    fn on<B: LoadExperts + 'static>(
        self,
        backend: B,
        gpu: bool,
        progress: &mut impl FnMut(usize, usize),
    ) -> Result<Box<dyn Engine>, EngineError> {
        let all = self.bytes.last().copied().unwrap_or(0) as usize;
        let model = Model::load(
            backend,
            self.dir,
            self.config,
            &self.source,
            self.form,
            |done| progress(self.bytes[done - 1] as usize, all),
        )?;
        Ok(Box::new(Loaded {
            model,
            session: None,
            form: self.form,
            gpu,
            positions: self.positions,
            plan: None,
            repin: None,
        }))
    }
}
