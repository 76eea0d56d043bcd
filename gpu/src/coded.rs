//! What the kernels over rANS streams share: the table, the stream ring, the decoder's step.
//!
//! A warp decodes one job, a (block, segment) of a matrix: lane `l` owns the same columns for all of
//! the block's rows. The plain algorithm, for each lane, is
//!
//! ```text
//! x = states[l]; window = first[l]:second[l]; c = 0
//! for each row group, for each column pair:
//!     v = upper 32 bits of (window << (c mod 32))
//!     twice: e = table[x mod M]; x = f(e) * (x / M) + b(e)
//!            if x < M: x = x << 16 | v >> 16; v <<= 16; c += 16
//!     if c / 32 has grown: window = window << 32 | next word of the stream, lanes in ascending order
//! ```
//!
//! Departures:
//! 1. The product and sum of the step are one `dp2a`: halves `(x / M, 1)` times bytes `(f, b)`.
//! 2. `c` is kept in -32 .. 32, so that "has grown" is a comparison with a constant and the count
//!    before the group need not stay in a register; shifts take it modulo 32.
//! 3. The vote on new words is one ballot for two lookups; a lane's word is found by the number of
//!    needy lanes below it.
//! 4. The stream comes through a ring of [`CHUNKS`] chunks in shared memory, filled by asynchronous
//!    copies two chunks ahead. A copy of the first chunk stands behind the last, so that reads need
//!    no wrap; whether a chunk is used up is asked every [`CHECK`] groups, in which at most one
//!    chunk's words go.
//! 5. Predicated sequences and the multiply pipe: [`crate::coded_ops`].
//!
//! Limits: a block's streams below 16 GiB. Corrupt bytes decode to something, without leaving the
//! stream's slice: reads are clamped to it; final states other than `M` are counted as faults.

use cuda_std::intrinsics::{
    dp2a_hi_s32_u32, dp2a_lo_s32_u32, dp2a_lo_u32_u32, lanemask_lt, mad_lo, popc, prmt, shf_l_wrap,
};
use cuda_std::mem::{Global, Slice, cp_async_16, cp_async_commit, cp_async_wait};
use cuda_std::shared::Shared;
use cuda_std::{thread, warp};

use crate::abi::{CODEC_RANS_PAIR, CODEC_RANS_TRIPLE, MatrixDesc};
use crate::coded_jobs::fault;
use crate::coded_ops::{renormalise, renormalise_shift, take_word};
use crate::layout::{LANES, Symbol};

/// Chunks of a warp's ring.
pub const CHUNKS: u32 = 3;
/// Groups between two checks of the ring.
pub const CHECK: u32 = 8;
/// Bytes of a warp's ring with the copy of its first chunk.
pub const RING: u32 = ring(CHECK);

/// The same where the ring is asked every `check` groups.
pub const fn ring(check: u32) -> u32 {
    (CHUNKS + 1) * check * 4 * LANES as u32
}

/// Repeats a block with a constant, so that it may index arrays that shall stay in registers.
macro_rules! unroll {
    ($name:ident in [$($n:literal)*] $body:block) => {
        $( { const $name: usize = $n; $body } )*
    };
}
pub(crate) use unroll;

/// Symbol kind of a kernel.
pub trait Code {
    /// What a lookup yields.
    const SYMBOL: Symbol;
    /// Number of the codec.
    const CODEC: u32;
    /// Rows of a group.
    const HEIGHT: u32 = Self::SYMBOL.height() as u32;
    /// Binary logarithm of the table's slots.
    const BITS: u32 = Self::SYMBOL.table_bits();
    /// Words of the table.
    const TABLE: u32 = 1 << Self::BITS;

    /// Renormalises if the state is below [`Self::TABLE`], shifting the window.
    fn renormalise_shift(state: &mut u32, window: &mut u32, count: &mut u32, one: u32);
    /// Renormalises if the state is below [`Self::TABLE`].
    fn renormalise(state: &mut u32, window: u32, count: &mut u32, one: u32);
    /// A group's nibbles in one word, as [`Self::multiply`] takes them.
    fn pack(first: u32, second: u32) -> u32;
    /// Adds the products of a group with the activations of its columns (i16, even column low).
    fn multiply(x: u32, packed: u32, sums: &mut [i32; 3]);
    /// Row sums of what [`Self::multiply`] has added up.
    fn rows(sums: [i32; 3]) -> [i32; 3];
    /// [`Self::multiply`] of a group's two table entries.
    #[inline(always)]
    fn multiply_entries(x: u32, first: u32, second: u32, sums: &mut [i32; 3]) {
        Self::multiply(x, Self::pack(first, second), sums);
    }
}

/// rANS over pairs: a group is two rows by two columns.
pub struct Pair;

impl Code for Pair {
    const SYMBOL: Symbol = Symbol::Pair;
    const CODEC: u32 = CODEC_RANS_PAIR;

