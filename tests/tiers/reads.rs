//! Records that stay in memory for a while after they were read.

use super::*;

/// Tokens that want the same experts again, others, and more than there is room for: the bits of one place, of so many
/// reads fewer.
fn records_are_kept<D: Device>(b: &KernelBackend<D>, seed: u64) {
    for layer in [Layer::new(ScaleKind::Row), Layer::plane3()] {
        let whole = layer.whole(b, Form::Fused);
        // Room for two tokens' experts.
        let place = || layer.tiered(b, &[Tier::DiskAns; EXPERTS], 2 * TOP_K, Form::Fused);
        let experts = place().unwrap();
        let run = |case: &Case| {
            let before = b.used(&experts).kept;
            assert!(case.run(b, &experts).unwrap() == case.run(b, &whole).unwrap());
            b.used(&experts).kept - before
        };
        let token = |n: u32| repin::token(seed + u64::from(n), &[n, n + 1, n + 2, n + 3]);
        assert_eq!(run(&token(0)), 0);
        assert_eq!(run(&token(0)), 4, "all");
        assert_eq!(run(&token(2)), 2, "those that both want");
        assert_eq!(run(&token(20)), 0);
        // Seven tokens take turns: most of what they want is read.
        let many = Case::new(7, seed);
        let chosen: BTreeSet<u32> = many.ids.iter().copied().collect();
        assert!(chosen.len() > 2 * TOP_K && run(&many) <= 2 * TOP_K as u64);
        run(&token(20));
        assert_eq!(run(&token(20)), 4);
        // Another layer with this number has records of its own.
        let again = place().unwrap();
        assert!(token(20).run(b, &again).unwrap() == token(20).run(b, &whole).unwrap());
        assert_eq!(b.used(&again).kept, 0);
    }
}

#[test]
fn records_are_kept_on_the_emulator() {
    records_are_kept(&mock(Faults::default()), seed());
}

#[test]
fn records_are_kept_on_cuda() {
    let Some(_gpu) = gpu() else { return };
    records_are_kept(
        &KernelBackend::new(CudaDevice::new(0).unwrap()).unwrap(),
        seed(),
    );
}

/// What is there needs no archive any more; what is not is an error that names it.
#[test]
fn what_is_kept_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ansx");
    std::fs::copy(model(ScaleKind::Row).join("experts.ansx"), &path).unwrap();
    let (layer, b) = (Layer::open(&path), mock(Faults::default()));
    let tiers = [Tier::DiskAns; EXPERTS];
    let experts = layer.tiered(&b, &tiers, 2 * TOP_K, Form::Fused).unwrap();
    let token = repin::token(1, &[3, 5, 7, 9]);
    let expected = token.run(&b, &experts).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(0).unwrap();
    assert!(token.run(&b, &experts).unwrap() == expected);
    let error = repin::token(1, &[3, 5, 7, 8]).run(&b, &experts);
    let error = error.unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Read {
                layer: 2,
                expert: 8,
                ..
            }
        ),
        "{error}"
    );
    assert!(token.run(&b, &experts).unwrap() == expected);
}
