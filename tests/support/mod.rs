//! What several integration tests need: where data is, converted models, oracles.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use host::convert::{Options, convert};
use host::expert::ScaleKind;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;

/// Tensors by name: type, shape, little-endian bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

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

/// The tensors of checkpoint `name` of `tests/data`.
pub fn checkpoint(name: &str) -> Tensors {
    tensors(&data().join(format!("{name}-hf/model.safetensors")))
}

/// The tensors of a file.
pub fn tensors(file: &Path) -> Tensors {
    let bytes = std::fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    tensors
        .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect()
}

/// In float32, of weights that bf16 does not hold, as `tools/oracle.py f32` makes it.
pub fn to_f32(mut tensors: Tensors) -> Tensors {
    for (dtype, _, bytes) in tensors.values_mut() {
        if *dtype == Dtype::BF16 {
            let high = bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
            let low = (0..).map(|i: u32| i.wrapping_mul(40503).wrapping_add(12345) & 0xffff);
            let wide = high.zip(low).map(|(high, low)| u32::from(high) << 16 | low);
            (*dtype, *bytes) = (Dtype::F32, wide.flat_map(u32::to_le_bytes).collect());
        }
    }
    tensors
}

/// The same rounded to bf16, routers' biases aside.
pub fn to_bf16(mut tensors: Tensors) -> Tensors {
    for (name, (dtype, _, bytes)) in &mut tensors {
        if *dtype == Dtype::F32 && !name.ends_with("e_score_correction_bias") {
            let narrow = f32s(bytes).into_iter().map(half::bf16::from_f32);
            (*dtype, *bytes) = (Dtype::BF16, narrow.flat_map(|b| b.to_le_bytes()).collect());
        }
    }
    tensors
}

/// Little-endian bytes as f32.
pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    let each = bytes.chunks(4);
    each.map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

/// Writes a checkpoint of these tensors with the configuration of `name`.
pub fn write_checkpoint(dir: &Path, name: &str, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    let config = data().join(format!("{name}-hf/config.json"));
    std::fs::copy(config, dir.join("config.json")).unwrap();
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
