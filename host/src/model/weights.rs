//! Weights on a back end.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::check::check_dense;
use super::config::{Config, LayerKind};
use super::directory::Dense;
use super::error::ModelError;
use super::family::qwen3_moe::Grouped;
use super::inventory::at;
use super::matrix::{HostMatrix, Matrix, Part};
use super::mtp::Mtp;
use super::repin::Moving;
use super::source::Source;
use crate::archive::{Archive, LOW_NIBBLES};
use crate::backend::{LoadExperts, Scoring, TieredLayer};
use crate::disk::reader::DirectFile;
use crate::expert::{Form, Tier};
use crate::interrupt;
use crate::placement::{self, Profile, Used};
use crate::trace::Trace;

/// Experts of a model by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The tier they all are in.
    pub tier: Tier,
    /// Experts, over all layers.
    pub experts: usize,
    /// Bytes they take there.
    pub bytes: u64,
}

/// A feed-forward network: `[gate; up]` in one matrix of `2 * width` rows, and `down`.
pub(super) struct Ffn<B: LoadExperts> {
    pub width: usize,
    pub gate_up: Matrix<B>,
    pub down: Matrix<B>,
}

/// A layer's own indexer.
pub(super) struct Indexer<B: LoadExperts> {
    pub query: Matrix<B>,
    pub key_norm: B::Buf<f32>,
    pub key_bias: B::Buf<f32>,
}

/// A router with its experts.
pub(super) struct Moe<B: LoadExperts> {
    pub router: Matrix<B>,
    pub bias: B::Buf<f32>,
    pub experts: B::Experts,
    /// Of int8 experts the low nibbles; the high ones are `experts`.
    pub low: Option<B::Experts>,
    pub shared: Option<Ffn<B>>,
}

pub(super) enum Mlp<B: LoadExperts> {
    Dense(Ffn<B>),
    Sparse(Moe<B>),
}

/// Multi-head latent attention.
pub(super) struct Latent<B: LoadExperts> {
    /// What multiplies the normed input: rows of `q_a` where queries are compressed, `kv_a`, and where the layer has an
    /// indexer `wk` and `weights_proj` ([`Columns`]).
    pub input: Matrix<B>,
    /// None where queries are not compressed.
    pub q_norm: Option<B::Buf<f32>>,
    /// `q_b`, or the one matrix of queries that are not compressed.
    pub q: Matrix<B>,
    pub kv_norm: B::Buf<f32>,
    /// Rows that multiply queries on one side and give values on the other.
    pub kv_b: Part<B>,
    pub o: Matrix<B>,
    pub indexer: Option<Indexer<B>>,
}

pub(super) enum Attention<B: LoadExperts> {
    Latent(Latent<B>),
    Grouped(Grouped<B>),
}

pub(super) struct Layer<B: LoadExperts> {
    pub input_norm: B::Buf<f32>,
    pub attention: Attention<B>,
    pub post_norm: B::Buf<f32>,
    pub mlp: Mlp<B>,
}

/// Where the parts of a layer's projected input are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    pub latent: usize,
    pub rope: usize,
    pub index_key: usize,
    pub index_weights: usize,
    /// From row to row; keeps rows 32-byte aligned.
    pub stride: usize,
}

impl Columns {
    pub fn new(c: &Config) -> Self {
        let latent = c.q_lora;
        let rope = latent + c.mla.latent;
        let index_key = rope + c.mla.rope;
        let index_weights = index_key + c.index.dim;
        let width = index_weights + c.index.heads;
        Self {
            latent,
            rope,
            index_key,
            index_weights,
            stride: width.next_multiple_of(8),
        }
    }
}

/// A model whose weights are on back end `B`.
pub struct Model<B: LoadExperts> {
    /// Different for every model of the process.
    pub(super) id: u64,
    pub(super) backend: B,
    pub(super) config: Config,
    pub(super) columns: Columns,
    pub(super) embedding: Part<B>,
    pub(super) layers: Vec<Layer<B>>,
    /// What drafts.
    pub(super) mtp: Option<Mtp<B>>,
    pub(super) norm: B::Buf<f32>,
    /// `None` where it is the embedding table.
    pub(super) head: Option<Part<B>>,
    pub(super) inv_freq: B::Buf<f32>,
    placement: Placement,
    /// Experts chosen so far, where that is wanted.
    pub(super) usage: RefCell<Option<Profile>>,
    /// Routing so far, where that is wanted.
    pub(super) trace: RefCell<Option<Trace>>,
    /// Routing in place of the routers'.
    pub(super) replay: Option<Replay<B>>,
    /// Experts that change places.
    pub(super) moving: RefCell<Moving>,
}

