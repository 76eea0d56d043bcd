//! The forward pass against what Hugging Face transformers computes.

mod support;

use host::backend::LoadExperts;
use host::backend::reference::Reference;
use host::expert::{Form, ScaleKind};
use host::model::directory::RawExperts;
use host::model::{Config, Model, Source, Wanted};
use support::{Case, converted, deviation, oracle};

/// Logits may deviate by this share of their standard deviation: two orders of summation in f32,
/// and activations of 16 bits at the experts' inputs.
const CLOSE: f64 = 1e-3;
/// One case a file may take the other branch at a near tie of router or indexer.
const BRANCHED: f64 = 2e-2;
/// Steps whose two best logits are closer than this are no test of anything.
const MARGIN: f32 = 0.01;

fn model<B: LoadExperts>(backend: B, dir: &std::path::Path) -> Model<B> {
    let config = Config::read(dir).unwrap();
    let source = Source::Raw(RawExperts::open(dir, &config).unwrap());
    Model::load(backend, dir, config, &source, Form::Fused, |_| ()).unwrap()
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// What a case gave.
struct Outcome {
    deviation: f64,
    /// Steps with a clear margin whose token is another one.
    wrong: usize,
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
    for (i, (ours, theirs)) in trace.iter().zip(&case.hidden_last_token).enumerate() {
        let d = deviation(ours, theirs);
        assert!(d < BRANCHED, "hidden state {i}: {d:e}");
    }
    // The oracle's own tokens are fed, so that every step is compared in the same context.
    let mut wrong = 0;
    for (token, margin) in case.greedy.iter().zip(&case.greedy_margin) {
        if argmax(&logits) != *token && *margin >= MARGIN {
            wrong += 1;
        }
        logits = model
            .forward(&mut session, &[*token], Wanted::Last)
            .unwrap();
    }
    Outcome {
        deviation: deviation_of_logits,
        wrong,
    }
}

fn compare<B: LoadExperts>(backend: B, name: &str, scales: ScaleKind, cases: usize) {
    let Some(dir) = converted(name, scales) else {
        return;
    };
    let model = model(backend, &dir.path().join("model"));
    let mut branched = 0;
    for case in oracle(name, scales).cases.iter().take(cases) {
        let n = case.input_ids.len();
        let out = run(&model, case);
        eprintln!(
            "{name} {scales:?}, {n} tokens: rms {:.2e}, {} wrong",
            out.deviation, out.wrong
        );
        assert!(out.deviation <= BRANCHED, "{n} tokens: {:e}", out.deviation);
        if out.deviation > CLOSE || out.wrong > 0 {
            branched += 1;
        }
    }
    assert!(branched <= 1, "{branched} cases left the oracle");
}

#[test]
fn tiny_row() {
    compare(Reference, "tiny-dsa", ScaleKind::Row, usize::MAX);
}

#[test]
fn tiny_g64() {
    compare(Reference, "tiny-dsa", ScaleKind::G64, usize::MAX);
}

#[test]
fn sotu_row() {
    compare(Reference, "sotu", ScaleKind::Row, usize::MAX);
}

#[test]
fn sotu_g64() {
    compare(Reference, "sotu", ScaleKind::G64, usize::MAX);
}
