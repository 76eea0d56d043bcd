use super::super::{rows, rows_mut};
use super::*;
use crate::expert::ScaleKind;

#[test]
fn rope_turns_pairs_and_separates_their_members() {
    let x = vec![1.0, 2.0, 3.0, 4.0, 9.0];
    let mut y = vec![0.0; 5];
    let inv_freq = vec![1.0, 0.5];
    Reference
        .rope(
            rows(&x, 5),
            5,
            1,
            4,
            1,
            &inv_freq,
            2,
            1,
            rows_mut(&mut y, 5),
            5,
        )
        .unwrap();
    let turn = |a: f64, b: f64, angle: f64| {
        let (s, c) = angle.sin_cos();
        (a * c - b * s, b * c + a * s)
    };
    let (a0, b0) = turn(1.0, 2.0, 2.0);
    let (a1, b1) = turn(3.0, 4.0, 1.0);
    for (got, want) in y.iter().zip([a0, a1, b0, b1, 9.0]) {
        // f32 rounding of numbers below 8.
        assert!((*got as f64 - want).abs() < 1e-6, "{got} {want}");
    }
}

#[test]
fn bytes_are_integers_times_their_scale() {
    let (rows_of, cols) = (3, 16);
    let bytes: Vec<i8> = (0..rows_of * cols)
        .map(|i| (i * 37 % 256) as u8 as i8)
        .collect();
    let bits: Vec<u16> = bytes
        .iter()
        .map(|q| half::bf16::from_f32(f32::from(*q)).to_bits())
        .collect();
    let scales = vec![0.37, -1.5e-3, 3.1];
    let x: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.7).sin()).collect();
    let int8 = Weight::Int8 {
        bytes: &bytes,
        scales: &scales,
    };
    let run = |weight, add| {
        let mut out = vec![1.0; rows_of];
        Reference
            .linear(
                rows(&x, cols),
                weight,
                rows_of,
                cols,
                1,
                add,
                rows_mut(&mut out, rows_of),
            )
            .unwrap();
        out
    };
    let plain = run(Weight::Bf16(&bits), false);
    for (r, y) in run(int8, false).into_iter().enumerate() {
        assert_eq!(y.to_bits(), (plain[r] * scales[r]).to_bits());
    }
    for (r, y) in run(int8, true).into_iter().enumerate() {
        assert_eq!(y.to_bits(), (1.0 + plain[r] * scales[r]).to_bits());
    }
    let mut row = vec![0.0; cols];
    Reference
        .embed(int8, &vec![2], cols, 1, rows_mut(&mut row, cols))
        .unwrap();
    assert_eq!(row[3], f32::from(bytes[2 * cols + 3]) * scales[2]);
}

/// f32 that bf16 does not hold: embedding, rows, latent queries and values by their definitions; of numbers that
/// it does, what bf16 gives.
#[test]
fn f32_stays_what_it_is() {
    let (rows_of, cols) = (7, 24);
    let wide: Vec<f32> = (0..rows_of * cols)
        .map(|i| (i as f32 * 0.37).sin() / 3.0)
        .collect();
    let bits: Vec<u16> = wide.iter().map(|w| arith::to_bf16(*w)).collect();
    let narrow = widen(&bits);
    assert_ne!(narrow, wide);
    let x: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.7).cos()).collect();
    let mla = Mla {
        heads: 1,
        nope: 3,
        rope: 2,
        value: 4,
        latent: cols,
        scaling: 1.0,
    };
    let q = vec![0.3, -1.7, 0.9, 5.0, 6.0];
    let run = |weight| {
        let mut out = vec![0.0; rows_of];
        let to = rows_mut(&mut out, rows_of);
        Reference
            .linear(rows(&x, cols), weight, rows_of, cols, 1, false, to)
            .unwrap();
        let mut row = vec![0.0; cols];
        Reference
            .embed(weight, &vec![2], cols, 1, rows_mut(&mut row, cols))
            .unwrap();
        let mut absorbed = vec![0.0; cols + 2];
        let to = rows_mut(&mut absorbed, cols + 2);
        Reference
            .absorb_query(rows(&q, 5), weight, &mla, 1, to)
            .unwrap();
        let mut values = vec![0.0; 4];
        Reference
            .expand_value(rows(&x, cols), weight, &mla, 1, rows_mut(&mut values, 4))
            .unwrap();
        [out, row, absorbed, values]
    };
    assert_eq!(run(Weight::F32(&narrow)), run(Weight::Bf16(&bits)));
    let [out, row, absorbed, values] = run(Weight::F32(&wide));
    assert_eq!(row, wide[2 * cols..3 * cols]);
    assert_eq!(values, out[3..]);
    for (r, y) in out.iter().enumerate() {
        assert_eq!(*y, plain::dot(&wide[r * cols..][..cols], &x));
    }
    for (c, y) in absorbed[..cols].iter().enumerate() {
        let each = (0..3).map(|j| (q[j], wide[j * cols + c]));
        assert_eq!(*y, each.fold(0.0, |acc, (q, w)| arith::fma(q, w, acc)));
    }
    assert!(
        Reference
            .embed(
                Weight::F32(&wide),
                &vec![7],
                cols,
                1,
                rows_mut(&mut vec![0.0; cols], cols)
            )
            .is_err()
    );
}

