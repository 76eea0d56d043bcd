//! The operators of a forward pass as launches.

use std::marker::PhantomData;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use cuda_std::mem::Slice;

use super::buffer::{Buffer, View, blocks, input, output, view, word};
use super::device::{Device, DeviceMemory, Launch};
use super::error::{KernelError, Result};
use super::experts::{Experts, Landing, Stage};
use super::record::Recorded;
use super::split::Kept;
use super::table::*;
use crate::backend::split::Parts;
use crate::backend::{
    Attend, Backend, Cached, Guess, Index, Mla, Router, Rows, RowsMut, Scoring, TraceLayer, Weight,
};

/// The operators of a forward pass as launches on a device.
pub struct KernelBackend<D: Device> {
    device: D,
    /// u32 `[1]`: jobs of coded matrices that did not decode.
    faults: Buffer<u32, D::Memory>,
    /// Where experts go that are not in device memory, while they are needed.
    stage: Mutex<Option<Arc<Stage<D::Memory>>>>,
    /// What experts are loaded through, between layers.
    waves: Mutex<Option<[<D::Memory as DeviceMemory>::Host; 2]>>,
    /// What records land in that the device decodes as layers are loaded, between layers.
    landing: Mutex<Option<Landing<D::Memory>>>,
    /// Other devices, which have experts alone.
    peers: Vec<KernelBackend<D>>,
    /// u32 `[1]`: position of the token of a recorded pass.
    position: Buffer<u32, D::Memory>,
    /// What positions the pass is for that is recorded at the moment.
    span: Mutex<Option<Span>>,
    /// Whether a recording has failed, after which none is tried.
    refused: AtomicBool,
    /// What the device is at, while that is wanted.
    timeline: Kept<D::Event>,
}

/// Positions of a recorded pass.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// That of its first token while it is recorded.
    pub first: usize,
    /// Past the last that its first token will be at.
    pub end: usize,
}

/// Where the tokens of a launch are: what `gpu::position` adds up.
pub(super) struct At {
    pub word: Slice,
    pub first: u32,
    /// Positions seen by the last token at most.
    pub seen: usize,
}

impl<D: Device> KernelBackend<D> {
    /// A back end over `device`.
    pub fn new(device: D) -> Result<Self> {
        Self::over(device, Vec::new())
    }

    /// A back end over `device`, with `others` for experts.
    pub fn over(device: D, others: Vec<D>) -> Result<Self> {
        let word = || -> Result<_> {
            let memory = device.allocate(4)?;
            device.fill(&memory, 0, 4, 0)?;
            Ok(Buffer {
                memory,
                len: 1,
                kind: PhantomData,
            })
        };
        let (faults, position) = (word()?, word()?);
        // Before there is anything in it that would have to be mapped.
        others.iter().for_each(|other| {
            other.reaches(&device);
        });
        Ok(Self {
            faults,
            position,
            stage: Mutex::default(),
            waves: Mutex::default(),
            landing: Mutex::default(),
            peers: others.into_iter().map(Self::new).collect::<Result<_>>()?,
            span: Mutex::default(),
            refused: AtomicBool::new(false),
            timeline: Kept::default(),
            device,
        })
    }

    /// The other devices.
    pub(super) fn peers(&self) -> &[Self] {
        &self.peers
    }

    /// Whether launches are recorded.
    pub(super) fn records(&self) -> bool {
        self.span().is_some()
    }

    /// Positions of the pass that is recorded.
    pub(super) fn spans(&self) -> &Mutex<Option<Span>> {
        &self.span
    }

    /// Where the position of a recorded pass is.
    pub(super) fn position(&self) -> &D::Memory {
        &self.position.memory
    }

    /// Whether recording has failed.
    pub(super) fn refused(&self) -> &AtomicBool {
        &self.refused
    }

    /// What the device is at.
    pub(super) fn kept(&self) -> &Kept<D::Event> {
        &self.timeline
    }

