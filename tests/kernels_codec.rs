//! The codec kernels and the expert matmuls against plain loops, bit for bit.
//!
//! A case is a layer of experts with coded and raw matrices, tokens spread over them, and launches
//! that between them cover it: fused (registers for up to 8 tokens, shared memory for more, raw) or
//! unfused (decode to scratch, then raw). Outputs start as a pattern, so that what a kernel must
//! leave alone is checked as well as what it must write.

#[path = "suite/nibbles.rs"]
mod nibbles;
#[path = "suite/sample.rs"]
mod sample;

use std::sync::OnceLock;

use cuda_std::mem::Slice;
use gpu::abi::{
    CODEC_PLANE3, CODEC_RAW, ExpertArgs, FROM_ALL, FROM_STREAM, MatrixDesc, SCALES_AMAX,
    SCALES_F32, rans_codec,
};
use gpu::arith::scale_from_amax;
use gpu::coded_plan;
use gpu::layout::{Blocks, Folds, Symbol};
use gpu::plane3::{Layout, PLANE_BYTES};
use host::backend::kernels::{
    CudaDevice, DecodePlane3, DecodeRansPair, DecodeRansTriple, Device, DeviceLimits, DeviceMemory,
    EmulatedDevice, Launch, MatmulPlane3, MatmulPlane3Half, MatmulPlane3Narrow, MatmulRansMmaPair,
    MatmulRansMmaTriple, MatmulRansPair, MatmulRansTokensPair, MatmulRansTokensTriple,
    MatmulRansTriple, MatmulRaw, MatmulRawMma, MatmulRawMmaGrouped, MatmulRawNarrow,
};
use host::codec::{Table, count_symbols, encode, plane3};
use nibbles::{DATA, Data, Rng};

/// Kernels of this suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Raw,
    RawNarrow,
    RawMma,
    RawMmaGrouped,
    Rans(Symbol),
    RansTokens(Symbol),
    RansMma(Symbol),
    Decode(Symbol),
    /// Strips of a segment.
    Plane3(usize),
    DecodePlane3,
}

/// What the suite asks of a device; a failure is a kernel's, or a defect of the suite.
struct On<D>(D);

impl<D: Device> On<D> {
    fn upload(&self, words: &[u32]) -> D::Memory {
        let memory = self.0.allocate(4 * words.len()).unwrap();
        self.0
            .upload(&memory, 0, bytemuck::cast_slice(words))
            .unwrap();
        memory
    }

    fn download(&self, memory: &D::Memory) -> Vec<u32> {
        let mut words = vec![0; memory.size() / 4];
        self.0
            .download(memory, 0, bytemuck::cast_slice_mut(&mut words))
            .unwrap();
        words
    }

    fn launch(&self, kernel: Kernel, launch: &Launch, args: &ExpertArgs) -> Result<(), String> {
        // SAFETY: the suite's buffers are as `ExpertArgs` says, and live until the results are read.
        let done = unsafe {
            match kernel {
                Kernel::Raw => self.0.launch::<MatmulRaw>(*launch, *args),
                Kernel::RawNarrow => self.0.launch::<MatmulRawNarrow>(*launch, *args),
                Kernel::RawMma => self.0.launch::<MatmulRawMma>(*launch, *args),
                Kernel::RawMmaGrouped => self.0.launch::<MatmulRawMmaGrouped>(*launch, *args),
                Kernel::Rans(Symbol::Pair) => self.0.launch::<MatmulRansPair>(*launch, *args),
                Kernel::Rans(Symbol::Triple) => self.0.launch::<MatmulRansTriple>(*launch, *args),
                Kernel::RansTokens(Symbol::Pair) => {
                    self.0.launch::<MatmulRansTokensPair>(*launch, *args)
                }
                Kernel::RansTokens(Symbol::Triple) => {
                    self.0.launch::<MatmulRansTokensTriple>(*launch, *args)
                }
                Kernel::RansMma(Symbol::Pair) => self.0.launch::<MatmulRansMmaPair>(*launch, *args),
                Kernel::RansMma(Symbol::Triple) => {
                    self.0.launch::<MatmulRansMmaTriple>(*launch, *args)
                }
                Kernel::Decode(Symbol::Pair) => self.0.launch::<DecodeRansPair>(*launch, *args),
                Kernel::Decode(Symbol::Triple) => self.0.launch::<DecodeRansTriple>(*launch, *args),
                Kernel::Plane3(32) => self.0.launch::<MatmulPlane3>(*launch, *args),
                Kernel::Plane3(16) => self.0.launch::<MatmulPlane3Half>(*launch, *args),
                Kernel::Plane3(_) => self.0.launch::<MatmulPlane3Narrow>(*launch, *args),
                Kernel::DecodePlane3 => self.0.launch::<DecodePlane3>(*launch, *args),
            }
        };
        done.and_then(|()| self.0.synchronize())
            .map_err(|e| format!("{kernel:?}: {e}"))
    }
}

