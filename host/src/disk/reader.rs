//! Reads of a large file past the page cache: by `io_uring` where the kernel has it for us, in large
//! pieces; else by the plain call, many threads at once.

use std::fs::File;
use std::io;
use std::path::Path;

/// Offsets, lengths and addresses of direct reads are multiples of this.
pub const BLOCK: usize = 4096;

/// Bytes of room for a read of `bytes` and what direct reads add at both ends.
pub fn read_slot(bytes: usize) -> usize {
    (bytes + 2 * BLOCK).next_multiple_of(BLOCK)
}

/// A file that is read at given places: with `O_DIRECT` where the file system takes it.
pub struct DirectFile {
    file: File,
    direct: bool,
    len: u64,
}

/// Bytes that start at a multiple of [`BLOCK`], for direct reads.
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK).min(BLOCK);
        Self { bytes, start, len }
    }
}

impl std::ops::Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl DirectFile {
    /// Opens `path`; whether reads go past the cache is in [`DirectFile::direct`].
    pub fn open(path: &Path) -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        {
            use std::os::unix::fs::OpenOptionsExt;
            /// The flag on x86-64 and others with the generic numbers.
            #[cfg(not(any(target_arch = "aarch64", target_arch = "arm")))]
            const O_DIRECT: i32 = 0o40000;
            #[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
            const O_DIRECT: i32 = 0o200000;
            let opened = File::options().read(true).custom_flags(O_DIRECT).open(path);
            if let Ok(file) = opened {
                let len = file.metadata()?.len();
                let this = Self {
                    file,
                    direct: true,
                    len,
                };
                // Some file systems take the flag and refuse the first read.
                let mut probe = Aligned::new(BLOCK);
                if len >= BLOCK as u64 && this.read(0, &mut probe).is_ok() {
                    return Ok(this);
                }
            }
        }
        Self::buffered(path)
    }

    /// The same through the page cache.
    pub fn buffered(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        Ok(Self {
            direct: false,
            len: file.metadata()?.len(),
            file,
        })
    }

    /// The file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The whole blocks around the `len` bytes from `offset` on, where these are within the file and a
    /// buffer that is aligned: where they begin, how many bytes they are, and those before the first one
    /// asked for.
    pub(super) fn blocks(
        &self,
        offset: u64,
        len: usize,
        buffer: &[u8],
    ) -> Option<(u64, usize, usize)> {
        let aligned = buffer.as_ptr().addr().is_multiple_of(BLOCK);
        let skip = (offset % BLOCK as u64) as usize;
        let whole = (skip + len).next_multiple_of(BLOCK);
        let begin = offset - skip as u64;
        let fits = whole <= buffer.len() && begin + whole as u64 <= self.len;
        (aligned && fits).then_some((begin, whole, skip))
    }

    /// Whether reads go past the page cache.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `out` from `offset` on. Direct reads need offset, length and address at multiples of
    /// [`BLOCK`], but for the end of the file.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        #[cfg(target_os = "linux")]
        if self.direct
            && out.len() > super::ring::PIECE
            && let Some(done) = super::ring::read(&self.file, offset, out, super::ring::PIECE)
        {
            return done;
        }
        let mut done = 0;
        while done < out.len() {
            match self.file.read_at(&mut out[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => (),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The `len` bytes from `offset` on, read into `buffer` by whole blocks where that is direct;
    /// they are where the result says.
    pub fn read_into<'a>(
        &self,
        offset: u64,
        len: usize,
        buffer: &'a mut [u8],
    ) -> io::Result<&'a [u8]> {
        if self.direct
            && let Some((begin, whole, skip)) = self.blocks(offset, len, buffer)
        {
            self.read(begin, &mut buffer[..whole])?;
            return Ok(&buffer[skip..skip + len]);
        }
        if self.direct {
            let skip = (offset % BLOCK as u64) as usize;
            let whole = (skip + len).next_multiple_of(BLOCK);
            let begin = offset - skip as u64;
            // The last block of a file, or a buffer that is not made for it.
            let mut other = Aligned::new(whole);
            let there = (self.len.saturating_sub(begin) as usize).min(whole);
            self.read_tail(
                begin,
                &mut other[..there.next_multiple_of(BLOCK)],
                skip + len,
            )?;
            buffer[..len].copy_from_slice(&other[skip..skip + len]);
        } else {
            self.read(offset, &mut buffer[..len])?;
        }
        Ok(&buffer[..len])
    }

    /// Reads at least `least` bytes; the file may end within the last block.
    fn read_tail(&self, offset: u64, out: &mut [u8], least: usize) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let mut done = 0;
        while done < least {
            match self.file.read_at(&mut out[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => (),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..3 * BLOCK as u32 + 1000)
            .map(|i| (i * 7 % 251) as u8)
            .collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = DirectFile::open(&path).unwrap();
        assert_eq!(file.len(), bytes.len() as u64);
        let mut buffer = Aligned::new(4 * BLOCK);
        for (offset, len) in [
            (0, 1),
            (0, BLOCK),
            (16, BLOCK),
            (BLOCK, 2 * BLOCK),
            (5000, 7000),
            (3 * BLOCK, 1000),
            (2 * BLOCK + 16, BLOCK + 984),
        ] {
            let read = file.read_into(offset as u64, len, &mut buffer).unwrap();
            assert!(read == &bytes[offset..offset + len], "{offset} {len}");
            let mut odd = vec![0; 3 * BLOCK + 1];
            let read = file.read_into(offset as u64, len, &mut odd[1..]).unwrap();
            assert!(read == &bytes[offset..offset + len], "{offset} {len}");
        }
        assert!(file.read_into(3 * BLOCK as u64, 1001, &mut buffer).is_err());
        assert!(DirectFile::open(&dir.path().join("none")).is_err());
    }
}
