//! One symbol for each driver function, that jumps through a slot.
//!
//! A trampoline touches neither stack nor argument registers, so it fits any signature. A slot holds
//! `no_device` until [`load`](crate::load) fills it.

use std::ffi::c_void;
use std::sync::atomic::AtomicPtr;

/// A driver function: its name, its slot, its trampoline.
pub(crate) struct Function {
    pub(crate) name: &'static std::ffi::CStr,
    pub(crate) slot: &'static AtomicPtr<c_void>,
    /// Named here so that a linker which drops what nothing refers to keeps it.
    pub(crate) trampoline: unsafe extern "C" fn(),
}

/// What an empty slot holds. Returns CUDA_ERROR_NO_DEVICE whatever it is called with: the caller of a C
/// function cleans its arguments up.
pub(crate) extern "C" fn no_device() -> u32 {
    100
}

/// What a slot holds where the driver has no such function. Returns CUDA_ERROR_NOT_SUPPORTED.
pub(crate) extern "C" fn not_supported() -> u32 {
    801
}

macro_rules! trampolines {
    ($($name:ident),* $(,)?) => {
        #[allow(non_upper_case_globals, reason = "the driver's names")]
        mod slots {
            use super::super::trampoline::no_device;
            use std::ffi::c_void;
            use std::sync::atomic::AtomicPtr;
            $(pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(no_device as *mut c_void);)*
        }

        #[allow(non_snake_case, reason = "the driver's names")]
        mod symbols {
            use super::slots;
            $(
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $name() {
                    $crate::trampoline::jump!(slots::$name)
                }
            )*
        }

        /// All functions.
        pub(crate) static FUNCTIONS: &[$crate::trampoline::Function] = &[
            $($crate::trampoline::Function {
                name: match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("an identifier holds no 0"),
                },
                slot: &slots::$name,
                trampoline: symbols::$name,
            },)*
        ];
    };
}
pub(crate) use trampolines;

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    ($slot:path) => {
        std::arch::naked_asm!("jmp qword ptr [rip + {slot}]", slot = sym $slot)
    };
}

// x16 is the register that linkers' own veneers use: no caller keeps anything in it.
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    ($slot:path) => {
        std::arch::naked_asm!(
            "adrp x16, {slot}",
            "ldr x16, [x16, :lo12:{slot}]",
            "br x16",
            slot = sym $slot
        )
    };
}
pub(crate) use jump;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("cuda_loader has trampolines for x86-64 and aarch64: CUDA has no driver elsewhere");
