//! Experts in several tiers: the same bits as in one place, what is copied, what happens when memory
//! or a copy fails.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use gpu::launch::DeviceLimits;
use host::archive::{Archive, PackOptions, Record, pack};
use host::backend::kernels::{
    CudaDevice, Device, DeviceError, EmulatedDevice, Faults, KernelBackend, KernelError, MockDevice,
};
use host::backend::reference::Reference;
use host::backend::{Backend, KvFormat, LayerExperts, LoadExperts, TieredLayer, rows, rows_mut};
use host::bench::synth::Rng;
use host::convert::DenseFormat;
use host::disk::reader::DirectFile;
use host::engine::{self, Options};
use host::expert::{Form, ScaleKind};
use host::model::{Model, Source, Wanted};
use host::placement::memory::DensePart;
use host::placement::request::{Request, Size};
use host::placement::{TIERS, Tier};
use host::synth::{self, Shape, Skew, synthesise};
use host::trace::Trace;
use predicates::prelude::*;
use predicates::str::contains;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;

#[path = "tiers/ahead.rs"]
mod ahead;
#[path = "tiers/decode.rs"]
mod decode;
#[path = "tiers/failures.rs"]
mod failures;
#[path = "tiers/memory.rs"]
mod memory;
#[path = "tiers/reads.rs"]
mod reads;
#[path = "tiers/repin.rs"]
mod repin;
mod support;

const HIDDEN: usize = 128;
const EXPERTS: usize = 32;
const TOP_K: usize = 4;

fn make(scales: ScaleKind, dense: DenseFormat) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let options = synth::Options {
        shape: Shape::Tiny,
        layers: None,
        mtp: false,
        distinct: 96,
        scales,
        seed: 3,
        skew: Some(Skew::PUBLISHED),
        hot: 0.0,
        target: None,
        symbols: None,
        block_nibbles: None,
        dense,
        tokenizer: None,
    };
    synthesise(&options, &dir.path().join("model"), |_, _, _| ()).unwrap();
    dir
}

/// A tiny model, with scales a row or grouped.
fn model(scales: ScaleKind) -> std::path::PathBuf {
    static ROW: OnceLock<tempfile::TempDir> = OnceLock::new();
    static G64: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = match scales {
        ScaleKind::Row => &ROW,
        ScaleKind::G64 => &G64,
    };
    made.get_or_init(|| make(scales, DenseFormat::Verbatim))
        .path()
        .join("model")
}

type Mock = KernelBackend<MockDevice<EmulatedDevice>>;

fn mock(faults: Faults) -> Mock {
    KernelBackend::new(MockDevice::new(EmulatedDevice::default(), faults)).unwrap()
}

/// Activations and assignments of `tokens` tokens, and what a back end makes of them.
struct Case {
    tokens: usize,
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl Case {
    fn new(tokens: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut own: Vec<u32> = Vec::new();
            while own.len() < TOP_K {
                let id = (rng.bits() % EXPERTS as u64) as u32;
                if !own.contains(&id) {
                    own.push(id);
                }
            }
            own.sort_unstable();
            ids.extend(own);
        }
        Self {
            tokens,
            x: rng.normals(tokens * (HIDDEN + 8)),
            weights: rng.normals(tokens * TOP_K),
            ids,
        }
    }

    fn run<B: Backend>(&self, b: &B, experts: &B::Experts) -> Result<Vec<u32>, B::Error> {
        let x = b.upload(&self.x)?;
        let (ids, weights) = (b.upload(&self.ids)?, b.upload(&self.weights)?);
        let mut out = b.alloc::<f32>(self.tokens * HIDDEN)?;
        // Rows that are further apart than they are long.
        let from = rows(&x, HIDDEN + 8);
        b.experts(
            experts,
            from,
            &ids,
            &weights,
            TOP_K,
            self.tokens,
            rows_mut(&mut out, HIDDEN),
        )?;
        let mut host = vec![0.0; self.tokens * HIDDEN];
        b.read(&out, 0, &mut host)?;
        Ok(host.iter().map(|x| x.to_bits()).collect())
    }
}

struct Layer {
    archive: Archive,
    file: Arc<DirectFile>,
    number: u32,
}

impl Layer {
    fn new(scales: ScaleKind) -> Self {
        Self::open(&model(scales).join("experts.ansx"))
    }

