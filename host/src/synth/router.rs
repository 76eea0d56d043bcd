//! A router whose experts are used with a chosen skew.
//!
//! With Gaussian router weights an expert's logit is normal, of standard deviation [`LOGIT_SIGMA`]
//! for a hidden state of root mean square 1, and independent of the others'. The correction bias
//! then orders the experts: of rank `r` among `n` it is `b * (1/2 - r / (n - 1))`. Which `b` gives
//! the skew is found by bisection over simulated tokens; the bias shifts the choice and not the
//! weights, as in the real model. Each layer has an order of its own.

use crate::backend::Router;
use crate::bench::synth::Rng;
use crate::placement::profile::Profile;

use super::mix;

/// Standard deviation of the logits.
pub const LOGIT_SIGMA: f64 = 1.0;

/// Tokens that are simulated.
const TOKENS: usize = 2048;

/// The `experts` most used, as a share of all, get this share of the `selections`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skew {
    /// Share of experts, 0 to 1.
    pub experts: f64,
    /// Share of selections, at least that of the experts.
    pub selections: f64,
}

impl Skew {
    /// What was published of GLM-5.2: the 48% most used experts cover 85% of selections.
    pub const PUBLISHED: Skew = Skew {
        experts: 0.48,
        selections: 0.85,
    };
}

/// Bias and use of the experts of a layer, by rank.
#[derive(Clone, Debug)]
pub struct Routing {
    /// Correction bias, falling.
    pub bias: Vec<f32>,
    /// How often each was chosen in the simulation, of [`Routing::tokens`] tokens.
    pub chosen: Vec<u32>,
    /// Simulated tokens.
    pub tokens: usize,
    /// Share of selections of the most used; `None` without a skew.
    pub covered: Option<f64>,
}

/// Share of selections that the most used `share` of experts get.
pub fn covered(chosen: &[u32], share: f64) -> f64 {
    let mut sorted = chosen.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let most = (share * chosen.len() as f64).round() as usize;
    let sum = |c: &[u32]| c.iter().map(|n| f64::from(*n)).sum::<f64>();
    sum(&sorted[..most]) / sum(&sorted)
}

/// How often each expert is among the best of a token, by score and bias.
fn choose(scores: &[f32], bias: &[f32], top_k: usize) -> Vec<u32> {
    let n = bias.len();
    let mut chosen = vec![0; n];
    let mut order: Vec<usize> = Vec::with_capacity(n);
    for token in scores.chunks_exact(n) {
        order.clear();
        order.extend(0..n);
        let by = |a: &usize, b: &usize| (token[*b] + bias[*b]).total_cmp(&(token[*a] + bias[*a]));
        if top_k < n {
            order.select_nth_unstable_by(top_k - 1, by);
        }
        for e in &order[..top_k] {
            chosen[*e] += 1;
        }
    }
    chosen
}

/// The routing of every layer. An error says which skews there are.
pub fn routing(router: &Router, skew: Option<Skew>, seed: u64) -> Result<Routing, String> {
    let (n, top_k) = (router.experts, router.top_k);
    let mut rng = Rng::new(seed);
    let logits = rng.normals(TOKENS * n);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x) * LOGIT_SIGMA).exp());
    let scores: Vec<f32> = logits.iter().map(|x| sigmoid(*x) as f32).collect();
    let slope = |b: f64| -> Vec<f32> {
        let last = (n - 1).max(1) as f64;
        (0..n)
            .map(|r| (b * (0.5 - r as f64 / last)) as f32)
            .collect()
    };
    let made = |b: f64| {
        let bias = slope(b);
        let chosen = choose(&scores, &bias, top_k);
        (bias, chosen)
    };
    let Some(skew) = skew else {
        let (bias, chosen) = made(0.0);
        return Ok(Routing {
            bias,
            chosen,
            tokens: TOKENS,
            covered: None,
        });
    };
    // A score is between 0 and 1: with a slope as steep as this the first top_k are always chosen.
    let (mut low, mut high) = (0.0, 2.0 * n as f64);
    let least = covered(&made(low).1, skew.experts);
    let most = covered(&made(high).1, skew.experts);
    if !(0.0 < skew.experts && skew.experts < 1.0 && skew.selections <= most)
        || skew.selections < skew.experts
    {
        return Err(format!(
            "--skew {}:{}: expected a share of experts between 0 and 1 and a share of selections from \
             that up to {:.3}",
            skew.experts,
            skew.selections,
            most.abs()
        ));
    }
    // Equal chances give somewhat more than the share of experts, by chance.
    if skew.selections <= least {
        high = 0.0;
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if covered(&made(middle).1, skew.experts) < skew.selections {
            low = middle;
        } else {
            high = middle;
        }
    }
    let (bias, chosen) = made(high);
    let covered = Some(covered(&chosen, skew.experts));
    Ok(Routing {
        bias,
        chosen,
        tokens: TOKENS,
        covered,
    })
}

/// Experts of a layer by rank: a permutation that the seed and the layer choose (Fisher and Yates).
fn order(n: usize, layer: u32, seed: u64) -> Vec<usize> {
    let mut rng = Rng::new(mix(seed, (1 << 40) + u64::from(layer)));
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, (rng.bits() % (i as u64 + 1)) as usize);
    }
    order
}

