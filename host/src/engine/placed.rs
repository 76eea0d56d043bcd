//! A model whose experts are placed by plan, and what becomes of it where memory runs out.
//!
//! A plan counts what is allocated in real sizes, but others may use the device too, and drivers have
//! needs of their own. So where an allocation is refused, while the model is loaded or later, it is placed
//! anew by a plan with an eighth less of that memory for experts, which is said; the dense part stays where
//! it is. Later the sequence's tokens go through the new one first. No result changes by a bit.

use std::path::{Path, PathBuf};

use super::{Engine, EngineError, Loaded, Options, Placement, Repin, exchanges, unusable};
use crate::archive::Archive;
use crate::backend::kernels::{Device, DeviceError, KernelBackend, KernelError};
use crate::backend::split::Split;
use crate::model::{Config, Model, ModelError, Source, Wanted, bytes_to_load};
use crate::placement::calibrate::Calibration;
use crate::placement::request::{Planned, Request, Size};
use crate::placement::{self, Profile};
use crate::trace::Trace;

/// Smaller plans that are made before a refused allocation is an error.
const PLANS: usize = 3;

/// Rates of each device. The fastest at the dense part comes first, where it is 5% faster or more.
fn rates_of<D: crate::backend::kernels::Device + Clone + 'static>(
    devices: &mut [(D, u64)],
    request: &Request,
    archive: &Archive,
    dir: &Path,
    config: &Config,
) -> Result<Vec<Calibration>, EngineError> {
    let mut rates = Vec::with_capacity(devices.len());
    for (device, _) in devices.iter() {
        let backend = KernelBackend::new(device.clone()).map_err(|e| unusable("cuda", e))?;
        rates.push(request.rates(&backend, archive, dir, config)?.0);
    }
    let dense = |i: usize| rates[i].rates.dense;
    let fastest = (0..rates.len()).min_by(|a, b| dense(*a).total_cmp(&dense(*b)));
    if let Some(fastest) = fastest.filter(|i| dense(*i) < 0.95 * dense(0)) {
        rates.swap(0, fastest);
        devices.swap(0, fastest);
    }
    if request.rates.is_none() {
        exchanges(devices, &mut rates, config)?;
    }
    Ok(rates)
}

/// Which memory ran out.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Memory {
    /// That of a device of this name.
    Device(String),
    Host,
}

/// A model by plan.
struct Placed<D: Device> {
    devices: Vec<(D, u64)>,
    dir: PathBuf,
    options: Options,
    request: Request,
    rates: Option<Vec<Calibration>>,
    /// Smaller plans since memory sufficed.
    plans: usize,
    /// What the model was loaded by.
    planned: Option<Planned>,
    /// None while there is no other model yet in the place of one, and once none could be loaded there: the
    /// error says so, and all that is left to do is to drop this.
    loaded: Option<Loaded<KernelBackend<D>>>,
    /// Tokens of the sequence.
    ids: Vec<u32>,
    /// Routing in the routers' place.
    replayed: Option<Trace>,
}

/// Plans tiers for the experts of directory `dir` on `devices`, of whose memory so many bytes are free
/// each, and loads the model. Where memory runs out all the same, a smaller plan is made, and said.
pub fn open_placed<D: Device + Clone + 'static>(
    devices: Vec<(D, u64)>,
    dir: &Path,
    options: &Options,
    request: &Request,
    progress: &mut impl FnMut(usize, usize),
) -> Result<Box<dyn Engine>, EngineError> {
    let free = devices.iter().map(|(_, free)| *free).min();
    request.say_excess(free.unwrap_or(0));
    let mut placed = Placed::new(devices, dir, options, request);
    placed.load(progress)?;
    Ok(Box::new(placed))
}

