//! The CUDA driver API bound at run time.
//!
//! A program that links this crate has a symbol for every driver function that `cust` references, so it
//! links without a CUDA toolkit and starts without a driver. Until [`load`] has found
//! `libcuda.so.1` every one of them returns CUDA_ERROR_NO_DEVICE (100).
//!
//! `cust` declares the driver's results as a Rust enum of the codes that CUDA 11 knew, and a code that is
//! not among them is undefined behaviour there. So every result passes through a table of those
//! codes: one that is not in it becomes CUDA_ERROR_UNKNOWN (999), and [`last_error_code`] has what the
//! driver said. What `cust` does not cover is declared in [`sys`] with plain integers, over the same
//! symbols; [`check`] turns a code of either into a [`DriverError`].

mod codes;
mod names;
pub mod sys;
mod trampoline;

pub use codes::last_error_code;

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Release;

/// Oldest driver that takes the PTX: ISA 7.4, CUDA 11.4.
const OLDEST: i32 = 11_040;

/// Where the driver's library is looked for: by the loader's rules, then where WSL has it.
const LIBRARIES: [&CStr; 3] = [
    c"libcuda.so.1",
    c"libcuda.so",
    c"/usr/lib/wsl/lib/libcuda.so.1",
];

/// Functions that no driver of the supported versions lacks, and that nothing works without.
const REQUIRED: [&str; 12] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuStreamCreate",
    "cuEventCreate",
];

/// A loaded driver. Lives as long as the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    version: i32,
    library: PathBuf,
    missing: Vec<&'static str>,
}

impl Driver {
    /// CUDA version of the driver API, major and minor.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        let version = self.version.unsigned_abs();
        (version / 1000, version % 1000 / 10)
    }

    /// Name under which the library was found.
    #[must_use]
    pub fn library(&self) -> &std::path::Path {
        &self.library
    }

    /// Functions that this driver lacks; calling one returns CUDA_ERROR_NOT_SUPPORTED.
    #[must_use]
    pub fn missing(&self) -> &[&'static str] {
        &self.missing
    }

    /// Initialises the driver (`cuInit`); may be called again.
    ///
    /// # Errors
    /// The driver's: no device, a library that does not match the kernel module, ...
    pub fn init(&self) -> Result<(), DriverError> {
        // SAFETY: takes no pointer.
        check(unsafe { sys::cuInit(0) })
    }

    /// Number of CUDA devices, after [`init`](Self::init).
    ///
    /// # Errors
    /// The driver's.
    pub fn device_count(&self) -> Result<u32, DriverError> {
        let mut count = 0;
        // SAFETY: the pointer is valid.
        check(unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        Ok(count.unsigned_abs())
    }
}

/// Why there is no driver to call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No library.
    #[error(
        "no NVIDIA driver: {reason}; install the driver (its libcuda.so.1 is all that is needed)"
    )]
    NoLibrary {
        /// What the dynamic loader said.
        reason: String,
    },
    /// A driver from before the PTX's version.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, {}.{} is needed: update the driver to 470 or later",
        found.0, found.1, needed.0, needed.1
    )]
    TooOld {
        /// Version of the driver API, major and minor.
        found: (u32, u32),
        /// Oldest that is enough.
        needed: (u32, u32),
    },
    /// A library that is no CUDA driver.
    #[error("{library} has no function {symbol}: not an NVIDIA driver, or a damaged one")]
    MissingSymbol {
        /// Name of the library.
        library: String,
        /// Name of the function.
        symbol: &'static str,
    },
    /// The driver could not tell its version.
    #[error("the NVIDIA driver does not answer: {0}")]
    Driver(#[from] DriverError),
}

/// A result of the driver other than success.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} ({code}): {description}")]
pub struct DriverError {
    /// `CUresult`.
    pub code: u32,
    /// Name of the code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's description.
    pub description: String,
}

impl DriverError {
    /// CUDA_ERROR_INVALID_VALUE.
    pub const INVALID_VALUE: u32 = 1;
    /// CUDA_ERROR_OUT_OF_MEMORY.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// CUDA_ERROR_NO_DEVICE.
    pub const NO_DEVICE: u32 = 100;
    /// CUDA_ERROR_NOT_FOUND.
    pub const NOT_FOUND: u32 = 500;
    /// CUDA_ERROR_NOT_READY: not an error of a query.
    pub const NOT_READY: u32 = 600;
    /// CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED.
    pub const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
    /// CUDA_ERROR_NOT_SUPPORTED.
    pub const NOT_SUPPORTED: u32 = 801;
}

