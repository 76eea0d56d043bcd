//! Device memory between uses.

use std::collections::BTreeMap;

use super::super::device::ALIGNMENT;

/// Addresses by size.
pub type Sizes = BTreeMap<usize, Vec<u64>>;

/// Memory that is in nobody's hands. Whoever takes it uses it behind those who had it before, in the one
/// stream. What is given back while launches are recorded goes to those that are recorded behind, and
/// then stays with the recordings. Recordings of one device are launched one behind the other in its
/// stream, so they share theirs.
#[derive(Default)]
pub struct Pool {
    free: Sizes,
    /// While launches are recorded: of which device's recordings, and what is free there.
    recording: Option<(usize, Sizes)>,
    /// Memory of each device's recordings, and how many they are.
    recorded: BTreeMap<usize, (Sizes, usize)>,
    /// What was given back since something was recorded aside, which those recorded beside it must not
    /// take.
    held: Option<Sizes>,
}

impl Pool {
    /// An address of memory of `size` bytes.
    pub fn take(&mut self, size: usize) -> Option<u64> {
        let recorded = self
            .recording
            .as_mut()
            .and_then(|(_, s)| s.get_mut(&size)?.pop());
        recorded.or_else(|| self.free.get_mut(&size)?.pop())
    }

    /// Gives it back.
    pub fn give(&mut self, size: usize, address: u64) {
        let recording = self.recording.as_mut().map(|(_, sizes)| sizes);
        let to = (self.held.as_mut().or(recording)).unwrap_or(&mut self.free);
        to.entry(size).or_default().push(address);
    }

    /// Bytes that could be taken.
    pub fn bytes(&self) -> usize {
        self.free.iter().map(|(s, v)| s * v.len()).sum()
    }

    /// All but what recordings have.
    pub fn drain(&mut self) -> impl Iterator<Item = u64> {
        std::mem::take(&mut self.free).into_values().flatten()
    }

    /// Whether launches are recorded.
    pub fn records(&self) -> bool {
        self.recording.is_some()
    }

    /// Launches are recorded from here on, to be launched by device `first`, whatever that number is.
    pub fn begin_recording(&mut self, first: usize) {
        let (sizes, _) = self.recorded.entry(first).or_default();
        self.recording = Some((first, std::mem::take(sizes)));
    }

    /// From here on two sequences of launches are recorded beside one another; false where none are
    /// recorded.
    pub fn set_aside(&mut self) -> bool {
        if self.records() && self.held.is_none() {
            self.held = Some(Sizes::new());
        }
        self.records()
    }

    /// They end; false where there were none.
    pub fn together(&mut self) -> bool {
        let Some(held) = self.held.take() else {
            return false;
        };
        for (size, addresses) in held {
            addresses.into_iter().for_each(|a| self.give(size, a));
        }
        true
    }

    /// One recording more, to be ended by [`Pool::drop_recording`].
    pub fn end_recording(&mut self) {
        self.together();
        if let Some((first, sizes)) = self.recording.take() {
            let (kept, recordings) = self.recorded.entry(first).or_default();
            *kept = sizes;
            *recordings += 1;
        }
    }

    /// A recording of device `first` is gone, and all its launches are done; the last one's memory is free.
    pub fn drop_recording(&mut self, first: usize) {
        let Some((sizes, recordings)) = self.recorded.get_mut(&first) else {
            return;
        };
        *recordings = recordings.saturating_sub(1);
        if *recordings == 0 {
            for (size, addresses) in std::mem::take(sizes) {
                self.free.entry(size).or_default().extend(addresses);
            }
        }
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
    fn what_goes_on_beside_shares_nothing() {
        let mut pool = Pool::default();
        assert!(!pool.set_aside() && !pool.together(), "nothing is recorded");
        pool.give(256, 1);
        pool.begin_recording(0);
        assert!(pool.set_aside());
        assert_eq!(pool.take(256), Some(1), "nobody has used it since");
        pool.give(256, 1);
        assert_eq!(pool.take(256), None);
        assert!(pool.together() && !pool.together());
        assert_eq!(pool.take(256), Some(1));
        assert!(pool.set_aside());
        pool.give(256, 1);
        pool.end_recording();
        pool.drop_recording(0);
        assert_eq!(pool.take(256), Some(1));
    }

    #[test]
    fn recordings_share_what_they_used() {
        let mut pool = Pool::default();
        pool.give(256, 1);
        pool.begin_recording(7);
        assert_eq!(pool.take(256), Some(1));
        pool.give(256, 1);
        assert_eq!(pool.take(256), Some(1), "those behind share");
        pool.give(256, 1);
        pool.give(512, 2);
        assert_eq!(pool.drain().count(), 0);
        pool.end_recording();
        assert_eq!((pool.take(256), pool.bytes()), (None, 0));
        // Another of the same device has the same memory, one of another has not.
        pool.begin_recording(7);
        assert_eq!((pool.take(256), pool.take(256)), (Some(1), None));
        pool.give(256, 1);
        pool.end_recording();
        pool.begin_recording(8);
        assert_eq!(pool.take(256), None);
        pool.give(1024, 3);
        pool.end_recording();
        pool.drop_recording(7);
        assert_eq!(pool.take(256), None, "there is one left");
        pool.drop_recording(8);
        assert_eq!(pool.take(1024), Some(3));
        // What is dropped while others are recorded.
        pool.begin_recording(7);
        pool.drop_recording(7);
        assert_eq!(pool.take(256), Some(1));
        pool.give(256, 1);
        pool.end_recording();
        pool.drop_recording(7);
        assert_eq!((pool.take(256), pool.take(512)), (Some(1), Some(2)));
    }
}
