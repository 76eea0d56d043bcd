//! Elements in memory.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

use super::CpuError;
use crate::ram::Pages;

/// Bytes from which on memory comes in large pages: more than an allocator keeps for the next one.
const LARGE_FROM: usize = 32 << 20;

#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Line([u8; 64]);

enum Storage {
    Lines(Vec<Line>),
    Pages(Pages),
}

/// Elements in memory, aligned to 64 bytes.
pub struct Buf<T> {
    storage: Storage,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Buf<T> {
    pub(super) fn zeroed(len: usize) -> Result<Self, CpuError> {
        let storage = match len.checked_mul(size_of::<T>()) {
            None => None,
            Some(bytes) if bytes >= LARGE_FROM => Pages::new(bytes).ok().map(Storage::Pages),
            Some(bytes) => {
                let lines = bytemuck::try_zeroed_vec(bytes.div_ceil(size_of::<Line>()));
                lines.ok().map(Storage::Lines)
            }
        };
        Ok(Self {
            storage: storage.ok_or(CpuError::Memory {
                len,
                size: size_of::<T>(),
            })?,
            len,
            of: PhantomData,
        })
    }
}

impl<T: Pod> Deref for Buf<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes: &[u8] = match &self.storage {
            Storage::Lines(lines) => bytemuck::cast_slice(lines),
            Storage::Pages(pages) => pages,
        };
        bytemuck::cast_slice(&bytes[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Buf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = match &mut self.storage {
            Storage::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Storage::Pages(pages) => pages,
        };
        bytemuck::cast_slice_mut(&mut bytes[..self.len * size_of::<T>()])
    }
}