    #[inline(always)]
    fn renormalise_shift(state: &mut u32, window: &mut u32, count: &mut u32, one: u32) {
        renormalise_shift::<{ 1 << Symbol::Pair.table_bits() }>(state, window, count, one);
    }
    #[inline(always)]
    fn renormalise(state: &mut u32, window: u32, count: &mut u32, one: u32) {
        renormalise::<{ 1 << Symbol::Pair.table_bits() }>(state, window, count, one);
    }
    /// Bytes: row 0 even, row 0 odd, row 1 even, row 1 odd.
    #[inline(always)]
    fn pack(first: u32, second: u32) -> u32 {
        prmt(first, second, 0x7632)
    }
    #[inline(always)]
    fn multiply(x: u32, packed: u32, sums: &mut [i32; 3]) {
        sums[0] = dp2a_lo_s32_u32(x, packed, sums[0]);
        sums[1] = dp2a_hi_s32_u32(x, packed, sums[1]);
    }
    #[inline(always)]
    fn rows(sums: [i32; 3]) -> [i32; 3] {
        sums
    }
    /// Nibbles are in bytes 2 and 3 of the entries.
    #[inline(always)]
    fn multiply_entries(x: u32, first: u32, second: u32, sums: &mut [i32; 3]) {
        sums[0] = dp2a_hi_s32_u32(x, first, sums[0]);
        sums[1] = dp2a_hi_s32_u32(x, second, sums[1]);
    }
}

/// rANS over triples: a group is three rows by two columns.
pub struct Triple;

impl Code for Triple {
    const SYMBOL: Symbol = Symbol::Triple;
    const CODEC: u32 = CODEC_RANS_TRIPLE;

    #[inline(always)]
    fn renormalise_shift(state: &mut u32, window: &mut u32, count: &mut u32, one: u32) {
        renormalise_shift::<{ 1 << Symbol::Triple.table_bits() }>(state, window, count, one);
    }
    #[inline(always)]
    fn renormalise(state: &mut u32, window: u32, count: &mut u32, one: u32) {
        renormalise::<{ 1 << Symbol::Triple.table_bits() }>(state, window, count, one);
    }
    /// Bytes: rows 0 and 1 (high nibble) of the even column, of the odd one; row 2 even, row 2 odd.
    #[inline(always)]
    fn pack(first: u32, second: u32) -> u32 {
        prmt(first, second, 0x7362)
    }
    /// Row 0; row 0 plus 16 times row 1, which saves a mask; row 2. Per lane at most 64 columns of
    /// 255 * 32512, so that 32 bits hold them.
    #[inline(always)]
    fn multiply(x: u32, packed: u32, sums: &mut [i32; 3]) {
        sums[0] = dp2a_lo_s32_u32(x, packed & 0x0f0f, sums[0]);
        sums[1] = dp2a_lo_s32_u32(x, packed, sums[1]);
        sums[2] = dp2a_hi_s32_u32(x, packed, sums[2]);
    }
    #[inline(always)]
    fn rows(sums: [i32; 3]) -> [i32; 3] {
        [sums[0], sums[1].wrapping_sub(sums[0]) >> 4, sums[2]]
    }
}

/// Copies the table to the start of shared memory, for the whole block of threads.
#[inline(always)]
pub(crate) fn load_table<C: Code>(table: Slice, shared: Shared<u32>) {
    // SAFETY: the table has `C::TABLE` words, which nobody writes.
    let table = unsafe { Global::<u32>::new(table) };
    let mut word = thread::thread_idx_x() * 4;
    while word < C::TABLE {
        cp_async_16(shared, word, table, word);
        word += thread::block_dim_x() * 4;
    }
    cp_async_commit();
    cp_async_wait::<0>();
    thread::sync_threads();
}

/// A lane's decoder of a job, whose ring is asked every `EVERY` groups.
pub struct Decoder<C, const EVERY: u32 = CHECK> {
    /// All of the dynamic shared memory; the table comes first.
    shared: Shared<u32>,
    state: u32,
    high: u32,
    low: u32,
    count: u32,
    /// Byte of the next word, in the ring or the copy behind it. The same in all lanes, as are
    /// `end` and `ring`.
    at: u32,
    /// End of the oldest chunk.
    end: u32,
    /// Start of the ring.
    ring: u32,
    stream: Global<u32>,
    /// Word of the stream where the lane's part of the next chunk starts.
    next: u32,
    /// Last word at which 16 bytes may be read.
    last: u32,
    below: u32,
    one: u32,
    code: core::marker::PhantomData<C>,
}

impl<C: Code, const EVERY: u32> Decoder<C, EVERY> {
    /// Bytes of a chunk: what all lanes take in `EVERY` groups at most.
    const CHUNK: u32 = EVERY * 4 * LANES as u32;

