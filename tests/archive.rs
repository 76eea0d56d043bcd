//! Archives: packing, reading, verifying, and what damage does.

mod archives;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu::layout::Symbol;
use host::archive::{
    Archive, ArchiveError, ClassSummary, CodecChoice, ExpertSource, HotSet, PackOptions, Phase,
    SymbolChoice, pack, partial_path, verify,
};
use host::codec::{Arm, Codec, ScaleFormat};
use host::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

use archives::*;

#[test]
fn what_is_packed_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let source = Memory::gaussian(shape(256, 128, scales), &[1, 4], 3, true);
        for symbols in [
            SymbolChoice::Auto,
            SymbolChoice::Always(Symbol::Pair),
            SymbolChoice::Always(Symbol::Triple),
        ] {
            for codec in [
                CodecChoice::Auto,
                CodecChoice::Rans,
                CodecChoice::Plane3,
                CodecChoice::Raw,
            ] {
                if codec == CodecChoice::Plane3 && scales == ScaleKind::G64 {
                    continue;
                }
                let s = pack(&source, &options(symbols, codec), &path, |_| (), || false).unwrap();
                let archive = verified(&source, &path);
                assert_eq!(s.file_bytes, std::fs::metadata(&path).unwrap().len());
                let record = archive.record(4, 2).unwrap();
                for kind in MatrixKind::ALL {
                    let m = record.matrix(kind);
                    match (codec, symbols) {
                        (CodecChoice::Raw, _) => assert_eq!(m.codec, Codec::Raw),
                        (CodecChoice::Plane3, _) => assert_eq!(m.codec, Codec::Plane3),
                        (CodecChoice::Rans, SymbolChoice::Always(s)) => {
                            assert_eq!(m.codec, Codec::Rans(s));
                        }
                        _ => {}
                    }
                    assert_eq!(m.scale_format, ScaleFormat::Amax16);
                    for part in [&m.offsets, &m.stream, &m.scales] {
                        assert_eq!(part.start % 16, 0);
                    }
                    assert_eq!(record.bytes.as_ptr().addr() % 16, 0);
                }
                assert!(matches!(
                    archive.record(2, 0),
                    Err(ArchiveError::Missing { layer: 2, .. })
                ));
                assert!(archive.record(1, 3).is_err());
            }
        }
    }
}

#[test]
fn equal_experts_share_records() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    let gaussian = || Memory::gaussian(shape(256, 128, ScaleKind::Row), &[1, 4, 5], 4, true);
    for codec in [CodecChoice::Rans, CodecChoice::Raw] {
        let o = options(SymbolChoice::Auto, codec);
        for distinct in [1, 4, 5, 11] {
            let source = gaussian().repeated(distinct);
            let s = pack(&source, &o, &path, |_| (), || false).unwrap();
            assert_eq!(s.records, distinct);
            let archive = verified(&source, &path);
            assert_eq!(archive.records(), distinct);
            let v = verify(&archive, None::<&Memory>, |_| ()).unwrap();
            assert_eq!(v.records, distinct as u64);
            // Packed again from the archive, it is the same file.
            let again = dir.path().join("b.ansx");
            pack(&archive, &o, &again, |_| (), || false).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            assert!(std::fs::read(&again).unwrap() == bytes);
            // An unshared archive of the same experts has the same fingerprint.
            let mut apart = gaussian().repeated(distinct);
            apart.distinct = 12;
            pack(&apart, &o, &again, |_| (), || false).unwrap();
            let other = Archive::open(&again).unwrap();
            assert_eq!(other.fingerprint(), archive.fingerprint());
            assert_eq!(other.records(), 12);
        }
    }
}

