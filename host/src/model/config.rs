//! `config.json` and `generation_config.json`: what families have in common.
//!
//! What the forward pass does not compute is refused here, by name.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::BATCH;
use super::error::ModelError;
use super::family;
use super::family::qwen3_moe::Dimensions;
use crate::backend::{Index, KvFormat, Mla, Router, Scoring};
use crate::expert::{ExpertShape, ScaleKind};
use crate::files;

/// Epsilon of the norms inside attention and indexer, whatever `rms_norm_eps` is.
pub const INNER_EPS: f32 = 1e-6;

/// No dimension is larger; keeps products of three within 64 bits.
const MAX_DIMENSION: usize = 1 << 20;

const UNSUPPORTED: &str = "models of this kind are not supported";
const DAMAGED: &str = "take the file from the model's publisher again";

/// Geometry and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `vocab_size`.
    pub vocab: usize,
    /// `hidden_size`.
    pub hidden: usize,
    /// `intermediate_size` of dense layers.
    pub intermediate: usize,
    /// `moe_intermediate_size`.
    pub moe_intermediate: usize,
    /// `moe_intermediate_size * n_shared_experts`; 0 where there is no shared expert.
    pub shared_intermediate: usize,
    /// `q_lora_rank`; 0 where attention is not latent, or queries are not compressed.
    pub q_lora: usize,
    /// `rms_norm_eps`.
    pub eps: f32,
    /// `rope_theta`.
    pub rope_theta: f64,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// Whether `lm_head` is the embedding table.
    pub tied: bool,
    /// Latent attention; where it is grouped, what the heads of one key head make of it.
    pub mla: Mla,
    /// Grouped-query attention instead.
    pub grouped: Option<Dimensions>,
    /// Indexer; without one `top_k` is more than any context.
    pub index: Index,
    /// Router.
    pub router: Router,
    /// One entry a layer.
    pub layers: Vec<LayerKind>,
    /// The layer after those, which predicts the token after the next one
    /// (`num_nextn_predict_layers`; of several the first). Files may lack it.
    pub nextn: Option<LayerKind>,
    /// Whether that layer is to be read too.
    pub mtp: bool,
    /// How caches are to be kept; no part of the file.
    pub kv: KvFormat,
    /// Tokens of a prompt that go through the model together; no part of the file.
    pub batch: usize,
    /// `eos_token_id`; none where generation never ends by itself.
    pub eos: Vec<u32>,
}

/// What differs between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// Routed experts instead of one feed-forward network.
    pub sparse: bool,
    /// Its own indexer; otherwise the lists of the last layer that has one.
    pub indexer: bool,
}

impl Config {
    /// Reads `config.json` in `dir`, and the end tokens of `generation_config.json` where there is
    /// one.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        if !dir.is_dir() {
            return Err(ModelError::io(
                dir,
                std::io::Error::new(std::io::ErrorKind::NotFound, "no such model directory"),
                "give a directory that `host convert` made (-m DIR)",
            ));
        }
        let object = Object::read(&dir.join("config.json"))?;
        let mut config = Self::parse(&object)?;
        let generation = dir.join("generation_config.json");
        if generation.is_file() {
            let generation = Object::read(&generation)?;
            if generation.get("eos_token_id").is_some() {
                config.eos = generation.ids("eos_token_id")?;
            }
        }
        for id in &config.eos {
            if *id as usize >= config.vocab {
                return Err(object.bad("eos_token_id", format!("ids below {}", config.vocab), id));
            }
        }
        Ok(config)
    }

    /// Experts' geometry with the given scales.
    pub fn expert_shape(&self, scales: ScaleKind) -> ExpertShape {
        ExpertShape {
            hidden: self.hidden,
            intermediate: self.moe_intermediate,
            scales,
        }
    }

    /// The layers, and after them the one that drafts where it is to be read.
    pub fn all_layers(&self) -> impl Iterator<Item = (usize, LayerKind)> + '_ {
        let mtp = self.nextn.filter(|_| self.mtp);
        self.layers.iter().copied().chain(mtp).enumerate()
    }

    /// Of all layers those with routed experts, ascending.
    pub fn sparse_layers(&self) -> impl Iterator<Item = usize> + '_ {
        self.all_layers()
            .filter_map(|(l, kind)| kind.sparse.then_some(l))
    }

    /// `1 / theta^(2i/rope)`, power and quotient rounded to f32 as torch does.
    pub fn inv_freq(&self) -> Vec<f32> {
        let rope = self.mla.rope;
        (0..rope / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / rope as f32;
                1.0 / libm::pow(self.rope_theta, exponent as f64) as f32
            })
            .collect()
    }

    fn parse(o: &Object) -> Result<Self, ModelError> {
        o.must("hidden_act", "silu", Some("silu"))?;
        for flag in ["attention_bias", "mlp_bias"] {
            if o.flag(flag, false)? {
                return Err(o.unsupported(flag, "false", "true"));
            }
        }
        if let Some(q) = o.get("quantization_config")
            && !fp8_blocks(q)
        {
            return Err(ModelError::field(
                &o.file,
                "quantization_config",
                "none, or fp8 (e4m3) in blocks of 128 x 128",
                short(q),
                "take the bf16 or the fp8 checkpoint",
            ));
        }
        family::config(o)
    }
}

