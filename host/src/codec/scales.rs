//! How weight scales are stored.

use gpu::arith::scale_from_amax;
use half::bf16;

/// Form of a matrix's scales in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScaleFormat {
    /// f32, verbatim.
    F32 = 0,
    /// bf16 `amax`; the scale is [`gpu::arith::scale_from_amax`] of it.
    Amax16 = 1,
}

impl ScaleFormat {
    /// Bytes of one scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleFormat::F32 => 4,
            ScaleFormat::Amax16 => 2,
        }
    }

    /// For people and JSON.
    pub fn name(self) -> &'static str {
        match self {
            ScaleFormat::F32 => "f32",
            ScaleFormat::Amax16 => "amax16",
        }
    }
}

/// The bf16 `amax` that gives back exactly this scale, if one does.
fn amax_of(scale: f32) -> Option<u16> {
    let near = bf16::from_f32(scale * 7.0).to_bits();
    [0, near, near.wrapping_sub(1), near.wrapping_add(1)]
        .into_iter()
        .find(|a| scale_from_amax(*a).to_bits() == scale.to_bits())
}

/// Stores scales in 16 bits each where that gives back every bit, else verbatim.
pub fn encode_scales(scales: &[f32]) -> (ScaleFormat, Vec<u8>) {
    let amax: Option<Vec<u16>> = scales.iter().map(|s| amax_of(*s)).collect();
    match amax {
        Some(amax) => (
            ScaleFormat::Amax16,
            amax.iter().flat_map(|a| a.to_le_bytes()).collect(),
        ),
        None => (
            ScaleFormat::F32,
            scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
        ),
    }
}

/// The scale of a stored `amax`. Bits that are no finite number from +0 on give a scale that is no
/// such number either, which loading refuses.
fn scale_of(amax: u16) -> f32 {
    match amax {
        0..0x7f80 => scale_from_amax(amax),
        0x8000 => f32::NAN,
        _ => bf16::from_bits(amax).to_f32(),
    }
}

/// The scales that `bytes` store.
pub fn decode_scales(format: ScaleFormat, bytes: &[u8]) -> Vec<f32> {
    match format {
        ScaleFormat::F32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        ScaleFormat::Amax16 => bytes
            .chunks_exact(2)
            .map(|b| scale_of(u16::from_le_bytes([b[0], b[1]])))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_bf16_weights_take_two_bytes() {
        let amax: Vec<u16> = (0..0x7f80).collect();
        let scales: Vec<f32> = amax.iter().map(|a| scale_from_amax(*a)).collect();
        let (format, bytes) = encode_scales(&scales);
        assert_eq!(format, ScaleFormat::Amax16);
        assert_eq!(bytes.len(), 2 * scales.len());
        let back = decode_scales(format, &bytes);
        assert!(
            back.iter()
                .zip(&scales)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    }

    #[test]
    fn amax_that_is_none_gives_a_scale_that_is_refused() {
        for bits in 0x7f80..=u16::MAX {
            let scale = decode_scales(ScaleFormat::Amax16, &bits.to_le_bytes())[0];
            assert!(!scale.is_finite() || scale < 0.0, "{bits:#x}: {scale}");
        }
    }

    #[test]
    fn other_scales_stay_verbatim() {
        let scales = [0.1f32, 1e-9, 3.0, f32::MAX, 0.0, -0.0];
        let (format, bytes) = encode_scales(&scales);
        assert_eq!(format, ScaleFormat::F32);
        let back = decode_scales(format, &bytes);
        assert!(
            back.iter()
                .zip(&scales)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    }
}
