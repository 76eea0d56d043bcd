//! Choosing a token from logits.

use std::cmp::Reverse;

use crate::simd::{Level, Simd, arms};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature; 0 takes the largest logit.
    pub temp: f32,
    /// Only the `top_k` largest logits stay in the choice; 0 for all.
    pub top_k: usize,
    /// Only the fewest tokens whose probabilities (at temperature 1) sum to `top_p` stay.
    pub top_p: f32,
    /// Where the random numbers start.
    pub seed: u64,
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in `[0, 1)`, 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A sampler and its state. The same seed and logits give the same tokens on every machine: the
/// exponential is libm's own code, sums go in one order.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: SplitMix64,
}

impl Sampler {
    /// At the start of its random numbers.
    pub fn new(sampling: Sampling) -> Self {
        Self {
            random: SplitMix64::new(sampling.seed),
            sampling,
        }
    }

    /// Chooses from one row of logits, which must not be empty. NaN is never chosen over a number.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        let Sampling {
            temp, top_k, top_p, ..
        } = self.sampling;
        if temp == 0.0 {
            return greedy(logits);
        }
        // Largest first, of equal ones the lowest id.
        let all = logits.len();
        let mut order = largest(logits, if top_k == 0 { all } else { top_k });
        let top = logits[order[0] as usize] as f64;
        let weight = |id: &u32, temp: f64| libm::exp((logits[*id as usize] as f64 - top) / temp);
        if top_p < 1.0 {
            let total: f64 = order.iter().map(|id| weight(id, 1.0)).sum();
            let mut sum = 0.0;
            let keep = order
                .iter()
                .position(|id| {
                    sum += weight(id, 1.0);
                    sum >= top_p as f64 * total
                })
                .map_or(order.len(), |last| last + 1);
            order.truncate(keep);
        }
        let total: f64 = order.iter().map(|id| weight(id, temp as f64)).sum();
        let target = self.random.next_f64() * total;
        let mut sum = 0.0;
        for id in &order {
            sum += weight(id, temp as f64);
            if target < sum {
                return *id;
            }
        }
        // Not reached but for rounding, or where every logit is NaN.
        order[0]
    }
}

/// Logits whose largest is found at a time, without a branch.
const CHUNK: usize = 256;

/// Integers in the order of numbers: zeros are equal, NaN is below all.
#[inline(always)]
fn key(x: f32) -> i32 {
    // Takes the sign of -0.0.
    let bits = (x + 0.0).to_bits() as i32;
    if x.is_nan() {
        i32::MIN
    } else {
        bits ^ (bits >> 31 & i32::MAX)
    }
}

/// The largest key, found side by side in as many places as a vector has.
#[inline(always)]
fn largest_key(numbers: &[f32]) -> i32 {
    let mut places = [i32::MIN; 16];
    let (whole, rest) = numbers.as_chunks::<16>();
    for sixteen in whole {
        for (place, x) in places.iter_mut().zip(sixteen) {
            *place = (*place).max(key(*x));
        }
    }
    let rest = rest.iter().map(|x| key(*x));
    rest.chain(places).fold(i32::MIN, i32::max)
}

// Bodies leave vectors to the compiler: their parameter only chooses the features.
#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn all_finite_body<S: Simd>(numbers: &[f32]) -> bool {
    let mut finite = true;
    for x in numbers {
        finite &= x.is_finite();
    }
    finite
}

#[allow(clippy::extra_unused_type_parameters)]
#[inline(always)]
unsafe fn maxima_body<S: Simd>(logits: &[f32]) -> Vec<i32> {
    let mut maxima = Vec::with_capacity(logits.len().div_ceil(CHUNK));
    for chunk in logits.chunks(CHUNK) {
        maxima.push(largest_key(chunk));
    }
    maxima
}

arms! {
    fn all_finite_on(numbers: &[f32]) -> bool = all_finite_body;
    fn maxima_on(logits: &[f32]) -> Vec<i32> = maxima_body;
}

/// Whether all numbers are finite.
pub fn all_finite(numbers: &[f32]) -> bool {
    all_finite_on(Level::best(), numbers)
}

/// The largest key of each chunk.
fn maxima(logits: &[f32]) -> Vec<i32> {
    maxima_on(Level::best(), logits)
}

/// The largest logit's token, of equal ones the lowest.
pub fn greedy(logits: &[f32]) -> u32 {
    let maxima = maxima(logits);
    // The first of the largest.
    let best = (0..maxima.len())
        .rev()
        .max_by_key(|c| maxima[*c])
        .unwrap_or(0);
    let chunk = logits.iter().skip(best * CHUNK);
    let within = chunk.map(|x| key(*x)).position(|k| k == maxima[best]);
    (best * CHUNK + within.unwrap_or(0)) as u32
}

/// A key and its token as one number: larger keys first, of equal ones the lower token.
fn place((key, id): (i32, u32)) -> u64 {
    // In the order of signed numbers.
    let key = key as u32 ^ 1 << 31;
    u64::from(!key) << 32 | u64::from(id)
}

