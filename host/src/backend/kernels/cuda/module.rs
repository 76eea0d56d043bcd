//! The kernels: PTX from this binary, given to the driver.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use cuda_loader::check;
use cuda_loader::sys::{self, function_attribute, jit_option};
use cust::function::{Function, FunctionAttribute};
use cust::module::Module;

use super::found::CudaInfo;
use super::{cust_error, described, driver_error};
use crate::backend::kernels::device::{DeviceError, DeviceLimits};
use crate::backend::kernels::table::KernelId;

/// PTX for compute capability 8.0 and later, and for 9.0 and later; NUL at the end.
pub(super) const PTX_SM_80: &str = concat!(include_str!(env!("ANSATZ_PTX_SM_80")), "\0");
pub(super) const PTX_SM_90: &str = concat!(include_str!(env!("ANSATZ_PTX_SM_90")), "\0");

/// Names a PTX file to take in place of the one in the binary, for work on kernels: the host side must
/// be that of the same sources.
const PTX_OVERRIDE: &str = "ANSATZ_PTX";

pub(super) fn load_module(info: &CudaInfo) -> Result<Module, DeviceError> {
    let mut ptx = match info.ptx {
        "sm_90" => PTX_SM_90.to_owned(),
        _ => PTX_SM_80.to_owned(),
    };
    if let Some(path) = std::env::var_os(PTX_OVERRIDE) {
        let path = std::path::Path::new(&path);
        ptx = std::fs::read_to_string(path).map_err(|e| DeviceError::Unavailable {
            reason: format!("{PTX_OVERRIDE}: {}: {e}", path.display()),
            remedy: "name a readable PTX file, or unset it",
        })?;
        ptx.push('\0');
        tracing::warn!(
            "kernels are those of {}, as {PTX_OVERRIDE} says",
            path.display()
        );
    }
    let ptx = CStr::from_bytes_until_nul(ptx.as_bytes()).expect("it ends in NUL");
    Module::from_ptx_cstr(ptx, &[]).map_err(|e| {
        let mut error = described(e);
        if let Some(log) = compiler_log(ptx) {
            error.description = format!("{}: {log}", error.description);
        }
        let call = format!("cuModuleLoadDataEx({})", info.ptx);
        driver_error(&info.to_string(), call, error)
    })
}

/// What the driver's compiler has against a PTX that it has refused.
pub(super) fn compiler_log(ptx: &CStr) -> Option<String> {
    let mut log = vec![0u8; 16 << 10];
    let mut options = [
        jit_option::ERROR_LOG_BUFFER,
        jit_option::ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    // The driver takes the size in the place of a pointer.
    let mut values = [
        log.as_mut_ptr().cast::<c_void>(),
        std::ptr::without_provenance_mut(log.len()),
    ];
    let mut module = null_mut();
    // SAFETY: the image ends with NUL; options and values are as many as given, and the log has the
    // size given. A module that is there after all is unloaded.
    unsafe {
        let code = sys::cuModuleLoadDataEx(
            &raw mut module,
            ptx.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        );
        if code == 0 {
            let _ = sys::cuModuleUnload(module);
        }
    }
    let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
    let text = String::from_utf8_lossy(&log[..end]).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// A kernel, allowed all of a block's shared memory.
pub(super) fn load_function<'a>(
    name: &str,
    limits: &DeviceLimits,
    module: &'a Module,
    id: KernelId,
) -> Result<Function<'a>, DeviceError> {
    let call = |call: &str| format!("{call}({})", id.name());
    let function = module
        .get_function(id.name())
        .map_err(|e| cust_error(name, call("cuModuleGetFunction"), e))?;
    let fixed = function
        .get_attribute(FunctionAttribute::SharedMemorySizeBytes)
        .map_err(|e| cust_error(name, call("cuFuncGetAttribute"), e))?;
    let dynamic = (limits.shared_per_block as i32 - fixed).max(0);
    // SAFETY: valid function.
    check(unsafe {
        sys::cuFuncSetAttribute(
            function.to_raw().cast(),
            function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES,
            dynamic,
        )
    })
    .map_err(|e| driver_error(name, call("cuFuncSetAttribute"), e))?;
    Ok(function)
}
