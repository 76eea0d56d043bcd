//! The emulator runs correct kernels and catches each kind of fault.
#![cfg(not(target_arch = "nvptx64"))]
#![allow(missing_docs)]

use bytemuck::{Pod, Zeroable};
use cuda_std::emulator::{
    EmulatorError, FaultKind, Grid, Memory, Options, Stats, launch, launch_with,
};
use cuda_std::intrinsics::{mma_u8_s8, mma_u8_u8};
use cuda_std::mem::{
    Global, GlobalMut, Slice, cp_async_16, cp_async_commit, cp_async_wait, thread_fence,
};
use cuda_std::shared::Shared;
use cuda_std::thread::{
    block_dim_x, block_idx_x, block_idx_y, block_idx_z, grid_dim_x, grid_dim_y, grid_dim_z,
    sync_threads, thread_idx_x,
};
use cuda_std::{KernelInfo, kernel, shared_array, warp};

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Args {
    input: Slice,
    output: Slice,
}

/// output\[block] = sum of the block's 256 elements of input.
///
/// # Safety
/// As any kernel of two slices.
#[kernel(threads = 256, min_blocks = 2)]
unsafe fn reduce(args: Args) {
    // SAFETY: guarded by the length below.
    let (input, output) = unsafe {
        (
            Global::<i32>::new(args.input),
            GlobalMut::<i32>::new(args.output),
        )
    };
    let partial = shared_array![i32; 8];
    let i = block_idx_x() * block_dim_x() + thread_idx_x();
    let value = if u64::from(i) < input.len() {
        input.load_nc(i)
    } else {
        0
    };
    let sum = warp::reduce_add_i32(value);
    let warp_id = warp::warp_id();
    if warp::lane_id() == 0 {
        partial.store(warp_id, sum);
    }
    sync_threads();
    if warp_id == 0 {
        let mut sum = if warp::lane_id() < 8 {
            partial.load(warp::lane_id())
        } else {
            0
        };
        for delta in [4, 2, 1] {
            sum += warp::shuffle_down_i32(sum, delta);
        }
        if warp::lane_id() == 0 {
            output.store(block_idx_x(), sum);
        }
    }
}

#[test]
fn reduction() {
    assert_eq!(
        reduce::INFO,
        KernelInfo {
            name: "reduce",
            threads: 256,
            min_blocks: 2
        }
    );
    let values: Vec<i32> = (0..5000).map(|i| i * 7919 % 1013 - 500).collect();
    let (input, output) = (Memory::from_slice(&values), Memory::<i32>::uninit(20));
    assert!(!output.is_written());
    let args = Args {
        input: input.slice(),
        output: output.slice(),
    };
    // SAFETY: both slices are live.
    let stats = launch("reduce", 20, 256, 0, || unsafe { reduce(args) }).unwrap();
    let expected: Vec<i32> = values.chunks(256).map(|chunk| chunk.iter().sum()).collect();
    assert_eq!(output.to_vec(), expected);
    assert!(output.is_written());
    // A warp: one reduction, one uniform; warp 0 three shuffles besides.
    let expected = Stats {
        blocks: 20,
        threads: 5120,
        barriers: 20,
        warp_ops: 20 * (16 + 3),
        global_read_bytes: 20_000,
        global_write_bytes: 80,
        async_copies: 0,
        steps: stats.steps,
        shared_bytes: 32,
    };
    assert_eq!(stats, expected);
}

/// Runs `body` as a kernel of one block with 1 KiB of dynamic shared memory.
fn block(threads: u32, body: impl Fn() + Sync) -> Result<Stats, EmulatorError> {
    launch("test", 1, threads, 1024, body)
}

/// The error that `body` must give.
#[track_caller]
fn faulty(threads: u32, kind: FaultKind, body: impl Fn() + Sync) -> EmulatorError {
    let error = block(threads, body).expect_err("the fault was not caught");
    assert_eq!(error.kind, kind, "{error}");
    assert!(
        error
            .to_string()
            .starts_with("kernel test, block (0, 0, 0), thread "),
        "{error}"
    );
    error
}

/// Takes a value that a fault should prevent.
fn used<T>(_: T) {}

