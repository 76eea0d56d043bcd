//! Models in containers: the same bits as converted ones, and every fault one line.

mod suite;
mod support;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use host::backend::LoadExperts;
use host::backend::cpu::Cpu;
use host::backend::kernels::{EmulatedDevice, KernelBackend};
use host::backend::reference::Reference;
use host::expert::{Form, MatrixKind, ScaleKind, Tier};
use host::model::directory::{RawExperts, expert_tensor};
use host::model::{Config, Model, Source, Wanted};
use host::sample::greedy;
use predicates::prelude::*;
use predicates::str::{contains, is_empty};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use support::{Tensors, deviation};

/// How a container stores a kind of matrix.
#[derive(Clone, Copy, PartialEq)]
enum As {
    /// As it is.
    Float,
    F32,
    Int8Row,
    /// Columns of a group; a row's where it is as wide.
    Int4(usize),
}

fn checkpoint() -> Tensors {
    support::checkpoint("tiny-dsa")
}

fn widen(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks(2)
        .map(|b| f32::from_bits((u16::from_le_bytes([b[0], b[1]]) as u32) << 16))
        .collect()
}

fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Integers `q` of a matrix and their scales, by `s = max(amax / most, 1e-8)`.
fn integers(w: &[f32], cols: usize, group: usize, most: f32) -> (Vec<i8>, Vec<f32>) {
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    for group in w.chunks(cols).flat_map(|row| row.chunks(group)) {
        let amax = group.iter().fold(0.0f32, |m, w| m.max(w.abs()));
        let s = (amax / most).max(1e-8);
        scales.push(s);
        let q1 = |w: &f32| (w / s).round_ties_even().clamp(-most - 1.0, most) as i8;
        q.extend(group.iter().map(q1));
    }
    (q, scales)
}

fn put(out: &mut Tensors, name: &str, shape: &[usize], bytes: &[u8], how: As) {
    if how == As::Float {
        out.insert(name.into(), (Dtype::BF16, shape.to_vec(), bytes.to_vec()));
    } else {
        put_wide(out, name, shape, &widen(bytes), how);
    }
}

/// The same of f32.
fn put_wide(out: &mut Tensors, name: &str, shape: &[usize], w: &[f32], how: As) {
    if matches!(how, As::Float | As::F32) {
        out.insert(name.into(), (Dtype::F32, shape.to_vec(), le(w)));
        return;
    }
    let cols = shape[1];
    let (bytes, scales) = match how {
        As::Int4(group) => {
            let (q, scales) = integers(w, cols, group.min(cols), 7.0);
            let nibble = |q: i8| (q + 8) as u8;
            let pack = |p: &[i8]| nibble(p[0]) | nibble(p[1]) << 4;
            (q.chunks(2).map(pack).collect::<Vec<u8>>(), scales)
        }
        _ => {
            let (q, scales) = integers(w, cols, cols, 127.0);
            (q.iter().map(|q| *q as u8).collect(), scales)
        }
    };
    out.insert(name.into(), (Dtype::U8, vec![bytes.len()], bytes));
    out.insert(
        format!("{name}.qs"),
        (Dtype::F32, vec![scales.len()], le(&scales)),
    );
}

/// tiny-dsa as a container keeps it: norms, routers and biases f32.
fn tensors(experts: As, matrices: As) -> Tensors {
    of_checkpoint(checkpoint(), experts, matrices)
}

fn of_checkpoint(checkpoint: Tensors, experts: As, matrices: As) -> Tensors {
    let mut out = Tensors::new();
    for (name, (dtype, shape, bytes)) in checkpoint {
        if name.ends_with("e_score_correction_bias") {
            out.insert(name, (dtype, shape, bytes));
            continue;
        }
        let kept = ["norm", "mlp.gate.", "weights_proj", "bias"];
        let how = if name.contains(".mlp.experts.") {
            experts
        } else if shape.len() != 2 || kept.iter().any(|k| name.contains(k)) {
            As::F32
        } else {
            matrices
        };
        match dtype {
            Dtype::F32 => put_wide(&mut out, &name, &shape, &support::f32s(&bytes), how),
            _ => put(&mut out, &name, &shape, &bytes, how),
        }
    }
    out
}

type Metadata = Option<HashMap<String, String>>;

fn write(file: &Path, tensors: &Tensors, metadata: Metadata) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, metadata, file).unwrap();
}

fn shard(dir: &Path, i: usize) -> PathBuf {
    dir.join(format!("out-{i:05}.safetensors"))
}