/// The emulator, with the shared memory of an H200 on few multiprocessors.
fn emulated() -> Option<On<EmulatedDevice>> {
    Some(On(EmulatedDevice::new(DeviceLimits {
        sms: 2,
        ..EmulatedDevice::LIMITS
    })))
}

/// The first CUDA device; `None` where there is none, unless `ANSATZ_REQUIRE_CUDA` is set.
fn cuda() -> Option<On<CudaDevice>> {
    static DEVICE: OnceLock<Option<CudaDevice>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        if CudaDevice::count() == 0 && std::env::var_os("ANSATZ_REQUIRE_CUDA").is_none() {
            return None;
        }
        Some(CudaDevice::new(0).unwrap())
    });
    device.clone().map(On)
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codec {
    Raw,
    Rans(Symbol),
    /// Row scales only.
    Plane3,
}

impl Codec {
    fn number(self) -> u32 {
        match self {
            Codec::Raw => CODEC_RAW,
            Codec::Rans(symbol) => rans_codec(symbol),
            Codec::Plane3 => CODEC_PLANE3,
        }
    }
}

const PAIR: Codec = Codec::Rans(Symbol::Pair);
const TRIPLE: Codec = Codec::Rans(Symbol::Triple);

/// A layer and what is asked of it.
#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    cols: usize,
    data: Data,
    grouped: bool,
    amax: bool,
    /// Tokens of each active expert.
    tokens: Vec<usize>,
    /// Matrices that the launch covers, from the first.
    first: usize,
    count: usize,
    /// Codecs of experts and matrices, in rotation.
    codecs: Vec<Codec>,
    unfused: bool,
    /// Several tokens: coded, up to 8 of them in registers and not in shared memory; raw with row
    /// scales, on tensor cores.
    direct: bool,
    /// Coded, 2 to 8 tokens, row scales: on tensor cores where the width suits.
    mma: bool,
}

struct Matrix {
    packed: Vec<u8>,
    codec: Codec,
    /// Bits of f32, or amax.
    scales: Vec<u32>,
    encoded: Option<Stored>,
}

/// A coded matrix as kernels see it.
struct Stored {
    stream: Vec<u8>,
    /// Block offsets, or headers.
    offsets: Vec<u32>,
    blocks: usize,
}

impl Case {
    /// How plane3 cuts a matrix.
    fn layout(&self) -> Layout {
        Layout::new(self.rows, self.cols).unwrap()
    }

    /// Parts of a segment in `out`.
    fn split(&self) -> usize {
        match self.codecs.contains(&Codec::Plane3) && !self.unfused {
            true => self.layout().segs() / Folds::new(self.cols).unwrap().segs(),
            false => 1,
        }
    }

    fn matrix(&self, rng: &mut Rng, codec: Codec) -> Matrix {
        let packed = (0..self.rows * self.cols / 2)
            .map(|_| self.data.nibble(rng) | self.data.nibble(rng) << 4)
            .collect();
        let n = self.rows * if self.grouped { self.cols / 64 } else { 1 };
        let scales = (0..n)
            .map(|_| match self.amax {
                true => 0x3c00 + rng.below(0x200) as u32,
                false => (1e-3 + rng.below(1 << 20) as f32 * 1e-8).to_bits(),
            })
            .collect();
        Matrix {
            packed,
            codec,
            scales,
            encoded: None,
        }
    }

    fn scale(&self, bits: u32) -> f32 {
        match self.amax {
            true => scale_from_amax(bits as u16),
            false => f32::from_bits(bits),
        }
    }

