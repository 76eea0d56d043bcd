//! The codec: every decoder gives back what was coded, and damage is an error.

use gpu::layout::{Blocks, Folds, Symbol};
use host::codec::{
    Arm, CodecError, Encoded, JOB_BYTES, Table, count_symbols, encode, entropy, nibble_counts,
};
use proptest::prelude::*;

/// A small generator: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[derive(Clone, Copy, Debug)]
enum Data {
    /// Bell-shaped around 8, as weights are.
    Gaussian,
    /// All nibbles alike.
    Uniform,
    /// Almost always 8.
    Skewed,
    /// Always 3.
    Single,
}

fn data(r: &mut Random, kind: Data, bytes: usize) -> Vec<u8> {
    let mut nibble = || match kind {
        Data::Gaussian => (r.normal() * 2.2 + 8.0).round().clamp(0.0, 15.0) as u8,
        Data::Uniform => (r.next() >> 60) as u8,
        Data::Skewed if r.next() >> 56 == 0 => (r.next() >> 60) as u8,
        Data::Skewed => 8,
        Data::Single => 3,
    };
    (0..bytes).map(|_| nibble() | nibble() << 4).collect()
}

fn table_of(symbol: Symbol, packed: &[u8], rows: usize, cols: usize) -> Table {
    let mut counts = vec![0; symbol.alphabet()];
    count_symbols(symbol, packed, rows, cols, &mut counts);
    Table::from_counts(symbol, &counts).unwrap()
}

/// Decodes with one arm: whole, by blocks and by jobs; all must be the same.
fn decode(arm: Arm, coded: &Encoded, table: &Table) -> Result<Vec<u8>, CodecError> {
    let view = coded.view(table)?;
    let blocks = *view.blocks();
    let stride = view.row_bytes();
    let mut whole = vec![0x5a; blocks.rows * stride];
    let result = view.decode(arm, &mut whole);
    if result.is_ok() {
        for block in [0, blocks.blocks / 2, blocks.blocks - 1] {
            let rows = view.block_rows(block);
            let expected = &whole[rows.start * stride..rows.end * stride];
            let mut out = vec![0xa5; rows.len() * stride];
            view.decode_block(arm, block, &mut out)?;
            assert!(out == expected);
            // A job into rows that are further apart, with a guard behind each.
            let seg_bytes = blocks.folds.seg_cols() / 2;
            let seg = blocks.folds.segs() - 1;
            let apart = seg_bytes + 5;
            let mut out = vec![0xa5; rows.len() * apart];
            view.decode_job(arm, block, seg, &mut out, apart)?;
            for (row, expected) in out.chunks(apart).zip(expected.chunks(stride)) {
                assert!(row[..seg_bytes] == expected[seg * seg_bytes..]);
                assert!(row[seg_bytes..] == [0xa5; 5]);
            }
        }
    }
    result.map(|()| whole)
}

/// One test for each arm, over the same cases.
macro_rules! arms {
    ($($name:ident: $arm:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn edges_of_blocks() {
                every_shape($arm, Data::Gaussian);
            }

            #[test]
            fn kinds_of_data() {
                for kind in [Data::Uniform, Data::Skewed, Data::Single] {
                    for (rows, cols) in [(1, 64), (31, 192), (97, 256), (50, 2048), (8, 6144)] {
                        round_trip($arm, kind, rows, cols, None);
                    }
                }
            }

            #[test]
            fn odd_numbers_of_blocks() {
                for blocks in [1, 2, 3, 5, 16] {
                    round_trip($arm, Data::Gaussian, 48, 128, Some(blocks));
                    round_trip($arm, Data::Gaussian, 100, 1536, Some(blocks));
                }
            }

            #[test]
            fn damage_is_an_error_or_the_reference_s_result() {
                damage($arm);
            }
        }
    )*};
}

arms! {
    reference: Arm::Reference;
    portable: Arm::Portable;
    avx2: Arm::Avx2;
    avx512: Arm::Avx512;
}

fn skip(arm: Arm) -> bool {
    if !arm.available() {
        eprintln!("this processor has no {}", arm.name());
    }
    !arm.available()
}

fn every_shape(arm: Arm, kind: Data) {
    for cols in [64, 128, 192, 256, 384, 1536, 2048, 6144, 8192] {
        for rows in [1, 2, 3, 31, 32, 33, 34, 47, 48, 49, 95, 96, 97] {
            round_trip(arm, kind, rows, cols, None);
        }
    }
    round_trip(arm, kind, 6144, 64, None);
    round_trip(arm, kind, 6144, 256, None);
}

