//! A decoder written from `docs/format.md` alone, section by section. It shares no code with the
//! library, is slow, panics at whatever the page says a reader must refuse, and judges the golden
//! files.

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

/// A little-endian number.
fn num(b: &[u8], at: usize, size: usize) -> usize {
    let digits = b[at..at + size].iter().rev();
    digits.fold(0, |n, d| n << 8 | *d as usize)
}

fn zero(b: &[u8], from: usize, to: usize) {
    assert!(b[from..to].iter().all(|x| *x == 0), "reserved or padding");
}

/// Skips padding.
fn skip(b: &[u8], at: usize, align: usize) -> usize {
    zero(b, at, at.next_multiple_of(align));
    at.next_multiple_of(align)
}

fn hash(b: &[u8]) -> Vec<u8> {
    blake3::hash(b).as_bytes().to_vec()
}

/// Section 2, tables: whether over triples, and the frequencies.
type Table = (bool, Vec<usize>);

/// Section 2. What comes out: for each expert its three matrices' packed bytes and scales.
fn decode_archive(b: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(&b[..8], b"ANSX\r\n\x1a\n");
    assert_eq!(num(b, 8, 4), 0, "version");
    assert_eq!(num(b, 12, 4), 256, "header length");
    assert_eq!(num(b, 16, 8), b.len(), "file length");
    let (hidden, inter, kind) = (num(b, 24, 4), num(b, 28, 4), num(b, 32, 1));
    for n in [hidden, inter] {
        assert!((1..=65536).contains(&n) && n % [2, 64][kind] == 0, "size");
    }
    assert!((4..=12).contains(&b[33]), "alignment");
    let align = 1 << b[33];
    zero(b, 34, 36);
    let (layers, experts, tables) = (num(b, 36, 4), num(b, 40, 4), num(b, 44, 4));
    assert!(layers > 0 && experts > 0 && tables < 65535);
    zero(b, 80, 192);

    let mut at = 256;
    assert_eq!(num(b, 48, 8), at, "offset of tables");
    let mut table = vec![];
    for _ in 0..tables {
        let (n, sum) = [(256, 4096), (4096, 32768)][num(b, at, 1)];
        zero(b, at + 1, at + 4);
        assert_eq!(num(b, at + 4, 4), n, "number of frequencies");
        zero(b, at + 8, at + 16);
        let f: Vec<usize> = (0..n).map(|s| num(b, at + 16 + s, 1)).collect();
        assert_eq!(f.iter().sum::<usize>(), sum, "sum of frequencies");
        table.push((b[at] == 1, f));
        at += 16 + n;
    }
    assert_eq!(num(b, 56, 8), at, "offset of layers");
    let mut layer = vec![];
    for i in 0..layers {
        let at = at + 16 * i;
        layer.push(num(b, at, 4));
        assert!(i == 0 || layer[i] > layer[i - 1], "layer");
        for id in [num(b, at + 4, 2), num(b, at + 6, 2)] {
            assert!(id < tables || id == 65535, "table of a layer");
        }
        zero(b, at + 8, at + 16);
    }
    let index = at + 16 * layers;
    assert_eq!(num(b, 64, 8), index, "offset of index");
    let end = index + 48 * layers * experts;
    let records = skip(b, end, align);
    assert_eq!(num(b, 72, 8), records, "offset of records");
    let mut before = b[..records].to_vec();
    before[224..256].fill(0);
    assert_eq!(b[224..256], hash(&before), "digest");

    // The fingerprint is section 5.
    let mut print = b"ansatz experts 0".to_vec();
    for n in [hidden, inter, kind, layers, experts] {
        print.extend((n as u32).to_le_bytes());
    }
    for n in layer {
        print.extend((n as u32).to_le_bytes());
    }
    let mut out: Vec<Vec<u8>> = vec![];
    let mut next = records;
    for i in 0..layers * experts {
        let entry = index + 48 * i;
        let ids = at + 16 * (i / experts) + 4;
        let same = (0..i).find(|j| num(b, index + 48 * j, 8) == num(b, entry, 8));
        if let Some(j) = same {
            let theirs = index + 48 * j;
            assert_eq!(b[theirs..theirs + 48], b[entry..entry + 48], "shared");
            let other = at + 16 * (j / experts) + 4;
            assert_eq!(b[other..other + 4], b[ids..ids + 4], "tables of a shared");
            print.extend(&b[entry + 32..entry + 48]);
            out.push(out[j].clone());
            continue;
        }
        assert_eq!(num(b, entry, 8), next, "offset of a record");
        let len = num(b, entry + 8, 8);
        assert!(len.is_multiple_of(16) && len >= 96, "length of a record");
        let record = &b[next..next + len];
        assert_eq!(b[entry + 16..entry + 32], hash(record)[..16], "checksum");
        next = skip(b, next + len, align);
        let tables = [num(b, ids, 2), num(b, ids + 2, 2)].map(|id| table.get(id));
        let raw = decode_record(record, hidden, inter, kind, tables);
        assert_eq!(b[entry + 32..entry + 48], hash(&raw)[..16], "raw digest");
        print.extend(&b[entry + 32..entry + 48]);
        out.push(raw);
    }
    assert_eq!(next, b.len(), "file length");
    assert_eq!(b[192..224], hash(&print), "fingerprint");
    out
}

