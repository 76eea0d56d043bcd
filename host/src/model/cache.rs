//! What is kept of a layer between batches.
//!
//! Rows are computed as f32. A cache of f32 has them written in place; one of bf16 has them rounded on the
//! way from a buffer of the batch's rows.

use crate::backend::{Backend, Cached, KvFormat, RowsMut, rows};

/// A layer's.
pub(super) struct Cache<B: Backend> {
    /// `[positions, latent + rope]`: one, or one for each key head.
    pub rows: Vec<Entries<B>>,
    /// `[positions, dim]`, where there is an indexer.
    pub index_keys: Option<B::Buf<f32>>,
}

/// Rows of attention.
pub(super) enum Entries<B: Backend> {
    F32(B::Buf<f32>),
    Bf16(B::Buf<u16>),
}

impl<B: Backend> Entries<B> {
    pub fn new(b: &B, format: KvFormat, len: usize) -> Result<Self, B::Error> {
        Ok(match format {
            KvFormat::F32 => Self::F32(b.alloc(len)?),
            KvFormat::Bf16 => Self::Bf16(b.alloc(len)?),
        })
    }

    /// As attention reads them.
    pub fn cached(&self) -> Cached<'_, B> {
        match self {
            Self::F32(rows) => Cached::F32(rows),
            Self::Bf16(rows) => Cached::Bf16(rows),
        }
    }

    /// Where the rows of positions from `first` on are computed to, from column `column` of `width` on:
    /// here, or in `wide` until [`Entries::keep`].
    pub fn rows<'a>(
        &'a mut self,
        wide: &'a mut B::Buf<f32>,
        first: usize,
        width: usize,
        column: usize,
    ) -> RowsMut<'a, B::Buf<f32>> {
        match self {
            Self::F32(rows) => RowsMut {
                buf: rows,
                offset: first * width + column,
                stride: width,
                moves: true,
            },
            Self::Bf16(_) => RowsMut {
                buf: wide,
                offset: column,
                stride: width,
                moves: false,
            },
        }
    }

    /// Takes in the `tokens` rows that were computed.
    pub fn keep(
        &mut self,
        b: &B,
        wide: &B::Buf<f32>,
        first: usize,
        width: usize,
        tokens: usize,
    ) -> Result<(), B::Error> {
        let Self::Bf16(kept) = self else {
            return Ok(());
        };
        let to = RowsMut {
            buf: kept,
            offset: first * width,
            stride: width,
            moves: true,
        };
        b.narrow(rows(wide, width), width, tokens, to)
    }
}
