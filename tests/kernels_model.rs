//! The forward pass of a whole model on the kernels: logits equal the reference's, bit for bit, in
//! every tier and form, over a prompt in one batch and tokens one by one.

mod suite;
mod support;

use std::path::Path;

use host::archive::{PackOptions, SafetensorsExperts, SymbolChoice, pack};
use host::backend::LoadExperts;
use host::backend::reference::Reference;
use host::expert::{Form, ScaleKind, Tier};
use host::model::{Config, Model, Source, Wanted};

/// Logits of all prompt tokens, then of each further token.
fn logits<B: LoadExperts>(backend: B, dir: &Path, tier: Tier, form: Form) -> Vec<u32> {
    let config = Config::read(dir).unwrap();
    let source = Source::open(dir, &config, Some(tier)).unwrap();
    let vocab = config.vocab as u32;
    let model = Model::load(backend, dir, config, &source, form, |_| ()).unwrap();
    // More tokens than the indexer lists, so that sparse attention takes part.
    let ids: Vec<u32> = (0..22).map(|i| (i * 7919 + 13) % vocab).collect();
    let (prompt, rest) = ids.split_at(12);
    let one_by_one = model.backend().describe();
    let mut session = model.session(ids.len(), Wanted::All).unwrap();
    let mut out = model.forward(&mut session, prompt, Wanted::All).unwrap();
    for id in rest {
        out.extend(model.forward(&mut session, &[*id], Wanted::All).unwrap());
    }
    let recorded = usize::from(!one_by_one.contains("reference"));
    assert_eq!(session.recordings(), recorded, "launches of a token");
    assert!(out.iter().all(|x| x.is_finite()));
    out.into_iter().map(f32::to_bits).collect()
}

fn model_with_archive(scales: ScaleKind, symbols: SymbolChoice) -> tempfile::TempDir {
    let made = support::converted("tiny-dsa", scales).expect("part of the repository");
    let dir = made.path().join("model");
    let experts = SafetensorsExperts::open(&dir).unwrap();
    let options = PackOptions {
        symbols,
        ..PackOptions::default()
    };
    pack(
        &experts,
        &options,
        &dir.join("experts.ansx"),
        |_| (),
        || false,
    )
    .unwrap();
    made
}

fn compare<B: LoadExperts, E: std::fmt::Display>(make: impl Fn() -> Result<B, E>) {
    for (scales, symbol) in [
        (ScaleKind::Row, gpu::layout::Symbol::Triple),
        (ScaleKind::G64, gpu::layout::Symbol::Pair),
    ] {
        let made = model_with_archive(scales, SymbolChoice::Always(symbol));
        let dir = made.path().join("model");
        let want = logits(Reference, &dir, Tier::Raw, Form::Fused);
        for (tier, form) in [
            (Tier::Raw, Form::Fused),
            (Tier::Ans, Form::Fused),
            (Tier::Ans, Form::Unfused),
        ] {
            let backend = match make() {
                Ok(backend) => backend,
                Err(error) => return println!("skipped: {error}"),
            };
            let got = logits(backend, &dir, tier, form);
            let differ = want.iter().zip(&got).filter(|(a, b)| a != b).count();
            assert_eq!(want.len(), got.len());
            assert_eq!(differ, 0, "{scales:?} {symbol:?} {tier:?} {form:?}");
        }
    }
}

#[test]
fn emulator() {
    compare(suite::emulator);
}

#[test]
fn cuda() {
    compare(suite::cuda);
}
