//! CPU emulator: runs kernels built for the host, and reports what a GPU leaves undefined.
//!
//! Every CUDA thread is a coroutine. A worker thread runs one block at a time: warp after warp, each
//! until its lanes wait at a block barrier or have returned; warp operations are resolved when all
//! live lanes wait at them. Blocks are spread over a few workers. A fault unwinds the thread that it
//! happens in, ends the launch and is returned as [`EmulatorError`].
//!
//! What is found: access outside a view, a view outside live memory, misaligned access, reads of
//! uninitialised shared memory (and of global memory allocated as [`Memory::uninit`]), shared-memory
//! races, access to the destination of an asynchronous copy before the wait, threads that wait at
//! different barriers or warp operations, endless loops that access memory, panics.
//!
//! What is not: races between threads in global memory, endless loops that touch no memory. A thread
//! that spins until another one of its block stores a flag never yields, and meets the step limit.

mod error;
mod memory;
mod shared;

pub use error::{EmulatorError, FaultKind};
pub use memory::Memory;
pub(crate) use memory::{
    advance, check_alignment, check_part, global_add, global_read, global_write, view,
};
pub use shared::SHARED_LIMIT;
pub(crate) use shared::{
    check_dynamic, copy_commit, copy_start, copy_wait, fixed_array, shared_add, shared_read,
    shared_write,
};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use memory::{Registry, Storage};
use shared::SharedMemory;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Stack of one CUDA thread, bytes of address space; what is not touched takes no memory. A panic in
/// a kernel prints from here.
const STACK: usize = 128 << 10;

/// Allocations that a worker remembers, so as not to search for each view.
const RECENT: usize = 64;

/// Blocks in each dimension of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, at most 2^31 - 1.
    pub x: u32,
    /// Blocks in y, at most 65,535.
    pub y: u32,
    /// Blocks in z, at most 65,535.
    pub z: u32,
}

impl Grid {
    /// A grid of one dimension.
    #[must_use]
    pub const fn x(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }

    /// A grid of two dimensions.
    #[must_use]
    pub const fn xy(x: u32, y: u32) -> Self {
        Self { x, y, z: 1 }
    }

    /// Number of blocks.
    #[must_use]
    pub const fn blocks(self) -> u64 {
        // At most 2^31 * 2^16 * 2^16, as checked at the launch.
        (self.x as u64)
            .wrapping_mul(self.y as u64)
            .wrapping_mul(self.z as u64)
    }
}

impl From<u32> for Grid {
    fn from(x: u32) -> Self {
        Self::x(x)
    }
}

/// How a launch runs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// OS threads, at least 1.
    pub workers: usize,
    /// Memory accesses and warp operations of one block before it counts as endless.
    pub step_limit: u64,
    /// Shared memory that a block may use, bytes: at most [`SHARED_LIMIT`].
    pub shared_limit: u32,
}

impl Default for Options {
    fn default() -> Self {
        // The query reads the file system.
        static WORKERS: OnceLock<usize> = OnceLock::new();
        let available = || std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
        let workers = *WORKERS.get_or_init(available);
        Self {
            workers,
            step_limit: 1 << 33,
            shared_limit: SHARED_LIMIT,
        }
    }
}

/// What a launch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks run.
    pub blocks: u64,
    /// Threads run.
    pub threads: u64,
    /// Block barriers passed, each once a block.
    pub barriers: u64,
    /// Warp operations, each once a warp.
    pub warp_ops: u64,
    /// Bytes read from global memory, asynchronous copies included.
    pub global_read_bytes: u64,
    /// Bytes written to global memory.
    pub global_write_bytes: u64,
    /// Asynchronous copies of 16 bytes.
    pub async_copies: u64,
    /// Memory accesses and warp operations of threads.
    pub steps: u64,
    /// Most shared memory of a block, dynamic and fixed.
    pub shared_bytes: u32,
}

impl Stats {
    fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.threads += other.threads;
        self.barriers += other.barriers;
        self.warp_ops += other.warp_ops;
        self.global_read_bytes += other.global_read_bytes;
        self.global_write_bytes += other.global_write_bytes;
        self.async_copies += other.async_copies;
        self.steps += other.steps;
        self.shared_bytes = self.shared_bytes.max(other.shared_bytes);
    }
}

