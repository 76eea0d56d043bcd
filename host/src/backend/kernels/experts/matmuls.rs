//! Matmuls of a class of the active experts' matrices: which kernels, from which form.

use cuda_std::mem::Slice;
use gpu::abi::{self, ExpertArgs};
use gpu::coded_plan;
use gpu::layout::Symbol;
use gpu::plane3::Layout;

use super::{Class, Coded, Experts, Groups, Operands};
use crate::backend::kernels::buffer::word;
use crate::backend::kernels::device::{Device, DeviceMemory};
use crate::backend::kernels::error::Result;
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::kernels::plan;
use crate::backend::kernels::table::*;
use crate::expert::{Form, ScaleKind};

impl<D: Device> KernelBackend<D> {
    /// Partial sums of a class of the active experts' matrices.
    pub(super) fn matmuls(
        &self,
        experts: &Experts<D::Memory>,
        class: &Class<D::Memory>,
        groups: &Groups,
        operands: Operands,
    ) -> Result<()> {
        if groups.begin >= groups.most {
            return Ok(());
        }
        let args = class_args(experts, class, groups, &operands, self.faults().slice());
        let decoded = match (&class.coded, &class.plane3) {
            (None, None) => return self.matmul_raw(class, groups, args, 1),
            (coded, plane3) => Decoded {
                coded: coded.as_ref(),
                plane3: plane3.as_ref(),
            },
        };
        if experts.form == Form::Unfused {
            let args = ExpertArgs {
                sources: abi::FROM_ALL,
                ..args
            };
            return self.decode_and_multiply(class, decoded, groups, args, 1);
        }
        if class.raw {
            self.matmul_raw(class, groups, args, 1)?;
        }
        if let Some(layout) = &class.plane3 {
            self.matmul_plane3(class, layout, groups, args)?;
        }
        if let Some(coded) = &class.coded {
            self.matmul_rans(class, coded, groups, args)?;
        }
        Ok(())
    }

    /// Decodes all coded matrices of the active experts to memory and leaves them there.
    pub(super) fn decode_alone(
        &self,
        experts: &Experts<D::Memory>,
        class: &Class<D::Memory>,
        groups: &Groups,
        operands: Operands,
    ) -> Result<()> {
        let words = class.count * class.rows * class.folds.cols / 8;
        let scratch = self.scratch::<u32>((groups.most - groups.begin) * words)?;
        let args = ExpertArgs {
            scratch: scratch.slice(),
            ..class_args(experts, class, groups, &operands, self.faults().slice())
        };
        let decoded = Decoded {
            coded: class.coded.as_ref(),
            plane3: class.plane3.as_ref(),
        };
        self.decode(class, &decoded, args)
    }

    /// Matrices in plane3: fused for one token, by way of scratch for several.
    fn matmul_plane3(
        &self,
        class: &Class<D::Memory>,
        layout: &Layout,
        groups: &Groups,
        args: ExpertArgs,
    ) -> Result<()> {
        let matrices = ((groups.most - groups.begin) * class.count) as u64;
        let launch = coded_plan::matmul_plane3(self.device().limits(), layout, matrices);
        let one = ExpertArgs {
            blocks: word("blocks", layout.blocks())?,
            min_tokens: 1,
            max_tokens: 1,
            ..args
        };
        match layout.strips {
            32 => self.launch::<MatmulPlane3>(launch, one)?,
            16 => self.launch::<MatmulPlane3Half>(launch, one)?,
            _ => self.launch::<MatmulPlane3Narrow>(launch, one)?,
        }
        if groups.tokens == 1 {
            return Ok(());
        }
        let decoded = Decoded {
            coded: None,
            plane3: Some(layout),
        };
        let args = ExpertArgs {
            sources: 1 << abi::CODEC_PLANE3,
            ..args
        };
        self.decode_and_multiply(class, decoded, groups, args, 2)
    }