/// An archive that does not get its name is gone on with.
#[test]
fn a_whole_archive_without_its_name_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, path) = (dir.path().join("a.ansx"), dir.path().join("b.ansx"));
    let source = Memory::gaussian(shape(128, 64, ScaleKind::Row), &[1], 4, true);
    let o = PackOptions {
        resume: true,
        ..PackOptions::default()
    };
    pack(&source, &o, &whole, |_| (), || false).unwrap();
    // What takes its place while it is packed.
    let folder = |_| {
        let _ = std::fs::create_dir(&path);
    };
    let e = pack(&source, &o, &path, folder, || false).unwrap_err();
    let says = ["rename to", "the same command with --resume goes on"];
    assert!(says.iter().all(|t| e.to_string().contains(t)), "{e}");
    std::fs::remove_dir(&path).unwrap();
    let s = pack(&source, &o, &path, |_| (), || false).unwrap();
    assert_eq!(s.kept, 4);
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&whole).unwrap());
}

/// A source that takes its time, and how many ask it at once.
struct Slow {
    source: Memory,
    asking: AtomicUsize,
    most: AtomicUsize,
}

impl ExpertSource for Slow {
    fn shape(&self) -> &ExpertShape {
        self.source.shape()
    }

    fn layers(&self) -> &[u32] {
        self.source.layers()
    }

    fn experts(&self) -> usize {
        self.source.experts()
    }

    fn expert(&self, layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        let asking = self.asking.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(asking, Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_millis(5));
        self.asking.fetch_sub(1, Ordering::SeqCst);
        self.source.expert(layer, expert)
    }
}

/// Experts that share the one record are compared with a model's by all processors, and the first that
/// differs is named.
#[test]
fn experts_of_one_record_are_compared_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    let shape = shape(128, 64, ScaleKind::Row);
    let source = Memory::gaussian(shape, &[1, 4], 40, true).repeated(1);
    pack(&source, &PackOptions::default(), &path, |_| (), || false).unwrap();
    let archive = Archive::open(&path).unwrap();
    let mut slow = Slow {
        source,
        asking: AtomicUsize::new(0),
        most: AtomicUsize::new(0),
    };
    let seen = AtomicUsize::new(0);
    let count = |n| {
        seen.fetch_add(n as usize, Ordering::SeqCst);
    };
    let threads = rayon::ThreadPoolBuilder::new().num_threads(4);
    let threads = threads.build().unwrap();
    let v = threads.install(|| verify(&archive, Some(&slow), count));
    assert!(v.unwrap().compared);
    assert_eq!(seen.into_inner(), 80);
    let most = slow.most.load(Ordering::SeqCst);
    assert!((2..=4).contains(&most), "{most} at once");
    for e in [57, 79, 41] {
        slow.source.experts[e][1].scales.to_mut()[3] *= 2.0;
    }
    for _ in 0..5 {
        let e = threads.install(|| verify(&archive, Some(&slow), |_| ()));
        let e = e.unwrap_err().to_string();
        assert!(e.contains("layer 4, expert 1"), "{e}");
    }
}

