//! Speculation: the layer that drafts, and that no token depends on it.

mod suite;
mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use host::archive::{
    Archive, ExpertSource, LOW_NIBBLES, PackOptions, SafetensorsExperts, expert_digest, pack,
};
use host::backend::cpu::Cpu;
use host::backend::reference::Reference;
use host::backend::{KvFormat, LoadExperts};
use host::convert::{MtpFormat, Options as Conversion, convert, int8, int8_scale};
use host::engine::{self, Device, Options};
use host::expert::{Form, ScaleKind, Tier};
use host::generate::{FinishReason, Generated, Request, generate};
use host::model::{BATCH, Config, Model, Source, Wanted, mtp};
use host::placement::request::{self, Size};
use host::sample::{Sampling, greedy};
use predicates::str::contains;
use safetensors::SafeTensors;
use serde_json::Value;
use support::{Tensors, deviation, oracle_file};

/// What the layer that drafts is.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Layer 2 once more, its input mixed by another layer's matrix: it guesses.
    Guessing,
    /// As the model, of which all layers add nothing: it knows.
    Knowing,
}

/// A bf16 identity beside zeros, `[n, 2n]`.
fn left_identity(n: usize) -> Vec<u8> {
    let one = half::bf16::ONE.to_le_bytes();
    (0..n)
        .flat_map(|r| (0..2 * n).map(move |c| if r == c { one } else { [0; 2] }))
        .flatten()
        .collect()
}

