//! Experts that are copied before their layer has chosen: the same bits, fewer copies then.

use host::backend::Guess;

use super::*;

/// Layer 2 of the model, or another.
fn layer(number: u32) -> Layer {
    Layer {
        number,
        ..Layer::new(ScaleKind::Row)
    }
}

/// A case through `experts`, while `guess` is what is guessed of `next`, and `further` of `after`.
fn run<B: Backend>(
    b: &B,
    (experts, case): (&B::Experts, &Case),
    (next, guess): (&B::Experts, &[u32]),
    after: Option<(&B::Experts, &[u32])>,
) -> Result<Vec<u32>, B::Error> {
    let (x, weights) = (b.upload(&case.x)?, b.upload(&case.weights)?);
    let (ids, guess) = (b.upload(&case.ids)?, b.upload(guess)?);
    let mut out = b.alloc::<f32>(case.tokens * HIDDEN)?;
    let guess = Guess {
        experts: next,
        ids: &guess,
        further: &mut |i| Ok(after.filter(|_| i == 0).map(|(e, ids)| (e, ids.to_vec()))),
    };
    let (x, to) = (rows(&x, HIDDEN + 8), rows_mut(&mut out, HIDDEN));
    b.experts_and_next(experts, guess, x, &ids, &weights, TOP_K, case.tokens, to)?;
    let mut host = vec![0.0f32; case.tokens * HIDDEN];
    b.read(&out, 0, &mut host)?;
    Ok(host.into_iter().map(f32::to_bits).collect())
}

/// Ids of which the first `wrong` of each token are not those of the case.
fn guess(case: &Case, wrong: usize) -> Vec<u32> {
    let mut ids = case.ids.clone();
    for own in ids.chunks_mut(TOP_K) {
        let mut others = (0..EXPERTS as u32)
            .filter(|id| !case.ids.contains(id))
            .cycle();
        own[..wrong].fill_with(|| others.next().unwrap());
    }
    ids
}

/// Guesses that are right, partly and not at all, of the next layer and of the one after it, of as many tokens as are
/// guessed for, with a stage that holds little and one that holds all: the bits of one place.
fn guesses_change_no_bit<D: Device>(b: &KernelBackend<D>, devices: u8, seed: u64) {
    let layers = [1, 2, 3].map(layer);
    let on: Vec<u8> = (0..EXPERTS).map(|e| e as u8 % devices).collect();
    // What another device has is in its memory.
    let tiers = |own: Tier| -> Vec<Tier> {
        let tier = |d: &u8| if *d == 0 { own } else { Tier::VramAns };
        on.iter().map(tier).collect()
    };
    for (tokens, staged) in [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (4, 8)] {
        let cases: Vec<Case> = (0..3).map(|i| Case::new(tokens, seed + i)).collect();
        let expected: Vec<Vec<u32>> = (layers.iter().zip(&cases))
            .map(|(l, c)| c.run(b, &l.whole(b, Form::Fused)).unwrap())
            .collect();
        for own in [Tier::RamAns, Tier::DiskAns] {
            let what = format!("{tokens} tokens, {staged}, {own}");
            let place = |i: usize, t| {
                let placed = layers[i].spread(b, &tiers(t), &on, staged * TOP_K, Form::Fused);
                placed.unwrap()
            };
            let first = place(0, own);
            let (second, third) = (place(1, Tier::RamAns), place(2, Tier::RamAns));
            assert!(b.guessable(&second) && !b.guessable(&place(1, Tier::DiskAns)));
            for wrong in 0..=TOP_K {
                let (near, far) = (guess(&cases[1], wrong), guess(&cases[2], wrong));
                let after = Some((&third, &far[..]));
                let found = run(b, (&first, &cases[0]), (&second, &near), after).unwrap();
                assert!(found == expected[0], "{what} {wrong}");
                let found = run(b, (&second, &cases[1]), (&third, &far), None).unwrap();
                assert!(found == expected[1], "{what} {wrong}");
                let found = cases[2].run(b, &third).unwrap();
                assert!(found == expected[2], "{what} {wrong}");
            }
            let [near, right, further, _] = b.used(&second).ahead;
            assert_eq!(further, 0, "{what}");
            // The smallest stage has room for a layer's own alone, and what takes turns for nothing else.
            let room = devices > 1 || staged > tokens;
            assert!(!room || near > 0 && right < near, "{what}: {near} {right}");
        }
    }
}

#[test]
fn guesses_change_no_bit_on_the_emulator() {
    guesses_change_no_bit(&mock(Faults::default()), 1, seed());
    let device = || MockDevice::new(EmulatedDevice::default(), Faults::default());
    let two = KernelBackend::over(device(), vec![device()]).unwrap();
    guesses_change_no_bit(&two, 2, seed());
}

#[test]
fn guesses_change_no_bit_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    let device = || CudaDevice::new(0).unwrap();
    guesses_change_no_bit(&KernelBackend::new(device()).unwrap(), 1, seed());
    let two = KernelBackend::over(device(), vec![device()]).unwrap();
    guesses_change_no_bit(&two, 2, seed());
}

