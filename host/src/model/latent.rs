//! Multi-head latent attention, and the indexer that lists what it reads.

use super::cache::Cache;
use super::config::INNER_EPS;
use super::session::Scratch;
use super::weights::{Indexer, Latent, Model};
use crate::backend::{Attend, LoadExperts, Rows, RowsMut, rows, rows_mut};

impl<B: LoadExperts> Model<B> {
    /// Latent attention of the normed input.
    pub(super) fn latent(
        &self,
        layer: &Latent<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c, mla, col) = (&self.backend, &self.config, &self.config.mla, &self.columns);
        let width = mla.latent + mla.rope;
        let q_head = mla.nope + mla.rope;
        self.linear(
            rows(&s.normed, c.hidden),
            &layer.input,
            c.hidden,
            tokens,
            false,
            rows_mut(&mut s.projected, col.stride),
        )?;
        b.aside(&mut || self.latent_rows(layer, cache, s, first, tokens))?;
        let (queries, cols) = match &layer.q_norm {
            Some(norm) => {
                b.rms_norm(
                    rows(&s.projected, col.stride),
                    norm,
                    INNER_EPS,
                    c.q_lora,
                    tokens,
                    rows_mut(&mut s.q_latent, c.q_lora),
                )?;
                (rows(&s.q_latent, c.q_lora), c.q_lora)
            }
            None => (rows(&s.normed, c.hidden), c.hidden),
        };
        self.linear(
            queries,
            &layer.q,
            cols,
            tokens,
            false,
            rows_mut(&mut s.q, mla.heads * q_head),
        )?;
        b.absorb_query(
            rows(&s.q, mla.heads * q_head),
            layer.kv_b.weight(),
            mla,
            tokens,
            rows_mut(&mut s.q_absorbed, mla.heads * width),
        )?;
        b.rope(
            Rows {
                buf: &s.q,
                offset: mla.nope,
                stride: mla.heads * q_head,
            },
            q_head,
            mla.heads,
            mla.rope,
            0,
            &self.inv_freq,
            first,
            tokens,
            RowsMut {
                buf: &mut s.q_absorbed,
                offset: mla.latent,
                stride: mla.heads * width,
                moves: false,
            },
            width,
        )?;
        b.together()?;
        // Lists that hold every position say no more than causality does.
        let listed = first + tokens > c.index.top_k;
        if let (Some(indexer), Some(keys), true) = (&layer.indexer, &cache.index_keys, listed) {
            self.index(indexer, keys, s, first, tokens)?;
        }
        let attend = if listed {
            Attend::Listed {
                lists: &s.lists,
                top_k: c.index.top_k,
            }
        } else {
            Attend::Causal
        };
        b.attention(
            rows(&s.q_absorbed, mla.heads * width),
            cache.rows[0].cached(),
            attend,
            mla,
            first,
            tokens,
            rows_mut(&mut s.attended, mla.heads * mla.latent),
        )?;
        let n = mla.heads * mla.value;
        let attended = rows(&s.attended, mla.heads * mla.latent);
        b.expand_value(
            attended,
            layer.kv_b.weight(),
            mla,
            tokens,
            rows_mut(&mut s.values, n),
        )?;
        self.linear(
            rows(&s.values, n),
            &layer.o,
            n,
            tokens,
            true,
            rows_mut(&mut s.x, c.hidden),
        )
    }

    /// Appends a layer's latent rows, and the keys of its indexer if it has one.
    fn latent_rows(
        &self,
        layer: &Latent<B>,
        cache: &mut Cache<B>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c, col) = (&self.backend, &self.config, &self.columns);
        let (mla, index) = (&c.mla, &c.index);
        let width = mla.latent + mla.rope;
        let latent = &mut cache.rows[0];
        let projected = |offset| Rows {
            buf: &s.projected,
            offset,
            stride: col.stride,
        };
        b.rms_norm(
            projected(col.latent),
            &layer.kv_norm,
            INNER_EPS,
            mla.latent,
            tokens,
            latent.rows(&mut s.wide, first, width, 0),
        )?;
        b.rope(
            projected(col.rope),
            mla.rope,
            1,
            mla.rope,
            0,
            &self.inv_freq,
            first,
            tokens,
            latent.rows(&mut s.wide, first, width, mla.latent),
            mla.rope,
        )?;
        latent.keep(b, &s.wide, first, width, tokens)?;
        let (Some(indexer), Some(keys)) = (&layer.indexer, &mut cache.index_keys) else {
            return Ok(());
        };
        b.layer_norm(
            projected(col.index_key),
            &indexer.key_norm,
            &indexer.key_bias,
            INNER_EPS,
            index.dim,
            tokens,
            rows_mut(&mut s.index_key, index.dim),
        )?;
        b.rope(
            rows(&s.index_key, index.dim),
            index.dim,
            1,
            mla.rope,
            index.dim - mla.rope,
            &self.inv_freq,
            first,
            tokens,
            RowsMut {
                buf: keys,
                offset: first * index.dim,
                stride: index.dim,
                moves: true,
            },
            index.dim,
        )
    }

    /// Chooses each token's positions.
    fn index(
        &self,
        indexer: &Indexer<B>,
        keys: &B::Buf<f32>,
        s: &mut Scratch<B>,
        first: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let (b, c, col) = (&self.backend, &self.config, &self.columns);
        let (rope, index) = (c.mla.rope, &c.index);
        let projected = |offset| Rows {
            buf: &s.projected,
            offset,
            stride: col.stride,
        };
        let q_width = index.heads * index.dim;
        self.linear(
            rows(&s.q_latent, c.q_lora),
            &indexer.query,
            c.q_lora,
            tokens,
            false,
            rows_mut(&mut s.index_q, q_width),
        )?;
        b.rope(
            rows(&s.index_q, q_width),
            index.dim,
            index.heads,
            rope,
            index.dim - rope,
            &self.inv_freq,
            first,
            tokens,
            rows_mut(&mut s.index_q_turned, q_width),
            index.dim,
        )?;
        b.index(
            rows(&s.index_q_turned, q_width),
            keys,
            projected(col.index_weights),
            index,
            first,
            tokens,
            &mut s.lists,
        )
    }
}
