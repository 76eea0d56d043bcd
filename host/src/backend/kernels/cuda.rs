//! A CUDA device: kernels from the PTX in this binary, pooled memory, one stream.
//!
//! The driver is called through `cust`, whose functions end in `cuda_loader`'s symbols, and through
//! `cuda_loader::sys` where `cust` 0.3.2 has nothing that fits:
//! - `cuStreamCreate`: `cust` takes the non-blocking flag out;
//! - `cuFuncSetAttribute` (dynamic shared memory over 48 KiB) and the device attribute that limits it:
//!   not there;
//! - `cuLaunchKernel`: only behind a macro whose arguments must implement `cust`'s own trait;
//! - `cuLaunchKernelEx`, `cuMemcpyPeerAsync`, the capture of streams, `cuEventRecordWithFlags`: not there;
//! - `cuMemHostRegister`: not there;
//! - `cuModuleLoadDataEx`, once more after `cust`'s has failed, for the compiler's log: no option for it.

mod event;
mod found;
mod memory;
mod module;
mod pool;
mod recording;
mod staging;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_loader::sys::{self, LaunchAttribute, LaunchConfig};
use cuda_loader::{DriverError, check};
use cust::context::{Context, CurrentContext};
use cust::device::DeviceAttribute;
use cust::error::CudaError;
use cust::event::{Event, EventFlags};
use cust::function::{Function, FunctionAttribute};
use cust::memory::{AsyncCopyDestination, DevicePointer, cuda_free, cuda_malloc, mem_get_info};
use cust::module::Module;
use cust::stream::{Stream, StreamWaitEventFlags};

use super::device::{Device, DeviceError, DeviceLimits, Launch, Piece};
use super::device::{check_launch, check_range};
use super::table::{KernelFn, KernelId};
pub use event::CudaEvent;
pub use found::CudaInfo;
use found::{describe, device_attribute, start_driver};
pub use memory::{CudaHost, CudaMemory};
use module::{load_function, load_module};
use pool::{Pool, pool_size};
pub use recording::CudaRecording;
use recording::{Recorder, Turn};
use staging::Staging;

/// A CUDA device.
#[derive(Clone)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

// The fields are dropped in this order: the context last.
struct Inner {
    info: CudaInfo,
    limits: DeviceLimits,
    pool: Mutex<Pool>,
    recorder: Recorder,
    staging: Mutex<Staging>,
    /// Devices whose memory kernels of this one were allowed to use, or not.
    peers: Mutex<BTreeMap<u32, bool>>,
    /// By [`KernelId`]; of `module`, whatever the lifetime says.
    functions: Vec<Function<'static>>,
    /// Launches of several threads go to it in some order.
    stream: Stream,
    /// Of copies beside it.
    copies: Stream,
    /// Of what is recorded aside.
    side: Stream,
    /// Whether what is recorded goes there.
    aside: AtomicBool,
    /// Whether a kernel may start while the one before it runs ([`cuda_std::grid`]): its PTX knows of
    /// it, and the driver.
    overlaps: bool,
    #[expect(dead_code, reason = "owned for the functions")]
    module: Module,
    context: Context,
}

impl Inner {
    fn error(&self, call: impl Into<String>, error: CudaError) -> DeviceError {
        cust_error(&self.info.to_string(), call, error)
    }

