//! The routed experts of a layer: storage, and their forward pass.

use super::int4::{self, Activation, Int4};
use super::{Buf, CpuError, dense, for_each};
use crate::expert::{ExpertShape, MatrixKind, RawMatrix};
use crate::simd::Level;
use gpu::layout::Folds;
use std::ops::Range;

/// Rows of a raw matrix that one job takes.
const JOB_ROWS: usize = 64;

/// Multiplications below which threads cost more than they bring.
const PARALLEL_FROM: usize = 1 << 19;

/// One layer's routed experts in memory.
pub struct Experts {
    shape: ExpertShape,
    experts: Vec<[Matrix; 3]>,
    nibbles: Buf<u8>,
    scales: Buf<f32>,
}

/// Where a matrix is in its layer's buffers.
struct Matrix {
    nibbles: Range<usize>,
    scales: Range<usize>,
}

impl Experts {
    /// Copies raw experts.
    pub(super) fn raw(
        shape: ExpertShape,
        experts: &[[RawMatrix<'_>; 3]],
    ) -> Result<Self, CpuError> {
        for cols in [shape.hidden, shape.intermediate] {
            Folds::new(cols).ok_or(CpuError::Columns(cols))?;
        }
        let (mut n, mut s) = (0, 0);
        let mut places = Vec::with_capacity(experts.len());
        for (e, expert) in experts.iter().enumerate() {
            for kind in MatrixKind::ALL {
                let (rows, cols) = shape.dims(kind);
                let m = &expert[kind as usize];
                let (want_packed, want_scales) = (rows * cols / 2, shape.scales.count(rows, cols));
                if m.packed.len() != want_packed || m.scales.len() != want_scales {
                    return Err(CpuError::Matrix {
                        expert: e,
                        matrix: kind.name(),
                        packed: m.packed.len(),
                        scales: m.scales.len(),
                        want_packed,
                        want_scales,
                    });
                }
            }
            places.push(MatrixKind::ALL.map(|kind| {
                let m = &expert[kind as usize];
                let at = Matrix {
                    nibbles: n..n + m.packed.len(),
                    scales: s..s + m.scales.len(),
                };
                (n, s) = (at.nibbles.end, at.scales.end);
                at
            }));
        }
        let (mut nibbles, mut scales) = (Buf::zeroed(n), Buf::zeroed(s));
        for (place, m) in places.iter().flatten().zip(experts.iter().flatten()) {
            nibbles[place.nibbles.clone()].copy_from_slice(&m.packed);
            scales[place.scales.clone()].copy_from_slice(&m.scales);
        }
        Ok(Self {
            shape,
            experts: places,
            nibbles,
            scales,
        })
    }

    /// Geometry.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// Number of experts.
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    fn matrix(&self, expert: usize, kind: MatrixKind) -> Int4<'_> {
        let m = &self.experts[expert][kind as usize];
        Int4 {
            packed: &self.nibbles[m.nibbles.clone()],
            scales: &self.scales[m.scales.clone()],
            kind: self.shape.scales,
            cols: self.shape.dims(kind).1,
        }
    }
}

/// Slots (a token and one of its experts), sorted by expert, then token.
struct Slots {
    /// Experts that have slots, with their ranges.
    active: Vec<(usize, Range<usize>)>,
    /// Token of each slot.
    token: Vec<usize>,
    /// `[tokens, top_k]`: index into `active` and position within its range.
    of: Vec<(usize, usize)>,
}

impl Slots {
    fn new(ids: &[u32], top_k: usize, experts: usize) -> Self {
        let mut by_expert = vec![Vec::new(); experts];
        for (i, id) in ids.iter().enumerate() {
            by_expert[*id as usize].push(i);
        }
        let mut slots = Self {
            active: Vec::new(),
            token: Vec::with_capacity(ids.len()),
            of: vec![(0, 0); ids.len()],
        };
        for (expert, places) in by_expert.iter().enumerate() {
            if places.is_empty() {
                continue;
            }
            let first = slots.token.len();
            for (j, place) in places.iter().enumerate() {
                slots.of[*place] = (slots.active.len(), j);
                slots.token.push(place / top_k);
            }
            slots.active.push((expert, first..slots.token.len()));
        }
        slots
    }
}

/// Products of one matrix with its expert's slots, cut into jobs of rows: rows `first ..
/// first + n` are at `first * slots`, `[slots][n]`.
struct Products {
    rows: usize,
    slots: usize,
    job_rows: usize,
    values: Vec<f32>,
}

impl Products {
    fn new(rows: usize, slots: usize, job_rows: usize) -> Self {
        Self {
            rows,
            slots,
            job_rows,
            values: vec![0.0; rows * slots],
        }
    }

