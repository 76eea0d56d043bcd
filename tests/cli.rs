//! `host generate` and `host eval` as a user runs them.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use assert_cmd::Command;
use host::archive::{PackOptions, SafetensorsExperts, pack};
use host::backend::kernels::CudaDevice;
use host::expert::ScaleKind;
use host::tokenizer::Tokenizer;
use predicates::prelude::*;
use predicates::str::contains;
use serde_json::Value;

/// Path of a model directory with raw and coded experts, made once.
fn tiny() -> &'static Path {
    static DIR: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, dir) = DIR.get_or_init(|| {
        let made = support::converted("tiny-dsa", ScaleKind::Row).unwrap();
        let dir = made.path().join("model");
        add_archive(&dir);
        (made, dir)
    });
    dir
}

fn add_archive(dir: &Path) {
    let experts = SafetensorsExperts::open(dir).unwrap();
    let options = PackOptions::default();
    pack(
        &experts,
        &options,
        &dir.join("experts.ansx"),
        |_| (),
        || false,
    )
    .unwrap();
}

fn host(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(args);
    command
}

fn generate(model: &Path, args: &[&str]) -> Command {
    let mut command = host(&["generate", "--device", "cpu", "-m"]);
    command.arg(model).args(args);
    command
}

fn json(command: &mut Command) -> Value {
    let out = command.assert().success().get_output().stdout.clone();
    serde_json::from_slice(&out).unwrap()
}

const PROMPT: [&str; 2] = ["--prompt-ids", "191,80,91,337,439,269,12"];

#[test]
fn raw_and_coded_experts_give_the_same_logits() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for (name, args) in [
        ("raw", &["--tier", "raw"][..]),
        ("fused", &["--tier", "ans", "--kernel", "fused"]),
        ("unfused", &["--tier", "ans", "--kernel", "unfused"]),
        ("default", &[]),
        ("reference", &["--device", "reference"]),
    ] {
        let file = dir.path().join(name);
        let mut command = host(&["generate", "-m"]);
        command.arg(tiny()).args(PROMPT).args(args);
        if !args.contains(&"--device") {
            command.args(["--device", "cpu"]);
        }
        command.args(["-n", "30", "--temp", "0", "--json", "--logits"]);
        let object = json(command.arg(&file));
        let tier = object["placement"]["tiers"][0].clone();
        let raw = name == "raw";
        assert_eq!(tier["tier"], if raw { "ram-raw" } else { "ram-ans" });
        assert_eq!(tier["experts"], 64);
        assert_eq!(object["finish_reason"], "length");
        files.push((fs::read(file).unwrap(), object["token_ids"].clone()));
    }
    assert!(files.iter().all(|f| *f == files[0]));
    let tensors = safetensors::SafeTensors::deserialize(&files[0].0).unwrap();
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!(logits.shape(), [30, 512]);
    let rows: Vec<Vec<f32>> = logits
        .data()
        .chunks(4 * 512)
        .map(|row| {
            row.chunks(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect()
        })
        .collect();
    for (row, id) in rows.iter().zip(files[0].1.as_array().unwrap()) {
        assert_eq!(host::sample::greedy(row) as u64, id.as_u64().unwrap());
    }
}

