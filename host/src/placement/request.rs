//! From budgets, profile and rates to a plan of a model's experts.

use std::path::{Path, PathBuf};

use super::calibrate::{self, CalibrateError, Calibration};
use super::cost::Ahead;
use super::memory::{self, DensePart, Fixed, fixed, weights_read};
use super::planner::{Budget, LayerModel, ModelUse, Plan, PlanError, TierPlan};
use super::profile::{self, Profile, ProfileError};
use super::spread::{Peer, plan_devices};
use super::{Rates, Tier, staged};
use crate::archive::{Archive, ArchiveError, LOW_NIBBLES};
use crate::backend::kernels::{Device, KernelBackend};
use crate::disk::reader::read_slot;
use crate::model::{Config, ModelError};

/// Bytes, or a part of what there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// Bytes.
    Bytes(u64),
    /// A share, 0 to 1.
    Share(f64),
}

impl Size {
    /// Bytes, where `all` are there.
    pub fn of(self, all: u64) -> u64 {
        match self {
            Size::Bytes(n) => n,
            Size::Share(s) => (s * all as f64) as u64,
        }
    }

    /// `24G`, `1.5GiB`, `512M`, `80%`, `1000000`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || "expected a size such as 24G, 1.5GiB, 512M, 80% or bytes".to_string();
        let at = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let n: f64 = text[..at].parse().map_err(|_| wrong())?;
        let unit = match &text[at..] {
            "" | "B" => 1.0,
            "K" | "KB" | "k" => 1e3,
            "M" | "MB" => 1e6,
            "G" | "GB" => 1e9,
            "T" | "TB" => 1e12,
            "KiB" => 1024.0,
            "MiB" => (1u64 << 20) as f64,
            "GiB" => (1u64 << 30) as f64,
            "TiB" => (1u64 << 40) as f64,
            "%" if n <= 100.0 => return Ok(Size::Share(n / 100.0)),
            _ => return Err(wrong()),
        };
        let bytes = n * unit;
        if bytes < 1e18 {
            Ok(Size::Bytes(bytes as u64))
        } else {
            Err(wrong())
        }
    }
}

/// What a user asks of a placement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Device memory for everything; by default what is free.
    pub vram: Option<Size>,
    /// Host memory for experts; by default 80% of what is available.
    pub ram: Option<Size>,
    /// Usage profile; by default the one beside the model.
    pub profile: Option<PathBuf>,
    /// Rates to use instead of this machine's.
    pub rates: Option<PathBuf>,
    /// Measure this machine again.
    pub calibrate: bool,
    /// Tiers that may be used; by default all.
    pub tiers: Option<Vec<Tier>>,
    /// Positions that the KV cache is for.
    pub positions: usize,
    /// Whether experts are to change places later: each record then takes what the largest of its layer
    /// does.
    pub moving: bool,
    /// Bytes that each device has less for experts than its budget says, because they were refused.
    pub short: Vec<u64>,
}

/// Why nothing was planned.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The rates.
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    /// The archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// The model's files.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// The budgets.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A profile of another model.
    #[error(
        "{}: layer {layer}, expert {expert}: the model has {layers} layers of {experts} experts; give this \
         model's profile",
        path.display()
    )]
    Foreign {
        /// The profile.
        path: PathBuf,
        /// The first layer and expert in it that the model has not.
        layer: u32,
        /// Its expert.
        expert: u32,
        /// Layers of the model.
        layers: usize,
        /// Experts of a layer.
        experts: usize,
    },
    /// Device memory that does not hold what is no expert.
    #[error(
        "{} of device memory hold no model whose dense part, caches and activations take {}; give more \
         (--vram-budget) or a shorter context (-c)",
        gb(*vram), gb(*taken)
    )]
    NoRoom {
        /// Bytes that there are.
        vram: u64,
        /// Bytes needed.
        taken: u64,
    },
}

impl From<ModelError> for RequestError {
    fn from(e: ModelError) -> Self {
        Self::Model(Box::new(e))
    }
}