/// Section 3.
fn decode_record(
    b: &[u8],
    hidden: usize,
    inter: usize,
    kind: usize,
    tables: [Option<&Table>; 2],
) -> Vec<u8> {
    let mut out = vec![];
    let mut at = 96;
    for m in 0..3 {
        let head = &b[32 * m..32 * m + 32];
        let (rows, cols) = [(inter, hidden), (inter, hidden), (hidden, inter)][m];
        let (codec, format) = (num(head, 0, 1), num(head, 1, 1));
        assert!(codec < 3 && format < 2, "codec, scale format");
        zero(head, 2, 4);
        assert_eq!((num(head, 8, 4), num(head, 12, 4)), (rows, cols));
        let (blocks, len) = (num(head, 4, 4), num(head, 20, 4));
        let mut offsets = vec![];
        if codec == 0 {
            assert_eq!((num(head, 24, 4), blocks), (0, 0), "raw has no blocks");
            assert_eq!(len, rows * cols / 2, "stream length");
        } else {
            assert_eq!(num(head, 24, 4), at, "offset of block offsets");
            assert!(cols % 64 == 0 && cols <= 8192, "columns");
            assert!((1..=rows.div_ceil(codec + 1)).contains(&blocks), "blocks");
            let jobs = blocks * (cols / segment(cols).0);
            offsets.extend((0..=jobs).map(|i| 16 * num(b, at + 4 * i, 4)));
            assert!(offsets.windows(2).all(|w| w[1] >= w[0] + 512), "offsets");
            assert_eq!((offsets[0], offsets[jobs]), (0, len), "offsets");
            assert!(len >= rows * cols / 4, "stream length");
            at = skip(b, at + 4 * (jobs + 1), 16);
        }
        assert_eq!(num(head, 16, 4), at, "offset of stream");
        let stream = &b[at..at + len];
        if codec == 0 {
            out.extend(stream);
        } else {
            let table = tables[m / 2].expect("a table");
            assert_eq!(table.0, codec == 2, "symbols");
            out.extend(decode_matrix(stream, &offsets, blocks, rows, cols, table));
        }
        at = skip(b, at + len, 16);
        assert_eq!(num(head, 28, 4), at, "offset of scales");
        let scales = rows * [1, cols / 64][kind];
        for i in 0..scales {
            let scale = if format == 0 {
                f32::from_bits(num(b, at + 4 * i, 4) as u32)
            } else {
                let a = f32::from_bits((num(b, at + 2 * i, 2) as u32) << 16);
                (a / 7.0).max(1e-8)
            };
            assert!(scale.is_finite() && scale.is_sign_positive(), "scales");
            out.extend(scale.to_le_bytes());
        }
        at = skip(b, at + scales * [4, 2][format], 16);
    }
    assert_eq!(at, b.len(), "length of a record");
    out
}

/// Section 4, geometry: columns of a segment and of a fold.
fn segment(cols: usize) -> (usize, usize) {
    let mut fold = 2048;
    while !cols.is_multiple_of(fold) {
        fold /= 2;
    }
    (if cols <= 2048 { cols } else { fold }, fold)
}