    fn span(&self) -> Option<Span> {
        *self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where `tokens` tokens from position `first` on are.
    pub(super) fn at(&self, first: usize, tokens: usize) -> Result<At> {
        Ok(match self.span() {
            None => At {
                word: Slice::EMPTY,
                first: word("position", first)?,
                seen: first + tokens,
            },
            Some(span) => At {
                word: self.position.slice(),
                first: (first as u32).wrapping_sub(span.first as u32),
                seen: (span.end - 1).saturating_add(tokens),
            },
        })
    }

    /// What a launch writes to `out`, and whether it adds the position's rows to that.
    pub(super) fn moving<T: Pod, M: DeviceMemory>(
        &self,
        what: &'static str,
        out: &RowsMut<'_, Buffer<T, M>>,
        rows: usize,
        cols: usize,
    ) -> Result<(View, Slice)> {
        match self.span().filter(|_| out.moves) {
            None => {
                let to = view(what, out.buf, (out.offset, out.stride), rows, cols)?;
                Ok((to, Slice::EMPTY))
            }
            Some(span) => {
                let offset = out.offset.checked_sub(span.first * out.stride);
                let offset = offset.ok_or(KernelError::Dimension {
                    what,
                    found: out.offset,
                    expected: "the row of the position",
                })?;
                let rows = span.end - 1 + rows;
                let to = view(what, out.buf, (offset, out.stride), rows, cols)?;
                Ok((to, self.position.slice()))
            }
        }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Where experts are copied to.
    pub(super) fn stage(&self) -> &Mutex<Option<Arc<Stage<D::Memory>>>> {
        &self.stage
    }

    /// Pinned buffers that experts are loaded through.
    pub(super) fn waves_cache(&self) -> &Mutex<Option<[<D::Memory as DeviceMemory>::Host; 2]>> {
        &self.waves
    }

    /// Device memory that records land in to be decoded.
    pub(super) fn landing_cache(&self) -> &Mutex<Option<Landing<D::Memory>>> {
        &self.landing
    }

    /// Where the kernels count blocks that did not decode.
    pub(super) fn faults(&self) -> &Buffer<u32, D::Memory> {
        &self.faults
    }

    /// `len` elements with any content, for a kernel to write.
    pub(super) fn scratch<T: Pod>(&self, len: usize) -> Result<Buffer<T, D::Memory>> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or(KernelError::Dimension {
                what: "buffer",
                found: len,
                expected: "fewer elements",
            })?;
        Ok(Buffer {
            memory: self.device.allocate(bytes)?,
            len,
            kind: PhantomData,
        })
    }

    pub(super) fn launch<K: KernelFn>(&self, launch: Launch, args: K::Args) -> Result<()> {
        self.note(K::ID)?;
        // SAFETY: private to this module, whose operators build `args` from live buffers of this
        // device, checked for the sizes that the kernel documents; memory that is dropped is reused
        // in the order of the stream.
        unsafe { self.device.launch::<K>(launch, args)? };
        Ok(())
    }
}

impl<D: Device> Backend for KernelBackend<D> {
    type Buf<T: Pod> = Buffer<T, D::Memory>;
    type Experts = Experts<D::Memory>;
    type Recording = Recorded<D>;
    type Error = KernelError;

    fn describe(&self) -> String {
        let devices = std::iter::once(self).chain(&self.peers);
        let names: Vec<String> = devices.map(|b| b.device.describe()).collect();
        names.join(" + ")
    }

    fn alloc<T: Pod>(&self, len: usize) -> Result<Self::Buf<T>> {
        let buf = self.scratch::<T>(len)?;
        self.device.fill(&buf.memory, 0, len * size_of::<T>(), 0)?;
        Ok(buf)
    }

    fn upload<T: Pod>(&self, data: &[T]) -> Result<Self::Buf<T>> {
        let buf = self.scratch::<T>(data.len())?;
        self.device
            .upload(&buf.memory, 0, bytemuck::cast_slice(data))?;
        Ok(buf)
    }

    fn write<T: Pod>(&self, buf: &mut Self::Buf<T>, offset: usize, data: &[T]) -> Result<()> {
        buf.from("write", offset, data.len())?;
        let data = bytemuck::cast_slice(data);
        self.device
            .upload(&buf.memory, offset * size_of::<T>(), data)?;
        Ok(())
    }

