//! Copies between host and device by way of pinned memory.

use cust::error::CudaError;
use cust::event::{Event, EventFlags};
use cust::memory::{AsyncCopyDestination, DeviceSlice, cuda_free_locked, cuda_malloc_locked};
use cust::stream::Stream;
use rayon::prelude::*;

/// Bytes of each direction.
const SIZE: usize = 4 << 20;

/// Bytes of the largest small copy to the device.
pub const SMALL: usize = SIZE / 4;

/// Bytes of a buffer of large copies, and those that a processor copies to it at a time.
const BULK: usize = 32 << 20;
const PIECE: usize = 1 << 20;

/// Pinned memory that copies in flight read from, and that the host reads results from.
#[derive(Default)]
pub struct Staging {
    up: Option<Pinned>,
    down: Option<Pinned>,
    /// Bytes of `up` that copies since the last wait have used.
    used: usize,
    /// Two buffers of large copies.
    bulk: Option<[Pinned; 2]>,
}

struct Pinned(*mut u8, usize);

// SAFETY: memory of the driver, in one pair of hands.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Where there is none to be had, copies go without.
    fn new(size: usize) -> Option<Self> {
        // SAFETY: bytes of any content.
        let memory = unsafe { cuda_malloc_locked::<u8>(size) };
        memory.ok().map(|m| Self(m, size))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, and `self` is its owner.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1) }
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
        if data.len() > SMALL {
            return Ok(None);
        }
        if self.used + data.len() > SIZE {
            wait()?;
            self.used = 0;
        }
        if self.up.is_none() {
            self.up = Pinned::new(SIZE);
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
            self.down = Pinned::new(SIZE);
        }
        Some(&mut self.down.as_mut()?.bytes()[..len])
    }

    /// Copies `data` to the device a buffer at a time, one of which is filled by all processors while
    /// the other is copied, and waits for the end; false, and nothing done, where there is no pinned
    /// memory. The context is current.
    pub fn copy(
        &mut self,
        data: &[u8],
        to: &mut DeviceSlice<u8>,
        stream: &Stream,
    ) -> Result<bool, CudaError> {
        if self.bulk.is_none() {
            let one = || Pinned::new(BULK);
            self.bulk = one().zip(one()).map(|(a, b)| [a, b]);
        }
        let Some(buffers) = &mut self.bulk else {
            return Ok(false);
        };
        let mut ends = [None, None];
        for (i, from) in data.chunks(BULK).enumerate() {
            if let Some(end) = ends[i % 2].take() {
                Event::synchronize(&end)?;
            }
            let pinned = &mut buffers[i % 2].bytes()[..from.len()];
            (pinned.par_chunks_mut(PIECE))
                .zip(from.par_chunks(PIECE))
                .for_each(|(to, from)| to.copy_from_slice(from));
            let mut part = to.index(i * BULK..i * BULK + from.len());
            // SAFETY: both ranges are live, and the host's stays as it is until the event above or the
            // wait below.
            unsafe { part.async_copy_from(&*pinned, stream)? };
            let end = Event::new(EventFlags::DISABLE_TIMING)?;
            end.record(stream)?;
            ends[i % 2] = Some(end);
        }
        stream.synchronize()?;
        Ok(true)
    }

    /// Gives the memory back; the context is current and all copies have been waited for.
    pub fn free(&mut self) {
        let bulk = self.bulk.take().into_iter().flatten();
        let small = [self.up.take(), self.down.take()].into_iter().flatten();
        for pinned in small.chain(bulk) {
            // SAFETY: allocated by `cuda_malloc_locked`, in nobody's hands any more.
            let _ = unsafe { cuda_free_locked(pinned.0) };
        }
    }
}