/// A container of three shards.
fn container(tensors: &Tensors, stamps: Option<Value>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json"] {
        let from = support::data().join("tiny-dsa-hf").join(name);
        fs::write(dir.path().join(name), fs::read(from).unwrap()).unwrap();
    }
    let mut shards = [Tensors::new(), Tensors::new(), Tensors::new()];
    for (i, (name, t)) in tensors.iter().enumerate() {
        shards[i % 3].insert(name.clone(), t.clone());
    }
    for (i, tensors) in shards.iter().enumerate() {
        let stamp = |s: &Value| HashMap::from([("colibri.fmt".into(), s.to_string())]);
        let metadata = if i == 0 {
            stamps.as_ref().map(stamp)
        } else {
            None
        };
        write(&shard(dir.path(), i), tensors, metadata);
    }
    dir
}

fn host(args: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(args).arg("-m").arg(dir);
    // Rates that the planner measures stay here.
    command.env("XDG_CACHE_HOME", dir);
    command
}

fn generate(dir: &Path) -> Command {
    let ids = ["--prompt-ids", "191,80,91,337,439,269,12"];
    let mut command = host(&["generate", "--device", "cpu"], dir);
    command.args(ids).args(["-n", "30", "--temp", "0"]);
    command
}

/// Token ids and the bits of all logits.
fn run(dir: &Path, args: &[&str]) -> (Value, Vec<u8>) {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("logits");
    let mut command = generate(dir);
    command.args(args).args(["--json", "--logits"]).arg(&file);
    let stdout = command.assert().success().get_output().stdout.clone();
    let object: Value = serde_json::from_slice(&stdout).unwrap();
    (object["token_ids"].clone(), fs::read(file).unwrap())
}

/// From the raw shards, and packed straight from them, as from a converted checkpoint.
#[test]
fn containers_give_the_bits_of_converted_models() {
    // What these logits were when norms were kept in bf16: weights that it holds give the same bits in f32.
    for (experts, scales, digest) in [
        (
            As::Int4(usize::MAX),
            ScaleKind::Row,
            "84f753b9f4b693a4efb77295b6299a5d",
        ),
        (
            As::Int4(64),
            ScaleKind::G64,
            "15900e00e92e30b1f6ea2ef0a5adced2",
        ),
    ] {
        let made = support::converted("tiny-dsa", scales).unwrap();
        let converted = made.path().join("model");
        let want = run(&converted, &[]);
        assert_eq!(blake3::hash(&want.1).to_hex()[..32], *digest);
        for matrices in [As::F32, As::Float] {
            let dir = container(&tensors(experts, matrices), None);
            assert!(run(dir.path(), &[]) == want);
            host(&["pack"], dir.path())
                .assert()
                .success()
                .stderr(contains("64 experts"));
            assert!(run(dir.path(), &["--tier", "ans"]) == want);
            assert!(run(dir.path(), &["--tier", "raw"]) == want);
        }
        let dir = container(&tensors(experts, As::F32), None);
        host(&["pack"], dir.path()).assert().success();
        host(&["pack"], &converted).assert().success();
        let archive = |dir: &Path| fs::read(dir.join("experts.ansx")).unwrap();
        assert!(archive(dir.path()) == archive(&converted));
        let file = dir.path().join("experts.ansx");
        host(&["verify", file.to_str().unwrap()], dir.path())
            .assert()
            .success()
            .stderr(contains("the model's raw experts"));
    }
}

/// Experts with row scales here and group scales there are group-scaled all, with the same weights.
#[test]
fn mixed_scales_become_groups() {
    let mut mixed = tensors(As::Int4(64), As::F32);
    let row = tensors(As::Int4(usize::MAX), As::F32);
    for e in 0..16 {
        for suffix in ["", ".qs"] {
            let name = expert_tensor(4, e, MatrixKind::Gate) + suffix;
            mixed.insert(name.clone(), row[&name].clone());
        }
    }
    let dir = container(&mixed, None);
    let config = Config::read(dir.path()).unwrap();
    let experts = RawExperts::open(dir.path(), &config).unwrap();
    assert_eq!(experts.shape().scales, ScaleKind::G64);
    let gate = experts.matrix(4, 3, MatrixKind::Gate).unwrap();
    assert_eq!(gate.scales.len(), 64 * 2);
    let name = expert_tensor(4, 3, MatrixKind::Gate);
    let scales: Vec<f32> = row[&(name.clone() + ".qs")]
        .2
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    for (i, s) in gate.scales.iter().enumerate() {
        assert_eq!(*s, scales[i / 2]);
    }
    assert_eq!(gate.packed[..], row[&name].2[..]);
    run(dir.path(), &[]);
}

