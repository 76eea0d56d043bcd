//! What the documentation of `gpu::arith` says of its functions' errors, measured.
//!
//! The tests sample; `every_f32` (ignored, six minutes) goes through all arguments.

use gpu::arith::{self, exp, merge, order_key, rint, sigmoid, silu, sin_cos};

/// Distance of `got` from the true value in units of the last place of f32 at that value.
fn ulps(got: f32, want: f64) -> f64 {
    let exponent = (want.abs() as f32).to_bits() >> 23;
    // The smallest binade for denormals.
    let ulp = f64::powi(2.0, exponent.max(1) as i32 - 127 - 23);
    (f64::from(got) - want).abs() / ulp
}

/// The largest error of `f` over the f32 numbers from `low` to `high` (same sign, by magnitude),
/// `step` apart in bits, and where it is.
fn worst(
    low: f32,
    high: f32,
    step: usize,
    f: impl Fn(f32) -> f32,
    truth: impl Fn(f64) -> f64,
) -> (f64, f32) {
    assert_eq!(low.is_sign_negative(), high.is_sign_negative());
    (low.to_bits()..=high.to_bits())
        .step_by(step)
        .map(f32::from_bits)
        .map(|x| (ulps(f(x), truth(f64::from(x))), x))
        .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
}

/// A step that is no multiple of a power of two, so that low bits of arguments vary.
const STEP: usize = 331;

fn exp_error(step: usize) -> f64 {
    let (positive, at) = worst(0.0, 88.7, step, exp, f64::exp);
    println!("exp: {positive} ulp at {at:e}");
    let (negative, at) = worst(-0.0, -87.3, step, exp, f64::exp);
    println!("exp: {negative} ulp at {at:e}");
    positive.max(negative)
}

fn sigmoid_error(step: usize) -> f64 {
    let truth = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (positive, at) = worst(0.0, 88.0, step, sigmoid, truth);
    println!("sigmoid: {positive} ulp at {at:e}");
    // Below -87.3 the true value is 1.2e-38 and less; what comes out there is 1 / (1 + e^88.7).
    let (negative, at) = worst(-0.0, -87.3, step, sigmoid, truth);
    println!("sigmoid: {negative} ulp at {at:e}");
    positive.max(negative)
}

fn silu_error(step: usize) -> f64 {
    let truth = |x: f64| x / (1.0 + (-x).exp());
    let (positive, at) = worst(0.0, 1e6, step, silu, truth);
    println!("silu: {positive} ulp at {at:e}");
    let (negative, at) = worst(-0.0, -87.0, step, silu, truth);
    println!("silu: {negative} ulp at {at:e}");
    positive.max(negative)
}

fn sin_cos_error(step: usize) -> f64 {
    let (sin, at) = worst(0.0, 16_777_216.0, step, |x| sin_cos(x).0, f64::sin);
    println!("sin: {sin} ulp at {at:e}");
    let (cos, at) = worst(0.0, 16_777_216.0, step, |x| sin_cos(x).1, f64::cos);
    println!("cos: {cos} ulp at {at:e}");
    sin.max(cos)
}

/// The bounds that `gpu/src/arith.rs` states.
const EXP: f64 = 1.03;
const SIGMOID: f64 = 2.5;
const SILU: f64 = 2.5;
const SIN_COS: f64 = 0.51;

#[test]
fn exp_is_within_its_bound() {
    assert!(exp_error(STEP) <= EXP);
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(-87.31), 0.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert!(exp(f32::INFINITY).is_finite());
    assert_eq!(exp(f32::MAX), exp(88.7));
}

#[test]
fn sigmoid_and_silu_are_within_their_bounds() {
    assert!(sigmoid_error(STEP) <= SIGMOID);
    assert!(silu_error(STEP) <= SILU);
    assert_eq!(sigmoid(0.0), 0.5);
    assert_eq!(sigmoid(100.0), 1.0);
    assert!(sigmoid(-1000.0) < 1e-37);
    assert!(silu(-1000.0).abs() < 1e-34);
}

#[test]
fn sin_cos_are_within_their_bound() {
    assert!(sin_cos_error(STEP) <= SIN_COS);
    assert_eq!(sin_cos(0.0), (0.0, 1.0));
    // The angles of rotary embedding: positions times inverse frequencies.
    for position in (0..131_072).step_by(97) {
        for i in 0..32 {
            let angle = position as f32 * f32::powf(1e6, -i as f32 / 32.0);
            let (sin, cos) = sin_cos(angle);
            assert!(ulps(sin, f64::from(angle).sin()) <= SIN_COS, "{angle}");
            assert!(ulps(cos, f64::from(angle).cos()) <= SIN_COS, "{angle}");
        }
    }
}

#[test]
#[ignore = "six minutes: run when arith changes"]
fn every_f32() {
    assert!(exp_error(1) <= EXP);
    assert!(sigmoid_error(1) <= SIGMOID);
    assert!(silu_error(1) <= SILU);
    assert!(sin_cos_error(1) <= SIN_COS);
}

