//! Emulated shared memory of one block, with its race check.
//!
//! Every word has an [`Entry`]: its last write and what is known of the reads since. An access is
//! stamped with an epoch, a counter of the block that goes up at each block barrier and each
//! [`sync_warp`](crate::warp::sync_warp). Two accesses are ordered where they are one thread's, where a block
//! barrier lies between them, or, in one warp, where a warp barrier does. Everything is checked on the
//! second access, so a race is found whichever way the emulator happened to run the threads.
//!
//! A word is tracked whole until a narrower access splits it into bytes; a whole write joins it again.

use super::{FaultKind, context, fault};
use bytemuck::Pod;
use std::panic::Location;

/// Most shared memory of a block, bytes: 227 KiB, that of compute capability 9.0.
pub const SHARED_LIMIT: u32 = 227 * 1024;

/// A set of accesses: epoch of the last in bits 32.., its thread in bits 0..10, another thread in bits
/// 10..20, flags. 0: none.
type Stamp = u64;

/// Another lane of the same warp is in the set, with no warp barrier since.
const SAME_WARP: u64 = 1 << 20;
/// A thread of another warp is in the set, with no block barrier since.
const OTHER_WARP: u64 = 1 << 21;
/// The write was atomic.
const ATOMIC: u64 = 1 << 22;
/// Destination of an asynchronous copy that was not waited for.
const PENDING: u64 = 1 << 23;
/// The word's bytes have entries of their own.
const SPLIT: u64 = 1 << 24;

const fn stamp(epoch: u32, thread: u32, flags: u64) -> Stamp {
    (epoch as u64) << 32 | thread as u64 | flags
}
const fn epoch(stamp: Stamp) -> u32 {
    (stamp >> 32) as u32
}
const fn thread(stamp: Stamp) -> u32 {
    stamp as u32 & 1023
}
const fn other(stamp: Stamp) -> u32 {
    stamp as u32 >> 10 & 1023
}

/// What is known of a word, or of a byte.
#[derive(Clone, Copy, Default)]
struct Entry {
    write: Stamp,
    read: Stamp,
}

/// What an access does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Add,
    /// The start of an asynchronous copy.
    Copy,
}

/// What the check of one entry found.
enum Finding {
    Uninitialised,
    Pending(u32),
    /// The other thread, and what it did.
    Race(u32, &'static str),
}

/// Epochs of the block that runs.
struct Clock {
    now: u32,
    /// Epoch in which the block began.
    begin: u32,
    /// Epoch in which the last block barrier, or the block, began.
    barrier: u32,
    /// The same for the warp barriers of each warp.
    warps: [u32; 32],
}

impl Clock {
    /// Whether an access of `thread` now is unordered with one in a set since the last block barrier;
    /// the other thread.
    fn conflict(&self, set: Stamp, by: u32) -> Option<u32> {
        if epoch(set) < self.barrier {
            return None;
        }
        let (last, warp) = (thread(set), by >> 5);
        if last >> 5 != warp {
            return Some(last);
        }
        if set & OTHER_WARP != 0 {
            return Some(other(set));
        }
        if epoch(set) < self.warps[warp as usize] {
            return None;
        }
        if last != by {
            return Some(last);
        }
        (set & SAME_WARP != 0).then(|| other(set))
    }

    /// The set with an access of `by` now added.
    fn join(&self, set: Stamp, by: u32, flags: u64) -> Stamp {
        if epoch(set) < self.barrier {
            return stamp(self.now, by, flags);
        }
        let (last, warp) = (thread(set), by >> 5);
        let (kept, kind) = if last >> 5 != warp {
            (last, OTHER_WARP)
        } else if set & OTHER_WARP != 0 {
            (other(set), OTHER_WARP)
        } else if epoch(set) < self.warps[warp as usize] {
            (0, 0)
        } else if last != by {
            (last, SAME_WARP)
        } else {
            (other(set), set & SAME_WARP)
        };
        stamp(self.now, by, flags | kind) | u64::from(kept) << 10
    }

