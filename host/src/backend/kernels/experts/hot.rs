//! Experts to device memory as int4: their records are copied there and decoded by the device, so that int4 is
//! loaded at the rate of records. What the device has no room to decode ([`KernelBackend::decodes`]) the host does.

use std::ops::Range;
use std::sync::PoisonError;

use cuda_std::mem::Slice;
use gpu::abi::{self, ExpertArgs, MatrixDesc};
use gpu::coded_plan;

use super::Class;
use super::load::{Places, record_descs};
use super::matmuls::Decoded;
use crate::archive::{LayerRecords, Record};
use crate::backend::Backend;
use crate::backend::kernels::buffer::{Buffer, word};
use crate::backend::kernels::device::{Device, DeviceMemory};
use crate::backend::kernels::error::{KernelError, Result};
use crate::backend::kernels::ops::KernelBackend;
use crate::codec::Codec;
use crate::expert::{ExpertShape, MatrixKind, RawMatrix};

/// Where an expert's matrices and scales are in its layer's memory. Those of a class follow one another, as
/// `decode_*` writes them.
pub(super) struct HotPlaces {
    packed: [usize; 3],
    scales: [usize; 3],
}

impl HotPlaces {
    pub fn take(places: &mut Places, shape: &ExpertShape) -> Self {
        let bytes = |kind: MatrixKind| {
            let (rows, cols) = shape.dims(kind);
            (rows * cols / 2, 4 * shape.scales.count(rows, cols))
        };
        let (gate, down) = (bytes(MatrixKind::Gate), bytes(MatrixKind::Down));
        let first = places.take(2 * gate.0);
        Self {
            packed: [first, first + gate.0, places.take(down.0)],
            scales: MatrixKind::ALL.map(|kind| places.take(bytes(kind).1)),
        }
    }

    /// The descriptor of a matrix whose layer is at address `base`.
    fn desc(
        &self,
        kind: MatrixKind,
        shape: &ExpertShape,
        base: u64,
        scale_format: u32,
    ) -> Result<MatrixDesc> {
        let (rows, cols) = shape.dims(kind);
        let at = |place: usize| base + place as u64;
        Ok(MatrixDesc {
            stream: Slice::new(at(self.packed[kind as usize]), (rows * cols / 8) as u64),
            scales: Slice::new(
                at(self.scales[kind as usize]),
                shape.scales.count(rows, cols) as u64,
            ),
            codec: abi::CODEC_RAW,
            scale_format,
            rows: word("rows", rows)?,
            cols: word("columns", cols)?,
            ..Default::default()
        })
    }
}

/// Copies of a wave: where to, and which bytes of its buffer.
pub(super) type Copies = Vec<(usize, Range<usize>)>;

/// What records land in, two halves.
pub type Landing<M> = [Buffer<u8, M>; 2];

/// Records on their way. Waves take turns in two halves: one is copied to while the other is decoded.
pub(super) struct Hot<M: DeviceMemory> {
    pub landing: Landing<M>,
    descs: [Buffer<MatrixDesc, M>; 2],
    /// The record at each place of a half, of one token each, as `decode_*` asks for.
    active: Buffer<[u32; 4], M>,
    n_active: Buffer<u32, M>,
    /// What is decoded with, learning what there is.
    classes: [Class<M>; 2],
    shape: ExpertShape,
    /// Address of the layer's memory.
    base: u64,
    /// Bytes of a record's place in a half.
    room: usize,
    /// The half that the wave goes to which is on its way.
    half: usize,
    /// Its records' descriptors, by their places in the half.
    coded: Vec<MatrixDesc>,
    /// Those places, and where in the layer's memory each is decoded to.
    wave: Vec<(usize, HotPlaces)>,
    /// Its copies to the half.
    pub copies: Copies,
}

impl<M: DeviceMemory> Hot<M> {
    /// The half that the wave's records go to.
    pub fn landing(&self) -> &M {
        self.landing[self.half].memory()
    }

    /// Takes the record of number `i` of a wave, at `bytes` of its buffer; `uploads` gets what goes to its place
    /// in the layer's memory as it is. Descriptors of that.
    pub fn take(
        &mut self,
        record: &Record<'_>,
        (expert, i): (usize, usize),
        bytes: Range<usize>,
        places: HotPlaces,
        uploads: &mut Copies,
    ) -> Result<[MatrixDesc; 3]> {
        let (base, shape) = (self.base, &self.shape);
        let to = i * self.room;
        let landed = self.landing().address() + to as u64;
        let coded = record_descs(record, landed, shape, expert, &mut self.classes)?;
        let mut descs = [MatrixDesc::default(); 3];
        for kind in MatrixKind::ALL {
            let k = kind as usize;
            let matrix = record.matrix(kind);
            let part = |r: &Range<usize>| bytes.start + r.start..bytes.start + r.end;
            uploads.push((places.scales[k], part(&matrix.scales)));
            if matches!(matrix.codec, Codec::Raw) {
                uploads.push((places.packed[k], part(&matrix.stream)));
            }
            descs[k] = places.desc(kind, shape, base, coded[k].scale_format)?;
        }
        let raw = |kind| matches!(record.matrix(kind).codec, Codec::Raw);
        if MatrixKind::ALL.into_iter().all(raw) {
            // Nothing is decoded of it.
            return Ok(descs);
        }
        self.copies.push((to, bytes));
        self.coded[3 * i..3 * i + 3].copy_from_slice(&coded);
        self.wave.push((i, places));
        Ok(descs)
    }
}

