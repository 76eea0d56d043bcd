//! Ansatz: Mixture-of-Experts inference with the routed experts entropy-coded in memory.

pub mod backend;
pub mod codec;
pub mod expert;