/// A checkpoint of `tests/data` with a layer that drafts, as `tools/oracle.py mtp` makes it.
fn checkpoint(name: &str, kind: Kind) -> tempfile::TempDir {
    let from = support::data().join(format!("{name}-hf"));
    let mut tensors = support::checkpoint(name);
    let mut config: Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    let n = config["num_hidden_layers"].as_u64().unwrap();
    config["num_nextn_predict_layers"] = 1.into();
    for (name, t) in tensors.clone() {
        if let Some(rest) = name.strip_prefix("model.layers.2.") {
            tensors.insert(format!("model.layers.{n}.{rest}"), t);
        }
    }
    let parts = [
        ("eh_proj", "layers.0.mlp.down_proj"),
        ("enorm", "layers.1.input_layernorm"),
        ("hnorm", "layers.2.input_layernorm"),
        ("shared_head.norm", "layers.1.post_attention_layernorm"),
    ];
    for (part, like) in parts {
        let t = tensors[&format!("model.{like}.weight")].clone();
        tensors.insert(format!("model.layers.{n}.{part}.weight"), t);
    }
    if kind != Kind::Guessing {
        let hidden = config["hidden_size"].as_u64().unwrap() as usize;
        let put = |tensors: &mut Tensors, part: &str, bytes: Vec<u8>| {
            let name = format!("model.layers.{n}.{part}.weight");
            tensors.get_mut(&name).unwrap().2 = bytes;
        };
        put(&mut tensors, "eh_proj", left_identity(hidden));
        let ones = half::bf16::ONE.to_le_bytes().repeat(hidden);
        put(&mut tensors, "enorm", ones);
        let norm = tensors["model.norm.weight"].2.clone();
        put(&mut tensors, "shared_head.norm", norm);
    }
    for (name, (_, _, bytes)) in &mut tensors {
        let adds = name.contains("o_proj") || name.contains("down_proj");
        if adds && kind == Kind::Knowing {
            bytes.fill(0);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    support::write_checkpoint(dir.path(), name, &tensors);
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// Its model directory, coded experts too; those of the layer that drafts are int8.
fn model(name: &str, kind: Kind) -> (tempfile::TempDir, PathBuf) {
    model_of(name, kind, MtpFormat::Int8)
}

fn model_of(name: &str, kind: Kind, mtp: MtpFormat) -> (tempfile::TempDir, PathBuf) {
    converted(checkpoint(name, kind), mtp)
}

fn converted(checkpoint: tempfile::TempDir, mtp: MtpFormat) -> (tempfile::TempDir, PathBuf) {
    let dir = checkpoint.path().join("model");
    let options = Conversion {
        mtp,
        ..Conversion::new(ScaleKind::Row)
    };
    let summary = convert(checkpoint.path(), &dir, &options, |_, _| ()).unwrap();
    assert_eq!(summary.left_out, 0);
    assert_eq!(summary.int8_experts > 0, mtp == MtpFormat::Int8);
    let experts = SafetensorsExperts::open(&dir).unwrap();
    let out = dir.join("experts.ansx");
    pack(&experts, &PackOptions::default(), &out, |_| (), || false).unwrap();
    (checkpoint, dir)
}

fn with_drafts(dir: &Path) -> Config {
    let mut config = Config::read(dir).unwrap();
    mtp::want(dir, &mut config).unwrap();
    config
}

fn load<B: LoadExperts>(backend: B, dir: &Path) -> Model<B> {
    let config = with_drafts(dir);
    let source = Source::open(dir, &config, None).unwrap();
    Model::load(backend, dir, config, &source, Form::Fused, |_| ()).unwrap()
}

/// Drafts are those that the formulas of the layer give in float32.
fn compare<B: LoadExperts>(backend: B, dir: &Path, name: &str) -> Vec<u32> {
    let model = load(backend, dir);
    let mut bits = Vec::new();
    for case in &oracle_file(name).cases {
        let n = case.input_ids.len();
        let mut session = model.session(n + 4, Wanted::Last).unwrap();
        // In two batches, so that the layer catches up with the first.
        let (a, b) = case.input_ids.split_at(n / 2);
        model.forward(&mut session, a, Wanted::None).unwrap();
        let logits = model.forward(&mut session, b, Wanted::Last).unwrap();
        assert_eq!(greedy(&logits), case.greedy[0]);
        let mut logits = Vec::new();
        let drafts = model
            .draft(&mut session, case.greedy[0], 2, Some(&mut logits))
            .unwrap();
        let vocab = model.config().vocab;
        for (i, want) in case.draft_logits.iter().enumerate() {
            let d = deviation(&logits[i * vocab..][..vocab], want);
            eprintln!("{name}, {n} tokens, draft {i}: rms {d:.2e}");
            // The bound of `tests/oracle.rs`: orders of summation, activations of 16 bits.
            assert!(d < 1e-3, "{n} tokens, draft {i}: {d:e}");
        }
        assert_eq!(drafts, case.drafts);
        bits.extend(logits.iter().map(|x| x.to_bits()));
    }
    bits
}

#[test]
fn drafts_are_those_of_the_formulas() {
    for (name, suffix) in [
        ("tiny-dsa", "mtp"),
        ("tiny-lite", "mtp"),
        ("tiny-lite", "f32-mtp"),
    ] {
        let made = checkpoint(name, Kind::Guessing);
        if suffix == "f32-mtp" {
            let bf16 = support::tensors(&made.path().join("model.safetensors"));
            let config = fs::read(made.path().join("config.json")).unwrap();
            support::write_checkpoint(made.path(), name, &support::to_f32(bf16));
            fs::write(made.path().join("config.json"), config).unwrap();
        }
        let (_kept, dir) = converted(made, MtpFormat::Int4);
        let oracle = format!("{name}-{suffix}");
        let cpu = compare(Cpu::new().unwrap(), &dir, &oracle);
        assert_eq!(compare(Reference, &dir, &oracle), cpu);
        assert_eq!(compare(suite::emulator().unwrap(), &dir, &oracle), cpu);
        match suite::cuda() {
            Ok(cuda) => assert_eq!(compare(cuda, &dir, &oracle), cpu),
            Err(why) => eprintln!("skipped: {why}"),
        }
    }
}

fn options(device: Device, speculate: usize) -> Options {
    Options {
        device,
        tier: None,
        form: Form::Fused,
        devices: vec![0],
        request: Default::default(),
        placed: false,
        positions: 128,
        speculate,
        repin: 0,
        kv: KvFormat::F32,
        batch: BATCH,
    }
}

fn request(temp: f32, tokens: usize, speculate: usize) -> Request {
    Request {
        prompt: (0..19).map(|i| (i * 53 + 5) % 256).collect(),
        tokens: Some(tokens),
        context: None,
        sampling: Sampling {
            temp,
            top_k: 40,
            top_p: 0.95,
            seed: 11,
        },
        ignore_eos: false,
        keep_logits: true,
        speculate,
        held: 0,
        room: 0,
    }
}

fn run(dir: &Path, options: &Options, request: &Request) -> Generated {
    let mut engine = engine::open(dir, options.clone(), |_, _| ()).unwrap();
    generate(
        engine.as_mut(),
        request,
        |_, _| (),
        |_| ControlFlow::Continue(()),
    )
    .unwrap()
}

/// The same tokens from the same logits, to the bit.
fn same(a: &Generated, b: &Generated) {
    assert_eq!(a.ids, b.ids);
    assert_eq!(a.finish_reason, b.finish_reason);
    let bits = |g: &Generated| -> Vec<u32> { g.logits.iter().map(|x| x.to_bits()).collect() };
    assert!(bits(a) == bits(b));
}

/// Whatever is drafted, and how much of it is right: generation is what it is without.
#[test]
fn tokens_do_not_depend_on_drafts() {
    let share = |g: &Generated| g.accepted as f64 / g.drafted as f64;
    for kind in [Kind::Guessing, Kind::Knowing] {
        let (_kept, dir) = model("tiny-dsa", kind);
        for temp in [0.0, 0.9] {
            let n = 60;
            let plain = run(&dir, &options(Device::Cpu, 0), &request(temp, n, 0));
            assert_eq!(
                (plain.drafted, plain.passes, plain.ids.len()),
                (0, n - 1, n)
            );
            for k in [1, 3] {
                let got = run(&dir, &options(Device::Cpu, k), &request(temp, n, k));
                same(&got, &plain);
                eprintln!(
                    "temperature {temp}, {k} drafts: {} of {} accepted",
                    got.accepted, got.drafted
                );
                assert_eq!(got.passes + got.accepted, n - 1);
                assert!(got.drafted > 0);
                match kind {
                    Kind::Guessing => assert!(share(&got) < 0.2),
                    Kind::Knowing if temp == 0.0 => assert!(share(&got) > 0.95),
                    // What is drawn at random is seldom the likeliest.
                    Kind::Knowing => assert!(got.accepted > 0 && share(&got) < 0.5),
                }
            }
        }
    }
}

/// The same with caches of bf16, the layer's own too, which change what the tokens are chosen from.
#[test]
fn tokens_do_not_depend_on_drafts_in_bf16() {
    let narrow = |device, speculate| Options {
        kv: KvFormat::Bf16,
        batch: BATCH,
        ..options(device, speculate)
    };
    for kind in [Kind::Guessing, Kind::Knowing] {
        let (_kept, dir) = model("tiny-dsa", kind);
        let n = 40;
        let plain = run(&dir, &narrow(Device::Cpu, 0), &request(0.0, n, 0));
        let wide = run(&dir, &options(Device::Cpu, 0), &request(0.0, n, 0));
        // Where no layer adds anything caches are of no account.
        assert_eq!(plain.logits != wide.logits, kind == Kind::Guessing);
        let drafted = run(&dir, &narrow(Device::Cpu, 3), &request(0.0, n, 3));
        same(&drafted, &plain);
        assert_eq!(drafted.accepted > n / 2, kind == Kind::Knowing);
        let n = 12;
        let plain = run(&dir, &narrow(Device::Cpu, 0), &request(0.0, n, 0));
        let mut devices = vec![Device::Emulator, Device::Reference];
        if suite::cuda().is_ok() {
            devices.push(Device::Cuda);
        }
        for device in devices {
            same(&run(&dir, &narrow(device, 2), &request(0.0, n, 2)), &plain);
        }
    }
}

/// The experts of the layer that drafts are bytes, by the rule, with a scale a row; they draft the same bits
/// raw and coded, on every back end.
#[test]
fn converted_experts_of_bytes() {
    let (kept, dir) = model("tiny-dsa", Kind::Guessing);
    let open = |file: PathBuf| -> Vec<u8> { fs::read(file).unwrap() };
    let (from, made) = (
        open(kept.path().join("model.safetensors")),
        open(dir.join("experts.safetensors")),
    );
    let from = SafeTensors::deserialize(&from).unwrap();
    let made = SafeTensors::deserialize(&made).unwrap();
    let name = "model.layers.6.mlp.experts.5.up_proj.weight";
    let weights = from.tensor(name).unwrap();
    let [rows, cols] = weights.shape() else {
        panic!("{:?}", weights.shape())
    };
    let weights: Vec<f32> = (weights.data().as_chunks::<2>().0.iter())
        .map(|b| half::bf16::from_le_bytes(*b).to_f32())
        .collect();
    let bytes = made.tensor(name).unwrap();
    let scales = made.tensor(&format!("{name}.qs")).unwrap();
    assert_eq!(bytes.shape(), [rows * cols]);
    assert_eq!(scales.shape(), [*rows]);
    for (r, row) in weights.chunks(*cols).enumerate() {
        let amax = row.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let scale = f32::from_le_bytes(scales.data()[4 * r..][..4].try_into().unwrap());
        assert_eq!(scale, amax / 127.0);
        assert_eq!(scale, int8_scale(row));
        for (w, byte) in row.iter().zip(&bytes.data()[r * cols..]) {
            assert_eq!(*byte as i8, int8(*w, scale));
            // Half a step, and what two roundings may add.
            assert!((*byte as i8 as f32 * scale - w).abs() <= 0.501 * scale);
        }
    }
    let other = made.tensor("model.layers.5.mlp.experts.5.up_proj.weight");
    assert_eq!(other.unwrap().shape(), [rows * cols / 2]);

    fn drafts<B: LoadExperts>(backend: B, dir: &Path, tier: Tier) -> Vec<u32> {
        let config = with_drafts(dir);
        let source = Source::open(dir, &config, Some(tier)).unwrap();
        let model = Model::load(backend, dir, config, &source, Form::Fused, |_| ()).unwrap();
        let mut session = model.session(24, Wanted::Last).unwrap();
        let ids: Vec<u32> = (0..19).map(|i| (i * 53 + 5) % 256).collect();
        let next = greedy(&model.forward(&mut session, &ids, Wanted::Last).unwrap());
        let mut logits = Vec::new();
        let drafts = model.draft(&mut session, next, 3, Some(&mut logits));
        assert_eq!(drafts.unwrap().len(), 3);
        logits.into_iter().map(f32::to_bits).collect()
    }
    let cpu = || Cpu::new().unwrap();
    let want = drafts(cpu(), &dir, Tier::Raw);
    assert!(drafts(Reference, &dir, Tier::Raw) == want);
    assert!(drafts(cpu(), &dir, Tier::Ans) == want);
    assert!(drafts(suite::emulator().unwrap(), &dir, Tier::Raw) == want);
    assert!(drafts(suite::emulator().unwrap(), &dir, Tier::Ans) == want);
    match suite::cuda() {
        Ok(cuda) => assert!(drafts(cuda, &dir, Tier::Ans) == want),
        Err(why) => eprintln!("skipped: {why}"),
    }
    // Int4 rounds more, so it drafts from other logits.
    let (_kept, int4) = model_of("tiny-dsa", Kind::Guessing, MtpFormat::Int4);
    assert!(drafts(cpu(), &int4, Tier::Raw) != want);
}

/// An interrupted conversion goes on in the middle of the int8 experts, also where only one of an expert's two
/// digests came to the disk.
#[test]
fn conversion_resumes_within_int8_experts() {
    let (kept, whole) = model("tiny-dsa", Kind::Guessing);
    let to = kept.path().join("again");
    let partial = kept.path().join(".again.partial");
    let resume = Conversion {
        resume: true,
        ..Conversion::new(ScaleKind::Row)
    };
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("identity"), "another").unwrap();
    let refused = convert(kept.path(), &to, &resume, |_, _| ()).unwrap_err();
    let refused = refused.to_string();
    // It says what the identity would be.
    let (_, identity) = refused.split_once("expected ").unwrap();
    let identity = &identity[..64];
    let experts = SafetensorsExperts::open(&whole).unwrap();
    assert_eq!(experts.layers(), [2, 3, 4, 5, 6, 6 | LOW_NIBBLES]);
    let digest = |l: u32, e: usize| expert_digest(&experts.expert(l, e).unwrap());
    let n = experts.experts();
    let mut records: Vec<[u8; 16]> = [2, 3, 4, 5]
        .into_iter()
        .flat_map(|l| (0..n).map(move |e| (l, e)))
        .map(|(l, e)| digest(l, e))
        .collect();
    for e in 0..3 {
        records.extend([digest(6, e), digest(6 | LOW_NIBBLES, e)]);
    }
    records.pop();
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join("identity"), identity).unwrap();
    fs::write(partial.join("progress"), records.as_flattened()).unwrap();
    // What stands behind the experts that are known is not to be trusted.
    let file = fs::read(whole.join("experts.safetensors")).unwrap();
    let bytes = 3 * 64 * 128 + 4 * (64 + 64 + 128); // of an int8 expert
    let keep = file.len() - (n - 2) * bytes;
    let mut torn = file[..keep].to_vec();
    torn.extend([0x5a; 1000]);
    fs::write(partial.join("experts.safetensors"), torn).unwrap();
    let summary = convert(kept.path(), &to, &resume, |_, _| ()).unwrap();
    assert_eq!((summary.experts, summary.int8_experts), (5 * n, n));
    for name in ["experts.safetensors", "dense.safetensors"] {
        let read = |dir: &Path| fs::read(dir.join(name)).unwrap();
        assert!(read(&to) == read(&whole), "{name}");
    }
}

/// What is wrong with the layer that drafts alone is named: where it is wanted, and where all is looked at.
#[test]
fn a_damaged_layer_is_named() {
    let none = Path::new("");
    let (_kept, dir) = model("tiny-dsa", Kind::Guessing);
    let args = [
        "generate",
        "--device",
        "cpu",
        "--prompt-ids",
        "1,2,3",
        "-n",
        "2",
    ];
    let fails = |args: &[&str], what: &str| {
        let mut command = host(args, none, &dir);
        command.assert().code(1).stderr(contains(what));
    };
    // An archive of the same model before it had the layer.
    let other = support::converted("tiny-dsa", ScaleKind::Row).unwrap();
    let other = other.path().join("model");
    host(&["pack"], none, &other).assert().success();
    let own = dir.join("experts.ansx");
    let kept = dir.join("kept");
    fs::rename(&own, &kept).unwrap();
    fs::copy(other.join("experts.ansx"), &own).unwrap();
    let drafting = [&args[..], &["--speculate"]].concat();
    fails(
        &drafting,
        "layers: expected [2, 3, 4, 5, 6], found [2, 3, 4, 5];",
    );
    // The other way round, in words.
    fs::copy(&kept, other.join("experts.ansx")).unwrap();
    let refused = host(&args, none, &other).assert().code(1);
    refused.stderr(contains("found [2, 3, 4, 5, 6], of int8 [6];"));
    // A matrix of one of its experts.
    fs::remove_file(&own).unwrap();
    let file = dir.join("experts.safetensors");
    let bytes = fs::read(&file).unwrap();
    let gone = "model.layers.6.mlp.experts.7.up_proj.weight";
    let whole = SafeTensors::deserialize(&bytes).unwrap();
    let mut views = whole.tensors();
    views.retain(|(name, _)| name != gone);
    let metadata = [("ansatz.experts".to_string(), "int4-row".to_string())];
    let less = safetensors::serialize(views, Some(metadata.into())).unwrap();
    fs::write(&file, less).unwrap();
    fails(&drafting, gone);
    fails(&["pack"], gone);
    fails(&["doctor", "--deep"], gone);
    host(&["doctor"], none, &dir)
        .assert()
        .success()
        .stdout(contains(gone));
    host(&args, none, &dir).assert().success();
}

#[test]
fn formats_of_the_layer_by_flag() {
    let checkpoint = checkpoint("tiny-dsa", Kind::Guessing);
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command
            .args(["convert", "--force", "--from"])
            .arg(checkpoint.path());
        command.arg("--to").arg(checkpoint.path().join("m"));
        command.args(more).assert()
    };
    let bytes = "16 of them, of the layer that drafts, as int8-row";
    run(&[]).success().stderr(contains(bytes));
    let int4 = run(&["--mtp", "int4"]).success();
    assert!(!String::from_utf8_lossy(&int4.get_output().stderr).contains("int8"));
    run(&["--experts", "int4-g64"]).success();
    run(&["--experts", "int4-g64", "--mtp", "int8"])
        .code(1)
        .stderr(contains(
            "--mtp: expected int4 beside experts with a scale for each 64 columns",
        ));
}

