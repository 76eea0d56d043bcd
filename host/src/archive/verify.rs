//! Checking a whole archive.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use serde::Serialize;

use crate::codec::Arm;
use crate::disk::PageCache;
use crate::disk::ahead::{Ahead, for_each};
use crate::disk::reader::{Aligned, BLOCK, DirectFile};
use crate::expert::{MatrixKind, RawMatrix};
use crate::interrupt;

use super::error::{Check, DAMAGED, Place, UNREADABLE, hex};
use super::format::short;
use super::source::ExpertSource;
use super::{Archive, ArchiveError, Record, checksum};

/// What was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Records.
    pub records: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the raw experts that they stand for.
    pub raw_bytes: u64,
    /// Whether the raw experts of a model were compared.
    pub compared: bool,
}

/// The remedy for an archive that is whole, but of other experts.
const OTHER: &str = "the archive is of another model: make one with `host pack`";

/// An error once the user has asked to stop.
pub(super) fn going() -> Result<(), ArchiveError> {
    match interrupt::requested() {
        true => Err(ArchiveError::Stopped),
        false => Ok(()),
    }
}

/// Decodes every record and checks it against its checksum and its raw digest, and, where a model's
/// raw experts are given, against them. `progress` is called with 1 for each expert.
///
/// Of several records that are bad, the error is of the first in the file.
pub fn verify<S: ExpertSource>(
    archive: &Archive,
    model: Option<&S>,
    progress: impl Fn(u64) + Sync,
) -> Result<Verified, ArchiveError> {
    deep(archive, model, Where::Asked, &progress)
}

/// Checks every record's checksum, structure and padding without decoding it: at the rate of the
/// disk. `progress` is called with 1 for each record.
///
/// Of several records that are bad, the error is of the first in the file.
pub fn verify_checksums(
    archive: &Archive,
    progress: impl Fn(u64) + Sync,
) -> Result<Verified, ArchiveError> {
    quick(archive, Where::Asked, &progress)
}