/// A routing trace on a back end.
pub(super) struct Replay<B: LoadExperts> {
    pub chosen: B::Buf<u32>,
    pub given: B::Buf<f32>,
    /// What is guessed of `chosen` one layer before.
    pub guessed: B::Buf<u32>,
    pub tokens: usize,
}

/// Number of the next model.
static NEXT: AtomicU64 = AtomicU64::new(0);

pub(super) struct Loader<'a, B> {
    pub backend: &'a B,
    dense: &'a Dense,
    pub config: &'a Config,
    expert_bytes: u64,
}

impl<'a, B: LoadExperts> Loader<'a, B> {
    pub fn place<T>(&self, what: &str, placed: Result<T, B::Error>) -> Result<T, ModelError> {
        placed.map_err(|e| ModelError::Place {
            what: what.into(),
            source: Box::new(e),
        })
    }

    /// A matrix as its file has it.
    pub fn read(&self, name: &str, shape: &[usize]) -> Result<HostMatrix<'a>, ModelError> {
        self.dense.matrix(name, shape)
    }

    /// Matrices of equal row length below one another.
    pub fn upload(
        &self,
        name: &str,
        matrices: &[HostMatrix<'_>],
        cols: usize,
    ) -> Result<Matrix<B>, ModelError> {
        self.place(name, Matrix::stack(self.backend, matrices, cols))
    }

    fn stack(&self, parts: &[(&str, &[usize])]) -> Result<Matrix<B>, ModelError> {
        let matrices = parts
            .iter()
            .map(|(name, shape)| self.read(name, shape))
            .collect::<Result<Vec<_>, _>>()?;
        let (name, shape) = parts[0];
        self.upload(name, &matrices, shape[1])
    }

    pub fn one(&self, name: &str, shape: &[usize]) -> Result<Matrix<B>, ModelError> {
        self.stack(&[(name, shape)])
    }

    fn whole(&self, name: &str, shape: &[usize]) -> Result<Part<B>, ModelError> {
        let matrix = self.read(name, shape)?;
        self.place(name, matrix.upload(self.backend))
    }

    /// A norm's weights or bias, or a router's.
    pub fn vector(&self, name: &str, len: usize) -> Result<B::Buf<f32>, ModelError> {
        self.vector_by(name, len, 0..len)
    }

    /// The same in another order.
    pub fn vector_by(
        &self,
        name: &str,
        len: usize,
        order: impl Iterator<Item = usize>,
    ) -> Result<B::Buf<f32>, ModelError> {
        let numbers = self.dense.f32(name, &[len])?;
        let numbers: Vec<f32> = order.map(|i| numbers[i]).collect();
        self.place(name, self.backend.upload(&numbers))
    }

    fn ffn(&mut self, l: usize, prefix: &str, width: usize) -> Result<Ffn<B>, ModelError> {
        let hidden = self.config.hidden;
        let name = |part: &str| at(l, &format!("{prefix}{part}.weight"));
        Ok(Ffn {
            width,
            gate_up: self.stack(&[
                (&name("gate_proj"), &[width, hidden]),
                (&name("up_proj"), &[width, hidden]),
            ])?,
            down: self.one(&name("down_proj"), &[hidden, width])?,
        })
    }

    /// A layer's routed experts, where the source says.
    fn experts(&mut self, l: usize, source: &Source, form: Form) -> Result<B::Experts, ModelError> {
        let what = format!("the experts of layer {}", l & !LOW_NIBBLES as usize);
        // Both halves of an int8 layer are in one place.
        if let Some(t) = source.tiers().filter(|_| !source.is_int8(l))
            && let Ok(index) = t.archive.layers().binary_search(&(l as u32))
        {
            let layer = TieredLayer {
                archive: &t.archive,
                file: &t.file,
                number: l as u32,
                tiers: &t.tiers[index],
                devices: t.devices.get(index).map_or(&[], Vec::as_slice),
                staged: t.staged,
                cached: t.cached,
                moving: t.moving,
            };
            let placed = self.backend.load_tiers(&layer, source.shape(), form);
            if let Some(placed) = self.place(&what, placed)? {
                self.expert_bytes += source.layer_bytes(&t.archive, l)?;
                return Ok(placed);
            }
        }
        let (experts, bytes) = source.layer(l)?;
        self.expert_bytes += bytes;
        self.place(
            &what,
            self.backend.load_experts(experts, source.shape(), form),
        )
    }

    fn latent(&mut self, l: usize, kind: LayerKind) -> Result<Latent<B>, ModelError> {
        let c = self.config;
        let mla = &c.mla;
        let attn = |part: &str| at(l, &format!("self_attn.{part}.weight"));
        let (q_a, kv_a) = (attn("q_a_proj"), attn("kv_a_proj_with_mqa"));
        let (wk, weights) = (attn("indexer.wk"), attn("indexer.weights_proj"));
        let shapes = [
            [c.q_lora, c.hidden],
            [mla.latent + mla.rope, c.hidden],
            [c.index.dim, c.hidden],
            [c.index.heads, c.hidden],
        ];
        let parts: [(&str, &[usize]); 4] = [
            (&q_a, &shapes[0]),
            (&kv_a, &shapes[1]),
            (&wk, &shapes[2]),
            (&weights, &shapes[3]),
        ];
        let first = usize::from(c.q_lora == 0);
        let input = self.stack(&parts[first..if kind.indexer { 4 } else { 2 }])?;
        let queries = mla.heads * (mla.nope + mla.rope);
        let (q_norm, q) = match c.q_lora {
            0 => (None, self.one(&attn("q_proj"), &[queries, c.hidden])?),
            rank => {
                let norm = self.vector(&attn("q_a_layernorm"), rank)?;
                (Some(norm), self.one(&attn("q_b_proj"), &[queries, rank])?)
            }
        };
        let indexer = if kind.indexer {
            Some(Indexer {
                query: self.one(
                    &attn("indexer.wq_b"),
                    &[c.index.heads * c.index.dim, c.q_lora],
                )?,
                key_norm: self.vector(&attn("indexer.k_norm"), c.index.dim)?,
                key_bias: self.vector(&at(l, "self_attn.indexer.k_norm.bias"), c.index.dim)?,
            })
        } else {
            None
        };
        Ok(Latent {
            input,
            q_norm,
            q,
            kv_norm: self.vector(&attn("kv_a_layernorm"), mla.latent)?,
            kv_b: self.whole(
                &attn("kv_b_proj"),
                &[mla.heads * (mla.nope + mla.value), mla.latent],
            )?,
            o: self.one(&attn("o_proj"), &[c.hidden, mla.heads * mla.value])?,
            indexer,
        })
    }

    pub fn layer(
        &mut self,
        l: usize,
        kind: LayerKind,
        source: &Source,
        form: Form,
    ) -> Result<Layer<B>, ModelError> {
        let c = self.config;
        let attention = match &c.grouped {
            Some(grouped) => Attention::Grouped(Grouped::load(self, l, grouped)?),
            None => Attention::Latent(self.latent(l, kind)?),
        };
        let mlp = if kind.sparse {
            let bias = at(l, "mlp.gate.e_score_correction_bias");
            let bias = match c.router.scoring {
                Scoring::Sigmoid => self.vector(&bias, c.router.experts)?,
                Scoring::Softmax => self.place(&bias, self.backend.alloc(c.router.experts))?,
            };
            let experts = self.experts(l, source, form)?;
            let low = match source.is_int8(l) {
                true => Some(self.experts(l | LOW_NIBBLES as usize, source, form)?),
                false => None,
            };
            Mlp::Sparse(Moe {
                router: self.one(&at(l, "mlp.gate.weight"), &[c.router.experts, c.hidden])?,
                bias,
                experts,
                low,
                shared: match c.shared_intermediate {
                    0 => None,
                    width => Some(self.ffn(l, "mlp.shared_experts.", width)?),
                },
            })
        } else {
            Mlp::Dense(self.ffn(l, "mlp.", c.intermediate)?)
        };
        Ok(Layer {
            input_norm: self.vector(&at(l, "input_layernorm.weight"), c.hidden)?,
            attention,
            post_norm: self.vector(&at(l, "post_attention_layernorm.weight"), c.hidden)?,
            mlp,
        })
    }
}