    /// Every other expert in plane3.
    fn plane3() -> Self {
        static MADE: OnceLock<tempfile::TempDir> = OnceLock::new();
        let dir = MADE.get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let from = Archive::open(model(ScaleKind::Row).join("experts.ansx")).unwrap();
            let options = PackOptions {
                hot: (0..EXPERTS).step_by(2).map(|e| (2, e)).collect(),
                // Matrices this small grow.
                least_saving: -10.0,
                ..PackOptions::default()
            };
            pack(
                &from,
                &options,
                &dir.path().join("a.ansx"),
                |_| (),
                || false,
            )
            .unwrap();
            dir
        });
        let path = dir.path().join("a.ansx");
        let layer = Self {
            // Others are direct where the file system takes that.
            file: Arc::new(DirectFile::buffered(&path).unwrap()),
            ..Self::open(&path)
        };
        let kinds = [0, 1].map(|e| layer.archive.is_plane3(2, e).unwrap());
        assert_eq!(kinds, [true, false]);
        layer
    }

    fn open(path: &Path) -> Self {
        Self {
            archive: Archive::open(path).unwrap(),
            file: Arc::new(DirectFile::open(path).unwrap()),
            number: 2,
        }
    }

    fn whole<B: LoadExperts>(&self, b: &B, form: Form) -> B::Experts {
        let layer = self.archive.layer(self.number).unwrap();
        let records: Vec<Record<'_>> = (0..EXPERTS).map(|e| layer.record(e).unwrap()).collect();
        let coded = LayerExperts::Coded { layer, records };
        b.load_experts(coded, *self.archive.shape(), form).unwrap()
    }

    fn tiered<B: LoadExperts>(
        &self,
        b: &B,
        tiers: &[Tier],
        staged: usize,
        form: Form,
    ) -> Result<B::Experts, B::Error> {
        self.spread(b, tiers, &[], staged, form)
    }

    fn spread<B: LoadExperts>(
        &self,
        b: &B,
        tiers: &[Tier],
        devices: &[u8],
        staged: usize,
        form: Form,
    ) -> Result<B::Experts, B::Error> {
        let layer = TieredLayer {
            archive: &self.archive,
            file: &self.file,
            number: self.number,
            tiers,
            devices,
            staged,
            cached: staged > TOP_K,
            moving: false,
        };
        let placed = b.load_tiers(&layer, *self.archive.shape(), form)?;
        Ok(placed.expect("the kernels' back end has tiers"))
    }
}

/// Experts in the first `tiers` tiers.
fn mixed(seed: u64, tiers: usize) -> Vec<Tier> {
    let mut rng = Rng::new(seed);
    (0..EXPERTS)
        .map(|_| Tier::ALL[(rng.bits() % tiers as u64) as usize])
        .collect()
}

/// Every tier alone and all of them mixed, one token and several, fused and not: the bits of one place.
fn same_bits<D: Device>(b: &KernelBackend<D>, seed: u64) {
    let layers = [
        Layer::new(ScaleKind::Row),
        Layer::new(ScaleKind::G64),
        Layer::plane3(),
    ];
    for layer in layers {
        let cases: Vec<Case> = [1, 2, 7].map(|n| Case::new(n, seed + n as u64)).into();
        let whole = layer.whole(b, Form::Fused);
        let expected: Vec<Vec<u32>> = cases.iter().map(|c| c.run(b, &whole).unwrap()).collect();
        let plain = layer.whole(&Reference, Form::Fused);
        assert!(cases[1].run(&Reference, &plain).unwrap() == expected[1]);
        let mut placements: Vec<Vec<Tier>> = Tier::ALL.map(|t| vec![t; EXPERTS]).into();
        placements.extend([mixed(seed, TIERS), mixed(seed + 1, TIERS), mixed(seed, 2)]);
        for (i, tiers) in placements.iter().enumerate() {
            let form = if i == 6 { Form::Unfused } else { Form::Fused };
            // A stage that holds few of the experts that seven tokens choose.
            let experts = layer.tiered(b, tiers, TOP_K, form).unwrap();
            for (case, expected) in cases.iter().zip(&expected) {
                let found = case.run(b, &experts).unwrap();
                let n = case.tokens;
                assert!(
                    found == *expected,
                    "{}, placement {i}, {n} tokens",
                    layer.archive.path().display()
                );
            }
            let used = b.used(&experts);
            let all = used.tiers.iter().sum::<u64>() + used.vram;
            assert_eq!(all, (1 + 2 + 7) * TOP_K as u64);
            for (t, n) in used.tiers.iter().enumerate() {
                assert!(*n == 0 || tiers.contains(&Tier::ALL[t]), "{used:?}");
            }
            assert_eq!(used.vram > 0, i == 7, "{used:?}");
        }
    }
}

