//! Number formats of weights on disk: told by byte counts, checked, widened to f32.
//!
//! A quantised matrix `NAME` has its scales beside it as `NAME.qs` (F32), the form of colibri's
//! containers; `host convert` writes int8 rows of the dense part the same way. A Hugging Face fp8
//! matrix has `NAME_scale_inv`. The byte counts are those of colibri's `docs/FORMATS.md`.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt;

use super::tensors::{f32s, u16s};

/// Rows and columns of a block of fp8 weights that share a scale.
pub const FP8_BLOCK: usize = 128;

/// Columns that a scale may stand for in grouped int4, finest first.
const GROUPS: [usize; 8] = [16, 32, 48, 64, 96, 128, 192, 256];

/// How a matrix's weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// f32.
    F32,
    /// bf16.
    Bf16,
    /// Signed bytes, one scale a row.
    Int8Row,
    /// Nibbles `q + 8`, the even column in the low one; a scale for each `group` columns of a row,
    /// a row's last group cut at its end. Row scales are one group.
    Int4 {
        /// Columns.
        group: usize,
    },
    /// e4m3 (no infinities, `0x7f` and `0xff` NaN), a scale for each block of 128 by 128.
    Fp8Block,
}

impl Format {
    /// The name, as stamps of containers have it.
    pub fn name(self, cols: usize) -> String {
        match self {
            Format::F32 => "f32".into(),
            Format::Bf16 => "bf16".into(),
            Format::Int8Row => "int8-row".into(),
            Format::Int4 { group } if group >= cols => "int4-row".into(),
            Format::Int4 { group } => format!("int4-grouped ({group} columns)"),
            Format::Fp8Block => "fp8-e4m3-b128".into(),
        }
    }
}

impl Format {
    /// Whether it is integers with one scale a row.
    pub fn has_row_scales(self, cols: usize) -> bool {
        match self {
            Format::Int8Row => true,
            Format::Int4 { group } => group >= cols,
            _ => false,
        }
    }
}

/// Formats of containers that are known by their bytes and not read.
const UNREAD: [&str; 5] = [
    "int2-row",
    "int3-g64",
    "e8-iq3-lattice",
    "mxfp4",
    "int4-rans256-g0",
];

/// Why no format was found: what was expected, and what is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoFormat {
    /// Expected.
    pub expected: String,
    /// Found.
    pub found: String,
}

/// A format that byte counts fit.
#[derive(Clone, Copy, PartialEq)]
enum Fit {
    Read(Format),
    Unread(&'static str),
}

impl Fit {
    fn stamp(self, cols: usize) -> &'static str {
        match self {
            Fit::Unread(name) => name,
            Fit::Read(Format::Int8Row) => "int8-row",
            Fit::Read(Format::Fp8Block) => "fp8-e4m3-b128",
            Fit::Read(Format::Int4 { group }) if group < cols => "int4-grouped",
            Fit::Read(_) => "int4-row",
        }
    }
}

/// Columns of a group that the counts of a grouped int4 matrix fit, finest first. Of matrices whose columns
/// no group divides, and of few columns, they may be several.
pub fn groups(rows: usize, cols: usize, bytes: usize, scales: usize) -> Vec<usize> {
    if bytes != rows * cols.div_ceil(2) || scales == rows {
        return Vec::new();
    }
    let fits = |g: &usize| *g < cols && rows.checked_mul(cols.div_ceil(*g)) == Some(scales);
    GROUPS.into_iter().filter(fits).collect()
}

/// Of sizes of groups that fit the likeliest: the one that `divides` most matrices' columns, then a power of
/// two, then the finest.
pub fn likeliest(sizes: &[usize], divides: impl Fn(usize) -> usize) -> Option<usize> {
    let key = |g: &usize| (divides(*g), g.is_power_of_two(), Reverse(*g));
    sizes.iter().copied().max_by_key(key)
}