/// A group of 128 or 192 columns is two or three of 64.
/// Two scales for 128 columns fit groups of 64 and of 96; three for 256 only the latter, which then holds
/// for all.
#[test]
fn groups_are_those_that_all_matrices_may_have() {
    const GROUP: usize = 96;
    let grouped = tensors(As::Int4(usize::MAX), As::Int4(GROUP));
    let mut wide = grouped.clone();
    for (name, (dtype, shape, bytes)) in checkpoint() {
        let scales = format!("{name}.qs");
        let dense = !name.contains(".mlp.experts.") && grouped.contains_key(&scales);
        if dense && shape[1] > GROUP {
            assert_eq!(dtype, Dtype::BF16);
            let cols = shape[1];
            let (q, s) = integers(&widen(&bytes), cols, GROUP, 7.0);
            let scale = |i: usize| s[i / cols * cols.div_ceil(GROUP) + i % cols / GROUP];
            let w = (0..q.len()).map(|i| f32::from(q[i]) * scale(i));
            wide.remove(&scales);
            let bytes = w.flat_map(f32::to_le_bytes).collect();
            wide.insert(name, (Dtype::F32, shape, bytes));
        }
    }
    let (grouped, wide) = (container(&grouped, None), container(&wide, None));
    assert!(run(grouped.path(), &[]) == run(wide.path(), &[]));
}

#[test]
fn wide_groups_are_spread() {
    let (hidden, intermediate) = (448, 128);
    let mut all = Tensors::new();
    let mut want = HashMap::new();
    for layer in 2..6 {
        for e in 0..16 {
            for kind in MatrixKind::ALL {
                let shape = match kind {
                    MatrixKind::Down => [hidden, intermediate],
                    _ => [intermediate, hidden],
                };
                let w: Vec<u8> = (0..shape[0] * shape[1])
                    .flat_map(|i| {
                        let x = ((i * 37 + e * 11 + layer) % 251) as f32 - 125.0;
                        half::bf16::from_f32(x).to_le_bytes()
                    })
                    .collect();
                let name = expert_tensor(layer, e, kind);
                put(&mut all, &name, &shape, &w, As::Int4(128));
                let scales = integers(&widen(&w), shape[1], 128.min(shape[1]), 7.0).1;
                want.insert((layer, e, kind), scales);
            }
        }
    }
    let dir = container(&all, None);
    let mut config: Value =
        serde_json::from_slice(&fs::read(dir.path().join("config.json")).unwrap()).unwrap();
    config["hidden_size"] = hidden.into();
    config["moe_intermediate_size"] = intermediate.into();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let config = Config::read(dir.path()).unwrap();
    let experts = RawExperts::open(dir.path(), &config).unwrap();
    for ((layer, e, kind), scales) in &want {
        let got = experts.matrix(*layer, *e, *kind).unwrap();
        let (rows, cols) = experts.shape().dims(*kind);
        let groups = cols.div_ceil(128);
        for r in 0..rows {
            for g in 0..cols / 64 {
                let want = scales[r * groups + g / 2];
                assert_eq!(got.scales[r * (cols / 64) + g], want);
            }
        }
    }
}

/// On the CPU logits and greedy tokens are an oracle's.
fn tokens_are(dir: &Path, oracle: &str) {
    let config = Config::read(dir).unwrap();
    let source = Source::open(dir, &config, None).unwrap();
    let cpu = Cpu::new().unwrap();
    let model = Model::load(cpu, dir, config, &source, Form::Fused, |_| ()).unwrap();
    for case in &support::oracle_file(oracle).cases {
        let n = case.input_ids.len();
        let mut session = model.session(n + case.greedy.len(), Wanted::Last).unwrap();
        let mut logits = model
            .forward(&mut session, &case.input_ids, Wanted::Last)
            .unwrap();
        let d = deviation(&logits, &case.last_logits);
        eprintln!("{oracle}, {n} tokens: rms {d:.2e}");
        assert!(d < 1e-3, "{n} tokens: {d:e}");
        for (token, margin) in case.greedy.iter().zip(&case.greedy_margin) {
            assert_eq!(greedy(&logits), *token, "{margin}");
            logits = model
                .forward(&mut session, &[*token], Wanted::Last)
                .unwrap();
        }
    }
}