    fn read<T: Pod>(&self, buf: &Self::Buf<T>, offset: usize, out: &mut [T]) -> Result<()> {
        buf.from("read", offset, out.len())?;
        let out = bytemuck::cast_slice_mut(out);
        let mut faults = [0u32];
        self.device.download_all(&mut [
            (&buf.memory, offset * size_of::<T>(), out),
            (
                &self.faults.memory,
                0,
                bytemuck::cast_slice_mut(&mut faults),
            ),
        ])?;
        let mut jobs = faults[0];
        for peer in &self.peers {
            let word = bytemuck::cast_slice_mut(&mut faults);
            (peer.device).download(&peer.faults.memory, 0, word)?;
            jobs += faults[0];
        }
        match jobs {
            0 => Ok(()),
            jobs => Err(KernelError::Corrupt { jobs }),
        }
    }

    fn copy<T: Pod>(
        &self,
        from: &Self::Buf<T>,
        start: usize,
        to: &mut Self::Buf<T>,
        at: usize,
        len: usize,
    ) -> Result<()> {
        from.from("copy: from", start, len)?;
        to.from("copy: to", at, len)?;
        let size = size_of::<T>();
        let (from, to) = ((&from.memory, start * size), (&to.memory, at * size));
        Ok(self.device.copy(from, to, len * size)?)
    }

    fn embed(
        &self,
        table: Weight<'_, Self>,
        ids: &Self::Buf<u32>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.embed_rows(table, ids, cols, tokens, out)
    }

    fn rms_norm(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        weight: &Self::Buf<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        let from = input("rms_norm: x", x, tokens, cols)?;
        let (to, at) = self.moving("rms_norm: out", &out, tokens, cols)?;
        let args = gpu::norm::NormArgs {
            x: from.slice,
            weight: weight.from("rms_norm: weight", 0, cols)?,
            bias: Slice::EMPTY,
            out: to.slice,
            at,
            x_stride: from.stride,
            out_stride: to.stride,
            cols: word("columns", cols)?,
            eps,
        };
        let grid = [word("tokens", tokens)?, 1, 1];
        self.launch::<RmsNorm>(Launch::new(grid, gpu::dot::BLOCK), args)
    }

    fn layer_norm(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        weight: &Self::Buf<f32>,
        bias: &Self::Buf<f32>,
        eps: f32,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        let from = input("layer_norm: x", x, tokens, cols)?;
        let to = output("layer_norm: out", &out, tokens, cols)?;
        let args = gpu::norm::NormArgs {
            x: from.slice,
            weight: weight.from("layer_norm: weight", 0, cols)?,
            bias: bias.from("layer_norm: bias", 0, cols)?,
            out: to.slice,
            at: Slice::EMPTY,
            x_stride: from.stride,
            out_stride: to.stride,
            cols: word("columns", cols)?,
            eps,
        };
        let grid = [word("tokens", tokens)?, 1, 1];
        self.launch::<LayerNorm>(Launch::new(grid, gpu::dot::BLOCK), args)
    }

    fn linear(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        weight: Weight<'_, Self>,
        rows: usize,
        cols: usize,
        tokens: usize,
        add: bool,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.dense(x, weight, (rows, cols), tokens, add, out)
    }

    fn silu_mul(
        &self,
        gate: Rows<'_, Self::Buf<f32>>,
        up: Rows<'_, Self::Buf<f32>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        let gate = input("silu_mul: gate", gate, tokens, cols)?;
        let up = input("silu_mul: up", up, tokens, cols)?;
        let to = output("silu_mul: out", &out, tokens, cols)?;
        let args = gpu::silu::SiluMulArgs {
            gate: gate.slice,
            up: up.slice,
            out: to.slice,
            gate_stride: gate.stride,
            up_stride: up.stride,
            out_stride: to.stride,
            cols: word("columns", cols)?,
        };
        let threads = gpu::silu::THREADS;
        let grid = [blocks(cols, threads), word("tokens", tokens)?, 1];
        self.launch::<SiluMul>(Launch::new(grid, threads), args)
    }

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
    ) -> Result<()> {
        if !rope.is_multiple_of(2) {
            return Err(KernelError::Dimension {
                what: "rope dimension",
                found: rope,
                expected: "an even number",
            });
        }
        let row = |head: usize| heads.saturating_sub(1) * head + rope + pass;
        let from = input("rope: x", x, tokens, row(x_head))?;
        let (to, moving) = self.moving("rope: out", &out, tokens, row(out_head))?;
        let at = self.at(first, tokens)?;
        word("positions", at.seen)?;
        let args = gpu::rope::RopeArgs {
            x: from.slice,
            inv_freq: inv_freq.from("rope: inv_freq", 0, rope / 2)?,
            out: to.slice,
            x_stride: from.stride,
            x_head: word("rope: x_head", x_head)?,
            out_stride: to.stride,
            out_head: word("rope: out_head", out_head)?,
            heads: word("heads", heads)?,
            rope: word("rope", rope)?,
            pass: word("pass", pass)?,
            at: at.word,
            first: at.first,
            moves: (moving.len > 0) as u32,
            reserved: 0,
        };
        let threads = gpu::rope::THREADS;
        let items = heads * (rope / 2 + pass);
        let grid = [blocks(items, threads), word("tokens", tokens)?, 1];
        self.launch::<Rope>(Launch::new(grid, threads), args)
    }

