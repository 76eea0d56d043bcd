//! Archives: packing, reading, verifying, and what damage does.

use std::borrow::Cow;
use std::path::Path;

use gpu::layout::Symbol;
use host::archive::{
    Archive, ArchiveError, ClassSummary, CodecChoice, ExpertSource, HotSet, LEAST_SAVING,
    PackOptions, Phase, SymbolChoice, pack, partial_path, verify,
};
use host::codec::{Arm, Codec, ScaleFormat};
use host::expert::{ExpertShape, MatrixKind, RawMatrix, ScaleKind};

/// A small generator: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Standard normal (Box and Muller).
    fn normal(&mut self) -> f32 {
        let u = ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let v = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

/// Gaussian weights, rounded to bf16 or not, through the int4 rule.
fn gaussian(
    r: &mut Random,
    rows: usize,
    cols: usize,
    kind: ScaleKind,
    bf16: bool,
) -> RawMatrix<'static> {
    let width = match kind {
        ScaleKind::Row => cols,
        ScaleKind::G64 => 64,
    };
    let mut packed = Vec::with_capacity(rows * cols / 2);
    let mut scales = Vec::new();
    for _ in 0..rows * cols / width {
        let w: Vec<f32> = (0..width)
            .map(|_| {
                let w = r.normal() * 0.02;
                if bf16 {
                    half::bf16::from_f32(w).to_f32()
                } else {
                    w
                }
            })
            .collect();
        let amax = w.iter().fold(0f32, |m, w| m.max(w.abs()));
        let s = (amax / 7.0).max(1e-8);
        scales.push(s);
        let q: Vec<u8> = w
            .iter()
            .map(|w| ((w / s).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8)
            .collect();
        packed.extend(q.chunks(2).map(|q| q[0] | q[1] << 4));
    }
    RawMatrix {
        packed: Cow::Owned(packed),
        scales: Cow::Owned(scales),
    }
}

struct Memory {
    shape: ExpertShape,
    layers: Vec<u32>,
    experts: Vec<[RawMatrix<'static>; 3]>,
    /// Experts after which they repeat.
    distinct: usize,
}

impl Memory {
    fn new(
        shape: ExpertShape,
        layers: &[u32],
        experts: usize,
        mut make: impl FnMut(MatrixKind, (usize, usize)) -> RawMatrix<'static>,
    ) -> Self {
        let n = layers.len() * experts;
        Self {
            distinct: n,
            shape,
            layers: layers.to_vec(),
            experts: (0..n)
                .map(|_| MatrixKind::ALL.map(|k| make(k, shape.dims(k))))
                .collect(),
        }
    }

    /// The first `distinct` experts stand for all.
    fn repeated(mut self, distinct: usize) -> Self {
        self.distinct = distinct;
        for i in distinct..self.experts.len() {
            self.experts[i] = self.experts[i - distinct].clone();
        }
        self
    }

    fn gaussian(shape: ExpertShape, layers: &[u32], experts: usize, bf16: bool) -> Self {
        let mut r = Random(17);
        Self::new(shape, layers, experts, |_, (rows, cols)| {
            gaussian(&mut r, rows, cols, shape.scales, bf16)
        })
    }
}

impl ExpertSource for Memory {
    fn shape(&self) -> &ExpertShape {
        &self.shape
    }
    fn layers(&self) -> &[u32] {
        &self.layers
    }
    fn experts(&self) -> usize {
        self.experts.len() / self.layers.len()
    }
    fn expert(&self, layer: u32, expert: usize) -> Result<[RawMatrix<'_>; 3], ArchiveError> {
        let l = self.layers.iter().position(|l| *l == layer).unwrap();
        Ok(self.experts[l * self.experts() + expert].clone())
    }
    fn shared(&self, layer: u32, expert: usize) -> Option<(u32, usize)> {
        let l = self.layers.iter().position(|l| *l == layer).unwrap();
        let i = l * self.experts() + expert;
        let first = i % self.distinct;
        let (l, e) = (first / self.experts(), first % self.experts());
        (first != i).then(|| (self.layers[l], e))
    }
}

fn shape(hidden: usize, intermediate: usize, scales: ScaleKind) -> ExpertShape {
    ExpertShape {
        hidden,
        intermediate,
        scales,
    }
}

fn options(symbols: SymbolChoice, codec: CodecChoice) -> PackOptions {
    PackOptions {
        symbols,
        codec,
        // What is asked for by name is wanted however little it saves.
        least_saving: match codec {
            CodecChoice::Auto => LEAST_SAVING,
            _ => f64::NEG_INFINITY,
        },
        ..PackOptions::default()
    }
}

fn verified(source: &Memory, path: &Path) -> Archive {
    let archive = Archive::open(path).unwrap();
    verify(&archive, Some(source), |_| ()).unwrap();
    archive
}

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

/// The ratio that a GLM-5.2 expert must reach, all overhead counted.
#[test]
fn a_synthetic_glm_expert_reaches_its_ratio() {
    let source = Memory::gaussian(shape(6144, 2048, ScaleKind::Row), &[3], 1, true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("glm.ansx");
    // Triples have the larger table and the smaller blocks: faster on GPUs, not smaller.
    for (symbols, most) in [
        (SymbolChoice::Auto, 0.745),
        (SymbolChoice::Always(Symbol::Triple), 0.7475),
    ] {
        let s = pack(
            &source,
            &options(symbols, CodecChoice::Auto),
            &path,
            |_| (),
            || false,
        )
        .unwrap();
        let class = |c: &ClassSummary| {
            (
                c.coded_bytes as f64 / c.packed_bytes as f64,
                c.entropy_bytes / c.packed_bytes as f64,
            )
        };
        eprintln!(
            "{symbols:?}: {} symbols, archive/raw {:.4}, archive/packed {:.4}, gate_up {:.4?}, down {:.4?}",
            s.symbols,
            s.ratio,
            s.file_bytes as f64 / (s.gate_up.packed_bytes + s.down.packed_bytes) as f64,
            class(&s.gate_up),
            class(&s.down),
        );
        assert!(s.ratio <= most, "{symbols:?}: {}", s.ratio);
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

/// Where in the format the fields are that these tests change (`docs/format.md`).
const HEADER: usize = 256;
const INDEX: usize = 48;

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
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

/// Writes, opens and verifies; the message if that fails.
fn judge(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).unwrap();
    let archive = Archive::open(path).map_err(|e| e.to_string())?;
    verify(&archive, None::<&Memory>, |_| ()).map_err(|e| e.to_string())?;
    Ok(())
}

/// A message must name the file, a place and a field.
fn names_its_place(path: &Path, message: &str) -> bool {
    let places = ["header", "table", "layer entry", "index of", "record of"];
    message
        .strip_prefix(&format!("{}: ", path.display()))
        .is_some_and(|m| {
            places.iter().any(|p| m.starts_with(p))
                && (m.contains("expected") || m.contains("initial state"))
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
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let (_, good) = small(dir.path(), symbol, 128);
        for i in 0..5000 {
            let bad = corrupt(&mut r, &good);
            match judge(&path, &bad) {
                Ok(()) => assert!(bad == good, "{symbol:?} {i}: damage went unseen"),
                Err(message) => assert!(names_its_place(&path, &message), "{message}"),
            }
        }
    }
}

/// Makes checksums, fingerprint and digest right again, as far as the index can be followed.
fn sign(b: &mut [u8]) {
    if b.len() < HEADER {
        return;
    }
    let (index, records) = (u64_at(b, 64), u64_at(b, 72));
    if index > records || records > b.len() as u64 {
        return;
    }
    let (index, records) = (index as usize, records as usize);
    for at in (index..records.saturating_sub(INDEX - 1)).step_by(INDEX) {
        let (from, len) = (u64_at(b, at), u64_at(b, at + 8));
        let Some(end) = from.checked_add(len).filter(|e| *e <= b.len() as u64) else {
            continue;
        };
        let sum = blake3::hash(&b[from as usize..end as usize]);
        b[at + 16..at + 32].copy_from_slice(&sum.as_bytes()[..16]);
    }
    seal(b);
}

/// The digest over what comes before the records.
fn seal(b: &mut [u8]) {
    let records = u64_at(b, 72) as usize;
    b[224..256].fill(0);
    let digest = *blake3::hash(&b[..records]).as_bytes();
    b[224..256].copy_from_slice(&digest);
}

/// Damage behind valid checksums, as an attacker would make it: whatever comes of it, no panic.
#[test]
fn signed_corruptions_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.ansx");
    let mut r = Random(0x51_9ed);
    let mut refused = 0;
    for symbol in [Symbol::Pair, Symbol::Triple] {
        let (_, good) = small(dir.path(), symbol, 128);
        let mut resigned = good.clone();
        sign(&mut resigned);
        assert!(resigned == good, "the test signs as the archive does");
        for _ in 0..3000 {
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
    use std::sync::atomic::{AtomicUsize, Ordering};
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

    // Stopped again and again.
    o.resume = false;
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

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
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
        ("bad-block-offset.ansx", make(true, &|b| b[offsets + 4] = 0)),
        (
            "bad-initial-state.ansx",
            make(true, &|b| b[stream + 3] = 0x10),
        ),
        (
            "bad-final-state.ansx",
            make(true, &|b| b[stream + 400] ^= 4),
        ),
        (
            "bad-scale.ansx",
            make(true, &|b| set(b, scales, &0x7f80u16.to_le_bytes())),
        ),
        ("bad-padding.ansx", make(true, &|b| b[offsets + 4 * 2] = 1)),
    ]
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
        let file = golden().join(format!("{name}.ansx"));
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
    let good = std::fs::read(golden().join("pair-tiny.ansx")).unwrap();
    let shared = std::fs::read(golden().join("shared.ansx")).unwrap();
    let mut messages = String::new();
    for (name, bytes) in golden_bad(&good)
        .into_iter()
        .chain(golden_bad_shared(&shared))
    {
        let file = golden().join(name);
        if write {
            std::fs::write(&file, &bytes).unwrap();
        }
        assert!(std::fs::read(&file).unwrap() == bytes, "{name}");
        let message = judge(&dir.path().join(name), &bytes).expect_err(name);
        let message = message.split_once(": ").unwrap().1;
        messages.push_str(&format!("{name}: {message}\n"));
    }
    let list = golden().join("bad.txt");
    if write {
        std::fs::write(&list, &messages).unwrap();
    }
    let expected = std::fs::read_to_string(&list).unwrap();
    for (found, expected) in messages.lines().zip(expected.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(messages.lines().count(), expected.lines().count());
}
