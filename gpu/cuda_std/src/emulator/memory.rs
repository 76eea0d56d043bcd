//! Emulated global memory: allocations, their registry, and access to them.
//!
//! Kernels of several blocks run on several OS threads, so every access to an allocation is a relaxed
//! atomic one of at most 8 bytes: a kernel that races gets some value, never undefined behaviour.

use super::{FaultKind, context, fault};
use crate::mem::Slice;
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::Location;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

/// Alignment of an allocation, that of the CUDA driver's.
const ALIGNMENT: usize = 256;

/// Live allocations by start address.
pub(super) type Registry = BTreeMap<u64, Arc<Storage>>;

static REGISTRY: RwLock<Option<Arc<Registry>>> = RwLock::new(None);

/// The live allocations now. What the snapshot holds outlives it, so a launch cannot lose memory.
pub(super) fn snapshot() -> Arc<Registry> {
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    registry.clone().unwrap_or_default()
}

fn change(edit: impl FnOnce(&mut Registry)) {
    let mut registry = REGISTRY.write().unwrap_or_else(PoisonError::into_inner);
    edit(Arc::make_mut(registry.get_or_insert_default()));
}

/// Bytes of one allocation.
#[derive(Debug)]
pub(super) struct Storage {
    start: NonNull<u8>,
    layout: Layout,
    /// Bytes asked for; the layout has at least one.
    bytes: u64,
    /// One for each byte written so far; absent where the whole was initialised.
    written: Option<Box<[AtomicU8]>>,
}

// SAFETY: the bytes are reached through atomics alone.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    fn new(bytes: u64, initialised: bool) -> Self {
        let size = usize::try_from(bytes)
            .expect("allocation exceeds the address space")
            .max(1);
        let layout =
            Layout::from_size_align(size, ALIGNMENT).expect("allocation exceeds the address space");
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })
            .unwrap_or_else(|| handle_alloc_error(layout));
        let written = (!initialised).then(|| (0..size).map(|_| AtomicU8::new(0)).collect());
        Self {
            start,
            layout,
            bytes,
            written,
        }
    }

    fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Loads a `T` from mapped memory, piece by piece.
///
/// # Safety
/// `from` points to `size_of::<T>()` bytes of an allocation, aligned to `align`.
#[inline(always)]
unsafe fn read<T: Pod>(from: *const u8, align: usize) -> T {
    let mut value = T::zeroed();
    let to = (&raw mut value).cast::<u8>();
    let mut at = 0;
    // SAFETY: pieces lie in both, aligned on the side of the allocation.
    unsafe {
        while at < size_of::<T>() {
            at += if align >= 8 && size_of::<T>().is_multiple_of(8) {
                let piece = (*from.add(at).cast::<AtomicU64>()).load(Relaxed);
                to.add(at).cast::<u64>().write_unaligned(piece);
                8
            } else if align >= 4 && size_of::<T>().is_multiple_of(4) {
                let piece = (*from.add(at).cast::<AtomicU32>()).load(Relaxed);
                to.add(at).cast::<u32>().write_unaligned(piece);
                4
            } else if align >= 2 && size_of::<T>().is_multiple_of(2) {
                let piece = (*from.add(at).cast::<AtomicU16>()).load(Relaxed);
                to.add(at).cast::<u16>().write_unaligned(piece);
                2
            } else {
                to.add(at)
                    .write((*from.add(at).cast::<AtomicU8>()).load(Relaxed));
                1
            };
        }
    }
    value
}

/// Stores a `T` to mapped memory, piece by piece.
///
/// # Safety
/// `to` points to `size_of::<T>()` bytes of an allocation, aligned to `align`.
#[inline(always)]
unsafe fn write<T: Pod>(to: *mut u8, align: usize, value: &T) {
    let from = std::ptr::from_ref(value).cast::<u8>();
    let mut at = 0;
    // SAFETY: pieces lie in both, aligned on the side of the allocation.
    unsafe {
        while at < size_of::<T>() {
            at += if align >= 8 && size_of::<T>().is_multiple_of(8) {
                let piece = from.add(at).cast::<u64>().read_unaligned();
                (*to.add(at).cast::<AtomicU64>()).store(piece, Relaxed);
                8
            } else if align >= 4 && size_of::<T>().is_multiple_of(4) {
                let piece = from.add(at).cast::<u32>().read_unaligned();
                (*to.add(at).cast::<AtomicU32>()).store(piece, Relaxed);
                4
            } else if align >= 2 && size_of::<T>().is_multiple_of(2) {
                let piece = from.add(at).cast::<u16>().read_unaligned();
                (*to.add(at).cast::<AtomicU16>()).store(piece, Relaxed);
                2
            } else {
                (*to.add(at).cast::<AtomicU8>()).store(from.add(at).read(), Relaxed);
                1
            };
        }
    }
}

