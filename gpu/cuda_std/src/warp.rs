//! Warp operations, all of them over the full mask: every lane of the warp that has not returned
//! calls the operation, from the same place in the source, or the emulator reports divergence.
//!
//! Only [`sync_warp`] (and the block barrier) orders memory: a ballot or a shuffle does not make one
//! lane's shared-memory store visible to another, neither in PTX nor to the emulator's race check.

#[cfg(not(target_arch = "nvptx64"))]
use crate::emulator::{self, WarpOp};
#[cfg(not(target_arch = "nvptx64"))]
use core::panic::Location;

/// Lanes in a warp.
pub const WARP_SIZE: u32 = 32;

// The intrinsics and not inline PTX: LLVM knows them to be convergent.
#[cfg(target_arch = "nvptx64")]
mod llvm {
    unsafe extern "C" {
        #[link_name = "llvm.nvvm.vote.ballot.sync"]
        pub fn ballot(mask: u32, value: bool) -> u32;
        #[link_name = "llvm.nvvm.vote.any.sync"]
        pub fn any(mask: u32, value: bool) -> bool;
        #[link_name = "llvm.nvvm.vote.all.sync"]
        pub fn all(mask: u32, value: bool) -> bool;
        #[link_name = "llvm.nvvm.bar.warp.sync"]
        pub fn sync_warp(mask: u32);
        #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
        pub fn shuffle_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
        pub fn shuffle_xor(mask: u32, value: u32, lanes: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
        pub fn shuffle_up(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
        pub fn shuffle_down(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.add"]
        pub fn reduce_add(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.umax"]
        pub fn reduce_max_u32(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.max"]
        pub fn reduce_max_i32(value: i32, mask: u32) -> i32;
        #[link_name = "llvm.nvvm.redux.sync.umin"]
        pub fn reduce_min_u32(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.min"]
        pub fn reduce_min_i32(value: i32, mask: u32) -> i32;
        #[link_name = "llvm.nvvm.redux.sync.or"]
        pub fn reduce_or(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.and"]
        pub fn reduce_and(value: u32, mask: u32) -> u32;
        #[link_name = "llvm.nvvm.redux.sync.xor"]
        pub fn reduce_xor(value: u32, mask: u32) -> u32;
    }
}

#[cfg(target_arch = "nvptx64")]
const FULL: u32 = u32::MAX;

/// Lane of the calling thread in its warp: thread index modulo 32.
#[inline(always)]
pub fn lane_id() -> u32 {
    crate::thread::thread_idx_x() & 31
}

/// Warp of the calling thread in its block, through [`uniform`]: the compiler knows that all lanes
/// hold one value and keeps what follows from it in uniform registers. A warp operation.
#[inline(always)]
#[track_caller]
pub fn warp_id() -> u32 {
    uniform(crate::thread::thread_idx_x() >> 5)
}

/// Waits for all lanes of the warp; what they wrote before is visible to all of them after.
#[inline(always)]
#[track_caller]
pub fn sync_warp() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: all live lanes call it.
    unsafe {
        llvm::sync_warp(FULL);
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emulator::warp_op(WarpOp::Sync, 0, 0, Location::caller());
}

/// Bit l of the result is the value of lane l; 0 for lanes that have returned.
#[inline(always)]
#[track_caller]
pub fn ballot(value: bool) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: all live lanes call it.
    unsafe {
        llvm::ballot(FULL, value)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emulator::warp_op(WarpOp::Ballot, u32::from(value), 0, Location::caller())
}

/// Whether the value is true in any lane.
#[inline(always)]
#[track_caller]
pub fn any(value: bool) -> bool {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: all live lanes call it.
    unsafe {
        llvm::any(FULL, value)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        emulator::warp_op(WarpOp::Ballot, u32::from(value), 0, Location::caller()) != 0
    }
}

/// Whether the value is true in all lanes (that have not returned).
#[inline(always)]
#[track_caller]
pub fn all(value: bool) -> bool {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: all live lanes call it.
    unsafe {
        llvm::all(FULL, value)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        emulator::warp_op(WarpOp::Ballot, u32::from(!value), 0, Location::caller()) == 0
    }
}

/// Value of lane 0, which must be that of all lanes (the emulator checks): tells the compiler that
/// it is uniform.
#[inline(always)]
#[track_caller]
pub fn uniform(value: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: all live lanes call it.
    unsafe {
        llvm::shuffle_idx(FULL, value, 0, 31)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    emulator::warp_op(WarpOp::Uniform, value, 0, Location::caller())
}

macro_rules! shuffle {
    ($(#[$about:meta])* $op:ident, $llvm:ident, $u32:ident, $i32:ident, $f32:ident, $argument:ident) => {
        $(#[$about])*
        #[inline(always)]
        #[track_caller]
        pub fn $u32(value: u32, $argument: u32) -> u32 {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: all live lanes call it.
            unsafe {
                llvm::$llvm(FULL, value, $argument, shuffle!(@clamp $op))
            }
            #[cfg(not(target_arch = "nvptx64"))]
            emulator::warp_op(WarpOp::$op, value, $argument, Location::caller())
        }

        #[doc = concat!("As [`", stringify!($u32), "`].")]
        #[inline(always)]
        #[track_caller]
        pub fn $i32(value: i32, $argument: u32) -> i32 {
            $u32(value as u32, $argument) as i32
        }

        #[doc = concat!("As [`", stringify!($u32), "`], bits unchanged.")]
        #[inline(always)]
        #[track_caller]
        pub fn $f32(value: f32, $argument: u32) -> f32 {
            f32::from_bits($u32(value.to_bits(), $argument))
        }
    };
    (@clamp ShuffleUp) => { 0 };
    (@clamp $other:ident) => { 31 };
}

shuffle!(
    /// Value of lane `lane mod 32`.
    ShuffleIdx, shuffle_idx, shuffle_idx_u32, shuffle_idx_i32, shuffle_idx_f32, lane
);
shuffle!(
    /// Value of the lane whose number differs from the caller's by exclusive or with `lanes` (< 32).
    ShuffleXor, shuffle_xor, shuffle_xor_u32, shuffle_xor_i32, shuffle_xor_f32, lanes
);
shuffle!(
    /// Value of the lane `delta` (< 32) below; the caller's own where there is none.
    ShuffleUp, shuffle_up, shuffle_up_u32, shuffle_up_i32, shuffle_up_f32, delta
);
shuffle!(
    /// Value of the lane `delta` (< 32) above; the caller's own where there is none.
    ShuffleDown, shuffle_down, shuffle_down_u32, shuffle_down_i32, shuffle_down_f32, delta
);

macro_rules! reduce {
    ($(#[$about:meta])* $name:ident, $kind:ty, $llvm:ident, $op:ident) => {
        $(#[$about])*
        #[inline(always)]
        #[track_caller]
        pub fn $name(value: $kind) -> $kind {
            #[cfg(target_arch = "nvptx64")]
            // SAFETY: all live lanes call it.
            unsafe {
                llvm::$llvm(value as _, FULL) as $kind
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                emulator::warp_op(WarpOp::$op, value as u32, 0, Location::caller()) as $kind
            }
        }
    };
}

reduce!(
    /// Sum over the lanes modulo 2^32 (`redux.sync`).
    reduce_add_u32, u32, reduce_add, ReduceAdd
);
reduce!(
    /// Sum over the lanes modulo 2^32 (`redux.sync`).
    reduce_add_i32, i32, reduce_add, ReduceAdd
);
reduce!(
    /// Largest of the lanes' values.
    reduce_max_u32, u32, reduce_max_u32, ReduceMaxU32
);
reduce!(
    /// Largest of the lanes' values.
    reduce_max_i32, i32, reduce_max_i32, ReduceMaxI32
);
reduce!(
    /// Least of the lanes' values.
    reduce_min_u32, u32, reduce_min_u32, ReduceMinU32
);
reduce!(
    /// Least of the lanes' values.
    reduce_min_i32, i32, reduce_min_i32, ReduceMinI32
);
reduce!(
    /// Or of the lanes' values.
    reduce_or_u32, u32, reduce_or, ReduceOr
);
reduce!(
    /// And of the lanes' values.
    reduce_and_u32, u32, reduce_and, ReduceAnd
);
reduce!(
    /// Exclusive or of the lanes' values.
    reduce_xor_u32, u32, reduce_xor, ReduceXor
);

/// Sum of the values of this lane and all below, modulo 2^32.
///
/// Five shuffles whose predicates say which lanes add; written with [`shuffle_up_u32`] each step
/// compares the lane first.
#[inline(always)]
#[track_caller]
#[must_use]
pub fn scan_add_u32(value: u32) -> u32 {
    let mut sum = value;
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: all live lanes call it. Not `pure`, so that it is not moved to where fewer do.
    unsafe {
        core::arch::asm!(
            "{{ .reg .pred p; .reg .b32 t;",
            "shfl.sync.up.b32 t|p, {v}, 1, 0, -1; @p add.u32 {v}, {v}, t;",
            "shfl.sync.up.b32 t|p, {v}, 2, 0, -1; @p add.u32 {v}, {v}, t;",
            "shfl.sync.up.b32 t|p, {v}, 4, 0, -1; @p add.u32 {v}, {v}, t;",
            "shfl.sync.up.b32 t|p, {v}, 8, 0, -1; @p add.u32 {v}, {v}, t;",
            "shfl.sync.up.b32 t|p, {v}, 16, 0, -1; @p add.u32 {v}, {v}, t; }}",
            v = inlateout(reg32) sum, options(nomem, nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "nvptx64"))]
    for lanes in [1, 2, 4, 8, 16] {
        let below = shuffle_up_u32(sum, lanes);
        if lane_id() >= lanes {
            sum = sum.wrapping_add(below);
        }
    }
    sum
}