impl Routing {
    /// Correction bias of a layer, by expert.
    pub fn bias_of(&self, layer: u32, seed: u64) -> Vec<f32> {
        let mut bias = vec![0.0; self.bias.len()];
        for (r, e) in order(bias.len(), layer, seed).into_iter().enumerate() {
            bias[e] = self.bias[r];
        }
        bias
    }
}

/// The `n` experts of a layer that are used most.
pub fn hottest(experts: usize, layer: u32, seed: u64, n: usize) -> Vec<usize> {
    let mut order = order(experts, layer, seed);
    order.truncate(n);
    order
}

/// The use of experts to expect, as a profile.
pub fn usage(routing: &Routing, layers: &[u32], seed: u64) -> Profile {
    let mut profile = Profile::new();
    profile.add_tokens(routing.tokens as f64);
    for layer in layers {
        let order = order(routing.bias.len(), *layer, seed);
        for (e, n) in order.into_iter().zip(&routing.chosen) {
            if *n > 0 {
                profile.add(*layer, e as u32, f64::from(*n));
            }
        }
    }
    profile
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::backend::{Backend, Scoring, Weight, rows, rows_mut};

    const GLM: Router = Router {
        scoring: Scoring::Sigmoid,
        experts: 256,
        top_k: 8,
        groups: 1,
        top_groups: 1,
        normalise: true,
        scaling: 2.5,
    };

    /// The model's own router, on Gaussian hidden states, has the skew that was asked for.
    #[test]
    fn the_router_has_the_published_skew() {
        let (hidden, tokens) = (512, 1024);
        let skew = Skew::PUBLISHED;
        let routing = routing(&GLM, Some(skew), 3).unwrap();
        assert!((routing.covered.unwrap() - skew.selections).abs() < 0.005);
        let bias = routing.bias_of(7, 9);
        let mut rng = Rng::new(11);
        let sigma = LOGIT_SIGMA as f32 / (hidden as f32).sqrt();
        let weight: Vec<u16> = (rng.normals(GLM.experts * hidden).iter())
            .map(|x| half::bf16::from_f32(x * sigma).to_bits())
            .collect();
        let x = rng.normals(tokens * hidden);
        let cpu = Cpu::new().unwrap();
        let (x, weight) = (cpu.upload(&x).unwrap(), cpu.upload(&weight).unwrap());
        let bias_buf = cpu.upload(&bias).unwrap();
        let mut logits = cpu.alloc::<f32>(tokens * GLM.experts).unwrap();
        let out = rows_mut(&mut logits, GLM.experts);
        let at = rows(&x, hidden);
        cpu.linear(
            at,
            Weight::Bf16(&weight),
            GLM.experts,
            hidden,
            tokens,
            false,
            out,
        )
        .unwrap();
        let mut ids = cpu.alloc::<u32>(tokens * GLM.top_k).unwrap();
        let mut weights = cpu.alloc::<f32>(tokens * GLM.top_k).unwrap();
        let at = rows(&logits, GLM.experts);
        cpu.route(at, &bias_buf, &GLM, tokens, &mut ids, &mut weights)
            .unwrap();
        let mut chosen = vec![0u32; GLM.experts];
        for id in ids.iter() {
            chosen[*id as usize] += 1;
        }
        let found = covered(&chosen, skew.experts);
        // 8,192 selections: a standard deviation of 0.004; sampled weights add as much.
        assert!((found - skew.selections).abs() < 0.02, "{found}");
        // The experts that the profile says are used most are those that are.
        let usage = usage(&routing, &[7], 9);
        let mut hot: Vec<usize> = (0..GLM.experts).collect();
        hot.sort_by(|a, b| {
            let n = |e: &usize| usage.count(7, *e as u32);
            n(b).total_cmp(&n(a))
        });
        let of_hot: u32 = hot[..123].iter().map(|e| chosen[*e]).sum();
        assert!(f64::from(of_hot) / (tokens * GLM.top_k) as f64 > 0.83);
    }

    #[test]
    fn skews_within_reach_are_met_and_others_refused() {
        for (experts, selections) in [(0.1, 0.5), (0.5, 0.6), (0.48, 0.99), (0.25, 0.25)] {
            let skew = Skew {
                experts,
                selections,
            };
            let r = routing(&GLM, Some(skew), 1).unwrap();
            let found = r.covered.unwrap();
            let least = covered(&routing(&GLM, None, 1).unwrap().chosen, experts);
            assert!((found - selections.max(least)).abs() < 0.01, "{found}");
        }
        for (experts, selections) in [(0.01, 0.9), (0.0, 0.5), (1.0, 1.0), (0.5, 0.4), (0.5, 1.1)] {
            let skew = Skew {
                experts,
                selections,
            };
            assert!(routing(&GLM, Some(skew), 1).is_err(), "{skew:?}");
        }
    }

    #[test]
    fn layers_have_orders_of_their_own() {
        let mut a = order(256, 3, 1);
        assert_ne!(a, order(256, 4, 1));
        assert_ne!(a, order(256, 3, 2));
        assert_eq!(a, order(256, 3, 1));
        a.sort_unstable();
        assert!(a.into_iter().eq(0..256));
    }
}
