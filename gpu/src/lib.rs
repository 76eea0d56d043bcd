//! Ansatz's kernels, and everything both sides of a launch must agree on.
//!
//! - [`arith`]: the one arithmetic. Every operator has one result to the bit, whoever computes it.
//! - [`launch`]: grid, block and shared memory, and the device properties they follow from.
//! - [`layout`]: how the nibbles of a matrix are dealt to blocks, lanes and lookups.
//! - [`plane3`]: the layout of the codec of that name.
//! - [`rans`]: the codec's step functions and constants.
//!
//! The crate builds for `nvptx64-nvidia-cuda`, where the kernels become PTX, and for the host,
//! where `host` links it: the reference, the emulator and the GPU share this source.

#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]

pub mod abi;
pub mod absorb;
pub mod act;
pub mod add;
pub mod arith;
pub mod attention;
pub mod attention_many;
pub mod attention_merge;
pub mod coded;
pub mod coded_jobs;
pub mod coded_ops;
#[cfg(not(target_arch = "nvptx64"))]
pub mod coded_plan;
pub mod combine;
pub mod decode_plane3;
pub mod decode_rans;
pub mod dense;
pub mod dot;
pub mod embed;
pub mod group;
pub mod index;
pub mod index_128;
pub mod index_select;
pub mod launch;
pub mod layout;
pub mod linear;
pub mod linear_f32;
pub mod linear_int8;
pub mod linear_tile;
pub mod matmul_plane3;
pub mod matmul_rans;
pub mod matmul_rans_mma;
pub mod matmul_rans_tokens;
pub mod matmul_raw;
pub mod matmul_raw_mma;
pub mod matmul_raw_mma_grouped;
pub mod matmul_raw_narrow;
pub mod narrow;
pub mod norm;
pub mod partials;
pub mod plane3;
pub mod position;
pub mod quantise;
pub mod rans;
pub mod replay;
pub mod rope;
pub mod route;
pub mod silu;
