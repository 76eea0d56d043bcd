//! Loads and stores of the nvptx64 back end: one instruction each, in an explicit state space.
//!
//! Loads are `pure, readonly`: LLVM may merge and move them, but not across a store, a barrier or a wait.
//! So are those through the read-only path: what they read does not change while the kernel runs, but
//! where they stand ahead of a wait for the kernel before they are meant to stay there, and behind one
//! they may read what that kernel has written. (`ptxas` still moves `ld.global.nc` behind such a wait,
//! `ld.global` not.)

use bytemuck::Pod;
use core::arch::asm;
use core::mem::MaybeUninit;

/// A state space to load from.
///
/// # Safety
/// Addresses are mapped and aligned to the width.
#[allow(clippy::missing_safety_doc, reason = "stated for the trait")]
pub trait Space {
    /// An address in it.
    type Address: Copy;
    fn step(address: Self::Address, bytes: u32) -> Self::Address;
    unsafe fn load_b8(address: Self::Address) -> u8;
    unsafe fn load_b16(address: Self::Address) -> u16;
    unsafe fn load_b32(address: Self::Address) -> u32;
    unsafe fn load_b64(address: Self::Address) -> u64;
    unsafe fn load_v2(address: Self::Address) -> [u32; 2];
    unsafe fn load_v4(address: Self::Address) -> [u32; 4];
}

/// A state space to store to.
///
/// # Safety
/// Addresses are mapped and aligned to the width.
#[allow(clippy::missing_safety_doc, reason = "stated for the trait")]
pub trait SpaceMut: Space {
    unsafe fn store_b8(address: Self::Address, value: u8);
    unsafe fn store_b16(address: Self::Address, value: u16);
    unsafe fn store_b32(address: Self::Address, value: u32);
    unsafe fn store_b64(address: Self::Address, value: u64);
    unsafe fn store_v2(address: Self::Address, value: [u32; 2]);
    unsafe fn store_v4(address: Self::Address, value: [u32; 4]);
}

/// Global memory.
pub struct GlobalSpace;
/// Global memory that does not change while the kernel runs.
pub struct ConstantSpace;
/// As [`ConstantSpace`], 16-byte loads leave no line in the L1 cache.
pub struct StreamSpace;
/// Shared memory, 32-bit addresses.
pub struct SharedSpace;

macro_rules! space {
    ($name:ident, $address:ty, $class:ident, $op:literal, $wide:literal, [$($option:ident),*]) => {
        impl Space for $name {
            type Address = $address;
            #[inline(always)]
            fn step(address: $address, bytes: u32) -> $address {
                address.wrapping_add(bytes as $address)
            }
            #[inline(always)]
            unsafe fn load_b8(address: $address) -> u8 {
                let value: u16;
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u8 {v}, [{a}];"), v = lateout(reg16) value,
                        a = in($class) address, options($($option),*, nostack, preserves_flags));
                }
                value as u8
            }
            #[inline(always)]
            unsafe fn load_b16(address: $address) -> u16 {
                let value: u16;
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u16 {v}, [{a}];"), v = lateout(reg16) value,
                        a = in($class) address, options($($option),*, nostack, preserves_flags));
                }
                value
            }
            #[inline(always)]
            unsafe fn load_b32(address: $address) -> u32 {
                let value: u32;
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u32 {v}, [{a}];"), v = lateout(reg32) value,
                        a = in($class) address, options($($option),*, nostack, preserves_flags));
                }
                value
            }
            #[inline(always)]
            unsafe fn load_b64(address: $address) -> u64 {
                let value: u64;
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u64 {v}, [{a}];"), v = lateout(reg64) value,
                        a = in($class) address, options($($option),*, nostack, preserves_flags));
                }
                value
            }
            #[inline(always)]
            unsafe fn load_v2(address: $address) -> [u32; 2] {
                let (x, y): (u32, u32);
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".v2.u32 {{{x}, {y}}}, [{a}];"),
                        x = lateout(reg32) x, y = lateout(reg32) y,
                        a = in($class) address, options($($option),*, nostack, preserves_flags));
                }
                [x, y]
            }
            #[inline(always)]
            unsafe fn load_v4(address: $address) -> [u32; 4] {
                let (x, y, z, w): (u32, u32, u32, u32);
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($wide, ".v4.u32 {{{x}, {y}, {z}, {w}}}, [{a}];"),
                        x = lateout(reg32) x, y = lateout(reg32) y,
                        z = lateout(reg32) z, w = lateout(reg32) w,
                        a = in($class) address, options($($option),*, nostack, preserves_flags));
                }
                [x, y, z, w]
            }
        }
    };
}