    /// The matrices of `args.sources`, of experts with `least` tokens or more.
    pub(super) fn matmul_raw(
        &self,
        class: &Class<D::Memory>,
        groups: &Groups,
        mut args: ExpertArgs,
        least: u32,
    ) -> Result<()> {
        let limits = self.device().limits();
        let active = (args.active_end - args.active_begin) as usize;
        let matrices = (active * class.count) as u64;
        for several in [false, true] {
            if several && groups.tokens == 1 || !several && least > 1 {
                continue;
            }
            (args.min_tokens, args.max_tokens) = if several {
                (least.max(2), u32::MAX)
            } else {
                (1, 1)
            };
            let (launch, job_rows) = if several {
                coded_plan::matmul_raw_mma(limits, class.rows, &class.folds, matrices)
            } else {
                coded_plan::matmul_raw(limits, class.rows, &class.folds, matrices)
            };
            args.job_rows = job_rows;
            args.blocks = (class.rows as u32).div_ceil(job_rows);
            if several && args.grouped == 0 {
                self.launch::<MatmulRawMma>(launch, args)?;
            } else if several {
                self.launch::<MatmulRawMmaGrouped>(launch, args)?;
            } else if class.folds.fold < gpu::matmul_raw::NARROW {
                self.launch::<MatmulRawNarrow>(launch, args)?;
            } else {
                self.launch::<MatmulRaw>(launch, args)?;
            }
        }
        Ok(())
    }

    /// Decodes a few experts to scratch, multiplies from there, and so on. Experts with fewer than
    /// `least` tokens are passed over.
    pub(super) fn decode_and_multiply(
        &self,
        class: &Class<D::Memory>,
        decoded: Decoded<'_, D::Memory>,
        groups: &Groups,
        args: ExpertArgs,
        least: u32,
    ) -> Result<()> {
        let words = class.count * class.rows * class.folds.cols / 8;
        let at_once = plan::decoded_at_once(4 * words, groups.most - groups.begin);
        let scratch = self.scratch::<u32>(at_once * words)?;
        for begin in (groups.begin..groups.most).step_by(at_once) {
            let end = (begin + at_once).min(groups.most);
            let args = ExpertArgs {
                scratch: scratch.slice(),
                active_begin: begin as u32,
                active_end: end as u32,
                min_tokens: least,
                max_tokens: u32::MAX,
                ..args
            };
            self.decode(class, &decoded, args)?;
            self.matmul_raw(class, groups, args, least)?;
        }
        Ok(())
    }

    /// Decodes the coded matrices of `args`' active experts to `args.scratch`.
    pub(super) fn decode(
        &self,
        class: &Class<D::Memory>,
        decoded: &Decoded<'_, D::Memory>,
        args: ExpertArgs,
    ) -> Result<()> {
        let limits = self.device().limits();
        let matrices = (args.active_end - args.active_begin) as usize * class.count;
        if let Some(coded) = decoded.coded {
            let jobs = matrices * coded.blocks * class.folds.segs();
            let launch = coded_plan::decode_rans(limits, coded.symbol, jobs as u64)
                .map_err(|e| self.does_not_fit(e))?;
            let args = ExpertArgs {
                table: coded.table.slice(),
                blocks: coded.blocks as u32,
                ..args
            };
            match coded.symbol {
                Symbol::Pair => self.launch::<DecodeRansPair>(launch, args)?,
                Symbol::Triple => self.launch::<DecodeRansTriple>(launch, args)?,
            }
        }
        if let Some(layout) = decoded.plane3 {
            let launch = coded_plan::decode_plane3(limits, layout, matrices as u64);
            let args = ExpertArgs {
                blocks: word("blocks", layout.blocks())?,
                split: (layout.segs() / class.folds.segs()) as u32,
                ..args
            };
            self.launch::<DecodePlane3>(launch, args)?;
        }
        Ok(())
    }
}

/// A launch over all active experts' matrices of a class, of any number of tokens.
pub(super) fn class_args<M: DeviceMemory>(
    experts: &Experts<M>,
    class: &Class<M>,
    groups: &Groups,
    operands: &Operands,
    faults: Slice,
) -> ExpertArgs {
    let args = ExpertArgs {
        descs: experts.descs.slice(),
        active: groups.active,
        n_active: groups.n_active,
        x: operands.x,
        gsum: operands.gsum,
        row_map: operands.row_map,
        out: operands.out,
        faults,
        first: class.first as u32,
        count: class.count as u32,
        slots: groups.slots as u32,
        active_begin: groups.begin as u32,
        active_end: groups.most as u32,
        min_tokens: 1,
        max_tokens: u32::MAX,
        grouped: (experts.shape.scales == ScaleKind::G64) as u32,
        ..Default::default()
    }
    .with_shape(class.rows, &class.folds);
    ExpertArgs {
        split: class.split(experts.form) as u32,
        sources: abi::FROM_STREAM,
        ..args
    }
}

/// What of a class is decoded to scratch.
pub(super) struct Decoded<'a, M> {
    pub coded: Option<&'a Coded<M>>,
    pub plane3: Option<&'a Layout>,
}
