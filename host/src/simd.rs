//! Vector arms of the CPU code: which the processor has, which one is used, and the few operations
//! that algorithms need from them.
//!
//! One algorithm, several arms, in memchr's manner: an algorithm is an `#[inline(always)]` function
//! over `Simd`; `arms!` wraps it once for each arm in a function with that arm's
//! `#[target_feature]`s, into which everything is inlined, and chooses by a [`Level`].

use std::fmt;
use std::str::FromStr;

/// A set of processor features that algorithms are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arm {
    /// What the target always has. On x86-64 that is SSE2: no fused multiply-add, so each one is a
    /// library call, right and slow.
    Baseline,
    /// AVX2, FMA, F16C and BMI: x86-64-v3.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI, on top of [`Arm::Avx2`].
    Avx512,
}

impl Arm {
    /// All, slowest first.
    pub const ALL: [Arm; 3] = [Arm::Baseline, Arm::Avx2, Arm::Avx512];

    /// As the command line and `ANSATZ_CPU` write it.
    pub fn name(self) -> &'static str {
        match self {
            Arm::Baseline => "baseline",
            Arm::Avx2 => "avx2",
            Arm::Avx512 => "avx512",
        }
    }

    /// Whether this processor (and its operating system) has it.
    pub fn supported(self) -> bool {
        match self {
            Arm::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Arm::Avx2 => {
                std::is_x86_feature_detected!("avx2")
                    && std::is_x86_feature_detected!("fma")
                    && std::is_x86_feature_detected!("f16c")
                    && std::is_x86_feature_detected!("bmi1")
                    && std::is_x86_feature_detected!("bmi2")
                    && std::is_x86_feature_detected!("lzcnt")
                    && std::is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Arm::Avx512 => {
                Arm::Avx2.supported()
                    && std::is_x86_feature_detected!("avx512f")
                    && std::is_x86_feature_detected!("avx512bw")
                    && std::is_x86_feature_detected!("avx512dq")
                    && std::is_x86_feature_detected!("avx512vl")
                    && std::is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The fastest that this processor has.
    pub fn best() -> Arm {
        Arm::ALL
            .into_iter()
            .rfind(|arm| arm.supported())
            .unwrap_or(Arm::Baseline)
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arm::Baseline => "baseline",
            Arm::Avx2 => "AVX2",
            Arm::Avx512 => "AVX-512",
        })
    }
}

/// Why an arm cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ArmError {
    /// No arm has this name.
    #[error("unknown CPU arm `{0}`: expected baseline, avx2 or avx512")]
    Unknown(String),
    /// The processor lacks some of its features.
    #[error("this processor has no {0}: unset ANSATZ_CPU to use {best}", best = Arm::best())]
    Unsupported(Arm),
}

impl FromStr for Arm {
    type Err = ArmError;

    fn from_str(s: &str) -> Result<Self, ArmError> {
        Arm::ALL
            .into_iter()
            .find(|arm| arm.name() == s)
            .ok_or_else(|| ArmError::Unknown(s.to_owned()))
    }
}

/// An [`Arm`] that this processor is known to have. Only [`Level::new`] makes one, and unsafe code
/// relies on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Arm);

impl Level {
    /// Checks the processor.
    pub fn new(arm: Arm) -> Result<Self, ArmError> {
        if arm.supported() {
            Ok(Self(arm))
        } else {
            Err(ArmError::Unsupported(arm))
        }
    }

    /// The fastest.
    pub fn best() -> Self {
        Self(Arm::best())
    }

    /// What `ANSATZ_CPU` names, else the fastest.
    pub fn from_env() -> Result<Self, ArmError> {
        match std::env::var("ANSATZ_CPU") {
            Ok(name) if !name.is_empty() => Self::new(name.parse()?),
            _ => Ok(Self::best()),
        }
    }

    /// Which.
    pub fn arm(self) -> Arm {
        self.0
    }
}

