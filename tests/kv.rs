//! Caches of bf16: every back end gives the same bits, whatever the batches, across the positions that an
//! indexer lists; what is forgotten leaves nothing behind; and the answers stay near those of f32.

mod suite;
mod support;

use std::path::Path;

use host::backend::cpu::Cpu;
use host::backend::reference::Reference;
use host::backend::{KvFormat, LoadExperts};
use host::expert::{Form, ScaleKind};
use host::model::{Config, Model, Source, Wanted};
use support::{converted, deviation};

fn model<B: LoadExperts>(backend: B, dir: &Path, kv: KvFormat) -> Model<B> {
    let mut config = Config::read(dir).unwrap();
    config.kv = kv;
    let source = Source::open(dir, &config, None).unwrap();
    Model::load(backend, dir, config, &source, Form::Fused, |_| ()).unwrap()
}

/// Logits of all of `ids`, which go through in batches of `sizes`; the last batch goes twice, forgotten in
/// between.
fn logits<B: LoadExperts>(
    backend: B,
    dir: &Path,
    kv: KvFormat,
    ids: &[u32],
    sizes: &[usize],
) -> Vec<f32> {
    let model = model(backend, dir, kv);
    let mut session = model.session(ids.len(), Wanted::All).unwrap();
    let (mut at, mut out) = (0, Vec::new());
    for n in sizes {
        let batch = &ids[at..at + n];
        out.extend(model.forward(&mut session, batch, Wanted::All).unwrap());
        at += n;
    }
    assert_eq!(at, ids.len());
    let n = sizes[sizes.len() - 1];
    session.roll_back(n);
    // Other tokens in their place first.
    let others: Vec<u32> = ids[at - n..].iter().map(|id| (id + 7) % 256).collect();
    model.forward(&mut session, &others, Wanted::None).unwrap();
    session.roll_back(n);
    let again = model
        .forward(&mut session, &ids[at - n..], Wanted::All)
        .unwrap();
    assert_eq!(bits(&again), bits(&out[out.len() - again.len()..]));
    assert!(out.iter().all(|x| x.is_finite()));
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn back_ends_agree() {
    for name in ["tiny-dsa", "tiny-lite", "tiny-qwen3"] {
        let made = converted(name, ScaleKind::Row).unwrap();
        let dir = made.path().join("model");
        let listed = Config::read(&dir).unwrap().index.top_k;
        // Of those with an indexer some tokens see as many positions as it lists, some more.
        let ids: Vec<u32> = (0..22).map(|i| (i * 53 + 5) % 256).collect();
        assert!(listed < 20 || listed == usize::MAX, "{listed}");
        for kv in [KvFormat::F32, KvFormat::Bf16] {
            let cpu = |sizes: &[usize]| logits(Cpu::new().unwrap(), &dir, kv, &ids, sizes);
            let want = cpu(&[22]);
            let steps = [7, 1, 5, 6, 1, 1, 1];
            for sizes in [&[1; 22][..], &steps, &[13, 9]] {
                assert_eq!(bits(&cpu(sizes)), bits(&want), "{name} {kv:?} {sizes:?}");
            }
            // A batch and then single tokens across those positions; the kernels' are recorded.
            let singles = [12, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
            for sizes in [&steps[..], &singles] {
                let what = format!("{name} {kv:?} {sizes:?}");
                let reference = logits(Reference, &dir, kv, &ids, sizes);
                assert!(bits(&reference) == bits(&want), "{what}");
                let emulator = suite::emulator().unwrap();
                let emulated = logits(emulator, &dir, kv, &ids, sizes);
                assert!(bits(&emulated) == bits(&want), "{what}");
                match suite::cuda() {
                    Ok(cuda) => {
                        let got = logits(cuda, &dir, kv, &ids, sizes);
                        assert!(bits(&got) == bits(&want), "{what}");
                    }
                    Err(why) => eprintln!("skipped: {why}"),
                }
            }
            if kv == KvFormat::Bf16 {
                let wide = logits(Cpu::new().unwrap(), &dir, KvFormat::F32, &ids, &[22]);
                let d = deviation(&want, &wide);
                eprintln!("{name}: bf16 moves logits by {d:.2e} of their deviation");
                // Rows off by 2^-9 at most, of random weights.
                assert!(d > 0.0 && d < 0.02, "{d:e}");
            }
        }
    }
}
