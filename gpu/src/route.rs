//! The router: the experts of a token and their weights.
//!
//! `s = sigmoid(logit)`, or with [`SOFTMAX`] `s = e / sum(e)` of `e = exp(logit - max)`, summed by
//! ascending expert. Choice by `s + bias`, of equal values the lowest expert; where experts form
//! groups only the `top_groups` groups count whose two best choices have the largest sums. Weights
//! are the chosen `s` by ascending expert, divided by (their sum + 1e-20) with [`NORMALISE`], times
//! `scaling`.
//!
//! 1. A block a token: its threads compute `s` and the choice's order key, which lie in shared memory;
//!    the first warp does the rest.
//! 2. `top_k` rounds of a warp maximum (key, then lowest number); what was taken gets key 0, which
//!    no number has.
//! 3. The chosen are put in order by ballots over the experts in ascending order; the sum is added
//!    in that order by every lane.

use bytemuck::{Pod, Zeroable};
use cuda_std::mem::{Global, GlobalMut, Slice};
use cuda_std::shared::Shared;
use cuda_std::{kernel, thread, warp};

use crate::arith::{exp, order_key, sigmoid};

/// Flag: divide by the sum of the chosen.
pub const NORMALISE: u32 = 1;
/// Flag: softmax over all experts instead of the logistic function of each.
pub const SOFTMAX: u32 = 2;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Arguments. Grid: `[tokens, 1, 1]`, 256 threads, dynamic shared memory [`shared_bytes`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RouteArgs {
    /// f32 rows of `logit_stride`, `experts` long.
    pub logits: Slice,
    /// f32 `[experts]`.
    pub bias: Slice,
    /// u32 `[tokens, top_k]`.
    pub ids: Slice,
    /// f32 `[tokens, top_k]`.
    pub weights: Slice,
    /// Elements from token to token of `logits`.
    pub logit_stride: u32,
    /// Experts.
    pub experts: u32,
    /// Experts of a token, at most `experts`.
    pub top_k: u32,
    /// Groups, a divisor of `experts`; with more than one each has two experts at least.
    pub groups: u32,
    /// Groups that stay.
    pub top_groups: u32,
    /// [`NORMALISE`], [`SOFTMAX`].
    pub flags: u32,
    /// `routed_scaling_factor`.
    pub scaling: f32,
    /// Zero.
    pub reserved: u32,
}

/// Dynamic shared memory: `s`, key and chosen flag of each expert, sum of each group.
pub const fn shared_bytes(experts: u32, groups: u32) -> u32 {
    4 * (3 * experts + groups)
}

/// Number of the largest key, of equal keys the lowest number, over `n` keys: its key and itself.
#[inline(always)]
fn best(keys: Shared<u32>, n: u32) -> (u32, u32) {
    let lane = warp::lane_id();
    let (mut key, mut number) = (0, u32::MAX);
    let mut i = lane;
    while i < n {
        let k = keys.load(i);
        if k > key {
            key = k;
            number = i;
        }
        i += 32;
    }
    let top = warp::reduce_max_u32(key);
    let number = !warp::reduce_max_u32(if key == top { !number } else { 0 });
    (top, number)
}

/// See the module.
///
/// # Safety
/// The views must be live and as long as [`RouteArgs`] says.
#[kernel(threads = 256)]
pub unsafe fn route(args: RouteArgs) {
    let n = args.experts;
    // SAFETY: the caller's: live views, as long as the arguments say.
    let (s, keys, chosen, sums, logits, bias, ids, weights) = unsafe {
        (
            Shared::<f32>::dynamic(0, n),
            Shared::<u32>::dynamic(4 * n, n),
            Shared::<u32>::dynamic(8 * n, n),
            Shared::<u32>::dynamic(12 * n, args.groups),
            Global::<f32>::new(args.logits),
            Global::<f32>::new(args.bias),
            GlobalMut::<u32>::new(args.ids),
            GlobalMut::<f32>::new(args.weights),
        )
    };
    let token = thread::block_idx_x();
    let lane = warp::lane_id();

    let row = token * args.logit_stride;
    let t = thread::thread_idx_x();
    let mut total = 1.0;
    if args.flags & SOFTMAX != 0 {
        // Every warp finds the largest by itself.
        let mut key = 0;
        let mut e = lane;
        while e < n {
            key = key.max(order_key(logits.load(row + e)));
            e += 32;
        }
        let top = value(warp::reduce_max_u32(key));
        let mut e = t;
        while e < n {
            s.store(e, exp(logits.load(row + e) - top));
            e += THREADS;
        }
        thread::sync_threads();
        total = 0.0;
        for e in 0..n {
            total += s.load(e);
        }
        thread::sync_threads();
    }

    let mut e = t;
    while e < n {
        let v = if args.flags & SOFTMAX != 0 {
            s.load(e) / total
        } else {
            sigmoid(logits.load(row + e))
        };
        s.store(e, v);
        keys.store(e, order_key(v + bias.load_nc(e)));
        chosen.store(e, 0);
        e += THREADS;
    }
    thread::sync_threads();
    if warp::warp_id() > 0 {
        return;
    }

    if args.groups > 1 {
        let size = (n / args.groups.max(1)).max(1);
        // The sum of the two best: largest keys, back from key to choice.
        let mut g = lane;
        while g < args.groups {
            let (mut first, mut second) = (0u32, 0u32);
            for i in g * size..(g + 1) * size {
                let key = keys.load(i);
                if key > first {
                    second = first;
                    first = key;
                } else if key > second {
                    second = key;
                }
            }
            sums.store(g, order_key(value(first) + value(second)));
            g += 32;
        }
        warp::sync_warp();
        for _ in 0..args.top_groups {
            let (_, g) = best(sums, args.groups);
            warp::sync_warp();
            if lane == 0 && g < args.groups {
                sums.store(g, 0);
            }
            warp::sync_warp();
        }
        let mut e = lane;
        while e < n {
            if sums.load(e / size) != 0 {
                keys.store(e, order_key(f32::NEG_INFINITY));
            }
            e += 32;
        }
        warp::sync_warp();
    }

    for _ in 0..args.top_k {
        let (_, e) = best(keys, n);
        warp::sync_warp();
        if lane == 0 && e < n {
            keys.store(e, 0);
            chosen.store(e, 1);
        }
        warp::sync_warp();
    }

    // Ascending: `keys` becomes the list of the chosen.
    let mut count = 0;
    let mut tile = 0;
    while tile < n {
        let e = tile + lane;
        let mine = e < n && chosen.load(e) != 0;
        let votes = warp::ballot(mine);
        if mine {
            keys.store(count + (votes & ((1 << lane) - 1)).count_ones(), e);
        }
        count += votes.count_ones();
        tile += 32;
    }
    warp::sync_warp();
    let mut sum = 0.0;
    for i in 0..count {
        sum += s.load(keys.load(i));
    }
    let mut i = lane;
    while i < count {
        let e = keys.load(i);
        let v = s.load(e);
        let w = if args.flags & NORMALISE != 0 {
            v / (sum + 1e-20)
        } else {
            v
        };
        ids.store(token * args.top_k + i, e);
        weights.store(token * args.top_k + i, w * args.scaling);
        i += 32;
    }
}

/// The number whose [`order_key`] this is (+0 of both zeros).
#[inline(always)]
fn value(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 {
        key & 0x7fff_ffff
    } else {
        !key
    })
}
