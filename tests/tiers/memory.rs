//! Memory that runs out while a model runs, and on a real device: a model by a smaller plan goes on with
//! the same bits.

use host::engine::{Engine, EngineError};

use super::*;

/// Experts in device memory.
fn inside(engine: &dyn Engine) -> usize {
    let tiers = engine.placement().tiers;
    let vram = tiers.iter().filter(|t| t.tier.starts_with("vram"));
    vram.map(|t| t.experts).sum()
}

/// Logits of a prompt, a token, and many more.
fn logits(engine: &mut dyn Engine, ids: &[u32]) -> Result<Vec<Vec<f32>>, EngineError> {
    engine.begin(ids.len() + 1, Wanted::Last)?;
    let mut all = Vec::new();
    for part in [&ids[..5], &ids[5..6], &ids[6..], &ids[..1]] {
        all.push(engine.forward(part, Wanted::Last)?);
    }
    Ok(all)
}

/// Scratch of many tokens that is refused: the sequence goes on in a model by a smaller plan, with what was
/// noted of it so far.
#[test]
fn a_smaller_plan_takes_over_while_the_model_runs() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let ids: Vec<u32> = (0..60).map(|i| (i * 37 + 11) % 250).collect();
    let mut whole = engine::open(&model, options(), |_, _| ()).unwrap();
    whole.record_trace();
    let expected = logits(whole.as_mut(), &ids).unwrap();
    let all = request(dir.path(), fixed(dir.path()) + (8 << 20), 1 << 30);
    let open = |device: &MockDevice<EmulatedDevice>| {
        let devices = vec![(device.clone(), 1 << 40)];
        engine::open_placed(devices, &model, &options(), &all, &mut |_, _| ()).unwrap()
    };
    // Measured: what loading takes, and what the tokens take beside it.
    let free = MockDevice::new(EmulatedDevice::default(), Faults::default());
    let mut engine = open(&free);
    let loading = free.done().peak.load(Relaxed);
    assert!(logits(engine.as_mut(), &ids).unwrap() == expected);
    let running = free.done().peak.load(Relaxed);
    assert!(loading < running, "{loading} {running}");
    let before = inside(engine.as_ref());
    let faults = Faults {
        memory: Some(running - 1),
        ..Faults::default()
    };
    let device = MockDevice::new(EmulatedDevice::default(), faults);
    let mut engine = open(&device);
    assert_eq!(inside(engine.as_ref()), before);
    engine.record_trace();
    engine.record_usage();
    assert!(logits(engine.as_mut(), &ids).unwrap() == expected);
    assert!(inside(engine.as_ref()) < before, "{}", engine.placement());
    assert_eq!(engine.trace(), whole.trace());
    assert_eq!(engine.usage().unwrap().tokens(), 61.0);
    // From here on it is as any other.
    engine.roll_back(2);
    whole.roll_back(2);
    let again = engine.forward(&[3, 4], Wanted::Last).unwrap();
    assert!(again == whole.forward(&[3, 4], Wanted::Last).unwrap());
    assert!(logits(engine.as_mut(), &ids).unwrap() == expected);
    drop(engine);
    assert_eq!(device.done().allocated.load(Relaxed), 0);
    // Where nothing helps, the error is the device's.
    let faults = Faults {
        memory: Some(loading + 1000),
        ..Faults::default()
    };
    let device = MockDevice::new(EmulatedDevice::default(), faults);
    let mut engine = open(&device);
    let mut little = vec![0; 1];
    let error = loop {
        little.extend_from_slice(&ids);
        if little.len() > 2000 {
            break None;
        }
        match logits(engine.as_mut(), &little) {
            Ok(_) => (),
            Err(e) => break Some(e),
        }
    };
    let error = error.expect("a KV cache grows past everything").to_string();
    assert!(error.contains("out of memory"), "{error}");
}

