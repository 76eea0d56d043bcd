//! Predicated instruction sequences of the rANS decoder, as LLVM and ptxas do not find them.
//!
//! Written as `if`, each of these becomes a computation into a fresh register and a select; as
//! predicated instructions on the same register the select falls away. `one` is a 1 that the
//! compiler cannot see through: an addition or a move written as a multiplication by it runs on the
//! multiply pipe, where the decoder has room, in place of the ALU, where it has none.

use cuda_std::shared::Shared;

/// If `state < M`: takes the upper 16 bits of `window` into the state, shifts the window and counts
/// 16 bits.
#[inline(always)]
pub fn renormalise_shift<const M: u32>(
    state: &mut u32,
    window: &mut u32,
    count: &mut u32,
    one: u32,
) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: instructions on registers alone.
    unsafe {
        core::arch::asm!(
            "{{ .reg .pred p; setp.lt.u32 p, {x}, {m};",
            "@p shf.l.wrap.b32 {x}, {v}, {x}, 16;",
            "@p mul.lo.u32 {v}, {v}, 65536;",
            "@p mad.lo.u32 {c}, {one}, 16, {c}; }}",
            x = inlateout(reg32) *state, v = inlateout(reg32) *window, c = inlateout(reg32) *count,
            m = const M, one = in(reg32) one, options(pure, nomem, nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "nvptx64"))]
    if *state < M {
        *state = *state << 16 | *window >> 16;
        *window <<= 16;
        *count = one.wrapping_mul(16).wrapping_add(*count);
    }
}

/// As [`renormalise_shift`] for the window's last use: leaves it as it is.
#[inline(always)]
pub fn renormalise<const M: u32>(state: &mut u32, window: u32, count: &mut u32, one: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: instructions on registers alone.
    unsafe {
        core::arch::asm!(
            "{{ .reg .pred p; setp.lt.u32 p, {x}, {m};",
            "@p shf.l.wrap.b32 {x}, {v}, {x}, 16;",
            "@p mad.lo.u32 {c}, {one}, 16, {c}; }}",
            x = inlateout(reg32) *state, v = in(reg32) window, c = inlateout(reg32) *count,
            m = const M, one = in(reg32) one, options(pure, nomem, nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "nvptx64"))]
    if *state < M {
        *state = *state << 16 | window >> 16;
        *count = one.wrapping_mul(16).wrapping_add(*count);
    }
}

/// If `need`: `high = low`, `low` = the word at byte `at` of `memory`.
#[inline(always)]
#[track_caller]
pub fn take_word(
    need: bool,
    memory: Shared<u32>,
    at: u32,
    high: &mut u32,
    low: &mut u32,
    one: u32,
) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: where `need` holds, the word is in bounds by the contract of the view.
    unsafe {
        core::arch::asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {need}, 0;",
            "@p mul.lo.u32 {hi}, {lo}, {one};",
            "@p ld.shared.u32 {lo}, [{a}]; }}",
            hi = inlateout(reg32) *high, lo = inlateout(reg32) *low, one = in(reg32) one,
            need = in(reg32) u32::from(need), a = in(reg32) memory.address() + at,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "nvptx64"))]
    if need {
        *high = low.wrapping_mul(one);
        *low = memory.load_at_byte(at);
    }
}
