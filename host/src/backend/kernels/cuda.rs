//! A CUDA device through the driver API: kernels from the PTX in this binary, pooled memory, one
//! stream.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use cuda_loader::sys::{self, device_attribute as attribute, function_attribute, jit_option};
use cuda_loader::{DriverError, check};

use super::device::{ALIGNMENT, Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
use super::device::{check_launch, check_range};
use super::table::{KernelFn, KernelId};

/// PTX for compute capability 8.0 and later, and for 9.0 and later; NUL at the end.
const PTX_SM_80: &str = concat!(include_str!(env!("ANSATZ_PTX_SM_80")), "\0");
const PTX_SM_90: &str = concat!(include_str!(env!("ANSATZ_PTX_SM_90")), "\0");

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

/// A CUDA device.
#[derive(Clone)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

struct Inner {
    info: CudaInfo,
    limits: DeviceLimits,
    device: sys::Device,
    context: sys::Context,
    module: sys::Module,
    stream: sys::Stream,
    /// By [`KernelId`].
    functions: Vec<sys::Function>,
    /// Free memory by size.
    pool: Mutex<BTreeMap<usize, Vec<u64>>>,
}

// SAFETY: the handles belong to the driver, whose functions may be called from any thread once the
// context is current there, which every use sees to (`Inner::enter`); the pool is behind a mutex.
unsafe impl Send for Inner {}
// SAFETY: as above; launches of several threads go to one stream, in some order.
unsafe impl Sync for Inner {}

/// Size that a request takes from the pool: eight steps to each power of two, so that sizes that
/// differ a little share, at an eighth or 2 MiB more at most.
fn pool_size(bytes: usize) -> usize {
    let bytes = bytes.max(ALIGNMENT);
    let step = (bytes.next_power_of_two() / 16).clamp(ALIGNMENT, 2 << 20);
    bytes.next_multiple_of(step)
}

impl Inner {
    fn error(&self, call: impl Into<String>, error: DriverError) -> DeviceError {
        driver_error(&self.info.to_string(), call, error)
    }

    /// Makes the context current in this thread.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained until `self` is dropped.
        check(unsafe { sys::cuCtxSetCurrent(self.context) })
            .map_err(|e| self.error("cuCtxSetCurrent", e))
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamSynchronize(self.stream) })
            .map_err(|e| self.error("cuStreamSynchronize", e))
    }

    fn pool(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, Vec<u64>>> {
        // What a panic could leave behind is a list without an address that was taken: no harm.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the pool's memory back to the driver.
    fn trim(&self) -> Result<(), DeviceError> {
        let free = std::mem::take(&mut *self.pool());
        self.synchronize()?;
        for address in free.into_values().flatten() {
            // SAFETY: allocated by `cuMemAlloc`, in nobody's hands, and the stream is done with it.
            check(unsafe { sys::cuMemFree_v2(address) }).map_err(|e| self.error("cuMemFree", e))?;
        }
        Ok(())
    }

    fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the pointers are valid. A failure leaves 0, which only a message shows.
        let _ = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        free as u64
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nothing can be done about failures here: the process is about to lose the device anyway.
        let _ = self.enter();
        let _ = self.trim();
        // SAFETY: each handle was made in `CudaDevice::new`, and this is its last use.
        unsafe {
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuModuleUnload(self.module);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn driver_error(device: &str, call: impl Into<String>, error: DriverError) -> DeviceError {
    DeviceError::Driver {
        device: device.into(),
        call: call.into(),
        code: error.code,
        name: error.name,
        what: error.description,
    }
}

/// The driver's functions, or why there is nothing to call.
fn driver() -> Result<&'static cuda_loader::Driver, DeviceError> {
    const REMEDY: &str = "use --device cpu, or see `host doctor`";
    let unavailable = |reason: String| DeviceError::Unavailable {
        reason,
        remedy: REMEDY,
    };
    let driver = cuda_loader::load().map_err(|e| unavailable(e.to_string()))?;
    driver.init().map_err(|e| unavailable(e.to_string()))?;
    Ok(driver)
}

impl CudaDevice {
    /// Devices that the driver knows; 0 without a driver.
    pub fn count() -> u32 {
        driver().map_or(0, |d| d.device_count().unwrap_or(0))
    }

    /// What device `ordinal` is.
    pub fn info(ordinal: u32) -> Result<CudaInfo, DeviceError> {
        Ok(describe(ordinal)?.0)
    }

    /// Opens a device: its primary context, the kernels, a stream.
    pub fn new(ordinal: u32) -> Result<Self, DeviceError> {
        let (info, device) = describe(ordinal)?;
        let name = info.to_string();
        let fail = |call: &str| {
            let (name, call) = (name.clone(), call.to_owned());
            move |e| driver_error(&name, call, e)
        };
        let get = |which: i32| device_attribute(&name, device, which);
        let limits = DeviceLimits {
            sms: get(attribute::MULTIPROCESSOR_COUNT)?,
            shared_per_block: get(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_sm: get(attribute::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            threads_per_sm: get(attribute::MAX_THREADS_PER_MULTIPROCESSOR)?,
        };
        let mut context = null_mut();
        // SAFETY: valid pointer and device.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })
            .map_err(fail("cuDevicePrimaryCtxRetain"))?;
        // From here on `Drop` releases what there is.
        let mut inner = Inner {
            info,
            limits,
            device,
            context,
            module: null_mut(),
            stream: null_mut(),
            functions: vec![],
            pool: Mutex::default(),
        };
        inner.enter()?;
        // SAFETY: valid pointer.
        check(unsafe { sys::cuStreamCreate(&raw mut inner.stream, sys::STREAM_NON_BLOCKING) })
            .map_err(fail("cuStreamCreate"))?;
        inner.module = load_module(&inner)?;
        for id in KernelId::ALL {
            let function = load_function(&inner, *id)?;
            inner.functions.push(function);
        }
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// What it is.
    pub fn describe_device(&self) -> &CudaInfo {
        &self.inner.info
    }

    /// Bytes free in the driver and in the pool.
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        self.inner.enter()?;
        let pooled: usize = self.inner.pool().iter().map(|(s, v)| s * v.len()).sum();
        Ok(self.inner.free_bytes() + pooled as u64)
    }

    /// Registers a thread, bytes of local memory a thread and of static shared memory of a kernel,
    /// as the driver compiled it.
    pub fn kernel_usage(&self, kernel: KernelId) -> Result<(u32, u32, u32), DeviceError> {
        self.inner.enter()?;
        let function = self.inner.functions[kernel as usize];
        let get = |which: i32| -> Result<u32, DeviceError> {
            let mut value = 0;
            // SAFETY: valid pointer and function.
            check(unsafe { sys::cuFuncGetAttribute(&raw mut value, which, function) })
                .map_err(|e| self.inner.error("cuFuncGetAttribute", e))?;
            Ok(value as u32)
        };
        Ok((
            get(function_attribute::NUM_REGS)?,
            get(function_attribute::LOCAL_SIZE_BYTES)?,
            get(function_attribute::SHARED_SIZE_BYTES)?,
        ))
    }
}

fn device_attribute(name: &str, device: sys::Device, which: i32) -> Result<u32, DeviceError> {
    let mut value = 0;
    // SAFETY: valid pointer and device.
    check(unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })
        .map_err(|e| driver_error(name, "cuDeviceGetAttribute", e))?;
    Ok(value as u32)
}

fn describe(ordinal: u32) -> Result<(CudaInfo, sys::Device), DeviceError> {
    let driver = driver()?;
    let anonymous = format!("cuda:{ordinal}");
    let count = driver
        .device_count()
        .map_err(|e| driver_error(&anonymous, "cuDeviceGetCount", e))?;
    if ordinal >= count {
        return Err(DeviceError::Unavailable {
            reason: format!("device {ordinal} of {count}"),
            remedy: "`host doctor` lists the devices",
        });
    }
    let mut device = 0;
    // SAFETY: valid pointer.
    check(unsafe { sys::cuDeviceGet(&raw mut device, ordinal as i32) })
        .map_err(|e| driver_error(&anonymous, "cuDeviceGet", e))?;
    let mut name = [0u8; 256];
    // SAFETY: the length given is the buffer's.
    check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) })
        .map_err(|e| driver_error(&anonymous, "cuDeviceGetName", e))?;
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    let name = String::from_utf8_lossy(&name[..end]).into_owned();
    let mut memory = 0;
    // SAFETY: valid pointer and device.
    check(unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, device) })
        .map_err(|e| driver_error(&anonymous, "cuDeviceTotalMem", e))?;
    let get = |which: i32| device_attribute(&anonymous, device, which);
    let capability = (
        get(attribute::COMPUTE_CAPABILITY_MAJOR)?,
        get(attribute::COMPUTE_CAPABILITY_MINOR)?,
    );
    let info = CudaInfo {
        ordinal,
        name,
        capability,
        l2_bytes: get(attribute::L2_CACHE_SIZE)?.into(),
        memory_bytes: memory as u64,
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

fn load_module(inner: &Inner) -> Result<sys::Module, DeviceError> {
    let ptx = match inner.info.ptx {
        "sm_90" => PTX_SM_90,
        _ => PTX_SM_80,
    };
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
    // size given.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &raw mut module,
            ptx.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    check(code).map_err(|mut e| {
        let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
        let text = String::from_utf8_lossy(&log[..end]);
        if !text.trim().is_empty() {
            e.description = format!("{}: {}", e.description, text.trim());
        }
        inner.error(format!("cuModuleLoadDataEx({})", inner.info.ptx), e)
    })?;
    Ok(module)
}

/// A kernel, allowed all of a block's shared memory.
fn load_function(inner: &Inner, id: KernelId) -> Result<sys::Function, DeviceError> {
    let fail = |call: &str| {
        let call = format!("{call}({})", id.name());
        move |e| inner.error(call, e)
    };
    let name = CString::new(id.name()).expect("kernel names have no NUL");
    let mut function = null_mut();
    // SAFETY: valid pointers; the module is loaded.
    check(unsafe { sys::cuModuleGetFunction(&raw mut function, inner.module, name.as_ptr()) })
        .map_err(fail("cuModuleGetFunction"))?;
    let mut fixed = 0;
    // SAFETY: valid pointer and function.
    check(unsafe {
        sys::cuFuncGetAttribute(
            &raw mut fixed,
            function_attribute::SHARED_SIZE_BYTES,
            function,
        )
    })
    .map_err(fail("cuFuncGetAttribute"))?;
    let dynamic = (inner.limits.shared_per_block as i32 - fixed).max(0);
    // SAFETY: valid function.
    check(unsafe {
        sys::cuFuncSetAttribute(
            function,
            function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES,
            dynamic,
        )
    })
    .map_err(fail("cuFuncSetAttribute"))?;
    Ok(function)
}

/// Memory of a [`CudaDevice`]; goes back to its pool when dropped.
pub struct CudaMemory {
    device: Arc<Inner>,
    address: u64,
    size: usize,
}

impl DeviceMemory for CudaMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn size(&self) -> usize {
        self.size
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Whoever takes it next uses it behind, in the one stream.
        let mut pool = self.device.pool();
        pool.entry(pool_size(self.size))
            .or_default()
            .push(self.address);
    }
}

