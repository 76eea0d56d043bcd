//! Builds a crate to PTX with the nvptx64 compiler found on the machine (Rust-CUDA's CudaBuilder interface).
