//! Launch parameters of the dense operators, from sizes and the device's properties. Pure.

use gpu::launch::{DeviceLimits, Launch};

use crate::backend::Mla;

/// Scratch of one launch, bytes: operators over more split their tokens.
pub const SCRATCH: usize = 128 << 20;

/// Scratch of one launch over experts, bytes: more tokens together read and decode an expert less often.
pub const EXPERT_SCRATCH: usize = 512 << 20;

/// Tokens up to which dense layers are bound by memory.
const FEW: u32 = 8;

/// What a dense layer's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// bf16.
    Bf16,
    /// Signed bytes.
    Int8,
    /// f32.
    F32,
}

impl Numbers {
    /// Shared memory of a block that shares a tile of them; none where there is no such kernel.
    fn tile(self) -> Option<u32> {
        match self {
            Numbers::Bf16 => Some(gpu::linear_tile::shared_bytes(false)),
            Numbers::Int8 => Some(gpu::linear_tile::shared_bytes(true)),
            Numbers::F32 => None,
        }
    }
}

/// Rows and tokens of a warp, and launch, of a dense layer of `rows` rows and `cols` columns of `numbers`, for
/// `tokens` tokens, in `batches`.
///
/// One token: as many rows a warp, 1, 2 or 4, as still give each multiprocessor eight warps of its
/// own. Up to eight tokens: two rows, so that registers are left for loads under way, since memory is what
/// bounds these; more: tiles of four by four, or one that a block shares, where every multiprocessor gets one and
/// weights are not f32.
/// Without the vector path one row and one token a warp.
pub fn linear(
    limits: &DeviceLimits,
    (rows, cols): (u32, u32),
    tokens: u32,
    batches: u32,
    vector: bool,
    numbers: Numbers,
) -> ((u32, u32), Launch) {
    use gpu::dense::WARPS;
    use gpu::linear_tile as tile;
    let tiles = [
        tokens.div_ceil(tile::TOKENS),
        rows.div_ceil(tile::ROWS),
        batches,
    ];
    let blocks = tiles.iter().fold(1u32, |n, of| n.saturating_mul(*of));
    if vector
        && tokens > FEW
        && blocks >= limits.sms
        && cols.is_multiple_of(tile::COLUMNS)
        && let Some(shared) = numbers.tile()
        && limits.shared_per_block >= shared
    {
        let launch = Launch::new(tiles, tile::THREADS).shared(shared);
        return ((tile::ROWS, tile::TOKENS), launch);
    }
    let all = rows.saturating_mul(batches);
    let tile = if !vector {
        (1, 1)
    } else if tokens > FEW {
        (4, 4)
    } else if tokens > 1 {
        (2, if tokens == 2 { 2 } else { 4 })
    } else {
        match all / (8 * limits.sms.max(1)) {
            0 | 1 => (1, 1),
            2 | 3 => (2, 1),
            _ => (4, 1),
        }
    };
    let grid = [
        tokens.div_ceil(tile.1),
        rows.div_ceil(tile.0 * WARPS),
        batches,
    ];
    (tile, Launch::new(grid, 32 * WARPS))
}