/// Kept free of what is free, for the driver and for rounding.
const RESERVE: u64 = 256 << 20;

/// What speculation with one draft would come to, where the archive has the layer that drafts. The dense part
/// of a pass over two tokens is measured (where it is not, it is one token's); its experts are taken to be
/// each that either token chooses, once, choices being independent; the memory that the layer takes is not
/// counted.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Speculation {
    /// Seconds of a draft and the pass over two tokens that checks it.
    #[serde(rename = "pass_s")]
    pub pass: f64,
    /// Share of drafts that must be right for it to be faster than a token at a time; over 1: never.
    pub break_even: f64,
}

impl Speculation {
    fn of(config: &Config, layers: &[LayerModel], plan: &Plan, rates: &Rates) -> Self {
        let (mut one, mut two) = (0.0, 0.0);
        for p in layers.iter().flat_map(|l| &l.chances) {
            one += p;
            two += 1.0 - (1.0 - p) * (1.0 - p);
        }
        let mtp = Config {
            mtp: true,
            ..config.clone()
        };
        let read = weights_read(config) as f64;
        let head = (config.vocab * config.hidden) as f64;
        let draft = (weights_read(&mtp) as f64 - read + head) / read * rates.dense;
        let experts = plan.token - rates.dense;
        let dense = rates.dense_two.unwrap_or(rates.dense);
        let pass = dense + experts * (two / one + 1.0 / layers.len() as f64) + draft;
        Self {
            pass,
            break_even: (pass / plan.token - 1.0).max(0.0),
        }
    }
}

/// A plan and what it was made of.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Whether drafts would pay.
    pub speculation: Option<Speculation>,
    /// Rates, and the machine that they are of.
    pub calibration: Calibration,
    /// Where the use of experts is from.
    pub profile: String,
    /// What was left for experts.
    pub budget: Budget,
    /// Host memory in all, bytes.
    pub ram: u64,
    /// What of it the disk is read to.
    pub reads: u64,
    /// What else is in device memory.
    pub fixed: Vec<Fixed>,
    /// Device memory in all.
    pub vram: u64,
    /// What was left for experts on each device.
    pub room: Vec<u64>,
}

/// The profile asked for, else the one beside the model, else none; it is checked against the model.
pub(crate) fn read_profile(
    named: Option<&Path>,
    dir: &Path,
    config: &Config,
) -> Result<(Profile, String), RequestError> {
    let beside = dir.join(profile::FILE);
    let path = match named {
        Some(path) => path.to_owned(),
        None if beside.is_file() => beside,
        None => return Ok((Profile::new(), "none: all experts alike".into())),
    };
    let profile = Profile::read(&path)?;
    let layers = config.layers.len() + config.nextn.is_some() as usize;
    let experts = config.router.experts;
    if let Some((layer, expert)) = profile.foreign(layers, experts) {
        return Err(RequestError::Foreign {
            path,
            layer,
            expert,
            layers,
            experts,
        });
    }
    Ok((profile, path.display().to_string()))
}

/// The rates of a file; that they are of other experts is said.
pub fn given(file: &Path, archive: &Archive) -> Result<Calibration, CalibrateError> {
    let found = Calibration::read(file)?;
    if !found.machine.contains(&calibrate::geometry(archive)) {
        tracing::warn!(
            "{}: rates of other experts than this model's: {}",
            file.display(),
            found.machine
        );
    }
    Ok(found)
}