/// A file of holes whose header promises 69 billion experts: refused at its first entry, with no room made
/// for what would come behind it.
#[test]
fn a_file_of_holes_takes_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    let shape = shape(128, 64, ScaleKind::Row);
    let source = Memory::gaussian(shape, &[1], 2, true);
    pack(&source, &PackOptions::default(), &path, |_| (), || false).unwrap();
    let mut b = std::fs::read(&path).unwrap();
    b.truncate(HEADER);
    let (layers, experts) = (16u32, u32::MAX);
    let align = 1u64 << b[33];
    let index = (HEADER + 16 * layers as usize) as u64;
    let records = index + (INDEX as u64) * u64::from(layers) * u64::from(experts);
    let records = records.next_multiple_of(align);
    b[36..40].copy_from_slice(&layers.to_le_bytes());
    b[40..44].copy_from_slice(&experts.to_le_bytes());
    b[44..48].fill(0);
    for (at, n) in [
        (16, records + (1 << 20)),
        (56, HEADER as u64),
        (64, index),
        (72, records),
    ] {
        b[at..at + 8].copy_from_slice(&n.to_le_bytes());
    }
    for layer in 0..layers {
        b.extend(layer.to_le_bytes());
        b.extend([0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    std::fs::write(&path, &b).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    if let Err(e) = file.set_len(records + (1 << 20)) {
        eprintln!("skipped: the file system has no files of 3 TB: {e}");
        return;
    }
    let e = Archive::open(&path).unwrap_err().to_string();
    assert!(e.contains("index of layer 0, expert 0: offset"), "{e}");
}

/// Experts in plane3, rANS and raw in one archive.
#[test]
fn a_hot_set_is_in_plane3() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    let mut r = Random(41);
    let s = shape(1024, 512, ScaleKind::Row);
    let mut n = 0;
    let source = Memory::new(s, &[1, 4], 4, |kind, (rows, cols)| {
        let mut m = gaussian(&mut r, rows, cols, s.scales, true);
        n += 1;
        // Of every other expert the up matrix does not shrink.
        if kind == MatrixKind::Up && n / 3 % 2 == 1 {
            m.packed = (0..rows * cols / 2)
                .map(|_| (r.next() >> 56) as u8)
                .collect();
        }
        m
    });
    let hot: HotSet = [(1, 0), (1, 1), (4, 3)].into_iter().collect();
    for (codec, rest) in [
        (CodecChoice::Auto, Codec::Rans(Symbol::Pair)),
        (CodecChoice::Raw, Codec::Raw),
    ] {
        let o = PackOptions {
            codec,
            hot: hot.clone(),
            ..PackOptions::default()
        };
        let summary = pack(&source, &o, &path, |_| (), || false).unwrap();
        let archive = verified(&source, &path);
        let mut counts = [0; 3];
        for layer in [1, 4] {
            for expert in 0..4 {
                let record = archive.record(layer, expert).unwrap();
                let wanted = if hot.contains(layer, expert) {
                    Codec::Plane3
                } else {
                    rest
                };
                for kind in MatrixKind::ALL {
                    let m = record.matrix(kind);
                    let raw = kind == MatrixKind::Up && expert % 2 == 1;
                    assert_eq!(m.codec, if raw { Codec::Raw } else { wanted });
                    assert_eq!(m.table.is_some(), matches!(m.codec, Codec::Rans(_)));
                    counts[match m.codec {
                        Codec::Raw => 0,
                        Codec::Rans(_) => 1,
                        Codec::Plane3 => 2,
                    }] += 1;
                }
            }
        }
        let total = summary.total();
        assert_eq!([total.raw, total.rans, total.plane3], counts);
        assert_eq!(total.plane3, 7);
        let info = host::archive::inspect(&archive, 4, |_| ()).unwrap();
        let codecs = &info.layers[0].matrices[0].codecs;
        assert!(codecs.contains(&("plane3", 2)), "{codecs:?}");
        // From the archive the same comes again.
        let again = dir.path().join("b.ansx");
        pack(&archive, &o, &again, |_| (), || false).unwrap();
        assert!(std::fs::read(&path).unwrap() == std::fs::read(&again).unwrap());
    }

    let g64 = Memory::gaussian(shape(128, 64, ScaleKind::G64), &[1], 2, true);
    let refused = |source: &Memory, o: PackOptions| {
        let e = pack(source, &o, &path, |_| (), || false).unwrap_err();
        assert!(matches!(e, ArchiveError::Options { .. }), "{e}");
        e.to_string()
    };
    let hot = |experts: &[(u32, usize)]| PackOptions {
        hot: experts.iter().copied().collect(),
        ..PackOptions::default()
    };
    assert!(refused(&g64, hot(&[(1, 0)])).contains("a scale a row"));
    let plane3 = options(SymbolChoice::Auto, CodecChoice::Plane3);
    assert!(refused(&g64, plane3).contains("a scale a row"));
    for (layer, expert) in [(2, 0), (1, 4)] {
        let e = refused(&source, hot(&[(1, 0), (layer, expert)]));
        assert!(
            e.contains(&format!("layer {layer}, expert {expert}")),
            "{e}"
        );
    }
}

/// The ratio that gate and up of GLM-5.2 must reach, states, offsets and padding counted; the entropy
/// of the nibbles is 0.7298.
#[test]
fn a_synthetic_glm_expert_reaches_its_ratio() {
    let source = Memory::gaussian(shape(6144, 2048, ScaleKind::Row), &[3], 1, true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("glm.ansx");
    let rans = |symbol, block_nibbles| PackOptions {
        symbols: SymbolChoice::Always(symbol),
        block_nibbles,
        ..PackOptions::default()
    };
    for (what, o, most) in [
        (
            "plane3",
            options(SymbolChoice::Auto, CodecChoice::Plane3),
            0.825,
        ),
        (
            "large blocks of pairs",
            rans(Symbol::Pair, Some(196_608)),
            0.737,
        ),
        ("pairs", rans(Symbol::Pair, None), 0.742),
        ("triples", rans(Symbol::Triple, None), 0.742),
    ] {
        let s = pack(&source, &o, &path, |_| (), || false).unwrap();
        let ratio = s.gate_up.coded_bytes as f64 / s.gate_up.packed_bytes as f64;
        assert!(ratio <= most, "{what}: {ratio}");
        verified(&source, &path);
    }
    let archive = Archive::open(&path).unwrap();
    let record = archive.record(3, 0).unwrap();
    for arm in Arm::ALL.into_iter().filter(|a| a.available()) {
        let coded = record.coded(MatrixKind::Gate).unwrap();
        let mut out = vec![0; 2048 * 3072];
        coded.decode(arm, &mut out).unwrap();
        assert!(out[..] == source.experts[0][0].packed[..]);
    }
}

/// Ratios of a GLM-5.2 expert by codec and block size, for `docs/performance.md`:
/// `cargo test --release --test archive -- --ignored --nocapture ratios`.
#[test]
#[ignore = "a table to read, of some minutes"]
fn ratios() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("glm.ansx");
    println!("scales, codec, block nibbles: gate_up, down, both; with scales of raw; entropy");
    for scales in [ScaleKind::Row, ScaleKind::G64] {
        let source = Memory::gaussian(shape(6144, 2048, scales), &[3], 1, true);
        let row = |o: &PackOptions, name: &str, blocks: usize| {
            let s = pack(&source, o, &path, |_| (), || false).unwrap();
            let ratio = |c: &ClassSummary| c.coded_bytes as f64 / c.packed_bytes as f64;
            let t = s.total();
            let tables = s.table_bytes as f64;
            println!(
                "{scales:?} {name} {blocks}: {:.4} {:.4} {:.4}; {:.4}; {:.4} {:.4}",
                ratio(&s.gate_up),
                ratio(&s.down),
                (t.coded_bytes as f64 + tables) / t.packed_bytes as f64,
                (t.coded_bytes as f64 + tables + t.coded_scale_bytes as f64) / s.raw_bytes as f64,
                s.gate_up.entropy_bytes / s.gate_up.packed_bytes as f64,
                s.down.entropy_bytes / s.down.packed_bytes as f64,
            );
        };
        for symbol in [Symbol::Pair, Symbol::Triple] {
            let mut o = options(SymbolChoice::Always(symbol), CodecChoice::Auto);
            row(
                &o,
                &format!("{symbol:?}, default"),
                gpu::layout::BLOCK_NIBBLES,
            );
            for blocks in [12, 24, 48, 96, 192, 384].map(|rows| rows * 2048) {
                o.block_nibbles = Some(blocks);
                row(&o, &format!("{symbol:?}"), blocks);
            }
        }
        if scales == ScaleKind::Row {
            row(
                &options(SymbolChoice::Auto, CodecChoice::Plane3),
                "plane3",
                32768,
            );
        }
        amax_bits(&source);
    }
}

/// What coding the scales' 16-bit amax further would give.
fn amax_bits(source: &Memory) {
    for (kind, m) in MatrixKind::ALL.iter().zip(&source.experts[0]) {
        let (rows, cols) = source.shape.dims(*kind);
        let (_, bytes) = host::codec::encode_scales(&m.scales);
        let amax = bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let amax: Vec<u16> = amax.collect();
        let mut counts = vec![0u64; 1 << 16];
        for a in &amax {
            counts[usize::from(*a)] += 1;
        }
        let bits = host::codec::entropy(&counts) / amax.len() as f64;
        let widest = amax
            .chunks(source.shape.scales.count(1, cols))
            .map(|row| row.iter().max().unwrap() - row.iter().min().unwrap())
            .max();
        println!(
            "{} {rows} rows: entropy of amax {bits:.3} bits, widest row {widest:?}",
            kind.name()
        );
    }
}

/// An archive with all there is in it: coded and raw matrices, both scale formats, two layers.
fn small(dir: &Path, symbol: Symbol, hidden: usize) -> (Memory, Vec<u8>) {
    let mut r = Random(23);
    let s = shape(hidden, 64, ScaleKind::Row);
    let source = Memory::new(s, &[2, 5], hidden / 64, |kind, (rows, cols)| match kind {
        MatrixKind::Up => {
            // Incompressible, with scales of no bf16 weights.
            let mut m = gaussian(&mut r, rows, cols, s.scales, false);
            m.packed = (0..rows * cols / 2)
                .map(|_| (r.next() >> 56) as u8)
                .collect();
            m
        }
        _ => gaussian(&mut r, rows, cols, s.scales, true),
    });
    let path = dir.join("small.ansx");
    let choice = options(SymbolChoice::Always(symbol), CodecChoice::Auto);
    let mut options = choice;
    options.block_nibbles = Some(4096);
    pack(&source, &options, &path, |_| (), || false).unwrap();
    let archive = verified(&source, &path);
    let record = archive.record(2, 0).unwrap();
    assert_eq!(record.matrices[1].codec, Codec::Raw);
    assert_eq!(record.matrices[1].scale_format, ScaleFormat::F32);
    (source, std::fs::read(&path).unwrap())
}

/// A message must name the file, a place and a field.
fn names_its_place(path: &Path, message: &str) -> bool {
    let places = ["header", "table", "layer entry", "index of", "record of"];
    message
        .strip_prefix(&format!("{}: ", path.display()))
        .is_some_and(|m| {
            places.iter().any(|p| m.starts_with(p))
                && ["expected", "initial state", ": list "]
                    .iter()
                    .any(|w| m.contains(w))
        })
}

#[test]
fn every_byte_and_every_length_counts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.ansx");
    let (_, good) = small(dir.path(), Symbol::Pair, 64);
    assert_eq!(judge(&path, &good), Ok(()));
    let mut r = Random(31);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (r.next() % 8);
        let message = judge(&path, &bad).expect_err("a flipped byte went unseen");
        assert!(names_its_place(&path, &message), "byte {at}: {message}");
    }
    for len in (0..good.len()).step_by(7) {
        let message = judge(&path, &good[..len]).expect_err("a cut went unseen");
        assert!(names_its_place(&path, &message), "length {len}: {message}");
    }
    let mut long = good.clone();
    long.push(0);
    assert!(judge(&path, &long).unwrap_err().contains("file length"));
}

