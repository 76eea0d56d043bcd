//! The forward pass against what Hugging Face transformers computes.

mod suite;
mod support;

use std::fs;
use std::path::Path;

use host::backend::cpu::Cpu;
use host::backend::reference::Reference;
use host::backend::{KvFormat, LoadExperts};
use host::convert::{Options as Conversion, convert};
use host::engine::{Device, Options};
use host::eval::{eval, read_ids};
use host::expert::{Form, ScaleKind};
use host::model::{Config, Model, Source, Wanted, default_directory};
use host::sample::greedy;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use support::{Case, converted, deviation, oracle};

/// Logits may deviate by this share of their standard deviation: two orders of summation in f32,
/// and activations of 16 bits at the experts' inputs.
const CLOSE: f64 = 1e-3;
/// One case a file may take the other branch at a near tie of router or indexer.
const BRANCHED: f64 = 2e-2;
/// Steps whose two best logits are closer than this are no test of anything.
const MARGIN: f32 = 0.01;

fn model<B: LoadExperts>(backend: B, dir: &Path) -> Model<B> {
    let config = Config::read(dir).unwrap();
    let source = Source::open(dir, &config, None).unwrap();
    Model::load(backend, dir, config, &source, Form::Fused, |_| ()).unwrap()
}

/// What a case gave.
struct Outcome {
    deviation: f64,
    /// Largest of a hidden state.
    hidden: f64,
    /// Steps with a clear margin whose token is another one.
    wrong: usize,
    /// All steps whose token is another one.
    differ: usize,
}

fn run<B: LoadExperts>(model: &Model<B>, case: &Case) -> Outcome {
    let mut session = model
        .session(case.input_ids.len() + case.greedy.len(), Wanted::Last)
        .unwrap();
    let mut trace = Vec::new();
    let mut logits = model
        .forward_traced(
            &mut session,
            &case.input_ids,
            Wanted::Last,
            Some(&mut trace),
        )
        .unwrap();
    let deviation_of_logits = deviation(&logits, &case.last_logits);
    let hidden = trace.iter().zip(&case.hidden_last_token);
    let hidden = hidden.fold(0.0, |d: f64, (ours, theirs)| d.max(deviation(ours, theirs)));
    // The oracle's own tokens are fed, so that every step is compared in the same context.
    let (mut wrong, mut differ) = (0, 0);
    for (token, margin) in case.greedy.iter().zip(&case.greedy_margin) {
        if greedy(&logits) != *token {
            differ += 1;
            wrong += usize::from(*margin >= MARGIN);
        }
        logits = model
            .forward(&mut session, &[*token], Wanted::Last)
            .unwrap();
    }
    Outcome {
        deviation: deviation_of_logits,
        hidden,
        wrong,
        differ,
    }
}

fn compare<B: LoadExperts>(backend: B, dir: &Path, name: &str, scales: ScaleKind, cases: usize) {
    let model = model(backend, dir);
    let mut branched = 0;
    for case in oracle(name, scales).cases.iter().take(cases) {
        let n = case.input_ids.len();
        let out = run(&model, case);
        eprintln!(
            "{name} {scales:?}, {n} tokens: rms {:.2e}, {} wrong",
            out.deviation, out.wrong
        );
        assert!(out.deviation <= BRANCHED, "{n} tokens: {:e}", out.deviation);
        assert!(out.hidden < BRANCHED, "{n} tokens: {:e}", out.hidden);
        if out.deviation > CLOSE || out.wrong > 0 {
            branched += 1;
        }
    }
    assert!(branched <= 1, "{branched} cases left the oracle");
}

fn cpu() -> Cpu {
    Cpu::new().unwrap()
}

#[test]
fn tiny_row() {
    let made = converted("tiny-dsa", ScaleKind::Row).unwrap();
    let dir = made.path().join("model");
    compare(cpu(), &dir, "tiny-dsa", ScaleKind::Row, usize::MAX);
    compare(Reference, &dir, "tiny-dsa", ScaleKind::Row, usize::MAX);
}