/// Heads that a block takes at a time, and launch, of attention to `chunks` chunks a token for `tokens` tokens;
/// `vector` as `AttentionArgs` has it.
///
/// A block of [`gpu::attention_many`] has a multiprocessor to itself. It takes 16 heads at a time where half of
/// the multiprocessors get a block then, and all heads, one after the other, that leave each multiprocessor
/// four blocks; eight at a time where that gives a quarter of them a block. Without the shared memory for it,
/// or where less than half of the heads or a quarter of the threads that sum would be used,
/// [`gpu::attention`] takes four.
pub fn attention(
    limits: &DeviceLimits,
    mla: &Mla,
    chunks: u32,
    tokens: u32,
    vector: bool,
) -> (u32, Launch) {
    use gpu::attention_many::{
        FEWER, FIXED_BYTES, HEADS, SUM_COLUMNS, THREADS, WIDTH, shared_bytes,
    };
    const BLOCKS: u32 = 4;
    let (heads, latent) = (mla.heads as u32, mla.latent as u32);
    let width = latent + mla.rope as u32;
    let blocks = tokens.saturating_mul(chunks).max(1);
    for (at_once, share) in [(HEADS, 2), (FEWER, 4)] {
        let fits = vector
            && latent.is_multiple_of(4)
            && width <= WIDTH
            && shared_bytes(width, at_once) + FIXED_BYTES <= limits.shared_per_block;
        let used = heads > at_once / 2 && latent >= SUM_COLUMNS / 4;
        let tiles = heads.div_ceil(at_once);
        if fits && used && blocks.saturating_mul(share * tiles) >= limits.sms {
            let tiles = (BLOCKS * limits.sms).div_ceil(blocks).min(tiles);
            let launch = Launch::new([chunks, tiles, tokens], THREADS);
            return (at_once, launch.shared(shared_bytes(width, at_once)));
        }
    }
    let tiles = heads.div_ceil(gpu::attention::HEADS);
    let launch = Launch::new([chunks, tiles, tokens], gpu::attention::THREADS);
    (gpu::attention::HEADS, launch)
}

/// Tiles that the positions of `tokens` tokens are chosen from, up to position `last`; 0 where a block does all
/// of a token's: where there are few tiles, or tokens enough to keep the device at work.
pub fn tiles_to_select(tokens: usize, last: usize, top_k: u32) -> usize {
    use gpu::index_select::TILE;
    let tiles = last.div_ceil(TILE as usize);
    if tokens <= FEW as usize && tiles > 2 && top_k <= TILE {
        tiles
    } else {
        0
    }
}

/// Tokens of one launch whose scratch takes `bytes` bytes a token, within [`SCRATCH`]: at least one.
pub fn tokens_at_once(tokens: usize, bytes: usize) -> usize {
    tokens_within(SCRATCH, tokens, bytes)
}

/// The same within `scratch`.
pub fn tokens_within(scratch: usize, tokens: usize, bytes: usize) -> usize {
    (scratch / bytes.max(1)).clamp(1, 65_535).min(tokens.max(1))
}

/// Bytes of scratch that experts are decoded to before they are multiplied, at most (but one expert).
const DECODED: usize = 512 << 20;

/// Of `active` experts how many are decoded at a time, each to `bytes` bytes.
pub fn decoded_at_once(bytes: usize, active: usize) -> usize {
    (DECODED / bytes.max(1)).clamp(1, active.max(1))
}

