//! Experts over several devices: which of those that stay in device memory go to which, and what a
//! layer then takes.
//!
//! The first device has the dense part, what is copied to a device, and the host beside it; the others
//! have experts in their memory alone. A layer's selections fall on devices as a multinomial with the
//! devices' shares. With `T_0(n)` the mean time of `n` selections on the first device and its lanes
//! ([`super::cost::layer_time`]), `T_d(n)` that on another, and `x(n)` what it takes to send the
//! activations there and the results back, a layer takes
//!
//! ```text
//! round trip + mean of max(T_0(n_0), x(n_1) + T_1(n_1), ...)
//! ```
//!
//! A layer whose choices the host must know is told by it to each device with a share of it, one after
//! the other: a round trip for each.
//!
//! What it leaves out: that a device's time varies for the same `n`, and that two devices may share a
//! link.

use super::cost::{Ahead, LayerTime, Line, Part, Rates, layer_time};
use super::planner::{Budget, LayerModel, ModelUse, Plan, PlanError, TierPlan};
use super::{TIERS, Tier, planner};

/// A device beside the first.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Bytes of its memory for experts.
    pub vram: u64,
    /// As [`Rates::hot`], of this device.
    pub hot: Line,
    /// As [`Rates::ans`].
    pub ans: Line,
    /// As [`Rates::plane3`].
    pub plane3: Line,
    /// Activations there and results back; unit: an expert.
    pub exchange: Line,
}

/// Experts of one tier on one device.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DevicePlan {
    /// Which: 0 has the dense part.
    pub device: usize,
    /// Its number on the machine, where that is known; else the same.
    pub number: u32,
    /// Its part of a tier.
    #[serde(flatten)]
    pub part: TierPlan,
}

/// What each device does with its part.
pub(super) struct Spread {
    /// Rates of every device; what is not of its own memory is the first one's.
    rates: Vec<Rates>,
    exchange: Vec<Line>,
    /// Share of the selections of experts in device memory that each device is to have.
    fractions: Vec<f64>,
    /// What is copied to the first ahead of each layer.
    ahead: Ahead,
}

impl Spread {
    fn new(rates: &Rates, peers: &[Peer], fractions: Vec<f64>, ahead: Ahead) -> Self {
        let of = |p: &Peer| Rates {
            hot: p.hot,
            ans: p.ans,
            plane3: p.plane3,
            ..rates.clone()
        };
        let none = Line::default();
        Self {
            rates: std::iter::once(rates.clone())
                .chain(peers.iter().map(of))
                .collect(),
            exchange: std::iter::once(none)
                .chain(peers.iter().map(|p| p.exchange))
                .collect(),
            fractions,
            ahead,
        }
    }

    /// Devices.
    pub fn devices(&self) -> usize {
        self.rates.len()
    }

    /// A layer whose experts in device memory are spread as they are to be.
    pub fn layer_time(&self, top_k: usize, record: f64, parts: &[Part; TIERS]) -> LayerTime {
        let split: Vec<[Part; TIERS]> = (self.fractions.iter().enumerate())
            .map(|(d, f)| {
                let mut own = [Part::default(); TIERS];
                for t in [Tier::VramHot as usize, Tier::VramAns as usize] {
                    own[t] = Part {
                        experts: parts[t].experts,
                        share: parts[t].share * f,
                        plane3: parts[t].plane3 * f,
                    };
                }
                if d == 0 {
                    let outside = Tier::RamRaw as usize..;
                    own[outside.clone()].copy_from_slice(&parts[outside]);
                }
                own
            })
            .collect();
        self.time(top_k, record, &split)
    }

