//! Shared memory of a block.
//!
//! A view holds a 32-bit address in the shared window, so an access is one `ld.shared` or
//! `st.shared`. The emulator checks bounds, alignment, uninitialised reads and races.

use bytemuck::Pod;
use core::marker::PhantomData;

#[cfg(target_arch = "nvptx64")]
use crate::device::{self, SharedSpace, Space, SpaceMut};
#[cfg(not(target_arch = "nvptx64"))]
use crate::emulator;

/// A view of an array of `T` in the block's shared memory. A copy is the same array.
pub struct Shared<T> {
    address: u32,
    len: u32,
    kind: PhantomData<*const T>,
}

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

/// Byte distance of element i.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn bytes_to<T>(index: u32) -> u64 {
    u64::from(index) * size_of::<T>() as u64
}

/// A fixed array in shared memory: `shared_array![f32; 32]` is a [`Shared<f32>`] of 32 elements,
/// uninitialised, 16-byte aligned.
///
/// As in CUDA C++, each place in the source is one array for the whole block, however often it is
/// reached and whichever thread gets there.
#[macro_export]
macro_rules! shared_array {
    [$kind:ty; $len:expr] => {
        $crate::shared::Shared::<$kind>::fixed::<
            { $len },
            { $crate::shared::site(::core::module_path!(), ::core::line!(), ::core::column!()) },
        >()
    };
}

/// Number of a place in the source (FNV-1a). Used by [`shared_array`].
#[doc(hidden)]
#[must_use]
pub const fn site(module: &str, line: u32, column: u32) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut i = 0;
    while i < module.len() {
        hash = (hash ^ module.as_bytes()[i] as u64).wrapping_mul(0x100_0000_01b3);
        i += 1;
    }
    hash = (hash ^ line as u64).wrapping_mul(0x100_0000_01b3);
    (hash ^ column as u64).wrapping_mul(0x100_0000_01b3)
}

