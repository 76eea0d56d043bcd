//! What devices there are.

use cuda_loader::{check, sys};
use cust::device::DeviceAttribute;

use super::{cust_error, described, driver_error};
use crate::backend::kernels::device::DeviceError;

/// Loads and initialises the driver, or says why there is nothing to call.
pub(super) fn start_driver() -> Result<(), DeviceError> {
    let unavailable = |reason: String| DeviceError::Unavailable {
        reason,
        remedy: "use --device cpu, or see `host doctor`",
    };
    cuda_loader::load().map_err(|e| unavailable(e.to_string()))?;
    cust::init(cust::CudaFlags::empty()).map_err(|e| unavailable(described(e).to_string()))
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// Number, as the driver counts.
    pub ordinal: u32,
    /// Name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Shared memory that a block can have, bytes.
    pub shared_per_block: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Target of the PTX that it runs: `sm_80`, `sm_90`.
    pub ptx: &'static str,
}

impl std::fmt::Display for CudaInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} {}", self.ordinal, self.name)
    }
}

/// What device `ordinal` is, where the kernels run on it.
pub(super) fn describe(ordinal: u32) -> Result<(CudaInfo, cust::device::Device), DeviceError> {
    start_driver()?;
    let anonymous = format!("cuda:{ordinal}");
    let fail = |call: &'static str| {
        let anonymous = anonymous.as_str();
        move |e| cust_error(anonymous, call, e)
    };
    let count = cust::device::Device::num_devices().map_err(fail("cuDeviceGetCount"))?;
    if ordinal >= count {
        return Err(DeviceError::Unavailable {
            reason: format!("device {ordinal} of {count}"),
            remedy: "`host doctor` lists the devices",
        });
    }
    let device = cust::device::Device::get_device(ordinal).map_err(fail("cuDeviceGet"))?;
    let get = |which| device_attribute(&anonymous, device, which);
    let capability = (
        get(DeviceAttribute::ComputeCapabilityMajor)?,
        get(DeviceAttribute::ComputeCapabilityMinor)?,
    );
    let info = CudaInfo {
        ordinal,
        name: device.name().map_err(fail("cuDeviceGetName"))?,
        capability,
        l2_bytes: get(DeviceAttribute::L2CacheSize)?.into(),
        shared_per_block: shared_per_block(&anonymous, device)?,
        memory_bytes: device.total_memory().map_err(fail("cuDeviceTotalMem"))? as u64,
        ptx: if capability >= (9, 0) {
            "sm_90"
        } else {
            "sm_80"
        },
    };
    if capability < (8, 0) {
        return Err(DeviceError::Unsupported {
            device: info.to_string(),
            reason: format!(
                "its compute capability is {}.{}, the kernels need 8.0",
                capability.0, capability.1
            ),
            remedy: "use --device cpu",
        });
    }
    Ok((info, device))
}

pub(super) fn device_attribute(
    name: &str,
    device: cust::device::Device,
    which: DeviceAttribute,
) -> Result<u32, DeviceError> {
    match device.get_attribute(which) {
        Ok(value) => Ok(value as u32),
        Err(e) => Err(cust_error(name, "cuDeviceGetAttribute", e)),
    }
}

/// Shared memory of a block that opts in, bytes.
fn shared_per_block(name: &str, device: cust::device::Device) -> Result<u32, DeviceError> {
    const WHICH: i32 = sys::device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let mut value = 0;
    // SAFETY: valid pointer and device.
    check(unsafe { sys::cuDeviceGetAttribute(&raw mut value, WHICH, device.as_raw()) })
        .map_err(|e| driver_error(name, "cuDeviceGetAttribute", e))?;
    Ok(value as u32)
}