    /// Checks an access against an entry and enters it.
    #[inline(always)]
    fn access(&self, entry: &mut Entry, by: u32, access: Access) -> Result<(), Finding> {
        let (write, read) = (entry.write, entry.read);
        let live = epoch(write) >= self.begin;
        if live && write & PENDING != 0 {
            return Err(Finding::Pending(thread(write)));
        }
        let atomic = write & ATOMIC != 0;
        let wrote = if atomic {
            "an atomic addition"
        } else {
            "a write"
        };
        match access {
            Access::Read | Access::Add if !live => return Err(Finding::Uninitialised),
            Access::Add if atomic => {}
            _ => {
                if epoch(write) >= self.barrier
                    && let Some(other) = self.conflict(write, by)
                {
                    return Err(Finding::Race(other, wrote));
                }
            }
        }
        if access == Access::Read {
            entry.read = if epoch(read) < self.barrier {
                stamp(self.now, by, 0)
            } else {
                self.join(read, by, 0)
            };
            return Ok(());
        }
        if epoch(read) >= self.barrier
            && let Some(other) = self.conflict(read, by)
        {
            return Err(Finding::Race(other, "a read"));
        }
        match access {
            Access::Add => {
                entry.write = if atomic {
                    self.join(write, by, ATOMIC)
                } else {
                    stamp(self.now, by, ATOMIC)
                }
            }
            // Reads before an ordered write are ordered before what that write is ordered before.
            Access::Copy => {
                *entry = Entry {
                    write: stamp(self.now, by, PENDING),
                    read: 0,
                }
            }
            _ => {
                *entry = Entry {
                    write: stamp(self.now, by, 0),
                    read: 0,
                }
            }
        }
        Ok(())
    }
}

/// A copy that was started: where its 16 bytes go, and in which of its thread's groups it is.
struct Copy {
    address: u32,
    group: u32,
    words: [u32; 4],
    /// How many of these.
    count: usize,
}

/// A thread's asynchronous copies.
#[derive(Default)]
struct Copies {
    /// Not yet waited for, in the order they were started.
    pending: Vec<Copy>,
    /// Groups closed since the block began.
    groups: u32,
}

/// Shared memory of the block that runs on a worker.
pub(super) struct SharedMemory {
    words: Vec<u64>,
    entries: Vec<Entry>,
    /// Entries of bytes, made when first needed.
    bytes: Vec<[Entry; 4]>,
    clock: Clock,
    dynamic: u32,
    limit: u32,
    /// Fixed arrays of the block: place, offset, size.
    fixed: Vec<(u64, u32, u32)>,
    /// Bytes in use, dynamic and fixed.
    pub(super) used: u32,
    copies: Vec<Copies>,
}

impl SharedMemory {
    pub(super) fn new(dynamic: u32, limit: u32, threads: u32) -> Self {
        let copies = (0..threads).map(|_| Copies::default()).collect();
        let clock = Clock {
            now: 1,
            begin: 1,
            barrier: 1,
            warps: [1; 32],
        };
        let mut memory = Self {
            words: Vec::new(),
            entries: Vec::new(),
            bytes: Vec::new(),
            clock,
            dynamic,
            limit,
            fixed: Vec::new(),
            used: dynamic,
            copies,
        };
        memory.grow(dynamic);
        memory
    }

    /// Makes room for `bytes`.
    fn grow(&mut self, bytes: u32) {
        let words = (bytes.div_ceil(8) * 2) as usize;
        if words > self.entries.len() {
            self.entries.resize(words, Entry::default());
            self.words.resize(words / 2, 0);
        }
    }

    /// Forgets what the last block did.
    pub(super) fn begin_block(&mut self) {
        let now = self.tick();
        (self.clock.begin, self.clock.barrier, self.clock.warps) = (now, now, [now; 32]);
        self.fixed.clear();
        self.used = self.dynamic;
        for copies in &mut self.copies {
            copies.pending.clear();
            copies.groups = 0;
        }
    }

    fn tick(&mut self) -> u32 {
        if self.clock.now == u32::MAX {
            // A worker's 2^32 barriers: start over, which forgets what is known of this block.
            self.entries.fill(Entry {
                write: stamp(1, 0, 0),
                read: 0,
            });
            self.bytes.clear();
            self.clock = Clock {
                now: 1,
                begin: 1,
                barrier: 2,
                warps: [2; 32],
            };
        }
        self.clock.now += 1;
        self.clock.now
    }

    /// A block barrier.
    pub(super) fn barrier(&mut self) {
        self.clock.barrier = self.tick();
    }

    /// A barrier of one warp.
    pub(super) fn warp_barrier(&mut self, warp: u32) {
        self.clock.warps[warp as usize] = self.tick();
    }

