//! What a model's forward pass is made of.
//!
//! [`Backend`] is one set of operators; `host::model` is written once over it. Every implementation
//! gives the same bits (`gpu::arith`, `docs/determinism.md`), so that tests compare for equality.
//! Activations are f32, one row a token; dense weights are a [`Weight`], row-major `[rows, cols]`.

pub mod cpu;
pub mod kernels;
pub mod reference;
pub mod split;

use bytemuck::Pod;

use std::sync::Arc;

use crate::archive::{Archive, LayerRecords, Record};
use crate::disk::reader::DirectFile;
use crate::expert::{ExpertShape, Form, RawMatrix};
use crate::placement::{Tier, Used};
use split::Parts;

/// A strided view of rows to read: row `t` starts at `offset + t * stride` (elements).
pub struct Rows<'a, B> {
    /// Where the rows are.
    pub buf: &'a B,
    /// First element of row 0.
    pub offset: usize,
    /// Elements from row to row.
    pub stride: usize,
}

impl<B> Clone for Rows<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Rows<'_, B> {}

/// A strided view of rows to write.
pub struct RowsMut<'a, B> {
    /// Where the rows are.
    pub buf: &'a mut B,
    /// First element of row 0.
    pub offset: usize,
    /// Elements from row to row.
    pub stride: usize,
    /// Whether the rows are those of the tokens' positions, as a cache has them, so that a recorded
    /// pass ([`Backend::record`]) writes others each time. Row 0 is at `first`.
    pub moves: bool,
}

/// Rows of `stride` elements from the start of `buf`.
pub fn rows<B>(buf: &B, stride: usize) -> Rows<'_, B> {
    Rows {
        buf,
        offset: 0,
        stride,
    }
}

/// Rows of `stride` elements from the start of `buf`, to write.
pub fn rows_mut<B>(buf: &mut B, stride: usize) -> RowsMut<'_, B> {
    RowsMut {
        buf,
        offset: 0,
        stride,
        moves: false,
    }
}

/// Dimensions of multi-head latent attention.
///
/// Queries and cache rows have `latent + rope` elements: `[c | k_rope]`. `kv_b` is
/// `[heads * (nope + value), latent]`: per head `nope` rows of keys, then `value` rows of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mla {
    /// Attention heads.
    pub heads: usize,
    /// `qk_nope_head_dim`.
    pub nope: usize,
    /// `qk_rope_head_dim`.
    pub rope: usize,
    /// `v_head_dim`.
    pub value: usize,
    /// `kv_lora_rank`.
    pub latent: usize,
    /// Factor of the scores.
    pub scaling: f32,
}

/// Dimensions of the sparse attention's indexer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Index {
    /// `index_n_heads`.
    pub heads: usize,
    /// `index_head_dim`.
    pub dim: usize,
    /// `index_topk`.
    pub top_k: usize,
}

impl Index {
    /// Factor of a head's weight, `heads^-0.5`: f64 arithmetic, rounded once.
    pub fn weight_factor(&self) -> f32 {
        (1.0 / (self.heads as f64).sqrt()) as f32
    }

    /// Factor of a dot product, `dim^-0.5`: f64 arithmetic, rounded once.
    pub fn dot_factor(&self) -> f32 {
        (1.0 / (self.dim as f64).sqrt()) as f32
    }
}

/// Which cached positions a token attends to.
pub enum Attend<'a, B> {
    /// All positions up to its own.
    Causal,
    /// Row `t` of a `[tokens, top_k]` list: the first `min(top_k, first + t + 1)` entries,
    /// ascending positions.
    Listed {
        /// The lists.
        lists: &'a B,
        /// Their stride.
        top_k: usize,
    },
}

/// How a cache keeps the rows that attention reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    /// As they are computed.
    #[default]
    F32,
    /// Each element rounded to bf16 once.
    Bf16,
}

impl KvFormat {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::Bf16 => 2,
        }
    }

    /// `f32` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::Bf16 => "bf16",
        }
    }
}

/// A cache's rows, as attention reads them.
pub enum Cached<'a, B: Backend> {
    /// f32.
    F32(&'a B::Buf<f32>),
    /// bf16 bits.
    Bf16(&'a B::Buf<u16>),
}

impl<B: Backend> Clone for Cached<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Cached<'_, B> {}

/// What a router makes of its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The logistic function of each.
    Sigmoid,
    /// Softmax over all experts.
    Softmax,
}

