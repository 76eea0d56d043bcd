//! Expert matrices, and the routed experts of tokens.

use gpu::arith;
use gpu::layout::Folds;

use super::{Experts, ReferenceError, Result, nibble, quantise_row, slice};
use crate::backend::{Rows, RowsMut};
use crate::expert::{MatrixKind, RawMatrix, ScaleKind};

/// `y = matrix x`, inputs quantised.
fn matvec(m: &RawMatrix<'_>, rows: usize, cols: usize, scales: ScaleKind, x: &[f32]) -> Vec<f32> {
    let (s, q) = quantise_row(x);
    let packed_row = |r: usize| &m.packed[r * cols / 2..(r + 1) * cols / 2];
    let dot = |row: &[u8], from: usize, to: usize| -> i32 {
        (from..to).map(|c| nibble(row, c) * q[c]).sum()
    };
    match scales {
        ScaleKind::Row => (0..rows)
            .map(|r| arith::dequantise_row(m.scales[r], s, dot(packed_row(r), 0, cols)))
            .collect(),
        ScaleKind::G64 => {
            let folds = Folds::new(cols).expect("checked when loaded");
            let groups = folds.fold_groups();
            (0..rows)
                .map(|r| {
                    let mut total = None;
                    for fold in 0..cols / folds.fold {
                        let mut v: Vec<f32> = (0..groups)
                            .map(|g| {
                                let group = fold * groups + g;
                                let at = group * arith::GROUP;
                                m.scales[r * (cols / arith::GROUP) + group]
                                    * dot(packed_row(r), at, at + arith::GROUP) as f32
                            })
                            .collect();
                        let mut half = groups / 2;
                        while half > 0 {
                            for i in 0..half {
                                v[i] += v[i + half];
                            }
                            half /= 2;
                        }
                        total = Some(match total {
                            None => v[0],
                            Some(t) => t + v[0],
                        });
                    }
                    arith::dequantise_grouped(s, total.expect("at least one fold"))
                })
                .collect()
        }
    }
}

/// `y = (16 high + low + 8) x`, inputs quantised.
fn matvec_int8(nibbles: [&RawMatrix<'_>; 2], rows: usize, cols: usize, x: &[f32]) -> Vec<f32> {
    let (s, q) = quantise_row(x);
    let dot = |m: &RawMatrix<'_>, r: usize| -> i32 {
        let row = &m.packed[r * cols / 2..(r + 1) * cols / 2];
        (0..cols).map(|c| nibble(row, c) * q[c]).sum()
    };
    let [high, low] = nibbles;
    (0..rows)
        .map(|r| {
            let sum = q.iter().sum();
            arith::dequantise_int8(high.scales[r], s, dot(high, r), dot(low, r), sum)
        })
        .collect()
}

/// [`Backend::experts`], or with int8 weights of two layers' nibbles.
#[allow(clippy::too_many_arguments)]
pub(super) fn run_experts(
    [experts, low]: [&Experts; 2],
    int8: bool,
    x: Rows<'_, Vec<f32>>,
    ids: &[u32],
    weights: &[f32],
    top_k: usize,
    tokens: usize,
    mut out: RowsMut<'_, Vec<f32>>,
) -> Result<()> {
    let shape = &experts.shape;
    for t in 0..tokens {
        let x = x.row(t, shape.hidden)?;
        let mut acc = vec![0.0; shape.hidden];
        for i in t * top_k..(t + 1) * top_k {
            let id = slice(ids, i, 1)?[0] as usize;
            let weight = slice(weights, i, 1)?[0];
            let expert = experts.matrices.get(id).ok_or(ReferenceError::Id {
                what: "expert",
                id,
                have: experts.matrices.len(),
            })?;
            let multiply = |kind: MatrixKind, x: &[f32]| {
                let (rows, cols) = shape.dims(kind);
                let m = &expert[kind as usize];
                if int8 {
                    let low = &low.matrices[id][kind as usize];
                    matvec_int8([m, low], rows, cols, x)
                } else {
                    matvec(m, rows, cols, shape.scales, x)
                }
            };
            let gate = multiply(MatrixKind::Gate, x);
            let up = multiply(MatrixKind::Up, x);
            let h: Vec<f32> = gate
                .iter()
                .zip(&up)
                .map(|(g, u)| arith::silu(*g) * u)
                .collect();
            for (a, y) in acc.iter_mut().zip(multiply(MatrixKind::Down, &h)) {
                *a = arith::fma(weight, y, *a);
            }
        }
        out.row(t, shape.hidden)?.copy_from_slice(&acc);
    }
    Ok(())
}
