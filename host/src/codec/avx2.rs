//! Lanes as four registers of 8 (AVX2).

use std::arch::x86_64::*;

use gpu::layout::{LANES, Symbol};

use super::lanes::{self, Lanes, Pair, Triple, Window};
use super::{Job, JobError};

struct Avx2;

type V = [__m256i; 4];

/// `EXPAND[m][i]`: for lane `i` the number of lanes of `m` before it, the word that it takes.
static EXPAND: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut m = 0;
    while m < 256 {
        let mut i = 0;
        let mut n = 0;
        while i < 8 {
            table[m][i] = n;
            n += (m >> i & 1) as u8;
            i += 1;
        }
        m += 1;
    }
    table
};

macro_rules! each {
    ($f:expr) => {{
        let f = $f;
        [f(0), f(1), f(2), f(3)]
    }};
}

// SAFETY (whole impl): AVX2 is the caller's promise, see `Lanes`. Loads and stores stay within the
// arrays they are given; `lookup` indices are below the table's length.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Lanes for Avx2 {
    type V = V;
    /// All ones or zeros in each lane.
    type M = V;

    #[inline(always)]
    unsafe fn load(words: &Window) -> V {
        let p = words.as_ptr();
        unsafe { each!(|i: usize| _mm256_loadu_si256(p.add(32 * i).cast())) }
    }
    #[inline(always)]
    unsafe fn store(v: V, words: &mut [u32; LANES]) {
        let p = words.as_mut_ptr();
        unsafe {
            _mm256_storeu_si256(p.cast(), v[0]);
            _mm256_storeu_si256(p.add(8).cast(), v[1]);
            _mm256_storeu_si256(p.add(16).cast(), v[2]);
            _mm256_storeu_si256(p.add(24).cast(), v[3]);
        }
    }
    #[inline(always)]
    unsafe fn splat(x: u32) -> V {
        unsafe { [_mm256_set1_epi32(x as i32); 4] }
    }
    #[inline(always)]
    unsafe fn none() -> V {
        unsafe { [_mm256_setzero_si256(); 4] }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u32], i: V) -> V {
        let t = table.as_ptr().cast();
        unsafe { each!(|k: usize| _mm256_i32gather_epi32::<4>(t, i[k])) }
    }
    #[inline(always)]
    unsafe fn and(a: V, b: V) -> V {
        unsafe { each!(|i: usize| _mm256_and_si256(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn or(a: V, b: V) -> V {
        unsafe { each!(|i: usize| _mm256_or_si256(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        unsafe { each!(|i: usize| _mm256_add_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        unsafe { each!(|i: usize| _mm256_mullo_epi32(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: V) -> V {
        unsafe { each!(|i: usize| _mm256_sll_epi32(a[i], _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: V) -> V {
        unsafe { each!(|i: usize| _mm256_srl_epi32(a[i], _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn less(a: V, b: V) -> V {
        // Signed, which is the same below 2^31.
        unsafe { each!(|i: usize| _mm256_cmpgt_epi32(b[i], a[i])) }
    }
    #[inline(always)]
    unsafe fn select(m: V, a: V, b: V) -> V {
        unsafe { each!(|i: usize| _mm256_blendv_epi8(a[i], b[i], m[i])) }
    }
    #[inline(always)]
    unsafe fn majority(a: V, b: V, c: V) -> V {
        unsafe {
            each!(|i: usize| _mm256_or_si256(
                _mm256_and_si256(a[i], b[i]),
                _mm256_and_si256(_mm256_or_si256(a[i], b[i]), c[i])
            ))
        }
    }
    #[inline(always)]
    unsafe fn parity(a: V, b: V, c: V) -> V {
        unsafe { each!(|i: usize| _mm256_xor_si256(_mm256_xor_si256(a[i], b[i]), c[i])) }
    }
    #[inline(always)]
    unsafe fn expand(m: V, a: V, words: &Window) -> (V, usize) {
        unsafe {
            let bits =
                each!(|i: usize| { _mm256_movemask_ps(_mm256_castsi256_ps(m[i])) as usize & 0xff });
            let n = each!(|i: usize| bits[i].count_ones() as usize);
            // At most 8 each, so that all loads of 32 bytes stay within the 128.
            let at = [0, n[0], n[0] + n[1], n[0] + n[1] + n[2]];
            let lanes = each!(|i: usize| {
                let w = _mm256_loadu_si256(words.as_ptr().add(4 * at[i]).cast());
                let order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(EXPAND[bits[i]].as_ptr().cast()));
                _mm256_blendv_epi8(a[i], _mm256_permutevar8x32_epi32(w, order), m[i])
            });
            (lanes, at[3] + n[3])
        }
    }
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn pair(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    // SAFETY: the caller's promise.
    unsafe { lanes::decode::<Avx2, Pair>(job, out, stride) }
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2,popcnt")]
unsafe fn triple(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    // SAFETY: the caller's promise.
    unsafe { lanes::decode::<Avx2, Triple>(job, out, stride) }
}

/// Decodes where [`super::Arm::Avx2`] is available.
pub(super) fn decode(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    assert!(super::Arm::Avx2.available());
    // SAFETY: just asserted; every processor with AVX2 has popcnt.
    unsafe {
        match job.symbol {
            Symbol::Pair => pair(job, out, stride),
            Symbol::Triple => triple(job, out, stride),
        }
    }
}
