//! `host bench decode` over several devices: what tokens take where, and placements that are compared.

use host::backend::split::Split;
use host::placement::Profile;

use super::*;

/// Six tokens that go to given experts.
fn trace(dir: &Path) -> std::path::PathBuf {
    let file = dir.join("trace.txt");
    let config = host::model::Config::read(&model(ScaleKind::Row)).unwrap();
    let mut trace = Trace::new(&config);
    for token in 0..6u32 {
        for layer in 0..trace.layers.len() {
            let first = (token * 5 + 3 * layer as u32) % 20;
            let ids: Vec<u32> = (0..TOP_K as u32).map(|k| first + 3 * k).collect();
            trace.put(layer, token as usize, &ids, &[0.25; TOP_K]);
        }
    }
    trace.write(&file).unwrap();
    file
}

/// Budgets, and rates with which two devices are faster than one.
pub fn spread(dir: &Path, vram: u64, ram: u64) -> Request {
    let rates = dir.join("spread.json");
    let text = RATES
        .replace(
            "\"fixed\": 4e-5, \"each\": 5e-6",
            "\"fixed\": 0, \"each\": 1e-3",
        )
        .replace(
            "\"fixed\": 1e-4, \"each\": 8e-6",
            "\"fixed\": 0, \"each\": 1e-3",
        )
        .replace(
            "\"fixed\": 2e-5, \"each\": 1e-6",
            "\"fixed\": 0, \"each\": 0",
        )
        .replace("\"each\": 1e-4", "\"each\": 1e-2");
    std::fs::write(&rates, text).unwrap();
    Request {
        rates: Some(rates),
        ..request(dir, vram, ram)
    }
}

/// Parts that add up, of devices that all have experts.
fn check(split: &Value, devices: usize, recordings: u64) {
    let us = |d: &Value, field: &str| d[field].as_f64().unwrap();
    let whole = us(split, "token_us");
    let each = split["devices"].as_array().unwrap();
    assert_eq!(each.len(), devices, "{split}");
    for (i, d) in each.iter().enumerate() {
        let fields = ["experts_us", "dense_us", "attention_us", "exchange_us"];
        let rest = ["copies_us", "launch_us", "idle_us"];
        let all: f64 = fields.iter().chain(&rest).map(|f| us(d, f)).sum();
        // Means of f64 sums, added up in another order.
        assert!((all - whole).abs() < 1e-6 * whole, "{split}");
        assert!(
            us(d, "experts_us") > 0.0 && us(d, "launches") > 0.0,
            "{split}"
        );
        let is_first = i == 0;
        assert_eq!(us(d, "dense_us") > 0.0, is_first, "{split}");
        assert_eq!(us(d, "attention_us") > 0.0, is_first, "{split}");
        assert!(us(d, "launch_us") > 0.0, "{split}");
    }
    assert!(us(split, "imbalance") >= 1.0, "{split}");
    assert_eq!(us(split, "crossed_bytes") > 0.0, devices > 1, "{split}");
    assert_eq!(split["recordings"].as_u64(), Some(recordings), "{split}");
}