#[test]
fn tiny_g64() {
    let made = converted("tiny-dsa", ScaleKind::G64).unwrap();
    let dir = made.path().join("model");
    compare(cpu(), &dir, "tiny-dsa", ScaleKind::G64, usize::MAX);
    compare(Reference, &dir, "tiny-dsa", ScaleKind::G64, 3);
}

/// Latent attention without an indexer; grouped-query attention with a softmax router.
#[test]
fn families() {
    for name in ["tiny-lite", "tiny-qwen3"] {
        let made = converted(name, ScaleKind::Row).unwrap();
        let dir = made.path().join("model");
        compare(cpu(), &dir, name, ScaleKind::Row, usize::MAX);
        compare(Reference, &dir, name, ScaleKind::Row, 3);
        cuda_compare(&dir, name, ScaleKind::Row);
        // The kernels give the CPU's bits.
        let ids: Vec<u32> = (0..9).map(|i| (i * 53 + 5) % 256).collect();
        let cpu = logits(cpu(), &dir, &ids);
        assert_eq!(logits(Reference, &dir, &ids), cpu, "{name}");
        let emulator = suite::emulator().unwrap();
        assert_eq!(logits(emulator, &dir, &ids), cpu, "{name}");
    }
}

/// Checkpoints in float32, of weights that bf16 does not hold: every tensor stays what it is, and every token is
/// that of transformers, however close the next one.
#[test]
fn f32_checkpoints_give_all_tokens() {
    let (mut all, mut rounded_differ) = (0, 0);
    for name in ["tiny-dsa", "tiny-lite", "tiny-qwen3"] {
        let wide = support::to_f32(support::checkpoint(name));
        let made = |tensors: &support::Tensors| {
            let dir = tempfile::tempdir().unwrap();
            support::write_checkpoint(dir.path(), name, tensors);
            let options = Conversion::new(ScaleKind::Row);
            convert(dir.path(), &dir.path().join("model"), &options, |_, _| ()).unwrap();
            dir
        };
        let (kept, narrow) = (made(&wide), made(&support::to_bf16(wide.clone())));
        let dir = kept.path().join("model");
        let file = fs::read(dir.join("dense.safetensors")).unwrap();
        for (tensor, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
            assert_eq!(view.dtype(), Dtype::F32, "{tensor}");
            assert!(view.data() == wide[&tensor].2, "{tensor}");
        }
        let oracle = support::oracle_file(&format!("{name}-f32"));
        let exact = |(differ, far): (usize, f64)| {
            assert!(
                differ == 0 && far < CLOSE,
                "{name}: {differ} others, {far:e}"
            );
        };
        exact(differing(cpu(), &dir, &oracle.cases));
        exact(differing(Reference, &dir, &oracle.cases[..2]));
        match suite::cuda() {
            Ok(cuda) => exact(differing(cuda, &dir, &oracle.cases)),
            Err(why) => eprintln!("skipped: {why}"),
        }
        all += oracle.cases.iter().map(|c| c.greedy.len()).sum::<usize>();
        let (differ, far) = differing(cpu(), &narrow.path().join("model"), &oracle.cases);
        assert!(far > CLOSE, "{name}: an oracle that cannot tell");
        rounded_differ += differ;
        let ids: Vec<u32> = (0..22).map(|i| (i * 53 + 5) % 256).collect();
        let cpu = logits(cpu(), &dir, &ids);
        assert_eq!(logits(Reference, &dir, &ids), cpu, "{name}");
        let emulator = suite::emulator().unwrap();
        assert_eq!(logits(emulator, &dir, &ids), cpu, "{name}");
        if let Ok(cuda) = suite::cuda() {
            assert_eq!(logits(cuda, &dir, &ids), cpu, "{name}");
        }
    }
    eprintln!("all of {all} tokens; {rounded_differ} are others with weights rounded to bf16");
    assert!(rounded_differ > 0);
}