/// `--kv bf16` is half of a cache's rows, said wherever a cache is spoken of, and counted by the planner.
#[test]
fn caches_of_bf16() {
    let text = fs::read_to_string(tiny().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    let of = |key: &str| config[key].as_u64().unwrap();
    let row = of("num_hidden_layers") * (of("kv_lora_rank") + of("qk_rope_head_dim"));
    let args = ["--kv", "bf16", "-n", "30", "--temp", "0"];
    let run = |args: &[&str]| json(generate(tiny(), &PROMPT).args(args).arg("--json"));
    let (wide, narrow) = (run(&args[2..]), run(&args));
    let kv = |object: &Value| object["placement"]["kv"].clone();
    let bytes = |object: &Value| kv(object)["bytes"].as_u64().unwrap();
    assert_eq!(kv(&wide)["format"], "f32");
    assert_eq!(kv(&narrow)["format"], "bf16");
    assert_eq!(kv(&narrow)["positions"], 36);
    assert_eq!(bytes(&wide) - bytes(&narrow), 2 * 36 * row);
    let said = generate(tiny(), &PROMPT).args(args).assert().success();
    said.stderr(contains("KV cache bf16, "));
    let facts = json(host(&["doctor", "--json", "-m"]).arg(tiny()));
    let cache = |key: &str| facts["model"][key].as_u64().unwrap();
    assert!(cache("cache_bf16_bytes") < cache("cache_bytes"));
    let folder = tempfile::tempdir().unwrap();
    let planned = |kv: &str| {
        let mut command = host(&["plan", "--device", "emulator", "-c", "512", "--json"]);
        command.env("XDG_CACHE_HOME", folder.path());
        let plan = json(command.args(["--kv", kv, "-m"]).arg(tiny()));
        let parts = plan["fixed"].as_array().unwrap().clone();
        let part = parts.iter().find(|f| f["what"] == "KV cache").unwrap();
        part["vram_bytes"].as_u64().unwrap()
    };
    // In allocations, each of which takes an eighth more at most.
    let (wide, narrow) = (planned("f32"), planned("bf16"));
    let saved = 2 * 512 * row;
    assert!(wide - narrow > saved - saved / 4 && wide - narrow < saved + saved / 4);
    refused(
        generate(tiny(), &PROMPT).args(["--kv", "f16"]),
        2,
        &["--kv", "f16"],
    );
}

/// The GPU's kernels give the CPU's logits; in the emulator, and on a GPU where there is one.
#[test]
fn devices_give_the_same_logits() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, args: &[&str]| {
        let file = dir.path().join(name);
        let mut command = host(&["generate", "-m"]);
        command.arg(tiny()).args(PROMPT).args(args);
        command.args(["-n", "2", "--temp", "0", "--json", "--logits"]);
        json(command.arg(&file));
        fs::read(file).unwrap()
    };
    let want = run("cpu", &["--device", "cpu"]);
    let mut devices = vec!["emulator"];
    if CudaDevice::count() > 0 {
        devices.push("cuda");
    }
    for device in devices {
        for args in [
            &["--tier", "raw"][..],
            &["--tier", "ans", "--kernel", "fused"],
            &["--tier", "ans", "--kernel", "unfused"],
        ] {
            let args = [&["--device", device], args].concat();
            assert!(run("device", &args) == want, "{args:?}");
        }
    }
}

#[test]
fn cuda_without_a_driver_is_refused() {
    if CudaDevice::count() == 0 {
        let cuda = ["--device", "cuda"];
        let mut command = host(&["generate", "-m"]);
        refused(
            command.arg(tiny()).args(PROMPT).args(cuda),
            1,
            &["--device cuda", "; "],
        );
    }
}

#[test]
fn an_archive_alone_serves_both_tiers() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "dense.safetensors", "experts.ansx"] {
        fs::copy(tiny().join(name), dir.path().join(name)).unwrap();
    }
    let tokens = |dir: &Path, tier: &str| {
        let mut command = generate(dir, &PROMPT);
        json(command.args(["-n", "8", "--temp", "0", "--json", "--tier", tier]))["token_ids"]
            .clone()
    };
    let want = tokens(tiny(), "raw");
    assert_eq!(tokens(dir.path(), "raw"), want);
    assert_eq!(tokens(dir.path(), "ans"), want);
}

