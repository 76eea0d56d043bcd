//! How long a token takes, given what each tier costs and which share of a layer's selections it
//! gets.
//!
//! A layer chooses `k` experts. How many of them are in each tier is taken as multinomial with the
//! tiers' shares of the selections; the layer's time is the mean over all such outcomes `n`:
//!
//! ```text
//! resident = hot(n_hot) + coded(n_ans)                       GPU, what is in device memory
//! copied   = max(upload(((1 - f) n_ram + n_disk) bytes),     PCIe, beside it
//!                disk(n_disk bytes) + upload(1 record))      disk, each record copied as it arrives
//! gpu      = max(resident, copied) + coded(n_ram + n_disk)   what was copied is multiplied last
//! layer    = round trip + max(gpu, cpu(n_raw))               the CPU works beside it
//! time     = max(layer, upload(((2 - f) n_ram + n_disk) bytes) - dense)
//! ```
//!
//! The share `f` of experts in pinned memory is foreseen: copied before the layer has chosen, beside what the GPU does
//! up to then, as many others being copied in vain. Where that is more than PCIe gets done from one layer's choice to the
//! next, it takes as long as PCIe does; `dense` is the layer's part of what is no routed expert. Below one half nothing is
//! copied ahead, and `f` is 0 (nor is there the last line). While the disk is read, experts of later layers are copied,
//! `2 k - 1` at most, for which the stage has room: `n_ram` is what that leaves of the experts chosen there,
//! whose mean falls by `f (2 k - 1)` times the chance that a layer reads the disk.
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

/// What is copied to the GPU before it is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ahead {
    /// Share of guessed experts that are then chosen, 0 to 1.
    pub foreseen: f64,
    /// Seconds of a layer's part of what is no routed expert.
    pub dense: f64,
}

impl Ahead {
    /// A copy ahead saves at most the time of a copy and one in vain costs at most as much: with a smaller share that
    /// is right nothing is copied ahead.
    pub const LEAST: f64 = 0.5;

    /// Nothing.
    pub const NONE: Self = Self {
        foreseen: 0.0,
        dense: 0.0,
    };
}

/// Experts that the stage has room for beside those that two layers choose, one of them from the disk.
fn copied_meanwhile(top_k: usize) -> usize {
    super::staged(top_k).saturating_sub(2 * top_k + 1)
}

