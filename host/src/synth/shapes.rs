//! Geometries of real models, and a tokenizer for models without one.

use serde_json::{Map, Value, json};

use super::SynthError;

/// Geometry of a synthetic model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shape {
    /// GLM-5.2: 78 layers, 75 of them with 256 experts, 744 billion parameters
    #[value(name = "glm-5.2")]
    Glm52,
    /// GLM-4.7-Flash: 47 layers, 46 of them with 64 experts
    #[value(name = "glm-4.7-flash")]
    Glm47Flash,
    /// 4 layers, 3 of them with 32 experts of 12 KiB; for tests
    Tiny,
}

impl Shape {
    /// Layers of the real model, and how many dense ones come first.
    pub fn layers(self) -> (usize, usize) {
        match self {
            Shape::Glm52 => (78, 3),
            Shape::Glm47Flash => (47, 1),
            Shape::Tiny => (4, 1),
        }
    }

    /// Routed experts of a layer.
    pub fn experts(self) -> usize {
        match self {
            Shape::Glm52 => 256,
            Shape::Glm47Flash => 64,
            Shape::Tiny => 32,
        }
    }

    /// The text of `config.json`, with `layers` layers and, by `mtp`, one more that drafts.
    pub fn config(self, layers: Option<usize>, mtp: bool) -> Result<String, SynthError> {
        let (real, dense) = self.layers();
        let layers = layers.unwrap_or(real);
        if layers <= dense {
            return Err(SynthError::Options(format!(
                "--layers {layers}: expected at least {}: the first {dense} have no routed experts",
                dense + 1
            )));
        }
        if layers > MAX_LAYERS {
            return Err(SynthError::Options(format!(
                "--layers {layers}: expected at most {MAX_LAYERS}"
            )));
        }
        let own = match self {
            Shape::Glm52 => json!({
                "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288,
                "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
                "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
                "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
                "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
                "index_topk_freq": 4, "index_skip_topk_offset": 3,
                "max_position_embeddings": 202_752, "routed_scaling_factor": 2.5,
                "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            }),
            Shape::Glm47Flash => json!({
                "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
                "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
                "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
                "num_attention_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
                "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
                "max_position_embeddings": 202_752, "routed_scaling_factor": 1.8,
                "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            }),
            Shape::Tiny => json!({
                "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256,
                "moe_intermediate_size": 64, "n_routed_experts": 32, "num_experts_per_tok": 4,
                "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
                "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
                "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64,
                "index_topk_freq": 2, "index_skip_topk_offset": 1,
                "max_position_embeddings": 512, "routed_scaling_factor": 2.5,
                "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
            }),
        };
        let common = json!({
            "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
            "attention_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "num_hidden_layers": layers, "first_k_dense_replace": dense, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "tie_word_embeddings": false, "dtype": "bfloat16",
            "eos_token_id": [END], "pad_token_id": END,
        });
        let mut all: Map<String, Value> = Map::new();
        for part in [common, own] {
            let Value::Object(part) = part else {
                unreachable!("both are objects")
            };
            all.extend(part);
        }
        if mtp {
            all.insert("num_nextn_predict_layers".into(), 1.into());
        }
        Ok(format!("{:#}\n", Value::Object(all)))
    }
}

/// As many as a `config.json` may say.
const MAX_LAYERS: usize = 1 << 20;

/// `<|endoftext|>` of the byte tokenizer, behind the 256 bytes.
const END: u32 = 256;

/// A `tokenizer.json` whose tokens are the 256 bytes, and GLM's special tokens.
pub(super) fn byte_tokenizer() -> String {
    let vocab: Map<String, Value> = (0..=255u8)
        .map(|b| (byte_char(b).to_string(), u32::from(b).into()))
        .collect();
    let added: Vec<Value> = ["<|endoftext|>", "[gMASK]", "<sop>"]
        .iter()
        .zip(END..)
        .map(|(content, id)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    });
    format!("{tokenizer}\n")
}

/// The character that stands for a byte in byte-level vocabularies: printable ones for themselves, the
/// others in order from U+0100 on.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(256 + before).unwrap_or('\u{fffd}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Config;

    /// Weights of a model, in billions: what is published of the real ones.
    fn billions(shape: Shape) -> f64 {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("config.json"),
            shape.config(None, false).unwrap(),
        )
        .unwrap();
        let c = Config::read(dir.path()).unwrap();
        assert_eq!(c.layers.len(), shape.layers().0);
        assert_eq!(c.router.experts, shape.experts());
        let experts = c.sparse_layers().count() * c.router.experts;
        assert_eq!(c.sparse_layers().next(), Some(shape.layers().1));
        let dense: usize = (crate::model::inventory(&c).iter())
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        (dense + experts * 3 * c.hidden * c.moe_intermediate) as f64 / 1e9
    }

    #[test]
    fn shapes_are_as_large_as_the_real_models() {
        assert!((740.0..750.0).contains(&billions(Shape::Glm52)));
        assert!((29.0..32.0).contains(&billions(Shape::Glm47Flash)));
        assert!(billions(Shape::Tiny) < 0.01);
    }

    #[test]
    fn bytes_have_characters_of_their_own() {
        let mut all: Vec<char> = (0..=255).map(byte_char).collect();
        assert_eq!(all[usize::from(b' ')], '\u{120}');
        assert_eq!(all[usize::from(b'a')], 'a');
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 256);
    }
}
