//! The vector decoder: one algorithm over vectors of 32 lanes.
//!
//! Departures from the plain decoder:
//! 1. All lanes take a step at once; an arm says how wide its registers are.
//! 2. Counters are multiples of 16 and only `c mod 32` matters: one bit a lane, kept as a mask. A
//!    lane needs a word when two of (half word pending, first renormalisation, second) hold.
//! 3. Needy lanes get their words by one expansion of the next 32 words of the stream.
//! 4. Nibbles of four groups are merged into one word a lane and row; the words of a row group are
//!    transposed into rows at its end.
//!
//! Limits: `unsafe` is confined to the arms' intrinsics. The table has exactly `2^table_bits`
//! entries and lookups are masked with that; stream reads go through slices.

use gpu::layout::{LANES, STATES, Symbol};

use super::{JOB_BYTES, Job, JobError};

/// The words that the next request may take, in stream order.
pub(super) type Window = [u8; 4 * LANES];

/// Vectors of 32 u32 lanes and what the decoder does with them.
///
/// # Safety
/// All methods need the processor features that the implementation documents, and
/// [`Lanes::lookup`] indices below the table's length.
pub(super) unsafe trait Lanes {
    /// 32 lanes of u32.
    type V: Copy;
    /// A truth value for each lane.
    type M: Copy;

