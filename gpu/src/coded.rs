//! What the kernels over rANS streams share: the table, the stream ring, the decoder's step.
//!
//! A warp decodes one job, a (block, segment) of a matrix: lane `l` owns the same columns for all of
//! the block's rows. The plain algorithm, for each lane, is
//!
//! ```text
//! x[0] = states[l]; x[1] = states[32 + l]; window = first[l]:second[l]; c = 0
//! for each row group, for each column pair:
//!     v = upper 32 bits of (window << (c mod 32))
//!     for k in 0, 1: e = table[x[k] mod M]; x[k] = f(e) * (x[k] / M) + b(e)
//!                    if x[k] < M: x[k] = x[k] << 16 | v >> 16; v <<= 16; c += 16
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
//! 5. A group's two lookups do not depend on each other, and are made at the end of the group before,
//!    ahead of its vote: the warp waits for both and for the new words at once.
//! 6. Predicated sequences and the multiply pipe: [`crate::coded_ops`].
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
use crate::layout::{JOB_WORDS, LANES, STATES, Symbol};

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

/// Starts to copy the table to the start of shared memory, for the whole block of threads, which may
/// read it after a barrier behind the wait for this copy.
#[inline(always)]
pub(crate) fn start_table<C: Code>(table: Slice, shared: Shared<u32>) {
    // SAFETY: the table has `C::TABLE` words, which nobody writes.
    let table = unsafe { Global::<u32>::new(table) };
    let mut word = thread::thread_idx_x() * 4;
    while word < C::TABLE {
        cp_async_16(shared, word, table, word);
        word += thread::block_dim_x() * 4;
    }
    cp_async_commit();
}

/// The barrier behind which the table may be read: after a wait for its copy, once for each warp, from
/// wherever it first has nothing else to do.
#[inline(always)]
pub(crate) fn table_barrier() {
    thread::sync_threads();
}

/// [`start_table`] and what must follow it.
#[inline(always)]
pub(crate) fn load_table<C: Code>(table: Slice, shared: Shared<u32>) {
    start_table::<C>(table, shared);
    cp_async_wait::<0>();
    table_barrier();
}

/// A lane's decoder of a job, whose ring is asked every `EVERY` groups.
pub struct Decoder<C, const EVERY: u32 = CHECK> {
    /// All of the dynamic shared memory; the table comes first.
    shared: Shared<u32>,
    /// Of the groups' first and second lookups.
    states: [u32; STATES],
    /// Table entries of their slots, once [`Self::begin`] has been called.
    entries: [u32; STATES],
    high: u32,
    low: u32,
    count: u32,
    /// Byte of the next word, in the ring or the copy behind it. The same in all lanes, as is `end`.
    at: u32,
    /// End of the oldest chunk; with it goes the start of the ring, [`Self::ring`].
    end: u32,
    /// The stream from the lane's part of the next chunk on.
    next: Global<u32>,
    /// Words from there to the last at which 16 bytes may be read.
    left: u32,
    below: u32,
    one: u32,
    code: core::marker::PhantomData<C>,
}

impl<C: Code, const EVERY: u32> Decoder<C, EVERY> {
    /// Bytes of a chunk: what all lanes take in `EVERY` groups at most.
    const CHUNK: u32 = EVERY * 4 * LANES as u32;

    /// Starts on the job's stream. `ring` is the byte in `shared` of the warp's [`ring`] bytes, a
    /// multiple of their number;
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
        let next = start + JOB_WORDS + lane * 4;
        let next = if next < last { next } else { last };
        let mut decoder = Self {
            shared,
            states: [head(0), head(1)],
            entries: [0; STATES],
            high: head(2),
            low: head(3),
            count: 0u32.wrapping_sub(32),
            at: ring,
            end: ring + Self::CHUNK,
            next: stream.at(u64::from(next)),
            left: last - next,
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

    /// Start of the ring, which is aligned to its size.
    #[inline(always)]
    fn ring(&self) -> u32 {
        self.end & !(ring(EVERY) - 1)
    }

    /// Starts the copy of the next chunk to byte `to` (and behind the ring, if it is the first).
    #[inline(always)]
    fn copy(&mut self, to: u32) {
        let lane = warp::lane_id();
        let mut half = 0;
        while half < Self::CHUNK / 512 {
            let word = to / 4 + half * 128 + lane * 4;
            let from = (half * 128).min(self.left);
            cp_async_16(self.shared, word, self.next, from);
            if to == self.ring() {
                cp_async_16(
                    self.shared,
                    word + CHUNKS * Self::CHUNK / 4,
                    self.next,
                    from,
                );
            }
            half += 1;
        }
        cp_async_commit();
        let step = (Self::CHUNK / 4).min(self.left);
        self.next = self.next.at(u64::from(step));
        self.left -= step;
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
            if self.end == self.ring() + CHUNKS * Self::CHUNK {
                self.at -= CHUNKS * Self::CHUNK;
                self.end -= (CHUNKS - 1) * Self::CHUNK;
            } else {
                self.end += Self::CHUNK;
            }
        }
    }

    /// Table entry of a state's slot.
    #[inline(always)]
    fn lookup(&self, state: u32) -> u32 {
        self.shared
            .load_at_byte((state << 2) & ((C::TABLE - 1) << 2))
    }

    /// The state after an entry, before renormalisation.
    #[inline(always)]
    fn advance(state: u32, entry: u32) -> u32 {
        dp2a_lo_u32_u32((state >> C::BITS) + 0x10000, entry, 0)
    }

    /// Makes the first lookups; before the first group, when the table is there.
    #[inline(always)]
    pub(crate) fn begin(&mut self) {
        self.entries = self.states.map(|state| self.lookup(state));
    }

    /// The next group's two table entries. A warp operation.
    #[inline(always)]
    pub(crate) fn group(&mut self) -> (u32, u32) {
        let mut window = shf_l_wrap(self.low, self.high, self.count);
        let [first, second] = self.entries;
        let mut a = Self::advance(self.states[0], first);
        let mut b = Self::advance(self.states[1], second);
        C::renormalise_shift(&mut a, &mut window, &mut self.count, self.one);
        C::renormalise(&mut b, window, &mut self.count, self.one);
        self.states = [a, b];
        self.entries = [self.lookup(a), self.lookup(b)];
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

    /// After a job's last group: counts a fault if a lane does not end in the states where encoders
    /// start, and leaves the ring to the next job. A warp operation.
    #[inline(always)]
    pub(crate) fn close(self, faults: Slice) {
        cp_async_wait::<0>();
        warp::sync_warp();
        fault(warp::any(self.states != [C::TABLE; STATES]), faults);
    }
}