/// Integers and row scales go their own ways, f32 stays f32: nothing is rounded. Norms, routers and the
/// indexers' weights of the second container are f32 that bf16 does not hold.
#[test]
fn quantised_dense_parts_give_the_tokens_of_transformers() {
    for (checkpoint, oracle) in [
        (checkpoint(), "tiny-dsa-int8"),
        (support::to_f32(checkpoint()), "tiny-dsa-f32-int8"),
    ] {
        let all = of_checkpoint(checkpoint, As::Int4(usize::MAX), As::Int8Row);
        let dir = container(&all, None);
        tokens_are(dir.path(), oracle);
        let want = bits(Cpu::new().unwrap(), dir.path(), Tier::Raw, Form::Fused);
        assert!(bits(Reference, dir.path(), Tier::Raw, Form::Fused) == want);
        let emulator = KernelBackend::new(EmulatedDevice::default()).unwrap();
        assert!(bits(emulator, dir.path(), Tier::Raw, Form::Fused) == want);
        if let Ok(cuda) = suite::cuda() {
            assert!(bits(cuda, dir.path(), Tier::Raw, Form::Fused) == want);
        }
    }
}

/// What doctor says a dense part takes: floats as they are, vectors as f32.
#[test]
fn doctor_counts_floats_as_they_are() {
    for (checkpoint, format, width) in [
        (checkpoint(), "bf16", 2),
        (support::to_f32(checkpoint()), "f32", 4),
    ] {
        let dense = checkpoint
            .iter()
            .filter(|(name, _)| !name.contains(".mlp.experts."));
        let bytes: usize = dense
            .clone()
            .map(|(_, (_, shape, _))| {
                let width = if shape.len() == 2 { width } else { 4 };
                width * shape.iter().product::<usize>()
            })
            .sum();
        let of_format = dense.filter(|(name, _)| format == "f32" || !name.ends_with("_bias"));
        let tensors = of_format.count();
        // As the checkpoint has them, but for the experts.
        let mut all = of_checkpoint(checkpoint.clone(), As::Int4(usize::MAX), As::Float);
        for (name, t) in &checkpoint {
            if !name.contains(".mlp.experts.") {
                all.insert(name.clone(), t.clone());
            }
        }
        let dir = container(&all, None);
        let mut doctor = host(&["doctor", "--json"], dir.path());
        let stdout = doctor.assert().success().get_output().stdout.clone();
        let model = &serde_json::from_slice::<Value>(&stdout).unwrap()["model"];
        assert_eq!(model["dense_formats"][format], tensors, "{model}");
        assert_eq!(model["dense_bytes"], bytes, "{model}");
    }
}

