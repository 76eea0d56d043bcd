//! `host synth` as a user runs it, and what the other commands make of its models.

use std::fs;
use std::path::Path;

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::{contains, is_empty};
use serde_json::Value;

fn host(args: &[&dyn AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(args);
    command
}

fn tiny(to: &Path, more: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = host(&[&"synth", &"--shape", &"tiny", &"--to", &to]);
    command.args(more).assert()
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|f| f.unwrap())
        .map(|f| {
            let name = f.file_name().into_string().unwrap();
            (name, fs::read(f.path()).unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn a_synthetic_model_runs() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    tiny(&model, &["--distinct-experts", "5"])
        .success()
        .stdout(is_empty())
        .stderr(contains("5 distinct experts").and(contains("48% most used experts cover 8")));
    let archive = model.join("experts.ansx");
    let json = |args: &[&dyn AsRef<std::ffi::OsStr>]| -> Value {
        let out = host(args).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&out).unwrap()
    };
    assert_eq!(
        json(&[&"verify", &archive, &"-m", &model, &"--json"])["records"],
        5
    );
    assert_eq!(json(&[&"inspect", &archive, &"--json"])["records"], 5);
    let run = |device: &str, tier: &str| {
        json(&[
            &"generate",
            &"-m",
            &model,
            &"-p",
            &"Hello",
            &"-n",
            &"6",
            &"--temp",
            &"0",
            &"--device",
            &device,
            &"--tier",
            &tier,
            &"--ignore-eos",
            &"--json",
        ])
    };
    let cpu = run("cpu", "ans");
    // The prefix and five bytes.
    assert_eq!(cpu["prompt_ids"].as_array().unwrap().len(), 7);
    assert_eq!(cpu["token_ids"].as_array().unwrap().len(), 6);
    assert_eq!(cpu["placement"]["tiers"][0]["experts"], 3 * 32);
    assert_eq!(run("cpu", "raw")["token_ids"], cpu["token_ids"]);
    assert_eq!(run("reference", "ans")["token_ids"], cpu["token_ids"]);
    // Text that is no text: the tokens are random, and so bytes.
    host(&[
        &"generate",
        &"-m",
        &model,
        &"-p",
        &"Hi",
        &"-n",
        &"3",
        &"-s",
        &"1",
    ])
    .assert()
    .success();
}

/// Matrices of bytes: half the file, and the same tokens on every back end.
#[test]
fn the_dense_part_may_be_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let models = ["verbatim", "int8-row"].map(|format| {
        let model = dir.path().join(format);
        tiny(&model, &["--dense", format]).success();
        model
    });
    let json = |model: &Path, args: &[&str]| -> Value {
        let mut command = host(&[]);
        command.arg(args[0]).arg("-m").arg(model).args(&args[1..]);
        let done = command.arg("--json").assert().success();
        serde_json::from_slice(&done.get_output().stdout).unwrap()
    };
    let bytes = models.each_ref().map(|model| {
        let facts = json(model, &["doctor", "--deep"])["model"].clone();
        facts["dense_bytes"].as_u64().unwrap()
    });
    // Norms, routers and scales besides.
    assert!(bytes[1] < bytes[0] * 6 / 10, "{bytes:?}");
    let run = |device: &str| {
        let args = [
            "generate",
            "-p",
            "Hello",
            "-n",
            "4",
            "--temp",
            "0",
            "--ignore-eos",
        ];
        json(&models[1], &[&args[..], &["--device", device]].concat())["token_ids"].clone()
    };
    let expected = run("reference");
    assert_eq!(run("cpu"), expected);
    assert_eq!(run("emulator"), expected);
}

#[test]
fn a_plan_is_made_and_rates_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    tiny(&model, &[]).success();
    let plan = |more: &[&str]| {
        let mut command = host(&[&"plan", &"-m", &model, &"--device", &"emulator"]);
        command.env("XDG_CACHE_HOME", dir.path().join("cache"));
        if !more.contains(&"-c") {
            command.args(["-c", "64"]);
        }
        command.args(more).assert()
    };
    let rates = dir.path().join("rates.json");
    let save = rates.to_str().unwrap();
    plan(&["--save-rates", save])
        .success()
        .stdout(contains("vram-hot").and(contains("bottleneck")))
        .stderr(contains("measured: "));
    // The second time what was measured is kept.
    plan(&[]).success().stderr(is_empty());
    plan(&["--calibrate"])
        .success()
        .stderr(contains("measured: "));
    // Without -c, for what the model has at most.
    host(&[&"plan", &"-m", &model, &"--device", &"emulator"])
        .args(["--rates", save])
        .assert()
        .success();
    let json = |more: &[&str]| -> Value {
        let out = plan(more).success().get_output().stdout.clone();
        serde_json::from_slice(&out).unwrap()
    };
    let with = ["--rates", save, "--json"];
    let all = json(&with);
    assert_eq!(all["profile"], model.join("usage.txt").to_str().unwrap());
    let fixed: u64 = all["fixed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["vram_bytes"].as_u64().unwrap())
        .sum();
    // A little device memory, a little host memory: the rest stays on disk.
    let vram = (fixed + (2 << 20)).to_string();
    let little = json(&[&with[..], &["--vram-budget", &vram, "--ram-budget", "200K"]].concat());
    let p = &little["plan"];
    let experts = |p: &Value| -> Vec<u64> {
        let table = p["table"].as_array().unwrap();
        table
            .iter()
            .map(|t| t["experts"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(experts(p).iter().sum::<u64>(), 96);
    assert!(experts(p)[4] > 0, "{p}");
    assert!(p["token_s"].as_f64().unwrap() <= p["greedy_s"].as_f64().unwrap() + 1e-12);
    assert!(p["vram_bytes"].as_u64().unwrap() <= 2 << 20);
    assert!(p["ram_bytes"].as_u64().unwrap() <= 200_000);
    // What the disk is read to counts in the host's memory, where anything is on disk.
    assert_eq!(all["ram_reads_bytes"], 0);
    let reads = little["ram_reads_bytes"].as_u64().unwrap();
    assert!(
        reads > 0 && little["ram_budget_bytes"] == 200_000,
        "{little}"
    );
    let more = (reads + 200_000).to_string();
    let more = json(&[&with[..], &["--vram-budget", &vram, "--ram-budget", &more]].concat());
    let ram = more["plan"]["ram_bytes"].as_u64().unwrap();
    assert!((1..=200_000).contains(&ram), "{more}");
    assert_eq!(experts(&all["plan"])[4], 0);
    // Two devices with as little each: fewer experts on disk, a row for each device and tier.
    // The first one has rows of the other beside that.
    let rows = all["fixed"].as_array().unwrap().iter();
    let rows = rows.filter(|f| f["what"] == "rows of experts elsewhere");
    let given: u64 = rows.map(|f| f["vram_bytes"].as_u64().unwrap()).sum();
    let vram = (fixed + (2 << 20) + given).to_string();
    let budgets = ["--vram-budget", &vram, "--ram-budget", "200K"];
    let two = json(&[&with[..], &budgets, &["--devices", "3,3"]].concat())["plan"].clone();
    let rows = two["device_table"].as_array().unwrap();
    let on = |d: u64| -> u64 {
        let own = rows.iter().filter(|r| r["device"] == d);
        own.map(|r| r["experts"].as_u64().unwrap()).sum()
    };
    assert_eq!(on(0) + on(1), 96);
    assert!(rows.iter().all(|r| r["number"] == 3));
    assert!(two["token_s"].as_f64().unwrap() <= p["token_s"].as_f64().unwrap() + 1e-12);
    let taken = two["vram_of_bytes"].as_array().unwrap();
    let taken: Vec<u64> = taken.iter().map(|bytes| bytes.as_u64().unwrap()).collect();
    let room = [2 << 20, (2 << 20) + given];
    assert!(
        taken[0] <= room[0] && taken[1] <= room[1],
        "{taken:?} of {room:?}"
    );
    plan(&[&["--rates", save, "--devices", "0,1"], &budgets[..]].concat())
        .success()
        .stdout(contains("device  tier").and(contains("\n         device 1: ")));

    let fails = |more: &[&str], what: &str| {
        plan(&[&["--rates", save], more].concat())
            .code(1)
            .stdout(is_empty())
            .stderr(contains(what).and(predicate::function(|s: &str| s.lines().count() == 1)));
    };
    fails(
        &["--vram-budget", "1M"],
        "1.0 MB of device memory hold no model whose dense part",
    );
    // Passes of two tokens are measured whatever a prompt's batches are.
    plan(&["--batch", "1", "--calibrate"]).success();
    fails(&["-c", "513"], "-c 513: expected 1 to 512");
    let other = dir.path().join("other.txt");
    fs::write(&other, "9 0 1\n").unwrap();
    fails(
        &["--profile", other.to_str().unwrap()],
        "layer 9, expert 0: the model has 4 layers",
    );
    fs::write(&other, "nonsense\n").unwrap();
    fails(
        &["--profile", other.to_str().unwrap()],
        "line 1: expected layer, expert and count",
    );
    host(&[&"plan", &"-m", &model, &"--rates", &"/nonexistent"])
        .assert()
        .code(1)
        .stderr(contains("/nonexistent: No such file").and(contains("--save-rates FILE")));
    fs::write(&rates, "{}").unwrap();
    fails(&[], "give a file that `host plan --save-rates FILE` wrote");
    plan(&["--vram-budget", "lots"]).code(2);
    plan(&["--rates", save, "--calibrate"]).code(2);
}

#[test]
fn the_seed_decides() {
    let dir = tempfile::tempdir().unwrap();
    let made = |name: &str, more: &[&str]| {
        let to = dir.path().join(name);
        tiny(&to, more).success();
        files(&to)
    };
    let first = made("a", &["--seed", "7"]);
    let names: Vec<&str> = first.iter().map(|(name, _)| name.as_str()).collect();
    let all = [
        "config.json",
        "dense.safetensors",
        "experts.ansx",
        "tokenizer.json",
        "usage.txt",
    ];
    assert_eq!(names, all);
    assert!(made("b", &["--seed", "7"]) == first);
    let other = made("c", &["--seed", "8"]);
    for i in [1, 2, 4] {
        assert!(other[i] != first[i], "{}", first[i].0);
    }
    let even = made(
        "d",
        &["--skew", "none", "--layers", "2", "--experts", "int4-g64"],
    );
    let usage = String::from_utf8(even[4].1.clone()).unwrap();
    assert!(usage.starts_with("# ansatz usage 1\n# tokens 2048\n1 0 "));
    assert_eq!(usage.lines().count(), 2 + 32);
}

/// One layer more, which drafts; tokens are those without it.
#[test]
fn the_layer_that_drafts_may_be_there() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    tiny(&model, &["--mtp"]).success();
    let run = |more: &[&str]| -> Value {
        let mut command = host(&[&"generate", &"-m", &model, &"-p", &"Hello"]);
        command.args(["-n", "24", "--temp", "0", "--ignore-eos", "--device", "cpu"]);
        let done = command.arg("--json").args(more).assert().success();
        serde_json::from_slice(&done.get_output().stdout).unwrap()
    };
    let (alone, drafted) = (run(&[]), run(&["--speculate", "2"]));
    assert_eq!(alone["token_ids"].as_array().unwrap().len(), 24);
    assert_eq!(alone["token_ids"], drafted["token_ids"]);
    assert!(drafted["speculation"]["drafted"].as_u64().unwrap() > 20);
    host(&[&"doctor", &"-m", &model, &"--deep"])
        .assert()
        .success();
}

/// Symbols and blocks as `host pack` takes them.
#[test]
fn the_coding_may_be_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let inspect = |name: &str, more: &[&str]| -> String {
        let model = dir.path().join(name);
        tiny(&model, more).success();
        let archive = model.join("experts.ansx");
        let done = host(&[&"inspect", &archive]).assert().success();
        String::from_utf8(done.get_output().stdout.clone()).unwrap()
    };
    let coding = |name: &str, symbols: &str| inspect(name, &["--symbols", symbols]);
    let (pairs, triples) = (coding("pairs", "pair"), coding("triples", "triple"));
    assert!(
        pairs.contains("pair") && !pairs.contains("triple"),
        "{pairs}"
    );
    assert!(
        triples.contains("triple") && !triples.contains("pair"),
        "{triples}"
    );
    // A matrix of 8,192 nibbles is one block, then two with states of their own.
    let blocks = inspect(
        "blocks",
        &["--symbols", "triple", "--block-nibbles", "4096"],
    );
    let bytes = |text: &str| -> u64 {
        let line = text.lines().find_map(|l| l.strip_prefix("bytes")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    assert!(bytes(&blocks) > bytes(&triples), "{blocks}\n{triples}");
    // Rates are of experts that are coded so.
    let cache = dir.path().join("cache");
    let machine = |name: &str| -> String {
        let mut plan = host(&[&"plan", &"-m", &dir.path().join(name), &"--json"]);
        plan.args(["--device", "emulator"])
            .env("XDG_CACHE_HOME", &cache);
        let out = plan.assert().success().get_output().stdout.clone();
        let found: Value = serde_json::from_slice(&out).unwrap();
        found["machine"].as_str().unwrap().to_owned()
    };
    let (one, two) = (machine("triples"), machine("blocks"));
    assert!(one.contains("rans-triple in 1 "), "{one}");
    // In two blocks the states leave nothing to save.
    assert!(two.contains("raw in 0 "), "{two}");
    assert_eq!(fs::read_dir(cache.join("ansatz")).unwrap().count(), 2);
}

#[test]
fn what_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model");
    let fails = |more: &[&str], what: &str| {
        tiny(&to, more)
            .code(1)
            .stdout(is_empty())
            .stderr(contains(what).and(predicate::function(|s: &str| s.lines().count() == 1)));
    };
    fails(&["--layers", "1"], "--layers 1: expected at least 2");
    fails(
        &["--layers", "2000000"],
        "--layers 2000000: expected at most",
    );
    fails(&["--distinct-experts", "0"], "expected 1 to 96");
    fails(&["--distinct-experts", "97"], "expected 1 to 96");
    tiny(&to, &["--hot", "1.5"]).code(2);
    fails(&["--hot", "0.5", "--experts", "int4-g64"], "plane3");
    fails(&["--skew", "0.01:0.9"], "--skew 0.01:0.9: expected");
    fails(&["--tokenizer", "/nonexistent"], "give a tokenizer.json");
    let broken = dir.path().join("broken.json");
    fs::write(&broken, "{").unwrap();
    fails(
        &["--tokenizer", broken.to_str().unwrap()],
        &format!("{}: file: expected a tokenizer, found ", broken.display()),
    );
    fs::remove_file(broken).unwrap();
    tiny(&to, &["--skew", "much"]).code(2);
    // Nothing is left behind.
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    fs::create_dir(&to).unwrap();
    fs::write(to.join("precious"), "").unwrap();
    fails(&[], "expected a new or empty one");
    assert_eq!(files(&to).len(), 1);
}

/// One run has a place at a time; what others left when they were killed goes.
#[test]
#[cfg(target_os = "linux")]
fn a_place_is_taken_from_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model");
    let unfinished = |name: &str, file: &str| {
        let left = dir.path().join(name);
        fs::create_dir(&left).unwrap();
        fs::write(left.join(file), "").unwrap();
        left
    };
    let fails = |what: &str| {
        tiny(&to, &[])
            .code(1)
            .stdout(is_empty())
            .stderr(contains(what).and(predicate::function(|s: &str| s.lines().count() == 1)));
    };
    let own = unfinished(".model.synth", "unfinished");
    let lock = fs::File::open(&own).unwrap();
    lock.try_lock().unwrap();
    fails("no other `host synth` to the same place, found one that runs");
    // Another's, that runs as well, one that does not, and one of somebody else.
    let beside = unfinished(".beside.synth", "unfinished");
    let beside_lock = fs::File::open(&beside).unwrap();
    beside_lock.try_lock().unwrap();
    let left = unfinished(".left.synth", "unfinished");
    let precious = unfinished(".precious.synth", "diary");
    drop(lock);
    tiny(&to, &[]).success().stderr(
        contains("left.synth: what an interrupted run left").and(contains("model.synth: what")),
    );
    assert!(beside.exists() && precious.join("diary").exists());
    assert!(!left.exists() && !own.exists());
    assert_eq!(files(&to).len(), 5);
    // Files of somebody else where it would work.
    fs::remove_dir_all(&to).unwrap();
    unfinished(".model.synth", "diary");
    fails("expected none, or what an earlier run left");
    fs::remove_dir_all(own).unwrap();

    // Killed, and gone with the next run.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(["synth", "--shape", "glm-4.7-flash", "--layers", "2", "--to"]);
    let mut child = command.arg(&to).spawn().unwrap();
    let begun = dir.path().join(".model.synth/unfinished");
    while !begun.exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    fails("found one that runs");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(begun.exists());
    tiny(&dir.path().join("other"), &[]).success();
    assert!(!begun.exists() && !to.exists());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    tiny(&link, &[])
        .code(1)
        .stderr(contains("found a link to nothing"));
    // A device may have no end.
    fs::remove_file(&link).unwrap();
    for endless in ["/dev/zero", "/dev/null"] {
        tiny(&link, &["--tokenizer", endless])
            .code(1)
            .stderr(contains(format!(
                "{endless}: not a file; give a tokenizer.json"
            )));
        let model = dir.path().join("other");
        host(&[
            &"generate",
            &"-m",
            &model,
            &"-p",
            &"x",
            &"--usage",
            &endless,
        ])
        .assert()
        .code(1)
        .stderr(contains(format!("--usage {endless}: it cannot be written")));
        host(&[&"bench", &"decode", &"-m", &model, &"--replay", &endless])
            .assert()
            .code(1)
            .stderr(contains(format!("{endless}: not a file; give a trace")));
    }
    for nameless in ["/", ".", ".."] {
        tiny(Path::new(nameless), &[])
            .code(1)
            .stderr(contains("expected one with a name"));
    }
}
