//! Stands in for the crate of that name so that cust builds without a CUDA toolkit.

/// Does nothing: the driver is bound at run time by `cuda_loader`.
pub fn include_cuda() {}
