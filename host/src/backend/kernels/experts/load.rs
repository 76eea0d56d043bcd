//! Experts to device memory: one allocation for a layer, and descriptors that point into it.

use cuda_std::mem::Slice;
use gpu::abi::{self, MatrixDesc};
use gpu::coded_plan;
use gpu::layout::Folds;
use gpu::plane3::Layout;

use super::hot::HotPlaces;
use super::{Class, Coded, Experts};
use crate::archive::{LayerRecords, Record};
use crate::backend::kernels::buffer::{Buffer, word};
use crate::backend::kernels::device::{ALIGNMENT, Device, DeviceMemory};
use crate::backend::kernels::error::{KernelError, Result};
use crate::backend::kernels::ops::KernelBackend;
use crate::backend::{Backend, LayerExperts, LoadExperts, Repin, TieredLayer};
use crate::codec::{Codec, ScaleFormat, Table};
use crate::expert::{ExpertShape, Form, MatrixKind, RawMatrix};
use crate::placement::Used;

/// Where parts of a layer go in its one allocation.
#[derive(Default)]
pub(super) struct Places {
    pub bytes: usize,
}

impl Places {
    pub fn take(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes = (at + bytes).next_multiple_of(ALIGNMENT);
        at
    }
}

fn class_of(kind: MatrixKind) -> usize {
    (kind == MatrixKind::Down) as usize
}

impl<D: Device> LoadExperts for KernelBackend<D> {
    fn load_experts(
        &self,
        layer: LayerExperts<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        match layer {
            LayerExperts::Raw(layer) => self.load_raw(layer, shape, form),
            LayerExperts::Coded { layer, records } => {
                self.load_coded(&layer, &records, shape, form)
            }
        }
    }

    fn load_tiers(
        &self,
        layer: &TieredLayer<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Option<Experts<D::Memory>>> {
        self.place_layer(layer, shape, form).map(Some)
    }

    fn loaded(&self) {
        self.drop_waves();
    }

    fn used(&self, experts: &Experts<D::Memory>) -> Used {
        experts.tiers.as_ref().map_or(Used::default(), |t| t.used())
    }

    fn repin(&self, experts: &Experts<D::Memory>) -> Result<Repin> {
        self.move_one(experts)
    }
}

impl<D: Device> KernelBackend<D> {
    /// What is the same for raw and coded layers: classes without codecs.
    fn classes(&self, shape: &ExpertShape) -> Result<[Class<D::Memory>; 2]> {
        let class = |first: usize, count: usize, kind: MatrixKind| -> Result<_> {
            let (rows, cols) = shape.dims(kind);
            let folds = Folds::new(cols).ok_or(KernelError::Dimension {
                what: "columns of experts",
                found: cols,
                expected: "a multiple of 64 from 64 to 8192",
            })?;
            Ok(Class {
                first,
                count,
                rows,
                folds,
                raw: false,
                coded: None,
                plane3: None,
            })
        };
        Ok([
            class(0, 2, MatrixKind::Gate)?,
            class(2, 1, MatrixKind::Down)?,
        ])
    }

    /// Refuses what a launch of the class would not fit.
    fn check_fit(&self, class: &Class<D::Memory>, form: Form) -> Result<()> {
        let Some(coded) = &class.coded else {
            return Ok(());
        };
        let (limits, folds, symbol) = (self.device().limits(), &class.folds, coded.symbol);
        let fit = match form {
            Form::Fused => coded_plan::matmul_rans(limits, symbol, folds, 1)
                .and_then(|_| coded_plan::matmul_rans_tokens(limits, symbol, folds, 8, 1))
                .and_then(|_| coded_plan::decode_rans(limits, symbol, 1))
                .map(|_| ()),
            Form::Unfused => coded_plan::decode_rans(limits, symbol, 1).map(|_| ()),
        };
        fit.map_err(|e| self.does_not_fit(e))
    }

