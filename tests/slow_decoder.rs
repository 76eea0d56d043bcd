//! A decoder written from `docs/format.md` alone, section by section. It shares no code with the
//! library, is slow, and panics at whatever the page says a reader must refuse.

/// A little-endian number.
pub fn num(b: &[u8], at: usize, size: usize) -> usize {
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
pub fn decode_archive(b: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(&b[..8], b"ANSX\r\n\x1a\n");
    assert_eq!(num(b, 8, 4), 1, "version");
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

    // The fingerprint is section 6.
    let mut print = b"ansatz experts 0".to_vec();
    for n in [hidden, inter, kind, layers, experts].iter().chain(&layer) {
        print.extend((*n as u32).to_le_bytes());
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
        let ids = [num(b, ids, 2), num(b, ids + 2, 2)];
        let raw = decode_record(record, [hidden, inter, kind], ids, &table);
        assert_eq!(b[entry + 32..entry + 48], hash(&raw)[..16], "raw digest");
        print.extend(&b[entry + 32..entry + 48]);
        out.push(raw);
    }
    assert_eq!(next, b.len(), "file length");
    assert_eq!(b[192..224], hash(&print), "fingerprint");
    out
}

/// Section 3.
fn decode_record(b: &[u8], shape: [usize; 3], ids: [usize; 2], tables: &[Table]) -> Vec<u8> {
    let [hidden, inter, kind] = shape;
    let mut out = vec![];
    let mut at = 96;
    for m in 0..3 {
        let head = &b[32 * m..32 * m + 32];
        let (rows, cols) = [(inter, hidden), (inter, hidden), (hidden, inter)][m];
        let (codec, format) = (num(head, 0, 1), num(head, 1, 1));
        assert!(codec < 4 && format < 2, "codec, scale format");
        assert_eq!((num(head, 8, 4), num(head, 12, 4)), (rows, cols));
        let (blocks, len) = (num(head, 4, 4), num(head, 20, 4));
        let coded = codec != 0;
        assert!(!coded || cols % 64 == 0 && cols <= 8192, "columns");
        let id = [65535, ids[m / 2], ids[m / 2], 65535][codec];
        assert_eq!(num(head, 2, 2), id, "table");
        let words = match codec {
            0 => 0,
            3 => 2 * (blocks * (cols / (32 * strips(cols))) + 1),
            _ => blocks * (cols / segment(cols).0) + 1,
        };
        assert_eq!(num(head, 24, 4), if coded { at } else { 0 });
        let offsets: Vec<usize> = (0..words).map(|i| num(b, at + 4 * i, 4)).collect();
        at = skip(b, at + 4 * words, 16);
        assert_eq!(num(head, 16, 4), at, "offset of stream");
        assert!(len >= rows * cols / 4, "stream length");
        let stream = &b[at..at + len];
        out.extend(match codec {
            0 => {
                assert_eq!((blocks, len), (0, rows * cols / 2), "blocks, stream length");
                stream.to_vec()
            }
            3 => {
                assert!(kind == 0 && blocks == rows.div_ceil(1024 / strips(cols)));
                decode_plane3(stream, &offsets, rows, cols)
            }
            _ => {
                assert_eq!(tables[id].0, codec == 2, "symbols");
                decode_rans(stream, &offsets, [blocks, rows, cols], &tables[id])
            }
        });
        at = skip(b, at + len, 16);
        assert_eq!(num(head, 28, 4), at, "offset of scales");
        let scales = rows * [1, cols / 64][kind];
        let size = [4, 2][format];
        for i in 0..scales {
            let a = f32::from_bits((num(b, at + size * i, size) as u32) << (16 * format));
            assert!(a.is_finite() && a.is_sign_positive(), "scales");
            out.extend([a, (a / 7.0).max(1e-8)][format].to_le_bytes());
        }
        at = skip(b, at + size * scales, 16);
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

/// Section 5, geometry: strips of a segment.
fn strips(cols: usize) -> usize {
    32.min(1 << (cols / 32).trailing_zeros())
}

fn pack(nibbles: &[Vec<u8>]) -> Vec<u8> {
    let pairs = nibbles.iter().flat_map(|row| row.chunks(2));
    pairs.map(|n| n[0] | n[1] << 4).collect()
}

/// Section 4: a coded matrix to its packed bytes.
pub fn decode_rans(stream: &[u8], offsets: &[usize], dims: [usize; 3], table: &Table) -> Vec<u8> {
    let ([blocks, rows, cols], (triples, f)) = (dims, table);
    let (seg_cols, fold) = segment(cols);
    let segs = cols / seg_cols;
    let (height, m) = if *triples { (3, 15) } else { (2, 12) };
    let groups = rows.div_ceil(height);
    let low = 1u64 << m;
    let mut slots = vec![]; // slot -> (symbol, slot - c[s])
    for (s, f) in f.iter().enumerate() {
        slots.extend((0..*f as u64).map(|b| (s, b)));
    }
    assert!((1..=groups).contains(&blocks), "blocks");
    assert!(offsets.windows(2).all(|w| w[1] >= w[0] + 32), "offsets");
    assert_eq!((offsets[0], 16 * offsets[blocks * segs]), (0, stream.len()));
    let mut nibbles = vec![vec![0u8; cols]; groups * height];
    for job in 0..blocks * segs {
        let (block, seg) = (job / segs, job % segs);
        let b = &stream[16 * offsets[job]..16 * offsets[job + 1]];
        let word = |i: usize| b.get(4 * i..4 * i + 4).map_or(0, |w| num(w, 0, 4) as u64);
        let mut x: Vec<u64> = (0..64).map(word).collect();
        let mut window: Vec<u64> = (0..32).map(|l| word(64 + l) << 32 | word(96 + l)).collect();
        let (mut c, mut next) = ([0u32; 32], 128);
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
    pack(&nibbles[..rows])
}

/// Section 5: the same.
pub fn decode_plane3(stream: &[u8], headers: &[usize], rows: usize, cols: usize) -> Vec<u8> {
    let (seg_cols, block_rows) = (32 * strips(cols), 1024 / strips(cols));
    let (segs, blocks) = (cols / seg_cols, rows.div_ceil(block_rows));
    let mut nibbles = vec![vec![0u8; cols]; blocks * block_rows];
    let mut end = 0;
    for job in 0..blocks * segs {
        let (n, p) = (headers[2 * job + 1] % 65536, headers[2 * job + 1] >> 16);
        assert!(headers[2 * job] == end && n > 0, "header");
        let (planes, lists) = stream[16 * end..16 * (end + 768 + n + p)].split_at(12288);
        end += 768 + n + p;
        let code = |position: usize| {
            let (w, l, at) = (position / 1024, position / 32 % 32, position % 32);
            let word = |k: usize| {
                let i = w % 4 * 3 + k;
                let byte = 1536 * (w / 4) + 512 * (i / 4) + 16 * l + 4 * (i % 4);
                num(planes, byte, 4)
            };
            let shift = 8 * (at % 4) + 4 * (at / 4 % 2);
            match at / 8 {
                3 => (0..3).map(|k| (word(k) >> (shift + 3) & 1) << k).sum(),
                k => word(k) >> shift & 7,
            }
        };
        let mut tile: Vec<usize> = (0..32768).map(|position| code(position) + 5).collect();
        for (list, listed) in [(&lists[..16 * n], 8..=12), (&lists[16 * n..], 5..=7)] {
            let (mut position, mut ended) = (0, *listed.start() == 5);
            for (i, byte) in list.iter().enumerate() {
                position += *byte as usize;
                if position == 32768 && *byte != 255 && !ended {
                    zero(list, i + 1, list.len());
                    ended = true;
                    break;
                }
                if *byte != 255 {
                    assert!(listed.contains(&tile[position]), "a listed code");
                    tile[position] ^= 8;
                }
            }
            assert!(ended, "end of list N");
        }
        for (position, nibble) in tile.iter().enumerate() {
            let (row, col) = (position / seg_cols, position % seg_cols);
            nibbles[job / segs * block_rows + row][job % segs * seg_cols + col] = *nibble as u8;
        }
    }
    assert_eq!(headers[2 * blocks * segs..], [end, 0], "closing header");
    assert_eq!(stream.len(), 16 * end, "stream length");
    pack(&nibbles[..rows])
}
