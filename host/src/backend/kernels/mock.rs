//! A device with little memory, slow copies and failures at will, over another device. For tests of
//! what places and moves experts.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::device::{Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
use super::table::KernelFn;

/// What a [`MockDevice`] does wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// What it is called, where that matters.
    pub name: Option<&'static str>,
    /// Bytes that can be allocated at a time, in units of [`Faults::granule`]; no limit by default.
    pub memory: Option<usize>,
    /// Bytes of host memory that can be pinned at a time.
    pub host: Option<usize>,
    /// Allocations of device memory are multiples of this; 0 is 1.
    pub granule: usize,
    /// The number, from 1, of the copy beside the stream that fails.
    pub failing_copy: Option<u64>,
    /// The number, from 1, of the allocation that is refused, those of device and of host memory counted
    /// together.
    pub failing_allocation: Option<u64>,
    /// The number, from 1, of the call from which on all fail, as those of a device that is lost do.
    pub lost: Option<u64>,
    /// Whether devices cannot use each other's memory.
    pub apart: bool,
    /// Time that a copy beside the stream takes for each MiB.
    pub copy_time: Duration,
}

/// What a [`MockDevice`] has done.
#[derive(Debug, Default)]
pub struct Done {
    /// Bytes allocated now.
    pub allocated: AtomicUsize,
    /// Most bytes allocated at a time.
    pub peak: AtomicUsize,
    /// Most bytes of one allocation.
    pub largest: AtomicUsize,
    /// Bytes of host memory pinned now.
    pub pinned: AtomicUsize,
    /// Copies beside the stream.
    pub copies: AtomicU64,
    /// Their bytes.
    pub copied: AtomicU64,
    /// Bytes copied from other devices.
    pub across: AtomicU64,
    /// Allocations of device and of host memory.
    pub allocations: AtomicU64,
    /// Calls of any kind.
    pub calls: AtomicU64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct MockDevice<D> {
    inner: D,
    faults: Faults,
    done: Arc<Done>,
}

impl<D> MockDevice<D> {
    /// `inner` with faults.
    pub fn new(inner: D, faults: Faults) -> Self {
        Self {
            inner,
            faults,
            done: Arc::default(),
        }
    }

    /// What it has done.
    pub fn done(&self) -> &Arc<Done> {
        &self.done
    }

    fn take(&self, counter: &AtomicUsize, limit: Option<usize>, bytes: usize) -> Result<(), usize> {
        let limit = limit.unwrap_or(usize::MAX);
        let add = |now: usize| now.checked_add(bytes).filter(|sum| *sum <= limit);
        match counter.fetch_update(Relaxed, Relaxed, add) {
            Ok(_) => Ok(()),
            Err(now) => Err(limit - now),
        }
    }
}

impl<D: Device> MockDevice<D> {
    /// Counts a call, which fails where the device is lost.
    fn call(&self, call: &str) -> Result<(), DeviceError> {
        let number = self.done.calls.fetch_add(1, Relaxed) + 1;
        match self.faults.lost {
            Some(lost) if number >= lost => Err(DeviceError::Driver {
                device: self.describe(),
                call: call.into(),
                code: 719,
                name: "INJECTED".into(),
                what: "a device that was to be lost".into(),
            }),
            _ => Ok(()),
        }
    }

    /// Counts an allocation; whether it is the one that is refused.
    fn refused(&self) -> bool {
        let number = self.done.allocations.fetch_add(1, Relaxed) + 1;
        self.faults.failing_allocation == Some(number)
    }
}

/// Memory of a [`MockDevice`].
pub struct MockMemory<M> {
    inner: M,
    taken: usize,
    done: Arc<Done>,
}

impl<M> Drop for MockMemory<M> {
    fn drop(&mut self) {
        self.done.allocated.fetch_sub(self.taken, Relaxed);
    }
}

/// Host memory of a [`MockDevice`].
pub struct MockHost<H> {
    inner: H,
    taken: usize,
    done: Arc<Done>,
}

impl<H> Drop for MockHost<H> {
    fn drop(&mut self) {
        self.done.pinned.fetch_sub(self.taken, Relaxed);
    }
}

impl<H: std::ops::Deref<Target = [u8]>> std::ops::Deref for MockHost<H> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.inner
    }
}

impl<H: std::ops::DerefMut<Target = [u8]>> std::ops::DerefMut for MockHost<H> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.inner
    }
}

impl<M: DeviceMemory> DeviceMemory for MockMemory<M> {
    type Host = MockHost<M::Host>;

    fn address(&self) -> u64 {
        self.inner.address()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }
}

impl<D: Device> Device for MockDevice<D> {
    type Memory = MockMemory<D::Memory>;
    type Event = D::Event;
    type Recording = D::Recording;

    const WAVE: usize = D::WAVE;

    fn describe(&self) -> String {
        match self.faults.name {
            Some(name) => name.into(),
            None => format!("mock of {}", self.inner.describe()),
        }
    }

    fn limits(&self) -> &DeviceLimits {
        self.inner.limits()
    }

