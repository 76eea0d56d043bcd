//! The operators' cases, for every back end: what a back end computes equals what the reference
//! computes, bit for bit. No tolerance anywhere.
//!
//! [`suite!`] makes a module of tests for each back end it is given. `ANSATZ_SEED` repeats a run.

#![allow(dead_code)] // Each test binary uses a part.

pub mod experts;
mod nibbles;
pub mod ops;
mod sample;

use std::sync::OnceLock;

use host::backend::kernels::{CudaDevice, EmulatedDevice, KernelBackend, KernelError};
use host::backend::reference::Reference;
use host::backend::{Backend, LoadExperts, Rows, RowsMut, Weight};
pub use nibbles::Rng;

/// The kernels on the emulator.
pub fn emulator() -> Result<KernelBackend<EmulatedDevice>, KernelError> {
    KernelBackend::new(EmulatedDevice::default())
}

/// The kernels on the first CUDA device, opened once; an error where there is none.
///
/// # Panics
/// If there is a device but it does not open, or none but `ANSATZ_REQUIRE_CUDA` is set.
pub fn cuda() -> Result<KernelBackend<CudaDevice>, &'static str> {
    static DEVICE: OnceLock<Option<CudaDevice>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        if CudaDevice::count() == 0 && std::env::var_os("ANSATZ_REQUIRE_CUDA").is_none() {
            return None;
        }
        Some(CudaDevice::new(0).unwrap())
    });
    match device {
        Some(device) => Ok(KernelBackend::new(device.clone()).unwrap()),
        None => Err("no CUDA device"),
    }
}

impl Rng {
    /// Roughly normal (a sum of four uniform numbers), standard deviation 1.15.
    pub fn normal(&mut self) -> f32 {
        let mut x = 0.0;
        for _ in 0..4 {
            x += self.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0;
        }
        x
    }

    /// The same; now and then a zero of either sign, a large or a denormal number.
    pub fn f32(&mut self) -> f32 {
        match self.below(64) {
            0 => 0.0,
            1 => -0.0,
            2 => 3e4,
            3 => -1e-39,
            _ => self.normal(),
        }
    }

    pub fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }

    pub fn bf16s(&mut self, n: usize) -> Vec<u16> {
        (0..n)
            .map(|_| (self.f32().to_bits() >> 16) as u16)
            .collect()
    }
}

/// Dense weights of a case.
#[derive(Clone)]
pub enum Dense {
    Bf16(Vec<u16>),
    Int8(Vec<i8>, Vec<f32>),
    F32(Vec<f32>),
}

/// The same on a back end.
pub enum Held<B: Backend> {
    Bf16(B::Buf<u16>),
    Int8(B::Buf<i8>, B::Buf<f32>),
    F32(B::Buf<f32>),
}

impl Dense {
    /// Of all kinds.
    pub fn all(rng: &mut Rng, rows: usize, cols: usize) -> [Self; 3] {
        let bytes = (0..rows * cols).map(|_| rng.below(256) as u8 as i8);
        let bytes = bytes.collect();
        [
            Self::Bf16(rng.bf16s(rows * cols)),
            Self::Int8(bytes, rng.f32s(rows)),
            Self::F32(rng.f32s(rows * cols)),
        ]
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Self::Bf16(_) => "bf16",
            Self::Int8(..) => "int8",
            Self::F32(_) => "f32",
        }
    }

    pub fn upload<B: Backend>(&self, b: &B) -> Result<Held<B>, B::Error> {
        Ok(match self {
            Self::Bf16(bits) => Held::Bf16(b.upload(bits)?),
            Self::Int8(bytes, scales) => Held::Int8(b.upload(bytes)?, b.upload(scales)?),
            Self::F32(numbers) => Held::F32(b.upload(numbers)?),
        })
    }
}

impl<B: Backend> Held<B> {
    pub fn weight(&self) -> Weight<'_, B> {
        match self {
            Self::Bf16(bits) => Weight::Bf16(bits),
            Self::Int8(bytes, scales) => Weight::Int8 { bytes, scales },
            Self::F32(numbers) => Weight::F32(numbers),
        }
    }
}

