//! `host convert`: the int4 rule, forms of checkpoints, and that nothing half-made stays.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use host::backend::cpu::Cpu;
use host::convert::{DenseFormat, Options, convert};
use host::expert::{Form, MatrixKind, ScaleKind};
use host::model::directory::{RawExperts, expert_tensor};
use host::model::format::e4m3;
use host::model::{Config, Model, Source, Wanted};
use host::sample::greedy;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read(file: &Path) -> Tensors {
    let bytes = fs::read(file).unwrap();
    SafeTensors::deserialize(&bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

fn write(file: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, file).unwrap();
}

fn checkpoint() -> Tensors {
    read(&support::data().join("tiny-dsa-hf/model.safetensors"))
}

fn row() -> Options {
    Options::new(ScaleKind::Row)
}

fn forced() -> Options {
    Options {
        force: true,
        ..row()
    }
}

/// A checkpoint directory with tiny-dsa's configuration.
fn with_config() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = support::data().join("tiny-dsa-hf/config.json");
    fs::copy(config, dir.path().join("config.json")).unwrap();
    dir
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn widen(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks(2)
        .map(|b| f32::from_bits((u16::from_le_bytes([b[0], b[1]]) as u32) << 16))
        .collect()
}

#[test]
fn experts_follow_the_rule_and_the_rest_is_verbatim() {
    let source = checkpoint();
    for (scales, span) in [(ScaleKind::Row, None), (ScaleKind::G64, Some(64))] {
        let made = support::converted("tiny-dsa", scales).unwrap();
        let dir = made.path().join("model");
        let config = Config::read(&dir).unwrap();
        let experts = RawExperts::open(&dir, &config).unwrap();
        let mut seen = 0;
        for layer in config.sparse_layers() {
            for e in 0..config.router.experts {
                for kind in MatrixKind::ALL {
                    let (_, shape, bytes) = &source[&expert_tensor(layer, e, kind)];
                    let w = widen(bytes);
                    let m = experts.matrix(layer, e, kind).unwrap();
                    let span = span.unwrap_or(shape[1]);
                    for (g, group) in w.chunks(span).enumerate() {
                        let amax = group.iter().fold(0.0f32, |m, w| m.max(w.abs()));
                        let s = (amax / 7.0).max(1e-8);
                        assert_eq!(m.scales[g], s);
                        for (i, w) in group.iter().enumerate() {
                            let at = g * span + i;
                            let q = (m.packed[at / 2] >> (4 * (at % 2)) & 15) as i32 - 8;
                            let want = (w / s).round_ties_even().clamp(-8.0, 7.0);
                            assert_eq!(q, want as i32);
                        }
                    }
                    seen += 1;
                }
            }
        }
        assert_eq!(seen, 4 * 16 * 3);
        let dense = read(&dir.join("dense.safetensors"));
        let want: Tensors = source
            .iter()
            .filter(|(name, _)| !name.contains(".mlp.experts."))
            .map(|(n, t)| (n.clone(), t.clone()))
            .collect();
        assert_eq!(dense, want);
        let config = |d: &Path| fs::read(d.join("config.json")).unwrap();
        assert_eq!(config(&dir), config(&support::data().join("tiny-dsa-hf")));
    }
}

/// The experts of a layer as transformers' modules hold them.
fn fuse(tensors: &mut Tensors, layer: usize) {
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for e in 0..16 {
        for kind in MatrixKind::ALL {
            let (_, _, bytes) = tensors.remove(&expert_tensor(layer, e, kind)).unwrap();
            match kind {
                MatrixKind::Down => down.extend(bytes),
                _ => gate_up.extend(bytes),
            }
        }
    }
    let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
    tensors.insert(
        name("gate_up_proj"),
        (Dtype::BF16, vec![16, 128, 128], gate_up),
    );
    tensors.insert(name("down_proj"), (Dtype::BF16, vec![16, 128, 64], down));
}

#[test]
fn fused_sharded_and_f32_checkpoints_give_the_same_experts() {
    let plain = support::converted("tiny-dsa", ScaleKind::Row).unwrap();
    let want = read(&plain.path().join("model/experts.safetensors"));

    let from = with_config();
    let mut tensors = checkpoint();
    fuse(&mut tensors, 3);
    fuse(&mut tensors, 5);
    // Layer 4 in f32; a layer past the last one as multi-token prediction has it.
    for (name, (dtype, _, bytes)) in &mut tensors {
        if name.starts_with("model.layers.4.mlp.experts.") {
            *bytes = widen(bytes).iter().flat_map(|x| x.to_le_bytes()).collect();
            *dtype = Dtype::F32;
        }
    }
    let extra = tensors["model.norm.weight"].clone();
    tensors.insert("model.layers.6.enorm.weight".into(), extra);
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut map = serde_json::Map::new();
    for (i, (name, t)) in tensors.into_iter().enumerate() {
        map.insert(name.clone(), format!("part-{}.safetensors", i % 2).into());
        shards[i % 2].insert(name, t);
    }
    for (i, shard) in shards.iter().enumerate() {
        write(&from.path().join(format!("part-{i}.safetensors")), shard);
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    let index_file = from.path().join("model.safetensors.index.json");
    fs::write(&index_file, index.to_string()).unwrap();

    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("m");
    let summary = convert(from.path(), &to, &row(), |_, _| ()).unwrap();
    assert_eq!(read(&to.join("experts.safetensors")), want);
    assert_eq!((summary.experts, summary.left_out), (64, 1));
    assert!(!read(&to.join("dense.safetensors")).contains_key("model.layers.6.enorm.weight"));

    // A shard that the index names and that lacks a tensor.
    let missing = shards[1].keys().next().unwrap().clone();
    shards[1].remove(&missing);
    write(&from.path().join("part-1.safetensors"), &shards[1]);
    let e = convert(from.path(), &out.path().join("n"), &row(), |_, _| ());
    let e = e.unwrap_err().to_string();
    assert!(e.contains(&missing) && e.contains("index.json"), "{e}");
    assert_eq!(entries(out.path()), ["m"]);
}

#[test]
fn a_taken_target_needs_force() {
    let from = support::data().join("tiny-dsa-hf");
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("m");
    fs::create_dir(&to).unwrap();
    fs::write(to.join("notes"), "mine").unwrap();
    let e = convert(&from, &to, &row(), |_, _| ()).unwrap_err();
    assert!(e.to_string().contains("--force"), "{e}");
    // Not even then where it is no model directory.
    let e = convert(&from, &to, &forced(), |_, _| ()).unwrap_err();
    assert!(
        e.to_string().contains("a model directory to replace"),
        "{e}"
    );
    assert_eq!(fs::read(to.join("notes")).unwrap(), b"mine");
    fs::write(to.join("dense.safetensors"), "old").unwrap();
    convert(&from, &to, &forced(), |_, _| ()).unwrap();
    let want = [
        "config.json",
        "dense.safetensors",
        "experts.safetensors",
        "generation_config.json",
    ];
    assert_eq!(entries(&to), want);
    assert_eq!(entries(out.path()), ["m"]);
}

#[test]
fn the_checkpoint_is_never_replaced() {
    let out = tempfile::tempdir().unwrap();
    let from = out.path().join("hf");
    fs::create_dir(&from).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        let of = support::data().join("tiny-dsa-hf").join(name);
        fs::write(from.join(name), fs::read(of).unwrap()).unwrap();
    }
    // Both look like model directories.
    fs::write(from.join("dense.safetensors"), "").unwrap();
    fs::write(out.path().join("dense.safetensors"), "").unwrap();
    for to in [&from, out.path(), &from.join("../hf")] {
        let e = convert(&from, to, &forced(), |_, _| ()).unwrap_err();
        assert!(e.to_string().contains("without the checkpoint"), "{e}");
        assert!(from.join("model.safetensors").is_file());
    }
    assert_eq!(entries(out.path()), ["dense.safetensors", "hf"]);
    let e = convert(&out.path().join("none"), &from, &forced(), |_, _| ());
    let e = e.unwrap_err().to_string();
    assert!(
        e.contains("no such directory") && e.contains("--from"),
        "{e}"
    );
}

#[test]
fn bad_checkpoints_leave_nothing_behind() {
    let bad = |change: &dyn Fn(&mut Tensors), says: &str| {
        let from = with_config();
        let mut tensors = checkpoint();
        change(&mut tensors);
        write(&from.path().join("model.safetensors"), &tensors);
        let out = tempfile::tempdir().unwrap();
        let e = convert(from.path(), &out.path().join("m"), &row(), |_, _| ());
        let e = e.unwrap_err().to_string();
        assert!(e.contains(says), "{says}: {e}");
        assert!(entries(out.path()).is_empty());
    };
    let name = expert_tensor(4, 7, MatrixKind::Up);
    bad(
        &|t| t.get_mut(&name).unwrap().2[2001 * 2..2001 * 2 + 2].copy_from_slice(&[0x80, 0x7f]),
        "up_proj.weight[2001]: expected a finite weight",
    );
    let dense = "model.layers.0.self_attn.q_a_proj.weight";
    bad(
        &|t| t.get_mut(dense).unwrap().2[77 * 2..77 * 2 + 2].copy_from_slice(&[0x80, 0xff]),
        "q_a_proj.weight[77]: expected a finite weight, found -inf",
    );
    bad(&|t| drop(t.remove(&name)), "no such tensor");
    bad(
        &|t| t.get_mut(&name).unwrap().1 = vec![128, 64],
        "expected shape [64, 128], found [128, 64]",
    );
    bad(
        &|t| t.get_mut(&name).unwrap().0 = Dtype::F16,
        "expected BF16 or F32, or F8_E4M3 with scales of 128 x 128 blocks, found F16",
    );
    bad(
        &|t| t.get_mut("model.norm.weight").unwrap().0 = Dtype::I16,
        "model.norm.weight: expected BF16 or F32",
    );
    // Cut short.
    let from = with_config();
    let whole = fs::read(support::data().join("tiny-dsa-hf/model.safetensors")).unwrap();
    let cut = &whole[..whole.len() - 1];
    fs::write(from.path().join("model.safetensors"), cut).unwrap();
    let out = tempfile::tempdir().unwrap();
    let e = convert(from.path(), &out.path().join("m"), &row(), |_, _| ());
    assert!(
        e.unwrap_err()
            .to_string()
            .contains("whole safetensors file")
    );
    assert!(entries(out.path()).is_empty());
}

/// A large checkpoint of zeros takes no room on the disk and long enough to be interrupted.
#[cfg(unix)]
#[test]
fn ctrl_c_leaves_what_resume_goes_on_with() {
    use std::io::Write;
    let from = tempfile::tempdir().unwrap();
    // tiny-dsa with experts as wide as can be.
    let (narrow, wide) = (64, 8192);
    let config = fs::read_to_string(support::data().join("tiny-dsa-hf/config.json")).unwrap();
    let (old, new) = (
        format!("\"moe_intermediate_size\": {narrow}"),
        format!("\"moe_intermediate_size\": {wide}"),
    );
    assert!(config.contains(&old));
    fs::write(from.path().join("config.json"), config.replace(&old, &new)).unwrap();
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, (dtype, mut shape, _)) in checkpoint() {
        if name.contains("experts") {
            for n in &mut shape {
                *n = if *n == narrow { wide } else { *n };
            }
        }
        let size = dtype.bitsize() / 8 * shape.iter().product::<usize>();
        let offsets = [at, at + size];
        header.insert(
            name,
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
        );
        at += size;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = fs::File::create(from.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + at as u64).unwrap();
    drop(file);

    let out = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["convert", "--from"])
        .arg(from.path())
        .arg("--to")
        .arg(out.path().join("m"))
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // As soon as experts are being written.
    let growing = || {
        entries(out.path()).iter().any(|d| {
            let file = out.path().join(d).join("experts.safetensors");
            fs::metadata(file).is_ok_and(|m| m.len() > 1 << 20)
        })
    };
    while !growing() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "ended before the signal"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let done = child.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(
        stderr.contains("interrupted") && stderr.contains("--resume"),
        "{stderr}"
    );
    assert_eq!(entries(out.path()), [".m.partial"]);
    let partial = out.path().join(".m.partial");
    let begun = fs::metadata(partial.join("progress")).map_or(0, |m| m.len());

    // Of other options it is not.
    let convert = |name: &str, args: &str| {
        // Private memory, in KiB: two experts a thread and what threads themselves take, not the
        // 400 MB that the checkpoint has.
        let limited =
            format!("ulimit -d 150000 && exec \"$0\" convert {args} --from \"$1\" --to \"$2\"");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &limited, env!("CARGO_BIN_EXE_host")]);
        let to = out.path().join(name);
        command.arg(from.path()).arg(to).output().unwrap()
    };
    let other = convert("m", "--resume --experts int4-g64");
    let stderr = String::from_utf8_lossy(&other.stderr);
    assert!(
        !other.status.success() && stderr.contains("identity: expected"),
        "{stderr}"
    );
    let resumed = convert("m", "--resume");
    let stderr = String::from_utf8_lossy(&resumed.stderr);
    assert!(resumed.status.success(), "{stderr}");
    let whole = convert("whole", "");
    let stderr = String::from_utf8_lossy(&whole.stderr);
    assert!(whole.status.success(), "{stderr}");
    assert_eq!(entries(out.path()), ["m", "whole"]);
    let files = entries(&out.path().join("whole"));
    assert_eq!(entries(&out.path().join("m")), files);
    for file in files {
        let read = |dir: &str| fs::read(out.path().join(dir).join(&file)).unwrap();
        assert!(read("m") == read("whole"), "{file}");
    }
    eprintln!("interrupted after {} experts", begun / 16);
}

