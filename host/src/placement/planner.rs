//! Which placement takes the least time within the budgets. Pure functions; no device.
//!
//! Within a layer experts are ranked by use, and tiers take them from the most used on, in the order
//! of [`Tier`]: so a layer's placement is five numbers. Candidates are fillings by the ranking over
//! all layers, greedy filling of device memory with records among them; the best of them are improved
//! by moving experts between tiers, a layer at a time or two layers in exchange, while the predicted
//! time falls ([`super::cost`]).

use serde::Serialize;

use super::cost::{Ahead, LayerTime, Part, Rates, layer_time};
use super::spread::{DevicePlan, Spread};
use super::{TIERS, Tier};

/// One layer's experts.
#[derive(Clone, Debug)]
pub struct LayerModel {
    /// Number of the model layer.
    pub number: u32,
    /// How often each is chosen for a token ([`super::Profile::chances`]).
    pub chances: Vec<f64>,
    /// Bytes of each one's record.
    pub records: Vec<u64>,
    /// Whether each one's record is plane3.
    pub plane3: Vec<bool>,
}

/// The routed experts of a model.
#[derive(Clone, Debug)]
pub struct ModelUse {
    /// Experts of a token.
    pub top_k: usize,
    /// Bytes of an expert as int4.
    pub raw_bytes: u64,
    /// Layers with routed experts.
    pub layers: Vec<LayerModel>,
    /// Share of the experts guessed of a layer that it then chooses, 0 to 1.
    pub foreseen: f64,
}

impl ModelUse {
    /// What is copied ahead of each layer.
    pub(super) fn ahead(&self, rates: &Rates) -> Ahead {
        Ahead {
            foreseen: self.foreseen,
            dense: rates.dense / self.layers.len().max(1) as f64,
        }
    }
}

/// What experts may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes of device memory.
    pub vram: u64,
    /// Bytes of host memory.
    pub ram: u64,
    /// An allocation of device memory is a multiple of this.
    pub vram_granule: u64,
    /// An allocation of host memory is a multiple of this.
    pub ram_granule: u64,
    /// Tiers that there are, in the order of [`Tier::ALL`]; the last is always allowed where no other
    /// has room.
    pub allowed: [bool; TIERS],
}

/// Why there is no placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Budgets too small, and nowhere else to go.
    #[error(
        "{experts} experts fit no tier: {needed} more bytes needed; give more memory \
         (--vram-budget, --ram-budget)"
    )]
    TooSmall {
        /// Experts without a place.
        experts: usize,
        /// Bytes that they take in the smallest tier allowed.
        needed: u64,
    },
    /// A model without experts, or with numbers that do not fit together.
    #[error("{0}")]
    Model(&'static str),
}

/// One tier of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierPlan {
    /// Which.
    pub tier: Tier,
    /// Experts, over all layers.
    pub experts: usize,
    /// Bytes that they take in the place the tier is named after.
    pub bytes: u64,
    /// Share of selections, 0 to 1.
    pub share: f64,
    /// Mean seconds of a token that the tier's own work takes, on its lane.
    pub lane_s: f64,
}

/// Where each expert goes, and what is expected of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Tier of each expert, by layer and expert.
    #[serde(skip)]
    pub tiers: Vec<Vec<Tier>>,
    /// Device of each expert, likewise: whose memory it is in, and 0 where it is in none.
    #[serde(skip)]
    pub devices: Vec<Vec<u8>>,
    /// The table.
    pub table: Vec<TierPlan>,
    /// The table by device; of other devices than the first the tiers of their memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_table: Vec<DevicePlan>,
    /// Sums over layers, seconds.
    #[serde(rename = "time_s")]
    pub time: LayerTime,
    /// Seconds of a token, dense part included.
    #[serde(rename = "token_s")]
    pub token: f64,
    /// Seconds of a token with greedy filling.
    #[serde(rename = "greedy_s")]
    pub greedy: f64,
    /// What a faster token would need most.
    pub bottleneck: &'static str,
    /// Bytes of device memory that experts take.
    #[serde(rename = "vram_bytes")]
    pub vram: u64,
    /// The same of each device.
    #[serde(rename = "vram_of_bytes")]
    pub vram_of: Vec<u64>,
    /// Bytes of host memory that experts take.
    #[serde(rename = "ram_bytes")]
    pub ram: u64,
    /// Share of guessed experts that it takes to be chosen then, 0 to 1.
    pub foreseen: f64,
}