/// Where the rows of a view are: ragged ones catch offsets that are dropped, aligned ones take the
/// kernels' vector paths.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub offset: usize,
    pub stride: usize,
}

impl At {
    /// Rows of `cols` elements and a gap.
    pub fn new(cols: usize, aligned: bool) -> Self {
        if aligned {
            Self {
                offset: 4,
                stride: cols.next_multiple_of(4) + 4,
            }
        } else {
            Self {
                offset: 3,
                stride: cols + 2,
            }
        }
    }

    /// Elements of a buffer for `tokens` rows.
    pub fn len(&self, tokens: usize) -> usize {
        self.offset + tokens * self.stride
    }
}

pub fn rows<B>(buf: &B, at: At) -> Rows<'_, B> {
    Rows {
        buf,
        offset: at.offset,
        stride: at.stride,
    }
}

pub fn rows_mut<B>(buf: &mut B, at: At) -> RowsMut<'_, B> {
    RowsMut {
        moves: false,
        buf,
        offset: at.offset,
        stride: at.stride,
    }
}

/// Runs an operator on a back end: inputs are uploaded, `out` starts as given and is read back.
pub trait Case {
    fn run<B: LoadExperts>(&self, b: &B, out: &mut B::Buf<f32>) -> Result<(), B::Error>;
    /// Length of `out`.
    fn len(&self) -> usize;
}

fn output<B: LoadExperts>(b: &B, what: &str, case: &impl Case) -> Vec<u32> {
    let start: Vec<f32> = (0..case.len()).map(|i| i as f32 * 0.37 - 5.0).collect();
    let mut out = b.upload(&start).unwrap();
    if let Err(error) = case.run(b, &mut out) {
        panic!("{what} on {}: {error}", b.describe());
    }
    let mut read = vec![0.0; case.len()];
    b.read(&out, 0, &mut read).unwrap();
    read.into_iter().map(f32::to_bits).collect()
}

/// Compares a back end with the reference: all of `out`, gaps between rows too.
pub fn check<B: LoadExperts>(what: &str, b: &B, case: &impl Case) {
    if sample::passed_over() {
        return;
    }
    let (want, got) = (output(&Reference, what, case), output(b, what, case));
    let differ = want.iter().zip(&got).position(|(a, b)| a != b);
    if let Some(i) = differ {
        panic!(
            "{what} on {}: element {i} of {}: {} ({:#x}) expected, {} ({:#x}) found",
            b.describe(),
            want.len(),
            f32::from_bits(want[i]),
            want[i],
            f32::from_bits(got[i]),
            got[i],
        );
    }
}

/// A case from a closure over the back end, which needs a macro: closures are not generic.
#[macro_export]
macro_rules! case {
    ($backend:expr, $what:expr, $len:expr, [$($name:ident: $ty:ty),*], |$b:ident, $out:ident| $body:expr) => {{
        struct This { len: usize, $($name: $ty),* }
        impl $crate::suite::Case for This {
            fn run<B: host::backend::LoadExperts>(
                &self, $b: &B, $out: &mut B::Buf<f32>,
            ) -> Result<(), B::Error> {
                let This { len: _, $($name),* } = self;
                $body
            }
            fn len(&self) -> usize {
                self.len
            }
        }
        $crate::suite::check(&$what, $backend, &This { len: $len, $($name: $name.clone()),* });
    }};
}

/// `suite! { name = expression; … }`: a module of tests for each back end. The expression gives
/// `Result<impl LoadExperts, impl Display>`; an error is a back end that this machine lacks.
#[macro_export]
macro_rules! suite {
    ($($name:ident = $make:expr;)*) => {$(
        mod $name {
            $crate::suite!(@tests $make, ops: embed norms elementwise linear linear_one_token rope latent narrow attention attention_many index route replay);
            $crate::suite!(@tests $make, experts: raw_experts coded_experts mixed_codecs plane3_experts);
        }
    )*};
    (@tests $make:expr, $module:ident: $($case:ident)*) => {$(
        #[test]
        fn $case() {
            match $make {
                Ok(backend) => $crate::suite::$module::$case(&backend),
                Err(error) => println!("skipped: {error}"),
            }
        }
    )*};
}
