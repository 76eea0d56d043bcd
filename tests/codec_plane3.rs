//! plane3: every decoder gives back what was coded, and damage is a typed error.

use gpu::plane3::{Layout, PLANE_BYTES, POSITIONS, SKIP, UNIT, is_high, is_low};
use host::codec::plane3::{Coded, Encoded, ListFault, encode};
use host::codec::{Arm, CodecError};
use proptest::prelude::*;

/// xorshift64*.
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
    /// Bell-shaped around 8, of the width that weights have in rows of 6,144.
    Gaussian,
    /// All nibbles alike.
    Uniform,
    /// One kind of exception only, or none.
    Always(u8),
    /// An exception now and then, so that gaps are long.
    Rare,
}

fn data(r: &mut Random, kind: Data, bytes: usize) -> Vec<u8> {
    let mut nibble = || match kind {
        Data::Gaussian => (r.normal() * 1.85 + 8.0).round().clamp(0.0, 15.0) as u8,
        Data::Uniform => (r.next() >> 60) as u8,
        Data::Always(n) => n,
        Data::Rare if r.next() >> 54 == 0 => (r.next() >> 60) as u8,
        Data::Rare => 7,
    };
    (0..bytes).map(|_| nibble() | nibble() << 4).collect()
}

fn arms() -> impl Iterator<Item = Arm> {
    Arm::ALL.into_iter().filter(|a| a.available())
}

fn coded(seed: u64, kind: Data, rows: usize, cols: usize) -> (Vec<u8>, Encoded) {
    let packed = data(&mut Random(seed | 1), kind, rows * cols / 2);
    let encoded = encode(&packed, &Layout::new(rows, cols).unwrap()).unwrap();
    (packed, encoded)
}

/// Decodes whole, by blocks and by jobs; all must be the same.
fn decode(arm: Arm, view: &Coded<'_>) -> Result<Vec<u8>, CodecError> {
    let (layout, stride) = (*view.layout(), view.row_bytes());
    let mut whole = vec![0x5a; layout.rows * stride];
    view.decode(arm, &mut whole)?;
    for block in [0, layout.blocks() - 1] {
        let rows = view.block_rows(block);
        let expected = &whole[rows.start * stride..rows.end * stride];
        let mut out = vec![0xa5; rows.len() * stride];
        view.decode_block(arm, block, &mut out)?;
        assert!(out == expected);
        // A job into rows that are further apart, with a guard behind each.
        let (seg, width) = (layout.segs() - 1, layout.seg_cols() / 2);
        let mut out = vec![0xa5; rows.len() * (width + 5)];
        view.decode_job(arm, block, seg, &mut out, width + 5)?;
        for (row, expected) in out.chunks(width + 5).zip(expected.chunks(stride)) {
            assert!(row[..width] == expected[seg * width..]);
            assert!(row[width..] == [0xa5; 5]);
        }
    }
    Ok(whole)
}

const KINDS: [Data; 8] = [
    Data::Gaussian,
    Data::Uniform,
    Data::Always(0),
    Data::Always(4),
    Data::Always(8),
    Data::Always(13),
    Data::Always(15),
    Data::Rare,
];

#[test]
fn every_shape_and_kind() {
    for cols in [64, 128, 192, 256, 384, 512, 1024, 1536, 2048, 6144, 8192] {
        for (i, rows) in [1, 2, 31, 32, 33, 65].into_iter().enumerate() {
            let kind = KINDS[(cols / 64 + i) % KINDS.len()];
            let (packed, encoded) = coded((rows * cols) as u64, kind, rows, cols);
            let view = encoded.view().unwrap();
            for arm in arms() {
                assert!(
                    decode(arm, &view).as_ref() == Ok(&packed),
                    "{arm:?} {rows}x{cols} {kind:?}"
                );
            }
            // From bytes as a record has them.
            let headers: Vec<u8> = encoded
                .headers
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .collect();
            let view = Coded::new(encoded.layout, &headers, &encoded.stream).unwrap();
            assert!(decode(Arm::best(), &view) == Ok(packed));
        }
    }
    for kind in KINDS {
        let (packed, encoded) = coded(3, kind, 600, 64);
        for arm in arms() {
            assert!(decode(arm, &encoded.view().unwrap()).as_ref() == Ok(&packed));
        }
    }
}