/// The tokens of the `n` largest logits, largest first, of equal ones the lowest first.
fn largest(logits: &[f32], n: usize) -> Vec<u32> {
    let maxima = maxima(logits);
    // At least as many logits are no smaller than this as chunks have one that is.
    let mut least = i32::MIN;
    if n > 0 && n < maxima.len() {
        let mut sorted = maxima.clone();
        least = *sorted.select_nth_unstable_by_key(n - 1, |m| Reverse(*m)).1;
    }
    let mut order = Vec::new();
    for (c, chunk) in logits.chunks(CHUNK).enumerate() {
        if maxima[c] >= least {
            let first = (c * CHUNK) as u32;
            let places = (first..).zip(chunk).map(|(id, x)| (key(*x), id));
            order.extend(places.filter(|(k, _)| *k >= least).map(place));
        }
    }
    if n < order.len() {
        order.select_nth_unstable(n);
        order.truncate(n);
    }
    order.sort_unstable();
    order.into_iter().map(|place| place as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Arm;

    fn sampler(temp: f32, top_k: usize, top_p: f32) -> Sampler {
        Sampler::new(Sampling {
            temp,
            top_k,
            top_p,
            seed: 7,
        })
    }

    #[test]
    fn splitmix_matches_its_published_sequence() {
        // First outputs for seed 1234567, as the reference C code prints them.
        let mut r = SplitMix64::new(1_234_567);
        assert_eq!(r.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(r.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(greedy(&[f32::NAN, -1.0, f32::NAN]), 1);
        assert_eq!(sampler(0.0, 0, 1.0).choose(&[0.0, 2.0, 2.0]), 1);
    }

    #[test]
    fn chunks_change_no_order() {
        let mut r = SplitMix64::new(3);
        for len in [1, 5, CHUNK, CHUNK + 1, 40 * CHUNK + 7] {
            for few in [3, 1 << 20] {
                let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
                let logits: Vec<f32> = (0..len)
                    .map(|_| match r.next_u64() % 20 {
                        n @ 0..5 => special[n as usize],
                        _ => (r.next_u64() % few) as f32 - 1.0,
                    })
                    .collect();
                let mut plain: Vec<u32> = (0..len as u32).collect();
                plain.sort_by(|a, b| {
                    let (x, y) = (logits[*a as usize], logits[*b as usize]);
                    let by_size = y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal);
                    x.is_nan().cmp(&y.is_nan()).then(by_size).then(a.cmp(b))
                });
                assert_eq!(greedy(&logits), plain[0]);
                let on = |arm| maxima_on(Level::new(arm).unwrap(), &logits);
                let all = Arm::ALL.into_iter().filter(|a| a.supported());
                assert!(all.map(on).all(|m| m == maxima(&logits)));
                for n in [1, 2, 39, 40, 41, len] {
                    assert_eq!(largest(&logits, n), plain[..n.min(len)], "{len} {few} {n}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_found_wherever_it_is() {
        for len in [0, 1, 15, 16, 33] {
            let mut numbers = vec![-f32::MAX; len];
            assert!(all_finite(&numbers));
            for i in 0..len {
                for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    numbers[i] = x;
                    for arm in Arm::ALL.into_iter().filter(|a| a.supported()) {
                        let level = Level::new(arm).unwrap();
                        assert!(
                            !all_finite_on(level, &numbers),
                            "{x} at {i} of {len}, {arm:?}"
                        );
                    }
                }
                numbers[i] = f32::MIN_POSITIVE;
            }
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0, 2.0f32.ln(), 5.0f32.ln(), -1e9];
        let mut s = sampler(1.0, 0, 1.0);
        let mut count = [0; 4];
        let n = 80_000;
        for _ in 0..n {
            count[s.choose(&logits) as usize] += 1;
        }
        for (c, p) in count.iter().zip([0.125, 0.25, 0.625, 0.0]) {
            // Four standard deviations of a binomial share.
            let d = 4.0 * (p * (1.0 - p) / n as f64).sqrt();
            assert!((*c as f64 / n as f64 - p).abs() <= d, "{count:?}");
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits: Vec<f32> = (0..50).map(|i| -(i as f32) * 0.1).collect();
        let mut s = sampler(5.0, 3, 1.0);
        assert!((0..500).all(|_| s.choose(&logits) < 3));
        let p0 = 1.0 / logits.iter().map(|x| x.exp()).sum::<f32>();
        let mut s = sampler(5.0, 0, p0 * 1.5);
        let seen: Vec<u32> = (0..500).map(|_| s.choose(&logits)).collect();
        assert!(seen.iter().all(|t| *t < 2) && seen.contains(&1));
        let mut s = sampler(100.0, 0, p0 * 0.5);
        assert!((0..100).all(|_| s.choose(&logits) == 0));
    }
}