/// All coded in both devices' memory against int4 with its rest in host memory, each loaded alone.
#[test]
fn placements_on_several_devices_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let (model, file) = (model(ScaleKind::Row), trace(dir.path()));
    let rates = spread(dir.path(), 0, 0).rates.unwrap();
    // Room for all coded experts in each device's memory, and for a layer's int4 in the first one's.
    let fixed = fixed(dir.path());
    let budget = |mib: u64| {
        let vram = fixed + (mib << 20);
        format!("vram={vram},ram=64M,rates={}", rates.display())
    };
    let raw = format!("tier=raw,{}", budget(2));
    let budget = budget(8);
    let decode = |split: &str| {
        let mut command = host(&[&"bench", &"decode", &"-m", &model, &"--replay", &file]);
        command.args(["--device", "emulator", "--devices", "0,1"]);
        command.args(["--tokens", "2", "--warmup", "1", "--split", split]);
        command.args(["--prompt", "3", "--a", &budget, "--b", &raw]);
        command
    };
    let done = decode("2").arg("--json").assert().success();
    let found: Value = serde_json::from_slice(&done.get_output().stdout).unwrap();
    let tiers = |side: &str| -> Vec<(String, u64)> {
        (found[side]["tiers"].as_array().unwrap().iter())
            .map(|t| {
                (
                    t["tier"].as_str().unwrap().into(),
                    t["experts"].as_u64().unwrap(),
                )
            })
            .collect()
    };
    for side in ["a", "b"] {
        let all: u64 = tiers(side).iter().map(|(_, n)| n).sum();
        assert_eq!(all, 96, "{found}");
        assert_eq!(found[side]["split"]["tokens"].as_u64(), Some(2));
        assert_eq!(found[side]["split"]["devices"].as_array().unwrap().len(), 2);
    }
    assert!(
        tiers("b")
            .iter()
            .all(|(t, _)| t == "vram-hot" || t == "ram-raw"),
        "{found}"
    );
    assert_eq!(found["a"]["load_s"].as_array().unwrap().len(), 2);
    assert_eq!(found["b"]["load_s"].as_array().unwrap().len(), 1);
    // Everything fits the two devices, so that a token is one recording.
    check(&found["a"]["split"], 2, 1);
    // A prompt is launched as it comes.
    check(&found["a"]["prompt"], 2, 0);
    decode("1").assert().success().stdout(
        contains("a prompt in parts: ")
            .and(contains("between devices"))
            .and(contains("experts ")),
    );
    decode("0")
        .arg("--json")
        .assert()
        .success()
        .stdout(contains("\"split\":null"));
}

/// Tokens in parts, on these devices.
fn split_on<D: Device + Clone + 'static>(devices: Vec<D>, request: &Request) -> Split {
    let model = model(ScaleKind::Row);
    let ids = [1, 2, 3, 4];
    let devices = devices.into_iter().map(|d| (d, 1 << 30)).collect();
    let opened = engine::open_placed(devices, &model, &options(), request, &mut |_, _| ());
    let mut engine = opened.unwrap();
    engine.begin(16, Wanted::Last).unwrap();
    let plain = engine.forward(&ids, Wanted::Last).unwrap();
    engine.begin(16, Wanted::Last).unwrap();
    let split = engine.split(&ids[..3], 1).unwrap().unwrap();
    // What follows is recorded anew, without events.
    assert!(engine.forward(&ids[3..], Wanted::Last).unwrap() == plain);
    split
}

/// Tokens in parts where the host has one in them, where devices cannot use each other's memory, and where
/// nobody can tell.
#[test]
fn tokens_are_split_into_parts() {
    let dir = tempfile::tempdir().unwrap();
    let fixed = fixed(dir.path());
    let split = |devices: usize, apart: bool, request: &Request| -> Split {
        let device = || {
            let faults = Faults {
                apart,
                ..Faults::default()
            };
            MockDevice::new(EmulatedDevice::default(), faults)
        };
        split_on((0..devices).map(|_| device()).collect(), request)
    };
    let value = |split: &Split| serde_json::to_value(split).unwrap();
    let everything = spread(dir.path(), fixed + (8 << 20), 0);
    check(&value(&split(1, false, &everything)), 1, 1);
    for apart in [false, true] {
        let found = split(2, apart, &everything);
        check(&value(&found), 2, 1);
        let other = &found.devices[1];
        assert_eq!(other.exchange_us > 0.0, apart, "{found:?}");
    }
    let mut little = request(dir.path(), fixed + (2 << 20), 1 << 20);
    little.tiers = Some(vec![Tier::RamRaw, Tier::RamAns, Tier::DiskAns]);
    let found = split(1, false, &little);
    check(&value(&found), 1, 4);
    let first = &found.devices[0];
    assert!(first.copies_us > 0.0 && first.idle_us > 0.0, "{found:?}");
    assert!(found.copied_bytes > 0.0, "{found:?}");
    let cpu = Options {
        device: engine::Device::Cpu,
        ..options()
    };
    let mut engine = engine::open(&model(ScaleKind::Row), cpu, |_, _| ()).unwrap();
    engine.begin(4, Wanted::Last).unwrap();
    assert_eq!(engine.split(&[1, 2], 1).unwrap(), None);
}

