//! What several integration tests need: where data is, converted models, oracles.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use host::convert::{Options, convert};
use host::expert::ScaleKind;
use serde::Deserialize;

/// `tests/data` of the repository, or `$ANSATZ_TEST_DATA` in a bundle.
pub fn data() -> PathBuf {
    match std::env::var_os("ANSATZ_TEST_DATA") {
        Some(dir) => dir.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data"),
    }
}

/// The directory of data too large for the repository, where there is one.
pub fn shared() -> Option<PathBuf> {
    let dir = match std::env::var_os("ANSATZ_SHARED") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
    };
    dir.is_dir().then_some(dir)
}

/// A model directory made from a checkpoint; `None`, loudly, where the checkpoint is not here.
pub fn converted(model: &str, scales: ScaleKind) -> Option<tempfile::TempDir> {
    let here = data().join(format!("{model}-hf"));
    let checkpoint = if here.is_dir() {
        here
    } else {
        match shared() {
            Some(dir) => dir.join("models").join(format!("{model}-hf")),
            None => {
                eprintln!(
                    "SKIPPED: no {model} checkpoint; set ANSATZ_SHARED to where models/{model}-hf is"
                );
                return None;
            }
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let options = Options::new(scales);
    convert(&checkpoint, &dir.path().join("model"), &options, |_, _| ()).unwrap();
    Some(dir)
}

/// An oracle file.
#[derive(Deserialize)]
pub struct Oracle {
    pub val_nll: Option<f64>,
    pub cases: Vec<Case>,
}

/// One prompt of an oracle file.
#[derive(Deserialize)]
pub struct Case {
    pub prompt: Option<String>,
    pub input_ids: Vec<u32>,
    pub last_logits: Vec<f32>,
    #[serde(default)]
    pub hidden_last_token: Vec<Vec<f32>>,
    pub greedy: Vec<u32>,
    pub greedy_margin: Vec<f32>,
    /// What a layer that drafts makes of the first greedy token, and of its own first draft.
    #[serde(default)]
    pub drafts: Vec<u32>,
    #[serde(default)]
    pub draft_logits: Vec<Vec<f32>>,
}

/// The oracle of a model and scale kind.
pub fn oracle(model: &str, scales: ScaleKind) -> Oracle {
    oracle_file(&match scales {
        ScaleKind::Row => format!("{model}-row"),
        ScaleKind::G64 => format!("{model}-g64"),
    })
}

/// The oracle of this name.
pub fn oracle_file(name: &str) -> Oracle {
    let file = data().join("oracles").join(format!("{name}.json"));
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// Root mean square of `a - b` over the standard deviation of `b`.
pub fn deviation(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let n = b.len() as f64;
    let mean = b.iter().map(|x| *x as f64).sum::<f64>() / n;
    let var = b.iter().map(|x| (*x as f64 - mean).powi(2)).sum::<f64>() / n;
    let err = a
        .iter()
        .zip(b)
        .map(|(a, b)| (*a as f64 - *b as f64).powi(2))
        .sum::<f64>()
        / n;
    (err / var).sqrt()
}

/// A named pipe in `folder`: stands for the devices that no command may replace by a file.
pub fn pipe(folder: &Path) -> PathBuf {
    let pipe = folder.join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    pipe
}

/// What a command comes to that gets SIGINT `later` than it began to listen for it, and how long it takes
/// from there on.
#[cfg(target_os = "linux")]
pub fn interrupted(
    command: &mut std::process::Command,
    later: std::time::Duration,
) -> (std::process::Output, std::time::Duration) {
    use std::process::Stdio;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let listens = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
        // Of a child that is at its end there is no such line.
        caught.is_none_or(|c| u64::from_str_radix(c.trim(), 16).unwrap() & 2 != 0)
    };
    while !listens() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    std::thread::sleep(later);
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    let start = std::time::Instant::now();
    assert!(kill.unwrap().success());
    (child.wait_with_output().unwrap(), start.elapsed())
}

/// A command line for sh that runs another one with files of so many times 512 bytes at most: in the place
/// of a full disk.
#[cfg(target_os = "linux")]
pub fn full_at(blocks: usize) -> String {
    format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"")
}
