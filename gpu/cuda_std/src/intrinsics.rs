//! Single instructions by their PTX names: inline PTX on the device, an emulated body beside each.
//!
//! Semantics are those of the PTX ISA manual, section "Instruction Set"; the tests state them again,
//! plainly, and compare.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

/// Defines functions of registers only.
macro_rules! registers {
    ($(
        $(#[$about:meta])*
        $name:ident $(<const $generic:ident: $kind:ty>)? ($($argument:ident: $type:ty as $class:ident),*)
            -> $result:ty as $result_class:ident = $ptx:literal $(, $operand:ident)?; $emulated:block
    )*) => {$(
        $(#[$about])*
        #[inline(always)]
        #[must_use]
        pub fn $name $(<const $generic: $kind>)? ($($argument: $type),*) -> $result {
            #[cfg(target_arch = "nvptx64")]
            {
                let result: $result;
                // SAFETY: an instruction on registers alone.
                unsafe {
                    asm!($ptx, d = lateout($result_class) result, $($argument = in($class) $argument,)*
                        $($operand = const $generic,)?
                        options(pure, nomem, nostack, preserves_flags));
                }
                result
            }
            #[cfg(not(target_arch = "nvptx64"))]
            $emulated
        }
    )*};
}

/// The two signed 16-bit halves of a word, low half first.
#[cfg(not(target_arch = "nvptx64"))]
fn halves_s(word: u32) -> [i32; 2] {
    [i32::from(word as i16), (word as i32) >> 16]
}

/// The two unsigned 16-bit halves of a word, low half first.
#[cfg(not(target_arch = "nvptx64"))]
fn halves_u(word: u32) -> [i32; 2] {
    [(word & 0xffff) as i32, (word >> 16) as i32]
}

/// The four signed bytes of a word, lowest first.
#[cfg(not(target_arch = "nvptx64"))]
fn bytes_s(word: u32) -> [i32; 4] {
    word.to_le_bytes().map(|byte| i32::from(byte as i8))
}

/// The four unsigned bytes of a word, lowest first.
#[cfg(not(target_arch = "nvptx64"))]
fn bytes_u(word: u32) -> [i32; 4] {
    word.to_le_bytes().map(i32::from)
}

/// c + sum of a\[i] b\[i] modulo 2^32.
#[cfg(not(target_arch = "nvptx64"))]
fn dot(a: &[i32], b: &[i32], c: i32) -> i32 {
    a.iter()
        .zip(b)
        .fold(c, |sum, (x, y)| sum.wrapping_add(x.wrapping_mul(*y)))
}

registers! {
    /// `dp4a.s32.s32`: c + the dot product of four s8 of a and four s8 of b, modulo 2^32.
    dp4a_s32_s32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp4a.s32.s32 {d}, {a}, {b}, {c};"; { dot(&bytes_s(a), &bytes_s(b), c) }
    /// `dp4a.s32.u32`: c + the dot product of four s8 of a and four u8 of b, modulo 2^32.
    dp4a_s32_u32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp4a.s32.u32 {d}, {a}, {b}, {c};"; { dot(&bytes_s(a), &bytes_u(b), c) }
    /// `dp4a.u32.s32`: c + the dot product of four u8 of a and four s8 of b, modulo 2^32.
    dp4a_u32_s32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp4a.u32.s32 {d}, {a}, {b}, {c};"; { dot(&bytes_u(a), &bytes_s(b), c) }
    /// `dp4a.u32.u32`: c + the dot product of four u8 of a and four u8 of b, modulo 2^32.
    dp4a_u32_u32(a: u32 as reg32, b: u32 as reg32, c: u32 as reg32) -> u32 as reg32
        = "dp4a.u32.u32 {d}, {a}, {b}, {c};"; { dot(&bytes_u(a), &bytes_u(b), c as i32) as u32 }

    /// `dp2a.lo.s32.s32`: c + the dot product of two s16 of a and s8 0, 1 of b, modulo 2^32.
    dp2a_lo_s32_s32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp2a.lo.s32.s32 {d}, {a}, {b}, {c};"; { dot(&halves_s(a), &bytes_s(b)[..2], c) }
    /// `dp2a.hi.s32.s32`: c + the dot product of two s16 of a and s8 2, 3 of b, modulo 2^32.
    dp2a_hi_s32_s32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp2a.hi.s32.s32 {d}, {a}, {b}, {c};"; { dot(&halves_s(a), &bytes_s(b)[2..], c) }
    /// `dp2a.lo.s32.u32`: c + the dot product of two s16 of a and u8 0, 1 of b, modulo 2^32.
    dp2a_lo_s32_u32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp2a.lo.s32.u32 {d}, {a}, {b}, {c};"; { dot(&halves_s(a), &bytes_u(b)[..2], c) }
    /// `dp2a.hi.s32.u32`: c + the dot product of two s16 of a and u8 2, 3 of b, modulo 2^32.
    dp2a_hi_s32_u32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp2a.hi.s32.u32 {d}, {a}, {b}, {c};"; { dot(&halves_s(a), &bytes_u(b)[2..], c) }
    /// `dp2a.lo.u32.s32`: c + the dot product of two u16 of a and s8 0, 1 of b, modulo 2^32.
    dp2a_lo_u32_s32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp2a.lo.u32.s32 {d}, {a}, {b}, {c};"; { dot(&halves_u(a), &bytes_s(b)[..2], c) }
    /// `dp2a.hi.u32.s32`: c + the dot product of two u16 of a and s8 2, 3 of b, modulo 2^32.
    dp2a_hi_u32_s32(a: u32 as reg32, b: u32 as reg32, c: i32 as reg32) -> i32 as reg32
        = "dp2a.hi.u32.s32 {d}, {a}, {b}, {c};"; { dot(&halves_u(a), &bytes_s(b)[2..], c) }
    /// `dp2a.lo.u32.u32`: c + the dot product of two u16 of a and u8 0, 1 of b, modulo 2^32.
    dp2a_lo_u32_u32(a: u32 as reg32, b: u32 as reg32, c: u32 as reg32) -> u32 as reg32
        = "dp2a.lo.u32.u32 {d}, {a}, {b}, {c};"; { dot(&halves_u(a), &bytes_u(b)[..2], c as i32) as u32 }
    /// `dp2a.hi.u32.u32`: c + the dot product of two u16 of a and u8 2, 3 of b, modulo 2^32.
    dp2a_hi_u32_u32(a: u32 as reg32, b: u32 as reg32, c: u32 as reg32) -> u32 as reg32
        = "dp2a.hi.u32.u32 {d}, {a}, {b}, {c};"; { dot(&halves_u(a), &bytes_u(b)[2..], c as i32) as u32 }

    /// `prmt.b32`: byte i of the result is byte `s & 7` of the eight bytes b:a (a's are 0 to 3), where
    /// s is nibble i of the selector; where bit 3 of s is set, that byte's sign bit fills the byte.
    prmt(a: u32 as reg32, b: u32 as reg32, selector: u32 as reg32) -> u32 as reg32
        = "prmt.b32 {d}, {a}, {b}, {selector};"; {
        let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
        u32::from_le_bytes(core::array::from_fn(|i| {
            let nibble = selector >> (4 * i);
            let byte = bytes[(nibble & 7) as usize];
            if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        }))
    }
    /// `lop3.b32`: any function of three bits, bit by bit; bit (4a + 2b + c) of LUT is its value.
    lop3<const LUT: u32>(a: u32 as reg32, b: u32 as reg32, c: u32 as reg32) -> u32 as reg32
        = "lop3.b32 {d}, {a}, {b}, {c}, {lut};", lut; {
        (0..8).filter(|i| LUT >> i & 1 == 1).fold(0, |result, i: u32| {
            let term = |word: u32, bit: u32| if i >> bit & 1 == 1 { word } else { !word };
            result | (term(a, 2) & term(b, 1) & term(c, 0))
        })
    }
    /// Bits of a where the mask is 1, bits of b where it is 0 (one `lop3`).
    bitselect(mask: u32 as reg32, a: u32 as reg32, b: u32 as reg32) -> u32 as reg32
        = "lop3.b32 {d}, {mask}, {a}, {b}, 0xca;"; { (a & mask) | (b & !mask) }
    /// `shf.l.wrap.b32`: high word of (high:low) << (shift mod 32).
    shf_l_wrap(low: u32 as reg32, high: u32 as reg32, shift: u32 as reg32) -> u32 as reg32
        = "shf.l.wrap.b32 {d}, {low}, {high}, {shift};"; {
        (((u64::from(high) << 32 | u64::from(low)) << (shift & 31)) >> 32) as u32
    }
    /// `shf.r.wrap.b32`: low word of (high:low) >> (shift mod 32).
    shf_r_wrap(low: u32 as reg32, high: u32 as reg32, shift: u32 as reg32) -> u32 as reg32
        = "shf.r.wrap.b32 {d}, {low}, {high}, {shift};"; {
        ((u64::from(high) << 32 | u64::from(low)) >> (shift & 31)) as u32
    }
    /// `shf.l.clamp.b32`: high word of (high:low) << min(shift, 32).
    shf_l_clamp(low: u32 as reg32, high: u32 as reg32, shift: u32 as reg32) -> u32 as reg32
        = "shf.l.clamp.b32 {d}, {low}, {high}, {shift};"; {
        (((u64::from(high) << 32 | u64::from(low)) << shift.min(32)) >> 32) as u32
    }
    /// `shf.r.clamp.b32`: low word of (high:low) >> min(shift, 32).
    shf_r_clamp(low: u32 as reg32, high: u32 as reg32, shift: u32 as reg32) -> u32 as reg32
        = "shf.r.clamp.b32 {d}, {low}, {high}, {shift};"; {
        ((u64::from(high) << 32 | u64::from(low)) >> shift.min(32)) as u32
    }
    /// `mad.lo.u32`: a b + c modulo 2^32, which LLVM does not see through. With an [`opaque`] 1 for b
    /// an addition or a move runs on the multiply pipe instead of the ALU.
    mad_lo(a: u32 as reg32, b: u32 as reg32, c: u32 as reg32) -> u32 as reg32
        = "mad.lo.u32 {d}, {a}, {b}, {c};"; { a.wrapping_mul(b).wrapping_add(c) }
    /// `mul24.lo.u32`: the low 24 bits of a times those of b, modulo 2^32.
    mul24_lo(a: u32 as reg32, b: u32 as reg32) -> u32 as reg32
        = "mul24.lo.u32 {d}, {a}, {b};"; { (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff) }
    /// `bfe.u32`: `length` bits of a from bit `start` (both taken modulo 256), zeros above.
    bfe_u32(a: u32 as reg32, start: u32 as reg32, length: u32 as reg32) -> u32 as reg32
        = "bfe.u32 {d}, {a}, {start}, {length};"; {
        let (start, length) = (start & 255, length & 255);
        let shifted = a.checked_shr(start).unwrap_or(0);
        if length >= 32 { shifted } else { shifted & ((1 << length) - 1) }
    }
    /// `mov.b32` of a pair: low half and high half to one word.
    pack_u16x2(low: u16 as reg16, high: u16 as reg16) -> u32 as reg32
        = "mov.b32 {d}, {{{low}, {high}}};"; { u32::from(low) | u32::from(high) << 16 }
    /// The value itself, which the compiler knows nothing about afterwards.
    opaque(value: u32 as reg32) -> u32 as reg32 = "mov.b32 {d}, {value};"; { core::hint::black_box(value) }

    /// `fma.rn.f32`: a b + c, rounded once.
    fma_f32(a: f32 as reg32, b: f32 as reg32, c: f32 as reg32) -> f32 as reg32
        = "fma.rn.f32 {d}, {a}, {b}, {c};"; { a.mul_add(b, c) }
    /// `fma.rn.f64`: a b + c, rounded once.
    fma_f64(a: f64 as reg64, b: f64 as reg64, c: f64 as reg64) -> f64 as reg64
        = "fma.rn.f64 {d}, {a}, {b}, {c};"; { a.mul_add(b, c) }
    /// `div.rn.f32`: IEEE division.
    div_rn(a: f32 as reg32, b: f32 as reg32) -> f32 as reg32 = "div.rn.f32 {d}, {a}, {b};"; { a / b }
    /// `sqrt.rn.f32`: IEEE square root.
    sqrt_rn(a: f32 as reg32) -> f32 as reg32 = "sqrt.rn.f32 {d}, {a};"; { a.sqrt() }
    /// `sqrt.rn.f64`: IEEE square root.
    sqrt_rn_f64(a: f64 as reg64) -> f64 as reg64 = "sqrt.rn.f64 {d}, {a};"; { a.sqrt() }
    /// `cvt.rni.f32.f32`: to the nearest integer, ties to even, as f32.
    rint(a: f32 as reg32) -> f32 as reg32 = "cvt.rni.f32.f32 {d}, {a};"; { a.round_ties_even() }
    /// `cvt.rni.f64.f64`: to the nearest integer, ties to even, as f64.
    rint_f64(a: f64 as reg64) -> f64 as reg64 = "cvt.rni.f64.f64 {d}, {a};"; { a.round_ties_even() }
    /// `cvt.rni.s32.f32`: to the nearest integer, ties to even; saturates; NaN gives 0.
    rint_i32(a: f32 as reg32) -> i32 as reg32 = "cvt.rni.s32.f32 {d}, {a};"; { a.round_ties_even() as i32 }
    /// `cvt.rmi.f32.f32`: the largest integer not above a, as f32.
    floor(a: f32 as reg32) -> f32 as reg32 = "cvt.rmi.f32.f32 {d}, {a};"; { a.floor() }
    /// `max.f32`: the larger; where one is NaN, the other.
    max_f32(a: f32 as reg32, b: f32 as reg32) -> f32 as reg32 = "max.f32 {d}, {a}, {b};"; {
        if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
    }
    /// `min.f32`: the smaller; where one is NaN, the other.
    min_f32(a: f32 as reg32, b: f32 as reg32) -> f32 as reg32 = "min.f32 {d}, {a}, {b};"; {
        if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
    }
}

/// Defines int8 matrix products of a warp.
macro_rules! mma {
    ($($(#[$about:meta])* $name:ident = $ptx:literal, $b:ident;)*) => {$(
        $(#[$about])*
        #[inline(always)]
        #[track_caller]
        #[must_use]
        pub fn $name(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
            #[cfg(target_arch = "nvptx64")]
            {
                let mut d = c;
                // SAFETY: an instruction on registers alone; all live lanes call it. Not `pure`,
                // so that it is not moved to where fewer do.
                unsafe {
                    asm!(concat!("mma.sync.aligned.m16n8k32.row.col.s32.", $ptx, ".s32 \
                        {{{d0}, {d1}, {d2}, {d3}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, \
                        {{{d0}, {d1}, {d2}, {d3}}};"),
                        d0 = inlateout(reg32) d[0], d1 = inlateout(reg32) d[1],
                        d2 = inlateout(reg32) d[2], d3 = inlateout(reg32) d[3],
                        a0 = in(reg32) a[0], a1 = in(reg32) a[1],
                        a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b0 = in(reg32) b[0], b1 = in(reg32) b[1],
                        options(nomem, nostack, preserves_flags));
                }
                d
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                let lane = crate::warp::lane_id();
                let (row, column) = (lane / 4, lane % 4 * 2);
                let mut d = c;
                for step in 0..4 {
                    let a = a.map(|a| crate::warp::shuffle_idx_u32(a, 4 * row + step));
                    for j in 0..2 {
                        let from = 4 * (column + j) + step;
                        let b = b.map(|b| crate::warp::shuffle_idx_u32(b, from));
                        for half in 0..2 {
                            let d = &mut d[2 * half + j as usize];
                            *d = dot(&bytes_u(a[half]), &$b(b[0]), *d);
                            *d = dot(&bytes_u(a[half + 2]), &$b(b[1]), *d);
                        }
                    }
                }
                d
            }
        }
    )*};
}

mma! {
    /// `mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32`: c + a b modulo 2^32, a of 16 by 32 u8, b of
    /// 32 by 8 s8. With l = 4g + t the lane, byte i of word w of a is row g + 8 (w mod 2), column
    /// 16 (w / 2) + 4t + i; of b row 16w + 4t + i, column g; word w of c is row g + 8 (w / 2),
    /// column 2t + w mod 2. A warp operation.
    mma_u8_s8 = "u8.s8", bytes_s;
    /// As [`mma_u8_s8`], b of u8.
    mma_u8_u8 = "u8.u8", bytes_u;
}

/// `popc.b32`: number of ones.
#[inline(always)]
#[must_use]
pub fn popc(a: u32) -> u32 {
    a.count_ones()
}

/// `clz.b32`: number of zeros above the highest one; 32 for 0.
#[inline(always)]
#[must_use]
pub fn clz(a: u32) -> u32 {
    a.leading_zeros()
}

/// `mul.hi.u32`: the high word of the 64-bit product.
#[inline(always)]
#[must_use]
pub fn mul_hi(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

/// The low and high half of a word, in that order.
#[inline(always)]
#[must_use]
pub fn unpack_u16x2(word: u32) -> (u16, u16) {
    (word as u16, (word >> 16) as u16)
}

/// Bits 0 to l-1 set, l being the caller's lane (`%lanemask_lt`).
#[inline(always)]
#[must_use]
pub fn lanemask_lt() -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let mask: u32;
        // SAFETY: reads a special register.
        unsafe {
            asm!("mov.u32 {m}, %lanemask_lt;", m = lateout(reg32) mask,
                options(pure, nomem, nostack, preserves_flags));
        }
        mask
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        (1 << crate::warp::lane_id()) - 1
    }
}

#[cfg(all(test, not(target_arch = "nvptx64")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Word with the given bytes, lowest first.
    fn word(bytes: [u8; 4]) -> u32 {
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn dp4a_by_hand() {
        let (a, b) = (word([1, 2, 3, 0x80]), word([0xff, 4, 0, 2]));
        assert_eq!(dp4a_s32_s32(a, b, 10), 10 - 1 + 8 - 256);
        assert_eq!(dp4a_s32_u32(a, b, 10), 10 + 255 + 8 - 256);
        assert_eq!(dp4a_u32_s32(a, b, 10), 10 - 1 + 8 + 256);
        assert_eq!(dp4a_u32_u32(a, b, 10), 10 + 255 + 8 + 256);
        assert_eq!(dp4a_u32_u32(a, b, u32::MAX), 255 + 8 + 256 - 1);
    }

    #[test]
    fn dp2a_by_hand() {
        let (a, b) = (0xfffe_0003u32, word([0xff, 5, 7, 0x81]));
        assert_eq!(dp2a_lo_s32_s32(a, b, 0), -3 - 2 * 5);
        assert_eq!(dp2a_hi_s32_s32(a, b, 0), 3 * 7 - 2 * -127);
        assert_eq!(dp2a_lo_s32_u32(a, b, 0), 3 * 255 - 2 * 5);
        assert_eq!(dp2a_hi_s32_u32(a, b, 0), 3 * 7 - 2 * 129);
        assert_eq!(dp2a_lo_u32_s32(a, b, 0), -3 + 0xfffe * 5);
        assert_eq!(dp2a_hi_u32_s32(a, b, 0), 3 * 7 + 0xfffe * -127);
        assert_eq!(dp2a_lo_u32_u32(a, b, 0), 3 * 255 + 0xfffe * 5);
        assert_eq!(dp2a_hi_u32_u32(a, b, 0), 3 * 7 + 0xfffe * 129);
    }

    #[test]
    fn rans_step_is_one_dp2a() {
        // f x' + b, with f and b the low bytes of the entry and x' below 2^16.
        let (f, b, x) = (201u32, 17u32, 0xbeefu32);
        assert_eq!(
            dp2a_lo_u32_u32(x + 0x10000, f | b << 8 | 0xabcd_0000, 0),
            f * x + b
        );
    }

    #[test]
    fn prmt_by_hand() {
        let (a, b) = (0x8322_1100, 0x7766_5544);
        assert_eq!(prmt(a, b, 0x3210), a);
        assert_eq!(prmt(a, b, 0x7654), b);
        assert_eq!(prmt(a, b, 0x7632), 0x7766_8322);
        assert_eq!(prmt(a, b, 0xb8b0), 0xff00_ff00);
    }

    #[test]
    fn rounding_and_saturation() {
        for (x, expected) in [
            (0.5, 0),
            (1.5, 2),
            (2.5, 2),
            (-0.5, 0),
            (-1.5, -2),
            (1e20, i32::MAX),
            (-1e20, i32::MIN),
        ] {
            assert_eq!(rint_i32(x), expected, "{x}");
        }
        assert_eq!(rint_i32(f32::NAN), 0);
        assert_eq!(rint(8_388_607.5), 8_388_608.0);
        assert_eq!(rint(-0.25).to_bits(), (-0.0f32).to_bits());
        assert_eq!(rint_f64(2.5), 2.0);
        assert_eq!(floor(-0.5), -1.0);
        assert_eq!(max_f32(f32::NAN, 1.0), 1.0);
        assert_eq!(min_f32(1.0, f32::NAN), 1.0);
        assert_eq!(max_f32(-0.0, 0.0).to_bits(), 0);
        assert_eq!(min_f32(0.0, -0.0).to_bits(), (-0.0f32).to_bits());
        // (1 + u)^2 - 1 - 2u = u^2 only where the product is not rounded.
        let u = f32::EPSILON;
        assert_eq!(fma_f32(1.0 + u, 1.0 + u, -1.0 - 2.0 * u), u * u);
        let u = f64::EPSILON;
        assert_eq!(fma_f64(1.0 + u, 1.0 + u, -1.0 - 2.0 * u), u * u);
        assert_eq!(div_rn(1.0, 3.0), 1.0 / 3.0);
        assert_eq!(sqrt_rn(2.0), core::f32::consts::SQRT_2);
        assert_eq!(sqrt_rn_f64(2.0), core::f64::consts::SQRT_2);
    }

    proptest! {
        #[test]
        fn dot_products(a: u32, b: u32, c: i32) {
            // The manual's statement: d = c, then for each i: d += Va[i] * Vb[i].
            let byte = |x: u32, i: u32, signed: bool| {
                let value = i64::from(x >> (8 * i) & 255);
                if signed && value >= 128 { value - 256 } else { value }
            };
            let half = |x: u32, i: u32, signed: bool| {
                let value = i64::from(x >> (16 * i) & 0xffff);
                if signed && value >= 32768 { value - 65536 } else { value }
            };
            let dp4a = |s, t| (0..4).fold(i64::from(c), |d, i| d + byte(a, i, s) * byte(b, i, t)) as u32;
            let dp2a = |s, t, from| (0..2).fold(i64::from(c), |d, i| d + half(a, i, s) * byte(b, from + i, t)) as u32;
            prop_assert_eq!(dp4a_s32_s32(a, b, c) as u32, dp4a(true, true));
            prop_assert_eq!(dp4a_s32_u32(a, b, c) as u32, dp4a(true, false));
            prop_assert_eq!(dp4a_u32_s32(a, b, c) as u32, dp4a(false, true));
            prop_assert_eq!(dp4a_u32_u32(a, b, c as u32), dp4a(false, false));
            prop_assert_eq!(dp2a_lo_s32_s32(a, b, c) as u32, dp2a(true, true, 0));
            prop_assert_eq!(dp2a_hi_s32_s32(a, b, c) as u32, dp2a(true, true, 2));
            prop_assert_eq!(dp2a_lo_s32_u32(a, b, c) as u32, dp2a(true, false, 0));
            prop_assert_eq!(dp2a_hi_s32_u32(a, b, c) as u32, dp2a(true, false, 2));
            prop_assert_eq!(dp2a_lo_u32_s32(a, b, c) as u32, dp2a(false, true, 0));
            prop_assert_eq!(dp2a_hi_u32_s32(a, b, c) as u32, dp2a(false, true, 2));
            prop_assert_eq!(dp2a_lo_u32_u32(a, b, c as u32), dp2a(false, false, 0));
            prop_assert_eq!(dp2a_hi_u32_u32(a, b, c as u32), dp2a(false, false, 2));
        }

        #[test]
        fn bits(a: u32, b: u32, c: u32, shift in 0u32..80, length in 0u32..80) {
            prop_assert_eq!(lop3::<0x96>(a, b, c), a ^ b ^ c);
            prop_assert_eq!(lop3::<0xe8>(a, b, c), (a & b) | (b & c) | (a & c));
            prop_assert_eq!(lop3::<0xca>(a, b, c), bitselect(a, b, c));
            prop_assert_eq!(lop3::<0xf0>(a, b, c), a);
            prop_assert_eq!(lop3::<0x02>(a, b, c), !a & !b & c);
            for i in 0..32 {
                let expected = if a >> i & 1 == 1 { b } else { c } >> i & 1;
                prop_assert_eq!(bitselect(a, b, c) >> i & 1, expected);
            }
            let n = shift % 32;
            prop_assert_eq!(shf_l_wrap(a, b, shift), if n == 0 { b } else { b << n | a >> (32 - n) });
            prop_assert_eq!(shf_r_wrap(a, b, shift), if n == 0 { a } else { a >> n | b << (32 - n) });
            let n = shift.min(32);
            prop_assert_eq!(shf_l_clamp(a, b, shift), match n { 0 => b, 32 => a, _ => b << n | a >> (32 - n) });
            prop_assert_eq!(shf_r_clamp(a, b, shift), match n { 0 => a, 32 => b, _ => a >> n | b << (32 - n) });
            let field = (0..length.min(32)).filter(|i| shift + i < 32 && a >> (shift + i) & 1 == 1);
            prop_assert_eq!(bfe_u32(a, shift, length), field.fold(0, |sum, i| sum | 1 << i));
            prop_assert_eq!(mad_lo(a, b, c), (u64::from(a) * u64::from(b) + u64::from(c)) as u32);
            prop_assert_eq!(mul24_lo(a, b), (u64::from(a % (1 << 24)) * u64::from(b % (1 << 24))) as u32);
            prop_assert_eq!(mul_hi(a, b), ((u128::from(a) * u128::from(b)) >> 32) as u32);
            prop_assert_eq!(pack_u16x2(a as u16, b as u16), a % 65536 + (b % 65536) * 65536);
            prop_assert_eq!(unpack_u16x2(a), ((a % 65536) as u16, (a / 65536) as u16));
            prop_assert_eq!(opaque(a), a);
            prop_assert_eq!(popc(a), (0..32).map(|i| a >> i & 1).sum::<u32>());
            prop_assert_eq!(clz(a), (0..32).rev().take_while(|i| a >> i & 1 == 0).count() as u32);
        }

        #[test]
        fn permute(a: u32, b: u32, selector: u32) {
            let result = prmt(a, b, selector);
            for i in 0..4 {
                let s = selector >> (4 * i) & 15;
                let source = if s & 4 == 0 { a } else { b } >> (8 * (s & 3)) & 255;
                let expected = match (s & 8, source >> 7) { (0, _) => source, (_, 0) => 0, _ => 255 };
                prop_assert_eq!(result >> (8 * i) & 255, expected);
            }
        }
    }
}
