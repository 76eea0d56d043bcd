//! Device library with Rust-CUDA's names: upstream NVPTX back end and a CPU emulator.