    fn narrow(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<u16>>,
    ) -> Result<()> {
        self.narrow_rows(x, cols, tokens, out)
    }

    fn absorb_query(
        &self,
        q: Rows<'_, Self::Buf<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.absorb(q, kv_b, mla, tokens, out)
    }

    fn attention(
        &self,
        q: Rows<'_, Self::Buf<f32>>,
        cache: Cached<'_, Self>,
        attend: Attend<'_, Self::Buf<u32>>,
        mla: &Mla,
        first: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.attend(q, cache, attend, mla, first, tokens, out)
    }

    fn expand_value(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        kv_b: Weight<'_, Self>,
        mla: &Mla,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.expand(x, kv_b, mla, tokens, out)
    }

    fn index(
        &self,
        q: Rows<'_, Self::Buf<f32>>,
        keys: &Self::Buf<f32>,
        weights: Rows<'_, Self::Buf<f32>>,
        index: &Index,
        first: usize,
        tokens: usize,
        lists: &mut Self::Buf<u32>,
    ) -> Result<()> {
        self.best_positions(q, keys, weights, index, first, tokens, lists)
    }

    fn route(
        &self,
        logits: Rows<'_, Self::Buf<f32>>,
        bias: &Self::Buf<f32>,
        router: &Router,
        tokens: usize,
        ids: &mut Self::Buf<u32>,
        weights: &mut Self::Buf<f32>,
    ) -> Result<()> {
        let n = router.experts;
        let groups = router.groups.max(1);
        let bad = |what, found, expected| {
            Err(KernelError::Dimension {
                what,
                found,
                expected,
            })
        };
        if router.top_k > n {
            return bad(
                "router: experts a token",
                router.top_k,
                "at most the experts",
            );
        }
        if !n.is_multiple_of(groups) || groups > 1 && n / groups < 2 {
            return bad(
                "router: groups",
                groups,
                "groups of equal size, two experts or more",
            );
        }
        if router.top_groups > groups {
            return bad(
                "router: groups chosen",
                router.top_groups,
                "at most the groups",
            );
        }
        let logits = input("route: logits", logits, tokens, n)?;
        let args = gpu::route::RouteArgs {
            logits: logits.slice,
            bias: bias.from("route: bias", 0, n)?,
            ids: ids.from("route: ids", 0, tokens * router.top_k)?,
            weights: weights.from("route: weights", 0, tokens * router.top_k)?,
            logit_stride: logits.stride,
            experts: word("experts", n)?,
            top_k: word("experts a token", router.top_k)?,
            groups: word("groups", groups)?,
            top_groups: word("groups chosen", router.top_groups)?,
            flags: if router.normalise {
                gpu::route::NORMALISE
            } else {
                0
            } | match router.scoring {
                Scoring::Sigmoid => 0,
                Scoring::Softmax => gpu::route::SOFTMAX,
            },
            scaling: router.scaling,
            reserved: 0,
        };
        let shared = gpu::route::shared_bytes(args.experts, args.groups);
        let grid = [word("tokens", tokens)?, 1, 1];
        let launch = Launch::new(grid, gpu::route::THREADS).shared(shared);
        self.launch::<Route>(launch, args)
    }