/// Defines functions that run an `#[inline(always)]` body `B<S: Simd>` on the arm of a
/// [`Level`](crate::simd::Level), their first argument.
///
/// The body is an `unsafe fn` whose only obligation beyond those of its wrapper's documentation is
/// that the processor has the arm; the level vouches for it.
macro_rules! arms {
    ($($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;)*) => {$(
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function's target features are those of the arm.
                unsafe { $body::<$crate::simd::x86::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $body::<$crate::simd::x86::Avx2>($($arg),*) }
            }
            match level.arm() {
                // SAFETY: a Level exists only for an arm that the processor has.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Arm::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Arm::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the baseline needs no feature.
                _ => unsafe { $body::<$crate::simd::Baseline>($($arg),*) },
            }
        }
    )*};
}

pub(crate) use arms;

/// Bytes of activations for one step of 128 columns; see [`Simd::int4`].
pub(crate) const STEP_BYTES: usize = 256;

/// Columns of a step.
pub(crate) const STEP_COLS: usize = 128;

/// Rows that [`Simd::int4`] takes at once.
pub(crate) const INT4_ROWS: usize = 4;

/// What algorithms need from an arm.
///
/// # Safety
/// Every function needs the processor to have the arm. Pointers must be valid for the vector, or
/// the extent that the function names; no alignment is needed.
pub(crate) trait Simd: Copy {
    /// A vector of f32.
    type V: Copy;
    /// Its length: 8 or 16.
    const W: usize;

    /// All +0.
    unsafe fn zero() -> Self::V;
    /// All `x`.
    unsafe fn splat(x: f32) -> Self::V;
    /// `W` numbers.
    unsafe fn load(p: *const f32) -> Self::V;
    /// `W` bf16 numbers, widened.
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// `W` signed bytes, widened.
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// Stores `W` numbers.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// `a * b + c`, one rounding.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;

    /// [`gpu::arith::reduce`].
    unsafe fn reduce(p: &[f32; 256]) -> f32;

    /// The 256 partial sums of `gpu::arith` of `n` elements of `x` and `w`, for whole vectors: the
    /// last `n mod W` elements are the caller's. `p` is overwritten.
    unsafe fn partials<E: Element>(x: *const f32, w: *const E, n: usize, p: &mut [f32; 256]);

    /// Dot products, modulo 2^32, of the unsigned nibbles of four rows with the activations of `T`
    /// vectors.
    ///
    /// Rows have `cols / 2` bytes, `cols` a multiple of 64. Activations are steps of 128 columns,
    /// [`STEP_BYTES`] each, the last one padded with zeros: 64 bytes each of even columns' high
    /// planes, their low planes, odd columns' high planes, their low planes
    /// (`X = 256 * high + low`).
    unsafe fn int4<const T: usize>(
        rows: [*const u8; INT4_ROWS],
        acts: [*const i8; T],
        cols: usize,
    ) -> [[i32; T]; INT4_ROWS];

    /// As [`Simd::int4`] for one row, one dot product for each 64 columns: `out[t]` takes
    /// `cols / 64` rounded up to a multiple of 16 numbers, of which those past `cols / 64` have no
    /// meaning.
    unsafe fn int4_groups<const T: usize>(
        row: *const u8,
        acts: [*const i8; T],
        cols: usize,
        out: [*mut i32; T],
    );
}

/// What a dense vector may consist of.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// The number as f32.
    fn widen(self) -> f32;
    /// `S::W` of them as f32.
    ///
    /// # Safety
    /// As [`Simd`].
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: as the caller.
        unsafe { S::load(p) }
    }
}

/// bf16.
impl Element for u16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        gpu::arith::bf16(self)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: as the caller.
        unsafe { S::load_bf16(p) }
    }
}

/// Signed bytes.
impl Element for i8 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: as the caller.
        unsafe { S::load_i8(p) }
    }
}