space!(
    GlobalSpace,
    u64,
    reg64,
    "ld.global",
    "ld.global",
    [pure, readonly]
);
space!(
    ConstantSpace,
    u64,
    reg64,
    "ld.global.nc",
    "ld.global.nc",
    [pure, readonly]
);
space!(
    StreamSpace,
    u64,
    reg64,
    "ld.global.nc",
    "ld.global.nc.L1::no_allocate",
    [pure, readonly]
);
space!(
    SharedSpace,
    u32,
    reg32,
    "ld.shared",
    "ld.shared",
    [pure, readonly]
);

macro_rules! space_mut {
    ($name:ident, $address:ty, $class:ident, $op:literal) => {
        impl SpaceMut for $name {
            #[inline(always)]
            unsafe fn store_b8(address: $address, value: u8) {
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u8 [{a}], {v};"), v = in(reg16) u16::from(value),
                        a = in($class) address, options(nostack, preserves_flags));
                }
            }
            #[inline(always)]
            unsafe fn store_b16(address: $address, value: u16) {
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u16 [{a}], {v};"), v = in(reg16) value,
                        a = in($class) address, options(nostack, preserves_flags));
                }
            }
            #[inline(always)]
            unsafe fn store_b32(address: $address, value: u32) {
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u32 [{a}], {v};"), v = in(reg32) value,
                        a = in($class) address, options(nostack, preserves_flags));
                }
            }
            #[inline(always)]
            unsafe fn store_b64(address: $address, value: u64) {
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".u64 [{a}], {v};"), v = in(reg64) value,
                        a = in($class) address, options(nostack, preserves_flags));
                }
            }
            #[inline(always)]
            unsafe fn store_v2(address: $address, value: [u32; 2]) {
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".v2.u32 [{a}], {{{x}, {y}}};"),
                        x = in(reg32) value[0], y = in(reg32) value[1],
                        a = in($class) address, options(nostack, preserves_flags));
                }
            }
            #[inline(always)]
            unsafe fn store_v4(address: $address, value: [u32; 4]) {
                // SAFETY: the trait's.
                unsafe {
                    asm!(concat!($op, ".v4.u32 [{a}], {{{x}, {y}, {z}, {w}}};"),
                        x = in(reg32) value[0], y = in(reg32) value[1],
                        z = in(reg32) value[2], w = in(reg32) value[3],
                        a = in($class) address, options(nostack, preserves_flags));
                }
            }
        }
    };
}

space_mut!(GlobalSpace, u64, reg64, "st.global");
space_mut!(SharedSpace, u32, reg32, "st.shared");

/// Loads a `T` with as few instructions as its size and alignment allow.
///
/// # Safety
/// `address` is mapped and aligned to `T`.
#[inline(always)]
pub unsafe fn load<T: Pod, S: Space>(address: S::Address) -> T {
    let mut value = MaybeUninit::<T>::uninit();
    let (size, align) = const { (size_of::<T>(), align_of::<T>()) };
    let bytes = value.as_mut_ptr().cast::<u8>();
    let mut at = 0;
    // SAFETY: the caller's; pieces lie in `value`, aligned to their width, and together fill it.
    unsafe {
        while at < size {
            let (from, to) = (S::step(address, at as u32), bytes.add(at));
            at += if align >= 16 && size % 16 == 0 {
                to.cast::<[u32; 4]>().write(S::load_v4(from));
                16
            } else if align >= 8 {
                to.cast::<u64>().write(S::load_b64(from));
                8
            } else if align >= 4 {
                to.cast::<u32>().write(S::load_b32(from));
                4
            } else if align >= 2 {
                to.cast::<u16>().write(S::load_b16(from));
                2
            } else {
                to.write(S::load_b8(from));
                1
            };
        }
        value.assume_init()
    }
}

/// Stores a `T` with as few instructions as its size and alignment allow.
///
/// # Safety
/// `address` is mapped and aligned to `T`.
#[inline(always)]
pub unsafe fn store<T: Pod, S: SpaceMut>(address: S::Address, value: T) {
    let (size, align) = const { (size_of::<T>(), align_of::<T>()) };
    let bytes = (&raw const value).cast::<u8>();
    let mut at = 0;
    // SAFETY: the caller's; pieces lie in `value`, aligned to their width.
    unsafe {
        while at < size {
            let (from, to) = (bytes.add(at), S::step(address, at as u32));
            at += if align >= 16 && size % 16 == 0 {
                S::store_v4(to, from.cast::<[u32; 4]>().read());
                16
            } else if align >= 8 {
                S::store_b64(to, from.cast::<u64>().read());
                8
            } else if align >= 4 {
                S::store_b32(to, from.cast::<u32>().read());
                4
            } else if align >= 2 {
                S::store_b16(to, from.cast::<u16>().read());
                2
            } else {
                S::store_b8(to, from.read());
                1
            };
        }
    }
}
