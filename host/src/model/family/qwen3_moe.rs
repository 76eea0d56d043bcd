//! `qwen3_moe` (Qwen3-30B-A3B and relatives): grouped-query attention with norms of queries and
//! keys, a softmax router, no shared expert.
//!
//! Names and defaults are those of Hugging Face transformers' `Qwen3MoeConfig`. Attention goes
//! through the operators of latent attention: the query heads that share a key head attend to cache
//! rows `[value | key]` with queries `[0 | query]`, so that values are weighed as the latent part is
//! and the zeros add nothing. RoPE turns `(x_i, x_(i + dim/2))`; rows of `q_proj` and `k_proj` are
//! put in the order that makes those neighbours, as the operator takes them, and it gives back the
//! order of the checkpoint.

use crate::backend::{
    Attend, Index, KvFormat, LoadExperts, Mla, Router, Rows, RowsMut, Scoring, rows, rows_mut,
};
use crate::model::BATCH;
use crate::model::cache::Cache;
use crate::model::config::{Config, LayerKind, Object, check_dimensions, experts, rope_theta};
use crate::model::error::ModelError;
use crate::model::inventory::at;
use crate::model::matrix::Matrix;
use crate::model::session::Scratch;
use crate::model::weights::{Loader, Model};

pub const TYPE: &str = "qwen3_moe";

/// Dimensions of grouped-query attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimensions {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, each of `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

pub fn config(o: &Object) -> Result<Config, ModelError> {
    if o.flag("use_sliding_window", false)? {
        return Err(o.unsupported("use_sliding_window", "false", "true"));
    }
    let hidden = o.size("hidden_size")?;
    let heads = o.size("num_attention_heads")?;
    let kv_heads = o.size_or("num_key_value_heads", heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let want = format!("a divisor of {heads}");
        return Err(o.bad("num_key_value_heads", want, kv_heads));
    }
    let dim = o.size_or("head_dim", hidden / heads)?;
    if !dim.is_multiple_of(8) {
        return Err(o.unsupported("head_dim", "a multiple of 8", dim));
    }
    let experts = experts(o, "num_experts")?;
    let top_k = o.size("num_experts_per_tok")?;
    if top_k > experts {
        return Err(o.bad("num_experts_per_tok", format!("at most {experts}"), top_k));
    }
    let step = o.size_or("decoder_sparse_step", 1)?;
    let dense = o.ids("mlp_only_layers")?;
    let layers = (0..o.size("num_hidden_layers")?)
        .map(|l| LayerKind {
            sparse: (l + 1) % step == 0 && !dense.contains(&(l as u32)),
            indexer: false,
        })
        .collect();
    let config = Config {
        vocab: o.size("vocab_size")?,
        hidden,
        intermediate: o.size("intermediate_size")?,
        moe_intermediate: o.size("moe_intermediate_size")?,
        shared_intermediate: 0,
        q_lora: 0,
        eps: o.single_or("rms_norm_eps", 1e-6)?,
        rope_theta: rope_theta(o)?,
        max_positions: o.size("max_position_embeddings")?,
        tied: o.flag("tie_word_embeddings", false)?,
        mla: Mla {
            heads: heads / kv_heads,
            nope: 0,
            rope: dim,
            value: dim,
            latent: dim,
            scaling: (1.0 / (dim as f64).sqrt()) as f32,
        },
        grouped: Some(Dimensions {
            heads,
            kv_heads,
            dim,
        }),
        index: Index {
            heads: 0,
            dim: 0,
            top_k: usize::MAX,
        },
        router: Router {
            scoring: Scoring::Softmax,
            experts,
            top_k,
            groups: 1,
            top_groups: 1,
            normalise: o.flag("norm_topk_prob", false)?,
            scaling: 1.0,
        },
        layers,
        nextn: None,
        mtp: false,
        kv: KvFormat::F32,
        batch: BATCH,
        eos: o.ids("eos_token_id")?,
    };
    check_dimensions(o, &config, &[])?;
    Ok(config)
}

/// Tensors of a layer's attention, to `add` with their shapes.
pub fn inventory(d: &Dimensions, hidden: usize, mut add: impl FnMut(&str, &[usize])) {
    add("self_attn.q_proj.weight", &[d.heads * d.dim, hidden]);
    add("self_attn.k_proj.weight", &[d.kv_heads * d.dim, hidden]);
    add("self_attn.v_proj.weight", &[d.kv_heads * d.dim, hidden]);
    add("self_attn.q_norm.weight", &[d.dim]);
    add("self_attn.k_norm.weight", &[d.dim]);
    add("self_attn.o_proj.weight", &[hidden, d.heads * d.dim]);
}

/// Where element `i` of a head in the operator's order is in the checkpoint's.
fn neighbours(dim: usize) -> impl Iterator<Item = usize> + Clone {
    (0..dim).map(move |i| i / 2 + i % 2 * (dim / 2))
}

