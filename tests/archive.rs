//! Archives: packing, reading, verifying, and what damage does.

use std::borrow::Cow;
use std::path::Path;

use gpu::layout::Symbol;
use host::archive::{
    Archive, ArchiveError, ClassSummary, CodecChoice, ExpertSource, PackOptions, SymbolChoice,
    pack, verify,
};
use host::codec::{Arm, Codec, ScaleFormat};
use host::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

/// A small generator: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Standard normal (Box and Muller).
    fn normal(&mut self) -> f32 {
        let u = ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let v = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

/// Gaussian weights, rounded to bf16 or not, through the int4 rule.
fn gaussian(
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

struct Memory {
    shape: ExpertShape,
    layers: Vec<u32>,
    experts: Vec<[RawMatrix<'static>; 3]>,
}

impl Memory {
    fn new(
        shape: ExpertShape,
        layers: &[u32],
        experts: usize,
        mut make: impl FnMut(MatrixKind, (usize, usize)) -> RawMatrix<'static>,
    ) -> Self {
        let n = layers.len() * experts;
        Self {
            shape,
            layers: layers.to_vec(),
            experts: (0..n)
                .map(|_| MatrixKind::ALL.map(|k| make(k, shape.dims(k))))
                .collect(),
        }
    }

    fn gaussian(shape: ExpertShape, layers: &[u32], experts: usize, bf16: bool) -> Self {
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
}

fn shape(hidden: usize, intermediate: usize, scales: ScaleKind) -> ExpertShape {
    ExpertShape {
        hidden,
        intermediate,
        scales,
    }
}

fn options(symbols: SymbolChoice, codec: CodecChoice) -> PackOptions {
    PackOptions {
        symbols,
        codec,
        ..PackOptions::default()
    }
}

fn verified(source: &Memory, path: &Path) -> Archive {
    let archive = Archive::open(path).unwrap();
    verify(&archive, Some(source), |_| ()).unwrap();
    archive
}

#[test]
fn what_is_packed_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let source = Memory::gaussian(shape(256, 128, scales), &[1, 4], 3, true);
        for symbols in [
            SymbolChoice::Auto,
            SymbolChoice::Always(Symbol::Pair),
            SymbolChoice::Always(Symbol::Triple),
        ] {
            for codec in [CodecChoice::Auto, CodecChoice::Rans, CodecChoice::Raw] {
                let s = pack(&source, &options(symbols, codec), &path, |_| ()).unwrap();
                let archive = verified(&source, &path);
                assert_eq!(s.file_bytes, std::fs::metadata(&path).unwrap().len());
                let record = archive.record(4, 2).unwrap();
                for kind in MatrixKind::ALL {
                    let m = record.matrix(kind);
                    match (codec, symbols) {
                        (CodecChoice::Raw, _) => assert_eq!(m.codec, Codec::Raw),
                        (CodecChoice::Rans, SymbolChoice::Always(s)) => {
                            assert_eq!(m.codec, Codec::Rans(s));
                        }
                        _ => {}
                    }
                    assert_eq!(m.scale_format, ScaleFormat::Amax16);
                    for part in [&m.offsets, &m.stream, &m.scales] {
                        assert_eq!(part.start % 16, 0);
                    }
                    assert_eq!(record.bytes.as_ptr().addr() % 16, 0);
                }
                assert!(matches!(
                    archive.record(2, 0),
                    Err(ArchiveError::Missing { layer: 2, .. })
                ));
                assert!(archive.record(1, 3).is_err());
            }
        }
    }
}

/// The ratio that a GLM-5.2 expert must reach, all overhead counted.
#[test]
fn a_synthetic_glm_expert_reaches_its_ratio() {
    let source = Memory::gaussian(shape(6144, 2048, ScaleKind::Row), &[3], 1, true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("glm.ansx");
    // Triples have the larger table and the smaller blocks: faster on GPUs, not smaller.
    for (symbols, most) in [
        (SymbolChoice::Auto, 0.745),
        (SymbolChoice::Always(Symbol::Triple), 0.7475),
    ] {
        let s = pack(&source, &options(symbols, CodecChoice::Auto), &path, |_| ()).unwrap();
        let class = |c: &ClassSummary| {
            (
                c.coded_bytes as f64 / c.packed_bytes as f64,
                c.entropy_bytes / c.packed_bytes as f64,
            )
        };
        eprintln!(
            "{symbols:?}: {} symbols, archive/raw {:.4}, archive/packed {:.4}, gate_up {:.4?}, down {:.4?}",
            s.symbols,
            s.ratio,
            s.file_bytes as f64 / (s.gate_up.packed_bytes + s.down.packed_bytes) as f64,
            class(&s.gate_up),
            class(&s.down),
        );
        assert!(s.ratio <= most, "{symbols:?}: {}", s.ratio);
        verified(&source, &path);
    }
    let archive = Archive::open(&path).unwrap();
    let record = archive.record(3, 0).unwrap();
    for arm in Arm::ALL.into_iter().filter(|a| a.available()) {
        let coded = record.coded(MatrixKind::Gate).unwrap();
        let mut out = vec![0; 2048 * 3072];
        coded.decode(arm, &mut out).unwrap();
        assert!(out[..] == source.experts[0][0].packed[..]);
    }
}