fn words() -> Shared<u32> {
    // SAFETY: the launches here have 1 KiB.
    unsafe { Shared::dynamic(0, 256) }
}

fn dynamic(byte_offset: u32, len: u32) -> Shared<u32> {
    // SAFETY: the emulator checks it, which is what is tested.
    unsafe { Shared::dynamic(byte_offset, len) }
}

fn global(slice: Slice) -> Global<u32> {
    // SAFETY: the emulator checks it, which is what is tested.
    unsafe { Global::new(slice) }
}

fn view<T: Pod>(memory: &Memory<T>) -> GlobalMut<T> {
    // SAFETY: the emulator checks each access.
    unsafe { GlobalMut::new(memory.slice()) }
}

#[test]
fn positions() {
    let seen = Memory::<u32>::zeroed(2 * 3 * 4 * 40);
    launch("positions", Grid { x: 2, y: 3, z: 4 }, 40, 0, || {
        assert_eq!(
            (grid_dim_x(), grid_dim_y(), grid_dim_z(), block_dim_x()),
            (2, 3, 4, 40)
        );
        let block = block_idx_x() + 2 * (block_idx_y() + 3 * block_idx_z());
        view(&seen).atomic_add_u32(block * 40 + thread_idx_x(), 1);
    })
    .unwrap();
    assert_eq!(seen.to_vec(), [1; 960]);
}

#[test]
fn warp_operations() {
    block(64, || {
        let lane = warp::lane_id();
        assert_eq!(warp::ballot(lane.is_multiple_of(3)), 0x4924_9249);
        assert_eq!(cuda_std::intrinsics::lanemask_lt().count_ones(), lane);
        assert!(warp::any(lane == 31) && !warp::any(lane > 31));
        assert!(warp::all(lane < 32) && !warp::all(lane < 31));
        assert_eq!(
            warp::shuffle_idx_u32(lane * 2, lane + 1),
            (lane + 1) % 32 * 2
        );
        assert_eq!(
            warp::shuffle_xor_i32(-(lane as i32), 5),
            -((lane ^ 5) as i32)
        );
        assert_eq!(
            warp::shuffle_up_u32(lane, 3),
            if lane < 3 { lane } else { lane - 3 }
        );
        assert_eq!(
            warp::shuffle_down_f32(lane as f32, 3),
            if lane > 28 { lane } else { lane + 3 } as f32
        );
        assert_eq!(
            warp::reduce_add_u32(u32::MAX - lane),
            0u32.wrapping_sub(32 + 31 * 16)
        );
        assert_eq!(warp::reduce_add_i32(-(lane as i32)), -31 * 16);
        assert_eq!(warp::reduce_max_i32(-5 - lane as i32), -5);
        assert_eq!(warp::reduce_min_i32(-5 - lane as i32), -36);
        assert_eq!(warp::reduce_max_u32(lane ^ 7), 31);
        assert_eq!(warp::reduce_min_u32(lane + 9), 9);
        assert_eq!(warp::reduce_or_u32(1 << lane), u32::MAX);
        assert_eq!(warp::reduce_and_u32(!(1 << lane)), 0);
        assert_eq!(warp::reduce_xor_u32(lane), 0);
        assert_eq!(warp::warp_id(), thread_idx_x() / 32);
    })
    .unwrap();
}

#[test]
fn returned_lanes_are_left_out() {
    let stats = block(64, || {
        if thread_idx_x() >= 40 {
            return;
        }
        let live = if thread_idx_x() < 32 { u32::MAX } else { 0xff };
        assert_eq!(warp::ballot(true), live);
        assert!(warp::all(true));
        sync_threads();
        assert_eq!(warp::reduce_add_u32(1), live.count_ones());
    })
    .unwrap();
    assert_eq!((stats.barriers, stats.warp_ops), (1, 6));
    faulty(32, FaultKind::Divergence, || {
        if warp::lane_id() != 9 {
            let _ = warp::shuffle_idx_u32(1, 9);
        }
    });
}