/// A warp operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WarpOp {
    Sync,
    Ballot,
    Uniform,
    ShuffleIdx,
    ShuffleXor,
    ShuffleUp,
    ShuffleDown,
    ReduceAdd,
    ReduceMaxU32,
    ReduceMaxI32,
    ReduceMinU32,
    ReduceMinI32,
    ReduceOr,
    ReduceAnd,
    ReduceXor,
}

/// Where a thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    Returned,
    Barrier,
    Warp(WarpOp),
}

/// A thread of the block, as the scheduler sees it.
#[derive(Clone, Copy)]
struct Slot {
    state: State,
    /// Operand of the warp operation, then its result.
    value: u32,
    /// Source lane, distance or exclusive-or mask of a shuffle.
    argument: u32,
    here: Option<&'static Location<'static>>,
    yielder: *const Yielder<(), ()>,
}

const IDLE: Slot = Slot {
    state: State::Ready,
    value: 0,
    argument: 0,
    here: None,
    yielder: null(),
};

/// What a worker knows of the block that it runs. Kernels reach it through a thread-local pointer.
pub(crate) struct Context {
    kernel: String,
    pub(crate) grid: Grid,
    pub(crate) threads: u32,
    pub(crate) block: [u32; 3],
    /// The thread that runs.
    pub(crate) thread: u32,
    steps_left: u64,
    slots: Vec<Slot>,
    shared: SharedMemory,
    registry: Arc<Registry>,
    recent: [Option<NonNull<Storage>>; RECENT],
    stats: Stats,
    error: Option<EmulatorError>,
}

thread_local! {
    static CONTEXT: Cell<*mut Context> = const { Cell::new(null_mut()) };
}

/// The context of the block that runs on this OS thread.
///
/// The reference must not be held across a yield; every user is a function of this module that ends
/// before.
///
/// # Panics
/// Outside a launch.
#[inline(always)]
pub(crate) fn context<'a>() -> &'a mut Context {
    let context = CONTEXT.get();
    if context.is_null() {
        outside();
    }
    // SAFETY: set by the worker that runs on this OS thread while its context lives. References do
    // not overlap: they end before the coroutine yields and before the kernel goes on.
    unsafe { &mut *context }
}

#[cold]
#[inline(never)]
fn outside() -> ! {
    panic!("a device function was called outside `emulator::launch`")
}

/// Payload of the unwinding that a fault starts.
struct Faulted;

impl Context {
    /// Counts a step.
    #[inline(always)]
    fn step(&mut self, here: &'static Location<'static>) {
        self.steps_left = self.steps_left.wrapping_sub(1);
        if self.steps_left == 0 {
            fault(
                FaultKind::StepLimit,
                "step limit reached: endless loop?".into(),
                here,
            );
        }
    }

    fn error(
        &self,
        thread: u32,
        kind: FaultKind,
        what: String,
        here: Option<&Location<'_>>,
    ) -> EmulatorError {
        let location = here.map(|here| format!("{}:{}", here.file(), here.line()));
        EmulatorError {
            kernel: self.kernel.clone(),
            block: self.block,
            thread,
            kind,
            what,
            location,
        }
    }
}

/// Records a fault of the running thread and unwinds it.
#[cold]
#[inline(never)]
pub(crate) fn fault(kind: FaultKind, what: String, here: &'static Location<'static>) -> ! {
    let context = context();
    let error = context.error(context.thread, kind, what, Some(here));
    context.error.get_or_insert(error);
    resume_unwind(Box::new(Faulted));
}

/// Leaves the running thread until the scheduler takes it up again; its operation's result.
fn wait(state: State, value: u32, argument: u32, here: &'static Location<'static>) -> u32 {
    let context = context();
    context.step(here);
    let slot = &mut context.slots[context.thread as usize];
    (slot.state, slot.value, slot.argument, slot.here) = (state, value, argument, Some(here));
    // SAFETY: points into the coroutine's own stack, which is running.
    unsafe { (*slot.yielder).suspend(()) };
    let context = self::context();
    context.slots[context.thread as usize].value
}

