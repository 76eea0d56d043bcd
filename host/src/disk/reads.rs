//! Reads of several records at once, by a thread that lives as long as whoever asks: all are given to one
//! `io_uring`, in pieces, many of which are under way at a time, and each record is given back as soon as
//! it is there. Where the kernel has no ring for us, or the file is read through the page cache, threads
//! that take pieces do it by the plain call.

use std::io;
use std::ops::{DerefMut, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::reader::DirectFile;
use super::ring::{PIECE, Ring, Target};

/// Threads that read pieces where there is no ring.
const THREADS: usize = 8;

/// Bytes that are to be read.
pub struct Read<R> {
    /// Whatever tells it from others.
    pub number: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    /// Room for them, and for what direct reads add at both ends.
    pub room: R,
}

/// Bytes that were read.
pub struct Done<R> {
    /// As in [`Read`].
    pub number: usize,
    /// The room.
    pub room: R,
    /// Where in it the bytes are.
    pub bytes: io::Result<Range<usize>>,
}

struct Batch<R> {
    file: Arc<DirectFile>,
    reads: Vec<Read<R>>,
    done: Sender<Done<R>>,
}

/// How a [`Reads`] reads what is direct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By a ring, where the kernel has one for us.
    Ring,
    /// By threads.
    Threads,
}

/// The thread.
pub struct Reads<R> {
    /// None where there is no thread to be had: whoever asks reads.
    batches: Option<Sender<Batch<R>>>,
    way: Way,
}

impl<R: DerefMut<Target = [u8]> + Send + 'static> Reads<R> {
    /// Starts the thread.
    pub fn new(way: Way) -> Self {
        let (batches, asked) = channel::<Batch<R>>();
        let serve = move || {
            let mut ring = ring(way);
            asked.into_iter().for_each(|b| read_all(&mut ring, b));
        };
        let thread = std::thread::Builder::new().name("disk".into()).spawn(serve);
        Self {
            batches: thread.is_ok().then_some(batches),
            way,
        }
    }

    /// Starts to read all of `reads`; each comes back as soon as it is done, in any order.
    pub fn start(&self, file: &Arc<DirectFile>, reads: Vec<Read<R>>) -> Receiver<Done<R>> {
        let (done, receiver) = channel();
        let batch = Batch {
            file: file.clone(),
            reads,
            done,
        };
        let refused = match &self.batches {
            Some(batches) => batches.send(batch).err().map(|e| e.0),
            None => Some(batch),
        };
        if let Some(batch) = refused {
            read_all(&mut ring(self.way), batch);
        }
        receiver
    }
}

fn ring(way: Way) -> Option<Ring> {
    match way {
        Way::Ring => Ring::new(),
        Way::Threads => None,
    }
}

fn read_all<R: DerefMut<Target = [u8]> + Send>(ring: &mut Option<Ring>, batch: Batch<R>) {
    let Batch { file, reads, done } = batch;
    let mut waiting: Vec<Option<Read<R>>> = reads.into_iter().map(Some).collect();
    if let Some(some) = ring.as_mut().filter(|_| file.direct()) {
        let mut numbers = Vec::with_capacity(waiting.len());
        let mut targets = Vec::with_capacity(waiting.len());
        for (i, read) in waiting.iter_mut().enumerate() {
            let Some(read) = read else { continue };
            if let Some((begin, whole, skip)) = file.blocks(read.offset, read.len, &read.room) {
                targets.push(Target {
                    file: file.file(),
                    offset: begin,
                    at: read.room.as_mut_ptr(),
                    len: whole,
                });
                numbers.push((i, skip));
            }
        }
        // SAFETY: the rooms stay where they are, in nobody's hands, until their read is done.
        let taken = unsafe {
            some.fill(&targets, PIECE, &mut |t, result| {
                let (i, skip) = numbers[t];
                if let Some(read) = waiting[i].take() {
                    give(&done, read, result.map(|()| skip));
                }
            })
        };
        if !taken {
            *ring = None;
        }
    }
    by_threads(&file, waiting.into_iter().flatten().collect(), &done);
}

/// Gives a read back; nobody may be there any more to take it.
fn give<R>(done: &Sender<Done<R>>, read: Read<R>, skip: io::Result<usize>) {
    let _ = done.send(Done {
        number: read.number,
        room: read.room,
        bytes: skip.map(|skip| skip..skip + read.len),
    });
}

/// A piece of a read, its number, and where it goes.
struct Piece<'a> {
    read: usize,
    offset: u64,
    out: &'a mut [u8],
}

