//! What an archive is packed for: the shared memory of an architecture decides between the two
//! tables of rANS.

use gpu::coded_plan;
use gpu::launch::DeviceLimits;
use gpu::layout::{Folds, Symbol};

use crate::expert::{ExpertShape, MatrixKind};

/// A GPU architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// As compilers name it: `sm_90`.
    pub name: String,
    /// Shared memory that a block can have, bytes.
    pub shared_per_block: u32,
}

/// Architectures and the shared memory of a block, KiB ("Maximum amount of shared memory per thread
/// block" of the CUDA C++ Programming Guide, table "Technical Specifications per Compute
/// Capability").
const KNOWN: [(&str, u32); 6] = [
    ("sm_80", 163),
    ("sm_86", 99),
    ("sm_89", 99),
    ("sm_90", 227),
    ("sm_100", 227),
    ("sm_120", 99),
];

/// An architecture that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown target {0:?}; expected one of {list}", list = names().join(", "))]
pub struct UnknownTarget(pub String);

/// The known architectures.
pub fn names() -> Vec<&'static str> {
    KNOWN.iter().map(|(name, _)| *name).collect()
}

impl Target {
    /// A known architecture; `sm_90a` is `sm_90`.
    pub fn named(name: &str) -> Result<Self, UnknownTarget> {
        let base = name.trim_end_matches(['a', 'f']);
        (KNOWN.iter().find(|(known, _)| *known == base))
            .map(|(known, kib)| Self {
                name: (*known).into(),
                shared_per_block: kib << 10,
            })
            .ok_or_else(|| UnknownTarget(name.into()))
    }

    /// Triples where a block has room for their table and what goes with it, else pairs.
    pub fn symbol(&self, shape: &ExpertShape) -> Symbol {
        let limits = DeviceLimits {
            sms: 1,
            shared_per_block: self.shared_per_block,
            shared_per_sm: self.shared_per_block + 1024,
            threads_per_sm: 2048,
        };
        let fits = |kind| {
            let Some(folds) = Folds::new(shape.dims(kind).1) else {
                return true;
            };
            coded_plan::matmul_rans(&limits, Symbol::Triple, &folds, 1).is_ok()
                && coded_plan::decode_rans(&limits, Symbol::Triple, 1).is_ok()
        };
        if fits(MatrixKind::Gate) && fits(MatrixKind::Down) {
            Symbol::Triple
        } else {
            Symbol::Pair
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expert::ScaleKind;

    #[test]
    fn triples_where_there_is_room_for_them() {
        for (hidden, intermediate) in [(6144, 2048), (2048, 1536), (8192, 64)] {
            let shape = ExpertShape {
                hidden,
                intermediate,
                scales: ScaleKind::Row,
            };
            for (name, symbol) in [
                ("sm_80", Symbol::Triple),
                ("sm_86", Symbol::Pair),
                ("sm_89", Symbol::Pair),
                ("sm_90", Symbol::Triple),
                ("sm_90a", Symbol::Triple),
                ("sm_100", Symbol::Triple),
                ("sm_120", Symbol::Pair),
            ] {
                let target = Target::named(name).unwrap();
                assert_eq!(target.symbol(&shape), symbol, "{name}");
            }
        }
    }

    #[test]
    fn an_unknown_target_lists_the_known() {
        for name in ["sm_70", "h200", "", "sm_", "90"] {
            let e = Target::named(name).unwrap_err().to_string();
            assert!(
                e.contains("sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
                "{e}"
            );
        }
    }
}