/// A layer copies what was not guessed, and the guesses of the next one.
#[test]
fn what_was_guessed_is_not_copied_again() {
    let b = mock(Faults::default());
    let done = b.device().done().clone();
    let copies = |work: &mut dyn FnMut()| {
        let before = done.copies.load(Relaxed);
        work();
        done.copies.load(Relaxed) - before
    };
    let tiered = |number, tier| {
        let placed = layer(number).tiered(&b, &[tier; EXPERTS], 4 * TOP_K, Form::Fused);
        placed.unwrap()
    };
    let [one, two, three] = [11, 12, 13].map(|seed| Case::new(1, seed));
    let first = tiered(1, Tier::RamAns);
    let (second, third) = (tiered(2, Tier::RamAns), tiered(3, Tier::RamAns));
    let none = guess(&three, TOP_K);
    let near = guess(&two, 1);
    let made = copies(&mut || drop(run(&b, (&first, &one), (&second, &near), None).unwrap()));
    assert_eq!(made, 2 * TOP_K as u64);
    let made = copies(&mut || drop(two.run(&b, &second).unwrap()));
    assert_eq!(made, 1, "three of four were there");
    assert_eq!(b.used(&second).ahead, [4, 3, 0, 0]);
    // Once; then all are copied.
    let made = copies(&mut || drop(two.run(&b, &second).unwrap()));
    assert_eq!(made, TOP_K as u64);
    // While the archive is read a layer further on is thought of, here for one copy at least: how long
    // reads take is not known.
    let reads = tiered(1, Tier::DiskAns);
    let far = guess(&three, 0);
    let after = Some((&third, &far[..]));
    let made = copies(&mut || drop(run(&b, (&reads, &one), (&second, &near), after).unwrap()));
    let more = made - 2 * TOP_K as u64;
    assert!((1..=TOP_K as u64).contains(&more), "{more}");
    drop(two.run(&b, &second).unwrap());
    let made = copies(&mut || drop(three.run(&b, &third).unwrap()));
    assert_eq!(made, TOP_K as u64 - more);
    assert_eq!(b.used(&third).ahead, [0, 0, more, more]);
    // What was guessed again one layer before counts as guessed there.
    run(&b, (&reads, &one), (&second, &near), after).unwrap();
    run(&b, (&second, &two), (&third, &far), None).unwrap();
    three.run(&b, &third).unwrap();
    assert_eq!(b.used(&third).ahead, [4, 4, more, more]);
    // What an expert in device memory is guessed for is nothing.
    let resident = tiered(3, Tier::VramAns);
    let made = copies(&mut || drop(run(&b, (&first, &one), (&resident, &none), None).unwrap()));
    assert_eq!(made, TOP_K as u64);
}

#[test]
fn guesses_that_are_wrong_end() {
    let b = mock(Faults::default());
    let tiered = |number| {
        let placed = layer(number).tiered(&b, &[Tier::RamAns; EXPERTS], 4 * TOP_K, Form::Fused);
        placed.unwrap()
    };
    let (first, second) = (tiered(1), tiered(2));
    let (one, two) = (Case::new(1, 21), Case::new(1, 22));
    let wrong = guess(&two, 3);
    let mut passes = 0;
    while b.guessable(&second) {
        run(&b, (&first, &one), (&second, &wrong), None).unwrap();
        two.run(&b, &second).unwrap();
        passes += 1;
        assert!(passes < 1000, "{:?}", b.used(&second));
    }
    assert!(passes >= 64, "{passes} passes of four guesses");
    let before = b.device().done().copies.load(Relaxed);
    run(&b, (&first, &one), (&second, &wrong), None).unwrap();
    let copies = b.device().done().copies.load(Relaxed) - before;
    assert_eq!(copies, TOP_K as u64, "its own alone");
}

/// A copy ahead that fails is an error; what comes after it is as ever.
#[test]
fn copies_ahead_that_fail_leave_nothing_behind() {
    for failing in 1..=2 * TOP_K as u64 {
        let b = mock(Faults {
            failing_copy: Some(failing),
            ..Faults::default()
        });
        let tiered = |number, tier| {
            let placed = layer(number).tiered(&b, &[tier; EXPERTS], 4 * TOP_K, Form::Fused);
            placed.unwrap()
        };
        let (first, second) = (tiered(1, Tier::DiskAns), tiered(2, Tier::RamAns));
        let third = tiered(3, Tier::RamAns);
        let [one, two, three] = [31, 32, 33].map(|seed| Case::new(1, seed));
        let after = Some((&third, &three.ids[..]));
        let error = run(&b, (&first, &one), (&second, &two.ids), after).unwrap_err();
        assert!(
            matches!(error, KernelError::Device(DeviceError::Driver { .. })),
            "{error}"
        );
        let expected = two.run(&b, &layer(2).whole(&b, Form::Fused)).unwrap();
        assert!(two.run(&b, &second).unwrap() == expected);
        let expected = three.run(&b, &layer(3).whole(&b, Form::Fused)).unwrap();
        assert!(three.run(&b, &third).unwrap() == expected);
        let done = b.device().done().clone();
        drop((first, second, third, b));
        assert_eq!(done.allocated.load(Relaxed), 0);
        assert_eq!(done.pinned.load(Relaxed), 0);
    }
}