#[test]
fn global_faults() {
    let memory = Memory::<u32>::from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    block(1, || assert_eq!(view(&memory).load_v4(4), [5, 6, 7, 8])).unwrap();
    let error = faulty(2, FaultKind::OutOfBounds, || {
        let _ = view(&memory).load(7 + thread_idx_x());
    });
    assert_eq!(error.thread, 1);
    assert!(error.location.unwrap().contains("emulator.rs:"));
    faulty(1, FaultKind::OutOfBounds, || {
        view(&memory).store_v4(8, [0; 4])
    });
    faulty(1, FaultKind::OutOfBounds, || {
        view(&memory).store(u32::MAX, 0)
    });
    faulty(1, FaultKind::OutOfBounds, || used(view(&memory).part(4, 5)));
    faulty(1, FaultKind::OutOfBounds, || used(view(&memory).at(9)));
    faulty(1, FaultKind::Misaligned, || used(view(&memory).load_v4(2)));
    faulty(1, FaultKind::Misaligned, || {
        used(view(&memory).at(1).cast::<u64>())
    });
    let past = Slice::new(memory.slice().addr, 9);
    faulty(1, FaultKind::NotAllocated, || used(global(past)));
    faulty(1, FaultKind::NotAllocated, || {
        used(global(Slice::new(64, 1)))
    });
    faulty(1, FaultKind::OutOfBounds, || {
        used(global(Slice::new(64, u64::MAX)))
    });
    let freed = Memory::<u32>::zeroed(4).slice();
    faulty(1, FaultKind::NotAllocated, || used(global(freed)));
    block(1, || assert!(global(Slice::EMPTY).is_empty())).unwrap();
    assert_eq!(memory.to_vec(), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn global_views() {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable, PartialEq, Debug)]
    struct Descriptor {
        address: u64,
        sizes: [u32; 3],
        flags: [u8; 4],
    }
    let descriptors = [1u8, 2].map(|i| Descriptor {
        address: 9 << i,
        sizes: [5, 6, u32::from(i)],
        flags: [i; 4],
    });
    let (input, output) = (
        Memory::from_slice(&descriptors),
        Memory::<Descriptor>::uninit(2),
    );
    let halves = Memory::<u16>::uninit(6);
    block(1, || {
        let (input, output) = (view(&input), view(&output));
        for i in 0..2 {
            output.store(i, input.load(i));
        }
        assert_eq!(output.at(1).load_nc(0), descriptors[1]);
        assert_eq!(input.cast::<u32>().len(), 12);
        assert_eq!(input.part(1, 1).load_v2_nc(2), [5, 6]);
        let mut registers = [1, 2, 3, 4];
        input.reload_v4_stream(false, 99, &mut registers);
        assert_eq!(registers, [1, 2, 3, 4]);
        input.reload_v4_stream(true, 0, &mut registers);
        assert_eq!(registers, [18, 0, 5, 6]);
        let mut register = 0;
        input.reload_u32(true, 3, &mut register);
        assert_eq!(register, 6);
        let halves = view(&halves);
        halves.cast::<u32>().store_v2(0, [0x0002_0001, 0x0004_0003]);
        assert_eq!([halves.load(0), halves.load(3)], [1, 4]);
        thread_fence();
    })
    .unwrap();
    assert_eq!(output.to_vec(), descriptors);
    faulty(1, FaultKind::Uninitialised, || used(view(&halves).load(4)));
    faulty(1, FaultKind::Uninitialised, || {
        used(view(&halves).part(2, 4).cast::<u32>().load(1))
    });
    let counter = Memory::<u32>::zeroed(1);
    let old = Memory::<u32>::zeroed(4096);
    launch("count", 16, 256, 0, || {
        let ticket = view(&counter).atomic_add_u32(0, 1);
        view(&old).store(ticket, ticket + 1);
    })
    .unwrap();
    assert!(old.to_vec().into_iter().eq(1..=4096));
}

