//! Memory of a device, and pinned memory of the host.

use std::io;
use std::sync::{Arc, Once};

use cuda_loader::{check, sys};
use cust::error::CudaError;
use cust::memory::{DevicePointer, DeviceSlice, cuda_free_locked, cuda_malloc_locked};

use super::Inner;
use super::pool::pool_size;
use crate::backend::kernels::device::{DeviceError, DeviceMemory};
use crate::ram::Pages;

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
    device: Arc<Inner>,
    pinned: Pinned,
}

enum Pinned {
    /// Large pages of this process, which the driver was told of.
    Registered(Pages),
    /// The driver's own, and bytes of it.
    Driver(*mut u8, usize),
    Nothing,
}

impl CudaHost {
    /// `bytes` bytes that no copy uses yet.
    ///
    /// The driver's own allocation comes in small pages, one after the other, at 1.6 GB/s; pages that all processors
    /// have touched are pinned at 20. Where a driver does not pin them, its own do.
    pub(super) fn new(device: &Arc<Inner>, bytes: usize) -> Result<Self, DeviceError> {
        let pinned = if bytes == 0 {
            Pinned::Nothing
        } else {
            let missing = |_| DeviceError::HostMemory {
                device: device.info.to_string(),
                requested: bytes as u64,
            };
            let mut pages = Pages::present(bytes).map_err(missing)?;
            let _turn = device.enter()?;
            // SAFETY: memory of `pages`, which stays where it is when they move, and is unpinned before they go. The
            // context is current.
            let code = unsafe {
                let at = pages.as_mut_ptr().cast();
                sys::cuMemHostRegister_v2(at, bytes, sys::HOST_REGISTER_PORTABLE)
            };
            match check(code) {
                Ok(()) => Pinned::Registered(pages),
                Err(e) => {
                    static SAID: Once = Once::new();
                    SAID.call_once(|| {
                        tracing::warn!("pinned memory is the driver's, which takes long: cuMemHostRegister: {e}");
                    });
                    drop(pages);
                    // SAFETY: the driver's pages hold some bytes or other, all of which are u8.
                    let pinned = unsafe { cuda_malloc_locked::<u8>(bytes) };
                    let address = pinned.map_err(|e| match e {
                        CudaError::OutOfMemory => missing(io::ErrorKind::OutOfMemory.into()),
                        e => device.error("cuMemAllocHost", e),
                    })?;
                    Pinned::Driver(address, bytes)
                }
            }
        };
        Ok(Self {
            device: device.clone(),
            pinned,
        })
    }
}

// SAFETY: it owns its bytes; the driver may be called from any thread.
unsafe impl Send for CudaHost {}
// SAFETY: shared, it can only be read.
unsafe impl Sync for CudaHost {}

impl std::ops::Deref for CudaHost {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.pinned {
            Pinned::Registered(pages) => pages,
            // SAFETY: allocated by the driver with this size, so holding bytes; owned.
            Pinned::Driver(address, size) => unsafe { std::slice::from_raw_parts(*address, *size) },
            Pinned::Nothing => &[],
        }
    }
}

impl std::ops::DerefMut for CudaHost {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.pinned {
            Pinned::Registered(pages) => pages,
            // SAFETY: as above; that no copy reads it meanwhile is promised to `copy_beside`.
            Pinned::Driver(address, size) => unsafe {
                std::slice::from_raw_parts_mut(*address, *size)
            },
            Pinned::Nothing => &mut [],
        }
    }
}

impl Drop for CudaHost {
    fn drop(&mut self) {
        if matches!(self.pinned, Pinned::Nothing) {
            return;
        }
        // Nothing can be done about failures here.
        let _turn = self.device.enter();
        let _ = self.device.copies.synchronize();
        match &mut self.pinned {
            Pinned::Registered(pages) => {
                // SAFETY: registered at this address, and no copy uses it any more.
                let _ = unsafe { sys::cuMemHostUnregister(pages.as_mut_ptr().cast()) };
            }
            Pinned::Driver(address, _) => {
                // SAFETY: allocated by `cuda_malloc_locked`, owned, and no copy uses it any more.
                let _ = unsafe { cuda_free_locked(*address) };
            }
            Pinned::Nothing => (),
        }
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
