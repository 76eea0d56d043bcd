//! The operators between the experts.

use host::backend::{
    Attend, Backend, Cached, Index, LoadExperts, Mla, Router, Scoring, TraceLayer,
};

use super::{At, Dense, Rng, rows, rows_mut};
use crate::case;

const TOKENS: [usize; 6] = [0, 1, 2, 7, 8, 33];

pub fn embed<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for cols in [1, 64, 255, 256, 257] {
        for tokens in TOKENS {
            let ids: Vec<u32> = (0..tokens).map(|_| rng.below(50) as u32).collect();
            let at = At::new(cols, false);
            let dims = [cols, tokens];
            for table in Dense::all(&mut rng, 50, cols) {
                case!(b, format!("embed {} {dims:?}", table.kind()), at.len(tokens),
                    [table: Dense, ids: Vec<u32>, dims: [usize; 2], at: At], |be, out| {
                    let (table, ids) = (table.upload(be)?, be.upload(ids)?);
                    be.embed(table.weight(), &ids, dims[0], dims[1], rows_mut(out, *at))
                });
            }
        }
    }
}

pub fn norms<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for cols in [1, 7, 8, 15, 16, 17, 31, 64, 255, 256, 257, 511, 768, 1000] {
        for tokens in [0, 1, 2, 7] {
            let at = At::new(cols, tokens == 2);
            let x = rng.f32s(at.len(tokens));
            let (w, bias) = (rng.f32s(cols), rng.f32s(cols));
            let dims = [cols, tokens];
            case!(b, format!("rms_norm {dims:?}"), at.len(tokens),
                [x: Vec<f32>, w: Vec<f32>, at: At, dims: [usize; 2]], |be, out| {
                let (x, w) = (be.upload(x)?, be.upload(w)?);
                be.rms_norm(rows(&x, *at), &w, 1e-6, dims[0], dims[1], rows_mut(out, *at))
            });
            case!(b, format!("layer_norm {dims:?}"), at.len(tokens),
                [x: Vec<f32>, w: Vec<f32>, bias: Vec<f32>, at: At, dims: [usize; 2]], |be, out| {
                let (x, w, bias) = (be.upload(x)?, be.upload(w)?, be.upload(bias)?);
                be.layer_norm(rows(&x, *at), &w, &bias, 1e-6, dims[0], dims[1], rows_mut(out, *at))
            });
        }
    }
}

pub fn elementwise<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for cols in [1, 8, 255, 256, 257, 1000] {
        for tokens in TOKENS {
            let at = At::new(cols, tokens == 2);
            let (x, y) = (rng.f32s(at.len(tokens)), rng.f32s(at.len(tokens)));
            let dims = [cols, tokens];
            case!(b, format!("silu_mul {dims:?}"), at.len(tokens),
                [x: Vec<f32>, y: Vec<f32>, at: At, dims: [usize; 2]], |be, out| {
                let (x, y) = (be.upload(x)?, be.upload(y)?);
                be.silu_mul(rows(&x, *at), rows(&y, *at), dims[0], dims[1], rows_mut(out, *at))
            });
            case!(b, format!("add {dims:?}"), at.len(tokens),
                [x: Vec<f32>, at: At, dims: [usize; 2]], |be, out| {
                let x = be.upload(x)?;
                be.add(rows(&x, *at), None, dims[0], dims[1], rows_mut(out, *at))
            });
            case!(b, format!("add two {dims:?}"), at.len(tokens),
                [x: Vec<f32>, y: Vec<f32>, at: At, dims: [usize; 2]], |be, out| {
                let (x, y) = (be.upload(x)?, be.upload(y)?);
                let also = Some(rows(&y, *at));
                be.add(rows(&x, *at), also, dims[0], dims[1], rows_mut(out, *at))
            });
        }
    }
}