/// Loads the model of directory `dir` with all its experts coded in the memory of one device, of which so
/// many bytes are free. Where memory runs out all the same, now or later, it is placed by plan.
pub fn open_whole<D: Device + Clone + 'static>(
    device: (D, u64),
    dir: &Path,
    options: &Options,
    request: &Request,
    progress: &mut impl FnMut(usize, usize),
) -> Result<Box<dyn Engine>, EngineError> {
    let mut placed = Placed::new(vec![device], dir, options, request);
    match placed.whole(progress) {
        Ok(loaded) => placed.loaded = Some(loaded),
        Err(e) => {
            placed.smaller(e)?;
            placed.load(progress)?;
        }
    }
    Ok(Box::new(placed))
}

impl<D: Device + Clone + 'static> Placed<D> {
    fn new(devices: Vec<(D, u64)>, dir: &Path, options: &Options, request: &Request) -> Self {
        Self {
            devices,
            dir: dir.into(),
            options: options.clone(),
            request: Request {
                moving: options.repin > 0,
                ..request.clone()
            },
            rates: None,
            plans: 0,
            planned: None,
            loaded: None,
            ids: Vec::new(),
            replayed: None,
        }
    }

    fn loaded(&self) -> &Loaded<KernelBackend<D>> {
        (self.loaded.as_ref()).expect("not used again after an error")
    }

    fn loaded_mut(&mut self) -> &mut Loaded<KernelBackend<D>> {
        (self.loaded.as_mut()).expect("not used again after an error")
    }

    /// Loads the model by the request, or by as many smaller ones as are left.
    fn load(&mut self, progress: &mut impl FnMut(usize, usize)) -> Result<(), EngineError> {
        loop {
            match self.attempt(progress) {
                Ok(loaded) => {
                    self.loaded = Some(loaded);
                    return Ok(());
                }
                Err(e) => self.smaller(e)?,
            }
        }
    }

    /// Says that memory has run out, and makes the next plan a smaller one; any other error stays one, and
    /// so does this where that was done often enough.
    fn smaller(&mut self, error: EngineError) -> Result<(), EngineError> {
        let memory = match &error {
            EngineError::Model(ModelError::Place { source, .. })
            | EngineError::Backend { source, .. } => {
                source.downcast_ref::<KernelError>().and_then(lacks)
            }
            _ => None,
        };
        let Some(memory) = memory.filter(|_| self.plans < PLANS) else {
            return Err(error);
        };
        self.plans += 1;
        // What was not planned is planned first.
        let Some(planned) = &self.planned else {
            tracing::warn!("{error}; placing experts by plan");
            return Ok(());
        };
        match memory {
            Memory::Device(name) => {
                tracing::warn!("{error}; placing fewer experts in its memory");
                self.request.short.resize(self.devices.len(), 0);
                let each = self.request.short.iter_mut().zip(&self.devices);
                let plans = planned.room.iter().zip(&planned.plan.vram_of);
                for ((short, (device, _)), (room, taken)) in each.zip(plans) {
                    // Two devices of one GPU have one name, and one memory.
                    if device.describe() == name {
                        *short += room.saturating_sub(taken / 8 * 7);
                    }
                }
            }
            Memory::Host => {
                tracing::warn!("{error}; placing fewer experts in host memory");
                self.request.ram = Some(Size::Bytes(planned.plan.ram / 8 * 7));
            }
        }
        Ok(())
    }

    /// Loads the model without a plan.
    fn whole(
        &self,
        progress: &mut impl FnMut(usize, usize),
    ) -> Result<Loaded<KernelBackend<D>>, EngineError> {
        let (dir, options) = (&self.dir, &self.options);
        let config = options.config(dir)?;
        let source = Source::open(dir, &config, options.tier)?;
        let Some(archive) = source.coded() else {
            return Err(EngineError::NoTiers { device: "cuda" });
        };
        // One tier, which is loaded as several are: past the page cache, through pinned buffers.
        let layer = vec![placement::Tier::VramAns; archive.experts()];
        let tiers = vec![layer; archive.layers().len()];
        let Some((source, _)) = source.tiered(tiers, Vec::new(), 0, false)? else {
            return Err(EngineError::NoTiers { device: "cuda" });
        };
        let bytes = bytes_to_load(dir, &config, &source)?;
        let all = bytes.last().copied().unwrap_or(0) as usize;
        let backend = KernelBackend::new(self.devices[0].0.clone());
        let backend = backend.map_err(|e| unusable("cuda", e))?;
        let model = Model::load(backend, dir, config, &source, options.form, |done| {
            progress(bytes[done - 1] as usize, all);
        })?;
        Ok(Loaded {
            model,
            session: None,
            form: options.form,
            gpu: true,
            positions: options.positions,
            plan: None,
            repin: None,
        })
    }

    fn attempt(
        &mut self,
        progress: &mut impl FnMut(usize, usize),
    ) -> Result<Loaded<KernelBackend<D>>, EngineError> {
        let (dir, options, request) = (&self.dir, &self.options, &self.request);
        let devices = &mut self.devices;
        let config = options.config(dir)?;
        let source = Source::open(dir, &config, options.tier)?;
        let Some(archive) = source.coded() else {
            return Err(match options.tier {
                Some(crate::expert::Tier::Raw) => EngineError::RawTier,
                _ => EngineError::NoTiers { device: "cuda" },
            });
        };
        let rates = match self.rates.take() {
            Some(found) => found,
            None => rates_of(devices, request, archive, dir, &config)?,
        };
        let others: Vec<(Calibration, u64)> = (rates[1..].iter().cloned())
            .zip(devices[1..].iter().map(|(_, free)| *free))
            .collect();
        let (first, free) = (rates[0].clone(), devices[0].1);
        self.rates = Some(rates);
        let planned = request.plan_devices(dir, &config, archive, first, free, &others)?;
        let planned = self.planned.insert(planned);
        let staged = placement::staged(config.router.top_k);
        let Some((source, direct)) = source.tiered(
            planned.plan.tiers.clone(),
            planned.plan.devices.clone(),
            staged,
            request.moving,
        )?
        else {
            return Err(EngineError::NoTiers { device: "cuda" });
        };
        let bytes = bytes_to_load(dir, &config, &source)?;
        let all = bytes.last().copied().unwrap_or(0) as usize;
        let on_disk = planned.plan.table[placement::Tier::DiskAns as usize].experts;
        if on_disk > 0 && !direct {
            tracing::warn!(
                "the file system takes no direct reads: experts are read through its cache"
            );
        }
        let others = devices[1..].iter().map(|(d, _)| d.clone()).collect();
        let backend = KernelBackend::over(devices[0].0.clone(), others);
        let backend = backend.map_err(|e| unusable("cuda", e))?;
        let model = Model::load(backend, dir, config, &source, options.form, |done| {
            progress(bytes[done - 1] as usize, all);
        })?;
        // The caches too, while there is another plan to make.
        let wanted = options.wanted();
        let session = model.session(request.positions.max(options.positions), wanted);
        let session = session.map_err(|e| ModelError::Place {
            what: "the KV cache".into(),
            source: Box::new(e),
        })?;
        Ok(Loaded {
            model,
            session: Some((session, wanted)),
            form: options.form,
            gpu: true,
            positions: options.positions,
            plan: Some(planned.plan.clone()),
            repin: request.moving.then_some(Repin {
                most: options.repin,
                failed: false,
            }),
        })
    }

    /// Does something with the model. Where memory runs out, that is said, and done again with a model by a
    /// smaller plan and with the same tokens.
    fn with<T>(
        &mut self,
        work: impl FnMut(&mut Loaded<KernelBackend<D>>) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let done = self.insist(work)?;
        // The next time may be another matter.
        self.plans = 0;
        Ok(done)
    }

    fn insist<T>(
        &mut self,
        mut work: impl FnMut(&mut Loaded<KernelBackend<D>>) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        loop {
            match work(self.loaded_mut()) {
                Err(e @ EngineError::Backend { .. }) => self.smaller(e)?,
                other => return other,
            }
            self.load_again()?;
        }
    }

    /// A model in the place of one that is given back first.
    fn load_again(&mut self) -> Result<(), EngineError> {
        let Some(before) = self.loaded.take() else {
            return Ok(());
        };
        let (usage, trace) = (before.model.usage(), before.model.trace());
        let session = before.session.as_ref();
        let session = session.map(|(session, wanted)| (session.capacity(), *wanted));
        // A pass that has failed leaves work behind that uses the memory.
        before.model.backend().settle_all();
        drop(before);
        self.load(&mut |_, _| ())?;
        let (ids, replayed) = (self.ids.clone(), self.replayed.clone());
        if let Some(trace) = &replayed {
            self.loaded_mut().replay(trace)?;
        }
        if let Some((capacity, wanted)) = session {
            self.insist(|loaded| {
                loaded.begin(capacity, wanted)?;
                if !ids.is_empty() {
                    loaded.forward(&ids, Wanted::None)?;
                }
                Ok(())
            })?;
        }
        // Not before: the tokens were counted when they came. (Usage has what a pass that failed had counted.)
        self.loaded().model.restore(usage, trace);
        Ok(())
    }
}