#[test]
fn shared_faults() {
    faulty(1, FaultKind::OutOfBounds, || words().store(256, 0));
    faulty(1, FaultKind::OutOfBounds, || words().store(0x4000_0000, 0));
    faulty(1, FaultKind::OutOfBounds, || used(words().at(1).load(255)));
    faulty(1, FaultKind::OutOfBounds, || used(words().part(250, 7)));
    faulty(1, FaultKind::OutOfBounds, || used(dynamic(4, 256)));
    faulty(1, FaultKind::Misaligned, || used(dynamic(2, 1)));
    faulty(1, FaultKind::Misaligned, || words().store_v4(2, [0; 4]));
    let error = faulty(33, FaultKind::Uninitialised, || {
        words().store(thread_idx_x(), 1);
        let _ = words().load(thread_idx_x() + thread_idx_x() / 32);
    });
    assert_eq!(error.thread, 32);
    assert!(error.what.contains("word 33"), "{error}");
    faulty(1, FaultKind::Uninitialised, || words().atomic_add_u32(0, 1));
    faulty(1, FaultKind::Launch, || {
        let _ = shared_array![u32; 57_600];
        let _ = shared_array![u32; 600];
    });
}

#[test]
fn shared_memory_is_new_in_each_block() {
    let error = launch_with(
        Options {
            workers: 1,
            ..Options::default()
        },
        "blocks",
        2,
        32,
        64,
        || {
            let words = dynamic(0, 16);
            if block_idx_x() == 0 {
                words.atomic_add_u32(0, words.len());
            }
            words.store(0, 1);
        },
    )
    .unwrap_err();
    assert_eq!(error.kind, FaultKind::Uninitialised);
    let error = launch_with(
        Options {
            workers: 1,
            ..Options::default()
        },
        "blocks",
        2,
        1,
        64,
        || {
            let words = dynamic(0, 16);
            if block_idx_x() == 0 {
                words.store(0, 1);
            }
            assert_eq!(words.load(0), 1);
        },
    )
    .unwrap_err();
    assert_eq!(
        (error.kind, error.block),
        (FaultKind::Uninitialised, [1, 0, 0])
    );
}

#[test]
fn fixed_arrays_are_one_for_the_block() {
    fn array() -> Shared<f32> {
        shared_array![f32; 64]
    }
    let stats = block(64, || {
        let (mine, other) = (array(), shared_array![f32; 64]);
        mine.store(thread_idx_x(), 1.5);
        other.store(thread_idx_x(), 2.5);
        sync_threads();
        assert_eq!(array().load(63 - thread_idx_x()), 1.5);
    })
    .unwrap();
    assert_eq!(stats.shared_bytes, 1024 + 512);
}

/// Both threads of the race are named.
#[track_caller]
fn race(threads: u32, parties: [u32; 2], body: impl Fn() + Sync) {
    let error = faulty(threads, FaultKind::Race, body);
    let other = parties[usize::from(error.thread == parties[0])];
    assert!(parties.contains(&error.thread), "{error}");
    assert!(
        error.what.contains(&format!("by thread {other}:")),
        "{error}"
    );
}

#[test]
fn races() {
    // Read after write, write after read, write after write; in one warp and across warps.
    for other in [1, 40] {
        let threads = 64;
        race(threads, [0, other], || match thread_idx_x() {
            0 => words().store(5, 1),
            i if i == other => used(words().load(5)),
            _ => {}
        });
        race(threads, [0, other], || match thread_idx_x() {
            0 => {
                words().store(5, 1);
                let _ = words().load(5);
            }
            i if i == other => words().store(5, 2),
            _ => {}
        });
        // A reader, after a barrier, with a writer.
        race(threads, [0, other], || {
            words().store(thread_idx_x(), 1);
            sync_threads();
            match thread_idx_x() {
                0 => used(words().load(50)),
                i if i == other => words().store(50, 2),
                _ => {}
            }
        });
        // A plain access with an atomic one.
        race(threads, [0, other], || {
            words().store(thread_idx_x(), 1);
            sync_threads();
            match thread_idx_x() {
                0 => words().atomic_add_i32(50, 1),
                i if i == other => used(words().load(50)),
                _ => {}
            }
        });
    }
    // A warp barrier orders lanes of one warp, not warps.
    block(32, || {
        words().store(thread_idx_x(), 1);
        warp::sync_warp();
        let _ = words().load(31 - thread_idx_x());
        warp::sync_warp();
        words().store(31 - thread_idx_x(), 1);
    })
    .unwrap();
    race(64, [31, 32], || {
        words().store(thread_idx_x(), 1);
        warp::sync_warp();
        if thread_idx_x() == 32 {
            let _ = words().load(31);
        }
    });
    // A ballot orders nothing.
    let error = faulty(32, FaultKind::Race, || {
        words().store(thread_idx_x(), 1);
        let _ = warp::ballot(true);
        let _ = words().load(31 - thread_idx_x());
    });
    assert!(error.what.contains("read of shared word 31"), "{error}");
}

