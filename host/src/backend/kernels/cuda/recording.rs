//! Launches recorded as a CUDA graph.

use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use cuda_loader::{DriverError, check, sys};

use super::{Inner, driver_error};
use crate::backend::kernels::device::DeviceError;

/// Which thread records what a device is given. Others wait for the end, lest theirs be recorded too, and
/// it for those that are at work.
#[derive(Default)]
pub struct Recorder {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The thread that records.
    thread: Option<ThreadId>,
    /// Turns that last, of all threads while none records.
    turns: usize,
}

/// A thread's turn to call the driver.
pub struct Turn<'a>(&'a Recorder);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state().turns -= 1;
        self.0.changed.notify_all();
    }
}

impl Recorder {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn, once no other thread records. A thread may have several.
    pub fn turn(&self) -> Turn<'_> {
        let me = std::thread::current().id();
        let others = |s: &mut State| s.thread.is_some_and(|t| t != me);
        let mut state = (self.changed)
            .wait_while(self.state(), others)
            .unwrap_or_else(PoisonError::into_inner);
        state.turns += 1;
        Turn(self)
    }

    /// Begins to record; the thread has no turn.
    fn begin(&self) {
        let busy = |s: &mut State| s.thread.is_some() || s.turns > 0;
        let mut state = (self.changed)
            .wait_while(self.state(), busy)
            .unwrap_or_else(PoisonError::into_inner);
        state.thread = Some(std::thread::current().id());
    }

    fn end(&self) {
        self.state().thread = None;
        self.changed.notify_all();
    }
}

/// An instantiated graph, whose launches use memory that the devices' pools keep for recordings.
pub struct CudaRecording {
    exec: sys::GraphExec,
    /// The first is the device that launches it.
    devices: Vec<Arc<Inner>>,
}

/// What tells the recordings that `first` launches from others'.
fn owner(first: &Arc<Inner>) -> usize {
    Arc::as_ptr(first).addr()
}

// SAFETY: the handle may be used from any thread, by one at a time: `replay` and `drop` are called with
// the recording in hand.
unsafe impl Send for CudaRecording {}

/// Functions without which nothing is recorded.
const NEEDED: [&str; 4] = [
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
];

fn failed(inner: &Inner, call: &str, error: DriverError) -> DeviceError {
    driver_error(&inner.info.to_string(), call, error)
}

fn stream(inner: &Inner) -> sys::Stream {
    inner.stream.as_inner().cast()
}

/// Begins to record the streams of `devices`, from the first.
pub fn begin(devices: &[&Arc<Inner>]) -> Result<bool, DeviceError> {
    let has_all = |d: &cuda_loader::Driver| NEEDED.iter().all(|f| !d.missing().contains(f));
    let (Some(first), Ok(true)) = (devices.first(), cuda_loader::load().map(has_all)) else {
        return Ok(false);
    };
    devices.iter().for_each(|d| d.recorder.begin());
    let capture = || {
        // What is recorded may take the pools' memory without waiting for anybody.
        for device in devices {
            let _turn = device.enter()?;
            device.synchronize()?;
        }
        let _turn = first.enter()?;
        // SAFETY: a live stream. Relaxed, since memory may be allocated meanwhile.
        check(unsafe { sys::cuStreamBeginCapture_v2(stream(first), sys::CAPTURE_RELAXED) })
            .map_err(|e| failed(first, "cuStreamBeginCapture", e))
    };
    let begun = capture();
    match begun {
        Ok(()) => {
            let owner = owner(first);
            devices.iter().for_each(|d| d.pool().begin_recording(owner));
        }
        Err(_) => devices.iter().for_each(|d| d.recorder.end()),
    }
    begun.map(|()| true)
}

/// Ends that.
pub fn end(devices: &[&Arc<Inner>]) -> Result<CudaRecording, DeviceError> {
    devices.iter().for_each(|d| d.pool().end_recording());
    // From here on the memory goes back whatever happens.
    let mut recording = CudaRecording {
        exec: null_mut(),
        devices: devices.iter().map(|d| (*d).clone()).collect(),
    };
    let first = devices[0];
    let mut graph = null_mut();
    let ended = first.enter().and_then(|_turn| {
        // SAFETY: a stream that is captured, and a valid pointer.
        check(unsafe { sys::cuStreamEndCapture(stream(first), &raw mut graph) })
            .map_err(|e| failed(first, "cuStreamEndCapture", e))
    });
    for device in devices {
        device.aside.store(false, Ordering::Relaxed);
        device.recorder.end();
    }
    ended?;
    // SAFETY: a graph that was just made, given back below; valid pointers.
    let done =
        check(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut recording.exec, graph, 0) });
    // SAFETY: ours, and the instance does not need it.
    let _ = unsafe { sys::cuGraphDestroy(graph) };
    done.map_err(|e| failed(first, "cuGraphInstantiate", e))?;
    Ok(recording)
}

/// Launches it.
///
/// # Safety
/// As [`Device::replay`](crate::backend::kernels::Device::replay) says.
pub unsafe fn replay(inner: &Inner, recording: &CudaRecording) -> Result<(), DeviceError> {
    let _turn = inner.enter()?;
    // SAFETY: a live instance; what it uses is the caller's promise.
    check(unsafe { sys::cuGraphLaunch(recording.exec, stream(inner)) })
        .map_err(|e| failed(inner, "cuGraphLaunch", e))
}

impl Drop for CudaRecording {
    fn drop(&mut self) {
        let Some(first) = self.devices.first() else {
            return;
        };
        // Nothing can be done about failures here. The others' streams know nothing of the launches.
        let _turn = first.enter();
        if !self.exec.is_null() {
            let _ = first.synchronize();
            // SAFETY: ours.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
        let owner = owner(first);
        for device in &self.devices {
            device.pool().drop_recording(owner);
        }
    }
}