    /// Partial result of a row and segment, by `gpu::layout::Folds`.
    fn partial(&self, m: &Matrix, x: &[i16], row: usize, seg: usize) -> u32 {
        let folds = Folds::new(self.cols).unwrap();
        let nibble =
            |c: usize| i32::from(m.packed[(row * self.cols + c) / 2] >> (4 * (c % 2)) & 15) - 8;
        let dot = |from: usize, n: usize| -> i32 {
            (from..from + n).map(|c| nibble(c) * i32::from(x[c])).sum()
        };
        let start = seg * folds.seg_cols();
        if !self.grouped {
            return dot(start, folds.seg_cols()) as u32;
        }
        let mut total = None;
        for round in 0..folds.rounds {
            let from = start + round * folds.fold;
            let mut v: Vec<f32> = (0..folds.fold_groups())
                .map(|g| {
                    let col = from + 64 * g;
                    let scale = self.scale(m.scales[row * (self.cols / 64) + col / 64]);
                    scale * dot(col, 64) as f32
                })
                .collect();
            while v.len() > 1 {
                let half = v.len() / 2;
                for i in 0..half {
                    v[i] += v[i + half];
                }
                v.truncate(half);
            }
            total = Some(total.map_or(v[0], |t: f32| t + v[0]));
        }
        total.unwrap().to_bits()
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks(4)
        .map(|c| c.iter().rev().fold(0, |w, b| w << 8 | u32::from(*b)))
        .collect()
}

const PATTERN: u32 = 0xdead_beef;

/// A case in a device's memory.
struct Layer<'a, D: Device> {
    runner: &'a On<D>,
    case: &'a Case,
    folds: Folds,
    /// Experts by three; those that no token goes to are there as well.
    matrices: Vec<Matrix>,
    tables: [Option<Table>; 2],
    /// Expert, first slot, tokens.
    active: Vec<[u32; 4]>,
    row_map: Vec<u32>,
    x: Vec<i16>,
    args: ExpertArgs,
    keep: Vec<D::Memory>,
    out: D::Memory,
    scratch: D::Memory,
    faults: D::Memory,
}

impl<'a, D: Device> Layer<'a, D> {
    fn new(runner: &'a On<D>, case: &'a Case, rng: &mut Rng) -> Self {
        let folds = Folds::new(case.cols).unwrap();
        let experts = 2 * case.tokens.len() + 1;
        let mut matrices: Vec<Matrix> = (0..3 * experts)
            .map(|i| case.matrix(rng, case.codecs[i % case.codecs.len()]))
            .collect();
        let tables = [Symbol::Pair, Symbol::Triple].map(|symbol| {
            let mut counts = vec![0; symbol.alphabet()];
            let mut any = false;
            for m in matrices.iter().filter(|m| m.codec == Codec::Rans(symbol)) {
                count_symbols(symbol, &m.packed, case.rows, case.cols, &mut counts);
                any = true;
            }
            any.then(|| Table::from_counts(symbol, &counts).unwrap())
        });
        for m in &mut matrices {
            m.encoded = match m.codec {
                Codec::Raw => None,
                Codec::Rans(symbol) => {
                    let blocks = Blocks::new(case.rows, case.cols, symbol).unwrap();
                    let table = tables[symbol as usize].as_ref().unwrap();
                    let e = encode(&m.packed, &blocks, table).unwrap();
                    Some(Stored {
                        stream: e.stream,
                        offsets: e.offsets,
                        blocks: blocks.blocks,
                    })
                }
                Codec::Plane3 => {
                    let e = plane3::encode(&m.packed, &case.layout()).unwrap();
                    Some(Stored {
                        stream: e.stream,
                        offsets: e.headers,
                        blocks: case.layout().blocks(),
                    })
                }
            };
        }
        let slots: usize = case.tokens.iter().sum();
        let mut active = Vec::new();
        let mut slot = 0;
        for (i, tokens) in case.tokens.iter().enumerate() {
            active.push([2 * i as u32 + 1, slot, *tokens as u32, 0]);
            slot += *tokens as u32;
        }
        // Gate and up read tokens through a map, down its slots.
        let inputs = if case.first == 0 {
            slots.div_ceil(2).max(1)
        } else {
            slots
        };
        let row_map: Vec<u32> = match case.first {
            0 => (0..slots).map(|_| rng.below(inputs) as u32).collect(),
            _ => Vec::new(),
        };
        let x: Vec<i16> = (0..inputs * case.cols)
            .map(|_| match rng.below(8) {
                0 => 32512,
                1 => -32512,
                _ => (rng.below(65025) as i32 - 32512) as i16,
            })
            .collect();
        let gsum: Vec<u32> = x
            .chunks(64)
            .map(|g| g.iter().map(|v| i32::from(*v)).sum::<i32>() as u32)
            .collect();
        let x_words: Vec<u32> = x
            .chunks(2)
            .map(|p| u32::from(p[0] as u16) | u32::from(p[1] as u16) << 16)
            .collect();

        let mut keep = Vec::new();
        let mut put = |data: &[u32], len: usize| {
            let memory = runner.upload(data);
            let slice = Slice::new(memory.address(), len as u64);
            keep.push(memory);
            slice
        };
        let mut descs: Vec<u32> = Vec::new();
        for m in &matrices {
            let stream = match &m.encoded {
                Some(e) => words(&e.stream),
                None => words(&m.packed),
            };
            let mut desc = MatrixDesc {
                stream: put(&stream, stream.len()),
                codec: CODEC_RAW,
                scale_format: if case.amax { SCALES_AMAX } else { SCALES_F32 },
                rows: case.rows as u32,
                cols: case.cols as u32,
                ..MatrixDesc::default()
            };
            if let Some(e) = &m.encoded {
                desc.codec = m.codec.number();
                desc.n_blocks = e.blocks as u32;
                desc.blocks = put(&e.offsets, e.offsets.len());
            }
            let scales: Vec<u32> = match case.amax {
                true => m
                    .scales
                    .chunks(2)
                    .map(|s| s[0] | s.get(1).unwrap_or(&0) << 16)
                    .collect(),
                false => m.scales.clone(),
            };
            desc.scales = put(&scales, m.scales.len());
            descs.extend(bytemuck::cast_slice::<MatrixDesc, u32>(&[desc]));
        }
        let n_active = active.len();
        let out_len = case.count * folds.segs() * case.split() * slots * case.rows;
        let scratch_len = n_active * case.count * case.rows * case.cols / 8;
        let out = runner.upload(&vec![PATTERN; out_len.max(1)]);
        let scratch = runner.upload(&vec![PATTERN; scratch_len]);
        let faults = runner.upload(&[0]);
        let mut args = ExpertArgs {
            descs: put(&descs, matrices.len()),
            active: put(bytemuck::cast_slice(&active), n_active),
            n_active: put(&[n_active as u32], 1),
            x: put(&x_words, x_words.len()),
            gsum: put(&gsum, gsum.len()),
            row_map: match row_map.is_empty() {
                true => Slice::EMPTY,
                false => put(&row_map, row_map.len()),
            },
            out: Slice::new(out.address(), out_len as u64),
            scratch: Slice::EMPTY,
            faults: Slice::new(faults.address(), 1),
            first: case.first as u32,
            count: case.count as u32,
            slots: slots as u32,
            active_end: n_active as u32,
            max_tokens: u32::MAX,
            grouped: u32::from(case.grouped),
            ..ExpertArgs::default()
        }
        .with_shape(case.rows, &folds);
        args.split = case.split() as u32;
        Layer {
            runner,
            case,
            folds,
            matrices,
            tables,
            active,
            row_map,
            x,
            args,
            keep,
            out,
            scratch,
            faults,
        }
    }

