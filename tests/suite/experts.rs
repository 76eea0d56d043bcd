//! Routed experts: raw, coded in pairs and triples, fused and unfused, mixed.

use std::borrow::Cow;

use gpu::layout::Symbol;
use host::archive::{
    Archive, ArchiveError, CodecChoice, ExpertSource, LEAST_SAVING, PackOptions, SymbolChoice, pack,
};
use host::backend::{LayerExperts, LoadExperts};
use host::expert::{ExpertShape, Form, MatrixKind, RawMatrix, ScaleKind};

use super::{At, Case, Rng, check, rows, rows_mut};

/// What the nibbles of a matrix are like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Data {
    /// Weights through the int4 rule.
    Normal,
    /// Every nibble equally likely.
    Uniform,
    /// One nibble.
    Single,
    /// Most nibbles one value.
    Skewed,
}

const DATA: [Data; 4] = [Data::Normal, Data::Uniform, Data::Single, Data::Skewed];

fn matrix(
    rng: &mut Rng,
    (rows, cols): (usize, usize),
    scales: ScaleKind,
    data: Data,
) -> RawMatrix<'static> {
    let single = rng.below(16) as u8;
    let mut nibble = || match data {
        Data::Normal => ((rng.normal() * 2.5).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8,
        Data::Uniform => rng.below(16) as u8,
        Data::Single => single,
        Data::Skewed => match rng.below(20) {
            0 => rng.below(16) as u8,
            _ => single,
        },
    };
    let packed: Vec<u8> = (0..rows * cols / 2)
        .map(|_| nibble() | nibble() << 4)
        .collect();
    // Half of the matrices have scales that 16 bits of amax give back.
    let short = rng.below(2) == 0;
    let scales = (0..scales.count(rows, cols))
        .map(|_| {
            let amax = rng.below(1000) as f32 * 1e-4;
            if short {
                gpu::arith::scale_from_amax((amax.to_bits() >> 16) as u16)
            } else {
                amax
            }
        })
        .collect();
    RawMatrix {
        packed: Cow::Owned(packed),
        scales: Cow::Owned(scales),
    }
}

fn layer(
    rng: &mut Rng,
    shape: &ExpertShape,
    experts: usize,
    mut data: impl FnMut(&mut Rng) -> Data,
) -> Vec<[RawMatrix<'static>; 3]> {
    (0..experts)
        .map(|_| {
            MatrixKind::ALL.map(|kind| {
                let data = data(rng);
                matrix(rng, shape.dims(kind), shape.scales, data)
            })
        })
        .collect()
}

/// `tokens` times `top_k` distinct experts, ascending.
fn choices(rng: &mut Rng, tokens: usize, top_k: usize, experts: usize) -> Vec<u32> {
    (0..tokens)
        .flat_map(|_| {
            let mut all: Vec<u32> = (0..experts as u32).collect();
            while all.len() > top_k {
                all.remove(rng.below(all.len()));
            }
            all
        })
        .collect()
}

/// The experts operator. The reference always takes the raw experts; the other back end takes them
/// coded where there is an archive.
struct Experts<'a> {
    shape: ExpertShape,
    raw: &'a [[RawMatrix<'static>; 3]],
    archive: Option<(&'a Archive, Form)>,
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    top_k: usize,
    tokens: usize,
    at: At,
}

impl<'a> Experts<'a> {
    fn new(
        rng: &mut Rng,
        shape: ExpertShape,
        raw: &'a [[RawMatrix<'static>; 3]],
        top_k: usize,
        tokens: usize,
    ) -> Self {
        let at = At::new(shape.hidden, tokens == 2);
        let mut x = rng.f32s(at.len(tokens));
        if tokens > 2 {
            x[at.offset..at.offset + shape.hidden].fill(0.0);
        }
        Self {
            shape,
            raw,
            archive: None,
            x,
            ids: choices(rng, tokens, top_k, raw.len()),
            weights: rng.f32s(tokens * top_k),
            top_k,
            tokens,
            at,
        }
    }
}

