//! Ansatz: Mixture-of-Experts inference with the routed experts entropy-coded in memory.

pub mod archive;
pub mod backend;
pub mod bench;
pub mod codec;
pub mod convert;
pub mod expert;
pub mod interrupt;
pub mod model;
pub mod simd;