    /// Offset of the fixed array of a place in the source, or the bytes that the block would need.
    fn fixed_array(&mut self, site: u64, bytes: u64) -> Result<u32, u64> {
        if let Some((_, offset, _)) = self
            .fixed
            .iter()
            .find(|(s, _, b)| *s == site && u64::from(*b) == bytes)
        {
            return Ok(*offset);
        }
        let offset = self.used.next_multiple_of(16);
        let end = u64::from(offset) + bytes;
        if end > u64::from(self.limit) {
            return Err(end);
        }
        self.fixed.push((site, offset, bytes as u32));
        self.used = end as u32;
        self.grow(self.used);
        Ok(offset)
    }

    /// Enters an access of `size` bytes at `address`; the word it failed at.
    #[inline(always)]
    fn access(
        &mut self,
        address: u32,
        size: u32,
        by: u32,
        access: Access,
    ) -> Result<(), (u32, Finding)> {
        if size.is_multiple_of(4) && address.is_multiple_of(4) {
            for word in address / 4..(address + size) / 4 {
                let entry = &mut self.entries[word as usize];
                let split = entry.write & SPLIT != 0 && epoch(entry.write) >= self.clock.begin;
                let result = if split {
                    self.access_bytes(word, 0..4, by, access)
                } else {
                    self.clock.access(entry, by, access)
                };
                result.map_err(|finding| (word, finding))?;
            }
            return Ok(());
        }
        let mut at = address;
        while at < address + size {
            let (word, first) = (at / 4, at % 4);
            let last = (first + address + size - at).min(4);
            self.access_bytes(word, first..last, by, access)
                .map_err(|finding| (word, finding))?;
            at += last - first;
        }
        Ok(())
    }

    /// Enters an access to bytes of a word, splitting it first and joining it where all were written.
    #[cold]
    fn access_bytes(
        &mut self,
        word: u32,
        bytes: std::ops::Range<u32>,
        by: u32,
        access: Access,
    ) -> Result<(), Finding> {
        if self.bytes.len() < self.entries.len() {
            self.bytes.resize(self.entries.len(), [Entry::default(); 4]);
        }
        let whole = &mut self.entries[word as usize];
        let parts = &mut self.bytes[word as usize];
        if whole.write & SPLIT == 0 || epoch(whole.write) < self.clock.begin {
            *parts = [*whole; 4];
            *whole = Entry {
                write: stamp(self.clock.now, 0, SPLIT),
                read: 0,
            };
        }
        let written = matches!(access, Access::Write | Access::Copy) && bytes.len() == 4;
        for byte in bytes {
            self.clock.access(&mut parts[byte as usize], by, access)?;
        }
        if written {
            *whole = parts[0];
        }
        Ok(())
    }

