//! What the page cache holds of a file.

use std::fs::File;
use std::io;
use std::path::Path;

/// Asks the page cache.
pub struct PageCache(File);

impl PageCache {
    /// Of the file `path`.
    pub fn of(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        #[cfg(target_os = "linux")]
        {
            // A question about what is not there would have the kernel read ahead. If this is refused, it
            // does.
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
        }
        Ok(Self(file))
    }

    /// Whether it holds the `len` bytes from `offset` on, as far as samples tell; no where the system does
    /// not say. (`mincore` says yes to whoever may not write the file.)
    pub fn holds(&self, offset: u64, len: usize) -> bool {
        /// Bytes for each question.
        const EVERY: usize = 256 << 10;
        let last = offset + (len as u64).saturating_sub(1);
        let mut at = (offset..last).step_by(EVERY).chain([last]);
        len == 0 || at.all(|at| self.has(at))
    }

    #[cfg(target_os = "linux")]
    fn has(&self, at: u64) -> bool {
        use rustix::io::{ReadWriteFlags, preadv2};
        let mut byte = [0];
        let mut room = [io::IoSliceMut::new(&mut byte)];
        // An offset with the highest bit set would be -1, the file's own, or refused.
        let there = i64::try_from(at).is_ok();
        there && preadv2(&self.0, &mut room, at, ReadWriteFlags::NOWAIT) == Ok(1)
    }

    #[cfg(not(target_os = "linux"))]
    fn has(&self, _at: u64) -> bool {
        let _ = &self.0;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_held_and_nothing_is_behind_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; 1_000_000]).unwrap();
        let cache = PageCache::of(&path).unwrap();
        assert!(!cache.holds(0, 1_000_001));
        assert!(!cache.holds(2_000_000, 1));
        assert!(!cache.holds(u64::MAX - 1, 1));
        assert!(cache.holds(5, 0));
        if !cache.holds(0, 1) {
            return println!("skipped: this file system does not say");
        }
        assert!(cache.holds(0, 1_000_000) && cache.holds(999_999, 1));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_was_dropped_is_not_held() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; 4 << 20]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let cache = PageCache::of(&path).unwrap();
        let held = cache.holds(0, 4 << 20);
        // One that lies in memory alone keeps what it has.
        let mut read = reader_of(&path);
        assert!(!held || !read.direct(), "still held");
        let mut room = super::super::reader::Aligned::new(4 << 20);
        read.read(0, &mut room).unwrap();
        read = reader_of(&path);
        // A direct read puts nothing there.
        assert!(!read.direct() || !cache.holds(0, 4 << 20));
    }

    fn reader_of(path: &Path) -> super::super::reader::DirectFile {
        super::super::reader::DirectFile::open(path).unwrap()
    }
}