pub fn linear<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    // 300 x 1032 x 33 is large enough for a CPU's threads, 130 rows for four rows a warp.
    for (n, cols) in [
        (1, 8),
        (3, 64),
        (15, 248),
        (16, 256),
        (130, 264),
        (33, 776),
        (300, 1032),
        (70, 1536),
        (4300, 2560),
    ] {
        // Blocks share tiles of the last two, whose stages of 1,024 columns end in a short one; of the last also
        // where there are as many multiprocessors as an H200 has.
        let large = n == 4300;
        for tokens in [0, 1, 2, 3, 4, 5, 8, 33, 64] {
            for (add, aligned) in [(false, true), (true, false), (true, true)] {
                if large != (tokens == 64) || large && !(add && aligned) {
                    continue;
                }
                let (from, to) = (At::new(cols, aligned), At::new(n, aligned));
                let x = rng.f32s(from.len(tokens));
                let dims = [n, cols, tokens];
                for w in Dense::all(&mut rng, n, cols) {
                    let kind = w.kind();
                    case!(b, format!("linear {kind} {dims:?}, add {add}, aligned {aligned}"), to.len(tokens),
                        [x: Vec<f32>, w: Dense, from: At, to: At, dims: [usize; 3], add: bool], |be, out| {
                        let (x, w) = (be.upload(x)?, w.upload(be)?);
                        let [n, cols, tokens] = *dims;
                        let (x, to) = (rows(&x, *from), rows_mut(out, *to));
                        be.linear(x, w.weight(), n, cols, tokens, *add, to)
                    });
                }
            }
        }
    }
}

pub fn rope<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (heads, rope, pass, x_head, out_head) in [
        (1, 2, 0, 2, 2),
        (3, 16, 5, 30, 21),
        (8, 64, 0, 64, 100),
        (2, 6, 64, 70, 70),
    ] {
        for (first, tokens) in [(0, 0), (0, 1), (1000, 7), (131_000, 2)] {
            let (from, to) = (
                At::new(heads * x_head, false),
                At::new(heads * out_head, true),
            );
            let x = rng.f32s(from.len(tokens));
            let inv: Vec<f32> = (0..rope / 2).map(|i| 0.7f32.powi(i)).collect();
            let rope = rope as usize;
            let dims = [heads, rope, pass, x_head, out_head, first, tokens];
            case!(b, format!("rope {dims:?}"), to.len(tokens),
                [x: Vec<f32>, inv: Vec<f32>, dims: [usize; 7], from: At, to: At], |be, out| {
                let [heads, rope, pass, x_head, out_head, first, tokens] = *dims;
                let (x, inv) = (be.upload(x)?, be.upload(inv)?);
                be.rope(rows(&x, *from), x_head, heads, rope, pass, &inv, first, tokens,
                    rows_mut(out, *to), out_head)
            });
        }
    }
}

/// Every shape of the kernels for one token: few rows, more, many, and columns that are no multiple of what a
/// warp takes at once.
pub fn linear_one_token<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (n, cols) in [
        (5, 2048),
        (70, 4104),
        (1100, 1032),
        (2200, 520),
        (4300, 512),
    ] {
        let (from, to) = (At::new(cols, true), At::new(n, true));
        let x = rng.f32s(from.len(1));
        let dims = [n, cols];
        for w in Dense::all(&mut rng, n, cols) {
            case!(b, format!("linear {} {dims:?}", w.kind()), to.len(1),
                [x: Vec<f32>, w: Dense, from: At, to: At, dims: [usize; 2]], |be, out| {
                let (x, w) = (be.upload(x)?, w.upload(be)?);
                let (x, to) = (rows(&x, *from), rows_mut(out, *to));
                be.linear(x, w.weight(), dims[0], dims[1], 1, true, to)
            });
        }
    }
}

/// Small, of the repository's model, ragged, and GLM-like.
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

/// More rows than lie in shared memory at once; weights whose rows are multiples of 16 bytes, in several
/// blocks of bf16 and of f32, and such as are not.
const DEEP: [Mla; 3] = [
    Mla {
        heads: 2,
        nope: 531,
        rope: 2,
        value: 3,
        latent: 144,
        scaling: 0.5,
    },
    Mla {
        heads: 2,
        nope: 259,
        rope: 2,
        value: 3,
        latent: 20,
        scaling: 0.5,
    },
    Mla {
        heads: 3,
        nope: 270,
        rope: 2,
        value: 5,
        latent: 71,
        scaling: 0.5,
    },
];

