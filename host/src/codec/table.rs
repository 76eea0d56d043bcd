//! Static frequency tables: histograms, quantisation, the decoder's slots.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use gpu::layout::Symbol;
use gpu::rans::{MAX_FREQUENCY, entry};

use super::CodecError;

/// A frequency table: one frequency of 0 to 255 for each symbol, summing to `2^table_bits`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    symbol: Symbol,
    frequencies: Vec<u8>,
    first: Vec<u16>,
    entries: Vec<u32>,
    /// `fill[k - 1][prefix]`: the most frequent symbol whose first `k - 1` nibbles are `prefix`.
    fill: Vec<Vec<u16>>,
}

impl Table {
    /// A table of the given frequencies: [`Symbol::alphabet`] of them, which must sum to
    /// `2^`[`Symbol::table_bits`].
    pub fn new(symbol: Symbol, frequencies: Vec<u8>) -> Result<Self, CodecError> {
        if frequencies.len() != symbol.alphabet() {
            return Err(CodecError::TableLength {
                expected: symbol.alphabet(),
                found: frequencies.len(),
            });
        }
        let sum: u32 = frequencies.iter().map(|f| u32::from(*f)).sum();
        let slots = 1 << symbol.table_bits();
        if sum != slots {
            return Err(CodecError::TableSum {
                expected: slots,
                found: sum,
            });
        }
        let mut first = Vec::with_capacity(frequencies.len());
        let mut entries = Vec::with_capacity(slots as usize);
        for (value, f) in frequencies.iter().enumerate() {
            // The sum is at most 2^15, so that a first slot fits 16 bits.
            first.push(entries.len() as u16);
            for b in 0..u32::from(*f) {
                entries.push(entry(symbol, value as u32, u32::from(*f), b));
            }
        }
        let nibbles = symbol.alphabet().ilog2() / 4;
        let fill = (0..nibbles)
            .map(|known| {
                let mask = (1usize << (4 * known)) - 1;
                let mut best = vec![0usize; mask + 1];
                for (prefix, best) in best.iter_mut().enumerate() {
                    *best = prefix;
                }
                for (value, f) in frequencies.iter().enumerate() {
                    let best = &mut best[value & mask];
                    if *f > frequencies[*best] {
                        *best = value;
                    }
                }
                best.into_iter().map(|v| v as u16).collect()
            })
            .collect();
        Ok(Self {
            symbol,
            frequencies,
            first,
            entries,
            fill,
        })
    }

    /// The table that codes symbols of these counts in the fewest bits (see [`quantise`]).
    pub fn from_counts(symbol: Symbol, counts: &[u64]) -> Result<Self, CodecError> {
        Self::new(symbol, quantise(counts, symbol.table_bits()))
    }

    /// What a lookup yields.
    pub fn symbol(&self) -> Symbol {
        self.symbol
    }

    /// Frequency of each symbol.
    pub fn frequencies(&self) -> &[u8] {
        &self.frequencies
    }

    /// The decoder's `2^table_bits` slots, each a [`gpu::rans::entry`].
    pub fn entries(&self) -> &[u32] {
        &self.entries
    }

    /// Frequency and first slot of a symbol.
    #[inline(always)]
    pub(super) fn range(&self, value: u16) -> (u32, u32) {
        (
            u32::from(self.frequencies[value as usize]),
            u32::from(self.first[value as usize]),
        )
    }

    /// The cheapest symbol of which only the first `known` nibbles matter.
    #[inline(always)]
    pub(super) fn fill(&self, known: usize, prefix: u16) -> u16 {
        self.fill[known][prefix as usize]
    }

    /// Bits that symbols of these counts take, without stream overhead; infinite where a symbol
    /// that occurs has no frequency.
    pub fn cost(&self, counts: &[u64]) -> f64 {
        let bits = f64::from(self.symbol.table_bits());
        counts
            .iter()
            .zip(&self.frequencies)
            .filter(|(n, _)| **n > 0)
            .map(|(n, f)| *n as f64 * (bits - libm::log2(f64::from(*f))))
            .sum()
    }
}