/// What the families with latent attention do not share.
pub(super) struct LatentFamily {
    pub layers: Vec<LayerKind>,
    pub nextn: Option<LayerKind>,
    pub index: Index,
    /// Default of `routed_scaling_factor`.
    pub scaling_factor: f64,
}

/// The configuration of a family with latent attention and GLM's router.
pub(super) fn latent_config(o: &Object, family: LatentFamily) -> Result<Config, ModelError> {
    o.must("scoring_func", "sigmoid", Some("sigmoid"))?;
    o.must("topk_method", "noaux_tc", Some("noaux_tc"))?;
    if o.size_or("moe_layer_freq", 1)? != 1 {
        let found = o.size_or("moe_layer_freq", 1)?;
        return Err(o.unsupported("moe_layer_freq", "1", found));
    }
    let heads = o.size("num_attention_heads")?;
    let kv_heads = o.size_or("num_key_value_heads", heads)?;
    if kv_heads != heads {
        return Err(o.unsupported("num_key_value_heads", heads, kv_heads));
    }
    let (nope, rope) = (o.size("qk_nope_head_dim")?, o.size("qk_rope_head_dim")?);
    if rope % 2 != 0 {
        return Err(o.bad("qk_rope_head_dim", "an even number", rope));
    }
    let mla = Mla {
        heads,
        nope,
        rope,
        value: o.size("v_head_dim")?,
        latent: o.size("kv_lora_rank")?,
        scaling: (1.0 / ((nope + rope) as f64).sqrt()) as f32,
    };
    let q_lora = match o.get("q_lora_rank") {
        // An indexer reads compressed queries.
        None if family.index.heads > 0 => {
            return Err(o.unsupported("q_lora_rank", "a rank", "none"));
        }
        None => 0,
        Some(_) => o.size("q_lora_rank")?,
    };
    let shared = match o.get("n_shared_experts") {
        None => 1,
        Some(_) => o.count("n_shared_experts")?,
    };
    let config = Config {
        vocab: o.size("vocab_size")?,
        hidden: o.size("hidden_size")?,
        intermediate: o.size("intermediate_size")?,
        moe_intermediate: o.size("moe_intermediate_size")?,
        shared_intermediate: o.size("moe_intermediate_size")? * shared,
        q_lora,
        eps: o.single_or("rms_norm_eps", 1e-5)?,
        rope_theta: rope_theta(o)?,
        max_positions: o.size("max_position_embeddings")?,
        tied: o.flag("tie_word_embeddings", false)?,
        layers: family.layers,
        nextn: family.nextn,
        mtp: false,
        kv: KvFormat::F32,
        batch: BATCH,
        eos: o.ids("eos_token_id")?,
        mla,
        grouped: None,
        index: family.index,
        router: sigmoid_router(o, family.scaling_factor)?,
    };
    let values = heads * config.mla.value;
    check_dimensions(
        o,
        &config,
        &[
            ("q_lora_rank", config.q_lora),
            ("kv_lora_rank", config.mla.latent),
            ("num_attention_heads * v_head_dim", values),
        ],
    )?;
    Ok(config)
}

