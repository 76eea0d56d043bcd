//! `host bench kernels`: what the experts' matrices cost on a device, raw, decoded first
//! (unfused) and decoded while multiplying (fused).
//!
//! Each case is checked before it is timed: all forms must give the bits of the CPU's plain arm.
//! Then every stage runs over sets of experts in turn, together larger than the caches, so that
//! weights come from memory; the median counts. On a device the runs are given to it one behind the
//! other, as a model does, so that what is timed is the device and not the way to it. Rates are
//! raw-equivalent: bytes of packed int4 that the work stands for, whatever was read; beside them stands
//! what share of the rate of a plain copy on the device its reads and writes come to.

pub mod decode;
pub mod synth;

use std::time::Instant;

use gpu::layout::Symbol;
use serde::Serialize;

use crate::archive::{
    Archive, ArchiveError, CodecChoice, ExpertSource, PackOptions, SymbolChoice, pack,
};
use crate::backend::cpu::{self, Cpu, CpuError};
use crate::backend::{Backend, LayerExperts, LoadExperts, rows, rows_mut};
use crate::expert::{ExpertShape, Form, MatrixKind, RawMatrix, ScaleKind};
use crate::interrupt;
use crate::simd::Arm;

/// What goes wrong in a benchmark.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Packing the synthetic experts.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// Stopped by the user.
    #[error("interrupted")]
    Interrupted,
    /// The place for the synthetic archive.
    #[error("no temporary folder for the synthetic archive: {0}; set TMPDIR to a writable folder")]
    Folder(#[from] std::io::Error),
    /// The device.
    #[error("{device}: {source}")]
    Device {
        /// Which.
        device: String,
        /// What happened.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A back end that computes something else.
    #[error(
        "{device}, {case}, {form}: element {element} differs from the plain arm's: {expected:e} \
         expected, {found:e} found"
    )]
    Differs {
        /// Which back end.
        device: String,
        /// Which case.
        case: String,
        /// Raw, unfused or fused.
        form: &'static str,
        /// First element that differs.
        element: usize,
        /// What it should be.
        expected: f32,
        /// What it is.
        found: f32,
    },
}

/// A stage of the experts' FFN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The two input matrices of each expert.
    GateUp,
    /// The output matrix of each expert.
    Down,
    /// The launches of [`Stage::GateUp`] and [`Stage::Down`], one behind the other.
    Matrices,
    /// Coded matrices to packed int4 in memory, all three of each expert.
    Decode,
    /// Everything: quantise, gate and up, silu, quantise, down, weighted sum.
    Ffn,
}

/// A back end that can be timed stage by stage.
pub trait Timed: LoadExperts {
    /// Quantised inputs.
    type Prepared;

    /// Bytes of cache between the kernels and the memory that weights should come from.
    fn cache_bytes(&self) -> usize;

    /// Inputs of the matrices: `x` `[tokens, hidden]`, `h` `[tokens * top_k, intermediate]`.
    fn prepare(
        &self,
        experts: &Self::Experts,
        x: &[f32],
        h: &[f32],
        ids: &[u32],
        top_k: usize,
    ) -> Result<Self::Prepared, Self::Error>;

    /// Starts the products of gate and up, or of down.
    fn multiply(
        &self,
        experts: &Self::Experts,
        prepared: &Self::Prepared,
        down: bool,
    ) -> Result<(), Self::Error>;

    /// Decodes the matrices of a stage's experts to memory; false where a back end does not do so on
    /// its own.
    fn decode(
        &self,
        experts: &Self::Experts,
        prepared: &Self::Prepared,
    ) -> Result<bool, Self::Error>;

    /// Bytes a second that a plain copy in the device's memory reads and writes.
    fn copy_rate(&self) -> Result<Option<f64>, Self::Error>;

    /// Seconds that the device takes for each of `runs` of what `work` gives it to do.
    fn seconds(
        &self,
        runs: usize,
        work: &mut dyn FnMut(usize) -> Result<(), Self::Error>,
    ) -> Result<Vec<f64>, Self::Error>;
}

impl Timed for Cpu {
    type Prepared = cpu::Prepared;

