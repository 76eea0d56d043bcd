//! The CPU back end against the reference, bit for bit: every operator, every arm that the
//! processor has, sizes around every block edge.

use gpu::layout::Symbol;
use host::archive::{
    Archive, ArchiveError, CodecChoice, ExpertSource, PackOptions, SymbolChoice, pack,
};
use host::backend::cpu::Cpu;
use host::backend::reference::Reference;
use host::backend::{
    Attend, Backend, Index, LayerExperts, LoadExperts, Mla, Router, Rows, RowsMut,
};
use host::bench::synth;
use host::expert::{ExpertShape, Form, RawMatrix, ScaleKind};
use host::simd::Arm;
use std::time::{SystemTime, UNIX_EPOCH};

/// SplitMix64.
struct Rng(u64);

impl Rng {
    /// A fresh seed, printed; `ANSATZ_SEED` repeats one.
    fn fresh() -> Self {
        let seed = match std::env::var("ANSATZ_SEED") {
            Ok(seed) => seed.parse().expect("ANSATZ_SEED: a number"),
            Err(_) => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64,
        };
        println!("ANSATZ_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Roughly normal; now and then a zero of either sign, a huge or a tiny number.
    fn f32(&mut self) -> f32 {
        match self.below(64) {
            0 => 0.0,
            1 => -0.0,
            2 => 3e4,
            3 => -1e-38,
            _ => {
                let mut x = 0.0;
                for _ in 0..4 {
                    x += self.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0;
                }
                x
            }
        }
    }

    fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }

    fn bf16s(&mut self, n: usize) -> Vec<u16> {
        (0..n)
            .map(|_| (self.f32().to_bits() >> 16) as u16)
            .collect()
    }
}

/// Elements before a view's first row, to see that offsets are kept.
const OFFSET: usize = 3;

/// Runs an operator on a back end: inputs are uploaded, `out` starts as given and is read back.
trait Case {
    fn run<B: LoadExperts>(&self, b: &B, out: &mut B::Buf<f32>) -> Result<(), B::Error>;
    /// Length of `out`.
    fn len(&self) -> usize;
}

fn output<B: LoadExperts>(b: &B, case: &impl Case) -> Vec<u32> {
    let start: Vec<f32> = (0..case.len()).map(|i| i as f32 * 0.37 - 5.0).collect();
    let mut out = b.upload(&start).unwrap();
    case.run(b, &mut out).unwrap();
    let mut read = vec![0.0; case.len()];
    b.read(&out, 0, &mut read).unwrap();
    read.into_iter().map(f32::to_bits).collect()
}

fn check(what: &str, cpu: &Cpu, case: &impl Case) {
    let (want, got) = (output(&Reference, case), output(cpu, case));
    let differ = want.iter().zip(&got).position(|(a, b)| a != b);
    if let Some(i) = differ {
        panic!(
            "{what} on {}: element {i} of {}: {} expected, {} found",
            cpu.describe(),
            want.len(),
            f32::from_bits(want[i]),
            f32::from_bits(got[i])
        );
    }
}

/// A case from a closure over the back end, which needs a macro: closures are not generic.
macro_rules! case {
    ($cpu:expr, $what:expr, $len:expr, [$($name:ident: $ty:ty),*], |$b:ident, $out:ident| $body:expr) => {{
        struct This { len: usize, $($name: $ty),* }
        impl Case for This {
            fn run<B: LoadExperts>(&self, $b: &B, $out: &mut B::Buf<f32>) -> Result<(), B::Error> {
                let This { len: _, $($name),* } = self;
                $body
            }
            fn len(&self) -> usize {
                self.len
            }
        }
        check(&$what, $cpu, &This { len: $len, $($name: $name.clone()),* });
    }};
}

fn rows<B>(buf: &B, stride: usize) -> Rows<'_, B> {
    Rows {
        buf,
        offset: OFFSET,
        stride,
    }
}

fn rows_mut<B>(buf: &mut B, stride: usize) -> RowsMut<'_, B> {
    RowsMut {
        buf,
        offset: OFFSET,
        stride,
    }
}

