//! Reads by `io_uring`: many pieces under way at once, for one thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};

/// Bytes of a piece.
pub const PIECE: usize = 1 << 20;

/// Pieces under way at once.
const DEPTH: usize = 32;

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;

thread_local! {
    /// This thread's ring; none where the kernel has none for us.
    static RING: RefCell<Option<Option<Ring>>> = const { RefCell::new(None) };
}

/// Bytes of a file, and where they go.
pub struct Target<'a> {
    /// The file.
    pub file: &'a File,
    /// First byte in it.
    pub offset: u64,
    /// Room for them.
    pub at: *mut u8,
    /// Bytes.
    pub len: usize,
}

/// Fills `out` from `offset` on, `piece` bytes at a time, each but the last a multiple of a block.
/// `None` where the kernel refuses rings: nothing was read.
pub fn read(file: &File, offset: u64, out: &mut [u8], piece: usize) -> Option<io::Result<()>> {
    RING.with_borrow_mut(|ring| {
        let made = ring.get_or_insert_with(Ring::new);
        let target = Target {
            file,
            offset,
            at: out.as_mut_ptr(),
            len: out.len(),
        };
        let mut done = None;
        // SAFETY: the room is `out`, which nobody else has.
        let taken = unsafe {
            made.as_mut()?
                .fill(&[target], piece, &mut |_, d| done = Some(d))
        };
        if !taken {
            *made = None;
        }
        done
    })
}

/// Reads by the plain call.
pub fn plain(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.read_exact_at(out, offset)
}

/// A ring of a thread.
pub struct Ring(IoUring);

impl Ring {
    /// None where the kernel has none for us.
    pub fn new() -> Option<Self> {
        match IoUring::new(DEPTH as u32) {
            Ok(ring) => Some(Self(ring)),
            Err(e) => {
                tracing::debug!("no io_uring here, so threads read: {e}");
                None
            }
        }
    }

    /// Reads all targets, in pieces, those of the first targets first; `done` gets each target's number
    /// when all of it is there or has failed. Pieces that end early are read again by the plain call.
    /// False where the kernel does not take pieces any more, after which the ring is of no use, and nothing
    /// is under way: targets that `done` has not got are still to be read, all of them.
    ///
    /// # Safety
    /// Each target's room is written by nobody else and lives until `done` has got it, or this returns.
    pub unsafe fn fill(
        &mut self,
        targets: &[Target<'_>],
        piece: usize,
        done: &mut dyn FnMut(usize, io::Result<()>),
    ) -> bool {
        let ring = &mut self.0;
        let length = |t: usize, start: usize| piece.min(targets[t].len - start);
        let mut waiting: VecDeque<(usize, usize)> = VecDeque::new();
        // Pieces that are left of each target, and why it failed.
        let mut left: Vec<(usize, Option<io::Error>)> = Vec::with_capacity(targets.len());
        for (t, target) in targets.iter().enumerate() {
            waiting.extend((0..target.len).step_by(piece).map(|start| (t, start)));
            left.push((target.len.div_ceil(piece), None));
            if target.len == 0 {
                done(t, Ok(()));
            }
        }
        let mut under_way = 0usize;
        loop {
            while under_way < DEPTH
                && let Some((t, start)) = waiting.pop_front()
            {
                let (target, state) = (&targets[t], &mut left[t]);
                if state.1.is_some() {
                    // It has failed, so its other pieces need not be read.
                    state.0 -= 1;
                    if let (0, error) = (state.0, &mut state.1)
                        && let Some(e) = error.take()
                    {
                        done(t, Err(e));
                    }
                    continue;
                }
                // SAFETY: within the target's room.
                let at = unsafe { target.at.add(start) };
                let fd = types::Fd(target.file.as_raw_fd());
                let entry = opcode::Read::new(fd, at, length(t, start) as u32)
                    .offset(target.offset + start as u64)
                    .build()
                    .user_data(((t as u64) << 32) | (start / piece) as u64);
                // SAFETY: file and room live until the read is done: nothing leaves this loop before
                // `under_way` is 0, but where the kernel has taken nothing of it.
                let pushed = unsafe { ring.submission().push(&entry) };
                if pushed.is_err() {
                    waiting.push_front((t, start));
                    break;
                }
                under_way += 1;
            }
            if under_way == 0 {
                return true;
            }
            // What was submitted ends whether or not this call fails.
            if let Err(e) = ring.submit_and_wait(1) {
                let again = e.raw_os_error();
                let again = again.is_some_and(|e| [EINTR, EAGAIN, EBUSY].contains(&e));
                if !again && ring.submission().len() == under_way {
                    return false;
                }
                std::thread::yield_now();
            }
            for completed in ring.completion() {
                under_way -= 1;
                let t = (completed.user_data() >> 32) as usize;
                let start = (completed.user_data() as u32) as usize * piece;
                let (target, state) = (&targets[t], &mut left[t]);
                let found = match completed.result() {
                    n if n == length(t, start) as i32 => Ok(()),
                    n if n >= 0 => {
                        // SAFETY: within the room, with which the kernel is done.
                        let out = unsafe {
                            std::slice::from_raw_parts_mut(target.at.add(start), length(t, start))
                        };
                        plain(target.file, target.offset + start as u64, out)
                    }
                    e if [EINTR, EAGAIN].contains(&-e) => {
                        waiting.push_back((t, start));
                        continue;
                    }
                    e => Err(io::Error::from_raw_os_error(-e)),
                };
                state.0 -= 1;
                if let Err(e) = found {
                    state.1.get_or_insert(e);
                }
                if state.0 == 0 {
                    done(t, state.1.take().map_or(Ok(()), Err));
                }
            }
        }
    }
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