/// Bits that symbols of these counts take at best with a static model: `-sum n log2(n / N)`.
pub fn entropy(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let all = libm::log2(total.max(1) as f64);
    counts
        .iter()
        .filter(|n| **n > 0)
        .map(|n| *n as f64 * (all - libm::log2(*n as f64)))
        .sum()
}

/// Counts of the single nibbles in packed bytes.
pub fn nibble_counts(packed: &[u8]) -> [u64; 16] {
    let mut counts = [0; 16];
    for (value, n) in byte_counts(packed).into_iter().enumerate() {
        counts[value & 15] += n;
        counts[value >> 4] += n;
    }
    counts
}

fn byte_counts(packed: &[u8]) -> [u64; 256] {
    // Four histograms: neighbouring equal bytes would wait for each other's increments.
    let mut counts = [[0u32; 256]; 4];
    let mut total = [0u64; 256];
    for part in packed.chunks(1 << 30) {
        let mut quads = part.chunks_exact(4);
        for quad in &mut quads {
            for (counts, b) in counts.iter_mut().zip(quad) {
                counts[*b as usize] += 1;
            }
        }
        for b in quads.remainder() {
            counts[0][*b as usize] += 1;
        }
        for counts in &mut counts {
            for (t, n) in total.iter_mut().zip(counts) {
                *t += u64::from(std::mem::take(n));
            }
        }
    }
    total
}

/// Counts how often a packed `[rows, cols]` matrix has each symbol, adding to `counts`
/// ([`Symbol::alphabet`] of them).
///
/// Of symbols that reach past the last row only some nibbles matter, and the encoder chooses the
/// rest; they count only where no symbol so far begins with those nibbles, so that one can be coded.
pub fn count_symbols(symbol: Symbol, packed: &[u8], rows: usize, cols: usize, counts: &mut [u64]) {
    assert_eq!(packed.len(), rows * cols / 2);
    assert_eq!(counts.len(), symbol.alphabet());
    match symbol {
        Symbol::Pair => {
            for (t, n) in counts.iter_mut().zip(byte_counts(packed)) {
                *t += n;
            }
        }
        Symbol::Triple => {
            let width = cols / 2;
            let mut groups = packed.chunks_exact(3 * width);
            for group in &mut groups {
                let (a, rest) = group.split_at(width);
                let (b, c) = rest.split_at(width);
                for ((a, b), c) in a.iter().zip(b).zip(c) {
                    let (a, b, c) = (usize::from(*a), usize::from(*b), usize::from(*c));
                    counts[(a & 15) | (b & 15) << 4 | (c & 15) << 8] += 1;
                    counts[a >> 4 | (b >> 4) << 4 | (c >> 4) << 8] += 1;
                }
            }
            // Once for each prefix of the partial triples: some symbol with it must be codable.
            let rest = groups.remainder();
            let mut seen = vec![false; symbol.alphabet()];
            for col in 0..if rest.is_empty() { 0 } else { width } {
                let a = usize::from(rest[col]);
                let b = rest.get(width + col).map_or(0, |b| usize::from(*b));
                seen[(a & 15) | (b & 15) << 4] = true;
                seen[a >> 4 | (b >> 4) << 4] = true;
            }
            let known = if rest.len() > width { 0xff } else { 0xf };
            for prefix in (0..=known).filter(|p| seen[*p]) {
                if counts
                    .iter()
                    .skip(prefix)
                    .step_by(known + 1)
                    .all(|n| *n == 0)
                {
                    counts[prefix] += 1;
                }
            }
        }
    }
}