pub fn latent<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for mla in MLAS.into_iter().chain(DEEP) {
        for (tokens, aligned) in [
            (0, true),
            (1, true),
            (1, false),
            (2, true),
            (5, false),
            (9, true),
        ] {
            let Mla {
                heads,
                nope,
                rope,
                value,
                latent,
                ..
            } = mla;
            let q_at = At::new(heads * (nope + rope), aligned);
            let latent_at = At::new(heads * (latent + rope), aligned);
            let x_at = At::new(heads * latent, aligned);
            let value_at = At::new(heads * value, aligned);
            let q = rng.f32s(q_at.len(tokens));
            let x = rng.f32s(x_at.len(tokens));
            let tokens = &tokens;
            let at = [q_at, latent_at, x_at, value_at];
            for kv_b in Dense::all(&mut rng, heads * (nope + value), latent) {
                let kind = kv_b.kind();
                case!(b, format!("absorb_query {kind} {mla:?} x {tokens}"), latent_at.len(*tokens),
                    [q: Vec<f32>, kv_b: Dense, mla: Mla, tokens: usize, at: [At; 4]], |be, out| {
                    let (q, kv_b) = (be.upload(q)?, kv_b.upload(be)?);
                    be.absorb_query(rows(&q, at[0]), kv_b.weight(), mla, *tokens, rows_mut(out, at[1]))
                });
                case!(b, format!("expand_value {kind} {mla:?} x {tokens}"), value_at.len(*tokens),
                    [x: Vec<f32>, kv_b: Dense, mla: Mla, tokens: usize, at: [At; 4]], |be, out| {
                    let (x, kv_b) = (be.upload(x)?, kv_b.upload(be)?);
                    be.expand_value(rows(&x, at[2]), kv_b.weight(), mla, *tokens, rows_mut(out, at[3]))
                });
            }
        }
    }
}

pub fn attention<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for mla in MLAS {
        attention_of(
            b,
            &mut rng,
            mla,
            &[
                (0, 0, true),
                (0, 1, true),
                (0, 5, false),
                (62, 3, true),
                (63, 1, false),
                (64, 1, true),
                (130, 9, true),
                (200, 1, true),
            ],
            &[1, 16, 64, 65, 150],
        );
    }
    // Chunks whose factors are computed 32 at a time, and one more than that.
    for (heads, latent, rope, first, tokens) in [(3, 12, 4, 4200, 2), (2, 7, 2, 2111, 1)] {
        let mla = Mla {
            heads,
            rope,
            latent,
            ..MLAS[0]
        };
        attention_of(b, &mut rng, mla, &[(first, tokens, true)], &[2050]);
    }
}

/// So many tokens or chunks that blocks have 16 or eight heads, also on a device of 132 multiprocessors: rounds
/// of 16 heads side by side or (256 columns) one behind the other, the last of one head; columns that are no
/// multiple of what a warp's lanes have; more than are summed at once; eight heads.
pub fn attention_many<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    let of = |heads, latent, rope| Mla {
        heads,
        nope: 16,
        rope,
        value: 16,
        latent,
        scaling: 0.06,
    };
    for (mla, first, tokens, top_ks) in [
        (of(64, 512, 64), 0, 17, &[][..]),
        (of(64, 512, 64), 60, 9, &[77]),
        (of(64, 512, 64), 130, 6, &[140]),
        (of(64, 512, 64), 1093, 1, &[1090]),
        (of(17, 512, 64), 0, 34, &[50]),
        (of(17, 256, 8), 0, 176, &[]),
        (of(40, 300, 84), 0, 23, &[]),
        (of(33, 600, 8), 0, 23, &[18]),
        (of(64, 512, 64), 300, 1, &[290]),
        (of(7, 512, 64), 190, 9, &[150]),
        (of(8, 128, 128), 0, 34, &[]),
    ] {
        attention_of(b, &mut rng, mla, &[(first, tokens, true)], top_ks);
    }
}