    unsafe fn load(words: &Window) -> Self::V;
    unsafe fn store(v: Self::V, words: &mut [u32; LANES]);
    unsafe fn splat(x: u32) -> Self::V;
    unsafe fn none() -> Self::M;
    /// `table[i]` for each lane.
    unsafe fn lookup(table: &[u32], i: Self::V) -> Self::V;
    unsafe fn and(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn or(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn shl<const N: u32>(a: Self::V) -> Self::V;
    unsafe fn shr<const N: u32>(a: Self::V) -> Self::V;
    /// `a < b`, both below `2^31`.
    unsafe fn less(a: Self::V, b: Self::V) -> Self::M;
    /// `b` where `m`, else `a`.
    unsafe fn select(m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// At least two of three.
    unsafe fn majority(a: Self::M, b: Self::M, c: Self::M) -> Self::M;
    /// An odd number of three.
    unsafe fn parity(a: Self::M, b: Self::M, c: Self::M) -> Self::M;
    /// The next words of the stream for the lanes of `m`, in lane order; `a` elsewhere. Also how
    /// many were taken.
    unsafe fn expand(m: Self::M, a: Self::V, words: &Window) -> (Self::V, usize);
}

/// Bits of the table for each kind of symbol, as constants of the generic code.
pub(super) trait Kind {
    const SYMBOL: Symbol;
    const BITS: u32 = Self::SYMBOL.table_bits();
    const HEIGHT: usize = Self::SYMBOL.height();
}
pub(super) struct Pair;
pub(super) struct Triple;
impl Kind for Pair {
    const SYMBOL: Symbol = Symbol::Pair;
}
impl Kind for Triple {
    const SYMBOL: Symbol = Symbol::Triple;
}

/// The stream behind a job's fixed part. Reads past its end give 0.
struct Words<'a> {
    bytes: &'a [u8],
    at: usize,
    tail: &'a mut [u8; 2 * size_of::<Window>()],
    in_tail: bool,
}

impl Words<'_> {
    #[inline(always)]
    fn window(&mut self) -> &Window {
        if !self.in_tail {
            // A second look because of the borrow checker; the first is optimised away.
            if self.bytes[self.at..]
                .first_chunk::<{ size_of::<Window>() }>()
                .is_some()
            {
                return self.bytes[self.at..].first_chunk().unwrap_or(&ZEROS);
            }
            self.leave();
        }
        self.tail[self.at.min(size_of::<Window>())..]
            .first_chunk()
            .unwrap_or(&ZEROS)
    }

    /// Less than a window is left: goes on in a copy with zeros behind it.
    #[cold]
    fn leave(&mut self) {
        let rest = &self.bytes[self.at..];
        self.tail[..rest.len()].copy_from_slice(rest);
        self.at = 0;
        self.in_tail = true;
    }
}

static ZEROS: Window = [0; size_of::<Window>()];

/// A lane's nibbles of one row group: word `w` of a row holds the bytes of pairs `4w..4w + 4`.
type Stage = [[[u32; LANES]; 8]; 3];

/// Decodes a job into rows of `stride` bytes.
///
/// # Safety
/// The processor has what `L` needs.
#[inline(always)]
pub(super) unsafe fn decode<L: Lanes, K: Kind>(
    job: &Job<'_>,
    out: &mut [u8],
    stride: usize,
) -> Result<(), JobError> {
    assert_eq!(job.entries.len(), 1 << K::BITS);
    let (fixed, rest) = job.bytes.split_at(JOB_BYTES);
    let fixed = fixed.as_chunks::<{ size_of::<Window>() }>().0;
    let mut words = Words {
        bytes: rest,
        at: 0,
        tail: &mut [0; 2 * size_of::<Window>()],
        in_tail: false,
    };
    let pairs = job.folds.pairs();
    let mut stage: Stage = [[[0; LANES]; 8]; 3];

    // SAFETY: the caller's promise; `lookup` indices are masked to the table, whose length is
    // asserted above.
    unsafe {
        let low = L::splat(1 << K::BITS);
        let slot = L::splat((1 << K::BITS) - 1);
        let byte = L::splat(0xff);
        let mut x = L::load(&fixed[0]);
        let mut y = L::load(&fixed[1]);
        let mut hi = L::load(&fixed[2]);
        let mut lo = L::load(&fixed[3]);
        let mut half = L::none();

        macro_rules! group {
            () => {{
                let v = L::select(half, hi, L::or(L::shl::<16>(hi), L::shr::<16>(lo)));
                let e1 = L::lookup(job.entries, L::and(x, slot));
                let e2 = L::lookup(job.entries, L::and(y, slot));
                x = L::add(
                    L::mul(L::and(e1, byte), shr_bits::<L, K>(x)),
                    L::and(L::shr::<8>(e1), byte),
                );
                y = L::add(
                    L::mul(L::and(e2, byte), shr_bits::<L, K>(y)),
                    L::and(L::shr::<8>(e2), byte),
                );
                let m1 = L::less(x, low);
                x = L::select(m1, x, L::or(L::shl::<16>(x), L::shr::<16>(v)));
                let v = L::select(m1, v, L::shl::<16>(v));
                let m2 = L::less(y, low);
                y = L::select(m2, y, L::or(L::shl::<16>(y), L::shr::<16>(v)));
                let need = L::majority(half, m1, m2);
                half = L::parity(half, m1, m2);
                hi = L::select(need, hi, lo);
                let (l, taken) = L::expand(need, lo, words.window());
                lo = l;
                words.at += 4 * taken;
                (e1, e2)
            }};
        }

        for t in 0..job.row_groups {
            for w in 0..pairs / 4 {
                let g0 = group!();
                let g1 = group!();
                let g2 = group!();
                let g3 = group!();
                put::<L, K>(&mut stage, w, [g0, g1, g2, g3]);
            }
            if !pairs.is_multiple_of(4) {
                let mut g = [(L::splat(0), L::splat(0)); 4];
                for g in &mut g[..pairs % 4] {
                    *g = group!();
                }
                put::<L, K>(&mut stage, pairs / 4, g);
            }
            let first = t * K::HEIGHT;
            let rows = K::HEIGHT.min(job.rows - first);
            for (r, stage) in stage.iter().enumerate().take(rows) {
                let row = &mut out[(first + r) * stride..][..pairs * LANES];
                match job.folds.lane_cols() {
                    2 => narrow::<1>(stage, row),
                    4 => narrow::<2>(stage, row),
                    8 => wide::<1>(stage, row),
                    16 => wide::<2>(stage, row),
                    32 => wide::<4>(stage, row),
                    _ => wide::<8>(stage, row),
                }
            }
        }

        let mut states = [[0; LANES]; STATES];
        L::store(x, &mut states[0]);
        L::store(y, &mut states[1]);
        super::final_states(&states, 1 << K::BITS)
    }
}

#[inline(always)]
unsafe fn shr_bits<L: Lanes, K: Kind>(x: L::V) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        match K::SYMBOL {
            Symbol::Pair => L::shr::<12>(x),
            Symbol::Triple => L::shr::<15>(x),
        }
    }
}