fn round_trip(arm: Arm, kind: Data, rows: usize, cols: usize, blocks: Option<usize>) {
    if skip(arm) {
        return;
    }
    let mut r = Random(0x9e37_79b9 ^ (rows * 8209 + cols) as u64);
    let packed = data(&mut r, kind, rows * cols / 2);
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let table = table_of(symbol, &packed, rows, cols);
        let blocks = match blocks {
            None => Blocks::new(rows, cols, symbol).unwrap(),
            Some(n) => Blocks::with_blocks(rows, Folds::new(cols).unwrap(), symbol, n).unwrap(),
        };
        let coded = encode(&packed, &blocks, &table).unwrap();
        let out = decode(arm, &coded, &table);
        assert!(
            out.as_ref() == Ok(&packed),
            "{arm:?} {symbol:?} {rows}x{cols} {kind:?}: {:?}",
            out.err()
        );
    }
}

/// Flips, zeroes and shuffles bytes of streams: each arm must end, with the reference's verdict.
fn damage(arm: Arm) {
    if skip(arm) {
        return;
    }
    let mut r = Random(4711);
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let (rows, cols) = (20, 256);
        let packed = data(&mut r, Data::Gaussian, rows * cols / 2);
        let table = table_of(symbol, &packed, rows, cols);
        let folds = Folds::new(cols).unwrap();
        let blocks = Blocks::with_blocks(rows, folds, symbol, 3).unwrap();
        let good = encode(&packed, &blocks, &table).unwrap();
        let mut caught = 0;
        for _ in 0..300 {
            let mut bad = good.clone();
            let n = bad.stream.len();
            for _ in 0..1 + r.next() % 3 {
                let at = r.next() as usize % n;
                match r.next() % 3 {
                    0 => bad.stream[at] ^= 1 << (r.next() % 8),
                    1 => bad.stream[at] = r.next() as u8,
                    _ => {
                        let to = r.next() as usize % n;
                        bad.stream.swap(at, to);
                    }
                }
            }
            let found = decode(arm, &bad, &table);
            assert_eq!(found, decode(Arm::Reference, &bad, &table));
            caught += usize::from(found.is_err());
        }
        // Bytes that no state depends on any more, padding among them, may change unseen here;
        // records have checksums.
        assert!(caught > 280, "{caught} of 300");
    }
}

#[test]
fn streams_stay_close_to_their_entropy() {
    let mut r = Random(5);
    let (rows, cols) = (480, 2048);
    let packed = data(&mut r, Data::Gaussian, rows * cols / 2);
    let bound = entropy(&nibble_counts(&packed)) / 8.0;
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let table = table_of(symbol, &packed, rows, cols);
        let blocks = Blocks::new(rows, cols, symbol).unwrap();
        let coded = encode(&packed, &blocks, &table).unwrap();
        let mut counts = vec![0; symbol.alphabet()];
        count_symbols(symbol, &packed, rows, cols, &mut counts);
        let cost = table.cost(&counts) / 8.0;
        assert!(cost >= entropy(&counts) / 8.0);
        // No code is shorter than its own model says; less than the 512 fixed bytes of each job
        // come on top.
        let size = coded.stream.len() as f64;
        assert!(size > cost, "{size} {cost}");
        assert!(
            size < cost + (JOB_BYTES * blocks.jobs()) as f64,
            "{size} {cost}"
        );
        assert!(size < 1.02 * bound, "{symbol:?}: {size} {bound}");
    }
}

/// The same symbols and probabilities through another implementation of rANS: its code is as long
/// as ours within what lanes and blocks cost.
#[test]
fn another_rans_needs_as_many_bits() {
    use constriction::stream::Decode;
    use constriction::stream::model::DefaultContiguousCategoricalEntropyModel as Model;
    use constriction::stream::stack::DefaultAnsCoder;

    let mut r = Random(6);
    let (rows, cols) = (48, 2048);
    let packed = data(&mut r, Data::Gaussian, rows * cols / 2);
    let table = table_of(Symbol::Pair, &packed, rows, cols);
    let probabilities: Vec<f64> = table
        .frequencies()
        .iter()
        .map(|f| f64::from(*f) / 4096.0)
        .collect();
    let model = Model::from_floating_point_probabilities_fast(&probabilities, None).unwrap();
    let mut coder = DefaultAnsCoder::new();
    let symbols = packed.iter().map(|b| usize::from(*b));
    coder
        .encode_iid_symbols_reverse(symbols.clone(), &model)
        .unwrap();
    let theirs = coder.num_valid_bits() as f64 / 8.0;
    let back: Vec<usize> = coder
        .decode_iid_symbols(packed.len(), &model)
        .map(Result::unwrap)
        .collect();
    assert!(symbols.eq(back));

    let folds = Folds::new(cols).unwrap();
    let blocks = Blocks::with_blocks(rows, folds, Symbol::Pair, 1).unwrap();
    assert_eq!(blocks.jobs(), 1);
    let ours = encode(&packed, &blocks, &table).unwrap().stream.len() as f64;
    // 64 states of 4 bytes, and at most 8 bytes a lane of words past its end.
    assert!(
        ours - theirs > -8.0 && ours - theirs < 512.0,
        "{ours} {theirs}"
    );
    // Of some 36,000 bytes.
    assert!((ours / theirs - 1.0).abs() < 0.01, "{ours} {theirs}");
}

