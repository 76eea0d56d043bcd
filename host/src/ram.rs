//! Memory of the host: what is free, and large pieces of it.

use std::fs::read_to_string;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use memmap2::{MmapMut, MmapOptions};
use rayon::prelude::*;

/// Bytes of a page where large ones are to be had.
const LARGE: usize = 2 << 20;

/// Bytes of a page otherwise.
const PAGE: usize = 4096;

/// Memory from which on what is free is looked at first.
const MUCH: usize = 64 << 20;

/// Bytes that could be had without swapping: what the kernel calls available, or what a control group that this process
/// is in leaves of that. `None` where the system does not tell.
pub fn available() -> Option<u64> {
    let text = read_to_string("/proc/meminfo").ok()?;
    let free = 1024 * field(&text, "MemAvailable:")?;
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = groups.lines().flat_map(groups_of).filter_map(left_of);
    Some(left.fold(free, u64::min))
}

/// Whether `bytes` bytes are more than is free.
pub fn lacks(bytes: usize) -> bool {
    bytes >= MUCH && available().is_some_and(|free| bytes as u64 > free)
}

/// The number behind `name`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A control group's directory, and whether it is one of the first version.
type Group = (PathBuf, bool);

/// Of a line of `/proc/self/cgroup`, `number:controllers:path`, the groups that may limit memory: that one, and those
/// above it.
fn groups_of(line: &str) -> Vec<Group> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
        return Vec::new();
    };
    let (root, first) = match controllers {
        "" => ("/sys/fs/cgroup", false),
        c if c.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", true),
        _ => return Vec::new(),
    };
    let own = Path::new(path.trim_start_matches('/'));
    own.ancestors()
        .map(|p| (Path::new(root).join(p), first))
        .collect()
}

fn left_of((group, first): Group) -> Option<u64> {
    let of = |name: &str| read_to_string(group.join(name)).ok();
    let [max, current] = match first {
        true => ["memory.limit_in_bytes", "memory.usage_in_bytes"].map(of),
        false => ["memory.max", "memory.current"].map(of),
    };
    let files = match first {
        true => ["total_active_file ", "total_inactive_file "],
        false => ["active_file ", "inactive_file "],
    };
    left_of_group(&max?, &current?, &of("memory.stat")?, files)
}

/// What a group's limit leaves, of which files in the page cache can be dropped; `None` without a limit.
fn left_of_group(max: &str, current: &str, stat: &str, files: [&str; 2]) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let files: u64 = files.iter().filter_map(|name| field(stat, name)).sum();
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
        if lacks(len) {
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
        let stat = "anon 700\nfile 250\ninactive_file 200\nactive_file 40\ntotal_active_file 9\n";
        let of =
            |max, current| left_of_group(max, current, stat, ["active_file ", "inactive_file "]);
        assert_eq!(of("1000\n", "950\n"), Some(290));
        assert_eq!(of("1000\n", "2000\n"), Some(0));
        assert_eq!(of("max\n", "950\n"), None);
        let files = ["total_active_file ", "total_inactive_file "];
        assert_eq!(left_of_group("1000", "950", stat, files), Some(59));
    }

    #[test]
    fn groups_above_count_too() {
        let paths = |line| -> Vec<String> {
            let groups = groups_of(line).into_iter();
            groups.map(|(p, _)| p.display().to_string()).collect()
        };
        let of_second = ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"];
        assert_eq!(paths("0::/a/b"), of_second);
        let of_first = ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory/"];
        assert_eq!(paths("4:hugetlb,memory:/a"), of_first);
        assert!(paths("4:cpu:/a").is_empty() && paths("").is_empty());
    }
}