    /// First row, number of rows and values of each job.
    fn jobs(&mut self) -> impl Iterator<Item = (usize, usize, &mut [f32])> {
        let (rows, slots, step) = (self.rows, self.slots, self.job_rows);
        self.values
            .chunks_mut(step * slots)
            .enumerate()
            .map(move |(i, out)| (i * step, step.min(rows - i * step), out))
    }

    /// Pieces of a slot's row vector with their first rows.
    fn slot(&self, slot: usize) -> impl Iterator<Item = (usize, &[f32])> {
        self.values
            .chunks(self.job_rows * self.slots)
            .enumerate()
            .map(move |(i, job)| {
                let n = job.len() / self.slots;
                (i * self.job_rows, &job[slot * n..][..n])
            })
    }

    /// A slot's whole row vector.
    fn copy_slot(&self, slot: usize, out: &mut [f32]) {
        for (first, piece) in self.slot(slot) {
            out[first..first + piece.len()].copy_from_slice(piece);
        }
    }
}

/// Multiplies matrices `kinds` of every active expert with its slots' activations:
/// `[active][kinds]`.
fn multiply(
    level: Level,
    experts: &Experts,
    slots: &Slots,
    kinds: &[MatrixKind],
    activations: &[&Activation],
) -> Result<Vec<Vec<Products>>, CpuError> {
    let (rows, cols) = experts.shape.dims(kinds[0]);
    let mut products: Vec<Vec<Products>> = slots
        .active
        .iter()
        .map(|(_, range)| {
            kinds
                .iter()
                .map(|_| Products::new(rows, range.len(), JOB_ROWS))
                .collect()
        })
        .collect();
    let mut jobs = Vec::new();
    for ((expert, range), products) in slots.active.iter().zip(&mut products) {
        for (kind, products) in kinds.iter().zip(products) {
            let matrix = experts.matrix(*expert, *kind);
            for (first, n, out) in products.jobs() {
                jobs.push((matrix.slice(first, n), range.clone(), out));
            }
        }
    }
    let parallel = slots.token.len() * kinds.len() * rows * cols >= PARALLEL_FROM;
    for_each(parallel, jobs, |(matrix, range, out)| {
        int4::matmul(level, matrix, &activations[range], out);
    });
    Ok(products)
}

/// `outs[t] = sum over i ascending of fma(weights[t][i], y, acc)`.
pub(super) fn forward(
    level: Level,
    experts: &Experts,
    xs: &[&[f32]],
    ids: &[u32],
    weights: &[f32],
    top_k: usize,
    outs: Vec<&mut [f32]>,
) -> Result<(), CpuError> {
    let shape = experts.shape;
    let slots = Slots::new(ids, top_k, experts.len());
    let parallel = xs.len() * shape.hidden >= 1 << 15;

    let mut inputs = vec![Activation::default(); xs.len()];
    for_each(
        parallel,
        inputs.iter_mut().zip(xs).collect(),
        |(input, x)| int4::quantise(level, x, input),
    );
    let by_slot: Vec<&Activation> = slots.token.iter().map(|t| &inputs[*t]).collect();
    let products = multiply(
        level,
        experts,
        &slots,
        &[MatrixKind::Gate, MatrixKind::Up],
        &by_slot,
    )?;

    let mut hidden = vec![Activation::default(); slots.token.len()];
    let mut jobs = Vec::with_capacity(hidden.len());
    let mut rest = &mut hidden[..];
    for (products, (_, range)) in products.iter().zip(&slots.active) {
        let (these, others) = rest.split_at_mut(range.len());
        rest = others;
        jobs.extend(these.iter_mut().enumerate().map(|(j, h)| (products, j, h)));
    }
    for_each(parallel, jobs, |(products, j, hidden)| {
        let mut values = vec![0.0; 3 * shape.intermediate];
        let (gate, rest) = values.split_at_mut(shape.intermediate);
        let (up, h) = rest.split_at_mut(shape.intermediate);
        products[0].copy_slot(j, gate);
        products[1].copy_slot(j, up);
        dense::silu_mul(level, gate, up, h);
        int4::quantise(level, h, hidden);
    });
    let by_slot: Vec<&Activation> = hidden.iter().collect();
    let products = multiply(level, experts, &slots, &[MatrixKind::Down], &by_slot)?;

    for_each(
        parallel,
        outs.into_iter().enumerate().collect(),
        |(t, out): (usize, &mut [f32])| {
            out.fill(0.0);
            let these = t * top_k..(t + 1) * top_k;
            for ((active, j), weight) in slots.of[these.clone()].iter().zip(&weights[these]) {
                for (first, y) in products[*active][0].slot(*j) {
                    dense::axpy(level, *weight, y, &mut out[first..first + y.len()]);
                }
            }
        },
    );
    Ok(())
}
