//! What a model takes beside its routed experts, in real allocation sizes.

use std::path::Path;

use gpu::layout::Folds;

use crate::backend::KvFormat;
use crate::backend::kernels::plan;
use crate::model::directory::Dense;
use crate::model::inventory;
use crate::model::{Config, ModelError};

/// Memory of one purpose, bytes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Fixed {
    /// What it is for.
    pub what: &'static str,
    /// Bytes of device memory.
    #[serde(rename = "vram_bytes")]
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

/// Bytes of a model's dense tensors, in the formats that its files have them in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DensePart {
    /// What they take on the device, embedding and head included.
    pub held: u64,
    /// Those of floats, bf16 and f32, that a token reads: all but the embedding table, of which it reads a row.
    pub floats: u64,
    /// The same of int8.
    pub int8: u64,
}

impl DensePart {
    /// Of a model directory.
    pub fn open(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        let dense = Dense::open(dir, config)?;
        Self::new(config, |name, shape| dense.bytes(name, shape))
    }

    /// Of tensors, whose bytes and whether they are int8 `bytes` gives.
    fn new<E>(
        config: &Config,
        bytes: impl Fn(&str, &[usize]) -> Result<(u64, bool), E>,
    ) -> Result<Self, E> {
        let mut part = Self::default();
        for (name, shape) in inventory(config) {
            let (bytes, int8) = bytes(&name, &shape)?;
            part.held += allocation(bytes);
            if name.ends_with("embed_tokens.weight") && !config.tied {
                continue;
            }
            *(if int8 {
                &mut part.int8
            } else {
                &mut part.floats
            }) += bytes;
        }
        Ok(part)
    }
}

/// Dense weights that a token reads: all but the embedding table, of which it reads a row.
pub fn weights_read(config: &Config) -> usize {
    let all: usize = (inventory(config).iter())
        .map(|(_, shape)| shape.iter().product::<usize>())
        .sum();
    if config.tied {
        all
    } else {
        all - config.vocab * config.hidden
    }
}

/// Bytes of the caches of a sequence of `positions`, in allocations.
pub fn cache(config: &Config, positions: usize) -> u64 {
    cache_in(config, positions, allocation)
}

/// Bytes of their elements.
pub fn cache_bytes(config: &Config, positions: usize) -> u64 {
    cache_in(config, positions, |bytes| bytes)
}

fn cache_in(config: &Config, positions: usize, takes: fn(u64) -> u64) -> u64 {
    let width = config.mla.latent + config.mla.rope;
    let rows = config.grouped.map_or(1, |g| g.kv_heads) as u64;
    (config.all_layers())
        .map(|(_, kind)| {
            let keys = if kind.indexer { config.index.dim } else { 0 };
            let of = |n: usize, size: usize| takes((size * positions * n) as u64);
            rows * of(width, config.kv.bytes()) + if keys > 0 { of(keys, 4) } else { 0 }
        })
        .sum()
}

/// Bytes of what a batch of tokens leaves between operators, and of the operators' scratch, where coded experts of
/// `undecoded` tokens are multiplied as they are.
pub fn activations(config: &Config, positions: usize, undecoded: usize) -> u64 {
    let (c, mla) = (config, &config.mla);
    let t = c.batch.min(positions).max(1);
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
    let shared = if c.shared_intermediate > 0 {
        c.hidden
    } else {
        0
    };
    let a_token = a_token + shared + if config.mtp { 2 * c.hidden } else { 0 };
    let a_token = a_token + if config.kv == KvFormat::F32 { 0 } else { width };
    // Two operators' scratch is alive at a time, of which one may be experts': partial sums of two or so segments, and
    // what down gets. The others': states of attention, and where positions are chosen their scores and those chosen
    // of tiles, or as much as all operators limit themselves to.
    let seen = if sparse { c.index.top_k } else { positions };
    let states = heads * seen.div_ceil(gpu::arith::ATTENTION_CHUNK);
    let scores = if sparse { 3 * positions } else { 0 };
    let of_token = 4 * (states * (mla.latent + 2) + scores);
    let others = (t * of_token).min(plan::SCRATCH).max(of_token);
    let partials = 8 * (2 * c.moe_intermediate + c.hidden);
    let experts = t * c.router.top_k * (partials + 3 * c.moe_intermediate);
    let experts = experts.min(plan::EXPERT_SCRATCH).max(others);
    // What several tokens' experts are decoded to, gate and up of so many at a time.
    let decoded = if t <= undecoded.max(1) {
        0
    } else {
        let each = c.moe_intermediate * c.hidden;
        let active = (t * c.router.top_k).min(c.router.experts).max(1);
        each * plan::decoded_at_once(each, active)
    };
    let scratch = (others + experts + decoded) as u64;
    4 * (t * a_token + c.vocab) as u64 + scratch
}