    fn replay(
        &self,
        trace: TraceLayer<'_, Self>,
        top_k: usize,
        first: usize,
        tokens: usize,
        ids: &mut Self::Buf<u32>,
        weights: &mut Self::Buf<f32>,
    ) -> Result<()> {
        if trace.rows == 0 {
            return Err(KernelError::Dimension {
                what: "tokens of a trace",
                found: 0,
                expected: "at least 1",
            });
        }
        let at = self.at(first, tokens)?;
        let (stride, n) = (trace.layers * top_k, tokens * top_k);
        word("elements of a trace", trace.rows * stride)?;
        let args = gpu::replay::ReplayArgs {
            chosen: trace
                .chosen
                .from("replay: chosen", 0, trace.rows * stride)?,
            given: trace.given.from("replay: given", 0, trace.rows * stride)?,
            ids: ids.from("replay: ids", 0, n)?,
            weights: weights.from("replay: weights", 0, n)?,
            rows: word("rows", trace.rows)?,
            stride: word("elements of a row", stride)?,
            offset: word("layer", trace.layer * top_k)?,
            top_k: word("experts a token", top_k)?,
            at: at.word,
            first: at.first,
            tokens: word("tokens", tokens)?,
        };
        let threads = gpu::replay::THREADS;
        self.launch::<Replay>(Launch::new([blocks(n, threads), 1, 1], threads), args)
    }

    fn experts(
        &self,
        experts: &Self::Experts,
        x: Rows<'_, Self::Buf<f32>>,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.run_experts(experts, None, None, x, ids, weights, top_k, tokens, out)
    }

    fn experts_and_next(
        &self,
        experts: &Self::Experts,
        next: Guess<'_, Self>,
        x: Rows<'_, Self::Buf<f32>>,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.run_experts(
            experts,
            None,
            Some(next),
            x,
            ids,
            weights,
            top_k,
            tokens,
            out,
        )
    }

    fn guessable(&self, experts: &Self::Experts) -> bool {
        experts.guessable()
    }

    fn experts_int8(
        &self,
        [high, low]: [&Self::Experts; 2],
        x: Rows<'_, Self::Buf<f32>>,
        ids: &Self::Buf<u32>,
        weights: &Self::Buf<f32>,
        top_k: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        self.run_experts(high, Some(low), None, x, ids, weights, top_k, tokens, out)
    }

    fn recordable(&self, experts: &Self::Experts) -> bool {
        experts.recordable()
    }

    fn record(
        &self,
        first: usize,
        end: usize,
        pass: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Recorded<D>>> {
        self.record_pass(first, end, pass)
    }

    unsafe fn repeat(&self, recording: &Recorded<D>, position: usize) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.repeat_pass(recording, position) }
    }

    fn keep_parts(&self, keep: bool) -> bool {
        self.keep_timelines(keep);
        true
    }

    fn parts(&self) -> Result<Vec<Parts>> {
        KernelBackend::parts(self)
    }

    fn chosen_again(&self, experts: &Self::Experts, selections: usize) {
        experts.count(selections);
    }

    fn add(
        &self,
        x: Rows<'_, Self::Buf<f32>>,
        also: Option<Rows<'_, Self::Buf<f32>>>,
        cols: usize,
        tokens: usize,
        out: RowsMut<'_, Self::Buf<f32>>,
    ) -> Result<()> {
        let from = input("add: x", x, tokens, cols)?;
        let also = also
            .map(|a| input("add: also", a, tokens, cols))
            .transpose()?;
        let to = output("add: out", &out, tokens, cols)?;
        let args = gpu::add::AddArgs {
            x: from.slice,
            also: also.as_ref().map_or(Slice::EMPTY, |a| a.slice),
            out: to.slice,
            x_stride: from.stride,
            also_stride: also.map_or(0, |a| a.stride),
            out_stride: to.stride,
            cols: word("columns", cols)?,
        };
        let threads = gpu::add::THREADS;
        let grid = [blocks(cols, threads), word("tokens", tokens)?, 1];
        self.launch::<Add>(Launch::new(grid, threads), args)
    }

    fn aside(&self, part: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.device().aside()?;
        let done = part();
        self.device().back();
        done
    }

    fn together(&self) -> Result<()> {
        Ok(self.device().together()?)
    }
}