/// The kernels: batches of one token and of several, experts coded and in tiers.
#[test]
fn tokens_do_not_depend_on_drafts_on_devices() {
    for (kind, mtp) in [
        (Kind::Guessing, MtpFormat::Int8),
        (Kind::Knowing, MtpFormat::Int4),
    ] {
        let (_kept, dir) = model_of("tiny-dsa", kind, mtp);
        let n = 12;
        let plain = run(&dir, &options(Device::Cpu, 0), &request(0.0, n, 0));
        let mut devices = vec![Device::Emulator, Device::Reference];
        if suite::cuda().is_ok() {
            devices.push(Device::Cuda);
        }
        for device in devices {
            same(&run(&dir, &options(device, 2), &request(0.0, n, 2)), &plain);
        }
        // A plan that has no room for all experts; the layer that drafts is part of it.
        let rates = dir.join("rates.json");
        host(
            &["plan", "--device", "emulator", "--save-rates"],
            &rates,
            &dir,
        )
        .assert()
        .success();
        let placed = request::Request {
            ram: Some(Size::Bytes(200 << 10)),
            rates: Some(rates),
            positions: 128,
            ..request::Request::default()
        };
        for speculate in [0, 2] {
            let options = Options {
                request: placed.clone(),
                placed: true,
                ..options(Device::Emulator, speculate)
            };
            same(&run(&dir, &options, &request(0.0, n, speculate)), &plain);
        }
    }
}