/// The ratio follows from the nibbles: planes of 3/8, a byte an exception, skips, and filling.
#[test]
fn size_of_streams() {
    let (packed, encoded) = coded(5, Data::Gaussian, 256, 6144);
    let nibbles = packed.iter().flat_map(|b| [b & 15, b >> 4]);
    let exceptions = nibbles.filter(|n| is_low(*n) || is_high(*n)).count();
    let jobs = encoded.layout.jobs();
    let planes = jobs * PLANE_BYTES;
    let lists = encoded.stream.len() - planes;
    assert!(lists > exceptions + jobs);
    // Every skip goes 255 positions, both lists are filled, N has an end.
    assert!(lists <= exceptions + jobs * (2 * (POSITIONS / 255) + 1 + 2 * (UNIT - 1)));
    assert_eq!(encoded.bytes(), encoded.stream.len() + 8 * (jobs + 1));
}

/// Where a job's lists are: N, then P.
fn lists(encoded: &Encoded, job: usize) -> [std::ops::Range<usize>; 2] {
    let start = UNIT * encoded.headers[2 * job] as usize + PLANE_BYTES;
    let lengths = encoded.headers[2 * job + 1] as usize;
    let middle = start + UNIT * (lengths & 0xffff);
    [start..middle, middle..middle + UNIT * (lengths >> 16)]
}

/// The error of every arm, which must be one.
fn fault(encoded: &Encoded) -> CodecError {
    let view = encoded.view().unwrap();
    let errors: Vec<CodecError> = arms().map(|a| decode(a, &view).unwrap_err()).collect();
    assert!(errors.iter().all(|e| *e == errors[0]), "{errors:?}");
    assert!(!errors[0].to_string().is_empty());
    errors[0].clone()
}

#[test]
fn lists_that_are_none() {
    let (_, good) = coded(11, Data::Gaussian, 70, 2048);
    let job = 3;
    let [n, p] = lists(&good, job);
    let list = |c: char, f: ListFault| CodecError::List {
        block: 1,
        segment: 1,
        list: c,
        fault: f,
    };
    // N without an end: the bytes that follow are skips.
    let mut bad = good.clone();
    bad.stream[n.clone()].fill(SKIP);
    let found = n.len() * 255;
    assert_eq!(fault(&bad), list('N', ListFault::End { found }));
    // N that goes past its end.
    let mut bad = good.clone();
    let end = n.start
        + good.stream[n.clone()]
            .iter()
            .rposition(|b| *b != 0)
            .unwrap();
    bad.stream[end] += 1;
    let found = POSITIONS + 1;
    assert_eq!(fault(&bad), list('N', ListFault::End { found }));
    // Something in N's filling.
    let mut bad = good.clone();
    if end + 1 < n.end {
        bad.stream[n.end - 1] = 1;
        let found = POSITIONS;
        assert_eq!(fault(&bad), list('N', ListFault::End { found }));
    }
    // A position twice: its nibble is turned already.
    let mut bad = good.clone();
    bad.stream[n.start + 1] = 0;
    assert!(matches!(
        fault(&bad),
        CodecError::List {
            list: 'N',
            fault: ListFault::Code { nibble: 0..=4, .. },
            ..
        }
    ));
    // P past the job.
    let mut bad = good.clone();
    bad.stream[p.clone()].fill(SKIP - 1);
    assert!(matches!(fault(&bad), CodecError::List { list: 'P', .. }));
    let (_, mut bad) = coded(1, Data::Always(13), 32, 1024);
    let [_, p] = lists(&bad, 0);
    bad.stream[p.start + 1..p.start + 130].fill(SKIP);
    let position = 32768 + 127;
    let expected = ListFault::Past { position };
    bad.stream[p.start + 130] = 0;
    assert!(matches!(fault(&bad), CodecError::List { list: 'P', fault, .. } if fault == expected));
}