/// A layer's attention.
pub struct Grouped<B: LoadExperts> {
    q: Matrix<B>,
    k: Matrix<B>,
    /// One for each key head.
    v: Vec<Matrix<B>>,
    q_norm: B::Buf<f32>,
    k_norm: B::Buf<f32>,
    o: Matrix<B>,
}

impl<B: LoadExperts> Grouped<B> {
    pub fn load(loader: &mut Loader<'_, B>, l: usize, d: &Dimensions) -> Result<Self, ModelError> {
        let hidden = loader.config.hidden;
        let name = |part: &str| at(l, &format!("self_attn.{part}.weight"));
        let turned = |part: &str, heads: usize| {
            let name = name(part);
            let m = loader.read(&name, &[heads * d.dim, hidden])?;
            let order = (0..heads).flat_map(|h| neighbours(d.dim).map(move |i| h * d.dim + i));
            loader.upload(&name, &[m.pick(hidden, order)], hidden)
        };
        let (q, k) = (turned("q_proj", d.heads)?, turned("k_proj", d.kv_heads)?);
        let all = loader.read(&name("v_proj"), &[d.kv_heads * d.dim, hidden])?;
        let v = (0..d.kv_heads)
            .map(|h| {
                let part = all.pick(hidden, h * d.dim..(h + 1) * d.dim);
                loader.upload(&name("v_proj"), &[part], hidden)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            q,
            k,
            v,
            q_norm: loader.vector_by(&name("q_norm"), d.dim, neighbours(d.dim))?,
            k_norm: loader.vector_by(&name("k_norm"), d.dim, neighbours(d.dim))?,
            o: loader.one(&name("o_proj"), &[hidden, d.heads * d.dim])?,
        })
    }
}

impl<B: LoadExperts> Model<B> {
    /// `x += o_proj(attention(norm(x)))`, of the normed input in `s.normed`; extends the cache.
    pub(in crate::model) fn grouped(
        &self,
        layer: &Grouped<B>,
        d: &Dimensions,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c) = (&self.backend, &self.config);
        let Dimensions {
            heads,
            kv_heads,
            dim,
        } = *d;
        let width = 2 * dim;
        self.linear(
            rows(&s.normed, c.hidden),
            &layer.q,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut s.projected, heads * dim),
        )?;
        b.rms_norm(
            rows(&s.projected, dim),
            &layer.q_norm,
            c.eps,
            dim,
            tokens * heads,
            rows_mut(&mut s.q, dim),
        )?;
        // The other half of each head stays the zeros that it was made of.
        b.rope(
            rows(&s.q, heads * dim),
            dim,
            heads,
            dim,
            0,
            &self.inv_freq,
            first,
            tokens,
            RowsMut {
                buf: &mut s.q_absorbed,
                offset: dim,
                stride: heads * width,
                moves: false,
            },
            width,
        )?;
        self.linear(
            rows(&s.normed, c.hidden),
            &layer.k,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut s.projected, kv_heads * dim),
        )?;
        b.rms_norm(
            rows(&s.projected, dim),
            &layer.k_norm,
            c.eps,
            dim,
            tokens * kv_heads,
            rows_mut(&mut s.q, dim),
        )?;
        let group = heads / kv_heads;
        for (h, (cache, v)) in cache.rows.iter_mut().zip(&layer.v).enumerate() {
            b.rope(
                Rows {
                    buf: &s.q,
                    offset: h * dim,
                    stride: kv_heads * dim,
                },
                dim,
                1,
                dim,
                0,
                &self.inv_freq,
                first,
                tokens,
                cache.rows(&mut s.wide, first, width, dim),
                dim,
            )?;
            self.linear(
                rows(&s.normed, c.hidden),
                v,
                c.hidden,
                tokens,
                false,
                rows_mut(&mut s.projected, dim),
            )?;
            // A copy to the rows of the positions.
            b.rope(
                rows(&s.projected, dim),
                dim,
                1,
                0,
                dim,
                &self.inv_freq,
                first,
                tokens,
                cache.rows(&mut s.wide, first, width, 0),
                dim,
            )?;
            cache.keep(b, &s.wide, first, width, tokens)?;
            b.attention(
                Rows {
                    buf: &s.q_absorbed,
                    offset: h * group * width,
                    stride: heads * width,
                },
                cache.cached(),
                Attend::Causal,
                &c.mla,
                first,
                tokens,
                RowsMut {
                    buf: &mut s.attended,
                    offset: h * group * dim,
                    stride: heads * dim,
                    moves: false,
                },
            )?;
        }
        self.linear(
            rows(&s.attended, heads * dim),
            &layer.o,
            heads * dim,
            tokens,
            true,
            rows_mut(&mut s.x, c.hidden),
        )
    }
}
