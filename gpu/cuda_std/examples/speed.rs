//! What the emulator's operations cost, in processor time (Linux): nanoseconds a CUDA thread.
#![allow(missing_docs)]

#[cfg(target_arch = "nvptx64")]
fn main() {}

fn used<T>(value: T) {
    std::hint::black_box(value);
}

/// Nanoseconds that this OS thread has run.
#[cfg(not(target_arch = "nvptx64"))]
fn run_time() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let first = text.split_whitespace().next();
    first
        .and_then(|number| number.parse().ok())
        .expect("a number")
}

#[cfg(not(target_arch = "nvptx64"))]
fn main() {
    use cuda_std::emulator::{Memory, Options, launch, launch_with};
    use cuda_std::mem::{Global, GlobalMut};
    use cuda_std::shared::Shared;
    use cuda_std::{thread, warp};

    // One worker: the time is this thread's.
    let options = Options {
        workers: 1,
        ..Options::default()
    };
    const ROUNDS: u32 = 20_000;
    let memory = Memory::from_slice(&vec![1u32; 4096]);
    let time = |name: &str, body: &(dyn Fn(u32) + Sync)| {
        let start = run_time();
        let result = launch(name, 1, 256, 16384, || {
            // SAFETY: 16 KiB.
            let shared = unsafe { Shared::<u32>::dynamic(0, 4096) };
            for i in 0..16 {
                shared.store(thread::thread_idx_x() + 256 * i, i);
            }
            thread::sync_threads();
            for round in 0..ROUNDS {
                body(round);
            }
        });
        let stats = result.expect("a correct kernel");
        let each = (run_time() - start) / f64::from(ROUNDS) / stats.threads as f64;
        println!("{name:24} {each:6.1} ns");
    };
    // SAFETY: 16 KiB of shared memory, 4,096 words of global memory.
    let shared = || unsafe { Shared::<u32>::dynamic(0, 4096) };
    time("nothing", &|_| {});
    time("shared load", &|i| used(shared().load(i * 97 % 4096)));
    time("shared load, 16 bytes", &|i| {
        used(shared().load_v4(i * 4 % 4096))
    });
    // SAFETY: as above.
    time("global view and load", &|i| unsafe {
        used(Global::<u32>::new(memory.slice()).load(i % 4096));
    });
    // SAFETY: as above.
    time("global view and store", &|i| unsafe {
        GlobalMut::<u32>::new(memory.slice()).store(i % 4096, i);
    });
    time("ballot", &|i| used(warp::ballot(i & 1 == 0)));
    time("shuffle", &|i| used(warp::shuffle_xor_u32(i, 1)));
    time("block barrier", &|_| thread::sync_threads());

    let start = run_time();
    let stats = launch_with(options, "blocks", 4000, 256, 0, || {}).expect("a correct kernel");
    let each = (run_time() - start) / 1e3 / stats.blocks as f64;
    println!("{:24} {each:6.1} us", "block of 256, empty");
    let start = run_time();
    (0..50_000).for_each(|_| used(launch("small", 1, 32, 0, || {})));
    println!(
        "{:24} {:6.1} us",
        "launch of 32, empty",
        (run_time() - start) / 5e7
    );
}