fn norms(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for cols in [1, 7, 8, 15, 16, 17, 31, 64, 255, 256, 257, 511, 768, 1000] {
        for tokens in [0, 1, 2, 7] {
            let stride = cols + 2;
            let x = rng.f32s(OFFSET + tokens * stride);
            let (w, b) = (rng.bf16s(cols), rng.bf16s(cols));
            let (cols, tokens) = (&cols, &tokens);
            case!(cpu, format!("rms_norm {cols} x {tokens}"), OFFSET + tokens * stride,
                [x: Vec<f32>, w: Vec<u16>, stride: usize, cols: usize, tokens: usize], |be, out| {
                let (x, w) = (be.upload(x)?, be.upload(w)?);
                be.rms_norm(rows(&x, *stride), &w, 1e-6, *cols, *tokens, rows_mut(out, *stride))
            });
            case!(cpu, format!("layer_norm {cols} x {tokens}"), OFFSET + tokens * stride,
                [x: Vec<f32>, w: Vec<u16>, b: Vec<u16>, stride: usize, cols: usize, tokens: usize], |be, out| {
                let (x, w, b) = (be.upload(x)?, be.upload(w)?, be.upload(b)?);
                be.layer_norm(rows(&x, *stride), &w, &b, 1e-6, *cols, *tokens, rows_mut(out, *stride))
            });
            case!(cpu, format!("silu_mul {cols} x {tokens}"), OFFSET + tokens * stride,
                [x: Vec<f32>, stride: usize, cols: usize, tokens: usize], |be, out| {
                let x = be.upload(x)?;
                be.silu_mul(rows(&x, *stride), rows(&x, *stride), *cols, *tokens, rows_mut(out, *stride))
            });
            case!(cpu, format!("add {cols} x {tokens}"), OFFSET + tokens * stride,
                [x: Vec<f32>, stride: usize, cols: usize, tokens: usize], |be, out| {
                let x = be.upload(x)?;
                be.add(rows(&x, *stride), *cols, *tokens, rows_mut(out, *stride))
            });
        }
    }
}

fn linear(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    // 300 x 1032 x 33 is large enough for threads.
    for (rows_, cols) in [
        (1, 8),
        (3, 64),
        (15, 248),
        (16, 256),
        (17, 264),
        (33, 776),
        (300, 1032),
    ] {
        for tokens in [0, 1, 2, 3, 4, 5, 8, 13, 33] {
            for add in [false, true] {
                let (xs, os) = (cols + 5, rows_ + 1);
                let x = rng.f32s(OFFSET + tokens * xs);
                let w = rng.bf16s(rows_ * cols);
                let (n, cols, tokens, add) = (&rows_, &cols, &tokens, &add);
                case!(cpu, format!("linear {n} x {cols}, {tokens} tokens, add {add}"), OFFSET + tokens * os,
                    [x: Vec<f32>, w: Vec<u16>, xs: usize, os: usize, n: usize, cols: usize, tokens: usize, add: bool], |be, out| {
                    let (x, w) = (be.upload(x)?, be.upload(w)?);
                    be.linear(rows(&x, *xs), &w, *n, *cols, *tokens, *add, rows_mut(out, *os))
                });
            }
        }
    }
}

fn embed(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for cols in [1, 64, 100] {
        for tokens in [0, 1, 9] {
            let table = rng.bf16s(50 * cols);
            let ids: Vec<u32> = (0..tokens).map(|_| rng.below(50) as u32).collect();
            let (cols, tokens) = (&cols, &tokens);
            case!(cpu, format!("embed {cols} x {tokens}"), OFFSET + tokens * cols,
                [table: Vec<u16>, ids: Vec<u32>, cols: usize, tokens: usize], |be, out| {
                let (table, ids) = (be.upload(table)?, be.upload(ids)?);
                be.embed(&table, &ids, *cols, *tokens, rows_mut(out, *cols))
            });
        }
    }
}