/// Bits of 22 tokens' logits, five of them in one batch; the last are past the 16 positions that are listed.
fn bits<B: LoadExperts>(backend: B, dir: &Path, tier: Tier, form: Form) -> Vec<u32> {
    let config = Config::read(dir).unwrap();
    let source = Source::open(dir, &config, Some(tier)).unwrap();
    let model = Model::load(backend, dir, config, &source, form, |_| ()).unwrap();
    let ids: Vec<u32> = (0..22).map(|i| (i * 97 + 5) % 512).collect();
    let mut session = model.session(ids.len(), Wanted::All).unwrap();
    let mut out = Vec::new();
    for part in [&ids[..5], &ids[5..6], &ids[6..]] {
        out.extend(model.forward(&mut session, part, Wanted::All).unwrap());
    }
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn int8_experts_give_the_tokens_of_transformers() {
    let dir = container(&tensors(As::Int8Row, As::F32), None);
    tokens_are(dir.path(), "tiny-dsa-e8");
    let cpu = || Cpu::new().unwrap();
    // Nibbles raw and coded, each back end: the same bits.
    let want = bits(cpu(), dir.path(), Tier::Raw, Form::Fused);
    let emulator = || KernelBackend::new(EmulatedDevice::default()).unwrap();
    let same = |tier: Tier, form: Form| {
        assert!(bits(cpu(), dir.path(), tier, form) == want);
        assert!(bits(Reference, dir.path(), tier, form) == want);
        assert!(bits(emulator(), dir.path(), tier, form) == want);
        if let Ok(cuda) = suite::cuda() {
            assert!(bits(cuda, dir.path(), tier, form) == want);
        }
    };
    same(Tier::Raw, Form::Fused);
    let archive = dir.path().join("experts.ansx");
    for codec in ["rans", "plane3"] {
        let pack = ["pack", "--codec", codec];
        let made = host(&pack, dir.path()).assert().success();
        made.stderr(contains("128 experts"));
        same(Tier::Ans, Form::Fused);
        same(Tier::Ans, Form::Unfused);
        let verify = ["verify", archive.to_str().unwrap()];
        let verified = host(&verify, dir.path()).assert().success();
        verified.stderr(contains("the model's raw experts"));
    }
    host(&["doctor", "--deep"], dir.path()).assert().success();
}

/// A container as those of GLM-5.2: the layer that drafts has int8 experts.
#[test]
fn int8_experts_draft() {
    let with_drafts = |experts: As| {
        let mut all = tensors(experts, As::F32);
        let source = checkpoint();
        let parts = [
            ("eh_proj", "layers.0.mlp.down_proj"),
            ("enorm", "layers.1.input_layernorm"),
            ("hnorm", "layers.2.input_layernorm"),
            ("shared_head.norm", "layers.1.post_attention_layernorm"),
        ];
        let parts = parts.map(|(part, like)| (format!("{part}.weight"), format!("{like}.weight")));
        for (part, like) in parts {
            let (_, shape, bytes) = &source[&format!("model.{like}")];
            put(
                &mut all,
                &format!("model.layers.6.{part}"),
                shape,
                bytes,
                As::F32,
            );
        }
        for (name, (dtype, shape, bytes)) in &source {
            let Some(rest) = name.strip_prefix("model.layers.2.") else {
                continue;
            };
            let name = format!("model.layers.6.{rest}");
            if *dtype == Dtype::F32 {
                all.insert(name, (*dtype, shape.clone(), bytes.clone()));
            } else if rest.starts_with("mlp.experts.") {
                put(&mut all, &name, shape, bytes, As::Int8Row);
            } else {
                put(&mut all, &name, shape, bytes, As::F32);
            }
        }
        let dir = container(&all, None);
        let file = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        config["num_nextn_predict_layers"] = 1.into();
        fs::write(&file, config.to_string()).unwrap();
        dir
    };
    let dir = with_drafts(As::Int4(usize::MAX));
    let want = run(dir.path(), &[]);
    assert!(run(dir.path(), &["--speculate", "2"]) == want);
    host(&["pack"], dir.path())
        .assert()
        .success()
        .stderr(contains("96 experts"));
    for tier in ["raw", "ans"] {
        assert!(run(dir.path(), &["--tier", tier]) == want);
        assert!(run(dir.path(), &["--tier", tier, "--speculate", "2"]) == want);
    }
    let doctor = host(&["doctor", "--deep"], dir.path()).assert().success();
    doctor.stdout(contains("drafts   layer 6"));
    // On a device, all in its memory and in tiers: int8 experts stay there.
    let emulator = |args: &[&str]| {
        let mut command = host(&["generate", "--device", "emulator", "--json"], dir.path());
        command.args(["--prompt-ids", "191,80,91,337", "-n", "6", "--temp", "0"]);
        let stdout = command
            .args(args)
            .assert()
            .success()
            .get_output()
            .stdout
            .clone();
        let object: Value = serde_json::from_slice(&stdout).unwrap();
        object["token_ids"].clone()
    };
    let plain = emulator(&[]);
    assert_eq!(emulator(&["--speculate", "2"]), plain);
    let args = ["plan", "--device", "emulator", "-c", "10", "--json"];
    let plan = host(&args, dir.path()).assert().success();
    let plan: Value = serde_json::from_slice(&plan.get_output().stdout).unwrap();
    // Two tokens of a model this small may take no longer than one: then drafts need no acceptance.
    assert!(
        plan["speculation"]["break_even"]
            .as_f64()
            .is_some_and(f64::is_finite)
    );
    assert!(plan["rates_s"]["dense_two"].as_f64().unwrap() > 0.0);
    let fixed = plan["fixed"].as_array().unwrap().iter();
    let fixed: u64 = fixed.map(|f| f["vram_bytes"].as_u64().unwrap()).sum();
    // Room for less than the experts of all layers, and for those of the layer that drafts.
    for (room, more) in [(1 << 20, &[][..]), (8 << 20, &["--speculate"])] {
        let vram = (fixed + room).to_string();
        let placed = ["--ram-budget", "200K", "--vram-budget", &vram];
        assert_eq!(emulator(&[&placed, more].concat()), plain);
    }
    // Beside grouped experts they are left out, which is said.
    let dir = with_drafts(As::Int4(64));
    let packed = host(&["pack"], dir.path()).assert().success();
    packed.stderr(contains("without the layer that drafts"));
    run(dir.path(), &[]);
    let refused = generate(dir.path());
    { refused }
        .arg("--speculate")
        .assert()
        .code(1)
        .stderr(contains("experts.ansx"));
}

/// One line that names the fault, whatever the command, and nothing on stdout.
fn refused(dir: &Path, commands: &[&[&str]], says: &[&str]) {
    for args in commands {
        let mut command = host(args, dir);
        if args[0] == "generate" {
            command.args(["--device", "cpu", "--prompt-ids", "5,6,7", "-n", "1"]);
        }
        let mut assert = command.assert().code(1);
        if args[0] == "doctor" {
            let line = |s: &str| {
                let mut lines = s.lines().filter(|l| l.starts_with("error: "));
                lines.next().map(String::from)
            };
            let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
            let line = line(&stderr).expect("an error");
            for text in says {
                assert!(line.contains(text), "{args:?}: {text:?} not in {line}");
            }
            continue;
        }
        assert = assert.stdout(is_empty());
        // Notes may come before it.
        let one = predicate::function(|s: &str| {
            let errors = s.lines().filter(|l| l.starts_with("error: ")).count();
            errors == 1 && s.lines().last().is_some_and(|l| l.starts_with("error: "))
        });
        assert = assert.stderr(one);
        for text in says {
            assert = assert.stderr(contains(*text));
        }
    }
    assert!(!dir.join("experts.ansx").exists());
}

const ALL: &[&[&str]] = &[&["generate"], &["pack"], &["doctor", "--deep"]];
const DENSE: &[&[&str]] = &[&["generate"], &["doctor"]];

fn good() -> Tensors {
    tensors(As::Int4(usize::MAX), As::Int8Row)
}

fn up() -> String {
    expert_tensor(4, 7, MatrixKind::Up)
}

#[test]
fn faults_of_tensors_are_named() {
    let bad = |commands: &[&[&str]], change: &dyn Fn(&mut Tensors), says: &[&str]| {
        let mut tensors = good();
        change(&mut tensors);
        refused(container(&tensors, None).path(), commands, says);
    };
    let (name, scales) = (up(), up() + ".qs");
    let at = |t: &mut Tensors, name: &str| t.remove(name).unwrap();
    let set = |t: &mut Tensors, name: &str, i: usize, x: f32| {
        t.get_mut(name).unwrap().2[4 * i..4 * i + 4].copy_from_slice(&x.to_le_bytes());
    };
    bad(ALL, &|t| drop(at(t, &name)), &[&name, "no such tensor"]);
    bad(ALL, &|t| drop(at(t, &scales)), &[&name, "its scales"]);
    let cut = |t: &mut Tensors, name: &str, bytes: usize, n: usize| {
        let t = t.get_mut(name).unwrap();
        t.2.truncate(bytes);
        t.1 = vec![n];
    };
    bad(
        ALL,
        &|t| cut(t, &scales, 4 * 63, 63),
        &[&name, "63 scales", "for 64 x 128 weights"],
    );
    bad(
        ALL,
        &|t| cut(t, &name, 4000, 4000),
        &[&name, "4000 bytes and 64 scales"],
    );
    for (x, what) in [
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (-1.0, "found -1"),
    ] {
        let says = ["up_proj.weight.qs[5]", "a finite scale", what];
        bad(ALL, &|t| set(t, &scales, 5, x), &says);
        bad(&[&["doctor"]], &|t| set(t, &scales, 5, x), &says);
    }
    let half = |t: &mut Tensors| {
        let t = t.get_mut(&scales).unwrap();
        t.2.truncate(128);
        t.0 = Dtype::F16;
    };
    bad(ALL, &half, &[&scales, "expected F32, found F16"]);
    let int8 = |t: &mut Tensors| {
        let (_, shape, bytes) = &checkpoint()[&name];
        put(t, &name, shape, bytes, As::Int8Row);
    };
    let beside_groups = |t: &mut Tensors| {
        *t = tensors(As::Int4(64), As::Int8Row);
        int8(t);
    };
    let says = ["experts of layer 4", "found int8-row", "beside grouped"];
    bad(ALL, &beside_groups, &says);
    let g32 = |t: &mut Tensors| {
        let (_, shape, bytes) = &checkpoint()[&name];
        put(t, &name, shape, bytes, As::Int4(32));
    };
    bad(ALL, &g32, &[&name, "found int4-grouped (32 columns)"]);

    let indexer = "model.layers.2.self_attn.indexer.wk.weight";
    bad(
        DENSE,
        &|t| {
            at(t, indexer);
            at(t, &format!("{indexer}.qs"));
        },
        &[indexer, "no such tensor"],
    );
    let o = "model.layers.3.self_attn.o_proj.weight";
    bad(
        DENSE,
        &|t| set(t, &format!("{o}.qs"), 0, f32::NAN),
        &[&format!("{o}.qs[0]"), "a finite scale"],
    );
    bad(
        DENSE,
        &|t| t.get_mut("model.norm.weight").unwrap().0 = Dtype::I32,
        &["model.norm.weight", "I32"],
    );
    bad(
        DENSE,
        &|t| {
            cut(t, "model.norm.weight", 4 * 64, 64);
        },
        &["model.norm.weight", "shape [128]", "[64]"],
    );
}

#[test]
fn stamps_must_agree() {
    let says = |stamps: Value, commands: &[&[&str]], says: &[&str]| {
        refused(container(&good(), Some(stamps)).path(), commands, says);
    };
    let name = up();
    says(
        json!({ &name: "int8-row" }),
        ALL,
        &[&name, "int8-row, as its stamp", "which is int4-row"],
    );
    says(
        json!({ &name: "int9-row" }),
        ALL,
        &[&name, "int9-row, as its stamp"],
    );
    says(
        json!({ &name: "int4-rans256-g0" }),
        ALL,
        &[&name, "int4-rans256-g0, which is not supported"],
    );
    says(json!({ &name: 4 }), ALL, &["out-00000", "colibri.fmt"]);
    says(json!("int4-row"), ALL, &["out-00000", "colibri.fmt"]);
    says(
        json!({ "model.norm.weight": "int4-row" }),
        DENSE,
        &["model.norm.weight", "as its stamp"],
    );

    says(
        json!({ "model.norm.weight": "bf16" }),
        DENSE,
        &["model.norm.weight", "bf16, as its stamp", "F32"],
    );

    let right = json!({ &name: "int4-row", "model.norm.weight": "f32", "model.layers.0.mlp.up_proj.weight": "int8-row" });
    let dir = container(&good(), Some(right));
    run(dir.path(), &[]);
    // Another shard that says otherwise.
    let file = shard(dir.path(), 1);
    let bytes = fs::read(&file).unwrap();
    let whole = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Tensors = whole
        .tensors()
        .into_iter()
        .map(|(n, t)| (n, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect();
    let other = json!({ &name: "int4-grouped" }).to_string();
    write(
        &file,
        &tensors,
        Some(HashMap::from([("colibri.fmt".into(), other)])),
    );
    refused(
        dir.path(),
        ALL,
        &["another file's colibri.fmt", "int4-grouped"],
    );
}

/// A safetensors file of this header and so many zero bytes.
fn file_of(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn damaged_files_are_named() {
    let tensors = good();
    let whole = container(&tensors, None);
    let bad = |change: &dyn Fn(&Path), says: &[&str]| {
        let dir = container(&tensors, None);
        change(dir.path());
        refused(dir.path(), ALL, says);
    };
    let bytes = fs::read(shard(whole.path(), 1)).unwrap();
    let with = |bytes: &[u8]| {
        let bytes = bytes.to_vec();
        move |dir: &Path| fs::write(shard(dir, 1), &bytes).unwrap()
    };
    let n = bytes.len();
    bad(
        &with(&bytes[..n - 1]),
        &["out-00001", "a whole safetensors file", "found"],
    );
    bad(&with(&[&bytes[..], b"x"].concat()), &["out-00001", "whole"]);
    bad(&with(&bytes[..100]), &["out-00001", "whole"]);
    bad(&with(b""), &["out-00001"]);
    bad(&with(b"not a model"), &["out-00001"]);
    bad(
        &|dir| fs::remove_file(shard(dir, 1)).unwrap(),
        &["no such tensor", "out-00001.safetensors is missing"],
    );
    let mut long = bytes.clone();
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    bad(&with(&long), &["out-00001", "a header of"]);
    long[..8].copy_from_slice(&(n as u64).to_le_bytes());
    bad(&with(&long), &["out-00001", "a header of"]);

    for (header, data, says) in [
        (
            r#"{"a":{"dtype":"Q7","shape":[4],"data_offsets":[0,4]}}"#,
            4,
            "a: expected a type",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            4,
            "a: expected each tensor once",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
            0,
            "a: expected a shape",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}"#,
            4,
            "of 40000000000",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#,
            4,
            "a: expected 4 bytes",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            6,
            "b: expected data from byte 4 on",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#,
            4,
            "a: expected dtype, shape",
        ),
        (r#"{"a":[1,2]}"#, 0, "a: expected dtype, shape"),
        (r#"[]"#, 0, "header: expected the JSON"),
        (r#"{"a""#, 0, "header: expected the JSON"),
    ] {
        bad(&with(&file_of(header, data)), &["out-00001", says]);
    }
    // A shard twice.
    bad(
        &|dir| fs::write(shard(dir, 3), &bytes).unwrap(),
        &["out-00003", "each tensor once", "it is in"],
    );
}

/// Weights that are no numbers: `doctor --deep` says where; an answer ends with an error, before
/// anything of it is written.
#[test]
fn logits_that_are_no_numbers_end_the_answer() {
    let mut tensors = good();
    let norm = &mut tensors.get_mut("model.norm.weight").unwrap().2;
    norm[4 * 7..4 * 8].copy_from_slice(&f32::NAN.to_le_bytes());
    let dir = container(&tensors, None);
    let ids = dir.path().join("ids.u16");
    fs::write(&ids, [1, 0, 2, 0, 3, 0]).unwrap();
    let file = ids.to_str().unwrap();
    let args: [&[&str]; 2] = [
        &["generate"],
        &["eval", "--device", "cpu", "--context", "2", "--ids", file],
    ];
    refused(
        dir.path(),
        &args,
        &["the logit of token 0 at position", "is NaN"],
    );
    refused(
        dir.path(),
        &[&["doctor", "--deep"]],
        &["model.norm.weight[7]", "a finite weight"],
    );
}

/// Bytes of private memory at the end of a run.
fn used(dir: &Path, args: &[&str]) -> u64 {
    let mut command = generate(dir);
    let stdout = command.args(args).arg("--json").assert().success();
    let stdout = stdout.get_output().stdout.clone();
    let object: Value = serde_json::from_slice(&stdout).unwrap();
    object["memory_bytes"].as_u64().unwrap()
}

/// What doctor projects is what a run then takes, over what a run of a small model takes.
#[cfg(target_os = "linux")]
#[test]
fn projections_hold() {
    // Without its tokenizer, which takes its own.
    let whole = host::model::default_directory().expect("models/sotu-row of the repository");
    let sotu = tempfile::tempdir().unwrap();
    for name in ["config.json", "dense.safetensors", "experts.ansx"] {
        fs::copy(whole.join(name), sotu.path().join(name)).unwrap();
    }
    let sotu = sotu.path();
    let tiny = container(&good(), None);
    for tier in ["raw", "ans"] {
        let facts = |dir: &Path| -> Value {
            let mut command = host(&["doctor", "--json"], dir);
            let stdout = command.assert().success().get_output().stdout.clone();
            serde_json::from_slice::<Value>(&stdout).unwrap()["model"].clone()
        };
        let bytes = |dir: &Path, experts: &str| -> u64 {
            let facts = facts(dir);
            ["dense_bytes", experts]
                .map(|f| facts[f].as_u64().unwrap())
                .iter()
                .sum()
        };
        let experts = if tier == "raw" {
            "expert_raw_bytes"
        } else {
            "expert_bytes"
        };
        let projected = bytes(sotu, experts) - bytes(tiny.path(), "expert_bytes");
        let taken = used(sotu, &["--tier", tier]) - used(tiny.path(), &[]);
        eprintln!("{tier}: {projected} projected, {taken} taken");
        // The allocator of so small a process keeps the buffer that its largest tensor, the
        // embedding table, went through.
        let staged = 2 * 4096 * 256;
        let within = projected / 10;
        assert!(
            projected < taken + within && taken < projected + within + staged,
            "{projected} projected, {taken} taken"
        );
    }
}

#[test]
fn other_directories_are_named() {
    // A checkpoint that was not converted.
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        let from = support::data().join("tiny-dsa-hf").join(name);
        fs::write(dir.path().join(name), fs::read(from).unwrap()).unwrap();
    }
    refused(dir.path(), ALL, &["host convert"]);
    // A pipe, which would be waited for.
    let dir = container(&good(), None);
    let pipe = support::pipe(dir.path());
    fs::rename(pipe, shard(dir.path(), 9)).unwrap();
    refused(dir.path(), ALL, &["out-00009", "not a file"]);
    // A config of another model.
    let dir = container(&good(), None);
    let file = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["hidden_size"] = 192.into();
    fs::write(&file, config.to_string()).unwrap();
    refused(dir.path(), ALL, &["model.layers", "x 192 weights"]);
    // The archive of other weights.
    let dir = container(&good(), None);
    let mut other = good();
    for (name, t) in &mut other {
        if name.contains("experts.0.") && !name.ends_with(".qs") {
            t.2[17] ^= 1;
        }
    }
    let theirs = container(&other, None);
    host(&["pack"], theirs.path()).assert().success();
    let archive = fs::read(theirs.path().join("experts.ansx")).unwrap();
    let place = dir.path().join("experts.ansx");
    fs::write(&place, archive).unwrap();
    generate(dir.path())
        .assert()
        .code(1)
        .stdout(is_empty())
        .stderr(contains("archive of another model"));
    host(&["verify", place.to_str().unwrap()], dir.path())
        .assert()
        .code(1)
        .stderr(contains("archive is of another model"));
}