    /// A layer of which each device has these parts.
    fn time(&self, top_k: usize, record: f64, split: &[[Part; TIERS]]) -> LayerTime {
        let share = |parts: &[Part; TIERS]| parts.iter().map(|p| p.share).sum::<f64>();
        let shares: Vec<f64> = split.iter().map(share).collect();
        let all: f64 = shares.iter().sum();
        let shares: Vec<f64> = shares
            .iter()
            .map(|s| s / all.max(f64::MIN_POSITIVE))
            .collect();
        let mut sum = LayerTime::default();
        let mut times = Vec::with_capacity(split.len());
        for (d, parts) in split.iter().enumerate() {
            let mut of_device = vec![0.0; top_k + 1];
            if shares[d] > 0.0 {
                let ahead = if d == 0 { &self.ahead } else { &Ahead::NONE };
                let chances = binomial(top_k, shares[d]);
                let mut mean = LayerTime::default();
                for n in 1..=top_k {
                    let mut t = layer_time(&self.rates[d], ahead, n, record, parts);
                    // Once a layer, whatever it chooses.
                    t.total -= t.round_trip;
                    let exchange = self.exchange[d].at(n as f64);
                    of_device[n] = t.total + exchange;
                    mean.gpu += chances[n] * t.gpu;
                    mean.upload += chances[n] * t.upload;
                    mean.cpu += chances[n] * t.cpu;
                    mean.disk += chances[n] * t.disk;
                    mean.exchange += chances[n] * exchange;
                }
                sum.gpu = sum.gpu.max(mean.gpu);
                sum.upload += mean.upload;
                sum.cpu += mean.cpu;
                sum.disk += mean.disk;
                sum.exchange = sum.exchange.max(mean.exchange);
            }
            times.push(of_device);
        }
        let outside = split[0][Tier::RamRaw as usize..].iter();
        sum.round_trip = if outside.clone().any(|p| p.experts > 0) {
            let told = shares.iter().filter(|s| **s > 0.0).count().max(1);
            self.rates[0].round_trip * told as f64
        } else {
            0.0
        };
        sum.total = sum.round_trip + slowest(top_k, &shares, &times);
        sum
    }
}

/// Chances of `0..=n` successes.
fn binomial(n: usize, p: f64) -> Vec<f64> {
    let mut chances = vec![1.0];
    for _ in 0..n {
        let mut next = vec![0.0; chances.len() + 1];
        for (i, c) in chances.iter().enumerate() {
            next[i] += c * (1.0 - p);
            next[i + 1] += c * p;
        }
        chances = next;
    }
    chances
}

/// Mean of the largest `times[d][n_d]`, where `k` selections fall on devices with these chances.
fn slowest(k: usize, shares: &[f64], times: &[Vec<f64>]) -> f64 {
    let mut steps: Vec<f64> = times.iter().flatten().copied().collect();
    steps.sort_by(f64::total_cmp);
    steps.dedup();
    // Terms p^n / n! of each device.
    let terms: Vec<Vec<f64>> = (shares.iter())
        .map(|p| {
            let mut term = 1.0;
            (0..=k)
                .map(|n| {
                    if n > 0 {
                        term *= p / n as f64;
                    }
                    term
                })
                .collect()
        })
        .collect();
    let all: f64 = (1..=k).map(|n| n as f64).product();
    // Chance that no device takes longer than `most`.
    let within = |most: f64| {
        let mut sum = vec![0.0; k + 1];
        sum[0] = 1.0;
        for (terms, times) in terms.iter().zip(times) {
            let mut next = vec![0.0; k + 1];
            for n in (0..=k).filter(|n| times[*n] <= most) {
                for before in 0..=k - n {
                    next[before + n] += sum[before] * terms[n];
                }
            }
            sum = next;
        }
        sum[k] * all
    };
    let (mut mean, mut before) = (0.0, 0.0);
    for step in steps {
        let chance = within(step);
        mean += (chance - before) * step;
        before = chance;
    }
    mean
}

/// Bytes of a device's part of a layer in each tier of device memory.
#[derive(Clone, Copy, Default)]
struct Taken([u64; 2]);

impl Taken {
    fn with(mut self, tier: usize, bytes: u64) -> Self {
        self.0[tier] += bytes;
        self
    }

