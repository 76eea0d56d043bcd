//! Work on the ranges of a large file, read ahead of it: a few threads read, as many as there are
//! processors work, and what is read waits in a bounded number of buffers, which are used again and again.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::reader::{Aligned, BLOCK, DirectFile};

/// Threads that read, each a range at a time. A range of some pieces keeps a disk busy already, and while
/// one of them comes to its end the other goes on. Where more share the disk, the first range comes later,
/// and the last ones come all at once.
const READERS: usize = 2;

/// A range that waits for work.
struct Ready<'a> {
    number: usize,
    bytes: Bytes<'a>,
}

enum Bytes<'a> {
    /// In memory anyway.
    Held(&'a [u8]),
    /// Where in the buffer, if they could be read.
    Read(Aligned, io::Result<Range<usize>>),
}

/// What goes through [`for_each`].
pub struct Ahead<'a> {
    /// The file.
    pub file: &'a DirectFile,
    /// Ranges of it; they are read in this order.
    pub ranges: &'a [Range<u64>],
    /// A range's bytes, where they are in memory already.
    pub held: &'a (dyn Fn(usize) -> Option<&'a [u8]> + Sync),
    /// Whether to begin no more reads. What was begun is still given to whoever works.
    pub stop: &'a (dyn Fn() -> bool + Sync),
    /// Threads that work.
    pub threads: usize,
}

/// Calls `work` with the number of each range and its bytes, on several threads at once, each of which has
/// an `S` of its own. Memory: the longest range, once for each thread that works and a few times more.
///
/// # Errors
/// Where no thread can be started.
pub fn for_each<'a, S: Default>(
    ahead: &Ahead<'a>,
    work: impl Fn(&mut S, usize, io::Result<&[u8]>) + Sync,
) -> io::Result<()> {
    let threads = ahead.threads.clamp(1, ahead.ranges.len().max(1));
    let readers = READERS.min(ahead.ranges.len());
    let (ready, items) = sync_channel(readers + threads);
    // Buffers that are free; nothing: one that is still to be made.
    let (free, rooms) = channel();
    // A range being read, and one that waits, for each that reads: else the disk waits for whoever works.
    for _ in 0..2 * readers + threads {
        let _ = free.send(None); // the other end is held below
    }
    let (items, rooms) = (Arc::new(Mutex::new(items)), Mutex::new(rooms));
    let next = AtomicUsize::new(0);
    let longest = ahead.ranges.iter().map(|r| r.end - r.start).max();
    let longest = longest.unwrap_or(0) as usize;
    let read = |ready: SyncSender<Ready<'a>>| {
        let mut spare = None;
        // Whoever works has ended where there is no answer.
        while !(ahead.stop)() {
            let room = match spare.take() {
                Some(room) => room,
                None => match take(&rooms) {
                    Some(room) => room,
                    None => break,
                },
            };
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = ahead.ranges.get(number) else {
                break;
            };
            let bytes = match (ahead.held)(number) {
                Some(held) => {
                    spare = Some(room);
                    Bytes::Held(held)
                }
                None => {
                    let mut room = room.unwrap_or_else(|| Aligned::new(longest + 2 * BLOCK));
                    let len = (range.end - range.start) as usize;
                    let start = room.as_ptr().addr();
                    let bytes = ahead.file.read_into(range.start, len, &mut room);
                    let bytes = bytes.map(|b| b.as_ptr().addr() - start);
                    Bytes::Read(room, bytes.map(|skip| skip..skip + len))
                }
            };
            if ready.send(Ready { number, bytes }).is_err() {
                break;
            }
        }
    };
    let labour = |items: Arc<Mutex<Receiver<Ready<'a>>>>, free: Sender<Option<Aligned>>| {
        let mut state = S::default();
        while let Some(Ready { number, bytes }) = take(&items) {
            match bytes {
                Bytes::Held(held) => work(&mut state, number, Ok(held)),
                Bytes::Read(room, bytes) => {
                    work(&mut state, number, bytes.map(|at| &room[at]));
                    let _ = free.send(Some(room)); // readers may have ended
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let mut started = Ok(());
        for i in 0..readers {
            let (read, ready) = (&read, ready.clone());
            let named = std::thread::Builder::new().name("disk".into());
            match named.spawn_scoped(scope, move || read(ready)) {
                Ok(_) => (),
                Err(e) => {
                    // Fewer will do.
                    if i == 0 {
                        started = Err(e);
                    }
                    break;
                }
            }
        }
        drop(ready);
        for _ in 1..threads {
            let (labour, items, free) = (&labour, items.clone(), free.clone());
            // One less, where there is none to be had.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || labour(items, free));
        }
        // Its ends of the channels go with the last one that works, so that readers end even then.
        labour(items, free);
        started
    })
}