/// An array of `T` in emulated global memory, 256-byte aligned, that kernels reach through its
/// [`slice`](Self::slice). Dropped, it is no longer allocated for launches that begin later.
#[derive(Debug)]
pub struct Memory<T: Pod> {
    storage: Arc<Storage>,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Pod> Memory<T> {
    fn allocate(len: usize, initialised: bool) -> Self {
        let bytes = (len as u64)
            .checked_mul(size_of::<T>() as u64)
            .expect("allocation exceeds the address space");
        let storage = Arc::new(Storage::new(bytes, initialised));
        change(|registry| {
            registry.insert(storage.address(), storage.clone());
        });
        Self {
            storage,
            len,
            kind: PhantomData,
        }
    }

    /// `len` elements of zero bytes.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self::allocate(len, true)
    }

    /// `len` elements; a kernel that reads one before it is written gets a fault.
    #[must_use]
    pub fn uninit(len: usize) -> Self {
        Self::allocate(len, false)
    }

    /// A copy of `values`.
    #[must_use]
    pub fn from_slice(values: &[T]) -> Self {
        let memory = Self::zeroed(values.len());
        memory.write(0, values);
        memory
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole array, as kernels take it.
    #[must_use]
    pub fn slice(&self) -> Slice {
        Slice::new(self.storage.address(), self.len as u64)
    }

    /// The whole array as elements of another type; a last one that does not fit is left out.
    #[must_use]
    pub fn slice_as<U: Pod>(&self) -> Slice {
        Slice::new(
            self.storage.address(),
            self.storage.bytes / size_of::<U>() as u64,
        )
    }

    /// Writes `values` from element `start` on.
    ///
    /// # Panics
    /// Where they do not fit.
    pub fn write(&self, start: usize, values: &[T]) {
        assert!(
            start
                .checked_add(values.len())
                .is_some_and(|end| end <= self.len),
            "write past the end"
        );
        let (size, align) = (size_of::<T>(), align_of::<T>());
        for (i, value) in values.iter().enumerate() {
            // SAFETY: in bounds by the assertion; allocations are aligned beyond any type here.
            unsafe {
                write(
                    self.storage.start.as_ptr().add((start + i) * size),
                    align,
                    value,
                )
            }
        }
        if let Some(written) = &self.storage.written {
            written[start * size..(start + values.len()) * size]
                .iter()
                .for_each(|byte| byte.store(1, Relaxed));
        }
    }

    /// Reads `values.len()` elements from element `start` on. Bytes never written read as 0.
    ///
    /// # Panics
    /// Where there are not as many.
    pub fn read(&self, start: usize, values: &mut [T]) {
        assert!(
            start
                .checked_add(values.len())
                .is_some_and(|end| end <= self.len),
            "read past the end"
        );
        for (i, value) in values.iter_mut().enumerate() {
            // SAFETY: as in `write`.
            *value = unsafe {
                read(
                    self.storage
                        .start
                        .as_ptr()
                        .add((start + i) * size_of::<T>()),
                    align_of::<T>(),
                )
            };
        }
    }

    /// All elements. Bytes never written read as 0.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let mut values = vec![T::zeroed(); self.len];
        self.read(0, &mut values);
        values
    }

    /// Whether every byte was written.
    #[must_use]
    pub fn is_written(&self) -> bool {
        let written = self.storage.written.as_deref().unwrap_or_default();
        let bytes = usize::try_from(self.storage.bytes)
            .unwrap_or(usize::MAX)
            .min(written.len());
        written[..bytes].iter().all(|byte| byte.load(Relaxed) == 1)
    }
}

impl<T: Pod> Drop for Memory<T> {
    fn drop(&mut self) {
        change(|registry| {
            registry.remove(&self.storage.address());
        });
    }
}

/// Checks that a view lies in a live allocation; where its first byte's mark is, or null.
#[track_caller]
pub(crate) fn view(start: u64, len: u64, size: usize, align: usize) -> *const AtomicU8 {
    if len == 0 {
        return std::ptr::null();
    }
    let here = Location::caller();
    let context = context();
    let Some(bytes) = len.checked_mul(size as u64) else {
        fault(
            FaultKind::OutOfBounds,
            format!("a view of {len} elements of {size} bytes"),
            here,
        );
    };
    if !start.is_multiple_of(align as u64) {
        let what = format!("a view at {start:#x} of elements aligned to {align} bytes");
        fault(FaultKind::Misaligned, what, here);
    }
    let inside = |storage: &Storage| {
        let before = start.checked_sub(storage.address())?;
        (bytes <= storage.bytes && before <= storage.bytes - bytes).then_some(before)
    };
    let recent = &mut context.recent[(start >> 8) as usize % super::RECENT];
    // SAFETY: the launch's snapshot keeps every allocation that it holds alive.
    let mut found =
        recent.and_then(|storage| unsafe { Some((storage, inside(storage.as_ref())?)) });
    if found.is_none() {
        let last = context.registry.range(..=start).next_back();
        found = last.and_then(|(_, storage)| Some((NonNull::from(&**storage), inside(storage)?)));
        *recent = found.map(|(storage, _)| storage);
    }
    let Some((storage, before)) = found else {
        let what = format!("a view of {bytes} bytes at {start:#x} lies in no live allocation");
        fault(FaultKind::NotAllocated, what, here);
    };
    // SAFETY: as above; `before` is less than the size of the map.
    unsafe {
        let written = &storage.as_ref().written;
        written
            .as_ref()
            .map_or(std::ptr::null(), |map| map.as_ptr().add(before as usize))
    }
}