/// Rounds of two drafts and the pass that checks them, of which one draft at most is kept: all logits' bits,
/// and how many kinds of passes were recorded.
fn rounds<B: LoadExperts>(backend: B, dir: &Path, kv: KvFormat) -> (Vec<u32>, usize) {
    let mut config = with_drafts(dir);
    config.kv = kv;
    // Some rounds are before the positions that the indexer lists, one is across, others after them.
    assert_eq!(config.index.top_k, 16);
    let source = Source::open(dir, &config, None).unwrap();
    let model = Model::load(backend, dir, config, &source, Form::Fused, |_| ()).unwrap();
    let mut session = model.session(40, Wanted::Tail(3)).unwrap();
    let prompt: Vec<u32> = (0..9).map(|i| (i * 53 + 5) % 256).collect();
    let vocab = model.config().vocab;
    let mut logits = model.forward(&mut session, &prompt, Wanted::Last).unwrap();
    let mut next = greedy(&logits);
    let mut out = Vec::new();
    for round in 0..9 {
        let drafts = model.draft(&mut session, next, 2, Some(&mut out)).unwrap();
        assert_eq!(drafts.len(), 2);
        let batch = [next, drafts[0], drafts[1]];
        logits = model
            .forward(&mut session, &batch, Wanted::Tail(3))
            .unwrap();
        out.extend_from_slice(&logits);
        let kept = round % 2;
        session.roll_back(2 - kept);
        next = greedy(&logits[kept * vocab..][..vocab]);
    }
    (bits_of(&out), session.recorded_passes())
}