/// A point in the stream of a [`CudaDevice`].
pub struct CudaEvent {
    device: Arc<Inner>,
    event: sys::Event,
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let _ = self.device.enter();
        // SAFETY: made by `cuEventCreate`; last use. A failure loses an event, no more.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Event = CudaEvent;

    fn describe(&self) -> String {
        self.inner.info.to_string()
    }

    fn limits(&self) -> &DeviceLimits {
        &self.inner.limits
    }

    fn allocate(&self, bytes: usize) -> Result<CudaMemory, DeviceError> {
        let inner = &self.inner;
        let take = pool_size(bytes);
        let pooled = inner.pool().get_mut(&take).and_then(Vec::pop);
        let address = match pooled {
            Some(address) => address,
            None => {
                inner.enter()?;
                let mut address = 0;
                // SAFETY: valid pointer.
                let mut attempt = || check(unsafe { sys::cuMemAlloc_v2(&raw mut address, take) });
                let mut done = attempt();
                if matches!(&done, Err(e) if e.code == DriverError::OUT_OF_MEMORY) {
                    inner.trim()?;
                    done = attempt();
                }
                match done {
                    Ok(()) => {}
                    Err(e) if e.code == DriverError::OUT_OF_MEMORY => {
                        return Err(DeviceError::OutOfMemory {
                            device: inner.info.to_string(),
                            requested: bytes as u64,
                            free: inner.free_bytes(),
                        });
                    }
                    Err(e) => return Err(inner.error("cuMemAlloc", e)),
                }
                address
            }
        };
        Ok(CudaMemory {
            device: inner.clone(),
            address,
            size: bytes,
        })
    }

