//! What a launch reports instead of undefined behaviour.

use std::fmt;

/// Kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Index or range outside a view, or outside the shared memory of the launch.
    OutOfBounds,
    /// Address no multiple of the access' width or of the type's alignment.
    Misaligned,
    /// A view that lies in no live allocation.
    NotAllocated,
    /// Read of memory that was never written.
    Uninitialised,
    /// Two threads' accesses to one shared word, one of them a write, with no barrier in between.
    Race,
    /// Access to the destination of an asynchronous copy before the wait.
    PendingCopy,
    /// Threads that wait for each other at different barriers or operations.
    Deadlock,
    /// Warp operation that the lanes of the warp do not call together, or whose operand breaks its
    /// rule.
    Divergence,
    /// More steps than the limit: an endless loop.
    StepLimit,
    /// A panic in the kernel.
    Panic,
    /// Launch parameters that a device would refuse.
    Launch,
}

/// A fault of a kernel, with the place where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatorError {
    /// Kernel name as given to the launch.
    pub kernel: String,
    /// Block index x, y, z.
    pub block: [u32; 3],
    /// Index of the thread in the block.
    pub thread: u32,
    /// Kind of fault.
    pub kind: FaultKind,
    /// What happened, with the numbers and the other thread where there is one.
    pub what: String,
    /// Source file and line of the access, where known.
    pub location: Option<String>,
}

impl fmt::Display for EmulatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kernel,
            block: [x, y, z],
            thread,
            what,
            ..
        } = self;
        write!(
            f,
            "kernel {kernel}, block ({x}, {y}, {z}), thread {thread}: {what}"
        )?;
        match &self.location {
            Some(location) => write!(f, " (at {location})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for EmulatorError {}