    /// Moves the bytes of the groups that a wait covers, all but the last `left`.
    fn copy_wait(&mut self, by: u32, left: u32) {
        let copies = &mut self.copies[by as usize];
        let done = copies.groups.saturating_sub(left);
        let count = copies
            .pending
            .iter()
            .take_while(|copy| copy.group < done)
            .count();
        for copy in copies.pending.drain(..count) {
            let address = copy.address;
            for (i, bytes) in copy.words.into_iter().take(copy.count).enumerate() {
                let word = address as usize / 4 + i;
                // From here on it is this thread's write, which others need a barrier to see.
                self.entries[word] = Entry {
                    write: stamp(self.clock.now, by, 0),
                    read: 0,
                };
                bytemuck::cast_slice_mut::<u64, u32>(&mut self.words)[word] = bytes;
            }
        }
    }
}

#[cold]
#[inline(never)]
fn report(word: u32, finding: &Finding, access: Access, here: &'static Location<'static>) -> ! {
    let doing = match access {
        Access::Read => "read",
        Access::Write => "write",
        Access::Add => "atomic addition",
        Access::Copy => "start of a copy to",
    };
    let at = format!("shared word {word} (byte {})", word * 4);
    match finding {
        Finding::Uninitialised => fault(
            FaultKind::Uninitialised,
            format!("{doing} of uninitialised {at}"),
            here,
        ),
        Finding::Pending(owner) => {
            let what = format!(
                "{doing} of {at}, to which thread {owner} has a copy under way: no cp_async_wait yet"
            );
            fault(FaultKind::PendingCopy, what, here)
        }
        Finding::Race(other, did) => {
            let what = format!(
                "{doing} of {at} races with {did} by thread {other}: no barrier in between"
            );
            fault(FaultKind::Race, what, here)
        }
    }
}

/// Bounds and alignment of an access `at` bytes into a view; its address.
#[inline(always)]
#[track_caller]
fn check(start: u32, bytes: u32, at: u64, size: usize, align: usize) -> u32 {
    if at + size as u64 > u64::from(bytes) {
        let what = format!("shared access of {size} bytes at byte {at} of a view of {bytes} bytes");
        fault(FaultKind::OutOfBounds, what, Location::caller());
    }
    let address = start + at as u32;
    if !address.is_multiple_of(align as u32) {
        let what = format!("shared access at byte {address} is not aligned to {align}");
        fault(FaultKind::Misaligned, what, Location::caller());
    }
    address
}

/// Checks that a range lies in the dynamic shared memory of the launch.
#[track_caller]
pub(crate) fn check_dynamic(offset: u32, bytes: u64, align: usize) {
    let dynamic = context().shared.dynamic;
    if u64::from(offset) + bytes > u64::from(dynamic) {
        let what = format!(
            "a view of {bytes} bytes from byte {offset} of {dynamic} bytes of dynamic shared memory"
        );
        fault(FaultKind::OutOfBounds, what, Location::caller());
    }
    super::check_alignment(u64::from(offset), align);
}

/// Offset of the fixed array of a place in the source.
#[track_caller]
pub(crate) fn fixed_array(site: u64, bytes: u64) -> u32 {
    let shared = &mut context().shared;
    shared.fixed_array(site, bytes).unwrap_or_else(|needed| {
        let what = format!(
            "the block needs {needed} bytes of shared memory, of {}",
            shared.limit
        );
        fault(FaultKind::Launch, what, Location::caller())
    })
}

/// A load `at` bytes into a view.
#[inline(always)]
#[track_caller]
pub(crate) fn shared_read<T: Pod>(start: u32, bytes: u32, at: u64, align: usize) -> T {
    let context = context();
    context.step(Location::caller());
    let address = check(start, bytes, at, size_of::<T>(), align);
    let access = Access::Read;
    if let Err((word, finding)) =
        context
            .shared
            .access(address, size_of::<T>() as u32, context.thread, access)
    {
        report(word, &finding, access, Location::caller());
    }
    let from = address as usize;
    let memory = bytemuck::cast_slice::<u64, u8>(&context.shared.words);
    bytemuck::pod_read_unaligned(&memory[from..from + size_of::<T>()])
}

/// A store `at` bytes into a view.
#[inline(always)]
#[track_caller]
pub(crate) fn shared_write<T: Pod>(start: u32, bytes: u32, at: u64, align: usize, value: T) {
    let context = context();
    context.step(Location::caller());
    let address = check(start, bytes, at, size_of::<T>(), align);
    let access = Access::Write;
    if let Err((word, finding)) =
        context
            .shared
            .access(address, size_of::<T>() as u32, context.thread, access)
    {
        report(word, &finding, access, Location::caller());
    }
    let to = address as usize;
    let memory = bytemuck::cast_slice_mut::<u64, u8>(&mut context.shared.words);
    memory[to..to + size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
}

/// An atomic addition `at` bytes into a view; what was there.
#[track_caller]
pub(crate) fn shared_add(start: u32, bytes: u32, at: u64, value: u32) -> u32 {
    let context = context();
    context.step(Location::caller());
    let address = check(start, bytes, at, 4, 4);
    let access = Access::Add;
    if let Err((word, finding)) = context.shared.access(address, 4, context.thread, access) {
        report(word, &finding, access, Location::caller());
    }
    let words = bytemuck::cast_slice_mut::<u64, u32>(&mut context.shared.words);
    let word = &mut words[address as usize / 4];
    std::mem::replace(word, word.wrapping_add(value))
}

/// The start of an asynchronous copy of two or four words to word `word` of a view.
#[track_caller]
pub(crate) fn copy_start(start: u32, bytes: u32, word: u32, source: &[u32]) {
    let context = context();
    let size = size_of_val(source);
    let address = check(start, bytes, u64::from(word) * 4, size, size);
    let access = Access::Copy;
    if let Err((word, finding)) =
        context
            .shared
            .access(address, size as u32, context.thread, access)
    {
        report(word, &finding, access, Location::caller());
    }
    context.stats.async_copies += 1;
    let copies = &mut context.shared.copies[context.thread as usize];
    let mut words = [0; 4];
    words[..source.len()].copy_from_slice(source);
    copies.pending.push(Copy {
        address,
        group: copies.groups,
        words,
        count: source.len(),
    });
}

/// Closes the group of the calling thread's copies.
pub(crate) fn copy_commit() {
    let context = context();
    context.shared.copies[context.thread as usize].groups += 1;
}

/// Delivers all but the last `left` groups of the calling thread's copies.
pub(crate) fn copy_wait(left: u32) {
    let context = context();
    context.shared.copy_wait(context.thread, left);
}