impl Request {
    /// The rates asked for, else this machine's. Whether they were measured now.
    pub fn rates<D: Device + Clone + 'static>(
        &self,
        backend: &KernelBackend<D>,
        archive: &Archive,
        dir: &Path,
        config: &Config,
    ) -> Result<(Calibration, bool), RequestError> {
        Ok(match &self.rates {
            Some(file) => (given(file, archive)?, false),
            None => calibrate::rates(backend, archive, dir, config, self.calibrate)?,
        })
    }

    /// Says which budgets are more than there is, of a device with `free` bytes and of this machine.
    pub fn say_excess(&self, free: u64) {
        let memory = crate::ram::available().unwrap_or(0);
        for (option, size, there) in [("vram", self.vram, free), ("ram", self.ram, memory)] {
            if let Some(Size::Bytes(n)) = size
                && n > there
                && there > 0
            {
                let (n, there) = (gb(n), gb(there));
                tracing::warn!("--{option}-budget: {n} are more than the {there} that are free");
            }
        }
    }

    /// A plan for the model of `dir` on a device with `free` bytes.
    pub fn plan(
        &self,
        dir: &Path,
        config: &Config,
        archive: &Archive,
        calibration: Calibration,
        free: u64,
    ) -> Result<Planned, RequestError> {
        self.plan_devices(dir, config, archive, calibration, free, &[])
    }

    /// The same over several devices, each with rates and free bytes of its own; the first one has the
    /// dense part. The budget of device memory is each one's.
    pub fn plan_devices(
        &self,
        dir: &Path,
        config: &Config,
        archive: &Archive,
        calibration: Calibration,
        free: u64,
        others: &[(Calibration, u64)],
    ) -> Result<Planned, RequestError> {
        let (profile, named) = read_profile(self.profile.as_deref(), dir, config)?;
        let (experts, top_k) = (config.router.experts, config.router.top_k);
        let mut layers = Vec::new();
        let mut largest = 0;
        // A layer that drafts may be in the archive and not be wanted.
        let mut int8 = 0;
        for number in config.sparse_layers().map(|l| l as u32) {
            if archive.is_int8(number) {
                for (half, e) in [0, LOW_NIBBLES]
                    .into_iter()
                    .flat_map(|half| (0..experts).map(move |e| (half, e)))
                {
                    let bytes = archive.place_of(number | half, e)?.1 as u64;
                    int8 += bytes.next_multiple_of(256);
                }
                continue;
            }
            let mut records: Vec<u64> = (0..experts)
                .map(|e| Ok(archive.place_of(number, e)?.1 as u64))
                .collect::<Result<_, ArchiveError>>()?;
            let slot = records.iter().copied().max().unwrap_or(0);
            largest = largest.max(slot);
            if self.moving {
                records.fill(slot);
            }
            let plane3 = (0..experts).map(|e| archive.is_plane3(number, e));
            layers.push(LayerModel {
                number,
                plane3: plane3.collect::<Result<_, _>>()?,
                chances: profile.chances(number, experts, top_k),
                records,
            });
        }
        // Rates may be of another archive of this geometry.
        let undecoded = match layers.iter().any(|l| l.plane3.contains(&true)) {
            true => 1,
            false => (others.iter().map(|(found, _)| found.undecoded))
                .fold(calibration.undecoded, usize::min),
        };
        let part = DensePart::open(dir, config)?;
        let mut fixed = fixed(config, &part, self.positions, undecoded);
        fixed.push(Fixed {
            what: "stage",
            vram: staged(top_k) as u64 * largest.next_multiple_of(256),
        });
        let allowed = Tier::ALL.map(|t| self.tiers.as_ref().is_none_or(|some| some.contains(&t)));
        let outside = allowed[Tier::RamRaw as usize..].contains(&true);
        let rows = memory::given(config, self.positions, outside, others.len());
        if rows > 0 {
            fixed.push(Fixed {
                what: "rows of experts elsewhere",
                vram: rows,
            });
        }
        if int8 > 0 {
            fixed.push(Fixed {
                what: "int8 experts",
                vram: int8,
            });
        }
        let spare = free.saturating_sub(RESERVE);
        let vram = self.vram.map_or(spare, |s| s.of(free));
        let taken: u64 = fixed.iter().map(|f| f.vram).sum();
        if taken > vram {
            return Err(RequestError::NoRoom { vram, taken });
        }
        let memory = crate::ram::available().unwrap_or(0);
        let short = |device: usize| self.short.get(device).copied().unwrap_or(0);
        let vram_left = (vram - taken).saturating_sub(short(0));
        let ram = self.ram.map_or(memory / 5 * 4, |s| s.of(memory));
        let mut budget = Budget {
            vram: vram_left,
            ram,
            vram_granule: 2 << 20,
            ram_granule: 4096,
            allowed,
        };
        let model = ModelUse {
            top_k,
            raw_bytes: archive.shape().raw_bytes() as u64,
            layers,
            foreseen: match super::copies_ahead() {
                true => profile.foreseen(config.layers.len()),
                false => 0.0,
            },
        };
        // Another device has activations of its experts and a budget, no dense part and no stage.
        let own = memory::activations(config, self.positions, undecoded);
        let peers: Vec<Peer> = (others.iter().zip(1..))
            .map(|((found, free), device)| {
                let rates = &found.rates;
                let vram = self
                    .vram
                    .map_or(free.saturating_sub(RESERVE), |s| s.of(*free));
                Peer {
                    vram: vram.saturating_sub(own + short(device)),
                    hot: rates.hot,
                    ans: rates.ans,
                    plane3: rates.plane3,
                    exchange: rates.exchange,
                }
            })
            .collect();
        let mut plan = plan_devices(&model, &calibration.rates, &budget, &peers)?;
        let mut reads = 0;
        if plan.table[Tier::DiskAns as usize].experts > 0 {
            // Pinned slots that the disk is read to.
            let slots = staged(top_k) as u64 * read_slot(largest as usize) as u64;
            budget.ram = ram.saturating_sub(slots);
            reads = slots;
            if slots > ram {
                let (slots, ram) = (gb(slots), gb(ram));
                tracing::warn!("--ram-budget: reads of the disk take {slots}, more than the {ram}");
            }
            plan = plan_devices(&model, &calibration.rates, &budget, &peers)?;
        }
        // A row for each layer of the archive: those that are not planned are whole in device memory
        // or not loaded.
        let mut planned_tiers = std::mem::take(&mut plan.tiers).into_iter();
        let mut devices = std::mem::take(&mut plan.devices).into_iter();
        for number in archive.layers() {
            let planned = model.layers.iter().any(|m| m.number == *number);
            let (tiers, devices) = match planned {
                true => (planned_tiers.next(), devices.next()),
                false => (None, None),
            };
            plan.tiers
                .push(tiers.unwrap_or_else(|| vec![Tier::DiskAns; experts]));
            plan.devices
                .push(devices.unwrap_or_else(|| vec![0; experts]));
        }
        let drafts = config.nextn.is_some()
            && archive
                .layers()
                .binary_search(&(config.layers.len() as u32))
                .is_ok();
        let of = |drafts: bool| {
            drafts.then(|| Speculation::of(config, &model.layers, &plan, &calibration.rates))
        };
        Ok(Planned {
            room: std::iter::once(budget.vram)
                .chain(peers.iter().map(|p| p.vram))
                .collect(),
            speculation: of(drafts),
            plan,
            calibration,
            profile: named,
            budget,
            ram,
            reads,
            fixed,
            vram,
        })
    }
}