    /// Launches what covers the layer.
    fn run(&mut self) -> Result<(), String> {
        let case = self.case;
        let limits = *self.runner.0.limits();
        let most = case.tokens.iter().copied().max().unwrap() as u32;
        let matrices = (self.active.len() * case.count) as u64;
        for symbol in [Symbol::Pair, Symbol::Triple] {
            let Some(table) = &self.tables[symbol as usize] else {
                continue;
            };
            let memory = self.runner.upload(table.entries());
            let blocks = Blocks::new(case.rows, case.cols, symbol).unwrap();
            let jobs = matrices * blocks.jobs() as u64;
            let mut args = self.args;
            args.table = Slice::new(memory.address(), table.entries().len() as u64);
            args.blocks = blocks.blocks as u32;
            self.keep.push(memory);
            if case.unfused {
                args.scratch = self.scratch();
                let launch = coded_plan::decode_rans(&limits, symbol, jobs).unwrap();
                self.runner.launch(Kernel::Decode(symbol), &launch, &args)?;
                continue;
            }
            args.max_tokens = 1;
            args.stage = u32::from(most > 1);
            let launch = coded_plan::matmul_rans(&limits, symbol, &self.folds, jobs).unwrap();
            self.runner.launch(Kernel::Rans(symbol), &launch, &args)?;
            if most > 1 && case.direct {
                let sets = (self.active.len() * self.folds.segs()) as u64;
                let per_set = (case.count * blocks.blocks) as u64;
                let mma = coded_plan::matmul_rans_mma(&limits, symbol, &self.folds, sets, per_set)
                    .filter(|_| case.mma && !case.grouped);
                let (kernel, launch, tokens);
                (kernel, (launch, args.stage, tokens)) = match mma {
                    Some((launch, stage)) => {
                        (Kernel::RansMma(symbol), (launch, stage, most.min(8)))
                    }
                    None => (
                        Kernel::RansTokens(symbol),
                        coded_plan::matmul_rans_tokens(&limits, symbol, &self.folds, most, jobs)
                            .unwrap(),
                    ),
                };
                (args.min_tokens, args.max_tokens) = (2, tokens);
                self.runner.launch(kernel, &launch, &args)?;
            }
            // All others are decoded first.
            if most > args.max_tokens {
                (args.min_tokens, args.max_tokens) = (args.max_tokens + 1, u32::MAX);
                args.scratch = self.scratch();
                let launch = coded_plan::decode_rans(&limits, symbol, jobs).unwrap();
                self.runner.launch(Kernel::Decode(symbol), &launch, &args)?;
            }
        }
        let plane3 = case.codecs.contains(&Codec::Plane3);
        if plane3 {
            let mut args = self.args;
            args.blocks = case.layout().blocks() as u32;
            if !case.unfused {
                let launch = coded_plan::matmul_plane3(&limits, &case.layout(), matrices);
                (args.min_tokens, args.max_tokens) = (1, 1);
                let kernel = Kernel::Plane3(case.layout().strips);
                self.runner.launch(kernel, &launch, &args)?;
                (args.min_tokens, args.max_tokens) = (2, u32::MAX);
            }
            if case.unfused || most > 1 {
                // The kernel's segments are parts of the folds' even where `out` has none.
                args.split = (case.layout().segs() / self.folds.segs()) as u32;
                args.scratch = self.scratch();
                let launch = coded_plan::decode_plane3(&limits, &case.layout(), matrices);
                self.runner.launch(Kernel::DecodePlane3, &launch, &args)?;
            }
        }
        let rans = 1 << rans_codec(Symbol::Pair) | 1 << rans_codec(Symbol::Triple);
        let direct = self.covered();
        for (least, sources) in match case.unfused {
            true => [(1, FROM_ALL), (2, FROM_ALL), (0, 0), (0, 0)],
            false => [
                (1, FROM_STREAM),
                (2, FROM_STREAM),
                (2, if plane3 { 1 << CODEC_PLANE3 } else { 0 }),
                (2.max(direct + 1), if most > direct { rans } else { 0 }),
            ],
        } {
            let several = least > 1;
            if sources == 0 {
                continue;
            }
            let mut args = self.args;
            args.sources = sources;
            let (launch, job_rows) = if several {
                coded_plan::matmul_raw_mma(&limits, case.rows, &self.folds, matrices)
            } else {
                coded_plan::matmul_raw(&limits, case.rows, &self.folds, matrices)
            };
            args.job_rows = job_rows;
            args.blocks = case.rows.div_ceil(job_rows as usize) as u32;
            if args.sources != FROM_STREAM {
                args.scratch = self.scratch();
            }
            (args.min_tokens, args.max_tokens) = (least, if several { u32::MAX } else { 1 });
            let kernel = if several && case.grouped {
                Kernel::RawMmaGrouped
            } else if several {
                Kernel::RawMma
            } else if self.folds.fold < gpu::matmul_raw::NARROW {
                Kernel::RawNarrow
            } else {
                Kernel::Raw
            };
            self.runner.launch(kernel, &launch, &args)?;
        }
        Ok(())
    }