fn deep<S: ExpertSource>(
    archive: &Archive,
    model: Option<&S>,
    place: Where,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Verified, ArchiveError> {
    if let Some(model) = model {
        same_geometry(archive, model)?;
    }
    each_record(archive, place, |block, users, bytes| {
        let (layer, expert) = archive.place(users[0].1 as usize);
        let record = archive.padded(layer, expert, bytes, checksum)?;
        let check = |block: &mut Vec<u8>, i: u32| {
            going()?;
            let (layer, expert) = archive.place(i as usize);
            let record = Record {
                layer,
                expert,
                ..record.clone()
            };
            check_raw(&record, model, block)?;
            progress(1);
            Ok(())
        };
        let [(_, first), others @ ..] = users else {
            return Ok(());
        };
        check(block, *first)?;
        // A shared record is checked once, but compared with every expert that has it.
        if model.is_none() {
            progress(others.len() as u64);
            return Ok(());
        }
        // All processors, since there may be no other record; the first that differs is told of.
        (others.par_iter())
            .map_init(Vec::new, |block, (_, i)| check(block, *i))
            .find_first(Result::is_err)
            .unwrap_or(Ok(()))
    })?;
    Ok(verified(archive, model.is_some()))
}

fn quick(
    archive: &Archive,
    place: Where,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Verified, ArchiveError> {
    each_record(archive, place, |_, users, bytes| {
        going()?;
        let (layer, expert) = archive.place(users[0].1 as usize);
        archive.padded(layer, expert, bytes, checksum)?;
        progress(1);
        Ok(())
    })?;
    Ok(verified(archive, false))
}

fn verified(archive: &Archive, compared: bool) -> Verified {
    let records = archive.records() as u64;
    Verified {
        records,
        file_bytes: archive.file_len(),
        raw_bytes: records * archive.shape().raw_bytes() as u64,
        compared,
    }
}

fn same_geometry<S: ExpertSource>(archive: &Archive, model: &S) -> Result<(), ArchiveError> {
    let header = archive.check(Place::Header);
    let (a, b) = (archive.shape(), model.shape());
    if a != b {
        return Err(header.invalid("shape", b, a, OTHER));
    }
    let (a, b) = (archive.layers(), model.layers());
    if a != b {
        return Err(header.invalid(
            "layers",
            format_args!("{b:?}"),
            format_args!("{a:?}"),
            OTHER,
        ));
    }
    let (a, b) = (archive.experts(), model.experts());
    if a != b {
        return Err(header.invalid("experts", b, a, OTHER));
    }
    Ok(())
}

/// Decodes a record, a block at a time, which stays in a cache until it is hashed and compared.
fn check_raw<S: ExpertSource>(
    record: &Record<'_>,
    model: Option<&S>,
    block: &mut Vec<u8>,
) -> Result<(), ArchiveError> {
    let archive = record.archive;
    let (layer, expert) = (record.layer, record.expert);
    // What the model has is second to what the archive says of itself.
    let theirs = model.map(|m| m.expert(layer, expert));
    let theirs_of = |kind| match &theirs {
        Some(Ok(theirs)) => Some(&theirs[kind as usize]),
        _ => None,
    };
    let mut differs = None;
    let mut h = blake3::Hasher::new();
    for kind in MatrixKind::ALL {
        let c = archive.check(Place::Matrix {
            layer,
            expert,
            kind,
        });
        let theirs = theirs_of(kind);
        let mut packed = |at: usize, ours: &[u8]| {
            h.update(ours);
            if let Some(theirs) = theirs.filter(|_| differs.is_none()) {
                differs = packed_differ(c, at, ours, theirs);
            }
        };
        match record.coded(kind) {
            None => packed(0, &record.bytes[record.matrix(kind).stream.clone()]),
            Some(coded) => {
                for b in 0..coded.blocks() {
                    let rows = coded.block_rows(b);
                    let at = rows.start * coded.row_bytes();
                    let len = rows.len() * coded.row_bytes();
                    if block.len() < len {
                        block.resize(len, 0);
                    }
                    let out = &mut block[..len];
                    let done = coded.decode_block(Arm::best(), b, out);
                    done.map_err(|e| record.undecodable(kind, e))?;
                    packed(at, out);
                }
            }
        }
        let scales = record.scales(kind);
        h.update(bytemuck::cast_slice(&scales)); // archives are little-endian, as this machine is
        if let Some(theirs) = theirs.filter(|_| differs.is_none()) {
            differs = scales_differ(c, &scales, theirs);
        }
    }
    let c = archive.check(Place::Record { layer, expert });
    c.equal(
        "digest of the raw expert",
        hex(&archive.raw_digest(layer, expert)?),
        hex(&short(&h)),
    )?;
    if let Some(theirs) = theirs {
        theirs?;
    }
    differs.map_or(Ok(()), Err)
}

/// The first byte in which a matrix is another than the model's; `ours` begins at its byte `at`.
fn packed_differ(
    c: Check<'_>,
    at: usize,
    ours: &[u8],
    theirs: &RawMatrix<'_>,
) -> Option<ArchiveError> {
    let theirs = theirs.packed.get(at..).unwrap_or_default();
    if ours == &theirs[..ours.len().min(theirs.len())] {
        return None;
    }
    let i = ours.iter().zip(theirs).position(|(a, b)| a != b)?;
    Some(c.invalid(
        "weights",
        format_args!("{:#04x} at byte {}, as the model has it", theirs[i], at + i),
        format_args!("{:#04x}", ours[i]),
        OTHER,
    ))
}

/// The first scale that is another than the model's.
fn scales_differ(c: Check<'_>, ours: &[f32], theirs: &RawMatrix<'_>) -> Option<ArchiveError> {
    let mut both = ours.iter().zip(theirs.scales.iter());
    let at = both.position(|(a, b)| a.to_bits() != b.to_bits())?;
    Some(c.invalid(
        "scales",
        format_args!("{:e} at {at}, as the model has it", theirs.scales[at]),
        format_args!("{:e}", ours[at]),
        OTHER,
    ))
}

/// Where records are taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    /// From the page cache where that has them, else from the disk.
    Asked,
    /// From the disk.
    #[cfg(test)]
    Disk,
    /// From the map.
    #[cfg(test)]
    Map,
}

/// Bytes that small records are read together in.
const TOGETHER: u64 = 4 << 20;

/// Entries of the index, each after the first one with its record.
type Users<'a> = &'a [(u32, u32)];

/// Records that are read at once.
struct Span {
    /// Of the entries in the order of their records.
    users: Range<usize>,
    bytes: Range<u64>,
}

fn spans(archive: &Archive, users: Users<'_>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut at = 0;
    for of_one in users.chunk_by(|a, b| a.0 == b.0) {
        let i = of_one[0].0 as usize;
        let begin = super::u64_at(archive.entry(i), 0);
        let end = archive.end_of(i);
        let next = at + of_one.len();
        match spans.last_mut() {
            Some(last) if end - last.bytes.start <= TOGETHER => {
                last.users.end = next;
                last.bytes.end = end;
            }
            _ => spans.push(Span {
                users: at..next,
                bytes: begin..end,
            }),
        }
        at = next;
    }
    spans
}

/// Calls `check` with each record's entries and its bytes, the padding behind it among them, by all
/// processors, while the records behind it are read. After an error only records before the bad one are
/// gone on with, so that the first is reported.
fn each_record(
    archive: &Archive,
    place: Where,
    check: impl Fn(&mut Vec<u8>, Users<'_>, &[u8]) -> Result<(), ArchiveError> + Sync,
) -> Result<(), ArchiveError> {
    let path = archive.path();
    let unopened = |e| ArchiveError::io(path, "open", e, UNREADABLE);
    let file = DirectFile::open(path).map_err(unopened)?;
    let cache = PageCache::of(path).map_err(unopened)?;
    let mut users: Vec<(u32, u32)> = (0..).zip(&archive.first).map(|(i, f)| (*f, i)).collect();
    users.sort_unstable();
    let spans = spans(archive, &users);
    let ranges: Vec<Range<u64>> = spans.iter().map(|s| s.bytes.clone()).collect();
    let said = AtomicBool::new(file.direct());
    let held = |n: usize| {
        let Range { start, end } = ranges[n];
        let held = match place {
            Where::Asked => cache.holds(start, (end - start) as usize),
            #[cfg(test)]
            Where::Disk => false,
            #[cfg(test)]
            Where::Map => true,
        };
        if !held && !said.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{}: this file system reads through the page cache alone",
                path.display()
            );
        }
        held.then(|| &archive.map[start as usize..end as usize])
    };
    let bad = AtomicUsize::new(usize::MAX);
    let first: Mutex<Option<ArchiveError>> = Mutex::new(None);
    let failed = |i: usize, e: ArchiveError| {
        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
        if bad.load(Ordering::Relaxed) > i {
            bad.store(i, Ordering::Relaxed);
            *first = Some(e);
        }
    };
    let ahead = Ahead {
        file: &file,
        ranges: &ranges,
        held: &held,
        stop: &|| interrupt::requested() || bad.load(Ordering::Relaxed) < usize::MAX,
        threads: rayon::current_num_threads(),
    };
    let work = |block: &mut Vec<u8>, n: usize, read: std::io::Result<&[u8]>| {
        let Span { users: at, bytes } = &spans[n];
        for of_one in users[at.clone()].chunk_by(|a, b| a.0 == b.0) {
            let i = of_one[0].0 as usize;
            if bad.load(Ordering::Relaxed) <= i {
                return;
            }
            let begin = super::u64_at(archive.entry(i), 0);
            let end = archive.end_of(i);
            let done = match &read {
                Ok(read) => {
                    let at = |b: u64| (b - bytes.start) as usize;
                    check(block, of_one, &read[at(begin)..at(end)])
                }
                // Which of them it is.
                Err(_) => {
                    let mut room = Aligned::new((end - begin) as usize + 2 * BLOCK);
                    match file.read_into(begin, (end - begin) as usize, &mut room) {
                        Ok(read) => check(block, of_one, read),
                        Err(e) => {
                            let (layer, expert) = archive.place(i);
                            let c = archive.check(Place::Record { layer, expert });
                            let expected = format_args!("bytes {begin} to {end} of the file");
                            Err(c.invalid("bytes", expected, e, DAMAGED))
                        }
                    }
                }
            };
            if let Err(e) = done {
                failed(i, e);
            }
        }
        archive.let_go(bytes.start as usize..bytes.end as usize);
    };
    let unread = |e| ArchiveError::io(path, "read", e, UNREADABLE);
    for_each(&ahead, work).map_err(unread)?;
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => going(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    const PLACES: [Where; 3] = [Where::Asked, Where::Disk, Where::Map];

    fn of_repository(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
    }

    /// Counts what `progress` gets.
    fn counted<T>(run: impl FnOnce(&(dyn Fn(u64) + Sync)) -> T) -> (T, usize) {
        let seen = AtomicUsize::new(0);
        let done = run(&|n| {
            seen.fetch_add(n as usize, Ordering::Relaxed);
        });
        (done, seen.into_inner())
    }

    /// The same from the disk, the map or either: archives good and bad, one with several spans.
    #[test]
    fn records_are_the_same_from_everywhere() {
        let mut files = vec![of_repository("models/sotu-row/experts.ansx")];
        for entry in std::fs::read_dir(of_repository("tests/golden")).unwrap() {
            files.push(entry.unwrap().path());
        }
        let (mut good, mut bad) = (0, 0);
        for file in files
            .iter()
            .filter(|f| f.extension() == Some("ansx".as_ref()))
        {
            let Ok(archive) = Archive::open(file) else {
                continue;
            };
            let told = |r: Result<Verified, ArchiveError>| r.map_err(|e| e.to_string());
            let all = archive.layers().len() * archive.experts();
            let [first, rest @ ..] = PLACES.map(|place| {
                let (checked, n) = counted(|p| told(quick(&archive, place, p)));
                assert_eq!(n == archive.records(), checked.is_ok(), "{checked:?}");
                let of_itself = told(deep(&archive, Some(&archive), place, &|_| ()));
                let (decoded, n) = counted(|p| told(deep(&archive, None::<&Archive>, place, p)));
                assert_eq!(n == all, decoded.is_ok(), "{decoded:?}");
                assert_eq!(
                    of_itself.map(|v| v.records),
                    decoded.clone().map(|v| v.records)
                );
                (checked, decoded)
            });
            assert!(rest.iter().all(|r| *r == first), "{first:?} {rest:?}");
            good += usize::from(first.1.is_ok());
            bad += usize::from(first.1.is_err());
        }
        assert!(good > 3 && bad > 10, "{good} {bad}");
    }

    /// Of several bad records the first is named, whoever finds which first.
    #[test]
    fn the_first_bad_record_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.ansx");
        let good = of_repository("models/sotu-row/experts.ansx");
        let mut bytes = std::fs::read(&good).unwrap();
        let archive = Archive::open(&good).unwrap();
        let all = archive.layers().len() * archive.experts();
        let mut of_all: Vec<u32> = archive.first.clone();
        of_all.dedup();
        assert_eq!(of_all.len(), all, "no record is shared");
        let users: Vec<(u32, u32)> = (0..all as u32).map(|i| (i, i)).collect();
        assert!(spans(&archive, &users).len() > 2);
        for i in [all - 1, all / 2 + 1, all / 2, all / 3, all / 3 + 2] {
            let (layer, expert) = archive.place(i);
            let (at, len) = archive.place_of(layer, expert).unwrap();
            bytes[at as usize + len / 2] ^= 4;
            std::fs::write(&file, &bytes).unwrap();
        }
        let (layer, expert) = archive.place(all / 3);
        let archive = Archive::open(&file).unwrap();
        let place = Place::Record { layer, expert };
        for place_of_bytes in PLACES.into_iter().cycle().take(30) {
            for done in [
                quick(&archive, place_of_bytes, &|_| ()),
                deep(&archive, None::<&Archive>, place_of_bytes, &|_| ()),
            ] {
                match done {
                    Err(ArchiveError::Invalid(e)) => {
                        assert_eq!((e.place, e.field), (place, "checksum"));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// A file that is cut while it is verified is no crash, where it is read.
    #[test]
    fn what_cannot_be_read_names_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.ansx");
        std::fs::copy(of_repository("models/sotu-row/experts.ansx"), &file).unwrap();
        let archive = Archive::open(&file).unwrap();
        let i = archive.layers().len() * archive.experts() / 2;
        let (layer, expert) = archive.place(i);
        let (at, _) = archive.place_of(layer, expert).unwrap();
        let cut = std::fs::File::options().write(true).open(&file).unwrap();
        cut.set_len(at + 100).unwrap();
        match quick(&archive, Where::Disk, &|_| ()) {
            Err(ArchiveError::Invalid(e)) => {
                assert_eq!(
                    (e.place, e.field),
                    (Place::Record { layer, expert }, "bytes")
                );
            }
            other => panic!("{other:?}"),
        }
    }
}