/// Two experts change places by way of the stage, where something waited for a layer that then did not come.
#[test]
fn an_exchange_spoils_nothing_that_is_there() {
    let b = mock(Faults::default());
    let second = layer(2).tiered(&b, &[Tier::RamAns; EXPERTS], 4 * TOP_K, Form::Fused);
    let (second, first) = (
        second.unwrap(),
        repin::moving(&layer(1), &b, &repin::places()),
    );
    let two = Case::new(1, 42);
    let expected = two.run(&b, &layer(2).whole(&b, Form::Fused)).unwrap();
    let mut moved = 0;
    for n in 0..24 {
        let wanted = repin::token(n, &[16, 19, 24, 31]);
        wanted.run(&b, &first).unwrap();
        // Resident: slots of the stage from the first on are free.
        let one = repin::token(n, &[8, 9, 10, 11]);
        run(&b, (&first, &one), (&second, &two.ids), None).unwrap();
        moved += usize::from(repin::step(&b, &first).unwrap());
        assert!(two.run(&b, &second).unwrap() == expected, "token {n}");
    }
    assert_eq!(moved, TOP_K);
    let [guessed, chosen, ..] = b.used(&second).ahead;
    assert!(
        guessed == chosen && chosen >= 4 * (24 - moved as u64),
        "{guessed} {chosen}"
    );
}

/// A model's tokens are the same with and without; what was guessed is said, and kept with the usage, by which the next
/// plan goes.
#[test]
fn a_model_guesses_its_own_layers() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(ScaleKind::Row);
    let fixed = fixed(dir.path());
    let (rates, usage) = (dir.path().join("rates.json"), dir.path().join("usage.txt"));
    let vram = (fixed + (2 << 20)).to_string();
    let generate = |ahead: &str, ram: &str, record: bool| -> Value {
        let mut command = host(&[&"generate", &"-m", &model, &"--prompt-ids", &"256,72,105"]);
        command.args([
            "-n",
            "24",
            "--temp",
            "0",
            "--ignore-eos",
            "-c",
            "64",
            "--device",
            "emulator",
        ]);
        command.args(["--vram-budget", &vram, "--ram-budget", ram, "--json"]);
        command.args(["--tiers", "vram-ans,ram-ans,disk-ans"]);
        command.arg("--rates").arg(&rates);
        if record {
            command.arg("--usage").arg(&usage);
        }
        let done = command.env("ANSATZ_COPY_AHEAD", ahead).assert().success();
        serde_json::from_slice(&done.get_output().stdout).unwrap()
    };
    for ram in ["64M", "700k"] {
        let with = generate("on", ram, true);
        let without = generate("off", ram, false);
        assert_eq!(with["token_ids"], without["token_ids"]);
        assert!(without["placement"]["ahead"].is_null(), "{without}");
        let ahead = &with["placement"]["ahead"];
        let [guessed, chosen] = ["guessed", "chosen"].map(|k| ahead[k].as_u64().unwrap());
        assert!(guessed > 24 && chosen > 0 && chosen <= guessed, "{ahead}");
        let further = ahead["further"].as_u64().unwrap();
        let reads = with["placement"]["tiers"].to_string().contains("disk-ans");
        assert_eq!(reads, ram != "64M", "{with}");
        assert!(reads || further == 0, "{ahead}");
    }
    let text = std::fs::read_to_string(&usage).unwrap();
    let line = text.lines().find(|l| l.starts_with("# guessed ")).unwrap();
    let words: Vec<f64> = (line.split(' ').skip(2))
        .map(|w| w.parse().unwrap())
        .collect();
    let plan = |profile: Option<&Path>| -> Value {
        let mut command = host(&[&"plan", &"-m", &model, &"--device", &"emulator", &"--json"]);
        command.args(["--vram-budget", &vram, "--ram-budget", "64M", "-c", "64"]);
        command.arg("--rates").arg(&rates);
        profile.map(|file| command.arg("--profile").arg(file));
        let done = command.assert().success();
        serde_json::from_slice(&done.get_output().stdout).unwrap()
    };
    let foreseen = |plan: Value| plan["plan"]["foreseen"].as_f64().unwrap();
    let unknown = 1.0 - 1.4 / 2.0; // four layers
    assert!(
        (foreseen(plan(None)) - unknown).abs() < 1e-9,
        "nothing is known"
    );
    let expected = if words[0] >= 256.0 {
        words[1] / words[0]
    } else {
        unknown
    };
    assert!(
        (foreseen(plan(Some(&usage))) - expected).abs() < 1e-9,
        "{line}"
    );
}
