//! What a model takes beside its routed experts, in real allocation sizes.

use crate::model::weights::inventory;
use crate::model::{CHUNK, Config};

/// Memory of one purpose, bytes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Fixed {
    /// What it is for.
    pub what: &'static str,
    /// Bytes of device memory.
    pub vram: u64,
}

/// What an allocation of `bytes` takes of a CUDA device: eight steps to each power of two, 2 MiB at
/// most (the pool's), in pages of 2 MiB where it is large.
pub fn allocation(bytes: u64) -> u64 {
    const PAGE: u64 = 2 << 20;
    let bytes = bytes.max(256);
    let step = (bytes.next_power_of_two() / 16).clamp(256, PAGE);
    bytes.next_multiple_of(step)
}

/// Bytes of dense tensors on the device, embedding and head included.
pub fn dense(config: &Config) -> u64 {
    (inventory(config).iter())
        .map(|(name, shape)| {
            let n = shape.iter().product::<usize>() as u64;
            let wide = name.ends_with("e_score_correction_bias");
            allocation(if wide { 4 * n } else { 2 * n })
        })
        .sum()
}

/// Bytes of dense tensors that a token reads: all but the embedding table, of which it reads a row.
pub fn dense_read(config: &Config) -> u64 {
    let embedding = 2 * (config.vocab * config.hidden) as u64;
    let all: usize = (inventory(config).iter())
        .map(|(_, shape)| 2 * shape.iter().product::<usize>())
        .sum();
    if config.tied {
        all as u64
    } else {
        all as u64 - embedding
    }
}

/// Bytes of the caches of a sequence of `positions`.
pub fn cache(config: &Config, positions: usize) -> u64 {
    let width = config.mla.latent + config.mla.rope;
    let rows = config.grouped.map_or(1, |g| g.kv_heads) as u64;
    (config.all_layers())
        .map(|(_, kind)| {
            let keys = if kind.indexer { config.index.dim } else { 0 };
            let f32s = |n: usize| allocation(4 * (positions * n) as u64);
            rows * f32s(width) + if keys > 0 { f32s(keys) } else { 0 }
        })
        .sum()
}

/// Bytes of what a batch of tokens leaves between operators, and of the operators' scratch.
pub fn activations(config: &Config, positions: usize) -> u64 {
    let (c, mla) = (config, &config.mla);
    let t = CHUNK.min(positions).max(1);
    let width = mla.latent + mla.rope;
    let heads = c.grouped.map_or(mla.heads, |g| g.heads);
    let sparse = positions > c.index.top_k;
    let listed = if sparse {
        2 * c.index.heads * c.index.dim + c.index.top_k
    } else {
        0
    };
    let ffn = c.intermediate.max(c.shared_intermediate);
    let a_token = 3 * c.hidden
        + c.q_lora
        + width
        + c.index.dim
        + c.index.heads
        + c.q_lora
        + heads * (mla.nope + mla.rope + width + mla.latent + mla.value)
        + c.index.dim
        + listed
        + 3 * ffn
        + c.router.experts
        + 2 * c.router.top_k;
    let a_token = a_token + if config.mtp { 2 * c.hidden } else { 0 };
    // Scratch of an operator is at most this, or one token's; two are alive at a time.
    let scratch = 2 * crate::backend::kernels::plan::SCRATCH as u64;
    4 * (t * a_token + c.vocab) as u64 + scratch
}

/// All that a model takes beside its routed experts.
pub fn fixed(config: &Config, positions: usize) -> Vec<Fixed> {
    let of = |what, vram| Fixed { what, vram };
    vec![
        of("dense part", dense(config)),
        of("KV cache", cache(config, positions)),
        of("activations", activations(config, positions)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glm_is_as_large_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let text = crate::synth::Shape::Glm52.config(None).unwrap();
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        let config = Config::read(dir.path()).unwrap();
        let gb = |bytes: u64| bytes as f64 / 1e9;
        // Attention 165 M weights a layer, shared experts 38 M, dense layers 226 M, embedding and
        // head 952 M each.
        assert!(
            (34.0..38.0).contains(&gb(dense(&config))),
            "{}",
            gb(dense(&config))
        );
        assert!(dense_read(&config) + 1_900_000_000 < dense(&config));
        // 78 layers of 576, and 21 indexers of 128, f32.
        let bytes = 8192 * 4 * (78 * 576 + 21 * 128) as u64;
        let cache = cache(&config, 8192);
        assert!(
            (bytes..bytes + bytes / 8).contains(&cache),
            "{cache} {bytes}"
        );
        assert!(gb(activations(&config, 8192)) < 1.0);
    }

    #[test]
    fn allocations_waste_little() {
        for bytes in [
            1u64,
            255,
            4097,
            1 << 20,
            (1 << 20) + 1,
            3 << 30,
            (3 << 30) + 1,
        ] {
            let taken = allocation(bytes);
            assert!(
                taken >= bytes && taken <= bytes + bytes / 8 + 256,
                "{bytes} {taken}"
            );
            assert!(taken <= bytes + (2 << 20) + 256);
        }
    }
}
