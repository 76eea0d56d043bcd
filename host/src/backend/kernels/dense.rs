//! The operators with dense weights, of bf16 or of bytes, as launches.

use cuda_std::mem::Slice;

use super::device::{Device, Launch};
use super::ops::{Buffer, KernelBackend, Result, View, blocks, input, output, word};
use super::plan;
use super::table::*;
use crate::backend::{Mla, Rows, RowsMut, Weight};

/// Rows of a weight as kernels take them.
#[derive(Clone, Copy)]
struct Part {
    weight: Slice,
    /// f32 one a row of bytes; empty of bf16.
    scales: Slice,
    int8: bool,
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
            int8: false,
        },
        Weight::Int8 { bytes, scales } => Part {
            weight: bytes.from(what, at, len)?,
            scales: scales.from(what, skip, rows)?,
            int8: true,
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
        if part.int8 {
            self.launch::<EmbedInt8>(launch, args)
        } else {
            self.launch::<Embed>(launch, args)
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
        let unit = if part.int8 { 8 } else { 16 };
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
        let (tile, launch) = plan::linear(limits, rows, tokens, batch.n, vector);
        match (part.int8, tile) {
            (false, (1, 1)) => self.launch::<LinearThin>(launch, args),
            (false, (2, 1)) => self.launch::<LinearTwo>(launch, args),
            (false, (4, 1)) => self.launch::<LinearFour>(launch, args),
            (false, (2, 2)) => self.launch::<LinearPair>(launch, args),
            (false, (2, 4)) => self.launch::<LinearQuad>(launch, args),
            (false, _) => self.launch::<LinearMany>(launch, args),
            (true, (1, 1)) => self.launch::<LinearInt8Thin>(launch, args),
            (true, (2, 1)) => self.launch::<LinearInt8Two>(launch, args),
            (true, (4, 1)) => self.launch::<LinearInt8Four>(launch, args),
            (true, (2, 2)) => self.launch::<LinearInt8Pair>(launch, args),
            (true, (2, 4)) => self.launch::<LinearInt8Quad>(launch, args),
            (true, _) => self.launch::<LinearInt8Many>(launch, args),
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
        let columns = match part.int8 {
            true => gpu::absorb::COLS_INT8,
            false => gpu::absorb::COLS,
        };
        let grid = [
            blocks(mla.latent, columns),
            word("heads", mla.heads)?,
            blocks(tokens, gpu::absorb::TOKENS),
        ];
        let shared = gpu::absorb::shared_bytes(args.nope);
        let launch = Launch::new(grid, columns).shared(shared);
        if part.int8 {
            self.launch::<AbsorbQueryInt8>(launch, args)
        } else {
            self.launch::<AbsorbQuery>(launch, args)
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