    /// Most tokens of an expert whose coded matrices are multiplied without decoding them first.
    fn covered(&self) -> u32 {
        match (self.case.unfused, self.case.direct) {
            (true, _) => 0,
            (false, false) => 1,
            (false, true) => {
                let limits = self.runner.0.limits();
                let most = self.case.tokens.iter().copied().max().unwrap() as u32;
                // Either symbol's: tables leave room for as many.
                let plan =
                    |symbol| coded_plan::matmul_rans_tokens(limits, symbol, &self.folds, most, 1);
                let (pair, triple) = (plan(Symbol::Pair).unwrap(), plan(Symbol::Triple).unwrap());
                assert_eq!(pair.2, triple.2);
                pair.2
            }
        }
    }

    fn scratch(&self) -> Slice {
        let words = self.active.len() * self.case.count * self.case.rows * self.case.cols / 8;
        Slice::new(self.scratch.address(), words as u64)
    }

    /// Compares everything with plain loops.
    fn check(&self) {
        let case = self.case;
        let slots = self.args.slots as usize;
        let out = self.runner.download(&self.out);
        let scratch = self.runner.download(&self.scratch);
        let size = case.rows * case.cols / 8;
        for (a, [expert, start, tokens, _]) in self.active.iter().enumerate() {
            for m in 0..case.count {
                let matrix = &self.matrices[*expert as usize * 3 + case.first + m];
                let place = &scratch[(a * case.count + m) * size..][..size];
                let decoded = match matrix.codec {
                    Codec::Raw => false,
                    Codec::Plane3 => case.unfused || *tokens > 1,
                    Codec::Rans(_) => *tokens > self.covered(),
                };
                if decoded {
                    assert!(
                        place == words(&matrix.packed),
                        "{case:?}: scratch of expert {expert}"
                    );
                } else {
                    assert!(
                        place.iter().all(|w| *w == PATTERN),
                        "{case:?}: stray decode"
                    );
                }
                for token in 0..*tokens {
                    let slot = (start + token) as usize;
                    let input = *self.row_map.get(slot).unwrap_or(&(slot as u32)) as usize;
                    let x = &self.x[input * case.cols..][..case.cols];
                    let split = case.split();
                    for seg in 0..self.folds.segs() {
                        let part = (m * self.folds.segs() + seg) * split;
                        let at = |part: usize| (part * slots + slot) * case.rows;
                        for row in 0..case.rows {
                            // Only int32 sums come in parts.
                            let found = (part..part + split)
                                .map(|p| out[at(p) + row])
                                .fold(0, u32::wrapping_add);
                            assert_eq!(
                                found,
                                case.partial(matrix, x, row, seg),
                                "{case:?}: expert {expert} ({:?}) matrix {m} segment {seg} \
                                 token {token} row {row}",
                                matrix.codec
                            );
                        }
                    }
                }
            }
        }
        assert_eq!(self.runner.download(&self.faults), [0], "{case:?}: faults");
    }
}