/// Norms: weights are multiplied as they are; of bf16 ones that is what they always gave.
#[test]
fn norms_take_weights_as_they_are() {
    let cols = 300;
    let x: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.7).cos()).collect();
    let mean = plain::sum(&x) / cols as f32;
    let d: Vec<f32> = x.iter().map(|x| x - mean).collect();
    let wide: Vec<f32> = (0..cols).map(|i| 1.0 + (i as f32).sin() / 7.0).collect();
    let bias: Vec<f32> = (0..cols).map(|i| (i as f32).cos() / 9.0).collect();
    let narrow = |x: &[f32]| widen(&x.iter().map(|x| arith::to_bf16(*x)).collect::<Vec<_>>());
    for (w, b) in [(wide.clone(), bias.clone()), (narrow(&wide), narrow(&bias))] {
        let (mut rms, mut layer) = (vec![0.0; cols], vec![0.0; cols]);
        let to = rows_mut(&mut rms, cols);
        Reference
            .rms_norm(rows(&x, cols), &w, 1e-6, cols, 1, to)
            .unwrap();
        let to = rows_mut(&mut layer, cols);
        Reference
            .layer_norm(rows(&x, cols), &w, &b, 1e-6, cols, 1, to)
            .unwrap();
        let r = arith::rms_factor(plain::dot(&x, &x), cols, 1e-6);
        let of_d = arith::rms_factor(plain::dot(&d, &d), cols, 1e-6);
        for k in 0..cols {
            assert_eq!(rms[k], (x[k] * r) * w[k]);
            assert_eq!(layer[k], arith::fma(d[k] * of_d, w[k], b[k]));
        }
    }
}

#[test]
fn equal_scores_go_to_the_lowest() {
    assert_eq!(top(&[1.0, 3.0, 3.0, 3.0], 2), [1, 2]);
    assert_eq!(top(&[-0.0, 0.0, -1.0], 1), [0]);
    assert_eq!(top(&[0.5], 4), [0]);
}

#[test]
fn router_keeps_the_best_groups() {
    let router = Router {
        scoring: Scoring::Sigmoid,
        experts: 6,
        top_k: 2,
        groups: 3,
        top_groups: 1,
        normalise: true,
        scaling: 2.0,
    };
    // The best expert is alone in its group; group 2 has the best pair.
    let logits = vec![3.0, -9.0, 0.0, 0.0, 1.0, 2.0];
    let (mut ids, mut weights) = (vec![0; 2], vec![0.0; 2]);
    Reference
        .route(
            rows(&logits, 6),
            &vec![0.0; 6],
            &router,
            1,
            &mut ids,
            &mut weights,
        )
        .unwrap();
    assert_eq!(ids, [4, 5]);
    let s = |x: f64| 1.0 / (1.0 + (-x).exp());
    let want = 2.0 * s(1.0) / (s(1.0) + s(2.0));
    assert!((weights[0] as f64 - want).abs() < 1e-6);
    assert!((weights[0] + weights[1] - 2.0).abs() < 1e-6);
}