/// Records start at multiples of this in memory.
const ALIGN: u64 = 256;

/// A layer, its experts ranked.
struct Ranked {
    /// Expert of each rank.
    order: Vec<usize>,
    /// Sums of the chances of the first ranks, as shares of all selections.
    share: Vec<f64>,
    /// The same of those whose records are plane3.
    plane3: Vec<f64>,
    /// Sums of their record bytes, each aligned.
    records: Vec<u64>,
    /// Mean bytes of a record.
    record: f64,
}

/// Experts in each tier.
type Counts = [usize; TIERS];

struct Search<'a> {
    model: &'a ModelUse,
    rates: &'a Rates,
    budget: &'a Budget,
    /// Devices that share what is in device memory, where there are several.
    spread: Option<&'a Spread>,
    layers: Vec<Ranked>,
}

/// A placement and what it takes.
#[derive(Clone)]
struct State {
    counts: Vec<Counts>,
    times: Vec<f64>,
    time: f64,
    vram: u64,
    ram: u64,
}

impl<'a> Search<'a> {
    fn new(
        model: &'a ModelUse,
        rates: &'a Rates,
        budget: &'a Budget,
        spread: Option<&'a Spread>,
    ) -> Self {
        let layers = model.layers.iter().map(|l| {
            let mut order: Vec<usize> = (0..l.chances.len()).collect();
            order.sort_by(|a, b| l.chances[*b].total_cmp(&l.chances[*a]));
            let all: f64 = l.chances.iter().sum();
            let (mut share, mut plane3, mut records) = (vec![0.0], vec![0.0], vec![0]);
            for (r, e) in order.iter().enumerate() {
                let own = l.chances[*e] / all;
                share.push(share[r] + own);
                plane3.push(plane3[r] + if l.plane3[*e] { own } else { 0.0 });
                records.push(records[r] + l.records[*e].next_multiple_of(ALIGN));
            }
            Ranked {
                record: l.records.iter().sum::<u64>() as f64 / order.len() as f64,
                order,
                share,
                plane3,
                records,
            }
        });
        Self {
            model,
            rates,
            budget,
            spread,
            layers: layers.collect(),
        }
    }

    /// Ranks of each tier.
    fn ranges(counts: &Counts) -> [std::ops::Range<usize>; TIERS] {
        let mut at = 0;
        counts.map(|n| {
            at += n;
            at - n..at
        })
    }

    fn layer(&self, l: usize, counts: &Counts) -> LayerTime {
        let ranked = &self.layers[l];
        let parts = Self::ranges(counts).map(|r| Part {
            experts: r.len(),
            share: (ranked.share[r.end] - ranked.share[r.start]).max(0.0),
            plane3: (ranked.plane3[r.end] - ranked.plane3[r.start]).max(0.0),
        });
        let top_k = self.model.top_k;
        match self.spread {
            None => layer_time(
                self.rates,
                &self.model.ahead(self.rates),
                top_k,
                ranked.record,
                &parts,
            ),
            Some(spread) => spread.layer_time(top_k, ranked.record, &parts),
        }
    }