/// GLM's router.
fn sigmoid_router(o: &Object, scaling_factor: f64) -> Result<Router, ModelError> {
    let router = Router {
        scoring: Scoring::Sigmoid,
        experts: experts(o, "n_routed_experts")?,
        top_k: o.size("num_experts_per_tok")?,
        groups: o.size_or("n_group", 1)?,
        top_groups: o.size_or("topk_group", 1)?,
        normalise: o.flag("norm_topk_prob", true)?,
        scaling: o.single_or("routed_scaling_factor", scaling_factor)?,
    };
    let group = router.experts / router.groups;
    if !router.experts.is_multiple_of(router.groups) || (router.groups > 1 && group < 2) {
        let want = format!("groups of 2 or more that {} experts fill", router.experts);
        return Err(o.bad("n_group", want, router.groups));
    }
    if router.top_groups > router.groups {
        let want = format!("at most {}", router.groups);
        return Err(o.bad("topk_group", want, router.top_groups));
    }
    if router.top_k > group * router.top_groups {
        let want = format!("at most {}", group * router.top_groups);
        return Err(o.bad("num_experts_per_tok", want, router.top_k));
    }
    Ok(router)
}

/// Refuses dimensions that no kernel takes. Columns of expert matrices are dealt in units of 64, of
/// dense ones, `more` of which a family has, in units of 8.
pub(super) fn check_dimensions(
    o: &Object,
    config: &Config,
    more: &[(&str, usize)],
) -> Result<(), ModelError> {
    let unit = gpu::layout::COL_UNIT;
    let common = [
        ("hidden_size", config.hidden, unit),
        ("moe_intermediate_size", config.moe_intermediate, unit),
        ("intermediate_size", config.intermediate, 8),
    ];
    for (name, n, unit) in common
        .into_iter()
        .chain(more.iter().map(|(name, n)| (*name, *n, 8)))
    {
        if n % unit != 0 {
            return Err(o.unsupported(name, format!("a multiple of {unit}"), n));
        }
    }
    for (name, n, _) in &common[..2] {
        if *n > gpu::layout::MAX_COLS {
            let want = format!("at most {}", gpu::layout::MAX_COLS);
            return Err(o.unsupported(name, want, *n));
        }
    }
    Ok(())
}

/// Whether this is the quantisation of fp8 checkpoints; the tensors say where it was used.
fn fp8_blocks(q: &Value) -> bool {
    let is = |field: &str, want: Value| q[field].is_null() || q[field] == want;
    q["quant_method"] == "fp8"
        && is("fmt", "e4m3".into())
        && is("weight_block_size", vec![128, 128].into())
}

/// Refuses rotary angles for a part of what families rotate.
fn whole_heads_turn(o: &Object) -> Result<(), ModelError> {
    let part = o.number_or("partial_rotary_factor", 1.0)?;
    if part == 1.0 {
        return Ok(());
    }
    Err(o.unsupported("partial_rotary_factor", "1", part))
}

/// Base of the rotary angles. Of `rope_scaling` and `rope_parameters` transformers takes the former,
/// whole, unless it is empty.
pub(super) fn rope_theta(o: &Object) -> Result<f64, ModelError> {
    whole_heads_turn(o)?;
    let mut theta = None;
    for name in ["rope_parameters", "rope_scaling"] {
        let map = match o.get(name) {
            None => continue,
            Some(Value::Object(map)) if map.is_empty() => continue,
            Some(Value::Object(map)) => map,
            Some(value) => return Err(o.bad(name, "an object", short(value))),
        };
        if let Some((kind, value)) = map.iter().find(|(_, v)| v.is_object()) {
            let field = format!("{name}.{kind}");
            return Err(o.unsupported(
                &field,
                "one set of rotary angles for all layers",
                short(value),
            ));
        }
        let inner = Object {
            file: o.file.clone(),
            map: map.clone(),
        };
        for field in ["rope_type", "type"] {
            inner
                .must(field, "default", Some("default"))
                .map_err(|e| e.within(name))?;
        }
        whole_heads_turn(&inner).map_err(|e| e.within(name))?;
        theta = match inner.get("rope_theta") {
            Some(_) => Some(
                inner
                    .number_or("rope_theta", 0.0)
                    .map_err(|e| e.within(name))?,
            ),
            None => None,
        };
    }
    match theta {
        Some(theta) => Ok(theta),
        None => o.number_or("rope_theta", 10_000.0),
    }
}

