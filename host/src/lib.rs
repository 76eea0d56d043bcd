//! Ansatz: Mixture-of-Experts inference with the routed experts entropy-coded in memory.

pub mod archive;
pub mod backend;
pub mod bench;
pub mod chat;
pub mod cli;
pub mod codec;
pub mod convert;
pub mod disk;
pub mod engine;
pub mod eval;
pub mod expert;
mod files;
pub mod generate;
pub mod interrupt;
pub mod model;
pub mod placement;
mod ram;
pub mod sample;
pub mod simd;
pub mod synth;
pub mod tokenizer;
pub mod trace;
mod whole;