    /// A share of a large server's last level.
    fn cache_bytes(&self) -> usize {
        64 << 20
    }

    fn prepare(
        &self,
        experts: &cpu::Experts,
        x: &[f32],
        h: &[f32],
        ids: &[u32],
        top_k: usize,
    ) -> Result<cpu::Prepared, CpuError> {
        Ok(Cpu::prepare(self, experts, x, h, ids, top_k))
    }

    fn multiply(
        &self,
        experts: &cpu::Experts,
        prepared: &cpu::Prepared,
        down: bool,
    ) -> Result<(), CpuError> {
        Cpu::multiply(self, experts, prepared, down)
    }

    /// Its decoders are timed by themselves: `cargo test --release --test codec -- --ignored speed`.
    fn decode(&self, _: &cpu::Experts, _: &cpu::Prepared) -> Result<bool, CpuError> {
        Ok(false)
    }

    fn copy_rate(&self) -> Result<Option<f64>, CpuError> {
        Ok(None)
    }

    fn seconds(
        &self,
        runs: usize,
        work: &mut dyn FnMut(usize) -> Result<(), CpuError>,
    ) -> Result<Vec<f64>, CpuError> {
        (0..runs)
            .map(|run| {
                let start = Instant::now();
                work(run)?;
                Ok(start.elapsed().as_secs_f64())
            })
            .collect()
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Geometry and scales.
    pub shape: ExpertShape,
    /// Experts that every token goes to.
    pub experts: usize,
    /// Tokens.
    pub tokens: usize,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "H {} I {} {}, {} experts, {} tokens",
            self.shape.hidden,
            self.shape.intermediate,
            scales_name(self.shape.scales),
            self.experts,
            self.tokens
        )
    }
}

fn scales_name(scales: ScaleKind) -> &'static str {
    match scales {
        ScaleKind::Row => "row",
        ScaleKind::G64 => "g64",
    }
}

/// How.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Timed runs of each stage, at least 1.
    pub runs: usize,
    /// Codecs of the coded forms, in this order; those that the scales do not allow are passed over.
    pub codecs: Vec<Coding>,
    /// Nibbles of a block of rANS; by default as `host pack` chooses.
    pub block_nibbles: Option<usize>,
    /// Seed of weights and activations.
    pub seed: u64,
    /// Bytes of cache that sets of experts must outgrow; by default the back end's.
    pub cache_bytes: Option<usize>,
    /// What to time.
    pub ways: Vec<Way>,
}

/// A codec of the coded forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Coding {
    /// rANS over pairs.
    RansPair,
    /// rANS over triples.
    RansTriple,
    /// plane3; row scales only.
    Plane3,
}

