//! How long a token takes, given what each tier costs and which share of a layer's selections it
//! gets.
//!
//! A layer chooses `k` experts. How many of them are in each tier is taken as multinomial with the
//! tiers' shares of the selections; the layer's time is the mean over all such outcomes `n`:
//!
//! ```text
//! resident = hot(n_hot) + coded(n_ans)                       GPU, what is in device memory
//! copied   = max(upload((n_ram + n_disk) bytes),             PCIe, beside it
//!                disk(n_disk bytes) + upload(1 record))      disk, each record copied as it arrives
//! gpu      = max(resident, copied) + coded(n_ram + n_disk)   what was copied is multiplied last
//! time     = round trip + max(gpu, cpu(n_raw))               the CPU works beside it
//! ```
//!
//! `coded(n)` is `ans` of the records in rANS and `plane3` of those in plane3, of which there are
//! binomially many by their share of the tier's selections. `hot`, `ans`, `plane3`, `cpu`, `upload` and
//! `disk` are lines: nothing for nothing, else a fixed part and a part in proportion ([`Line`]). The round
//! trip, which tells the host what was chosen, is there where a layer has any expert outside device
//! memory. A token takes the sum over layers, and what the dense part takes.

use serde::{Deserialize, Serialize};

use super::{TIERS, Tier};

/// A time that is nothing for nothing, else a fixed part and a part in proportion. Seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds whatever the amount.
    pub fixed: f64,
    /// Seconds for each unit.
    pub each: f64,
}

impl Line {
    /// Seconds for `n` units.
    pub fn at(&self, n: f64) -> f64 {
        if n > 0.0 {
            self.fixed + self.each * n
        } else {
            0.0
        }
    }

    /// The line through two measurements `(units, seconds)`; falls to a line through the origin where
    /// noise would make a part negative.
    pub fn through((a, ta): (f64, f64), (b, tb): (f64, f64)) -> Self {
        let each = (tb - ta) / (b - a);
        let fixed = ta - each * a;
        if each > 0.0 && fixed >= 0.0 {
            Self { fixed, each }
        } else if each > 0.0 {
            Self {
                fixed: 0.0,
                each: tb / b,
            }
        } else {
            Self {
                fixed: ta.max(tb),
                each: 0.0,
            }
        }
    }
}

/// What a machine takes for a model of one expert shape. Seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// A layer's experts from int4 in device memory; unit: an expert.
    pub hot: Line,
    /// A layer's experts from records in rANS in device memory; unit: an expert.
    pub ans: Line,
    /// The same from records in plane3; as `ans` where the archive has none.
    pub plane3: Line,
    /// A layer's experts on the CPU; unit: an expert.
    pub cpu: Line,
    /// Host to device; unit: a byte.
    pub upload: Line,
    /// The archive's disk to host; unit: a byte.
    pub disk: Line,
    /// Telling the host what a layer chose, and the host's part in a layer.
    pub round_trip: f64,
    /// Activations of a layer to another device and results back; unit: an expert.
    pub exchange: Line,
    /// All of a token that is no routed expert.
    pub dense: f64,
    /// The same of a pass over two tokens; none where it was not measured.
    #[serde(default)]
    pub dense_two: Option<f64>,
}

/// Mean seconds of a layer, and how long each of its lanes works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerTime {
    /// The layer's routed experts.
    pub total: f64,
    /// GPU.
    pub gpu: f64,
    /// Copies to the GPU.
    pub upload: f64,
    /// CPU.
    pub cpu: f64,
    /// Reads.
    pub disk: f64,
    /// Round trips.
    pub round_trip: f64,
    /// Exchange with the device that has most of it.
    pub exchange: f64,
}

impl LayerTime {
    /// Adds another layer's.
    pub fn add(&mut self, o: &LayerTime) {
        self.total += o.total;
        self.gpu += o.gpu;
        self.upload += o.upload;
        self.cpu += o.cpu;
        self.disk += o.disk;
        self.round_trip += o.round_trip;
        self.exchange += o.exchange;
    }
}

/// One tier of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    /// Experts.
    pub experts: usize,
    /// Share of the layer's selections, 0 to 1.
    pub share: f64,
    /// What of that share goes to experts whose records are plane3.
    pub plane3: f64,
}

impl Part {
    /// Adds another's.
    fn plus(mut self, other: &Part) -> Self {
        self.experts += other.experts;
        self.share += other.share;
        self.plane3 += other.plane3;
        self
    }
}