fn gb(bytes: u64) -> String {
    match bytes {
        0..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// For people.
impl std::fmt::Display for Planned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (plan, rates): (&Plan, &Rates) = (&self.plan, &self.calibration.rates);
        writeln!(f, "machine  {}", self.calibration.machine)?;
        writeln!(f, "profile  {}", self.profile)?;
        let fixed: Vec<String> = (self.fixed.iter())
            .map(|f| format!("{} {}", f.what, gb(f.vram)))
            .collect();
        let own = plan.vram_of.first().copied().unwrap_or(0);
        let all = own + self.fixed.iter().map(|f| f.vram).sum::<u64>();
        writeln!(
            f,
            "vram     {} of {}: {}, experts {}",
            gb(all),
            gb(self.vram),
            fixed.join(", "),
            gb(own)
        )?;
        for (d, (taken, room)) in plan.vram_of.iter().zip(&self.room).enumerate().skip(1) {
            let row = plan.device_table.iter().find(|row| row.device == d);
            let number = row.map_or(d as u32, |row| row.number);
            let (taken, room) = (gb(*taken), gb(*room));
            writeln!(f, "         device {number}: {taken} of {room}: experts")?;
        }
        writeln!(
            f,
            "ram      {} of {}: {}experts {}\n",
            gb(plan.ram + self.reads),
            gb(self.ram),
            match self.reads {
                0 => String::new(),
                n => format!("reads of the disk {}, ", gb(n)),
            },
            gb(plan.ram)
        )?;
        writeln!(
            f,
            "{}tier      experts       bytes  share of selections  own lane, ms a token",
            if plan.device_table.is_empty() {
                ""
            } else {
                "device  "
            }
        )?;
        let mut line = |device: &str, row: &TierPlan| {
            writeln!(
                f,
                "{device}{:8} {:8} {:>11} {:>20.2}% {:>21.3}",
                row.tier,
                row.experts,
                gb(row.bytes),
                100.0 * row.share,
                1e3 * row.lane_s
            )
        };
        if plan.device_table.is_empty() {
            plan.table.iter().try_for_each(|row| line("", row))?;
        }
        for row in &plan.device_table {
            line(&format!("{:<6}  ", row.number), &row.part)?;
        }
        let t = &plan.time;
        let ahead = plan.foreseen >= Ahead::LEAST && plan.table[Tier::RamAns as usize].experts > 0;
        let ahead = match ahead {
            true => format!(
                " (by a guess, {:.0}% of which right)",
                100.0 * plan.foreseen
            ),
            false => String::new(),
        };
        writeln!(
            f,
            "\nlanes, ms a token: dense part {:.3}, experts on the GPU {:.3}, copies {:.3}{ahead}, CPU {:.3}, disk \
             {:.3}, round trips {:.3}, exchange {:.3}",
            1e3 * rates.dense,
            1e3 * t.gpu,
            1e3 * t.upload,
            1e3 * t.cpu,
            1e3 * t.disk,
            1e3 * t.round_trip,
            1e3 * t.exchange
        )?;
        write!(
            f,
            "predicted  {:.3} ms a token, {:.2} tokens/s; bottleneck: {}",
            1e3 * plan.token,
            1.0 / plan.token,
            plan.bottleneck
        )?;
        if plan.greedy.is_finite() {
            write!(f, "; greedy filling {:.3} ms", 1e3 * plan.greedy)?;
        }
        writeln!(f)?;
        match &self.speculation {
            None => Ok(()),
            Some(s) => {
                let pass = 1e3 * s.pass;
                write!(
                    f,
                    "speculation  {pass:.3} ms a draft and the pass that checks it: "
                )?;
                match 100.0 * s.break_even {
                    least if least < 100.0 => {
                        writeln!(f, "faster where more than {least:.0}% of drafts are right")
                    }
                    _ => writeln!(f, "slower, however many drafts are right"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let bytes = |s| match Size::parse(s) {
            Ok(Size::Bytes(n)) => n,
            other => panic!("{s}: {other:?}"),
        };
        assert_eq!(bytes("24G"), 24_000_000_000);
        assert_eq!(bytes("1.5GiB"), 3 << 29);
        assert_eq!(bytes("512M"), 512_000_000);
        assert_eq!(bytes("0"), 0);
        assert_eq!(bytes("77B"), 77);
        assert_eq!(Size::parse("80%"), Ok(Size::Share(0.8)));
        assert_eq!(Size::Share(0.25).of(1000), 250);
        for bad in [
            "",
            "G",
            "-1G",
            "1.2.3G",
            "101%",
            "5 apples",
            "1e30",
            "99999999T",
        ] {
            assert!(Size::parse(bad).is_err(), "{bad}");
        }
    }
}