/// Experts on several devices, mixed with other tiers of the first: the bits of one place, at once and
/// recorded; what is exchanged where devices cannot use each other's memory.
fn same_bits_on_several<D: Device>(make: impl Fn() -> KernelBackend<D>, devices: u8, seed: u64) {
    for layer in [
        Layer::new(ScaleKind::Row),
        Layer::new(ScaleKind::G64),
        Layer::plane3(),
    ] {
        let b = make();
        let mut rng = Rng::new(seed);
        let device: Vec<u8> = (0..EXPERTS)
            .map(|_| (rng.bits() % u64::from(devices)) as u8)
            .collect();
        let all = vec![devices - 1; EXPERTS];
        let resident = mixed(seed, 2);
        let other = mixed(seed + 1, TIERS);
        let spread: Vec<Tier> = (0..EXPERTS)
            .map(|e| {
                if device[e] == 0 {
                    other[e]
                } else {
                    resident[e]
                }
            })
            .collect();
        let whole = layer.whole(&b, Form::Fused);
        for (tiers, device, form) in [
            (&resident, &device, Form::Fused),
            (&resident, &device, Form::Unfused),
            (&resident, &all, Form::Fused),
            (&spread, &device, Form::Fused),
        ] {
            let experts = layer.spread(&b, tiers, device, TOP_K, form).unwrap();
            for n in [1, 2, 7] {
                let case = Case::new(n, seed + n as u64);
                let expected = case.run(&b, &whole).unwrap();
                assert!(case.run(&b, &experts).unwrap() == expected, "{n} tokens");
            }
            // Recorded with what another token chose.
            let (case, before) = (Case::new(1, seed + 20), Case::new(1, seed + 21));
            let expected = case.run(&b, &whole).unwrap();
            assert_eq!(
                b.recordable(&experts),
                tiers.iter().all(|t| *t <= Tier::VramAns)
            );
            if !b.recordable(&experts) {
                continue;
            }
            let mut x = b.upload(&before.x).unwrap();
            let mut ids = b.upload(&before.ids).unwrap();
            let mut weights = b.upload(&before.weights).unwrap();
            let mut out = b.alloc::<f32>(HIDDEN).unwrap();
            let mut pass = || {
                let (x, out) = (rows(&x, HIDDEN + 8), rows_mut(&mut out, HIDDEN));
                b.experts(&experts, x, &ids, &weights, TOP_K, 1, out)
            };
            let recording = b.record(3, 8, &mut pass).unwrap().unwrap();
            b.write(&mut x, 0, &case.x).unwrap();
            b.write(&mut ids, 0, &case.ids).unwrap();
            b.write(&mut weights, 0, &case.weights).unwrap();
            // SAFETY: within the span, and all buffers live.
            unsafe { b.repeat(&recording, 5) }.unwrap();
            let mut found = vec![0.0f32; HIDDEN];
            b.read(&out, 0, &mut found).unwrap();
            let found: Vec<u32> = found.into_iter().map(f32::to_bits).collect();
            assert!(found == expected, "recorded");
        }
    }
}

#[test]
fn several_devices_give_the_same_bits() {
    for (devices, apart) in [(2, false), (3, true)] {
        let device = |apart| {
            let faults = Faults {
                apart,
                ..Faults::default()
            };
            MockDevice::new(EmulatedDevice::default(), faults)
        };
        let make = || {
            let others = (1..devices).map(|_| device(apart)).collect();
            KernelBackend::over(device(apart), others).unwrap()
        };
        same_bits_on_several(make, devices, seed());
    }
}

/// The GPU, for one test at a time, since one takes its memory; none, which is said, without a GPU.
fn gpu() -> Option<MutexGuard<'static, ()>> {
    static GPU: Mutex<()> = Mutex::new(());
    // Also a context takes memory.
    let turn = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(e) = CudaDevice::new(0) {
        assert!(std::env::var_os("ANSATZ_REQUIRE_CUDA").is_none(), "{e}");
        eprintln!("skipped: {e}");
        return None;
    }
    Some(turn)
}

/// Two logical devices of one GPU, and as many GPUs as there are.
#[test]
fn several_devices_give_the_same_bits_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    let all: Vec<u32> = (0..CudaDevice::count()).collect();
    for ordinals in [
        vec![0, 0],
        vec![0, 0, 0],
        all.clone(),
        [all.clone(), all].concat(),
    ] {
        println!("devices {ordinals:?}");
        let make = || {
            let mut devices = ordinals.iter().map(|o| CudaDevice::new(*o).unwrap());
            let first = devices.next().unwrap();
            KernelBackend::over(first, devices.collect()).unwrap()
        };
        same_bits_on_several(make, ordinals.len() as u8, seed());
    }
}