/// Tokens `first..first + tokens`, aligned or not, causal and with lists of each `top_k`.
fn attention_of<B: LoadExperts>(
    b: &B,
    rng: &mut Rng,
    mla: Mla,
    tokens: &[(usize, usize, bool)],
    top_ks: &[usize],
) {
    for &(first, tokens, aligned) in tokens {
        let width = mla.latent + mla.rope;
        let from = At::new(mla.heads * width, aligned);
        let to = At::new(mla.heads * mla.latent, aligned);
        let mut q = rng.f32s(from.len(tokens));
        // Scores of moderate size, so that softmax has many terms.
        q.iter_mut().for_each(|q| *q *= 0.1);
        let cache: Vec<f32> = rng
            .f32s((first + tokens) * width)
            .iter()
            .map(|x| x.clamp(-4.0, 4.0))
            .collect();
        let narrow: Vec<u16> = cache.iter().map(|x| gpu::arith::to_bf16(*x)).collect();
        let dims = [first, tokens];
        case!(b, format!("attention {mla:?} {dims:?}"), to.len(tokens),
            [q: Vec<f32>, cache: Vec<f32>, mla: Mla, dims: [usize; 2], from: At, to: At], |be, out| {
            let (q, cache) = (be.upload(q)?, be.upload(cache)?);
            let cache = Cached::F32(&cache);
            be.attention(rows(&q, *from), cache, Attend::Causal, mla, dims[0], dims[1],
                rows_mut(out, *to))
        });
        case!(b, format!("attention to bf16 {mla:?} {dims:?}"), to.len(tokens),
            [q: Vec<f32>, narrow: Vec<u16>, mla: Mla, dims: [usize; 2], from: At, to: At], |be, out| {
            let (q, cache) = (be.upload(q)?, be.upload(narrow)?);
            let cache = Cached::Bf16(&cache);
            be.attention(rows(&q, *from), cache, Attend::Causal, mla, dims[0], dims[1],
                rows_mut(out, *to))
        });
        for &top_k in top_ks {
            let mut lists = vec![0u32; tokens * top_k];
            for (t, list) in lists.chunks_mut(top_k).enumerate() {
                let mut all: Vec<u32> = (0..(first + t + 1) as u32).collect();
                while all.len() > top_k {
                    all.remove(rng.below(all.len()));
                }
                list[..all.len()].copy_from_slice(&all);
            }
            let top_k = &top_k;
            case!(b, format!("attention to {top_k} {mla:?} {dims:?}"), to.len(tokens),
                [q: Vec<f32>, cache: Vec<f32>, lists: Vec<u32>, top_k: usize, mla: Mla,
                 dims: [usize; 2], from: At, to: At], |be, out| {
                let (q, cache, lists) = (be.upload(q)?, be.upload(cache)?, be.upload(lists)?);
                let attend = Attend::Listed { lists: &lists, top_k: *top_k };
                be.attention(rows(&q, *from), Cached::F32(&cache), attend, mla, dims[0], dims[1],
                    rows_mut(out, *to))
            });
            if [1, 64, 150].contains(top_k) {
                continue;
            }
            case!(b, format!("attention to {top_k} of bf16 {mla:?} {dims:?}"), to.len(tokens),
                [q: Vec<f32>, narrow: Vec<u16>, lists: Vec<u32>, top_k: usize, mla: Mla,
                 dims: [usize; 2], from: At, to: At], |be, out| {
                let (q, cache, lists) = (be.upload(q)?, be.upload(narrow)?, be.upload(lists)?);
                let attend = Attend::Listed { lists: &lists, top_k: *top_k };
                be.attention(rows(&q, *from), Cached::Bf16(&cache), attend, mla, dims[0], dims[1],
                    rows_mut(out, *to))
            });
        }
    }
}