/// Tells the format of a quantised `[rows, cols]` matrix of `bytes` bytes and `scales` scales.
///
/// Where several sizes of groups fit, it is `group` if that is one of them, else the likeliest.
/// Where counts fit several, `stamp` (a name from the container's `colibri.fmt`) decides; without
/// one it is int8-row against fp8, and e8 against fp8 is refused. A stamp that the counts do not
/// fit is refused.
pub fn tell(
    rows: usize,
    cols: usize,
    bytes: usize,
    scales: usize,
    stamp: Option<&str>,
    group: Option<usize>,
) -> Result<Format, NoFormat> {
    let blocks = rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK);
    let mut fits = Vec::new();
    if bytes == rows * cols {
        if scales == rows {
            fits.push(Fit::Read(Format::Int8Row));
        }
        if scales == blocks {
            fits.push(Fit::Read(Format::Fp8Block));
        }
    }
    if bytes == rows * cols.div_ceil(2) {
        let sizes = groups(rows, cols, bytes, scales);
        let size = match group.filter(|g| sizes.contains(g)) {
            Some(group) => Some(group),
            None if scales == rows => Some(cols),
            None => likeliest(&sizes, |g| usize::from(cols.is_multiple_of(g))),
        };
        fits.extend(size.map(|group| Fit::Read(Format::Int4 { group })));
    }
    if bytes == rows * cols.div_ceil(4) && scales == rows {
        fits.push(Fit::Unread("int2-row"));
    }
    if bytes == rows * cols.div_ceil(64) * 24 && scales == rows * cols.div_ceil(64) {
        fits.push(Fit::Unread("int3-g64"));
    }
    if bytes == rows * cols.div_ceil(256) * 98 && scales == 1 {
        fits.push(Fit::Unread("e8-iq3-lattice"));
    }
    let found = || {
        let names: Vec<&str> = fits.iter().map(|f| f.stamp(cols)).collect();
        let counts = format!("{bytes} bytes and {scales} scales");
        match names[..] {
            [] => counts,
            _ => format!("{counts}, which is {}", names.join(" or ")),
        }
    };
    let wrong = |expected: String, found: String| Err(NoFormat { expected, found });
    let read = "int8-row, int4-row, int4-grouped or fp8-e4m3-b128";
    let fit = match stamp {
        Some(stamp) => {
            let agrees = |f: &&Fit| {
                let whole_rows = **f == Fit::Read(Format::Int4 { group: cols });
                f.stamp(cols) == stamp || (whole_rows && stamp == "int4-grouped")
            };
            match fits.iter().find(agrees) {
                Some(fit) => *fit,
                None if UNREAD.contains(&stamp) => {
                    return wrong(read.into(), format!("{stamp}, which is not supported"));
                }
                None => {
                    let expected = format!("{stamp}, as its stamp in colibri.fmt says");
                    return wrong(expected, found());
                }
            }
        }
        None => {
            let both = [Fit::Read(Format::Fp8Block), Fit::Unread("e8-iq3-lattice")];
            if both.iter().all(|f| fits.contains(f)) {
                return wrong("a stamp in colibri.fmt that decides".into(), found());
            }
            match fits.first() {
                Some(fit) => *fit,
                None => {
                    let expected = format!(
                        "{} bytes and {rows} scales (int8-row), {} bytes and {rows} scales or more \
                         (int4), for {rows} x {cols} weights",
                        rows * cols,
                        rows * cols.div_ceil(2)
                    );
                    return wrong(expected, found());
                }
            }
        }
    };
    match fit {
        Fit::Read(format) => Ok(format),
        Fit::Unread(name) => wrong(read.into(), format!("{name}, which is not supported")),
    }
}

/// A matrix, or a vector as one row of it, as it is stored.
#[derive(Clone, Debug)]
pub struct Weight<'a> {
    /// How.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// The weights' bytes, as many as the format says.
    pub bytes: &'a [u8],
    /// Scales, as many as the format says; none for floats.
    pub scales: Cow<'a, [f32]>,
}

