//! Every single allocation refused, and devices that are lost at any call: the same tokens by a smaller plan,
//! or one error.

use std::sync::atomic::AtomicU64;

use host::backend::kernels::Done;
use host::engine::{Engine, EngineError};
use host::placement::memory;

use super::*;

/// Logits of a prompt, of a token by itself, and of one that is recorded or replayed.
fn logits(engine: &mut dyn Engine) -> Result<Vec<Vec<f32>>, EngineError> {
    let ids: Vec<u32> = (0..12).map(|i| (i * 37 + 11) % 250).collect();
    engine.begin(16, Wanted::Last)?;
    [&ids[..9], &ids[9..10], &ids[10..11], &ids[11..]]
        .into_iter()
        .map(|part| engine.forward(part, Wanted::Last))
        .collect()
}

/// What became of a run.
struct Run {
    done: Vec<Arc<Done>>,
    logits: Result<Vec<Vec<f32>>, EngineError>,
}

impl Run {
    /// On devices of these faults, which believe in memory for what the request says.
    fn new(faults: &[Faults], request: &Request) -> Self {
        let devices = faults.iter().zip(["one", "two"]).map(|(faults, name)| {
            let faults = Faults {
                name: Some(name),
                ..faults.clone()
            };
            MockDevice::new(EmulatedDevice::default(), faults)
        });
        let devices: Vec<_> = devices.collect();
        let done: Vec<_> = devices.iter().map(|d| d.done().clone()).collect();
        let given = devices.into_iter().map(|d| (d, 1 << 40)).collect();
        let model = model(ScaleKind::Row);
        let opened = engine::open_placed(given, &model, &options(), request, &mut |_, _| ());
        let logits = opened.and_then(|mut engine| logits(engine.as_mut()));
        for done in &done {
            let left = [&done.allocated, &done.pinned].map(|n| n.load(Relaxed));
            assert_eq!(left, [0, 0], "{faults:?}");
        }
        Self { done, logits }
    }
}

/// Some experts in every tier, and on both devices where there are two.
fn everywhere(dir: &Path, devices: usize) -> Request {
    match devices {
        1 => request(dir, fixed(dir) + (2 << 20), 300_000),
        _ => decode::spread(dir, fixed(dir) + (8 << 20), 300_000),
    }
}

/// None so far; two devices copy what they exchange.
fn fault() -> Faults {
    Faults {
        apart: true,
        ..Faults::default()
    }
}

/// Calls of one kind that a device gets, some of them: every `n`-th from a random one on.
fn some(all: &AtomicU64, n: usize) -> impl Iterator<Item = u64> {
    let all = all.load(Relaxed);
    (1 + seed() % n as u64..=all).step_by(n)
}

/// Every so many-th of them is tried.
const STEP: usize = 29;

#[test]
fn any_allocation_may_be_refused() {
    let dir = tempfile::tempdir().unwrap();
    for devices in [1, 2] {
        let request = everywhere(dir.path(), devices);
        let none = vec![fault(); devices];
        let whole = Run::new(&none, &request);
        let expected = whole.logits.unwrap();
        for d in 0..devices {
            let mut same = 0;
            let mut errors = Vec::new();
            for n in some(&whole.done[d].allocations, STEP) {
                let mut faults = none.clone();
                faults[d].failing_allocation = Some(n);
                match Run::new(&faults, &request).logits {
                    Ok(found) => {
                        assert!(found == expected, "device {d}, allocation {n}");
                        same += 1;
                    }
                    Err(e) => errors.push((n, e.to_string())),
                }
            }
            // The first few are the back end's own, before there is a plan to make smaller.
            for (n, error) in &errors {
                let said = *n <= 8 && error.contains("out of memory");
                assert!(said, "device {d}, allocation {n}: {error}");
            }
            assert!(same > 0, "{errors:?}");
        }
    }
}

#[test]
fn a_lost_device_is_one_error() {
    let dir = tempfile::tempdir().unwrap();
    for devices in [1, 2] {
        let request = everywhere(dir.path(), devices);
        let none = vec![fault(); devices];
        let whole = Run::new(&none, &request);
        whole.logits.unwrap();
        for d in 0..devices {
            for n in some(&whole.done[d].calls, 151) {
                let mut faults = none.clone();
                faults[d].lost = Some(n);
                let error = Run::new(&faults, &request).logits.err();
                let error = error.unwrap_or_else(|| panic!("device {d}, call {n}: no error"));
                let error = error.to_string();
                assert!(error.contains("a device that was to be lost"), "{error}");
                assert_eq!(error.matches("INJECTED").count(), 1, "{error}");
            }
        }
    }
}

/// What a plan counts for rows of experts elsewhere is what a batch of tokens takes for them.
#[test]
fn rows_of_experts_elsewhere_are_counted() {
    let layer = Layer::new(ScaleKind::Row);
    let config = host::model::Config::read(&model(ScaleKind::Row)).unwrap();
    for tokens in [1, 7, 40] {
        let case = Case::new(tokens, 5);
        for (tier, staged) in [(Tier::RamRaw, 0), (Tier::RamAns, 2), (Tier::DiskAns, 2)] {
            let b = mock(Faults::default());
            let experts = layer.tiered(&b, &[tier; EXPERTS], staged, Form::Fused);
            let experts = experts.unwrap();
            let [x, ids, weights] = [4 * HIDDEN + 32, 4 * TOP_K, 4 * TOP_K].map(|n| n * tokens);
            b.device().done().largest.store(0, Relaxed);
            case.run(&b, &experts).unwrap();
            let largest = b.device().done().largest.load(Relaxed);
            assert!(largest > x.max(ids).max(weights));
            assert_eq!(
                largest,
                4 * HIDDEN * TOP_K * tokens,
                "{tier}, {tokens} tokens"
            );
            let config = host::model::Config {
                batch: tokens,
                ..config.clone()
            };
            let counted = memory::given(&config, 4096, true, 0);
            assert_eq!(counted, memory::allocation(largest as u64));
            assert_eq!(
                memory::given(&config, 4096, true, 2),
                memory::allocation(3 * largest as u64)
            );
            assert_eq!(memory::given(&config, 4096, false, 0), 0);
        }
    }
}
