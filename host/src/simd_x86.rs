//! The x86-64 arms.

use super::{Element, INT4_ROWS, STEP_BYTES, Simd, partials};
use std::arch::x86_64::*;

/// [`super::Arm::Avx2`]
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// [`super::Arm::Avx512`]
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// Four rows in turn are four streams that the hardware's prefetcher follows badly: the next four are
// asked for in the order of memory meanwhile, which doubled the rate of one thread (9.5 to 18.9
// GB/s, rows of 3 KB, Zen 4). One row is one stream, asked for this many bytes ahead.
const AHEAD: usize = 1024;
const PREFETCH: i32 = _MM_HINT_T1;

/// Pairwise sums of octets `4i .. 4i + 4`.
///
/// # Safety
/// Needs AVX; `p` holds 256 numbers.
#[inline(always)]
unsafe fn four(p: *const f32, i: usize) -> __m128 {
    // SAFETY: as the caller.
    unsafe {
        let p = p.add(32 * i);
        let ab = _mm256_hadd_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
        let cd = _mm256_hadd_ps(_mm256_loadu_ps(p.add(16)), _mm256_loadu_ps(p.add(24)));
        let abcd = _mm256_hadd_ps(ab, cd);
        _mm_add_ps(
            _mm256_castps256_ps128(abcd),
            _mm256_extractf128_ps::<1>(abcd),
        )
    }
}

/// [`gpu::arith::reduce`]: two horizontal additions make four octets' pairwise sums, up to the
/// addition of a register's halves; the butterfly is vertical down to distance 4.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
unsafe fn reduce(p: &[f32; 256]) -> f32 {
    // SAFETY: the caller has AVX; loads stay within p.
    unsafe {
        let p = p.as_ptr();
        let (v0, v1) = (
            _mm_add_ps(four(p, 0), four(p, 4)),
            _mm_add_ps(four(p, 1), four(p, 5)),
        );
        let (v2, v3) = (
            _mm_add_ps(four(p, 2), four(p, 6)),
            _mm_add_ps(four(p, 3), four(p, 7)),
        );
        let v = _mm_add_ps(_mm_add_ps(v0, v2), _mm_add_ps(v1, v3));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

/// Adds the 8 numbers of a register, modulo 2^32.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn sum_epi32(v: __m256i) -> i32 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
        _mm_cvtsi128_si32(v)
    }
}

impl Simd for Avx2 {
    type V = __m256;
    const W: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller has AVX2 and FMA; so below.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: see zero.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: see zero; valid for 8 numbers.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        // SAFETY: see zero; valid for 8 numbers.
        unsafe {
            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        // SAFETY: see zero; valid for 8 numbers.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: see zero; valid for 8 numbers.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see zero.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see zero.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce(p: &[f32; 256]) -> f32 {
        // SAFETY: see zero.
        unsafe { reduce(p) }
    }
    #[inline(always)]
    unsafe fn partials<E: Element>(x: *const f32, w: *const E, n: usize, p: &mut [f32; 256]) {
        // SAFETY: as the caller.
        unsafe { partials::<Self, E, 8>(x, w, n, p) }
    }