fn rope(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for (heads, rope, pass, x_head, out_head) in [
        (1, 2, 0, 2, 2),
        (3, 16, 5, 30, 21),
        (8, 64, 0, 64, 100),
        (2, 6, 64, 70, 70),
    ] {
        for (first, tokens) in [(0, 1), (1000, 7), (131_000, 2)] {
            let (xs, os) = (heads * x_head + 1, heads * out_head);
            let x = rng.f32s(OFFSET + tokens * xs);
            let inv: Vec<f32> = (0..rope / 2).map(|i| 0.7f32.powi(i)).collect();
            let rope = rope as usize;
            let dims = [heads, rope, pass, x_head, out_head, first, tokens, xs, os];
            case!(cpu, format!("rope {dims:?}"), OFFSET + tokens * os,
                [x: Vec<f32>, inv: Vec<f32>, dims: [usize; 9]], |be, out| {
                let [heads, rope, pass, x_head, out_head, first, tokens, xs, os] = *dims;
                let (x, inv) = (be.upload(x)?, be.upload(inv)?);
                be.rope(rows(&x, xs), x_head, heads, rope, pass, &inv, first, tokens, rows_mut(out, os), out_head)
            });
        }
    }
}

/// Small, of the repository's model, and GLM-like.
const MLAS: [Mla; 4] = [
    Mla {
        heads: 1,
        nope: 1,
        rope: 2,
        value: 3,
        latent: 8,
        scaling: 0.5,
    },
    Mla {
        heads: 8,
        nope: 32,
        rope: 16,
        value: 32,
        latent: 64,
        scaling: 0.144,
    },
    Mla {
        heads: 5,
        nope: 19,
        rope: 6,
        value: 17,
        latent: 72,
        scaling: 0.2,
    },
    Mla {
        heads: 9,
        nope: 48,
        rope: 64,
        value: 64,
        latent: 512,
        scaling: 0.06,
    },
];

fn latent(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for mla in MLAS {
        for tokens in [0, 1, 2, 5, 9] {
            let Mla {
                heads,
                nope,
                rope,
                value,
                latent,
                ..
            } = mla;
            let kv_b = rng.bf16s(heads * (nope + value) * latent);
            let (qs, cs, vs) = (
                heads * (nope + rope),
                heads * (latent + rope),
                heads * value,
            );
            let q = rng.f32s(OFFSET + tokens * qs);
            let x = rng.f32s(OFFSET + tokens * heads * latent);
            let tokens = &tokens;
            let dims = [qs, cs, vs, heads * latent];
            case!(cpu, format!("absorb_query {mla:?} x {tokens}"), OFFSET + tokens * cs,
                [q: Vec<f32>, kv_b: Vec<u16>, mla: Mla, tokens: usize, dims: [usize; 4]], |be, out| {
                let (q, kv_b) = (be.upload(q)?, be.upload(kv_b)?);
                be.absorb_query(rows(&q, dims[0]), &kv_b, mla, *tokens, rows_mut(out, dims[1]))
            });
            case!(cpu, format!("expand_value {mla:?} x {tokens}"), OFFSET + tokens * vs,
                [x: Vec<f32>, kv_b: Vec<u16>, mla: Mla, tokens: usize, dims: [usize; 4]], |be, out| {
                let (x, kv_b) = (be.upload(x)?, be.upload(kv_b)?);
                be.expand_value(rows(&x, dims[3]), &kv_b, mla, *tokens, rows_mut(out, dims[2]))
            });
        }
    }
}

