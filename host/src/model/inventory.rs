//! The dense tensors of a model.

use super::config::{Config, LayerKind};
use super::family::qwen3_moe;
use super::mtp;
use crate::backend::Scoring;

/// Names and shapes of every dense tensor that the model needs.
pub(crate) fn inventory(c: &Config) -> Vec<(String, Vec<usize>)> {
    let mut list = vec![
        (
            "model.embed_tokens.weight".to_string(),
            vec![c.vocab, c.hidden],
        ),
        ("model.norm.weight".into(), vec![c.hidden]),
    ];
    if !c.tied {
        list.push(("lm_head.weight".into(), vec![c.vocab, c.hidden]));
    }
    for (l, kind) in c.all_layers() {
        let mut add = |name: &str, shape: &[usize]| list.push((at(l, name), shape.to_vec()));
        add("input_layernorm.weight", &[c.hidden]);
        add("post_attention_layernorm.weight", &[c.hidden]);
        let add = |name: &str, shape: &[usize]| list.push((at(l, name), shape.to_vec()));
        match &c.grouped {
            Some(grouped) => qwen3_moe::inventory(grouped, c.hidden, add),
            None => latent_inventory(c, kind, add),
        }
        let mut add = |name: &str, shape: &[usize]| list.push((at(l, name), shape.to_vec()));
        let ffn = if kind.sparse {
            add("mlp.gate.weight", &[c.router.experts, c.hidden]);
            if c.router.scoring == Scoring::Sigmoid {
                add("mlp.gate.e_score_correction_bias", &[c.router.experts]);
            }
            ("mlp.shared_experts.", c.shared_intermediate)
        } else {
            ("mlp.", c.intermediate)
        };
        if ffn.1 == 0 {
            continue; // no shared expert
        }
        add(&format!("{}gate_proj.weight", ffn.0), &[ffn.1, c.hidden]);
        add(&format!("{}up_proj.weight", ffn.0), &[ffn.1, c.hidden]);
        add(&format!("{}down_proj.weight", ffn.0), &[c.hidden, ffn.1]);
    }
    if c.mtp {
        list.extend(mtp::inventory(c));
    }
    list
}

/// Tensors of latent attention, to `add` with their shapes.
fn latent_inventory(c: &Config, kind: LayerKind, mut add: impl FnMut(&str, &[usize])) {
    let mla = &c.mla;
    let queries = mla.heads * (mla.nope + mla.rope);
    match c.q_lora {
        0 => add("self_attn.q_proj.weight", &[queries, c.hidden]),
        rank => {
            add("self_attn.q_a_proj.weight", &[rank, c.hidden]);
            add("self_attn.q_a_layernorm.weight", &[rank]);
            add("self_attn.q_b_proj.weight", &[queries, rank]);
        }
    }
    add(
        "self_attn.kv_a_proj_with_mqa.weight",
        &[mla.latent + mla.rope, c.hidden],
    );
    add("self_attn.kv_a_layernorm.weight", &[mla.latent]);
    add(
        "self_attn.kv_b_proj.weight",
        &[mla.heads * (mla.nope + mla.value), mla.latent],
    );
    add(
        "self_attn.o_proj.weight",
        &[c.hidden, mla.heads * mla.value],
    );
    if kind.indexer {
        add(
            "self_attn.indexer.wq_b.weight",
            &[c.index.heads * c.index.dim, c.q_lora],
        );
        add("self_attn.indexer.wk.weight", &[c.index.dim, c.hidden]);
        add("self_attn.indexer.k_norm.weight", &[c.index.dim]);
        add("self_attn.indexer.k_norm.bias", &[c.index.dim]);
        add(
            "self_attn.indexer.weights_proj.weight",
            &[c.index.heads, c.hidden],
        );
    }
}

/// A tensor's name within layer `l`.
pub(super) fn at(l: usize, name: &str) -> String {
    format!("model.layers.{l}.{name}")
}
