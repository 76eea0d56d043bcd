//! `host bench`: what kernels cost.

pub mod synth;
