//! Global memory: slices as kernel arguments, typed views, asynchronous copies to shared memory.
//!
//! Indices count elements of the view, from 0. `word` arguments count 32-bit words from the view's
//! start, whatever its element type, and the address must be a multiple of the access' width.
//! On the device nothing is checked; the emulator checks bounds, alignment, that the view lies in one
//! live allocation, and (in memory allocated uninitialised) that what is read was written.

use crate::shared::Shared;
use bytemuck::{Pod, Zeroable};
use core::marker::PhantomData;
use core::ops::Deref;

#[cfg(target_arch = "nvptx64")]
use crate::device::{self, ConstantSpace, GlobalSpace, Space, SpaceMut, StreamSpace};
#[cfg(not(target_arch = "nvptx64"))]
use crate::emulator;

/// An array in global memory as kernels are given it. Says nothing of the element type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Slice {
    /// Address of the first element.
    pub addr: u64,
    /// Number of elements.
    pub len: u64,
}

impl Slice {
    /// No elements.
    pub const EMPTY: Self = Self { addr: 0, len: 0 };

    /// `len` elements from `addr`.
    #[must_use]
    pub const fn new(addr: u64, len: u64) -> Self {
        Self { addr, len }
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements of type `T` from `start` on, `len` of them; the caller answers for the bounds.
    #[must_use]
    pub const fn part<T>(&self, start: u64, len: u64) -> Self {
        Self {
            addr: self.addr + start * size_of::<T>() as u64,
            len,
        }
    }
}

/// A view of an array of `T` in global memory, to read.
pub struct Global<T> {
    addr: u64,
    len: u64,
    /// Emulator: where the allocation's written-bytes map holds the view's first byte, or null.
    #[cfg(not(target_arch = "nvptx64"))]
    written: *const core::sync::atomic::AtomicU8,
    kind: PhantomData<*const T>,
}

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Global<T> {}

/// Byte distance of element i.
#[inline(always)]
fn bytes_to<T>(index: u32) -> u64 {
    u64::from(index) * size_of::<T>() as u64
}

impl<T: Pod> Global<T> {
    /// The view of a slice.
    ///
    /// # Safety
    /// The slice is an array of `T` that lives while the kernel runs, every index that the kernel uses
    /// on the view is in bounds, and what it reads through it no other thread writes without a barrier
    /// in between (for `*_nc` and `*_stream`: nobody writes while the kernel runs).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn new(slice: Slice) -> Self {
        #[cfg(target_arch = "nvptx64")]
        {
            Self {
                addr: slice.addr,
                len: slice.len,
                kind: PhantomData,
            }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let written = emulator::view(slice.addr, slice.len, size_of::<T>(), align_of::<T>());
            Self {
                addr: slice.addr,
                len: slice.len,
                written,
                kind: PhantomData,
            }
        }
    }

