//! Launches that overlap with the one before (programmatic dependent launch).
//!
//! A kernel launched with the attribute may start when all blocks of the kernel before it have called
//! [`launch_dependents()`] or have ended. Kernels call that at once, those without a prologue right behind
//! their [`wait()`]. Until [`wait()`] has returned a kernel must not write to memory, nor read what kernels
//! before it write, but for what was written before the nearest one of them that has no prologue: that one
//! has waited for it. Without the attribute, on devices before compute capability 9.0 (where `cuda_builder`
//! leaves both out) and in the emulator, launches do not overlap and both do nothing.

/// Waits until the kernels before are done and their writes are seen. To be called by every thread, also one
/// that has nothing to do: a kernel that ends is taken as a sign that those before it have.
#[inline(always)]
pub fn wait() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no operands; a barrier for memory operations, which the compiler must keep in place.
    unsafe {
        core::arch::asm!("griddepcontrol.wait;", options(nostack, preserves_flags));
    }
}

/// Lets the next kernel start once all blocks have called this.
#[inline(always)]
pub fn launch_dependents() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: no operands.
    unsafe {
        core::arch::asm!(
            "griddepcontrol.launch_dependents;",
            options(nostack, preserves_flags)
        );
    }
}