fn check<D: Device>(runner: &On<D>, case: &Case, rng: &mut Rng) {
    if sample::passed_over() {
        return;
    }
    let mut layer = Layer::new(runner, case, rng);
    if let Err(error) = layer.run() {
        panic!("{case:?}: {error}");
    }
    layer.check();
}

/// One expert, one token, a matrix of one codec.
fn simple(rows: usize, cols: usize, codec: Codec) -> Case {
    Case {
        rows,
        cols,
        data: Data::Gaussian,
        grouped: false,
        amax: false,
        tokens: vec![1],
        first: 0,
        count: 2,
        codecs: vec![codec],
        unfused: false,
        direct: true,
        mma: true,
    }
}

/// Every way that a width can be folded, and both limits.
const COLS: [usize; 18] = [
    64, 128, 192, 256, 320, 448, 512, 768, 1024, 1088, 1408, 1536, 2048, 2112, 3072, 6144, 7168,
    8192,
];
const ROWS: [usize; 18] = [
    1, 2, 3, 4, 5, 6, 7, 31, 32, 33, 34, 47, 48, 49, 95, 96, 97, 130,
];

/// Every width with each codec; rows, data and scales vary.
fn every_width<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for cols in COLS {
        for codec in [Codec::Raw, PAIR, TRIPLE, Codec::Plane3] {
            for grouped in [false, true] {
                if grouped && codec == Codec::Plane3 {
                    continue;
                }
                let mut case = simple(rng.pick(&ROWS), cols, codec);
                case.grouped = grouped;
                case.amax = rng.below(2) == 0;
                case.data = rng.pick(&DATA);
                case.first = rng.below(2) * 2;
                case.count = if case.first == 0 { 2 } else { 1 };
                case.unfused = rng.below(3) == 0;
                check(runner, &case, &mut rng);
            }
        }
    }
}

/// Every number of rows, at widths on either side of the register form.
fn every_height<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for rows in ROWS {
        for codec in [Codec::Raw, PAIR, TRIPLE, Codec::Plane3] {
            let mut case = simple(rows, rng.pick(&[64, 256, 1536, 2048]), codec);
            case.grouped = rng.below(2) == 0 && codec != Codec::Plane3;
            case.data = rng.pick(&DATA);
            check(runner, &case, &mut rng);
            case.unfused = true;
            check(runner, &case, &mut rng);
        }
    }
}

