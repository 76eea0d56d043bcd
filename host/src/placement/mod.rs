//! Where experts go: what is used how often, what each place costs, and which placement takes the
//! least time (`docs/placement.md`).

pub mod calibrate;
pub mod cost;
pub mod memory;
pub mod planner;
pub mod profile;
pub mod request;
pub mod spread;

pub use cost::{LayerTime, Line, Rates};
pub use planner::{Budget, LayerModel, ModelUse, Plan, PlanError, plan};
pub use profile::Profile;
pub use spread::{DevicePlan, Peer, plan_devices};

/// Where an expert lives, from the fastest place to the slowest.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, clap::ValueEnum,
)]
#[repr(usize)]
pub enum Tier {
    /// In device memory as int4.
    #[serde(rename = "vram-hot")]
    VramHot,
    /// In device memory as its record; the GPU decodes while it multiplies.
    #[serde(rename = "vram-ans")]
    VramAns,
    /// In host memory as int4; the CPU multiplies.
    #[serde(rename = "ram-raw")]
    RamRaw,
    /// In host memory as its record; copied to the GPU when chosen.
    #[serde(rename = "ram-ans")]
    RamAns,
    /// In the archive alone; read, then as `ram-ans`.
    #[serde(rename = "disk-ans")]
    DiskAns,
}

/// How often experts were chosen, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Of each tier.
    pub tiers: [u64; TIERS],
    /// Of either tier of device memory: layers with both, and nothing elsewhere, are not asked which.
    pub vram: u64,
    /// Experts on disk that a pass needed and did not read, their record being in memory still.
    pub kept: u64,
    /// Experts guessed of the next layer to be copied to the device before they were chosen, and those of them that
    /// then were; the same of those that were guessed further ahead alone.
    pub ahead: [u64; 4],
}

impl Used {
    /// Adds another's.
    pub fn add(&mut self, other: &Used) {
        for (a, b) in self.tiers.iter_mut().zip(other.tiers) {
            *a += b;
        }
        self.vram += other.vram;
        self.kept += other.kept;
        self.ahead = std::array::from_fn(|i| self.ahead[i] + other.ahead[i]);
    }
}

/// Number of tiers.
pub const TIERS: usize = 5;

impl Tier {
    /// All, in order.
    pub const ALL: [Tier; TIERS] = [
        Tier::VramHot,
        Tier::VramAns,
        Tier::RamRaw,
        Tier::RamAns,
        Tier::DiskAns,
    ];

    /// As people and `--json` call it.
    pub fn name(self) -> &'static str {
        match self {
            Tier::VramHot => "vram-hot",
            Tier::VramAns => "vram-ans",
            Tier::RamRaw => "ram-raw",
            Tier::RamAns => "ram-ans",
            Tier::DiskAns => "disk-ans",
        }
    }
}

/// Whether experts in host memory may be copied before they are chosen: not where `ANSATZ_COPY_AHEAD=off`.
pub fn copies_ahead() -> bool {
    std::env::var_os("ANSATZ_COPY_AHEAD").is_none_or(|v| v != "off")
}

/// Records that device memory has room for beside those that stay: what one token chooses, four
/// times, so that a few tokens of a prompt go together.
pub fn staged(top_k: usize) -> usize {
    4 * top_k
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