fn seed() -> u64 {
    let given = std::env::var("ANSATZ_SEED")
        .ok()
        .and_then(|s| s.parse().ok());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = given.unwrap_or_else(|| now.unwrap().as_nanos() as u64 >> 8);
    println!("ANSATZ_SEED={seed}");
    seed
}

/// int4 that the host decodes, where the device has no room for a table.
#[test]
fn the_host_decodes_what_a_device_cannot() {
    let small = DeviceLimits {
        shared_per_block: 4 << 10,
        ..EmulatedDevice::LIMITS
    };
    let b = KernelBackend::new(EmulatedDevice::new(small)).unwrap();
    let layer = Layer::new(ScaleKind::Row);
    let refused = layer.tiered(&b, &[Tier::VramAns; EXPERTS], TOP_K, Form::Fused);
    assert!(refused.err().unwrap().to_string().contains("shared memory"));
    let expected = layer.whole(&Reference, Form::Fused);
    let placed = layer.tiered(&b, &[Tier::VramHot; EXPERTS], TOP_K, Form::Fused);
    let (case, placed) = (Case::new(1, seed()), placed.unwrap());
    assert!(case.run(&b, &placed).unwrap() == case.run(&Reference, &expected).unwrap());
}

#[test]
fn tiers_give_the_same_bits() {
    same_bits(&mock(Faults::default()), seed());
}

#[test]
fn tiers_give_the_same_bits_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    let device = CudaDevice::new(0).unwrap();
    same_bits(&KernelBackend::new(device).unwrap(), seed());
}

/// Of one token, and of several that want more experts than the stage holds: each expert once.
#[test]
fn only_what_is_away_is_copied() {
    let layer = Layer::new(ScaleKind::Row);
    let b = mock(Faults::default());
    let done = b.device().done().clone();
    for (tokens, staged) in [(1, 4 * TOP_K), (7, TOP_K)] {
        let case = Case::new(tokens, 5);
        let chosen: BTreeSet<u32> = case.ids.iter().copied().collect();
        assert!(tokens == 1 || chosen.len() > staged);
        let place = |e: &u32| layer.archive.place_of(2, *e as usize).unwrap().1 as u64;
        let all: u64 = chosen.iter().map(place).sum();
        for t in Tier::ALL {
            let experts = layer
                .tiered(&b, &[t; EXPERTS], staged, Form::Fused)
                .unwrap();
            let before = (done.copies.load(Relaxed), done.copied.load(Relaxed));
            case.run(&b, &experts).unwrap();
            let copies = done.copies.load(Relaxed) - before.0;
            let bytes = done.copied.load(Relaxed) - before.1;
            if matches!(t, Tier::RamAns | Tier::DiskAns) {
                assert_eq!((copies, bytes), (chosen.len() as u64, all), "{t}");
            } else {
                assert_eq!((copies, bytes), (0, 0), "{t}");
            }
        }
    }
    assert!(done.pinned.load(Relaxed) > 0, "the stage stays");
    drop(b);
    assert_eq!(done.pinned.load(Relaxed), 0);
    assert_eq!(done.allocated.load(Relaxed), 0);
}

#[test]
fn failures_are_errors_and_leave_nothing_behind() {
    let layer = Layer::new(ScaleKind::Row);
    let case = Case::new(2, 6);
    // The third copy fails; what comes after it works.
    let b = mock(Faults {
        failing_copy: Some(3),
        ..Faults::default()
    });
    let experts = layer
        .tiered(&b, &[Tier::RamAns; EXPERTS], 4 * TOP_K, Form::Fused)
        .unwrap();
    let error = case.run(&b, &experts).unwrap_err();
    assert!(
        matches!(error, KernelError::Device(DeviceError::Driver { .. })),
        "{error}"
    );
    let whole = layer.whole(&b, Form::Fused);
    assert!(case.run(&b, &experts).unwrap() == case.run(&b, &whole).unwrap());
    // Slow copies change nothing but the time.
    let b = mock(Faults {
        copy_time: Duration::from_millis(400),
        ..Faults::default()
    });
    let experts = layer
        .tiered(&b, &[Tier::DiskAns; EXPERTS], 4 * TOP_K, Form::Fused)
        .unwrap();
    let start = Instant::now();
    let slow = case.run(&b, &experts).unwrap();
    let copied = b.device().done().copied.load(Relaxed) as f64 / (1 << 20) as f64;
    assert!(start.elapsed().as_secs_f64() > 0.4 * copied);
    assert!(slow == case.run(&b, &layer.whole(&b, Form::Fused)).unwrap());
    // Memory that does not suffice.
    for (faults, tier) in [
        (
            Faults {
                memory: Some(40_000),
                ..Faults::default()
            },
            Tier::VramHot,
        ),
        (
            Faults {
                host: Some(40_000),
                ..Faults::default()
            },
            Tier::RamAns,
        ),
    ] {
        let b = mock(faults);
        let error = layer
            .tiered(&b, &[tier; EXPERTS], TOP_K, Form::Fused)
            .err()
            .unwrap();
        let expected = match tier {
            Tier::VramHot => matches!(error, KernelError::Device(DeviceError::OutOfMemory { .. })),
            _ => matches!(error, KernelError::Device(DeviceError::HostMemory { .. })),
        };
        assert!(expected, "{error}");
        let done = b.device().done().clone();
        drop(b);
        assert_eq!(done.allocated.load(Relaxed), 0);
    }
}

