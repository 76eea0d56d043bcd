//! Driver functions with plain integer results, to be passed to [`check`](crate::check): the ones that
//! an engine calls, of which `cust` covers many. Arguments are those of the CUDA Driver API manual. Handles are pointers the
//! driver owns; a device address is a `u64`.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `CUresult`.
pub type Code = u32;
/// `CUdevice`: ordinal handle.
pub type Device = c_int;
/// `CUdeviceptr`: device address.
pub type DevicePtr = u64;
/// `CUcontext`.
pub type Context = *mut c_void;
/// `CUmodule`.
pub type Module = *mut c_void;
/// `CUfunction`.
pub type Function = *mut c_void;
/// `CUstream`; null is the default stream.
pub type Stream = *mut c_void;
/// `CUevent`.
pub type Event = *mut c_void;
/// `CUgraph`.
pub type Graph = *mut c_void;
/// `CUgraphExec`.
pub type GraphExec = *mut c_void;

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [c_uint; 3],
    /// Threads of a block.
    pub block: [c_uint; 3],
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: c_uint,
    /// Where.
    pub stream: Stream,
    /// `attribute_count` of them.
    pub attributes: *const LaunchAttribute,
    /// How many.
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    /// `CUlaunchAttributeID`.
    pub id: c_uint,
    /// Zero.
    pub padding: [u8; 4],
    /// `CUlaunchAttributeValue`, a union of 64 bytes, here of integers.
    pub value: [u64; 8],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`, on: the kernel may start before those
    /// ahead of it on the stream are done.
    pub const PROGRAMMATIC_STREAM_SERIALIZATION: Self = Self {
        id: 6,
        padding: [0; 4],
        value: [1, 0, 0, 0, 0, 0, 0, 0],
    };
}

/// `CUdevice_attribute` values.
pub mod device_attribute {
    /// Threads in a block, at most.
    pub const MAX_THREADS_PER_BLOCK: i32 = 1;
    /// Shared memory of a block without opting in, bytes.
    pub const MAX_SHARED_MEMORY_PER_BLOCK: i32 = 8;
    /// Lanes in a warp.
    pub const WARP_SIZE: i32 = 10;
    /// Core clock, kHz.
    pub const CLOCK_RATE: i32 = 13;
    /// Multiprocessors.
    pub const MULTIPROCESSOR_COUNT: i32 = 16;
    /// Whether several processes may use the device.
    pub const COMPUTE_MODE: i32 = 20;
    /// Whether the device shares the host's memory.
    pub const INTEGRATED: i32 = 18;
    /// Whether host memory can be mapped.
    pub const CAN_MAP_HOST_MEMORY: i32 = 19;
    /// Memory clock, kHz.
    pub const MEMORY_CLOCK_RATE: i32 = 36;
    /// Memory bus width, bits.
    pub const GLOBAL_MEMORY_BUS_WIDTH: i32 = 37;
    /// L2 cache, bytes.
    pub const L2_CACHE_SIZE: i32 = 38;
    /// Threads on a multiprocessor, at most.
    pub const MAX_THREADS_PER_MULTIPROCESSOR: i32 = 39;
    /// Engines that copy asynchronously.
    pub const ASYNC_ENGINE_COUNT: i32 = 40;
    /// Whether addresses are shared with the host.
    pub const UNIFIED_ADDRESSING: i32 = 41;
    /// Compute capability, major.
    pub const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
    /// Compute capability, minor.
    pub const COMPUTE_CAPABILITY_MINOR: i32 = 76;
    /// Shared memory of a multiprocessor, bytes.
    pub const MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: i32 = 81;
    /// Registers of a multiprocessor.
    pub const MAX_REGISTERS_PER_MULTIPROCESSOR: i32 = 82;
    /// Shared memory of a block that opts in, bytes.
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: i32 = 97;
    /// Shared memory that the driver takes of each block, bytes.
    pub const RESERVED_SHARED_MEMORY_PER_BLOCK: i32 = 111;
}

/// `CUfunction_attribute` values.
pub mod function_attribute {
    /// Threads in a block, at most.
    pub const MAX_THREADS_PER_BLOCK: i32 = 0;
    /// Fixed shared memory, bytes.
    pub const SHARED_SIZE_BYTES: i32 = 1;
    /// Local memory of a thread, bytes.
    pub const LOCAL_SIZE_BYTES: i32 = 3;
    /// Registers of a thread.
    pub const NUM_REGS: i32 = 4;
    /// PTX version, 10 times major plus minor.
    pub const PTX_VERSION: i32 = 5;
    /// Dynamic shared memory of a launch, at most, bytes. To set before a launch with over 48 KiB.
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: i32 = 8;
    /// Share of the L1 cache to use as shared memory, percent.
    pub const PREFERRED_SHARED_MEMORY_CARVEOUT: i32 = 9;
}

/// `CUjit_option` values, for [`cuModuleLoadDataEx`].
pub mod jit_option {
    /// Buffer for the compiler's messages.
    pub const INFO_LOG_BUFFER: i32 = 3;
    /// Its size in; bytes used out.
    pub const INFO_LOG_BUFFER_SIZE_BYTES: i32 = 4;
    /// Buffer for the compiler's errors.
    pub const ERROR_LOG_BUFFER: i32 = 5;
    /// Its size in; bytes used out.
    pub const ERROR_LOG_BUFFER_SIZE_BYTES: i32 = 6;
    /// Whether messages are verbose.
    pub const LOG_VERBOSE: i32 = 12;
}

/// `CUstream_flags`: does not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `CUevent_flags`: for timing.
pub const EVENT_DEFAULT: c_uint = 0;
/// `CUevent_flags`: a wait does not spin.
pub const EVENT_BLOCKING_SYNC: c_uint = 1;
/// `CUevent_flags`: not for timing.
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_EVENT_RECORD_EXTERNAL`: of a stream that is captured, an event of each launch of the graph.
pub const EVENT_RECORD_EXTERNAL: c_uint = 1;
/// `CUDA_ERROR_NOT_READY`: what was asked about is under way.
pub const NOT_READY: Code = 600;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
pub const HOST_ALLOC_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`: the same of memory that is registered.
pub const HOST_REGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: mapped for the device.
pub const HOST_ALLOC_DEVICE_MAP: c_uint = 2;
/// `CU_MEMHOSTALLOC_WRITECOMBINED`: quick to copy from, slow to read on the host.
pub const HOST_ALLOC_WRITE_COMBINED: c_uint = 4;
/// `CUstreamCaptureMode`: forbids this thread what would break a capture.
pub const CAPTURE_THREAD_LOCAL: c_int = 1;
/// `CUstreamCaptureMode`: any call is allowed while a stream is captured.
pub const CAPTURE_RELAXED: c_int = 2;
/// `CUctx_flags`: a wait blocks instead of spinning.
pub const CONTEXT_BLOCKING_SYNC: c_uint = 4;

#[allow(missing_docs, reason = "documented in the CUDA Driver API manual")]
#[allow(
    clashing_extern_declarations,
    reason = "the trampolines have no signature"
)]
unsafe extern "C" {
    pub fn cuInit(flags: c_uint) -> Code;
    pub fn cuDriverGetVersion(version: *mut c_int) -> Code;
    pub fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code;
    pub fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code;

    pub fn cuDeviceGetCount(count: *mut c_int) -> Code;
    pub fn cuDeviceGet(device: *mut Device, ordinal: c_int) -> Code;
    pub fn cuDeviceGetName(name: *mut c_char, len: c_int, device: Device) -> Code;
    pub fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: Device) -> Code;
    pub fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: Device) -> Code;
    pub fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) -> Code;
    pub fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: Device) -> Code;
    pub fn cuDeviceCanAccessPeer(possible: *mut c_int, device: Device, peer: Device) -> Code;

    pub fn cuDevicePrimaryCtxRetain(context: *mut Context, device: Device) -> Code;
    pub fn cuDevicePrimaryCtxRelease_v2(device: Device) -> Code;
    pub fn cuDevicePrimaryCtxSetFlags_v2(device: Device, flags: c_uint) -> Code;
    pub fn cuCtxSetCurrent(context: Context) -> Code;
    pub fn cuCtxGetCurrent(context: *mut Context) -> Code;
    pub fn cuCtxPushCurrent_v2(context: Context) -> Code;
    pub fn cuCtxPopCurrent_v2(context: *mut Context) -> Code;
    pub fn cuCtxSynchronize() -> Code;
    pub fn cuCtxEnablePeerAccess(peer: Context, flags: c_uint) -> Code;
    pub fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> Code;

    pub fn cuModuleLoadDataEx(
        module: *mut Module,
        image: *const c_void,
        options: c_uint,
        option: *mut c_int,
        value: *mut *mut c_void,
    ) -> Code;
    pub fn cuModuleUnload(module: Module) -> Code;
    pub fn cuModuleGetFunction(
        function: *mut Function,
        module: Module,
        name: *const c_char,
    ) -> Code;
    pub fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Function) -> Code;
    pub fn cuFuncSetAttribute(function: Function, attribute: c_int, value: c_int) -> Code;
    pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: Function,
        threads: c_int,
        dynamic_shared_bytes: usize,
    ) -> Code;
    pub fn cuLaunchKernel(
        function: Function,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        dynamic_shared_bytes: c_uint,
        stream: Stream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Code;

    pub fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: Function,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Code;

    pub fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code;
    pub fn cuMemAlloc_v2(address: *mut DevicePtr, bytes: usize) -> Code;
    pub fn cuMemFree_v2(address: DevicePtr) -> Code;
    pub fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code;
    pub fn cuMemFreeHost(address: *mut c_void) -> Code;
    pub fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) -> Code;
    pub fn cuMemHostUnregister(address: *mut c_void) -> Code;
    pub fn cuMemHostGetDevicePointer_v2(
        device: *mut DevicePtr,
        host: *mut c_void,
        flags: c_uint,
    ) -> Code;
    pub fn cuMemcpyHtoD_v2(to: DevicePtr, from: *const c_void, bytes: usize) -> Code;
    pub fn cuMemcpyDtoH_v2(to: *mut c_void, from: DevicePtr, bytes: usize) -> Code;
    pub fn cuMemcpyDtoD_v2(to: DevicePtr, from: DevicePtr, bytes: usize) -> Code;
    pub fn cuMemcpyHtoDAsync_v2(
        to: DevicePtr,
        from: *const c_void,
        bytes: usize,
        stream: Stream,
    ) -> Code;
    pub fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> Code;
    pub fn cuMemcpyDtoDAsync_v2(
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> Code;
    pub fn cuMemcpyPeerAsync(
        to: DevicePtr,
        to_context: Context,
        from: DevicePtr,
        from_context: Context,
        bytes: usize,
        stream: Stream,
    ) -> Code;
    pub fn cuMemsetD8_v2(address: DevicePtr, value: u8, bytes: usize) -> Code;
    pub fn cuMemsetD8Async(address: DevicePtr, value: u8, bytes: usize, stream: Stream) -> Code;
    pub fn cuMemsetD32Async(
        address: DevicePtr,
        value: c_uint,
        words: usize,
        stream: Stream,
    ) -> Code;

    pub fn cuStreamCreate(stream: *mut Stream, flags: c_uint) -> Code;
    pub fn cuStreamCreateWithPriority(stream: *mut Stream, flags: c_uint, priority: c_int) -> Code;
    pub fn cuStreamDestroy_v2(stream: Stream) -> Code;
    pub fn cuStreamSynchronize(stream: Stream) -> Code;
    pub fn cuStreamQuery(stream: Stream) -> Code;
    pub fn cuStreamWaitEvent(stream: Stream, event: Event, flags: c_uint) -> Code;
    pub fn cuLaunchHostFunc(
        stream: Stream,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Code;
    pub fn cuStreamBeginCapture_v2(stream: Stream, mode: c_int) -> Code;
    pub fn cuStreamEndCapture(stream: Stream, graph: *mut Graph) -> Code;
    pub fn cuGraphInstantiateWithFlags(exec: *mut GraphExec, graph: Graph, flags: u64) -> Code;
    pub fn cuGraphLaunch(exec: GraphExec, stream: Stream) -> Code;
    pub fn cuGraphExecDestroy(exec: GraphExec) -> Code;
    pub fn cuGraphDestroy(graph: Graph) -> Code;

    pub fn cuEventCreate(event: *mut Event, flags: c_uint) -> Code;
    pub fn cuEventDestroy_v2(event: Event) -> Code;
    pub fn cuEventRecord(event: Event, stream: Stream) -> Code;
    pub fn cuEventRecordWithFlags(event: Event, stream: Stream, flags: c_uint) -> Code;
    pub fn cuEventSynchronize(event: Event) -> Code;
    pub fn cuEventQuery(event: Event) -> Code;
    pub fn cuEventElapsedTime(milliseconds: *mut f32, start: Event, end: Event) -> Code;
}
