//! Launch parameters of the dense operators, from sizes and the device's properties. Pure.

use gpu::launch::{DeviceLimits, Launch};

use super::table::KernelId;

/// Scratch of one launch, bytes: operators over more split their tokens.
pub const SCRATCH: usize = 128 << 20;

/// Kernel and launch of a dense layer of `rows` rows for `tokens` tokens, in `batches`.
///
/// One token: four rows a warp where that still gives each multiprocessor a block. Several tokens:
/// tiles of four by four. Without the vector path one row and one token a warp.
pub fn linear(
    limits: &DeviceLimits,
    rows: u32,
    tokens: u32,
    batches: u32,
    vector: bool,
) -> (KernelId, Launch) {
    let (kernel, tile_rows, tile_tokens) = if !vector {
        (KernelId::LinearThin, 1, 1)
    } else if tokens > 1 {
        (KernelId::LinearMany, 4, 4)
    } else if rows
        .div_ceil(4 * gpu::linear::WARPS)
        .saturating_mul(batches)
        < limits.sms
    {
        (KernelId::LinearThin, 1, 1)
    } else {
        (KernelId::LinearOne, 4, 1)
    };
    let grid = [
        tokens.div_ceil(tile_tokens),
        rows.div_ceil(tile_rows * gpu::linear::WARPS),
        batches,
    ];
    (kernel, Launch::new(grid, 32 * gpu::linear::WARPS))
}

/// The same of rows of bytes.
///
/// One token: as many rows a warp, up to four, as still give each multiprocessor eight warps of its
/// own. Several tokens: tiles of four by four. Without the vector path one row and one token a warp.
pub fn linear_int8(
    limits: &DeviceLimits,
    rows: u32,
    tokens: u32,
    batches: u32,
    vector: bool,
) -> (KernelId, Launch) {
    use gpu::linear_int8::WARPS;
    let all = rows.saturating_mul(batches);
    let (kernel, tile_rows, tile_tokens) = if !vector {
        (KernelId::LinearInt8Thin, 1, 1)
    } else if tokens > 1 {
        (KernelId::LinearInt8Many, 4, 4)
    } else {
        match all / (8 * limits.sms.max(1)) {
            0 | 1 => (KernelId::LinearInt8Thin, 1, 1),
            2 | 3 => (KernelId::LinearInt8Two, 2, 1),
            _ => (KernelId::LinearInt8Four, 4, 1),
        }
    };
    let grid = [
        tokens.div_ceil(tile_tokens),
        rows.div_ceil(tile_rows * WARPS),
        batches,
    ];
    (kernel, Launch::new(grid, 32 * WARPS))
}

/// Tokens of one launch whose scratch takes `bytes` bytes a token: at least one.
pub fn tokens_at_once(tokens: usize, bytes: usize) -> usize {
    (SCRATCH / bytes.max(1)).clamp(1, 65_535).min(tokens.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: DeviceLimits = DeviceLimits {
        sms: 132,
        shared_per_block: 227 << 10,
        shared_per_sm: 228 << 10,
        threads_per_sm: 2048,
    };

    #[test]
    fn every_row_and_token_is_covered_once() {
        for rows in [1, 7, 8, 31, 32, 33, 256, 4224, 154_880] {
            for tokens in [1, 2, 4, 5, 256] {
                for vector in [false, true] {
                    let (kernel, launch) = linear(&H200, rows, tokens, 3, vector);
                    let (r, t) = match kernel {
                        KernelId::LinearThin => (1, 1),
                        KernelId::LinearOne => (4, 1),
                        KernelId::LinearMany => (4, 4),
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(launch.grid[0], tokens.div_ceil(t));
                    assert_eq!(launch.grid[1], rows.div_ceil(8 * r));
                    assert_eq!(launch.grid[2], 3);
                    assert!(vector || kernel == KernelId::LinearThin);
                }
            }
        }
    }

    #[test]
    fn every_row_of_bytes_is_covered_once() {
        for rows in [1, 3, 4, 15, 16, 17, 256, 2784, 6144, 154_880] {
            for tokens in [1, 2, 4, 5, 256] {
                for vector in [false, true] {
                    let (kernel, launch) = linear_int8(&H200, rows, tokens, 3, vector);
                    let (r, t) = match kernel {
                        KernelId::LinearInt8Thin => (1, 1),
                        KernelId::LinearInt8Two => (2, 1),
                        KernelId::LinearInt8Four => (4, 1),
                        KernelId::LinearInt8Many => (4, 4),
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(launch.grid[0], tokens.div_ceil(t));
                    assert_eq!(launch.grid[1], rows.div_ceil(4 * r));
                    assert_eq!(launch.grid[2], 3);
                    assert!(vector || kernel == KernelId::LinearInt8Thin);
                }
            }
        }
        let of = |rows, batches| linear_int8(&H200, rows, 1, batches, true).0;
        assert_eq!(of(256, 1), KernelId::LinearInt8Thin);
        assert_eq!(of(2784, 1), KernelId::LinearInt8Two);
        assert_eq!(of(6144, 1), KernelId::LinearInt8Four);
        assert_eq!(of(256, 64), KernelId::LinearInt8Four);
    }

    #[test]
    fn few_rows_take_a_warp_each() {
        assert_eq!(linear(&H200, 256, 1, 1, true).0, KernelId::LinearThin);
        assert_eq!(linear(&H200, 6144, 1, 1, true).0, KernelId::LinearOne);
        assert_eq!(linear(&H200, 256, 1, 64, true).0, KernelId::LinearOne);
    }

    #[test]
    fn scratch_is_bounded() {
        assert_eq!(tokens_at_once(256, SCRATCH / 4), 4);
        assert_eq!(tokens_at_once(3, SCRATCH / 4), 3);
        assert_eq!(tokens_at_once(256, SCRATCH * 2), 1);
        assert_eq!(tokens_at_once(0, 1), 1);
    }
}