impl Case for Experts<'_> {
    fn run<B: LoadExperts>(&self, b: &B, out: &mut B::Buf<f32>) -> Result<(), B::Error> {
        let reference = b.describe() == "cpu (reference)";
        let (layer, form) = match self.archive {
            Some((archive, form)) if !reference => {
                let layer = archive.layer(0).unwrap();
                let records = (0..layer.experts()).map(|e| layer.record(e).unwrap());
                let records = records.collect();
                (LayerExperts::Coded { layer, records }, form)
            }
            _ => (LayerExperts::Raw(self.raw.to_vec()), Form::Fused),
        };
        let experts = b.load_experts(layer, self.shape, form)?;
        let (x, ids) = (b.upload(&self.x)?, b.upload(&self.ids)?);
        let weights = b.upload(&self.weights)?;
        b.experts(
            &experts,
            rows(&x, self.at),
            &ids,
            &weights,
            self.top_k,
            self.tokens,
            rows_mut(out, self.at),
        )
    }

    fn len(&self) -> usize {
        self.at.len(self.tokens)
    }
}

pub fn raw_experts<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (hidden, intermediate) in [
        (64, 64),
        (128, 192),
        (256, 128),
        (320, 64),
        (576, 1088),
        (1536, 256),
        (2112, 64),
        (128, 4096),
        (64, 8192),
    ] {
        for scales in [ScaleKind::Row, ScaleKind::G64] {
            let shape = ExpertShape {
                hidden,
                intermediate,
                scales,
            };
            let raw = layer(&mut rng, &shape, 5, |rng| DATA[rng.below(4)]);
            for (tokens, top_k) in [(0, 3), (1, 1), (1, 5), (2, 3), (7, 3), (8, 1), (33, 2)] {
                if tokens > 2 && hidden * intermediate > 1 << 17 {
                    continue;
                }
                let case = Experts::new(&mut rng, shape, &raw, top_k, tokens);
                check(&format!("experts {shape:?} {top_k} of {tokens}"), b, &case);
            }
        }
    }
}

struct Memory<'a> {
    shape: ExpertShape,
    layer: &'a [[RawMatrix<'static>; 3]],
}

impl ExpertSource for Memory<'_> {
    fn shape(&self) -> &ExpertShape {
        &self.shape
    }

    fn layers(&self) -> &[u32] {
        &[0]
    }

    fn experts(&self) -> usize {
        self.layer.len()
    }

    fn expert(&self, _: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        Ok(self.layer[expert].clone())
    }
}

/// A small geometry.
pub fn small() -> ExpertShape {
    ExpertShape {
        hidden: 128,
        intermediate: 64,
        scales: ScaleKind::Row,
    }
}

/// Several blocks a matrix, however small.
const SMALL_BLOCKS: Option<usize> = Some(6000);

/// An archive in a folder of its own.
pub struct Packed {
    pub archive: Archive,
    _folder: tempfile::TempDir,
}

