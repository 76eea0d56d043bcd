//! The routed experts of a layer: storage, raw or coded, and their forward pass.

use super::int4::{self, Activation, Int4};
use super::{Buf, CpuError, dense, for_each, try_for_each};
use crate::archive::{ArchiveError, CodedMatrix, LayerRecords, Place, Record};
use crate::codec::{self, Codec, CodecError, Stream, Table};
use crate::expert::{ExpertShape, Form, MatrixKind, RawMatrix};
use crate::simd::{Arm, Level};
use gpu::layout::Folds;
use rayon::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// Rows of a raw matrix that one job takes.
const JOB_ROWS: usize = 64;

/// Multiplications below which threads cost more than they bring.
const PARALLEL_FROM: usize = 1 << 19;

thread_local! {
    /// One decoded block of a matrix, for [`Form::Fused`]: small enough for the second-level cache.
    static TILE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// One layer's routed experts in memory.
pub struct Experts {
    shape: ExpertShape,
    form: Form,
    experts: Vec<[Matrix; 3]>,
    /// Packed nibbles of raw experts, records of coded ones.
    bytes: Buf<u8>,
    scales: Buf<f32>,
    tables: BTreeMap<u16, Table>,
    /// Archive and layer, for errors.
    origin: (PathBuf, u32),
}

/// Where a raw expert's packed nibbles and scales go, of each matrix.
pub type ExpertRoom<'a> = [(&'a mut [u8], &'a mut [f32]); 3];

/// Where a matrix is in its layer's buffers.
struct Matrix {
    /// Packed nibbles, or the record that the matrix is coded in.
    bytes: Range<usize>,
    coded: Option<CodedMatrix>,
    scales: Range<usize>,
}

/// A matrix to multiply with.
#[derive(Clone, Copy)]
enum Source<'a> {
    Raw(Int4<'a>),
    /// Coded; scales and kinds are those of the whole matrix, which has no nibbles yet.
    Coded(Stream<'a>, Int4<'a>),
}

fn check_columns(shape: &ExpertShape) -> Result<(), CpuError> {
    for cols in [shape.hidden, shape.intermediate] {
        Folds::new(cols).ok_or(CpuError::Columns(cols))?;
    }
    Ok(())
}

impl Experts {
    /// Room for `n` raw experts.
    pub fn room(shape: ExpertShape, n: usize) -> Result<Self, CpuError> {
        check_columns(&shape)?;
        let (mut bytes, mut scales) = (0, 0);
        let mut place = |kind| {
            let (rows, cols) = shape.dims(kind);
            let at = Matrix {
                bytes: bytes..bytes + rows * cols / 2,
                coded: None,
                scales: scales..scales + shape.scales.count(rows, cols),
            };
            (bytes, scales) = (at.bytes.end, at.scales.end);
            at
        };
        let experts = (0..n).map(|_| MatrixKind::ALL.map(&mut place)).collect();
        Ok(Self {
            shape,
            form: Form::Unfused,
            experts,
            bytes: Buf::zeroed(bytes)?,
            scales: Buf::zeroed(scales)?,
            tables: BTreeMap::new(),
            origin: Default::default(),
        })
    }

    /// Packed nibbles and scales of gate, up and down of each expert, to fill.
    pub fn room_of_each(&mut self) -> Vec<ExpertRoom<'_>> {
        let (mut bytes, mut scales) = (&mut self.bytes[..], &mut self.scales[..]);
        let mut next = |m: &Matrix| {
            let (packed, behind) = std::mem::take(&mut bytes).split_at_mut(m.bytes.len());
            let (of_scales, more) = std::mem::take(&mut scales).split_at_mut(m.scales.len());
            (bytes, scales) = (behind, more);
            (packed, of_scales)
        };
        (self.experts.iter())
            .map(|places| places.each_ref().map(&mut next))
            .collect()
    }

    /// Copies raw experts.
    pub(super) fn raw(
        shape: ExpertShape,
        experts: &[[RawMatrix<'_>; 3]],
    ) -> Result<Self, CpuError> {
        check_columns(&shape)?;
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
        }
        let mut placed = Self::room(shape, experts.len())?;
        (placed.room_of_each().into_par_iter())
            .zip(experts)
            .flat_map_iter(|(room, expert)| room.into_iter().zip(expert))
            .for_each(|((packed, scales), m)| {
                packed.copy_from_slice(&m.packed);
                scales.copy_from_slice(&m.scales);
            });
        Ok(placed)
    }

    /// Copies records as they are; scales are widened to f32.
    pub(super) fn coded(
        shape: ExpertShape,
        layer: LayerRecords<'_>,
        records: &[Record<'_>],
        form: Form,
    ) -> Result<Self, CpuError> {
        check_columns(&shape)?;
        let total = records.iter().map(|r| r.bytes.len()).sum();
        let mut bytes = Buf::zeroed(total)?;
        let mut all_scales = Vec::new();
        let mut experts = Vec::with_capacity(records.len());
        let mut tables = BTreeMap::new();
        let mut n = 0;
        for (e, record) in records.iter().enumerate() {
            let at = n..n + record.bytes.len();
            n = at.end;
            bytes[at.clone()].copy_from_slice(record.bytes);
            for kind in MatrixKind::ALL {
                let m = record.matrix(kind);
                let expected = shape.dims(kind);
                let scales = record.scales(kind).len();
                if (m.rows, m.cols) != expected
                    || scales != shape.scales.count(expected.0, expected.1)
                {
                    return Err(CpuError::Shape {
                        expert: e,
                        matrix: kind.name(),
                        found: (m.rows, m.cols, scales),
                        expected: (
                            expected.0,
                            expected.1,
                            shape.scales.count(expected.0, expected.1),
                        ),
                    });
                }
            }
            experts.push(MatrixKind::ALL.map(|kind| {
                let m = record.matrix(kind);
                let first = all_scales.len();
                all_scales.extend(record.scales(kind));
                if let Some(id) = m.table {
                    let table = || layer.archive().table(id).clone();
                    tables.entry(id).or_insert_with(table);
                }
                let (bytes, coded) = match m.codec {
                    Codec::Rans(_) | Codec::Plane3 => (at.clone(), Some(m.clone())),
                    Codec::Raw => (at.start + m.stream.start..at.start + m.stream.end, None),
                };
                Matrix {
                    bytes,
                    coded,
                    scales: first..all_scales.len(),
                }
            }));
        }
        let mut scales = Buf::zeroed(all_scales.len())?;
        scales.copy_from_slice(&all_scales);
        Ok(Self {
            shape,
            form,
            experts,
            bytes,
            scales,
            tables,
            origin: (layer.archive().path().to_owned(), layer.number()),
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

    /// Bytes of nibbles or records, and of scales.
    pub fn memory(&self) -> usize {
        self.bytes.len() + 4 * self.scales.len()
    }

    /// Scales of a matrix, f32.
    fn scales(&self, expert: usize, kind: MatrixKind) -> &[f32] {
        &self.scales[self.experts[expert][kind as usize].scales.clone()]
    }

    fn matrix(&self, expert: usize, kind: MatrixKind) -> Result<Source<'_>, CpuError> {
        let m = &self.experts[expert][kind as usize];
        let bytes = &self.bytes[m.bytes.clone()];
        let whole = Int4 {
            packed: &[],
            scales: &self.scales[m.scales.clone()],
            kind: self.shape.scales,
            cols: self.shape.dims(kind).1,
        };
        match &m.coded {
            None => Ok(Source::Raw(Int4 {
                packed: bytes,
                ..whole
            })),
            Some(coded) => match coded.coded(bytes, coded.table.map(|t| &self.tables[&t])) {
                Ok(Some(stream)) => Ok(Source::Coded(stream, whole)),
                Ok(None) => Ok(Source::Raw(Int4 {
                    packed: &bytes[coded.stream.clone()],
                    ..whole
                })),
                Err(source) => Err(self.damaged(expert, kind, source)),
            },
        }
    }

    fn damaged(&self, expert: usize, kind: MatrixKind, source: CodecError) -> CpuError {
        let (path, layer) = self.origin.clone();
        let place = Place::Matrix {
            layer,
            expert,
            kind,
        };
        CpuError::Archive(ArchiveError::Codec {
            path,
            place,
            source,
        })
    }
}

/// The decoder that goes with an arm.
fn decoder(level: Level) -> codec::Arm {
    let wanted = match level.arm() {
        Arm::Avx512 => codec::Arm::Avx512,
        Arm::Avx2 => codec::Arm::Avx2,
        Arm::Baseline => codec::Arm::Portable,
    };
    if wanted.available() {
        wanted
    } else {
        codec::Arm::Portable
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

/// Products of one matrix with its expert's slots, cut into jobs of rows: rows `first .. end` of a
/// job are at `first * slots`, `[slots][end - first]`.
struct Products {
    slots: usize,
    jobs: Vec<Range<usize>>,
    values: Vec<f32>,
}

impl Products {
    /// Jobs cover the rows in order.
    fn new(slots: usize, jobs: Vec<Range<usize>>) -> Self {
        let rows = jobs.last().map_or(0, |last| last.end);
        Self {
            slots,
            jobs,
            values: vec![0.0; rows * slots],
        }
    }

    /// Rows and values of each job.
    fn jobs(&mut self) -> impl Iterator<Item = (Range<usize>, &mut [f32])> {
        let mut rest = &mut self.values[..];
        let slots = self.slots;
        self.jobs.iter().map(move |rows| {
            let (these, others) = std::mem::take(&mut rest).split_at_mut(rows.len() * slots);
            rest = others;
            (rows.clone(), these)
        })
    }

    /// Pieces of a slot's row vector with their first rows.
    fn slot(&self, slot: usize) -> impl Iterator<Item = (usize, &[f32])> {
        self.jobs.iter().map(move |rows| {
            let at = rows.start * self.slots + slot * rows.len();
            (rows.start, &self.values[at..at + rows.len()])
        })
    }

    /// A slot's whole row vector.
    fn copy_slot(&self, slot: usize, out: &mut [f32]) {
        for (first, piece) in self.slot(slot) {
            out[first..first + piece.len()].copy_from_slice(piece);
        }
    }
}

/// Decodes whole matrices: nibbles of each that is coded, in the order given.
fn decode(
    level: Level,
    experts: &Experts,
    matrices: &[(usize, MatrixKind, Source<'_>)],
    parallel: bool,
) -> Result<Vec<Vec<u8>>, CpuError> {
    let arm = decoder(level);
    let mut scratch: Vec<Vec<u8>> = matrices
        .iter()
        .map(|(_, _, source)| match source {
            Source::Raw(_) => Vec::new(),
            Source::Coded(coded, _) => vec![0; coded.rows() * coded.row_bytes()],
        })
        .collect();
    let mut jobs = Vec::new();
    for ((e, kind, source), scratch) in matrices.iter().zip(&mut scratch) {
        let Source::Coded(coded, _) = source else {
            continue;
        };
        let mut rest = &mut scratch[..];
        for block in 0..coded.blocks() {
            let bytes = coded.block_rows(block).len() * coded.row_bytes();
            let (out, others) = rest.split_at_mut(bytes);
            rest = others;
            jobs.push((*e, *kind, *coded, block, out));
        }
    }
    try_for_each(parallel, jobs, |(e, kind, coded, block, out)| {
        coded
            .decode_block(arm, block, out)
            .map_err(|error| experts.damaged(e, kind, error))
    })?;
    Ok(scratch)
}

/// Multiplies matrices `kinds`, all of one shape, of every active expert with its slots'
/// activations: `[active][kinds]`; where `dots`, the bits of the dot products.
#[allow(clippy::too_many_arguments)]
fn multiply(
    level: Level,
    experts: &Experts,
    slots: &Slots,
    kinds: &[MatrixKind],
    activations: &[&Activation],
    dots: bool,
) -> Result<Vec<Products>, CpuError> {
    let matmul = if dots { int4::dots } else { int4::matmul };
    let (rows, cols) = experts.shape.dims(kinds[0]);
    let parallel = slots.token.len() * kinds.len() * rows * cols >= PARALLEL_FROM;
    let mut matrices = Vec::with_capacity(slots.active.len() * kinds.len());
    for (expert, _) in &slots.active {
        for kind in kinds {
            matrices.push((*expert, *kind, experts.matrix(*expert, *kind)?));
        }
    }
    let scratch = match experts.form {
        Form::Unfused => decode(level, experts, &matrices, parallel)?,
        Form::Fused => Vec::new(),
    };
    for ((_, _, source), packed) in matrices.iter_mut().zip(&scratch) {
        if let Source::Coded(_, whole) = *source {
            *source = Source::Raw(Int4 { packed, ..whole });
        }
    }
    let range = |i: usize| slots.active[i / kinds.len()].1.clone();
    let mut products: Vec<Products> = matrices
        .iter()
        .enumerate()
        .map(|(i, (_, _, source))| {
            let jobs = match source {
                Source::Raw(_) => (0..rows)
                    .step_by(JOB_ROWS)
                    .map(|first| first..rows.min(first + JOB_ROWS))
                    .collect(),
                Source::Coded(coded, _) => (0..coded.blocks())
                    .map(|block| coded.block_rows(block))
                    .collect(),
            };
            Products::new(range(i).len(), jobs)
        })
        .collect();
    let mut jobs = Vec::new();
    for (i, (matrix, products)) in matrices.iter().zip(&mut products).enumerate() {
        for (block, (rows, out)) in products.jobs().enumerate() {
            jobs.push((matrix, block, rows, &activations[range(i)], out));
        }
    }
    let arm = decoder(level);
    try_for_each(
        parallel,
        jobs,
        |((e, kind, source), block, rows, activations, out)| match source {
            Source::Raw(matrix) => {
                let matrix = matrix.slice(rows.start, rows.len());
                matmul(level, matrix, activations, out);
                Ok::<(), CpuError>(())
            }
            Source::Coded(coded, whole) => TILE.with_borrow_mut(|tile| {
                tile.resize(rows.len() * coded.row_bytes(), 0);
                coded
                    .decode_block(arm, block, tile)
                    .map_err(|error| experts.damaged(*e, *kind, error))?;
                let scales = whole.scales_of(rows.start, rows.len());
                let matrix = Int4 {
                    packed: tile,
                    scales,
                    ..*whole
                };
                matmul(level, matrix, activations, out);
                Ok(())
            }),
        },
    )?;
    Ok(products)
}

/// Dot products of high nibbles and of low ones to outputs of int8 weights.
fn int8(high: &mut [f32], low: &[f32], scales: &[f32], x: &Activation) {
    for ((high, low), scale) in high.iter_mut().zip(low).zip(scales) {
        let (h, l) = (high.to_bits() as i32, low.to_bits() as i32);
        *high = gpu::arith::dequantise_int8(*scale, x.scale, h, l, x.sum);
    }
}

/// `outs[t] = sum over i ascending of fma(weights[t][i], y, acc)`.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    level: Level,
    experts: &Experts,
    low: Option<&Experts>,
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
    // Of int8 weights the dot products with both nibbles.
    let both = |kinds: &[MatrixKind], inputs: &[&Activation]| {
        let products = multiply(level, experts, &slots, kinds, inputs, low.is_some())?;
        let lows = match low {
            Some(low) => multiply(level, low, &slots, kinds, inputs, true)?,
            None => Vec::new(),
        };
        Ok::<_, CpuError>((products, lows))
    };
    let (products, lows) = both(&[MatrixKind::Gate, MatrixKind::Up], &by_slot)?;

    let mut hidden = vec![Activation::default(); slots.token.len()];
    let mut jobs = Vec::with_capacity(hidden.len());
    let mut rest = &mut hidden[..];
    for (active, (_, range)) in slots.active.iter().enumerate() {
        let (these, others) = rest.split_at_mut(range.len());
        rest = others;
        jobs.extend(these.iter_mut().enumerate().map(|(j, h)| (active, j, h)));
    }
    for_each(parallel, jobs, |(active, j, hidden)| {
        let mut values = vec![0.0; 3 * shape.intermediate];
        let (gate, rest) = values.split_at_mut(shape.intermediate);
        let (up, h) = rest.split_at_mut(shape.intermediate);
        products[2 * active].copy_slot(j, gate);
        products[2 * active + 1].copy_slot(j, up);
        if low.is_some() {
            let (expert, range) = &slots.active[active];
            for (i, high) in [&mut *gate, &mut *up].into_iter().enumerate() {
                lows[2 * active + i].copy_slot(j, h);
                let scales = experts.scales(*expert, MatrixKind::ALL[i]);
                int8(high, h, scales, by_slot[range.start + j]);
            }
        }
        dense::silu_mul(level, gate, up, h);
        int4::quantise(level, h, hidden);
    });
    let by_slot: Vec<&Activation> = hidden.iter().collect();
    let (products, lows) = both(&[MatrixKind::Down], &by_slot)?;

    for_each(
        parallel,
        outs.into_iter().enumerate().collect(),
        |(t, out): (usize, &mut [f32])| {
            out.fill(0.0);
            let these = t * top_k..(t + 1) * top_k;
            let (mut high, mut rest) = (Vec::new(), Vec::new());
            for ((active, j), weight) in slots.of[these.clone()].iter().zip(&weights[these]) {
                if low.is_some() {
                    high.resize(out.len(), 0.0);
                    rest.resize(out.len(), 0.0);
                    products[*active].copy_slot(*j, &mut high);
                    lows[*active].copy_slot(*j, &mut rest);
                    let (expert, range) = &slots.active[*active];
                    let scales = experts.scales(*expert, MatrixKind::Down);
                    int8(&mut high, &rest, scales, by_slot[range.start + *j]);
                    dense::axpy(level, *weight, &high, out);
                    continue;
                }
                for (first, y) in products[*active].slot(*j) {
                    dense::axpy(level, *weight, y, &mut out[first..first + y.len()]);
                }
            }
        },
    );
    Ok(())
}

/// Quantised inputs of both halves of an expert FFN, to time its matrices alone.
pub struct Prepared {
    slots: Slots,
    inputs: Vec<Activation>,
    hidden: Vec<Activation>,
}

impl Prepared {
    /// `x` `[tokens, hidden]`, `h` `[tokens * top_k, intermediate]`, `ids` `[tokens, top_k]`.
    pub(super) fn new(
        level: Level,
        experts: &Experts,
        x: &[f32],
        h: &[f32],
        ids: &[u32],
        top_k: usize,
    ) -> Self {
        let quantise = |rows: &[f32], cols: usize| -> Vec<Activation> {
            rows.chunks_exact(cols)
                .map(|x| {
                    let mut out = Activation::default();
                    int4::quantise(level, x, &mut out);
                    out
                })
                .collect()
        };
        Self {
            slots: Slots::new(ids, top_k, experts.len()),
            inputs: quantise(x, experts.shape.hidden),
            hidden: quantise(h, experts.shape.intermediate),
        }
    }

    /// Multiplies with gate and up, or with down; the products are dropped.
    pub(super) fn multiply(
        &self,
        level: Level,
        experts: &Experts,
        down: bool,
    ) -> Result<(), CpuError> {
        let slots = &self.slots;
        let products = if down {
            let hidden: Vec<&Activation> = self.hidden.iter().collect();
            multiply(level, experts, slots, &[MatrixKind::Down], &hidden, false)?
        } else {
            let inputs: Vec<&Activation> = slots.token.iter().map(|t| &self.inputs[*t]).collect();
            multiply(
                level,
                experts,
                slots,
                &[MatrixKind::Gate, MatrixKind::Up],
                &inputs,
                false,
            )?
        };
        std::hint::black_box(products);
        Ok(())
    }
}