/// The nearest e4m3 number, of two as near the one whose last bit is 0.
fn to_e4m3(x: f32) -> u8 {
    let m = x.abs();
    let best = (0..0x7fu8)
        .min_by(|a, b| {
            let d = |c: u8| (e4m3(c) as f64 - m as f64).abs();
            d(*a).total_cmp(&d(*b)).then((a % 2).cmp(&(b % 2)))
        })
        .unwrap();
    best | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// tiny-dsa in fp8, as `tools/oracle.py fp8` makes it.
fn fp8_checkpoint() -> Tensors {
    to_fp8(checkpoint())
}

fn to_fp8(tensors: Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (name, (dtype, shape, bytes)) in tensors {
        let kept = [
            "norm",
            "mlp.gate.",
            "weights_proj",
            "bias",
            "embed",
            "lm_head",
        ];
        if shape.len() != 2 || kept.iter().any(|k| name.contains(k)) {
            out.insert(name, (dtype, shape, bytes));
            continue;
        }
        let (w, rows, cols) = (widen(&bytes), shape[0], shape[1]);
        let across = cols.div_ceil(128);
        let block = |i: usize| i / cols / 128 * across + i % cols / 128;
        let mut amax = vec![0.0f32; rows.div_ceil(128) * across];
        for (i, w) in w.iter().enumerate() {
            amax[block(i)] = amax[block(i)].max(w.abs());
        }
        let scales: Vec<f32> = amax.iter().map(|a| a / 448.0).collect();
        let values = w.iter().enumerate();
        let bytes = values.map(|(i, w)| to_e4m3(w / scales[block(i)])).collect();
        let le = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let dims = vec![rows.div_ceil(128), across];
        out.insert(format!("{name}_scale_inv"), (Dtype::F32, dims, le));
        out.insert(name, (Dtype::F8_E4M3, shape, bytes));
    }
    out
}

/// Logits and greedy tokens are those of an oracle.
fn matches(dir: &Path, oracle: &str) {
    let config = Config::read(dir).unwrap();
    let source = Source::open(dir, &config, None).unwrap();
    let cpu = Cpu::new().unwrap();
    let model = Model::load(cpu, dir, config, &source, Form::Fused, |_| ()).unwrap();
    for case in support::oracle_file(oracle).cases {
        let n = case.input_ids.len();
        let mut session = model.session(n + case.greedy.len(), Wanted::Last).unwrap();
        let run = |session: &mut _, ids: &[u32]| model.forward(session, ids, Wanted::Last).unwrap();
        let mut logits = run(&mut session, &case.input_ids);
        let d = support::deviation(&logits, &case.last_logits);
        eprintln!("{oracle}, {n} tokens: rms {d:.2e}");
        assert!(d < 1e-3, "{oracle}, {n} tokens: {d:e}");
        for (token, margin) in case.greedy.iter().zip(&case.greedy_margin) {
            assert_eq!(greedy(&logits), *token, "{oracle}, {n} tokens: {margin}");
            logits = run(&mut session, &[*token]);
        }
    }
}

/// Experts in fp8 as transformers' modules hold them, `[experts, rows, cols]`, give the bytes that
/// experts of their own give.
#[test]
fn fused_fp8_experts() {
    let mut tensors = checkpoint();
    // Twice as wide: 128 rows, as many as a block has.
    for (name, (_, shape, bytes)) in &mut tensors {
        if !name.contains(".mlp.experts.") && !name.contains(".mlp.shared_experts.") {
            continue;
        }
        if name.contains("down_proj") {
            *bytes = bytes
                .chunks(2 * shape[1])
                .flat_map(|row| row.repeat(2))
                .collect();
            shape[1] *= 2;
        } else {
            *bytes = bytes.repeat(2);
            shape[0] *= 2;
        }
    }
    let own = to_fp8(tensors);
    let mut fused = own.clone();
    for layer in 2..6 {
        let mut parts: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for e in 0..16 {
            for kind in MatrixKind::ALL {
                for suffix in ["", "_scale_inv"] {
                    let name = expert_tensor(layer, e, kind) + suffix;
                    let (_, _, bytes) = fused.remove(&name).unwrap();
                    let part = match kind {
                        MatrixKind::Down => "down_proj",
                        _ => "gate_up_proj",
                    };
                    let of = format!("model.layers.{layer}.mlp.experts.{part}{suffix}");
                    parts.entry(of).or_default().extend(bytes);
                }
            }
        }
        for (name, bytes) in parts {
            let halves = if name.contains("gate_up") { 2 } else { 1 };
            let tensor = if name.ends_with("_scale_inv") {
                (Dtype::F32, vec![16, halves, 1], bytes)
            } else {
                (Dtype::F8_E4M3, vec![16, 128 * halves, 128], bytes)
            };
            fused.insert(name, tensor);
        }
    }
    let from = with_config();
    let file = from.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["quantization_config"] = serde_json::json!({
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
    });
    config["moe_intermediate_size"] = 128.into();
    fs::write(&file, config.to_string()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let made = |tensors: &Tensors, name: &str| {
        write(&from.path().join("model.safetensors"), tensors);
        let to = out.path().join(name);
        convert(from.path(), &to, &row(), |_, _| ()).unwrap();
        ["experts.safetensors", "dense.safetensors"].map(|f| fs::read(to.join(f)).unwrap())
    };
    assert!(made(&own, "own") == made(&fused, "fused"));
    // Scales of another shape, and blocks that gate and up would share.
    let bad = |tensors: &Tensors, says: &[&str]| {
        write(&from.path().join("model.safetensors"), tensors);
        let e = convert(from.path(), &out.path().join("n"), &row(), |_, _| ());
        let e = e.unwrap_err().to_string();
        assert!(says.iter().all(|s| e.contains(s)), "{says:?}: {e}");
    };
    let name = "model.layers.3.mlp.experts.gate_up_proj";
    let mut wrong = fused.clone();
    wrong.get_mut(&format!("{name}_scale_inv")).unwrap().1 = vec![32, 1, 1];
    bad(&wrong, &["gate_up_proj_scale_inv", "[16, 2, 1]"]);
    config["moe_intermediate_size"] = 64.into();
    fs::write(&file, config.to_string()).unwrap();
    let mut narrow = to_fp8(checkpoint());
    for e in 0..16 {
        for kind in MatrixKind::ALL {
            for suffix in ["", "_scale_inv"] {
                narrow.remove(&(expert_tensor(3, e, kind) + suffix));
            }
        }
    }
    let put = |t: &mut Tensors, part: &str, shape: Vec<usize>| {
        let bytes = vec![0; shape.iter().product()];
        t.insert(
            format!("model.layers.3.mlp.experts.{part}"),
            (Dtype::F8_E4M3, shape, bytes),
        );
        let scales = 1f32.to_le_bytes().repeat(16);
        let scale = format!("model.layers.3.mlp.experts.{part}_scale_inv");
        t.insert(scale, (Dtype::F32, vec![16, 1, 1], scales));
    };
    put(&mut narrow, "gate_up_proj", vec![16, 128, 128]);
    put(&mut narrow, "down_proj", vec![16, 128, 64]);
    bad(&narrow, &[name, "a multiple of 128 rows"]);
}

#[test]
fn fp8_checkpoints_give_the_tokens_of_transformers() {
    let from = with_config();
    let file = from.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["quantization_config"] = serde_json::json!({
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
    });
    fs::write(&file, config.to_string()).unwrap();
    let tensors = fp8_checkpoint();
    let model = from.path().join("model.safetensors");
    write(&model, &tensors);
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("m");
    convert(from.path(), &to, &row(), |_, _| ()).unwrap();
    matches(&to, "tiny-dsa-fp8-row");
    let dense = read(&to.join("dense.safetensors"));
    assert!(dense.values().all(|t| t.0 != Dtype::F8_E4M3));
    assert!(!dense.keys().any(|n| n.ends_with("_scale_inv")));

    let bad = |change: &dyn Fn(&mut Tensors), says: &[&str]| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        write(&model, &tensors);
        let e = convert(from.path(), &out.path().join("n"), &row(), |_, _| ());
        let e = e.unwrap_err().to_string();
        assert!(says.iter().all(|s| e.contains(s)), "{says:?}: {e}");
        assert_eq!(entries(out.path()), ["m"]);
    };
    let expert = expert_tensor(4, 7, MatrixKind::Up);
    let scales = format!("{expert}_scale_inv");
    let o = "model.layers.3.self_attn.o_proj.weight";
    bad(&|t| drop(t.remove(&scales)), &[&scales, "no such tensor"]);
    bad(
        &|t| t.get_mut(&scales).unwrap().1 = vec![1],
        &[&scales, "expected shape [1, 1], found [1]"],
    );
    bad(
        &|t| t.get_mut(&expert).unwrap().2[77] = 0x7f,
        &["up_proj.weight[77]", "a finite weight"],
    );
    bad(
        &|t| t.get_mut(o).unwrap().2[78] = 0xff,
        &["o_proj.weight[78]", "a finite weight"],
    );
    let nan = f32::NAN.to_le_bytes().to_vec();
    bad(
        &|t| t.get_mut(&format!("{o}_scale_inv")).unwrap().2 = nan.clone(),
        &["o_proj.weight_scale_inv[0]", "a finite scale", "NaN"],
    );
}

/// Experts of 64 columns have one group a row, which looks like a row scale.
#[test]
fn one_group_a_row_is_what_the_file_says() {
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let made = support::converted("tiny-lite", scales).unwrap();
        let dir = made.path().join("model");
        let config = Config::read(&dir).unwrap();
        assert_eq!((config.hidden, config.moe_intermediate), (64, 64));
        let experts = RawExperts::open(&dir, &config).unwrap();
        assert_eq!(experts.shape().scales, scales);
        matches(&dir, "tiny-lite-row");
    }
}