/// Section 4: a coded matrix to its packed bytes.
fn decode_matrix(
    stream: &[u8],
    offsets: &[usize],
    blocks: usize,
    rows: usize,
    cols: usize,
    (triples, f): &Table,
) -> Vec<u8> {
    let (seg_cols, fold) = segment(cols);
    let segs = cols / seg_cols;
    let (height, m) = if *triples { (3, 15) } else { (2, 12) };
    let groups = rows.div_ceil(height);
    let low = 1u64 << m;
    let mut slots = vec![]; // slot -> (symbol, slot - c[s])
    for (s, f) in f.iter().enumerate() {
        slots.extend((0..*f as u64).map(|b| (s, b)));
    }
    let mut nibbles = vec![vec![0u8; cols]; groups * height];
    for job in 0..blocks * segs {
        let (block, seg) = (job / segs, job % segs);
        let b = &stream[offsets[job]..offsets[job + 1]];
        let word = |i: usize| b.get(4 * i..4 * i + 4).map_or(0, |w| num(w, 0, 4) as u64);
        let mut x: Vec<u64> = (0..64).map(word).collect();
        let mut window: Vec<u64> = (0..32).map(|l| word(64 + l) << 32 | word(96 + l)).collect();
        let mut c = [0u32; 32];
        let mut next = 128;
        assert!(x.iter().all(|x| (low..low << 16).contains(x)), "states");
        for t in block * groups / blocks..(block + 1) * groups / blocks {
            for pair in 0..seg_cols / 64 {
                for l in 0..32 {
                    let own = fold / 32; // columns of a lane in a round
                    let (round, within) = (2 * pair / own, 2 * pair % own);
                    let col = seg * seg_cols + round * fold + l * own + within;
                    let mut v = (window[l] << (c[l] % 32)) >> 32;
                    let old = c[l];
                    for k in 0..2 {
                        let x = &mut x[32 * k + l];
                        let (s, b) = slots[(*x % low) as usize];
                        if *triples {
                            nibbles[3 * t][col + k] = (s % 16) as u8;
                            nibbles[3 * t + 1][col + k] = (s / 16 % 16) as u8;
                            nibbles[3 * t + 2][col + k] = (s / 256) as u8;
                        } else {
                            nibbles[2 * t + k][col] = (s % 16) as u8;
                            nibbles[2 * t + k][col + 1] = (s / 16) as u8;
                        }
                        *x = f[s] as u64 * (*x >> m) + b;
                        if *x < low {
                            *x = *x << 16 | v >> 16;
                            v = v << 16 & 0xffff_ffff;
                            c[l] += 16;
                        }
                    }
                    if (c[l] ^ old) & 32 != 0 {
                        window[l] = window[l] << 32 | word(next);
                        next += 1;
                    }
                }
            }
        }
        assert!(x.iter().all(|x| *x == low), "final states");
    }
    let pairs = nibbles[..rows].iter().flat_map(|row| row.chunks(2));
    pairs.map(|n| n[0] | n[1] << 4).collect()
}

#[test]
fn good_files_decode_to_what_is_beside_them() {
    let good = [
        "pair-tiny",
        "pair-row",
        "triple-row",
        "pair-g64",
        "triple-segments",
        "shared",
        "raw",
    ];
    for name in good {
        let raw = std::fs::read(format!("{GOLDEN}/{name}.raw")).unwrap();
        let b = std::fs::read(format!("{GOLDEN}/{name}.ansx")).unwrap();
        assert!(decode_archive(&b).concat() == raw, "{name}");
    }
}

#[test]
fn bad_files_are_refused() {
    let list = std::fs::read_to_string(format!("{GOLDEN}/bad.txt")).unwrap();
    assert!(list.lines().count() > 10);
    for line in list.lines() {
        let name = line.split(": ").next().unwrap();
        let b = std::fs::read(format!("{GOLDEN}/{name}")).unwrap();
        assert!(
            std::panic::catch_unwind(|| decode_archive(&b)).is_err(),
            "{name}"
        );
    }
}

#[test]
fn the_page_s_example() {
    let page = std::fs::read_to_string(format!("{GOLDEN}/../../docs/format.md")).unwrap();
    let hex = page
        .split("```")
        .find_map(|s| s.strip_prefix("hex"))
        .unwrap();
    let digits: Vec<u32> = hex.chars().filter_map(|d| d.to_digit(16)).collect();
    let stream: Vec<u8> = digits.chunks(2).map(|d| (d[0] * 16 + d[1]) as u8).collect();
    let table = (false, vec![16; 256]);
    let out = decode_matrix(&stream, &[0, 512], 1, 4, 64, &table);
    let expected: Vec<u8> = (0..0x20)
        .chain((0xe0..=0xff).rev())
        .chain(0x20..0x40)
        .chain((0xc0..=0xdf).rev())
        .collect();
    assert_eq!(out, expected);
}