    /// Nibbles are at most 15, so two products of `pmaddubsw` and two of its results (even and odd
    /// columns) stay below 15 * 128 * 4 = 7,680 in 16 bits.
    #[inline(always)]
    unsafe fn int4<const T: usize>(
        rows: [*const u8; INT4_ROWS],
        acts: [*const i8; T],
        cols: usize,
    ) -> [[i32; T]; INT4_ROWS] {
        // SAFETY: the caller has AVX2; half steps lie within rows and activations.
        unsafe {
            let mut acc = [[_mm256_setzero_si256(); T]; INT4_ROWS];
            for half in 0..cols / 64 {
                let ahead = rows[0].wrapping_add(INT4_ROWS * (cols / 2 + half * 32));
                _mm_prefetch::<PREFETCH>(ahead.cast());
                _mm_prefetch::<PREFETCH>(ahead.wrapping_add(64).cast());
                for (row, acc) in rows.iter().zip(&mut acc) {
                    let (even, odd) = nibbles256(*row, half);
                    for (acc, act) in acc.iter_mut().zip(acts) {
                        *acc = _mm256_add_epi32(*acc, half_step(even, odd, act, half));
                    }
                }
            }
            let mut out = [[0; T]; INT4_ROWS];
            for (out, acc) in out.iter_mut().zip(acc) {
                for (out, acc) in out.iter_mut().zip(acc) {
                    *out = sum_epi32(acc);
                }
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn int4_groups<const T: usize>(
        row: *const u8,
        acts: [*const i8; T],
        cols: usize,
        out: [*mut i32; T],
    ) {
        // SAFETY: as above; out takes a number for each 64 columns, rounded up to 16.
        unsafe {
            let halves = cols / 64;
            for first in (0..halves).step_by(4) {
                let mut dots = [[_mm256_setzero_si256(); 4]; T];
                for half in first..halves.min(first + 4) {
                    _mm_prefetch::<PREFETCH>(row.wrapping_add(half * 32 + AHEAD).cast());
                    let (even, odd) = nibbles256(row, half);
                    for (dots, act) in dots.iter_mut().zip(acts) {
                        dots[half - first] = half_step(even, odd, act, half);
                    }
                }
                for (d, out) in dots.iter().zip(out) {
                    let ab = _mm256_hadd_epi32(d[0], d[1]);
                    let cd = _mm256_hadd_epi32(d[2], d[3]);
                    let abcd = _mm256_hadd_epi32(ab, cd);
                    let sums = _mm_add_epi32(
                        _mm256_castsi256_si128(abcd),
                        _mm256_extracti128_si256::<1>(abcd),
                    );
                    _mm_storeu_si128(out.add(first).cast(), sums);
                }
            }
        }
    }
}

/// Nibbles of even and odd columns from column `64 * half` on.
///
/// # Safety
/// Needs AVX2; the row has 32 bytes there.
#[inline(always)]
unsafe fn nibbles256(row: *const u8, half: usize) -> (__m256i, __m256i) {
    // SAFETY: as the caller.
    unsafe {
        let nibble = _mm256_set1_epi8(15);
        let w = _mm256_loadu_si256(row.add(half * 32).cast());
        (
            _mm256_and_si256(w, nibble),
            _mm256_and_si256(_mm256_srli_epi16::<4>(w), nibble),
        )
    }
}

/// Eight int32 sums whose total is the dot product of columns `64 * half ..`.
///
/// # Safety
/// Needs AVX2; the activations have a step there.
#[inline(always)]
unsafe fn half_step(even: __m256i, odd: __m256i, act: *const i8, half: usize) -> __m256i {
    // SAFETY: as the caller.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let p = act.add(half / 2 * STEP_BYTES + half % 2 * 32);
        let even_hi = _mm256_loadu_si256(p.cast());
        let even_lo = _mm256_loadu_si256(p.add(64).cast());
        let odd_hi = _mm256_loadu_si256(p.add(128).cast());
        let odd_lo = _mm256_loadu_si256(p.add(192).cast());
        let hi = _mm256_add_epi16(
            _mm256_maddubs_epi16(even, even_hi),
            _mm256_maddubs_epi16(odd, odd_hi),
        );
        let lo = _mm256_add_epi16(
            _mm256_maddubs_epi16(even, even_lo),
            _mm256_maddubs_epi16(odd, odd_lo),
        );
        let hi = _mm256_madd_epi16(hi, ones);
        let lo = _mm256_madd_epi16(lo, ones);
        _mm256_add_epi32(_mm256_slli_epi32::<8>(hi), lo)
    }
}

/// Nibbles of even and odd columns from column `128 * step` on.
///
/// # Safety
/// Needs AVX-512 BW; the row has 64 bytes there, or 32 of a last half step (`HALF`), the rest of
/// which is zeros.
#[inline(always)]
unsafe fn nibbles512<const HALF: bool>(row: *const u8, step: usize) -> (__m512i, __m512i) {
    // SAFETY: as the caller; the masked load reads 32 bytes only.
    unsafe {
        let nibble = _mm512_set1_epi8(15);
        let p = row.add(step * 64);
        let w = if HALF {
            _mm512_maskz_loadu_epi8(0xffff_ffff, p.cast())
        } else {
            _mm512_loadu_si512(p.cast())
        };
        (
            _mm512_and_si512(w, nibble),
            _mm512_and_si512(_mm512_srli_epi16::<4>(w), nibble),
        )
    }
}

/// Adds one step of four rows to the accumulators of both planes.
///
/// # Safety
/// As [`nibbles512`] for every row and [`planes512`] for every vector.
#[inline(always)]
unsafe fn step512<const T: usize, const HALF: bool>(
    hi: &mut [[__m512i; T]; INT4_ROWS],
    lo: &mut [[__m512i; T]; INT4_ROWS],
    rows: [*const u8; INT4_ROWS],
    acts: [*const i8; T],
    step: usize,
) {
    // SAFETY: as the caller.
    unsafe {
        let mut w = [(_mm512_setzero_si512(), _mm512_setzero_si512()); INT4_ROWS];
        for (w, row) in w.iter_mut().zip(rows) {
            *w = nibbles512::<HALF>(row, step);
        }
        for t in 0..T {
            let [even_hi, even_lo, odd_hi, odd_lo] = planes512(acts[t], step);
            for r in 0..INT4_ROWS {
                let (even, odd) = w[r];
                hi[r][t] = _mm512_dpbusd_epi32(hi[r][t], even, even_hi);
                lo[r][t] = _mm512_dpbusd_epi32(lo[r][t], even, even_lo);
                hi[r][t] = _mm512_dpbusd_epi32(hi[r][t], odd, odd_hi);
                lo[r][t] = _mm512_dpbusd_epi32(lo[r][t], odd, odd_lo);
            }
        }
    }
}

/// The four planes of a step: even high, even low, odd high, odd low.
///
/// # Safety
/// Needs AVX-512; the activations have the step.
#[inline(always)]
unsafe fn planes512(act: *const i8, step: usize) -> [__m512i; 4] {
    // SAFETY: as the caller.
    unsafe {
        let p = act.add(step * STEP_BYTES);
        [
            _mm512_loadu_si512(p.cast()),
            _mm512_loadu_si512(p.add(64).cast()),
            _mm512_loadu_si512(p.add(128).cast()),
            _mm512_loadu_si512(p.add(192).cast()),
        ]
    }
}

/// Pairs of steps: `[a b a b]` in each 128-bit lane.
///
/// # Safety
/// Needs AVX-512.
#[inline(always)]
unsafe fn two(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: as the caller.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)) }
}

