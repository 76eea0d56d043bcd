//! Families of models. What differs between them is one file each: how `config.json` is read, and
//! for an attention that is not latent its tensors and its forward pass.

mod glm4_moe_lite;
mod glm_moe_dsa;
pub(super) mod qwen3_moe;

use super::config::{Config, Object};
use super::error::ModelError;

/// The families, by `model_type`.
pub const FAMILIES: [&str; 3] = [glm_moe_dsa::TYPE, glm4_moe_lite::TYPE, qwen3_moe::TYPE];

/// Reads a `config.json` as its `model_type` says.
pub(super) fn config(o: &Object) -> Result<Config, ModelError> {
    match o.text("model_type").as_str() {
        glm_moe_dsa::TYPE => glm_moe_dsa::config(o),
        glm4_moe_lite::TYPE => glm4_moe_lite::config(o),
        qwen3_moe::TYPE => qwen3_moe::config(o),
        other => Err(o.unsupported("model_type", FAMILIES.join(", "), other)),
    }
}
