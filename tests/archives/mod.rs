//! What the tests of archives share: experts in memory, damage, verdicts.
#![allow(dead_code)]

use std::borrow::Cow;
use std::path::Path;

use host::archive::{
    Archive, ArchiveError, CodecChoice, ExpertSource, LEAST_SAVING, PackOptions, SymbolChoice,
    verify,
};
use host::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

/// A small generator: xorshift64*.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let u = ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let v = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

/// Gaussian weights, rounded to bf16 or not, through the int4 rule.
pub fn gaussian(
    r: &mut Random,
    rows: usize,
    cols: usize,
    kind: ScaleKind,
    bf16: bool,
) -> RawMatrix<'static> {
    let width = match kind {
        ScaleKind::Row => cols,
        ScaleKind::G64 => 64,
    };
    let mut packed = Vec::with_capacity(rows * cols / 2);
    let mut scales = Vec::new();
    for _ in 0..rows * cols / width {
        let w: Vec<f32> = (0..width)
            .map(|_| {
                let w = r.normal() * 0.02;
                if bf16 {
                    half::bf16::from_f32(w).to_f32()
                } else {
                    w
                }
            })
            .collect();
        let amax = w.iter().fold(0f32, |m, w| m.max(w.abs()));
        let s = (amax / 7.0).max(1e-8);
        scales.push(s);
        let q: Vec<u8> = w
            .iter()
            .map(|w| ((w / s).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8)
            .collect();
        packed.extend(q.chunks(2).map(|q| q[0] | q[1] << 4));
    }
    RawMatrix {
        packed: Cow::Owned(packed),
        scales: Cow::Owned(scales),
    }
}

pub struct Memory {
    pub shape: ExpertShape,
    pub layers: Vec<u32>,
    pub experts: Vec<[RawMatrix<'static>; 3]>,
    /// Experts after which they repeat.
    pub distinct: usize,
}

impl Memory {
    pub fn new(
        shape: ExpertShape,
        layers: &[u32],
        experts: usize,
        mut make: impl FnMut(MatrixKind, (usize, usize)) -> RawMatrix<'static>,
    ) -> Self {
        let n = layers.len() * experts;
        Self {
            distinct: n,
            shape,
            layers: layers.to_vec(),
            experts: (0..n)
                .map(|_| MatrixKind::ALL.map(|k| make(k, shape.dims(k))))
                .collect(),
        }
    }

    /// The first `distinct` experts stand for all.
    pub fn repeated(mut self, distinct: usize) -> Self {
        self.distinct = distinct;
        for i in distinct..self.experts.len() {
            self.experts[i] = self.experts[i - distinct].clone();
        }
        self
    }

    pub fn gaussian(shape: ExpertShape, layers: &[u32], experts: usize, bf16: bool) -> Self {
        let mut r = Random(17);
        Self::new(shape, layers, experts, |_, (rows, cols)| {
            gaussian(&mut r, rows, cols, shape.scales, bf16)
        })
    }
}

impl ExpertSource for Memory {
    fn shape(&self) -> &ExpertShape {
        &self.shape
    }
    fn layers(&self) -> &[u32] {
        &self.layers
    }
    fn experts(&self) -> usize {
        self.experts.len() / self.layers.len()
    }
    fn expert(&self, layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        let l = self.layers.iter().position(|l| *l == layer).unwrap();
        Ok(self.experts[l * self.experts() + expert].clone())
    }
    fn shared(&self, layer: u32, expert: usize) -> Option<(u32, usize)> {
        let l = self.layers.iter().position(|l| *l == layer).unwrap();
        let i = l * self.experts() + expert;
        let first = i % self.distinct;
        let (l, e) = (first / self.experts(), first % self.experts());
        (first != i).then(|| (self.layers[l], e))
    }
}

pub fn shape(hidden: usize, intermediate: usize, scales: ScaleKind) -> ExpertShape {
    ExpertShape {
        hidden,
        intermediate,
        scales,
    }
}

pub fn options(symbols: SymbolChoice, codec: CodecChoice) -> PackOptions {
    PackOptions {
        symbols,
        codec,
        // What is asked for by name is wanted however little it saves.
        least_saving: match codec {
            CodecChoice::Auto => LEAST_SAVING,
            _ => f64::NEG_INFINITY,
        },
        ..PackOptions::default()
    }
}

pub fn verified(source: &Memory, path: &Path) -> Archive {
    let archive = Archive::open(path).unwrap();
    verify(&archive, Some(source), |_| ()).unwrap();
    archive
}

/// Where in the format the fields are that these tests change (`docs/format.md`).
pub const HEADER: usize = 256;
pub const INDEX: usize = 48;

pub fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}

/// Writes, opens and verifies; the message if that fails.
pub fn judge(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).unwrap();
    let archive = Archive::open(path).map_err(|e| e.to_string())?;
    verify(&archive, None::<&Memory>, |_| ()).map_err(|e| e.to_string())?;
    Ok(())
}

/// Makes checksums, fingerprint and digest right again, as far as the index can be followed.
pub fn sign(b: &mut [u8]) {
    if b.len() < HEADER {
        return;
    }
    let (index, records) = (u64_at(b, 64), u64_at(b, 72));
    if index > records || records > b.len() as u64 {
        return;
    }
    let (index, records) = (index as usize, records as usize);
    for at in (index..records.saturating_sub(INDEX - 1)).step_by(INDEX) {
        let (from, len) = (u64_at(b, at), u64_at(b, at + 8));
        let Some(end) = from.checked_add(len).filter(|e| *e <= b.len() as u64) else {
            continue;
        };
        let sum = blake3::hash(&b[from as usize..end as usize]);
        b[at + 16..at + 32].copy_from_slice(&sum.as_bytes()[..16]);
    }
    seal(b);
}

/// The digest over what comes before the records.
pub fn seal(b: &mut [u8]) {
    let records = u64_at(b, 72) as usize;
    b[224..256].fill(0);
    let digest = *blake3::hash(&b[..records]).as_bytes();
    b[224..256].copy_from_slice(&digest);
}
