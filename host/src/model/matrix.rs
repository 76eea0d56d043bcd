//! Dense matrices: as the files have them, and on a back end.

use std::borrow::Cow;

use crate::backend::{Backend, Weight};

/// A dense matrix as its file has it, before it goes to a back end.
pub enum HostMatrix<'a> {
    /// bf16 bits.
    Bf16(Cow<'a, [u16]>),
    /// Signed bytes, and a scale for each row.
    Int8 {
        /// Row-major.
        bytes: Cow<'a, [i8]>,
        /// One a row.
        scales: Cow<'a, [f32]>,
    },
    /// f32.
    F32(Cow<'a, [f32]>),
}

fn picked<T: Copy>(rows: &[T], cols: usize, from: impl Iterator<Item = usize>) -> Vec<T> {
    from.flat_map(|r| rows[r * cols..(r + 1) * cols].iter().copied())
        .collect()
}

impl HostMatrix<'_> {
    /// Weights.
    fn len(&self) -> usize {
        match self {
            Self::Bf16(bits) => bits.len(),
            Self::Int8 { bytes, .. } => bytes.len(),
            Self::F32(numbers) => numbers.len(),
        }
    }

    /// Its rows `from`, in that order.
    pub fn pick(
        &self,
        cols: usize,
        from: impl Iterator<Item = usize> + Clone,
    ) -> HostMatrix<'static> {
        match self {
            Self::Bf16(bits) => HostMatrix::Bf16(picked(bits, cols, from).into()),
            Self::Int8 { bytes, scales } => HostMatrix::Int8 {
                bytes: picked(bytes, cols, from.clone()).into(),
                scales: picked(scales, 1, from).into(),
            },
            Self::F32(numbers) => HostMatrix::F32(picked(numbers, cols, from).into()),
        }
    }

    /// On a back end.
    pub fn upload<B: Backend>(&self, backend: &B) -> Result<Part<B>, B::Error> {
        Ok(match self {
            Self::Bf16(bits) => Part::Bf16(backend.upload(bits)?),
            Self::Int8 { bytes, scales } => Part::Int8 {
                bytes: backend.upload(bytes)?,
                scales: backend.upload(scales)?,
            },
            Self::F32(numbers) => Part::F32(backend.upload(numbers)?),
        })
    }
}

/// A dense matrix on a back end.
pub enum Part<B: Backend> {
    /// bf16 bits.
    Bf16(B::Buf<u16>),
    /// Signed bytes, and a scale for each row.
    Int8 {
        /// Row-major.
        bytes: B::Buf<i8>,
        /// One a row.
        scales: B::Buf<f32>,
    },
    /// f32.
    F32(B::Buf<f32>),
}

impl<B: Backend> Part<B> {
    /// As operators take it.
    pub fn weight(&self) -> Weight<'_, B> {
        match self {
            Self::Bf16(bits) => Weight::Bf16(bits),
            Self::Int8 { bytes, scales } => Weight::Int8 { bytes, scales },
            Self::F32(numbers) => Weight::F32(numbers),
        }
    }
}

/// Dense matrices of equal row length below one another, those of one kind that are neighbours in one
/// piece.
pub struct Matrix<B: Backend> {
    /// Rows of each piece.
    pub parts: Vec<(usize, Part<B>)>,
}

impl<B: Backend> Matrix<B> {
    /// Matrices of `cols` columns to a back end.
    pub fn stack(backend: &B, matrices: &[HostMatrix<'_>], cols: usize) -> Result<Self, B::Error> {
        let same = |a: &HostMatrix<'_>, b: &HostMatrix<'_>| {
            std::mem::discriminant(a) == std::mem::discriminant(b)
        };
        let parts = matrices
            .chunk_by(same)
            .map(|group| {
                let len: usize = group.iter().map(HostMatrix::len).sum();
                let rows = len / cols.max(1);
                let part = match group {
                    [one] => one.upload(backend)?,
                    _ => together(backend, group, (rows, len))?,
                };
                Ok((rows, part))
            })
            .collect::<Result<_, B::Error>>()?;
        Ok(Self { parts })
    }
}

/// Matrices of one kind in one piece of `rows` rows, `len` weights.
fn together<B: Backend>(
    backend: &B,
    group: &[HostMatrix<'_>],
    (rows, len): (usize, usize),
) -> Result<Part<B>, B::Error> {
    let (mut at, mut row) = (0, 0);
    let mut all = match group[0] {
        HostMatrix::Bf16(_) => Part::Bf16(backend.alloc(len)?),
        HostMatrix::F32(_) => Part::F32(backend.alloc(len)?),
        HostMatrix::Int8 { .. } => Part::Int8 {
            bytes: backend.alloc(len)?,
            scales: backend.alloc(rows)?,
        },
    };
    for m in group {
        match (&mut all, m) {
            (Part::Bf16(all), HostMatrix::Bf16(bits)) => backend.write(all, at, bits)?,
            (Part::F32(all), HostMatrix::F32(numbers)) => backend.write(all, at, numbers)?,
            (
                Part::Int8 {
                    bytes: all,
                    scales: all_scales,
                },
                HostMatrix::Int8 { bytes, scales },
            ) => {
                backend.write(all, at, bytes)?;
                backend.write(all_scales, row, scales)?;
                row += scales.len();
            }
            (Part::Bf16(_) | Part::F32(_) | Part::Int8 { .. }, _) => {
                unreachable!("matrices of one kind")
            }
        }
        at += m.len();
    }
    Ok(all)
}