impl Coding {
    fn options(self, block_nibbles: Option<usize>) -> PackOptions {
        let (codec, symbols) = match self {
            Coding::RansPair => (CodecChoice::Rans, SymbolChoice::Always(Symbol::Pair)),
            Coding::RansTriple => (CodecChoice::Rans, SymbolChoice::Always(Symbol::Triple)),
            Coding::Plane3 => (CodecChoice::Plane3, SymbolChoice::Auto),
        };
        PackOptions {
            codec,
            symbols,
            block_nibbles,
            ..PackOptions::default()
        }
    }
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measurement {
    /// Back end.
    pub device: String,
    /// Hidden size.
    pub hidden: usize,
    /// Intermediate size.
    pub intermediate: usize,
    /// `row` or `g64`.
    pub scales: &'static str,
    /// Active experts.
    pub experts: usize,
    /// Tokens.
    pub tokens: usize,
    /// Part of the FFN.
    pub stage: Stage,
    /// `raw`, `unfused` or `fused`.
    pub form: &'static str,
    /// `raw`, `rans-pair`, `rans-triple`, `plane3`; `mixed` where matrices differ.
    pub codec: &'static str,
    /// Median of the runs.
    pub microseconds: f64,
    /// Fastest run.
    pub microseconds_min: f64,
    /// 1e9 bytes of packed int4 replaced a second.
    pub raw_equivalent_gb_s: f64,
    /// Bytes of weights read: nibbles or streams with their offsets, and scales.
    pub bytes_read: usize,
    /// Bytes of streams and offsets over bytes of packed int4, scales apart.
    pub ratio: f64,
    /// Bytes of weights read, and written where they are decoded, a second, over those that a copy
    /// reads and writes; `None` where that is not known.
    pub of_copy: Option<f64>,
    /// Largest number of low-order bits in which an output differs from the plain arm's.
    pub bits_of_difference: u32,
}

/// Synthetic experts of one layer, all distinct.
struct Distinct {
    shape: ExpertShape,
    experts: Vec<[RawMatrix<'static>; 3]>,
}

/// Distinct experts; sets repeat them at other addresses.
const DISTINCT: usize = 2;

impl ExpertSource for Distinct {
    fn shape(&self) -> &ExpertShape {
        &self.shape
    }
    fn layers(&self) -> &[u32] {
        &[0]
    }
    fn experts(&self) -> usize {
        self.experts.len()
    }
    fn expert(&self, _layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        Ok(self.experts[expert].clone())
    }
}

/// Weights of a shape, raw and packed, for all its cases.
pub struct Weights {
    raw: Distinct,
    /// One for each codec that the shape allows.
    archives: Vec<(Coding, Archive)>,
    seed: u64,
}

impl Weights {
    /// Makes and packs them.
    pub fn new(shape: ExpertShape, settings: &Settings) -> Result<Self, BenchError> {
        let seed = settings.seed;
        let raw = Distinct {
            shape,
            experts: (0..DISTINCT as u64)
                .map(|e| synth::expert(seed.wrapping_add(e), &shape))
                .collect(),
        };
        let folder = tempfile::tempdir()?;
        let mut archives = Vec::new();
        for coding in &settings.codecs {
            if *coding == Coding::Plane3 && shape.scales == ScaleKind::G64 {
                continue;
            }
            let path = folder.path().join("synthetic.ansx");
            let options = coding.options(settings.block_nibbles);
            pack(&raw, &options, &path, |_| (), interrupt::requested)?;
            // Another file takes its name, or none once the folder is dropped; its mapping stays.
            archives.push((*coding, Archive::open(&path)?));
            std::fs::remove_file(&path)?;
        }
        Ok(Self {
            raw,
            archives,
            seed,
        })
    }

    /// `n` experts for a back end.
    fn layer<'a>(
        &'a self,
        n: usize,
        coded: Option<&'a Archive>,
    ) -> Result<LayerExperts<'a>, BenchError> {
        let Some(archive) = coded else {
            let experts = (0..n).map(|e| {
                self.raw.experts[e % DISTINCT]
                    .each_ref()
                    .map(|m| RawMatrix {
                        packed: (&*m.packed).into(),
                        scales: (&*m.scales).into(),
                    })
            });
            return Ok(LayerExperts::Raw(experts.collect()));
        };
        let layer = archive.layer(0)?;
        let distinct = (0..DISTINCT)
            .map(|e| layer.record(e))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(LayerExperts::Coded {
            layer,
            records: (0..n).map(|e| distinct[e % DISTINCT].clone()).collect(),
        })
    }

    /// Name of the codec, bytes of nibbles or streams with offsets, and bytes of scales as stored,
    /// of `n` experts' matrices of a stage.
    fn sizes(
        &self,
        n: usize,
        stage: Stage,
        coded: Option<&Archive>,
    ) -> Result<(&'static str, usize, usize), BenchError> {
        let (mut name, mut nibbles, mut scales) = ("raw", 0, 0);
        let mut first = true;
        for e in 0..n {
            for kind in stage.kinds() {
                let (rows, cols) = self.raw.shape.dims(*kind);
                if let Some(archive) = coded {
                    let record = archive.record(0, e % DISTINCT)?;
                    let m = record.matrix(*kind);
                    if first || name == m.codec.name() {
                        name = m.codec.name();
                    } else {
                        name = "mixed";
                    }
                    first = false;
                    nibbles += m.stream.len() + m.offsets.len();
                    scales += m.scales.len();
                } else {
                    nibbles += rows * cols / 2;
                    scales += 4 * self.raw.shape.scales.count(rows, cols);
                }
            }
        }
        Ok((name, nibbles, scales))
    }
}

