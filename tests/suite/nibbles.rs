//! Random numbers and the nibbles of matrices.

use std::time::{SystemTime, UNIX_EPOCH};

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    /// A fresh seed, printed; `ANSATZ_SEED` repeats one.
    pub fn fresh() -> Self {
        let seed = match std::env::var("ANSATZ_SEED") {
            Ok(seed) => seed.parse().expect("ANSATZ_SEED: a number"),
            Err(_) => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64,
        };
        println!("ANSATZ_SEED={seed}");
        Self(seed)
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// How nibbles are distributed.
#[derive(Clone, Copy, Debug)]
pub enum Data {
    Gaussian,
    Skewed,
    Uniform,
    Single,
    Extreme,
}

pub const DATA: [Data; 5] = [
    Data::Gaussian,
    Data::Skewed,
    Data::Uniform,
    Data::Single,
    Data::Extreme,
];

impl Data {
    pub fn nibble(self, rng: &mut Rng) -> u8 {
        let r = rng.next();
        match self {
            // Sum of eight digits of a quarter each, near a normal distribution.
            Data::Gaussian => {
                let sum: u64 = (0..8).map(|i| r >> (2 * i) & 3).sum();
                (sum as i64 * 2 / 3).clamp(0, 15) as u8
            }
            Data::Skewed => (r | 1 << 15).trailing_zeros() as u8,
            Data::Uniform => (r & 15) as u8,
            Data::Single => 9,
            Data::Extreme => {
                if r & 1 == 0 {
                    0
                } else {
                    15
                }
            }
        }
    }
}