#[test]
fn what_cannot_be_coded_is_an_error() {
    let table = table_of(Symbol::Pair, &[0x33; 64], 2, 64);
    let blocks = Blocks::new(2, 64, Symbol::Pair).unwrap();
    let mut packed = [0x33u8; 64];
    assert!(encode(&packed, &blocks, &table).is_ok());
    packed[63] = 0xff;
    assert_eq!(
        encode(&packed, &blocks, &table),
        Err(CodecError::NoFrequency { value: 0xff })
    );
    assert!(matches!(
        encode(&packed[1..], &blocks, &table),
        Err(CodecError::Output {
            expected: 64,
            found: 63
        })
    ));
    let blocks = Blocks::new(2, 64, Symbol::Triple).unwrap();
    assert!(matches!(
        encode(&packed, &blocks, &table),
        Err(CodecError::TableSymbol { .. })
    ));
}

#[test]
fn offsets_are_checked() {
    let packed = vec![0x87; 40 * 128];
    let table = table_of(Symbol::Pair, &packed, 40, 256);
    let folds = Folds::new(256).unwrap();
    let blocks = Blocks::with_blocks(40, folds, Symbol::Pair, 4).unwrap();
    let good = encode(&packed, &blocks, &table).unwrap();
    assert!(good.view(&table).is_ok());
    for (i, value) in [(0, 1), (1, 0), (2, u32::MAX), (4, 0), (4, u32::MAX)] {
        let mut bad = good.clone();
        bad.offsets[i] = value;
        assert!(
            matches!(bad.view(&table), Err(CodecError::Offset { .. })),
            "{i}"
        );
    }
    let mut bad = good.clone();
    bad.offsets.pop();
    assert!(bad.view(&table).is_err());
    let mut bad = good;
    bad.stream.truncate(bad.stream.len() - 16);
    assert!(bad.view(&table).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Any bytes for a stream: no panic, no endless loop, all arms of one mind.
    #[test]
    fn arbitrary_streams(bytes in prop::collection::vec(any::<u8>(), JOB_BYTES..2000), seed: u64, triple: bool) {
        let symbol = if triple { Symbol::Triple } else { Symbol::Pair };
        let mut r = Random(seed | 1);
        let packed = data(&mut r, Data::Gaussian, 9 * 64);
        let table = table_of(symbol, &packed, 9, 128);
        let blocks = Blocks::new(9, 128, symbol).unwrap();
        let mut stream = bytes;
        stream.truncate(stream.len() / 16 * 16);
        // States in range, so that decoding goes on.
        for state in stream[..128].as_chunks_mut::<4>().0 {
            let x = u32::from_le_bytes(*state) & 0x0fff_ffff | 1 << 20;
            *state = x.to_le_bytes();
        }
        let coded = Encoded { blocks, offsets: vec![0, (stream.len() / 16) as u32], stream };
        let expected = decode(Arm::Reference, &coded, &table);
        for arm in Arm::ALL.into_iter().filter(|a| a.available()) {
            prop_assert_eq!(decode(arm, &coded, &table), expected.clone());
        }
    }
}

/// Seconds that this thread has run.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// `cargo test --release --test codec -- --ignored --nocapture speed`
#[test]
#[ignore = "a measurement: it prints rates and checks none"]
fn speed() {
    let mut r = Random(8);
    let (rows, cols) = (2048, 6144);
    let packed = data(&mut r, Data::Gaussian, rows * cols / 2);
    let rate = |start| packed.len() as f64 / (cpu_seconds() - start) / 1e9;
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let table = table_of(symbol, &packed, rows, cols);
        let blocks = Blocks::new(rows, cols, symbol).unwrap();
        let start = cpu_seconds();
        let coded = encode(&packed, &blocks, &table).unwrap();
        println!("{symbol:?} encode {:.3} GB/s", rate(start));
        let view = coded.view(&table).unwrap();
        let mut out = vec![0; packed.len()];
        for arm in Arm::ALL.into_iter().filter(|a| a.available()) {
            let mut rates: Vec<f64> = (0..11)
                .map(|_| {
                    // Several at once: the clock ticks in milliseconds.
                    let start = cpu_seconds();
                    for _ in 0..10 {
                        view.decode(arm, &mut out).unwrap();
                    }
                    10.0 * rate(start)
                })
                .collect();
            assert!(out == packed);
            rates.sort_by(f64::total_cmp);
            println!(
                "{symbol:?} {:10} median {:.3}, best {:.3} GB/s of packed int4",
                arm.name(),
                rates[5],
                rates[10]
            );
        }
    }
}