/// `[a b a b]` and `[c d c d]` become `[a b c d]`.
///
/// # Safety
/// Needs AVX-512.
#[inline(always)]
unsafe fn quad(ab: __m512i, cd: __m512i) -> __m512i {
    // SAFETY: as the caller.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd)) }
}

impl Simd for Avx512 {
    type V = __m512;
    const W: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller has the arm; so below.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: see zero.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: see zero; valid for 16 numbers.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        // SAFETY: see zero; valid for 16 numbers.
        unsafe {
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        // SAFETY: see zero; valid for 16 numbers.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: see zero; valid for 16 numbers.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see zero.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see zero.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce(p: &[f32; 256]) -> f32 {
        // SAFETY: see zero.
        unsafe { reduce(p) }
    }
    #[inline(always)]
    unsafe fn partials<E: Element>(x: *const f32, w: *const E, n: usize, p: &mut [f32; 256]) {
        // SAFETY: as the caller.
        unsafe { partials::<Self, E, 16>(x, w, n, p) }
    }

    /// `vpdpbusd` on each plane; the planes meet once, at the end of the row.
    #[inline(always)]
    unsafe fn int4<const T: usize>(
        rows: [*const u8; INT4_ROWS],
        acts: [*const i8; T],
        cols: usize,
    ) -> [[i32; T]; INT4_ROWS] {
        // SAFETY: the caller has the arm; steps lie within rows and activations.
        unsafe {
            let mut hi = [[_mm512_setzero_si512(); T]; INT4_ROWS];
            let mut lo = hi;
            for step in 0..cols / 128 {
                let ahead = rows[0].wrapping_add(INT4_ROWS * (cols / 2 + step * 64));
                for line in 0..INT4_ROWS {
                    _mm_prefetch::<PREFETCH>(ahead.wrapping_add(line * 64).cast());
                }
                step512::<T, false>(&mut hi, &mut lo, rows, acts, step);
            }
            if !cols.is_multiple_of(128) {
                step512::<T, true>(&mut hi, &mut lo, rows, acts, cols / 128);
            }
            let mut out = [[0; T]; INT4_ROWS];
            for r in 0..INT4_ROWS {
                for t in 0..T {
                    let v = _mm512_add_epi32(_mm512_slli_epi32::<8>(hi[r][t]), lo[r][t]);
                    out[r][t] = sum_epi32(_mm256_add_epi32(
                        _mm512_castsi512_si256(v),
                        _mm512_extracti64x4_epi64::<1>(v),
                    ));
                }
            }
            out
        }
    }