/// How a layer's router chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Scores.
    pub scoring: Scoring,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts a token goes to.
    pub top_k: usize,
    /// Groups that experts form.
    pub groups: usize,
    /// Groups that stay in the choice.
    pub top_groups: usize,
    /// Whether the weights are divided by their sum (plus 1e-20).
    pub normalise: bool,
    /// `routed_scaling_factor`.
    pub scaling: f32,
}

/// A dense matrix where a back end has it.
pub enum Weight<'a, B: Backend> {
    /// bf16 bits.
    Bf16(&'a B::Buf<u16>),
    /// Signed bytes and a scale for each row. An operator gives what it gives for bytes as numbers,
    /// times the scale (rounded), before anything is added to that.
    Int8 {
        /// The bytes.
        bytes: &'a B::Buf<i8>,
        /// The scales.
        scales: &'a B::Buf<f32>,
    },
    /// f32.
    F32(&'a B::Buf<f32>),
}

impl<B: Backend> Clone for Weight<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Weight<'_, B> {}

/// One layer of a routing trace.
pub struct TraceLayer<'a, B: Backend> {
    /// Experts, `[rows, layers, top_k]`.
    pub chosen: &'a B::Buf<u32>,
    /// Their weights, likewise.
    pub given: &'a B::Buf<f32>,
    /// Rows: tokens of the trace.
    pub rows: usize,
    /// Layers of a row.
    pub layers: usize,
    /// Which of them.
    pub layer: usize,
}

/// The operators of a forward pass.
///
/// `tokens` is the number of rows; `first` the position of row 0. All dimensions are in elements.
/// A back end may run operators asynchronously; [`Backend::read`] waits for what it reads.
pub trait Backend: Sized {
    /// `len` elements of `T` where the back end computes.
    type Buf<T: Pod>;
    /// One layer's routed experts, placed.
    type Experts;
    /// Operators that were recorded.
    type Recording;
    /// What goes wrong here: out of memory, a lost device, a kernel's fault.
    type Error: std::error::Error + Send + Sync + 'static;

    /// For people: `cpu (AVX-512)`, `cuda:0 NVIDIA H200`, …
    fn describe(&self) -> String;

    /// `len` zeroed elements.
    fn alloc<T: Pod>(&self, len: usize) -> Result<Self::Buf<T>, Self::Error>;
    /// A copy of `data`.
    fn upload<T: Pod>(&self, data: &[T]) -> Result<Self::Buf<T>, Self::Error>;
    /// Overwrites `data.len()` elements from `offset` on.
    fn write<T: Pod>(
        &self,
        buf: &mut Self::Buf<T>,
        offset: usize,
        data: &[T],
    ) -> Result<(), Self::Error>;
    /// Reads `out.len()` elements from `offset` on.
    fn read<T: Pod>(
        &self,
        buf: &Self::Buf<T>,
        offset: usize,
        out: &mut [T],
    ) -> Result<(), Self::Error>;

    /// `len` elements of `from` from `start` on to `to` from `at` on.
    fn copy<T: Pod>(
        &self,
        from: &Self::Buf<T>,
        start: usize,
        to: &mut Self::Buf<T>,
        at: usize,
        len: usize,
    ) -> Result<(), Self::Error> {
        let mut data = vec![T::zeroed(); len];
        self.read(from, start, &mut data)?;
        self.write(to, at, &data)
    }