    fn allocated(&self, granule: u64) -> u64 {
        self.0.iter().map(|b| b.next_multiple_of(granule)).sum()
    }
}

/// Records start at multiples of this in memory.
const ALIGN: u64 = 256;

/// The devices of a plan's experts, and what is expected of it.
fn assign(
    model: &ModelUse,
    budget: &Budget,
    spread: &Spread,
    memory: &[u64],
    mut plan: Plan,
) -> Result<Plan, PlanError> {
    let devices = spread.devices();
    let granule = budget.vram_granule.max(1);
    let raw = model.raw_bytes.next_multiple_of(ALIGN);
    let bytes_of = |l: &LayerModel, e: usize, t: Tier| match t {
        Tier::VramHot => raw,
        _ => l.records[e].next_multiple_of(ALIGN),
    };
    let resident = |t: Tier| t <= Tier::VramAns;
    let layer_bytes: Vec<u64> = (model.layers.iter().zip(&plan.tiers))
        .map(|(l, tiers)| {
            let own = tiers.iter().enumerate().filter(|(_, t)| resident(**t));
            own.map(|(e, t)| bytes_of(l, e, *t)).sum()
        })
        .collect();
    let mut left: Vec<u64> = memory.to_vec();
    let mut to_come: u64 = layer_bytes.iter().sum();
    let mut time = LayerTime::default();
    let mut table = vec![[(0usize, 0u64, 0.0f64, 0.0f64); TIERS]; devices];
    plan.devices = Vec::with_capacity(model.layers.len());
    for ((l, tiers), bytes) in model.layers.iter().zip(&plan.tiers).zip(&layer_bytes) {
        let all: f64 = l.chances.iter().sum();
        let mut of_layer = vec![0u8; tiers.len()];
        let mut order: Vec<usize> = (0..tiers.len()).filter(|e| resident(tiers[*e])).collect();
        let cost = |e: usize, d: usize| {
            let rates = &spread.rates[d];
            let each = match tiers[e] {
                Tier::VramHot => rates.hot.each,
                _ if l.plane3[e] => rates.plane3.each,
                _ => rates.ans.each,
            };
            l.chances[e] * each
        };
        order.sort_by(|a, b| cost(*b, 0).total_cmp(&cost(*a, 0)));
        // What a device may take so that later layers find as much of it.
        let quota: Vec<u64> = (left.iter())
            .map(|left| (*left as f64 * (*bytes as f64 / to_come.max(1) as f64)) as u64)
            .collect();
        let mut load = vec![0.0; devices];
        let mut taken = vec![Taken::default(); devices];
        for e in order {
            let tier = tiers[e] as usize;
            let size = bytes_of(l, e, tiers[e]);
            let after = |d: usize| taken[d].with(tier, size).allocated(granule);
            let weight = |d: usize| {
                (load[d] + cost(e, d) / spread.fractions[d].max(1e-9))
                    * if d == 0 { 1.0 } else { 1.0 + 1e-9 }
            };
            let best = |most: &[u64]| {
                (0..devices)
                    .filter(|d| after(*d) <= most[*d] && spread.fractions[*d] > 0.0)
                    .min_by(|a, b| weight(*a).total_cmp(&weight(*b)))
            };
            let room = || (0..devices).find(|d| after(*d) <= left[*d]);
            let Some(d) = best(&quota).or_else(|| best(&left)).or_else(room) else {
                return Err(PlanError::TooSmall {
                    experts: 1,
                    needed: size,
                });
            };
            load[d] += cost(e, d) / spread.fractions[d].max(1e-9);
            taken[d] = taken[d].with(tier, size);
            of_layer[e] = d as u8;
        }
        to_come -= bytes;
        let mut split = vec![[Part::default(); TIERS]; devices];
        for (e, t) in tiers.iter().enumerate() {
            let (d, t) = (of_layer[e] as usize, *t as usize);
            let share = l.chances[e] / all;
            split[d][t].experts += 1;
            split[d][t].share += share;
            split[d][t].plane3 += if l.plane3[e] { share } else { 0.0 };
        }
        for d in 0..devices {
            left[d] -= taken[d].allocated(granule);
            for t in Tier::ALL {
                let (part, row) = (&split[d][t as usize], &mut table[d][t as usize]);
                row.0 += part.experts;
                row.1 += match t {
                    Tier::VramHot | Tier::VramAns => {
                        taken[d].0[t as usize].next_multiple_of(granule)
                    }
                    _ => 0,
                };
                row.2 += part.share;
                row.3 += part.plane3;
            }
        }
        let record = l.records.iter().sum::<u64>() as f64 / l.records.len() as f64;
        time.add(&spread.time(model.top_k, record, &split));
        plan.devices.push(of_layer);
    }
    plan.vram = memory.iter().zip(&left).map(|(m, l)| m - l).sum();
    plan.vram_of = memory.iter().zip(&left).map(|(m, l)| m - l).collect();
    plan.token += time.total - plan.time.total;
    plan.time = time;
    let n = model.layers.len() as f64;
    plan.device_table = Vec::new();
    for (d, rows) in table.iter().enumerate() {
        for (t, whole) in Tier::ALL.into_iter().zip(&plan.table) {
            let (experts, bytes, share, plane3) = rows[t as usize];
            if d > 0 && !resident(t) {
                continue;
            }
            let rates = &spread.rates[d];
            let lane_s = if resident(t) {
                let mixed = if share > 0.0 { plane3 / share } else { 0.0 };
                let each = match t {
                    Tier::VramHot => rates.hot.each,
                    _ => mixed * rates.plane3.each + (1.0 - mixed) * rates.ans.each,
                };
                share * model.top_k as f64 * each
            } else {
                whole.lane_s
            };
            plan.device_table.push(DevicePlan {
                device: d,
                number: d as u32,
                part: TierPlan {
                    tier: t,
                    experts,
                    bytes: if resident(t) { bytes } else { whole.bytes },
                    share: (share / n).clamp(0.0, 1.0),
                    lane_s,
                },
            });
        }
    }
    for row in plan.table.iter_mut().filter(|r| resident(r.tier)) {
        let own = plan.device_table.iter().filter(|d| d.part.tier == row.tier);
        (row.bytes, row.lane_s) = own.fold((0, 0.0), |(bytes, s), d| {
            (bytes + d.part.bytes, s + d.part.lane_s)
        });
    }
    Ok(plan)
}