    /// A step holds two groups, one in each half of the register; eight steps' sums are added
    /// across by a tree of unpacks.
    #[inline(always)]
    unsafe fn int4_groups<const T: usize>(
        row: *const u8,
        acts: [*const i8; T],
        cols: usize,
        out: [*mut i32; T],
    ) {
        // SAFETY: as above; out takes a number for each 64 columns, rounded up to 16.
        unsafe {
            let steps = cols.div_ceil(128);
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            for first in (0..steps).step_by(8) {
                let zero = _mm512_setzero_si512();
                let mut sums = [[zero; 8]; T];
                for step in first..steps.min(first + 8) {
                    _mm_prefetch::<PREFETCH>(row.wrapping_add(step * 64 + AHEAD).cast());
                    let (even, odd) = if step < cols / 128 {
                        nibbles512::<false>(row, step)
                    } else {
                        nibbles512::<true>(row, step)
                    };
                    for (sums, act) in sums.iter_mut().zip(acts) {
                        let [even_hi, even_lo, odd_hi, odd_lo] = planes512(act, step);
                        let hi = _mm512_dpbusd_epi32(zero, even, even_hi);
                        let hi = _mm512_dpbusd_epi32(hi, odd, odd_hi);
                        let lo = _mm512_dpbusd_epi32(_mm512_slli_epi32::<8>(hi), even, even_lo);
                        sums[step - first] = _mm512_dpbusd_epi32(lo, odd, odd_lo);
                    }
                }
                for (s, out) in sums.iter().zip(out) {
                    let x = quad(two(s[0], s[1]), two(s[2], s[3]));
                    let y = quad(two(s[4], s[5]), two(s[6], s[7]));
                    // Lanes 0, 1 hold the first group, 2, 3 the second of each step.
                    let z = _mm512_add_epi32(
                        _mm512_shuffle_i64x2::<0b10_00_10_00>(x, y),
                        _mm512_shuffle_i64x2::<0b11_01_11_01>(x, y),
                    );
                    // z: [x first, x second, y first, y second], four steps each.
                    _mm512_storeu_si512(
                        out.add(first * 2).cast(),
                        _mm512_permutexvar_epi32(order, z),
                    );
                }
            }
        }
    }
}