fn attention(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for mla in MLAS {
        for (first, tokens) in [
            (0, 0),
            (0, 1),
            (0, 5),
            (62, 3),
            (63, 1),
            (64, 1),
            (130, 33),
            (200, 1),
        ] {
            let width = mla.latent + mla.rope;
            let qs = mla.heads * width + 3;
            let os = mla.heads * mla.latent + 1;
            let mut q = rng.f32s(OFFSET + tokens * qs);
            // Scores of moderate size, so that softmax has many terms.
            q.iter_mut().for_each(|q| *q *= 0.1);
            let cache: Vec<f32> = rng
                .f32s((first + tokens) * width)
                .iter()
                .map(|x| x.clamp(-4.0, 4.0))
                .collect();
            let dims = [first, tokens, qs, os];
            case!(cpu, format!("attention {mla:?} {dims:?}"), OFFSET + tokens * os,
                [q: Vec<f32>, cache: Vec<f32>, mla: Mla, dims: [usize; 4]], |be, out| {
                let [first, tokens, qs, os] = *dims;
                let (q, cache) = (be.upload(q)?, be.upload(cache)?);
                be.attention(rows(&q, qs), &cache, Attend::Causal, mla, first, tokens, rows_mut(out, os))
            });
            for top_k in [1, 16, 64, 65, 150] {
                let mut lists = vec![0u32; tokens * top_k];
                for (t, list) in lists.chunks_mut(top_k).enumerate() {
                    let mut all: Vec<u32> = (0..(first + t + 1) as u32).collect();
                    while all.len() > top_k {
                        all.remove(rng.below(all.len()));
                    }
                    list[..all.len()].copy_from_slice(&all);
                }
                let top_k = &top_k;
                case!(cpu, format!("attention to {top_k} {mla:?} {dims:?}"), OFFSET + tokens * os,
                    [q: Vec<f32>, cache: Vec<f32>, lists: Vec<u32>, top_k: usize, mla: Mla, dims: [usize; 4]], |be, out| {
                    let [first, tokens, qs, os] = *dims;
                    let (q, cache, lists) = (be.upload(q)?, be.upload(cache)?, be.upload(lists)?);
                    let attend = Attend::Listed { lists: &lists, top_k: *top_k };
                    be.attention(rows(&q, qs), &cache, attend, mla, first, tokens, rows_mut(out, os))
                });
            }
        }
    }
}

/// Hands u32 results to [`check`] as f32 bits.
fn put<B: Backend>(
    be: &B,
    ids: &B::Buf<u32>,
    n: usize,
    out: &mut B::Buf<f32>,
    at: usize,
) -> Result<(), B::Error> {
    let mut read = vec![0u32; n];
    be.read(ids, 0, &mut read)?;
    let floats: Vec<f32> = read.into_iter().map(f32::from_bits).collect();
    be.write(out, at, &floats)
}

fn index(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for (heads, dim) in [(1, 2), (4, 32), (3, 24), (32, 128)] {
        for top_k in [1, 16, 64] {
            for (first, tokens) in [
                (0, 0),
                (0, 1),
                (0, 5),
                (14, 4),
                (63, 2),
                (64, 1),
                (130, 70),
                (257, 1),
            ] {
                // Few distinct values make equal scores.
                let coarse = rng.below(2) == 0;
                let mut draw = |n: usize| -> Vec<f32> {
                    let x = rng.f32s(n);
                    if coarse {
                        x.into_iter().map(|x| x.clamp(-2.0, 2.0).round()).collect()
                    } else {
                        x
                    }
                };
                let q = draw(OFFSET + tokens * heads * dim);
                let w = draw(OFFSET + tokens * heads);
                let keys = draw((first + tokens) * dim);
                let ix = Index { heads, dim, top_k };
                let n = tokens * top_k;
                let dims = [first, tokens, n];
                case!(cpu, format!("index {ix:?} {dims:?} coarse {coarse}"), n,
                    [q: Vec<f32>, w: Vec<f32>, keys: Vec<f32>, ix: Index, dims: [usize; 3]], |be, out| {
                    let [first, tokens, n] = *dims;
                    let (q, w, keys) = (be.upload(q)?, be.upload(w)?, be.upload(keys)?);
                    let mut lists = be.alloc::<u32>(n)?;
                    be.index(rows(&q, ix.heads * ix.dim), &keys, rows(&w, ix.heads), ix, first, tokens, &mut lists)?;
                    put(be, &lists, n, out, 0)
                });
            }
        }
    }
}