    fn fill(
        &self,
        memory: &CudaMemory,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), DeviceError> {
        check_range("fill", offset, bytes, memory.size)?;
        if bytes == 0 {
            return Ok(());
        }
        let inner = &self.inner;
        inner.enter()?;
        let address = memory.address + offset as u64;
        // SAFETY: the range lies in live memory.
        check(unsafe { sys::cuMemsetD8Async(address, value, bytes, inner.stream) })
            .map_err(|e| inner.error("cuMemsetD8Async", e))
    }

    fn upload(&self, memory: &CudaMemory, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        check_range("upload", offset, data.len(), memory.size)?;
        if data.is_empty() {
            return Ok(());
        }
        let inner = &self.inner;
        inner.enter()?;
        let to = memory.address + offset as u64;
        // SAFETY: both ranges are live, the host's until the copy is done: waited for below.
        check(unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, data.as_ptr().cast(), data.len(), inner.stream)
        })
        .map_err(|e| inner.error("cuMemcpyHtoDAsync", e))?;
        inner.synchronize()
    }

    fn download(
        &self,
        memory: &CudaMemory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        check_range("download", offset, out.len(), memory.size)?;
        if out.is_empty() {
            return Ok(());
        }
        let inner = &self.inner;
        inner.enter()?;
        let from = memory.address + offset as u64;
        // SAFETY: both ranges are live, the host's until the copy is done: waited for below.
        check(unsafe {
            sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, out.len(), inner.stream)
        })
        .map_err(|e| inner.error("cuMemcpyDtoHAsync", e))?;
        inner.synchronize()
    }

    unsafe fn launch<K: KernelFn>(
        &self,
        launch: Launch,
        mut args: K::Args,
    ) -> Result<(), DeviceError> {
        let inner = &self.inner;
        if !check_launch(&inner.info.name, &inner.limits, K::ID, &launch)? {
            return Ok(());
        }
        inner.enter()?;
        let [x, y, z] = launch.grid;
        let mut parameters = [(&raw mut args).cast::<c_void>()];
        // SAFETY: the function is the kernel's, which takes one argument of type `K::Args` by value
        // (one row of the table gives both); the driver copies it before it returns. The views in it
        // are the caller's promise.
        check(unsafe {
            sys::cuLaunchKernel(
                inner.functions[K::ID as usize],
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared,
                inner.stream,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        })
        .map_err(|e| inner.error(format!("cuLaunchKernel({})", K::ID.name()), e))
    }

    fn event(&self) -> Result<CudaEvent, DeviceError> {
        let inner = &self.inner;
        inner.enter()?;
        let mut event = null_mut();
        // SAFETY: valid pointer.
        check(unsafe { sys::cuEventCreate(&raw mut event, sys::EVENT_DEFAULT) })
            .map_err(|e| inner.error("cuEventCreate", e))?;
        let event = CudaEvent {
            device: inner.clone(),
            event,
        };
        // SAFETY: both handles are live.
        check(unsafe { sys::cuEventRecord(event.event, inner.stream) })
            .map_err(|e| inner.error("cuEventRecord", e))?;
        Ok(event)
    }

    fn elapsed(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64, DeviceError> {
        let inner = &self.inner;
        inner.enter()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: the handles are live.
        check(unsafe { sys::cuEventSynchronize(to.event) })
            .map_err(|e| inner.error("cuEventSynchronize", e))?;
        // SAFETY: valid pointer, live handles.
        check(unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, from.event, to.event) })
            .map_err(|e| inner.error("cuEventElapsedTime", e))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.inner.enter()?;
        self.inner.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_sizes_waste_little() {
        for bytes in [
            0,
            1,
            255,
            256,
            257,
            4000,
            4096,
            4097,
            1 << 20,
            (1 << 20) + 1,
            3 << 30,
        ] {
            let size = pool_size(bytes);
            assert!(
                size >= bytes.max(1) && size.is_multiple_of(ALIGNMENT),
                "{bytes}"
            );
            assert!(
                size <= bytes + bytes / 8 + ALIGNMENT,
                "{bytes} takes {size}"
            );
            assert_eq!(pool_size(size), size);
        }
    }

    #[test]
    fn without_a_driver_the_error_names_the_remedy() {
        if CudaDevice::count() == 0 {
            let error = CudaDevice::new(0).err().unwrap().to_string();
            assert!(error.contains("--device cpu"), "{error}");
        }
    }

    #[test]
    fn the_ptx_has_every_kernel() {
        for id in KernelId::ALL {
            for ptx in [PTX_SM_80, PTX_SM_90] {
                let entry = format!(".entry {}(", id.name());
                assert!(ptx.contains(&entry), "{}", id.name());
            }
        }
    }
}
