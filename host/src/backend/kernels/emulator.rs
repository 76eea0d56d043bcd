//! The emulator as a device: every thread of a kernel a coroutine on the CPU, every access checked.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Instant;

use cuda_std::emulator::{Grid, Memory, launch};

use super::device::{Device, DeviceError, DeviceLimits, DeviceMemory, Launch};
use super::device::{check_launch, check_range};
use super::table::KernelFn;

/// A device that is emulated.
#[derive(Clone, Debug)]
pub struct EmulatedDevice {
    limits: DeviceLimits,
    /// What is recorded at the moment.
    tape: Slot,
}

type Step = Box<dyn Fn() -> Result<(), DeviceError> + Send>;

/// What several devices were given since recording began, in order.
#[derive(Default)]
pub struct Tape {
    steps: Vec<Step>,
    kept: Vec<Arc<Memory<u8>>>,
}

/// Where a device's tape goes, and the tape that devices share.
#[derive(Clone, Default)]
struct Slot(Arc<Mutex<Option<Recorder>>>);

/// The thread that records, and its tape.
type Recorder = (ThreadId, Arc<Mutex<Tape>>);

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slot")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slot {
    fn tape(&self) -> Option<Arc<Mutex<Tape>>> {
        let me = std::thread::current().id();
        let (thread, tape) = lock(&self.0).clone()?;
        // What other threads do is not recorded.
        (thread == me).then_some(tape)
    }

    /// Does a step, or records it.
    fn step(
        &self,
        step: impl Fn() -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        match self.tape() {
            None => step(),
            Some(tape) => {
                lock(&tape).steps.push(Box::new(step));
                Ok(())
            }
        }
    }

    /// Refuses what cannot be recorded.
    fn only_now(&self, operation: &'static str) -> Result<(), DeviceError> {
        match self.tape() {
            None => Ok(()),
            Some(_) => Err(DeviceError::Recording {
                device: "emulator".into(),
                operation,
            }),
        }
    }
}

impl EmulatedDevice {
    /// Shared memory of compute capability 9.0, but few multiprocessors: grids that follow from
    /// their number stay small.
    pub const LIMITS: DeviceLimits = DeviceLimits {
        sms: 2,
        shared_per_block: 227 << 10,
        shared_per_sm: 228 << 10,
        threads_per_sm: 2048,
    };

    /// Memory that plans count on, bytes.
    pub const MEMORY: u64 = 1 << 30;

    /// A device of the given properties.
    pub fn new(limits: DeviceLimits) -> Self {
        Self {
            limits,
            tape: Slot::default(),
        }
    }
}

impl Default for EmulatedDevice {
    fn default() -> Self {
        Self::new(Self::LIMITS)
    }
}

/// Emulated memory, uninitialised until written.
pub struct EmulatedMemory {
    bytes: Arc<Memory<u8>>,
    size: usize,
    tape: Slot,
}

impl Drop for EmulatedMemory {
    fn drop(&mut self) {
        if let Some(tape) = self.tape.tape() {
            lock(&tape).kept.push(self.bytes.clone());
        }
    }
}

impl DeviceMemory for EmulatedMemory {
    type Host = Vec<u8>;

    fn address(&self) -> u64 {
        self.bytes.slice().addr
    }

    fn size(&self) -> usize {
        self.size
    }
}

impl Device for EmulatedDevice {
    type Memory = EmulatedMemory;
    type Event = Arc<Mutex<Instant>>;
    type Recording = Tape;

    /// So little that small models' layers come in several.
    const WAVE: usize = 64 << 10;

    fn describe(&self) -> String {
        "emulator".into()
    }

    fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, DeviceError> {
        Ok(EmulatedMemory {
            bytes: Arc::new(Memory::uninit(bytes.max(1))),
            size: bytes,
            tape: self.tape.clone(),
        })
    }