/// Block barrier.
pub(crate) fn barrier(here: &'static Location<'static>) {
    wait(State::Barrier, 0, 0, here);
}

/// Warp operation over all live lanes.
pub(crate) fn warp_op(
    op: WarpOp,
    value: u32,
    argument: u32,
    here: &'static Location<'static>,
) -> u32 {
    wait(State::Warp(op), value, argument, here)
}

/// Runs a kernel over a grid with the default [`Options`]: `kernel` is called once per CUDA thread.
///
/// # Errors
/// The first fault found. Memory may then hold the results of some threads.
pub fn launch<F: Fn() + Sync>(
    name: &str,
    grid: impl Into<Grid>,
    block_threads: u32,
    dynamic_shared_bytes: u32,
    kernel: F,
) -> Result<Stats, EmulatorError> {
    launch_with(
        Options::default(),
        name,
        grid,
        block_threads,
        dynamic_shared_bytes,
        kernel,
    )
}

/// As [`launch`], with options.
///
/// # Errors
/// The first fault found. Memory may then hold the results of some threads.
pub fn launch_with<F: Fn() + Sync>(
    options: Options,
    name: &str,
    grid: impl Into<Grid>,
    block_threads: u32,
    dynamic_shared_bytes: u32,
    kernel: F,
) -> Result<Stats, EmulatorError> {
    let grid = grid.into();
    let refuse = |what: String| {
        let (kernel, kind) = (name.to_owned(), FaultKind::Launch);
        Err(EmulatorError {
            kernel,
            block: [0; 3],
            thread: 0,
            kind,
            what,
            location: None,
        })
    };
    if !(1..=1024).contains(&block_threads) {
        return refuse(format!(
            "a block of {block_threads} threads; 1 to 1024 are possible"
        ));
    }
    let Grid { x, y, z } = grid;
    if !(1..1 << 31).contains(&x) || !(1..1 << 16).contains(&y) || !(1..1 << 16).contains(&z) {
        return refuse(format!("a grid of {x} x {y} x {z} blocks"));
    }
    let limit = options.shared_limit.min(SHARED_LIMIT);
    if dynamic_shared_bytes > limit {
        return refuse(format!(
            "{dynamic_shared_bytes} bytes of shared memory, of {limit}"
        ));
    }
    if !CONTEXT.get().is_null() {
        return refuse("a launch from inside a kernel".into());
    }

    let launch = Launch {
        name,
        grid,
        threads: block_threads,
        dynamic: dynamic_shared_bytes,
        options: Options {
            shared_limit: limit,
            ..options
        },
        registry: memory::snapshot(),
        next: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        result: Mutex::new((Stats::default(), None)),
    };
    // A thread costs more to start than a small launch to run.
    let useful = (grid.blocks() * u64::from(block_threads))
        .div_ceil(512)
        .min(grid.blocks());
    let workers = options
        .workers
        .clamp(1, 64)
        .min(usize::try_from(useful).unwrap_or(usize::MAX));
    std::thread::scope(|scope| {
        for _ in 1..workers {
            scope.spawn(|| launch.work(&kernel));
        }
        launch.work(&kernel);
    });
    match launch
        .result
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
    {
        (_, Some((_, error))) => Err(error),
        (stats, None) => Ok(stats),
    }
}

/// A launch, as its workers share it.
struct Launch<'a> {
    name: &'a str,
    grid: Grid,
    threads: u32,
    dynamic: u32,
    options: Options,
    registry: Arc<Registry>,
    /// Next block to run.
    next: AtomicU64,
    /// A worker met a fault.
    stop: AtomicBool,
    /// Totals, and the fault of the lowest block.
    result: Mutex<(Stats, Option<(u64, EmulatorError)>)>,
}

/// Stacks of finished launches, for the next.
static STACKS: Mutex<Vec<DefaultStack>> = Mutex::new(Vec::new());