/// Merges the entries of four groups into one word a row.
///
/// Helpers are functions and not closures: closures are not inlined into the arms.
#[inline(always)]
unsafe fn put<L: Lanes, K: Kind>(stage: &mut Stage, w: usize, g: [(L::V, L::V); 4]) {
    // SAFETY: the caller's promise.
    unsafe {
        match K::SYMBOL {
            Symbol::Pair => {
                let first = [g[0].0, g[1].0, g[2].0, g[3].0];
                let second = [g[0].1, g[1].1, g[2].1, g[3].1];
                L::store(pair_row::<L>(first), &mut stage[0][w]);
                L::store(pair_row::<L>(second), &mut stage[1][w]);
            }
            Symbol::Triple => {
                // Both columns' triples in one word, low nibbles in bits 0..12 and 16..28.
                let upper = L::splat(0xffff_0000);
                let u0 = L::or(L::shr::<16>(g[0].0), L::and(g[0].1, upper));
                let u1 = L::or(L::shr::<16>(g[1].0), L::and(g[1].1, upper));
                let u2 = L::or(L::shr::<16>(g[2].0), L::and(g[2].1, upper));
                let u3 = L::or(L::shr::<16>(g[3].0), L::and(g[3].1, upper));
                L::store(triple_row::<L>([u0, u1, u2, u3]), &mut stage[0][w]);
                let (v0, v1) = (L::shr::<4>(u0), L::shr::<4>(u1));
                let (v2, v3) = (L::shr::<4>(u2), L::shr::<4>(u3));
                L::store(triple_row::<L>([v0, v1, v2, v3]), &mut stage[1][w]);
                let (v0, v1) = (L::shr::<8>(u0), L::shr::<8>(u1));
                let (v2, v3) = (L::shr::<8>(u2), L::shr::<8>(u3));
                L::store(triple_row::<L>([v0, v1, v2, v3]), &mut stage[2][w]);
            }
        }
    }
}

/// Four pairs, nibbles in bytes 2 and 3 of each entry, as four bytes.
#[inline(always)]
unsafe fn pair_row<L: Lanes>(e: [L::V; 4]) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        let upper = L::splat(0xffff_0000);
        let even = L::or(L::shr::<16>(e[0]), L::and(e[2], upper));
        let odd = L::or(L::shr::<16>(e[1]), L::and(e[3], upper));
        let even = L::or(even, L::shr::<4>(even));
        let odd = L::or(odd, L::shr::<4>(odd));
        let even = L::and(even, L::splat(0x00ff_00ff));
        L::or(even, L::and(L::shl::<8>(odd), L::splat(0xff00_ff00)))
    }
}

/// Four times two nibbles, in bits 0..4 and 16..20 of each word, as four bytes.
#[inline(always)]
unsafe fn triple_row<L: Lanes>(u: [L::V; 4]) -> L::V {
    // SAFETY: the caller's promise.
    unsafe {
        let nibble = L::splat(0x000f_000f);
        let a = L::or(L::and(u[0], nibble), L::shl::<8>(L::and(u[1], nibble)));
        let b = L::or(L::and(u[2], nibble), L::shl::<8>(L::and(u[3], nibble)));
        let a = L::and(L::or(a, L::shr::<12>(a)), L::splat(0x0000_ffff));
        L::or(a, L::shl::<16>(L::or(b, L::shr::<12>(b))))
    }
}

/// A staged row whose lanes own `4 W` bytes in each round.
#[inline(always)]
fn wide<const W: usize>(stage: &[[u32; LANES]; 8], row: &mut [u8]) {
    for (round, words) in row
        .chunks_exact_mut(4 * W * LANES)
        .zip(stage.chunks_exact(W))
    {
        let (quads, _) = round.as_chunks_mut::<4>();
        for lane in 0..LANES {
            for k in 0..W {
                quads[lane * W + k] = words[k][lane].to_le_bytes();
            }
        }
    }
}

/// A staged row whose lanes own `B` bytes in each round, one or two.
#[inline(always)]
fn narrow<const B: usize>(stage: &[[u32; LANES]; 8], row: &mut [u8]) {
    for (round, bytes) in row.chunks_exact_mut(B * LANES).enumerate() {
        let pair = round * B;
        for lane in 0..LANES {
            for k in 0..B {
                let word = stage[(pair + k) / 4][lane];
                bytes[lane * B + k] = (word >> (8 * ((pair + k) % 4))) as u8;
            }
        }
    }
}