#[test]
fn seeds_repeat() {
    let run = |seed: &str| {
        let mut command = generate(tiny(), &PROMPT);
        json(command.args(["-n", "20", "--temp", "2", "--json", "--seed", seed]))
    };
    let (a, b, c) = (run("1"), run("1"), run("2"));
    assert_eq!(a["token_ids"], b["token_ids"]);
    assert_ne!(a["token_ids"], c["token_ids"]);
    assert_eq!(a["seed"], 1);
    assert_eq!(a["prompt_ids"].as_array().unwrap().len(), 7);
    assert!(a["timings"]["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
}

/// A refusal: exit code, and one line that says what is wrong and what to do.
fn refused(command: &mut Command, code: i32, says: &[&str]) {
    let assert = command.assert().code(code).stdout("");
    let stderr = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    let line = stderr.lines().find(|l| l.starts_with("error: ")).unwrap();
    for text in says {
        assert!(line.contains(text), "{text:?} not in {line:?}");
    }
    if code == 1 {
        assert!(stderr.lines().last() == Some(line), "{stderr}");
    }
}

#[test]
fn wrong_usage_and_bad_prompts() {
    let long = vec!["1"; 513].join(",");
    refused(&mut host(&["generate", "-m", "x"]), 2, &["required"]);
    refused(
        &mut generate(tiny(), &["-p", "a", "--prompt-ids", "1"]),
        2,
        &["--prompt"],
    );
    refused(&mut generate(tiny(), &["--prompt-ids", "1,x"]), 2, &["x"]);
    refused(
        &mut generate(tiny(), &["--prompt-ids", "1", "--top-p", "0"]),
        2,
        &["--top-p"],
    );
    refused(
        &mut generate(tiny(), &["-p", "a"]),
        1,
        &["tokenizer.json", "--prompt-ids"],
    );
    refused(
        &mut generate(tiny(), &["--prompt-ids", "1,512"]),
        1,
        &["token 512", "512 tokens"],
    );
    refused(
        &mut generate(tiny(), &["--prompt-ids", &long]),
        1,
        &["513 tokens", "context 512"],
    );
    let small = ["--prompt-ids", "1,2,3", "-c", "2"];
    refused(
        &mut generate(tiny(), &small),
        1,
        &["3 tokens", "--ctx-size", "512"],
    );
    let large = ["--prompt-ids", "1", "-c", "513"];
    refused(&mut generate(tiny(), &large), 1, &["--ctx-size 513", "512"]);
    for (option, value) in [
        ("--temp", "-1"),
        ("--temp", "nan"),
        ("--top-p", "-0.5"),
        ("--top-p", "nan"),
        ("--top-k", "-1"),
        ("--seed", "-2"),
        ("--batch", "0"),
    ] {
        let args = ["--prompt-ids", "1", option, value];
        refused(
            &mut generate(tiny(), &args),
            2,
            &[option, value, "invalid value"],
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    fs::write(&file, b"abc\xff").unwrap();
    let args = ["-f", file.to_str().unwrap()];
    refused(&mut generate(tiny(), &args), 1, &["prompt: ", "UTF-8"]);
}

/// Nothing is computed for logits that cannot be written, and nothing is left where they were to go.
#[test]
fn logits_have_a_place_before_anything_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let special = tempfile::tempdir().unwrap();
    let pipe = support::pipe(special.path());
    for file in [dir.path(), &dir.path().join("none/logits"), &pipe] {
        let mut command = generate(tiny(), &PROMPT);
        let command = command.args(["-n", "1", "--logits"]).arg(file);
        refused(
            command,
            1,
            &["--logits", "cannot be written", "give a file"],
        );
        // Loading says where the experts went.
        command.assert().stderr(contains("experts").not());
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let file = dir.path().join("logits");
    let mut command = generate(tiny(), &PROMPT);
    let object = json(command.args(["-n", "0", "--json", "--logits"]).arg(&file));
    assert_eq!(object["token_ids"].as_array().unwrap().len(), 0);
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("logits").unwrap().shape(), [0, 512]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn the_context_ends_generation() {
    let ids = vec!["5"; 510].join(",");
    let mut command = generate(tiny(), &["--prompt-ids", &ids, "-n", "-1", "--temp", "0"]);
    let object = json(command.args(["--json", "--ignore-eos"]));
    // Positions 510 and 511, and one token after the last.
    assert_eq!(object["token_ids"].as_array().unwrap().len(), 3);
    assert_eq!(object["finish_reason"], "length");
}

#[test]
fn bad_models() {
    let missing = Path::new("no/such/model");
    refused(
        &mut generate(missing, &PROMPT),
        1,
        &["no/such/model", "host convert"],
    );
    let changed = |name: &str, change: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "dense.safetensors", "experts.safetensors"] {
            fs::copy(tiny().join(name), dir.path().join(name)).unwrap();
        }
        change(&dir.path().join(name));
        dir
    };
    let dir = changed("config.json", &|f| {
        let text = fs::read_to_string(f).unwrap();
        fs::write(
            f,
            text.replace("\"hidden_size\": 128", "\"hidden_size\": 192"),
        )
        .unwrap();
    });
    let says = ["experts.safetensors", "for 64 x 192 weights", "convert"];
    refused(&mut generate(dir.path(), &PROMPT), 1, &says);
    let dir = changed("config.json", &|f| {
        let text = fs::read_to_string(f).unwrap();
        fs::write(
            f,
            text.replace("\"vocab_size\": 512", "\"vocab_size\": 500"),
        )
        .unwrap();
    });
    let says = [
        "dense.safetensors",
        "embed_tokens",
        "[500, 128]",
        "[512, 128]",
    ];
    refused(&mut generate(dir.path(), &PROMPT), 1, &says);
    let dir = changed("config.json", &|f| fs::write(f, "{").unwrap());
    refused(
        &mut generate(dir.path(), &PROMPT),
        1,
        &["config.json", "JSON"],
    );
    // The tokenizers library panics here.
    let dir = changed("tokenizer.json", &|f| {
        fs::write(f, r#"{"version": "1.0", "decoder": ull}"#).unwrap();
    });
    let text = ["-p", "hello"];
    refused(
        &mut generate(dir.path(), &text),
        1,
        &["tokenizer.json", "expected a tokenizer", "column"],
    );
    let dir = changed("dense.safetensors", &|f| {
        let bytes = fs::read(f).unwrap();
        fs::write(f, &bytes[..bytes.len() / 2]).unwrap();
    });
    refused(
        &mut generate(dir.path(), &PROMPT),
        1,
        &["dense.safetensors", "convert it again"],
    );
    let dir = changed("experts.safetensors", &|f| fs::remove_file(f).unwrap());
    let pack = |dir: &Path| format!("`host pack -m {}`", dir.display());
    refused(
        &mut generate(dir.path(), &PROMPT),
        1,
        &["experts.safetensors", "host convert", &pack(dir.path())],
    );
    let dir = changed("config.json", &|_| ());
    let ans = ["--tier", "ans"];
    refused(
        generate(dir.path(), &PROMPT).args(ans),
        1,
        &["experts.ansx", &pack(dir.path())],
    );
}

#[test]
fn archives_of_other_models_are_refused() {
    let other = support::converted("tiny-dsa", ScaleKind::G64).unwrap();
    let other = other.path().join("model");
    add_archive(&other);
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "dense.safetensors"] {
        fs::copy(tiny().join(name), dir.path().join(name)).unwrap();
    }
    fs::copy(other.join("experts.ansx"), dir.path().join("experts.ansx")).unwrap();
    // The model's own are in rows, whatever else the archive has.
    let says = |field, own| ["experts.ansx", field, own, "another model", "host pack"];
    let rows = says("expert shape", "int4-row, found 64 x 128, int4-g64");
    refused(&mut generate(dir.path(), &PROMPT), 1, &rows);
    let original = fs::read_to_string(tiny().join("config.json")).unwrap();
    let wider = original.replace(
        "\"moe_intermediate_size\": 64",
        "\"moe_intermediate_size\": 128",
    );
    fs::write(dir.path().join("config.json"), wider).unwrap();
    let rows = says(
        "expert shape",
        "128 x 128, int4-row, found 64 x 128, int4-g64",
    );
    refused(&mut generate(dir.path(), &PROMPT), 1, &rows);
    fs::write(dir.path().join("config.json"), original).unwrap();
    // Other weights alone.
    let mut bytes = fs::read(tiny().join("experts.safetensors")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(other.join("experts.safetensors"), bytes).unwrap();
    add_archive(&other);
    fs::copy(other.join("experts.ansx"), dir.path().join("experts.ansx")).unwrap();
    let weights = says("fingerprint", "another model");
    refused(&mut generate(dir.path(), &PROMPT), 1, &weights);
    // Geometry alone gives it away too.
    let config = fs::read_to_string(tiny().join("config.json")).unwrap();
    let config = config.replace("\"n_routed_experts\": 16", "\"n_routed_experts\": 8");
    fs::write(dir.path().join("config.json"), config).unwrap();
    refused(
        &mut generate(dir.path(), &PROMPT),
        1,
        &["experts a layer", "another model"],
    );
}

#[test]
fn damaged_records_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "dense.safetensors", "experts.ansx"] {
        fs::copy(tiny().join(name), dir.path().join(name)).unwrap();
    }
    let archive = dir.path().join("experts.ansx");
    let mut bytes = fs::read(&archive).unwrap();
    let at = bytes.len() * 2 / 3;
    bytes[at] ^= 4;
    fs::write(&archive, &bytes).unwrap();
    for tier in ["raw", "ans"] {
        let mut command = generate(dir.path(), &PROMPT);
        refused(
            command.args(["--tier", tier]),
            1,
            &["experts.ansx", "layer", "expert", "checksum"],
        );
    }
}

#[test]
fn eval_windows() {
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    let tokens: Vec<u16> = (0..65).map(|i| (i * 37 + 11) % 512).collect();
    fs::write(&ids, bytemuck::cast_slice::<u16, u8>(&tokens)).unwrap();
    let eval = |args: &[&str]| {
        let mut command = host(&["eval", "--device", "cpu", "-m"]);
        command.arg(tiny()).arg("--ids").arg(&ids).args(args);
        command
    };
    let nll = |args: &[&str]| json(eval(args).arg("--json"))["nll"].as_f64().unwrap();
    let (first, both) = (
        nll(&["--context", "32", "--windows", "1"]),
        nll(&["--context", "32"]),
    );
    assert_ne!(first, both);
    // The mean over two windows of equal length, the second scored alone.
    fs::write(&ids, bytemuck::cast_slice::<u16, u8>(&tokens[32..])).unwrap();
    let second = nll(&["--context", "32"]);
    assert!(((first + second) / 2.0 - both).abs() < 1e-12);
    refused(&mut eval(&[]), 1, &["512", "33", "--windows or --context"]);
    refused(&mut eval(&["--windows", "0"]), 1, &["--windows 0"]);
    let most = usize::MAX.to_string();
    refused(
        &mut eval(&["--context", "512", "--windows", &most]),
        1,
        &["9444732965739290426881 tokens", "33"],
    );
    refused(
        &mut eval(&["--context", "513"]),
        1,
        &["--context 513", "512"],
    );
    // Not read to its end, which it has not.
    let mut endless = host(&["eval", "--device", "cpu", "--ids", "/dev/zero", "-m"]);
    refused(endless.arg(tiny()), 1, &["/dev/zero", "not a file"]);
    fs::write(&ids, [1, 0, 2]).unwrap();
    refused(&mut eval(&[]), 1, &["ids", "even number of bytes"]);
    fs::write(&ids, [0, 0, 0, 2, 0, 0]).unwrap();
    refused(&mut eval(&["--context", "2"]), 1, &["token 1", "below 512"]);
}

#[test]
fn text_round_trips_in_whole_characters() {
    let config = host::model::Config::read(&sotu()).unwrap();
    let tokenizer = Tokenizer::read(&sotu(), &config).unwrap().unwrap();
    for case in support::oracle("sotu", ScaleKind::Row).cases {
        if let Some(prompt) = case.prompt {
            assert_eq!(tokenizer.encode(&prompt).unwrap(), case.input_ids);
        }
    }
    // Two to four bytes a character, none of which are tokens of their own.
    let text = "naïve “peace” – 日本 😀 done";
    let ids = tokenizer.encode(text).unwrap();
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    assert_eq!(pieces.concat(), text);
    assert!(pieces.iter().filter(|p| !p.is_empty()).count() > 10);
    // A character that never ends comes out as what it is.
    let cut = ids
        .iter()
        .position(|id| stream.push(*id).unwrap().contains('日'))
        .unwrap();
    stream.finish().unwrap();
    let rest: String = ids[..cut]
        .iter()
        .map(|id| stream.push(*id).unwrap())
        .collect();
    assert!(!rest.contains('\u{fffd}'));
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}

#[test]
fn prompts_are_neither_cut_nor_filled() {
    let config = host::model::Config::read(&sotu()).unwrap();
    let text = "Fellow citizens of the Senate";
    let want = Tokenizer::read(&sotu(), &config).unwrap().unwrap();
    let want = want.encode(text).unwrap();
    let file = fs::read(sotu().join("tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_slice(&file).unwrap();
    file["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
    });
    file["padding"] = serde_json::json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"
    });
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::read(dir.path(), &config).unwrap().unwrap();
    assert_eq!(tokenizer.encode(text).unwrap(), want);
}

/// The model in the repository.
fn sotu() -> PathBuf {
    let dir = host::model::default_directory();
    dir.expect("models/sotu-row of the repository")
}

#[test]
fn text_streams_alone_to_stdout() {
    let args = [
        "-p",
        "The condition of the Treasury",
        "-n",
        "24",
        "--temp",
        "0",
    ];
    let plain = generate(&sotu(), &args).assert().success();
    let text = String::from_utf8(plain.get_output().stdout.clone()).unwrap();
    let object = json(generate(&sotu(), &args).arg("--json"));
    assert_eq!(object["text"], text);
    let prompt: Vec<u64> = object["prompt_ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect();
    // As the oracle's prompt starts: [gMASK]<sop>.
    let oracle = support::oracle("sotu", ScaleKind::Row);
    let case = oracle
        .cases
        .iter()
        .find(|c| c.prompt.as_deref() == Some(args[1]))
        .unwrap();
    assert!(
        prompt.iter().eq(case
            .input_ids
            .iter()
            .map(|id| *id as u64)
            .collect::<Vec<_>>()
            .iter())
    );
    assert!(text.len() > 24 && !text.contains('\u{fffd}'));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), format!("{}\n", args[1])).unwrap();
    let path = file.path().to_str().unwrap();
    // From a file, from standard input, and in batches that are smaller than it.
    let input = format!("{}\n", args[1]);
    for (path, input, batch) in [(path, "", "512"), ("-", &*input, "512"), (path, "", "5")] {
        let args = ["-f", path, "-n", "24", "--temp", "0", "--batch", batch];
        generate(&sotu(), &args)
            .write_stdin(input)
            .assert()
            .success()
            .stdout(text.clone())
            .stderr(contains("tokens/s").and(contains("experts")));
    }
}