/// How many routed experts a layer has, by any of the names that transformers reads.
pub(super) fn experts(o: &Object, name: &str) -> Result<usize, ModelError> {
    let names = ["n_routed_experts", "num_experts", "num_local_experts"];
    let named: Vec<&str> = names.into_iter().filter(|n| o.get(n).is_some()).collect();
    let n = o.size(named.first().unwrap_or(&name))?;
    for other in &named {
        let found = o.size(other)?;
        if found != n {
            return Err(o.bad(other, format!("{n}, as {} says", named[0]), found));
        }
    }
    Ok(n)
}

/// Which layers are sparse; without a list, all but the first, `dense` of them by default.
pub(super) fn sparse_layers(o: &Object, dense: usize) -> Result<Vec<bool>, ModelError> {
    let n = o.size("num_hidden_layers")?;
    match o.names("mlp_layer_types", n)? {
        Some(names) => o.choose("mlp_layer_types", &names, "dense", "sparse"),
        None => {
            let dense = match o.get("first_k_dense_replace") {
                None => dense,
                Some(_) => o.count("first_k_dense_replace")?,
            };
            Ok((0..n).map(|l| l >= dense).collect())
        }
    }
}

/// The layer that `num_nextn_predict_layers` announces: sparse, with an indexer of its own where the
/// family has them.
pub(super) fn nextn_layer(o: &Object, indexer: bool) -> Result<Option<LayerKind>, ModelError> {
    let layers = match o.get("num_nextn_predict_layers") {
        None => 0,
        Some(_) => o.count("num_nextn_predict_layers")?,
    };
    let kind = LayerKind {
        sparse: true,
        indexer,
    };
    Ok((layers > 0).then_some(kind))
}

/// A JSON object and where it came from.
pub(super) struct Object {
    file: PathBuf,
    map: Map<String, Value>,
}

impl Object {
    fn read(file: &Path) -> Result<Self, ModelError> {
        let bytes = files::read(file).map_err(|e| {
            ModelError::io(file, e, "a model directory is what `host convert` makes")
        })?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Self {
                file: file.into(),
                map,
            }),
            Ok(other) => Err(ModelError::field(
                file,
                "file",
                "a JSON object",
                short(&other),
                DAMAGED,
            )),
            Err(e) => Err(ModelError::field(file, "file", "JSON", e, DAMAGED)),
        }
    }

    /// The field, unless absent or null.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    pub fn bad(
        &self,
        field: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> ModelError {
        ModelError::field(&self.file, field, expected, found, DAMAGED)
    }

    pub fn unsupported(
        &self,
        field: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> ModelError {
        ModelError::field(&self.file, field, expected, found, UNSUPPORTED)
    }

    /// A count, which may be 0.
    pub fn count(&self, field: &str) -> Result<usize, ModelError> {
        self.integer(field, 0)
    }

    /// A positive dimension.
    pub fn size(&self, field: &str) -> Result<usize, ModelError> {
        self.integer(field, 1)
    }

    fn integer(&self, field: &str, least: usize) -> Result<usize, ModelError> {
        let expected = format!("an integer from {least} to {MAX_DIMENSION}");
        let Some(v) = self.get(field) else {
            return Err(self.bad(field, expected, "nothing"));
        };
        match v.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (least..=MAX_DIMENSION).contains(&n) => Ok(n),
            _ => Err(self.bad(field, expected, short(v))),
        }
    }

    pub fn size_or(&self, field: &str, default: usize) -> Result<usize, ModelError> {
        match self.get(field) {
            None => Ok(default),
            Some(_) => self.size(field),
        }
    }

    pub fn number_or(&self, field: &str, default: f64) -> Result<f64, ModelError> {
        match self.get(field) {
            None => Ok(default),
            Some(v) => match v.as_f64() {
                Some(x) if x > 0.0 && x.is_finite() => Ok(x),
                _ => Err(self.bad(field, "a positive number", short(v))),
            },
        }
    }

    /// A number that f32 holds as one that is positive and finite.
    pub fn single_or(&self, field: &str, default: f64) -> Result<f32, ModelError> {
        let x = self.number_or(field, default)? as f32;
        if x.is_normal() {
            Ok(x)
        } else {
            Err(self.bad(field, "a positive number within f32", x))
        }
    }

    pub fn flag(&self, field: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(self.bad(field, "true or false", short(v))),
        }
    }

    /// The field has this value; where absent, `default` stands for it.
    pub fn must(&self, field: &str, want: &str, default: Option<&str>) -> Result<(), ModelError> {
        let found = match self.get(field) {
            Some(v) => v.as_str().map_or_else(|| short(v), String::from),
            None => default.unwrap_or("nothing").into(),
        };
        if found == want {
            Ok(())
        } else {
            Err(self.unsupported(field, want, found))
        }
    }

    /// The field's text, or what else it is.
    pub fn text(&self, field: &str) -> String {
        match self.get(field) {
            Some(v) => v.as_str().map_or_else(|| short(v), String::from),
            None => "nothing".into(),
        }
    }

    /// A list of `n` strings.
    pub fn names(&self, field: &str, n: usize) -> Result<Option<Vec<String>>, ModelError> {
        let Some(v) = self.get(field) else {
            return Ok(None);
        };
        let names: Option<Vec<String>> = v
            .as_array()
            .and_then(|list| list.iter().map(|s| s.as_str().map(String::from)).collect());
        match names {
            Some(names) if names.len() == n => Ok(Some(names)),
            Some(names) => Err(self.bad(field, format!("{n} strings"), names.len())),
            None => Err(self.bad(field, format!("{n} strings"), short(v))),
        }
    }

    pub fn choose(
        &self,
        field: &str,
        names: &[String],
        no: &str,
        yes: &str,
    ) -> Result<Vec<bool>, ModelError> {
        names
            .iter()
            .map(|name| match name.as_str() {
                n if n == no => Ok(false),
                n if n == yes => Ok(true),
                n => Err(self.unsupported(field, format!("\"{no}\" or \"{yes}\""), n)),
            })
            .collect()
    }

    /// Token ids: none, one or a list.
    pub fn ids(&self, field: &str) -> Result<Vec<u32>, ModelError> {
        let one = |v: &Value| {
            v.as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| self.bad(field, "token ids", short(v)))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(v) => Ok(vec![one(v)?]),
        }
    }
}

