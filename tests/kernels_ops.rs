//! Every operator of the kernels against the reference, bit for bit: on the emulator, and on CUDA
//! where there is a driver (`ANSATZ_REQUIRE_CUDA` makes its absence a failure). `cpu.rs` runs the
//! same suite on the CPU.

mod suite;

use gpu::layout::Symbol;
use host::backend::kernels::{DeviceLimits, EmulatedDevice, KernelBackend};
use host::backend::{Backend, LayerExperts, LoadExperts, Rows, rows, rows_mut};
use host::expert::{Form, MatrixKind};

suite! {
    emulator = crate::suite::emulator();
    cuda = crate::suite::cuda();
}

/// Blocks have as many heads as there are multiprocessors for: those of an H200.
#[test]
fn emulator_of_132_multiprocessors_attends() {
    let limits = DeviceLimits {
        sms: 132,
        ..EmulatedDevice::LIMITS
    };
    let backend = KernelBackend::new(EmulatedDevice::new(limits)).unwrap();
    suite::ops::attention(&backend);
    suite::ops::attention_many(&backend);
}

/// Streams that were changed after they were checked: an error when results are read, not numbers.
fn damage_in_memory<B: LoadExperts>(make: impl Fn() -> B) {
    let mut rng = suite::Rng::fresh();
    let shape = suite::experts::small();
    for form in [Form::Fused, Form::Unfused] {
        for symbol in [Symbol::Pair, Symbol::Triple] {
            // What was counted stays counted: a back end each.
            let backend = make();
            let archive = suite::experts::archive(&mut rng, shape, 2, symbol);
            let layer = archive.archive.layer(0).unwrap();
            let mut records: Vec<_> = (0..2).map(|e| layer.record(e).unwrap()).collect();
            let mut bytes = records[1].bytes.to_vec();
            let stream = records[1].matrix(MatrixKind::Up).stream.clone();
            // Every lane's first state: one lane alone may fall back into step and end as it should.
            for lane in 0..32 {
                bytes[stream.start + 4 * lane + 1] ^= 0x10;
            }
            records[1].bytes = &bytes;
            let layer = LayerExperts::Coded { layer, records };
            let experts = backend.load_experts(layer, shape, form).unwrap();
            let mut out = backend.alloc::<f32>(shape.hidden).unwrap();
            let x = backend.upload(&vec![1.0f32; shape.hidden]).unwrap();
            let weights = backend.upload(&[1.0f32]).unwrap();
            let mut run = |expert: u32| {
                let ids = backend.upload(&[expert]).unwrap();
                let view = |buf| rows(buf, shape.hidden);
                let to = rows_mut(&mut out, shape.hidden);
                backend
                    .experts(&experts, view(&x), &ids, &weights, 1, 1, to)
                    .unwrap();
                backend.read(&out, 0, &mut [0.0f32])
            };
            assert!(run(0).is_ok(), "the other expert is whole");
            let error = run(1).unwrap_err().to_string();
            assert!(error.contains("host verify"), "{error}");
        }
    }
}

#[test]
fn emulator_reports_damage_in_memory() {
    damage_in_memory(|| suite::emulator().unwrap());
}

#[test]
fn cuda_reports_damage_in_memory() {
    match suite::cuda() {
        Ok(_) => damage_in_memory(|| suite::cuda().unwrap()),
        Err(error) => println!("skipped: {error}"),
    }
}

#[test]
fn a_view_past_its_buffer_is_an_error() {
    let backend = suite::emulator().unwrap();
    let x = backend.upload(&[1.0f32; 10]).unwrap();
    let weight = backend.upload(&[0.0f32; 8]).unwrap();
    let mut out = backend.alloc::<f32>(10).unwrap();
    let from = Rows {
        buf: &x,
        offset: 3,
        stride: 4,
    };
    let error = backend
        .rms_norm(from, &weight, 1e-6, 4, 2, rows_mut(&mut out, 4))
        .unwrap_err();
    let text = error.to_string();
    assert_eq!(text, "rms_norm: x: elements 3..11 of a buffer of 10");
    assert!(backend.read(&x, 8, &mut [0.0f32; 3]).is_err());
    assert!(backend.write(&mut out, 9, &[0.0; 2]).is_err());
}

#[test]
fn triples_that_do_not_fit_are_refused_with_a_remedy() {
    let mut rng = suite::Rng::fresh();
    let small = EmulatedDevice::new(DeviceLimits {
        shared_per_block: 99 << 10,
        shared_per_sm: 100 << 10,
        ..EmulatedDevice::LIMITS
    });
    let backend = KernelBackend::new(small).unwrap();
    let shape = suite::experts::small();
    for (symbol, fits) in [(Symbol::Pair, true), (Symbol::Triple, false)] {
        let archive = suite::experts::archive(&mut rng, shape, 2, symbol);
        let layer = archive.archive.layer(0).unwrap();
        for form in [Form::Fused, Form::Unfused] {
            let records = (0..2).map(|e| layer.record(e).unwrap()).collect();
            let layer = LayerExperts::Coded { layer, records };
            match backend.load_experts(layer, shape, form) {
                Ok(_) => assert!(fits),
                Err(error) => {
                    assert!(
                        !fits && error.to_string().contains("--symbols pair"),
                        "{error}"
                    );
                }
            }
        }
    }
}
