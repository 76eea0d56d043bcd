//! `docs/format.md`: the golden files are what it says, by the library and by its slow decoder.

mod archives;
mod slow_decoder;

use std::borrow::Cow;
use std::path::Path;

use gpu::layout::Symbol;
use host::archive::{CodecChoice, HotSet, PackOptions, SymbolChoice, pack};
use host::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

use archives::*;
use slow_decoder::{decode_archive, decode_plane3, decode_rans, num};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

#[test]
fn good_files_decode_to_what_is_beside_them() {
    let files = std::fs::read_dir(GOLDEN)
        .unwrap()
        .map(|f| f.unwrap().path());
    let good: Vec<_> = files.filter(|f| f.extension().unwrap() == "raw").collect();
    assert!(good.len() >= 8);
    for raw in good {
        let b = std::fs::read(raw.with_extension("ansx")).unwrap();
        assert!(
            decode_archive(&b).concat() == std::fs::read(&raw).unwrap(),
            "{raw:?}"
        );
    }
}

#[test]
fn bad_files_are_refused() {
    let list = std::fs::read_to_string(format!("{GOLDEN}/bad.txt")).unwrap();
    assert!(list.lines().count() > 20);
    for line in list.lines() {
        let name = line.split(": ").next().unwrap();
        let b = std::fs::read(format!("{GOLDEN}/{name}")).unwrap();
        let decoded = std::panic::catch_unwind(|| decode_archive(&b));
        assert!(decoded.is_err(), "{name}");
    }
}

#[test]
fn the_page_s_examples() {
    let page = std::fs::read_to_string(format!("{GOLDEN}/../../docs/format.md")).unwrap();
    let hex = page.split("```").filter_map(|s| s.strip_prefix("hex"));
    let examples = hex.map(|hex| {
        let digits: Vec<u32> = hex.chars().filter_map(|d| d.to_digit(16)).collect();
        digits.chunks(2).map(|d| (d[0] * 16 + d[1]) as u8).collect()
    });
    let examples: Vec<Vec<u8>> = examples.collect();
    let out = decode_rans(&examples[0], &[0, 32], [1, 4, 64], &(false, vec![16; 256]));
    let expected: Vec<u8> = (0..0x20)
        .chain((0xe0..=0xff).rev())
        .chain(0x20..0x40)
        .chain((0xc0..=0xdf).rev())
        .collect();
    assert_eq!(out, expected);

    let (header, rest) = examples[1].split_at(16);
    let header: Vec<usize> = (0..4).map(|i| num(header, 4 * i, 4)).collect();
    let (row, rest) = rest.split_at(12);
    let (other, lists) = rest.split_at(12);
    let mut stream = vec![0; 12288];
    for place in 0..3072 {
        let (quad, lane, j) = (place / 128, place / 4 % 32, place % 4);
        let word = quad % 3 * 4 + j;
        let from = if quad < 3 && lane == 0 && word < 3 {
            row
        } else {
            other
        };
        stream[4 * place..4 * place + 4].copy_from_slice(&from[word % 3 * 4..][..4]);
    }
    stream.extend(lists);
    let low: Vec<u8> = (0..8).map(|i| 0x10 + 0x22 * i).collect();
    let expected = [low, vec![0x88; 24]].concat();
    assert_eq!(decode_plane3(&stream, &header, 1, 64), expected);
}

/// Experts of small integers and bf16 scales: the same on every machine.
fn dice(shape: ExpertShape, layers: &[u32], experts: usize) -> Memory {
    let mut r = Random(1789);
    Memory::new(shape, layers, experts, |kind, (rows, cols)| {
        let flat = kind == MatrixKind::Up && rows == 64;
        let mut nibble = || match (r.next(), flat) {
            (x, true) => (x >> 60) as u8,
            (x, false) => (2 + (x >> 62) + (x >> 60) % 4 + (x >> 58) % 4 + (x >> 56) % 4) as u8,
        };
        let packed = (0..rows * cols / 2)
            .map(|_| nibble() | nibble() << 4)
            .collect();
        let n = shape.scales.count(rows, cols) as u32;
        // The up matrix's are no scales of bf16 weights.
        let odd = u32::from(kind == MatrixKind::Up);
        RawMatrix {
            packed: Cow::Owned(packed),
            scales: (0..n)
                .map(|i| f32::from_bits(0x3c00_0000 + (i % 97) * 0x1_0000 + odd) / 7.0)
                .collect(),
        }
    })
}