/// Mean seconds of `n` experts from their records, chosen from `part`, by `n` up to the last.
fn coded(rates: &Rates, part: &Part, last: usize) -> Vec<f64> {
    let p = if part.share > 0.0 {
        (part.plane3 / part.share).clamp(0.0, 1.0)
    } else {
        0.0
    };
    let time = |n: usize| {
        if p <= 0.0 {
            return rates.ans.at(n as f64);
        }
        if p >= 1.0 {
            return rates.plane3.at(n as f64);
        }
        let mut weight = (1.0 - p).powi(n as i32);
        let mut sum = 0.0;
        for i in 0..=n {
            sum += weight * (rates.plane3.at(i as f64) + rates.ans.at((n - i) as f64));
            weight *= (n - i) as f64 / (i + 1) as f64 * p / (1.0 - p);
        }
        sum
    };
    (0..=last).map(time).collect()
}

/// Mean time of a layer that chooses `top_k` experts whose records have `record` bytes.
pub fn layer_time(rates: &Rates, top_k: usize, record: f64, parts: &[Part; TIERS]) -> LayerTime {
    let outside = Tier::ALL[Tier::RamRaw as usize..]
        .iter()
        .any(|t| parts[*t as usize].experts > 0);
    let round_trip = if outside { rates.round_trip } else { 0.0 };
    let stays = coded(rates, &parts[Tier::VramAns as usize], top_k);
    let away = parts[Tier::RamAns as usize].plus(&parts[Tier::DiskAns as usize]);
    let comes = coded(rates, &away, top_k);
    let mut sum = LayerTime::default();
    let mut n = [0; TIERS];
    outcomes(parts, top_k, 0, 1.0, &mut n, &mut |n, chance| {
        let count = |t: Tier| n[t as usize] as f64;
        let copied = count(Tier::RamAns) + count(Tier::DiskAns);
        let resident = rates.hot.at(count(Tier::VramHot)) + stays[n[Tier::VramAns as usize]];
        let upload = rates.upload.at(copied * record);
        let disk = rates.disk.at(count(Tier::DiskAns) * record);
        let behind = if disk > 0.0 {
            disk + rates.upload.at(record)
        } else {
            0.0
        };
        let last = comes[n[Tier::RamAns as usize] + n[Tier::DiskAns as usize]];
        let cpu = rates.cpu.at(count(Tier::RamRaw));
        let gpu = resident.max(upload).max(behind) + last;
        sum.total += chance * (round_trip + gpu.max(cpu));
        sum.gpu += chance * (resident + last);
        sum.upload += chance * upload;
        sum.cpu += chance * cpu;
        sum.disk += chance * disk;
    });
    sum.round_trip = round_trip;
    sum
}