impl Stage {
    /// All, in order.
    pub const ALL: [Stage; 5] = [
        Stage::GateUp,
        Stage::Down,
        Stage::Matrices,
        Stage::Decode,
        Stage::Ffn,
    ];

    /// As the table names it.
    pub fn name(self) -> &'static str {
        match self {
            Stage::GateUp => "gate+up",
            Stage::Down => "down",
            Stage::Matrices => "matrices",
            Stage::Decode => "decode",
            Stage::Ffn => "ffn",
        }
    }

    fn kinds(self) -> &'static [MatrixKind] {
        match self {
            Stage::GateUp => &[MatrixKind::Gate, MatrixKind::Up],
            Stage::Down => &[MatrixKind::Down],
            Stage::Matrices | Stage::Decode | Stage::Ffn => &MatrixKind::ALL,
        }
    }
}

/// A way to keep and multiply experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// As int4.
    Raw,
    /// Coded; decoded to scratch, then multiplied.
    Unfused,
    /// Coded; decoded and multiplied at once.
    Fused,
}

impl Way {
    /// Name, whether experts are coded, and how they are then multiplied.
    fn parts(self) -> (&'static str, bool, Form) {
        match self {
            Way::Raw => ("raw", false, Form::Unfused),
            Way::Unfused => ("unfused", true, Form::Unfused),
            Way::Fused => ("fused", true, Form::Fused),
        }
    }
}

/// `tokens * experts` ids of set `set`: every token goes to all of the set's experts.
fn ids(case: &Case, set: usize) -> Vec<u32> {
    let first = set * case.experts;
    (0..case.tokens)
        .flat_map(|_| (first..first + case.experts).map(|e| e as u32))
        .collect()
}

/// The FFN's output on a back end, for set 0.
fn output<B: LoadExperts>(
    b: &B,
    experts: &B::Experts,
    case: &Case,
    x: &[f32],
    weights: &[f32],
) -> Result<Vec<f32>, B::Error> {
    let n = case.tokens * case.shape.hidden;
    let (x, weights, ids) = (b.upload(x)?, b.upload(weights)?, b.upload(&ids(case, 0))?);
    let mut out = b.alloc(n)?;
    b.experts(
        experts,
        rows(&x, case.shape.hidden),
        &ids,
        &weights,
        case.experts,
        case.tokens,
        rows_mut(&mut out, case.shape.hidden),
    )?;
    let mut read = vec![0.0; n];
    b.read(&out, 0, &mut read)?;
    Ok(read)
}

