//! `host pack`, `verify` and `inspect` as a user runs them, and what damage does to `generate`.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use assert_cmd::Command;
use host::expert::ScaleKind;
use predicates::prelude::*;
use predicates::str::{contains, is_empty};
use serde_json::Value;

/// A model directory without an archive, made once.
fn model() -> &'static Path {
    static DIR: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, dir) = DIR.get_or_init(|| {
        let made = support::converted("tiny-dsa", ScaleKind::Row).unwrap();
        let dir = made.path().join("model");
        (made, dir)
    });
    dir
}

fn host(args: &[&dyn AsRef<std::ffi::OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(args);
    command
}

fn packed(to: &Path) -> Vec<u8> {
    host(&[&"pack", &"-m", &model(), &"-o", &to])
        .assert()
        .success()
        .stdout(is_empty())
        .stderr(contains("ratio"));
    fs::read(to).unwrap()
}

/// A failure that one line explains, the last and the only one that does, with nothing on stdout.
fn fails(mut command: Command, what: &str) {
    command
        .assert()
        .code(1)
        .stdout(is_empty())
        .stderr(contains(what).and(predicate::function(|s: &str| {
            let errors = s.lines().filter(|l| l.starts_with("error: ")).count();
            errors == 1 && s.lines().last().is_some_and(|l| l.starts_with("error: "))
        })));
}

#[test]
fn pack_verify_inspect() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.ansx");
    packed(&file);
    host(&[&"verify", &file, &"-m", &model()])
        .assert()
        .success()
        .stdout(is_empty())
        .stderr(contains("the model's raw experts"));

    let run = |args: &[&dyn AsRef<std::ffi::OsStr>]| -> Value {
        let out = host(args).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&out).unwrap()
    };
    let json = run(&[&"inspect", &file, &"--json"]);
    assert_eq!(json["version"], 1);
    assert_eq!(json["file_bytes"], fs::metadata(&file).unwrap().len());
    for layer in json["layers"].as_array().unwrap() {
        for m in layer["matrices"].as_array().unwrap() {
            assert!(m["bound"].as_f64().unwrap() > 0.5);
            assert!(m["ratio"].as_f64().unwrap() <= 1.0);
            assert_eq!(m["scale_ratio"], 0.5);
        }
    }
    host(&[&"inspect", &file])
        .assert()
        .success()
        .stdout(contains("entropy").and(contains("gate_proj")));
    let json = run(&[&"verify", &file, &"--json"]);
    assert!(json["records"].as_u64().unwrap() > 0);
    let quick = run(&[&"verify", &file, &"--quick", &"--json"]);
    assert_eq!(quick["records"], json["records"]);
    assert_eq!(quick["compared_with"], "checksums");

    let other = dir.path().join("b.ansx");
    let json = run(&[
        &"pack",
        &"-m",
        &model(),
        &"-o",
        &other,
        &"--codec",
        &"rans",
        &"--symbols",
        &"triple",
        &"--json",
    ]);
    assert_eq!(json["symbols"], "triple");
    assert_eq!(json["file_bytes"], fs::metadata(&other).unwrap().len());
    host(&[&"verify", &other, &"-m", &model()])
        .assert()
        .success();
    // The fingerprint stands for the raw experts where those are gone.
    let bare = dir.path().join("bare");
    fs::create_dir(&bare).unwrap();
    for name in ["config.json", "dense.safetensors"] {
        fs::copy(model().join(name), bare.join(name)).unwrap();
    }
    host(&[&"verify", &other, &"-m", &bare])
        .assert()
        .success()
        .stderr(contains("the model's fingerprint"));
}

fn packs(args: &[&dyn AsRef<std::ffi::OsStr>], out: &Path) -> (Value, String) {
    let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"pack", &"-m"];
    let model = model();
    all.extend([
        &model as &dyn AsRef<std::ffi::OsStr>,
        &"-o",
        &out,
        &"--json",
    ]);
    all.extend(args);
    let done = host(&all).assert().success();
    host(&[&"verify", &out, &"-m", &model]).assert().success();
    host(&[&"inspect", &out]).assert().success();
    let done = done.get_output();
    (
        serde_json::from_slice(&done.stdout).unwrap(),
        String::from_utf8(done.stderr.clone()).unwrap(),
    )
}