#[test]
fn many_readers_then_a_writer() {
    // The writer read the word last itself; an earlier reader is remembered.
    for reader in [0u32, 33] {
        let error = faulty(96, FaultKind::Race, || {
            words().store(thread_idx_x(), 1);
            sync_threads();
            if thread_idx_x() == reader || thread_idx_x() == 65 {
                let _ = words().load(3);
            }
            if thread_idx_x() == 65 {
                words().store(3, 2);
            }
        });
        assert_eq!(error.thread, 65);
        assert!(
            error.what.contains(&format!("by thread {reader}:")),
            "{error}"
        );
    }
    // Every thread reads, a barrier, one writes, a barrier, every thread reads.
    block(96, || {
        for round in 0..4 {
            if thread_idx_x() == round * 31 {
                words().store(3, round);
            }
            sync_threads();
            assert_eq!(words().load(3), round);
            sync_threads();
        }
    })
    .unwrap();
}

#[test]
fn atomics_do_not_race() {
    let total = Memory::<u32>::zeroed(1);
    block(256, || {
        if thread_idx_x() == 0 {
            words().store(0, 0);
        }
        sync_threads();
        words().atomic_add_i32(0, thread_idx_x() as i32 - 100);
        let _ = words().fetch_add_u32(0, 0);
        sync_threads();
        if thread_idx_x() == 7 {
            view(&total).store(0, words().load(0));
        }
    })
    .unwrap();
    assert_eq!(total.to_vec(), [255 * 128 - 25_600]);
    // All threads add, the last one reads without a barrier: another one's addition is unordered.
    let error = faulty(64, FaultKind::Race, || {
        if thread_idx_x() == 0 {
            words().store(0, 0);
        }
        sync_threads();
        words().atomic_add_u32(0, 1);
        if thread_idx_x() == 63 {
            let _ = words().load(0);
        }
    });
    assert_eq!(error.thread, 63);
}

#[test]
fn narrow_elements_share_words_without_racing() {
    block(64, || {
        let halves = words().cast::<u16>();
        let bytes = words().at(128).cast::<u8>();
        halves.store(thread_idx_x(), thread_idx_x() as u16);
        bytes.store(thread_idx_x(), thread_idx_x() as u8);
        sync_threads();
        assert_eq!(halves.load(63 - thread_idx_x()), 63 - thread_idx_x() as u16);
        let i = thread_idx_x() / 4;
        assert_eq!(words().load(128 + i), 0x0302_0100 + 0x0404_0404 * i);
        let pair = thread_idx_x() / 2 * 2;
        assert_eq!(words().load(pair / 2), pair + (pair + 1) * 65536);
        sync_threads();
        if thread_idx_x() < 32 {
            words().store(thread_idx_x(), 7);
        }
        sync_threads();
        assert_eq!(words().load_v4(28), [7; 4]);
    })
    .unwrap();
    race(64, [2, 3], || {
        words().cast::<u8>().store(thread_idx_x().min(2), 1)
    });
    faulty(1, FaultKind::Uninitialised, || {
        words().cast::<u16>().store(0, 1);
        let _ = words().load(0);
    });
}