/// 1 to 33 tokens, more than are staged at a time, several experts.
fn several_tokens<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for tokens in [
        vec![2],
        vec![7, 1],
        vec![4, 3, 8],
        vec![33, 2, 1],
        vec![1, 1, 9],
    ] {
        for cols in [64, 192, 512, 1536, 2048, 3072] {
            for codec in [Codec::Raw, PAIR, TRIPLE, Codec::Plane3] {
                let mut case = simple(rng.pick(&ROWS[..15]), cols, codec);
                case.tokens = tokens.clone();
                case.grouped = rng.below(2) == 0 && codec != Codec::Plane3;
                case.amax = rng.below(2) == 0;
                case.data = rng.pick(&DATA);
                case.unfused = rng.below(4) == 0;
                case.direct = rng.below(4) != 0;
                case.mma = rng.below(3) != 0;
                check(runner, &case, &mut rng);
            }
        }
    }
}

/// 2 to 8 tokens on tensor cores: windows cut short, blocks of different heights, matrices of other codecs
/// between, more windows than a device takes at a time.
fn tensor_cores<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for (rows, cols, tokens, codecs) in [
        (1, 2048, vec![8], vec![TRIPLE]),
        (97, 2048, vec![3], vec![PAIR]),
        (130, 4096, vec![2, 1, 8], vec![TRIPLE]),
        (130, 2048, vec![7, 9, 2, 2], vec![PAIR]),
        (
            49,
            6144,
            vec![1, 4, 8],
            vec![TRIPLE, PAIR, Codec::Raw, TRIPLE],
        ),
        (700, 2048, vec![5], vec![TRIPLE]),
    ] {
        for data in [Data::Gaussian, Data::Extreme] {
            let mut case = simple(rows, cols, codecs[0]);
            (case.tokens, case.codecs, case.data) = (tokens.clone(), codecs.clone(), data);
            check(runner, &case, &mut rng);
        }
    }
}

/// Layers whose matrices have different codecs.
fn mixed_codecs<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for unfused in [false, true] {
        for grouped in [false, true] {
            let mut case = simple(rng.pick(&ROWS), 256, TRIPLE);
            case.codecs = vec![TRIPLE, PAIR, Codec::Raw, PAIR, TRIPLE, Codec::Raw, TRIPLE];
            case.tokens = vec![1, 3, 1, 1, 5, 2, 1];
            case.grouped = grouped;
            case.unfused = unfused;
            check(runner, &case, &mut rng);
            case.first = 2;
            case.count = 1;
            check(runner, &case, &mut rng);
            // With plane3, whose segments are halves, thirds or 31st parts of the others'.
            for cols in [1984, 1536, 2048, 6144] {
                let mut case = case.clone();
                case.grouped = false;
                case.cols = cols;
                case.codecs = vec![Codec::Plane3, TRIPLE, Codec::Raw, Codec::Plane3, PAIR];
                case.rows = rng.pick(&ROWS);
                check(runner, &case, &mut rng);
            }
        }
    }
}

/// The shapes of GLM-5.2's experts.
fn large<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for (rows, cols, codec, unfused) in [
        (2048, 6144, TRIPLE, false),
        (6144, 2048, PAIR, false),
        (1024, 8192, TRIPLE, true),
        (2048, 6144, Codec::Plane3, false),
        (6144, 2048, Codec::Plane3, false),
    ] {
        let mut case = simple(rows, cols, codec);
        case.count = 1;
        case.first = 2;
        case.grouped = codec == PAIR;
        case.unfused = unfused;
        check(runner, &case, &mut rng);
    }
}

/// Damaged streams and offsets: no access out of bounds (the emulator would say so), no endless
/// loop, and nearly always a fault counted.
fn damaged<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    let (mut faults, mut runs) = (0, 0);
    for round in 0..24 {
        let codec = rng.pick(&[PAIR, TRIPLE]);
        let mut case = simple(
            rng.pick(&ROWS[3..]),
            rng.pick(&[64, 256, 2048, 2112]),
            codec,
        );
        case.tokens = vec![1 + 2 * rng.below(2)];
        case.unfused = rng.below(3) == 0;
        case.direct = rng.below(2) == 0;
        case.mma = rng.below(2) == 0;
        case.count = 1;
        let mut layer = Layer::new(runner, &case, &mut rng);
        // The first matrix of expert 1 is the one that the launches read.
        let matrix = &layer.matrices[3];
        let encoded = matrix.encoded.as_ref().unwrap();
        let mut stream = words(&encoded.stream);
        let mut offsets = encoded.offsets.clone();
        match round % 4 {
            0 => {
                let at = rng.below(stream.len());
                stream[at] ^= 1 << rng.below(32);
            }
            1 => stream.iter_mut().for_each(|w| *w = rng.next() as u32),
            2 => stream.truncate(rng.below(stream.len() / 4) * 4),
            _ => {
                let at = rng.below(offsets.len() - 1);
                offsets[at] = rng.next() as u32;
            }
        }
        let (s, o) = (runner.upload(&stream), runner.upload(&offsets));
        let desc = MatrixDesc {
            stream: Slice::new(s.address(), stream.len() as u64),
            blocks: Slice::new(o.address(), offsets.len() as u64),
            scales: Slice::EMPTY,
            codec: codec.number(),
            rows: case.rows as u32,
            cols: case.cols as u32,
            n_blocks: encoded.blocks as u32,
            ..MatrixDesc::default()
        };
        let descs = [desc; 9];
        let memory = runner.upload(bytemuck::cast_slice(&descs));
        layer.args.descs = Slice::new(memory.address(), 9);
        layer.keep.extend([s, o, memory]);
        if let Err(error) = layer.run() {
            panic!("{case:?}, damage {}: {error}", round % 4);
        }
        runs += 1;
        faults += u32::from(runner.download(&layer.faults) != [0]);
    }
    // A flipped bit of padding does no harm; most others show.
    assert!(
        faults * 4 > runs * 3,
        "{faults} faults in {runs} damaged streams"
    );
}