    fn allocate(&self, bytes: usize) -> Result<Self::Memory, DeviceError> {
        let taken = bytes.next_multiple_of(self.faults.granule.max(1));
        self.call("allocate")?;
        let done = &self.done;
        let room = match self.refused() {
            true => Err(0),
            false => self.take(&done.allocated, self.faults.memory, taken),
        };
        room.map_err(|free| DeviceError::OutOfMemory {
            device: self.describe(),
            requested: bytes as u64,
            free: free as u64,
        })?;
        done.peak.fetch_max(done.allocated.load(Relaxed), Relaxed);
        done.largest.fetch_max(bytes, Relaxed);
        Ok(MockMemory {
            inner: self.inner.allocate(bytes)?,
            taken,
            done: done.clone(),
        })
    }

    fn trim(&self) -> Result<(), DeviceError> {
        self.call("trim")?;
        self.inner.trim()
    }

    fn fill(
        &self,
        memory: &Self::Memory,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), DeviceError> {
        self.call("fill")?;
        self.inner.fill(&memory.inner, offset, bytes, value)
    }

    fn upload(&self, memory: &Self::Memory, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.call("upload")?;
        self.inner.upload(&memory.inner, offset, data)
    }

    fn copy(
        &self,
        (from, start): (&Self::Memory, usize),
        (to, offset): (&Self::Memory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.call("copy")?;
        let (from, to) = ((&from.inner, start), (&to.inner, offset));
        self.inner.copy(from, to, bytes)
    }

    fn download(
        &self,
        memory: &Self::Memory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.call("download")?;
        self.inner.download(&memory.inner, offset, out)
    }

    fn allocate_host(
        &self,
        bytes: usize,
    ) -> Result<<Self::Memory as DeviceMemory>::Host, DeviceError> {
        self.call("allocate_host")?;
        let room = match self.refused() {
            true => Err(0),
            false => self.take(&self.done.pinned, self.faults.host, bytes),
        };
        room.map_err(|_| DeviceError::HostMemory {
            device: self.describe(),
            requested: bytes as u64,
        })?;
        Ok(MockHost {
            inner: self.inner.allocate_host(bytes)?,
            taken: bytes,
            done: self.done.clone(),
        })
    }

    fn fork(&self) -> Result<(), DeviceError> {
        self.call("fork")?;
        self.inner.fork()
    }

    unsafe fn copy_beside(
        &self,
        memory: &Self::Memory,
        offset: usize,
        host: &<Self::Memory as DeviceMemory>::Host,
        bytes: Range<usize>,
    ) -> Result<(), DeviceError> {
        self.call("copy_beside")?;
        let number = self.done.copies.fetch_add(1, Relaxed) + 1;
        if self.faults.failing_copy == Some(number) {
            return Err(DeviceError::Driver {
                device: self.describe(),
                call: "copy_beside".into(),
                code: 700,
                name: "INJECTED".into(),
                what: "a copy that was to fail".into(),
            });
        }
        self.done.copied.fetch_add(bytes.len() as u64, Relaxed);
        std::thread::sleep(
            self.faults
                .copy_time
                .mul_f64(bytes.len() as f64 / (1 << 20) as f64),
        );
        // SAFETY: passed on to the caller.
        unsafe {
            self.inner
                .copy_beside(&memory.inner, offset, &host.inner, bytes)
        }
    }

    fn copying(&self) -> Result<bool, DeviceError> {
        self.call("copying")?;
        self.inner.copying()
    }

    fn join(&self) -> Result<(), DeviceError> {
        self.call("join")?;
        self.inner.join()
    }

    unsafe fn launch<K: KernelFn>(&self, launch: Launch, args: K::Args) -> Result<(), DeviceError> {
        self.call("launch")?;
        // SAFETY: passed on to the caller; addresses are those of the inner device.
        unsafe { self.inner.launch::<K>(launch, args) }
    }

    fn event(&self) -> Result<Self::Event, DeviceError> {
        self.call("event")?;
        self.inner.event()
    }

    fn elapsed(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, DeviceError> {
        self.inner.elapsed(from, to)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.call("synchronize")?;
        self.inner.synchronize()
    }

    fn set_word(
        &self,
        memory: &Self::Memory,
        offset: usize,
        value: u32,
    ) -> Result<(), DeviceError> {
        self.call("set_word")?;
        self.inner.set_word(&memory.inner, offset, value)
    }

    fn reaches(&self, other: &Self) -> bool {
        !self.faults.apart && self.inner.reaches(&other.inner)
    }

    fn wait_for(&self, other: &Self) -> Result<(), DeviceError> {
        self.call("wait_for")?;
        self.inner.wait_for(&other.inner)
    }

    unsafe fn copy_from(
        &self,
        owner: &Self,
        (from, start): (&Self::Memory, usize),
        (to, offset): (&Self::Memory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.call("copy_from")?;
        self.done.across.fetch_add(bytes as u64, Relaxed);
        let (from, to) = ((&from.inner, start), (&to.inner, offset));
        // SAFETY: passed on to the caller.
        unsafe { self.inner.copy_from(&owner.inner, from, to, bytes) }
    }

    fn begin_recording(devices: &[&Self]) -> Result<bool, DeviceError> {
        let inner: Vec<&D> = devices.iter().map(|d| &d.inner).collect();
        D::begin_recording(&inner)
    }

    fn end_recording(devices: &[&Self]) -> Result<Self::Recording, DeviceError> {
        let inner: Vec<&D> = devices.iter().map(|d| &d.inner).collect();
        D::end_recording(&inner)
    }

    unsafe fn replay(&self, recording: &Self::Recording) -> Result<(), DeviceError> {
        self.call("replay")?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.replay(recording) }
    }
}
