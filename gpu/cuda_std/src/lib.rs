//! Device library with Rust-CUDA's names, in two back ends chosen by the target:
//!
//! - `nvptx64`: upstream Rust's NVPTX back end, LLVM intrinsics and inline PTX;
//! - everywhere else: a CPU emulator ([`emulator`]) that runs the same kernel source with each CUDA
//!   thread a coroutine, and checks what a GPU does not: bounds, alignment, uninitialised reads,
//!   shared-memory races, missing barriers, divergent warp operations.
//!
//! A kernel is written once:
//!
//! ```
//! use bytemuck::{Pod, Zeroable};
//! use cuda_std::mem::{Global, GlobalMut, Slice};
//! use cuda_std::{kernel, thread};
//!
//! #[repr(C)]
//! #[derive(Clone, Copy, Pod, Zeroable)]
//! pub struct DoubleArgs {
//!     input: Slice,
//!     output: Slice,
//! }
//!
//! /// output\[i] = 2 input\[i], one thread an element.
//! ///
//! /// # Safety
//! /// `input` and `output` are live `f32` arrays of one length, not overlapping.
//! #[kernel(threads = 256)]
//! pub unsafe fn double(args: DoubleArgs) {
//!     // SAFETY: the caller's promise; every index below is less than `input.len()`.
//!     let (input, output) = unsafe { (Global::<f32>::new(args.input), GlobalMut::<f32>::new(args.output)) };
//!     let i = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
//!     if u64::from(i) < input.len() {
//!         output.store(i, 2.0 * input.load(i));
//!     }
//! }
//!
//! # #[cfg(not(target_arch = "nvptx64"))] {
//! use cuda_std::emulator::{Grid, Memory, launch};
//! let input = Memory::from_slice(&[1.0f32, 2.0, 3.0]);
//! let output = Memory::<f32>::uninit(3);
//! let args = DoubleArgs { input: input.slice(), output: output.slice() };
//! // SAFETY: both arrays are live and of one length.
//! let stats = launch(double::INFO.name, Grid::x(1), 256, 0, || unsafe { double(args) }).unwrap();
//! assert_eq!(output.to_vec(), [2.0, 4.0, 6.0]);
//! assert_eq!(stats.threads, 256);
//! # }
//! ```
//!
//! # Rules of the device side
//! - No panics: a bounds check or an `unwrap` on the device leaves a call to `core::panicking`, which
//!   `cuda_builder` refuses. Views ([`mem::Global`], [`shared::Shared`]) do not check on the device;
//!   the emulator checks every access.
//! - Functions that contain a barrier or a warp operation are `#[inline(always)]`.
//! - Warp operations are full-mask: all live lanes of the warp call them, from one place.
#![cfg_attr(
    target_arch = "nvptx64",
    no_std,
    feature(stdarch_nvptx, asm_experimental_arch, link_llvm_intrinsics),
    allow(internal_features)
)]

pub mod barrier;
#[cfg(target_arch = "nvptx64")]
pub(crate) mod device;
#[cfg(not(target_arch = "nvptx64"))]
pub mod emulator;
pub mod grid;
pub mod intrinsics;
pub mod mem;
pub mod shared;
pub mod thread;
pub mod warp;

pub use cuda_std_macros::kernel;

/// Entry name and launch bounds of a kernel, made by [`kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Name of the PTX entry.
    pub name: &'static str,
    /// Most threads a block may have (`.maxntid`), 0 where the kernel sets no bound.
    pub threads: u32,
    /// Blocks that shall fit a multiprocessor (`.minnctapersm`), 0 where the kernel sets no bound.
    pub min_blocks: u32,
}

/// Refuses, when compiled, a kernel argument that is no plain data. Used by [`kernel`].
#[doc(hidden)]
pub const fn assert_kernel_argument<T: bytemuck::Pod>() {
    assert!(
        size_of::<T>() <= 4096,
        "kernel arguments are at most 4096 bytes"
    );
    assert!(
        align_of::<T>() <= 16,
        "kernel arguments are aligned to at most 16 bytes"
    );
}

/// Leaves the launch bounds in the PTX as a comment, which `cuda_builder` turns into directives.
/// Used by [`kernel`].
#[doc(hidden)]
#[inline(always)]
#[cfg(target_arch = "nvptx64")]
pub fn launch_bounds<const THREADS: u32, const MIN_BLOCKS: u32>() {
    // SAFETY: a comment.
    unsafe {
        core::arch::asm!(
            "// cuda_std.bounds {t} {b}", t = const THREADS, b = const MIN_BLOCKS,
            options(nomem, nostack, preserves_flags)
        );
    }
}