fn route(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    for (experts, top_k, groups, top_groups) in [
        (2, 1, 1, 1),
        (16, 2, 1, 1),
        (32, 4, 1, 1),
        (256, 8, 8, 4),
        (12, 3, 4, 2),
        (12, 2, 6, 2),
    ] {
        for tokens in [0, 1, 7, 70] {
            for normalise in [false, true] {
                let router = Router {
                    experts,
                    top_k,
                    groups,
                    top_groups,
                    normalise,
                    scaling: 2.5,
                };
                let coarse = rng.below(2) == 0;
                let mut logits = rng.f32s(OFFSET + tokens * experts);
                if coarse {
                    logits
                        .iter_mut()
                        .for_each(|x| *x = x.clamp(-2.0, 2.0).round());
                }
                let bias: Vec<f32> = if coarse {
                    vec![0.25; experts]
                } else {
                    rng.f32s(experts)
                        .iter()
                        .map(|x| x.clamp(-1.0, 1.0))
                        .collect()
                };
                let tokens = &tokens;
                case!(cpu, format!("route {router:?} x {tokens}"), 2 * tokens * top_k,
                    [logits: Vec<f32>, bias: Vec<f32>, router: Router, tokens: usize], |be, out| {
                    let n = *tokens * router.top_k;
                    let (logits, bias) = (be.upload(logits)?, be.upload(bias)?);
                    let (mut ids, mut weights) = (be.alloc(n)?, be.alloc::<f32>(n)?);
                    be.route(rows(&logits, router.experts), &bias, router, *tokens, &mut ids, &mut weights)?;
                    put(be, &ids, n, out, 0)?;
                    let mut read = vec![0.0; n];
                    be.read(&weights, 0, &mut read)?;
                    be.write(out, n, &read)
                });
            }
        }
    }
}

fn matrix(rng: &mut Rng, rows: usize, cols: usize, scales: ScaleKind) -> RawMatrix<'static> {
    RawMatrix {
        packed: (0..rows * cols / 2)
            .map(|_| rng.next() as u8)
            .collect::<Vec<_>>()
            .into(),
        scales: (0..scales.count(rows, cols))
            .map(|_| rng.below(1000) as f32 * 1e-4)
            .collect::<Vec<_>>()
            .into(),
    }
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