#[test]
fn the_target_chooses_symbols() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.ansx");
    for (target, symbols, room) in [
        ("sm_90", "triple", "triples: with 227 KiB"),
        ("sm_120", "pair", "pairs: with 99 KiB"),
    ] {
        let (json, why) = packs(&[&"--target", &target], &file);
        assert_eq!(json["symbols"], symbols);
        assert!(why.contains(room) && why.contains(target), "{why}");
        assert_eq!(why.lines().count(), 1, "{why}");
    }
    let (json, why) = packs(&[&"--target", &"sm_90", &"--symbols", &"pair"], &file);
    assert_eq!((json["symbols"].as_str(), why.as_str()), (Some("pair"), ""));
    let (_, why) = packs(&[], &file);
    assert!(
        why.contains(" in this machine") || why.contains("there is no GPU here"),
        "{why}"
    );
    host(&[&"pack", &"-m", &model(), &"--target", &"sm_13"])
        .assert()
        .code(2)
        .stderr(contains("sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"));
}

#[test]
fn codecs_and_the_hot_set() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.ansx");
    let matrices = |json: &Value, codec: &str| {
        json["gate_up"][codec].as_u64().unwrap() + json["down"][codec].as_u64().unwrap()
    };
    let (json, why) = packs(&[&"--codec", &"raw"], &file);
    assert_eq!((json["tables"].as_u64(), why.as_str()), (Some(0), ""));
    assert_eq!(matrices(&json, "rans") + matrices(&json, "plane3"), 0);
    let (json, _) = packs(&[&"--codec", &"plane3"], &file);
    assert_eq!(matrices(&json, "rans"), 0);

    let profile = dir.path().join("profile.txt");
    let inspected = host(&[&"inspect", &file, &"--json"]).assert().success();
    let inspected: Value = serde_json::from_slice(&inspected.get_output().stdout).unwrap();
    let layer = inspected["layers"][0]["layer"].as_u64().unwrap();
    let lines = format!("# made by hand\n{layer} 0 5\n{layer} 2 9\n{layer} 3 0\n");
    fs::write(&profile, lines).unwrap();
    let both = format!("{}:1", profile.display());
    for hot in [profile.as_os_str(), both.as_ref()] {
        packs(&[&"--hot", &hot, &"--block-nibbles", &"20000"], &file);
    }
    let pack = |args: &[&dyn AsRef<std::ffi::OsStr>]| {
        let model = model();
        let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"pack", &"-m", &model, &"-o", &file];
        all.extend(args);
        host(&all)
    };
    fails(pack(&[&"--hot", &"3"]), "there is no usage.txt in ");
    fails(pack(&[&"--hot", &"none.txt"]), "none.txt: No such file");
    fails(
        pack(&[&"--codec", &"plane3", &"--hot", &profile]),
        "drop --hot",
    );
    fs::write(&profile, format!("{layer} 0 5\n{layer} 4000 9\n")).unwrap();
    fails(
        pack(&[&"--hot", &profile]),
        ", expert 4000, which the model has not",
    );
    fs::write(&profile, "1 0 5\n1 zero 9\n").unwrap();
    fails(
        pack(&[&"--hot", &profile]),
        "profile.txt: line 2: expected layer, expert and count",
    );
    pack(&[&"--block-nibbles", &"0"]).assert().code(2);
}

