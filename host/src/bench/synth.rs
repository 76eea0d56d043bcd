//! Synthetic experts: Gaussian weights, rounded to bf16, through the int4 rule.

use crate::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};
use gpu::arith;
use rayon::prelude::*;

/// Standard deviation of the weights.
const SIGMA: f64 = 0.02;

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
pub struct Rng(u64);

impl Rng {
    /// A generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 uniform bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Two independent standard normal numbers (Box and Muller, 1958).
    pub fn normal(&mut self) -> [f64; 2] {
        let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let r = (-2.0 * unit(self.bits()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * unit(self.bits())).sin_cos();
        [r * cos, r * sin]
    }

    /// `n` standard normal numbers.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(n + 1);
        while out.len() < n {
            out.extend(self.normal().map(|x| x as f32));
        }
        out.truncate(n);
        out
    }
}

/// Nearest bf16, ties to even; finite numbers.
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// A `[rows, cols]` matrix of Gaussian weights: scale `max(amax / 7, 1e-8)`, nibble
/// `clip(rint(w / scale), -8, 7) + 8`. The same seed gives the same matrix.
pub fn matrix(seed: u64, rows: usize, cols: usize, scales: ScaleKind) -> RawMatrix<'static> {
    let group = match scales {
        ScaleKind::Row => cols,
        ScaleKind::G64 => arith::GROUP,
    };
    let mut packed = vec![0; rows * cols / 2];
    let mut all = vec![0.0; scales.count(rows, cols)];
    packed
        .par_chunks_mut(cols / 2)
        .zip(all.par_chunks_mut(cols / group))
        .enumerate()
        .for_each(|(r, (packed, scales))| {
            let mut rng = Rng::new(seed ^ (r as u64 + 1).wrapping_mul(0xd6e8_feb8_6659_fd93));
            let mut w = Vec::with_capacity(cols);
            while w.len() < cols {
                w.extend(rng.normal().map(|x| to_bf16((SIGMA * x) as f32)));
            }
            for ((w, packed), scale) in w
                .chunks_exact(group)
                .zip(packed.chunks_exact_mut(group / 2))
                .zip(scales)
            {
                let amax = w.iter().fold(0.0, |m, w| arith::max(arith::abs(*w), m));
                *scale = arith::max(amax / 7.0, 1e-8);
                for (w, byte) in w.chunks_exact(2).zip(packed) {
                    let q = |w: f32| (arith::rint(w / *scale) as i32).clamp(-8, 7) + 8;
                    *byte = (q(w[0]) | q(w[1]) << 4) as u8;
                }
            }
        });
    RawMatrix {
        packed: packed.into(),
        scales: all.into(),
    }
}

/// Gate, up and down of an expert.
pub fn expert(seed: u64, shape: &ExpertShape) -> [RawMatrix<'static>; 3] {
    MatrixKind::ALL.map(|kind| {
        let (rows, cols) = shape.dims(kind);
        matrix(
            seed.wrapping_mul(3).wrapping_add(kind as u64),
            rows,
            cols,
            shape.scales,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_have_the_entropy_of_the_rule() {
        // design.md: 2.92 bits for rows of 6,144.
        let m = matrix(1, 64, 6144, ScaleKind::Row);
        let mut counts = [0u64; 16];
        for byte in m.packed.iter() {
            counts[usize::from(byte & 15)] += 1;
            counts[usize::from(byte >> 4)] += 1;
        }
        let n = counts.iter().sum::<u64>() as f64;
        let entropy: f64 = counts
            .iter()
            .filter(|c| **c > 0)
            .map(|c| -(*c as f64 / n) * (*c as f64 / n).log2())
            .sum();
        assert!((2.88..2.96).contains(&entropy), "{entropy}");
        assert_eq!(m, matrix(1, 64, 6144, ScaleKind::Row));
        assert_ne!(m, matrix(2, 64, 6144, ScaleKind::Row));
    }
}
