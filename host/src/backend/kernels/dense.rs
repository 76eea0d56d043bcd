//! The operators with dense weights, of bf16, of bytes or of f32, as launches.

use cuda_std::mem::Slice;

use super::buffer::{Buffer, View, blocks, input, output, word};
use super::device::{Device, Launch};
use super::error::Result;
use super::ops::KernelBackend;
use super::plan::{self, Numbers};
use super::table::*;
use crate::backend::{Mla, Rows, RowsMut, Weight};

/// Rows of a weight as kernels take them.
#[derive(Clone, Copy)]
struct Part {
    weight: Slice,
    /// f32 one a row of bytes; else empty.
    scales: Slice,
    numbers: Numbers,
}

/// The rows of `weight` from row `skip` on, `cols` columns each, at least `rows` of them.
fn part<D: Device>(
    what: &'static str,
    weight: Weight<'_, KernelBackend<D>>,
    (skip, rows, cols): (usize, usize, usize),
) -> Result<Part> {
    let (at, len) = (skip.saturating_mul(cols), rows.saturating_mul(cols));
    Ok(match weight {
        Weight::Bf16(bits) => Part {
            weight: bits.from(what, at, len)?,
            scales: Slice::EMPTY,
            numbers: Numbers::Bf16,
        },
        Weight::Int8 { bytes, scales } => Part {
            weight: bytes.from(what, at, len)?,
            scales: scales.from(what, skip, rows)?,
            numbers: Numbers::Int8,
        },
        Weight::F32(numbers) => Part {
            weight: numbers.from(what, at, len)?,
            scales: Slice::EMPTY,
            numbers: Numbers::F32,
        },
    })
}

/// Batches of a dense layer and the elements or rows between them.
struct Batch {
    n: u32,
    x: u32,
    weight: u32,
    out: u32,
}

impl<D: Device> KernelBackend<D> {
    pub(super) fn embed_rows(
        &self,
        table: Weight<'_, Self>,
        ids: &Buffer<u32, D::Memory>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        let to = output("embed: out", &out, tokens, cols)?;
        let len = match table {
            Weight::Bf16(bits) => bits.len(),
            Weight::Int8 { bytes, .. } => bytes.len(),
            Weight::F32(numbers) => numbers.len(),
        };
        let vocab = len.checked_div(cols).unwrap_or(0);
        let part = part("embed: table", table, (0, vocab, cols))?;
        let args = gpu::embed::EmbedArgs {
            table: part.weight,
            scales: part.scales,
            ids: ids.from("embed: ids", 0, tokens)?,
            out: to.slice,
            vocab: word("vocabulary", vocab)?,
            cols: word("columns", cols)?,
            out_stride: to.stride,
            reserved: 0,
        };
        let blocks = args.cols.div_ceil(gpu::embed::THREADS);
        let launch = Launch::new([blocks, word("tokens", tokens)?, 1], gpu::embed::THREADS);
        match part.numbers {
            Numbers::Bf16 => self.launch::<Embed>(launch, args),
            Numbers::Int8 => self.launch::<EmbedInt8>(launch, args),
            Numbers::F32 => self.launch::<EmbedF32>(launch, args),
        }
    }

    pub(super) fn dense(
        &self,
        x: Rows<'_, Buffer<f32, D::Memory>>,
        weight: Weight<'_, Self>,
        (rows, cols): (usize, usize),
        tokens: usize,
        add: bool,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        let from = input("linear: x", x, tokens, cols)?;
        let to = output("linear: out", &out, tokens, rows)?;
        let part = part("linear: weight", weight, (0, rows, cols))?;
        let batch = Batch {
            n: 1,
            x: 0,
            weight: 0,
            out: 0,
        };
        self.multiply(from, part, (rows, cols), tokens, add, to, batch)
    }