/// Rates with which every tier is worth something.
const RATES: &str = r#"{"version": 10, "machine": "made up", "rates": {
    "hot": {"fixed": 4e-5, "each": 5e-6}, "ans": {"fixed": 1e-4, "each": 8e-6},
    "plane3": {"fixed": 4e-5, "each": 4e-6},
    "cpu": {"fixed": 2e-5, "each": 1e-4}, "upload": {"fixed": 1e-5, "each": 2e-8},
    "disk": {"fixed": 1e-4, "each": 2e-7}, "round_trip": 3e-5, "exchange": {"fixed": 2e-5, "each": 1e-6}, "dense": 1e-3}}"#;

fn request(dir: &Path, vram: u64, ram: u64) -> Request {
    let rates = dir.join("rates.json");
    std::fs::write(&rates, RATES).unwrap();
    Request {
        vram: Some(Size::Bytes(vram)),
        ram: Some(Size::Bytes(ram)),
        rates: Some(rates),
        positions: 64,
        ..Request::default()
    }
}

fn options() -> Options {
    Options {
        device: engine::Device::Emulator,
        tier: None,
        form: Form::Fused,
        devices: vec![0],
        request: Request::default(),
        placed: false,
        positions: 64,
        speculate: 0,
        repin: 0,
        kv: KvFormat::F32,
        batch: host::model::BATCH,
    }
}

/// What a model takes beside its experts.
fn fixed(dir: &Path) -> u64 {
    let request = request(dir, 1 << 40, 0);
    let model = model(ScaleKind::Row);
    let config = host::model::Config::read(&model).unwrap();
    let archive = Archive::open(model.join("experts.ansx")).unwrap();
    let rates = host::placement::calibrate::Calibration::read(&request.rates.clone().unwrap());
    let planned = request
        .plan(&model, &config, &archive, rates.unwrap(), 1 << 41)
        .unwrap();
    planned.fixed.iter().map(|f| f.vram).sum()
}

