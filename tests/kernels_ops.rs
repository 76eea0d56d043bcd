//! Every operator of every back end against the reference, bit for bit: the CPU, the kernels on the
//! emulator, and the kernels on CUDA where there is a driver (`ANSATZ_REQUIRE_CUDA` makes its
//! absence a failure).

mod suite;

suite! {
    cpu = host::backend::cpu::Cpu::new();
    emulator = crate::suite::emulator();
    cuda = crate::suite::cuda();
}