    fn load_raw(
        &self,
        layer: Vec<[RawMatrix<'_>; 3]>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        let mut classes = self.classes(&shape)?;
        let mut places = Places::default();
        let mut at = Vec::with_capacity(layer.len());
        for (expert, matrices) in layer.iter().enumerate() {
            for kind in MatrixKind::ALL {
                let (rows, cols) = shape.dims(kind);
                let m = &matrices[kind as usize];
                for (field, found, expected) in [
                    ("packed bytes", m.packed.len(), rows * cols / 2),
                    ("scales", m.scales.len(), shape.scales.count(rows, cols)),
                ] {
                    if found != expected {
                        return Err(KernelError::Matrix {
                            expert,
                            matrix: kind.name(),
                            field,
                            found,
                            expected,
                        });
                    }
                }
            }
            at.push(HotPlaces::take(&mut places, &shape));
        }
        classes.iter_mut().for_each(|c| c.raw = !layer.is_empty());
        let memory = self.scratch::<u8>(places.bytes)?;
        let mut descs = Vec::with_capacity(3 * layer.len());
        for (matrices, at) in layer.iter().zip(at) {
            descs.extend(self.upload_hot(&memory, &at, &shape, matrices)?);
        }
        self.place(shape, form, memory, descs, classes)
    }

    pub(super) fn place(
        &self,
        shape: ExpertShape,
        form: Form,
        memory: Buffer<u8, D::Memory>,
        descs: Vec<MatrixDesc>,
        classes: [Class<D::Memory>; 2],
    ) -> Result<Experts<D::Memory>> {
        for class in &classes {
            self.check_fit(class, form)?;
        }
        let tables = classes.iter().filter_map(|c| c.coded.as_ref());
        let tables: usize = tables.map(|c| 4 * c.table.len()).sum();
        Ok(Experts {
            shape,
            experts: descs.len() / 3,
            form,
            bytes: memory.len() + size_of_val(&*descs) + tables,
            memory,
            descs: self.upload(&descs)?,
            classes,
            tiers: None,
            places: None,
            peers: Vec::new(),
        })
    }

    fn table(&self, table: &Table) -> Result<Coded<D::Memory>> {
        Ok(Coded {
            symbol: table.symbol(),
            table: self.upload(table.entries())?,
            blocks: 0,
        })
    }

    /// Records as they are, each at a multiple of [`ALIGNMENT`]; descriptors point into them.
    fn load_coded(
        &self,
        layer: &LayerRecords<'_>,
        records: &[Record<'_>],
        shape: ExpertShape,
        form: Form,
    ) -> Result<Experts<D::Memory>> {
        let mut classes = self.coded_classes(layer, &shape)?;
        let mut places = Places::default();
        let at: Vec<usize> = records.iter().map(|r| places.take(r.bytes.len())).collect();
        let memory = self.scratch::<u8>(places.bytes)?;
        let mut descs = Vec::with_capacity(3 * records.len());
        for (expert, (record, at)) in records.iter().zip(at).enumerate() {
            self.device().upload(memory.memory(), at, record.bytes)?;
            let base = memory.memory().address() + at as u64;
            descs.extend(record_descs(record, base, &shape, expert, &mut classes)?);
        }
        drop_unused(&mut classes);
        self.place(shape, form, memory, descs, classes)
    }

    /// Classes with the layer's tables, used or not.
    pub(super) fn coded_classes(
        &self,
        layer: &LayerRecords<'_>,
        shape: &ExpertShape,
    ) -> Result<[Class<D::Memory>; 2]> {
        let mut classes = self.classes(shape)?;
        for kind in [MatrixKind::Gate, MatrixKind::Down] {
            if let Some((_, table)) = layer.table(kind) {
                classes[class_of(kind)].coded = Some(self.table(table)?);
            }
        }
        Ok(classes)
    }
}

/// Drops tables that no record of the layer uses.
pub(super) fn drop_unused<M>(classes: &mut [Class<M>; 2]) {
    for class in classes {
        if class.coded.as_ref().is_some_and(|c| c.blocks == 0) {
            class.coded = None;
        }
    }
}

/// Descriptors of the matrices of a record at address `base`; the classes learn what there is.
pub(super) fn record_descs<M>(
    record: &Record<'_>,
    base: u64,
    shape: &ExpertShape,
    expert: usize,
    classes: &mut [Class<M>; 2],
) -> Result<[MatrixDesc; 3]> {
    let part = |range: &std::ops::Range<usize>, size: usize| {
        Slice::new(base + range.start as u64, (range.len() / size) as u64)
    };
    let mut descs = [MatrixDesc::default(); 3];
    for kind in MatrixKind::ALL {
        let m = record.matrix(kind);
        let (rows, cols) = shape.dims(kind);
        for (field, found, expected) in [("rows", m.rows, rows), ("columns", m.cols, cols)] {
            if found != expected {
                return Err(KernelError::Matrix {
                    expert,
                    matrix: kind.name(),
                    field,
                    found,
                    expected,
                });
            }
        }
        let class = &mut classes[class_of(kind)];
        let n_blocks = m.n_blocks();
        match (&m.codec, &mut class.coded) {
            (Codec::Rans(_), Some(coded)) => coded.blocks = coded.blocks.max(n_blocks),
            (Codec::Rans(_), None) => unreachable!("a checked record's table exists"),
            (Codec::Raw, _) => class.raw = true,
            (Codec::Plane3, _) => class.plane3 = Layout::new(rows, cols),
        }
        descs[kind as usize] = MatrixDesc {
            stream: part(&m.stream, 4),
            blocks: part(&m.offsets, 4),
            scales: part(&m.scales, m.scale_format.bytes()),
            codec: match m.codec {
                Codec::Raw => abi::CODEC_RAW,
                Codec::Rans(symbol) => abi::rans_codec(symbol),
                Codec::Plane3 => abi::CODEC_PLANE3,
            },
            scale_format: match m.scale_format {
                ScaleFormat::F32 => abi::SCALES_F32,
                ScaleFormat::Amax16 => abi::SCALES_AMAX,
            },
            rows: word("rows", rows)?,
            cols: word("columns", cols)?,
            n_blocks: word("blocks", n_blocks)?,
            reserved: 0,
        };
    }
    Ok(descs)
}