#[test]
fn rint_rounds_to_nearest_even() {
    let end = 4_194_304f32.to_bits(); // 2^22
    for bits in (0..end).step_by(STEP) {
        for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
            assert_eq!(rint(x), x.round_ties_even(), "{x}");
        }
    }
    for i in 0..100_000 {
        let x = i as f32 + 0.5;
        assert_eq!(rint(x), x.round_ties_even());
        assert_eq!(rint(-x), (-x).round_ties_even());
    }
}

#[test]
fn order_keys_order_as_numbers_do() {
    let mut numbers = vec![
        f32::NEG_INFINITY,
        f32::MIN,
        -1.0,
        -f32::MIN_POSITIVE,
        -f32::from_bits(1),
        -0.0,
        0.0,
        f32::from_bits(1),
        f32::MIN_POSITIVE,
        1.0,
        f32::MAX,
        f32::INFINITY,
    ];
    numbers.extend(
        (0..0x7f80_0000u32)
            .step_by(65_537)
            .flat_map(|b| [f32::from_bits(b), -f32::from_bits(b)]),
    );
    numbers.sort_by(f32::total_cmp);
    for pair in numbers.windows(2) {
        let (a, b) = (order_key(pair[0]), order_key(pair[1]));
        assert_eq!(
            a.cmp(&b),
            pair[0].partial_cmp(&pair[1]).unwrap(),
            "{pair:?}"
        );
    }
    assert_eq!(order_key(0.0), order_key(-0.0));
    assert!(order_key(f32::NEG_INFINITY) > 0, "0 marks what was taken");
}

#[test]
fn merge_keeps_the_larger_maximum() {
    for (a, b) in [
        (0.0, 0.0),
        (1.0, -3.0),
        (-3.0, 1.0),
        (-200.0, 0.5),
        (0.5, -200.0),
    ] {
        let f = merge(a, b);
        assert_eq!(f.m, f32::max(a, b));
        assert_eq!(f.old, exp(a - f.m));
        assert_eq!(f.new, exp(b - f.m));
        assert_eq!(f32::max(f.old, f.new), 1.0);
    }
}

#[test]
fn chunks_merge_to_the_softmax_of_all() {
    let scores: Vec<f32> = (0..1000)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.1)
        .collect();
    let values: Vec<f32> = (0..1000).map(|i| (i * 53 % 89) as f32 * 0.02).collect();
    let mut state: Option<(f32, f32, f32)> = None;
    for (s, v) in scores.chunks(64).zip(values.chunks(64)) {
        let m = s.iter().fold(f32::NEG_INFINITY, |m, s| arith::max(m, *s));
        let p: Vec<f32> = s.iter().map(|s| exp(s - m)).collect();
        let l = arith::plain::sum(&p);
        let o = p.iter().zip(v).fold(0.0, |o, (p, v)| arith::fma(*p, *v, o));
        state = Some(match state {
            None => (m, l, o),
            Some((m0, l0, o0)) => {
                let f = merge(m0, m);
                (
                    f.m,
                    arith::fma(l0, f.old, l * f.new),
                    arith::fma(o0, f.old, o * f.new),
                )
            }
        });
    }
    let (_, l, o) = state.unwrap();
    let p: Vec<f64> = scores.iter().map(|s| f64::from(*s).exp()).collect();
    let want = p
        .iter()
        .zip(&values)
        .map(|(p, v)| p * f64::from(*v))
        .sum::<f64>()
        / p.iter().sum::<f64>();
    // 64 roundings of 2^-24 in a chunk and as many in the sums of 16 chunks, at worst all one way.
    assert!((f64::from(o / l) / want - 1.0).abs() < 160.0 * f64::powi(2.0, -24));
}

#[test]
fn reductions_are_what_the_page_says() {
    // 256 partial sums, pairwise in eights, then halving: written out once more, differently.
    let x: Vec<f32> = (0..777)
        .map(|i| ((i * 7919 % 1000) as f32 - 499.5) * 1e-3)
        .collect();
    let mut partial = vec![0.0f32; 256];
    for (i, x) in x.iter().enumerate() {
        partial[i % 256] = x.mul_add(*x, partial[i % 256]);
    }
    while partial.len() > 32 {
        partial = partial.chunks(2).map(|p| p[0] + p[1]).collect();
    }
    while partial.len() > 1 {
        let half = partial.len() / 2;
        partial = (0..half).map(|i| partial[i] + partial[i + half]).collect();
    }
    assert_eq!(arith::plain::dot(&x, &x).to_bits(), partial[0].to_bits());
}

/// Against another crate's rounding; half way and one off, for each bf16 number.
#[test]
fn to_bf16_rounds_to_nearest_even() {
    for high in 0..=0xffffu32 {
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x = f32::from_bits(high << 16 | low);
            let want = half::bf16::from_f32(x).to_bits();
            assert_eq!(arith::to_bf16(x), want, "{:#x}", x.to_bits());
        }
    }
}