    /// Makes the context current in this thread, once no other records, and none does while the turn
    /// lasts.
    fn enter(&self) -> Result<Turn<'_>, DeviceError> {
        let turn = self.recorder.turn();
        let current = CurrentContext::set_current(&self.context);
        current.map_err(|e| self.error("cuCtxSetCurrent", e))?;
        Ok(turn)
    }

    /// The stream that what follows goes to.
    fn current(&self) -> &Stream {
        match self.aside.load(Ordering::Relaxed) {
            true => &self.side,
            false => &self.stream,
        }
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let done = self.stream.synchronize();
        done.map_err(|e| self.error("cuStreamSynchronize", e))
    }

    /// `behind` goes on when what `first` was given so far is done.
    fn order(&self, first: &Stream, behind: &Stream) -> Result<(), DeviceError> {
        let _turn = self.enter()?;
        let event = Event::new(EventFlags::DISABLE_TIMING);
        let event = event.map_err(|e| self.error("cuEventCreate", e))?;
        (event.record(first)).map_err(|e| self.error("cuEventRecord", e))?;
        // The driver keeps the event for as long as somebody waits for it.
        (behind.wait_event(event, StreamWaitEventFlags::DEFAULT))
            .map_err(|e| self.error("cuStreamWaitEvent", e))
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        // What a panic could leave behind is a list without an address that was taken: no harm.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        // What a panic could leave behind is room counted as used: no harm.
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what cannot be recorded.
    fn only_now(&self, operation: &'static str) -> Result<(), DeviceError> {
        match self.pool().records() {
            false => Ok(()),
            true => Err(DeviceError::Recording {
                device: self.info.to_string(),
                operation,
            }),
        }
    }

    /// Gives the pool's memory back to the driver.
    fn trim(&self) -> Result<(), DeviceError> {
        let mut pool = self.pool();
        // Recording began with a wait, and nothing has been done since.
        if !pool.records() {
            self.synchronize()?;
        }
        for address in pool.drain() {
            // SAFETY: allocated by `cuda_malloc`, in nobody's hands, and the stream is done with it.
            unsafe { cuda_free(DevicePointer::<u8>::from_raw(address)) }
                .map_err(|e| self.error("cuMemFree", e))?;
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nothing can be done about failures here: the process is about to lose the device anyway.
        let _turn = self.enter();
        let _ = self.trim();
        self.staging().free();
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

/// The driver's name and description of what `cust` has just returned.
fn described(error: CudaError) -> DriverError {
    check(error as u32).expect_err("an error's code is not 0")
}

fn cust_error(device: &str, call: impl Into<String>, error: CudaError) -> DeviceError {
    driver_error(device, call, described(error))
}

impl CudaDevice {
    /// Devices that the driver knows; 0 without a driver.
    pub fn count() -> u32 {
        start_driver().map_or(0, |()| cust::device::Device::num_devices().unwrap_or(0))
    }

    /// What device `ordinal` is.
    pub fn info(ordinal: u32) -> Result<CudaInfo, DeviceError> {
        Ok(describe(ordinal)?.0)
    }

    /// Opens a device: its primary context, the kernels, a stream.
    pub fn new(ordinal: u32) -> Result<Self, DeviceError> {
        let (info, device) = describe(ordinal)?;
        let name = info.to_string();
        let get = |which| device_attribute(&name, device, which);
        let limits = DeviceLimits {
            sms: get(DeviceAttribute::MultiprocessorCount)?,
            shared_per_block: info.shared_per_block,
            shared_per_sm: get(DeviceAttribute::MaxSharedMemoryPerMultiprocessor)?,
            threads_per_sm: get(DeviceAttribute::MaxThreadsPerMultiprocessor)?,
        };
        let context =
            Context::new(device).map_err(|e| cust_error(&name, "cuDevicePrimaryCtxRetain", e))?;
        CurrentContext::set_current(&context)
            .map_err(|e| cust_error(&name, "cuCtxSetCurrent", e))?;
        let module = load_module(&info)?;
        let stream = non_blocking_stream(&name)?;
        let copies = non_blocking_stream(&name)?;
        let side = non_blocking_stream(&name)?;
        let has_launch_ex = |d: &cuda_loader::Driver| !d.missing().contains(&"cuLaunchKernelEx");
        let overlaps = info.ptx == "sm_90" && cuda_loader::load().is_ok_and(has_launch_ex);
        let mut functions = Vec::with_capacity(KernelId::ALL.len());
        for id in KernelId::ALL {
            let function = load_function(&name, &limits, &module, *id)?;
            // SAFETY: only the lifetime changes. `Inner` owns the module, drops it after the
            // functions, and lends none out for longer than itself.
            functions
                .push(unsafe { std::mem::transmute::<Function<'_>, Function<'static>>(function) });
        }
        Ok(Self {
            inner: Arc::new(Inner {
                info,
                limits,
                pool: Mutex::default(),
                recorder: Recorder::default(),
                staging: Mutex::default(),
                peers: Mutex::default(),
                functions,
                stream,
                copies,
                side,
                aside: AtomicBool::new(false),
                overlaps,
                module,
                context,
            }),
        })
    }

    /// What it is.
    pub fn describe_device(&self) -> &CudaInfo {
        &self.inner.info
    }

    /// Bytes free in the driver and in the pool.
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        let _turn = self.inner.enter()?;
        let pooled = self.inner.pool().bytes();
        let (free, _) = mem_get_info().map_err(|e| self.inner.error("cuMemGetInfo", e))?;
        Ok((free + pooled) as u64)
    }

    /// Registers a thread, bytes of local memory a thread and of static shared memory of a kernel,
    /// as the driver compiled it.
    pub fn kernel_usage(&self, kernel: KernelId) -> Result<(u32, u32, u32), DeviceError> {
        let _turn = self.inner.enter()?;
        let function = &self.inner.functions[kernel as usize];
        let get = |which| match function.get_attribute(which) {
            Ok(value) => Ok(value as u32),
            Err(e) => Err(self.inner.error("cuFuncGetAttribute", e)),
        };
        Ok((
            get(FunctionAttribute::NumRegisters)?,
            get(FunctionAttribute::LocalSizeBytes)?,
            get(FunctionAttribute::SharedMemorySizeBytes)?,
        ))
    }
}

/// A stream that does not wait for the default stream, which `Stream::new` cannot make.
fn non_blocking_stream(name: &str) -> Result<Stream, DeviceError> {
    let mut stream: sys::Stream = null_mut();
    // SAFETY: valid pointer.
    check(unsafe { sys::cuStreamCreate(&raw mut stream, sys::STREAM_NON_BLOCKING) })
        .map_err(|e| driver_error(name, "cuStreamCreate", e))?;
    // SAFETY: `Stream` of the one version of cust that the manifest allows has one field, the handle,
    // which can only lie at its start where the sizes are equal (else this does not compile), and
    // owns it.
    Ok(unsafe { std::mem::transmute::<sys::Stream, Stream>(stream) })
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Event = CudaEvent;
    type Recording = CudaRecording;

    fn describe(&self) -> String {
        self.inner.info.to_string()
    }

    fn limits(&self) -> &DeviceLimits {
        &self.inner.limits
    }

    fn trim(&self) -> Result<(), DeviceError> {
        let _turn = self.inner.enter()?;
        self.inner.trim()
    }

    fn allocate(&self, bytes: usize) -> Result<CudaMemory, DeviceError> {
        let inner = &self.inner;
        let _turn = inner.enter()?;
        let take = pool_size(bytes);
        let pooled = inner.pool().take(take);
        let address = match pooled {
            Some(address) => address,
            None => {
                // SAFETY: what is in it is the caller's to write before it is read.
                let attempt = || unsafe { cuda_malloc::<u8>(take) };
                let mut done = attempt();
                if matches!(done, Err(CudaError::OutOfMemory)) {
                    inner.trim()?;
                    done = attempt();
                }
                match done {
                    Ok(pointer) => pointer.as_raw(),
                    Err(CudaError::OutOfMemory) => {
                        return Err(DeviceError::OutOfMemory {
                            device: inner.info.to_string(),
                            requested: bytes as u64,
                            // Only for the message: 0 where the driver does not tell.
                            free: mem_get_info().map_or(0, |(free, _)| free as u64),
                        });
                    }
                    Err(e) => return Err(inner.error("cuMemAlloc", e)),
                }
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
        let _turn = inner.enter()?;
        // SAFETY: the range lies in live memory, and whatever uses it next does in the same stream.
        unsafe {
            memory
                .range(offset, bytes)
                .set_8_async(value, inner.current())
        }
        .map_err(|e| inner.error("cuMemsetD8Async", e))
    }

    fn copy(
        &self,
        (from, start): (&CudaMemory, usize),
        (to, offset): (&CudaMemory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        check_range("copy", start, bytes, from.size)?;
        check_range("copy", offset, bytes, to.size)?;
        if bytes == 0 {
            return Ok(());
        }
        let inner = &self.inner;
        let _turn = inner.enter()?;
        // SAFETY: both ranges lie in live memory, and whatever uses it next does in the same stream.
        unsafe {
            to.range(offset, bytes)
                .async_copy_from(&from.range(start, bytes), inner.current())
        }
        .map_err(|e| inner.error("cuMemcpyDtoDAsync", e))
    }

    fn upload(&self, memory: &CudaMemory, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        check_range("upload", offset, data.len(), memory.size)?;
        if data.is_empty() {
            return Ok(());
        }
        let inner = &self.inner;
        let _turn = inner.enter()?;
        inner.only_now("an upload")?;
        let mut staging = inner.staging();
        let mut to = memory.range(offset, data.len());
        if data.len() > staging::SMALL {
            let copied = staging.copy(data, &mut to, &inner.stream);
            if copied.map_err(|e| inner.error("cuMemcpyHtoDAsync", e))? {
                return Ok(());
            }
        }
        let pinned = staging.up(data, || inner.synchronize())?;
        // SAFETY: both ranges are live. What was pinned stays as it is until the stream has been waited
        // for; else that is done below.
        unsafe { to.async_copy_from(pinned.unwrap_or(data), &inner.stream) }
            .map_err(|e| inner.error("cuMemcpyHtoDAsync", e))?;
        match pinned {
            Some(_) => Ok(()),
            None => inner.synchronize(),
        }
    }

    fn download(
        &self,
        memory: &CudaMemory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.download_all(&mut [(memory, offset, out)])
    }

    fn download_all(&self, pieces: &mut [Piece<'_, CudaMemory>]) -> Result<(), DeviceError> {
        let mut all = 0usize;
        for (memory, offset, out) in pieces.iter() {
            check_range("download", *offset, out.len(), memory.size)?;
            all = all.saturating_add(out.len());
        }
        if all == 0 {
            return Ok(());
        }
        let inner = &self.inner;
        let _turn = inner.enter()?;
        inner.only_now("a download")?;
        let mut staging = inner.staging();
        let get = |memory: &CudaMemory, offset: usize, to: &mut [u8]| {
            let from = memory.range(offset, to.len());
            // SAFETY: both ranges are live, the host's until the copy is done: waited for below.
            let done = unsafe { from.async_copy_to(to, &inner.stream) };
            done.map_err(|e| inner.error("cuMemcpyDtoHAsync", e))
        };
        let Some(pinned) = staging.down(all) else {
            let mut some = pieces.iter_mut().filter(|p| !p.2.is_empty());
            let done = some.try_for_each(|(memory, offset, out)| get(memory, *offset, out));
            let waited = inner.synchronize();
            return done.and(waited);
        };
        let mut at = 0;
        let mut some = pieces.iter().filter(|p| !p.2.is_empty());
        let done = some.try_for_each(|(memory, offset, out)| {
            let to = &mut pinned[at..at + out.len()];
            at += out.len();
            get(memory, *offset, to)
        });
        let waited = inner.synchronize();
        done.and(waited)?;
        let mut at = 0;
        for (_, _, out) in pieces {
            out.copy_from_slice(&pinned[at..at + out.len()]);
            at += out.len();
        }
        Ok(())
    }

    fn allocate_host(&self, bytes: usize) -> Result<CudaHost, DeviceError> {
        CudaHost::new(&self.inner, bytes)
    }

    fn fork(&self) -> Result<(), DeviceError> {
        self.inner.order(&self.inner.stream, &self.inner.copies)
    }

    unsafe fn copy_beside(
        &self,
        memory: &CudaMemory,
        offset: usize,
        host: &CudaHost,
        bytes: std::ops::Range<usize>,
    ) -> Result<(), DeviceError> {
        let data = &host[bytes];
        check_range("copy", offset, data.len(), memory.size)?;
        if data.is_empty() {
            return Ok(());
        }
        let inner = &self.inner;
        let _turn = inner.enter()?;
        // SAFETY: both ranges are live, and stay so until the copy is done: the caller's promise.
        unsafe {
            memory
                .range(offset, data.len())
                .async_copy_from(data, &inner.copies)
        }
        .map_err(|e| inner.error("cuMemcpyHtoDAsync", e))
    }

    fn copying(&self) -> Result<bool, DeviceError> {
        let inner = &self.inner;
        let _turn = inner.enter()?;
        // SAFETY: a live stream.
        match unsafe { sys::cuStreamQuery(inner.copies.as_inner().cast()) } {
            sys::NOT_READY => Ok(true),
            code => match check(code) {
                Ok(()) => Ok(false),
                Err(e) => Err(driver_error(&inner.info.to_string(), "cuStreamQuery", e)),
            },
        }
    }

    fn join(&self) -> Result<(), DeviceError> {
        self.inner.order(&self.inner.copies, &self.inner.stream)
    }

    fn aside(&self) -> Result<(), DeviceError> {
        let inner = &self.inner;
        if !inner.pool().set_aside() {
            return Ok(());
        }
        inner.order(&inner.stream, &inner.side)?;
        inner.aside.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn back(&self) {
        self.inner.aside.store(false, Ordering::Relaxed);
    }

    fn together(&self) -> Result<(), DeviceError> {
        let inner = &self.inner;
        match inner.pool().together() {
            true => inner.order(&inner.side, &inner.stream),
            false => Ok(()),
        }
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
        let _turn = inner.enter()?;
        let [x, y, z] = launch.grid;
        let mut parameters = [(&raw mut args).cast::<c_void>()];
        let function = inner.functions[K::ID as usize].to_raw().cast();
        let stream = inner.current().as_inner().cast();
        // SAFETY: the function is the kernel's, which takes one argument of type `K::Args` by value
        // (one row of the table gives both); the driver copies it, and the attribute, before it
        // returns. The views in it are the caller's promise.
        check(unsafe {
            if inner.overlaps {
                let config = LaunchConfig {
                    grid: launch.grid,
                    block: [launch.threads, 1, 1],
                    shared_bytes: launch.shared,
                    stream,
                    attributes: &LaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION,
                    attribute_count: 1,
                };
                sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), null_mut())
            } else {
                sys::cuLaunchKernel(
                    function,
                    x,
                    y,
                    z,
                    launch.threads,
                    1,
                    1,
                    launch.shared,
                    stream,
                    parameters.as_mut_ptr(),
                    null_mut(),
                )
            }
        })
        .map_err(|e| {
            let call = format!("cuLaunchKernel({})", K::ID.name());
            driver_error(&inner.info.to_string(), call, e)
        })
    }

    fn event(&self) -> Result<CudaEvent, DeviceError> {
        event::mark(&self.inner)
    }

    fn elapsed(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64, DeviceError> {
        event::elapsed(&self.inner, from, to)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let _turn = self.inner.enter()?;
        self.inner.only_now("a wait")?;
        self.inner.synchronize()
    }

    fn set_word(&self, memory: &CudaMemory, offset: usize, value: u32) -> Result<(), DeviceError> {
        check_range("set", offset, 4, memory.size)?;
        let inner = &self.inner;
        let _turn = inner.enter()?;
        let (address, stream) = (memory.address + offset as u64, inner.current().as_inner());
        // SAFETY: in live memory, and whatever uses it next does in the same stream.
        check(unsafe { sys::cuMemsetD32Async(address, value, 1, stream.cast()) })
            .map_err(|e| driver_error(&inner.info.to_string(), "cuMemsetD32Async", e))
    }

    fn reaches(&self, other: &Self) -> bool {
        let (inner, ordinal) = (&self.inner, other.inner.info.ordinal);
        if inner.info.ordinal == ordinal {
            return true;
        }
        let mut peers = inner.peers.lock().unwrap_or_else(PoisonError::into_inner);
        *peers.entry(ordinal).or_insert_with(|| {
            let reached = allow_access(inner, &other.inner);
            if !reached {
                tracing::warn!(
                    "{} cannot use memory of {}: what they exchange is copied, by way of the host \
                     where the driver has no other",
                    inner.info,
                    other.inner.info
                );
            }
            reached
        })
    }

    fn wait_for(&self, other: &Self) -> Result<(), DeviceError> {
        let (inner, other) = (&self.inner, &other.inner);
        // An event is of the context of the stream that it is recorded in.
        other.order(&other.stream, &inner.stream)
    }

    unsafe fn copy_from(
        &self,
        owner: &Self,
        (from, start): (&CudaMemory, usize),
        (to, offset): (&CudaMemory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        check_range("copy", start, bytes, from.size)?;
        check_range("copy", offset, bytes, to.size)?;
        if bytes == 0 {
            return Ok(());
        }
        let (inner, owner) = (&self.inner, &owner.inner);
        let _turn = inner.enter()?;
        // SAFETY: both ranges lie in live memory of these contexts; order is the caller's promise.
        check(unsafe {
            sys::cuMemcpyPeerAsync(
                to.address + offset as u64,
                inner.context.as_raw().cast(),
                from.address + start as u64,
                owner.context.as_raw().cast(),
                bytes,
                inner.stream.as_inner().cast(),
            )
        })
        .map_err(|e| driver_error(&inner.info.to_string(), "cuMemcpyPeerAsync", e))
    }

    fn begin_recording(devices: &[&Self]) -> Result<bool, DeviceError> {
        let inner: Vec<&Arc<Inner>> = devices.iter().map(|d| &d.inner).collect();
        recording::begin(&inner)
    }

    fn end_recording(devices: &[&Self]) -> Result<CudaRecording, DeviceError> {
        let inner: Vec<&Arc<Inner>> = devices.iter().map(|d| &d.inner).collect();
        recording::end(&inner)
    }

    unsafe fn replay(&self, recording: &CudaRecording) -> Result<(), DeviceError> {
        let _turn = self.inner.enter()?;
        self.inner.only_now("a replay")?;
        // SAFETY: passed on to the caller.
        unsafe { recording::replay(&self.inner, recording) }
    }
}

/// Set to `off`, devices do not use each other's memory, for tests of what is done then.
const PEER_ACCESS: &str = "ANSATZ_PEER_ACCESS";

/// Lets kernels of `inner` use memory of `other`, if the driver does.
fn allow_access(inner: &Inner, other: &Inner) -> bool {
    if std::env::var_os(PEER_ACCESS).is_some_and(|v| v == "off") {
        return false;
    }
    let Ok(_turn) = inner.enter() else {
        return false;
    };
    const ALREADY: u32 = 704;
    // SAFETY: live contexts; this one is current.
    let code = unsafe { sys::cuCtxEnablePeerAccess(other.context.as_raw().cast(), 0) };
    match check(code) {
        Ok(()) => true,
        Err(e) => e.code == ALREADY,
    }
}
