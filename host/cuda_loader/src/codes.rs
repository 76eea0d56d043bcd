//! The results that `cust` knows, and what becomes of the others.
//!
//! `cust` declares `CUresult` as a Rust enum of the codes of CUDA 11.6: a driver that returns one of a
//! later version would be undefined behaviour there.

use std::cell::Cell;

/// CUDA_ERROR_UNKNOWN.
pub(crate) const UNKNOWN: u32 = 999;

/// Hands `name = code` of every variant of `cust_raw` 0.11.3's `cudaError_enum`, ascending, to a macro.
macro_rules! with_known_codes {
    ($then:ident) => {
        $then! {
            CUDA_SUCCESS = 0,
            CUDA_ERROR_INVALID_VALUE = 1,
            CUDA_ERROR_OUT_OF_MEMORY = 2,
            CUDA_ERROR_NOT_INITIALIZED = 3,
            CUDA_ERROR_DEINITIALIZED = 4,
            CUDA_ERROR_PROFILER_DISABLED = 5,
            CUDA_ERROR_PROFILER_NOT_INITIALIZED = 6,
            CUDA_ERROR_PROFILER_ALREADY_STARTED = 7,
            CUDA_ERROR_PROFILER_ALREADY_STOPPED = 8,
            CUDA_ERROR_STUB_LIBRARY = 34,
            CUDA_ERROR_NO_DEVICE = 100,
            CUDA_ERROR_INVALID_DEVICE = 101,
            CUDA_ERROR_DEVICE_NOT_LICENSED = 102,
            CUDA_ERROR_INVALID_IMAGE = 200,
            CUDA_ERROR_INVALID_CONTEXT = 201,
            CUDA_ERROR_CONTEXT_ALREADY_CURRENT = 202,
            CUDA_ERROR_MAP_FAILED = 205,
            CUDA_ERROR_UNMAP_FAILED = 206,
            CUDA_ERROR_ARRAY_IS_MAPPED = 207,
            CUDA_ERROR_ALREADY_MAPPED = 208,
            CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
            CUDA_ERROR_ALREADY_ACQUIRED = 210,
            CUDA_ERROR_NOT_MAPPED = 211,
            CUDA_ERROR_NOT_MAPPED_AS_ARRAY = 212,
            CUDA_ERROR_NOT_MAPPED_AS_POINTER = 213,
            CUDA_ERROR_ECC_UNCORRECTABLE = 214,
            CUDA_ERROR_UNSUPPORTED_LIMIT = 215,
            CUDA_ERROR_CONTEXT_ALREADY_IN_USE = 216,
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
            CUDA_ERROR_INVALID_PTX = 218,
            CUDA_ERROR_INVALID_GRAPHICS_CONTEXT = 219,
            CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
            CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
            CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
            CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
            CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY = 224,
            CUDA_ERROR_INVALID_SOURCE = 300,
            CUDA_ERROR_FILE_NOT_FOUND = 301,
            CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
            CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
            CUDA_ERROR_OPERATING_SYSTEM = 304,
            CUDA_ERROR_INVALID_HANDLE = 400,
            CUDA_ERROR_ILLEGAL_STATE = 401,
            CUDA_ERROR_NOT_FOUND = 500,
            CUDA_ERROR_NOT_READY = 600,
            CUDA_ERROR_ILLEGAL_ADDRESS = 700,
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
            CUDA_ERROR_LAUNCH_TIMEOUT = 702,
            CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING = 703,
            CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
            CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
            CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
            CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
            CUDA_ERROR_ASSERT = 710,
            CUDA_ERROR_TOO_MANY_PEERS = 711,
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
            CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
            CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
            CUDA_ERROR_MISALIGNED_ADDRESS = 716,
            CUDA_ERROR_INVALID_ADDRESS_SPACE = 717,
            CUDA_ERROR_INVALID_PC = 718,
            CUDA_ERROR_LAUNCH_FAILED = 719,
            CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
            CUDA_ERROR_NOT_PERMITTED = 800,
            CUDA_ERROR_NOT_SUPPORTED = 801,
            CUDA_ERROR_SYSTEM_NOT_READY = 802,
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
            CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
            CUDA_ERROR_MPS_CONNECTION_FAILED = 805,
            CUDA_ERROR_MPS_RPC_FAILURE = 806,
            CUDA_ERROR_MPS_SERVER_NOT_READY = 807,
            CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808,
            CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED = 809,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
            CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
            CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
            CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
            CUDA_ERROR_CAPTURED_EVENT = 907,
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
            CUDA_ERROR_TIMEOUT = 909,
            CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
            CUDA_ERROR_EXTERNAL_DEVICE = 911,
            CUDA_ERROR_UNKNOWN = 999,
        }
    };
}

macro_rules! table {
    ($($name:ident = $code:literal),* $(,)?) => {
        const KNOWN: &[(u32, &str)] = &[$(($code, stringify!($name))),*];
    };
}
with_known_codes!(table);

thread_local! {
    static LAST: Cell<u32> = const { Cell::new(0) };
}

/// Name of a code that `cust` knows.
pub(crate) fn name(code: u32) -> Option<&'static str> {
    let at = KNOWN.binary_search_by_key(&code, |(code, _)| *code).ok()?;
    Some(KNOWN[at].1)
}

/// Result of every trampoline: `code`, or CUDA_ERROR_UNKNOWN for one that is not in the table.
pub(crate) extern "C" fn known(code: u32) -> u32 {
    if code == 0 {
        return 0;
    }
    LAST.set(code);
    if name(code).is_some() { code } else { UNKNOWN }
}

/// The driver's last result other than success in this thread, as the driver gave it; 0 before the
/// first. Tells what a CUDA_ERROR_UNKNOWN was, or a `cust::error::CudaError::UnknownError`, which also
/// stands for codes that `cust_raw` has and `cust` has not.
#[must_use]
pub fn last_error_code() -> u32 {
    LAST.get()
}

/// Puts back what looking a code's name up has overwritten.
pub(crate) fn restore_last(code: u32) {
    LAST.set(code);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cust::sys::cudaError_enum;

    /// A variant that the table lacks does not compile; one that the enum lacks neither.
    #[test]
    fn the_table_is_the_enum() {
        macro_rules! compare {
            ($($name:ident = $code:literal),* $(,)?) => {
                fn code(variant: cudaError_enum) -> u32 {
                    match variant {
                        $(cudaError_enum::$name => $code,)*
                    }
                }
                $(assert_eq!(code(cudaError_enum::$name), cudaError_enum::$name as u32);)*
            };
        }
        with_known_codes!(compare);
        assert!(KNOWN.is_sorted(), "looked up by bisection");
    }

    #[test]
    fn codes_in_the_table_pass_and_others_do_not() {
        for code in (0..2000).chain([100_100, u32::MAX]) {
            let passes = KNOWN.iter().any(|(known, _)| *known == code);
            assert_eq!(known(code), if passes { code } else { UNKNOWN }, "{code}");
        }
        assert_eq!(name(222), Some("CUDA_ERROR_UNSUPPORTED_PTX_VERSION"));
        assert_eq!(name(225), None);
    }
}