/// [`Simd::partials`] with `ACC` vectors held in registers, so `256 / (W * ACC)` passes.
///
/// # Safety
/// As [`Simd::partials`].
#[inline(always)]
unsafe fn partials<S: Simd, E: Element, const ACC: usize>(
    x: *const f32,
    w: *const E,
    n: usize,
    p: &mut [f32; 256],
) {
    const { assert!(256 % (ACC * 8) == 0) };
    let whole = n / 256;
    let mut at = 0;
    while at < 256 {
        // SAFETY: every load ends at or before element n, every store within p.
        unsafe {
            let mut acc = [S::zero(); ACC];
            for block in 0..whole {
                let k = block * 256 + at;
                for (j, acc) in acc.iter_mut().enumerate() {
                    let k = k + j * S::W;
                    *acc = S::fma(S::load(x.add(k)), E::load::<S>(w.add(k)), *acc);
                }
            }
            for (j, acc) in acc.iter_mut().enumerate() {
                let k = whole * 256 + at + j * S::W;
                if k + S::W <= n {
                    *acc = S::fma(S::load(x.add(k)), E::load::<S>(w.add(k)), *acc);
                }
                S::store(p.as_mut_ptr().add(at + j * S::W), *acc);
            }
        }
        at += ACC * S::W;
    }
}

/// No vectors: arrays of 8.
#[derive(Clone, Copy)]
pub(crate) struct Baseline;

impl Simd for Baseline {
    type V = [f32; 8];
    const W: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> [f32; 8] {
        [0.0; 8]
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 8] {
        // SAFETY: valid for 8 numbers.
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> [f32; 8] {
        // SAFETY: valid for 8 numbers.
        unsafe { p.cast::<[u16; 8]>().read_unaligned() }.map(gpu::arith::bf16)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; 8] {
        // SAFETY: valid for 8 numbers.
        unsafe { p.cast::<[i8; 8]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; 8]) {
        // SAFETY: valid for 8 numbers.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn reduce(p: &[f32; 256]) -> f32 {
        gpu::arith::reduce(p)
    }
    #[inline(always)]
    unsafe fn partials<E: Element>(x: *const f32, w: *const E, n: usize, p: &mut [f32; 256]) {
        // SAFETY: as the caller.
        unsafe { partials::<Self, E, 4>(x, w, n, p) }
    }
    #[inline(always)]
    unsafe fn int4<const T: usize>(
        rows: [*const u8; INT4_ROWS],
        acts: [*const i8; T],
        cols: usize,
    ) -> [[i32; T]; INT4_ROWS] {
        let mut out = [[0i32; T]; INT4_ROWS];
        for (row, out) in rows.iter().zip(&mut out) {
            for half in 0..cols / 64 {
                // SAFETY: half a step, 64 columns, lies within the row and the activations.
                let dots = unsafe { half_step(*row, &acts, half) };
                for (out, dot) in out.iter_mut().zip(dots) {
                    *out = out.wrapping_add(dot);
                }
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn int4_groups<const T: usize>(
        row: *const u8,
        acts: [*const i8; T],
        cols: usize,
        out: [*mut i32; T],
    ) {
        for half in 0..cols / 64 {
            // SAFETY: as above; out takes a number for each 64 columns.
            unsafe {
                let dots = half_step(row, &acts, half);
                for (out, dot) in out.iter().zip(dots) {
                    out.add(half).write(dot);
                }
            }
        }
    }
}

/// Dot products of columns `64 * half ..` of a row.
///
/// # Safety
/// The row has 32 bytes there, the activations a step.
#[inline(always)]
unsafe fn half_step<const T: usize>(
    row: *const u8,
    acts: &[*const i8; T],
    half: usize,
) -> [i32; T] {
    // SAFETY: as the caller; arrays of bytes need no alignment.
    let w = unsafe { &*row.add(half * 32).cast::<[u8; 32]>() };
    acts.map(|act| {
        // SAFETY: as the caller.
        let plane = |i: usize| unsafe {
            &*act
                .add(half / 2 * STEP_BYTES + i * 64 + half % 2 * 32)
                .cast::<[i8; 32]>()
        };
        let (even_hi, even_lo, odd_hi, odd_lo) = (plane(0), plane(1), plane(2), plane(3));
        let mut dot = 0;
        for i in 0..32 {
            let (even, odd) = ((w[i] & 15) as i32, (w[i] >> 4) as i32);
            dot += even * (256 * even_hi[i] as i32 + even_lo[i] as i32)
                + odd * (256 * odd_hi[i] as i32 + odd_lo[i] as i32);
        }
        dot
    })
}

#[cfg(target_arch = "x86_64")]
#[path = "simd_x86.rs"]
pub(crate) mod x86;