/// How many tokens of an oracle's cases are others, and the largest deviation of logits and hidden states.
fn differing<B: LoadExperts>(backend: B, dir: &Path, cases: &[Case]) -> (usize, f64) {
    let model = model(backend, dir);
    cases
        .iter()
        .fold((0, 0.0), |(differ, far): (usize, f64), case| {
            let out = run(&model, case);
            let n = case.input_ids.len();
            let Outcome {
                deviation, hidden, ..
            } = out;
            eprintln!("{n} tokens: rms {deviation:.2e}, {} others", out.differ);
            (differ + out.differ, far.max(deviation).max(hidden))
        })
}

/// The head that is the embedding table, of f32 too: what a copy of it gives.
#[test]
fn a_tied_head_is_the_embedding() {
    let mut tensors = support::to_f32(support::checkpoint("tiny-qwen3"));
    let table = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), table);
    let from = tempfile::tempdir().unwrap();
    let made = |tensors: &support::Tensors, tied: bool| {
        support::write_checkpoint(from.path(), "tiny-qwen3", tensors);
        let file = from.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        config["tie_word_embeddings"] = tied.into();
        fs::write(&file, config.to_string()).unwrap();
        let dir = from.path().join(format!("tied-{tied}"));
        let options = Conversion::new(ScaleKind::Row);
        convert(from.path(), &dir, &options, |_, _| ()).unwrap();
        dir
    };
    let copied = made(&tensors, false);
    tensors.remove("lm_head.weight");
    let tied = made(&tensors, true);
    let ids: Vec<u32> = (0..9).map(|i| (i * 53 + 5) % 256).collect();
    let want = logits(cpu(), &copied, &ids);
    assert_eq!(logits(cpu(), &tied, &ids), want);
    assert_eq!(logits(Reference, &tied, &ids), want);
    assert_eq!(logits(suite::emulator().unwrap(), &tied, &ids), want);
}