    fn fill(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        bytes: usize,
        value: u8,
    ) -> Result<(), DeviceError> {
        check_range("fill", offset, bytes, memory.size)?;
        let to = memory.bytes.clone();
        self.tape.step(move || {
            to.write(offset, &vec![value; bytes]);
            Ok(())
        })
    }

    fn copy(
        &self,
        (from, start): (&EmulatedMemory, usize),
        (to, offset): (&EmulatedMemory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        check_range("copy", start, bytes, from.size)?;
        check_range("copy", offset, bytes, to.size)?;
        let (from, to) = (from.bytes.clone(), to.bytes.clone());
        self.tape.step(move || {
            let mut data = vec![0; bytes];
            from.read(start, &mut data);
            to.write(offset, &data);
            Ok(())
        })
    }

    fn upload(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        data: &[u8],
    ) -> Result<(), DeviceError> {
        check_range("upload", offset, data.len(), memory.size)?;
        self.tape.only_now("an upload")?;
        memory.bytes.write(offset, data);
        Ok(())
    }

    fn download(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        check_range("download", offset, out.len(), memory.size)?;
        self.tape.only_now("a download")?;
        memory.bytes.read(offset, out);
        Ok(())
    }

    fn allocate_host(&self, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        Ok(vec![0; bytes])
    }

    fn fork(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn copy_beside(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        host: &Vec<u8>,
        bytes: std::ops::Range<usize>,
    ) -> Result<(), DeviceError> {
        self.upload(memory, offset, &host[bytes])
    }

    fn copying(&self) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn join(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn launch<K: KernelFn>(&self, config: Launch, args: K::Args) -> Result<(), DeviceError> {
        if !check_launch("emulator", &self.limits, K::ID, &config)? {
            return Ok(());
        }
        let [x, y, z] = config.grid;
        self.tape.step(move || {
            let kernel = || {
                // SAFETY: an emulator launch; the views are checked access by access.
                unsafe { K::call(args) }
            };
            launch(
                K::ID.name(),
                Grid { x, y, z },
                config.threads,
                config.shared,
                kernel,
            )?;
            Ok(())
        })
    }

    fn event(&self) -> Result<Self::Event, DeviceError> {
        let event = Arc::new(Mutex::new(Instant::now()));
        let at = event.clone();
        self.tape.step(move || {
            *lock(&at) = Instant::now();
            Ok(())
        })?;
        Ok(event)
    }

    fn elapsed(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, DeviceError> {
        let (from, to) = (*lock(from), *lock(to));
        Ok(to.duration_since(from).as_secs_f64())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn set_word(
        &self,
        memory: &EmulatedMemory,
        offset: usize,
        value: u32,
    ) -> Result<(), DeviceError> {
        check_range("set", offset, 4, memory.size)?;
        let to = memory.bytes.clone();
        self.tape.step(move || {
            to.write(offset, &value.to_ne_bytes());
            Ok(())
        })
    }

    fn reaches(&self, _other: &Self) -> bool {
        true
    }

    fn wait_for(&self, _other: &Self) -> Result<(), DeviceError> {
        Ok(())
    }

    unsafe fn copy_from(
        &self,
        _owner: &Self,
        from: (&EmulatedMemory, usize),
        to: (&EmulatedMemory, usize),
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.copy(from, to, bytes)
    }

    fn begin_recording(devices: &[&Self]) -> Result<bool, DeviceError> {
        let tape = Arc::new(Mutex::new(Tape::default()));
        for device in devices {
            *lock(&device.tape.0) = Some((std::thread::current().id(), tape.clone()));
        }
        Ok(true)
    }

    fn end_recording(devices: &[&Self]) -> Result<Tape, DeviceError> {
        let mut tape = None;
        for device in devices {
            // All are the same.
            tape = lock(&device.tape.0).take();
        }
        Ok(tape.map_or_else(Tape::default, |(_, t)| std::mem::take(&mut *lock(&t))))
    }

    unsafe fn replay(&self, recording: &Tape) -> Result<(), DeviceError> {
        self.tape.only_now("a replay")?;
        recording.steps.iter().try_for_each(|step| step())
    }
}
