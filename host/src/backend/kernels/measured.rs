//! Measurements of single operators on a GPU, at GLM-5.2's dimensions: `cargo test --release -p host --lib --
//! --ignored --nocapture measured`.

use super::{CudaDevice, Device, KernelBackend};
use crate::backend::{Attend, Backend, Cached, Index, Mla, rows, rows_mut};
use crate::bench::synth::Rng;
use crate::model::matrix::Part;

/// Median us of one of `passes` passes that are recorded and done again.
pub(super) fn median(passes: usize, devices: &[&CudaDevice], mut pass: impl FnMut(usize)) -> f64 {
    assert!(CudaDevice::begin_recording(devices).unwrap());
    (0..passes).for_each(&mut pass);
    let recording = CudaDevice::end_recording(devices).unwrap();
    let mut times: Vec<f64> = (0..25)
        .map(|_| {
            let from = devices[0].event().unwrap();
            // SAFETY: what was recorded uses buffers of the caller alone.
            unsafe { devices[0].replay(&recording).unwrap() };
            let to = devices[0].event().unwrap();
            devices[0].elapsed(&from, &to).unwrap()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    1e6 * times[times.len() / 2] / passes as f64
}

fn device() -> (CudaDevice, KernelBackend<CudaDevice>) {
    let device = CudaDevice::new(0).unwrap();
    (device.clone(), KernelBackend::new(device).unwrap())
}

/// The indexer for one token and for a batch, behind so many positions.
#[test]
#[ignore = "a measurement: it takes a GPU and prints times, and nothing is to be asserted of them"]
fn indexer() {
    let (device, b) = device();
    let index = Index {
        heads: 32,
        dim: 128,
        top_k: 2048,
    };
    const TOKENS: usize = 256;
    let mut rng = Rng::new(5);
    let q = b
        .upload(&rng.normals(TOKENS * index.heads * index.dim))
        .unwrap();
    let weights = b.upload(&rng.normals(TOKENS * index.heads)).unwrap();
    let mut lists = b.alloc::<u32>(TOKENS * index.top_k).unwrap();
    for seen in [4096, 16_384, 65_536] {
        let keys = b.upload(&rng.normals(seen * index.dim)).unwrap();
        for tokens in [1, TOKENS] {
            let (q, weights) = (
                rows(&q, index.heads * index.dim),
                rows(&weights, index.heads),
            );
            let us = median(if tokens == 1 { 40 } else { 2 }, &[&device], |_| {
                b.index(q, &keys, weights, &index, seen - tokens, tokens, &mut lists)
                    .unwrap();
            });
            println!("indexer, {tokens} tokens behind {seen}: {us:.1} us");
        }
    }
}

/// Attention of a batch of a prompt, and of one token.
#[test]
#[ignore = "a measurement: it takes a GPU and prints times, and nothing is to be asserted of them"]
fn attention() {
    let (device, b) = device();
    let mla = Mla {
        heads: 64,
        nope: 192,
        rope: 64,
        value: 256,
        latent: 512,
        scaling: 0.0625,
    };
    let (width, top_k) = (mla.latent + mla.rope, 2048);
    const TOKENS: usize = 256;
    let mut rng = Rng::new(6);
    let q = b.upload(&rng.normals(TOKENS * mla.heads * width)).unwrap();
    let mut out = b.alloc::<f32>(TOKENS * mla.heads * mla.latent).unwrap();
    let lists: Vec<u32> = (0..TOKENS)
        .flat_map(|_| (0..top_k as u32).map(|i| 2 * i))
        .collect();
    let lists = b.upload(&lists).unwrap();
    for (seen, listed) in [(1024, false), (2048, false), (8192, true)] {
        let cache = b.upload(&rng.normals(seen * width)).unwrap();
        for tokens in [1, 4, TOKENS] {
            let us = median(if tokens < 9 { 40 } else { 2 }, &[&device], |_| {
                let attend = match listed {
                    false => Attend::Causal,
                    true => Attend::Listed {
                        lists: &lists,
                        top_k,
                    },
                };
                let to = rows_mut(&mut out, mla.heads * mla.latent);
                let q = rows(&q, mla.heads * width);
                b.attention(
                    q,
                    Cached::F32(&cache),
                    attend,
                    &mla,
                    seen - tokens,
                    tokens,
                    to,
                )
                .unwrap();
            });
            println!("attention, {tokens} tokens, {seen} positions, listed: {listed}: {us:.1} us");
        }
    }
}

/// Rows of each kind of numbers times one token and times a batch.
#[test]
#[ignore = "a measurement: it takes a GPU and prints times, and nothing is to be asserted of them"]
fn rows_of_weights() {
    let (device, b) = device();
    for (name, n, cols) in [
        ("o_proj", 6144, 16384),
        ("q_b", 16384, 2048),
        ("q_a and kv_a", 2624, 6144),
        ("shared gate and up", 4096, 6144),
        ("shared down", 6144, 2048),
    ] {
        let all = || (0..n * cols).map(|i| (i * 31 % 251) as u8 as i8);
        for kind in ["int8", "bf16", "f32"] {
            // Together more than an L2 holds.
            let copies: Vec<Part<_>> = (0..(128 << 20) / (n * cols) + 1)
                .map(|_| match kind {
                    "int8" => Part::Int8 {
                        bytes: b.upload(&all().collect::<Vec<i8>>()).unwrap(),
                        scales: b.upload(&vec![1e-3f32; n]).unwrap(),
                    },
                    "bf16" => {
                        let bits = all().map(|q| gpu::arith::to_bf16(f32::from(q)));
                        Part::Bf16(b.upload(&bits.collect::<Vec<u16>>()).unwrap())
                    }
                    _ => Part::F32(b.upload(&all().map(f32::from).collect::<Vec<_>>()).unwrap()),
                })
                .collect();
            for tokens in [1, 8, 16, 64, 256, 1024] {
                let x = b.upload(&Rng::new(3).normals(tokens * cols)).unwrap();
                let mut out = b.alloc::<f32>(tokens * n).unwrap();
                let us = median(if tokens < 9 { 20 } else { 2 }, &[&device], |i| {
                    let (x, out) = (rows(&x, cols), rows_mut(&mut out, n));
                    let weight = copies[i % copies.len()].weight();
                    b.linear(x, weight, n, cols, tokens, false, out).unwrap();
                });
                let rate = 1e-6 * (tokens * n * cols) as f64 / us;
                println!(
                    "{name}: {n} x {cols}, {kind}, {tokens} tokens: {us:.1} us, {rate:.2} T products/s"
                );
            }
        }
    }
}