    #[allow(clippy::too_many_arguments)]
    fn multiply(
        &self,
        x: View,
        part: Part,
        (rows, cols): (usize, usize),
        tokens: usize,
        add: bool,
        out: View,
        batch: Batch,
    ) -> Result<()> {
        let unit = match part.numbers {
            Numbers::Int8 => 8,
            Numbers::Bf16 | Numbers::F32 => 16,
        };
        let vector = x.aligned()
            && cols.is_multiple_of(8)
            && batch.x.is_multiple_of(4)
            && part.weight.addr.is_multiple_of(unit);
        let (rows, cols) = (word("rows", rows)?, word("columns", cols)?);
        let tokens = word("tokens", tokens)?;
        let add = if add { gpu::dense::ADD } else { 0 };
        let of = if vector { gpu::dense::VECTOR } else { 0 };
        let args = gpu::dense::LinearArgs {
            x: x.slice,
            weight: part.weight,
            scales: part.scales,
            out: out.slice,
            rows,
            cols,
            tokens,
            x_stride: x.stride,
            out_stride: out.stride,
            x_batch: batch.x,
            weight_batch: batch.weight,
            out_batch: batch.out,
            flags: add | of,
            reserved: 0,
        };
        let limits = self.device().limits();
        let (numbers, shape) = (part.numbers, (rows, cols));
        let (tile, launch) = plan::linear(limits, shape, tokens, batch.n, vector, numbers);
        match (numbers, tile) {
            (Numbers::Bf16, (1, 1)) => self.launch::<LinearThin>(launch, args),
            (Numbers::Bf16, (2, 1)) => self.launch::<LinearTwo>(launch, args),
            (Numbers::Bf16, (4, 1)) => self.launch::<LinearFour>(launch, args),
            (Numbers::Bf16, (2, 2)) => self.launch::<LinearPair>(launch, args),
            (Numbers::Bf16, (2, 4)) => self.launch::<LinearQuad>(launch, args),
            (Numbers::Bf16, (4, 4)) => self.launch::<LinearMany>(launch, args),
            (Numbers::Bf16, _) => self.launch::<LinearTile>(launch, args),
            (Numbers::Int8, (1, 1)) => self.launch::<LinearInt8Thin>(launch, args),
            (Numbers::Int8, (2, 1)) => self.launch::<LinearInt8Two>(launch, args),
            (Numbers::Int8, (4, 1)) => self.launch::<LinearInt8Four>(launch, args),
            (Numbers::Int8, (2, 2)) => self.launch::<LinearInt8Pair>(launch, args),
            (Numbers::Int8, (2, 4)) => self.launch::<LinearInt8Quad>(launch, args),
            (Numbers::Int8, (4, 4)) => self.launch::<LinearInt8Many>(launch, args),
            (Numbers::Int8, _) => self.launch::<LinearInt8Tile>(launch, args),
            (Numbers::F32, (1, 1)) => self.launch::<LinearF32Thin>(launch, args),
            (Numbers::F32, (2, 1)) => self.launch::<LinearF32Two>(launch, args),
            (Numbers::F32, (4, 1)) => self.launch::<LinearF32Four>(launch, args),
            (Numbers::F32, (2, 2)) => self.launch::<LinearF32Pair>(launch, args),
            (Numbers::F32, (2, 4)) => self.launch::<LinearF32Quad>(launch, args),
            (Numbers::F32, (4, 4)) => self.launch::<LinearF32Many>(launch, args),
            (Numbers::F32, _) => unreachable!("blocks share no tiles of f32"),
        }
    }

    pub(super) fn absorb(
        &self,
        q: Rows<'_, Buffer<f32, D::Memory>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        let (q_head, out_head) = (mla.nope + mla.rope, mla.latent + mla.rope);
        let q = input("absorb_query: q", q, tokens, mla.heads * q_head)?;
        let to = output("absorb_query: out", &out, tokens, mla.heads * out_head)?;
        let head_rows = mla.nope + mla.value;
        let shape = (0, mla.heads * head_rows, mla.latent);
        let part = part("absorb_query: kv_b", kv_b, shape)?;
        let args = gpu::absorb::AbsorbArgs {
            q: q.slice,
            kv_b: part.weight,
            scales: part.scales,
            out: to.slice,
            q_stride: q.stride,
            q_head: word("query head", q_head)?,
            out_stride: to.stride,
            out_head: word("latent head", out_head)?,
            head_rows: word("rows of a head", head_rows)?,
            nope: word("nope", mla.nope)?,
            latent: word("latent", mla.latent)?,
            tokens: word("tokens", tokens)?,
        };
        let columns = match part.numbers {
            Numbers::Bf16 => gpu::absorb::COLS,
            Numbers::Int8 => gpu::absorb::COLS_INT8,
            Numbers::F32 => gpu::absorb::COLS_F32,
        };
        let grid = [
            blocks(mla.latent, columns),
            word("heads", mla.heads)?,
            blocks(tokens, gpu::absorb::TOKENS),
        ];
        let shared = gpu::absorb::shared_bytes(args.nope);
        let launch = Launch::new(grid, columns).shared(shared);
        match part.numbers {
            Numbers::Bf16 => self.launch::<AbsorbQuery>(launch, args),
            Numbers::Int8 => self.launch::<AbsorbQueryInt8>(launch, args),
            Numbers::F32 => self.launch::<AbsorbQueryF32>(launch, args),
        }
    }