impl Launch<'_> {
    /// Runs blocks until none is left.
    fn work(&self, kernel: &(dyn Fn() + Sync)) {
        let mut context = Box::new(Context {
            kernel: self.name.to_owned(),
            grid: self.grid,
            threads: self.threads,
            block: [0; 3],
            thread: 0,
            steps_left: 0,
            slots: vec![IDLE; self.threads as usize],
            shared: SharedMemory::new(self.dynamic, self.options.shared_limit, self.threads),
            registry: self.registry.clone(),
            recent: [None; RECENT],
            stats: Stats::default(),
            error: None,
        });
        let mut stacks = {
            let mut pool = STACKS.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = pool.len().saturating_sub(self.threads as usize);
            pool.split_off(kept)
        };
        while stacks.len() < self.threads as usize {
            stacks.push(
                DefaultStack::new(STACK).expect("no address space for the emulator's stacks"),
            );
        }

        /// Takes the thread-local pointer back, whatever happens.
        struct Entered;
        impl Drop for Entered {
            fn drop(&mut self) {
                CONTEXT.set(null_mut());
            }
        }
        let pointer = &raw mut *context;
        CONTEXT.set(pointer);
        let entered = Entered;
        let mut failed = None;
        while !self.stop.load(Relaxed) {
            let number = self.next.fetch_add(1, Relaxed);
            if number >= self.grid.blocks() {
                break;
            }
            // SAFETY: `pointer` is valid until the end of this function, and no reference to what it
            // points to is held here.
            if let Err(error) = unsafe { run_block(pointer, self, number, kernel, &mut stacks) } {
                self.stop.store(true, Relaxed);
                failed = Some((number, error));
            }
        }
        drop(entered);

        STACKS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .append(&mut stacks);
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        result.0.add(&context.stats);
        if let Some((number, error)) = failed
            && result.1.as_ref().is_none_or(|(first, _)| number < *first)
        {
            result.1 = Some((number, error));
        }
    }
}

type Thread = Coroutine<(), (), (), DefaultStack>;

/// Runs one block to its end.
///
/// # Safety
/// `context` is this worker's context and no reference to it is held.
unsafe fn run_block(
    context: *mut Context,
    launch: &Launch<'_>,
    number: u64,
    kernel: &(dyn Fn() + Sync),
    stacks: &mut Vec<DefaultStack>,
) -> Result<(), EmulatorError> {
    let (x, y) = (u64::from(launch.grid.x), u64::from(launch.grid.y));
    {
        // SAFETY: the caller's; the reference ends with this block.
        let context = unsafe { &mut *context };
        context.block = [
            (number % x) as u32,
            (number / x % y) as u32,
            (number / x / y) as u32,
        ];
        context.steps_left = launch.options.step_limit.max(1);
        context.slots.fill(IDLE);
        context.shared.begin_block();
    }
    let mut threads: Vec<Thread> = (0..launch.threads)
        .map(|_| {
            let stack = stacks.pop().expect("one stack a thread");
            let body = move |yielder: &Yielder<(), ()>, ()| {
                let context = self::context();
                context.slots[context.thread as usize].yielder = yielder;
                if let Err(payload) = catch_unwind(AssertUnwindSafe(kernel)) {
                    panicked(&*payload);
                }
                let context = self::context();
                context.slots[context.thread as usize].state = State::Returned;
            };
            // SAFETY: the coroutine ends in this function, so what it borrows outlives it.
            unsafe { Thread::with_stack_unchecked(stack, body) }
        })
        .collect();
    // SAFETY: the caller's.
    let result = unsafe { schedule(context, &mut threads) };
    // SAFETY: the caller's; no coroutine runs any more.
    let context = unsafe { &mut *context };
    context.stats.blocks += 1;
    context.stats.threads += u64::from(launch.threads);
    context.stats.steps += launch.options.step_limit.max(1) - context.steps_left;
    context.stats.shared_bytes = context.stats.shared_bytes.max(context.shared.used);
    for mut thread in threads {
        if thread.started() && !thread.done() {
            // SAFETY: what is on the stack of a thread that a fault cut off is leaked: a kernel's
            // frames hold plain data.
            unsafe { thread.force_reset() };
        }
        if thread.done() {
            stacks.push(thread.into_stack());
        } else {
            // Never started: the coroutine drops its closure, and the stack with it.
            drop(thread);
            stacks.push(
                DefaultStack::new(STACK).expect("no address space for the emulator's stacks"),
            );
        }
    }
    result
}