/// Turns a result of a function in [`sys`], or of `cust` in this thread, into a [`Result`]. Call it
/// before another driver function fails: what CUDA_ERROR_UNKNOWN stands for is then still there.
///
/// # Errors
/// Any code but 0, with the driver's name and description where it has one.
pub fn check(code: u32) -> Result<(), DriverError> {
    let code = match (code, last_error_code()) {
        (0, _) => return Ok(()),
        (codes::UNKNOWN, last) if last != 0 => last,
        _ => code,
    };
    let text = |get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the pointer is valid; the driver's strings are static, and with no driver, or a code
        // it does not know, the pointer stays, or becomes, null.
        unsafe {
            let known = get(code, &raw mut text) == 0 && !text.is_null();
            known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).or_else(|| codes::name(code).map(Into::into));
    let description = text(sys::cuGetErrorString).unwrap_or_else(|| {
        match code {
            DriverError::NO_DEVICE => "no CUDA-capable device, or no driver loaded",
            DriverError::NOT_SUPPORTED => "operation not supported",
            _ => "the driver has no description",
        }
        .into()
    });
    codes::restore_last(code);
    Err(DriverError {
        code,
        name: name.unwrap_or_else(|| "unknown CUDA error".into()),
        description,
    })
}

/// Loads the driver and fills the slots, once; later calls return the first result.
///
/// # Errors
/// [`LoadError`]; the slots then stay empty.
pub fn load() -> Result<&'static Driver, LoadError> {
    static DRIVER: OnceLock<Result<Driver, LoadError>> = OnceLock::new();
    DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// The dynamic loader's last error.
fn loader_error() -> String {
    // SAFETY: the string is this thread's until the next call of the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "unknown error".into()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

fn open() -> Result<Driver, LoadError> {
    let mut reason = None;
    for library in LIBRARIES {
        // SAFETY: opens the driver's library, whose initialisers are safe to run at any time. It is
        // never closed: the slots point into it.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return bind(handle, &library.to_string_lossy());
        }
        let error = loader_error();
        reason.get_or_insert(error);
    }
    Err(LoadError::NoLibrary {
        reason: reason.unwrap_or_default(),
    })
}

/// Looks all functions up and, where the driver will do, fills the slots.
fn bind(handle: *mut c_void, library: &str) -> Result<Driver, LoadError> {
    // SAFETY: the handle is open, the name ends in 0.
    let find = |name: &CStr| unsafe { libc::dlsym(handle, name.as_ptr()) };
    let missing_symbol = |symbol| LoadError::MissingSymbol {
        library: library.to_owned(),
        symbol,
    };

    let get_version = find(c"cuDriverGetVersion");
    if get_version.is_null() {
        return Err(missing_symbol("cuDriverGetVersion"));
    }
    let mut version = 0;
    // SAFETY: the driver's function of that name has this signature, and may be called before cuInit.
    let code = unsafe {
        let get: unsafe extern "C" fn(*mut i32) -> u32 = std::mem::transmute(get_version);
        get(&raw mut version)
    };
    check(code)?;
    if version < OLDEST {
        let parts = |version: i32| {
            (
                version.unsigned_abs() / 1000,
                version.unsigned_abs() % 1000 / 10,
            )
        };
        return Err(LoadError::TooOld {
            found: parts(version),
            needed: parts(OLDEST),
        });
    }

    let mut missing = Vec::new();
    let mut found = Vec::with_capacity(names::FUNCTIONS.len());
    for function in names::FUNCTIONS {
        let address = find(function.name);
        found.push(address);
        if address.is_null() {
            let name = function.name.to_str().unwrap_or_default();
            if REQUIRED.contains(&name) {
                return Err(missing_symbol(name));
            }
            missing.push(name);
        }
    }
    for (function, address) in names::FUNCTIONS.iter().zip(found) {
        debug_assert!(function.trampoline as usize != 0);
        let none = trampoline::not_supported as *mut c_void;
        function
            .slot
            .store(if address.is_null() { none } else { address }, Release);
    }
    Ok(Driver {
        version,
        library: library.into(),
        missing,
    })
}