    /// Starts on the job's stream. `ring` is the byte in `shared` of the warp's [`ring`] bytes;
    /// `one` a 1 that the compiler does not know. A warp operation.
    ///
    /// `None` (in all lanes) if the matrix has no stream to read from.
    #[inline(always)]
    pub(crate) fn open(
        shared: Shared<u32>,
        ring: u32,
        desc: &MatrixDesc,
        number: u32,
        one: u32,
    ) -> Option<Self> {
        let lane = warp::lane_id();
        if desc.stream.len < 4 {
            return None;
        }
        // SAFETY: arrays that no kernel in flight writes; `blocks` has an entry for each job, and
        // what it says is clamped to the stream.
        let (stream, start) = unsafe {
            (
                Global::<u32>::new(desc.stream),
                Global::<u32>::new(desc.blocks).load_nc(number),
            )
        };
        let last = ((desc.stream.len - 4) as u32) & !3;
        let start = if start < last / 4 { start * 4 } else { last };
        let head = |i: u32| {
            let word = start + i * LANES as u32 + lane;
            stream.load_nc(if word < last + 3 { word } else { last + 3 })
        };
        // Copies of the job before may be under way into the same bytes.
        cp_async_wait::<0>();
        warp::sync_warp();
        let mut decoder = Self {
            shared,
            state: head(0),
            high: head(1),
            low: head(2),
            count: 0u32.wrapping_sub(32),
            at: ring,
            end: ring + Self::CHUNK,
            ring,
            stream,
            next: start + 3 * LANES as u32 + lane * 4,
            last,
            below: lanemask_lt(),
            one,
            code: core::marker::PhantomData,
        };
        decoder.copy(ring);
        decoder.copy(ring + Self::CHUNK);
        decoder.copy(ring + 2 * Self::CHUNK);
        cp_async_wait::<{ CHUNKS - 2 }>();
        warp::sync_warp();
        Some(decoder)
    }

    /// Starts the copy of the next chunk to byte `to` (and behind the ring, if it is the first).
    #[inline(always)]
    fn copy(&mut self, to: u32) {
        let lane = warp::lane_id();
        let mut half = 0;
        while half < Self::CHUNK / 512 {
            let word = to / 4 + half * 128 + lane * 4;
            let from = self.next + half * 128;
            let from = if from < self.last { from } else { self.last };
            cp_async_16(self.shared, word, self.stream, from);
            if to == self.ring {
                cp_async_16(
                    self.shared,
                    word + CHUNKS * Self::CHUNK / 4,
                    self.stream,
                    from,
                );
            }
            half += 1;
        }
        cp_async_commit();
        self.next += Self::CHUNK / 4;
    }

    /// Refills the ring if its oldest chunk is used up. To be called after at most `EVERY` groups;
    /// a warp operation.
    #[inline(always)]
    pub(crate) fn refill(&mut self) {
        if self.at >= self.end {
            warp::sync_warp();
            self.copy(self.end - Self::CHUNK);
            cp_async_wait::<{ CHUNKS - 2 }>();
            warp::sync_warp();
            if self.end == self.ring + CHUNKS * Self::CHUNK {
                self.at -= CHUNKS * Self::CHUNK;
                self.end = self.ring + Self::CHUNK;
            } else {
                self.end += Self::CHUNK;
            }
        }
    }

    /// Table entry of the state's slot.
    #[inline(always)]
    fn lookup(&self) -> u32 {
        self.shared
            .load_at_byte((self.state << 2) & ((C::TABLE - 1) << 2))
    }

    /// The state after an entry, before renormalisation.
    #[inline(always)]
    fn advance(&self, entry: u32) -> u32 {
        dp2a_lo_u32_u32((self.state >> C::BITS) + 0x10000, entry, 0)
    }

    /// The next group's two table entries. A warp operation.
    #[inline(always)]
    pub(crate) fn group(&mut self) -> (u32, u32) {
        let mut window = shf_l_wrap(self.low, self.high, self.count);
        let first = self.lookup();
        self.state = self.advance(first);
        C::renormalise_shift(&mut self.state, &mut window, &mut self.count, self.one);
        let second = self.lookup();
        self.state = self.advance(second);
        C::renormalise(&mut self.state, window, &mut self.count, self.one);
        // From -32 or -16: at least 0 when a word's end is passed.
        let need = self.count < 32;
        let needy = warp::ballot(need);
        let word = mad_lo(popc(needy & self.below), 4, self.at);
        take_word(
            need,
            self.shared,
            word,
            &mut self.high,
            &mut self.low,
            self.one,
        );
        self.count |= 0u32.wrapping_sub(32);
        self.at = mad_lo(popc(needy), 4, self.at);
        (first, second)
    }

    /// After a job's last group: counts a fault if a lane does not end in the state where encoders
    /// start. A warp operation.
    #[inline(always)]
    pub(crate) fn close(self, faults: Slice) {
        fault(warp::any(self.state != C::TABLE), faults);
    }
}