/// Damaged headers, lists and planes of plane3: no access out of bounds; headers that point past
/// the stream and N lists that end early or late count as faults.
fn damaged_plane3<D: Device>(runner: &On<D>) {
    let mut rng = Rng::fresh();
    for round in 0..30 {
        let cols = rng.pick(&[64, 256, 512, 1536, 2048, 2112]);
        let mut case = simple(rng.pick(&ROWS[3..]), cols, Codec::Plane3);
        case.tokens = vec![1 + rng.below(2)];
        case.unfused = rng.below(3) == 0;
        case.count = 1;
        let mut layer = Layer::new(runner, &case, &mut rng);
        let encoded = layer.matrices[3].encoded.as_ref().unwrap();
        let mut stream = words(&encoded.stream);
        let mut offsets = encoded.offsets.clone();
        let job = rng.below(case.layout().jobs());
        let lists = (4 * offsets[2 * job]) as usize + PLANE_BYTES / 4;
        let mut counts = true;
        match round % 6 {
            0 => {
                stream.iter_mut().for_each(|w| *w = rng.next() as u32);
                counts = false;
            }
            1 => stream.truncate(rng.below(stream.len() / 4) * 4),
            2 => offsets[2 * job] = rng.next() as u32 | 1 << 24,
            3 => offsets[2 * job + 1] = rng.next() as u32 | 1 << 31,
            // One position further.
            4 if stream[lists] & 255 < 254 => stream[lists] += 1,
            _ => {
                let at = rng.below(stream.len());
                stream[at] ^= 1 << rng.below(32);
                counts = false;
            }
        }
        // Where list P is empty, nothing starts where N should end.
        counts &= round % 6 != 4 || offsets[2 * job + 1] >> 16 != 0;
        let (s, o) = (runner.upload(&stream), runner.upload(&offsets));
        let desc = MatrixDesc {
            stream: Slice::new(s.address(), stream.len() as u64),
            blocks: Slice::new(o.address(), offsets.len() as u64),
            scales: Slice::EMPTY,
            codec: CODEC_PLANE3,
            rows: case.rows as u32,
            cols: case.cols as u32,
            n_blocks: encoded.blocks as u32,
            ..MatrixDesc::default()
        };
        let descs = [desc; 9];
        let memory = runner.upload(bytemuck::cast_slice(&descs));
        layer.args.descs = Slice::new(memory.address(), 9);
        layer.keep.extend([s, o, memory]);
        if let Err(error) = layer.run() {
            panic!("{case:?}, damage {}: {error}", round % 6);
        }
        if counts {
            let faults = runner.download(&layer.faults)[0];
            assert!(faults > 0, "{case:?}, damage {}", round % 6);
        }
    }
}

macro_rules! suite {
    ($module:ident, $device:expr, $($case:ident),*) => {
        mod $module {
            $(
                #[test]
                fn $case() {
                    match $device {
                        Some(device) => super::$case(&device),
                        None => println!("skipped: no such device"),
                    }
                }
            )*
        }
    };
}

macro_rules! suites {
    ($($case:ident),*) => {
        suite!(emulator, crate::emulated(), $($case),*);
        suite!(cuda, crate::cuda(), $($case),*);
    };
}

suites!(
    every_width,
    every_height,
    several_tokens,
    tensor_cores,
    mixed_codecs,
    large,
    damaged,
    damaged_plane3
);