/// Tokens of one launch over experts of `intermediate x hidden` of which each takes `top_k`, and an assignment
/// so many words of partial sums.
pub fn experts_at_once(
    tokens: usize,
    top_k: usize,
    (hidden, intermediate): (usize, usize),
    partials: usize,
) -> usize {
    let a_slot = 4 * partials + 3 * intermediate + 64;
    let a_token = top_k * a_slot + 3 * hidden;
    tokens_within(EXPERT_SCRATCH, tokens, a_token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_chosen_from_tiles_where_tokens_are_few() {
        for ((tokens, last, top_k), expected) in [
            ((1, 16_384, 2048), 0),
            ((1, 16_385, 2048), 3),
            ((8, 65_536, 2048), 8),
            ((9, 65_536, 2048), 0),
            ((1, 65_536, 8193), 0),
        ] {
            assert_eq!(tiles_to_select(tokens, last, top_k), expected);
        }
    }

    const H200: DeviceLimits = DeviceLimits {
        sms: 132,
        shared_per_block: 227 << 10,
        shared_per_sm: 228 << 10,
        threads_per_sm: 2048,
    };

    #[test]
    fn every_row_and_token_is_covered_once() {
        for rows in [1, 3, 4, 7, 8, 15, 16, 17, 256, 2784, 4224, 154_880] {
            for tokens in [1, 2, 4, 5, 256] {
                for vector in [false, true] {
                    for (cols, numbers) in [
                        (6144, Numbers::Int8),
                        (6144, Numbers::F32),
                        (6152, Numbers::Bf16),
                    ] {
                        let shape = (rows, cols);
                        let (tile, launch) = linear(&H200, shape, tokens, 3, vector, numbers);
                        assert_eq!(launch.grid[0], tokens.div_ceil(tile.1));
                        let warps = if tile.0 > 4 { 1 } else { 4 };
                        assert_eq!(launch.grid[1], rows.div_ceil(warps * tile.0));
                        assert_eq!(launch.grid[2], 3);
                        assert!(vector || tile == (1, 1));
                        assert!(numbers != Numbers::F32 || tile.0 <= 4);
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_take_a_warp_each() {
        let of = |rows, batches| linear(&H200, (rows, 6144), 1, batches, true, Numbers::Int8).0;
        assert_eq!(of(256, 1), (1, 1));
        assert_eq!(of(2784, 1), (2, 1));
        assert_eq!(of(6144, 1), (4, 1));
        assert_eq!(of(256, 64), (4, 1));
        let of = |tokens| linear(&H200, (256, 264), tokens, 1, true, Numbers::Int8).0;
        assert_eq!([2, 3, 8, 9].map(of), [(2, 2), (2, 4), (2, 4), (4, 4)]);
        let of = |cols| linear(&H200, (6144, cols), 64, 1, true, Numbers::Int8).0;
        assert_eq!([512, 768, 6144].map(of), [(64, 32), (4, 4), (64, 32)]);
        assert_eq!(
            linear(&H200, (6144, 512), 32, 1, true, Numbers::Int8).0,
            (4, 4)
        );
        let of = |numbers| linear(&H200, (6144, 6144), 64, 1, true, numbers).0;
        assert_eq!([Numbers::Bf16, Numbers::F32].map(of), [(64, 32), (4, 4)]);
        let small = DeviceLimits {
            shared_per_block: 48 << 10,
            ..H200
        };
        assert_eq!(
            linear(&small, (6144, 512), 64, 1, true, Numbers::Int8).0,
            (4, 4)
        );
    }

    #[test]
    fn attention_takes_as_many_heads_as_leave_blocks() {
        let mla = Mla {
            heads: 64,
            nope: 128,
            rope: 64,
            value: 128,
            latent: 512,
            scaling: 1.0,
        };
        let of = |mla: &Mla, chunks, tokens| {
            let (heads, launch) = attention(&H200, mla, chunks, tokens, true);
            assert_eq!([launch.grid[0], launch.grid[2]], [chunks, tokens]);
            (heads, launch.grid[1])
        };
        assert_eq!(of(&mla, 4, 1), (4, 16));
        assert_eq!(of(&mla, 5, 1), (8, 8));
        assert_eq!(of(&mla, 16, 1), (8, 8));
        assert_eq!(of(&mla, 1, 16), (8, 8));
        assert_eq!(of(&mla, 17, 1), (16, 4));
        assert_eq!(of(&mla, 32, 1), (16, 4));
        assert_eq!(of(&mla, 1, 17), (16, 4));
        assert_eq!(of(&mla, 32, 8), (16, 3));
        assert_eq!(of(&mla, 32, 64), (16, 1));
        assert_eq!(attention(&H200, &mla, 32, 64, false).0, 4);
        let consumer = DeviceLimits {
            shared_per_block: 99 << 10,
            ..H200
        };
        assert_eq!(attention(&consumer, &mla, 32, 64, true).0, 4);
        assert_eq!(of(&Mla { heads: 8, ..mla }, 32, 64), (8, 1));
        assert_eq!(of(&Mla { heads: 4, ..mla }, 32, 64), (4, 1));
        assert_eq!(of(&Mla { latent: 128, ..mla }, 32, 64), (16, 1));
        assert_eq!(of(&Mla { latent: 64, ..mla }, 32, 64), (4, 16));
        assert_eq!(of(&Mla { latent: 510, ..mla }, 32, 64), (4, 16));
        assert_eq!(of(&Mla { latent: 704, ..mla }, 32, 64), (4, 16));
    }

    #[test]
    fn scratch_is_bounded() {
        assert_eq!(tokens_at_once(256, SCRATCH / 4), 4);
        assert_eq!(tokens_at_once(3, SCRATCH / 4), 3);
        assert_eq!(tokens_at_once(256, SCRATCH * 2), 1);
        assert_eq!(tokens_at_once(0, 1), 1);
    }
}