    /// Bytes in the tiers of a layer, rounded up to what is allocated.
    fn tier_bytes(&self, l: usize, counts: &Counts) -> [u64; TIERS] {
        let raw = self.model.raw_bytes.next_multiple_of(ALIGN);
        let ranges = Self::ranges(counts);
        // Several devices round up each.
        let granule = self.budget.vram_granule;
        let more = self.spread.map_or(0, |s| s.devices() as u64 - 1) * granule;
        let in_vram = |bytes: u64| match bytes {
            0 => 0,
            n => n.next_multiple_of(granule) + more,
        };
        let mut bytes = [0; TIERS];
        for t in Tier::ALL {
            let range = &ranges[t as usize];
            let records = || {
                let records = &self.layers[l].records;
                records[range.end] - records[range.start]
            };
            bytes[t as usize] = match t {
                Tier::VramHot => in_vram(range.len() as u64 * raw),
                Tier::VramAns => in_vram(records()),
                Tier::RamRaw => {
                    (range.len() as u64 * raw).next_multiple_of(self.budget.ram_granule)
                }
                Tier::RamAns => records().next_multiple_of(self.budget.ram_granule),
                Tier::DiskAns => records(),
            };
        }
        bytes
    }

    fn memory(&self, l: usize, counts: &Counts) -> (u64, u64) {
        let b = self.tier_bytes(l, counts);
        let of = |t: Tier| b[t as usize];
        (
            of(Tier::VramHot) + of(Tier::VramAns),
            of(Tier::RamRaw) + of(Tier::RamAns),
        )
    }

    fn state(&self, counts: Vec<Counts>) -> State {
        let times: Vec<f64> = (counts.iter().enumerate())
            .map(|(l, c)| self.layer(l, c).total)
            .collect();
        let (mut vram, mut ram) = (0, 0);
        for (l, c) in counts.iter().enumerate() {
            let (v, r) = self.memory(l, c);
            (vram, ram) = (vram + v, ram + r);
        }
        State {
            time: times.iter().sum(),
            counts,
            times,
            vram,
            ram,
        }
    }

    fn fits(&self, vram: u64, ram: u64) -> bool {
        vram <= self.budget.vram && ram <= self.budget.ram
    }

