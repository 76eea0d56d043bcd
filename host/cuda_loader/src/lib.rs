//! The CUDA driver API bound at run time: trampolines for every function that cust links against.
