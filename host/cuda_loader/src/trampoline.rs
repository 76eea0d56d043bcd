//! One symbol for each driver function, that calls through a slot and passes the result through
//! [`known`](crate::codes::known).
//!
//! Arguments in registers reach the function as they came, since a trampoline touches no register that
//! may hold one; arguments in memory are copied, so each name comes with the number of 8-byte words
//! that its arguments take on the stack on x86-64 (left out where it is 0):
//! integers and pointers after the sixth, and structs of over 16 bytes passed by value. On aarch64 no
//! function takes more, and what is copied in excess is the caller's frame, unread. Every function of
//! the driver API returns a `CUresult`. A slot holds `no_device` until [`load`](crate::load) fills it.

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
    ($($name:ident $(($words:literal))?),* $(,)?) => {
        #[allow(non_upper_case_globals, reason = "the driver's names")]
        mod slots {
            use std::ffi::c_void;
            use std::sync::atomic::AtomicPtr;
            $(pub(super) static $name: AtomicPtr<c_void> =
                AtomicPtr::new($crate::trampoline::no_device as *mut c_void);)*
        }

        #[allow(non_snake_case, reason = "the driver's names")]
        mod symbols {
            use super::slots;
            $(
                #[unsafe(no_mangle)]
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $name() {
                    $crate::trampoline::call!(slots::$name, 0 $(+ $words)?)
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

// The stack is a multiple of 16 at a call, and 8 less on entry: what is pushed must be an odd number of
// words. Each push reads the word that is `frame` above, the last argument first.
#[cfg(target_arch = "x86_64")]
macro_rules! call {
    ($slot:path, $words:expr) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            "sub rsp, {pad}",
            ".rept {words}",
            "push qword ptr [rsp + {frame}]",
            ".endr",
            ".cfi_adjust_cfa_offset {frame}",
            "call qword ptr [rip + {slot}]",
            "add rsp, {frame}",
            ".cfi_adjust_cfa_offset -{frame}",
            "mov edi, eax",
            "jmp {known}",
            ".cfi_endproc",
            pad = const 8 * (1 - $words % 2),
            words = const $words,
            frame = const 8 * ($words + 1 - $words % 2),
            slot = sym $slot,
            known = sym $crate::codes::known,
        )
    };
}

// x16, x17 and x9 are scratch: no argument is in them.
#[cfg(target_arch = "aarch64")]
macro_rules! call {
    ($slot:path, $words:expr) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, #-16]!",
            ".cfi_adjust_cfa_offset 16",
            ".cfi_offset x29, -16",
            ".cfi_offset x30, -8",
            "mov x29, sp",
            ".cfi_def_cfa_register x29",
            "sub sp, sp, #{frame}",
            "add x16, x29, #16",
            "mov x9, sp",
            ".rept {words}",
            "ldr x17, [x16], #8",
            "str x17, [x9], #8",
            ".endr",
            "adrp x16, {slot}",
            "ldr x16, [x16, :lo12:{slot}]",
            "blr x16",
            "mov sp, x29",
            ".cfi_def_cfa sp, 16",
            "ldp x29, x30, [sp], #16",
            ".cfi_def_cfa_offset 0",
            "b {known}",
            ".cfi_endproc",
            words = const $words,
            frame = const 8 * ($words + $words % 2),
            slot = sym $slot,
            known = sym $crate::codes::known,
        )
    };
}
pub(crate) use call;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("cuda_loader has trampolines for x86-64 and aarch64: CUDA has no driver elsewhere");

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::SeqCst};

    use crate::codes::last_error_code;

    trampolines! {
        ansatz_test_empty, ansatz_test_six, ansatz_test_seven(1), ansatz_test_eleven(5),
        ansatz_test_struct(8), ansatz_test_result,
    }

    /// As large as an IPC handle.
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Large([u64; 8]);

    unsafe extern "C" {
        fn ansatz_test_empty(a: u64) -> u32;
        fn ansatz_test_six(a: u64, b: u32, c: u8, d: u64, e: *const u64, f: u64) -> u32;
        fn ansatz_test_seven(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u32) -> u32;
        #[rustfmt::skip]
        fn ansatz_test_eleven(
            a: u64,
            b: u32,
            c: u32,
            d: u32,
            e: u32,
            f: u32,
            g: u32,
            h: u32,
            i: u64,
            j: u64,
            k: u64,
        ) -> u32;
        fn ansatz_test_struct(a: *mut u64, large: Large, flags: f32) -> u32;
        fn ansatz_test_result(code: u32) -> u32;
    }

    fn slot(name: &str) -> &'static AtomicPtr<c_void> {
        let mut all = FUNCTIONS.iter();
        let found = all.find(|f| f.name.to_str() == Ok(name)).unwrap();
        assert!(found.trampoline as usize != 0);
        found.slot
    }

    /// Whether what is aligned to 16 on this stack lies so.
    #[inline(never)]
    fn stack_is_aligned() -> bool {
        #[repr(align(16))]
        struct Aligned(#[allow(dead_code, reason = "only its address is looked at")] [u64; 2]);
        let local = Aligned([1, 2]);
        let address = std::hint::black_box(&raw const local) as usize;
        address.is_multiple_of(16)
    }

    #[test]
    fn an_empty_slot_has_no_device() {
        // SAFETY: whatever the arguments.
        assert_eq!(unsafe { ansatz_test_empty(7) }, 100);
        assert_eq!(last_error_code(), 100);
    }

    #[test]
    fn six_arguments_arrive() {
        extern "C" fn six(a: u64, b: u32, c: u8, d: u64, e: *const u64, f: u64) -> u32 {
            // SAFETY: the caller's pointer is live.
            let e = unsafe { *e };
            let seen = (a, b, c, d, e, f) == (u64::MAX, 2, 3, 1 << 40, 5, 6);
            if seen && stack_is_aligned() { 0 } else { 1 }
        }
        slot("ansatz_test_six").store(six as *mut c_void, SeqCst);
        // SAFETY: the slot holds a function of this signature.
        let code = unsafe { ansatz_test_six(u64::MAX, 2, 3, 1 << 40, &5, 6) };
        assert_eq!(code, 0);
    }

    #[test]
    fn arguments_in_memory_arrive() {
        extern "C" fn seven(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u32) -> u32 {
            let seen = [a, b, c, d, e, f, g.into()] == [1, 2, 3, 4, 5, 6, 7];
            if seen && stack_is_aligned() { 0 } else { 1 }
        }
        #[rustfmt::skip]
        extern "C" fn eleven(
            a: u64, b: u32, c: u32, d: u32, e: u32, f: u32, g: u32, h: u32, i: u64, j: u64, k: u64,
        ) -> u32 {
            let middle = [b, c, d, e, f, g, h] == [2, 3, 4, 5, 6, 7, 8];
            let ends = [a, i, j, k] == [1 << 60, 9 << 40, 10, u64::MAX];
            if middle && ends && stack_is_aligned() { 0 } else { 1 }
        }
        extern "C" fn large(a: *mut u64, large: Large, flags: f32) -> u32 {
            // SAFETY: the caller's pointer is live.
            unsafe { *a = large.0.iter().sum() };
            let seen = large.0 == [1, 2, 3, 4, 5, 6, 7, u64::MAX - 28] && flags == 1.5;
            if seen && stack_is_aligned() { 0 } else { 1 }
        }
        slot("ansatz_test_seven").store(seven as *mut c_void, SeqCst);
        slot("ansatz_test_eleven").store(eleven as *mut c_void, SeqCst);
        slot("ansatz_test_struct").store(large as *mut c_void, SeqCst);
        let mut sum = 0;
        // SAFETY: the slots hold functions of these signatures.
        unsafe {
            assert_eq!(ansatz_test_seven(1, 2, 3, 4, 5, 6, 7), 0);
            #[rustfmt::skip]
            let code = ansatz_test_eleven(1 << 60, 2, 3, 4, 5, 6, 7, 8, 9 << 40, 10, u64::MAX);
            assert_eq!(code, 0);
            let argument = Large([1, 2, 3, 4, 5, 6, 7, u64::MAX - 28]);
            assert_eq!(ansatz_test_struct(&raw mut sum, argument, 1.5), 0);
        }
        assert_eq!(sum, u64::MAX);
    }

    #[test]
    fn a_code_that_cust_does_not_know_becomes_unknown() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        extern "C" fn result(code: u32) -> u32 {
            CALLS.fetch_add(1, SeqCst);
            code
        }
        slot("ansatz_test_result").store(result as *mut c_void, SeqCst);
        // SAFETY: the slot holds a function of this signature.
        let call = |code| unsafe { ansatz_test_result(code) };
        for (code, seen) in [
            (0, 0),
            (2, 2),
            (222, 222),
            (226, 999),
            (u32::MAX, 999),
            (999, 999),
        ] {
            assert_eq!(call(code), seen, "{code}");
            if code != 0 {
                assert_eq!(last_error_code(), code);
            }
        }
        assert_eq!(call(0), 0);
        assert_eq!(last_error_code(), 999, "success leaves it");
        assert_eq!(CALLS.load(SeqCst), 7);
        // Each thread has its own.
        std::thread::spawn(|| assert_eq!(last_error_code(), 0))
            .join()
            .unwrap();
    }

    /// What an enum without the code would make undefined behaviour, from cust's own call.
    #[test]
    fn cust_sees_a_new_code_as_unknown() {
        extern "C" fn newer(_version: *mut i32) -> u32 {
            912
        }
        let mut all = crate::names::FUNCTIONS.iter();
        let version = all.find(|f| f.name == c"cuDriverGetVersion").unwrap();
        let before = version.slot.swap(newer as *mut c_void, SeqCst);
        let error = cust::CudaApiVersion::get().unwrap_err();
        assert_eq!(error, cust::error::CudaError::UnknownError);
        assert_eq!(last_error_code(), 912);
        assert_eq!(crate::check(error as u32).unwrap_err().code, 912);
        version.slot.store(before, SeqCst);
    }
}