/// A value's text, cut to a line.
fn short(v: &Value) -> String {
    let text = v.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Value {
        serde_json::json!({
            "model_type": "glm_moe_dsa", "hidden_act": "silu", "vocab_size": 32,
            "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
            "num_hidden_layers": 7, "num_attention_heads": 2, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
            "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 64, "first_k_dense_replace": 1,
            "eos_token_id": 3,
        })
    }

    fn parse(change: impl Fn(&mut Map<String, Value>)) -> Result<Config, ModelError> {
        let Value::Object(mut map) = base() else {
            unreachable!()
        };
        change(&mut map);
        Config::parse(&Object {
            file: "config.json".into(),
            map,
        })
    }

    #[test]
    fn layer_kinds_follow_transformers() {
        let kinds = |change: fn(&mut Map<String, Value>)| {
            let c = parse(change).unwrap();
            c.layers
                .iter()
                .map(|l| if l.indexer { 'F' } else { 'S' })
                .collect::<String>()
        };
        assert_eq!(kinds(|_| ()), "FFFFFFF");
        assert_eq!(
            kinds(|m| {
                m.insert("index_topk_freq".into(), 4.into());
                m.insert("index_skip_topk_offset".into(), 3.into());
            }),
            "FFFSSSF"
        );
        assert_eq!(
            kinds(|m| {
                m.insert("index_topk_pattern".into(), "FSSFSSS".into());
            }),
            "FSSFSSS"
        );
        let c = parse(|_| ()).unwrap();
        assert_eq!(c.sparse_layers().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(c.eos, [3]);
    }

    #[test]
    fn rotary_bases_are_read_as_transformers_reads_them() {
        let theta = |fields: Value| {
            let Value::Object(fields) = fields else {
                unreachable!()
            };
            parse(|m| m.extend(fields.clone())).unwrap().rope_theta
        };
        let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(theta(json("{}")), 10_000.0);
        assert_eq!(theta(json(r#"{"rope_theta": 50}"#)), 50.0);
        let parameters = r#"{"rope_theta": 50, "rope_parameters": {"rope_theta": 70}}"#;
        assert_eq!(theta(json(parameters)), 70.0);
        let empty = r#"{"rope_scaling": {}, "rope_parameters": {"rope_theta": 70}}"#;
        assert_eq!(theta(json(empty)), 70.0);
        let both = r#"{"rope_scaling": {"rope_theta": 90}, "rope_parameters": {"rope_theta": 70}}"#;
        assert_eq!(theta(json(both)), 90.0);
        let neither = r#"{"rope_scaling": {"type": "default"}, "rope_theta": 50,
                          "rope_parameters": {"rope_theta": 70}}"#;
        assert_eq!(theta(json(neither)), 50.0);
    }

    #[test]
    fn no_shared_expert() {
        let c = parse(|m| drop(m.insert("n_shared_experts".into(), 0.into())));
        assert_eq!(c.unwrap().shared_intermediate, 0);
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        let refused = |field: &str, value: Value| {
            let e = parse(|m| {
                m.insert(field.into(), value.clone());
            })
            .unwrap_err()
            .to_string();
            assert!(e.starts_with("config.json: "), "{e}");
            assert!(
                e.contains(field) || field.starts_with("rope"),
                "{field}: {e}"
            );
        };
        refused("model_type", "llama".into());
        refused("attention_bias", true.into());
        refused("rope_interleave", false.into());
        refused("indexer_rope_interleave", false.into());
        refused("hidden_act", "gelu".into());
        refused("hidden_size", 100.into());
        refused("hidden_size", 0.into());
        refused("hidden_size", (-5).into());
        refused("hidden_size", "big".into());
        refused("hidden_size", 16384.into());
        refused("vocab_size", u64::MAX.into());
        refused("num_experts_per_tok", 9.into());
        refused("num_experts_per_tok", 0.into());
        refused("rms_norm_eps", 1e300.into());
        refused("routed_scaling_factor", 1e-300.into());
        refused("n_group", 3.into());
        refused(
            "quantization_config",
            serde_json::json!({"quant_method": "awq"}),
        );
        refused(
            "quantization_config",
            serde_json::json!({"quant_method": "fp8", "weight_block_size": [1, 128]}),
        );
        let fp8 = serde_json::json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        parse(|m| drop(m.insert("quantization_config".into(), fp8.clone()))).unwrap();
        refused(
            "rope_parameters",
            serde_json::json!({"rope_type": "yarn", "rope_theta": 1e4}),
        );
        refused(
            "rope_parameters",
            serde_json::json!({"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        );
        refused("partial_rotary_factor", 0.25.into());
        let linear = serde_json::json!({"type": "linear", "factor": 2.0});
        refused("rope_scaling", linear.clone());
        let e = parse(|m| {
            m.insert(
                "rope_parameters".into(),
                serde_json::json!({"rope_theta": 1e4}),
            );
            m.insert("rope_scaling".into(), linear.clone());
        });
        let e = e.unwrap_err().to_string();
        assert!(
            e.contains("rope_scaling.type: expected default, found linear"),
            "{e}"
        );
        let each = serde_json::json!({"deepseek_sparse_attention": {"rope_theta": 1e4}});
        refused("rope_parameters", each);
        refused("q_lora_rank", Value::Null); // the indexer's queries
        refused("num_experts", 4.into());
        let whole = serde_json::json!({"rope_theta": 1e4, "partial_rotary_factor": 1.0});
        parse(|m| drop(m.insert("rope_parameters".into(), whole.clone()))).unwrap();
        refused(
            "indexer_types",
            serde_json::json!(["shared", "full", "full", "full", "full", "full", "full"]),
        );
        refused("mlp_layer_types", serde_json::json!(["dense"]));
        assert!(
            parse(|m| {
                m.remove("kv_lora_rank");
            })
            .is_err()
        );
        // More experts a token than the groups that are kept hold: 2 of 4 groups of 2.
        let grouped = |top_k: usize| {
            parse(|m| {
                m.insert("n_group".into(), 4.into());
                m.insert("topk_group".into(), 2.into());
                m.insert("num_experts_per_tok".into(), top_k.into());
            })
        };
        assert_eq!(grouped(4).unwrap().router.top_k, 4);
        let e = grouped(5).unwrap_err().to_string();
        assert!(e.contains("num_experts_per_tok: expected at most 4"), "{e}");
    }
}