#[cfg(unix)]
#[test]
fn closed_pipes_and_ctrl_c_end_quietly() {
    use std::io::Read;
    use std::process::Stdio;
    let spawn = |args: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_host"))
            .args(["generate", "--device", "cpu", "-m"])
            .arg(sotu())
            .args(["-p", "Our relations with Mexico", "--ignore-eos"])
            .args(if args.is_empty() { &["-n", "-1"] } else { args })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut child = spawn(&[]);
    let mut some = [0; 16];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap(); // and closed
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&out.stderr).contains("error"));

    // Nobody reads stderr: the text goes on.
    let mut child = spawn(&["-n", "8"]);
    drop(child.stderr.take());
    let mut text = String::new();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(text.len() > 8, "{text:?}");

    let mut child = spawn(&[]);
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut some).unwrap();
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(
        stderr.contains("interrupted") && stderr.contains("tokens/s"),
        "{stderr}"
    );
}

fn chat(args: &[&str]) -> Command {
    let mut command = host(&["chat", "--device", "cpu", "--temp", "0"]);
    command.args(args);
    command
}

#[test]
fn chat_answers_each_line_and_begins_anew() {
    let answers = |input: &str, args: &[&str]| -> Vec<String> {
        let mut command = chat(&["-n", "12"]);
        let done = command.args(args).write_stdin(input).assert().success();
        let out = String::from_utf8(done.get_output().stdout.clone()).unwrap();
        out.lines().map(String::from).collect()
    };
    let question = "What of the Navy?\n";
    let once = answers(question, &[]);
    assert!(once.iter().any(|l| !l.trim().is_empty()), "{once:?}");
    let twice = answers(&format!("{question}/clear\n{question}"), &[]);
    assert_eq!(twice, [&once[..], &once[..]].concat());
    // What was said counts, and so do instructions.
    assert_ne!(answers(&question.repeat(2), &[]), twice);
    assert_ne!(answers(question, &["--system", "Speak of the Army."]), once);
    assert_eq!(answers("/exit\nno more\n", &[]), Vec::<String>::new());
    // Refused before anything loads.
    chat(&["-c", "999999"])
        .write_stdin(question)
        .assert()
        .code(1)
        .stdout("")
        .stderr(contains("--ctx-size 999999: the model has"));
    // Text in, text out.
    chat(&["-m"])
        .arg(tiny())
        .write_stdin(question)
        .assert()
        .code(1)
        .stderr(contains("no tokenizer.json"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_answer_and_not_the_chat() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::Stdio;
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["chat", "--device", "cpu", "--temp", "0", "-n", "1900"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    writeln!(stdin, "What of the Navy?").unwrap();
    // As soon as the answer begins.
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let mut answer = String::new();
    stdout.read_line(&mut answer).unwrap();
    writeln!(stdin, "/exit").unwrap();
    drop(stdin);
    let done = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("stopped"), "{stderr}");
}

/// Of the cache stderr says before the first token what `--json` does at the end.
#[test]
fn positions_are_those_that_are_kept() {
    for (tokens, context, positions) in [("0", "9", 7), ("1", "9", 7), ("3", "9", 9), ("5", "9", 9)]
    {
        let mut command = generate(tiny(), &PROMPT);
        command.args(["-n", tokens, "-c", context, "--ignore-eos", "--json"]);
        let done = command.assert().success();
        let out = done.get_output();
        let object: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(
            object["placement"]["kv"]["positions"], positions,
            "-n {tokens}"
        );
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(
            stderr.contains(&format!("for {positions} positions")),
            "{stderr}"
        );
    }
}

/// Measuring takes the emulator ten seconds and more, and none of its steps a tenth of one.
#[test]
#[cfg(target_os = "linux")]
fn ctrl_c_ends_a_calibration_at_once() {
    let cache = tempfile::tempdir().unwrap();
    for later in [0, 300, 1500] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_host"));
        command
            .args(["plan", "--device", "emulator", "-m"])
            .arg(sotu());
        command.env("XDG_CACHE_HOME", cache.path());
        let later = std::time::Duration::from_millis(later);
        let (out, took) = support::interrupted(&mut command, later);
        assert_eq!(out.status.code(), Some(1));
        assert!(out.stdout.is_empty());
        assert_eq!(String::from_utf8_lossy(&out.stderr), "error: interrupted\n");
        // Twenty times what it takes on an idle machine: others may run beside.
        assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    }
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
}

/// `--devices` without a GPU is an error, not the CPU.
#[test]
fn devices_are_gpus() {
    for (args, says) in [
        (
            ["--device", "cpu", "--devices", "0,0"],
            "--device cpu has none",
        ),
        (
            ["--device", "cpu", "--devices", "1"],
            "--device cpu has none",
        ),
        (["--device", "auto", "--devices", "0,99"], "no CUDA device"),
    ] {
        let mut command = Command::cargo_bin("host").unwrap();
        let run = command
            .args(["generate", "--prompt-ids", "1,2", "-n", "1"])
            .args(args);
        run.assert().code(1).stderr(contains(says));
    }
}

/// What cannot be written at the end is found before the first token.
#[test]
fn files_for_later_have_a_directory() {
    for flag in ["--trace", "--usage"] {
        let mut command = host(&["generate", "--prompt-ids", "1,2", "-n", "1", flag]);
        command
            .arg("/none/of/these/file")
            .assert()
            .code(1)
            .stdout("")
            .stderr(contains(
                "cannot be written; give a file in a folder that can be",
            ));
    }
}

/// Of what is written at the end, one that fails takes none of the others with it.
#[test]
#[cfg(target_os = "linux")]
fn files_are_written_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    // Logits are half of that, the trace is more.
    let mut command = Command::new("sh");
    command.args([
        "-c",
        &support::full_at(8),
        env!("CARGO_BIN_EXE_host"),
        "generate",
    ]);
    command.args(["--device", "cpu", "-m"]);
    let ids = vec!["5"; 60].join(",");
    command.arg(tiny()).args(["--prompt-ids", &ids, "-n", "1"]);
    for name in ["usage", "trace", "logits"] {
        command.arg(format!("--{name}")).arg(at(name));
    }
    let error = command.assert().code(1).get_output().stderr.clone();
    let error = String::from_utf8(error).unwrap();
    let says = ["trace: ", "choose a file that can be written"];
    assert!(says.iter().all(|text| error.contains(text)), "{error}");
    assert!(at("usage").exists() && at("logits").exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// Whatever fails is said: the answer's own failure is the error, the others are warned of.
#[test]
#[cfg(target_os = "linux")]
fn every_failure_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let run = |stdout: std::process::Stdio| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &support::full_at(0), env!("CARGO_BIN_EXE_host")]);
        command.args(["generate", "--device", "cpu", "-n", "1", "-p", "We", "-m"]);
        command.arg(sotu());
        for name in ["usage", "trace", "logits"] {
            command.arg(format!("--{name}")).arg(dir.path().join(name));
        }
        let command = command.stdout(stdout).stderr(std::process::Stdio::piped());
        let out = command.spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        String::from_utf8(out.stderr).unwrap()
    };
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let (unread, broken) = std::io::pipe().unwrap();
    drop(unread);
    let cases = [
        (full.into(), "standard output: "),
        (std::process::Stdio::null(), "usage: "),
        // Who does not read the text is not told so.
        (broken.into(), "usage: "),
    ];
    for (stdout, error) in cases {
        let said = run(stdout);
        let line = |what: &str, kind: &str| {
            let mut lines = said.lines();
            lines.any(|l| l.trim_start().starts_with(kind) && l.contains(what))
        };
        assert!(line(error, "error: "), "{said}");
        for name in ["usage: ", "trace: ", "logits: "] {
            assert!(line(name, "WARN") != (name == error), "{said}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

/// Counts are not added to another model's.
#[test]
fn usage_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("usage.txt");
    let run = |text: &str| {
        fs::write(&file, text).unwrap();
        let mut command = generate(tiny(), &["--prompt-ids", "1,2", "-n", "1", "--usage"]);
        command.arg(&file).assert()
    };
    run("2 1 7\n").success();
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .starts_with("# ansatz usage 1")
    );
    for foreign in ["2 16 7\n", "9 1 7\n"] {
        run(foreign)
            .code(1)
            .stdout("")
            .stderr(contains("layers of 16 experts"));
        assert_eq!(fs::read_to_string(&file).unwrap(), foreign);
    }
}

/// A terminal's two ends: what is written to the second comes out of the first.
#[cfg(target_os = "linux")]
fn terminal() -> (fs::File, fs::File) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use std::os::unix::fs::OpenOptionsExt;
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    let mut options = fs::File::options();
    // Else it becomes the test's own terminal where it has none.
    let flags = OpenptFlags::NOCTTY.bits() as i32;
    options.read(true).write(true).custom_flags(flags);
    let (ours, theirs) = (ours.into(), options.open(name).unwrap());
    (ours, theirs)
}

/// An error behind text begins a line of its own where people see both; a file has the text alone.
#[test]
#[cfg(target_os = "linux")]
fn an_error_behind_text_is_not_on_its_line() {
    use std::io::Read;
    let dir = tempfile::tempdir().unwrap();
    let command = |stdout: std::process::Stdio| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &support::full_at(0), env!("CARGO_BIN_EXE_host")]);
        command.args([
            "generate", "--device", "cpu", "-n", "3", "--temp", "0", "-p", "We", "-m",
        ]);
        // The trace, which is written last, cannot be.
        command
            .arg(sotu())
            .arg("--trace")
            .arg(dir.path().join("trace"));
        command.stdout(stdout).stderr(std::process::Stdio::piped());
        command.spawn().unwrap().wait_with_output().unwrap()
    };
    let out = command(std::process::Stdio::piped());
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(!text.is_empty() && !text.ends_with('\n'), "{text:?}");
    let (mut ours, theirs) = terminal();
    let out = command(theirs.into());
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("\nerror: "));
    let mut seen = Vec::new();
    // Nobody has the other end any more: an error after all that was written.
    let _ = ours.read_to_end(&mut seen);
    assert_eq!(String::from_utf8(seen).unwrap(), text + "\r\n");
}