impl<T: Pod> Shared<T> {
    /// `len` elements from `byte_offset` in the dynamic shared memory of the launch, which is 128-byte
    /// aligned.
    ///
    /// # Safety
    /// The array lies in the launch's dynamic shared memory, `byte_offset` is a multiple of the
    /// alignment of `T` (of the access' width for vector access), every index that the kernel uses
    /// is in bounds, and threads do not race for elements.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub unsafe fn dynamic(byte_offset: u32, len: u32) -> Self {
        #[cfg(target_arch = "nvptx64")]
        {
            let base: u32;
            // SAFETY: `cuda_builder` declares the symbol.
            unsafe {
                core::arch::asm!("mov.u32 {b}, __cuda_std_dynamic_shared;", b = lateout(reg32) base,
                    options(pure, nomem, nostack, preserves_flags));
            }
            Self {
                address: base + byte_offset,
                len,
                kind: PhantomData,
            }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            emulator::check_dynamic(
                byte_offset,
                u64::from(len) * size_of::<T>() as u64,
                align_of::<T>(),
            );
            Self {
                address: byte_offset,
                len,
                kind: PhantomData,
            }
        }
    }

    /// The fixed array of a place in the source. Used by [`shared_array`].
    #[doc(hidden)]
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn fixed<const N: usize, const SITE: u64>() -> Self {
        const { assert!(N > 0 && align_of::<T>() <= 16) };
        #[cfg(target_arch = "nvptx64")]
        {
            let address: u32;
            // SAFETY: `cuda_builder` makes a declaration of the comment, which names symbol and bytes.
            unsafe {
                core::arch::asm!(
                    "// cuda_std.shared {site}_{bytes} {bytes}",
                    "mov.u32 {a}, __cuda_std_shared_{site}_{bytes};",
                    a = lateout(reg32) address, site = const SITE, bytes = const N * size_of::<T>(),
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            Self {
                address,
                len: N as u32,
                kind: PhantomData,
            }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let address = emulator::fixed_array(SITE, N as u64 * size_of::<T>() as u64);
            Self {
                address,
                len: N as u32,
                kind: PhantomData,
            }
        }
    }

    /// Number of elements.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are no elements.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address in the shared window, bytes.
    #[inline(always)]
    pub fn address(&self) -> u32 {
        self.address
    }

    /// Size in bytes.
    #[inline(always)]
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn bytes(&self) -> u32 {
        self.len * size_of::<T>() as u32
    }

    /// The view of the elements from `start` on.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn at(&self, start: u32) -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::check_part(u64::from(start), 0, u64::from(self.len));
        Self {
            address: self.address + start * size_of::<T>() as u32,
            len: self.len - start,
            kind: PhantomData,
        }
    }

    /// The view of `len` elements from `start` on.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn part(&self, start: u32, len: u32) -> Self {
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::check_part(u64::from(start), u64::from(len), u64::from(self.len));
        Self {
            address: self.address + start * size_of::<T>() as u32,
            len,
            kind: PhantomData,
        }
    }

    /// The same bytes as elements of another type; a last element that does not fit is left out.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn cast<U: Pod>(&self) -> Shared<U> {
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::check_alignment(u64::from(self.address), align_of::<U>());
        let len = self.len * size_of::<T>() as u32 / size_of::<U>() as u32;
        Shared {
            address: self.address,
            len,
            kind: PhantomData,
        }
    }

    /// Element i (`ld.shared`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load(&self, index: u32) -> T {
        #[cfg(target_arch = "nvptx64")]
        {
            self.load_at_byte(index.wrapping_mul(size_of::<T>() as u32))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_read(
            self.address,
            self.bytes(),
            bytes_to::<T>(index),
            align_of::<T>(),
        )
    }

    /// The element `byte` bytes from the start (a multiple of its size), for indices that come scaled.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_at_byte(&self, byte: u32) -> T {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            device::load::<T, SharedSpace>(self.address + byte)
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_read(self.address, self.bytes(), u64::from(byte), align_of::<T>())
    }

    /// The i16 at byte `byte`, or 0 where `condition` is 0: one predicated load.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_i16_if(&self, condition: u32, byte: u32) -> i32 {
        #[cfg(target_arch = "nvptx64")]
        {
            let value: i32;
            // SAFETY: in bounds by the contract of the view where the condition holds.
            unsafe {
                core::arch::asm!(
                    "{{ .reg .pred p; setp.ne.u32 p, {c}, 0; mov.u32 {x}, 0;",
                    "@p ld.shared.s16 {x}, [{a}]; }}",
                    x = out(reg32) value, c = in(reg32) condition,
                    a = in(reg32) self.address + byte,
                    options(pure, readonly, nostack, preserves_flags)
                );
            }
            value
        }
        #[cfg(not(target_arch = "nvptx64"))]
        if condition == 0 {
            0
        } else {
            let value: i16 = emulator::shared_read(self.address, self.bytes(), u64::from(byte), 2);
            i32::from(value)
        }
    }

    /// Words `word` to `word + 3`, or all ones where `condition` does not hold: one predicated load.
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v4_or_ones(&self, condition: bool, word: u32) -> [u32; 4] {
        #[cfg(target_arch = "nvptx64")]
        {
            let mut words = [u32::MAX; 4];
            // SAFETY: in bounds by the contract of the view where the condition holds.
            unsafe {
                core::arch::asm!(
                    "{{ .reg .pred p; setp.ne.u32 p, {c}, 0;",
                    "@p ld.shared.v4.u32 {{{x}, {y}, {z}, {w}}}, [{a}]; }}",
                    x = inlateout(reg32) words[0], y = inlateout(reg32) words[1],
                    z = inlateout(reg32) words[2], w = inlateout(reg32) words[3],
                    c = in(reg32) u32::from(condition), a = in(reg32) self.address + word * 4,
                    options(pure, readonly, nostack, preserves_flags)
                );
            }
            words
        }
        #[cfg(not(target_arch = "nvptx64"))]
        if condition {
            self.load_v4(word)
        } else {
            [u32::MAX; 4]
        }
    }

    /// Words `word` to `word + 1` (`ld.shared.v2`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v2(&self, word: u32) -> [u32; 2] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            SharedSpace::load_v2(self.address + word * 4)
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_read(self.address, self.bytes(), bytes_to::<u32>(word), 8)
    }

    /// Words `word` to `word + 3` (`ld.shared.v4`).
    #[inline(always)]
    #[track_caller]
    #[must_use]
    pub fn load_v4(&self, word: u32) -> [u32; 4] {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            SharedSpace::load_v4(self.address + word * 4)
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_read(self.address, self.bytes(), bytes_to::<u32>(word), 16)
    }

    /// Writes element i (`st.shared`).
    #[inline(always)]
    #[track_caller]
    pub fn store(&self, index: u32, value: T) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            device::store::<T, SharedSpace>(self.address + index * size_of::<T>() as u32, value);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let at = bytes_to::<T>(index);
            emulator::shared_write(self.address, self.bytes(), at, align_of::<T>(), value);
        }
    }

    /// Writes words `word` to `word + 1` (`st.shared.v2`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v2(&self, word: u32, value: [u32; 2]) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            SharedSpace::store_v2(self.address + word * 4, value);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_write(self.address, self.bytes(), bytes_to::<u32>(word), 8, value);
    }

    /// Writes words `word` to `word + 3` (`st.shared.v4`).
    #[inline(always)]
    #[track_caller]
    pub fn store_v4(&self, word: u32, value: [u32; 4]) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            SharedSpace::store_v4(self.address + word * 4, value);
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_write(self.address, self.bytes(), bytes_to::<u32>(word), 16, value);
    }

    /// Adds to word `word` modulo 2^32 (`red.shared.add`, relaxed). Order-free, so exact and
    /// reproducible.
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add_i32(&self, word: u32, value: i32) {
        self.atomic_add_u32(word, value as u32);
    }

    /// Adds to word `word` modulo 2^32 (`red.shared.add`, relaxed).
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add_u32(&self, word: u32, value: u32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            core::arch::asm!("red.shared.add.u32 [{a}], {v};",
                a = in(reg32) self.address + word * 4, v = in(reg32) value,
                options(nostack, preserves_flags));
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_add(self.address, self.bytes(), bytes_to::<u32>(word), value);
    }

    /// Adds to the word at byte `byte` modulo 2^32, for indices that come scaled.
    #[inline(always)]
    #[track_caller]
    pub fn atomic_add_at_byte(&self, byte: u32, value: i32) {
        #[cfg(target_arch = "nvptx64")]
        // SAFETY: in bounds by the contract of the view.
        unsafe {
            core::arch::asm!("red.shared.add.u32 [{a}], {v};",
                a = in(reg32) self.address + byte, v = in(reg32) value,
                options(nostack, preserves_flags));
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_add(self.address, self.bytes(), u64::from(byte), value as u32);
    }

    /// Adds to word `word` modulo 2^32 and returns what it held (`atom.shared.add`, relaxed). Which
    /// thread gets which value depends on their order.
    #[inline(always)]
    #[track_caller]
    pub fn fetch_add_u32(&self, word: u32, value: u32) -> u32 {
        #[cfg(target_arch = "nvptx64")]
        {
            let old: u32;
            // SAFETY: in bounds by the contract of the view.
            unsafe {
                core::arch::asm!("atom.shared.add.u32 {o}, [{a}], {v};", o = lateout(reg32) old,
                    a = in(reg32) self.address + word * 4, v = in(reg32) value,
                    options(nostack, preserves_flags));
            }
            old
        }
        #[cfg(not(target_arch = "nvptx64"))]
        emulator::shared_add(self.address, self.bytes(), bytes_to::<u32>(word), value)
    }
}
