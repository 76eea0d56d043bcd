//! Experts that change places while a model runs: the same bits, those that are used come to device
//! memory, what is copied, what happens when a copy or a read fails.

use host::backend::Repin;
use host::placement::Used;

use super::*;

pub fn moving(layer: &Layer, b: &Mock, tiers: &[Tier]) -> <Mock as Backend>::Experts {
    let layer = TieredLayer {
        archive: &layer.archive,
        file: &layer.file,
        number: layer.number,
        tiers,
        devices: &[],
        staged: TOP_K,
        cached: false,
        moving: true,
    };
    let shape = *layer.archive.shape();
    let placed = b.load_tiers(&layer, shape, Form::Fused).unwrap();
    placed.expect("the kernels' back end has tiers")
}

/// A token that goes to these experts.
pub fn token(seed: u64, ids: &[u32; TOP_K]) -> Case {
    Case {
        ids: ids.to_vec(),
        ..Case::new(1, seed)
    }
}

/// Steps until a pair has changed places, or there is none to change.
pub fn step(b: &Mock, experts: &<Mock as Backend>::Experts) -> Result<bool, KernelError> {
    loop {
        match b.repin(experts)? {
            Repin::Idle => return Ok(false),
            Repin::Moved => return Ok(true),
            Repin::Begun | Repin::Waiting => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Eight experts in slots of device memory, four in each form elsewhere, the rest in host memory and on
/// disk.
pub fn places() -> Vec<Tier> {
    let mut tiers = vec![Tier::VramAns; 8];
    tiers.extend([Tier::VramHot; 4]);
    tiers.extend([Tier::RamRaw; 4]);
    tiers.extend([Tier::RamAns; 8]);
    tiers.extend([Tier::DiskAns; 8]);
    tiers
}

fn in_slots(before: &Used, after: &Used) -> u64 {
    let t = Tier::VramAns as usize;
    after.tiers[t] - before.tiers[t]
}

#[test]
fn what_is_used_comes_to_device_memory() {
    for layer in [
        Layer::new(ScaleKind::Row),
        Layer::new(ScaleKind::G64),
        Layer::plane3(),
    ] {
        let b = mock(Faults::default());
        let done = b.device().done().clone();
        let whole = layer.whole(&b, Form::Fused);
        let experts = moving(&layer, &b, &places());
        let mixed = Case::new(7, 3);
        let bits = mixed.run(&b, &whole).unwrap();
        assert!(mixed.run(&b, &experts).unwrap() == bits);
        let (peak, pinned) = (done.peak.load(Relaxed), done.pinned.load(Relaxed));
        // Nothing is known yet that would justify a move.
        assert!(!step(&b, &experts).unwrap());
        // Two from host memory and two from disk; others; and some that had left by then:
        // these must be chosen more than those which took their places.
        for (tokens, hot) in [
            (24, [16, 19, 24, 31]),
            (24, [17, 18, 25, 30]),
            (72, [0, 1, 2, 3]),
        ] {
            let mut moves = 0;
            for n in 0..tokens {
                let case = token(n, &hot);
                let expected = case.run(&b, &whole).unwrap();
                assert!(case.run(&b, &experts).unwrap() == expected, "token {n}");
                let copies = done.copies.load(Relaxed);
                let moved = step(&b, &experts).unwrap();
                // What comes from disk is not copied beside the stream.
                assert!(done.copies.load(Relaxed) - copies <= moved as u64);
                moves += moved as usize;
            }
            assert!(moves >= TOP_K, "{hot:?}: {moves}");
            let before = b.used(&experts);
            let case = token(99, &hot);
            let copied = done.copied.load(Relaxed);
            case.run(&b, &experts).unwrap();
            assert_eq!(in_slots(&before, &b.used(&experts)), TOP_K as u64);
            assert_eq!(done.copied.load(Relaxed), copied);
            // It stays so.
            assert!(!step(&b, &experts).unwrap());
        }
        // Every expert, wherever it is now.
        for n in 0..20 {
            let case = Case::new(3, 100 + n);
            let expected = case.run(&b, &whole).unwrap();
            assert!(case.run(&b, &experts).unwrap() == expected);
        }
        assert!(mixed.run(&b, &experts).unwrap() == bits);
        assert_eq!(done.peak.load(Relaxed), peak, "moves take no memory");
        assert_eq!(done.pinned.load(Relaxed), pinned);
    }
}

#[test]
fn layers_in_one_place_stay_as_they_are() {
    let layer = Layer::new(ScaleKind::Row);
    for tier in Tier::ALL {
        let b = mock(Faults::default());
        let tiers = [tier; EXPERTS];
        let experts = moving(&layer, &b, &tiers);
        for n in 0..12 {
            token(n, &[1, 2, 3, 4]).run(&b, &experts).unwrap();
            assert_eq!(b.repin(&experts).unwrap(), Repin::Idle);
        }
    }
    // Nor do experts move where that was not asked for.
    let b = mock(Faults::default());
    let experts = layer.tiered(&b, &places(), TOP_K, Form::Fused).unwrap();
    for n in 0..12 {
        let case = token(n, &[16, 17, 18, 19]);
        case.run(&b, &experts).unwrap();
        assert_eq!(b.repin(&experts).unwrap(), Repin::Idle);
    }
}

#[test]
fn failed_moves_change_nothing() {
    let layer = Layer::new(ScaleKind::Row);
    let hot = [16, 17, 18, 19];
    // The number of the first move's copy.
    let until = |b: &Mock| {
        let experts = moving(&layer, b, &places());
        for n in 0..12 {
            token(n, &hot).run(b, &experts).unwrap();
        }
        experts
    };
    let b = mock(Faults::default());
    assert!(step(&b, &until(&b)).unwrap());
    let number = b.device().done().copies.load(Relaxed);
    let b = mock(Faults {
        failing_copy: Some(number),
        ..Faults::default()
    });
    let experts = until(&b);
    let error = step(&b, &experts).unwrap_err();
    assert!(error.to_string().contains("INJECTED"), "{error}");
    let whole = layer.whole(&b, Form::Fused);
    let all = |experts: &_| {
        for n in 0..12 {
            let case = Case::new(4, n);
            assert!(case.run(&b, experts).unwrap() == case.run(&b, &whole).unwrap());
        }
    };
    all(&experts);
    let before = b.used(&experts);
    let case = token(0, &[0, 1, 2, 3]);
    case.run(&b, &experts).unwrap();
    assert_eq!(in_slots(&before, &b.used(&experts)), 4, "none has left");
    let moved = (0..40).any(|n| {
        token(n, &hot).run(&b, &experts).unwrap();
        step(&b, &experts).unwrap()
    });
    assert!(moved);
    all(&experts);

    // Records that are damaged after loading: of those that would leave, and of those on disk.
    for (damaged, hot) in [(0..8, hot), (24..32, [24, 25, 26, 27])] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ansx");
        std::fs::copy(model(ScaleKind::Row).join("experts.ansx"), &path).unwrap();
        let layer = Layer::open(&path);
        let b = mock(Faults::default());
        let whole = layer.whole(&b, Form::Fused);
        let experts = moving(&layer, &b, &places());
        for n in 0..12 {
            let case = token(n, &hot);
            assert!(case.run(&b, &experts).unwrap() == case.run(&b, &whole).unwrap());
        }
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for e in damaged.clone() {
            let (at, bytes) = layer.archive.place_of(2, e).unwrap();
            file.write_all_at(b"damage", at + bytes as u64 / 2).unwrap();
        }
        let error = step(&b, &experts).unwrap_err();
        let KernelError::Read {
            layer: 2,
            expert,
            source,
        } = &error
        else {
            panic!("{error}");
        };
        assert!(damaged.contains(expert), "{error}");
        assert!(source.to_string().contains("checksum"), "{error}");
        // What is in memory is what it was.
        let case = token(50, &[0, 5, 16, 23]);
        assert!(case.run(&b, &experts).unwrap() == case.run(&b, &whole).unwrap());
    }
}

/// A whole model whose routing is a trace's, and changes: the logits of one that moves nothing, few moves
/// between two tokens, and then no copies.
#[test]
fn a_model_gives_the_same_logits_while_experts_move() {
    let dir = model(ScaleKind::Row);
    let config = host::model::Config::read(&dir).unwrap();
    let shift = 20;
    let trace = {
        let mut trace = Trace::new(&config);
        for t in 0..2 * shift {
            for l in 0..3 {
                let first = if t < shift { 8 } else { 20 } + l as u32;
                let ids: Vec<u32> = (0..TOP_K as u32).map(|i| first + 2 * i).collect();
                trace.put(l, t, &ids, &[0.5, 0.25, 0.125, 0.25]);
            }
        }
        trace
    };
    let load = |moving: bool| {
        let source = Source::open(&dir, &config, None).unwrap();
        let tiers = vec![[vec![Tier::VramAns; 8], vec![Tier::RamAns; 24]].concat(); 3];
        let (source, _) = source
            .tiered(tiers, Vec::new(), 4 * TOP_K, moving)
            .unwrap()
            .unwrap();
        let b = mock(Faults::default());
        let config = config.clone();
        let mut model = Model::load(b, &dir, config, &source, Form::Fused, |_| ()).unwrap();
        model.replay(&trace, 1.0).unwrap();
        model
    };
    let (still, model) = (load(false), load(true));
    let mut sessions = [&still, &model].map(|m| m.session(2 * shift, Wanted::Last).unwrap());
    let done = model.backend().device().done().clone();
    let mut most = 0;
    for t in 0..2 * shift {
        let id = (t * 7 + 11) as u32;
        let [a, b] = &mut sessions;
        let expected = still.forward(a, &[id], Wanted::Last).unwrap();
        let copied = done.copies.load(Relaxed);
        let found = model.forward(b, &[id], Wanted::Last).unwrap();
        assert!(found == expected, "token {t}");
        if t % shift == shift - 1 {
            assert_eq!(done.copies.load(Relaxed), copied, "token {t}");
        }
        for _ in 0..4 {
            let (copies, moved) = (done.copies.load(Relaxed), model.moved());
            model.repin(2).unwrap();
            let now = done.copies.load(Relaxed) - copies;
            assert_eq!(now, model.moved() - moved);
            most = most.max(now);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert!((1..=2).contains(&most), "{most}");
    // Each layer's four, twice.
    assert_eq!(model.moved(), 2 * 3 * TOP_K as u64);
    still.repin(2).unwrap();
    assert_eq!(still.moved(), 0);
}

#[test]
fn generate_and_bench_take_repin() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let vram = (fixed(dir.path()) + (2 << 20)).to_string();
    let (rates, trace) = (dir.path().join("rates.json"), dir.path().join("trace.txt"));
    let generate = |device: &str, more: &[&dyn AsRef<std::ffi::OsStr>]| {
        let mut command = host(&[&"generate", &"-m", &model, &"--prompt-ids", &"256,72,105"]);
        command.args(["-n", "4", "--temp", "0", "--ignore-eos", "-c", "64"]);
        command.args(["--device", device]).args(more);
        command
    };
    let json = |mut command: Command| -> Value {
        let out = command.arg("--json").assert().success();
        serde_json::from_slice(&out.get_output().stdout).unwrap()
    };
    let plain = json(generate("cpu", &[&"--trace", &trace]));
    assert!(plain["placement"]["moved"].is_null());
    let budget: [&dyn AsRef<std::ffi::OsStr>; 7] = [
        &"--vram-budget",
        &vram,
        &"--ram-budget",
        &"300K",
        &"--rates",
        &rates,
        &"--repin",
    ];
    let found = json(generate("emulator", &budget));
    assert_eq!(found["token_ids"], plain["token_ids"]);
    assert!(found["placement"]["moved"].is_u64(), "{found}");
    generate("emulator", &budget)
        .assert()
        .success()
        .stderr(contains("experts moved to device memory"));
    generate("cpu", &[&"--repin"])
        .assert()
        .success()
        .stderr(contains("--repin: all experts are in one place"));
    generate("cpu", &[&"--repin", &"65"])
        .assert()
        .code(2)
        .stderr(contains("a number from 0 to 64"));
    let side = format!("vram={vram},ram=300K,rates={}", rates.display());
    let out = host(&[&"bench", &"decode", &"-m", &model, &"--replay", &trace])
        .args(["--device", "emulator", "--tokens", "2", "--warmup", "1"])
        .args(["--json", "--a", &side, "--b", &format!("{side},repin=2")])
        .assert()
        .success();
    let found: Value = serde_json::from_slice(&out.get_output().stdout).unwrap();
    assert!(found["a"]["moved"].is_null() && found["b"]["moved"].is_u64());
}