/// Numbers between two of bf16 and right in the middle, those that are none, and all sizes.
pub fn narrow<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for cols in [1, 64, 127, 128, 129, 576] {
        for tokens in [0, 1, 2, 7] {
            let at = At::new(cols, tokens == 2);
            let mut x = rng.f32s(at.len(tokens));
            for x in &mut x {
                let high = (x.to_bits() >> 16) << 16;
                *x = match rng.below(8) {
                    0 => f32::from_bits(high | 0x8000),
                    1 => f32::from_bits(high | 0x8001),
                    2 => f32::from_bits(high | 0x7fff),
                    3 => [
                        f32::NAN,
                        f32::from_bits(0xff80_0001),
                        f32::INFINITY,
                        f32::MAX,
                    ][rng.below(4)],
                    _ => *x,
                };
            }
            let dims = [cols, tokens];
            case!(b, format!("narrow {dims:?}"), at.len(tokens),
                [x: Vec<f32>, at: At, dims: [usize; 2]], |be, out| {
                let x = be.upload(x)?;
                let n = at.len(dims[1]);
                let mut kept = be.alloc::<u16>(n)?;
                be.narrow(rows(&x, *at), dims[0], dims[1], rows_mut(&mut kept, *at))?;
                let mut read = vec![0u16; n];
                be.read(&kept, 0, &mut read)?;
                let floats: Vec<f32> = read.into_iter().map(f32::from).collect();
                be.write(out, 0, &floats)
            });
        }
    }
}

/// Hands u32 results to the comparison as f32 bits.
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

pub fn index<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    let mut cases = vec![];
    for shape in [(1, 2), (4, 32), (3, 24), (8, 128), (2, 264), (37, 128)] {
        for top_k in [1, 16, 64] {
            for range in [
                (0, 0),
                (0, 5),
                (14, 4),
                (63, 2),
                (64, 1),
                (130, 33),
                (257, 1),
            ] {
                cases.push((shape, top_k, range));
            }
        }
    }
    // More positions than the selection takes at a time.
    cases.push(((1, 8), 512, (1022, 3)));
    cases.push(((2, 8), 100, (2050, 2)));
    // Past the positions that GLM-5.2 lists: the last token that sees no more, and those after it.
    cases.push(((2, 8), 2048, (2046, 4)));
    // More tokens than a CPU holds scores of at once.
    cases.push(((4, 32), 16, (130, 70)));
    // So many that tiles of them choose first: the last of one position, of more and of fewer than are listed,
    // and a token that begins a tile.
    cases.push(((2, 8), 100, (16_384, 1)));
    cases.push(((1, 8), 2048, (20_000, 2)));
    cases.push(((1, 8), 2048, (25_000, 1)));
    cases.push(((1, 8), 512, (24_572, 8)));
    // Several tiles of positions and of tokens.
    cases.push(((32, 128), 256, (4090, 9)));
    cases.push(((32, 128), 256, (8300, 1)));
    for ((heads, dim), top_k, (first, tokens)) in cases {
        // Keys that differ in their last bits: every rounding of a score decides on its place.
        let close = rng.below(2) == 0;
        // Few distinct values make equal scores.
        let coarse = rng.below(2) == 0;
        let aligned = rng.below(3) > 0;
        let flips: Vec<u32> = match close {
            true => (0..(first + tokens) * dim)
                .map(|_| rng.below(4) as u32)
                .collect(),
            false => Vec::new(),
        };
        let mut draw = |n: usize| -> Vec<f32> {
            let x = rng.f32s(n);
            if coarse {
                x.into_iter().map(|x| x.clamp(-2.0, 2.0).round()).collect()
            } else {
                x
            }
        };
        let (from, weights) = (At::new(heads * dim, aligned), At::new(heads, false));
        let q = draw(from.len(tokens));
        let w = draw(weights.len(tokens));
        let mut keys = draw((first + tokens) * dim);
        for (i, flip) in flips.iter().enumerate().skip(dim) {
            keys[i] = f32::from_bits(keys[i % dim].to_bits() ^ flip);
        }
        let ix = Index { heads, dim, top_k };
        let n = tokens * top_k;
        let dims = [first, tokens, n];
        case!(b, format!("index {ix:?} {dims:?} coarse {coarse} close {close} aligned {aligned}"), n,
            [q: Vec<f32>, w: Vec<f32>, keys: Vec<f32>, ix: Index, dims: [usize; 3], from: At,
             weights: At], |be, out| {
            let [first, tokens, n] = *dims;
            let (q, w, keys) = (be.upload(q)?, be.upload(w)?, be.upload(keys)?);
            let mut lists = be.alloc::<u32>(n)?;
            be.index(rows(&q, *from), &keys, rows(&w, *weights), ix, first, tokens, &mut lists)?;
            put(be, &lists, n, out, 0)
        });
    }
}