/// Calls `each` with every way to distribute `left` selections over the tiers from `tier` on, and
/// its multinomial probability.
fn outcomes(
    parts: &[Part; TIERS],
    left: usize,
    tier: usize,
    chance: f64,
    n: &mut [usize; TIERS],
    each: &mut impl FnMut(&[usize; TIERS], f64),
) {
    // Share of this tier among those that are left: the counts are binomial one after the other.
    let share = parts[tier].share;
    let last = (tier + 1..TIERS).all(|t| parts[t].share <= 0.0);
    if last || left == 0 {
        n[tier..].fill(0);
        n[tier] = left;
        each(n, chance);
        return;
    }
    if share <= 0.0 {
        n[tier] = 0;
        outcomes(parts, left, tier + 1, chance, n, each);
        return;
    }
    let rest: f64 = parts[tier + 1..].iter().map(|p| p.share).sum();
    let p = share / (share + rest);
    // Binomial(left, p), from none up.
    let mut weight = (1.0 - p).powi(left as i32);
    for i in 0..=left {
        n[tier] = i;
        if weight > 0.0 {
            outcomes(parts, left - i, tier + 1, chance * weight, n, each);
        }
        weight *= (left - i) as f64 / (i + 1) as f64 * p / (1.0 - p);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rates() -> Rates {
        let line = |fixed, each| Line { fixed, each };
        Rates {
            hot: line(40e-6, 5e-6),
            ans: line(120e-6, 8e-6),
            plane3: line(50e-6, 4e-6),
            cpu: line(20e-6, 200e-6),
            upload: line(10e-6, 1.0 / 50e9),
            disk: line(100e-6, 1.0 / 5e9),
            round_trip: 30e-6,
            exchange: line(0.0, 0.0),
            dense: 5e-3,
            dense_two: None,
        }
    }

    fn parts(shares: [f64; TIERS]) -> [Part; TIERS] {
        shares.map(|share| Part {
            experts: usize::from(share > 0.0),
            share,
            plane3: 0.0,
        })
    }

    #[test]
    fn one_tier_is_its_line() {
        let r = rates();
        let time = |t: Tier| {
            let mut shares = [0.0; TIERS];
            shares[t as usize] = 1.0;
            layer_time(&r, 8, 14e6, &parts(shares)).total
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(time(Tier::VramHot), 80e-6);
        near(time(Tier::VramAns), 184e-6);
        near(time(Tier::RamRaw), 30e-6 + 1620e-6);
        let copy = 10e-6 + 8.0 * 14e6 / 50e9;
        near(time(Tier::RamAns), 30e-6 + copy + 184e-6);
        let read = 100e-6 + 8.0 * 14e6 / 5e9;
        let behind = read + 10e-6 + 14e6 / 50e9;
        near(time(Tier::DiskAns), 30e-6 + behind + 184e-6);
    }

    #[test]
    fn plane3_is_a_kind_of_record() {
        let r = rates();
        let time = |plane3: f64| {
            let mut p = parts([0.0, 1.0, 0.0, 0.0, 0.0]);
            p[Tier::VramAns as usize].plane3 = plane3;
            layer_time(&r, 2, 14e6, &p).total
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-15, "{a} {b}");
        near(time(0.0), r.ans.at(2.0));
        near(time(1.0), r.plane3.at(2.0));
        let both = r.plane3.at(1.0) + r.ans.at(1.0);
        near(
            time(0.5),
            0.25 * r.ans.at(2.0) + 0.5 * both + 0.25 * r.plane3.at(2.0),
        );
    }

    #[test]
    fn two_tiers_are_binomial() {
        let r = rates();
        let t = layer_time(&r, 2, 14e6, &parts([0.75, 0.25, 0.0, 0.0, 0.0]));
        let by_hand = 0.75 * 0.75 * r.hot.at(2.0)
            + 2.0 * 0.75 * 0.25 * (r.hot.at(1.0) + r.ans.at(1.0))
            + 0.25 * 0.25 * r.ans.at(2.0);
        assert!((t.total - by_hand).abs() < 1e-15);
        assert_eq!(t.round_trip, 0.0);
    }

    #[test]
    fn lines_through_noise_stay_lines() {
        let l = Line::through((1.0, 3.0), (8.0, 10.0));
        assert!((l.fixed - 2.0).abs() < 1e-12 && (l.each - 1.0).abs() < 1e-12);
        let l = Line::through((1.0, 3.0), (8.0, 2.0));
        assert_eq!((l.fixed, l.each), (3.0, 0.0));
        let l = Line::through((1.0, 1.0), (8.0, 10.0));
        assert_eq!((l.fixed, l.each), (0.0, 1.25));
        assert_eq!(l.at(0.0), 0.0);
    }

    proptest! {
        /// Outcomes are a distribution with the means n p, and the layer takes no less than the
        /// mean of each lane.
        #[test]
        fn outcomes_are_multinomial(
            raw in proptest::array::uniform5(0.0..1.0f64),
            zero in proptest::array::uniform5(any::<bool>()),
            top_k in 1..9usize,
        ) {
            let mut shares = raw;
            for (s, z) in shares.iter_mut().zip(zero) {
                if z { *s = 0.0; }
            }
            let sum: f64 = shares.iter().sum();
            prop_assume!(sum > 0.0);
            let shares = shares.map(|s| s / sum);
            let parts = parts(shares);
            let (mut all, mut means) = (0.0, [0.0; TIERS]);
            outcomes(&parts, top_k, 0, 1.0, &mut [0; TIERS], &mut |n, chance| {
                assert_eq!(n.iter().sum::<usize>(), top_k);
                all += chance;
                for (m, n) in means.iter_mut().zip(n) {
                    *m += chance * *n as f64;
                }
            });
            prop_assert!((all - 1.0).abs() < 1e-9, "{}", all);
            for (m, s) in means.iter().zip(shares) {
                prop_assert!((m - top_k as f64 * s).abs() < 1e-8, "{} {}", m, s);
            }
            let t = layer_time(&rates(), top_k, 14e6, &parts);
            for lane in [t.gpu, t.upload, t.cpu, t.disk] {
                prop_assert!(t.total + 1e-12 >= lane, "{:?}", t);
            }
        }
    }
}