/// Experts in plane3 and in rANS, in an archive of two.
fn small_plane3(dir: &Path) -> Vec<u8> {
    let source = Memory::gaussian(shape(128, 256, ScaleKind::Row), &[3], 2, true);
    let path = dir.join("plane3.ansx");
    let o = PackOptions {
        hot: HotSet::from_iter([(3, 0)]),
        ..options(SymbolChoice::Auto, CodecChoice::Rans)
    };
    let s = pack(&source, &o, &path, |_| (), || false).unwrap();
    assert_eq!((s.total().plane3, s.total().rans), (3, 3));
    std::fs::read(&path).unwrap()
}

/// One random change: flips, a cut, a splice.
fn corrupt(r: &mut Random, good: &[u8]) -> Vec<u8> {
    let mut bad = good.to_vec();
    let n = bad.len();
    let below = |r: &mut Random, n: usize| (r.next() >> 11) as usize % n;
    match r.next() % 5 {
        0 => bad.truncate(below(r, n)),
        1 => {
            for _ in 0..1 + below(r, 8) {
                bad[below(r, n)] ^= 1 << below(r, 8);
            }
        }
        2 => {
            let len = 1 + below(r, 64);
            let (from, to) = (below(r, n - len), below(r, n - len));
            bad.copy_within(from..from + len, to);
        }
        3 => {
            let at = below(r, n);
            let len = 1 + below(r, 64).min(n - at - 1);
            bad.drain(at..(at + len).min(n));
        }
        _ => {
            let at = below(r, n);
            let word = [0u32, 1, u32::MAX, 0x8000_0000, r.next() as u32][below(r, 5)];
            let to = (at + 4).min(n);
            bad[at..to].copy_from_slice(&word.to_le_bytes()[..to - at]);
        }
    }
    bad
}