pub fn route<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (experts, top_k, groups, top_groups) in [
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (16, 2, 1, 1),
        (31, 4, 1, 1),
        (32, 4, 1, 1),
        (33, 33, 1, 1),
        (256, 8, 1, 1),
        (256, 8, 8, 4),
        (12, 3, 4, 2),
        (12, 2, 6, 2),
        (12, 4, 6, 2),
    ] {
        // 70 tokens of 256 experts are enough for a CPU's threads.
        for tokens in TOKENS.into_iter().chain((groups == 8).then_some(70)) {
            for (normalise, scoring) in [
                (false, Scoring::Sigmoid),
                (true, Scoring::Sigmoid),
                (true, Scoring::Softmax),
            ] {
                let router = Router {
                    scoring,
                    experts,
                    top_k,
                    groups,
                    top_groups,
                    normalise,
                    scaling: 2.5,
                };
                let coarse = rng.below(2) == 0;
                let at = At::new(experts, coarse);
                let mut logits = rng.f32s(at.len(tokens));
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
                case!(b, format!("route {router:?} x {tokens}"), 2 * tokens * top_k,
                    [logits: Vec<f32>, bias: Vec<f32>, router: Router, tokens: usize, at: At], |be, out| {
                    let n = *tokens * router.top_k;
                    let (logits, bias) = (be.upload(logits)?, be.upload(bias)?);
                    let (mut ids, mut weights) = (be.alloc(n)?, be.alloc::<f32>(n)?);
                    be.route(rows(&logits, *at), &bias, router, *tokens, &mut ids, &mut weights)?;
                    put(be, &ids, n, out, 0)?;
                    let mut read = vec![0.0; n];
                    be.read(&weights, 0, &mut read)?;
                    be.write(out, n, &read)
                });
            }
        }
    }
}

pub fn replay<B: LoadExperts>(b: &B) {
    let mut rng = Rng::fresh();
    for (rows, layers, top_k) in [(1, 1, 1), (3, 2, 4), (40, 5, 8)] {
        for (first, tokens) in [(0, 0), (0, 1), (2, 5), (1000, 33)] {
            let n = rows * layers * top_k;
            let chosen: Vec<u32> = (0..n).map(|_| rng.below(1 << 20) as u32).collect();
            let given = rng.f32s(n);
            let layer = rng.below(layers);
            let dims = [rows, layers, layer, top_k, first, tokens];
            case!(b, format!("replay {dims:?}"), 2 * tokens * top_k,
                [chosen: Vec<u32>, given: Vec<f32>, dims: [usize; 6]], |be, out| {
                let [rows, layers, layer, top_k, first, tokens] = *dims;
                let n = tokens * top_k;
                let (chosen, given) = (be.upload(chosen)?, be.upload(given)?);
                let (mut ids, mut weights) = (be.alloc(n)?, be.alloc::<f32>(n)?);
                let trace = TraceLayer { chosen: &chosen, given: &given, rows, layers, layer };
                be.replay(trace, top_k, first, tokens, &mut ids, &mut weights)?;
                put(be, &ids, n, out, 0)?;
                let mut read = vec![0.0; n];
                be.read(&weights, 0, &mut read)?;
                be.write(out, n, &read)
            });
        }
    }
}