/// Checks and times a case on a back end; `report` gets each measurement when it is made.
pub fn measure<B: Timed>(
    b: &B,
    case: &Case,
    weights: &Weights,
    settings: &Settings,
    mut report: impl FnMut(Measurement),
) -> Result<(), BenchError> {
    let device = b.describe();
    let fail = |e: B::Error| BenchError::Device {
        device: device.clone(),
        source: Box::new(e),
    };
    let shape = case.shape;
    let mut rng = synth::Rng::new(weights.seed ^ 0x5eed);
    let x = rng.normals(case.tokens * shape.hidden);
    let h = rng.normals(case.tokens * case.experts * shape.intermediate);
    let shares = vec![1.0 / case.experts as f32; case.tokens * case.experts];
    let expected = {
        let plain = Cpu::with_arm(Arm::Baseline).map_err(|e| BenchError::Device {
            device: "cpu (baseline)".into(),
            source: Box::new(e),
        })?;
        let plain_fail = |e: CpuError| BenchError::Device {
            device: plain.describe(),
            source: Box::new(e),
        };
        let layer = weights.layer(case.experts, None)?;
        let experts = plain
            .load_experts(layer, shape, Form::Unfused)
            .map_err(plain_fail)?;
        output(&plain, &experts, case, &x, &shares).map_err(plain_fail)?
    };
    let copy_rate = b.copy_rate().map_err(fail)?;
    let ways = settings.ways.iter().flat_map(|way| {
        let (form, coded, how) = way.parts();
        let archives = weights.archives.iter().map(|(_, archive)| Some(archive));
        let none = (!coded).then_some(None);
        let coded = archives.filter(move |_| coded);
        none.into_iter().chain(coded).map(move |c| (form, c, how))
    });
    for (form, coded, how) in ways {
        let (_, nibbles, _) = weights.sizes(case.experts, Stage::Down, coded)?;
        // All other sets together flush twice the cache, even in the smallest stage.
        let cache = settings.cache_bytes.unwrap_or_else(|| b.cache_bytes());
        let sets = 1 + (2 * cache).div_ceil(nibbles).max(2);
        let layer = weights.layer(sets * case.experts, coded)?;
        let experts = b.load_experts(layer, shape, how).map_err(fail)?;
        let found = output(b, &experts, case, &x, &shares).map_err(fail)?;
        if let Some(i) = (0..found.len()).find(|i| found[*i].to_bits() != expected[*i].to_bits()) {
            return Err(BenchError::Differs {
                device,
                case: case.to_string(),
                form,
                element: i,
                expected: expected[i],
                found: found[i],
            });
        }
        let bits_of_difference = found
            .iter()
            .zip(&expected)
            .map(|(a, b)| 32 - (a.to_bits() ^ b.to_bits()).leading_zeros())
            .max()
            .unwrap_or(0);
        let mut prepared = Vec::with_capacity(sets);
        for set in 0..sets {
            let ids = ids(case, set);
            let inputs = b.prepare(&experts, &x, &h, &ids, case.experts);
            prepared.push((inputs.map_err(fail)?, b.upload(&ids).map_err(fail)?));
        }
        let dev_x = b.upload(&x).map_err(fail)?;
        let dev_shares = b.upload(&shares).map_err(fail)?;
        let mut out = b.alloc(case.tokens * shape.hidden).map_err(fail)?;
        for stage in Stage::ALL {
            if stage == Stage::Decode && form != "unfused" {
                continue;
            }
            let warm = 2.min(settings.runs);
            let mut does = true;
            let times = b.seconds(settings.runs + warm, &mut |run| {
                let (inputs, ids) = &prepared[run % sets];
                match stage {
                    Stage::GateUp => b.multiply(&experts, inputs, false),
                    Stage::Down => b.multiply(&experts, inputs, true),
                    Stage::Matrices => {
                        b.multiply(&experts, inputs, false)?;
                        b.multiply(&experts, inputs, true)
                    }
                    Stage::Decode => {
                        does = b.decode(&experts, inputs)?;
                        Ok(())
                    }
                    Stage::Ffn => b.experts(
                        &experts,
                        rows(&dev_x, shape.hidden),
                        ids,
                        &dev_shares,
                        case.experts,
                        case.tokens,
                        rows_mut(&mut out, shape.hidden),
                    ),
                }
            });
            let mut times = times.map_err(fail)?.split_off(warm);
            if interrupt::requested() {
                return Err(BenchError::Interrupted);
            }
            if !does {
                continue;
            }
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            let (_, packed, _) = weights.sizes(case.experts, stage, None)?;
            let (codec, nibbles, scales) = weights.sizes(case.experts, stage, coded)?;
            let (scales, written) = match stage {
                Stage::Decode => (0, packed),
                _ => (scales, 0),
            };
            let moved = (nibbles + scales + written) as f64 / median;
            report(Measurement {
                device: device.clone(),
                hidden: shape.hidden,
                intermediate: shape.intermediate,
                scales: scales_name(shape.scales),
                experts: case.experts,
                tokens: case.tokens,
                stage,
                form,
                codec,
                microseconds: 1e6 * median,
                microseconds_min: 1e6 * times[0],
                raw_equivalent_gb_s: packed as f64 / median / 1e9,
                bytes_read: nibbles + scales,
                ratio: nibbles as f64 / packed as f64,
                of_copy: copy_rate.map(|rate| moved / rate),
                bits_of_difference,
            });
        }
    }
    Ok(())
}

/// Heading of the table that [`Measurement`]'s `Display` gives rows of.
pub const HEADING: &str = "     H     I scales experts tokens stage    form    codec             us   GB/s raw-eq  MB read  ratio of copy  bits";