impl<'a> Weight<'a> {
    /// Weights.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether it has no weights.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The integers of a matrix with row scales, row-major.
    ///
    /// # Panics
    /// If its format has no row scales.
    pub fn integers(&self) -> Cow<'a, [i8]> {
        match self.format {
            Format::Int8Row => bytemuck::cast_slice(self.bytes).into(),
            Format::Int4 { group } if group >= self.cols => {
                let row_bytes = self.cols.div_ceil(2);
                let row = |r: usize| &self.bytes[r * row_bytes..(r + 1) * row_bytes];
                let nibble = |row: &[u8], c: usize| (row[c / 2] >> (4 * (c % 2)) & 15) as i8 - 8;
                (0..self.rows)
                    .flat_map(|r| (0..self.cols).map(move |c| nibble(row(r), c)))
                    .collect()
            }
            other => panic!("{}: no row scales", other.name(self.cols)),
        }
    }

    /// Widens weights `from..from + to.len()`, row-major: a quantised weight is its integer (or
    /// fp8 number) times its scale, in f32.
    pub fn widen(&self, from: usize, to: &mut [f32]) {
        let cols = self.cols;
        let each = |to: &mut [f32], value: &dyn Fn(usize) -> f32, scale: &dyn Fn(usize) -> f32| {
            for (i, to) in to.iter_mut().enumerate() {
                *to = value(from + i) * scale(from + i);
            }
        };
        match self.format {
            Format::F32 => to.copy_from_slice(&f32s(&self.bytes[4 * from..4 * (from + to.len())])),
            Format::Bf16 => {
                let bits = u16s(&self.bytes[2 * from..2 * (from + to.len())]);
                for (to, bits) in to.iter_mut().zip(bits.iter()) {
                    *to = gpu::arith::bf16(*bits);
                }
            }
            Format::Int8Row => each(to, &|i| f32::from(self.bytes[i] as i8), &|i| {
                self.scales[i / cols]
            }),
            Format::Int4 { group } => {
                let (row_bytes, groups) = (cols.div_ceil(2), cols.div_ceil(group));
                each(
                    to,
                    &|i| {
                        let (r, c) = (i / cols, i % cols);
                        let byte = self.bytes[r * row_bytes + c / 2];
                        f32::from((byte >> (4 * (c % 2)) & 15) as i8 - 8)
                    },
                    &|i| self.scales[i / cols * groups + i % cols / group],
                );
            }
            Format::Fp8Block => {
                let blocks = cols.div_ceil(FP8_BLOCK);
                each(to, &|i| e4m3(self.bytes[i]), &|i| {
                    self.scales[i / cols / FP8_BLOCK * blocks + i % cols / FP8_BLOCK]
                });
            }
        }
    }
}

/// An fp8 number of e4m3 without infinities (Micikevicius et al.: FP8 formats for deep learning,
/// 2022): bias 7, subnormals, NaN where all bits below the sign are set.
pub fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if bits & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

