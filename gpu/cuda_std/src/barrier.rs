//! A barrier in shared memory whose two halves are apart: a warp arrives, goes on, and waits later
//! (`mbarrier`).

use crate::shared::Shared;
use crate::{thread, warp};

/// A barrier of some of a block's warps.
///
/// Emulator: [`wait`](Self::wait) is a block barrier, so all threads of the block must come to it equally
/// often, and what one does between arriving and waiting counts as done before.
#[derive(Clone, Copy)]
pub struct Barrier {
    #[cfg(target_arch = "nvptx64")]
    address: u32,
    /// Of the phase that is waited for next, in bit 0.
    parity: u32,
}

impl Barrier {
    /// The barrier of `warps` warps in two words of shared memory, of which the first is at an even index.
    /// All its warps call it; they may arrive after a block barrier behind it.
    #[inline(always)]
    #[must_use]
    pub fn new(shared: &Shared<u32>, word: u32, warps: u32) -> Self {
        #[cfg(target_arch = "nvptx64")]
        {
            let address = shared.address() + word * 4;
            if thread::thread_idx_x() % (warps * 32) == 0 {
                // SAFETY: in bounds and aligned by the contract of the view; nobody uses it yet.
                unsafe {
                    core::arch::asm!("mbarrier.init.shared.b64 [{a}], {n};",
                        a = in(reg32) address, n = in(reg32) warps * 32,
                        options(nostack, preserves_flags));
                }
            }
            Self { address, parity: 0 }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            // Its two words are there.
            let _ = (shared.at(word + 1), thread::thread_idx_x() / warps);
            Self { parity: 0 }
        }
    }

    /// The warp arrives, each of its lanes: what they did before is seen by whoever has waited for it. A
    /// warp operation.
    #[inline(always)]
    #[track_caller]
    pub fn arrive(&self) {
        warp::sync_warp();
        #[cfg(target_arch = "nvptx64")]
        // One lane for all of a warp would do, and takes as long; but the sanitizer's racecheck then does
        // not see what orders the others.
        // SAFETY: in bounds and aligned by the contract of `new`.
        unsafe {
            core::arch::asm!("{{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [{a}]; }}",
                a = in(reg32) self.address, options(nostack, preserves_flags));
        }
    }

    /// Waits until all warps have arrived once more. Between two waits each arrives once.
    #[inline(always)]
    #[track_caller]
    pub fn wait(&mut self) {
        #[cfg(target_arch = "nvptx64")]
        loop {
            let done: u32;
            // SAFETY: as above. `cuda_builder` makes it `test_wait` before sm_90.
            unsafe {
                core::arch::asm!(
                    "{{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [{a}], {s};",
                    "selp.u32 {d}, 1, 0, p; }}",
                    a = in(reg32) self.address, s = in(reg32) self.parity, d = lateout(reg32) done,
                    options(nostack, preserves_flags));
            }
            if done != 0 {
                break;
            }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        thread::sync_threads();
        self.parity ^= 1;
    }
}