/// A device that has less than the plan counted on: a smaller plan, the same logits.
#[test]
fn out_of_memory_is_planned_again() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let ids = [256, 72, 105, 33];
    let mut whole = engine::open(&model, options(), |_, _| ()).unwrap();
    whole.begin(4, Wanted::Last).unwrap();
    let expected = whole.forward(&ids, Wanted::Last).unwrap();

    let fixed = fixed(dir.path());
    let vram = fixed + (8 << 20);
    // Measured: what loading takes at most with everything in device memory.
    let free = MockDevice::new(EmulatedDevice::default(), Faults::default());
    let all = request(dir.path(), vram, 1 << 30);
    let mut no_progress = |_, _| ();
    engine::open_placed(
        vec![(free.clone(), vram)],
        &model,
        &options(),
        &all,
        &mut no_progress,
    )
    .unwrap();
    let peak = free.done().peak.load(Relaxed);
    // One byte less than that, and budgets that know nothing of it.
    let device = MockDevice::new(
        EmulatedDevice::default(),
        Faults {
            memory: Some(peak - 1),
            ..Faults::default()
        },
    );
    let opened = engine::open_placed(
        vec![(device.clone(), vram)],
        &model,
        &options(),
        &all,
        &mut no_progress,
    );
    let mut engine = opened.unwrap();
    assert!(device.done().peak.load(Relaxed) < peak);
    engine.begin(4, Wanted::Last).unwrap();
    assert!(engine.forward(&ids, Wanted::Last).unwrap() == expected);
    let all: usize = engine.placement().tiers.iter().map(|t| t.experts).sum();
    assert_eq!(all, 96);
    // Little of both: experts in many tiers.
    for ram in [0, 300_000, 1 << 20] {
        let little = request(dir.path(), fixed + (2 << 20), ram);
        let device = MockDevice::new(EmulatedDevice::default(), Faults::default());
        let mut engine = engine::open_placed(
            vec![(device, vram)],
            &model,
            &options(),
            &little,
            &mut no_progress,
        )
        .unwrap();
        engine.begin(4, Wanted::Last).unwrap();
        assert!(engine.forward(&ids, Wanted::Last).unwrap() == expected);
        let placement = engine.placement();
        let experts: usize = placement.tiers.iter().map(|t| t.experts).sum();
        let selections: u64 = placement.tiers.iter().filter_map(|t| t.selections).sum();
        assert_eq!((experts, selections), (96, 3 * 4 * 4));
        assert!(placement.tiers.len() > 1, "{placement}");
        assert!(placement.hits().is_some());
        assert!(placement.predicted_us.is_some());
    }
    // Two devices and three, recorded: the same tokens one by one.
    for n in [2, 3] {
        // The first has room for what is no expert, and what is kept free.
        let little = Request {
            vram: None,
            ..request(dir.path(), 0, 0)
        };
        let devices: Vec<_> = (0..n)
            .map(|i| {
                let device = MockDevice::new(EmulatedDevice::default(), Faults::default());
                let free = if i == 0 { fixed + (257 << 20) } else { 1 << 30 };
                (device, free)
            })
            .collect();
        let used = devices[1].0.done().clone();
        let opened = engine::open_placed(devices, &model, &options(), &little, &mut no_progress);
        let mut engine = opened.unwrap();
        let has = used.allocated.load(Relaxed);
        assert!(has > 300_000, "{has} bytes: {}", engine.placement());
        engine.begin(8, Wanted::Last).unwrap();
        assert!(engine.forward(&ids, Wanted::Last).unwrap() == expected);
        whole.begin(8, Wanted::Last).unwrap();
        whole.forward(&ids, Wanted::Last).unwrap();
        for id in [7, 8, 9] {
            let expected = whole.forward(&[id], Wanted::Last).unwrap();
            assert!(engine.forward(&[id], Wanted::Last).unwrap() == expected);
        }
    }
    let nothing = request(dir.path(), fixed - 1, 0);
    let device = MockDevice::new(EmulatedDevice::default(), Faults::default());
    let error = engine::open_placed(
        vec![(device, vram)],
        &model,
        &options(),
        &nothing,
        &mut no_progress,
    );
    let error = error.err().unwrap().to_string();
    assert!(error.contains("hold no model whose dense part"), "{error}");
}

/// Makes the dense part of a model f32.
fn widen(model: &Path) {
    let file = model.join("dense.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = support::to_f32(support::tensors(&file));
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, header.metadata().clone(), &file).unwrap();
}

/// What a plan counts for the dense part is what is allocated for it, of bf16, of bytes and of f32.
#[test]
fn the_dense_part_is_counted_as_it_is() {
    use DenseFormat::{Int8Row, Verbatim};
    let found = [(Verbatim, false), (Int8Row, false), (Verbatim, true)].map(|(format, wide)| {
        let dir = make(ScaleKind::Row, format);
        let model = dir.path().join("model");
        if wide {
            widen(&model);
        }
        let config = host::model::Config::read(&model).unwrap();
        let counted = DensePart::open(&model, &config).unwrap();
        let source = Source::open(&model, &config, None).unwrap();
        let device = MockDevice::new(EmulatedDevice::default(), Faults::default());
        let backend = KernelBackend::new(device.clone()).unwrap();
        let loaded = Model::load(backend, &model, config, &source, Form::Fused, |_| ()).unwrap();
        let allocated = device.done().allocated.load(Relaxed);
        drop(loaded);
        (counted.held as f64, allocated as f64)
    });
    // The experts are the same.
    let [bf16, int8, f32] = found;
    for (more, less) in [(bf16, int8), (f32, bf16)] {
        let (counted, taken) = (more.0 - less.0, more.1 - less.1);
        assert!(counted > 0.4 * more.0, "{found:?}");
        assert!((counted - taken).abs() < 0.1 * taken, "{found:?}");
    }
}