#[test]
fn attention_is_softmax_over_chunks() {
    let mla = Mla {
        heads: 1,
        nope: 1,
        rope: 2,
        value: 1,
        latent: 2,
        scaling: 0.5,
    };
    let n = 150;
    let cache: Vec<f32> = (0..n * 4)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0)
        .collect();
    let q = vec![0.3, -1.2, 0.7, 2.0];
    let mut out = vec![0.0; 2];
    Reference
        .attention(
            rows(&q, 4),
            Cached::F32(&cache),
            Attend::Causal,
            &mla,
            n - 1,
            1,
            rows_mut(&mut out, 2),
        )
        .unwrap();
    let score = |p: usize| {
        0.5 * (0..4)
            .map(|k| q[k] as f64 * cache[4 * p + k] as f64)
            .sum::<f64>()
    };
    let l: f64 = (0..n).map(|p| score(p).exp()).sum();
    for c in 0..2 {
        let want = (0..n)
            .map(|p| score(p).exp() * cache[4 * p + c] as f64)
            .sum::<f64>()
            / l;
        // 150 f32 terms of magnitude up to 2.
        assert!((out[c] as f64 - want).abs() < 1e-5, "{} {want}", out[c]);
    }
    let lists: Vec<u32> = (0..n as u32).collect();
    let mut listed = vec![0.0; 2];
    Reference
        .attention(
            rows(&q, 4),
            Cached::F32(&cache),
            Attend::Listed {
                lists: &lists,
                top_k: n,
            },
            &mla,
            n - 1,
            1,
            rows_mut(&mut listed, 2),
        )
        .unwrap();
    assert_eq!(out, listed);
}

#[test]
fn experts_of_both_scale_kinds_compute_the_ffn() {
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let shape = ExpertShape {
            hidden: 192,
            intermediate: 128,
            scales,
        };
        let matrix = |kind: MatrixKind, e: usize| {
            let (r, c) = shape.dims(kind);
            RawMatrix {
                packed: (0..r * c / 2)
                    .map(|i| (i * 193 + e * 11 + kind as usize * 5) as u8)
                    .collect::<Vec<_>>()
                    .into(),
                scales: (0..scales.count(r, c))
                    .map(|i| 0.01 + 0.001 * (i % 7) as f32)
                    .collect::<Vec<_>>()
                    .into(),
            }
        };
        let raw: Vec<_> = (0..2)
            .map(|e| MatrixKind::ALL.map(|k| matrix(k, e)))
            .collect();
        let x: Vec<f32> = (0..192)
            .map(|i| ((i * 29 % 64) as f32 - 31.0) / 64.0)
            .collect();
        let dense = |m: &RawMatrix, r: usize, c: usize, x: &[f64]| -> Vec<f64> {
            (0..r)
                .map(|i| {
                    (0..c)
                        .map(|k| {
                            let at = i * c + k;
                            let q = (m.packed[at / 2] >> (4 * (at % 2)) & 15) as f64 - 8.0;
                            let s = match scales {
                                ScaleKind::Row => m.scales[i],
                                ScaleKind::G64 => m.scales[at / 64],
                            };
                            q * s as f64 * x[k]
                        })
                        .sum()
                })
                .collect()
        };
        let mut want = vec![0.0; 192];
        for (e, w) in raw.iter().zip([0.25, 1.5]) {
            let x: Vec<f64> = x.iter().map(|x| *x as f64).collect();
            let (g, u) = (dense(&e[0], 128, 192, &x), dense(&e[1], 128, 192, &x));
            let h: Vec<f64> = g
                .iter()
                .zip(&u)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            for (want, y) in want.iter_mut().zip(dense(&e[2], 192, 128, &h)) {
                *want += w * y;
            }
        }
        let experts = Reference
            .load_experts(LayerExperts::Raw(raw), shape, Form::Fused)
            .unwrap();
        let mut out = vec![0.0; 192];
        Reference
            .experts(
                &experts,
                rows(&x, 192),
                &vec![0, 1],
                &vec![0.25, 1.5],
                2,
                1,
                rows_mut(&mut out, 192),
            )
            .unwrap();
        let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
        let err: f64 = out
            .iter()
            .zip(&want)
            .map(|(o, w)| (*o as f64 - w).powi(2))
            .sum::<f64>()
            .sqrt();
        // Activations are rounded to 1/32512 of the largest, twice.
        assert!(err < 1e-4 * norm, "{scales:?}: {err} of {norm}");
    }
}