#[test]
fn dense_matrices_may_be_int8() {
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("m");
    let options = Options {
        dense: DenseFormat::Int8Row,
        ..row()
    };
    let from = support::data().join("tiny-dsa-hf");
    let summary = convert(&from, &to, &options, |_, _| ()).unwrap();
    matches(&to, "tiny-dsa-int8");
    let dense = read(&to.join("dense.safetensors"));
    assert_eq!(
        summary.dense_tensors,
        dense.keys().filter(|n| !n.ends_with(".qs")).count()
    );
    let embedding = &dense["model.embed_tokens.weight"];
    assert_eq!((embedding.0, embedding.1.len()), (Dtype::U8, 1));
    assert_eq!(dense["model.norm.weight"].0, Dtype::BF16);
    // What is left alone stays f32 where it was.
    let wide = support::to_f32(support::checkpoint("tiny-dsa"));
    support::write_checkpoint(out.path(), "tiny-dsa", &wide);
    let to = out.path().join("f32");
    convert(out.path(), &to, &options, |_, _| ()).unwrap();
    matches(&to, "tiny-dsa-f32-int8");
    let dense = read(&to.join("dense.safetensors"));
    for name in ["model.norm.weight", "model.layers.3.mlp.gate.weight"] {
        assert!(dense[name] == wide[name], "{name}");
    }
}