impl fmt::Display for NoFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, found {}", self.expected, self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_tell_formats() {
        let t = |bytes, scales, stamp| tell(256, 512, bytes, scales, stamp, None);
        let n = 256 * 512;
        assert_eq!(t(n, 256, None), Ok(Format::Int8Row));
        assert_eq!(t(n, 8, None), Ok(Format::Fp8Block));
        assert_eq!(t(n / 2, 256, None), Ok(Format::Int4 { group: 512 }));
        for group in [16, 32, 64, 128, 256] {
            let scales = n / group;
            assert_eq!(t(n / 2, scales, None), Ok(Format::Int4 { group }));
            let stamped = t(n / 2, scales, Some("int4-grouped"));
            assert_eq!(stamped, Ok(Format::Int4 { group }));
        }
        let refused = |bytes, scales, stamp, says: &str| {
            let e = t(bytes, scales, stamp).unwrap_err().to_string();
            assert!(e.contains(says), "{says}: {e}");
        };
        refused(n / 4, 256, None, "int2-row, which is not supported");
        refused(n / 64 * 24, n / 64, None, "int3-g64, which is not");
        refused(256 * 2 * 98, 1, None, "e8-iq3-lattice, which is not");
        refused(n / 2, 300, None, "found 65536 bytes and 300 scales");
        refused(n / 2 - 1, 256, None, "found 65535 bytes and 256 scales");
        refused(n, 256, Some("int4-row"), "which is int8-row");
        refused(n / 2, 512, Some("int4-row"), "which is int4-grouped");
        refused(77, 3, Some("int4-rans256-g0"), "int4-rans256-g0, which");
        refused(n, 256, Some("int5-row"), "int5-row, as its stamp");
    }

    #[test]
    fn collisions_go_to_the_stamp() {
        // One scale a row and one a block of 128 x 128 are as many.
        let t = |stamp| tell(2, 256, 512, 2, stamp, None);
        assert_eq!(t(None), Ok(Format::Int8Row));
        assert_eq!(t(Some("int8-row")), Ok(Format::Int8Row));
        assert_eq!(t(Some("fp8-e4m3-b128")), Ok(Format::Fp8Block));
        let t = |stamp| tell(7, 98, 7 * 98, 1, stamp, None);
        let e = t(None).unwrap_err().to_string();
        assert!(e.contains("a stamp in colibri.fmt that decides"), "{e}");
        assert_eq!(t(Some("fp8-e4m3-b128")), Ok(Format::Fp8Block));
        assert!(t(Some("e8-iq3-lattice")).is_err());
        // A group as wide as the row is a row.
        let row = tell(8, 64, 256, 8, Some("int4-grouped"), None);
        assert_eq!(row, Ok(Format::Int4 { group: 64 }));
    }

    #[test]
    fn several_sizes_of_groups_may_fit() {
        // Three scales for 136 columns: groups of 48 or of 64.
        assert_eq!(groups(2, 136, 136, 6), [48, 64]);
        let t = |cols: usize, each: usize, group| tell(2, cols, cols, 2 * each, None, group);
        assert_eq!(t(136, 3, Some(64)), Ok(Format::Int4 { group: 64 }));
        assert_eq!(t(136, 3, Some(48)), Ok(Format::Int4 { group: 48 }));
        assert_eq!(t(136, 3, None), Ok(Format::Int4 { group: 64 }));
        assert_eq!(t(192, 2, None), Ok(Format::Int4 { group: 96 }));
        assert_eq!(t(128, 2, Some(256)), Ok(Format::Int4 { group: 64 }));
        assert_eq!(t(192, 1, Some(64)), Ok(Format::Int4 { group: 192 }));
    }

    #[test]
    fn weights_widen() {
        let int4 = Weight {
            format: Format::Int4 { group: 2 },
            rows: 2,
            cols: 3,
            bytes: &[0x1f, 0x08, 0x70, 0x0a],
            scales: vec![1.0, 10.0, 0.5, 4.0].into(),
        };
        let mut out = [0.0; 6];
        int4.widen(0, &mut out);
        assert_eq!(out, [7.0, -7.0, 0.0, -4.0, -0.5, 8.0]);
        let mut part = [0.0; 2];
        int4.widen(3, &mut part);
        assert_eq!(part, [-4.0, -0.5]);
        let int8 = Weight {
            format: Format::Int8Row,
            rows: 2,
            cols: 2,
            bytes: &[1, 0xff, 0x80, 0x7f],
            scales: vec![2.0, 0.25].into(),
        };
        let mut out = [0.0; 4];
        int8.widen(0, &mut out);
        assert_eq!(out, [2.0, -2.0, -32.0, 31.75]);
        assert_eq!(*int8.integers(), [1, -1, -128, 127]);
        let rows = Weight {
            format: Format::Int4 { group: 3 },
            scales: vec![1.0, 2.0].into(),
            ..int4
        };
        assert_eq!(*rows.integers(), [7, -7, 0, -8, -1, 2]);
    }

    #[test]
    fn e4m3_numbers() {
        // From the paper's table of extreme values.
        assert_eq!(e4m3(0x7e), 448.0);
        assert_eq!(e4m3(0x08), 2f32.powi(-6));
        assert_eq!(e4m3(0x07), 0.875 * 2f32.powi(-6));
        assert_eq!(e4m3(0x01), 2f32.powi(-9));
        assert_eq!(e4m3(0x38), 1.0);
        assert_eq!(e4m3(0xb8), -1.0);
        assert_eq!(e4m3(0x80).to_bits(), (-0.0f32).to_bits());
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let mut values: Vec<f32> = (0..0x7f).map(e4m3).collect();
        assert!(values.is_sorted());
        values.dedup();
        assert_eq!(values.len(), 127);
    }
}
