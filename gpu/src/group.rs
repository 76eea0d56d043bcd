//! Assignments of tokens to experts, sorted by expert.
//!
//! From `ids [tokens, k]`: slots in the order (expert ascending, token ascending); for each expert
//! that has any, `(expert, first slot, slots, 0)` in `active`; their number in `n_active`.
//!
//! Experts that are elsewhere get no slots; their assignments are numbered for whoever brings what these
//! make of their tokens ([`mod@crate::combine`]).
//!
//! One block:
//! 1. a histogram over experts in shared memory;
//! 2. warp 0 scans it, 32 experts at a time, into first slots and the list of active experts;
//! 3. a warp an active expert: it looks through the assignments 32 at a time and numbers its own by
//!    ballot, which keeps tokens in order.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{kernel, shared_array, thread, warp};

/// Threads of the block.
pub const THREADS: u32 = 1024;

/// Arguments. Grid: `[1, 1, 1]`, 1,024 threads, dynamic shared memory [`shared_bytes`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct GroupArgs {
    /// u32 `[tokens, k]`, each below `experts`, those of a token different.
    pub ids: Slice,
    /// `[u32; 4]` `[min(experts, tokens * k)]`: expert, first slot, slots, 0.
    pub active: Slice,
    /// u32 `[1]`.
    pub n_active: Slice,
    /// u32 `[tokens * k]`: token of a slot.
    pub slot_token: Slice,
    /// u32 `[tokens * k]`: expert of a slot.
    pub slot_expert: Slice,
    /// u32 `[tokens, k]`: slot of an assignment. Of an expert elsewhere: `place * tokens * k` plus
    /// the number of the assignment; of no expert, or of [`NOWHERE`]: none, all ones.
    pub slot_of: Slice,
    /// u32 `[experts]`: 0 for those here, else the place, from 1, or [`NOWHERE`]; empty: all are here.
    pub places: Slice,
    /// Tokens.
    pub tokens: u32,
    /// Experts of a token.
    pub k: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Zero.
    pub reserved: u32,
}

/// Expert of a slot that has none.
pub const NO_EXPERT: u32 = u32::MAX;

/// Place of an expert that nobody asks for.
pub const NOWHERE: u32 = u32::MAX;

/// Where expert `e` is, as [`GroupArgs::places`] says.
#[inline(always)]
fn place_of(places: Global<u32>, len: u64, e: u32) -> u32 {
    if len == 0 { 0 } else { places.load(e) }
}

/// Dynamic shared memory: count and first slot of each expert.
pub const fn shared_bytes(experts: u32) -> u32 {
    8 * experts
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`GroupArgs`] says.
#[kernel(threads = 1024)]
pub unsafe fn group_experts(args: GroupArgs) {
    let n_list = shared_array![u32; 1];
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (counts, starts, ids, places, active, slot_token, slot_expert, slot_of) = unsafe {
        (
            Shared::<u32>::dynamic(0, args.experts),
            Shared::<u32>::dynamic(4 * args.experts, args.experts),
            Global::<u32>::new(args.ids),
            Global::<u32>::new(args.places),
            GlobalMut::<[u32; 4]>::new(args.active),
            GlobalMut::<u32>::new(args.slot_token),
            GlobalMut::<u32>::new(args.slot_expert),
            GlobalMut::<u32>::new(args.slot_of),
        )
    };
    let t = thread::thread_idx_x();
    let lane = warp::lane_id();
    let warp = warp::warp_id();
    let slots = args.tokens * args.k;

    let mut e = t;
    while e < args.experts {
        counts.store(e, 0);
        e += THREADS;
    }
    thread::sync_threads();
    let mut i = t;
    while i < slots {
        let e = ids.load(i);
        if e < args.experts && place_of(places, args.places.len, e) == 0 {
            counts.atomic_add_u32(e, 1);
        }
        i += THREADS;
    }
    thread::sync_threads();

    if warp == 0 {
        let (mut start, mut listed) = (0u32, 0u32);
        let mut tile = 0;
        while tile < args.experts {
            let e = tile + lane;
            let count = if e < args.experts { counts.load(e) } else { 0 };
            let mut sum = count; // of the lanes up to this one
            let mut distance = 1;
            while distance < 32 {
                let other = warp::shuffle_up_u32(sum, distance);
                if lane >= distance {
                    sum += other;
                }
                distance *= 2;
            }
            let votes = warp::ballot(count > 0);
            if e < args.experts {
                starts.store(e, start + sum - count);
            }
            if count > 0 {
                let at = listed + (votes & ((1 << lane) - 1)).count_ones();
                active.store_v4(4 * at, [e, start + sum - count, count, 0]);
            }
            start += warp::shuffle_idx_u32(sum, 31);
            listed += votes.count_ones();
            tile += 32;
        }
        if lane == 0 {
            // SAFETY: the caller's.
            unsafe { GlobalMut::<u32>::new(args.n_active) }.store(0, listed);
            n_list.store(0, start);
        }
    }
    thread::sync_threads();

    let mut e = warp;
    while e < args.experts {
        if counts.load(e) > 0 {
            let mut slot = starts.load(e);
            let mut tile = 0;
            while tile < slots {
                let i = tile + lane;
                let mine = i < slots && ids.load(i) == e;
                let votes = warp::ballot(mine);
                if mine {
                    let to = slot + (votes & ((1 << lane) - 1)).count_ones();
                    slot_token.store(to, i / args.k.max(1));
                    slot_expert.store(to, e);
                    slot_of.store(i, to);
                }
                slot += votes.count_ones();
                tile += 32;
            }
        }
        e += THREADS / 32;
    }

    // Slots that are left over must not lead anyone astray.
    let mut i = n_list.load(0) + t;
    while i < slots {
        slot_token.store(i, 0);
        slot_expert.store(i, NO_EXPERT);
        i += THREADS;
    }
    let mut i = t;
    while i < slots {
        let e = ids.load(i);
        let place = if e < args.experts {
            place_of(places, args.places.len, e)
        } else {
            NOWHERE
        };
        if place == NOWHERE {
            slot_of.store(i, u32::MAX);
        } else if place > 0 {
            slot_of.store(i, place * slots + i);
        }
        i += THREADS;
    }
}
