//! Small copies between host and device by way of pinned memory.

use cust::memory::{cuda_free_locked, cuda_malloc_locked};

/// Bytes of each direction.
const SIZE: usize = 4 << 20;

/// Pinned memory that copies in flight read from, and that the host reads results from.
#[derive(Default)]
pub struct Staging {
    up: Option<Pinned>,
    down: Option<Pinned>,
    /// Bytes of `up` that copies since the last wait have used.
    used: usize,
}

struct Pinned(*mut u8);

// SAFETY: memory of the driver, in one pair of hands.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Where there is none to be had, copies go without.
    fn new() -> Option<Self> {
        // SAFETY: bytes of any content.
        unsafe { cuda_malloc_locked::<u8>(SIZE) }.ok().map(Self)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, and `self` is its owner.
        unsafe { std::slice::from_raw_parts_mut(self.0, SIZE) }
    }
}

impl Staging {
    /// A pinned copy of `data` that stays until a later call says that copies have been waited for;
    /// none where it is too large. `wait` waits for all copies so far. The context is current.
    pub fn up<E>(
        &mut self,
        data: &[u8],
        wait: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<&[u8]>, E> {
        if data.len() > SIZE / 4 {
            return Ok(None);
        }
        if self.used + data.len() > SIZE {
            wait()?;
            self.used = 0;
        }
        if self.up.is_none() {
            self.up = Pinned::new();
        }
        let at = self.used;
        let Some(pinned) = &mut self.up else {
            return Ok(None);
        };
        let to = &mut pinned.bytes()[at..at + data.len()];
        to.copy_from_slice(data);
        self.used = (at + data.len()).next_multiple_of(64);
        Ok(Some(to))
    }

    /// Room for `len` bytes that come from the device, read before the next call; none where they are
    /// too many. The context is current.
    pub fn down(&mut self, len: usize) -> Option<&mut [u8]> {
        if len > SIZE {
            return None;
        }
        if self.down.is_none() {
            self.down = Pinned::new();
        }
        Some(&mut self.down.as_mut()?.bytes()[..len])
    }

    /// Gives the memory back; the context is current and all copies have been waited for.
    pub fn free(&mut self) {
        for pinned in [self.up.take(), self.down.take()].into_iter().flatten() {
            // SAFETY: allocated by `cuda_malloc_locked`, in nobody's hands any more.
            let _ = unsafe { cuda_free_locked(pinned.0) };
        }
    }
}