/// Reads in pieces, by threads; what has no whole blocks in its room as one.
fn by_threads<R: DerefMut<Target = [u8]> + Send>(
    file: &DirectFile,
    mut reads: Vec<Read<R>>,
    done: &Sender<Done<R>>,
) {
    let mut results: Vec<io::Result<usize>> = Vec::with_capacity(reads.len());
    let (mut pieces, mut rest) = (Vec::new(), Vec::new());
    for (i, read) in reads.iter_mut().enumerate() {
        let (offset, len) = (read.offset, read.len);
        let place = match file.direct() {
            true => file.blocks(offset, len, &read.room),
            false => (len <= read.room.len()).then_some((offset, len, 0)),
        };
        match place {
            None => {
                results.push(Ok(0));
                rest.push(i);
            }
            Some((begin, whole, skip)) => {
                results.push(Ok(skip));
                let starts = (begin..).step_by(PIECE);
                let all = read.room[..whole].chunks_mut(PIECE).zip(starts);
                pieces.extend(all.map(|(out, offset)| {
                    Some(Piece {
                        read: i,
                        offset,
                        out,
                    })
                }));
            }
        }
    }
    let failures = Mutex::new(Vec::new());
    let (next, count) = (AtomicUsize::new(0), pieces.len());
    let pieces = Mutex::new(pieces);
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count {
                break;
            }
            let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner)[n].take();
            let Some(piece) = piece else { continue };
            if let Err(e) = super::ring::plain(file.file(), piece.offset, piece.out) {
                let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                failures.push((piece.read, e));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS.min(count) {
            // One less, where there is none to be had.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    drop(pieces);
    for (read, e) in failures
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
    {
        results[read] = Err(e);
    }
    for i in rest {
        let Read {
            offset, len, room, ..
        } = &mut reads[i];
        let start = room.as_ptr().addr();
        let read = file.read_into(*offset, *len, room);
        results[i] = read.map(|bytes| bytes.as_ptr().addr() - start);
    }
    for (read, result) in reads.into_iter().zip(results) {
        give(done, read, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::reader::{Aligned, BLOCK};

    /// Reads large and small, anywhere, of a file that is direct or buffered, by a ring and by threads.
    #[test]
    fn all_records_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let size = 3 * PIECE + 5 * BLOCK + 1000;
        let bytes: Vec<u8> = (0..size as u32).map(|i| (i * 31 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let direct = Arc::new(DirectFile::open(&path).unwrap());
        let buffered = Arc::new(DirectFile::buffered(&path).unwrap());
        assert!(!buffered.direct());
        println!("direct: {}", direct.direct());
        let asked = [
            (0, 1),
            (4096, 2 * PIECE + 100),
            (5000, PIECE),
            (16, 0),
            (PIECE as u64 + 16, 2 * PIECE),
            (size as u64 - 1500, 1500),
            (size as u64 - 10, 10),
        ];
        for file in [&direct, &buffered] {
            for way in [Way::Ring, Way::Threads] {
                let reads = Reads::new(way);
                for round in 0..3 {
                    let all = asked
                        .iter()
                        .enumerate()
                        .map(|(number, (offset, len))| Read {
                            number,
                            offset: *offset,
                            len: *len,
                            room: Aligned::new((len + 2 * BLOCK).next_multiple_of(BLOCK)),
                        });
                    let mut seen = [false; 7];
                    for done in reads.start(file, all.collect()) {
                        let (offset, len) = asked[done.number];
                        let at = done.bytes.unwrap();
                        let (from, to) = (&done.room[at], &bytes[offset as usize..][..len]);
                        assert!(from == to, "{way:?} {round} {offset} {len}");
                        assert!(!std::mem::replace(&mut seen[done.number], true));
                    }
                    assert_eq!(seen, [true; 7], "{way:?}");
                }
                // One past the end fails, the others do not; nobody waits for these.
                let read = |number, offset| Read {
                    number,
                    offset,
                    len: PIECE,
                    room: Aligned::new(PIECE + 2 * BLOCK),
                };
                let past = (size - 4096) as u64;
                let mut ends: Vec<(usize, bool)> = reads
                    .start(file, vec![read(0, past), read(1, 0), read(2, 1 << 40)])
                    .into_iter()
                    .map(|d| (d.number, d.bytes.is_ok()))
                    .collect();
                ends.sort_unstable();
                assert_eq!(ends, [(0, false), (1, true), (2, false)], "{way:?}");
                drop(reads.start(file, vec![read(0, 0)]));
            }
        }
    }

    #[test]
    #[ignore = "a measurement: it takes a large file, which ANSATZ_FILE names, and prints rates to set beside `dd iflag=direct`"]
    fn rate() {
        let path = std::env::var_os("ANSATZ_FILE").expect("ANSATZ_FILE names a large file");
        let file = Arc::new(DirectFile::open(std::path::Path::new(&path)).unwrap());
        const RECORD: usize = 14 << 20;
        let all = (file.len() as usize / RECORD).min(200);
        for way in [Way::Ring, Way::Threads] {
            let reads = Reads::new(way);
            for together in [1, 2, 8] {
                let mut rooms: Vec<Aligned> = (0..together)
                    .map(|_| Aligned::new(RECORD + 2 * BLOCK))
                    .collect();
                let start = std::time::Instant::now();
                for first in (0..all / together * together).step_by(together) {
                    let these = rooms.drain(..).enumerate().map(|(number, room)| Read {
                        number,
                        offset: ((first + number) * RECORD) as u64,
                        len: RECORD,
                        room,
                    });
                    let done = reads.start(&file, these.collect());
                    rooms.extend(done.into_iter().map(|d| {
                        d.bytes.unwrap();
                        d.room
                    }));
                }
                let bytes = (all / together * together * RECORD) as f64;
                let rate = bytes / start.elapsed().as_secs_f64() / 1e9;
                println!("{way:?}, {together} records at once: {rate:.2} GB/s");
            }
        }
    }
}
