//! Reads by `io_uring`: many pieces of one read under way at once, for one thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};

/// Bytes of a piece.
pub const PIECE: usize = 1 << 20;

/// Pieces under way at once.
const DEPTH: usize = 16;

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;

thread_local! {
    /// This thread's ring; none where the kernel has none for us.
    static RING: RefCell<Option<Option<IoUring>>> = const { RefCell::new(None) };
}

/// Fills `out` from `offset` on, `piece` bytes at a time, each but the last a multiple of a block.
/// `None` where the kernel refuses rings: nothing was read.
pub fn read(file: &File, offset: u64, out: &mut [u8], piece: usize) -> Option<io::Result<()>> {
    RING.with_borrow_mut(|ring| {
        let made = ring.get_or_insert_with(|| match IoUring::new(DEPTH as u32) {
            Ok(ring) => Some(ring),
            Err(e) => {
                tracing::debug!("no io_uring here, so threads read: {e}");
                None
            }
        });
        let left = match fill(made.as_mut()?, file, offset, out, piece) {
            Some(left) => left,
            None => {
                *made = None;
                return None;
            }
        };
        Some(left.and_then(|left| {
            left.into_iter().try_for_each(|(start, len)| {
                plain(file, offset + start as u64, &mut out[start..start + len])
            })
        }))
    })
}

/// Reads by the plain call.
pub fn plain(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.read_exact_at(out, offset)
}

/// Reads all pieces; those that ended early are given back, for the plain call to end or to fail.
/// `None` where the kernel takes none of them.
fn fill(
    ring: &mut IoUring,
    file: &File,
    offset: u64,
    out: &mut [u8],
    piece: usize,
) -> Option<io::Result<Vec<(usize, usize)>>> {
    let fd = types::Fd(file.as_raw_fd());
    let base = out.as_mut_ptr();
    let mut waiting: VecDeque<usize> = (0..out.len()).step_by(piece).collect();
    let length = |start: usize| piece.min(out.len() - start);
    let (mut under_way, mut left, mut failed) = (0usize, Vec::new(), None);
    loop {
        while under_way < DEPTH && failed.is_none() {
            let Some(start) = waiting.pop_front() else {
                break;
            };
            // SAFETY: within `out`.
            let at = unsafe { base.add(start) };
            let entry = opcode::Read::new(fd, at, length(start) as u32)
                .offset(offset + start as u64)
                .build()
                .user_data(start as u64);
            // SAFETY: file and bytes live until the read is done: nothing leaves this loop before
            // `under_way` is 0.
            let pushed = unsafe { ring.submission().push(&entry) };
            if pushed.is_err() {
                waiting.push_front(start);
                break;
            }
            under_way += 1;
        }
        if under_way == 0 {
            break;
        }
        // What was submitted ends whether or not this call fails.
        if let Err(e) = ring.submit_and_wait(1) {
            let again = e.raw_os_error();
            let again = again.is_some_and(|e| [EINTR, EAGAIN, EBUSY].contains(&e));
            if !again && ring.submission().len() == under_way {
                return None;
            }
            std::thread::yield_now();
        }
        for done in ring.completion() {
            under_way -= 1;
            let start = done.user_data() as usize;
            match done.result() {
                n if n == length(start) as i32 => (),
                n if n >= 0 => left.push((start, length(start))),
                e if [EINTR, EAGAIN].contains(&-e) => waiting.push_back(start),
                e => {
                    failed.get_or_insert(io::Error::from_raw_os_error(-e));
                }
            }
        }
    }
    Some(match failed {
        None => Ok(left),
        Some(e) => Err(e),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_come_where_they_belong() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i * 31 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        for (offset, len, piece) in [
            (0, 1_000_000, 4096),
            (0, 1_000_000, 1 << 20),
            (4096, 300_001, 1000),
            (999_999, 1, 4096),
            (5, 0, 4096),
        ] {
            let mut out = vec![0; len];
            match read(&file, offset as u64, &mut out, piece) {
                None => return println!("skipped: no io_uring here"),
                Some(done) => done.unwrap(),
            }
            assert!(out == bytes[offset..offset + len], "{offset} {len} {piece}");
        }
        let mut out = vec![0; 100_000];
        let error = read(&file, 950_000, &mut out, 4096).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        // A file that cannot be read.
        let closed = File::options()
            .write(true)
            .open(&path)
            .map(|file| read(&file, 0, &mut out, 4096).unwrap());
        assert!(closed.unwrap().is_err());
    }
}