    /// `out[t] = table[ids[t]]`, `[vocab, cols]`, as f32.
    fn embed(
        &self,
        table: Weight<'_, Self>,
        ids: &Self::Buf<u32>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// `out = (x * 1/sqrt(dot(x, x)/cols + eps)) * weight`, weight `[cols]`.
    fn rms_norm(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        weight: &Self::Buf<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// `d = x - sum(x)/cols`, `out = fma(d * 1/sqrt(dot(d, d)/cols + eps), weight, bias)`.
    #[allow(clippy::too_many_arguments)]
    fn layer_norm(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        weight: &Self::Buf<f32>,
        bias: &Self::Buf<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// `out[t][r] = dot(weight[r], x[t])`, plus what was there where `add`. Weight `[rows, cols]`,
    /// `cols` a multiple of 8.
    #[allow(clippy::too_many_arguments)]
    fn linear(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        weight: Weight<'_, Self>,
        rows: usize,
        cols: usize,
        tokens: usize,
        add: bool,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// `out = silu(gate) * up`, elementwise over rows of `cols`.
    fn silu_mul(
        &self,
        gate: Rows<'_, Self::Buf<f32>>,
        up: Rows<'_, Self::Buf<f32>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// Interleaved RoPE: of each head's `rope + pass` elements the first `rope` are pairs
    /// `(x0, x1), (x2, x3), …`; pair `i` turns by `position * inv_freq[i]` and its members go to
    /// `i` and `rope/2 + i` of the output. The other `pass` elements are copied.
    ///
    /// Head `h` of token `t` reads at `t * x.stride + h * x_head`, writes at
    /// `t * out.stride + h * out_head`, from the views' offsets. `inv_freq` is f32 `[rope/2]`;
    /// angle and products are as in `gpu::arith::{sin_cos, rotate}`.
    #[allow(clippy::too_many_arguments)]
    fn rope(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        x_head: usize,
        heads: usize,
        rope: usize,
        pass: usize,
        inv_freq: &Self::Buf<f32>,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
        out_head: usize,
    ) -> Result<(), Self::Error>;

    /// `out = x` rounded to bf16 ([`gpu::arith::to_bf16`]).
    fn narrow(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<u16>>,
    ) -> Result<(), Self::Error>;

    /// Queries into the latent space: per head,
    /// `out[h][c] = sum over j ascending of fma(q[h][j], kv_b[h * (nope + value) + j][c])`, from +0;
    /// `q[h][j]` is multiplied by the row's scale first (rounded) where there is one.
    /// Head `h` of `q` is at `h * (nope + rope)`, of `out` at `h * (latent + rope)`; the `rope`
    /// part of `out` is left alone.
    fn absorb_query(
        &self,
        q: Rows<'_, Self::Buf<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// Attention of latent queries `[tokens, heads * (latent + rope)]` to cache rows
    /// `[_, latent + rope]` (row = position): scores `scaling * dot(q, row)`, softmax in chunks of
    /// `gpu::arith::ATTENTION_CHUNK` listed positions, `out[h] = sum p * row[..latent] / sum p`,
    /// `[tokens, heads * latent]`. Rows of bf16 are taken as f32.
    #[allow(clippy::too_many_arguments)]
    fn attention(
        &self,
        q: Rows<'_, Self::Buf<f32>>,
        cache: Cached<'_, Self>,
        attend: Attend<'_, Self::Buf<u32>>,
        mla: &Mla,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// Values out of the latent space: `out[h][j] = dot(kv_b[h * (nope + value) + nope + j], x[h])`.
    fn expand_value(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// The indexer: score of position `p` for token `t` is
    /// `sum over heads ascending of fma(weights[t][h] * heads^-0.5, max(dot(q[t][h], keys[p]) * dim^-0.5, 0))`
    /// from +0, for `p <= first + t`. The `min(top_k, first + t + 1)` best (of equal scores the
    /// lowest positions) go to `lists[t]`, ascending, stride `top_k`.
    #[allow(clippy::too_many_arguments)]
    fn index(
        &self,
        q: Rows<'_, Self::Buf<f32>>,
        keys: &Self::Buf<f32>,
        weights: Rows<'_, Self::Buf<f32>>,
        index: &Index,
        first: usize,
        tokens: usize,
        lists: &mut Self::Buf<u32>,
    ) -> Result<(), Self::Error>;

    /// Router: `s = sigmoid(logit)`, or `s = e / sum of e by ascending expert from +0` of
    /// `e = exp(logit - largest logit)`; choice by `s + bias` (of equal values the lowest
    /// expert), limited to the `top_groups` groups with the largest sum of their two best choices
    /// (best + second best; of equal sums the lowest group);
    /// weights are the chosen `s`, by ascending expert divided by (their sum from +0, plus 1e-20)
    /// where `normalise`, times `scaling`. `ids` and `weights` are `[tokens, top_k]`, ascending ids.
    fn route(
        &self,
        logits: Rows<'_, Self::Buf<f32>>,
        bias: &Self::Buf<f32>,
        router: &Router,
        tokens: usize,
        ids: &mut Self::Buf<u32>,
        weights: &mut Self::Buf<f32>,
    ) -> Result<(), Self::Error>;

    /// A trace in the router's place: `ids` and `weights`, `[tokens, top_k]`, of token `t` are the
    /// layer's of row `(first + t) mod rows`.
    fn replay(
        &self,
        trace: TraceLayer<'_, Self>,
        top_k: usize,
        first: usize,
        tokens: usize,
        ids: &mut Self::Buf<u32>,
        weights: &mut Self::Buf<f32>,
    ) -> Result<(), Self::Error>;

    /// The routed experts: `out[t] = sum over t's experts ascending of fma(weight, y, acc)` from
    /// +0, `y = down(silu(gate(x)) * up(x))`; inputs of gate/up and of down are quantised per token
    /// (`gpu::arith::{activation_scale, quantise}`), dot products exact. `x` has the experts'
    /// hidden size as columns; `ids`, `weights` `[tokens, top_k]` as [`Backend::route`] gives them.
    #[allow(clippy::too_many_arguments)]
    fn experts(
        &self,
        experts: &Self::Experts,
        x: Rows<'_, Self::Buf<f32>>,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// [`Backend::experts`], with a guess of what a later layer will choose, whose experts may be brought nearer
    /// meanwhile. It changes no result.
    #[allow(clippy::too_many_arguments)]
    fn experts_and_next(
        &self,
        experts: &Self::Experts,
        _next: Guess<'_, Self>,
        x: Rows<'_, Self::Buf<f32>>,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error> {
        self.experts(experts, x, ids, weights, top_k, tokens, out)
    }

    /// Whether [`Backend::experts_and_next`] has a use for a guess of what is chosen of these.
    fn guessable(&self, _experts: &Self::Experts) -> bool {
        false
    }

    /// The same with int8 weights `16 high + low + 8` of the nibbles that two layers of experts hold,
    /// `[high, low]`, both with row scales, which are the weights'. Outputs of a matrix are
    /// `gpu::arith::dequantise_int8`.
    #[allow(clippy::too_many_arguments)]
    fn experts_int8(
        &self,
        nibbles: [&Self::Experts; 2],
        x: Rows<'_, Self::Buf<f32>>,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// `out = out + x`, or `out = out + (x + also)`, elementwise over rows of `cols`.
    fn add(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        also: Option<Rows<'_, Self::Buf<f32>>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<(), Self::Error>;

    /// Does what `part` asks for beside what follows up to [`Backend::together`], where that can be, else
    /// before it: neither uses what the other writes. One part at a time.
    fn aside(&self, part: &mut dyn FnMut() -> Result<(), Self::Error>) -> Result<(), Self::Error> {
        part()
    }

    /// What follows comes behind what was done aside.
    fn together(&self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Whether [`Backend::experts`] of these is done without the host, so that it can be recorded.
    fn recordable(&self, _experts: &Self::Experts) -> bool {
        false
    }

    /// Records what `pass` asks for, operators of tokens from position `first` on, to be done by
    /// [`Backend::repeat`] with the first of them at any position in `first..end`; nothing is done now.
    /// `pass` neither reads nor writes. `None`, and `pass` may not have been called, where that cannot be
    /// recorded.
    fn record(
        &self,
        _first: usize,
        _end: usize,
        _pass: &mut dyn FnMut() -> Result<(), Self::Error>,
    ) -> Result<Option<Self::Recording>, Self::Error> {
        Ok(None)
    }

    /// Does what was recorded, for tokens from `position` on.
    ///
    /// # Safety
    /// `position` is one that it was recorded for, and every buffer that the recorded operators used
    /// still exists.
    unsafe fn repeat(
        &self,
        recording: &Self::Recording,
        position: usize,
    ) -> Result<(), Self::Error>;

    /// From here on notes what devices are at, where that can be told, or does so no more; what is recorded
    /// notes it if it was recorded meanwhile. Whether it can be told.
    fn keep_parts(&self, _keep: bool) -> bool {
        false
    }

    /// What each device was at since this was last asked.
    fn parts(&self) -> Result<Vec<Parts>, Self::Error> {
        Ok(Vec::new())
    }

    /// Counts `selections` of experts whose operator a recording did.
    fn chosen_again(&self, _experts: &Self::Experts, _selections: usize) {}
}

/// What a layer is likely to choose.
pub struct Guess<'a, B: Backend> {
    /// The layer's experts.
    pub experts: &'a B::Experts,
    /// Numbers of experts, `[tokens, top_k]`.
    pub ids: &'a B::Buf<u32>,
    /// The same of the layers after that one, from 0 on, for whoever has the time to ask.
    pub further: &'a mut Further<'a, B>,
}

/// A layer's experts, and the numbers of those that it is likely to choose.
pub type Likely<'a, B> = (&'a <B as Backend>::Experts, Vec<u32>);

/// Guesses of one layer after another; none where there is no such layer.
pub type Further<'a, B> =
    dyn FnMut(usize) -> Result<Option<Likely<'a, B>>, <B as Backend>::Error> + 'a;

/// One layer's routed experts, in ascending order of their ids, on the way to a back end.
pub enum LayerExperts<'a> {
    /// Gate, up and down of each expert as raw int4.
    Raw(Vec<[RawMatrix<'a>; 3]>),
    /// As the archive has them.
    Coded {
        /// Their layer: tables, and the archive.
        layer: LayerRecords<'a>,
        /// All of the layer's records, checked.
        records: Vec<Record<'a>>,
    },
}

/// One layer's routed experts, to be placed in several tiers.
#[derive(Clone, Copy)]
pub struct TieredLayer<'a> {
    /// Where they come from.
    pub archive: &'a Archive,
    /// The archive again, for what is read when it is needed.
    pub file: &'a Arc<DirectFile>,
    /// Number of the model layer.
    pub number: u32,
    /// Where each expert goes.
    pub tiers: &'a [Tier],
    /// Number of the device that each goes to, among those of the back end; empty: all to the first.
    /// Others than the first take experts into their memory alone.
    pub devices: &'a [u8],
    /// Records that device memory has room for beside those that stay.
    pub staged: usize,
    /// Whether loading reads through the page cache, which then holds all of the archive.
    pub cached: bool,
    /// Whether experts may change places later ([`LoadExperts::repin`]): records then lie in slots that
    /// hold the largest of the layer.
    pub moving: bool,
}

/// What [`LoadExperts::repin`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repin {
    /// Nothing: experts are where they belong, or cannot move.
    Idle,
    /// An exchange began with a read of the archive, beside everything else.
    Begun,
    /// The read of one that had begun has not ended.
    Waiting,
    /// Two experts changed places.
    Moved,
}

/// A back end that can place routed experts.
pub trait LoadExperts: Backend {
    /// Copies one layer's experts to where they are multiplied. Raw ones become tier `raw`; coded
    /// ones stay coded (tier `ans`) and are multiplied as `form` says.
    fn load_experts(
        &self,
        layer: LayerExperts<'_>,
        shape: ExpertShape,
        form: Form,
    ) -> Result<Self::Experts, Self::Error>;

    /// The same with each expert in a tier of its own; `None` where a back end has one place only.
    fn load_tiers(
        &self,
        _layer: &TieredLayer<'_>,
        _shape: ExpertShape,
        _form: Form,
    ) -> Result<Option<Self::Experts>, Self::Error> {
        Ok(None)
    }

    /// All layers are loaded: what only loading needs can go.
    fn loaded(&self) {}

    /// How often experts of each tier were chosen, where [`LoadExperts::load_tiers`] placed them.
    fn used(&self, _experts: &Self::Experts) -> Used {
        Used::default()
    }

    /// Goes a step towards having in device memory what is chosen most; to be called between tokens, any
    /// number of times. An expert outside and one inside change places where the one outside was chosen
    /// clearly more. A step copies one record to the device and writes one at most. After an error
    /// experts are where they were.
    fn repin(&self, _experts: &Self::Experts) -> Result<Repin, Self::Error> {
        Ok(Repin::Idle)
    }
}