/// Bytes of the rows that experts give where the first device does not add up itself what they make of
/// their tokens: one for each assignment to the CPU or to experts that take turns in the stage, of which all
/// may be (`outside`), and for each assignment on each of `others` other devices.
pub fn given(config: &Config, positions: usize, outside: bool, others: usize) -> u64 {
    let (hidden, intermediate) = (config.hidden, config.moe_intermediate);
    let top_k = config.router.top_k;
    let segs = |cols| Folds::new(cols).map_or(1, |folds| folds.segs());
    let partials = 2 * segs(hidden) * intermediate + segs(intermediate) * hidden;
    let tokens = config.batch.min(positions).max(1);
    let tokens = plan::experts_at_once(tokens, top_k, (hidden, intermediate), partials);
    match usize::from(outside) + others {
        0 => 0,
        n => allocation((4 * n * tokens * top_k * hidden) as u64),
    }
}

/// All that a model takes beside its routed experts.
pub fn fixed(config: &Config, dense: &DensePart, positions: usize, undecoded: usize) -> Vec<Fixed> {
    let of = |what, vram| Fixed { what, vram };
    vec![
        of("dense part", dense.held),
        of("KV cache", cache(config, positions)),
        of("activations", activations(config, positions, undecoded)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glm_is_as_large_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let text = crate::synth::Shape::Glm52.config(None, false).unwrap();
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        let config = Config::read(dir.path()).unwrap();
        let gb = |bytes: u64| bytes as f64 / 1e9;
        // Attention 165 M weights a layer, shared experts 38 M, dense layers 226 M, embedding and
        // head 952 M each.
        let of = |int8: bool| {
            DensePart::new(&config, |name, shape| {
                let n = shape.iter().product::<usize>() as u64;
                let int8 = int8 && crate::convert::to_int8(name, shape);
                let bytes = if int8 { n + 4 * shape[0] as u64 } else { 2 * n };
                Ok::<_, ModelError>((bytes, int8))
            })
            .unwrap()
        };
        let (wide, narrow) = (of(false), of(true));
        assert!((34.0..38.0).contains(&gb(wide.held)), "{wide:?}");
        assert!((18.0..20.0).contains(&gb(narrow.held)), "{narrow:?}");
        assert!(wide.floats + 1_900_000_000 < wide.held && wide.int8 == 0);
        assert!(gb(narrow.floats) < 0.5, "{narrow:?}");
        // 78 layers of 576, and 21 indexers of 128, f32.
        let bytes = 8192 * 4 * (78 * 576 + 21 * 128) as u64;
        let taken = cache(&config, 8192);
        assert!(
            (bytes..bytes + bytes / 8).contains(&taken),
            "{taken} {bytes}"
        );
        // Rows of 512 tokens 0.3, partial sums 0.5, 42 decoded experts 0.5.
        let taken = gb(activations(&config, 8192, 8));
        assert!((1.3..1.6).contains(&taken), "{taken}");
        // A prompt of a few tokens, of which nothing is decoded; else all of theirs, 40.
        let few = Config {
            batch: 5,
            ..config.clone()
        };
        let (as_they_are, decoded) = (activations(&few, 512, 8), activations(&few, 512, 4));
        assert!(gb(as_they_are) < 0.04, "{as_they_are}");
        assert_eq!(decoded - as_they_are, 40 * 2048 * 6144);
        assert!(gb(activations(&few, 65_536, 8)) < 0.1);
        // Rows of half the bytes, keys of the same.
        let narrow = Config {
            kv: KvFormat::Bf16,
            ..config.clone()
        };
        let bytes = 8192 * (78 * 576 * 2 + 21 * 128 * 4) as u64;
        assert_eq!(cache_bytes(&narrow, 8192), bytes);
        assert_eq!(cache_bytes(&config, 8192), 8192 * 4 * (78 * 576 + 21 * 128));
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