/// The placement over a first device, of which `rates` and `budget` are, and others. Without others it is
/// [`super::plan`]'s; with them it is predicted to be no slower.
pub fn plan_devices(
    model: &ModelUse,
    rates: &Rates,
    budget: &Budget,
    peers: &[Peer],
) -> Result<Plan, PlanError> {
    let alone = planner::plan(model, rates, budget);
    if peers.is_empty() {
        return alone;
    }
    let devices = 1 + peers.len();
    let memory: Vec<u64> = std::iter::once(budget.vram)
        .chain(peers.iter().map(|p| p.vram))
        .collect();
    // Whatever does not fit into the rest of one device fits into another's, if so much is left free.
    let granule = budget.vram_granule.max(1);
    let largest = (model.layers.iter())
        .flat_map(|l| l.records.iter().copied())
        .chain([model.raw_bytes])
        .max()
        .unwrap_or(0);
    let slack = devices as u64 * (largest.next_multiple_of(ALIGN) + granule);
    let pooled = Budget {
        vram: memory.iter().sum::<u64>().saturating_sub(slack),
        ..*budget
    };
    let normed = |weights: Vec<f64>| -> Option<Vec<f64>> {
        let all: f64 = weights.iter().sum();
        let fits = all.is_finite() && all > 0.0;
        fits.then(|| weights.iter().map(|w| w / all).collect())
    };
    let each = |line: &Line| 1.0 / line.each.max(1e-12);
    let by_speed = normed(
        std::iter::once(each(&rates.ans))
            .chain(peers.iter().map(|p| each(&p.ans)))
            .collect(),
    );
    let by_memory = normed(memory.iter().map(|m| *m as f64).collect());
    let mut fractions: Vec<Vec<f64>> = Vec::new();
    if let (Some(speed), Some(memory)) = (&by_speed, &by_memory) {
        fractions.push(
            speed
                .iter()
                .zip(memory)
                .map(|(a, b)| (a + b) / 2.0)
                .collect(),
        );
    }
    fractions.extend(by_speed);
    fractions.extend(by_memory);
    fractions.dedup();
    let mut best = alone.map(|plan| one_of_many(plan, devices));
    for f in fractions {
        let spread = Spread::new(rates, peers, f, model.ahead(rates));
        let plan = planner::plan_spread(model, rates, &pooled, Some(&spread))
            .and_then(|plan| assign(model, budget, &spread, &memory, plan));
        let better = match (&best, &plan) {
            (Ok(a), Ok(b)) => b.token < a.token,
            (Err(_), Ok(_)) => true,
            _ => false,
        };
        if better {
            best = plan;
        }
    }
    best
}