/// The good golden files, from their sources.
fn golden_sources() -> Vec<(&'static str, Memory, PackOptions)> {
    let pair = SymbolChoice::Always(Symbol::Pair);
    let triple = SymbolChoice::Always(Symbol::Triple);
    let blocks = |mut o: PackOptions, n| {
        o.block_nibbles = Some(n);
        o
    };
    vec![
        (
            "pair-tiny",
            dice(shape(64, 64, ScaleKind::Row), &[1], 1),
            options(pair, CodecChoice::Rans),
        ),
        (
            "pair-row",
            dice(shape(192, 64, ScaleKind::Row), &[1, 3], 1),
            blocks(options(pair, CodecChoice::Rans), 4000),
        ),
        (
            "triple-row",
            dice(shape(128, 128, ScaleKind::Row), &[7], 1),
            blocks(options(triple, CodecChoice::Rans), 8000),
        ),
        (
            "pair-g64",
            dice(shape(128, 64, ScaleKind::G64), &[0], 2),
            options(pair, CodecChoice::Auto),
        ),
        (
            "triple-segments",
            dice(shape(4096, 2, ScaleKind::Row), &[2], 1),
            options(triple, CodecChoice::Rans),
        ),
        (
            "shared",
            dice(shape(64, 64, ScaleKind::Row), &[1, 3], 2).repeated(3),
            options(pair, CodecChoice::Rans),
        ),
        (
            "plane3",
            dice(shape(2048, 34, ScaleKind::Row), &[4], 1),
            options(pair, CodecChoice::Plane3),
        ),
        (
            "mixed",
            dice(shape(64, 2, ScaleKind::Row), &[2], 2),
            PackOptions {
                hot: HotSet::from_iter([(2, 1)]),
                ..options(pair, CodecChoice::Rans)
            },
        ),
        (
            "raw",
            dice(shape(64, 64, ScaleKind::Row), &[5], 1),
            options(pair, CodecChoice::Raw),
        ),
    ]
}

fn set(b: &mut [u8], at: usize, bytes: &[u8]) {
    b[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The bad golden files made from `shared`, whose last entry shares the first one's record.
fn golden_bad_shared(good: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let (layers, index) = (u64_at(good, 56) as usize, u64_at(good, 64) as usize);
    let last = index + 3 * 48;
    assert_eq!(u64_at(good, last), u64_at(good, index));
    let make = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut b = good.to_vec();
        change(&mut b);
        seal(&mut b);
        b
    };
    vec![
        ("bad-shared-length.ansx", make(&|b| b[last + 8] ^= 16)),
        ("bad-shared-checksum.ansx", make(&|b| b[last + 16] ^= 1)),
        ("bad-shared-digest.ansx", make(&|b| b[last + 32] ^= 1)),
        (
            "bad-shared-tables.ansx",
            make(&|b| set(b, layers + 16 + 6, &[255, 255])),
        ),
        ("bad-shared-offset.ansx", make(&|b| b[last] ^= 16)),
    ]
}

/// The bad golden files, made from `pair-tiny`.
fn golden_bad(good: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let index = u64_at(good, 64) as usize;
    let record = u64_at(good, index) as usize;
    let field =
        |at: usize| u32::from_le_bytes(good[record + at..][..4].try_into().unwrap()) as usize;
    let (stream, offsets, scales) = (record + field(16), record + field(24), record + field(28));
    let make = |signed: bool, change: &dyn Fn(&mut Vec<u8>)| {
        let mut b = good.to_vec();
        change(&mut b);
        if signed {
            sign(&mut b);
        }
        b
    };
    vec![
        ("bad-magic.ansx", make(false, &|b| b[4] = 10)),
        ("bad-version.ansx", make(true, &|b| b[8] = 9)),
        ("bad-version-0.ansx", make(true, &|b| b[8] = 0)),
        ("bad-reserved.ansx", make(true, &|b| b[100] = 1)),
        ("bad-digest.ansx", make(false, &|b| b[index + 17] ^= 1)),
        ("bad-fingerprint.ansx", make(true, &|b| b[192] ^= 1)),
        (
            "bad-table-sum.ansx",
            make(true, &|b| b[256 + 16 + 100] += 1),
        ),
        ("bad-index.ansx", make(true, &|b| b[index] += 16)),
        ("bad-cut.ansx", make(false, &|b| b.truncate(b.len() - 700))),
        ("bad-checksum.ansx", make(false, &|b| b[stream + 500] ^= 4)),
        ("bad-codec.ansx", make(true, &|b| b[record] = 7)),
        (
            "bad-blocks.ansx",
            make(true, &|b| set(b, record + 4, &[0; 4])),
        ),
        ("bad-rows.ansx", make(true, &|b| b[record + 8] ^= 1)),
        ("bad-table.ansx", make(true, &|b| b[record + 2] = 1)),
        ("bad-symbols.ansx", make(true, &|b| b[record] = 2)),
        ("bad-block-offset.ansx", make(true, &|b| b[offsets + 4] = 0)),
        (
            "bad-initial-state.ansx",
            make(true, &|b| b[stream + 3] = 0x10),
        ),
        (
            "bad-final-state.ansx",
            make(true, &|b| b[stream + 600] ^= 4),
        ),
        (
            "bad-scale.ansx",
            make(true, &|b| set(b, scales, &0x7f80u16.to_le_bytes())),
        ),
        ("bad-padding.ansx", make(true, &|b| b[offsets + 4 * 2] = 1)),
    ]
}

/// The bad golden files made from `mixed`, whose second expert is in plane3.
fn golden_bad_plane3(good: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let index = u64_at(good, 64) as usize;
    let record = u64_at(good, index + INDEX) as usize;
    let word = |at: usize| u32::from_le_bytes(good[at..at + 4].try_into().unwrap()) as usize;
    assert_eq!(good[record], 3);
    let (stream, header) = (record + word(record + 16), record + word(record + 24));
    let low = stream + 12288;
    let high = low + 16 * (word(header + 4) & 0xffff);
    let end = (low..high).rfind(|at| good[*at] != 0).unwrap();
    assert_eq!(good[high + 15], 255);
    let make = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut b = good.to_vec();
        change(&mut b);
        sign(&mut b);
        b
    };
    vec![
        ("bad-plane3-blocks.ansx", make(&|b| b[record + 4] = 2)),
        (
            "bad-plane3-table.ansx",
            make(&|b| set(b, record + 2, &[0; 2])),
        ),
        ("bad-plane3-begin.ansx", make(&|b| b[header] = 1)),
        (
            "bad-plane3-no-list.ansx",
            make(&|b| set(b, header + 4, &[0; 4])),
        ),
        ("bad-plane3-end.ansx", make(&|b| b[header + 8] ^= 1)),
        ("bad-plane3-closing.ansx", make(&|b| b[header + 12] = 1)),
        ("bad-plane3-list-end.ansx", make(&|b| b[end] += 1)),
        ("bad-plane3-list-fill.ansx", make(&|b| b[end + 1] = 1)),
        ("bad-plane3-code-n.ansx", make(&|b| b[low] += 1)),
        ("bad-plane3-code-p.ansx", make(&|b| b[high + 15] = 0)),
    ]
}