/// The mark `bytes` further on.
#[inline(always)]
pub(crate) fn advance(written: *const AtomicU8, bytes: u64) -> *const AtomicU8 {
    if written.is_null() {
        written
    } else {
        written.wrapping_add(bytes as usize)
    }
}

/// Checks that `start + len` is in a view of `of` elements.
#[inline(always)]
#[track_caller]
pub(crate) fn check_part(start: u64, len: u64, of: u64) {
    if start > of || len > of - start {
        let what = format!("part of {len} elements from {start} in a view of {of}");
        fault(FaultKind::OutOfBounds, what, Location::caller());
    }
}

/// Checks the alignment of an address.
#[inline(always)]
#[track_caller]
pub(crate) fn check_alignment(address: u64, align: usize) {
    if !address.is_multiple_of(align as u64) {
        let what = format!("address {address:#x} is no multiple of {align}");
        fault(FaultKind::Misaligned, what, Location::caller());
    }
}

/// Bounds and alignment of an access of `size` bytes `at` bytes into a view of `bytes`.
#[inline(always)]
#[track_caller]
fn check(start: u64, bytes: u64, at: u64, size: usize, align: usize) {
    if at > bytes || size as u64 > bytes - at {
        let what = format!("global access of {size} bytes at byte {at} of a view of {bytes} bytes");
        fault(FaultKind::OutOfBounds, what, Location::caller());
    }
    if !(start + at).is_multiple_of(align as u64) {
        let what =
            format!("global access at byte {at} of a view at {start:#x} is not aligned to {align}");
        fault(FaultKind::Misaligned, what, Location::caller());
    }
}

/// Whether all of `size` bytes are marked.
fn all_written(written: *const AtomicU8, size: usize) -> bool {
    // SAFETY: the map covers the view, and the access was checked to lie in it.
    (0..size).all(|i| unsafe { (*written.add(i)).load(Relaxed) == 1 })
}

fn mark_written(written: *const AtomicU8, size: usize) {
    // SAFETY: as in `all_written`.
    (0..size).for_each(|i| unsafe { (*written.add(i)).store(1, Relaxed) });
}

/// A load `at` bytes into a view.
#[inline(always)]
#[track_caller]
pub(crate) fn global_read<T: Pod>(
    start: u64,
    bytes: u64,
    written: *const AtomicU8,
    at: u64,
    align: usize,
) -> T {
    let context = context();
    context.step(Location::caller());
    context.stats.global_read_bytes += size_of::<T>() as u64;
    check(start, bytes, at, size_of::<T>(), align);
    if !written.is_null() && !all_written(advance(written, at), size_of::<T>()) {
        let what =
            format!("read of uninitialised global memory at byte {at} of a view of {bytes} bytes");
        fault(FaultKind::Uninitialised, what, Location::caller());
    }
    // SAFETY: in a live allocation, in bounds and aligned as just checked.
    unsafe { read((start + at) as *const u8, align) }
}

/// A store `at` bytes into a view.
#[inline(always)]
#[track_caller]
pub(crate) fn global_write<T: Pod>(
    start: u64,
    bytes: u64,
    written: *const AtomicU8,
    at: u64,
    align: usize,
    value: T,
) {
    let context = context();
    context.step(Location::caller());
    context.stats.global_write_bytes += size_of::<T>() as u64;
    check(start, bytes, at, size_of::<T>(), align);
    // SAFETY: in a live allocation, in bounds and aligned as just checked.
    unsafe { write((start + at) as *mut u8, align, &value) }
    if !written.is_null() {
        mark_written(advance(written, at), size_of::<T>());
    }
}

/// An atomic addition `at` bytes into a view; what was there.
#[track_caller]
pub(crate) fn global_add(
    start: u64,
    bytes: u64,
    written: *const AtomicU8,
    at: u64,
    value: u32,
) -> u32 {
    let old: u32 = global_read(start, bytes, written, at, 4);
    let _ = old;
    context().stats.global_write_bytes += 4;
    // SAFETY: checked by the read.
    unsafe { (*((start + at) as *const AtomicU32)).fetch_add(value, Relaxed) }
}