/// A model that was to fit whole, and does not: while it loads, and later.
#[test]
fn a_plan_takes_over_where_none_was_needed() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let ids: Vec<u32> = (0..40).map(|i| (i * 29 + 5) % 250).collect();
    let fixed = fixed(dir.path());
    let mut whole = engine::open(&model, options(), |_, _| ()).unwrap();
    let expected = logits(whole.as_mut(), &ids).unwrap();
    let run = |memory: Option<usize>, mib: u64, tokens: usize| {
        let plan = request(dir.path(), fixed + (mib << 20), 1 << 30);
        let faults = Faults {
            memory,
            ..Faults::default()
        };
        let device = MockDevice::new(EmulatedDevice::default(), faults);
        let done = device.done().clone();
        let given = (device, 1 << 40);
        let opened = engine::open_whole(given, &model, &options(), &plan, &mut |_, _| ());
        let mut engine = opened.unwrap();
        let loading = done.peak.load(Relaxed);
        let first = engine.placement();
        if tokens < ids.len() {
            engine.begin(tokens, Wanted::Last).unwrap();
            engine.forward(&ids[..tokens], Wanted::Last).unwrap();
        } else {
            assert!(logits(engine.as_mut(), &ids).unwrap() == expected);
        }
        let now = engine.placement();
        (first, now, loading, done.peak.load(Relaxed))
    };
    let (first, now, loading, running) = run(None, 8, 40);
    assert!(first.predicted_us.is_none() && now.predicted_us.is_none());
    let (first, now, ..) = run(Some(running - 1), 8, 40);
    assert!(first.predicted_us.is_none(), "{first}");
    assert!(now.predicted_us.is_some(), "{now}");
    // A plan that leaves room for the caches.
    let (first, ..) = run(Some(loading - 1), 2, 1);
    assert!(first.predicted_us.is_some(), "{first}");
}

/// Of two devices the one that is refused memory gets fewer experts.
#[test]
fn only_the_device_that_is_short_gets_less() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let ids: Vec<u32> = (0..20).collect();
    let mut whole = engine::open(&model, options(), |_, _| ()).unwrap();
    let expected = logits(whole.as_mut(), &ids).unwrap();
    let all = decode::spread(dir.path(), fixed(dir.path()) + (8 << 20), 1 << 30);
    let open = |other: Option<usize>| {
        let device = |name, memory| {
            let faults = Faults {
                name: Some(name),
                memory,
                ..Faults::default()
            };
            MockDevice::new(EmulatedDevice::default(), faults)
        };
        let devices = [device("one", None), device("two", other)];
        let given = devices.clone().map(|d| (d, 1 << 40)).into();
        let opened = engine::open_placed(given, &model, &options(), &all, &mut |_, _| ());
        let mut engine = opened.unwrap();
        assert!(logits(engine.as_mut(), &ids).unwrap() == expected);
        let peaks = devices.map(|d| d.done().peak.load(Relaxed));
        (engine.placement(), peaks)
    };
    let (before, [first, second]) = open(None);
    assert!(second > 100_000, "{before}");
    let (after, [more, less]) = open(Some(second - 1));
    assert!(more >= first && less < second, "{after}");
    assert_ne!(before, after);
}

/// A model for GPUs: dense part 0.8 GB, experts 1.8 GB, of which the file has 4 of a layer.
struct OnCuda {
    dir: tempfile::TempDir,
    options: Options,
    /// More tokens an expert than the fused kernels take, so that experts are decoded to scratch.
    ids: Vec<u32>,
}

const ON_CUDA: usize = 8 * 64;

impl OnCuda {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for_cuda(&dir.path().join("model"));
        let options = Options {
            device: engine::Device::Cuda,
            positions: 320,
            ..options()
        };
        let ids = (0..300).map(|i| i * 97 + 11).collect();
        Self { dir, options, ids }
    }

    /// On these GPUs, by a plan that believes in `vram` bytes of each.
    fn open(&self, ordinals: &[u32], vram: u64) -> Box<dyn Engine> {
        let dir = self.dir.path();
        let request = Request {
            positions: 320,
            tiers: Some(vec![Tier::VramAns, Tier::RamAns]),
            ..request(dir, vram, 8 << 30)
        };
        let devices = ordinals
            .iter()
            .map(|n| (CudaDevice::new(*n).unwrap(), 32 << 30));
        let (devices, model) = (devices.collect(), dir.join("model"));
        engine::open_placed(devices, &model, &self.options, &request, &mut |_, _| ()).unwrap()
    }
}