/// Records a panic of the kernel, unless it is the unwinding of a fault.
#[cold]
fn panicked(payload: &(dyn Any + Send)) {
    if payload.is::<Faulted>() {
        return;
    }
    let text = payload.downcast_ref::<&str>().copied();
    let text = text
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let context = context();
    let error = context.error(
        context.thread,
        FaultKind::Panic,
        format!("panic: {text}"),
        None,
    );
    context.error.get_or_insert(error);
}

/// Runs the threads of a block until all have returned.
///
/// # Safety
/// `context` is this worker's context and no reference to it is held.
unsafe fn schedule(context: *mut Context, threads: &mut [Thread]) -> Result<(), EmulatorError> {
    let count = threads.len();
    loop {
        for first in (0..count).step_by(32) {
            // SAFETY: the caller's.
            unsafe { run_warp(context, &mut threads[first..(first + 32).min(count)], first)? };
        }
        // SAFETY: the caller's; the reference ends with this pass.
        let context = unsafe { &mut *context };
        // Each thread has returned or waits at a block barrier.
        let mut waiting = (0..count).filter(|i| context.slots[*i].state == State::Barrier);
        let Some(one) = waiting.next() else {
            return Ok(());
        };
        let here = context.slots[one].here;
        if let Some(other) = waiting.find(|i| !same_place(context.slots[*i].here, here)) {
            return Err(apart(context, one, other, FaultKind::Deadlock));
        }
        context.stats.barriers += 1;
        context.shared.barrier();
        for slot in &mut context.slots {
            if slot.state == State::Barrier {
                slot.state = State::Ready;
            }
        }
    }
}

/// Runs a warp until each lane has returned or waits at a block barrier.
///
/// # Safety
/// `context` is this worker's context and no reference to it is held.
unsafe fn run_warp(
    context: *mut Context,
    lanes: &mut [Thread],
    first: usize,
) -> Result<(), EmulatorError> {
    loop {
        for (lane, thread) in lanes.iter_mut().enumerate() {
            // SAFETY: the caller's; plain fields are read and written, no reference is held.
            unsafe {
                if (&(*context).slots)[first + lane].state != State::Ready {
                    continue;
                }
                (*context).thread = (first + lane) as u32;
            }
            let ended = matches!(thread.resume(()), CoroutineResult::Return(()));
            // SAFETY: as above; the coroutine does not run.
            if ended && let Some(error) = unsafe { (*context).error.take() } {
                return Err(error);
            }
        }
        // SAFETY: the caller's; the reference ends with this pass.
        let context = unsafe { &mut *context };
        let slots = &context.slots[first..first + lanes.len()];
        let Some(one) = slots.iter().position(|slot| slot.state != State::Returned) else {
            return Ok(());
        };
        let (state, here) = (slots[one].state, slots[one].here);
        let differs = |slot: &Slot| {
            slot.state != State::Returned && (slot.state != state || !same_place(slot.here, here))
        };
        if let Some(other) = slots.iter().position(differs) {
            let at_barrier = |i: usize| slots[i].state == State::Barrier;
            let kind = if at_barrier(one) || at_barrier(other) {
                FaultKind::Deadlock
            } else {
                FaultKind::Divergence
            };
            return Err(apart(context, first + one, first + other, kind));
        }
        let State::Warp(op) = state else {
            return Ok(());
        };
        context.stats.warp_ops += 1;
        if let Err((lane, what)) = resolve(op, &mut context.slots[first..first + lanes.len()]) {
            return Err(context.error((first + lane) as u32, FaultKind::Divergence, what, here));
        }
        if op == WarpOp::Sync {
            context.shared.warp_barrier(first as u32 / 32);
        }
    }
}

/// Whether two operations stand at one place in the source, which may have several `Location`s.
#[inline(always)]
fn same_place(
    a: Option<&'static Location<'static>>,
    b: Option<&'static Location<'static>>,
) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => std::ptr::eq(a, b) || a == b,
        _ => a.is_none() && b.is_none(),
    }
}

