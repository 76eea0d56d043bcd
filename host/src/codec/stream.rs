//! A coded matrix of any codec, behind one interface.

use std::ops::Range;

use rayon::prelude::*;

use super::{Arm, CodecError, Coded, plane3};

/// A coded matrix to decode from.
#[derive(Clone, Copy, Debug)]
pub enum Stream<'a> {
    /// rANS.
    Rans(Coded<'a>),
    /// plane3.
    Plane3(plane3::Coded<'a>),
}

impl<'a> From<Coded<'a>> for Stream<'a> {
    fn from(coded: Coded<'a>) -> Self {
        Stream::Rans(coded)
    }
}

impl<'a> From<plane3::Coded<'a>> for Stream<'a> {
    fn from(coded: plane3::Coded<'a>) -> Self {
        Stream::Plane3(coded)
    }
}

impl Stream<'_> {
    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        match self {
            Stream::Rans(c) => c.blocks().rows,
            Stream::Plane3(c) => c.layout().rows,
        }
    }

    /// Bytes of a packed row.
    pub fn row_bytes(&self) -> usize {
        match self {
            Stream::Rans(c) => c.row_bytes(),
            Stream::Plane3(c) => c.row_bytes(),
        }
    }

    /// Blocks of rows.
    pub fn blocks(&self) -> usize {
        match self {
            Stream::Rans(c) => c.blocks().blocks,
            Stream::Plane3(c) => c.layout().blocks(),
        }
    }

    /// Rows of a block.
    pub fn block_rows(&self, block: usize) -> Range<usize> {
        match self {
            Stream::Rans(c) => c.block_rows(block),
            Stream::Plane3(c) => c.block_rows(block),
        }
    }

    /// Decodes one block, all its columns, into `block_rows(block).len()` packed rows.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn decode_block(&self, arm: Arm, block: usize, out: &mut [u8]) -> Result<(), CodecError> {
        match self {
            Stream::Rans(c) => c.decode_block(arm, block, out),
            Stream::Plane3(c) => c.decode_block(arm, block, out),
        }
    }

    /// Decodes the matrix into `rows * cols / 2` packed bytes.
    pub fn decode(&self, arm: Arm, out: &mut [u8]) -> Result<(), CodecError> {
        match self {
            Stream::Rans(c) => c.decode(arm, out),
            Stream::Plane3(c) => c.decode(arm, out),
        }
    }

    /// The same, blocks by all processors.
    pub fn decode_by_all(&self, arm: Arm, out: &mut [u8]) -> Result<(), CodecError> {
        let stride = self.row_bytes();
        let expected = self.rows() * stride;
        if out.len() != expected {
            return Err(CodecError::Output {
                expected,
                found: out.len(),
            });
        }
        let mut rest = out;
        let blocks: Vec<(usize, &mut [u8])> = (0..self.blocks())
            .map(|block| {
                let len = self.block_rows(block).len() * stride;
                let (of_block, behind) = std::mem::take(&mut rest).split_at_mut(len);
                rest = behind;
                (block, of_block)
            })
            .collect();
        (blocks.into_par_iter()).try_for_each(|(block, out)| self.decode_block(arm, block, out))
    }
}
