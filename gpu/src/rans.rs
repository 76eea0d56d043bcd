//! rANS over nibble pairs or triples: constants, table entries and the decoder's step.
//!
//! Range asymmetric numeral systems (Duda, arXiv:1311.2540) with a static table of `M = 2^bits`
//! slots, frequencies of at most 255, state `x` in `[M, M * 2^16)` and 16-bit renormalisation.
//!
//! Table entry of slot `s` with symbol `v`, frequency `f`, `b = s - cdf[v]`:
//! `f | b << 8 | nibbles`, the nibbles as [`entry`] places them. Step: `e = table[x mod M]`,
//! `x = f * (x >> bits) + b`, and if `x < M` then `x = x << 16 | next 16 bits`.

use crate::layout::Symbol;

/// Largest frequency: `f` and `b` must fit a byte each.
pub const MAX_FREQUENCY: u32 = 255;

/// Table entry. `b` is the slot's distance from the symbol's first slot.
///
/// Pairs: nibbles in bytes 2 and 3. Triples: bits 16..20, 20..24, 24..28.
#[inline(always)]
pub const fn entry(symbol: Symbol, value: u32, frequency: u32, b: u32) -> u32 {
    let nibbles = match symbol {
        Symbol::Pair => (value & 15) << 16 | (value >> 4) << 24,
        Symbol::Triple => value << 16,
    };
    frequency | b << 8 | nibbles
}

/// Symbol of a table entry.
#[inline(always)]
pub const fn entry_value(symbol: Symbol, entry: u32) -> u32 {
    match symbol {
        Symbol::Pair => entry >> 16 & 15 | entry >> 20 & 0xf0,
        Symbol::Triple => entry >> 16,
    }
}

/// The state after a lookup gave `entry`, before renormalisation.
#[inline(always)]
pub const fn advance(state: u32, bits: u32, entry: u32) -> u32 {
    (entry & 0xff) * (state >> bits) + (entry >> 8 & 0xff)
}