#[test]
fn headers_are_checked() {
    let (packed, good) = coded(2, Data::Gaussian, 40, 3072);
    let last = good.headers.len() - 1;
    for (i, value) in [
        (0, 1),
        (1, 0),
        (1, good.headers[1] + 1),
        (1, good.headers[1] + 0x1_0000),
        (1, good.headers[1] & 0xffff_0000),
        (1, u32::MAX),
        (2, u32::MAX),
        (2, good.headers[2] - 1),
        (last - 1, good.headers[last - 1] + 1),
        (last, 1),
    ] {
        let mut bad = good.clone();
        bad.headers[i] = value;
        assert!(
            matches!(bad.view(), Err(CodecError::Offset { .. })),
            "{i} {value}"
        );
    }
    for change in [-1isize, -16, 1, 16] {
        let mut bad = good.clone();
        let n = bad.stream.len().wrapping_add_signed(change);
        bad.stream.resize(n, 0);
        assert!(matches!(bad.view(), Err(CodecError::Offset { .. })));
    }
    let mut bad = good.clone();
    bad.headers.pop();
    assert!(matches!(bad.view(), Err(CodecError::Offset { .. })));
    let view = good.view().unwrap();
    let mut out = vec![0; packed.len() - 1];
    assert!(matches!(
        view.decode(Arm::best(), &mut out),
        Err(CodecError::Output { .. })
    ));
    assert!(matches!(
        encode(&packed[1..], &good.layout),
        Err(CodecError::Output { .. })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn round_trips(seed: u64, rows in 1usize..80, width in 1usize..=40, kind in 0usize..8) {
        let cols = 64 * width;
        let (packed, encoded) = coded(seed, KINDS[kind], rows, cols);
        let view = encoded.view().unwrap();
        for arm in arms() {
            prop_assert!(decode(arm, &view).as_ref() == Ok(&packed), "{:?} {}x{}", arm, rows, cols);
        }
    }

    /// Any bytes for a stream: no panic, all arms of one mind.
    #[test]
    fn damage(seed: u64, flips in 1usize..6, n in 1u32..6, p in 0u32..6, lists_only: bool) {
        let mut r = Random(seed | 1);
        let layout = Layout::new(9, 1024).unwrap();
        let (_, mut encoded) = coded(seed, Data::Rare, 9, 1024);
        if lists_only {
            for _ in 0..flips {
                let at = PLANE_BYTES + r.next() as usize % (encoded.stream.len() - PLANE_BYTES);
                encoded.stream[at] = (r.next() >> 56) as u8;
            }
        } else {
            let end = 768 + n + p;
            encoded.headers = vec![0, n | p << 16, end, 0];
            encoded.stream = (0..UNIT * end as usize).map(|_| (r.next() >> 56) as u8).collect();
        }
        prop_assert_eq!(encoded.layout, layout);
        let view = encoded.view().unwrap();
        let expected = decode(Arm::Reference, &view);
        for arm in arms() {
            prop_assert_eq!(decode(arm, &view), expected.clone());
        }
    }
}

/// Seconds that this thread has run.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// `cargo test --release --test codec_plane3 -- --ignored --nocapture speed`
#[test]
#[ignore = "a measurement: it prints rates and checks none"]
fn speed() {
    for (rows, cols, sigma) in [(2048, 6144, 1.85), (6144, 2048, 1.98)] {
        let mut r = Random(8);
        let mut nibble = || (r.normal() * sigma + 8.0).round().clamp(0.0, 15.0) as u8;
        let packed: Vec<u8> = (0..rows * cols / 2)
            .map(|_| nibble() | nibble() << 4)
            .collect();
        let rate = |start| packed.len() as f64 / (cpu_seconds() - start) / 1e9;
        let start = cpu_seconds();
        let coded = encode(&packed, &Layout::new(rows, cols).unwrap()).unwrap();
        println!(
            "{rows}x{cols}: ratio {:.4}, encode {:.3} GB/s",
            coded.bytes() as f64 / packed.len() as f64,
            rate(start)
        );
        let view = coded.view().unwrap();
        let mut out = vec![0; packed.len()];
        for arm in arms() {
            let mut rates: Vec<f64> = (0..11)
                .map(|_| {
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
                "{:10} median {:.3}, best {:.3} GB/s of packed int4",
                arm.name(),
                rates[5],
                rates[10]
            );
        }
    }
}