/// Frequencies that minimise `sum n log2(M / f)` over all `f` that sum to `M = 2^bits` with
/// `1 <= f <= 255` for symbols that occur.
///
/// Greedy by marginal gain, which is optimal because each symbol's gain is concave in `f`. Where
/// 255 for each symbol that occurs does not reach `M`, symbols that do not occur share the rest.
pub fn quantise(counts: &[u64], bits: u32) -> Vec<u8> {
    struct Step {
        gain: f64,
        symbol: usize,
    }
    impl Ord for Step {
        fn cmp(&self, other: &Self) -> Ordering {
            (self.gain.total_cmp(&other.gain)).then(other.symbol.cmp(&self.symbol))
        }
    }
    impl PartialOrd for Step {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }
    impl PartialEq for Step {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other) == Ordering::Equal
        }
    }
    impl Eq for Step {}

    // libm's logarithm is the same on every machine, so that packing is deterministic.
    let gains: Vec<f64> = (0..MAX_FREQUENCY)
        .map(|f| libm::log2(f64::from(f + 1) / f64::from(f.max(1))))
        .collect();
    let mut frequencies: Vec<u8> = counts.iter().map(|n| u8::from(*n > 0)).collect();
    let mut left = (1u32 << bits) - frequencies.iter().map(|f| u32::from(*f)).sum::<u32>();
    let step = |symbol: usize, f: u8| Step {
        gain: counts[symbol] as f64 * gains[f as usize],
        symbol,
    };
    let mut heap: BinaryHeap<Step> = (0..counts.len())
        .filter(|s| counts[*s] > 0)
        .map(|s| step(s, 1))
        .collect();
    while left > 0
        && let Some(Step { symbol, .. }) = heap.pop()
    {
        let f = &mut frequencies[symbol];
        *f += 1;
        left -= 1;
        if *f < u8::MAX {
            heap.push(step(symbol, *f));
        }
    }
    for f in frequencies.iter_mut().filter(|f| **f == 0) {
        let take = left.min(MAX_FREQUENCY);
        *f = take as u8;
        left -= take;
    }
    frequencies
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits_of(f: &[u8], counts: &[u64], bits: u32) -> f64 {
        let t = Table {
            symbol: Symbol::Pair,
            frequencies: f.to_vec(),
            first: vec![],
            entries: vec![],
            fill: vec![],
        };
        assert_eq!(bits, 12);
        t.cost(counts)
    }

    #[test]
    fn no_single_move_of_a_slot_gains() {
        let mut counts = vec![0u64; 256];
        let mut x = 1u64;
        for (i, n) in counts.iter_mut().enumerate() {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            *n = if i % 7 == 0 { 0 } else { (x >> 40) >> (i % 20) };
        }
        let f = quantise(&counts, 12);
        assert_eq!(f.iter().map(|f| u32::from(*f)).sum::<u32>(), 4096);
        let best = bits_of(&f, &counts, 12);
        for a in 0..256 {
            for b in 0..256 {
                if a != b && f[a] > 1 && f[b] < 255 && counts[b] > 0 {
                    let mut g = f.clone();
                    g[a] -= 1;
                    g[b] += 1;
                    assert!(bits_of(&g, &counts, 12) >= best - 1e-6);
                }
            }
        }
    }

    #[test]
    fn a_single_symbol_still_fills_the_table() {
        for symbol in [Symbol::Pair, Symbol::Triple] {
            let mut counts = vec![0; symbol.alphabet()];
            counts[17] = 5;
            let t = Table::from_counts(symbol, &counts).unwrap();
            assert_eq!(t.frequencies()[17], 255);
            assert_eq!(t.entries().len(), 1 << symbol.table_bits());
        }
    }

    #[test]
    fn wrong_tables_are_refused() {
        assert!(matches!(
            Table::new(Symbol::Pair, vec![16; 255]),
            Err(CodecError::TableLength { .. })
        ));
        assert!(matches!(
            Table::new(Symbol::Pair, vec![17; 256]),
            Err(CodecError::TableSum { .. })
        ));
        assert!(Table::new(Symbol::Pair, vec![16; 256]).is_ok());
    }
}
