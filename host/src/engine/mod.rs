//! A loaded model on a device that was chosen at run time.

use std::path::Path;

use thiserror::Error;

use crate::backend::LoadExperts;
use crate::backend::cpu::Cpu;
use crate::backend::kernels::{CudaDevice, EmulatedDevice, KernelBackend, KernelError};
use crate::backend::reference::Reference;
use crate::expert::{Form, Tier};
use crate::model::{Config, Model, ModelError, Session, Source, Wanted};

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
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Where to compute.
    pub device: Device,
    /// Where experts live; by default coded if there is an archive.
    pub tier: Option<Tier>,
    /// How coded experts are multiplied.
    pub form: Form,
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
    /// `ram-raw`, `ram-ans`, `vram-raw` or `vram-ans`.
    pub tier: &'static str,
    /// Experts, over all layers.
    pub experts: usize,
    /// Bytes that they take there.
    pub bytes: u64,
}

/// What a run used, as `--json` says it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Placement {
    /// The device, for people.
    pub device: String,
    /// `fused` or `unfused`; none where nothing is coded.
    pub kernel: Option<&'static str>,
    /// Experts and bytes.
    pub tiers: Vec<TierUse>,
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.device)?;
        for t in &self.tiers {
            let mb = t.bytes as f64 / 1e6;
            write!(f, "; {}: {} experts, {mb:.1} MB", t.tier, t.experts)?;
        }
        match self.kernel {
            Some(kernel) => write!(f, "; {kernel} kernels"),
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
    /// Dense tensors that lost bits on the way from f32 to bf16.
    fn rounded(&self) -> usize;
    /// Starts an empty sequence with room for `capacity` tokens; `wanted` is the most that
    /// [`Engine::forward`] will be asked for.
    fn begin(&mut self, capacity: usize, wanted: Wanted) -> Result<(), EngineError>;
    /// Appends tokens to the sequence and returns the wanted rows of logits, `[rows, vocab]`.
    ///
    /// # Panics
    /// Without [`Engine::begin`], or if there is no room.
    fn forward(&mut self, ids: &[u32], wanted: Wanted) -> Result<Vec<f32>, EngineError>;
}

struct Loaded<B: LoadExperts> {
    model: Model<B>,
    session: Option<(Session<B>, Wanted)>,
    form: Form,
    /// `ram` or `vram`.
    gpu: bool,
}

impl<B: LoadExperts> Loaded<B> {
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
            kernel: (p.tier == Tier::Ans).then_some(match self.form {
                Form::Fused => "fused",
                Form::Unfused => "unfused",
            }),
            tiers: vec![TierUse {
                tier: match (self.gpu, p.tier) {
                    (false, Tier::Raw) => "ram-raw",
                    (false, Tier::Ans) => "ram-ans",
                    (true, Tier::Raw) => "vram-raw",
                    (true, Tier::Ans) => "vram-ans",
                },
                experts: p.experts,
                bytes: p.bytes,
            }],
        }
    }

    fn rounded(&self) -> usize {
        self.model.rounded()
    }

    fn begin(&mut self, capacity: usize, wanted: Wanted) -> Result<(), EngineError> {
        if let Some((session, has)) = &mut self.session
            && session.capacity() >= capacity
            && (*has == wanted || *has == Wanted::All)
        {
            session.reset();
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

    fn forward(&mut self, ids: &[u32], wanted: Wanted) -> Result<Vec<f32>, EngineError> {
        let (session, _) = self.session.as_mut().expect("begin comes first");
        let logits = self.model.forward(session, ids, wanted);
        logits.map_err(|e| self.failed(e))
    }
}

/// Loads the model of directory `dir`. `progress` gets `(layers done, layers)`.
pub fn open(
    dir: &Path,
    options: Options,
    mut progress: impl FnMut(usize, usize),
) -> Result<Box<dyn Engine>, EngineError> {
    let config = Config::read(dir)?;
    let source = Source::open(dir, &config, options.tier)?;
    let layers = config.layers.len();
    let load = Load {
        dir,
        config,
        source,
        form: options.form,
        progress: &mut |done| progress(done, layers),
    };
    match options.device {
        Device::Cuda => load.on(cuda()?, true),
        Device::Auto if CudaDevice::count() > 0 => match cuda() {
            Ok(backend) => load.on(backend, true),
            Err(error) => {
                tracing::warn!("using the CPU: {error}");
                load.on(cpu()?, false)
            }
        },
        Device::Auto | Device::Cpu => load.on(cpu()?, false),
        Device::Emulator => load.on(emulator()?, false),
        Device::Reference => load.on(Reference, false),
    }
}

fn cuda() -> Result<KernelBackend<CudaDevice>, EngineError> {
    let backend = CudaDevice::new(0)
        .map_err(KernelError::from)
        .and_then(KernelBackend::new);
    backend.map_err(|e| EngineError::Device {
        device: "cuda",
        why: e.to_string(),
    })
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

struct Load<'a> {
    dir: &'a Path,
    config: Config,
    source: Source,
    form: Form,
    progress: &'a mut dyn FnMut(usize),
}

impl Load<'_> {
    fn on<B: LoadExperts + 'static>(
        self,
        backend: B,
        gpu: bool,
    ) -> Result<Box<dyn Engine>, EngineError> {
        let model = Model::load(
            backend,
            self.dir,
            self.config,
            &self.source,
            self.form,
            self.progress,
        )?;
        Ok(Box::new(Loaded {
            model,
            session: None,
            form: self.form,
            gpu,
        }))
    }
}