/// Events in the recorded token of GPUs: of one, of two logical ones, and of as many as there are.
#[test]
fn tokens_are_split_into_parts_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let everything = spread(dir.path(), fixed(dir.path()) + (8 << 20), 0);
    let mut little = request(dir.path(), fixed(dir.path()) + (2 << 20), 1 << 20);
    little.tiers = Some(vec![Tier::RamRaw, Tier::RamAns, Tier::DiskAns]);
    let all: Vec<u32> = (0..CudaDevice::count()).collect();
    for ordinals in [vec![0], vec![0, 0], all] {
        let devices = || {
            ordinals
                .iter()
                .map(|o| CudaDevice::new(*o).unwrap())
                .collect()
        };
        let found = split_on(devices(), &everything);
        println!("devices {ordinals:?}: {found}");
        check(&serde_json::to_value(&found).unwrap(), ordinals.len(), 1);
        if ordinals.len() == 1 {
            let found = split_on(devices(), &little);
            println!("experts elsewhere: {found}");
            check(&serde_json::to_value(&found).unwrap(), 1, 4);
        }
    }
}

/// A recorded token keeps what its layers choose on the device; layers with experts elsewhere are noted as
/// they come.
#[test]
fn recorded_tokens_are_noted() {
    let dir = model(ScaleKind::Row);
    let config = host::model::Config::read(&dir).unwrap();
    fn run<B: LoadExperts>(model: &Model<B>, tiers: &str) -> (Vec<f32>, usize) {
        let mut session = model.session(16, Wanted::Last).unwrap();
        let mut out = model.forward(&mut session, &[9, 8], Wanted::Last).unwrap();
        // Noted from here on, and by and by more of it.
        model.record_usage();
        for id in [1, 2, 3] {
            out.extend(model.forward(&mut session, &[id], Wanted::Last).unwrap());
        }
        model.record_trace();
        for id in [4, 5] {
            out.extend(model.forward(&mut session, &[id], Wanted::Last).unwrap());
        }
        out.extend(model.forward(&mut session, &[6, 7], Wanted::Last).unwrap());
        out.extend(model.forward(&mut session, &[8], Wanted::Last).unwrap());
        println!("{tiers}: {} recordings", session.recordings());
        (out, session.recordings())
    }
    let source = Source::open(&dir, &config, None).unwrap();
    let plain = Model::load(
        Reference,
        &dir,
        config.clone(),
        &source,
        Form::Fused,
        |_| (),
    )
    .unwrap();
    let (expected, _) = run(&plain, "reference");
    let all = [Tier::VramAns, Tier::VramAns, Tier::VramAns];
    for (tiers, recordings) in [
        (all, 1),
        ([Tier::VramAns, Tier::RamAns, Tier::VramAns], 2),
        ([Tier::DiskAns, Tier::RamRaw, Tier::RamAns], 4),
    ] {
        let source = Source::open(&dir, &config, None).unwrap();
        let tiers = tiers.map(|t| vec![t; EXPERTS]).into();
        let (source, _) = source.tiered(tiers, vec![], TOP_K, false).unwrap().unwrap();
        let b = mock(Faults::default());
        let model = Model::load(b, &dir, config.clone(), &source, Form::Fused, |_| ()).unwrap();
        let (found, recorded) = run(&model, "tiers");
        assert!(found == expected);
        assert_eq!(recorded, recordings);
        // How often a layer was guessed right is of the placement.
        let counts = |m: Option<Profile>| {
            let text = m.unwrap().text();
            let lines = text.lines().filter(|l| !l.starts_with("# guessed "));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(counts(model.usage()), counts(plain.usage()));
        assert_eq!(model.trace(), plain.trace());
    }
    assert_eq!(plain.trace().unwrap().tokens, 10);
}