    /// Fills tiers one after the other with the most used experts of all layers; each takes at most
    /// its share of its memory's budget. What finds no room goes to the last allowed tier, whatever
    /// it takes there.
    fn fill(&self, shares: [f64; TIERS]) -> Vec<Counts> {
        let mut all: Vec<(f64, usize, usize)> = Vec::new();
        for (l, ranked) in self.layers.iter().enumerate() {
            for r in 0..ranked.order.len() {
                all.push((ranked.share[r + 1] - ranked.share[r], l, r));
            }
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)).then(a.1.cmp(&b.1)));
        let mut counts = vec![[0; TIERS]; self.layers.len()];
        let mut used = [0u64; TIERS];
        let mut of_layer = vec![[0u64; TIERS]; self.layers.len()];
        let mut full = [false; TIERS];
        let last = (0..TIERS).rev().find(|t| self.budget.allowed[*t]);
        let last = last.unwrap_or(Tier::DiskAns as usize);
        for (_, l, _) in all {
            let mut placed = None;
            for t in Tier::ALL {
                let t = t as usize;
                // Ranks of a layer go to tiers in order.
                let behind = counts[l][t + 1..].iter().any(|n| *n > 0);
                if full[t] || behind || !self.budget.allowed[t] || shares[t] <= 0.0 {
                    continue;
                }
                let budget = match Tier::ALL[t] {
                    Tier::VramHot | Tier::VramAns => self.budget.vram,
                    Tier::RamRaw | Tier::RamAns => self.budget.ram,
                    Tier::DiskAns => u64::MAX,
                };
                let mut more = counts[l];
                more[t] += 1;
                let bytes = self.tier_bytes(l, &more)[t];
                let mine = used[t] - of_layer[l][t] + bytes;
                let (vram, ram) = (used[0] + used[1], used[2] + used[3]);
                let memory = match t {
                    0 | 1 => vram - used[t] + mine,
                    2 | 3 => ram - used[t] + mine,
                    _ => 0,
                };
                let limit = if shares[t] >= 1.0 {
                    budget
                } else {
                    (shares[t] * budget as f64) as u64
                };
                if mine <= limit && memory <= budget {
                    placed = Some((t, bytes));
                    break;
                }
                full[t] = true;
            }
            let (t, bytes) = placed.unwrap_or((last, 0));
            counts[l][t] += 1;
            if placed.is_some() {
                used[t] = used[t] - of_layer[l][t] + bytes;
                of_layer[l][t] = bytes;
            }
        }
        counts
    }

    /// Whether all experts are in allowed tiers within the budgets.
    fn feasible(&self, s: &State) -> bool {
        self.fits(s.vram, s.ram)
            && (s.counts.iter()).all(|c| (0..TIERS).all(|t| c[t] == 0 || self.budget.allowed[t]))
    }

    /// Moves of a layer: `step` experts from one tier to another.
    fn moves(&self, s: &State, l: usize, step: usize) -> Vec<Move> {
        let mut moves = Vec::new();
        let (vram, ram) = self.memory(l, &s.counts[l]);
        for from in 0..TIERS {
            let n = step.min(s.counts[l][from]);
            if n == 0 {
                continue;
            }
            for to in 0..TIERS {
                if to == from || !self.budget.allowed[to] {
                    continue;
                }
                let mut counts = s.counts[l];
                counts[from] -= n;
                counts[to] += n;
                let (v, r) = self.memory(l, &counts);
                let time = self.layer(l, &counts).total;
                moves.push(Move {
                    l,
                    counts,
                    time,
                    gain: s.times[l] - time,
                    vram: v as i64 - vram as i64,
                    ram: r as i64 - ram as i64,
                });
            }
        }
        moves
    }

    fn apply(&self, s: &mut State, m: &Move) {
        s.time -= m.gain;
        s.times[m.l] = m.time;
        s.counts[m.l] = m.counts;
        s.vram = s.vram.wrapping_add_signed(m.vram);
        s.ram = s.ram.wrapping_add_signed(m.ram);
    }

    fn room(&self, s: &State, moves: &[&Move]) -> bool {
        let sum = |of: fn(&Move) -> i64| moves.iter().map(|m| of(m)).sum::<i64>();
        let after = |now: u64, change: i64, budget: u64| {
            change <= 0 || now.saturating_add_signed(change) <= budget
        };
        after(s.vram, sum(|m| m.vram), self.budget.vram)
            && after(s.ram, sum(|m| m.ram), self.budget.ram)
    }

    /// Moves experts while the time falls.
    fn improve(&self, mut s: State) -> State {
        for step in [64, 16, 4, 1] {
            let mut moves: Vec<Vec<Move>> = (0..self.layers.len())
                .map(|l| self.moves(&s, l, step))
                .collect();
            // Each round gains; the bound is for rounding alone.
            for _ in 0..40 * self.layers.len() {
                let all = || moves.iter().flatten();
                let single = all()
                    .filter(|m| m.gain > LEAST_GAIN && self.room(&s, &[m]))
                    .max_by(|a, b| a.gain.total_cmp(&b.gain));
                if let Some(m) = single.cloned() {
                    self.apply(&mut s, &m);
                    moves[m.l] = self.moves(&s, m.l, step);
                    continue;
                }
                let Some((a, b)) = self.exchange(&s, &moves) else {
                    break;
                };
                self.apply(&mut s, &a);
                self.apply(&mut s, &b);
                moves[a.l] = self.moves(&s, a.l, step);
                moves[b.l] = self.moves(&s, b.l, step);
            }
        }
        s
    }

    /// A move that gains and one of another layer that gives it room and costs less.
    fn exchange(&self, s: &State, moves: &[Vec<Move>]) -> Option<(Move, Move)> {
        const TRIED: usize = 12;
        let mut best: Option<(f64, &Move, &Move)> = None;
        for of in [|m: &Move| m.vram, |m: &Move| m.ram] {
            let mut takers: Vec<&Move> = Vec::new();
            let mut givers: Vec<&Move> = Vec::new();
            for layer in moves {
                let rate = |m: &Move| m.gain / of(m).unsigned_abs() as f64;
                let takes = layer.iter().filter(|m| m.gain > LEAST_GAIN && of(m) > 0);
                takers.extend(takes.max_by(|a, b| rate(a).total_cmp(&rate(b))));
                let gives = layer.iter().filter(|m| of(m) < 0);
                givers.extend(gives.max_by(|a, b| rate(a).total_cmp(&rate(b))));
            }
            takers.sort_by(|a, b| b.gain.total_cmp(&a.gain));
            givers.sort_by(|a, b| b.gain.total_cmp(&a.gain));
            for a in takers.iter().take(TRIED) {
                for b in givers.iter().take(TRIED) {
                    let gain = a.gain + b.gain;
                    let better = gain > best.map_or(LEAST_GAIN, |(g, ..)| g);
                    if a.l != b.l && better && self.room(s, &[a, b]) {
                        best = Some((gain, a, b));
                    }
                }
            }
        }
        best.map(|(_, a, b)| (a.clone(), b.clone()))
    }

    fn plan(&self, s: &State, greedy: f64) -> Plan {
        let mut time = LayerTime::default();
        let mut bytes = [0; TIERS];
        let mut share = [0.0; TIERS];
        let mut plane3 = 0.0;
        let mut tiers = Vec::with_capacity(self.layers.len());
        for (l, (ranked, counts)) in self.layers.iter().zip(&s.counts).enumerate() {
            time.add(&self.layer(l, counts));
            for (sum, b) in bytes.iter_mut().zip(self.tier_bytes(l, counts)) {
                *sum += b;
            }
            let mut of_layer = vec![Tier::DiskAns; ranked.order.len()];
            for (t, range) in Tier::ALL.into_iter().zip(Self::ranges(counts)) {
                share[t as usize] += ranked.share[range.end] - ranked.share[range.start];
                if t == Tier::VramAns {
                    plane3 += ranked.plane3[range.end] - ranked.plane3[range.start];
                }
                for r in range {
                    of_layer[ranked.order[r]] = t;
                }
            }
            tiers.push(of_layer);
        }
        let n = self.layers.len() as f64;
        let lane = |t: Tier| match t {
            Tier::VramHot => self.rates.hot.each,
            Tier::VramAns if share[t as usize] > 0.0 => {
                let plane3 = (plane3 / share[t as usize]).clamp(0.0, 1.0);
                plane3 * self.rates.plane3.each + (1.0 - plane3) * self.rates.ans.each
            }
            Tier::VramAns => 0.0,
            Tier::RamRaw => self.rates.cpu.each,
            Tier::RamAns => self.rates.upload.each * self.record(),
            Tier::DiskAns => self.rates.disk.each * self.record(),
        };
        let top_k = self.model.top_k as f64;
        let table = Tier::ALL
            .into_iter()
            .map(|tier| TierPlan {
                tier,
                experts: s.counts.iter().map(|c| c[tier as usize]).sum(),
                bytes: bytes[tier as usize],
                share: (share[tier as usize] / n).clamp(0.0, 1.0),
                lane_s: share[tier as usize].max(0.0) * top_k * lane(tier),
            })
            .collect();
        let lanes = [
            ("GPU, dense part", self.rates.dense),
            ("GPU, experts", time.gpu),
            ("copies to the GPU", time.upload),
            ("CPU", time.cpu),
            ("disk", time.disk),
            ("exchange between devices", time.exchange),
            ("round trips", time.round_trip),
        ];
        let most = lanes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        Plan {
            devices: tiers.iter().map(|l: &Vec<Tier>| vec![0; l.len()]).collect(),
            tiers,
            table,
            device_table: Vec::new(),
            vram_of: vec![s.vram],
            time,
            token: self.rates.dense + s.time,
            greedy: self.rates.dense + greedy,
            bottleneck: most.map_or("nothing", |(name, _)| name),
            vram: s.vram,
            ram: s.ram,
            foreseen: self.model.foreseen,
        }
    }

    fn record(&self) -> f64 {
        self.layers.iter().map(|l| l.record).sum::<f64>() / self.layers.len() as f64
    }
}