fn host(args: &[&dyn AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(args);
    command
}

#[test]
fn generate_takes_budgets_and_records_usage() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let fixed = fixed(dir.path());
    let (rates, usage) = (dir.path().join("rates.json"), dir.path().join("usage.txt"));
    let vram = (fixed + (2 << 20)).to_string();
    let generate = |device: &str, more: &[&dyn AsRef<std::ffi::OsStr>]| {
        let mut command = host(&[&"generate", &"-m", &model, &"--prompt-ids", &"256,72,105"]);
        command.args([
            "-n",
            "4",
            "--temp",
            "0",
            "--ignore-eos",
            "-c",
            "64",
            "--device",
            device,
        ]);
        command.args(more);
        command
    };
    let json = |mut command: Command| -> Value {
        let out = command.arg("--json").assert().success();
        serde_json::from_slice(&out.get_output().stdout).unwrap()
    };
    let expected = json(generate("cpu", &[&"--usage", &usage]))["token_ids"].clone();
    let budget: [&dyn AsRef<std::ffi::OsStr>; 6] = [
        &"--vram-budget",
        &vram,
        &"--ram-budget",
        &"300K",
        &"--rates",
        &rates,
    ];
    let found = json(generate("emulator", &budget));
    assert_eq!(found["token_ids"], expected);
    let tiers = found["placement"]["tiers"].as_array().unwrap();
    let sum: u64 = tiers
        .iter()
        .map(|t| t["selections"].as_u64().unwrap())
        .sum();
    // Three tokens of the prompt and three generated ones, three layers, four experts.
    assert_eq!(sum, 6 * 3 * 4);
    assert!(found["placement"]["predicted_us"].as_u64().unwrap() > 0);
    generate("emulator", &budget)
        .assert()
        .success()
        .stderr(contains("selections: "));

    let recorded = host::placement::Profile::read(&usage).unwrap();
    assert_eq!(recorded.tokens(), 6.0);
    let counts: f64 = recorded
        .ranking()
        .iter()
        .map(|(l, e)| recorded.count(*l, *e))
        .sum();
    assert_eq!(counts, 72.0);
    std::fs::write(&usage, "no profile\n").unwrap();
    generate("cpu", &[&"--usage", &usage])
        .assert()
        .code(1)
        .stderr(contains("line 1: expected layer, expert and count"));
    let raw: [&dyn AsRef<std::ffi::OsStr>; 4] = [&"--vram-budget", &"8M", &"--tier", &"raw"];
    generate("emulator", &raw)
        .assert()
        .code(1)
        .stderr(contains("--tiers vram-hot,ram-raw"));
    generate("cpu", &budget).assert().code(1).stderr(
        contains("one place for experts")
            .and(predicate::function(|s: &str| s.lines().count() == 1)),
    );
}

/// What is said for plans is for those too that nobody asked for by a budget; where there is none, that is said.
#[test]
fn plans_without_budgets_take_their_profile() {
    let dir = tempfile::tempdir().unwrap();
    let (model, none) = (model(ScaleKind::Row), dir.path().join("none"));
    request(dir.path(), 0, 0);
    let rates = dir.path().join("rates.json");
    let generate = |device: &str, devices: &str| {
        let mut command = host(&[&"generate", &"-m", &model, &"--prompt-ids", &"256,72,105"]);
        command.args(["-n", "2", "--temp", "0", "-c", "64", "--device", device]);
        command.args(["--devices", devices]);
        command
    };
    for option in ["--profile", "--rates"] {
        let mut command = generate("emulator", "0,0");
        command.arg("--rates").arg(&rates);
        let mut command = match option {
            "--rates" => generate("emulator", "0,0"),
            _ => command,
        };
        command
            .arg(option)
            .arg(&none)
            .assert()
            .code(1)
            .stderr(contains("none: No such file"));
        let said = contains("--profile, --rates and --calibrate are for plans");
        generate("cpu", "0")
            .arg(option)
            .arg(&none)
            .assert()
            .success()
            .stderr(said);
    }
    let budget = ["--vram-budget", "900T", "--ram-budget", "800T"];
    let mut command = generate("emulator", "0");
    command.args(budget).arg("--rates").arg(&rates);
    let said = contains("--vram-budget: 900000.00 GB are more than the 1.07 GB that are free");
    let said = said.and(contains("--ram-budget: 800000.00 GB are more than the "));
    // No colours, since this is no terminal.
    let said = said.and(contains("\x1b").not());
    command.assert().success().stderr(said);
}