    /// Number of elements.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no elements.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first element.
    #[inline(always)]
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The view of the elements from `start` on.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn at(&self, start: u64) -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::check_part(start, 0, self.len);
        Self {
            addr: self.addr + start * size_of::<T>() as u64,
            len: self.len - start,
            #[cfg(not(target_arch = "nvptx64"))]
            written: emulator::advance(self.written, start * size_of::<T>() as u64),
            kind: PhantomData,
        }
    }

    /// The view of `len` elements from `start` on.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn part(&self, start: u64, len: u64) -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::check_part(start, len, self.len);
        Self {
            len,
            ..self.at(start)
        }
    }

    /// The same bytes as elements of another type; a last element that does not fit is left out.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn cast<U: Pod>(&self) -> Global<U> {
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::check_alignment(self.addr, align_of::<U>());
        Global {
            addr: self.addr,
            len: self.len * size_of::<T>() as u64 / size_of::<U>() as u64,
            #[cfg(not(target_arch = "nvptx64"))]
            written: self.written,
            kind: PhantomData,
        }
    }

    /// Element i (`ld.global`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load(&self, index: u32) -> T {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            device::load::<T, GlobalSpace>(self.addr + bytes_to::<T>(index))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.read(bytes_to::<T>(index), align_of::<T>())
    }

    /// Element i through the read-only path (`ld.global.nc`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_nc(&self, index: u32) -> T {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            device::load::<T, ConstantSpace>(self.addr + bytes_to::<T>(index))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.load(index)
    }

    /// Words `word` to `word + 1` (`ld.global.v2`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v2(&self, word: u32) -> [u32; 2] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            GlobalSpace::load_v2(self.addr + bytes_to::<u32>(word))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.read(bytes_to::<u32>(word), 8)
    }

    /// Words `word` to `word + 3` (`ld.global.v4`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v4(&self, word: u32) -> [u32; 4] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            GlobalSpace::load_v4(self.addr + bytes_to::<u32>(word))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.read(bytes_to::<u32>(word), 16)
    }

    /// Words `word` to `word + 1` through the read-only path (`ld.global.nc.v2`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v2_nc(&self, word: u32) -> [u32; 2] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            ConstantSpace::load_v2(self.addr + bytes_to::<u32>(word))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.load_v2(word)
    }

    /// Words `word` to `word + 3` through the read-only path (`ld.global.nc.v4`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v4_nc(&self, word: u32) -> [u32; 4] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            ConstantSpace::load_v4(self.addr + bytes_to::<u32>(word))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.load_v4(word)
    }

    /// As [`load_v4_nc`](Self::load_v4_nc) for what is read once: leaves no line in the L1 cache.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v4_stream(&self, word: u32) -> [u32; 4] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            StreamSpace::load_v4(self.addr + bytes_to::<u32>(word))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.load_v4(word)
    }

    /// Where `condition` holds, loads words `word` to `word + 3` into `registers` as
    /// [`load_v4_stream`](Self::load_v4_stream) does; else leaves them.
    ///
    /// One predicated instruction whose outputs are its inputs: a loop that reloads a buffer right
    /// after its last use keeps it in the same registers, where plain assignment makes the compiler
    /// copy, and wait for the load just issued. Not through the read-only path: `ptxas` moves those loads
    /// behind a [`crate::grid::wait`] that they are to run ahead of.
    #[inline(always)]
    #[track_caller]
    pub fn reload_v4_stream(&self, condition: bool, word: u32, registers: &mut [u32; 4]) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new` where the condition holds.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred p; setp.ne.u32 p, {c}, 0;",
                "@p ld.global.L1::no_allocate.v4.u32 {{{x}, {y}, {z}, {w}}}, [{a}]; }}",
                x = inlateout(reg32) registers[0], y = inlateout(reg32) registers[1],
                z = inlateout(reg32) registers[2], w = inlateout(reg32) registers[3],
                c = in(reg32) u32::from(condition), a = in(reg64) self.addr + bytes_to::<u32>(word),
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        if condition {
            *registers = self.load_v4_stream(word);
        }
    }

    /// As [`reload_v4_stream`](Self::reload_v4_stream) for words `word` and `word + 1`.
    #[inline(always)]
    #[track_caller]
    pub fn reload_v2_stream(&self, condition: bool, word: u32, registers: &mut [u32; 2]) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new` where the condition holds.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred p; setp.ne.u32 p, {c}, 0;",
                "@p ld.global.L1::no_allocate.v2.u32 {{{x}, {y}}}, [{a}]; }}",
                x = inlateout(reg32) registers[0], y = inlateout(reg32) registers[1],
                c = in(reg32) u32::from(condition), a = in(reg64) self.addr + bytes_to::<u32>(word),
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        if condition {
            *registers = self.load_v2_nc(word);
        }
    }

    /// As [`reload_v4_stream`](Self::reload_v4_stream) for one element of 32 bits, through the cache.
    #[inline(always)]
    #[track_caller]
    pub fn reload_u32(&self, condition: bool, word: u32, register: &mut u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new` where the condition holds.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p ld.global.u32 {x}, [{a}]; }}",
                x = inlateout(reg32) *register,
                c = in(reg32) u32::from(condition), a = in(reg64) self.addr + bytes_to::<u32>(word),
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        #[cfg(not(target_arch = "nvptx64"))]
        if condition {
            *register = self.read(bytes_to::<u32>(word), 4);
        }
    }

    /// The emulator's load of a `U` at a byte distance.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    #[track_caller]
    fn read<U: Pod>(&self, at: u64, align: usize) -> U {
        emulator::global_read(
            self.addr,
            self.len * size_of::<T>() as u64,
            self.written,
            at,
            align,
        )
    }
}

/// A view of an array of `T` in global memory, to read and write.
pub struct GlobalMut<T>(Global<T>);

impl<T> Clone for GlobalMut<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for GlobalMut<T> {}

impl<T> Deref for GlobalMut<T> {
    type Target = Global<T>;
    #[inline(always)]
    fn deref(&self) -> &Global<T> {
        &self.0
    }
}

impl<T: Pod> GlobalMut<T> {
    /// The view of a slice.
    ///
    /// # Safety
    /// As [`Global::new`]; besides, no other thread reads or writes without a barrier in between what
    /// this one writes, atomic operations apart.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn new(slice: Slice) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { Global::new(slice) })
    }

    /// The view of the elements from `start` on.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn at(&self, start: u64) -> Self {
        Self(self.0.at(start))
    }

    /// The view of `len` elements from `start` on.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn part(&self, start: u64, len: u64) -> Self {
        Self(self.0.part(start, len))
    }

    /// The same bytes as elements of another type; a last element that does not fit is left out.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn cast<U: Pod>(&self) -> GlobalMut<U> {
        GlobalMut(self.0.cast())
    }

    /// Writes element i (`st.global`).
    #[inline(always)]
    #[track_caller]
    pub fn store(&self, index: u32, value: T) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            device::store::<T, GlobalSpace>(self.addr + bytes_to::<T>(index), value);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.write(bytes_to::<T>(index), align_of::<T>(), value);
    }

    /// Writes words `word` to `word + 1` (`st.global.v2`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v2(&self, word: u32, value: [u32; 2]) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            GlobalSpace::store_v2(self.addr + bytes_to::<u32>(word), value);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.write(bytes_to::<u32>(word), 8, value);
    }

    /// Writes words `word` to `word + 3` (`st.global.v4`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v4(&self, word: u32, value: [u32; 4]) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of `new`.
        unsafe {
            GlobalSpace::store_v4(self.addr + bytes_to::<u32>(word), value);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        self.write(bytes_to::<u32>(word), 16, value);
    }

    /// Adds to word `word` modulo 2^32 and returns what it held (`atom.global.add`, relaxed, device
    /// scope).
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add_u32(&self, word: u32, value: u32) -> u32 {
        #[cfg(target_arch = "nvptx64")]
        {
            let old: u32;
            // SAFETY: in bounds by the contract of `new`.
            unsafe {
                core::arch::asm!("atom.global.add.u32 {o}, [{a}], {v};", o = lateout(reg32) old,
                    a = in(reg64) self.addr + bytes_to::<u32>(word), v = in(reg32) value,
                    options(nostack, preserves_flags));
            }
            old
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let (start, bytes) = (self.addr, self.len * size_of::<T>() as u64);
            emulator::global_add(start, bytes, self.written, bytes_to::<u32>(word), value)
        }
    }

    /// The emulator's store of a `U` at a byte distance.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    #[track_caller]
    fn write<U: Pod>(&self, at: u64, align: usize, value: U) {
        let (start, bytes) = (self.addr, self.len * size_of::<T>() as u64);
        emulator::global_write(start, bytes, self.written, at, align, value);
    }
}

/// Starts the copy of 16 bytes from global to shared memory, past the registers and the L1 cache
/// (`cp.async.cg`): words `source_word` to + 3 of the source, `word` to + 3 of the destination, both
/// 16-byte aligned.
///
/// The bytes are there after a [`cp_async_wait`] that covers the copy's group, for the thread that
/// copied; for others after a barrier behind that. The emulator refuses earlier access.
#[inline(always)]
#[track_caller]
pub fn cp_async_16<T: Pod, U: Pod>(
    destination: Shared<T>,
    word: u32,
    source: Global<U>,
    source_word: u32,
) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: in bounds by the contracts of the views.
    unsafe {
        core::arch::asm!("cp.async.cg.shared.global [{d}], [{s}], 16;",
            d = in(reg32) destination.address() + word * 4,
            s = in(reg64) source.addr + bytes_to::<u32>(source_word),
            options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let bytes: [u32; 4] = source.read(bytes_to::<u32>(source_word), 16);
        emulator::copy_start(destination.address(), destination.bytes(), word, &bytes);
    }
}

/// As [`cp_async_16`] for 8 bytes, through the L1 cache (`cp.async.ca`): two words, both 8-byte aligned.
#[inline(always)]
#[track_caller]
pub fn cp_async_8<T: Pod, U: Pod>(
    destination: Shared<T>,
    word: u32,
    source: Global<U>,
    source_word: u32,
) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: in bounds by the contracts of the views.
    unsafe {
        core::arch::asm!("cp.async.ca.shared.global [{d}], [{s}], 8;",
            d = in(reg32) destination.address() + word * 4,
            s = in(reg64) source.addr + bytes_to::<u32>(source_word),
            options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let bytes: [u32; 2] = source.read(bytes_to::<u32>(source_word), 8);
        emulator::copy_start(destination.address(), destination.bytes(), word, &bytes);
    }
}

/// Closes the group of the copies that the calling thread has started since the last call
/// (`cp.async.commit_group`).
#[inline(always)]
pub fn cp_async_commit() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no operands.
    unsafe {
        core::arch::asm!("cp.async.commit_group;", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emulator::copy_commit();
}

/// Waits until all but the last N groups of the calling thread's copies are done
/// (`cp.async.wait_group`).
#[inline(always)]
#[track_caller]
pub fn cp_async_wait<const N: u32>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: waits.
    unsafe {
        core::arch::asm!("cp.async.wait_group {n};", n = const N, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emulator::copy_wait(N);
}

/// What the calling thread wrote before, no thread of the device sees after what it writes behind
/// this (`membar.gl`).
#[inline(always)]
pub fn thread_fence() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no operands.
    unsafe {
        core::arch::asm!("membar.gl;", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "nvptx64"))]
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}