/// `q_lora_rank` null: one matrix gives the queries.
#[test]
fn queries_without_compression() {
    let from = tempfile::tempdir().unwrap();
    let hf = support::data().join("tiny-lite-hf");
    let mut config: Value =
        serde_json::from_slice(&fs::read(hf.join("config.json")).unwrap()).unwrap();
    config["q_lora_rank"] = Value::Null;
    fs::write(from.path().join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(hf.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let head = file.tensor("lm_head.weight").unwrap();
    let mut tensors: Vec<_> = file.tensors();
    tensors.retain(|(name, _)| !name.contains(".self_attn.q_"));
    // Rows of the head from row 16 l on, 64 columns of bf16 each, stand for queries of layer l.
    let (rows, cols) = (4 * (24 + 16), 64);
    for l in 0..3 {
        let data = &head.data()[2 * cols * 16 * l..][..2 * cols * rows];
        let queries = TensorView::new(Dtype::BF16, vec![rows, cols], data).unwrap();
        tensors.push((format!("model.layers.{l}.self_attn.q_proj.weight"), queries));
    }
    let file = from.path().join("model.safetensors");
    safetensors::serialize_to_file(tensors, None, &file).unwrap();
    let dir = from.path().join("model");
    let options = Conversion::new(ScaleKind::Row);
    convert(from.path(), &dir, &options, |_, _| ()).unwrap();
    compare(cpu(), &dir, "tiny-lite-q", ScaleKind::Row, usize::MAX);
    cuda_compare(&dir, "tiny-lite-q", ScaleKind::Row);
    let ids: Vec<u32> = (0..9).map(|i| (i * 53 + 5) % 256).collect();
    let cpu = logits(cpu(), &dir, &ids);
    assert_eq!(logits(Reference, &dir, &ids), cpu);
    assert_eq!(logits(suite::emulator().unwrap(), &dir, &ids), cpu);
}

/// Bits of all tokens' logits, the first five in one batch.
fn logits<B: LoadExperts>(backend: B, dir: &Path, ids: &[u32]) -> Vec<u32> {
    let model = model(backend, dir);
    let mut session = model.session(ids.len(), Wanted::All).unwrap();
    let mut out = Vec::new();
    for part in [&ids[..5], &ids[5..6], &ids[6..]] {
        out.extend(model.forward(&mut session, part, Wanted::All).unwrap());
    }
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn sotu_row() {
    let dir = default_directory().expect("models/sotu-row of the repository");
    compare(cpu(), &dir, "sotu", ScaleKind::Row, usize::MAX);
}

#[test]
fn sotu_g64() {
    if let Some(made) = converted("sotu", ScaleKind::G64) {
        let dir = made.path().join("model");
        compare(cpu(), &dir, "sotu", ScaleKind::G64, usize::MAX);
    }
}

/// The same on the GPU, where there is one (`ANSATZ_REQUIRE_CUDA` makes its absence a failure).
fn cuda_compare(dir: &Path, name: &str, scales: ScaleKind) {
    match suite::cuda() {
        Ok(backend) => compare(backend, dir, name, scales, usize::MAX),
        Err(why) => eprintln!("skipped: {why}"),
    }
}

#[test]
fn cuda_tiny() {
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let made = converted("tiny-dsa", scales).unwrap();
        cuda_compare(&made.path().join("model"), "tiny-dsa", scales);
    }
}

#[test]
fn cuda_sotu_row() {
    let dir = default_directory().expect("models/sotu-row of the repository");
    cuda_compare(&dir, "sotu", ScaleKind::Row);
}

#[test]
fn cuda_sotu_g64() {
    if let Some(made) = converted("sotu", ScaleKind::G64) {
        cuda_compare(&made.path().join("model"), "sotu", ScaleKind::G64);
    }
}

/// Batches of any size give the same bits, also where a batch crosses the indexer's top-k.
#[test]
fn batches_change_no_bit() {
    let made = converted("tiny-dsa", ScaleKind::Row).unwrap();
    let model = model(cpu(), &made.path().join("model"));
    let ids: Vec<u32> = (0..60).map(|i| (i * 97 + 5) % 512).collect();
    let logits = |sizes: &[usize]| {
        let mut session = model.session(ids.len(), Wanted::All).unwrap();
        let mut at = 0;
        let mut out = Vec::new();
        for n in sizes {
            let batch = &ids[at..at + n];
            out.extend(model.forward(&mut session, batch, Wanted::All).unwrap());
            at += n;
        }
        assert_eq!(at, ids.len());
        out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let whole = logits(&[60]);
    assert_eq!(logits(&[1; 60]), whole);
    assert_eq!(logits(&[7, 9, 1, 13, 30]), whole);
}

/// Mean negative log-likelihood of the held-out text, 20 windows of 512.
fn held_out(dir: &Path, want: f64) {
    let options = Options {
        device: Device::Cpu,
        tier: None,
        form: Form::Fused,
        devices: vec![0],
        request: Default::default(),
        placed: false,
        positions: 64,
        speculate: 0,
        repin: 0,
        kv: KvFormat::F32,
        batch: host::model::BATCH,
    };
    let mut engine = host::engine::open(dir, options, |_, _| ()).unwrap();
    let ids = read_ids(&support::data().join("val.u16")).unwrap();
    let score = eval(engine.as_mut(), &ids, 512, Some(20), |_, _| ()).unwrap();
    eprintln!("{:.6} nats, expected {want}", score.nll);
    assert_eq!((score.tokens, score.windows), (10240, 20));
    assert!((score.nll - want).abs() <= 0.002, "{}", score.nll);
}

#[test]
fn held_out_row() {
    let dir = default_directory().expect("models/sotu-row of the repository");
    held_out(&dir, 3.6419);
}

#[test]
fn held_out_g64() {
    if let Some(made) = converted("sotu", ScaleKind::G64) {
        held_out(&made.path().join("model"), 3.6380);
    }
}
