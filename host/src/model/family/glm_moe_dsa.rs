//! `glm_moe_dsa` (GLM-5 and 5.2): latent attention with an indexer that chooses positions.
//!
//! Names and defaults are those of Hugging Face transformers' `GlmMoeDsaConfig`.

use serde_json::Value;

use crate::backend::Index;
use crate::model::config::{
    Config, LatentFamily, LayerKind, Object, latent_config, nextn_layer, sparse_layers,
};
use crate::model::error::ModelError;

pub const TYPE: &str = "glm_moe_dsa";

pub fn config(o: &Object) -> Result<Config, ModelError> {
    // transformers does not look at them, and turns neighbours.
    for flag in ["rope_interleave", "indexer_rope_interleave"] {
        if !o.flag(flag, true)? {
            return Err(o.unsupported(flag, "true", "false"));
        }
    }
    let index = Index {
        heads: o.size("index_n_heads")?,
        dim: o.size("index_head_dim")?,
        top_k: o.size("index_topk")?,
    };
    let rope = o.size("qk_rope_head_dim")?;
    if index.dim < rope {
        return Err(o.bad("index_head_dim", format!("at least {rope}"), index.dim));
    }
    let layers = layer_kinds(o, o.size("num_hidden_layers")?)?;
    latent_config(
        o,
        LatentFamily {
            layers,
            nextn: nextn_layer(o, true)?,
            index,
            scaling_factor: 2.5,
        },
    )
}

fn layer_kinds(o: &Object, n: usize) -> Result<Vec<LayerKind>, ModelError> {
    if let Some(types) = o.names("layer_types", n)?
        && let Some(other) = types.iter().find(|t| *t != "deepseek_sparse_attention")
    {
        return Err(o.unsupported("layer_types", "deepseek_sparse_attention", other));
    }
    let sparse = sparse_layers(o, 3)?;
    let indexer = match (o.names("indexer_types", n)?, o.get("index_topk_pattern")) {
        (Some(names), _) => o.choose("indexer_types", &names, "shared", "full")?,
        (None, Some(Value::String(pattern))) => {
            let names: Vec<String> = pattern.chars().map(String::from).collect();
            if names.len() != n {
                return Err(o.bad("index_topk_pattern", format!("{n} letters"), names.len()));
            }
            o.choose("index_topk_pattern", &names, "S", "F")?
        }
        (None, Some(_)) => {
            let names = o.names("index_topk_pattern", n)?.unwrap_or_default();
            o.choose("index_topk_pattern", &names, "shared", "full")?
        }
        (None, None) => {
            let freq = o.size_or("index_topk_freq", 1)?;
            let offset = match o.get("index_skip_topk_offset") {
                None => 2,
                Some(_) => o.count("index_skip_topk_offset")?,
            };
            (0..n)
                .map(|l| (l + 1).saturating_sub(offset) % freq == 0)
                .collect()
        }
    };
    if indexer.first() == Some(&false) {
        return Err(o.bad(
            "indexer_types",
            "a first layer that is \"full\"",
            "\"shared\"",
        ));
    }
    Ok(sparse
        .into_iter()
        .zip(indexer)
        .map(|(sparse, indexer)| LayerKind { sparse, indexer })
        .collect())
}
