//! Memory of the host: what is free, and large pieces of it.

use std::fs::read_to_string;
use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::{MmapMut, MmapOptions};
use rayon::prelude::*;

/// Bytes of a page where large ones are to be had.
const LARGE: usize = 2 << 20;

/// Bytes of a page otherwise.
const PAGE: usize = 4096;

/// Memory from which on what is free is looked at first.
const MUCH: usize = 64 << 20;

/// Bytes that could be had without swapping, 0 where the system does not tell: what the kernel calls
/// available, or what the control group that this process runs in leaves of that.
pub fn available() -> u64 {
    let text = read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = field(&text, "MemAvailable:").unwrap_or(0);
    let of_group = |name: &str| read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok();
    let left = match (of_group("max"), of_group("current"), of_group("stat")) {
        (Some(max), Some(current), Some(stat)) => left_of_group(&max, &current, &stat),
        _ => None,
    };
    (1024 * kib).min(left.unwrap_or(u64::MAX))
}

/// The number behind `name`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// What `memory.max` leaves (cgroup v2), of which files in the page cache can be dropped; `None` without a limit.
fn left_of_group(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let files: u64 = ["active_file ", "inactive_file "]
        .iter()
        .filter_map(|name| field(stat, name))
        .sum();
    Some(max.saturating_sub(current.saturating_sub(files)))
}

/// Zeroed memory in large pages, where the system has them: faults and translations are 512 times as few.
pub struct Pages {
    map: MmapMut,
    /// Where the first large page starts.
    start: usize,
    len: usize,
}

impl Pages {
    /// `len` bytes, which take memory when they are first written to.
    pub fn new(len: usize) -> io::Result<Self> {
        let all = len.checked_add(LARGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = MmapOptions::new().len(all).map_anon()?;
        // Where there are none, small ones do.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_ptr().align_offset(LARGE);
        Ok(Self { map, start, len })
    }

    /// `len` bytes that all take memory now, by the work of all processors. Fails where that is more than is free,
    /// since memory that a process was promised and does not get ends it.
    pub fn present(len: usize) -> io::Result<Self> {
        let free = available();
        if len >= MUCH && free > 0 && len as u64 > free {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let mut pages = Self::new(len)?;
        pages.par_chunks_mut(LARGE).for_each(|part| {
            for page in part.chunks_mut(PAGE) {
                page[0] = 0;
            }
        });
        Ok(pages)
    }
}

impl Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map[self.start..][..self.len]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_large_zeroed_and_apart() {
        let sizes = [0, 1, PAGE + 1, 3 * LARGE + 5];
        let mut all: Vec<Pages> = (sizes.iter().map(|n| Pages::present(*n).unwrap())).collect();
        for (pages, len) in all.iter_mut().zip(sizes) {
            assert_eq!(pages.len(), len);
            assert!(pages.as_ptr().addr().is_multiple_of(LARGE));
            assert!(pages.iter().all(|b| *b == 0));
            pages.fill(0xa5);
        }
        assert!(all.iter().all(|p| p.iter().all(|b| *b == 0xa5)));
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        for len in [1 << 46, usize::MAX] {
            let e = Pages::present(len).err().expect("no such memory");
            assert_eq!(e.kind(), io::ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn a_group_leaves_what_it_does_not_hold() {
        let stat = "anon 700\nfile 250\ninactive_file 200\nactive_file 40\n";
        assert_eq!(left_of_group("1000\n", "950\n", stat), Some(290));
        assert_eq!(left_of_group("1000\n", "2000\n", stat), Some(0));
        assert_eq!(left_of_group("max\n", "950\n", stat), None);
    }
}