#[test]
fn async_copies() {
    let source = Memory::from_slice(&(0..256).collect::<Vec<u32>>());
    let stats = block(64, || {
        let (i, source) = (thread_idx_x(), view(&source));
        cp_async_16(words(), i * 4, *source, i * 4);
        cp_async_commit();
        cp_async_wait::<0>();
        assert_eq!(words().load_v4(i * 4), [0, 1, 2, 3].map(|j| i * 4 + j));
        sync_threads();
        assert_eq!(words().load(255 - i), 255 - i);
    })
    .unwrap();
    assert_eq!(stats.async_copies, 64);
    // Groups complete in order.
    block(1, || {
        let source = view(&source);
        cp_async_16(words(), 0, *source, 8);
        cp_async_commit();
        cp_async_16(words(), 4, *source, 12);
        cp_async_commit();
        cp_async_wait::<1>();
        assert_eq!(words().load(0), 8);
        cp_async_wait::<0>();
        assert_eq!(words().load(7), 15);
    })
    .unwrap();
    faulty(1, FaultKind::PendingCopy, || {
        let source = view(&source);
        cp_async_16(words(), 0, *source, 8);
        cp_async_commit();
        cp_async_16(words(), 4, *source, 12);
        cp_async_commit();
        cp_async_wait::<1>();
        let _ = words().load(4);
    });
    // A copy that is in no group is not waited for.
    faulty(1, FaultKind::PendingCopy, || {
        cp_async_16(words(), 0, *view(&source), 8);
        cp_async_wait::<0>();
        let _ = words().load(0);
    });
    faulty(1, FaultKind::PendingCopy, || {
        cp_async_16(words(), 0, *view(&source), 8);
        words().store(3, 1);
    });
    // Another thread needs a barrier behind the wait.
    race(64, [0, 63], || {
        if thread_idx_x() == 0 {
            cp_async_16(words(), 0, *view(&source), 8);
            cp_async_commit();
            cp_async_wait::<0>();
        }
        if thread_idx_x() == 63 {
            let _ = words().load(0);
        }
    });
    // The ring's classic: refilling what another lane may still be reading.
    race(32, [0, 1], || {
        if thread_idx_x() < 1 {
            words().store_v4(0, [0; 4]);
        }
        warp::sync_warp();
        if thread_idx_x() == 0 {
            let _ = words().load(2);
        }
        if thread_idx_x() == 1 {
            cp_async_16(words(), 0, *view(&source), 8);
        }
    });
    faulty(1, FaultKind::Misaligned, || {
        cp_async_16(words(), 2, *view(&source), 0)
    });
    faulty(1, FaultKind::Misaligned, || {
        cp_async_16(words(), 0, *view(&source), 2)
    });
    faulty(1, FaultKind::OutOfBounds, || {
        cp_async_16(words(), 256, *view(&source), 0)
    });
    faulty(1, FaultKind::OutOfBounds, || {
        cp_async_16(words(), 0, *view(&source), 256)
    });
}

#[test]
fn barriers_and_divergence() {
    let error = faulty(64, FaultKind::Deadlock, || {
        if thread_idx_x() < 32 {
            sync_threads();
            thread_fence();
        } else {
            sync_threads();
        }
    });
    assert!(
        error.what.contains("thread 0 at a block barrier") && error.what.contains("thread 32 at"),
        "{error}"
    );
    faulty(32, FaultKind::Deadlock, || {
        if thread_idx_x() == 3 {
            sync_threads();
        }
        let _ = warp::ballot(true);
    });
    faulty(32, FaultKind::Divergence, || {
        if thread_idx_x() == 3 {
            let _ = warp::reduce_add_u32(0);
        }
        let _ = warp::ballot(true);
    });
    faulty(32, FaultKind::Divergence, || {
        used(warp::uniform(thread_idx_x() / 31))
    });
    faulty(32, FaultKind::Divergence, || {
        used(warp::shuffle_xor_u32(1, 32))
    });
}

#[test]
fn endless_loops_panics_and_bad_launches() {
    let options = Options {
        step_limit: 10_000,
        ..Options::default()
    };
    let flag = Memory::<u32>::zeroed(1);
    let error = launch_with(
        options,
        "spin",
        3,
        32,
        0,
        || while view(&flag).load(0) == 0 {},
    )
    .unwrap_err();
    assert_eq!(error.kind, FaultKind::StepLimit);
    let error = launch_with(options, "spin", 1, 32, 0, || {
        loop {
            sync_threads();
        }
    });
    assert_eq!(error.unwrap_err().kind, FaultKind::StepLimit);
    let error = faulty(2, FaultKind::Panic, || {
        assert!(thread_idx_x() == 0, "thread is {}", thread_idx_x())
    });
    assert_eq!(
        (error.thread, error.what.as_str()),
        (1, "panic: thread is 1")
    );
    for (grid, threads, shared) in [
        (0, 32, 0),
        (1, 0, 0),
        (1, 1025, 0),
        (1, 32, 1 << 20),
        (1 << 31, 32, 0),
    ] {
        let error = launch("bad", grid, threads, shared, || {}).unwrap_err();
        assert_eq!(error.kind, FaultKind::Launch, "{error}");
    }
    let error = faulty(1, FaultKind::Panic, || {
        launch("inner", 1, 1, 0, || {}).unwrap();
    });
    assert!(error.what.contains("inside a kernel"), "{error}");
    // The worker is in order afterwards.
    block(32, sync_threads).unwrap();
}