fn packed(
    shape: ExpertShape,
    raw: &[[RawMatrix<'static>; 3]],
    codec: CodecChoice,
    symbol: Symbol,
    block_nibbles: Option<usize>,
) -> Packed {
    packed_with(
        shape,
        raw,
        &PackOptions {
            codec,
            symbols: SymbolChoice::Always(symbol),
            block_nibbles,
            // Small matrices save little.
            least_saving: match codec {
                CodecChoice::Auto => LEAST_SAVING,
                _ => f64::NEG_INFINITY,
            },
            ..PackOptions::default()
        },
    )
}

fn packed_with(
    shape: ExpertShape,
    raw: &[[RawMatrix<'static>; 3]],
    options: &PackOptions,
) -> Packed {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("experts.ansx");
    let source = Memory { shape, layer: raw };
    pack(&source, options, &file, |_| (), || false).unwrap();
    Packed {
        archive: Archive::open(&file).unwrap(),
        _folder: folder,
    }
}

/// An archive of one layer of coded experts.
pub fn archive(rng: &mut Rng, shape: ExpertShape, experts: usize, symbol: Symbol) -> Packed {
    let raw = layer(rng, &shape, experts, |_| Data::Normal);
    packed(shape, &raw, CodecChoice::Rans, symbol, SMALL_BLOCKS)
}

/// Checks all forms of a packed layer for the numbers of tokens given.
fn coded<B: LoadExperts>(
    b: &B,
    rng: &mut Rng,
    raw: &[[RawMatrix<'static>; 3]],
    packed: &Packed,
    symbol: Symbol,
    tokens: &[usize],
) {
    let shape = *packed.archive.shape();
    for form in [Form::Fused, Form::Unfused] {
        for &tokens in tokens {
            let mut case = Experts::new(rng, shape, raw, 3, tokens);
            case.archive = Some((&packed.archive, form));
            let what = format!("{symbol:?} experts {shape:?}, {form:?}, {tokens} tokens");
            check(&what, b, &case);
        }
    }
}

pub fn coded_experts<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (hidden, intermediate, tokens) in [
        (64, 64, &[0, 1, 33][..]),
        (128, 256, &[1, 2, 7]),
        (320, 192, &[8]),
        (1536, 64, &[1]),
        (64, 2112, &[2]),
    ] {
        for scales in [ScaleKind::Row, ScaleKind::G64] {
            let shape = ExpertShape {
                hidden,
                intermediate,
                scales,
            };
            let raw = layer(&mut rng, &shape, 4, |_| Data::Normal);
            for symbol in [Symbol::Pair, Symbol::Triple] {
                let packed = packed(shape, &raw, CodecChoice::Rans, symbol, SMALL_BLOCKS);
                coded(b, &mut rng, &raw, &packed, symbol, tokens);
            }
        }
    }
}

pub fn mixed_codecs<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    let shape = ExpertShape {
        hidden: 256,
        intermediate: 128,
        scales: ScaleKind::Row,
    };
    // Uniform nibbles do not shrink: those matrices stay raw beside coded ones.
    let raw = layer(&mut rng, &shape, 6, |rng| DATA[rng.below(4)]);
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let packed = packed(shape, &raw, CodecChoice::Auto, symbol, SMALL_BLOCKS);
        coded(b, &mut rng, &raw, &packed, symbol, &[1, 8]);
    }
}

/// Experts in plane3 alone, and beside rANS and raw ones.
pub fn plane3_experts<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (hidden, intermediate, tokens) in [
        (64, 128, &[1, 3][..]),
        (192, 64, &[2]),
        (1024, 320, &[1, 7]),
        (2048, 96 * 2, &[1]),
    ] {
        let shape = ExpertShape {
            hidden,
            intermediate,
            scales: ScaleKind::Row,
        };
        let raw = layer(&mut rng, &shape, 6, |rng| DATA[rng.below(4)]);
        for symbol in [Symbol::Pair, Symbol::Triple] {
            // What does not shrink is raw in the second archive.
            for (least_saving, hot) in [(f64::NEG_INFINITY, 0..6), (LEAST_SAVING, 2..5)] {
                let options = PackOptions {
                    symbols: SymbolChoice::Always(symbol),
                    block_nibbles: SMALL_BLOCKS,
                    hot: hot.map(|expert| (0, expert)).collect(),
                    least_saving,
                    ..PackOptions::default()
                };
                let packed = packed_with(shape, &raw, &options);
                coded(b, &mut rng, &raw, &packed, symbol, tokens);
            }
        }
    }
}

/// For back ends that are fast.
pub fn large_coded_experts<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let shape = ExpertShape {
            hidden: 4096,
            intermediate: 448,
            scales,
        };
        let raw = layer(&mut rng, &shape, 4, |_| Data::Normal);
        for symbol in [Symbol::Pair, Symbol::Triple] {
            let packed = packed(shape, &raw, CodecChoice::Rans, symbol, None);
            coded(b, &mut rng, &raw, &packed, symbol, &[1, 7]);
        }
    }
}
