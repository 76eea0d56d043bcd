//! `glm4_moe_lite` (GLM-4.7-Flash): GLM's latent attention and router, without an indexer.
//!
//! Names and defaults are those of Hugging Face transformers' `Glm4MoeLiteConfig`.

use crate::backend::Index;
use crate::model::config::{
    Config, LatentFamily, LayerKind, Object, latent_config, nextn_layer, sparse_layers,
};
use crate::model::error::ModelError;

pub const TYPE: &str = "glm4_moe_lite";

pub fn config(o: &Object) -> Result<Config, ModelError> {
    if !o.flag("rope_interleave", true)? {
        return Err(o.unsupported("rope_interleave", "true", "false"));
    }
    let layers = sparse_layers(o, 1)?
        .into_iter()
        .map(|sparse| LayerKind {
            sparse,
            indexer: false,
        })
        .collect();
    // Every position is attended to, so there is nothing to list.
    let index = Index {
        heads: 0,
        dim: 0,
        top_k: usize::MAX,
    };
    latent_config(
        o,
        LatentFamily {
            layers,
            nextn: nextn_layer(o, false)?,
            index,
            scaling_factor: 1.8,
        },
    )
}