#[test]
fn dense_matrices_may_be_bf16() {
    let out = tempfile::tempdir().unwrap();
    let wide = support::to_f32(support::checkpoint("tiny-dsa"));
    support::write_checkpoint(out.path(), "tiny-dsa", &wide);
    let options = Options {
        dense: DenseFormat::Bf16,
        ..row()
    };
    let to = out.path().join("m");
    let summary = convert(out.path(), &to, &options, |_, _| ()).unwrap();
    let dense = read(&to.join("dense.safetensors"));
    let mut narrow = 0;
    for (name, (dtype, shape, bytes)) in &dense {
        let (_, was_shape, was) = &wide[name];
        assert_eq!(shape, was_shape);
        if *dtype == Dtype::F32 {
            assert!(bytes == was, "{name}");
            let kept = ["norm", "bias", "mlp.gate.", "weights_proj"];
            assert!(kept.iter().any(|k| name.contains(k)), "{name}");
            continue;
        }
        narrow += 1;
        let rounded = support::f32s(was).into_iter().map(half::bf16::from_f32);
        let rounded: Vec<u8> = rounded.flat_map(half::bf16::to_le_bytes).collect();
        assert!(*dtype == Dtype::BF16 && *bytes == rounded, "{name}");
    }
    assert!(narrow > 20 && summary.rounded == narrow, "{narrow}");
}

/// What cannot take its final name is refused before the work rather than behind it.
#[cfg(unix)]
#[test]
fn a_target_has_a_name_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(".", dir.path().join("link")).unwrap();
    let fails = |from: &std::path::Path, to: &str, what: &str| {
        assert_cmd::Command::new(env!("CARGO_BIN_EXE_host"))
            .current_dir(dir.path())
            .args(["convert", "--to", to, "--from"])
            .arg(from)
            .assert()
            .code(1)
            .stderr(predicates::str::contains(what));
    };
    let checkpoint = support::data().join("tiny-lite-hf");
    let checkpoint = checkpoint.canonicalize().unwrap();
    fails(&checkpoint, ".", "expected one with a name");
    fails(&checkpoint, "link", "found a link");
    fails(dir.path(), "model", "give the checkpoint's directory");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