/// Mean time of a layer that chooses `top_k` experts whose records have `record` bytes.
pub fn layer_time(
    rates: &Rates,
    ahead: &Ahead,
    top_k: usize,
    record: f64,
    parts: &[Part; TIERS],
) -> LayerTime {
    // As many are copied in vain as are missed.
    let (foreseen, vain) = match ahead.foreseen {
        f if f >= Ahead::LEAST => (f, 1.0 - f),
        _ => (0.0, 0.0),
    };
    let outside = Tier::ALL[Tier::RamRaw as usize..]
        .iter()
        .any(|t| parts[*t as usize].experts > 0);
    let round_trip = if outside { rates.round_trip } else { 0.0 };
    let stays = coded(rates, &parts[Tier::VramAns as usize], top_k);
    let away = parts[Tier::RamAns as usize].plus(&parts[Tier::DiskAns as usize]);
    let comes = coded(rates, &away, top_k);
    // What reads of the disk leave to be copied of experts in pinned memory.
    let share = |t: Tier| parts[t as usize].share;
    let reads = 1.0 - (1.0 - share(Tier::DiskAns).clamp(0.0, 1.0)).powi(top_k as i32);
    let meanwhile = foreseen * reads * copied_meanwhile(top_k) as f64;
    let left = match share(Tier::RamAns) * top_k as f64 {
        mean if mean > 0.0 => (1.0 - meanwhile / mean).max(0.0),
        _ => 1.0,
    };
    let mut sum = LayerTime::default();
    let mut n = [0; TIERS];
    outcomes(parts, top_k, 0, 1.0, &mut n, &mut |n, chance| {
        let count = |t: Tier| n[t as usize] as f64;
        let (ram, on_disk) = (left * count(Tier::RamAns), count(Tier::DiskAns));
        let late = ram * (1.0 - foreseen) + on_disk;
        let resident = rates.hot.at(count(Tier::VramHot)) + stays[n[Tier::VramAns as usize]];
        let upload = rates.upload.at((ram * (1.0 + vain) + on_disk) * record);
        let disk = rates.disk.at(count(Tier::DiskAns) * record);
        let behind = if disk > 0.0 {
            disk + rates.upload.at(record)
        } else {
            0.0
        };
        let last = comes[n[Tier::RamAns as usize] + n[Tier::DiskAns as usize]];
        let cpu = rates.cpu.at(count(Tier::RamRaw));
        let copied = rates.upload.at(late * record).max(behind);
        let gpu = resident.max(copied) + last;
        let layer = round_trip + gpu.max(cpu);
        let lanes = match foreseen > 0.0 {
            true => layer.max(upload - ahead.dense),
            false => layer,
        };
        sum.total += chance * lanes;
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
            layer_time(&r, &Ahead::NONE, 8, 14e6, &parts(shares)).total
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
    fn what_is_foreseen_is_copied_beside_the_dense_part() {
        let r = rates();
        let (record, dense) = (14e6, 600e-6);
        let mut shares = [0.0; TIERS];
        shares[Tier::RamAns as usize] = 1.0;
        let time = |foreseen| {
            let ahead = Ahead { foreseen, dense };
            layer_time(&r, &ahead, 8, record, &parts(shares))
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        let (copy, last) = (r.upload.at(8.0 * record), r.ans.at(8.0));
        near(time(0.0).total, 30e-6 + copy + last);
        // All of it: PCIe has the rest of the layer for it, or takes longer than that.
        near(time(1.0).total, copy - dense);
        assert!(copy - dense > 30e-6 + last);
        near(time(1.0).upload, copy);
        // A quarter is copied late and another in vain.
        near(time(0.75).total, r.upload.at(8.0 * record * 1.25) - dense);
        let short = Ahead {
            foreseen: 0.75,
            dense: 5e-3,
        };
        let late = r.upload.at(8.0 * record * 0.25);
        near(
            layer_time(&r, &short, 8, record, &parts(shares)).total,
            30e-6 + late + last,
        );
        // Guesses that are mostly wrong are not made.
        assert_eq!(time(0.49), time(0.0));
    }

    /// While the disk is read the copies of other layers are made.
    #[test]
    fn what_is_foreseen_is_copied_while_the_disk_is_read() {
        let r = rates();
        let mut shares = [0.0; TIERS];
        shares[Tier::VramAns as usize] = 0.8;
        shares[Tier::RamAns as usize] = 0.15;
        shares[Tier::DiskAns as usize] = 0.05;
        let time = |foreseen, dense| {
            let ahead = Ahead { foreseen, dense };
            layer_time(&r, &ahead, 8, 14e6, &parts(shares))
        };
        // One layer in three reads, and copies up to 15 others; 1.2 a layer are wanted of them.
        let none = time(0.0, 0.0);
        let all = time(0.9, 0.0);
        assert!(all.upload < 0.4 * none.upload, "{all:?} {none:?}");
        assert!((all.disk - none.disk).abs() < 1e-12);
        assert!(all.total < none.total);
    }

    #[test]
    fn plane3_is_a_kind_of_record() {
        let r = rates();
        let time = |plane3: f64| {
            let mut p = parts([0.0, 1.0, 0.0, 0.0, 0.0]);
            p[Tier::VramAns as usize].plane3 = plane3;
            layer_time(&r, &Ahead::NONE, 2, 14e6, &p).total
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
        let t = layer_time(
            &r,
            &Ahead::NONE,
            2,
            14e6,
            &parts([0.75, 0.25, 0.0, 0.0, 0.0]),
        );
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
            foreseen in 0.0..=1.0f64,
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
            let t = layer_time(&rates(), &Ahead::NONE, top_k, 14e6, &parts);
            for lane in [t.gpu, t.upload, t.cpu, t.disk] {
                prop_assert!(t.total + 1e-12 >= lane, "{:?}", t);
            }
            let ahead = Ahead { foreseen, dense: 1e-3 };
            let t = layer_time(&rates(), &ahead, top_k, 14e6, &parts);
            for lane in [t.gpu, t.upload - ahead.dense, t.cpu, t.disk] {
                prop_assert!(t.total + 1e-12 >= lane, "{:?}", t);
            }
        }
    }
}