#[test]
fn ten_thousand_corruptions_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.ansx");
    let mut r = Random(0x0bad_5eed);
    for good in [
        small(dir.path(), Symbol::Pair, 128).1,
        small(dir.path(), Symbol::Triple, 128).1,
        small_plane3(dir.path()),
    ] {
        for i in 0..3500 {
            let bad = corrupt(&mut r, &good);
            match judge(&path, &bad) {
                Ok(()) => assert!(bad == good, "{i}: damage went unseen"),
                Err(message) => assert!(names_its_place(&path, &message), "{message}"),
            }
        }
    }
}

/// Damage behind valid checksums, as an attacker would make it: whatever comes of it, no panic.
#[test]
fn signed_corruptions_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.ansx");
    let mut r = Random(0x51_9ed);
    let mut refused = 0;
    for good in [
        small(dir.path(), Symbol::Pair, 128).1,
        small(dir.path(), Symbol::Triple, 128).1,
        small_plane3(dir.path()),
    ] {
        let mut resigned = good.clone();
        sign(&mut resigned);
        assert!(resigned == good, "the test signs as the archive does");
        for _ in 0..2000 {
            let mut bad = corrupt(&mut r, &good);
            sign(&mut bad);
            match judge(&path, &bad) {
                Ok(()) => {}
                Err(message) => {
                    assert!(names_its_place(&path, &message), "{message}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 5900, "{refused} of 6000");
}

#[test]
fn packing_is_deterministic_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let source = Memory::gaussian(shape(256, 128, ScaleKind::Row), &[1, 2, 3], 5, true);
    let (a, b) = (dir.path().join("a.ansx"), dir.path().join("b.ansx"));
    let o = PackOptions::default();
    pack(&source, &o, &a, |_| (), || false).unwrap();
    let one = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    one.install(|| pack(&source, &o, &b, |_| (), || false))
        .unwrap();
    let bytes = std::fs::read(&a).unwrap();
    assert!(bytes == std::fs::read(&b).unwrap());
    // From the archive itself the same comes again.
    pack(&Archive::open(&a).unwrap(), &o, &b, |_| (), || false).unwrap();
    assert!(bytes == std::fs::read(&b).unwrap());

    let c = dir.path().join("c.ansx");
    assert!(matches!(
        pack(&source, &o, &c, |_| (), || true),
        Err(ArchiveError::Interrupted { .. })
    ));
    let mut bad = Memory::gaussian(source.shape, &[1], 2, true);
    bad.experts[1][2].scales.to_mut()[3] = f32::NAN;
    let e = pack(&bad, &o, &c, |_| (), || false)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("layer 1, expert 1, down_proj") && e.contains("NaN"),
        "{e}"
    );
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(
        pack(
            &source,
            &o,
            &dir.path().join("no/such/a.ansx"),
            |_| (),
            || false
        )
        .is_err()
    );
}

/// Packs, stopping once `coded` experts have been; the error.
fn interrupted(source: &Memory, o: &PackOptions, path: &Path, coded: usize) -> String {
    let done = AtomicUsize::new(0);
    let count = |step: host::archive::Step| {
        done.fetch_add(usize::from(step.phase == Phase::Code), Ordering::Relaxed);
    };
    let stop = || done.load(Ordering::Relaxed) >= coded;
    pack(source, o, path, count, stop).unwrap_err().to_string()
}

#[test]
fn an_interrupted_pack_is_gone_on_with() {
    // A batch is 32 experts or two a thread.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2);
    pool.build().unwrap().install(interrupt_and_go_on);
}

fn interrupt_and_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.ansx"), dir.path().join("b.ansx"));
    let partial = partial_path(&b);
    let source = Memory::gaussian(shape(128, 64, ScaleKind::Row), &[1, 2, 5], 40, true);
    let mut o = PackOptions::default();
    pack(&source, &o, &a, |_| (), || false).unwrap();
    let whole = std::fs::read(&a).unwrap();

    // Nothing to go on with: it begins anew.
    o.resume = true;
    let s = pack(&source, &o, &b, |_| (), || false).unwrap();
    assert_eq!(s.kept, 0);
    assert!(std::fs::read(&b).unwrap() == whole && !partial.exists());
    std::fs::remove_file(&b).unwrap();

    // Stopped while the first layer's symbols are counted: the rest of the layer is not waited for.
    o.resume = false;
    let counted = std::sync::atomic::AtomicUsize::new(0);
    let count = |_| {
        counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    };
    let stop = || counted.load(std::sync::atomic::Ordering::SeqCst) > 0;
    let e = pack(&source, &o, &b, count, stop).unwrap_err();
    assert!(matches!(e, ArchiveError::Interrupted { kept: None, .. }));
    assert!((1..8).contains(&counted.into_inner()) && !partial.exists());

    // Stopped again and again.
    let e = interrupted(&source, &o, &b, 1);
    assert!(
        e.contains("32 of 120 experts") && e.contains("--resume"),
        "{e}"
    );
    assert!(partial.exists() && !b.exists());
    o.resume = true;
    let e = interrupted(&source, &o, &b, 0);
    assert!(e.contains("stays as it was"), "{e}");
    let e = interrupted(&source, &o, &b, 33);
    assert!(e.contains("64 of 120 experts"), "{e}");
    let half = std::fs::read(&partial).unwrap();
    let s = pack(&source, &o, &b, |_| (), || false).unwrap();
    assert_eq!(s.kept, 64);
    assert!(std::fs::read(&b).unwrap() == whole && !partial.exists());
    let anew = pack(&source, &PackOptions::default(), &a, |_| (), || false).unwrap();
    assert_eq!((s.gate_up, s.down), (anew.gate_up, anew.down));

    // Whatever damage there is to it, the archive is the same.
    let mut r = Random(5);
    for i in 0..60 {
        let mut bad = half.clone();
        let at = 256 + r.next() as usize % (bad.len() - 256);
        match i % 3 {
            0 => bad[at] ^= 1 << (r.next() % 8),
            1 => bad.truncate(at),
            _ => bad.extend_from_slice(&half[at..]),
        }
        std::fs::write(&partial, &bad).unwrap();
        let s = pack(&source, &o, &b, |_| (), || false).unwrap();
        assert!(s.kept <= 64 && std::fs::read(&b).unwrap() == whole);
    }

    // Stopped while all of it was flushed, and just before it got its name.
    let mut flushed = whole.clone();
    flushed[..40].copy_from_slice(&half[..40]);
    for (left, kept) in [(&flushed, 120), (&whole, 0)] {
        std::fs::write(&partial, left).unwrap();
        std::fs::remove_file(&b).unwrap();
        let s = pack(&source, &o, &b, |_| (), || false).unwrap();
        assert_eq!(s.kept, kept);
        assert!(std::fs::read(&b).unwrap() == whole && !partial.exists());
    }

    // Other experts, other options.
    let refused = |source: &Memory, o: &PackOptions| {
        std::fs::write(&partial, &half).unwrap();
        let e = pack(source, o, &b, |_| (), || false).unwrap_err();
        assert!(matches!(e, ArchiveError::Partial { .. }), "{e}");
        assert!(e.to_string().contains("without --resume"), "{e}");
        assert!(std::fs::read(&partial).unwrap() == half);
    };
    let mut other = Memory::gaussian(source.shape, &[1, 2, 5], 40, true);
    other.experts[119][1].scales.to_mut()[0] *= 2.0;
    refused(&other, &o);
    refused(
        &source,
        &PackOptions {
            block_nibbles: Some(999),
            ..o.clone()
        },
    );
    refused(
        &source,
        &PackOptions {
            hot: HotSet::from_iter([(5, 39)]),
            ..o.clone()
        },
    );
    let triples = SymbolChoice::Always(Symbol::Triple);
    refused(
        &source,
        &PackOptions {
            symbols: triples,
            ..o.clone()
        },
    );

    // Two at once.
    let lock = std::fs::File::open(&partial).unwrap();
    lock.lock().unwrap();
    let e = pack(&source, &o, &b, |_| (), || false)
        .unwrap_err()
        .to_string();
    assert!(e.contains("another `host pack`"), "{e}");
}

#[test]
fn an_archive_of_another_model_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    let source = Memory::gaussian(shape(128, 64, ScaleKind::Row), &[1], 2, true);
    pack(&source, &PackOptions::default(), &path, |_| (), || false).unwrap();
    let archive = Archive::open(&path).unwrap();
    let complaint = |other: &Memory| {
        verify(&archive, Some(other), |_| ())
            .unwrap_err()
            .to_string()
    };

    let other = Memory::gaussian(shape(128, 128, ScaleKind::Row), &[1], 2, true);
    assert!(complaint(&other).contains("shape"));
    let other = Memory::gaussian(source.shape, &[2], 2, true);
    assert!(complaint(&other).contains("layers"));
    let other = Memory::gaussian(source.shape, &[1], 3, true);
    assert!(complaint(&other).contains("experts"));
    let mut other = Memory::gaussian(source.shape, &[1], 2, true);
    other.experts[1][0].packed.to_mut()[9] ^= 16;
    let e = complaint(&other);
    assert!(
        e.contains("layer 1, expert 1, gate_proj: weights: ") && e.contains("byte 9"),
        "{e}"
    );
    let mut other = Memory::gaussian(source.shape, &[1], 2, true);
    other.experts[0][2].scales.to_mut()[5] *= 2.0;
    assert!(complaint(&other).contains("expert 0, down_proj: scales: "));
}