impl std::fmt::Display for Measurement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:6}{:6} {:6}{:8}{:7} {:9}{:8}{:12}{:9.1} {:13.2} {:8.2} {:6.4} {:>7} {:5}",
            self.hidden,
            self.intermediate,
            self.scales,
            self.experts,
            self.tokens,
            self.stage.name(),
            self.form,
            self.codec,
            self.microseconds,
            self.raw_equivalent_gb_s,
            self.bytes_read as f64 / 1e6,
            self.ratio,
            self.of_copy
                .map_or("-".into(), |share| format!("{share:.3}")),
            self.bits_of_difference,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::kernels::{EmulatedDevice, KernelBackend};

    const CODECS: [Coding; 2] = [Coding::RansPair, Coding::Plane3];

    fn check<B: Timed>(b: &B, decodes: bool) {
        let shape = ExpertShape {
            hidden: 512,
            intermediate: 256,
            scales: ScaleKind::Row,
        };
        let settings = Settings {
            runs: 3,
            codecs: CODECS.to_vec(),
            block_nibbles: None,
            seed: 1,
            cache_bytes: Some(0),
            ways: vec![Way::Raw, Way::Unfused, Way::Fused],
        };
        let weights = Weights::new(shape, &settings).unwrap();
        let case = Case {
            shape,
            experts: 2,
            tokens: 2,
        };
        let mut rows = Vec::new();
        measure(b, &case, &weights, &settings, |m| rows.push(m)).unwrap();
        // Four stages of five ways, and decoding of each codec.
        assert_eq!(rows.len(), 4 * 5 + if decodes { 2 } else { 0 });
        let decoded = rows.iter().filter(|m| m.stage == Stage::Decode);
        assert!(decoded.clone().all(|m| m.form == "unfused"));
        assert_eq!(decoded.count(), if decodes { 2 } else { 0 });
        for m in &rows {
            assert!(
                m.microseconds >= m.microseconds_min && m.microseconds_min > 0.0,
                "{m}"
            );
            assert_eq!(m.bits_of_difference, 0);
            let bytes = m.raw_equivalent_gb_s * 1e3 * m.microseconds;
            let matrices = match m.stage {
                Stage::GateUp => 2.0,
                Stage::Down => 1.0,
                Stage::Matrices | Stage::Decode | Stage::Ffn => 3.0,
            };
            let packed = matrices * 2.0 * 512.0 * 256.0 / 2.0;
            // f64 rounding.
            assert!((bytes - packed).abs() < 1e-6 * packed, "{bytes} {packed}");
            match m.form {
                "raw" => assert_eq!((m.codec, m.ratio), ("raw", 1.0)),
                _ => assert!(
                    ["rans-pair", "plane3"].contains(&m.codec) && m.ratio < 0.95,
                    "{m}"
                ),
            }
        }
    }

    #[test]
    fn small_cases_on_the_cpu() {
        check(&Cpu::new().unwrap(), false);
    }

    #[test]
    fn small_cases_on_the_emulator() {
        check(
            &KernelBackend::new(EmulatedDevice::default()).unwrap(),
            true,
        );
    }

    #[test]
    fn a_wrong_result_is_an_error() {
        let shape = ExpertShape {
            hidden: 64,
            intermediate: 64,
            scales: ScaleKind::G64,
        };
        let settings = Settings {
            runs: 1,
            codecs: CODECS.to_vec(),
            block_nibbles: None,
            seed: 1,
            cache_bytes: Some(0),
            ways: vec![Way::Raw, Way::Unfused, Way::Fused],
        };
        let cpu = Cpu::new().unwrap();
        let mut weights = Weights::new(shape, &settings).unwrap();
        // What is packed no longer is what is raw.
        weights.raw.experts[0][2].packed.to_mut()[5] ^= 0x10;
        let case = Case {
            shape,
            experts: 1,
            tokens: 1,
        };
        let error = measure(&cpu, &case, &weights, &settings, |_| ()).unwrap_err();
        assert!(
            matches!(
                &error,
                BenchError::Differs {
                    form: "unfused",
                    ..
                }
            ),
            "{error}"
        );
    }
}