/// A trace gives its run again, whatever the router says, and a model that it is not of is refused;
/// two placements are timed A, B, B, A.
#[test]
fn traces_are_recorded_replayed_and_timed() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let file = dir.path().join("trace.txt");
    host(&[&"generate", &"-m", &model, &"--prompt-ids", &"256,72,105"])
        .args(["-n", "4", "--temp", "0", "--ignore-eos", "--device", "cpu"])
        .args([&"--trace" as &dyn AsRef<std::ffi::OsStr>, &file])
        .assert()
        .success();
    let trace = Trace::read(&file).unwrap();
    // The last token that was generated goes nowhere.
    assert_eq!((trace.tokens, trace.layers.len(), trace.top_k), (6, 3, 4));

    let ids = [256, 72, 105, 33];
    let run = |device, trace: Option<&Trace>| {
        let options = Options {
            device,
            ..options()
        };
        let mut engine = engine::open(&model, options, |_, _| ()).unwrap();
        if let Some(trace) = trace {
            engine.replay(trace).unwrap();
        }
        engine.record_trace();
        engine.begin(4, Wanted::Last).unwrap();
        let logits = engine.forward(&ids, Wanted::Last).unwrap();
        (logits, engine.trace().unwrap())
    };
    let (expected, own) = run(engine::Device::Cpu, None);
    assert_eq!(run(engine::Device::Cpu, Some(&own)).0, expected);
    let mut other = own.clone();
    for ids in other.ids.chunks_mut(4) {
        ids.copy_from_slice(&[3, 8, 20, 31]);
    }
    let (changed, recorded) = run(engine::Device::Reference, Some(&other));
    assert_eq!(recorded, other);
    assert_ne!(changed, expected);
    for device in [engine::Device::Cpu, engine::Device::Emulator] {
        assert_eq!(run(device, Some(&other)).0, changed);
    }

    let fixed = fixed(dir.path());
    let rates = dir.path().join("rates.json");
    let decode = |trace: &Path, a: &str, b: &str| {
        let mut command = host(&[&"bench", &"decode", &"-m", &model, &"--replay", &trace]);
        command.args(["--device", "emulator", "--tokens", "2", "--warmup", "1"]);
        command.args(["--a", a, "--b", b]);
        command
    };
    let budget = |ram: &str| {
        let vram = fixed + (2 << 20);
        format!("vram={vram},ram={ram},rates={}", rates.display())
    };
    let a = format!("tier=raw,{}", budget("2M"));
    let b = format!("tiers=vram-ans+ram-ans+disk-ans,{}", budget("400K"));
    let done = decode(&file, &a, &b).arg("--json").assert().success();
    let found: Value = serde_json::from_slice(&done.get_output().stdout).unwrap();
    let sides: Vec<&str> = (found["runs"].as_array().unwrap().iter())
        .map(|r| r["side"].as_str().unwrap())
        .collect();
    assert_eq!(sides, ["a", "b", "b", "a"]);
    for (side, tiers, loads) in [
        ("a", ["vram-hot", "ram-raw"].as_slice(), 2),
        ("b", &["vram-ans", "ram-ans", "disk-ans"], 1),
    ] {
        let side = &found[side];
        assert!(side["median_us"].as_f64().unwrap() > 0.0);
        assert_eq!(side["load_s"].as_array().unwrap().len(), loads);
        let rows = side["tiers"].as_array().unwrap();
        let sum = |field: &str| -> f64 { rows.iter().map(|t| t[field].as_f64().unwrap()).sum() };
        assert_eq!(sum("experts"), 96.0);
        assert!((sum("share") - 1.0).abs() < 1e-9, "{side}");
        assert!(
            rows.iter()
                .all(|t| tiers.contains(&t["tier"].as_str().unwrap())),
            "{side}"
        );
    }
    assert!(found["speedup"].as_f64().unwrap() > 0.0);
    decode(&file, "", &b)
        .assert()
        .success()
        .stdout(contains("runs, tokens/s: A ").and(contains("B against A: ")));

    let fails = |trace: &Path, a: &str, says: &str| {
        let says = contains(says.to_owned());
        let one = predicate::function(|s: &str| s.lines().count() == 1);
        decode(trace, a, "").assert().code(1).stderr(says.and(one));
    };
    fails(&dir.path().join("none.txt"), "", "give a trace");
    fails(&file, "vram", "`vram`: expected key=value");
    fails(&file, "tier=raw,tier=ans", "`tier=ans`: expected tier once");
    fails(&file, "tiers=vram", "some of vram-hot");
    std::fs::write(&file, "# ansatz trace 1\n0 1 3:0.5\n").unwrap();
    fails(&file, "", "1 layers, the model has 3 with experts");
}