/// `pair-g64` with the codec of its first matrix changed.
fn plane3_g64(good: &[u8]) -> Vec<u8> {
    let mut b = good.to_vec();
    let record = u64_at(good, u64_at(good, 64) as usize) as usize;
    b[record] = 3;
    set(&mut b, record + 2, &[255; 2]);
    sign(&mut b);
    b
}

fn raw_of(source: &Memory) -> Vec<u8> {
    let matrices = source.experts.iter().flatten();
    matrices
        .flat_map(|m| {
            let scales = m.scales.iter().flat_map(|s| s.to_le_bytes());
            m.packed.iter().copied().chain(scales).collect::<Vec<u8>>()
        })
        .collect()
}

/// The files in `tests/golden` are what this version writes, reads and says.
///
/// `ANSATZ_WRITE_GOLDEN=1` writes them anew: only for a new version of the format.
#[test]
fn golden_files() {
    let write = std::env::var_os("ANSATZ_WRITE_GOLDEN").is_some();
    let dir = tempfile::tempdir().unwrap();
    for (name, source, o) in golden_sources() {
        let path = dir.path().join(name);
        pack(&source, &o, &path, |_| (), || false).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = Path::new(GOLDEN).join(format!("{name}.ansx"));
        if write {
            std::fs::write(&file, &bytes).unwrap();
            std::fs::write(file.with_extension("raw"), raw_of(&source)).unwrap();
        }
        assert!(
            std::fs::read(&file).unwrap() == bytes,
            "{name} packs to other bytes"
        );
        assert!(std::fs::read(file.with_extension("raw")).unwrap() == raw_of(&source));
        verified(&source, &file);
    }
    let good = std::fs::read(Path::new(GOLDEN).join("pair-tiny.ansx")).unwrap();
    let shared = std::fs::read(Path::new(GOLDEN).join("shared.ansx")).unwrap();
    let mixed = std::fs::read(Path::new(GOLDEN).join("mixed.ansx")).unwrap();
    let g64 = std::fs::read(Path::new(GOLDEN).join("pair-g64.ansx")).unwrap();
    let mut messages = String::new();
    for (name, bytes) in golden_bad(&good)
        .into_iter()
        .chain(golden_bad_shared(&shared))
        .chain(golden_bad_plane3(&mixed))
        .chain([("bad-plane3-g64.ansx", plane3_g64(&g64))])
    {
        let file = Path::new(GOLDEN).join(name);
        if write {
            std::fs::write(&file, &bytes).unwrap();
        }
        assert!(std::fs::read(&file).unwrap() == bytes, "{name}");
        let message = judge(&dir.path().join(name), &bytes).expect_err(name);
        let message = message.split_once(": ").unwrap().1;
        messages.push_str(&format!("{name}: {message}\n"));
    }
    let list = Path::new(GOLDEN).join("bad.txt");
    if write {
        std::fs::write(&list, &messages).unwrap();
    }
    let expected = std::fs::read_to_string(&list).unwrap();
    for (found, expected) in messages.lines().zip(expected.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(messages.lines().count(), expected.lines().count());
}