    pub(super) fn expand(
        &self,
        x: Rows<'_, Buffer<f32, D::Memory>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Buffer<f32, D::Memory>>,
    ) -> Result<()> {
        let from = input("expand_value: x", x, tokens, mla.heads * mla.latent)?;
        let to = output("expand_value: out", &out, tokens, mla.heads * mla.value)?;
        let head_rows = mla.nope + mla.value;
        let rows = (mla.heads * head_rows).saturating_sub(mla.nope);
        let part = part("expand_value: kv_b", kv_b, (mla.nope, rows, mla.latent))?;
        let batch = Batch {
            n: word("heads", mla.heads)?,
            x: word("latent", mla.latent)?,
            weight: word("rows of a head", head_rows)?,
            out: word("value", mla.value)?,
        };
        let shape = (mla.value, mla.latent);
        self.multiply(from, part, shape, tokens, false, to, batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::kernels::CudaDevice;
    use crate::backend::kernels::measured::median;
    use crate::backend::{Backend, rows, rows_mut};
    use crate::bench::synth::Rng;

    /// What a matrix takes on one device, and what it takes if another has half of its rows, reads `x` where
    /// it is and writes its part of the product where it belongs.
    #[test]
    #[ignore = "a measurement: it takes two GPUs and prints times; only the product is asserted"]
    fn rows_over_two_devices() {
        let devices = [0, 1].map(|n| CudaDevice::new(n).unwrap());
        let on = [0, 1].map(|i| KernelBackend::new(devices[i].clone()).unwrap());
        assert!(devices[1].reaches(&devices[0]));
        for (name, n, cols) in [
            ("o_proj", 6144, 16384),
            ("q_b", 16384, 2048),
            ("q_a and kv_a", 2624, 6144),
            ("head", 154_880, 6144),
        ] {
            let bytes: Vec<i8> = (0..n * cols).map(|i| (i * 31 % 251) as u8 as i8).collect();
            let (half, len) = (n / 2, n * cols);
            let scales = vec![1e-3f32; n];
            let x = on[0].upload(&Rng::new(3).normals(cols)).unwrap();
            let mut out = on[0].alloc::<f32>(n).unwrap();
            // Together more than an L2 holds.
            let copies = (256 << 20) / len + 1;
            let whole = [0, 1].map(|d| -> Vec<_> {
                (0..copies).map(|_| on[d].upload(&bytes).unwrap()).collect()
            });
            let of_scales = [0, 1].map(|d| on[d].upload(&scales).unwrap());
            let weight = |bytes, scales| Weight::Int8 { bytes, scales };
            let one = median(40, &[&devices[0], &devices[1]], |i| {
                let (x, out) = (rows(&x, cols), rows_mut(&mut out, n));
                let weight = weight(&whole[0][i % copies], &of_scales[0]);
                on[0].linear(x, weight, n, cols, 1, false, out).unwrap();
            });
            let mut expected = vec![0.0; n];
            on[0].read(&out, 0, &mut expected).unwrap();
            on[0].write(&mut out, 0, &vec![0.0; n]).unwrap();
            let from = input("x", rows(&x, cols), 1, cols).unwrap();
            let to = output("out", &rows_mut(&mut out, n), 1, n).unwrap();
            let batch = || Batch {
                n: 1,
                x: 0,
                weight: 0,
                out: 0,
            };
            let part = |d: usize, i: usize, skip: usize, rows: usize| {
                let weight = weight(&whole[d][i % copies], &of_scales[d]);
                part("weight", weight, (skip, rows, cols)).unwrap()
            };
            let two = median(40, &[&devices[0], &devices[1]], |i| {
                devices[1].wait_for(&devices[0]).unwrap();
                let rest = View {
                    slice: out.from("out", half, n - half).unwrap(),
                    ..to
                };
                let shape = (n - half, cols);
                let of = part(1, i, half, n - half);
                (on[1].multiply(from, of, shape, 1, false, rest, batch())).unwrap();
                let of = part(0, i, 0, half);
                (on[0].multiply(from, of, (half, cols), 1, false, to, batch())).unwrap();
                devices[0].wait_for(&devices[1]).unwrap();
            });
            let mut found = vec![0.0; n];
            on[0].read(&out, 0, &mut found).unwrap();
            assert!(found == expected, "{name}");
            println!(
                "{name}: {n} x {cols}, {} MB: {one:.1} us on one device, {two:.1} on two",
                len / 1_000_000
            );
        }
    }
}
