//! The CPU back end, each arm that the processor has: the operators' suite, and what only the CPU
//! does.

mod suite;

use host::backend::cpu::{Cpu, CpuError};
use host::backend::{Backend, LayerExperts, LoadExperts};
use host::bench::synth;
use host::expert::{ExpertShape, Form, ScaleKind};
use host::simd::Arm;

suite! {
    baseline = host::backend::cpu::Cpu::with_arm(host::simd::Arm::Baseline);
    avx2 = host::backend::cpu::Cpu::with_arm(host::simd::Arm::Avx2);
    avx512 = host::backend::cpu::Cpu::with_arm(host::simd::Arm::Avx512);
}

/// Coded experts of several segments, in blocks as large as archives have and enough for threads:
/// too many for the emulator.
#[test]
fn large_coded_experts() {
    for arm in Arm::ALL.into_iter().filter(|arm| arm.supported()) {
        suite::experts::large_coded_experts(&Cpu::with_arm(arm).unwrap());
    }
}

#[test]
fn more_than_there_is_is_an_error() {
    let cpu = Cpu::with_arm(Arm::Baseline).unwrap();
    for len in [usize::MAX, usize::MAX / 4, 1 << 60] {
        let error = cpu.alloc::<f32>(len).err().unwrap();
        assert!(matches!(error, CpuError::Memory { .. }), "{error}");
    }
}

#[test]
fn wrong_experts_are_refused() {
    let cpu = Cpu::with_arm(Arm::Baseline).unwrap();
    let shape = ExpertShape {
        hidden: 128,
        intermediate: 64,
        scales: ScaleKind::Row,
    };
    let good = synth::expert(1, &shape);
    let mut bad = good.clone();
    bad[2].scales.to_mut().pop();
    let error = cpu
        .load_experts(
            LayerExperts::Raw(vec![good.clone(), bad]),
            shape,
            Form::Fused,
        )
        .err()
        .unwrap();
    assert_eq!(
        error.to_string(),
        "expert 1 down_proj: 4096 packed bytes and 127 scales, expected 4096 and 128"
    );
    let shape = ExpertShape {
        hidden: 100,
        ..shape
    };
    let error = cpu
        .load_experts(LayerExperts::Raw(vec![good]), shape, Form::Fused)
        .err()
        .unwrap();
    assert!(error.to_string().contains("100 columns"), "{error}");
}

fn host() -> assert_cmd::Command {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_host"));
    command.env_remove("ANSATZ_CPU");
    command
}

fn json(out: &[u8]) -> serde_json::Value {
    serde_json::from_slice(out).unwrap()
}

#[test]
fn doctor_says_what_there_is() {
    let done = host().args(["doctor", "--json"]).assert().success();
    let found = json(&done.get_output().stdout);
    assert_eq!(found["ok"], true);
    assert_eq!(found["cpu"]["arm"], Arm::best().name());
    assert!(found["model"]["layers"].as_u64().unwrap() > 0);
    let done = host().arg("doctor").assert().success();
    let text = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    assert!(text.contains("`host generate` runs on"), "{text}");
}

#[test]
fn doctor_fails_where_generate_would() {
    let dir = tempfile::tempdir().unwrap();
    let done = host()
        .arg("doctor")
        .arg("-m")
        .arg(dir.path())
        .assert()
        .code(1);
    let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(
        error.lines().count() == 1 && error.contains("config.json"),
        "{error}"
    );
    let done = host()
        .arg("doctor")
        .env("ANSATZ_CPU", "sse9")
        .assert()
        .code(1);
    let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(error.contains("unknown CPU arm `sse9`"), "{error}");
}

/// Stopped by its user, it finds no fault with the model.
#[test]
#[cfg(target_os = "linux")]
fn an_interrupted_doctor_says_so() {
    let child = std::process::Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["doctor", "--deep"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Not before it listens.
    let listens = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
        u64::from_str_radix(caught.unwrap().trim(), 16).unwrap() & 2 != 0
    };
    while !listens() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(out.stdout.is_empty());
    assert_eq!(
        String::from_utf8(out.stderr).unwrap(),
        "error: interrupted\n"
    );
}

#[test]
fn bench_checks_and_times() {
    let bench = |args: &[&str]| {
        let mut command = host();
        command.args([
            "bench",
            "kernels",
            "--shape",
            "256,128",
            "--experts",
            "2",
            "--cache",
            "0",
        ]);
        command.args(["--runs", "2"]).args(args);
        command
    };
    let args = [
        "--device", "cpu", "--scales", "row,g64", "--tokens", "1,3", "--json",
    ];
    let done = bench(&args).assert().success();
    let rows = json(&done.get_output().stdout);
    let rows = rows.as_array().unwrap();
    // Tokens, stages; raw, and unfused and fused of two codecs for row scales, of one for g64.
    assert_eq!(rows.len(), 2 * 4 * ((1 + 2 * 2) + (1 + 2)));
    for row in rows {
        assert_eq!(row["bits_of_difference"], 0);
        assert!(row["raw_equivalent_gb_s"].as_f64().unwrap() > 0.0);
    }
    let done = bench(&["--device", "cpu"]).assert().success();
    let table = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    assert_eq!(table.lines().count(), 2 + 4 * 5, "{table}");
    if host::backend::kernels::CudaDevice::count() == 0 {
        let done = bench(&[]).assert().code(1);
        let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(
            error.lines().count() == 1 && error.contains("--device cpu"),
            "{error}"
        );
    }
    let many = ["--device", "cpu", "--tokens", "32769"];
    let done = bench(&many).assert().code(1);
    let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(error.contains("at most 65536"), "{error}");
    let none = [
        "--device",
        "cpu",
        "--scales",
        "g64",
        "--codec",
        "plane3",
        "--compare",
        "fused",
    ];
    let done = bench(&none).assert().code(1);
    let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(error.contains("nothing to time"), "{error}");
    bench(&["--device", "cpu", "--shape", "100,64"])
        .assert()
        .code(2);
}