/// Columns that no block suits are stored raw, and layers that differ get tables of their own.
#[test]
fn geometry_and_tables() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    // gate and up have 100 columns, down 64.
    let source = Memory::gaussian(shape(100, 64, ScaleKind::Row), &[0], 2, true);
    pack(&source, &PackOptions::default(), &path, |_| (), || false).unwrap();
    let archive = verified(&source, &path);
    assert_eq!(archive.record(0, 0).unwrap().matrices[0].codec, Codec::Raw);
    let layer = archive.layer(0).unwrap();
    assert!(layer.table(MatrixKind::Gate).is_none());

    let mut r = Random(77);
    let s = shape(256, 256, ScaleKind::Row);
    let mut n = 0;
    let source = Memory::new(s, &[1, 2], 4, |_, (rows, cols)| {
        let mut m = gaussian(&mut r, rows, cols, s.scales, true);
        n += 1;
        if n > 12 {
            // The second layer's weights lean the other way.
            for b in m.packed.to_mut() {
                *b = (*b & 0x33) | 0xcc;
            }
        }
        m
    });
    let choice = options(SymbolChoice::Always(Symbol::Pair), CodecChoice::Auto);
    let summary = pack(&source, &choice, &path, |_| (), || false).unwrap();
    let archive = verified(&source, &path);
    assert_eq!(summary.tables, 2);
    let id = |l| archive.layer(l).unwrap().table(MatrixKind::Gate).unwrap().0;
    assert_ne!(id(1), id(2));
}