fn bits_of(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Drafts and the passes that check them are repeated as one launch each, with the bits of launches by
/// themselves.
#[test]
fn drafts_and_their_checks_are_recorded() {
    let (_kept, dir) = model("tiny-dsa", Kind::Guessing);
    for kv in [KvFormat::F32, KvFormat::Bf16] {
        let (want, none) = rounds(Cpu::new().unwrap(), &dir, kv);
        assert_eq!(none, 0);
        // Checks of three tokens; drafts after one and after two tokens.
        let (got, recorded) = rounds(suite::emulator().unwrap(), &dir, kv);
        assert_eq!((got == want, recorded), (true, 3), "{kv:?}");
        match suite::cuda() {
            Ok(cuda) => {
                let (got, recorded) = rounds(cuda, &dir, kv);
                assert_eq!((got == want, recorded), (true, 3), "{kv:?}");
            }
            Err(why) => eprintln!("skipped: {why}"),
        }
    }
}

/// An answer ends at its end token also where that was a draft, and what follows is forgotten.
#[test]
fn drafts_past_the_end_are_forgotten() {
    let (_kept, dir) = model("tiny-dsa", Kind::Knowing);
    let plain = run(&dir, &options(Device::Cpu, 0), &request(0.0, 40, 0));
    let end = plain.ids[10];
    let first = plain.ids.iter().position(|id| *id == end).unwrap();
    let text = format!("{{\"eos_token_id\": {end}}}");
    fs::write(dir.join("generation_config.json"), text).unwrap();
    for k in [0, 1, 4, 15] {
        let mut engine = engine::open(&dir, options(Device::Cpu, k), |_, _| ()).unwrap();
        let mut request = request(0.0, 40, k);
        let on = |_| ControlFlow::Continue(());
        let got = generate(engine.as_mut(), &request, |_, _| (), on).unwrap();
        assert_eq!(got.ids, plain.ids[..=first]);
        assert_eq!(got.finish_reason, FinishReason::Stop);
        // The sequence is that of the tokens: it goes on as if nothing had been drafted.
        let logits = engine.forward(&[end], Wanted::Last).unwrap();
        let vocab = engine.config().vocab;
        let want = &plain.logits[(first + 1) * vocab..][..vocab];
        assert!(
            logits
                .iter()
                .zip(want)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
        // And a second sequence on the same engine.
        request.ignore_eos = true;
        let got = generate(engine.as_mut(), &request, |_, _| (), on).unwrap();
        same(&got, &plain);
    }
}

fn host(args: &[&str], file: &Path, dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(args);
    if !file.as_os_str().is_empty() {
        command.arg(file);
    }
    command.arg("-m").arg(dir);
    // Rates that the planner measures stay here.
    command.env("XDG_CACHE_HOME", dir);
    command
}

#[test]
fn commands_know_the_layer() {
    let (_kept, dir) = model("tiny-dsa", Kind::Knowing);
    let none = Path::new("");
    let args = ["generate", "--device", "cpu", "--temp", "0", "-n", "30"];
    let ids = ["--prompt-ids", "1,2,3"];
    let json = |more: &[&str]| -> Value {
        let mut command = host(&args, none, &dir);
        let out = command.args(ids).arg("--json").args(more).assert();
        serde_json::from_slice(&out.success().get_output().stdout).unwrap()
    };
    let (plain, drafted) = (json(&[]), json(&["--speculate", "3"]));
    // A token and its drafts go together, whatever a prompt's tokens do.
    let narrow = json(&["--speculate", "3", "--batch", "1"]);
    assert_eq!(narrow["token_ids"], plain["token_ids"]);
    assert_eq!(plain["token_ids"], drafted["token_ids"]);
    assert!(plain["speculation"].is_null());
    assert!(drafted["speculation"]["acceptance_rate"].as_f64().unwrap() > 0.9);
    assert!(drafted["speculation"]["passes"].as_u64().unwrap() < 15);
    host(&args, none, &dir)
        .args(ids)
        .arg("--speculate")
        .assert()
        .success()
        .stderr(contains("drafts accepted"));
    let doctor = host(&["doctor", "--deep"], none, &dir).assert();
    doctor.success().stdout(contains("drafts   layer 6"));
    let archive = dir.join("experts.ansx");
    assert_eq!(
        Archive::open(&archive).unwrap().layers(),
        [2, 3, 4, 5, 6, 6 | LOW_NIBBLES]
    );
    host(&["verify"], &archive, &dir)
        .assert()
        .success()
        .stderr(contains("the model's raw experts"));
    // Without the layer's experts all else works.
    let text = fs::read_to_string(dir.join("config.json")).unwrap();
    let without = text.replace(
        "\"num_nextn_predict_layers\":1",
        "\"num_nextn_predict_layers\":0",
    );
    assert_ne!(text, without);
    fs::write(dir.join("config.json"), without).unwrap();
    let refused = host(&args, none, &dir)
        .args(ids)
        .arg("--speculate")
        .assert();
    refused.code(1).stderr(contains(
        "num_nextn_predict_layers: expected a layer that drafts, found none",
    ));
    // A configuration that announces a layer whose tensors are not there.
    let made = support::converted("tiny-dsa", ScaleKind::Row).unwrap();
    let plain = made.path().join("model");
    fs::write(plain.join("config.json"), text).unwrap();
    host(&args, none, &plain).args(ids).assert().success();
    let refused = host(&args, none, &plain)
        .args(ids)
        .arg("--speculate")
        .assert();
    refused
        .code(1)
        .stderr(contains("model.layers.6.eh_proj.weight"));
    host(&["doctor", "--deep"], none, &plain).assert().success();
}