fn for_cuda(model: &Path) {
    let synthetic = synth::Options {
        shape: Shape::Glm47Flash,
        layers: Some(9),
        mtp: false,
        distinct: 4,
        scales: ScaleKind::Row,
        seed: 5,
        skew: None,
        hot: 0.0,
        target: None,
        symbols: None,
        block_nibbles: None,
        dense: DenseFormat::Int8Row,
        tokenizer: None,
    };
    synthesise(&synthetic, model, |_, _, _| ()).unwrap();
}

/// The same on a GPU, most of whose memory is taken: first while the model is loaded, then by a prompt.
#[test]
fn refused_allocations_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    let device = CudaDevice::new(0).unwrap();
    let set = OnCuda::new();
    // Memory that is not there.
    let open = || set.open(&[0], 16 << 30);
    let ids = &set.ids;
    let free = || device.free_bytes().unwrap();
    let before = free();
    let mut engine = open();
    let used = before - free();
    let all = inside(engine.as_ref());
    assert_eq!(all, ON_CUDA);
    let expected = logits(engine.as_mut(), ids).unwrap();
    drop(engine);
    assert!(used > 2 << 30, "{used} bytes used");
    let most = free() - (used - (64 << 20));
    println!("{used} bytes used, {most} of {} taken", free());
    let taken = device.allocate(most as usize).unwrap();
    let mut engine = open();
    let loaded = inside(engine.as_ref());
    assert!(loaded < all, "{}", engine.placement());
    assert!(logits(engine.as_mut(), &ids[..7]).is_ok());
    // What is left, for a prompt to run out of.
    let mut rest = Vec::new();
    let mut size = 1usize << 30;
    while size >= 2 << 20 {
        match device.allocate(size) {
            Ok(memory) => rest.push(memory),
            Err(DeviceError::OutOfMemory { .. }) => size /= 2,
            Err(e) => panic!("{e}"),
        }
    }
    assert!(logits(engine.as_mut(), ids).unwrap() == expected);
    let running = inside(engine.as_ref());
    println!("{all} experts in device memory, {loaded} loaded, {running} left by the prompt");
    assert!(running < loaded, "{}", engine.placement());
    drop((taken, rest));
}

/// On two GPUs, of which the second has less memory than the plan believes.
#[test]
fn one_of_two_devices_is_refused_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    let devices = [0, 1].map(CudaDevice::new);
    let [Ok(first), Ok(second)] = devices else {
        eprintln!("SKIPPED: there are no two GPUs here");
        return;
    };
    let set = OnCuda::new();
    // Beside the dense part not for all experts.
    let open = || set.open(&[0, 1], 2_100 << 20);
    let ids = &set.ids;
    let free = || [&first, &second].map(|d| d.free_bytes().unwrap());
    let before = free();
    let mut engine = open();
    let used: Vec<u64> = (before.iter().zip(free())).map(|(b, f)| b - f).collect();
    let all = inside(engine.as_ref());
    assert_eq!(all, ON_CUDA);
    let whole = engine.placement().to_string();
    let expected = logits(engine.as_mut(), ids).unwrap();
    drop(engine);
    println!("{used:?} bytes used; {whole}");
    assert!(used[1] > 256 << 20, "{used:?}");
    let most = free()[1] - (used[1] - (64 << 20));
    let taken = second.allocate(most as usize).unwrap();
    let mut engine = open();
    let smaller = engine.placement().to_string();
    println!("{most} bytes of the second taken; {smaller}");
    assert_ne!(whole, smaller);
    assert!(logits(engine.as_mut(), ids).unwrap() == expected);
    drop(taken);
}