/// The memory that a back end's error is about.
fn lacks(error: &KernelError) -> Option<Memory> {
    match error {
        KernelError::Device(DeviceError::HostMemory { .. }) => Some(Memory::Host),
        KernelError::Device(e) if e.is_out_of_memory() => match e {
            DeviceError::OutOfMemory { device, .. } | DeviceError::Driver { device, .. } => {
                Some(Memory::Device(device.clone()))
            }
            _ => None,
        },
        _ => None,
    }
}

impl<D: Device + Clone + 'static> Engine for Placed<D> {
    fn config(&self) -> &Config {
        self.loaded().config()
    }

    fn placement(&self) -> Placement {
        self.loaded().placement()
    }

    fn begin(&mut self, capacity: usize, wanted: Wanted) -> Result<(), EngineError> {
        self.ids.clear();
        self.request.positions = self.request.positions.max(capacity);
        self.with(|loaded| loaded.begin(capacity, wanted))
    }

    fn resume(&mut self, tokens: usize, capacity: usize, wanted: Wanted) -> bool {
        let resumed = self.loaded_mut().resume(tokens, capacity, wanted);
        if resumed {
            self.ids.truncate(tokens);
        }
        resumed
    }

    fn forward_into(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        self.with(|loaded| loaded.forward_into(ids, wanted, logits))?;
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    fn draft(&mut self, next: u32, n: usize) -> Result<Vec<u32>, EngineError> {
        self.with(|loaded| loaded.draft(next, n))
    }

    fn roll_back(&mut self, n: usize) {
        self.loaded_mut().roll_back(n);
        self.ids.truncate(self.ids.len().saturating_sub(n));
    }

    fn split(&mut self, ids: &[u32], at_once: usize) -> Result<Option<Split>, EngineError> {
        let split = self.with(|loaded| loaded.split(ids, at_once))?;
        self.ids.extend_from_slice(ids);
        Ok(split)
    }

    fn record_usage(&mut self) {
        self.loaded_mut().record_usage();
    }

    fn usage(&self) -> Option<Profile> {
        self.loaded().usage()
    }

    fn record_trace(&mut self) {
        self.loaded_mut().record_trace();
    }

    fn trace(&self) -> Option<Trace> {
        self.loaded().trace()
    }

    fn replay(&mut self, trace: &Trace) -> Result<(), EngineError> {
        self.replayed = Some(trace.clone());
        self.with(|loaded| loaded.replay(trace))
    }
}