#[test]
fn resuming_says_what_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.ansx");
    let partial = dir.path().join("a.ansx.partial");
    let pack = |args: &[&dyn AsRef<std::ffi::OsStr>]| {
        let model = model();
        let mut all: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"pack", &"-m", &model, &"-o", &file];
        all.extend(args);
        host(&all)
    };
    pack(&[&"--resume"])
        .assert()
        .success()
        .stderr(contains("a.ansx.partial: not there; beginning anew"));
    let whole = fs::read(&file).unwrap();
    fs::write(&partial, vec![7; 5000]).unwrap();
    fails(
        pack(&[&"--resume", &"--symbols", &"pair"]),
        "a.ansx.partial: it is of other experts, other options or another version",
    );
    pack(&[])
        .assert()
        .success()
        .stderr(contains("is dropped; --resume would go on with it"));
    assert!(fs::read(&file).unwrap() == whole && !partial.exists());
}

#[test]
fn damage_is_exit_code_1_and_names_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.ansx");
    let good = packed(&file);
    let bad = dir.path().join("bad.ansx");
    let verify = |bytes: &[u8], what: &str| {
        fs::write(&bad, bytes).unwrap();
        fails(host(&[&"verify", &bad]), what);
    };
    for at in [0, 9, 17, 60, 200, 240, 300] {
        let mut b = good.clone();
        b[at] ^= 1;
        verify(&b, "bad.ansx: ");
    }
    let mut b = good.clone();
    let last = b.len() - 100;
    b[last] ^= 128;
    verify(&b, ": checksum: expected");
    fails(host(&[&"verify", &bad, &"--quick"]), ": checksum: expected");
    verify(&good[..good.len() - 1], "record of layer ");
    // Sizes that no file can have: refused before anything is allocated for them.
    for (at, len) in [
        (16, 8),
        (24, 4),
        (28, 4),
        (36, 4),
        (40, 4),
        (44, 4),
        (56, 8),
        (72, 8),
    ] {
        let mut b = good.clone();
        b[at..at + len].fill(0xff);
        verify(&b, "bad.ansx: header: ");
    }
    // Of another model.
    let g64 = support::converted("tiny-dsa", ScaleKind::G64).unwrap();
    fs::write(&bad, &good).unwrap();
    fails(
        host(&[&"verify", &bad, &"-m", &g64.path().join("model")]),
        "header: shape: expected",
    );
    verify(
        &good[..100],
        "header: length: expected 256 bytes, found 100 bytes",
    );
    verify(&[], "header: ");
    fails(
        host(&[&"inspect", &dir.path().join("none.ansx")]),
        "cannot open",
    );
    for command in ["verify", "inspect"] {
        let not_a_file = host(&[&command, &model()]);
        fails(
            not_a_file,
            "not a file; give the archive, such as experts.ansx",
        );
    }
    host(&[&"verify"]).assert().code(2);
    host(&[&"pack", &"-m", &model(), &"--codec", &"zip"])
        .assert()
        .code(2);
}

#[test]
fn generate_refuses_a_damaged_record() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "config.json",
        "dense.safetensors",
        "generation_config.json",
        "tokenizer.json",
    ] {
        let from = model().join(name);
        if from.exists() {
            fs::copy(from, dir.path().join(name)).unwrap();
        }
    }
    let file = dir.path().join("experts.ansx");
    let good = packed(&file);
    let run = |tier: &str| {
        host(&[
            &"generate",
            &"-m",
            &dir.path(),
            &"--prompt-ids",
            &"5,6,7",
            &"-n",
            &"1",
            &"--device",
            &"cpu",
            &"--tier",
            &tier,
            &"--ignore-eos",
        ])
    };
    run("ans").assert().success();
    for (len, at, what) in [
        (good.len(), good.len() / 2, ": checksum: "),
        (good.len() - 300, 1000, "record of layer "),
    ] {
        let mut b = good[..len].to_vec();
        if len == good.len() {
            b[at] ^= 8;
        }
        fs::write(&file, &b).unwrap();
        for tier in ["ans", "raw"] {
            run(tier)
                .assert()
                .code(1)
                .stdout(is_empty())
                .stderr(contains("experts.ansx: record of layer ").and(contains(what)));
        }
    }
}

