//! Which kernels multiply matrices in rANS, by tokens of an expert.

use gpu::abi::{self, ExpertArgs};
use gpu::coded_plan;
use gpu::launch::DeviceLimits;
use gpu::layout::{Folds, Symbol};
use gpu::matmul_rans_tokens::TOKENS;

use super::matmuls::Decoded;
use super::{Class, Coded, Groups};
use crate::archive::{Archive, ArchiveError};
use crate::backend::kernels::device::Device;
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::kernels::table::*;
use crate::expert::{MatrixKind, ScaleKind};

/// Of rows of how many tokens the kernels for several take matrices as they are.
fn covered(limits: &DeviceLimits, symbol: Symbol, folds: &Folds) -> u32 {
    match coded_plan::matmul_rans_mma(limits, symbol, folds, 1, 1) {
        Some(_) => TOKENS,
        None => 1,
    }
}

impl<D: Device> KernelBackend<D> {
    /// Tokens up to which all coded experts of an archive are multiplied as they are; those of more are decoded to memory
    /// first. An error where the archive's index is none.
    pub fn undecoded_tokens(&self, archive: &Archive) -> std::result::Result<usize, ArchiveError> {
        let shape = archive.shape();
        let mut most = TOKENS;
        for layer in archive.layers() {
            let coded = archive.layer(*layer)?;
            let tables = [MatrixKind::Gate, MatrixKind::Down].map(|kind| (kind, coded.table(kind)));
            for (kind, table) in tables {
                if let Some((_, table)) = table {
                    let folds = Folds::new(shape.dims(kind).1);
                    let limits = self.device().limits();
                    most = most.min(folds.map_or(1, |f| covered(limits, table.symbol(), &f)));
                }
            }
            for e in 0..archive.experts() {
                if archive.is_plane3(*layer, e)? {
                    most = 1;
                }
            }
        }
        Ok(if shape.scales == ScaleKind::Row {
            most as usize
        } else {
            1
        })
    }

    /// Matrices in rANS, decoded while they are multiplied.
    pub(super) fn matmul_rans(
        &self,
        class: &Class<D::Memory>,
        coded: &Coded<D::Memory>,
        groups: &Groups,
        args: ExpertArgs,
    ) -> Result<()> {
        let limits = self.device().limits();
        let jobs = (groups.most - groups.begin) * class.count * coded.blocks * class.folds.segs();
        let tokens = groups.tokens as u32;
        let args = ExpertArgs {
            table: coded.table.slice(),
            blocks: coded.blocks as u32,
            stage: u32::from(tokens > 1),
            min_tokens: 1,
            max_tokens: 1,
            ..args
        };
        let launch = coded_plan::matmul_rans(limits, coded.symbol, &class.folds, jobs as u64)
            .map_err(|e| self.does_not_fit(e))?;
        match coded.symbol {
            Symbol::Pair => self.launch::<MatmulRansPair>(launch, args)?,
            Symbol::Triple => self.launch::<MatmulRansTriple>(launch, args)?,
        }
        if tokens == 1 {
            return Ok(());
        }
        let covered = self.matmul_rans_several(class, coded, groups, args)?;
        if tokens > covered {
            // So many that decoding once to memory and tensor cores from there are faster.
            let decoded = Decoded {
                coded: Some(coded),
                plane3: None,
            };
            let args = ExpertArgs {
                sources: 1 << abi::rans_codec(coded.symbol),
                ..args
            };
            self.decode_and_multiply(class, decoded, groups, args, covered + 1)?;
        }
        Ok(())
    }

    /// Those of experts with 2 tokens or more, up to what is returned.
    fn matmul_rans_several(
        &self,
        class: &Class<D::Memory>,
        coded: &Coded<D::Memory>,
        groups: &Groups,
        args: ExpertArgs,
    ) -> Result<u32> {
        let limits = self.device().limits();
        let sets = ((groups.most - groups.begin) * class.folds.segs()) as u64;
        let per_set = (class.count * coded.blocks) as u64;
        let mma = coded_plan::matmul_rans_mma(limits, coded.symbol, &class.folds, sets, per_set);
        if let Some((launch, stage)) = mma.filter(|_| args.grouped == 0) {
            let args = ExpertArgs {
                stage,
                min_tokens: 2,
                max_tokens: TOKENS,
                ..args
            };
            match coded.symbol {
                Symbol::Pair => self.launch::<MatmulRansMmaPair>(launch, args)?,
                Symbol::Triple => self.launch::<MatmulRansMmaTriple>(launch, args)?,
            }
            return Ok(TOKENS);
        }
        let (launch, stage, most) = coded_plan::matmul_rans_tokens(
            limits,
            coded.symbol,
            &class.folds,
            groups.tokens as u32,
            sets * per_set,
        )
        .map_err(|e| self.does_not_fit(e))?;
        let args = ExpertArgs {
            stage,
            min_tokens: 2,
            max_tokens: most,
            ..args
        };
        match coded.symbol {
            Symbol::Pair => self.launch::<MatmulRansTokensPair>(launch, args)?,
            Symbol::Triple => self.launch::<MatmulRansTokensTriple>(launch, args)?,
        }
        Ok(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::kernels::EmulatedDevice;

    #[test]
    fn few_tokens_leave_matrices_of_real_sizes_coded() {
        let of = |cols: usize, limits: &DeviceLimits| {
            covered(limits, Symbol::Triple, &Folds::new(cols).unwrap())
        };
        let limits = EmulatedDevice::LIMITS;
        assert_eq!([6144, 2048].map(|cols| of(cols, &limits)), [TOKENS; 2]);
        assert_eq!(of(128, &limits), 1, "no whole segment");
        let small = DeviceLimits {
            shared_per_block: 4 << 10,
            ..limits
        };
        assert_eq!(of(6144, &small), 1);
    }
}