#[test]
fn the_lowest_faulty_block_is_reported_when_one_worker_runs() {
    let error = launch_with(
        Options {
            workers: 1,
            ..Options::default()
        },
        "blocks",
        Grid::xy(4, 4),
        32,
        0,
        || {
            assert!(block_idx_y() * 4 + block_idx_x() < 6);
        },
    )
    .unwrap_err();
    assert_eq!(error.block, [2, 1, 0]);
}

/// output = input's matrix a (16 by 32) times b (32 by 8) plus c, once with b of s8, once of u8; in
/// fragments, word by word a lane each.
///
/// # Safety
/// As any kernel of two slices.
#[kernel(threads = 32)]
unsafe fn products(args: Args) {
    // SAFETY: 10 words a lane in, 8 out.
    let (input, output) = unsafe {
        (
            Global::<u32>::new(args.input),
            GlobalMut::<i32>::new(args.output),
        )
    };
    let lane = warp::lane_id();
    let word = |i: usize| input.load(i as u32 * 32 + lane);
    let a = [0, 1, 2, 3].map(word);
    let b = [4, 5].map(word);
    let c = [6, 7, 8, 9].map(|i| word(i) as i32);
    let d = [mma_u8_s8(a, b, c), mma_u8_u8(a, b, c)];
    for (i, d) in d.iter().flatten().enumerate() {
        output.store(i as u32 * 32 + lane, *d);
    }
}

#[test]
fn int8_matrix_products() {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as u8
    };
    let a: [[u8; 32]; 16] = std::array::from_fn(|_| std::array::from_fn(|_| random()));
    let b: [[u8; 8]; 32] = std::array::from_fn(|_| std::array::from_fn(|_| random()));
    let c: [[i32; 8]; 16] =
        std::array::from_fn(|_| std::array::from_fn(|_| i32::MAX - i32::from(random()) * 400));
    // The manual's figures of the fragments.
    let mut words = vec![0u32; 320];
    for lane in 0..32 {
        let (group, thread) = (lane / 4, lane % 4);
        for i in 0..16 {
            let row = if i < 4 || (8..12).contains(&i) {
                group
            } else {
                group + 8
            };
            let column = thread * 4 + (i & 3) + if i < 8 { 0 } else { 16 };
            words[i / 4 * 32 + lane] |= u32::from(a[row][column]) << (8 * (i & 3));
        }
        for i in 0..8 {
            let row = thread * 4 + (i & 3) + if i < 4 { 0 } else { 16 };
            words[(4 + i / 4) * 32 + lane] |= u32::from(b[row][group]) << (8 * (i & 3));
        }
        for i in 0..4 {
            let row = if i < 2 { group } else { group + 8 };
            words[(6 + i) * 32 + lane] = c[row][thread * 2 + (i & 1)] as u32;
        }
    }
    let (input, output) = (Memory::from_slice(&words), Memory::<i32>::uninit(256));
    let args = Args {
        input: input.slice(),
        output: output.slice(),
    };
    launch("products", 1, 32, 0, || {
        // SAFETY: views of live memory of the right sizes.
        unsafe { products(args) }
    })
    .unwrap();
    let found = output.to_vec();
    for lane in 0..32 {
        for i in 0..4 {
            let row = if i < 2 { lane / 4 } else { lane / 4 + 8 };
            let column = lane % 4 * 2 + (i & 1);
            let sum = |of: fn(u8) -> i32| {
                (0..32).fold(c[row][column], |sum, k| {
                    sum.wrapping_add(i32::from(a[row][k]) * of(b[k][column]))
                })
            };
            assert_eq!(found[i * 32 + lane], sum(|b| i32::from(b as i8)));
            assert_eq!(found[(4 + i) * 32 + lane], sum(i32::from));
        }
    }
}