fn experts(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    let shapes = [
        (64, 64),
        (128, 192),
        (256, 128),
        (320, 64),
        (576, 1088),
        (1536, 256),
        (2112, 64),
        (128, 4096),
        (64, 8192),
    ];
    for (hidden, intermediate) in shapes {
        for scales in [ScaleKind::Row, ScaleKind::G64] {
            let shape = ExpertShape {
                hidden,
                intermediate,
                scales,
            };
            let n = 5;
            let raw: Vec<[RawMatrix<'static>; 3]> = (0..n)
                .map(|_| {
                    [
                        matrix(&mut rng, intermediate, hidden, scales),
                        matrix(&mut rng, intermediate, hidden, scales),
                        matrix(&mut rng, hidden, intermediate, scales),
                    ]
                })
                .collect();
            for tokens in [0, 1, 2, 7, 33] {
                if tokens > 2 && hidden * intermediate > 1 << 18 {
                    continue;
                }
                let top_k = 3;
                let ids = choices(&mut rng, tokens, top_k, n);
                let weights = rng.f32s(tokens * top_k);
                let mut x = rng.f32s(OFFSET + tokens * hidden);
                if tokens > 1 {
                    x[OFFSET..OFFSET + hidden].fill(0.0);
                }
                let tokens = &tokens;
                case!(cpu, format!("experts {shape:?} x {tokens}"), OFFSET + tokens * hidden,
                    [raw: Vec<[RawMatrix<'static>; 3]>, shape: ExpertShape, x: Vec<f32>, ids: Vec<u32>, weights: Vec<f32>, tokens: usize], |be, out| {
                    let experts = be.load_experts(LayerExperts::Raw(raw.clone()), *shape, Form::Fused)?;
                    let (x, ids, weights) = (be.upload(x)?, be.upload(ids)?, be.upload(weights)?);
                    be.experts(&experts, rows(&x, shape.hidden), &ids, &weights, 3, *tokens, rows_mut(out, shape.hidden))
                });
            }
        }
    }
}

/// Experts of one layer, to pack.
struct Memory {
    shape: ExpertShape,
    experts: Vec<[RawMatrix<'static>; 3]>,
}

impl ExpertSource for Memory {
    fn shape(&self) -> &ExpertShape {
        &self.shape
    }
    fn layers(&self) -> &[u32] {
        &[7]
    }
    fn experts(&self) -> usize {
        self.experts.len()
    }
    fn expert(&self, _layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        Ok(self.experts[expert].clone())
    }
}

fn experts_output<B: LoadExperts>(
    be: &B,
    layer: LayerExperts<'_>,
    shape: ExpertShape,
    form: Form,
    x: &[f32],
    ids: &[u32],
    top_k: usize,
) -> Vec<u32> {
    let tokens = ids.len() / top_k;
    let weights: Vec<f32> = (0..ids.len()).map(|i| 0.1 + i as f32 * 0.07).collect();
    let experts = be.load_experts(layer, shape, form).unwrap();
    let (x, ids) = (be.upload(x).unwrap(), be.upload(ids).unwrap());
    let weights = be.upload(&weights).unwrap();
    let n = tokens * shape.hidden;
    let (mut out, mut read) = (be.alloc::<f32>(n).unwrap(), vec![0.0f32; n]);
    let x = host::backend::rows(&x, shape.hidden);
    let to = host::backend::rows_mut(&mut out, shape.hidden);
    be.experts(&experts, x, &ids, &weights, top_k, tokens, to)
        .unwrap();
    be.read(&out, 0, &mut read).unwrap();
    read.into_iter().map(f32::to_bits).collect()
}

fn coded(cpu: &Cpu) {
    let mut rng = Rng::fresh();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("experts.ansx");
    // The second has several segments, and blocks enough for threads.
    for (hidden, intermediate) in [(256, 128), (4096, 448), (192, 320)] {
        for (scales, symbol) in [
            (ScaleKind::Row, Symbol::Pair),
            (ScaleKind::Row, Symbol::Triple),
            (ScaleKind::G64, Symbol::Pair),
            (ScaleKind::G64, Symbol::Triple),
        ] {
            let shape = ExpertShape {
                hidden,
                intermediate,
                scales,
            };
            let source = Memory {
                shape,
                experts: (0..4)
                    .map(|e| synth::expert(rng.next() ^ e, &shape))
                    .collect(),
            };
            let options = PackOptions {
                symbols: SymbolChoice::Always(symbol),
                codec: CodecChoice::Rans,
                ..PackOptions::default()
            };
            pack(&source, &options, &path, |_| (), || false).unwrap();
            let archive = Archive::open(&path).unwrap();
            for tokens in [1, 7] {
                let x = rng.f32s(tokens * hidden);
                let ids = choices(&mut rng, tokens, 2, 4);
                let raw = LayerExperts::Raw(source.experts.clone());
                let want = experts_output(&Reference, raw, shape, Form::Fused, &x, &ids, 2);
                for form in [Form::Fused, Form::Unfused] {
                    let layer = archive.layer(7).unwrap();
                    let records = (0..4).map(|e| layer.record(e).unwrap()).collect();
                    let coded = LayerExperts::Coded { layer, records };
                    let got = experts_output(cpu, coded, shape, form, &x, &ids, 2);
                    assert!(
                        want == got,
                        "{shape:?} {symbol:?} {form:?} x {tokens} on {}",
                        cpu.describe()
                    );
                }
            }
        }
    }
}

macro_rules! suite {
    ($($arm:ident = $which:expr;)*) => {$(
        mod $arm {
            suite!(@tests $which, norms linear embed rope latent attention index route experts coded);
        }
    )*};
    (@tests $which:expr, $($name:ident)*) => {$(
        #[test]
        fn $name() {
            match super::Cpu::with_arm($which) {
                Ok(cpu) => super::$name(&cpu),
                Err(error) => println!("skipped: {error}"),
            }
        }
    )*};
}

suite! {
    baseline = super::Arm::Baseline;
    avx2 = super::Arm::Avx2;
    avx512 = super::Arm::Avx512;
}

#[test]
fn wrong_experts_are_refused() {
    let mut rng = Rng(1);
    let cpu = Cpu::with_arm(Arm::Baseline).unwrap();
    let shape = ExpertShape {
        hidden: 128,
        intermediate: 64,
        scales: ScaleKind::Row,
    };
    let good = [
        matrix(&mut rng, 64, 128, ScaleKind::Row),
        matrix(&mut rng, 64, 128, ScaleKind::Row),
        matrix(&mut rng, 128, 64, ScaleKind::Row),
    ];
    let mut bad = good.clone();
    bad[2].scales.to_mut().pop();
    let error = cpu
        .load_experts(
            LayerExperts::Raw(vec![good.clone(), bad]),
            shape,
            Form::Fused,
        )
        .err()
        .unwrap();
    assert_eq!(
        error.to_string(),
        "expert 1 down_proj: 4096 packed bytes and 127 scales, expected 4096 and 128"
    );
    let shape = ExpertShape {
        hidden: 100,
        ..shape
    };
    let error = cpu
        .load_experts(LayerExperts::Raw(vec![good]), shape, Form::Fused)
        .err()
        .unwrap();
    assert!(error.to_string().contains("100 columns"), "{error}");
}

fn host() -> assert_cmd::Command {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_host"));
    command.env_remove("ANSATZ_CPU");
    command
}

fn json(out: &[u8]) -> serde_json::Value {
    serde_json::from_slice(out).unwrap()
}

#[test]
fn doctor_says_what_there_is() {
    let done = host().args(["doctor", "--json"]).assert().success();
    let found = json(&done.get_output().stdout);
    assert_eq!(found["ok"], true);
    assert_eq!(found["cpu"]["arm"], Arm::best().name());
    assert!(found["model"]["layers"].as_u64().unwrap() > 0);
    let done = host().arg("doctor").assert().success();
    let text = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    assert!(text.contains("`host generate` runs on"), "{text}");
}

#[test]
fn doctor_fails_where_generate_would() {
    let dir = tempfile::tempdir().unwrap();
    let done = host()
        .arg("doctor")
        .arg("-m")
        .arg(dir.path())
        .assert()
        .code(1);
    let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(
        error.lines().count() == 1 && error.contains("config.json"),
        "{error}"
    );
    let done = host()
        .arg("doctor")
        .env("ANSATZ_CPU", "sse9")
        .assert()
        .code(1);
    let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(error.contains("unknown CPU arm `sse9`"), "{error}");
}

#[test]
fn bench_checks_and_times() {
    let bench = |args: &[&str]| {
        let mut command = host();
        command.args([
            "bench",
            "kernels",
            "--shape",
            "256,128",
            "--experts",
            "2",
            "--cache",
            "0",
        ]);
        command.args(["--runs", "2"]).args(args);
        command
    };
    let args = [
        "--device", "cpu", "--scales", "row,g64", "--tokens", "1,3", "--json",
    ];
    let done = bench(&args).assert().success();
    let rows = json(&done.get_output().stdout);
    let rows = rows.as_array().unwrap();
    // Scales, tokens, forms, stages.
    assert_eq!(rows.len(), 2 * 2 * 3 * 3);
    for row in rows {
        assert_eq!(row["bits_of_difference"], 0);
        assert!(row["raw_equivalent_gb_s"].as_f64().unwrap() > 0.0);
    }
    let done = bench(&["--device", "cpu"]).assert().success();
    let table = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    assert_eq!(table.lines().count(), 2 + 9, "{table}");
    if host::backend::kernels::CudaDevice::count() == 0 {
        let done = bench(&[]).assert().code(1);
        let error = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        assert!(
            error.lines().count() == 1 && error.contains("--device cpu"),
            "{error}"
        );
    }
    bench(&["--device", "cpu", "--shape", "100,64"])
        .assert()
        .code(2);
}