/// The error of two threads that wait at different places.
fn apart(context: &Context, one: usize, other: usize, kind: FaultKind) -> EmulatorError {
    let place = |i: usize| {
        let slot = &context.slots[i];
        let at = slot.here.map_or_else(String::new, |here| {
            format!(" at {}:{}", here.file(), here.line())
        });
        match slot.state {
            State::Warp(op) => format!("thread {i} at warp operation {op:?}{at}"),
            _ => format!("thread {i} at a block barrier{at}"),
        }
    };
    let what = format!(
        "threads wait for each other at different places: {}, {}",
        place(one),
        place(other)
    );
    context.error(one as u32, kind, what, context.slots[one].here)
}

/// Computes a warp operation that all live lanes wait at, and makes them ready.
fn resolve(op: WarpOp, lanes: &mut [Slot]) -> Result<(), (usize, String)> {
    let live = |slot: &Slot| slot.state != State::Returned;
    let values = |lanes: &[Slot]| {
        let mut values = [0u32; 32];
        for (value, slot) in values.iter_mut().zip(lanes) {
            *value = slot.value;
        }
        values
    };
    let fold = |lanes: &[Slot], start: u32, f: fn(u32, u32) -> u32| {
        lanes
            .iter()
            .filter(|slot| live(slot))
            .fold(start, |sum, slot| f(sum, slot.value))
    };
    let same = match op {
        WarpOp::Sync => 0,
        WarpOp::Ballot => {
            let bits = lanes.iter().enumerate().filter(|(_, slot)| live(slot));
            bits.fold(0, |bits, (lane, slot)| bits | slot.value << lane)
        }
        WarpOp::Uniform => {
            if !live(&lanes[0]) {
                return Err((0, "uniform: lane 0 has returned".into()));
            }
            let value = lanes[0].value;
            if let Some(lane) = lanes
                .iter()
                .position(|slot| live(slot) && slot.value != value)
            {
                let what = format!(
                    "uniform: lane {lane} holds {}, lane 0 holds {value}",
                    lanes[lane].value
                );
                return Err((lane, what));
            }
            value
        }
        WarpOp::ReduceAdd => fold(lanes, 0, u32::wrapping_add),
        WarpOp::ReduceMaxU32 => fold(lanes, 0, u32::max),
        WarpOp::ReduceMinU32 => fold(lanes, u32::MAX, u32::min),
        WarpOp::ReduceMaxI32 => fold(lanes, i32::MIN as u32, |a, b| {
            (a as i32).max(b as i32) as u32
        }),
        WarpOp::ReduceMinI32 => fold(lanes, i32::MAX as u32, |a, b| {
            (a as i32).min(b as i32) as u32
        }),
        WarpOp::ReduceOr => fold(lanes, 0, |a, b| a | b),
        WarpOp::ReduceAnd => fold(lanes, u32::MAX, |a, b| a & b),
        WarpOp::ReduceXor => fold(lanes, 0, |a, b| a ^ b),
        WarpOp::ShuffleIdx | WarpOp::ShuffleXor | WarpOp::ShuffleUp | WarpOp::ShuffleDown => {
            let values = values(lanes);
            for lane in 0..lanes.len() {
                if !live(&lanes[lane]) {
                    continue;
                }
                let argument = lanes[lane].argument;
                if op != WarpOp::ShuffleIdx && argument >= 32 {
                    return Err((lane, format!("{op:?} by {argument}; 0 to 31 are possible")));
                }
                let distance = argument as usize & 31;
                let source = match op {
                    WarpOp::ShuffleIdx => distance,
                    WarpOp::ShuffleXor => lane ^ distance,
                    WarpOp::ShuffleUp => lane.checked_sub(distance).unwrap_or(lane),
                    _ if lane + distance < 32 => lane + distance,
                    _ => lane,
                };
                if !lanes.get(source).is_some_and(live) {
                    return Err((
                        lane,
                        format!("{op:?} from lane {source}, which does not run"),
                    ));
                }
                lanes[lane].value = values[source];
            }
            for slot in lanes.iter_mut().filter(|slot| live(slot)) {
                slot.state = State::Ready;
            }
            return Ok(());
        }
    };
    for slot in lanes.iter_mut().filter(|slot| live(slot)) {
        (slot.state, slot.value) = (State::Ready, same);
    }
    Ok(())
}
