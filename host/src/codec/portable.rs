//! Lanes as arrays, for any processor.

use gpu::layout::{LANES, Symbol};

use super::lanes::{self, Lanes, Pair, Triple, Window};
use super::{Job, JobError};

struct Portable;

type Array = [u32; LANES];

#[inline(always)]
fn map(a: Array, b: Array, f: impl Fn(u32, u32) -> u32) -> Array {
    let mut out = a;
    for (o, b) in out.iter_mut().zip(b) {
        *o = f(*o, b);
    }
    out
}

// SAFETY: no features needed, and every method is safe for all arguments.
unsafe impl Lanes for Portable {
    type V = Array;
    /// All ones or zeros in each lane.
    type M = Array;

    #[inline(always)]
    unsafe fn load(words: &Window) -> Array {
        let mut v = [0; LANES];
        for (v, w) in v.iter_mut().zip(words.as_chunks::<4>().0) {
            *v = u32::from_le_bytes(*w);
        }
        v
    }
    #[inline(always)]
    unsafe fn store(v: Array, words: &mut [u32; LANES]) {
        *words = v;
    }
    #[inline(always)]
    unsafe fn splat(x: u32) -> Array {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn none() -> Array {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u32], i: Array) -> Array {
        let mut v = i;
        for v in &mut v {
            *v = table[*v as usize];
        }
        v
    }
    #[inline(always)]
    unsafe fn and(a: Array, b: Array) -> Array {
        map(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn or(a: Array, b: Array) -> Array {
        map(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn add(a: Array, b: Array) -> Array {
        map(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn mul(a: Array, b: Array) -> Array {
        map(a, b, u32::wrapping_mul)
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Array) -> Array {
        map(a, a, |a, _| a << N)
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Array) -> Array {
        map(a, a, |a, _| a >> N)
    }
    #[inline(always)]
    unsafe fn less(a: Array, b: Array) -> Array {
        map(a, b, |a, b| if a < b { u32::MAX } else { 0 })
    }
    #[inline(always)]
    unsafe fn select(m: Array, a: Array, b: Array) -> Array {
        let mut out = a;
        for ((o, b), m) in out.iter_mut().zip(b).zip(m) {
            *o = *o & !m | b & m;
        }
        out
    }
    #[inline(always)]
    unsafe fn majority(a: Array, b: Array, c: Array) -> Array {
        let mut out = a;
        for ((o, b), c) in out.iter_mut().zip(b).zip(c) {
            *o = *o & b | *o & c | b & c;
        }
        out
    }
    #[inline(always)]
    unsafe fn parity(a: Array, b: Array, c: Array) -> Array {
        map(map(a, b, |a, b| a ^ b), c, |a, b| a ^ b)
    }
    #[inline(always)]
    unsafe fn expand(m: Array, a: Array, words: &Window) -> (Array, usize) {
        let mut out = a;
        let mut at = 0usize;
        let (words, _) = words.as_chunks::<4>();
        for (o, m) in out.iter_mut().zip(m) {
            let word = u32::from_le_bytes(words[at & (LANES - 1)]);
            *o = *o & !m | word & m;
            at += (m & 1) as usize;
        }
        (out, at)
    }
}

pub(super) fn decode(job: &Job<'_>, out: &mut [u8], stride: usize) -> Result<(), JobError> {
    // SAFETY: the portable arm needs no features.
    unsafe {
        match job.symbol {
            Symbol::Pair => lanes::decode::<Portable, Pair>(job, out, stride),
            Symbol::Triple => lanes::decode::<Portable, Triple>(job, out, stride),
        }
    }
}
