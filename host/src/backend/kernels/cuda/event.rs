//! Points in streams. `cust` has events, but none that are recorded in a graph as those of each launch.

use std::ptr::null_mut;
use std::sync::Arc;

use cuda_loader::{DriverError, check, sys};

use super::{Inner, driver_error};
use crate::backend::kernels::device::DeviceError;

/// A point in the stream of a [`CudaDevice`](super::CudaDevice).
pub struct CudaEvent {
    event: sys::Event,
    device: Arc<Inner>,
}

// SAFETY: the driver takes events from any thread, several at once.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

fn failed(inner: &Inner, call: &str, error: DriverError) -> DeviceError {
    driver_error(&inner.info.to_string(), call, error)
}

/// Marks this point of the stream; while it is recorded, the point of each launch of the recording.
pub fn mark(inner: &Arc<Inner>) -> Result<CudaEvent, DeviceError> {
    let _turn = inner.enter()?;
    let mut event = CudaEvent {
        event: null_mut(),
        device: inner.clone(),
    };
    // SAFETY: valid pointer.
    check(unsafe { sys::cuEventCreate(&raw mut event.event, sys::EVENT_DEFAULT) })
        .map_err(|e| failed(inner, "cuEventCreate", e))?;
    let stream = inner.stream.as_inner().cast();
    let records = inner.pool().records();
    // SAFETY: a live event and stream of one context.
    check(unsafe {
        match records {
            false => sys::cuEventRecord(event.event, stream),
            true => sys::cuEventRecordWithFlags(event.event, stream, sys::EVENT_RECORD_EXTERNAL),
        }
    })
    .map_err(|e| failed(inner, "cuEventRecord", e))?;
    Ok(event)
}

/// Seconds between two events; waits for the second.
pub fn elapsed(inner: &Inner, from: &CudaEvent, to: &CudaEvent) -> Result<f64, DeviceError> {
    let _turn = inner.enter()?;
    // SAFETY: a live event.
    check(unsafe { sys::cuEventSynchronize(to.event) })
        .map_err(|e| failed(inner, "cuEventSynchronize", e))?;
    let mut milliseconds = 0.0;
    // SAFETY: live events and a valid pointer.
    check(unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, from.event, to.event) })
        .map_err(|e| failed(inner, "cuEventElapsedTime", e))?;
    Ok(f64::from(milliseconds) * 1e-3)
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if !self.event.is_null() {
            let _turn = self.device.enter();
            // SAFETY: ours; the driver keeps it for as long as work that was given needs it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