/// A gain below this is rounding. Seconds.
const LEAST_GAIN: f64 = 1e-10;

#[derive(Clone)]
struct Move {
    l: usize,
    counts: Counts,
    time: f64,
    gain: f64,
    vram: i64,
    ram: i64,
}

/// The placement with the least predicted time per token that was found.
pub fn plan(model: &ModelUse, rates: &Rates, budget: &Budget) -> Result<Plan, PlanError> {
    plan_spread(model, rates, budget, None)
}

/// The same where several devices share what is in device memory; `budget` is of all of them together,
/// and which expert is on which is not said.
pub(super) fn plan_spread(
    model: &ModelUse,
    rates: &Rates,
    budget: &Budget,
    spread: Option<&Spread>,
) -> Result<Plan, PlanError> {
    if model.layers.is_empty() || model.top_k == 0 {
        return Err(PlanError::Model("there are no routed experts to place"));
    }
    for l in &model.layers {
        let fits = l.chances.len() == l.records.len()
            && l.chances.len() == l.plane3.len()
            && l.chances.len() >= model.top_k;
        let chances = l.chances.iter().all(|p| p.is_finite() && *p >= 0.0);
        if !fits || !chances || l.chances.iter().sum::<f64>() <= 0.0 {
            return Err(PlanError::Model(
                "expected a chance and a record of each expert, at least as many as a token chooses",
            ));
        }
    }
    let budget = &Budget {
        vram_granule: budget.vram_granule.max(1),
        ram_granule: budget.ram_granule.max(1),
        ..*budget
    };
    let search = Search::new(model, rates, budget, spread);
    // Greedy filling first: the most used as records in device memory, then in host memory.
    let greedy = search.state(search.fill([0.0, 1.0, 0.0, 1.0, 1.0]));
    let mut candidates = vec![greedy.clone()];
    for hot in [0.0, 0.1, 0.25, 0.5, 0.75, 1.0] {
        for raw in [0.0, 0.25, 0.5, 1.0] {
            candidates.push(search.state(search.fill([hot, 1.0, raw, 1.0, 1.0])));
        }
    }
    candidates.retain(|s| search.feasible(s));
    if candidates.is_empty() {
        return Err(too_small(&search, &greedy));
    }
    candidates.sort_by(|a, b| a.time.total_cmp(&b.time));
    candidates.truncate(3);
    let improved = candidates.into_iter().map(|s| search.improve(s));
    let best = improved.min_by(|a, b| a.time.total_cmp(&b.time));
    let Some(best) = best else {
        return Err(PlanError::Model("there are no routed experts to place"));
    };
    let greedy = if search.feasible(&greedy) {
        greedy.time
    } else {
        f64::INFINITY
    };
    Ok(search.plan(&best, greedy))
}

