//! Where a launch's tokens are in their sequence.
//!
//! A launch that is recorded once and runs again at other positions reads its position from memory;
//! others have it among their arguments.

use cuda_std::mem::{Global, Slice};

/// `first`, or, where `at` is not empty, the word there plus `first`.
///
/// # Safety
/// `at` must be live, u32 `[1]` or empty.
#[inline(always)]
pub unsafe fn position(at: Slice, first: u32) -> u32 {
    if at.len == 0 {
        return first;
    }
    // SAFETY: the caller's.
    unsafe { Global::<u32>::new(at) }
        .load(0)
        .wrapping_add(first)
}