#[test]
fn what_cannot_be_packed_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a.ansx");
    fails(
        host(&[&"pack", &"-m", &dir.path(), &"-o", &out]),
        "config.json: cannot read",
    );
    fs::copy(model().join("config.json"), dir.path().join("config.json")).unwrap();
    fails(
        host(&[&"pack", &"-m", &dir.path(), &"-o", &out]),
        "experts.safetensors: cannot open: No such file or directory (os error 2); it needs a model \
         directory with raw experts, as `host convert` makes it",
    );
    let nowhere = dir.path().join("none/a.ansx");
    let no_place = host(&[&"pack", &"-m", &model(), &"-o", &nowhere]);
    fails(no_place, "choose a place that can be written");
    let a_folder = host(&[&"pack", &"-m", &model(), &"-o", &dir.path()]);
    fails(a_folder, "choose a place that can be written");
    let special = tempfile::tempdir().unwrap();
    let pipe = support::pipe(special.path());
    let a_pipe = host(&[&"pack", &"-m", &model(), &"-o", &pipe]);
    fails(a_pipe, "not a file; choose a place that can be written");
    // Cut in the middle of the data.
    let raw = fs::read(model().join("experts.safetensors")).unwrap();
    fs::write(
        dir.path().join("experts.safetensors"),
        &raw[..raw.len() / 2],
    )
    .unwrap();
    fails(
        host(&[&"pack", &"-m", &dir.path(), &"-o", &out]),
        "host convert",
    );
    // A config that asks for other sizes.
    fs::write(dir.path().join("experts.safetensors"), &raw).unwrap();
    let config = fs::read_to_string(model().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["hidden_size"] = 64.into();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fails(
        host(&[&"pack", &"-m", &dir.path(), &"-o", &out]),
        "it does not belong to this config.json",
    );
    let left: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn ctrl_c_ends_verify_and_inspect() {
    let archive = host::model::default_directory()
        .unwrap()
        .join("experts.ansx");
    for args in [&["verify"][..], &["verify", "--quick"], &["inspect"]] {
        // What is done before the signal comes says nothing: once more.
        let in_time = (0..200).find_map(|_| {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_host"));
            command
                .args(args)
                .arg(&archive)
                .env("RAYON_NUM_THREADS", "1");
            let (out, _) = support::interrupted(&mut command, std::time::Duration::ZERO);
            (out.status.code() != Some(0)).then_some(out)
        });
        let out = in_time.expect("one of them is interrupted");
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(out.stdout.is_empty());
        assert_eq!(String::from_utf8_lossy(&out.stderr), "error: interrupted\n");
    }
}

#[test]
fn what_hot_names_is_something() {
    for hot in ["", ":4"] {
        host(&[&"pack", &"-m", &model(), &"--hot", &hot])
            .assert()
            .code(2)
            .stderr(contains("expected FILE, FILE:N or N"));
    }
}

/// A disk that is full half-way: what is there stays, and the error says how to go on.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, file) = (dir.path().join("a.ansx"), dir.path().join("b.ansx"));
    let bytes = packed(&whole).len();
    let pack = |blocks: usize| {
        let limited = support::full_at(blocks);
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &limited,
            env!("CARGO_BIN_EXE_host"),
            "pack",
            "--resume",
        ]);
        command.arg("-m").arg(model()).arg("-o").arg(&file);
        command.env("RAYON_NUM_THREADS", "1");
        command
    };
    // Of 64 experts 32 come first.
    fails(
        pack(bytes / 4 / 512),
        "choose a place that can be written and has the space",
    );
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    fails(
        pack(bytes * 3 / 4 / 512),
        "the same command with --resume goes on",
    );
    pack(bytes)
        .assert()
        .success()
        .stderr(contains("32 of them kept"));
    assert!(fs::read(&file).unwrap() == fs::read(&whole).unwrap());
}

/// Where tables were made for matrices that then did not shrink enough, the summary says so.
#[test]
fn tables_without_users_are_said() {
    let made = support::converted("tiny-lite", ScaleKind::Row).unwrap();
    host(&[&"pack", &"-m", &made.path().join("model")])
        .assert()
        .success()
        .stderr(contains("24 raw").and(contains("1 table that no matrix came to use, 272 bytes")));
}
