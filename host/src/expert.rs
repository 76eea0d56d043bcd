//! Routed experts as the loaders hand them to a back end.

use std::borrow::Cow;

/// Which columns share a weight scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleKind {
    /// One scale a row (`int4-row`).
    Row,
    /// One scale for each 64 columns of a row (`int4-g64`).
    G64,
}

impl ScaleKind {
    /// Scales of a `[rows, cols]` matrix, row-major.
    pub fn count(self, rows: usize, cols: usize) -> usize {
        match self {
            ScaleKind::Row => rows,
            ScaleKind::G64 => rows * (cols / gpu::arith::GROUP),
        }
    }
}

/// Geometry that all experts of a model share: gate and up `[intermediate, hidden]`, down
/// `[hidden, intermediate]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertShape {
    /// `hidden_size`.
    pub hidden: usize,
    /// `moe_intermediate_size`.
    pub intermediate: usize,
    /// Scales of the three matrices.
    pub scales: ScaleKind,
}

/// Index of a matrix within an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum MatrixKind {
    /// `gate_proj`.
    Gate = 0,
    /// `up_proj`.
    Up = 1,
    /// `down_proj`.
    Down = 2,
}

impl MatrixKind {
    /// The three, in the order of records.
    pub const ALL: [MatrixKind; 3] = [MatrixKind::Gate, MatrixKind::Up, MatrixKind::Down];

    /// As tensors name it.
    pub fn name(self) -> &'static str {
        match self {
            MatrixKind::Gate => "gate_proj",
            MatrixKind::Up => "up_proj",
            MatrixKind::Down => "down_proj",
        }
    }
}

impl std::fmt::Display for ExpertShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (i, h) = (self.intermediate, self.hidden);
        write!(f, "{i} x {h}, {}", self.scales.name())
    }
}

impl ExpertShape {
    /// `(rows, cols)` of a matrix.
    pub fn dims(&self, kind: MatrixKind) -> (usize, usize) {
        match kind {
            MatrixKind::Gate | MatrixKind::Up => (self.intermediate, self.hidden),
            MatrixKind::Down => (self.hidden, self.intermediate),
        }
    }

    /// Bytes of an expert in raw int4: nibbles and f32 scales.
    pub fn raw_bytes(&self) -> usize {
        MatrixKind::ALL
            .iter()
            .map(|k| {
                let (r, c) = self.dims(*k);
                r * c / 2 + 4 * self.scales.count(r, c)
            })
            .sum()
    }
}

/// A raw int4 matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct RawMatrix<'a> {
    /// `q + 8`, row-major, even column in the low nibble.
    pub packed: Cow<'a, [u8]>,
    /// Row-major [`ScaleKind::count`] scales, finite and not negative.
    pub scales: Cow<'a, [f32]>,
}

/// Where an expert lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// As int4.
    Raw,
    /// As rANS streams.
    Ans,
}

/// How coded experts are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Decode and multiply at once.
    Fused,
    /// Decode to scratch, then multiply as raw.
    Unfused,
}

/// The high or the low nibble of an integer `16 high + low + 8`, both from -8 to 7, as nibbles are
/// stored: plus 8.
pub fn int8_nibble(q: i8, low: bool) -> u8 {
    match low {
        true => q as u8 & 15,
        false => (q >> 4) as u8 & 15 ^ 8,
    }
}

/// Those of rows of signed bytes, packed, the even column in the low half.
pub fn int8_nibbles(bytes: &[u8], low: bool) -> Vec<u8> {
    let of = |byte: u8| int8_nibble(byte as i8, low);
    let pairs = bytes.as_chunks::<2>().0.iter();
    pairs.map(|[a, b]| of(*a) | of(*b) << 4).collect()
}