fn too_small(search: &Search<'_>, s: &State) -> PlanError {
    let over = s.vram.saturating_sub(search.budget.vram) + s.ram.saturating_sub(search.budget.ram);
    let record = search.record();
    let all = search
        .model
        .layers
        .iter()
        .map(|l| l.records.len())
        .sum::<usize>()
        .max(1);
    PlanError::TooSmall {
        // In pages, and in tiers of larger forms, what is over is more than the records of all.
        experts: ((over as f64 / record).round() as usize).clamp(1, all),
        needed: over,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::cost::Line;
    use proptest::prelude::*;

    fn h200() -> Rates {
        let line = |fixed, each| Line { fixed, each };
        Rates {
            hot: line(40e-6, 5e-6),
            ans: line(110e-6, 8.5e-6),
            plane3: line(40e-6, 4.5e-6),
            cpu: line(20e-6, 150e-6),
            upload: line(10e-6, 1.0 / 50e9),
            disk: line(100e-6, 1.0 / 5e9),
            round_trip: 30e-6,
            exchange: line(0.0, 0.0),
            dense: 8e-3,
            dense_two: None,
        }
    }

    const RAW: u64 = 18_923_520;
    const RECORD: u64 = 14_100_000;

    /// Use that falls with the rank, as the published skew does roughly.
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
                plane3: vec![false; experts],
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

    fn experts(plan: &Plan, tier: Tier) -> usize {
        plan.table[tier as usize].experts
    }

    /// What a plan says of itself follows from where it puts the experts.
    fn check(plan: &Plan, model: &ModelUse, rates: &Rates, budget: &Budget) {
        assert!(plan.vram <= budget.vram && plan.ram <= budget.ram);
        assert!(
            plan.token <= plan.greedy + 1e-12,
            "{} {}",
            plan.token,
            plan.greedy
        );
        let mut counts = [0; TIERS];
        let (mut time, mut vram, mut ram) = (rates.dense, 0, 0);
        for (l, tiers) in model.layers.iter().zip(&plan.tiers) {
            let mut parts = [Part::default(); TIERS];
            let mut bytes = [0; TIERS];
            let all: f64 = l.chances.iter().sum();
            for (e, t) in tiers.iter().enumerate() {
                let t = *t as usize;
                assert!(budget.allowed[t]);
                counts[t] += 1;
                parts[t].experts += 1;
                parts[t].share += l.chances[e] / all;
                parts[t].plane3 += if l.plane3[e] { l.chances[e] / all } else { 0.0 };
                bytes[t] += match Tier::ALL[t] {
                    Tier::VramHot | Tier::RamRaw => model.raw_bytes,
                    _ => l.records[e],
                }
                .next_multiple_of(ALIGN);
            }
            let record = l.records.iter().sum::<u64>() as f64 / l.records.len() as f64;
            time += layer_time(rates, &model.ahead(rates), model.top_k, record, &parts).total;
            vram += bytes[0].next_multiple_of(budget.vram_granule)
                + bytes[1].next_multiple_of(budget.vram_granule);
            ram += bytes[2].next_multiple_of(budget.ram_granule)
                + bytes[3].next_multiple_of(budget.ram_granule);
        }
        assert_eq!((vram, ram), (plan.vram, plan.ram));
        assert!(
            (time - plan.token).abs() < 1e-9 * time,
            "{time} {}",
            plan.token
        );
        for (row, n) in plan.table.iter().zip(counts) {
            assert_eq!(row.experts, n);
        }
        let share: f64 = plan.table.iter().map(|t| t.share).sum();
        assert!((share - 1.0).abs() < 1e-9);
    }

    #[test]
    fn what_fits_goes_to_the_fastest_tier() {
        let m = model(4, 32, 8);
        let all = 4 * 32 * (RAW + (2 << 20));
        let b = budget(all, all);
        let p = plan(&m, &h200(), &b).unwrap();
        check(&p, &m, &h200(), &b);
        assert_eq!(experts(&p, Tier::VramHot), 128);
        assert_eq!(p.bottleneck, "GPU, dense part");
    }

    #[test]
    fn coded_experts_make_room_where_raw_ones_do_not_fit() {
        let m = model(4, 64, 8);
        // Room for all as records, not as int4.
        let b = budget(4 * (64 * RECORD + (4 << 20)), 0);
        let p = plan(&m, &h200(), &b).unwrap();
        check(&p, &m, &h200(), &b);
        assert!(experts(&p, Tier::VramAns) > 240, "{:?}", p.table);
        assert!(experts(&p, Tier::DiskAns) < 16);
    }

    #[test]
    fn the_cpu_gets_its_share_only_where_it_helps() {
        let m = model(3, 64, 8);
        let b = budget(3 * 16 * RECORD, 3 * 64 * RAW);
        let slow = Rates {
            cpu: Line {
                fixed: 1e-3,
                each: 5e-3,
            },
            ..h200()
        };
        let p = plan(&m, &slow, &b).unwrap();
        assert_eq!(experts(&p, Tier::RamRaw), 0);
        let fast = Rates {
            cpu: Line {
                fixed: 1e-6,
                each: 50e-6,
            },
            ..h200()
        };
        let p = plan(&m, &fast, &b).unwrap();
        check(&p, &m, &fast, &b);
        assert!(experts(&p, Tier::RamRaw) > 64, "{:?}", p.table);
    }

    #[test]
    fn budgets_too_small_are_an_error() {
        let m = model(2, 16, 2);
        let mut b = budget(RECORD, RECORD);
        b.allowed = [true, true, true, true, false];
        let error = plan(&m, &h200(), &b).unwrap_err();
        let PlanError::TooSmall { experts, needed } = error else {
            panic!("{error}")
        };
        assert!((20..=31).contains(&experts), "{experts}");
        assert!(needed > 20 * RECORD);
        let none = ModelUse {
            layers: vec![],
            ..m.clone()
        };
        assert!(matches!(plan(&none, &h200(), &b), Err(PlanError::Model(_))));
        let mut bad = m;
        bad.layers[0].records.pop();
        assert!(matches!(plan(&bad, &h200(), &b), Err(PlanError::Model(_))));
    }

    /// For a model small enough to try everything, nothing better is missed by much.
    #[test]
    fn near_the_best_of_all_placements() {
        let m = model(1, 8, 2);
        let b = budget(3 * RAW, 3 * RAW);
        for (upload, disk) in [(50e9, 5e9), (5e9, 1e9), (50e9, 0.5e9)] {
            let mut rates = h200();
            rates.upload.each = 1.0 / upload;
            rates.disk.each = 1.0 / disk;
            let p = plan(&m, &rates, &b).unwrap();
            let search = Search::new(&m, &rates, &b, None);
            let mut best = f64::INFINITY;
            for code in 0..9usize.pow(5) {
                let counts: Counts = std::array::from_fn(|t| code / 9usize.pow(t as u32) % 9);
                if counts.iter().sum::<usize>() == 8 {
                    let s = search.state(vec![counts]);
                    if search.feasible(&s) {
                        best = best.min(s.time);
                    }
                }
            }
            let found = p.token - rates.dense;
            assert!(found <= best * 1.02, "{found} {best}");
        }
    }

    /// GLM-5.2 at full depth on one H200: quick enough to do before every run.
    #[test]
    fn full_depth_is_planned_in_seconds() {
        let m = model(75, 256, 8);
        // Host memory holds what device memory does not.
        let b = budget(100 << 30, 200 << 30);
        let start = std::time::Instant::now();
        let p = plan(&m, &h200(), &b).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        check(&p, &m, &h200(), &b);
        assert!(p.token < 0.97 * p.greedy, "{} {}", p.token, p.greedy);
        // Idle machines take 2 s; what is checked is that it does not grow to minutes.
        assert!(seconds < 60.0, "{seconds}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..Default::default() })]
        #[test]
        fn plans_are_what_they_say_and_no_worse_than_greedy(
            layers in 1..4usize,
            experts in 4..24usize,
            top_k in 1..5usize,
            vram in 0..500_000_000u64,
            ram in 0..500_000_000u64,
            allowed in proptest::array::uniform4(any::<bool>()),
            speeds in proptest::array::uniform5(0.1..10.0f64),
            seed in any::<u64>(),
        ) {
            let mut m = model(layers, experts, top_k.min(experts));
            let mut x = seed | 1;
            for l in &mut m.layers {
                for (p, r) in l.chances.iter_mut().zip(&mut l.records) {
                    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
                    *p *= (x % 1000) as f64 / 500.0 + 0.001;
                    *r -= x % 1_000_000;
                }
                for p in &mut l.plane3 {
                    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
                    *p = x % 3 == 0;
                }
            }
            let mut rates = h200();
            let lines = [&mut rates.hot, &mut rates.ans, &mut rates.cpu, &mut rates.upload, &mut rates.disk];
            for (line, f) in lines.into_iter().zip(speeds) {
                line.each *= f;
                line.fixed *= f;
            }
            let mut b = budget(vram, ram);
            b.allowed[..4].copy_from_slice(&allowed);
            let p = plan(&m, &rates, &b).unwrap();
            check(&p, &m, &rates, &b);
            // More memory is never worse by more than the search is off.
            let more = Budget { vram: 2 * vram, ram: 2 * ram, ..b };
            let q = plan(&m, &rates, &more).unwrap();
            prop_assert!(q.token <= p.token * 1.03, "{} {}", q.token, p.token);
        }
    }
}