impl<D: Device> KernelBackend<D> {
    /// An expert in int4 to its places in `memory`.
    pub(super) fn upload_hot(
        &self,
        memory: &Buffer<u8, D::Memory>,
        places: &HotPlaces,
        shape: &ExpertShape,
        raw: &[RawMatrix<'_>; 3],
    ) -> Result<[MatrixDesc; 3]> {
        let base = memory.memory().address();
        let mut descs = [MatrixDesc::default(); 3];
        for (kind, m) in MatrixKind::ALL.into_iter().zip(raw) {
            let k = kind as usize;
            (self.device()).upload(memory.memory(), places.packed[k], &m.packed)?;
            let scales = bytemuck::cast_slice(&m.scales);
            (self.device()).upload(memory.memory(), places.scales[k], scales)?;
            descs[k] = places.desc(kind, shape, base, abi::SCALES_F32)?;
        }
        Ok(descs)
    }

    /// Whether the device has room to decode what `classes` have tables for.
    pub(super) fn decodes(&self, classes: &[Class<D::Memory>; 2]) -> bool {
        let limits = self.device().limits();
        let mut coded = classes.iter().filter_map(|c| c.coded.as_ref());
        coded.all(|c| coded_plan::decode_rans(limits, c.symbol, 1).is_ok())
    }

    /// For `waves` waves of `wave` records of up to `room` bytes, decoded to `memory`, the layer's.
    pub(super) fn hot(
        &self,
        records: &LayerRecords<'_>,
        shape: ExpertShape,
        memory: &Buffer<u8, D::Memory>,
        (waves, wave): (usize, usize),
        room: usize,
    ) -> Result<Hot<D::Memory>> {
        // Of one size for layers of several waves, whose largest records differ.
        let size = if waves > 1 {
            D::WAVE.max(room)
        } else {
            wave * room
        };
        let sizes = [size, if waves > 1 { size } else { 0 }];
        let cache = self.landing_cache().lock();
        let before = cache.unwrap_or_else(PoisonError::into_inner).take();
        let landing = match before {
            Some(there) if (there.iter().zip(sizes)).all(|(l, size)| l.len() >= size) => there,
            _ => [self.scratch(sizes[0])?, self.scratch(sizes[1])?],
        };
        let active: Vec<[u32; 4]> = (0..wave as u32).map(|i| [i, i, 1, 0]).collect();
        let second = if waves > 1 { wave } else { 0 };
        Ok(Hot {
            landing,
            descs: [self.scratch(3 * wave)?, self.scratch(3 * second)?],
            active: self.upload(&active)?,
            n_active: self.upload(&[wave as u32])?,
            classes: self.coded_classes(records, &shape)?,
            shape,
            base: memory.memory().address(),
            room,
            half: 0,
            coded: vec![MatrixDesc::default(); 3 * wave],
            wave: Vec::new(),
            copies: Vec::new(),
        })
    }

    /// Whether all blocks that the device was given to decode did, which has been waited for.
    pub(super) fn decoded(&self, layer: u32) -> Result<()> {
        let mut jobs = [0u32];
        let word = bytemuck::cast_slice_mut(&mut jobs);
        self.device().download(self.faults().memory(), 0, word)?;
        match jobs {
            [0] => Ok(()),
            [jobs] => Err(KernelError::CorruptLayer { layer, jobs }),
        }
    }

    /// Begins the next wave: what was copied of the one before is decoded to its places in `memory`. To be
    /// called where the stream waits for these copies; those of the next wave go beside it.
    pub(super) fn decode_wave(
        &self,
        hot: &mut Hot<D::Memory>,
        memory: &Buffer<u8, D::Memory>,
    ) -> Result<()> {
        let wave = std::mem::take(&mut hot.wave);
        if wave.is_empty() {
            return Ok(());
        }
        let descs = &hot.descs[hot.half];
        let bytes = bytemuck::cast_slice(&hot.coded);
        self.device().upload(descs.memory(), 0, bytes)?;
        hot.coded.fill(MatrixDesc::default());
        hot.half = 1 - hot.half;
        for (i, places) in wave {
            for class in &hot.classes {
                let words = class.count * class.rows * class.folds.cols / 8;
                let at = places.packed[class.first] / 4;
                let args = ExpertArgs {
                    descs: descs.slice(),
                    active: hot.active.slice(),
                    n_active: hot.n_active.slice(),
                    scratch: memory.memory().slice::<u32>(at, words),
                    faults: self.faults().slice(),
                    first: class.first as u32,
                    count: class.count as u32,
                    active_begin: i as u32,
                    active_end: i as u32 + 1,
                    min_tokens: 1,
                    max_tokens: u32::MAX,
                    ..Default::default()
                }
                .with_shape(class.rows, &class.folds);
                let decoded = Decoded {
                    coded: class.coded.as_ref().filter(|c| c.blocks > 0),
                    plane3: class.plane3.as_ref(),
                };
                self.decode(class, &decoded, args)?;
            }
        }
        Ok(())
    }
}