/// The next one; none where nobody can send any more.
fn take<T>(from: &Mutex<Receiver<T>>) -> Option<T> {
    let from = from.lock().unwrap_or_else(PoisonError::into_inner);
    from.recv().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Ranges of any length, some of them held: each comes once, whole; buffers are few.
    #[test]
    fn every_range_comes_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 31 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let mut ranges = Vec::new();
        let mut at = 0;
        for i in 0u64.. {
            let end = at + 1 + (i * 7919) % 300_000;
            if end > bytes.len() as u64 {
                break;
            }
            ranges.push(at..end);
            at = end;
        }
        let direct = DirectFile::open(&path).unwrap();
        let buffered = DirectFile::buffered(&path).unwrap();
        for (file, threads, every) in [
            (&direct, 1, usize::MAX),
            (&direct, 3, 2),
            (&buffered, 2, 1),
            (&buffered, 100, 3),
        ] {
            let held = |i: usize| {
                let range = ranges[i].start as usize..ranges[i].end as usize;
                (i % every == 1 % every && every < usize::MAX).then(|| &bytes[range])
            };
            let seen: Vec<AtomicUsize> = ranges.iter().map(|_| AtomicUsize::new(0)).collect();
            let states = AtomicUsize::new(0);
            let ahead = Ahead {
                file,
                ranges: &ranges,
                held: &held,
                stop: &|| false,
                threads,
            };
            for_each(&ahead, |first: &mut Option<()>, i, read| {
                if first.replace(()).is_none() {
                    states.fetch_add(1, Ordering::Relaxed);
                }
                let range = ranges[i].start as usize..ranges[i].end as usize;
                assert!(read.unwrap() == &bytes[range], "{i}");
                seen[i].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
            assert!((1..=threads).contains(&states.into_inner()));
        }
    }

    /// What was begun before the stop is given to whoever works, what is behind the end fails, and
    /// nothing is no work.
    #[test]
    fn stop_and_failure() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; 100_000]).unwrap();
        let file = DirectFile::open(&path).unwrap();
        let ranges: Vec<Range<u64>> = (0..100).map(|i| i * 2000..(i + 1) * 2000).collect();
        let stop = AtomicBool::new(false);
        let most = AtomicUsize::new(0);
        let failed = AtomicUsize::new(0);
        let run = |ranges: &[Range<u64>], at: usize| {
            let ahead = Ahead {
                file: &file,
                ranges,
                held: &|_| None,
                stop: &|| stop.load(Ordering::Relaxed),
                threads: 2,
            };
            for_each(&ahead, |(): &mut (), i, read| {
                assert_eq!(read.is_err(), i >= 50, "{i}");
                failed.fetch_add(usize::from(read.is_err()), Ordering::Relaxed);
                most.fetch_max(i, Ordering::Relaxed);
                stop.fetch_or(i == at, Ordering::Relaxed);
                // The other thread may be ahead of the one that stops.
                while i > at && !stop.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
            })
            .unwrap();
        };
        run(&ranges, usize::MAX);
        assert_eq!(
            (most.load(Ordering::Relaxed), failed.load(Ordering::Relaxed)),
            (99, 50)
        );
        most.store(0, Ordering::Relaxed);
        run(&ranges, 10);
        let most = most.load(Ordering::Relaxed);
        assert!((10..30).contains(&most), "{most}");
        run(&[], 0);
    }

    /// Whoever works may panic: nothing waits for ever.
    #[test]
    fn panics_come_through() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![0; 100_000]).unwrap();
        let file = DirectFile::open(&path).unwrap();
        let ranges: Vec<Range<u64>> = (0..50).map(|i| i * 2000..(i + 1) * 2000).collect();
        let ahead = Ahead {
            file: &file,
            ranges: &ranges,
            held: &|_| None,
            stop: &|| false,
            threads: 2,
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for_each(&ahead, |(): &mut (), i, _| assert!(i < 5, "on purpose"))
        }));
        assert!(result.is_err());
    }
}
