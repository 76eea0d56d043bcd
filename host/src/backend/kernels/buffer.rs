//! Memory of a device as elements, and what operators make of it: checked views.

use std::marker::PhantomData;

use bytemuck::Pod;
use cuda_std::mem::Slice;

use super::device::DeviceMemory;
use super::error::{KernelError, Result};
use crate::backend::{Rows, RowsMut};

/// `len` elements of `T` on a device.
pub struct Buffer<T, M> {
    pub(super) memory: M,
    pub(super) len: usize,
    pub(super) kind: PhantomData<T>,
}

impl<T: Pod, M: DeviceMemory> Buffer<T, M> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// All of it, as kernels take it.
    pub fn slice(&self) -> Slice {
        self.memory.slice::<T>(0, self.len)
    }

    /// The elements from `start` on, at least `len` of them.
    pub(super) fn from(&self, what: &'static str, start: usize, len: usize) -> Result<Slice> {
        let end = start.saturating_add(len);
        if end > self.len {
            return Err(KernelError::Range {
                what,
                start,
                end,
                have: self.len,
            });
        }
        Ok(self.memory.slice::<T>(start, self.len - start))
    }
}

/// A view's slice and its stride, checked.
#[derive(Clone, Copy)]
pub(super) struct View {
    pub slice: Slice,
    pub stride: u32,
}

impl View {
    /// Whether rows start at multiples of 16 bytes.
    pub(super) fn aligned(&self) -> bool {
        self.slice.addr.is_multiple_of(16) && self.stride.is_multiple_of(4)
    }

    /// The same from row `row` on.
    pub fn skip(&self, row: usize) -> Self {
        let elements = row as u64 * self.stride as u64;
        Self {
            slice: self.slice.part::<f32>(elements, self.slice.len - elements),
            ..*self
        }
    }
}

/// A size as kernels take it.
pub(super) fn word(what: &'static str, n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| KernelError::Dimension {
        what,
        found: n,
        expected: "less than 2^32",
    })
}

/// Checks `rows` rows of `cols` elements, `stride` apart from `offset`: their slice and stride.
/// Kernels index a view with 32 bits.
pub(super) fn view<T: Pod, M: DeviceMemory>(
    what: &'static str,
    buf: &Buffer<T, M>,
    (offset, stride): (usize, usize),
    rows: usize,
    cols: usize,
) -> Result<View> {
    let len = match rows {
        0 => 0,
        n => (n - 1).saturating_mul(stride).saturating_add(cols),
    };
    word(what, len)?;
    Ok(View {
        slice: buf.from(what, offset, len)?,
        stride: word(what, stride)?,
    })
}

pub(super) fn input<M: DeviceMemory>(
    what: &'static str,
    x: Rows<'_, Buffer<f32, M>>,
    rows: usize,
    cols: usize,
) -> Result<View> {
    view(what, x.buf, (x.offset, x.stride), rows, cols)
}

pub(super) fn output<M: DeviceMemory>(
    what: &'static str,
    x: &RowsMut<'_, Buffer<f32, M>>,
    rows: usize,
    cols: usize,
) -> Result<View> {
    view(what, x.buf, (x.offset, x.stride), rows, cols)
}

pub(super) fn blocks(n: usize, per: u32) -> u32 {
    n.div_ceil(per as usize) as u32
}
