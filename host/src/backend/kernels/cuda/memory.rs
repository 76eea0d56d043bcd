//! Memory of a device, and pinned memory of the host.

use std::sync::Arc;

use cust::memory::{DevicePointer, DeviceSlice, cuda_free_locked};

use super::Inner;
use super::pool::pool_size;
use crate::backend::kernels::device::DeviceMemory;

/// Memory of a [`super::CudaDevice`]; goes back to its pool when dropped.
pub struct CudaMemory {
    pub(super) device: Arc<Inner>,
    pub(super) address: u64,
    pub(super) size: usize,
}

impl CudaMemory {
    /// The view of `len` bytes from `offset` on, which the caller has checked.
    pub(super) fn range(&self, offset: usize, len: usize) -> DeviceSlice<u8> {
        let start = DevicePointer::from_raw(self.address + offset as u64);
        // SAFETY: in this allocation. The view itself touches nothing; those who use it say why the
        // memory is live.
        unsafe { DeviceSlice::from_raw_parts_mut(start, len) }
    }
}

/// Pinned host memory; given back when dropped, behind the copies that use it.
pub struct CudaHost {
    pub(super) device: Arc<Inner>,
    pub(super) address: *mut u8,
    pub(super) size: usize,
}

// SAFETY: it owns its bytes; the driver may be called from any thread.
unsafe impl Send for CudaHost {}
// SAFETY: shared, it can only be read.
unsafe impl Sync for CudaHost {}

impl std::ops::Deref for CudaHost {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        if self.size == 0 {
            return &[];
        }
        // SAFETY: allocated by the driver with this size, so holding bytes; owned.
        unsafe { std::slice::from_raw_parts(self.address, self.size) }
    }
}

impl std::ops::DerefMut for CudaHost {
    fn deref_mut(&mut self) -> &mut [u8] {
        if self.size == 0 {
            return &mut [];
        }
        // SAFETY: as above; that no copy reads it meanwhile is promised to `copy_beside`.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.size) }
    }
}

impl Drop for CudaHost {
    fn drop(&mut self) {
        if self.size == 0 {
            return;
        }
        // Nothing can be done about failures here.
        let _turn = self.device.enter();
        let _ = self.device.copies.synchronize();
        // SAFETY: allocated by `cuda_malloc_locked`, owned, and no copy uses it any more.
        let _ = unsafe { cuda_free_locked(self.address) };
    }
}

impl DeviceMemory for CudaMemory {
    type Host = CudaHost;

    fn address(&self) -> u64 {
        self.address
    }

    fn size(&self) -> usize {
        self.size
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Whoever takes it next uses it behind, in the one stream.
        (self.device.pool()).give(pool_size(self.size), self.address);
    }
}
