//! Device memory between uses.

use std::collections::BTreeMap;

use super::super::device::ALIGNMENT;

/// Addresses by size.
pub type Sizes = BTreeMap<usize, Vec<u64>>;

/// Memory that is in nobody's hands. Whoever takes it uses it behind those who had it before, in the one
/// stream. What is given back while launches are recorded goes to those that are recorded behind, and
/// then stays with the recording.
#[derive(Default)]
pub struct Pool {
    free: Sizes,
    recording: Option<Sizes>,
}

impl Pool {
    /// An address of memory of `size` bytes.
    pub fn take(&mut self, size: usize) -> Option<u64> {
        let recorded = self
            .recording
            .as_mut()
            .and_then(|s| s.get_mut(&size)?.pop());
        recorded.or_else(|| self.free.get_mut(&size)?.pop())
    }

    /// Gives it back.
    pub fn give(&mut self, size: usize, address: u64) {
        let to = self.recording.as_mut().unwrap_or(&mut self.free);
        to.entry(size).or_default().push(address);
    }

    /// Gives all of `sizes` back.
    pub fn give_all(&mut self, sizes: Sizes) {
        for (size, addresses) in sizes {
            self.free.entry(size).or_default().extend(addresses);
        }
    }

    /// Bytes that could be taken.
    pub fn bytes(&self) -> usize {
        self.free.iter().map(|(s, v)| s * v.len()).sum()
    }

    /// All but what is recorded.
    pub fn drain(&mut self) -> impl Iterator<Item = u64> {
        std::mem::take(&mut self.free).into_values().flatten()
    }

    /// Whether launches are recorded.
    pub fn records(&self) -> bool {
        self.recording.is_some()
    }

    /// Launches are recorded from here on.
    pub fn begin_recording(&mut self) {
        self.recording = Some(Sizes::new());
    }

    /// The memory of what was recorded.
    pub fn end_recording(&mut self) -> Sizes {
        self.recording.take().unwrap_or_default()
    }
}

/// Size that a request takes from the pool: eight steps to each power of two, so that sizes that
/// differ a little share, at an eighth or 2 MiB more at most.
pub fn pool_size(bytes: usize) -> usize {
    let bytes = bytes.max(ALIGNMENT);
    let step = (bytes.next_power_of_two() / 16).clamp(ALIGNMENT, 2 << 20);
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_sizes_waste_little() {
        for bytes in [
            0,
            1,
            255,
            256,
            257,
            4000,
            4096,
            4097,
            1 << 20,
            (1 << 20) + 1,
            3 << 30,
        ] {
            let size = pool_size(bytes);
            assert!(
                size >= bytes.max(1) && size.is_multiple_of(ALIGNMENT),
                "{bytes}"
            );
            assert!(
                size <= bytes + bytes / 8 + ALIGNMENT,
                "{bytes} takes {size}"
            );
            assert_eq!(pool_size(size), size);
        }
    }

    #[test]
    fn a_recording_keeps_what_it_used() {
        let mut pool = Pool::default();
        pool.give(256, 1);
        pool.begin_recording();
        assert_eq!(pool.take(256), Some(1));
        pool.give(256, 1);
        assert_eq!(pool.take(256), Some(1), "those behind share");
        pool.give(256, 1);
        pool.give(512, 2);
        assert_eq!(pool.drain().count(), 0);
        let kept = pool.end_recording();
        assert_eq!(pool.take(256), None);
        pool.give_all(kept);
        assert_eq!((pool.take(256), pool.take(512)), (Some(1), Some(2)));
    }
}