impl<B: LoadExperts> Model<B> {
    /// Places the model of directory `dir`, its experts from `source`. Every shape is checked
    /// before anything is allocated. `progress` is called with each layer done.
    pub fn load(
        backend: B,
        dir: &Path,
        config: Config,
        source: &Source,
        form: Form,
        mut progress: impl FnMut(usize),
    ) -> Result<Self, ModelError> {
        let dense = check_dense(dir, &config)?;
        let mut loader = Loader {
            backend: &backend,
            dense: &dense,
            config: &config,
            expert_bytes: 0,
        };
        let table = [config.vocab, config.hidden];
        let embedding = loader.whole("model.embed_tokens.weight", &table)?;
        let head = if config.tied {
            None
        } else {
            Some(loader.whole("lm_head.weight", &table)?)
        };
        let norm = loader.vector("model.norm.weight", config.hidden)?;
        let inv_freq = loader.place("inv_freq", backend.upload(&config.inv_freq()))?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (l, kind) in config.layers.iter().enumerate() {
            if interrupt::requested() {
                return Err(ModelError::Interrupted);
            }
            layers.push(loader.layer(l, *kind, source, form)?);
            progress(l + 1);
        }
        let mtp = match config.nextn.filter(|_| config.mtp) {
            None => None,
            Some(kind) => Some(Mtp::load(&mut loader, kind, source, form)?),
        };
        if mtp.is_some() {
            progress(layers.len() + 1);
        }
        backend.loaded();
        let experts = config.sparse_layers().count() * config.router.experts;
        let placement = Placement {
            tier: source.tier(),
            experts,
            bytes: loader.expert_bytes,
        };
        Ok(Self {
            columns: Columns::new(&config),
            backend,
            config,
            embedding,
            layers,
            mtp,
            norm,
            head,
            inv_freq,
            placement,
            usage: RefCell::new(None),
            trace: RefCell::new(None),
            moving: RefCell::default(),
            replay: None,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Does `work` with all layers but the last; for measurements.
    pub(crate) fn without_last_layer<T>(&mut self, work: impl FnOnce(&Self) -> T) -> T {
        let (layer, kind) = (self.layers.pop(), self.config.layers.pop());
        let done = work(self);
        self.layers.extend(layer);
        self.config.layers.extend(kind);
        done
    }

    /// Places the last layer's experts in `tiers`, one for each; false where a back end has one place only, and of
    /// int8 experts. For measurements.
    pub(crate) fn tier_last_layer(
        &mut self,
        archive: &Archive,
        file: &Arc<DirectFile>,
        tiers: &[placement::Tier],
    ) -> Result<bool, ModelError> {
        let number = self.layers.len() - 1;
        let Some(Layer {
            mlp: Mlp::Sparse(moe @ Moe { low: None, .. }),
            ..
        }) = self.layers.last_mut()
        else {
            return Ok(false);
        };
        let layer = TieredLayer {
            archive,
            file,
            number: number as u32,
            tiers,
            devices: &[],
            staged: self.config.router.top_k,
            cached: true,
            moving: false,
        };
        let placed = (self.backend).load_tiers(&layer, *archive.shape(), Form::Fused);
        let placed = placed.map_err(|e| ModelError::Place {
            what: format!("the experts of layer {number}"),
            source: Box::new(e),
        })?;
        let Some(placed) = placed else {
            return Ok(false);
        };
        moe.experts = placed;
        // What was recorded before has the others.
        self.id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.backend.loaded();
        Ok(true)
    }

    /// From here on counts which experts are chosen.
    pub fn record_usage(&self) {
        *self.usage.borrow_mut() = Some(Profile::new());
    }

    /// What was chosen since [`Model::record_usage`].
    pub fn usage(&self) -> Option<Profile> {
        let mut usage = self.usage.borrow().clone();
        if let Some(usage) = &mut usage {
            let [guessed, chosen, ..] = self.used().ahead;
            usage.add_guessed(guessed as f64, chosen as f64);
        }
        usage
    }

    /// From here on goes on with what another model of the same weights had counted and noted.
    pub(crate) fn restore(&self, usage: Option<Profile>, trace: Option<Trace>) {
        *self.usage.borrow_mut() = usage;
        *self.trace.borrow_mut() = trace;
    }

    /// From here on notes how tokens are routed.
    pub fn record_trace(&self) {
        *self.trace.borrow_mut() = Some(Trace::new(&self.config));
    }

    /// How tokens were routed since [`Model::record_trace`].
    pub fn trace(&self) -> Option<Trace> {
        self.trace.borrow().clone()
    }

    /// From here on the token at position `p` goes to the experts of token `p mod tokens` of a trace,
    /// whatever the routers say. Where what a layer will choose is guessed, the share `foreseen` is right.
    pub fn replay(&mut self, trace: &Trace, foreseen: f64) -> Result<(), B::Error> {
        self.replay = Some(Replay {
            chosen: self.backend.upload(&trace.ids)?,
            given: self.backend.upload(&trace.weights)?,
            guessed: self.backend.upload(&trace.guesses(foreseen))?,
            tokens: trace.tokens,
        });
        // What was recorded before asks the routers.
        self.id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// How often experts of each tier were chosen.
    pub fn used(&self) -> Used {
        let mut sum = Used::default();
        for layer in self.layers.iter().chain(self.mtp.iter().map(Mtp::layer)) {
            if let Mlp::Sparse(moe) = &layer.mlp {
                sum.add(&self.backend.used(&moe.experts));
            }
        }
        sum
    }

    /// The model's geometry.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The back end.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Where the experts are.
    pub fn placement(&self) -> Placement {
        self.placement
    }
}