/// A plan for the first of several devices that leaves the others alone.
fn one_of_many(mut plan: Plan, devices: usize) -> Plan {
    plan.vram_of.resize(devices, 0);
    let rows = plan.table.iter().cloned();
    plan.device_table = rows
        .map(|part| DevicePlan {
            device: 0,
            number: 0,
            part,
        })
        .collect();
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rates() -> Rates {
        let line = |fixed, each| Line { fixed, each };
        Rates {
            hot: line(40e-6, 5e-6),
            ans: line(60e-6, 8.5e-6),
            plane3: line(40e-6, 4.5e-6),
            cpu: line(20e-6, 150e-6),
            upload: line(10e-6, 1.0 / 50e9),
            disk: line(100e-6, 1.0 / 5e9),
            round_trip: 30e-6,
            exchange: line(10e-6, 1e-6),
            dense: 8e-3,
            dense_two: None,
        }
    }

    fn peer(vram: u64, slower: f64) -> Peer {
        let r = rates();
        let times = |l: Line| Line {
            fixed: l.fixed * slower,
            each: l.each * slower,
        };
        Peer {
            vram,
            hot: times(r.hot),
            ans: times(r.ans),
            plane3: times(r.plane3),
            exchange: r.exchange,
        }
    }

    const RAW: u64 = 18_923_520;
    const RECORD: u64 = 14_100_000;

    fn model(layers: usize, experts: usize, top_k: usize) -> ModelUse {
        let layer = |l: usize| {
            let weight =
                |e: usize| (-(((e * 7 + l) % experts) as f64) * 4.0 / experts as f64).exp();
            let sum: f64 = (0..experts).map(weight).sum();
            LayerModel {
                number: l as u32,
                chances: (0..experts)
                    .map(|e| top_k as f64 * weight(e) / sum)
                    .collect(),
                records: vec![RECORD; experts],
                plane3: (0..experts).map(|e| e % 3 == 0).collect(),
            }
        };
        ModelUse {
            top_k,
            raw_bytes: RAW,
            layers: (0..layers).map(layer).collect(),
            foreseen: 0.75,
        }
    }

    fn budget(vram: u64, ram: u64) -> Budget {
        Budget {
            vram,
            ram,
            vram_granule: 2 << 20,
            ram_granule: 4096,
            allowed: [true; TIERS],
        }
    }

    /// What a plan says of devices follows from where it puts experts, and is within their memory.
    fn check(plan: &Plan, model: &ModelUse, memory: &[u64]) {
        assert_eq!(plan.devices.len(), model.layers.len());
        assert_eq!(plan.vram_of.len(), memory.len());
        let mut experts = vec![[0; TIERS]; memory.len()];
        let mut taken = vec![0; memory.len()];
        for ((l, tiers), devices) in model.layers.iter().zip(&plan.tiers).zip(&plan.devices) {
            let mut own = vec![[0u64; 2]; memory.len()];
            for ((e, t), d) in tiers.iter().enumerate().zip(devices) {
                let d = *d as usize;
                assert!(*t <= Tier::VramAns || d == 0, "{t} on device {d}");
                experts[d][*t as usize] += 1;
                match t {
                    Tier::VramHot => own[d][0] += RAW.next_multiple_of(ALIGN),
                    Tier::VramAns => own[d][1] += l.records[e].next_multiple_of(ALIGN),
                    _ => (),
                }
            }
            for (taken, own) in taken.iter_mut().zip(own) {
                *taken += own.iter().map(|b| b.next_multiple_of(2 << 20)).sum::<u64>();
            }
        }
        assert_eq!(taken, plan.vram_of);
        assert!(
            taken.iter().zip(memory).all(|(t, m)| t <= m),
            "{taken:?} {memory:?}"
        );
        if plan.device_table.is_empty() {
            assert_eq!(memory.len(), 1);
            return;
        }
        for row in &plan.device_table {
            assert_eq!(
                row.part.experts,
                experts[row.device][row.part.tier as usize]
            );
        }
        let bytes: u64 = (plan.device_table.iter())
            .filter(|r| r.part.tier <= Tier::VramAns)
            .map(|r| r.part.bytes)
            .sum();
        assert_eq!(bytes, taken.iter().sum::<u64>());
        let share: f64 = plan.device_table.iter().map(|r| r.part.share).sum();
        assert!((share - 1.0).abs() < 1e-9);
        // Without what is fixed, a device's experts take no longer than all of the plan's layers.
        for row in plan
            .device_table
            .iter()
            .filter(|r| r.part.tier <= Tier::VramAns)
        {
            let all = plan.time.total + 1e-12;
            assert!(row.part.lane_s <= all, "{} {all}", row.part.lane_s);
        }
    }

    #[test]
    fn one_device_is_as_ever() {
        let m = model(4, 32, 8);
        let b = budget(60 * RECORD, 20 * RECORD);
        let alone = planner::plan(&m, &rates(), &b).unwrap();
        assert_eq!(plan_devices(&m, &rates(), &b, &[]).unwrap(), alone);
        assert!(alone.devices.iter().flatten().all(|d| *d == 0));
        check(&alone, &m, &[b.vram]);
        // Memory that is none changes nothing but the number of devices.
        let with = plan_devices(&m, &rates(), &b, &[peer(0, 1.0)]).unwrap();
        assert_eq!(with.tiers, alone.tiers);
        assert_eq!(with.vram_of, [alone.vram, 0]);
    }

    #[test]
    fn two_devices_hold_twice_as_much() {
        let m = model(4, 64, 8);
        let half = 4 * (34 * RECORD + (4 << 20)) + 2 * RAW;
        let b = budget(half, 0);
        let alone = planner::plan(&m, &rates(), &b).unwrap();
        let both = plan_devices(&m, &rates(), &b, &[peer(half, 1.0)]).unwrap();
        check(&both, &m, &[half, half]);
        assert!(
            both.token < 0.5 * (alone.token - 8e-3) + 8e-3,
            "{} {}",
            both.token,
            alone.token
        );
        let on = |d: u8| both.devices.iter().flatten().filter(|x| **x == d).count();
        assert!(on(1) > 100, "{}", on(1));
    }

    #[test]
    fn shares_follow_speed() {
        let m = model(3, 64, 8);
        let much = 3 * 80 * RAW;
        for slower in [1.0, 3.0] {
            let b = budget(much, 0);
            let p = plan_devices(&m, &rates(), &b, &[peer(much, slower)]).unwrap();
            check(&p, &m, &[much, much]);
            let share = |d: usize| -> f64 {
                let rows = p.device_table.iter().filter(|r| r.device == d);
                rows.map(|r| r.part.share).sum()
            };
            if slower == 1.0 {
                assert!((share(0) - 0.5).abs() < 0.1, "{}", share(0));
            } else {
                assert!(share(0) > 0.6, "{}", share(0));
            }
        }
    }

    /// Where the host must know what was chosen, it tells each device.
    #[test]
    fn each_device_is_told() {
        let spread = |fractions| Spread::new(&rates(), &[peer(0, 1.0)], fractions, Ahead::NONE);
        let mut parts = [Part::default(); TIERS];
        (
            parts[Tier::VramAns as usize].experts,
            parts[Tier::VramAns as usize].share,
        ) = (20, 0.9);
        (
            parts[Tier::RamRaw as usize].experts,
            parts[Tier::RamRaw as usize].share,
        ) = (4, 0.1);
        let trip = |fractions| spread(fractions).layer_time(8, 14e6, &parts).round_trip;
        assert_eq!(trip(vec![1.0, 0.0]), rates().round_trip);
        assert_eq!(trip(vec![0.5, 0.5]), 2.0 * rates().round_trip);
    }

    /// Devices as many as there are, whose exchange costs more than they bring, are left alone.
    #[test]
    fn exchange_has_to_pay() {
        let m = model(3, 32, 8);
        let much = 3 * 40 * RAW;
        let mut far = peer(much, 1.0);
        far.exchange.fixed = 1e-3;
        let p = plan_devices(&m, &rates(), &budget(much, 0), &[far]).unwrap();
        assert!(p.devices.iter().flatten().all(|d| *d == 0));
    }

    /// The mean of the slowest device by trying every way in which selections fall.
    fn by_hand(k: usize, shares: &[f64], times: &[Vec<f64>]) -> f64 {
        let mut sum = 0.0;
        for code in 0..shares.len().pow(k as u32) {
            let mut n = vec![0; shares.len()];
            let (mut chance, mut rest) = (1.0, code);
            for _ in 0..k {
                let d = rest % shares.len();
                rest /= shares.len();
                n[d] += 1;
                chance *= shares[d];
            }
            let most = n.iter().zip(times).map(|(n, t)| t[*n]).fold(0.0, f64::max);
            sum += chance * most;
        }
        sum
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..Default::default() })]

        #[test]
        fn the_slowest_is_the_slowest(
            raw in proptest::collection::vec(0.01..1.0f64, 1..4),
            steps in proptest::collection::vec(0.0..1.0f64, 24),
            k in 1..6usize,
        ) {
            let all: f64 = raw.iter().sum();
            let shares: Vec<f64> = raw.iter().map(|s| s / all).collect();
            let times: Vec<Vec<f64>> = (0..shares.len())
                .map(|d| {
                    let mut t = 0.0;
                    (0..=k).map(|n| { if n > 0 { t += steps[d * 6 + n - 1]; } t }).collect()
                })
                .collect();
            let (found, expected) = (slowest(k, &shares, &times), by_hand(k, &shares, &times));
            prop_assert!((found - expected).abs() < 1e-9, "{} {}", found, expected);
        }

        #[test]
        fn plans_fit_and_are_no_slower_than_one_device(
            layers in 1..4usize,
            experts in 4..24usize,
            top_k in 1..5usize,
            vram in proptest::collection::vec(0..400_000_000u64, 2..4),
            slower in 0.3..4.0f64,
            ram in 0..400_000_000u64,
        ) {
            let m = model(layers, experts, top_k.min(experts));
            let b = budget(vram[0], ram);
            let peers: Vec<Peer> = vram[1..].iter().map(|v| peer(*v, slower)).collect();
            let alone = planner::plan(&m, &rates(), &b).unwrap();
            let p = plan_devices(&m, &rates(), &b, &peers).unwrap();
            check(&p, &m, &vram);
            prop_assert!(p.ram <= ram);
            prop_assert!(p.token <= alone.token + 1e-12, "{} {}", p.token, alone.token);
        }
    }
}
