//! Lanes as two registers of 16 (AVX-512 F and BW).

use std::arch::x86_64::*;

use gpu::layout::{LANES, Symbol};

use super::lanes::{self, Lanes, Pair, Triple, Window};
use super::{Job, JobError};

struct Avx512;

type V = [__m512i; 2];
type M = [__mmask16; 2];

// SAFETY (whole impl): AVX-512 F is the caller's promise, see `Lanes`. Loads and stores stay
// within the arrays they are given; `lookup` indices are below the table's length.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Lanes for Avx512 {
    type V = V;
    type M = M;

    #[inline(always)]
    unsafe fn load(words: &Window) -> V {
        unsafe {
            [
                _mm512_loadu_si512(words.as_ptr().cast()),
                _mm512_loadu_si512(words.as_ptr().add(64).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(v: V, words: &mut [u32; LANES]) {
        unsafe {
            _mm512_storeu_si512(words.as_mut_ptr().cast(), v[0]);
            _mm512_storeu_si512(words.as_mut_ptr().add(16).cast(), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat(x: u32) -> V {
        unsafe { [_mm512_set1_epi32(x as i32); 2] }
    }
    #[inline(always)]
    unsafe fn none() -> M {
        [0; 2]
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u32], i: V) -> V {
        let t = table.as_ptr().cast();
        unsafe {
            [
                _mm512_i32gather_epi32::<4>(i[0], t),
                _mm512_i32gather_epi32::<4>(i[1], t),
            ]
        }
    }
    #[inline(always)]
    unsafe fn and(a: V, b: V) -> V {
        unsafe { [_mm512_and_si512(a[0], b[0]), _mm512_and_si512(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn or(a: V, b: V) -> V {
        unsafe { [_mm512_or_si512(a[0], b[0]), _mm512_or_si512(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        unsafe { [_mm512_add_epi32(a[0], b[0]), _mm512_add_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        unsafe {
            [
                _mm512_mullo_epi32(a[0], b[0]),
                _mm512_mullo_epi32(a[1], b[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: V) -> V {
        unsafe { [_mm512_slli_epi32::<N>(a[0]), _mm512_slli_epi32::<N>(a[1])] }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: V) -> V {
        unsafe { [_mm512_srli_epi32::<N>(a[0]), _mm512_srli_epi32::<N>(a[1])] }
    }
    #[inline(always)]
    unsafe fn less(a: V, b: V) -> M {
        unsafe {
            [
                _mm512_cmplt_epu32_mask(a[0], b[0]),
                _mm512_cmplt_epu32_mask(a[1], b[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn select(m: M, a: V, b: V) -> V {
        unsafe {
            [
                _mm512_mask_mov_epi32(a[0], m[0], b[0]),
                _mm512_mask_mov_epi32(a[1], m[1], b[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn majority(a: M, b: M, c: M) -> M {
        let f = |i: usize| a[i] & b[i] | (a[i] | b[i]) & c[i];
        [f(0), f(1)]
    }
    #[inline(always)]
    unsafe fn parity(a: M, b: M, c: M) -> M {
        [a[0] ^ b[0] ^ c[0], a[1] ^ b[1] ^ c[1]]
    }
    #[inline(always)]
    unsafe fn expand(m: M, a: V, words: &Window) -> (V, usize) {
        let first = m[0].count_ones() as usize;
        let all = first + m[1].count_ones() as usize;
        // `first` is at most 16, so that both loads of 64 bytes stay within the 128.
        unsafe {
            let w0 = _mm512_loadu_si512(words.as_ptr().cast());
            let w1 = _mm512_loadu_si512(words.as_ptr().add(4 * first).cast());
            (
                [
                    _mm512_mask_expand_epi32(a[0], m[0], w0),
                    _mm512_mask_expand_epi32(a[1], m[1], w1),
                ],
                all,
            )
        }
    }
}

/// # Safety
/// The processor has AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw,bmi1,bmi2,popcnt")]
unsafe fn pair(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    // SAFETY: the caller's promise.
    unsafe { lanes::decode::<Avx512, Pair>(job, out, stride) }
}

/// # Safety
/// The processor has AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw,bmi1,bmi2,popcnt")]
unsafe fn triple(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    // SAFETY: the caller's promise.
    unsafe { lanes::decode::<Avx512, Triple>(job, out, stride) }
}

/// Decodes where [`super::Arm::Avx512`] is available.
pub(super) fn decode(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    assert!(super::Arm::Avx512.available());
    // SAFETY: just asserted; every processor with AVX-512 has the BMI sets and popcnt.
    unsafe {
        match job.symbol {
            Symbol::Pair => pair(job, out, stride),
            Symbol::Triple => triple(job, out, stride),
        }
    }
}
